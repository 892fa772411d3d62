"""The law of whole texts at temperature > 0, end to end, against exact enumeration.

Thousands of rows decode the same prompt with different keys. The first token comes from the
prefill, the others from steps that draft, verify and commit; their joint law must be the
target's, whatever the rule, tree, filters or draft vocabulary. Biased rules must fail.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
import tiny

from eagle_jax import decode, draft, tree, verify
from eagle_jax.config import DecodeConfig, DraftConfig, SamplingConfig, TreeConfig

V, B, NEW, PROMPT = 5, 4096, 3, [2, 0]
T = tiny.target_config(
    "law", vocab_size=V, d_model=16, d_mlp=16, n_layers=2, head_dim=8
)
DRAFTS = {
    "whole": tiny.draft_config(T, "eagle3"),
    "reduced": tiny.draft_config(T, "eagle3", vocab_size=3),
}
DYNAMIC = TreeConfig(width=2, depth=3, n_nodes=6)
BUSHY = tree.static(((0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0)))
CHAIN = tree.static(((0,), (0, 0), (0, 0, 0)))
POINT = SamplingConfig(temperature=1.0)
SAMPLED = SamplingConfig(temperature=1.0, rule="sampled")
FILTERED = SamplingConfig(temperature=0.8, top_k=4, top_p=0.85)

# name: head, tree, law
RUNS: dict[str, tuple[str, TreeConfig, SamplingConfig]] = {
    "plain": ("whole", TreeConfig(), POINT),
    "point, dynamic": ("whole", DYNAMIC, POINT),
    "point, reduced, filtered": ("reduced", DYNAMIC, FILTERED),
    "sampled, bushy": ("whole", BUSHY, SAMPLED),
    "sampled, chain": ("whole", CHAIN, SAMPLED),
    "sampled, reduced, filtered": (
        "reduced",
        BUSHY,
        dataclasses.replace(FILTERED, rule="sampled"),
    ),
}


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(decode, "CHUNK", 4)


@functools.cache
def params_of(head: str) -> dict:
    return tiny.params(11, T, DRAFTS[head])


@functools.cache
def exact(sampling: SamplingConfig) -> np.ndarray:
    target = params_of("whole")["target"]

    @functools.cache
    def after(prefix: tuple[int, ...]) -> np.ndarray:
        return reference.llama(target, [*PROMPT, *prefix], T)["logits"][-1]

    return reference.law_of_text(after, NEW, V, sampling)


def config(head: str, shape: TreeConfig, sampling: SamplingConfig, name: str = "law"):
    d = DraftConfig() if shape.n_nodes == 1 else DRAFTS[head]
    return DecodeConfig(dataclasses.replace(T, name=name), d, shape, sampling)


def frequencies(cfg: DecodeConfig, head: str, rounds: int) -> tuple[np.ndarray, float]:
    """Counts of three-token texts, and the mean of drafted tokens accepted a step."""
    counts = np.zeros((V,) * NEW)
    accepted = []
    for i in range(rounds):
        state = decode.start(
            params_of(head), [PROMPT] * B, cfg, NEW, seed=i * B, max_len=12
        )
        _, out = decode.jit_loop(params_of(head), state, cfg, NEW)
        assert out.healthy.all() and (out.n_tokens == NEW).all()
        np.add.at(counts, tuple(np.asarray(out.tokens).T), 1)
        n = np.asarray(out.n_accepted)
        accepted.append(n[n >= 0].mean())
    return counts, float(np.mean(accepted))


@pytest.mark.parametrize("name", list(RUNS))
def test_texts_have_the_law_of_the_target(name):
    head, shape, sampling = RUNS[name]
    law = exact(dataclasses.replace(sampling, rule="point"))
    counts, accepted = frequencies(config(head, shape, sampling), head, rounds=4)
    measured, noise = reference.distance(counts, law)
    p = reference.p_value(counts, law)
    print(
        f"\nLAW {name}: total variation {measured:.4f}, noise alone {noise:.4f}, "
        f"p-value {p:.3f}, accepted {accepted:.2f}"
    )
    assert p > 1e-3
    assert measured < 1.5 * noise
    assert counts[law == 0].sum() == 0  # nothing outside the filtered set, ever
    if shape.n_nodes > 1:
        assert accepted > 0.3  # the drafts really took part


# --- rules that are nearly right must fail


def eager_walk(tree_: tree.Tree, sampled: jax.Array, depth: int) -> verify.Verdict:
    """Takes the first child for granted where the target drew token 0 or 1 at the root."""
    first = jnp.where(sampled[:, 0] < 2, tree_.tokens[:, 1], sampled[:, 0])
    return WALK(tree_, sampled.at[:, 0].set(first), depth)


WALK, ACCEPT, DRAW = verify.walk, verify.accept_with_q, draft.propose_drawn


def accept_without_residual(keys, tree_, log_q, p, depth):
    """Draws from p, not from what is left of it, where the first drafts are rejected."""
    verdict = ACCEPT(keys, tree_, log_q, p, depth)
    again = jax.vmap(jax.random.fold_in, (0, None))(keys, 1)
    sampled = verify.sample(again, jnp.log(p), SamplingConfig(temperature=1.0))
    none = verdict.n_accepted == 0
    return verdict._replace(
        next_token=jnp.where(none, sampled[:, 0], verdict.next_token)
    )


def draw_at_another_temperature(*args, temperature: float, **sizes):
    """Draws children at half the temperature at which q is written down."""
    drafted, _ = DRAW(*args, temperature=temperature / 2, **sizes)
    _, log_q = DRAW(*args, temperature=temperature, **sizes)
    return drafted, log_q


BIASED = {
    "eager walk": (verify, "walk", eager_walk, "point, dynamic"),
    "no residual": (
        verify,
        "accept_with_q",
        accept_without_residual,
        "sampled, chain",
    ),
    "other q": (draft, "propose_drawn", draw_at_another_temperature, "sampled, chain"),
}


@pytest.mark.parametrize("kind", list(BIASED))
def test_a_biased_rule_is_rejected(monkeypatch, kind):
    module, function, biased, name = BIASED[kind]
    monkeypatch.setattr(module, function, biased)
    head, shape, sampling = RUNS[name]
    # Another name, another program: nothing compiled earlier is reused.
    counts, _ = frequencies(config(head, shape, sampling, kind), head, rounds=4)
    law = exact(POINT)
    measured, noise = reference.distance(counts, law)
    p = reference.p_value(counts, law)
    print(
        f"\nBIASED {kind}: total variation {measured:.4f}, noise alone {noise:.4f}, "
        f"p-value {p:.1e}"
    )
    assert p < 1e-6


# --- seeds and rows


@pytest.mark.parametrize("name", ["point, dynamic", "sampled, bushy"])
def test_a_seed_fixes_the_text_and_rows_keep_theirs(name):
    head, shape, sampling = RUNS[name]
    cfg = config(head, shape, sampling)
    p = params_of(head)
    prompts = [[1], [2, 0], [4, 4, 4, 1, 0, 3, 2], [3, 3]]

    def texts(prompts: list[list[int]], seed: int) -> list[list[int]]:
        return decode.generate(p, prompts, cfg, 20, seed, max_len=40)

    together = texts(prompts, 7)
    assert texts(prompts, 7) == together
    other = texts(prompts, 1007)
    assert all(a != b for a, b in zip(together, other, strict=True))
    for row in range(4):
        assert texts([prompts[row]], 7 + row) == [together[row]]


def test_a_perfect_draft_is_always_accepted():
    # Drawn from the target's own law: p / q is 1 everywhere.
    t = tiny.markov_target_config(6)
    d = tiny.markov_draft_config(t)
    table = np.random.default_rng(11).normal(size=(6, 6))
    p = tiny.markov_params(table, table, t, d)
    cfg = DecodeConfig(t, d, CHAIN, SAMPLED)
    state = decode.start(p, [[x % 6] for x in range(256)], cfg, 13, max_len=24)
    _, out = decode.jit_loop(p, state, cfg, 13)
    n = np.asarray(out.n_accepted)
    assert n[n >= 0].mean() > 2.999  # rounding may cost one in a million

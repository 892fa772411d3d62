"""`decode`: greedy output does not depend on drafts, trees, neighbours or cache rubbish."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
import tiny

from eagle_jax import cache, decode, draft, target, tree
from eagle_jax.config import (
    DecodeConfig,
    DraftConfig,
    RopeScaling,
    SamplingConfig,
    TargetConfig,
    TreeConfig,
)

T = tiny.target_config(n_layers=2)
D = tiny.draft_config(T, "eagle3", vocab_size=50)
V = T.vocab_size
NEW = 24
PROMPTS = [
    [17],
    [3, 99, 4, 4, 0, 100, 56],
    np.random.default_rng(0).integers(0, V, 30).tolist(),
]
TREES = {
    "chain of 1": tree.chain(1),
    "chain of 4": tree.chain(4),
    "four children": TreeConfig(width=4, depth=1, n_nodes=5),
    "dynamic": TreeConfig(width=3, depth=3, n_nodes=10),
    "all candidates": TreeConfig(width=2, depth=2, n_nodes=7),
    "eagle1 static": tree.static(tree.EAGLE1_PATHS),
}
GROWN = DecodeConfig(T, D, TREES["dynamic"])


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(decode, "CHUNK", 32)


@pytest.fixture(scope="module")
def params():
    return tiny.params(5, T, D)


@pytest.fixture(scope="module")
def plain(params):
    """Greedy output without a draft."""
    return decode.generate(params, PROMPTS, DecodeConfig(T), NEW)


def zeroed(params: dict) -> dict:
    own = {k: jax.tree.map(jnp.zeros_like, v) for k, v in params["draft"].items()}
    kept = {k: params["draft"][k] for k in ("embed", "draft_to_target")}
    return params | {"draft": own | kept}


def test_plain_decoding_equals_full_forwards_in_numpy(params, plain):
    text = list(PROMPTS[1])
    for token in plain[1][:8]:
        logits = reference.llama(params["target"], text, T)["logits"][-1]
        best = np.sort(logits)[-2:]
        assert best[1] - best[0] > 1e-3  # no near-tie, so the argmax is certain
        assert token == int(np.argmax(logits))
        text.append(token)


@pytest.mark.parametrize("shape", list(TREES))
def test_greedy_output_is_that_of_plain_decoding(params, plain, shape):
    cfg = DecodeConfig(T, D, TREES[shape])
    assert decode.generate(params, PROMPTS, cfg, NEW) == plain
    assert decode.generate(zeroed(params), PROMPTS, cfg, NEW) == plain  # same compile


@pytest.mark.parametrize("n_layers", [1, pytest.param(8, marks=pytest.mark.slow)])
def test_greedy_output_with_an_eagle1_head_is_that_of_plain_decoding(n_layers):
    t = tiny.target_config(n_layers=n_layers, qkv_bias=True)
    d = tiny.draft_config(t, "eagle1")
    p = tiny.params(6, t, d)
    want = decode.generate(p, PROMPTS, DecodeConfig(t), NEW)
    cfg = DecodeConfig(t, d, TREES["dynamic"])
    assert decode.generate(p, PROMPTS, cfg, NEW) == want


@pytest.mark.slow
def test_200_prompts_of_128_tokens_are_those_of_plain_decoding(params):
    """R102."""
    rng = np.random.default_rng(9)
    prompts = [rng.integers(0, V, n).tolist() for n in rng.integers(1, 32, 200)]
    want = decode.generate(params, prompts, DecodeConfig(T), 128)
    assert decode.generate(params, prompts, GROWN, 128) == want
    assert len({tuple(text) for text in want}) > 190


@pytest.mark.parametrize("row", range(3))
def test_a_row_of_a_batch_equals_its_own_run(params, plain, row):
    assert decode.generate(params, [PROMPTS[row]], GROWN, NEW) == [plain[row]]


# --- drafts whose hits and misses are chosen

ORACLE = DecodeConfig(dataclasses.replace(T, name="oracle"), D, TREES["dynamic"])


def propose_oracle(
    params, state, root, cfg: DraftConfig, shape: TreeConfig
) -> tree.Tree:
    """Three children per level, the true one at a chosen rank, below the last true one.

    `text` holds each row's prompt and continuation, `rank` the place of the true child at
    each level, `hits` how many levels are right at all.
    """
    B, W, depth = root.shape[0], 3, 3
    levels = jnp.arange(depth)
    at = state.cache.length[:, None] + 1 + levels[None]
    true = jnp.take_along_axis(params["text"], at, axis=1)
    hit = levels[None] < params["hits"][:, None]
    true = jnp.where(hit, true, (true + 50) % V)
    offset = (jnp.arange(W)[None] - params["rank"][:, None]) % W
    tokens = (true[:, :, None] + offset[None]) % V  # [B, level, place]
    above = 1 + W * (levels - 1) + jnp.roll(params["rank"], 1)
    parents = jnp.repeat(jnp.where(levels == 0, 0, above), W)
    depths = jnp.repeat(1 + levels, W)
    zero = jnp.zeros((B, 1), jnp.int32)

    def rows(x: jax.Array) -> jax.Array:
        wide = jnp.broadcast_to(x[None], (B, W * depth)).astype(jnp.int32)
        return jnp.concatenate([zero, wide], axis=1)

    tokens = jnp.concatenate([root[:, None], tokens.reshape(B, -1)], axis=1)
    return tree.Tree(tokens, rows(parents), rows(depths), jnp.zeros(tokens.shape))


@pytest.fixture
def oracle(monkeypatch, params, plain):
    """Builds parameters for `propose_oracle`; ORACLE's programs are compiled with it."""
    monkeypatch.setattr(draft, "propose", propose_oracle)
    text = np.zeros((3, 80), np.int32)
    for row, prompt, after in zip(text, PROMPTS, plain, strict=True):
        row[: len(prompt) + NEW] = prompt + after

    def build(
        hits: list[int], rank: tuple[int, int, int] = (0, 0, 0)
    ) -> dict[str, Any]:
        known = {
            "text": jnp.asarray(text),
            "hits": jnp.asarray(hits, jnp.int32),
            "rank": jnp.asarray(rank, jnp.int32),
        }
        return params | {"draft": params["draft"] | known}

    return build


# No slot to spare: the longest row is written at the very end of its cache, and goes on
# being written there when it has ended before the others.
SLOTS = max(map(len, PROMPTS)) + NEW + ORACLE.tree.depth


def run(params: dict) -> tuple[decode.DecodeState, decode.Generation]:
    state = decode.start(params, PROMPTS, ORACLE, NEW, max_len=SLOTS)
    assert state.target_cache.n_slots == SLOTS
    return decode.jit_loop(params, state, ORACLE, NEW)


@pytest.mark.parametrize("hits", [[3, 3, 3], [0, 0, 0], [0, 1, 3], [2, 3, 1]], ids=str)
def test_any_mixture_of_hits_and_misses_gives_the_same_text(oracle, plain, hits):
    _, out = run(oracle(hits))
    assert decode.unpack(out) == plain
    for row, n in enumerate(hits):
        accepted = np.asarray(out.n_accepted[row])
        steps = -(-(NEW - 1) // (n + 1))
        assert (accepted[: steps - 1] == n).all()  # the last step may run off the text
        assert (accepted[steps:] == -1).all()
        emitted = np.asarray(out.n_emitted[row])
        assert (
            emitted[:steps].sum() == NEW - 1 and (emitted[: steps - 1] == n + 1).all()
        )


@pytest.mark.parametrize(
    ("hits", "rank"),
    [([3, 2, 3], (2, 1, 2)), ([3, 2, 3], (1, 2, 0)), ([0, 1, 3], (2, 1, 2))],
)
def test_accepting_later_siblings_leaves_the_caches_of_a_plain_prefill(
    oracle, plain, monkeypatch, hits, rank
):
    p = oracle(hits, rank)
    end, out = run(p)
    assert decode.unpack(out) == plain
    assert out.n_accepted[:, 0].tolist() == hits
    lengths = np.asarray(end.target_cache.length)
    assert end.draft.cache.length.tolist() == lengths.tolist()
    # The last block may run past the limit: compare what was asked for.
    texts = [
        (prompt + text)[:n]
        for prompt, text, n in zip(PROMPTS, plain, lengths, strict=True)
    ]
    monkeypatch.setattr(decode, "CHUNK", 64)
    fresh = decode.start(p, texts, ORACLE, NEW)
    for old, new in (
        (end.target_cache, fresh.target_cache),
        (end.draft.cache, fresh.draft.cache),
    ):
        for a, b in zip(tiny.by_slot(old), tiny.by_slot(new), strict=True):
            for row, text in enumerate(texts):
                n = len(text) - 1  # the draft's newest pair holds the next root
                np.testing.assert_allclose(a[row, ..., :n], b[row, ..., :n], atol=1e-5)


def poison(at: cache.KVCache, value: float, rows: tuple = (0, 1, 2)) -> cache.KVCache:
    """Fills unused slots, those of keys with NaN."""
    unused = jnp.arange(at.n_slots)[None] >= at.length[:, None]
    unused &= jnp.isin(jnp.arange(3), jnp.asarray(rows))[:, None]
    unused = unused[:, None, None, :]
    return at._replace(
        k=tuple(jnp.where(unused, jnp.nan, x) for x in at.k),
        v=tuple(jnp.where(unused.swapaxes(2, 3), value, x) for x in at.v),
    )


def test_rubbish_behind_the_committed_slots_changes_nothing(params, plain):
    state = decode.start(params, PROMPTS, GROWN, NEW)
    rows = [[int(root)] for root in state.root]
    shapes = jax.tree.map(jnp.shape, state)
    while min(map(len, rows)) < NEW:
        state = state._replace(
            target_cache=poison(state.target_cache, 1e4),
            draft=state.draft._replace(cache=poison(state.draft.cache, 1e4)),
        )
        state, info = decode.jit_step(params, state, GROWN)
        assert jax.tree.map(jnp.shape, state) == shapes
        for row, tokens, n in zip(rows, info.tokens, info.n_emitted, strict=True):
            row += tokens[:n].tolist()
    assert [row[:NEW] for row in rows] == plain


def test_nan_behind_the_committed_values_is_reported_and_stays_in_its_row(
    params, plain
):
    """R107: nothing puts one there, but one put there never changes a text unseen."""
    state = decode.start(params, PROMPTS, GROWN, NEW)
    state = state._replace(target_cache=poison(state.target_cache, jnp.nan, (1,)))
    _, out = decode.jit_loop(params, state, GROWN, NEW)
    assert out.tokens[::2].tolist() == plain[::2]
    with pytest.raises(FloatingPointError, match=r"not finite in rows \[1\]"):
        decode.unpack(out)


def test_float32_products_ask_for_full_precision(params):
    """R707: TPUs round the inputs of products to bfloat16 unless asked not to."""
    state = jax.eval_shape(lambda: decode.empty(decode.row_keys(0, 3), GROWN, 256))
    said = str(jax.make_jaxpr(lambda p, s: decode.step(p, s, GROWN))(params, state))
    n_products = said.count("dot_general[")
    assert n_products > 20
    assert said.count("precision=(Precision.HIGHEST, Precision.HIGHEST)") == n_products


def test_trace_gives_what_generate_gives(params, plain):
    rows, infos = decode.trace(params, PROMPTS, GROWN, NEW)
    assert rows == plain
    for info in infos:
        assert (info.n_emitted <= info.n_accepted + 1).all()
    emitted = np.sum([info.n_emitted for info in infos], axis=0)
    assert (emitted >= NEW - 1).all()


def test_ties_go_to_the_lowest_id_with_and_without_a_draft(params, plain):
    common = max(set(plain[1]), key=plain[1].count)
    head = params["target"]["head"]
    row = 1.05 * head[common]
    tied = params | {
        "target": params["target"] | {"head": head.at[3].set(row).at[7].set(row)}
    }
    want = decode.generate(tied, PROMPTS, DecodeConfig(T), NEW)
    assert decode.generate(tied, PROMPTS, GROWN, NEW) == want
    assert any(3 in text for text in want)
    assert not any(7 in text for text in want)


def test_one_prompt_after_the_other_compiles_once(params):
    rng = np.random.default_rng(7)
    decode.generate(params, [PROMPTS[0]], GROWN, NEW)
    before = compilations()
    for n in range(1, 21):
        decode.generate(params, [rng.integers(0, V, 4 * n).tolist()], GROWN, NEW)
    assert compilations() == before


def compilations() -> list[int]:
    jitted: list[Any] = [decode.jit_loop, decode.jit_prefill]
    return [function._cache_size() for function in jitted]


def test_a_chunked_prefill_equals_one_long_one(params, monkeypatch):
    states = []
    for chunk in (8, 32):
        monkeypatch.setattr(decode, "CHUNK", chunk)
        states.append(decode.start(params, PROMPTS, GROWN, NEW))
    a, b = states
    assert a.root.tolist() == b.root.tolist()
    np.testing.assert_allclose(a.draft.hidden, b.draft.hidden, atol=1e-5)
    for old, new in ((a.target_cache, b.target_cache), (a.draft.cache, b.draft.cache)):
        assert old.length.tolist() == new.length.tolist() == [1, 7, 30]
        for x, y in zip(tiny.by_slot(old), tiny.by_slot(new), strict=True):
            for row, n in enumerate([1, 7, 30]):
                np.testing.assert_allclose(x[row, ..., :n], y[row, ..., :n], atol=1e-5)


def test_padding_in_bfloat16_gives_no_nan_and_the_unpadded_numbers():
    t = tiny.target_config(dtype="bfloat16", n_layers=1)
    d = tiny.draft_config(t, "eagle3", dtype="bfloat16")
    p = tiny.params(8, t, d)
    cfg = DecodeConfig(t, d, tree.chain(1))
    together = decode.start(p, PROMPTS, cfg, 4)
    alone = decode.start(p, [PROMPTS[1]], cfg, 4)
    assert all(bool(jnp.isfinite(x).all()) for x in together.target_cache.k)
    assert bool(jnp.isfinite(together.draft.hidden).all())
    for a, b in zip(together.target_cache.v, alone.target_cache.v, strict=True):
        np.testing.assert_allclose(
            a[1, :, :7].astype(np.float32),
            b[0, :, :7].astype(np.float32),
            atol=0.06,
        )


# --- end tokens and limits, on a target that counts

COUNT = 12
EOS = (5, 8, 11)
CT = tiny.with_eos(tiny.markov_target_config(COUNT), *EOS)
CD = tiny.markov_draft_config(CT)
COUNTING = DecodeConfig(CT, CD, tree.chain(4))


@pytest.fixture(scope="module")
def counting():
    """x is followed by x + 1, and the draft knows it."""
    table = np.full((COUNT, COUNT), -20.0)
    table[np.arange(COUNT), (np.arange(COUNT) + 1) % COUNT] = 20.0
    return tiny.markov_params(table, table, CT, CD)


def counted(first: int, limit: int) -> list[int]:
    out: list[int] = []
    while len(out) < limit and not (out and out[-1] in EOS):
        first = (first + 1) % COUNT
        out.append(first)
    return out


STARTS = list(range(COUNT))


def test_text_ends_with_any_end_token_wherever_it_stands_in_a_block(counting):
    # 0 -> [1, | 2 3 4 5]: the end token is the last accepted one; 11 -> [0, | 1 2 3 4 5]:
    # it is the bonus; 4 -> 5 and 7 -> 8: it comes from the prefill. All in one batch.
    state = decode.start(counting, [[x] for x in STARTS], COUNTING, 20)
    end, out = decode.jit_loop(counting, state, COUNTING, 20)
    texts = decode.unpack(out)
    assert texts == [counted(x, 20) for x in STARTS]
    places = {len(text) - 2 for text in texts}
    assert places == {-1, 0, 1, 2, 3, 4}  # index in the block, 4 is the bonus token
    # Nothing behind the end token reaches the caches.
    lengths = [len(text) for text in texts]
    assert end.target_cache.length.tolist() == lengths
    assert end.draft.cache.length.tolist() == lengths
    assert end.done.all()
    assert (
        np.asarray(out.tokens)[np.arange(20)[None] >= np.array(lengths)[:, None]] == 0
    ).all()


def test_padding_of_the_vocabulary_is_never_emitted():
    """R505: rows of no token, with the largest logits, that the draft wants as well."""
    table = np.zeros((COUNT, COUNT))
    table[:, 9:] = 50.0
    known = dataclasses.replace(CT, n_tokens=9, eos_ids=())
    params = tiny.markov_params(table, table, known, CD)
    cfg = DecodeConfig(known, CD, tree.chain(1), SamplingConfig(temperature=1.0))
    texts = decode.generate(params, [[x] for x in STARTS], cfg, 20)
    assert {token for text in texts for token in text} == set(range(9))


@pytest.mark.parametrize("limit", [1, 3])
def test_text_is_cut_at_the_limit_inside_a_block(counting, limit):
    texts = decode.generate(counting, [[x] for x in STARTS], COUNTING, limit)
    assert texts == [counted(x, limit) for x in STARTS]


def test_rows_that_end_early_wait_for_the_others(counting):
    state = decode.start(counting, [[x] for x in STARTS], COUNTING, 20)
    _, out = decode.jit_loop(counting, state, COUNTING, 20)
    n_steps = (np.asarray(out.n_emitted) > 0).sum(axis=1)
    assert set(n_steps) == {0, 1}
    rows, infos = decode.trace(counting, [[x] for x in STARTS], COUNTING, 20)
    assert rows == decode.unpack(out)
    assert [int(info.n_emitted[4]) for info in infos] == [0]  # 4 ended with the prefill


def test_a_prompt_may_fill_the_cache_to_the_last_slot(counting, monkeypatch):
    monkeypatch.setattr(decode, "CHUNK", 8)
    prompt = [x % 3 for x in range(13)] + [11]  # 14 + 6 + 4 slots
    texts = decode.generate(counting, [prompt], COUNTING, 6, max_len=24)
    assert texts == [counted(11, 6)]
    with pytest.raises(ValueError, match="need 25 cache slots, max_len=24"):
        decode.generate(counting, [[0, *prompt]], COUNTING, 6, max_len=24)


def test_prompts_that_cannot_work_are_refused(counting):
    def start(prompts: list[list[int]], cfg: DecodeConfig = COUNTING) -> None:
        decode.start(counting, prompts, cfg, 4, max_len=64)

    for empty in ([], [[]], [[1], []]):
        with pytest.raises(ValueError, match="at least one token"):
            start(empty)
    with pytest.raises(ValueError, match="need 96 cache slots, max_len=64"):
        start([[1], [1] * 70])
    for bad in ([[COUNT]], [[1], [-1]]):
        with pytest.raises(ValueError, match=r"must lie in \[0, 12\)"):
            start(bad)
    scaling = RopeScaling("dynamic", 2.0, original_length=16)
    for whose in ("target", "draft"):
        stretched = dataclasses.replace(getattr(COUNTING, whose), rope_scaling=scaling)
        with pytest.raises(ValueError, match=f"of the {whose} beyond its .* length 16"):
            start([[1] * 20], dataclasses.replace(COUNTING, **{whose: stretched}))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_numbers_are_reported_with_their_rows(
    counting, temperature
):
    sampling = SamplingConfig(temperature=temperature)
    cfg = dataclasses.replace(COUNTING, sampling=sampling)
    prompts = [[x] for x in STARTS]
    embed = counting["target"]["embed"].at[3].set(jnp.nan)  # met by 2, 1, 0, 11 and 3
    bad = counting | {"target": counting["target"] | {"embed": embed}}
    with pytest.raises(FloatingPointError, match=r"rows \[0, 1, 2, 3, 11\]"):
        decode.generate(bad, prompts, cfg, 20)
    head = counting["target"]["head"].at[0, 0].set(jnp.nan)
    bad = counting | {"target": counting["target"] | {"head": head}}
    with pytest.raises(FloatingPointError, match=r"rows \[0, 1, 2, "):
        decode.generate(bad, prompts, cfg, 20)


def test_trouble_of_the_prefill_alone_is_reported(counting):
    embed = counting["target"]["embed"].at[3].set(jnp.nan)
    bad = counting | {"target": counting["target"] | {"embed": embed}}
    with pytest.raises(FloatingPointError, match=r"rows \[3\]"):
        decode.generate(bad, [[x] for x in STARTS], COUNTING, 1)


def test_a_row_that_breaks_commits_no_nan(counting):
    embed = counting["target"]["embed"].at[3].set(jnp.nan)
    bad = counting | {"target": counting["target"] | {"embed": embed}}
    state = decode.start(bad, [[x] for x in STARTS], COUNTING, 20)
    end, out = decode.jit_loop(bad, state, COUNTING, 20)
    assert not out.healthy[0]
    for x in (*end.target_cache.k, *end.target_cache.v):
        assert bool(jnp.isfinite(x[jnp.asarray([0, 1, 2, 4, 11])]).all())


def test_a_draft_of_nan_does_not_reach_the_text(counting):
    own = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), counting["draft"])
    bad = counting | {"draft": own}
    texts = decode.generate(bad, [[x] for x in STARTS], COUNTING, 20)
    assert texts == [counted(x, 20) for x in STARTS]


def test_stacked_layers_decode_the_same_tokens(params, plain):
    t, stacked = target.stack(params["target"], T)
    cfg = DecodeConfig(t, D, TREES["dynamic"])
    state = decode.start(params | {"target": stacked}, PROMPTS, cfg, NEW)
    shapes = {x.shape[:2] for x in jax.tree.leaves(state.target_cache.k)}
    assert shapes == {(t.n_layers, len(PROMPTS))}
    assert decode.generate(params | {"target": stacked}, PROMPTS, cfg, NEW) == plain


@pytest.mark.parametrize("tree_of", [None, TreeConfig(width=6, depth=4, n_nodes=16)])
def test_memory_is_that_of_weights_and_caches(tree_of):
    """Sizes of SmolLM2 with six layers; the compiler says what else it needs."""
    t = TargetConfig(
        "six layers", 49152, 576, 1536, 6, 9, 3, 64, tied=True, taps=(1, 3)
    )
    d = tiny.draft_config(
        t, vocab_size=8192, n_heads=9, n_kv_heads=3, head_dim=64, d_mlp=1536
    )
    cfg = DecodeConfig(t, d, tree_of) if tree_of else DecodeConfig(t)
    params = jax.eval_shape(
        lambda: {
            "target": target.init(jax.random.key(0), t),
            "draft": draft.init(jax.random.key(0), d, t),
        }
    )
    state = jax.eval_shape(lambda: decode.empty(decode.row_keys(0, 1), cfg, 2048))
    kept = (params["target"], params["draft"] if tree_of else {}, state.target_cache)
    needed = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(kept))
    params["draft"]["embed"] = params["target"]["embed"]
    params["draft"]["draft_to_target"] = jax.ShapeDtypeStruct((8192,), jnp.int32)
    program: Any = decode.jit_loop.lower(params, state, cfg, 128).compile()
    used = program.memory_analysis()
    more = (
        used.temp_size_in_bytes + used.output_size_in_bytes - used.alias_size_in_bytes
    )
    assert 0 < more < 0.1 * needed


def test_a_cache_read_in_part_decodes_the_same_tokens(params, plain, monkeypatch):
    # Within 24 tokens every row passes from one size to the next, at different steps.
    monkeypatch.setattr(cache, "prefixes", lambda n: (*range(16, n, 16), n))
    t, stacked = target.stack(params["target"], dataclasses.replace(T, name="in part"))
    both = params | {"target": stacked}
    assert decode.generate(both, PROMPTS, DecodeConfig(t), NEW) == plain
    cfg = DecodeConfig(t, D, TREES["dynamic"])
    assert decode.generate(both, PROMPTS, cfg, NEW) == plain


@pytest.mark.parametrize(("n_nodes", "n_rows"), [(5, 8), (7, 8), (8, 8), (10, 16)])
def test_nodes_are_verified_in_a_power_of_two(params, monkeypatch, n_nodes, n_rows):
    cfg = dataclasses.replace(GROWN, tree=TreeConfig(width=3, depth=3, n_nodes=n_nodes))
    seen = []
    forward = target.forward

    def watched(own, tokens, positions, mask, *rest):
        seen.append((tokens.shape, positions.shape, mask.shape))
        return forward(own, tokens, positions, mask, *rest)

    monkeypatch.setattr(target, "forward", watched)
    state = decode.start(params, [PROMPTS[1]], cfg, 4)
    seen.clear()
    jax.eval_shape(lambda p, s: decode.step(p, s, cfg), params, state)
    assert seen == [((1, n_rows), (1, n_rows), (1, n_rows, n_rows))]

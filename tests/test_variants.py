"""Variants and baselines: names, drafts of every kind, and what their training computes."""

import dataclasses
import functools
from typing import Any

import drivers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
import tiny

from configs import tiny as tiny_config
from eagle_jax import decode, draft, heads, train
from eagle_jax import tree as tree_lib
from eagle_jax.config import Config, DecodeConfig, DraftConfig, TrainConfig, TreeConfig
from eagle_jax.layers import Params
from eagle_jax.train import Batch, Features
from experiments import variants

T = tiny.target_config(vocab_size=40, n_layers=4, head_dim=8)
CONFIG = Config(
    name="tiny",
    draft=DraftConfig(
        vocab_size=20, d_model=32, d_mlp=48, n_heads=4, n_kv_heads=2, head_dim=8
    ),
    tree=TreeConfig(width=3, depth=3, n_nodes=8),
)
KINDS = ("token", "feature", "feature_unshifted", "medusa", "small_draft", "lookup")
PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6], [2, 7], [1]]
NEW = 20


# Names.


def test_every_name_of_all_is_a_variant_that_fits_its_tree():
    for name in variants.ALL:
        variant = variants.parse(name)
        cfg = variants.apply(variant, CONFIG)
        head = variants.head_config(variant, cfg, T) if name != "vanilla" else None
        DecodeConfig(T, head or DraftConfig(), cfg.tree)
    assert {variants.parse(name).trained_as for name in variants.ALL} == {
        *("", "medusa", "small_draft", "token", "feature", "feature_unshifted"),
        *("eagle1", "hass", "no_feature_loss", "fused", "eagle3"),
    }


def test_suffixes_change_one_thing_each():
    no_value = variants.parse("eagle2_no_value")
    assert no_value.trained_as == "eagle1" and no_value.dynamic == {"value": False}
    both = variants.tree_of(variants.parse("eagle2_no_both"), CONFIG)
    assert (both.value, both.rerank, both.n_nodes) == (False, False, 8)
    ttt = variants.parse("eagle3_ttt5")
    assert ttt.train == {"ttt_steps": 5} and ttt.trained_as == "eagle3_ttt5"
    chain = variants.parse("eagle3_ttt5_chain")
    assert chain.trained_as == "eagle3_ttt5"
    assert variants.tree_of(chain, CONFIG) == tree_lib.chain(5)
    static = variants.tree_of(variants.parse("eagle3_static"), CONFIG)
    assert static.n_nodes == 26
    assert variants.parse("feature_unshifted").head["inputs"] == "unshifted"
    assert variants.parse("eagle1_no_noise").train["noise"] == "none"
    fixed = variants.parse("eagle1_fixed_chain")
    assert fixed.fixed and fixed.trained_as == "eagle1_fixed" and fixed.tree == "chain"
    assert not variants.parse("eagle1").fixed


@pytest.mark.parametrize(
    "name",
    [
        "eagle9",
        "eagle3_tree",
        "vanilla_chain",
        "eagle1_no_value",
        "medusa_ttt3",
        "lookup_fixed",
    ],
)
def test_wrong_names_are_told_the_right_ones(name):
    with pytest.raises(ValueError, match=r"eagle2.*no_feature_loss|_chain, _static"):
        variants.parse(name)


# Decoding.


@functools.cache
def setup_of(name: str) -> tuple[DecodeConfig, Params]:
    variant = variants.parse(name)
    cfg = variants.apply(variant, CONFIG)
    head = variants.head_config(variant, cfg, T)
    made = tiny.params(1, T, head if head.head != "lookup" else None)
    return DecodeConfig(T, head, cfg.tree), made | {"draft": made.get("draft", {})}


@functools.cache
def plain() -> list[list[int]]:
    return decode.generate(setup_of("token")[1], PROMPTS, DecodeConfig(T), NEW)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("shape", ["own", "dynamic"])
def test_every_kind_of_draft_is_lossless(name, shape):
    cfg, params = setup_of(name)
    if shape == "dynamic":
        dynamic = CONFIG.tree if name != "lookup" else tree_lib.chain(2)
        cfg = dataclasses.replace(cfg, tree=dynamic)
    assert decode.generate(params, PROMPTS, cfg, NEW) == plain()


@pytest.mark.parametrize("name", ["eagle2_no_value", "eagle2_no_rerank"])
def test_the_ablations_of_dynamic_trees_are_lossless(name):
    cfg, params = setup_of(name)
    assert decode.generate(params, PROMPTS, cfg, NEW) == plain()


@pytest.mark.parametrize(
    ("name", "least"), [("small_draft", 1), ("small_draft_chain", 5)]
)
def test_a_small_model_that_is_the_target_is_always_right(name, least):
    """A dynamic tree holds the best first token for sure; deeper ones it may trade."""
    cfg, params = setup_of(name)
    t = params["target"]
    own = {"layers": t["layers"], "norm": t["norm"], "head": t["head"]}
    head = dataclasses.replace(cfg.draft, n_layers=T.n_layers, vocab_size=T.vocab_size)
    cfg = dataclasses.replace(cfg, draft=head)
    tied = draft.tie(own, t, head)
    rows, infos = decode.trace({"target": t, "draft": tied}, PROMPTS, cfg, NEW)
    assert rows == plain()
    for info in infos:
        live = info.n_emitted > 0
        assert (info.n_accepted[live] >= least).all()


def lookup_reference(history: list[int], depth: int, ngram: int) -> list[int]:
    """Prompt lookup by its definition, the longest suffix first."""
    for n in range(min(ngram, len(history) - 1), 0, -1):
        for start in range(len(history) - n):
            end = start + n
            if history[start:end] == history[-n:] and end + depth <= len(history):
                return history[end : end + depth]
    return [history[-1]] * depth


def test_lookup_copies_what_followed_the_first_time():
    head = DraftConfig(head="lookup")
    shape = tree_lib.chain(3)
    rng = np.random.default_rng(0)
    propose = jax.jit(draft.propose, static_argnames=("cfg", "tree"))
    found = 0
    for trial in range(40):
        texts = rng.integers(0, 4, (2, 24))
        count = rng.integers(1, 25, 2)
        state = draft.empty(head, 2, 32)
        state = draft.extend(
            {}, state, jnp.asarray(texts, jnp.int32), jnp.zeros((8, 2, 24)),
            jnp.asarray(count, jnp.int32), head,
        )  # fmt: skip
        root = jnp.asarray([texts[r, count[r] - 1] for r in range(2)], jnp.int32)
        got = propose({}, state, root, head, shape)
        for r in range(2):
            known = texts[r, : count[r]].tolist()
            want = lookup_reference(known, 3, head.ngram)
            assert got.tokens[r].tolist() == [known[-1], *want], trial
            found += want != [known[-1]] * 3
        assert got.parents.tolist() == [[0, 0, 1, 2]] * 2
    assert found > 40


def test_without_rerank_the_expanded_nodes_are_kept_level_by_level():
    cfg, params = setup_of("eagle2_no_rerank")
    state = decode.start(params, PROMPTS[:1], cfg, NEW)
    grown = draft.grow(params["draft"], state.draft, state.root, cfg.draft, cfg.tree)
    kept = draft.rerank(grown, state.root, cfg.tree)
    place = np.asarray(grown.place[0])
    expanded = [np.flatnonzero(place[:3] < 3)]
    expanded += [
        3 + 9 * i + np.flatnonzero(place[3 + 9 * i : 12 + 9 * i] < 3) for i in range(2)
    ]
    assert [len(level) for level in expanded] == [3, 3, 3]
    # Seven drafted nodes: two whole levels, and the best of the third.
    best = expanded[2][place[expanded[2]] == 0]
    numbers = sorted([*expanded[0], *expanded[1], *best])
    assert kept.tokens[0, 1:].tolist() == np.asarray(grown.tokens)[0, numbers].tolist()
    assert kept.depths[0].tolist() == [0, 1, 1, 1, 2, 2, 2, 3]


def test_without_value_the_last_confidence_alone_decides_what_is_expanded():
    trees = {}
    for name in ("eagle2", "eagle2_no_value"):
        cfg, params = setup_of(name)
        head = params["draft"] | {"head": params["draft"]["head"] * 0.3}
        state = decode.start(params, PROMPTS[:1], cfg, NEW)
        grown = draft.grow(head, state.draft, state.root, cfg.draft, cfg.tree)
        log_q, value, place = (
            np.asarray(x)[0, 3:12] for x in (grown.log_q, grown.log_value, grown.place)
        )
        worth = log_q if name == "eagle2_no_value" else value
        assert np.argsort(-worth, kind="stable")[:3].tolist() == [
            int(np.flatnonzero(place == i)[0]) for i in range(3)
        ]
        trees[name] = grown
    assert not np.array_equal(trees["eagle2"].tokens, trees["eagle2_no_value"].tokens)


# Training against decoding.


def batch_of(tokens: np.ndarray) -> Batch:
    B, n = tokens.shape
    at = np.broadcast_to(np.arange(n), (B, n))
    return Batch(
        jnp.asarray(tokens, jnp.int32),
        jnp.ones((B, n), jnp.int32),
        jnp.asarray(at, jnp.int32),
        jnp.ones((B, n), bool),
    )


@pytest.mark.parametrize("name", ["token", "feature", "feature_unshifted"])
def test_an_input_study_head_trains_on_what_it_will_read(name):
    """The output of unrolled step 0 is what `extend` leaves, with the tokens of `fed`."""
    cfg, params = setup_of(name)
    rng = np.random.default_rng(3)
    tokens = rng.integers(0, T.vocab_size, (2, 13))
    read = jnp.asarray(rng.normal(size=(T.d_model, 2, 13)), jnp.float32)
    outs = train.unroll(params["draft"], batch_of(tokens), read, cfg.draft, 1)
    state = draft.empty(cfg.draft, 2, 32)
    count = jnp.asarray([9, 9], jnp.int32)
    own, after = (jnp.asarray(tokens[:, i : i + 9], jnp.int32) for i in (0, 1))
    given, n = draft.fed(state, own, after, count, cfg.draft)
    assert n.tolist() == [9, 9]
    state = draft.extend(params["draft"], state, given, read[:, :, :9], n, cfg.draft)
    np.testing.assert_allclose(state.hidden, outs[0][:, :, 8], atol=1e-5)
    # What it does not read does not matter; what it reads does.
    other_tokens = (own + 1) % T.vocab_size
    changed = {
        "token": (given, read[:, :, :9] + 1),
        "feature": (other_tokens, read[:, :, :9]),
    }.get(name)
    if changed is not None:
        fresh = draft.empty(cfg.draft, 2, 32)
        again = draft.extend(params["draft"], fresh, *changed, n, cfg.draft)
        np.testing.assert_array_equal(again.hidden, state.hidden)
    else:
        assert given.tolist() == own.tolist() != after.tolist()


def test_a_small_model_reads_every_token_from_the_first():
    cfg, params = setup_of("small_draft")
    own = params["draft"]
    rng = np.random.default_rng(4)
    tokens = rng.integers(0, T.vocab_size, 12)
    like = dataclasses.replace(T, n_layers=cfg.draft.n_layers, taps=(0,))
    want = reference.llama({**own, "head": own["head"]}, tokens.tolist(), like)
    outs = train.unroll(
        own, batch_of(tokens[None]), jnp.zeros((32, 1, 12)), cfg.draft, 1
    )
    scores = draft.logits(own, outs[0], cfg.draft)[:, 0].T
    np.testing.assert_allclose(scores, want["logits"], atol=2e-4)
    # In decoding: two chunks of a prompt, then a root.
    state = draft.empty(cfg.draft, 1, 32)
    for start, stop in ((0, 6), (6, 11)):
        parts = (tokens[None, start:stop], tokens[None, start + 1 : stop + 1])
        count = jnp.asarray([stop - start], jnp.int32)
        before, after = (jnp.asarray(part, jnp.int32) for part in parts)
        given, n = draft.fed(state, before, after, count, cfg.draft)
        nothing = jnp.zeros((32, 1, stop - start))
        state = draft.extend(own, state, given, nothing, n, cfg.draft)
    assert int(state.cache.length[0]) == 12
    scores = draft.logits(own, state.hidden[:, :, None], cfg.draft)[:, 0, 0]
    np.testing.assert_allclose(scores, want["logits"][-1], atol=2e-4)


def test_medusa_heads_say_what_the_definition_says():
    cfg, params = setup_of("medusa")
    own = params["draft"]
    f = np.random.default_rng(5).normal(size=(T.d_model, 3)).astype(np.float32)
    scores = draft.logits(
        own, draft.look_ahead(own, jnp.asarray(f), cfg.draft), cfg.draft
    )
    for i in range(cfg.draft.n_layers):
        z = np.asarray(own["block"][i]) @ f + np.asarray(own["block_bias"][i])[:, None]
        want = np.asarray(own["head"][i]) @ (f + z / (1 + np.exp(-z)))
        np.testing.assert_allclose(scores[:, i], want, atol=1e-4)
    # Level d of the drafted tree holds the best tokens of head d - 1.
    state = decode.start(params, PROMPTS[:1], cfg, NEW)
    tree = draft.propose(own, state.draft, state.root, cfg.draft, cfg.tree)
    hidden = np.asarray(state.draft.hidden)
    ahead = draft.look_ahead(own, jnp.asarray(hidden), cfg.draft)
    ranked = np.argsort(
        -np.asarray(draft.logits(own, ahead, cfg.draft))[:, :, 0], axis=0
    )
    ids = np.asarray(own["draft_to_target"])
    for node, path in enumerate(cfg.tree.paths, 1):
        assert int(tree.tokens[0, node]) == ids[ranked[path[-1], len(path) - 1]]


SETTINGS = TrainConfig(noise="none", normaliser="mask", ttt_steps=2)


@pytest.mark.parametrize(
    ("name", "back"), [("small_draft", 0), ("medusa", 1), ("token", 1)]
)
def test_labels_are_matched_to_the_slot_that_speaks_about_them(name, back):
    """A teacher that is the head's own answer, moved to its label, is always matched."""
    cfg, _ = setup_of(name)
    head = dataclasses.replace(cfg.draft, vocab_size=T.vocab_size, n_layers=2)
    made = tiny.params(1, T, head)
    own, target_params = made["draft"], made["target"]
    steps = 2 if name == "medusa" else 1
    settings = dataclasses.replace(SETTINGS, ttt_steps=steps)
    rng = np.random.default_rng(6)
    batch = batch_of(rng.integers(0, T.vocab_size, (2, 12)))
    read = jnp.asarray(rng.normal(size=(T.d_model, 2, 12)), jnp.float32)
    out = train.unroll(own, batch, read, head, steps)[0]
    if name == "small_draft":  # its own norm and LM head make the answer
        own = own | {"norm": jnp.ones(T.d_model), "head": target_params["head"]}
        out = train.unroll(own, batch, read, head, steps)[0]
        answer = draft.rms_norm(out, own["norm"], head.norm_eps)
    else:
        # No bias: it would say the same everywhere.
        own = own | {"head": jnp.broadcast_to(target_params["head"], own["head"].shape)}
        own = own | {name: own[name] * 0 for name in ("fc_bias",) if name in own}
        out = train.unroll(own, batch, read, head, steps)[0]
        answer = out
    top = jnp.roll(answer, back, axis=2)
    _, metrics = train.head_loss(
        jax.random.key(0),
        own,
        target_params,
        batch,
        Features(read, top),
        head,
        settings,
    )
    assert float(metrics.accuracy[0]) == 1.0
    wrong = jnp.roll(answer, back + 1, axis=2)
    _, metrics = train.head_loss(
        jax.random.key(0),
        own,
        target_params,
        batch,
        Features(read, wrong),
        head,
        settings,
    )
    assert float(metrics.accuracy[0]) < 0.5


def test_hass_adds_the_ten_likeliest_tokens_and_stops_gradients():
    cfg, params = setup_of("hass")
    own, target_params = params["draft"], params["target"]
    rng = np.random.default_rng(7)
    batch = batch_of(rng.integers(0, T.vocab_size, (1, 10)))
    read = jnp.asarray(rng.normal(size=(T.d_model, 1, 10)), jnp.float32)

    def loss(own: Any, **changes: Any) -> jax.Array:
        settings = dataclasses.replace(SETTINGS, **changes)
        given = Features(read, read)
        return train.head_loss(
            jax.random.key(0), own, target_params, batch, given, cfg.draft, settings
        )[0]

    base, more = loss(own), loss(own, top_k_weight=0.5)
    # By hand, from whole logits.
    outs = train.unroll(own, batch, read, cfg.draft, 2)
    ids = np.asarray(own["draft_to_target"])
    scores = np.asarray(target_params["head"] @ np.asarray(read[:, 0]))
    extra = 0.0
    for i, out in enumerate(outs):
        log_q = jax.nn.log_softmax(draft.logits(own, out, cfg.draft), axis=0)[:, 0]
        for p in range(1 + i, 9):  # place 9 has no next token
            if int(np.argmax(scores[:, p])) not in ids:
                continue
            q = np.asarray(jax.nn.softmax(scores[ids, p]))
            best = np.argsort(-q, kind="stable")[:10]
            said = np.asarray(log_q)[best, p - 1 - i]
            extra -= 0.8**i * float(np.sum(q[best] * said)) / 9
    np.testing.assert_allclose(more - base, 0.5 * extra, rtol=2e-4)

    def slope(**changes: Any) -> jax.Array:
        return jax.grad(lambda fc: loss(own | {"fc": fc}, **changes))(own["fc"])

    through, cut = slope(), slope(detach=True)
    assert not np.allclose(through, cut)


# Files, and whole runs.


@pytest.mark.parametrize("name", ["token", "medusa", "small_draft", "no_feature_loss"])
def test_heads_without_a_published_layout_come_back_exactly(name, tmp_path):
    cfg, params = setup_of(name)
    own = {k: v for k, v in params["draft"].items() if k != "embed"}
    if cfg.draft.head == "eagle1":
        own.pop("head")
    assert heads.dialect_of(cfg.draft, T) == "own"
    meta = {"target_hash": "tiny"}
    with pytest.raises(ValueError, match="no published layout"):
        heads.save_head(
            tmp_path / "h", cfg.draft, own, T.taps, "official", meta=meta, target=T
        )
    heads.save_head(tmp_path / "h", cfg.draft, own, T.taps, "own", meta=meta, target=T)
    back = heads.load_head(tmp_path / "h", T)
    assert back.cfg == cfg.draft and back.meta["target_hash"] == "tiny"
    assert jax.tree.structure(back.params) == jax.tree.structure(own)
    jax.tree.map(np.testing.assert_array_equal, back.params, own)
    other = dataclasses.replace(T, d_model=64)
    with pytest.raises(ValueError, match="another target"):
        heads.load_head(tmp_path / "h", other)


def test_all_variants_run_end_to_end(tmp_path):
    flags = [
        *drivers.target_flags(),
        "--set=tree.n_nodes=4",  # room for the expanded nodes alone
        *(
            f"--set=train.{text}"
            for text in ("row_length=128", "supervised_tokens=300")
        ),
        f"--data={drivers.home() / 'train.jsonl'}",
        f"--questions={drivers.home() / 'questions' / 'say.jsonl'}",
        *("--variant=all", "--preset=smoke", "--max_new_tokens=6", f"--out={tmp_path}"),
    ]
    said = drivers.run("ablate", *flags)
    rows = drivers.read_lines(tmp_path / "results.jsonl")
    assert tuple(row["variant"] for row in rows) == variants.ALL
    assert all(row["n_identical"] == row["n_prompts"] == 1 for row in rows)
    chains = {row["variant"] for row in rows if row["alpha"]}
    assert chains == {n for n in variants.ALL if n.endswith("_chain")} | {"lookup"}
    trained = {row["variant"]: (row["train_flops"], row["n_trainable"]) for row in rows}
    assert trained["vanilla"] == trained["lookup"] == (None, None)
    assert trained["eagle3"][0] > trained["fused"][0] > 0
    assert trained["eagle1"] == trained["eagle2"]
    assert "means over the sets" in said

    pair = [*flags, "--variant=eagle1,eagle1_fixed"]
    assert "--fixed_data" in drivers.fail("ablate", *pair)
    other = drivers.read_lines(drivers.home() / "train.jsonl")[::-1]
    path = drivers.write_lines(tmp_path / "fixed.jsonl", other)
    said = drivers.run("ablate", *pair, f"--fixed_data={path}")
    assert "eagle1, say: result is in" in said
    ours, fixed = drivers.read_lines(tmp_path / "results.jsonl")[-2:]
    assert fixed["variant"] == "eagle1_fixed" and fixed["head"] != ours["head"]
    assert tiny_config.get_config().name == "tiny"

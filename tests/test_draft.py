"""`draft`: heads against NumPy, the draft's cache after acceptance, and proposed trees."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
import tiny

from eagle_jax import draft, tree
from eagle_jax.config import DraftConfig, TreeConfig
from eagle_jax.draft import DraftState

T = tiny.target_config(vocab_size=40)
HEADS = {
    "eagle1": tiny.draft_config(T, "eagle1"),
    "eagle3": tiny.draft_config(T, "eagle3", vocab_size=20),
    "eagle3 dialect": tiny.draft_config(
        T, "eagle3", vocab_size=20, norm_before_residual=True, qkv_bias=True
    ),
}
S = 32  # cache slots
N = 16  # committed pairs

extend = jax.jit(draft.extend, static_argnames="cfg")
propose = jax.jit(draft.propose, static_argnames=("cfg", "tree"))
propose_drawn = jax.jit(
    draft.propose_drawn,
    static_argnames=("cfg", "tree", "temperature", "target_vocab_size"),
)


@functools.cache
def params_of(kind: str) -> dict:
    return tiny.params(1, T, HEADS[kind])["draft"]


def pairs(cfg: DraftConfig, rows: int = 1, n: int = N):
    rng = np.random.default_rng(2)
    tokens = rng.integers(0, T.vocab_size, (rows, n))
    features = rng.normal(size=(rows, n, cfg.feature_size))
    return tokens, features


def extended(kind: str, state: DraftState, tokens, features, count) -> DraftState:
    return extend(
        params_of(kind),
        state,
        jnp.asarray(tokens, jnp.int32),
        jnp.asarray(features.transpose(2, 0, 1), jnp.float32),
        jnp.asarray(count, jnp.int32),
        HEADS[kind],
    )


def committed(kind: str, rows: int = 1) -> DraftState:
    tokens, features = pairs(HEADS[kind], rows)
    state = draft.empty(HEADS[kind], rows, S)
    return extended(kind, state, tokens, features, [N] * rows)


@pytest.mark.parametrize("kind", list(HEADS))
def test_a_head_equals_the_reference_for_16_positions(kind):
    cfg = HEADS[kind]
    params = params_of(kind)
    tokens, features = pairs(cfg)
    hidden = reference.draft_fuse(params, features[0], cfg)
    at, causal = np.arange(N), reference.causal(N)
    out, k, v = reference.draft_layer(params, tokens[0], hidden, at, causal, cfg)
    state = committed(kind)
    np.testing.assert_allclose(state.hidden[:, 0], out[-1], atol=1e-5)
    np.testing.assert_allclose(
        state.cache.k[0][0, :, :, :N].transpose(2, 0, 1), k, atol=1e-5
    )
    np.testing.assert_allclose(
        state.cache.v[0][0, :, :N].transpose(1, 0, 2), v, atol=1e-5
    )
    logits = draft.logits(params, state.hidden[:, :, None], cfg)
    want = reference.draft_logits(params, out[-1:], cfg)[0]
    np.testing.assert_allclose(logits[:, 0, 0], want, atol=2e-5)


@pytest.mark.parametrize("kind", list(HEADS))
def test_a_chain_feeds_outputs_back_at_the_right_positions(kind):
    # Every drafted token and its log q equal those of one pass over all tokens anew.
    cfg, params = HEADS[kind], params_of(kind)
    tokens, features = pairs(cfg)
    got = propose(params, committed(kind), jnp.asarray([3]), cfg, tree.chain(4))
    ids = np.asarray(params.get("draft_to_target", np.arange(cfg.vocab_size)))
    drafted: list[int] = []
    for n in range(1, 5):
        log_q = reference.draft_after(params, tokens[0], features[0], drafted, cfg)
        best = int(np.argmax(log_q))
        assert int(got.tokens[0, n]) == ids[best]
        np.testing.assert_allclose(got.log_q[0, n], log_q[best], atol=2e-5)
        drafted.append(int(ids[best]))
    assert got.tokens[0, 0] == 3
    assert got.parents.tolist() == [[0, 0, 1, 2, 3]]
    assert got.depths.tolist() == [[0, 1, 2, 3, 4]]


def flattened(kind: str) -> dict:
    """A draft of little confidence, whose frontiers have several parents."""
    params = params_of(kind)
    return params | {"head": params["head"] * 0.1}


def children_of(params: dict, kind: str, width: int):
    cfg = HEADS[kind]
    tokens, features = pairs(cfg)
    ids = np.asarray(params.get("draft_to_target", np.arange(cfg.vocab_size)))

    @functools.cache
    def children(path: tuple[int, ...]) -> list[tuple[int, float]]:
        log_q = reference.draft_after(params, tokens[0], features[0], path, cfg)
        best = np.argsort(-log_q, kind="stable")[:width]
        return [(int(ids[i]), float(log_q[i])) for i in best]

    return children


def paths_in(got: tree.Tree, row: int = 0) -> list[tuple[int, ...]]:
    parents = np.asarray(got.parents[row])
    nodes = np.asarray(got.tokens[row])
    return [
        tuple(nodes[reference.root_path(parents, n)[1:]].tolist())
        for n in range(1, len(parents))
    ]


@pytest.mark.parametrize("kind", ["eagle1", "eagle3"])
def test_growing_equals_a_beam_in_numpy(kind):
    # All candidates are kept, so that the growth of every level is seen.
    cfg = TreeConfig(width=3, depth=4, n_nodes=31)
    params = flattened(kind)
    got = propose(params, committed(kind), jnp.asarray([3]), HEADS[kind], cfg)
    children = children_of(params, kind, 3)
    want = reference.beam(children, expand=3, depth=4, n_drafted=30)
    assert paths_in(got) == [path for path, _ in want]
    assert len({path[:3] for path, _ in want if len(path) == 4}) == 3
    values = [0.0]
    for n in range(1, 31):
        values.append(values[int(got.parents[0, n])] + float(got.log_q[0, n]))
    np.testing.assert_allclose(values[1:], [v for _, v in want], atol=5e-5)


@pytest.mark.parametrize("kind", ["eagle1", "eagle3"])
def test_a_static_tree_holds_the_ranks_of_its_paths(kind):
    cfg = tree.static(((0,), (1,), (2,), (0, 0), (1, 0), (1, 1), (1, 1, 0), (1, 1, 1)))
    got = propose(params_of(kind), committed(kind), jnp.asarray([3]), HEADS[kind], cfg)
    children = children_of(params_of(kind), kind, 3)
    for path, tokens, log_q in zip(
        cfg.paths, paths_in(got), got.log_q[0, 1:].tolist(), strict=True
    ):
        want: tuple[int, ...] = ()
        value = 0.0
        for rank in path:
            token, value = children(want)[rank]
            want = (*want, token)
        assert tokens == want
        assert np.isclose(log_q, value, atol=2e-5)
    assert got.parents[0].tolist() == reference.parents_of(cfg.paths)
    assert got.depths[0].tolist() == [0, *map(len, cfg.paths)]


def test_a_static_chain_equals_a_dynamic_one():
    static = tree.static(((0,), (0, 0), (0, 0, 0), (0, 0, 0, 0)))
    kind = "eagle3"
    args = (params_of(kind), committed(kind), jnp.asarray([3]), HEADS[kind])
    a, b = propose(*args, static), propose(*args, tree.chain(4))
    assert a.tokens.tolist() == b.tokens.tolist()
    np.testing.assert_allclose(a.log_q, b.log_q, atol=1e-5)


@pytest.mark.parametrize("kind", ["eagle1", "eagle3"])
def test_extending_after_acceptance_equals_a_fresh_prefill(kind):
    # Rows accept 3, 0 and 4 tokens; garbage behind the count must leave no trace.
    cfg = HEADS[kind]
    tokens, features = pairs(cfg, rows=3)
    state = draft.empty(cfg, 3, S)
    state = extended(kind, state, tokens, features, [8, 5, 7])  # the prompts
    lengths = np.array([8, 5, 7])
    for count in ([4, 1, 5], [1, 1, 1], [0, 2, 0]):
        at = np.minimum(lengths[:, None] + np.arange(5), N - 1)
        block = np.take_along_axis(tokens, at, 1)
        true = np.take_along_axis(features, at[..., None], 1)
        for b, n in enumerate(count):
            block[b, n:], true[b, n:] = 0, 1e3
        state = extended(kind, state, block, true, count)
        lengths += count
    assert state.cache.length.tolist() == lengths.tolist() == [13, 9, 13]
    fresh = draft.empty(cfg, 3, S)
    fresh = extended(kind, fresh, tokens, features, lengths)
    np.testing.assert_allclose(state.hidden, fresh.hidden, atol=1e-5)
    for b, n in enumerate(lengths):
        for old, new in zip(
            tiny.by_slot(state.cache), tiny.by_slot(fresh.cache), strict=True
        ):
            np.testing.assert_allclose(old[b, ..., :n], new[b, ..., :n], atol=1e-5)


def test_a_row_without_new_pairs_keeps_its_state():
    kind = "eagle3"
    state = committed(kind, 2)
    tokens, features = pairs(HEADS[kind], 2, 5)
    after = extended(kind, state, tokens, features, [0, 3])
    np.testing.assert_array_equal(after.hidden[:, 0], state.hidden[:, 0])
    assert after.cache.length.tolist() == [N, N + 3]
    np.testing.assert_array_equal(
        after.cache.k[0][0, ..., :N], state.cache.k[0][0, ..., :N]
    )


def test_proposing_leaves_the_cache_alone_and_rows_apart():
    kind = "eagle3"
    cfg = TreeConfig(width=3, depth=4, n_nodes=12)
    state = committed(kind, 3)
    got = propose(params_of(kind), state, jnp.asarray([1, 2, 3]), HEADS[kind], cfg)
    for b in range(3):
        alone = DraftState(
            jax.tree.map(lambda x, b=b: x[b : b + 1], state.cache),
            state.hidden[:, b : b + 1],
            state.history[b : b + 1],
        )
        one = propose(params_of(kind), alone, jnp.asarray([b + 1]), HEADS[kind], cfg)
        assert one.tokens[0].tolist() == got.tokens[b].tolist()
        assert one.parents[0].tolist() == got.parents[b].tolist()


def test_ids_of_a_reduced_vocabulary_are_mapped():
    params = {"draft_to_target": jnp.asarray([3, 4, 7], jnp.int32)}
    assert draft.to_target(params, jnp.asarray([[0, 2], [1, 1]])).tolist() == [
        [3, 7],
        [4, 4],
    ]
    assert draft.to_target({}, jnp.asarray([5, 6])).tolist() == [5, 6]
    got = propose(
        params_of("eagle3"),
        committed("eagle3"),
        jnp.asarray([0]),
        HEADS["eagle3"],
        TreeConfig(width=3, depth=4, n_nodes=12),
    )
    assert set(got.tokens[0, 1:].tolist()) <= set(range(1, 40, 2))


def test_a_tree_wider_than_the_draft_vocabulary_is_refused():
    kind = "eagle3"
    for cfg in (
        TreeConfig(width=21, depth=1, n_nodes=22),
        tree.static(tuple((rank,) for rank in range(21))),
    ):
        with pytest.raises(ValueError, match="width=21, vocab_size=20"):
            draft.propose(
                params_of(kind), committed(kind), jnp.asarray([3]), HEADS[kind], cfg
            )


def test_a_tree_as_wide_as_the_draft_vocabulary_works():
    kind = "eagle3"
    cfg = TreeConfig(width=20, depth=1, n_nodes=21)
    got = propose(params_of(kind), committed(kind), jnp.asarray([3]), HEADS[kind], cfg)
    assert sorted(got.tokens[0, 1:].tolist()) == list(range(1, 40, 2))
    np.testing.assert_allclose(np.exp(got.log_q[0, 1:]).sum(), 1, atol=1e-5)


def test_an_own_embedding_is_kept_and_a_missing_one_is_tied():
    both = tiny.params(1, T, HEADS["eagle1"])
    assert both["draft"]["embed"] is both["target"]["embed"]
    assert both["draft"]["head"] is both["target"]["head"]
    own = {"embed": jnp.zeros((40, 32)), "layer": {}}
    assert draft.tie(own, both["target"], HEADS["eagle1"])["embed"] is own["embed"]


def test_a_reduced_eagle1_head_takes_rows_of_the_target_head():
    both = tiny.params(1, T, dataclasses.replace(HEADS["eagle1"], vocab_size=10))
    ids = np.asarray(both["draft"]["draft_to_target"])
    np.testing.assert_array_equal(both["draft"]["head"], both["target"]["head"][ids])


# --- drawn drafts

DRAWN = tree.static(((0,), (1,), (2,), (0, 0), (1, 0), (1, 1)))


@pytest.fixture(scope="module")
def drawn():
    """4000 drawn trees, on a draft of 5 tokens out of 7: few enough to enumerate."""
    t = tiny.target_config(vocab_size=7)
    d = tiny.draft_config(t, "eagle3", vocab_size=5)
    params = tiny.params(3, t, d)["draft"]
    params["draft_to_target"] = jnp.asarray([0, 2, 3, 5, 6], jnp.int32)
    B = 4000
    rng = np.random.default_rng(4)
    tokens = np.repeat(rng.integers(0, 7, (1, 5)), B, 0)
    features = np.repeat(rng.normal(size=(1, 5, d.feature_size)), B, 0)
    state = extend(
        params,
        draft.empty(d, B, 8),
        jnp.asarray(tokens, jnp.int32),
        jnp.asarray(features.transpose(2, 0, 1), jnp.float32),
        jnp.full(B, 5),
        d,
    )
    keys = jax.random.split(jax.random.key(5), B)
    got, log_q = propose_drawn(
        keys,
        params,
        state,
        jnp.zeros(B, jnp.int32),
        d,
        DRAWN,
        temperature=0.7,
        target_vocab_size=7,
    )
    after = functools.partial(reference.draft_after, params, tokens[0], features[0])
    return got, np.asarray(log_q), lambda path: after(path, d)


def q_below(after, path: tuple[int, ...]) -> np.ndarray:
    """q over target ids at temperature 0.7, in NumPy."""
    q = np.zeros(7)
    q[[0, 2, 3, 5, 6]] = np.exp(reference.log_softmax(after(path) / 0.7))
    return q


def test_drawn_siblings_are_distinct(drawn):
    got, _, _ = drawn
    tokens = np.asarray(got.tokens)
    for siblings in ([1, 2, 3], [5, 6]):
        below = np.sort(tokens[:, siblings], axis=1)
        assert (np.diff(below, axis=1) > 0).all()
    assert set(tokens[:, 1:].ravel()) <= {0, 2, 3, 5, 6}
    assert len(np.unique(tokens[:, 1:4], axis=0)) > 20


def test_drawn_siblings_follow_q_without_replacement(drawn):
    got, _, after = drawn
    law = reference.law_of_draws(q_below(after, ()), 3)
    index = {draws: i for i, draws in enumerate(law)}
    counts = np.zeros(len(law))
    for draws in np.asarray(got.tokens)[:, 1:4].tolist():
        counts[index[tuple(draws)]] += 1
    assert reference.p_value(counts, np.array(list(law.values()))) > 1e-3


def test_the_law_handed_to_verification_is_the_one_drawn_from(drawn):
    got, log_q, after = drawn
    assert log_q.shape == (7, 4000, 7)
    np.testing.assert_allclose(
        np.exp(log_q[:, :, 0]), np.tile(q_below(after, ())[:, None], 4000), atol=1e-5
    )
    tokens = np.asarray(got.tokens)
    for row in range(20):
        for node in (1, 2):
            want = q_below(after, (int(tokens[row, node]),))
            np.testing.assert_allclose(np.exp(log_q[:, row, node]), want, atol=1e-5)
    parents = np.array([0, 0, 0, 1, 2, 2])
    for row in range(20):
        for n in range(1, 7):
            stored = float(got.log_q[row, n])
            assert stored == log_q[tokens[row, n], row, parents[n - 1]]
    assert np.isneginf(log_q[:, :, 3:]).all()  # leaves
    assert np.isneginf(log_q[[1, 4]]).all()  # outside the draft vocabulary


def test_levels_and_rows_are_drawn_independently(drawn):
    got, _, after = drawn
    tokens = np.asarray(got.tokens)
    joint = np.zeros((7, 7))
    np.add.at(joint, (tokens[:, 1], tokens[:, 4]), 1)
    law = (
        np.stack([q_below(after, (x,)) for x in range(7)]) * q_below(after, ())[:, None]
    )
    assert reference.p_value(joint, law) > 1e-3

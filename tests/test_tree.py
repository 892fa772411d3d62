"""`tree`: literal matrices, properties of random trees, and worked examples of growth."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
import tiny

from eagle_jax import draft, tree
from eagle_jax.config import DraftConfig, TreeConfig

ancestors = jax.jit(tree.ancestors, static_argnames="depth")
propose = jax.jit(draft.propose, static_argnames=("cfg", "tree"))

SIX = [0, 0, 0, 1, 1, 3]
SIX_ANCESTORS = [
    [1, 0, 0, 0, 0, 0],
    [1, 1, 0, 0, 0, 0],
    [1, 0, 1, 0, 0, 0],
    [1, 1, 0, 1, 0, 0],
    [1, 1, 0, 0, 1, 0],
    [1, 1, 0, 1, 0, 1],
]


def test_ancestors_of_the_six_nodes_are_as_drawn():
    marked = ancestors(jnp.asarray([SIX]), depth=3)
    assert marked.astype(int).tolist() == [SIX_ANCESTORS]
    assert reference.ancestors(SIX).astype(int).tolist() == SIX_ANCESTORS


def test_ancestors_of_a_chain_are_a_triangle():
    marked = ancestors(jnp.asarray([[0, 0, 1, 2]]), depth=3)
    assert (np.asarray(marked[0]) == np.tril(np.ones((4, 4)))).all()


def test_ancestors_of_random_trees():
    rng = np.random.default_rng(0)
    B, N = 32, 12
    parents = np.array([[0] + [rng.integers(n) for n in range(1, N)] for _ in range(B)])
    marked = np.asarray(ancestors(jnp.asarray(parents, jnp.int32), depth=N - 1))
    for b in range(B):
        np.testing.assert_array_equal(marked[b], reference.ancestors(parents[b]))
    one = marked.astype(int)
    assert (np.diagonal(one, axis1=1, axis2=2) == 1).all()  # reflexive
    assert ((one @ one > 0) <= marked).all()  # transitive
    depth = [
        [len(reference.root_path(row, n)) - 1 for n in range(N)] for row in parents
    ]
    np.testing.assert_array_equal(one.sum(-1) - 1, depth)


def test_path_of_lists_kept_nodes_by_depth():
    depths = jnp.asarray([[0, 1, 1, 2, 2, 3]] * 3)
    kept = jnp.asarray([[1, 0, 1, 0, 0, 0], [1, 1, 0, 0, 1, 0], [1, 1, 0, 1, 0, 1]]) > 0
    path = tree.path_of(kept, depths, 3)
    assert path.tolist() == [[0, 2, 0, 0], [0, 1, 4, 0], [0, 1, 3, 5]]


def test_static_parents_follow_the_paths():
    parents = tree.static_parents(tree.static(tree.EAGLE1_PATHS).paths)
    assert parents.tolist() == reference.parents_of(
        sorted(tree.EAGLE1_PATHS, key=lambda p: (len(p), p))
    )
    assert parents[:6].tolist() == [0, 0, 0, 0, 0, 1]


# --- growth and rerank, on drafters whose every answer is written down


def grown(table: np.ndarray, cfg: TreeConfig) -> tree.Tree:
    """Grows a tree below token 0 from a drafter that says row x of `table` after x."""
    t = tiny.markov_target_config(len(table))
    d = tiny.markov_draft_config(t)
    with np.errstate(divide="ignore"):
        log_table = np.maximum(np.log(table), -60)
    params = tiny.markov_params(log_table, log_table, t, d)["draft"]
    state = draft.empty(d, 1, 4)
    state = state._replace(hidden=jnp.eye(len(table))[:1].T)  # the root is token 0
    return propose(params, state, jnp.asarray([0]), d, cfg)


def paths_of(grown: tree.Tree, names: str) -> list[str]:
    parents, tokens = np.asarray(grown.parents[0]), np.asarray(grown.tokens[0])
    paths = [reference.root_path(parents, n)[1:] for n in range(1, len(parents))]
    return ["".join(names[tokens[n]] for n in path) for path in paths]


def test_the_hand_grown_tree_keeps_the_most_valuable_nodes():
    names = "_ABCDEFGHIJ."
    table = np.zeros((12, 12))
    answers = {
        "_": {"A": 0.90, "B": 0.08},
        "A": {"C": 0.70, "D": 0.20},
        "B": {"E": 0.60, "F": 0.30},
        "C": {"G": 0.80, "H": 0.10},
        "D": {"I": 0.50, "J": 0.40},
    }
    for name, below in answers.items():
        for child, share in below.items():
            table[names.index(name), names.index(child)] = share
    table[:, 11] = 1e-3  # so that every row is a law of something
    table /= table.sum(1, keepdims=True)
    kept = grown(table, TreeConfig(width=2, depth=3, n_nodes=6))
    assert paths_of(kept, names) == ["A", "AC", "AD", "ACG", "ADI"]
    assert set(paths_of(kept, names)) == {"A", "AC", "ACG", "AD", "ADI"}
    assert kept.parents.tolist() == [[0, 0, 1, 1, 2, 3]]
    assert kept.depths.tolist() == [[0, 1, 2, 2, 3, 3]]
    expected = np.log([table[0, 1], table[1, 3], table[1, 4], table[3, 7], table[4, 9]])
    np.testing.assert_allclose(kept.log_q[0, 1:], expected, atol=1e-5)


OFFERS = {
    "sure": ((0.90, 0.06, 0.02), [1, 1, 2, 2, 2, 3], 2.61),
    "unsure": ((0.40, 0.30, 0.20), [1, 1, 1, 2, 2, 2], 1.30),
}


@pytest.mark.parametrize("kind", list(OFFERS))
def test_a_constant_drafter_gets_the_tree_its_confidence_deserves(kind):
    # `width` is both children per node and nodes expanded; with three of each, more is
    # drafted than when two are expanded, but the same six nodes are kept.
    offers, depths, expected = OFFERS[kind]
    table = np.full((40, 40), (1 - sum(offers)) / 37)
    table[:, :3] = offers
    kept = grown(table, TreeConfig(width=3, depth=3, n_nodes=7))
    assert sorted(kept.depths[0, 1:].tolist()) == depths
    parents = kept.parents[0].tolist()
    value = [1.0]
    for n in range(1, 7):
        value.append(value[parents[n]] * float(np.exp(kept.log_q[0, n])))
    assert np.isclose(sum(value[1:]), expected, atol=0.005)


@pytest.mark.parametrize("kind", list(OFFERS))
@pytest.mark.parametrize("expand", [2, 3])
def test_expanding_two_or_three_of_three_children_keeps_the_same_nodes(kind, expand):
    offers, depths, expected = OFFERS[kind]
    children = [(token, float(np.log(q))) for token, q in enumerate(offers)]
    kept = reference.beam(lambda path: children, expand, 3, 6)
    assert sorted(len(path) for path, _ in kept) == depths
    assert np.isclose(sum(np.exp(value) for _, value in kept), expected, atol=0.005)


def test_rerank_prefers_the_parent_when_a_child_is_worth_as_much():
    # Certain children are worth what their parents are, again and again.
    candidates = draft.Candidates(
        tokens=jnp.asarray([[1, 2, 3, 4, 5, 6, 7, 8, 9, 10]], jnp.int32),
        parents=jnp.asarray([[-1, -1, 0, 0, 1, 1, 2, 2, 3, 3]], jnp.int32),
        log_q=jnp.zeros((1, 10)),
        log_value=jnp.zeros((1, 10)),
        place=jnp.asarray([[0, 1, 0, 1, 2, 2, 0, 1, 2, 2]], jnp.int32),
    )
    kept = draft.rerank(
        candidates, jnp.asarray([0]), TreeConfig(width=2, depth=3, n_nodes=6)
    )
    assert kept.tokens.tolist() == [[0, 1, 2, 3, 4, 5]]
    assert kept.parents.tolist() == [[0, 0, 0, 1, 1, 2]]
    assert kept.depths.tolist() == [[0, 1, 1, 2, 2, 2]]


def test_a_tree_of_certain_drafts_stays_connected():
    # float32 confidences of exactly 1: all values tie.
    table = np.zeros((6, 6))
    table[np.arange(6), (np.arange(6) + 1) % 6] = 1.0
    kept = grown(table, TreeConfig(width=2, depth=4, n_nodes=5))
    assert paths_of(kept, "abcdef") == ["b", "bc", "bcd", "bcde"]


def test_plain_decoding_has_a_tree_of_one_node():
    kept = draft.propose(
        {},
        draft.empty(DraftConfig(), 2, 4),
        jnp.asarray([7, 8]),
        DraftConfig(),
        TreeConfig(),
    )
    assert kept.tokens.tolist() == [[7], [8]]
    assert kept.parents.tolist() == kept.depths.tolist() == [[0], [0]]


def test_trees_are_verified_in_powers_of_two_while_the_batch_is_small():
    rows = [tree.rows_for(n) for n in (1, 2, 3, 5, 8, 9, 17, 26, 32, 33, 60)]
    assert rows == [1, 2, 4, 8, 8, 16, 32, 32, 32, 33, 60]
    assert tree.rows_for(6, batch=4) == 8  # 32 tokens in all
    assert tree.rows_for(6, batch=5) == 6

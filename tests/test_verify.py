"""`verify`: the sampler against NumPy, literal walks, and both rules against exact laws."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference

from eagle_jax import tree as tree_lib
from eagle_jax import verify
from eagle_jax.config import SamplingConfig
from eagle_jax.tree import Tree

SIX = [0, 0, 0, 1, 1, 3]  # the tree drawn in eagle_jax/tree.py
DEPTHS = [0, 1, 1, 2, 2, 3]
LAW_P = 1e-3  # a right law fails one test in a thousand; the seeds are fixed

sample = jax.jit(verify.sample, static_argnames="cfg")
distribution = verify.distribution  # op by op: cheaper than compiling every law
inverse_cdf = jax.jit(verify._inverse_cdf)
walk = jax.jit(verify.walk, static_argnames="depth")
accept_with_q = jax.jit(verify.accept_with_q, static_argnames="depth")


def six_node_tree(tokens: list[int], rows: int = 1) -> Tree:
    def repeat(x: list[int]) -> jax.Array:
        return jnp.broadcast_to(jnp.asarray(x, jnp.int32), (rows, len(x)))

    return Tree(repeat(tokens), repeat(SIX), repeat(DEPTHS), jnp.zeros((rows, 6)))


# --- walk


@pytest.mark.parametrize(
    ("sampled", "path", "next_token"),
    [
        ([9, 9, 9, 9, 9, 9], [0, 0, 0, 0], 9),  # nothing agrees
        ([11, 9, 9, 9, 9, 9], [0, 1, 0, 0], 9),
        ([12, 9, 8, 9, 9, 9], [0, 2, 0, 0], 8),  # a leaf that is not the first child
        ([11, 14, 9, 9, 7, 9], [0, 1, 4, 0], 7),
        ([11, 13, 9, 15, 9, 6], [0, 1, 3, 5], 6),  # to the very bottom
        ([12, 13, 9, 15, 9, 9], [0, 2, 0, 0], 9),  # agreement off the path is no use
        ([13, 13, 9, 15, 9, 9], [0, 0, 0, 0], 13),  # a grandchild's token is no use
    ],
)
def test_walk_follows_the_target_down_the_tree(sampled, path, next_token):
    tokens = [10, 11, 12, 13, 14, 15]
    verdict = walk(six_node_tree(tokens), jnp.asarray([sampled]), depth=3)
    assert verdict.path.tolist() == [path]
    assert verdict.n_accepted.tolist() == [np.count_nonzero(path)]
    assert verdict.next_token.tolist() == [next_token]
    nodes, token = reference.walk(tokens, SIX, sampled)
    assert (nodes, token) == (path[: len(nodes)], next_token)


def test_walk_agrees_with_the_reference_on_random_trees():
    rng = np.random.default_rng(0)
    B, N = 64, 9
    parents = np.array([[0] + [rng.integers(n) for n in range(1, N)] for _ in range(B)])
    depths = np.array(
        [[len(reference.root_path(row, n)) - 1 for n in range(N)] for row in parents]
    )
    tokens = np.array([rng.permutation(12)[:N] for _ in range(B)])  # distinct
    sampled = np.empty((B, N), int)
    for b, n in itertools.product(range(B), range(N)):  # mostly a child's token
        below = reference.children_of(parents[b], n)
        use = below and rng.random() < 0.8
        sampled[b, n] = tokens[b, rng.choice(below)] if use else 99
    tree = Tree(*(jnp.asarray(a, jnp.int32) for a in (tokens, parents, depths)), None)  # type: ignore[arg-type]
    tree = tree._replace(log_q=jnp.zeros((B, N)))
    verdict = walk(tree, jnp.asarray(sampled, jnp.int32), depth=N - 1)
    assert len(set(verdict.n_accepted.tolist())) > 3
    for b in range(B):
        path, token = reference.walk(tokens[b], parents[b], sampled[b])
        assert verdict.path[b, : len(path)].tolist() == path
        assert verdict.path[b, len(path) :].tolist() == [0] * (N - len(path))
        assert int(verdict.n_accepted[b]) == len(path) - 1
        assert int(verdict.next_token[b]) == token


def test_walk_has_the_law_of_the_official_rule():
    # One draw per node against the loop over siblings with q = 1, outcome by outcome.
    rng = np.random.default_rng(1)
    V, B = 6, 40_000
    tokens = [0, 2, 5, 1, 4, 3]
    p = rng.dirichlet(np.ones(V), size=6)
    law = reference.law_of_siblings(tokens, SIX, p)
    assert np.isclose(sum(law.values()), 1)
    logits = jnp.broadcast_to(
        jnp.log(jnp.asarray(p.T, jnp.float32))[:, None], (V, B, 6)
    )
    keys = jax.random.split(jax.random.key(2), B)
    sampled = sample(keys, logits, SamplingConfig(temperature=1.0))
    verdict = walk(six_node_tree(tokens, B), sampled, depth=3)
    assert p_value_of(verdict, law) > LAW_P


# --- sample


LOGITS = np.array([1.5, -0.5, 0.0, 2.0, -3.0, 0.7, 1.5, -1.0], np.float32)


def draws(logits: np.ndarray, cfg: SamplingConfig, n: int, seed: int = 0) -> np.ndarray:
    """Counts of n draws, over rows and nodes alike."""
    keys = jax.random.split(jax.random.key(seed), n // 4)
    wide = jnp.broadcast_to(
        jnp.asarray(logits)[:, None, None], (len(logits), n // 4, 4)
    )
    tokens = np.asarray(sample(keys, wide, cfg))
    return np.bincount(tokens.ravel(), minlength=len(logits))


def test_sample_has_the_law_of_softmax():
    counts = draws(LOGITS, SamplingConfig(temperature=1.0), 40_000)
    law = reference.filtered(LOGITS, SamplingConfig(temperature=1.0))
    assert reference.p_value(counts, law) > LAW_P
    other = reference.filtered(LOGITS, SamplingConfig(temperature=1.1))
    assert reference.p_value(counts, other) < LAW_P  # the test can tell laws apart


def test_sample_draws_nodes_and_rows_independently():
    n = 20_000
    keys = jax.random.split(jax.random.key(3), n)
    logits = jnp.broadcast_to(jnp.asarray(LOGITS[:4])[:, None, None], (4, n, 2))
    tokens = np.asarray(sample(keys, logits, SamplingConfig(temperature=1.0)))
    p = reference.filtered(LOGITS[:4], SamplingConfig(temperature=1.0))
    pairs = np.bincount(tokens[:, 0] * 4 + tokens[:, 1], minlength=16)
    assert reference.p_value(pairs, np.outer(p, p)) > LAW_P
    rows = np.bincount(tokens[:-1, 0] * 4 + tokens[1:, 0], minlength=16)
    assert reference.p_value(rows, np.outer(p, p)) > LAW_P


FILTERS = [
    SamplingConfig(temperature=0.7),
    SamplingConfig(temperature=1.0, top_k=3),
    SamplingConfig(temperature=1.0, top_k=1),
    SamplingConfig(temperature=1.0, top_k=99),
    SamplingConfig(temperature=1.0, top_p=0.5),
    SamplingConfig(temperature=1.0, top_p=1e-4),
    SamplingConfig(temperature=1.3, min_p=0.3),
    SamplingConfig(temperature=0.7, top_k=3, top_p=0.5),
    SamplingConfig(temperature=1.0, top_k=3, top_p=0.7),
    SamplingConfig(temperature=1.0, top_k=3, top_p=0.7, top_p_first=True),
    SamplingConfig(temperature=1.0, top_k=5, top_p=0.8, min_p=0.25),
]


@pytest.mark.parametrize("cfg", FILTERS, ids=str)
def test_filters_agree_with_the_reference(cfg):
    got = np.asarray(distribution(jnp.asarray(LOGITS)[:, None, None], cfg))[:, 0, 0]
    np.testing.assert_allclose(got, reference.filtered(LOGITS, cfg), atol=2e-7)


def test_the_order_of_filters_matters_and_is_a_switch():
    # Over all tokens 0.7 of the mass needs three; of the best three it needs only two.
    logits = np.log(np.array([0.34, 0.31, 0.2, 0.1, 0.05], np.float32))
    laws = {
        first: np.asarray(
            distribution(
                jnp.asarray(logits)[:, None, None],
                SamplingConfig(temperature=1.0, top_k=3, top_p=0.7, top_p_first=first),
            )
        )[:, 0, 0]
        for first in (False, True)
    }
    assert np.count_nonzero(laws[False]) == 2
    assert np.count_nonzero(laws[True]) == 3


def test_large_nuclei_and_small_ones_in_one_batch():
    # The first row keeps few tokens, the second most; neither minds the other.
    rng = np.random.default_rng(3)
    logits = rng.normal(size=(3000, 2, 3)) * np.array([8.0, 1.0])[:, None]
    cfg = SamplingConfig(temperature=1.0, top_p=0.9)
    together = np.asarray(distribution(jnp.asarray(logits, jnp.float32), cfg))
    kept = (together > 0).sum(axis=0)
    assert kept[0].max() < 256 < kept[1].min()
    for b in range(2):
        alone = distribution(jnp.asarray(logits[:, b : b + 1], jnp.float32), cfg)
        np.testing.assert_array_equal(together[:, b], alone[:, 0])
        for n in range(3):
            want = reference.filtered(logits[:, b, n], cfg)
            np.testing.assert_allclose(together[:, b, n], want, atol=2e-7)


def test_tokens_tied_with_the_last_one_kept_are_kept():
    logits = jnp.asarray([2.0, 1.0, 1.0, 1.0, 0.0])[:, None, None]
    for cfg in (
        SamplingConfig(temperature=1.0, top_k=2),
        SamplingConfig(temperature=1.0, top_p=0.6),
    ):
        p = np.asarray(distribution(logits, cfg))[:, 0, 0]
        assert np.count_nonzero(p) == 4, cfg
        assert p[1] == p[2] == p[3]


def test_tokens_that_differ_in_the_last_bit_are_told_apart():
    second = np.float32(-1.1)
    logits = np.array([0.0, second, np.nextafter(second, np.float32(-2)), -3.0])
    for cfg in (
        SamplingConfig(temperature=1.0, top_k=2),
        SamplingConfig(temperature=1.0, top_p=0.7),
    ):
        p = distribution(jnp.asarray(logits, jnp.float32)[:, None, None], cfg)
        assert np.count_nonzero(p) == 2, cfg


@pytest.mark.parametrize("cfg", FILTERS[4:8], ids=str)
def test_no_draw_leaves_the_filtered_set(cfg):
    counts = draws(LOGITS, cfg, 40_000)
    law = reference.filtered(LOGITS, cfg)
    assert counts[law == 0].sum() == 0
    assert reference.p_value(counts, law) > LAW_P


@pytest.mark.parametrize("temperature", [0.0, 1e-6, 1e-4])
@pytest.mark.parametrize("top_p", [0.0, 1e-4])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_tiny_temperatures_give_the_argmax(temperature, top_p, dtype):
    cfg = SamplingConfig(temperature=temperature, top_p=top_p)
    logits = jnp.asarray([-80.0, 79.0, 80.0, -80.0, 78.5], dtype).astype(jnp.float32)
    keys = jax.random.split(jax.random.key(0), 16)
    tokens = sample(keys, jnp.broadcast_to(logits[:, None, None], (5, 16, 2)), cfg)
    assert tokens.tolist() == [[2, 2]] * 16
    if temperature:
        p = np.asarray(distribution(logits[:, None, None], cfg))
        assert np.isfinite(p).all() and p[2] == 1


def test_argmax_prefers_the_lowest_id_on_ties():
    logits = np.zeros((9, 1, 1), np.float32)
    logits[[3, 7]] = 1.0
    keys = jax.random.split(jax.random.key(0), 1)
    assert sample(keys, jnp.asarray(logits), SamplingConfig()).tolist() == [[3]]
    assert np.argmax(logits) == 3


def test_a_row_draws_the_same_whatever_its_neighbours():
    cfg = SamplingConfig(temperature=1.0)
    rng = np.random.default_rng(4)
    logits = jnp.asarray(rng.normal(size=(8, 4, 3)), jnp.float32)
    keys = jax.vmap(jax.random.key)(jnp.arange(4))
    together = sample(keys, logits, cfg)
    for row in range(4):
        alone = sample(keys[row : row + 1], logits[:, row : row + 1], cfg)
        assert alone.tolist() == together[row : row + 1].tolist()


def test_without_a_law_the_draw_lies_outside_the_vocabulary():
    # One NaN among 300 logits, away from where a wrong index would look.
    for V, bad in ((8, 0), (300, 2)):
        logits = np.zeros((V, 1, 1), np.float32)
        logits[bad] = np.nan
        keys = jax.random.split(jax.random.key(0), 1)
        token = sample(keys, jnp.asarray(logits), SamplingConfig(temperature=1.0))
        assert token.tolist() == [[V]]
        token = sample(keys, jnp.asarray(logits), SamplingConfig())
        assert token.tolist() == [[bad]]


# --- _inverse_cdf


def numpy_inverse_cdf(p: np.ndarray, u: np.ndarray) -> np.ndarray:
    total = np.cumsum(p.astype(np.float64))
    return np.searchsorted(total, u.astype(np.float64) * total[-1], side="right")


def laws_of(V: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(5)
    peaked = np.zeros(V)
    peaked[[7, 255, 256, 40_000 % V, V - 1]] = [0.9, 0.04, 0.03, 0.02, 0.01]
    zipf = 1 / np.arange(1, V + 1)
    gaps = rng.random(V) * (rng.random(V) < 0.01)
    laws = {
        "flat": np.ones(V),
        "peaked": peaked,
        "zipf": rng.permutation(zipf),
        "gaps": gaps,
        "first": (np.arange(V) == 0) * 1.0,
        "last": (np.arange(V) == V - 1) * 1.0,
    }
    return {name: (p / p.sum()).astype(np.float32) for name, p in laws.items()}


@pytest.mark.parametrize("name", ["flat", "peaked", "zipf", "gaps", "first", "last"])
def test_inverse_cdf_agrees_with_a_cumulative_sum(name):
    V, n = 49152, 48
    p = laws_of(V)[name]
    u = np.random.default_rng(6).random(n).astype(np.float32)
    u[:3] = [0.0, np.nextafter(np.float32(1), np.float32(0)), 0.5]
    wide = jnp.broadcast_to(jnp.asarray(p)[:, None, None], (V, 1, n))
    got = np.asarray(inverse_cdf(wide, jnp.asarray(u)[None]))[0]
    assert (p[got] > 0).all()
    want = numpy_inverse_cdf(p, u)
    want = np.minimum(want, np.flatnonzero(p)[-1])
    # float32 sums may choose a neighbour, but only where u lies this near a boundary.
    total = np.cumsum(p.astype(np.float64))
    low, high = np.minimum(got, want), np.maximum(got, want)
    between = total[np.maximum(high - 1, 0)] - total[low]
    wrong = got != want
    near = np.abs(total[low] - u * total[-1]) + np.abs(between)
    assert (near[wrong] < 2e-6).all()
    limit = {"flat": 0.25, "zipf": 0.1, "gaps": 0.02}.get(name, 0.0)
    assert wrong.mean() <= limit
    if name in ("peaked", "first", "last"):
        assert not wrong.any()


def test_inverse_cdf_never_returns_a_token_of_probability_zero():
    # Every u on the float32 grid near 0, near 1 and at the boundaries of the law.
    p = np.array([0, 0.25, 0, 0.25, 0, 0, 0.5, 0], np.float32)
    edges = np.array([0, 0.25, 0.5, 1.0], np.float32)
    steps = np.arange(-40, 41, dtype=np.float32) * np.float32(2**-24)
    u = np.unique(np.clip(edges[:, None] + steps, 0, np.float32(1 - 2**-24)))
    wide = jnp.broadcast_to(jnp.asarray(p)[:, None, None], (8, 1, len(u)))
    got = np.asarray(inverse_cdf(wide, jnp.asarray(u)[None]))[0]
    np.testing.assert_array_equal(got, numpy_inverse_cdf(p, u))
    assert set(got) == {1, 3, 6}


def test_inverse_cdf_survives_rounding_at_the_ends_of_blocks():
    # A thousand laws full of gaps, half of them with empty last blocks, and u on or beside
    # the end of a block, where sums in another order disagree.
    V, n, block = 1024, 1024, verify._BLOCK
    rng = np.random.default_rng(20)
    p = rng.random((V, n)) * (rng.random((V, n)) < 0.1)
    p[V // 2 :, : n // 2] = 0
    p = (p / p.sum(0) * rng.choice([1, 1.0000003, 3, 0.7], n)).astype(np.float32)
    mass = np.cumsum(p.reshape(-1, block, n).sum(1), axis=0, dtype=np.float32)
    end = mass[rng.integers(0, V // block, n), np.arange(n)] / mass[-1]
    u = end + rng.integers(-2, 2, n) * np.float32(2**-24)
    u = np.clip(u, 0, 1 - 2**-24).astype(np.float32)
    got = np.asarray(inverse_cdf(jnp.asarray(p)[:, None], jnp.asarray(u)[None]))[0]
    assert (got < V).all()
    assert (p[got, np.arange(n)] > 0).all()


# --- accept_with_q


def draw_trees(rng: np.random.Generator, q: np.ndarray, parents: list[int], rows: int):
    """Drawn trees: siblings one after the other without replacement, in plain NumPy."""
    N, V = q.shape
    tokens = np.zeros((rows, N), np.int32)
    for node in range(N):
        below = reference.children_of(parents, node)
        left = np.broadcast_to(q[node], (rows, V)).copy()
        for child in below:
            share = np.cumsum(left, axis=1)
            u = rng.random((rows, 1)) * share[:, -1:]
            tokens[:, child] = (share <= u).sum(axis=1)
            left[np.arange(rows), tokens[:, child]] = 0
    return tokens


def verdicts(tokens, parents, q, p, seed, rule=accept_with_q):
    rows, N = tokens.shape
    depths = [len(reference.root_path(parents, n)) - 1 for n in range(N)]
    tree = Tree(
        jnp.asarray(tokens),
        jnp.broadcast_to(jnp.asarray(parents, jnp.int32), (rows, N)),
        jnp.broadcast_to(jnp.asarray(depths, jnp.int32), (rows, N)),
        jnp.zeros((rows, N)),
    )

    def wide(x: np.ndarray) -> jax.Array:
        shape = (x.shape[1], rows, N)
        return jnp.broadcast_to(jnp.asarray(x.T, jnp.float32)[:, None], shape)

    keys = jax.random.split(jax.random.key(seed), rows)
    with np.errstate(divide="ignore"):
        log_q = wide(np.log(q))
    return rule(keys, tree, log_q, wide(p), depth=max(depths))


def p_value_of(verdict: verify.Verdict, law: dict) -> float:
    """Chi-square of (accepted path, next token) against an exact law of outcomes."""
    outcomes = list(law)
    index = {outcome: i for i, outcome in enumerate(outcomes)}
    counts = np.zeros(len(outcomes))
    rows = zip(
        np.asarray(verdict.path),
        np.asarray(verdict.n_accepted),
        np.asarray(verdict.next_token),
        strict=True,
    )
    for path, n, token in rows:
        outcome = (tuple(path[: n + 1].tolist()), int(token))
        if outcome not in index:
            return 0.0
        counts[index[outcome]] += 1
    return reference.p_value(counts, np.array(list(law.values())))


def drafts(rng: np.random.Generator, N: int, V: int) -> dict[str, tuple]:
    p = rng.dirichlet(np.ones(V), size=N)
    q = rng.dirichlet(np.ones(V), size=N)
    never_p, never_q = p.copy(), q.copy()
    never_p[:, V // 2 :], never_q[:, : V // 2] = 0, 0
    for law in (never_p, never_q):
        law /= law.sum(axis=1, keepdims=True)
    small = q.copy()
    small[:, ::2] = 0  # a draft vocabulary of every other token
    small /= small.sum(axis=1, keepdims=True)
    return {
        "random": (p, q),
        "perfect": (p, p),
        "always wrong": (never_p, never_q),
        "small vocabulary": (p, small),
    }


@pytest.mark.parametrize(
    "kind", ["random", "perfect", "always wrong", "small vocabulary"]
)
def test_accept_with_q_has_the_outcomes_of_algorithm_1(kind):
    # On one fixed tree: paths and next tokens, not only the law of what is emitted.
    rng = np.random.default_rng(7)
    p, q = drafts(rng, 6, 8)[kind]
    tokens = draw_trees(rng, q, SIX, 1)
    law = reference.law_with_q(tokens[0].tolist(), SIX, q, p)
    assert np.isclose(sum(law.values()), 1)
    verdict = verdicts(np.repeat(tokens, 40_000, 0), SIX, q, p, seed=8)
    assert p_value_of(verdict, law) > LAW_P
    if kind == "perfect":
        assert (np.asarray(verdict.n_accepted) == 3).all()
    if kind == "always wrong":
        assert (np.asarray(verdict.n_accepted) == 0).all()


def first_token(tokens: np.ndarray, verdict: verify.Verdict) -> np.ndarray:
    path = np.asarray(verdict.path)
    first = np.take_along_axis(tokens, path[:, 1:2], axis=1)[:, 0]
    return np.where(
        np.asarray(verdict.n_accepted) > 0, first, np.asarray(verdict.next_token)
    )


WIDE = [0, 0, 0, 0]  # three siblings
CHAIN = [0, 0, 1, 2]


@pytest.mark.parametrize("parents", [WIDE, CHAIN], ids=["siblings", "chain"])
@pytest.mark.parametrize(
    "kind", ["random", "perfect", "always wrong", "small vocabulary"]
)
def test_accept_with_q_keeps_the_target_law(kind, parents):
    rng = np.random.default_rng(9)
    p, q = drafts(rng, 4, 8)[kind]
    tokens = draw_trees(rng, q, parents, 40_000)
    verdict = verdicts(tokens, parents, q, p, seed=10)
    counts = np.bincount(first_token(tokens, verdict), minlength=8)
    assert reference.p_value(counts, p[0]) > LAW_P


def test_the_reference_rule_keeps_the_target_law_exactly():
    rng = np.random.default_rng(11)
    p, q = drafts(rng, 4, 5)["random"]
    emitted = np.zeros(5)
    for draw, mass in reference.law_of_draws(q[0], 3).items():
        tokens = [0, *draw]
        for (path, token), share in reference.law_with_q(tokens, WIDE, q, p).items():
            emitted[tokens[path[1]] if len(path) > 1 else token] += mass * share
    np.testing.assert_allclose(emitted, p[0], atol=1e-12)


def accepts_by_q_alone(keys, tree, log_q, p, depth):
    """Forgets p: accepts a sibling as often as the draft offers it."""
    return verify.accept_with_q(keys, tree, log_q, jnp.exp(log_q), depth)


def keeps_the_rejected_law(keys, tree, log_q, p, depth):
    """Forgets the residual: after a rejection draws from p itself, without the token."""
    sampled = verify.sample(keys, jnp.log(p), SamplingConfig(temperature=1.0))
    verdict = verify.accept_with_q(keys, tree, log_q, p, depth)
    return verdict._replace(
        next_token=jnp.where(verdict.n_accepted == 0, sampled[:, 0], verdict.next_token)
    )


@pytest.mark.parametrize("rule", [accepts_by_q_alone, keeps_the_rejected_law])
def test_the_law_test_rejects_a_biased_rule(rule):
    rng = np.random.default_rng(9)
    p, q = drafts(rng, 4, 8)["random"]
    tokens = draw_trees(rng, q, WIDE, 40_000)
    biased = jax.jit(rule, static_argnames="depth")
    verdict = verdicts(tokens, WIDE, q, p, seed=10, rule=biased)
    counts = np.bincount(first_token(tokens, verdict), minlength=8)
    assert reference.p_value(counts, p[0]) < 1e-6


def test_soft_q_on_greedy_drafts_would_be_biased():
    # The proof needs children drawn from the q in the formula: the argmax is not.
    rng = np.random.default_rng(12)
    p, q = drafts(rng, 2, 8)["random"]
    best = int(np.argmax(q[0]))
    tokens = np.tile(np.array([[0, best]], np.int32), (40_000, 1))
    verdict = verdicts(tokens, [0, 0], q, p, seed=13)
    counts = np.bincount(first_token(tokens, verdict), minlength=8)
    assert reference.p_value(counts, p[0]) < 1e-6
    point = np.eye(8)[[best, best]]
    verdict = verdicts(tokens, [0, 0], point, p, seed=13)
    counts = np.bincount(first_token(tokens, verdict), minlength=8)
    assert reference.p_value(counts, p[0]) > LAW_P


def test_an_empty_residual_gives_no_nan():
    # p equals q, and the token offered has no mass in either: it is always rejected, and
    # nothing is left of p - q.
    p = np.array([[0.5, 0.5, 0.0], [0.2, 0.3, 0.5]])
    tokens = np.tile(np.array([[0, 2]], np.int32), (4000, 1))
    verdict = verdicts(tokens, [0, 0], p, p, seed=14)
    counts = np.bincount(np.asarray(verdict.next_token), minlength=3)
    assert (np.asarray(verdict.n_accepted) == 0).all()
    assert reference.p_value(counts, p[0]) > LAW_P


def test_siblings_that_use_up_the_draft_are_handled():
    # Three siblings are all the draft can say; the target wants something else.
    p = np.array([[0.1, 0.0, 0.1, 0.8]] * 4)
    q = np.array([[0.6, 0.3, 0.1, 0.0]] * 4)
    rng = np.random.default_rng(15)
    tokens = draw_trees(rng, q, WIDE, 20_000)
    verdict = verdicts(tokens, WIDE, q, p, seed=16)
    counts = np.bincount(first_token(tokens, verdict), minlength=4)
    assert reference.p_value(counts, p[0]) > LAW_P


def test_nan_in_p_ends_the_path_outside_the_vocabulary():
    p = np.full((4, 8), np.nan)
    q = np.full((4, 8), 1 / 8)
    verdict = verdicts(np.array([[0, 1, 2, 3]], np.int32), WIDE, q, p, seed=17)
    assert verdict.n_accepted.tolist() == [0]
    assert verdict.next_token.tolist() == [8]


def test_accept_with_q_treats_rows_independently():
    rng = np.random.default_rng(18)
    p, q = drafts(rng, 6, 8)["random"]
    tokens = draw_trees(rng, q, SIX, 5)
    together = verdicts(tokens, SIX, q, p, seed=19)
    keys = jax.random.split(jax.random.key(19), 5)
    tree = six_node_tree([0] * 6, 1)
    wide = functools.partial(jnp.asarray, dtype=jnp.float32)
    for row in range(5):
        alone = accept_with_q(
            keys[row : row + 1],
            tree._replace(tokens=jnp.asarray(tokens[row : row + 1])),
            wide(np.log(q.T))[:, None],
            wide(p.T)[:, None],
            depth=3,
        )
        assert alone.path.tolist() == together.path[row : row + 1].tolist()
        assert int(alone.next_token[0]) == int(together.next_token[row])


def test_static_parents_are_what_the_walks_expect():
    paths = ((0,), (1,), (0, 0), (0, 1), (0, 0, 0))
    assert tree_lib.static_parents(paths).tolist() == SIX
    assert reference.parents_of(paths) == SIX

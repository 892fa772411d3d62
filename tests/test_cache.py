"""`cache`: what is committed stays, in order, and rows do not meet."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eagle_jax import cache
from eagle_jax.layers import KV

B, K, C, S, T = 3, 2, 4, 24, 5
append = jax.jit(cache.append)


def block(seed: int, rows: int) -> tuple[KV, ...]:
    rng = np.random.default_rng(seed)

    def draw(*shape: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=(rows, K, *shape)))

    return tuple(KV(draw(C, T), draw(T, C)) for _ in range(2))


@pytest.mark.parametrize("rows", [1, B])
def test_append_equals_a_list_append(rows):
    # One row goes through a plain slice update, several through a vmapped one.
    rng = np.random.default_rng(0)
    at = cache.init(2, rows, K, C, S, "float32")
    lists = [[[] for _ in range(rows)] for _ in range(2)]
    for round_ in range(4):
        count = rng.integers(0, T, size=rows)
        new = block(round_, rows)
        before = at
        at = append(at, new, jnp.asarray(count, jnp.int32))
        for layer in range(2):
            for b in range(rows):
                for t in range(count[b]):
                    lists[layer][b].append(np.asarray(new[layer].k[b, :, :, t]))
                n = len(lists[layer][b])
                assert int(at.length[b]) == n
                got = np.asarray(at.k[layer][b, :, :, :n])
                want = np.stack(lists[layer][b], -1) if n else got
                np.testing.assert_array_equal(got, want)
                old = int(before.length[b])
                np.testing.assert_array_equal(
                    at.v[layer][b, :, :old], before.v[layer][b, :, :old]
                )


def test_values_go_where_keys_go():
    at = append(
        cache.init(2, B, K, C, S, "float32"), block(1, B), jnp.asarray([5, 2, 0])
    )
    at = append(at, block(2, B), jnp.asarray([1, 1, 1]))
    assert at.length.tolist() == [6, 3, 1]
    for b, start in enumerate([5, 2, 0]):
        for layer in range(2):
            new = block(2, B)[layer]
            np.testing.assert_array_equal(
                at.k[layer][b, :, :, start], new.k[b, :, :, 0]
            )
            np.testing.assert_array_equal(at.v[layer][b, :, start], new.v[b, :, 0])


def test_committed_marks_the_slots_below_each_length():
    at = cache.init(1, 3, K, C, 4, "float32")._replace(length=jnp.asarray([0, 2, 4]))
    seen = cache.committed(at, 2).astype(int)
    assert seen.tolist() == [[[0] * 4] * 2, [[1, 1, 0, 0]] * 2, [[1] * 4] * 2]


@pytest.mark.parametrize("n", [1, 255, 256, 257, 512, 1000, 2048, 6144, 131072])
def test_a_read_covers_what_is_in_use_and_less_than_a_step_more(n):
    sizes = cache.prefixes(n)
    steps = np.diff((0, *sizes))
    assert sizes[-1] == n and len(steps) <= 8
    assert max(steps) == steps[0] <= max(256, n / 8 + 128)
    assert all(size % 128 == 0 for size in sizes[:-1])
    # `target.forward` finds the size by division.
    for used in (1, steps[0], steps[0] + 1, n):
        used = min(int(used), n)
        chosen = sizes[(used - 1) // sizes[0]]
        assert used <= chosen < used + sizes[0]


def test_the_first_slots_of_a_layer_are_the_same_in_both_forms():
    rng = np.random.default_rng(5)
    k, v = rng.normal(size=(3, B, K, C, S)), rng.normal(size=(3, B, K, S, C))
    length = jnp.zeros(B, jnp.int32)
    k, v = jnp.asarray(k), jnp.asarray(v)
    stacked = cache.KVCache(k, v, length)
    listed = cache.KVCache(tuple(k), tuple(v), length)
    for at, layer in ((stacked, jnp.asarray(1)), (listed, 1)):
        first = cache.first(at, layer, 5)
        np.testing.assert_array_equal(first.k, k[1, ..., :5])
        np.testing.assert_array_equal(first.v, v[1, :, :, :5])


def test_a_block_up_to_the_last_slot_fits():
    at = cache.init(2, B, K, C, S, "float32")
    at = at._replace(length=jnp.asarray([S - T, 3, 0]))
    first = jax.tree.map(lambda x: jnp.full_like(x, 7.0), (at.k, at.v))
    at = at._replace(k=first[0], v=first[1])
    new = append(at, block(3, B), jnp.asarray([T, 1, 0]))
    np.testing.assert_array_equal(new.k[0][0, :, :, : S - T], 7.0)
    np.testing.assert_array_equal(new.k[0][0, :, :, S - T :], block(3, B)[0].k[0])


def test_take_picks_the_accepted_path_row_by_row():
    new = block(4, 2)
    path = jnp.asarray([[0, 3, 0], [0, 1, 4]])
    for got, old in zip(cache.take(new, path), new, strict=True):
        assert isinstance(got, KV)
        for b in range(2):
            np.testing.assert_array_equal(got.k[b], old.k[b][:, :, path[b]])
            np.testing.assert_array_equal(got.v[b], old.v[b][:, path[b]])


def test_a_cache_without_layers_has_no_slots():
    at = cache.init(0, 2, 1, 0, 16, "float32")
    assert at.n_slots == 0
    assert cache.append(at, (), jnp.asarray([1, 2])).length.tolist() == [1, 2]

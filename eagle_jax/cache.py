"""The K/V cache of committed tokens: the only code that touches cache slots.

Slots below `length` hold committed tokens in order; slots at or above it get weight 0, so
any finite number may stand there. A NaN would not do, 0 x NaN being NaN, but zeroing the
values there would cost compilers another pass over the cache. None gets there unless the
target itself makes it, and then the row is reported (`decode.unpack`), never altered.
A forward reads the cache and returns the keys and values of its own tokens beside it; only
`append` writes, once a step, after every read. So under a `while_loop` with donated state
the write happens in place, and a rejected node never enters the cache at all.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from eagle_jax.layers import KV


class KVCache(NamedTuple):
    """Keys and values per layer, and how many slots of each row are committed.

    Where the layers are stacked (`TargetConfig.stacked`) each is one array, layers first.
    """

    k: tuple[Float[Array, "B K C S"], ...] | Float[Array, "L B K C S"]
    v: tuple[Float[Array, "B K C S"], ...] | Float[Array, "L B K C S"]
    length: Int[Array, " B"]

    @property
    def n_slots(self) -> int:
        return self.k[0].shape[-1] if len(self.k) else 0


def init(
    n_layers: int,
    rows: int,
    n_kv_heads: int,
    head_dim: int,
    slots: int,
    dtype: str,
    stacked: bool = False,
) -> KVCache:
    """Returns an empty cache."""
    shape = (rows, n_kv_heads, head_dim, slots)
    if stacked:
        return KVCache(
            k=jnp.zeros((n_layers, *shape), dtype),
            v=jnp.zeros((n_layers, *shape), dtype),
            length=jnp.zeros((rows,), jnp.int32),
        )
    return KVCache(
        k=tuple(jnp.zeros(shape, dtype) for _ in range(n_layers)),
        v=tuple(jnp.zeros(shape, dtype) for _ in range(n_layers)),
        length=jnp.zeros((rows,), jnp.int32),
    )


def committed(cache: KVCache, n_queries: int) -> Bool[Array, "B T S"]:
    """Returns the mask under which every query sees all committed slots."""
    slots = jnp.arange(cache.n_slots)
    seen = slots[None, None, :] < cache.length[:, None, None]
    return jnp.broadcast_to(seen, (seen.shape[0], n_queries, seen.shape[2]))


def append(
    cache: KVCache, new: tuple[KV, ...] | KV, count: Int[Array, " B"]
) -> KVCache:
    """Writes new tokens behind the committed ones, commits the first `count` of a row.

    The caller guarantees room for the whole block (`decode.start` checks it before
    anything runs): `dynamic_update_slice` would otherwise move the block back over
    committed slots without a word.
    """
    if isinstance(new, KV):  # stacked

        def write(old: Any, layers: Array) -> Array:
            return jax.vmap(_write, (0, 0, None))(old, layers, cache.length)

        return KVCache(
            write(cache.k, new.k), write(cache.v, new.v), cache.length + count
        )
    return KVCache(
        k=tuple(
            _write(c, n.k, cache.length) for c, n in zip(cache.k, new, strict=True)
        ),
        v=tuple(
            _write(c, n.v, cache.length) for c, n in zip(cache.v, new, strict=True)
        ),
        length=cache.length + count,
    )


def _write(
    old: Float[Array, "B K C S"], new: Float[Array, "B K C T"], start: Int[Array, " B"]
) -> Float[Array, "B K C S"]:
    new = new.astype(old.dtype)
    if old.shape[0] == 1:  # a plain slice update, which compilers do in place
        return jax.lax.dynamic_update_slice(old, new, (0, 0, 0, start[0]))
    return jax.vmap(lambda o, n, s: jax.lax.dynamic_update_slice(o, n, (0, 0, s)))(
        old, new, start
    )


def take(new: tuple[KV, ...] | KV, path: Int[Array, "B M"]) -> tuple[KV, ...] | KV:
    """Picks the tokens at `path` out of each layer's new keys and values, row by row."""
    index = path[:, None, None, :]

    def pick(leaf: Array) -> Array:
        return jnp.take_along_axis(leaf, index[(None,) * (leaf.ndim - 4)], -1)

    return jax.tree.map(pick, new)

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
    v: tuple[Float[Array, "B K S C"], ...] | Float[Array, "L B K S C"]
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

    def zeros(*shape: int) -> Any:
        if stacked:
            return jnp.zeros((n_layers, rows, n_kv_heads, *shape), dtype)
        one = (rows, n_kv_heads, *shape)
        return tuple(jnp.zeros(one, dtype) for _ in range(n_layers))

    return KVCache(
        k=zeros(head_dim, slots),
        v=zeros(slots, head_dim),
        length=jnp.zeros((rows,), jnp.int32),
    )


def committed(
    cache: KVCache, n_queries: int, n_slots: int | None = None
) -> Bool[Array, "B T S"]:
    """Returns the mask under which every query sees all committed slots.

    Args:
      n_slots: so many of the first slots are looked at; all by default.
    """
    slots = jnp.arange(cache.n_slots if n_slots is None else n_slots)
    seen = slots[None, None, :] < cache.length[:, None, None]
    return jnp.broadcast_to(seen, (seen.shape[0], n_queries, seen.shape[2]))


def prefixes(n_slots: int) -> tuple[int, ...]:
    """Returns how many slots a read may cover: steps of an eighth, 256 at the least.

    So it covers what is in use and less than a step more. Programs have fixed shapes, and
    each size is one more branch of them; TPUs want whole tiles of 128 slots.
    """
    step = max(256, -(-n_slots // 1024) * 128)
    return (*range(step, n_slots, step), n_slots)


def first(cache: KVCache, layer: int | Int[Array, ""], n: int) -> KV:
    """Returns the first `n` slots of one layer."""
    k, v = cache.k, cache.v
    if isinstance(k, tuple) or isinstance(v, tuple):
        return KV(k[layer][..., :n], v[layer][:, :, :n])
    # One slice, which compilers read in place; of two the first would be a copy.
    _, B, K, C, _ = k.shape
    at = (layer, 0, 0, 0, 0)
    k = jax.lax.dynamic_slice(k, at, (1, B, K, C, n))
    v = jax.lax.dynamic_slice(v, at, (1, B, K, n, C))
    return KV(k[0], v[0])


def append(
    cache: KVCache, new: tuple[KV, ...] | KV, count: Int[Array, " B"]
) -> KVCache:
    """Writes new tokens behind the committed ones, commits the first `count` of a row.

    The caller guarantees room for the whole block (`decode.start` checks it before
    anything runs): `dynamic_update_slice` would otherwise move the block back over
    committed slots without a word.
    """
    if isinstance(new, KV):  # stacked
        write: Any = jax.vmap(_write, (0, 0, None))
        old: Any = cache[:2]
        k, v = write(KV(*old), new, cache.length)
        return KVCache(k, v, cache.length + count)
    layers = zip(cache.k, cache.v, new, strict=True)
    written = [_write(KV(k, v), n, cache.length) for k, v, n in layers]
    return KVCache(
        k=tuple(kv.k for kv in written),
        v=tuple(kv.v for kv in written),
        length=cache.length + count,
    )


def _write(old: KV, new: KV, start: Int[Array, " B"]) -> KV:
    """Writes one layer's block from slot `start` of each row on."""
    if len(start) == 1:  # a plain slice update, which compilers do in place
        return put(old, new, start[0])
    one_row = jax.tree.map(lambda leaf: leaf[:, None], (old, new))
    written = jax.vmap(put)(one_row[0], one_row[1], start)
    return jax.tree.map(lambda leaf: leaf[:, 0], written)


def put(old: KV, new: KV, at: Int[Array, ""]) -> KV:
    """Writes a block into the same slots of all rows, from slot `at` on."""
    k = jax.lax.dynamic_update_slice(old.k, new.k.astype(old.k.dtype), (0, 0, 0, at))
    v = jax.lax.dynamic_update_slice(old.v, new.v.astype(old.v.dtype), (0, 0, at, 0))
    return KV(k, v)


def take(new: tuple[KV, ...] | KV, path: Int[Array, "B M"]) -> tuple[KV, ...] | KV:
    """Picks the tokens at `path` out of each layer's new keys and values, row by row."""
    B, M = path.shape

    def pick(kv: KV) -> KV:
        lead = (1,) * (kv.k.ndim - 4)  # stacked layers
        k = jnp.take_along_axis(kv.k, path.reshape(*lead, B, 1, 1, M), -1)
        v = jnp.take_along_axis(kv.v, path.reshape(*lead, B, 1, M, 1), -2)
        return KV(k, v)

    return pick(new) if isinstance(new, KV) else tuple(map(pick, new))

"""Array maths of one decoder block, shared by target and draft.

Activations are `[D, B, T]`: all matrices are `[out, in]` and multiply from the left. Keys
live as `[B, K, C, S]` and values as `[B, K, S, C]`: both are then the right side of a plain
product, which CPUs read several times faster than a transposed one.
Attention takes several *segments* of keys (the committed cache, the new tokens, a tree's
scratch) under one softmax, so that nothing has to be copied together first.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from eagle_jax import columns
from eagle_jax.config import RopeScaling

Params = dict[str, Any]


class Segment(NamedTuple):
    """Keys and values with the mask that says which queries may look at which slots."""

    k: Float[Array, "B K C S"]
    v: Float[Array, "B K S C"]
    mask: Bool[Array, "B T S"]


class Int8(NamedTuple):
    """A matrix in whole numbers of -127 to 127, times a factor for each output."""

    whole: Int[Array, "*out in"]
    scale: Float[Array, "*out 1"]


Matrix = Float[Array, "*out_in"] | Int8
QUANTISED = ("embed", "head", "wqkv", "wo", "w_gate_up", "w_down")


def quantise(params: Params) -> Params:
    """Stores the matrices of a target as `Int8`, a quarter of float32 and half of bfloat16.

    The largest weight of every output becomes 127 and the others the nearest whole number.
    An embedding that is not the LM head too stays: of it a step reads a few rows only.
    Speculation stays exact: the target is then the quantised one.
    """
    names = [name for name in QUANTISED if name != "embed" or "head" not in params]

    def store(w: Array) -> Int8:
        w32 = w.astype(jnp.float32)
        largest = jnp.abs(w32).max(axis=-1, keepdims=True)
        scale = jnp.where(largest == 0, 1.0, largest / 127).astype(w.dtype)  # NaN stays
        whole = jnp.round(w32 / scale.astype(jnp.float32)).astype(jnp.int8)
        return Int8(whole, scale)

    def visit(path: tuple[Any, ...], w: Array) -> Any:
        is_matrix = path and getattr(path[-1], "key", None) in names
        return store(w) if is_matrix else w

    return jax.tree_util.tree_map_with_path(visit, params)


def dense(w: Matrix) -> Array:
    """Returns a matrix as floating-point numbers, quantised or not."""
    return w.whole.astype(w.scale.dtype) * w.scale if isinstance(w, Int8) else w


def look_up(table: Matrix, ids: Int[Array, "*any"]) -> Float[Array, "*any D"]:
    """Returns rows of an embedding, or of an LM head."""
    if isinstance(table, Int8):
        return dense(Int8(table.whole[ids], table.scale[ids]))
    return table[ids]


def linear(w: Matrix, x: Float[Array, "*in B T"]) -> Array:
    """Multiplies a matrix `[*out, *in]` with every token of `[*in, B, T]`.

    It is one product over one axis: compilers are known to transpose weights for einsums
    over split axes. What is quantised has one input axis. Float32 products ask for full
    precision: TPUs otherwise round their inputs to bfloat16, and greedy identity would not
    be a float32 claim any more.
    """
    n_in = x.ndim - 2
    if isinstance(w, Int8):
        product = _whole_times(w.whole, x.reshape(w.whole.shape[-1], -1)) * w.scale
        return product.reshape(*w.whole.shape[:-1], *x.shape[n_in:])
    out, inner = w.shape[: w.ndim - n_in], math.prod(x.shape[:n_in])
    precision = "highest" if x.dtype == jnp.float32 else None
    flat = x.reshape(inner, -1)
    by_xla = functools.partial(jnp.dot, precision=precision)
    if columns.suits(rows := w.reshape(-1, inner), flat):
        product = jax.lax.platform_dependent(
            rows, flat, cpu=columns.product, default=by_xla
        )
    else:
        product = by_xla(w.reshape(*out, inner), flat)
    return product.reshape(*out, *x.shape[n_in:])


def _whole_times(w: Int[Array, "*out X"], x: Float[Array, "X M"]) -> Array:
    """Multiplies whole numbers with columns.

    CPUs would write all weights down as floating-point numbers before a product; a sum of
    multiples does not. XLA's sum for one column alone is slow, so one is done as two.
    """
    precision = "highest" if x.dtype == jnp.float32 else None

    def by_product(w: Array, x: Array) -> Array:
        return jnp.dot(w.astype(x.dtype), x, precision=precision)

    def by_sum(w: Array, x: Array) -> Array:
        # Flat: XLA (jax 0.10.2) gets such sums of five axes wrong, the first of size one.
        rows = w.reshape(-1, 1, len(x)).astype(jnp.float32)
        terms = rows * x.T[None].astype(jnp.float32)
        return terms.sum(axis=2).astype(x.dtype).reshape(*w.shape[:-1], -1)

    def of_one(w: Array, x: Array) -> Array:
        both = by_sum(w, jnp.concatenate([x, 2 * x], axis=1))
        return both[..., 1:] - both[..., :1]  # exact, and compilers do not know

    if x.shape[1] > 128:  # then writing them down is a small part
        return by_product(w, x)
    on_cpu = of_one if x.shape[1] == 1 else by_sum
    return jax.lax.platform_dependent(w, x, cpu=on_cpu, default=by_product)


def rms_norm(
    x: Float[Array, "D B T"], scale: Float[Array, " D"], eps: float
) -> Float[Array, "D B T"]:
    """Normalises every token to unit root mean square; statistics in float32."""
    x32 = x.astype(jnp.float32)
    inverse = jax.lax.rsqrt(jnp.mean(x32 * x32, axis=0, keepdims=True) + eps)
    return (x32 * inverse).astype(x.dtype) * scale[:, None, None]


def rope_frequencies(
    head_dim: int, theta: float, scaling: RopeScaling | None
) -> Float[Array, " C2"]:
    """Returns the rotation speed of each channel pair, in radians per position.

    "dynamic" scaling changes nothing up to its original length, the only range in which
    `decode` accepts it: beyond, every new token would re-rotate the whole cache.
    """
    speed = theta ** -(jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)
    if scaling is None or scaling.kind == "dynamic":
        return speed
    if scaling.kind == "linear":
        return speed / scaling.factor
    # Llama-3.1: waves longer than the original context are stretched by `factor`, short
    # ones are kept, and those between are blended.
    waves = scaling.original_length * speed / (2 * math.pi)
    span = scaling.high_freq_factor - scaling.low_freq_factor
    kept = jnp.clip((waves - scaling.low_freq_factor) / span, 0.0, 1.0)
    return (1 - kept) * speed / scaling.factor + kept * speed


class Turns(NamedTuple):
    """Cosine and sine of every token's rotation, in float32."""

    cos: Float[Array, "C2 B T"]
    sin: Float[Array, "C2 B T"]


def turns(positions: Int[Array, "B T"], speed: Float[Array, " C2"]) -> Turns:
    """Returns the rotations of tokens at these positions, for all layers and heads.

    Angles come from the closed formula, not from a table, so no position is out of range.
    """
    angle = speed[:, None, None] * positions.astype(jnp.float32)[None]
    # The product with the identity changes nothing but that compilers keep its result. They
    # would otherwise compute both anew in every layer and for every head; on CPUs an
    # optimization_barrier is gone before they fuse.
    both = jnp.concatenate([jnp.cos(angle), jnp.sin(angle)])
    kept = linear(jnp.eye(len(both), dtype=both.dtype), both)
    return Turns(*jnp.split(kept, 2))


def rotate(x: Float[Array, "H C B T"], rotation: Turns) -> Float[Array, "H C B T"]:
    """Applies rotary position embedding, split-half form."""
    cos, sin = (part.astype(x.dtype)[None] for part in rotation)
    first, second = jnp.split(x, 2, axis=1)
    return jnp.concatenate(
        [first * cos - second * sin, second * cos + first * sin], axis=1
    )


class KV(NamedTuple):
    """Keys (rotated) and values of the tokens of one forward, for one layer."""

    k: Float[Array, "B K C T"]
    v: Float[Array, "B K T C"]


@jax.named_scope("attention")
def attention(
    q: Float[Array, "H C B T"], segments: tuple[Segment, ...], own: tuple[KV, ...] = ()
) -> Float[Array, "H C B T"]:
    """Attends to all segments under one float32 softmax, K/V heads shared by groups.

    A query that may look at nothing (padding) gets a mean of everything, never NaN.

    Args:
      own: keys and values that only the query in the same place sees, as in the unrolled
        steps of EAGLE-3's training (traineagle3/cnets.py:277-305).
    """
    H, C, B, T = q.shape
    K = segments[0].k.shape[1]
    precision = "highest" if q.dtype == jnp.float32 else None
    # Batch dimensions stand first and in the cache's order on both sides: otherwise
    # compilers transpose, that is copy, the whole cache in every step.
    product = functools.partial(jax.lax.dot_general, precision=precision)
    einsum = functools.partial(jnp.einsum, precision=precision)
    batch = ((0, 1), (0, 1))
    grouped = q.reshape(K, H // K, C, B, T) * jnp.asarray(C**-0.5, q.dtype)
    grouped = grouped.transpose(3, 0, 1, 4, 2)  # B K G T C
    queries = grouped.reshape(B, K, -1, C)
    scores = []
    for k, _, mask in segments:
        score = product(
            queries, k, (((3,), (2,)), batch), preferred_element_type=jnp.float32
        )
        score = score.reshape(B, K, -1, T, k.shape[-1])
        scores.append(jnp.where(mask[:, None, None], score, -1e30))
    for k, _ in own:
        score = einsum(
            "BKGTC,BKCT->BKGT", grouped, k, preferred_element_type=jnp.float32
        )
        scores.append(score[..., None])
    top = functools.reduce(jnp.maximum, [s.max(-1, keepdims=True) for s in scores])
    weights = [jnp.exp(score - jax.lax.stop_gradient(top)) for score in scores]
    total = sum(w.sum(-1, keepdims=True) for w in weights)
    weights = [w.astype(q.dtype) for w in weights]
    out = jnp.zeros((), q.dtype)
    for p, (_, v, _) in zip(weights, segments, strict=False):
        mixed = product(p.reshape(B, K, -1, p.shape[-1]), v, (((3,), (2,)), batch))
        out = out + mixed.reshape(grouped.shape)
    for p, (_, v) in zip(weights[len(segments) :], own, strict=True):
        out = out + einsum("BKGT,BKTC->BKGTC", p[..., 0], v)
    out = (out.astype(jnp.float32) / total).astype(q.dtype)
    return out.transpose(1, 2, 4, 0, 3).reshape(H, C, B, T)


def merge(block: Params) -> Params:
    """Joins the matrices of a block that read the same input, as the forward wants them.

    One product instead of three or two: on CPUs 8 rows take two thirds of the time. Each
    K/V head stands beside its group of query heads, so that sharding by K/V heads needs no
    rearrangement. Gate and up are two matrices under each other, and the heads `wo` reads
    are one axis: TPUs store the last two axes in tiles of 8 by 128, and a short axis there
    costs a new layout in every step.

    Args:
      block: `wq` [H, C, X], `wk`, `wv` [K, C, X], `wo` [D, H, C], `w_gate`, `w_up` [F, D],
        `w_down` [D, F], as published, maybe `bq`, `bk`, `bv` [., C], and whatever else,
        which is kept. A mixture of experts has their number before F; merged, F is the
        hidden channels of all experts, one after the other.

    Returns:
      `wqkv` [K, G+2, C, X], maybe `bqkv` [K, G+2, C], `wo` [D, H*C], `w_gate_up`
      [2, F, D], and the rest.
    """
    block = dict(block)
    for whole, parts in _MERGED_HEADS.items():
        if parts[0] in block:
            q, k, v = (block.pop(name) for name in parts)
            q = q.reshape(k.shape[0], -1, *q.shape[1:])
            block[whole] = jnp.concatenate([q, k[:, None], v[:, None]], axis=1)
    if "wo" in block:
        block["wo"] = block["wo"].reshape(block["wo"].shape[0], -1)
    parts = (block.pop("w_gate"), block.pop("w_up"))
    block["w_gate_up"] = jnp.stack([w.reshape(-1, w.shape[-1]) for w in parts])
    if "w_down" in block:
        block["w_down"] = block["w_down"].reshape(block["w_down"].shape[0], -1)
    return block


def split(block: Params) -> Params:
    """Undoes `merge`: the names and shapes of published checkpoints."""
    block = dict(block)
    if "wo" in block:
        D, head_dim = block["wo"].shape[0], block["wqkv"].shape[2]
        block["wo"] = block["wo"].reshape(D, -1, head_dim)
    for whole, parts in _MERGED_HEADS.items():
        if whole in block:
            joined = block.pop(whole)
            q, k, v = joined[:, :-2], joined[:, -2], joined[:, -1]
            q = q.reshape(-1, *q.shape[2:])
            block |= dict(zip(parts, (q, k, v), strict=True))
    joined = block.pop("w_gate_up")
    parts = {"w_gate": joined[0], "w_up": joined[1]}
    if "router" in block:
        X = block["router"].shape[0]
        parts = {name: w.reshape(X, -1, w.shape[1]) for name, w in parts.items()}
        if "w_down" in block:
            parts["w_down"] = block["w_down"].reshape(block["w_down"].shape[0], X, -1)
    return block | parts


_MERGED_HEADS = {"wqkv": ("wq", "wk", "wv"), "bqkv": ("bq", "bk", "bv")}


def project(
    params: Params,
    x: Float[Array, "D B T"],
    rotation: Turns,
    eps: float,
) -> tuple[Float[Array, "H C B T"], KV]:
    """Makes rotated queries, and keys and values in cache form, from normed activations."""
    joined = linear(params["wqkv"], x)
    if "bqkv" in params:
        joined = joined + params["bqkv"][..., None, None]
    shape = joined.shape[2:]
    q, k, v = joined[:, :-2].reshape(-1, *shape), joined[:, -2], joined[:, -1]
    if "q_norm" in params:
        q = _channel_norm(q, params["q_norm"], eps)
        k = _channel_norm(k, params["k_norm"], eps)
    q, k = rotate(q, rotation), rotate(k, rotation)
    return q, KV(k.transpose(2, 0, 1, 3), v.transpose(2, 0, 3, 1))


def _channel_norm(
    x: Float[Array, "H C B T"], scale: Float[Array, " C"], eps: float
) -> Float[Array, "H C B T"]:
    """Normalises each head over its own channels (Qwen3)."""
    return jax.vmap(lambda head: rms_norm(head, scale, eps))(x)


ACTIVATIONS = {
    "silu": jax.nn.silu,
    "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
}


def mlp(
    params: Params, x: Float[Array, "D B T"], n_used: int = 0, activation: str = "silu"
) -> Float[Array, "D B T"]:
    """Gated feed-forward: down(activation(gate) * up).

    A mixture of experts is the same with the hidden channels of all of them, each times its
    expert's share. All experts run for all tokens: the nodes of a tree read nearly all
    experts' weights anyway, and those are what a step waits for. They are one axis because
    compilers gather whole weights where the second of two axes is cut over devices.
    """
    joined = linear(params["w_gate_up"], x)
    hidden = ACTIVATIONS[activation](joined[0]) * joined[1]
    if n_used:
        shares = expert_shares(linear(params["router"], x), n_used)
        n_hidden = hidden.shape[0] // shares.shape[0]
        hidden = hidden * jnp.repeat(shares.astype(x.dtype), n_hidden, axis=0)
    return linear(params["w_down"], hidden)


def expert_shares(scores: Float[Array, "X B T"], n_used: int) -> Float[Array, "X B T"]:
    """Softmax over the `n_used` best experts of each token, 0 for the others.

    Equal scores go to the lower expert (Mixtral of Experts, arXiv:2401.04088 §2.1).
    """
    best, which = jax.lax.top_k(jnp.moveaxis(scores.astype(jnp.float32), 0, -1), n_used)
    shares = jax.nn.softmax(best, axis=-1)[..., None]
    chosen = jax.nn.one_hot(which, scores.shape[0]) * shares
    return jnp.moveaxis(chosen.sum(axis=-2), -1, 0)


def output_and_mlp(
    params: Params,
    residual: Float[Array, "D B T"],
    mixed: Float[Array, "H C B T"],
    eps: float,
    n_experts_used: int = 0,
    activation: str = "silu",
) -> Float[Array, "D B T"]:
    """What follows attention in a block: its output onto the residual, feed-forward."""
    with jax.named_scope("output"):
        x = residual + linear(params["wo"], mixed.reshape(-1, *mixed.shape[2:]))
    with jax.named_scope("mlp"):
        normed = rms_norm(x, params["mlp_norm"], eps)
        return x + mlp(params, normed, n_experts_used, activation)

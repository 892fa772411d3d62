"""The target: a Llama-family model that also returns the features a draft head reads.

The layers are a Python list of parameter dicts, each array laid out once at load: on CPUs a
scan over stacked weights copies every layer's weights before it reads them. The stacked
form (`stack`) is for TPUs, where it does not, and where 80 layers take long to compile. It
also reads the cache only as far as it is in use, which on CPUs would be another copy.
"""

import dataclasses
import functools
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int

from eagle_jax import cache as cache_lib
from eagle_jax.cache import KVCache
from eagle_jax.config import TargetConfig
from eagle_jax.layers import (
    KV,
    Params,
    Segment,
    attention,
    linear,
    look_up,
    merge,
    output_and_mlp,
    project,
    rms_norm,
    rope_frequencies,
    turns,
)


class TargetOutput(NamedTuple):
    """What one forward over T tokens gives.

    Args:
      top: after the final norm: the feature of EAGLE-1, and what `logits` multiplies.
      taps: un-normed residual streams entering `cfg.taps`, concatenated low to high: the
        feature of EAGLE-3 (SafeAILab/EAGLE modeling_llama_kv.py:1137-1139).
      new: keys and values of the T tokens, layer by layer (or stacked as the layers are);
        not yet in the cache.
    """

    top: Float[Array, "D B T"]
    taps: Float[Array, "E B T"]
    new: tuple[KV, ...] | KV


def init(key: Array, cfg: TargetConfig) -> Params:
    """Returns random parameters (for tests and for shape checks of big configs)."""

    def normal(key: Array, *shape: int) -> Array:
        scale = shape[-1] ** -0.5
        return (scale * jax.random.normal(key, shape)).astype(cfg.dtype)

    D, F, H = cfg.d_model, cfg.d_mlp, cfg.n_heads
    K, C = cfg.n_kv_heads, cfg.head_dim
    X = (cfg.n_experts,) if cfg.n_experts else ()
    ones = jnp.ones(D, cfg.dtype)

    def layer(key: Array) -> Params:
        keys = jax.random.split(key, 10)
        own = {
            "attn_norm": ones,
            "wq": normal(keys[0], H, C, D),
            "wk": normal(keys[1], K, C, D),
            "wv": normal(keys[2], K, C, D),
            "wo": normal(keys[3], D, H * C).reshape(D, H, C),
            "mlp_norm": ones,
            "w_gate": normal(keys[4], *X, F, D),
            "w_up": normal(keys[5], *X, F, D),
            "w_down": normal(keys[6], D, *X, F),
        }
        if cfg.n_experts:
            own["router"] = normal(jax.random.fold_in(key, 10), *X, D)
        if cfg.qkv_bias:
            own |= {
                "bq": normal(keys[7], H, C),
                "bk": normal(keys[8], K, C),
                "bv": normal(keys[9], K, C),
            }
        if cfg.qk_norm:
            own |= {
                "q_norm": jnp.ones(C, cfg.dtype),
                "k_norm": jnp.ones(C, cfg.dtype),
            }
        return merge(own)

    keys = jax.random.split(key, cfg.n_layers)
    embed_key, head_key = jax.random.split(jax.random.fold_in(key, 1))
    params: Params = {
        "embed": normal(embed_key, cfg.vocab_size, D),
        "layers": jax.vmap(layer)(keys) if cfg.stacked else [layer(k) for k in keys],
        "norm": ones,
    }
    if not cfg.tied:
        params["head"] = normal(head_key, cfg.vocab_size, D)
    return params


def stack(params: Params, cfg: TargetConfig) -> tuple[TargetConfig, Params]:
    """Brings parameters into the stacked form: every leaf of a layer gets a layer axis."""
    layers = stack_layers(params["layers"], cfg.n_layers)
    return dataclasses.replace(cfg, stacked=True), params | {"layers": layers}


def stack_layers(layers: Iterable[Params], n: int) -> Params:
    """Stacks `n` layers one by one as they come, in place, each where its own lies."""

    @functools.partial(jax.jit, donate_argnums=0)
    def write(stacked: Params, layer: Params, i: Array) -> Params:
        return jax.tree.map(lambda every, one: every.at[i].set(one), stacked, layer)

    def room(leaf: Array) -> Array:
        where = leaf.sharding
        if isinstance(where, NamedSharding):
            where = NamedSharding(where.mesh, P(None, *where.spec))
        return jnp.zeros((n, *leaf.shape), leaf.dtype, device=where)

    stacked: Params | None = None
    for i, layer in enumerate(layers):
        stacked = stacked or jax.tree.map(room, layer)
        stacked = write(stacked, layer, jnp.asarray(i))
    assert stacked is not None
    return stacked


def forward(
    params: Params,
    tokens: Int[Array, "B T"],
    positions: Int[Array, "B T"],
    mask: Bool[Array, "B T T"],
    cache: KVCache,
    cfg: TargetConfig,
) -> TargetOutput:
    """Runs T new tokens against the committed cache and each other.

    Args:
      positions: rotary position of each token.
      mask: which of the T tokens each of them may look at (causal, packed or tree-shaped);
        committed cache slots are always visible. A cache without slots is skipped. A
        sliding window hides what lies further back, in both.
    """
    speed = rope_frequencies(cfg.head_dim, cfg.rope_theta, cfg.rope_scaling)
    rotation = turns(positions, speed)
    x = embed(params, tokens)
    if cfg.embed_scale != 1:
        x = x * jnp.asarray(cfg.embed_scale, x.dtype)
    sizes = cache_lib.prefixes(cache.n_slots) if cfg.stacked else (cache.n_slots,)
    longest = cache.length.max()
    if cfg.sliding_window:
        steps = positions[:, :, None] - positions[:, None, :]
        mask = mask & (steps < cfg.sliding_window)

    def attend(q: Array, own: Segment, i: Any) -> Array:
        if not cache.n_slots:
            return attention(q, (own,))

        def upto(n: int) -> Array:
            past = cache_lib.committed(cache, tokens.shape[1], n)
            if cfg.sliding_window:  # a committed token's slot is its position
                slots = jnp.arange(n)[None, None]
                past = past & (positions[..., None] - slots < cfg.sliding_window)
            committed = Segment(*cache_lib.first(cache, i, n), past)
            return attention(q, (committed, own))

        branches = [functools.partial(upto, n) for n in sizes]
        return jax.lax.switch((longest - 1) // sizes[0], branches)

    def block(x: Array, layer: Params, i: Any) -> tuple[Array, KV]:
        with jax.named_scope("qkv"):
            normed = rms_norm(x, layer["attn_norm"], cfg.norm_eps)
            q, kv = project(layer, normed, rotation, cfg.norm_eps)
        mixed = attend(q, Segment(kv.k, kv.v, mask), i)
        x = output_and_mlp(
            layer, x, mixed, cfg.norm_eps, cfg.n_experts_used, cfg.activation
        )
        return x, kv

    if cfg.stacked:

        def body(at: Any, given: Any) -> tuple[Any, KV]:
            x, taps = at
            i, layer = given
            taps = [
                jnp.where(i == j, x, tap) for j, tap in zip(cfg.taps, taps, strict=True)
            ]
            x, kv = block(x, layer, i)
            return (x, taps), kv

        index = jnp.arange(cfg.n_layers)
        start = (x, [x] * len(cfg.taps))
        (x, taps), new = jax.lax.scan(body, start, (index, params["layers"]))
    else:
        taps, each = [], []
        for i, layer in enumerate(params["layers"]):
            if i in cfg.taps:
                taps.append(x)
            x, kv = block(x, layer, i)
            each.append(kv)
        new = tuple(each)
    top = rms_norm(x, params["norm"], cfg.norm_eps)
    return TargetOutput(top=top, taps=jnp.concatenate(taps), new=new)


def embed(params: Params, tokens: Int[Array, "B T"]) -> Float[Array, "D B T"]:
    """Looks up token embeddings."""
    return look_up(params["embed"], tokens).transpose(2, 0, 1)


def logits(params: Params, top: Float[Array, "D B T"]) -> Float[Array, "V B T"]:
    """Scores the next token from the final-norm output, in float32."""
    head = params.get("head", params["embed"])
    return linear(head, top).astype(jnp.float32)

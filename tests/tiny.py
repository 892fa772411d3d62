"""Tiny targets and drafts for tests: random, and ones whose every answer is known."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from eagle_jax import draft, target
from eagle_jax.cache import KVCache
from eagle_jax.config import DraftConfig, TargetConfig

Params = dict[str, Any]


def target_config(name: str = "tiny", **changes: Any) -> TargetConfig:
    """Grouped heads, a head_dim that is not width / heads, no end token."""
    sizes: dict[str, Any] = {
        "vocab_size": 101,
        "d_model": 32,
        "d_mlp": 48,
        "n_layers": 3,
        "n_heads": 4,
        "n_kv_heads": 2,
        "head_dim": 16,
    }
    return TargetConfig(name=name, **(sizes | changes))


def draft_config(t: TargetConfig, head: str = "eagle3", **changes: Any) -> DraftConfig:
    width = t.d_model if head == "eagle1" else len(t.taps) * t.d_model
    sizes: dict[str, Any] = {
        "vocab_size": t.vocab_size,
        "d_model": t.d_model,
        "d_mlp": t.d_mlp,
        "n_heads": 4,
        "n_kv_heads": 2,
        "head_dim": 8,
        "feature_size": width,
    }
    return DraftConfig(head=head, **(sizes | changes))  # type: ignore[arg-type]


def by_slot(at: KVCache) -> list[jax.Array]:
    """Keys and values of all layers, slots last."""
    return [*at.k, *(v.swapaxes(-1, -2) for v in at.v)]


def params(seed: int, t: TargetConfig, d: DraftConfig | None = None) -> Params:
    """Random parameters, norms and biases included, made by NumPy: nothing compiles."""
    rng = np.random.default_rng(seed)
    shapes = jax.eval_shape(lambda: target.init(jax.random.key(0), t))
    out: Params = {"target": _fill(rng, shapes)}
    if d is not None and d.head != "none":
        shapes = jax.eval_shape(lambda: draft.init(jax.random.key(0), d, t))
        own = _fill(rng, shapes)
        if d.vocab_size < t.vocab_size:
            step = t.vocab_size // d.vocab_size
            ids = np.arange(d.vocab_size) * step + (step - 1)
            own["draft_to_target"] = jnp.asarray(ids, jnp.int32)
        out["draft"] = draft.tie(own, out["target"], d)
    return out


def _fill(rng: np.random.Generator, shapes: Params) -> Params:
    def random(path: Any, leaf: jax.ShapeDtypeStruct) -> jax.Array:
        name = path[-1].key
        x = rng.normal(size=leaf.shape)
        if name.endswith("norm"):
            x = 1 + 0.3 * x
        elif len(leaf.shape) > 1 and name[0] != "b":
            fan_in = leaf.shape[1:] if name == "fuse" else leaf.shape[-1:]
            x = x / np.sqrt(np.prod(fan_in))
        return jnp.asarray(x, leaf.dtype)

    return jax.tree_util.tree_map_with_path(random, shapes)


def markov_target_config(vocab_size: int, **changes: Any) -> TargetConfig:
    """A target whose next token depends on the last one only (see `markov`)."""
    sizes: dict[str, Any] = {
        "vocab_size": vocab_size,
        "d_model": vocab_size,
        "d_mlp": 4,
        "n_layers": 1,
        "n_heads": 1,
        "n_kv_heads": 1,
        "head_dim": 4,
        "taps": (0,),
    }
    return TargetConfig(name="markov", **(sizes | changes))


def markov_draft_config(t: TargetConfig) -> DraftConfig:
    return draft_config(t, "eagle1", d_mlp=4, n_heads=1, n_kv_heads=1, head_dim=4)


def markov_params(
    table: np.ndarray, drafted: np.ndarray, t: TargetConfig, d: DraftConfig
) -> Params:
    """Parameters under which row x of a table holds the log-probabilities after token x.

    Attention and feed-forward write zeros and embeddings are one-hot, so the target's head
    and the draft's see nothing but the last token.
    """
    v = t.vocab_size
    made = params(0, t, d)
    p, own = made["target"], made["draft"]
    p["embed"] = own["embed"] = jnp.eye(v)
    p["norm"] = jnp.ones(v)
    p["head"] = jnp.asarray(table.T / np.sqrt(v / (1 + v * t.norm_eps)), jnp.float32)
    for layer in (*p["layers"], own["layer"]):
        layer["wo"] = jnp.zeros_like(layer["wo"])
        layer["w_down"] = jnp.zeros_like(layer["w_down"])
    own["fc_bias"] = jnp.zeros(v)
    own["fc"] = jnp.concatenate([jnp.eye(v), jnp.zeros((v, v))], axis=1)
    own["head"] = jnp.asarray(drafted.T, jnp.float32)
    return {"target": p, "draft": own}


def with_eos(t: TargetConfig, *eos_ids: int) -> TargetConfig:
    return dataclasses.replace(t, eos_ids=eos_ids)

"""Tiny targets and drafts for tests: random, and ones whose every answer is known."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from eagle_jax import draft, target
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


def params(seed: int, t: TargetConfig, d: DraftConfig | None = None) -> Params:
    """Random parameters, the draft's spread out enough to have opinions."""
    keys = jax.random.split(jax.random.key(seed))
    out: Params = {"target": target.init(keys[0], t)}
    if d is not None and d.head != "none":
        own = draft.init(keys[1], d, t)
        own = jax.tree.map(lambda w: w * 8 if w.ndim > 1 else w, own)
        if d.vocab_size < t.vocab_size:
            step = t.vocab_size // d.vocab_size
            ids = np.arange(d.vocab_size) * step + (step - 1)
            own["draft_to_target"] = jnp.asarray(ids, jnp.int32)
        out["draft"] = draft.tie(own, out["target"], d)
    return out


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
    keys = jax.random.split(jax.random.key(0))
    p = target.init(keys[0], t)
    p["embed"] = jnp.eye(v)
    p["head"] = jnp.asarray(table.T / np.sqrt(v / (1 + v * t.norm_eps)), jnp.float32)
    own = draft.init(keys[1], d, t)
    for layer in (*p["layers"], own["layer"]):
        layer["wo"] = jnp.zeros_like(layer["wo"])
        layer["w_down"] = jnp.zeros_like(layer["w_down"])
    own["fc"] = jnp.concatenate([jnp.eye(v), jnp.zeros((v, v))], axis=1)
    own["head"] = jnp.asarray(drafted.T, jnp.float32)
    return {"target": p, "draft": draft.tie(own, p, d)}


def with_eos(t: TargetConfig, *eos_ids: int) -> TargetConfig:
    return dataclasses.replace(t, eos_ids=eos_ids)

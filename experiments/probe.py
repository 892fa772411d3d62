"""What a result line says beyond counts: trees as drafted, calibration, cost of the parts.

Prompts are decoded once more, step by step from the host, and parts of a step are timed by
themselves; neither touches the timed runs.
"""

import functools
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from eagle_jax import decode, draft, metrics, target
from eagle_jax import tree as tree_lib
from eagle_jax.cache import KVCache
from eagle_jax.config import TargetConfig
from eagle_jax.layers import Params
from experiments.evaluator import Method

ROUNDS = 9

jit_propose = jax.jit(draft.propose, static_argnames=("cfg", "tree"))


def trees(
    method: Method, prompts: list[list[int]], max_new_tokens: int, seed: int
) -> dict[str, Any]:
    """Returns `metrics.calibration` and `metrics.tree_shape` of these prompts' steps."""
    params, cfg, _ = method
    if cfg.tree.n_nodes == 1:
        return {}
    infos = []
    for prompt in prompts:
        infos += decode.trace(params, [prompt], cfg, max_new_tokens, seed)[1]
    if not infos:
        return {}
    drafted = metrics.drafts(infos)
    found: dict[str, Any] = {"tree_shape": metrics.tree_shape(drafted)}
    if cfg.draft.head != "lookup":  # which has no confidence
        found["calibration"] = metrics.calibration(drafted)
    return found


def costs(method: Method, prompt: list[int]) -> dict[str, float]:
    """Times the parts of a step in turn: medians over the target's pass over one token.

    Returns:
      draft_cost: c, one level of drafting (`metrics.predicted_speedup`).
      verify_cost: the target's pass over all nodes of the tree.
    """
    params, cfg, _ = method
    tree = cfg.tree
    if tree.n_nodes == 1:
        return {}
    state = decode.start(params, [prompt], cfg, 2)

    def verify(n: int) -> Any:
        tokens = jnp.full((1, n), prompt[-1], jnp.int32)
        return jit_forward(params["target"], tokens, state.target_cache, cfg.target)

    def propose() -> Any:
        return jit_propose(
            params.get("draft", {}), state.draft, state.root, cfg.draft, tree
        )

    parts = [
        lambda: verify(1),
        lambda: verify(tree_lib.rows_for(tree.n_nodes)),
        propose,
    ]
    took = np.zeros((ROUNDS + 1, len(parts)))
    for row in took:
        for i, part in enumerate(parts):
            began = time.perf_counter()
            jax.block_until_ready(part())
            row[i] = time.perf_counter() - began
    one, many, drafting = np.median(took[1:], axis=0)  # the first round compiles
    return {
        "draft_cost": float(drafting / one / tree.depth),
        "verify_cost": float(many / one),
    }


@functools.partial(jax.jit, static_argnames="cfg")
def jit_forward(
    params: Params, tokens: jax.Array, cache: KVCache, cfg: TargetConfig
) -> jax.Array:
    """The target's pass over nodes that all see each other, down to the argmax."""
    n = tokens.shape[1]
    positions = cache.length[:, None] + jnp.arange(n)[None]
    mask = jnp.tril(jnp.ones((1, n, n), bool))
    out = target.forward(params, tokens, positions, mask, cache, cfg)
    return jnp.argmax(target.logits(params, out.top), axis=0)

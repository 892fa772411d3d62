"""Draft heads of EAGLE-1/2 and EAGLE-3, and the growth of trees from them.

Slot i of the draft's cache holds the pair (feature i, token i+1) at rotary position i; so
the cache is as long as the target's. `extend` appends pairs of true target features, in
prefill and after every verification alike. `propose` grows a tree below the root from the
head's own outputs; the keys and values of drafted nodes live in scratch and are dropped.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key

from eagle_jax import cache as cache_lib
from eagle_jax import tree as tree_lib
from eagle_jax.cache import KVCache
from eagle_jax.config import DraftConfig, TargetConfig, TreeConfig
from eagle_jax.layers import (
    KV,
    Params,
    Segment,
    attend_and_mlp,
    linear,
    merge,
    project,
    rms_norm,
    rope_frequencies,
)
from eagle_jax.target import TargetOutput
from eagle_jax.tree import Tree


class DraftState(NamedTuple):
    """The draft's cache and its output at the last committed slot.

    `hidden` predicts the children of the root. Without a head both have no size.
    """

    cache: KVCache
    hidden: Float[Array, "D B"]


def init(key: Array, cfg: DraftConfig, target: TargetConfig) -> Params:
    """Returns a fresh head's own parameters; `tie` adds what it shares with the target."""

    def normal(key: Array, *shape: int) -> Array:
        return (0.02 * jax.random.normal(key, shape)).astype(cfg.dtype)

    D, F, H = cfg.d_model, cfg.d_mlp, cfg.n_heads
    K, C = cfg.n_kv_heads, cfg.head_dim
    keys = jax.random.split(key, 9)
    ones = jnp.ones(D, cfg.dtype)
    wide = D if cfg.head == "eagle1" else 2 * D
    layer = {
        "wq": normal(keys[0], H, C, wide),
        "wk": normal(keys[1], K, C, wide),
        "wv": normal(keys[2], K, C, wide),
        "wo": normal(keys[3], D, H, C),
        "mlp_norm": ones,
        "w_gate": normal(keys[4], F, D),
        "w_up": normal(keys[5], F, D),
        "w_down": normal(keys[6], D, F),
    }
    if cfg.qkv_bias:
        layer |= {
            "bq": jnp.zeros((H, C), cfg.dtype),
            "bk": jnp.zeros((K, C), cfg.dtype),
            "bv": jnp.zeros((K, C), cfg.dtype),
        }
    if cfg.head == "eagle1":
        params: Params = {"fc": normal(keys[7], D, 2 * D), "layer": merge(layer)}
        if cfg.fc_bias:
            params["fc_bias"] = jnp.zeros(D, cfg.dtype)
        return params
    layer |= {"embed_norm": ones, "hidden_norm": ones}
    params = {
        "fuse": normal(keys[7], D, cfg.feature_size),
        "layer": merge(layer),
        "norm": ones,
        "head": normal(keys[8], cfg.vocab_size, D),
    }
    n_taps = cfg.feature_size // target.d_model
    if cfg.fc_norm:
        params["fc_norm"] = jnp.ones((n_taps, target.d_model), cfg.dtype)
    if cfg.norm_before_fc:
        params["input_norm"] = jnp.ones(cfg.feature_size, cfg.dtype)
    return params


SHARED = ("embed", "draft_to_target")  # never trained; EAGLE-1 shares the head as well


def tie(params: Params, target_params: Params, cfg: DraftConfig) -> Params:
    """Adds references to what the head shares with its target.

    A head that carries its own embedding keeps it (EAGLE ea_model.py; formats.md 3.3). An
    EAGLE-1 head multiplies the target's LM head, all of it or the rows `draft_to_target`.
    """
    tied = {"embed": target_params["embed"]} | params
    if cfg.head == "eagle1" and "head" not in params:
        head = target_params.get("head", target_params["embed"])
        ids = params.get("draft_to_target")
        tied["head"] = head if ids is None else head[ids]
    return tied


def trainable(params: Params, cfg: DraftConfig) -> Params:
    """Returns the parameters that training changes."""
    frozen = (*SHARED, "head") if cfg.head == "eagle1" else SHARED
    return {name: leaf for name, leaf in params.items() if name not in frozen}


def features(out: TargetOutput, cfg: DraftConfig) -> Float[Array, "E B T"]:
    """Picks what this head reads: the final-norm output, or the taps (EAGLE-3 §3.1)."""
    return out.top if cfg.head == "eagle1" else out.taps


def fuse(
    params: Params, features: Float[Array, "E B T"], cfg: DraftConfig
) -> Float[Array, "D B T"]:
    """Brings target features to the draft's width (EAGLE cnets.py:639)."""
    if cfg.head == "eagle1":
        return features
    if cfg.norm_before_fc:
        features = rms_norm(features, params["input_norm"], cfg.norm_eps)
    if cfg.fc_norm:
        parts = jnp.split(features, len(params["fc_norm"]), axis=0)
        normed = [
            rms_norm(part, scale, cfg.norm_eps)
            for part, scale in zip(parts, params["fc_norm"], strict=True)
        ]
        features = jnp.concatenate(normed)
    return linear(params["fuse"], features)


class Block(NamedTuple):
    """Queries, keys and values of one draft pass, before attention."""

    residual: Float[Array, "D B T"]
    q: Float[Array, "H C B T"]
    kv: KV


def begin(
    params: Params,
    tokens: Int[Array, "B T"],
    hidden: Float[Array, "D B T"],
    positions: Int[Array, "B T"],
    cfg: DraftConfig,
) -> Block:
    """Mixes each token's embedding with a feature (true or self-made), and projects.

    EAGLE-1: fc(concat(embedding, feature)) enters a layer without input norm
    (EAGLE cnets1.py:623, 398). EAGLE-3: both parts are normed, q, k, v read both,
    the residual is the un-normed feature (EAGLE cnets.py:423-430).
    """
    e = params["embed"][tokens].transpose(2, 0, 1).astype(hidden.dtype)
    layer = params["layer"]
    if cfg.head == "eagle1":
        residual = linear(params["fc"], jnp.concatenate([e, hidden]))
        if "fc_bias" in params:
            residual = residual + params["fc_bias"][:, None, None]
        normed = residual
    else:
        h = rms_norm(hidden, layer["hidden_norm"], cfg.norm_eps)
        residual = h if cfg.norm_before_residual else hidden
        normed = jnp.concatenate([rms_norm(e, layer["embed_norm"], cfg.norm_eps), h])
    speed = rope_frequencies(cfg.head_dim, cfg.rope_theta, cfg.rope_scaling)
    q, kv = project(layer, normed, positions, speed, cfg.norm_eps)
    return Block(residual, q, kv)


def finish(
    params: Params,
    block: Block,
    segments: tuple[Segment, ...],
    cfg: DraftConfig,
    own: tuple[KV, ...] = (),
) -> Float[Array, "D B T"]:
    """Attends and returns the layer's output: the next feature, un-normed."""
    layer = params["layer"]
    return attend_and_mlp(layer, block.residual, block.q, segments, cfg.norm_eps, own)


def logits(
    params: Params, out: Float[Array, "D B T"], cfg: DraftConfig
) -> Float[Array, "U B T"]:
    """Scores the draft vocabulary, in float32."""
    if cfg.head == "eagle3":
        out = rms_norm(out, params["norm"], cfg.norm_eps)
    return linear(params["head"], out).astype(jnp.float32)


def feed_back(
    params: Params, out: Float[Array, "D B T"], cfg: DraftConfig
) -> Float[Array, "D B T"]:
    """Turns an output into the next level's feature (normed in EAGLE-3.1 only)."""
    if cfg.norm_output:
        return rms_norm(out, params["norm"], cfg.norm_eps)
    return out


def empty(cfg: DraftConfig, rows: int, slots: int) -> DraftState:
    """Returns the state before any token."""
    layers = 0 if cfg.head == "none" else 1
    cache = cache_lib.init(layers, rows, cfg.n_kv_heads, cfg.head_dim, slots, cfg.dtype)
    return DraftState(cache, jnp.zeros((cfg.d_model, rows), cfg.dtype))


def extend(
    params: Params,
    state: DraftState,
    tokens: Int[Array, "B T"],
    features: Float[Array, "E B T"],
    count: Int[Array, " B"],
    cfg: DraftConfig,
) -> DraftState:
    """Appends pairs (feature i, token i+1) with true target features.

    Args:
      tokens: at each slot the token *after* the feature's own.
      count: pairs that are real in each row, the rest is padding; 0 leaves a row alone.
    """
    cache = state.cache
    n_new = tokens.shape[1]
    positions = cache.length[:, None] + jnp.arange(n_new)[None]
    hidden = fuse(params, features.astype(cfg.dtype), cfg)
    block = begin(params, tokens, hidden, positions, cfg)
    causal = jnp.tril(jnp.ones((n_new, n_new), bool))
    mask = jnp.broadcast_to(causal, (tokens.shape[0], n_new, n_new))
    past = cache_lib.committed(cache, n_new)
    segments = (Segment(cache.k[0], cache.v[0], past), Segment(*block.kv, mask))
    out = finish(params, block, segments, cfg)
    last = jnp.maximum(count - 1, 0)
    newest = jnp.take_along_axis(out, last[None, :, None], axis=2)[..., 0]
    return DraftState(
        cache=cache_lib.append(cache, (block.kv,), count),
        hidden=jnp.where(count[None] > 0, newest, state.hidden),
    )


def propose(
    params: Params,
    state: DraftState,
    root: Int[Array, " B"],
    cfg: DraftConfig,
    tree: TreeConfig,
) -> Tree:
    """Drafts a tree below the root."""
    if tree.n_nodes == 1:
        return tree_lib.root_only(root)
    _check_width(cfg, tree)
    if tree.kind == "static":

        def likeliest(out: Array, width: int) -> tuple[Array, Array]:
            return _best_children(params, out, cfg, width)

        return _propose_static(params, state, root, cfg, tree, likeliest)
    return rerank(grow(params, state, cfg, tree), root, tree)


def propose_drawn(
    keys: Key[Array, " B"],
    params: Params,
    state: DraftState,
    root: Int[Array, " B"],
    cfg: DraftConfig,
    tree: TreeConfig,
    *,
    temperature: float,
    target_vocab_size: int,
) -> tuple[Tree, Float[Array, "V B N"]]:
    """Drafts a static tree whose siblings are drawn from q without replacement (EAGLE-1).

    Adding Gumbel noise to log q and sorting gives the same law as drawing one sibling
    after the other from what is left of q.

    Args:
      keys: one per row, consumed.

    Returns:
      The tree, siblings in the order of the draws, and log q over target ids below each
      node with children: -inf outside the draft vocabulary, and everywhere at leaves.
    """
    _check_width(cfg, tree)
    laws: list[Array] = []

    def drawn(out: Array, width: int) -> tuple[Array, Array]:
        scores = logits(params, out, cfg) / max(temperature, 1e-6)
        log_q = jax.nn.log_softmax(scores, axis=0).transpose(1, 2, 0)
        level = jax.vmap(jax.random.fold_in, (0, None))(keys, len(laws))
        noise = jax.vmap(lambda key: jax.random.gumbel(key, log_q.shape[1:]))(level)
        _, index = jax.lax.top_k(log_q + noise, width)
        laws.append(log_q)
        return to_target(params, index), jnp.take_along_axis(log_q, index, axis=-1)

    drafted = _propose_static(params, state, root, cfg, tree, drawn)
    inner = np.unique(tree_lib.static_parents(tree.paths)[1:])
    ids = to_target(params, jnp.arange(cfg.vocab_size))
    nowhere = jnp.full((target_vocab_size, root.shape[0], tree.n_nodes), -jnp.inf)
    log_q = jnp.concatenate(laws, axis=1).transpose(2, 0, 1)
    return drafted, nowhere.at[ids[:, None], :, inner[None]].set(log_q.swapaxes(1, 2))


def _check_width(cfg: DraftConfig, tree: TreeConfig) -> None:
    if tree.width > cfg.vocab_size:
        raise ValueError(
            f"tree width must not exceed the draft vocabulary, got width={tree.width}, "
            f"vocab_size={cfg.vocab_size}; lower tree.width"
        )


class Candidates(NamedTuple):
    """All nodes a dynamic tree may keep, level by level (EAGLE cnets.py:719-780).

    Level 1 has W candidates, every later level W*W: in the order of their parents (best
    first) and then of rank. `parents` are candidate numbers, -1 for the root.
    """

    tokens: Int[Array, "B X"]
    parents: Int[Array, "B X"]
    log_q: Float[Array, "B X"]
    log_value: Float[Array, "B X"]


class _Frontier(NamedTuple):
    """Nodes about to be expanded: scan carry of `grow`."""

    tokens: Int[Array, "B W"]
    hidden: Float[Array, "D B W"]
    log_value: Float[Array, "B W"]
    number: Int[Array, "B W"]  # candidate number
    visible: Bool[Array, "B W S"]  # scratch slots each may attend to
    scratch: KV


def grow(
    params: Params, state: DraftState, cfg: DraftConfig, tree: TreeConfig
) -> Candidates:
    """Expands the W most probable nodes of every level (EAGLE-2 §4.1).

    The value of a node is the product of draft probabilities along its path, at temperature
    1 whatever the sampling temperature. Ties go to the lower candidate number.
    """
    B, W = state.hidden.shape[1], tree.width
    n_levels = tree.depth - 1  # levels below the first
    tokens, log_q = _best_children(params, state.hidden[:, :, None], cfg, W)
    first = Candidates(
        tokens=tokens[:, 0],
        parents=jnp.full((B, W), -1, jnp.int32),
        log_q=log_q[:, 0],
        log_value=log_q[:, 0],
    )
    if n_levels == 0:
        return first
    shape = (B, cfg.n_kv_heads, cfg.head_dim, n_levels * W)
    hidden = feed_back(params, state.hidden[:, :, None], cfg)
    frontier = _Frontier(
        tokens=first.tokens,
        hidden=jnp.broadcast_to(hidden, (hidden.shape[0], B, W)),
        log_value=first.log_value,
        number=jnp.broadcast_to(jnp.arange(W, dtype=jnp.int32), (B, W)),
        visible=jnp.zeros((B, W, n_levels * W), bool),
        scratch=KV(jnp.zeros(shape, cfg.dtype), jnp.zeros(shape, cfg.dtype)),
    )
    cache = state.cache
    past = cache_lib.committed(cache, W)

    def level(at: _Frontier, i: Array) -> tuple[_Frontier, Candidates]:
        positions = jnp.broadcast_to((cache.length + i)[:, None], (B, W))
        block = begin(params, at.tokens, at.hidden, positions, cfg)
        scratch = KV(
            *(
                jax.lax.dynamic_update_slice(old, new, (0, 0, 0, i * W))
                for old, new in zip(at.scratch, block.kv, strict=True)
            )
        )
        own = jnp.arange(n_levels * W)[None] == (i * W + jnp.arange(W))[:, None]
        visible = at.visible | own[None]
        segments = (
            Segment(cache.k[0], cache.v[0], past),
            Segment(*scratch, visible),
        )
        out = finish(params, block, segments, cfg)
        tokens, log_q = _best_children(params, out, cfg, W)
        children = Candidates(
            tokens=tokens.reshape(B, W * W),
            parents=jnp.repeat(at.number, W, axis=1),
            log_q=log_q.reshape(B, W * W),
            log_value=(at.log_value[:, :, None] + log_q).reshape(B, W * W),
        )
        value, best = jax.lax.top_k(children.log_value, W)
        parent = best // W
        following = _Frontier(
            tokens=jnp.take_along_axis(children.tokens, best, axis=1),
            hidden=jnp.take_along_axis(
                feed_back(params, out, cfg), parent[None], axis=2
            ),
            log_value=value,
            number=(W + i * W * W + best).astype(jnp.int32),
            visible=jnp.take_along_axis(visible, parent[:, :, None], axis=1),
            scratch=scratch,
        )
        return following, children

    _, later = jax.lax.scan(level, frontier, jnp.arange(n_levels, dtype=jnp.int32))
    return Candidates(
        *(
            jnp.concatenate([a, b.swapaxes(0, 1).reshape(B, -1)], axis=1)
            for a, b in zip(first, later, strict=True)
        )
    )


def _best_children(
    params: Params, out: Float[Array, "D B T"], cfg: DraftConfig, width: int
) -> tuple[Int[Array, "B T W"], Float[Array, "B T W"]]:
    """Returns target ids and log-probabilities of the likeliest next tokens, best first."""
    scores = logits(params, out, cfg)
    normaliser = jax.nn.logsumexp(scores, axis=0)
    best, index = jax.lax.top_k(scores.transpose(1, 2, 0), width)
    return to_target(params, index), best - normaliser[..., None]


def to_target(params: Params, ids: Int[Array, "*any"]) -> Int[Array, "*any"]:
    """Maps draft-vocabulary ids to target ids."""
    if "draft_to_target" in params:
        return params["draft_to_target"][ids]
    return ids


def rerank(candidates: Candidates, root: Int[Array, " B"], tree: TreeConfig) -> Tree:
    """Keeps the most valuable candidates, in candidate order (EAGLE-2 §4.2).

    A child is never worth more than its parent and has the higher number, and `top_k`
    prefers the lower number on ties, so the kept nodes always hang together; the official
    code has no tie rule and can lose a parent (official-quirks.md 6).
    """
    B, W = root.shape[0], tree.width
    _, kept = jax.lax.top_k(candidates.log_value, tree.n_nodes - 1)
    kept = jnp.sort(kept, axis=1)
    chosen = Candidates(*(jnp.take_along_axis(a, kept, axis=1) for a in candidates))
    below = kept[:, None, :] < chosen.parents[:, :, None]
    parents = jnp.where(chosen.parents < 0, 0, jnp.sum(below, axis=-1) + 1)
    depths = jnp.where(kept < W, 1, 2 + (kept - W) // (W * W))
    zeros = jnp.zeros((B, 1), jnp.int32)
    return Tree(
        tokens=jnp.concatenate([root[:, None], chosen.tokens], axis=1),
        parents=jnp.concatenate([zeros, parents], axis=1),
        depths=jnp.concatenate([zeros, depths], axis=1),
        log_q=jnp.concatenate([zeros.astype(jnp.float32), chosen.log_q], axis=1),
    )


def _propose_static(
    params: Params,
    state: DraftState,
    root: Int[Array, " B"],
    cfg: DraftConfig,
    tree: TreeConfig,
    choose: Callable[[Array, int], tuple[Array, Array]],
) -> Tree:
    """Drafts a fixed tree of ranks, one pass per level over the nodes with children.

    Args:
      choose: gives the first `width` children, and their log q, below outputs [D, B, T].
    """
    B = root.shape[0]
    parents = tree_lib.static_parents(tree.paths)
    depths = np.array([0] + [len(p) for p in tree.paths])
    ranks = np.array([0] + [p[-1] for p in tree.paths])
    ancestors = np.eye(tree.n_nodes, dtype=bool)
    for node in range(1, tree.n_nodes):
        ancestors[node] |= ancestors[parents[node]]
    tokens = jnp.zeros((B, tree.n_nodes), jnp.int32).at[:, 0].set(root)
    log_q = jnp.zeros((B, tree.n_nodes), jnp.float32)
    cache = state.cache
    segments: list[tuple[KV, np.ndarray]] = []
    expanded = np.array([0])  # the root's children come from the last committed output
    out = state.hidden[:, :, None]
    for depth in range(1, tree.depth + 1):
        if depth > 1:
            inner = np.unique(parents[depths == depth])
            above = np.searchsorted(expanded, parents[inner])
            hidden = feed_back(params, out, cfg)[:, :, above]
            positions = jnp.broadcast_to(
                (cache.length + depth - 2)[:, None], (B, len(inner))
            )
            block = begin(params, tokens[:, inner], hidden, positions, cfg)
            segments.append((block.kv, inner))
            past = cache_lib.committed(cache, len(inner))
            shape = (B, len(inner))
            drafted = tuple(
                Segment(
                    *kv, jnp.broadcast_to(ancestors[inner][:, at], (*shape, len(at)))
                )
                for kv, at in segments
            )
            committed = Segment(cache.k[0], cache.v[0], past)
            out = finish(params, block, (committed, *drafted), cfg)
            expanded = inner
        width = int(ranks[depths == depth].max()) + 1
        best, best_log_q = choose(out, width)
        nodes = np.flatnonzero(depths == depth)
        at = np.searchsorted(expanded, parents[nodes])
        tokens = tokens.at[:, nodes].set(best[:, at, ranks[nodes]])
        log_q = log_q.at[:, nodes].set(best_log_q[:, at, ranks[nodes]])
    rows = (B, tree.n_nodes)
    return Tree(
        tokens=tokens,
        parents=jnp.broadcast_to(jnp.asarray(parents), rows),
        depths=jnp.broadcast_to(jnp.asarray(depths, jnp.int32), rows),
        log_q=log_q,
    )

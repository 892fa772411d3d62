"""Draft heads of EAGLE-1/2 and EAGLE-3 and of the baselines, and trees grown from them.

Slot i of the draft's cache holds the pair (feature i, token i+1) at rotary position i; so
the cache is as long as the target's. `extend` appends pairs of true target features, in
prefill and after every verification alike. `propose` grows a tree below the root from the
head's own outputs; the keys and values of drafted nodes live in scratch and are dropped.

The baselines fit the same two calls: a small language model has several layers and holds
token i in slot i, prompt lookup keeps the tokens themselves, Medusa the newest feature.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key

from eagle_jax import cache as cache_lib
from eagle_jax import sharding
from eagle_jax import tree as tree_lib
from eagle_jax.cache import KVCache
from eagle_jax.config import DraftConfig, TargetConfig, TreeConfig
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
from eagle_jax.target import TargetOutput
from eagle_jax.tree import Tree


class DraftState(NamedTuple):
    """The draft's cache and its output at the last committed slot.

    `hidden` predicts the children of the root (Medusa: the target's newest feature).
    `history` holds the tokens for prompt lookup. What a head has no use for has no size.
    """

    cache: KVCache
    hidden: Float[Array, "D B"]
    history: Int[Array, "B S"]


def init(key: Array, cfg: DraftConfig, target: TargetConfig) -> Params:
    """Returns a fresh head's own parameters; `tie` adds what it shares with the target."""

    def normal(key: Array, *shape: int) -> Array:
        return (0.02 * jax.random.normal(key, shape)).astype(cfg.dtype)

    D, F, H = cfg.d_model, cfg.d_mlp, cfg.n_heads
    K, C = cfg.n_kv_heads, cfg.head_dim
    ones = jnp.ones(D, cfg.dtype)
    if cfg.head in ("none", "lookup"):
        return {}
    if cfg.head == "medusa":  # the residual blocks start as the identity
        n, U = cfg.n_layers, cfg.vocab_size
        return {
            "block": jnp.zeros((n, D, D), cfg.dtype),
            "block_bias": jnp.zeros((n, D), cfg.dtype),
            "head": normal(key, n, U, D),
        }
    if cfg.head == "small":
        head_key, *layer_keys = jax.random.split(key, 1 + cfg.n_layers)
        one = dataclasses.replace(cfg, head="eagle1")  # its block has the same shapes
        blocks = [init(layer_key, one, target)["layer"] for layer_key in layer_keys]
        return {
            "layers": [block | {"attn_norm": ones} for block in blocks],
            "norm": ones,
            "head": normal(head_key, cfg.vocab_size, D),
        }
    keys = jax.random.split(key, 9)
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
        n_inputs = 1 if cfg.inputs in ("token", "feature") else 2
        fc = normal(keys[7], D, n_inputs * D)
        params: Params = {"fc": fc, "layer": merge(layer)}
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
        rows = head if ids is None else jax.tree.map(lambda leaf: leaf[ids], head)
        tied["head"] = rows
    return tied


def trainable(params: Params, cfg: DraftConfig) -> Params:
    """Returns the parameters that training changes."""
    frozen = (*SHARED, "head") if cfg.head == "eagle1" else SHARED
    return {name: leaf for name, leaf in params.items() if name not in frozen}


def features(out: TargetOutput, cfg: DraftConfig) -> Float[Array, "E B T"]:
    """Picks what this head reads: the final-norm output, or the taps (EAGLE-3 §3.1)."""
    return out.top if cfg.reads_top else out.taps


def fuse(
    params: Params, features: Float[Array, "E B T"], cfg: DraftConfig
) -> Float[Array, "D B T"]:
    """Brings target features to the draft's width (EAGLE cnets.py:639)."""
    features = sharding.whole(features)
    if cfg.head != "eagle3":
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
    e = look_up(params["embed"], tokens).transpose(2, 0, 1).astype(hidden.dtype)
    layer = params["layer"]
    if cfg.head == "eagle1":
        parts = {"token": [e], "feature": [hidden]}.get(cfg.inputs, [e, hidden])
        residual = linear(params["fc"], sharding.whole(jnp.concatenate(parts)))
        if "fc_bias" in params:
            residual = residual + params["fc_bias"][:, None, None]
        normed = residual
    else:
        h = rms_norm(hidden, layer["hidden_norm"], cfg.norm_eps)
        residual = h if cfg.norm_before_residual else hidden
        normed = jnp.concatenate([rms_norm(e, layer["embed_norm"], cfg.norm_eps), h])
    speed = rope_frequencies(cfg.head_dim, cfg.rope_theta, cfg.rope_scaling)
    q, kv = project(layer, normed, turns(positions, speed), cfg.norm_eps)
    return Block(residual, q, kv)


def finish(
    params: Params,
    block: Block,
    segments: tuple[Segment, ...],
    cfg: DraftConfig,
    own: tuple[KV, ...] = (),
) -> Float[Array, "D B T"]:
    """Attends and returns the layer's output: the next feature, un-normed."""
    mixed = attention(block.q, segments, own)
    return output_and_mlp(params["layer"], block.residual, mixed, cfg.norm_eps)


def run(
    params: Params,
    tokens: Int[Array, "B T"],
    hidden: Float[Array, "D B X"],
    positions: Int[Array, "B T"],
    look: Callable[[int, KV], tuple[Segment, ...]],
    cfg: DraftConfig,
) -> tuple[Float[Array, "D B T"], tuple[KV, ...]]:
    """Runs all layers of the draft, one in EAGLE heads; returns the new keys and values.

    Args:
      hidden: X is T; a small model, which does not read it, may have T = X + 1.
      look: gives the segments that queries of layer i look at, its new keys known.
    """
    if cfg.head == "medusa":  # every level looks ahead from the same feature
        return hidden, ()
    if cfg.head != "small":
        block = begin(params, tokens, hidden, positions, cfg)
        return finish(params, block, look(0, block.kv), cfg), (block.kv,)
    x = look_up(params["embed"], tokens).transpose(2, 0, 1).astype(cfg.dtype)
    speed = rope_frequencies(cfg.head_dim, cfg.rope_theta, cfg.rope_scaling)
    rotation = turns(positions, speed)
    new = []
    for i, layer in enumerate(params["layers"]):
        normed = rms_norm(x, layer["attn_norm"], cfg.norm_eps)
        q, kv = project(layer, normed, rotation, cfg.norm_eps)
        mixed = attention(q, look(i, kv))
        x = output_and_mlp(layer, x, mixed, cfg.norm_eps)
        new.append(kv)
    return x, tuple(new)


def look_ahead(
    params: Params, feature: Float[Array, "D T"], cfg: DraftConfig
) -> Float[Array, "D I T"]:
    """Medusa: what each head makes of a feature, x + silu(W x + b) (medusa_model.py:43)."""
    blocks = linear(params["block"], feature[:, None])[:, :, 0]
    blocks = jax.nn.silu(blocks + params["block_bias"][..., None])
    return feature[:, None] + blocks.transpose(1, 0, 2)


def logits(
    params: Params, out: Float[Array, "D B T"], cfg: DraftConfig
) -> Float[Array, "U B T"]:
    """Scores the draft vocabulary, in float32. Medusa: B stands for its heads."""
    if cfg.head == "medusa":
        precision = "highest" if out.dtype == jnp.float32 else None
        scores = jnp.einsum("IUD,DIT->UIT", params["head"], out, precision=precision)
        return scores.astype(jnp.float32)
    if cfg.head in ("eagle3", "small"):
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
    layers = {"small": cfg.n_layers, "eagle1": 1, "eagle3": 1}.get(cfg.head, 0)
    # The root takes a slot more, and a padded chunk of a prompt one more again.
    slots += 2 * cfg.keeps_first_token
    cache = cache_lib.init(layers, rows, cfg.n_kv_heads, cfg.head_dim, slots, cfg.dtype)
    return DraftState(
        cache=cache,
        hidden=jnp.zeros((cfg.d_model, rows), cfg.dtype),
        history=jnp.zeros((rows, slots if cfg.head == "lookup" else 0), jnp.int32),
    )


def extend(
    params: Params,
    state: DraftState,
    tokens: Int[Array, "B T"],
    features: Float[Array, "E B X"],
    count: Int[Array, " B"],
    cfg: DraftConfig,
) -> DraftState:
    """Appends pairs (feature i, token i+1) with true target features.

    Args:
      tokens: at each slot the token *after* the feature's own; see `fed`.
      features: X is T; heads that keep the first token ignore them, and may have T = X + 1.
      count: pairs that are real in each row, the rest is padding; 0 leaves a row alone.
    """
    cache = state.cache
    n_new = tokens.shape[1]
    last = jnp.maximum(count - 1, 0)
    if cfg.head in ("lookup", "medusa"):
        hidden, history = state.hidden, state.history
        if cfg.head == "lookup":
            history = jax.vmap(
                lambda row, new, n: jax.lax.dynamic_update_slice(row, new, (n,))
            )(history, tokens, cache.length)
        else:
            newest = jnp.take_along_axis(features, last[None, :, None], axis=2)[..., 0]
            hidden = jnp.where(count[None] > 0, newest, hidden).astype(cfg.dtype)
        cache = cache._replace(length=cache.length + count)
        return DraftState(cache, hidden, history)
    positions = cache.length[:, None] + jnp.arange(n_new)[None]
    hidden = fuse(params, features.astype(cfg.dtype), cfg)
    causal = jnp.tril(jnp.ones((n_new, n_new), bool))
    mask = jnp.broadcast_to(causal, (tokens.shape[0], n_new, n_new))
    past = cache_lib.committed(cache, n_new)

    def look(i: int, kv: KV) -> tuple[Segment, ...]:
        return Segment(cache.k[i], cache.v[i], past), Segment(*kv, mask)

    out, new = run(params, tokens, hidden, positions, look, cfg)
    newest = jnp.take_along_axis(out, last[None, :, None], axis=2)[..., 0]
    return DraftState(
        cache=cache_lib.append(cache, new, count),
        hidden=jnp.where(count[None] > 0, newest, state.hidden),
        history=state.history,
    )


def fed(
    state: DraftState,
    own: Int[Array, "B T"],
    following: Int[Array, "B T"],
    count: Int[Array, " B"],
    cfg: DraftConfig,
) -> tuple[Int[Array, "B X"], Int[Array, " B"]]:
    """Returns the tokens that `extend` appends beside T features, and how many.

    The token after each feature's own; "unshifted" heads read its own. A head that holds
    token i in slot i needs the first token of all as well.
    """
    if cfg.inputs == "unshifted":
        return own, count
    if not cfg.keeps_first_token:
        return following, count
    at_start = (state.cache.length == 0) & (count > 0)
    with_first = jnp.concatenate([own[:, :1], following], axis=1)
    without = jnp.pad(following, ((0, 0), (0, 1)))
    tokens = jnp.where(at_start[:, None], with_first, without)
    return tokens, count + at_start.astype(count.dtype)


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
    if cfg.head == "lookup":
        return _look_up(state, root, cfg, tree)
    _check_width(cfg, tree)
    if tree.kind == "static":
        draft_below = _drafter(params, state, cfg, tree)
        return _propose_static(params, state, root, cfg, tree, draft_below)
    return rerank(grow(params, state, root, cfg, tree), root, tree)


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

    def drawn(out: Array, width: int, level: int) -> tuple[Array, Array]:
        scores = logits(params, out, cfg) / max(temperature, 1e-6)
        log_q = jax.nn.log_softmax(scores, axis=0).transpose(1, 2, 0)
        level_keys = jax.vmap(jax.random.fold_in, (0, None))(keys, level)
        noise = jax.vmap(lambda key: jax.random.gumbel(key, log_q.shape[1:]))(
            level_keys
        )
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
    first) and then of rank. `parents` are candidate numbers, -1 for the root. `place` is
    that among the W nodes of a level chosen to be expanded, W if not chosen.
    """

    tokens: Int[Array, "B X"]
    parents: Int[Array, "B X"]
    log_q: Float[Array, "B X"]
    log_value: Float[Array, "B X"]
    place: Int[Array, "B X"]


class _Frontier(NamedTuple):
    """Nodes about to be expanded: scan carry of `grow`."""

    tokens: Int[Array, "B W"]
    above: Int[Array, "B W"]  # token of each node's parent
    hidden: Float[Array, "D B W"]
    log_value: Float[Array, "B W"]
    number: Int[Array, "B W"]  # candidate number
    visible: Bool[Array, "B W S"]  # scratch slots each may attend to
    scratch: tuple[KV, ...]


def grow(
    params: Params,
    state: DraftState,
    root: Int[Array, " B"],
    cfg: DraftConfig,
    tree: TreeConfig,
) -> Candidates:
    """Expands the W most probable nodes of every level (EAGLE-2 §4.1).

    The value of a node is the product of draft probabilities along its path, at temperature
    1 whatever the sampling temperature. Ties go to the lower candidate number.
    """
    B, W = state.hidden.shape[1], tree.width
    n_levels = tree.depth - 1  # levels below the first
    draft_below = _drafter(params, state, cfg, tree)
    tokens, log_q = draft_below(state.hidden[:, :, None], W, 0)
    first = Candidates(
        tokens=tokens[:, 0],
        parents=jnp.full((B, W), -1, jnp.int32),
        log_q=log_q[:, 0],
        log_value=log_q[:, 0],
        place=jnp.broadcast_to(jnp.arange(W, dtype=jnp.int32), (B, W)),
    )
    if n_levels == 0:
        return first
    rows = B, cfg.n_kv_heads
    keys = jnp.zeros((*rows, cfg.head_dim, n_levels * W), cfg.dtype)
    values = jnp.zeros((*rows, n_levels * W, cfg.head_dim), cfg.dtype)
    hidden = feed_back(params, state.hidden[:, :, None], cfg)
    frontier = _Frontier(
        tokens=first.tokens,
        above=jnp.broadcast_to(root[:, None], (B, W)),
        hidden=jnp.broadcast_to(hidden, (hidden.shape[0], B, W)),
        log_value=first.log_value,
        number=jnp.broadcast_to(jnp.arange(W, dtype=jnp.int32), (B, W)),
        visible=jnp.zeros((B, W, n_levels * W), bool),
        scratch=(KV(keys, values),) * len(state.cache.k),
    )
    cache = state.cache
    past = cache_lib.committed(cache, W)

    def level(at: _Frontier, i: Array) -> tuple[_Frontier, Candidates]:
        positions = jnp.broadcast_to((cache.length + i)[:, None], (B, W))
        own = jnp.arange(n_levels * W)[None] == (i * W + jnp.arange(W))[:, None]
        visible = at.visible | own[None]
        scratch = list(at.scratch)

        def look(j: int, kv: KV) -> tuple[Segment, ...]:
            scratch[j] = cache_lib.put(scratch[j], kv, i * W)
            drafted = Segment(*scratch[j], visible)
            return Segment(cache.k[j], cache.v[j], past), drafted

        tokens = at.above if cfg.inputs == "unshifted" else at.tokens
        out, _ = run(params, tokens, at.hidden, positions, look, cfg)
        tokens, log_q = draft_below(out, W, i + 1)
        log_value = (at.log_value[:, :, None] + log_q).reshape(B, W * W)
        tokens, log_q = tokens.reshape(B, W * W), log_q.reshape(B, W * W)
        _, best = jax.lax.top_k(log_value if tree.value else log_q, W)
        place = jnp.full((B, W * W), W, jnp.int32)
        children = Candidates(
            tokens=tokens,
            parents=jnp.repeat(at.number, W, axis=1),
            log_q=log_q,
            log_value=log_value,
            place=place.at[jnp.arange(B)[:, None], best].set(jnp.arange(W)),
        )
        parent = best // W
        following = _Frontier(
            tokens=jnp.take_along_axis(tokens, best, axis=1),
            above=jnp.take_along_axis(at.tokens, parent, axis=1),
            hidden=jnp.take_along_axis(
                feed_back(params, out, cfg), parent[None], axis=2
            ),
            log_value=jnp.take_along_axis(log_value, best, axis=1),
            number=(W + i * W * W + best).astype(jnp.int32),
            visible=jnp.take_along_axis(visible, parent[:, :, None], axis=1),
            scratch=tuple(scratch),
        )
        return following, children

    _, later = jax.lax.scan(level, frontier, jnp.arange(n_levels, dtype=jnp.int32))
    return Candidates(
        *(
            jnp.concatenate([a, b.swapaxes(0, 1).reshape(B, -1)], axis=1)
            for a, b in zip(first, later, strict=True)
        )
    )


def _drafter(
    params: Params, state: DraftState, cfg: DraftConfig, tree: TreeConfig
) -> Callable[[Array, int, Any], tuple[Array, Array]]:
    """Returns what drafts the likeliest next tokens below outputs [D, B, T] of a level.

    It takes the outputs, how many children each gets, and the levels above them, and
    returns target ids and log-probabilities [B, T, W], best first.
    """

    def best(scores: Array, width: int) -> tuple[Array, Array]:
        normaliser = jax.nn.logsumexp(scores, axis=0)
        largest, index = sharding.largest(scores, width)
        return to_target(params, index), largest - normaliser[..., None]

    if cfg.head != "medusa":
        return lambda out, width, _: best(logits(params, out, cfg), width)
    # All levels look ahead from one feature, so all heads are read once, as they lie:
    # a slice of stacked weights is copied before its product.
    scores = logits(params, look_ahead(params, state.hidden, cfg), cfg)
    ids, log_q = best(scores.swapaxes(1, 2), tree.width)  # [B, I, W]

    def known(out: Array, width: int, level: Any) -> tuple[Array, Array]:
        shape = (*out.shape[1:], width)
        one, its_log_q = ids[:, level, None, :width], log_q[:, level, None, :width]
        return jnp.broadcast_to(one, shape), jnp.broadcast_to(its_log_q, shape)

    return known


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
    worth = candidates.log_value
    if not tree.rerank:  # the expanded nodes, level by level
        number = jnp.arange(worth.shape[1])
        level = jnp.where(number < W, 0, 1 + (number - W) // (W * W))
        order = -(level[None] * W + candidates.place).astype(jnp.float32)
        worth = jnp.where(candidates.place < W, order, -jnp.inf)
    _, kept = jax.lax.top_k(worth, tree.n_nodes - 1)
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
    choose: Callable[[Array, int, int], tuple[Array, Array]],
) -> Tree:
    """Drafts a fixed tree of ranks, one pass per level over the nodes with children.

    Args:
      choose: gives the first `width` children, and their log q, below outputs [D, B, T]
        of nodes of one depth.
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
    levels: list[tuple[list[KV], np.ndarray]] = []
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
            past = cache_lib.committed(cache, len(inner))
            levels.append(([], inner))

            def look(
                i: int, kv: KV, past: Array = past, inner: np.ndarray = inner
            ) -> tuple[Segment, ...]:
                levels[-1][0].append(kv)
                shape = (B, len(inner))
                drafted = (
                    Segment(
                        *kvs[i],
                        jnp.broadcast_to(ancestors[inner][:, at], (*shape, len(at))),
                    )
                    for kvs, at in levels
                )
                return Segment(cache.k[i], cache.v[i], past), *drafted

            read = parents[inner] if cfg.inputs == "unshifted" else inner
            out, _ = run(params, tokens[:, read], hidden, positions, look, cfg)
            expanded = inner
        width = int(ranks[depths == depth].max()) + 1
        best, best_log_q = choose(out, width, depth - 1)
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


def _look_up(
    state: DraftState, root: Int[Array, " B"], cfg: DraftConfig, tree: TreeConfig
) -> Tree:
    """Drafts what followed the newest tokens the first time they occurred.

    The longest suffix of up to `ngram` tokens that occurred before decides, and of its
    occurrences the earliest with enough tokens behind it (prompt lookup decoding). Without
    one the root is drafted again and again: some token must stand there.
    """
    B, depth = root.shape[0], tree.depth
    history, length = state.history, state.cache.length[:, None]
    S = history.shape[1]
    slot = jnp.arange(S)[None]

    def back(n: int) -> Array:
        """Token n before the newest one (0: itself)."""
        return jnp.take_along_axis(history, jnp.maximum(length - 1 - n, 0), axis=1)

    # `agrees` marks slots whose last n tokens are the newest n.
    agrees = jnp.ones((B, S), bool)
    start = jnp.full((B, 1), -1)  # slot of the first token to copy
    for n in range(1, cfg.ngram + 1):
        shifted = jnp.pad(history, ((0, 0), (n - 1, 0)))[:, :S]
        agrees = agrees & (shifted == back(n - 1)) & (slot >= n - 1)
        usable = agrees & (slot + depth < length) & (length > n)
        first = jnp.argmax(usable, axis=1, keepdims=True)
        start = jnp.where(usable.any(axis=1, keepdims=True), first + 1, start)
    copied = jnp.take_along_axis(
        history, jnp.clip(start + jnp.arange(depth)[None], 0, S - 1), axis=1
    )
    below = jnp.where(start < 0, root[:, None], copied)
    rows = jnp.broadcast_to(jnp.arange(depth + 1, dtype=jnp.int32), (B, depth + 1))
    return Tree(
        tokens=jnp.concatenate([root[:, None], below], axis=1),
        parents=jnp.maximum(rows - 1, 0),
        depths=rows,
        log_q=jnp.zeros((B, depth + 1), jnp.float32),
    )

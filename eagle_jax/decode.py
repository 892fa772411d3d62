"""Speculative decoding: one step, and the loops around it.

A step is seven calls: propose, mask, target forward, sample and walk, commit, extend, and
the new state. Plain decoding is the same step with a tree of one node. `generate` runs the
step in one compiled `while_loop` without talking to the host; `trace` runs it from the host
and keeps what every step did.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key

from eagle_jax import cache as cache_lib
from eagle_jax import draft, sharding, target, verify
from eagle_jax.cache import KVCache
from eagle_jax.config import DecodeConfig
from eagle_jax.draft import DraftState
from eagle_jax.layers import Params
from eagle_jax.tree import Tree, ancestors, rows_for


class DecodeState(NamedTuple):
    """What is carried from step to step.

    Both caches hold the tokens the target has seen; `root`, already emitted, comes next.
    `healthy` turns false for good in a row whose logits were not finite.
    """

    root: Int[Array, " B"]
    target_cache: KVCache
    draft: DraftState
    keys: Key[Array, " B"]
    done: Bool[Array, " B"]
    healthy: Bool[Array, " B"]


class StepInfo(NamedTuple):
    """What one step did. The first `n_emitted` of `tokens` are new; 0 in finished rows."""

    tokens: Int[Array, "B M"]
    n_emitted: Int[Array, " B"]
    n_accepted: Int[Array, " B"]
    tree: Tree
    path: Int[Array, "B M"]


def empty(keys: Key[Array, " B"], cfg: DecodeConfig, slots: int) -> DecodeState:
    """Returns the state before any token, with room for `slots` tokens a row."""
    t, B = cfg.target, keys.shape[0]
    state = DecodeState(
        root=jnp.zeros((B,), jnp.int32),
        target_cache=cache_lib.init(
            t.n_layers, B, t.n_kv_heads, t.head_dim, slots, t.dtype, t.stacked
        ),
        draft=draft.empty(cfg.draft, B, slots),
        keys=keys,
        done=jnp.zeros((B,), bool),
        healthy=jnp.ones((B,), bool),
    )
    return sharding.constrain(state, keys)


def prefill(
    params: Params,
    state: DecodeState,
    tokens: Int[Array, "B T"],
    following: Int[Array, "B T"],
    count: Int[Array, " B"],
    cfg: DecodeConfig,
) -> DecodeState:
    """Commits the next chunk of every prompt. Donate `state`.

    A row whose prompt ends here samples its first token, which becomes the root.

    Args:
      params: {"target": ..., "draft": ...}; the draft's already tied (`draft.tie`).
      following: the prompt token after each of `tokens`, -1 where the prompt ends.
      count: prompt tokens of each row in this chunk, the rest is padding; may be 0.
    """
    B, T = tokens.shape
    cache = state.target_cache
    positions = cache.length[:, None] + jnp.arange(T)[None]
    mask = jnp.broadcast_to(jnp.tril(jnp.ones((T, T), bool)), (B, T, T))
    out = target.forward(params["target"], tokens, positions, mask, cache, cfg.target)
    last = jnp.maximum(count - 1, 0)[None, :, None]
    logits = _score(params, jnp.take_along_axis(out.top, last, axis=2), cfg)
    keys = _step_keys(state.keys, cache.length + count - 1)
    sampled = verify.sample(keys, logits, cfg.sampling)
    at_end = (following < 0) & (jnp.arange(T)[None] < count[:, None])
    ends = at_end.any(axis=1)
    root = jnp.where(ends, sampled[:, 0], state.root)
    draft_state = state.draft
    if cfg.draft.head != "none":
        after = jnp.where(following < 0, sampled, following)
        fed, n_fed = draft.fed(draft_state, tokens, after, count, cfg.draft)
        features = draft.features(out, cfg.draft)
        draft_state = draft.extend(
            params["draft"], draft_state, fed, features, n_fed, cfg.draft
        )
    return DecodeState(
        root=root,
        target_cache=cache_lib.append(cache, out.new, count),
        draft=draft_state,
        keys=state.keys,
        done=jnp.where(ends, _is_eos(root, cfg), state.done),
        healthy=state.healthy & (~ends | _finite(logits, sampled)[:, 0]),
    )


def step(
    params: Params, state: DecodeState, cfg: DecodeConfig
) -> tuple[DecodeState, StepInfo]:
    """Drafts a tree, verifies it in one target forward and commits the accepted branch."""
    cache = state.target_cache
    keys = _step_keys(state.keys, cache.length)
    draft_args = (params.get("draft", {}), state.draft, state.root, cfg.draft, cfg.tree)
    log_q = None
    with jax.named_scope("propose"):
        if cfg.draws_drafts:
            draft_keys, keys = jax.vmap(jax.random.split, out_axes=1)(keys)
            tree, log_q = draft.propose_drawn(
                draft_keys,
                *draft_args,
                temperature=cfg.sampling.temperature,
                target_vocab_size=cfg.target.vocab_size,
            )
        else:
            tree = draft.propose(*draft_args)
    with jax.named_scope("mask"):
        mask = ancestors(tree.parents, cfg.tree.depth)
        positions = cache.length[:, None] + tree.depths
    with jax.named_scope("target"):
        N = cfg.tree.n_nodes
        spare = (0, rows_for(N, len(positions)) - N)
        out = target.forward(
            params["target"],
            jnp.pad(tree.tokens, ((0, 0), spare)),
            jnp.pad(positions, ((0, 0), spare)),
            jnp.pad(mask, ((0, 0), spare, spare)),
            cache,
            cfg.target,
        )
        logits = _score(params, out.top, cfg)[..., :N]
    with jax.named_scope("verify"):
        if log_q is None:
            sampled = verify.sample(keys, logits, cfg.sampling)
            verdict = verify.walk(tree, sampled, cfg.tree.depth)
        else:
            p = verify.distribution(logits, cfg.sampling)
            verdict = verify.accept_with_q(keys, tree, log_q, p, cfg.tree.depth)
            sampled = jnp.broadcast_to(verdict.next_token[:, None], tree.tokens.shape)
        tokens, n_emitted, ended = _emit(tree, verdict, cfg)
        finite = jnp.take_along_axis(_finite(logits, sampled), verdict.path, axis=1)
        live = ~state.done
        n_emitted = jnp.where(live, n_emitted, 0)
    with jax.named_scope("commit"):
        # A row that broke commits zeros, so that NaN do not spread. It also makes every
        # write wait for the logits, and so for every read of the cache: otherwise, in a
        # tree of one node, compilers write first and copy all caches to keep them readable.
        usable = finite.all(axis=1)[:, None, None, None]
        accepted = jax.tree.map(
            lambda new: jnp.where(
                usable[(None,) * (new.ndim - 4)], new, jnp.zeros((), new.dtype)
            ),
            cache_lib.take(out.new, verdict.path),
        )
        cache = cache_lib.append(cache, accepted, n_emitted)
    draft_state = state.draft
    if cfg.draft.head != "none":
        with jax.named_scope("extend"):
            features = draft.features(out, cfg.draft)
            features = jnp.take_along_axis(features, verdict.path[None], axis=2)
            own = jnp.take_along_axis(tree.tokens, verdict.path, axis=1)
            fed, n_fed = draft.fed(draft_state, own, tokens, n_emitted, cfg.draft)
            draft_state = draft.extend(
                params["draft"], draft_state, fed, features, n_fed, cfg.draft
            )
    state = DecodeState(
        root=jnp.where(live, verdict.next_token, state.root),
        target_cache=cache,
        draft=draft_state,
        keys=state.keys,
        done=state.done | ended,
        healthy=state.healthy & (finite.all(axis=1) | state.done),
    )
    n_accepted = jnp.where(live, verdict.n_accepted, 0)
    return state, StepInfo(tokens, n_emitted, n_accepted, tree, verdict.path)


def _score(
    params: Params, top: Float[Array, "D B T"], cfg: DecodeConfig
) -> Float[Array, "V B T"]:
    """Scores the next token; padding of the vocabulary is no token."""
    logits = target.logits(params["target"], top)
    if not cfg.target.n_tokens:
        return logits
    is_token = jnp.arange(logits.shape[0]) < cfg.target.n_tokens
    return jnp.where(is_token[:, None, None], logits, -jnp.inf)


def _emit(
    tree: Tree, verdict: verify.Verdict, cfg: DecodeConfig
) -> tuple[Int[Array, "B M"], Int[Array, " B"], Bool[Array, " B"]]:
    """Lists accepted tokens and the bonus token, cut after the first end token."""
    below = jnp.take_along_axis(tree.tokens, verdict.path[:, 1:], axis=1)
    tokens = jnp.concatenate([below, verdict.next_token[:, None]], axis=1)
    place = jnp.arange(tokens.shape[1])[None]
    bonus = place == verdict.n_accepted[:, None]
    tokens = jnp.where(bonus, verdict.next_token[:, None], tokens)
    n_emitted = verdict.n_accepted + 1
    ends = _is_eos(tokens, cfg) & (place < n_emitted[:, None])
    ended = ends.any(axis=1)
    n_emitted = jnp.where(ended, jnp.argmax(ends, axis=1) + 1, n_emitted)
    return tokens, n_emitted.astype(jnp.int32), ended


def _is_eos(tokens: Int[Array, "*any"], cfg: DecodeConfig) -> Bool[Array, "*any"]:
    return functools.reduce(
        jnp.logical_or,
        [tokens == i for i in cfg.target.eos_ids],
        jnp.zeros_like(tokens, bool),
    )


def _finite(
    logits: Float[Array, "V B N"], sampled: Int[Array, "B N"]
) -> Bool[Array, "B N"]:
    """Tells whether the sampled logit is a number.

    An argmax over NaN lands on the NaN, a draw lands outside the vocabulary.
    """
    chosen = jnp.take_along_axis(logits, sampled[None], axis=0, mode="fill")
    return jnp.isfinite(chosen[0])


def _step_keys(keys: Key[Array, " B"], length: Int[Array, " B"]) -> Key[Array, " B"]:
    """Names each step by the tokens committed before it: no key has to be carried on."""
    return jax.vmap(jax.random.fold_in)(keys, length)


class Generation(NamedTuple):
    """New tokens of each row, and how they came about.

    Args:
      tokens: the first `n_tokens` are valid; the first one comes from the prefill.
      n_accepted: drafted tokens accepted by each step, before any cut at an end token or
        at the limit; -1 where the row took no step.
      n_emitted: tokens each step delivered, after such a cut.
    """

    tokens: Int[Array, "B X"]
    n_tokens: Int[Array, " B"]
    n_accepted: Int[Array, "B X"]
    n_emitted: Int[Array, "B X"]
    healthy: Bool[Array, " B"]


class _Loop(NamedTuple):
    state: DecodeState
    tokens: Int[Array, "B Y"]
    n_tokens: Int[Array, " B"]
    n_accepted: Int[Array, "B X"]
    n_emitted: Int[Array, "B X"]
    n_steps: Int[Array, ""]


def loop(
    params: Params, state: DecodeState, cfg: DecodeConfig, max_new_tokens: int
) -> tuple[DecodeState, Generation]:
    """Steps until every row has ended or has `max_new_tokens` tokens. Donate `state`."""
    B, M = state.root.shape[0], cfg.tree.depth + 1
    # A block may overrun the limit by less than its length; the surplus is cut below.
    tokens = jnp.zeros((B, max_new_tokens + M), jnp.int32).at[:, 0].set(state.root)
    unused = jnp.full((B, max_new_tokens), -1, jnp.int32)
    start = _Loop(
        state=state._replace(done=state.done | (max_new_tokens <= 1)),
        tokens=tokens,
        n_tokens=jnp.ones((B,), jnp.int32),
        n_accepted=unused,
        n_emitted=unused,
        n_steps=jnp.zeros((), jnp.int32),
    )

    def body(at: _Loop) -> _Loop:
        live = ~at.state.done
        state, info = step(params, at.state, cfg)
        tokens = jax.vmap(
            lambda row, new, n: jax.lax.dynamic_update_slice(row, new, (n,))
        )(at.tokens, info.tokens, at.n_tokens)
        n_tokens = jnp.minimum(at.n_tokens + info.n_emitted, max_new_tokens)
        emitted = n_tokens - at.n_tokens
        state = state._replace(done=state.done | (n_tokens >= max_new_tokens))
        return _Loop(
            state=state,
            tokens=tokens,
            n_tokens=n_tokens,
            n_accepted=at.n_accepted.at[:, at.n_steps].set(
                jnp.where(live, info.n_accepted, -1)
            ),
            n_emitted=at.n_emitted.at[:, at.n_steps].set(jnp.where(live, emitted, -1)),
            n_steps=at.n_steps + 1,
        )

    end = jax.lax.while_loop(lambda at: ~at.state.done.all(), body, start)
    valid = jnp.arange(max_new_tokens)[None] < end.n_tokens[:, None]
    generation = Generation(
        tokens=jnp.where(valid, end.tokens[:, :max_new_tokens], 0),
        n_tokens=end.n_tokens,
        n_accepted=end.n_accepted,
        n_emitted=end.n_emitted,
        healthy=end.state.healthy,
    )
    return end.state, generation


def advance(
    params: Params,
    state: DecodeState,
    left: Int[Array, " B"],
    cfg: DecodeConfig,
    n_steps: int,
) -> tuple[DecodeState, Int[Array, "B L M"], Int[Array, "B L"]]:
    """Takes `n_steps` = L steps, whether rows end or not. Donate `state`.

    Args:
      left: tokens each row may still emit; at 0 it is done. The last block of a row may
        overrun it by less than its length.

    Returns:
      The new state, each step's tokens, and how many of them are new.
    """

    def body(carry: tuple[DecodeState, Int[Array, " B"]], _: None):
        state, left = carry
        state = state._replace(done=state.done | (left <= 0))
        state, info = step(params, state, cfg)
        return (state, left - info.n_emitted), (info.tokens, info.n_emitted)

    (state, left), (tokens, n_emitted) = jax.lax.scan(
        body, (state, left), length=n_steps
    )
    state = state._replace(done=state.done | (left <= 0))
    return state, tokens.swapaxes(0, 1), n_emitted.swapaxes(0, 1)


def replace_row(
    state: DecodeState, part: DecodeState, row: Int[Array, ""]
) -> DecodeState:
    """Puts the only row of `part` in the place of row `row`. Donate `state`.

    `part` may have fewer cache slots: what stands behind its tokens is never read.
    """

    def put(old: Array, new: Array) -> Array:
        start = [row, *[0] * (old.ndim - 1)]
        if old.ndim == 2:  # the draft's hidden, the one array with rows second
            start.reverse()
        return jax.lax.dynamic_update_slice(old, new, start)

    return jax.tree.map(put, state, part)


jit_empty = jax.jit(empty, static_argnames=("cfg", "slots"))
jit_prefill = jax.jit(prefill, static_argnames="cfg", donate_argnames="state")
jit_step = jax.jit(step, static_argnames="cfg", donate_argnames="state")
jit_loop = jax.jit(
    loop, static_argnames=("cfg", "max_new_tokens"), donate_argnames="state"
)
jit_advance = jax.jit(
    advance, static_argnames=("cfg", "n_steps"), donate_argnames="state"
)
jit_replace_row = jax.jit(replace_row, donate_argnames="state")


def row_keys(seed: int, rows: int) -> Key[Array, " B"]:
    """Returns one key per row: row r of any batch draws what seed + r draws alone."""
    return jax.vmap(jax.random.key)(jnp.arange(seed, seed + rows))


def bucket(n: int) -> int:
    """Rounds a number of slots up to a shape worth compiling for: 256, 512, 1024, ..."""
    return max(256, 1 << (n - 1).bit_length())


CHUNK = 128  # prompt tokens per prefill call: one compiled shape for any prompt length


def start(
    params: Params,
    prompts: list[list[int]],
    cfg: DecodeConfig,
    max_new_tokens: int,
    seed: int = 0,
    max_len: int | None = None,
) -> DecodeState:
    """Checks the prompts and runs the prefill, chunk by chunk.

    Args:
      max_len: most cache slots; the smallest bucket that holds the longest row is used.

    Raises:
      ValueError: empty prompt, token outside the vocabulary, or no room in the cache.
    """
    if not prompts or any(not prompt for prompt in prompts):
        raise ValueError("every prompt needs at least one token, got an empty one")
    longest = max(len(prompt) for prompt in prompts)
    # The last step starts with at most prompt + new - 1 committed and writes depth + 1;
    # the last chunk of a prompt is written whole. A row that has ended is still written,
    # at the end of its cache at worst: behind those prompt + new - 1 again.
    padded = -(-longest // CHUNK) * CHUNK
    needed = max(padded, longest + max_new_tokens + cfg.tree.depth)
    slots = bucket(needed) if max_len is None else min(bucket(needed), max_len)
    if needed > slots:
        raise ValueError(
            f"no room: a prompt of {longest} tokens, max_new_tokens={max_new_tokens} and "
            f"tree depth={cfg.tree.depth} need {needed} cache slots, max_len={slots}; "
            f"shorten the prompt or raise max_len"
        )
    for whose, scaling in {
        "target": cfg.target.rope_scaling,
        "draft": cfg.draft.rope_scaling,
    }.items():
        if scaling and scaling.kind == "dynamic" and needed > scaling.original_length:
            raise ValueError(
                f"dynamic rope scaling of the {whose} beyond its original length "
                f"{scaling.original_length} is not supported, this run needs {needed} "
                f"positions; shorten it"
            )
    top = max(max(prompt) for prompt in prompts)
    if top >= cfg.target.vocab_size or min(min(prompt) for prompt in prompts) < 0:
        raise ValueError(
            f"token ids must lie in [0, {cfg.target.vocab_size}), got {top}; is the "
            f"tokenizer the target's own?"
        )
    n_prompt = np.array([len(prompt) for prompt in prompts])
    n_chunks = -(-longest // CHUNK)
    tokens = np.zeros((len(prompts), n_chunks * CHUNK), np.int32)
    following = np.full_like(tokens, -1)
    for row, after, prompt in zip(tokens, following, prompts, strict=True):
        row[: len(prompt)] = prompt
        after[: len(prompt) - 1] = prompt[1:]
    keys = {"keys": row_keys(seed, len(prompts))}
    keys = sharding.place(keys, sharding.mesh_of(params))["keys"]
    state = jit_empty(keys, cfg, slots)
    for at in range(0, n_chunks * CHUNK, CHUNK):
        count = np.clip(n_prompt - at, 0, CHUNK).astype(np.int32)
        chunk = slice(at, at + CHUNK)
        state = jit_prefill(
            params, state, tokens[:, chunk], following[:, chunk], count, cfg
        )
    return state


def generate(
    params: Params,
    prompts: list[list[int]],
    cfg: DecodeConfig,
    max_new_tokens: int,
    seed: int = 0,
    max_len: int | None = None,
) -> list[list[int]]:
    """Decodes a batch of prompts and returns the new tokens of each, cut at end tokens.

    Raises:
      FloatingPointError: the target's logits were not finite, with the rows named.
    """
    state = start(params, prompts, cfg, max_new_tokens, seed, max_len)
    _, out = jit_loop(params, state, cfg, max_new_tokens)
    return unpack(out)


def unpack(out: Generation) -> list[list[int]]:
    """Brings new tokens to the host, and any trouble with them."""
    healthy = np.asarray(out.healthy)
    if not healthy.all():
        raise FloatingPointError(
            f"the target's logits were not finite in rows "
            f"{np.flatnonzero(~healthy).tolist()}; check the weights and dtype"
        )
    counts = np.asarray(out.n_tokens)
    return [
        row[:n].tolist() for row, n in zip(np.asarray(out.tokens), counts, strict=True)
    ]


def trace(
    params: Params,
    prompts: list[list[int]],
    cfg: DecodeConfig,
    max_new_tokens: int,
    seed: int = 0,
    max_len: int | None = None,
) -> tuple[list[list[int]], list[StepInfo]]:
    """Decodes like `generate`, from a host loop, and returns what every step did."""
    state = start(params, prompts, cfg, max_new_tokens, seed, max_len)
    rows = [[int(root)] for root in np.asarray(state.root)]
    infos: list[StepInfo] = []
    while not all(np.asarray(state.done)) and any(
        len(r) < max_new_tokens for r in rows
    ):
        state, info = jit_step(params, state, cfg)
        info = jax.device_get(info)
        infos.append(info)
        for row, tokens, n in zip(rows, info.tokens, info.n_emitted, strict=True):
            row.extend(tokens[:n].tolist())
        full = np.array([len(row) >= max_new_tokens for row in rows])
        state = state._replace(done=state.done | full)
    return [row[:max_new_tokens] for row in rows], infos

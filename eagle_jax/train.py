"""Training of draft heads on packed conversations of the target.

A row holds several conversations; `segments` tells them apart (0 is padding), `positions`
restart in each, `mask` marks the tokens an answer consists of. A *label* is a place p whose
next token is to be predicted; slot t of the draft reads (feature t, token t+1), so what it
says in unrolled step i belongs to label p = t + 1 + i.

    slot t       0    1    2    3         step 0: slot t reads token t+1, label t+1
    token        x0   x1   x2   x3        step 1: slot t reads token t+2, label t+2
    feature      f0   f1   f2   f3        ...
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int

from eagle_jax import cache as cache_lib
from eagle_jax import draft, target
from eagle_jax.config import DraftConfig, TargetConfig, TrainConfig
from eagle_jax.layers import KV, Params, Segment, linear


class Batch(NamedTuple):
    """Packed rows of token ids."""

    tokens: Int[Array, "B T"]
    segments: Int[Array, "B T"]
    positions: Int[Array, "B T"]
    mask: Bool[Array, "B T"]


class Features(NamedTuple):
    """What the frozen target says about a batch.

    Args:
      read: what the head reads (`draft.features`).
      top: final-norm output, which the target's LM head turns into the teacher.
    """

    read: Float[Array, "E B T"]
    top: Float[Array, "D B T"]


class Metrics(NamedTuple):
    """Sums and means over one batch, per unrolled step.

    Args:
      loss: weighted sum over steps.
      step_loss: mean cross-entropy of each step (nats), not weighted.
      accuracy: share of labels where draft and target agree on the likeliest token;
        labels outside the draft vocabulary count as errors.
      n_labels: labels trained in step 0.
    """

    loss: Float[Array, ""]
    step_loss: Float[Array, " I"]
    accuracy: Float[Array, " I"]
    n_labels: Int[Array, ""]


class TrainState(NamedTuple):
    """What a checkpoint must hold; the data stream continues from `step`."""

    params: Params
    opt_state: optax.OptState
    step: Int[Array, ""]
    n_tokens: Int[Array, ""]  # supervised tokens seen


def packed_mask(batch: Batch) -> Bool[Array, "B T T"]:
    """Lets every token see its own conversation up to itself."""
    same = batch.segments[:, :, None] == batch.segments[:, None, :]
    return same & jnp.tril(jnp.ones(same.shape[1:], bool))[None]


def target_features(
    params: Params, batch: Batch, cfg: TargetConfig, head: DraftConfig
) -> Features:
    """Runs the frozen target over packed rows."""
    nothing = cache_lib.init(
        0, batch.tokens.shape[0], cfg.n_kv_heads, cfg.head_dim, 0, cfg.dtype
    )
    out = target.forward(
        params, batch.tokens, batch.positions, packed_mask(batch), nothing, cfg
    )
    return Features(read=draft.features(out, head), top=out.top)


def unroll(
    params: Params, batch: Batch, read: Float[Array, "E B T"], cfg: DraftConfig, steps: int
) -> list[Float[Array, "D B T"]]:
    """Runs the head on its own outputs: training-time test (EAGLE-3 §3.2).

    Tokens are the data's at every step. In step i, slot t sees the step-0 keys of slots up
    to t, made from true features, and its own keys of steps 1 to i; its rotary position is
    t + i. Gradients flow through all steps (traineagle3/cnets.py:713-864).
    """
    hidden = draft.fuse(params, read, cfg)
    mask = packed_mask(batch)
    outs: list[Array] = []
    first: Segment | None = None
    own: tuple[KV, ...] = ()
    for i in range(steps):
        tokens = _shift(batch.tokens, i + 1)
        block = draft.begin(params, tokens, hidden, batch.positions + i, cfg)
        if first is None:
            first = Segment(*block.kv, mask)
        else:
            own = (*own, block.kv)
        out = draft.finish(params, block, (first,), cfg, own)
        outs.append(out)
        hidden = draft.feed_back(params, out, cfg)
    return outs


def _shift(x: Array, by: int) -> Array:
    """Moves columns to the left, filling with zeros."""
    return jnp.pad(x[:, by:], ((0, 0), (0, by)))


def labels(batch: Batch, rule: str) -> Bool[Array, "B T"]:
    """Marks the places whose next token is trained.

    "label": the next token belongs to an answer. "official": the token before belongs to
    one, which is where the unshifted mask of the official code ends up (method.md 6.5).
    """
    following = (_shift(batch.segments, 1) == batch.segments) & (batch.segments > 0)
    if rule == "label":
        return following & _shift(batch.mask, 1)
    before = jnp.pad(batch.mask[:, :-1], ((0, 0), (1, 0)))
    return following & before & (batch.positions > 0)


def eagle3_loss(
    params: Params,
    target_params: Params,
    batch: Batch,
    given: Features,
    cfg: DraftConfig,
    train: TrainConfig,
) -> tuple[Float[Array, ""], Metrics]:
    """Cross-entropy with the target's distribution over the draft vocabulary, unrolled.

    Labels whose likeliest token lies outside the draft vocabulary are not trained; the
    teacher is renormalised over it. The steps are weighted by `ttt_decay`^i.
    """
    compute = jnp.dtype(train.dtype)
    params = _cast(params, compute)
    outs = unroll(params, batch, given.read.astype(compute), cfg, train.ttt_steps)
    flags = labels(batch, train.mask)
    if train.normaliser == "mask":
        scale = 1.0 / jnp.maximum(flags.sum(), 1).astype(jnp.float32)
    else:
        scale = jnp.asarray(1.0 / flags.size, jnp.float32)
    decay = train.ttt_decay ** jnp.arange(train.ttt_steps, dtype=jnp.float32)
    sums = chunked_loss(
        {name: params[name] for name in ("norm", "head") if name in params},
        jnp.stack([out.reshape(out.shape[0], -1) for out in outs]),
        target_params.get("head", target_params["embed"]),
        params.get("draft_to_target"),
        given.top.reshape(given.top.shape[0], -1),
        flags.reshape(-1),
        batch.positions.reshape(-1),
        decay * scale,
        cfg,
    )
    step_loss = sums.loss * scale
    loss = jnp.sum(decay * step_loss)
    n_labels = flags.sum()
    return loss, Metrics(
        loss=loss,
        step_loss=step_loss,
        accuracy=sums.n_right / jnp.maximum(sums.n_labels, 1.0),
        n_labels=n_labels.astype(jnp.int32),
    )


def _cast(params: Params, dtype: jnp.dtype) -> Params:
    def cast(leaf: Array) -> Array:
        floating = jnp.issubdtype(leaf.dtype, jnp.floating)
        return leaf.astype(dtype) if floating else leaf

    return jax.tree.map(cast, params)


class Sums(NamedTuple):
    """Totals over all labels, per unrolled step."""

    loss: Float[Array, " I"]
    n_right: Float[Array, " I"]
    n_labels: Float[Array, " I"]


CHUNK = 256  # labels whose full-vocabulary logits are held at once


@functools.partial(jax.custom_vjp, nondiff_argnums=(8,))
def chunked_loss(
    head_params: Params,
    outs: Float[Array, "I D X"],
    target_head: Float[Array, "V D2"],
    draft_to_target: Int[Array, " U"] | None,
    top: Float[Array, "D2 X"],
    flags: Bool[Array, " X"],
    positions: Int[Array, " X"],
    weights: Float[Array, " I"],
    cfg: DraftConfig,
) -> Sums:
    """Sums the cross-entropy over labels, a chunk of them at a time.

    Only the chunk's logits ever exist, [CHUNK, V] of the teacher and [I, CHUNK, U] of the
    draft, and unsupervised places cost nothing: the loop runs over labels. The gradient of
    `loss @ weights` is made in the same pass, so nothing is computed twice.

    Args:
      outs: draft outputs of every unrolled step, all places of the batch in one axis.
      weights: weight of each step's loss, for the gradient.
    """
    sums, _ = _chunks(
        head_params, outs, target_head, draft_to_target, top, flags, positions, weights, cfg
    )
    return sums


def _chunks(
    head_params: Params,
    outs: Float[Array, "I D X"],
    target_head: Float[Array, "V D2"],
    draft_to_target: Int[Array, " U"] | None,
    top: Float[Array, "D2 X"],
    flags: Bool[Array, " X"],
    positions: Int[Array, " X"],
    weights: Float[Array, " I"],
    cfg: DraftConfig,
) -> tuple[Sums, tuple[Params, Array]]:
    n_steps, _, n_places = outs.shape
    vocab = target_head.shape[0]
    size = min(CHUNK, n_places)
    (where,) = jnp.nonzero(flags, size=n_places + size, fill_value=0)
    where = where.astype(jnp.int32)
    n_labels = flags.sum().astype(jnp.int32)
    inside = jnp.ones(vocab, bool)
    if draft_to_target is not None:
        inside = jnp.zeros(vocab, bool).at[draft_to_target].set(True)
    back = 1 + jnp.arange(n_steps, dtype=jnp.int32)

    def chunk_loss(
        head_params: Params, out: Array, p: Array, weight: Array
    ) -> tuple[Array, tuple[Array, Array]]:
        scores = draft.logits(head_params, out, cfg)
        log_q = jax.nn.log_softmax(scores, axis=0)
        step_loss = -jnp.sum(weight * jnp.einsum("UT,UIT->IT", p, log_q), axis=1)
        right = jnp.argmax(scores, axis=0) == jnp.argmax(p, axis=0)[None]
        n_right = jnp.sum(right.astype(jnp.float32) * weight, axis=1)
        return jnp.sum(step_loss * weights), (step_loss, n_right)

    def body(
        at: tuple[Array, Sums, Params, Array],
    ) -> tuple[Array, Sums, Params, Array]:
        i, sums, head_grads, out_grads = at
        places = jax.lax.dynamic_slice(where, (i * size,), (size,))
        real = i * size + jnp.arange(size) < n_labels
        teacher = linear(target_head, top[:, places][:, None]).astype(jnp.float32)[:, 0]
        known = inside[jnp.argmax(teacher, axis=0)]
        if draft_to_target is not None:
            teacher = teacher[draft_to_target]
        p = jax.nn.softmax(teacher, axis=0)
        # Slot p - 1 - i speaks about label p in step i, if its conversation reaches there.
        slots = places[None] - back[:, None]
        reaches = (positions[places][None] >= back[:, None]) & real[None]
        slots = jnp.where(reaches, slots, 0)
        weight = (reaches & known[None]).astype(jnp.float32)
        step = jnp.arange(n_steps)[:, None]
        out = outs[step, :, slots].transpose(2, 0, 1)
        (_, (step_loss, n_right)), (head_grad, out_grad) = jax.value_and_grad(
            chunk_loss, argnums=(0, 1), has_aux=True
        )(head_params, out, p, weight)
        sums = Sums(
            loss=sums.loss + step_loss,
            n_right=sums.n_right + n_right,
            n_labels=sums.n_labels + reaches.sum(axis=1).astype(jnp.float32),
        )
        head_grads = jax.tree.map(jnp.add, head_grads, head_grad)
        out_grads = out_grads.at[step, :, slots].add(out_grad.transpose(1, 2, 0))
        return i + 1, sums, head_grads, out_grads

    zeros = jnp.zeros(n_steps, jnp.float32)
    start = (
        jnp.zeros((), jnp.int32),
        Sums(zeros, zeros, zeros),
        jax.tree.map(jnp.zeros_like, head_params),
        jnp.zeros_like(outs),
    )
    _, sums, head_grads, out_grads = jax.lax.while_loop(
        lambda at: at[0] * size < n_labels, body, start
    )
    return sums, (head_grads, out_grads)


def _chunked_fwd(*args):  # type: ignore[no-untyped-def]
    sums, grads = _chunks(*args)
    return sums, (grads, args[7])


def _chunked_bwd(cfg, residuals, cotangent):  # type: ignore[no-untyped-def]
    """Scales the gradient made on the way forward.

    It was made for `loss @ weights`, so the loss must reach the total with exactly these
    weights times one common factor; `eagle3_loss` does so.
    """
    (head_grads, out_grads), weights = residuals
    factor = cotangent.loss[0] / weights[0]
    scale = functools.partial(jax.tree.map, lambda g: (g * factor).astype(g.dtype))
    return scale(head_grads), scale(out_grads), None, None, None, None, None, None


chunked_loss.defvjp(_chunked_fwd, _chunked_bwd)


def optimiser(cfg: TrainConfig, n_steps: int) -> optax.GradientTransformation:
    """AdamW after clipping by global norm, with warm-up and cosine decay."""
    warmup = max(1, round(cfg.warmup * n_steps))
    schedule = optax.warmup_cosine_decay_schedule(
        init_value=cfg.learning_rate / warmup,
        peak_value=cfg.learning_rate,
        warmup_steps=warmup,
        decay_steps=max(n_steps, warmup + 1),
        end_value=cfg.final_learning_rate,
    )
    update = optax.chain(
        optax.clip_by_global_norm(cfg.clip_norm),
        optax.adamw(
            schedule, b1=cfg.beta1, b2=cfg.beta2, weight_decay=cfg.weight_decay
        ),
    )
    if cfg.accumulate > 1:
        return optax.MultiSteps(update, cfg.accumulate).gradient_transformation()
    return update


def init(
    key: Array,
    target_params: Params,
    draft_to_target: Int[Array, " U"],
    cfg: DraftConfig,
    target_cfg: TargetConfig,
    train: TrainConfig,
    update: optax.GradientTransformation,
) -> TrainState:
    """Returns the state before the first step, with a fresh head."""
    params = draft.init(key, cfg, target_cfg)
    if train.head_from_target and "head" in params:
        head = target_params.get("head", target_params["embed"])
        if head.shape[1] == cfg.d_model:
            params["head"] = head[draft_to_target].astype(cfg.dtype)
    zero = jnp.zeros((), jnp.int32)
    state = TrainState(params, update.init(params), zero, zero)
    return jax.tree.map(jnp.copy, state)  # donated leaves must not share a buffer


def train_step(
    state: TrainState,
    fixed: Params,
    target_params: Params,
    batch: Batch,
    given: Features,
    cfg: DraftConfig,
    train: TrainConfig,
    update: optax.GradientTransformation,
) -> tuple[TrainState, Metrics]:
    """Takes one step. Donate `state`.

    Args:
      fixed: what the head shares and never trains (embedding, draft vocabulary).
    """

    def loss(params: Params) -> tuple[Array, Metrics]:
        return eagle3_loss(params | fixed, target_params, batch, given, cfg, train)

    (_, metrics), grads = jax.value_and_grad(loss, has_aux=True)(state.params)
    updates, opt_state = update.update(grads, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    return TrainState(
        params=params,
        opt_state=opt_state,
        step=state.step + 1,
        n_tokens=state.n_tokens + metrics.n_labels,
    ), metrics


def predicted_tau(accuracy: Float[Array, " I"]) -> Float[Array, ""]:
    """Expected tokens per step of a chain as deep as the unrolled steps."""
    return 1 + jnp.sum(jnp.cumprod(accuracy))

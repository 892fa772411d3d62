"""Training of draft heads on packed conversations of the target.

A row holds several conversations; `segments` tells them apart (0 is padding),
`positions` restart in each, `mask` marks the tokens of answers. A *label* is a place p
whose next token is to be predicted; slot t of the draft reads (feature t, token t+1),
so what it says in unrolled step i belongs to label p = t + 1 + i.

    slot t       0    1    2    3         step 0: slot t reads token t+1, label t+1
    token        x0   x1   x2   x3        step 1: slot t reads token t+2, label t+2
    feature      f0   f1   f2   f3        ...
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int

from eagle_jax import cache as cache_lib
from eagle_jax import draft, sharding, target
from eagle_jax.config import DraftConfig, TargetConfig, TrainConfig
from eagle_jax.layers import KV, Int8, Matrix, Params, Segment, dense, linear, look_up


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
      likeliest: the target's next token, where it is known beforehand; the teacher then
        costs the draft vocabulary instead of the whole one.
    """

    read: Float[Array, "E B T"]
    top: Float[Array, "D B T"]
    likeliest: Int[Array, "B T"] | None = None


class Metrics(NamedTuple):
    """Sums and means over one batch, per unrolled step.

    Args:
      loss: weighted sum over steps and parts.
      step_loss: mean cross-entropy of each step (nats), not weighted.
      regression: mean smooth-L1 distance to the true feature; 0 for EAGLE-3.
      accuracy: share of labels where draft and target agree on the likeliest token;
        labels outside the draft vocabulary count as errors.
      n_labels: labels trained in step 0.
    """

    loss: Float[Array, ""]
    step_loss: Float[Array, " I"]
    regression: Float[Array, " I"]
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


def likeliest(target_params: Params, top: Float[Array, "D B T"]) -> Int[Array, "B T"]:
    """Returns the target's next token after every token, a few positions at a time."""

    D, B, T = top.shape
    size = min(T, 128)
    spare = -T % size

    def at(top: Float[Array, "D B X"]) -> Int[Array, "B X"]:
        return jnp.argmax(target.logits(target_params, top), axis=0).astype(jnp.int32)

    parts = jnp.pad(top, ((0, 0), (0, 0), (0, spare))).reshape(D, B, -1, size)
    found = jax.lax.map(at, parts.transpose(2, 0, 1, 3))
    return found.transpose(1, 0, 2).reshape(B, -1)[:, :T]


def unroll(
    params: Params,
    batch: Batch,
    read: Float[Array, "E B T"],
    cfg: DraftConfig,
    steps: int,
    detach: bool = False,
) -> list[Float[Array, "D B T"]]:
    """Runs the head on its own outputs: training-time test (EAGLE-3 §3.2).

    Tokens are the data's at every step. In step i, slot t sees the step-0 keys of slots
    up to t, made from true features, and its own keys of steps 1 to i; its rotary
    position is t + i. Gradients flow through all steps (traineagle3/cnets.py:713-864)
    unless `detach`ed. Medusa: what each of its heads says instead. A small model reads
    tokens alone and takes one step.
    """
    hidden = draft.fuse(params, read, cfg)
    mask = packed_mask(batch)
    if cfg.head == "medusa":
        D, B, T = hidden.shape
        ahead = draft.look_ahead(params, hidden.reshape(D, -1), cfg)
        return [ahead[:, i].reshape(D, B, T) for i in range(steps)]
    if cfg.head == "small":

        def look(_: int, kv: KV) -> tuple[Segment, ...]:
            return (Segment(*kv, mask),)

        return [draft.run(params, batch.tokens, hidden, batch.positions, look, cfg)[0]]
    lead = 0 if cfg.inputs == "unshifted" else 1
    outs: list[Array] = []
    first: Segment | None = None
    own: tuple[KV, ...] = ()
    for i in range(steps):
        tokens = _shift(batch.tokens, i + lead)
        block = draft.begin(params, tokens, hidden, batch.positions + i, cfg)
        if first is None:
            first = Segment(*block.kv, mask)
        else:
            own = (*own, block.kv)
        out = draft.finish(params, block, (first,), cfg, own)
        outs.append(out)
        hidden = draft.feed_back(params, out, cfg)
        if detach:
            hidden = jax.lax.stop_gradient(hidden)
    return outs


def _shift(x: Array, by: int) -> Array:
    """Moves columns to the left, filling with zeros."""
    return jnp.pad(x[:, by:], ((0, 0), (0, by)))


def labels(batch: Batch, rule: str) -> Bool[Array, "B T"]:
    """Marks the places whose next token is trained.

    "label": the next token belongs to an answer. "official": the token before belongs
    to one, which is where the unshifted mask of the official code ends up (method.md
    4.4, 6.5); so the last token of a conversation is a label, with the teacher alone to
    say what follows. The one after it, trained on zeros by EAGLE-3's code, is left out.
    """
    real = batch.segments > 0
    if rule == "label":
        inside = _shift(batch.segments, 1) == batch.segments
        return real & inside & _shift(batch.mask, 1)
    before = jnp.pad(batch.mask[:, :-1], ((0, 0), (1, 0)))
    return real & before & (batch.positions > 0)


def head_loss(
    key: Array,
    params: Params,
    target_params: Params,
    batch: Batch,
    given: Features,
    cfg: DraftConfig,
    train: TrainConfig,
) -> tuple[Float[Array, ""], Metrics]:
    """Returns the loss that belongs to the kind of head; only EAGLE-1 needs `key`."""
    if cfg.head == "eagle1":
        return eagle1_loss(key, params, target_params, batch, given, cfg, train)
    return token_loss(params, target_params, batch, given, cfg, train)


def eagle1_loss(
    key: Array,
    params: Params,
    target_params: Params,
    batch: Batch,
    given: Features,
    cfg: DraftConfig,
    train: TrainConfig,
) -> tuple[Float[Array, ""], Metrics]:
    """Distance to the target's next feature, and cross-entropy with its distribution.

    Smooth-L1 (beta 1, mean over channels) to `given.top`, and cross-entropy between
    what the target's frozen LM head says of both features (EAGLE-1 §3.2,
    eagle/train/main.py:231-238); noise goes on `given.read` alone. `ttt_steps` = 1 is
    EAGLE-1; more steps also train on the head's own features, as HASS does, but with
    gradients through all steps (method.md 7).
    """
    params = draft.tie(params, target_params, cfg)
    read = add_noise(key, given.read, batch, train)
    return _unrolled_loss(
        params, target_params, batch, given._replace(read=read), cfg, train
    )


def add_noise(
    key: Array, read: Float[Array, "E B T"], batch: Batch, train: TrainConfig
) -> Float[Array, "E B T"]:
    """Blurs features, so that the head bears its own errors (EAGLE-1 §3.2).

    "official" widens the noise in short conversations (eagle/train/main.py:122-131):
    `noise_width` holds at 512 tokens.
    """
    if train.noise == "none":
        return read
    width = jnp.full(batch.tokens.shape, train.noise_width, jnp.float32)
    if train.noise == "official":
        same = batch.segments[:, :, None] == batch.segments[:, None, :]
        width = width * 512 / same.sum(axis=2).astype(jnp.float32)
    u = jax.random.uniform(key, read.shape, minval=-1.0, maxval=1.0)
    return read + (width[None] * u).astype(read.dtype)


def token_loss(
    params: Params,
    target_params: Params,
    batch: Batch,
    given: Features,
    cfg: DraftConfig,
    train: TrainConfig,
) -> tuple[Float[Array, ""], Metrics]:
    """Cross-entropy with the target's distribution over the draft vocabulary, unrolled.

    The loss of EAGLE-3 (§3.2), and here of Medusa (step i is its head i) and of a small
    model.

    Labels whose likeliest token lies outside the draft vocabulary are not trained; the
    teacher is renormalised over it. The steps are weighted by `ttt_decay`^i.
    """
    return _unrolled_loss(params, target_params, batch, given, cfg, train)


def _unrolled_loss(
    params: Params,
    target_params: Params,
    batch: Batch,
    given: Features,
    cfg: DraftConfig,
    train: TrainConfig,
) -> tuple[Float[Array, ""], Metrics]:
    """Unrolls the head and scores its outputs at all labels; `chunked_loss` knows how."""
    compute = jnp.dtype(train.dtype)
    params = _cast(params, compute)
    read = given.read.astype(compute)
    outs = unroll(params, batch, read, cfg, train.ttt_steps, train.detach)
    flags = labels(batch, train.mask)
    if train.normaliser == "mask":
        scale = 1.0 / jnp.maximum(flags.sum(), 1).astype(jnp.float32)
    else:
        scale = jnp.asarray(1.0 / flags.size, jnp.float32)
    decay = train.ttt_decay ** jnp.arange(train.ttt_steps, dtype=jnp.float32)
    scoring = {name: params[name] for name in ("norm", "head") if name in params}

    def score(own: tuple[Any, ...], shared: tuple[Any, ...]) -> Sums:
        outs, top, likeliest, flags, positions = own
        scoring, target_head, ids, weights = shared
        return chunked_loss(
            draft.trainable(scoring, cfg),
            outs.reshape(*outs.shape[:2], -1),
            scoring,
            target_head,
            ids,
            top.reshape(top.shape[0], -1),
            None if likeliest is None else likeliest.reshape(-1),
            flags.reshape(-1),
            positions.reshape(-1),
            weights,
            cfg,
            train,
        )

    own = jnp.stack(outs), given.top, given.likeliest, flags, batch.positions
    head = target_params.get("head", target_params["embed"])
    shared = scoring, head, params.get("draft_to_target"), decay * scale
    sums = sharding.by_rows(score, own, (2, 1, 0, 0, 0), shared)
    return sums.loss, Metrics(
        loss=sums.loss,
        step_loss=sums.cross_entropy * scale,
        regression=sums.regression * scale,
        accuracy=sums.n_right / jnp.maximum(sums.n_labels, 1.0),
        n_labels=flags.sum().astype(jnp.int32),
    )


def _cast(params: Params, dtype: jnp.dtype) -> Params:
    def cast(leaf: Array) -> Array:
        floating = jnp.issubdtype(leaf.dtype, jnp.floating)
        return leaf.astype(dtype) if floating else leaf

    return jax.tree.map(cast, params)


class Sums(NamedTuple):
    """Totals over all labels, per unrolled step but for `loss`.

    Only `loss` has a gradient.
    """

    loss: Float[Array, ""]
    cross_entropy: Float[Array, " I"]
    regression: Float[Array, " I"]
    n_right: Float[Array, " I"]
    n_labels: Float[Array, " I"]


CHUNK = 256  # labels whose full-vocabulary logits are held at once
TOP_K = 10  # tokens of the extra loss of HASS


@functools.partial(jax.custom_vjp, nondiff_argnums=(10, 11))
def chunked_loss(
    trained: Params,
    outs: Float[Array, "I D X"],
    scoring: Params,
    target_head: Matrix,
    draft_to_target: Int[Array, " U"] | None,
    top: Float[Array, "D2 X"],
    likeliest: Int[Array, " X"] | None,
    flags: Bool[Array, " X"],
    positions: Int[Array, " X"],
    weights: Float[Array, " I"],
    cfg: DraftConfig,
    train: TrainConfig,
) -> Sums:
    """Sums the loss over labels, a chunk of them at a time.

    Only the chunk's logits ever exist, [CHUNK, V] of the teacher and [I, CHUNK, U] of
    the draft, and unsupervised places cost nothing: the loop runs over labels. The
    gradient is made in the same pass, so nothing is computed twice.

    Args:
      trained: those of `scoring` that get a gradient; EAGLE-1 trains none.
      outs: draft outputs of every unrolled step, all places of the batch in one axis.
      scoring: norm and LM head of the draft.
      likeliest: `Features.likeliest`.
      weights: weight of each step in `loss`.
    """
    sums, _ = _chunked_fwd(
        trained,
        outs,
        scoring,
        target_head,
        draft_to_target,
        top,
        likeliest,
        flags,
        positions,
        weights,
        cfg,
        train,
    )
    return sums


def _chunked_fwd(
    trained: Params,
    outs: Float[Array, "I D X"],
    scoring: Params,
    target_head: Matrix,
    draft_to_target: Int[Array, " U"] | None,
    top: Float[Array, "D2 X"],
    likeliest: Int[Array, " X"] | None,
    flags: Bool[Array, " X"],
    positions: Int[Array, " X"],
    weights: Float[Array, " I"],
    cfg: DraftConfig,
    train: TrainConfig,
) -> tuple[Sums, tuple[Params, Array]]:
    n_steps, _, n_places = outs.shape
    vocab = jax.tree.leaves(target_head)[0].shape[0]
    size = min(CHUNK, n_places)
    (where,) = jnp.nonzero(flags, size=n_places + size, fill_value=0)
    where = where.astype(jnp.int32)
    n_labels = flags.sum().astype(jnp.int32)
    inside = jnp.ones(vocab, bool)
    if draft_to_target is not None:
        inside = jnp.zeros(vocab, bool).at[draft_to_target].set(True)
    back = jnp.arange(n_steps, dtype=jnp.int32) + int(cfg.head != "small")

    short = False
    if likeliest is not None and draft_to_target is not None:
        short, target_head = True, look_up(target_head, draft_to_target)

    def chunk_loss(
        trained: Params, out: Array, feature: Array, first: Array, reaches: Array
    ) -> tuple[Array, Sums]:
        teacher = linear(target_head, feature).astype(jnp.float32)[:, 0]
        known = inside[first if short else jnp.argmax(teacher, axis=0)]
        if draft_to_target is not None and not short:
            teacher = teacher[draft_to_target]
        p = jax.nn.softmax(teacher, axis=0)
        scores = draft.logits(scoring | trained, out, cfg)
        log_q = jax.nn.log_softmax(scores, axis=0)
        weight = (reaches & known[None]).astype(jnp.float32)
        reached = reaches.astype(jnp.float32)
        cross_entropy = -jnp.sum(weight * jnp.einsum("UT,UIT->IT", p, log_q), axis=1)
        regression = jnp.zeros_like(cross_entropy)
        top_k = jnp.zeros_like(cross_entropy)
        if train.top_k_weight:
            top_p, top_id = jax.lax.top_k(p.T, TOP_K)
            top_q = log_q[
                top_id.T[:, None], jnp.arange(n_steps)[None, :, None], jnp.arange(size)
            ]
            top_k = -jnp.sum(weight * jnp.sum(top_p.T[:, None] * top_q, 0), axis=1)
        step_loss = cross_entropy
        if cfg.head == "eagle1":
            distance = optax.huber_loss(
                out.astype(jnp.float32), feature.astype(jnp.float32)
            )
            regression = jnp.sum(reached * distance.mean(axis=0), axis=1)
            step_loss = (
                train.regression_weight * regression
                + train.classification_weight * cross_entropy
            )
        step_loss = step_loss + train.top_k_weight * top_k
        right = jnp.argmax(scores, axis=0) == jnp.argmax(p, axis=0)[None]
        loss = jnp.sum(weights * step_loss)
        return loss, Sums(
            loss=loss,
            cross_entropy=cross_entropy,
            regression=regression,
            n_right=jnp.sum(right.astype(jnp.float32) * weight, axis=1),
            n_labels=reached.sum(axis=1),
        )

    def body(
        at: tuple[Array, Sums, Params, Array],
    ) -> tuple[Array, Sums, Params, Array]:
        i, sums, trained_grads, out_grads = at
        places = jax.lax.dynamic_slice(where, (i * size,), (size,))
        real = i * size + jnp.arange(size) < n_labels
        # Slot p - 1 - i speaks about label p in step i, if its conversation goes back
        # that far.
        slots = places[None] - back[:, None]
        reaches = (positions[places][None] >= back[:, None]) & real[None]
        slots = jnp.where(reaches, slots, 0)
        step = jnp.arange(n_steps)[:, None]
        out = outs[step, :, slots].transpose(2, 0, 1)
        first = places if likeliest is None else likeliest[places]
        (trained_grad, out_grad), more = jax.grad(
            chunk_loss, argnums=(0, 1), has_aux=True
        )(trained, out, top[:, None, places], first, reaches)
        sums = jax.tree.map(jnp.add, sums, more)
        trained_grads = jax.tree.map(jnp.add, trained_grads, trained_grad)
        out_grads = out_grads.at[step, :, slots].add(out_grad.transpose(1, 2, 0))
        return i + 1, sums, trained_grads, out_grads

    zeros = jnp.zeros(n_steps, jnp.float32)
    start = (
        jnp.zeros((), jnp.int32),
        Sums(jnp.zeros((), jnp.float32), zeros, zeros, zeros, zeros),
        jax.tree.map(jnp.zeros_like, trained),
        jnp.zeros_like(outs),
    )
    _, sums, trained_grads, out_grads = jax.lax.while_loop(
        lambda at: at[0] * size < n_labels, body, start
    )
    return sums, (trained_grads, out_grads)


def _chunked_bwd(
    cfg: DraftConfig, train: TrainConfig, grads: tuple[Params, Array], cotangent: Sums
) -> tuple[Any, ...]:
    def scale(g: Array) -> Array:
        return (g.astype(jnp.float32) * cotangent.loss).astype(g.dtype)

    return *jax.tree.map(scale, grads), *[None] * 8


chunked_loss.defvjp(_chunked_fwd, _chunked_bwd)


MUON_RMS = 0.2


def optimiser(cfg: TrainConfig, n_steps: int) -> optax.GradientTransformation:
    """AdamW or Muon after clipping by global norm, with warm-up and cosine decay.

    Muon makes the momentum of every matrix orthogonal, so that all its directions learn
    (arXiv:2502.16982); its steps have a root mean square of `MUON_RMS` times the learning
    rate, and vectors and LM heads, which get AdamW in either case, that rate.
    """
    warmup = max(1, round(cfg.warmup * n_steps))
    schedule = optax.warmup_cosine_decay_schedule(
        init_value=cfg.learning_rate / warmup,
        peak_value=cfg.learning_rate,
        warmup_steps=warmup,
        decay_steps=max(n_steps, warmup + 1),
        end_value=cfg.final_learning_rate,
    )
    if cfg.optimiser == "muon":
        matrices: Any = _matrices
        rule = optax.contrib.muon(
            schedule,
            weight_decay=cfg.weight_decay,
            adam_b1=cfg.beta1,
            adam_b2=cfg.beta2,
            adam_weight_decay=cfg.weight_decay,
            adam_learning_rate=lambda count: MUON_RMS * schedule(count),
            muon_weight_dimension_numbers=matrices,
            consistent_rms=MUON_RMS,
        )
    else:
        rule = optax.adamw(
            schedule, b1=cfg.beta1, b2=cfg.beta2, weight_decay=cfg.weight_decay
        )
    update = optax.chain(optax.clip_by_global_norm(cfg.clip_norm), rule)
    if cfg.accumulate > 1:
        return optax.MultiSteps(update, cfg.accumulate).gradient_transformation()
    return update


def _matrices(params: Params) -> Params:
    """Says which axes of which leaves are a matrix's inputs and outputs, for Muon."""

    def axes(
        path: tuple[Any, ...], leaf: Array
    ) -> optax.contrib.MuonDimensionNumbers | None:
        name, last = path[-1].key, leaf.ndim - 1
        if leaf.ndim < 2 or name in ("head", "embed") or name.endswith("norm"):
            return None
        if name == "wqkv":
            return optax.contrib.MuonDimensionNumbers((last,), tuple(range(last)))
        return optax.contrib.MuonDimensionNumbers((last,), (last - 1,))

    return jax.tree_util.tree_map_with_path(axes, params)


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
        if target_cfg.d_model == cfg.d_model:
            rows = look_up(head, draft_to_target).astype(cfg.dtype)
            params["head"] = jnp.broadcast_to(rows, params["head"].shape)
    if cfg.head == "small":  # the target's first layers
        first = target_params["layers"][: cfg.n_layers]
        own = {"layers": first, "norm": target_params["norm"]}
        params |= jax.tree.map(
            lambda leaf: dense(leaf).astype(cfg.dtype),
            own,
            is_leaf=lambda leaf: isinstance(leaf, Int8),
        )
    zero = jnp.zeros((), jnp.int32)
    state = TrainState(params, update.init(params), zero, zero)
    return jax.tree.map(jnp.copy, state)  # donated leaves must not share a buffer


def train_step(
    key: Array,
    state: TrainState,
    fixed: Params,
    target_params: Params,
    batch: Batch,
    given: Features,
    cfg: DraftConfig,
    train: TrainConfig,
    update: optax.GradientTransformation,
    fsdp: bool = False,
) -> tuple[TrainState, Metrics]:
    """Takes one step. Donate `state`.

    Args:
      key: of the whole run; every step makes its own, so a resumed run draws the same.
      fixed: what the head shares and never trains (embedding, draft vocabulary).
      fsdp: how `state` was placed (`sharding.place`), and stays.
    """
    key = jax.random.fold_in(key, state.step)

    def loss(params: Params) -> tuple[Array, Metrics]:
        # With fsdp all devices gather the head once; else the compiler may prefer to move
        # activations about for every product.
        params = sharding.constrain(params, state) | fixed
        return head_loss(key, params, target_params, batch, given, cfg, train)

    (_, metrics), grads = jax.value_and_grad(loss, has_aux=True)(state.params)
    updates, opt_state = update.update(grads, state.opt_state, state.params)
    params: Any = optax.apply_updates(state.params, updates)
    new = TrainState(
        params=params,
        opt_state=opt_state,
        step=state.step + 1,
        n_tokens=state.n_tokens + metrics.n_labels,
    )
    return sharding.constrain(new, state, fsdp), metrics


def predicted_tau(accuracy: Float[Array, " I"]) -> Float[Array, ""]:
    """Expected tokens per step of a chain as deep as the unrolled steps."""
    return 1 + jnp.sum(jnp.cumprod(accuracy))

"""`train`: what is a label, which slot speaks about it, and that decoding agrees."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny

from eagle_jax import cache as cache_lib
from eagle_jax import decode, draft, heads, target, train
from eagle_jax.config import DecodeConfig, DraftConfig, TrainConfig
from eagle_jax.layers import Segment
from eagle_jax.train import Batch
from eagle_jax.tree import chain

TARGET = tiny.target_config(n_layers=2)
CFG = tiny.draft_config(TARGET)
SMALL = dataclasses.replace(CFG, vocab_size=50)
TRAIN = TrainConfig(ttt_steps=2)

ROWS, WIDTH = 2, 24  # of every batch, so that programs are compiled once


def params_of(cfg: DraftConfig) -> Any:
    """Random parameters from NumPy: programs that draw them take long to compile."""
    rng = np.random.default_rng(0)

    def draw(leaf: jax.ShapeDtypeStruct) -> jax.Array:
        noise = rng.normal(size=leaf.shape)
        return jnp.asarray(
            0.15 * noise if leaf.ndim > 1 else 1 + 0.1 * noise, leaf.dtype
        )

    shapes = jax.eval_shape(lambda: tiny.params(0, TARGET, cfg))
    ids = shapes["draft"].pop("draft_to_target", None)
    own = {k: v for k, v in shapes["draft"].items() if k != "embed"}
    params = jax.tree.map(draw, {"target": shapes["target"], "draft": own})
    if ids is not None:
        params["draft"]["draft_to_target"] = jnp.arange(1, 101, 2, dtype=ids.dtype)
    params["draft"]["embed"] = params["target"]["embed"]
    return params


PARAMS = params_of(SMALL)

Sample = tuple[int, tuple[int, int]]  # tokens, first and last supervised one
A: Sample = (12, (5, 9))
B: Sample = (6, (1, 2))
C: Sample = (9, (4, 8))

CHUNK = 7  # so that every batch has a chunk that is not full


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    """Set before anything is traced: `chunked_loss` reads it then."""
    monkeypatch.setattr(train, "CHUNK", CHUNK)


jit_features = jax.jit(train.target_features, static_argnames=("cfg", "head"))
jit_unroll = jax.jit(train.unroll, static_argnames=("cfg", "steps"))


def batch_of(*rows: list[Sample], seed: int = 0) -> Batch:
    """Packs samples; the tokens of a sample depend on its kind, not on its place."""
    shape = (ROWS, WIDTH)
    tokens, segments, positions = (np.zeros(shape, np.int32) for _ in range(3))
    mask = np.zeros(shape, bool)
    for row, samples in enumerate(rows):
        at = 0
        for number, (n, (first, last)) in enumerate(samples, 1):
            rng = np.random.default_rng((seed, n))
            tokens[row, at : at + n] = rng.integers(1, TARGET.vocab_size, n)
            segments[row, at : at + n] = number
            positions[row, at : at + n] = np.arange(n)
            mask[row, at + first : at + last + 1] = True
            at += n
    return Batch(*map(jnp.asarray, (tokens, segments, positions, mask)))


def features_of(batch: Batch) -> train.Features:
    return jit_features(PARAMS["target"], batch, TARGET, CFG)


def value_and_grad(
    own: Any,
    batch: Batch,
    given: train.Features,
    cfg: DraftConfig,
    settings: TrainConfig,
) -> Any:
    def loss(own: Any) -> tuple[jax.Array, train.Metrics]:
        params = own | shared(cfg)
        return train.token_loss(params, PARAMS["target"], batch, given, cfg, settings)

    return jax.value_and_grad(loss, has_aux=True)(own)


jit_value_and_grad = jax.jit(value_and_grad, static_argnames=("cfg", "settings"))


def loss_and_grads(batch: Batch) -> tuple[tuple[jax.Array, train.Metrics], Any]:
    """Loss of the library, with the gradient of all that a head trains."""
    return jit_value_and_grad(own_of(SMALL), batch, features_of(batch), SMALL, TRAIN)


def shared(cfg: DraftConfig) -> Any:
    names = ("embed", "draft_to_target") if cfg == SMALL else ("embed",)
    return {name: PARAMS["draft"][name] for name in names}


def own_of(cfg: DraftConfig) -> Any:
    params = PARAMS["draft"] if cfg == SMALL else params_of(cfg)["draft"]
    return draft.trainable(params, cfg)


def assert_close(ours: Any, theirs: Any, tolerance: float = 1e-5) -> None:
    """Compares leaf by leaf, relative to the largest number of each leaf."""
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    for path, leaf in jax.tree.leaves_with_path(ours):
        other = theirs
        for key in path:
            other = other[key.key]
        scale = float(jnp.max(jnp.abs(other)))
        np.testing.assert_allclose(
            leaf, other, rtol=0, atol=tolerance * scale, err_msg=str(path)
        )


# What is a label, and which slots speak about it.


def places(flags: jax.Array) -> list[int]:
    return np.flatnonzero(np.asarray(flags)[0]).tolist()


def test_labels_stand_before_the_tokens_of_an_answer():
    batch = batch_of([A, B])
    assert places(train.labels(batch, "label")) == [4, 5, 6, 7, 8, 12, 13]


def test_labels_of_the_official_rule_stand_after_them():
    batch = batch_of([A, B])
    assert places(train.labels(batch, "official")) == [6, 7, 8, 9, 10, 14, 15]


def test_a_conversation_that_ends_in_its_answer_has_no_label_in_the_next():
    batch = batch_of([(6, (4, 5)), (6, (0, 5))])
    # Token 0 of the second would be predicted across the border: place 5 is no label.
    assert places(train.labels(batch, "label")) == [3, 4, 6, 7, 8, 9, 10]


def test_gradients_reach_exactly_the_slots_whose_label_lies_in_the_answer(monkeypatch):
    batch = batch_of([A, B])  # 12 and 6 tokens, then 6 of padding (R401)
    given = features_of(batch)
    params = own_of(CFG) | shared(CFG)
    outs = jax.random.normal(jax.random.key(1), (3, CFG.d_model, ROWS, WIDTH))

    def loss(outs: jax.Array) -> jax.Array:
        monkeypatch.setattr(train, "unroll", lambda *_: list(outs))
        settings = TrainConfig(ttt_steps=3)
        return train.token_loss(params, PARAMS["target"], batch, given, CFG, settings)[
            0
        ]

    touched = jnp.any(jax.jit(jax.grad(loss))(outs) != 0, axis=1)
    found = [places(step) for step in touched]
    assert not jnp.any(touched[:, 1])
    # Slot t of step i reads token t + 1 + i and predicts token t + 2 + i: tokens 5 to 9
    # of A. Of B, token 2 can be predicted from slot 0 in the first step alone.
    assert found == [[3, 4, 5, 6, 7, 12], [2, 3, 4, 5, 6], [1, 2, 3, 4, 5]]
    print("slots with a gradient:", [len(step) for step in found])


def test_packing_changes_neither_loss_nor_gradient():
    apart = loss_and_grads(batch_of([A], [C]))
    for rows in ([[A, C], []], [[C, A], []], [[], [C, A]]):
        packed = loss_and_grads(batch_of(*rows))
        (loss, info), (other, other_info) = packed[0], apart[0]
        assert int(info.n_labels) == int(other_info.n_labels) == 10
        np.testing.assert_allclose(loss, other, rtol=1e-5)
        np.testing.assert_allclose(info.step_loss, other_info.step_loss, rtol=1e-5)
        np.testing.assert_array_equal(info.accuracy, other_info.accuracy)
        assert_close(packed[1], apart[1])


def test_the_loss_of_two_conversations_is_the_sum_of_their_labels():
    both = loss_and_grads(batch_of([A], [C]))[0][1]
    parts = [loss_and_grads(batch_of([one]))[0][1] for one in (A, C)]
    total = sum(part.step_loss * part.n_labels.astype(jnp.float32) for part in parts)
    np.testing.assert_allclose(
        both.step_loss * both.n_labels.astype(jnp.float32), total, rtol=1e-5
    )


# The pairs that training makes are those of decoding.


def test_unrolled_steps_read_the_tokens_of_the_data(monkeypatch):
    batch = batch_of([A])
    seen = []
    begin = draft.begin

    def watched(params: Any, tokens: jax.Array, *rest: Any) -> draft.Block:
        seen.append(tokens)
        return begin(params, tokens, *rest)

    monkeypatch.setattr(draft, "begin", watched)
    always_zero = PARAMS["draft"] | {"head": jnp.zeros_like(PARAMS["draft"]["head"])}
    read = features_of(batch).read

    @jax.jit
    def inputs() -> list[jax.Array]:
        train.unroll(always_zero, batch, read, SMALL, 3)
        return seen

    tokens = np.asarray(batch.tokens)[0].tolist()
    found = [np.asarray(step)[0].tolist() for step in inputs()]
    assert found == [tokens[i:] + [0] * i for i in (1, 2, 3)]  # R410


def changes(outs: list[jax.Array], others: list[jax.Array]) -> np.ndarray:
    """[step, slot] of row 0: which outputs differ."""
    return np.array(
        [
            np.any(np.asarray(a != b)[:, 0], axis=0)
            for a, b in zip(outs, others, strict=True)
        ]
    )


def test_a_slot_depends_on_true_features_up_to_its_own():
    batch = batch_of([A, C])
    read = features_of(batch).read
    outs = jit_unroll(PARAMS["draft"], batch, read, SMALL, 3)
    for s in (0, 3, 11, 12, 15):
        other = read.at[:, 0, s].add(1.0)
        changed = changes(outs, jit_unroll(PARAMS["draft"], batch, other, SMALL, 3))
        end = 12 if s < 12 else 21  # of the conversation that slot s belongs to
        expected = [s <= t < end for t in range(21)]
        assert changed[:, :21].tolist() == [expected] * 3, s


def test_a_slot_depends_on_the_tokens_it_has_read():
    batch = batch_of([(21, (5, 9))])
    read = features_of(batch).read
    outs = jit_unroll(PARAMS["draft"], batch, read, SMALL, 3)
    for s in (0, 1, 4, 9):
        other = batch._replace(tokens=batch.tokens.at[0, s].add(-1))
        changed = changes(outs, jit_unroll(PARAMS["draft"], other, read, SMALL, 3))
        for i in range(3):
            # It reads token t + 1 + i; token 0 comes in through the features only.
            expected = [1 <= s <= t + 1 + i for t in range(18)]
            assert changed[i, :18].tolist() == expected, (s, i)


@pytest.mark.parametrize(
    "cfg",
    [
        SMALL,
        dataclasses.replace(SMALL, norm_output=True, norm_before_residual=True),
        tiny.draft_config(TARGET, "eagle1"),
    ],
    ids=["eagle3", "eagle3.1", "eagle1"],
)
def test_unrolled_outputs_are_those_of_decoding(cfg):
    """R305, R314: the same features, tokens, positions and visible keys."""
    batch = batch_of([(20, (5, 9))], [(19, (5, 9))])
    params = params_of(cfg)["draft"]
    read = jit_features(PARAMS["target"], batch, TARGET, cfg).read
    outs = jit_unroll(params, batch, read, cfg, 3)
    extend = jax.jit(draft.extend, static_argnames="cfg")

    @jax.jit
    def chain(state: draft.DraftState, tokens: jax.Array) -> list[jax.Array]:
        """The head on its own outputs, as a chain is drafted."""
        cache, hidden, found, own = state.cache, state.hidden, [], []
        for i in range(2):
            fed = draft.feed_back(params, hidden[:, :, None], cfg)
            block = draft.begin(
                params, tokens[:, i : i + 1], fed, (cache.length + i)[:, None], cfg
            )
            own.append(Segment(*block.kv, jnp.ones((ROWS, 1, 1), bool)))
            past = cache_lib.committed(cache, 1)
            committed = Segment(cache.k[0], cache.v[0], past)
            hidden = draft.finish(params, block, (committed, *own), cfg)[..., 0]
            found.append(hidden)
        return found

    state = draft.empty(cfg, ROWS, 32)
    for start in (0, 5, 10):
        pairs = batch.tokens[:, start + 1 : start + 6], read[:, :, start : start + 5]
        state = extend(params, state, *pairs, jnp.array([5, 5], jnp.int32), cfg)
        slot = start + 4
        np.testing.assert_allclose(state.hidden, outs[0][:, :, slot], atol=1e-5)
        drafted = chain(state, batch.tokens[:, slot + 2 : slot + 4])
        for i, hidden in enumerate(drafted, 1):
            np.testing.assert_allclose(hidden, outs[i][:, :, slot], atol=1e-5)


def test_the_teacher_is_the_target_as_it_decodes():
    """R304, R411: packed or alone, after the final norm, through the target's head."""
    packed = batch_of([A, C])
    teacher = target.logits(PARAMS["target"], features_of(packed).top)
    for sample, at in ((A, 0), (C, 12)):
        n = sample[0]
        causal = jnp.tril(jnp.ones((1, n, n), bool))
        nothing = cache_lib.init(
            0, 1, TARGET.n_kv_heads, TARGET.head_dim, 0, TARGET.dtype
        )
        out = jax.jit(target.forward, static_argnames="cfg")(
            PARAMS["target"],
            packed.tokens[:1, at : at + n],
            jnp.arange(n)[None],
            causal,
            nothing,
            TARGET,
        )
        alone = target.logits(PARAMS["target"], out.top)
        np.testing.assert_allclose(teacher[:, :1, at : at + n], alone, atol=1e-4)


# The loss in chunks against the loss in one piece.


@jax.jit(static_argnames=("cfg", "settings"))
def plain_loss(
    own: Any,
    batch: Batch,
    given: train.Features,
    cfg: DraftConfig,
    settings: TrainConfig,
) -> Any:
    """The definition, with whole logits: [V, B, T] of the teacher, [U, B, T] a step."""
    flags = train.labels(batch, settings.mask)
    scores = target.logits(PARAMS["target"], given.top)
    ids = jnp.arange(TARGET.vocab_size)
    if cfg == SMALL:
        ids = PARAMS["draft"]["draft_to_target"]
    known = jnp.isin(jnp.argmax(scores, axis=0), ids)
    p = jax.nn.softmax(scores[ids], axis=0)
    n = float(flags.size)
    if settings.normaliser == "mask":
        n = flags.sum().astype(jnp.float32)

    def loss(own: Any) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        params = own | shared(cfg)
        outs = train.unroll(params, batch, given.read, cfg, settings.ttt_steps)
        losses, accuracies = [], []
        for i, out in enumerate(outs):
            log_q = jax.nn.log_softmax(draft.logits(params, out, cfg), axis=0)
            # Slot t speaks about label t + 1 + i: move it there.
            log_q = jnp.roll(log_q, i + 1, axis=2)
            reached = flags & (batch.positions >= i + 1)
            used = reached & known
            crossed = -jnp.sum(p * log_q, axis=0)
            right = jnp.argmax(log_q, axis=0) == jnp.argmax(p, axis=0)
            losses.append(jnp.sum(jnp.where(used, crossed, 0.0)) / n)
            share = jnp.sum(used & right) / jnp.maximum(reached.sum(), 1)
            accuracies.append(share.astype(jnp.float32))
        steps = jnp.stack(losses)
        decay = settings.ttt_decay ** jnp.arange(settings.ttt_steps, dtype=jnp.float32)
        return jnp.sum(decay * steps), (steps, jnp.stack(accuracies))

    return jax.value_and_grad(loss, has_aux=True)(own)


@pytest.mark.parametrize(
    ("cfg", "settings", "chunk"),
    [
        (SMALL, TRAIN, CHUNK),
        (
            CFG,
            TrainConfig(ttt_steps=1, mask="official", normaliser="slots"),
            256,  # all in one, and more than there are places
        ),
    ],
    ids=["reduced vocabulary", "full vocabulary, official mask"],
)
def test_chunks_add_up_to_the_whole(cfg, settings, chunk, monkeypatch):
    batch = batch_of([A, C], [C, B, C])
    given = features_of(batch)
    monkeypatch.setattr(train, "CHUNK", chunk)
    (loss, info), grads = jit_value_and_grad(own_of(cfg), batch, given, cfg, settings)
    (whole, (steps, accuracy)), whole_grads = plain_loss(
        own_of(cfg), batch, given, cfg, settings
    )
    assert int(info.n_labels) % CHUNK and int(info.n_labels) > 2 * CHUNK
    np.testing.assert_allclose(loss, whole, rtol=1e-5)
    np.testing.assert_allclose(info.step_loss, steps, rtol=1e-5)
    np.testing.assert_allclose(info.accuracy, accuracy, rtol=1e-6)
    assert_close(grads, whole_grads)
    assert all(float(jnp.abs(g).max()) > 0 for g in jax.tree.leaves(grads))


def test_a_known_next_token_saves_the_whole_vocabulary_and_changes_nothing():
    batch = batch_of([A, C], [C, B, C])
    given = features_of(batch)
    scores = target.logits(PARAMS["target"], given.top)
    likeliest = jnp.argmax(scores, axis=0)
    known = given._replace(likeliest=likeliest)
    inside = jnp.isin(likeliest, PARAMS["draft"]["draft_to_target"])
    flags = train.labels(batch, TRAIN.mask)
    assert 0 < int((inside & flags).sum()) < int(flags.sum())  # both kinds of labels
    (loss, info), grads = loss_and_grads(batch)
    (same, same_info), same_grads = jit_value_and_grad(
        own_of(SMALL), batch, known, SMALL, TRAIN
    )
    np.testing.assert_allclose(same, loss, rtol=1e-6)
    np.testing.assert_array_equal(same_info.accuracy, info.accuracy)
    assert_close(same_grads, grads)


def test_logits_of_a_whole_batch_never_exist(monkeypatch):
    """R415: compiled for 1024 tokens and 131,072 ids, never run."""
    monkeypatch.setattr(train, "CHUNK", 256)
    n, V = 1024, 131_072
    t = tiny.target_config(vocab_size=V, d_model=64, n_layers=1, tied=True)
    d = tiny.draft_config(t, vocab_size=32_768)
    Shape = jax.ShapeDtypeStruct
    own = jax.eval_shape(lambda: draft.init(jax.random.key(0), d, t))
    shared = {"embed": Shape((V, 64), jnp.float32)}
    fixed = shared | {"draft_to_target": Shape((d.vocab_size,), jnp.int32)}
    ints = [Shape((1, n), jnp.int32)] * 3
    tokens, segments, positions = ints
    mask = Shape((1, n), jnp.bool)
    batch: Any = Batch(tokens, segments, positions, mask)  # type: ignore[arg-type]
    read, top = (Shape((E, 1, n), jnp.float32) for E in (d.feature_size, 64))

    def loss(own: Any, fixed: Any, target_params: Any, batch: Batch, *given: Any):
        one_step = TrainConfig(ttt_steps=1)
        features = train.Features(*given)
        return train.token_loss(
            own | fixed, target_params, batch, features, d, one_step
        )

    grad = jax.jit(jax.value_and_grad(loss, has_aux=True))
    program = grad.lower(own, fixed, shared, batch, read, top).compile()
    analysis: Any = program.memory_analysis()
    needed = analysis.temp_size_in_bytes
    assert needed < n * V * 4 / 2  # half of the teacher's logits alone


@jax.numpy_dtype_promotion("standard")  # optax mixes kinds of numbers
def test_memory_of_a_step_is_as_the_guide_says(monkeypatch):
    """The formula of docs/guide.md, for the default target and head; never run."""
    monkeypatch.setattr(train, "CHUNK", 256)
    t = tiny.target_config(vocab_size=49_152, d_model=576, n_layers=1, tied=True)
    heads: Any = {"n_heads": 9, "n_kv_heads": 3, "head_dim": 64}
    d = tiny.draft_config(t, vocab_size=8192, d_model=576, d_mlp=1536, **heads)
    settings, T = TrainConfig(ttt_steps=2), 512
    update = train.optimiser(settings, 9)

    def prepared() -> Any:
        own = draft.init(jax.random.key(0), d, t)
        zero = jnp.zeros((), jnp.int32)
        embed = jnp.zeros((t.vocab_size, 576))
        ids = jnp.zeros(d.vocab_size, jnp.int32)
        tokens = jnp.zeros((1, T), jnp.int32)
        batch = Batch(tokens, tokens, tokens, tokens > 0)
        given = train.Features(
            jnp.zeros((d.feature_size, 1, T)), jnp.zeros((576, 1, T)), tokens
        )
        state = train.TrainState(own, update.init(own), zero, zero)
        return state, {"embed": embed, "draft_to_target": ids}, batch, given

    state, fixed, batch, given = jax.eval_shape(prepared)
    step = jax.jit(
        train.train_step,
        static_argnames=("cfg", "train", "update"),
        donate_argnames="state",
    )
    key = jax.eval_shape(lambda: jax.random.key(0))
    teacher = {"embed": fixed["embed"]}
    program = step.lower(
        key, state, fixed, teacher, batch, given, d, settings, update
    ).compile()
    analysis: Any = program.memory_analysis()
    parts = 2.33 * 2 * 9 * T * T + (8 + 24 * 2) * 576 * T
    parts += 3 * 2 * 256 * 8192 + 3 * 8192 * 576
    np.testing.assert_allclose(analysis.temp_size_in_bytes, 4 * parts, rtol=0.1)
    # State is updated in place, so it is there once.
    n_params = sum(leaf.size for leaf in jax.tree.leaves(state.params))
    np.testing.assert_allclose(analysis.alias_size_in_bytes, 12 * n_params, rtol=0.01)


def test_a_batch_without_labels_has_no_loss_and_no_gradient():
    empty = batch_of([A], [C])
    empty = empty._replace(mask=jnp.zeros_like(empty.mask))  # R408
    (loss, info), grads = loss_and_grads(empty)
    assert float(loss) == 0 and int(info.n_labels) == 0
    assert np.all(np.isfinite(info.accuracy)) and np.all(np.isfinite(info.step_loss))
    assert all(not jnp.any(g) for g in jax.tree.leaves(grads))


def test_a_row_without_labels_does_not_disturb_the_others():
    good = loss_and_grads(batch_of([A]))
    unasked = batch_of([A], [C])
    unasked = unasked._replace(mask=unasked.mask.at[1].set(False))
    other = loss_and_grads(unasked)
    np.testing.assert_allclose(good[0][0], other[0][0], rtol=1e-6)
    assert_close(good[1], other[1])


def test_bfloat16_arithmetic_is_near_float32_and_keeps_float32_gradients():
    batch = batch_of([A], [C])
    half = dataclasses.replace(TRAIN, dtype="bfloat16")
    (loss, _), grads = jit_value_and_grad(
        own_of(SMALL), batch, features_of(batch), SMALL, half
    )
    (whole, _), whole_grads = loss_and_grads(batch)
    # bfloat16 keeps 8 bits: 0.4 % per product, and there are a few in a row.
    np.testing.assert_allclose(loss, whole, rtol=0.02)
    assert all(g.dtype == jnp.float32 for g in jax.tree.leaves(grads))
    norm = optax.tree.norm(jax.tree.map(jnp.subtract, grads, whole_grads))
    assert float(norm) < 0.1 * float(optax.tree.norm(whole_grads))
    assert float(norm) > 0


# Optimiser and state. optax relies on the usual promotion of dtypes.


@pytest.fixture
def usual_promotion():
    with jax.numpy_dtype_promotion("standard"):
        yield


def rates(cfg: TrainConfig, n_steps: int, calls: int) -> list[float]:
    """Steps of a lone weight with constant gradient: Adam moves it by the rate."""
    update = train.optimiser(cfg, n_steps)
    params = {"w": jnp.zeros(())}
    state = update.init(params)
    moves = []
    for _ in range(calls):
        step, state = update.update({"w": jnp.ones(())}, state, params)
        moves.append(-float(jax.tree.leaves(step)[0]))
    return moves


@pytest.mark.usefixtures("usual_promotion")
def test_the_learning_rate_rises_then_falls_along_a_cosine():
    cfg = TrainConfig(learning_rate=0.8, final_learning_rate=0.0, warmup=0.2)
    down = [0.4 * (1 + np.cos(np.pi * k / 8)) for k in range(8)]
    expected = [0.4, 0.6, *down]
    np.testing.assert_allclose(rates(cfg, 10, 10), expected, rtol=1e-3)


@pytest.mark.usefixtures("usual_promotion")
def test_the_learning_rate_ends_at_its_final_value():
    cfg = TrainConfig(learning_rate=0.8, final_learning_rate=0.2, warmup=0.0)
    found = rates(cfg, 4, 6)
    np.testing.assert_allclose(found[0], 0.8, rtol=1e-3)
    np.testing.assert_allclose(found[4:], 0.2, rtol=1e-3)


@pytest.mark.usefixtures("usual_promotion")
def test_accumulation_moves_once_per_so_many_batches():
    cfg = TrainConfig(learning_rate=0.8, warmup=0.0, accumulate=3)
    found = rates(cfg, 2, 6)
    assert [move > 0 for move in found] == [False, False, True] * 2


@pytest.mark.usefixtures("usual_promotion")
def test_muon_makes_the_steps_of_matrices_orthogonal_and_all_equally_long():
    cfg = TrainConfig(optimiser="muon", learning_rate=0.5, warmup=0.0, clip_norm=1e9)
    update = train.optimiser(cfg, 10)
    own = {name: leaf for name, leaf in own_of(SMALL).items() if name != "head"}
    rng = np.random.default_rng(0)

    def draw(leaf: jax.Array) -> jax.Array:
        return jnp.asarray(rng.normal(size=leaf.shape), jnp.float32)

    grads = jax.tree.map(draw, own | {"head": PARAMS["draft"]["head"]})
    params = own | {"head": PARAMS["draft"]["head"]}
    steps: Any = update.update(grads, update.init(params), params)[0]
    layer = steps["layer"]
    matrices = [
        steps["fuse"],
        layer["wqkv"].reshape(-1, layer["wqkv"].shape[-1]),
        layer["wo"].reshape(layer["wo"].shape[0], -1),
        *layer["w_gate_up"],
        layer["w_down"],
    ]
    for step in matrices:
        sizes = np.linalg.svd(step, compute_uv=False)
        # Newton and Schulz end near 1, not at it, and a square matrix has sizes near 0.
        assert np.quantile(sizes, 0.95) < 2 * np.quantile(sizes, 0.05)
        rms = np.sqrt(np.mean(np.square(step)))
        np.testing.assert_allclose(rms, 0.2 * 0.5, rtol=0.3)
    first = 0.9 * 0.1 / (1 - 0.9**2) + 1  # Adam's first step, looking ahead (Nesterov)
    for adam in (steps["norm"], steps["head"]):
        np.testing.assert_allclose(np.abs(adam), 0.2 * 0.5 * first, rtol=1e-3)


@pytest.mark.usefixtures("usual_promotion")
def test_gradients_are_clipped_by_their_common_norm():
    update = train.optimiser(TrainConfig(clip_norm=0.5, beta1=0.9), 10)
    params = {"a": jnp.zeros(()), "b": jnp.zeros(())}
    grads = {"a": jnp.asarray(30.0), "b": jnp.asarray(40.0)}
    _, state = update.update(grads, update.init(params), params)
    first = optax.tree_utils.tree_get(state, "mu")
    np.testing.assert_allclose(first["a"], 0.1 * 0.3, rtol=1e-5)
    np.testing.assert_allclose(first["b"], 0.1 * 0.4, rtol=1e-5)


@pytest.fixture
def fresh(monkeypatch):
    """Returns what makes the state before the first step, drawn quickly."""
    monkeypatch.setattr(draft, "init", lambda *_: dict(own_of(SMALL)))

    def make(settings: TrainConfig) -> tuple[train.TrainState, Any]:
        update = train.optimiser(settings, 10)
        ids = PARAMS["draft"]["draft_to_target"]
        state = train.init(
            jax.random.key(3), PARAMS["target"], ids, SMALL, TARGET, settings, update
        )
        return state, update

    return make


def test_a_head_starts_from_the_rows_of_the_target(fresh):
    state, _ = fresh(TRAIN)
    ids = PARAMS["draft"]["draft_to_target"]
    np.testing.assert_array_equal(state.params["head"], PARAMS["target"]["head"][ids])
    drawn, _ = fresh(dataclasses.replace(TRAIN, head_from_target=False))
    np.testing.assert_array_equal(drawn.params["head"], PARAMS["draft"]["head"])
    assert not set(draft.SHARED) & set(state.params)


@pytest.mark.usefixtures("usual_promotion")
def test_training_lowers_the_loss_and_batches_without_labels_leave_it_alone(fresh):
    state, update = fresh(TRAIN)
    batch = batch_of([A], [C])
    empty = batch._replace(mask=jnp.zeros_like(batch.mask))
    given = features_of(batch)
    step = jax.jit(
        train.train_step,
        static_argnames=("cfg", "train", "update"),
        donate_argnames="state",
    )

    def take(state: train.TrainState, batch: Batch) -> Any:
        return step(
            jax.random.key(0),
            state,
            shared(SMALL),
            PARAMS["target"],
            batch,
            given,
            SMALL,
            TRAIN,
            update,
        )

    before = jax.tree.map(np.asarray, state.params)
    for _ in range(3):  # R408
        state, _ = take(state, empty)
    assert int(state.step) == 3 and int(state.n_tokens) == 0
    jax.tree.map(np.testing.assert_array_equal, before, state.params)
    losses = []
    for _ in range(6):
        state, info = take(state, batch)
        losses.append(float(info.loss))
    assert int(state.step) == 9 and int(state.n_tokens) == 60
    assert losses == sorted(losses, reverse=True)


def test_predicted_tau_adds_the_chances_to_get_so_far():
    assert float(train.predicted_tau(jnp.array([0.5, 0.5, 0.0]))) == 1.75
    assert float(train.predicted_tau(jnp.array([1.0, 1.0, 1.0]))) == 4.0


@pytest.mark.usefixtures("usual_promotion")
@pytest.mark.parametrize("head", ["eagle1", "eagle3"])
def test_a_head_that_knows_a_text_drafts_it_after_export(head, tmp_path):  # R419
    depth, n_new, prompt, own = 3, 60, [5, 17, 3, 88], PARAMS["target"]
    target_cfg = dataclasses.replace(TARGET, taps=(1,))  # layers that can be written
    (answer,) = decode.generate(
        {"target": own}, [prompt], DecodeConfig(target_cfg), n_new
    )
    assert len(set(answer)) > 8
    cfg = tiny.draft_config(target_cfg, head)
    steps = depth if head == "eagle3" else 1
    settings = TrainConfig(ttt_steps=steps, noise="none", learning_rate=5e-3)
    update = train.optimiser(settings, 800)
    ids = jnp.arange(target_cfg.vocab_size, dtype=jnp.int32)
    state = train.init(jax.random.key(0), own, ids, cfg, target_cfg, settings, update)
    tokens = jnp.asarray([prompt + answer], jnp.int32)
    places = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
    batch = Batch(tokens, jnp.ones_like(tokens), places, places >= len(prompt))
    given = jit_features(own, batch, target_cfg, cfg)
    step = jax.jit(train.train_step, static_argnames=("cfg", "train", "update"))
    fixed = {"embed": own["embed"], "draft_to_target": ids}
    for i in range(800):
        key = jax.random.key(i)
        state, info = step(key, state, fixed, own, batch, given, cfg, settings, update)
    assert np.all(np.asarray(info.accuracy) > 0.95)
    heads.save_head(
        tmp_path / "head", cfg, state.params | fixed, target_cfg.taps, "sglang",
        meta={}, target=target_cfg, embed=own["embed"],
    )  # fmt: skip
    back = heads.load_head(tmp_path / "head", target_cfg)
    params = {"target": own, "draft": draft.tie(back.params, own, back.cfg)}
    decoding = DecodeConfig(target_cfg, back.cfg, chain(depth))
    rows, infos = decode.trace(params, [prompt], decoding, n_new)
    assert rows == [answer]
    assert (n_new - 1) / len(infos) > 0.9 * (depth + 1)

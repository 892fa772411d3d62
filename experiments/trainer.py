"""Trains a head for a target: data, checkpoints, log lines and the exported head."""

import contextlib
import dataclasses
import hashlib
import json
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import safetensors

from eagle_jax import checkpoint, data, draft, heads, sharding, train
from eagle_jax.config import Config, DraftConfig, fingerprint
from eagle_jax.data import Sample
from eagle_jax.layers import Params
from eagle_jax.train import Features, TrainState
from experiments import variants
from experiments.common import ROOT, Progress, Setup, append_line, commit, read_lines
from experiments.features import Online, Store, given, to_batch
from experiments.variants import Variant

TRAINING_DATA = (ROOT / "experiments" / "data" / "train.jsonl.gz",)
SCALE_BATCHES = 4  # from which `feature_scale` is taken

jit_train_step = jax.jit(
    train.train_step,
    static_argnames=("cfg", "train", "update", "fsdp"),
    donate_argnames="state",
)
jit_loss = jax.jit(train.head_loss, static_argnames=("cfg", "train"))


class Job(NamedTuple):
    """One head to train: what, on which conversations, for how many steps."""

    setup: Setup
    draft: DraftConfig
    samples: list[Sample]
    held_out: list[Sample]
    draft_to_target: np.ndarray
    n_steps: int
    folder: Path  # of checkpoints and the training log
    head: Path  # of the exported head
    features: Online | Store
    start: Params | None  # parameters to start from instead of fresh ones
    before: dict[str, Any]  # what the head they are from recorded of its training


def read_samples(setup: Setup, paths: tuple[Path, ...]) -> list[Sample]:
    """Reads and tokenises training conversations, and prints what was found."""
    cfg = setup.cfg.train
    samples, report = data.load_samples(
        setup.text, paths, cfg.row_length, cfg.long_samples
    )
    print("data     " + data.describe(report).replace("\n", "\n         "))
    return samples


def plan(
    setup: Setup,
    variant: Variant,
    samples: list[Sample],
    out: Path,
    start_from: Path | None = None,
) -> Job:
    """Splits the data, counts the steps and names the folders.

    Args:
      start_from: folder of a head of the same kind whose parameters, and whose draft
        vocabulary, the training starts from.
    """
    setup = setup._replace(cfg=variants.apply(variant, setup.cfg))
    cfg = setup.cfg
    head = variants.head_config(variant, cfg, setup.target_cfg)
    kept, held_out = data.split(samples, cfg.train.held_out, cfg.seed)
    ids = data.draft_vocabulary(kept, setup.target_cfg.vocab_size, head.vocab_size)
    start, before = None, {}
    if start_from is not None:
        start, before = _starting_head(start_from, head, setup)
        ids = np.asarray(start.pop("draft_to_target"))
    tokens = sum(len(s.tokens) for s in kept)
    supervised = sum(int(s.mask.sum()) for s in kept)
    print(
        f"{variant.trained_as}: {len(kept)} conversations, {tokens} tokens, {supervised} "
        f"supervised ({supervised / tokens:.0%}); {len(held_out)} held out; draft "
        f"vocabulary {len(ids)} covers {data.coverage(held_out, ids):.1%} of their answers"
    )
    per_step = _supervised_per_step(kept, cfg)
    n_steps = max(1, round(cfg.train.supervised_tokens / per_step))
    n_steps = -(-n_steps // cfg.train.accumulate) * cfg.train.accumulate
    parts = [
        variant.trained_as,
        {**dataclasses.asdict(cfg.train), "features": ""},  # the same either way
        head,
        list(setup.target_cfg.taps),
        setup.target_hash,
        cfg.precision,
        cfg.seed,
        _digest(samples),
    ]
    if start_from is not None:
        parts.append(heads.head_hash(start_from))
    name = fingerprint(*parts)
    stored = cfg.train.features == "stored"
    if stored and jax.process_count() > 1:
        raise ValueError(
            "train.features=stored is for one process; in several, leave it at online"
        )
    features = Store(setup, out / "features") if stored else Online(setup)
    return Job(
        setup=setup,
        draft=head,
        samples=kept,
        held_out=held_out,
        draft_to_target=ids,
        n_steps=n_steps,
        folder=out / "training" / f"{variant.trained_as}-{name}",
        head=out / "heads" / f"{variant.trained_as}-{name}",
        features=features,
        start=start,
        before=before,
    )


def _starting_head(
    folder: Path, draft: DraftConfig, setup: Setup
) -> tuple[Params, dict[str, Any]]:
    head = heads.load_head(folder, target=setup.target_cfg)
    wanted = dataclasses.replace(head.cfg, dtype=draft.dtype)
    if wanted != draft:
        differ = [
            f"{field.name}={getattr(head.cfg, field.name)}, needed "
            f"{getattr(draft, field.name)}"
            for field in dataclasses.fields(draft)
            if getattr(wanted, field.name) != getattr(draft, field.name)
        ]
        raise ValueError(f"cannot start from {folder}: {'; '.join(differ)}")
    if head.meta.get("supervised_tokens") is None:
        print(f"{folder} does not say how long it was trained: counted from here on")
    return {k: leaf for k, leaf in head.params.items() if k != "embed"}, head.meta


def _digest(samples: list[Sample]) -> str:
    digest = hashlib.sha256()
    for sample in samples:
        digest.update(sample.tokens.tobytes() + sample.mask.tobytes())
    return digest.hexdigest()


def _supervised_per_step(samples: list[Sample], cfg: Config) -> float:
    """Mean supervised tokens of a step, measured on the first epoch's packing."""
    rows = cfg.train.rows
    order = range(len(samples))
    packed = data.pack(samples, order, cfg.train.row_length)
    n_batches = -(-len(packed.tokens) // rows)
    return float(packed.mask.sum()) / n_batches


def fit(job: Job, retrain: bool = False, fsdp: bool = False) -> Path:
    """Trains the head, going on from the newest checkpoint, and returns its folder.

    Args:
      fsdp: cut parameters and optimiser state over `data` as well (`sharding.spec`).

    Raises:
      FloatingPointError: the loss is not finite; the step is named and the last good
        checkpoint stays.
    """
    setup, cfg = job.setup, job.setup.cfg
    if retrain and job.folder.exists() and sharding.is_first():
        shutil.rmtree(job.folder)
    sharding.wait("old training removed")
    job.folder.mkdir(parents=True, exist_ok=True)
    update = train.optimiser(cfg.train, job.n_steps // cfg.train.accumulate)
    ids = jnp.asarray(job.draft_to_target)
    key = jax.random.key(cfg.seed)
    noise_key = jax.random.fold_in(key, 1)
    state = train.init(
        key,
        setup.target_params,
        ids,
        job.draft,
        setup.target_cfg,
        cfg.train,
        update,
    )
    mesh = sharding.mesh_of(setup.target_params)
    fixed = {"embed": setup.target_params["embed"], "draft_to_target": ids}
    fixed = sharding.place(fixed, mesh)
    if isinstance(job.features, Store):
        job.features.add([*samples_read(job), *job.held_out])
    scale = feature_scale(job)
    if job.start is not None:
        params = dict(job.start)
        if "fuse" in params:
            params["fuse"] = params["fuse"] * scale[None]
        state = state._replace(params=jax.tree.map(jnp.array, params))
    state = sharding.place(state, mesh, fsdp)
    n_params = sum(leaf.size for leaf in jax.tree.leaves(state.params))
    log, curve = job.folder / "log.jsonl", job.folder / "held_out.jsonl"
    with (
        checkpoint.open_manager(job.folder / "checkpoints") as manager,
        _notes_sigterm() as told_to_stop,
    ):
        restored = checkpoint.restore(manager, state)
        if restored is not None:
            state = restored
            print(f"resuming at step {int(state.step)} of {job.n_steps}")
        start = int(state.step)
        _forget_after(log, start)
        _forget_after(curve, start)
        print(
            f"training {n_params / 1e6:.1f}M parameters for {job.n_steps} steps, about "
            f"{cfg.train.supervised_tokens} supervised tokens"
        )
        progress = Progress("train", job.n_steps)
        clock = 0.0  # started after the first step, which compiles
        stream = data.batches(
            job.samples, cfg.seed, cfg.train.rows, cfg.train.row_length, start
        )
        for index, packed in stream:
            if index >= job.n_steps:
                break
            batch = to_batch(packed, setup)
            features = given_of(job, packed, scale)
            state, metrics = jit_train_step(
                noise_key,
                state,
                fixed,
                setup.target_params,
                batch,
                features,
                job.draft,
                cfg.train,
                update,
                fsdp,
            )
            row = _log_row(index, metrics)
            if not np.isfinite(row["loss"]):
                raise FloatingPointError(
                    _not_finite(f"loss is {row['loss']}", index, manager.latest_step())
                )
            append_line(log, row)
            clock = clock or time.monotonic()
            note = f"loss {row['loss']:.3f}  accuracy "
            note += " ".join(f"{a:.2f}" for a in row["accuracy"])
            if index > start:
                rate = (index - start) * packed.tokens.size / (time.monotonic() - clock)
                note += f"  {rate:.0f} tokens/s"
            progress.show(index + 1, note)
            done = index + 1
            if done % cfg.train.evaluate_every == 0 and done < job.n_steps:
                found = evaluate(job, state, fixed, scale)
                append_line(curve, {"step": index, **found})
            stopping = sharding.anywhere(told_to_stop.is_set()) and done < job.n_steps
            due = done % cfg.train.checkpoint_every == 0
            if due or stopping or done == job.n_steps:
                # The loss speaks about the parameters before the step, not after.
                if not _all_finite(state.params):
                    raise FloatingPointError(
                        _not_finite(
                            "parameters are not finite", index, manager.latest_step()
                        )
                    )
                checkpoint.save(manager, state)
            if stopping:
                raise KeyboardInterrupt
    held_out = evaluate(job, state, fixed, scale)
    export(job, state, [*read_lines(curve), held_out], scale)
    return job.head


def samples_read(job: Job) -> list[Sample]:
    """Returns the samples that training reads, fewer than all in less than an epoch."""
    train_cfg, seed = job.setup.cfg.train, job.setup.cfg.seed
    stream = data.batches(job.samples, seed, train_cfg.rows, train_cfg.row_length)
    n_batches = max(job.n_steps, SCALE_BATCHES)
    read: set[int] = set()
    for _, (_, packed) in zip(range(n_batches), stream, strict=False):
        firsts = (packed.positions == 0) & (packed.segments > 0)
        read |= {int(i) for i in packed.source[firsts]}
        if len(read) >= len(job.samples):
            break
    return [sample for sample in job.samples if sample.start in read]


@contextlib.contextmanager
def _notes_sigterm() -> Iterator[threading.Event]:
    """Notes SIGTERM instead of dying of it, so that the step under way is finished.

    Machines that can be taken away at any time send it some seconds before.
    """
    told = threading.Event()
    before = signal.signal(signal.SIGTERM, lambda *_: told.set())
    try:
        yield told
    finally:
        signal.signal(signal.SIGTERM, before)


def _all_finite(params: dict[str, Any]) -> bool:
    return all(bool(jnp.isfinite(leaf).all()) for leaf in jax.tree.leaves(params))


def _not_finite(what: str, index: int, saved: int | None) -> str:
    kept = f"the checkpoint of step {saved} is good and kept" if saved else ""
    return (
        f"{what} at step {index}; {kept or 'there was no checkpoint yet'}; lower "
        f"train.learning_rate or train.clip_norm"
    )


def _log_row(index: int, metrics: train.Metrics) -> dict[str, Any]:
    return {
        "step": index,
        "loss": float(metrics.loss),
        "step_loss": [float(x) for x in metrics.step_loss],
        "accuracy": [float(x) for x in metrics.accuracy],
        "n_labels": int(metrics.n_labels),
    }


def _forget_after(log: Path, step: int) -> None:
    """Drops log lines of steps that will be taken again."""
    rows = read_lines(log)
    kept = [json.dumps(row) + "\n" for row in rows if row["step"] < step]
    if len(kept) < len(rows) and sharding.is_first():
        scratch = log.with_suffix(".tmp")
        scratch.write_text("".join(kept))
        scratch.replace(log)


def feature_scale(job: Job) -> jax.Array:
    """Returns the typical size of each feature channel, which training divides by.

    Un-normed residual streams grow tenfold from low to high taps, and single channels a
    hundredfold more: fed as they are, the high tap drowns everything else the head reads.
    The scale is a constant per channel, so `export` folds it into `fuse` and the head stays
    one of the official kind. Medians, because first tokens carry giant outliers. A resumed
    run finds the same scale, from the same first batches. EAGLE-1 regresses its features
    and takes them as they are; so do heads with a norm before `fuse`, where no constant
    could be folded in, and which need none.
    """
    cfg = job.setup.cfg
    ones = jnp.ones(job.draft.feature_size, cfg.dtype)
    head = job.draft
    if head.head != "eagle3" or head.fc_norm or head.norm_before_fc:
        return ones
    stream = data.batches(job.samples, cfg.seed, cfg.train.rows, cfg.train.row_length)
    seen = []
    for _, (_, packed) in zip(range(SCALE_BATCHES), stream, strict=False):
        features = given_of(job, packed, ones)
        read = sharding.to_host(features.read).astype(np.float32)
        seen.append(read[:, packed.segments > 0])
    scale = np.median(np.abs(np.concatenate(seen, axis=1)), axis=1)
    return jnp.asarray(np.maximum(scale, 1e-3), cfg.dtype)


def given_of(job: Job, packed: data.Packed, scale: jax.Array) -> Features:
    """Returns what the head reads of one batch, and the teacher's features."""
    mesh = sharding.mesh_of(job.setup.target_params)
    raw = sharding.place({"raw": job.features.raw(packed)}, mesh)["raw"]
    return given(raw, scale, job.setup.target_cfg.d_model, job.draft)


def evaluate(
    job: Job, state: TrainState, fixed: dict[str, Any], scale: jax.Array
) -> dict[str, Any]:
    """Measures per-step accuracy on held-out conversations, and the tau it predicts."""
    setup, cfg = job.setup, job.setup.cfg
    packed = data.pack(job.held_out, range(len(job.held_out)), cfg.train.row_length)
    clean = dataclasses.replace(cfg.train, noise="none")
    n_labels, right, loss = 0, 0.0, 0.0
    for start in range(0, len(packed.tokens), cfg.train.rows):
        rows = data.rows_of(packed, start, cfg.train.rows)
        batch, features = to_batch(rows, setup), given_of(job, rows, scale)
        _, metrics = jit_loss(
            jax.random.key(cfg.seed),
            state.params | fixed,
            setup.target_params,
            batch,
            features,
            job.draft,
            clean,
        )
        n = int(metrics.n_labels)
        n_labels += n
        right = right + np.asarray(metrics.accuracy) * n
        loss += float(metrics.loss) * n
    accuracy = np.asarray(right) / max(n_labels, 1)
    tau = float(train.predicted_tau(jnp.asarray(accuracy, jnp.float32)))
    print(
        f"held out {n_labels} labels  loss {loss / max(n_labels, 1):.3f}  accuracy "
        f"{' '.join(f'{a:.3f}' for a in accuracy)}  predicted tau of a chain {tau:.2f}",
        flush=True,
    )
    return {
        "tokens": int(state.n_tokens),
        "n_labels": n_labels,
        "loss": loss / max(n_labels, 1),
        "accuracy": [float(a) for a in accuracy],
        "predicted_tau": tau,
    }


def train_flops(job: Job, n_labels: int) -> float:
    """Returns what the head's training costs, counted by hand; the target is not in it.

    Six floating-point operations a weight and position for layers, in every unrolled
    step; the same a label for the LM heads of draft and teacher, the latter forward only.
    """
    cfg, train_cfg, t = job.draft, job.setup.cfg.train, job.setup.target_cfg
    shapes = jax.eval_shape(lambda key: draft.init(key, cfg, t), jax.random.key(0))
    head = shapes.pop("head", None)
    layers = sum(leaf.size for leaf in jax.tree.leaves(shapes))
    lm_head = head.size if head is not None else cfg.vocab_size * cfg.d_model
    steps = 1 if cfg.head == "medusa" else train_cfg.ttt_steps  # heads side by side
    n_positions = job.n_steps * train_cfg.rows * train_cfg.row_length
    teacher = 2.0 * t.vocab_size * t.d_model * n_labels
    return 6.0 * steps * (layers * n_positions + lm_head * n_labels) + teacher


def export(
    job: Job, state: TrainState, curve: list[dict[str, Any]], scale: jax.Array
) -> None:
    """Writes the head in the official layout if it fits, with what it belongs to.

    Tokens and operations count those of the head it was started from.

    Args:
      curve: held-out measurements over the training, the last one of these parameters.

    Raises:
      OSError: it could not be written; a head that was there, and the checkpoint of the
        last step, stay.
    """
    setup = job.setup
    params: Params = sharding.to_host(state.params)
    params["draft_to_target"] = job.draft_to_target
    if "fuse" in params:
        params["fuse"] = params["fuse"] / np.asarray(scale, params["fuse"].dtype)
    n_before = job.before.get("supervised_tokens") or 0
    flops_before = job.before.get("train_flops") or 0.0
    curve = [point | {"tokens": n_before + point["tokens"]} for point in curve]
    meta = {
        "target_hash": setup.target_hash,
        "target_dtype": setup.cfg.precision,
        "supervised_tokens": n_before + int(state.n_tokens),
        "n_trainable": sum(leaf.size for leaf in jax.tree.leaves(state.params)),
        "train_flops": flops_before + train_flops(job, int(state.n_tokens)),
        "seed": setup.cfg.seed,
        "commit": commit(),
        "held_out": curve[-1],
        "learning_curve": [
            {"tokens": point["tokens"], "accuracy": point["accuracy"]}
            for point in curve
        ],
    }
    try:
        if sharding.is_first():
            heads.save_head(
                job.head,
                job.draft,
                params,
                taps=setup.target_cfg.taps,
                dialect=heads.dialect_of(job.draft, setup.target_cfg),
                meta=meta,
                target=setup.target_cfg,
                overwrite=True,
            )
    except (OSError, safetensors.SafetensorError) as fault:
        raise OSError(
            f"the head could not be written to {job.head}; is the disk full? The "
            f"training is saved: the same command writes it again. {fault}"
        ) from fault
    sharding.wait("head written")

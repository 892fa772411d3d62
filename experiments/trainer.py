"""Trains a head for a target: data, checkpoints, log lines and the exported head."""

import dataclasses
import hashlib
import json
import shutil
import time
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import safetensors

from eagle_jax import checkpoint, data, heads, train
from eagle_jax.config import Config, DraftConfig, TargetConfig, fingerprint
from eagle_jax.data import Sample
from eagle_jax.layers import Params
from eagle_jax.train import Batch, Features, TrainState
from experiments.common import ROOT, Progress, Setup, append_line, commit, read_lines

TRAINING_DATA = (ROOT / "experiments" / "data" / "train.jsonl.gz",)


def _scaled_features(
    params: Params, batch: Batch, scale: jax.Array, cfg: TargetConfig, head: DraftConfig
) -> Features:
    given = train.target_features(params, batch, cfg, head)
    return given._replace(read=given.read / scale[:, None, None])


jit_features = jax.jit(_scaled_features, static_argnames=("cfg", "head"))
jit_train_step = jax.jit(
    train.train_step,
    static_argnames=("cfg", "train", "update"),
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


def head_config(cfg: Config, setup: Setup, head: str) -> DraftConfig:
    """Completes a config's draft sizes for one kind of head and this target.

    Parameters are trained in float32 whatever the run's dtype: in bfloat16 most updates
    would be rounded away. `train.dtype` is that of the arithmetic.
    """
    t = setup.target_cfg
    if cfg.draft.d_model != t.d_model:
        raise ValueError(
            f"a head is trained at its target's width d_model={t.d_model}, since it "
            f"reads the target's embedding; got draft.d_model={cfg.draft.d_model}"
        )
    if not 0 < cfg.draft.vocab_size <= t.vocab_size:
        raise ValueError(
            f"draft.vocab_size must lie in 1..{t.vocab_size}, the target's vocabulary; "
            f"got {cfg.draft.vocab_size}"
        )
    size = t.d_model if head == "eagle1" else len(t.taps) * t.d_model
    return dataclasses.replace(cfg.draft, head=head, feature_size=size, dtype="float32")


def plan(
    setup: Setup, variant: str, head: str, paths: tuple[Path, ...], out: Path
) -> Job:
    """Reads the data, counts the steps and names the folders."""
    cfg = setup.cfg
    draft = head_config(cfg, setup, head)
    samples, report = data.load_samples(
        setup.text, paths, cfg.train.row_length, cfg.train.long_samples
    )
    print("data     " + data.describe(report).replace("\n", "\n         "))
    kept, held_out = data.split(samples, cfg.train.held_out, cfg.seed)
    ids = data.draft_vocabulary(kept, setup.target_cfg.vocab_size, draft.vocab_size)
    tokens = sum(len(s.tokens) for s in kept)
    supervised = sum(int(s.mask.sum()) for s in kept)
    print(
        f"         {len(kept)} conversations, {tokens} tokens, {supervised} supervised "
        f"({supervised / tokens:.0%}); {len(held_out)} held out; draft vocabulary "
        f"{len(ids)} covers {data.coverage(held_out, ids):.1%} of their answers"
    )
    per_step = _supervised_per_step(kept, cfg)
    n_steps = max(1, round(cfg.train.supervised_tokens / per_step))
    n_steps = -(-n_steps // cfg.train.accumulate) * cfg.train.accumulate
    name = fingerprint(
        variant,
        cfg.train,
        draft,
        list(setup.target_cfg.taps),
        setup.target_hash,
        cfg.dtype,
        cfg.seed,
        _digest(samples),
    )
    return Job(
        setup=setup,
        draft=draft,
        samples=kept,
        held_out=held_out,
        draft_to_target=ids,
        n_steps=n_steps,
        folder=out / "training" / f"{variant}-{name}",
        head=out / "heads" / f"{variant}-{name}",
    )


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


def fit(job: Job, retrain: bool = False) -> Path:
    """Trains the head, going on from the newest checkpoint, and returns its folder.

    Raises:
      FloatingPointError: the loss is not finite; the step is named and the last good
        checkpoint stays.
    """
    setup, cfg = job.setup, job.setup.cfg
    if retrain and job.folder.exists():
        shutil.rmtree(job.folder)
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
    fixed = {"embed": setup.target_params["embed"], "draft_to_target": ids}
    scale = feature_scale(job)
    n_params = sum(leaf.size for leaf in jax.tree.leaves(state.params))
    log = job.folder / "log.jsonl"
    with checkpoint.open_manager(job.folder / "checkpoints") as manager:
        restored = checkpoint.restore(manager, state)
        if restored is not None:
            state = restored
            print(f"resuming at step {int(state.step)} of {job.n_steps}")
        start = int(state.step)
        _forget_after(log, start)
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
            batch = Batch(*(jnp.asarray(array) for array in packed))
            given = jit_features(
                setup.target_params, batch, scale, setup.target_cfg, job.draft
            )
            state, metrics = jit_train_step(
                noise_key,
                state,
                fixed,
                setup.target_params,
                batch,
                given,
                job.draft,
                cfg.train,
                update,
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
                evaluate(job, state, fixed, scale)
            if done % cfg.train.checkpoint_every == 0 or done == job.n_steps:
                # The loss speaks about the parameters before the step, not after.
                if not _all_finite(state.params):
                    raise FloatingPointError(
                        _not_finite(
                            "parameters are not finite", index, manager.latest_step()
                        )
                    )
                checkpoint.save(manager, state)
    held_out = evaluate(job, state, fixed, scale)
    export(job, state, held_out, scale)
    return job.head


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
    if len(kept) < len(rows):
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
    setup, cfg = job.setup, job.setup.cfg
    ones = jnp.ones(job.draft.feature_size, cfg.dtype)
    if job.draft.head == "eagle1" or job.draft.fc_norm or job.draft.norm_before_fc:
        return ones
    stream = data.batches(job.samples, cfg.seed, cfg.train.rows, cfg.train.row_length)
    seen = []
    for _, (_, packed) in zip(range(4), stream, strict=False):
        batch = Batch(*(jnp.asarray(array) for array in packed))
        given = jit_features(
            setup.target_params, batch, ones, setup.target_cfg, job.draft
        )
        seen.append(np.asarray(given.read, np.float32)[:, packed.segments > 0])
    scale = np.median(np.abs(np.concatenate(seen, axis=1)), axis=1)
    return jnp.asarray(np.maximum(scale, 1e-3), cfg.dtype)


def evaluate(
    job: Job, state: TrainState, fixed: dict[str, Any], scale: jax.Array
) -> dict[str, Any]:
    """Measures per-step accuracy on held-out conversations, and the tau it predicts."""
    setup, cfg = job.setup, job.setup.cfg
    packed = data.pack(job.held_out, range(len(job.held_out)), cfg.train.row_length)
    clean = dataclasses.replace(cfg.train, noise="none")
    n_labels, right, loss = 0, 0.0, 0.0
    for start in range(0, len(packed.tokens), cfg.train.rows):
        rows = [array[start : start + cfg.train.rows] for array in packed]
        missing = cfg.train.rows - len(rows[0])  # empty rows keep the compiled shape
        rows = [np.pad(array, ((0, missing), (0, 0))) for array in rows]
        batch = Batch(*(jnp.asarray(array) for array in rows))
        given = jit_features(
            setup.target_params, batch, scale, setup.target_cfg, job.draft
        )
        _, metrics = jit_loss(
            jax.random.key(cfg.seed),
            state.params | fixed,
            setup.target_params,
            batch,
            given,
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
        "n_labels": n_labels,
        "loss": loss / max(n_labels, 1),
        "accuracy": [float(a) for a in accuracy],
        "predicted_tau": tau,
    }


def export(
    job: Job, state: TrainState, held_out: dict[str, Any], scale: jax.Array
) -> None:
    """Writes the head in the official layout, with what it belongs to.

    Raises:
      OSError: it could not be written; a head that was there, and the checkpoint of the
        last step, stay.
    """
    setup = job.setup
    params = dict(state.params) | {"draft_to_target": jnp.asarray(job.draft_to_target)}
    if "fuse" in params:
        params["fuse"] = params["fuse"] / scale[None].astype(params["fuse"].dtype)
    meta = {
        "target_hash": setup.target_hash,
        "target_dtype": setup.cfg.dtype,
        "supervised_tokens": int(state.n_tokens),
        "seed": setup.cfg.seed,
        "commit": commit(),
        "held_out": held_out,
    }
    try:
        heads.save_head(
            job.head,
            job.draft,
            params,
            taps=setup.target_cfg.taps,
            dialect="official",
            meta=meta,
            target=setup.target_cfg,
            overwrite=True,
        )
    except (OSError, safetensors.SafetensorError) as fault:
        raise OSError(
            f"the head could not be written to {job.head}; is the disk full? The "
            f"training is saved: the same command writes it again. {fault}"
        ) from fault

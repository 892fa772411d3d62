"""`trainer`: a run that is stopped goes on as if nothing had happened."""

import dataclasses
import json
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import drivers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors
import safetensors.numpy

from configs import tiny as tiny_config
from eagle_jax import checkpoint, draft, heads, train
from eagle_jax.data import Packed
from experiments import features, trainer, variants
from experiments.common import Setup
from experiments.trainer import Job


@pytest.fixture
def setup(monkeypatch) -> Setup:
    """The tiny target without its weights."""
    embed = {"embed": jnp.ones((258, 32))}
    monkeypatch.setattr(tiny_config.target, "init", lambda *_: embed)
    cfg = tiny_config.get_config()
    settings = dataclasses.replace(
        cfg.train, row_length=128, supervised_tokens=1000, checkpoint_every=2
    )
    cfg = dataclasses.replace(cfg, train=settings)
    target_cfg, params, text = tiny_config.load(cfg.dtype, cfg.taps)
    return Setup(cfg, target_cfg, params, text, "tiny")


def training_folder(out: Path) -> Path:
    return drivers.only(out / "training")


def wait_for_step(process: Any, out: Path, step: int) -> None:
    deadline = time.monotonic() + 200
    while process.poll() is None and time.monotonic() < deadline:
        for log in out.glob("training/*/log.jsonl"):
            if log.read_bytes().count(b"\n") > step:
                return
        time.sleep(0.005)
    raise AssertionError(f"no step {step}: {process.communicate()}")


def test_a_killed_run_gives_the_losses_of_an_uninterrupted_one(tmp_path):
    straight, _ = drivers.trained()
    expected = drivers.read_lines(training_folder(straight) / "log.jsonl")
    n_steps = len(expected)
    assert [row["step"] for row in expected] == list(range(n_steps))
    assert n_steps > 20

    out = tmp_path / "killed"
    process = drivers.start("ablate", *drivers.ablate_flags(out))
    wait_for_step(process, out, 2 * drivers.CHECKPOINT_EVERY + 1)
    process.kill()  # SIGKILL
    process.communicate()
    folder = training_folder(out)
    before = drivers.read_lines(folder / "log.jsonl")
    assert 8 < len(before) < n_steps
    assert not list(out.glob("heads/*"))
    # The newest checkpoint is torn as well, so the one before must serve.
    names = [path.name for path in (folder / "checkpoints").iterdir()]
    saved = sorted(int(name) for name in names if name.isdigit())
    for file in (folder / "checkpoints" / str(saved[-1])).rglob("d/*"):
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])

    said = drivers.run("ablate", *drivers.ablate_flags(out))
    assert f"WARNING: the checkpoint of step {saved[-1]} cannot be read" in said
    assert f"resuming at step {saved[-2]} of {n_steps}" in said
    assert drivers.read_lines(folder / "log.jsonl") == expected
    weights = [drivers.only(o / "heads") / "model.safetensors" for o in (straight, out)]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    counts = ("task", "n_identical", "tau_pooled", "acceptance_by_depth", "head")
    rows = [drivers.read_lines(o / "results.jsonl") for o in (straight, out)]
    ours, theirs = ([[row[key] for key in counts] for row in r] for r in rows)
    assert ours[: len(theirs)] == theirs  # other tests measure the shared head again


N_KILLS = int(os.environ.get("EAGLE_JAX_KILLS", "3"))  # 20 in the long form


def test_kills_at_random_times_lose_no_finished_checkpoint(tmp_path):
    """Every step is saved, so kills hit savings as often as steps."""
    settings = ["--set=train.checkpoint_every=1", "--set=train.supervised_tokens=6000"]
    straight, out = tmp_path / "straight", tmp_path / "killed"
    drivers.run("ablate", *drivers.ablate_flags(straight), *settings)
    r, newest = random.Random(0), 0
    for _ in range(N_KILLS):
        process = drivers.start("ablate", *drivers.ablate_flags(out), *settings)
        # The log line of a step comes after the saving of the one before.
        wait_for_step(process, out, newest + r.randrange(3))
        time.sleep(r.uniform(0, 0.3))
        assert process.poll() is None, "it was over before it could be killed"
        process.kill()
        process.communicate()
        names = (path.name for path in training_folder(out).glob("checkpoints/*"))
        finished = [int(name) for name in names if name.isdigit()]
        assert max(finished, default=0) >= newest
        newest = max(finished, default=0)
    assert newest > 0
    drivers.run("ablate", *drivers.ablate_flags(out), *settings)
    logs = [training_folder(o) / "log.jsonl" for o in (straight, out)]
    assert drivers.read_lines(logs[0]) == drivers.read_lines(logs[1])
    files = [drivers.only(o / "heads") / "model.safetensors" for o in (straight, out)]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_training_reports_loss_speed_and_held_out_accuracy():
    _, said = drivers.trained()
    assert "train 1/2" in said  # the first step, and the last one below
    last = [line for line in said.splitlines() if line.startswith("train ")][-1]
    assert all(word in last for word in ("loss", "accuracy", "tokens/s", "ETA 0:00"))
    held_out = [line for line in said.splitlines() if line.startswith("held out")]
    # At steps 10 and 20 and at the end.
    assert len(held_out) == 3
    assert all("labels  loss" in s and "predicted tau" in s for s in held_out)


def test_the_head_is_that_of_the_last_step_and_says_what_it_belongs_to(setup):
    out, _ = drivers.trained()
    head = heads.load_head(drivers.only(out / "heads"), setup.target_cfg)
    assert head.notes == [] and head.taps == setup.target_cfg.taps
    assert head.meta["target_hash"] == "tiny"
    assert head.meta["target_dtype"] == "float32"
    assert head.meta["supervised_tokens"] > 1900
    assert len(head.meta["held_out"]["accuracy"]) == 2
    own = {k: v for k, v in head.params.items() if k != "draft_to_target"}
    zero, update = jnp.zeros((), jnp.int32), train.optimiser(setup.cfg.train, 10)
    like = train.TrainState(own, update.init(own), zero, zero)
    folder = training_folder(out)
    with checkpoint.open_manager(folder / "checkpoints") as manager:
        state = checkpoint.restore(manager, like)
    assert state is not None
    assert int(state.step) == len(drivers.read_lines(folder / "log.jsonl"))
    assert int(state.n_tokens) == head.meta["supervised_tokens"]
    # The scale that training divides features by went into `fuse`, channel by channel.
    scale = np.asarray(state.params.pop("fuse")) / np.asarray(own.pop("fuse"))
    np.testing.assert_allclose(scale, scale[:1].repeat(32, axis=0), rtol=1e-5)
    assert np.all(scale > 0) and np.ptp(scale) > 0
    jax.tree.map(np.testing.assert_array_equal, state.params, own)


# The loop itself, with steps that cost nothing.


def plan(
    setup: Setup, out: Path, start_from: Path | None = None, **changes: Any
) -> Job:
    settings = dataclasses.replace(setup.cfg.train, **changes)
    cfg = dataclasses.replace(setup.cfg, train=settings)
    data = (drivers.home() / "train.jsonl",)
    setup = setup._replace(cfg=cfg)
    samples = trainer.read_samples(setup, data)
    return trainer.plan(setup, variants.parse("eagle3"), samples, out, start_from)


class Steps:
    """Stands in for the compiled functions: the loss of step k is 1 / (k + 1)."""

    def __init__(self) -> None:
        self.taken: list[int] = []
        self.stop_before = self.term_in = -1
        self.bad_loss = self.bad_params = -1

    def raw(self, packed: Packed) -> jax.Array:
        """Taps of 96 channels, final-norm output of 32, next token in three numbers."""
        return jnp.full((*packed.tokens.shape, 131), 4.0)

    def step(self, _key: Any, state: train.TrainState, *_: Any) -> Any:
        k = int(state.step)
        if k == self.stop_before:
            raise KeyboardInterrupt
        if k == self.term_in:
            os.kill(os.getpid(), signal.SIGTERM)
        self.taken.append(k)
        value = np.nan if k == self.bad_params else k + 1.0
        params = jax.tree.map(
            lambda leaf: jnp.full(leaf.shape, value, leaf.dtype), state.params
        )
        one = jnp.ones((), jnp.int32)
        loss = np.inf if k == self.bad_loss else 1 / (k + 1)
        state = train.TrainState(
            params, state.opt_state, state.step + one, state.n_tokens + one
        )
        return state, self.metrics(loss, 5)

    def metrics(self, loss: float, n_labels: int) -> train.Metrics:
        each = jnp.full((3,), loss, jnp.float32)
        return train.Metrics(
            each[0], each, each, jnp.zeros(3), jnp.asarray(n_labels, jnp.int32)
        )


@pytest.fixture
def steps(monkeypatch) -> Steps:
    fake = Steps()
    monkeypatch.setattr(features.Online, "raw", lambda _, packed: fake.raw(packed))
    monkeypatch.setattr(trainer, "jit_train_step", fake.step)
    monkeypatch.setattr(trainer, "jit_loss", lambda *_: (0, fake.metrics(0.5, 9)))

    def quick_init(_key: Any, cfg: Any, target: Any) -> Any:
        key = jax.random.key(0)
        shapes = jax.eval_shape(lambda: init(key, cfg, target))
        return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)

    init = draft.init
    monkeypatch.setattr(draft, "init", quick_init)
    return fake


def saved_steps(job: Job) -> list[int]:
    found = (job.folder / "checkpoints").glob("[0-9]*")
    return sorted(int(path.name) for path in found)


def logged(job: Job) -> list[int]:
    return [row["step"] for row in drivers.read_lines(job.folder / "log.jsonl")]


def test_a_stopped_run_goes_on_from_its_newest_checkpoint(setup, steps, tmp_path):
    job = plan(setup, tmp_path)
    n = job.n_steps
    steps.stop_before = 7
    with pytest.raises(KeyboardInterrupt):
        trainer.fit(job)
    assert (steps.taken, saved_steps(job)) == (list(range(7)), [4, 6])
    steps.stop_before = -1
    steps.taken.clear()
    assert trainer.fit(job) == job.head
    assert steps.taken == list(range(6, n))
    assert logged(job) == list(range(n))
    assert saved_steps(job)[-1] == n


def test_sigterm_saves_the_step_under_way_and_stops(setup, steps, tmp_path):
    job = plan(setup, tmp_path)
    before = signal.getsignal(signal.SIGTERM)
    steps.term_in = 6
    with pytest.raises(KeyboardInterrupt):
        trainer.fit(job)
    assert (steps.taken, saved_steps(job)) == (list(range(7)), [6, 7])
    assert signal.getsignal(signal.SIGTERM) is before
    steps.term_in = -1
    steps.taken.clear()
    assert trainer.fit(job) == job.head
    assert steps.taken == list(range(7, job.n_steps))
    assert logged(job) == list(range(job.n_steps))


def test_a_loss_that_is_not_finite_stops_and_keeps_the_last_checkpoint(
    setup, steps, tmp_path
):
    job = plan(setup, tmp_path)
    steps.bad_loss = 5
    with pytest.raises(
        FloatingPointError, match=r"loss is inf at step 5; the checkpoint of step 4 is"
    ):
        trainer.fit(job)
    assert saved_steps(job) == [2, 4] and logged(job) == [0, 1, 2, 3, 4]
    assert not job.head.exists()


def test_parameters_that_are_not_finite_are_never_saved(setup, steps, tmp_path):
    job = plan(setup, tmp_path)
    steps.bad_params = 5  # its loss is still finite, and a checkpoint is due
    with pytest.raises(
        FloatingPointError, match=r"parameters are not finite at step 5; .* step 4 is"
    ):
        trainer.fit(job)
    assert saved_steps(job) == [2, 4]


def test_a_bad_first_step_says_that_there_is_no_checkpoint(setup, steps, tmp_path):
    steps.bad_loss = 0
    with pytest.raises(FloatingPointError, match="at step 0; there was no checkpoint"):
        trainer.fit(plan(setup, tmp_path))


def test_retrain_begins_anew(setup, steps, tmp_path):
    job = plan(setup, tmp_path)
    trainer.fit(job)
    steps.taken.clear()
    trainer.fit(job)
    assert steps.taken == []  # all steps are in the checkpoint
    trainer.fit(job, retrain=True)
    assert steps.taken == list(range(job.n_steps)) == logged(job)


def test_held_out_conversations_without_labels_are_no_crash(
    setup, steps, tmp_path, capsys, monkeypatch
):
    none = steps.metrics(0.0, 0)
    monkeypatch.setattr(trainer, "jit_loss", lambda *_: (0, none))
    trainer.fit(plan(setup, tmp_path))  # R409
    assert "held out 0 labels" in capsys.readouterr().out


def test_a_head_that_cannot_be_written_costs_nothing_but_the_writing(
    setup, steps, tmp_path, monkeypatch
):
    job = plan(setup, tmp_path)
    trainer.fit(job)
    before = (job.head / "model.safetensors").read_bytes()

    def full(*_: Any, **__: Any) -> None:
        raise safetensors.SafetensorError("I/O error: No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(safetensors.numpy, "save_file", full)
        with pytest.raises(OSError, match=r"head could not .*disk full\?.*No space"):
            trainer.fit(job, retrain=True)
    assert (job.head / "model.safetensors").read_bytes() == before
    steps.taken.clear()
    trainer.fit(job)
    assert steps.taken == []


def test_the_exported_head_reads_features_as_the_target_gives_them(
    setup, steps, tmp_path
):
    job = plan(setup, tmp_path)
    trainer.fit(job)
    trained = float(job.n_steps)  # every parameter, see `Steps`
    head = heads.load_head(job.head, setup.target_cfg)
    np.testing.assert_allclose(head.params["fuse"], trained / 4)  # features are 4
    np.testing.assert_array_equal(head.params["norm"], trained)


@pytest.mark.parametrize(
    ("taps", "norm"), [((1, 2, 5), ""), ((2, 4, 5), "norm_before_fc")]
)
def test_a_head_that_the_official_layout_cannot_express_is_stored_in_another(
    setup, steps, tmp_path, taps, norm
):
    fields = {norm: True} if norm else {}
    cfg = dataclasses.replace(
        setup.cfg, taps=taps, draft=dataclasses.replace(setup.cfg.draft, **fields)
    )
    target_cfg = dataclasses.replace(setup.target_cfg, taps=taps)
    job = plan(setup._replace(cfg=cfg, target_cfg=target_cfg), tmp_path)
    trainer.fit(job)
    head = heads.load_head(job.head, target_cfg)
    assert head.taps == taps and head.cfg == job.draft
    np.testing.assert_array_equal(head.params["norm"], float(job.n_steps))


def test_a_head_that_is_trained_on_counts_what_it_had_seen(
    setup, steps, tmp_path, capsys
):
    first = plan(setup, tmp_path)
    trainer.fit(first)
    before = heads.load_head(first.head, setup.target_cfg)
    second = plan(setup, tmp_path, first.head, learning_rate=1e-4)
    assert second.head != first.head
    assert second.start is not None
    own_params = {k: before.params[k] for k in second.start}
    jax.tree.map(np.testing.assert_array_equal, second.start, own_params)
    trainer.fit(second)
    after = heads.load_head(second.head, setup.target_cfg).meta
    n = first.n_steps  # the stand-in counts one token a step
    assert before.meta["supervised_tokens"] == n
    assert after["supervised_tokens"] == n + second.n_steps
    assert after["held_out"]["tokens"] == n + second.n_steps
    assert after["learning_curve"][0]["tokens"] > n
    own = trainer.train_flops(second, second.n_steps)
    assert after["train_flops"] == before.meta["train_flops"] + own

    config = second.head / "config.json"
    told = json.loads(config.read_text())
    del told["eagle_jax"]["supervised_tokens"], told["eagle_jax"]["train_flops"]
    config.write_text(json.dumps(told))
    capsys.readouterr()
    third = plan(setup, tmp_path, second.head)
    assert "does not say how long it was trained" in capsys.readouterr().out
    trainer.fit(third)
    meta = heads.load_head(third.head, setup.target_cfg).meta
    assert meta["supervised_tokens"] == third.n_steps


def test_training_on_is_refused_for_a_head_of_another_kind(setup, steps, tmp_path):
    job = plan(setup, tmp_path)
    trainer.fit(job)
    smaller = dataclasses.replace(setup.cfg.draft, vocab_size=32)
    cfg = dataclasses.replace(setup.cfg, draft=smaller)
    with pytest.raises(ValueError, match=r"vocab_size=\d+, needed 32"):
        plan(setup._replace(cfg=cfg), tmp_path, job.head)


@pytest.mark.parametrize("norm", ["fc_norm", "norm_before_fc"])
def test_features_that_are_normed_before_fuse_are_not_scaled(
    setup, steps, tmp_path, norm
):
    cfg = dataclasses.replace(
        setup.cfg, draft=dataclasses.replace(setup.cfg.draft, **{norm: True})
    )
    job = plan(setup._replace(cfg=cfg), tmp_path)
    np.testing.assert_array_equal(trainer.feature_scale(job), 1.0)


def test_accumulation_takes_whole_optimiser_steps(setup, steps, tmp_path, monkeypatch):
    asked = []
    optimiser = train.optimiser

    def watched(cfg: Any, n_steps: int) -> Any:
        asked.append(n_steps)
        return optimiser(cfg, n_steps)

    monkeypatch.setattr(train, "optimiser", watched)
    job = plan(setup, tmp_path, accumulate=5)
    assert job.n_steps % 5 == 0 and job.n_steps >= plan(setup, tmp_path).n_steps
    trainer.fit(job)
    assert asked == [job.n_steps // 5]  # or the rate would never come down


def test_what_changes_a_head_changes_its_folder(setup, tmp_path):
    """R413 among others: nothing of another size is ever picked up."""
    jobs = [plan(setup, tmp_path), plan(setup, tmp_path, learning_rate=1e-4)]
    smaller = dataclasses.replace(setup.cfg.draft, vocab_size=32)
    for cfg in (
        dataclasses.replace(setup.cfg, seed=1),
        dataclasses.replace(setup.cfg, draft=smaller),
    ):
        jobs.append(plan(setup._replace(cfg=cfg), tmp_path))
    jobs.append(plan(setup._replace(target_hash="other"), tmp_path))
    assert len({job.head for job in jobs} | {job.folder for job in jobs}) == 10
    again = plan(setup, tmp_path)
    assert (again.head, again.folder) == (jobs[0].head, jobs[0].folder)
    assert len(jobs[3].draft_to_target) == 32


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"d_model": 64}, r"target's width d_model=32.*got draft.d_model=64"),
        ({"vocab_size": 259}, r"draft.vocab_size must lie in 1..258.*got 259"),
        ({"vocab_size": 0}, r"draft.vocab_size must lie in 1..258.*got 0"),
    ],
)
def test_sizes_that_cannot_be_trained_are_refused(setup, tmp_path, changes, words):
    head = dataclasses.replace(setup.cfg.draft, **changes)
    cfg = dataclasses.replace(setup.cfg, draft=head)
    with pytest.raises(ValueError, match=words):
        plan(setup._replace(cfg=cfg), tmp_path)


def test_heads_are_trained_in_float32_whatever_the_target(setup, tmp_path):
    half = dataclasses.replace(setup.cfg, dtype="bfloat16")
    assert plan(setup._replace(cfg=half), tmp_path).draft.dtype == "float32"

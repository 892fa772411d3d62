"""Two processes, as on a slice of two machines, do what one does."""

import shutil
import socket
import subprocess
import time
from pathlib import Path

import drivers
import numpy as np
import pytest


def start_pair(out: Path) -> list[subprocess.Popen]:
    """Starts both processes, with two devices each."""
    with socket.socket() as s:
        s.bind(("localhost", 0))
        port = s.getsockname()[1]
    shared = [f"--coordinator=localhost:{port}", "--processes=2"]
    shared += ["--mesh=data:2,model:2", "--keep_target", *drivers.ablate_flags(out)]
    return [drivers.start("ablate", *shared, f"--process={i}") for i in range(2)]


def losses(out: Path) -> list[float]:
    rows = drivers.read_lines(drivers.only(out / "training") / "log.jsonl")
    assert [row["step"] for row in rows] == list(range(len(rows)))
    return [row["loss"] for row in rows]


@pytest.fixture
def two_devices(monkeypatch):
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "2")


def test_two_processes_train_resume_and_measure_like_one(tmp_path, two_devices):
    straight, _ = drivers.trained()
    out = tmp_path / "two"
    first = start_pair(out)
    try:
        saved = drivers.CHECKPOINT_EVERY
        while not list(out.glob(f"training/*/checkpoints/{saved}")):
            assert all(process.poll() is None for process in first)
            time.sleep(0.2)
        time.sleep(1)
    finally:
        for process in reversed(first):  # the one that writes dies last
            process.kill()
            process.communicate()
    copy = tmp_path / "one"
    shutil.copytree(out, copy)
    pair = start_pair(out)
    told = [process.communicate(timeout=300) for process in pair]
    assert [process.returncode for process in pair] == [0, 0], told
    assert "resuming at step" in told[0][0] and "3 of 3" in told[0][0]
    assert "layers-2 is used" in told[0][0]  # the target, as both kept it
    # The library of collectives prints by itself, past Python; we print nothing.
    assert not any(word in told[1][0] for word in ("target", "train", "decode", "tau"))
    one = losses(straight)
    # Sums are made in another order, and 24 updates of Adam let that grow.
    np.testing.assert_allclose(losses(out), one, rtol=1e-3)
    rows = drivers.read_lines(out / "results.jsonl")
    assert [row["task"] for row in rows] == ["count", "say"]
    for row in rows:
        assert row["n_identical"] == row["n_prompts"]
        assert row["device"].endswith("2 processes")
    # The same checkpoints on another number of processes and devices.
    assert "resuming at step" in drivers.run("ablate", *drivers.ablate_flags(copy))
    np.testing.assert_allclose(losses(copy), one, rtol=1e-3)


def test_sigterm_to_one_process_saves_and_stops_both(tmp_path, two_devices):
    out = tmp_path / "stopped"
    pair = start_pair(out)
    try:
        while not list(out.glob("training/*/log.jsonl")):
            assert all(process.poll() is None for process in pair)
            time.sleep(0.2)
        pair[1].terminate()  # not the one that writes
        told = [process.communicate(timeout=300) for process in pair]
    finally:
        for process in pair:
            process.kill()
    assert [process.returncode for process in pair] == [1, 1], told
    assert "interrupted; the same command" in told[0][1]
    folder = drivers.only(out / "training")
    steps = drivers.read_lines(folder / "log.jsonl")
    assert (folder / "checkpoints" / str(len(steps))).is_dir()
    assert not (out / "results.jsonl").exists()


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (["--processes=2"], "--processes needs --coordinator"),
        (
            ["--coordinator=localhost:1", "--processes=2", "--process=2"],
            "--process must lie in 0 to --processes - 1",
        ),
    ],
)
def test_flags_that_make_no_sense_are_refused(given, why):
    assert why in drivers.fail("ablate", *given)

"""Runs the drivers as a user does: in processes of their own, on the tiny target.

All of them share one cache of compiled programs, and one trained head, per test session.
"""

import atexit
import functools
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CHECKPOINT_EVERY = 4


@functools.cache
def home() -> Path:
    """A folder of this session: data, questions, compiled programs, outputs."""
    folder = Path(tempfile.mkdtemp(prefix="eagle-jax-tests-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    rows = []
    for i in range(40):
        turns = []
        for j in range(1 + i % 2):
            answer = " ".join(str(i + j + k) for k in range(4 + i % 5))
            turns.append({"role": "user", "content": f"Count from {i + j}."})
            turns.append({"role": "assistant", "content": answer})
        rows.append({"messages": turns})
    write_lines(folder / "train.jsonl", rows)
    write_lines(
        folder / "questions" / "count.jsonl",
        [
            {"question_id": 1, "category": "a", "turns": ["Count from 3."]},
            {"question_id": 2, "category": "a", "turns": ["Count from 5.", "On."]},
        ],
    )
    write_lines(
        folder / "questions" / "say.jsonl",
        [{"question_id": 7, "category": "b", "turns": ["Say something."]}],
    )
    return folder


def write_lines(path: Path, rows: list) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def read_lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def target_flags() -> list[str]:
    """The tiny target with a small tree, in little room: little to compile."""
    tree = ("tree.depth=2", "tree.width=2", "tree.n_nodes=5", "max_len=256")
    return ["--config=configs/tiny.py", *(f"--set={text}" for text in tree)]


def ablate_flags(out: Path, variant: str = "eagle3") -> list[str]:
    """A run of about 24 steps, over two epochs, on 3 prompts."""
    training = ("row_length=128", "ttt_steps=2", "supervised_tokens=2000")
    training += (f"checkpoint_every={CHECKPOINT_EVERY}", "evaluate_every=10")
    return [
        *target_flags(),
        *(f"--set=train.{text}" for text in training),
        f"--data={home() / 'train.jsonl'}",
        f"--questions={home() / 'questions'}",
        f"--variant={variant}",
        "--preset=smoke",
        "--prompts_per_set=2",
        "--max_new_tokens=8",
        f"--out={out}",
    ]


def start(module: str, *flags: str, shell: str = "") -> subprocess.Popen:
    """Starts a driver, behind a line of shell that ends in `exec "$0" "$@"` if given."""
    env = {name: v for name, v in os.environ.items() if name != "XLA_FLAGS"}
    env |= {"EAGLE_JAX_CACHE": str(home() / "cache"), "JAX_PLATFORMS": "cpu"}
    before = ["bash", "-c", shell] if shell else []
    return subprocess.Popen(
        [*before, sys.executable, "-m", f"experiments.{module}", *flags],
        cwd=ROOT,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        text=True,
    )


def run(module: str, *flags: str) -> str:
    """Returns what a run printed; it must end well."""
    process = start(module, *flags)
    out, err = process.communicate(timeout=900)
    assert process.returncode == 0, f"{out}\n{err}"
    return out


def fail(module: str, *flags: str) -> str:
    """Returns the one line with which a run must give up."""
    process = start(module, *flags)
    _, err = process.communicate(timeout=900)
    assert process.returncode == 1
    lines = err.splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: "), err
    return lines[0]


@functools.cache
def trained() -> tuple[Path, str]:
    """The folder --out of a run that nothing disturbed, and what it printed."""
    out = home() / "trained"
    return out, run("ablate", *ablate_flags(out))


def only(folder: Path) -> Path:
    (path,) = folder.iterdir()
    return path

"""`peers`: every method answers every prompt, and ratios are those of mean speeds."""

import dataclasses

import drivers
import pytest
from absl import flags
from absl.testing import flagsaver

from configs import tiny as tiny_config
from eagle_jax import heads
from eagle_jax.config import DecodeConfig
from experiments import peers
from experiments.common import Setup
from experiments.evaluator import Method


@pytest.fixture(scope="module")
def setup() -> Setup:
    flags.FLAGS(["test"])
    cfg = dataclasses.replace(tiny_config.get_config())
    return Setup(cfg, *tiny_config.load("float32", ()), "tiny")


def test_speeds_count_the_second_answer_of_every_prompt(setup, tmp_path, monkeypatch):
    asked = []

    def answerer(name: str, text: list[int], seconds: float):
        def answer(prompt: list[int]) -> list[int]:
            asked.append((name, prompt))
            clock[0] += seconds
            return text

        return answer

    clock = [0.0]
    monkeypatch.setattr(peers.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(heads, "head_hash", lambda _: "0123")
    answerers = {
        "eagle_jax plain": answerer("plain", [1] * 8, 2.0),
        "eagle_jax eagle3": answerer("eagle3", [1] * 8, 1.0),
        "transformers greedy": answerer("theirs", [1] * 7, 7.0),
    }
    measured = peers.measure(answerers, [[5], [6]])
    order = ["plain", "plain", "eagle3", "eagle3", "theirs", "theirs"]
    assert [name for name, _ in asked] == order * 2
    assert [prompt for _, prompt in asked] == [[5]] * 6 + [[6]] * 6
    method = Method({}, DecodeConfig(setup.target_cfg))
    with flagsaver.flagsaver(head=str(tmp_path)):
        peers.report(setup, method, 8, measured, tmp_path)
    rows = drivers.read_lines(tmp_path / "peers.jsonl")
    speeds = [row["tokens_per_second_with_prefill"] for row in rows]
    assert speeds == [4.0, 8.0, 1.0]
    assert [row["over_plain"] for row in rows] == [1.0, 2.0, 0.25]
    assert [row["over_transformers"] for row in rows] == [4.0, 8.0, 1.0]
    assert [row["n_same"] for row in rows] == [2, 2, 0]


def test_a_head_and_exact_decoding_are_asked_for():
    assert "needs the folder or hub name" in drivers.fail("peers")
    here = [f"--head={drivers.ROOT}", "--set=sampling.temperature=1"]
    assert "float32 at temperature 0" in drivers.fail("peers", *here)

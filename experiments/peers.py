"""Our decoding beside that of transformers: same weights, prompts, precision and threads.

    pip install -e '.[peers]'
    python -m experiments.peers --head=DIR                 (on a quiet machine)

All methods answer one prompt before the next one begins. Everything is timed from prompt to
last token, prefill included, and runs once before it counts.
"""

import functools
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from absl import flags
from rich.console import Console
from rich.table import Table

from eagle_jax import data, heads, weights
from experiments import common, evaluator
from experiments.common import Progress, Setup
from experiments.evaluator import Method

FLAGS = flags.FLAGS
# The flags of ablate with the same names, so that a test may import both.
flags.DEFINE_string("head", "", "Folder of the head.", allow_override=True)
flags.DEFINE_string(
    "questions",
    "",
    "Folder of FastChat JSONL sets; default: embedded.",
    allow_override=True,
)
flags.DEFINE_integer(
    "prompts_per_set", 0, "Prompts of each set; 0: two.", allow_override=True
)
flags.DEFINE_integer(
    "max_new_tokens", 0, "New tokens per answer; 0: 64.", allow_override=True
)
flags.DEFINE_integer("early_exit", 8, "Layers of the target that assist itself.")

Answerer = Callable[[list[int]], list[int]]


def main() -> None:
    cfg = common.load_config()
    if not FLAGS.head:
        raise ValueError("--head needs the folder or hub name of a head")
    folder = weights.resolve_head(FLAGS.head)
    if cfg.precision != "float32" or cfg.sampling.temperature:
        raise ValueError("peers are compared in float32 at temperature 0")
    n_new = FLAGS.max_new_tokens or 64
    sets = data.read_questions(Path(FLAGS.questions or evaluator.QUESTIONS))
    out = common.prepare_out()
    setup = common.load_setup(cfg)
    method = evaluator.load_method(setup, folder)
    ours = {
        "eagle_jax plain": evaluator.plain_method(setup),
        f"eagle_jax {method.cfg.draft.head}": method,
    }
    answerers: dict[str, Answerer] = {
        name: functools.partial(_answer, setup, one, n_new)
        for name, one in ours.items()
    }
    answerers |= transformers_answerers(setup, n_new)
    prompts = [
        evaluator.first_prompt(setup, question)
        for asked in sets.values()
        for question in asked[: FLAGS.prompts_per_set or 2]
    ]
    measured = measure(answerers, prompts)
    report(setup, method, n_new, measured, out)


def _answer(setup: Setup, method: Method, n_new: int, prompt: list[int]) -> list[int]:
    seed, max_len = setup.cfg.seed, setup.cfg.max_len
    return evaluator.answer(method, [prompt], n_new, seed, max_len)[0].tokens


def transformers_answerers(setup: Setup, n_new: int) -> dict[str, Answerer]:
    """Loads the target into transformers, by its own loader, with as many threads.

    Raises:
      ValueError: torch or transformers are not installed.
    """
    try:
        import torch  # pyright: ignore[reportMissingImports]
        import transformers  # pyright: ignore[reportMissingImports]
    except ImportError as fault:
        raise ValueError(
            f"peers need torch and transformers ({fault}); pip install -e '.[peers]'"
        ) from fault
    torch.set_num_threads(os.cpu_count() or 1)
    path = weights.resolve(setup.cfg.target_source)
    by_file: dict[str, Any] = {}
    if path.suffix == ".gguf":
        path, by_file = path.parent, {"gguf_file": path.name}
    model = transformers.AutoModelForCausalLM.from_pretrained(
        str(path), dtype=torch.float32, **by_file
    ).eval()
    model.generation_config = transformers.GenerationConfig(
        eos_token_id=list(setup.target_cfg.eos_ids), pad_token_id=0
    )

    def answer(extra: dict[str, Any], prompt: list[int]) -> list[int]:
        ids = torch.tensor([prompt])
        with torch.no_grad():
            said = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=n_new,
                do_sample=False,
                **extra,
            )
        return said[0, len(prompt) :].tolist()

    ways: dict[str, dict[str, Any]] = {
        "transformers greedy": {},
        "transformers prompt lookup": {"prompt_lookup_num_tokens": 10},
        f"transformers assisted by {FLAGS.early_exit} layers": {
            "assistant_early_exit": FLAGS.early_exit
        },
    }
    return {name: functools.partial(answer, extra) for name, extra in ways.items()}


class Measured:
    """Answers and their times, prompt by prompt."""

    def __init__(self) -> None:
        self.tokens: list[list[int]] = []
        self.seconds: list[float] = []

    @property
    def speed(self) -> float:
        """Mean over prompts of tokens per second, prefill included."""
        pairs = zip(self.tokens, self.seconds, strict=True)
        return float(np.mean([len(tokens) / seconds for tokens, seconds in pairs]))


def measure(
    answerers: dict[str, Answerer], prompts: list[list[int]]
) -> dict[str, Measured]:
    """Answers every prompt with every method in turn."""
    measured = {name: Measured() for name in answerers}
    progress = Progress("prompts", len(prompts))
    for i, prompt in enumerate(prompts):
        for name, answer in answerers.items():
            answer(prompt)  # compiles, or warms up
            began = time.perf_counter()
            tokens = answer(prompt)
            measured[name].seconds.append(time.perf_counter() - began)
            measured[name].tokens.append(tokens)
        progress.show(i + 1)
    return measured


def report(
    setup: Setup, method: Method, n_new: int, measured: dict[str, Measured], out: Path
) -> None:
    """Prints the table and appends a line for every method."""
    first = next(iter(measured.values()))
    theirs = measured["transformers greedy"]
    table = Table(title=f"{setup.target_cfg.name}, float32, {n_new} new tokens")
    for column in ("method", "tokens/s", "of plain", "of transformers", "same answers"):
        table.add_column(column, justify="left" if column == "method" else "right")
    for name, one in measured.items():
        pairs = zip(one.tokens, first.tokens, strict=True)
        n_same = sum(a == b for a, b in pairs)
        table.add_row(
            name,
            f"{one.speed:.1f}",
            f"{one.speed / first.speed:.2f}",
            f"{one.speed / theirs.speed:.2f}",
            f"{n_same} of {len(one.tokens)}",
        )
        common.append_line(
            out / "peers.jsonl",
            {
                "experiment": "peers",
                "method": name,
                "target": setup.target_cfg.name,
                "head": heads.head_hash(weights.resolve_head(FLAGS.head)),
                "tree": str(method.cfg.tree),
                "max_new_tokens": n_new,
                "n_prompts": len(one.tokens),
                "n_same": n_same,
                "tokens_per_second_with_prefill": one.speed,
                "over_plain": one.speed / first.speed,
                "over_transformers": one.speed / theirs.speed,
                "seconds": one.seconds,
                "n_tokens": [len(tokens) for tokens in one.tokens],
                "device": common.describe_device(),
                "jax": jax.__version__,
                "commit": common.commit(),
            },
        )
    Console(width=None if Console().is_terminal else 120).print(table)


if __name__ == "__main__":
    common.run(main)

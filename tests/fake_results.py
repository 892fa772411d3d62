"""Made-up result lines of every variant: test data, never results.

`python -m tests.fake_results FILE` writes them, to look at what a full report is like.
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from eagle_jax import metrics
from eagle_jax.metrics import Turn

TARGET = "TEST DATA, no model"
SETS = ("alpaca", "gsm8k", "humaneval", "mt_bench", "qa", "sum")

# Variant: chance that a step's first token is accepted, factor per depth, tree, its cost.
CHAIN = {"kind": "dynamic", "width": 1, "depth": 5, "n_nodes": 6, "paths": []}
STATIC = {"kind": "static", "width": 4, "depth": 5, "n_nodes": 26, "paths": [[0], [1]]}
DYNAMIC = {"kind": "dynamic", "width": 6, "depth": 5, "n_nodes": 26, "paths": []}
PLAIN = {"kind": "dynamic", "width": 1, "depth": 0, "n_nodes": 1, "paths": []}
VARIANTS: dict[str, tuple[float, float, dict[str, Any]]] = {
    "vanilla": (0.0, 0.0, PLAIN),
    "token": (0.40, 0.80, STATIC),
    "feature": (0.50, 0.85, STATIC),
    "feature_unshifted": (0.55, 0.85, STATIC),
    "eagle1": (0.65, 0.88, STATIC),
    "eagle1_chain": (0.55, 0.85, CHAIN),
    "eagle1_no_noise": (0.64, 0.87, STATIC),
    "eagle1_fixed": (0.60, 0.88, STATIC),
    "eagle2": (0.70, 0.90, DYNAMIC),
    "eagle2_no_value": (0.66, 0.87, DYNAMIC),
    "eagle2_no_rerank": (0.68, 0.89, DYNAMIC),
    "eagle2_no_both": (0.62, 0.86, DYNAMIC),
    "hass": (0.72, 0.93, DYNAMIC),
    "no_feature_loss": (0.69, 0.96, DYNAMIC),  # not above eagle2 by much
    "fused": (0.71, 0.88, DYNAMIC),
    "fused_chain": (0.58, 0.84, CHAIN),
    "eagle3": (0.76, 0.98, DYNAMIC),
    "eagle3_chain": (0.66, 0.98, CHAIN),
    "eagle3_ttt1": (0.71, 0.88, DYNAMIC),
    "eagle3_ttt3": (0.76, 0.94, DYNAMIC),
    "eagle3_ttt7": (0.75, 0.98, DYNAMIC),
    "medusa": (0.50, 0.75, STATIC),
    "lookup": (0.25, 0.90, CHAIN),
    "small_draft_chain": (0.60, 0.95, CHAIN),
}


def line(
    variant: str,
    task: str,
    seed: int = 0,
    n_prompts: int = 10,
    temperature: float = 0.0,
    batch: int = 1,
    supervised_tokens: int = 50_000,
    **changes: Any,
) -> dict[str, Any]:
    """One line with every key a report can use; numbers from a simulated decoding."""
    first, factor, tree = VARIANTS[variant]
    rng = np.random.default_rng([seed, SETS.index(task), *variant.encode()])
    boost = 1 + 0.06 * (SETS.index(task) - 2.5) - 0.15 * temperature
    depth, n_nodes = tree["depth"], tree["n_nodes"]
    rate = min(first * boost * (0.8 + 0.04 * np.log2(supervised_tokens / 5000)), 0.97)
    answers, plain = [], []
    for _ in range(n_prompts):
        own = rate * rng.uniform(0.85, 1.1)
        ours, theirs = _decode(rng, min(own, 0.98), factor, depth, n_nodes, batch)
        answers.append([ours])
        plain.append([theirs])
    alpha = [None if np.isnan(a) else a for a in metrics.alpha(answers, depth)]
    head = None if variant in ("vanilla", "lookup") else f"{variant}{supervised_tokens}"
    row = {
        "variant": variant,
        "target": TARGET,
        "questions": "test data",
        "preset": "test",
        "temperature": temperature,
        "max_new_tokens": 64,
        "batch": batch,
        "dtype": "float32",
        "tree": tree,
        "head": head,
        "config": {"train": {"supervised_tokens": supervised_tokens}},
        "seed": 0,
        "device": "none",
        "task": task,
        "n_prompts": n_prompts,
        "n_identical": n_prompts if temperature == 0 else None,
        "n_near_tie": 0 if temperature == 0 else None,
        "n_looping": 1,
        "tau_pooled": metrics.tau_pooled(answers),
        "tau_by_prompt": metrics.tau_by_prompt(answers),
        "tau_without_loops": metrics.tau_pooled(answers),
        "acceptance_by_depth": metrics.acceptance_by_depth(answers, depth),
        "tokens_per_second": metrics.tokens_per_second(answers, False),
        "baseline_tokens_per_second": metrics.tokens_per_second(plain, False),
        "speedup": metrics.speedup(answers, plain, False),
        "speedup_with_prefill": metrics.speedup(answers, plain, True),
        "by_prompt": metrics.by_prompt(answers),
        "baseline_by_prompt": metrics.by_prompt(plain),
        "fingerprint": f"{variant}-{task}-{temperature}-{batch}-{supervised_tokens}",
        "commit": "testdata0000",
        "tokens_per_target_gflop": 3.7 * metrics.tau_pooled(answers) / n_nodes,
    }
    if variant != "vanilla":
        row |= {"draft_cost": 0.12, "verify_cost": 1 + 0.04 * n_nodes}
        row |= {"alpha": alpha} if tree is CHAIN else {}
    if head:
        row |= {
            "trained_tokens": supervised_tokens,
            "n_trainable": 9_800_000,
            "train_flops": 6.0 * 9.8e6 * supervised_tokens,
            "calibration": {k: _bins(rng, 2 - first) for k in ("edge", "path")},
            "learning_curve": [
                {"tokens": t, "accuracy": [first * (1 - 0.5 * 0.7**i), 0.3]}
                for i, t in enumerate(range(5_000, supervised_tokens + 1, 5_000))
            ],
        }
        row["tree_shape"] = _shape(rng, rate, tree)
    return row | changes


def _decode(
    rng: np.random.Generator,
    rate: float,
    factor: float,
    depth: int,
    n_nodes: int,
    batch: int,
) -> tuple[Turn, Turn]:
    accepted = []
    while sum(accepted) + len(accepted) < 63:
        n = 0
        while n < depth and rng.random() < rate * factor**n:
            n += 1
        accepted.append(n)
    emitted = [n + 1 for n in accepted]
    speed = 0.03 * rng.uniform(0.9, 1.1)
    cost = speed * (1 + 0.025 * (n_nodes - 1) * batch**0.3 + 0.08 * depth)
    tokens = list(range(1 + sum(emitted)))
    ours = Turn(tokens, accepted, emitted, cost * len(accepted), 0.4)
    theirs = Turn(tokens, [0] * (len(tokens) - 1), [1] * (len(tokens) - 1), 0.0, 0.4)
    return ours, theirs._replace(seconds=speed * (len(tokens) - 1))


def _bins(rng: np.random.Generator, overconfident: float) -> dict[str, list[Any]]:
    n = rng.integers(5, 300, 20).tolist()
    confidence = [(i + 0.5) / 20 for i in range(20)]
    accepted = [c**overconfident for c in confidence]
    n[3], confidence[3], accepted[3] = 0, None, None  # type: ignore[call-overload]
    return {"n": n, "confidence": confidence, "accepted": accepted}


def _shape(
    rng: np.random.Generator, rate: float, tree: dict[str, Any]
) -> dict[str, list[list[float]]]:
    depth, width = tree["depth"], min(tree["width"], 10)
    nodes = np.zeros((depth, 10))
    nodes[:, :width] = width * 0.6 ** (np.arange(depth)[:, None] + np.arange(width))
    accepted = np.zeros((depth, 10))
    accepted[:, :width] = rate ** (1 + np.arange(depth)[:, None]) * 0.4 ** np.arange(
        width
    )
    return {"nodes": nodes.tolist(), "accepted": accepted.tolist()}


def tuned(variant: str, task: str = "qa", **fields: Any) -> dict[str, Any]:
    """A line whose config has three unrolled steps and these fields, dotted with __."""
    asked = fields.pop("supervised_tokens", 20_000)
    tree, n_prompts = fields.pop("tree", None), fields.pop("n_prompts", 5)
    config: dict[str, Any] = {
        "taps": [],
        "draft": {"fc_norm": False, "norm_output": False},
        "train": {"ttt_steps": 3, "supervised_tokens": asked, "mask": "label"},
    }
    for name, value in fields.items():
        *groups, last = name.split("__")
        (config[groups[0]] if groups else config)[last] = value
    row = line(variant, task, n_prompts=n_prompts, supervised_tokens=asked)
    row |= {"config": config, "trained_tokens": asked + 137}
    row |= {"tree": tree} if tree else {}
    return row | {"fingerprint": json.dumps([variant, task, row["tree"], config])}


def chain(depth: int) -> dict[str, Any]:
    return CHAIN | {"depth": depth, "n_nodes": depth + 1}


def sweep(task: str = "qa") -> list[dict[str, Any]]:
    """EAGLE-3 with one setting changed at a time, and one line in which two are."""
    return [
        *(tuned(f"eagle3_ttt{i}", task) for i in (1, 3, 7)),
        *(tuned("eagle3", task, taps=taps) for taps in ([2], [2, 15])),
        tuned("eagle3", task, draft__fc_norm=True),
        tuned("eagle3", task, train__mask="official"),
        tuned("eagle3", task, train__mask="official", taps=[2]),
        *(tuned("eagle3", task, supervised_tokens=n) for n in (50_000, 100_000)),
        *(
            tuned("eagle3", task, supervised_tokens=100_000, tree=chain(depth))
            for depth in (1, 2, 3)
        ),
    ]


def full() -> list[dict[str, Any]]:
    """Every variant at both temperatures, batches, and sweeps."""
    rows = [
        line(variant, task, temperature=temperature)
        for temperature in (0.0, 1.0)
        for variant in VARIANTS
        for task in SETS
        if not (temperature and variant == "medusa")
    ]
    rows += [
        line(variant, task, batch=batch)
        for variant in ("eagle1", "eagle1_chain", "eagle3", "eagle3_chain")
        for batch in (2, 4, 8)
        for task in SETS
    ]
    rows += [
        line("eagle3", task, supervised_tokens=tokens)
        for tokens in (6_250, 12_500, 25_000)
        for task in SETS
    ]
    return rows + [row for task in SETS for row in sweep(task)]


if __name__ == "__main__":
    Path(sys.argv[1]).write_text("".join(json.dumps(row) + "\n" for row in full()))

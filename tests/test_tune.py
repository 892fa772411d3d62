"""`tune`: what it predicts from a trace is what decoding does."""

import dataclasses
import functools

import drivers
import jax
import numpy as np
import pytest
import tiny

from eagle_jax import decode, metrics
from eagle_jax import tree as tree_lib
from eagle_jax.config import DecodeConfig, TreeConfig
from eagle_jax.metrics import Turn
from experiments import tune
from experiments.evaluator import Method
from experiments.tune import Costs, Record

T = tiny.target_config(vocab_size=40)
HEAD = tiny.draft_config(T, "eagle1")
PROMPTS = [[3, 1, 4, 1, 5], [9, 2, 6]]
NEW = 24


@functools.cache
def method() -> Method:
    """A draft that is often right: the target's only layer but for some noise."""
    one = dataclasses.replace(T, n_layers=1, taps=(0,))
    made = tiny.params(1, one, HEAD)
    # The target's law hangs on its embedding alone, so the draft can guess it.
    made["target"]["layers"] = jax.tree.map(lambda x: x * 0.3, made["target"]["layers"])
    return Method(made, DecodeConfig(one, HEAD))


@functools.cache
def records() -> list[Record]:
    return [tune.record(method(), prompt, NEW, 0) for prompt in PROMPTS]


def decoded(tree: TreeConfig) -> tuple[list[list[int]], float]:
    cfg = dataclasses.replace(method().cfg, tree=tree)
    rows, turns = [], []
    for prompt in PROMPTS:
        state = decode.start(method().params, [prompt], cfg, NEW)
        _, out = decode.jit_loop(method().params, state, cfg, NEW)
        rows += decode.unpack(out)
        emitted = [int(n) for n in np.asarray(out.n_emitted[0]) if n >= 0]
        turns.append([Turn(rows[-1], [], emitted, 1.0, 1.0)])
    return rows, metrics.tau_pooled(turns)


@pytest.mark.parametrize(
    "tree",
    [
        tree_lib.chain(3),
        TreeConfig(width=3, depth=3, n_nodes=7),
        TreeConfig(width=8, depth=2, n_nodes=20),
    ],
    ids=["chain", "narrow", "wide"],
)
def test_simulated_tau_is_that_of_decoding(tree):
    found = tune.dynamic_acceptance(records(), tree.width, tree.depth, [tree.n_nodes])
    rows, tau = decoded(tree)
    assert [record.said for record in records()] == rows
    assert tau > 1.02
    np.testing.assert_allclose(tune.simulate(found[tree.n_nodes]), tau, rtol=1e-6)


def test_simulated_tau_of_a_static_tree_is_that_of_decoding():
    found = tune.rank_paths(records())
    tree = tune.best_static(found, 9)
    assert 1 < tree.n_nodes <= 9
    _, tau = decoded(tree)
    np.testing.assert_allclose(
        tune.simulate(tune.static_acceptance(found, tree)), tau, rtol=1e-6
    )


def test_the_best_static_tree_holds_the_most_followed_paths():
    found = [[(0,), (0, 0), (1,), (0, 0, 2), ()]]
    tree = tune.best_static(found, 4)
    # Followed: 0 by 4, 00 by 2, 1 by 1; 000, 001 and 002 by 1 as well, but deeper.
    assert tree.paths == ((0,), (1,), (0, 0))


def test_a_jump_takes_the_bonus_token_along_and_ends_with_the_answer():
    assert tune.simulate([np.array([2, 0, 0, 0, 1])]) == 5 / 3
    assert tune.simulate([np.array([3]), np.array([0, 0])]) == 1.0


def test_costs_add_up_levels_between_measured_widths():
    costs = Costs({2: 10.0, 4: 12.0, 8: 20.0}, {1: 1.0, 4: 2.0})
    assert costs.step(tree_lib.chain(1)) == 10.0
    # Six nodes are verified in eight rows; five times six are not padded.
    assert costs.step(TreeConfig(width=4, depth=3, n_nodes=6)) == 20.0 + 2 * 2.0
    five = costs._replace(batch=5)
    assert five.step(TreeConfig(width=4, depth=3, n_nodes=6)) == 16.0 + 2 * 2.0
    static = tree_lib.static(((0,), (1,), (0, 0), (1, 0), (0, 0, 0)))
    assert tune.level_widths(static) == [2, 1]
    np.testing.assert_allclose(costs.step(static), 20.0 + (1 + 1 / 3) + 1)


def test_the_driver_writes_a_config_that_names_the_fastest_tree(tmp_path):
    out, _ = drivers.trained()
    flags = [
        *drivers.target_flags(),
        f"--head={drivers.only(out / 'heads')}",
        f"--questions={drivers.home() / 'questions'}",
        *("--prompts_per_set=1", "--max_new_tokens=6", "--rounds=1", "--repeats=1"),
        *("--finalists=1", f"--out={tmp_path}"),
    ]
    said = drivers.run("tune", *flags)
    rows = drivers.read_lines(tmp_path / "tune.jsonl")
    chosen = [row for row in rows if row["is_chosen"]]
    assert len(chosen) == 1 and len(rows) >= 1
    best = max(rows, key=lambda row: row["tokens_per_second"])
    assert best["is_chosen"] and "plain decoding" in said
    scope: dict = {}
    exec((tmp_path / "tuned.py").read_text(), scope)
    tree = scope["get_config"]().tree
    assert dataclasses.asdict(tree) == {
        **chosen[0]["tree"],
        "paths": tuple(map(tuple, chosen[0]["tree"]["paths"])),
    }

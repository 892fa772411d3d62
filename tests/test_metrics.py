"""`metrics`: literal counts in, the numbers of a result line out."""

import math
from typing import Any

import jax
import numpy as np
import pytest

from eagle_jax import metrics
from eagle_jax.decode import StepInfo
from eagle_jax.metrics import Turn
from eagle_jax.tree import Tree
from tests import tiny


def turn(
    accepted: list[int],
    *,
    tokens: list[int] | None = None,
    cut: int = 0,
    seconds: float = 1.0,
    prefill: float = 0.5,
) -> Turn:
    """An answer of steps that accepted so much; `cut` tokens of the last are dropped."""
    emitted = [n + 1 for n in accepted]
    if cut:
        emitted[-1] -= cut
    n_tokens = 1 + sum(emitted)
    return Turn(
        tokens=list(range(n_tokens)) if tokens is None else tokens,
        n_accepted=accepted,
        n_emitted=emitted,
        seconds=seconds,
        prefill_seconds=prefill,
    )


LOOP = [7, 8, 9] * 10
# Ten steps that emit 30 tokens, and two steps that emit 2; 32 / 12 and (3 + 1) / 2.
UNEVEN = [[turn([2] * 10)], [turn([0, 0])]]


def test_tau_counts_the_bonus_token():
    assert metrics.tau_pooled([[turn([5] * 10)]]) == 6.0  # R601, always right
    assert metrics.tau_pooled([[turn([0] * 10)]]) == 1.0  # never right


def test_tau_leaves_out_the_token_of_the_prefill():
    one_step = [[turn([5])]]  # seven tokens, one of which cost no step (R606)
    assert len(one_step[0][0].tokens) == 7
    assert metrics.tau_pooled(one_step) == 6.0


def test_tau_pooled_weighs_steps_and_tau_by_prompt_weighs_prompts():
    assert metrics.tau_pooled(UNEVEN) == pytest.approx(32 / 12)
    assert metrics.tau_by_prompt(UNEVEN) == pytest.approx((3 + 1) / 2)


def test_tau_joins_the_turns_of_one_prompt():
    two_turns = [[turn([2] * 10), turn([0, 0])]]
    assert metrics.tau_by_prompt(two_turns) == pytest.approx(32 / 12)


def test_tau_counts_what_was_delivered_and_acceptance_what_was_accepted():
    cut = [[turn([3, 3], cut=2)]]
    assert metrics.tau_pooled(cut) == (4 + 2) / 2
    assert metrics.acceptance_by_depth(cut, 3) == [1.0, 1.0, 1.0]


def test_prompts_whose_answers_loop_are_left_out():
    good, bad = turn([1, 1]), turn([5, 5], tokens=LOOP)
    answers = [[good], [good, bad], [bad]]
    assert metrics.without_loops(answers) == [[good]]
    assert metrics.tau_pooled(metrics.without_loops(answers)) == 2.0


def test_acceptance_by_depth_counts_steps_that_got_at_least_so_far():
    answers = [[turn([0, 1, 3])], [turn([1])]]
    assert metrics.acceptance_by_depth(answers, 4) == [0.75, 0.25, 0.25, 0.0]


def test_alpha_is_conditional_and_acceptance_is_not():
    # Of 1000 steps 700 accept a token, 490 two and 343 three: 0.7 at each place (R607).
    accepted = [3] * 343 + [2] * 147 + [1] * 210 + [0] * 300
    answers = [[turn(accepted)]]
    assert metrics.alpha(answers, 3) == pytest.approx([0.7, 0.7, 0.7])
    by_depth = metrics.acceptance_by_depth(answers, 3)
    assert by_depth == pytest.approx([0.7, 0.49, 0.343])


def test_alpha_of_a_depth_that_no_step_reached_is_no_number():
    first, second, third = metrics.alpha([[turn([1, 0])]], 3)
    assert (first, second) == (0.5, 0.0)
    assert math.isnan(third)


def test_speed_adds_up_the_turns_of_a_prompt_and_averages_prompts():
    slow = [turn([0] * 4, seconds=1.0), turn([0] * 16, seconds=4.0)]
    fast = [turn([1] * 10, seconds=1.0)]
    # 20 tokens in 5 s, 20 in 1 s; the prefill's token and time are not counted.
    assert metrics.tokens_per_second([slow, fast], with_prefill=False) == (4 + 20) / 2


def test_speed_with_prefill_counts_its_token_and_its_time():
    answers = [[turn([0] * 9, seconds=1.5, prefill=0.5)]]
    assert metrics.tokens_per_second(answers, with_prefill=False) == 9 / 1.5
    assert metrics.tokens_per_second(answers, with_prefill=True) == 10 / 2.0


@pytest.mark.parametrize(
    "answers", [[], [[]], [[turn([])]]], ids=["no prompt", "no turn", "no step"]
)
def test_nothing_measured_is_no_number_and_no_crash(answers):
    # R409; an answer without a step is one whose first token ends it.
    assert math.isnan(metrics.tau_pooled(answers))
    assert math.isnan(metrics.tau_by_prompt(answers))
    assert math.isnan(metrics.tokens_per_second(answers, with_prefill=False))
    assert all(map(math.isnan, metrics.acceptance_by_depth(answers, 5)))
    assert len(metrics.alpha(answers, 5)) == 5
    assert all(map(math.isnan, metrics.alpha(answers, 5)))


def test_a_prompt_without_a_step_does_not_dilute_the_others():
    answers = [[turn([])], [turn([2])]]
    assert metrics.tau_by_prompt(answers) == metrics.tau_pooled(answers) == 3.0
    assert metrics.tokens_per_second(answers, with_prefill=False) == 3.0


NOISE = [11, 5, 3, 17, 2, 13]


@pytest.mark.parametrize(
    ("tokens", "looping"),
    [
        ([4] * 24, True),
        ([4] * 23, False),  # shorter than the least tail
        (NOISE + [4] * 24, True),
        ([4] * 30 + [5], False),  # it got out of the loop
        ([1, 2] * 12, True),
        ([2] + [1, 2] * 12, True),  # the phrase begins anywhere
        (list(range(32)) * 3, True),
        (list(range(32)) * 2, False),  # twice is no loop
        (list(range(33)) * 4, False),  # longer than the longest phrase
        (list(range(10)) * 2 + list(range(9)) + [99], False),
        (list(range(100)), False),
        ([], False),
    ],
)
def test_loops_finds_a_phrase_that_stands_three_times_at_the_end(tokens, looping):
    assert metrics.loops(tokens) is looping


# Bootstrap ---------------------------------------------------------------------------


def test_resample_draws_prompts_with_replacement_and_repeats_with_its_seed():
    seen = metrics.resample(lambda at: float(len(set(at))), 6, seed=3, draws=400)
    again = metrics.resample(lambda at: float(len(set(at))), 6, seed=3, draws=400)
    other = metrics.resample(lambda at: float(len(set(at))), 6, seed=4, draws=400)
    assert (seen == again).all() and (seen != other).any()
    # Distinct prompts among n of n: n (1 - (1 - 1/n)^n), here 3.99 with spread 0.75.
    assert seen.mean() == pytest.approx(6 * (1 - (5 / 6) ** 6), abs=0.15)


def test_interval_of_a_mean_is_that_of_the_exact_bootstrap_law():
    # Two prompts, taus 1 and 3: a draw of two gives 1, 2 or 3 with 1/4, 1/2, 1/4.
    answers = [[turn([0] * 4)], [turn([2] * 4)]]
    drawn = metrics.resample(
        lambda at: metrics.tau_pooled([answers[i] for i in at]), 2, seed=0, draws=4000
    )
    values, counts = np.unique(drawn, return_counts=True)
    assert values.tolist() == [1, 2, 3]
    # Four standard errors of a share of 4000 draws.
    assert counts / 4000 == pytest.approx([0.25, 0.5, 0.25], abs=0.03)
    assert metrics.interval(drawn) == (1, 3)
    assert metrics.interval(drawn, level=0.4) == (2, 2)  # quantiles 0.3 and 0.7


def test_interval_cuts_the_same_share_off_both_ends_and_skips_what_is_no_number():
    drawn = np.arange(1001.0)
    assert metrics.interval(drawn) == pytest.approx((25, 975))
    assert metrics.interval(np.append(drawn, [np.nan, np.inf])) == pytest.approx(
        (25, 975)
    )
    assert all(map(math.isnan, metrics.interval(np.array([np.nan]))))


def test_intervals_cover_the_truth_as_often_as_they_say():
    rng = np.random.default_rng(0)
    covered = 0
    for seed in range(100):
        sample = rng.normal(size=40)
        low, high = metrics.interval(
            metrics.resample(lambda at, s=sample: s[at].mean(), 40, seed, draws=400)
        )
        covered += low < 0 < high
    assert 88 <= covered <= 99  # 95 of 100, three standard errors of 2.2


def test_speedup_intervals_keep_each_prompt_with_its_own_baseline():
    # Every prompt is exactly twice as fast, while their speeds differ a hundredfold: only
    # a bootstrap that draws both methods together knows that the ratio is certain.
    seconds = [0.1, 1.0, 3.0, 10.0]
    plain = [[turn([0] * 20, seconds=s, prefill=0.0)] for s in seconds]
    fast = [[turn([1] * 10, seconds=s / 2, prefill=0.0)] for s in seconds]
    found = metrics.intervals(fast, plain, seed=1)
    assert found["speedup"] == pytest.approx((2, 2))
    assert found["tau_pooled"] == (2, 2)
    assert metrics.speedup(fast, plain, with_prefill=False) == pytest.approx(2)


def test_one_prompt_gives_no_interval_and_unequal_samples_are_refused():
    one = [[turn([1] * 5)]]
    assert all(math.isnan(low) for low, _ in metrics.intervals(one, one, 0).values())
    with pytest.raises(ValueError, match="same prompts, got 1 and 0"):
        metrics.intervals(one, [], 0)


def test_by_prompt_holds_what_tau_and_speed_are_made_of():
    answers = [[turn([2] * 10, seconds=2.0), turn([0, 0], seconds=1.0)], [turn([1])]]
    sums = metrics.by_prompt(answers)
    assert sums == {
        "turns": [2, 1],
        "steps": [12, 1],
        "emitted": [32, 2],
        "tokens": [32, 2],
        "seconds": [3.0, 1.0],
        "prefill_seconds": [1.0, 0.5],
    }
    assert sum(sums["emitted"]) / sum(sums["steps"]) == metrics.tau_pooled(answers)


# Predictions and costs ---------------------------------------------------------------


@pytest.mark.parametrize(("a", "k", "c"), [(0.7, 5, 0.1), (0.2, 1, 0.5), (0.9, 8, 0.0)])
def test_predicted_speedup_of_a_constant_rate_is_the_closed_formula(a, k, c):
    expected = (1 - a ** (k + 1)) / ((1 - a) * (k * c + 1))  # arXiv:2211.17192, 3.8
    acceptance = [a**d for d in range(1, k + 1)]
    assert metrics.predicted_speedup(acceptance, c) == pytest.approx(expected)


def test_predicted_speedup_is_what_a_simulated_clock_measures():
    rng = np.random.default_rng(2)
    alpha, depth, c, verify = [0.8, 0.5, 0.6], 3, 0.2, 1.7
    accepted, clock, tokens = [], 0.0, 0
    for _ in range(20_000):
        n = 0
        while n < depth and rng.random() < alpha[n]:
            n += 1
        accepted.append(n)
        clock += verify + depth * c
        tokens += n + 1
    by_depth = metrics.acceptance_by_depth([[turn(accepted)]], depth)
    predicted = metrics.predicted_speedup(by_depth, c, verify)
    assert predicted == pytest.approx(tokens / clock)


def test_forward_flops_are_two_for_every_weight_a_token_meets_plus_attention():
    cfg = tiny.target_config()
    params = tiny.params(0, cfg)["target"]
    arrays = [*jax.tree.leaves(params["layers"]), params["head"]]
    weights = sum(w.size for w in arrays if w.ndim > 1)
    assert metrics.forward_flops(cfg, 1, 0.0) == 2 * weights
    # One token and 10 keys: scores and mixing are two [H, C] x [C, 10] products a layer.
    attention = cfg.n_layers * 2 * (2 * cfg.n_heads * cfg.head_dim * 10)
    assert metrics.forward_flops(cfg, 1, 10.0) == 2 * weights + attention
    assert metrics.forward_flops(cfg, 7, 10.0) == 7 * (2 * weights + attention)
    per_gflop = metrics.tokens_per_target_gflop(2.5, cfg, 7, 10.0)
    assert per_gflop == pytest.approx(2.5e9 / (7 * (2 * weights + attention)))


# Trees -------------------------------------------------------------------------------


def simulated(
    rng: np.random.Generator, n_steps: int, overconfident: float = 1.0
) -> list[StepInfo]:
    """Steps over the six-node tree of `tree.py` in two rows, the second of which stops.

    Of the children of an accepted node at most one is accepted, each with its own
    probability, which the draft states raised to the power 1 / `overconfident`.
    """
    parents = np.array([0, 0, 0, 1, 1, 3])
    children = {n: [c for c in range(1, 6) if parents[c] == n] for n in range(6)}
    infos = []
    for i in range(n_steps):
        share = rng.dirichlet([1, 1, 1], size=(2, 6))
        path, n_accepted = np.zeros((2, 4), int), np.zeros(2, int)
        truth = np.ones((2, 6))
        for row in range(2):
            for below in children.values():
                for rank, child in enumerate(below):
                    truth[row, child] = share[row, parents[child], rank]
            at = 0
            while children[at]:
                u = rng.random() - np.cumsum(truth[row, children[at]])
                hit = np.flatnonzero(u < 0)
                if not len(hit):
                    break
                at = children[at][hit[0]]
                n_accepted[row] += 1
                path[row, n_accepted[row]] = at
        live = np.array([1, i < n_steps // 2])
        depths = np.array([0, 1, 1, 2, 2, 3])
        nodes: list[Any] = [np.zeros((2, 6), int), np.stack([parents] * 2)]
        nodes += [np.stack([depths] * 2), np.log(truth) / overconfident]
        step: list[Any] = [np.zeros((2, 4), int), live * (n_accepted + 1)]
        step += [live * n_accepted, Tree(*nodes), path * live[:, None]]
        infos.append(StepInfo(*step))
    return infos


def by_hand(infos: list[StepInfo], kind: str) -> list[tuple[float, bool]]:
    """Every node's confidence and whether it was accepted, node by node."""
    found = []
    for info in infos:
        for row in range(2):
            if not info.n_emitted[row]:
                continue
            kept = set(info.path[row, : info.n_accepted[row] + 1].tolist())
            for node in range(1, 6):
                parent = int(info.tree.parents[row, node])
                if kind == "edge" and parent not in kept:
                    continue
                value, at = 0.0, node
                while at:
                    value += info.tree.log_q[row, at]
                    at = int(info.tree.parents[row, at]) if kind == "path" else 0
                found.append((math.exp(value), node in kept))
    return found


@pytest.mark.parametrize("kind", ["edge", "path"])
def test_calibration_bins_every_node_by_its_confidence(kind):
    infos = simulated(np.random.default_rng(5), 40)
    found = metrics.calibration(metrics.drafts(infos), n_bins=4)[kind]
    nodes = by_hand(infos, kind)
    for i, (low, high) in enumerate([(0, 0.25), (0.25, 0.5), (0.5, 0.75), (0.75, 1)]):
        inside = [(q, ok) for q, ok in nodes if low <= q < high]
        assert found["n"][i] == len(inside) > 0
        assert found["confidence"][i] == pytest.approx(np.mean([q for q, _ in inside]))
        assert found["accepted"][i] == pytest.approx(np.mean([ok for _, ok in inside]))


def test_an_honest_draft_lies_on_the_diagonal_and_an_overconfident_one_below():
    for overconfident, biased in ((1.0, False), (3.0, True)):
        infos = simulated(np.random.default_rng(6), 1500, overconfident)
        for bins in metrics.calibration(metrics.drafts(infos), n_bins=5).values():
            gaps = [
                (q - share) / math.sqrt(q * (1 - q) / n)
                for n, q, share in zip(*bins.values(), strict=True)
                if n >= 200
            ]
            assert len(gaps) >= 2
            # Standard errors; the nodes of a step exclude each other, so fewer than these.
            assert (max(gaps) > 10) is biased
            assert biased or (min(gaps) > -4 and max(gaps) < 4)


def test_calibration_has_nulls_where_there_are_no_nodes_and_keeps_certainty():
    infos = simulated(np.random.default_rng(0), 1)
    certain: Any = np.zeros((2, 6))
    first_row: Any = np.array([1, 0])
    tree = infos[0].tree._replace(log_q=certain)
    sure = infos[0]._replace(tree=tree, n_emitted=first_row)
    bins = metrics.calibration(metrics.drafts([sure]), n_bins=20)["path"]
    assert bins["n"] == [0] * 19 + [5]
    assert bins["confidence"] == [None] * 19 + [1.0]
    with pytest.raises(ValueError, match="no steps"):
        metrics.drafts([])


def test_tree_shape_counts_nodes_by_depth_and_rank_and_adds_up_to_acceptance():
    infos = simulated(np.random.default_rng(7), 200)
    shape = metrics.tree_shape(metrics.drafts(infos), n_ranks=3)
    # Six-node tree: depth 1 has ranks 0, 1; depth 2 ranks 0, 1 (below node 1); depth 3 one.
    assert shape["nodes"] == [
        pytest.approx([1, 1, 0]),
        pytest.approx([1, 1, 0]),
        pytest.approx([1, 0, 0]),
    ]
    steps = [
        int(info.n_accepted[row])
        for info in infos
        for row in range(2)
        if info.n_emitted[row]
    ]
    by_depth = metrics.acceptance_by_depth([[turn(steps)]], 3)
    assert [sum(row) for row in shape["accepted"]] == pytest.approx(by_depth)
    last = metrics.tree_shape(metrics.drafts(infos), n_ranks=1)
    assert [row[0] for row in last["nodes"]] == pytest.approx([2, 2, 1])

"""`metrics`: literal counts in, the numbers of a result line out."""

import math

import pytest

from eagle_jax import metrics
from eagle_jax.metrics import Turn


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

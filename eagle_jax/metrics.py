"""Counts to numbers, on the host. Every rate says what it averages over."""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class Turn(NamedTuple):
    """One answer as it was decoded.

    Args:
      tokens: new tokens, the first of which came from the prefill.
      n_accepted: drafted tokens each step accepted, before any cut at the end.
      n_emitted: tokens each step delivered, bonus token included, after such a cut.
      seconds: decoding without prefill; in a batch, this row's share.
      prefill_seconds: prompt to first token.
    """

    tokens: list[int]
    n_accepted: list[int]
    n_emitted: list[int]
    seconds: float
    prefill_seconds: float


Answer = list[Turn]  # the turns of one prompt


def tau_pooled(answers: Sequence[Answer]) -> float:
    """Tokens per step over all steps of all prompts, bonus token included."""
    steps = [n for answer in answers for turn in answer for n in turn.n_emitted]
    return float(np.mean(steps)) if steps else float("nan")


def tau_by_prompt(answers: Sequence[Answer]) -> float:
    """Mean over prompts of each prompt's own tokens per step."""
    own = [tau_pooled([a]) for a in answers if any(turn.n_emitted for turn in a)]
    return float(np.mean(own)) if own else float("nan")


def acceptance_by_depth(answers: Sequence[Answer], depth: int) -> list[float]:
    """Share of steps that accepted at least 1, 2, ..., `depth` drafted tokens."""
    steps = np.array(
        [n for answer in answers for turn in answer for n in turn.n_accepted]
    )
    if not len(steps):
        return [float("nan")] * depth
    return [float(np.mean(steps >= d)) for d in range(1, depth + 1)]


def alpha(answers: Sequence[Answer], depth: int) -> list[float]:
    """n-alpha of a *chain* draft: token n accepted, given all before it were.

    Position n has n self-made features in its input (EAGLE-1 §5, evaluation/alpha.py).
    """
    reached = [1.0, *acceptance_by_depth(answers, depth)]
    return [b / a if a else float("nan") for a, b in itertools.pairwise(reached)]


def tokens_per_second(answers: Sequence[Answer], with_prefill: bool) -> float:
    """Mean over prompts of new tokens per second, turns of a prompt added up.

    Without prefill, its token is not counted either. A ratio of two such means is the
    papers' speedup (evaluation/speed.py).
    """
    speeds = []
    for answer in answers:
        tokens = sum(len(t.tokens) - (not with_prefill) for t in answer)
        seconds = sum(t.seconds + with_prefill * t.prefill_seconds for t in answer)
        if tokens > 0 and seconds > 0:
            speeds.append(tokens / seconds)
    return float(np.mean(speeds)) if speeds else float("nan")


def loops(tokens: Sequence[int], least: int = 24) -> bool:
    """Tells whether an answer ends in a loop: its last tokens repeat one phrase.

    A phrase of up to 32 tokens that stands at the end three times or more, over at least
    `least` tokens. Such answers are easy to draft and flatter tau.
    """
    for period in range(1, 33):
        span = max(3 * period, least)
        if len(tokens) < span:
            continue
        tail = list(tokens[-span:])
        if tail[period:] == tail[:-period]:
            return True
    return False


def without_loops(answers: Sequence[Answer]) -> list[Answer]:
    """Drops prompts with an answer that loops."""
    return [a for a in answers if not any(loops(turn.tokens) for turn in a)]

"""Counts to numbers, on the host. Every rate says what it averages over."""

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from eagle_jax.config import TargetConfig
from eagle_jax.decode import StepInfo


class Turn(NamedTuple):
    """One answer as it was decoded.

    Args:
      tokens: new tokens, the first of which came from the prefill.
      n_accepted: drafted tokens each step accepted, before any cut at the end.
      n_emitted: tokens each step delivered, bonus token included, after such a cut.
      seconds: decoding without prefill; in a batch, this row's share.
      prefill_seconds: prompt to first token.
      n_prompt: tokens of the prompt, earlier turns included.
    """

    tokens: list[int]
    n_accepted: list[int]
    n_emitted: list[int]
    seconds: float
    prefill_seconds: float
    n_prompt: int = 0


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


def speedup(
    answers: Sequence[Answer], baseline: Sequence[Answer], with_prefill: bool
) -> float:
    """Ratio of mean tokens per second to plain decoding of the same prompts."""
    slow = tokens_per_second(baseline, with_prefill)
    return tokens_per_second(answers, with_prefill) / slow if slow else float("nan")


def prompt_draws(n: int, seed: int, draws: int = 1000) -> np.ndarray:
    """Bootstrap over prompts: `draws` samples of n of n prompts, with replacement.

    Indexing every sample with the same draws (a method and plain decoding, two methods)
    keeps prompts paired.

    Returns:
      [draws, n] prompt indices.
    """
    return np.random.default_rng(seed).integers(n, size=(draws, n))


def resample(
    statistic: Callable[[np.ndarray], float], n: int, seed: int, draws: int = 1000
) -> np.ndarray:
    """Returns the statistic of prompt indices [n] for each of `prompt_draws`."""
    return np.array([statistic(one) for one in prompt_draws(n, seed, draws)])


def interval(drawn: np.ndarray, level: float = 0.95) -> tuple[float, float]:
    """Percentile interval of bootstrap draws; draws without a number are left out."""
    real = drawn[np.isfinite(drawn)]
    if not len(real):
        return float("nan"), float("nan")
    tail = (1 - level) / 2
    low, high = np.quantile(real, [tail, 1 - tail])
    return float(low), float(high)


def intervals(
    answers: Sequence[Answer], baseline: Sequence[Answer], seed: int
) -> dict[str, tuple[float, float]]:
    """95 % intervals over prompts of tau and speedup; none from fewer than two prompts."""
    if len(answers) != len(baseline):
        raise ValueError(
            f"a speedup needs both methods on the same prompts, got {len(answers)} and "
            f"{len(baseline)} answers"
        )

    def pick(them: Sequence[Answer], at: np.ndarray) -> list[Answer]:
        return [them[i] for i in at]

    statistics: dict[str, Callable[[np.ndarray], float]] = {
        "tau_pooled": lambda at: tau_pooled(pick(answers, at)),
        "tau_by_prompt": lambda at: tau_by_prompt(pick(answers, at)),
        "speedup": lambda at: speedup(pick(answers, at), pick(baseline, at), False),
        "speedup_with_prefill": lambda at: speedup(
            pick(answers, at), pick(baseline, at), True
        ),
    }
    if len(answers) < 2:
        return {name: (float("nan"), float("nan")) for name in statistics}
    return {
        name: interval(resample(statistic, len(answers), seed))
        for name, statistic in statistics.items()
    }


def by_prompt(answers: Sequence[Answer]) -> dict[str, list[int] | list[float]]:
    """Sums of each prompt's turns: what every interval can be computed from later.

    `tokens` and `seconds` are those of decoding; the prefill adds one token a turn.
    """
    return {
        "turns": [len(a) for a in answers],
        "steps": [sum(len(t.n_emitted) for t in a) for a in answers],
        "emitted": [sum(sum(t.n_emitted) for t in a) for a in answers],
        "tokens": [sum(len(t.tokens) - 1 for t in a) for a in answers],
        "seconds": [sum(t.seconds for t in a) for a in answers],
        "prefill_seconds": [sum(t.prefill_seconds for t in a) for a in answers],
    }


def predicted_speedup(
    acceptance: Sequence[float], draft_cost: float, verify_cost: float = 1.0
) -> float:
    """Speedup that acceptance and costs allow: tokens of a step over its cost.

    With acceptance a, a^2, ..., a^k and `verify_cost` 1 this is the formula of speculative
    sampling, (1 + a + ... + a^k) / (1 + k c) (arXiv:2211.17192, theorem 3.8).

    Args:
      acceptance: share of steps that accept at least 1, 2, ... tokens, one entry for each
        draft pass (`acceptance_by_depth`).
      draft_cost: c, one draft pass over one plain step.
      verify_cost: the target's pass over the whole tree over one plain step. The formula
        takes it as free beyond 1, which holds only where memory bandwidth is the limit.
    """
    return (1 + sum(acceptance)) / (verify_cost + len(acceptance) * draft_cost)


def forward_flops(cfg: TargetConfig, n_tokens: int, context: float) -> float:
    """Floating point operations of one target forward, a multiply-add counted as two.

    Matrices and attention; norms, rotary embedding and softmax are left out, and so is
    what the compiler may spend on masked slots.

    Args:
      context: keys each token attends to, in the mean.
    """
    heads, kv_heads, C = cfg.n_heads, cfg.n_kv_heads, cfg.head_dim
    attention = cfg.d_model * (2 * heads + 2 * kv_heads) * C
    mlp = 3 * cfg.d_model * cfg.d_mlp
    scores = 2 * heads * C * context  # query times key, probability times value
    per_token = cfg.n_layers * (attention + mlp + scores)
    per_token += cfg.d_model * cfg.vocab_size
    return 2.0 * n_tokens * per_token


def context(answers: Sequence[Answer]) -> float:
    """Tokens before a new one, in the mean over all new tokens."""
    turns = [turn for answer in answers for turn in answer]
    n = [len(turn.tokens) for turn in turns]
    if not sum(n):
        return float("nan")
    before = [turn.n_prompt + len(turn.tokens) / 2 for turn in turns]
    return float(np.average(before, weights=n))


def tokens_per_target_gflop(
    tau: float, cfg: TargetConfig, n_nodes: int, context: float
) -> float:
    """Tokens a step emits for 10^9 operations of the target; the bonus token counts.

    Plain decoding (tau 1, one node) is the most any method can reach: speculation buys
    time with arithmetic.
    """
    return 1e9 * tau / forward_flops(cfg, n_nodes, context)


class Drafts(NamedTuple):
    """Trees as they were drafted and what was accepted of them, steps of rows in a list.

    Args:
      parents: [X, N] as in `Tree`.
      log_q: [X, N] confidence of each node given its parent (nats).
      accepted: [X, N] the node lies on the accepted path; the root always does.
    """

    parents: np.ndarray
    log_q: np.ndarray
    accepted: np.ndarray


def drafts(infos: Iterable[StepInfo]) -> Drafts:
    """Collects the steps of a `decode.trace`; finished rows are left out."""
    parts = []
    for info in infos:
        live = np.asarray(info.n_emitted) > 0
        path, n_accepted = np.asarray(info.path)[live], info.n_accepted[live]
        parents = np.asarray(info.tree.parents)[live]
        accepted = np.zeros(parents.shape, bool)
        on_path = np.arange(path.shape[1])[None] <= np.asarray(n_accepted)[:, None]
        row = np.broadcast_to(np.arange(len(path))[:, None], path.shape)
        accepted[row[on_path], path[on_path]] = True
        parts.append((parents, np.asarray(info.tree.log_q)[live], accepted))
    if not parts:
        raise ValueError("no steps were traced; decode at least one step")
    return Drafts(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))


def calibration(given: Drafts, n_bins: int = 20) -> dict[str, dict[str, list[Any]]]:
    """Draft confidence against the share of drafted nodes that was accepted, in bins.

    "edge": confidence of a node given its parent, over the nodes whose parent was accepted
    (only they were put to the test). "path": product of confidences from the root, over all
    nodes: what the dynamic tree takes for the chance of acceptance (EAGLE-2 §3.2).
    Bins of equal width over [0, 1]; a bin without nodes has nulls.
    """
    X, N = given.parents.shape
    log_path = np.array(given.log_q, np.float64)
    log_path[:, 0] = 0
    for node in range(1, N):  # parents stand before their children
        log_path[:, node] += log_path[np.arange(X), given.parents[:, node]]
    tested = np.take_along_axis(given.accepted, given.parents, axis=1)
    tested[:, 0] = False
    below = np.broadcast_to(np.arange(N) > 0, (X, N))
    return {
        "edge": _bins(np.exp(given.log_q[tested]), given.accepted[tested], n_bins),
        "path": _bins(np.exp(log_path[below]), given.accepted[below], n_bins),
    }


def _bins(
    confidence: np.ndarray, accepted: np.ndarray, n_bins: int
) -> dict[str, list[Any]]:
    bins = np.minimum((confidence * n_bins).astype(int), n_bins - 1)
    n = np.bincount(bins, minlength=n_bins)
    sums = np.bincount(bins, confidence, n_bins), np.bincount(bins, accepted, n_bins)
    means = [
        [float(x / k) if k else None for x, k in zip(total, n, strict=True)]
        for total in sums
    ]
    return {"n": n.tolist(), "confidence": means[0], "accepted": means[1]}


def tree_shape(given: Drafts, n_ranks: int = 10) -> dict[str, list[list[float]]]:
    """Where the nodes of a tree lie: by depth (from 1) and by rank among siblings (from 0).

    "nodes": mean number of nodes a step drafts there. "accepted": share of steps that
    accepted one there; a row adds up to the acceptance at that depth. Ranks from
    `n_ranks` - 1 on share the last column.
    """
    X, N = given.parents.shape
    depth = np.zeros((X, N), int)
    rank = np.zeros((X, N), int)
    children = np.zeros((X, N), int)
    row = np.arange(X)
    for node in range(1, N):
        parent = given.parents[:, node]
        depth[:, node] = depth[row, parent] + 1
        rank[:, node] = children[row, parent]
        children[row, parent] += 1
    shape = (depth.max() + 1, n_ranks)
    counts = []
    for which in (np.ones((X, N), bool), given.accepted):
        at = np.zeros(shape)
        place = depth[which], np.minimum(rank[which], n_ranks - 1)
        np.add.at(at, place, 1 / X)
        counts.append(at[1:].tolist())
    return {"nodes": counts[0], "accepted": counts[1]}

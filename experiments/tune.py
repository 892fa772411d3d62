"""Finds the fastest tree for this device, target, head and batch.

    python -m experiments.tune --head=out/heads/NAME        (on a quiet machine)

Two things are measured once: what a step costs, by the number of nodes and by the width of
each level of drafting; and what the draft would offer, and the target would say, at every
place of some answers. From these the speed of every tree follows by simulation: tokens per
step over seconds per step. The best few and the config's own tree are then run for real, in
turn, and the fastest is written as a config.
"""

import dataclasses
import itertools
import time
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from absl import flags
from jaxtyping import Bool, Float, Int
from rich.console import Console
from rich.table import Table

from eagle_jax import data, decode, draft, heads, metrics, weights
from eagle_jax import tree as tree_lib
from eagle_jax.config import PLAIN, DecodeConfig, RankPath, TreeConfig
from experiments import common, evaluator
from experiments.common import Progress, Setup
from experiments.evaluator import Method

FLAGS = flags.FLAGS
# The flags of ablate with the same defaults, so that a test may import both.
flags.DEFINE_string("head", "", "Folder of the head.", allow_override=True)
flags.DEFINE_string(
    "questions",
    "",
    "Folder of FastChat JSONL sets; default: embedded.",
    allow_override=True,
)
flags.DEFINE_integer(
    "prompts_per_set",
    0,
    "Prompts of each set that are answered; 0: two.",
    allow_override=True,
)
flags.DEFINE_integer(
    "max_new_tokens", 0, "New tokens per answer; 0: 64.", allow_override=True
)
flags.DEFINE_integer("batch", 1, "Prompts decoded together.", allow_override=True)
flags.DEFINE_integer("rounds", 7, "Timed rounds of the cost model.")
flags.DEFINE_integer("finalists", 4, "Trees that are run for real.")
flags.DEFINE_integer("repeats", 3, "Real runs of each finalist.")

NODES = (2, 4, 6, 8, 12, 16, 24, 32)  # of the cost model; others lie between
WIDTHS = (1, 2, 4, 8)
WIDEST = TreeConfig(width=8, depth=6, n_nodes=32)  # what is recorded at every place


class Costs(NamedTuple):
    """Seconds of the parts of a step.

    Args:
      forward: a step with one drafted level, by number of nodes.
      level: each further level of drafting, by width.
      batch: prompts decoded together.
    """

    forward: dict[int, float]
    level: dict[int, float]
    batch: int = 1

    def step(self, tree: TreeConfig) -> float:
        """Predicts the time of a step."""
        levels = level_widths(tree)
        drafting = sum(_between(self.level, width) for width in levels)
        rows = tree_lib.rows_for(tree.n_nodes, self.batch)
        return _between(self.forward, rows) + drafting


def _between(table: dict[int, float], x: int) -> float:
    return float(np.interp(x, list(table), list(table.values())))


def level_widths(tree: TreeConfig) -> list[int]:
    """Returns how many nodes each draft pass below the first level runs."""
    if tree.kind == "dynamic":
        return [tree.width] * (tree.depth - 1)
    parents = {path[:-1] for path in tree.paths if len(path) > 1}
    return [sum(len(p) == depth for p in parents) for depth in range(1, tree.depth)]


class Record(NamedTuple):
    """What the draft offered at every place of one answer, and what came.

    Args:
      tokens, parents, value: candidates of `WIDEST` (`draft.Candidates`), place by place;
        value is the log of the path's probability.
      said: the answer's tokens; place i is asked for said[i + 1], said[i + 2], ...
    """

    tokens: Int[np.ndarray, "P X"]
    parents: Int[np.ndarray, "P X"]
    value: Float[np.ndarray, "P X"]
    said: list[int]


def true_path(record: Record, place: int) -> list[int]:
    """Returns the candidates that spell what the target said, from the first level on."""
    tokens, parents = record.tokens[place], record.parents[place]
    path: list[int] = []
    for token in record.said[place + 1 :]:
        at = path[-1] if path else -1
        (found,) = np.nonzero((parents == at) & (tokens == token))
        if not len(found):
            break
        path.append(int(found[0]))
    return path


def ranks(widest: TreeConfig = WIDEST) -> Int[np.ndarray, " X"]:
    """Returns each candidate's rank among its siblings."""
    W = widest.width
    return np.concatenate([np.arange(W), np.tile(np.arange(W), (widest.depth - 1) * W)])


def levels(widest: TreeConfig = WIDEST) -> Int[np.ndarray, " X"]:
    """Returns each candidate's depth, from 1."""
    W = widest.width
    later = np.repeat(np.arange(2, widest.depth + 1), W * W)
    return np.concatenate([np.ones(W, np.int64), later])


def would_exist(
    parents: Int[np.ndarray, "P X"],
    value: Float[np.ndarray, "P X"],
    width: int,
    depth: int,
) -> Bool[np.ndarray, "P X"]:
    """Marks the candidates that a narrower and shallower growth would have as well.

    A candidate exists if its rank fits and its parent is among the `width` most valuable
    existing candidates of its level.
    """
    level, rank = levels(), ranks()
    exists = np.zeros(value.shape, bool)
    expanded = np.zeros(value.shape, bool)
    rows = np.arange(len(value))[:, None]
    for d in range(1, depth + 1):
        (at,) = np.nonzero((level == d) & (rank < width))
        above = parents[:, at]
        alive = (above < 0) | expanded[rows, np.maximum(above, 0)]
        exists[:, at] = alive
        worth = np.where(alive, value[:, at], -np.inf)
        order = np.argsort(-worth, axis=1, kind="stable")[:, :width]
        chosen = at[order]
        expanded[rows, chosen] = np.isfinite(np.take_along_axis(worth, order, axis=1))
    return exists


def dynamic_acceptance(
    records: list[Record], width: int, depth: int, sizes: list[int]
) -> dict[int, list[Int[np.ndarray, " P"]]]:
    """Returns accepted tokens at every place of every record, for each number of nodes."""
    out: dict[int, list[np.ndarray]] = {n: [] for n in sizes}
    for record in records:
        exists = would_exist(record.parents, record.value, width, depth)
        worth = np.where(exists, record.value, -np.inf)
        order = np.argsort(-worth, axis=1, kind="stable")
        place_of = np.empty_like(order)
        np.put_along_axis(place_of, order, np.arange(order.shape[1])[None], axis=1)
        n_places = len(record.said) - 1
        found = {n: np.zeros(n_places, np.int64) for n in sizes}
        for place in range(n_places):
            path = true_path(record, place)
            last = -1
            for d, node in enumerate(path, 1):
                if not exists[place, node]:
                    break
                last = max(last, int(place_of[place, node]))
                for n in sizes:
                    if last < n - 1:
                        found[n][place] = d
        for n in sizes:
            out[n].append(found[n])
    return out


def rank_paths(records: list[Record]) -> list[list[RankPath]]:
    """Returns the ranks of what the target said, place by place."""
    rank = ranks()
    return [
        [
            tuple(int(rank[node]) for node in true_path(record, place))
            for place in range(len(record.said) - 1)
        ]
        for record in records
    ]


def best_static(found: list[list[RankPath]], n_nodes: int) -> TreeConfig:
    """Returns the fixed tree whose paths the target follows most often."""
    counts: dict[RankPath, int] = {}
    for path in itertools.chain.from_iterable(found):
        for d in range(1, len(path) + 1):
            # A sibling of lower rank must be there too, so it is at least as useful.
            for lower in range(path[d - 1] + 1):
                prefix = (*path[: d - 1], lower)
                counts[prefix] = counts.get(prefix, 0) + 1
    ordered = sorted(counts, key=lambda p: (-counts[p], len(p), p))
    kept: set[RankPath] = set()
    for path in ordered:
        fits = all(path[:d] in kept for d in range(1, len(path)))
        if fits and len(kept) < n_nodes - 1:
            kept.add(path)
    return tree_lib.static(tuple(kept))


def static_acceptance(
    found: list[list[RankPath]], tree: TreeConfig
) -> list[Int[np.ndarray, " P"]]:
    """Returns accepted tokens at every place, for a fixed tree."""
    paths = set(tree.paths)

    def deepest(path: RankPath) -> int:
        return max(d for d in range(len(path) + 1) if d == 0 or path[:d] in paths)

    return [np.array([deepest(path) for path in places], int) for places in found]


def simulate(accepted: list[Int[np.ndarray, " P"]]) -> float:
    """Returns tau: decoding jumps from place to place, the bonus token counted."""
    n_tokens, n_steps = 0, 0
    for places in accepted:
        at = 0
        while at < len(places):
            jump = min(int(places[at]) + 1, len(places) - at)
            n_tokens, n_steps, at = n_tokens + jump, n_steps + 1, at + jump
    return n_tokens / max(n_steps, 1)


class Choice(NamedTuple):
    """A tree with its predicted tokens per step and seconds per step."""

    tree: TreeConfig
    tau: float
    seconds: float

    @property
    def speed(self) -> float:
        return self.tau / self.seconds


def choices(records: list[Record], costs: Costs) -> list[Choice]:
    """Predicts every tree, fastest first."""
    sizes = [n for n in range(2, NODES[-1] + 1) if n <= 12 or n % 2 == 0]
    out = []
    for width, depth in itertools.product(
        range(1, WIDEST.width + 1), range(1, WIDEST.depth + 1)
    ):
        smallest = TreeConfig(width=width, depth=depth, n_nodes=depth + 1)
        most = min(NODES[-1], 1 + smallest.n_candidates)
        fitting = [n for n in sizes if depth < n <= most]
        accepted = dynamic_acceptance(records, width, depth, fitting)
        for n in fitting:
            tree = TreeConfig(width=width, depth=depth, n_nodes=n)
            out.append(Choice(tree, simulate(accepted[n]), costs.step(tree)))
    found = rank_paths(records)
    for n in sizes:
        tree = best_static(found, n)
        if tree.n_nodes > 1:
            tau = simulate(static_acceptance(found, tree))
            out.append(Choice(tree, tau, costs.step(tree)))
    return sorted(out, key=lambda choice: -choice.speed)


jit_grow = jax.jit(draft.grow, static_argnames=("cfg", "tree"))


def record(method: Method, prompt: list[int], max_new_tokens: int, seed: int) -> Record:
    """Answers a prompt plainly and keeps what the draft offers at every place."""
    cfg = dataclasses.replace(method.cfg, tree=TreeConfig())
    state = decode.start(method.params, [prompt], cfg, max_new_tokens, seed)
    said, offers = [int(state.root[0])], []
    while not bool(state.done[0]) and len(said) < max_new_tokens:
        offers.append(
            jit_grow(method.params["draft"], state.draft, state.root, cfg.draft, WIDEST)
        )
        state, info = decode.jit_step(method.params, state, cfg)
        said.append(int(info.tokens[0, 0]))
    offers = jax.device_get(offers)
    empty = np.zeros((0, WIDEST.n_candidates))
    return Record(
        tokens=np.concatenate([empty.astype(int), *(o.tokens for o in offers)]),
        parents=np.concatenate([empty.astype(int), *(o.parents for o in offers)]),
        value=np.concatenate([empty, *(o.log_value for o in offers)]),
        said=said,
    )


def measure_costs(
    method: Method, prompt: list[int], batch: int, rounds: int, progress: Progress
) -> Costs:
    """Times whole steps of a few trees, in turn, and takes them apart.

    Steps of one level, with more and more nodes, are `forward`; what five levels take
    longer than one, at the same number of nodes, is four times `level`. So parts are timed
    inside a step, as they will be used.
    """
    # A target that never stops, so that all runs are equally long.
    endless = dataclasses.replace(method.cfg.target, eos_ids=())
    widest = max(WIDTHS)
    by_nodes = {
        n: TreeConfig(width=widest, depth=1 if n <= widest else 2, n_nodes=n)
        for n in NODES
    }
    by_width = {w: TreeConfig(width=w, depth=5, n_nodes=6) for w in WIDTHS}
    trees = [*by_nodes.values(), *by_width.values()]
    took: dict[TreeConfig, list[float]] = {tree: [] for tree in trees}
    for r in range(rounds + 1):
        for i, tree in enumerate(trees):
            cfg = dataclasses.replace(method.cfg, target=endless, tree=tree)
            seconds = _seconds_per_step(method.params, [prompt] * batch, cfg)
            if r:  # the first round compiles
                took[tree].append(seconds)
            progress.show(r * len(trees) + i + 1)
    median = {tree: float(np.median(seconds)) for tree, seconds in took.items()}
    # Two levels instead of one for big trees: one level is taken off again below.
    forward = {n: median[tree] for n, tree in by_nodes.items()}
    level = {w: (median[tree] - forward[6]) / 4 for w, tree in by_width.items()}
    forward = {
        n: seconds - level[widest] * (by_nodes[n].depth - 1)
        for n, seconds in forward.items()
    }
    return Costs(forward, level, batch)


def _seconds_per_step(
    params: Any, prompts: list[list[int]], cfg: DecodeConfig
) -> float:
    n_new = 33
    state = jax.block_until_ready(decode.start(params, prompts, cfg, n_new))
    began = time.perf_counter()
    _, out = jax.block_until_ready(decode.jit_loop(params, state, cfg, n_new))
    seconds = time.perf_counter() - began
    return seconds / int((np.asarray(out.n_emitted) >= 0).any(axis=0).sum())


def run_finalists(
    setup: Setup,
    method: Method,
    prompts: list[list[int]],
    trees: list[TreeConfig],
    progress: Progress,
) -> dict[TreeConfig, tuple[float, float]]:
    """Decodes all prompts with every tree, in turn; returns tokens/s and tau of each.

    Tokens per second: all new tokens over the sum of each batch's median time.
    """
    batches = [
        prompts[i : i + FLAGS.batch] for i in range(0, len(prompts), FLAGS.batch)
    ]
    seconds: dict[tuple[TreeConfig, int], list[float]] = {}
    turns: dict[TreeConfig, list[list[Any]]] = {tree: [] for tree in trees}
    n_done = 0
    for repeat in range(FLAGS.repeats):
        for b, group in enumerate(batches):
            for tree in trees:
                cfg = dataclasses.replace(method.cfg, tree=tree)
                new = evaluator.answer(
                    Method(method.params, cfg),
                    group,
                    FLAGS.max_new_tokens,
                    setup.cfg.seed,
                    setup.cfg.max_len,
                )
                spent = sum(turn.seconds for turn in new)
                seconds.setdefault((tree, b), []).append(spent)
                if not repeat:
                    turns[tree] += [[turn] for turn in new]
            n_done += 1
            progress.show(n_done)
    measured = {}
    for tree in trees:
        n_tokens = sum(len(turn.tokens) - 1 for (turn,) in turns[tree])
        total = sum(float(np.median(seconds[tree, b])) for b in range(len(batches)))
        measured[tree] = (n_tokens / total, metrics.tau_pooled(turns[tree]))
    return measured


def main() -> None:
    cfg = common.load_config()
    if not FLAGS.head:
        raise ValueError("--head needs the folder or hub name of a head")
    folder = weights.resolve_head(FLAGS.head)
    if min(FLAGS.batch, FLAGS.finalists, FLAGS.repeats, FLAGS.rounds) < 1:
        raise ValueError("batch, finalists, repeats and rounds must be at least 1")
    FLAGS.prompts_per_set = FLAGS.prompts_per_set or 2
    FLAGS.max_new_tokens = FLAGS.max_new_tokens or 64
    out = common.prepare_out()
    questions = data.read_questions(Path(FLAGS.questions or evaluator.QUESTIONS))
    setup = common.load_setup(cfg)
    method = evaluator.load_method(setup, folder)
    if method.cfg.draft.head not in ("eagle1", "eagle3", "small"):
        raise ValueError(
            f"{FLAGS.head} is a head of kind {method.cfg.draft.head}; tune works on heads "
            f"that grow trees from their own outputs"
        )
    prompts = [
        evaluator.first_prompt(setup, question)
        for asked in questions.values()
        for question in asked[: FLAGS.prompts_per_set]
    ]
    print(f"device   {common.describe_device()}, batch {FLAGS.batch}")
    n_trees = len(NODES) + len(WIDTHS)
    typical = sorted(prompts, key=len)[len(prompts) // 2]
    costs = measure_costs(
        method,
        typical,
        FLAGS.batch,
        FLAGS.rounds,
        Progress("cost model", (FLAGS.rounds + 1) * n_trees),
    )
    print_costs(costs)
    progress, records = Progress("trace", len(prompts)), []
    for i, prompt in enumerate(prompts):
        records.append(record(method, prompt, FLAGS.max_new_tokens, setup.cfg.seed))
        progress.show(i + 1)
    ranked = choices(records, costs)
    default = setup.cfg.tree
    finalists = _finalists(ranked, default)
    measured = run_finalists(
        setup,
        method,
        prompts,
        [PLAIN, *(choice.tree for choice in finalists)],
        Progress("finalists", FLAGS.repeats * -(-len(prompts) // FLAGS.batch)),
    )
    report(setup, costs, finalists, measured, out)


def _finalists(ranked: list[Choice], default: TreeConfig) -> list[Choice]:
    """The best of each kind that differ in more than a node, and the default."""
    kept: list[Choice] = []
    for choice in ranked:
        tree = choice.tree
        alike = any(
            (tree.kind, tree.width, tree.depth)
            == (k.tree.kind, k.tree.width, k.tree.depth)
            for k in kept
        )
        if not alike and len(kept) < FLAGS.finalists:
            kept.append(choice)
    own = next((choice for choice in ranked if choice.tree == default), None)
    if own is not None and own not in kept:
        kept.append(own)
    return kept


def print_costs(costs: Costs) -> None:
    """Prints the cost model in milliseconds."""
    for name, table in (("nodes", costs.forward), ("width", costs.level)):
        cells = "  ".join(f"{x}: {seconds * 1e3:.1f}" for x, seconds in table.items())
        print(f"ms by {name:6}{cells}")


def describe(tree: TreeConfig) -> str:
    """Names a tree in a few words."""
    kind = "chain" if tree.width == 1 else tree.kind
    return f"{kind} width {tree.width} depth {tree.depth} nodes {tree.n_nodes}"


def report(
    setup: Setup,
    costs: Costs,
    finalists: list[Choice],
    measured: dict[TreeConfig, tuple[float, float]],
    out: Path,
) -> None:
    """Prints the finalists, appends result lines and writes the config of the fastest."""
    plain, _ = measured[PLAIN]
    table = Table(title=f"plain decoding {plain:.1f} tokens/s")
    columns = [
        "tree",
        "predicted tau",
        "tau",
        "predicted tokens/s",
        "tokens/s",
        "speedup",
    ]
    for column in columns:
        table.add_column(column, justify="left" if column == "tree" else "right")
    best = max(finalists, key=lambda choice: measured[choice.tree][0])
    for choice in finalists:
        speed, tau = measured[choice.tree]
        predicted = choice.speed * FLAGS.batch
        table.add_row(
            describe(choice.tree) + (" *" if choice is best else ""),
            f"{choice.tau:.2f}",
            f"{tau:.2f}",
            f"{predicted:.1f}",
            f"{speed:.1f}",
            f"{speed / plain:.2f}",
        )
        common.append_line(
            out / "tune.jsonl",
            {
                "experiment": "tune",
                "target": setup.target_cfg.name,
                "head": heads.head_hash(weights.resolve_head(FLAGS.head)),
                "batch": FLAGS.batch,
                "dtype": setup.cfg.precision,
                "temperature": setup.cfg.sampling.temperature,
                "max_new_tokens": FLAGS.max_new_tokens,
                "prompts_per_set": FLAGS.prompts_per_set,
                "tree": dataclasses.asdict(choice.tree),
                "is_default": choice.tree == setup.cfg.tree,
                "is_chosen": choice is best,
                "tau_predicted": choice.tau,
                "tau": tau,
                "tokens_per_second_predicted": predicted,
                "tokens_per_second": speed,
                "baseline_tokens_per_second": plain,
                "speedup": speed / plain,
                "milliseconds_by_nodes": {n: 1e3 * s for n, s in costs.forward.items()},
                "milliseconds_by_width": {w: 1e3 * s for w, s in costs.level.items()},
                "device": common.describe_device(),
                "commit": common.commit(),
            },
        )
    Console(width=None if Console().is_terminal else 120).print(table)
    if measured[best.tree][0] < plain:
        print(
            "No tree is faster than plain decoding here; the fastest tree is written."
        )
    path = out / "tuned.py"
    path.write_text(CONFIG.format(config=FLAGS.config, tree=best.tree))
    print(f"* is written to {path}; use it with --config={path}")


CONFIG = '''"""The tree that experiments.tune found fastest, on top of {config}."""

import dataclasses

from eagle_jax.config import Config, TreeConfig
from experiments import common


def get_config() -> Config:
    return dataclasses.replace(
        common.read_config("{config}"),
        tree={tree!r},
    )
'''


if __name__ == "__main__":
    common.run(main)

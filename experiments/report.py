"""Turns result lines into tables, figures and one page, beside the papers' numbers.

python -m experiments.report --results=FILE_OR_FOLDER [--results=...] --out=DIR
"""

import collections
import csv
import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from absl import flags
from matplotlib.figure import Figure

from eagle_jax import metrics
from experiments import common, page, papers, plots, results
from experiments.page import NOT_MEASURED, Cell, Number, Picture, Section, Table
from experiments.results import Entry, Estimate, Group, Lines, Row

FLAGS = flags.FLAGS
flags.DEFINE_multi_string(
    "results", ["experiments/results"], "Files of result lines, or folders of them."
)

TITLE = "EAGLE heads: measured results beside the papers'"

TAU = (
    "tau: tokens a step emits, the bonus token counted, pooled over all steps of a set "
    "(sum of tokens / sum of steps); the prefill's token is not counted."
)
INTERVALS = (
    "[low, high]: 95 % bootstrap interval over prompts: what other prompts would change, "
    "not the machine's noise from run to run; for speeds in batches it is over batches, "
    "with none below four. The mean is that of the sets, each with equal weight; it needs "
    "all of them."
)
SPEEDUP = (
    "speedup: mean over prompts of tokens per second, over that of plain decoding of the "
    "same prompts in the same run, both without prefill. Compilation and warm-up are "
    "never counted. Above 1 is faster."
)

TRAINED = (
    "parameters: trained ones, of the head alone; training FLOPs: the head's forward and "
    "backward passes, and the target's LM head, the teacher's, at the labels; its layers, "
    "whose features serve all heads, are not counted."
)
TRAINED_COLUMNS = ["parameters", "training FLOPs"]


def main() -> None:
    out = common.prepare_out()
    lines = results.read(FLAGS.results)
    sections = report(lines, out)
    (out / "report.md").write_text(page.markdown(TITLE, sections))
    (out / "report.html").write_text(page.page(TITLE, sections, out))
    n_tables = sum(isinstance(b, Table) for s in sections for b in s.blocks)
    n_pictures = sum(isinstance(b, Picture) for s in sections for b in s.blocks)
    print(
        f"{len(lines.rows)} result lines: {n_tables} tables and {n_pictures} figures in "
        f"{out}; open {out / 'report.html'}"
    )


def report(lines: Lines, out: Path) -> list[Section]:
    """Writes CSV and PNG files and returns all sections of the page."""
    groups = results.group(lines.rows)
    everything(lines.rows, out / "all.csv")
    sections = [_overview(lines, groups)]
    for number, group in enumerate(groups, 1):
        print(f"setting {group.name} ({number} of {len(groups)})", flush=True)
        first = next(
            g
            for g in groups
            if (g.family, g.setting.temperature)
            == (group.family, group.setting.temperature)
        )
        sections += _measured(group, out, with_figures=group is first)
    batches = _batches(groups)
    if batches:
        sections.append(batches)
    sections.append(_paper_start(groups))
    for spec, table in papers.tables(groups):
        title = f"{spec.paper}, {spec.table}: {spec.title}"
        sections.append(Section(3, title, [table]))
    for section in sections:
        for block in section.blocks:
            if isinstance(block, Table):
                page.write_csv(out, block)
    return sections


def everything(rows: list[Row], path: Path) -> None:
    """Writes every plain number and name of every line, one row a line."""
    names: dict[str, None] = {}
    for row in rows:
        names |= dict.fromkeys(
            k for k, v in row.items() if isinstance(v, str | int | float)
        )
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(names)
        for row in rows:
            writer.writerow([row.get(name) for name in names])


def _overview(lines: Lines, groups: list[Group]) -> Section:
    columns = [
        "setting",
        "target",
        "questions",
        "preset",
        "temperature",
        "batch",
        "new tokens",
        "dtype",
        "device",
        "prompts a set",
        "sets",
        "variants",
        "lines",
        "seeds",
        "commits",
    ]
    rows: list[list[Cell]] = []
    for group in groups:
        s = group.setting
        own = [row for e in group.entries for row in e.rows.values()]
        rows.append(
            [
                group.family,
                str(s.target),
                str(s.questions),
                str(s.preset),
                f"{s.temperature:g}",
                str(s.batch),
                str(s.max_new_tokens),
                str(s.dtype),
                str(s.device),
                _span([row.get("n_prompts") for row in own]),
                str(len(group.sets)),
                str(len({e.variant for e in group.entries})),
                str(len(own)),
                ", ".join(sorted({str(row.get("seed", "?")) for row in own})),
                ", ".join(sorted({str(row.get("commit", "?"))[:7] for row in own})),
            ]
        )
    table = Table(
        "settings",
        "Settings",
        columns,
        rows,
        [
            "A table never mixes settings, the number of prompts among them. One letter "
            "stands for settings that differ in temperature or batch only. questions: the "
            "folder of the question sets; `embedded` are this project's own prompts, of "
            "the papers' six kinds of task but not the papers' prompts. prompts a set: the "
            "fewest and the most; a set may have fewer than were asked for."
        ],
        n_keys=4,
    )
    files = ", ".join(file.name for file in lines.files)
    text = [
        f"From {len(lines.rows)} result lines of {files}. Every table is also a CSV file "
        f"beside this page, `all.csv` has every line.",
        *lines.notes,
    ]
    return Section(2, "What was measured", [*text, table, _glance(groups)])


def _glance(groups: list[Group]) -> Table:
    """The highest numbers of every setting, and whether the papers' orders hold."""
    claims = results.ORDERINGS
    rows: list[list[Cell]] = []
    for group in groups:
        row: list[Cell] = [group.name]
        for metric in ("tau_pooled", "speedup"):
            found = []
            for entry in group.entries:
                if results.base(entry.variant) == "vanilla":
                    continue
                value = results.over_sets(group, entry, metric)
                found += [(value.value, entry.label)] if value else []
            value, label = max(found, default=(None, ""))
            row.append("-" if value is None else f"{value:.2f}\n{label}")
        verdicts = results.orderings(group, "tau_pooled")
        for claim in claims:
            gaps = [v.gaps["mean"] for v in verdicts if v.ordering == claim]
            row.append(results.verdict(gaps))
        rows.append(row)
    return Table(
        "glance",
        "At a glance",
        ["setting", "highest tau", "highest speedup", *(" < ".join(c) for c in claims)],
        rows,
        [
            "Means over all sets of a setting. The papers' orders are those of tau; their "
            "differences and intervals stand with each setting. unsure: an interval of a "
            "difference holds 0.",
            TAU,
            SPEEDUP,
        ],
    )


def _span(values: list[Any]) -> str:
    real = [v for v in values if v is not None]
    if not real:
        return "?"
    low, high = min(real), max(real)
    return str(low) if low == high else f"{low} to {high}"


def _measured(group: Group, out: Path, with_figures: bool) -> list[Section]:
    """Sections of one setting; larger batches repeat its acceptance, so only tables."""
    s = group.setting
    where = (
        f"Target {s.target}; questions `{s.questions}`, {s.prompts or '?'} a set; preset "
        f"{s.preset}; temperature {s.temperature:g}; {s.max_new_tokens} new tokens; batch "
        f"{s.batch}; {s.dtype}; {s.device}."
    )
    missing = [v for v in results.VARIANTS if v not in group.used]
    gaps = f"Not measured here: {', '.join(missing)}." if missing else ""
    first: list[str | Table | Picture] = [where, *filter(None, [gaps]), *group.notes]
    first.append(_by_set(group, "tau_pooled", "tau", [TAU, INTERVALS]))
    if with_figures:
        first += _picture(group, out, "tau", _tau_bars, "tau by set. " + TAU)
    timed = [SPEEDUP, *_runs(group)]
    first.append(_by_set(group, "speedup", "speedup", [*timed, INTERVALS]))
    caption = f"Speedup by set, the dashed line is plain decoding. {SPEEDUP}"
    if not with_figures:
        return [
            Section(2, f"Setting {group.name}", first),
            Section(3, f"{group.name}: all numbers", [_details(group)]),
        ]
    first += _picture(group, out, "speedup", _speedup_bars, caption)
    verdicts: list[str | Table | Picture] = [
        table
        for table in (
            _orderings(group, "tau_pooled", "tau", [TAU]),
            _orderings(group, "speedup", "speedup", timed),
        )
        if table.rows
    ]
    parts: dict[str, list[str | Table | Picture]] = {
        "the papers' orderings": verdicts,
        "one setting changed at a time": _sweeps(group, out),
        "all numbers, costs": [_details(group), _costs(group)],
        "acceptance": _acceptance(group, out),
    }
    return [Section(2, f"Setting {group.name}", first)] + [
        Section(3, f"{group.name}: {title}", blocks)
        for title, blocks in parts.items()
        if blocks
    ]


def _picture(
    group: Group,
    out: Path,
    name: str,
    draw: Callable[[Group], Figure | None],
    caption: str,
) -> list[str | Table | Picture]:
    figure = draw(group)
    if figure is None:
        return []
    file = f"{group.stem}_{name}.png"
    scratch = out / f".{file}"
    figure.savefig(scratch, format="png", dpi=110)
    os.replace(scratch, out / file)
    return [Picture(file, f"Setting {group.name}. {caption}")]


def _tau_bars(group: Group) -> Figure | None:
    return plots.bars(group, "tau_pooled", "tau (tokens per step)")


def _speedup_bars(group: Group) -> Figure | None:
    return plots.bars(group, "speedup", "speedup (x plain decoding)")


def lines_of(group: Group) -> list[tuple[str, Entry | None]]:
    """Everything measured, in order, and in the largest family every named variant."""
    named = results.VARIANTS if group.family == "A" else ()
    missing = [(v, None) for v in named if v not in group.used]
    rows = [(e.label, e) for e in group.entries] + missing
    return sorted(rows, key=lambda r: results.order(r[1].variant if r[1] else r[0]))


def _cell(value: Estimate | float | None, spec: str = ".2f") -> Cell:
    if value is None:
        return "-"
    if isinstance(value, Estimate):
        return Number(value.value, value.low, value.high, spec)
    return Number(float(value), spec=spec)


def _trained(entry: Entry | None) -> list[Cell]:
    row = entry.first if entry else {}
    return [_cell(row.get("n_trainable"), ",.0f"), _cell(row.get("train_flops"), ".2e")]


def _by_set(group: Group, metric: str, title: str, notes: list[str]) -> Table:
    rows: list[list[Cell]] = []
    for label, entry in lines_of(group):
        if entry is None:
            rows.append([label, *[NOT_MEASURED] * (len(group.sets) + 3)])
            continue
        values = [results.estimate(entry.rows.get(s), metric) for s in group.sets]
        cells = [_cell(v) if v else NOT_MEASURED for v in values]
        rows.append([label, *cells, _cell(results.mean(values)), *_trained(entry)])
    return Table(
        f"{group.stem}_{title}",
        f"{title} by set: setting {group.name}",
        ["variant", *group.sets, "mean", *TRAINED_COLUMNS],
        rows,
        [*notes, TRAINED],
    )


def _runs(group: Group) -> list[str]:
    """Warns of speedups that were not measured beside the same plain decoding."""
    labels = results.apart(group)
    if not labels:
        return []
    many = 2 * len(labels) > len(group.entries)
    which = "" if many else f" than most: {', '.join(labels)}"
    return [
        f"Measured in {'several runs' if many else 'another run'}{which}, each beside its "
        "own plain decoding. Between runs machine and code may have changed, so a "
        "difference in speed across them need not be the variants'; tau does not change."
    ]


def _orderings(group: Group, metric: str, title: str, notes: list[str]) -> Table:
    rows: list[list[Cell]] = []
    for v in results.orderings(group, metric):
        if group.family != "A" and all(gap is None for gap in v.gaps.values()):
            continue
        told = {task: results.says(gap) for task, gap in v.gaps.items()}
        shown = told["mean"].replace("\n", " ")
        print(f"  {title}: {v.lower} < {v.higher}: {shown} in the mean")
        cells = [told["mean"], *(told[task] for task in group.sets)]
        trees = f"\n{v.trees}" if v.trees else ""
        trained = [_size(results.find(group, x)) for x in (v.lower, v.higher)]
        rows.append(
            [f"{v.lower} < {v.higher}{trees}", *cells, f"{trained[0]}\n{trained[1]}"]
        )
    return Table(
        f"{group.stem}_orderings_{title}",
        f"Does the papers' order hold in {title}? Setting {group.name}",
        ["claim, trees", "mean", *group.sets, "parameters, training FLOPs of both"],
        rows,
        [
            *notes,
            f"held: the right-hand variant has the larger {title}. The number is the "
            f"difference, with its 95 % bootstrap interval over prompts: paired by prompt "
            f"where the lines hold counts of each prompt, else as if the two were "
            f"independent. unsure: the interval holds 0. not measured: one of the two was "
            f"not, or speeds not in one run, or the two heads were trained on numbers of "
            f"tokens that differ by more than a tenth. trees: kind and nodes verified "
            f"of both, root included; a comparison of heads is fair only on one tree. A "
            f"chain has one node a level, so fewer than the trees.",
            "Sources of the claims: token < feature < eagle1, EAGLE-1, Figure 4; chain < "
            "static < dynamic tree, EAGLE-1, Table 5, and EAGLE-2, Table 1; eagle2 < "
            "no_feature_loss < eagle3, EAGLE-3, Table 2. Answers of people (eagle1_fixed) "
            "against the target's: EAGLE-1, Table 6; value and rerank: EAGLE-2, Table 3; "
            "eagle2 < hass: HASS. That noise helps (eagle1_no_noise) is EAGLE-1's reason "
            "for it, not a table.",
            TRAINED,
        ],
    )


def _size(entry: Entry | None) -> str:
    row = entry.first if entry else {}
    if row.get("n_trainable") is None:
        return "-"
    flops = row.get("train_flops")
    return (
        f"{row['n_trainable'] / 1e6:.1f}M; {'-' if flops is None else f'{flops:.2e}'}"
    )


TREES = "kind and nodes verified a step, root included"
SWEPT = {
    "train.ttt_steps": ("unrolled steps in training", "steps"),
    "train.supervised_tokens": ("data", "data"),
    "tree": (f"trees ({TREES})", "tree"),
}


def _sweeps(group: Group, out: Path) -> list[str | Table | Picture]:
    """Tables of entries of one variant that differ in one setting, and figures."""
    found = results.sweeps(group)
    blocks: list[str | Table | Picture] = []
    for field, (title, stem) in SWEPT.items():
        own = [s for s in found if s.field == field]
        rows = []
        for number, sweep in enumerate(own):
            before = sum(s.variant == sweep.variant for s in own[:number])
            name = f"{sweep.variant} #{before + 1}" if before else sweep.variant
            for value, entry in sweep.points:
                shown = (
                    results.tree_name(entry.first) if field == "tree" else f"{value:,}"
                )
                base = sweep.points[0][1]
                rows.append(_changed(group, [name, shown], entry, base))
        if rows:
            columns = ["variant", title.partition(" (")[0]]
            blocks.append(_sweep_table(group, stem, title, columns, rows))
            if field == "train.supervised_tokens":
                blocks += _reach(group, own)
            if field in plots.SWEPT:
                caption = f"{title}, with 95 % intervals. {TAU} {SPEEDUP}"
                blocks += _picture(
                    group, out, stem, lambda g, f=field: plots.sweep(g, f), caption
                )
    others = [s for s in found if s.field not in SWEPT]
    if others:
        counts = collections.Counter(e.label for s in others for _, e in s.points)
        label = counts.most_common(1)[0][0]
        base = next(e for e in group.entries if e.label == label)
        rows = [_changed(group, ["-", f"unchanged: {label}"], base, base)]
        for sweep in others:
            if base not in [e for _, e in sweep.points]:
                continue
            usual = next(value for value, e in sweep.points if e is base)
            for value, entry in sweep.points:
                if entry is not base:
                    told = f"{_shown(value)}, not {_shown(usual)}"
                    rows.append(_changed(group, [sweep.field, told], entry, base))
        columns = ["setting", "value"]
        blocks.append(_sweep_table(group, "choices", "choices", columns, rows))
    return blocks


GOALS = (2.0, 2.5, 3.0)  # tau


def _reach(group: Group, swept: list[results.Sweep]) -> list[str | Table | Picture]:
    """What more training would take, read off the learning curve."""
    rows: list[list[Cell]] = []
    for one in swept:
        found = results.reach(group, one)
        if found is None:
            continue
        last, tau = found.points[-1]
        cells = [_cell(last, ",.0f"), _cell(tau), _cell(found.per_doubling, "+.2f")]
        needed = [found.tokens(goal) for goal in GOALS]
        cells += [_cell(n, ".1e") if math.isfinite(n) else "never" for n in needed]
        rows.append([one.variant, *cells, *_trained(one.points[-1][1])])
    if not rows:
        return []
    columns = ["variant", "most supervised tokens", "its tau", "tau a doubling"]
    columns += [*(f"tokens for tau {goal:g}" for goal in GOALS), *TRAINED_COLUMNS]
    return [
        Table(
            f"{group.stem}_reach",
            f"What more training would take: setting {group.name}",
            columns,
            rows,
            [
                "tau a doubling: what twice the supervised tokens gained, between the last "
                "two points of the table above. tokens for tau: extrapolated from the last "
                "point at that rate, a guess: the gain of a doubling shrinks as tokens "
                "grow, but a token learned in two epochs counts twice here, so that a last "
                "point of many epochs gains less than as many tokens of new conversations "
                "would. A tau that was reached has the tokens of the first point at or "
                "above it.",
                TAU,
                TRAINED,
            ],
        )
    ]


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return "/".join(map(str, value)) or "the official ones"
    return str(value)


def _changed(group: Group, keys: list[str], entry: Entry, base: Entry) -> list[Cell]:
    """One row of a sweep: the entry's means, and how far they lie above the base's."""
    cells: list[Cell] = [*keys]
    for metric in ("tau_pooled", "speedup"):
        gap = results.gaps(group, base, entry, metric)["mean"]
        same = entry is base
        cells += [
            _cell(results.over_sets(group, entry, metric)),
            "" if same else _cell(gap, "+.2f"),
        ]
    tokens = results.trained_tokens(entry.first)
    return [*cells, _cell(tokens, ",.0f"), *_trained(entry)]


def _sweep_table(
    group: Group, stem: str, title: str, keys: list[str], rows: list[list[Cell]]
) -> Table:
    columns = [*keys, "tau", "tau, difference", "speedup", "speedup, difference"]
    columns += ["supervised tokens", *TRAINED_COLUMNS]
    return Table(
        f"{group.stem}_sweep_{stem}",
        f"One setting changed at a time, {title}: setting {group.name}",
        columns,
        rows,
        [
            "Rows of one name share every other setting. difference: to the row of that "
            "name without one, paired by prompt; of speeds only within one run, else a "
            "dash. supervised tokens: labels seen in "
            "training; a head that was given (`--head`) may have seen other conversations "
            "under other settings.",
            TAU,
            SPEEDUP,
            INTERVALS,
            TRAINED,
        ],
        n_keys=len(keys),
    )


def _details(group: Group) -> Table:
    columns = ["variant", "tau", "tau by prompt", "tau without loops", "speedup"]
    columns += ["speedup with prefill", "tokens/s", "plain tokens/s", "identical"]
    columns += ["near ties", "loops", "prompts", *TRAINED_COLUMNS]
    rows: list[list[Cell]] = []
    for label, entry in lines_of(group):
        if entry is None:
            rows.append([label, *[NOT_MEASURED] * (len(columns) - 1)])
            continue
        lines = list(entry.rows.values())
        cells: list[Cell] = []
        for name, spec in {
            "tau_pooled": ".2f",
            "tau_by_prompt": ".2f",
            "tau_without_loops": ".2f",
            "speedup": ".2f",
            "speedup_with_prefill": ".2f",
            "tokens_per_second": ".1f",
            "baseline_tokens_per_second": ".1f",
        }.items():
            value = results.mean([results.estimate(row, name) for row in lines])
            cells.append(_cell(value, spec))
        n_prompts = _total(lines, "n_prompts")
        identical = _total(lines, "n_identical")
        cells.append("-" if identical is None else f"{identical} of {n_prompts}")
        for name in ("n_near_tie", "n_looping", "n_prompts"):
            total = _total(lines, name)
            cells.append("-" if total is None else str(total))
        rows.append([label, *cells, *_trained(entry)])
    return Table(
        f"{group.stem}_details",
        f"Means over the sets each variant has: setting {group.name}",
        columns,
        rows,
        [
            TAU,
            SPEEDUP,
            "tau by prompt: mean over prompts of each one's own tau. Without loops: "
            "pooled over prompts whose answers do not end in a loop (one phrase three "
            "times or more), which are easy to draft.",
            "speedup with prefill: the same ratio with the prefill's time and token on "
            "both sides, as the papers count. identical: prompts whose greedy output is "
            "that of plain decoding token for token; near ties: differences where the "
            "target's two best logits were closer than rounding. loops: prompts with an "
            "answer that ends in one. A dash: not defined or not in the lines.",
            INTERVALS,
            TRAINED,
        ],
    )


def _total(rows: list[Row], name: str) -> int | None:
    values = [row.get(name) for row in rows]
    return None if any(v is None for v in values) else sum(v for v in values if v)


def _costs(group: Group) -> Table:
    columns = ["variant", "tree", "supervised tokens", *TRAINED_COLUMNS]
    columns += ["c", "verify cost", "a", "predicted, formula"]
    columns += ["predicted, by depth", "with verify cost", "measured speedup"]
    columns += ["tokens per target GFLOP"]
    rows: list[list[Cell]] = []
    for label, entry in lines_of(group):
        if entry is None:
            rows.append([label, "", *[NOT_MEASURED] * (len(columns) - 2)])
            continue
        lines = list(entry.rows.values())
        row = entry.first
        c, verify = _mean_of(lines, "draft_cost"), _mean_of(lines, "verify_cost")
        alphas = [a.value for a in results.chain_alpha(entry)]
        rate = sum(alphas) / len(alphas) if alphas else None
        acceptance = plots.mean_list(entry, group.sets, "acceptance_by_depth")
        accepted = [a for a in acceptance if a is not None]
        formula = by_depth = full = None
        if c is not None and len(accepted) == len(acceptance):
            by_depth = metrics.predicted_speedup(accepted, c)
            if verify is not None:
                full = metrics.predicted_speedup(accepted, c, verify)
            if rate is not None:
                powers = [rate**d for d in range(1, len(accepted) + 1)]
                formula = metrics.predicted_speedup(powers, c)
        tokens = results.trained_tokens(row)
        rows.append(
            [
                label,
                results.tree_name(entry.first),
                _cell(tokens, ",.0f"),
                *_trained(entry),
                _cell(c, ".3f"),
                _cell(verify),
                _cell(rate),
                _cell(formula),
                _cell(by_depth),
                _cell(full),
                _cell(_mean_of(lines, "speedup")),
                _cell(_mean_of(lines, "tokens_per_target_gflop")),
            ]
        )
    return Table(
        f"{group.stem}_costs",
        f"What it costs, and the speedup that follows: setting {group.name}",
        columns,
        rows,
        [
            "tree: its kind and the nodes verified a step, root included. supervised "
            "tokens: labels seen in training, with repetition.",
            TRAINED,
            "c: one pass of the draft, over one plain step of the target. verify cost: "
            "the target's pass over the whole tree, over one plain step. a: mean of the "
            "n-alphas of the table below, chains only. predicted, formula: (1 + a + ... + "
            "a^k) / (1 + k c) for depth k; by depth: the same with the measured "
            "acceptance at each depth in place of a, a^2, ...; with verify cost: divided "
            "by (verify cost + k c) instead.",
            "tokens per target GFLOP: tokens emitted (bonus token counted) for 10^9 "
            "operations of the target's verification passes, prefill left out. Plain "
            "decoding is the upper limit: speculation buys time with arithmetic. "
            "The hash of each head stands in `all.csv`.",
        ],
        n_keys=2,
    )


def _mean_of(rows: list[Row], name: str) -> float | None:
    value = results.mean([results.estimate(row, name) for row in rows])
    return value.value if value else None


def _acceptance(group: Group, out: Path) -> list[str | Table | Picture]:
    blocks: list[str | Table | Picture] = []
    note = (
        "Share of steps that accept at least d drafted tokens, mean over sets. The sum "
        "over depths plus 1 is tau, up to cuts at the end of an answer."
    )
    blocks.append(_places(group, "acceptance_by_depth", "acceptance by depth", note, 1))
    blocks += _picture(group, out, "depth", plots.by_depth, note)
    note = (
        "n-alpha: share of steps that accept drafted token n + 1 among those that "
        "accepted the n before it, on a chain; n is how many features of its own making "
        f"the draft had read. Steps of all sets pooled; a position that fewer than "
        f"{results.LEAST} steps reached is left out."
    )
    blocks.append(_places(group, "alpha", "alpha by position", note, 0))
    blocks.append(_flatness(group))
    blocks += _picture(
        group, out, "alpha", lambda g: plots.alpha(g, papers.alphas(g)), note
    )
    blocks += _picture(
        group,
        out,
        "calibration",
        plots.calibration,
        "Draft confidence against the share accepted, sets pooled, in 20 bins of equal "
        f"width; bins with fewer than {plots.LEAST} nodes are left out. Left: a node's "
        "probability given its parent, over nodes whose parent was accepted. Right: the "
        "product of probabilities from the root, over all nodes: what the dynamic tree "
        "is built on. On the dashed line confidence is acceptance. Over the prompts that "
        "were probed (`--probe`).",
    )
    blocks += _picture(
        group,
        out,
        "scaling",
        plots.scaling,
        "Held-out accuracy of the first drafted token along training, and tau (mean over "
        "sets) of heads trained on more or less, all else equal; a logarithmic axis of "
        "supervised tokens.",
    )
    blocks += _picture(
        group,
        out,
        "trees",
        plots.trees,
        "Where the drafted nodes of a step lie, and where accepted ones do: by depth and "
        "by rank among siblings (0 is the draft's first choice), mean over sets, over the "
        "prompts that were probed. A row on the right adds up to their acceptance at that "
        "depth.",
    )
    drawn = {b.file for b in blocks if isinstance(b, Picture)}
    wanted = {
        "alpha": "`alpha`",
        "calibration": "`calibration`",
        "scaling": "`learning_curve`, or one variant at several `trained_tokens`",
        "trees": "`tree_shape`",
    }
    absent = [
        f"{name} (no line has {keys})"
        for name, keys in wanted.items()
        if f"{group.stem}_{name}.png" not in drawn
    ]
    if absent:
        blocks.append(f"Figures without data in this setting: {'; '.join(absent)}.")
    return blocks


def _places(group: Group, name: str, title: str, note: str, first: int) -> Table:
    rows: list[list[Cell]] = []
    for e in group.entries:
        found: Sequence[Estimate | float | None] = (
            results.chain_alpha(e)
            if name == "alpha"
            else plots.mean_list(e, group.sets, name)
        )
        if found and e.variant != "vanilla":
            rows.append([e.label, *_trained(e), *map(_cell, found)])
    n = max(map(len, rows), default=3)
    rows = [[*row, *[""] * (n - len(row))] for row in rows]
    if not rows:
        rows = [[NOT_MEASURED, "", ""]]
    columns = ["variant", *TRAINED_COLUMNS, *(str(i + first) for i in range(n - 3))]
    where = f"{title}: setting {group.name}"
    notes = [note, STEPWISE if name == "alpha" else "", TRAINED]
    return Table(f"{group.stem}_{name}", where, columns, rows, [*filter(None, notes)])


STEPWISE = (
    "[low, high]: 95 % interval as if steps were independent: lines do not say which "
    "prompt accepted what, so it is rather too narrow."
)


def _flatness(group: Group) -> Table | str:
    """Says whether alpha falls less with training-time test than without."""
    question = "Does alpha stay flat with training-time test and fall without?"
    found = results.falls(group)
    if not found:
        return (
            f"{question} {NOT_MEASURED} (needs `alpha` of eagle3_chain and of fused_chain "
            f"or eagle1_chain)."
        )
    rows: list[list[Cell]] = []
    for one in found:
        with_test, without = one.falls
        told = results.says(one.gap)
        sizes = [_size(group.used[v]) for v in (one.with_test, one.without)]
        cells = [_cell(with_test, "+.2f"), _cell(without, "+.2f"), told]
        keys = [one.with_test, one.without, f"0 to {one.n}"]
        rows.append([*keys, *cells, "\n".join(sizes)])
    columns = ["with", "without", "positions", "fall with", "fall without"]
    columns += ["falls less with it", "parameters, training FLOPs of both"]
    return Table(
        f"{group.stem}_flatness",
        f"{question} Setting {group.name}",
        columns,
        rows,
        [
            "fall: n-alpha at position 0 less that at the last position that enough steps "
            "of both chains reached; near 0 is flat. held: it falls less with "
            "training-time test (several unrolled steps) than without; unsure: the "
            "interval of the difference holds 0. eagle1_chain differs in features and "
            "losses too, fused_chain and eagle3_ttt1_chain in the unrolled steps alone. "
            "Heads trained on numbers of tokens that differ by more than a tenth are not "
            "compared.",
            STEPWISE,
            TRAINED,
        ],
        n_keys=3,
    )


def _batches(groups: list[Group]) -> Section | None:
    """Throughput ratio by batch, for families measured at more than one."""
    tables: list[str | Table | Picture] = []
    keys = dict.fromkeys((g.family, g.setting.temperature) for g in groups)
    for family, temperature in keys:
        own = [
            g
            for g in groups
            if (g.family, g.setting.temperature) == (family, temperature)
        ]
        if len(own) < 2:
            continue
        labels = dict.fromkeys(
            v
            for v in sorted({v for g in own for v in g.used}, key=results.order)
            if v != "vanilla" and sum(v in g.used for g in own) > 1
        )
        rows: list[list[Cell]] = []
        for variant in labels:
            cells: list[Cell] = [variant]
            for g in own:
                entry = g.used.get(variant)
                value = results.over_sets(g, entry, "speedup") if entry else None
                cells.append(_cell(value) if value else NOT_MEASURED)
            entry = next(g.used[variant] for g in own if variant in g.used)
            tree = results.tree_name(entry.first)
            rows.append([variant, tree, *_trained(entry), *cells[1:]])
        tables.append(
            Table(
                f"{family}_t{temperature:g}_batches",
                f"Throughput ratio by batch: settings {family}, temperature "
                f"{temperature:g}",
                [
                    *("variant", "tree", *TRAINED_COLUMNS),
                    *(f"batch {g.setting.batch}" for g in own),
                ],
                rows,
                [
                    "Tokens per second of the whole batch over that of plain decoding in "
                    "batches of the same size, mean over sets, without prefill. Each "
                    "column is a setting of its own.",
                    f"tree: {TREES}.",
                    TRAINED,
                    INTERVALS,
                ],
                n_keys=2,
            )
        )
    return Section(2, "Batch sizes", tables) if tables else None


def _paper_start(groups: list[Group]) -> Section:
    lines: list[str | Table | Picture] = [
        "Every table of EAGLE-1, EAGLE-2 and EAGLE-3, and the figures whose numbers are "
        "known. Ours stand in the shaded rows or columns, named by the letter of their "
        "settings, each at the temperature and batch of the paper's row. The papers' "
        "targets have 7 to 70 billion parameters and ran on GPUs, their heads were trained "
        "on 68,000 (EAGLE-1, EAGLE-2) and about 532,000 conversations (EAGLE-3): compare "
        "orders and shapes, not levels.",
        "Our cells: T is the temperature; tau is tau_pooled; speedup counts the prefill, "
        "as the papers do; alpha is that of eagle1_chain; Mean is over the sets of the "
        "paper's table. EAGLE is our eagle1 on its static tree, SpS our "
        "small_draft_chain. CNN/DM and Natural Questions stand beside our sets `sum` and "
        "`qa`. † marks misprints and contradictions between papers. The intervals of "
        "ours stand in the tables above.",
    ]
    seen: dict[str, str] = {}
    for g in groups:
        s = g.setting
        seen.setdefault(
            g.family,
            f"{g.family}: {s.target}, questions `{s.questions}`, {s.prompts or '?'} a set, "
            f"preset {s.preset}, {s.max_new_tokens} new tokens, {s.dtype}, {s.device}.",
        )
    lines += seen.values()
    lines.append(
        "Tables of Medusa's paper and the Spec-Bench leaderboard are left out: they "
        "measure fine-tuned targets, quality scores by GPT-4, or the same methods again "
        "on GPUs."
    )
    return Section(2, "The papers' tables", lines)


if __name__ == "__main__":
    common.run(main)

"""The report's figures, one function each. They return None where there is no data."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, LogLocator, NullFormatter

from experiments import results
from experiments.results import Entry, Estimate, Group

COLOURS = {
    "vanilla": "#7f7f7f",
    "token": "#9ecae1",
    "feature": "#6baed6",
    "feature_unshifted": "#4292c6",
    "eagle1": "#08519c",
    "eagle2": "#2ca02c",
    "hass": "#17a2a2",
    "no_feature_loss": "#fdae6b",
    "fused": "#e6850e",
    "eagle3": "#d62728",
    "medusa": "#9467bd",
    "lookup": "#8c564b",
    "small_draft": "#e377c2",
}


def colour(variant: str) -> Any:
    """Colour of the named variant; finer ones are paler."""
    name = results.base(variant)
    strong = np.array(to_rgb(COLOURS.get(name, "#444444")))
    return tuple(strong if variant == name else 0.5 * strong + 0.5)


MOST_BARS = 30  # in a panel


def bars(given: Group, metric: str, label: str) -> Figure | None:
    """One panel a set, and one for their mean; a bar a variant, with its interval."""
    entries = given.entries if len(given.entries) <= MOST_BARS else given.main
    found = {
        entry.label: [results.estimate(entry.rows.get(s), metric) for s in given.sets]
        for entry in entries
    }
    shown = [e for e in entries if any(found[e.label])]
    cut = len(entries) < len(given.entries)
    if not shown or (cut and len(shown) < 2):
        return None
    panels = [*given.sets, "mean"]
    columns = min(4, len(panels))
    lines = -(-len(panels) // columns)
    height = lines * (0.9 + 0.27 * len(shown))
    figure = Figure((12, max(height, 2.2 * lines)), layout="constrained")
    grid = figure.subplots(lines, columns, sharex=True, sharey=True, squeeze=False)
    most = max(
        max(e.value, e.high or 0)
        for row in found.values()
        for e in row
        if e is not None
    )
    for number, axes in enumerate(grid.flat):
        if number >= len(panels):
            axes.axis("off")
            continue
        values = [
            results.mean(found[e.label])
            if panels[number] == "mean"
            else found[e.label][number]
            for e in shown
        ]
        _panel(axes, shown, values, most)
        axes.set_title(panels[number], fontsize=11)
        # With a panel missing below, this one carries the axis.
        if number + columns >= len(panels):
            axes.set_xlabel(label)
            axes.tick_params(labelbottom=True)
    return figure


def _panel(
    axes: Axes, shown: list[Entry], values: list[Estimate | None], most: float
) -> None:
    for place, (entry, value) in enumerate(zip(shown, values, strict=True)):
        if value is None:
            axes.text(0.02 * most, place, "not measured", va="center", color="#999999")
            continue
        axes.barh(place, value.value, color=colour(entry.variant), height=0.72)
        end = value.value
        if value.low is not None and value.high is not None:
            spread = [
                [max(value.value - value.low, 0)],
                [max(value.high - value.value, 0)],
            ]
            axes.errorbar(
                value.value, place, xerr=spread, color="#222222", capsize=2, lw=1
            )
            end = max(end, value.high)
        number = axes.text(
            end + 0.02 * most, place, f"{value.value:.2f}", va="center", fontsize=8.5
        )
        number.set(zorder=4, bbox={"fc": "white", "ec": "none", "pad": 0.5})
    axes.axvline(1, color="#222222", lw=0.8, ls="--", zorder=3)
    axes.set_yticks(range(len(shown)), [e.label for e in shown])
    axes.set_ylim(len(shown) - 0.4, -0.6)
    axes.set_xlim(0, max(1.15 * most, 1.1))
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="x", color="#e5e5e5", zorder=-1)
    axes.set_axisbelow(True)


def mean_list(entry: Entry, sets: list[str], name: str) -> list[float | None]:
    """Averages a list of a line over the sets, place by place, where all have it."""
    lists = [entry.rows[s].get(name) for s in sets if s in entry.rows]
    lists = [x for x in lists if x]
    if not lists:
        return []
    out: list[float | None] = []
    for place in range(max(map(len, lists))):
        values = [x[place] for x in lists if place < len(x) and _is_number(x[place])]
        complete = len(values) == len(lists)
        out.append(float(np.mean(values)) if complete else None)
    return out


def _is_number(x: float | None) -> bool:
    return x is not None and bool(np.isfinite(x))


def _curves(
    curves: dict[str, tuple[str, list[int], list[float]]], x: str, y: str
) -> tuple[Figure, Axes]:
    """Lines by variant, the legend beside them."""
    figure = Figure((9, 4.4), layout="constrained")
    axes = figure.subplots()
    markers = "osD^vP*X"
    colours = [colour(variant) for variant, _, _ in curves.values()]
    if 2 * len(set(colours)) < len(curves):  # kinds of one variant
        colours = colormaps["viridis"](np.linspace(0, 0.9, len(curves)))
    for number, (label, (_, at, values)) in enumerate(curves.items()):
        axes.plot(
            at,
            values,
            color=colours[number],
            marker=markers[number % len(markers)],
            ms=5,
            label=label,
        )
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(color="#e5e5e5")
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _beside(figure: Figure, axes: Axes) -> Figure:
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(
        handles,
        labels,
        loc="outside right upper",
        fontsize=9,
        frameon=False,
        ncols=1 + (len(labels) > 20),
    )
    return figure


def _whole_ticks(axes: Axes, last: int, first: int = 1) -> None:
    axes.set_xticks(range(first, last + 1))


def by_depth(given: Group) -> Figure | None:
    """Share of steps that accept at least d tokens, mean over sets."""
    curves = {}
    for entry in given.main:
        values = mean_list(entry, given.sets, "acceptance_by_depth")
        real = [(d, v) for d, v in enumerate(values, 1) if v is not None]
        if real:
            curves[entry.label] = (entry.variant, *map(list, zip(*real, strict=True)))
    if not curves:
        return None
    x = "depth d (drafted tokens on the accepted path)"
    figure, axes = _curves(curves, x, "share of steps accepting at least d")
    _whole_ticks(axes, max(max(at) for _, at, _ in curves.values()))
    axes.set_ylim(0, 1)
    return _beside(figure, axes)


def alpha(given: Group, paper: list[list[float]]) -> Figure | None:
    """n-alpha by position, sets pooled, with the range of the paper's targets."""
    curves = {}
    for entry in given.entries:
        values = [a.value for a in results.chain_alpha(entry)]
        if values:
            curves[entry.label] = (entry.variant, list(range(len(values))), values)
    if not curves:
        return None
    x = "position n in the chain (features of the draft's own making)"
    figure, axes = _curves(curves, x, "n-alpha: share accepted, all before accepted")
    if paper:
        low, high = np.min(paper, axis=0), np.max(paper, axis=0)
        axes.fill_between(
            range(len(low)),
            low,
            high,
            color="#bbbbbb",
            alpha=0.45,
            lw=0,
            label=f"EAGLE-1 in its paper,\n{len(paper)} targets, MT-bench",
        )
    last = max(max(at) for _, at, _ in curves.values())
    _whole_ticks(axes, last, first=0)
    axes.set_ylim(0, 1)
    return _beside(figure, axes)


LEAST = 20  # nodes a calibration bin needs to be drawn


def calibration(given: Group) -> Figure | None:
    """Confidence against the share accepted, sets pooled."""
    shown = [
        e for e in given.main if any(r.get("calibration") for r in e.rows.values())
    ]
    if not shown:
        return None
    figure = Figure((10.5, 5.4), layout="constrained")
    panels = figure.subplots(1, 2)
    titles = {
        "edge": "given the parent, nodes put to the test",
        "path": "along the path, all nodes",
    }
    for axes, (kind, title) in zip(panels, titles.items(), strict=True):
        axes.plot([0, 1], [0, 1], color="#888888", lw=1, ls="--", label="calibrated")
        for entry in shown:
            n, confidence, accepted = _pooled(entry, kind)
            enough = n >= LEAST
            axes.plot(
                confidence[enough],
                accepted[enough],
                color=colour(entry.variant),
                marker="o",
                ms=4,
                label=entry.label,
            )
        axes.set(xlim=(0, 1), ylim=(0, 1), xlabel="draft confidence (mean of the bin)")
        axes.set_title(title, fontsize=11)
        axes.set_aspect("equal")
        axes.grid(color="#e5e5e5")
    panels[0].set_ylabel("share accepted")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(
        handles, labels, loc="outside lower center", ncols=5, fontsize=9, frameon=False
    )
    return figure


def _pooled(entry: Entry, kind: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Adds up the bins of all sets: nodes, mean confidence, share accepted."""
    sums: Any = 0
    for row in entry.rows.values():
        bins = (row.get("calibration") or {}).get(kind)
        if not bins:
            continue
        n = np.array(bins["n"], float)
        parts = [
            np.array([x or 0.0 for x in bins[name]], float) * n
            for name in ("confidence", "accepted")
        ]
        sums = sums + np.stack([n, *parts])
    if np.ndim(sums) == 0:
        return np.zeros(0), np.zeros(0), np.zeros(0)
    n = np.maximum(sums[0], 1)
    return sums[0], sums[1] / n, sums[2] / n


def scaling(given: Group) -> Figure | None:
    """Held-out accuracy along training, and tau by how long a head was trained."""
    learning = {}
    for entry in (e for e in given.main if given.used[e.variant] is e):
        curve = next(
            (
                r["learning_curve"]
                for r in entry.rows.values()
                if r.get("learning_curve")
            ),
            [],
        )
        points = [(p["tokens"], p["accuracy"][0]) for p in curve if p.get("accuracy")]
        if len(points) > 1:
            learning[entry.label] = (entry.variant, *zip(*points, strict=True))
    taus = {}
    for sweep in results.sweeps(given):
        if sweep.field == "train.supervised_tokens":
            at = [results.trained_tokens(entry.first) for _, entry in sweep.points]
            taus[sweep.variant] = at, _means(given, sweep, "tau_pooled")
    if not learning and not taus:
        return None
    n_panels = bool(learning) + bool(taus)
    figure = Figure((5.2 * n_panels, 5.2), layout="constrained")
    panels = list(figure.subplots(1, n_panels, squeeze=False)[0])
    if learning:
        axes = panels.pop(0)
        for label, (variant, at, values) in learning.items():
            axes.plot(at, values, color=colour(variant), marker=".", label=label)
        axes.set_ylabel("held-out accuracy, first drafted token")
        handles, labels = axes.get_legend_handles_labels()
        figure.legend(
            handles,
            labels,
            loc="outside lower center",
            ncols=3 * n_panels,
            fontsize=9,
            frameon=False,
        )
    if taus:
        axes = panels.pop(0)
        for variant, (at, values) in taus.items():
            _with_spread(axes, at, values, variant)
        axes.set_ylabel("tau (tokens per step), mean over sets")
        axes.legend(fontsize=9, frameon=False)
    for axes in figure.axes:
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.set_xlabel("supervised tokens trained on")
        axes.grid(color="#e5e5e5")
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def _means(given: Group, sweep: results.Sweep, metric: str) -> list[Estimate | None]:
    """Means over all sets of the entries of a sweep."""
    return [results.over_sets(given, e, metric) for _, e in sweep.points]


def _with_spread(
    axes: Axes, at: Sequence[Any], values: list[Estimate | None], variant: str
) -> None:
    """Draws estimates with their intervals; those that are missing are left out."""
    real = [(x, v) for x, v in zip(at, values, strict=True) if v is not None]
    spread = [
        [v.value - (v.value if v.low is None else v.low) for _, v in real],
        [(v.value if v.high is None else v.high) - v.value for _, v in real],
    ]
    axes.errorbar(
        [x for x, _ in real],
        [v.value for _, v in real],
        yerr=spread,
        color=colour(variant),
        marker="o",
        capsize=3,
        label=variant,
    )


def sweep(given: Group, field: str) -> Figure | None:
    """tau and speedup against one setting that is a number: one curve a variant."""
    found = [s for s in results.sweeps(given) if s.field == field]
    if field == "tree":  # of trees only chains stand in a row
        found = [
            s._replace(points=[p for p in s.points if results.is_chain(p[0])])
            for s in found
        ]
    found = [s for s in found if len(s.points) > 1]
    if not found:
        return None
    figure = Figure((10.4, 4.2), layout="constrained")
    panels = {"tau_pooled": "tau (tokens per step)", "speedup": "speedup"}
    for axes, (metric, label) in zip(
        figure.subplots(1, 2), panels.items(), strict=True
    ):
        for one in found:
            at = [v["depth"] if field == "tree" else v for v, _ in one.points]
            _with_spread(axes, at, _means(given, one, metric), one.variant)
        axes.set_xlabel(SWEPT[field])
        axes.set_ylabel(f"{label}, mean over sets")
        axes.grid(color="#e5e5e5")
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(fontsize=9, frameon=False)
    return figure


SWEPT = {
    "train.ttt_steps": "unrolled steps in training",
    "tree": "depth of the chain (drafted tokens)",
}


MOST_TREES = 4
PREFERRED = ("eagle3", "eagle2", "eagle1_static", "medusa", "eagle1", "hass")


def trees(given: Group) -> Figure | None:
    """Nodes by depth and rank among siblings, and where accepted ones lie."""
    shapes = []
    for entry in given.used.values():
        found = [r["tree_shape"] for r in entry.rows.values() if r.get("tree_shape")]
        if found:
            maps = [_average(found, name) for name in ("nodes", "accepted")]
            shapes.append((entry, maps))
    if not shapes:
        return None
    shapes.sort(key=lambda s: _preference(s[0].variant))
    shapes = shapes[:MOST_TREES]
    rows = [len(maps[0]) for _, maps in shapes]
    figure = Figure((11, sum(0.8 + 0.27 * n for n in rows) + 0.4), layout="constrained")
    grid = figure.subplots(len(shapes), 2, squeeze=False, height_ratios=rows)
    n_ranks = max(m.shape[1] for _, maps in shapes for m in maps)
    used = max(int(np.flatnonzero(maps[0].any(axis=0)).max()) for _, maps in shapes) + 1
    for line, (entry, maps) in zip(grid, shapes, strict=True):
        titles = "nodes a step", "share of steps accepting"
        for axes, values, title in zip(line, maps, titles, strict=True):
            _heat(axes, values[:, :used], f"{entry.variant}: {title}")
            if used == n_ranks:  # the last column holds all later ranks
                axes.set_xticks(
                    range(used), [*map(str, range(used - 1)), f"{used - 1}+"]
                )
    for axes in grid[-1]:
        axes.set_xlabel("rank among siblings")
    return figure


def _preference(variant: str) -> tuple[int, tuple[int, str]]:
    place = PREFERRED.index(variant) if variant in PREFERRED else len(PREFERRED)
    return place, results.order(variant)


def _average(shapes: list[dict[str, list[list[float]]]], name: str) -> np.ndarray:
    """Mean over sets; a set whose trees are shallower has zeros below."""
    arrays = [np.array(shape[name], float) for shape in shapes]
    size = np.max([a.shape for a in arrays], axis=0)
    padded = [np.pad(a, [(0, n - m) for n, m in zip(size, a.shape)]) for a in arrays]  # noqa: B905
    return np.mean(padded, axis=0)


def _heat(axes: Axes, values: np.ndarray, title: str) -> None:
    depth, ranks = values.shape
    top = values.max() or 1.0
    axes.imshow(values, cmap="Blues", vmin=0, vmax=top, aspect="auto")
    for d in range(depth):
        for r in range(ranks):
            if values[d, r] >= 0.005:
                tone = "white" if values[d, r] > 0.6 * top else "#222222"
                axes.text(
                    r,
                    d,
                    f"{values[d, r]:.2f}",
                    ha="center",
                    va="center",
                    fontsize=7.5,
                    color=tone,
                )
    axes.set_xticks(range(ranks))
    axes.set_yticks(range(depth), [str(d + 1) for d in range(depth)])
    axes.set_ylabel("depth")
    axes.set_title(title, fontsize=10)

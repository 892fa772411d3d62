"""Result lines, read and sorted into groups that may be compared."""

import itertools
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from eagle_jax import metrics
from experiments import common
from experiments.page import NOT_MEASURED

Row = dict[str, Any]

VARIANTS = (
    "vanilla",
    "token",
    "feature",
    "feature_unshifted",
    "eagle1",
    "eagle2",
    "hass",
    "no_feature_loss",
    "fused",
    "eagle3",
    "medusa",
    "lookup",
    "small_draft",
)

SETS = ("mt_bench", "humaneval", "gsm8k", "alpaca", "sum", "qa")  # the papers' order


class Setting(NamedTuple):
    """What all lines of one table share."""

    target: Any
    questions: Any
    preset: Any
    temperature: Any
    max_new_tokens: Any
    batch: Any
    dtype: Any
    device: Any


class Entry(NamedTuple):
    """One trained and configured variant: its line of every set."""

    variant: str
    label: str
    rows: dict[str, Row]

    @property
    def first(self) -> Row:
        """Any of its lines: they share all settings."""
        return next(iter(self.rows.values()))


class Group(NamedTuple):
    """All lines of one setting.

    Args:
      family: letter shared by settings that differ in temperature or batch only.
      used: what stands for each variant in comparisons, one entry a variant.
    """

    family: str
    setting: Setting
    entries: list[Entry]
    used: dict[str, Entry]
    sets: list[str]
    notes: list[str]

    @property
    def main(self) -> list[Entry]:
        """Entries for a figure that holds a dozen: all, or one a named variant."""
        if len(self.entries) <= 12:
            return self.entries
        return [e for v, e in self.used.items() if v in VARIANTS]

    @property
    def stem(self) -> str:
        s = self.setting
        return f"{self.family}_t{s.temperature:g}_b{s.batch}"

    @property
    def name(self) -> str:
        s = self.setting
        return f"{self.family}, temperature {s.temperature:g}, batch {s.batch}"


class Lines(NamedTuple):
    """Result lines of some files, and what was left out."""

    rows: list[Row]
    files: list[Path]
    notes: list[str]


def read(paths: Iterable[str]) -> Lines:
    """Reads files, and the *.jsonl files of folders, in the order given.

    Of lines with one fingerprint the last one read counts.

    Raises:
      ValueError: nothing there, no result lines, or a line that is not sound.
    """
    files: list[Path] = []
    for given in map(Path, paths):
        if not given.exists():
            raise ValueError(f"there is no {str(given)!r} to read results from")
        files += sorted(given.glob("*.jsonl")) if given.is_dir() else [given]
    if not files:
        raise ValueError("no .jsonl files in the folders of --results; name files")
    rows: dict[Any, Row] = {}
    others, repeated = 0, 0
    for file in files:
        for number, row in enumerate(common.read_lines(file)):
            if not isinstance(row.get("variant"), str) or "task" not in row:
                others += 1
                continue
            _check(file, row)
            name = row.get("fingerprint") or (str(file), number)
            repeated += name in rows
            rows.pop(name, None)  # the newest also stands last
            rows[name] = row
    if not rows:
        raise ValueError(
            f"no result lines (with `variant` and `task`) in "
            f"{', '.join(map(str, files))}; experiments.ablate writes them"
        )
    notes = []
    if repeated:
        notes.append(
            f"Lines dropped because a later one has their fingerprint: {repeated}. The "
            f"newest wins (later in a file, or in a later file)."
        )
    if others:
        notes.append(f"Lines that are no results of a variant, not used: {others}.")
    return Lines(list(rows.values()), files, notes)


NUMBERS = (
    "temperature",
    "n_prompts",
    "tau_pooled",
    "tau_by_prompt",
    "speedup",
    "speedup_with_prefill",
    "tokens_per_second",
    "draft_cost",
    "verify_cost",
    "train_flops",
    "n_trainable",
    "trained_tokens",
)
LISTS = ("acceptance_by_depth", "alpha", "learning_curve")
OBJECTS = (
    "tree",
    "config",
    "ci",
    "by_prompt",
    "baseline_by_prompt",
    "calibration",
    "tree_shape",
)


def _check(file: Path, row: Row) -> None:
    if row.get("temperature") is None or not isinstance(row["task"], str):
        raise ValueError(
            f"{file}, {row['variant']} on {row['task']}: a result line needs a name in "
            f"`task` and a number in `temperature`"
        )
    for names, kind in (
        (NUMBERS, (int, float)),
        (LISTS, (list,)),
        (OBJECTS, (dict,)),
    ):
        for name in names:
            value = row.get(name)
            if value is not None and not isinstance(value, kind):
                raise ValueError(
                    f"{file}, {row['variant']} on {row['task']}: {name} must be "
                    f"{' or '.join(k.__name__ for k in kind)} or null, got {value!r}"
                )


def group(rows: list[Row]) -> list[Group]:
    """Sorts lines by setting, largest family first, then by temperature and batch."""
    by_setting: dict[Setting, list[Row]] = {}
    for row in rows:
        values = [row.get(name, "not stated") for name in Setting._fields]
        by_setting.setdefault(Setting(*values), []).append(row)
    families: dict[Any, list[Setting]] = {}
    for setting in by_setting:
        families.setdefault(_family(setting), []).append(setting)

    def size(family: Any) -> tuple[int, int]:
        lines = [row for s in families[family] for row in by_setting[s]]
        return len({row["variant"] for row in lines}), len(lines)

    groups = []
    for number, family in enumerate(sorted(families, key=size, reverse=True)):
        letter = chr(ord("A") + number) if number < 26 else f"Z{number}"
        for setting in sorted(
            families[family], key=lambda s: (s.temperature, str(s.batch).zfill(6))
        ):
            groups.append(_group(letter, setting, by_setting[setting]))
    return groups


def _family(setting: Setting) -> Setting:
    return setting._replace(temperature=None, batch=None)


def _group(letter: str, setting: Setting, rows: list[Row]) -> Group:
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(_identity(row), []).append(row)
    notes = []
    raw: list[tuple[str, dict[str, Row]]] = []
    for lines in found.values():
        by_set: dict[str, Row] = {}
        for row in lines:  # in the order read
            old = by_set.get(row["task"])
            if old is not None:
                notes.append(
                    f"{row['variant']} on {row['task']} was measured on "
                    f"{old.get('n_prompts')} and on {row.get('n_prompts')} prompts; the "
                    f"larger number is shown."
                )
            if old is None or (row.get("n_prompts") or 0) >= (
                old.get("n_prompts") or 0
            ):
                by_set[row["task"]] = row
        raw.append((lines[0]["variant"], by_set))
    entries = []
    for variant in sorted({v for v, _ in raw}, key=order):
        same = [by_set for v, by_set in raw if v == variant]
        same.sort(key=lambda by_set: trained_tokens(next(iter(by_set.values()))) or 0)
        for by_set, label in zip(same, _labels(variant, same), strict=True):
            entries.append(Entry(variant, label, by_set))
    used = _used(entries)
    for variant, entry in used.items():
        n = sum(e.variant == variant for e in entries)
        if n > 1:
            notes.append(
                f"{variant} has {n} entries here; comparisons and the papers' tables use "
                f"{entry.label}."
            )
    sets = sorted({task for e in entries for task in e.rows}, key=_set_order)
    return Group(letter, setting, entries, used, sets, notes)


def _set_order(task: str) -> tuple[int, str]:
    return SETS.index(task) if task in SETS else len(SETS), task


def _identity(row: Row) -> str:
    """Lines of one variant belong together if everything but the set is the same."""
    names = ("variant", "tree", "head", "config", "seed", "trained_tokens")
    return json.dumps([row.get(name) for name in names], sort_keys=True)


def _labels(variant: str, entries: list[dict[str, Row]]) -> list[str]:
    """Names entries of one variant by the fields in which they differ."""
    if len(entries) == 1:
        return [variant]
    flat = [_flat(next(iter(rows.values()))) for rows in entries]
    differing = [
        name
        for name in sorted({name for one in flat for name in one})
        if len({str(one.get(name)) for one in flat}) > 1
    ]
    # Everything that changes training changes the head; its hash says the least.
    shown = [name for name in differing if name != "head"] or differing
    labels = [
        f"{variant} ({', '.join(_field(name, one.get(name)) for name in shown[:3])})"
        for one in flat
    ]
    return [
        label if labels.count(label) == 1 else f"{label} #{i + 1}"
        for i, label in enumerate(labels)
    ]


def _field(name: str, value: Any) -> str:
    if name == "trained_tokens" and value is not None:
        return f"{value:,} tokens"
    return f"{name.rpartition('.')[2]}={value}"


def _flat(row: Row) -> dict[str, Any]:
    """Settings of a line, nested ones dotted; the tree once, lists of paths not at all."""

    def walk(prefix: str, value: Any) -> Iterable[tuple[str, Any]]:
        if isinstance(value, dict):
            for name, inner in value.items():
                yield from walk(f"{prefix}.{name}", inner)
        else:
            yield prefix, value

    config = {k: v for k, v in (row.get("config") or {}).items() if k != "tree"}
    out = {k.removeprefix("."): v for k, v in walk("", config)}
    out |= dict(walk("tree", row.get("tree") or {}))
    for name in ("tree.paths", "train.supervised_tokens"):
        out.pop(name, None)
    out |= {"seed": row.get("seed"), "head": row.get("head")}
    return out | {"trained_tokens": trained_tokens(row)}


def trained_tokens(row: Row) -> int | None:
    """Supervised tokens the head has seen; a line without a head has none."""
    if row.get("trained_tokens") is not None:
        return row["trained_tokens"]
    if row.get("head") is None:
        return None
    return ((row.get("config") or {}).get("train") or {}).get("supervised_tokens")


def _used(entries: list[Entry]) -> dict[str, Entry]:
    """Chooses one entry a variant: trained as long as most variants, then the newest."""
    budgets = [
        {
            trained_tokens(row)
            for e in entries
            if e.variant == v
            for row in e.rows.values()
        }
        for v in {e.variant for e in entries}
    ]

    def popularity(entry: Entry) -> int:
        own = {trained_tokens(row) for row in entry.rows.values()}
        return sum(bool(own & budget) for budget in budgets)

    used: dict[str, Entry] = {}
    for entry in entries:
        old = used.get(entry.variant)
        if old is None or popularity(entry) >= popularity(old):
            used[entry.variant] = entry
    return used


def base(variant: str) -> str:
    """The named variant that a finer one belongs to, itself if there is none."""
    names = [v for v in VARIANTS if variant == v or variant.startswith(v + "_")]
    return max(names, key=len, default=variant)


def order(variant: str) -> tuple[int, str]:
    name = base(variant)
    known = VARIANTS.index(name) if name in VARIANTS else len(VARIANTS)
    return known, variant


class Estimate(NamedTuple):
    """A value, with what is known of its spread.

    Args:
      drawn: bootstrap draws over prompts, where the line holds the prompts' counts.
    """

    value: float
    low: float | None = None
    high: float | None = None
    drawn: np.ndarray | None = None


def estimate(row: Row | None, metric: str) -> Estimate | None:
    """Reads one number of a line with its 95 % interval."""
    value = (row or {}).get(metric)
    if row is None or value is None or not np.isfinite(value):
        return None
    drawn = _draws(row, metric)
    if drawn is not None:
        return Estimate(float(value), *metrics.interval(drawn), drawn)
    pair = (row.get("ci") or {}).get(metric)
    if isinstance(pair, list) and len(pair) == 2 and None not in pair:
        return Estimate(float(value), float(pair[0]), float(pair[1]))
    return Estimate(float(value))


def _draws(row: Row, metric: str) -> np.ndarray | None:
    """Bootstraps tau or speedup from `by_prompt`; the same seed pairs all variants."""
    ours = _counts(row, "by_prompt")
    n = len(ours.get("steps", ()))
    if n < 2:
        return None
    at = metrics.prompt_draws(n, seed=0)
    if metric == "tau_pooled":
        return _ratio(ours["emitted"][at].sum(1), ours["steps"][at].sum(1))
    plain = _counts(row, "baseline_by_prompt")
    if metric not in ("speedup", "speedup_with_prefill") or not plain:
        return None
    fast, slow = (_speeds(x, metric == "speedup_with_prefill") for x in (ours, plain))
    return _ratio(_average(fast[at]), _average(slow[at]))


def _counts(row: Row, name: str) -> dict[str, np.ndarray]:
    return {k: np.asarray(v, float) for k, v in (row.get(name) or {}).items()}


def _speeds(counts: dict[str, np.ndarray], with_prefill: bool) -> np.ndarray:
    """Tokens per second of each prompt, not a number where it decoded nothing."""
    tokens = counts["tokens"] + with_prefill * counts["turns"]
    seconds = counts["seconds"] + with_prefill * counts["prefill_seconds"]
    return _ratio(np.where(tokens > 0, tokens, np.nan), seconds)


def _average(speeds: np.ndarray) -> np.ndarray:
    real = np.isfinite(speeds)
    return _ratio(np.where(real, speeds, 0).sum(1), real.sum(1))


def _ratio(above: np.ndarray, below: np.ndarray) -> np.ndarray:
    return np.divide(above, below, out=np.full(above.shape, np.nan), where=below > 0)


def mean(estimates: list[Estimate | None]) -> Estimate | None:
    """Mean over sets; None if a set is missing. Sets are independent samples."""
    real = [e for e in estimates if e is not None]
    if not real or len(real) < len(estimates):
        return None
    value = float(np.mean([e.value for e in real]))
    drawn = [e.drawn for e in real if e.drawn is not None]
    if len(drawn) == len(real):
        # Sets have their own prompts: shifted, so that equal sizes do not move together.
        mixed = np.mean([np.roll(d, 97 * i) for i, d in enumerate(drawn)], axis=0)
        return Estimate(value, *metrics.interval(mixed), mixed)
    lows, highs = [e.low for e in real], [e.high for e in real]
    if None in lows or None in highs:
        return Estimate(value)
    below = [
        e.value - low for e, low in zip(real, lows, strict=True) if low is not None
    ]
    above = [h - e.value for e, h in zip(real, highs, strict=True) if h is not None]
    n = len(real)
    return Estimate(
        value,
        value - float(np.hypot.reduce(below)) / n,
        value + float(np.hypot.reduce(above)) / n,
    )


def difference(a: Estimate, b: Estimate) -> Estimate:
    """b - a, on paired prompts where both have draws, else as independent."""
    value = b.value - a.value
    if a.drawn is not None and b.drawn is not None:
        drawn = b.drawn - a.drawn
        return Estimate(value, *metrics.interval(drawn), drawn)
    if a.low is None or a.high is None or b.low is None or b.high is None:
        return Estimate(value)
    return Estimate(
        value,
        value - float(np.hypot(b.value - b.low, a.high - a.value)),
        value + float(np.hypot(b.high - b.value, a.value - a.low)),
    )


ORDERINGS = (
    ("token", "feature", "eagle1"),  # EAGLE-1, Figure 4
    ("eagle1_chain", "eagle1_static", "eagle2"),  # EAGLE-1, Table 5; EAGLE-2, Table 1
    ("eagle2", "no_feature_loss", "eagle3"),  # EAGLE-3, Table 2
)
# The first ordering on other trees: checked where its first variant was measured.
ALSO = (
    ("token_chain", "feature_chain", "eagle1_chain"),
    ("token_dynamic", "feature_dynamic", "eagle2"),
)


class Verdict(NamedTuple):
    """Whether `lower` stays below `higher`: by set, and in the mean ("mean")."""

    ordering: tuple[str, ...]
    lower: str
    higher: str
    gaps: dict[str, Estimate | None]
    trees: str


def orderings(given: Group, metric: str) -> list[Verdict]:
    """Checks every pair of neighbours of the papers' orderings."""
    there = tuple(chain for chain in ALSO if chain[0] in given.used)
    verdicts = []
    for chain in ORDERINGS + there:
        for lower, higher in itertools.pairwise(chain):
            a, b = find(given, lower), find(given, higher)
            gaps: dict[str, Estimate | None] = {}
            for task in given.sets:
                one = estimate(a.rows.get(task) if a else None, metric)
                other = estimate(b.rows.get(task) if b else None, metric)
                gaps[task] = difference(one, other) if one and other else None
            gaps["mean"] = mean(list(gaps.values()))
            trees = f"{tree_name(a)}; {tree_name(b)}" if a and b else ""
            verdicts.append(Verdict(chain, lower, higher, gaps, trees))
    return verdicts


def tree_name(entry: Entry) -> str:
    tree = entry.first.get("tree") or {}
    nodes = tree.get("n_nodes", "?")
    if tree.get("kind") == "dynamic" and tree.get("width") == 1:
        return f"chain {nodes}" if nodes != 1 else "none"
    return f"{tree.get('kind', 'tree')} {nodes}"


def find(given: Group, variant: str) -> Entry | None:
    """The entry that stands for a variant.

    `eagle1` and `eagle1_static` stand for each other: its own tree is the static one.
    """
    entry = given.used.get(variant)
    if entry is None and variant == "eagle1":
        entry = given.used.get("eagle1_static")
    if entry is None and variant == "eagle1_static":
        entry = given.used.get("eagle1")
        if entry and (entry.first.get("tree") or {}).get("kind") != "static":
            return None
    return entry


def says(gap: Estimate | None) -> str:
    """held, not held or not measured; below it the gap, unsure if its interval holds 0."""
    if gap is None:
        return NOT_MEASURED
    told = "held" if gap.value > 0 else "not held"
    if gap.low is None or gap.high is None:
        return f"{told}\n{gap.value:+.2f}, no interval"
    unsure = ", unsure" if gap.low <= 0 <= gap.high else ""
    return f"{told}{unsure}\n{gap.value:+.2f} [{gap.low:+.2f}, {gap.high:+.2f}]"

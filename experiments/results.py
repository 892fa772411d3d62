"""Result lines, read and sorted into groups that may be compared."""

import collections
import itertools
import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from eagle_jax import metrics
from experiments import common, variants
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
    """What all lines of one table share.

    Args:
      prompts: asked of each set, as far as it has them: the most of an entry's sets.
    """

    target: Any
    questions: Any
    preset: Any
    temperature: Any
    max_new_tokens: Any
    batch: Any
    dtype: Any
    device: Any
    prompts: int | None


GIVEN = Setting._fields[:-1]  # what each line says itself


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
    for lines in _by(rows, _identity).values():
        n_prompts = max(row.get("n_prompts") or 0 for row in lines) or None
        given = {name: lines[0].get(name, "not stated") for name in GIVEN}
        setting = Setting(**given, prompts=n_prompts)
        by_setting.setdefault(setting, []).extend(lines)
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
    notes = []
    raw: list[tuple[str, dict[str, Row]]] = []
    for lines in _by(rows, _identity).values():
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
        raw.append((_variant(lines[0]), by_set))
    sets = sorted({task for _, by_set in raw for task in by_set}, key=_set_order)
    tokens = [trained_tokens(next(iter(by_set.values()))) for _, by_set in raw]
    known = [n for n in tokens if n is not None]
    most = [n for n in known if 2 * sum(alike(n, m) for m in known) > len(known)]
    seen = most[0] if most else 0  # no number in common: none is like it
    entries = []
    for variant in sorted({v for v, _ in raw}, key=order):
        same = [by_set for v, by_set in raw if v == variant]
        same.sort(key=lambda by_set: trained_tokens(next(iter(by_set.values()))) or 0)
        for by_set, label in zip(same, _labels(variant, same, seen), strict=True):
            if len(by_set) < len(sets):
                label += f", {len(by_set)} of {len(sets)} sets"
            ordered = {task: by_set[task] for task in sets if task in by_set}
            entries.append(Entry(variant, label, ordered))
    used = _used(entries)
    for variant, entry in used.items():
        n = sum(e.variant == variant for e in entries)
        if n > 1:
            notes.append(
                f"{variant} has {n} entries here; comparisons and the papers' tables use "
                f"{entry.label}."
            )
    return Group(letter, setting, entries, used, sets, notes)


def _set_order(task: str) -> tuple[int, str]:
    return SETS.index(task) if task in SETS else len(SETS), task


def _by(rows: list[Row], key: Callable[[Row], str]) -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(key(row), []).append(row)
    return found


def _identity(row: Row) -> str:
    """Lines of one variant belong together if everything but the set is the same."""
    names = ("variant", "tree", "head", "config", "seed", "trained_tokens")
    names += GIVEN
    return json.dumps([row.get(name) for name in names], sort_keys=True)


def _variant(row: Row) -> str:
    """The variant of a line; `eagle3_ttt3` is `eagle3` where three steps are the rule."""
    name, steps = _unroll(row)
    usual = _unroll(row | {"variant": name})[1]
    return name if steps == usual else row["variant"]


def _unroll(row: Row) -> tuple[str, int | None]:
    """A variant without the suffix of unrolled steps, and their number."""
    found = re.search(r"_ttt(\d)(?=_|$)", row["variant"])
    if found:
        return row["variant"].replace(found[0], ""), int(found[1])
    steps = ((row.get("config") or {}).get("train") or {}).get("ttt_steps")
    known = variants.BASES.get(base(row["variant"]))
    return row["variant"], known[1].get("ttt_steps", steps) if known else steps


def _labels(variant: str, entries: list[dict[str, Row]], seen: int) -> list[str]:
    """Names entries of one variant by the fields in which they differ from most.

    A label also says how many tokens a head saw where most of its group saw another
    number, `seen`, or have none in common (0).
    """
    flat = [_flat(next(iter(rows.values()))) for rows in entries]
    names = sorted({name for one in flat for name in one})
    values = {name: [str(one.get(name)) for one in flat] for name in names}
    differing = [name for name in names if len(set(values[name])) > 1]
    # Everything that changes training changes the head; its hash says the least.
    shown = [name for name in differing if name != "head"] or differing
    usual = {}
    for name in shown:
        value, n = collections.Counter(values[name]).most_common(1)[0]
        usual[name] = value if 2 * n > len(flat) else None
    # A tree has a name of its own where no other tree here shares it.
    trees = [tree_name(next(iter(rows.values()))) for rows in entries]
    whole = [json.dumps(next(iter(rows.values())).get("tree")) for rows in entries]
    unique = len(set(trees)) == len(set(zip(trees, whole, strict=True)))
    by_tree = {n for n in shown if n.startswith("tree.")} if unique else set()
    labels = []
    for number, one in enumerate(flat):
        own = [name for name in shown if values[name][number] != usual[name]]
        tokens = one["trained_tokens"]
        if tokens and "trained_tokens" not in own and not alike(tokens, seen):
            own.insert(0, "trained_tokens")
        parts = [_field(name, one.get(name)) for name in own if name not in by_tree]
        parts += [trees[number]] if by_tree.intersection(own) else []
        told = ", ".join(parts[:4])
        labels.append(f"{variant} ({told})" if told else variant)
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


def alike(tokens: int | None, others: int | None) -> bool:
    """Whether heads that saw so many tokens compare: within a tenth, if both are known."""
    if tokens is None or others is None:
        return True
    return max(tokens, others) <= 1.1 * min(tokens, others)


def _used(entries: list[Entry]) -> dict[str, Entry]:
    """Chooses one entry a variant: set and trained as most variants are.

    Of several such, the largest tree, so that variants are compared in the same one, and
    then the newest.
    """
    own = [_run(entry.first) for entry in entries]
    sharing = {
        item: len(
            {e.variant for e, items in zip(entries, own, strict=True) if item in items}
        )
        for item in set().union(*own)
    }
    used: dict[str, tuple[tuple[int, int], Entry]] = {}
    for entry, items in zip(entries, own, strict=True):
        n_nodes = (entry.first.get("tree") or {}).get("n_nodes") or 0
        rank = sum(sharing[item] for item in items), n_nodes
        if entry.variant not in used or rank >= used[entry.variant][0]:
            used[entry.variant] = rank, entry
    return {variant: entry for variant, (_, entry) in used.items()}


def _run(row: Row) -> set[tuple[str, str]]:
    """What a run sets for all its variants, and how long the head was trained."""
    given = _flat(row | {"tree": (row.get("config") or {}).get("tree")})
    given.pop("head")
    return {(name, str(value)) for name, value in given.items()}


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
    """Bootstraps tau or speedup from `by_prompt`; the same seed pairs all variants.

    The prompts of a batch were decoded together and share its time, so for speeds whole
    batches are drawn; fewer than four say too little.
    """
    ours = _counts(row, "by_prompt")
    n = len(ours.get("steps", ()))
    if n < 2:
        return None
    if metric == "tau_pooled":
        at = metrics.prompt_draws(n, seed=0)
        return _ratio(ours["emitted"][at].sum(1), ours["steps"][at].sum(1))
    plain = _counts(row, "baseline_by_prompt")
    if metric not in ("speedup", "speedup_with_prefill") or not plain:
        return None
    size = int(row.get("batch") or 1)
    starts = np.arange(0, n, size)
    if size > 1 and len(starts) < 4:
        return None
    at = metrics.prompt_draws(len(starts), seed=0)
    fast, slow = (_speeds(x, metric == "speedup_with_prefill") for x in (ours, plain))
    return _ratio(_average(fast, starts, at), _average(slow, starts, at))


def _counts(row: Row, name: str) -> dict[str, np.ndarray]:
    return {k: np.asarray(v, float) for k, v in (row.get(name) or {}).items()}


def _speeds(counts: dict[str, np.ndarray], with_prefill: bool) -> np.ndarray:
    """Tokens per second of each prompt, not a number where it decoded nothing."""
    tokens = counts["tokens"] + with_prefill * counts["turns"]
    seconds = counts["seconds"] + with_prefill * counts["prefill_seconds"]
    return _ratio(np.where(tokens > 0, tokens, np.nan), seconds)


def _average(speeds: np.ndarray, starts: np.ndarray, at: np.ndarray) -> np.ndarray:
    """Mean speed of the prompts of drawn batches, which begin at `starts`."""
    real = np.isfinite(speeds)
    sums = np.add.reduceat(np.where(real, speeds, 0), starts)
    counts = np.add.reduceat(real, starts, dtype=int)
    return _ratio(sums[at].sum(1), counts[at].sum(1))


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


def over_sets(given: Group, entry: Entry, metric: str) -> Estimate | None:
    """Mean of an entry's numbers over all sets of its group."""
    return mean([estimate(entry.rows.get(task), metric) for task in given.sets])


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
# Checked where the first variant was measured: the first ordering on other trees, and
# what else the papers compare.
ALSO = (
    ("token_chain", "feature_chain", "eagle1_chain"),
    ("token_dynamic", "feature_dynamic", "eagle2"),
    ("feature_unshifted", "eagle1"),  # EAGLE-1, Figure 4
    ("eagle1_fixed", "eagle1"),  # EAGLE-1, Table 6
    ("eagle1_no_noise", "eagle1"),  # EAGLE-1 adds noise against its own errors
    ("eagle2_no_both", "eagle2"),  # EAGLE-2, Table 3
    ("eagle2_no_value", "eagle2"),
    ("eagle2_no_rerank", "eagle2"),
    ("eagle2", "hass"),  # HASS, main results
)


class Verdict(NamedTuple):
    """Whether `lower` stays below `higher`: by set, and in the mean ("mean")."""

    ordering: tuple[str, ...]
    lower: str
    higher: str
    gaps: dict[str, Estimate | None]
    trees: str


def orderings(given: Group, metric: str) -> list[Verdict]:
    """Checks every pair of neighbours of the papers' orderings, of heads that compare."""
    there = tuple(chain for chain in ALSO if chain[0] in given.used)
    verdicts = []
    for chain in ORDERINGS + there:
        for lower, higher in itertools.pairwise(chain):
            a, b = find(given, lower), find(given, higher)
            found = gaps(given, a, b if _compare(a, b) else None, metric)
            trees = f"{tree_name(a.first)}; {tree_name(b.first)}" if a and b else ""
            verdicts.append(Verdict(chain, lower, higher, found, trees))
    return verdicts


def _compare(a: Entry | None, b: Entry | None) -> bool:
    return not (a and b) or alike(trained_tokens(a.first), trained_tokens(b.first))


def gaps(
    given: Group, a: Entry | None, b: Entry | None, metric: str
) -> dict[str, Estimate | None]:
    """How far b lies above a: by set, and in the mean ("mean").

    Speeds are compared within a run: between runs the machine may have changed.
    """
    found: dict[str, Estimate | None] = {}
    for task in given.sets:
        rows = [e.rows.get(task, {}) if e else {} for e in (a, b)]
        one, other = (estimate(row, metric) for row in rows)
        runs = {row.get("baseline_tokens_per_second") for row in rows}
        comparable = len(runs) == 1 or not metric.startswith("speedup")
        found[task] = difference(one, other) if one and other and comparable else None
    return found | {"mean": mean(list(found.values()))}


def apart(given: Group) -> list[str]:
    """Labels of entries measured beside other plain decoding than most were."""
    labels: dict[str, None] = {}
    for task in given.sets:
        plain = {
            e.label: e.rows[task].get("baseline_tokens_per_second")
            for e in given.entries
            if task in e.rows
        }
        (usual, _), *_ = collections.Counter(plain.values()).most_common(1)
        labels |= dict.fromkeys(label for label in plain if plain[label] != usual)
    return list(labels)


def is_chain(tree: dict[str, Any]) -> bool:
    """TreeConfig.is_chain of a result line's tree."""
    return tree.get("width") == 1 and tree.get("n_nodes", 1) > 1


def tree_name(row: Row) -> str:
    tree = row.get("tree") or {}
    nodes = tree.get("n_nodes", "?")
    if nodes == 1:
        return "none"
    kind = "chain" if is_chain(tree) else tree.get("kind", "tree")
    return f"{kind} {nodes}"


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


def verdict(gaps: list[Estimate | None]) -> str:
    """What several gaps say together; unsure if an interval that holds 0 decides."""
    known = [gap for gap in gaps if gap is not None]
    if not known or len(known) < len(gaps):
        return NOT_MEASURED
    if any(gap.high is not None and gap.high < 0 for gap in known):
        return "not held"
    told = "held" if all(gap.value > 0 for gap in known) else "not held"
    sure = all(gap.low is not None and gap.low > 0 for gap in known)
    return told if sure else f"{told}, unsure"


LEAST = 20  # steps that an alpha must rest on


def chain_alpha(entry: Entry) -> list[Estimate]:
    """n-alpha of a chain, steps of all sets pooled, as far as enough steps get there.

    Intervals take steps as independent: lines do not say which prompt accepted what.
    """
    rows = [r for r in entry.rows.values() if r.get("alpha") and r.get("by_prompt")]
    if not rows:
        return []
    depth = min(len(row["acceptance_by_depth"]) for row in rows)
    reached = np.zeros(depth + 1)
    for row in rows:
        n_steps = sum(row["by_prompt"]["steps"])
        shares = [a or 0.0 for a in row["acceptance_by_depth"][:depth]]
        reached += n_steps * np.array([1.0, *shares])
    found = []
    for n, more in itertools.pairwise(reached):
        if n < LEAST:
            break
        rate = more / n
        spread = 1.96 * np.sqrt(rate * (1 - rate) / n)
        found.append(Estimate(rate, max(rate - spread, 0), min(rate + spread, 1)))
    return found


class Fall(NamedTuple):
    """By how much alpha falls up to position n, with training-time test and without."""

    with_test: str
    without: str
    n: int
    falls: tuple[Estimate, Estimate]
    gap: Estimate


def falls(given: Group) -> list[Fall]:
    """Compares chains trained with several unrolled steps to chains trained with one.

    Heads that saw other numbers of tokens are not compared.
    """
    found = []
    for with_test in ("eagle3_chain", "eagle3_ttt7_chain"):
        for without in ("fused_chain", "eagle1_chain", "eagle3_ttt1_chain"):
            a, b = given.used.get(with_test), given.used.get(without)
            if not a or not b or not _compare(a, b):
                continue
            ours, theirs = chain_alpha(a), chain_alpha(b)
            n = min(len(ours), len(theirs)) - 1
            if n > 0:
                pair = difference(ours[n], ours[0]), difference(theirs[n], theirs[0])
                gap = difference(*pair)
                found.append(Fall(with_test, without, n, pair, gap))
    return found


class Sweep(NamedTuple):
    """Entries of one variant that differ in nothing but one setting.

    Args:
      field: the setting, dotted; the whole tree is one.
      points: its values in order, each with its entry.
    """

    variant: str
    field: str
    points: list[tuple[Any, Entry]]


def sweeps(given: Group) -> list[Sweep]:
    """Finds all settings that were changed one at a time."""
    known = [(e, _settings(e.first)) for e in given.entries if e.first.get("head")]
    names = dict.fromkeys(name for _, own in known for name in sorted(own))
    found = []
    for field in names:
        alike: dict[str, dict[str, tuple[Any, Entry]]] = {}
        for entry, own in known:
            if own.get(field) is None:
                continue
            rest = json.dumps({k: v for k, v in own.items() if k != field})
            value = own.get(field)
            alike.setdefault(rest, {})[json.dumps(value)] = value, entry
        for points in alike.values():
            if field != "variant" and len(points) > 1:
                ordered = sorted(points.values(), key=lambda p: _rank(p[0]))
                variant = _unroll(ordered[0][1].first)[0]
                found.append(Sweep(variant, field, ordered))
    return found


class Reach(NamedTuple):
    """What more training tokens gave last, and how many more of them would give.

    Args:
      points: supervised tokens and tau, in order.
      per_doubling: what tau gained from twice the tokens, between the last two points.
    """

    points: list[tuple[int, float]]
    per_doubling: float

    def tokens(self, goal: float) -> float:
        """Tokens for a tau, on a straight line in log tokens; infinite if never."""
        last, tau = self.points[-1]
        if tau >= goal:
            return next(n for n, value in self.points if value >= goal)
        if self.per_doubling <= 0:
            return float("inf")
        return float(last * np.exp2((goal - tau) / self.per_doubling))


def reach(given: Group, swept: Sweep) -> Reach | None:
    """Reads the learning curve of one head kind off a sweep of its training tokens."""
    points = []
    for _, entry in swept.points:
        tau = over_sets(given, entry, "tau_pooled")
        tokens = trained_tokens(entry.first)
        if tau and tokens:
            points.append((tokens, tau.value))
    if len(points) < 2:
        return None
    (before, low), (last, high) = points[-2:]
    return Reach(points, float((high - low) / np.log2(last / before)))


def _rank(value: Any) -> tuple[Any, ...]:
    if isinstance(value, dict):  # a tree
        return value.get("n_nodes") or 0, value.get("depth") or 0
    return (value,) if isinstance(value, int | float) else (0, str(value))


def _settings(row: Row) -> dict[str, Any]:
    """What makes a head and how it drafts; tokens as they were asked for."""
    own = {k: v for k, v in _flat(row).items() if not k.startswith("tree.")}
    own = {
        k: own[k] for k in sorted(own) if k not in ("head", "trained_tokens", "name")
    }
    variant, steps = _unroll(row)
    own |= {"variant": variant, "train.ttt_steps": steps, "tree": row.get("tree")}
    asked = ((row.get("config") or {}).get("train") or {}).get("supervised_tokens")
    got = trained_tokens(row)
    # A head that was given was not trained with this run's config.
    near = asked and got and abs(got / asked - 1) < 0.2
    return own | {"train.supervised_tokens": asked if near else got}

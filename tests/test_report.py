"""`report`: made-up lines in; groups, verdicts, paper cells, files and one page out."""

import csv
import html
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from experiments import page, papers, plots, report, results
from experiments.page import NOT_BUILT, NOT_MEASURED, Number, Table
from experiments.results import Estimate, Group
from tests import fake_results
from tests.fake_results import SETS, line, sweep, tuned


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def bare(variant: str, task: str, **changes: Any) -> dict[str, Any]:
    """A line with nothing optional: what the first result lines held."""
    row = line(variant, task, n_prompts=3)
    keys = ("variant", "target", "questions", "preset", "temperature", "task", "tree")
    keys += ("max_new_tokens", "batch", "dtype", "device", "head", "n_prompts")
    keys += ("tau_pooled", "speedup", "acceptance_by_depth", "fingerprint")
    return {key: row[key] for key in keys} | changes


def groups(rows: list[dict[str, Any]]) -> list[Group]:
    return results.group(rows)


# Reading -----------------------------------------------------------------------------


def test_of_lines_with_one_fingerprint_the_newest_wins_and_it_is_said(tmp_path):
    old = bare("eagle3", "qa", tau_pooled=1.5, commit="old")
    new = bare("eagle3", "qa", tau_pooled=2.5, commit="new")
    other = {"experiment": "bench", "device": "none"}
    write(tmp_path / "a.jsonl", [old, other])
    write(tmp_path / "b.jsonl", [new])
    lines = results.read([str(tmp_path)])
    assert [row["tau_pooled"] for row in lines.rows] == [2.5]
    assert [file.name for file in lines.files] == ["a.jsonl", "b.jsonl"]
    assert "fingerprint: 1. The newest wins" in lines.notes[0]
    assert lines.notes[1].endswith("not used: 1.") and len(lines.notes) == 2


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (None, "there is no .*nothing.jsonl"),
        ([], "no result lines"),
        ([{"experiment": "bench"}], "no result lines"),
        ([bare("eagle3", "qa", tau_pooled="2")], "eagle3 on qa: tau_pooled must be"),
        ([bare("eagle3", "qa", ci=[1, 2])], "ci must be dict or null"),
        ([bare("eagle3", "qa", temperature=None)], "number in `temperature`"),
    ],
    ids=["no file", "empty", "others", "string", "list", "no temperature"],
)
def test_unsound_input_is_refused_with_what_is_wrong(tmp_path, rows, message):
    path = tmp_path / "nothing.jsonl"
    if rows is not None:
        write(path, rows)
    with pytest.raises(ValueError, match=message):
        results.read([str(path)])


@pytest.mark.parametrize("field", results.Setting._fields)
def test_lines_of_different_settings_never_share_a_table(field: str):
    changed: dict[str, Any] = {
        "temperature": 1.0,
        "batch": 4,
        "max_new_tokens": 99,
        "prompts": 5,
    }
    value = changed.get(field, "other")
    field = "n_prompts" if field == "prompts" else field
    rows = [bare("eagle3", "qa"), bare("eagle2", "qa", **{field: value})]
    assert [len(g.entries) for g in groups(rows)] == [1, 1]
    rows[1][field] = rows[0][field]
    assert [len(g.entries) for g in groups(rows)] == [2]


def test_heads_trained_for_other_lengths_are_entries_of_their_own():
    rows = [line("eagle3", "qa", supervised_tokens=n) for n in (50_000, 6_250)]
    rows += [line("eagle2", "qa", supervised_tokens=50_000)]
    (group,) = groups(rows)
    labels = [entry.label for entry in group.entries]
    assert labels == ["eagle2", "eagle3 (6,250 tokens)", "eagle3 (50,000 tokens)"]
    # Comparisons take the budget that other variants have, and the page says so.
    assert group.used["eagle3"].label == "eagle3 (50,000 tokens)"
    assert any("2 entries" in note and "50,000" in note for note in group.notes)


def test_more_prompts_win_over_fewer_and_it_is_said():
    few = bare("eagle3", "qa", n_prompts=3, tau_pooled=1.5, fingerprint="few")
    many = bare("eagle3", "qa", n_prompts=10, tau_pooled=2.0, fingerprint="many")
    for rows in ([few, many], [many, few]):
        (group,) = groups(rows)
        assert group.used["eagle3"].rows["qa"]["tau_pooled"] == 2.0
        assert any("3" in note and "10" in note for note in group.notes)


def test_lines_on_other_numbers_of_prompts_do_not_stand_for_a_variant():
    rows = [tuned("eagle2", n_prompts=10), tuned("eagle3", n_prompts=10)]
    rows += [*sweep(), tuned("eagle3", n_prompts=20, supervised_tokens=50_000)]
    found = groups(rows)
    assert {g.setting.prompts for g in found} == {5, 10, 20}
    assert len({g.family for g in found}) == 3
    for group in found:
        for entry in group.entries:
            assert {row["n_prompts"] for row in entry.rows.values()} == {
                group.setting.prompts
            }
    # A set that has fewer questions than were asked for stays with the others.
    few = [
        bare("eagle3", "sum", n_prompts=79),
        bare("eagle3", "mt_bench", n_prompts=80),
    ]
    (group,) = groups(few)
    assert group.setting.prompts == 80 and len(group.entries) == 1


def test_a_head_trained_for_longer_than_those_of_other_variants_says_so():
    rows = [line(v, "qa", supervised_tokens=20_000) for v in ("eagle2", "eagle3")]
    rows += [
        line("lookup", "qa"),
        line("hass", "qa", supervised_tokens=21_000),  # within a tenth
        line("eagle1", "qa", supervised_tokens=400_000),
        tuned("medusa", n_prompts=10, taps=[2]),
        tuned("medusa", n_prompts=10, taps=[15], supervised_tokens=90_000),
    ]
    (group,) = groups(rows)
    assert [e.label for e in group.entries] == [
        "eagle1 (400,000 tokens)",
        *("eagle2", "hass", "eagle3"),
        "medusa (taps=[2], 20,137 tokens)",
        "medusa (taps=[15], 90,137 tokens)",
        "lookup",
    ]
    # Where half of them saw so many and half so many, all say how many they saw.
    (group,) = groups([rows[0], line("eagle3", "qa", supervised_tokens=90_000)])
    labels = ["eagle2 (20,000 tokens)", "eagle3 (90,000 tokens)"]
    assert [e.label for e in group.entries] == labels


def test_labels_tell_what_is_unusual_and_the_usual_entry_has_none():
    (group,) = groups(sweep())
    labels = [entry.label for entry in group.entries]
    assert "eagle3" in labels and "eagle3 (taps=[2])" in labels
    assert "eagle3 (fc_norm=True)" in labels
    assert "eagle3 (taps=[2], mask=official)" in labels
    assert "eagle3 (100,137 tokens, chain 3)" in labels
    assert len(set(labels)) == len(labels)


def test_the_usual_number_of_unrolled_steps_is_the_variant_itself():
    (group,) = groups(sweep())
    assert group.used["eagle3"].first["variant"] == "eagle3_ttt3"
    assert group.used["eagle3_ttt1"].first["variant"] == "eagle3_ttt1"
    assert "eagle3_ttt3" not in group.used


def test_comparisons_use_the_entry_set_as_most_variants():
    rows = [tuned("eagle2"), tuned("hass"), tuned("eagle3")]
    rows += [tuned("eagle3", taps=[2]), tuned("eagle3", draft__norm_output=True)]
    for given in (rows, rows[::-1]):
        (group,) = groups(given)
        assert group.used["eagle3"].first["config"] == rows[0]["config"]


def test_comparisons_are_made_in_the_same_tree_whatever_was_measured_last():
    rows = [
        tuned(variant, tree=fake_results.DYNAMIC | {"n_nodes": n})
        for variant, n in (("eagle2", 60), ("eagle2", 4), ("eagle3", 4), ("eagle3", 60))
    ]
    for given in (rows, rows[::-1]):
        (group,) = groups(given)
        used = [group.used[variant].first for variant in ("eagle2", "eagle3")]
        assert [row["tree"]["n_nodes"] for row in used] == [60, 60]


def test_an_entry_says_how_many_sets_it_lacks():
    rows = [bare("eagle3", "qa"), bare("eagle3", "sum"), bare("eagle2", "qa")]
    (group,) = groups(rows)
    assert [e.label for e in group.entries] == ["eagle2, 1 of 2 sets", "eagle3"]


def test_a_sweep_holds_entries_that_differ_in_one_setting_alone():
    (group,) = groups(sweep())
    found = {s.field: s for s in results.sweeps(group)}
    alone = [s for s in results.sweeps(group) if s.field == "taps"]
    assert [[v for v, _ in s.points] for s in alone] == [
        [[2, 15], [2], []],
        [[2], []],  # with the other mask
    ]
    values = {
        field: [v for v, _ in found[field].points]
        for field in ("train.ttt_steps", "train.supervised_tokens", "draft.fc_norm")
    }
    assert values == {
        "train.ttt_steps": [1, 3, 7],
        "train.supervised_tokens": [20_000, 50_000, 100_000],
        "draft.fc_norm": [False, True],
    }
    trees = [results.tree_name(e.first) for _, e in found["tree"].points]
    assert trees == ["chain 2", "chain 3", "chain 4", "dynamic 26"]
    assert "variant" not in found


def test_a_head_that_was_given_is_swept_by_what_it_saw():
    rows = [
        tuned("eagle3") | {"trained_tokens": n, "head": str(n)} for n in (1000, 9000)
    ]
    (group,) = groups(rows)
    (sweep,) = results.sweeps(group)
    assert [value for value, _ in sweep.points] == [1000, 9000]


def test_what_more_training_would_take_is_read_off_the_last_doubling():
    given = [
        tuned("eagle3", supervised_tokens=n) | {"tau_pooled": tau}
        for n, tau in ((10_000, 1.2), (20_000, 1.4), (80_000, 2.0))
    ]
    given = [
        row | {"trained_tokens": n} for row, n in zip(given, (10, 20, 80), strict=True)
    ]
    (group,) = groups(given)
    (swept,) = results.sweeps(group)
    found = results.reach(group, swept)
    assert found is not None
    assert found.per_doubling == pytest.approx(0.3)
    assert found.tokens(2.6) == pytest.approx(320)  # two doublings of 80
    assert found.tokens(2.0) == 80 and found.tokens(1.3) == 20
    assert found._replace(per_doubling=-0.1).tokens(3.0) == np.inf
    (table,) = report._reach(group, [swept])
    assert isinstance(table, Table)
    assert [cell if isinstance(cell, str) else cell.value for cell in table.rows[0]][
        :4
    ] == ["eagle3", 80, 2.0, pytest.approx(0.3)]
    alone = swept._replace(points=swept.points[:1])
    assert results.reach(group, alone) is None and report._reach(group, [alone]) == []


def test_finer_variants_stand_with_the_named_one_they_belong_to():
    names = [
        "small_draft_chain",
        "eagle3_ttt1",
        "eagle3",
        "eagle1_chain",
        "new",
        "token",
    ]
    ordered = sorted(names, key=results.order)
    assert ordered == [
        "token",
        "eagle1_chain",
        "eagle3",
        "eagle3_ttt1",
        "small_draft_chain",
        "new",
    ]
    assert results.base("feature_unshifted") == "feature_unshifted"
    assert results.base("feature_chain") == "feature"


# Intervals and orders ----------------------------------------------------------------


def test_an_interval_comes_from_the_prompts_else_from_the_line_else_not_at_all():
    full = line("eagle3", "qa")
    found = results.estimate(full, "tau_pooled")
    assert found and found.low is not None and found.high is not None
    assert found.low < found.value < found.high
    # A bootstrap by hand over the same draws.
    rng = np.random.default_rng(0)
    emitted, steps = (np.array(full["by_prompt"][k]) for k in ("emitted", "steps"))
    draws = [
        emitted[i].sum() / steps[i].sum() for i in rng.integers(10, size=(1000, 10))
    ]
    assert (found.low, found.high) == pytest.approx(np.quantile(draws, [0.025, 0.975]))
    given = bare("eagle3", "qa", ci={"tau_pooled": [1.0, 9.0]})
    assert results.estimate(given, "tau_pooled") == (given["tau_pooled"], 1, 9, None)
    alone = bare("eagle3", "qa")
    assert results.estimate(alone, "tau_pooled") == Estimate(alone["tau_pooled"])
    assert results.estimate(alone | {"tau_pooled": None}, "tau_pooled") is None


def test_the_speedup_of_the_counts_is_the_speedup_of_the_line():
    row = line("eagle3", "qa")
    for metric in ("speedup", "speedup_with_prefill"):
        found = results.estimate(row, metric)
        assert found and found.drawn is not None
        assert found.value == pytest.approx(found.drawn.mean(), rel=0.02)
    row["by_prompt"] = {k: v[:1] for k, v in row["by_prompt"].items()}
    assert results.estimate(row, "speedup").drawn is None  # type: ignore[union-attr]


def test_speeds_in_batches_are_drawn_by_batches():
    row: dict[str, Any] = line("eagle3", "qa") | {"batch": 2}
    ours, plain = row["by_prompt"], row["baseline_by_prompt"]
    rng = np.random.default_rng(1)
    for counts in (ours, plain):  # the prompts of a batch have its time
        counts["seconds"] = np.repeat(rng.uniform(1, 2, 5), 2).tolist()
    fast, slow = (
        np.array(counts["tokens"]) / np.array(counts["seconds"])
        for counts in (ours, plain)
    )
    at = np.random.default_rng(0).integers(5, size=(1000, 5))
    pairs = np.concatenate([2 * at, 2 * at + 1], axis=1)
    draws = [fast[i].mean() / slow[i].mean() for i in pairs]
    found = results.estimate(row, "speedup")
    assert found and found[1:3] == pytest.approx(np.quantile(draws, [0.025, 0.975]))
    few = results.estimate(row | {"batch": 4}, "speedup")  # three batches
    assert few == Estimate(row["speedup"])
    assert results.estimate(row | {"batch": 4}, "tau_pooled").low is not None  # type: ignore[union-attr]


def test_the_mean_needs_every_set_and_has_a_narrower_interval():
    parts = [Estimate(2.0, 1.0, 3.0), Estimate(4.0, 3.0, 5.0)]
    found = results.mean([*parts])
    assert found and found[:3] == pytest.approx((3.0, 3 - 2**0.5 / 2, 3 + 2**0.5 / 2))
    assert results.mean([*parts, None]) is None
    assert results.mean([]) is None


def verdicts(taus: dict[str, float], **changes: Any) -> dict[str, str]:
    rows = [
        bare(variant, task, tau_pooled=tau, **changes)
        for variant, tau in taus.items()
        for task in ("qa", "sum")
    ]
    (group,) = groups(rows)
    found = results.orderings(group, "tau_pooled")
    return {f"{v.lower} < {v.higher}": results.says(v.gaps["mean"]) for v in found}


def test_orders_that_hold_and_that_do_not_and_that_were_not_measured():
    told = verdicts({"token": 1.2, "feature": 1.5, "eagle1": 1.4, "eagle3": 2.0})
    assert told["token < feature"] == "held\n+0.30, no interval"
    assert told["feature < eagle1"] == "not held\n-0.10, no interval"
    assert told["no_feature_loss < eagle3"] == NOT_MEASURED
    assert told["eagle1_chain < eagle1_static"] == NOT_MEASURED
    wide = verdicts(
        {"eagle2": 1.6, "no_feature_loss": 1.8}, ci={"tau_pooled": [1.2, 2.4]}
    )
    assert wide["eagle2 < no_feature_loss"].startswith("held, unsure")
    # Independent: the half-widths 0.1 and 0.1 add up to 0.14.
    gap = results.difference(Estimate(1.6, 1.5, 1.7), Estimate(1.8, 1.7, 1.9))
    assert results.says(gap) == "held\n+0.20 [+0.06, +0.34]"


def test_heads_that_saw_other_numbers_of_tokens_are_not_compared():
    """The order of two heads of which one was trained for longer says nothing."""
    seen = {"eagle2": 20_000, "no_feature_loss": 21_900, "eagle3": 24_500}
    rows = [line(v, "qa", n_prompts=2, supervised_tokens=n) for v, n in seen.items()]
    rows += [
        stepped(v, [0.5, 0.25]) | {"trained_tokens": n}
        for v, n in (("eagle3_chain", 20_000), ("eagle1_chain", 9_000))
    ]
    (group,) = groups(rows)
    found = {v.higher: v.gaps for v in results.orderings(group, "tau_pooled")}
    assert found["no_feature_loss"]["qa"] is not None
    assert found["eagle3"] == {"qa": None, "mean": None}
    assert results.falls(group) == []
    rows[-1]["trained_tokens"] = 19_000
    assert len(results.falls(groups(rows)[0])) == 1
    # What needs no training compares with everything.
    assert results.alike(None, 20_000) and not results.alike(0, 20_000)


def test_a_set_that_one_variant_lacks_is_not_measured_and_neither_is_the_mean():
    rows = [bare("eagle2", "qa"), bare("eagle2", "sum"), bare("no_feature_loss", "qa")]
    (group,) = groups(rows)
    verdicts = results.orderings(group, "tau_pooled")
    found = next(v for v in verdicts if v.higher == "no_feature_loss")
    assert found.gaps["qa"] is not None
    assert found.gaps["sum"] is found.gaps["mean"] is None


def test_speedups_of_other_runs_are_named():
    """A ratio to plain decoding at another time may differ for the machine's sake."""
    plain = {"eagle2": 40.0, "no_feature_loss": 40.0, "eagle3": 33.0}
    rows = [
        bare(variant, task, baseline_tokens_per_second=speed)
        for variant, speed in plain.items()
        for task in ("qa", "sum")
    ]
    (group,) = groups(rows)
    assert results.apart(group) == ["eagle3"]
    assert results.apart(groups(rows[:4])[0]) == []
    (note,) = report._runs(group)
    assert "than most: eagle3, each" in note
    for metric, known in (("tau_pooled", True), ("speedup", False)):
        found = {v.higher: v.gaps["mean"] for v in results.orderings(group, metric)}
        assert found["no_feature_loss"] is not None
        assert (found["eagle3"] is not None) is known
    rows = [row | {"baseline_tokens_per_second": i} for i, row in enumerate(rows)]
    (note,) = report._runs(groups(rows)[0])
    assert note.startswith("Measured in several runs, each")


def test_a_claim_of_several_steps_is_as_sure_as_its_least_sure_one():
    up, down = Estimate(0.2, 0.1, 0.3), Estimate(-0.2, -0.3, -0.1)
    maybe, hardly = Estimate(0.1, -0.1, 0.3), Estimate(-0.1, -0.3, 0.1)
    assert results.verdict([up, up]) == "held"
    assert results.verdict([up, maybe]) == "held, unsure"
    assert results.verdict([maybe, hardly]) == "not held, unsure"
    assert results.verdict([up, down]) == "not held"
    assert results.verdict([up, None]) == results.verdict([]) == NOT_MEASURED
    assert results.verdict([Estimate(0.2)]) == "held, unsure"  # no interval


def stepped(
    variant: str, shares: list[float], task: str = "qa", n: int = 400
) -> dict[str, Any]:
    """A chain of so many steps that accepts these shares at least so deep."""
    row = line(variant, task, n_prompts=2)
    steps = {"steps": [n // 2, n // 2]}
    row["by_prompt"] = row["by_prompt"] | steps
    return row | {"acceptance_by_depth": shares}


def test_alpha_pools_the_steps_of_all_sets_and_stops_where_few_got():
    rows = [
        stepped("eagle3_chain", [0.5, 0.25, 0.025, 0.025]),
        stepped("eagle3_chain", [0.1, 0.1, 0.0, 0.0], "sum", 1000),
    ]
    (group,) = groups(rows)
    found = results.chain_alpha(group.used["eagle3_chain"])
    # 1400 steps, of which 300, 200, 10 and 10 went so deep: 10 are too few to go on.
    assert [a.value for a in found] == pytest.approx([300 / 1400, 200 / 300, 10 / 200])
    half = 1.96 * (2 / 3 * 1 / 3 / 300) ** 0.5
    assert found[1][1:3] == pytest.approx((2 / 3 - half, 2 / 3 + half))


def test_alpha_falls_less_with_training_time_test_or_not_and_how_sure_that_is():
    rows = [
        stepped("eagle3_chain", [0.6, 0.36, 0.2]),
        stepped("fused_chain", [0.6, 0.2, 0.02]),
        stepped("eagle1_chain", [0.4, 0.16, 0.01]),
    ]
    (group,) = groups(rows)
    fused, eagle1 = results.falls(group)
    assert (fused.with_test, fused.without, fused.n) == (
        *("eagle3_chain", "fused_chain"),
        2,
    )
    assert fused.falls[0].value == pytest.approx(0.6 - 0.2 / 0.36)
    assert fused.falls[1].value == pytest.approx(0.6 - 0.1)
    assert results.says(fused.gap).startswith("held\n")
    assert eagle1.falls[1].value == pytest.approx(0.4 - 0.01 / 0.16)
    table = report._flatness(group)
    assert isinstance(table, Table) and len(table.rows) == 2
    assert NOT_MEASURED in report._flatness(groups(rows[:1])[0])


def test_differences_of_paired_prompts_are_surer_than_independent_ones():
    low, high = line("eagle2", "qa"), line("eagle2", "qa")
    high["by_prompt"] = dict(low["by_prompt"])
    high["by_prompt"]["emitted"] = [n + 2 for n in low["by_prompt"]["emitted"]]
    a, b = (results.estimate(row, "tau_pooled") for row in (low, high))
    assert a and b
    paired = results.difference(a, b)
    apart = results.difference(a._replace(drawn=None), b._replace(drawn=None))
    assert paired.low is not None and paired.high is not None
    assert apart.low is not None and apart.high is not None
    assert paired.high - paired.low < 0.5 * (apart.high - apart.low)
    assert paired.low > 0 > apart.low


# The papers' tables ------------------------------------------------------------------


def test_every_table_of_the_papers_has_a_counterpart_or_a_reason():
    given = papers.load()
    specs = {(spec.paper, spec.table) for spec in papers.SPECS}
    assert specs == set(given)
    for paper, numbers in {"EAGLE-1": 8, "EAGLE-2": 3, "EAGLE-3": 5}.items():
        assert {(paper, f"Table {n}") for n in range(1, numbers + 1)} <= specs
    assert all(spec.why for spec in papers.SPECS if not spec.ours)
    assert sum(len(table["cells"]) for table in given.values()) == 1259


def test_all_cells_of_a_paper_stand_in_its_table_and_misprints_are_marked():
    made = dict(papers.tables(groups([bare("eagle3", "qa")])))
    for spec, table in made.items():
        shown = sorted(
            cell.value for row in table.rows for cell in row if isinstance(cell, Number)
        )
        printed = papers.load()[spec.paper, spec.table]["cells"]
        assert shown == sorted(cell["value"] for cell in printed), spec.table
    marked = {
        (spec.paper, spec.table, cell.value)
        for spec, table in made.items()
        for row in table.rows
        for cell in row
        if isinstance(cell, Number) and "†" in cell.mark
    }
    assert ("EAGLE-3", "Table 1", 3.53) in marked and (
        "EAGLE-2",
        "Table 1",
        1.55,
    ) in marked
    assert len(marked) == 12


def paper_row(rows: list[dict[str, Any]], name: str, *keys: str) -> dict[str, Any]:
    """A row of a paper's table by the texts of its key columns."""
    made = {f"{s.paper} {s.table}": t for s, t in papers.tables(groups(rows))}[name]
    for row in made.rows:
        if tuple(row[: made.n_keys]) == keys:
            return dict(zip(made.columns, row, strict=True))
    raise AssertionError(f"no row {keys}")


def test_our_cells_stand_beside_the_papers_with_its_definitions():
    rows = [line("eagle2", task) for task in SETS]
    by_set = {row["task"]: row for row in rows}
    ours = paper_row(rows, "EAGLE-2 Table 1", "0", "here: A", "EAGLE-2")
    assert ours["CNN/DM tau"].value == by_set["sum"]["tau_pooled"]
    assert ours["MT-bench speedup"].value == by_set["mt_bench"]["speedup_with_prefill"]
    assert ours["Mean tau"].value == pytest.approx(
        np.mean([row["tau_pooled"] for row in rows])
    )
    # EAGLE-3's mean is over five sets, without Natural Questions.
    five = paper_row(rows, "EAGLE-3 Table 1", "0", "here: A", "EAGLE-2")
    expected = np.mean([r["tau_pooled"] for r in rows if r["task"] != "qa"])
    assert five["Mean tau"].value == pytest.approx(expected)
    missing = paper_row(rows, "EAGLE-2 Table 1", "0", "here: A", "PLD")
    assert missing["GSM8K tau"] == NOT_MEASURED
    hydra = paper_row(rows, "EAGLE-2 Table 1", "0", "here: A", "Hydra")
    assert hydra["GSM8K tau"] == NOT_BUILT
    warm = paper_row(rows, "EAGLE-2 Table 1", "1", "here: A", "EAGLE-2")
    assert warm["GSM8K tau"] == NOT_MEASURED  # measured at temperature 0 only
    figure = paper_row(rows, "EAGLE-2 Figure 2", "EAGLE-2")
    assert figure["Vicuna 7B"].value == 3.62
    assert figure["here: A"].value == by_set["mt_bench"]["speedup_with_prefill"]


def test_alpha_and_calibration_and_batches_find_their_places():
    rows = [line("eagle1_chain", "mt_bench"), line("eagle2", "alpaca")]
    rows += [line("eagle1", "mt_bench", batch=2)]
    alpha = paper_row(rows, "EAGLE-1 Table 2", "0", "here: A", "MT-bench")
    assert alpha["2-alpha"].value == pytest.approx(rows[0]["alpha"][2])
    assert alpha["4-alpha"] == NOT_MEASURED  # hardly a step came that far
    assert (
        alpha["tau"] == NOT_MEASURED
    )  # of the tree, which was not measured at batch 1
    ends = paper_row(
        rows, "EAGLE-2 Section 3.2 / Figure 6", "here: A", "EAGLE draft model"
    )
    shares = rows[1]["calibration"]["edge"]["accepted"]
    assert [cell.value for cell in list(ends.values())[2:]] == [shares[0], shares[-1]]
    batch = paper_row(rows, "EAGLE-1 Table 7", "here: A", "EAGLE")
    assert batch["batch size 2 speedup"].value == rows[2]["speedup_with_prefill"]
    assert batch["batch size 1 speedup"] == NOT_MEASURED


def test_a_ratio_by_batch_is_that_of_the_chain_else_of_the_tree_that_was_measured():
    rows = [line("eagle3", "mt_bench", batch=batch) for batch in (2, 4)]
    rows += [line(v, "qa", n_prompts=4) for v in ("eagle2", "token", "medusa")]
    ours = paper_row(rows, "EAGLE-3 Table 3", "here: B", "EAGLE-3")
    assert ours["batch size 4"].value == rows[1]["speedup"]
    # The first family has no number there, so it has no line either.
    made = {f"{s.paper} {s.table}": t for s, t in papers.tables(groups(rows))}
    lines = [row for row in made["EAGLE-3 Table 3"].rows if row[1] == "EAGLE-3"]
    assert [row[0] for row in lines if page.OURS in str(row[0])] == ["here: B"]


def test_tables_of_the_papers_define_ours_and_say_what_the_heads_took():
    row = line("eagle2", "mt_bench")
    for spec, table in papers.tables(groups([row])):
        notes = " ".join(table.notes)
        tau = any(c.endswith("tau") for c in table.columns) or "tau" in spec.title
        if spec.ours and tau:
            assert papers.DEFINITIONS["tau"] in table.notes, spec.table
        if spec.ours and any("EAGLE-2" in cells for cells in table.rows):
            told = "A eagle2: 9,800,000; 2.94e+12; 50,000; dynamic 26."
            assert told in notes, spec.table
            assert "do not compare" not in notes


def test_tables_of_the_papers_say_where_our_heads_saw_other_numbers_of_tokens():
    for tokens, mixed in ((52_000, False), (90_000, True)):
        rows = [line("eagle2", task) for task in SETS]
        rows += [line("eagle3", task, supervised_tokens=tokens) for task in SETS]
        made = {f"{s.paper} {s.table}": t for s, t in papers.tables(groups(rows))}
        notes = " ".join(made["EAGLE-3 Table 1"].notes)
        assert ("The heads of A saw numbers of tokens that differ" in notes) is mixed


# Files -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> tuple[Path, list[page.Section]]:
    """A small report of full lines: three variants, two budgets, two batches."""
    out = tmp_path_factory.mktemp("report")
    variants = ("eagle2", "eagle3", "eagle1_chain")
    rows = [line(variant, task) for variant in variants for task in SETS]
    rows += [line("eagle3", task, supervised_tokens=12_500) for task in SETS]
    rows += [line("eagle3", task, batch=2) for task in SETS]
    lines = results.read([write(out / "lines.jsonl", rows)])
    return out, report.report(lines, out)


def test_every_figure_and_table_is_written(made):
    out, sections = made
    figures = {
        b.file for s in sections for b in s.blocks if isinstance(b, page.Picture)
    }
    names = ("tau", "speedup", "depth", "alpha", "calibration", "scaling", "trees")
    assert figures == {f"A_t0_b1_{name}.png" for name in names}
    for file in figures:
        assert (out / file).read_bytes().startswith(b"\x89PNG")
    tables = [b for s in sections for b in s.blocks if isinstance(b, Table)]
    assert len({t.name for t in tables}) == len(tables)
    for table in tables:
        with (out / f"{table.name}.csv").open() as file:
            read = list(csv.reader(file))
        assert len(read) == 1 + len(table.rows)
        assert len({len(row) for row in read}) == 1
        assert all(len(row) == len(table.columns) for row in table.rows), table.name


def test_the_tables_hold_the_numbers_of_the_lines(made):
    out, _ = made
    with (out / "A_t0_b1_tau.csv").open() as file:
        rows = {row["variant"]: row for row in csv.DictReader(file)}
    expected = line("eagle2", "gsm8k")["tau_pooled"]
    assert float(rows["eagle2"]["gsm8k"]) == expected
    assert float(rows["eagle2"]["gsm8k low"]) < expected
    assert rows["medusa"]["gsm8k"] == rows["medusa"]["mean"] == NOT_MEASURED
    assert set(results.VARIANTS) - set(rows) == {"eagle3"}  # two entries, with labels
    with (out / "A_t0_b1_costs.csv").open() as file:
        costs = {row["variant"]: row for row in csv.DictReader(file)}
    row = costs["eagle1_chain"]
    lines = [line("eagle1_chain", task) for task in SETS]
    reached = np.sum(
        [
            sum(one["by_prompt"]["steps"])
            * np.array([1.0, *one["acceptance_by_depth"]])
            for one in lines
        ],
        axis=0,
    )
    a = np.mean((reached[1:] / reached[:-1])[reached[:-1] >= 20])
    formula = sum(a**k for k in range(6)) / (1 + 5 * 0.12)
    assert float(row["predicted, formula"]) == pytest.approx(formula)
    with (out / "A_t0_batches.csv").open() as file:
        (batches,) = csv.DictReader(file)
    ratio = np.mean([line("eagle3", t, batch=2)["speedup"] for t in SETS])
    assert float(batches["batch 2"]) == pytest.approx(ratio)


TABLES_OF_VARIANTS = ("tau", "speedup", "details", "acceptance_by_depth", "alpha")


def test_every_table_of_variants_prints_parameters_and_training_flops(made):
    out, _ = made
    full = line("eagle1_chain", "qa")
    for name in TABLES_OF_VARIANTS:
        with (out / f"A_t0_b1_{name}.csv").open() as file:
            rows = {row["variant"]: row for row in csv.DictReader(file)}
        row = rows["eagle1_chain"]
        assert float(row["parameters"]) == full["n_trainable"], name
        assert float(row["training FLOPs"]) == full["train_flops"], name
    for name in ("A_t0_batches", "A_t0_b1_sweep_data"):
        with (out / f"{name}.csv").open() as file:
            assert float(next(csv.DictReader(file))["parameters"]) > 0
    with (out / "A_t0_b1_orderings_tau.csv").open() as file:
        claims = {row["claim, trees"]: row for row in csv.DictReader(file)}
    told = claims["no_feature_loss < eagle3"]["parameters, training FLOPs of both"]
    assert told == "- 9.8M; 2.94e+12"


def test_sweeps_have_tables_and_figures_of_their_own(tmp_path):
    rows = [row for task in ("qa", "sum") for row in sweep(task)]
    lines = results.read([write(tmp_path / "a.jsonl", rows)])
    report.report(lines, tmp_path)
    read = {}
    for name in ("steps", "data", "tree", "choices"):
        with (tmp_path / f"A_t0_b1_sweep_{name}.csv").open() as file:
            read[name] = list(csv.DictReader(file))
    assert [row["trees"] for row in read["tree"]] == [
        *("chain 2", "chain 3", "chain 4"),
        "dynamic 26",
    ]
    steps = read["steps"]
    assert [row["unrolled steps in training"] for row in steps] == ["1", "3", "7"]
    taus = [
        np.mean([tuned(f"eagle3_ttt{i}", t)["tau_pooled"] for t in ("qa", "sum")])
        for i in (1, 3, 7)
    ]
    assert [float(row["tau"]) for row in steps] == pytest.approx(taus)
    gaps = [float(row["tau, difference"]) for row in steps[1:]]
    assert gaps == pytest.approx([tau - taus[0] for tau in taus[1:]])
    assert steps[0]["tau, difference"] == ""
    choices = {(row["setting"], row["value"]) for row in read["choices"]}
    assert choices == {
        ("-", "unchanged: eagle3"),
        ("draft.fc_norm", "True, not False"),
        ("taps", "2, not the official ones"),
        ("taps", "2/15, not the official ones"),
        ("train.mask", "official, not label"),
    }
    assert {p.name for p in tmp_path.glob("*_steps.png")} == {"A_t0_b1_steps.png"}
    assert {p.name for p in tmp_path.glob("*_tree.png")} == {"A_t0_b1_tree.png"}


def test_bars_of_too_many_entries_are_those_of_the_named_variants():
    many = [tuned("eagle3", taps=[i]) for i in range(plots.MOST_BARS)]
    (alone,) = groups([*many, tuned("eagle3")])
    assert plots.bars(alone, "tau_pooled", "tau") is None
    (group,) = groups([*many, tuned("eagle3"), tuned("eagle2"), tuned("hass")])
    figure = plots.bars(group, "tau_pooled", "tau")
    assert figure is not None
    names = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert [name.partition(" ")[0] for name in names] == ["eagle2", "hass", "eagle3"]


def test_only_a_last_column_that_holds_more_ranks_says_so():
    (group,) = groups([line("eagle3", "qa")])  # six ranks of ten
    figure = plots.trees(group)
    assert figure is not None
    labels = [label.get_text() for label in figure.axes[0].get_xticklabels()]
    assert labels == ["0", "1", "2", "3", "4", "5"]


def test_a_control_is_never_the_fastest():
    twice = bare("vanilla", "qa", speedup=9.0) | {"variant": "vanilla_twice"}
    rows = [twice, bare("eagle3", "qa", speedup=1.1)]
    table = report._glance(groups(rows))
    assert table.rows[0][2] == "1.10\neagle3"


def test_the_page_is_one_file_that_asks_for_nothing_else(made):
    out, sections = made
    text = page.page("A <title>", sections, out)
    assert text.count("<img") == text.count('src="data:image/png;base64,') == 7
    assert not re.search(r"""(src|href)=["'](?!data:|#)""", text)
    assert "<script" not in text and "@import" not in text and "url(" not in text
    assert "default-src 'none'" in text and "A &lt;title&gt;" in text
    for section in sections:
        assert html.escape(section.title) in text
        for block in section.blocks:
            if isinstance(block, Table):
                assert all(
                    html.escape(n.replace("`", ""), quote=False)[:30]
                    in re.sub("</?code>", "", text)
                    for n in block.notes
                )


def test_markdown_tables_have_as_many_cells_in_every_row(made):
    _, sections = made
    blocks = re.findall(r"(?:^\|.*\n)+", page.markdown("t", sections), re.MULTILINE)
    assert len(blocks) == sum(isinstance(b, Table) for s in sections for b in s.blocks)
    for block in blocks:
        widths = {len(re.findall(r"(?<!\\)\|", row)) for row in block.splitlines()}
        assert len(widths) == 1


def test_bare_lines_make_a_report_that_says_what_is_missing(tmp_path):
    lines = results.read([write(tmp_path / "a.jsonl", [bare("eagle3", "qa")])])
    sections = report.report(lines, tmp_path)
    text = page.markdown("t", sections)
    assert "Figures without data in this setting: alpha" in text
    assert "Not measured here: vanilla, token" in text
    assert sorted(p.name for p in tmp_path.glob("*.png")) == [
        "A_t0_b1_depth.png",
        "A_t0_b1_speedup.png",
        "A_t0_b1_tau.png",
    ]


def test_lines_that_do_not_say_how_they_were_trained_are_no_sweep(tmp_path):
    rows = [bare("eagle3", "qa"), bare("eagle3_ttt1", "qa")]
    rows += [bare("eagle3", "qa", head="b", trained_tokens=9, fingerprint="b")]
    rows[0] |= {"n_trainable": 10, "train_flops": 1e9}
    (group,) = groups(rows)
    assert results.sweeps(group) == []
    report.report(results.read([write(tmp_path / "a.jsonl", rows)]), tmp_path)


def test_a_cell_is_escaped_and_gaps_are_joined():
    row: list[page.Cell] = ["<b>", Number(1.0, 0.5, 1.5), NOT_MEASURED, NOT_MEASURED]
    table = Table("t", "", ["a", "b", "c", "d"], [row], [])
    text = page.page("t", [page.Section(2, "s", [table])], Path())
    assert "&lt;b&gt;" in text and "<b>" not in text
    assert '<td class="none" colspan="2">not measured</td>' in text
    assert "1.00<small>[0.50, 1.50]</small>" in text
    assert "| <b> | 1.00 [0.50, 1.50] | not measured | not measured |" in page.markdown(
        "t", [page.Section(2, "s", [table])]
    )


def test_a_verdict_that_is_unsure_has_no_colour():
    row: list[page.Cell] = ["x", "held\n+0.1", "held, unsure\n+0.1", "not held\n-0.1"]
    table = Table("t", "", ["a", "b", "c", "d"], [row], [])
    text = page.page("t", [page.Section(2, "s", [table])], Path())
    assert '<td class="held">held<' in text and '<td class="not">not held<' in text
    assert "<td>held, unsure<" in text


def test_fake_lines_name_themselves():
    assert all("TEST DATA" in row["target"] for row in fake_results.full()[:3])

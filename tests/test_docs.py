"""Commands that the documents show name modules, flags, settings and files that exist."""

import ast
import collections
import json
import re
import shlex

import drivers
import numpy as np
import pytest

from configs import smollm2_135m
from eagle_jax import heads
from eagle_jax.config import override
from experiments import ablate, common, report, results, variants

ROOT = drivers.ROOT
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
DOCUMENTS += sorted((ROOT / "experiments").glob("*.py"))
SHIPPED = ROOT / "experiments" / "heads" / "eagle3"
COMMAND = re.compile(r"python -m experiments\.\w+(?:[^\n`\"\\]|\\\n|\"[^\"\n]*\")*")


def commands() -> list[str]:
    found = []
    for file in DOCUMENTS:
        text = file.read_text()
        if file.suffix == ".py":
            text = ast.get_docstring(ast.parse(text)) or ""
        found += [f"{file.name}: {m[0]}" for m in COMMAND.finditer(text)]
    return found


@pytest.mark.parametrize("command", commands())
def test_shown_commands_can_be_given(command):
    shown = command.partition(": ")[2].replace("[", " ").replace("]", " ")
    words = shlex.split(shown.replace("\\\n", " "), comments=True)
    module = words[2].partition(".")[2]
    modules = [module, "common", *["ablate"] * (module == "study")]
    sources = [ROOT / "experiments" / f"{name}.py" for name in modules]
    text = "".join(source.read_text() for source in sources)
    defined = set(re.findall(r"DEFINE_\w+\(\s*\"(\w+)\"", text))
    settings = []
    for word in words[3:]:
        if not word.startswith("--"):
            continue
        name, _, value = word[2:].partition("=")
        assert name in defined, f"{module} has no flag --{name}"
        if name == "set":
            settings.append(value)
        elif name == "variant":
            names = variants.ALL if value == "all" else value.split(",")
            assert all(variants.parse(name) for name in names)
        elif name == "preset":
            assert set(value.split("|")) <= ablate.PRESETS.keys()
        elif "/" in value and not value.startswith(("out/", "/")):
            assert (ROOT / value).exists(), f"there is no {value}"
    override(smollm2_135m.get_config(), *settings)


def test_commands_are_found():
    documents = {command.partition(":")[0] for command in commands()}
    assert {"README.md", "guide.md", "tpu.md", "ablate.py", "doctor.py"} <= documents
    assert len(commands()) > 40


def test_the_readme_says_of_variants_what_the_lines_say():
    rows = common.read_lines(ROOT / "experiments" / "results" / "variants.jsonl")
    found = collections.defaultdict(list)
    for row in rows:
        found[row["variant"], row["temperature"]].append(row)
    means: dict[tuple[str, float], list[str]] = {}
    for (name, temperature), own in found.items():
        assert len({row["task"] for row in own}) == len(own) == 6
        if temperature == 0:
            assert all(row["n_identical"] == row["n_prompts"] for row in own)
        means[name, temperature] = [
            f"{sum(row[key] for row in own) / 6:.2f}"
            for key in ("tau_pooled", "speedup")
        ]
    text = (ROOT / "README.md").read_text()
    table = re.findall(
        r"^\| `(\w+)`(?:, (\w+))?" + r" \| (\S+)" * 10 + r" \|$", text, re.M
    )
    assert len(table) == 12
    for name, kind, *said, size, flops in table:
        row = found[name, 0][0]
        assert kind in ("", row["tree"]["kind"])
        if row["n_trainable"]:
            assert size == f"{row['n_trainable'] / 1e6:.1f}M"
            assert flops == f"{row['train_flops']:.1e}".replace("e+", "e")
        else:
            assert (size, flops) == ("0", "0")
        for temperature in (0, 1):
            tree = means.get((name, temperature), "--")
            chain = means.get((f"{name}_chain", temperature), "--")
            if not kind:  # prompt lookup drafts chains alone
                tree, chain = "--", tree
            cells = said[4 * temperature : 4 * temperature + 4]
            assert cells == [tree[0], chain[0], tree[1], chain[1]]


def test_the_readme_says_of_training_data_what_the_lines_say():
    rows = common.read_lines(ROOT / "experiments" / "results" / "variants.jsonl")
    taus: dict[str, dict[str, float]] = collections.defaultdict(dict)
    for row in rows:
        if row["temperature"] == 0:
            taus[row["variant"]][row["task"]] = row["tau_pooled"]
    words = " ".join((ROOT / "README.md").read_text().split())
    (said,) = re.findall(
        r"`eagle1_no_noise`\) tau is (\S+), which .*? `eagle1`'s (\S+)\. .*?"
        r"`eagle1_fixed`\) it is (\S+): (\S+) on gsm8k and (\S+) in the mean of the others",
        words,
    )
    names = ("eagle1_no_noise", "eagle1", "eagle1_fixed")
    means = [np.mean(list(taus[name].values())) for name in names]
    others = [tau for task, tau in taus["eagle1_fixed"].items() if task != "gsm8k"]
    means += [taus["eagle1_fixed"]["gsm8k"], np.mean(others)]
    assert said == tuple(f"{mean:.2f}" for mean in means)


SWEPT = {  # label in the README: what every point changes, against 20,000 tokens
    "unrolled steps 1 to 7": [{"variant": f"eagle3_ttt{i}"} for i in range(1, 8)],
    "the same, chains of 6": [{"variant": f"eagle3_ttt{i}_chain"} for i in range(1, 8)],
    "features of layer 2; 15; 27; 2, 15; 15, 27; 7, 15, 23": [
        {"taps": taps} for taps in ([2], [15], [27], [2, 15], [15, 27], [7, 15, 23])
    ],
    "`draft.fc_norm`; `norm_before_fc`; `norm_output`; `norm_before_residual`": [
        {f"draft.{name}": True}
        for name in ("fc_norm", "norm_before_fc", "norm_output", "norm_before_residual")
    ],
    "`train.mask=official`; `normaliser=slots`; `head_from_target=false`": [
        {"train.mask": "official"},
        {"train.normaliser": "slots"},
        {"train.head_from_target": False},
    ],
    "12,500; 25,000; 50,000; 100,000 tokens": [
        {"train.supervised_tokens": n} for n in (12_500, 25_000, 50_000, 100_000)
    ],
}


def swept() -> list[tuple[str, str]]:
    """Means over the sets of tau at every point of every sweep with trees of 16 nodes."""
    found: dict[str, list[float]] = collections.defaultdict(list)
    usual: dict[str, object] = {}
    shipped = heads.head_hash(SHIPPED)
    for row in common.read_lines(ROOT / "experiments" / "results" / "sweeps.jsonl"):
        assert row["n_identical"] == row["n_prompts"]
        if row["head"] == shipped:
            found["shipped"].append(row["tau_pooled"])
            continue
        config = row["config"]
        own = {"taps": config["taps"]}
        for group in ("draft", "train"):
            own |= {f"{group}.{key}": value for key, value in config[group].items()}
        usual = usual or own  # the first run changes the unrolled steps alone
        changed = {key: value for key, value in own.items() if value != usual[key]}
        if row["variant"] != "eagle3":
            changed["variant"] = row["variant"]
        if row["max_new_tokens"] == 64 and row["batch"] == 4 and row["n_prompts"] == 8:
            found[json.dumps(changed)].append(row["tau_pooled"])
    table = []
    for label, points in SWEPT.items():
        taus = [found[json.dumps(point)] for point in points]
        if "train.supervised_tokens" in points[0]:  # the head for use is the last point
            tokens = json.loads((SHIPPED / "config.json").read_text())["eagle_jax"]
            label = label.replace(
                " tokens", f"; {tokens['supervised_tokens']:,} tokens"
            )
            taus.append(found["shipped"])
        assert all(len(own) == 6 for own in taus), label
        table.append((label, " ".join(f"{np.mean(own):.2f}" for own in taus)))
    return table


def test_the_readme_says_of_sweeps_what_the_lines_say():
    text = (ROOT / "README.md").read_text()
    for label, taus in swept():
        assert f"| {label} | {taus} |" in text
    chains = collections.defaultdict(list)
    for row in common.read_lines(ROOT / "experiments" / "results" / "sweeps.jsonl"):
        if row["batch"] == 1:
            assert row["tree"]["width"] == 1
            chains[row["tree"]["depth"]].append(row)
    assert sorted(map(len, chains.values())) == [6] * 7
    for key, label in (("tau_pooled", "tau"), ("speedup", "speedup")):
        means = [np.mean([row[key] for row in chains[n]]) for n in range(1, 8)]
        cells = " ".join(f"{mean:.2f}" for mean in means)
        assert f"| chains of 1 to 7 after 100,000 tokens, {label} | {cells} |" in text


def test_the_readme_says_of_the_input_study_what_the_lines_say():
    """At both budgets: all variants', and four times as many tokens."""
    words = " ".join((ROOT / "README.md").read_text().split())
    inputs = ("token", "feature", "eagle1")
    lead, tau, first, second = {}, {}, {}, {}
    for file in ("variants", "sweeps"):
        rows = common.read_lines(ROOT / "experiments" / "results" / f"{file}.jsonl")
        for name in (*inputs, *(f"{name}_chain" for name in inputs)):
            own = [r for r in rows if r["variant"] == name and r["temperature"] == 0]
            assert len({row["task"] for row in own}) == len(own) == 6
            nodes = {row["tree"]["n_nodes"] for row in own}
            assert nodes == {6 if "_chain" in name else 26}
            tau[file, name] = np.mean([row["tau_pooled"] for row in own])
            by_depth = np.mean([row["acceptance_by_depth"] for row in own], axis=0)
            first[file, name], second[file, name] = by_depth[:2]
            if file == "sweeps":
                assert (
                    f"With {own[0]['trained_tokens']:,} tokens, all distinct" in words
                )
        lead[file] = tau[file, "eagle1"] - tau[file, "feature"]
    token, feature, eagle1 = [f"{tau['sweeps', name]:.2f}" for name in inputs]
    chains = [f"{tau['sweeps', f'{name}_chain']:.2f}" for name in inputs]
    few, more = (
        [
            f"{accepted[file, f'{name}_chain']:.2f}"
            for accepted in (first, second)
            for name in ("feature", "token")
        ]
        for file in ("variants", "sweeps")
    )
    for said in (
        f"tau is {token} for `token`, {feature} for `feature` and {eagle1} for `eagle1`",
        "in chains {}, {} and {}.".format(*chains),
        "accepted in {} of the steps for `feature` and in {} for `token`, but the second "
        "in {} against {}, where".format(*few),
        "accepted in {} of the steps against {}, and behind in the second, {} against "
        "{}.".format(*more),
        f"is {lead['sweeps']:.2f} there, where it was {lead['variants']:.2f}.",
    ):
        assert said in words, said


def test_the_readme_says_of_the_shipped_head_what_the_lines_say():
    rows = common.read_lines(ROOT / "experiments" / "results" / "shipped_eagle3.jsonl")
    small, large = (
        {row["task"]: row for row in rows if row["tree"]["n_nodes"] == n}
        for n in (4, 60)
    )
    assert {row["head"] for row in rows} == {heads.head_hash(SHIPPED)}
    assert all(row["n_prompts"] == 20 for row in rows)
    tree = smollm2_135m.get_config().tree
    shape = {"width": tree.width, "depth": tree.depth, "n_nodes": tree.n_nodes}
    assert all(row["tree"].items() >= shape.items() for row in small.values())
    text = (ROOT / "README.md").read_text()
    table = re.findall(
        r"^\| (\w+)" + r" \| ([\d.]+)" * 3 + r" \| (\d+) of (\d+) \| (\S+) \|$",
        text,
        re.M,
    )
    assert [name for name, *_ in table] == [*small, "mean"]
    for name, *said, same, of, tau in table:
        own = [row for task, row in small.items() if name in (task, "mean")]
        other = [row for task, row in large.items() if name in (task, "mean")]
        keys = ("tau_pooled", "speedup", "speedup_with_prefill")
        assert said == [f"{np.mean([row[key] for row in own]):.2f}" for key in keys]
        assert tau == f"{np.mean([row['tau_pooled'] for row in other]):.2f}"
        assert int(same) == sum(row["n_identical"] for row in own)
        assert int(of) == sum(row["n_prompts"] for row in own)
    tokens = {row["trained_tokens"] for row in rows}
    assert f"A head of {tokens.pop() / 1e6:.1f} million supervised tokens" in text
    assert not tokens
    card = (SHIPPED / "README.md").read_text()
    for own, shown in (
        (large, "in EAGLE-3's tree of 60 nodes"),
        (small, "with 4 nodes"),
    ):
        taus = [row["tau_pooled"] for row in own.values()]
        assert f"{np.mean(taus):.2f} {shown}" in card
    sets = "; ".join(f"{task} {row['tau_pooled']:.2f}" for task, row in large.items())
    assert f"({sets}; " in card


def test_the_readme_says_of_batches_what_the_lines_say():
    rows = common.read_lines(ROOT / "experiments" / "results" / "batches.jsonl")
    found = collections.defaultdict(list)
    for row in rows:
        assert row["head"] == heads.head_hash(SHIPPED)
        assert row["n_identical"] + row["n_near_tie"] == row["n_prompts"] == 16
        found[row["batch"]].append(row)
    keys = ("tau_pooled", "tokens_per_second", "baseline_tokens_per_second", "speedup")
    lines = {"tau": ".2f", "tokens/s": ".0f", "plain tokens/s": ".0f", "speedup": ".2f"}
    text = (ROOT / "README.md").read_text()
    assert f"| batch | {' | '.join(map(str, found))} |" in text
    for key, (label, form) in zip(keys, lines.items(), strict=True):
        means = [np.mean([row[key] for row in own]) for own in found.values()]
        assert all(len(own) == 6 for own in found.values())
        cells = " | ".join(format(mean, form) for mean in means)
        assert f"| {label} | {cells} |" in text


def test_the_readme_says_of_the_eagle2_head_what_the_lines_say():
    rows = common.read_lines(ROOT / "experiments" / "results" / "shipped_eagle2.jsonl")
    shipped = heads.head_hash(ROOT / "experiments" / "heads" / "eagle2")
    words = " ".join((ROOT / "README.md").read_text().split())
    (said,) = re.findall(
        r"It has tau (\S+) and speedup (\S+) with the default tree, and tau (\S+) in "
        r"EAGLE-3's tree of 60 nodes",
        words,
    )
    means = {}
    for n_nodes in (smollm2_135m.get_config().tree.n_nodes, 60):
        own = [row for row in rows if row["tree"]["n_nodes"] == n_nodes]
        assert len({row["task"] for row in own}) == len(own) == 6
        for row in own:
            assert (row["variant"], row["head"]) == ("eagle2", shipped)
            assert row["n_identical"] == row["n_prompts"] == 20
        for key in ("tau_pooled", "speedup"):
            means[n_nodes, key] = f"{np.mean([row[key] for row in own]):.2f}"
    means.pop((60, "speedup"))
    assert said == tuple(means.values())


def test_the_guide_says_of_passes_what_the_bench_says():
    (line,) = common.read_lines(ROOT / "experiments" / "results" / "bench.jsonl")
    took = {part["part"]: 1e3 * part["seconds"] for part in line["parts"]}
    text = (ROOT / "docs" / "guide.md").read_text()
    cells = lambda row: [cell.strip() for cell in row.split("|")]  # noqa: E731
    (sizes,) = re.findall(r"^\| tokens \|(.*)\|$", text, re.M)
    sizes = cells(sizes)
    for slots, row in re.findall(r"^\| ms, (\d+) slots \|(.*)\|$", text, re.M):
        names = [f"target forward, {n} nodes, {slots} slots" for n in sizes]
        assert cells(row) == [f"{took[name]:.1f}" for name in names]


def test_the_committed_report_is_made_from_the_committed_lines(tmp_path):
    lines = results.read([str(ROOT / "experiments" / "results")])
    report.everything(lines.rows, tmp_path / "all.csv")
    committed = ROOT / "experiments" / "results" / "report" / "all.csv"
    assert committed.read_text() == (tmp_path / "all.csv").read_text(), (
        "make it anew: python -m experiments.report --out=experiments/results/report"
    )

"""Commands that the documents show name modules, flags, settings and files that exist."""

import ast
import re
import shlex

import drivers
import pytest

from configs import smollm2_135m
from eagle_jax.config import override
from experiments import ablate, common, variants

ROOT = drivers.ROOT
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
DOCUMENTS += sorted((ROOT / "experiments").glob("*.py"))
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
    means: dict[str, dict[str, str]] = {}
    rows = common.read_lines(ROOT / "experiments" / "results" / "variants.jsonl")
    greedy = [row for row in rows if row["temperature"] == 0]
    for name in {row["variant"] for row in greedy}:
        own = [row for row in greedy if row["variant"] == name]
        assert len(own) == 6
        assert all(row["n_identical"] == row["n_prompts"] for row in own)
        means[name] = {
            key: f"{sum(row[key] for row in own) / 6:.2f}"
            for key in ("tau_pooled", "speedup")
        }
    text = (ROOT / "README.md").read_text()
    table = re.findall(
        r"^\| `(\w+)`(?:, (\w+))?" + r" \| (\S+)" * 6 + r" \|$", text, re.M
    )
    assert len(table) == 12
    for name, kind, tau, chain_tau, speedup, chain_speedup, size, flops in table:
        row = next(row for row in greedy if row["variant"] == name)
        assert kind in ("", row["tree"]["kind"])
        if row["n_trainable"]:
            assert size == f"{row['n_trainable'] / 1e6:.1f}M"
            assert flops == f"{row['train_flops']:.1e}".replace("e+", "e")
        else:
            assert (size, flops) == ("0", "0")
        tree, chain = means.get(name, {}), means.get(f"{name}_chain", {})
        if not kind:  # prompt lookup drafts chains alone
            tree, chain = {}, tree
        assert [tau, speedup] == list(tree.values() or "--")
        assert [chain_tau, chain_speedup] == list(chain.values() or "--")

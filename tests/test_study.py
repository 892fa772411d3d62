"""`study`: its runs are valid, go on where they stopped, and take the user's flags."""

import itertools
import shlex
from pathlib import Path

import drivers

from configs import smollm2_135m
from eagle_jax import config as config_lib
from experiments import study, variants


def test_every_run_names_variants_and_settings_that_exist():
    cfg = smollm2_135m.get_config()
    studies = (study.of_variants(True), study.of_sweeps(), study.of_heads())
    for run in itertools.chain(*studies, study.of_batches()):
        texts = [flag.removeprefix("--set=") for flag in run if "--set=" in flag]
        changed = config_lib.override(cfg, *texts)
        flags = dict(flag.split("=", 1) for flag in run if "--set=" not in flag)
        assert ("--variant" in flags) != ("--head" in flags)
        if "--head" in flags:
            assert (Path(flags["--head"]) / "config.json").exists()
        names = flags.get("--variant", "eagle3").split(",")
        for name in variants.ALL if names == ["all"] else names:
            variants.apply(variants.parse(name), changed)


def test_a_study_goes_on_where_it_stopped(tmp_path):
    given = [
        *("--study=heads", *drivers.target_flags(), f"--out={tmp_path}"),
        *("--set=train.row_length=128", "--set=train.supervised_tokens=300"),
        *("--prompts_per_set=1", "--max_new_tokens=4"),
        f"--data={drivers.home() / 'train.jsonl'}",
        f"--questions={drivers.home() / 'questions' / 'say.jsonl'}",
    ]
    commands = drivers.run("study", *given, "--list").splitlines()
    assert [shlex.split(line)[7] for line in commands] == [
        "--variant=eagle3",
        "--variant=eagle2",
    ]
    drivers.run("study", *given)
    lines = drivers.read_lines(tmp_path / "results.jsonl")
    assert [line["variant"] for line in lines] == ["eagle3", "eagle2"]
    said = drivers.run("study", *given)
    assert said.count("result is in") == 2
    assert drivers.read_lines(tmp_path / "results.jsonl") == lines
    wrong = drivers.fail("study", *given, "--variant=all")
    assert "--variant is for experiments.ablate" in wrong


def test_the_study_of_batches_needs_large_sets_and_its_own_batches():
    assert "--questions=FOLDER" in drivers.fail("study", "--study=batches")
    given = ["--study=batches", "--questions=somewhere", "--batch=4"]
    assert "--batch is its own" in drivers.fail("study", *given)

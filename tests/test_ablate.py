"""The drivers end to end on the tiny target, and what they say to bad input."""

import dataclasses
import json
import re
import resource
import shlex
import subprocess
from pathlib import Path
from typing import Any

import drivers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
import tiny
from absl import flags
from absl.testing import flagsaver

from configs import tiny as tiny_config
from eagle_jax import sharding, weights
from eagle_jax import text as text_lib
from eagle_jax.config import DecodeConfig, SamplingConfig, TargetConfig, TreeConfig
from eagle_jax.data import Question
from eagle_jax.metrics import Turn
from eagle_jax.tree import chain
from experiments import ablate, common, evaluator, variants
from experiments.common import Setup

KEYS = """variant target task questions preset temperature max_new_tokens batch dtype tree
n_prompts n_identical n_near_tie n_looping tau_pooled tau_by_prompt tau_without_loops
acceptance_by_depth alpha by_prompt baseline_by_prompt tokens_per_second
baseline_tokens_per_second speedup speedup_with_prefill head n_trainable train_flops
trained_tokens learning_curve tokens_per_target_gflop config fingerprint seed device jax
commit""".split()


def results(out: Path) -> list[dict[str, Any]]:
    return drivers.read_lines(out / "results.jsonl")


def head_folder() -> Path:
    return drivers.only(drivers.trained()[0] / "heads")


# Whole runs, each in a process of its own.


def test_a_trained_head_is_measured_and_identical_to_plain_decoding():
    out, said = drivers.trained()
    rows = [row for row in results(out) if row["variant"] == "eagle3"]
    assert [row["task"] for row in rows] == ["count", "say"]
    for row, n_prompts in zip(rows, (2, 1), strict=True):
        assert sorted(row) == sorted(KEYS)
        assert row["n_prompts"] == row["n_identical"] == n_prompts
        assert row["n_near_tie"] == 0
        assert row["tau_pooled"] >= 1 and row["speedup"] > 0
        assert len(row["acceptance_by_depth"]) == row["tree"]["depth"] == 2
        assert row["tree"]["n_nodes"] == 5 and row["questions"] == "questions"
        assert (row["preset"], row["max_new_tokens"], row["batch"]) == ("smoke", 8, 1)
        assert re.fullmatch("[0-9a-f]{12}", row["head"])
    assert len({row["fingerprint"] for row in rows}) == 2
    for words in ("tau pooled", "2 of 2", "1 of 1", "3 of 3", "tiny, hash tiny"):
        assert words in said
    assert "NOT IDENTICAL" not in said and "WARNING" not in said
    assert not list((out / "answers").iterdir())  # every set's line is written


def test_the_command_it_ends_with_answers_a_prompt():
    _, said = drivers.trained()
    (command,) = [line for line in said.splitlines() if "experiments.generate" in line]
    words = shlex.split(command)
    assert words[:3] == ["python", "-m", "experiments.generate"]
    given = [word for word in words[3:] if not word.startswith("--prompt")]
    assert f"--head={head_folder()}" in given
    given += ["--prompt=Count from 3.", "--max_new_tokens=8", "--nocolor"]
    spoken = drivers.run("generate", *given)
    text, tally = spoken.rsplit("\n[", 1)
    assert re.fullmatch(r"8 tokens, \d steps, tau \d\.\d\d, .* tokens/s.*\]\n", tally)
    assert text and "\033" not in text


def test_a_torn_compiled_program_is_compiled_anew_without_a_word():
    given = [*drivers.target_flags(), "--prompt=Count from 3.", "--max_new_tokens=4"]
    given += ["--head=none", "--nocolor"]
    said = drivers.run("generate", *given)
    programs = (drivers.home() / "cache" / "xla").glob("jit_prefill*")
    whole = {path: path.read_bytes() for path in programs}
    for path, content in whole.items():
        path.write_bytes(content[:-20])
    process = drivers.start("generate", *given)
    out, err = process.communicate(timeout=900)
    for path, content in whole.items():  # it is never replaced
        path.write_bytes(content)
    assert whole and process.returncode == 0 and err == ""
    assert out.rsplit("\n[", 1)[0] == said.rsplit("\n[", 1)[0]


def test_check_describes_the_head():
    said = drivers.run("convert", f"--check={head_folder()}")
    assert "eagle3 head, midlayer layout" in said
    assert "'target_hash': 'tiny'" in said


def test_plain_decoding_is_its_own_baseline_and_rows_are_measured_once(tmp_path):
    flags_given = drivers.ablate_flags(tmp_path, "vanilla")
    drivers.run("ablate", *flags_given)
    rows = results(tmp_path)
    assert [row["task"] for row in rows] == ["count", "say"]
    for row in rows:
        assert sorted(row) == sorted(KEYS)
        assert row["tau_pooled"] == row["tau_by_prompt"] == row["speedup"] == 1.0
        assert row["acceptance_by_depth"] == [] and row["head"] is None
        assert row["n_identical"] == row["n_prompts"]
    # The second row is torn, as by a kill; the first one must stand.
    path = tmp_path / "results.jsonl"
    first, second = path.read_text().splitlines()
    path.write_text(f"{first}\n{second[:100]}")
    said = drivers.run("ablate", *flags_given)
    assert "count: result is in" in said and "say: result is in" not in said
    lines = path.read_text().splitlines()
    assert lines[:2] == [first, second[:100]]
    (again,) = [json.loads(line) for line in lines[2:]]
    assert again["fingerprint"] == rows[1]["fingerprint"]


def test_force_measures_again_and_the_head_is_used_again():
    out, _ = drivers.trained()
    before = results(out)
    said = drivers.run("ablate", *drivers.ablate_flags(out), "--force")
    assert "is there and is used" in said and "training" not in said
    after = results(out)
    assert after[: len(before)] == before and len(after) == len(before) + 2
    same = ("fingerprint", "n_identical", "tau_pooled", "acceptance_by_depth", "head")
    new = [[row[key] for key in same] for row in after[-2:]]
    assert new == [[row[key] for key in same] for row in before[:2]]


def test_probed_prompts_say_where_nodes_lie_and_what_parts_cost(tmp_path):
    given = [*drivers.ablate_flags(tmp_path), f"--head={head_folder()}", "--probe=1"]
    drivers.run("ablate", *given)
    row = results(tmp_path)[1]
    assert row["task"] == "say" and row["n_prompts"] == 1  # all of it was probed
    shape = row["tree_shape"]
    np.testing.assert_allclose(np.sum(shape["nodes"]), row["tree"]["n_nodes"] - 1)
    np.testing.assert_allclose(
        np.sum(shape["accepted"], axis=1), row["acceptance_by_depth"]
    )
    n_steps = row["by_prompt"]["steps"][0]
    assert sum(row["calibration"]["path"]["n"]) == n_steps * 4
    assert row["draft_cost"] > 0 and row["verify_cost"] > 0


def test_bad_input_is_one_line_and_exit_code_1(tmp_path):
    line = drivers.fail("ablate", "--variant=eagle9", f"--out={tmp_path}")
    assert line == f"error: no variant 'eagle9'; there are {', '.join(variants.BASES)}"


def test_a_head_that_does_not_fit_the_target_is_refused():
    out, _ = drivers.trained()
    before = (out / "results.jsonl").read_bytes()
    wide = drivers.ROOT / "tests" / "golden" / "e3_gqa_reduced_vocab" / "head"
    line = drivers.fail("ablate", *drivers.ablate_flags(out), f"--head={wide}")
    assert line.endswith(
        "eagle3 head (midlayer layout) cannot be loaded: "
        "made for vocab_size=128, the target's is 258"
    )
    assert (out / "results.jsonl").read_bytes() == before


def test_a_disk_without_room_ends_the_run_and_keeps_what_there_is(tmp_path):
    """No file may grow beyond 4 kB: the second result line does not fit."""
    limit = 'ulimit -f 4; exec "$0" "$@"'
    flags_given = drivers.ablate_flags(tmp_path, "vanilla")
    process = drivers.start("ablate", *flags_given, shell=limit)
    _, err = process.communicate(timeout=900)
    assert process.returncode == 1
    assert re.fullmatch(
        r"error: cannot write to .*results\.jsonl: (File|No space) .*; .* intact",
        err.splitlines()[-1],  # compiled programs may not have fitted either
    )
    assert [row["task"] for row in results(tmp_path)] == ["count"]


# Faults that are found before anything slow, in this process.


@pytest.fixture
def cli(monkeypatch, tmp_path):
    """Runs `ablate.main` with flags; it must give up before it loads the target."""

    def call(*given: str) -> None:
        with flagsaver.flagsaver():
            flags.FLAGS(["ablate", f"--out={tmp_path / 'out'}", *given])
            ablate.main()

    def too_late(*_: Any) -> None:
        raise AssertionError("the target was loaded")

    monkeypatch.setattr(common, "load_setup", too_late)
    return call


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["--preset=huge"], "no preset 'huge'; there are smoke, quick, full"),
        (
            ["--config=configs/nope.py"],
            "no config file .* there are configs/.*configs/smollm2",
        ),
        (["--set=tree.dept=3"], "no field 'tree.dept'.* depth, kind, n_nodes"),
        (["--set=tree.depth=deep"], "tree.depth needs a value of type int.*'deep'"),
        (["--set=tree.depth=20"], "depth < n_nodes|at most|depth=20"),
        (["--set=seed"], "expected field=value, got 'seed'"),
        (["--set=dtype=float17"], "dtype must be one of float32, bfloat16.*float17"),
        (["--set=train.dtype=int8"], "train.dtype must be one of float32, bfloat16"),
        (["--temperature=-1"], "temperature and top_k must be >= 0"),
        (["--max_new_tokens=1"], "max_new_tokens at least 2"),
        (["--batch=0"], "batch and prompts_per_set must be at least 1"),
        (["--prompts_per_set=-3"], "batch and prompts_per_set must be at least 1"),
        (["--questions=/nowhere/at/all"], "no '/nowhere/at/all' to read questions"),
        (["--data=/nowhere/train.jsonl"], "there is no '/nowhere/train.jsonl'"),
        (["--head=/nowhere/head"], "there is no head '/nowhere/head'"),
        (
            ["--head=.", "--variant=vanilla"],
            "nor with variants .* got --variant=vanilla",
        ),
        (["--head=.", "--retrain"], "goes neither with --retrain"),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, list) else "",
)
def test_flags_are_checked_first(cli, given, words):
    with pytest.raises(ValueError, match=words):
        cli(*given)


def test_a_config_file_without_a_config_is_named(cli, tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("x = 1\n")
    with pytest.raises(ValueError, match=r"mine.py has no function get_config\(\)"):
        cli(f"--config={path}")


def test_a_folder_without_questions_is_named(cli, tmp_path):
    with pytest.raises(ValueError, match=f"no .jsonl file of questions in {tmp_path}"):
        cli(f"--questions={tmp_path}")
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(ValueError, match=r"no questions in .*empty.jsonl"):
        cli(f"--questions={tmp_path}")


def test_a_folder_that_cannot_be_written_is_found_first(cli, tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(OSError, match=r"cannot write to --out=.*/file/out: Not a dir"):
        cli(f"--out={tmp_path / 'file' / 'out'}")


@pytest.fixture
def setup(monkeypatch) -> Setup:
    """The tiny target without its weights."""
    embed = {"embed": jnp.ones((258, 32))}
    monkeypatch.setattr(tiny_config.target, "init", lambda *_: embed)
    cfg = tiny_config.get_config()
    target_cfg, params, text = tiny_config.load(cfg.dtype, cfg.taps)
    return Setup(cfg, target_cfg, params, text, "tiny")


def test_a_prompt_longer_than_the_cache_is_found_before_training(
    cli, setup, tmp_path, monkeypatch
):
    monkeypatch.setattr(common, "load_setup", lambda cfg: setup._replace(cfg=cfg))
    long = [{"question_id": 4, "category": "", "turns": ["word " * 60]}]
    drivers.write_lines(tmp_path / "long.jsonl", long)
    with pytest.raises(
        ValueError,
        match=r"long, question 4: no room for a prompt of 3\d\d tokens.*=256",
    ):
        cli(
            *drivers.target_flags(),
            f"--questions={tmp_path / 'long.jsonl'}",
            "--preset=smoke",
        )
    assert not (tmp_path / "out" / "training").exists()


def test_what_a_target_leaves_open_comes_from_its_tokenizer(
    setup, tmp_path, monkeypatch, capsys
):
    """R115, R505: the end token, and where the padding of the vocabulary begins."""

    def completed(cfg: TargetConfig) -> TargetConfig:
        monkeypatch.setattr(weights, "open_target", lambda *_, **__: (cfg, iter([{}])))
        return common.load_setup(setup.cfg).target_cfg

    monkeypatch.setattr(weights, "resolve", lambda _: tmp_path)
    monkeypatch.setattr(weights, "target_hash", lambda _: "0123")
    monkeypatch.setattr(text_lib, "load_text", lambda _: setup.text)
    setup = setup._replace(cfg=dataclasses.replace(setup.cfg, target_source="folder"))
    bare = dataclasses.replace(setup.target_cfg, eos_ids=(), vocab_size=272)
    assert completed(bare) == dataclasses.replace(bare, eos_ids=(0,), n_tokens=258)
    named = dataclasses.replace(setup.target_cfg, eos_ids=(7, 8))
    assert completed(named) == named
    assert "generation_config" not in capsys.readouterr().out
    (tmp_path / "generation_config.json").write_text('{"repetition_penalty": 1.05}')
    completed(named)  # R103
    said = capsys.readouterr().out
    assert "generation_config.json is ignored" in said
    assert "repetition_penalty=1.05" in said


def test_a_later_turn_without_room_names_its_question(setup, monkeypatch, tmp_path):
    def no_room(*_: Any) -> None:
        raise ValueError("no room: a prompt of 300 tokens")

    monkeypatch.setattr(evaluator, "answer", no_room)
    plain = evaluator.Method({}, DecodeConfig(setup.target_cfg))
    with pytest.raises(ValueError, match="sum, question 9, turn 1: no room"):
        evaluator.run_task(
            setup,
            [plain],
            plain,
            "sum",
            [Question(9, "", ["a"])],
            8,
            1,
            common.Progress("decode", 1),
            0,
            tmp_path / "answers.jsonl",
        )


@pytest.mark.parametrize("mesh", [None, "data:4,model:2"])
def test_what_is_timed_was_compiled_before_and_is_decoded_once(
    mesh, monkeypatch, caplog
):
    t = tiny.target_config(vocab_size=104)
    d = tiny.draft_config(t)
    params = tiny.params(3, t, d)
    if mesh:
        params = sharding.place(params, sharding.make_mesh(mesh))
    method = evaluator.Method(params, DecodeConfig(t, d, chain(3)))
    calls = []

    def decoded(*args: Any, **kwargs: Any) -> list[Turn]:
        caplog.clear()
        with jax.log_compiles():
            turns = decode_one(*args, **kwargs)
        calls.append((len(turns[0].n_emitted), "XLA compilation of" in caplog.text))
        return turns

    decode_one = evaluator._decode
    monkeypatch.setattr(evaluator, "_decode", decoded)
    monkeypatch.setattr(evaluator, "_warm", set())
    prompts = [[3, 1, 4, 1, 5]] * 4
    first = evaluator.answer(method, prompts, 12, 0, 256)
    second = evaluator.answer(method, prompts, 12, 0, 256)
    n_steps = len(first[0].n_emitted)
    assert calls == [(0, True), (n_steps, False), (n_steps, False)]
    assert [turn.tokens for turn in first] == [turn.tokens for turn in second]
    assert len(first[0].tokens) == 12


def test_where_two_texts_part_the_gap_of_the_target_is_measured():
    """R102: against NumPy, and against the rounding between forwards of two shapes."""
    t = tiny.target_config(vocab_size=50, n_layers=1)
    d = tiny.draft_config(t)
    params = tiny.params(3, t, d)
    cfg = DecodeConfig(t, d, chain(3))
    method = evaluator.Method(params, cfg)
    prompt, text = [3, 1, 4, 1, 5], [9, 2, 6, 5, 3]
    tie = evaluator.near_tie(method, prompt, [9, 2, 7, 5, 3], text)
    logits = reference.llama(params["target"], [*prompt, 9, 2], t)["logits"][-1]
    best = np.sort(logits)
    np.testing.assert_allclose(tie.gap, best[-1] - best[-2], atol=1e-5)
    assert tie.at == 2 and tie.gap > 1e-3 > tie.noise and not tie.is_near
    # A second token with the same logits everywhere: no gap at all.
    head, most = params["target"]["head"], int(np.argmax(logits))
    params["target"]["head"] = head.at[most - 1].set(head[most])
    tie = evaluator.near_tie(method, prompt, [9, 2, 7, 5, 3], text)
    assert tie.gap == 0
    assert evaluator.Tie(0, 0.01, 0.02).is_near


@pytest.mark.parametrize("noise", [0.1, 0.5])
def test_texts_that_differ_are_counted_and_near_ties_apart(
    setup, monkeypatch, tmp_path, noise
):
    plain = evaluator.Method({}, DecodeConfig(setup.target_cfg))
    drafted = evaluator.Method({}, plain.cfg)
    others = {"a": [1, 2, 3], "b": [1, 5, 3]}

    def answer(method: Any, prompts: Any, *_: Any) -> list[Turn]:
        said = "b" if method is drafted and "b" in prompts else "a"
        return [Turn(others[said], [0, 0], [1, 1], 1.0, 1.0)]

    monkeypatch.setattr(evaluator, "answer", answer)
    monkeypatch.setattr(evaluator, "_prompt", lambda _, question, __: question.turns[0])
    tie = evaluator.Tie(1, 0.3, noise)
    monkeypatch.setattr(evaluator, "near_tie", lambda *_: tie)
    asked = [Question(8, "", ["a"]), Question(9, "", ["b"])]
    progress = common.Progress("decode", 2)
    (result,) = evaluator.run_task(
        setup, [drafted], plain, "sum", asked, 3, 1, progress, 0, tmp_path / "a.jsonl"
    )
    assert result.n_identical == 1
    assert result.n_near_tie == (noise > 0.3)
    assert result.mismatches == [f"sum 9 turn 0: {tie}"]


@pytest.mark.parametrize("batch", [1, 2])
def test_a_set_that_is_broken_off_goes_on_after_its_last_batch(
    setup, monkeypatch, tmp_path, batch
):
    plain = evaluator.Method({}, DecodeConfig(setup.target_cfg))
    drafted = evaluator.Method({}, plain.cfg)
    questions = [Question(i, "", ["a", "b"][: 1 + i % 2]) for i in range(5)]
    calls: list[list[str]] = []
    last = 1000

    def answer(method: Any, prompts: list[str], *_: Any) -> list[Turn]:
        if len(calls) == last:
            raise KeyboardInterrupt
        calls.append(prompts)
        steps = 1 + (method is drafted)
        return [
            Turn([*map(ord, one)], [0] * steps, [1] * steps, 0.5, 0.25, 7)
            for one in prompts
        ]

    def prompt(_: Any, question: Question, so_far: list[Turn]) -> str:
        return f"{question.id}{question.turns[len(so_far)]}"

    monkeypatch.setattr(evaluator, "answer", answer)
    monkeypatch.setattr(evaluator, "_prompt", prompt)

    def run(name: str) -> list[evaluator.TaskResult]:
        progress = common.Progress("decode", 5)
        methods, file = [drafted, plain], tmp_path / name
        return evaluator.run_task(
            setup, methods, plain, "sum", questions, 3, batch, progress, 0, file
        )

    whole = run("whole")
    n_calls, last = len(calls), len(calls) - 1
    calls.clear()
    with pytest.raises(KeyboardInterrupt):
        run("broken")
    last = 1000
    assert run("broken") == whole
    n_again = len(calls) + 1 - n_calls
    assert 0 <= n_again < 2 * batch * 2  # of the last batch only
    calls.clear()
    assert run("broken") == whole and not calls
    assert whole[0].answers != whole[1].answers == whole[1].baseline


def test_a_run_that_dies_while_probing_keeps_its_answers(setup, monkeypatch, tmp_path):
    plain = evaluator.Method({}, DecodeConfig(setup.target_cfg))
    entries = [ablate.Entry(name, plain, None) for name in ("vanilla", "lookup")]
    questions = {"sum": [Question(1, "", ["a"]), Question(2, "", ["b"])]}
    n_answers, n_probes, last = 0, 0, 1

    def answer(_: Any, prompts: Any, *__: Any) -> list[Turn]:
        nonlocal n_answers
        n_answers += 1
        return [Turn([1, 2], [0], [1], 0.5, 0.25, 7)]

    def probed(*_: Any) -> dict[str, Any]:
        nonlocal n_probes
        n_probes += 1
        if n_probes > last:
            raise KeyboardInterrupt
        return {}

    monkeypatch.setattr(evaluator, "answer", answer)
    monkeypatch.setattr(evaluator, "_prompt", lambda *_: [1])
    monkeypatch.setattr(ablate, "_probed", probed)
    preset = ablate.Preset(1, 2, 8)
    given = (setup, entries, plain, questions, preset, tmp_path)
    with flagsaver.flagsaver():
        flags.FLAGS(["ablate"])
        with pytest.raises(KeyboardInterrupt):
            ablate.measure(*given)
        assert n_answers > 0
        n_answers, last = 0, 1000
        rows = ablate.measure(*given)
        assert n_answers == 0 and len(rows) == 2
        assert common.read_lines(tmp_path / "results.jsonl") == json.loads(
            json.dumps(rows)
        )
        assert not list((tmp_path / "answers").iterdir())


def test_programs_are_dropped_before_they_fill_the_table_of_mappings(
    monkeypatch, tmp_path, caplog
):
    t = tiny.target_config()
    d = tiny.draft_config(t)
    method = evaluator.Method(tiny.params(3, t, d), DecodeConfig(t, d, chain(3)))
    mappings, most = tmp_path / "maps", tmp_path / "max_map_count"
    monkeypatch.setattr(evaluator, "_MAPPINGS", mappings)
    monkeypatch.setattr(evaluator, "_MOST_MAPPINGS", most)
    monkeypatch.setattr(evaluator, "_warm", set())
    most.write_text("20\n")
    texts, compiled = [], []
    for n_new, n_mappings in (
        (12, 10),
        (13, 10),
        (12, 10),
        (14, 11),
        (12, 11),
        (12, 11),
    ):
        mappings.write_text("a\n" * n_mappings)
        caplog.clear()
        with jax.log_compiles():
            (turn,) = evaluator.answer(method, [[3, 1, 4]], n_new, 0, 256)
        texts.append(turn.tokens)
        compiled.append("XLA compilation of jit(loop)" in caplog.text)
    assert compiled == [True, True, False, True, True, False]
    assert texts[0] == texts[2] == texts[4] == texts[5] == texts[1][:12]


def test_a_head_of_another_target_of_the_same_shape_warns(setup, capsys):
    evaluator.load_method(setup, head_folder())
    assert "WARNING" not in capsys.readouterr().out
    evaluator.load_method(setup._replace(target_hash="0123"), head_folder())
    said = capsys.readouterr().out
    assert "WARNING: this head was trained for target tiny, this run uses 0123" in said
    half = dataclasses.replace(setup.cfg, dtype="bfloat16")
    evaluator.load_method(setup._replace(cfg=half), head_folder())
    assert "trained for precision float32, this run uses bfloat16" in (
        capsys.readouterr().out
    )


def test_a_head_of_another_kind_than_the_variant_is_refused(
    cli, setup, monkeypatch, tmp_path
):
    monkeypatch.setattr(common, "load_setup", lambda cfg: setup._replace(cfg=cfg))
    plain = evaluator.Method({}, DecodeConfig(setup.target_cfg))
    monkeypatch.setattr(evaluator, "load_method", lambda *_: plain)
    with pytest.raises(
        ValueError, match=r"kind none .*, --variant=eagle3 needs .*eagle3"
    ):
        cli("--config=configs/tiny.py", f"--head={tmp_path}")


# Result lines.


def test_lines_are_appended_whole_and_torn_ones_are_passed_over(tmp_path, capsys):
    path = tmp_path / "deep" / "results.jsonl"
    common.append_line(path, {"a": 1})
    with path.open("a") as file:
        file.write('{"a": 2, "b"')
    common.append_line(path, {"a": 3, "text": "\u2028"})
    assert [row["a"] for row in common.read_lines(path)] == [1, 3]
    assert "results.jsonl:2: not a JSON object" in capsys.readouterr().err
    path.write_text("\n17\n\n")
    assert common.read_lines(path) == []
    assert common.read_lines(tmp_path / "none") == []


def test_a_line_that_does_not_fit_leaves_the_file_as_it_was(tmp_path):
    path = tmp_path / "results.jsonl"
    common.append_line(path, {"a": 1})
    before = path.read_bytes()
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (64, old[1]))
        with pytest.raises(
            OSError, match=r"cannot write to .*results.jsonl: .* intact"
        ):
            common.append_line(path, {"a": "x" * 200})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
    assert path.read_bytes() == before


def result(answers: list[Any], baseline: list[Any]) -> dict[str, Any]:
    task = evaluator.TaskResult(answers, baseline, len(answers), 0, [])
    tree = TreeConfig(width=2, depth=2, n_nodes=4)
    t = tiny.target_config()
    return evaluator.summary(task, DecodeConfig(t, tiny.draft_config(t), tree))


def test_numbers_that_do_not_exist_are_null_and_a_dash(capsys):
    looping = [Turn([5] * 30, [0] * 29, [1] * 29, 2.0, 1.0)]
    at_once = [Turn([0], [], [], 0.1, 1.0)]  # the first token ended it
    row = result([looping], [looping])
    assert row["tau_without_loops"] is None and row["n_looping"] == 1
    assert row["tau_pooled"] == 1.0 and row["speedup"] == 1.0
    none = result([at_once], [at_once])
    assert none["tau_pooled"] is None and none["tokens_per_second"] is None
    assert none["acceptance_by_depth"] == [None, None]
    json.loads(json.dumps([row, none], allow_nan=False))
    shared = {
        "variant": "eagle3",
        "target": "tiny",
        "task": "sum",
        "temperature": 0.0,
        "max_new_tokens": 8,
        "batch": 1,
        "dtype": "float32",
        "tree": {"n_nodes": 5},
    }
    ablate.print_table([shared | row, shared | none], 2)
    table = [line for line in capsys.readouterr().out.splitlines() if "│" in line]
    assert len(table) == 3 and table[1].count(" - ") >= 6
    # The mean leaves out what is not there.
    assert " 1.00 " in table[2] and "2 of 2" in table[2] and "1 of 2" in table[2]


@pytest.mark.parametrize(
    ("shares", "warns"), [([0.0, 0.09], True), ([0.0, 0.11], False), ([None], False)]
)
def test_a_head_of_hardly_any_accepted_draft_warns(capsys, shares, warns):
    counts = dict.fromkeys(("n_prompts", "n_looping", "n_identical", "n_near_tie"), 1)
    rest = ("tau_pooled", "tau_by_prompt", "tau_without_loops", "tokens_per_second")
    rest += ("speedup", "speedup_with_prefill")
    rows = [
        counts | dict.fromkeys(rest) | {"acceptance_by_depth": [share]}
        for share in shares
    ]
    t = tiny.target_config(taps=(0, 1, 2))
    cfg = DecodeConfig(t, tiny.draft_config(t), chain(1))
    ablate.warn_of_wiring(rows, cfg)  # R301
    said = capsys.readouterr().out
    assert ("WARNING: only 4.5% of the steps" in said) == warns
    assert ("inputs of layers (0, 1, 2)" in said) == warns
    for row in rows:
        row["acceptance_by_depth"] = []
    ablate.warn_of_wiring(rows, DecodeConfig(t))  # plain decoding drafts none
    assert capsys.readouterr().out == ""


def test_above_temperature_0_identity_is_not_claimed():
    turn = [Turn([1, 2], [0], [1], 1.0, 1.0)]
    task = evaluator.TaskResult([turn], [turn], 1, 0, [])
    warm = SamplingConfig(temperature=1.0)
    t = tiny.target_config()
    cfg = DecodeConfig(t, tiny.draft_config(t), chain(1), warm)
    row = evaluator.summary(task, cfg)
    assert row["n_identical"] is None and row["n_near_tie"] is None


def test_speedup_is_the_ratio_of_mean_speeds_with_and_without_prefill():
    fast = [Turn(list(range(9)), [3, 3], [4, 4], 1.0, 1.0)]
    slow = [Turn(list(range(9)), [0] * 8, [1] * 8, 4.0, 1.0)]
    row = result([fast], [slow])
    assert (row["tokens_per_second"], row["baseline_tokens_per_second"]) == (8.0, 2.0)
    assert row["speedup"] == 4.0
    np.testing.assert_allclose(row["speedup_with_prefill"], (9 / 2) / (9 / 5))


def test_progress_leaves_compilation_out_of_its_estimate(capsys, monkeypatch):
    now = iter([80.0, 89.0, 90.0, 100.0, 110.0, 140.0, 150.0])
    monkeypatch.setattr(common.time, "monotonic", lambda: next(now))
    progress = common.Progress("train", 5, every=10.0)
    for n in (1, 2, 3):
        progress.start(f"{n} compiled")
    for done in (1, 2, 5):
        progress.show(done, "x")
    progress.start("4 compiled")
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == ["train 1 compiled", "train 3 compiled"]
    assert lines[2:] == [
        "train 1/5  x",
        "train 2/5  x  ETA 0:30",
        "train 5/5  x  ETA 0:00",
    ]


def test_the_commit_is_that_of_the_checkout():
    head = subprocess.run(
        ["git", "rev-parse", "HEAD"],
        cwd=drivers.ROOT,
        capture_output=True,
        text=True,
        check=False,
    ).stdout.strip()
    assert common.commit() == (head[:12] or "unknown")

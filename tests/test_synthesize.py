"""The target writes conversations: refill, filters, prompts, resuming, bad input."""

import collections
import dataclasses
import gzip
import json
from pathlib import Path
from typing import Any

import drivers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from configs import tiny as tiny_config
from eagle_jax import data, decode, tree
from eagle_jax import text as text_lib
from eagle_jax.config import DecodeConfig, SamplingConfig
from experiments import common, writer
from experiments.common import Setup
from experiments.evaluator import Method
from experiments.writer import Job, Settings

T = tiny.with_eos(tiny.target_config(n_layers=1, taps=(0,)), 7, 50)
D = tiny.draft_config(T, "eagle3", vocab_size=50)
PLAIN = DecodeConfig(T)
DRAFTED = DecodeConfig(T, D, tree.chain(2))
NEW = 20
rng = np.random.default_rng(0)
JOBS = [
    Job(n, rng.integers(0, T.vocab_size, length).tolist(), 100 + n)
    for n, length in enumerate((1, 70, 3, 64, 65, 12, 5, 130, 2))
]

# Users under one system turn: the first 40 tokens are the same.
SHARED = [
    Job(10 + n, JOBS[1].ids[:40] + job.ids, 200 + n, n_shared=40)
    for n, job in enumerate(JOBS[:4])
]


@pytest.fixture(autouse=True)
def small_steps(monkeypatch):
    monkeypatch.setattr(writer, "STEPS", 6)
    monkeypatch.setattr(decode, "CHUNK", writer.CHUNK)  # one prefill to compile


@pytest.fixture(scope="module")
def params():
    return tiny.params(5, T, D)


def alone(params, job: Job, cfg: DecodeConfig) -> list[int]:
    (tokens,) = decode.generate(params, [job.ids], cfg, NEW, seed=job.seed)
    return tokens


# Rows that are refilled.


@pytest.mark.parametrize(
    ("cfg", "temperature"), [(PLAIN, 0.0), (PLAIN, 1.0), (DRAFTED, 0.0)]
)
def test_a_refilled_row_says_what_its_prompt_says_alone(params, cfg, temperature):
    cfg = dataclasses.replace(cfg, sampling=SamplingConfig(temperature))
    got = {
        job.number: tokens
        for job, tokens in writer.continue_all(Method(params, cfg), JOBS, 3, 256, NEW)
    }
    assert sorted(got) == [job.number for job in JOBS]
    lengths = set()
    for job in JOBS:
        assert got[job.number] == alone(params, job, cfg)
        lengths.add(len(got[job.number]))
    assert len(lengths) > 2 and NEW in lengths  # some ended, some were cut


@pytest.mark.parametrize("cfg", [PLAIN, DRAFTED])
def test_what_prompts_begin_with_is_prefilled_once(params, cfg, monkeypatch):
    calls = []
    real = writer.begin
    monkeypatch.setattr(writer, "begin", lambda *a: calls.append(a[1]) or real(*a))
    cfg = dataclasses.replace(cfg, sampling=SamplingConfig(0.0))
    for job, tokens in writer.continue_all(Method(params, cfg), SHARED, 2, 256, NEW):
        assert tokens == alone(params, job, cfg)
    assert calls == [SHARED[0].ids[:40], *(job.ids for job in SHARED)]


def test_the_order_and_the_batch_do_not_matter(params):
    cfg = dataclasses.replace(PLAIN, sampling=SamplingConfig(1.0))
    one, other = (
        {j.number: t for j, t in writer.continue_all(Method(params, cfg), *given)}
        for given in ((JOBS, 3, 256, NEW), (JOBS[::-1], 3, 256, NEW))
    )
    assert one == other


def test_prompts_are_asked_for_only_when_a_row_is_free(params):
    taken = []

    def jobs():
        for job in JOBS:
            taken.append(job.number)
            yield job

    ended = writer.continue_all(Method(params, PLAIN), jobs(), 3, 256, NEW)
    next(ended)
    assert taken == [0, 1, 2]
    assert len(list(ended)) == len(JOBS) - 1


def test_many_draws_of_one_prompt_share_its_prefill(params, monkeypatch):
    calls = []
    real = writer.begin
    monkeypatch.setattr(writer, "begin", lambda *a: calls.append(a[1]) or real(*a))
    cfg = dataclasses.replace(PLAIN, sampling=SamplingConfig(1.0))
    jobs = [Job(n, JOBS[2].ids, n) for n in range(5)]
    got = {
        j.number: t
        for j, t in writer.continue_all(Method(params, cfg), jobs, 2, 256, NEW)
    }
    assert calls == [JOBS[2].ids]
    for job in jobs:
        assert got[job.number] == alone(params, job, cfg)
    assert len({tuple(t) for t in got.values()}) == 5


def test_logits_that_are_not_finite_end_the_run(params):
    norm = params["target"]["norm"] * jnp.nan
    broken = params | {"target": params["target"] | {"norm": norm}}
    with pytest.raises(FloatingPointError, match="not finite; check the weights"):
        list(writer.continue_all(Method(broken, PLAIN), JOBS[:2], 3, 256, NEW))


def test_replacing_a_row_leaves_the_others_and_takes_all_of_the_new_one(params):
    old = decode.start(params, [[1, 2, 3], [4], [5, 6]], DRAFTED, 300)
    new = decode.start(params, [[9, 8, 7, 6]], DRAFTED, 10, seed=4)
    assert new.target_cache.n_slots < old.target_cache.n_slots
    before, part = jax.device_get((as_numbers(old), as_numbers(new)))
    after = jax.device_get(as_numbers(decode.jit_replace_row(old, new, 1)))
    flat = [jax.tree.leaves(x) for x in (before, part, after)]
    for was, put, now in zip(*flat, strict=True):
        axis = 1 if now.ndim == 2 and now.shape[0] == D.d_model else 0
        was, put, now = (np.moveaxis(x, axis, 0) for x in (was, put, now))
        np.testing.assert_array_equal(now[[0, 2]], was[[0, 2]])
        filled = now[1][tuple(slice(n) for n in put[0].shape)]
        np.testing.assert_array_equal(filled, put[0])


def as_numbers(state: decode.DecodeState):
    return state._replace(keys=jax.random.key_data(state.keys).T.sum(0))


# Prompts that the target makes up.


@pytest.fixture(scope="module")
def words() -> text_lib.Text:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiny_config.target, "init", lambda *_: {})
        return tiny_config.load("float32", ())[2]


@pytest.fixture(scope="module")
def babbler(words) -> Setup:
    """Says words of small letters, whoever's turn it is."""
    t = tiny.with_eos(tiny.markov_target_config(258), 0)
    letters = [text_lib.encode(words, c)[0] for c in "abcdefghijklmnopqrstuvwxyz"]
    space = text_lib.encode(words, " ")[0]
    table = np.full((258, 258), -30.0)  # log p of the next token, by the last one
    table[:, letters] = 0.0
    table[letters, space] = 1.5
    table[letters, 0] = 0.5
    made = tiny.markov_params(table, table, t, tiny.markov_draft_config(t))
    return Setup(tiny_config.get_config(), t, made["target"], words, "babbler")


def babble(setup: Setup, out: Path, **changes: Any) -> writer.Writer:
    chosen: dict[str, Any] = {
        "answer_tokens": 600,
        "temperatures": (0.9, 1.0),
        "max_new_tokens": 60,
        "batch": 3,
        "min_tokens": 4,
    }
    settings = Settings(**(chosen | changes))
    files = writer.files_of(out)
    writer.check_meta(files, writer.meta_of(setup, settings, "target"))
    made = (
        ([{"role": "user", "content": prompt}], "target", reason)
        for prompt, reason in writer.write_prompts(setup, settings, files.prompts)
    )
    method = Method({"target": setup.target_params}, DecodeConfig(setup.target_cfg))
    prompts = writer.Prompts(setup, settings, made)
    return writer.Writer(setup, method, settings, prompts, files)


@pytest.fixture(scope="module")
def babbled(babbler, tmp_path_factory) -> writer.Writer:
    """A run that nothing disturbed."""
    task = babble(babbler, tmp_path_factory.mktemp("babbled"))
    task.run()
    return task


def test_a_target_talks_to_itself(babbler, babbled):
    rows = drivers.read_lines(babbled.files.conversations)
    drawn = drivers.read_lines(babbled.files.prompts)
    assert [row["draw"] for row in drawn] == list(range(len(drawn)))
    good = [row["prompt"] for row in drawn if not row["reason"]]
    assert len(set(good)) == len(good) > 8
    assert "prompt too short" in {row["reason"] for row in drawn}
    counts = collections.Counter()
    for row in rows:
        assert [m["role"] for m in row["messages"]] == ["user", "assistant"]
        assert row["messages"][0]["content"] == good[row["id"]]
        assert row["temperature"] == (0.9, 1.0)[row["id"] % 2]
        counts[row["temperature"]] += row["n_tokens"]
    # Both temperatures have their share, and stop soon after.
    assert all(300 <= n < 300 + 3 * 60 for n in counts.values()) and len(counts) == 2


def test_an_answer_is_what_its_prompt_and_number_give_alone(babbler, babbled):
    rows = drivers.read_lines(babbled.files.conversations)
    cfg = DecodeConfig(babbler.target_cfg, sampling=SamplingConfig(1.0))
    params = {"target": babbler.target_params}
    some = [row for row in rows if row["temperature"] == 1.0][:4]
    for row in some:
        said = text_lib.render(babbler.text, row["messages"][:1], True)
        ids = text_lib.encode(babbler.text, said)
        seed = writer.seed_of(0, "answer", row["id"])
        (tokens,) = decode.generate(params, [ids], cfg, 60, seed=seed)
        assert (len(tokens), tokens[-1] == 0) == (row["n_tokens"], row["finished"])
        answer = text_lib.decode(babbler.text, tokens)
        assert answer == row["messages"][1]["content"]
    assert len(some) == 4


def test_it_can_be_trained_on(babbler, babbled):
    path = babbled.files.conversations
    rows = drivers.read_lines(path)
    samples, report = data.load_samples(babbler.text, [path], 256, "drop")
    assert report.kept == len(rows) and not report.skipped
    supervised = sum(int(sample.mask.sum()) for sample in samples)
    assert supervised == sum(row["n_tokens"] for row in rows)


def test_a_run_goes_on_after_a_kill_and_makes_nothing_twice(babbler, babbled, tmp_path):
    """Lines are as they stand at a kill: some whole, the last one torn."""
    files = writer.files_of(tmp_path)
    whole = babbled.files
    files.meta.write_text(whole.meta.read_text())
    for old, new, n in [
        (whole.conversations, files.conversations, 5),
        (whole.prompts, files.prompts, 9),
    ]:
        lines = old.read_text().splitlines()
        new.write_text("\n".join(lines[:n]) + "\n" + lines[n][:40])
    task = babble(babbler, tmp_path)
    assert task.n_kept == 5
    task.run()
    with_torn = files.conversations.read_text().splitlines()
    first = whole.conversations.read_text().splitlines()
    assert with_torn[:5] == first[:5] and with_torn[5] == first[5][:40]
    rows = common.read_lines(files.conversations)
    numbers = [row["id"] for row in rows]
    assert len(set(numbers)) == len(numbers) == task.n_kept
    undisturbed = {row["id"]: row for row in drivers.read_lines(whole.conversations)}
    both = [row for row in rows if row["id"] in undisturbed]
    assert len(both) > 8
    assert all(row == undisturbed[row["id"]] for row in both)
    drawn = common.read_lines(files.prompts)
    again = drivers.read_lines(whole.prompts)
    n = min(len(drawn), len(again))
    assert n > 9 and drawn[:n] == again[:n]
    # A third run has nothing left to do, and more can be asked for.
    before = files.conversations.read_bytes()
    babble(babbler, tmp_path).run()
    assert files.conversations.read_bytes() == before
    more = babble(babbler, tmp_path, answer_tokens=900)
    more.run()
    assert min(more.n_tokens) >= 450
    assert files.conversations.read_bytes().startswith(before)


def test_answers_of_another_making_are_not_mixed(babbler, babbled, tmp_path):
    out = babbled.files.meta.parent
    with pytest.raises(
        ValueError, match=r"with max_new_tokens=60, this run has 50; give"
    ):
        babble(babbler, out, max_new_tokens=50)
    with pytest.raises(ValueError, match="target_hash='babbler', this run has 'other'"):
        babble(babbler._replace(target_hash="other"), out)
    (tmp_path / "synthetic.jsonl").write_text("{}\n")
    with pytest.raises(ValueError, match=r"meta.json cannot be read, .* another --out"):
        babble(babbler, tmp_path)


def test_a_run_that_keeps_nothing_gives_up(babbler, tmp_path, monkeypatch):
    monkeypatch.setattr(writer, "PATIENCE", 5)
    task = babble(babbler, tmp_path, min_tokens=60)
    with pytest.raises(
        ValueError, match=r"the last 5 answers .* 5 answer shorter than"
    ):
        task.run()
    assert not task.files.conversations.exists()
    dropped = drivers.read_lines(task.files.dropped)
    assert [row["reason"] for row in dropped] == ["answer shorter than min_tokens"] * 5


# What is left out.


def ids_of(text, string: str) -> list[int]:
    return text_lib.encode(text, string)


@pytest.mark.parametrize(
    ("drawn", "prompt", "reason"),
    [
        (" Why is the sky blue?\n<|im_end|>", "Why is the sky blue?", ""),
        ("Why is the sky blue?", "Why is the sky blue?", "prompt without an end"),
        (" \n<|im_end|>", "", "empty prompt"),
        ("<|im_end|>", "", "empty prompt"),
        ("Hi there<|im_end|>", "Hi there", "prompt too short"),
        ("Antidisestablish<|im_end|>", "Antidisestablish", "prompt too short"),
        ("ha " * 20 + "<|im_end|>", ("ha " * 20)[:-1], "prompt that repeats itself"),
        (
            "Why <|im_start|>is it so?<|im_end|>",
            "Why is it so?",
            "prompt with a special token inside",
        ),
    ],
)
def test_drawn_prompts_are_cleaned(words, drawn, prompt, reason):
    got = writer.clean_prompt(words, ids_of(words, drawn), (0,))
    assert got == (prompt, reason)


def test_half_a_character_is_broken_in_a_prompt_and_at_the_end_of_an_answer(words):
    half = ids_of(words, "ä")[:1]
    tokens = [*half, *ids_of(words, "why so? a b c<|im_end|>")]
    _, reason = writer.clean_prompt(words, tokens, (0,))
    assert reason == "prompt with broken characters"


def test_long_repetition_with_small_changes_is_found():
    part = list(range(50))
    assert writer.repeats(part * 3) and not writer.repeats(part + part[:30])
    assert writer.repeats([*part, 99, *part, 98, *part, 97])
    assert not writer.repeats([1] * 8)


@pytest.fixture
def judge(words, tmp_path):
    """Judges one answer, given as text, to a question."""
    setup = Setup(tiny_config.get_config(), tiny.with_eos(T, 0), {}, words, "")
    setup = setup._replace(
        target_cfg=dataclasses.replace(setup.target_cfg, vocab_size=258)
    )
    method = Method({}, DecodeConfig(setup.target_cfg))

    def call(answer: str | list[int], before: str = "", **changes: Any):
        settings = Settings(100, max_new_tokens=99, **changes)
        messages = [{"role": "user", "content": "Say something nice."}]
        prompts = writer.Prompts(setup, settings, iter([(messages, "file:1", "")]))
        assert prompts.at(0) is not None and prompts.at(1) is None
        task = writer.Writer(
            setup, method, settings, prompts, writer.files_of(tmp_path)
        )
        task.answers.add(writer._hash(before))
        tokens = ids_of(words, answer) if isinstance(answer, str) else answer
        return task._judge(Job(0, [], 0), tokens, 0.7)

    return call


def test_a_conversation_says_where_it_comes_from(judge):
    row, reason = judge("Roses are red.<|im_end|>")
    assert not reason
    assert row == {
        "id": 0,
        "messages": [
            {"role": "user", "content": "Say something nice."},
            {"role": "assistant", "content": "Roses are red."},
        ],
        "temperature": 0.7,
        "source": "file:1",
        "finished": True,
        "n_tokens": 15,
    }


def test_answers_are_dropped_under_a_named_reason(judge, words):
    end = "<|im_end|>"
    assert judge("Roses.." + end)[1] == ""
    assert judge("Roses." + end)[1] == "answer shorter than min_tokens"
    assert judge(" " * 12 + end)[1] == "answer shorter than min_tokens"
    assert judge("no, " * 9 + end)[1] == "answer that repeats itself"
    assert (
        judge("Roses <|im_start|>are" + end)[1] == "answer with a special token inside"
    )
    assert judge("Roses are red.")[1] == ""
    assert judge("Roses are red.", keep_cut=False)[1] == "answer cut at max_new_tokens"
    assert judge("Roses are red." + end, keep_cut=False)[1] == ""
    assert judge("Roses are red." + end, "Roses are red.")[1] == "answer given before"
    half = [*ids_of(words, "Roses are red"), *ids_of(words, "ä")[:1]]
    row, reason = judge(half)
    assert (row["messages"][1]["content"], row["finished"]) == ("Roses are red", False)
    assert not reason and row["n_tokens"] == 14
    assert judge([*half, 0])[1] == "answer with broken characters"


def test_rows_in_a_loop_do_not_wait_for_the_limit():
    """Token 1 follows itself for ever."""
    t = tiny.markov_target_config(6)
    table = np.full((6, 6), -9.0)
    table[:, 1] = 0.0
    made = tiny.markov_params(table, table, t, tiny.markov_draft_config(t))
    method = Method({"target": made["target"]}, DecodeConfig(t))
    jobs = [Job(0, [3, 4], 0)]
    ((_, tokens),) = writer.continue_all(method, jobs, 1, 256, 150)
    assert tokens == [1] * 96


# Prompts from files.


def taken(words, prompts, **changes: Any) -> writer.Prompts:
    cfg = dataclasses.replace(T, vocab_size=258)
    setup = Setup(tiny_config.get_config(), cfg, {}, words, "")
    made = ((messages, where, "") for messages, where in prompts)
    out = writer.Prompts(setup, Settings(100, **changes), made)
    assert out.at(99) is None
    return out


def test_prompts_come_from_questions_conversations_and_plain_text(tmp_path):
    drivers.write_lines(
        tmp_path / "a.jsonl",
        [{"question_id": 3, "category": "x", "turns": ["First?", "Second?"]}],
    )
    turns = [{"from": "human", "value": "One?"}, {"from": "gpt", "value": "Two."}]
    rows = [{"conversations": turns}, {"system": "Be brief.", "conversations": turns}]
    (tmp_path / "b.json.gz").write_bytes(gzip.compress(json.dumps(rows).encode()))
    (tmp_path / "c.txt").write_text("Line one\n\n  Line two  \n")
    got = writer.read_prompts(tmp_path)
    system = {"role": "system", "content": "Be brief."}
    assert got == [
        ([writer._user("First?")], "a.jsonl:3"),
        ([writer._user("One?")], "b.json.gz:1"),
        ([system, writer._user("One?")], "b.json.gz:2"),
        ([writer._user("Line one")], "c.txt:1"),
        ([writer._user("Line two")], "c.txt:3"),
    ]
    assert writer.read_prompts(tmp_path / "a.jsonl") == got[:1]


def test_long_turns_are_put_to_the_target_to_sum_up(tmp_path):
    rows, turns = [], {}
    for i in range(60):
        turns[f"t{i}"] = n_words = 40 + 7 * i
        said = " ".join([f"t{i}"] * n_words)
        rows.append({"messages": [{"role": "user", "content": "Read this."}]})
        rows[-1]["messages"].append({"role": "assistant", "content": said})
    drivers.write_lines(tmp_path / "a.jsonl", rows)
    prompts = writer.summaries(tmp_path / "a.jsonl", 3)
    used: list[str] = []
    sides = set()
    for messages, where in prompts:
        (message,) = messages
        assert message["role"] == "user"
        parts = message["content"].split("\n\n")
        (ask,) = set(parts) & set(writer.ASKED)
        sides.add(parts.index(ask))
        (text,) = set(parts) - {ask}
        words = list(dict.fromkeys(text.split()))
        for word in words[:-1]:  # whole turns, but for the last one
            assert text.split().count(word) == turns[word] >= writer.LONG_TURN
        assert where == f"a.jsonl:{int(words[0][1:]) + 1}"
        used += words
        assert len(text.split()) <= 600
    assert sides == {0, 1} and len(used) == len(set(used))
    assert sorted(used) == sorted(w for w, n in turns.items() if n >= writer.LONG_TURN)
    assert all(len(m[0]["content"].split()) > 100 for m, _ in prompts[:-1])
    assert writer.summaries(tmp_path / "a.jsonl", 3) == prompts
    assert writer.summaries(tmp_path / "a.jsonl", 4) != prompts
    drivers.write_lines(tmp_path / "b.jsonl", rows[:2])
    with pytest.raises(ValueError, match="no turn of 60 words or more"):
        writer.summaries(tmp_path / "b.jsonl", 3)


def test_files_without_prompts_are_named(tmp_path):
    with pytest.raises(ValueError, match=f"no prompt in {tmp_path}"):
        writer.read_prompts(tmp_path)
    (tmp_path / "c.txt").write_bytes(b"\xff\xfe\xff")
    with pytest.raises(ValueError, match=r"c.txt is not text with one prompt a line"):
        writer.read_prompts(tmp_path)
    drivers.write_lines(tmp_path / "b.jsonl", [{"question_id": 1, "turns": []}])
    with pytest.raises(ValueError, match=r"b.jsonl:1: turns must be a list of texts"):
        writer.read_prompts(tmp_path / "b.jsonl")
    drivers.write_lines(tmp_path / "d.jsonl", [{"messages": []}])
    with pytest.raises(ValueError, match=r"d.jsonl holds no usable conversation"):
        writer.read_prompts(tmp_path / "d.jsonl")


def test_prompts_are_used_once_and_must_fit(words):
    evaluation = data.read_questions(writer.EVALUATION)["qa"][0].turns[0]
    strings = ["Why so?", "why  SO?", "x" * 100, evaluation.upper(), "How so?"]
    got = taken(words, [([writer._user(s)], "") for s in strings], max_prompt_tokens=99)
    assert [prompt.messages[0]["content"] for prompt in got.known] == [
        "Why so?",
        "How so?",
    ]
    rendered = "<|im_start|>user\nHow so?<|im_end|>\n<|im_start|>assistant\n"
    assert got.known[1].ids == ids_of(words, rendered)
    assert got.dropped == {
        "prompt seen before": 1,
        "prompt longer than max_prompt_tokens": 1,
        "prompt of the evaluation": 1,
    }


# Templates.


def with_template(text, template: str):
    return text._replace(template=template)


def test_the_prefix_of_a_users_turn_is_what_stands_before_the_text(words):
    ids, closing = writer.user_prefix(words, [])
    assert ids == ids_of(words, "<|im_start|>user\n") and closing == 0
    first = "{% if loop.first %}<|im_start|>system\nHello<|im_end|>\n{% endif %}"
    start = "{% for m in messages %}"
    longer = with_template(words, words.template.replace(start, start + first))
    ids, _ = writer.user_prefix(longer, [])
    said = "<|im_start|>system\nHello<|im_end|>\n<|im_start|>user\n"
    assert ids == ids_of(words, said)
    system = {"role": "system", "content": "Hello"}
    assert writer.user_prefix(words, [system])[0] == ids_of(words, said)


@pytest.mark.parametrize(
    ("template", "fault"),
    [
        ("{{ messages[0]['content'] }}<|im_end|>", "behind a header to continue"),
        ("<|im_start|>nothing<|im_end|>", "does not hold the user's text once"),
        ("<|im_start|>{{ 2 * messages[0]['content'] }}<|im_end|>", "text once"),
        (
            "<|im_start|>{{ messages[0]['content'] }} [/INST]",
            "closes a user's turn with",
        ),
        ("<|im_start|>{{ messages[0]['content'] }}", "not with a special token"),
    ],
)
def test_templates_that_cannot_be_continued_are_refused(words, template, fault):
    with pytest.raises(ValueError, match=fault):
        writer.user_prefix(with_template(words, template), [])


# Settings.


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"answer_tokens": 0}, "answer_tokens must be at least 1, got 0"),
        ({"batch": 0}, "batch must be at least 1, got 0"),
        ({"temperatures": ()}, "temperatures must name at least one"),
        ({"temperatures": (0.0, -1.0)}, "temperature and top_k must be >= 0"),
        ({"min_tokens": 500}, "min_tokens=500 is more than max_new_tokens=384"),
    ],
)
def test_settings_are_checked(changes, fault):
    with pytest.raises(ValueError, match=fault):
        Settings(**({"answer_tokens": 100} | changes))


def test_the_cache_is_as_small_as_it_can_be():
    assert Settings(1).slots(depth=4, max_len=2048) == 512
    assert Settings(1, max_new_tokens=100).slots(0, 2048) == 256
    assert Settings(1, max_new_tokens=100).slots(0, 220) == 220
    with pytest.raises(
        ValueError, match=r"no room: max_prompt_tokens=120, .* need 508 "
    ):
        Settings(1).slots(depth=4, max_len=507)


# Whole runs, each in a process of its own.


def test_the_driver_answers_prompts_of_a_file(tmp_path):
    path = tmp_path / "asked.txt"
    path.write_text("".join(f"Count from {i}.\n" for i in range(40)))
    given = [
        *drivers.target_flags(),
        f"--out={tmp_path / 'out'}",
        f"--prompts={path}",
        "--answer_tokens=10000",
        "--temperatures=1.0",
        "--max_new_tokens=3",  # of random bytes few answers are whole characters
        "--min_tokens=1",
        "--batch=4",
    ]
    said = drivers.run("synthesize", *given)
    rows = drivers.read_lines(tmp_path / "out" / "synthetic.jsonl")
    dropped = drivers.read_lines(tmp_path / "out" / "dropped.jsonl")
    assert rows and sorted(row["id"] for row in [*rows, *dropped]) == list(range(40))
    for row in rows:
        assert row["messages"][0]["content"] == f"Count from {row['id']}."
        assert row["source"] == f"asked.txt:{row['id'] + 1}"
    total = sum(row["n_tokens"] for row in rows)
    assert f"{len(rows)} conversations with {total} answer tokens" in said
    for reason, n in collections.Counter(row["reason"] for row in dropped).items():
        assert f"{n:8d}  dropped: {reason}\n" in said
    assert "The prompts ran out before 10000 answer tokens" in said
    line = drivers.fail("synthesize", *given, "--max_new_tokens=4")
    assert "was made with max_new_tokens=3, this run has 4" in line


def test_bad_flags_are_one_line(tmp_path):
    both = drivers.fail("synthesize", "--prompts=a", "--summarise=b")
    assert both == "error: give --prompts or --summarise, not both"
    line = drivers.fail("synthesize", "--summarise=nowhere.jsonl")
    assert line == "error: there is no 'nowhere.jsonl' to read prompts from"
    line = drivers.fail("synthesize", f"--out={tmp_path}", "--temperatures=0,hot")
    assert (
        line == "error: temperatures must be numbers with commas between, got '0,hot'"
    )

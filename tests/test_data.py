"""Loss masks, row rules, packing, batches, draft vocabulary and questions."""

import gzip
import itertools
import json
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from eagle_jax import data
from eagle_jax import text as text_lib

EMBEDDED = Path(__file__).parent.parent / "experiments" / "data"

CHATML = (
    "{% for m in messages %}"
    "{% if loop.first and m['role'] != 'system' %}"
    "{{ '<|im_start|>system\nBe kind.<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}"
    "{{ '<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n' }}"
    "{{ m['content'] | trim }}{{ '<|eot_id|>' }}{% endfor %}{% if add_generation_prompt"
    " %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
VICUNA = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m['role'] == 'system' %}{{ m['content'] + ' ' }}"
    "{% elif m['role'] == 'user' %}{{ 'USER: ' + m['content'] + ' ' }}"
    "{% else %}{{ 'ASSISTANT: ' + m['content'] + eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)
# Thoughts of all answers but the last are removed, as in Qwen3.
THINKING = CHATML.replace(
    "m['content'] +",
    "(m['content'] if loop.last else m['content'].split('</think>')[-1]) +",
)
# Template, its end token, and what it makes of an answer.
TEMPLATES = {
    "chatml": (CHATML, "<|im_end|>", lambda answer: answer),
    "llama3": (LLAMA3, "<|eot_id|>", str.strip),
    "vicuna": (VICUNA, "</s>", lambda answer: " " + answer),
}
SPECIAL = (
    "<|im_start|> <|im_end|> <s> </s> <|start_header_id|> <|end_header_id|> <|eot_id|>"
).split()
HELLO = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello!"},
]


@pytest.fixture(scope="module")
def make_text(tmp_path_factory):
    """Byte-level tokens and a few merges, one of a line break with a blank."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("h", "e"), ("l", "l"), ("he", "ll"), ("Ċ", "Ġ"), ("Ġ", "Ġ")]
    tokens = alphabet + [a + b for a, b in merges]
    vocab = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL)

    def make(template):
        folder = tmp_path_factory.mktemp("target")
        tokenizer.save(str(folder / "tokenizer.json"))
        (folder / "chat_template.jinja").write_text(template, "utf-8")
        config = {"bos_token": "<s>", "eos_token": "</s>"}
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
        return text_lib.load_text(folder)

    return make


@pytest.fixture(scope="module")
def text(make_text):
    return make_text(CHATML)


def talk(*contents):
    roles = itertools.cycle(["user", "assistant"])
    turns = zip(roles, contents, strict=False)
    return [{"role": role, "content": content} for role, content in turns]


def marked(text, sample):
    """Decodes each run of supervised tokens."""
    runs = itertools.groupby(
        zip(sample.mask, sample.tokens, strict=True), lambda t: t[0]
    )
    return [
        text_lib.decode(text, [int(i) for _, i in run], skip_special=False)
        for is_answer, run in runs
        if is_answer
    ]


def write(path, rows):
    path.write_text("\n".join(json.dumps(row) for row in rows), "utf-8")
    return path


def sample_of(ids, n_prompt=0):
    tokens = np.asarray(ids, np.int32)
    return data.Sample(tokens, np.arange(len(tokens)) >= n_prompt)


def random_samples(n, longest, seed=0):
    rng = np.random.default_rng(seed)
    sizes = rng.integers(2, longest + 1, n)
    return [sample_of(rng.integers(1, 100, size), 1) for size in sizes]


# Loss mask


@pytest.mark.parametrize("name", TEMPLATES)
def test_marked_tokens_are_the_answers_and_their_end_tokens(make_text, name):
    template, end, written = TEMPLATES[name]
    text = make_text(template)
    tricky = (
        f"{end}\n<|im_start|>assistant\nno ASSISTANT: no{end}USER: "
        "<|start_header_id|>assistant<|end_header_id|>\n\n"
    )
    answers = ["  two blanks 👩‍🚀é", f"before{tricky}after", "\n\nbreak", "plain 漢"]
    contents = [turn for answer in answers for turn in (tricky + "?", answer)]
    sample = data.tokenize(text, data.Conversation(talk(*contents), "file:1"))
    assert marked(text, sample) == [written(answer) + end for answer in answers]


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("answer", ["Hello", " Hello", "   Hello", "\n Hello", "😀"])
def test_training_ids_begin_with_the_prompt_as_decoding_encodes_it(
    make_text, name, answer
):
    text = make_text(TEMPLATES[name][0])
    prompt = text_lib.render(text, talk("Hi"), add_generation_prompt=True)
    ids = text_lib.encode(text, prompt)
    sample = data.tokenize(text, data.Conversation(talk("Hi", answer), "file:1"))
    assert sample.tokens[: len(ids)].tolist() == ids
    assert not sample.mask[: len(ids)].any() and sample.mask[len(ids)]


def test_mask_covers_exactly_the_answers_positions(text):
    sample = data.tokenize(text, data.Conversation(HELLO, "file:1"))
    prompt = text_lib.render(text, HELLO[:1], add_generation_prompt=True)
    n_prompt = len(text_lib.encode(text, prompt))
    n_answer = len(text_lib.encode(text, "Hello!<|im_end|>"))
    expected = list(range(n_prompt, n_prompt + n_answer))
    assert np.flatnonzero(sample.mask).tolist() == expected
    assert len(sample.tokens) == n_prompt + n_answer + 1  # the line break is no one's
    assert sample.tokens.dtype == np.int32 and sample.mask.dtype == bool


def test_ids_are_one_encoding_of_the_rendered_conversation(make_text):
    text = make_text(LLAMA3)
    messages = talk("Hi", "Hello", "And?", "More.")
    whole = text_lib.render(text, messages, add_generation_prompt=False)
    sample = data.tokenize(text, data.Conversation(messages, "file:1"))
    assert sample.tokens.tolist() == text_lib.encode(text, whole)
    assert (sample.tokens == text.tokenizer.token_to_id("<s>")).sum() == 1


def test_template_that_shortens_earlier_answers_keeps_the_last_thought(make_text):
    text = make_text(THINKING)
    messages = talk("a", "<think>1</think>b", "c", "<think>2</think>d")
    sample = data.tokenize(text, data.Conversation(messages, "file:1"))
    assert marked(text, sample) == ["b<|im_end|>", "<think>2</think>d<|im_end|>"]


def test_unfinished_answer_has_no_supervised_end_token(text, tmp_path):
    rows = [{"messages": talk("a", "b", "c", "d"), "finished": False}]
    (sample,), _ = data.load_samples(
        text, [write(tmp_path / "a.jsonl", rows)], 99, "cut"
    )
    assert marked(text, sample) == ["b<|im_end|>", "d"]


def test_template_whose_prompts_are_no_prefix_is_refused(make_text):
    text = make_text(CHATML.replace("assistant\n' }}", "assistant\n<think>' }}"))
    messages = talk("Hi", "An answer longer than the tag.")
    with pytest.raises(ValueError, match="not prefix-stable"):
        data.tokenize(text, data.Conversation(messages, "file:1"))


def test_template_without_end_token_is_refused(make_text, tmp_path):
    text = make_text("{% for m in messages %}{{ m['content'] + '\n' }}{% endfor %}")
    path = write(tmp_path / "a.jsonl", [{"messages": HELLO}])
    with pytest.raises(ValueError, match="no special token"):
        data.load_samples(text, [path], 99, "cut")


def test_preview_marks_answers_and_counts_them(text):
    sample = data.tokenize(text, data.Conversation(HELLO, "file:1"))
    preview = data.preview(text, sample)
    assert "<|im_start|>assistant\n⟦Hello!<|im_end|>⟧\n" in preview
    assert f"{sample.mask.sum()} of {len(sample.tokens)} tokens supervised" in preview


# Files and rows


def test_odd_rows_are_skipped_by_reason_and_good_rows_kept(tmp_path):
    user, answer = HELLO
    system = {"role": "system", "content": "s"}
    table = [
        ([user, answer], None),
        ([system, user, answer, user, answer], None),
        ([], "empty row"),
        ([system], "system turn only"),
        ([answer, user, answer], "leading assistant turn dropped"),
        ([user, user, answer], "two user turns in a row"),
        ([user, answer, answer], "two assistant turns in a row"),
        ([user, answer, user], "trailing user turn dropped"),
        ([user], "no answer to a user turn"),
        ([answer], "no answer to a user turn"),
        ([user, {"role": "assistant", "content": " "}], "empty assistant turn"),
        ([{"role": "user", "content": ""}, answer], "empty user turn"),
        ([user, answer, system, user, answer], "system turn inside the conversation"),
        ([user, {"role": "tool", "content": "x"}], "tool calls are not supported"),
        ([user, {**answer, "tool_calls": [1]}], "tool calls are not supported"),
        ([user, {"role": "narrator", "content": "x"}], "unknown role 'narrator'"),
        ([user, {"role": "assistant", "content": None}], "content is not text"),
        (
            [user, {"role": "assistant", "content": "\ud83d"}],
            "content is not valid Unic",
        ),
        (["Hi"], "turn is not an object"),
    ]
    rows = [{"messages": messages} for messages, _ in table] + [[], {"text": "Hi"}, 3]
    conversations, report = data.read_conversations(write(tmp_path / "a.jsonl", rows))
    counts = {**report.skipped, **report.changed}
    for _, reason in table[2:]:
        assert any(key.startswith(reason) for key in counts), reason
    assert report.changed == {
        "leading assistant turn dropped": 1,
        "trailing user turn dropped": 1,
    }
    assert report.skipped["empty row"] == 2
    assert report.skipped["neither conversations nor messages"] == 1
    assert report.skipped["row is not an object"] == 1
    assert report.kept + sum(report.skipped.values()) == len(rows)
    assert [len(c.messages) for c in conversations] == [2, 5, 2, 2]
    assert report.examples[0] == f"{tmp_path}/a.jsonl:3: empty row"
    assert "2  skipped: no answer to a user turn" in data.describe(report)


def test_malformed_line_is_counted_with_file_and_line(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"messages": HELLO}) + '\n\n{"messages": [\n')
    _, report = data.read_conversations(path)
    assert report.kept == 1 and report.skipped == {"malformed JSON": 1}
    assert report.examples == [f"{path}:3: malformed JSON"]


def test_line_separators_within_a_text_do_not_end_a_row(tmp_path):
    path = tmp_path / "a.jsonl"
    row = {"messages": talk("Hi", "one\u2028two\x85three")}
    path.write_text(json.dumps(row, ensure_ascii=False) + "\r\n", "utf-8", newline="")
    conversations, _ = data.read_conversations(path)
    assert conversations[0].messages == row["messages"]


def test_files_that_cannot_be_used_are_refused(tmp_path):
    with pytest.raises(
        ValueError, match=r"no usable conversation(.|\n)*1  skipped: emp"
    ):
        data.read_conversations(write(tmp_path / "a.jsonl", [{"messages": []}]))
    for name, content, message in [
        ("b.json", b'[{"messages"', "malformed JSON.*line 1"),
        ("c.json", b'{"messages": []}', "one JSON list"),
        ("d.jsonl.gz", gzip.compress(b"{}")[:-9], "cannot be read"),
        ("e.jsonl", b"\xff\xfe", "cannot be read"),
        ("f.csv", b"", "expected .json"),
        ("g.jsonl", b"", "no usable conversation"),
    ]:
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match=message):
            data.read_conversations(tmp_path / name)


def test_spellings_of_a_dialogue_give_the_same_samples(text, tmp_path):
    short = {"user": "human", "assistant": "gpt", "system": "system"}
    messages = [{"role": "system", "content": "s"}, *talk("a", "b", "c", "d")]
    turns = [{"from": short[m["role"]], "value": m["content"]} for m in messages]
    rows = [
        {"conversations": turns},
        {"conversations": messages},
        {"messages": messages},
        {"messages": turns},
        {"system": "s", "conversations": turns[1:]},
    ]
    write(tmp_path / "a.jsonl", rows)
    (tmp_path / "b.json").write_text(json.dumps(rows))
    for name in ("a.jsonl", "b.json"):
        raw = (tmp_path / name).read_bytes()
        (tmp_path / f"{name}.gz").write_bytes(gzip.compress(raw))
    paths = sorted(tmp_path.iterdir())
    samples, report = data.load_samples(text, paths, 99, "cut")
    assert report.kept == len(samples) == 20
    for sample in samples:
        np.testing.assert_array_equal(sample.tokens, samples[0].tokens)
        np.testing.assert_array_equal(sample.mask, samples[0].mask)


@pytest.mark.parametrize("is_field", [True, False])
def test_six_turns_give_three_answers_and_one_system_text(text, tmp_path, is_field):
    turns = talk("1", "2", "3", "4", "5", "6")
    if not is_field:
        turns = [{"role": "system", "content": "Rhyme."}, *turns]
    rows = [{"system": "Rhyme.", "messages": turns}]
    (sample,), _ = data.load_samples(
        text, [write(tmp_path / "a.jsonl", rows)], 999, "cut"
    )
    assert marked(text, sample) == ["2<|im_end|>", "4<|im_end|>", "6<|im_end|>"]
    string = text_lib.decode(text, sample.tokens.tolist(), skip_special=False)
    assert string.count("Rhyme.") == 1 and "Be kind." not in string


def test_rows_that_a_template_refuses_are_counted(make_text, tmp_path):
    no_system = (
        "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}"
        "{% endif %}" + CHATML
    )
    rows = [{"messages": HELLO}, {"system": "s", "messages": HELLO}]
    path = write(tmp_path / "a.jsonl", rows)
    _, report = data.load_samples(make_text(no_system), [path], 99, "cut")
    assert report.kept == 1
    assert ["no system" in reason for reason in report.skipped] == [True]
    assert report.examples[0].startswith(f"{path}:2: ")


def test_long_samples_are_cut_or_dropped_and_counted(text, tmp_path):
    rows = [
        {"messages": HELLO},
        {"messages": talk("Hi", "b" * 100)},
        {"messages": talk("a" * 100, "b")},
    ]
    path = write(tmp_path / "a.jsonl", rows)
    n = len(data.tokenize(text, data.Conversation(HELLO, "")).tokens)
    samples, report = data.load_samples(text, [path], n, "cut")
    assert [len(s.tokens) for s in samples] == [n, n]
    assert report.changed == {f"cut at row_length={n}": 1}
    assert report.skipped == {f"nothing supervised within row_length={n}": 1}
    samples, report = data.load_samples(text, [path], n, "drop")
    assert len(samples) == report.kept == 1
    assert report.skipped == {f"longer than row_length={n}": 2}


def test_data_without_supervised_tokens_are_refused(text, tmp_path):
    path = write(tmp_path / "a.jsonl", [{"messages": talk("a" * 40, "b")}] * 3)
    with pytest.raises(
        ValueError, match=r"0 supervised tokens(.|\n)*3  skipped: nothing"
    ):
        data.load_samples(text, [path], 32, "cut")


# Split, packing, batches


def test_split_is_a_deterministic_partition_with_both_parts_filled():
    samples = random_samples(20, 8)
    train, held = data.split(samples, 0.1, seed=3)
    again, _ = data.split(samples, 0.1, seed=3)
    assert list(map(id, train)) == list(map(id, again))
    assert sorted(map(id, train + held)) == sorted(map(id, samples))
    assert [len(part) for part in data.split(samples[:2], 0.99, seed=0)] == [1, 1]
    assert [len(part) for part in data.split(samples, 0.001, seed=0)] == [19, 1]
    with pytest.raises(ValueError, match="at least 2 samples"):
        data.split(samples[:1], 0.5, seed=0)
    assert [len(part) for part in data.split(samples[:1] * 3, 0.01, seed=0)] == [2, 1]


def test_what_is_held_out_stays_so_beside_other_data():
    samples = random_samples(2000, 24)
    _, before = data.split(samples[:1000], 0.05, seed=0)
    train, after = data.split([*samples[:0:-1], *samples[:900], samples[0]], 0.05, 0)
    assert {id(sample) for sample in before} <= {id(sample) for sample in after}
    learnt = {sample.tokens.tobytes() for sample in train}
    assert not any(sample.tokens.tobytes() in learnt for sample in after)
    assert 30 <= len(before) <= 70
    _, other = data.split(samples[:1000], 0.05, seed=1)
    assert {id(sample) for sample in before} != {id(sample) for sample in other}


def test_pack_keeps_every_sample_whole():
    samples = random_samples(200, 24)
    order = np.random.default_rng(1).permutation(200)
    packed = data.pack(samples, order, 32)
    found = []
    for tokens, segments, positions, mask, _ in zip(*packed, strict=True):
        for number in range(1, segments.max() + 1):
            (slots,) = np.nonzero(segments == number)
            assert positions[slots].tolist() == list(range(len(slots)))
            assert slots.tolist() == list(range(slots[0], slots[-1] + 1))
            found.append((tokens[slots].tolist(), mask[slots].tolist()))
        assert not tokens[segments == 0].any() and not mask[segments == 0].any()
        assert (np.diff(np.where(segments == 0, 99, segments)) >= 0).all()
    wanted = [(s.tokens.tolist(), s.mask.tolist()) for s in samples]
    assert sorted(found) == sorted(wanted)
    assert (packed.segments == 0).mean() < 0.08
    for field in packed[:3]:
        assert field.dtype == np.int32 and field.shape[1] == 32


def test_pack_refuses_a_sample_longer_than_a_row():
    with pytest.raises(ValueError, match="sample 1 has 9 tokens"):
        data.pack([sample_of(range(8)), sample_of(range(9))], [0, 1], 8)


def test_batches_resume_with_the_rest_of_the_same_stream():
    samples = random_samples(30, 12)
    whole = list(itertools.islice(data.batches(samples, 5, 4, 16), 14))
    assert [index for index, _ in whole] == list(range(14))
    for start in (1, 4, 9, 13):
        tail = itertools.islice(
            data.batches(samples, 5, 4, 16, start=start), 14 - start
        )
        for (index, batch), (i, expected) in zip(tail, whole[start:], strict=True):
            assert index == i
            for got, field in zip(batch, expected, strict=True):
                np.testing.assert_array_equal(got, field)
    other = next(data.batches(samples, 6, 4, 16))[1]
    assert (other.tokens != whole[0][1].tokens).any()


def test_an_epoch_of_batches_holds_every_sample():
    samples = [sample_of([i, i, i, i]) for i in range(1, 11)]  # five rows of two
    stream = [b for _, b in itertools.islice(data.batches(samples, 0, 2, 8), 6)]
    epochs = [np.concatenate([b.tokens for b in stream[i : i + 3]]) for i in (0, 3)]
    for epoch in epochs:
        assert epoch.shape == (6, 8) and set(epoch.ravel()) == set(range(1, 11))
        np.testing.assert_array_equal(epoch[5], epoch[0])
    assert (epochs[0] != epochs[1]).any()


def test_few_samples_still_fill_a_batch():
    _, batch = next(data.batches([sample_of([7, 8])], 0, 3, 4))
    assert batch.tokens.tolist() == [[7, 8, 0, 0]] * 3
    with pytest.raises(ValueError, match="at least one sample"):
        next(data.batches([], 0, 3, 4))


# Draft vocabulary


def test_draft_vocabulary_holds_the_most_frequent_supervised_tokens():
    # Token 40 fills prompts only; 9 and 30 are equally frequent in answers.
    samples = [sample_of([40] * 9 + [30, 20, 20, 9, 20], 9)]
    assert data.draft_vocabulary(samples, 50, 1).tolist() == [20]
    ids = data.draft_vocabulary(samples, 50, 2)
    assert ids.tolist() == [9, 20] and ids.dtype == np.int32
    assert data.coverage(samples, ids) == pytest.approx(4 / 5)


def test_draft_vocabulary_larger_than_the_data_is_filled_up():
    samples = [sample_of(range(60, 80))]
    ids = data.draft_vocabulary(samples, 5000, 32)
    assert ids.tolist() == [*range(12), *range(60, 80)]
    assert data.coverage(samples, ids) == 1


def test_draft_vocabulary_refuses_what_does_not_fit():
    with pytest.raises(ValueError, match=r"must lie in 1\.\.10, got 11"):
        data.draft_vocabulary([sample_of([1])], 10, 11)
    with pytest.raises(ValueError, match="token id 12 does not exist"):
        data.draft_vocabulary([sample_of([12])], 10, 5)
    with pytest.raises(ValueError, match="token id 13 does not exist"):
        data.draft_vocabulary([sample_of([13, 3], 1)], 10, 5)
    with pytest.raises(ValueError, match="0 supervised tokens"):
        data.coverage([sample_of([1], 1)], np.zeros(1, np.int32))


# Questions and the embedded files


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "a.jsonl:2: malformed JSON"),
        ("[]", "a.jsonl:2: expected question_id"),
        ('{"turns": ["x"]}', "a.jsonl:2: expected question_id"),
        ('{"question_id": 1, "turns": []}', "a.jsonl:2: turns must be"),
        ('{"question_id": 1, "turns": "x"}', "a.jsonl:2: turns must be"),
        ('{"question_id": 1, "turns": [""]}', "a.jsonl:2: turns must be"),
    ],
)
def test_malformed_question_is_refused_with_file_and_line(tmp_path, line, message):
    good = '{"question_id": 1, "category": "qa", "turns": ["Why?"]}'
    (tmp_path / "a.jsonl").write_text(f"{good}\n{line}\n")
    with pytest.raises(ValueError, match=message):
        data.read_questions(tmp_path)


def test_questions_come_from_a_file_or_a_folder(tmp_path):
    with pytest.raises(ValueError, match=r"no \.jsonl file"):
        data.read_questions(tmp_path)
    rows = [{"question_id": "q", "category": "qa", "turns": ["Why?", "How?"]}]
    path = write(tmp_path / "a.jsonl", rows)
    expected = {"a": [data.Question("q", "qa", ["Why?", "How?"])]}
    assert data.read_questions(path) == data.read_questions(tmp_path) == expected
    (tmp_path / "b.jsonl").write_text("\n")
    with pytest.raises(ValueError, match="no questions in"):
        data.read_questions(tmp_path)


def test_embedded_conversations_are_all_usable(text):
    conversations, report = data.read_conversations(EMBEDDED / "train.jsonl.gz")
    assert report == data.Report(610, {}, {}, [])
    assert {len(c.messages) for c in conversations} == {3}
    assert 0 < sum(not c.finished for c in conversations) < 100
    sample = data.tokenize(text, conversations[0])
    answer = conversations[0].messages[2]["content"]
    assert marked(text, sample) == [f"{answer}<|im_end|>"]


def test_embedded_questions_are_six_files_of_eight():
    questions = data.read_questions(EMBEDDED / "questions")
    assert sorted(questions) == [
        "alpaca",
        "gsm8k",
        "humaneval",
        "mt_bench",
        "qa",
        "sum",
    ]
    assert {len(rows) for rows in questions.values()} == {8}
    every = [q for rows in questions.values() for q in rows]
    assert len({q.id for q in every}) == len({q.turns[0] for q in every}) == 48
    assert all(len(q.turns) == 2 for q in questions["mt_bench"])
    assert len({q.category for q in questions["mt_bench"]}) == 8
    assert all(q.turns[0].startswith("Summarize: ") for q in questions["sum"])
    assert all(150 <= len(q.turns[0].split()) <= 251 for q in questions["sum"])
    for question in questions["humaneval"]:
        prompt = question.turns[0]
        assert ">>> " in prompt
        compile(prompt.split("\n\n", 1)[1] + "    pass\n", "prompt", "exec")

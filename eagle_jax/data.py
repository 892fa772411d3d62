"""Conversations in, packed training rows and evaluation questions out. NumPy only.

A file of conversations becomes `Sample`s (token ids and a loss mask), samples become
rows:

    tokens     a a a a b b b 0
    segments   1 1 1 1 2 2 2 0     conversation in the row, 0 is padding
    positions  0 1 2 3 0 1 2 0
    mask       . . x x . x x .     tokens that the assistant emits

Every row of a file is kept, or skipped under a named reason that the `Report` counts.
"""

import collections
import gzip
import hashlib
import itertools
import os
import pathlib
import re
import zlib
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
from jaxtyping import Bool, Int, Int32

from eagle_jax import jsonfile
from eagle_jax import text as text_lib

Path = str | os.PathLike
Message = dict[str, str]
ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "system": "system",
}
# Faulty sequences of roles, by first letter; the first that matches names the reason.
FAULTS = (
    ("^$", "empty row"),
    ("^s$", "system turn only"),
    (".s", "system turn inside the conversation"),
    ("uu", "two user turns in a row"),
    ("aa", "two assistant turns in a row"),
    ("^s?a?u?$", "no answer to a user turn"),
)
TOOL_ROLES = ("tool", "function", "function_call", "function_response", "observation")
N_EXAMPLES = 5
PACK_WINDOW = 64  # open rows; on chat data more rows hardly lower the padding


class Conversation(NamedTuple):
    """An optional system turn, then user and assistant in turn, assistant last.

    `where` is "file:line". `finished` is false if the last answer was cut by a length
    limit, so that its end-of-turn token was never said.
    """

    messages: list[Message]
    where: str
    finished: bool = True


class Report(NamedTuple):
    """Counts of rows. `changed` rows are among the kept ones; one row may change twice.

    `examples` are the first few events, each "file:line: reason".
    """

    kept: int
    skipped: dict[str, int]
    changed: dict[str, int]
    examples: list[str]


class Event(NamedTuple):
    """A row was skipped, or kept but changed, for a reason."""

    where: str
    reason: str
    is_skip: bool


class Sample(NamedTuple):
    """Token ids of a conversation; `mask` marks the tokens the assistant emits.

    `start` is the place of the first token if all samples stood in one line.
    """

    tokens: Int32[np.ndarray, "T"]
    mask: Bool[np.ndarray, "T"]
    start: int = 0


class Packed(NamedTuple):
    """Rows of whole conversations; see the picture at the top of this file.

    `source` counts from the samples' `start`: which token of all this one is.
    """

    tokens: Int32[np.ndarray, "B T"]
    segments: Int32[np.ndarray, "B T"]
    positions: Int32[np.ndarray, "B T"]
    mask: Bool[np.ndarray, "B T"]
    source: Int32[np.ndarray, "B T"]


class Question(NamedTuple):
    """An evaluation prompt in FastChat's layout; `turns` are the user's."""

    id: int | str
    category: str
    turns: list[str]


class _SkipRow(Exception):
    """Carries the reason why a row cannot be used."""


def read_conversations(path: Path) -> tuple[list[Conversation], Report]:
    """Reads ShareGPT or `messages` rows from .json (a list) or .jsonl, also as .gz.

    Raises:
      ValueError: unreadable file, or no usable conversation in it.
    """
    conversations, events = _read(path)
    return conversations, _report(len(conversations), events)


def describe(report: Report) -> str:
    """Returns the counts of a report as a table, followed by its examples."""
    lines = [f"{report.kept:8d}  kept"]
    lines += [f"{n:8d}  kept, {reason}" for reason, n in report.changed.items()]
    lines += [f"{n:8d}  skipped: {reason}" for reason, n in report.skipped.items()]
    return "\n".join(lines + [f"    {example}" for example in report.examples])


def _report(kept: int, events: list[Event]) -> Report:
    skipped = collections.Counter(e.reason for e in events if e.is_skip)
    changed = collections.Counter(e.reason for e in events if not e.is_skip)
    examples = [f"{e.where}: {e.reason}" for e in events[:N_EXAMPLES]]
    return Report(kept, dict(skipped), dict(changed), examples)


def _read(path: Path) -> tuple[list[Conversation], list[Event]]:
    conversations, events = [], []
    for where, row in read_rows(path):
        try:
            messages, changes = _messages(row)
        except _SkipRow as skip:
            events.append(Event(where, str(skip), is_skip=True))
            continue
        finished = row.get("finished") is not False
        conversations.append(Conversation(messages, where, finished))
        events += [Event(where, change, is_skip=False) for change in changes]
    if not conversations:
        table = describe(_report(0, events))
        raise ValueError(f"{path} holds no usable conversation; its rows:\n{table}")
    return conversations, events


def read_rows(path: Path) -> Iterator[tuple[str, Any]]:
    """Yields ("file:line", row), in a .json list with the row's number as line.

    A malformed line is yielded as the ValueError that says what is wrong with it.
    """
    name = str(path).removesuffix(".gz")
    if not name.endswith((".json", ".jsonl")):
        raise ValueError(f"expected .json, .jsonl, .json.gz or .jsonl.gz, got {path}")
    try:
        content = _unpacked(path) if str(path).endswith(".gz") else _read_bytes(path)
        string = content.decode("utf-8-sig")
    except (gzip.BadGzipFile, zlib.error, EOFError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    if name.endswith(".jsonl"):
        # Not splitlines(): it also splits at U+2028, which JSON strings may hold.
        for number, line in enumerate(string.split("\n"), 1):
            if line.strip():
                yield f"{path}:{number}", _parsed(line)
        return
    rows = _parsed(string)
    if isinstance(rows, ValueError):
        raise ValueError(f"{path}: malformed JSON: {rows}") from rows
    if not isinstance(rows, list):
        raise ValueError(f"{path} must hold one JSON list; name JSON lines .jsonl")
    for number, row in enumerate(rows, 1):
        yield f"{path}:{number}", row


def _read_bytes(path: Path) -> bytes:
    return pathlib.Path(path).read_bytes()


def _unpacked(path: Path) -> bytes:
    """Reads a .gz file; texts shrink to a tenth, and a bomb to a thousandth."""
    limit = max(64 << 20, 100 * os.path.getsize(path))
    with gzip.open(path) as file:
        content = file.read(limit + 1)
    if len(content) > limit:
        raise ValueError(
            f"{path} unpacks to more than {limit} bytes, which no text does; unpack it "
            f"by hand if it is meant so"
        )
    return content


def _parsed(line: str) -> Any:
    try:
        return jsonfile.parse(line)
    except ValueError as error:
        return error


def _messages(row: Any) -> tuple[list[Message], list[str]]:
    """Returns the turns of a row and what was changed in them; raises `_SkipRow`."""
    if isinstance(row, ValueError):
        raise _SkipRow("malformed JSON")
    if row is None or row == [] or row == {}:
        raise _SkipRow("empty row")
    if not isinstance(row, dict):
        raise _SkipRow("row is not an object")
    if "conversations" not in row and "messages" not in row:
        raise _SkipRow("neither conversations nor messages")
    turns = row.get("conversations") or row.get("messages") or []
    if not isinstance(turns, list):
        raise _SkipRow("turns are not a list")
    messages, changes = [_message(turn) for turn in turns], []
    if messages and row.get("system"):
        top = _message({"role": "system", "content": row["system"]})
        if messages[0]["role"] != "system":
            messages = [top, *messages]
        elif messages[0] != top:
            changes.append("system field dropped for the system turn")
    roles = "".join(message["role"][0] for message in messages)
    for pattern, reason in FAULTS:
        if re.search(pattern, roles):
            raise _SkipRow(reason)
    if re.match("s?a", roles):
        del messages[roles.index("a")]
        changes.append("leading assistant turn dropped")
    if roles.endswith("u"):
        del messages[-1]
        changes.append("trailing user turn dropped")
    for message in messages:
        if message["role"] != "system" and not message["content"].strip():
            raise _SkipRow(f"empty {message['role']} turn")
    return messages, changes


def _message(turn: Any) -> Message:
    if not isinstance(turn, dict):
        raise _SkipRow("turn is not an object")
    role = turn.get("role", turn.get("from"))
    content = turn.get("content", turn.get("value"))
    if role in TOOL_ROLES or turn.get("tool_calls"):
        raise _SkipRow("tool calls are not supported")
    if not isinstance(role, str) or role not in ROLES:
        raise _SkipRow(f"unknown role {role!r:.40}")
    if not isinstance(content, str):
        raise _SkipRow("content is not text")
    if content.encode(errors="replace").decode() != content:
        raise _SkipRow("content is not valid Unicode")
    return {"role": ROLES[role], "content": content}


def tokenize(text: text_lib.Text, conversation: Conversation) -> Sample:
    """Renders a whole conversation once and marks what the assistant emits.

    That is each answer and its end-of-turn token, neither the header before nor the
    line break after it. The end token of an unfinished answer is not marked.

    Raises:
      ValueError: the template's answers cannot be found; see `answer_spans`.
    """
    string, spans, end = answer_spans(text, conversation.messages)
    ids, starts = _encode(text, string, [start for start, _ in spans])
    end_id = text.tokenizer.token_to_id(end)
    ends = np.flatnonzero(ids == end_id)
    if len(ends) != string.count(end):
        raise ValueError(
            f"the tokenizer does not keep every end-of-turn mark {end!r} as one token; "
            f"make it a special token"
        )
    mask = np.zeros(ids.shape, bool)
    stop = 0
    for start, (_, close) in zip(starts, spans, strict=True):
        # The answer may hold end tokens as text, so they are counted up to its close.
        stop = int(ends[string.count(end, 0, close) - 1]) + 1
        mask[start:stop] = True
    if not conversation.finished and stop:
        mask[stop - 1] = False
    return Sample(ids, mask)


def answer_spans(
    text: text_lib.Text, messages: list[Message]
) -> tuple[str, list[tuple[int, int]], str]:
    """Finds the answers in a rendered conversation, without generation markers.

    An answer starts where the prompt before it ends, and closes with the last
    end-of-turn token before the next user's words. These begin where other words would
    make the rendered text differ, so the answers may hold any text and the template may
    shorten earlier ones.

    Returns:
      The rendered text, every answer's [start, end) in characters, the end token.

    Raises:
      ValueError: a prompt is no prefix of the conversation, or there is no end token.
    """
    whole = text_lib.render(text, messages, add_generation_prompt=False)
    end = end_of_turn(text)
    spans = []
    for i, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        head = text_lib.render(text, messages[:i], add_generation_prompt=True)
        stop = len(whole)
        if i + 1 < len(messages):
            # A private-use character, because the next turn must not start with it.
            other = [*messages[: i + 1], {"role": "user", "content": "\ue000"}]
            probe = text_lib.render(text, other, add_generation_prompt=False)
            pairs = zip(whole, probe, strict=False)
            stop = next((k for k, (a, b) in enumerate(pairs) if a != b), len(whole))
        close = whole.rfind(end, len(head), stop)
        if not whole.startswith(head) or close < 0:
            raise ValueError(
                f"the chat template is not prefix-stable: the rendered conversation "
                f"does not begin with the prompt of each answer, or does not close the "
                f"answer with {end!r}; give another template"
            )
        spans.append((len(head), close + len(end)))
    return whole, spans, end


def end_of_turn(text: text_lib.Text) -> str:
    """Returns the special token with which the chat template closes an answer.

    Raises:
      ValueError: it closes answers with ordinary text or nothing.
    """
    messages = [
        {"role": "user", "content": "question"},
        {"role": "assistant", "content": "answer"},
    ]
    string = text_lib.render(text, messages, add_generation_prompt=False)
    _, answer, tail = string.rpartition("answer")
    added = text.tokenizer.get_added_tokens_decoder().values()
    found = [t.content for t in added if t.special and t.content in tail]
    if not answer or not found:
        raise ValueError(
            f"the chat template ends an answer with {tail!r}, which holds no special "
            f"token of the tokenizer; give a template that closes answers with one"
        )
    return min(found, key=lambda token: (tail.index(token), -len(token)))


def _encode(
    text: text_lib.Text, string: str, starts: list[int]
) -> tuple[Int32[np.ndarray, "T"], list[int]]:
    """Returns the ids of `string` and the token index of every start (characters).

    The whole is encoded at once, but where a token would reach over a start (a line
    break of the header with blanks of the answer) the text is encoded in two parts, as
    in decoding, where the prompt is alone. Prefixes are encoded instead of reading
    offsets, since some tokenizers leave blanks out of these.
    """
    ids, indices = text_lib.encode(text, string), []
    base, before = 0, []
    for start in starts:
        head = before + text_lib.encode(text, string[base:start])
        if ids[: len(head)] != head:
            base, before = start, head
            ids = head + text_lib.encode(text, string[start:])
        indices.append(len(head))
    return np.asarray(ids, np.int32), indices


def load_samples(
    text: text_lib.Text,
    paths: Sequence[Path],
    row_length: int,
    long_samples: Literal["cut", "drop"],
) -> tuple[list[Sample], Report]:
    """Reads and tokenises files; samples longer than `row_length` are cut or dropped.

    Rows that the template refuses are skipped, with its words as the reason.

    Raises:
      ValueError: a bad file or template, or no supervised token in all files together.
    """
    end_of_turn(text)  # a template that fits no row is told at once
    samples, events, start = [], [], 0
    for path in paths:
        conversations, read_events = _read(path)
        events += read_events
        for conversation in conversations:
            try:
                sample = tokenize(text, conversation)
            except ValueError as error:
                events.append(Event(conversation.where, str(error), is_skip=True))
                continue
            sample, reason = _fit(sample, row_length, long_samples)
            is_skip = not sample.mask.any()
            if not is_skip:
                samples.append(sample._replace(start=start))
                start += len(sample.tokens)
            events += [Event(conversation.where, reason, is_skip)] if reason else []
    report = _report(len(samples), events)
    if not samples:
        raise ValueError(
            f"0 supervised tokens in {len(paths)} files, nothing to train on; raise "
            f"row_length or give other data:\n{describe(report)}"
        )
    return samples, report


def _fit(sample: Sample, row_length: int, long_samples: str) -> tuple[Sample, str]:
    """Returns the sample cut to fit, or to nothing to drop it, and what was done."""
    limit = f"row_length={row_length}"
    if not sample.mask.any():
        return sample, "nothing supervised"
    if len(sample.tokens) <= row_length:
        return sample, ""
    keep = 0 if long_samples == "drop" else row_length
    cut = Sample(sample.tokens[:keep], sample.mask[:keep])
    if cut.mask.any():
        return cut, f"cut at {limit}"
    return cut, f"nothing supervised within {limit}" if keep else f"longer than {limit}"


def split(
    samples: Sequence[Sample], held_out: float, seed: int
) -> tuple[list[Sample], list[Sample]]:
    """Returns train and held-out samples, at least one of each.

    A number drawn from the seed and a sample's own tokens holds it out with probability
    `held_out`: beside other data, or in another order, it stays where it was. Training on
    (`--start_from`) with more conversations never learns what was held out before.

    Raises:
      ValueError: fewer than two samples.
    """
    if len(samples) < 2:
        raise ValueError(f"a split needs at least 2 samples, got {len(samples)}")
    draws = np.array([_draw(seed, sample) for sample in samples])
    held = draws < held_out
    order = np.argsort(draws, kind="stable")
    held[order[0]], held[order[-1]] = True, False
    train = [sample for sample, out in zip(samples, held, strict=True) if not out]
    return train, [sample for sample, out in zip(samples, held, strict=True) if out]


def _draw(seed: int, sample: Sample) -> float:
    """Returns a number in [0, 1) that is the same for equal tokens."""
    digest = hashlib.sha256(f"{seed} {sample.tokens.tolist()}".encode()).digest()
    return int.from_bytes(digest[:6], "big") / 2**48


def pack(
    samples: Sequence[Sample],
    order: Sequence[int] | Int[np.ndarray, "n"],
    row_length: int,
) -> Packed:
    """Packs whole samples into rows, in the given order of sample indices.

    Raises:
      ValueError: a sample is longer than a row.
    """
    return _fill(samples, _layout(samples, order, row_length), row_length)


def _layout(
    samples: Sequence[Sample],
    order: Sequence[int] | Int[np.ndarray, "n"],
    row_length: int,
) -> list[list[int]]:
    """Puts each sample into the fullest open row with room, else into a new one."""
    rows: list[list[int]] = []
    room: dict[int, int] = {}  # open row to free slots
    for i in order:
        n = len(samples[i].tokens)
        if n > row_length:
            raise ValueError(
                f"sample {i} has {n} tokens, more than row_length={row_length}; cut it"
            )
        fits = [row for row, free in room.items() if free >= n]
        row = min(fits, key=lambda r: room[r]) if fits else len(rows)
        if not fits:
            if len(room) == PACK_WINDOW:
                del room[min(room, key=lambda r: room[r])]
            rows.append([])
            room[row] = row_length
        rows[row].append(int(i))
        room[row] -= n
    return rows


def _fill(
    samples: Sequence[Sample], rows: Sequence[list[int]], row_length: int
) -> Packed:
    shape = (len(rows), row_length)
    tokens, segments, positions, source = (np.zeros(shape, np.int32) for _ in range(4))
    mask = np.zeros(shape, bool)
    for row, members in enumerate(rows):
        start = 0
        for number, i in enumerate(members, 1):
            stop = start + len(samples[i].tokens)
            tokens[row, start:stop] = samples[i].tokens
            mask[row, start:stop] = samples[i].mask
            segments[row, start:stop] = number
            positions[row, start:stop] = np.arange(stop - start)
            source[row, start:stop] = samples[i].start + np.arange(stop - start)
            start = stop
    return Packed(tokens, segments, positions, mask, source)


def rows_of(packed: Packed, start: int, rows: int) -> Packed:
    """Cuts `rows` rows out, filled up with empty ones: a compiled shape stays."""
    cut = [array[start : start + rows] for array in packed]
    missing = rows - len(cut[0])
    return Packed(*(np.pad(array, ((0, missing), (0, 0))) for array in cut))


def batches(
    samples: Sequence[Sample], seed: int, rows: int, row_length: int, start: int = 0
) -> Iterator[tuple[int, Packed]]:
    """Yields (index, batch of `rows` rows) without end, from batch `start` on.

    Batch k is the same whatever the start, so a run resumes with the data it would have
    seen. Samples are shuffled and packed anew in every epoch; the last batch of an
    epoch is filled up with its first rows, so that no sample is left out. Batches
    before the start cost the packing arithmetic of their epochs only.
    """
    if not samples:
        raise ValueError("batches need at least one sample, got none")
    index = 0
    for epoch in itertools.count():
        order = np.random.default_rng((seed, epoch)).permutation(len(samples))
        layout = _layout(samples, order.tolist(), row_length)
        n_batches = -(-len(layout) // rows)
        for k in range(max(start - index, 0), n_batches):
            members = [layout[(k * rows + r) % len(layout)] for r in range(rows)]
            yield index + k, _fill(samples, members, row_length)
        index += n_batches


def draft_vocabulary(
    samples: Sequence[Sample], vocab_size: int, draft_vocab_size: int
) -> Int32[np.ndarray, "U"]:
    """Returns the most frequent supervised token ids, ascending.

    Equal counts go to the lower id; if the data have too few distinct tokens, the
    lowest unseen ids fill up.

    Raises:
      ValueError: a larger vocabulary than the target's, or ids outside the target's.
    """
    if not 0 < draft_vocab_size <= vocab_size:
        raise ValueError(
            f"draft vocab_size must lie in 1..{vocab_size}, got {draft_vocab_size}"
        )
    # Of prompts too: a gather would quietly read another token's embedding.
    highest = max((sample.tokens.max(initial=0) for sample in samples), default=0)
    if highest >= vocab_size:
        raise ValueError(
            f"token id {highest} does not exist at vocab_size={vocab_size}; the "
            f"tokenizer is not the target's"
        )
    counts = np.bincount(_supervised(samples), minlength=vocab_size)
    ids = np.argsort(-counts, kind="stable")[:draft_vocab_size]
    return np.sort(ids).astype(np.int32)


def coverage(samples: Sequence[Sample], ids: Int[np.ndarray, "U"]) -> float:
    """Returns the share of supervised tokens that are among `ids`."""
    supervised = _supervised(samples)
    if not supervised.size:
        raise ValueError(f"coverage of 0 supervised tokens in {len(samples)} samples")
    return float(np.isin(supervised, ids).mean())


def _supervised(samples: Sequence[Sample]) -> Int32[np.ndarray, "R"]:
    parts = [sample.tokens[sample.mask] for sample in samples]
    return np.concatenate([np.zeros(0, np.int32), *parts])


def preview(text: text_lib.Text, sample: Sample) -> str:
    """Returns the sample's text with supervised parts in ⟦ ⟧, and their share."""
    parts = []
    for is_answer, run in itertools.groupby(
        zip(sample.tokens.tolist(), sample.mask.tolist(), strict=True), lambda t: t[1]
    ):
        ids = [token for token, _ in run]
        string = text_lib.decode(text, ids, skip_special=False)
        parts.append(f"⟦{string}⟧" if is_answer else string)
    n, total = int(sample.mask.sum()), len(sample.tokens)
    share = 100 * n / max(total, 1)
    return "".join(parts) + f"\n{n} of {total} tokens supervised ({share:.1f} %)"


def read_questions(path: Path) -> dict[str, list[Question]]:
    """Reads a FastChat .jsonl file or a folder of them, by file stem.

    Raises:
      ValueError: no questions there, or a malformed one (with file and line).
    """
    path = pathlib.Path(path)
    files = sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
    if not files:
        raise ValueError(f"no .jsonl file of questions in {path}")
    questions = {}
    for file in files:
        questions[file.stem] = [_question(row, where) for where, row in read_rows(file)]
        if not questions[file.stem]:
            raise ValueError(f"no questions in {file}")
    return questions


def _question(row: Any, where: str) -> Question:
    if isinstance(row, ValueError):
        raise ValueError(f"{where}: malformed JSON: {row}")
    if not isinstance(row, dict) or "question_id" not in row:
        raise ValueError(f"{where}: expected question_id and turns, got {row!r:.80}")
    turns = row.get("turns")
    is_text = isinstance(turns, list) and all(isinstance(t, str) and t for t in turns)
    if not turns or not is_text:
        raise ValueError(f"{where}: turns must be a list of texts, got {turns!r:.80}")
    name = row["question_id"]
    if type(name) not in (int, str):
        raise ValueError(f"{where}: question_id must be a number, got {name!r:.80}")
    return Question(name, str(row.get("category", "")), turns)

"""A target writes conversations: prompts, answers to them, and what is left out.

Rows of a fixed batch are decoded together; a row that ends gets the next prompt while the
others go on. What a prompt is answered depends on the prompt and its number alone.
"""

import collections
import dataclasses
import hashlib
import itertools
import json
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from eagle_jax import data, decode, metrics
from eagle_jax import text as text_lib
from eagle_jax.config import DecodeConfig, SamplingConfig, fingerprint
from eagle_jax.data import Message
from eagle_jax.decode import DecodeState
from eagle_jax.layers import Params
from eagle_jax.text import Text
from experiments import common
from experiments.common import Progress, Setup
from experiments.evaluator import Method

STEPS = 8  # steps between two looks at which rows have ended
HEADS = 8  # beginnings of prompts whose prefill is kept
LONG_LOOP = 96  # tokens after which a loop is taken to have no end
CHUNK = 32  # prompt tokens per prefill call; what users ask is short
PATIENCE = 256  # answers dropped in a row before the run gives up
# Of prompts: few wrong words without the sort of a nucleus. Answers have the target's law.
PROMPT_SAMPLING = SamplingConfig(temperature=1.0, min_p=0.02)
ASKED = (  # for a summary, before or behind the text
    "Summarize the following text.",
    "Give a short summary of this article.",
    "What are the main points of the text?",
    "Summarize this in a few sentences:",
    "Tell me briefly what this says.",
    "TL;DR",
)
LONG_TURN = 60  # words that make a turn a text
EVALUATION = common.ROOT / "experiments" / "data" / "questions"


@dataclasses.dataclass(frozen=True)
class Settings:
    """What to write.

    Args:
      answer_tokens: stop when the kept answers hold so many, end tokens included.
      temperatures: each gets an equal share of the answer tokens.
      max_prompt_tokens: longest rendered prompt; with `max_new_tokens` it sets the size
        of the cache, of which every step reads all.
      min_tokens: drop shorter answers.
      keep_cut: keep answers that were cut at `max_new_tokens`, marked as not finished.
    """

    answer_tokens: int
    temperatures: tuple[float, ...] = (0.0, 0.7, 1.0)
    max_new_tokens: int = 384
    max_prompt_tokens: int = 120
    min_tokens: int = 8
    keep_cut: bool = True
    batch: int = 32

    def __post_init__(self) -> None:
        names = ("answer_tokens", "max_new_tokens", "max_prompt_tokens", "batch")
        for name in names:
            if getattr(self, name) < 1:
                raise ValueError(
                    f"{name} must be at least 1, got {getattr(self, name)}"
                )
        if not self.temperatures:
            raise ValueError("temperatures must name at least one, got none")
        for temperature in self.temperatures:
            SamplingConfig(temperature)
        if self.min_tokens > self.max_new_tokens:
            raise ValueError(
                f"min_tokens={self.min_tokens} is more than "
                f"max_new_tokens={self.max_new_tokens}: no answer would be kept"
            )

    def slots(self, depth: int, max_len: int) -> int:
        """Returns the cache slots of a row.

        Raises:
          ValueError: more than `max_len`.
        """
        needed = self.max_prompt_tokens + self.max_new_tokens + depth
        slots = min(decode.bucket(needed), max_len)
        padded = self.max_prompt_tokens + CHUNK  # the last chunk is written whole
        if max(needed, padded) > slots:
            raise ValueError(
                f"no room: max_prompt_tokens={self.max_prompt_tokens}, "
                f"max_new_tokens={self.max_new_tokens} and tree depth={depth} need "
                f"{max(needed, padded)} cache slots, max_len={max_len}; lower one of "
                f"them or raise max_len"
            )
        return slots


class Prompt(NamedTuple):
    """A user's turn, perhaps after a system turn, and the ids of the rendered prompt.

    The first `n_shared` of them are the same for all users under this system turn.
    """

    messages: list[Message]
    ids: list[int]
    source: str
    n_shared: int


class Job(NamedTuple):
    """A prompt to continue. Its tokens depend on the ids, n_shared and the seed alone."""

    number: int
    ids: list[int]
    seed: int
    n_shared: int = 0


class _Row(NamedTuple):
    job: Job
    tokens: list[int]


def continue_all(
    method: Method, jobs: Iterable[Job], batch: int, slots: int, max_new_tokens: int
) -> Iterator[tuple[Job, list[int]]]:
    """Continues prompts, `batch` at a time, and yields each as soon as it has ended.

    The new tokens end with an end token or in a long loop, or are `max_new_tokens` many.
    `jobs` is asked for the next one only when a row is free.

    Raises:
      FloatingPointError: the target's logits were not finite.
    """
    params, cfg = method.params, method.cfg
    jobs = iter(jobs)
    state = decode.jit_empty(decode.row_keys(0, batch), cfg, slots)
    rows: list[_Row | None] = [None] * batch
    begun: tuple[list[int], DecodeState] | None = None
    heads: dict[tuple[int, ...], DecodeState] = {}
    while True:
        for b in range(batch):
            job = None if rows[b] else next(jobs, None)
            if job is None:
                continue
            if begun is None or begun[0] != job.ids:  # many draws may share a prompt
                head = tuple(job.ids[: job.n_shared])
                if head and head not in heads:
                    if len(heads) == HEADS:
                        heads.clear()
                    heads[head] = begin(params, list(head), cfg, slots)
                begun = job.ids, begin(params, job.ids, cfg, slots, heads.get(head))
            part = begun[1]._replace(keys=decode.row_keys(job.seed, 1))
            state = decode.jit_replace_row(state, part, b)
            rows[b] = _Row(job, [])
        if not any(rows):
            return
        left = [max_new_tokens - len(row.tokens) if row else 0 for row in rows]
        state, *new = decode.jit_advance(
            params, state, np.asarray(left, np.int32), cfg, STEPS
        )
        tokens, n_emitted, done, healthy = jax.device_get(
            (*new, state.done, state.healthy)
        )
        for b, row in enumerate(rows):
            if row is None:
                continue
            if not healthy[b]:
                raise FloatingPointError(
                    "the target's logits were not finite; check the weights and dtype"
                )
            for block, n in zip(tokens[b], n_emitted[b], strict=True):
                row.tokens.extend(block[:n].tolist())
            if done[b] or metrics.loops(row.tokens, LONG_LOOP):
                rows[b] = None
                yield row.job, row.tokens[:max_new_tokens]


def begin(
    params: Params,
    ids: list[int],
    cfg: DecodeConfig,
    slots: int,
    head: DecodeState | None = None,
) -> DecodeState:
    """Prefills one row with all ids but the last, which becomes the root.

    So no draw is made yet, and one prefill serves any number of keys.

    Args:
      head: what this returned for some first ids, if it was asked; it stays usable.
    """
    if head is None:
        state, start = decode.jit_empty(decode.row_keys(0, 1), cfg, slots), 0
    else:
        state = jax.tree.map(jnp.copy, head)
        start = int(head.target_cache.length[0])
    n = len(ids) - 1
    room = start + -(-(n - start) // CHUNK) * CHUNK
    fed = np.zeros((2, room), np.int32)  # tokens, and those after them
    fed[:, :n] = ids[:-1], ids[1:]
    for at in range(start, n, CHUNK):
        tokens, following = fed[:, None, at : at + CHUNK]
        count = np.asarray([min(n - at, CHUNK)], np.int32)
        state = decode.jit_prefill(params, state, tokens, following, count, cfg)
    return state._replace(root=np.asarray(ids[-1:], np.int32))  # type: ignore[arg-type]


def seed_of(seed: int, kind: str, number: int) -> int:
    """Returns the seed of one draw; it depends on nothing that happened before."""
    return int(fingerprint(seed, kind, number)[:7], 16)


# Prompts.


def user_prefix(text: Text, before: list[Message]) -> tuple[list[int], int]:
    """Returns the ids of the template before a user's text, and the id that closes it.

    Args:
      before: the system turn, if there is one.

    Raises:
      ValueError: the template shows no text of the user, begins with it, or closes it
        without a special token.
    """
    marker = "\ue000"  # private use: no template writes or trims it
    messages = [*before, _user(marker)]
    string = text_lib.render(text, messages, add_generation_prompt=False)
    head, _, tail = string.partition(marker)
    ids = text_lib.encode(text, head)
    closing = text_lib.encode(text, tail.lstrip())[:1]
    special = text.tokenizer.get_added_tokens_decoder()
    if string.count(marker) != 1 or not ids:
        raise ValueError(
            "the target cannot write prompts: its chat template does not hold the "
            "user's text once, behind a header to continue; give --prompts"
        )
    if not closing or closing[0] not in special or not special[closing[0]].special:
        raise ValueError(
            f"the target cannot write prompts: its chat template closes a user's turn "
            f"with {tail!r}, not with a special token; give --prompts"
        )
    return ids, closing[0]


def write_prompts(
    setup: Setup, settings: Settings, path: Path
) -> Iterator[tuple[str, str]]:
    """Yields (text, reason to reject it or "") of prompts the target makes up.

    The chat template is continued where the user's text starts, at temperature 1
    (Magpie, arXiv:2406.08464). First come those in the file at `path`, to which all new
    ones are appended.
    """
    prefix, closing = user_prefix(setup.text, [])
    t = setup.target_cfg
    t = dataclasses.replace(t, eos_ids=(*t.eos_ids, closing))
    cfg = DecodeConfig(t, sampling=PROMPT_SAMPLING)
    method = Method({"target": setup.target_params}, cfg)
    limit = settings.max_prompt_tokens - len(prefix)
    if limit < 8:
        raise ValueError(
            f"max_prompt_tokens={settings.max_prompt_tokens} leaves no room behind the "
            f"template's {len(prefix)} tokens before the user's text; raise it"
        )
    slots = decode.bucket(settings.max_prompt_tokens)
    rows = common.read_lines(path)
    yield from ((row["prompt"], row["reason"]) for row in rows)
    at, ready = (
        len(rows),
        {},
    )  # new ones are kept in order, so that none is numbered anew
    jobs = (
        Job(n, prefix, seed_of(setup.cfg.seed, "prompt", n))
        for n in itertools.count(at)
    )
    for job, tokens in continue_all(method, jobs, settings.batch, slots, limit):
        ready[job.number] = tokens
        while at in ready:
            prompt, reason = clean_prompt(setup.text, ready.pop(at), t.eos_ids)
            common.append_line(path, {"draw": at, "prompt": prompt, "reason": reason})
            yield prompt, reason
            at += 1


def clean_prompt(
    text: Text, tokens: list[int], eos_ids: tuple[int, ...]
) -> tuple[str, str]:
    """Returns the text of a drawn prompt, and why it is no good, or ""."""
    body = tokens[:-1] if tokens[-1] in eos_ids else tokens
    prompt = text_lib.decode(text, body).strip()
    if len(body) == len(tokens):
        return prompt, "prompt without an end"
    if not prompt:
        return prompt, "empty prompt"
    if fault := _fault(text, body, prompt):
        return prompt, f"prompt {fault}"
    if len(prompt) < 12 or len(prompt.split()) < 2:
        return prompt, "prompt too short"
    return prompt, ""


def _fault(text: Text, body: list[int], string: str) -> str:
    """Names what is wrong with drawn tokens, whoever's turn they are."""
    special = text.tokenizer.get_added_tokens_decoder()
    if any(token in special and special[token].special for token in body):
        return "with a special token inside"
    if "\N{REPLACEMENT CHARACTER}" in string:
        return "with broken characters"
    if metrics.loops(body) or repeats(body):
        return "that repeats itself"
    return ""


def repeats(tokens: list[int]) -> bool:
    """Tells whether most stretches of 8 tokens were said before in the same text.

    Finds loops of any length and with small changes, which `metrics.loops` does not.
    """
    stretches = [tuple(tokens[i : i + 8]) for i in range(len(tokens) - 7)]
    return len(stretches) >= 16 and 2 * len(set(stretches)) < len(stretches)


def read_prompts(path: Path) -> list[tuple[list[Message], str]]:
    """Reads messages up to the first user turn, and where each comes from.

    FastChat questions, conversations (see `data.read_conversations`), or plain text with
    one prompt a line; of a folder, all such files.

    Raises:
      ValueError: nothing to read, or a malformed file.
    """
    files = [path]
    if path.is_dir():
        files = sorted(f for f in path.iterdir() if f.is_file() and f.name[0] != ".")
    prompts = []
    for file in files:
        if ".json" not in file.name:
            prompts += _read_plain(file)
        elif _holds_questions(file):
            for asked in data.read_questions(file).values():
                prompts += [([_user(q.turns[0])], f"{file.name}:{q.id}") for q in asked]
        else:
            for conversation in data.read_conversations(file)[0]:
                roles = [message["role"] for message in conversation.messages]
                messages = conversation.messages[: roles.index("user") + 1]
                prompts.append((messages, Path(conversation.where).name))
    if not prompts:
        raise ValueError(f"no prompt in {path}")
    return prompts


def summaries(
    path: Path, seed: int, longest: int = 600
) -> list[tuple[list[Message], str]]:
    """Makes prompts that ask for a summary of long turns, whoever's, in conversations.

    Chats are short: a head trained on nothing else has never seen a long context. Texts
    are 100 to `longest` words, of one or several turns.

    Raises:
      ValueError: no turn is long enough, or a malformed file.
    """
    turns = [
        (message["content"].split(), Path(conversation.where).name)
        for conversation in data.read_conversations(path)[0]
        for message in conversation.messages
        if len(message["content"].split()) >= LONG_TURN
    ]
    if not turns:
        raise ValueError(f"no turn of {LONG_TURN} words or more in {path}")
    rng = np.random.default_rng(seed)
    prompts: list[tuple[list[Message], str]] = []
    left = [turns[i] for i in rng.permutation(len(turns))]
    while left:
        n_words, (text, where) = int(rng.integers(100, longest + 1)), left.pop()
        while left and len(text) < n_words:
            text = [*text, *left.pop()[0]]
        parts = [ASKED[len(prompts) % len(ASKED)], " ".join(text[:n_words])]
        if rng.integers(2):
            parts.reverse()
        prompts.append(([_user("\n\n".join(parts))], where))
    return prompts


def _user(content: str) -> Message:
    return {"role": "user", "content": content}


def _read_plain(file: Path) -> list[tuple[list[Message], str]]:
    try:
        lines = file.read_text("utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{file} is not text with one prompt a line: {error}"
        ) from error
    stripped = [(line.strip(), n) for n, line in enumerate(lines, 1)]
    return [([_user(line)], f"{file.name}:{n}") for line, n in stripped if line]


def _holds_questions(file: Path) -> bool:
    return any(
        isinstance(row, dict) and "turns" in row for _, row in data.read_rows(file)
    )


def hash_prompts(prompts: list[tuple[list[Message], str]]) -> str:
    return fingerprint([messages for messages, _ in prompts])


class Prompts:
    """The usable prompts in order, taken from their source as they are asked for."""

    def __init__(
        self,
        setup: Setup,
        settings: Settings,
        source: Iterator[tuple[list[Message], str, str]],
    ) -> None:
        self.text, self.settings, self.source = setup.text, settings, source
        self.vocab_size = setup.target_cfg.vocab_size
        self.known: list[Prompt] = []
        self.dropped: collections.Counter[str] = collections.Counter()
        self.heads: dict[str, list[int]] = {}
        self.seen = {
            _plain(question.turns[0]): "prompt of the evaluation"
            for asked in data.read_questions(EVALUATION).values()
            for question in asked
        }

    def at(self, number: int) -> Prompt | None:
        """Returns a prompt by its number, None behind the last one.

        Raises:
          ValueError: the source gives nothing usable any more.
        """
        in_a_row = 0
        while len(self.known) <= number:
            taken = next(self.source, None)
            if taken is None:
                return None
            messages, source, reason = taken
            ids: list[int] = []
            if not reason:
                ids, reason = self._check(messages)
            if reason:
                self.dropped[reason] += 1
                in_a_row += 1
                if in_a_row == 4 * PATIENCE:
                    raise ValueError(
                        f"none of the last {in_a_row} prompts was usable: "
                        f"{describe(self.dropped)}"
                    )
            else:
                n = self._shared(messages[:-1], ids)
                self.known.append(Prompt(messages, ids, source, n))
                in_a_row = 0
        return self.known[number]

    def _shared(self, before: list[Message], ids: list[int]) -> int:
        """Counts the ids in front of the user's text, which need one prefill for all."""
        name = json.dumps(before)
        if name not in self.heads:
            try:
                self.heads[name] = user_prefix(self.text, before)[0]
            except ValueError:  # an unusual template: every prompt is prefilled whole
                self.heads[name] = []
        head = self.heads[name]
        return len(head) if ids[: len(head)] == head and len(head) < len(ids) else 0

    def _check(self, messages: list[Message]) -> tuple[list[int], str]:
        name = " / ".join(_plain(message["content"]) for message in messages)
        if name in self.seen:
            return [], self.seen[name]
        self.seen[name] = "prompt seen before"
        rendered = text_lib.render(self.text, messages, add_generation_prompt=True)
        ids = text_lib.encode(self.text, rendered)
        if len(ids) > self.settings.max_prompt_tokens:
            return ids, "prompt longer than max_prompt_tokens"
        if max(ids) >= self.vocab_size:
            raise ValueError(
                f"token ids must lie in [0, {self.vocab_size}), got {max(ids)}; is the "
                f"tokenizer the target's own?"
            )
        return ids, ""


def _plain(string: str) -> str:
    return " ".join(string.casefold().split())


def describe(counts: collections.Counter[str]) -> str:
    return ", ".join(f"{n} {reason}" for reason, n in counts.most_common())


# Answers.


class Files(NamedTuple):
    """What stands in the folder of a run; together they are its state."""

    conversations: Path
    dropped: Path
    prompts: Path
    meta: Path


def files_of(out: Path) -> Files:
    return Files(
        out / "synthetic.jsonl",
        out / "dropped.jsonl",
        out / "prompts.jsonl",
        out / "meta.json",
    )


def meta_of(setup: Setup, settings: Settings, prompts: str) -> dict[str, Any]:
    """Returns what decides which conversations come out, but not how many or how fast."""
    sampling = dataclasses.asdict(setup.cfg.sampling)
    del sampling["temperature"]
    made = dataclasses.asdict(settings)
    del made["answer_tokens"], made["batch"]
    names = {"target": setup.target_cfg.name, "target_hash": setup.target_hash}
    names |= {"dtype": setup.cfg.precision, "seed": setup.cfg.seed, "prompts": prompts}
    return names | made | {"sampling": sampling}


def check_meta(files: Files, meta: dict[str, Any]) -> None:
    """Writes what the conversations are made with, or compares it with what they were.

    Raises:
      ValueError: the folder holds conversations made otherwise.
    """
    meta = json.loads(json.dumps(meta))  # tuples become lists, as in the file
    others = [f for f in files if f != files.meta and f.exists()]
    if not files.meta.exists() and not others:
        whole = files.meta.with_suffix(".new")
        whole.write_text(json.dumps(meta, indent=2) + "\n")
        whole.replace(files.meta)
        return
    try:
        old = json.loads(files.meta.read_text())
    except (OSError, ValueError) as fault:
        raise ValueError(
            f"{files.meta} cannot be read, so nobody knows how {others[0].name} beside "
            f"it was made; give another --out"
        ) from fault
    for name in sorted(meta.keys() | old.keys()):
        if meta.get(name) != old.get(name):
            raise ValueError(
                f"{files.conversations} was made with {name}={old.get(name)!r}, this run "
                f"has {meta.get(name)!r}; give another --out or the same settings"
            )


class Writer:
    """Answers prompts until there are enough tokens; goes on from what the files hold."""

    def __init__(
        self, setup: Setup, method: Method, settings: Settings, prompts: Prompts,
        files: Files,
    ) -> None:  # fmt: skip
        self.setup, self.method, self.settings = setup, method, settings
        self.prompts, self.files = prompts, files
        self.slots = settings.slots(method.cfg.tree.depth, setup.cfg.max_len)
        kept = common.read_lines(files.conversations)
        dropped = common.read_lines(files.dropped)
        self.numbers = {row["id"] for row in [*kept, *dropped]}
        self.n_kept = len(kept)
        self.dropped = collections.Counter(row["reason"] for row in dropped)
        self.answers = {_hash(row["messages"][-1]["content"]) for row in kept}
        self.n_tokens = [0] * len(settings.temperatures)
        for row in kept:
            self.n_tokens[row["id"] % len(self.n_tokens)] += row["n_tokens"]

    def run(self) -> None:
        progress = Progress("write", self.settings.answer_tokens)
        began, before = time.monotonic(), sum(self.n_tokens)
        if before:
            print(f"{self.n_kept} conversations with {before} answer tokens are there")
        for group in range(len(self.n_tokens)):
            for _ in self._answers(group):
                done = sum(self.n_tokens)
                rate = (done - before) / (time.monotonic() - began)
                note = f"answer tokens  {self.n_kept} conversations  "
                progress.show(
                    done,
                    f"{note}{self.dropped.total()} dropped  {rate:.0f} tokens/s",
                )

    def share(self, group: int) -> int:
        """Returns the answer tokens wanted at a temperature."""
        total, n = self.settings.answer_tokens, len(self.n_tokens)
        return total * (group + 1) // n - total * group // n

    def _answers(self, group: int) -> Iterator[None]:
        settings, cfg = self.settings, self.method.cfg
        temperature = settings.temperatures[group]
        sampling = dataclasses.replace(cfg.sampling, temperature=temperature)
        method = self.method._replace(cfg=dataclasses.replace(cfg, sampling=sampling))
        in_a_row = 0
        ended = continue_all(
            method, self._jobs(group), settings.batch, self.slots,
            settings.max_new_tokens,
        )  # fmt: skip
        for job, tokens in ended:
            row, reason = self._judge(job, tokens, temperature)
            if reason:
                in_a_row += 1
                self.dropped[reason] += 1
                common.append_line(
                    self.files.dropped, {"id": job.number, "reason": reason}
                )
                if in_a_row == PATIENCE:
                    raise ValueError(
                        f"the last {PATIENCE} answers at temperature {temperature} were "
                        f"all dropped: {describe(self.dropped)}"
                    )
            else:
                in_a_row = 0
                self.n_kept += 1
                self.n_tokens[group] += len(tokens)
                self.answers.add(_hash(row["messages"][-1]["content"]))
                common.append_line(self.files.conversations, row)
            yield

    def _jobs(self, group: int) -> Iterator[Job]:
        """Deals the prompts out to the temperatures; none is started past the share."""
        for number in itertools.count(group, len(self.n_tokens)):
            if self.n_tokens[group] >= self.share(group):
                return
            if number in self.numbers:
                continue
            prompt = self.prompts.at(number)
            if prompt is None:
                return
            seed = seed_of(self.setup.cfg.seed, "answer", number)
            yield Job(number, prompt.ids, seed, prompt.n_shared)

    def _judge(
        self, job: Job, tokens: list[int], temperature: float
    ) -> tuple[dict[str, Any], str]:
        """Returns the line of a conversation, and why it is dropped, or ""."""
        text, settings = self.setup.text, self.settings
        prompt = self.prompts.known[job.number]
        finished = tokens[-1] in self.method.cfg.target.eos_ids
        body = tokens[:-1] if finished else tokens
        content = text_lib.decode(text, body)
        if not finished:  # a character may be cut as well
            content = content.rstrip("\N{REPLACEMENT CHARACTER}")
        row = {
            "id": job.number,
            "messages": [*prompt.messages, {"role": "assistant", "content": content}],
            "temperature": temperature,
            "source": prompt.source,
            "finished": finished,
            "n_tokens": len(tokens),
        }
        reason = ""
        if not finished and not settings.keep_cut:
            reason = "answer cut at max_new_tokens"
        elif len(tokens) < settings.min_tokens or not content.strip():
            reason = "answer shorter than min_tokens"
        elif fault := _fault(text, body, content):
            reason = f"answer {fault}"
        elif _hash(content) in self.answers:
            reason = "answer given before"
        return row, reason


def _hash(content: str) -> str:
    return hashlib.sha256(content.encode()).hexdigest()

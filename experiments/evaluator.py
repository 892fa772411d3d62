"""Decodes evaluation prompts, speculatively and plainly in turn, and counts."""

import dataclasses
import functools
import math
import time
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from eagle_jax import decode, draft, heads, metrics, sharding, target
from eagle_jax import text as text_lib
from eagle_jax import tree as tree_lib
from eagle_jax.config import DecodeConfig, DraftConfig, TreeConfig
from eagle_jax.data import Question
from eagle_jax.layers import Params
from eagle_jax.metrics import Answer, Turn
from experiments import common
from experiments.common import ROOT, Progress, Setup

QUESTIONS = ROOT / "experiments" / "data" / "questions"


class Method(NamedTuple):
    """A way to decode: parameters with the draft tied in, and its config.

    `copies` of every prompt are decoded side by side and the first one counts: another
    shape of the same computation, the control for rounding.
    """

    params: Params
    cfg: DecodeConfig
    copies: int = 1


def plain_method(setup: Setup) -> Method:
    """Returns plain decoding: a tree of one node."""
    params = {"target": setup.target_params}
    return Method(params, DecodeConfig(setup.target_cfg, sampling=setup.cfg.sampling))


def load_method(
    setup: Setup, folder: Path | None, tree: TreeConfig | None = None
) -> Method:
    """Loads a head and ties it to the target; warns if it belongs to another one.

    Args:
      folder: of the head; None is prompt lookup.
      tree: what to draft; None takes the config's tree.
    """
    t, tree = setup.target_cfg, tree or setup.cfg.tree
    if folder is None:
        params = {"target": setup.target_params, "draft": {}}
        lookup = DraftConfig(head="lookup")
        return Method(params, DecodeConfig(t, lookup, tree, setup.cfg.sampling))
    head = heads.load_head(folder, target=t, dtype=setup.cfg.dtype)
    for note in head.notes:
        print(f"head     {note}")
    hashes = (head.meta.get("target_hash"), setup.target_hash)
    dtypes = (head.meta.get("target_dtype"), setup.cfg.precision)
    for what, (theirs, ours) in {"target": hashes, "precision": dtypes}.items():
        if theirs not in (None, ours):
            print(
                f"WARNING: this head was trained for {what} {theirs}, this run uses "
                f"{ours}. Output stays exact, but expect few accepted tokens."
            )
    if head.taps is not None and head.taps != t.taps and head.cfg.head == "eagle3":
        t = dataclasses.replace(t, taps=head.taps)
    tied = draft.tie(head.params, setup.target_params, head.cfg)
    cfg, mesh = head.cfg, sharding.mesh_of(setup.target_params)
    if mesh is not None:
        cfg, tied = sharding.pad_heads(tied, cfg, mesh.shape["model"])
    params = {"target": setup.target_params, "draft": sharding.place(tied, mesh)}
    return Method(params, DecodeConfig(t, cfg, tree, setup.cfg.sampling))


class TaskResult(NamedTuple):
    """Answers of one method, and of plain decoding, to the prompts of one set."""

    answers: list[Answer]
    baseline: list[Answer]
    n_identical: int
    n_near_tie: int
    mismatches: list[str]


_warm: set[tuple[Any, ...]] = set()
_MAPPINGS = Path("/proc/self/maps")
_MOST_MAPPINGS = Path("/proc/sys/vm/max_map_count")


def make_room() -> None:
    """Drops all compiled programs where they fill half of the process's memory mappings.

    XLA:CPU maps each in hundreds of pieces, and Linux grants a process 65,530: with all
    variants in three cache sizes it would abort ("Unable to allocate section memory").
    """
    if not (_MAPPINGS.exists() and _MOST_MAPPINGS.exists()):
        return  # not Linux
    with _MAPPINGS.open("rb") as file:
        n_mappings = sum(1 for _ in file)
    if n_mappings > int(_MOST_MAPPINGS.read_text()) / 2:
        jax.clear_caches()
        _warm.clear()


def answer(
    method: Method,
    prompts: list[list[int]],
    max_new_tokens: int,
    seed: int,
    max_len: int,
) -> list[Turn]:
    """Decodes one batch and times it; what a shape has to compile is compiled before."""
    shape = (
        method.cfg,
        len(prompts),
        decode.bucket(max(map(len, prompts)) + max_new_tokens + method.cfg.tree.depth),
        max_new_tokens,
    )
    if shape not in _warm:
        make_room()
        _decode(method, prompts, max_new_tokens, seed, max_len, warm_up=True)
        _warm.add(shape)
    return _decode(method, prompts, max_new_tokens, seed, max_len)


def _decode(
    method: Method,
    prompts: list[list[int]],
    max_new_tokens: int,
    seed: int,
    max_len: int,
    warm_up: bool = False,
) -> list[Turn]:
    """`warm_up` compiles and runs all of it, but for no step: every row has ended."""
    params, cfg, _ = method
    began = time.perf_counter()
    state = decode.start(params, prompts, cfg, max_new_tokens, seed, max_len)
    if warm_up:
        state = state._replace(done=state.done | True)
    jax.block_until_ready(state)
    prefilled = time.perf_counter()
    with jax.transfer_guard("disallow"):  # proves that the loop never asks the host
        _, out = decode.jit_loop(params, state, cfg, max_new_tokens)
        jax.block_until_ready(out)
    ended = time.perf_counter()
    out = sharding.to_host(out)
    rows = decode.unpack(out)
    return [
        Turn(
            tokens=row,
            n_accepted=[int(n) for n in accepted if n >= 0],
            n_emitted=[int(n) for n in emitted if n >= 0],
            seconds=(ended - prefilled) / len(rows),
            prefill_seconds=(prefilled - began) / len(rows),
            n_prompt=len(prompt),
        )
        for prompt, row, accepted, emitted in zip(
            prompts, rows, out.n_accepted, out.n_emitted, strict=True
        )
    ]


def run_task(
    setup: Setup,
    methods: list[Method],
    plain: Method,
    task: str,
    questions: list[Question],
    max_new_tokens: int,
    batch: int,
    progress: Progress,
    done: int,
    answered: Path,
) -> list[TaskResult]:
    """Answers every turn of every question with plain decoding and each method in turn.

    All answer one batch before the next one begins, so a change in the machine's speed
    hits all of them alike. A later turn's context holds the method's own earlier answers.

    Args:
      answered: a file that keeps every batch's answers, for a run that is stopped.

    Raises:
      ValueError: a prompt does not fit into `max_len`.
    """
    groups = [questions[i : i + batch] for i in range(0, len(questions), batch)]
    everyone = [plain, *(method for method in methods if method is not plain)]
    kept = common.read_lines(answered)

    def ask(method: Method, group: list[Question]) -> list[Answer]:
        answers: list[Answer] = [[] for _ in group]
        for turn in range(max(len(question.turns) for question in group)):
            asking = [i for i, q in enumerate(group) if turn < len(q.turns)]
            prompts = [_prompt(setup, group[i], answers[i]) for i in asking]
            try:
                new = answer(
                    method,
                    prompts * method.copies,
                    max_new_tokens,
                    setup.cfg.seed,
                    setup.cfg.max_len,
                )[: len(prompts)]
            except ValueError as fault:
                ids = ", ".join(str(group[i].id) for i in asking)
                raise ValueError(
                    f"{task}, question {ids}, turn {turn + 1}: {fault}"
                ) from fault
            for i, one in zip(asking, new, strict=True):
                answers[i].append(one)
        return answers

    all_answers: list[list[Answer]] = [[] for _ in everyone]
    for number, group in enumerate(groups):
        if number < len(kept):
            new = [
                [[Turn(**turn) for turn in one] for one in answers]
                for answers in kept[number]["answers"]
            ]
        else:
            new = []
            for i, method in enumerate(everyone, 1):
                new.append(ask(method, group))
                progress.start(f"{task}: {i} of {len(everyone)} methods compiled")
            said = [[[turn._asdict() for turn in one] for one in a] for a in new]
            common.append_line(answered, {"answers": said})
        for answers, more in zip(all_answers, new, strict=True):
            answers += more
        done += len(group)
        if number >= len(kept):
            progress.show(done, task)
    baseline = all_answers[0]
    others = iter(all_answers[1:])
    return [
        TaskResult(baseline, baseline, len(questions), 0, [])
        if method is plain
        else _compare(setup, method, task, questions, next(others), baseline)
        for method in methods
    ]


def _compare(
    setup: Setup,
    method: Method,
    task: str,
    questions: list[Question],
    ours: list[Answer],
    baseline: list[Answer],
) -> TaskResult:
    """Counts identical answers; only at temperature 0 does that mean anything."""
    n_identical, n_near = 0, 0
    mismatches: list[str] = []
    if method.cfg.sampling.temperature > 0:
        return TaskResult(ours, baseline, 0, 0, [])
    for question, mine, theirs in zip(questions, ours, baseline, strict=True):
        pairs = enumerate(zip(mine, theirs, strict=True))
        differ = next(((t, a, b) for t, (a, b) in pairs if a.tokens != b.tokens), None)
        if differ is None:
            n_identical += 1
            continue
        turn, a, b = differ
        prompt = _prompt(setup, question, theirs[:turn])
        tie = near_tie(method, prompt, a.tokens, b.tokens)
        n_near += tie.is_near
        mismatches.append(f"{task} {question.id} turn {turn}: {tie}")
    return TaskResult(ours, baseline, n_identical, n_near, mismatches)


def first_prompt(setup: Setup, question: Question) -> list[int]:
    """Returns the token ids of a question's first turn."""
    return _prompt(setup, question, [])


def check_prompts(
    setup: Setup, sets: dict[str, list[Question]], max_new_tokens: int
) -> None:
    """Finds prompts without room in the cache before anything slow happens.

    Only first turns: later ones hold answers that are not known yet.

    Raises:
      ValueError: with the set and the question.
    """
    spare = setup.cfg.max_len - max_new_tokens - setup.cfg.tree.depth
    for task, questions in sets.items():
        for question in questions:
            n = len(_prompt(setup, question, []))
            if n > spare:
                raise ValueError(
                    f"{task}, question {question.id}: no room for a prompt of {n} "
                    f"tokens, max_new_tokens={max_new_tokens} and tree.depth="
                    f"{setup.cfg.tree.depth} in max_len={setup.cfg.max_len} cache "
                    f"slots; raise max_len or shorten the prompt"
                )


def _prompt(setup: Setup, question: Question, so_far: Answer) -> list[int]:
    messages = []
    for i, said in enumerate(question.turns[: len(so_far) + 1]):
        messages.append({"role": "user", "content": said})
        if i < len(so_far):
            reply = text_lib.decode(setup.text, so_far[i].tokens)
            messages.append({"role": "assistant", "content": reply})
    rendered = text_lib.render(setup.text, messages, add_generation_prompt=True)
    return text_lib.encode(setup.text, rendered)


class Tie(NamedTuple):
    """How close the target's two best tokens were where two greedy answers part.

    Args:
      gap: target's top-2 logit gap there.
      noise: largest logit difference between the method's forward (all nodes of a tree, all
        copies of a prompt) and one of one token.
    """

    at: int
    gap: float
    noise: float

    @property
    def is_near(self) -> bool:
        return self.gap < self.noise


def near_tie(
    method: Method, prompt: list[int], ours: list[int], theirs: list[int]
) -> Tie:
    """Measures whether a mismatch can be rounding: gap against noise of shapes."""
    at = next(
        (i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b),
        min(len(ours), len(theirs)),
    )
    context = prompt + theirs[:at]
    params, cfg, copies = method
    n_nodes = tree_lib.rows_for(cfg.tree.n_nodes, copies)
    root = jnp.asarray(context[-1:], jnp.int32)
    filler = jnp.asarray(context[-n_nodes:], jnp.int32)[None]
    many = jnp.concatenate([root[None], filler], axis=1)[:, :n_nodes]
    state = decode.start(params, [context[:-1]], cfg, 2)
    one = _node_logits(params["target"], state, root[None], cfg)
    state = decode.start(params, [context[:-1]] * copies, cfg, 2)
    tree = _node_logits(params["target"], state, jnp.tile(many, (copies, 1)), cfg)
    one, tree = sharding.to_host((one, tree))
    best = np.sort(one)
    return Tie(
        at=at,
        gap=float(best[-1] - best[-2]),
        noise=float(np.max(np.abs(one - tree))),
    )


@functools.partial(jax.jit, static_argnames="cfg")
def _node_logits(
    params: Params, state: decode.DecodeState, tokens: jax.Array, cfg: DecodeConfig
) -> jax.Array:
    """Logits of the first of several nodes that do not see each other, in row 0."""
    rows, n = tokens.shape
    positions = jnp.broadcast_to(state.target_cache.length[:, None], (rows, n))
    mask = jnp.broadcast_to(jnp.eye(n, dtype=bool), (rows, n, n))
    out = target.forward(
        params, tokens, positions, mask, state.target_cache, cfg.target
    )
    logits = target.logits(params, out.top[:, :, :1])
    return logits[: cfg.target.n_tokens or None, 0, 0]


def summary(result: TaskResult, cfg: DecodeConfig) -> dict[str, Any]:
    """Turns answers into the numbers of a result line; null where there is none."""
    tree, greedy = cfg.tree, cfg.sampling.temperature == 0
    ours, plain = result.answers, result.baseline
    fast = metrics.tokens_per_second(ours, with_prefill=False)
    slow = metrics.tokens_per_second(plain, with_prefill=False)
    fast_all = metrics.tokens_per_second(ours, with_prefill=True)
    slow_all = metrics.tokens_per_second(plain, with_prefill=True)
    return _without_nan(
        {
            "n_prompts": len(ours),
            "n_identical": result.n_identical if greedy else None,
            "n_near_tie": result.n_near_tie if greedy else None,
            "n_looping": len(ours) - len(metrics.without_loops(ours)),
            "tau_pooled": metrics.tau_pooled(ours),
            "tau_by_prompt": metrics.tau_by_prompt(ours),
            "tau_without_loops": metrics.tau_pooled(metrics.without_loops(ours)),
            "acceptance_by_depth": metrics.acceptance_by_depth(ours, tree.depth),
            "alpha": metrics.alpha(ours, tree.depth) if tree.is_chain else None,
            "by_prompt": metrics.by_prompt(ours),
            "baseline_by_prompt": metrics.by_prompt(plain),
            "tokens_per_second": fast,
            "baseline_tokens_per_second": slow,
            "speedup": fast / slow,
            "speedup_with_prefill": fast_all / slow_all,
            "tokens_per_target_gflop": metrics.tokens_per_target_gflop(
                metrics.tau_pooled(ours),
                cfg.target,
                tree.n_nodes,
                metrics.context(ours),
            ),
        }
    )


def _without_nan(x: Any) -> Any:
    """JSON has no NaN."""
    if isinstance(x, dict):
        return {name: _without_nan(value) for name, value in x.items()}
    if isinstance(x, list):
        return [_without_nan(value) for value in x]
    return None if isinstance(x, float) and math.isnan(x) else x

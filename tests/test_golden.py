"""The official implementation's numbers, case by case (tests/golden/README.md).

Every folder under tests/golden and under $EAGLE_JAX_GOLDEN is a case; what kind, which
sizes, settings and prompts is read from its files. Each test prints the largest difference
of each quantity (`pytest -rP`).
"""

import functools
import json
import os
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from eagle_jax import cache as cache_lib
from eagle_jax import decode, draft, heads, target, train, verify, weights
from eagle_jax import tree as tree_lib
from eagle_jax.config import (
    PLAIN,
    DecodeConfig,
    DraftConfig,
    SamplingConfig,
    TargetConfig,
    TrainConfig,
    TreeConfig,
)
from eagle_jax.layers import Segment
from eagle_jax.train import Batch, Features

ROOTS = [Path(__file__).parent / "golden"]
ROOTS += [Path(path) for path in [os.environ.get("EAGLE_JAX_GOLDEN")] if path]

# Two float32 programs that add in another order were seen to differ by 1e-5 (README,
# "Expected tolerances", which proposes these limits).
ABSOLUTE = 1e-4  # logits, scores, features
LOSS = 1e-5  # relative
GRADIENT = {"rtol": 1e-4, "atol": 1e-6}
SAMPLE_P = 1e-5


def cases(kind: str, algorithm: str = "") -> pytest.MarkDecorator:
    """Parametrises a test over the folders that hold this file."""
    found = [file for root in ROOTS for file in sorted(root.glob(f"*/{kind}"))]
    found = [f for f in found if algorithm in json.loads(f.read_text())["algorithm"]]
    names = [f"{file.parent.parent.name}/{file.parent.name}" for file in found]
    assert found, f"no {kind} of {algorithm or 'any algorithm'} under {ROOTS}"
    return pytest.mark.parametrize("file", found, ids=names)


class Differences:
    """Compares arrays and keeps the largest difference of each quantity."""

    def __init__(self) -> None:
        self.largest: dict[str, tuple[float, str]] = {}

    def close(self, name: str, got: Any, want: Any, rtol: float = 0, atol: float = 0):
        got, want = np.asarray(got), np.asarray(want)
        assert got.shape == want.shape, f"{name}: {got.shape} against {want.shape}"
        gap = np.abs(got - want).max(initial=0.0)
        kind = "absolute"
        if atol == 0:
            gap, kind = gap / np.abs(want).max(), "relative"
        self.largest[name] = max(self.largest.get(name, (0.0, kind)), (float(gap), kind))
        np.testing.assert_allclose(got, want, rtol=rtol, atol=atol, err_msg=name)

    def report(self, file: Path) -> None:
        for name, (gap, kind) in self.largest.items():
            print(f"{file.parent.name:24} {name:32} {gap:8.1e} {kind}")


def equal(name: str, got: Any, want: Any) -> None:
    np.testing.assert_array_equal(np.asarray(got), np.asarray(want), err_msg=name)


# ---- decoding ------------------------------------------------------------------------


class Case(NamedTuple):
    """One decoding case: its files, and everything built from them."""

    settings: dict[str, Any]
    runs: list[dict[str, Any]]
    tensors: dict[str, np.ndarray]
    cfg: DecodeConfig
    params: dict[str, Any]

    def prompts(self) -> list[list[int]]:
        return [run["prompt_ids"] for run in self.runs]


class Model(NamedTuple):
    """The target and the head of a folder."""

    target_cfg: TargetConfig
    draft_cfg: DraftConfig
    params: dict[str, Any]


def load_model(folder: Path, shapes: dict[str, Any]) -> Model:
    target_cfg, _ = weights.load_target(folder / "target")
    head = heads.load_head(folder / "head", target_cfg)
    target_cfg, params = weights.load_target(folder / "target", taps=head.taps or ())
    if shapes.get("feature_layers"):
        equal("taps", target_cfg.taps, shapes["feature_layers"])
    tied = draft.tie(head.params, params, head.cfg)
    return Model(target_cfg, head.cfg, {"target": params, "draft": tied})


@functools.cache
def load_case(file: Path) -> Case:
    meta = json.loads(file.read_text())
    settings = meta["settings"]
    if "tree_choices" in meta:
        tree = tree_lib.static(tuple(tuple(path) for path in meta["tree_choices"]))
        equal("parents", tree_lib.static_parents(tree.paths)[1:], meta["parents"][1:])
        equal("depths", [0] + [len(p) for p in tree.paths], meta["tree_position_ids"])
    else:
        # Official: levels after the first. Ours: most drafted tokens on a path.
        tree = TreeConfig(
            width=settings["top_k"],
            depth=settings["depth"] + 1,
            n_nodes=settings["total_tokens"],
        )
    assert tree.n_nodes == settings["total_tokens"]
    model = load_model(file.parent, meta["shapes"])
    assert model.draft_cfg.vocab_size == meta["shapes"]["draft_vocab_size"]
    assert model.draft_cfg.head == ("eagle3" if meta["algorithm"] == "eagle3" else "eagle1")
    runs = meta["runs"]
    for run in runs:
        for step in run["steps"]:  # what stands once at the top holds for every step
            for key in ("parents", "tree_position_ids", "tree_mask"):
                if key in meta and "draft_tokens" in step:
                    step[key] = meta[key]
    return Case(
        settings=settings,
        runs=runs,
        tensors=safetensors.numpy.load_file(file.parent / "tensors.safetensors"),
        cfg=DecodeConfig(target=model.target_cfg, draft=model.draft_cfg, tree=tree),
        params=model.params,
    )


def pad(rows: list[Any]) -> np.ndarray:
    """Stacks rows of different length (their first axis), padded with zeros."""
    arrays = [np.asarray(row) for row in rows]
    longest = max(len(a) for a in arrays)
    widths = [[(0, longest - len(a))] + [(0, 0)] * (a.ndim - 1) for a in arrays]
    return np.stack([np.pad(a, w) for a, w in zip(arrays, widths, strict=True)])


def plain_batch(tokens: np.ndarray, real: np.ndarray, mask: np.ndarray) -> Batch:
    """One conversation in each row."""
    positions = np.broadcast_to(np.arange(tokens.shape[1], dtype=np.int32), tokens.shape)
    return Batch(
        tokens=jnp.asarray(tokens, jnp.int32),
        segments=jnp.asarray(real, jnp.int32),
        positions=jnp.asarray(positions),
        mask=jnp.asarray(mask, bool),
    )


@functools.partial(jax.jit, static_argnames="cfg")
def prompt_pass(params: Any, batch: Batch, cfg: DecodeConfig):
    given = train.target_features(params["target"], batch, cfg.target, cfg.draft)
    (out,) = train.unroll(params["draft"], batch, given.read, cfg.draft, 1)
    scores = target.logits(params["target"], given.top)
    return scores, given, out, draft.logits(params["draft"], out, cfg.draft)


@cases("case.json")
def test_prompt_gives_the_official_target_and_head_outputs(file: Path) -> None:
    case, seen = load_case(file), Differences()
    tokens = pad([[*run["prompt_ids"], run["first_token"]] for run in case.runs])
    batch = plain_batch(tokens, np.ones_like(tokens), np.zeros_like(tokens))
    scores, given, out, head_logits = prompt_pass(case.params, batch, case.cfg)
    for r, run in enumerate(case.runs):
        n = len(run["prompt_ids"])
        got = {
            "target_logits": scores,
            "target_features": given.read,
            "head_input_features": given.read,
            "head_hidden": out,
            "head_logits": head_logits,
        }
        for name, array in got.items():
            want = case.tensors[f"run{r}.prompt.{name}"]
            seen.close(f"prompt {name}", array[:, r, :n].T, want, atol=ABSOLUTE)
        equal("first_token", np.argmax(scores[:, r, n - 1]), run["first_token"])
    seen.report(file)


class Level(NamedTuple):
    """Beam entries of all levels of a recorded draft: what entered, and who stands above."""

    tokens: np.ndarray
    hidden: np.ndarray
    positions: np.ndarray
    parents: np.ndarray


def beams(case: Case, name: str) -> Level:
    """Reads the beams of levels 1, 2, ...; the parent of a level-1 entry is itself."""
    get, tree, parents, start = case.tensors.__getitem__, case.cfg.tree, [], 0
    inner: list[list[tuple[int, ...]]] = []
    for depth in range(1, tree.depth):
        width = len(get(f"{name}.level{depth}.input_ids"))
        if tree.kind == "static":
            inner.append(sorted({p[:-1] for p in tree.paths if len(p) == depth + 1}))
            above = [inner[-2].index(p[:-1]) for p in inner[-1]] if depth > 1 else []
        elif depth > 1:
            above = get(f"{name}.level{depth - 1}.beam_index") // tree.width
        if depth == 1:
            parents.extend(range(width))
        else:
            parents.extend(start + np.asarray(above))
            start += len(get(f"{name}.level{depth - 1}.input_ids"))
    joined = {
        key: np.concatenate([get(f"{name}.level{i}.{key}") for i in range(1, tree.depth)])
        for key in ("input_ids", "input_hidden", "position")
    }
    return Level(
        tokens=joined["input_ids"].astype(np.int32),
        hidden=joined["input_hidden"],
        positions=joined["position"].astype(np.int32),
        parents=np.array(parents, np.int32),
    )


@functools.partial(jax.jit, static_argnames="cfg")
def draft_pass(
    params: Any,
    tokens: jax.Array,
    features: jax.Array,
    count: jax.Array,
    root: jax.Array,
    level: Level,
    cfg: DecodeConfig,
):
    """Extends, drafts, and runs the recorded beams once more, all of them in one pass."""
    params, head = params["draft"], cfg.draft
    B, X = level.tokens.shape
    state = draft.empty(head, B, tokens.shape[1])
    state = draft.extend(params, state, tokens, features, count, head)
    drafted = draft.propose(params, state, root, head, cfg.tree)
    candidates = None
    if cfg.tree.kind == "dynamic":
        candidates = draft.grow(params, state, head, cfg.tree)
    hidden = jnp.transpose(level.hidden, (2, 0, 1))
    block = draft.begin(params, level.tokens, hidden, level.positions, head)
    cache = state.cache
    segments = (
        Segment(cache.k[0], cache.v[0], cache_lib.committed(cache, X)),
        Segment(*block.kv, tree_lib.ancestors(level.parents, cfg.tree.depth)),
    )
    out = draft.finish(params, block, segments, head)
    out = jnp.concatenate([state.hidden[:, :, None], out], axis=2)
    return drafted, candidates, out, draft.logits(params, out, head)


@cases("case.json")
def test_drafts_are_the_official_ones_level_by_level(file: Path) -> None:
    case, seen, tree = load_case(file), Differences(), load_case(file).cfg.tree
    names = [
        (r, s)
        for r, run in enumerate(case.runs)
        for s in range(len(run["steps"]))
        if f"run{r}.draft{s}.level0.hidden" in case.tensors
    ]
    assert len(names) > len(case.runs)

    def pairs(key: str) -> list[np.ndarray]:
        return [
            np.concatenate([case.tensors[f"run{r}.draft{i}.{key}"] for i in range(s + 1)])
            for r, s in names
        ]

    tokens, features = pairs("head_input_ids"), pairs("head_input_features")
    levels = [beams(case, f"run{r}.draft{s}") for r, s in names]
    roots = [case.runs[r]["steps"][s]["draft_tokens"][0] for r, s in names]
    drafted, candidates, out, scores = jax.device_get(
        draft_pass(
            case.params,
            pad(tokens).astype(np.int32),
            jnp.asarray(pad(features).transpose(2, 0, 1)),
            np.array([len(t) for t in tokens], np.int32),
            np.array(roots, np.int32),
            Level(*(np.stack(part) for part in zip(*levels, strict=True))),
            case.cfg,
        )
    )
    log_q = np.asarray(jax.nn.log_softmax(scores, axis=0))
    for b, (r, s) in enumerate(names):
        name, start, above = f"run{r}.draft{s}", 0, np.zeros((1, 1))
        recorded = case.runs[r]["steps"][s]
        check_tree(recorded, jax.tree.map(lambda a, b=b: a[b], drafted), tree, seen)
        for i in range(tree.depth):
            at = f"{name}.level{i}"
            hidden = case.tensors[f"{at}.hidden"]
            entries = slice(start, start + len(hidden))
            start += len(hidden)
            got = out[:, b, entries].T
            seen.close("draft level hidden", got, hidden, atol=ABSOLUTE)
            kind, law = ("logprobs", log_q) if tree.kind == "dynamic" else ("logits", scores)
            want = case.tensors[f"{at}.{kind}"]
            got = law[:, b, entries].T
            seen.close(f"draft level {kind}", got, want, atol=ABSOLUTE)
            if tree.kind == "dynamic":
                W = tree.width
                first = 0 if i == 0 else W + (i - 1) * W * W
                index = case.tensors[f"{at}.top_index"]
                block = slice(first, first + index.size)
                ids = draft.to_target(case.params["draft"], jnp.asarray(index, jnp.int32))
                equal("top_index", candidates.tokens[b, block].reshape(index.shape), ids)
                got = candidates.log_q[b, block].reshape(index.shape)
                want = case.tensors[f"{at}.top_logprobs"]
                seen.close("draft top_logprobs", got, want, atol=ABSOLUTE)
                if i == 0:
                    continue
                got = candidates.log_value[b, block].reshape(W, W)
                want = case.tensors[f"{at}.cum_scores"]
                seen.close("draft cum_scores", got, want, atol=ABSOLUTE)
                if i + 1 < tree.depth:
                    later = slice(block.stop, block.stop + W * W, W)
                    expanded = candidates.parents[b, later] - first
                    equal("beam_index", expanded, case.tensors[f"{at}.beam_index"])
        if tree.kind == "dynamic":
            want = case.tensors[f"{name}.all_scores"]
            seen.close("draft all_scores", candidates.log_value[b], want, atol=ABSOLUTE)
            kept = case.tensors[f"{name}.selected_index"]
            equal("selected_index", drafted.tokens[b, 1:], candidates.tokens[b, kept])
            equal("selected_index", drafted.log_q[b, 1:], candidates.log_q[b, kept])
        else:
            wanted = case.tensors[f"{name}.topk_tokens"]
            order = np.argsort(-scores[:, b].T, axis=1, kind="stable")
            ids = order[:, : wanted.shape[1]]
            equal("topk_tokens", ids, wanted)
            got = np.take_along_axis(scores[:, b].T, ids, axis=1)
            want = case.tensors[f"{name}.topk_logits"]
            seen.close("draft topk_logits", got, want, atol=ABSOLUTE)
    seen.report(file)


def check_tree(
    step: dict[str, Any], drafted: tree_lib.Tree, tree: TreeConfig, seen: Differences
) -> None:
    """Compares one row's tree with a recorded one."""
    parents = np.maximum(step["parents"], 0)  # official: the root's is -1
    equal("draft_tokens", drafted.tokens, step["draft_tokens"])
    equal("parents", drafted.parents, parents)
    equal("tree_position_ids", drafted.depths, step["tree_position_ids"])
    above = jit_ancestors(drafted.parents[None], tree.depth)[0]
    equal("tree_mask", above, np.array(step["tree_mask"], bool))
    if "node_scores" in step:
        scores = np.asarray(above, np.float64) @ drafted.log_q
        seen.close("node_scores", scores[1:], step["node_scores"], atol=ABSOLUTE)


jit_ancestors = jax.jit(tree_lib.ancestors, static_argnums=1)


@functools.partial(jax.jit, static_argnames="cfg")
def observed_step(params: Any, state: decode.DecodeState, cfg: DecodeConfig):
    """Takes a step, and looks at what its target forward said at every node."""
    after, info = decode.step(params, state, cfg)
    tree, cache = info.tree, state.target_cache
    out = target.forward(
        params["target"],
        tree.tokens,
        cache.length[:, None] + tree.depths,
        tree_lib.ancestors(tree.parents, cfg.tree.depth),
        cache,
        cfg.target,
    )
    scores = target.logits(params["target"], out.top)
    return after, (info, cache.length, scores, draft.features(out, cfg.draft))


@functools.cache
def decoded(file: Path) -> list[Any]:
    """What every step did and saw, for all runs at once."""
    case = load_case(file)
    n_steps = max(run["num_steps"] for run in case.runs)
    n_new = max(len(r["eagenerate_ids"]) - len(r["prompt_ids"]) for r in case.runs)
    # Rows that have all their steps go on beside the others: room for what they may emit.
    room = n_new + n_steps * case.cfg.tree.depth
    state = decode.start(case.params, case.prompts(), case.cfg, room)
    steps = []
    for _ in range(n_steps):
        state, seen = observed_step(case.params, state, case.cfg)
        steps.append(jax.device_get(seen))
    return steps


@cases("case.json")
def test_decoding_takes_the_official_steps(file: Path) -> None:
    case, seen = load_case(file), Differences()
    for r, run in enumerate(case.runs):
        tokens = [*run["prompt_ids"], run["first_token"]]
        for s, step in enumerate(run["steps"]):
            info, length, scores, features = decoded(file)[s]
            equal("input_len", length[r], step["input_len"])
            equal("accept_length", info.n_accepted[r], step["accept_length"])
            n = step["accept_length"]
            path = info.path[r, : n + 1]
            equal("emitted", info.tree.tokens[r, path], step["emitted"])
            new = info.tokens[r, : info.n_emitted[r]].tolist()
            equal("next_token", new, [*step["emitted"][1:], step["next_token"]])
            tokens += new
            if "draft_tokens" in step:
                row = jax.tree.map(lambda a, r=r: a[r], info.tree)
                check_tree(step, row, case.cfg.tree, seen)
            if "retrieve_indices" in step:
                leaf = step["retrieve_indices"][step["best_candidate"]]
                equal("best_candidate", path, leaf[: n + 1])
            for name, got in [("logits", scores), ("features", features)]:
                want = case.tensors.get(f"run{r}.step{s}.tree_target_{name}")
                if want is not None:
                    got = got[:, r].T
                    seen.close(f"tree target_{name}", got, want, atol=ABSOLUTE)
        equal("accept_lengths", len(run["steps"]), run["num_steps"])
        # The official output leaves out the root of the step that is not taken any more.
        equal("eagenerate_ids", tokens[:-1], run["eagenerate_ids"])
    seen.report(file)


def cut_after(tokens: list[int], ends: set[int], start: int) -> list[int]:
    """Cuts after the first end token at or behind `start`."""
    for i in range(start, len(tokens)):
        if tokens[i] in ends:
            return tokens[: i + 1]
    return tokens


@cases("case.json")
def test_official_end_of_sequence_keeps_the_last_block(file: Path) -> None:
    case = load_case(file)
    for r, run in enumerate(case.runs):
        variant, tokens = run["eos_variant"], list(run["prompt_ids"])
        for info, *_ in decoded(file)[: run["num_steps"]]:
            # The official loop looks at the root and what was accepted, after the step.
            block = info.tree.tokens[r, info.path[r, : info.n_accepted[r] + 1]].tolist()
            tokens += block
            if variant["eos_token_id"] in block:
                break
        equal("eos_variant", tokens, variant["eagenerate_ids"])
        if "naivegenerate_ids" in variant:
            ends, start = {variant["eos_token_id"]}, len(run["prompt_ids"])
            cut = cut_after(tokens, ends, start)
            equal("eos_variant", cut, variant["naivegenerate_ids"])


@cases("case.json")
@pytest.mark.parametrize("speculative", [False, True], ids=["plain", "tree"])
def test_generation_ends_where_plain_official_decoding_ends(
    file: Path, speculative: bool
) -> None:
    case = load_case(file)
    ends = {run["eos_variant"]["eos_token_id"] for run in case.runs} if speculative else set()
    ends.add(case.settings["eos_token_id"])
    naive = [run["naivegenerate_ids"][len(run["prompt_ids"]) :] for run in case.runs]
    n_new = min(len(new) for new in naive)
    state = decode.start(case.params, case.prompts(), case.cfg, n_new)
    cfg = DecodeConfig(
        target=case.cfg.target.__class__(
            **{**vars(case.cfg.target), "eos_ids": tuple(sorted(ends))}
        ),
        draft=case.cfg.draft,
        tree=case.cfg.tree if speculative else PLAIN,
    )
    _, out = decode.jit_loop(case.params, state, cfg, n_new)
    for got, new in zip(decode.unpack(out), naive, strict=True):
        equal("naivegenerate_ids", got, cut_after(new[:n_new], ends, 0))

"""The official implementation's numbers, case by case (tests/golden/README.md).

Every folder under tests/golden and under $EAGLE_JAX_GOLDEN is a case; its kind, sizes,
settings and prompts are read from its files. Each test prints the largest difference of
each quantity (`pytest -rP`).
"""

import dataclasses
import functools
import json
import os
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

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
from eagle_jax.layers import Segment, split
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
    found = [
        file
        for root in ROOTS
        for file in sorted(root.glob(f"*/{kind}"))
        if algorithm in json.loads(file.read_text()).get("algorithm", "")
    ]
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
        self.largest[name] = max(
            self.largest.get(name, (0.0, kind)), (float(gap), kind)
        )
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
    assert model.draft_cfg.head == (
        "eagle3" if meta["algorithm"] == "eagle3" else "eagle1"
    )
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


quick_jit = functools.partial(
    jax.jit,
    static_argnames="cfg",
    # The numbers matter here and the time to compile, not the speed.
    compiler_options={"xla_backend_optimization_level": 0},
)
ancestors = quick_jit(tree_lib.ancestors, static_argnames="depth")
loop = quick_jit(decode.loop, static_argnames=("cfg", "max_new_tokens"))


def pad(rows: list[Any]) -> np.ndarray:
    """Stacks rows of different length (their first axis), padded with zeros."""
    arrays = [np.asarray(row) for row in rows]
    longest = max(len(a) for a in arrays)
    widths = [[(0, longest - len(a))] + [(0, 0)] * (a.ndim - 1) for a in arrays]
    return np.stack([np.pad(a, w) for a, w in zip(arrays, widths, strict=True)])


def plain_batch(tokens: np.ndarray, real: np.ndarray, mask: np.ndarray) -> Batch:
    """One conversation in each row."""
    positions = np.broadcast_to(
        np.arange(tokens.shape[1], dtype=np.int32), tokens.shape
    )
    return Batch(
        tokens=jnp.asarray(tokens, jnp.int32),
        segments=jnp.asarray(real, jnp.int32),
        positions=jnp.asarray(positions),
        mask=jnp.asarray(mask, bool),
    )


def watch(module: Any, name: str, seen: list[Any]):
    """Notes what a library function returns while a caller of it is traced."""
    function = getattr(module, name)

    def watched(*args: Any) -> Any:
        seen.append(function(*args))
        return seen[-1]

    return mock.patch.object(module, name, watched)


@quick_jit
def prefill(params: Any, state: Any, tokens: Any, following: Any, count: Any, cfg: Any):
    """Prefills, and returns what target and head said about the prompts."""
    outs: list[Any] = []
    with watch(target, "forward", outs), watch(draft, "finish", outs):
        state = decode.prefill(params, state, tokens, following, count, cfg)
    given, hidden = outs
    features = draft.features(given, cfg.draft)
    return state, {
        "target_logits": target.logits(params["target"], given.top),
        "target_features": features,
        "head_input_features": features,
        "head_hidden": hidden,
        "head_logits": draft.logits(params["draft"], hidden, cfg.draft),
    }


@quick_jit
def step(params: Any, state: decode.DecodeState, cfg: DecodeConfig):
    """Takes a step, and returns what it drafted from and what the target said."""
    outs: list[Any] = []
    candidates: list[draft.Candidates] = []
    with watch(target, "forward", outs), watch(draft, "grow", candidates):
        after, info = decode.step(params, state, cfg)
    (out,) = outs
    return after, Seen(
        length=state.target_cache.length,
        info=info,
        candidates=candidates,
        logits=target.logits(params["target"], out.top),
        features=draft.features(out, cfg.draft),
    )


class Seen(NamedTuple):
    """What one step did and saw."""

    length: Any
    info: decode.StepInfo
    candidates: list[draft.Candidates]  # one, or none for a static tree
    logits: Any
    features: Any


class Record(NamedTuple):
    """A decoding of all runs at once, as long as the longest of them."""

    prompt: dict[str, np.ndarray]
    states: list[decode.DecodeState]  # before every step
    steps: list[Seen]


@functools.cache
def decoded(file: Path) -> Record:
    case = load_case(file)
    n_steps = max(run["num_steps"] for run in case.runs)
    prompts = [np.array(run["prompt_ids"], np.int32) for run in case.runs]
    following = [np.append(prompt[1:], np.int32(-1)) for prompt in prompts]
    lengths = np.array([len(prompt) for prompt in prompts], np.int32)
    # Rows that have all their steps go on beside the others.
    slots = int(lengths.max()) + (n_steps + 1) * (case.cfg.tree.depth + 1)
    slots = max(slots, int(lengths.max()) + case.settings["max_new_tokens"] + 2)
    state = decode.jit_empty(decode.row_keys(0, len(prompts)), case.cfg, slots)
    state, prompt = prefill(
        case.params, state, pad(prompts), pad(following), lengths, case.cfg
    )
    states, steps = [], []
    for _ in range(n_steps):
        states.append(state)
        state, seen = step(case.params, state, case.cfg)
        steps.append(jax.device_get(seen))
    return Record(jax.device_get(prompt), states, steps)


@cases("case.json")
def test_prefill_gives_the_official_target_and_head_outputs(file: Path) -> None:
    case, record, seen = load_case(file), decoded(file), Differences()
    for r, run in enumerate(case.runs):
        for name, got in record.prompt.items():
            want = case.tensors[f"run{r}.prompt.{name}"]
            got = got[:, r, : len(want)].T
            seen.close(f"prompt {name}", got, want, atol=ABSOLUTE)
        equal("first_token", record.states[0].root[r], run["first_token"])
    seen.report(file)


class Level(NamedTuple):
    """Beam entries of all levels of a recorded draft, and who stands above each."""

    tokens: Any
    hidden: Any
    positions: Any
    parents: Any


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
        key: np.concatenate(
            [get(f"{name}.level{i}.{key}") for i in range(1, tree.depth)]
        )
        for key in ("input_ids", "input_hidden", "position")
    }
    return Level(
        tokens=joined["input_ids"].astype(np.int32),
        hidden=joined["input_hidden"],
        positions=joined["position"].astype(np.int32),
        parents=np.array(parents, np.int32),
    )


@quick_jit
def beam_pass(params: Any, state: draft.DraftState, level: Level, cfg: DecodeConfig):
    """Runs the recorded beams of all levels once more, side by side."""
    cache, head = state.cache, cfg.draft
    hidden = jnp.transpose(level.hidden, (2, 0, 1))
    block = draft.begin(params, level.tokens, hidden, level.positions, head)
    past = cache_lib.committed(cache, level.tokens.shape[1])
    above = tree_lib.ancestors(level.parents, cfg.tree.depth)
    segments = (Segment(cache.k[0], cache.v[0], past), Segment(*block.kv, above))
    out = draft.finish(params, block, segments, head)
    out = jnp.concatenate([state.hidden[:, :, None], out], axis=2)
    logits = draft.logits(params, out, head)
    return out, logits, jax.nn.log_softmax(logits, axis=0)


@cases("case.json")
def test_drafts_are_the_official_ones_level_by_level(file: Path) -> None:
    case, record, seen = load_case(file), decoded(file), Differences()
    recorded = [
        (r, s)
        for r, run in enumerate(case.runs)
        for s in range(run["num_steps"])
        if f"run{r}.draft{s}.level0.hidden" in case.tensors
    ]
    assert recorded
    for s in {s for _, s in recorded}:
        # Runs without a record of this step get another's beams, to keep the shape.
        names = [f"run{r}.draft{s}" for r, step in recorded if step == s]
        rows = [r for r, step in recorded if step == s]
        levels = {r: beams(case, name) for r, name in zip(rows, names, strict=True)}
        filled = [levels.get(r, levels[rows[0]]) for r in range(len(case.runs))]
        level = Level(*(np.stack(part) for part in zip(*filled, strict=True)))
        state = record.states[s].draft
        passes = beam_pass(case.params["draft"], state, level, case.cfg)
        hidden, logits, log_q = (np.asarray(x) for x in passes)
        for r, name in zip(rows, names, strict=True):
            got = (hidden[:, r].T, logits[:, r].T, log_q[:, r].T)
            check_levels(case, name, *got, seen)
            if case.cfg.tree.kind == "dynamic":
                (candidates,) = record.steps[s].candidates
                row = draft.Candidates(*(part[r] for part in candidates))
                check_candidates(case, name, row, record.steps[s].info.tree, r, seen)
    seen.report(file)


def check_levels(
    case: Case,
    name: str,
    hidden: np.ndarray,
    logits: np.ndarray,
    log_q: np.ndarray,
    seen: Differences,
) -> None:
    """Compares head outputs, beam entries of all levels below each other."""
    law = {"hidden": hidden, "logits": logits, "logprobs": log_q}
    start = 0
    for i in range(case.cfg.tree.depth):
        n = len(case.tensors[f"{name}.level{i}.hidden"])
        for key, got in law.items():
            want = case.tensors.get(f"{name}.level{i}.{key}")
            if want is not None:
                got = got[start : start + n]
                seen.close(f"draft level {key}", got, want, atol=ABSOLUTE)
        start += n
    if f"{name}.topk_tokens" in case.tensors:
        want = case.tensors[f"{name}.topk_tokens"]
        best = np.argsort(-logits, axis=1, kind="stable")[:, : want.shape[1]]
        equal("topk_tokens", best, want)
        got, want = (
            np.take_along_axis(logits, best, 1),
            case.tensors[f"{name}.topk_logits"],
        )
        seen.close("draft topk_logits", got, want, atol=ABSOLUTE)


def check_candidates(
    case: Case,
    name: str,
    row: draft.Candidates,
    tree: tree_lib.Tree,
    r: int,
    seen: Differences,
) -> None:
    """Compares all nodes a dynamic tree chose from, level by level, and its choice."""
    W, end = case.cfg.tree.width, 0
    ids = np.arange(case.cfg.target.vocab_size)
    ids = np.asarray(case.params["draft"].get("draft_to_target", ids))
    for i in range(case.cfg.tree.depth):
        at = f"{name}.level{i}"
        shape = case.tensors[f"{at}.top_index"].shape
        start, end = end, end + shape[0] * shape[1]
        equal("input_ids", shape[0], 1 if i == 0 else W)
        got = row.tokens[start:end].reshape(shape)
        equal("top_index", got, ids[case.tensors[f"{at}.top_index"]])
        got = row.log_q[start:end].reshape(shape)
        want = case.tensors[f"{at}.top_logprobs"]
        seen.close("draft top_logprobs", got, want, atol=ABSOLUTE)
        if i > 0:
            got = row.log_value[start:end].reshape(shape)
            want = case.tensors[f"{at}.cum_scores"]
            seen.close("draft cum_scores", got, want, atol=ABSOLUTE)
        if 0 < i < case.cfg.tree.depth - 1:
            beam = row.parents[end : end + W * W : W] - start
            equal("beam_index", beam, case.tensors[f"{at}.beam_index"])
    want = case.tensors[f"{name}.all_scores"]
    seen.close("draft all_scores", row.log_value, want, atol=ABSOLUTE)
    kept = case.tensors[f"{name}.selected_index"]
    equal("selected_index", tree.tokens[r, 1:], row.tokens[kept])
    equal("selected_index", tree.log_q[r, 1:], row.log_q[kept])


def check_tree(
    step: dict[str, Any], drafted: tree_lib.Tree, tree: TreeConfig, seen: Differences
) -> None:
    """Compares one row's tree with a recorded one."""
    parents = np.maximum(step["parents"], 0)  # official: the root's is -1
    equal("draft_tokens", drafted.tokens, step["draft_tokens"])
    equal("parents", drafted.parents, parents)
    equal("tree_position_ids", drafted.depths, step["tree_position_ids"])
    above = np.asarray(ancestors(drafted.parents[None], tree.depth))[0]
    equal("tree_mask", above, np.array(step["tree_mask"], bool))
    if "node_scores" in step:
        scores = np.asarray(above, np.float64) @ drafted.log_q
        seen.close("node_scores", scores[1:], step["node_scores"], atol=ABSOLUTE)


@cases("case.json")
def test_decoding_takes_the_official_steps(file: Path) -> None:
    case, record, seen = load_case(file), decoded(file), Differences()
    for r, run in enumerate(case.runs):
        tokens = [*run["prompt_ids"], run["first_token"]]
        for s, step in enumerate(run["steps"]):
            info = record.steps[s].info
            equal("input_len", record.steps[s].length[r], step["input_len"])
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
            for name in ("logits", "features"):
                want = case.tensors.get(f"run{r}.step{s}.tree_target_{name}")
                if want is not None:
                    got = getattr(record.steps[s], name)[:, r].T
                    seen.close(f"tree target_{name}", got, want, atol=ABSOLUTE)
            want = case.tensors.get(f"run{r}.draft{s + 1}.head_input_features")
            if want is not None:
                got = record.steps[s].features[:, r, path].T
                seen.close("draft head_input_features", got, want, atol=ABSOLUTE)
                equal(
                    "head_input_ids",
                    new,
                    case.tensors[f"run{r}.draft{s + 1}.head_input_ids"],
                )
        equal("accept_lengths", len(run["steps"]), run["num_steps"])
        # The official output leaves out the root of the step that is not taken.
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
        for seen in decoded(file).steps[: run["num_steps"]]:
            info = seen.info
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
def test_plain_decoding_gives_the_official_tokens(file: Path) -> None:
    case = load_case(file)
    naive = [run["naivegenerate_ids"][len(run["prompt_ids"]) :] for run in case.runs]
    ends = {run["eos_variant"]["eos_token_id"] for run in case.runs}
    ends.add(case.settings["eos_token_id"])
    n_new = min(len(new) for new in naive)
    eos_ids = tuple(sorted(ends))
    cfg = DecodeConfig(
        target=dataclasses.replace(case.cfg.target, eos_ids=eos_ids),
        draft=case.cfg.draft,
        tree=PLAIN,
    )
    state = decoded(file).states[0]
    rows = [[root] for root in np.asarray(state.root).tolist()]
    done = np.isin(np.asarray(state.root), eos_ids)
    for attempt in range(n_new):
        state = state._replace(done=jnp.asarray(done))
        state, out = loop(case.params, state, cfg, n_new)
        for row, new in zip(rows, decode.unpack(out), strict=True):
            row += new[1:]
        if attempt == 0:  # ended rows are then made to go on
            for got, new in zip(rows, naive, strict=True):
                equal("eos_variant", got, cut_after(new[:n_new], ends, 0))
        done = np.array([len(row) >= n_new for row in rows])
        if done.all():
            break
    for got, new in zip(rows, naive, strict=True):
        equal("naivegenerate_ids", got[:n_new], new[:n_new])


# ---- training ------------------------------------------------------------------------

IN_LAYER = {
    "self_attn.q_proj.weight": "wq",
    "self_attn.k_proj.weight": "wk",
    "self_attn.v_proj.weight": "wv",
    "self_attn.o_proj.weight": "wo",
    "mlp.gate_proj.weight": "w_gate",
    "mlp.up_proj.weight": "w_up",
    "mlp.down_proj.weight": "w_down",
    "post_attention_layernorm.weight": "mlp_norm",
    "input_layernorm.weight": "embed_norm",
    "hidden_norm.weight": "hidden_norm",
}
ON_TOP = {"fc.bias": "fc_bias", "norm.weight": "norm", "lm_head.weight": "head"}


def pick(grads: dict[str, Any], name: str) -> np.ndarray:
    """Finds the gradient of a parameter under its official name."""
    if name == "fc.weight":
        return np.asarray(grads["fuse" if "fuse" in grads else "fc"])
    if name in ON_TOP:
        return np.asarray(grads[ON_TOP[name]])
    return np.asarray(
        split(grads["layer"])[IN_LAYER[name.split(".", name.count("layers.") + 1)[-1]]]
    )


@functools.partial(quick_jit, static_argnames=("cfg", "settings"))
def train_pass(
    params: Any,
    batch: Batch,
    given: Features,
    cfg: DraftConfig,
    settings: TrainConfig,
):
    """Loss, metrics and gradients, and what the head said at every step and place."""

    head, key = params["draft"], jax.random.key(0)

    def loss(trained: Any):
        unrolled: list[Any] = []
        with watch(train, "unroll", unrolled):
            value, metrics = train.head_loss(
                key, head | trained, params["target"], batch, given, cfg, settings
            )
        return value, (metrics, jnp.stack(unrolled[0]))

    (value, (metrics, outs)), grads = jax.value_and_grad(loss, has_aux=True)(
        draft.trainable(head, cfg)
    )
    logits = jax.vmap(lambda out: draft.logits(head, out, cfg))(outs)
    teacher = target.logits(params["target"], given.top)
    return value, metrics, grads, outs, logits, teacher


def check_norms(grads: Any, want: dict[str, Any], seen: Differences) -> None:
    for name, norm in want["grad_norms"].items():
        got = np.linalg.norm(pick(grads, name).astype(np.float64))
        seen.close("grad_norms", got, norm, **GRADIENT)
    total = np.sqrt(sum(np.sum(np.square(g)) for g in jax.tree.leaves(grads)))
    seen.close("total_grad_norm", total, want["total_grad_norm"], rtol=1e-4)


target_features = quick_jit(train.target_features, static_argnames=("cfg", "head"))


@cases("train_case.json", "eagle1")
def test_eagle1_training_matches_losses_and_gradients(file: Path) -> None:
    meta, seen = json.loads(file.read_text()), Differences()
    tensors = safetensors.numpy.load_file(file.parent / "tensors.safetensors")
    model, recorded = load_model(file.parent, meta["shapes"]), meta["settings"]
    settings = TrainConfig(
        ttt_steps=1,
        mask="official",
        normaliser="mask",
        noise="none",
        regression_weight=recorded["v_w"],
        classification_weight=recorded["p_w"],
    )
    rows = range(meta["shapes"]["batch"])
    tokens = [tensors[f"sample{r}.input_ids"] for r in rows]
    batch = plain_batch(
        pad(tokens),
        pad([np.ones(len(t)) for t in tokens]),
        pad([tensors[f"sample{r}.loss_mask"] for r in rows]),
    )
    clean = pad([tensors[f"sample{r}.hidden_state"] for r in rows])
    noised = clean.copy()
    noised[0] = tensors["noise.hidden_out"]
    top = jnp.asarray(clean.transpose(2, 0, 1))
    for name, read in [("clean", clean), ("noised", noised)]:
        want = meta[name]
        given = Features(read=jnp.asarray(read.transpose(2, 0, 1)), top=top)
        value, metrics, grads, outs, logits, teacher = jax.device_get(
            train_pass(model.params, batch, given, model.draft_cfg, settings)
        )
        seen.close(f"{name} vloss", metrics.regression[0], want["vloss"], rtol=LOSS)
        seen.close(f"{name} ploss", metrics.step_loss[0], want["ploss"], rtol=LOSS)
        seen.close(f"{name} loss", value, want["loss"], rtol=LOSS)
        equal("count", metrics.n_labels, want["count"])
        equal(
            "top1", round(float(metrics.accuracy[0]) * want["count"], 3), want["top1"]
        )
        check_norms(grads, want, seen)
        if name == "noised":
            break
        for key in [key for key in tensors if key.startswith("grad.")]:
            got = pick(grads, key.removeprefix("grad.")).reshape(tensors[key].shape)
            seen.close("gradients", got, tensors[key], **GRADIENT)
        for r, row in enumerate(tokens):
            n = len(row) - 1  # the last slot has neither a token nor a target
            for key, got in [("predict", outs[0]), ("logits", logits[0])]:
                want = tensors[f"out.{key}"][r, :n]
                seen.close(f"out.{key}", got[:, r, :n].T, want, atol=ABSOLUTE)
            want = tensors["out.target_logits"][r, :n]
            seen.close(
                "out.target_logits", teacher[:, r, 1 : n + 1].T, want, atol=ABSOLUTE
            )
    seen.report(file)


@cases("train_case.json", "eagle1")
def test_official_noise_is_as_wide_as_recorded(file: Path) -> None:
    meta = json.loads(file.read_text())
    tensors = safetensors.numpy.load_file(file.parent / "tensors.safetensors")
    lengths = meta["shapes"]["sample_lengths"]
    settings = TrainConfig(
        noise="official", noise_width=meta["settings"]["noise_std"] / 2
    )
    real = pad([np.ones(n) for n in lengths])
    read = jnp.zeros((meta["shapes"]["hidden"], *real.shape))
    batch = plain_batch(np.zeros_like(real), real, real)
    noise = np.asarray(train.add_noise(jax.random.key(0), read, batch, settings))
    clean, blurred = tensors["sample0.hidden_state"], tensors["noise.hidden_out"]
    half = np.abs(blurred - clean) / np.abs(2 * tensors["noise.uniform"] - 1)
    np.testing.assert_allclose(
        np.median(half), meta["noise_half_width_sample0"], rtol=1e-3
    )
    for r, n in enumerate(lengths):
        width = meta["noise_half_width_sample0"] * lengths[0] / n
        inside = np.abs(noise[:, r, :n]) / width
        assert inside.max() <= 1 + 1e-6
        # Uniform: the largest of some hundred is near the bound, the mean is a half.
        assert (
            inside.max() > 0.97
            and abs(inside.mean() - 0.5) < 5 * 0.29 / inside.size**0.5
        )


def official_eagle3_losses(
    logits: np.ndarray,
    shifted: np.ndarray,
    counted: np.ndarray,
    head: dict[str, Any],
) -> tuple[np.ndarray, np.ndarray]:
    """Returns plosses and accuracies from their definition (README, "Training").

    Args:
      logits: of the head, [step, draft id, row, place].
      counted: the loss mask, or a part of it.
    """
    n_steps, U, B, N = logits.shape
    ids = np.asarray(head.get("draft_to_target", np.arange(U)))
    losses, accuracies = np.zeros(n_steps), np.zeros(n_steps)
    for k in range(n_steps):
        n_counted = 0
        for b in range(B):
            for i in range(N - k):
                if not counted[b, i + k]:
                    continue
                n_counted += 1
                teacher = shifted[b, i + k].astype(np.float64)
                if np.argmax(teacher) not in ids:
                    continue
                teacher, scores = teacher[ids], logits[k, :, b, i].astype(np.float64)
                p = np.exp(teacher - teacher.max())
                p /= p.sum()
                log_q = scores - scores.max()
                log_q -= np.log(np.exp(log_q).sum())
                losses[k] -= p @ log_q / (B * N)
                accuracies[k] += np.argmax(p) == np.argmax(log_q)
        accuracies[k] /= max(n_counted, 1)
    return losses, accuracies


@cases("train_case.json", "eagle3")
def test_eagle3_training_matches_losses_and_gradients(file: Path) -> None:
    """Matches the official code, but for labels behind the end of a conversation.

    The official loss also counts the place whose label would follow the last token;
    its teacher is a row of zeros, or speaks about padding (official-quirks.md 3). We
    leave it out; adding it back by the definition gives the official numbers.
    """
    meta, seen = json.loads(file.read_text()), Differences()
    tensors = safetensors.numpy.load_file(file.parent / "tensors.safetensors")
    model, recorded = load_model(file.parent, meta["shapes"]), meta["settings"]
    settings = TrainConfig(
        ttt_steps=recorded["unroll"],
        ttt_decay=recorded["step_decay"],
        mask="official",
        normaliser="slots",
    )
    for name, want in meta["batches"].items():
        get = {key: tensors[f"{name}.{key}"] for key in ("attention_mask", "loss_mask")}
        real, counted = get["attention_mask"], get["loss_mask"].astype(bool)
        batch = plain_batch(tensors[f"{name}.input_ids"], real, counted)
        given = target_features(
            model.params["target"], batch, model.target_cfg, model.draft_cfg
        )
        value, metrics, grads, outs, logits, teacher = jax.device_get(
            train_pass(model.params, batch, given, model.draft_cfg, settings)
        )
        shifted = tensors[f"{name}.target_logits_shifted"]
        for b, n in enumerate(real.sum(axis=1)):
            wanted = tensors[f"{name}.features"][b, :n]
            got = np.asarray(given.read)[:, b, :n].T
            seen.close("features", got, wanted, atol=ABSOLUTE)
            got, wanted = teacher[:, b, 1:n].T, shifted[b, : n - 1]
            seen.close("target_logits", got, wanted, atol=ABSOLUTE)
            for k in range(settings.ttt_steps):
                wanted = tensors[f"{name}.step{k}.hidden"][b, :n]
                seen.close("step hidden", outs[k][:, b, :n].T, wanted, atol=ABSOLUTE)
                if f"{name}.step{k}.logits" in tensors:
                    wanted = tensors[f"{name}.step{k}.logits"][b, :n]
                    seen.close(
                        "step logits", logits[k][:, b, :n].T, wanted, atol=ABSOLUTE
                    )
        # With the labels behind the end: the official numbers. Without: the library's.
        losses, accuracies = official_eagle3_losses(
            logits, shifted, counted, model.params["draft"]
        )
        seen.close("definition plosses", losses, want["plosses"], rtol=LOSS)
        seen.close("definition accuracies", accuracies, want["accuracies"], atol=1e-6)
        behind = counted & (
            np.arange(counted.shape[1]) == real.sum(axis=1)[:, None] - 1
        )
        losses, accuracies = official_eagle3_losses(
            logits, shifted, counted & ~behind, model.params["draft"]
        )
        seen.close(f"{name} plosses", metrics.step_loss, losses, rtol=LOSS)
        seen.close(f"{name} accuracies", metrics.accuracy, accuracies, atol=1e-6)
        equal("loss_mask_sum", metrics.n_labels, want["loss_mask_sum"] - behind.sum())
        weights_of_steps = np.array(want["loss_weights"])
        seen.close(f"{name} loss", value, losses @ weights_of_steps, rtol=LOSS)
        if behind.any():
            continue
        seen.close(f"{name} loss", value, want["loss"], rtol=LOSS)
        seen.close(f"{name} plosses", metrics.step_loss, want["plosses"], rtol=LOSS)
        check_norms(grads, want, seen)
        for key in [key for key in tensors if key.startswith(f"{name}.grad.")]:
            got = pick(grads, key.removeprefix(f"{name}.grad."))
            got = got.reshape(tensors[key].shape)
            seen.close("gradients", got, tensors[key], **GRADIENT)
    seen.report(file)


# ---- sampling ------------------------------------------------------------------------

distribution = quick_jit(verify.distribution)


def sampling(processor: dict[str, Any]) -> SamplingConfig:
    return SamplingConfig(
        temperature=processor["temperature"],
        top_k=processor["top_k"],
        top_p=processor["top_p"],
        top_p_first=True,
    )


def law(vectors: list[np.ndarray], processor: dict[str, Any]) -> list[np.ndarray]:
    """Returns `verify.distribution` at the nodes of several trees, [node, token] each.

    All are brought to one shape: added tokens have no mass, added nodes are dropped.
    """
    nodes, vocab = (max(v.shape[axis] for v in vectors) for axis in (0, 1))
    logits = np.zeros((vocab, len(vectors), nodes), np.float32)
    for i, vector in enumerate(vectors):
        logits[vector.shape[1] :, i] = -np.inf
        logits[: vector.shape[1], i, : vector.shape[0]] = vector.T
    p = np.asarray(distribution(jnp.asarray(logits), sampling(processor)))
    return [p[: v.shape[1], i, : v.shape[0]].T for i, v in enumerate(vectors)]


def official_walk(
    tree: dict[str, Any], p: np.ndarray, uniforms: list[float]
) -> tuple[list[int], np.ndarray]:
    """Goes from sibling to sibling, one uniform number each (README, "Sampling").

    Returns the accepted nodes and the law of the token that comes next.
    """
    numbers, node, path = iter(uniforms), 0, []
    law = p[0].astype(np.float64)
    children = [n for n, parent in enumerate(tree["parents"]) if parent == node]
    while children:
        child = children.pop(0)
        if next(numbers) <= law[tree["draft_tokens"][child]]:
            path.append(child)
            node, law = child, p[child].astype(np.float64)
            children = [n for n, parent in enumerate(tree["parents"]) if parent == node]
        else:
            law[tree["draft_tokens"][child]] = 0
            law /= law.sum()
    assert next(numbers, None) is None, "numbers are left over"
    return path, law


@cases("sampling_case.json")
def test_official_verdicts_follow_from_our_distribution(file: Path) -> None:
    meta, seen = json.loads(file.read_text()), Differences()
    tensors = safetensors.numpy.load_file(file.parent / "tensors.safetensors")
    groups: dict[str, list[int]] = {}
    for i, vector in enumerate(meta["vectors"]):
        groups.setdefault(json.dumps(vector["processor"]), []).append(i)
    for processor, members in groups.items():
        laws = law(
            [tensors[f"vec{i}.node_logits"] for i in members], json.loads(processor)
        )
        for i, p in zip(members, laws, strict=True):
            vector = meta["vectors"][i]
            path, left = official_walk(vector, p, vector["uniforms"])
            equal("accept_length", len(path), vector["accept_length"])
            tokens = [vector["draft_tokens"][node] for node in path]
            equal("accepted_tokens", tokens, vector["accepted_tokens"])
            leaf = vector["retrieve_indices"][vector["best_candidate"]]
            equal("best_candidate", [0, *path], leaf[: len(path) + 1])
            seen.close("sample_p", left, tensors[f"vec{i}.sample_p"], atol=SAMPLE_P)
    seen.report(file)


@functools.partial(quick_jit, static_argnames=("cfg", "depth"))
def draw(keys: Any, logits: Any, log_q: Any, tree: tree_lib.Tree, cfg: Any, depth: int):
    """Verifies a tree by both rules, once per key; returns first tokens and lengths."""

    def spread(array: Any) -> Any:
        return jnp.broadcast_to(
            array[:, None], (array.shape[0], len(keys), array.shape[1])
        )

    tree = jax.tree.map(lambda a: jnp.broadcast_to(a, (len(keys), *a.shape)), tree)
    logits, log_q = spread(logits), spread(log_q)
    sampled = verify.sample(keys, logits, cfg)
    p = verify.distribution(logits, cfg)
    results = []
    for verdict in (
        verify.walk(tree, sampled, depth),
        verify.accept_with_q(keys, tree, log_q, p, depth),
    ):
        first = jnp.take_along_axis(tree.tokens, verdict.path[:, 1:2], axis=1)[:, 0]
        first = jnp.where(verdict.n_accepted > 0, first, verdict.next_token)
        results.append((first, verdict.n_accepted))
    return results


def point_masses(tree: tree_lib.Tree, vocab: int) -> np.ndarray:
    """Returns log q under which children are surely drawn in their order."""
    log_q = np.full((vocab, len(tree.tokens)), -1e6, np.float32)
    for node, (token, parent) in enumerate(zip(tree.tokens, tree.parents, strict=True)):
        if parent != node:
            log_q[token, parent] = -1e3 * node
    return log_q


def chi2_limit(dof: int) -> float:
    """A chi-square statistic stays below it but for one case in some ten thousand."""
    return dof + 4 * (2 * dof) ** 0.5 + 8


@cases("sampling_case.json")
def test_our_rules_have_the_law_of_the_official_one(file: Path) -> None:
    """One draw a node (method.md 9.3), and siblings tested with a q that is certain."""
    meta, seen = json.loads(file.read_text()), Differences()
    tensors = safetensors.numpy.load_file(file.parent / "tensors.safetensors")
    rows = 10_000
    keys = decode.row_keys(0, rows)
    nodes = max(len(case["parents"]) for case in meta["distributions"])
    for i, case in enumerate(meta["distributions"]):
        logits, processor = tensors[f"stat{i}.node_logits"], case["processor"]
        fill = nodes - len(logits)
        logits = np.pad(logits, ((0, fill), (0, 0)))
        (p,) = law([logits], processor)
        seen.close("target_probs", p[0], case["target_probs"], atol=SAMPLE_P)
        counts, n = np.array(case["counts_first"]), case["draws"]
        some = p[0] > 0
        equal("counts of impossible tokens", counts[~some], 0)
        chi2 = np.sum((counts - n * p[0])[some] ** 2 / (n * p[0])[some])
        seen.close("chi2", chi2, case["chi2"], rtol=0.01, atol=0.01)
        assert chi2 < chi2_limit(case["chi2_dof"])

        # Nodes that only fill the shape are nobody's children.
        parents = [max(parent, 0) for parent in case["parents"]]
        depths = [0]
        for parent in parents[1:]:
            depths.append(depths[parent] + 1)
        depth = max(depths)
        parts: list[Any] = [
            case["draft_tokens"] + [-1] * fill,
            parents + list(range(len(parents), nodes)),
            depths + [1] * fill,
        ]
        arrays: list[Any] = [np.array(part, np.int32) for part in parts]
        arrays.append(np.zeros(nodes, np.float32))
        tree = tree_lib.Tree(*arrays)
        log_q = point_masses(tree, case["vocab_size"])
        results = draw(keys, logits.T, log_q, tree, sampling(processor), depth)
        official = np.array(case["accept_length_frequency"])
        noise = np.sqrt(official * (1 - official) * (1 / rows + 1 / n))
        for rule, (first, lengths) in zip(("walk", "q"), results, strict=True):
            got = np.bincount(np.asarray(first), minlength=case["vocab_size"])
            equal("impossible tokens", got[~some], 0)
            chi2 = np.sum((got - rows * p[0])[some] ** 2 / (rows * p[0])[some])
            assert chi2 < chi2_limit(some.sum() - 1), f"{case['name']}: {rule}"
            ours = np.bincount(np.asarray(lengths), minlength=len(official)) / rows
            far = np.abs(ours - official) / (4.5 * noise + 1e-9)
            assert far.max() < 1, f"{case['name']}: {rule} {ours} {official}"
    seen.report(file)

"""Where the time of decoding and training goes, against what this device allows.

    python -m experiments.bench                    (on a quiet machine)

Every part is timed in rounds, all parts once per round, so that a disturbance hits all of
them alike; medians are reported with the spread between quartiles. The limit of a part is
the longer of two times: its bytes at the best reading kernel's rate, its floating-point
operations at that of a large matrix product.
"""

import dataclasses
import functools
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from rich.console import Console
from rich.table import Table

from eagle_jax import cache as cache_lib
from eagle_jax import decode, draft, train, verify
from eagle_jax.config import DecodeConfig, SamplingConfig, TargetConfig
from eagle_jax.layers import Params
from eagle_jax.train import Batch, Features
from experiments import common, variants
from experiments.common import Setup
from experiments.probe import jit_forward

FLAGS = flags.FLAGS
flags.DEFINE_integer("rounds", 15, "Timed rounds.")
flags.DEFINE_multi_integer("slots", [256, 1024], "Cache slots of target forwards.")
flags.DEFINE_multi_integer(
    "nodes", [1, 2, 4, 6, 8, 16, 26, 32, 64], "Tree sizes of target forwards."
)
flags.DEFINE_bool("training", True, "Time a training step as well.")
flags.DEFINE_string("compare", "", "A bench.jsonl: its newest line is set beside ours.")


class Part(NamedTuple):
    """Something to time.

    Args:
      n_bytes: what it must at least read; 0: not stated.
      flops: floating-point operations of its matrix products; 0: not stated.
      per_call: steps inside one call.
    """

    name: str
    call: Callable[[], Any]
    n_bytes: int = 0
    flops: float = 0.0
    per_call: int = 1


def main() -> None:
    other = _other()
    setup = common.load_setup(common.load_config())
    print(f"device   {common.describe_device()}, jax {jax.__version__}")
    parts = [*kernels(), *decoding(setup)]
    if FLAGS.training:
        parts += training(setup)
    seconds: dict[str, list[float]] = {part.name: [] for part in parts}
    progress = common.Progress("compile", len(parts))
    for i, part in enumerate(parts):
        jax.block_until_ready(part.call())
        progress.show(i + 1, part.name)
    progress = common.Progress("round", FLAGS.rounds)
    for r in range(FLAGS.rounds):
        for part in parts:
            began = time.perf_counter()
            jax.block_until_ready(part.call())
            spent = time.perf_counter() - began
            seconds[part.name].append(spent / part.per_call)
        progress.show(r + 1)
    report(parts, seconds, other, setup.cfg.precision)


def _other() -> dict[str, float]:
    """Reads the seconds of every part from the line to compare with."""
    if not FLAGS.compare:
        return {}
    path = Path(FLAGS.compare)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    if not lines or "parts" not in lines[-1]:
        raise ValueError(f"--compare={path} holds no line of bench")
    return {part["part"]: part["seconds"] for part in lines[-1]["parts"]}


def kernels() -> list[Part]:
    """Kernels that read 512 MB with all threads, and a large matrix product.

    The best of the former is the bandwidth, the latter the rate of arithmetic.
    """
    n_bytes = 512 * 2**20
    array = np.ones((2**17, 2**10), np.float32)
    assert array.nbytes == n_bytes
    vector = np.ones(2**10, np.float32)
    on_device, v = jnp.asarray(array), jnp.asarray(vector)
    total = jax.jit(jnp.sum)
    largest = jax.jit(jnp.max)
    product = jax.jit(functools.partial(jnp.dot, precision="highest"))
    square = jnp.ones((2048, 2048), jnp.float32)
    return [
        Part("read: BLAS matrix-vector", lambda: array @ vector, n_bytes),
        Part("read: XLA matrix-vector", lambda: product(on_device, v), n_bytes),
        Part("read: XLA sum", lambda: total(on_device), n_bytes),
        Part("read: XLA max", lambda: largest(on_device), n_bytes),
        Part("matrix product 2048", lambda: product(square, square), 0, 2.0 * 2048**3),
    ]


N_PROMPT, N_NEW, N_STEPS = 64, 33, 4


def decoding(setup: Setup) -> list[Part]:
    """Steps inside their loops, and each part of a step by itself."""
    # A target that never stops: every loop takes the same number of tokens.
    endless = dataclasses.replace(setup.target_cfg, eos_ids=())
    params: Params = {"target": setup.target_params}
    weights = _read_whole(setup.target_params)
    n_multiplied = _multiplied(setup.target_params)
    chunk = jnp.arange(100, 100 + decode.CHUNK, dtype=jnp.int32)[None]
    after = jnp.where(jnp.arange(decode.CHUNK)[None] < N_PROMPT - 1, chunk + 1, -1)

    def fresh(params: Params, cfg: DecodeConfig, slots: int) -> decode.DecodeState:
        state = decode.jit_empty(decode.row_keys(0, 1), cfg, slots)
        count = jnp.full(1, N_PROMPT, jnp.int32)
        return decode.jit_prefill(params, state, chunk, after, count, cfg)

    def looped(params: Params, cfg: DecodeConfig) -> tuple[Callable[[], Any], int]:
        states = [fresh(params, cfg, 256) for _ in range(FLAGS.rounds + 2)]
        out = decode.jit_loop(params, states.pop(), cfg, N_NEW)[1]
        n_steps = int((np.asarray(out.n_emitted[0]) >= 0).sum())
        return lambda: decode.jit_loop(params, states.pop(), cfg, N_NEW)[1], n_steps

    plain = DecodeConfig(endless)
    used = _kv_bytes(fresh(params, plain, 256), N_PROMPT + N_NEW // 2)
    call, n_steps = looped(params, plain)
    parts = [
        Part(
            "plain step, in its loop", call, weights + used, 2.0 * n_multiplied, n_steps
        )
    ]
    for slots in FLAGS.slots:
        state = fresh(params, plain, slots)
        for n in FLAGS.nodes:
            tokens = jnp.arange(100, 100 + n, dtype=jnp.int32)[None]
            call = functools.partial(
                jit_forward, setup.target_params, tokens, state.target_cache, endless
            )
            name = f"target forward, {n} nodes, {slots} slots"
            parts.append(Part(name, call, weights + used, 2.0 * n * n_multiplied))
    states = [fresh(params, plain, 256) for _ in range(FLAGS.rounds + 1)]
    parts.append(
        Part(
            f"prefill of {decode.CHUNK} tokens",
            lambda: decode.jit_prefill(
                params, states.pop(), chunk, after, jnp.full(1, 8, jnp.int32), plain
            ),
            weights,
            2.0 * decode.CHUNK * n_multiplied,
        )
    )
    return [
        *parts,
        *drafting(setup, endless, fresh, looped),
        synthesis(params, endless),
    ]


def synthesis(params: Params, endless: TargetConfig) -> Part:
    """One step of `experiments.synthesize`: every row samples a token."""
    rows, slots = 32, 512
    cfg = DecodeConfig(endless, sampling=SamplingConfig(temperature=1.0))
    length = jnp.full(rows, N_PROMPT, jnp.int32)

    def start() -> decode.DecodeState:
        state = decode.jit_empty(decode.row_keys(0, rows), cfg, slots)
        cache = state.target_cache._replace(length=jnp.copy(length))
        return state._replace(target_cache=cache)

    states, left = [start()], np.full(rows, slots, np.int32)

    def steps() -> Any:  # on and on in the same slots
        state, tokens, _ = decode.jit_advance(params, states[0], left, cfg, N_STEPS)
        cache = state.target_cache._replace(length=jnp.copy(length))
        states[0] = state._replace(target_cache=cache)
        return tokens

    weights = _read_whole(params["target"])
    n_multiplied = _multiplied(params["target"])
    used = _kv_bytes(states[0], N_PROMPT)  # its shapes hold the rows
    return Part(
        f"synthesis step, {rows} rows",
        steps,
        weights + used,
        2.0 * rows * n_multiplied,
        N_STEPS,
    )


def drafting(
    setup: Setup,
    endless: Any,
    fresh: Callable[..., decode.DecodeState],
    looped: Callable[..., tuple[Callable[[], Any], int]],
) -> list[Part]:
    """A whole step with the config's tree, and its parts but for the target's forward."""
    head = variants.head_config(variants.parse("eagle3"), setup.cfg, setup.target_cfg)
    own = draft.init(jax.random.key(0), head, setup.target_cfg)
    own["draft_to_target"] = jnp.arange(head.vocab_size, dtype=jnp.int32)
    tied = {
        "target": setup.target_params,
        "draft": draft.tie(own, setup.target_params, head),
    }
    tree = setup.cfg.tree
    cfg = DecodeConfig(endless, head, tree)
    state = fresh(tied, cfg, 256)
    n_own, n_head = _bytes(own), _bytes(own["head"])
    n_layer = n_own - n_head - own["fuse"].nbytes
    propose = jax.jit(draft.propose, static_argnames=("cfg", "tree"))
    extend = jax.jit(draft.extend, static_argnames="cfg")
    n_new = tree.depth + 1
    features = jnp.ones((head.feature_size, 1, n_new), head.dtype)
    tokens = jnp.ones((1, n_new), jnp.int32)
    count = jnp.full(1, n_new, jnp.int32)
    parts = [
        Part(
            f"draft extend, {n_new} tokens",
            lambda: extend(tied["draft"], state.draft, tokens, features, count, head),
            n_own - n_head,
        )
    ]
    for width in (1, 2, 4, 8):
        one, two = (
            dataclasses.replace(tree, width=width, depth=d, n_nodes=d + 1)
            for d in (1, 2)
        )
        for shape, n_bytes in ((one, n_head), (two, 2 * n_head + n_layer)):
            parts.append(
                Part(
                    f"propose, width {width}, {shape.depth} levels",
                    functools.partial(
                        propose, tied["draft"], state.draft, state.root, head, shape
                    ),
                    n_bytes,
                )
            )
    levels = (n_head + n_layer) * (tree.depth - 1) + n_head
    parts.append(
        Part(
            f"propose, width {tree.width}, depth {tree.depth}",
            lambda: propose(tied["draft"], state.draft, state.root, head, tree),
            levels,
        )
    )
    drafted = propose(tied["draft"], state.draft, state.root, head, tree)
    scores = jnp.ones((endless.vocab_size, 1, tree.n_nodes), jnp.float32)

    @jax.jit
    def judge(scores: jax.Array) -> Any:
        keys = decode.row_keys(0, 1)
        sampled = verify.sample(keys, scores, cfg.sampling)
        return verify.walk(drafted, sampled, tree.depth)

    parts.append(Part("verify walk", lambda: judge(scores), scores.nbytes))
    caches = [jax.tree.map(jnp.copy, state.target_cache) for _ in range(2)]
    commit = jax.jit(
        lambda cache, kv: cache_lib.append(cache, kv, count), donate_argnums=0
    )
    t = endless
    new = cache_lib.init(
        t.n_layers, 1, t.n_kv_heads, t.head_dim, n_new, t.dtype, t.stacked
    )
    pairs = tuple(map(cache_lib.KV, new.k, new.v))

    def write() -> Any:  # in place, again and again at the same slots
        caches[0] = commit(caches[0], pairs)
        caches[0] = caches[0]._replace(length=jnp.copy(state.target_cache.length))
        return caches[0]

    parts.append(Part("commit", write, sum(x.nbytes for x in jax.tree.leaves(pairs))))
    weights = _read_whole(setup.target_params)
    n_multiplied = _multiplied(setup.target_params)
    call, n_steps = looped(tied, cfg)
    parts.append(
        Part(
            f"whole step, {tree.n_nodes} nodes, in its loop",
            call,
            weights + levels + n_own,
            2.0 * tree.n_nodes * n_multiplied,
            n_steps,
        )
    )
    return parts


def training(setup: Setup) -> list[Part]:
    """One training step of an EAGLE-3 head, and the target's features for it."""
    cfg = setup.cfg.train
    head = variants.head_config(variants.parse("eagle3"), setup.cfg, setup.target_cfg)
    ids = jnp.arange(head.vocab_size, dtype=jnp.int32)
    update = train.optimiser(cfg, 100)
    shape = (cfg.rows, cfg.row_length)
    at = jnp.broadcast_to(jnp.arange(cfg.row_length, dtype=jnp.int32), shape)
    batch = Batch(at + 100, jnp.ones(shape, jnp.int32), at, jnp.ones(shape, bool))
    features = jax.jit(train.target_features, static_argnames=("cfg", "head"))
    step = jax.jit(
        train.train_step,
        static_argnames=("cfg", "train", "update"),
        donate_argnames="state",
    )
    key = jax.random.key(0)
    given: Features = features(setup.target_params, batch, setup.target_cfg, head)
    states = [
        train.init(key, setup.target_params, ids, head, setup.target_cfg, cfg, update)
    ]
    fixed = {"embed": setup.target_params["embed"], "draft_to_target": ids}

    def one_step() -> Any:
        states[0], metrics = step(
            key, states[0], fixed, setup.target_params, batch, given, head, cfg, update
        )
        return metrics

    n = cfg.rows * cfg.row_length
    layer = sum(leaf.size for leaf in jax.tree.leaves(states[0].params))
    layer -= states[0].params["head"].size
    t = setup.target_cfg
    n_embed = t.vocab_size * t.d_model
    # Its LM head is not run.
    body = _multiplied(setup.target_params) - n_embed
    teacher = 2.0 * n_embed
    scoring = 6.0 * states[0].params["head"].size * cfg.ttt_steps
    return [
        Part(
            f"features of {n} training tokens",
            lambda: features(setup.target_params, batch, setup.target_cfg, head),
            0,
            2.0 * body * n,
        ),
        Part(
            f"training step on {n} tokens",
            one_step,
            0,
            n * (6.0 * layer * cfg.ttt_steps + teacher + scoring),
        ),
    ]


def _read_whole(params: Params) -> int:
    """Bytes of a target that every step reads; an own embedding is looked up only."""
    looked_up = _bytes(params["embed"]) if "head" in params else 0
    return _bytes(params) - looked_up


def _multiplied(params: Params) -> int:
    """Numbers of a target that every token is multiplied with."""
    looked_up = params["embed"] if "head" in params else ()
    every, less = (
        sum(leaf.size for leaf in jax.tree.leaves(tree)) for tree in (params, looked_up)
    )
    return every - less


def _kv_bytes(state: decode.DecodeState, n_tokens: int) -> int:
    """Bytes of the keys and values of so many tokens."""
    k = state.target_cache.k
    return 2 * len(k) * int(np.prod(k[0].shape[:3])) * n_tokens * k[0].dtype.itemsize


def _bytes(params: Params) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(params))


def report(
    parts: list[Part],
    seconds: dict[str, list[float]],
    other: dict[str, float],
    precision: str,
) -> None:
    """Prints the table and appends one JSON line."""
    medians = {name: float(np.median(s)) for name, s in seconds.items()}
    reads = [p for p in parts if p.name.startswith("read: ")]
    bandwidth = max(p.n_bytes / medians[p.name] for p in reads)
    rate = max(
        p.flops / medians[p.name] for p in parts if p.name.startswith("matrix product")
    )
    table = Table(
        title=f"target {precision}; best reading kernel {bandwidth / 1e9:.1f} GB/s, "
        f"matrix product {rate / 1e9:.0f} GFLOP/s"
    )
    columns = ["part", "ms", "quartiles", "MB", "GFLOP", "limit ms", "limit / time"]
    for column in [*columns, *(["time / other"] if other else [])]:
        table.add_column(column, justify="left" if column == "part" else "right")
    lines = []
    for part in parts:
        low, high = np.quantile(seconds[part.name], [0.25, 0.75])
        limit = max(part.n_bytes / bandwidth, part.flops / rate)
        ratio = limit / medians[part.name]
        before = other.get(part.name)
        table.add_row(
            part.name,
            f"{medians[part.name] * 1e3:.2f}",
            f"{low * 1e3:.2f} - {high * 1e3:.2f}",
            f"{part.n_bytes / 1e6:.0f}",
            f"{part.flops / 1e9:.1f}",
            f"{limit * 1e3:.2f}",
            f"{ratio:.2f}",
            *(
                [f"{medians[part.name] / before:.2f}" if before else "-"]
                if other
                else []
            ),
        )
        lines.append(
            {
                "part": part.name,
                "seconds": medians[part.name],
                "quartiles": [float(low), float(high)],
                "bytes": part.n_bytes,
                "flops": part.flops,
                "limit_over_time": ratio,
            }
        )
    Console(width=None if Console().is_terminal else 120).print(table)
    row = {
        "experiment": "bench",
        "device": common.describe_device(),
        "jax": jax.__version__,
        "commit": common.commit(),
        "precision": precision,
        "rounds": FLAGS.rounds,
        "bytes_per_second": bandwidth,
        "flops_per_second": rate,
        "parts": lines,
    }
    path = Path(FLAGS.out) / "bench.jsonl"
    common.append_line(path, row)
    print(f"appended to {path}")


if __name__ == "__main__":
    common.run(main)

"""Where the time of a decoding step goes, against what the machine's memory allows.

    python -m experiments.bench                    (on a quiet machine)

Every part is timed in rounds, all parts once per round, so that a disturbance hits all of
them alike; medians are reported with the spread between quartiles.
"""

import dataclasses
import functools
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

from eagle_jax import decode, draft, target
from eagle_jax.config import DecodeConfig
from eagle_jax.layers import Params
from experiments import common, variants
from experiments.common import Setup

FLAGS = flags.FLAGS
flags.DEFINE_integer("rounds", 15, "Timed rounds.")
flags.DEFINE_integer("slots", 256, "Cache slots.")
flags.DEFINE_multi_integer("nodes", [1, 4, 8, 16, 32], "Tree sizes of target forwards.")


class Part(NamedTuple):
    """Something to time, and the bytes it must at least read (0: not stated)."""

    name: str
    call: Callable[[], Any]
    n_bytes: int
    per_call: int = 1  # steps inside one call


def main() -> None:
    setup = common.load_setup(common.load_config())
    print(f"device   {common.describe_device()}, jax {jax.__version__}")
    parts = [*reading_kernels(), *decoding(setup)]
    seconds: dict[str, list[float]] = {part.name: [] for part in parts}
    for part in parts:  # compile and warm up
        jax.block_until_ready(part.call())
    progress = common.Progress("round", FLAGS.rounds)
    for r in range(FLAGS.rounds):
        for part in parts:
            began = time.perf_counter()
            jax.block_until_ready(part.call())
            spent = time.perf_counter() - began
            seconds[part.name].append(spent / part.per_call)
        progress.show(r + 1)
    report(parts, seconds)


def reading_kernels() -> list[Part]:
    """Kernels that read 512 MB with all threads: the best of them is the bandwidth."""
    n_bytes = 512 * 2**20
    array = np.ones((2**17, 2**10), np.float32)
    assert array.nbytes == n_bytes
    vector = np.ones(2**10, np.float32)
    on_device, v = jnp.asarray(array), jnp.asarray(vector)
    total = jax.jit(jnp.sum)
    largest = jax.jit(jnp.max)
    product = jax.jit(jnp.dot)
    return [
        Part("read: BLAS matrix-vector", lambda: array @ vector, n_bytes),
        Part("read: XLA matrix-vector", lambda: product(on_device, v), n_bytes),
        Part("read: XLA sum", lambda: total(on_device), n_bytes),
        Part("read: XLA max", lambda: largest(on_device), n_bytes),
    ]


def decoding(setup: Setup) -> list[Part]:
    """The plain step inside its loop, target forwards by tree size, and drafting."""
    cfg = DecodeConfig(setup.target_cfg)
    # A target that never stops: every loop takes the same number of steps.
    endless = DecodeConfig(dataclasses.replace(setup.target_cfg, eos_ids=()))
    params = {"target": setup.target_params}
    weights = _bytes(setup.target_params)
    if "head" in setup.target_params:
        weights -= setup.target_params["embed"].nbytes  # looked up, not read whole
    prompt = list(range(100, 164))
    n_new = 33

    def fresh(params: Params, cfg: DecodeConfig) -> decode.DecodeState:
        return decode.start(params, [prompt], cfg, n_new, max_len=FLAGS.slots)

    def plain() -> Any:
        return decode.jit_loop(params, states.pop(), endless, n_new)[1]

    states = [fresh(params, endless) for _ in range(FLAGS.rounds + 1)]
    state = fresh(params, endless)
    kv = 2 * len(state.target_cache.k) * int(np.prod(state.target_cache.k[0].shape[:3]))
    used = kv * (len(prompt) + n_new // 2) * state.target_cache.k[0].itemsize
    parts = [Part("plain step, in its loop", plain, weights + used, n_new - 1)]
    forward = jax.jit(_forward, static_argnames="cfg")
    for n in FLAGS.nodes:
        tokens = jnp.arange(100, 100 + n, dtype=jnp.int32)[None]
        call = functools.partial(
            forward, setup.target_params, tokens, state.target_cache, cfg.target
        )
        parts.append(Part(f"target forward, {n} nodes", call, weights + used))
    head = variants.head_config(variants.parse("eagle3"), setup.cfg, setup.target_cfg)
    own = draft.init(jax.random.key(0), head, setup.target_cfg)
    own["draft_to_target"] = jnp.arange(head.vocab_size, dtype=jnp.int32)
    tied = {
        "target": setup.target_params,
        "draft": draft.tie(own, setup.target_params, head),
    }
    eagle = DecodeConfig(setup.target_cfg, head, setup.cfg.tree)
    primed = fresh(tied, eagle)
    propose = jax.jit(draft.propose, static_argnames=("cfg", "tree"))
    tree = setup.cfg.tree
    n_own = _bytes(own)
    levels = n_own * (tree.depth - 1) + own["head"].nbytes
    parts.append(
        Part(
            f"propose, width {tree.width}, depth {tree.depth}",
            lambda: propose(tied["draft"], primed.draft, primed.root, head, tree),
            levels,
        )
    )
    return parts


def _forward(params: Params, tokens: jax.Array, cache: Any, cfg: Any) -> jax.Array:
    """A target forward over nodes that all see each other, down to the argmax."""
    n = tokens.shape[1]
    positions = cache.length[:, None] + jnp.arange(n)[None]
    mask = jnp.tril(jnp.ones((1, n, n), bool))
    out = target.forward(params, tokens, positions, mask, cache, cfg)
    return jnp.argmax(target.logits(params, out.top), axis=0)


def _bytes(params: Params) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(params))


def report(parts: list[Part], seconds: dict[str, list[float]]) -> None:
    """Prints the table and appends one JSON line."""
    medians = {name: float(np.median(s)) for name, s in seconds.items()}
    reads = [p for p in parts if p.name.startswith("read: ")]
    bandwidth = max(p.n_bytes / medians[p.name] for p in reads)
    table = Table(title=f"best reading kernel {bandwidth / 1e9:.1f} GB/s")
    for column in ("part", "ms", "quartiles", "MB to read", "limit ms", "limit / time"):
        table.add_column(column, justify="left" if column == "part" else "right")
    lines = []
    for part in parts:
        low, high = np.quantile(seconds[part.name], [0.25, 0.75])
        limit = part.n_bytes / bandwidth
        ratio = limit / medians[part.name]
        table.add_row(
            part.name,
            f"{medians[part.name] * 1e3:.2f}",
            f"{low * 1e3:.2f} - {high * 1e3:.2f}",
            f"{part.n_bytes / 1e6:.0f}",
            f"{limit * 1e3:.2f}",
            f"{ratio:.2f}",
        )
        lines.append(
            {
                "part": part.name,
                "seconds": medians[part.name],
                "quartiles": [float(low), float(high)],
                "bytes": part.n_bytes,
                "limit_over_time": ratio,
            }
        )
    Console(width=None if Console().is_terminal else 120).print(table)
    row = {
        "experiment": "bench",
        "device": common.describe_device(),
        "jax": jax.__version__,
        "commit": common.commit(),
        "slots": FLAGS.slots,
        "rounds": FLAGS.rounds,
        "bytes_per_second": bandwidth,
        "parts": lines,
    }
    path = Path(FLAGS.out) / "bench.jsonl"
    common.append_line(path, row)
    print(f"appended to {path}")


if __name__ == "__main__":
    common.run(main)

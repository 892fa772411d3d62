"""Compiles the steps of a config for a TPU slice, on a machine that has no TPU.

    pip install -e '.[tpu]'
    python -m experiments.compile_tpu --config=configs/llama31_8b.py --topology=v5e:2x4

Nothing is allocated: weights are shapes. What the compiler says about memory and about the
structure of the programs can be trusted. Its bytes and times cannot: a scanned layer is
counted once, prefetches several times over. So times are predicted by `roofline`, our own
count of what a pass must read, compute and exchange, printed beside the compiler's.
"""

import collections
import csv
import dataclasses
import math
import os
import re
import time
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from absl import flags
from jax.experimental import topologies
from jax.sharding import Mesh
from rich.console import Console
from rich.table import Table

from configs.papers import PaperTarget
from eagle_jax import (
    cache,
    decode,
    draft,
    layers,
    sharding,
    target,
    train,
    tree,
    verify,
)
from eagle_jax.config import Config, DecodeConfig, DraftConfig, TargetConfig, TreeConfig
from eagle_jax.decode import DecodeState
from eagle_jax.layers import Params
from eagle_jax.train import Batch
from eagle_jax.tree import Tree
from experiments import common, trainer, variants

FLAGS = flags.FLAGS
flags.DEFINE_list("topology", ["v5e:2x4"], "Slices: v5e, v5p or v6e, and a shape.")
flags.DEFINE_integer("batch", 1, "Rows decoded together.", allow_override=True)
flags.DEFINE_integer("slots", 2048, "Cache slots per row.")
flags.DEFINE_integer("used", 0, "Slots in use when a step is counted; 0: all.")
flags.DEFINE_list("parts", [], "Programs to compile (PARTS), or none; default: all.")
flags.DEFINE_string(
    "result_file", "experiments/results/compile_tpu.jsonl", "Where the JSON line goes."
)

PARTS = ("plain step", "propose", "verify", "step", "features", "train")
# A method of the papers: its variant here, and the depth of its tree (0: the config's).
METHODS = {"EAGLE": ("eagle1", 0), "EAGLE-2": ("eagle2", 6), "EAGLE-3": ("eagle3", 8)}
TAUS = common.ROOT / "experiments" / "data" / "paper_tau.csv"


class Chip(NamedTuple):
    """One chip, from its public specification sheet.

    Args:
      ici: bytes per second out of a chip over all its links.
      runtime: what the TPU runtime calls a machine of such chips.
    """

    hbm: float
    bandwidth: float
    flops: float
    ici: float
    runtime: str


CHIPS = {
    "v5e": Chip(16 * 2**30, 819e9, 197e12, 200e9, "v5litepod-8"),
    "v5p": Chip(95 * 2**30, 2765e9, 459e12, 600e9, "v5p-8"),
    "v6e": Chip(32 * 2**30, 1638e9, 918e12, 400e9, "v6e-8"),
}
# Assumed, and the first thing to measure on a real slice: start-up time of one exchange
# between the chips. It matters where weights per chip are small.
EXCHANGE_SECONDS = 5e-6


def main() -> None:
    for topology in FLAGS.topology:
        if topology.partition(":")[0] not in CHIPS:
            raise ValueError(
                f"--topology must start with one of {', '.join(CHIPS)}, such as v5e:2x4; "
                f"got {topology!r}"
            )
    wrong = [part for part in FLAGS.parts if part not in (*PARTS, "none")]
    if wrong:
        raise ValueError(f"no part {wrong[0]!r}; there are {', '.join(PARTS)} and none")
    cfg, published = common.load_config(), target_of(common.config_module(FLAGS.config))
    for topology in FLAGS.topology:
        look_at(cfg, published, topology)


def look_at(cfg: Config, published: PaperTarget, topology: str) -> None:
    """Compiles and counts for one slice; prints tables, appends one line."""
    chip = CHIPS[topology.partition(":")[0]]
    devices = slice_devices(topology, chip)
    # One prompt at a time gains from `model` alone, and weights need the room.
    mesh = sharding.make_mesh(FLAGS.mesh or f"model:{len(devices)}", devices)
    t = dataclasses.replace(
        sharding.padded(published.sizes, mesh.shape["model"]),
        stacked=cfg.stacked,
        dtype=cfg.dtype,
    )
    added = t.n_heads - published.sizes.n_heads
    run = Run(cfg, t, mesh, FLAGS.batch, FLAGS.slots, FLAGS.used)
    resident = resident_bytes(run)
    print(
        f"slice    {topology}, {len(devices)} chips of {chip.hbm / 2**30:.0f} GiB\n"
        f"mesh     {sharding.describe(mesh)}"
        + (f"; {added} heads of zeros added to {published.sizes.n_heads}" * bool(added))
        + f"\ntarget   {t.name}; weights and caches take {resident / 2**30:.2f} GiB a chip"
    )
    rows = []
    for part, work in count(run).items():
        counted = {"part": part, "fits": resident < chip.hbm} | roofline(work, chip)
        if part in (FLAGS.parts or PARTS):
            counted |= compile_part(run, part, chip)
        rows.append(counted)
    print_parts(rows, chip)
    speedups = predict(run, published, chip)
    print_speedups(speedups)
    row = {
        "experiment": "compile_tpu",
        "target": t.name,
        "topology": topology,
        "mesh": dict(mesh.shape),
        "batch": FLAGS.batch,
        "slots": FLAGS.slots,
        "used": FLAGS.used or FLAGS.slots,
        "config": dataclasses.asdict(cfg),
        "jax": jax.__version__,
        "commit": common.commit(),
        "hbm_bytes": chip.hbm,
        "resident_bytes": resident,
        "exchange_seconds_assumed": EXCHANGE_SECONDS,
        "parts": rows,
        "predicted": speedups,
    }
    common.append_line(Path(FLAGS.result_file), row)
    print(f"appended to {FLAGS.result_file}")


def target_of(module: ModuleType) -> PaperTarget:
    """Returns the sizes a config file hands out, since weights are never read."""
    if not hasattr(module, "TARGET"):
        raise ValueError(
            f"--config={FLAGS.config} has no TARGET with the sizes of its target; "
            f"configs/llama31_8b.py shows one"
        )
    return module.TARGET


def slice_devices(topology: str, chip: Chip) -> list[Any]:
    """Returns the chips of a slice that is not there.

    Raises:
      ValueError: libtpu is not installed, or knows no such slice.
    """
    os.environ |= {
        "TPU_SKIP_MDS_QUERY": "1",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # nothing is run: processes need not take turns
        "TPU_ACCELERATOR_TYPE": chip.runtime,
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_WORKER_ID": "0",
        "TPU_MIN_LOG_LEVEL": "3",
        "TPU_STDERR_LOG_LEVEL": "3",
        "TPU_LOG_DIR": "disabled",
    }
    jax.config.update("jax_platforms", "cpu")
    try:
        return list(topologies.get_topology_desc(topology, platform="tpu").devices)
    except Exception as fault:  # jax and libtpu raise many kinds
        raise ValueError(
            f"no TPU compiler for --topology={topology}; is libtpu there (pip install "
            f"-e '.[tpu]') and the shape one of this generation's? {fault}"
        ) from fault


class Run(NamedTuple):
    """What is compiled: sizes, on which mesh, for how many rows and slots.

    Args:
      used: slots in use when a step is counted; 0: all.
    """

    cfg: Config
    target: TargetConfig
    mesh: Mesh
    rows: int
    slots: int
    used: int = 0

    def decode_config(self, method: str) -> DecodeConfig:
        """Returns head and tree of a method of the papers."""
        name, depth = METHODS[method]
        variant = variants.parse(name)
        head = variants.head_config(variant, self.cfg, self.target)
        head = dataclasses.replace(head, dtype=self.target.dtype)
        head = sharding.padded(head, self.mesh.shape["model"])
        shape = variants.tree_of(variant, self.cfg)
        if depth:
            shape = dataclasses.replace(shape, depth=depth)
        return DecodeConfig(self.target, head, shape)

    def abstract(self, value: Any, fsdp: bool = False) -> Any:
        """Returns shapes with their placement."""
        where = sharding.shardings(value, self.mesh, fsdp)

        def one(leaf: Any, place: Any) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place)

        return jax.tree.map(one, value, where)

    def params(self, head: DraftConfig) -> Params:
        """Returns the shapes of target and draft."""

        def make() -> Params:
            key = jax.random.key(0)
            own = target.init(key, self.target)
            if self.cfg.quantise == "int8":
                own = layers.quantise(own)
            head_params = draft.init(key, head, self.target)
            if head.vocab_size < self.target.vocab_size:
                head_params["draft_to_target"] = jnp.zeros(head.vocab_size, jnp.int32)
            return {"target": own, "draft": draft.tie(head_params, own, head)}

        return self.abstract(jax.eval_shape(make))

    def state(self, cfg: DecodeConfig) -> DecodeState:
        """Returns the shapes of a decoding state."""
        keys = decode.row_keys(0, self.rows)
        return self.abstract(
            jax.eval_shape(lambda: decode.empty(keys, cfg, self.slots))
        )


def lower(run: Run, part: str) -> Any:
    """Lowers one program for the slice."""
    cfg = run.decode_config("EAGLE-3")
    params = run.params(cfg.draft)
    if part == "plain step":
        plain = DecodeConfig(cfg.target)
        own = {"target": params["target"]}
        return decode.jit_step.lower(own, run.state(plain), plain)
    state = run.state(cfg)
    if part == "step":
        return decode.jit_step.lower(params, state, cfg)
    if part == "propose":
        propose = jax.jit(draft.propose, static_argnames=("cfg", "tree"))
        return propose.lower(
            params["draft"], state.draft, state.root, cfg.draft, cfg.tree
        )
    if part == "verify":
        size = (run.rows, cfg.tree.n_nodes)
        drafted = Tree(*_shapes(size, *(jnp.int32,) * 3, jnp.float32))
        return jax.jit(_verify, static_argnames="cfg").lower(
            params, state, drafted, cfg
        )
    return _lower_training(run, part)


def _shapes(size: tuple[int, ...], *dtypes: Any) -> list[Any]:
    return [jax.ShapeDtypeStruct(size, dtype) for dtype in dtypes]


def _verify(
    params: Params, state: DecodeState, drafted: Tree, cfg: DecodeConfig
) -> Any:
    """The middle of `decode.step`: target pass over the tree, and the walk."""
    mask = tree.ancestors(drafted.parents, cfg.tree.depth)
    past = state.target_cache
    positions = past.length[:, None] + drafted.depths
    out = target.forward(
        params["target"], drafted.tokens, positions, mask, past, cfg.target
    )
    logits = target.logits(params["target"], out.top)
    sampled = verify.sample(state.keys, logits, cfg.sampling)
    return verify.walk(drafted, sampled, cfg.tree.depth), out.taps, out.new


def _lower_training(run: Run, part: str) -> Any:
    settings, t = run.cfg.train, run.target
    head = variants.head_config(variants.parse("eagle3"), run.cfg, t)
    params = run.params(head)
    size = (settings.rows, settings.row_length)
    batch = run.abstract(Batch(*_shapes(size, *(jnp.int32,) * 3, jnp.bool_)))
    given = jax.eval_shape(
        lambda p, b: train.target_features(p, b, t, head), params["target"], batch
    )
    if part == "features":
        features = jax.jit(train.target_features, static_argnames=("cfg", "head"))
        return features.lower(params["target"], batch, t, head)
    update = train.optimiser(settings, 1000)
    key, ids = jax.random.key(0), jnp.zeros(head.vocab_size, jnp.int32)
    state = jax.eval_shape(
        lambda p: train.init(key, p, ids, head, t, settings, update), params["target"]
    )
    return trainer.jit_train_step.lower(
        key,
        run.abstract(state, fsdp=True),
        run.abstract({"embed": params["target"]["embed"], "draft_to_target": ids}),
        params["target"],
        batch,
        run.abstract(given),
        head,
        settings,
        update,
        True,
    )


def compile_part(run: Run, part: str, chip: Chip) -> dict[str, Any]:
    """Compiles one program; one that does not fit is a result."""
    print(f"compiling {part}", flush=True)
    began = time.monotonic()
    row: dict[str, Any] = {"part": part, "fits": True}
    try:
        compiled = lower(run, part).compile()
    except jax.errors.JaxRuntimeError as fault:
        if "RESOURCE_EXHAUSTED" not in str(fault):
            raise
        used = re.search(r"Used ([\d.]+)([KMG]) of", str(fault))
        scale = {"K": 2**10, "M": 2**20, "G": 2**30}
        row["fits"] = False
        row["fault"] = " ".join(str(fault).split())[:300]
        row["bytes_per_chip"] = float(used[1]) * scale[used[2]] if used else None
        row["compile_seconds"] = time.monotonic() - began
        return row
    memory, cost = compiled.memory_analysis(), compiled.cost_analysis()
    n_bytes = (
        memory.argument_size_in_bytes
        + memory.output_size_in_bytes
        - memory.alias_size_in_bytes
        + memory.temp_size_in_bytes
        + memory.generated_code_size_in_bytes
    )
    seconds = cost.get("optimal_seconds", 0.0)
    kinds = "all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter"
    found = re.findall(rf"= .*? ({kinds})(?:-start)?\(", compiled.as_text())
    return row | {
        "fits": n_bytes <= chip.hbm,
        "bytes_per_chip": n_bytes,
        "temporary_bytes": memory.temp_size_in_bytes,
        "compiler_flops": cost.get("flops"),
        "compiler_bytes": cost.get("bytes accessed"),
        # It takes off a second for every loop or sort it cannot tell.
        "compiler_seconds": seconds if seconds > 0 else None,
        "collectives": dict(collections.Counter(found)),
        "compile_seconds": time.monotonic() - began,
    }


class Work(NamedTuple):
    """What one chip must do in one or several passes, one after the other.

    Args:
      n_bytes: read from memory: weights once per pass, and the cache as far as it is read.
      flops: of matrix products.
      n_exchanges, exchanged: sums over the model axis, and the bytes of each added up.
    """

    n_bytes: float
    flops: float
    n_exchanges: float
    exchanged: float

    def __add__(self, other: "Work") -> "Work":  # type: ignore[override]
        return Work(*(a + b for a, b in zip(self, other, strict=True)))

    def __mul__(self, n: float) -> "Work":  # type: ignore[override]
        return Work(*(n * a for a in self))


def count(run: Run, method: str = "EAGLE-3") -> dict[str, Work]:
    """Counts by hand what each program must do per chip."""
    cfg = run.decode_config(method)
    used = run.used or run.slots
    n_read = run.slots
    if run.target.stacked:
        n_read = next(n for n in cache.prefixes(run.slots) if n >= used)
    head, shape, settings = cfg.draft, cfg.tree, run.cfg.train
    params = run.params(head)
    t, mesh = run.target, run.mesh
    n_model, n_data = mesh.shape["model"], mesh.shape["data"]
    rows = run.rows // n_data if run.rows % n_data == 0 else run.rows
    itemsize = jnp.dtype(t.dtype).itemsize
    own = dict(params["draft"])
    embedding = own.pop("embed")
    lm_head = {"head": own.pop("head")}
    own.pop("draft_to_target", None)
    reading = {name: own.pop(name) for name in ("fuse",) if name in own}
    everything = dict(params["target"])
    if not t.tied:
        everything.pop("embed")

    def one_pass(weights: Any, n_tokens: float, n_sums: int, width: int) -> Work:
        n_weights = _per_chip(weights)
        sums = n_sums if n_model > 1 else 0
        return Work(
            n_bytes=_bytes_per_chip(weights),
            flops=2 * n_weights * n_tokens,
            n_exchanges=sums,
            exchanged=sums * width * n_tokens * itemsize,
        )

    def attend(
        c: Any, n_layers: int, n_tokens: float, n_seen: int, rows: float
    ) -> Work:
        divides = c.n_kv_heads % n_model == 0
        per_chip = n_layers / (n_model if divides else 1) * rows * n_seen * c.head_dim
        return Work(
            n_bytes=2 * per_chip * c.n_kv_heads * itemsize,
            flops=4 * per_chip * c.n_heads * n_tokens,
            n_exchanges=0,
            exchanged=0,
        )

    def target_pass(n_tokens: int) -> Work:
        weights = one_pass(everything, rows * n_tokens, 2 * t.n_layers + 1, t.d_model)
        return weights + attend(t, t.n_layers, n_tokens, n_read, rows)

    def draft_level(n_tokens: float) -> Work:
        # Embedding, attention and MLP (EAGLE-1: and `fc`) are summed; the vocabulary
        # takes two sums and the largest of each part.
        n_sums = 4 if head.head == "eagle1" else 3
        layer = one_pass(own, rows * n_tokens, n_sums, head.d_model)
        return layer + attend(head, 1, n_tokens, run.slots, rows)

    def scores(n_tokens: float) -> Work:
        return one_pass(lm_head, rows * n_tokens, 4, 2 * shape.width)

    wide = shape.width if shape.kind == "dynamic" else _inner_nodes(shape)
    propose = scores(1) + (draft_level(wide) + scores(wide)) * (shape.depth - 1)
    extend = one_pass(reading, rows * (shape.depth + 1), len(reading), head.d_model)
    extend += draft_level(shape.depth + 1)
    n_places = settings.rows * settings.row_length
    local = n_places / (n_data if settings.rows % n_data == 0 else 1)
    layer = _per_chip(own) + _per_chip(reading)
    seen = settings.row_length / 2
    learn = 6.0 * settings.ttt_steps * (layer + _per_chip(lm_head)) * local
    teacher = {"head": params["target"].get("head", embedding)}
    verify_work = target_pass(shape.n_nodes)
    return {
        "plain step": target_pass(1),
        "propose": propose,
        "verify": verify_work,
        "step": propose + verify_work + extend,
        "features": one_pass(everything, local, 2 * t.n_layers + 1, t.d_model)
        + attend(t, t.n_layers, local, int(seen), 1),
        "train": Work(
            n_bytes=_per_chip(lm_head) * itemsize * 3 * settings.ttt_steps,
            flops=learn + 2.0 * _per_chip(teacher) * local,
            n_exchanges=0,
            exchanged=0,
        ),
    }


def resident_bytes(run: Run) -> float:
    """Returns what weights and caches of EAGLE-3 take per chip."""
    cfg = run.decode_config("EAGLE-3")
    params, state = run.params(cfg.draft), run.state(cfg)
    params["draft"].pop("embed")  # the target's
    caches = [both[:2] for both in (state.target_cache, state.draft.cache)]
    return _bytes_per_chip((params, caches))


def _bytes_per_chip(leaves: Any) -> float:
    return float(
        sum(
            math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
            for x in jax.tree.leaves(leaves)
        )
    )


def _per_chip(tree: Any) -> float:
    """Returns how many numbers of some leaves one chip holds."""
    leaves = jax.tree.leaves(tree)
    return float(sum(math.prod(x.sharding.shard_shape(x.shape)) for x in leaves))


def _inner_nodes(shape: TreeConfig) -> float:
    """Returns the mean number of nodes a static tree expands per level."""
    inner = {path[:-1] for path in shape.paths} - {()}
    return len(inner) / max(shape.depth - 1, 1)


def roofline(work: Work, chip: Chip) -> dict[str, Any]:
    """Returns the least time of a pass, and what it was made from.

    A sum over chips moves its bytes twice (reduce, then gather), over half of the links.
    """
    exchange = work.n_exchanges * EXCHANGE_SECONDS
    exchange += 2 * work.exchanged / (chip.ici / 2)
    reading, computing = work.n_bytes / chip.bandwidth, work.flops / chip.flops
    return {
        "counted_bytes": work.n_bytes,
        "counted_flops": work.flops,
        "counted_exchanges": work.n_exchanges,
        "exchange_seconds": exchange,
        "seconds": max(reading, computing) + exchange,
        "limit": "memory" if reading > computing else "compute",
    }


def predict(run: Run, published: PaperTarget, chip: Chip) -> list[dict[str, Any]]:
    """Returns the speedup that each tau of the papers would give at these times."""
    with TAUS.open() as file:
        taus = [
            row for row in csv.DictReader(file) if row["target"] in published.papers
        ]
    times = {}
    for method in METHODS:
        work = count(run, method)
        plain, step = (
            roofline(work[part], chip)["seconds"] for part in ("plain step", "step")
        )
        times[method] = plain, step
    rows = []
    for row in taus:
        plain, step = times[row["method"]]
        tau = float(row["tau"])
        rows.append(
            {
                **{key: row[key] for key in ("source", "method", "target", "task")},
                "temperature": int(row["temperature"]),
                "tau": tau,
                "step_over_plain": step / plain,
                "speedup": tau * plain / step,
                "tokens_per_second": tau / step,
            }
        )
    return rows


def print_parts(rows: list[dict[str, Any]], chip: Chip) -> None:
    """Prints what was compiled, per chip."""
    table = Table(title=f"per chip, {chip.hbm / 2**30:.0f} GiB of memory")
    for column in ("part", "memory GiB", "fits", "limit", "roofline ms", "compiler ms"):
        table.add_column(column, justify="left" if column == "part" else "right")
    for column in ("GB read", "compiler GB", "GFLOP", "compiler GFLOP", "collectives"):
        table.add_column(column, justify="right")
    for row in rows:
        found = row.get("collectives") or {}
        table.add_row(
            row["part"],
            _scaled(row.get("bytes_per_chip"), 2**30),
            "yes" if row["fits"] else "does not fit",
            row["limit"],
            _scaled(row["seconds"], 1e-3),
            _scaled(row.get("compiler_seconds"), 1e-3),
            _scaled(row["counted_bytes"], 1e9),
            _scaled(row.get("compiler_bytes"), 1e9),
            _scaled(row["counted_flops"], 1e9, 0),
            _scaled(row.get("compiler_flops"), 1e9, 0),
            "\n".join(f"{n} {kind}" for kind, n in found.items()) or "-",
        )
    Console(width=None if Console().is_terminal else 150).print(table)
    print(
        "roofline: our count; its GB and GFLOP are what a pass must read and compute, "
        f"with {EXCHANGE_SECONDS * 1e6:.0f} us assumed per exchange.\ncompiler: its own "
        "figures; a scanned layer is counted once, so they are too low here. A part that "
        "was not compiled\nfits if weights and caches do."
    )


def _scaled(x: float | None, unit: float, digits: int = 2) -> str:
    return "-" if x is None else f"{x / unit:.{digits}f}"


def print_speedups(rows: list[dict[str, Any]]) -> None:
    """Prints the predicted speedup of every tau of the papers for this target."""
    table = Table(title="predicted from the papers' tau, batch and slots as above")
    for column in ("method", "target", "T", "task", "tau", "step / plain", "speedup"):
        table.add_column(column, justify="left" if column == "method" else "right")
    for row in rows:
        table.add_row(
            row["method"],
            row["target"],
            str(row["temperature"]),
            row["task"],
            f"{row['tau']:.2f}",
            f"{row['step_over_plain']:.2f}",
            f"{row['speedup']:.2f}",
        )
    Console(width=None if Console().is_terminal else 150).print(table)


if __name__ == "__main__":
    common.run(main)

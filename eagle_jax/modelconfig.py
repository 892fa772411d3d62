"""The sizes of a target, from the config.json of a folder or the metadata of a GGUF file.

What a config asks for and `target` does not compute is refused by name, all of it in one
message: a silently ignored switch would make another model.
"""

import dataclasses
import math
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from eagle_jax import jsonfile, layers
from eagle_jax.config import RopeScaling, TargetConfig
from eagle_jax.tensorfile import Gguf, Stored

MODEL_TYPES = ("llama", "mistral", "mixtral", "qwen2", "qwen3", "gemma")
GGUF_ARCHITECTURES = ("llama", "qwen2", "qwen3")
SCALINGS = ("llama3", "linear", "dynamic")
# Old Gemma files say "gelu" and mean the other (transformers configuration_gemma.py).
GELUS = ("gelu_pytorch_tanh", "gelu")
# Settings of generation_config.json that say nothing about which token comes next.
NEUTRAL = """eos_token_id bos_token_id pad_token_id transformers_version max_length
use_cache output_attentions output_hidden_states output_scores output_logits
return_dict_in_generate""".split()


class _Source(NamedTuple):
    """Settings of one file, and what is wrong with them so far."""

    file: Path
    values: dict[str, Any]
    faults: list[str]

    def whole(self, key: str, default: int | None = None) -> int:
        """Returns a size, 1 where there is none (a fault then stops the load)."""
        value = default if self.values.get(key) is None else self.values[key]
        if value is None:
            self.faults.append(f"it lacks {key}")
        elif type(value) is not int or not 0 < value < 1 << 31:
            self.faults.append(f"{key}={value!r:.40} is no size")
        else:
            return value
        return 1

    def real(self, key: str, default: float | None = None) -> float:
        value = default if self.values.get(key) is None else self.values[key]
        if value is None:
            self.faults.append(f"it lacks {key}")
        elif type(value) not in (int, float) or not 0 < value < math.inf:
            self.faults.append(f"{key}={value!r:.40} is no positive number")
        else:
            return float(value)
        return 1.0

    def refuse(self, **settings: bool) -> None:
        """Faults the settings whose value here is not supported."""
        for key, is_bad in settings.items():
            if is_bad:
                value = self.values.get(key)
                self.faults.append(f"{key}={value!r:.80} is not supported")

    def check(self) -> None:
        if self.faults:
            raise ValueError(f"{self.file} cannot be used: {'; '.join(self.faults)}")


def from_folder(path: Path, dtype: str, taps: tuple[int, ...]) -> TargetConfig:
    """Reads config.json, and the end tokens of generation_config.json.

    Raises:
      ValueError: no such file, or settings that are missing, wrong or not supported.
    """
    file = path / "config.json"
    if not file.is_file():
        raise ValueError(
            f"{path} is neither a .gguf file nor a folder with config.json"
        )
    s = _Source(file, jsonfile.read_object(file), [])
    c, kind = s.values, s.values.get("model_type")
    if kind not in MODEL_TYPES:
        s.faults.append(
            f"model_type {kind!r:.40} is not supported; use one of "
            f"{', '.join(MODEL_TYPES)}"
        )
    n_layers, n_heads = s.whole("num_hidden_layers"), s.whole("num_attention_heads")
    d_model, is_moe = s.whole("hidden_size"), kind == "mixtral"
    is_gemma = kind == "gemma"
    activations = GELUS if is_gemma else ("silu",)
    length = s.whole("max_position_embeddings", 2048)
    s.refuse(
        hidden_act=c.get("hidden_act", activations[0]) not in activations,
        hidden_activation=c.get("hidden_activation") not in (None, activations[0]),
        use_bidirectional_attention=bool(c.get("use_bidirectional_attention")),
        quantization_config=bool(c.get("quantization_config")),
        partial_rotary_factor=c.get("partial_rotary_factor", 1) != 1,
        attention_bias=bool(c.get("attention_bias")),  # of the output projection too
        mlp_bias=bool(c.get("mlp_bias")),
    )
    window = _window(s, n_layers)
    theta, scaling = _rope(s, length)
    n_experts = s.whole("num_local_experts", 8) if is_moe else 0
    n_used = s.whole("num_experts_per_tok", 2) if is_moe else 0
    if n_used > n_experts:
        s.faults.append(f"num_experts_per_tok={n_used} of {n_experts} experts")
    generation, ends = path / "generation_config.json", None
    if generation.is_file():
        ends = jsonfile.read_object(generation).get("eos_token_id")
    name = c.get("_name_or_path")
    return _config(
        s,
        dtype=dtype,
        taps=taps,
        name=name if name and isinstance(name, str) else path.resolve().name,
        vocab_size=s.whole("vocab_size"),
        d_model=d_model,
        d_mlp=s.whole("intermediate_size"),
        n_layers=n_layers,
        n_heads=n_heads,
        n_kv_heads=s.whole("num_key_value_heads", n_heads),
        head_dim=s.whole("head_dim", 256 if is_gemma else d_model // n_heads),
        norm_eps=s.real("rms_norm_eps", 1e-6),
        rope_theta=theta,
        rope_scaling=scaling,
        max_position=length,
        sliding_window=window if window < length else 0,
        activation="gelu_tanh" if is_gemma else "silu",
        embed_scale=d_model**0.5 if is_gemma else 1.0,
        tied=bool(c.get("tie_word_embeddings", is_gemma)),
        qkv_bias=kind == "qwen2",
        qk_norm=kind == "qwen3",
        n_experts=n_experts,
        n_experts_used=n_used,
        eos_ids=_ids(s, c.get("eos_token_id") if ends is None else ends),
    )


def ignored_settings(path: Path) -> list[str]:
    """Lists what a folder's generation_config.json asks for and nothing here follows.

    The sampling settings of a run come from its own config; only end tokens are taken.
    """
    file = path / "generation_config.json"
    found = jsonfile.read_object(file) if file.is_file() else {}
    return [
        f"{key}={value!r:.40}"
        for key, value in found.items()
        if key not in NEUTRAL and key[0] != "_" and value is not None
    ]


def _config(s: _Source, **fields: Any) -> TargetConfig:
    s.check()
    try:
        return TargetConfig(**fields)
    except ValueError as err:
        raise ValueError(f"{s.file} cannot be used: {err}") from err


def _window(s: _Source, n_layers: int) -> int:
    """Returns how many tokens each layer looks back on, itself included; 0 is all."""
    c = s.values
    asked, kinds, first = c.get("sliding_window") is not None, None, 0
    if c.get("model_type") not in ("mistral", "mixtral"):
        asked = asked and bool(c.get("use_sliding_window"))
        kinds, first = c.get("layer_types"), c.get("max_window_layers", 28)
    if kinds:
        full = _all(kinds, "full_attention")
        windowed = asked and _all(kinds, "sliding_attention")
    else:
        full = not asked or (type(first) is int and first >= n_layers)
        windowed = first == 0
    if full:
        return 0
    if not windowed:  # in some layers only
        s.refuse(layer_types=bool(kinds), max_window_layers=not kinds)
    return s.whole("sliding_window")


def _all(kinds: Any, kind: str) -> bool:
    return isinstance(kinds, list) and all(k == kind for k in kinds)


def _rope(s: _Source, length: int) -> tuple[float, RopeScaling | None]:
    rope = s.values.get("rope_parameters") or s.values.get("rope_scaling") or {}
    if not isinstance(rope, dict):
        s.faults.append(f"rope_scaling={rope!r:.40} is no object")
        return 1.0, None
    r = s._replace(values={"rope_theta": s.values.get("rope_theta")} | rope)
    r.refuse(partial_rotary_factor=rope.get("partial_rotary_factor", 1) != 1)
    theta = r.real("rope_theta", 10000.0)
    kind = rope.get("rope_type", rope.get("type")) or "default"
    if kind == "default":
        return theta, None
    if kind not in SCALINGS:
        s.faults.append(f"rope_type={kind!r:.40} is not supported")
        return theta, None
    scaling = RopeScaling(
        kind,
        r.real("factor"),
        original_length=r.whole("original_max_position_embeddings", length),
    )
    if kind == "llama3":
        low, high = r.real("low_freq_factor"), r.real("high_freq_factor")
        if low >= high and not s.faults:
            s.faults.append(f"low_freq_factor={low} is not below {high}")
        scaling = dataclasses.replace(
            scaling, low_freq_factor=low, high_freq_factor=high
        )
    return theta, scaling


def _ids(s: _Source, found: Any) -> tuple[int, ...]:
    ids = [] if found is None else found if isinstance(found, list) else [found]
    if not all(type(i) is int and 0 <= i < 1 << 31 for i in ids):
        s.faults.append(f"eos_token_id={found!r:.40} are no token ids")
        return ()
    return tuple(dict.fromkeys(ids))


def from_gguf(
    path: Path, gguf: Gguf, dtype: str, taps: tuple[int, ...]
) -> TargetConfig:
    """Reads the metadata of a GGUF file.

    Raises:
      ValueError: settings that are missing, wrong or not supported.
    """
    fields, tensors = gguf.fields, gguf.tensors
    arch = fields.get("general.architecture")
    if arch not in GGUF_ARCHITECTURES:
        raise ValueError(
            f"{path}: architecture {arch!r:.40} is not supported; use one of "
            f"{', '.join(GGUF_ARCHITECTURES)}"
        )
    if "token_embd.weight" not in tensors:
        raise ValueError(
            f"{path} lacks token_embd.weight; is it a vocabulary-only file?"
        )
    f = {key.removeprefix(f"{arch}."): value for key, value in fields.items()}
    s = _Source(path, f, [])
    length, d_model = s.whole("context_length"), s.whole("embedding_length")
    n_heads = s.whole("attention.head_count")
    head_dim = s.whole("attention.key_length", d_model // n_heads)
    window = f.get("attention.sliding_window") or length
    s.refuse(
        **{
            "split.count": f.get("split.count", 1) not in (0, 1),
            "expert_count": f.get("expert_count", 0) != 0,
            "rope.dimension_count": f.get("rope.dimension_count", head_dim) != head_dim,
            "attention.value_length": f.get("attention.value_length", head_dim)
            != head_dim,
            "rope.scaling.type": f.get("rope.scaling.type", "none")
            not in ("none", "linear"),
        }
    )
    theta, scaling = s.real("rope.freq_base", 10000.0), None
    if f.get("rope.scaling.type") == "linear":
        scaling = RopeScaling("linear", s.real("rope.scaling.factor"))
    if "rope_freqs.weight" in tensors and not s.faults:
        scaling = _llama3_scaling(path, tensors["rope_freqs.weight"], head_dim, theta)
    ends = [f.get(f"tokenizer.ggml.{end}_token_id") for end in ("eos", "eot")]
    return _config(
        s,
        dtype=dtype,
        taps=taps,
        name=path.stem,  # general.name of converted files is often a training run's
        vocab_size=tensors["token_embd.weight"].shape[0],
        d_model=d_model,
        d_mlp=s.whole("feed_forward_length"),
        n_layers=s.whole("block_count"),
        n_heads=n_heads,
        n_kv_heads=s.whole("attention.head_count_kv", n_heads),
        head_dim=head_dim,
        # Stored in float32: the shortest decimal gives back what was written, 1e-05.
        norm_eps=float(str(np.float32(s.real("attention.layer_norm_rms_epsilon")))),
        rope_theta=theta,
        rope_scaling=scaling,
        max_position=length,
        sliding_window=window if window != length and window < length else 0,
        tied="output.weight" not in tensors,
        qkv_bias="blk.0.attn_q.bias" in tensors,
        qk_norm=arch == "qwen3",
        eos_ids=_ids(s, [end for end in ends if end is not None]),
    )


def _llama3_scaling(
    path: Path, stored: Stored, head_dim: int, theta: float
) -> RopeScaling:
    # GGUF keeps only the resulting divisors. Every Llama 3.x release has the bounds
    # that are RopeScaling's defaults; so the largest divisor is the factor, if the
    # others agree.
    fault = ValueError(
        f"{path}: rope_freqs.weight is not the scaling of Llama 3.x; load this "
        f"model from its Hugging Face folder"
    )
    if stored.shape != (head_dim // 2,):
        raise fault
    divisors = stored.read()
    scaling = RopeScaling("llama3", float(divisors.max()))
    plain = layers.rope_frequencies(head_dim, theta, None)
    guess = np.asarray(plain / layers.rope_frequencies(head_dim, theta, scaling))
    if not np.allclose(divisors, guess, rtol=1e-3):
        raise fault
    return scaling

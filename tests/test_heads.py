"""`heads`: published files in, the same numbers out, and no silent misreading."""

import dataclasses
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from eagle_jax import decode, draft, heads, weights
from eagle_jax.config import (
    DecodeConfig,
    DraftConfig,
    RopeScaling,
    TargetConfig,
    TreeConfig,
)
from eagle_jax.layers import merge, split

GOLDEN = Path(__file__).parent / "golden"
CASES = sorted(p.parent.name for p in GOLDEN.glob("*/head"))
E3 = GOLDEN / "e3_gqa_reduced_vocab"
E1 = GOLDEN / "e1_mha"
META = {"target_hash": "0123456789abcdef", "target_dtype": "float32"}


def target_of(case: str) -> TargetConfig:
    c = json.loads((GOLDEN / case / "target" / "config.json").read_text())
    return TargetConfig(
        name=case,
        vocab_size=c["vocab_size"],
        d_model=c["hidden_size"],
        d_mlp=c["intermediate_size"],
        n_layers=c["num_hidden_layers"],
        n_heads=c["num_attention_heads"],
        n_kv_heads=c["num_key_value_heads"],
        head_dim=c["hidden_size"] // c["num_attention_heads"],
        max_position=c["max_position_embeddings"],
    )


TARGET = target_of("e3_gqa_reduced_vocab")


def embedding_of(case: str) -> np.ndarray:
    file = GOLDEN / case / "target" / "model.safetensors"
    return safetensors.numpy.load_file(file)["model.embed_tokens.weight"]


def copy_of(folder: Path, tmp_path: Path) -> Path:
    """Copies a golden head, without its .bin twin, to where it may be spoilt."""
    path = tmp_path / "head"
    shutil.copytree(folder / "head", path, ignore=shutil.ignore_patterns("*.bin"))
    return path


def edit(
    path: Path, tensors: dict[str, Any] | None = None, **config: Any
) -> dict[str, np.ndarray]:
    """Changes keys of config.json and tensors; None deletes."""
    file = path / "config.json"
    merged = json.loads(file.read_text()) | config
    file.write_text(json.dumps({k: v for k, v in merged.items() if v is not None}))
    held = safetensors.numpy.load_file(path / "model.safetensors") | (tensors or {})
    held = {k: v for k, v in held.items() if v is not None}
    safetensors.numpy.save_file(held, path / "model.safetensors")
    return held


def assert_same(a: Any, b: Any) -> None:
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(x, y)


def shapes_of(cfg: DraftConfig, target: TargetConfig) -> Any:
    return jax.eval_shape(lambda key: draft.init(key, cfg, target), jax.random.key(0))


def random_head(**fields: Any) -> tuple[DraftConfig, dict[str, Any]]:
    """Returns a head without a single equal number, so that no mix-up can pass."""
    cfg = DraftConfig(**{
        "head": "eagle3",
        "vocab_size": 40,
        "d_model": TARGET.d_model,
        "d_mlp": 48,
        "n_heads": 4,
        "n_kv_heads": 2,
        "head_dim": 8,
        "feature_size": 3 * TARGET.d_model,
    } | fields)  # fmt: skip
    generator = np.random.default_rng(1)
    params = jax.tree.map(
        lambda x: jnp.asarray(generator.normal(size=x.shape), jnp.float32),
        shapes_of(cfg, TARGET),
    )
    if cfg.head == "eagle3":
        ids = np.sort(np.random.default_rng(0).permutation(TARGET.vocab_size)[:40])
        if cfg.vocab_size == TARGET.vocab_size:
            ids = np.arange(TARGET.vocab_size)
        params["draft_to_target"] = jnp.asarray(ids, jnp.int32)
    return cfg, params


@pytest.mark.parametrize("case", CASES)
def test_official_heads_load_alike_from_both_files(case: str) -> None:
    folder = GOLDEN / case / "head"
    safe = heads.load_head(folder / "model.safetensors", target_of(case))
    torch = heads.load_head(folder / "pytorch_model.bin", target_of(case))
    assert safe.cfg == torch.cfg and safe.taps is None
    assert_same(safe.params, torch.params)
    assert_same(safe.params, heads.load_head(folder).params)
    own = {k: v for k, v in safe.params.items() if k not in draft.SHARED}
    fresh = shapes_of(safe.cfg, target_of(case))
    assert jax.tree.map(jnp.shape, fresh) == jax.tree.map(jnp.shape, own)


def test_the_parts_of_a_head_land_where_they_belong() -> None:
    held = safetensors.numpy.load_file(E3 / "head" / "model.safetensors")
    params = heads.load_head(E3 / "head").params
    block, layer = "midlayer.", split(params["layer"])
    np.testing.assert_array_equal(
        layer["embed_norm"], held[block + "input_layernorm.weight"]
    )
    np.testing.assert_array_equal(
        layer["hidden_norm"], held[block + "hidden_norm.weight"]
    )
    np.testing.assert_array_equal(layer["wk"][1, 3], held[block + K_PROJ][8 + 3])
    o_proj = held[block + "self_attn.o_proj.weight"]
    np.testing.assert_array_equal(layer["wo"][:, 2, 5], o_proj[:, 2 * 8 + 5])
    np.testing.assert_array_equal(params["fuse"], held["fc.weight"])
    members = np.flatnonzero(held["t2d"])
    np.testing.assert_array_equal(params["draft_to_target"], members)


K_PROJ = "self_attn.k_proj.weight"


def allowed(case: str) -> tuple[heads.Dialect, ...]:
    if case == "e3_other_width":
        return ("official",)
    if case.startswith("e1") or case == "train_e1":
        return ("official", "sglang")
    return ("official", "sglang", "speculators")


@pytest.mark.parametrize(
    ("case", "dialect"), [(c, d) for c in CASES for d in allowed(c)]
)
def test_round_trips_are_exact(
    tmp_path: Path, case: str, dialect: heads.Dialect
) -> None:
    target, embed = target_of(case), embedding_of(case)
    head = heads.load_head(GOLDEN / case / "head", target)
    taps = target.taps if head.cfg.head == "eagle3" else None
    heads.save_head(
        tmp_path / "out",
        head.cfg,
        head.params,
        taps,
        dialect,
        meta=META,
        target=target,
        embed=embed,
    )
    again = heads.load_head(tmp_path / "out", target)
    assert again.cfg == head.cfg and again.taps == taps
    assert META.items() <= again.meta.items()
    expected = dict(head.params)
    if dialect == "speculators":
        expected["embed"] = jnp.asarray(embed)
    elif dialect == "sglang" or np.array_equal(expected.get("embed", 0), embed):
        expected.pop("embed", None)
    assert_same(again.params, expected)


@pytest.mark.parametrize("dialect", list(heads.LAYOUTS))
def test_an_export_drafts_the_same_trees(
    tmp_path: Path, dialect: heads.Dialect
) -> None:
    target, params = weights.load_target(E3 / "target")
    first = heads.load_head(E3 / "head", target)
    heads.save_head(
        tmp_path / "out",
        first.cfg,
        first.params,
        first.taps,
        dialect,
        meta=META,
        target=target,
        embed=params["embed"],
    )
    again = heads.load_head(tmp_path / "out", target)
    assert again.taps == (first.taps or target.taps)

    def trace(head: heads.Head) -> tuple[list[list[int]], list[Any]]:
        own = {"target": params, "draft": draft.tie(head.params, params, head.cfg)}
        tree = TreeConfig(width=3, depth=3, n_nodes=9)
        cfg = DecodeConfig(target, head.cfg, tree)
        return decode.trace(own, [[3, 1, 4], [15, 9, 2, 6, 5]], cfg, 16)

    rows, infos = trace(first)
    rows_again, infos_again = trace(again)
    assert rows == rows_again
    # Trees of every step with their parents and depths, and what was accepted of them.
    assert len(infos) > 4
    assert_same(infos_again, infos)


FULL = {"vocab_size": TARGET.vocab_size}
SWITCHES: list[tuple[heads.Dialect, dict[str, Any]]] = [
    ("speculators", {"norm_before_residual": True}),
    ("speculators", {"norm_before_fc": True, "norm_output": True}),
    ("speculators", {"fc_norm": True, "norm_output": True}),
    ("speculators", {"head_dim": 16, **FULL}),
    ("sglang", {"fc_norm": True, "norm_output": True}),
    ("sglang", {"norm_output": True, **FULL}),
    ("sglang", {"head_dim": 16, "norm_eps": 1e-6}),
    ("sglang", {"rope_theta": 5e5, "rope_scaling": RopeScaling("llama3", 8.0)}),
    ("speculators", {"rope_theta": 1e6, "rope_scaling": RopeScaling("linear", 2.0)}),
    ("official", {"rope_scaling": RopeScaling("dynamic", 2.0, original_length=512)}),
    ("official", {"rope_theta": 5e5, **FULL}),
    ("official", {"head": "eagle1", "fc_bias": False, "feature_size": 32, **FULL}),
    ("official", {"head": "eagle1", "qkv_bias": True, "feature_size": 32, **FULL}),
    ("sglang", {"head": "eagle1", "qkv_bias": True, "feature_size": 32, **FULL}),
]


@pytest.mark.parametrize(("dialect", "fields"), SWITCHES)
def test_switches_survive_a_round_trip(
    tmp_path: Path, dialect: heads.Dialect, fields: dict[str, Any]
) -> None:
    cfg, params = random_head(**fields)
    embed = np.random.default_rng(2).normal(size=(TARGET.vocab_size, 32))
    embed = embed.astype(np.float32)
    heads.save_head(
        tmp_path / "out",
        cfg,
        params,
        TARGET.taps if cfg.head == "eagle3" else None,
        dialect,
        meta={},
        target=TARGET,
        embed=embed,
    )
    again = heads.load_head(tmp_path / "out", TARGET)
    assert again.cfg == cfg
    if dialect == "speculators":
        params["embed"] = jnp.asarray(embed)
    assert_same(again.params, params)
    held = safetensors.numpy.load_file(tmp_path / "out" / "model.safetensors")
    has_tables = cfg.head == "eagle3" and (dialect == "sglang" or cfg.vocab_size == 40)
    assert ("d2t" in held) == ("t2d" in held) == has_tables
    if has_tables:
        assert held["d2t"].dtype == np.int64 and held["t2d"].dtype == np.bool_
        ids = np.arange(cfg.vocab_size) + held["d2t"]
        np.testing.assert_array_equal(ids, np.flatnonzero(held["t2d"]))


REFUSED: list[tuple[heads.Dialect, dict[str, Any], str]] = [
    ("official", {"norm_before_residual": True}, "norm_before_residual"),
    (
        "official",
        {"norm_before_fc": True, "norm_output": True},
        "norm_before_fc, norm_o",
    ),
    ("official", {"fc_norm": True}, "fc_norm"),
    ("official", {"head_dim": 16}, "head_dim"),
    ("official", {"rope_scaling": RopeScaling("llama3", 8.0)}, "llama3"),
    (
        "official",
        {"rope_theta": 5e5, "rope_scaling": RopeScaling("linear", 2.0)},
        "ignores rope_theta",
    ),
    ("official", {"qkv_bias": True}, "biases"),
    ("sglang", {"norm_before_residual": True}, "reader ignores norm_before_residual"),
    (
        "sglang",
        {"norm_before_fc": True},
        "ignores norm_before_fc and input_norm.weight",
    ),
    ("speculators", {"qkv_bias": True}, "biases"),
    ("speculators", {"d_model": 64, "feature_size": 96}, "width"),
    ("speculators", {"head": "eagle1", "feature_size": 32, **FULL}, "EAGLE-1"),
]


@pytest.mark.parametrize(("dialect", "fields", "why"), REFUSED)
def test_an_export_its_own_reader_would_misread_is_refused(
    tmp_path: Path, dialect: heads.Dialect, fields: dict[str, Any], why: str
) -> None:
    cfg, params = random_head(**fields)
    params["embed"] = jnp.ones((TARGET.vocab_size, cfg.d_model))
    taps = TARGET.taps if cfg.head == "eagle3" else None
    with pytest.raises(ValueError, match=why):
        heads.save_head(
            tmp_path / "out", cfg, params, taps, dialect, meta={}, target=TARGET
        )
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("dialect", "taps", "ids", "key"),
    [
        ("sglang", (2, 4, 5), [1, 3, 4], "eagle_config"),
        ("sglang", (1, 4, 6), [0, 3, 5], "eagle_config"),
        ("speculators", (0, 3, 7), [0, 3, 7], None),
    ],
)
def test_layer_ids_follow_the_convention_of_their_place(
    tmp_path: Path, dialect: heads.Dialect, taps: tuple, ids: list, key: str | None
) -> None:
    cfg, params = random_head()
    params["embed"] = embed = jnp.ones((TARGET.vocab_size, 32))
    out = tmp_path / "out"
    heads.save_head(
        out, cfg, params, taps, dialect, meta={}, target=TARGET, embed=embed
    )
    config = json.loads((out / "config.json").read_text())
    assert (config[key] if key else config)[heads.LAYER_IDS] == ids
    edit(out, eagle_jax=None)  # what other writers leave us
    assert heads.load_head(out, TARGET).taps == taps
    assert heads.load_head(out, TARGET, taps=(1, 2, 3)).taps == (1, 2, 3)


@pytest.mark.parametrize(
    ("dialect", "taps", "why"),
    [
        ("official", (1, 4, 5), "always reads layers 2, L/2, L-3"),
        ("sglang", (0, 4, 5), "cannot name the input of 0"),
        ("speculators", (2, 4, 8), "beyond n_layers=8"),
        ("speculators", (2, 4), "reads 3 taps"),
        ("speculators", (4, 2, 5), "ascending"),
    ],
)
def test_taps_that_cannot_be_written_are_refused(
    tmp_path: Path, dialect: heads.Dialect, taps: tuple, why: str
) -> None:
    cfg, params = random_head()
    embed = jnp.ones((TARGET.vocab_size, 32))
    with pytest.raises(ValueError, match=why):
        heads.save_head(
            tmp_path / "o",
            cfg,
            params,
            taps,
            dialect,
            meta={},
            target=TARGET,
            embed=embed,
        )


def test_assumed_layers_are_named_with_the_way_to_change_them(tmp_path: Path) -> None:
    head = heads.load_head(E3 / "head", TARGET)
    assert head.taps is None
    note = next(n for n in head.notes if "no auxiliary layers" in n)
    assert "2, L/2, L-3, (2, 4, 5) of this target" in note and "set taps" in note
    cfg, params = head.cfg, head.params
    heads.save_head(
        tmp_path / "o", cfg, params, None, "official", meta={}, target=TARGET
    )
    again = heads.load_head(tmp_path / "o", TARGET)
    assert again.taps == (2, 4, 5)
    assert any("were assumed when it was exported" in n for n in again.notes)
    for taps, is_guess in ((again.taps, True), ((1, 4, 5), False)):
        heads.save_head(
            tmp_path / f"{is_guess}",
            cfg,
            params,
            taps,
            "sglang",
            meta=again.meta,
            target=TARGET,
        )
        third = heads.load_head(tmp_path / f"{is_guess}", TARGET)
        assert third.taps == taps
        assert any("were assumed" in n for n in third.notes) == is_guess


def test_layer_ids_that_contradict_or_do_not_fit_are_refused(tmp_path: Path) -> None:
    path = copy_of(E3, tmp_path)
    edit(path, eagle_config={heads.LAYER_IDS: [1, 3, 4]})
    edit(path, None, **{heads.LAYER_IDS: [1, 3, 4]})
    with pytest.raises(ValueError, match="contradict"):
        heads.load_head(path, TARGET)
    edit(
        path, None, **{heads.LAYER_IDS: None}, eagle_config={heads.LAYER_IDS: [1, 3, 7]}
    )
    with pytest.raises(ValueError, match="beyond n_layers=8"):
        heads.load_head(path, TARGET)
    edit(path, eagle_config={heads.LAYER_IDS: [1, 3]})
    with pytest.raises(ValueError, match="reads 3 taps"):
        heads.load_head(path, TARGET)


def test_bfloat16_export_holds_the_rounded_numbers(tmp_path: Path) -> None:
    head = heads.load_head(E3 / "head", TARGET)
    heads.save_head(
        tmp_path / "o",
        head.cfg,
        head.params,
        None,
        "official",
        "bfloat16",
        meta={},
        target=TARGET,
    )
    held = safetensors.numpy.load_file(tmp_path / "o" / "model.safetensors")
    assert {str(t.dtype) for t in held.values()} == {"bfloat16", "int64", "bool"}

    def rounded(x: jax.Array) -> jax.Array:
        return x if x.dtype == jnp.int32 else x.astype(jnp.bfloat16)

    expected = jax.tree.map(rounded, head.params)
    half = heads.load_head(tmp_path / "o", TARGET, dtype="bfloat16")
    assert half.cfg.dtype == "bfloat16"
    assert_same(half.params, expected)
    whole = heads.load_head(tmp_path / "o", TARGET)
    assert_same(jax.tree.map(rounded, whole.params), expected)
    # Once rounded, a second export changes nothing.
    heads.save_head(
        tmp_path / "p", whole.cfg, whole.params, whole.taps, "official", "bfloat16",
        meta={}, target=TARGET,
    )  # fmt: skip
    first = (tmp_path / "o" / "model.safetensors").read_bytes()
    assert (tmp_path / "p" / "model.safetensors").read_bytes() == first


def test_one_error_lists_every_fault(tmp_path: Path) -> None:
    path = copy_of(E3, tmp_path)
    spoilt = {
        "norm.weight": None,
        "midlayer.mlp.up_proj.weight": None,
        "midlayer.hidden_norm.weight": np.ones(31, np.float32),
        "lm_head.weight": np.ones((64, 32), np.int32),
        "layers.1.mlp.up_proj.weight": np.ones(3, np.float32),
        "midlayer.self_attn.q_norm.weight": np.ones(8, np.float32),
        "t2d": np.zeros(128, bool),
    }
    edit(path, spoilt, hidden_act="gelu", scale_emb=8)
    with pytest.raises(ValueError) as caught:
        heads.load_head(path, TARGET)
    text = str(caught.value)
    for part in (
        "missing: norm.weight",
        "missing: midlayer.mlp.up_proj.weight",
        "misshaped: midlayer.hidden_norm.weight is (31,), expected (32,)",
        "not floats: lm_head.weight is int32",
        "unknown: layers.1.mlp.up_proj.weight (3,)",
        "unknown: midlayer.self_attn.q_norm.weight",
        "t2d marks other tokens",
        "hidden_act=gelu",
        "scale_emb=8",
    ):
        assert part in text, part


def test_offsets_become_token_ids(tmp_path: Path) -> None:
    path = copy_of(E3, tmp_path)
    few = {
        "lm_head.weight": np.ones((3, 32), np.float32),
        "d2t": np.array([3, 3, 5]),
        "t2d": np.isin(np.arange(128), [3, 4, 7]),
    }
    edit(path, few, draft_vocab_size=3)
    assert heads.load_head(path).params["draft_to_target"].tolist() == [3, 4, 7]
    edit(path, {"d2t": np.zeros(3, np.int64), "t2d": np.arange(128) < 3})
    assert heads.load_head(path).params["draft_to_target"].tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("tables", "why"),
    [
        ({"d2t": None}, "missing: d2t"),
        ({"d2t": None, "t2d": None}, "missing: d2t"),
        ({"d2t": "ids"}, "holds token ids, expected offsets"),
        ({"d2t": np.zeros(64, np.int64), "t2d": None}, "never built"),
        ({"d2t": np.zeros(64, np.int64)}, "t2d marks other tokens"),
        ({"d2t": np.full(64, 65, np.int64)}, "rise strictly within 0..127"),
        ({"d2t": -np.arange(64), "t2d": None}, "rise strictly"),
        ({"d2t": np.zeros(63, np.int64)}, "misshaped: d2t"),
        ({"d2t": np.zeros(64, np.float32)}, "misshaped: d2t"),
        ({"t2d": np.ones(127, bool)}, "misshaped: t2d"),
        ({"t2d": np.ones(128, bool)}, "t2d marks other tokens"),
    ],
)
def test_tables_that_break_the_convention_are_refused(
    tmp_path: Path, tables: dict[str, Any], why: str
) -> None:
    path = copy_of(E3, tmp_path)
    if isinstance(tables.get("d2t"), str):
        held = safetensors.numpy.load_file(path / "model.safetensors")
        tables = {"d2t": np.flatnonzero(held["t2d"])}
    edit(path, tables)
    with pytest.raises(ValueError, match=why):
        heads.load_head(path)


def test_a_full_vocabulary_needs_no_tables_and_ignores_them(tmp_path: Path) -> None:
    path = copy_of(GOLDEN / "e3_full_vocab", tmp_path)
    edit(path, {"d2t": None, "t2d": None})
    assert heads.load_head(path).params["draft_to_target"].tolist() == [*range(128)]
    edit(path, {"d2t": np.arange(128)})
    head = heads.load_head(path)
    assert head.params["draft_to_target"].tolist() == [*range(128)]
    assert any("d2t is ignored" in note for note in head.notes)


@pytest.mark.parametrize(
    ("config", "theta"),
    [
        ({}, 1e4),
        ({"rope_theta": 5e5}, 5e5),
        ({"rope_theta": 1000000}, 1e6),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, 5e5),
        ({"rope_theta": 5e5, "rope_parameters": {"rope_theta": 5e5}}, 5e5),
        ({"transformer_layer_config": {"rope_theta": 5e5}}, 5e5),
        ({"transformer_layer_config": {"rope_parameters": {"rope_theta": 5e5}}}, 5e5),
    ],
)
def test_rope_theta_is_found_in_every_place(
    tmp_path: Path, config: dict[str, Any], theta: float
) -> None:
    path = copy_of(E3, tmp_path)
    edit(path, **config)
    target = dataclasses.replace(TARGET, rope_theta=7e5)
    head = heads.load_head(path, target)
    assert head.cfg.rope_theta == theta and head.cfg.rope_scaling is None
    assert any("no rope_theta" in note for note in head.notes) == (not config)


@pytest.mark.parametrize(
    ("config", "scaling"),
    [
        (
            {
                "rope_scaling": {
                    "type": "llama3",
                    "factor": 8,
                    "low_freq_factor": 1,
                    "high_freq_factor": 4,
                    "original_max_position_embeddings": 8192,
                }
            },
            RopeScaling("llama3", 8.0),
        ),
        (
            {"rope_parameters": {"rope_type": "linear", "factor": 2.0}},
            RopeScaling("linear", 2.0, original_length=512),
        ),
        (
            {"rope_scaling": {"type": "dynamic", "factor": 4.0}},
            RopeScaling("dynamic", 4.0, original_length=512),
        ),
        ({"rope_scaling": None}, None),
    ],
)
def test_rope_scaling_is_read_under_both_key_names(
    tmp_path: Path, config: dict[str, Any], scaling: RopeScaling | None
) -> None:
    path = copy_of(E3, tmp_path)
    edit(path, **config)
    assert heads.load_head(path).cfg.rope_scaling == scaling


STORED = [
    ({}, None, "official"),
    ({"head": "eagle1", "vocab_size": 128}, None, "official"),
    ({"head": "eagle1", "vocab_size": 64}, None, "official"),
    ({"head": "eagle1", "vocab_size": 128, "inputs": "feature"}, None, "own"),
    ({}, (1, 2, 3), "sglang"),  # other layers than the official reader's
    ({}, (2,), "sglang"),
    ({}, (0, 2, 3), "own"),  # SGLang counts outputs, and 0 is none
    ({"fc_norm": True, "norm_output": True}, None, "sglang"),
    ({"norm_before_fc": True}, None, "own"),
    ({"norm_before_residual": True}, None, "own"),
    ({"qkv_bias": True}, None, "own"),
]


@pytest.mark.parametrize(("fields", "taps", "dialect"), STORED)
def test_every_head_that_can_be_trained_has_a_layout_it_comes_back_from(
    tmp_path: Path,
    fields: dict[str, Any],
    taps: tuple[int, ...] | None,
    dialect: heads.Dialect,
) -> None:
    target = dataclasses.replace(TARGET, n_layers=8, taps=taps or (2, 4, 5))
    n_features = 1 if "head" in fields else len(target.taps)
    cfg, params = random_head(**fields, feature_size=n_features * TARGET.d_model)
    if cfg.head == "eagle1":
        step = TARGET.vocab_size // cfg.vocab_size
        params["draft_to_target"] = jnp.arange(TARGET.vocab_size)[step - 1 :: step]
    assert heads.dialect_of(cfg, target) == dialect
    own = {k: v for k, v in params.items() if k != "embed"}
    heads.save_head(
        tmp_path / "h", cfg, own, target.taps, dialect, meta=META, target=target
    )
    back = heads.load_head(tmp_path / "h", target)
    assert back.cfg == cfg
    if cfg.head == "eagle3":
        assert back.taps == target.taps
    elif dialect == "official" and cfg.vocab_size == TARGET.vocab_size:
        own.pop("draft_to_target")  # nothing to map
    assert_same(back.params, own)


def test_our_own_layout_is_left_behind_by_an_export(tmp_path: Path) -> None:
    cfg, params = random_head(head="eagle1", feature_size=TARGET.d_model, vocab_size=64)
    own = {k: v for k, v in params.items() if k != "embed"}
    own["draft_to_target"] = jnp.arange(0, TARGET.vocab_size, 2)
    meta, taps = META, TARGET.taps
    for name in ("own", "official"):
        heads.save_head(tmp_path / name, cfg, own, taps, name, meta=meta, target=TARGET)
        back = heads.load_head(tmp_path / name, TARGET)
        assert back.cfg == cfg
        assert_same(back.params, own)
        meta = back.meta


@pytest.mark.parametrize(
    "text", ["", "AA==", "?" * 24, 7, ["A"], "/" * 24, "A" * 22 + "==", "/" * 22 + "=="]
)
def test_a_damaged_vocabulary_of_an_eagle1_head_is_refused(
    tmp_path: Path, text: Any
) -> None:
    target = dataclasses.replace(TARGET, vocab_size=124)  # the last of 16 bytes is half
    cfg, params = random_head(head="eagle1", feature_size=TARGET.d_model, vocab_size=62)
    params["draft_to_target"] = jnp.arange(0, 124, 2)
    own = {k: v for k, v in params.items() if k != "embed"}
    path = tmp_path / "h"
    heads.save_head(path, cfg, own, None, "official", meta=META, target=target)
    config = json.loads((path / "config.json").read_text())
    assert len(config["eagle_jax"]["draft_vocabulary"]) == 24
    edit(path, eagle_jax=META | {"draft_vocabulary": text})
    with pytest.raises(ValueError, match="a bit for each of 124 tokens"):
        heads.load_head(path, target)


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({"rope_theta": 1e4, "rope_parameters": {"rope_theta": 5e5}}, "contradicts"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "no known kind"),
        ({"rope_scaling": {"type": "linear"}}, "no factor"),
        (
            {"rope_scaling": {"type": "linear", "factor": 2.0, "beta": 1}},
            "no known kind",
        ),
        ({"rope_scaling": "linear"}, "not an object"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "no known kind"),
        ({"rope_theta": "big"}, "could not convert"),
        ({"rope_theta": [1]}, "float"),
        ({"num_attention_heads": 0}, "num_attention_heads >= 1"),
        ({"num_attention_heads": 5, "num_key_value_heads": 2}, "multiple"),
        ({"hidden_size": "32"}, "hidden_size"),
        ({"eagle_config": [1]}, "not the config of a head"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "heads without taps"),
        ({"eagle_config": {heads.LAYER_IDS: ["1"]}}, "must be integers"),
        ({"eagle_jax": {"taps": [2, 4, 5]}}, "taps_convention"),
        ({"draft_vocab_size": 32}, "misshaped: lm_head.weight"),
    ],
)
def test_configs_without_a_meaning_are_refused(
    tmp_path: Path, config: dict[str, Any], why: str
) -> None:
    path = copy_of(E3, tmp_path)
    edit(path, **config)
    with pytest.raises(ValueError, match=why):
        heads.load_head(path)


def test_tensors_overrule_what_configs_often_get_wrong(tmp_path: Path) -> None:
    path = copy_of(E3, tmp_path)
    expected = heads.load_head(path)
    edit(
        path,
        num_hidden_layers=40,
        tie_word_embeddings=True,
        architectures=["Qwen2ForCausalLM"],
        draft_vocab_size=None,
        max_position_embeddings=16,  # R109: no table is built from it
    )
    head = heads.load_head(path)
    assert head.cfg == expected.cfg
    assert_same(head.params, expected.params)
    for part in ("num_hidden_layers=40", "tying does not apply", "Qwen2ForCausalLM"):
        assert any(part in note for note in head.notes), part


@pytest.mark.parametrize(
    ("says", "has", "expected"),
    [
        (None, True, True),
        (True, True, True),
        (False, True, True),
        (False, False, False),
        (None, False, "missing: fc.bias"),
        (True, False, "missing: fc.bias"),
    ],
)
def test_the_bias_of_fc_is_there_or_not(
    tmp_path: Path, says: bool | None, has: bool, expected: bool | str
) -> None:
    path = copy_of(E1, tmp_path)
    edit(path, {"fc.bias": np.full(32, 3, np.float32) if has else None}, bias=says)
    if isinstance(expected, str):
        with pytest.raises(ValueError, match=expected):
            heads.load_head(path)
        return
    head = heads.load_head(path)
    assert head.cfg.fc_bias == expected == ("fc_bias" in head.params)
    assert not expected or head.params["fc_bias"].tolist() == [3.0] * 32
    assert any("bias is on" in note for note in head.notes) == (says is False and has)


def test_biases_of_q_k_v_come_all_or_not_at_all(tmp_path: Path) -> None:
    path = copy_of(E1, tmp_path)
    names = [f"layers.0.self_attn.{x}_proj.bias" for x in "qkv"]
    edit(path, {names[0]: np.ones(32, np.float32)})
    with pytest.raises(ValueError, match=f"missing: {names[1]}"):
        heads.load_head(path)
    edit(path, {n: np.arange(32, dtype=np.float32) for n in names})
    head = heads.load_head(path)
    assert head.cfg.qkv_bias
    np.testing.assert_array_equal(
        split(head.params["layer"])["bk"], np.arange(32).reshape(4, 8)
    )
    edit(path, {n: None for n in names}, qkv_bias=True)
    with pytest.raises(ValueError, match=f"missing: {names[2]}"):
        heads.load_head(path)


def test_norm_output_is_read_as_its_writer_means_it(tmp_path: Path) -> None:
    path = copy_of(E3, tmp_path)
    edit(path, norm_output=True)
    head = heads.load_head(path)
    assert not head.cfg.norm_output
    assert any("SpecForge" in note for note in head.notes)
    norms = {f"fc_norm.{i}.weight": np.full(32, i, np.float32) for i in range(3)}
    edit(path, norms, fc_norm=True)
    head = heads.load_head(path)
    assert head.cfg.norm_output and head.cfg.fc_norm
    assert head.params["fc_norm"][:, 0].tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("flag", "why"),
    [("fc_norm", "missing: fc_norm.1.weight"), ("norm_before_fc", "input_norm.weight")],
)
def test_a_norm_that_is_switched_on_must_be_there(
    tmp_path: Path, flag: str, why: str
) -> None:
    path = copy_of(E3, tmp_path)
    edit(path, None, **{flag: True})
    with pytest.raises(ValueError, match=why):
        heads.load_head(path)


@pytest.mark.parametrize("prefix", ["model.", "ea_layer.", "ea_layer.model."])
def test_all_naming_schemes_give_one_head(tmp_path: Path, prefix: str) -> None:
    for folder, layout in ((E3, "midlayer"), (E1, "eagle1")):
        expected = heads.load_head(folder / "head")
        assert expected.layout == layout
        path = copy_of(folder, tmp_path / layout)
        held = edit(path)
        new = {prefix + n: t for n, t in held.items()} | dict.fromkeys(held)
        edit(path, new)
        head = heads.load_head(path)
        assert_same(head.params, expected.params)
        assert head.layout == layout and any("prefixed" in n for n in head.notes)
    path = copy_of(E3, tmp_path)
    held = edit(path)
    renamed = {n: n.replace("midlayer.", "layers.0.") for n in held}
    renamed["d2t"] = "draft_id_to_target_id"
    edit(path, dict.fromkeys(held) | {renamed[n]: t for n, t in held.items()})
    head = heads.load_head(path)
    assert head.layout == "speculators"
    assert_same(head.params, heads.load_head(E3 / "head").params)


def test_an_unknown_scheme_lists_its_names(tmp_path: Path) -> None:
    path = copy_of(E3, tmp_path)
    held = edit(path)
    edit(path, dict.fromkeys(held) | {"decoder.x": held["norm.weight"]})
    with pytest.raises(ValueError, match=r"no known head.*decoder\.x"):
        heads.load_head(path)


def test_padding_of_the_vocabulary_is_dropped_and_other_tokenizers_refused(
    tmp_path: Path,
) -> None:
    smaller = dataclasses.replace(TARGET, vocab_size=124)
    head = heads.load_head(E3 / "head", smaller)
    ids = np.asarray(head.params["draft_to_target"])
    assert ids.max() < 124 and len(ids) == head.cfg.vocab_size
    assert head.params["head"].shape == (len(ids), 32)
    e1 = heads.load_head(E1 / "head", dataclasses.replace(TARGET, vocab_size=124))
    assert e1.cfg.vocab_size == 124 and e1.params["embed"].shape == (124, 32)
    for size in (101, 160):
        other = dataclasses.replace(TARGET, vocab_size=size)
        with pytest.raises(ValueError, match=f"vocab_size=128, the target's is {size}"):
            heads.load_head(E3 / "head", other)
    with pytest.raises(ValueError, match="embeds 128 tokens"):
        heads.load_head(E1 / "head", dataclasses.replace(TARGET, vocab_size=130))


def test_a_target_of_another_width_is_refused() -> None:
    other = dataclasses.replace(TARGET, d_model=40)
    with pytest.raises(ValueError, match="no multiple of the target's width 40"):
        heads.load_head(E3 / "head", other)
    with pytest.raises(ValueError, match="made for a target of width 32"):
        heads.load_head(E1 / "head", other)
    with pytest.raises(ValueError, match="made for a target of width 32"):
        heads.load_head(GOLDEN / "e3_other_width" / "head", other)


def test_a_head_of_another_width_needs_its_own_embedding(tmp_path: Path) -> None:
    path = copy_of(GOLDEN / "e3_other_width", tmp_path)
    edit(path, {"embed_tokens.weight": None})
    with pytest.raises(ValueError, match=r"missing: embed_tokens\.weight"):
        heads.load_head(path)


def test_head_dim_may_come_from_the_tensors(tmp_path: Path) -> None:
    cfg, params = random_head(head_dim=16)
    heads.save_head(tmp_path / "o", cfg, params, None, "sglang", meta={}, target=TARGET)
    edit(tmp_path / "o", head_dim=None)
    head = heads.load_head(tmp_path / "o", TARGET)
    assert head.cfg == cfg and any("head_dim=16" in note for note in head.notes)


def test_tied_parameters_are_exported_without_the_target(tmp_path: Path) -> None:
    embed = embedding_of("e1_gqa")
    target = target_of("e1_gqa")
    head = heads.load_head(GOLDEN / "e1_gqa" / "head", target)
    shared = {"embed": jnp.asarray(embed), "head": jnp.asarray(embed)}
    tied = draft.tie(head.params, shared, head.cfg)
    for dialect in ("official", "sglang"):
        out = tmp_path / dialect
        heads.save_head(
            out, head.cfg, tied, None, dialect, meta={}, target=target, embed=embed
        )
        assert_same(heads.load_head(out, target).params, head.params)


def test_an_own_embedding_is_not_lost_without_a_word(tmp_path: Path) -> None:
    head = heads.load_head(E1 / "head")
    target = target_of("e1_mha")
    for embed in (None, np.asarray(head.params["embed"]) + 1):
        with pytest.raises(ValueError, match="stores no embedding"):
            heads.save_head(
                tmp_path / "o", head.cfg, head.params, None, "sglang",
                meta={}, target=target, embed=embed,
            )  # fmt: skip
    cfg, params = random_head()
    with pytest.raises(ValueError, match="embed is None"):
        heads.save_head(
            tmp_path / "o", cfg, params, None, "speculators", meta={}, target=TARGET
        )


def test_parameters_that_do_not_fit_are_all_named(tmp_path: Path) -> None:
    cfg, params = random_head()
    layer = split(params["layer"])
    biases = {name: jnp.ones((2, 8)) for name in ("bq", "bk", "bv")}
    params["layer"] = merge(layer | biases | {"wq": layer["wk"]})
    params |= {
        "fc_bias": jnp.ones(3),
        "draft_to_target": params["draft_to_target"][::-1],
    }
    del params["norm"]
    with pytest.raises(ValueError) as caught:
        heads.save_head(
            tmp_path / "o", cfg, params, None, "official", meta={}, target=TARGET
        )
    for part in (
        "layer.wq is (2, 8, 64), expected (4, 8, 64)",
        "norm is None",
        "bq has no place",
        "fc_bias has no place",
        "ascending",
    ):
        assert part in str(caught.value), part


def test_a_folder_in_use_is_not_overwritten(tmp_path: Path) -> None:
    cfg, params = random_head()
    out = tmp_path / "o"

    def save(scale: float, overwrite: bool) -> None:
        new = params | {"head": params["head"] * scale}
        heads.save_head(
            out, cfg, new, None, "official", meta={}, target=TARGET, overwrite=overwrite
        )

    out.mkdir()
    save(1, False)
    with pytest.raises(ValueError, match="overwrite a head"):
        save(2, False)
    np.testing.assert_array_equal(heads.load_head(out).params["head"], params["head"])
    save(2, True)
    np.testing.assert_array_equal(
        heads.load_head(out).params["head"], 2 * params["head"]
    )
    (out / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"holds config\.json"):
        save(3, True)
    assert [p.name for p in tmp_path.iterdir()] == ["o"]


def test_a_failed_write_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(safetensors.numpy, "save_file", fail)
    cfg, params = random_head()
    with pytest.raises(OSError, match="disk full"):
        heads.save_head(
            tmp_path / "o", cfg, params, None, "official", meta={}, target=TARGET
        )
    assert not list(tmp_path.iterdir())


def test_cut_files_give_value_errors(tmp_path: Path) -> None:
    path = copy_of(E3, tmp_path)
    file = path / "model.safetensors"
    whole = file.read_bytes()
    for size in [*range(0, len(whole), 5003), 7, 8, 9, len(whole) - 1]:
        file.write_bytes(whole[:size])
        with pytest.raises(ValueError, match=r"model\.safetensors"):
            heads.load_head(path)
    file.write_bytes(whole)
    config = (path / "config.json").read_text()
    for text in (config[:-5], "[]", ""):
        (path / "config.json").write_text(text)
        with pytest.raises(ValueError, match=r"config\.json"):
            heads.load_head(path)
    (path / "config.json").unlink()
    with pytest.raises(ValueError, match=r"config\.json"):
        heads.load_head(path)
    with pytest.raises(ValueError, match="neither"):
        heads.load_head(tmp_path)
    with pytest.raises(ValueError, match="does not exist"):
        heads.load_head(tmp_path / "nowhere")


def test_the_report_says_what_each_reader_makes_of_a_head(tmp_path: Path) -> None:
    text = heads.report(E3 / "head", target=TARGET)
    assert "eagle3 head, midlayer layout, 15 tensors" in text
    assert "  d2t int64 [64]" in text and "official: takes all of it" in text
    cfg, params = random_head(norm_before_residual=True, norm_before_fc=True)
    embed = jnp.ones((TARGET.vocab_size, 32))
    heads.save_head(
        tmp_path / "o", cfg, params, (1, 3, 6), "speculators",
        meta=META, target=TARGET, embed=embed,
    )  # fmt: skip
    text = heads.report(tmp_path / "o", target=TARGET)
    for line in (
        "official: ! maps midlayer.* only, so the block would stay random",
        "sglang: ! ignores norm_before_residual",
        "sglang: ! ignores norm_before_fc and input_norm.weight",
        "sglang-jax: ! ignores norm_before_residual, norm_before_fc",
        "tpu-inference: ! ignores norm_before_fc",
        "tpu-inference: ! always reads layers 2, L/2, L-3, not taps=(1, 3, 6)",
        "vllm:  ignores t2d",
        "speculators: takes all of it",
        "0123456789abcdef",
    ):
        assert line in text, line
    unsure = (
        "always reads layers 2, L/2, L-3; name the target to compare taps=(1, 3, 6)"
    )
    assert f"tpu-inference:  {unsure}" in heads.report(tmp_path / "o")
    only = heads.report(tmp_path / "o", "vllm", TARGET)
    assert "vllm:" in only and "official:" not in only
    with pytest.raises(ValueError, match="reader must be one of"):
        heads.report(tmp_path / "o", "ollama")


def run_convert(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "experiments.convert", *arguments]
    root = GOLDEN.parent.parent
    return subprocess.run(command, capture_output=True, text=True, cwd=root)


def test_the_command_converts_checks_and_refuses_in_one_line(tmp_path: Path) -> None:
    out = tmp_path / "o"
    target = f"--target={E3 / 'target'}"
    done = run_convert(
        f"--head={E3 / 'head'}", target, "--to=speculators", f"--out={out}"
    )
    assert done.returncode == 0, done.stderr
    assert "are assumed" in done.stdout and "written for speculators" in done.stdout
    assert heads.load_head(out, TARGET).layout == "speculators"
    edit(out, {"norm.weight": None, "d2t": np.ones(3, np.int64)})
    done = run_convert(f"--check={out}", target)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert "missing: norm.weight; misshaped: d2t" in line

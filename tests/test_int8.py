"""`layers.Int8`: targets whose matrices are stored as whole numbers."""

import dataclasses

import drivers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from eagle_jax import decode, layers, sharding, target
from eagle_jax.config import DecodeConfig, TreeConfig
from eagle_jax.layers import Int8

T = tiny.target_config(vocab_size=96, n_layers=2, tied=True)
D = tiny.draft_config(T, "eagle3", vocab_size=48)
TREE = TreeConfig(width=3, depth=3, n_nodes=9)
PROMPTS = [[3, 1, 4, 1, 5, 9], [2]]
NEW = 16

quantise = jax.jit(layers.quantise)


def is_int8(leaf) -> bool:
    return isinstance(leaf, Int8)


@pytest.fixture(scope="module")
def params():
    return quantise(tiny.params(3, T)["target"])


@pytest.fixture(scope="module")
def whole(params):
    """The same numbers in floating point."""
    return jax.tree.map(layers.dense, params, is_leaf=is_int8)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("tied", [True, False])
def test_every_matrix_is_rounded_to_the_nearest_of_255_numbers_a_row(dtype, tied):
    t = dataclasses.replace(T, dtype=dtype, tied=tied)
    own = tiny.params(3, t)["target"]
    own["layers"][0]["wo"] = own["layers"][0]["wo"].at[5].set(0.0)  # padding
    stored = quantise(own)
    rows = zip(
        jax.tree_util.tree_leaves_with_path(own),
        jax.tree.leaves(stored, is_leaf=is_int8),
        strict=True,
    )
    n_stored = 0
    for (path, w), q in rows:
        if not isinstance(q, Int8):
            np.testing.assert_array_equal(w, q)
            continue
        n_stored += 1
        assert path[-1].key in layers.QUANTISED and q.whole.dtype == jnp.int8
        w, scale = np.asarray(w, np.float64), np.asarray(q.scale, np.float64)
        largest = np.abs(w).max(axis=-1)
        assert (np.abs(q.whole).max(axis=-1) == 127 * (largest > 0)).all()
        assert (np.abs(w - np.asarray(q.whole) * scale) <= scale * 0.5001).all()
    assert n_stored == 1 + 4 * T.n_layers
    # Of an embedding that is nothing else a step reads a few rows only.
    assert is_int8(stored["embed"]) == tied and is_int8(stored.get("head")) != tied


@pytest.mark.parametrize("n_columns", [1, 2, 7, 128, 129])
def test_products_are_those_of_the_numbers_it_stands_for(n_columns):
    rng = np.random.default_rng(1)
    w = quantise({"wqkv": jnp.asarray(rng.normal(size=(3, 4, 8, 40)), jnp.float32)})
    x = rng.normal(size=(40, n_columns, 1))
    got = jax.jit(layers.linear)(w["wqkv"], jnp.asarray(x, jnp.float32))
    want = np.asarray(layers.dense(w["wqkv"]), np.float64) @ x.reshape(40, -1)
    assert got.shape == (3, 4, 8, n_columns, 1)
    np.testing.assert_allclose(got[..., 0], want, atol=1e-4)


def test_a_row_of_an_embedding_is_looked_up_before_it_is_expanded(params):
    ids = jnp.asarray([[2, 0], [95, 2]])
    rows = layers.look_up(params["embed"], ids)
    np.testing.assert_array_equal(rows, layers.dense(params["embed"])[ids])


def test_bfloat16_products_are_summed_in_float32():
    rng = np.random.default_rng(1)
    w = quantise({"wo": jnp.asarray(rng.normal(size=(8, 4096)), jnp.bfloat16)})["wo"]
    x = jnp.asarray(rng.normal(size=(4096, 2, 1)), jnp.bfloat16)
    got = jax.jit(layers.linear)(w, x)
    assert got.dtype == jnp.bfloat16
    want = np.asarray(w.whole, float) @ np.asarray(x, float)[..., 0]
    want *= np.asarray(w.scale, float)
    # Results are below 256, where bfloat16 steps by 1; two roundings of half a step.
    assert np.abs(want).max() < 256
    np.testing.assert_allclose(np.asarray(got, float)[..., 0], want, atol=1.0)


@pytest.mark.parametrize("stacked", [False, True])
def test_speculation_is_exact_for_the_quantised_target(params, whole, stacked):
    cfg, quantised = T, params
    if stacked:
        cfg, quantised = target.stack(params, T)
    draft = tiny.params(4, T, D)["draft"]
    both = {"target": quantised, "draft": draft | {"embed": params["embed"]}}
    plain = decode.generate({"target": whole}, PROMPTS, DecodeConfig(T), NEW)
    assert decode.generate(both, PROMPTS, DecodeConfig(cfg), NEW) == plain
    assert decode.generate(both, PROMPTS, DecodeConfig(cfg, D, TREE), NEW) == plain


def test_weights_that_are_not_numbers_are_not_taken_for_zeros(params):
    own = tiny.params(3, T)["target"]
    own["layers"][0]["wo"] = own["layers"][0]["wo"].at[5, 3].set(jnp.nan)
    with pytest.raises(FloatingPointError):
        decode.generate({"target": quantise(own)}, PROMPTS, DecodeConfig(T), NEW)


def test_a_mesh_cuts_whole_numbers_and_factors_like_the_matrix(params):
    mesh = sharding.make_mesh("data:4,model:2")
    cfg = DecodeConfig(T)
    want = decode.generate({"target": params}, PROMPTS, cfg, NEW)
    placed = sharding.place({"target": params}, mesh)
    assert decode.generate(placed, PROMPTS, cfg, NEW) == want
    layer = placed["target"]["layers"][0]
    for name, axis in (("wqkv", 0), ("wo", 1), ("w_gate_up", 1), ("w_down", 1)):
        for leaf in layer[name]:
            share = list(leaf.shape)
            share[axis] = -(-share[axis] // 2)
            assert leaf.addressable_shards[0].data.shape == tuple(share)


def test_heads_train_for_and_decode_with_a_quantised_target(tmp_path):
    int8 = "--set=quantise=int8"
    out = tmp_path / "int8"
    said = drivers.run("ablate", *drivers.ablate_flags(out), int8, "--keep_target")
    assert "int8 in float32" in said and "WARNING" not in said
    rows = drivers.read_lines(out / "results.jsonl")
    assert {row["dtype"] for row in rows} == {"int8 in float32"}
    assert all(row["n_identical"] == row["n_prompts"] for row in rows)
    # A head of the float32 target serves as well, but one is told.
    other = drivers.only(drivers.trained()[0] / "heads")
    flags = [*drivers.ablate_flags(tmp_path / "other"), int8, f"--head={other}"]
    said = drivers.run("ablate", *flags, "--keep_target")
    assert "is used" in said
    assert "trained for precision float32, this run uses int8 in float32" in said


@pytest.mark.parametrize("variant", ["eagle1", "medusa", "small_draft"])
def test_every_kind_of_head_trains_for_a_quantised_target(tmp_path, variant):
    flags = drivers.ablate_flags(tmp_path, variant)
    drivers.run("ablate", *flags, "--set=quantise=int8")
    for row in drivers.read_lines(tmp_path / "results.jsonl"):
        assert row["n_identical"] == row["n_prompts"]


def test_only_what_is_stored_is_a_choice(tmp_path):
    flags = drivers.ablate_flags(tmp_path / "out")
    said = drivers.fail("ablate", *flags, "--set=quantise=int3")
    assert "none, int8" in said

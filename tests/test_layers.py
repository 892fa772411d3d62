"""`layers`: one decoder block against NumPy, feature by feature."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
import tiny

from eagle_jax import layers
from eagle_jax.config import RopeScaling, TargetConfig
from eagle_jax.layers import KV, Segment

T = 7
LLAMA3 = RopeScaling("llama3", factor=8.0, original_length=64)
LINEAR = RopeScaling("linear", factor=4.0)

BLOCKS = {
    "grouped heads": {},
    "one group per head": {"n_kv_heads": 4},
    "one group": {"n_kv_heads": 1},
    "qwen2 biases": {"qkv_bias": True},
    "qwen3 norms": {"qk_norm": True, "head_dim": 24, "norm_eps": 1e-6},
    "llama3 rope": {"rope_scaling": LLAMA3, "rope_theta": 500000.0},
    "linear rope": {"rope_scaling": LINEAR},
}


@jax.jit
def attend(q, k, v, mask):
    return layers.attention(q, (Segment(k, v, mask),))


def block(layer, x, positions, mask, cfg: TargetConfig):
    speed = layers.rope_frequencies(cfg.head_dim, cfg.rope_theta, cfg.rope_scaling)
    normed = layers.rms_norm(x, layer["attn_norm"], cfg.norm_eps)
    rotation = layers.turns(positions, speed)
    q, kv = layers.project(layer, normed, rotation, cfg.norm_eps)
    mixed = layers.attention(q, (Segment(*kv, mask),))
    return layers.output_and_mlp(layer, x, mixed, cfg.norm_eps), kv


jit_block = jax.jit(block, static_argnames="cfg")


@pytest.mark.parametrize("kind", list(BLOCKS))
def test_a_block_equals_the_reference(kind):
    cfg = tiny.target_config(n_layers=1, **BLOCKS[kind])
    layer = tiny.params(1, cfg)["target"]["layers"][0]
    rng = np.random.default_rng(2)
    x = rng.normal(size=(2, T, cfg.d_model))
    at = np.array([np.arange(T), [0, 5, 40, 41, 90, 300, 2999]])
    mask = np.stack([reference.causal(T), rng.random((T, T)) < 0.5])
    mask[1] |= np.eye(T, dtype=bool)
    out, kv = jit_block(
        layer,
        jnp.asarray(x.transpose(2, 0, 1), jnp.float32),
        jnp.asarray(at, jnp.int32),
        jnp.asarray(mask),
        cfg,
    )
    for b in range(2):
        normed = reference.rms_norm(x[b], np.asarray(layer["attn_norm"]), cfg.norm_eps)
        want, k, v = reference.mix(layer, x[b], normed, at[b], mask[b], cfg)
        # Angles near 3000 radians carry float32 errors of 1e-4, so 2e-3 there.
        tolerance = 1e-5 if b == 0 else 2e-3
        np.testing.assert_allclose(out[:, b].T, want, atol=tolerance)
        np.testing.assert_allclose(kv.k[b].transpose(2, 0, 1), k, atol=tolerance)
        np.testing.assert_allclose(kv.v[b].transpose(1, 0, 2), v, atol=1e-5)


@pytest.mark.parametrize("theta", [1e4, 5e5, 1e6])
@pytest.mark.parametrize(
    "scaling",
    [None, LINEAR, RopeScaling("llama3", 8.0), RopeScaling("llama3", 32.0, 1.0, 4.0)],
    ids=["none", "linear", "llama3 8", "llama3 32"],
)
def test_rope_frequencies_equal_the_closed_formula(theta, scaling):
    got = layers.rope_frequencies(128, theta, scaling)
    want = reference.rope_speed(128, theta, scaling)
    np.testing.assert_allclose(got, want, rtol=3e-6)
    if scaling is not None:
        assert not np.allclose(want, reference.rope_speed(128, theta), rtol=1e-3)


def test_llama3_scaling_stretches_long_waves_and_keeps_short_ones():
    plain = np.asarray(layers.rope_frequencies(128, 5e5, None))
    scaled = np.asarray(layers.rope_frequencies(128, 5e5, RopeScaling("llama3", 8.0)))
    waves = 2 * np.pi / plain
    np.testing.assert_allclose(scaled[waves < 2048], plain[waves < 2048], rtol=1e-6)
    np.testing.assert_allclose(scaled[waves > 8192], plain[waves > 8192] / 8, rtol=1e-6)
    between = (waves > 2048) & (waves < 8192)
    assert between.any()
    assert (scaled[between] < plain[between]).all()


def test_rotation_follows_the_position_alone():
    # No table, so no last position: 100,000 turns like any other.
    speed = layers.rope_frequencies(8, 1e4, None)
    x = np.random.default_rng(3).normal(size=8).astype(np.float32)
    for position in (0, 1, 100, 100_000):
        turn = layers.turns(jnp.asarray([[position]]), speed)
        got = layers.rotate(jnp.asarray(x)[None, :, None, None], turn)
        want = reference.rotate(x.astype(float), position, np.asarray(speed, float))
        np.testing.assert_allclose(
            got[0, :, 0, 0], want, atol=2e-2 * position / 1e5 + 1e-5
        )


def test_segments_are_one_softmax():
    rng = np.random.default_rng(4)
    q = jnp.asarray(rng.normal(size=(4, 8, 2, T)), jnp.float32)
    k = jnp.asarray(rng.normal(size=(2, 2, 8, 10)), jnp.float32)
    v = jnp.asarray(rng.normal(size=(2, 2, 10, 8)), jnp.float32)
    mask = jnp.asarray(rng.random((2, T, 10)) < 0.5)
    whole = attend(q, k, v, mask)
    cuts = [slice(0, 3), slice(3, 4), slice(4, 10)]
    parts = tuple(Segment(k[..., c], v[..., c, :], mask[..., c]) for c in cuts)
    np.testing.assert_allclose(layers.attention(q, parts), whole, atol=1e-6)


def test_own_keys_are_seen_by_the_query_in_the_same_place_only():
    rng = np.random.default_rng(5)
    q = jnp.asarray(rng.normal(size=(4, 8, 1, T)), jnp.float32)
    k, v, k_own, v_own = (
        jnp.asarray(rng.normal(size=(1, 2, 8, T)), jnp.float32) for _ in range(4)
    )
    v, v_own = v.swapaxes(2, 3), v_own.swapaxes(2, 3)
    causal = jnp.asarray(reference.causal(T))[None]
    got = layers.attention(q, (Segment(k, v, causal),), (KV(k_own, v_own),))
    diagonal = jnp.eye(T, dtype=bool)[None]
    want = layers.attention(q, (Segment(k, v, causal), Segment(k_own, v_own, diagonal)))
    np.testing.assert_allclose(got, want, atol=1e-6)


def test_a_query_that_sees_nothing_gets_a_finite_mean():
    rng = np.random.default_rng(6)
    q = jnp.asarray(rng.normal(size=(4, 8, 2, T)), jnp.float32)
    k = jnp.asarray(rng.normal(size=(2, 2, 8, 10)), jnp.float32)
    mask = jnp.zeros((2, T, 10), bool)
    out = np.asarray(attend(q, k, k.swapaxes(2, 3), mask))
    np.testing.assert_allclose(out[0, :, 0, 0], k[0, 0].mean(-1), atol=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_hidden_slots_do_not_count_whatever_they_hold(dtype):
    # 20 padding slots per row filled with the largest number of the type.
    rng = np.random.default_rng(7)
    q = jnp.asarray(rng.normal(size=(4, 8, 1, T)), dtype)
    k = jnp.asarray(rng.normal(size=(1, 2, 8, T)), dtype)
    causal = jnp.asarray(reference.causal(T))[None]
    seen = Segment(k, k.swapaxes(2, 3), causal)
    alone = layers.attention(q, (seen,))
    huge = jnp.full((1, 2, 8, 20), 1e4, dtype)
    unseen = Segment(huge, huge.swapaxes(2, 3), jnp.zeros((1, T, 20), bool))
    for segments in ((unseen, seen), (seen, unseen)):
        padded = layers.attention(q, segments)
        np.testing.assert_array_equal(padded, alone)
        assert padded.dtype == dtype


def test_linear_splits_any_number_of_axes():
    rng = np.random.default_rng(8)
    w = rng.normal(size=(3, 4, 5, 6))
    x = rng.normal(size=(5, 6, 2, 7))
    got = layers.linear(jnp.asarray(w, jnp.float32), jnp.asarray(x, jnp.float32))
    np.testing.assert_allclose(got, np.tensordot(w, x, 2), rtol=1e-5, atol=1e-5)


def test_rms_norm_takes_its_statistics_in_float32():
    x = np.full((64, 1, 1), 300.0)  # squares overflow float16
    out = layers.rms_norm(jnp.asarray(x, jnp.float16), jnp.ones(64, jnp.float16), 1e-5)
    np.testing.assert_allclose(out, 1.0, rtol=1e-3)


def test_experts_are_shared_out_to_the_best_two():
    scores = jnp.asarray([[1.0, 0.0], [3.0, 0.0], [2.0, 0.0], [-9.0, 5.0]])[:, None]
    shares = layers.expert_shares(scores, 2)[:, 0]
    e = np.exp(1.0)
    wanted = [[0, 1 / (1 + e**5)], [e / (1 + e), 0], [1 / (1 + e), 0], [0, 0]]
    wanted[3][1] = 1 - wanted[0][1]  # of the three equal ones the first
    np.testing.assert_allclose(shares, wanted, rtol=1e-6)


def test_joined_experts_come_apart_again():
    rng = np.random.default_rng(0)
    gate, up = (jnp.asarray(rng.normal(size=(4, 3, 5)), jnp.float32) for _ in range(2))
    down = jnp.asarray(rng.normal(size=(5, 4, 3)), jnp.float32)
    block = {"w_gate": gate, "w_up": up, "w_down": down, "router": gate[:, 0]}
    joined = layers.merge(block)
    assert joined["w_gate_up"].shape == (2, 4 * 3, 5)
    np.testing.assert_array_equal(joined["w_gate_up"][1, 1 * 3 + 2], up[1, 2])
    np.testing.assert_array_equal(joined["w_down"][:, 2 * 3 + 1], down[:, 2, 1])
    back = layers.split(joined)
    assert back.keys() == block.keys()
    for name, array in block.items():
        np.testing.assert_array_equal(back[name], array)


def test_joined_matrices_keep_each_kv_head_beside_its_queries() -> None:
    H, K, C, X, F = 6, 2, 4, 5, 3
    shapes = {"wq": (H, C, X), "wk": (K, C, X), "wv": (K, C, X)}
    shapes |= {"bq": (H, C), "bk": (K, C), "bv": (K, C), "norm": (X,)}
    shapes |= {"w_gate": (F, X), "w_up": (F, X), "wo": (X, H, C)}
    keys = jax.random.split(jax.random.key(0), len(shapes))
    block = {
        name: jax.random.normal(key, shape)
        for key, (name, shape) in zip(keys, shapes.items(), strict=True)
    }
    joined = layers.merge(block)
    assert joined["wqkv"].shape == (K, H // K + 2, C, X)
    np.testing.assert_array_equal(joined["wqkv"][1, 2], block["wq"][5])
    np.testing.assert_array_equal(joined["wqkv"][1, 3], block["wk"][1])
    np.testing.assert_array_equal(joined["bqkv"][0, 4], block["bv"][0])
    np.testing.assert_array_equal(joined["w_gate_up"][1, 2], block["w_up"][2])
    np.testing.assert_array_equal(joined["wo"][:, 5 * C + 3], block["wo"][:, 5, 3])
    back = layers.split(joined)
    assert back.keys() == block.keys()
    for name, array in block.items():
        np.testing.assert_array_equal(back[name], array)

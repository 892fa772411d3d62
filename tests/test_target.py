"""`target`: the cached forward, the tree forward and the features, against plain passes."""

import dataclasses
import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
import tiny

from eagle_jax import cache, target, tree
from eagle_jax.config import TargetConfig

CFG = tiny.target_config(qkv_bias=True)
N = 12  # tokens of a whole pass


@functools.partial(jax.jit, static_argnames="cfg")
def forward(params, tokens, positions, mask, at, cfg):
    out = target.forward(params, tokens, positions, mask, at, cfg)
    return out, target.logits(params, out.top)


def no_cache(rows: int, cfg: TargetConfig) -> cache.KVCache:
    return cache.init(cfg.n_layers, rows, cfg.n_kv_heads, cfg.head_dim, 0, cfg.dtype)


def whole(params, tokens: np.ndarray, cfg: TargetConfig) -> Any:
    rows, n = tokens.shape
    at = jnp.broadcast_to(jnp.arange(n), (rows, n))
    mask = jnp.broadcast_to(jnp.asarray(reference.causal(n)), (rows, n, n))
    return forward(
        params, jnp.asarray(tokens, jnp.int32), at, mask, no_cache(rows, cfg), cfg
    )


@pytest.fixture(scope="module")
def params():
    return tiny.params(1, CFG)["target"]


KINDS = {
    "llama": {},
    "qwen3, tied": {"qk_norm": True, "tied": True, "taps": (1, 2)},
    "mixtral, window": {"n_experts": 4, "n_experts_used": 2, "sliding_window": 5},
}


@pytest.mark.parametrize("kind", list(KINDS))
def test_a_forward_equals_the_reference(kind):
    cfg = tiny.target_config(**KINDS[kind])
    p = tiny.params(2, cfg)["target"]
    tokens = np.random.default_rng(3).integers(0, cfg.vocab_size, (2, N))
    out, logits = whole(p, tokens, cfg)
    for b in range(2):
        want = reference.llama(p, tokens[b], cfg)
        np.testing.assert_allclose(logits[:, b].T, want["logits"], atol=2e-5)
        np.testing.assert_allclose(out.top[:, b].T, want["top"], atol=2e-5)
        np.testing.assert_allclose(out.taps[:, b].T, want["taps"], atol=2e-5)
        for i in range(cfg.n_layers):
            k = out.new[i].k[b].transpose(2, 0, 1)
            np.testing.assert_allclose(k, want["keys"][i], atol=2e-5)


def test_taps_are_the_inputs_of_their_layers():
    cfg = tiny.target_config(taps=(0,))
    p = tiny.params(2, cfg)["target"]
    tokens = np.arange(N)[None]
    out, _ = whole(p, tokens, cfg)
    np.testing.assert_array_equal(out.taps[:, 0].T, p["embed"][tokens[0]])
    assert out.taps.shape[0] == cfg.d_model


def committed(params, tokens: np.ndarray, lengths: list[int], slots: int):
    """A cache that holds the first `lengths[b]` tokens of each row."""
    rows = len(tokens)
    out, _ = whole(params, tokens, CFG)
    at = cache.init(CFG.n_layers, rows, CFG.n_kv_heads, CFG.head_dim, slots, CFG.dtype)
    return cache.append(at, out.new, jnp.asarray(lengths, jnp.int32))


def test_a_cached_forward_equals_one_full_forward(params):
    rng = np.random.default_rng(4)
    tokens = rng.integers(0, CFG.vocab_size, (2, N))
    _, full = whole(params, tokens, CFG)
    lengths = np.array([3, 7])  # rows stand at different places
    at = committed(params, tokens, lengths.tolist(), 20)
    block = lengths[:, None] + np.arange(5)
    mask = jnp.broadcast_to(jnp.asarray(reference.causal(5)), (2, 5, 5))
    _, logits = forward(
        params,
        jnp.asarray(np.take_along_axis(tokens, block, 1), jnp.int32),
        jnp.asarray(block, jnp.int32),
        mask,
        at,
        CFG,
    )
    for b in range(2):
        np.testing.assert_allclose(logits[:, b], full[:, b, block[b]], atol=1e-5)


def test_a_window_reaches_into_the_cache(params):
    cfg = dataclasses.replace(CFG, sliding_window=4)
    tokens = np.random.default_rng(4).integers(0, CFG.vocab_size, (1, N))
    out, full = whole(params, tokens, cfg)
    at = cache.init(CFG.n_layers, 1, CFG.n_kv_heads, CFG.head_dim, 20, CFG.dtype)
    at = cache.append(at, out.new, jnp.asarray([7], jnp.int32))
    block = jnp.arange(7, N)[None]
    mask = jnp.asarray(reference.causal(N - 7))[None]
    _, logits = forward(
        params, jnp.asarray(tokens[:, 7:], jnp.int32), block, mask, at, cfg
    )
    np.testing.assert_allclose(logits[:, 0], full[:, 0, 7:], atol=1e-5)
    assert np.abs(full - whole(params, tokens, CFG)[1])[:, 0, 4:].max() > 0.01


# Three siblings below the root and a branch of depth 3.
PARENTS = [0, 0, 0, 0, 2, 4, 4]


def test_every_tree_node_sees_its_root_path_and_nothing_else(params):
    rng = np.random.default_rng(5)
    prefix = rng.integers(0, CFG.vocab_size, (2, N))
    lengths = [4, 6]
    drafted = np.array([[5, 10, 20, 30, 40, 50, 60], [7, 11, 21, 31, 41, 51, 61]])
    parents = jnp.asarray([PARENTS, PARENTS])
    mask = tree.ancestors(parents, 3)
    depths = mask.astype(jnp.int32).sum(-1) - 1
    positions = jnp.asarray(lengths)[:, None] + depths
    out, logits = forward(
        params,
        jnp.asarray(drafted, jnp.int32),
        positions,
        mask,
        committed(params, prefix, lengths, 20),
        CFG,
    )
    assert positions[0].tolist() == [4, 5, 5, 5, 6, 7, 7]
    for b in range(2):
        for node in range(7):
            path = reference.root_path(PARENTS, node)
            text = [*prefix[b, : lengths[b]], *drafted[b, path]]
            padded = np.array([text + [0] * (N - len(text))])
            plain, plain_logits = whole(params, padded, CFG)
            last = len(text) - 1
            np.testing.assert_allclose(
                logits[:, b, node], plain_logits[:, 0, last], atol=1e-5
            )
            np.testing.assert_allclose(
                out.taps[:, b, node], plain.taps[:, 0, last], atol=1e-5
            )
            np.testing.assert_allclose(
                out.new[2].k[b, :, :, node], plain.new[2].k[0, :, :, last], atol=1e-5
            )


@pytest.mark.parametrize(
    ("bad_key", "bad_value"), [(1e4, 1e4), (np.nan, np.finfo(np.float32).max)]
)
def test_slots_behind_the_committed_ones_are_never_read(params, bad_key, bad_value):
    # Values meet a weight of exactly 0 there, which any finite number survives.
    tokens = np.random.default_rng(6).integers(0, CFG.vocab_size, (1, N))
    at = committed(params, tokens, [6], 20)

    bad = at._replace(
        k=tuple(x.at[..., 6:].set(bad_key) for x in at.k),
        v=tuple(x.at[..., 6:, :].set(bad_value) for x in at.v),
    )
    block = jnp.asarray(tokens[:, 6:10], jnp.int32)
    mask = jnp.asarray(reference.causal(4))[None]
    args = (block, jnp.arange(6, 10)[None], mask)
    _, clean = forward(params, *args, at, CFG)
    _, dirty = forward(params, *args, bad, CFG)
    np.testing.assert_array_equal(dirty, clean)


def test_shapes_of_llama31_8b():
    cfg = TargetConfig(
        "llama31_8b", 128256, 4096, 14336, 32, 32, 8, 128, dtype="bfloat16"
    )
    p = jax.eval_shape(lambda: target.init(jax.random.key(0), cfg))
    n = sum(np.prod(leaf.shape) for leaf in jax.tree.leaves(p))
    assert round(n / 1e9, 2) == 8.03
    mask = jax.ShapeDtypeStruct((1, 60, 60), bool)
    ints = jax.ShapeDtypeStruct((1, 60), jnp.int32)
    at = jax.eval_shape(lambda: cache.init(32, 1, 8, 128, 2048, "bfloat16"))
    out, logits = jax.eval_shape(
        functools.partial(forward, cfg=cfg), p, ints, ints, mask, at
    )
    assert logits.shape == (128256, 1, 60) and logits.dtype == jnp.float32
    assert out.taps.shape == (3 * 4096, 1, 60)


def test_the_stacked_form_says_the_same(params):
    cfg, stacked = target.stack(params, CFG)
    tokens = np.random.default_rng(8).integers(0, CFG.vocab_size, (2, N))
    want, logits = whole(params, tokens, CFG)
    got, stacked_logits = whole(stacked, tokens, cfg)
    np.testing.assert_allclose(stacked_logits, logits, atol=1e-5)
    np.testing.assert_allclose(got.taps, want.taps, atol=1e-5)
    for i, kv in enumerate(want.new):
        np.testing.assert_allclose(got.new.k[i], kv.k, atol=1e-5)
        np.testing.assert_allclose(got.new.v[i], kv.v, atol=1e-5)


@pytest.mark.parametrize("lengths", [(0, 0), (1, 256), (257, 3), (9, 512), (1024, 800)])
@pytest.mark.parametrize("window", [0, 300])
def test_the_stacked_form_reads_the_cache_no_further_than_it_is_in_use(lengths, window):
    rows, n, slots = 2, 4, 1024
    cfg = tiny.target_config(sliding_window=window)
    p = tiny.params(1, cfg)["target"]
    rng = np.random.default_rng(9)
    k, v = (
        [rng.normal(size=(rows, cfg.n_kv_heads, *shape)) for _ in range(cfg.n_layers)]
        for shape in ((cfg.head_dim, slots), (slots, cfg.head_dim))
    )
    tokens = jnp.asarray(rng.integers(0, cfg.vocab_size, (rows, n)), jnp.int32)
    length = jnp.asarray(lengths, jnp.int32)
    mask = jnp.broadcast_to(jnp.asarray(reference.causal(n)), (rows, n, n))
    positions = length[:, None] + jnp.arange(n)[None]
    listed = cache.KVCache(
        tuple(jnp.asarray(x, jnp.float32) for x in k),
        tuple(jnp.asarray(x, jnp.float32) for x in v),
        length,
    )
    want = forward(p, tokens, positions, mask, listed, cfg)
    # Whatever stands behind the part in use would turn all into NaN, weighed by 0 or not.
    read = max(256, -(-max(lengths) // 256) * 256)
    for x in k:
        x[..., read:] = np.nan
    for x in v:
        x[:, :, read:] = np.nan
    cfg, p = target.stack(p, cfg)
    k, v = (jnp.asarray(np.stack(x), jnp.float32) for x in (k, v))
    at = cache.KVCache(k, v, length)
    out, logits = forward(p, tokens, positions, mask, at, cfg)
    np.testing.assert_allclose(logits, want[1], atol=1e-5)
    np.testing.assert_allclose(out.taps, want[0].taps, atol=1e-5)


def test_rotations_are_computed_once_for_all_layers():
    text = []
    for n_layers in (1, 3):
        cfg = tiny.target_config(n_layers=n_layers)
        call = jax.jit(target.forward, static_argnames="cfg").lower(
            tiny.params(0, cfg)["target"],
            jnp.zeros((1, 4), jnp.int32),
            jnp.arange(4)[None],
            jnp.ones((1, 4, 4), bool),
            cache.init(n_layers, 1, cfg.n_kv_heads, cfg.head_dim, 32, cfg.dtype),
            cfg,
        )
        text.append(call.compile().as_text())
    n_cosines = [len(re.findall(r" cosine\(", one)) for one in text]
    assert n_cosines[0] == n_cosines[1] > 0

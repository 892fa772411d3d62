"""Eight devices must say what one says, and hold only their share of every large array."""

import dataclasses
import functools
import re
from typing import Any

import drivers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from jax.sharding import PartitionSpec as P

from eagle_jax import decode, draft, sharding, target, train
from eagle_jax.config import DecodeConfig, TrainConfig, TreeConfig

MESHES = ["data:8,model:1", "data:4,model:2", "data:2,model:4", "data:1,model:8"]
PROMPTS = [[1, 2, 3], [4, 5], [7] * 9, [8, 9, 1, 3]] * 2
TREE = TreeConfig(width=2, depth=3, n_nodes=6)
N_NEW = 8


def models(n_kv_heads: int) -> tuple[DecodeConfig, Any]:
    heads: dict[str, Any] = {
        "n_heads": 2 * n_kv_heads,
        "n_kv_heads": n_kv_heads,
        "head_dim": 8,
    }
    t = tiny.target_config(vocab_size=96, n_layers=2, **heads)
    d = tiny.draft_config(t, vocab_size=48, **heads)
    return DecodeConfig(t, d, TREE), tiny.params(0, t, d)


@functools.cache
def one_device(n_kv_heads: int) -> list[list[int]]:
    cfg, params = models(n_kv_heads)
    return decode.trace(params, PROMPTS, cfg, N_NEW)[0]


def collectives(text: str) -> list[tuple[str, int, str]]:
    """Lists kind, elements of the largest result and scope of every exchange."""
    kinds = "all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter"
    found = []
    for line in text.splitlines():
        if m := re.search(rf"= (.*?) ({kinds})(?:-start)?\(", line):
            sizes = [
                int(np.prod([int(n) for n in shape.split(",") if n]))
                for shape in re.findall(r"\w\[([\d,]*)\]", m[1])
            ]
            name = re.search(r'op_name="([^"]*)"', line)
            found.append((m[2], max(sizes), name[1] if name else ""))
    return found


@pytest.mark.parametrize(
    ("text", "n_kv_heads"), [*((text, 8) for text in MESHES), ("data:2,model:4", 3)]
)
def test_a_mesh_decodes_the_tokens_of_one_device(text, n_kv_heads):
    cfg, params = models(n_kv_heads)
    mesh = sharding.make_mesh(text)
    n_model = mesh.shape["model"]
    t, own = sharding.pad_heads(params["target"], cfg.target, n_model)
    d, head = sharding.pad_heads(params["draft"], cfg.draft, n_model)
    cfg = DecodeConfig(t, d, cfg.tree)
    placed = sharding.place({"target": own, "draft": head}, mesh)

    state = decode.start(placed, PROMPTS, cfg, N_NEW)
    rows = jax.tree.map(np.shape, state)
    step = decode.jit_step.lower(placed, state, cfg).compile()
    got = [[int(root)] for root in state.root]
    while any(len(row) < N_NEW for row in got):
        state, info = step(placed, state)
        for row, tokens, n in zip(got, info.tokens, info.n_emitted, strict=True):
            row.extend(np.asarray(tokens)[: int(n)].tolist())
    assert [row[:N_NEW] for row in got] == one_device(n_kv_heads)

    # Every device holds its share, of the weights and, after steps, of the state.
    assert jax.tree.map(np.shape, state) == rows
    layer = placed["target"]["layers"][0]
    for leaf, axis in (
        (layer["wqkv"], 0),
        (layer["wo"], 1),
        (layer["w_gate_up"], 1),
        (layer["w_down"], 1),
        (placed["target"]["embed"], 0),
        (placed["draft"]["head"], 0),
        (placed["draft"]["fuse"], 1),
        (placed["draft"]["layer"]["wqkv"], 0),
    ):
        share = list(leaf.shape)
        share[axis] //= n_model
        assert leaf.addressable_shards[0].data.shape == tuple(share)
    n_data = mesh.shape["data"]
    for cache, n_heads in (
        (state.target_cache.k[0], t.n_kv_heads),
        (state.draft.cache.v[0], d.n_kv_heads),
    ):
        share = cache.addressable_shards[0].data.shape
        assert share == (len(PROMPTS) // n_data, n_heads // n_model, *cache.shape[2:])

    # No weights and no caches move; the target adds up twice per layer, and once for
    # the embedding.
    found = collectives(step.as_text() or "")
    matrices = [leaf.size for leaf in jax.tree.leaves(placed) if leaf.ndim > 1]
    moved = [x for x in found if x[0] != "all-reduce" and x[1] >= min(matrices)]
    assert not moved
    sums = [x for x in found if "jit(step)/target/" in x[2]]
    assert len(sums) == (2 * t.n_layers + 1 if n_model > 1 else 0)
    assert {kind for kind, *_ in sums} <= {"all-reduce"}


def test_experts_are_cut_over_model_and_say_the_same():
    experts: dict[str, Any] = {"n_experts": 4, "n_experts_used": 2}
    t = tiny.target_config(vocab_size=96, n_layers=2, n_kv_heads=4, **experts)
    cfg, params = DecodeConfig(t), tiny.params(0, t)
    placed = sharding.place(params, sharding.make_mesh("data:2,model:4"))
    layer = placed["target"]["layers"][0]
    for leaf in (layer["w_gate_up"], layer["w_down"]):
        assert leaf.addressable_shards[0].data.size * 4 == leaf.size
    got = decode.generate(placed, PROMPTS[:2], cfg, N_NEW)
    assert got == decode.generate(params, PROMPTS[:2], cfg, N_NEW)


SETTINGS = TrainConfig(rows=8, row_length=32, ttt_steps=2)
jit_features = jax.jit(train.target_features, static_argnames=("cfg", "head"))
jit_train_step = jax.jit(
    train.train_step, static_argnames=("cfg", "train", "update", "fsdp")
)


@functools.cache
@jax.numpy_dtype_promotion("standard")  # optax mixes kinds of numbers
def train_on(
    text: str, fsdp: bool, n_kv_heads: int, optimiser: Any
) -> tuple[list[float], Any]:
    """Takes three steps; returns the losses and the last state."""
    settings = dataclasses.replace(SETTINGS, optimiser=optimiser)
    cfg, params = models(n_kv_heads)
    t, d, own = cfg.target, cfg.draft, params["target"]
    mesh = sharding.make_mesh(text) if text else None
    ids = params["draft"]["draft_to_target"]
    update = train.optimiser(settings, 3)
    state = train.init(jax.random.key(0), own, ids, d, t, settings, update)
    state = sharding.place(state, mesh, fsdp)
    fixed = sharding.place({"embed": own["embed"], "draft_to_target": ids}, mesh)
    if mesh:
        t, own = sharding.pad_heads(own, t, mesh.shape["model"])
    own = sharding.place(own, mesh)
    rng = np.random.default_rng(0)
    positions = np.tile(np.concatenate([np.arange(20), np.arange(12)]), (8, 1))
    losses = []
    for _ in range(3):
        batch = train.Batch(
            tokens=jnp.asarray(rng.integers(0, 96, (8, 32)), jnp.int32),
            segments=jnp.asarray(
                1 + (np.arange(32) >= 20) + np.zeros((8, 1)), jnp.int32
            ),
            positions=jnp.asarray(positions, jnp.int32),
            mask=jnp.asarray(rng.random((8, 32)) > 0.5),
        )
        batch = sharding.place(batch, mesh)
        given = jit_features(own, batch, t, d)
        state, metrics = jit_train_step(
            jax.random.key(1),
            state,
            fixed,
            own,
            batch,
            given,
            d,
            settings,
            update,
            fsdp,
        )
        losses.append(float(metrics.loss))
    return losses, state


@pytest.mark.parametrize(
    ("text", "fsdp", "optimiser"),
    [
        ("data:8,model:1", True, "adamw"),
        ("data:4,model:2", False, "adamw"),
        ("data:2,model:4", True, "adamw"),
        ("data:1,model:8", False, "adamw"),
        ("data:2,model:4", True, "muon"),
    ],
)
def test_a_mesh_trains_with_the_losses_of_one_device(text, fsdp, optimiser):
    losses, state = train_on(text, fsdp, 8, optimiser)
    # Sums over devices are rounded in another order: float32 keeps 7 digits.
    alone, _ = train_on("", False, 8, optimiser)
    np.testing.assert_allclose(losses, alone, rtol=2e-6)
    sizes = sharding.make_mesh(text).shape
    n_parts = sizes["model"] * (sizes["data"] if fsdp else 1)
    mu = state.opt_state[1]
    mu = mu.inner_states["muon"].inner_state[0].mu if optimiser == "muon" else mu[0].mu
    for kept in (state.params, mu):
        leaf = kept["layer"]["w_gate_up"]
        assert leaf.addressable_shards[0].data.size * n_parts == leaf.size


@pytest.mark.parametrize("n_experts", [0, 4])
@pytest.mark.parametrize("head", ["eagle1", "eagle3", "medusa", "small"])
def test_the_table_knows_every_parameter(head, n_experts):
    experts = {"n_experts": n_experts, "n_experts_used": 2} if n_experts else {}
    t = tiny.target_config(qkv_bias=True, qk_norm=True, **experts)
    d = tiny.draft_config(t, head, qkv_bias=True)
    own = jax.eval_shape(lambda: draft.init(jax.random.key(0), d, t))
    shapes = [jax.eval_shape(lambda: target.init(jax.random.key(0), t)), own]
    mesh = sharding.make_mesh("data:8")
    placed = sharding.shardings(shapes, mesh)
    assert jax.tree.structure(placed) == jax.tree.structure(shapes)


@pytest.mark.parametrize(
    ("name", "shape", "fsdp", "wanted"),
    [
        ("layers/0/wqkv", (8, 4, 16, 32), False, P("model", None, None, None)),
        ("layers/0/wqkv", (3, 4, 16, 32), False, P(None, None, None, None)),
        ("layers/wo", (5, 32, 128), False, P(None, None, "model")),
        ("target_cache/k", (6, 4, 16, 256), False, P("data", "model", None, None)),
        ("target_cache/k", (3, 4, 16, 256), False, P(None, "model", None, None)),
        ("layer/w_down", (32, 64), True, P("data", "model")),
        ("fc_bias", (32,), True, P(None)),
        ("step", (), True, P()),
    ],
)
def test_a_leaf_is_cut_as_the_table_says(name, shape, fsdp, wanted):
    assert sharding.spec(name, shape, {"data": 2, "model": 4}, fsdp) == wanted


def test_what_cannot_be_placed_is_named():
    mesh = sharding.make_mesh("data:2,model:4")
    tree = {"embed": jnp.zeros((101, 8)), "layers": [{"w_new": jnp.zeros((4, 4))}]}
    with pytest.raises(ValueError) as fault:
        sharding.shardings(tree, mesh)
    assert "embed has shape (101, 8)" in str(fault.value)
    assert "axis 0 of size 101 does not divide over model:4" in str(fault.value)
    assert "no placement is known for layers/0/w_new" in str(fault.value)


@pytest.mark.parametrize(
    "text", ["model", "data:x", "rows:2", "model:0", "data:2;model:4"]
)
def test_a_mesh_text_that_makes_no_sense_is_refused(text):
    with pytest.raises(ValueError, match=r"a mesh is data:SIZE,model:SIZE"):
        sharding.make_mesh(text)


def test_a_mesh_uses_every_device():
    with pytest.raises(ValueError, match=r"needs 6 devices, there are 8"):
        sharding.make_mesh("data:3,model:2")


def test_the_default_mesh_divides_both_models():
    cfg, _ = models(4)
    assert sharding.default_mesh(8, cfg.target, cfg.draft) == "data:2,model:4"
    cfg, _ = models(3)
    assert sharding.default_mesh(8, cfg.target, cfg.draft) == "data:8,model:1"


def test_the_largest_of_a_cut_vocabulary_are_those_of_a_whole_one():
    rng = np.random.default_rng(0)
    scores = jnp.asarray(rng.integers(0, 9, (48, 2, 3)), jnp.float32)  # many equal ones
    mesh = sharding.make_mesh("data:2,model:4")
    cut = jax.device_put(scores, jax.NamedSharding(mesh, P("model")))
    largest = jax.jit(sharding.largest, static_argnames="k")
    for k in (1, 5, 12, 13):
        best, index = largest(cut, k)
        wanted = jax.lax.top_k(scores.transpose(1, 2, 0), k)
        np.testing.assert_array_equal(best, wanted[0])
        np.testing.assert_array_equal(index, wanted[1])


def test_the_driver_trains_and_decodes_on_eight_devices(tmp_path, monkeypatch):
    straight, _ = drivers.trained()
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "8")
    out = tmp_path / "eight"
    said = drivers.run("ablate", *drivers.ablate_flags(out), "--fsdp")
    assert "mesh     data:4,model:2" in said
    logs = [drivers.only(f / "training") / "log.jsonl" for f in (straight, out)]
    one, eight = ([row["loss"] for row in drivers.read_lines(log)] for log in logs)
    # 24 updates of Adam let differences of rounding grow.
    np.testing.assert_allclose(eight, one, rtol=1e-3)
    for row in drivers.read_lines(out / "results.jsonl"):
        assert row["n_identical"] == row["n_prompts"]

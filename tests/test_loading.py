"""Targets on their way from files to several devices: part by part, or as kept."""

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest
import test_weights
import tiny
from absl import flags
from absl.testing import flagsaver

from configs import tiny as tiny_config
from eagle_jax import sharding, target, weights
from eagle_jax import text as text_lib
from experiments import common

# Three K/V heads: with model:2 a head of zeros is added.
CFG = tiny.target_config(
    vocab_size=258, n_layers=6, n_heads=6, n_kv_heads=3, head_dim=8, tied=True
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    tensors = test_weights.named_tensors(target.init(jax.random.key(0), CFG), "hf")
    config = test_weights.hf_config(
        CFG, head_dim=CFG.head_dim, rms_norm_eps=CFG.norm_eps, rope_theta=CFG.rope_theta
    )
    path = tmp_path_factory.mktemp("targets") / "six"
    return test_weights.write_folder(path, tensors, config, n_shards=2)


@pytest.fixture
def load(folder, tmp_path, monkeypatch):
    """Loads the folder as drivers do, with the flags given."""
    flags.FLAGS(["test"])
    monkeypatch.setenv("EAGLE_JAX_CACHE", str(tmp_path / "cache"))
    _, _, text = tiny_config.load("float32", ())
    monkeypatch.setattr(text_lib, "load_text", lambda _: text)

    def run(mesh: str, stacked: bool, keep: bool = False) -> common.Setup:
        cfg = dataclasses.replace(
            tiny_config.get_config(), target_source=str(folder), stacked=stacked
        )
        with flagsaver.flagsaver(mesh=mesh, keep_target=keep):
            return common.load_setup(cfg)

    return run


def expected(folder, mesh: str, stacked: bool) -> Any:
    """The same by way of the whole target on one device."""
    cfg, params = weights.load_target(folder)
    n = sharding.make_mesh(mesh).shape["model"]
    cfg, params = sharding.pad_heads(params, cfg, n)
    if stacked:
        params["layers"] = jax.tree.map(lambda *x: np.stack(x), *params["layers"])
    return params


def assert_same(params: Any, wanted: Any) -> None:
    assert jax.tree.structure(params) == jax.tree.structure(wanted)
    for ours, theirs in zip(
        jax.tree.leaves(params), jax.tree.leaves(wanted), strict=True
    ):
        np.testing.assert_array_equal(np.asarray(ours), np.asarray(theirs))


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("mesh", ["data:4,model:2", "data:8,model:1"])
def test_the_host_never_holds_more_than_a_part(
    folder, load, mesh, stacked, monkeypatch
):
    largest = 0
    place = sharding.place

    def watched(tree: Any, *rest: Any) -> Any:
        nonlocal largest
        alone = [a for a in jax.live_arrays() if len(a.sharding.device_set) == 1]
        largest = max(largest, sum(a.nbytes for a in alone) - before)
        return place(tree, *rest)

    monkeypatch.setattr(sharding, "place", watched)
    alone = [a for a in jax.live_arrays() if len(a.sharding.device_set) == 1]
    before = sum(a.nbytes for a in alone)
    setup = load(mesh, stacked)
    monkeypatch.undo()
    wanted = expected(folder, mesh, stacked)
    assert_same(setup.target_params, wanted)
    total = sum(leaf.nbytes for leaf in jax.tree.leaves(wanted))
    # A layer as it was read and with its head of zeros; the embedding is as large as one.
    assert 0 < largest < total / 2
    placed = sharding.shardings(setup.target_params, sharding.make_mesh(mesh))
    for leaf, to in zip(
        jax.tree.leaves(setup.target_params), jax.tree.leaves(placed), strict=True
    ):
        assert leaf.sharding.is_equivalent_to(to, leaf.ndim)
    assert setup.target_cfg.stacked == stacked
    assert setup.target_cfg.n_kv_heads == (4 if mesh == "data:4,model:2" else 3)


@pytest.mark.parametrize("stacked", [False, True])
def test_a_kept_target_is_loaded_without_its_files(folder, load, stacked, monkeypatch):
    first = load("data:4,model:2", stacked, keep=True)

    def unread() -> Any:
        raise AssertionError("a tensor was read")

    read = weights.read_safetensors
    monkeypatch.setattr(
        weights,
        "read_safetensors",
        lambda file: {n: s._replace(read=unread) for n, s in read(file).items()},
    )
    again = load("data:4,model:2", stacked, keep=True)
    assert_same(again.target_params, first.target_params)
    for ours, theirs in zip(
        jax.tree.leaves(again.target_params),
        jax.tree.leaves(first.target_params),
        strict=True,
    ):
        assert ours.sharding.is_equivalent_to(theirs.sharding, ours.ndim)
    with pytest.raises(AssertionError, match="was read"):
        load("data:8,model:1", stacked, keep=True)  # no zero heads: kept apart


def test_a_kept_target_that_is_damaged_is_named(load, tmp_path):
    load("data:8,model:1", False, keep=True)
    (kept,) = (tmp_path / "cache" / "targets").iterdir()
    for file in kept.rglob("*"):
        if file.is_file():
            file.write_bytes(b"")
    with pytest.raises(ValueError, match="delete it, and it is made again"):
        load("data:8,model:1", False, keep=True)

"""Configs of the papers' targets: sizes that give the published parameter counts."""

import functools
import importlib

import jax
import pytest

from eagle_jax import decode, sharding, target
from experiments.compile_tpu import METHODS, Run

NAMES = """vicuna_7b vicuna_13b vicuna_33b llama2_70b llama31_8b llama33_70b
mixtral_8x7b""".split()


@pytest.mark.parametrize("name", NAMES)
def test_a_target_of_the_papers_has_its_published_size(name):
    module = importlib.import_module(f"configs.{name}")
    cfg, published = module.get_config(), module.TARGET
    t = published.sizes
    shapes = jax.eval_shape(lambda: target.init(jax.random.key(0), t))
    assert sum(leaf.size for leaf in jax.tree.leaves(shapes)) == published.n_params
    assert shapes["layers"]["wqkv"].shape[0] == t.n_layers
    assert cfg.draft.d_model == t.d_model
    assert cfg.tree.n_nodes == published.n_nodes


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", NAMES)
def test_a_step_of_every_method_fits_a_target_of_the_papers(name, method):
    module = importlib.import_module(f"configs.{name}")
    cfg, mesh = module.get_config(), sharding.make_mesh("model:8")
    t = sharding.padded(module.TARGET.sizes, 8)
    run = Run(cfg, t, mesh, rows=1, slots=2048)
    decoding = run.decode_config(method)
    state = run.state(decoding)
    step = functools.partial(decode.step, cfg=decoding)
    after, info = jax.eval_shape(step, run.params(decoding.draft), state)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), after) == jax.tree.map(
        lambda x: (x.shape, x.dtype), state
    )
    assert info.tree.tokens.shape == (1, decoding.tree.n_nodes)
    # EAGLE-1's tree has 25 nodes below the root; the others' are the config's.
    nodes = 26 if method == "EAGLE" else module.TARGET.n_nodes
    assert decoding.tree.n_nodes == nodes

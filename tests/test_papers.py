"""Configs of the papers' targets: sizes that give the published parameter counts."""

import importlib

import jax
import pytest

from eagle_jax import target

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

"""Strict settings for every test, before any array exists."""

import os

os.environ["JAX_PLATFORMS"] = "cpu"  # for processes that tests start, too

import jax
import pytest

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")


@pytest.fixture(scope="session")
def default_target():
    """The default target's file; skips where it is not in the cache yet."""
    from eagle_jax import weights

    path = weights.default_cache_dir() / "SmolLM2-135M-Instruct.Q4_1.gguf"
    if not path.exists():
        pytest.skip(
            "the default target is not in the cache; run experiments.ablate once"
        )
    return path


@pytest.fixture(autouse=True, scope="module")
def forgotten_programs():
    """Drops a file's compiled programs: thousands of them exhaust memory mappings."""
    yield
    jax.clear_caches()

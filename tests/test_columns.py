"""The CPU kernel for a few columns, against NumPy in float64."""

import concurrent.futures
import subprocess
import sys

import drivers
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eagle_jax import columns, layers


def pair(F: int, D: int, M: int, seed: int = 0):
    rng = np.random.default_rng(seed)
    draw = lambda *shape: rng.standard_normal(shape, dtype=np.float32)  # noqa: E731
    return draw(F, D), draw(D, M)


@pytest.fixture
def one_device(monkeypatch):
    """As in a process of its own; conftest makes eight devices."""
    pytest.importorskip("numba")
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    assert columns.register()


@pytest.mark.parametrize("M", range(1, 9))
@pytest.mark.parametrize("F, D", [(1536, 576), (576, 1536), (2, 16), (66, 1024)])
def test_equals_numpy_for_any_number_of_rows_and_columns(one_device, F, D, M):
    w, x = pair(F, D, M)
    got = np.asarray(jax.jit(columns.product)(w, x))
    expected = w.astype(np.float64) @ x
    # Sums of D products of size one: float32 rounds each to 6e-8 of the sum so far.
    np.testing.assert_allclose(got, expected, atol=1e-6 * D**0.5 * 4, rtol=0)


def test_a_column_comes_out_the_same_in_any_company(one_device):
    w, x = map(jnp.asarray, pair(192, 576, 8))
    whole = np.asarray(columns.product(w, x))
    for M in range(1, 8):
        np.testing.assert_array_equal(columns.product(w, x[:, :M]), whole[:, :M])
    np.testing.assert_array_equal(columns.product(w, x[:, 5:6]), whole[:, 5:6])


def test_derivatives_are_those_of_a_product(one_device):
    w, x = map(jnp.asarray, pair(64, 48, 3))
    ours, xla = (
        jax.grad(lambda w, x, f=f: (f(w, x) ** 2).sum(), (0, 1))(w, x)
        for f in (columns.product, lambda w, x: jnp.dot(w, x, precision="highest"))
    )
    for a, b in zip(ours, xla, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-3)


def test_batched_columns_are_one_product_each(one_device):
    w, x = map(jnp.asarray, pair(64, 48, 6))
    parts = x.reshape(48, 2, 3).transpose(1, 0, 2)
    got = jax.vmap(columns.product, (None, 0))(w, parts)
    expected = jnp.stack([columns.product(w, part) for part in parts])
    np.testing.assert_array_equal(got, expected)


def test_many_threads_at_once(one_device):
    pairs = [pair(1024, 512, 4, seed) for seed in range(8)]
    program = jax.jit(columns.product)
    expected = [np.asarray(program(*p)) for p in pairs]

    def repeat(i: int) -> bool:
        return all(
            (np.asarray(program(*pairs[i])) == expected[i]).all() for _ in range(50)
        )

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        assert all(pool.map(repeat, range(8)))


def test_linear_uses_it_on_a_cpu_and_nowhere_else(one_device):
    w, x = pair(2 * 320, 576, 4)
    w, x = jnp.asarray(w).reshape(2, 320, 576), jnp.asarray(x)[:, None]
    traced = jax.jit(layers.linear).trace(w, x)
    assert "eagle_columns" in traced.lower().as_text()
    on_tpu = traced.lower(lowering_platforms=("tpu",)).as_text()
    assert "eagle_columns" not in on_tpu and "dot_general" in on_tpu
    got = traced.lower().compile()(w, x)
    expected = np.einsum("ofd,dbt->ofbt", np.asarray(w, np.float64), np.asarray(x))
    np.testing.assert_allclose(got, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    "F, D, M, dtype",
    [
        (320, 576, 1, "float32"),  # XLA's matrix-vector product is as quick
        (320, 576, 9, "float32"),
        (321, 576, 4, "float32"),
        (320, 584, 4, "float32"),
        (64, 64, 4, "float32"),
        (320, 576, 4, "bfloat16"),
    ],
)
def test_what_does_not_suit(one_device, F, D, M, dtype):
    assert columns.suits(jnp.ones((320, 576)), jnp.ones((576, 4)))
    assert not columns.suits(jnp.ones((F, D), dtype), jnp.ones((D, M), dtype))


def test_several_devices_do_not_suit():
    assert jax.device_count() == 8
    assert not columns.suits(jnp.ones((320, 576)), jnp.ones((576, 4)))


def test_a_mesh_in_view_does_not_suit(one_device):
    with jax.set_mesh(jax.make_mesh((1,), ("data",), devices=jax.devices()[:1])):
        assert not columns.suits(jnp.ones((320, 576)), jnp.ones((576, 4)))


def test_threads_may_ask_for_it_at_once():
    pytest.importorskip("numba")
    asked = "from concurrent.futures import ThreadPoolExecutor as Pool\n"
    asked += "from eagle_jax import columns\n"
    asked += "print(*Pool(4).map(lambda _: columns.register(), range(4)))"
    said = subprocess.run(
        [sys.executable, "-c", asked], cwd=drivers.ROOT, capture_output=True, text=True
    )
    assert said.stdout.split() == ["True"] * 4, said.stderr


def test_without_numba_or_its_compiler_or_with_another_xla_it_is_not_used(monkeypatch):
    for name, value in (("TESTED_INTERFACE", (0, 999)), (None, None)):
        with monkeypatch.context() as patch:
            if name:
                patch.setattr(columns, name, value)
            else:
                patch.setitem(sys.modules, "numba", None)
            assert not columns._register.__wrapped__()
    config = pytest.importorskip("numba.core.config")
    monkeypatch.setattr(config, "DISABLE_JIT", 1)
    assert not columns._register.__wrapped__()

"""`compile_tpu`: the hand count against sizes counted another way; a compiled slice."""

import dataclasses
import math
import re

import pytest

from configs import llama31_8b, vicuna_33b
from eagle_jax import sharding
from experiments import compile_tpu
from experiments.compile_tpu import CHIPS, EXCHANGE_SECONDS, Run, Work


def run_of(module, text: str, devices=None) -> Run:
    published, mesh = module.TARGET, sharding.make_mesh(text, devices)
    t = sharding.padded(published.sizes, mesh.shape["model"])
    return Run(module.get_config(), t, mesh, rows=1, slots=1024)


def test_a_plain_step_reads_the_published_weights_and_the_cache():
    counted = compile_tpu.count(run_of(llama31_8b, "model:8"))["plain step"]
    n, V, D, L, K, C = 8_030_261_248, 128_256, 4096, 32, 8, 128
    norms = (2 * L + 1) * D  # whole on every chip
    weights = (n - V * D - norms) / 8 + norms  # the embedding is looked up
    assert counted.n_bytes == 2 * (weights + 2 * L * K * C * 1024 / 8)
    assert counted.flops == 2 * weights + 4 * L * 32 * C * 1024 / 8
    assert counted.n_exchanges == 2 * L + 1
    assert counted.exchanged == (2 * L + 1) * D * 2


def test_a_step_is_its_three_parts():
    work = compile_tpu.count(run_of(llama31_8b, "model:8"))
    D, F, U, X, C = 4096, 14336, 32000, 1024, 128
    layer = (32 + 16) * C * 2 * D + D * 32 * C + 3 * D * F
    whole = 2 * 2 * 8 * C * X  # its cache, keys and values, in bytes
    level = 2 * (layer + U * D) + whole
    propose = 2 * U * D + 7 * level  # depth 8: the first level needs the LM head alone
    assert work["propose"].n_bytes == pytest.approx(propose / 8, rel=1e-3)  # norms
    extend = 2 * (layer + 3 * D * D) + whole
    rest = work["step"].n_bytes - work["propose"].n_bytes - work["verify"].n_bytes
    assert rest == pytest.approx(extend / 8, rel=1e-3)


def test_heads_that_do_not_divide_are_padded_in_the_count():
    t = run_of(vicuna_33b, "model:8").target
    assert (t.n_heads, t.n_kv_heads) == (56, 56)


def test_a_roofline_takes_the_slower_of_memory_and_compute():
    v5e = CHIPS["v5e"]
    slow = compile_tpu.roofline(Work(819e9, 197e12 / 2, 0, 0), v5e)
    assert (slow["seconds"], slow["limit"]) == (1.0, "memory")
    busy = compile_tpu.roofline(Work(0, 197e12 * 2, 3, 200e9), v5e)
    assert busy["limit"] == "compute"
    assert busy["seconds"] == pytest.approx(2.0 + 3 * EXCHANGE_SECONDS + 4.0, rel=1e-9)


def test_the_speedup_of_a_tau_is_tau_over_the_cost_of_a_step():
    run, chip = run_of(llama31_8b, "model:8"), CHIPS["v5e"]
    rows = compile_tpu.predict(run, llama31_8b.TARGET, chip)
    assert {row["target"] for row in rows} == set(llama31_8b.TARGET.papers)
    work = compile_tpu.count(run)
    plain, step = (
        compile_tpu.roofline(work[part], chip)["seconds"]
        for part in ("plain step", "step")
    )
    eagle3 = [row for row in rows if row["method"] == "EAGLE-3"]
    assert len(eagle3) == 24
    for row in eagle3:
        assert row["speedup"] == pytest.approx(row["tau"] * plain / step)
    # The older heads cost no less per drafted level, and their trees are smaller.
    assert {row["method"] for row in rows} == {"EAGLE", "EAGLE-2", "EAGLE-3"}


def test_a_config_without_sizes_is_refused():
    with pytest.raises(ValueError, match="has no TARGET with the sizes"):
        compile_tpu.target_of(re)


def test_a_small_target_compiles_for_a_slice():
    pytest.importorskip(
        "libtpu", reason="needs the TPU compiler: pip install -e .[tpu]"
    )
    devices = compile_tpu.slice_devices("v5e:2x4", CHIPS["v5e"])
    run = run_of(llama31_8b, "data:1,model:8", devices)
    t = dataclasses.replace(run.target, n_layers=4, taps=(0, 1, 2), d_mlp=2048)
    run = run._replace(target=t)
    row = compile_tpu.compile_part(run, "verify", CHIPS["v5e"])
    assert row["fits"]
    text = compile_tpu.lower(run, "verify").compile().as_text()
    # One layer is compiled, scanned four times; no weight is gathered or moved.
    assert row["collectives"].pop("all-reduce") <= 4
    assert not re.search(r"all-to-all|reduce-scatter", text)
    gathered = re.findall(r"= \w+\[([\d,]*)\].*? all-gather", text)
    sizes = [math.prod(int(n) for n in x.split(",") if n) for x in gathered]
    assert max(sizes, default=0) < 4096 * 60

"""`compile_tpu`: the hand count against sizes counted another way; a compiled slice."""

import collections
import dataclasses
import itertools
import re

import hlo
import pytest
from absl import flags

from configs import llama31_8b, mixtral_8x7b, vicuna_33b
from eagle_jax import cache, sharding
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
    flags.FLAGS(["test"])
    with pytest.raises(ValueError, match="has no TARGET with the sizes"):
        compile_tpu.target_of(re)


@pytest.mark.parametrize("slots", [2048, 131072])
@pytest.mark.parametrize("used", [1, 700, 1800])
def test_a_verify_step_reads_weights_and_the_cache_in_use(slots, used):
    run = of_64_nodes(run_of(llama31_8b, "model:8"))._replace(slots=slots, used=used)
    counted = compile_tpu.count(run)["verify"].n_bytes
    assert needed_bytes(used) <= counted <= 1.15 * needed_bytes(used)


def of_64_nodes(run: Run) -> Run:
    tree = dataclasses.replace(run.cfg.tree, n_nodes=N_NODES)
    return run._replace(cfg=dataclasses.replace(run.cfg, tree=tree))


def needed_bytes(used: int) -> float:
    """What a chip of eight must read of 8B: matrices and norms, keys and values in use."""
    V, D, L, K, C = 128_256, 4096, 32, 8, 128
    return 2 * (8_030_261_248 - V * D + 2 * L * K * C * used) / 8


@pytest.fixture(scope="module")
def slice_of_v5e():
    pytest.importorskip(
        "libtpu", reason="needs the TPU compiler: pip install -e .[tpu]"
    )
    return compile_tpu.slice_devices("v5e:2x4", CHIPS["v5e"])


N_NODES = 64
SLOTS = 6144  # none of its eighths is the size of anything else in the model


@pytest.fixture(scope="module")
def verify_8b(slice_of_v5e) -> hlo.Program:
    run = of_64_nodes(run_of(llama31_8b, "model:8", slice_of_v5e))
    run = run._replace(slots=SLOTS)
    return hlo.parse(compile_tpu.lower(run, "verify").compile().as_text())


def test_the_compiled_verify_step_copies_no_weights_and_no_cache(verify_8b):
    D, C, smallest = 4096, 128, 4096 * 512  # of the matrices on one chip: `wo`
    caches = {(C, n) for n in cache.prefixes(SLOTS)}
    inner = hlo.fused(verify_8b)
    n_copies = 0
    for name, inside in verify_8b.items():
        for one in inside.values():
            largest = max(shape.size for shape in one.shapes)
            axes = {tuple(sorted({*shape.dims} - {1})) for shape in one.shapes}
            if one.op in ("copy", "transpose"):
                n_copies += 1
                assert largest <= D * N_NODES, one
                assert not axes & caches, one
            # A slice of the stack or of a cache that is written out before it is used.
            elif name not in inner and one.op not in hlo.FREE | {"while"}:
                assert largest < smallest, one
                assert not axes & caches, one
    assert n_copies  # of activations: the text is read as it should be


def test_the_compiled_verify_step_exchanges_sums_of_activations_alone(verify_8b):
    found = collections.Counter()
    targets = set()
    for inside in verify_8b.values():
        for one in inside.values():
            assert not any("S(5)" in shape.layout for shape in one.shapes)  # the host's
            assert not re.match("infeed|outfeed|send|recv|host", one.op), one
            if re.match("all-|reduce-scatter|collective|ragged", one.op):
                found[one.op.removesuffix("-start"), one.shapes[-1].size] += 1
            if one.op == "custom-call":
                targets |= set(re.findall(r'custom_call_target="([^"]*)"', one.rest))
    # Embedding, attention and feed-forward are sums; of the vocabulary every chip offers
    # its best token.
    D, n_chips = 4096, 8
    assert found == {
        ("all-reduce", D * N_NODES): 3,
        ("all-gather", n_chips * N_NODES): 2,
    }
    assert targets <= {"AllocateBuffer", "AssumeGatherIndicesInBound"}


def test_the_compiled_verify_step_moves_the_bytes_we_count(verify_8b):
    run = of_64_nodes(run_of(llama31_8b, "model:8"))
    sizes = cache.prefixes(SLOTS)
    for branch, (before, n) in enumerate(itertools.pairwise((0, *sizes))):
        moved = hlo.hbm_bytes(verify_8b, trips=32, branch=branch)
        counted = compile_tpu.count(run._replace(slots=SLOTS, used=n))["verify"]
        assert moved == pytest.approx(counted.n_bytes, rel=0.01)
        # The fewest and the most slots in use for which this branch is taken.
        assert needed_bytes(n) <= moved <= 1.15 * needed_bytes(before + 1)


def test_a_quantised_target_is_read_as_it_is_stored(slice_of_v5e):
    run = of_64_nodes(run_of(llama31_8b, "model:8", slice_of_v5e))
    run = run._replace(cfg=dataclasses.replace(run.cfg, quantise="int8"), slots=SLOTS)
    compiled = compile_tpu.lower(run, "verify").compile()
    used = cache.prefixes(SLOTS)[0]
    moved = hlo.hbm_bytes(hlo.parse(compiled.as_text()), trips=32, branch=0)
    counted = compile_tpu.count(run._replace(used=used))["verify"].n_bytes
    assert moved == pytest.approx(counted, rel=0.02)
    assert moved < 0.53 * needed_bytes(used)  # of the same step in bfloat16
    assert compiled.memory_analysis().temp_size_in_bytes < 2e6  # no matrix written down


def test_the_experts_of_a_mixture_stay_where_they_are(slice_of_v5e):
    run = run_of(mixtral_8x7b, "model:8", slice_of_v5e)
    row = compile_tpu.compile_part(run, "verify", CHIPS["v5e"])
    assert row["collectives"] == {"all-reduce": 3, "all-gather": 2}
    assert row["temporary_bytes"] < 1e8  # no matrix of 470 MB, whole or in part


def test_a_small_target_compiles_for_a_slice(slice_of_v5e):
    run = run_of(llama31_8b, "data:2,model:4", slice_of_v5e)._replace(rows=2)
    t = dataclasses.replace(run.target, n_layers=4, taps=(0, 1, 2), d_mlp=2048)
    row = compile_tpu.compile_part(run._replace(target=t), "verify", CHIPS["v5e"])
    assert row["fits"]
    # One layer is compiled, scanned four times; the longest row is asked for once.
    assert row["collectives"].pop("all-reduce") == 4
    assert row["collectives"].keys() <= {"all-gather"}

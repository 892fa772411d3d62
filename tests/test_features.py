"""`features`: what is stored is what the target says, and a kill loses nothing."""

import dataclasses
import json

import drivers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl import flags

from configs import tiny as tiny_config
from eagle_jax import data
from eagle_jax.data import Packed, Sample
from experiments import features, trainer, variants
from experiments.common import Setup
from experiments.features import Online, Store


@pytest.fixture(scope="module")
def setup() -> Setup:
    flags.FLAGS(["test"])
    cfg = tiny_config.get_config()
    cfg = dataclasses.replace(
        cfg, train=dataclasses.replace(cfg.train, row_length=128, rows=2)
    )
    return Setup(cfg, *tiny_config.load("float32", ()), "tiny")


@pytest.fixture(scope="module")
def samples(setup) -> list[Sample]:
    return trainer.read_samples(setup, (drivers.home() / "train.jsonl",))[:12]


def batch(samples: list[Sample], order: list[int]) -> Packed:
    return data.rows_of(data.pack(samples, order, 128), 0, 2)


def assert_read(store: Store, online: Online, samples: list[Sample]) -> None:
    for order in ([0, 1, 2, 3], [7, 3, 5]):  # other rows, other places
        packed = batch(samples, order)
        real = packed.segments > 0
        got, want = np.asarray(store.raw(packed)), np.asarray(online.raw(packed))
        np.testing.assert_allclose(got[real], want[real], rtol=2e-3, atol=1e-4)


def test_stored_features_are_the_target_s_wherever_a_sample_is_packed(
    setup, samples, tmp_path
):
    store = Store(setup, tmp_path)
    store.add(samples)
    assert_read(store, Online(setup), samples)
    assert store.path.stat().st_size == 2 * store.width * sum(
        len(s.tokens) for s in {s.tokens.tobytes(): s for s in samples}.values()
    )


def test_what_is_stored_is_not_computed_again(setup, samples, tmp_path, monkeypatch):
    Store(setup, tmp_path).add(samples[:5])
    computed = []
    raw = features._raw

    def counting(params, batch, cfg):
        computed.append(int((np.asarray(batch.positions) == 0).sum()))
        return raw(params, batch, cfg)

    monkeypatch.setattr(features, "_raw", counting)
    again = Store(setup, tmp_path)
    again.add(samples[:5])
    assert computed == []
    again.add(samples)
    assert computed
    assert_read(again, Online(setup), samples)


def test_a_batch_that_was_not_added_is_refused(setup, samples, tmp_path):
    store = Store(setup, tmp_path)
    store.add(samples[2:5])
    store.raw(
        batch(samples, [2, 3, 4])
    )  # padding points at sample 0, which is not there
    for order in ([1, 2], [2, 11]):
        with pytest.raises(LookupError, match="its samples were not added"):
            store.raw(batch(samples, order))


def test_only_samples_that_training_reads_get_features(setup, samples, tmp_path):
    def read(supervised_tokens: int) -> tuple[trainer.Job, list[int]]:
        train = dataclasses.replace(
            setup.cfg.train, supervised_tokens=supervised_tokens, features="stored"
        )
        given = setup._replace(cfg=dataclasses.replace(setup.cfg, train=train))
        job = trainer.plan(given, variants.parse("eagle3"), samples, tmp_path)
        return job, [sample.start for sample in trainer.samples_read(job)]

    job, some = read(30)
    assert job.n_steps < trainer.SCALE_BATCHES < len(job.samples)
    seen = set()
    for k, packed in data.batches(job.samples, setup.cfg.seed, 2, 128):
        if k == trainer.SCALE_BATCHES:
            break
        seen |= set(packed.source[packed.segments > 0].tolist())
    assert some == [s.start for s in job.samples if s.start in seen]
    job, everything = read(10_000)
    assert everything == [sample.start for sample in job.samples]
    job, _ = read(30)
    assert isinstance(job.features, Store)
    job.features.add(trainer.samples_read(job))
    trainer.feature_scale(job)  # reads the first batches, and finds them


def test_a_kill_loses_the_newest_sample_at_most(setup, samples, tmp_path):
    store = Store(setup, tmp_path)
    store.add(samples)
    whole = store.path.read_bytes()
    lines = store.index.read_text().splitlines(keepends=True)
    # Features without their line, and a torn line.
    store.index.write_text("".join(lines[:-2]) + lines[-2][:9])
    torn = Store(setup, tmp_path)
    assert len(torn.start) == len(lines) - 2
    torn.add(samples)
    assert_read(torn, Online(setup), samples)
    # Lines whose features are not there, as after a lost write.
    store.path.write_bytes(whole[: len(whole) // 2])
    store.index.write_text("".join(lines))
    short = Store(setup, tmp_path)
    assert len(short.start) < len(lines)
    short.add(samples)
    assert_read(short, Online(setup), samples)


def test_a_damaged_store_is_mended(setup, samples, tmp_path):
    store = Store(setup, tmp_path)
    store.add(samples)
    lines = store.index.read_text().splitlines(keepends=True)
    spoilt = ["{}\n", '{"sample": 3, "start": "x", "n": null}\n', "\0\n"]
    entry = json.loads(lines[0])
    spoilt += [json.dumps(entry | change) + "\n" for change in DAMAGES]
    store.index.write_text("".join([*spoilt, *lines[1:]]))
    mended = Store(setup, tmp_path)
    assert len(mended.start) == len(lines) - 1
    mended.add(samples)
    assert_read(mended, Online(setup), samples)
    with store.path.open("ab") as file:
        file.write(bytes(5))  # part of a row
    again = Store(setup, tmp_path)
    again.add(samples)
    assert_read(again, Online(setup), samples)


DAMAGES = ({"start": -1}, {"start": 1 << 70}, {"n": 0}, {"n": True}, {"sample": None})


def test_heads_read_what_they_are_made_for(setup, samples):
    packed = batch(samples, [0, 1])
    raw = Online(setup).raw(packed)
    t = setup.target_cfg
    scale = np.full(len(t.taps) * t.d_model, 2.0, np.float32)
    taps = features.given(raw, jax.numpy.asarray(scale), t.d_model, features.TAPS)
    top = np.asarray(raw)[..., -t.d_model - 3 : -3].transpose(2, 0, 1)
    np.testing.assert_allclose(taps.top, top)
    scores = np.asarray(setup.target_params["head"]) @ top.reshape(t.d_model, -1)
    np.testing.assert_array_equal(taps.likeliest.reshape(-1), scores.argmax(axis=0))
    want = np.asarray(raw)[..., : -t.d_model - 3].transpose(2, 0, 1) / 2
    np.testing.assert_allclose(taps.read, want, rtol=1e-6)
    head = dataclasses.replace(features.TAPS, head="eagle1")
    ones = jax.numpy.ones(t.d_model)
    np.testing.assert_allclose(features.given(raw, ones, t.d_model, head).read, top)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_token_ids_survive_every_type_of_features(dtype):
    ids = jnp.asarray([[0, 127, 128, 257], [2049, 49_151, 128_255, 151_935]])
    raw = jnp.concatenate([jnp.ones((8, 2, 4)), features.digits(ids).astype("float32")])
    raw = raw.transpose(1, 2, 0).astype(dtype)
    ones = jnp.ones(4, "bfloat16")
    found = features.given(raw, ones, 4, features.TAPS)
    np.testing.assert_array_equal(found.likeliest, ids)

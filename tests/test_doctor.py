"""`doctor` and `preview`: wiring mistakes are found, data are shown as they are trained."""

import dataclasses

import drivers
import jax.numpy as jnp
import numpy as np
import pytest
from absl import flags

from configs import tiny as tiny_config
from eagle_jax import draft, heads, train
from eagle_jax.config import TrainConfig
from eagle_jax.train import Batch
from experiments import doctor
from experiments.common import Setup


@pytest.fixture(scope="module")
def setup() -> Setup:
    flags.FLAGS(["test"])
    cfg = tiny_config.get_config()
    cfg = dataclasses.replace(cfg, train=dataclasses.replace(cfg.train, row_length=128))
    return Setup(cfg, *tiny_config.load("float32", ()), "tiny")


def head_folder():
    return drivers.only(drivers.trained()[0] / "heads")


@pytest.fixture(scope="module")
def batch(setup) -> Batch:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(doctor.FLAGS, "data", [str(drivers.home() / "train.jsonl")])
        return doctor.read(setup)


def test_agreement_is_the_accuracy_of_training(setup, batch):
    """Against `token_loss`, which counts labels where we count everything."""
    head = heads.load_head(head_folder(), setup.target_cfg)
    given = train.target_features(
        setup.target_params, batch, setup.target_cfg, head.cfg
    )
    tied = draft.tie(head.params, setup.target_params, head.cfg)
    everything = batch._replace(mask=batch.segments > 0)
    settings = TrainConfig(ttt_steps=doctor.STEPS)
    said = train.likeliest(setup.target_params, given.top)
    known = jnp.isin(said, head.params["draft_to_target"])
    _, metrics = train.token_loss(
        tied, setup.target_params, everything, given, head.cfg, settings
    )
    labels = train.labels(everything, "label")
    n = [int((labels & (batch.positions > i)).sum()) for i in range(doctor.STEPS)]
    want = np.dot(metrics.accuracy, n) / sum(n)
    # The last token of a conversation is no label, but the target says something there.
    ends = (batch.segments > 0) & ~labels & (batch.positions > 0)
    assert 0 < ends.sum() < 0.3 * labels.sum() and bool(known.any())
    found = doctor.agrees(tied, batch, given.read, said, head.cfg)
    assert abs(float(found) - want) < ends.sum() / labels.sum()
    exact = doctor.agrees(tied, batch, given.read, jnp.where(ends, -1, said), head.cfg)
    total = sum(
        int(((batch.segments > 0) & (batch.positions > i)).sum())
        for i in range(doctor.STEPS)
    )
    np.testing.assert_allclose(float(exact) * total, want * sum(n), rtol=1e-4)


@pytest.mark.parametrize(
    ("mistake", "remedy"),
    [
        ({"taps": -1}, "inputs of layers"),
        ({"norm_before_residual": True}, "norm_before_residual False"),
        ({"norm_output": True}, "norm_output False"),
        ({"rope_theta": 1e6}, "rope_theta"),
    ],
)
def test_a_wiring_mistake_is_found_and_undone(setup, batch, mistake, remedy):
    head = heads.load_head(head_folder(), setup.target_cfg)
    right = doctor.diagnose(setup, head, batch)
    by = mistake.pop("taps", 0)
    taps = tuple(tap + by for tap in head.taps)
    wrong = head._replace(taps=taps, cfg=dataclasses.replace(head.cfg, **mistake))
    found = doctor.diagnose(setup, wrong, batch)
    print(
        [(f.change, f.agreement) for f in right[0]],
        [(f.change, f.agreement) for f in found[0]],
    )
    assert len(right) == 1
    assert len(found) > 1 and found[1][0].change.startswith(remedy)
    assert found[-1][0].wiring == right[0][0].wiring

"""`doctor` and `preview`: wiring mistakes are found, data are shown as they are trained."""

import dataclasses

import drivers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl import flags
from absl.testing import flagsaver

from configs import tiny as tiny_config
from eagle_jax import draft, heads
from eagle_jax.config import DraftConfig
from eagle_jax.heads import Head
from eagle_jax.train import Batch
from experiments import doctor, variants
from experiments.common import Setup


@pytest.fixture(scope="module")
def setup() -> Setup:
    flags.FLAGS(["test"])
    cfg = tiny_config.get_config()
    cfg = dataclasses.replace(cfg, train=dataclasses.replace(cfg.train, row_length=128))
    return Setup(cfg, *tiny_config.load("float32", ()), "tiny")


@pytest.fixture(scope="module")
def batch(setup) -> Batch:
    with flagsaver.flagsaver(data=[str(drivers.home() / "train.jsonl")]):
        return doctor.read(setup)


@pytest.fixture(scope="module")
def head(setup, tmp_path_factory) -> Head:
    """A random head whose attention looks sharply, written and read again."""
    cfg = variants.head_config(variants.parse("eagle3"), setup.cfg, setup.target_cfg)
    params = draft.init(jax.random.key(0), cfg, setup.target_cfg)
    params = jax.tree.map(lambda x: 8 * x if x.ndim > 1 else x, params)
    params["layer"]["wqkv"] = 3 * params["layer"]["wqkv"]
    params["draft_to_target"] = np.arange(cfg.vocab_size)
    path = tmp_path_factory.mktemp("heads") / "random"
    heads.save_head(
        path,
        cfg,
        params,
        setup.target_cfg.taps,
        "official",
        meta={},
        target=setup.target_cfg,
    )
    return heads.load_head(path, setup.target_cfg)


def test_agreement_counts_slots_against_what_follows_their_tokens(batch):
    rng = np.random.default_rng(0)
    named = rng.integers(0, 3, (doctor.STEPS, *batch.tokens.shape))
    said = rng.integers(0, 3, batch.tokens.shape)
    right = []
    for row, segments in enumerate(np.asarray(batch.segments)):
        for number in range(1, segments.max() + 1):
            (places,) = np.nonzero(segments == number)
            for step in range(doctor.STEPS):
                # Slot `first` has read the token after it, and in later steps the next.
                right += [
                    named[step, row, slot] == said[row, slot + 1 + step]
                    for slot in places[: -1 - step]
                ]
    assert len(right) > 100
    assert doctor.agrees(named, said, batch) == pytest.approx(np.mean(right))


def test_slots_name_what_the_head_says_when_it_drafts(setup, batch, head):
    tied = draft.tie(head.params, setup.target_params, head.cfg)
    given, _ = doctor._features(setup.target_params, batch, setup.target_cfg)
    named = doctor.names(tied, batch, given, head.cfg)
    assert named.shape == (doctor.STEPS, *batch.tokens.shape)
    # The first slots of the first conversation, against the draft's own prefill.
    state = draft.empty(head.cfg, 2, 64)
    state = draft.extend(
        tied,
        state,
        batch.tokens[:, 1:5],
        given[:, :, :4],
        jnp.full(2, 4, jnp.int32),
        head.cfg,
    )
    scores = draft.logits(tied, state.hidden[:, :, None], head.cfg)[..., 0]
    np.testing.assert_array_equal(named[0, :, 3], scores.argmax(axis=0))


@pytest.mark.parametrize(
    ("mistake", "found"),
    [
        ({"taps": -1}, "inputs of layers 2,4,5"),
        ({"norm_before_residual": True}, "norm_before_residual False"),
        ({"rope_theta": 1e6}, "rope_theta 10000.0"),
    ],
)
def test_a_wiring_mistake_is_found_and_undone(
    setup, batch, head, monkeypatch, mistake, found, capsys
):
    """The head itself, rightly wired, stands for a target that it has learnt."""
    tied = draft.tie(head.params, setup.target_params, head.cfg)
    given, _ = doctor._features(setup.target_params, batch, setup.target_cfg)
    learnt = doctor.names(tied, batch, given, head.cfg)
    monkeypatch.setattr(
        doctor, "agrees", lambda named, *_: float((named == learnt).mean())
    )
    assert head.taps == (2, 4, 5)
    taps = tuple(tap + mistake.get("taps", 0) for tap in head.taps)
    switches = {name: value for name, value in mistake.items() if name != "taps"}
    cfg: DraftConfig = dataclasses.replace(head.cfg, **switches)
    rounds = doctor.diagnose(setup, head._replace(taps=taps, cfg=cfg), batch)
    assert rounds[0][0].agreement < 0.9
    assert [findings[0].change for findings in rounds[1:]] == [found]
    assert rounds[-1][0].agreement == 1
    doctor.show(rounds)
    said = capsys.readouterr().out
    assert "to 100.0% with:" in said and found in said


def test_a_head_that_is_wired_right_is_said_to_be(setup, batch, head, monkeypatch):
    monkeypatch.setattr(doctor, "agrees", lambda *_: 0.5)
    assert len(doctor.diagnose(setup, head, batch)) == 1
    medusa = head._replace(cfg=dataclasses.replace(head.cfg, head="medusa"))
    with pytest.raises(ValueError, match="knows EAGLE heads in published layouts"):
        doctor.diagnose(setup, medusa, batch)


def test_preview_prints_the_trained_part_and_totals():
    data = f"--data={drivers.home() / 'train.jsonl'}"
    said = drivers.run("preview", *drivers.target_flags(), data, "--samples=1")
    assert said.count("⟦") == 1 and "tokens supervised" in said
    assert "of them supervised" in said and "(draft.vocab_size)" in said

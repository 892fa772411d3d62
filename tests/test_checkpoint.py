"""`checkpoint`: what was saved comes back, and a torn newest one does no harm."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from eagle_jax import checkpoint
from eagle_jax.train import TrainState


def state_of(step: int) -> TrainState:
    params = {
        "fuse": jnp.arange(6, dtype=jnp.float32).reshape(2, 3) + step,
        "layer": {"wq": jnp.full((2, 2), step / 3, jnp.bfloat16)},
    }
    opt_state = optax.adamw(1e-3).init(params)
    opt_state = jax.tree.map(lambda leaf: leaf + jnp.ones((), leaf.dtype), opt_state)
    return TrainState(
        params, opt_state, jnp.asarray(step, jnp.int32), jnp.asarray(7, jnp.int32)
    )


def saved(folder: Path, *steps: int) -> Path:
    with checkpoint.open_manager(folder) as manager:
        for step in steps:
            checkpoint.save(manager, state_of(step))
    return folder


def tear(folder: Path, step: int) -> None:
    """Cuts a checkpoint's list of arrays short.

    Torn arrays leave threads of orbax behind that complain into whatever test comes
    next; test_trainer.py tears those, in a process of its own.
    """
    file = folder / str(step) / "default" / "_METADATA"
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def restored(folder: Path) -> TrainState | None:
    with checkpoint.open_manager(folder) as manager:
        return checkpoint.restore(manager, state_of(0))


def assert_same(ours: TrainState | None, theirs: TrainState) -> None:
    assert ours is not None
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def test_a_state_comes_back_bit_for_bit_with_its_types(tmp_path):
    state = restored(saved(tmp_path / "c", 3))
    assert_same(state, state_of(3))
    assert isinstance(state, TrainState)


def test_a_state_of_two_devices_is_restored_where_the_run_wants_it(tmp_path):
    """R705."""
    mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2])
    halves = jax.NamedSharding(mesh, jax.P("data"))
    state = state_of(3)
    state.params["fuse"] = jax.device_put(state.params["fuse"], halves)
    with checkpoint.open_manager(tmp_path / "c") as manager:
        checkpoint.save(manager, state)
        there = jax.devices()[5]
        like = jax.device_put(state_of(0), there)
        got = checkpoint.restore(manager, like)
    assert_same(got, state_of(3))
    assert all(leaf.devices() == {there} for leaf in jax.tree.leaves(got))


def test_the_newest_checkpoint_is_taken_and_two_are_kept(tmp_path):
    folder = saved(tmp_path / "c", 1, 2, 3)
    assert_same(restored(folder), state_of(3))
    assert sorted(p.name for p in folder.iterdir()) == ["2", "3"]


def test_a_step_is_saved_once(tmp_path):
    with checkpoint.open_manager(tmp_path / "c") as manager:
        checkpoint.save(manager, state_of(4))
        other = state_of(4)._replace(n_tokens=jnp.asarray(99, jnp.int32))
        checkpoint.save(manager, other)
        assert_same(checkpoint.restore(manager, state_of(0)), state_of(4))


def test_without_a_checkpoint_there_is_no_state(tmp_path):
    assert restored(tmp_path / "c") is None


def test_a_torn_newest_checkpoint_falls_back_with_a_warning(tmp_path, capfd):
    folder = saved(tmp_path / "c", 1, 2)
    tear(folder, 2)
    assert_same(restored(folder), state_of(1))
    said = capfd.readouterr().out
    assert "WARNING: the checkpoint of step 2 cannot be read" in said
    assert "going on from step 1" in said


def test_after_a_torn_checkpoint_its_step_is_saved_again(tmp_path):
    folder = saved(tmp_path / "c", 1, 2)
    tear(folder, 2)
    with checkpoint.open_manager(folder) as manager:
        checkpoint.restore(manager, state_of(0))
        checkpoint.save(manager, state_of(2))
    assert_same(restored(folder), state_of(2))
    # Nothing is deleted that a person might still want to look at.
    assert (tmp_path / "unreadable-2").is_dir()


def test_checkpoints_of_which_none_can_be_read_are_an_error(tmp_path):
    folder = saved(tmp_path / "c", 1, 2)
    tear(folder, 1)
    tear(folder, 2)
    with pytest.raises(ValueError, match=r"no checkpoint in .* can be read.*--retrain"):
        restored(folder)
    assert sorted(p.name for p in folder.iterdir()) == ["1", "2"]


def test_a_killed_save_leaves_the_others_alone(tmp_path):
    folder = saved(tmp_path / "c", 1, 2)
    half = folder / "3.orbax-checkpoint-tmp"
    half.mkdir()
    (half / "rest").write_bytes(b"half")
    assert_same(restored(folder), state_of(2))


def test_a_save_that_fails_names_the_step_and_what_is_good(tmp_path, monkeypatch):
    with checkpoint.open_manager(saved(tmp_path / "c", 1)) as manager:

        def full(*_, **__):
            # What tensorstore raises where the disk is full, not an OSError.
            raise ValueError("OUT_OF_RANGE: No space left on device\nmore\nlines")

        monkeypatch.setattr(manager, "save", full)
        with pytest.raises(OSError, match=r"step 2 could not .* disk full\? Good") as e:
            checkpoint.save(manager, state_of(2))
    assert "ones: 1." in str(e.value) and "\n" not in str(e.value)

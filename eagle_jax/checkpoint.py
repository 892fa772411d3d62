"""Checkpoints: all that a training run needs to go on, and targets ready to be loaded.

orbax writes into a temporary folder and renames it, so a killed save leaves the
previous checkpoint untouched.
"""

import shutil
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from eagle_jax import sharding
from eagle_jax.layers import Params
from eagle_jax.train import TrainState


def open_manager(folder: Path, keep: int = 2) -> ocp.CheckpointManager:
    """Opens a folder of checkpoints named by step; the newest `keep` are kept."""
    options = ocp.CheckpointManagerOptions(
        max_to_keep=keep,
        enable_async_checkpointing=False,
        cleanup_tmp_directories=True,
    )
    return ocp.CheckpointManager(folder.absolute(), options=options)


def save(manager: ocp.CheckpointManager, state: TrainState) -> None:
    """Saves a state under its step; an existing checkpoint of that step is left alone.

    Raises:
      OSError: it could not be written, for want of room for instance; the others stay.
    """
    step = int(state.step)
    if manager.latest_step() == step:
        return
    try:
        manager.save(step, args=ocp.args.StandardSave(state))
    except Exception as fault:  # a full disk is a ValueError of its storage library
        kept = ", ".join(map(str, manager.all_steps())) or "none"
        raise OSError(
            f"the checkpoint of step {step} could not be written to "
            f"{manager.directory}; is the disk full? Good ones: {kept}. "
            f"{_first_line(fault)}"
        ) from fault


def restore(manager: ocp.CheckpointManager, like: TrainState) -> TrainState | None:
    """Returns the newest readable state, or None if there is none.

    Newer checkpoints that cannot be read are moved beside the folder, with a warning:
    left there, they would stand in the way of the same steps and outlive good ones.

    Args:
      like: a state of the same shapes, such as a fresh one.

    Raises:
      ValueError: checkpoints are there, but none can be read.
    """
    abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
    faults = []
    for step in sorted(manager.all_steps(), reverse=True):
        try:
            saved = ocp.args.StandardRestore(abstract)
            state: TrainState = manager.restore(step, args=saved)  # type: ignore[assignment]
        except Exception as fault:  # orbax raises many kinds for a torn checkpoint
            faults.append((step, _first_line(fault)))
            continue
        for torn, reason in faults:
            aside = _set_aside(manager, torn)
            print(
                f"WARNING: the checkpoint of step {torn} cannot be read and is now "
                f"{aside}; going on from step {step}: {reason}",
                flush=True,
            )
        return state
    if faults:
        reasons = "; ".join(f"step {step}: {reason}" for step, reason in faults)
        raise ValueError(
            f"no checkpoint in {manager.directory} can be read ({reasons}); "
            f"start again with --retrain"
        )
    return None


def save_params(folder: Path, params: Params) -> None:
    """Writes parameters as they lie on the devices.

    Raises:
      OSError: it could not be written, for want of room for instance.
    """
    try:
        with ocp.StandardCheckpointer() as writer:
            writer.save(folder.absolute(), params)
    except Exception as fault:
        raise OSError(
            f"{folder} could not be written; is the disk full? {_first_line(fault)}"
        ) from fault


def restore_params(folder: Path, like: Any) -> Params:
    """Reads parameters straight to where they belong.

    Args:
      like: shapes, types and placements, such as `jax.ShapeDtypeStruct`s.

    Raises:
      ValueError: the checkpoint is damaged or of something else.
    """
    try:
        with ocp.StandardCheckpointer() as reader:
            params: Params = reader.restore(folder.absolute(), like)
    except Exception as fault:
        raise ValueError(
            f"{folder} cannot be read; delete it, and it is made again: "
            f"{_first_line(fault)}"
        ) from fault
    return params


def _first_line(fault: Exception) -> str:
    return (str(fault).strip() or type(fault).__name__).splitlines()[0][:300]


def _set_aside(manager: ocp.CheckpointManager, step: int) -> Path:
    folder = Path(manager.directory)
    aside = folder.parent / f"unreadable-{step}"
    if sharding.is_first():
        if aside.exists():
            shutil.rmtree(aside)
        (folder / str(step)).rename(aside)
    sharding.wait(f"checkpoint {step} set aside")
    manager.reload()
    return aside

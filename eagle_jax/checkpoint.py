"""Training checkpoints: everything a run needs to go on exactly where it stopped.

orbax writes into a temporary folder and renames it, so a killed save leaves the previous
checkpoint untouched.
"""

from pathlib import Path

import jax
import orbax.checkpoint as ocp

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
    """Saves a state under its step; an existing checkpoint of that step is left alone."""
    step = int(state.step)
    if manager.latest_step() != step:
        manager.save(step, args=ocp.args.StandardSave(state))


def restore(manager: ocp.CheckpointManager, like: TrainState) -> TrainState | None:
    """Returns the newest readable state, or None if there is none.

    Args:
      like: a state of the same shapes, such as a fresh one.

    Raises:
      ValueError: checkpoints are there, but none can be read.
    """
    abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
    faults = []
    for step in sorted(manager.all_steps(), reverse=True):
        try:
            state = manager.restore(step, args=ocp.args.StandardRestore(abstract))
        except Exception as fault:  # orbax raises many kinds for a torn checkpoint
            faults.append(f"step {step}: {str(fault).splitlines()[0][:200]}")
            continue
        for line in faults:
            print(f"checkpoint not readable, falling back: {line}", flush=True)
        return state
    if faults:
        raise ValueError(
            f"no checkpoint in {manager.directory} can be read ({'; '.join(faults)}); "
            f"start again with --retrain"
        )
    return None

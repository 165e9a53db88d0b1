"""Checkpoints: everything that the steps to come depend on, in Orbax.

A checkpoint holds the random keys too, and whoever has them can take the noise off: the folder is its owner's
alone.
"""

import dataclasses
import os
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from orbax.checkpoint.checkpoint_managers import LatestN

NUM_KEPT = 2
"""Checkpoints kept, so that one is whole whatever happens while the next is written."""


# Fields are Any: JAX also builds trees of placeholders in this form.
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainState:
    """The state of a run after a number of whole steps.

    Attributes:
      trained: the trained parameters; frozen leaves are None.
      opt_state: the optimizer chain's state, with the noise's step count.
      streams: the keys of all randomness, see `wtdp_jax.streams.Streams`.
    """

    trained: Any
    opt_state: Any
    streams: Any


class Checkpoints:
    """The checkpoints of one run, by step; a context manager."""

    def __init__(self, path: Path) -> None:
        """Opens, or creates, the folder of checkpoints, readable by its owner alone."""
        path.mkdir(exist_ok=True)
        path.chmod(0o700)
        options = ocp.CheckpointManagerOptions(
            preservation_policy=LatestN(NUM_KEPT),
            # A step must not return before its checkpoint is on disk: metrics and privacy.json speak of it.
            enable_async_checkpointing=False,
            # What a crash left unfinished.
            cleanup_tmp_directories=True,
        )
        self._manager = ocp.CheckpointManager(os.path.abspath(path), options=options)

    @property
    def latest_step(self) -> int | None:
        """Step of the newest whole checkpoint, or None."""
        return self._manager.latest_step()

    def save(self, step: int, state: TrainState) -> None:
        """Writes a state, whole or not at all; one that is already there for this step stays."""
        if step != self.latest_step:
            self._manager.save(step, args=ocp.args.StandardSave(state))

    def restore(self, like: TrainState) -> TrainState:
        """Returns the newest state.

        Args:
          like: gives structure, shapes, dtypes and placement.

        Raises:
          ValueError: if there is none, or it does not fit.
        """
        step = self.latest_step
        if step is None:
            raise ValueError(f"no checkpoint in {self._manager.directory}")
        abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
        return self._manager.restore(step, args=ocp.args.StandardRestore(abstract))

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *_: object) -> None:
        self._manager.close()

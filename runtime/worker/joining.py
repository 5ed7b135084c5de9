"""A replica that begins to take batches: it takes the state of another one of its module.

All replicas have the same weights at a checkpoint. So the one that joins at a marker reads the part
of that cut which another one has written; its counts, and its random numbers, are its own.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch

from dni_runtime.core.step import ModuleStep
from dni_runtime.cuts import document_file
from dni_runtime.errors import CheckpointError
from dni_runtime.rundir import RunDir
from dni_runtime.worker import checkpoint

LATE_S = 30.0
"""Longest time until files of another host are seen whole."""


class Others:
    """The other replicas of a module, by what they have written.

    A file that one of them has just written may be seen late, or in part.

    Args:
        run: The run directory.
        names: The other replicas.
        cut: The cut that a state is needed of.
    """

    def __init__(self, run: RunDir, names: Sequence[str], cut: int) -> None:
        self._parts = [run.checkpoint(cut, name) for name in names]
        self._until_s: float | None = None

    def state(self) -> checkpoint.State | None:
        """Return the state of one of them, as soon as one has written it.

        Raises:
            DamagedError: It has been damaged for a while.
            CheckpointError: It could not be read for a while.
        """
        for part in self._parts:
            if document_file(part).exists():
                try:
                    return checkpoint.read(part)
                except CheckpointError:
                    now_s = time.monotonic()
                    self._until_s = self._until_s or now_s + LATE_S
                    if now_s >= self._until_s:
                        raise
        return None


def as_own(step: ModuleStep, state: checkpoint.State) -> checkpoint.State:
    """Return another replica's state as one of this replica.

    Gradients that the other one has gathered for its next update stay with it.

    Args:
        step: This replica.
        state: The state of the other one.
    """
    tensors = {name: it for name, it in state[0].items() if not name.startswith("gradient.")}
    document: dict[str, Any] = state[1] | {"module": step.spec.module, "gathered": 0}
    if "position" in document:  # of a head, which may have to send the marker again
        document["again"] = {"id": document["cut"], "position": document["position"]}
    random = {"random.cpu": torch.get_rng_state()}
    return {**tensors, **random}, document

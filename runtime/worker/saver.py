"""Saving a module's state: at the cuts of its chain, and at intervals for its own restart."""

from __future__ import annotations

import time

from dni_runtime.core.step import ModuleStep
from dni_runtime.worker.checkpoint import CheckpointWriter, State, copy_state
from dni_runtime.worker.head import Head
from dni_runtime.worker.ledger import ModuleProgress
from dni_runtime.worker.resume import progress_document

SNAPSHOT_SHARE = 0.02
"""Largest share of the time spent on copying the module's state for snapshots."""


class StateSaver:
    """Copies a module's state and has it written."""

    def __init__(
        self,
        step: ModuleStep,
        writer: CheckpointWriter,
        *,
        cut: int,  # where the module started
        progress: ModuleProgress,
        head: Head | None,  # None for other modules
    ) -> None:
        self._step = step
        self._writer = writer
        self._progress = progress
        self._head = head
        self._newest = cut
        self._due_s = time.monotonic() + step.spec.snapshot_s

    def checkpoint(self, cut: int, *, over: bool, finite: bool) -> None:
        """Save the module's part of a cut; a state that is not finite replaces no other cut."""
        tensors, contents = self._state(over=over)
        contents = contents if finite else contents | {"finite": False}
        self._writer.write(cut, tensors, contents)

    def snapshot(self) -> None:
        """Save the module's own state for its restart, if that is due, cheap and finite."""
        every_s, id, now_s = self._step.spec.snapshot_s, self._progress.id, time.monotonic()
        if not every_s or now_s < self._due_s or self._writer.busy or id <= self._newest:
            return
        if self._step.finite:
            self._writer.write_snapshot(id, *self._state(over=False))
        self._newest = id
        took_s = time.monotonic() - now_s
        self._due_s = now_s + max(every_s, took_s / SNAPSHOT_SHARE)

    def _state(self, *, over: bool) -> State:
        tensors, contents = copy_state(self._step)
        position = oldest = None
        if self._head is not None:
            position, oldest = self._head.position, self._head.oldest()
        return tensors, contents | progress_document(
            self._progress, over=over, position=position, oldest=oldest
        )

"""Detection of NaN and infinite values in a module, and the reaction to them."""

from __future__ import annotations

import time

from torch import Tensor

from dni_runtime.core.finite import all_finite_or_masks, finite
from dni_runtime.core.step import ModuleStep
from dni_runtime.errors import DataError, DivergedError
from dni_runtime.run.documents.reports import DivergedValue
from dni_runtime.worker.device import Copies, HostCopy
from dni_runtime.worker.metrics import MetricsWriter

DATA = "the data"

WEIGHTS_SHARE = 0.01
"""Largest share of the time spent on checking all weights."""


class Divergence:
    """Checks what a module receives, computes and sends; acts as the chain's ``on_nan`` says.

    All but weights is checked in host memory, without waiting for a device.
    """

    def __init__(self, step: ModuleStep, metrics: MetricsWriter, copies: Copies) -> None:
        self._step = step
        self._metrics = metrics
        self._copies = copies
        self._policy = step.spec.on_nan
        self.skips = self._policy == "skip"  # batches that are not finite are skipped
        self._times = 0
        self._loss: tuple[int, HostCopy] | None = None
        self._look_at_s = 0.0

    def may_use(self, id: int, what: str, tensor: Tensor) -> bool:
        """Whether a batch's data or activation, in host memory, may be used; it may have masks."""
        return all_finite_or_masks((tensor,)) or self._found(id, what)

    def may_learn(self, id: int, g_BH: Tensor) -> bool:
        """Whether a gradient from downstream is finite, and may be learnt from."""
        if finite(g_BH):
            return True
        interface = self._step.interface
        sender = " or ".join(repr(edge.target) for edge in self._step.spec.targets)
        only_teaches = interface is not None and not interface.timing.applies
        self._found(id, f"the gradient from {sender}", mended=only_teaches)
        return False

    def note_loss(self, id: int, loss: Tensor | None) -> None:
        """Keep a batch's loss, and check the one before: a GPU has computed that by now."""
        before = self._loss
        self._loss = None if loss is None else (id, self._copies.to_host(loss))
        if before is not None and not finite(before[1].wait()):
            self._found(before[0], "the loss")

    def weights_finite(self, id: int) -> bool:
        """Whether the module's weights and statistics are finite."""
        self.note_loss(id, None)
        fine = self._step.finite
        if not fine:
            self._found(id, "a weight or statistic", lasting=True)
        return fine

    def look(self, id: int) -> None:
        """Check the weights from time to time; ``id`` is the newest batch."""
        began_s = time.monotonic()
        if began_s >= self._look_at_s:
            self.weights_finite(id)
            ended_s = time.monotonic()
            self._look_at_s = ended_s + (ended_s - began_s) / WEIGHTS_SHARE

    def _found(self, id: int, what: str, *, mended: bool = False, lasting: bool = False) -> bool:
        """Report a value that is not finite, and stop as ``on_nan`` says; return whether to use it.

        ``mended``: leaving it out repairs everything. ``lasting``: it affects every later batch.
        """
        self._times += 1
        if self._times & (self._times - 1) == 0:  # 1, 2, 4, 8, …: these become events
            self._metrics.diverged = DivergedValue(batch=id, what=what, times=self._times)
        if not mended and (self._policy == "stop" or (lasting and self.skips)):
            if what == DATA:
                raise DataError(
                    f"{what} is not finite (NaN or infinite) at batch {id}",
                    hint="correct it, or leave out such samples; 'on_nan: skip' skips such batches",
                )
            raise DivergedError(
                f"module {self._step.spec.module!r} has diverged: {what} is not finite at batch "
                f"{id}",
                hint="the newest finite checkpoint is kept. Check the data, lower the learning "
                "rate or clip gradients in a new run; 'on_nan: skip' skips such batches",
            )
        return self._policy == "warn"

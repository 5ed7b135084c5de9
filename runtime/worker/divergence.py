"""A module's numbers that are no numbers any more (NaN or infinite), and what is done then."""

from __future__ import annotations

import time

from torch import Tensor

from dni_runtime.core.finite import finite
from dni_runtime.core.step import ModuleStep
from dni_runtime.errors import DivergedError
from dni_runtime.worker.metrics import MetricsWriter

WEIGHTS_SHARE = 0.01
"""Looking through all weights takes at most this share of the time."""


class Divergence:
    """Looks at what a module takes, computes and sends; does what the chain's ``on_nan`` says.

    What is looked at lies in host memory, but for losses and weights: no device is waited for.

    Args:
        step: The module.
        metrics: Shows what is found.

    Attributes:
        skips: Whether batches are passed over that are not finite.
    """

    def __init__(self, step: ModuleStep, metrics: MetricsWriter) -> None:
        self._step = step
        self._metrics = metrics
        self._policy = step.spec.on_nan
        self.skips = self._policy == "skip"
        self._times = 0
        self._loss: tuple[int, Tensor] | None = None
        self._look_at_s = 0.0

    def may_use(self, id: int, what: str, tensor: Tensor) -> bool:
        """Whether a batch's data or activation may be used.

        Args:
            id: The batch.
            what: What the tensor is, for people.
            tensor: In host memory.

        Raises:
            DivergedError: It is not finite, and the run is to stop.
        """
        return finite(tensor) or self._found(id, what)

    def may_learn(self, id: int, g_BH: Tensor) -> bool:
        """Whether a gradient that has come from downstream is finite; nothing else is learnt from.

        Raises:
            DivergedError: It is not, the module is updated by it, and the run is to stop.
        """
        if finite(g_BH):
            return True
        interface, sender = self._step.interface, self._step.spec.downstream
        only_teaches = interface is not None and not interface.applies
        self._found(id, f"the gradient from {sender!r}", mended=only_teaches)
        return False

    def note_loss(self, id: int, loss: Tensor | None) -> None:
        """Look at a batch's loss, once the next one is computed: a GPU has it by then.

        Raises:
            DivergedError: One is not finite, and the run is to stop.
        """
        (before, self._loss) = (self._loss, None if loss is None else (id, loss))
        if before is not None and not finite(before[1]):
            self._found(before[0], "the loss")

    def weights_finite(self, id: int) -> bool:
        """Whether the module's state may be kept for good.

        Raises:
            DivergedError: It is not finite, and the run does not go on whatever happens.
        """
        self.note_loss(id, None)
        fine = self._step.finite
        if not fine:
            self._found(id, "a weight or statistic", lasting=True)
        return fine

    def look(self, id: int) -> None:
        """Look at the weights now and then; the batch is the newest.

        Raises:
            DivergedError: See :meth:`weights_finite`.
        """
        began_s = time.monotonic()
        if began_s >= self._look_at_s:
            self.weights_finite(id)
            ended_s = time.monotonic()
            self._look_at_s = ended_s + (ended_s - began_s) / WEIGHTS_SHARE

    def _found(self, id: int, what: str, *, mended: bool = False, lasting: bool = False) -> bool:
        """Show it.

        Args:
            id: The batch.
            what: What is not finite.
            mended: Whether leaving it out leaves nothing wrong.
            lasting: Whether it will be the same with every batch to come.

        Returns:
            Whether it is to be used all the same.
        """
        self._times += 1
        if self._times & (self._times - 1) == 0:  # 1, 2, 4, 8, …: these become events
            self._metrics.diverged = {"batch": id, "what": what, "times": self._times}
        if not mended and (self._policy == "stop" or (lasting and self.skips)):
            raise DivergedError(
                f"module {self._step.spec.module!r} has diverged: {what} is not finite at batch "
                f"{id}",
                hint="the newest finite checkpoint is kept. Look at the data, lower the learning "
                "rate or clip gradients in a new run; 'on_nan: skip' leaves such batches out",
            )
        return self._policy == "warn"

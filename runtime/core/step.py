"""The step of one module: forward, error signal, update, and late gradients.

This is the whole training of a module, without any transport: the module server drives it from the
wire, :class:`dni_runtime.core.chain.LocalChain` in one process.

A batch may come in several parts (micro-batches), each with an id of its own; the weights are
updated once all of their gradients have come.

It is one file because it is one class, whose methods share the state of the batches under way.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias, TypeVar, cast

import torch
from torch import Tensor, nn

from dni_runtime.core.backward import backward, changed_in_place, separate
from dni_runtime.core.counters import StepCounters
from dni_runtime.core.forward import Inputs, ModuleForward, as_inputs
from dni_runtime.core.interfaces import Boundary, GradientInterface, Keep, build_interface
from dni_runtime.core.losses import ChainLoss
from dni_runtime.core.metrics import accuracy
from dni_runtime.core.optimization import Optimization, freeze
from dni_runtime.core.passes import ForwardPass, ForwardPasses, KeptBatch, KeptBatches
from dni_runtime.core.recurrent import Recurrent
from dni_runtime.core.replication import SharedWeights
from dni_runtime.core.training import seeded
from dni_runtime.spec import WorkerSpec
from dni_runtime.wire import Part

Gradients: TypeAlias = tuple[Tensor | None, ...]
"""Per-sample gradients for the modules upstream, in the order of ``WorkerSpec.sources``."""

MARGIN = 8
"""Batches kept beyond the late ones, for acknowledgements and gradients on their way."""


Method = TypeVar("Method", bound=Callable[..., Any])


def _naming_module(method: Method) -> Method:
    """Let a method say which module has changed a tensor in place that its gradient needs."""

    @functools.wraps(method)
    def named(step: ModuleStep, *args: Any) -> Any:
        try:
            return method(step, *args)
        except RuntimeError as error:
            raise changed_in_place(f"module {step.spec.module!r}", error) or error from None

    return cast("Method", named)


class ModuleStep(ModuleForward):
    """One module with its gradient interface and optimizers.

    The caller gives every training batch to :meth:`forward`, sends the activation on, and calls
    :meth:`update`; gradients from downstream go to :meth:`late_gradient` when they come. Both
    return gradients for the modules upstream, one for each of the module's links to them; None
    if none is wanted, or it comes later.
    """

    def __init__(self, spec: WorkerSpec, device: torch.device | str = "cpu") -> None:
        super().__init__(spec, device)
        self.counters = StepCounters()
        self.batches = 0  # training batches so far
        # Whether to measure the prediction of the next gradient, and the early head at the next
        # training batch.
        self.measure_late = self.measure_head = True
        interface: GradientInterface | None = None
        with seeded(self.random_state) as state:
            if spec.interface is not None:
                interface = build_interface(spec.interface, Boundary.of(spec), ("interface",))
                interface.to(self.device)
                for part in interface.modules():
                    if isinstance(part, GradientInterface):
                        part.checks = spec.on_nan == "skip" or self.device.type == "cpu"
            self.loss = ChainLoss(spec.loss, spec.prediction, spec.label).to(self.device)
            self.random_state = state()
        self.interface = interface
        trains = interface is None or interface.timing.trains
        freeze(self.layers, spec.freeze if trains else ("*",))
        self._signals = interface is not None and interface.timing.signals
        self._applies = interface is not None and interface.timing.applies
        predicts = interface is not None and interface.predicts
        self.optimization = Optimization(spec, self.layers, predicts=predicts)
        keep: Keep = "graph" if interface is None else interface.keep
        self._passes = ForwardPasses(self, keep, version=lambda: self.optimization.version)
        # Whether predictions are scores of classes, which have an accuracy.
        self.classifies = spec.classes is not None and (self.loss.scores or 0) >= spec.classes
        self._recurrent = [layer for layer in self.layers.modules() if isinstance(layer, Recurrent)]
        if self.device.type != "cpu":  # they were made there, some with tensors of their own
            of_parts = [layer.optimizers() for layer in self._recurrent]
            of_parts += [] if interface is None else [interface.optimizers()]
            for optimizer in (one for parts in of_parts for one in parts.values()):
                optimizer.load_state_dict(optimizer.state_dict())  # on its parameters' device
        # What the module's replicas share.
        self.shared = (
            None if spec.strategy is None else SharedWeights(self, interface, self.optimization)
        )
        store = None if interface is None else interface.store
        store = store or math.ceil((spec.late + MARGIN) / max(spec.gradients_in, 1))
        self.kept = KeptBatches(store if spec.max_late is None else None)  # else waiting bounds it
        self._number = 0  # of the newest batch
        self._within = False  # whether parts of it are still to come
        self._summed: int | None = None  # the batch whose gradient is incomplete

    def activation(
        self, xs: tuple[Tensor, ...], layers: Callable[..., Tensor] | None = None
    ) -> Tensor:
        h_BH = super().activation(xs, layers)
        if self.optimization.scale is not None and h_BH.requires_grad:
            self.optimization.scale.apply(xs, h_BH)
        return h_BH

    @property
    def waiting(self) -> int:
        """Batches, or parts, with an update that waits for their gradient, here or upstream."""
        if self._applies or any(edge.awaited for edge in self.spec.sources):
            return self.kept.passes
        return 0

    @property
    def blocked(self) -> bool:
        """Whether the next batch must wait for a true gradient."""
        if self.spec.max_late is None or self._within:
            return False
        return len(self._batches_due()) > self.spec.max_late

    def _batches_due(self) -> set[int]:
        """Return the numbers of the batches that are computed, but not in an update yet."""
        return self.kept.numbers if self._applies else set()

    def forward(self, id: int, x: Inputs, part: Part | None = None) -> Tensor:
        """Compute the activation of a training batch, or of a part of it (None: all).

        ``id`` is its position in the stream; inputs are kept until the update. The activation is
        detached, in the contract's type: send it on, do not change it.
        """
        xs = as_inputs(x)
        part = part or Part(0, len(xs[0]))
        if part.first == 0 or not self._within:
            if self._within and not self._applies:
                self._end_batch()  # its last part has been lost
            self._number += 1
        if self.shared is not None:
            self.shared.samples += len(xs[0])
        self._within = not part.ends_with(len(xs[0]))
        answers = self._answers(id)
        waits = self.spec.max_late == 0 and not (part.first or self._within)
        outlives = due(id, self.spec.gradients_in) and (
            any(self._relays(answers)) or (self._applies and not waits)
        )
        with self.optimization.ahead(len(self._batches_due() - {self._number})):
            done = self._passes.compute(xs, grads=answers, outlives=outlives)
        self._current = (id, done, part)
        return done.h_BH.detach()

    def _answers(self, id: int) -> tuple[bool, ...]:
        """Return for which links from upstream the gradient of a batch is wanted."""
        return tuple(due(id, edge.gradients) for edge in self.spec.sources)

    def _relays(self, answers: Sequence[bool]) -> list[bool]:
        """Return which of the wanted gradients need the true one from downstream."""
        edges = zip(answers, self.spec.sources, strict=True)
        return [answer and not edge.bootstrapped for answer, edge in edges]

    def skip(self) -> Gradients:
        """Learn nothing from the batch of the last :meth:`forward`, instead of :meth:`update`.

        The gradients for modules upstream that wait for one are NaN.
        """
        id, done, part = self._current
        del self._current
        self.counters.loss = None
        if part.ends_with(len(done.xs[0])) and self._number not in self._batches_due():
            self._end_batch()
        return self._no_gradients(id, done)

    @_naming_module
    def update(self, y_BY: Tensor) -> Gradients:
        """Train on the batch of the last :meth:`forward`, unless that needs a true gradient.

        Returns per-sample gradients dL_b/dx_b for the modules upstream, shaped like the inputs.
        """
        id, done, part = self._current
        del self._current
        ends = part.ends_with(len(y_BY))
        if self.interface is None:
            loss = self.loss.of_part(done.h_BH, y_BY, part)
            whole = len(y_BY) == part.samples
            self.counters.loss = (
                loss.detach() if whole else loss.detach() * part.samples / len(y_BY)
            )
            pull_BH = None if self.shared is None else self.shared.pull(done.xs, done.h_BH.detach())
            if pull_BH is not None:
                loss = loss + (done.h_BH * pull_BH).sum() / part.samples
            self._backward(loss, None)
            upstream = self._gradients(done, part, self._answers(id))
            if ends:
                self._end_batch()
            return upstream
        kept = KeptBatch(done.h_BH.detach(), y_BY, part, self._number)
        comes = due(id, self.spec.gradients_in)
        relays = self._relays(self._answers(id))
        later = comes and (self._applies or any(relays))
        if later:
            kept.forward = done
        gradients: Gradients = (None,) * len(relays)
        if self._signals:
            kept.g_BH = self._signal(kept.h_BH, y_BY)
            g_BH = self._pulled(kept.g_BH, kept.h_BH, done)
            only = None
            if any(relays):
                now = zip(done.xs, relays, strict=False)
                only = self._own_leaves()
                only += [x for x, relay in now if x.requires_grad and not relay]
            self._backward(done.h_BH, g_BH / part.samples, inputs=only, retain=later)
            answers = zip(self._answers(id), relays, strict=True)
            gradients = self._gradients(
                done, part, [answer and not true for answer, true in answers]
            )
        if comes:
            self.counters.given_up += self.kept.add(id, kept)
        if ends and (self._signals or not self._applies):
            self._end_batch()
        return gradients

    def _backward(self, h_BH: Tensor, g_BH: Tensor | None, **how: Any) -> None:
        separate(self.optimization.parameters)
        backward(h_BH, g_BH, **how)

    def _pulled(self, g_BH: Tensor, h_BH: Tensor, done: ForwardPass) -> Tensor:
        """Return an error signal with what the strategy of the replicas adds to it."""
        pull_BH = None if self.shared is None else self.shared.pull(done.xs, h_BH)
        return g_BH if pull_BH is None else g_BH + pull_BH

    def _signal(self, h_BH: Tensor, y_BY: Tensor) -> Tensor:
        assert self.interface is not None
        signal = self.interface.signal(h_BH, y_BY)
        if signal.loss is not None:
            self.counters.loss = signal.loss
        if self.measure_head and self.classifies and signal.p_BP is not None:
            self.counters.head_accuracy.add(accuracy(self.loss, signal.p_BP, y_BY))
            self.measure_head = False
        return signal.g_BH

    @property
    def replays(self) -> bool:
        """Whether the module can train on a batch again: its error signal comes at once."""
        at_once = self.interface is None or (self._signals and not self._applies)
        return bool(self.optimization.parameters) and at_once

    @_naming_module
    def replay(self, x: Inputs, y_BY: Tensor) -> None:
        """Train on a batch once more, by the module's own error signal alone."""
        h_BH = self._passes.compute(as_inputs(x)).h_BH
        if self.interface is None:
            self._backward(self.loss(h_BH, y_BY), None)
        else:
            signal = self.interface.signal(h_BH.detach(), y_BY)
            self._backward(h_BH, signal.g_BH / len(h_BH))
        self.optimization.update()

    @_naming_module
    def late_gradient(self, id: int, g_BH: Tensor | None) -> Gradients:
        """Process a per-sample gradient that has come from downstream; None if it was not finite.

        Nothing is learnt from None. A gradient of a batch that is no longer stored is counted and
        dropped. Returns the gradients for the modules upstream that waited for this one.
        """
        self.counters.gradients += 1
        kept = self.kept.take(id)
        nothing: Gradients = (None,) * len(self.spec.sources)
        if kept is None or self.interface is None:
            self.counters.unpaired += 1
            return nothing
        lag = self._number - kept.number
        self.counters.lag += lag
        self.counters.lag_max = max(self.counters.lag_max, lag)
        late = None
        if g_BH is None:
            self.counters.skipped += 1
        else:
            late = self.interface.learn(kept.h_BH, kept.y_BY, g_BH, measure=self.measure_late)
        if late is not None:
            self.counters.error.add(late.error)
            self.counters.cosine.add(late.cosine)
            self.measure_late = False
        done = kept.forward
        if done is None:
            return nothing
        if g_BH is None:
            if self._applies and not self._signals:
                self._count_part(kept)
            return self._no_gradients(id, done)
        h_BH = self._passes.output(done)
        samples, relays = kept.part.samples, self._relays(self._answers(id))
        if self._applies and not self._signals:
            self._apply(kept, h_BH, g_BH, done)
            return self._gradients(done, kept.part, relays)
        if inputs := [x for x, relay in zip(done.xs, relays, strict=False) if relay]:
            self._backward(h_BH, g_BH / samples, inputs=inputs, retain=self._applies)
        if self._applies:
            assert kept.g_BH is not None
            only = self.optimization.parameters
            self._backward(h_BH, (g_BH - kept.g_BH) / samples, inputs=only)
        return self._gradients(done, kept.part, relays)

    def _gradients(self, done: ForwardPass, part: Part, answers: Sequence[bool]) -> Gradients:
        """Return the gradients that a backward pass has left at the inputs, zeros if it has not."""
        gradients: list[Tensor | None] = []
        for x, answer in zip(done.xs, answers, strict=False):  # inputs of the data come last
            g_BX = torch.zeros_like(x) if answer and x.grad is None else x.grad
            # A new tensor: autograd may leave one memory at several inputs, as ``x.view(…) + y``.
            gradients.append(None if g_BX is None else (g_BX * part.samples).contiguous())
            x.grad = None  # sent once
        return tuple(gradients)

    def _own_leaves(self) -> list[Tensor]:
        """Return what the module's own error signal is for, without its input."""
        starts = [layer.start for layer in self._recurrent if layer.start is not None]
        return [*self.optimization.parameters, *starts]

    def _apply(self, kept: KeptBatch, h_BH: Tensor, g_BH: Tensor, done: ForwardPass) -> None:
        """Add a true gradient to its batch's; update the weights when that is complete."""
        if self._summed is not None and self._summed != kept.number:
            self._end_batch()  # parts of the one before have been lost
        g_BH = self._pulled(g_BH, h_BH.detach(), done)
        self._backward(h_BH, g_BH / kept.part.samples)
        self._count_part(kept)

    def _count_part(self, kept: KeptBatch) -> None:
        self._summed = kept.number
        if kept.part.ends_with(len(kept.h_BH)):
            self._end_batch()

    def _no_gradients(self, id: int, done: ForwardPass) -> Gradients:
        pairs = zip(done.xs, self._answers(id), strict=False)
        return tuple(torch.full_like(x, math.nan) if answer else None for x, answer in pairs)

    def load_initial(self, file: Path) -> None:
        super().load_initial(file)
        if self.optimization.average is not None:
            self.optimization.average.module.load_state_dict(self.layers.state_dict())
        if self.shared is not None:
            self.shared.begin()

    @property
    def evaluated(self) -> nn.Module:
        """The average of the weights, if there is one."""
        average = self.optimization.average
        return self.layers if average is None else average

    def parts(self) -> list[nn.Module]:
        """Return all that holds weights or statistics."""
        every = (self.layers, self.interface, self.optimization.average)
        return [part for part in every if part is not None]

    def _end_batch(self) -> None:
        self._summed = None
        self.optimization.update()
        self.optimization.end_batch()
        self.batches += 1

    def give_up_waiting(self, until: int | None = None) -> None:
        """Drop batches, up to an id (None: all), whose gradient will not come any more."""
        self.counters.given_up += self.kept.drop(until)
        if self._summed is not None and not self.kept:
            self._end_batch()

    def predict(self, h_BH: Tensor) -> Tensor | None:
        """Return the tail's output, or an early head's predictions; None if there is no head."""
        return h_BH if self.interface is None else self.interface.predict(h_BH)


def due(id: int, every: int) -> bool:
    """Whether the gradient of a batch is wanted; see ``WorkerSpec``."""
    return every > 0 and id % every == 0

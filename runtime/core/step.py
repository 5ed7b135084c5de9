"""The step of one module: forward, error signal, update, and learning from late gradients.

This is the whole training of a module, without any transport: the module server drives it from the
wire, :class:`dni_runtime.core.chain.LocalChain` in one process.
"""

from __future__ import annotations

import contextlib
import warnings
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor

from dni_runtime.core.interfaces import (
    Boundary,
    GradientInterface,
    build_interface,
)
from dni_runtime.core.interfaces.base import Pending
from dni_runtime.core.layers import build_layers
from dni_runtime.core.losses import ChainLoss
from dni_runtime.core.mean import Mean
from dni_runtime.core.metrics import accuracy
from dni_runtime.core.training import (
    build_optimizer,
    build_schedule,
    module_seed,
    torch_dtype,
)
from dni_runtime.spec import WorkerSpec


@dataclass
class StepCounters:
    """What happened to gradients, and what is last known of losses.

    Attributes:
        gradients: Late gradients received.
        unpaired: Late gradients whose batch was no longer stored.
        given_up: Batches whose true gradient did not come before the store was full.
        lag: Sum of the ages of late gradients, in batches.
        lag_max: The largest of these ages since this was last set to 0.
        loss: The module's own loss (tail: the chain's; local head: its), newest.
        error: Of synthetic gradients, where measured (``LateSignal``).
        cosine: The same.
        head_accuracy: Of an early head on training batches, where measured.
    """

    gradients: int = 0
    unpaired: int = 0
    given_up: int = 0
    lag: int = 0
    lag_max: int = 0
    loss: Tensor | None = None
    error: Mean = field(default_factory=Mean)
    cosine: Mean = field(default_factory=Mean)
    head_accuracy: Mean = field(default_factory=Mean)


class ModuleStep:
    """One module with its gradient interface and optimizers.

    The caller gives every training batch to :meth:`forward`, sends the activation on, and calls
    :meth:`update`; true gradients go to :meth:`late_gradient` when they come. Both may return a
    gradient for the module upstream.

    Args:
        spec: The module.
        device: Where it computes.

    Attributes:
        counters: What has been counted and measured.
        batches: Updates so far.
        loss: The chain's loss, by which the tail is trained.
        measure_late: Whether to measure what the next late gradient teaches.
        measure_head: Whether to measure the early head on the next training batch.
        classifies: Whether predictions are scores of classes, of which accuracies can be told.

    Raises:
        SpecError: A layer, optimizer or interface cannot be made.
    """

    def __init__(self, spec: WorkerSpec, device: torch.device | str = "cpu") -> None:
        self.spec = spec
        self.device = torch.device(device)
        self.counters = StepCounters()
        self.batches = 0
        self.measure_late = self.measure_head = True
        with seeded(module_seed(spec.seed, spec.index)) as state:
            self.layers = build_layers(spec.layers, ("layers",)).to(self.device)
            self.interface: GradientInterface | None = None
            if spec.interface is not None:
                interface = build_interface(spec.interface, Boundary.of(spec), ("interface",))
                self.interface = interface.to(self.device)
            self.loss = ChainLoss(spec.loss, spec.prediction, spec.label).to(self.device)
            self.random_state = state()
        if self.interface is not None and not self.interface.trains:
            self.layers.requires_grad_(False)
        parameters = [p for p in self.layers.parameters() if p.requires_grad]
        self.optimizer = (
            build_optimizer(spec.optimizer, parameters, ("optimizer",)) if parameters else None
        )
        self.schedule = (
            build_schedule(spec.schedule, self.optimizer, ("schedule",))
            if spec.schedule is not None and self.optimizer is not None
            else None
        )
        self.classifies = spec.classes is not None and (self.loss.scores or 0) >= spec.classes
        self._parameters = parameters
        self._output_dtype = torch_dtype(spec.output.dtype)
        self._stored: OrderedDict[int, Pending] = OrderedDict()
        self._newest = 0

    @property
    def waiting(self) -> int:
        """Batches whose update waits for a true gradient."""
        if self.interface is None or not self.interface.pending:
            return 0
        return len(self._stored)

    @property
    def blocked(self) -> bool:
        """Whether the next batch must wait for a true gradient."""
        interface = self.interface
        return interface is not None and interface.blocks and self.waiting >= interface.pending

    def forward(self, id: int, x_BX: Tensor) -> Tensor:
        """Compute a training batch's activation.

        Args:
            id: The batch's position in the stream.
            x_BX: The input; kept until the update.

        Returns:
            The activation, detached, in the contract's type: send it on, do not change it.
        """
        if due(id, self.spec.gradients_out):
            x_BX = x_BX.detach().requires_grad_()
        with self._autocast():
            h_BH = self.layers(x_BX)
        h_BH = h_BH.to(self._output_dtype)
        self._current = (id, x_BX, h_BH)
        return cast("Tensor", h_BH.detach())

    def forward_again(self, x_BX: Tensor) -> Tensor:
        """The activation of a batch that the weights have been trained on already."""
        with torch.no_grad(), self._autocast():
            return cast("Tensor", self.layers(x_BX).to(self._output_dtype))

    def update(self, y_BY: Tensor) -> Tensor | None:
        """Train on the batch of the last :meth:`forward`.

        Args:
            y_BY: Its labels.

        Returns:
            The per-sample gradient dL_b/dx_b for the module upstream, shaped like the input; None
            when none is wanted or the update waits for the true gradient.
        """
        id, x_BX, h_BH = self._current
        del self._current
        self._newest = id
        if self.interface is None:
            loss = self.loss(h_BH, y_BY)
            self.counters.loss = loss.detach()
            return self._descend(loss, None, x_BX)
        if self.interface.pending:
            self._keep(id, Pending(h_BH, y_BY, x_BX))
            return None
        h_detached_BH = h_BH.detach()
        signal = self.interface.signal(h_detached_BH, y_BY)
        if signal.loss is not None:
            self.counters.loss = signal.loss
        if self.measure_head and self.classifies and signal.p_BP is not None:
            self.counters.head_accuracy.add(accuracy(self.loss, signal.p_BP, y_BY))
            self.measure_head = False
        if due(id, self.spec.gradients_in):
            self._keep(id, Pending(h_detached_BH, y_BY))
        return self._descend(h_BH, signal.g_BH / len(h_BH), x_BX)

    @property
    def replays(self) -> bool:
        """Whether the module can train on a batch again: its error signal comes at once."""
        interface = self.interface
        return self.optimizer is not None and (interface is None or not interface.pending)

    def replay(self, x_BX: Tensor, y_BY: Tensor) -> None:
        """Train on a batch once more, by the module's own error signal alone.

        Args:
            x_BX: The input.
            y_BY: Its labels.
        """
        with self._autocast():
            h_BH = self.layers(x_BX)
        h_BH = h_BH.to(self._output_dtype)
        if self.interface is None:
            self._descend(self.loss(h_BH, y_BY), None, x_BX)
        else:
            signal = self.interface.signal(h_BH.detach(), y_BY)
            self._descend(h_BH, signal.g_BH / len(h_BH), x_BX)

    def late_gradient(self, id: int, g_BH: Tensor) -> Tensor | None:
        """Take a true gradient that has arrived.

        Args:
            id: The batch it belongs to; one that is no longer stored is counted and dropped.
            g_BH: The per-sample gradient at the module's output.

        Returns:
            The gradient for the module upstream, where the update had waited for this one.
        """
        self.counters.gradients += 1
        stored = self._stored.pop(id, None)
        if stored is None or self.interface is None:
            self.counters.unpaired += 1
            return None
        lag = self._newest - id
        self.counters.lag += lag
        self.counters.lag_max = max(self.counters.lag_max, lag)
        if stored.x_BX is not None:
            return self._descend(stored.h_BH, g_BH / len(g_BH), stored.x_BX)
        late = self.interface.learn(stored.h_BH, stored.y_BY, g_BH, measure=self.measure_late)
        if late is not None:
            self.counters.error.add(late.error)
            self.counters.cosine.add(late.cosine)
            self.measure_late = False
        return None

    def give_up_waiting(self) -> None:
        """Drop batches whose true gradient will not come any more."""
        self.counters.given_up += self.waiting
        self._stored.clear()

    def evaluate(self, x_BX: Tensor) -> Tensor:
        """The activation in eval mode, without any learning."""
        self.layers.eval()
        try:
            with torch.no_grad(), self._autocast():
                return cast("Tensor", self.layers(x_BX).to(self._output_dtype))
        finally:
            self.layers.train()

    def predict(self, h_BH: Tensor) -> Tensor | None:
        """What the module predicts: the tail the chain's output, others by their early heads.

        Args:
            h_BH: The activation from :meth:`evaluate`.

        Returns:
            Predictions in the shape of the chain's; None where the module has no head.
        """
        return h_BH if self.interface is None else self.interface.predict(h_BH)

    def end_epoch(self) -> None:
        """Step a schedule that counts epochs."""
        if self.spec.schedule_every == "epoch":
            self._step_schedule(1)

    def pass_over(self, batches: int) -> None:
        """Step a schedule that counts batches, for those that were trained on elsewhere."""
        if self.spec.schedule_every == "batch":
            self._step_schedule(batches)

    def _step_schedule(self, count: int) -> None:
        if self.schedule is None:
            return
        with warnings.catch_warnings():
            # A restarted module catches up before its optimizer's first step.
            warnings.filterwarnings("ignore", "Detected call of", UserWarning)
            for _ in range(count):
                self.schedule.step()

    def _keep(self, id: int, pending: Pending) -> None:
        assert self.interface is not None
        self._stored[id] = pending
        while len(self._stored) > max(self.interface.store, 1):
            self._stored.popitem(last=False)
            self.counters.given_up += 1

    def _descend(self, h: Tensor, g: Tensor | None, x_BX: Tensor) -> Tensor | None:
        """One step of the module's optimizer along ``g`` at ``h``; gives the gradient at x."""
        if self.optimizer is not None:
            self.optimizer.zero_grad(set_to_none=True)
        if h.requires_grad:
            root = h if g is None else _Root.apply(h, g)  # type: ignore[no-untyped-call]  # torch
            root.backward()
        if self.optimizer is not None:
            with self._graph_kept():
                self.optimizer.step()
            if self.schedule is not None and self.spec.schedule_every == "batch":
                self.schedule.step()
        self.batches += 1
        g_BX = x_BX.grad
        if g_BX is None:
            return None
        return g_BX.mul_(len(x_BX)).contiguous()

    def _graph_kept(self) -> contextlib.AbstractContextManager[Any]:
        """Let graphs of other pending batches outlive an update of the weights.

        autograd refuses to use a saved weight that has changed since; a delayed gradient uses the
        current weight on purpose, as asynchronous pipelines without weight stashing do.
        """
        if self.waiting == 0:
            return contextlib.nullcontext()
        keep = torch.autograd._unsafe_preserve_version_counter  # type: ignore[attr-defined]  # private
        return cast("contextlib.AbstractContextManager[Any]", keep(tuple(self._parameters)))

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        if self.spec.precision == "float32":
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=torch_dtype(self.spec.precision))


class _Root(torch.autograd.Function):
    """A scalar whose gradient at ``h`` is ``g``: ``torch.autograd.backward(h, g)``.

    That one compares their shapes by way of sympy, whose import takes 0.3 s of CPU and 40 MiB.
    """

    @staticmethod
    def forward(ctx: Any, h: Tensor, g: Tensor) -> Tensor:
        ctx.save_for_backward(g)
        return h.new_zeros(())

    @staticmethod
    def backward(ctx: Any, one: Tensor) -> tuple[Tensor, None]:
        (g,) = ctx.saved_tensors
        return g, None


def due(id: int, every: int) -> bool:
    """Whether the true gradient of a batch is one of those wanted; see ``WorkerSpec``."""
    return every > 0 and id % every == 0


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[Any]:
    """Seed torch's CPU generator inside the block and give it back after it.

    Yields a function that reads the generator's state.
    """
    before = torch.get_rng_state()
    torch.manual_seed(seed)
    try:
        yield torch.get_rng_state
    finally:
        torch.set_rng_state(before)

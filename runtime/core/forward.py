"""A module as it computes, without what it learns by: no loss, gradient interface or optimizer.

Shapes: B batch, H the module's activation.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeAlias, cast

import torch
from torch import Tensor, nn

from dni_runtime.core.finite import state_finite
from dni_runtime.core.layers import build_module, load_initial
from dni_runtime.core.recurrent import Recurrent
from dni_runtime.core.training import (
    module_seed,
    random_state,
    seeded,
    set_random_state,
    torch_dtype,
)
from dni_runtime.errors import SpecError
from dni_runtime.spec import WorkerSpec

Inputs: TypeAlias = Tensor | tuple[Tensor, ...]
"""A module's input, or several."""


def as_inputs(x: Inputs) -> tuple[Tensor, ...]:
    """Return a module's inputs, which may be given as one tensor."""
    return x if isinstance(x, tuple) else (x,)


class ModuleForward:
    """A module's layers on their device, and its forward pass in the precision of its spec.

    The layers are in train mode, with the initial weights until others are loaded. The module
    goes on with ``random_state``, a state of torch's generator on the CPU.
    """

    def __init__(self, spec: WorkerSpec, device: torch.device | str = "cpu") -> None:
        self.spec = spec
        self.device = torch.device(device)
        with seeded(module_seed(spec.seed, spec.index)) as state:
            self.layers = build_module(spec, self.device)
            self.random_state: Tensor = state()
        self._changes_input: dict[bool, bool] = {}  # in train and in eval mode, once it is known
        # The activation computed last, and its version then.
        self._last: tuple[Tensor, int] | None = None
        self._precision = torch_dtype(spec.precision)
        self._dtype = torch_dtype(spec.output.dtype)

    def load_initial(self, file: Path) -> None:
        """Begin with the initial weights of a run; see :func:`~.layers.load_initial`."""
        load_initial(self.layers, file)

    @property
    def evaluated(self) -> nn.Module:
        """The layers that :meth:`evaluate` uses."""
        return self.layers

    def parts(self) -> list[nn.Module]:
        """Return all that holds weights or statistics."""
        return [self.layers]

    @property
    def finite(self) -> bool:
        """Whether all weights and statistics are finite; waits for the device."""
        return state_finite(*self.parts())

    def activation(
        self, xs: tuple[Tensor, ...], layers: Callable[..., Tensor] | None = None
    ) -> Tensor:
        """Return the activation in the contract's type, of the module or of a copy of it.

        Layers that change their input in place get a copy of it: others have the same memory, and
        autograd refuses it for leaves. Whether they do is seen at the first batch; doing it for
        later batches only is an error.
        """
        layers = layers or self.layers
        training = getattr(layers, "training", self.layers.training)
        copies = self._changes_input.get(training, True)
        inputs = tuple([x.clone() for x in xs]) if copies else xs
        before = [x._version for x in inputs]
        try:
            with self._autocast():
                h_BH = cast("Tensor", layers(*inputs).to(self._dtype))
            changes = [x._version for x in inputs] != before
        except RuntimeError as error:
            changes = "leaf Variable" in str(error)
            if not changes:
                raise
        if changes and not copies:
            raise SpecError(
                f"module {self.spec.module!r} changes its input in place, but not in its first "
                "batch",
                hint="make a copy, as 'x = x + y' does instead of 'x += y'",
            )
        self._changes_input[training] = changes
        self._check_last(h_BH)
        return h_BH

    def _check_last(self, h_BH: Tensor) -> None:
        """Refuse layers that write into what they have returned, which may not be sent yet."""
        if self._last is not None and self._last[0]._version != self._last[1]:
            raise SpecError(
                f"module {self.spec.module!r} writes into its output of the batch before",
                hint="that may still be on its way: return a copy, as 'return y.clone()'",
            )
        self._last = None if h_BH.is_inference() else (h_BH.detach(), h_BH._version)

    def evaluate(self, x: Inputs) -> Tensor:
        """Return the activation in eval mode, ``[B, *output]``."""
        layers = self.evaluated
        layers.eval()
        try:
            with torch.no_grad():
                return self.activation(as_inputs(x), layers)
        finally:
            layers.train()

    def end_evaluation(self) -> None:
        """End an evaluation: recurrent layers start the next one with zeros."""
        for part in self.parts():
            for layer in part.modules():
                if isinstance(layer, Recurrent):
                    layer.end_evaluation()

    def forward_again(self, x: Inputs) -> Tensor:
        """Return the activation of a batch that the weights have already been trained on."""
        with torch.no_grad(), self.without_trace():
            return self.activation(as_inputs(x))

    @contextlib.contextmanager
    def without_trace(self) -> Iterator[None]:
        """Leave buffers (such as BatchNorm's statistics) and random numbers as they are.

        Layers get copies of their buffers, which they may change or replace.
        """
        owners = [(layer._buffers, {**layer._buffers}) for layer in self.layers.modules()]
        copies = {
            id(buffer): buffer.clone()
            for _, original in owners
            for buffer in original.values()
            if buffer is not None
        }
        state = random_state(self.device)
        try:
            for buffers, original in owners:
                buffers |= {name: copies.get(id(buffer)) for name, buffer in original.items()}
            yield
        finally:
            set_random_state(self.device, state)
            for buffers, original in owners:
                buffers |= original

    def _autocast(self) -> contextlib.AbstractContextManager[object]:
        if self._precision is torch.float32:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=self._precision)

"""The device that a module computes on, and copies between it and host memory for the links.

On a GPU, copies go through page-locked memory, on streams of their own: the host does not wait for
a copy in, computation continues during a copy out, and the host is never more than a batch ahead
(PyTorch's notes on CUDA semantics, its tutorial on non_blocking and pin_memory). On the CPU nothing
is copied, and nothing waits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dni_runtime.errors import UnavailableError
from dni_runtime.spec import WorkerSpec


def choose_device(spec: WorkerSpec) -> torch.device:
    """Return the device that the spec asks for; never a silent fall-back."""
    kind, _, number = spec.device.partition(":")
    if kind == "cpu" or (kind == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    index = int(number or 0)
    if not torch.cuda.is_available() or index >= torch.cuda.device_count():
        raise UnavailableError(
            f"module {spec.module!r} asks for device {spec.device!r}, but torch "
            f"{torch.__version__} finds {torch.cuda.device_count()} GPUs here",
            hint="make a GPU visible, install a torch for it, or set 'device: cpu'",
        )
    return torch.device("cuda", index)


class HostCopy:
    """A tensor on its way to host memory."""

    def __init__(
        self, host: Tensor, done: torch.cuda.Event | None = None, source: Tensor | None = None
    ) -> None:
        self._host = host
        self._done = done  # fires when the copy is complete; None: it is
        self._source = source  # kept until then

    @property
    def here(self) -> bool:
        """Whether it has arrived."""
        return self._done is None or bool(self._done.query())  # type: ignore[no-untyped-call]  # torch has none

    def wait(self) -> Tensor:
        """Sleep until it has arrived, and return it."""
        if self._done is not None:
            self._done.synchronize()
            self._done = self._source = None
        return self._host


class Copies:
    """Copies between a device and the host."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._in: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._in, self._out = (torch.cuda.Stream(device) for _ in range(2))  # type: ignore[no-untyped-call]
        self._before: torch.cuda.Event | None = None

    def to_device(self, tensor: Tensor) -> Tensor:
        """Copy a tensor to the device; work queued there from now on finds it."""
        if self._in is None:
            return tensor
        pinned = tensor.pin_memory()
        with torch.cuda.stream(self._in):
            there = pinned.to(self._device, non_blocking=True)
        computing = torch.cuda.current_stream(self._device)
        computing.wait_stream(self._in)
        there.record_stream(computing)
        return there

    def to_host(self, tensor: Tensor) -> HostCopy:
        """Start to copy a tensor to the host when the device has computed it."""
        if self._in is None:
            return HostCopy(tensor)
        self._out.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._out):
            host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            host.copy_(tensor, non_blocking=True)
            done = self._event(self._out)
        return HostCopy(host, done, tensor)

    def pace(self) -> None:
        """Sleep until the device has done the work queued before the last call."""
        if self._in is None:
            return
        before, self._before = self._before, self._event(torch.cuda.current_stream(self._device))
        if before is not None:
            before.synchronize()

    def _event(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # else waiting spins
        event.record(stream)
        return event

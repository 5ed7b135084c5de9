"""What computes answers: the seam to a network, and the network in this process."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from dni_runtime.serving.protocol import Signature


class Answer(NamedTuple):
    """Outputs of samples of a batch, or why there are none.

    An answer with an id that was not submitted is ignored, but the engine is asked for room again.
    """

    id: int
    rows: Tensor | None = None  # indices of the batch's samples; None: all, in order
    outputs: tuple[Tensor, ...] = ()  # in the signature's order, on the host
    exit: str | None = None  # at which the samples left; None: they went through all modules
    degraded: bool = False  # an answer of an earlier exit, because what follows does not respond
    error: Exception | None = None  # of the whole batch


class Engine(Protocol):
    """What computes answers: the front of a chain, or a whole network in this process.

    Its methods are called in the thread of the event loop, and must not wait.
    """

    signature: Signature
    # Called with each answer, from any thread; set by the owner before anything is submitted. A
    # batch may be answered in parts, and a part twice: the first one counts.
    answered: Callable[[Answer], None]

    def room(self) -> int:
        """Return how many more batches it takes now."""
        ...

    def submit(self, id: int, inputs: tuple[Tensor, ...], *, whole: bool = False) -> None:
        """Compute a batch, whose id is unique; ``whole``: no sample may leave at an exit."""
        ...

    def close(self) -> None:
        """Stop computing; batches that have not been answered never are."""
        ...


class InProcess:
    """An engine that computes a network in a thread of this process."""

    def __init__(self, network: nn.Module, signature: Signature) -> None:
        self.signature = signature
        self.answered: Callable[[Answer], None] = lambda answer: None
        self._network = network.eval().cpu()
        # Each is counted by one thread only.
        self._submitted = self._computed = 0
        self._batches: queue.SimpleQueue[tuple[int, tuple[Tensor, ...]] | None]
        self._batches = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._compute, name="engine", daemon=True)
        self._thread.start()

    def room(self) -> int:
        return 1 - (self._submitted - self._computed)

    def submit(self, id: int, inputs: tuple[Tensor, ...], *, whole: bool = False) -> None:
        self._submitted += 1  # without exits all is computed as a whole
        self._batches.put((id, inputs))

    def close(self) -> None:
        """Stop after the batch that is being computed; a network that hangs is left to itself."""
        self._batches.put(None)
        self._thread.join(timeout=1)

    @torch.no_grad()
    def _compute(self) -> None:
        # One core is the event loop's: threads of torch that wait for it take what requests need.
        cores = len(os.sched_getaffinity(0)) - 1
        torch.set_num_threads(max(min(torch.get_num_threads(), cores), 1))
        while (batch := self._batches.get()) is not None:
            id, inputs = batch
            try:
                outputs = self._network(*inputs)
                if isinstance(outputs, Tensor):
                    outputs = (outputs,)
                answer = Answer(id, outputs=tuple(tensor.cpu() for tensor in outputs))
            except Exception as error:
                answer = Answer(id, error=error)
            del batch, inputs
            self._computed += 1
            self.answered(answer)

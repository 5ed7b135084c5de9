"""What is known of one module of a network that has been taken apart."""

from __future__ import annotations

from dataclasses import dataclass

from dni_runtime.spec import Choice, TensorSpec


@dataclass(frozen=True)
class Part:
    """One module of a network that has been taken apart.

    Attributes:
        name: Its name.
        after: The module of the network after which it begins; None for the first.
        until: The module of the network after which it ends; None for the last.
        inputs: What it takes, as in ``chain.yaml``; None: what the part before gives.
        outputs: One sample of each of its outputs.
        numbers: How many numbers its parameters are.
        lends: Tied parameters that later parts use, too.
        borrows: Tied parameters that an earlier part has, and which input brings each.
        seconds: Measured time of a training batch, without the interface's.
        interface_s: That of its gradient interface.
        memory: Bytes of weights, gradients, Adam's averages and one batch.
        sends: Bytes of a batch of its outputs.
        interface: Its gradient interface; None for the last.
        because: Why it has that interface: ``asked``, ``attention``, ``tied weights`` or
            ``default``.
        samples: Samples of the batch that it was measured with.
    """

    name: str
    after: str | None
    until: str | None
    inputs: tuple[str, ...] | None
    outputs: tuple[TensorSpec, ...]
    numbers: int
    lends: tuple[str, ...]
    borrows: dict[str, int]
    seconds: float
    interface_s: float
    memory: float
    sends: int
    interface: Choice | None
    because: str
    samples: int

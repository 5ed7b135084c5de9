"""What is known of one module of a network that has been taken apart."""

from __future__ import annotations

from collections.abc import Sequence
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

    @property
    def busy_s(self) -> float:
        """Time of a training batch, with the interface's."""
        return self.seconds + self.interface_s


_PAYS = 1.2
"""Times as fast as one process: chains that are expected to be slower than that are told of."""


def doubt(parts: Sequence[Part]) -> str | None:
    """Return why a chain of these parts cannot pay, and what could; None if it can."""
    slowest = max(parts, key=lambda part: part.busy_s)
    one_process = sum(part.seconds for part in parts)
    if len(parts) < 2 or one_process >= _PAYS * slowest.busy_s:
        return None
    share = slowest.busy_s / sum(part.busy_s for part in parts)
    text = f"{slowest.name!r} takes {share:.0%} of the time: a chain of these is at most "
    text += f"{one_process / slowest.busy_s:.2f} times as fast as one process\n  → "
    if slowest.interface_s > slowest.seconds / 2:
        return text + "its gradient interface takes much of that: try another one, or other cuts"
    return text + f"try {len(parts) + 1} modules, or cut within it; it pays if memory is what lacks"

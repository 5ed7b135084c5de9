"""What is known of one module of a network that has been taken apart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dni_runtime.spec import Choice, TensorSpec


@dataclass(frozen=True)
class NetworkPart:
    """One module of a network that has been taken apart."""

    name: str
    after: str | None  # the module of the network after which it begins; None: the first part
    until: str | None  # the module of the network after which it ends; None: the last part
    inputs: tuple[str, ...] | None  # as in ``chain.yaml``; None: what the part before gives
    outputs: tuple[TensorSpec, ...]  # one sample of each
    numbers: int  # in its parameters
    lends: tuple[str, ...]  # tied parameters that later parts use, too
    borrows: dict[str, int]  # tied parameters of earlier parts, and which input brings each
    seconds: float  # of a training batch, measured, without the interface's
    interface_s: float
    memory: float  # bytes of weights, gradients, Adam's averages and one batch
    sends: int  # bytes of a batch of its outputs
    interface: Choice | None  # None: the last part
    # ``asked``, ``attention``, ``tied weights``, ``lengths``, ``frozen`` or ``default``
    because: str
    rows: int  # samples that tied parameters are spread over: of a batch's smallest part

    @property
    def busy_s(self) -> float:
        """Time of a training batch, with the interface's."""
        return self.seconds + self.interface_s


class Parts(tuple[NetworkPart, ...]):
    """The modules of a network that has been taken apart; they print as a table."""

    def __repr__(self) -> str:
        total = sum(part.busy_s for part in self)
        columns = [
            ["module", *(part.name for part in self)],
            ["until", *(part.until or "the end" for part in self)],
            ["parameters", *(f"{part.numbers:,}" for part in self)],
            ["ms a batch", *(f"{1e3 * p.seconds:.0f} + {1e3 * p.interface_s:.0f}" for p in self)],
            ["share", *(f"{part.busy_s / total:.0%}" for part in self)],
            ["memory", *(f"{part.memory / 1e6:.0f} MB" for part in self)],
            ["sends", *(f"{part.sends / 1e6:.1f} MB" for part in self)],
            ["interface", *map(_interface, self)],
        ]
        for column in columns:
            width = max(map(len, column))
            text = column[0] in ("module", "until", "interface")
            column[:] = [one.ljust(width) if text else one.rjust(width) for one in column]
        return "\n".join("  ".join(row).rstrip() for row in zip(*columns, strict=True))


def _interface(part: NetworkPart) -> str:
    if part.interface is None:
        return "loss"
    known = part.because in ("asked", "default")
    return part.interface.name if known else f"{part.interface.name}: {part.because}"


_PAYS = 1.2
"""Times as fast as one process: chains that are expected to be slower than that are told of."""


def doubt(parts: Sequence[NetworkPart]) -> str | None:
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

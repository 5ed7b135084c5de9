"""What modules give to and get from their links."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from dni_runtime.wire import Body, Mark, Mode, Part


@dataclass(frozen=True, slots=True)
class Batch:
    """A batch of the stream.

    Attributes:
        id: Its position.
        epoch: Its epoch.
        mode: What to do with it.
        h: Activations ``[B, *input]``, in the type that the module computes with.
        y: Labels ``[B, *label]``.
        part: Which part of a training batch it is; None: all of it.
    """

    id: int
    epoch: int
    mode: Mode
    h: Tensor
    y: Tensor
    part: Part | None = None

    @property
    def ends(self) -> bool:
        """Whether it is a whole batch, or the last part of one."""
        return self.part is None or self.part.ends_with(len(self.y))


@dataclass(frozen=True, slots=True)
class Marker:
    """A marker of the stream.

    Attributes:
        id: Its position.
        epoch: The epoch that it speaks of.
        mark: What it says.
        body: What the head adds.
    """

    id: int
    epoch: int
    mark: Mark
    body: dict[str, Body]


@dataclass(frozen=True, slots=True)
class Gradient:
    """A true gradient that came late, or in time.

    Attributes:
        id: The batch that it belongs to.
        g: ``dL_b/dh_b`` per sample ``[B, *output]``, in the type that the module computes with.
    """

    id: int
    g: Tensor


@dataclass(frozen=True, slots=True)
class Drained:
    """No gradient of a batch before this marker will follow.

    Attributes:
        id: The marker.
    """

    id: int


@dataclass(frozen=True, slots=True)
class Request:
    """A module downstream asks the head for something.

    Attributes:
        what: ``checkpoint``: put a checkpoint marker into the stream.
    """

    what: str


Event = Gradient | Drained | Request

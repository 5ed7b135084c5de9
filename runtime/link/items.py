"""Values that modules exchange with their links."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from dni_runtime.wire import Body, Mark, Mode, Part, Rows


@dataclass(frozen=True, slots=True)
class Batch:
    """A batch of the stream.

    Attributes:
        id: Its position.
        epoch: Its epoch.
        mode: What to do with it.
        xs: The module's inputs ``[B, *input]``, in its compute type.
        y: Labels ``[B, *label]``; ``[B, 0]`` if they stay at the tail.
        part: Part of a training batch; None: all of it.
        data: Inputs of the data: at the head all, else those that came with it.
        rows: Which samples it has, if the labels stay at the tail.
    """

    id: int
    epoch: int
    mode: Mode
    xs: tuple[Tensor, ...]
    y: Tensor
    part: Part | None = None
    data: tuple[Tensor, ...] = ()
    rows: Rows | None = None

    @property
    def ends(self) -> bool:
        """Whether it is a whole batch, or the last part of one."""
        return self.part is None or self.part.ends_with(len(self.y))


@dataclass(frozen=True, slots=True)
class Marker:
    """A marker of the stream.

    Attributes:
        id: Its position.
        epoch: The epoch that it refers to.
        mark: Its meaning.
        body: Further fields, from the head.
    """

    id: int
    epoch: int
    mark: Mark
    body: dict[str, Body]


@dataclass(frozen=True, slots=True)
class Gradient:
    """A true gradient.

    Attributes:
        id: The batch that it belongs to.
        g: ``dL_b/dh_b`` per sample ``[B, *output]``, in the module's compute type.
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
    """A request of a module downstream to the head.

    Attributes:
        what: ``checkpoint``: put a checkpoint marker into the stream.
    """

    what: str


Event = Gradient | Drained | Request

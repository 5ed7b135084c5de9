"""Values that modules exchange with their links."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from dni_runtime.wire import Mark, Mode, Part, Rows


@dataclass(frozen=True, slots=True)
class Batch:
    id: int  # its position
    epoch: int
    mode: Mode
    xs: tuple[Tensor, ...]  # inputs [B, *input], in the module's compute type
    y: Tensor  # labels [B, *label]; [B, 0] if they stay at the tail
    part: Part | None = None  # None: the whole batch
    # inputs of the data: at the head all, else those that came with it
    data: tuple[Tensor, ...] = ()
    rows: Rows | None = None  # if the labels stay at the tail

    @property
    def ends(self) -> bool:
        """Whether it is a whole batch, or the last part of one."""
        return self.part is None or self.part.ends_with(len(self.y))


@dataclass(frozen=True, slots=True)
class Marker:
    id: int  # its position
    epoch: int
    mark: Mark


@dataclass(frozen=True, slots=True)
class Gradient:
    id: int  # of the batch
    g: Tensor  # dL_b/dh_b per sample at what the link carries, in the module's compute type


@dataclass(frozen=True, slots=True)
class Drain:
    """No gradient of a batch before this marker will follow."""

    id: int  # of the marker


@dataclass(frozen=True, slots=True)
class StreamRequest:
    """A request of a module downstream to the head."""

    what: str  # such as checkpoint: put a checkpoint marker into the stream


Event = Gradient | Drain | StreamRequest

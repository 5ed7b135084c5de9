"""Links between modules, and between their workers: what travels on each, and which batches."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Self

from pydantic import Field

from dni_runtime.spec.named import Frozen


class TensorSpec(Frozen):
    """Shape and type of one sample's tensor."""

    shape: tuple[int, ...]  # without the batch dimension
    dtype: str  # torch's name, such as ``float32``
    varying: tuple[int, ...] = ()  # dimensions of ``shape`` with a size of their own in each batch

    def __str__(self) -> str:
        return f"{self.dtype}[{' x '.join(['B', *self.sizes])}]"

    @property
    def sizes(self) -> list[str]:
        """The shape in words: of dimensions that vary, the largest size."""
        return [f"<={n}" if at in self.varying else str(n) for at, n in enumerate(self.shape)]

    def shortened(self) -> Self:
        """Return a sample of about half the length, an odd one."""
        sizes = enumerate(self.shape)
        shape = tuple(n // 2 | 1 if at in self.varying else n for at, n in sizes)
        return self.model_copy(update={"shape": shape, "varying": ()})


class Preprocessing(Frozen):
    """How raw samples become the network's: ``(x - mean) / std`` as float32, then its shape."""

    raw: TensorSpec  # one sample before that
    # Of all values, or of each channel, the first dimension.
    mean: tuple[float, ...] = Field(min_length=1)
    std: tuple[Annotated[float, Field(gt=0)], ...] = Field(min_length=1)

    @property
    def places(self) -> list[int]:
        """The shape of these figures beside a sample."""
        return [-1, *(1 for _ in self.raw.shape[1:])] if len(self.mean) > 1 else []


NO_LABEL = TensorSpec(shape=(0,), dtype="float32")
"""One sample's label on a link without labels, and in modules that do not have them."""

Route = tuple[tuple[int, int], ...]

CHOSEN: Route = ((0, 0),)
"""The route of a lane that gets those batches for which the sender chooses it."""


def replica_of(id: int, replicas: int) -> int:
    """Return which replica gets the batch at this position of the stream, from 1.

    Of as many ids in a row as there are replicas, each one gets one. Which one begins changes from
    row to row as if drawn, so that markers, which have ids too and may come at regular intervals,
    do not always take the place of the batches of the same one.
    """
    drawn = (id // replicas * 0x9E3779B1 & 0xFFFFFFFF) >> 16  # Knuth's multiplicative hash
    return (id + drawn) % replicas + 1


class LaneSpec(Frozen):
    """A link between two workers: one of those of a link between modules that have replicas."""

    source: str  # the worker upstream
    target: str  # the worker downstream
    number: int  # among the links of all workers
    # It carries the batches that these replicas get, each as (replicas, replica): of one module, or
    # of both at its ends. Empty: all. An end whose number of replicas may change is added when
    # that is known (``spec.replicas.with_replicas``). ``CHOSEN``: no id says which.
    route: Route = ()


class EdgeSpec(Frozen):
    """A link between two modules."""

    source: str  # the module upstream
    target: str  # the module downstream
    number: int  # in the chain; its port is ``links.port`` plus this
    # One sample of what travels of the source's output; None: only inputs of the data travel.
    tensor: TensorSpec | None
    takes: tuple[int, ...] = ()  # which of the source's outputs travel, if not all
    outputs: tuple[TensorSpec, ...] = ()  # one sample of each, if several travel, as one row
    data: tuple[int, ...] = ()  # which inputs of the data travel, from the head
    samples: tuple[TensorSpec, ...] = ()  # one sample of each of those
    labelled: bool = True  # labels travel
    gradients: int = Field(ge=0)  # the target sends those of every n-th batch (by id); 0: none
    # Gradients are computed at once from the target's own error signal: they are not true ones.
    bootstrapped: bool = False
    awaited: bool = False  # an update upstream waits for gradients
    # Newest gradients to send again after a lost connection, because an upstream module takes no
    # other batch before it has them.
    resend: int = 0
    # Links between workers that it consists of; none: it is one link.
    lanes: tuple[LaneSpec, ...] = ()
    route: Route = ()  # as in ``LaneSpec``
    predicts: bool = False  # only batches to predict travel, without labels and gradients
    # A sample is a word of a message; an answer has a length of its own then.
    messages: bool = False

    @property
    def links(self) -> tuple[EdgeSpec, ...]:
        """The links between workers that it consists of."""
        lanes = (self.model_copy(update={**dict(lane), "lanes": ()}) for lane in self.lanes)
        return tuple(lanes) or (self,)

    def with_lanes(self, lanes: Iterable[LaneSpec] = ()) -> Self:
        """Return the same link, of these lanes."""
        return self.model_copy(update={"lanes": tuple(lanes)})

    def carries(self, id: int) -> bool:
        """Whether the batch with this id comes this way; a marker comes on all."""
        return self.route != CHOSEN and all(
            replica_of(id, replicas) == replica for replicas, replica in self.route
        )

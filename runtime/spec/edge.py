"""Links between modules, and between their workers: what travels on each, and which batches."""

from __future__ import annotations

from pydantic import Field

from dni_runtime.spec.named import Frozen


class TensorSpec(Frozen):
    """Shape and type of one sample's tensor.

    Attributes:
        shape: Sizes without the batch dimension.
        dtype: torch's name of the type, such as ``float32``.
    """

    shape: tuple[int, ...]
    dtype: str

    def __str__(self) -> str:
        return f"{self.dtype}[{' x '.join(['B', *map(str, self.shape)])}]"


NO_LABEL = TensorSpec(shape=(0,), dtype="float32")
"""One sample's label on a link without labels, and in modules that do not have them."""

Route = tuple[tuple[int, int], ...]


def replica_of(id: int, replicas: int) -> int:
    """Return which replica gets a batch, from 1.

    Of as many ids in a row as there are replicas each one gets one. Which one begins changes from
    row to row as if drawn, so that markers, which have ids too and may come at regular intervals,
    do not always take the place of the same one's batches.

    Args:
        id: The batch's position in the stream.
        replicas: Number of replicas.
    """
    drawn = (id // replicas * 0x9E3779B1 & 0xFFFFFFFF) >> 16  # Knuth's multiplicative hash
    return (id + drawn) % replicas + 1


class LaneSpec(Frozen):
    """A link between two workers: one of those of a link between modules that have replicas.

    Attributes:
        source: The worker upstream.
        target: The worker downstream.
        number: Number of the link among those of all workers.
        route: It carries the batches that these replicas get, each as (replicas, replica): of one
            module, or of both at its ends. Empty: all. An end whose number of replicas may change
            is not among them (``spec/members.py``).
    """

    source: str
    target: str
    number: int
    route: Route = ()


class EdgeSpec(Frozen):
    """A link between two modules.

    Attributes:
        source: The module upstream.
        target: The module downstream.
        number: Number of the link in the chain; its port is ``links.port`` plus this.
        tensor: One sample of what travels of the source's output; None if only inputs of the data
            travel.
        takes: Which of the source's outputs travel, if not all.
        outputs: One sample of each of those, if they are several, which travel as one row.
        data: Which inputs of the data travel, from the head.
        samples: One sample of each of those.
        labelled: Whether labels travel.
        gradients: The target sends gradients of every n-th batch (by id); 0: of none.
        bootstrapped: Whether those are computed at once from the target's own error signal instead
            of true gradients.
        awaited: Whether an update upstream waits for them.
        resend: Newest gradients to send again after a lost connection, because an upstream module
            takes no other batch before it has them.
        lanes: The links of this worker that it consists of; none: it is one link.
        route: Which batches come this way; see ``LaneSpec``.
        messages: Whether a sample is a word of a message; an answer has a length of its own then.
    """

    source: str
    target: str
    number: int
    tensor: TensorSpec | None
    takes: tuple[int, ...] = ()
    outputs: tuple[TensorSpec, ...] = ()
    data: tuple[int, ...] = ()
    samples: tuple[TensorSpec, ...] = ()
    labelled: bool = True
    gradients: int = Field(ge=0)
    bootstrapped: bool = False
    awaited: bool = False
    resend: int = 0
    lanes: tuple[LaneSpec, ...] = ()
    route: Route = ()
    messages: bool = False

    @property
    def links(self) -> tuple[EdgeSpec, ...]:
        """The links between workers that it consists of."""
        return tuple(
            self.model_copy(
                update={
                    **lane.model_dump(include={"source", "target", "number", "route"}),
                    "lanes": (),
                }
            )
            for lane in self.lanes
        ) or (self,)

    def carries(self, id: int) -> bool:
        """Whether the batch with this id comes this way; a marker comes on all."""
        return all(replica_of(id, replicas) == replica for replicas, replica in self.route)

"""The contract between the two ends of a link, derived from each end's own spec."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Literal, Self

from dni_runtime.spec import NO_LABEL, Dtype, EdgeSpec, TensorSpec, WorkerSpec
from dni_runtime.spec.predicting import FRONT
from dni_runtime.wire import HEADER_BYTES, Limits, TensorContract

End = Literal["input", "output"]


@dataclass(frozen=True)
class LinkContract:
    """Properties of one link that both ends must agree on."""

    source: str
    target: str
    activation: TensorContract | None  # sent downstream as h; None if only inputs of the data are
    data: tuple[TensorContract, ...]  # sent downstream as x0, x1 …
    label: TensorContract  # sent downstream as y; empty if labels stay at the tail
    labelled: bool  # whether labels travel
    gradient: TensorContract | None  # sent upstream as g; None if upstream needs none
    dtype: str  # compute type of the module at this end
    predicts: bool  # batches are to be predicted, and have neither labels nor gradients
    messages: bool  # samples are words of messages; see EdgeSpec
    agreement: dict[str, str]  # what HELLO compares, in this order

    @classmethod
    def of(cls, spec: WorkerSpec, edge: EdgeSpec) -> Self:
        """Return the contract of one of a module's links."""
        tensor, gradients, links = edge.tensor, edge.gradients, spec.links
        limit = spec.batch_limit
        answers = edge.predicts and edge.target == FRONT  # which are not rounded
        wire = None if answers else links.dtype
        activation = gradient = None
        down, up = "nothing", "none"
        if tensor is not None:
            down = wire or tensor.dtype
            activation = _on_the_wire("h", wire, tensor, limit)
        if tensor is not None and gradients:
            up = f"{links.gradient_dtype or down}, 1 in {gradients}"
            gradient = _on_the_wire("g", links.gradient_dtype or links.dtype, tensor, limit)
        samples = enumerate(edge.samples)
        label = spec.label if edge.labelled else NO_LABEL
        data = tuple(
            TensorContract(f"x{n}", sample.dtype, sample.shape, limit, varying=sample.varying)
            for n, sample in samples
        )
        elsewhere = "none: it predicts" if edge.predicts else "stays at the tail"
        return cls(
            source=edge.source,
            target=edge.target,
            activation=activation,
            data=data,
            label=TensorContract("y", label.dtype, label.shape, limit, varying=label.varying),
            labelled=edge.labelled,
            gradient=gradient,
            dtype="" if tensor is None else tensor.dtype,
            predicts=edge.predicts,
            messages=edge.messages,
            agreement={
                "chain": spec.chain,
                "source": edge.source,
                "target": edge.target,
                "activation": "nothing" if tensor is None else str(tensor),
                "label": str(spec.label) if edge.labelled else elsewhere,
                "activations on the wire": down,
                "gradients on the wire": up,
                "batch limit": str(spec.batch_limit),
                "hash": spec.link_hash(edge),
            },
        )

    def __str__(self) -> str:
        return f"{self.source} → {self.target}"

    @cached_property
    def tensors(self) -> tuple[TensorContract, ...]:
        """Contracts of all that is sent downstream, in this order."""
        h = () if self.activation is None else (self.activation,)
        return (*h, *self.data, self.label)

    @cached_property
    def rows(self) -> tuple[tuple[TensorContract, slice], ...]:
        """The same, each with its rows in a BATCH's table of tensors."""
        ends = list(accumulate(len(tensor.names) for tensor in self.tensors))
        first = [0, *ends]
        return tuple(
            (tensor, slice(*two)) for tensor, two in zip(self.tensors, pairwise(first), strict=True)
        )

    @property
    def down(self) -> Limits:
        """Limits of messages sent downstream."""
        tensors = sum(len(tensor.names) for tensor in self.tensors)
        return Limits(tensors, max(tensor.buffer_bytes for tensor in self.tensors))

    @property
    def up(self) -> Limits:
        """Limits of messages sent upstream."""
        if self.gradient is None:
            return Limits(0, 0)
        return Limits(len(self.gradient.names), self.gradient.buffer_bytes)

    def frame_limit(self, end: End) -> int:
        """Return the MAXMSGSIZE of the socket at this end: well above the contract.

        A message that is a little too large is then refused and counted; one that is far too large
        is never read into memory, because libzmq ends the connection (zmq_setsockopt(3)).
        """
        limits = self.down if end == "input" else self.up
        return max(4 * max(limits.buffer_bytes, HEADER_BYTES), 1 << 20)


def _on_the_wire(
    name: str, wire: Dtype | None, tensor: TensorSpec, batch_limit: int
) -> TensorContract:
    """Return the contract of activations or gradients with a wire type of ``links``."""
    scale: tuple[int, ...] | None = None
    dtype = wire or tensor.dtype
    if wire == "int8":
        scale = ()
    elif wire == "int8-channel":
        dtype, scale = "int8", _channels(tensor.shape)
    return TensorContract(name, dtype, tensor.shape, batch_limit, scale, tensor.varying)


def _channels(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the sizes for one scale per channel: the last dimension of (T, C), else the first."""
    channel = 1 if len(shape) == 2 else 0
    return tuple(size if index == channel else 1 for index, size in enumerate(shape))

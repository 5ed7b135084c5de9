"""One message as a value, on either side of the codec."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from dni_runtime.wire.kinds import Kind, Mark, Mode

Body: TypeAlias = "bool | int | float | str | list[Body] | dict[str, Body] | None"
"""Content of a body: any JSON value."""

Buffer: TypeAlias = bytes | memoryview

NO_MARK = Mark(0)


def nbytes(buffer: Buffer) -> int:
    """Return the bytes in a buffer (a memoryview's length counts its items)."""
    return buffer.nbytes if isinstance(buffer, memoryview) else len(buffer)


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One row of a message's tensor table.

    Attributes:
        name: ``h``, ``y`` or ``g``; ``h_scale`` or ``g_scale``; ``x0``, ``x1`` … for inputs of the
            data.
        dtype: torch's name of the type.
        shape: Sizes, the batch dimension included.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Message:
    """A message of any kind; docs/wire.md lists the fields that each kind uses.

    Attributes:
        kind: Its purpose.
        run: The run that it belongs to.
        source: Name of the module that sends it.
        id: Position in the stream, from 1; 0 if it has none.
        epoch: Epoch of a batch or marker.
        mode: What to do with a batch.
        mark: Meaning of a marker.
        ack: Everything up to this id has been processed.
        tensors: Table of the tensors.
        buffers: Their bytes, in the table's order.
        body: The kind's own fields.
    """

    kind: Kind
    run: str
    source: str
    id: int = 0
    epoch: int = 0
    mode: Mode = Mode.TRAIN
    mark: Mark = NO_MARK
    ack: int = 0
    tensors: tuple[TensorEntry, ...] = ()
    buffers: tuple[Buffer, ...] = ()
    body: Mapping[str, Body] = field(default_factory=dict)

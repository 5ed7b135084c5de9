"""One message as a value, on either side of the codec."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, TypeAlias

from dni_runtime.wire.kinds import Kind, Mark, Mode

Body: TypeAlias = "bool | int | float | str | list[Body] | dict[str, Body] | None"
"""Content of a body: any JSON value."""

Buffer: TypeAlias = bytes | memoryview

NO_MARK = Mark(0)
NO_BODY: Mapping[str, Body] = {}


def nbytes(buffer: Buffer) -> int:
    """Return the bytes in a buffer (a memoryview's length counts its items)."""
    return buffer.nbytes if isinstance(buffer, memoryview) else len(buffer)


class TensorEntry(NamedTuple):
    """One row of a message's tensor table."""

    name: str  # h, y or g; h_scale or g_scale; x0, x1 … for inputs of the data
    dtype: str  # torch's name
    shape: tuple[int, ...]  # with the batch dimension


class Message(NamedTuple):
    """A message of any kind; docs/wire.md lists the fields that each kind uses."""

    kind: Kind
    run: str
    source: str  # the module that sends it
    id: int = 0  # position in the stream, from 1; 0 if it has none
    epoch: int = 0  # of a batch or marker
    mode: Mode = Mode.TRAIN
    mark: Mark = NO_MARK
    ack: int = 0  # everything up to this id has been processed
    tensors: tuple[TensorEntry, ...] = ()
    buffers: tuple[Buffer, ...] = ()  # in the table's order
    body: Mapping[str, Body] = NO_BODY  # the kind's own fields

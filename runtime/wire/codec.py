"""Messages to frames and back: pure, strict and without copies (docs/wire.md).

The header is msgpack without extension types, with every length bounded; buffers are passed on
unchanged. ``decode`` returns a message only after checking all of it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from reprlib import repr as brief
from typing import Any

import msgpack

from dni_runtime.errors import WireError
from dni_runtime.wire.contract import HEADER_BYTES, ITEM_BYTES, Limits
from dni_runtime.wire.message import (
    PROTOCOL_VERSION,
    Buffer,
    Kind,
    Mark,
    Message,
    Mode,
    TensorEntry,
    nbytes,
)

FIELDS = 11
ID_LIMIT = (1 << 63) - 1
EPOCH_LIMIT = (1 << 31) - 1
SIZE_LIMIT = (1 << 31) - 1
RANK_LIMIT = 8
DEPTH_LIMIT = 8
INPUTS_LIMIT = 8
NAME_BYTES = 255  # a run is named after its folder (NAME_MAX, limits.h)


_BATCHES = [
    (*h, *(f"x{index}" for index in range(data)), "y")
    for data in range(INPUTS_LIMIT + 1)
    for h in (("h",), ("h", "h_scale"), ())
    if h or data
]

_USES: dict[Kind, str] = {
    Kind.HELLO: "body",
    Kind.WELCOME: "ack body",
    Kind.REFUSE: "body",
    Kind.BATCH: "id epoch mode body",
    Kind.MARK: "id epoch mark",
    Kind.GRADIENT: "id ack",
    Kind.ACK: "ack",
    Kind.DRAINED: "id",
    Kind.REQUEST: "body",
    Kind.BYE: "",
}
"""The fields that each kind uses; the others must be zero or empty."""
_TENSORS = {Kind.BATCH: frozenset(_BATCHES), Kind.GRADIENT: {("g",), ("g", "g_scale")}}
_KINDS = {
    int(kind): (kind, frozenset(uses.split()), _TENSORS.get(kind, {()}))
    for kind, uses in _USES.items()
}  # ints hash fastest
_MODES = {int(mode): mode for mode in Mode}
_MARKS = {bits: Mark(bits) for bits in range(sum(Mark) + 1)}


def _no_extension(code: int, data: bytes) -> Any:
    raise ValueError(f"extension type {code}")


_STRICT: dict[str, Any] = {
    "raw": False,
    "use_list": True,
    "strict_map_key": True,
    "ext_hook": _no_extension,
    "max_str_len": HEADER_BYTES,
    "max_bin_len": 0,
    "max_array_len": 1024,
    "max_map_len": 1024,
    "max_ext_len": 0,
}


def encode(message: Message) -> list[Buffer]:
    """Return a message's frames: its header, then its buffers unchanged."""
    try:
        *fields, _, body = message  # without the buffers
        header: bytes = msgpack.packb([PROTOCOL_VERSION, *fields, body])
    except (TypeError, ValueError, OverflowError) as error:
        raise WireError("header", f"the header cannot be written: {error}") from None
    if len(header) > HEADER_BYTES:
        raise WireError("oversized", f"the header has {len(header)} bytes of {HEADER_BYTES}")
    if len(message.tensors) != len(message.buffers):
        raise WireError(
            "count", f"{len(message.tensors)} tensors but {len(message.buffers)} buffers"
        )
    return [header, *message.buffers]


def decode(frames: Sequence[Buffer], limits: Limits) -> Message:
    """Return the message in these frames, completely checked against the format and the limits.

    Raises ``WireError`` if it cannot be accepted; docs/wire.md lists the reasons.
    """
    if not frames:
        raise WireError("truncated", "a message without frames")
    fields = _unpack(frames[0], limits)
    _, number, run, source, id, epoch, mode, mark, ack, table, body = fields
    if type(number) is not int or number not in _KINDS:
        raise WireError("kind", f"unknown kind {brief(number)}")
    kind, uses, names = _KINDS[number]
    _check_name(run, "run")
    _check_name(source, "source")
    _check_natural(id, "id", ID_LIMIT)
    _check_natural(epoch, "epoch", EPOCH_LIMIT)
    _check_natural(mode, "mode", len(_MODES) - 1)
    _check_natural(mark, "mark", len(_MARKS) - 1)
    _check_natural(ack, "ack", ID_LIMIT)
    if type(body) is not dict:
        raise WireError("header", f"body is {brief(body)}, not a map")
    if body:
        _check_body(body, DEPTH_LIMIT)
    wrong = (
        ("id" if ("id" in uses) != (id > 0) else "")
        or ("mark" if ("mark" in uses) != (mark > 0) else "")
        or ("epoch" if epoch and "epoch" not in uses else "")
        or ("mode" if mode and "mode" not in uses else "")
        or ("ack" if ack and "ack" not in uses else "")
        or ("body" if body and "body" not in uses else "")
    )
    if wrong:
        raise WireError("kind", f"{kind.name} with the wrong {wrong}")
    tensors, buffers = _table(table, frames, limits), tuple(frames[1:])
    if tuple([entry.name for entry in tensors]) not in names:
        raise WireError("count", f"{kind.name} with the tensors {brief(table)}")
    mode, mark = _MODES[mode], _MARKS[mark]
    return Message(kind, run, source, id, epoch, mode, mark, ack, tensors, buffers, body)


def _unpack(header: Buffer, limits: Limits) -> list[Any]:
    if nbytes(header) > limits.header_bytes:
        raise WireError(
            "oversized", f"the header has {nbytes(header)} bytes of {limits.header_bytes}"
        )
    try:
        fields = msgpack.unpackb(header, **_STRICT)
    except (ValueError, msgpack.UnpackException) as error:
        reason = "truncated" if _incomplete(header) else "header"
        raise WireError(reason, f"the header cannot be read: {brief(str(error))}") from None
    if type(fields) is not list or not fields or type(fields[0]) is not int:
        raise WireError("header", f"the header is {brief(fields)}")
    if fields[0] != PROTOCOL_VERSION:
        what = f"protocol version {fields[0]}; this side uses {PROTOCOL_VERSION}"
        raise WireError("version", what, version=fields[0])
    if len(fields) != FIELDS:
        raise WireError("header", f"the header has {len(fields)} fields, not {FIELDS}")
    return fields


def _incomplete(header: Buffer) -> bool:
    """Return whether more bytes could complete the header (only called after a failure)."""
    unpacker = msgpack.Unpacker(**_STRICT)
    unpacker.feed(header)
    try:
        unpacker.unpack()
    except msgpack.OutOfData:
        return True
    except (ValueError, msgpack.UnpackException):
        return False
    return False


def _check_natural(value: object, what: str, limit: int) -> None:
    # bool is a subclass of int, hence the exact type
    if type(value) is not int or not 0 <= value <= limit:
        raise WireError("header", f"{what} is {brief(value)}, not a whole number from 0 to {limit}")


def _check_name(value: object, what: str) -> None:
    if type(value) is not str or not value or len(value.encode()) > NAME_BYTES:
        raise WireError("header", f"{what} is {brief(value)}, not 1 to {NAME_BYTES} bytes of text")


def _check_body(value: object, depth: int) -> None:
    if value is None or type(value) in (bool, int, float, str):
        return
    if depth == 0:
        raise WireError("header", f"the body is more than {DEPTH_LIMIT} deep")
    if type(value) is list:
        for item in value:
            _check_body(item, depth - 1)
    elif type(value) is dict:
        for key, item in value.items():
            if type(key) is not str:
                raise WireError("header", f"the body has the key {brief(key)}")
            _check_body(item, depth - 1)
    else:
        raise WireError("header", f"the body has {brief(value)}")


def _table(table: object, frames: Sequence[Buffer], limits: Limits) -> tuple[TensorEntry, ...]:
    """Return the tensor table, with each row checked against its buffer."""
    if type(table) is not list:
        raise WireError("header", f"the tensor table is {brief(table)}")
    rows, buffers = len(table), len(frames) - 1
    if rows > limits.tensors:
        raise WireError("count", f"{rows} tensors; at most {limits.tensors}")
    if rows != buffers:
        raise WireError(
            "truncated" if buffers < rows else "count", f"{rows} tensors but {buffers} buffers"
        )
    if not rows:
        return ()
    return tuple(
        [_entry(row, nbytes(frame), limits) for row, frame in zip(table, frames[1:], strict=True)]
    )


def _entry(row: object, nbytes: int, limits: Limits) -> TensorEntry:
    if type(row) is not list or len(row) != 3:
        raise WireError("header", f"the tensor table has the row {brief(row)}")
    name, dtype, sizes = row
    _check_name(name, "a tensor's name")
    item_bytes = ITEM_BYTES.get(dtype) if type(dtype) is str else None
    if item_bytes is None:
        raise WireError("dtype", f"tensor {name!r} has the unknown dtype {brief(dtype)}")
    if type(sizes) is not list or len(sizes) > RANK_LIMIT:
        raise WireError("shape", f"tensor {name!r} has the sizes {brief(sizes)}")
    for size in sizes:
        if type(size) is not int or not 0 <= size <= SIZE_LIMIT:
            raise WireError("shape", f"tensor {name!r} has the sizes {brief(sizes)}")
    if nbytes > limits.buffer_bytes:
        raise WireError(
            "oversized", f"tensor {name!r} has {nbytes} bytes; at most {limits.buffer_bytes}"
        )
    due = math.prod(sizes) * item_bytes
    if nbytes != due:
        raise WireError(
            "truncated" if nbytes < due else "oversized",
            f"tensor {name!r} of {dtype} and sizes {sizes} has {nbytes} bytes, not {due}",
        )
    return TensorEntry(name, dtype, tuple(sizes))

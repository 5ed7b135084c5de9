"""The wire format: messages, their codec and contracts (docs/wire.md).

Pure: bytes in, values out. Imports neither torch nor zmq, and never unpickles anything.
"""

from dni_runtime.wire.batches import Part, Rows, body_of, samples_of
from dni_runtime.wire.codec import ID_LIMIT, INPUTS_LIMIT, decode, encode
from dni_runtime.wire.contract import (
    HEADER_BYTES,
    ITEM_BYTES,
    SCALE_DTYPE,
    Limits,
    TensorContract,
    holds,
    scale_name,
)
from dni_runtime.wire.message import (
    PROTOCOL_VERSION,
    Body,
    Buffer,
    Kind,
    Mark,
    Message,
    Mode,
    TensorEntry,
    nbytes,
)

__all__ = [
    "HEADER_BYTES",
    "ID_LIMIT",
    "INPUTS_LIMIT",
    "ITEM_BYTES",
    "PROTOCOL_VERSION",
    "SCALE_DTYPE",
    "Body",
    "Buffer",
    "Kind",
    "Limits",
    "Mark",
    "Message",
    "Mode",
    "Part",
    "Rows",
    "TensorContract",
    "TensorEntry",
    "body_of",
    "decode",
    "encode",
    "holds",
    "nbytes",
    "samples_of",
    "scale_name",
]

"""Links between neighbouring modules over ZeroMQ (docs/wire.md).

``sender``, ``receiver`` and ``answers`` implement the protocol as pure state; ``output`` and
``input`` connect them to sockets; only ``sockets`` creates sockets and does I/O.
"""

from dni_runtime.link.address import check_address, encrypted, listen_address
from dni_runtime.link.counters import LinkCounters
from dni_runtime.link.input import InputLink
from dni_runtime.link.items import Batch, Drain, Event, Gradient, Marker, StreamRequest
from dni_runtime.link.output import OutputLink

__all__ = [
    "Batch",
    "Drain",
    "Event",
    "Gradient",
    "InputLink",
    "LinkCounters",
    "Marker",
    "OutputLink",
    "StreamRequest",
    "check_address",
    "encrypted",
    "listen_address",
]

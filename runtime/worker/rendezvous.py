"""Reading the endpoint records of other hosts, through a file system that may lag."""

from __future__ import annotations

import ipaddress
import os
import socket
from pathlib import Path

from dni_runtime.errors import UnavailableError
from dni_runtime.run.documents.reports import Endpoint


def fresh_endpoint(path: Path) -> Endpoint:
    """Read a record as it is now; return an empty one if there is none that can be read.

    A shared file system may cache for seconds that a file is missing (nfs(5), "lookupcache"):
    opening the folder makes it revalidate that, opening the file makes it revalidate the content
    ("close-to-open"). The folder is not read: with a thousand modules it is long.
    """
    try:
        os.close(os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY))
    except OSError:
        return Endpoint()
    return Endpoint.read(path)


def check_reachable(address: str, record: Endpoint) -> None:
    """Refuse an address that only another host can reach: loopback, or a socket in its files."""
    here = socket.gethostname()
    if record.host not in (None, here) and _stays_on_its_host(address):
        raise UnavailableError(
            f"module {record.module!r} is on {record.host} and listens on {address}, which other "
            f"hosts cannot reach; this is {here}",
            hint="set 'links.interface' to a network interface that all hosts have "
            "(and 'transport: tcp')",
        )


def _stays_on_its_host(address: str) -> bool:
    if address.startswith("ipc://"):
        return True
    host = address.removeprefix("tcp://").rpartition(":")[0].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"

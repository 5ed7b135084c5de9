"""Reading the endpoint records of other hosts, through a file system that may be late."""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dni_runtime.errors import UnavailableError
from dni_runtime.rundir import peek_json


def fresh_record(path: Path) -> dict[str, Any]:
    """A record as it is now; empty while there is none that can be read.

    A shared file system may remember for seconds that a file is not there (nfs(5), "lookupcache"):
    opening the folder makes it ask whether that has changed, opening the file makes it compare what
    it remembers ("close-to-open"). The folder is not read: with a thousand modules it is long.
    """
    try:
        os.close(os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY))
    except OSError:
        return {}
    return peek_json(path)


def check_reachable(module: str, record: Mapping[str, Any]) -> None:
    """Refuse an address that cannot lead to its module's host from here.

    Raises:
        UnavailableError: It is another host's loopback, or a socket in another host's files.
    """
    address, host = str(record["address"]), record.get("host")
    here = socket.gethostname()
    if host not in (None, here) and _stays_on_its_host(address):
        raise UnavailableError(
            f"module {module!r} is on {host} and listens on {address}, which other hosts cannot "
            f"reach; this is {here}",
            hint="name a network interface that all hosts have with 'links.interface' "
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

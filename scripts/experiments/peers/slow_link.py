"""Two network namespaces with a slow line between them: what ``slow_link.c`` makes, and a check.

Started as a program this module is one end of the check (see :func:`probe`).
"""

from __future__ import annotations

import json
import shutil
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

INTERFACE = "dni0"
ADDRESSES = ("10.77.0.1", "10.77.0.2")
PORT = 7700
_SOURCE = Path(__file__).with_suffix(".c")
_NO_PRIVILEGE = 77


class LinkError(RuntimeError):
    """The line cannot be made here."""


class PrivilegeError(LinkError):
    """This user may not make it."""


@dataclass(frozen=True)
class Line:
    """What the line does to packets, one way."""

    delay_ms: float = 0.0  # holds each so long
    rate_mbit: float = 0.0  # per second; 0: no limit

    @property
    def loopback(self) -> bool:
        """Whether this is no line at all: both ends are on the host itself."""
        return not self.delay_ms and not self.rate_mbit

    def __str__(self) -> str:
        rate = f"{self.rate_mbit:g} Mbit/s" if self.rate_mbit else "unlimited"
        return "loopback" if self.loopback else f"{self.delay_ms:g} ms one way, {rate}"

    def seconds(self, nbytes: float) -> float:
        """How long so many bytes take to leave, without the delay."""
        return nbytes * 8 / (self.rate_mbit * 1e6) if self.rate_mbit else 0.0


class Link:
    """A line that is up.

    ``facts`` is what the program said at the start: congestion control, whether it runs with
    priority; ``carried`` at the end: packets, bytes, how late they were, its CPU seconds.
    """

    def __init__(self, facts: dict[str, Any]) -> None:
        self.facts = facts
        self.carried: dict[str, Any] = {}

    def enter(self, end: int) -> list[str]:
        """The command prefix that runs a command at one of the two ends."""
        pid = self.facts["pid"]
        user = [f"--user=/proc/{pid}/ns/user", "--preserve-credentials"]
        net = f"--net=/proc/{pid}/fd/{self.facts['net'][end]}"
        return ["nsenter", *(user if self.facts["user"] else []), net, "--"]


def build_slow_link(folder: Path) -> Path:
    """Compile the program; raises ``LinkError``."""
    compiler = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
    if compiler is None:
        raise LinkError("a C compiler is needed for a slow link, and there is none")
    program = folder / "slow_link"
    command = [compiler, "-O2", "-o", str(program), str(_SOURCE)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise LinkError(f"{_SOURCE.name} cannot be compiled:\n{done.stderr}")
    return program


@contextmanager
def open_link(program: Path, line: Line) -> Iterator[Link]:
    """Make both namespaces and the line; at the end they are gone.

    Raises ``PrivilegeError`` if the kernel forbids it, ``LinkError`` if it fails.
    """
    process = subprocess.Popen(
        [program, f"{line.delay_ms:g}", f"{line.rate_mbit:g}"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        first = process.stdout.readline()
        if not first:
            code, reason = process.wait(), process.stderr.read().strip()
            raise (PrivilegeError if code == _NO_PRIVILEGE else LinkError)(reason)
        link = Link(json.loads(first))
        yield link
        retransmitted = sum(_retransmitted(link, end) for end in (0, 1))
        process.stdin.close()
        carried = json.loads(process.stdout.readline() or "{}")
        link.carried = {**carried, "retransmitted": retransmitted}
    finally:
        process.stdin.close()
        process.wait(10)
        process.stdout.close()
        process.stderr.close()


def prepare_lines(
    lines: Sequence[Line], folder: Path, tell: Callable[[str], None]
) -> tuple[Path | None, dict[Line, dict[str, Any]]]:
    """Compile the program, and measure each line; both are empty if all are loopback.

    ``tell`` gets a sentence about each line. Errors are those of :func:`open_link`.
    """
    slow = [line for line in lines if not line.loopback]
    if not slow:
        return None, {}
    program, found = build_slow_link(folder), {}
    for line in slow:
        with open_link(program, line) as link:
            one = found[line] = {**probe(link, line), **link.facts}
        tell(
            f"{line}: round trip {one['rtt_ms']:.2f} ms, {one['mbit_per_s']:.0f} Mbit/s, TCP "
            f"{one['congestion']}{'' if one['prompt'] else ', without priority'}"
        )
    return program, found


def _retransmitted(link: Link, end: int) -> int:
    """TCP segments that one end has sent more than once (proc(5), ``/proc/net/snmp``)."""
    command = [*link.enter(end), "cat", "/proc/net/snmp"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    names, values = (line.split() for line in done.stdout.splitlines() if line.startswith("Tcp:"))
    return int(dict(zip(names, values, strict=True))["RetransSegs"])


def probe(link: Link, line: Line, *, pings: int = 15, seconds: float = 1.0) -> dict[str, float]:
    """Measure the line by TCP: round trips of one byte, and what comes through in one way.

    Bytes are counted for ``seconds``, after a second or more for TCP to get going. Gives ``rtt_ms``
    (median) and ``mbit_per_s``.
    """
    lead_s = 1.0 + 20 * line.delay_ms / 1000
    command = [sys.executable, __file__]
    with subprocess.Popen(
        [*link.enter(1), *command, "answer", str(pings), str(lead_s), str(seconds)],
        stdout=subprocess.PIPE,
    ) as answer:
        try:
            asked = subprocess.run(
                [*link.enter(0), *command, "ask", str(pings), str(lead_s), str(seconds)],
                stdout=subprocess.PIPE,
                timeout=60 + lead_s + seconds,
                check=True,
            )
            assert answer.stdout is not None
            return {**json.loads(asked.stdout), **json.loads(answer.stdout.read())}
        finally:
            answer.kill()


def _answer(pings: int, lead_s: float, seconds: float) -> dict[str, float]:
    with socket.create_server((ADDRESSES[1], PORT)) as server:
        connection, _ = server.accept()
    with connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(pings):
            connection.sendall(connection.recv(1))
        buffer = bytearray(1 << 20)
        connection.recv_into(buffer, 1)
        began = time.perf_counter()
        counted, since, until = 0, 0.0, 0.0
        while size := connection.recv_into(buffer):
            now = time.perf_counter()
            if now - began < lead_s:
                since = now
            elif now - began < lead_s + seconds:
                counted += size
                until = now
    return {"mbit_per_s": counted * 8e-6 / (until - since) if until > since else 0.0}


def _ask(pings: int, lead_s: float, seconds: float) -> dict[str, float]:
    deadline = time.monotonic() + 30
    while True:
        try:
            connection = socket.create_connection((ADDRESSES[1], PORT), timeout=30)
            break
        except ConnectionRefusedError:  # the other end is starting
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
    trips = []
    with connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(pings):
            began = time.perf_counter()
            connection.sendall(b".")
            connection.recv(1)
            trips.append(time.perf_counter() - began)
        data = bytes(1 << 18)
        until = time.perf_counter() + lead_s + seconds + 0.5
        while time.perf_counter() < until:
            connection.sendall(data)
    return {"rtt_ms": statistics.median(trips) * 1000}


if __name__ == "__main__":
    _, role, *numbers = sys.argv
    act = _answer if role == "answer" else _ask
    print(json.dumps(act(int(numbers[0]), *map(float, numbers[1:]))))

"""The slow line between two network namespaces, as TCP sees it."""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from peers.slow_link import (
    INTERFACE,
    Line,
    Link,
    PrivilegeError,
    build_slow_link,
    open_link,
    probe,
)


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_slow_link(tmp_path_factory.mktemp("slow_link"))


@contextmanager
def opened(program: Path, line: Line) -> Iterator[Link]:
    try:
        with open_link(program, line) as link:
            yield link
    except PrivilegeError as error:
        pytest.skip(f"needs root, or /dev/net/tun and user namespaces: {error}")


def test_packets_are_held(program: Path) -> None:
    line = Line(delay_ms=15)
    with opened(program, line) as link:
        found = probe(link, line, pings=7, seconds=2)
        assert link.facts["congestion"] in ("cubic", "reno")
    # Whoever waits for a core on a busy machine is late, but nothing ever comes too early.
    assert 30 <= found["rtt_ms"] < 60
    assert found["mbit_per_s"] > 100
    assert link.carried["packets"][0] > 100
    assert link.carried["dropped"] == 0


def test_packets_are_paced(program: Path) -> None:
    line = Line(delay_ms=1, rate_mbit=40)
    with opened(program, line) as link:
        found = probe(link, line, pings=3, seconds=1)
    # An Ethernet frame of 1538 bytes carries 1448 of TCP.
    assert 30 < found["mbit_per_s"] < 40 * 1448 / 1538 * 1.05


def test_it_leaves_nothing_behind(program: Path) -> None:
    with opened(program, Line(delay_ms=1)) as link:
        seen = subprocess.run(
            [*link.enter(1), "cat", "/proc/net/dev"], capture_output=True, text=True, check=True
        ).stdout
        names = {line.partition(":")[0].strip() for line in seen.splitlines() if ":" in line}
        assert names == {"lo", INTERFACE}
        idle = Path("/proc/sys/net/ipv4/tcp_slow_start_after_idle")
        inside = subprocess.run(
            [*link.enter(0), "cat", str(idle)], capture_output=True, text=True, check=True
        ).stdout
        assert inside.strip() == "0"
        before = idle.read_text()
    assert INTERFACE not in {name for _, name in socket.if_nameindex()}
    assert idle.read_text() == before
    assert not Path(f"/proc/{link.facts['pid']}").exists()

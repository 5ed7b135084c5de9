"""Processes that measure a line between two hosts."""

from __future__ import annotations

import pytest

from dni_runtime.errors import WorkerError
from dni_runtime.measure.peer import PROGRAM, Peer


def test_a_measuring_process_that_fails_says_why() -> None:
    with Peer(["sh", "-c", "echo no place >&2; exit 1"]) as peer:
        for _ in range(2):
            with pytest.raises(WorkerError, match="failed: no place"):
                _ = peer.key


def test_a_host_may_greet() -> None:
    greeting = ["sh", "-c", 'echo Welcome to n1; echo "{a}"; exec "$@"', "sh"]
    with Peer([*greeting, *PROGRAM]) as peer:
        assert len(peer.key) == 40

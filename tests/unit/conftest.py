"""Unit tests start no process and have no connection: an attempt of one is its failure."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from tests.unit.runs import chain, make_worker, plan, prepared, record, workers

__all__ = ["chain", "make_worker", "plan", "prepared", "record", "workers"]

# As Python names them: docs.python.org/3/library/audit_events.html.
_FORBIDDEN = {
    "os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn", "os.system",
    "socket.bind", "socket.connect",
}  # fmt: skip
_tested = False


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if not _tested:
        return
    # A program that is not there is no process; matplotlib asks for its fonts once for each user.
    starts = event == "subprocess.Popen" and arguments[0] != "fc-list"
    if event in _FORBIDDEN or (starts and shutil.which(arguments[0])):
        raise AssertionError(f"{event} in tests/unit: {arguments}; move it to tests/integration")


sys.addaudithook(_audit)  # for good: there is no way to remove one


@pytest.fixture(autouse=True)
def _alone() -> Iterator[None]:
    global _tested
    _tested = True
    yield
    _tested = False

"""Endpoint records that come late, and addresses that cannot lead to their host."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from dni_runtime.errors import UnavailableError
from dni_runtime.run.documents.reports import Endpoint
from dni_runtime.worker.neighbours import check_reachable, fresh_endpoint


def test_no_record_yet(tmp_path: Path) -> None:
    assert fresh_endpoint(tmp_path / "top.json") == Endpoint()
    assert fresh_endpoint(tmp_path / "later" / "top.json") == Endpoint()


@pytest.mark.parametrize("text", ["", "[1]", "{", '{"attempt": "x", "address": "ipc:///a"}'])
def test_something_else_is_no_record(tmp_path: Path, text: str) -> None:
    (tmp_path / "top.json").write_text(text)
    assert fresh_endpoint(tmp_path / "top.json") == Endpoint()


def test_a_record_that_comes_late_is_found(tmp_path: Path) -> None:
    path = tmp_path / "top.json"
    for attempt in (1, 2):
        record = Endpoint(attempt=attempt, address=f"tcp://10.0.0.{attempt}:5000")
        assert fresh_endpoint(path) != record
        record.write(path)
        assert fresh_endpoint(path) == record


@pytest.mark.parametrize(
    "address",
    ["tcp://127.0.0.1:5000", "tcp://[::1]:5000", "tcp://localhost:5000", "ipc:///tmp/x.sock"],
)
def test_another_hosts_loopback_is_an_error(address: str) -> None:
    with pytest.raises(UnavailableError) as caught:
        check_reachable(address, Endpoint(module="top", host="elsewhere"))
    for word in ("'top'", "elsewhere", address, "links.interface"):
        assert word in str(caught.value)
    check_reachable(address, Endpoint(module="top", host=socket.gethostname()))


def test_another_hosts_own_address_is_fine() -> None:
    check_reachable("tcp://10.0.0.2:7", Endpoint(module="top", host="elsewhere"))

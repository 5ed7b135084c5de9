"""Documents that workers write about themselves, as others read them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dni_runtime.run.documents.reports import Endpoint, Report


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "top.json"
    assert not Report.read(path)
    report = Report(attempt=2, module="top", state="running", id=7, evaluation={"loss": 0.5})
    report.write(path, durable=False)
    assert Report.read(path) == report
    assert report.of(2) is report
    assert not report.of(1)
    assert report.of(1).state == "starting"
    endpoint = Endpoint(attempt=1, address="ipc:///a", further={"2": "ipc:///b"})
    endpoint.write(path)
    assert Endpoint.read(path) == endpoint


def test_other_versions_are_read_as_far_as_they_are_known(tmp_path: Path) -> None:
    path = tmp_path / "top.json"
    path.write_text(json.dumps({"attempt": 1, "state": "running", "mood": "good"}))
    assert Report.read(path) == Report(attempt=1, state="running")


@pytest.mark.parametrize("text", ["", "{", "[]", '{"attempt": "x"}', '{"state": "asleep"}'])
def test_what_is_no_report_is_an_empty_one(tmp_path: Path, text: str) -> None:
    path = tmp_path / "top.json"
    path.write_text(text)
    assert not Report.read(path)
    assert Report.read(path) == Report()

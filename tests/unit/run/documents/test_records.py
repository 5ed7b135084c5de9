"""The record of a Slurm job; that of a run: tests/unit/plan/test_records.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from dni_runtime.errors import DataError
from dni_runtime.run.documents.records import JobRecord
from dni_runtime.spec.profile import ProfileSpec


def test_the_record_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "job.json"
    assert JobRecord.load(path) is None
    settings = ProfileSpec(account="a", binds=("/a", "/b:ro"))
    record = JobRecord(job="3", nodes=(0, 0, 1), profile="site", settings=settings, submitted=5.0)
    record.write(path)
    assert JobRecord.load(path) == record


def test_further_fields_are_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "job.json"
    path.write_text('{"format": 1, "job": "3", "nodes": [0], "queue": "long"}')
    assert JobRecord.load(path) == JobRecord(job="3", nodes=(0,))


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("[]", "not a mapping"),
        ("{}", "nodes: 'nodes' is missing"),
        ('{"format": 1, "nodes": 3}', "nodes: 3 is not a list"),
        ('{"format": 2, "nodes": [0]}', "format: 2 is not allowed here"),
    ],
)
def test_a_damaged_record_is_named(tmp_path: Path, text: str, what: str) -> None:
    (tmp_path / "job.json").write_text(text)
    with pytest.raises(DataError, match=r"job\.json' is damaged: ") as caught:
        JobRecord.load(tmp_path / "job.json")
    assert what in str(caught.value)

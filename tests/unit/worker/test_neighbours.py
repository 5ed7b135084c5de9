"""What finding the neighbours, and clearing away old cuts, costs in the file system."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from dni_runtime.link import OutputLink
from dni_runtime.rundir import RunDir, write_json
from dni_runtime.worker import neighbours
from dni_runtime.worker.neighbours import Neighbours
from tests.conftest import MakeSpec


class Listed:
    """Entries of folders that were listed."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.entries = 0
        original = os.listdir

        def listdir(path: Any = ".") -> list[str]:
            found = original(path)
            self.entries += len(found)
            return found

        patch.setattr(os, "listdir", listdir)


def test_a_worker_looks_for_its_neighbour_by_name(
    tmp_path: Path, make_spec: MakeSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others' records cost it nothing, and the longer it waits the more seldom it looks."""
    run = RunDir(tmp_path)
    run.create()
    for number in range(200):
        write_json(run.endpoint(f"other{number}"), {"address": "tcp://127.0.0.1:1"}, durable=False)
    now_s, looks = [100.0], Counter[int]()
    monkeypatch.setattr(neighbours.time, "monotonic", lambda: now_s[0])
    monkeypatch.setattr(
        neighbours.time, "sleep", lambda seconds: now_s.__setitem__(0, now_s[0] + seconds)
    )
    original = neighbours.fresh_record

    def look(path: Path) -> dict[str, Any]:
        looks[int(now_s[0] - 100)] += 1
        return original(path)

    monkeypatch.setattr(neighbours, "fresh_record", look)
    listed = Listed(monkeypatch)
    spec = make_spec(downstream="tail")
    with OutputLink(spec, run="run", next_id=1) as output:
        Neighbours(spec, run, address=None, again=False, stop=lambda: now_s[0] >= 130).connect(
            output, None
        )
    assert listed.entries == 0
    assert 5 <= looks[0] <= 20
    assert all(looks[second] <= 2 for second in range(10, 30))
    assert sum(looks.values()) < 80


@pytest.mark.parametrize("clock", [0.0, 1e12])
def test_a_supervisor_whose_clock_differs(
    tmp_path: Path, make_spec: MakeSpec, monkeypatch: pytest.MonkeyPatch, clock: float
) -> None:
    """That it goes on writing counts, and not what time it thinks it is."""
    run, now_s = RunDir(tmp_path), [100.0]
    run.create()
    monkeypatch.setattr(neighbours.time, "monotonic", lambda: now_s[0])
    known = Neighbours(
        make_spec(downstream="tail"), run, address=None, again=False, stop=lambda: False
    )
    assert not known.expected("tail")
    modules = {"tail": {"restarts": 1, "state": "restarting"}}
    for beat in range(30):
        write_json(run.state, {"updated": clock + 10 * beat, "modules": modules})
        assert known.expected("tail")
        now_s[0] += 10
    now_s[0] += 51
    assert not known.expected("tail")

"""A package that is replaced while a run goes on."""

from __future__ import annotations

import time
from contextlib import closing
from pathlib import Path

import pytest

from dni_runtime import __version__
from dni_runtime.errors import HandshakeError
from dni_runtime.files import read_json, write_atomic
from dni_runtime.run.rundir import RunDir
from dni_runtime.wire import PROTOCOL_VERSION
from dni_runtime.worker.main import serve
from dni_runtime.worker.signals import StopRequest
from dni_runtime.worker.start import STARTED_WITH, WorkerStart, replaced, this_version
from tests.unit.worker.test_resume import workers


@pytest.mark.parametrize("environ", [{}, {STARTED_WITH: this_version()}])
def test_the_same(environ: dict[str, str]) -> None:
    assert replaced(environ) is None


def test_another_version_with_the_same_links_is_told() -> None:
    warning = replaced({STARTED_WITH: f"0.0.9 {PROTOCOL_VERSION}"})
    assert warning is not None
    assert f"started with dni-runtime 0.0.9, and {__version__} is installed now" in warning


def test_one_with_other_links_is_refused() -> None:
    with pytest.raises(HandshakeError) as caught:
        replaced({STARTED_WITH: "0.0.9 1"})
    assert "started with dni-runtime 0.0.9" in str(caught.value)
    assert f"(protocol 1, {PROTOCOL_VERSION})" in str(caught.value)
    assert "dnictl resume" in str(caught.value)


def test_a_worker_says_so_before_it_takes_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, run = workers()[1], RunDir(tmp_path)
    run.create()
    write_atomic(run.spec(spec.module), spec.to_json())
    monkeypatch.setenv(STARTED_WITH, "0.0.9 1")
    start = WorkerStart(str(tmp_path), spec.module, attempt=2, resume="own")
    with closing(StopRequest()) as stop, pytest.raises(HandshakeError):
        serve(start, stop, time.time())
    report = read_json(run.worker(spec.module))
    assert report is not None
    assert report["state"] == "failed"
    assert not run.ledger(spec.module).exists()
    assert "started with dni-runtime 0.0.9" in report["error"]

"""Programs that are started: which version they are, what they print, and how long they take."""

from __future__ import annotations

import fcntl
import os
import sys
from pathlib import Path

import pytest

from dni_runtime.errors import BuildError, UnavailableError
from dni_runtime.image import apptainer
from dni_runtime.image.apptainer import Apptainer
from dni_runtime.image.scratch import scratch_folder


def _program(path: Path, answer: str) -> Path:
    path.write_text(f"#!/bin/sh\necho '{answer}'\n")
    path.chmod(0o755)
    return path


def test_program_on_the_path_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = _program(tmp_path / "apptainer", "1.3.6")
    monkeypatch.delenv("DNI_APPTAINER", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    found = apptainer.find_apptainer()
    assert found == Apptainer(program, "apptainer", (1, 3, 6))
    assert str(found) == "apptainer 1.3.6"


def test_too_old_program_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = _program(tmp_path / "apptainer", "1.0.3")
    monkeypatch.setenv("DNI_APPTAINER", str(program))
    with pytest.raises(UnavailableError, match=r"too old: 1\.0\.3"):
        apptainer.find_apptainer()


def test_failed_program_shows_its_last_lines(tmp_path: Path) -> None:
    code = "for i in range(100): print('line', i)\nraise SystemExit(3)"
    seen: list[str] = []
    log = tmp_path / "log"
    with pytest.raises(BuildError, match="testing failed with exit status 3") as caught:
        apptainer.stream([sys.executable, "-c", code], what="testing", on_line=seen.append, log=log)
    assert caught.value.tail == tuple(f"line {i}" for i in range(80, 100))
    assert len(seen) == 100
    assert log.read_text().splitlines() == seen
    assert str(log) in str(caught.value)


def test_what_a_killed_build_has_left_is_removed(tmp_path: Path) -> None:
    for name in (".build-killed", ".build-new", ".build-running", ".other-killed"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "base.sif").write_bytes(b"part")
        if name != ".build-new":
            os.utime(tmp_path / name, (0, 0))
    running = os.open(tmp_path / ".build-running", os.O_RDONLY)
    fcntl.flock(running, fcntl.LOCK_EX)
    with scratch_folder(tmp_path, ".build-") as scratch:
        left = {path.name for path in tmp_path.iterdir()}
        assert left == {scratch.name, ".build-new", ".build-running", ".other-killed"}
        os.utime(scratch, (0, 0))
        with scratch_folder(tmp_path, ".build-") as second:
            assert second != scratch
            assert scratch.exists()
    os.close(running)
    assert {path.name for path in tmp_path.iterdir()} == left - {scratch.name}


def test_program_that_cannot_start_is_unavailable(tmp_path: Path) -> None:
    with pytest.raises(UnavailableError, match="cannot be started"):
        apptainer.stream([str(tmp_path / "none")], what="testing")
    with pytest.raises(UnavailableError, match="cannot be started"):
        apptainer.capture([str(tmp_path / "none")], what="testing")


def test_program_that_takes_too_long_is_ended() -> None:
    with pytest.raises(BuildError, match=r"longer than 0\.2 s"):
        apptainer.capture(
            [sys.executable, "-c", "import time; time.sleep(30)"], what="testing", timeout_s=0.2
        )


def test_program_that_prints_too_much_is_ended() -> None:
    code = "import sys\nwhile True: sys.stdout.write('x' * 4096)"
    with pytest.raises(BuildError, match="testing printed more than 10000 bytes"):
        apptainer.capture_bytes([sys.executable, "-c", code], what="testing", most_bytes=10_000)

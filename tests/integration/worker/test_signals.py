"""Being told to stop: by signals, and by a supervisor."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from dni_runtime.run.documents.reports import Control
from dni_runtime.worker import signals
from dni_runtime.worker.signals import StopRequest

PROGRAM = """\
import os, signal, sys
from dni_runtime.worker import signals
stop = signals.StopRequest()
stop.install()
os.kill(os.getpid(), signal.SIGTERM)
os.kill(os.getpid(), signal.SIGTERM)
assert stop() and not stop.alone
if sys.argv[1] == "later":
    stop._signalled_s -= signals.REPEAT_S
    os.kill(os.getpid(), signal.SIGTERM)
sys.exit(75)
"""


@pytest.mark.parametrize(("when", "code"), [("at once", 75), ("later", 128 + signal.SIGTERM)])
def test_the_second_signal(when: str, code: int) -> None:
    """Slurm and Apptainer's starter each send one: a step of Slurm must not end at the second."""
    command = [sys.executable, "-c", PROGRAM, when]
    done = subprocess.run(command, env=dict(os.environ), timeout=60)
    assert done.returncode == code


@pytest.fixture
def stop(monkeypatch: pytest.MonkeyPatch) -> Iterator[StopRequest]:
    monkeypatch.setattr(signals, "LOOK_S", 0.01)
    with closing(StopRequest()) as made:
        yield made


def woken(stop: StopRequest) -> bool:
    """Whether a poll that waits for other things ends."""
    found = bool(select.select([stop.wakeup], [], [], 10)[0])
    stop.drain()
    return found


def test_a_supervisor_says_what_it_wants(tmp_path: Path, stop: StopRequest) -> None:
    path = tmp_path / "a.json"

    def tell(**document: object) -> None:
        Control.model_validate(document).write(path)

    tell(attempt=2, order="stop")  # for the start before
    with stop.obeying(path, 3):
        tell(attempt=3, order="run")
        assert not select.select([stop.wakeup], [], [], 0.1)[0]
        assert not stop()
        tell(attempt=3, order="restart")
        assert woken(stop)
        assert (stop(), stop.alone) == (True, True)
        tell(attempt=3, order="stop")  # all of them, meanwhile
        assert woken(stop)
        assert not stop.alone
        since_s = stop.age_s
        tell(attempt=3, order="restart")
        tell(attempt=3, order="stop")
        assert not select.select([stop.wakeup], [], [], 0.1)[0], "it is no news"
        assert (stop.alone, stop.age_s > since_s) == (False, True)


def test_one_that_begins_late_knows_at_once(tmp_path: Path, stop: StopRequest) -> None:
    path = tmp_path / "a.json"
    Control(attempt=1, order="stop").write(path)
    with stop.obeying(path, 1):
        assert stop()


@pytest.mark.parametrize(
    "spoil",
    [
        lambda path: path.unlink(),
        lambda path: path.write_text(""),
        lambda path: path.write_text('{"attempt": 1, "order": "st'),
        lambda path: path.write_text('{"attempt": 1, "order": "sing"}'),
    ],
)
def test_what_cannot_be_read_is_no_request(
    tmp_path: Path, stop: StopRequest, spoil: Callable[[Path], object]
) -> None:
    path = tmp_path / "a.json"
    Control(attempt=1).write(path)
    spoil(path)
    with stop.obeying(path, 1):
        assert not select.select([stop.wakeup], [], [], 0.05)[0]
        Control(attempt=1, order="stop").write(path)
        assert woken(stop)

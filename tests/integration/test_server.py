"""The server's loop where nothing comes any more."""

from __future__ import annotations

import signal
import threading
from contextlib import closing
from pathlib import Path

from dni_runtime.core.step import ModuleStep
from dni_runtime.link import InputLink
from dni_runtime.rundir import RunDir, read_json
from dni_runtime.spec import TailRole
from dni_runtime.wire import Mark
from dni_runtime.worker.checkpoint import CheckpointWriter
from dni_runtime.worker.leaving import Leaving
from dni_runtime.worker.ledger import Counts, Ledger
from dni_runtime.worker.metrics import Meter
from dni_runtime.worker.resume import Start
from dni_runtime.worker.server import ModuleServer, Outcome
from dni_runtime.worker.signals import StopRequest
from tests.conftest import MakeSpec


def test_one_that_waits_for_its_checkpoint_shows_that_it_lives(
    tmp_path: Path, make_spec: MakeSpec
) -> None:
    """Upstream is gone; who looks from another host knows only the times in the state file."""
    run, stop = RunDir(tmp_path), StopRequest()
    run.create()
    spec = make_spec("tail", tail=TailRole(metrics=()), stop_grace_s=3.5)
    meter = Meter(run, spec, 1)
    meter.set_state("running")
    ledger = Ledger(run.ledger("tail"), Counts())
    writer = CheckpointWriter(run, "tail", ["tail"], 1, lambda error: None)
    times: set[float] = set()
    done = threading.Event()

    def look() -> None:
        while not done.wait(0.05):
            times.add(read_json(run.worker("tail"))["time"])  # type: ignore[index]

    looking = threading.Thread(target=look)
    looking.start()
    try:
        with InputLink(spec, run="run") as input:
            server = ModuleServer(
                ModuleStep(spec),
                meter=meter,
                checkpoints=writer,
                stop=stop,
                start=Start(),
                ledger=ledger,
                input=input,
            )
            stop._handle(signal.SIGTERM, None)
            assert server.serve() is Outcome.STOPPED
    finally:
        done.set()
        looking.join()
        writer.close()
        ledger.close()
        stop.close()
    assert len(times) >= 4


def test_where_a_module_that_was_told_to_stop_leaves(tmp_path: Path, make_spec: MakeSpec) -> None:
    """All were told: not at an ordinary checkpoint, which modules upstream have had before."""
    run, spec = RunDir(tmp_path), make_spec("tail", tail=TailRole(metrics=()))
    run.create()
    ordinary, asked = Mark.EPOCH | Mark.CHECKPOINT, Mark.CHECKPOINT | Mark.ASKED
    for alone, places in ((False, [False, True]), (True, [True, True])):
        with closing(StopRequest()) as stop:
            leaving = Leaving(stop, Meter(run, spec, 1), head=None, input=None)
            leaving.asked = True
            tell = stop._handle_restart if alone else stop._handle
            tell(signal.SIGUSR1 if alone else signal.SIGTERM, None)
            assert [leaving.at(mark) for mark in (ordinary, asked)] == places
            leaving.asked = False
            assert not leaving.at(asked)

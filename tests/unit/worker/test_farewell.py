"""The end of a worker."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import zmq

from dni_runtime.link import Marker
from dni_runtime.rundir import RunDir
from dni_runtime.wire import Mark
from dni_runtime.worker.farewell import POLL_MS, Farewell


def test_a_replica_that_leaves_reads_what_the_others_send_and_sleeps(tmp_path: Path) -> None:
    """A message that stays in a socket would end each poll at once."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    here, there = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
    here.bind("inproc://exchange")
    there.connect("inproc://exchange")
    polls = list[int]()

    class Poller(zmq.Poller):
        def poll(self, timeout: int | None = None) -> Any:
            assert timeout == POLL_MS
            polls.append(len(super().poll(10)))
            return []

    poller = Poller()
    poller.register(here, zmq.POLLIN)

    def listen() -> None:
        while here.poll(0):
            here.recv()

    def nothing(*args: Any, **kwargs: Any) -> None:
        pass

    class Stop:
        age_s = 0.0

        def __call__(self) -> bool:
            return len(polls) == 4

    metrics: Any = SimpleNamespace(
        spec=SimpleNamespace(stop_grace_s=1.0),
        now=nothing,
        report=SimpleNamespace(check=nothing),
        run=RunDir(tmp_path),
    )
    stop: Any = Stop()
    exchange: Any = SimpleNamespace(finish=nothing, listen=listen)
    saver: Any = SimpleNamespace(flush=nothing)
    ledger: Any = SimpleNamespace(processed=nothing)
    there.send(b"an answer")
    farewell = Farewell(metrics, stop, saver, ledger, None, None, exchange, None, ())
    farewell.part(Marker(8, 1, Mark.SCALE, {}), poller, over=True, parked=True)
    assert polls == [0, 0, 0, 0]
    for socket in (here, there):
        socket.close(linger=0)
    context.term()

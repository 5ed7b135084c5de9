"""``python -m dni_runtime.serving``: a front whose modules a launcher has started, as pods.

It has no supervisor, and no other versions beside it. What it is follows from the run directory:
``front.json`` and its spec.
"""

from __future__ import annotations

import logging
import time
from dataclasses import replace

from dni_runtime.errors import DataError, StoppedError
from dni_runtime.garbage import run_program
from dni_runtime.run.documents.reports import Report
from dni_runtime.serving.documents import FrontSettings
from dni_runtime.serving.front import Front
from dni_runtime.serving.protocol import Signature
from dni_runtime.serving.server import serve
from dni_runtime.spec.predicting import FRONT
from dni_runtime.worker.__main__ import started
from dni_runtime.worker.options import given_run, load_spec, next_attempt
from dni_runtime.worker.signals import StopRequest
from dni_runtime.worker.start import OWN, WorkerStart, parser

_LOOK_S = 0.2

log = logging.getLogger(__name__)


def main() -> None:
    """Serve until a signal, or until the links fail."""
    options = vars(parser().parse_args())
    del options["selftest"]
    start = WorkerStart(**options)
    with started(start) as stop:
        _serve(start, stop)


def _serve(start: WorkerStart, stop: StopRequest) -> None:
    run = given_run(start)
    settings = FrontSettings.load(run.front)
    if settings is None:
        raise DataError(
            f"{str(run.front)!r} is missing",
            hint="'dnictl render kubernetes --serve' makes run directories of services",
        )
    attempt = next_attempt(Report.read(run.worker(FRONT)), OWN)
    start = replace(start, module=FRONT, by_rank=True, resume=OWN, attempt=attempt)
    server = serve(settings.http)
    front = Front(
        run,
        load_spec(start),
        start,
        Signature(settings.inputs, settings.outputs, settings.preprocessing),
        depth=settings.modules,
        exit_wait_s=settings.exit_wait_s,
    )
    server.call(server.versions.add, settings.version, front)
    log.info("listening at %s", server.url)
    while not stop() and front.failure is None:
        time.sleep(_LOOK_S)
    server.stop(settings.drain_s if front.failure is None else 0)
    front.close()
    front.join()
    if front.failure is not None and not isinstance(front.failure, StoppedError):
        raise front.failure


if __name__ == "__main__":
    run_program(main)

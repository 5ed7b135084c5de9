"""What only living workers need in a run: their sockets, keys, endpoints and reports."""

from __future__ import annotations

import contextlib
from pathlib import Path

from dni_runtime.launch.plan import LaunchPlan
from dni_runtime.rundir import RunDir, socket_folder


def prepare_traces(run: RunDir, plan: LaunchPlan) -> None:
    """Make the folder of sockets and the keys, and remove what an earlier attempt left."""
    run.create()
    run.stop_request.unlink(missing_ok=True)
    socket_folder(run.root, Path(plan.sockets))
    if plan.keys:
        from dni_runtime.link import keys  # zmq: only where links may be encrypted

        for worker in plan.workers:
            keys.make(run, worker.module)
    for worker in plan.workers:
        run.endpoint(worker.module).unlink(missing_ok=True)
        run.worker(worker.module).unlink(missing_ok=True)
        run.restart_request(worker.module).unlink(missing_ok=True)


def remove_traces(run: RunDir, sockets: Path) -> None:
    """Remove the sockets and keys."""
    with contextlib.suppress(OSError):
        for entry in sockets.iterdir():
            entry.unlink()
        sockets.rmdir()
    if run.keys.exists():
        from dni_runtime.link import keys  # zmq: only where links may be encrypted

        keys.remove(run)

"""Runtime-only files of a run: sockets, keys, endpoints, reports."""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path, PurePosixPath

from dni_runtime.launch.plan import RUN_TARGET, LaunchPlan
from dni_runtime.rundir import RunDir, socket_folder


def prepare_runtime_files(run: RunDir, plan: LaunchPlan) -> None:
    """Make the folder of sockets and the keys, and remove what an earlier attempt left."""
    run.create()
    with contextlib.suppress(FileNotFoundError):  # the one that ended the start before this
        if run.stop_request.stat().st_mtime_ns <= run.state.stat().st_mtime_ns:
            run.stop_request.unlink()
    socket_folder(run.root, Path(plan.sockets))
    if plan.keys:
        from dni_runtime import keys  # zmq: only where links may be encrypted

        for worker in plan.workers:
            keys.make(run, worker.module)
    _prepare_mounts(run, plan)
    for worker in plan.workers:
        run.endpoint(worker.module).unlink(missing_ok=True)
        run.worker(worker.module).unlink(missing_ok=True)
        run.restart_request(worker.module).unlink(missing_ok=True)


def _prepare_mounts(run: RunDir, plan: LaunchPlan) -> None:
    """Make an empty file or folder for all that containers see of the run directory."""
    mounts = {mount for worker in plan.workers for mount in worker.mounts}
    inside = [m for m in mounts if PurePosixPath(m.target).is_relative_to(RUN_TARGET)]
    if inside:
        run.container.create()
    for mount in inside:
        point = run.container.root / PurePosixPath(mount.target).relative_to(RUN_TARGET)
        point.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if Path(mount.source).is_dir():
            point.mkdir(mode=0o700, exist_ok=True)
        else:
            point.touch(mode=0o600)


def remove_runtime_files(run: RunDir, sockets: Path) -> None:
    """Remove the sockets and keys.

    The folder of sockets lies where others may write: nothing is touched through a link, nor in a
    folder that is not this user's alone.
    """
    with contextlib.suppress(OSError):
        folder = os.open(sockets, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            status = os.fstat(folder)
            if status.st_uid == os.getuid() and not status.st_mode & 0o077:
                for name in os.listdir(folder):
                    if stat.S_ISSOCK(os.lstat(name, dir_fd=folder).st_mode):
                        os.unlink(name, dir_fd=folder)
                sockets.rmdir()
        finally:
            os.close(folder)
    if run.keys.exists():
        from dni_runtime import keys  # zmq: only where links may be encrypted

        keys.remove(run)

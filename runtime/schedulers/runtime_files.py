"""Runtime-only files of a run: sockets, keys, endpoints, reports."""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
from pathlib import Path, PurePosixPath

from dni_runtime.files import closing
from dni_runtime.plan.plan import RUN_TARGET, LaunchPlan
from dni_runtime.run.rundir import RunDir, socket_folder


def prepare_runtime_files(run: RunDir, plan: LaunchPlan) -> None:
    """Create the folder of sockets and the keys; remove files of an earlier attempt."""
    run.create()
    with contextlib.suppress(FileNotFoundError):  # an old request, which stopped that attempt
        if run.stop_request.stat().st_mtime_ns <= run.state.stat().st_mtime_ns:
            run.stop_request.unlink()
    socket_folder(run.root, Path(plan.sockets))
    if plan.keys:
        from dni_runtime.run import keys  # zmq: only if links may be encrypted

        for worker in (*plan.workers, *([plan.front] if plan.front else ())):
            keys.make(run, worker.module)
    _prepare_mounts(run, plan)
    _forget_groups(run)
    for worker in plan.workers:
        run.endpoint(worker.module).unlink(missing_ok=True)
        run.worker(worker.module).unlink(missing_ok=True)
        run.restart_request(worker.module).unlink(missing_ok=True)


def _prepare_mounts(run: RunDir, plan: LaunchPlan) -> None:
    """Create an empty file or folder for each mount of the run directory in containers."""
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


def _forget_groups(run: RunDir) -> None:
    """Remove the files by which replicas have formed process groups."""
    for folder in run.groups:
        shutil.rmtree(folder, ignore_errors=True)


def remove_runtime_files(run: RunDir, sockets: Path) -> None:
    """Remove the sockets, the keys and the files of process groups.

    Others may write to the parent of the socket folder: links are not followed, and a folder that
    is not private to this user is left alone.
    """
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
    with contextlib.suppress(OSError), closing(os.open(sockets, flags)) as folder:
        status = os.fstat(folder)
        if status.st_uid == os.getuid() and not status.st_mode & 0o077:
            for name in os.listdir(folder):
                if stat.S_ISSOCK(os.lstat(name, dir_fd=folder).st_mode):
                    os.unlink(name, dir_fd=folder)
            sockets.rmdir()
    _forget_groups(run)
    if run.keys.exists():
        from dni_runtime.run import keys  # zmq: only if links may be encrypted

        keys.remove(run)

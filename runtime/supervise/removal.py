"""Removal of the caller's own runs: nothing in their folders but what is a run's."""

from __future__ import annotations

import os
import shutil
import socket
import stat
from collections.abc import Sequence
from pathlib import Path

from dni_runtime.errors import UsageError
from dni_runtime.files import closing
from dni_runtime.run.documents.records import JobRecord
from dni_runtime.run.documents.reports import ENDED, Report
from dni_runtime.run.documents.state import RunState, process_birth
from dni_runtime.run.record import Record
from dni_runtime.run.rundir import ENTRIES, socket_path
from dni_runtime.schedulers.runtime_files import remove_runtime_files
from dni_runtime.schedulers.slurm.commands import job_infos
from dni_runtime.supervise.start import take

_LAST = ("owner.json", "leases", "run.json")
"""Removed last: until then the run belongs to this process, and can be removed again."""


def check_removable(record: Record, state: RunState) -> None:
    """Refuse to remove a run of somebody else's, one that is active, or what is more than a run.

    Raises ``UsageError``, or ``UnavailableError`` if Slurm does not say whether its job is over.
    """
    record.check_no_release()
    root, name = record.run.root, record.name
    if not record.is_callers:
        raise UsageError(f"run {str(root)!r} belongs to somebody else: only its owner removes it")
    if root.is_symlink():
        raise UsageError(
            f"{str(root)!r} is a link",
            hint=f"name the run's own directory: {str(root.resolve())!r}",
        )
    if state.active:
        raise UsageError(
            f"run {name!r} is {state.phase}", hint=f"stop it first: dnictl stop {name}"
        )
    for worker in record.modules:  # of a run that has no supervisor, or has lost it
        report = Report.read(record.run.worker(worker))
        here = report.host == socket.gethostname() and report.state not in ENDED
        if here and process_birth(report.pid or 0) == (report.born or -1):
            raise UsageError(
                f"worker {worker!r} of run {name!r} runs: process {report.pid}",
                hint="stop it first",
            )
    job = JobRecord.load(record.run.job)
    if job is not None and job.job is not None and state.phase not in ("finished", "failed"):
        info = job_infos([job.job]).get(job.job)
        if info is not None and (info.alive or info.completing):
            raise UsageError(
                f"job {job.job} of run {name!r} is {info.state}", hint="cancel it first"
            )
    others = sorted(entry for entry in os.listdir(root) if not _of_a_run(entry))
    if others or record.chain_file.parent.resolve() == root.resolve():
        raise UsageError(
            f"{str(root)!r} holds {(others or [record.chain_file.name])[0]!r}, which is no run's",
            hint="move what is yours elsewhere, or remove the folder yourself",
        )


def _of_a_run(entry: str) -> bool:
    """Whether a name is that of a run's file or folder, or a temporary one of such a file."""
    return entry in ENTRIES or any(entry.startswith(f".{name}.") for name in ENTRIES)


def remove_run(record: Record) -> None:
    """Remove the directory of a run that :func:`check_removable` has let pass; follow no links."""
    take(record.run)  # nobody starts it meanwhile
    remove_runtime_files(record.run, socket_path(record.run.root))
    with closing(os.open(record.run.root, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)) as folder:
        for entry in sorted(filter(_of_a_run, os.listdir(folder)), key=_order):
            if stat.S_ISDIR(os.lstat(entry, dir_fd=folder).st_mode):
                shutil.rmtree(entry, dir_fd=folder)
            else:
                os.unlink(entry, dir_fd=folder)
    record.run.root.rmdir()


def _order(entry: str) -> int:
    return _LAST.index(entry) if entry in _LAST else -1


def bytes_in(folders: Sequence[Path]) -> int:
    """Return the sizes of all files in some folders; links count as what they are."""
    return sum(
        os.lstat(os.path.join(parent, name)).st_size
        for folder in folders
        for parent, _, names in os.walk(folder)
        for name in names
    )

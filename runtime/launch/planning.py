"""Plans of the workers of a chain, or of an existing run, on this host."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

from dni_runtime.launch.host import Site, check_host
from dni_runtime.launch.plan import LaunchPlan, LaunchSettings, make_plan
from dni_runtime.launch.prepare import location_in
from dni_runtime.launch.records import Record
from dni_runtime.rundir import socket_path
from dni_runtime.spec import ChainSpec, WorkerSpec


def site_again(record: Record, *, elsewhere: bool = False) -> Site:
    """Check this host for an existing run, with its backend and its images.

    Args:
        record: The run.
        elsewhere: As in :func:`check_host`.

    Raises:
        DniError: As :func:`check_host`.
    """
    chain, workers = record.specs()
    return check_host(
        chain,
        workers,
        wanted="apptainer" if record.backend == "apptainer" else "process",
        images=next((path.parent for path in record.images.values()), Path("images")),
        data=record.data,
        locate=partial(location_in, record.run.chain_file),
        elsewhere=elsewhere,
    )


def plan_here(
    root: Path,
    chain: ChainSpec,
    workers: tuple[WorkerSpec, ...],
    site: Site,
    *,
    data: Path | None,
    attempt: int = 1,
    resume: str = "auto",
    log_level: str = "info",
    supervised: bool = True,
) -> LaunchPlan:
    """Plan a run on this host; writes nothing.

    Args:
        root: The run directory.
        chain: The chain.
        workers: The workers' specs.
        site: Resources of this host.
        data: Folder or file of the data.
        attempt: Number of this start of the run.
        resume: ``auto``, ``none`` or the stream position of a checkpoint.
        log_level: Log level of the workers.
        supervised: Whether a supervisor will start the workers.
    """
    settings = settings_here(
        root, site, data=data, attempt=attempt, resume=resume, log_level=log_level
    )
    return make_plan(chain, workers, replace(settings, supervised=supervised))


def settings_here(
    root: Path,
    site: Site,
    *,
    data: Path | None,
    attempt: int = 1,
    resume: str = "auto",
    log_level: str = "info",
) -> LaunchSettings:
    """Return the settings of workers on this host; see :func:`plan_here`."""
    root = root.absolute()
    return LaunchSettings(
        run=root,
        backend=site.backend,
        sockets=socket_path(root),
        data=data,
        tool=site.tool,
        images=site.images,
        data_folder=data.parent if data is not None and data.is_file() else data,
        mounts=site.mounts,
        attempt=attempt,
        resume=resume,
        python=sys.executable,
        python_path=os.environ.get("PYTHONPATH", ""),
        log_level=log_level,
    )

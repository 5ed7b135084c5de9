"""Plans of the workers of a chain, or of an existing run, on this host."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from dni_runtime.launch.host import Site, check_host
from dni_runtime.launch.plan import LaunchPlan
from dni_runtime.launch.prepare import location_in
from dni_runtime.launch.records import Record
from dni_runtime.launch.schedulers import SCHEDULERS
from dni_runtime.launch.settings import LaunchSettings
from dni_runtime.rundir import socket_path
from dni_runtime.spec import ChainSpec, WorkerSpec
from dni_runtime.spec.data import own_path
from dni_runtime.spec.replicas import workers_of


def plan_again(
    record: Record, *, attempt: int, resume: str = "auto", log_level: str = "info"
) -> LaunchPlan:
    """Plan the next start of an existing run, with its scheduler, its backend and its images.

    ``attempt`` is the number of this start of the run; ``resume`` is ``auto``, ``none`` or the
    stream position of a checkpoint.
    """
    chain, workers = record.specs()
    site = check_host(
        chain,
        workers,
        wanted="apptainer" if record.backend == "apptainer" else "process",
        images=next((path.parent for path in record.images.values()), Path("images")),
        data=record.data,
        locate=partial(location_in, record.run.chain_file),
        elsewhere=SCHEDULERS[record.scheduler].elsewhere,
    )
    return plan_here(
        record.run.root,
        chain,
        workers,
        site,
        data=record.data,
        attempt=attempt,
        resume=resume,
        log_level=log_level,
        scheduler=record.scheduler,
        hosts=record.hosts,
    )


def plan_here(
    root: Path,  # the run directory
    chain: ChainSpec,
    workers: tuple[WorkerSpec, ...],  # of the modules
    site: Site,
    *,
    data: Path | None,  # folder or file
    attempt: int = 1,  # number of this start of the run
    resume: str = "auto",  # ``auto``, ``none`` or the stream position of a checkpoint
    log_level: str = "info",
    supervised: bool = True,  # a supervisor will start the workers
    scheduler: str = "local",  # what starts them (``launch/schedulers.py``)
    hosts: Sequence[str] = (),  # if the user names them
) -> LaunchPlan:
    """Plan a start of a run; writes nothing."""
    root, labels = root.absolute(), chain.data.labels_path
    heads = range(1, workers[0].replicas + 1)
    read = [labels] if data is None else [labels, *(own_path(data, one) for one in heads)]
    settings = LaunchSettings(
        run=root,
        backend=site.backend,
        sockets=socket_path(root),
        data=data,
        tool=site.tool,
        images=site.images,
        labels=labels,
        files=[path for path in read if path is not None and path.is_file()],
        mounts=site.mounts,
        attempt=attempt,
        resume=resume,
        python=sys.executable,
        python_path=os.environ.get("PYTHONPATH", ""),
        log_level=log_level,
        hosts=tuple(hosts),
        supervised=supervised,
    )
    return SCHEDULERS[scheduler].plan(chain, workers_of(workers), settings)

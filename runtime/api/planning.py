"""From a checked chain, or a run, to the plan of a start and the right to execute it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from dni_runtime.plan.create import create_run
from dni_runtime.plan.host import check_host
from dni_runtime.plan.plan import LaunchPlan
from dni_runtime.plan.prepare import CheckedChain, location_in
from dni_runtime.plan.settings import Site, StartRequest, StartSettings
from dni_runtime.release.store import Store
from dni_runtime.run.record import Record
from dni_runtime.run.rundir import RunDir
from dni_runtime.schedulers.schedulers import SCHEDULERS
from dni_runtime.schedulers.slurm.commands import own_job
from dni_runtime.schedulers.ssh import parse_hosts
from dni_runtime.spec.replicas import workers_of

if TYPE_CHECKING:  # it imports what starts workers
    from dni_runtime.supervise.start import Launch


@dataclass(frozen=True)
class PlannedRun:
    """A run that does not exist yet."""

    prepared: CheckedChain
    settings: StartSettings
    site: Site
    plan: LaunchPlan

    def create(self) -> RunDir:
        settings = self.settings
        run = create_run(
            settings.run,
            self.prepared,
            backend=self.site.backend,
            images=self.site.images,
            scheduler=settings.scheduler,
            hosts=settings.hosts,
        )
        if settings.job is not None:
            settings.job.write(run.job)
        trained, images = self.prepared.trained, self.site.images.values()
        used = {image.parent.parent for image in images}
        used |= set() if trained is None else {trained.record.run.root}
        for folder in used:
            if (store := Store.of(folder)) is not None:
                store.note_user(folder, run.root)
        return run

    def check(self) -> None:
        """Raise an error if its hosts cannot be used."""
        SCHEDULERS[self.settings.scheduler].check(self.plan)

    def launch(self) -> Launch:
        """Create it, if its hosts can be used, and become its owner."""
        from dni_runtime.supervise.start import Launch

        self.check()
        return Launch.of(self.create(), self.plan)


def scheduled(settings: StartSettings, prepared: CheckedChain, hosts: str | None) -> StartSettings:
    """Return how a run starts on named hosts, in this process's Slurm allocation, or else here."""
    if hosts is not None:
        return replace(settings, scheduler="ssh", hosts=parse_hosts(hosts))
    if settings.backend == "auto" and own_job() is not None:
        from dni_runtime.schedulers.slurm.allocation import job_here

        job = job_here(settings.run, prepared, settings.log_level)
        return replace(settings, scheduler="slurm", job=job)
    return settings


def site_of(prepared: CheckedChain, settings: StartSettings) -> Site:
    """Check what this host, or a cluster that shares its files, offers a chain."""
    return check_host(
        prepared.written,
        prepared.workers,
        prepared.sources,
        settings,
        prepared.data,
        prepared.locate,
    )


def plan_run(prepared: CheckedChain, settings: StartSettings) -> PlannedRun:
    """Plan the first start of a run; writes nothing."""
    site = site_of(prepared, settings)
    looked = () if prepared.looked is None else prepared.looked.warnings
    site = replace(site, notices=(*(f"warning: {one}" for one in looked), *site.notices))
    request = StartRequest(prepared.chain, prepared.replicas, settings, site, prepared.front)
    return PlannedRun(prepared, settings, site, SCHEDULERS[settings.scheduler].plan(request))


def plan_again(
    record: Record, *, attempt: int, resume: str = "auto", log_level: str = "info"
) -> LaunchPlan:
    """Plan the next start of an existing run, with its scheduler, its backend and its images.

    ``attempt`` is the number of this start of the run; ``resume`` is ``auto``, ``none`` or the
    stream position of a checkpoint.
    """
    chain, workers = record.specs()
    settings = StartSettings(
        record.run.root,
        backend="apptainer" if record.backend == "apptainer" else "process",
        images=next((path.parent for path in record.images.values()), Path("images")),
        scheduler=record.scheduler,
        hosts=record.hosts,
        log_level=log_level,
        attempt=attempt,
        resume=resume,
    )
    locate = partial(location_in, record.run.chain_file)
    sources = record.run.source_files
    site = check_host(chain, workers, sources, settings, record.data, locate)
    request = StartRequest(chain, workers_of(workers), settings, site)
    return SCHEDULERS[record.scheduler].plan(request)

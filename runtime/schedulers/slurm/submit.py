"""From a checked chain to a Slurm job: resources, placement and submission."""

from __future__ import annotations

import json
import shutil
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dni_runtime.errors import UsageError
from dni_runtime.files import write_atomic
from dni_runtime.plan.create import create_run
from dni_runtime.plan.placement import (
    Capacity,
    check_gpus,
    check_links,
    link_kinds,
    needs_of,
    place,
    wanted_placement,
)
from dni_runtime.plan.prepare import CheckedChain
from dni_runtime.plan.settings import Site
from dni_runtime.run.documents.records import JobRecord
from dni_runtime.run.documents.state import RunState
from dni_runtime.run.record import Record
from dni_runtime.run.rundir import RunDir
from dni_runtime.schedulers.slurm import commands
from dni_runtime.schedulers.slurm.commands import NodeShape
from dni_runtime.schedulers.slurm.script import JobRequest, render_script
from dni_runtime.spec.profile import ProfileSpec


def measured_costs(path: Path, modules: Sequence[str]) -> dict[str, float]:
    """Read each module's microseconds per step from output of ``dnictl bench module --json``."""
    try:
        document = json.loads(path.read_bytes())
        costs = {
            module["module"]: float(module["step_us"]["median"]) for module in document["modules"]
        }
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"{str(path)!r} holds no measured costs: {error}",
            hint="create it with 'dnictl bench module CHAIN --json > costs.json'",
        ) from None
    for module in modules:
        if module not in costs:
            raise UsageError(
                f"{str(path)!r} has no costs of module {module!r}",
                hint="measure this chain again: 'dnictl bench module CHAIN --json > costs.json'",
            )
    return {module: costs[module] for module in modules}


def check_room(request: JobRequest, shapes: Sequence[NodeShape]) -> None:
    """Refuse a request that the nodes of no partition can satisfy."""
    asked = {what: request.largest(what) for what in ("cpus", "memory_mib", "gpus")}
    counts = Counter[str]()  # by partition: a job is in one
    for shape in shapes:
        if all(getattr(shape, what) >= count for what, count in asked.items()):
            counts[shape.partition] += shape.count
    fitting = max(counts.values(), default=0)
    if fitting < request.count:
        partition = request.profile.partition or "(default)"
        there = "; ".join(
            f"{s.count} with {s.cpus} CPUs, {s.memory_mib} MiB, {s.gpus} GPUs" for s in shapes
        )
        raise UsageError(
            f"the job needs {request.count} nodes with {asked['cpus']} CPUs, "
            f"{asked['memory_mib']} MiB and {asked['gpus']} GPUs each; partition "
            f"{partition} has {fitting} such nodes ({there or 'none at all'})",
            hint="lower the modules' 'resources', use fewer nodes, or another --partition",
        )


def largest_node(shapes: Sequence[NodeShape]) -> Capacity:
    """Return the maximum of each resource over a partition's nodes."""
    if not shapes:
        return Capacity()
    return Capacity(
        cpus=max(shape.cpus for shape in shapes),
        gpus=max(shape.gpus for shape in shapes),
        memory_mib=max(shape.memory_mib for shape in shapes),
    )


def make_request(
    root: Path,  # the run directory
    prepared: CheckedChain,
    profile: ProfileSpec,
    *,
    python: str,  # the one with dnictl on the nodes
    python_path: str = "",
    nodes: int | None = None,  # None: as in the chain's placement
    costs: Mapping[str, float] | None = None,  # of each module, for ``auto``; None: all equal
    shapes: Sequence[NodeShape] | None = None,  # the partition's nodes; None: unknown
) -> JobRequest:
    """Plan a job: the placement of its modules and its request to Slurm."""
    chain = prepared.chain
    needs = needs_of(chain, prepared.replicas, costs)
    check_gpus(prepared.replicas, needs)
    node = None if shapes is None else largest_node(shapes)
    placed = place(needs, wanted_placement(chain, nodes), node=node)
    check_links(chain, prepared.replicas, placed, profile.interface, prepared.locate)
    request = JobRequest(
        run=root,
        chain=chain.name,
        needs=needs,
        nodes=placed,
        stop_grace_s=chain.stop_grace_s,
        profile=profile,
        python=profile.python or python,
        python_path=python_path,
    )
    if shapes is not None:
        check_room(request, shapes)
    return request


def submit_run(
    request: JobRequest,
    prepared: CheckedChain,
    site: Site,
    job: JobRecord,
    options: Sequence[str] = (),
) -> tuple[Record, str]:
    """Create the run directory and submit its job; return the run's record and the job's id.

    ``job`` is the record of the job, which has no id yet; ``options`` are further ones of sbatch.

    If Slurm refuses the job, a new run directory is removed; if it may have accepted the job
    (``UncertainError``), the directory stays.
    """
    text = render_script(request)
    existed = request.run.exists()
    run = create_run(
        request.run, prepared, backend=site.backend, images=site.images, scheduler="slurm"
    )
    job.write(run.job)
    write_atomic(run.script, text, mode=0o700)
    try:
        number = commands.submit(run.script, options)
    except Exception as error:  # if the user interrupts it, Slurm may have the job
        if not existed and not isinstance(error, commands.UncertainError):
            shutil.rmtree(run.root)
        raise
    job.model_copy(update={"job": number}).write(run.job)
    return Record.read(run.root), number


def job_record(
    request: JobRequest, profile_name: str | None, log_level: str, job: str | None = None
) -> JobRecord:
    """Return the record of a job for its run directory."""
    return JobRecord(
        job=job,
        nodes=request.nodes,
        profile=profile_name,
        settings=request.profile,
        log_level=log_level,
        submitted=time.time(),
    )


def submit_again(run: RunDir, record: JobRecord, log_level: str | None = None) -> str:
    """Resubmit a run's script, to resume from its newest checkpoint; return the job's id.

    ``record`` is of its former job; the workers log as before by default.
    """
    run.stop_request.unlink(missing_ok=True)
    new = {"after": RunState.read(run).last_attempt, "log_level": log_level or record.log_level}
    job = commands.submit(run.script, former=record.job)
    new |= {"job": job, "submitted": time.time()}
    record.model_copy(update=new).write(run.job)
    return job


def placement_rows(request: JobRequest, prepared: CheckedChain) -> list[dict[str, Any]]:
    """Return the node and resources of each module, for display."""
    interface = request.profile.interface
    kinds = link_kinds(prepared.chain, prepared.replicas, interface, request.nodes)
    total = sum(need.cost for need in request.needs)
    return [
        {
            "module": need.module,
            "node": node,
            "input": " on ".join(part for part in kinds.get(need.module, ("data",)) if part),
            "cpus": need.cpus,
            "gpus": need.gpus,
            "memory_mib": need.memory_mib,
            "work": need.cost / total if total else 0.0,
        }
        for need, node in zip(request.needs, request.nodes, strict=True)
    ]

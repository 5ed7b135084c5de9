"""``dnictl sweep``: runs of one chain that differ in settings, from here or as jobs."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from dni_runtime.errors import StoppedError, UsageError, WorkerError
from dnictl import options
from dnictl.show import Column, decimals, print_table, quantity, short_names, state
from dnictl.terminal import answered, tell

if TYPE_CHECKING:
    from dni_runtime.api.run import Run
    from dni_runtime.measure.compare import ComparedMetric
    from dni_runtime.measure.sweep import Outcome, Variant
    from dni_runtime.plan.settings import BackendChoice

_POLL_S, _JOB_POLL_S = 1.0, 10.0


@click.command()
@click.argument("settings", nargs=-1, required=True, metavar="[CHAIN] NAME=VALUES...")
@click.option("--jobs", type=click.IntRange(1), default=1, show_default=True, metavar="N",
              help="Runs at once, unless they are Slurm jobs.")  # fmt: skip
@options.hosts
@click.option("--submit", "by_slurm", is_flag=True, help="Submit each run as a Slurm job instead.")
@click.option("--wait", "wait_for_it", is_flag=True,
              help="Wait for the jobs, and print the table.")  # fmt: skip
@options.profile
@options.of_job
@options.backend
@options.name
@options.runs
@options.images
@options.data
@options.log_level
@options.json
def sweep(
    settings: tuple[str, ...],
    jobs: int,
    hosts: str | None,
    by_slurm: bool,
    wait_for_it: bool,
    profile: str | None,
    backend: BackendChoice,
    name: str | None,
    runs: Path,
    images: Path,
    data: Path | None,
    log_level: str,
) -> None:
    """Train a chain with each combination of some settings.

    VALUES are listed with commas, or a range of numbers. NAME is a setting's path in the chain file
    (defaults.optimizer.Adam.lr) or enough of its words to mean one (lr). All runs are checked
    before the first one starts. Called again with the same --name, it goes on: runs that have
    finished stay, others are resumed.

    \b
    Example:
      dnictl sweep chain.yaml lr=1e-3,3e-3 seed=0..2
      dnictl sweep lr=1e-3,3e-3 seed=0..2 --name rates --submit --time 1:00:00 --wait
    """
    from dni_runtime.api.planning import scheduled
    from dni_runtime.measure.sweep import best_first, compared_metric, read_outcome, read_variants
    from dni_runtime.plan.create import check_place, new_run_id
    from dni_runtime.plan.prepare import prepare
    from dni_runtime.plan.settings import StartSettings
    from dni_runtime.schedulers.schedulers import read_states

    of_jobs = ("wait_for_it", "qos", "partition", "account", "time")
    for flag in options.flags_given(*(("jobs", "hosts") if by_slurm else of_jobs)):
        whose = "runs on this host, or by ssh" if by_slurm else "jobs, which --submit makes"
        raise UsageError(f"{flag} is for {whose}", hint=f"omit {flag}")
    chain, texts = Path("chain.yaml"), settings
    if "=" not in settings[0]:
        chain, texts = Path(settings[0]), settings[1:]
    wrong = [text for text in texts if "=" not in text]
    if wrong or not texts:
        raise UsageError(
            f"{wrong[0]!r} is not NAME=VALUES" if wrong else "no setting is named",
            hint="for example: dnictl sweep chain.yaml lr=1e-3,3e-3 seed=0..2",
        )
    check_place(None, runs, name)
    site_profile = options.chosen_profile(profile)
    prepared = prepare(chain, data=data)
    name = name or new_run_id(prepared.chain.name)
    variants, metric = read_variants(prepared, texts, name), compared_metric(prepared.chain)

    def start(variant: Variant) -> Run:
        from dni_runtime.api.run import Run

        root = (runs / variant.run).absolute()
        start_settings = StartSettings(root, backend, images, log_level=log_level)
        if not by_slurm:
            here = scheduled(start_settings, variant.prepared, hosts)
            options.planned_run(variant.prepared, here).launch().detach()
            return Run.open(root)
        from dni_runtime.schedulers.slurm.submit import job_record, submit_run
        from dnictl.submit import job_request

        request = job_request(
            root, variant.prepared, site_profile, nodes=None, costs=None, strict=True
        )
        job = job_record(request, profile, log_level)
        job_settings = StartSettings(root, backend, images, scheduler="slurm", job=job)
        record, number = submit_run(
            request, variant.prepared, options.site_for(variant.prepared, job_settings), job
        )
        tell(f"{variant.run}: job {number}")
        return Run(record)

    waits = wait_for_it or not by_slurm
    at_once = len(variants) if by_slurm else jobs
    active: dict[str, Run] = {}
    try:
        trained = _train(
            variants, partial(_go_on, runs, start), active, at_once=at_once, waits=waits,
            poll_s=_JOB_POLL_S if by_slurm else _POLL_S,
        )  # fmt: skip
    except KeyboardInterrupt:
        for run in () if by_slurm else active.values():
            tell(f"{run.name}: stopping after a checkpoint")
            run.stop()
        raise StoppedError(
            "the sweep was interrupted" + ("; its jobs go on" if by_slurm else ""),
            hint=f"go on with the same command and --name {name}",
        ) from None
    states = read_states([run.directory for _, run in trained])
    found = [
        read_outcome(variant, run.record, its, metric)
        for (variant, run), its in zip(trained, states, strict=True)
    ]
    outcomes = best_first(found, metric)
    listed = [asdict(outcome) for outcome in outcomes]
    if not answered({"name": name, "metric": metric.name, "runs": listed}):
        if waits:
            _print(outcomes, metric)
        else:
            tell(f"the table, when they have ended: the same command with --name {name} --wait")
    unfinished = [one for one in outcomes if one.state != "finished"]
    if waits and unfinished:
        tell(
            f"{len(unfinished)} of {len(outcomes)} runs have not finished: see 'dnictl events RUN'"
        )
        sys.exit(next((its.exit_code for its in states if its.exit_code), WorkerError.exit_code))


def _go_on(runs: Path, start: Callable[[Variant], Run], variant: Variant) -> Run:
    """Start a variant's run; if it exists, resume it unless it is active or has finished."""
    from dni_runtime.api.run import Run
    from dni_runtime.files import read_json

    root = runs / variant.run
    if not (root / "run.json").exists():
        return start(variant)
    run = Run.open(root)
    kept = run.directory.source_files  # and what Python has compiled of them
    same = all(
        name in kept and kept[name].read_bytes() == file.read_bytes()
        for name, file in variant.prepared.sources.items()
    )
    if not same or read_json(run.directory.chain) != variant.prepared.chain.model_dump(mode="json"):
        raise UsageError(
            f"run {run.name!r} was started from another version of the chain, or of its files",
            hint="give the sweep another --name",
        )
    state = run.state()
    if not state.active and state.phase != "finished":
        run.resume()
    return run


def _train(
    variants: Sequence[Variant],
    start: Callable[[Variant], Run],
    active: dict[str, Run],  # gets those that have not ended
    *,
    at_once: int,
    waits: bool,
    poll_s: float,
) -> list[tuple[Variant, Run]]:
    """Start all runs, so many at a time, and wait until they have ended."""
    from dni_runtime.schedulers.schedulers import read_states

    trained: list[tuple[Variant, Run]] = []
    phases: dict[str, str] = {}
    while len(trained) < len(variants) or (active and waits):
        for variant in variants[len(trained) :][: at_once - len(active)]:
            active[variant.run] = start(variant)
            trained.append((variant, active[variant.run]))
        states = read_states([run.directory for run in active.values()])
        for name, its in zip(list(active), states, strict=True):
            if not its.active:
                del active[name]
                tell(f"{name}: {its.phase} ({len(trained) - len(active)} of {len(variants)})")
            elif phases.get(name) != its.phase:
                tell(f"{name}: {its.phase}")
            phases[name] = its.phase
        if active and waits:
            time.sleep(poll_s)
    return trained


def _print(outcomes: Sequence[Outcome], metric: ComparedMetric) -> None:
    paths = list(outcomes[0].settings)
    columns: list[Column[Outcome]] = [
        Column("run"),
        Column("state", text=state),
        *(
            quantity(path, partial(_setting, path), title=title)
            for path, title in zip(paths, short_names(paths), strict=True)
        ),
        quantity("epoch"),
        quantity("value", text=partial(decimals, 4), title=metric.name),
        quantity(
            "test",
            text=partial(decimals, 4),
            title=f"test {metric.name}" if any(one.test is not None for one in outcomes) else "",
        ),
    ]
    print_table(columns, outcomes)
    if outcomes[0].value is not None:
        tell(f"the best one: dnictl export {outcomes[0].run} -o model.safetensors")


def _setting(path: str, outcome: Outcome) -> object:
    return outcome.settings[path]

"""Commands on runs: ``ps``, ``status``, ``stop``, ``wait``, ``export``."""

from __future__ import annotations

import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dni_runtime.errors import CheckpointError, DamagedError, UsageError
from dnictl.options import (
    chosen_run,
    json_option,
    pause,
    print_json,
    run_argument,
    runs_option,
)

if TYPE_CHECKING:
    from dni_runtime.launch.records import Record
    from dni_runtime.launch.state import RunState

WAIT_TIMEOUT = 124
"""Exit code of a wait that ran out of time, as timeout(1) has it."""


@click.command()
@runs_option
@json_option
def ps(runs: Path, as_json: bool) -> None:
    """List the runs, oldest first.

    \b
    Example:
      dnictl ps --json | jq -r '.[-1].run'
    """
    from dni_runtime.launch.figures import Gauge
    from dni_runtime.launch.records import list_runs
    from dni_runtime.launch.slurm.job import read_states

    rows: list[dict[str, Any]] = []
    records = list_runs(runs)
    states = read_states([record.run for record in records])
    for record, its_state in zip(records, states, strict=True):
        figures = asdict(Gauge(record, evaluations=1).read(its_state))
        hidden = ("modules", "evaluations")
        rows.append({key: value for key, value in figures.items() if key not in hidden})
    if as_json:
        print_json(rows)
        return
    if not rows:
        click.echo(f"no runs in {str(runs)!r}", err=True)
        return
    from dnictl.show import duration, percent, print_table, state

    now = time.time()
    print_table(
        ["run", "state", "epoch", "accuracy", "age", "backend"],
        [
            [
                row["run"],
                state(row["state"]),
                f"{row['epoch'] or 0}/{row['epochs']}",
                percent(row["accuracy"]),
                duration(now - row["created"]),
                row["backend"],
            ]
            for row in rows
        ],
        right={"epoch", "accuracy", "age"},
    )
    for row in rows:
        if row["state"] == "stalled":
            click.echo(f"{row['run']}: {row['error']}", err=True)


@click.command()
@run_argument
@runs_option
@json_option
def status(run: str | None, runs: Path, as_json: bool) -> None:
    """Show a run: its state, and the figures of each module.

    \b
    Example:
      dnictl status
      watch dnictl status
    """
    from dni_runtime.launch.figures import Gauge

    record = chosen_run(run, runs)
    figures = (Gauge(record) if as_json else Gauge(record, evaluations=1)).read()
    if as_json:
        print_json(asdict(figures))
        return
    from rich.console import Console

    from dnictl.show import chain_line, modules_table, state

    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=160)
    where = "" if figures.job is None else f"  job {figures.job}"
    console.print(
        f"[bold]{figures.run}[/]  {figures.backend}{where}  {figures.path}", soft_wrap=True
    )
    console.print(state(figures.state), end=" ")
    console.print(chain_line(figures), soft_wrap=True)
    if figures.error:
        console.print(figures.error, style="red", markup=False, soft_wrap=True)
    console.print(modules_table(figures))
    for module in figures.modules:
        if module.diverged:
            found = module.diverged
            click.echo(
                f"{module.module}: {found['what']} is not finite at batch {found['batch']} "
                f"({found['times']} times by then)",
                err=True,
            )
        if module.warning:
            click.echo(f"{module.module}: {module.warning}", err=True)
    if figures.state == "unsupervised":
        click.echo(
            "its supervisor is gone, its workers go on; 'dnictl stop' ends them, 'dnictl resume' "
            "supervises the run again",
            err=True,
        )
    if figures.state == "lost":
        click.echo(f"its supervisor is gone; go on with 'dnictl resume {figures.run}'", err=True)


@click.command()
@run_argument
@runs_option
@click.option(
    "--timeout", type=click.FloatRange(min=0), metavar="SECONDS",
    help="How long workers may take for their checkpoint (default: the chain's stop_grace_s).",
)  # fmt: skip
@json_option
def stop(run: str | None, runs: Path, timeout: float | None, as_json: bool) -> None:
    """Stop a run after a checkpoint.

    Workers that take too long are killed.

    \b
    Example:
      dnictl stop && dnictl resume
    """
    from dni_runtime.launch.slurm.commands import cancel
    from dni_runtime.launch.slurm.job import JobRecord, read_state
    from dni_runtime.launch.start import end_leftovers
    from dni_runtime.rundir import read_json, write_json

    record = chosen_run(run, runs)
    job = JobRecord.read(record.run)
    state = read_state(record.run)
    plan = read_json(record.run.plan) or {}
    grace_s = timeout if timeout is not None else float(plan.get("stop_grace_s", 30.0))
    if state.phase == "unsupervised" and job is None:
        state = end_leftovers(record.run, state, grace_s + 15.0)
    elif state.active:
        write_json(record.run.stop_request, {"time": time.time(), "timeout_s": timeout})
        if state.phase == "queued" and job is not None and job.job is not None:
            cancel(job.job)  # nobody is there to read the request
        # The supervisor looks a few times a second, and kills late workers itself.
        until = time.monotonic() + grace_s + 30.0
        state = follow(record, until)
        if state.active:
            raise UsageError(
                f"run {record.name!r} is still {state.phase}; its supervisor, process {state.pid} "
                f"on {state.host}, does not answer",
                hint=f"end its job: scancel {job.job}"
                if job is not None
                else f"kill it there: kill -9 {state.pid}; then stop its workers with the same "
                f"command: dnictl stop {record.name}",
            )
    if as_json:
        print_json({"run": record.name, "state": state.phase, "exit_code": state.exit_code})
    else:
        click.echo(f"{record.name}: {state.phase}")


@click.command()
@run_argument
@runs_option
@click.option(
    "--timeout", type=click.FloatRange(min=0), metavar="SECONDS",
    help=f"Give up after so long (exit code {WAIT_TIMEOUT}).",
)  # fmt: skip
@json_option
def wait(run: str | None, runs: Path, timeout: float | None, as_json: bool) -> None:
    """Wait until a run has ended; the exit code is the run's own.

    \b
    Example:
      dnictl up chain.yaml -d && dnictl wait
    """
    from dnictl.ending import conclude

    record = chosen_run(run, runs)
    state = follow(record, None if timeout is None else time.monotonic() + timeout)
    if state.phase == "new":
        raise UsageError(
            f"nobody looks after {record.name!r}: its workers are started by hand",
            hint="'dnictl status' tells what they do",
        )
    if state.active:
        click.echo(f"dnictl: {record.name} is still {state.phase}", err=True)
        sys.exit(WAIT_TIMEOUT)
    conclude(record, as_json=as_json)


def follow(record: Record, until: float | None) -> RunState:
    """Wait until a run has ended, or a time of ``time.monotonic()`` has come; gives its state."""
    from dni_runtime.launch.slurm.job import read_state

    while True:
        state = read_state(record.run)
        if not state.active or (until is not None and time.monotonic() >= until):
            return state
        pause(state)


@click.command()
@run_argument
@runs_option
@click.option(
    "-o", "--output", type=click.Path(path_type=Path, dir_okay=False), required=True,
    help="The file: .safetensors (weights and layers) or .pt2 (a torch.export program).",
)  # fmt: skip
@click.option(
    "--from", "wanted", metavar="CUT",
    help="Which checkpoint: its number, newest or best (default: the best where the chain selects "
    "one, else the newest).",
)  # fmt: skip
@click.option(
    "--force", is_flag=True,
    help="Replace the file where it exists; write weights that are not finite, too.",
)  # fmt: skip
@json_option
def export(
    run: str | None, runs: Path, output: Path, wanted: str | None, force: bool, as_json: bool
) -> None:
    """Write the trained network to one file.

    It is one plain torch model. Python gets it back with dni_runtime.load(FILE).

    \b
    Example:
      dnictl export -o model.safetensors
    """
    from dni_runtime.cuts import newest_cut, verify, written_cuts
    from dni_runtime.rundir import read_json

    record = chosen_run(run, runs)
    if output.exists() and not force:
        raise UsageError(f"{str(output)!r} exists already", hint="--force replaces it")
    cuts = written_cuts(record.run, record.modules)
    try:
        newest, damaged = newest_cut(record.run, record.modules)
    except DamagedError:
        if not force:
            raise
        newest, damaged = cuts[-1], []
    if not cuts:
        raise CheckpointError(
            f"run {record.name!r} has no complete checkpoint yet",
            hint="checkpoints are written at the end of an epoch, and by 'dnictl stop'",
        )
    best = read_json(record.run.best) or {}
    named = {"newest": newest, "best": best.get("cut"), None: best.get("cut", newest)}
    cut = named.get(wanted, wanted)
    if str(cut) not in map(str, cuts):
        what = (
            "best checkpoint: the chain has no 'selection'" if cut is None else f"checkpoint {cut}"
        )
        raise UsageError(f"no complete {what}; there are: {', '.join(map(str, cuts))}")
    cut = int(str(cut))
    for problem in damaged if cut == newest else ():
        click.secho(f"warning: {problem}; checkpoint {cut} is taken", err=True, fg="yellow")
    try:
        verify(record.run, cut, record.modules)
    except DamagedError as error:
        others = ", ".join(str(one) for one in cuts if one != cut)
        hint = f"take another one with --from: {others}" if others else None
        raise DamagedError(error.message, hint=hint) from None
    from dni_runtime.core.export import export_model
    from dni_runtime.launch.prepare import importing_from

    with importing_from(record.run.sources):
        export_model(
            record.specs()[1],
            {
                module: record.run.checkpoint(cut, module).with_suffix(".safetensors")
                for module in record.modules
            },
            output,
            force=force,
        )
    if as_json:
        print_json(
            {"run": record.name, "checkpoint": cut, "file": str(output),
             "bytes": output.stat().st_size}
        )  # fmt: skip
    else:
        click.echo(f"wrote {output} (checkpoint {cut} of {record.name})")

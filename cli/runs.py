"""Commands on runs: ``ps``, ``status``, ``stop``, ``wait``, ``export``."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import click

from dni_runtime.errors import UsageError, WorkerError
from dnictl.options import (
    chosen_run,
    json_option,
    print_json,
    run_argument,
    runs_option,
    tell,
    trust_option,
)

WAIT_TIMEOUT = 124
"""Exit code of a wait that ran out of time, as in timeout(1)."""


@click.command()
@runs_option
@json_option
def ps(runs: Path, as_json: bool) -> None:
    """List the runs, oldest first.

    \b
    Example:
      dnictl ps --json | jq -r '.[-1].run'
    """
    from dni_runtime.launch.figures import MetricsReader
    from dni_runtime.launch.run import runs_in

    rows: list[dict[str, Any]] = []
    for its, its_state in runs_in(runs):
        figures = MetricsReader(its.record, evaluations=1).read(its_state)
        rows.append(figures.model_dump(exclude={"modules", "evaluations"}))
    if as_json:
        print_json(rows)
        return
    if not rows:
        click.echo(f"no runs in {str(runs)!r}", err=True)
        return
    from dnictl.show import duration, percent, print_table, printable, state

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
            click.echo(printable(f"{row['run']}: {row['error']}"), err=True)


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
    from dni_runtime.launch.figures import MetricsReader

    record = chosen_run(run, runs).record
    figures = (MetricsReader(record) if as_json else MetricsReader(record, evaluations=1)).read()
    if as_json:
        print_json(figures.model_dump())
        return
    from rich.console import Console
    from rich.text import Text

    from dnictl.show import chain_line, modules_table, printable, state

    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=160)
    where = "" if figures.job is None else f"  job {figures.job}"
    console.print(
        Text.assemble(
            (printable(figures.run), "bold"),
            printable(f"  {figures.backend}{where}  {figures.path}"),
        ),
        soft_wrap=True,
    )
    console.print(state(figures.state), end=" ")
    console.print(chain_line(figures), soft_wrap=True)
    if figures.error:
        console.print(Text(printable(figures.error), style="red"), soft_wrap=True)
    console.print(modules_table(figures))
    for module in figures.modules:
        if module.diverged:
            found = module.diverged
            click.echo(
                f"{module.module}: {printable(found.what)} is not finite at batch {found.batch} "
                f"({found.times} times so far)",
                err=True,
            )
        if module.warning:
            click.echo(f"{module.module}: {printable(module.warning)}", err=True)
    if figures.state == "unsupervised":
        click.echo(
            "its supervisor is gone, its workers keep running; 'dnictl stop' stops them, "
            "'dnictl resume' restarts the run with a supervisor",
            err=True,
        )
    if figures.state == "lost":
        click.echo(f"its supervisor is gone; continue with 'dnictl resume {figures.run}'", err=True)


@click.command()
@run_argument
@runs_option
@click.option(
    "--timeout", type=click.FloatRange(min=0), metavar="SECONDS",
    help="Time limit for the workers' checkpoint (default: the chain's stop_grace_s).",
)  # fmt: skip
@trust_option
@json_option
def stop(run: str | None, runs: Path, timeout: float | None, as_json: bool) -> None:
    """Stop a run after a checkpoint.

    Workers that take too long are killed.

    \b
    Example:
      dnictl stop && dnictl resume
    """
    its = chosen_run(run, runs)
    state = its.stop(timeout)
    if as_json:
        print_json({"run": its.name, "state": state.phase, "exit_code": state.exit_code})
    else:
        click.echo(f"{its.name}: {state.phase}")
    if state.phase == "lost":
        raise WorkerError(
            f"not every module of run {its.name!r} has written its last checkpoint",
            hint=f"make room if a disk is full, then 'dnictl resume {its.name}' goes on from the "
            "newest complete one",
        )


@click.command()
@run_argument
@runs_option
@click.option(
    "--timeout", type=click.FloatRange(min=0), metavar="SECONDS",
    help=f"Stop waiting after this time (exit code {WAIT_TIMEOUT}).",
)  # fmt: skip
@json_option
def wait(run: str | None, runs: Path, timeout: float | None, as_json: bool) -> None:
    """Wait until a run has ended; the exit code is the run's own.

    \b
    Example:
      dnictl up chain.yaml -d && dnictl wait
    """
    from dnictl.ending import conclude

    its = chosen_run(run, runs)
    state = its.wait(timeout)
    if state.active:
        tell(f"dnictl: {its.name} is still {state.phase}")
        sys.exit(WAIT_TIMEOUT)
    conclude(its, state, as_json=as_json)


@click.command()
@run_argument
@runs_option
@click.option(
    "-o", "--output", type=click.Path(path_type=Path, dir_okay=False), required=True,
    help="The file: .safetensors (weights and layers), .pt2 (a torch.export program) or .onnx.",
)  # fmt: skip
@click.option(
    "--state-dict", is_flag=True,
    help="Weights alone, under the names that 'init' maps: a network that 'dnictl split' took "
    "apart loads them (.safetensors or .pt).",
)  # fmt: skip
@click.option(
    "--from", "wanted", metavar="CUT",
    help="Which checkpoint: its number, newest or best (default: the best if the chain selects "
    "one, else the newest).",
)  # fmt: skip
@click.option(
    "--force", is_flag=True,
    help="Replace an existing file; also write weights that are not finite.",
)  # fmt: skip
@trust_option
@json_option
def export(
    run: str | None,
    runs: Path,
    output: Path,
    state_dict: bool,
    wanted: str | None,
    force: bool,
    as_json: bool,
) -> None:
    """Write the trained network to one file.

    The file holds one plain torch model; dni_runtime.load(FILE) loads it.

    \b
    Example:
      dnictl export -o model.safetensors
    """
    its = chosen_run(run, runs)
    if output.exists() and not force:
        raise UsageError(f"{str(output)!r} already exists", hint="--force replaces it")
    cut, damaged = its.choose_cut(wanted, force=force)
    for problem in damaged:
        click.secho(f"warning: {problem}; using checkpoint {cut}", err=True, fg="yellow")
    its.export(output, cut, force=force, state_dict=state_dict)
    if as_json:
        print_json(
            {"run": its.name, "checkpoint": cut, "file": str(output),
             "bytes": output.stat().st_size}
        )  # fmt: skip
    else:
        click.echo(f"wrote {output} (checkpoint {cut} of {its.name})")

"""Commands on runs, their supervision, and how they end."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from dni_runtime.errors import StoppedError, UsageError, WorkerError
from dnictl.options import (
    chosen_run,
    json_option,
    print_json,
    run_argument,
    runs_option,
    tell,
    trust_option,
)
from dnictl.show import (
    Column,
    answer,
    chain_line,
    console,
    duration,
    modules_table,
    percent,
    print_table,
    printable,
    quantity,
    short_names,
    state,
)

if TYPE_CHECKING:
    from dni_runtime.api.run import Run
    from dni_runtime.measure.figures import RunFigures
    from dni_runtime.run.documents.state import RunState
    from dni_runtime.supervise.start import Launch

_MOST_SETTINGS = 8  # columns of a table

WAIT_TIMEOUT = 124
"""Exit code of a wait that ran out of time, as in timeout(1)."""


@click.command()
@runs_option
@click.option("--settings", "with_settings", is_flag=True,
              help="Show settings that are not the same in all runs of a chain.")  # fmt: skip
@json_option
def ps(runs: Path, with_settings: bool, as_json: bool) -> None:
    """List the runs, oldest first.

    \b
    Example:
      dnictl ps --settings
      dnictl ps --json | jq -r '.[-1].run'
    """
    from dni_runtime.api.run import runs_in
    from dni_runtime.measure.figures import MetricsReader

    listed = runs_in(runs)
    rows = [MetricsReader(run.record, evaluations=1).read(its) for run, its in listed]
    settings = _settings([run for run, _ in listed]) if with_settings else {}
    if as_json:
        print_json([
            row.model_dump(exclude={"modules", "evaluations"})
            | ({"settings": settings[row.path]} if with_settings else {})
            for row in rows
        ])  # fmt: skip
        return
    if not rows:
        tell(f"no runs in {str(runs)!r}")
        return
    now = time.time()
    columns: list[Column[RunFigures]] = [
        Column("run"),
        Column("state", text=state),
        *_setting_columns(settings),
        quantity("epoch", lambda row: f"{row.epoch or 0}/{row.epochs}"),
        quantity("accuracy", text=percent),
        quantity("age", lambda row: now - row.created, duration),
        Column("backend"),
    ]
    print_table(columns, rows)
    for row in rows:
        if row.state == "stalled":
            tell(printable(f"{row.run}: {row.error}"))


def _settings(runs: Sequence[Run]) -> dict[str, dict[str, Any]]:
    """Return the settings in which runs of one chain differ, by their directories."""
    from dni_runtime.files import peek_json
    from dni_runtime.spec.settings import differing

    found = {}
    for chain in {run.record.chain for run in runs}:
        alike = [run for run in runs if run.record.chain == chain]
        documents = [peek_json(run.directory.chain) for run in alike]
        for run, settings in zip(alike, differing(documents), strict=True):
            found[str(run.directory.root)] = settings
    return found


def _setting_columns(settings: Mapping[str, Mapping[str, Any]]) -> list[Column[RunFigures]]:
    paths = list(dict.fromkeys(path for one in settings.values() for path in one))
    if len(paths) > _MOST_SETTINGS:
        tell(f"{len(paths) - _MOST_SETTINGS} more settings differ: see --json")
    return [
        quantity(path, partial(_setting, settings, path), title=title)
        for path, title in zip(paths, short_names(paths), strict=True)
    ][:_MOST_SETTINGS]


def _setting(settings: Mapping[str, Mapping[str, Any]], path: str, row: RunFigures) -> Any:
    return settings[row.path].get(path)


@click.command()
@run_argument
@runs_option
@click.option("--prometheus", is_flag=True, help="Print the figures in Prometheus' text format.")
@json_option
def status(run: str | None, runs: Path, prometheus: bool, as_json: bool) -> None:
    """Show a run: its state, and the figures of each module.

    \b
    Example:
      dnictl status
      watch dnictl status
    """
    from dni_runtime.measure.figures import MetricsReader, prometheus_page

    record = chosen_run(run, runs).record
    figures = (MetricsReader(record) if as_json else MetricsReader(record, evaluations=1)).read()
    if as_json:
        print_json(figures.model_dump())
        return
    if prometheus:
        click.echo(prometheus_page(figures), nl=False)
        return
    from rich.text import Text

    to = console()
    where = "" if figures.job is None else f"  job {figures.job}"
    path = printable(f"  {figures.backend}{where}  {figures.path}")
    to.print(Text.assemble((printable(figures.run), "bold"), path), soft_wrap=True)
    to.print(state(figures.state), end=" ")
    to.print(chain_line(figures), soft_wrap=True)
    if figures.error:
        to.print(Text(printable(figures.error), style="red"), soft_wrap=True)
    to.print(modules_table(figures))
    for module in figures.modules:
        if module.diverged:
            what, batch, times = module.diverged.what, module.diverged.batch, module.diverged.times
            tell(
                f"{module.module}: {printable(what)} is not finite at batch {batch} "
                f"({times} times so far)"
            )
        if module.warning:
            tell(f"{module.module}: {printable(module.warning)}")
    if old := {module.module: module.age_s for module in figures.modules if module.age_s}:
        tell(
            f"{', '.join(old)}: these figures are {duration(max(old.values()))} old; newer ones "
            "cannot be written (is the disk full?), or the worker does not respond"
        )
    if figures.state == "unsupervised":
        tell(
            "its supervisor is gone, its workers keep running; 'dnictl stop' stops them, "
            "'dnictl resume' restarts the run with a supervisor"
        )
    if figures.state == "lost":
        tell(f"its supervisor is gone; continue with 'dnictl resume {figures.run}'")


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
    end = its.stop(timeout)
    document = {"run": its.name, "state": end.phase, "exit_code": end.exit_code}
    answer(document, f"{its.name}: {end.phase}", as_json=as_json)
    if end.phase == "lost":
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
    its = chosen_run(run, runs)
    end = its.wait(timeout)
    if end.active:
        tell(f"dnictl: {its.name} is still {end.phase}")
        sys.exit(WAIT_TIMEOUT)
    conclude(its, end, as_json=as_json)


@click.command()
@click.argument("module")
@run_argument
@runs_option
@trust_option
@json_option
def restart(module: str, run: str | None, runs: Path, as_json: bool) -> None:
    """Restart one module of a run.

    It stops after a checkpoint and resumes from there. The other modules keep training.

    \b
    Example:
      dnictl restart lower
    """
    its = chosen_run(run, runs)
    its.restart(module)
    line = f"{its.name}: {module} restarts after a checkpoint"
    answer({"run": its.name, "module": module}, line, as_json=as_json)


@click.command()
@click.argument("changes", nargs=-1, required=True, metavar="MODULE=N...|auto [RUN]")
@runs_option
@trust_option
@json_option
def scale(changes: tuple[str, ...], runs: Path, as_json: bool) -> None:
    """Change how many replicas a module of an active run has.

    For modules with 'replicas: {start: .., most: ..}'. All modules stop at a common checkpoint and
    start from it with the new numbers.

    'auto': as many as balance the chain, by how long a batch takes where the workers run.

    \b
    Examples:
      dnictl scale middle=3
      dnictl scale middle=1 upper=2 digits-20250101-120000
      dnictl scale auto
    """
    auto = changes[0] == "auto"
    pairs = [change.partition("=") for change in changes if "=" in change]
    names = [change for change in changes[auto:] if "=" not in change]
    wrong = [f"{name}={count}" for name, _, count in pairs if not (name and count.isdecimal())]
    if wrong or bool(pairs) == auto or len(names) > 1:
        raise UsageError(
            f"{wrong[0]!r} is not MODULE=N"
            if wrong
            else f"{' '.join(changes)!r}: give MODULE=N or 'auto', and at most one run",
            hint="for example: dnictl scale middle=3, or: dnictl scale auto",
        )
    its = chosen_run(names[0] if names else None, runs)
    counts = {name: int(count) for name, _, count in pairs}
    replicas = its.scale(its.balancing_replicas() if auto else counts, balanced=auto)
    listed = ", ".join(f"{name}: {count}" for name, count in replicas.items())
    line = f"{its.name}: replicas wanted: {listed}"
    answer({"run": its.name, "replicas": replicas}, line, as_json=as_json)


@click.command()
@run_argument
@runs_option
@click.option(
    "-o", "--output", type=click.Path(path_type=Path, dir_okay=False), required=True,
    help="The file: .safetensors (weights and layers), .pt2 (a torch.export program) or .onnx.",
)  # fmt: skip
@click.option(
    "--state-dict", is_flag=True,
    help="Weights alone, under the names of the network that 'dnictl split' took apart, else "
    "MODULE.0.weight (.safetensors or .pt).",
)  # fmt: skip
@click.option(
    "--from", "choice", metavar="CUT",
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
    choice: str | None,
    force: bool,
    as_json: bool,
) -> None:
    """Write the trained network to one file.

    The file holds one plain torch model; dni_runtime.load(FILE) loads it.

    \b
    Example:
      dnictl export -o model.safetensors
    """
    from dni_runtime.api.checkpointed import check_ending

    if output.exists() and not force:
        raise UsageError(f"{str(output)!r} already exists", hint="--force replaces it")
    check_ending(output, state_dict=state_dict)
    its = chosen_run(run, runs)
    cut, damaged = its.choose_cut(choice, force=force)
    for problem in damaged:
        click.secho(f"warning: {problem}; using checkpoint {cut}", err=True, fg="yellow")
    its.export(output, cut, force=force, state_dict=state_dict)
    document = {"run": its.name, "checkpoint": cut, "file": str(output)}
    document["bytes"] = output.stat().st_size
    line = f"wrote {output} (checkpoint {cut} of {its.name})"
    answer(document, line, as_json=as_json)


@click.command(hidden=True)
@click.argument("path", metavar="RUN", type=click.Path(path_type=Path))
@trust_option
def supervise(path: Path) -> None:
    """Start and supervise the plan in a run directory, for --detach and batch scripts.

    Workers that still run without a supervisor are taken over.
    """
    run = chosen_run(str(path), path)
    launch = run.take_over()
    if launch is None:
        conclude(run, run.state(), as_json=False)
    else:
        go(launch)


def go(launch: Launch, *, detached: bool = False, as_json: bool = False) -> None:
    """Start a run in the background, or supervise it to its end and exit with its code."""
    from dni_runtime.api.run import Run
    from dnictl.progress import progress

    run = Run.open(launch.run.root)
    if not detached:
        with progress(run, quiet=as_json) as show:
            state = launch.supervise(show)
        conclude(run, state, as_json=as_json)
    pid = launch.detach()
    if as_json:
        print_json({"run": run.name, "path": str(run.directory.root), "pid": pid})
    else:
        click.echo(run.name)
        tell(
            f"in the background; see 'dnictl status {run.name}', 'dnictl logs -f {run.name}', "
            f"'dnictl wait {run.name}'"
        )


def conclude(run: Run, state: RunState, *, as_json: bool) -> NoReturn:
    """Print how a run ended, and exit with the run's exit code.

    ``state`` is its end as the caller has seen it: files may not have had room for it.
    """
    figures = run.status(state)
    with contextlib.suppress(OSError):  # the reader is gone, or the log's disk is full
        if as_json:
            print_json(figures.model_dump())
        else:
            click.echo(summary(figures))
        if state.phase == "stopped":
            tell(f"  → dnictl resume {run.name}")
    error = run.failure(state)
    if error is not None:
        raise error
    sys.exit(0 if state.phase == "finished" else state.exit_code or StoppedError.exit_code)


def summary(figures: RunFigures) -> str:
    """Return one line on a run that has ended."""
    took = ""
    if figures.started is not None:
        took = f" after {duration((figures.ended or time.time()) - figures.started)}"
    return f"{figures.run}: {figures.state}{took}, {chain_line(figures)}"

"""Commands on runs, their supervision, and how they end."""

from __future__ import annotations

import contextlib
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import click

from dni_runtime.errors import StoppedError, UsageError, WorkerError
from dnictl import options
from dnictl.show import chain_line, duration
from dnictl.terminal import answer, answered, json_wanted, tell

if TYPE_CHECKING:
    from dni_runtime.api.run import Run
    from dni_runtime.measure.figures import RunFigures
    from dni_runtime.run.documents.state import RunState
    from dni_runtime.supervise.start import Launch

WAIT_TIMEOUT = 124
"""Exit code of a wait that ran out of time, as in timeout(1)."""


@click.command()
@options.of_run
@click.option(
    "--timeout", type=click.FloatRange(min=0), metavar="SECONDS",
    help="Time limit for the workers' checkpoint (default: the chain's stop_grace_s).",
)  # fmt: skip
@options.trust
@options.json
def stop(run: Run, timeout: float | None) -> None:
    """Stop a run after a checkpoint.

    Workers that take too long are killed.

    \b
    Example:
      dnictl stop && dnictl resume
    """
    end = run.stop(timeout)
    document = {"run": run.name, "state": end.phase, "exit_code": end.exit_code}
    answer(document, f"{run.name}: {end.phase}")
    if end.phase == "lost":
        raise WorkerError(
            f"not every module of run {run.name!r} has written its last checkpoint",
            hint=f"make room if a disk is full, then 'dnictl resume {run.name}' goes on from the "
            "newest complete one",
        )


@click.command()
@options.of_run
@click.option(
    "--timeout", type=click.FloatRange(min=0), metavar="SECONDS",
    help=f"Stop waiting after this time (exit code {WAIT_TIMEOUT}).",
)  # fmt: skip
@options.json
def wait(run: Run, timeout: float | None) -> None:
    """Wait until a run has ended; the exit code is the run's own.

    \b
    Example:
      dnictl up chain.yaml -d && dnictl wait
    """
    end = run.wait(timeout)
    if end.active:
        answered(run.status(end).model_dump())
        tell(f"dnictl: {run.name} is still {end.phase}")
        sys.exit(WAIT_TIMEOUT)
    conclude(run, end)


@click.command()
@click.argument("module")
@options.of_run
@options.trust
@options.json
def restart(module: str, run: Run) -> None:
    """Restart one module of a run.

    It stops after a checkpoint and resumes from there. The other modules keep training.

    \b
    Example:
      dnictl restart lower
    """
    run.restart(module)
    answer({"run": run.name, "module": module}, f"{run.name}: {module} restarts after a checkpoint")


@click.command()
@click.argument("changes", nargs=-1, required=True, metavar="MODULE=N...|auto [RUN]")
@options.runs
@options.trust
@options.json
def scale(changes: tuple[str, ...], runs: Path) -> None:
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
    counts = options.counts_of([change for change in changes if "=" in change])
    names = [change for change in changes[auto:] if "=" not in change]
    if bool(counts) == auto or len(names) > 1:
        raise UsageError(
            f"{' '.join(changes)!r}: give MODULE=N or 'auto', and at most one run",
            hint="for example: dnictl scale middle=3, or: dnictl scale auto",
        )
    its = options.chosen_run(names[0] if names else None, runs)
    replicas = its.scale(its.balancing_replicas() if auto else counts, balanced=auto)
    listed = ", ".join(f"{name}: {count}" for name, count in replicas.items())
    answer({"run": its.name, "replicas": replicas}, f"{its.name}: replicas wanted: {listed}")


@click.command()
@options.of_run
@click.option(
    "-o", "--output", type=options.OutputFile(or_folder=True), required=True,
    help="The file: .safetensors (weights and layers), .pt2 (a torch.export program) or .onnx.",
)  # fmt: skip
@click.option("--folder", is_flag=True,
              help="Write a folder with the files of a Hugging Face repository.")  # fmt: skip
@click.option(
    "--state-dict", is_flag=True,
    help="Weights alone, under the names of the network that 'dnictl split' took apart, else "
    "MODULE.0.weight (.safetensors or .pt).",
)  # fmt: skip
@options.cut
@click.option(
    "--force", is_flag=True,
    help="Replace an existing file; also write weights that are not finite.",
)  # fmt: skip
@options.trust
@options.json
def export(
    run: Run, output: Path, folder: bool, state_dict: bool, cut: str | None, force: bool
) -> None:
    """Write the trained network to one file.

    The file holds one plain torch model; dni_runtime.load(FILE) loads it.

    \b
    Example:
      dnictl export -o model.safetensors
    """
    from dni_runtime.api.checkpointed import check_ending

    if folder and (state_dict or force):
        raise UsageError("--folder excludes --state-dict and --force")
    if not folder:
        options.check_new(output, force)
        check_ending(output, state_dict=state_dict)
    chosen = run.choose_cut(cut, force=force)
    if folder:
        run.export_folder(output, chosen)
    else:
        run.export(output, chosen, force=force, state_dict=state_dict)
    document = {"run": run.name, "checkpoint": chosen, "file": str(output)}
    document["bytes"] = (output / "model.safetensors" if folder else output).stat().st_size
    answer(document, f"wrote {output} (checkpoint {chosen} of {run.name})")


@click.command(hidden=True)
@click.argument("path", metavar="RUN", type=options.PATH)
@options.trust
def supervise(path: Path) -> None:
    """Start and supervise the plan in a run directory, for --detach and batch scripts.

    Workers that still run without a supervisor are taken over.
    """
    run = options.chosen_run(str(path), path)
    launch = run.take_over()
    if launch is None:
        conclude(run, run.state())
    else:
        go(launch)


def go(launch: Launch, *, detached: bool = False) -> None:
    """Start a run in the background, or supervise it to its end and exit with its code."""
    from dni_runtime.api.run import Run
    from dnictl.progress import progress

    run = Run.open(launch.run.root)
    if not detached:
        with progress(run, quiet=json_wanted()) as show:
            state = launch.supervise(show)
        conclude(run, state)
    pid = launch.detach()
    if not answered({"run": run.name, "path": str(run.directory.root), "pid": pid}):
        click.echo(run.name)
        tell(
            f"in the background; see 'dnictl status {run.name}', 'dnictl logs -f {run.name}', "
            f"'dnictl wait {run.name}'"
        )


def conclude(run: Run, state: RunState, *, beside: bool = False) -> NoReturn:
    """Print how a run ended, and exit with the run's exit code.

    ``state`` is its end as the caller has seen it: files may not have had room for it. ``beside``:
    what the command prints, it has printed.
    """
    figures = run.status(state)
    with contextlib.suppress(OSError):  # the reader is gone, or the log's disk is full
        if beside:
            tell(summary(figures))
        else:
            answer(figures.model_dump(), summary(figures))
        if state.phase == "stopped":
            tell(f"  → dnictl resume {run.name}")
    if (error := run.failure(state)) is not None:
        raise error
    sys.exit(0 if state.phase == "finished" else state.exit_code or StoppedError.exit_code)


def summary(figures: RunFigures) -> str:
    """Return one line on a run that has ended."""
    took = ""
    if figures.started is not None:
        took = f" after {duration((figures.ended or time.time()) - figures.started)}"
    return f"{figures.run}: {figures.state}{took}, {chain_line(figures)}"

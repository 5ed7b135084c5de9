"""Arguments and options that several commands share."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from dni_runtime.errors import UsageError

if TYPE_CHECKING:
    from dni_runtime.launch.records import Record
    from dni_runtime.launch.state import RunState


Wanted = Literal["auto", "process", "apptainer"]
"""Backends that may be asked for."""

_POLL_S = 0.3
_QUEUE_POLL_S = 5.0


def complete_runs(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    """Names of runs that begin so, for the shell."""
    folder = Path(context.params.get("runs") or "runs")
    if not folder.is_dir():
        return []
    names = (entry.name for entry in folder.iterdir() if (entry / "run.json").is_file())
    return sorted(name for name in names if name.startswith(incomplete))


def complete_profiles(
    context: click.Context, parameter: click.Parameter, incomplete: str
) -> list[str]:
    """Names of site profiles that begin so, for the shell."""
    from dni_runtime.launch.slurm.profiles import profile_files

    return sorted(name for name in profile_files() if name.startswith(incomplete))


chain_argument = click.argument(
    "chain", type=click.Path(path_type=Path), default=Path("chain.yaml"), metavar="[CHAIN]"
)
run_argument = click.argument("run", required=False, metavar="[RUN]", shell_complete=complete_runs)
runs_option = click.option(
    "--runs",
    type=click.Path(path_type=Path, file_okay=False),
    envvar="DNICTL_RUNS",
    default=Path("runs"),
    show_default=True,
    help="Folder of the runs (also: DNICTL_RUNS).",
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
data_option = click.option(
    "--data",
    type=click.Path(path_type=Path),
    help="Folder or file of the data, instead of the chain's data.path.",
)
backend_option = click.option(
    "--backend",
    type=click.Choice(["auto", "process", "apptainer"]),
    default="auto",
    show_default=True,
    help="What the workers are: processes here, or containers where Apptainer and images are.",
)
_images_folder: dict[str, Any] = {
    "type": click.Path(path_type=Path, file_okay=False),
    "envvar": "DNICTL_IMAGES",
    "default": Path("images"),
    "show_default": True,
    "help": "Folder of the module images and of dni.lock (also: DNICTL_IMAGES).",
}
images_option = click.option("--images", **_images_folder)
out_option = click.option("--out", **_images_folder)
profile_option = click.option(
    "--profile", metavar="NAME", envvar="DNICTL_PROFILE", shell_complete=complete_profiles,
    help="Site profile (also: DNICTL_PROFILE); see 'dnictl profile list'.",
)  # fmt: skip
detach_option = click.option("-d", "--detach", is_flag=True, help="Run in the background.")
dry_run_option = click.option(
    "--dry-run", is_flag=True, help="Print the launch plan; start and write nothing."
)
level_option = click.option(
    "--log-level",
    type=click.Choice(["debug", "info", "warning", "error"]),
    default="info",
    show_default=True,
    help="How much the workers log.",
)
run_dir_option = click.option(
    "--run-dir",
    type=click.Path(path_type=Path, file_okay=False),
    help="The run's directory, instead of a new one below --runs.",
)


def chosen_run(name: str | None, runs: Path) -> Record:
    """The run that the user means; the latest by default."""
    from dni_runtime.launch.records import find_run

    return find_run(name, runs)


def check_module(record: Record, name: str) -> None:
    """Refuse the name of a module that a run does not have.

    Raises:
        UsageError: It has none of that name.
    """
    if name not in record.modules:
        raise UsageError(
            f"run {record.name!r} has no module {name!r}",
            hint=f"its modules: {', '.join(record.modules)}",
        )


def pause(state: RunState) -> None:
    """Wait before the next look at a run: each one at a job that waits is a question to Slurm."""
    time.sleep(_QUEUE_POLL_S if state.phase == "queued" else _POLL_S)


def print_json(document: Any) -> None:
    """Print one JSON document to stdout."""
    click.echo(json.dumps(document, indent=2, ensure_ascii=False))

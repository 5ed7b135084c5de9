"""Arguments and options that several commands share."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.core import ParameterSource

from dni_runtime.errors import UsageError
from dni_runtime.run.releases import parse_name
from dnictl.terminal import noted, tell

if TYPE_CHECKING:
    from dni_runtime.api.planning import PlannedRun
    from dni_runtime.api.run import Run
    from dni_runtime.plan.prepare import CheckedChain
    from dni_runtime.plan.settings import BackendChoice, Site, StartSettings
    from dni_runtime.spec.profile import ProfileSpec

_Command = TypeVar("_Command", bound=Callable[..., Any])


class OutputFile(click.Path):
    """A file to write, whose folder is checked before anything is computed."""

    def __init__(self, *, or_folder: bool = False, ending: str = "") -> None:
        super().__init__(dir_okay=or_folder, writable=True, path_type=Path)
        self._ending = ending

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        path = super().convert(value, param, ctx)
        if not os.fsdecode(path).endswith(self._ending):
            raise UsageError(
                f"{os.fsdecode(path)!r} cannot be written: end its name in {self._ending}"
            )
        folder = Path(os.fsdecode(path)).parent
        if not (folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)):
            here = "is not writable" if folder.is_dir() else "is no folder"
            raise UsageError(f"{os.fsdecode(path)!r} cannot be written: {str(folder)!r} {here}")
        return path


def check_new(output: Path, force: bool) -> None:
    """Refuse to replace a file, which may be one of the user's data, without --force."""
    if output.is_dir() or (output.exists() and not force):
        raise UsageError(f"{str(output)!r} already exists", hint="--force replaces a file")


click.IntRange.name, click.FloatRange.name = "whole number", "number"  # in messages: no "range"
PATH, FILE = click.Path(path_type=Path), click.Path(path_type=Path, dir_okay=False)
THERE = click.Path(path_type=Path, dir_okay=False, exists=True)
FOLDER = click.Path(path_type=Path, file_okay=False)
"""Types of arguments: paths, files, files that exist, folders."""


def complete_runs(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    """Return the names of runs that begin with an incomplete word, for the shell."""
    folder = Path(context.params.get("runs") or "runs")
    if not folder.is_dir():
        return []
    names = [entry.name for entry in folder.iterdir() if os.path.isfile(entry / "run.json")]
    return sorted(name for name in names if name.startswith(incomplete) and name.isprintable())


def complete_profiles(
    context: click.Context, parameter: click.Parameter, incomplete: str
) -> list[str]:
    """Return the names of site profiles that begin with an incomplete word, for the shell."""
    from dni_runtime.schedulers.slurm.profiles import profile_files

    return sorted(name for name in profile_files() if name.startswith(incomplete))


chain = click.argument("chain", type=PATH, default=Path("chain.yaml"), metavar="[CHAIN]")
runs = click.option(
    "--runs", type=FOLDER, envvar="DNICTL_RUNS", default=Path("runs"), show_default=True,
    help="Folder of the runs (also: DNICTL_RUNS).",
)  # fmt: skip
cut = click.option(
    "--from", "cut", metavar="CUT",
    help="Which checkpoint: its number, newest or best (default: the best if the chain selects "
    "one, else the newest).",
)  # fmt: skip
data = click.option(
    "--data", type=PATH, help="Folder or file of the data, instead of the chain's data.path."
)
backend = click.option(
    "--backend", type=click.Choice(["auto", "process", "apptainer"]), default="auto",
    show_default=True,
    help="Run workers as processes or in containers (auto: if Apptainer and the images exist).",
)  # fmt: skip
_images_folder: dict[str, Any] = {
    "type": FOLDER,
    "envvar": "DNICTL_IMAGES",
    "default": Path("images"),
    "show_default": True,
}
_IMAGES = "Folder of the module images and of dni.lock"


def _released_images(context: click.Context, parameter: click.Parameter, value: Path) -> Path:
    """Return the folder of the images of a release, if one is named."""
    if parse_name(str(value)) is None or value.is_dir() or context.resilient_parsing:
        return value  # a shell that completes a command line executes nothing
    from dni_runtime.image.apptainer import usable_apptainer
    from dni_runtime.release.images import assembled
    from dni_runtime.release.store import Store

    return assembled(usable_apptainer(), Store(), str(value))


images = click.option(
    "--images",
    **_images_folder,
    callback=_released_images,
    help=f"{_IMAGES}, or a release, NAME:VERSION (also: DNICTL_IMAGES).",
)
out = click.option("--out", **_images_folder, help=f"{_IMAGES} (also: DNICTL_IMAGES).")
profile = click.option(
    "--profile", metavar="NAME", envvar="DNICTL_PROFILE", shell_complete=complete_profiles,
    help="Site profile (also: DNICTL_PROFILE); see 'dnictl profile list'.",
)  # fmt: skip
hosts = click.option(
    "--hosts", metavar="A,B,...",
    help="Run the workers on these hosts, by ssh; they share the run directory and this Python.",
)  # fmt: skip
carry = click.option(
    "--carry", metavar="RUN", shell_complete=complete_runs,
    help="Go on from the newest checkpoint of a run of the same layers: with other settings, cuts.",
)  # fmt: skip
changes = click.option(
    "--set", "changes", multiple=True, metavar="NAME=VALUE",
    help="Another value of a setting of the chain, such as lr=1e-3; repeatable.",
)  # fmt: skip
detach = click.option("-d", "--detach", is_flag=True, help="Run in the background.")
dry_run = click.option(
    "--dry-run", is_flag=True, help="Print the launch plan; start and write nothing."
)
log_level = click.option(
    "--log-level", type=click.Choice(["debug", "info", "warning", "error"]), default="info",
    show_default=True, help="How much the workers log.",
)  # fmt: skip


def _note(context: click.Context, parameter: click.Parameter, value: Any) -> None:
    context.meta[f"dnictl.{parameter.name}"] = value


def noted_option(name: str, **settings: Any) -> Callable[[_Command], _Command]:
    """Return an option whose value is noted beside the command, which does not get it."""
    return click.option(name, expose_value=False, callback=_note, **settings)


json = noted_option("--json", is_flag=True, help="Print JSON.")


def _setting_option(name: str, help: str, metavar: str = "NAME") -> Callable[[_Command], _Command]:
    return noted_option(name, metavar=metavar, help=f"{help}, instead of the profile's.")


partition = _setting_option("--partition", "Partition")


def of_job(command: _Command) -> _Command:
    """Add the options of a job that override a site profile's settings."""
    for option in (
        _setting_option("--qos", "Quality of service"),
        partition,
        _setting_option("--account", "Account that is charged"),
        _setting_option("--time", "Time limit, as 4:00:00", "LIMIT"),
    ):
        command = option(command)
    return command


def chosen_profile(name: str | None) -> ProfileSpec:
    """Return the site profile of this name, with the settings of the command line.

    What neither of them says is as sbatch's variables have it, so that it is known, and checked.
    """
    from dni_runtime.schedulers.slurm.profiles import load_profile, override

    profile, given = load_profile(name), {}
    variables = {"partition": "PARTITION", "qos": "QOS", "account": "ACCOUNT", "time": "TIMELIMIT"}
    for setting, variable in variables.items():
        given[setting] = noted(setting)
        if given[setting] is None and getattr(profile, setting) is None:
            given[setting] = os.environ.get(f"SBATCH_{variable}") or None
    return override(profile, given)


trust = noted_option(
    "--trust", is_flag=True, help="Also with a run of somebody else's, whose code then runs as you."
)
name = click.option(
    "--name", metavar="NAME", help="The run's name (default: the chain's, and the time)."
)
run_dir = click.option(
    "--run-dir", type=FOLDER, help="The run's directory, instead of a new one below --runs."
)


def flags_given(*names: str) -> list[str]:
    """Return the flags of those options of these names that the command line has."""
    context = click.get_current_context()
    given = [
        parameter
        for parameter in context.command.params
        if parameter.name in names
        and context.get_parameter_source(parameter.name) is ParameterSource.COMMANDLINE
    ]
    return [max(parameter.opts, key=len) for parameter in given]


def counts_of(changes: Sequence[str]) -> dict[str, int]:
    """Return the numbers in texts ``MODULE=N``."""
    pairs = [change.partition("=") for change in changes]
    for change, (name, _, count) in zip(changes, pairs, strict=True):
        if not (name and count.isdecimal() and int(count)):
            raise UsageError(f"{change!r} is not MODULE=N", hint="for example: middle=3")
    return {name: int(count) for name, _, count in pairs}


def of_service(note: str = "") -> Callable[[_Command], _Command]:
    """Return what adds the options of a service of modules; ``note`` begins their help."""

    def add(command: _Command) -> _Command:
        for option in (
            click.option(
                "--exit-wait", "exit_wait_s", type=click.FloatRange(0, min_open=True),
                metavar="SECONDS",
                help=f"{note}After this time an exit answers, if what follows is cut off "
                "(default: 2).",
            ),
            click.option(
                "--exit-confidence", type=click.FloatRange(0, 1), metavar="P",
                help=f"{note}Let samples leave at early exits with this top probability, instead.",
            ),
            click.option(
                "--exit-accuracy", type=click.FloatRange(0), metavar="POINTS",
                help=f"{note}Let samples leave at early exits, as long as the whole loses at most "
                "so many points; see 'dnictl exits'.",
            ),
            click.option(
                "--token-file", type=THERE,
                help=f"{note}File of the bearer token that requests must have; only you may read "
                "it.",
            ),
            click.option(
                "--preprocess", is_flag=True,
                help=f"{note}Requests have raw samples (8-bit images, say), which are normalised "
                "as in the training.",
            ),
            click.option(
                "--replicas", multiple=True, metavar="MODULE=N",
                callback=lambda context, parameter, value: counts_of(value),
                help=f"{note}Workers of a module (default: as many as it had in the training); "
                "may be repeated.",
            ),
            cut,
        ):  # fmt: skip
            command = option(command)
        return command

    return add


SERVING = ("replicas", "preprocess", "exit_accuracy", "exit_confidence", "exit_wait_s")
"""Those of them that are fields of the service's settings."""


def serving_settings(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return these options as fields of the service's settings."""
    return {key: options[key] for key in SERVING if options[key] is not None}


def chosen_run(name: str | None, runs: Path) -> Run:
    """Return the run of this name, trusted with --trust; by default the user's latest."""
    from dni_runtime.api.run import Run

    return Run.find(name, runs, trust=bool(noted("trust")))


def of_run(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add [RUN] and --runs; the command gets the run that they name."""

    @functools.wraps(command)
    def chosen(*args: Any, run: str | None, runs: Path, **options: Any) -> Any:
        return command(*args, run=chosen_run(run, runs), **options)

    named = click.argument("run", required=False, metavar="[RUN]", shell_complete=complete_runs)
    return named(runs(chosen))


def of_new_run(command: _Command) -> _Command:
    """Add CHAIN, and the options of each new run, whose values :func:`new_run` takes."""
    for option in (log_level, data, images, runs, run_dir, name, backend, chain):
        command = option(command)
    return command


def new_run(
    file: Path,
    *,
    backend: BackendChoice,
    name: str | None,
    run_dir: Path | None,
    runs: Path,
    images: Path,
    data: Path | None,
    log_level: str,
    carry: str | None = None,
    changes: Sequence[str] = (),
) -> tuple[CheckedChain, StartSettings]:
    """Check a chain that is to be started; return it, and how its new run starts.

    ``data`` replaces its ``data.path``, and ``changes`` (NAME=VALUE) other settings; it goes on
    from the newest checkpoint of the run ``carry``.
    Other runs of the chain that are active are told of.
    """
    from dni_runtime.plan.create import check_place, run_root

    check_place(run_dir, runs, name)  # before torch is imported
    from dni_runtime.api.run import active_runs
    from dni_runtime.plan.prepare import prepare
    from dni_runtime.plan.settings import StartSettings

    prepared = prepare(file, data=data)
    if changes:
        from dni_runtime.plan.prepare import prepare_with
        from dni_runtime.spec.settings import read_value

        pairs = (read_value(text, prepared.written) for text in changes)
        prepared = prepare_with(prepared, dict(pairs))
    if carry is not None:
        from dni_runtime.plan.carrying import carry_over

        its = chosen_run(carry, runs)
        its.check_trusted()
        prepared = carry_over(prepared, its.record, its.state())
    for notice in active_runs(runs, prepared.chain.name):
        tell(notice)
    root = run_root(prepared.chain.name, run_dir, runs, name)
    return prepared, StartSettings(root, backend, images, log_level=log_level)


def site_for(prepared: CheckedChain, settings: StartSettings) -> Site:
    """Check what this host, or a cluster that shares its files, offers a run."""
    from dni_runtime.api.planning import site_of

    site = site_of(prepared, settings)
    _show_notices(site)
    return site


def planned_run(prepared: CheckedChain, settings: StartSettings) -> PlannedRun:
    """Plan the first start of a run, and show what the user should know of this host."""
    from dni_runtime.api.planning import plan_run

    planned = plan_run(prepared, settings)
    _show_notices(planned.site)
    return planned


def _show_notices(site: Site) -> None:
    for notice in site.notices:
        click.secho(f"dnictl: {notice}", err=True, fg="yellow")

"""``dnictl``'s entry point: the commands, and how errors end the program."""

from __future__ import annotations

import contextlib
import difflib
import errno
import importlib
import logging
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from typing import NoReturn

import click

from dni_runtime import __version__
from dni_runtime.errors import (
    CheckpointError,
    DniError,
    UnavailableError,
    UsageError,
    exited,
    hidden_package,
)
from dni_runtime.files import is_full
from dni_runtime.garbage import collect_seldom, run_program
from dnictl.terminal import printable

_DISK = {
    *(errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.ESTALE),
    *(errno.EACCES, errno.EPERM, errno.ENAMETOOLONG, errno.ENOTDIR, errno.EFBIG),
}
"""File system errors that users can fix."""

# The module of each command, imported when the command is used, by what users want to do. Command
# modules import nothing heavy (torch, pydantic, rich) before they run, so that --help stays quick.
GROUPS = {
    "Write a chain": {
        "init": "chains", "split": "split", "balance": "split", "validate": "chains",
        "graph": "chains", "config": "chains", "schema": "chains",
    },
    "Make images": {"build": "images", "verify": "images", "inspect": "images"},
    "Train": {
        "up": "start", "submit": "submit", "sweep": "sweep", "plan": "submit", "profile": "submit",
        "mpi": "start", "render": "render", "run": "start", "resume": "start",
    },
    "Control runs": {
        "supervise": "runs", "stop": "runs", "restart": "runs", "scale": "runs", "wait": "runs",
        "rm": "removal", "prune": "removal",
    },
    "Look at runs": {
        "ps": "status", "status": "status", "logs": "logs", "events": "logs",
        "tensorboard": "tensorboard",
    },
    "Use and measure": {
        "export": "runs", "predict": "predict", "exits": "exits", "serve": "serve",
        "service": "serve", "bench": "measure", "compare": "measure", "reference": "measure",
    },
    "Release": {
        "release": "release", "push": "release", "pull": "release", "models": "release",
        "diff": "release",
    },
    "This installation": {"doctor": "doctor", "version": "doctor", "completion": "doctor"},
}  # fmt: skip
COMMANDS = {name: module for group in GROUPS.values() for name, module in group.items()}
ALIASES = {"check": "validate", "list": "ps", "cancel": "stop"}


class Commands(click.Group):
    """Commands in groups, imported when needed; aliases are not listed."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        name = ALIASES.get(cmd_name, cmd_name)
        if name not in COMMANDS:
            return None
        command = getattr(importlib.import_module(f"dnictl.{COMMANDS[name]}"), name)
        assert isinstance(command, click.Command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if self.get_command(ctx, name) is None and name[:1] != "-" and not ctx.resilient_parsing:
            close = difflib.get_close_matches(name, [*COMMANDS, *ALIASES], n=1)
            ctx.fail(
                f"No such command {name!r}." + (f" Did you mean {close[0]!r}?" if close else "")
            )
        # Under an alias, too, help and errors name the command.
        _, command, rest = super().resolve_command(ctx, args)
        return command.name if command else None, command, rest

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        width = max(map(len, COMMANDS))
        for title, group in GROUPS.items():
            commands = [(name, self.get_command(ctx, name)) for name in group]
            with formatter.section(title):
                formatter.write_dl(
                    [
                        (name.ljust(width), command.get_short_help_str(formatter.width - width - 6))
                        for name, command in commands
                        if command is not None and not command.hidden
                    ]
                )


@click.group(
    cls=Commands,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="Exit codes: 0 done, 64 usage, 65 image, 66 data, 69 something missing, 70 a worker "
    "failed, 75 stopped ('dnictl resume' continues), 78 chain file, 79 diverged.",
)
@click.version_option(__version__, prog_name="dnictl")
@click.option("--debug", is_flag=True, expose_value=False,
              help="Show tracebacks of bugs (also: DNICTL_DEBUG).")  # fmt: skip
def cli() -> None:
    """Train a network as a chain of decoupled modules, each in its own container.

    \b
    dnictl init --template mlp     write a first chain.yaml
    dnictl validate chain.yaml     check it
    dnictl build chain.yaml        make its images
    dnictl up chain.yaml           train it here
    dnictl submit chain.yaml       train it on a Slurm cluster
    dnictl status                  look at the latest run
    dnictl export -o m.safetensors write the trained model to a file
    """


class _Warnings(logging.Handler):
    """Tells the user of what the package logs, unless a command has a log of its own."""

    def emit(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(OSError, ValueError):
            click.secho(f"warning: {printable(record.getMessage())}", err=True, fg="yellow")


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run a command line; ends the process with a documented exit code."""
    collect_seldom()
    logging.lastResort = _Warnings(logging.WARNING)
    color = False if os.environ.get("NO_COLOR") else None  # https://no-color.org
    try:
        _check_folder()
        code = cli.main(args=arguments, prog_name="dnictl", standalone_mode=False, color=color)
        sys.stdout.flush()
    except click.ClickException as error:
        error.show()
        code = 64 if isinstance(error, click.UsageError) else error.exit_code
    except (click.Abort, KeyboardInterrupt):
        click.echo("dnictl: interrupted", err=True)
        code = 128 + signal.SIGINT
    except BrokenPipeError:
        # The reader of a pipe has exited (head, less): nothing to report.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 1  # as in click
    except DniError as error:
        code = _report(error, color)
    except SystemExit as error:
        if (of_user := exited(error)) is None:
            raise
        code = _report(of_user, color)
    except Exception as error:
        if _lacks_torch(error):
            code = _report(
                UnavailableError(
                    f"torch cannot be loaded here: {type(error).__name__}: {error}",
                    hint="install a build of torch that fits this machine; 'dnictl doctor' checks",
                ),
                color,
            )
        elif hidden := hidden_package():
            code = _report(hidden, color)
        elif isinstance(error, OSError) and error.errno in _DISK:
            code = _report_disk(error, color)
        else:
            code = _report_bug(error)
    sys.exit(code if isinstance(code, int) else 0)


def _check_folder() -> None:
    """Refuse to work in a folder that has been removed, where some files seem to be missing."""
    try:
        os.getcwd()
    except FileNotFoundError:
        raise UsageError("the current folder has been removed", hint="cd to another one") from None


def program() -> NoReturn:
    """``dnictl``, as a process."""
    _open_streams()
    run_program(main)


def _open_streams() -> None:
    """Open the standard streams that the caller has closed.

    Else the next files opened get their numbers, and what programs print goes into those files.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            stream = open(os.devnull, mode)  # noqa: SIM115  # it gets the lowest number
            os.set_inheritable(stream.fileno(), True)
            setattr(sys, name, stream)


def _lacks_torch(error: Exception) -> bool:
    """Return whether an error comes from ``import torch``, which removes what it cannot load."""
    if "torch" in sys.modules:
        return False
    names = {
        str(frame.f_globals.get("__name__")) for frame, _ in traceback.walk_tb(error.__traceback__)
    }
    missing = error.name if isinstance(error, ImportError) else None
    return missing == "torch" or any(name.split(".")[0] == "torch" for name in names)


def _report(error: DniError, color: bool | None) -> int:
    with contextlib.suppress(OSError, ValueError):  # the code says it, too
        start = click.style("dnictl: error:", fg="red", bold=True)
        click.echo(f"{start} {printable(str(error))}", err=True, color=color)
    return error.exit_code


def _report_disk(error: OSError, color: bool | None) -> int:
    """Report a file system that is full, away or read-only: that is not a bug."""
    name = error.filename2 or error.filename  # of a copy, the one that is written
    where = f" {str(name)!r}" if name else ""
    hint = "make room" if is_full(error) else "check who may read and write it"
    problem = f"the file system failed{where}: {error.strerror}"
    code = _report(CheckpointError(problem, hint=f"{hint}, then try again"), color)
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.close()  # or Python prints the rest at exit
    return code


def _report_bug(error: Exception) -> int:
    """Write the traceback to a file; print it if that was requested."""
    if "--debug" in sys.argv or os.environ.get("DNICTL_DEBUG"):
        traceback.print_exception(error)
        return DniError.exit_code
    summary = f"{type(error).__name__}: {error}".splitlines()[0]
    click.echo(f"dnictl: internal error: {summary}", err=True)
    try:
        with tempfile.NamedTemporaryFile(
            "w", prefix="dnictl-traceback-", suffix=".txt", delete=False
        ) as file:
            file.write(f"{time.ctime()} dnictl {__version__} {sys.argv[1:]}\n")
            traceback.print_exception(error, file=file)
    except OSError:
        traceback.print_exception(error)
    else:
        click.echo(f"  → this is a bug: please report it with {file.name}", err=True)
    return DniError.exit_code

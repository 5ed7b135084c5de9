"""Commands about the program itself: ``version``, ``completion``."""

from __future__ import annotations

import platform
from importlib import metadata

import click

from dni_runtime import __version__
from dnictl.options import json_option, print_json

_PACKAGES = ("torch", "numpy", "pyzmq", "pydantic", "safetensors")


@click.command()
@json_option
def version(as_json: bool) -> None:
    """Print the versions of dnictl, Python, torch and others.

    \b
    Example:
      dnictl version --json
    """
    versions = {"dni-runtime": __version__, "python": platform.python_version()}
    for name in _PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = "not installed"
    if as_json:
        print_json(versions)
    else:
        for name, value in versions.items():
            click.echo(f"{name} {value}")


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(context: click.Context, shell: str) -> None:
    """Print the shell-completion script for dnictl's commands and runs.

    \b
    Example:
      dnictl completion bash >> ~/.bashrc
      dnictl completion zsh > ~/.zfunc/_dnictl
      dnictl completion fish > ~/.config/fish/completions/dnictl.fish
    """
    from click.shell_completion import get_completion_class

    found = get_completion_class(shell)
    assert found is not None
    click.echo(found(context.find_root().command, {}, "dnictl", "_DNICTL_COMPLETE").source())

"""The command ``doctor``: checks of this machine."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from dni_runtime.errors import UnavailableError, UsageError
from dnictl.options import data_option, json_option, print_json, profile_option

if TYPE_CHECKING:
    from dni_runtime.launch.doctor import Check

_MARKS = {"ok": ("✓", "green"), "warning": ("!", "yellow"), "missing": ("✗", "red")}
_NEEDED = {"process": {"always"}, "apptainer": {"always", "containers"}}


@click.command()
@click.argument("chain", type=click.Path(path_type=Path), required=False, metavar="[CHAIN]")
@click.option(
    "--backend",
    type=click.Choice(list(_NEEDED)),
    default="process",
    show_default=True,
    help="Backend to check for: plain processes, or containers too.",
)
@click.option("--network", is_flag=True,
              help="Measure links instead: CHAIN's links between the nodes of this Slurm "
              "allocation, or without CHAIN the links between all its nodes.")  # fmt: skip
@click.option("--interface", metavar="NAME",
              help="With --network, without CHAIN: interface or network of the links.")  # fmt: skip
@profile_option
@data_option
@json_option
def doctor(
    chain: Path | None,
    backend: str,
    network: bool,
    interface: str | None,
    profile: str | None,
    data: Path | None,
    as_json: bool,
) -> None:
    """Check this machine for everything that a chain may need.

    The exit code is 69 if something is missing that --backend needs, or if two nodes cannot
    be connected; other findings are informational.

    \b
    Example:
      dnictl doctor --backend apptainer
      salloc --nodes 2 dnictl doctor --network chain.yaml
    """
    if network:
        from dnictl.network import measure_network

        measure_network(
            chain, interface=interface, profile_name=profile, data=data, as_json=as_json
        )
        return
    if any(given is not None for given in (chain, interface, data)):
        raise UsageError(
            "a chain, --interface and --data are for 'dnictl doctor --network'",
            hint="'dnictl validate CHAIN' checks a chain",
        )
    from dni_runtime.launch.doctor import examine

    checks: list[Check] = []
    for check in examine():
        checks.append(check)
        if not as_json:
            _show(check, needed=check.need in _NEEDED[backend])
    lacking = {
        name: [check.name for check in checks if check.status == "missing" and check.need in needs]
        for name, needs in _NEEDED.items()
    }
    ready = [name for name, names in lacking.items() if not names]
    if as_json:
        print_json(
            {
                "backend": backend,
                "ready": backend in ready,
                "backends": ready,
                "checks": [asdict(check) for check in checks],
            }
        )
    elif backend not in ready:
        problems = ", ".join(lacking[backend])
        click.echo(f"\nthe {backend} backend cannot be used here: see {problems}")
    else:
        click.echo(f"\nready for: {', '.join(ready)}")
    if backend not in ready:
        sys.exit(UnavailableError.exit_code)


def _show(check: Check, *, needed: bool) -> None:
    mark, colour = _MARKS[check.status]
    if check.status == "missing" and not needed:
        mark, colour = "-", "bright_black"
    note = {"containers": " (for containers)", "builds": " (for builds)"}.get(check.need, "")
    click.echo(f"{click.style(mark, fg=colour)} {check.name:17} {check.detail}{note}")
    if check.hint is not None and check.status != "ok":
        click.echo(f"  {'':17} → {check.hint}")

"""This installation and its machine: ``doctor``, ``version``, ``completion``."""

from __future__ import annotations

import platform
import socket
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

import click

from dni_runtime import __version__
from dni_runtime.errors import UnavailableError, UsageError
from dnictl import options
from dnictl.show import Column, number, print_table, quantity
from dnictl.terminal import answer, answered, json_wanted, tell

if TYPE_CHECKING:
    from dni_runtime.api.doctor import Check
    from dni_runtime.measure.network import HostPair, LineResult
    from dni_runtime.schedulers.slurm.allocation import Allocation
    from dni_runtime.spec.profile import ProfileSpec

_MARKS = {"ok": ("✓", "green"), "warning": ("!", "yellow"), "missing": ("✗", "red")}
_NEEDED = {"process": {"always"}, "apptainer": {"always", "containers"}}
_PACKAGES = ("torch", "numpy", "pyzmq", "pydantic", "safetensors")


@click.command()
@click.argument("chain", type=options.PATH, required=False, metavar="[CHAIN]")
@click.option("--backend", type=click.Choice(list(_NEEDED)), default="process", show_default=True,
              help="Backend to check for: plain processes, or containers too.")  # fmt: skip
@click.option("--network", is_flag=True,
              help="Measure links instead: CHAIN's links between the nodes of this Slurm "
              "allocation, or without CHAIN the links between all its nodes.")  # fmt: skip
@click.option("--nodes", is_flag=True,
              help="Let the nodes of this Slurm allocation check themselves instead.")  # fmt: skip
@click.option("--hosts", metavar="A,B,...",
              help="Let these hosts check themselves instead, by ssh.")  # fmt: skip
@click.option("--interface", metavar="NAME",
              help="With --network, without CHAIN: a network interface, or a network.")  # fmt: skip
@options.profile
@options.data
@options.json
def doctor(
    chain: Path | None,
    backend: str,
    network: bool,
    nodes: bool,
    hosts: str | None,
    interface: str | None,
    profile: str | None,
    data: Path | None,
) -> None:
    """Check this machine, or others, for what a chain may need.

    The exit code is 69 if something is missing that --backend needs, or if two nodes cannot
    be connected; other findings are informational.

    \b
    Example:
      dnictl doctor --backend apptainer
      salloc --nodes 2 dnictl doctor --nodes --backend apptainer
      salloc --nodes 2 dnictl doctor --network chain.yaml
    """
    if network + nodes + (hosts is not None) > 1:
        raise UsageError("--network, --nodes and --hosts exclude each other", hint="give one")
    if network:
        _measure_network(chain, interface, profile, data)
        return
    if options.flags_given("chain", "interface", "data"):
        raise UsageError(
            "a chain, --interface and --data are for 'dnictl doctor --network'",
            hint="'dnictl validate CHAIN' checks a chain",
        )
    others = _hosts(hosts) if nodes or hosts is not None else ()
    findings: list[tuple[Check, Sequence[str]]] = []
    for check, where in _findings(others, hosts is None, profile):
        findings.append((check, where))
        if not json_wanted():
            _show(check, needed=check.need in _NEEDED[backend], where=where)
    lacking = {
        name: dict.fromkeys(
            check.name for check, _ in findings if check.status == "missing" and check.need in needs
        )
        for name, needs in _NEEDED.items()
    }
    ready = [name for name, names in lacking.items() if not names]
    by_host = {
        host: [asdict(check) for check, where in findings if host in (where or others)]
        for host in others
    }
    found = {"nodes": by_host} if others else {"checks": [asdict(check) for check, _ in findings]}
    document = {"backend": backend, "ready": backend in ready, "backends": ready, **found}
    if backend in ready:
        answer(document, f"\nready for: {', '.join(ready)}")
        return
    problems = ", ".join(lacking[backend])
    answer(document, f"\nthe {backend} backend cannot be used here: see {problems}")
    sys.exit(UnavailableError.exit_code)


@click.command()
@options.json
def version() -> None:
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
    answer(versions, "\n".join(f"{name} {value}" for name, value in versions.items()))


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(context: click.Context, shell: str) -> None:
    """Print a shell's completion script for commands and runs.

    \b
    Example:
      dnictl completion bash >> ~/.bashrc
      dnictl completion zsh > ~/.zfunc/_dnictl
      dnictl completion fish > ~/.config/fish/completions/dnictl.fish
    """
    from click.shell_completion import get_completion_class

    script = get_completion_class(shell)
    assert script is not None
    click.echo(script(context.find_root().command, {}, "dnictl", "_DNICTL_COMPLETE").source())


def _hosts(hosts: str | None) -> tuple[str, ...]:
    """Return the hosts that are named, or the nodes of this process's allocation."""
    from dni_runtime.schedulers.slurm.allocation import allocation_here
    from dni_runtime.schedulers.ssh import parse_hosts

    if hosts is not None:
        return parse_hosts(hosts)
    if (allocation := allocation_here()) is None:
        raise UsageError(
            "there is no Slurm allocation here, whose nodes could be checked",
            hint="salloc --nodes 2 dnictl doctor --nodes",
        )
    return allocation.hosts


def _findings(
    hosts: Sequence[str], steps: bool, profile: str | None
) -> Iterator[tuple[Check, Sequence[str]]]:
    """Yield each finding here; or that of other hosts, with those that have it if not all do."""
    from dni_runtime.api.doctor import examine, examine_hosts
    from dni_runtime.schedulers.slurm.profiles import load_profile

    if not hosts:
        for check in examine():
            yield check, ()
        return
    site = load_profile(profile)
    tell(f"checking {', '.join(hosts)}")
    alike: dict[Check, list[str]] = {}
    for host, checks in examine_hosts(hosts, site, steps=steps).items():
        for check in checks:
            alike.setdefault(check, []).append(host)
    order = [check.name for check in alike]
    for check, where in sorted(alike.items(), key=lambda item: order.index(item[0].name)):
        yield check, where if len(where) < len(hosts) else ()


def _show(check: Check, *, needed: bool, where: Sequence[str]) -> None:
    mark, colour = _MARKS[check.status]
    if check.status == "missing" and not needed:
        mark, colour = "-", "bright_black"
    note = {"containers": " (for containers)", "builds": " (for builds)"}.get(check.need, "")
    at = f"{', '.join(where)}: " if where else ""
    click.echo(f"{click.style(mark, fg=colour)} {check.name:17} {at}{check.detail}{note}")
    if check.hint is not None and check.status != "ok":
        click.echo(f"  {'':17} → {check.hint}")


def _measure_network(
    chain: Path | None, interface: str | None, name: str | None, data: Path | None
) -> None:
    from dni_runtime.measure.network import SIZES_BYTES, measure_lines, step_on
    from dni_runtime.measure.peer import Peer
    from dni_runtime.schedulers.slurm.allocation import allocation_here
    from dni_runtime.schedulers.slurm.profiles import load_profile

    if chain is not None and interface is not None:
        raise UsageError(
            "--interface is for measuring without a chain",
            hint=f"set links.interface in {str(chain)!r}",
        )
    profile = load_profile(name)
    allocation = allocation_here()
    lines = _lines(chain, interface or profile.interface, profile, data, allocation)
    if not lines:
        raise UsageError("a chain of one module has no links", hint="leave the chain out")
    if allocation is None:
        where = f"this host alone ({socket.gethostname()}): there is no Slurm allocation"
    else:
        where = f"job {allocation.job}: {', '.join(allocation.hosts)}"
    tell(f"measuring {where}")
    links: list[LineResult] = []
    for link in measure_lines(
        lines,
        lambda host: Peer() if allocation is None else step_on(allocation, host, profile.python),
    ):
        links.append(link)
        tell(f"{len(links)}/{len(lines)} {link.source} → {link.sink}")
    job = None if allocation is None else allocation.job
    if not answered({"job": job, "links": [asdict(link) for link in links]}):
        columns: list[Column[LineResult]] = [
            Column("source", title="from"),
            Column("sink", title="to"),
            Column("transport", _over, title="over"),
            quantity("round_trip_us", text=number, title="round trip, µs"),
            quantity("round_trip_p99_us", text=number, title="99 %"),
            *map(_throughput, SIZES_BYTES),
        ]
        print_table(columns, links)
    failures = [
        f"{link.source} → {link.sink}, network interface {link.interface or 'none'}"
        f"{f', {link.address}' if link.address else ''}: {link.error}"
        for link in links
        if link.error is not None
    ]
    if failures:
        raise UnavailableError(
            "\n  ".join([f"{len(failures)} of {len(links)} links cannot be measured:", *failures]),
            hint="see 'ip -brief address' on the nodes, and whether a firewall blocks them",
        )


def _lines(
    chain: Path | None,
    interface: str | None,
    profile: ProfileSpec,
    data: Path | None,
    allocation: Allocation | None,
) -> list[HostPair]:
    from dni_runtime.measure import network
    from dni_runtime.plan.prepare import prepare
    from dni_runtime.schedulers.slurm.allocation import request_here
    from dni_runtime.spec import LinksSpec

    prepared = None if chain is None else prepare(chain, data=data, tries=False)
    if allocation is None:
        links = LinksSpec() if prepared is None else prepared.chain.links
        return network.lines_within(socket.gethostname(), links)
    if prepared is not None:
        request = request_here(Path("RUN").absolute(), prepared, profile, allocation)
        return network.lines_of_chain(
            prepared.chain, prepared.replicas, profile, request.nodes, allocation.hosts
        )
    if len(allocation.hosts) == 1:
        return network.lines_within(allocation.hosts[0], LinksSpec())
    if interface is None:
        raise UsageError(
            "the links between nodes need a network interface",
            hint="name one (ib0), or a network such as 10.0.0.0/16, with --interface or in the "
            "site profile",
        )
    return network.lines_between(allocation.hosts, interface)


def _throughput(size: int) -> Column[LineResult]:
    return quantity(f"MB/s at {size >> 20} MB", lambda link: link.mb_per_s.get(size), number)


def _over(link: LineResult) -> str:
    if link.address is None or link.transport == "ipc":
        return link.transport
    ip = link.address.removeprefix("tcp://").rpartition(":")[0]
    return f"tcp {ip}{', curve' if link.encrypted else ''}"

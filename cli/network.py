"""``doctor --network``: measures the links of an allocation, or of this host."""

from __future__ import annotations

import socket
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from dni_runtime.errors import UnavailableError, UsageError
from dnictl.options import print_json

if TYPE_CHECKING:
    from dni_runtime.bench.network import Line, Measured
    from dni_runtime.launch.slurm.allocation import Allocation
    from dni_runtime.spec.profile import ProfileSpec


def measure_network(
    chain: Path | None,
    *,
    interface: str | None,
    profile_name: str | None,
    data: Path | None,
    as_json: bool,
) -> None:
    """Measure links and print the figures."""
    from dni_runtime.bench.network import measure_lines, step_on
    from dni_runtime.bench.peer import Peer
    from dni_runtime.launch.slurm.allocation import allocation_here
    from dni_runtime.launch.slurm.profiles import load_profile

    if chain is not None and interface is not None:
        raise UsageError(
            "--interface is for measuring without a chain",
            hint=f"set links.interface in {str(chain)!r}",
        )
    profile = load_profile(profile_name)
    allocation = allocation_here()
    lines = _lines(chain, interface or profile.interface, profile, data, allocation)
    if not lines:
        raise UsageError("a chain of one module has no links", hint="leave the chain out")
    if allocation is None:
        where = f"this host alone ({socket.gethostname()}): there is no Slurm allocation"
    else:
        where = f"job {allocation.job}: {', '.join(allocation.hosts)}"
    click.echo(f"measuring {where}", err=True)
    found: list[Measured] = []
    for one in measure_lines(
        lines,
        lambda host: Peer() if allocation is None else step_on(allocation, host, profile.python),
    ):
        found.append(one)
        click.echo(f"{len(found)}/{len(lines)} {one.source} → {one.sink}", err=True)
    if as_json:
        job = None if allocation is None else allocation.job
        print_json({"job": job, "links": [asdict(one) for one in found]})
    else:
        _print(found)
    failures = [
        f"{one.source} → {one.sink}, interface {one.interface or 'none'}"
        f"{f', {one.address}' if one.address else ''}: {one.error}"
        for one in found
        if one.error is not None
    ]
    if failures:
        raise UnavailableError(
            "\n  ".join([f"{len(failures)} of {len(found)} links cannot be measured:", *failures]),
            hint="see 'ip -brief address' on the nodes, and whether a firewall blocks them",
        )


def _lines(
    chain: Path | None,
    interface: str | None,
    profile: ProfileSpec,
    data: Path | None,
    allocation: Allocation | None,
) -> list[Line]:
    from dni_runtime.bench import network
    from dni_runtime.launch.prepare import prepare
    from dni_runtime.launch.slurm.allocation import request_here
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


def _print(found: list[Measured]) -> None:
    from dni_runtime.bench.network import SIZES_BYTES
    from dnictl.show import number, print_table

    sizes = [f"MB/s at {size >> 20} MB" for size in SIZES_BYTES]
    columns = ["from", "to", "over", "round trip, µs", "99 %", *sizes]
    print_table(
        columns,
        [
            [
                one.source,
                one.sink,
                _over(one),
                number(one.round_trip_us),
                number(one.round_trip_p99_us),
                *(number(one.mb_per_s.get(size)) for size in SIZES_BYTES),
            ]
            for one in found
        ],
        right=set(columns[3:]),
    )


def _over(one: Measured) -> str:
    if one.address is None or one.transport == "ipc":
        return one.transport
    ip = one.address.removeprefix("tcp://").rpartition(":")[0]
    return f"tcp {ip}{', curve' if one.encrypted else ''}"

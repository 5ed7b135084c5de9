"""The scheduler ``ssh``: workers run on the hosts that the user names; they share their files.

A worker's output, its signals and its exit status travel over one connection, which ends the worker
when it is lost (``schedulers/child.py``, ``send`` and ``receive``). ssh reads the user's own
configuration: users, ports, keys, jump hosts.
"""

from __future__ import annotations

import logging
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from dni_runtime.errors import UnavailableError, UsageError
from dni_runtime.plan.placement import check_links, link_kinds, needs_of, place, wanted_placement
from dni_runtime.plan.plan import LaunchPlan, WorkerPlan
from dni_runtime.plan.settings import StartRequest, make_plan
from dni_runtime.run.rundir import socket_path
from dni_runtime.schedulers import child
from dni_runtime.schedulers.local import Scheduler
from dni_runtime.schedulers.processes import LocalStarter, Starter
from dni_runtime.schedulers.runtimes import on_node

_TIMEOUT_S = 60.0
_OPTIONS = (
    *("-T", "-o", "BatchMode=yes"),  # no questions
    # A lost connection is noticed after 30 s; ``child.receive`` has killed the worker by then.
    *("-o", "ConnectTimeout=20", "-o", "ServerAliveInterval=10", "-o", "ServerAliveCountMax=3"),
    # What a user's configuration may have for a terminal; a shared connection would end with
    # the worker that has opened it.
    *("-o", "ClearAllForwardings=yes", "-o", "RemoteCommand=none", "-o", "ControlPath=none"),
)
_CHECK = 'for path; do [ -e "$path" ] || { echo "$path"; exit 1; }; done'

_log = logging.getLogger(__name__)


def parse_hosts(text: str) -> tuple[str, ...]:
    """Return the hosts in a list such as ``a,user@b``."""
    hosts = tuple(text.split(","))
    for host in hosts:
        if not host or host.startswith("-") or any(c.isspace() for c in host):
            raise UsageError(f"--hosts: {host!r} is not a host", hint="for example: --hosts a,b")
        if hosts.count(host) > 1:
            raise UsageError(f"--hosts names {host!r} twice", hint="name each host once")
    return hosts


class Ssh(Scheduler):
    """Runs workers on hosts that ssh reaches, each by an ``ssh`` process of this host."""

    def plan(self, request: StartRequest) -> LaunchPlan:
        chain, workers, hosts = request.chain, request.workers, request.settings.hosts
        nodes = place(needs_of(chain, workers), wanted_placement(chain, len(hosts)))
        check_links(chain, workers, nodes, None, lambda *location: ".".join(map(str, location)))
        site = replace(
            request.site,
            sockets=socket_path(request.settings.run, Path("/tmp")),  # local on each host
            links=link_kinds(chain, workers, None, nodes),
        )
        plan = make_plan(replace(request, site=site))
        placed = [
            replace(worker, node=hosts[number])
            for worker, number in zip(plan.workers, nodes, strict=True)
        ]
        return replace(plan, workers=tuple(placed))

    def check(self, plan: LaunchPlan) -> None:
        folder = next(path for path in Path(plan.run).parents if path.exists())
        paths = (plan.workers[0].python, child.__file__, str(folder))
        shell = ["/bin/sh", "-c", _CHECK, "dni-check", *paths]
        for host, done in on_each({host: ssh(host, shell) for host in plan.nodes}).items():
            if done.returncode == 0:
                continue
            if done.returncode == 1 and (missing := done.stdout.strip()):
                raise UnavailableError(
                    f"host {host!r} has no {missing!r}",
                    hint="this Python and the run directory must lie on a file system that all "
                    "hosts share, under the same path",
                )
            said = done.stderr.strip().splitlines()[-1:] or [f"exit status {done.returncode}"]
            raise UnavailableError(
                f"host {host!r} cannot be used: {said[0]}",
                hint=f"this must work without a question: ssh -o BatchMode=yes {host} true",
            )

    def command(self, worker: WorkerPlan) -> Sequence[str]:
        assert worker.node is not None
        environment = [f"{name}={value}" for name, value in worker.environment.items()]
        receive = [worker.python, "-I", "-S", child.__file__, "receive"]
        return ssh(worker.node, [*receive, "env", *environment, *on_node(worker)])

    def starter(self, environ: Mapping[str, str]) -> Starter:
        return LocalStarter(environ, render=self.command, connected=True)

    def clean_up(self, plan: LaunchPlan) -> None:
        remove = ["rm", "-rf", "--", plan.sockets]
        for host, done in on_each({host: ssh(host, remove) for host in plan.nodes}).items():
            if done.returncode != 0:
                _log.warning("cannot remove %s on %s: %s", plan.sockets, host, done.stderr.strip())


def ssh(host: str, argv: Sequence[str]) -> list[str]:
    """Return the command that runs another one on a host."""
    return ["ssh", *_OPTIONS, "--", host, shlex.join(argv)]


def on_each(
    commands: Mapping[str, Sequence[str]],
    timeout_s: float = _TIMEOUT_S,
    environ: Mapping[str, str] | None = None,
) -> dict[str, subprocess.CompletedProcess[str]]:
    """Run a short command for each host, all at once."""

    def run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
        try:
            return subprocess.run(
                command,
                env=environ,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=timeout_s,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            return subprocess.CompletedProcess(command, 255, "", str(error))

    with ThreadPoolExecutor(len(commands)) as pool:
        return dict(zip(commands, pool.map(run, commands.values()), strict=True))

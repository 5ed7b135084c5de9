"""Plans for hosts that ssh reaches, their commands, and what a check of the hosts finds."""

from __future__ import annotations

import shlex
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from dni_runtime.errors import SpecError, UnavailableError, UsageError
from dni_runtime.plan.plan import LaunchPlan
from dni_runtime.plan.settings import Site, StartRequest, StartSettings
from dni_runtime.schedulers import child
from dni_runtime.schedulers.runtimes import on_node
from dni_runtime.schedulers.ssh import Ssh, parse_hosts
from dni_runtime.spec import ChainSpec, WorkerSpec


@pytest.fixture
def chain(chain: ChainSpec) -> ChainSpec:
    return chain.model_copy(
        update={"links": chain.links.model_copy(update={"interface": "10.0.0.0/24"})}
    )


def plan_of(
    chain: ChainSpec, workers: tuple[WorkerSpec, ...], root: Path, *hosts: str
) -> LaunchPlan:
    settings = StartSettings(root / "runs" / "a b", scheduler="ssh", hosts=hosts)
    site = Site("process", python=sys.executable)
    return Ssh().plan(StartRequest(chain, workers, settings, site))


def test_hosts_in_a_list() -> None:
    assert parse_hosts("a,user@b.example.org") == ("a", "user@b.example.org")


@pytest.mark.parametrize(
    ("text", "problem"),
    [("", "'' is not"), ("a,,b", "''"), ("-oProxyCommand=x", "'-o"), ("a b", "'a b'"),
     ("a,b,a", "'a' twice")],
)  # fmt: skip
def test_what_is_no_list_of_hosts(text: str, problem: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_hosts(text)
    assert problem in caught.value.message


def test_chains_that_do_not_fit_the_hosts(
    chain: ChainSpec, workers: tuple[WorkerSpec, ...], tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match="4 nodes are requested, but there are 3 modules"):
        plan_of(chain, workers, tmp_path, "a", "b", "c", "d")
    bare = chain.model_copy(update={"links": chain.links.model_copy(update={"interface": None})})
    with pytest.raises(SpecError, match=r"links.interface: .* no network interface is set"):
        plan_of(bare, workers, tmp_path, "a", "b")
    assert plan_of(bare, workers, tmp_path, "a").workers[2].transport == "ipc"


def test_a_command_survives_two_shells(
    chain: ChainSpec, workers: tuple[WorkerSpec, ...], tmp_path: Path
) -> None:
    worker = plan_of(chain, workers, tmp_path, "a", "user@b").workers[2]
    worker = replace(worker, environment={"A": "$HOME 'x' \"y\""})
    argv = Ssh().command(worker)
    assert argv[0] == "ssh"
    assert "BatchMode=yes" in argv
    assert argv[-3:-1] == ["--", "user@b"]
    receive = [sys.executable, "-I", "-S", child.__file__, "receive"]
    assert shlex.split(argv[-1]) == [*receive, "env", "A=$HOME 'x' \"y\"", *on_node(worker)]


def test_without_ssh(
    chain: ChainSpec,
    workers: tuple[WorkerSpec, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UnavailableError, match=r"host 'a' cannot be used: .*'ssh'"):
        Ssh().check(plan_of(chain, workers, tmp_path, "a", "b"))

"""Runs on hosts that ssh reaches: two names of this machine, with an sshd of the test's own."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from dni_runtime.files import read_json
from dni_runtime.image.apptainer import SYSTEM_FOLDERS
from dni_runtime.run.documents.state import RunState
from dni_runtime.run.rundir import RunDir
from tests.e2e.conftest import (
    FOREVER,
    Site,
    command_of,
    eventually,
    missing,
    need,
    processes_of,
    run,
)
from tests.e2e.test_restarts import QUICK, goes_on, happened, is_back, steps

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

SERVER = """\
Port {port}
ListenAddress 127.0.0.1
HostKey {folder}/host
AuthorizedKeysFile {folder}/user.pub
PidFile none
StrictModes no
UsePAM no
PasswordAuthentication no
KbdInteractiveAuthentication no
"""
CLIENT = """\
Host a b
    HostName 127.0.0.1
    Port {port}
    IdentityFile {folder}/user
    IdentitiesOnly yes
    UserKnownHostsFile {folder}/known
    StrictHostKeyChecking yes
"""
LINKS = "links: {interface: lo}"


@pytest.fixture
def hosts(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Iterator[str]:
    """Two hosts, ``a`` and ``b``, for the ``ssh`` in the PATH."""
    folder = tmp_path_factory.mktemp("ssh")
    path = os.pathsep.join([os.environ["PATH"], *SYSTEM_FOLDERS])
    sshd = shutil.which("sshd", path=path) or missing("sshd is not installed")
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
    for name in ("host", "user"):
        run([need("ssh-keygen"), "-q", "-t", "ed25519", "-N", "", "-f", folder / name])
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    (folder / "server").write_text(SERVER.format(port=port, folder=folder))
    (folder / "client").write_text(CLIENT.format(port=port, folder=folder))
    key = (folder / "host.pub").read_text()
    (folder / "known").write_text(f"[127.0.0.1]:{port} {key}")
    program = folder / "bin" / "ssh"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {need("ssh")} -F {folder}/client "$@"\n')
    program.chmod(0o755)
    with (folder / "log").open("wb") as log:
        server = subprocess.Popen([sshd, "-D", "-e", "-f", folder / "server"], stderr=log)
    try:
        eventually("sshd listens", lambda: "listening" in (folder / "log").read_text(), 15)
        monkeypatch.setenv("PATH", str(program.parent), prepend=os.pathsep)
        yield "a,b"
    finally:
        server.terminate()
        server.wait(30)


def worker_of(site: Site, name: str) -> int:
    """The process of a module's worker."""
    words = (b"\0dni_runtime.worker\0", f"\0--module\0{name}\0".encode())
    pids = processes_of(site.folder)
    (pid,) = (p for p in pids if all(word in command_of(p) for word in words) and _is_python(p))
    return pid


def _is_python(pid: int) -> bool:
    """Whether it is the worker itself, not a wrapper around it."""
    return command_of(pid).split(b"\0")[1] == b"-P"


def test_two_hosts_train_a_chain(site: Site, hosts: str) -> None:
    figures = site.json("up", site.write(8, LINKS), "--hosts", hosts, "--backend", "process")
    assert (figures["state"], figures["exit_code"]) == ("finished", 0)
    assert figures["accuracy"] > 0.9
    plan = read_json(site.latest.plan)
    assert plan is not None
    placed = [(worker["node"], worker["transport"]) for worker in plan["workers"]]
    assert placed in (
        [("a", None), ("a", "ipc"), ("b", "tcp")],
        [("a", None), ("b", "tcp"), ("b", "ipc")],
    )
    assert not Path(plan["sockets"]).exists()
    assert "epoch 8" in site.run("logs", "top").stdout


def test_a_sweep(site: Site, hosts: str) -> None:
    found = site.json("sweep", site.write(2, LINKS), "seed=1..2", "--hosts", hosts, "--name", "s")
    assert [one["state"] for one in found["runs"]] == ["finished"] * 2
    for one in found["runs"]:
        plan = read_json(RunDir(site.folder / "runs" / one["run"]).plan)
        assert plan is not None
        assert {worker["node"] for worker in plan["workers"]} == {"a", "b"}


def test_workers_and_connections_may_be_killed(site: Site, hosts: str) -> None:
    path = site.write(FOREVER, QUICK, LINKS, slow=True)
    site.run("up", path, "--hosts", hosts, "--backend", "process", "-d")
    eventually("all modules train", lambda: site.latest.state.exists() and goes_on_now(site))
    os.kill(worker_of(site, "middle"), signal.SIGKILL)
    eventually("the worker is back", is_back(site, "middle", 1))
    ended = happened(site, "worker_ended")[-1]
    assert (ended["module"], ended["signal"]) == ("middle", "SIGKILL")
    eventually("all go on", goes_on(site))

    first, state = worker_of(site, "top"), RunState.read(site.latest)
    (connection,) = (
        pid
        for pid in processes_of(site.folder)
        if command_of(pid).startswith(b"ssh\0") or b"/ssh\0" in command_of(pid).split(b"-F")[0]
        if parent_of(pid) == state.modules["top"].pid
    )
    os.kill(connection, signal.SIGKILL)
    eventually("its worker ends", lambda: not command_of(first), 15)
    eventually("the worker is back", is_back(site, "top", 1))
    eventually("all go on", goes_on(site))

    os.kill(state.pid, signal.SIGKILL)
    site.run("resume", "-d")  # on the same hosts, after the workers that were left
    eventually("all go on", lambda: goes_on_now(site))
    assert "stopped" in site.run("stop").stdout
    modules = site.json("status")["modules"]
    assert [module["state"] for module in modules] == ["stopped"] * 3


def goes_on_now(site: Site) -> bool:
    """Whether all modules train."""
    return RunState.read(site.latest).phase == "running" and min(steps(site).values()) > 5


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def test_a_host_that_cannot_be_used(site: Site, hosts: str) -> None:
    """Nothing is started, and nothing is written."""
    path = site.write(8, LINKS)
    err = site.run("up", path, "--hosts", f"{hosts},no.where.invalid", expect=69).stderr
    assert "host 'no.where.invalid' cannot be used: ssh: Could not resolve" in err
    assert not (site.folder / "runs").exists()


def test_hosts_check_themselves(site: Site, hosts: str) -> None:
    """What all have in common stands once; one that cannot be asked is named."""
    shown = site.run("doctor", "--hosts", hosts).stdout
    assert shown.count("✓ torch ") == 1
    assert shown.endswith(("ready for: process\n", "ready for: process, apptainer\n"))
    done = site.run("doctor", "--hosts", f"{hosts},no.where.invalid", expect=69)
    assert "✗ node              no.where.invalid: ssh: Could not resolve" in done.stdout
    assert "✓ python            a, b: " in done.stdout

"""Whole runs over encrypted tcp: trained to the end, keys that leave no trace, strangers."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from dni_runtime.files import read_json, write_atomic
from dni_runtime.link.address import addresses
from dni_runtime.run import keys
from dni_runtime.run.rundir import RunDir
from dni_runtime.spec import parse_chain
from tests.e2e.conftest import FOREVER, PAIR, Site, eventually, processes_of
from tests.e2e.programs import Program
from tests.e2e.workers import workers_of
from tests.lines import read_lines

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

LINKS = "links: {transport: tcp, connect_timeout_s: 60, %s}"


def beyond_loopback() -> str:
    """Links over an address that other hosts can reach, where this machine has one."""
    for _, ip in addresses():
        if not ip.is_loopback:
            return f"interface: '{ip}'"
    return "security: curve"


def write(site: Site, epochs: int, links: str, *, slow: bool = False) -> Path:
    return site.write(epochs, LINKS % links, slow=slow, chain=PAIR)


def files(root: Path) -> Iterator[tuple[Path, bytes]]:
    """All files and what is in them, while old checkpoints go."""

    def heed(error: OSError) -> None:
        if not isinstance(error, FileNotFoundError):
            raise error

    for folder, _, names in os.walk(root, onerror=heed):
        for path in (Path(folder, name) for name in names):
            with contextlib.suppress(FileNotFoundError):
                if path.is_file():
                    yield path, path.read_bytes()


def traces(secret: bytes, run: RunDir) -> list[str]:
    """Where a secret can be found, other than in its key file."""
    found = [
        str(path)
        for path, content in files(run.root)
        if path.suffix != ".key" and secret in content
    ]
    for pid in processes_of(run.root):
        for name in ("cmdline", "environ"):
            place = Path(f"/proc/{pid}/{name}")
            with contextlib.suppress(ProcessLookupError, FileNotFoundError):  # it ends just now
                if secret in place.read_bytes():
                    found.append(str(place))
    return found


def test_a_chain_over_encrypted_links(site: Site) -> None:
    site.run("up", write(site, 8, beyond_loopback(), slow=True), "--backend", "process", "-d")
    run = site.latest
    eventually("top listens", run.endpoint("top").exists)
    endpoint = read_json(run.endpoint("top")) or {}
    assert endpoint["public_key"].encode() == keys.public(run, "top")
    site.run("wait")
    figures = site.json("status")
    assert figures["accuracy"] > 0.9
    assert figures["step"] == figures["total_steps"]
    assert "encrypted" in run.log("top", 1).read_text()
    assert not run.keys.exists()


def test_keys_leave_no_trace_and_strangers_are_counted(site: Site) -> None:
    chain = write(site, FOREVER, beyond_loopback(), slow=True)
    site.run("up", chain, "--backend", "process", "-d")
    run = site.latest
    eventually("both modules run", lambda: site.figures.state == "running")
    assert stat.S_IMODE(run.keys.stat().st_mode) == 0o700
    assert sorted(path.name for path in run.keys.iterdir()) == [
        "bottom.key", "bottom.pub", "top.key", "top.pub",
    ]  # fmt: skip
    assert {stat.S_IMODE(path.stat().st_mode) for path in run.keys.iterdir()} == {0o600}
    secrets = [keys.load(run, module).secret for module in ("bottom", "top")]
    assert len(processes_of(run.root)) >= 3

    endpoint = read_json(run.endpoint("top")) or {}
    context = zmq.Context()
    stranger, plain = context.socket(zmq.DEALER), context.socket(zmq.DEALER)
    stranger.curve_publickey, stranger.curve_secretkey = zmq.curve_keypair()
    stranger.curve_serverkey = endpoint["public_key"].encode()
    try:
        for one in (stranger, plain):
            one.setsockopt(zmq.LINGER, 0)
            one.connect(endpoint["address"])

        def refused() -> dict[str, int]:
            lines = [x for x in read_lines(run.metrics("top")) if x["kind"] == "train"]
            return dict(lines[-1]["refused"]) if lines else {}

        # Of one without encryption libzmq says why, or only that it is gone.
        eventually("the stranger", lambda: "unauthorised" in refused())
        eventually("the other", lambda: refused().keys() & {"encryption", "connection"})
    finally:
        stranger.close()
        plain.close()
        context.term()

    def shown() -> bool:  # from the next report on
        (top,) = [one for one in site.json("status")["modules"] if one["module"] == "top"]
        return "unauthorised" in top["refused"]

    eventually("status shows it", shown)
    assert ": refused (" in run.log("top", 1).read_text()
    before = site.figures.step or 0
    eventually("training goes on", lambda: (site.figures.step or 0) > before)

    for secret in secrets:
        assert traces(secret, run) == []
    site.run("stop")
    assert not run.keys.exists()
    for secret in secrets:
        assert traces(secret, run) == []


def test_modules_by_hand_make_and_remove_their_own_keys(site: Site) -> None:
    write(site, 8, "security: curve")
    folder = site.folder / "by hand"
    workers = [
        site.start("run", module, "--run-dir", folder, "--backend", "process")
        for module in ("top", "bottom")
    ]
    run = RunDir(folder)
    eventually("keys", lambda: len(list(run.keys.glob("*.pub"))) == 2)
    for worker in workers:
        _, err = worker.communicate(timeout=120)
        assert worker.returncode == 0, err
    assert not run.keys.exists()


def test_modules_that_disagree_about_encryption(site: Site) -> None:
    """One that encrypts, one that does not: an error at the deadline, that says so."""
    write(site, 8, "security: curve")
    folder = site.folder / "by hand"
    # the first one makes the run; the second one gets a spec of its own
    top = site.start("run", "top", "--run-dir", folder, "--backend", "process")
    eventually("top listens", lambda: RunDir(folder).endpoint("top").exists())
    spec = read_json(RunDir(folder).spec("bottom")) or {}
    spec["links"] |= {"security": "none", "connect_timeout_s": 5}
    own = site.folder / "bottom.json"
    own.write_text(json.dumps(spec))
    arguments = ["--run", str(folder), "--module", "bottom", "--spec", str(own)]
    bottom = Program("dni_runtime.worker", arguments, site.folder, os.environ)
    site.started.append(bottom)
    _, err = bottom.communicate(timeout=60)
    assert bottom.returncode == 76, err
    assert "cannot agree on encryption" in err
    # "probably" if it was the one to end the handshake
    assert re.search("it (probably )?requires encryption", err)
    top.terminate()
    assert top.wait(30) == 75


def test_modules_without_a_shared_folder(site: Site) -> None:
    """docs/security.md: each one is given the other one's public key as a file."""
    runs = {}
    for worker in workers_of(parse_chain(PAIR % 8 + LINKS % "security: curve")):
        runs[worker.module] = run = RunDir(site.folder / worker.module / "run")
        run.create()
        write_atomic(run.spec(worker.module), worker.to_json())
        keys.make(run, worker.module)
    for module, other in (("top", "bottom"), ("bottom", "top")):
        shutil.copy(runs[module].keys / f"{module}.pub", runs[other].keys)
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    for module, option in (("top", "--listen"), ("bottom", "--connect")):
        arguments = ["--run", str(runs[module].root), "--module", module, option, address]
        site.started.append(Program("dni_runtime.worker", arguments, site.folder, os.environ))
    for process in site.started:
        _, err = process.communicate(timeout=120)
        assert process.returncode == 0, err

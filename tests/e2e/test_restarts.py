"""Real workers that are killed, and runs that end by themselves all the same."""

from __future__ import annotations

import json
import os
import resource
import signal
from collections.abc import Callable
from typing import Any

import pytest

from dni_runtime.files import read_json, write_json
from dni_runtime.measure.figures import ModuleFigures
from dni_runtime.run.documents.state import RunState
from tests.e2e.conftest import (
    CHAIN,
    ENDS,
    FOREVER,
    MODULES,
    PAIR,
    Site,
    eventually,
    processes_of,
)
from tests.integration.link.relay import Relay
from tests.lines import read_lines

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

BATCHES = 23  # in an epoch
QUICK = "restart: {backoff_s: 0.1, snapshot_s: 1}"


def module(site: Site, name: str) -> ModuleFigures:
    """What is known of a module."""
    return next(one for one in site.figures.modules if one.module == name)


def steps(site: Site) -> dict[str, int]:
    return {one.module: one.step or 0 for one in site.figures.modules}


def is_back(site: Site, name: str, restarts: int) -> Callable[[], bool]:
    """Whether a module has been restarted so often, and runs."""

    def back() -> bool:
        now = module(site, name)
        return (now.restarts, now.state) == (restarts, "running")

    return back


def goes_on(site: Site, names: list[str] | None = None) -> Callable[[], bool]:
    """Whether these modules, or all, have trained since this call."""
    before = steps(site)

    def has_gone_on() -> bool:
        now = steps(site)
        return all(now[name] > before[name] + 5 for name in names or before)

    return has_gone_on


def kill(site: Site, name: str) -> None:
    pid = RunState.read(site.latest).modules[name].pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)


def begin(
    site: Site, epochs: int, *settings: str, interface: str | None = None, chain: str = CHAIN
) -> None:
    path = site.write(epochs, *settings, slow=True, chain=chain)
    if interface is not None:
        path.write_text(path.read_text().replace("defaults: {", f"defaults: {{{interface}, ", 1))
    site.run("up", path, "--backend", "process", "-d")
    eventually("all modules train", lambda: min(steps(site).values()) > 5)


def counted(site: Site, name: str) -> dict[int, int]:
    """Batches that a module has acknowledged, by epoch."""
    lines = read_lines(site.latest.metrics(name))
    return {line["epoch"]: line["batches"] for line in lines if line["kind"] == "epoch"}


def happened(site: Site, event: str) -> list[dict[str, Any]]:
    return [line for line in read_lines(site.latest.events) if line["event"] == event]


BOUNDED = "interface: {delayed: {max_late: 1, predict: true, micro_batches: 2}}"


def test_any_module_may_be_killed(site: Site) -> None:
    """Each module in turn, then two neighbours at once: no batch of any epoch is left out.

    Nor does a module wait for ever for a gradient that was lost with another.
    """
    epochs = 20
    begin(site, epochs, QUICK, interface=BOUNDED)
    for names in (["middle"], ["bottom"], ["top"], ["middle", "top"]):
        restarts = {name: module(site, name).restarts + 1 for name in names}
        for name in names:
            kill(site, name)
        for name in names:
            eventually(f"{name} is back", is_back(site, name, restarts[name]), 90)
        eventually("training goes on", goes_on(site))
    site.run("wait", timeout_s=240)
    figures = site.json("status")
    assert (figures["state"], figures["exit_code"]) == ("finished", 0)
    assert [one["restarts"] for one in figures["modules"]] == [1, 2, 2]
    assert [one["state"] for one in figures["modules"]] == ["finished"] * 3
    assert [one["step"] for one in figures["modules"]] == [epochs * BATCHES] * 3
    for name in MODULES:
        assert counted(site, name) == dict.fromkeys(range(1, epochs + 1), BATCHES)
    evaluations = {one["epoch"]: one["samples"] for one in figures["evaluations"]}
    assert evaluations == dict.fromkeys(range(1, epochs + 1), 360)
    assert figures["accuracy"] > 0.9
    assert len(happened(site, "worker_restarting")) == 5
    assert "worker_restarting" in site.run("events").stdout
    assert "resumes at" in site.run("logs", "middle").stdout  # the newest attempt's
    site.run("export", "-o", "model.safetensors")


def test_neighbours_of_a_dead_module_train_on(site: Site) -> None:
    """``continue`` upstream, a replay buffer downstream, over encrypted tcp; both are counted."""
    begin(
        site, FOREVER, "restart: {backoff_s: 4, snapshot_s: 1}",
        "links: {transport: tcp, security: curve, on_loss: continue, replay: 16, window: 2}",
    )  # fmt: skip
    kill(site, "middle")
    eventually("it is being restarted", lambda: module(site, "middle").state == "restarting")
    eventually("upstream trains on", goes_on(site, ["bottom"]))
    eventually("it is back", is_back(site, "middle", 1))
    eventually("all train", goes_on(site))
    bottom, middle, top = site.json("status")["modules"]
    assert bottom["missed"] > 0
    assert bottom["replayed"] == top["missed"] == 0
    assert top["replayed"] > 0
    assert middle["step"] < bottom["step"]
    assert middle["step"] + bottom["missed"] + 50 > bottom["step"]
    assert site.json("stop")["state"] == "stopped"


def test_a_module_is_started_again_by_hand(site: Site) -> None:
    epochs = 12
    begin(site, epochs)
    for name in ("bottom", "middle"):
        site.run("restart", name)
        eventually("it is back", is_back(site, name, 1))
    site.run("restart", "nobody", expect=64)
    site.run("wait", timeout_s=240)
    figures = site.json("status")
    assert [one["restarts"] for one in figures["modules"]] == [1, 1, 0]
    assert sum(one["gaps"] for one in figures["modules"]) == 0  # nothing is lost
    assert not [one for one in happened(site, "worker_ended") if one["state"] == "failed"]
    for name in MODULES:
        assert counted(site, name) == dict.fromkeys(range(1, epochs + 1), BATCHES)
    site.run("restart", "bottom", expect=64)


def test_workers_go_on_without_their_supervisor(site: Site) -> None:
    begin(site, FOREVER, chain=PAIR)
    supervisor = RunState.read(site.latest).pid
    os.kill(supervisor, signal.SIGKILL)
    assert site.json("status")["state"] == "unsupervised"
    eventually("they go on", goes_on(site))
    assert "already" in site.run("up", "--run-dir", site.latest.root, expect=64).stderr
    site.run("restart", "top", expect=64)
    site.run("resume", "-d")  # stops them after a common checkpoint, and goes on from there
    eventually("all train", goes_on(site))
    assert site.json("status")["attempt"] == 2
    supervisor = RunState.read(site.latest).pid
    os.kill(supervisor, signal.SIGSTOP)
    stop = site.start("stop", "--json")
    eventually("the supervisor is asked", site.latest.stop_request.exists)
    os.kill(supervisor, signal.SIGKILL)
    ended = json.loads(stop.communicate(timeout=120)[0])
    assert ended == {"run": site.latest.root.name, "state": "stopped", "exit_code": 75}
    assert stop.returncode == 0
    assert not processes_of(site.folder)


def test_workers_come_to_the_end_without_their_supervisor(site: Site) -> None:
    begin(site, 8, chain=PAIR)
    os.kill(RunState.read(site.latest).pid, signal.SIGKILL)
    site.run("wait", timeout_s=240)
    assert site.json("status")["state"] == "finished"


def test_a_full_disk_does_not_end_the_run(site: Site) -> None:
    """Files of the tail cannot grow beyond a page, which its report fits in: it says so."""
    begin(site, FOREVER, "restart: {snapshot_s: 1}", chain=PAIR)
    site.wait_for_checkpoint(ENDS)
    pid = RunState.read(site.latest).modules["top"].pid
    assert pid is not None
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
    eventually("it says so", lambda: bool(module(site, "top").warning))
    assert "could not be written" in site.run("status").stderr
    eventually("training goes on", goes_on(site, ["bottom"]))
    eventually("an event says so", lambda: bool(happened(site, "worker_warning")))
    assert {event["module"] for event in happened(site, "worker_warning")} == {"top"}
    newest = site.cuts(ENDS)[-1]
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
    eventually("a new checkpoint", lambda: site.cuts(ENDS)[-1] > newest)
    eventually("all is well", lambda: not module(site, "top").warning)
    assert module(site, "top").restarts == 0
    site.run("stop")


HANGS = """\
import time
from pathlib import Path
from torch import nn

class Pause(nn.Module):
    def forward(self, h):
        hang = Path(%r)
        if self.training:
            time.sleep(0.03)
            if hang.exists():
                hang.unlink()
                time.sleep(1e6)
        return h
"""


def test_what_hangs_is_named_and_started_again(site: Site) -> None:
    """A layer that does not come back, a stopped process, a link that swallows what it is given."""
    chain = site.write(
        FOREVER, "links: {transport: tcp}", "checkpoint: {every_epochs: 0}",
        "restart: {backoff_s: 0.1, snapshot_s: 1, on_stall: restart, stall_s: 3}", slow=True,
    )  # fmt: skip
    hang = site.folder / "hang"
    (site.folder / "pause.py").write_text(HANGS % str(hang))
    site.run("up", chain, "--backend", "process", "-d")
    eventually("all modules train", lambda: min(steps(site).values()) > 5)

    def stalls(*words: str) -> None:
        def stalled() -> bool:
            now = RunState.read(site.latest)
            return now.phase == "stalled" and all(word in str(now.error) for word in words)

        eventually(f"it has stalled: {words}", stalled)
        eventually("it goes on", lambda: RunState.read(site.latest).phase == "running")
        eventually("training goes on", goes_on(site))

    hang.touch()
    stalls("'bottom'", "one batch")
    record = read_json(site.latest.endpoint("top")) or {}
    with Relay(record["address"]) as relay:
        write_json(site.latest.endpoint("top"), record | {"address": relay.address})
        stopped = RunState.read(site.latest).modules["middle"].pid
        assert stopped is not None
        os.kill(stopped, signal.SIGSTOP)
        stalls("'middle'", "not reported")
        assert relay.down  # the next start of the module has found it
        relay.swallows = True
        stalls("'middle'", "'top'", "the link")
    assert {one["module"] for one in happened(site, "run_stalled")} == {"bottom", "middle", "top"}
    assert site.json("stop")["state"] == "stopped"
    assert len(site.cuts()) == 1  # at which all have left, as a head that was restarted told them

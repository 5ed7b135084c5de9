"""Rendered pods train, and answer: their containers as processes here."""

from __future__ import annotations

import json
import socket
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dni_runtime.run.cuts import complete_cuts
from dni_runtime.run.documents.reports import Report
from dni_runtime.run.rundir import RunDir
from dni_runtime.worker.start import _number_of_start
from tests.conftest import eventually
from tests.e2e.asking import compare
from tests.e2e.conftest import ENDS, PAIR, PAUSE, PAUSES, Site
from tests.e2e.pods import JOB_UID, Pods, pods_of

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

EPOCHS = 8


@pytest.fixture
def pods(site: Site, tmp_path: Path) -> dict[str, dict[str, Any]]:
    """The pods of two modules whose links are encrypted."""
    (site.folder / "pause.py").write_text(PAUSE)
    chain = site.folder / "chain.yaml"
    text = PAIR % EPOCHS + "links: {security: curve}\nrestart: {snapshot_s: 0.5}\n"
    chain.write_text(
        text.replace(
            "{in_features: 64, out_features: 10}}",
            "{in_features: 64, out_features: 10}}, " + PAUSES,
        )
    )
    site.run(
        "render", "kubernetes", chain, "-o", "k8s", "--image", "localhost/dni:1", "--name", "run"
    )
    host = tmp_path / "host"
    host.mkdir()
    return pods_of(site.folder / "k8s", host, {"POD_IP": "127.0.0.1"})


@pytest.fixture
def played(pods: dict[str, dict[str, Any]]) -> Iterator[Pods]:
    it = Pods(pods)
    yield it
    it.end()


def run_of(pods: dict[str, dict[str, Any]]) -> RunDir:
    (runs,) = (v["hostPath"]["path"] for v in pods["top"]["spec"]["volumes"] if v["name"] == "runs")
    return RunDir(Path(runs) / "run")


@pytest.mark.parametrize("victim", ENDS)
def test_a_pod_that_dies_is_replaced_alone(
    victim: str, pods: dict[str, dict[str, Any]], played: Pods
) -> None:
    run = run_of(pods)
    for name in ENDS:
        played.start(name)

    def step(name: str) -> int:
        return Report.read(run.worker(name)).step or 0

    eventually(
        "a module's state is saved", lambda: run.snapshot(victim).exists() and step("top") > 5
    )
    before = step(victim)
    played.kill(victim)
    played.start(victim)  # as the Job does
    for name in ENDS:
        assert played.processes[name].wait(120) == 0
    report = Report.read(run.worker(victim))
    assert (report.attempt, report.state) == (2, "finished")
    assert report.chain_start is not None
    assert (report.chain_start.first, report.chain_start.cut) == (1, 0)
    assert report.chain_start.number == _number_of_start(JOB_UID)
    assert "resumes at" in run.log(victim, 2).read_text()
    assert Report.read(run.worker(next(one for one in ENDS if one != victim))).attempt == 1
    assert (report.step or 0) > before
    assert "encrypted" in run.log("top", 1).read_text()
    assert not run.keys.exists(), "the keys are the Secrets'"
    assert complete_cuts(run, ENDS)


@pytest.mark.parametrize("job", ["the same", "another"])
def test_a_chain_that_was_stopped_goes_on(
    job: str, pods: dict[str, dict[str, Any]], played: Pods
) -> None:
    """After a node was drained, or ``kubectl delete`` and ``apply``: with what all have saved."""
    run = run_of(pods)
    for name in ENDS:
        played.start(name)
    eventually("an epoch", lambda: complete_cuts(run, ENDS), 120)
    played.processes["bottom"].terminate()  # the whole chain stops
    for name in ENDS:
        assert played.processes[name].wait(60) == 75
    (cut, *_) = sorted(complete_cuts(run, ENDS), reverse=True)
    steps = {name: Report.read(run.worker(name)).step or 0 for name in ENDS}
    if job == "another":
        for pod in pods.values():
            (worker,) = pod["spec"]["containers"]
            worker["args"][-1] = JOB_UID.replace("7", "8")
    for name in ENDS:
        played.start(name)
    for name in ENDS:
        assert played.processes[name].wait(120) == 0
        report = Report.read(run.worker(name))
        assert (report.state, report.attempt) == ("finished", 2)
        assert (report.step or 0) > steps[name] > 0
        assert report.chain_start is not None
        assert (report.chain_start.first, report.chain_start.cut) == (2, cut)


def test_a_volume_with_another_run_is_refused(
    pods: dict[str, dict[str, Any]], played: Pods, capfd: pytest.CaptureFixture[str]
) -> None:
    run = run_of(pods)
    run.create()
    run.record.write_text("{}")
    run.spec("top").write_text("another")
    run.spec("bottom").write_text("another")
    played.start("top")
    assert played.processes["top"].wait(60) == 64
    assert "holds a run of another chain file" in capfd.readouterr().err


class Service:
    """The rendered pods of a trained chain, which answer."""

    def __init__(self, site: Site, host: Path, *options: str, ip: str | None = None) -> None:
        site.write(2, "links: {security: curve}", chain=PAIR)
        site.run("up", "--backend", "process", "--name", "first")
        site.run("exits", "first")
        site.run("export", "first", "-o", "model.safetensors")
        self.host = "127.0.0.1" if ip is None else f"[{ip}]"
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        render = ["render", "kubernetes", "--serve", "first", "-o", "k8s", "--name", "answers"]
        render += ["--image", "localhost/dni:1", "--port", str(self.port)]
        site.run(*render, *options)
        host.mkdir()
        environ = None if ip is None else {"POD_IP": ip}  # of all; by default each has its own
        self.pods = Pods(pods_of(site.folder / "k8s", host, environ))
        self.model = site.folder / "model.safetensors"
        token = self.pods.folders("front")["/dni/token"] / "token"
        self.headers = {"Authorization": f"Bearer {token.read_text()}"}

    def health(self, which: str) -> int:
        """The status that the kubelet gets; 0: none."""
        try:
            with urllib.request.urlopen(f"http://{self.host}:{self.port}/v2/health/{which}") as got:
                return int(got.status)
        except urllib.error.HTTPError as error:
            return error.code
        except OSError:
            return 0

    def ask(self) -> None:
        """Compare answers with the exported network."""
        compare(f"http://127.0.0.1:{self.port}", "digits", self.model, headers=self.headers)


@pytest.fixture
def service(site: Site, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Service]:
    it = Service(site, tmp_path / "host", *request.param)
    yield it
    it.pods.end()


@pytest.mark.parametrize("service", [["--exit-confidence", "0", "--preprocess"]], indirect=True)
def test_samples_leave_early_and_raw_ones_are_prepared(service: Service) -> None:
    for name in ("front", "bottom", "top"):
        service.pods.start(name)
    eventually("it answers", lambda: service.health("ready") == 200, 60)
    images = {"shape": [9, 1, 8, 8], "data": [n % 17 for n in range(9 * 64)]}
    rows = {"name": "input", "datatype": "UINT8", **images}
    asked = urllib.request.Request(
        f"http://127.0.0.1:{service.port}/v2/models/digits/infer",
        json.dumps({"inputs": [rows]}).encode(), service.headers,
    )  # fmt: skip
    with urllib.request.urlopen(asked) as reply:
        answer = json.load(reply)
    assert answer["parameters"] == {"exit": "bottom"}


@pytest.mark.parametrize("service", [["--replicas", "bottom=2"]], indirect=True)
def test_pods_of_a_service_answer_and_come_back(service: Service) -> None:
    pods = service.pods
    pods.start("front")
    eventually("the front runs", lambda: service.health("live") == 200, 60)
    assert service.health("ready") == 503
    for name in ("top", "bottom.1", "bottom.2"):
        pods.start(name)
    eventually("a batch has gone through all", lambda: service.health("ready") == 200, 60)
    service.ask()
    with pytest.raises(urllib.error.HTTPError, match="401"):
        urllib.request.urlopen(f"http://127.0.0.1:{service.port}/v2/models/digits")
    for victim, stays in (("top", True), ("bottom.1", False), ("front", False)):
        pods.kill(victim)
        if not stays:  # another pod, perhaps on another node
            pods.forget(victim)
        pods.start(victim)
        eventually(f"{victim} is back", lambda: service.health("live") == 200, 60)
        eventually("it answers", lambda: service.health("ready") == 200, 60)
        service.ask()
    run = RunDir(pods.folders("top")["/dni/runs"] / "answers")
    assert "encrypted" in next(run.log("top", 0).parent.glob("top.*.log")).read_text()
    for name in ("front", "top"):
        pods.processes[name].terminate()
    assert pods.processes["front"].wait(60) == 0
    assert pods.processes["top"].wait(20) == 75


def test_pods_with_ipv6_alone_answer(site: Site, tmp_path: Path) -> None:
    """Without brackets an address is to libzmq what pods' names are there: one to look up."""
    if not socket.has_dualstack_ipv6():
        pytest.skip("this host has no IPv6")
    service = Service(site, tmp_path / "host", ip="::1")
    try:
        for name in ("front", *ENDS):
            service.pods.start(name)
        eventually("a batch has gone through all", lambda: service.health("ready") == 200, 60)
        service.ask()  # by IPv4: kubectl port-forward takes either one
    finally:
        service.pods.end()

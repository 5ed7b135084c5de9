"""Rendered pods in rootless Podman, from images of a registry: they train, and they answer.

The containers' user is 0, which is ours outside; Podman 4.3 knows neither Secrets nor ConfigMaps as
volumes, so these are folders (``tests/e2e/pods.py``). The network is the host's.
"""

from __future__ import annotations

import json
import shutil
import signal
import socket
import subprocess
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from dni_runtime.image.apptainer import Apptainer
from dni_runtime.link.address import addresses
from dni_runtime.run.documents.reports import Report
from dni_runtime.run.rundir import RunDir
from tests.conftest import eventually
from tests.e2e.asking import compare
from tests.e2e.conftest import ENDS, PAIR, PAUSE, PAUSES, need, run, tool
from tests.e2e.pods import pods_of
from tests.e2e.test_release import Registry, Site

__all__ = ["tool"]

pytestmark = [pytest.mark.apptainer, pytest.mark.e2e, pytest.mark.timeout(900)]

IMAGE = f"image: {{torch: 'torch=={version('torch').split('+')[0]}'}}\n"
CHAIN = PAIR % 2 + "links: {security: curve}\nrestart: {snapshot_s: 0.5}\n" + IMAGE


class Podman:
    """Pods in a store of containers of their own."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._argv = [
            need("podman"), "--root", str(folder / "root"), "--runroot", str(folder / "run"),
            "--tmpdir", str(folder / "tmp"), "--runtime", need("runc"), "--log-level", "error",
            "--cgroup-manager", "cgroupfs", "--events-backend", "file",
            "--storage-driver", "overlay",
        ]  # fmt: skip

    def __call__(self, *words: str | Path) -> str:
        done = run([*self._argv, *words])
        assert done.returncode == 0, f"podman {words}: {done.stderr}"
        return done.stdout

    def play(self, pod: dict[str, Any]) -> None:
        """Start a pod; one that was there is replaced, as a Job or a StatefulSet does."""
        spec = dict(pod["spec"])
        for what in ("securityContext", "topologySpreadConstraints", "affinity"):
            spec.pop(what, None)
        (container,) = spec["containers"]
        left = ("ports", "resources")  # the network is the host's; limits need a cgroup
        ours = {k: v for k, v in container.items() if k not in left and "Probe" not in k}
        ours["securityContext"] = {"runAsUser": 0, "runAsGroup": 0}
        # What fails here is seen; a kubelet would start a service's container again.
        spec |= {"containers": [ours], "hostNetwork": True, "restartPolicy": "Never"}
        file = self._folder / f"{pod['metadata']['name']}.yaml"
        file.write_text(json.dumps(pod | {"spec": spec}))
        self("kube", "play", "--replace", "--tls-verify=false", file)

    def kill(self, name: str) -> None:
        self("kill", "--signal", "KILL", f"{name}-worker")
        assert self.wait(name) == 128 + signal.SIGKILL

    def wait(self, name: str) -> int:
        """Wait until a pod has ended; return its exit code."""
        return int(self("wait", f"{name}-worker"))


@pytest.fixture(scope="module")
def podman() -> Iterator[Podman]:
    folder = Path(tempfile.mkdtemp(prefix="p"))  # a path for sockets: short
    it = Podman(folder)
    yield it
    it("pod", "rm", "--all", "--force", "--time", "0")
    # Files of other users of the container are ours only in its namespace.
    subprocess.run([need("podman"), "unshare", "rm", "-rf", folder], check=True)


@pytest.fixture(scope="module")
def site(tool: Apptainer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A trained and released chain of two modules."""
    folder = tmp_path_factory.mktemp("podman")
    (folder / "chain.yaml").write_text(
        CHAIN.replace(
            "{in_features: 64, out_features: 10}}",
            "{in_features: 64, out_features: 10}}, " + PAUSES,
        )
    )
    (folder / "pause.py").write_text(PAUSE.replace("0.03", "0.3"))
    site = Site(folder).at("home")
    site.run("up", "--backend", "process", "--name", "trained")
    site.run("export", "trained", "-o", "model.safetensors")
    site.run("build")
    site.run("release", "trained", "--name", "pair", "--version", "1.0", "--unsigned")
    yield site
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def images(site: Site, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """Options that name the images, in a registry."""
    with Registry(tmp_path_factory.mktemp("registry")).serving() as hub:
        yield site.run("push", "pair:1.0", f"oci://{hub.host}/pair", "--oci").stdout.split()


def test_modules_train_to_their_end(
    site: Site, images: list[str], podman: Podman, tmp_path: Path
) -> None:
    site.run("render", "kubernetes", "-o", tmp_path / "k8s", "--name", "run", *images)
    (tmp_path / "host").mkdir()
    # Pods have names of their own, so workers do not accept loopback.
    ip = next(str(ip) for _, ip in addresses() if ip.version == 4 and not ip.is_loopback)
    pods = pods_of(tmp_path / "k8s", tmp_path / "host", {"POD_IP": ip})
    directory = RunDir(tmp_path / "host" / "runs" / "run")
    for name in ENDS:
        podman.play(pods[name])

    def saved() -> bool:
        return directory.snapshot("top").exists()

    eventually("a module's state is saved", saved, 120)
    podman.kill("top")
    podman.play(pods["top"])
    for name, attempt in zip(ENDS, (1, 2), strict=True):
        assert podman.wait(name) == 0
        report = Report.read(directory.worker(name))
        assert (report.state, report.attempt) == ("finished", attempt)
    assert "encrypted" in directory.log("top", 2).read_text()


def test_a_released_chain_answers(
    site: Site, images: list[str], podman: Podman, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(site.folder)  # the exported network has a class of the user's
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    serve = ["--serve", "pair:1.0", "--port", str(port), "--name", "pair", *images]
    site.run("render", "kubernetes", "-o", tmp_path / "k8s", *serve)
    (tmp_path / "host").mkdir()
    pods = pods_of(tmp_path / "k8s", tmp_path / "host")
    token = (tmp_path / "host" / "front-token" / "token").read_text()

    def ready() -> bool:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/v2/health/ready").close()
        except OSError:
            return False
        return True

    for name in ("front", *ENDS):
        podman.play(pods[name])
    for victim in ("", *ENDS, "front"):
        if victim:
            podman.kill(victim)
            podman.play(pods[victim])
        eventually("it is ready", ready, 120)
        compare(
            f"http://127.0.0.1:{port}",
            "digits",
            site.folder / "model.safetensors",
            headers={"Authorization": f"Bearer {token}"},
        )


def test_others_run_them(images: list[str], podman: Podman) -> None:
    address = images[0].rpartition("=")[2]
    podman("run", "--rm", "--network=none", "--tls-verify=false", address, "--selftest")
    argv = ["apptainer", "run", "--no-https", f"docker://{address}", "--selftest"]
    subprocess.run(argv, check=True, timeout=800)  # it makes a SIF file of the image first

"""What ``dnictl render kubernetes`` writes, checked by the schemas of Kubernetes and JobSet."""

from __future__ import annotations

import copy
import json
import re
import shutil
import stat
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml
import zmq

from dni_runtime.core.step import ModuleStep
from dni_runtime.plan.create import create_run
from dni_runtime.plan.prepare import prepare
from dni_runtime.run.keys import KnownKeys
from dni_runtime.run.record import Record
from dni_runtime.worker.checkpoint import copy_state, write_part
from tests.unit.cli.conftest import Dnictl, WriteChain
from tests.unit.data.conftest import IdxFolder

IMAGE = "registry.example/digits@sha256:" + 64 * "a"
VERSIONS = [f"1.{minor}" for minor in range(31, 38)]
JOB_SET = json.loads((Path(__file__).parents[2] / "data" / "jobset.json").read_text())
TEMPLATES = [
    "mlp", "cnn", "fashion-mlp", "fashion-cdni", "lm", "resnet", "vit", "gpt", "two-tower",
]  # fmt: skip

Objects = list[dict[str, Any]]


def problems(objects: Objects, versions: list[str] = VERSIONS) -> Iterator[str]:
    """What is wrong with objects; also a kind that no schema knows."""
    for one in objects:
        checked = [one]
        if one.get("kind") == "JobSet":
            yield from (
                e.message for e in jsonschema.Draft202012Validator(JOB_SET).iter_errors(one)
            )
            checked = [
                {"apiVersion": "batch/v1", "kind": "Job", **job["template"]}
                for job in one["spec"]["replicatedJobs"]
            ]
        for job in checked:
            for version in versions:
                try:
                    kubernetes_validate.validate(job, version, strict=True)
                except (
                    kubernetes_validate.ValidationError,
                    kubernetes_validate.SchemaNotFoundError,
                ) as error:
                    yield f"{version}: {error}"


def read(folder: Path) -> dict[str, Objects]:
    return {path.name: list(yaml.safe_load_all(path.read_text())) for path in folder.glob("*.yaml")}


def every(files: dict[str, Objects]) -> Objects:
    return [one for objects in files.values() for one in objects]


def pod(files: dict[str, Objects], module: int = 0) -> dict[str, Any]:
    """The pod of a module."""
    jobs = files["train.yaml"]
    if jobs[0]["kind"] == "JobSet":
        jobs = [one["template"] for one in jobs[0]["spec"]["replicatedJobs"]]
    spec = jobs[module]["spec"]["template"]["spec"]
    assert isinstance(spec, dict)
    return spec


@pytest.mark.parametrize("template", TEMPLATES)
def test_templates(template: str, dnictl: Dnictl, folder: Path) -> None:
    assert dnictl("init", "--template", template).code == 0
    arguments: tuple[str | Path, ...] = ()
    if template.startswith("fashion"):
        IdxFolder(folder / "images", train=2100, evaluation=500, gz=True)
        arguments = ("--data", folder / "images", "--data-claim", "images")
    for out, more in (
        ("set", ("--queue", "gpus", "--namespace", "dni")),
        ("jobs", ("--no-jobset",)),
    ):
        done = dnictl("render", "kubernetes", "-o", out, "--image", IMAGE, *arguments, *more)
        assert done.code == 0, done.err
        assert "not pinned" not in done.err
        objects = every(read(folder / out))
        assert {one["kind"] for one in objects} >= {"ConfigMap", "NetworkPolicy", "Secret"}
        assert list(problems(objects)) == []
    release_of(folder)
    done = dnictl("render", "kubernetes", "--serve", "one", "-o", "serve", "--image", IMAGE)
    assert done.code == 0, done.err
    objects = every(read(folder / "serve"))
    assert {one["kind"] for one in objects} == {
        "ConfigMap", "Secret", "NetworkPolicy", "StatefulSet", "Deployment", "Service",
    }  # fmt: skip
    assert list(problems(objects)) == []


def release_of(folder: Path) -> None:
    """Make a run of the chain, with the weights that it begins with, and call it a release."""
    data = folder / "images"
    prepared = prepare(folder / "chain.yaml", data=data if data.is_dir() else None, tries=False)
    run = create_run(folder / "runs" / "one", prepared, backend="process")
    for worker in prepared.workers:
        tensors, document = copy_state(ModuleStep(worker))
        write_part(run, worker.module, (tensors, document | {"cut": 5}))
    record = Record.read(run.root)
    record.model_copy(update={"release": "one:1.2.0"}).write(run.record)


@pytest.fixture
def rendered(dnictl: Dnictl, write_chain: WriteChain, folder: Path) -> dict[str, Objects]:
    """Two modules, of which the first has two replicas."""
    write_chain(("name: bottom", "name: bottom\n    replicas: 2"))
    done = dnictl("render", "kubernetes", "-o", "k8s", "--image", IMAGE, "--user", 1234)
    assert done.code == 0, done.err
    return read(folder / "k8s")


def _job(files: dict[str, Objects]) -> Any:
    return files["train.yaml"][0]["spec"]["replicatedJobs"][0]["template"]["spec"]


MISTAKES: dict[str, Callable[[dict[str, Objects]], object]] = {
    "kind": lambda f: f["train.yaml"][0].update(kind="JobSets"),
    "version": lambda f: f["train.yaml"][0].update(apiVersion="jobset.x-k8s.io/v1alpha1"),
    "field of the set": lambda f: f["train.yaml"][0]["spec"].update(replicatedJob=[]),
    "strategy": lambda f: f["train.yaml"][0]["spec"]["failurePolicy"].update(restartStrategy="All"),
    "action": lambda f: f["train.yaml"][0]["spec"]["failurePolicy"]["rules"][0].pop("action"),
    "resources": lambda f: pod(f)["containers"][0].update(resourcess={}),
    "number": lambda f: _job(f).update(completions="two"),
    "rule": lambda f: _job(f)["podFailurePolicy"]["rules"][0].pop("action"),
    "mount": lambda f: pod(f)["containers"][0]["volumeMounts"][0].pop("mountPath"),
    "mode": lambda f: pod(f)["volumes"][-1]["secret"].update(defaultMode="0400"),
    "port": lambda f: f["network.yaml"][0]["spec"]["ingress"][0].update(port=1),
    "secret": lambda f: f["keys.yaml"][0].update(stringData=["a"]),
    "claim": lambda f: f["volume.yaml"][0]["spec"].update(accessModes="ReadWriteMany"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_found(mistake: str, rendered: dict[str, Objects]) -> None:
    assert list(problems(every(rendered), ["1.37"])) == []
    planted = copy.deepcopy(rendered)
    MISTAKES[mistake](planted)
    assert planted != rendered
    assert list(problems(every(planted), ["1.37"])) != []


def test_what_pods_are_told(rendered: dict[str, Objects], folder: Path) -> None:
    job, worker = _job(rendered), pod(rendered)["containers"][0]
    assert (job["completions"], job["parallelism"], job["completionMode"]) == (2, 2, "Indexed")
    assert "--module bottom --by-rank" in " ".join(worker["args"])
    assert worker["args"][-2:] == ["--start", "$(JOB_UID)"]
    assert pod(rendered)["securityContext"]["fsGroup"] == 1234
    outcomes = {
        code: rule["action"]
        for rule in job["podFailurePolicy"]["rules"]
        for code in rule.get("onExitCodes", {}).get("values", ())
    }
    assert outcomes == {68: "Ignore", 75: "Ignore"} | dict.fromkeys(
        (64, 65, 66, 69, 78, 79), "FailJob"
    )
    volumes = {one["name"]: one for one in pod(rendered)["volumes"]}
    items = volumes["given"]["configMap"]["items"]
    (given,) = rendered["run.yaml"]
    assert {one["key"] for one in items} == given["data"].keys()
    assert {"run.json", "chain.yaml", "specs/bottom.2.json"} <= {one["path"] for one in items}
    assert stat.S_IMODE((folder / "k8s" / "keys.yaml").stat().st_mode) == 0o600


def test_a_module_gets_its_own_secrets_alone(rendered: dict[str, Objects], tmp_path: Path) -> None:
    bottom, top = rendered["keys.yaml"]
    assert set(bottom["stringData"]) == {
        "bottom.1.key", "bottom.2.key", "bottom.1.pub", "bottom.2.pub", "top.pub",
    }  # fmt: skip
    assert set(top["stringData"]) == {"top.key", "bottom.1.pub", "bottom.2.pub"}
    for name, text in top["stringData"].items():
        (tmp_path / name).write_text(text)
    keys = KnownKeys.read(tmp_path, "top")
    assert zmq.curve_public(keys.pair.secret) == keys.pair.public
    assert keys.public("bottom.2") == bottom["stringData"]["bottom.2.key"].split()[0].encode()


def test_neighbours_alone_reach_a_module(dnictl: Dnictl, folder: Path) -> None:
    assert dnictl("init", "--template", "mlp").code == 0
    assert dnictl("render", "kubernetes", "-o", "k8s", "--image", IMAGE).code == 0
    component = "app.kubernetes.io/component"
    peers = {
        policy["metadata"]["labels"][component]: {
            peer["podSelector"]["matchLabels"][component]
            for rule in policy["spec"]["ingress"]
            for peer in rule["from"]
        }
        for policy in read(folder / "k8s")["network.yaml"]
    }
    assert peers == {
        "bottom": {"lower"}, "lower": {"bottom", "upper"}, "upper": {"lower", "top"},
        "top": {"upper"},
    }  # fmt: skip


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
def test_names_that_kubectl_could_take_for_other_values(
    dnictl: Dnictl, write_chain: WriteChain, folder: Path
) -> None:
    path, names = write_chain(), {"bottom": "y", "top": "1e3"}
    for module, name in names.items():
        path.write_text(path.read_text().replace(f"name: {module}", f"name: '{name}'"))
    for out, more in (("set", ()), ("jobs", ("--no-jobset",))):
        done = dnictl("render", "kubernetes", "-o", out, "--image", IMAGE, *more)
        assert done.code == 0, done.err
        for file in (folder / out).glob("*.yaml"):
            told = subprocess.run(
                ["kubectl", "label", "--local", "-f", file, "its=own", "-o", "json"],
                check=True, capture_output=True, text=True,
            ).stdout  # fmt: skip
            assert {*re.findall(r'"app.kubernetes.io/component": (.*?),?\n', told)} <= {
                '"y"', '"1e3"'
            }  # fmt: skip
            assert not re.findall(r'"name": [^"{]', told)


def test_modules_that_restart_together(
    dnictl: Dnictl, write_chain: WriteChain, folder: Path
) -> None:
    write_chain(("name: bottom", "name: bottom\n    interface: exact"))
    command = ("render", "kubernetes", "--image", IMAGE, "-o")
    done = dnictl(*command, "jobs", "--no-jobset")
    assert done.code == 64
    assert "restart together" in done.err
    done = dnictl(*command, "set")
    assert done.code == 0
    policy = read(folder / "set")["train.yaml"][0]["spec"]["failurePolicy"]
    assert f"together, at most {policy['maxRestarts']} times ('restart.limit'); a drain" in done.err
    job = _job(read(folder / "set"))
    assert job["backoffLimit"] == 0
    assert [rule["action"] for rule in job["podFailurePolicy"]["rules"]] == ["FailJob"]


def test_a_pod_sees_its_own_gpus_alone(
    dnictl: Dnictl, write_chain: WriteChain, folder: Path
) -> None:
    write_chain(("name: bottom", "name: bottom\n    device: cuda:1"))
    done = dnictl("render", "kubernetes", "--image", IMAGE, "-o", "k8s")
    assert done.code == 64
    assert "'cuda:1'" in done.err
    assert "write 'device: cuda'" in done.err


@pytest.mark.parametrize(
    ("change", "arguments", "words"),
    [
        (None, ("--image", "a b"), "'a b' is not an image"),
        (None, ("--image", "bottom=x/y:1"), "no image is named for module 'top'"),
        (None, ("--image", "low=x/y:1"), "has no module 'low'"),
        (None, ("--image", IMAGE, "--image", IMAGE), "there are two"),
        (None, ("--image", IMAGE, "--name", "Digits"), "is no name for"),
        (None, ("--image", IMAGE, "--name", 60 * "a"), "45 at most"),
        (None, ("--image", IMAGE, "--no-jobset", "--queue", "a"), "admitted one by one"),
        ("mounts: [{source: /tmp}]", ("--image", IMAGE), "which pods do not see"),
        ("callbacks: [{import: 'a:B'}]", ("--image", IMAGE), "callbacks"),
    ],
)
def test_what_cannot_be_rendered(
    change: str | None, arguments: tuple[str, ...], words: str, dnictl: Dnictl,
    write_chain: WriteChain, folder: Path,
) -> None:  # fmt: skip
    path = write_chain()
    if change is not None:
        path.write_text(path.read_text() + change + "\n")
    done = dnictl("render", "kubernetes", "-o", "k8s", *arguments)
    assert done.code in (64, 78)
    assert words in done.err
    assert not (folder / "k8s").exists()


@pytest.fixture
def service(dnictl: Dnictl, folder: Path) -> dict[str, Objects]:
    """The service of a release of four modules, of which one has two replicas."""
    assert dnictl("init", "--template", "mlp").code == 0
    release_of(folder)
    images = [f"--image={name}=x/{name}:1" for name in ("bottom", "lower", "upper", "top")]
    render = ("render", "kubernetes", "--serve", "one", "-o", "k8s", "--name", "answers")
    done = dnictl(*render, "--replicas", "lower=2", *images)
    assert done.code == 0, done.err
    return read(folder / "k8s")


def test_what_a_service_has(service: dict[str, Objects]) -> None:
    kinds = {(one["kind"], one["metadata"]["name"]): one for one in every(service)}
    (given,) = service["run.yaml"]
    texts = {key.partition("-")[2]: text for key, text in given["data"].items()}
    assert not any("safetensors" in key for key in texts), "the images have the weights"
    endpoint = json.loads(texts["endpoints_lower.2.json"])
    (address,) = endpoint["further"].values()
    assert re.fullmatch(r"tcp://answers-lower-1\.answers-lower:74\d\d", address)
    lower = kinds["StatefulSet", "answers-lower"]["spec"]
    assert (lower["replicas"], lower["serviceName"]) == (2, "answers-lower")
    (container,) = lower["template"]["spec"]["containers"]
    assert container["image"] == "x/lower:1"
    assert "--module lower --by-rank --resume own" in " ".join(container["args"])
    names = kinds["Service", "answers-lower"]["spec"]
    assert (names["clusterIP"], names["publishNotReadyAddresses"]) == ("None", True)
    front = kinds["Deployment", "answers-front"]["spec"]
    assert (front["replicas"], front["strategy"]) == (1, {"type": "Recreate"})
    (container,) = front["template"]["spec"]["containers"]
    probes = {key: value["httpGet"] for key, value in container.items() if "Probe" in key}
    assert probes == {
        "startupProbe": {"path": "/v2/health/live", "port": 8000},
        "livenessProbe": {"path": "/v2/health/live", "port": 8000},
        "readinessProbe": {"path": "/v2/health/ready", "port": 8000},
    }
    asked = kinds["Service", "answers"]["spec"]
    assert asked["ports"] == [{"port": 8000, "protocol": "TCP"}]
    assert asked["selector"] == front["selector"]["matchLabels"]
    settings = json.loads(texts["front.json"])
    assert (settings["version"], settings["modules"]) == ("1.2.0", 5)
    assert settings["http"]["token_file"] == "/dni/token/token"
    assert len(kinds["Secret", "answers-token"]["stringData"]["token"]) == 64
    keys = kinds["Secret", "answers-front-keys"]["stringData"]
    assert set(keys) == {"front.key", "bottom.pub", "top.pub"}
    policy = kinds["NetworkPolicy", "answers-front"]["spec"]
    assert {"ports": [{"port": 8000, "protocol": "TCP"}]} in policy["ingress"]
    assert {"ports": [{"port": 8000, "protocol": "TCP"}]} not in kinds[
        "NetworkPolicy", "answers-top"
    ]["spec"]["ingress"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--queue", "gpus"), "--queue is not for this"),
        (("--replicas", "low=2"), "there is no module 'low'"),
        (("--image", "low=x/y:1"), "has no module 'low'"),
        (("--from", "77"), "77"),
        (("--exit-accuracy", "1"), "have not been measured"),
        (("--exit-accuracy", "1", "--exit-confidence", "0.9"), "exclude each other"),
        (("--token-file", "token"), "is open to others (mode 0644)"),
    ],
)
def test_what_cannot_be_served(
    arguments: tuple[str, ...], words: str, dnictl: Dnictl, folder: Path
) -> None:
    assert dnictl("init", "--template", "mlp").code == 0
    (folder / "token").write_text("secret")
    (folder / "token").chmod(0o644)
    release_of(folder)
    done = dnictl("render", "kubernetes", "--serve", "one", "-o", "k", "--image", IMAGE, *arguments)
    assert done.code in (64, 66)
    assert words in done.err
    assert not (folder / "k").exists()
    done = dnictl("render", "kubernetes", "-o", "k", "--image", IMAGE, "--replicas", "top=2")
    assert (done.code, "--replicas is not for this" in done.err) == (64, True)


def test_a_folder_with_files_is_left_alone(
    dnictl: Dnictl, write_chain: WriteChain, folder: Path
) -> None:
    write_chain()
    (folder / "k8s").mkdir()
    (folder / "k8s" / "mine").touch()
    done = dnictl("render", "kubernetes", "-o", "k8s", "--image", IMAGE)
    assert done.code == 64
    assert "is not an empty folder" in done.err

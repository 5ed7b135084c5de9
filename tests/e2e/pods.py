"""What a cluster makes of rendered objects, as far as tests need it: pods and their files."""

from __future__ import annotations

import base64
import copy
import itertools
import os
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

JOB_UID = "7b0d3f5e-6a3e-4b8e-9f0e-0f6a5a4d1c2b"
_OWNERS = ("Job", "StatefulSet", "Deployment")


def pods_of(
    folder: Path, host: Path, environ: Mapping[str, str] | None = None
) -> dict[str, dict[str, Any]]:
    """The pods of each module, by name, with their volumes as folders of this host below ``host``.

    ``environ`` has variables of the pods; without it, each has an address of its own on loopback.
    """
    objects = [
        one
        for path in sorted(folder.glob("*.yaml"))
        for one in yaml.safe_load_all(path.read_text())
    ]
    content = {
        (one["kind"], one["metadata"]["name"]): {
            key: text.encode()
            for key, text in (one.get("data") or one.get("stringData") or {}).items()
        }
        | {key: base64.b64decode(text) for key, text in one.get("binaryData", {}).items()}
        for one in objects
    }
    jobs = [
        (job["name"], job["template"])
        for one in objects
        if one["kind"] == "JobSet"
        for job in one["spec"]["replicatedJobs"]
    ]
    jobs += [
        (one["metadata"]["labels"]["app.kubernetes.io/component"], one)
        for one in objects
        if one["kind"] in _OWNERS
    ]
    net, numbers = f"127.{random.randrange(1, 255)}.{random.randrange(255)}", itertools.count(1)
    pods: dict[str, dict[str, Any]] = {}
    addresses: dict[str, str] = {}  # by the name that the cluster's DNS has
    for module, job in jobs:
        count = job["spec"].get("replicas", 1)
        for index in range(count):
            name = module if count == 1 else f"{module}.{index + 1}"
            given = environ or {"POD_IP": f"{net}.{next(numbers)}"}
            service = job.get("metadata", {}).get("name", module)
            stateful = job.get("kind") == "StatefulSet"
            addresses[f"{service}-{index}.{service}" if stateful else service] = given["POD_IP"]
            pods[name] = _pod(
                name,
                job["spec"]["template"],
                content,
                host,
                {"JOB_COMPLETION_INDEX": str(index), **given},
            )
    for pod in pods.values():
        for volume in pod["spec"]["volumes"]:
            for path in Path(volume["hostPath"]["path"]).glob("endpoints/*.json"):
                text = path.read_text()
                path.write_text(
                    re.sub(r"tcp://(.*?):", lambda name: f"tcp://{addresses[name[1]]}:", text)
                )
    return pods


def _pod(
    name: str, template: dict[str, Any], content: Any, host: Path, environ: Mapping[str, str]
) -> dict[str, Any]:
    spec = copy.deepcopy(template["spec"])
    for volume in spec["volumes"]:
        (kind,) = volume.keys() - {"name"}
        source = volume.pop(kind)
        path = host / ("runs" if kind == "persistentVolumeClaim" else f"{name}-{volume['name']}")
        path.mkdir(exist_ok=True)
        if kind == "configMap":
            for item in source["items"]:
                (path / item["path"]).parent.mkdir(exist_ok=True)
                (path / item["path"]).write_bytes(content["ConfigMap", source["name"]][item["key"]])
        if kind == "secret":
            for key, text in content["Secret", source["secretName"]].items():
                (path / key).write_bytes(text)
        volume["hostPath"] = {"path": str(path)}
    (worker,) = spec["containers"]
    values = {"JOB_UID": JOB_UID, **environ}
    given = {one["name"]: one.get("value", values.get(one["name"])) for one in worker["env"]}
    values = {**values, **given}
    worker["env"] = [{"name": key, "value": value} for key, value in values.items()]
    for key, value in values.items():
        worker["args"] = [word.replace(f"$({key})", value) for word in worker["args"]]
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec}


class Pods:
    """Pods as processes; each has its files where its volumes are."""

    def __init__(self, pods: dict[str, dict[str, Any]]) -> None:
        self._pods = pods
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        for name in pods:
            folders = self.folders(name)
            settings, token = folders["/dni/given"] / "front.json", folders.get("/dni/token")
            if token is not None:
                settings.write_text(settings.read_text().replace("/dni/token", str(token)))

    def start(self, name: str) -> None:
        """Start a pod's container."""
        (worker,) = self._pods[name]["spec"]["containers"]
        _, *command = worker.get("command", ["", "-m", "dni_runtime.worker"])
        words = worker["args"]
        for mount, path in self.folders(name).items():
            words = [re.sub(rf"^{mount}", str(path), word) for word in words]
        environ = os.environ | {one["name"]: one["value"] for one in worker["env"]}
        self.processes[name] = subprocess.Popen(
            [sys.executable, "-P", *command, *words], env=environ
        )

    def folders(self, name: str) -> dict[str, Path]:
        """Where a pod's files are on this host, by the path in it."""
        spec = self._pods[name]["spec"]
        paths = {one["name"]: Path(one["hostPath"]["path"]) for one in spec["volumes"]}
        mounts = spec["containers"][0]["volumeMounts"]
        return {one["mountPath"]: paths[one["name"]] for one in mounts if one["name"] != "tmp"}

    def kill(self, name: str) -> None:
        """Kill it, as a node does that runs out of memory."""
        self.processes[name].kill()
        self.processes[name].wait(30)

    def forget(self, name: str) -> None:
        """Remove what goes with a pod: what is not on the volume, nor from the cluster."""
        shutil.rmtree(self.folders(name)["/dni/runs"])
        self.folders(name)["/dni/runs"].mkdir()

    def end(self) -> None:
        """Kill all."""
        for name in self.processes:
            self.kill(name)

"""What a cluster makes of rendered objects, as far as tests need it: pods and their files."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

JOB_UID = "7b0d3f5e-6a3e-4b8e-9f0e-0f6a5a4d1c2b"


def pods_of(folder: Path, host: Path, environ: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """The pod of each module, by name, with its volumes as folders of this host below ``host``."""
    objects = [
        one
        for path in sorted(folder.glob("*.yaml"))
        for one in yaml.safe_load_all(path.read_text())
    ]
    content = {
        (one["kind"], one["metadata"]["name"]): one.get("data") or one.get("stringData")
        for one in objects
    }
    (jobset,) = (one for one in objects if one["kind"] == "JobSet")
    return {
        job["name"]: _pod(job["name"], job["template"]["spec"]["template"], content, host, environ)
        for job in jobset["spec"]["replicatedJobs"]
    }


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
                (path / item["path"]).write_text(content["ConfigMap", source["name"]][item["key"]])
        if kind == "secret":
            for key, text in content["Secret", source["secretName"]].items():
                (path / key).write_text(text)
        volume["hostPath"] = {"path": str(path)}
    (worker,) = spec["containers"]
    values = {"JOB_COMPLETION_INDEX": "0", "JOB_UID": JOB_UID, **environ}
    given = {one["name"]: one.get("value", values.get(one["name"])) for one in worker["env"]}
    values = {**values, **given}
    worker["env"] = [{"name": key, "value": value} for key, value in values.items()]
    for key, value in values.items():
        worker["args"] = [word.replace(f"$({key})", value) for word in worker["args"]]
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec}

"""A trained chain that answers on Kubernetes: a StatefulSet for each module, and its front.

Nothing is shared: a pod's run directory goes with it, and neighbours find each other by the names
of pods. A pod that dies is restarted by itself, and gets again what has no answer.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from dni_runtime.plan.prepare import CheckedChain
from dni_runtime.run.documents.reports import Endpoint
from dni_runtime.schedulers.kubernetes.objects import Manifest, Objects, secret_volume
from dni_runtime.serving.documents import FrontSettings
from dni_runtime.spec import WorkerSpec
from dni_runtime.spec.named import module_of, number_of
from dni_runtime.spec.predicting import FRONT
from dni_runtime.worker.options import JOB_INDEX
from dni_runtime.worker.start import OWN

PORT = 7400
"""Links listen on this port plus their number, unless the chain has a ``links.port``."""

TOKEN = "/dni/token"
_PYTHON = "/opt/dni/venv/bin/python3"
_END_S = 15
_GONE_S = 5
"""A front that ends still answers so long: until then others may send it requests."""
_DNS = [{"port": n, "protocol": name} for n in (53, 5353) for name in ("UDP", "TCP")]
"""OpenShift's servers listen on 5353, and policies are applied to what a pod reaches in the end."""


@dataclass(frozen=True, kw_only=True)
class Service(Objects):
    front: FrontSettings
    token: str | None  # that requests must bear; None: a new one

    too_large = "make a release of it, whose images have the weights: dnictl release"

    def manifests(self) -> dict[str, list[Manifest]]:
        files = super().manifests()
        token = {"token": self.token or secrets.token_hex(32)}
        files["keys.yaml"].append(self._secret(f"{self.name}-token", token))
        http = [{"port": self.front.http.port, "protocol": "TCP"}]
        dns = [{"ports": _DNS}]
        files["network.yaml"] = [
            self._policy(name, [{"ports": http}] if name == FRONT else [], dns)
            for name in self.modules
        ]
        objects = [one for name in self.modules for one in self._module(name)]
        return files | {"serve.yaml": [*objects, self._service(self.name, FRONT, http)]}

    def _module(self, module: str) -> list[Manifest]:
        name = f"{self.name}-{module}"
        spec: Manifest = {
            "replicas": len(self.modules[module]),
            "selector": {"matchLabels": self._labels(module)},
        }
        if module == FRONT:
            spec |= {"strategy": {"type": "Recreate"}, "template": self._front()}
            owner = self._object("apps/v1", "Deployment", name, module, spec=spec)
        else:
            spec |= {"serviceName": name, "podManagementPolicy": "Parallel"}
            spec["template"] = self._template(
                module,
                self._start(module, by_rank=True, resume=OWN),
                {"emptyDir": {}},
                fields={JOB_INDEX: "metadata.labels['apps.kubernetes.io/pod-index']"},
                grace_s=_END_S,
            )
            owner = self._object("apps/v1", "StatefulSet", name, module, spec=spec)
        # A pod is found as soon as it has an address: it is ready when others have found it.
        names = {"clusterIP": "None", "publishNotReadyAddresses": True}
        return [owner, self._service(name, module, [], **names)]

    def _service(self, name: str, module: str, ports: list[Any], **rest: Any) -> Manifest:
        spec = {"selector": self._labels(module), **rest} | ({"ports": ports} if ports else {})
        return self._object("v1", "Service", name, module, spec=spec)

    def _front(self) -> Manifest:
        def health(of: str, **often: int) -> Manifest:
            return {"httpGet": {"path": f"/v2/health/{of}", "port": self.front.http.port}, **often}

        container = {
            "command": [_PYTHON, "-m", "dni_runtime.serving"],
            "ports": [{"containerPort": self.front.http.port}],
            "startupProbe": health("live", periodSeconds=2, failureThreshold=60),
            "livenessProbe": health("live", periodSeconds=10, timeoutSeconds=5),
            # It has waited for --probe itself.
            "readinessProbe": health("ready", periodSeconds=2, failureThreshold=1),
            "lifecycle": {"preStop": {"exec": {"command": ["sleep", str(_GONE_S)]}}},
        }
        return self._template(
            FRONT,
            self._start(FRONT),
            {"emptyDir": {}},
            fields={},
            volumes={"token": (TOKEN, secret_volume(f"{self.name}-token"))},
            grace_s=self.front.drain_s + _GONE_S + _END_S,
            container=container,
        )


def for_pods(prepared: CheckedChain) -> CheckedChain:
    """Return a chain that predicts whose links listen on ports that neighbours know."""

    def known(spec: WorkerSpec) -> WorkerSpec:
        links = {"transport": "tcp", "port": spec.links.port or PORT}
        return spec.model_copy(update={"links": spec.links.model_copy(update=links)})

    assert prepared.front is not None
    front, workers = known(prepared.front), tuple(map(known, prepared.workers))
    return replace(prepared, front=front, workers=workers)


def served_files(
    name: str, prepared: CheckedChain, front: FrontSettings, files: Mapping[str, bytes]
) -> dict[str, bytes]:
    """Return the first files of a service's run directories: with its front, and addresses."""
    assert prepared.front is not None
    port = prepared.front.links.port
    assert port is not None
    addresses = {
        worker.module: Endpoint(
            module=worker.module,
            address="",
            further={
                str(edge.number): f"tcp://{_host(name, worker)}:{port + edge.number}"
                for edge in worker.links_in
            },
        )
        for worker in (prepared.front, *prepared.replicas)
    }
    return {
        **files,
        f"specs/{FRONT}.json": prepared.front.to_json().encode(),
        "front.json": front.model_dump_json().encode(),
        **{
            f"endpoints/{module}.json": json.dumps(endpoint.to_dict()).encode()
            for module, endpoint in addresses.items()
        },
    }


def _host(name: str, worker: WorkerSpec) -> str:
    """Return the name of a worker's pod, by the headless Service of its module."""
    module = module_of(worker.module)
    service = f"{name}-{module}"
    return service if module == FRONT else f"{service}-{number_of(worker.module) - 1}.{service}"

"""What all objects of a chain have: names, files, keys, policies and pods."""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from dni_runtime.errors import UsageError
from dni_runtime.plan.placement import DEFAULT_MEMORY_MIB, check_gpus, needs_of
from dni_runtime.plan.plan import LaunchPlan, Need, WorkerPlan
from dni_runtime.spec import ChainSpec, WorkerSpec
from dni_runtime.spec.named import module_of
from dni_runtime.spec.predicting import FRONT
from dni_runtime.spec.replicas import replicas_of
from dni_runtime.worker.start import WorkerStart

Manifest = dict[str, Any]

RUNS, GIVEN, KEYS = "/dni/runs", "/dni/given", "/dni/keys"
CONTAINER = "worker"

MOST_GIVEN_BYTES = 900_000
"""A ConfigMap holds at most 1 MiB (kubernetes.io/docs/concepts/configuration/configmap)."""

_NAME = re.compile(r"[a-z]([a-z0-9-]*[a-z0-9])?")
_MOST_NAME = 63  # of a pod, as a label's value


@dataclass(frozen=True)
class Cluster:
    """What a user says of the cluster."""

    images: Mapping[str, str]  # by module; under "": of all others
    namespace: str | None = None
    queue: str | None = None  # Kueue's
    claim: str | None = None  # of the run's volume; None: a new one
    data_claim: str | None = None
    storage: str = "10Gi"  # of a new one
    user: int = 1000
    jobset: bool = True

    def image(self, module: str) -> str:
        """Return the image of a module; any one serves as the front."""
        named = self.images.get(module) or self.images.get("")
        image = next(iter(self.images.values())) if module == FRONT and not named else named
        if image is None:
            raise UsageError(
                f"no image is named for module {module!r}",
                hint="add --image REPOSITORY@DIGEST for all modules, or --image "
                f"{module}=REPOSITORY@DIGEST",
            )
        return image


@dataclass(frozen=True, kw_only=True)
class Objects:
    """The objects of a chain's modules: :meth:`manifests`."""

    name: str  # of the run, and of its objects
    chain: ChainSpec
    workers: Sequence[WorkerSpec]  # of all replicas, and of the front
    plan: LaunchPlan
    files: Mapping[str, bytes]  # first ones of the run directory, by path in it
    cluster: Cluster
    too_large: ClassVar[str]  # what to do then
    needs: Mapping[str, Need] = field(init=False)

    def __post_init__(self) -> None:
        modules = [worker for worker in self.workers if worker.module != FRONT]
        asked = needs_of(self.chain, modules)
        check_gpus(modules, asked)
        needs = {need.module: need for need in asked}
        needs[FRONT] = Need(FRONT, memory_mib=DEFAULT_MEMORY_MIB)
        object.__setattr__(self, "needs", needs)
        longest = max((f"{self.name}-{module}-0-99-xxxxx" for module in self.modules), key=len)
        if not _NAME.fullmatch(self.name) or len(longest) > _MOST_NAME:
            most = _MOST_NAME - len(longest) + len(self.name)
            raise UsageError(
                f"{self.name!r} is no name for this chain's pods",
                hint=f"give --name: a letter, then small letters, digits and '-', {most} at most",
            )
        if sum(map(len, self.files.values())) > MOST_GIVEN_BYTES:
            raise UsageError(
                "the run's first files (specs, sources, initial weights) are too large for a "
                f"ConfigMap: more than {MOST_GIVEN_BYTES // 1000} kB",
                hint=self.too_large,
            )

    @property
    def modules(self) -> dict[str, list[str]]:
        return replicas_of([worker.module for worker in self.workers])

    def manifests(self) -> dict[str, list[Manifest]]:
        """Return the objects, by the file that they are for."""
        return {
            "run.yaml": [self._given()],
            "keys.yaml": self._keys() if self.plan.keys else [],
            "network.yaml": [self._policy(module) for module in self.modules],
        }

    def _object(
        self, version: str, kind: str, name: str, module: str = "", **rest: Any
    ) -> Manifest:
        meta: Manifest = {"name": name, "labels": self._labels(module)}
        if self.cluster.namespace is not None:
            meta["namespace"] = self.cluster.namespace
        return {"apiVersion": version, "kind": kind, "metadata": meta, **rest}

    def _labels(self, module: str = "") -> dict[str, str]:
        labels = {"app.kubernetes.io/name": "dni-runtime", "app.kubernetes.io/instance": self.name}
        return labels | ({"app.kubernetes.io/component": module} if module else {})

    def _of(self, name: str) -> WorkerSpec:
        return next(worker for worker in self.workers if worker.module == name)

    def _planned(self, module: str) -> WorkerPlan:
        """The plan of a module's first worker."""
        first = self.modules[module][0]
        planned = (*self.plan.workers, self.plan.front)
        return next(one for one in planned if one is not None and one.module == first)

    def _given(self) -> Manifest:
        texts, others = {}, {}
        for number, name in enumerate(self.files):
            try:
                texts[_key(number, name)] = self.files[name].decode()
            except UnicodeDecodeError:
                others[_key(number, name)] = base64.b64encode(self.files[name]).decode()
        content: Manifest = {"data": texts} | ({"binaryData": others} if others else {})
        return self._object("v1", "ConfigMap", f"{self.name}-run", immutable=True, **content)

    def _keys(self) -> list[Manifest]:
        """Return each module's Secret: its own pairs, and its neighbours' public keys."""
        from dni_runtime.run.keys import KeyPair  # zmq: only to make keys

        pairs = {worker.module: KeyPair.new() for worker in self.workers}
        secrets = []
        for module, names in self.modules.items():
            ours = [(pairs[name].public, pairs[name].secret) for name in names]
            known = dict.fromkeys(one for name in names for one in self._of(name).neighbours)
            data = {
                f"{name}.key": f"{public.decode()}\n{secret.decode()}\n"
                for name, (public, secret) in zip(names, ours, strict=True)
            } | {f"{name}.pub": f"{pairs[name].public.decode()}\n" for name in known}
            secrets.append(self._secret(f"{self.name}-{module}-keys", data, module))
        return secrets

    def _secret(self, name: str, data: Mapping[str, str], module: str = "") -> Manifest:
        return self._object("v1", "Secret", name, module, type="Opaque", stringData=dict(data))

    def _policy(
        self, module: str, ingress: Sequence[Manifest] = (), egress: Sequence[Manifest] = ()
    ) -> Manifest:
        """Return who may reach a module's pods, and whom they reach: its neighbours, and these."""
        names = self.modules[module]
        near = {module_of(one) for name in names for one in self._of(name).neighbours}
        peers = [{"podSelector": {"matchLabels": self._labels(one)}} for one in sorted(near)]
        spec = {
            "podSelector": {"matchLabels": self._labels(module)},
            "policyTypes": ["Ingress", "Egress"],
            "ingress": [*([{"from": peers}] if peers else []), *ingress],
            "egress": [*([{"to": peers}] if peers else []), *egress],
        }
        name = f"{self.name}-{module}"
        return self._object("networking.k8s.io/v1", "NetworkPolicy", name, module, spec=spec)

    def _start(self, module: str, **how: Any) -> list[str]:
        """Return the arguments of a module's workers."""
        worker = self._planned(module)
        return WorkerStart(
            run=f"{RUNS}/{self.name}",
            module=module,
            log_level=worker.log_level,
            transport=worker.transport,
            interface=worker.interface,
            data=worker.data,
            keys=KEYS if self.plan.keys else None,
            given=GIVEN,
            **how,
        ).argv()

    def _template(
        self,
        module: str,
        args: Sequence[str],
        runs: Manifest,  # the volume of the run directory
        *,
        fields: Mapping[str, str],  # variables from the pod's own fields
        volumes: Mapping[str, tuple[str, Manifest]] = {},  # further ones to read, by name
        grace_s: float,
        container: Mapping[str, Any] = {},
        **pod: Any,
    ) -> Manifest:
        """Return a module's pods."""
        items = [{"key": _key(n, name), "path": name} for n, name in enumerate(self.files)]
        written = {"runs": (RUNS, runs), "tmp": ("/tmp", {"emptyDir": {}})}
        if self.chain.data.workers:  # they hand batches over there; by default it has 64 MiB
            written["shm"] = ("/dev/shm", {"emptyDir": {"medium": "Memory"}})
        read = {"given": (GIVEN, {"configMap": {"name": f"{self.name}-run", "items": items}})}
        if self.plan.keys:
            read["keys"] = (KEYS, secret_volume(f"{self.name}-{module}-keys"))
        all_volumes = {**written, **read, **volumes}
        fields = {"POD_IP": "status.podIP", **fields}
        values = {**self._planned(module).environment, "HOME": "/tmp", "USER": "dni"}
        spec = {
            **pod,
            "terminationGracePeriodSeconds": int(grace_s),
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "securityContext": {
                "runAsNonRoot": True,
                "runAsUser": self.cluster.user,
                "runAsGroup": self.cluster.user,
                "fsGroup": self.cluster.user,
                "fsGroupChangePolicy": "OnRootMismatch",
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            **self._near(),
            "containers": [
                {
                    "name": CONTAINER,
                    "image": self.cluster.image(module),
                    "args": list(args),
                    "env": [
                        *(
                            {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}
                            for name, path in fields.items()
                        ),
                        *({"name": name, "value": value} for name, value in values.items()),
                    ],
                    "resources": self._resources(module),
                    "securityContext": {
                        "allowPrivilegeEscalation": False,
                        "capabilities": {"drop": ["ALL"]},
                        "readOnlyRootFilesystem": True,
                    },
                    "volumeMounts": [
                        {"name": name, "mountPath": path}
                        | ({} if name in written else {"readOnly": True})
                        for name, (path, _) in all_volumes.items()
                    ],
                    **container,
                }
            ],
            "volumes": [{"name": name, **source} for name, (_, source) in all_volumes.items()],
        }
        return {"metadata": {"labels": self._labels(module)}, "spec": spec}

    def _near(self) -> Manifest:
        """Return a hint for the cluster's scheduler: all pods on one node, or on several."""
        here = {"labelSelector": {"matchLabels": self._labels()}}
        node = {"topologyKey": "kubernetes.io/hostname"}
        match self.chain.placement.strategy:
            case "packed":
                term = {"weight": 100, "podAffinityTerm": here | node}
                preferred = {"preferredDuringSchedulingIgnoredDuringExecution": [term]}
                return {"affinity": {"podAffinity": preferred}}
            case "spread":
                spread = {"maxSkew": 1, "whenUnsatisfiable": "ScheduleAnyway"} | here | node
                return {"topologySpreadConstraints": [spread]}
        return {}

    def _resources(self, module: str) -> Manifest:
        worker = self.modules[module][0]
        need = self.needs[worker]
        limits = {"memory": f"{need.memory_mib}Mi"}
        if need.gpus:
            vendor = "amd" if self._of(worker).device.startswith("rocm") else "nvidia"
            limits[f"{vendor}.com/gpu"] = str(need.gpus)
        return {"requests": {"cpu": str(need.cpus), **limits}, "limits": limits}


def secret_volume(name: str) -> Manifest:
    return {"secret": {"secretName": name, "defaultMode": 0o400}}


def _key(number: int, name: str) -> str:
    """Return a ConfigMap's key for a file, whose name may have characters that keys may not."""
    return f"{number}-{re.sub(r'[^-._a-zA-Z0-9]', '_', name)}"[:253]

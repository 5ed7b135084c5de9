"""The scheduler ``kubernetes``: objects for a cluster, as data; nothing here talks to one.

Each module is an Indexed Job whose pods find their replica by their index (``worker/rank.py``). The
Job replaces a pod that dies, and the new one goes on from the module's own newest state: so there
is no supervisor. What workers share is on one volume (docs/kubernetes.md).

It is one file because a scheduler is; most of it is the objects themselves.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from dni_runtime.errors import (
    DataError,
    DivergedError,
    ImageError,
    SpecError,
    StoppedError,
    UnansweredError,
    UnavailableError,
    UsageError,
)
from dni_runtime.plan.placement import needs_of
from dni_runtime.plan.plan import DATA_TARGET, LaunchPlan, Need, WorkerPlan
from dni_runtime.plan.settings import StartRequest, make_plan
from dni_runtime.schedulers.mpi import Mpi, check_ranks
from dni_runtime.spec import ChainSpec, WorkerSpec
from dni_runtime.spec.named import module_of
from dni_runtime.spec.replicas import replicas_of
from dni_runtime.worker.start import WorkerStart
from dni_runtime.worker.version import STARTED_WITH

Manifest = dict[str, Any]

JOB_SET = "jobset.x-k8s.io/v1alpha2"
RUNS, GIVEN, KEYS = "/dni/runs", "/dni/given", "/dni/keys"
CONTAINER = "worker"

LASTS = (UsageError, ImageError, DataError, UnavailableError, SpecError, DivergedError)
"""A new pod would fail in the same way again: the Job fails at once."""

PASSES = (UnansweredError, StoppedError)
"""No failure of this pod: a neighbour's pod is not there yet, or the whole chain was stopped."""

MOST_GIVEN_BYTES = 900_000
"""A ConfigMap holds at most 1 MiB (kubernetes.io/docs/concepts/configuration/configmap)."""

_NAME = re.compile(r"[a-z]([a-z0-9-]*[a-z0-9])?")
_MOST_NAME = 63  # of a pod, as a label's value
_END_S = 15  # beyond the chain's own time to stop


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
        """Return the image of a module."""
        image = self.images.get(module) or self.images.get("")
        if image is None:
            raise UsageError(
                f"no image is named for module {module!r}",
                hint="add --image REPOSITORY@DIGEST for all modules, or --image "
                f"{module}=REPOSITORY@DIGEST",
            )
        return image


class Kubernetes(Mpi):
    """Workers that find their replica by their pod's index, in a Job of their module."""

    def plan(self, request: StartRequest) -> LaunchPlan:
        chain, site = request.chain, request.site
        check_ranks(request, "Kubernetes")
        if chain.mounts:
            raise UsageError(
                "'mounts' are folders of this host, which pods do not see",
                hint="leave them out; data come by --data-claim, files by the image",
            )
        links = {worker.module: ("tcp", "$(POD_IP)") for worker in request.workers}
        plan = make_plan(replace(request, site=replace(site, links=links)))
        ours = {STARTED_WITH, "PYTHONPATH"}

        def pod(worker: WorkerPlan) -> WorkerPlan:
            data = worker.data
            if data is not None:
                folder = Path(data) not in site.files
                data = str(DATA_TARGET if folder else DATA_TARGET / Path(data).name)
            environment = {k: v for k, v in worker.environment.items() if k not in ours}
            return replace(worker, by_rank=True, data=data, environment=environment)

        return replace(plan, workers=tuple(map(pod, plan.workers)))

    def check(self, plan: LaunchPlan) -> None:
        """Always raises: a cluster starts these workers."""
        raise UsageError(
            "this run is started by Kubernetes, not by dnictl",
            hint="it goes on when its objects are applied again: see docs/kubernetes.md",
        )


@dataclass(frozen=True)
class Training:
    """A run whose objects are written: :meth:`manifests`."""

    name: str  # of the run, and of its objects
    chain: ChainSpec
    workers: Sequence[WorkerSpec]  # of all replicas
    plan: LaunchPlan
    files: Mapping[str, bytes]  # first ones of the run directory, by path in it
    cluster: Cluster
    needs: Mapping[str, Need] = field(init=False)

    def __post_init__(self) -> None:
        needs = {need.module: need for need in needs_of(self.chain, self.workers)}
        object.__setattr__(self, "needs", needs)
        longest = max((f"{self.name}-{module}-0-99-xxxxx" for module in self.modules), key=len)
        if not _NAME.fullmatch(self.name) or len(longest) > _MOST_NAME:
            most = _MOST_NAME - len(longest) + len(self.name)
            raise UsageError(
                f"{self.name!r} is no name for this chain's pods",
                hint=f"give --name: a letter, then small letters, digits and '-', {most} at most",
            )
        if not self.cluster.jobset and self.plan.restart.scope == "chain":
            raise UsageError(
                "this chain's modules restart together (they wait for true gradients, or form a "
                "process group), which Jobs by themselves cannot do",
                hint="leave --no-jobset out",
            )
        if not self.cluster.jobset and self.cluster.queue:
            raise UsageError(
                "--queue: Jobs by themselves are admitted one by one, and wait for each other",
                hint="leave --no-jobset out",
            )
        if sum(map(len, self.files.values())) > MOST_GIVEN_BYTES:
            raise UsageError(
                "the run's first files (specs, sources, initial weights) are too large for a "
                f"ConfigMap: more than {MOST_GIVEN_BYTES // 1000} kB",
                hint="put weights into the data volume, and load them in a module's own class",
            )
        reads = [worker.module for worker in self.plan.workers if worker.data is not None]
        if reads and self.cluster.data_claim is None:
            raise UsageError(
                f"{', '.join(reads)} read data from a folder, which no volume is named for",
                hint="add --data-claim CLAIM, whose root has what that folder has",
            )

    @property
    def modules(self) -> dict[str, list[str]]:
        """The workers of each module."""
        return replicas_of([worker.module for worker in self.workers])

    def manifests(self) -> dict[str, list[Manifest]]:
        """Return the objects, by the file that they are for."""
        files = {
            "run.yaml": [self._given()],
            "keys.yaml": self._keys() if self.plan.keys else [],
            "volume.yaml": [] if self.cluster.claim is not None else [self._volume()],
            "network.yaml": [self._policy(module) for module in self.modules],
            "train.yaml": self._jobset() if self.cluster.jobset else self._jobs(),
        }
        return {name: objects for name, objects in files.items() if objects}

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
            name = f"{self.name}-{module}-keys"
            secrets.append(
                self._object("v1", "Secret", name, module, type="Opaque", stringData=data)
            )
        return secrets

    def _volume(self) -> Manifest:
        spec = {
            "accessModes": ["ReadWriteMany"],
            "resources": {"requests": {"storage": self.cluster.storage}},
        }
        return self._object("v1", "PersistentVolumeClaim", self.name, spec=spec)

    def _policy(self, module: str) -> Manifest:
        """Return who may reach a module's pods, and whom they reach: its neighbours alone."""
        names = self.modules[module]
        near = {module_of(one) for name in names for one in self._of(name).neighbours}
        peers = [{"podSelector": {"matchLabels": self._labels(one)}} for one in sorted(near)]
        spec = {
            "podSelector": {"matchLabels": self._labels(module)},
            "policyTypes": ["Ingress", "Egress"],
            "ingress": [{"from": peers}] if peers else [],
            "egress": [{"to": peers}] if peers else [],
        }
        name = f"{self.name}-{module}"
        return self._object("networking.k8s.io/v1", "NetworkPolicy", name, module, spec=spec)

    def _jobset(self) -> list[Manifest]:
        rules = self.plan.restart
        again = rules.limit if rules.policy == "on-failure" else 0
        spec = {
            "network": {"enableDNSHostnames": False},  # workers publish addresses on the volume
            "successPolicy": {"operator": "All"},
            "failurePolicy": {
                "maxRestarts": again,
                "restartStrategy": "BlockingRecreate",  # all choose the same checkpoint
                "rules": [
                    {
                        "name": "lasting",
                        "action": "FailJobSet",
                        "onJobFailureReasons": ["PodFailurePolicy"],
                    }
                ],
            },
            "replicatedJobs": [
                {
                    "name": module,
                    "replicas": 1,
                    "template": {
                        "metadata": {"labels": self._labels(module)},
                        "spec": self._job(module),
                    },
                }
                for module in self.modules
            ],
        }
        jobset = self._object(JOB_SET, "JobSet", self.name, spec=spec)
        if self.cluster.queue is not None:
            jobset["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] = self.cluster.queue
        return [jobset]

    def _jobs(self) -> list[Manifest]:
        return [
            self._object("batch/v1", "Job", f"{self.name}-{module}", module, spec=self._job(module))
            for module in self.modules
        ]

    def _job(self, module: str) -> Manifest:
        rules, count = self.plan.restart, len(self.modules[module])
        alone = rules.scope == "module"
        ignored = [
            {
                "action": "Ignore",
                "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}],
            },
            {"action": "Ignore", "onExitCodes": _exits(PASSES)},
        ]
        return {
            "completionMode": "Indexed",
            "completions": count,
            "parallelism": count,
            "backoffLimit": rules.limit if alone and rules.policy == "on-failure" else 0,
            "podReplacementPolicy": "Failed",  # never two pods for one worker
            "podFailurePolicy": {
                "rules": [
                    *(ignored if alone else ()),
                    {"action": "FailJob", "onExitCodes": _exits(LASTS)},
                ]
            },
            "template": {"metadata": {"labels": self._labels(module)}, "spec": self._pod(module)},
        }

    def _pod(self, module: str) -> Manifest:
        names = self.modules[module]
        (worker,) = (one for one in self.plan.workers if one.module == names[0])
        start = WorkerStart(
            run=f"{RUNS}/{self.name}",
            module=module,
            by_rank=True,
            start=None,
            log_level=worker.log_level,
            transport=worker.transport,
            interface=worker.interface,
            data=worker.data,
            keys=KEYS if self.plan.keys else None,
            given=GIVEN,
        )
        items = [{"key": _key(n, name), "path": name} for n, name in enumerate(self.files)]
        volumes: dict[str, tuple[str, Manifest]] = {
            "runs": (
                RUNS,
                {"persistentVolumeClaim": {"claimName": self.cluster.claim or self.name}},
            ),
            "given": (GIVEN, {"configMap": {"name": f"{self.name}-run", "items": items}}),
            "tmp": ("/tmp", {"emptyDir": {}}),
        }
        if self.plan.keys:
            secret = {"secretName": f"{self.name}-{module}-keys", "defaultMode": 0o400}
            volumes["keys"] = (KEYS, {"secret": secret})
        if worker.data is not None:
            claim = {"claimName": self.cluster.data_claim, "readOnly": True}
            volumes["data"] = (str(DATA_TARGET), {"persistentVolumeClaim": claim})
        read_only = {"given", "keys", "data"}
        return {
            "restartPolicy": "Never",  # of the kubelet: the Job replaces pods, by its rules
            "terminationGracePeriodSeconds": int(self.plan.stop_grace_s) + _END_S,
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
                    "args": [*start.argv(), "--start", "$(JOB_UID)"],
                    "env": [
                        _from_pod("POD_IP", "status.podIP"),
                        _from_pod(
                            "JOB_UID", "metadata.labels['batch.kubernetes.io/controller-uid']"
                        ),
                        *(
                            {"name": name, "value": value}
                            for name, value in (
                                *worker.environment.items(), ("HOME", "/tmp"), ("USER", "dni"),
                            )
                        ),
                    ],
                    "resources": self._resources(names[0]),
                    "securityContext": {
                        "allowPrivilegeEscalation": False,
                        "capabilities": {"drop": ["ALL"]},
                        "readOnlyRootFilesystem": True,
                    },
                    "volumeMounts": [
                        {"name": name, "mountPath": path}
                        | ({"readOnly": True} if name in read_only else {})
                        for name, (path, _) in volumes.items()
                    ],
                }
            ],
            "volumes": [{"name": name, **source} for name, (_, source) in volumes.items()],
        }  # fmt: skip

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

    def _resources(self, worker: str) -> Manifest:
        need = self.needs[worker]
        limits = {"memory": f"{need.memory_mib}Mi"}
        if need.gpus:
            vendor = "amd" if self._of(worker).device.startswith("rocm") else "nvidia"
            limits[f"{vendor}.com/gpu"] = str(need.gpus)
        return {"requests": {"cpu": str(need.cpus), **limits}, "limits": limits}


def _key(number: int, name: str) -> str:
    """Return a ConfigMap's key for a file, whose name may have characters that keys may not."""
    return f"{number}-{re.sub(r'[^-._a-zA-Z0-9]', '_', name)}"[:253]


def _exits(errors: Sequence[type[Exception]]) -> Manifest:
    codes = sorted(getattr(error, "exit_code") for error in errors)  # noqa: B009
    return {"containerName": CONTAINER, "operator": "In", "values": codes}


def _from_pod(name: str, path: str) -> Manifest:
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}

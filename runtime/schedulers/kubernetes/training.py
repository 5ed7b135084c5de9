"""A training on Kubernetes: each module is an Indexed Job.

The Job replaces a pod that dies, and the new one goes on from the module's own newest state: so
there is no supervisor. What workers share is on one volume (docs/kubernetes.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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
from dni_runtime.plan.plan import DATA_TARGET
from dni_runtime.schedulers.kubernetes.objects import CONTAINER, Manifest, Objects

JOB_SET = "jobset.x-k8s.io/v1alpha2"

LASTS = (UsageError, ImageError, DataError, UnavailableError, SpecError, DivergedError)
"""A new pod would fail in the same way again: the Job fails at once."""

PASSES = (UnansweredError, StoppedError)
"""No failure of this pod: a neighbour's pod is not there yet, or the whole chain was stopped."""

_END_S = 15  # beyond the chain's own time to stop


@dataclass(frozen=True, kw_only=True)
class Training(Objects):
    too_large = "put weights into the data volume, and load them in a module's own class"

    def __post_init__(self) -> None:
        super().__post_init__()
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
        reads = [worker.module for worker in self.plan.workers if worker.data is not None]
        if reads and self.cluster.data_claim is None:
            raise UsageError(
                f"{', '.join(reads)} read data from a folder, which no volume is named for",
                hint="add --data-claim CLAIM, whose root has what that folder has",
            )

    def manifests(self) -> dict[str, list[Manifest]]:
        return super().manifests() | {
            "volume.yaml": [] if self.cluster.claim is not None else [self._volume()],
            "train.yaml": self._jobset() if self.cluster.jobset else self._jobs(),
        }

    def _volume(self) -> Manifest:
        spec = {
            "accessModes": ["ReadWriteMany"],
            "resources": {"requests": {"storage": self.cluster.storage}},
        }
        return self._object("v1", "PersistentVolumeClaim", self.name, spec=spec)

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
            "template": self._pods(module),
        }

    def _pods(self, module: str) -> Manifest:
        data = {}
        if self._planned(module).data is not None:
            claim = {"claimName": self.cluster.data_claim, "readOnly": True}
            data["data"] = (str(DATA_TARGET), {"persistentVolumeClaim": claim})
        return self._template(
            module,
            [*self._start(module, by_rank=True), "--start", "$(JOB_UID)"],
            {"persistentVolumeClaim": {"claimName": self.cluster.claim or self.name}},
            fields={"JOB_UID": "metadata.labels['batch.kubernetes.io/controller-uid']"},
            volumes=data,
            grace_s=self.plan.stop_grace_s + _END_S,
            restartPolicy="Never",  # of the kubelet: the Job replaces pods, by its rules
        )


def _exits(errors: Sequence[type[Exception]]) -> Manifest:
    codes = sorted(getattr(error, "exit_code") for error in errors)  # noqa: B009
    return {"containerName": CONTAINER, "operator": "In", "values": codes}

"""One worker's spec: the part of a resolved chain that is stored in its module's image.

A module image holds only its own module's spec, so that changing one layer changes one image. Of
its neighbours a worker needs only the contracts of its links.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any, Literal, Self

from pydantic import Field

from dni_runtime.spec.data import DataSpec
from dni_runtime.spec.edge import NO_LABEL, EdgeSpec, LaneSpec, TensorSpec
from dni_runtime.spec.model import ChainSpec, LinksSpec, OnNan
from dni_runtime.spec.modules import TrainingSpec
from dni_runtime.spec.named import Choice, Frozen, LayerSpec, module_of
from dni_runtime.spec.running import CheckpointSpec

ADJACENT_FAILURES = 3
"""Neighbouring modules that may be gone at once without losing a batch between them."""


def retained(chain: ChainSpec, index: int) -> int:
    """Return how many acknowledged messages a module keeps for the restart of the next ones.

    A module that dies loses the messages that it has acknowledged but the one after it has not
    received: at most a window, and one more window for each further module gone at the same time.
    """
    if chain.restart.policy == "never":
        return 0
    links_beyond = max(chain.graph.below[index] - 1, 0)
    return chain.links.window * min(links_beyond, ADJACENT_FAILURES)


class DataInfo(Frozen):
    """Shapes, types and sizes of the head's data."""

    sample: TensorSpec  # one input; the first of several
    further: tuple[TensorSpec, ...] = ()  # the other inputs
    names: tuple[str, ...] = ()  # keys of all inputs, if samples are dicts
    label: TensorSpec  # one label; several in a row
    labels: tuple[TensorSpec, ...] = ()  # each of several
    classes: int | None = None  # None: labels are not class indices
    train_samples: int | None = None  # None: not known yet
    eval_samples: int | None = None  # of each evaluation; None: not known yet
    test_samples: int | None = None  # None: no separate test set

    @property
    def samples(self) -> tuple[TensorSpec, ...]:
        """All inputs."""
        return (self.sample, *self.further)

    def with_inputs(self, names: Sequence[str]) -> Self:
        """Return the same data with the inputs of these names alone, in this order."""
        samples = dict(zip(self.names, self.samples, strict=True))
        first, *further = (samples[name] for name in names)
        update = {"sample": first, "further": tuple(further), "names": tuple(names)}
        return self.model_copy(update=update)


class SelectionRole(Frozen):
    """How the tail finds the best evaluation."""

    metric: str
    rises: bool  # more is better
    patience: int | None  # evaluations without improvement before the run ends; None: any number
    min_delta: float  # a difference up to this is no improvement


class HeadRole(Frozen):
    """Settings that only the first module needs."""

    samples: tuple[TensorSpec, ...]  # one sample of each of the data's inputs
    takes: tuple[int, ...] = (0,)  # which of them the module itself takes
    data: DataSpec
    micro_batches: int = 1  # parts of each training batch
    # Training batches from one SYNC marker to the next; None: no markers.
    sync_steps: int | None = None
    selects: bool = False  # each evaluation needs a checkpoint before it
    epochs: int
    steps: int | None
    eval_every: int
    checkpoint: CheckpointSpec


class TailRole(Frozen):
    """Settings that only the last module needs."""

    metrics: tuple[Choice, ...]  # beside the loss
    selection: SelectionRole | None = None
    # The data whose labels it reads itself; None: they come with the batches.
    labels: DataSpec | None = None


class ExitRole(Frozen):
    """An early exit of a chain that predicts: whose samples are not sent on."""

    interface: Choice  # the gradient interface that is the early head
    threshold: float  # samples with this top probability leave; above 1: none does


class ModuleContent(TrainingSpec):
    """What a module computes, and the contracts of its links: what its images are built for.

    What is here has part in :attr:`WorkerSpec.hash`.
    """

    chain: str
    module: str  # of a replica's worker, with its number: ``upper.2``
    index: int  # of the module in the chain, from 0
    layers: tuple[LayerSpec, ...]
    loss: Choice  # the chain's; local gradient interfaces use it too
    seed: int  # the chain's
    sources: tuple[EdgeSpec, ...]  # links from upstream, one for each input; none: the head
    targets: tuple[EdgeSpec, ...]  # links to downstream; none: the tail
    output: TensorSpec  # one sample; a row of all outputs if they are several
    outputs: tuple[TensorSpec, ...] = ()  # one sample of each, if they are several
    label: TensorSpec  # one sample
    prediction: TensorSpec  # one sample at the chain's output
    classes: int | None  # None: labels are not class indices
    batch_limit: int = Field(ge=1)  # samples in the largest batch
    gradients_in: int = Field(ge=0)  # of every n-th batch (by id) from downstream; 0: none
    # Maximum number of updates missing from the weights of a forward pass; at that number the
    # module waits for true gradients. None: any number.
    max_late: int | None = None
    links: LinksSpec
    head: HeadRole | None  # None: not the head
    tail: TailRole | None  # None: not the tail
    sharing: tuple[Choice, ...] = ()  # users' classes by which replicas share their weights


class WorkerSpec(ModuleContent):
    """Everything that one worker needs to serve its module.

    What is added here changes no image: how the run goes on, and the module's replicas.
    """

    format: Literal[3] = 3
    # The hash of the spec by which it was trained, and images are built: it only predicts. None: it
    # trains.
    trained: str | None = None
    exit: ExitRole | None = None  # of a module that predicts; its head is in the run directory
    keep: int  # complete checkpoints
    initial: bool = False  # the run directory holds the module's initial weights
    late: int = Field(ge=0)  # batches by which gradients may come late
    retain: int = Field(default=0, ge=0)  # acknowledged messages kept for a neighbour that restarts
    attends: bool = False  # the layers contain attention
    # Minimum seconds between snapshots of the module's own state; 0: none.
    snapshot_s: float = Field(default=0.0, ge=0)
    on_nan: OnNan = "stop"  # as in ``ChainSpec``
    stop_grace_s: float  # seconds for the final checkpoint when the run is stopped
    replicas: int = 1  # the module's workers
    replica: int = 1  # which of them this is, from 1
    # Modules of the chain whose number of replicas may change, each with that at the start.
    elastic: dict[str, int] = Field(default_factory=dict)
    # Links by which replicas share their weights, from each to the first.
    peers: tuple[LaneSpec, ...] = ()
    strategy: Choice | None = None  # how they do; see ``core/replication``
    compression: Choice | None = None  # of what they share; None: there is none
    # Of torch.distributed; None: the links of ``peers``.
    backend: Literal["gloo", "nccl"] | None = None
    lr_scale: float = 1.0  # factor of learning rates of the module's optimizers
    # Epochs or batches of the whole training, as ``schedule_every`` counts; None: not known.
    length: int | None = None

    def to_json(self) -> str:
        """Return the spec as canonical JSON (sorted keys), as stored in the module's image."""
        return json.dumps(self.model_dump(mode="json"), sort_keys=True, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """Parse the output of :meth:`to_json`; raises pydantic's ``ValidationError`` otherwise."""
        return cls.model_validate_json(text)

    @property
    def schedule_length(self) -> int | None:
        """Steps that the schedule makes in the whole training, by the worker's own batches."""
        if self.length is None or self.schedule_every == "epoch":
            return self.length
        return -(-self.length // self.elastic.get(module_of(self.module), self.replicas))

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        """One sample of each of the module's inputs."""
        if self.head is not None:
            return tuple(self.head.samples[index] for index in self.head.takes)
        outputs = tuple(edge.tensor for edge in self.sources if edge.tensor is not None)
        return outputs + tuple(sample for edge in self.sources for sample in edge.samples)

    @property
    def arguments(self) -> tuple[TensorSpec, ...]:
        """One sample of each argument of the first layer: inputs, with rows of outputs cut."""
        if self.head is not None:
            return self.inputs
        links = [edge.outputs or (edge.tensor,) for edge in self.sources if edge.tensor]
        return tuple(tensor for tensors in links for tensor in tensors) + self.inputs[len(links) :]

    @property
    def links_in(self) -> tuple[EdgeSpec, ...]:
        """The links from workers upstream."""
        return tuple(link for edge in self.sources for link in edge.links)

    @property
    def links_out(self) -> tuple[EdgeSpec, ...]:
        """The links to workers downstream."""
        return tuple(link for edge in self.targets for link in edge.links)

    @property
    def siblings(self) -> tuple[str, ...]:
        """The names of the module's workers, this one among them."""
        module = module_of(self.module)
        if module == self.module:
            return (self.module,)
        return tuple(f"{module}.{number}" for number in range(1, self.replicas + 1))

    @property
    def neighbours(self) -> tuple[str, ...]:
        """The workers that this one has links with."""
        ends = [link.source for link in self.links_in] + [link.target for link in self.links_out]
        ends += [name for lane in self.peers for name in (lane.source, lane.target)]
        return tuple(name for name in dict.fromkeys(ends) if name != self.module)

    def of_module(self) -> WorkerSpec:
        """Return the spec of the module, which all its workers have in common."""
        return self.model_copy(
            update={
                "module": module_of(self.module),
                "replica": 1,
                "sources": tuple(edge.with_lanes() for edge in self.sources),
                "targets": tuple(edge.with_lanes() for edge in self.targets),
                "peers": (),
            }
        )

    @property
    def labelled(self) -> bool:
        """Whether the module has its batches' labels."""
        return all(edge.labelled for edge in self.targets)  # the tail has no targets

    @property
    def exact(self) -> bool:
        """Whether no true gradient may be missed, so that lost batches must be sent again."""
        return self.max_late == 0

    @property
    def content(self) -> dict[str, Any]:
        """The fields of :class:`ModuleContent`, without what only concerns a host, or timing."""
        return self.of_module().model_dump(
            mode="json", include=set(ModuleContent.model_fields), exclude=_NO_CONTENT
        )

    @property
    def hash(self) -> str:
        """SHA-256 of :attr:`content`, on which images and checkpoints depend."""
        return _digest(self.content)

    def link_hash(self, edge: EdgeSpec) -> str:
        """Return the SHA-256 of what both ends of a link must agree on; HELLO compares it."""
        return _digest(
            {
                "chain": self.chain,
                "ends": (edge.source, edge.target),
                "activation": None if edge.tensor is None else edge.tensor.model_dump(),
                "outputs": [output.model_dump() for output in edge.outputs],
                "data": [sample.model_dump() for sample in edge.samples],
                "label": (self.label if edge.labelled else NO_LABEL).model_dump(),
                "gradients": edge.gradients,
                "dtype": self.links.dtype,
                "gradient_dtype": self.links.gradient_dtype,
            }
        )


_OF_THE_HOST = {"path", "workers"}
_NO_CONTENT: dict[str, Any] = {
    "cpus": True,
    "links": set(LinksSpec.model_fields) - {"dtype", "gradient_dtype"},
    "head": {
        **dict.fromkeys(("sync_steps", "checkpoint", "epochs", "steps"), True),
        "data": _OF_THE_HOST,
    },
    "tail": {"labels": _OF_THE_HOST},
}
"""Of the parts of a :class:`ModuleContent`."""


def _digest(document: dict[str, Any]) -> str:
    canonical = json.dumps(document, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()

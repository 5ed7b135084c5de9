"""What one worker needs to know: the part of a resolved chain that lies in its module's image.

A module image carries its own module's spec and nothing of the others', so that changing one layer
changes one image. What the worker needs of its neighbours is the contract of its two links.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from dni_runtime.spec.model import ChainSpec, CheckpointSpec, DataSpec, LinksSpec, OnNan
from dni_runtime.spec.modules import ClipSpec, GroupSpec
from dni_runtime.spec.named import Choice, Frozen, LayerSpec

ADJACENT_FAILURES = 3
"""So many neighbouring modules may be gone at once without a batch being lost between them."""


def retained(chain: ChainSpec, index: int) -> int:
    """Messages that a module keeps though the next one has acknowledged them.

    A module that dies takes with it what it has acknowledged and the one after it has not received
    yet: at most a window; and a window more for each further module that is gone at the same time.
    """
    if chain.restart.policy == "never":
        return 0
    links_beyond = max(len(chain.modules) - 2 - index, 0)
    window = chain.links.window
    first = LinksSpec.model_fields["window"].default  # one that is measured is told later
    return (first if window == "auto" else window) * min(links_beyond, ADJACENT_FAILURES)


class TensorSpec(Frozen):
    """Shape and type of one sample's tensor; the batch dimension comes on top.

    Attributes:
        shape: Sizes without the batch dimension.
        dtype: torch's name of the type, such as ``float32``.
    """

    shape: tuple[int, ...]
    dtype: str

    def __str__(self) -> str:
        return f"{self.dtype}[{' x '.join(['B', *map(str, self.shape)])}]"


class DataInfo(Frozen):
    """What the head's data looks like.

    Attributes:
        sample: One input.
        label: One label.
        classes: Number of classes, or None where labels are not class indices.
        train_samples: Number of training samples, or None when it is not known yet.
        eval_samples: Number of samples of each evaluation, or None when it is not known yet.
        test_samples: Number of test samples, where evaluations are of others; else None.
    """

    sample: TensorSpec
    label: TensorSpec
    classes: int | None = None
    train_samples: int | None = None
    eval_samples: int | None = None
    test_samples: int | None = None


class SelectionRole(Frozen):
    """How the tail finds the best evaluation.

    Attributes:
        metric: Which of its figures counts.
        rises: Whether more is better.
        patience: Evaluations without a better one before the run ends; None: any number.
        min_delta: By how much one must be better to count.
    """

    metric: str
    rises: bool
    patience: int | None
    min_delta: float


class HeadRole(Frozen):
    """What only the first module needs.

    Attributes:
        selects: Whether each evaluation needs a checkpoint before it.
        micro_batches: Into how many parts each training batch is cut.
    """

    data: DataSpec
    micro_batches: int = 1
    selects: bool = False
    epochs: int
    steps: int | None
    eval_every: int
    checkpoint: CheckpointSpec


class TailRole(Frozen):
    """What only the last module needs."""

    metrics: tuple[Choice, ...]
    selection: SelectionRole | None = None


class AheadSpec(Frozen):
    """What the next modules are, for a local head that begins with layers like theirs.

    Attributes:
        layers: Their layers.
        output: One sample at the last one's output.
        ends: Whether the last one is the chain's last module.
    """

    layers: tuple[LayerSpec, ...]
    output: TensorSpec
    ends: bool


class WorkerSpec(Frozen):
    """Everything that one worker needs to serve its module.

    Attributes:
        chain: Name of the chain.
        module: Name of the module.
        index: Position in the chain, from 0.
        layers: The module's layers.
        interface: The gradient interface at its output; None for the tail.
        ahead: The next modules' layers, where the interface looks at them.
        optimizer: Class of ``torch.optim`` with keywords.
        schedule: Class of ``torch.optim.lr_scheduler`` with keywords, or None.
        schedule_every: When the schedule steps.
        groups: Parameters with options, or an optimizer, of their own.
        clip: Gradient clipping.
        accumulate: Batches in one update.
        ema: Decay of the average of the weights, or None.
        freeze: Whether the weights stay as they are.
        initial: Whether the run directory holds weights that the module begins with.
        loss: The chain's loss; local gradient interfaces use it too.
        seed: The chain's seed.
        device: Where the module computes.
        precision: Type of its matrix products.
        cpus: Threads of its computations.
        input: One sample at the module's input.
        output: One sample at its output.
        label: One sample's label.
        prediction: One sample at the chain's output (what a local head must produce).
        classes: Number of classes, or None.
        batch_limit: Samples in the largest batch.
        upstream: Name of the module before, or None.
        downstream: Name of the module after, or None.
        gradients_in: Of which batches gradients come from downstream: every n-th by id; 0: of none.
        late: Batches by which they may come late.
        gradients_out: The same for what the module upstream wants.
        bootstrapped_out: Whether those come from the module's own error signal, at once; else they
            are true ones.
        awaited_out: Whether an update upstream waits for them.
        resend_out: How many of the newest are sent again after a connection was lost, because a
            module upstream takes no other batch before they have come.
        links: How to talk to the neighbours.
        retain: Acknowledged messages that the output end keeps for a neighbour that restarts.
        max_late: How many updates may be missing from the weights of a forward pass; the module
            waits for true gradients before it exceeds that. None: any number.
        attends: Whether there is attention in the module's layers.
        snapshot_s: Seconds between snapshots of the module's own state; 0 for none.
        keep: How many complete checkpoints to keep.
        on_nan: What it does when something is not finite; see ``ChainSpec``.
        stop_grace_s: Seconds for a checkpoint when told to stop.
        head: What only the head needs.
        tail: What only the tail needs.
    """

    format: Literal[1] = 1
    chain: str
    module: str
    index: int
    layers: tuple[LayerSpec, ...]
    interface: Choice | None
    ahead: AheadSpec | None = None
    optimizer: Choice
    schedule: Choice | None
    schedule_every: Literal["epoch", "batch"]
    groups: tuple[GroupSpec, ...] = ()
    clip: ClipSpec = ClipSpec()
    accumulate: int = 1
    ema: float | None = None
    freeze: bool = False
    initial: bool = False
    loss: Choice
    seed: int
    device: str
    precision: Literal["float32", "bfloat16"]
    cpus: int
    input: TensorSpec
    output: TensorSpec
    label: TensorSpec
    prediction: TensorSpec
    classes: int | None
    batch_limit: int = Field(ge=1)
    upstream: str | None
    downstream: str | None
    gradients_in: int = Field(ge=0)
    late: int = Field(ge=0)
    gradients_out: int = Field(ge=0)
    bootstrapped_out: bool = False
    awaited_out: bool = False
    resend_out: int = 0
    links: LinksSpec
    retain: int = Field(default=0, ge=0)
    max_late: int | None = None
    attends: bool = False
    snapshot_s: float = Field(default=0.0, ge=0)
    keep: int
    on_nan: OnNan = "stop"
    stop_grace_s: float
    head: HeadRole | None
    tail: TailRole | None

    def to_json(self) -> str:
        """The spec as canonical JSON (sorted keys), as stored in the module's image."""
        return json.dumps(self.model_dump(mode="json"), sort_keys=True, indent=1) + "\n"

    @model_validator(mode="before")
    @classmethod
    def _of_earlier_versions(cls, document: Any) -> Any:
        if isinstance(document, dict) and document.get("blocks") is False:
            return {key: value for key, value in document.items() if key != "blocks"}
        return document

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """Parse what :meth:`to_json` wrote.

        Raises:
            pydantic.ValidationError: The text is not a worker's spec.
        """
        return cls.model_validate_json(text)

    @property
    def exact(self) -> bool:
        """Whether no true gradient may be missed: a batch that is lost cannot be given up."""
        return self.max_late == 0

    @property
    def hash(self) -> str:
        """SHA-256 of what the image must hold: host paths and timing are left out."""
        document = self.model_dump(mode="json")
        for name in (
            "stop_grace_s", "on_nan", "late", "retain", "attends", "snapshot_s", "initial",
        ):  # fmt: skip
            document.pop(name)
        document["links"] = {key: document["links"][key] for key in ("dtype", "gradient_dtype")}
        if document["head"] is not None:
            for name in ("path", "workers"):
                document["head"]["data"].pop(name)
        return _digest(document)

    def link_hash(self, *, end: Literal["input", "output"]) -> str:
        """SHA-256 of what both ends of a link must agree on; HELLO compares it."""
        ends: tuple[str | None, str | None]
        if end == "input":
            ends, tensor, gradients = (self.upstream, self.module), self.input, self.gradients_out
        else:
            ends, tensor, gradients = (self.module, self.downstream), self.output, self.gradients_in
        return _digest(
            {
                "chain": self.chain,
                "ends": ends,
                "activation": tensor.model_dump(),
                "label": self.label.model_dump(),
                "gradients": gradients,
                "dtype": self.links.dtype,
                "gradient_dtype": self.links.gradient_dtype,
            }
        )


def _digest(document: dict[str, Any]) -> str:
    canonical = json.dumps(document, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()

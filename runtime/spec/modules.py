"""pydantic models of the modules in ``chain.yaml``: their layers and training."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import (
    BeforeValidator,
    Discriminator,
    Field,
    Tag,
    field_validator,
    model_validator,
)

from dni_runtime.spec.machines import ResourcesSpec
from dni_runtime.spec.named import TAG, Choice, Frozen, LayerSpec, Name, Words, matching

Device = Annotated[
    str, matching(r"^(auto|cpu|(cuda|rocm)(:\d{1,2})?)$", "a device: auto, cpu, cuda, cuda:1, rocm")
]


def patterns(value: Any) -> Any:
    """Return a ``freeze`` as names and patterns."""
    if isinstance(value, bool):
        return ("*",) if value else ()
    return (value,) if isinstance(value, str) else value


Patterns = Annotated[
    tuple[str, ...],
    BeforeValidator(patterns, json_schema_input_type=bool | str | tuple[str, ...]),
]
"""What a ``freeze`` matches: as ``GroupSpec.parameters``; ``true`` is all."""


class ClipSpec(Frozen):
    """Gradient clipping, of each module by itself."""

    # Maximum norm of the gradient of all the module's parameters together.
    norm: Annotated[float, Field(gt=0)] | None = None
    value: Annotated[float, Field(gt=0)] | None = None  # maximum magnitude of an element


class GroupSpec(Frozen):
    """Parameters with options, or an optimizer, of their own."""

    # ``norms``, ``biases``, ``embeddings``, ``vectors``, ``matrices`` (except those of embeddings),
    # or name patterns such as ``*.attn.*``. A parameter belongs to the first group that matches it.
    parameters: Words
    # Of the module's optimizer, such as ``weight_decay``.
    options: dict[str, Any] = Field(default_factory=dict)
    optimizer: Choice | None = None  # another one

    @model_validator(mode="after")
    def _options_or_optimizer(self) -> Self:
        if bool(self.options) == (self.optimizer is not None):
            raise ValueError("a group needs either 'options' or an 'optimizer'")
        return self


class InitSpec(Frozen):
    """Initial weights from a file."""

    # An export, a state dict, a run's directory (its newest complete checkpoint), or a release.
    file: str
    # Map from prefixes of the module's parameter names to prefixes in the file, as in ``{"0":
    # transformer.wte, "1": transformer.h.0}``; ``""`` matches all (default: the module's name, as
    # ``dnictl export`` writes it). Other parameters are random.
    names: dict[str, str] = Field(default_factory=dict)
    strict: bool = True  # the file must hold all parameters that have a prefix


Input = Annotated[
    str,
    matching(
        r"^[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?(\.(0|[1-9][0-9]{0,3}))?$",
        "an input: a module's name, one of its outputs as 'stem.0', or 'data.0'",
    ),
]
"""A module's name, one of its outputs as ``stem.0``, or an input of the data as ``data.0``."""


Every = Literal["epoch", "batch"]
Accumulate = Annotated[int, Field(ge=1, le=1 << 16)]
Decay = Annotated[float, Field(gt=0, lt=1)]
Precision = Literal["float32", "bfloat16", "float16"]
Cpus = Annotated[int, Field(ge=1, le=1024)]


class TrainingSpec(Frozen):
    """How one module is trained, with nothing left open: what its worker is told."""

    interface: Choice | None = None  # at the output; None: the tail, which has the loss instead
    optimizer: Choice  # a class of ``torch.optim``
    schedule: Choice | None = None  # a class of ``torch.optim.lr_scheduler``
    schedule_every: Every = "epoch"
    groups: tuple[GroupSpec, ...] = ()
    clip: ClipSpec = ClipSpec()
    accumulate: Accumulate = 1  # batches per update
    # Decay of an exponential moving average of the weights, which is evaluated and exported.
    ema: Decay | None = None
    freeze: Patterns = ()  # parameters that stay as they are; gradients pass through
    device: Device = "cpu"
    precision: Precision = "float32"  # of matrix products (others than float32: torch.autocast)
    cpus: Cpus = 1  # compute threads


class ModuleDefaults(Frozen):
    """Settings of one module, or the defaults of all modules: those of ``TrainingSpec``, or None.

    The runtime fills in what neither a module nor the chain's defaults say.
    """

    interface: Choice | None = None
    optimizer: Choice | None = None
    schedule: Choice | None = None
    schedule_every: Every | None = None
    groups: tuple[GroupSpec, ...] | None = None
    clip: ClipSpec | None = None
    accumulate: Accumulate | None = None
    ema: Decay | None = None
    init: InitSpec | None = None
    freeze: Patterns | None = None
    device: Device | None = None
    precision: Precision | None = None
    cpus: Cpus | None = None  # as ``resources.cpus``
    resources: ResourcesSpec = ResourcesSpec()

    @model_validator(mode="after")
    def _one_number_of_cpus(self) -> Self:
        if None not in (self.cpus, self.resources.cpus) and self.cpus != self.resources.cpus:
            raise ValueError(f"cpus {self.cpus} contradicts resources.cpus {self.resources.cpus}")
        return self


AUTO, MOST = "auto", 4
"""``replicas: auto``, and the largest number of replicas then."""


class ElasticSpec(Frozen):
    """A number of replicas, if it may change during a run."""

    start: Annotated[int, Field(ge=1, le=64)] = 1  # at the start of the run
    most: Annotated[int, Field(ge=2, le=64)]  # the largest number
    auto: bool = False  # as many as balance the chain, by how long a batch takes

    @model_validator(mode="before")
    @classmethod
    def _auto(cls, value: Any) -> Any:
        return {"most": MOST, "auto": True} if value == AUTO else value

    @model_validator(mode="after")
    def _start_fits(self) -> Self:
        if self.start > self.most:
            raise ValueError(f"'start: {self.start}' is more than 'most: {self.most}'")
        return self


def _kind_of_replicas(value: object) -> str:
    elastic = value == AUTO or isinstance(value, dict | ElasticSpec)
    return f"{TAG}{'elastic' if elastic else 'number'}"


class ModuleSpec(ModuleDefaults):
    """One module of the chain: consecutive layers, served by one worker."""

    name: Name
    # Names of earlier modules (``stem.0``, ``stem.1`` … for some outputs of a module that has
    # several), then ``data.0``, ``data.1`` … for inputs of the data. None: the module before; of
    # the first module, all of the data. Several are joined batch by batch, and the first layer gets
    # one argument for each.
    inputs: Annotated[tuple[Input, ...], Field(min_length=1)] | None = None
    layers: Annotated[tuple[LayerSpec, ...], Field(min_length=1)]
    # How many workers it has; they take the batches in turn. ``{start, most}`` if ``dnictl scale``
    # may change the number; ``auto`` lets the runtime choose.
    replicas: Annotated[
        Annotated[int, Field(ge=1, le=64), Tag(f"{TAG}number")]
        | Annotated[ElasticSpec, Tag(f"{TAG}elastic")],
        Discriminator(_kind_of_replicas),
    ] = 1

    @property
    def most(self) -> int:
        """The largest number of its workers."""
        return self.replicas.most if isinstance(self.replicas, ElasticSpec) else self.replicas

    @field_validator("inputs", mode="before")
    @classmethod
    def _one_or_several(cls, value: object) -> object:
        return (value,) if isinstance(value, str) else value

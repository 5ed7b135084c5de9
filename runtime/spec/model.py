"""pydantic models of ``chain.yaml``: links, and the whole chain."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from dni_runtime.spec.data import DataSpec
from dni_runtime.spec.graph import Graph
from dni_runtime.spec.machines import ImageSpec, MountSpec, PlacementSpec, ResourcesSpec
from dni_runtime.spec.modules import ModuleDefaults, ModuleSpec
from dni_runtime.spec.named import Choice, Frozen, LossSpec, Name
from dni_runtime.spec.running import (
    CheckpointSpec,
    ReplicationSpec,
    RestartSpec,
    SelectionSpec,
)

Dtype = Literal["float32", "bfloat16", "float16", "int8", "int8-channel"]
"""Types on the wire; ``int8`` is quantized with one scale per tensor, or one per channel."""

OnNan = Literal["stop", "skip", "warn"]
"""Behaviour when a loss, gradient or weight is not finite."""

PLAIN_METRICS = frozenset({"accuracy", "top5", "mae", "mse", "perplexity", "bits_per_character"})
"""Metrics that do not need torchmetrics."""

TORCHMETRICS = "torchmetrics>=1.4"
"""Requirement of all other metrics."""


class LinksSpec(Frozen):
    """Communication between neighbouring modules."""

    transport: Literal["auto", "ipc", "tcp"] = "auto"  # ``auto``: ipc if both ends share a host
    # For tcp: the network interface, address or network (``10.0.0.0/24``: the host's address in it)
    # to listen on; None: loopback. With ``auto`` only for links between hosts.
    interface: str | None = None
    # For tcp: link *i* of the chain, from 1, listens on ``port + i``. None: a free port.
    port: Annotated[int, Field(ge=1024, le=65535)] | None = None
    # Batches in flight on a link before the sender waits.
    window: Annotated[int, Field(ge=1, le=4096)] = 8
    dtype: Dtype | None = None  # of activations on the wire; None: the module's compute type
    gradient_dtype: Dtype | None = None  # on the wire; None: the activations' type
    # ``auto`` encrypts tcp beyond loopback and accepts only the neighbour; ``curve`` does so on
    # loopback too; ``none`` encrypts nothing and accepts every peer.
    security: Literal["auto", "curve", "none"] = "auto"
    connect_timeout_s: Annotated[float, Field(gt=0)] = 120.0  # for a neighbour at the start
    # When the downstream neighbour is gone and the window is full: ``wait`` for it, or ``continue``
    # training with the module's own gradient interface, without sending the batches that do not
    # fit.
    on_loss: Literal["wait", "continue"] = "wait"
    # Batches that a module keeps and trains on again while its upstream neighbour is gone.
    replay: Annotated[int, Field(ge=0, le=1 << 16)] = 0
    # Instead train on inputs predicted from labels, while the upstream neighbour is ``gone``, or
    # whenever the next batch is ``late``.
    synthetic_inputs: Literal["gone", "late"] | None = None

    @model_validator(mode="after")
    def _tcp_only(self) -> Self:
        if self.transport == "ipc" and (self.interface is not None or self.port is not None):
            raise ValueError("'interface' and 'port' are for 'transport': 'tcp' or 'auto'")
        if self.replay and self.synthetic_inputs is not None:
            raise ValueError("'replay' and 'synthetic_inputs' exclude each other: choose one")
        return self


class ChainSpec(Frozen):
    """A whole chain, as written in ``chain.yaml``."""

    name: Name
    # Of the initial weights, of the order of the samples and of dropout.
    seed: Annotated[int, Field(ge=0, lt=1 << 63)] = 0
    data: DataSpec = DataSpec()
    epochs: Annotated[int, Field(ge=1)] = 1  # passes over the training data
    # Training batches after which the run ends, even within an epoch.
    steps: Annotated[int, Field(ge=1)] | None = None
    eval_every: Annotated[int, Field(ge=0)] = 1  # evaluate after every n-th epoch; 0: never
    loss: Choice = Choice(name="CrossEntropyLoss")  # of ``torch.nn``, at the tail
    # Instead, several: the chain's loss is their sum.
    losses: Annotated[tuple[LossSpec, ...], Field(min_length=1)] | None = None
    # Beside the loss: ``PLAIN_METRICS``, or classes of torchmetrics.
    metrics: tuple[Choice, ...] = (Choice(name="accuracy"),)
    defaults: ModuleDefaults = ModuleDefaults()
    # The network that ``Piece`` layers are parts of, if they name no other.
    network: dict[str, Any] | None = None
    modules: Annotated[tuple[ModuleSpec, ...], Field(min_length=1, max_length=1024)]  # head first
    links: LinksSpec = LinksSpec()
    placement: PlacementSpec = PlacementSpec()
    checkpoint: CheckpointSpec = CheckpointSpec()
    selection: SelectionSpec | None = None
    replication: ReplicationSpec = ReplicationSpec()
    restart: RestartSpec = RestartSpec()
    image: ImageSpec = ImageSpec()
    mounts: tuple[MountSpec, ...] = ()  # host folders inside the containers
    infiniband: Literal["auto", "required", "off"] = "auto"  # containers get the host's devices
    # When a loss, gradient or weight is not finite: ``stop`` the run; ``skip`` the batch and count
    # it; or ``warn`` and continue. Weights that are not finite stop the run with ``skip``, too.
    on_nan: OnNan = "stop"
    # Seconds for the final checkpoint when the run is stopped.
    stop_grace_s: Annotated[float, Field(gt=0)] = 30.0
    # Users' classes that are told what happens in a run; see ``plan/callbacks.py``.
    callbacks: tuple[Choice, ...] = ()
    # Further source files for user classes, relative to ``chain.yaml``.
    sources: tuple[str, ...] = ()

    def total_batches(self, per_epoch: int | None) -> int | None:
        """Return the training batches of a whole run, if known, by those of an epoch."""
        if per_epoch is None:
            return self.steps
        return min(per_epoch * self.epochs, self.steps or per_epoch * self.epochs)

    def length(self, every: Literal["epoch", "batch"], per_epoch: int | None) -> int | None:
        """Return the length of a whole run in epochs or batches, if known."""
        total = self.total_batches(per_epoch)
        if every == "batch":
            return total
        return self.epochs if total is None or not per_epoch else -(-total // per_epoch)

    @model_validator(mode="before")
    @classmethod
    def _pieces_of_the_network(cls, value: Any) -> Any:
        if not isinstance(value, dict) or not isinstance(value.get("network"), dict):
            return value
        modules = []
        for module in value.get("modules") or ():
            layers = module.get("layers") if isinstance(module, dict) else None
            if isinstance(layers, list):
                layers = [_piece_of(value["network"], layer) for layer in layers]
                module = {**module, "layers": layers}
            modules.append(module)
        return {**value, "modules": modules}

    @field_validator("modules")
    @classmethod
    def _unique_names(cls, modules: tuple[ModuleSpec, ...]) -> tuple[ModuleSpec, ...]:
        seen: dict[str, int] = {}
        for index, module in enumerate(modules):
            if module.name in seen:
                raise ValueError(
                    f"modules {seen[module.name]} and {index} are both named {module.name!r}"
                )
            seen[module.name] = index
        if modules[-1].interface is not None:
            raise ValueError(
                f"the last module, {modules[-1].name!r}, has the loss and takes no 'interface'"
            )
        Graph.of(modules)
        return modules

    @model_validator(mode="after")
    def _loss_or_losses(self) -> Self:
        if self.losses is not None and self.loss != Choice(name="CrossEntropyLoss"):
            raise ValueError("'loss' and 'losses' exclude each other: list all in 'losses'")
        return self

    @model_validator(mode="after")
    def _windows_fit(self) -> Self:
        graph = self.graph
        for source, target in graph.numbers:
            needed = graph.beside(source, target)
            if needed > self.links.window:
                ends = self.modules[source].name, self.modules[target].name
                raise ValueError(
                    f"links.window {self.links.window} is too small for the link from {ends[0]!r} "
                    f"to {ends[1]!r}: another way between them has {needed} links, and each needs "
                    f"a batch in flight. Set 'window: {needed}' or more"
                )
        return self

    @model_validator(mode="after")
    def _map_names_all_modules(self) -> Self:
        names = [module.name for module in self.modules]
        workers = {
            module.name: [f"{module.name}.{number + 1}" for number in range(module.most)]
            for module in self.modules
        }
        placed = self.placement.map
        if placed:
            for name in placed:
                module, _, replica = name.partition(".")
                if module not in names or (replica and name not in workers[module]):
                    raise ValueError(
                        f"placement.map names {name!r}, but the modules are {', '.join(names)}"
                    )
            for module, replicas in workers.items():
                if module not in placed and not placed.keys() >= set(replicas):
                    raise ValueError(f"placement.map does not place module {module!r}")
        return self

    @property
    def graph(self) -> Graph:
        """Which module takes its input from which."""
        return Graph.of(self.modules)

    @property
    def image_to_build(self) -> ImageSpec:
        """The image, with torchmetrics if a metric needs it and no requirement names it."""
        packages = [
            re.split(r"[^A-Za-z0-9._-]", requirement.strip())[0]
            for requirement in self.image.requirements
        ]
        needed = any(metric.name not in PLAIN_METRICS for metric in self.metrics)
        if not needed or "torchmetrics" in map(str.lower, packages):
            return self.image
        more = (*self.image.requirements, TORCHMETRICS)
        return self.image.model_copy(update={"requirements": more})

    def setting(self, index: int, field: str) -> Any:
        """Return a module's own setting, else the chain's default, else None."""
        value = getattr(self.modules[index], field)
        return value if value is not None else getattr(self.defaults, field)

    def resources(self, index: int) -> ResourcesSpec:
        """Return a module's resources, each its own or the chain's default; at least one CPU."""
        values: dict[str, Any] = {"cpus": 1}
        for settings in (self.defaults, self.modules[index]):
            resources = settings.resources.model_dump(exclude_none=True)
            values |= {**({} if settings.cpus is None else {"cpus": settings.cpus}), **resources}
        return ResourcesSpec(**values)


def _piece_of(network: dict[str, Any], layer: Any) -> Any:
    if layer == "Piece":
        layer = {"Piece": {}}
    if isinstance(layer, dict) and isinstance(layer.get("Piece"), dict):
        return {"Piece": {"network": network, **layer["Piece"]}}
    return layer

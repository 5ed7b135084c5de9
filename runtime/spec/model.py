"""pydantic models of ``chain.yaml``.

Whatever has a name and keyword arguments (a layer, an optimizer, a gradient interface …) is written
as ``Name`` or as ``Name: {keyword: value}``; the models here keep that form both ways, so that
``dnictl config`` prints what a user may write. Names and keywords are looked up later, where the
classes are (``dni_runtime.core``): this package knows structure only.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from pathlib import PurePosixPath
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    StringConstraints,
    field_validator,
    model_serializer,
    model_validator,
)

Name = Annotated[str, StringConstraints(pattern=r"^[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?$")]
"""Names end up in paths, image labels and definition files: lower-case letters, digits, dashes."""

Device = Annotated[str, StringConstraints(pattern=r"^(auto|cpu|(cuda|rocm)(:\d{1,2})?)$")]

Dtype = Literal["float32", "bfloat16", "float16", "int8", "int8-channel"]
"""Types on the wire; ``int8`` is quantized with one scale per tensor, or one per channel."""

IMPORT_KEY = "import"


class Frozen(BaseModel):
    """Immutable, with unknown keys refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)


def _named(value: Any, what: str) -> tuple[str, Any]:
    """Split ``Name`` / ``{Name: arguments}`` / ``{import: 'pkg:Class', args: {…}}``."""
    if isinstance(value, str):
        return value, {}
    if isinstance(value, dict):
        if IMPORT_KEY in value:
            extra = sorted(set(value) - {IMPORT_KEY, "args"})
            if extra:
                raise ValueError(f"{extra[0]!r} beside 'import'; allowed: import, args")
            path = value[IMPORT_KEY]
            if not isinstance(path, str) or path.count(":") != 1 or not all(path.split(":")):
                raise ValueError(f"import path {path!r} is not of the form 'package.module:Class'")
            return path, value.get("args") or {}
        if len(value) == 1:
            name, arguments = next(iter(value.items()))
            if isinstance(name, str):
                return name, {} if arguments is None else arguments
    raise ValueError(
        f"{value!r} is not {what}: write 'Name', 'Name: {{keyword: value}}' or "
        "'import: package.module:Class' with 'args: {…}'"
    )


def _unnamed(name: str, arguments: Any) -> Any:
    if ":" in name:
        return {IMPORT_KEY: name, "args": arguments} if arguments else {IMPORT_KEY: name}
    return {name: arguments} if arguments else name


class Choice(Frozen):
    """Something chosen by name, with keyword arguments: ``Adam: {lr: 0.001}``."""

    name: str
    args: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _parse(cls, value: Any) -> Any:
        if isinstance(value, dict) and "name" in value and set(value) <= {"name", "args"}:
            return value
        name, arguments = _named(value, "a name with keywords")
        if not isinstance(arguments, dict):
            raise ValueError(f"{name} takes keywords, as in '{name}: {{keyword: value}}'")
        return {"name": name, "args": arguments}

    @model_serializer
    def _dump(self) -> Any:
        return _unnamed(self.name, self.args)


class LayerSpec(Frozen):
    """One layer: a class of ``torch.nn``, a user's class, or a block of layers.

    Attributes:
        type: Name in ``torch.nn``; ``Sequential`` or ``Residual``; or ``package.module:Class``.
        args: Keyword arguments of the class.
        layers: The layers inside a block, in order.
        shortcut: For ``Residual``: the layers on the other path (identity when empty).
    """

    type: str
    args: dict[str, Any] = Field(default_factory=dict)
    layers: tuple[LayerSpec, ...] = ()
    shortcut: tuple[LayerSpec, ...] = ()

    @model_validator(mode="before")
    @classmethod
    def _parse(cls, value: Any) -> Any:
        if isinstance(value, dict) and "type" in value and set(value) <= set(cls.model_fields):
            return value
        name, arguments = _named(value, "a layer")
        if name not in {"Sequential", "Residual"}:
            if not isinstance(arguments, dict):
                raise ValueError(f"{name} takes keywords, as in '{name}: {{keyword: value}}'")
            return {"type": name, "args": arguments}
        if isinstance(arguments, list):
            arguments = {"layers": arguments}
        allowed = {"layers"} if name == "Sequential" else {"layers", "shortcut"}
        if not isinstance(arguments, dict) or "layers" not in arguments:
            raise ValueError(f"{name} takes a list of layers")
        extra = sorted(set(arguments) - allowed)
        if extra:
            raise ValueError(f"{name} has no {extra[0]!r}; allowed: {', '.join(sorted(allowed))}")
        return {"type": name, **arguments}

    @model_serializer
    def _dump(self) -> Any:
        if self.type == "Sequential":
            return {"Sequential": list(self.layers)}
        if self.type == "Residual":
            block: dict[str, Any] = {"layers": list(self.layers)}
            if self.shortcut:
                block["shortcut"] = list(self.shortcut)
            return {"Residual": block}
        return _unnamed(self.type, self.args)


class DataSpec(Frozen):
    """Which data the head reads.

    Attributes:
        dataset: ``digits``, ``mnist``, ``fashion-mnist``, ``cifar10``, ``npz``, or the import path
            (``package.module:Class``) of a ``torch.utils.data.Dataset``.
        path: Folder or file of the data; found by itself where a package installs it.
        batch_size: Samples per training batch.
        eval_batch_size: Samples per evaluation batch (default: four training batches).
        flatten: Give samples as vectors.
        normalize: Scale images to zero mean and unit variance with the training set's figures.
        shuffle: A new order of the samples each epoch, drawn from the chain's seed.
        drop_last: Leave out a last, smaller batch.
        train_limit: Use only so many training samples.
        eval_limit: Use only so many evaluation samples.
        args: Keyword arguments of a user's data set, which is made twice: with ``train=True`` and
            with ``train=False``.
    """

    dataset: str = "digits"
    path: str | None = None
    batch_size: Annotated[int, Field(ge=1, le=1 << 20)] = 128
    eval_batch_size: Annotated[int, Field(ge=1, le=1 << 20)] | None = None
    flatten: bool = False
    normalize: bool = True
    shuffle: bool = True
    drop_last: bool = False
    train_limit: Annotated[int, Field(ge=1)] | None = None
    eval_limit: Annotated[int, Field(ge=1)] | None = None
    args: dict[str, Any] = Field(default_factory=dict)

    def at(self, path: object | None) -> Self:
        """The same data at another place; None: where it is."""
        return self if path is None else self.model_copy(update={"path": str(path)})

    @property
    def largest_batch(self) -> int:
        """Samples in the largest batch that can travel."""
        return max(self.batch_size, self.eval_size)

    @property
    def eval_size(self) -> int:
        """Samples per evaluation batch."""
        return self.eval_batch_size or 4 * self.batch_size


class LinksSpec(Frozen):
    """How neighbouring modules talk.

    Attributes:
        transport: ``ipc`` (same host), ``tcp``, or ``auto`` (ipc where both ends share a host).
        interface: For tcp: the network interface, address or network (``10.0.0.0/24``: the host's
            address in it) to listen on (default: loopback). With ``auto`` it is for links that
            cross hosts.
        port: For tcp: first port; module *i* listens on ``port + i``. Default: one that is free.
        window: Batches that may be under way on a link before the sender waits.
        dtype: Type of activations on the wire (default: the type the module computes).
        gradient_dtype: Type of gradients on the wire (default: the activations' type).
        security: ``auto`` encrypts tcp beyond loopback and lets in only the neighbour; ``curve``
            does so on loopback too; ``none`` encrypts nothing and lets everybody in.
        connect_timeout_s: Seconds to wait for a neighbour before giving up, at the start.
        on_loss: What a module does whose neighbour downstream is gone and whose window is full:
            ``wait`` for it, or ``continue`` training on its own gradient interface; the batches
            that do not fit are then not sent.
        replay: Batches that a module keeps, to train on them again while its neighbour upstream is
            gone; 0 for none.
    """

    transport: Literal["auto", "ipc", "tcp"] = "auto"
    interface: str | None = None
    port: Annotated[int, Field(ge=1024, le=65535)] | None = None
    window: Annotated[int, Field(ge=1, le=4096)] = 8
    dtype: Dtype | None = None
    gradient_dtype: Dtype | None = None
    security: Literal["auto", "curve", "none"] = "auto"
    connect_timeout_s: Annotated[float, Field(gt=0)] = 120.0
    on_loss: Literal["wait", "continue"] = "wait"
    replay: Annotated[int, Field(ge=0, le=1 << 16)] = 0

    @model_validator(mode="after")
    def _tcp_only(self) -> Self:
        if self.transport == "ipc" and (self.interface is not None or self.port is not None):
            raise ValueError("'interface' and 'port' are for 'transport': 'tcp' or 'auto'")
        return self


class CheckpointSpec(Frozen):
    """When the chain writes consistent checkpoints.

    Attributes:
        every_epochs: After every so many epochs; 0 for only at the end or on request.
        every_steps: Also after every so many training batches.
        keep: How many complete checkpoints to keep.
    """

    every_epochs: Annotated[int, Field(ge=0)] = 1
    every_steps: Annotated[int, Field(ge=1)] | None = None
    keep: Annotated[int, Field(ge=1)] = 2


class RestartSpec(Frozen):
    """What happens when a worker dies.

    Attributes:
        policy: ``on-failure``: its module is started again; ``never``: the run ends.
        limit: Starts again of one module, without a healthy stretch between, before the run ends.
        backoff_s: Seconds before the first start again; each further one waits twice as long.
        backoff_max_s: The longest wait.
        healthy_s: A worker that has run this long starts the count anew.
        snapshot_s: A module keeps a snapshot of its own state at most so often, to go on from when
            it is restarted; 0 for none (it goes on from its newest checkpoint).
    """

    policy: Literal["on-failure", "never"] = "on-failure"
    limit: Annotated[int, Field(ge=0)] = 10
    backoff_s: Annotated[float, Field(ge=0)] = 0.5
    backoff_max_s: Annotated[float, Field(ge=0)] = 30.0
    healthy_s: Annotated[float, Field(gt=0)] = 60.0
    snapshot_s: Annotated[float, Field(ge=0)] = 10.0


class BaseSpec(Frozen):
    """What the base image is made from (apptainer-build, "definition files").

    Attributes:
        bootstrap: Apptainer's bootstrap agent.
        source: Debian suite for debootstrap, else the image's URI or path.
        mirror: Package mirror for debootstrap (default: the build host's own).
        python: Python version inside the image, ``major.minor``.
    """

    bootstrap: Literal["debootstrap", "docker", "oras", "library", "localimage"] = "debootstrap"
    source: str = "bookworm"
    mirror: str | None = None
    python: Annotated[str, StringConstraints(pattern=r"^3\.\d{1,2}$")] = "3.11"

    @field_validator("source", "mirror")
    @classmethod
    def _one_line(cls, value: str | None) -> str | None:
        if value is not None and (not value or any(c in value for c in "\n\r\0")):
            raise ValueError("must be one non-empty line")
        return value


def _own_torch() -> str:
    try:
        return f"torch=={version('torch').split('+')[0]}"
    except PackageNotFoundError:
        return "torch>=2.6"


class ImageSpec(Frozen):
    """What the module images hold.

    Attributes:
        base: What the base image is made from.
        torch: A requirement such as ``torch==2.13.0``, or ``base`` to keep the base image's own.
            Default: the version installed here, so that containers compute as this host does.
        torch_index: Index URL of the torch build wanted (CPU, CUDA or ROCm).
        requirements: Further Python requirements, for user layers and data sets.
        packages: Further distribution packages.
        environment: Environment variables set in the image.
        require_signed: Start only images whose signature is good: by the local PGP keyring, or by
            the public key in PEM form at this path.
    """

    base: BaseSpec = BaseSpec()
    torch: str = Field(default_factory=_own_torch)
    torch_index: str | None = None
    requirements: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()
    environment: dict[str, str] = Field(default_factory=dict)
    require_signed: bool | str = False


class MountSpec(Frozen):
    """A folder of the host inside the containers.

    Attributes:
        source: Path on the host.
        target: Absolute path in the container (default: the same).
        read_only: Whether the container may only read it.
    """

    source: str
    target: str | None = None
    read_only: bool = True

    @field_validator("target")
    @classmethod
    def _absolute(cls, value: str | None) -> str | None:
        if value is not None and not PurePosixPath(value).is_absolute():
            raise ValueError(f"{value!r} is not an absolute path")
        return value


class ResourcesSpec(Frozen):
    """What a cluster gives to one module's worker.

    Attributes:
        cpus: Processors, and threads of its computations.
        gpus: GPUs.
        memory: Memory, such as ``800M`` or ``16G`` (powers of 1024, as Slurm counts).
        partition: The Slurm partition that it needs.
    """

    cpus: Annotated[int, Field(ge=1, le=1024)] | None = None
    gpus: Annotated[int, Field(ge=0, le=64)] | None = None
    memory: Annotated[str, StringConstraints(pattern=r"^[1-9][0-9]{0,8}[MG]$")] | None = None
    partition: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.-]+$")] | None = None

    @property
    def memory_mib(self) -> int | None:
        """The memory in MiB, or None where it is not given."""
        if self.memory is None:
            return None
        return int(self.memory[:-1]) * (1024 if self.memory.endswith("G") else 1)


class PlacementSpec(Frozen):
    """On which nodes of an allocation the modules are.

    Attributes:
        strategy: ``packed`` fills one node before the next; ``spread`` gives each node the same
            number of modules; ``auto`` the same amount of work; ``explicit`` follows ``map``.
            Neighbours stay together, but for ``explicit``.
        nodes: How many nodes (default: one, or what the map names).
        per_node: Most modules on one node.
        map: For ``explicit``: each module's node, from 0.
    """

    strategy: Literal["packed", "spread", "explicit", "auto"] = "auto"
    nodes: Annotated[int, Field(ge=1, le=1024)] | None = None
    per_node: Annotated[int, Field(ge=1, le=1024)] | None = None
    map: dict[Name, Annotated[int, Field(ge=0, le=1023)]] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _explicit_has_a_map(self) -> Self:
        if (self.strategy == "explicit") != bool(self.map):
            raise ValueError("'map' and 'strategy: explicit' need each other")
        return self


class ModuleDefaults(Frozen):
    """Settings of one module, or of all modules that do not say otherwise.

    Attributes:
        interface: The gradient interface at the module's output (the tail has the loss instead).
        optimizer: A class of ``torch.optim`` and its keywords.
        schedule: A class of ``torch.optim.lr_scheduler`` and its keywords.
        schedule_every: Whether the schedule steps once an epoch or once a batch.
        device: ``cpu``, ``cuda``, ``rocm``, one of several as ``cuda:1``, or ``auto``.
        precision: Type of the module's matrix products (``bfloat16``: torch.autocast).
        cpus: Threads of the worker's computations; the same as ``resources.cpus``.
        resources: What a cluster gives to the worker.
    """

    interface: Choice | None = None
    optimizer: Choice | None = None
    schedule: Choice | None = None
    schedule_every: Literal["epoch", "batch"] | None = None
    device: Device | None = None
    precision: Literal["float32", "bfloat16"] | None = None
    cpus: Annotated[int, Field(ge=1, le=1024)] | None = None
    resources: ResourcesSpec = ResourcesSpec()

    @model_validator(mode="after")
    def _one_number_of_cpus(self) -> Self:
        if None not in (self.cpus, self.resources.cpus) and self.cpus != self.resources.cpus:
            raise ValueError(f"cpus {self.cpus} beside resources.cpus {self.resources.cpus}")
        return self


class ModuleSpec(ModuleDefaults):
    """One module of the chain: consecutive layers, served by one worker."""

    name: Name
    layers: Annotated[tuple[LayerSpec, ...], Field(min_length=1)]


class ChainSpec(Frozen):
    """A whole chain, as written in ``chain.yaml``.

    Attributes:
        name: Name of the chain.
        seed: Seed of the initial weights, of the order of the samples and of dropout.
        data: What the head reads.
        epochs: Passes over the training data.
        steps: Stop after so many training batches, even within an epoch.
        eval_every: Evaluate after every so many epochs; 0 for never.
        loss: A loss of ``torch.nn``, at the tail.
        metrics: What evaluation reports beside the loss.
        defaults: Settings of the modules that do not say otherwise.
        modules: The modules, head first.
        links: How neighbours talk.
        placement: Where the modules are on a cluster.
        checkpoint: When checkpoints are written.
        restart: What happens when a worker dies.
        image: What the images hold.
        mounts: Host folders inside the containers.
        infiniband: Whether containers get the host's InfiniBand devices.
        stop_grace_s: Seconds that a worker told to stop has for its checkpoint.
        sources: Further source files for user classes, relative to ``chain.yaml``.
    """

    name: Name
    seed: Annotated[int, Field(ge=0, lt=1 << 63)] = 0
    data: DataSpec = DataSpec()
    epochs: Annotated[int, Field(ge=1)] = 1
    steps: Annotated[int, Field(ge=1)] | None = None
    eval_every: Annotated[int, Field(ge=0)] = 1
    loss: Choice = Choice(name="CrossEntropyLoss")
    metrics: tuple[str, ...] = ("accuracy",)
    defaults: ModuleDefaults = ModuleDefaults()
    modules: Annotated[tuple[ModuleSpec, ...], Field(min_length=1, max_length=1024)]
    links: LinksSpec = LinksSpec()
    placement: PlacementSpec = PlacementSpec()
    checkpoint: CheckpointSpec = CheckpointSpec()
    restart: RestartSpec = RestartSpec()
    image: ImageSpec = ImageSpec()
    mounts: tuple[MountSpec, ...] = ()
    infiniband: Literal["auto", "required", "off"] = "auto"
    stop_grace_s: Annotated[float, Field(gt=0)] = 30.0
    sources: tuple[str, ...] = ()

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
        return modules

    @model_validator(mode="after")
    def _map_names_all_modules(self) -> Self:
        names = [module.name for module in self.modules]
        if self.placement.map:
            for name in self.placement.map:
                if name not in names:
                    raise ValueError(
                        f"placement.map names {name!r}, but the modules are {', '.join(names)}"
                    )
            left = [name for name in names if name not in self.placement.map]
            if left:
                raise ValueError(f"placement.map says nothing of module {left[0]!r}")
        return self

    def setting(self, index: int, field: str) -> Any:
        """A module's own setting, else the chain's default, else None."""
        own = getattr(self.modules[index], field)
        return own if own is not None else getattr(self.defaults, field)

    def resources(self, index: int) -> ResourcesSpec:
        """A module's resources, each its own or else the chain's default; at least one CPU."""
        given: dict[str, Any] = {"cpus": 1}
        for one in (self.defaults, self.modules[index]):
            own = one.resources.model_dump(exclude_none=True)
            given |= {**({} if one.cpus is None else {"cpus": one.cpus}), **own}
        return ResourcesSpec(**given)

"""Models of the machine settings in ``chain.yaml``: images, mounts, resources, placement."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from dni_runtime.spec.named import ABSOLUTE, Frozen, matching, module_of


class BaseSpec(Frozen):
    """Origin of the base image (apptainer-build, "definition files")."""

    # Apptainer's bootstrap agent.
    bootstrap: Literal["debootstrap", "docker", "oras", "library", "localimage"] = "debootstrap"
    source: str = "bookworm"  # Debian suite for debootstrap, else the image's URI or path
    mirror: str | None = None  # for debootstrap; None: the build host's own
    python: Annotated[str, matching(r"^3\.\d{1,2}$", "a version of Python, as '3.11'")] = (
        "3.11"  # in the image
    )

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
    """Content of the module images."""

    base: BaseSpec = BaseSpec()
    # A requirement such as ``torch==2.13.0``, or ``base`` to keep the base image's own. Default:
    # the version installed here, so that containers compute as this host does.
    torch: str = Field(default_factory=_own_torch)
    torch_index: str | None = None  # package index URL of the torch build (CPU, CUDA or ROCm)
    requirements: tuple[str, ...] = ()  # of Python, for user layers and data sets
    packages: tuple[str, ...] = ()  # of the distribution
    environment: dict[str, str] = Field(default_factory=dict)
    # Start only images with a valid signature, checked with the local PGP keyring, or with the
    # public key in PEM form at this path.
    require_signed: bool | str = False


class MountSpec(Frozen):
    """A folder of the host inside the containers."""

    source: str  # on the host
    target: Annotated[str, ABSOLUTE] | None = None  # in the container; None: the same
    read_only: bool = True


class ResourcesSpec(Frozen):
    """Cluster resources of one module's worker."""

    cpus: Annotated[int, Field(ge=1, le=1024)] | None = None  # and compute threads
    gpus: Annotated[int, Field(ge=0, le=64)] | None = None
    # Such as ``800M`` or ``16G``: powers of 1024, as Slurm counts.
    memory: Annotated[str, matching(r"^[1-9][0-9]{0,8}[MG]$", "a size as 800M or 16G")] | None = (
        None
    )

    @property
    def memory_mib(self) -> int | None:
        """The memory in MiB, or None if it is not set."""
        if self.memory is None:
            return None
        return int(self.memory[:-1]) * (1024 if self.memory.endswith("G") else 1)


WorkerName = Annotated[
    str, matching(r"^[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?(\.[1-9]\d?)?$", "a module's name")
]
"""A module's name, or a replica's as ``upper.2``."""


class PlacementSpec(Frozen):
    """Placement of the modules on the nodes of an allocation."""

    # ``packed`` fills one node before the next; ``spread`` gives each node the same number of
    # modules; ``auto`` the same amount of work; ``explicit`` follows ``map``. Neighbours stay
    # together, except with ``explicit``.
    strategy: Literal["packed", "spread", "explicit", "auto"] = "auto"
    # None: one, or as many as the map names.
    nodes: Annotated[int, Field(ge=1, le=1024)] | None = None
    per_node: Annotated[int, Field(ge=1, le=1024)] | None = None  # most modules on one node
    # For ``explicit``: each module's node, from 0; of a replica by itself: ``upper.2``.
    map: dict[WorkerName, Annotated[int, Field(ge=0, le=1023)]] = Field(default_factory=dict)

    def node_of(self, worker: str) -> int:
        """Return the node that ``map`` gives a worker, by its own name or its module's."""
        return self.map[worker if worker in self.map else module_of(worker)]

    @model_validator(mode="after")
    def _explicit_has_a_map(self) -> Self:
        if (self.strategy == "explicit") != bool(self.map):
            raise ValueError("'map' and 'strategy: explicit' need each other")
        return self

"""Base of all models of ``chain.yaml``, and models of names with keyword arguments.

A layer, an optimizer, a gradient interface … is written as ``Name`` or as ``Name: {keyword:
value}``; the models here read and write that form, so that ``dnictl config`` prints valid input.
``dni_runtime.core`` looks up names and keywords later: this package checks structure only.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StringConstraints,
    model_serializer,
    model_validator,
)

WORDS: dict[str, str] = {}
"""What a text of each pattern is, for errors: people do not read regular expressions."""


def matching(pattern: str, what: str) -> StringConstraints:
    """Constrain a text to a pattern; an error says that it is not ``what``."""
    WORDS[pattern] = what
    return StringConstraints(pattern=pattern)


_LETTERS = "of at most 40 lower-case letters, digits and inner dashes"

Name = Annotated[str, matching(r"^[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?$", f"a name {_LETTERS}")]
"""Names end up in paths, image labels and definition files: lower-case letters, digits, dashes."""

WorkerName = Annotated[
    str,
    matching(
        r"^[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?(\.[1-9][0-9]{0,5})?$",
        "the name of a worker: its module's, with '.' and a number if that has replicas",
    ),
]
"""Of documents that another one may have written: paths are made of it."""

RunName = Annotated[
    str,
    matching(r"^([^/.]|\.[^/.]|\.\.[^/])[^/]*$", "the name of a folder"),
]
"""The same of a run: its directory's name."""

Words = Annotated[
    tuple[str, ...],
    BeforeValidator(
        lambda value: (value,) if isinstance(value, str) else value,
        json_schema_input_type=str | tuple[str, ...],
    ),
]
"""Several texts, or one that is written without a list."""


def _absolute(value: str) -> str:
    if not value.startswith("/"):
        raise ValueError(f"{value!r} is not an absolute path")
    return value


ABSOLUTE = AfterValidator(_absolute)
"""Constrain a path to an absolute one."""

IMPORT_KEY = "import"

TAG = "#"
"""What the names of a union's kinds begin with, which pydantic puts into locations of errors."""


def number_of(worker: str) -> int:
    """Return which replica of its module a worker is, by its name."""
    return int(worker.partition(".")[2] or 1)


def takes_part(worker: str, counts: Mapping[str, int]) -> bool:
    """Whether a worker is one of so many replicas of its module; others have no number here."""
    number = number_of(worker)
    return number <= counts.get(module_of(worker), number)


def worker_name(module: str, replica: int, replicas: int) -> str:
    """Return the name of a worker: ``upper``, or ``upper.2`` if the module has replicas."""
    return module if replicas == 1 else f"{module}.{replica}"


def module_of(worker: str) -> str:
    """Return the module that a worker serves, by the worker's name."""
    return worker.partition(".")[0]


class Frozen(BaseModel):
    """Immutable, with unknown keys refused, and numbers that are none."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False
    )


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
    """A name with keyword arguments: ``Adam: {lr: 0.001}``."""

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


class LossSpec(Frozen):
    """One of several losses, of one of the last module's outputs and one of the labels."""

    loss: Choice  # of ``torch.nn``, or a user's
    weight: Annotated[float, Field(gt=0)] = 1.0  # factor in the sum
    output: Annotated[int, Field(ge=0)] = 0  # number of the output
    label: Annotated[int, Field(ge=0)] = 0  # number of the label


class LayerSpec(Frozen):
    """One layer: a class of ``torch.nn``, a user's class, or a block of layers."""

    type: str  # name in ``torch.nn``; ``Sequential`` or ``Residual``; or ``package.module:Class``
    args: dict[str, Any] = Field(default_factory=dict)
    layers: tuple[LayerSpec, ...] = ()  # inside a block, in order
    shortcut: tuple[LayerSpec, ...] = ()  # of ``Residual``: the other path; empty: identity

    @property
    def types(self) -> tuple[str, ...]:
        """Types of this layer and of all layers inside it."""
        inside = (*self.layers, *self.shortcut)
        return (self.type, *(type for layer in inside for type in layer.types))

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

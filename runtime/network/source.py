"""A user's network: what returns it, and what its ``forward`` takes and returns."""

from __future__ import annotations

import contextlib
import copy
import inspect
import re
import traceback
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextvars import ContextVar
from functools import partial
from pathlib import Path
from typing import Annotated, Any, TypeVar

import torch
from pydantic import BaseModel, ConfigDict, Field, field_validator
from torch import Tensor, nn

from dni_runtime.errors import SpecError
from dni_runtime.spec import TensorSpec
from dni_runtime.spec.choices import find_attribute
from dni_runtime.spec.named import matching

_Built = TypeVar("_Built", bound=nn.Module)


class NetworkSpec(BaseModel):
    """A network that a user's function or class returns."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    target: Annotated[str, matching(r"^[\w.]+:[\w.]+$", "of the form 'package.module:name'")] = (
        Field(alias="import")
    )
    args: dict[str, Any] = Field(default_factory=dict)
    example: tuple[TensorSpec, ...] = Field(min_length=1)  # one sample of each input of the data
    takes: tuple[str, ...] = ()  # arguments of ``forward`` that get them; (): its first ones
    # Where the tensor is in what ``forward`` returns, if that is none: keys, indices and
    # attributes, as ``0`` or ``outputs.0.logits``.
    returns: str | None = None

    @field_validator("example", mode="before")
    @classmethod
    def _written(cls, value: Any) -> Any:
        return [read_tensor(entry) if isinstance(entry, str) else entry for entry in value]

    @field_validator("returns", mode="before", json_schema_input_type=str | int | None)
    @classmethod
    def _index(cls, value: Any) -> Any:
        return str(value) if type(value) is int else value

    def to_yaml(self) -> dict[str, Any]:
        """Return it as a chain file has it."""
        written = self.model_dump(by_alias=True, exclude_defaults=True)
        return {**written, "example": [write_tensor(tensor) for tensor in self.example]}


def read_tensor(text: str) -> TensorSpec:
    """Read one sample as ``float32[3, 32, 32]``; other texts raise ``ValueError``.

    In ``int64[<=128]`` each batch has a length of its own.
    """
    match = re.fullmatch(r"\s*(\w+)\s*\[([<=\d\s,x]*)\]\s*", text)
    if match is None or not isinstance(getattr(torch, match[1], None), torch.dtype):
        raise ValueError(f"{text!r} is not a type and a shape, as in 'float32[3, 32, 32]'")
    sizes = re.findall(r"(<=)?\s*(\d+)", match[2])
    return TensorSpec(
        shape=tuple(int(size) for _, size in sizes),
        dtype=match[1],
        varying=tuple(at for at, (varies, _) in enumerate(sizes) if varies),
    )


def write_tensor(tensor: TensorSpec) -> str:
    """Write one sample as :func:`read_tensor` reads it."""
    return f"{tensor.dtype}[{', '.join(tensor.sizes)}]"


WRAPPED = "network."
"""Where :class:`NetworkWrapper` has the network."""


class NetworkWrapper(nn.Module):
    """A network that takes the data's inputs in their order, and returns one tensor."""

    def __init__(self, network: nn.Module, spec: NetworkSpec) -> None:
        super().__init__()
        self.network = network
        self._takes, self._returns = spec.takes, spec.returns

    def forward(self, *xs: Tensor) -> Tensor:
        if self._takes:
            y = self.network(**dict(zip(self._takes, xs, strict=True)))
        else:
            y = self.network(*xs)
        if isinstance(y, Tensor):
            return y  # in one of the two modes, perhaps
        told = None if self._returns is None else tuple(self._returns.split("."))
        places = sorted(_places(y, (), set()), key=len) if told is None else [told]
        tensor = _tensor_at(y, places[0]) if len(places) == 1 else None
        if tensor is None:
            places = sorted(_places(y, (), set()), key=len)
            names = ", ".join(repr(".".join(path)) for path in places[:8])
            raise SpecError(
                f"forward returns {type(y).__name__} in {'train' if self.training else 'eval'} mode"
                + ("" if self._returns is None else f", without a tensor {self._returns!r}"),
                hint=f"name one by 'returns' (--returns): {names}{' …' if places[8:] else ''}"
                if places
                else "there is no tensor in it",
            )
        return tensor


def _tensor_at(y: Any, path: Sequence[str]) -> Tensor | None:
    """Return the tensor at a path in what 'forward' returns; a key may have dots."""
    if isinstance(y, Tensor) or not path:
        return y if isinstance(y, Tensor) and not path else None
    for end in range(1, len(path) + 1):
        for value in _inside(y, ".".join(path[:end])):
            if (tensor := _tensor_at(value, path[end:])) is not None:
                return tensor
    return None


def _inside(y: Any, name: str) -> Iterator[Any]:
    for key in (name, int(name)) if re.fullmatch(r"-?[0-9]+", name) else (name,):
        with contextlib.suppress(LookupError, TypeError):
            yield y[key]
    yield getattr(y, name, None)


def _places(y: Any, path: tuple[str, ...], seen: set[int]) -> Iterator[tuple[str, ...]]:
    """Yield the paths of the tensors in what 'forward' returns."""
    if isinstance(y, Tensor):
        yield path
    if isinstance(y, Tensor | str | bytes) or id(y) in seen:
        return
    seen.add(id(y))
    items: Any
    if isinstance(y, Mapping):
        items = y.items()
    elif isinstance(y, Sequence):
        items = zip(getattr(y, "_fields", range(len(y))), y, strict=True)
    else:
        names = [*getattr(y, "__dataclass_fields__", ()), *getattr(y, "__dict__", ())]
        items = [(name, getattr(y, name, None)) for name in names if not name.startswith("_")]
    for name, value in dict(items).items():
        yield from _places(value, (*path, str(name)), seen)


def arguments_of(module: nn.Module, names: Sequence[str]) -> tuple[str, ...]:
    """Return those of some names that ``forward`` has as arguments, in its order."""
    return tuple(name for name in inspect.signature(module.forward).parameters if name in names)


def check_named(module: nn.Module, names: Sequence[str]) -> None:
    """Refuse several keys of which ``forward`` knows none: their order may be another."""
    if len(names) > 1:
        taken = ", ".join(inspect.signature(module.forward).parameters)
        raise SpecError(
            f"none of the rows' keys {', '.join(map(repr, names))} is an argument of "
            f"{type(module).__name__}.forward({taken})",
            location=("data",),
            hint="name the inputs in 'data.inputs', in the order of the arguments",
        )


def build_network(spec: NetworkSpec) -> nn.Module:
    """Call the user's function; the network has the weights that it gives, and is in train mode.

    A ``train`` of its own may freeze parameters, as that of a frozen BatchNorm does.
    """
    build = find_attribute(spec.target, "network", ())
    try:
        network = build(**spec.args)
    except (Exception, SystemExit) as error:
        raise SpecError(
            f"{spec.target}({_written(spec.args)}) failed{guilty_line(error)[0]}: "
            f"{type(error).__name__}: {first_line(error)}",
            location=("args",),
        ) from error
    if not isinstance(network, nn.Module):
        raise SpecError(f"{spec.target} returns {type(network).__name__}, not a torch.nn.Module")
    for name, tensor in named_tensors(network):
        if torch.nn.parameter.is_lazy(tensor):
            raise SpecError(
                f"{spec.target} has a parameter {name!r} without a shape, of a lazy layer",
                hint="call the network once with a batch before it is returned",
            )
    return network.train()


def without_memory(build: Callable[[], _Built]) -> _Built:
    """Build on torch's meta device; what needs its numbers is built in memory, and moved there."""
    with torch.random.fork_rng(devices=[]):
        try:
            with torch.device("meta"):
                return build()
        except SpecError:
            with torch.device("cpu"):
                built = build()
            try:
                return _on_no_device(built)
            except Exception:  # it holds what cannot be copied
                return built.to("meta")


_Key = tuple[str, Callable[..., Any], torch.device]  # the network as text, its function, where
_kept: ContextVar[dict[_Key, nn.Module] | None] = ContextVar("_kept", default=None)
_on_meta: dict[_Key, nn.Module] = {}
_MOST = 4


@contextlib.contextmanager
def built_once() -> Iterator[None]:
    """Let :func:`network_for` call the user's function once in this context."""
    token = _kept.set({} if (kept := _kept.get()) is None else kept)
    try:
        yield
    finally:
        _kept.reset(token)


def network_for(spec: NetworkSpec, needed: Container[str]) -> nn.Module:
    """Return the network as the user's function gives it, on torch's default device.

    Within :func:`built_once`, and on the meta device, it is a copy of the first one, which may lack
    tensors that are not ``needed``.
    """
    build, kept = partial(build_network, spec), _kept.get()
    function, device = find_attribute(spec.target, "network", ()), torch.empty(0).device
    key = spec.model_dump_json(by_alias=True), function, device
    first = (kept or {}).get((*key[:2], torch.device("cpu")))
    if device.type == "meta":
        build, kept = partial(without_memory, build), _on_meta
        if len(_on_meta) > _MOST:
            _on_meta.clear()
    if kept is None:
        return build()
    try:
        if key not in kept:
            kept[key] = build() if first is None else _on_no_device(first)
        tensors = list(named_tensors(kept[key]))
        if any(one._backward_hooks or one._post_accumulate_grad_hooks for _, one in tensors):
            return build()  # a copy has no hooks of tensors
        wanted = {id(tensor) for name, tensor in tensors if name in needed}
        missing = {id(tensor): None for _, tensor in tensors if id(tensor) not in wanted}
        return copy.deepcopy(kept[key], missing)
    except SpecError:
        raise
    except Exception:  # it holds what cannot be copied
        return build()


def _on_no_device(network: _Built) -> _Built:
    """Return a copy on the meta device, in which weights stay tied, as they do not by ``to``."""
    moved = {id(tensor): tensor.detach().to("meta") for _, tensor in named_tensors(network)}
    for parameter in network.parameters():
        moved[id(parameter)] = nn.Parameter(moved[id(parameter)], parameter.requires_grad)
    return copy.deepcopy(network, moved)


def named_tensors(network: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield parameters and buffers by all their names."""
    yield from network.named_parameters(remove_duplicate=False)
    yield from network.named_buffers(remove_duplicate=False)


_FRAME = r'File "([^"]+)", line (\d+), in \w+\n\s*(.*)'
"""A frame in the message of an error of torch."""


def guilty_line(error: BaseException) -> tuple[str, str]:
    """Return where in the user's code an error comes from, and that line of code."""
    torchs = str(Path(torch.__file__).parent)
    package = str(Path(__file__).parents[1])
    for file, line, code in reversed(re.findall(_FRAME, str(error))):
        if not file.startswith((torchs, package)):
            return f" ({file}:{line})", code.strip()
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not frame.filename.startswith((torchs, package, "<")):
            return f" ({frame.filename}:{frame.lineno})", (frame.line or "").strip()
    return "", ""


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message that says something."""
    return next((line for line in str(error).splitlines() if line.strip()), "")


def _written(args: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}={value!r}" for key, value in args.items())

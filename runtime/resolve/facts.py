"""What a module is apart from its state dict, as values that compare with another module's."""

from __future__ import annotations

import dis
import inspect
import math
import sys
from collections.abc import Iterator, Mapping
from enum import Enum
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, MethodType
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from dni_runtime.resolve.interactive import home

_INTERNAL = frozenset({*vars(nn.Module()), "_flat_weights"})  # of recurrent layers: parameters

_SIMPLE = bool | int | float | str


def facts_of(root: nn.Module) -> Iterator[tuple[tuple[str, str], Any]]:
    """Yield all of a module that a state dict does not bring along, in values that compare."""
    names = dict[int, str]()
    for name, tensor in tensors_of(root):
        if tensor.numel():
            names.setdefault(tensor.data_ptr(), name)
    kept, plainly = root.state_dict(), _Plainly(root, names)
    for path, module in root.named_modules(remove_duplicate=False):
        cls = type(module)
        yield (path, "the class"), f"{home(cls)}.{cls.__qualname__}"
        for name, value in vars(module).items():
            if name.endswith("_hooks") and isinstance(value, dict):
                yield (path, name.strip("_")), plainly(list(value.values()))
            hidden = name.startswith("_") and not isinstance(value, _SIMPLE)
            compared = name not in _INTERNAL and not (
                isinstance(value, Tensor) if _of_torch(cls) else hidden
            )
            if compared:
                yield (path, f".{name}"), plainly(value)
    for name, tensor in tensors_of(root):
        kind = "parameter" if isinstance(tensor, nn.Parameter) else "buffer"
        dtype = str(tensor.dtype).removeprefix("torch.")
        yield (name, "the tensor"), f"a {kind} {dtype}{list(tensor.shape)}"
        owner = names.get(tensor.data_ptr(), name)
        yield (name, "the memory"), "its own" if owner == name else f"that of {owner!r}"
        for kind in ("_backward_hooks", "_post_accumulate_grad_hooks"):
            hooks = getattr(tensor, kind, None) or {}
            yield (name, kind.strip("_")), plainly(list(hooks.values()))
        if name not in kept:
            yield (name, "the value"), _Plainly(root, {})(tensor)
    for name, value in kept.items():
        if not isinstance(value, Tensor):
            yield (name, "extra state"), object()  # equals nothing: no file of weights holds it


def tensors_of(module: nn.Module) -> list[tuple[str, Tensor]]:
    both = [module.named_parameters, module.named_buffers]
    return [pair for named in both for pair in named(remove_duplicate=False)]


def attributes_of(cls: type) -> tuple[set[str], set[str]]:
    """Return the names that a class's methods and the functions of its file read, and store."""
    names: tuple[set[str], set[str]] = set(), set()
    mine = [base for base in cls.__mro__ if not _of_torch(base) and base is not object]
    spaces = [*map(vars, mine), *(vars(sys.modules[base.__module__]) for base in mine)]
    members = [member for space in spaces for member in space.values()]
    getters = [one.fget if isinstance(one, property) else one for one in members]
    functions = [inspect.unwrap(one) for one in getters if callable(one)]
    codes = [one.__code__ for one in functions if isinstance(one, FunctionType)]
    for code in codes:  # and what is written in it: functions and lists
        codes += [value for value in code.co_consts if isinstance(value, CodeType)]
        for step in dis.get_instructions(code):
            if step.opname in ("STORE_ATTR", "DELETE_ATTR"):
                names[1].add(step.argval)
            elif isinstance(step.argval, str):
                names[0].add(step.argval)
    return names


def _of_torch(cls: type) -> bool:
    return cls.__module__.startswith("torch.")


class _Plainly:
    """Values as ones that equal those of another module if they mean the same.

    Objects of other classes are what ``pickle`` would keep of them; those that it refuses, such as
    locks, are their class alone.
    """

    def __init__(self, root: nn.Module, names: Mapping[int, str]) -> None:
        self._names = names  # of the module's tensors, by their memory
        self._known: dict[int, tuple[Any, Any]] = {
            id(module): (module, f"the module {path!r}") for path, module in root.named_modules()
        }

    def __call__(self, value: Any) -> Any:
        if id(value) not in self._known:
            self._known[id(value)] = value, f"the {type(value).__qualname__} around it"
            self._known[id(value)] = value, self._of(value)
        return self._known[id(value)][1]

    def _of(self, value: Any) -> Any:
        match value:
            case Tensor():
                if name := self._names.get(value.data_ptr()):
                    return f"the tensor {name!r}"
                flat = value.detach().cpu().contiguous().flatten()
                return (
                    str(value.dtype),
                    tuple(value.shape),
                    flat.view(torch.uint8).numpy().tobytes(),
                )
            case numpy.ndarray() | numpy.generic():
                return str(value.dtype), value.shape, value.tobytes()
            case list() | tuple():
                return tuple(self(element) for element in value)
            case set() | frozenset():
                return tuple(sorted((self(element) for element in value), key=repr))
            case dict():
                return {key: self(element) for key, element in value.items()}
            case float() if math.isnan(value):
                return "nan"
            case None | bool() | int() | float() | complex() | str() | bytes():
                return value
            case torch.dtype() | Enum():
                return value
            case FunctionType() if value.__closure__:
                cells = [cell.cell_contents for cell in value.__closure__ if cell != CellType()]
                return f"{home(value)}.{value.__qualname__}", self(cells)
            case MethodType():
                return self(value.__func__), self(value.__self__)
            case type() | FunctionType() | BuiltinFunctionType():
                return f"{home(value)}.{value.__qualname__}"
            case nn.Module():
                return type(value).__qualname__, self(value.state_dict())
        try:
            kept = value.__reduce_ex__(4)
        except Exception:
            return f"a {type(value).__qualname__}"
        if isinstance(kept, str):
            return kept
        return tuple(self(list(part) if isinstance(part, Iterator) else part) for part in kept)

"""Layers as a chain file names them, from modules that exist in this process."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dni_runtime.core.layers import LAYERS, build_layer
from dni_runtime.errors import SpecError
from dni_runtime.spec import LayerSpec

_ELSEWHERE = {"device", "dtype"}
"""Arguments that do not belong to what a layer computes."""


def layer_entry(layer: nn.Module, folder: Path) -> Any:
    """Describe a layer by its class and the arguments that its constructor was given.

    An argument is read from the attribute of its name, as ``torch.nn``'s layers keep them. What
    comes out is built once and compared: same parameters, same ``repr``.

    Args:
        layer: The layer.
        folder: Where the chain file will be, and import paths start.

    Returns:
        What ``chain.yaml`` has for it.

    Raises:
        SpecError: Arguments cannot be read from it, or workers could not import its class.
    """
    if type(layer) is nn.Sequential:
        return {"Sequential": [layer_entry(one, folder) for one in layer]}
    cls = type(layer)
    args = _arguments(layer)
    if LAYERS.get(cls.__name__) is cls:
        entry: Any = {cls.__name__: args} if args else cls.__name__
    else:
        entry = {"import": import_path(cls, folder)} | ({"args": args} if args else {})
    with torch.random.fork_rng(devices=[]):
        built = build_layer(LayerSpec.model_validate(entry))
    if repr(built) != repr(layer) or _shapes(built) != _shapes(layer):
        raise SpecError(
            f"{cls.__name__} cannot be described by the arguments {args}: they build another layer",
            hint="keep each argument of __init__ in an attribute of the same name",
        )
    return entry


def import_path(cls: Callable[..., Any], folder: Path) -> str:
    """``package.module:Class`` of a class or function that workers can import.

    Args:
        cls: The class or function.
        folder: Where the chain file will be, and import paths start.

    Raises:
        SpecError: They cannot: it is a notebook's own, or lies elsewhere.
    """
    name = f"{cls.__module__}:{cls.__qualname__}"
    hint = f"move it to a file in {str(folder)!r} and import it from there"
    if cls.__module__ == "__main__" or "<locals>" in name:
        raise SpecError(f"workers cannot import {cls.__qualname__!r}", hint=hint)
    file = Path(inspect.getfile(cls)).resolve()
    if "site-packages" in file.parts or "dist-packages" in file.parts:
        return name
    expected = folder.resolve().joinpath(*cls.__module__.split("."))
    if file not in (expected.with_suffix(".py"), expected / "__init__.py"):
        raise SpecError(f"workers cannot import {name!r}: it lies in {str(file)!r}", hint=hint)
    return name


def _arguments(layer: nn.Module) -> dict[str, Any]:
    cls, args = type(layer), {}
    for name, parameter in inspect.signature(cls).parameters.items():
        if name in _ELSEWHERE or parameter.kind in (
            parameter.VAR_POSITIONAL,
            parameter.VAR_KEYWORD,
        ):
            continue
        if hasattr(layer, name):
            value = getattr(layer, name)
            if isinstance(parameter.default, bool) and (value is None or isinstance(value, Tensor)):
                value = value is not None  # bias=True makes a parameter of that name
            if value != parameter.default:
                args[name] = _plain(value, f"{cls.__name__}.{name}")
        elif parameter.default is parameter.empty:
            raise SpecError(
                f"{cls.__name__} does not keep its argument {name!r}",
                hint=f"keep it in an attribute (self.{name} = {name}), or wrap the layer in a "
                "class of your own whose __init__ needs no arguments",
            )
    return args


def _plain(value: Any, name: str) -> Any:
    if isinstance(value, tuple | list):
        return [_plain(one, name) for one in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise SpecError(
        f"{name} is a {type(value).__name__}: a chain file holds numbers, words and lists",
        hint="wrap the layer in a class of your own whose __init__ makes that object",
    )


def _shapes(layer: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(one.shape) for name, one in layer.state_dict().items()}

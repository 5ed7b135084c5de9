"""Layers as a chain file names them, from modules that exist in this process.

Workers build a module by its classes and their arguments, and load its state dict. So it is built
here once, and compared with the one that exists, as a whole: what the state dict does not
bring along and the constructors do not make must not differ. Frozen parameters are named.
"""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import FunctionType, MethodType, SimpleNamespace
from typing import Any, NamedTuple, cast

import numpy
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from dni_runtime.core.layers import LAYERS, build_layers
from dni_runtime.core.recurrent import Recurrent
from dni_runtime.errors import SpecError
from dni_runtime.resolve.facts import attributes_of, facts_of, tensors_of
from dni_runtime.resolve.interactive import MAIN, written_out
from dni_runtime.spec import LayerSpec
from dni_runtime.spec.choices import Location
from dni_runtime.spec.modules import patterns

_ELSEWHERE = {"device", "dtype"}
"""Arguments that do not belong to what a layer computes."""

_HOW = "workers build it from its class and arguments, and load its state dict"


class ModuleDescription(NamedTuple):
    """A module as a chain file has it."""

    layers: list[Any]
    state: dict[str, Tensor]  # to begin with, by their names there
    freeze: list[str] | bool  # names of parameters; True: all that its classes would train


def describe_modules(
    modules: Mapping[str, nn.Module], folder: Path
) -> dict[str, ModuleDescription]:
    """Describe modules by their layers' classes and the arguments that these were given.

    An argument is read from the attribute of its name, as ``torch.nn``'s layers keep them. Import
    paths start in ``folder``, where the chain file will be.
    """
    entries, owners = dict[str, ModuleDescription](), dict[int, str]()
    modes = dict[bool, str]()
    for name, module in modules.items():
        for key, tensor in tensors_of(module):
            if is_lazy(tensor) or tensor.is_meta:
                raise SpecError(
                    f"{key!r} of module {name!r} has no values yet",
                    hint="run a batch through it first"
                    if is_lazy(tensor)
                    else "load its weights on a device other than 'meta'",
                )
            trained = tensor.requires_grad or not isinstance(tensor, nn.Parameter)
            if tensor.numel() and trained and owners.setdefault(tensor.data_ptr(), name) != name:
                raise SpecError(
                    f"modules {owners[tensor.data_ptr()]!r} and {name!r} share {key!r}, of which "
                    "each worker would train a copy of its own",
                    hint="put what shares it into one module, or cut the whole network by "
                    "Chain.split, which ties weights across modules",
                )
        original = _numbered(module)
        layers = [_layer_entry(layer, folder) for layer in original]
        with torch.random.fork_rng(devices=[]):
            built = build_layers([LayerSpec.model_validate(entry) for entry in layers])
        _check_same(built, original)
        _check_trained(built, original)
        found_modes = _modes(built, original)
        if len(found_modes) == 1:  # else both fit
            modes |= dict.fromkeys(found_modes, name)
        if len(modes) > 1:
            raise _in_eval_mode(f"module {modes[False]!r}", f"module {modes[True]!r} is not")
        trains = {key for key, p in built.train().named_parameters() if p.requires_grad}
        names = [
            key for key, p in original.named_parameters() if not p.requires_grad and key in trains
        ]
        entries[name] = ModuleDescription(
            layers, original.state_dict(), names if len(names) < len(trains) else bool(names)
        )
    return entries


def with_frozen(defaults: Mapping[str, Any], names: list[str] | bool) -> list[str] | bool:
    """Return a ``freeze`` of these names, and of those of a chain's ``defaults``."""
    both = [*patterns(defaults.get("freeze") or ()), *patterns(names)]
    return both if "*" not in both else True


def _numbered(module: nn.Module) -> nn.Sequential:
    """Return a module as a list of layers, numbered as those of a chain file are."""
    if type(module) is not nn.Sequential:
        whole = nn.Sequential(module)
        whole.training = module.training
        return whole
    whole = copy.copy(module)  # with its hooks
    whole._modules = {
        str(number): _numbered(child) if type(child) is nn.Sequential else child
        for number, child in enumerate(module)
    }
    return whole


def _layer_entry(layer: nn.Module, folder: Path) -> Any:
    if type(layer) is nn.Sequential:
        return {"Sequential": [_layer_entry(child, folder) for child in layer]}
    cls = type(layer)
    if LAYERS.get(cls.__name__) is cls:
        args = _arguments(layer)
        return {cls.__name__: args} if args else cls.__name__
    path = import_path(cls, folder)
    args = _arguments(layer)
    return {"import": path} | ({"args": args} if args else {})


def _check_same(built: nn.Module, original: nn.Module) -> None:
    """Refuse a module that workers would build differently."""
    ours, theirs = dict(facts_of(built)), dict(facts_of(original))
    for place, what in theirs | ours:
        value, other = theirs.get((place, what), _ABSENT), ours.get((place, what), _ABSENT)
        if value == other:
            continue
        if what == "extra state":
            raise SpecError(
                f"extra state of {place!r} is no tensor, and files of weights hold only tensors",
                hint="let 'get_extra_state' return a tensor, or register a buffer",
            )
        if what.startswith(".") and _ABSENT in (value, other):
            cls, name = type(original.get_submodule(place)), what[1:]
            reads, stores = attributes_of(cls)
            if value is _ABSENT or name in stores or name not in reads | vars(cls).keys():
                continue  # its methods add and remove it, or do not look at it
        shown = f"{what} of {place!r}" if place else f"{what} of the module"
        values = [_shown(value), _shown(other)]
        differ = "is {}, but {}" if values[0] != values[1] else "is another value"
        raise SpecError(
            f"{shown.lstrip('.')} {differ.format(*values)} in what workers build",
            hint=f"{_HOW}: make it so in the __init__ of a class of your own, or by an argument "
            "that is kept in an attribute of its name. If forward has changed it, describe a new "
            "module with this one's state dict",
        )


def _check_trained(built: nn.Module, original: nn.Module) -> None:
    """Refuse parameters that are trained, and that their classes freeze when workers build them."""
    frozen = {name for name, p in built.named_parameters() if not p.requires_grad}
    for name, p in original.named_parameters():
        if p.requires_grad and name in frozen:
            raise SpecError(
                f"{name!r} is to be trained, but its class freezes it in what workers build",
                hint=f"{_HOW}: let an argument of __init__ say whether it is frozen",
            )


_ABSENT = "not there"


def _shown(value: Any) -> str:
    text = str(value)
    return text if len(text) < 100 and "\\x" not in text else "another value"


def _modes(built: nn.Module, original: nn.Module) -> set[bool]:
    """Return whether a module is in train mode, as its classes understand that; both may fit."""

    def of(module: nn.Module) -> dict[str, bool]:
        return {
            name: child.training for name, child in module.named_modules(remove_duplicate=False)
        }

    modes = of(original)
    fits = {True} if of(built) == modes else set[bool]()
    fits |= {mode for mode in (True, False) if of(built.train(mode)) == modes}
    if not fits:
        off = [name for name, trains in modes.items() if not trains]
        raise _in_eval_mode(repr(off[-1]), "the others are not")
    return fits


def _in_eval_mode(what: str, others: str) -> SpecError:
    return SpecError(
        f"{what} is in eval mode, and {others}: a chain, as any loop that calls train(), trains "
        "all in train mode",
        hint="call train() on it; or, for layers that are always to be in eval mode, use a class "
        "of your own: def train(self, mode=True): return super().train(False)",
    )


def import_path(cls: Callable[..., Any], folder: Path) -> str:
    """Return ``package.module:Class`` of a class or function that workers can import.

    Import paths start in ``folder``, where the chain file will be, and where those of a script or a
    notebook are written to a file.
    """
    if isinstance(owner := getattr(cls, "__self__", None), type):  # it may inherit the method
        return f"{import_path(owner, folder)}.{cls.__name__}"
    name = f"{cls.__module__}:{cls.__qualname__}"
    hint = f"move it to a file in {str(folder)!r} and import it from there"
    if "<" in name:  # of a function's own, or a lambda
        raise SpecError(
            f"workers cannot import {cls.__qualname__!r}, which has no name outside of functions",
            hint=hint,
        )
    if cls.__module__ == MAIN:
        return written_out(cls, folder)
    module = sys.modules.get(cls.__module__)
    if module is not None and not hasattr(module, cls.__qualname__.partition(".")[0]):
        raise SpecError(
            f"workers cannot import {cls.__qualname__!r}, which was made at run time",
            hint=f"{_HOW}: do that, such as a parametrization, in the __init__ of a class of "
            "your own",
        )
    file = Path(inspect.getfile(cls)).resolve()
    if "site-packages" in file.parts or "dist-packages" in file.parts:
        return name
    expected = folder.resolve().joinpath(*cls.__module__.split("."))
    if file not in (expected.with_suffix(".py"), expected / "__init__.py"):
        raise SpecError(f"workers cannot import {name!r}: it lies in {str(file)!r}", hint=hint)
    return name


_OWN_DATA = "{'dataset': Class, 'train': {…}, 'evaluation': {…}}, with the arguments of each"


def describe_settings(
    settings: Mapping[str, Any], folder: Path, location: Location = ()
) -> dict[str, Any]:
    """Return keys of a chain as a file has them, with import paths of classes and functions."""
    if not isinstance(settings, Mapping):
        raise SpecError(
            f"{settings!r} is a {type(settings).__name__}, not a mapping",
            location=location,
            hint=f"{{'dataset': 'mnist', 'batch_size': 128}}, say; or {_OWN_DATA}",
        )

    def written(value: Any, key: str) -> Any:
        if isinstance(value, Mapping):
            return {name: written(one, name) for name, one in value.items()}
        if isinstance(value, list | tuple):
            return [written(one, key) for one in value]
        if isinstance(value, type | FunctionType | MethodType):
            path = import_path(value, folder)
            return path if key in ("dataset", "import") else {"import": path}
        if isinstance(value, partial) and not value.args:
            return {"import": import_path(value.func, folder), "args": written(value.keywords, key)}
        array = isinstance(value, numpy.generic | numpy.ndarray | Tensor)
        if array and value.nbytes <= 8192:  # weights of classes, say
            return written(value.tolist(), key)
        if value is None or isinstance(value, bool | int | float | str):
            return value
        if isinstance(value, Path):
            return str(value)
        raise SpecError(
            f"{key!r} is a {type(value).__name__}: a chain file holds numbers, words, lists, and "
            "names of classes and functions",
            location=location,
            hint=f"workers make it anew: {_OWN_DATA}"
            if key == "dataset"
            else "write an object as {'import': Class, 'args': {…}}",
        )

    return {key: written(value, key) for key, value in settings.items()}


def _arguments(layer: nn.Module) -> dict[str, Any]:
    cls, args, kept = type(layer), dict[str, Any](), cast("Any", layer)
    if isinstance(layer, Recurrent):  # most of them are in its cell
        more = {"cell": type(layer.cell).__name__, "carry": layer.carry, "synthetic": False}
        kept = SimpleNamespace(**(vars(layer.cell) | more))
    for name, parameter in inspect.signature(cls).parameters.items():
        if name in _ELSEWHERE or parameter.kind in (
            parameter.VAR_POSITIONAL,
            parameter.VAR_KEYWORD,
        ):
            continue
        if hasattr(kept, name):
            value = getattr(kept, name)
            if isinstance(parameter.default, bool) and (value is None or isinstance(value, Tensor)):
                value = value is not None  # bias=True makes a parameter of that name
            array = isinstance(value, Tensor | numpy.ndarray)
            if array and not any(parameter.default is one for one in (None, parameter.empty)):
                continue  # what is made of the default gets its values, or is refused
            if array or value != parameter.default:
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
        return [_plain(element, name) for element in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise SpecError(
        f"{name} is a {type(value).__name__}: a chain file holds numbers, words and lists",
        hint="wrap the layer in a class of your own whose __init__ makes that object; Chain.split "
        "takes a function that returns a network, too",
    )

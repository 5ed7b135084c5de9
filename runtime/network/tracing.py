"""Tracing a user's network by ``torch.export``, in train and in eval mode."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import logging
import sys
import warnings
from collections.abc import Callable, Iterator
from functools import lru_cache
from types import ModuleType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor

from dni_runtime.errors import SpecError
from dni_runtime.network.program import Program
from dni_runtime.network.recording import assign_early, inline, plain_attributes, recording
from dni_runtime.network.source import (
    WRAPPED,
    NetworkSpec,
    NetworkWrapper,
    build_network,
    first_line,
    guilty_line,
    named_tensors,
)
from dni_runtime.network.trace import Trace, symbol
from dni_runtime.spec.choices import find_attribute

_BATCH = 5
"""Samples in the batch that is traced: no other size in a network is likely to be the same."""


def trace(spec: NetworkSpec) -> Program:
    """Trace a network, once in each mode; the result is remembered."""
    build = find_attribute(spec.target, "network", ())
    return _traced(spec.model_dump_json(by_alias=True), build)


@lru_cache(maxsize=4)
def _traced(document: str, build: Callable[..., Any]) -> Program:
    from torch._subclasses import FakeTensorMode  # these take a while to import
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    del build  # a changed function is another key
    spec = NetworkSpec.model_validate(json.loads(document))
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        mode: Any = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
        network = None
        with contextlib.suppress(SpecError), mode:  # neither time nor memory
            network = build_network(spec)
        if network is None or _tensors(network):  # whose values are wanted
            mode, network = contextlib.nullcontext(), build_network(spec)
        with mode:
            example = tuple(
                torch.zeros(_BATCH, *sample.shape, dtype=getattr(torch, sample.dtype))
                for sample in spec.example
            )
        return _program_of(spec, network, example)


def _tensors(network: nn.Module) -> dict[str, Tensor]:
    """Return the tensors that are neither parameters nor buffers of a network, by name."""
    attributes = plain_attributes(network).items()
    return {name: value for name, value in attributes if isinstance(value, Tensor)}


class _TraceWrapper(NetworkWrapper):
    """A network while it is traced."""

    def __init__(self, network: nn.Module, spec: NetworkSpec) -> None:
        super().__init__(network, spec)
        # Attributes, and buffers, to which ``forward`` has given another value.
        self.replaced: set[str] = set()
        self.assigned: set[str] = set()

    def forward(self, *xs: Tensor) -> Tensor:
        network = self.network
        before = plain_attributes(network)
        buffers = [dict(module._buffers) for module in network.modules()]
        with recording():
            y = super().forward(*xs)
        after = plain_attributes(network)
        self.replaced.update(name for name in after if after[name] is not before.get(name))
        for (path, module), old_buffers in zip(network.named_modules(), buffers, strict=True):
            for name, old in old_buffers.items():
                new, whole = module._buffers.get(name), f"{path}.{name}".removeprefix(".")
                if new is old:
                    continue
                if old is None or new is None or (old.shape, old.dtype) != (new.shape, new.dtype):
                    raise SpecError(f"'forward' gives the buffer {whole!r} another shape or type")
                module._buffers[name] = old.copy_(new.detach())
                self.assigned.add(whole)
        return y


def _program_of(spec: NetworkSpec, network: nn.Module, example: tuple[Tensor, ...]) -> Program:
    for name, module in network.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise SpecError(
                f"{spec.target} has a part {name!r} of torch.jit.script, which cannot be traced",
                hint="build it without torch.jit",
            )
        if module._backward_hooks or module._backward_pre_hooks:
            raise SpecError(
                f"{spec.target} has a backward hook on {name or 'itself'!r}, which a traced "
                "program does not call",
                hint="hooks of parameters are called, and so is the 'backward' of an "
                "autograd.Function in forward",
            )
    if more := sorted(set(network.state_dict()).difference(dict(named_tensors(network)))):
        raise SpecError(
            f"the state dict of {spec.target} has {more[0]!r}, which is no parameter and no buffer",
            hint="keep it as a buffer: checkpoints of parts hold these by name ('get_extra_state' "
            "and hooks of state dicts are not called)",
        )
    wrapped = _TraceWrapper(network, spec)
    traces = {}
    for training in (True, False):
        wrapped.train(training)
        traces[training] = _export(spec, wrapped, example)
    named = list(named_tensors(network))  # 'forward' may have registered more
    same: dict[int, list[str]] = {}
    for name, tensor in named:
        same.setdefault(id(tensor), []).append(name)
    aliases = {
        name: tuple(other for other in names if other != name)
        for names in same.values()
        for name in names
    }
    used = {name for trace in traces.values() for name in trace.names.values()}
    train, places = traces[True], dict[str, int]()
    for placeholder, (first, _) in train.uses.items():
        path = train.names.get(placeholder, "").rpartition(".")[0]
        places[path] = min(first, places.get(path, first))
    unused = {
        name: places.get(name.rpartition(".")[0], train.last)
        for name, _ in named
        if name not in used and not used.intersection(aliases[name])
    }
    return Program(spec, train, traces[False], aliases, unused)


def _export(spec: NetworkSpec, wrapped: _TraceWrapper, example: tuple[Tensor, ...]) -> Trace:
    auto = torch.export.Dim.AUTO
    free = tuple({0: auto, **{at + 1: auto for at in one.varying}} for one in spec.example)
    wrapped.assigned.clear()
    try:
        with _quiet():
            program = torch.export.export(wrapped, example, dynamic_shapes=(free,), strict=False)
    except Exception as error:
        at, line = guilty_line(error)
        if isinstance(error, SpecError):
            hint = error.hint or line or None
            raise SpecError(f"{spec.target}{at}: {error.message}", hint=hint) from error
        raise SpecError(
            f"{spec.target} cannot be traced{at}: {_reason(error)}",
            hint=(f"{line}\n  " if line else "")
            + "torch.export follows one path through 'forward': conditions may depend on shapes, "
            "not on the values of tensors. Or cut a sequence of modules by hand: 'layers' in "
            "chain.yaml takes each of them",
        ) from error
    graph = inline(program.graph_module)
    kinds = torch.export.graph_signature.InputKind
    names, constants, data = {}, {}, []
    used = {node.name: node for node in graph.nodes if node.op == "placeholder"}
    for input_spec in program.graph_signature.input_specs:
        name = input_spec.arg.name
        if input_spec.kind is kinds.USER_INPUT:
            data.append(name)
        elif not used[name].users:
            continue
        elif input_spec.kind is kinds.CONSTANT_TENSOR:
            assert input_spec.target is not None
            constants[name] = cast("Tensor", program.constants[input_spec.target])
        else:
            assert input_spec.target is not None
            names[name] = input_spec.target.removeprefix(WRAPPED)
            if names[name] in wrapped.assigned:
                assign_early(graph, used[name])
    for place, sample in zip(data, spec.example, strict=True):
        shape = used[place].meta["val"].shape
        if symbol(shape[0]) is None:
            raise SpecError(
                f"{spec.target} works for batches of {_BATCH} samples only: its code takes the "
                "batch's size as a constant",
                hint="write x.shape[0] where forward has a number or len(x), or -1 in view",
            )
        if any(symbol(shape[axis + 1]) is None for axis in sample.varying):
            raise SpecError(
                f"'data.max_length' lets each batch have its own length, and {spec.target} takes "
                f"{sample.shape[0]} as a constant",
                hint="write x.shape[1] where forward has a number; or cut a sequence of modules by "
                "hand: 'layers' in chain.yaml takes each of them; or pad to one length, without "
                "'data.max_length'",
            )
    values = [node.meta.get("val") for node in graph.nodes]
    if any(isinstance(one, Tensor) and is_functorch_wrapped_tensor(one) for one in values):
        raise SpecError(
            f"{spec.target} cannot be traced: 'forward' uses torch.func (vmap, grad …)",
            hint="write it for whole batches, or cut a sequence of modules by hand: 'layers'",
        )
    trace = Trace(graph, names, constants, tuple(data))
    _check_constants(spec, wrapped, trace)
    return trace


def _check_constants(spec: NetworkSpec, wrapped: _TraceWrapper, trace: Trace) -> None:
    """Refuse plain tensors that are no constants."""
    network = wrapped.network
    files = {spec.target.partition(":")[0], *(type(one).__module__ for one in network.modules())}
    plain, homes = _tensors(network), dict[str, ModuleType]()
    for file in map(sys.modules.__getitem__, files.intersection(sys.modules)):
        plain |= (found := _tensors_in(file))
        homes |= dict.fromkeys(found, file)
    names = {id(tensor): name for name, tensor in plain.items()}
    trained = {tensor.untyped_storage()._cdata for tensor in network.state_dict().values()}
    rebuilt: dict[ModuleType | None, dict[str, Tensor]] = {}
    for node in trace.graph.nodes:
        tensor = trace.constants.get(node.name)
        if node.op != "placeholder" or tensor is None or id(tensor) not in names:
            continue
        name, wrong = names[id(tensor)], None
        if name in wrapped.replaced or node.name in trace.state:
            wrong = "which 'forward' changes"
        elif not tensor.is_leaf or tensor.untyped_storage()._cdata in trained:
            wrong = "which follows from a parameter or buffer"
        else:
            home = homes.get(name)
            if home not in rebuilt:
                rebuilt[home] = (
                    _tensors(build_network(spec))
                    if home is None
                    else _tensors_in(_read_again(home))
                )
            if name not in rebuilt[home] or not torch.equal(rebuilt[home][name], tensor):
                when = f"{spec.target} is called" if home is None else f"{home.__file__} is read"
                wrong = f"which is another one each time that {when}"
        if wrong is not None:
            raise SpecError(
                f"{spec.target} has a tensor {name!r} that is no parameter and no buffer, {wrong}",
                hint="register it as a buffer: self.register_buffer(name, tensor)",
            )


def _tensors_in(file: ModuleType) -> dict[str, Tensor]:
    """Return the tensors that a file, or a class in it, has as a name."""
    owners = {"": file} | {
        f"{name}.": value
        for name, value in vars(file).items()
        if isinstance(value, type) and value.__module__ == file.__name__
    }
    return {
        f"{file.__name__}.{owner}{name}": value
        for owner, its in owners.items()
        for name, value in vars(its).items()
        if isinstance(value, Tensor)
    }


def _read_again(file: ModuleType) -> ModuleType:
    """Execute a file once more, as a worker does that imports it."""
    found = importlib.util.spec_from_file_location(file.__name__, file.__file__)
    assert found is not None
    assert found.loader is not None
    again = importlib.util.module_from_spec(found)
    found.loader.exec_module(again)
    return again


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep torch from telling about its own work."""
    logger = logging.getLogger("torch")
    level = logger.level
    logger.setLevel(logging.CRITICAL)  # what fails is told by its exception
    try:
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


def _reason(error: BaseException) -> str:
    text = first_line(error)
    if "data-dependent" in text:
        return f"it decides by the value of a tensor ({text})"
    return f"{type(error).__name__}: {text}"

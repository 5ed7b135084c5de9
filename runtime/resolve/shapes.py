"""Shapes of modules' outputs, and their gradients: found by running layers without memory."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dni_runtime.core.attention import AttentionWatch, run_watched
from dni_runtime.core.backward import changed_in_place
from dni_runtime.core.layers import build_layer, build_module
from dni_runtime.core.recurrent import CELLS
from dni_runtime.core.training import empty_batch
from dni_runtime.errors import SpecError
from dni_runtime.network.source import arguments_of, check_named, without_memory
from dni_runtime.packing import row_of
from dni_runtime.spec import ChainSpec, DataInfo, LayerSpec, TensorSpec, WorkerSpec
from dni_runtime.spec.choices import Location

BATCH = 2
"""Samples in the batch that shapes are inferred with: BatchNorm needs more than one."""


class ModuleOutputs(NamedTuple):
    """Result of running a module on the meta device."""

    outputs: tuple[TensorSpec, ...]  # one sample of each
    attends: bool  # whether it has attention
    layers: tuple[nn.Module, ...]  # on the meta device

    @property
    def output(self) -> TensorSpec:
        """One sample of what travels: all outputs in a row, if they are several."""
        return row_of(self.outputs)

    @property
    def packed(self) -> tuple[TensorSpec, ...]:
        """One sample of each output, if they are several."""
        return self.outputs if len(self.outputs) > 1 else ()


def by_name(chain: ChainSpec, info: DataInfo) -> tuple[ChainSpec, DataInfo]:
    """Return both with the inputs of the data in the order of the head's arguments of their names.

    Only if samples are dicts, and neither the data's inputs nor the head's are written down.
    """
    layer = chain.modules[0].layers[0]
    for what, keys in (("inputs", chain.data.inputs), ("label", chain.data.label)):
        if keys and not info.names:
            raise SpecError(
                f"rows of data set {chain.data.dataset!r} are no dicts, and have no {keys[0]!r}",
                location=("data", what),
                hint="leave it out: of a tuple all but the last are inputs, and the last is the "
                "label",
            )
    if not info.names or chain.data.inputs or chain.graph.data[0] is not None:
        return chain, info
    at: Location = ("modules", 0, "layers", 0)
    first = without_memory(lambda: build_layer(layer, at))
    names = arguments_of(first, info.names)
    if not names:
        check_named(first, names := info.names)
    data = chain.data.model_copy(update={"inputs": names})
    return chain.model_copy(update={"data": data}), info.with_inputs(names)


def infer_shapes(chain: ChainSpec, info: DataInfo) -> list[ModuleOutputs]:
    """Run every layer on the meta device, and describe each module.

    If samples have lengths of their own, a shorter one shows which sizes follow from it.
    """
    modules = _infer(chain, info)
    if not any(sample.varying for sample in info.samples):
        return modules
    first, *further = (sample.shortened() for sample in info.samples)
    update = {"sample": first, "further": tuple(further)}
    try:
        shorter = _infer(chain, info.model_copy(update=update))
    except SpecError as error:
        message = f"'data.max_length' lets a batch be shorter, as {first}: {error.message}"
        raise SpecError(message, location=error.location, hint=error.hint) from None
    for module, other in zip(modules, shorter, strict=True):
        row_of(tuple(map(_varying, other.outputs, module.outputs)))  # whose lengths may differ now
    return [
        module._replace(outputs=tuple(map(_varying, module.outputs, other.outputs)))
        for module, other in zip(modules, shorter, strict=True)
    ]


def _varying(sample: TensorSpec, shorter: TensorSpec) -> TensorSpec:
    sizes = enumerate(zip(sample.shape, shorter.shape, strict=True))
    varying = tuple(axis for axis, (size, other) in sizes if size != other)
    return sample.model_copy(update={"varying": varying})


def _infer(chain: ChainSpec, info: DataInfo) -> list[ModuleOutputs]:
    modules: list[ModuleOutputs] = []
    graph = chain.graph
    for index, module in enumerate(chain.modules):
        inputs: list[TensorSpec] = []
        for source in graph.sources[index]:
            inputs += taken_of(chain, (source, index), modules[source].outputs)
        inputs += [info.samples[number] for number in data_of(chain, index, info)]
        attends, layers = False, tuple[nn.Module, ...]()
        for number, layer in enumerate(module.layers):
            at: Location = ("modules", index, "layers", number)
            result = _infer_layer(layer, inputs, at, first=number == 0 and index > 0)
            if len(result.outputs) > 1 and number < len(module.layers) - 1:
                raise _several(layer, at, "only a module's last layer may return several")
            inputs, attends = list(result.outputs), attends | result.attends
            layers += result.layers
        modules.append(ModuleOutputs(tuple(inputs), attends, layers))
        if len(inputs) > 1 and index == len(chain.modules) - 1 and chain.losses is None:
            raise _several(module.layers[-1], at, "'losses' names a loss for each of them")
    for source, producer in enumerate(modules):
        links = [(source, target) for target in graph.targets[source]]
        whole = range(len(producer.outputs))
        lost = set(whole).difference(*(graph.takes.get(link, whole) for link in links))
        if links and lost:
            name = f"{chain.modules[source].name}.{min(lost)}"
            raise SpecError(
                f"{name!r}, an output of module {chain.modules[source].name!r}, goes nowhere",
                location=("modules", source, "layers"),
                hint=f"name {name!r} in the 'inputs' of a later module, or do not return it",
            )
    return modules


def _several(layer: LayerSpec, at: Location, reason: str) -> SpecError:
    return SpecError(
        f"{layer.type} returns several tensors instead of one",
        location=at,
        hint=reason,
    )


def taken_of(
    chain: ChainSpec, link: tuple[int, int], outputs: tuple[TensorSpec, ...]
) -> tuple[TensorSpec, ...]:
    """Return one sample of each output of a module that another one takes."""
    takes = chain.graph.takes.get(link)
    if takes is None:
        return outputs
    if max(takes) >= len(outputs) or len(outputs) == 1:
        source = chain.modules[link[0]].name
        raise SpecError(
            f"module {chain.modules[link[1]].name!r} takes '{source}.{max(takes)}', but module "
            f"{source!r} has " + ("one output" if len(outputs) == 1 else f"{len(outputs)} outputs"),
            location=("modules", link[1], "inputs"),
            hint=f"name {source!r} alone"
            if len(outputs) == 1
            else f"the last one is '{source}.{len(outputs) - 1}'",
        )
    return tuple(outputs[number] for number in takes)


def data_of(chain: ChainSpec, index: int, info: DataInfo) -> tuple[int, ...]:
    """Return which inputs of the data a module takes."""
    data, count = chain.graph.data[index], len(info.samples)
    inputs = tuple(range(count)) if data is None else data
    if any(number >= count for number in inputs):
        raise SpecError(
            f"module {chain.modules[index].name!r} takes 'data.{max(inputs)}', but the data has "
            + ("one input, 'data.0'" if count == 1 else f"{count}, up to 'data.{count - 1}'"),
            location=("modules", index, "inputs"),
        )
    return inputs


def _infer_layer(
    layer: LayerSpec, inputs: Sequence[TensorSpec], at: Location, *, first: bool
) -> ModuleOutputs:
    for key in ("layers", "shortcut"):  # a block's own layers first: their errors say more
        inner = inputs
        for number, child in enumerate(getattr(layer, key)):
            place = (key, number) if layer.type == "Residual" else (number,)
            at_one = (*at, layer.type, *place)
            result = _infer_layer(child, inner, at_one, first=first and not number)
            if len(result.outputs) > 1:
                raise _several(child, at_one, "a layer in a block returns one")
            inner = list(result.outputs)
    built = without_memory(lambda: build_layer(layer, at))
    name = layer.type
    try:
        try:
            output, attends = _run(built, [empty_batch(sample, BATCH, "meta") for sample in inputs])
        except (NotImplementedError, RuntimeError, ValueError) as error:
            if not isinstance(error, NotImplementedError) and not re.search(
                r"\bmeta\b", str(error)
            ):
                raise
            output, attends = _infer_on_cpu(layer, inputs, at)
    except SpecError:
        raise
    except Exception as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        what = "the previous module sends" if first and len(inputs) == 1 else "it gets"
        raise SpecError(
            f"{name}{layer.args or ''} does not fit: {what} {' and '.join(map(str, inputs))}: "
            f"{reason}",
            location=(*at, "args" if ":" in name else name),
            hint=_sizes_hint(layer, inputs[0])
            if len(inputs) == 1
            else "begin with 'Add', 'Concat' or a layer of your own that takes as many arguments",
        ) from None
    outputs = output if isinstance(output, tuple | list) else (output,)
    if not outputs or not all(isinstance(tensor, Tensor) for tensor in outputs):
        raise SpecError(
            f"{name} returns {type(output).__name__} instead of one tensor",
            location=at,
            hint="'Recurrent' has one output"
            if name in CELLS
            else "wrap it in a module of your own that returns one tensor, or several",
        )
    if output is not outputs[0] and len(outputs) == 1:
        raise SpecError(
            f"{name} returns a {type(output).__name__} of one tensor",
            location=at,
            hint="return the tensor itself",
        )
    for tensor in outputs:
        if tensor.dim() < 1 or tensor.shape[0] != BATCH:
            raise SpecError(
                f"{name} does not keep the batch as first dimension: {BATCH} samples of "
                f"{' and '.join(map(str, inputs))} became a tensor of shape {tuple(tensor.shape)}",
                location=at,
                hint="return it with the batch first, as 'x.transpose(0, 1)' does where time is "
                "first; the next module turns it back",
            )
    samples = tuple(
        TensorSpec(shape=tuple(tensor.shape[1:]), dtype=str(tensor.dtype).split(".")[-1])
        for tensor in outputs
    )
    if len({sample.dtype for sample in samples}) > 1:
        raise SpecError(
            f"{name} returns tensors of several types: {' and '.join(map(str, samples))}",
            location=at,
            hint="outputs of a module have one type; inputs of the data go to any module as "
            "'data.0', 'data.1' …",
        )
    return ModuleOutputs(samples, attends, (built,))


def _sizes_hint(layer: LayerSpec, sample: TensorSpec) -> str:
    if layer.args.get("in_features") == math.prod(sample.shape):
        return (
            "it fits if each sample is one row: 'flatten: true' in 'data', or 'Flatten' before it"
        )
    return "compare the layer's sizes with its input (B is the batch)"


def _run(layer: nn.Module, inputs: Sequence[Tensor]) -> tuple[Any, bool]:
    """Return a layer's output, and whether it attends."""
    watch = AttentionWatch(inputs)
    return run_watched(layer, inputs, watch, layer.modules()), watch.attends


def _infer_on_cpu(layer: LayerSpec, inputs: Sequence[TensorSpec], at: Location) -> tuple[Any, bool]:
    """Run a layer on a tiny real batch, as the meta device cannot run it."""
    try:
        return _run(
            build_layer(layer, at), [empty_batch(sample, BATCH, "cpu") for sample in inputs]
        )
    except Exception as error:
        raise SpecError(
            f"{layer.type} fails on {' and '.join(map(str, inputs))}: {type(error).__name__}: "
            f"{error}",
            location=at,
        ) from None


def check_gradients(worker: WorkerSpec, network: nn.Module, learns: Collection[str]) -> None:
    """Refuse a module without a gradient that an update waits for.

    It computes zeros forward and back: on the meta device, as ``own`` is, or in memory if a layer
    needs that. Modules in ``learns`` learn from gradients, or have one upstream that does.
    """
    at, name = ("modules", worker.index, "layers"), worker.module
    # tied weights come with this many samples
    rows = max([BATCH, *(layer.args.get("rows", 1) for layer in worker.layers)])
    for device in ("meta", "cpu"):
        xs = [empty_batch(sample, rows, device) for sample in worker.inputs]
        awaited = {
            edge.source: x.requires_grad_()
            for x, edge in zip(xs, worker.sources, strict=False)
            if edge.awaited and edge.source in learns
        }
        layers = network
        if device == "cpu":
            layers = build_module(worker, device)
            for key, p in layers.named_parameters(remove_duplicate=False):
                p.requires_grad_(network.get_parameter(key).requires_grad)
        targets = [*awaited.values(), *(p for p in layers.parameters() if p.requires_grad)]
        if not targets:
            return
        try:
            h_BH = layers(*[x.clone() for x in xs])
            gradients: Sequence[Tensor | None] = [None] * len(targets)
            if h_BH.requires_grad:
                gradients = torch.autograd.grad(h_BH.sum(), targets, allow_unused=True)
            break
        except Exception as error:  # of a layer that cannot run so
            changed = isinstance(error, RuntimeError) and changed_in_place(
                f"module {name!r}", error
            )
            if changed:
                changed.location = at
                raise changed from None
    else:
        return
    hint = "leave out what cuts it ('detach', 'torch.no_grad', 'argmax'), or pass it straight "
    hint += "through; 'freeze: true' is for what is not to learn"
    if worker.tail is not None and not h_BH.requires_grad:
        raise SpecError(f"the output of module {name!r} has no gradient", location=at, hint=hint)
    for source, g_BX in zip(awaited, gradients, strict=False):
        if g_BX is None:
            raise SpecError(
                f"module {name!r} has no gradient for module {source!r}, which waits for it",
                location=at,
                hint=hint,
            )

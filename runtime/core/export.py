"""Export of a trained chain as one plain network, to .safetensors, .pt2 or .onnx."""

from __future__ import annotations

import io
import logging
import os
import warnings
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from operator import getitem
from pathlib import Path
from typing import Annotated, Any, Literal, cast

import torch
from pydantic import Field, ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, fx, nn
from torch.nn.parameter import is_lazy

from dni_runtime.core.chain import data_of
from dni_runtime.core.finite import state_finite
from dni_runtime.core.layers import build_layers, exported
from dni_runtime.core.training import empty_batch
from dni_runtime.errors import DataError, DivergedError, SpecError, UsageError, unreadable
from dni_runtime.files import pinned, write_atomic
from dni_runtime.network.piece import tie
from dni_runtime.spec import LayerSpec, Preprocessing, TensorSpec, WorkerSpec
from dni_runtime.spec.choices import trusting
from dni_runtime.spec.named import Frozen, Name

LAYERS_PREFIX = "layers."
"""Prefix of a module's own tensors in its checkpoint."""

AVERAGE_PREFIX = "average.module."
"""Prefix of the average of its weights, if one is kept (``AveragedModel.state_dict``)."""

METADATA = "dni-runtime"

CHAIN = "dni-runtime.chain"
"""Metadata of a file of initial weights: the name of its chain file."""


class ExportedModule(Frozen):
    """A module in a ``.safetensors`` file."""

    name: Name
    inputs: tuple[str, ...]  # what it takes of other modules
    # Numbers of the data's inputs that it takes.
    data: tuple[Annotated[int, Field(ge=0, lt=1000)], ...]
    layers: tuple[LayerSpec, ...]


class ExportHeader(Frozen):
    """What the metadata of a ``.safetensors`` file say of the network."""

    format: Literal[1] = 1
    chain: str
    inputs: tuple[TensorSpec, ...]  # one sample of each of the data's
    outputs: tuple[TensorSpec, ...]
    modules: tuple[ExportedModule, ...]
    preprocessing: Preprocessing | None = None  # of raw samples; None: not known


def assemble(workers: Sequence[WorkerSpec], states: Mapping[str, Path]) -> nn.Module:
    """Build the whole network from its modules, head first, and their checkpoint files.

    It is in eval mode on the CPU (``connect``). Recurrent layers start each batch with zeros, and
    have no synthesizers.
    """
    modules: OrderedDict[str, nn.Module] = OrderedDict()
    for worker in workers:
        layers = build_layers([exported(layer) for layer in worker.layers])
        load_trained(layers, worker, states)
        modules[worker.module] = layers
    names = list(modules)
    sources = [[_source(name, names) for name in _inputs(worker, workers)] for worker in workers]
    return connect(modules, sources, [data_of(worker) for worker in workers]).eval()


def load_trained(layers: nn.Module, worker: WorkerSpec, states: Mapping[str, Path]) -> None:
    """Load a module's trained weights: their average, if the chain keeps one."""
    try:
        layers.load_state_dict(trained_tensors(worker, states))
    except RuntimeError as error:
        raise DataError(
            f"the checkpoint {str(states[worker.module])!r} does not fit module "
            f"{worker.module!r}: {error}"
        ) from None


def trained_tensors(worker: WorkerSpec, states: Mapping[str, Path]) -> dict[str, Tensor]:
    """Return the tensors of a module's layers: their average, if the chain keeps one."""
    # A module without trained weights keeps no average.
    tensors = {} if worker.ema is None else read_tensors(states[worker.module], AVERAGE_PREFIX)
    return tensors or read_tensors(states[worker.module], LAYERS_PREFIX)


def _inputs(worker: WorkerSpec, workers: Sequence[WorkerSpec]) -> list[str]:
    """Return what a module takes of others, as in ``chain.yaml``: each output by its name."""
    outputs = {worker.module: len(worker.outputs) for worker in workers}
    return [
        f"{edge.source}.{which}" if outputs[edge.source] else edge.source
        for edge in worker.sources
        if edge.tensor
        for which in edge.takes or range(outputs[edge.source] or 1)
    ]


def _source(input: str, names: Sequence[str]) -> tuple[int, int | None]:
    name, _, which = input.partition(".")
    return names.index(name), int(which) if which else None


def export_model(
    workers: Sequence[WorkerSpec],
    states: Mapping[str, Path],
    output: Path,
    *,
    force: bool = False,
    preprocessing: Preprocessing | None = None,
) -> nn.Module:
    """Write the whole network to one file, in the format of the file's ending; return the network.

    ``.safetensors`` has the weights, with the layers' description in the metadata
    (``dni_runtime.load`` reads it), ``.pt2`` a program of ``torch.export``, which needs neither
    this package nor the user's classes, and ``.onnx`` is for other runtimes. ``force`` writes
    weights that are not finite, too.
    """
    model = assemble(workers, states)
    for name, module in model.named_children():
        if not force and not state_finite(module):
            raise DivergedError(
                f"weights or statistics of module {name!r} are not finite ({str(states[name])!r})",
                hint="export an older checkpoint with --from, or this one anyway with --force",
            )
    first = workers[0]
    assert first.head is not None
    if output.suffix in (".pt2", ".onnx"):
        example = tuple(empty_batch(sample, 2, "cpu") for sample in first.head.samples)
        size, length = torch.export.Dim.DYNAMIC, torch.export.Dim.AUTO
        free = [{0: size, **{at + 1: length for at in one.varying}} for one in first.head.samples]
        try:
            with warnings.catch_warnings():
                # torch's recurrent cells keep their weights in a list too; they are exported whole.
                warnings.filterwarnings("ignore", "The tensor attributes", UserWarning)
                program = torch.export.export(model, example, dynamic_shapes=tuple(free))
        except Exception as error:
            why = str(error).splitlines()[0].partition("! For more information")[0]
            if why.startswith("Constraints violated"):
                why = f"its code takes the number of samples for a fixed one ({why})"
            raise UsageError(
                f"torch.export cannot express this network: {why}",
                hint="export to .safetensors instead",
            ) from error
        content = io.BytesIO()
        if output.suffix == ".pt2":
            torch.export.save(program, content)
        else:
            content.write(_onnx(program))
        write_atomic(output, content.getvalue(), mode=0o644)
        return model
    description = ExportHeader(
        chain=first.chain,
        inputs=first.head.samples,
        outputs=workers[-1].outputs or (workers[-1].output,),
        modules=tuple(
            ExportedModule(
                name=worker.module,
                inputs=tuple(_inputs(worker, workers)),
                data=tuple(data_of(worker)),
                layers=tuple(map(exported, worker.layers)),
            )
            for worker in workers
        ),
        preprocessing=preprocessing,
    )
    tensors = separate(model.state_dict())
    text = description.model_dump_json(exclude={"preprocessing"} if preprocessing is None else None)
    data = save(tensors, metadata={METADATA: text, "format": "pt"})
    write_atomic(output, data, mode=0o644)
    return model


def _onnx(program: torch.export.ExportedProgram) -> bytes:
    """Return a program in the ONNX format, weights included; the batch may have any size."""
    log = logging.getLogger("torch.onnx")
    level = log.level
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            log.setLevel(logging.ERROR)  # it warns that torchvision is not installed
            result = torch.onnx.export(program, dynamo=True, verbose=False)
        data: bytes = result.model_proto.SerializeToString()  # type: ignore[union-attr]
    except Exception as error:
        raise UsageError(
            f"ONNX cannot express this network: {str(error).splitlines()[0]}",
            hint="export to .pt2 or .safetensors instead",
        ) from error
    finally:
        log.setLevel(level)
    return data


def write_state_dict(state: Mapping[str, Tensor], output: Path) -> None:
    """Write tensors by name to one file, in the format of the file's ending.

    ``.safetensors``, or ``.pt`` or ``.pth`` for ``torch.load(weights_only=True)``.
    """
    if output.suffix == ".safetensors":
        data = save(separate(state), metadata={"format": "pt"})
    else:
        content = io.BytesIO()
        torch.save(dict(state), content)
        data = content.getvalue()
    write_atomic(output, data, mode=0o644)


def separate(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors that share no memory, as safetensors requires: tied weights are copied."""
    seen: set[int] = set()
    tensors = {}
    for key, value in state.items():
        storage = value.untyped_storage().data_ptr()
        tensors[key] = value.clone() if storage in seen else value.contiguous()
        seen.add(storage)
    return tensors


def load_model(path: str | os.PathLike[str], *, trust: bool = False) -> nn.Module:
    """Load what :func:`export_model` wrote; see :func:`dni_runtime.load`."""
    file = Path(path).resolve()
    if not file.is_file():
        raise DataError(f"there is no file {str(file)!r}")
    hint = f"if you trust those who wrote it: load({str(file)!r}, trust=True)"
    if file.suffix == ".pt2":
        if not trust:  # torch.export.load unpickles
            raise UsageError(f"{str(file)!r} is a program, which can run any code", hint=hint)
        return cast("nn.Module", torch.export.load(file).module())
    description = read_header(file)
    tensors = read_tensors(file, "")
    try:
        with trusting(trust):
            if not trust:
                with torch.device("meta"):  # what it takes no memory for
                    _check_fit(_build(description), tensors)
            model = _build(description)
        model.load_state_dict(tensors)
    except UsageError as error:
        raise UsageError(f"{str(file)!r}: {error.message}", hint=hint) from None
    except SpecError as error:
        source_hint = "the model uses classes of its own: put their source file on PYTHONPATH"
        raise DataError(
            f"{str(file)!r}: {error.message}", hint=source_hint if trust else None
        ) from None
    except (ValueError, RuntimeError) as error:
        raise DataError(f"{str(file)!r} is damaged: {error}") from None
    return model.eval()


def read_header(file: Path) -> ExportHeader:
    """Return what a file that :func:`export_model` wrote says of the network."""
    try:
        with safe_open(file, framework="pt") as reader:
            return ExportHeader.model_validate_json((reader.metadata() or {})[METADATA])
    except (KeyError, OSError, SafetensorError, ValidationError) as error:
        why = "it has tensors alone" if isinstance(error, KeyError) else error
        raise DataError(
            f"{str(file)!r} has no network that 'dnictl export' wrote: {why}",
            hint="without --state-dict 'dnictl export -o NAME.safetensors' writes the network",
        ) from None


def _build(description: ExportHeader) -> nn.Module:
    modules: OrderedDict[str, nn.Module] = OrderedDict()
    sources: list[list[tuple[int, int | None]]] = []
    data: list[list[int]] = []
    for module in description.modules:
        sources.append([_source(input, list(modules)) for input in module.inputs])
        data.append(list(module.data))
        modules[module.name] = build_layers(module.layers)
    return connect(modules, sources, data)


def _check_fit(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Raise ``ValueError`` for a network that is larger than the tensors that come with it."""
    for name, value in model.state_dict().items():
        tensor = tensors.get(name)
        if not is_lazy(value) and (tensor is None or tensor.shape != value.shape):
            there = "missing" if tensor is None else f"of shape {list(tensor.shape)}"
            raise ValueError(f"{name!r} has shape {list(value.shape)} and is {there}")


def chain_of(file: Path) -> str | None:
    """Return the name of the chain file that begins with a file's weights; None if none does."""
    try:
        with safe_open(file, framework="pt") as reader:
            name: str | None = (reader.metadata() or {}).get(CHAIN)
            return name
    except (OSError, SafetensorError):
        return None


def read_tensors(file: Path, prefix: str) -> dict[str, Tensor]:
    try:
        with pinned(file) as name, safe_open(name, framework="pt") as reader:
            keys: list[Any] = [key for key in reader.keys() if key.startswith(prefix)]  # noqa: SIM118
            return {key.removeprefix(prefix): reader.get_tensor(key) for key in keys}
    except (OSError, SafetensorError) as error:
        raise DataError(unreadable(file, error)) from None


def connect(
    modules: Mapping[str, nn.Module],  # head first, each a sequence
    # For each module, the numbers of those that it takes, each with which output, if of several.
    sources: Sequence[Sequence[tuple[int, int | None]]],
    data: Sequence[Sequence[int]],  # for each module, which inputs of the data it takes after those
) -> nn.Module:
    """Connect modules to one network that needs nothing but torch.

    It is a ``nn.Sequential`` if each module takes the output of the one before, else a
    ``torch.fx.GraphModule`` with one argument for each input of the data. Its children have the
    modules' names. Tied parameters of :class:`~dni_runtime.network.piece.Piece` are one again.
    """
    tie(layer for module in modules.values() for layer in module.modules())
    plain = [
        list(links) == ([(index - 1, None)] if index else []) for index, links in enumerate(sources)
    ]
    if all(plain) and list(map(list, data)) == [[0], *[[]] * (len(data) - 1)]:
        return nn.Sequential(OrderedDict(modules))
    graph, root = fx.Graph(), nn.Module()
    inputs = [
        graph.placeholder(f"x{number}")
        for number in range(1 + max(max(numbers, default=0) for numbers in data))
    ]
    outputs: list[fx.Node] = []
    readers = Counter(source for links in sources for source, _ in links)
    shared = Counter(number for numbers in data for number in numbers)
    for (name, layers), links, taken in zip(modules.items(), sources, data, strict=True):
        root.add_module(name, layers)
        values: tuple[Any, ...] = tuple(
            outputs[source]
            if which is None
            else graph.call_function(getitem, (outputs[source], which))
            for source, which in links
        )
        values = tuple(  # a layer may change its input in place
            graph.call_method("clone", (value,)) if readers[source] > 1 else value
            for value, (source, _) in zip(values, links, strict=True)
        )
        values += tuple(
            graph.call_method("clone", (inputs[number],)) if shared[number] > 1 else inputs[number]
            for number in taken
        )
        for layer, _ in layers.named_children():  # only the first layer has several inputs
            values = (graph.call_module(f"{name}.{layer}", values),)
        outputs.append(values[0])
    graph.output(outputs[-1])
    return fx.GraphModule(root, graph, class_name="Network")

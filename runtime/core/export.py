"""Export of a trained chain as one plain network, to .safetensors, .pt2 or .onnx."""

from __future__ import annotations

import io
import json
import os
import warnings
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from dni_runtime.core.chain import data_of
from dni_runtime.core.finite import state_finite
from dni_runtime.core.layers import build_layers, exported
from dni_runtime.core.network import connect
from dni_runtime.core.training import empty_batch
from dni_runtime.errors import DataError, DivergedError, DniError, UnavailableError, UsageError
from dni_runtime.rundir import write_atomic
from dni_runtime.spec import LayerSpec, WorkerSpec

LAYERS_PREFIX = "layers."
"""Prefix of a module's own tensors in its checkpoint."""

AVERAGE_PREFIX = "average.module."
"""Prefix of the average of its weights, if one is kept (``AveragedModel.state_dict``)."""

METADATA = "dni-runtime"


def assemble(workers: Sequence[WorkerSpec], states: Mapping[str, Path]) -> nn.Module:
    """Build the whole network from the modules' checkpoints.

    Recurrent layers start each batch with zeros, and have no synthesizers.

    Args:
        workers: The modules' specs, head first.
        states: Each module's checkpoint file (``.safetensors``).

    Returns:
        The modules, by name, in eval mode on the CPU (``connect``).

    Raises:
        DataError: A checkpoint is missing or of another module.
    """
    modules: OrderedDict[str, nn.Module] = OrderedDict()
    for worker in workers:
        layers = build_layers([exported(layer) for layer in worker.layers])
        load_trained(layers, worker, states)
        modules[worker.module] = layers
    names = list(modules)
    sources = [[_source(one, names) for one in _inputs(worker, workers)] for worker in workers]
    return connect(modules, sources, [data_of(one) for one in workers]).eval()


def load_trained(layers: nn.Module, worker: WorkerSpec, states: Mapping[str, Path]) -> None:
    """Load a module's trained weights: their average, if the chain keeps one.

    Args:
        layers: Its layers.
        worker: The module.
        states: Each module's checkpoint file.

    Raises:
        DataError: Its checkpoint is missing or of another module.
    """
    try:
        layers.load_state_dict(trained_tensors(worker, states))
    except RuntimeError as error:
        raise DataError(
            f"the checkpoint {str(states[worker.module])!r} does not fit module "
            f"{worker.module!r}: {error}"
        ) from None


def trained_tensors(worker: WorkerSpec, states: Mapping[str, Path]) -> dict[str, Tensor]:
    """Return the tensors of a module's layers: their average, if the chain keeps one.

    Args:
        worker: The module.
        states: Each module's checkpoint file.

    Raises:
        DataError: Its file cannot be read.
    """
    # A module without trained weights keeps no average.
    tensors = {} if worker.ema is None else _read(states[worker.module], AVERAGE_PREFIX)
    return tensors or _read(states[worker.module], LAYERS_PREFIX)


def _inputs(worker: WorkerSpec, workers: Sequence[WorkerSpec]) -> list[str]:
    """Return what a module takes of others, as in ``chain.yaml``: each output by its name."""
    outputs = {one.module: len(one.outputs) for one in workers}
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
    workers: Sequence[WorkerSpec], states: Mapping[str, Path], output: Path, *, force: bool = False
) -> nn.Module:
    """Write the whole network to one file.

    Args:
        workers: The modules' specs, head first.
        states: Each module's checkpoint file.
        output: ``.safetensors`` (weights, with the layers' description in the metadata; read by
            ``dni_runtime.load``), ``.pt2`` (a program of ``torch.export``, which needs neither
            this package nor the user's classes) or ``.onnx`` (for other runtimes).
        force: Whether to write weights that are not finite.

    Raises:
        DataError: A checkpoint is missing or of another module.
        DivergedError: Weights are not finite.
        UnavailableError: ``.onnx`` needs packages that are not installed.
        UsageError: The file's ending is none of these, or the network cannot be expressed so.
    """
    if output.suffix not in (".safetensors", ".pt2", ".onnx"):
        raise UsageError(
            f"cannot export to {str(output)!r}", hint="end the name in .safetensors, .pt2 or .onnx"
        )
    if output.suffix == ".onnx" and not (find_spec("onnx") and find_spec("onnxscript")):
        raise UnavailableError(
            "onnx and onnxscript are not installed", hint="pip install 'dni-runtime[onnx]'"
        )
    model = assemble(workers, states)
    for name, module in model.named_children():
        if not force and not state_finite(module):
            raise DivergedError(
                f"weights or statistics of module {name!r} are not finite ({str(states[name])!r})",
                hint="export an older checkpoint with --from, or this one anyway with --force",
            )
    first = workers[0]
    if output.suffix in (".pt2", ".onnx"):
        assert first.head is not None
        example = tuple(empty_batch(one, 2, "cpu") for one in first.head.samples)
        try:
            with warnings.catch_warnings():
                # torch's recurrent cells keep their weights in a list too; they are exported whole.
                warnings.filterwarnings("ignore", "The tensor attributes", UserWarning)
                program = torch.export.export(
                    model, example, dynamic_shapes=({0: torch.export.Dim.AUTO},) * len(example)
                )
        except Exception as error:
            raise UsageError(
                f"torch.export cannot express this network: {str(error).splitlines()[0]}",
                hint="export to .safetensors instead",
            ) from error
        content = io.BytesIO()
        if output.suffix == ".pt2":
            torch.export.save(program, content)
        else:
            content.write(_onnx(program))
        write_atomic(output, content.getvalue(), mode=0o644)
        return model
    description = {
        "format": 1,
        "chain": first.chain,
        "input": first.inputs[0].model_dump(mode="json"),
        "modules": [
            {
                "name": worker.module,
                "inputs": _inputs(worker, workers),
                "data": data_of(worker),
                "layers": [exported(layer).model_dump(mode="json") for layer in worker.layers],
            }
            for worker in workers
        ],
    }
    tensors = separate(model.state_dict())
    data = save(tensors, metadata={METADATA: json.dumps(description), "format": "pt"})
    write_atomic(output, data, mode=0o644)
    return model


def _onnx(program: torch.export.ExportedProgram) -> bytes:
    """Return a program in the ONNX format, weights included; the batch may have any size."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = torch.onnx.export(program, dynamo=True, verbose=False)
        data: bytes = found.model_proto.SerializeToString()  # type: ignore[union-attr]
    except Exception as error:
        raise UsageError(
            f"ONNX cannot express this network: {str(error).splitlines()[0]}",
            hint="export to .pt2 or .safetensors instead",
        ) from error
    return data


def write_state_dict(state: Mapping[str, Tensor], output: Path) -> None:
    """Write tensors by name.

    Args:
        state: The tensors.
        output: ``.safetensors``, or ``.pt`` for ``torch.load(weights_only=True)``.

    Raises:
        UsageError: The file's ending is neither.
    """
    if output.suffix == ".safetensors":
        data = save(separate(state), metadata={"format": "pt"})
    elif output.suffix in (".pt", ".pth"):
        content = io.BytesIO()
        torch.save(dict(state), content)
        data = content.getvalue()
    else:
        raise UsageError(
            f"cannot write a state dict to {str(output)!r}",
            hint="end the name in .safetensors or .pt",
        )
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


def load_model(path: str | os.PathLike[str]) -> nn.Module:
    """Load what :func:`export_model` wrote; see :func:`dni_runtime.load`."""
    file = Path(path)
    if not file.is_file():
        raise DataError(f"there is no file {str(file)!r}")
    if file.suffix == ".pt2":
        return cast("nn.Module", torch.export.load(file).module())
    try:
        with safe_open(file, framework="pt") as reader:
            description = json.loads((reader.metadata() or {})[METADATA])
    except (SafetensorError, KeyError, ValueError) as error:
        raise DataError(
            f"{str(file)!r} was not written by 'dnictl export': {error}",
        ) from None
    modules: OrderedDict[str, nn.Module] = OrderedDict()
    sources: list[list[tuple[int, int | None]]] = []
    data: list[list[int]] = []
    try:
        for index, entry in enumerate(description["modules"]):
            names = list(modules)
            before = names[-1:]  # as written before modules had inputs
            sources.append([_source(one, names) for one in entry.get("inputs", before)])
            data.append(entry.get("data", [] if index else [0]))
            layers = [LayerSpec.model_validate(one) for one in entry["layers"]]
            modules[entry["name"]] = build_layers(layers)
    except DniError as error:
        raise DataError(
            f"{str(file)!r}: {error.message}",
            hint="the model uses classes of its own: put their source file on PYTHONPATH",
        ) from None
    model = connect(modules, sources, data)
    model.load_state_dict(_read(file, ""))
    return model.eval()


def _read(file: Path, prefix: str) -> dict[str, Tensor]:
    try:
        with safe_open(file, framework="pt") as reader:
            keys: list[Any] = [key for key in reader.keys() if key.startswith(prefix)]  # noqa: SIM118
            return {key.removeprefix(prefix): reader.get_tensor(key) for key in keys}
    except (OSError, SafetensorError) as error:
        raise DataError(f"{str(file)!r} cannot be read: {error}") from None

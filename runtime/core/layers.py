"""Building a module's layers from its spec: torch.nn by name, user classes, nested blocks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import cast

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from dni_runtime.core.recurrent import Recurrent
from dni_runtime.core.training import empty_batch
from dni_runtime.errors import DataError, SpecError
from dni_runtime.network.piece import Piece
from dni_runtime.network.source import without_memory
from dni_runtime.packing import pack, unpack
from dni_runtime.spec import LayerSpec, TensorSpec, WorkerSpec
from dni_runtime.spec.choices import Location, call, find_class

LAYERS: dict[str, type[nn.Module]] = {
    name: cls
    for name, cls in vars(nn).items()
    if isinstance(cls, type)
    and issubclass(cls, nn.Module)
    and not name.startswith("_")
    and not issubclass(cls, nn.modules.loss._Loss)
    and cls not in (nn.Module, nn.Container, nn.ModuleList, nn.ModuleDict, nn.Sequential)
    and cls not in (nn.ParameterList, nn.ParameterDict, nn.DataParallel)
} | {"Recurrent": Recurrent}
"""The layers that a spec may name; ``Sequential`` and ``Residual`` are blocks, handled here."""


class Add(nn.Module):
    """The sum of several inputs of one shape."""

    def forward(self, *xs: Tensor) -> Tensor:
        total = xs[0]
        for x in xs[1:]:
            total = total + x
        return total


class Concat(nn.Module):
    """Several inputs one after the other, along a dimension that is not the batch (0)."""

    def __init__(self, dim: int = 1) -> None:
        super().__init__()
        if dim == 0:
            raise ValueError("dim 0 is the batch")
        self.dim = dim

    def forward(self, *xs: Tensor) -> Tensor:
        return torch.cat(xs, self.dim)


LAYERS |= {"Add": Add, "Concat": Concat, "Piece": Piece}


class Layers(nn.Sequential):
    """The layers of a module with several inputs or outputs.

    The first layer gets all inputs. Outputs travel in one row (:mod:`~dni_runtime.packing`). For
    each input, ``rows`` has one sample of each tensor that it is a row of; () if it is none.
    """

    def __init__(self, layers: Sequence[nn.Module], rows: Sequence[Sequence[TensorSpec]]) -> None:
        super().__init__(*layers)
        self._rows = tuple(map(tuple, rows))

    def forward(self, *inputs: Tensor) -> Tensor:
        first, *others = self
        tensors: list[Tensor] = []
        for x, row in zip(inputs, self._rows, strict=True):
            tensors += unpack(x, row) if row else (x,)
        y: Tensor | Sequence[Tensor] = first(*tensors)
        for layer in others:
            y = layer(y)
        return y if isinstance(y, Tensor) else pack(y)


class Residual(nn.Module):
    """``y = body(x) + shortcut(x)``, as in residual networks (He et al. 2016, eq. 1 and 2)."""

    def __init__(self, body: nn.Sequential, shortcut: nn.Sequential) -> None:
        super().__init__()
        self.body = body
        self.shortcut = shortcut
        _spare_input(body)  # the other one reads it, too
        _spare_input(shortcut)

    def forward(self, x: Tensor) -> Tensor:
        return cast("Tensor", self.body(x) + self.shortcut(x))


def build_layers(layers: Sequence[LayerSpec], location: Location = ()) -> nn.Sequential:
    """Build layers, drawing initial weights from torch's global generator."""
    built = (build_layer(layer, (*location, number)) for number, layer in enumerate(layers))
    return nn.Sequential(*built)


def build_module(worker: WorkerSpec, device: torch.device | str) -> nn.Sequential:
    """Build a module's layers in train mode, and infer the sizes of lazy ones."""

    def build() -> nn.Sequential:
        layers = _build_sized(worker.layers, worker.arguments)
        if len(worker.arguments) > 1 or worker.outputs:
            rows = [edge.outputs for edge in worker.sources if edge.tensor]
            layers = Layers(list(layers), rows + [()] * (len(worker.inputs) - len(rows)))
        return layers

    return without_memory(build) if device == "meta" else build().to(device)


def _build_sized(layers: Sequence[LayerSpec], inputs: Sequence[TensorSpec]) -> nn.Sequential:
    """Build layers that do not change their input, and infer the sizes of lazy ones.

    As a training loop does, it calls ``train``, by which some classes freeze a part of themselves.
    """
    built = build_layers(layers, ("layers",))
    lazy = [p for p in built.parameters() if isinstance(p, UninitializedParameter)]
    if lazy:
        with torch.no_grad():
            some = [empty_batch(sample, 1, lazy[0].device) for sample in inputs]
            Layers(list(built.eval()), [()] * len(some))(*some)
    _spare_input(built.train())
    return built


def _spare_input(layers: nn.Sequential) -> bool:
    """Keep layers from changing their input in place; return whether the output may share it.

    Autograd refuses that if the input needs a gradient, and others may hold the same tensor.
    """
    for layer in layers:
        match layer:
            case nn.Sequential():
                if not _spare_input(layer):
                    return False
            case nn.Flatten() | nn.Unflatten() | nn.Identity():
                pass
            case _:
                if type(layer).__module__.startswith("torch.nn.") and hasattr(layer, "inplace"):
                    layer.inplace = False  # type: ignore[assignment]  # a plain attribute
                return False
    return True


def tensors_of(worker: WorkerSpec) -> dict[str, tuple[int, ...]]:
    """Return names and shapes of the parameters and buffers of a module's layers."""
    state = build_module(worker, "meta").state_dict()
    return {name: tuple(tensor.shape) for name, tensor in state.items()}


def load_initial(layers: nn.Module, file: Path, prefix: str = "") -> None:
    """Load initial weights, whose names have a prefix in the file; others stay as they are."""
    try:
        tensors = {key.removeprefix(prefix): value for key, value in load_file(file).items()}
        unknown = layers.load_state_dict(tensors, strict=False).unexpected_keys
    except (OSError, SafetensorError, RuntimeError) as error:
        raise DataError(f"initial weights {str(file)!r} cannot be used: {error}") from None
    if unknown:
        raise DataError(f"initial weights {str(file)!r} are of another module: {unknown[0]!r}")


def build_layer(layer: LayerSpec, location: Location = ()) -> nn.Module:
    if layer.type == "Sequential":
        return build_layers(layer.layers, (*location, "Sequential"))
    if layer.type == "Residual":
        at = (*location, "Residual")
        return Residual(
            build_layers(layer.layers, (*at, "layers")),
            build_layers(layer.shortcut, (*at, "shortcut")),
        )
    known = LAYERS | {"Sequential": nn.Sequential, "Residual": Residual}
    cls = find_class(layer.type, "layer", known, nn.Module, location)
    at = (*location, "args" if ":" in layer.type else layer.type)
    try:
        return cast("nn.Module", call(cls, layer.args, name=layer.type, location=at))
    except SpecError as error:
        if error.location[: len(at)] != at:
            error.location = (*at, *error.location)
        raise


def exported(layer: LayerSpec) -> LayerSpec:
    """Return the layer as a function of one batch: a recurrent one without carried state.

    It accepts the state dict of the layer itself.
    """
    args = layer.args
    if layer.type == "Recurrent":
        args = {key: value for key, value in args.items() if key != "synthetic"} | {"carry": False}
    inside = {key: tuple(map(exported, getattr(layer, key))) for key in ("layers", "shortcut")}
    return layer.model_copy(update={"args": args, **inside})

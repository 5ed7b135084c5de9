"""State dicts that a network starts from."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from dni_runtime.errors import DataError
from dni_runtime.spec.load import suggestion


def load_weights(network: nn.Module, file: Path) -> None:
    """Load a state dict, by the network's own names."""
    state = read_state_dict(file)
    own = network.state_dict()
    # safetensors keeps one of several tied tensors
    tied: dict[int, list[str]] = {}
    for name, value in own.items():
        tied.setdefault(value.data_ptr(), []).append(name)
    for names in tied.values():
        given = [name for name in names if name in state]
        if given:
            state |= {name: state[given[0]] for name in names}
    missing = [name for name in own if name not in state]
    other = [name for name in state if name not in own]
    if missing or other:
        some = ", ".join(map(repr, (missing or other)[:3]))
        more = f" and {len(missing or other) - 3} more" if len(missing or other) > 3 else ""
        raise DataError(
            f"{str(file)!r} {'lacks' if missing else 'has, beside the network,'} {some}{more}",
            hint=suggestion(missing[0], list(state)) if missing else None,
        )
    for name, value in own.items():
        if value.shape != state[name].shape:
            raise DataError(
                f"{name!r} in {str(file)!r} has shape {list(state[name].shape)}, in the network "
                f"{list(value.shape)}"
            )
    own.update(state)  # it has the versions of the network's modules
    network.load_state_dict(own)


def read_state_dict(file: Path) -> dict[str, Tensor]:
    """Read tensors by name from safetensors, or from what ``torch.save`` wrote."""
    if not file.is_file():
        raise DataError(f"there is no file {str(file)!r}")
    try:
        if file.suffix == ".safetensors":
            return load_file(file)
        state = torch.load(file, map_location="cpu", weights_only=True)
    except (OSError, SafetensorError, RuntimeError, ValueError) as error:
        raise DataError(f"{str(file)!r} cannot be read: {error}") from None
    except Exception as error:  # torch's unpickler
        raise DataError(
            f"{str(file)!r} is refused: {str(error).splitlines()[0]}",
            hint="save a state dict: torch.save(model.state_dict(), file)",
        ) from None
    if not isinstance(state, Mapping) or not all(isinstance(v, Tensor) for v in state.values()):
        raise DataError(f"{str(file)!r} holds no state dict (names with tensors)")
    return dict(state)

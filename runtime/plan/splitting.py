"""From a PyTorch network to a chain file: ``dnictl split`` and ``Chain.split``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from torch import Tensor, nn

from dni_runtime.core.forward import as_inputs
from dni_runtime.data import describe, open_data, with_defaults
from dni_runtime.errors import SpecError, UsageError
from dni_runtime.network.source import WRAPPED
from dni_runtime.plan.prepare import CheckedChain, importing_from, prepare
from dni_runtime.resolve.describe import with_frozen
from dni_runtime.spec import Choice, DataSpec
from dni_runtime.spec.load import explain_details, parse_choice, parse_yaml
from dni_runtime.split.balance import Balance
from dni_runtime.split.chainfile import HEADER, write_chain
from dni_runtime.split.network import chain_name, load_weights, network_of, take_apart
from dni_runtime.split.part import NetworkPart
from dni_runtime.split.plan import SplitRequest


@dataclass(frozen=True)
class SplitChain:
    """A network that has been taken apart."""

    prepared: CheckedChain
    parts: Sequence[NetworkPart]  # its modules
    weights: Path  # their file


def split_chain(
    target: str,  # import path of a function or class that returns the network
    path: Path,  # the chain file to write; import paths start in its folder
    settings: Mapping[str, Any],  # the chain's other keys; ``data`` is needed
    *,
    args: Mapping[str, Any] | None = None,  # keywords of the function
    modules: int = 2,  # their number
    at: Sequence[str] = (),  # instead, the network's own modules after which to cut
    balance: Balance = "time",
    links: str = "fast",  # ``fast`` or ``slow``
    # arguments of ``forward`` for the data's inputs; by default its first ones
    takes: Sequence[str] = (),
    # where the tensor is in what ``forward`` returns: ``0``, ``logits``
    returns: str | int | None = None,
    # a state dict to start from; None: the weights that the function gives
    weights: Path | None = None,
    state: nn.Module | None = None,  # instead, a network that has them
    interface: str | None = None,  # of all modules, as in a chain file
    force: bool = False,  # replace a chain file that ``split`` has not written
) -> SplitChain:
    """Take a network apart, and write a chain file and its weights."""
    if path.exists() and not force and not path.read_text("utf-8").startswith(HEADER):
        raise UsageError(
            f"{str(path)!r} exists, and 'dnictl split' did not write it",
            hint="name another file with -o, or replace it with --force",
        )
    base = path.parent.absolute()
    try:
        data = with_defaults(DataSpec.model_validate(settings["data"]), base)
    except ValidationError as error:
        at_, message, hint = explain_details(error, DataSpec)
        raise SpecError(message, location=("data", *at_), hint=hint) from None
    chosen = settings.get("defaults", {}).get("interface")
    if interface is not None:
        chosen = parse_choice(interface)
    request = SplitRequest(
        modules=modules,
        at=tuple(at),
        balance=balance,
        links=links,
        batch_size=data.batch_size,
        loss=Choice.model_validate(settings.get("loss", "CrossEntropyLoss")),
        interfaces=() if chosen is None else (Choice.model_validate(chosen),),
    )
    with importing_from(base):
        info = describe(data, base)
        spec, network = network_of(target, info, args=args or {}, takes=takes, returns=returns)
        if info.names:
            named = set(spec.takes) <= set(info.names)
            info = info.with_inputs((named and spec.takes) or info.names)
            data = data.model_copy(update={"inputs": info.names})
            settings = {**settings, "data": {**settings["data"], "inputs": list(info.names)}}
        if weights is not None:
            load_weights(network, weights)
        if state is not None:
            network.load_state_dict(state.state_dict())
            defaults = _freeze_as(network, state, settings.get("defaults", {}))
            settings = {**settings, "defaults": defaults}
        parts = take_apart(spec, network, info, request, first_batch(data, base))
        name = settings.get("name") or chain_name(target)
        file = write_chain(path, name, spec, network, parts, settings)
    return SplitChain(prepare(path), parts, file)


def first_batch(data: DataSpec, base: Path) -> tuple[Tensor, ...]:
    """Return the inputs of the first training batch."""
    batch = next(open_data(data, base, seed=0).some_batches("train", 0, 0, lambda: True))
    assert batch is not None
    return as_inputs(batch[0])


def _freeze_as(network: nn.Module, state: nn.Module, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return a chain's defaults, with what is frozen in ``state`` and not by the class itself."""
    names = []
    for (name, parameter), p in zip(network.named_parameters(), state.parameters(), strict=True):
        if parameter.requires_grad and not p.requires_grad:
            names.append(f"0.{WRAPPED}{name}")
    return {**defaults, **({"freeze": with_frozen(defaults, names)} if names else {})}


def settings_of(path: Path) -> dict[str, Any]:
    """Return the keys of a chain file, without its modules."""
    try:
        document = parse_yaml(path.read_text("utf-8"), str(path))[0]
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError(f"{str(path)!r} cannot be read: {error}") from None
    if not isinstance(document, dict):
        raise SpecError(f"{str(path)!r} is not a chain file")
    return {key: value for key, value in document.items() if key not in ("modules", "network")}

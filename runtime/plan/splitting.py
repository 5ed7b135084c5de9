"""From a PyTorch network to a chain file: ``dnictl split`` and ``Chain.split``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from dni_runtime.core.forward import as_inputs
from dni_runtime.data import describe, open_data, with_defaults
from dni_runtime.errors import SpecError, UsageError, unreadable
from dni_runtime.network.source import built_once, check_named
from dni_runtime.plan.prepare import CheckedChain, importing_from, prepare
from dni_runtime.resolve.describe import with_frozen
from dni_runtime.spec import ChainSpec, Choice, DataSpec
from dni_runtime.spec.choices import validated
from dni_runtime.spec.load import parse_choice, parse_yaml
from dni_runtime.split.balance import Balance
from dni_runtime.split.chainfile import (
    HEADER,
    OF_A_PART,
    OF_NETWORK,
    check_place,
    replacing,
    write_chain,
)
from dni_runtime.split.network import chain_name, freeze_named, load_weights, network_of, take_apart
from dni_runtime.split.part import Parts
from dni_runtime.split.plan import SplitRequest

Names = str | Sequence[str] | None
"""Names in a list, or in a text with commas."""


def names_of(names: Names) -> tuple[str, ...]:
    listed = names.split(",") if isinstance(names, str) else names or ()
    return tuple(name.strip() for name in listed if name.strip())


@dataclass(frozen=True)
class SplitChain:
    prepared: CheckedChain
    parts: Parts  # its modules
    weights: Path  # their file


def split_chain(
    target: str,  # import path of a function or class that returns the network
    path: Path,  # the chain file to write; import paths start in its folder
    settings: Mapping[str, Any],  # the chain's other keys; ``data`` is needed
    *,
    args: Mapping[str, Any] | None = None,  # keywords of the function
    modules: int = 2,  # their number
    at: Names = (),  # instead, the network's own modules after which to cut
    balance: Balance = "time",
    links: str = "fast",  # ``fast`` or ``slow``
    # arguments of ``forward`` for the data's inputs; by default its first ones
    takes: Names = (),
    # where the tensor is in what ``forward`` returns: ``0``, ``logits``
    returns: str | int | None = None,
    # a state dict to start from; None: the weights that the function gives
    weights: Path | None = None,
    state: nn.Module | None = None,  # instead, a network that has them
    interface: str | None = None,  # of all modules, as in a chain file
    freeze: Names = (),  # modules or parameters of the network that are not trained
    force: bool = False,  # replace a chain file that ``split`` has not written
) -> SplitChain:
    """Take a network apart, and write a chain file and its weights."""
    at, takes, freeze = map(names_of, (at, takes, freeze))
    check_place(path, HEADER, force=force)
    base = path.parent.absolute()
    own = _settings_of_modules(settings, len(at) + 1 if at else modules, interface)
    known = _checked(settings)
    data = with_defaults(known.data, base)
    defaults = settings.get("defaults", {})
    if (init := defaults.get("init")) and not (
        isinstance(init, Mapping) and init.get("names") == OF_NETWORK
    ):
        raise UsageError(
            "'defaults.init' of the settings would give way to the network's own weights",
            hint="leave it out; --weights names a state dict to start from",
        )
    chosen = known.defaults.interface if interface is None else parse_choice(interface)
    interfaces = [chosen]
    if interface is None and any("interface" in module for module in own):
        interfaces = [
            validated(Choice, module["interface"], ("modules", number, "interface"))
            if module.get("interface") is not None
            else chosen
            for number, module in enumerate(own[:-1])
        ]
    request = SplitRequest(
        modules=modules,
        at=at,
        balance=balance,
        links=links,
        batch_size=data.batch_size,
        loss=known.loss,
        losses=known.losses,
        labelled=data.labels is None,
        interfaces=tuple(interfaces),
    )
    with importing_from(base), built_once():
        info = describe(data, base)
        spec, network = network_of(target, info, args=args or {}, takes=takes, returns=returns)
        if info.names:
            if not spec.takes and not data.inputs:
                check_named(network, info.names)
            named = set(spec.takes) <= set(info.names)
            info = info.with_inputs((named and spec.takes) or info.names)
            data = data.model_copy(update={"inputs": info.names})
            settings = {**settings, "data": {**settings["data"], "inputs": list(info.names)}}
        if weights is not None:
            load_weights(network, weights)
        names = list(freeze)
        if state is not None:
            network.load_state_dict(state.state_dict())
            names += _frozen(network, state)
        if names:
            frozen = with_frozen(defaults, freeze_named(spec, network, names))
            settings = {**settings, "defaults": {**defaults, "freeze": frozen}}
        parts = take_apart(spec, network, info, request, first_batch(data, base))
        name = settings.get("name") or chain_name(target, network)
        with replacing(path):
            file = write_chain(path, name, spec, network, parts, settings, own)
            return SplitChain(prepare(path), Parts(parts), file)


def _checked(settings: Mapping[str, Any]) -> ChainSpec:
    """Return the settings by which cuts are chosen, as those of a chain without its modules."""
    keys = {"data", "loss", "losses", "defaults"} & settings.keys()
    alone = {"name": "alone", "modules": [{"name": "alone", "layers": ["Identity"]}]}
    return validated(ChainSpec, alone | {key: settings[key] for key in keys}, ())


def first_batch(data: DataSpec, base: Path) -> tuple[Tensor, ...]:
    """Return the inputs of the first training batch."""
    batch = next(open_data(data, base, seed=0).some_batches("train", 0, 0, lambda: True))
    assert batch is not None
    return as_inputs(batch[0])


def _frozen(network: nn.Module, state: nn.Module) -> list[str]:
    """Return the parameters that are frozen in ``state``, and not by the class itself."""
    pairs = zip(network.named_parameters(), state.parameters(), strict=True)
    return [name for (name, own), p in pairs if own.requires_grad and not p.requires_grad]


def _settings_of_modules(
    settings: Mapping[str, Any], count: int, interface: str | None
) -> list[Mapping[str, Any]]:
    """Return the modules that the settings have, for as many parts; ``interface`` is of all."""
    modules = settings.get("modules") or []
    keys = {key for module in modules for key in module} - OF_A_PART
    if interface is None and any("interface" in module for module in modules):
        keys.add("interface")
    if keys and len(modules) != count:
        raise UsageError(
            f"the {len(modules)} modules of the settings have their own "
            f"{', '.join(map(repr, sorted(keys)))}, and the network is cut into {count}",
            hint=f"cut it into as many (--modules {len(modules)}), or move that to 'defaults'",
        )
    return modules if keys else []


def settings_of(path: Path) -> dict[str, Any]:
    """Return the keys of a chain file, but its network."""
    try:
        document = parse_yaml(path.read_text("utf-8"), str(path))[0]
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError(unreadable(path, error)) from None
    if not isinstance(document, dict):
        raise SpecError(f"{str(path)!r} is not a chain file")
    return {key: value for key, value in document.items() if key != "network"}

"""A user's network taken apart: where to cut it, what the modules are, and the chain file of it."""

from __future__ import annotations

import contextlib
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from dni_runtime.core.optimization import freeze
from dni_runtime.errors import DataError, DniError, SpecError, UsageError, unreadable
from dni_runtime.network.source import (
    WRAPPED,
    NetworkSpec,
    NetworkWrapper,
    arguments_of,
    build_network,
    first_line,
    guilty_line,
)
from dni_runtime.network.tracing import trace
from dni_runtime.spec import DataInfo, TensorSpec
from dni_runtime.spec.load import suggestion
from dni_runtime.split.costs import Costs
from dni_runtime.split.part import NetworkPart
from dni_runtime.split.plan import Plan, SplitRequest
from dni_runtime.split.verify import unchanged
from dni_runtime.worker.memory import keep_freed_memory


def take_apart(
    spec: NetworkSpec,
    network: nn.Module,
    info: DataInfo,
    request: SplitRequest,
    batch: Sequence[Tensor] = (),  # of the data's inputs; empty: noise
) -> list[NetworkPart]:
    """Choose the cuts of a network, and describe its parts."""
    with planning(spec, network, info, request, batch) as plan:
        return plan.checked(plan.named(request.at) if request.at else plan.best(), network)


@dataclass(frozen=True)
class Recut:
    """A network's modules, and better ones."""

    parts: list[NetworkPart]  # as they are
    better: list[NetworkPart]  # as many, of which the slowest is as fast as can be
    slowness: list[float]  # of each module: its time where it runs, divided by that on this machine

    @property
    def seconds(self) -> list[float]:
        """Time of a batch of each module that there is."""
        return self._times(self.parts)

    @property
    def better_seconds(self) -> list[float]:
        """Expected time of a batch of each better one."""
        return self._times(self.better)

    def _times(self, parts: Sequence[NetworkPart]) -> list[float]:
        return [slowness * part.busy_s for slowness, part in zip(self.slowness, parts, strict=True)]


def cut_again(
    spec: NetworkSpec,
    network: nn.Module,
    info: DataInfo,
    request: SplitRequest,
    measured: Sequence[float | None] = (),  # seconds of each module's batch; None: not known
    batch: Sequence[Tensor] = (),  # of the data's inputs; empty: noise
) -> Recut:
    """Find better cuts of a network that has been taken apart, which ``request.at`` gives.

    Each module of the new cuts is expected to be as much slower than on this machine as the present
    module at its place is.
    """
    request = replace(request, modules=len(request.at) + 1)
    with planning(spec, network, info, request, batch) as plan:
        ends = plan.named(request.at)
        now = plan.parts(ends)
        asked, plan.request = plan.request, replace(plan.request, interfaces=())
        chosen = plan.parts(ends)
        if [part.interface for part in chosen] != [part.interface for part in now]:
            plan.request = asked  # they are the user's, not those that 'split' chooses
        known = {
            number: seconds / (now[number].seconds + now[number].interface_s)
            for number, seconds in enumerate(measured)
            if seconds is not None
        }
        usual = statistics.mean(known.values() or [1.0])
        slowness = [known.get(number, usual) for number in range(len(now))]
        return Recut(now, plan.checked(plan.best(slowness, ends), network), slowness)


@contextlib.contextmanager
def planning(
    spec: NetworkSpec,
    network: nn.Module,
    info: DataInfo,
    request: SplitRequest,
    batch: Sequence[Tensor] = (),  # of the data's inputs; empty: noise
) -> Iterator[Plan]:
    """Measure a network, for the time of this context; its weights stay what they are."""
    keep_freed_memory()  # as workers do
    batch = batch or [_batch(sample, request.batch_size) for sample in spec.example]
    with _threads(request.threads), torch.random.fork_rng(devices=[]):
        with unchanged(network):
            _try(spec, network, batch)
            program = trace(spec)
            costs = Costs(program, network, batch, request.repeats)
        yield Plan(program, costs, info, request, batch)


def network_of(
    target: str,
    info: DataInfo,
    *,
    args: Mapping[str, Any],
    takes: Sequence[str] = (),
    returns: str | int | None = None,
) -> tuple[NetworkSpec, nn.Module]:
    """Build a network for some data; it takes inputs that have names by these."""
    if takes and set(takes) <= set(info.names):
        info = info.with_inputs(takes)
    if takes and len(takes) != len(info.samples):
        raise UsageError(
            f"{len(takes)} arguments of forward are named, and the data has {len(info.samples)} "
            "inputs"
        )
    spec = NetworkSpec.model_validate(
        {
            "import": target,
            "args": dict(args),
            "example": info.samples,
            "takes": tuple(takes),
            "returns": returns,
        }
    )
    network = build_network(spec)
    names = () if takes else arguments_of(network, info.names)
    if names:
        example = info.with_inputs(names).samples
        spec = spec.model_copy(update={"takes": names, "example": example})
    return spec, network


_ANY = frozenset({"build", "create", "get", "load", "make", "model", "my", "net", "network", "new"})
"""Words in names of functions that say nothing of the network that they return."""


def chain_name(target: str, network: nn.Module) -> str:
    """Return a chain's name: the function's, or else the class of the network."""
    name = named_after(target.partition(":")[2])
    if set(name.split("-")) <= _ANY:
        name = named_after(type(network).__name__)
    return name or "network"


def named_after(text: str) -> str:
    """Return a text as the name of a chain; empty if nothing in it can be in one."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:40].strip("-")


def freeze_named(spec: NetworkSpec, network: nn.Module, names: Sequence[str]) -> list[str]:
    """Freeze parts of a network; return the patterns of a chain's ``freeze``.

    A name is that of a module or a parameter of the network, or a pattern of parameters' names.
    """
    modules, patterns = dict(network.named_modules()), []
    parameters = [name for name, _ in network.named_parameters(remove_duplicate=False)]
    for name in names:
        pattern = f"{name}.*" if name in modules else name
        if not any(fnmatchcase(one, pattern) for one in parameters):
            its = [one for one in (*modules, *parameters) if one]
            inner = [one for one in its if one.endswith(f".{name}")]
            known = inner or [one for one in its if one.count(".") == name.count(".")]
            raise UsageError(
                f"{spec.target} has no parameters of {name!r} to freeze",
                hint=suggestion(name, known),
            )
        patterns.append(f"0.{WRAPPED}{pattern}")
    freeze(nn.Sequential(NetworkWrapper(network, spec)), patterns)
    return patterns


def _try(spec: NetworkSpec, network: nn.Module, batch: Sequence[Tensor]) -> None:
    """Refuse a network that fails on a batch, forward or backward, or returns NaN."""
    frozen, y = _frozen(network), None
    try:
        y = NetworkWrapper(network, spec)(*(x.clone() for x in batch))
        if y.requires_grad:
            y.sum().backward()
    except DniError:
        raise
    except Exception as error:
        at, line = guilty_line(error)
        advice = "" if spec.takes else "name its arguments: 'takes' (--takes)"
        if y is not None:
            advice = "'backward' fails so in plain PyTorch, too"
        elif len(spec.example) == 1 and isinstance(error, RuntimeError):
            advice = (
                "compare its sizes with the samples: 'flatten: true' in 'data' makes each a row"
            )
        raise SpecError(
            f"{spec.target} fails on a batch of {', '.join(map(str, spec.example))}{at}: "
            f"{type(error).__name__}: {first_line(error)}",
            hint=line or advice or None,
        ) from error
    if changed := sorted(frozen ^ _frozen(network)):
        raise SpecError(
            f"'forward' of {spec.target} sets 'requires_grad' of {changed[0]!r}",
            hint="do it where the network is built, or name what is not to learn by --freeze "
            "('freeze'); 'forward' may detach instead",
        )
    found = {"returns NaN": y, **_gradients(network)}
    for what, tensor in found.items():
        if tensor.isnan().any():
            raise SpecError(f"{spec.target} {what} for a batch, so its parts cannot be checked")


def _frozen(network: nn.Module) -> set[str]:
    return {name for name, one in network.named_parameters() if not one.requires_grad}


def _gradients(network: nn.Module) -> dict[str, Tensor]:
    named = network.named_parameters()
    return {
        f"has a gradient of NaN at {name!r}": one.grad.to_dense()
        for name, one in named
        if one.grad is not None
    }


def _batch(sample: TensorSpec, samples: int) -> Tensor:
    """Return a batch to measure with: noise, or ones where numbers are indices or masks."""
    dtype = getattr(torch, sample.dtype)
    if dtype.is_floating_point:
        return torch.randn(samples, *sample.shape).to(dtype)
    return torch.ones(samples, *sample.shape, dtype=dtype)


@contextlib.contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def load_weights(network: nn.Module, file: Path) -> None:
    """Load a state dict, by the network's own names."""
    state = read_state_dict(file)
    target = network.state_dict()
    # safetensors keeps one of several tied tensors
    tied: dict[int, list[str]] = {}
    for name, value in target.items():
        tied.setdefault(value.data_ptr(), []).append(name)
    for names in tied.values():
        available = [name for name in names if name in state]
        if available:
            state |= {name: state[available[0]] for name in names}
    missing = [name for name in target if name not in state]
    other = [name for name in state if name not in target]
    if missing or other:
        some = ", ".join(map(repr, (missing or other)[:3]))
        more = f" and {len(missing or other) - 3} more" if len(missing or other) > 3 else ""
        raise DataError(
            f"{str(file)!r} {'lacks' if missing else 'has, beside the network,'} {some}{more}",
            hint=suggestion(missing[0], list(state)) if missing else None,
        )
    for name, value in target.items():
        if value.shape != state[name].shape:
            raise DataError(
                f"{name!r} in {str(file)!r} has shape {list(state[name].shape)}, in the network "
                f"{list(value.shape)}"
            )
    target.update(state)  # it has the versions of the network's modules
    network.load_state_dict(target)


def read_state_dict(file: Path) -> dict[str, Tensor]:
    """Read tensors by name from safetensors, or from what ``torch.save`` wrote."""
    if not file.is_file():
        raise DataError(f"there is no file {str(file)!r}")
    try:
        if file.suffix == ".safetensors":
            return load_file(file)
        state = torch.load(file, map_location="cpu", weights_only=True)
    except (OSError, SafetensorError, RuntimeError, ValueError) as error:
        raise DataError(unreadable(file, error)) from None
    except Exception:  # torch's unpickler, which advises to trust the file
        raise DataError(
            f"{str(file)!r} is refused: it has more than tensors, or is none of torch.save's",
            hint="save a state dict: torch.save(model.state_dict(), file)",
        ) from None
    if not isinstance(state, Mapping) or not all(isinstance(v, Tensor) for v in state.values()):
        raise DataError(f"{str(file)!r} holds no state dict (names with tensors)")
    return dict(state)

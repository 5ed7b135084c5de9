"""A user's network taken apart: where to cut it, what the modules are, and the chain file of it."""

from __future__ import annotations

import contextlib
import copy
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from dni_runtime.core.source import NetworkSpec, build_network
from dni_runtime.core.tracing import trace
from dni_runtime.errors import UsageError
from dni_runtime.spec import DataInfo, TensorSpec
from dni_runtime.split.costs import Costs
from dni_runtime.split.part import Part
from dni_runtime.split.plan import Plan, Request
from dni_runtime.worker.memory import keep_freed_memory


def take_apart(
    spec: NetworkSpec, network: nn.Module, info: DataInfo, wanted: Request
) -> list[Part]:
    """Choose the cuts of a network, and describe its parts.

    Args:
        spec: The network.
        network: The network itself, with its weights.
        info: The data.
        wanted: What is asked for.

    Raises:
        SpecError: It cannot be traced or cut so; or its parts do not compute what it computes.
    """
    with planning(spec, network, info, wanted) as plan:
        return plan.checked(plan.named(wanted.at) if wanted.at else plan.best(), network)


@dataclass(frozen=True)
class Recut:
    """A network's modules, and better ones.

    Attributes:
        parts: The modules that there are.
        better: As many modules, of which the slowest is as fast as can be.
        slowness: For each module, its time where it runs, divided by that on this machine.
    """

    parts: list[Part]
    better: list[Part]
    slowness: list[float]

    @property
    def seconds(self) -> list[float]:
        """Time of a batch of each module that there is."""
        return self._times(self.parts)

    @property
    def better_seconds(self) -> list[float]:
        """Expected time of a batch of each better one."""
        return self._times(self.better)

    def _times(self, parts: Sequence[Part]) -> list[float]:
        return [
            slowness * (part.seconds + part.interface_s)
            for slowness, part in zip(self.slowness, parts, strict=True)
        ]


def cut_again(
    spec: NetworkSpec,
    network: nn.Module,
    info: DataInfo,
    wanted: Request,
    measured: Sequence[float | None] = (),
) -> Recut:
    """Find better cuts of a network that has been taken apart.

    Args:
        spec: The network.
        network: The network itself.
        info: The data.
        wanted: What is asked for; ``at`` says where it is cut now.
        measured: For each module, the seconds of a batch where it runs; None is not known. The
            module of the same number is expected to be as fast, compared with this machine.

    Raises:
        SpecError: As :func:`take_apart`.
    """
    with planning(spec, network, info, replace(wanted, modules=len(wanted.at) + 1)) as plan:
        ends = plan.named(wanted.at)
        now = plan.parts(ends)
        asked, plan.wanted = plan.wanted, replace(plan.wanted, interfaces=())
        chosen = plan.parts(ends)
        if [part.interface for part in chosen] != [part.interface for part in now]:
            plan.wanted = asked  # they are the user's, not those that 'split' chooses
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
    spec: NetworkSpec, network: nn.Module, info: DataInfo, wanted: Request
) -> Iterator[Plan]:
    """Measure a network, for the time of this context; its weights stay what they are.

    Args:
        spec: The network.
        network: The network itself.
        info: The data.
        wanted: What is asked for.

    Raises:
        SpecError: It cannot be traced.
    """
    keep_freed_memory()  # as workers do
    program = trace(spec)
    batch = [_batch(one, wanted.batch_size) for one in spec.example]
    state = copy.deepcopy(network.state_dict())  # with its versions
    with _threads(wanted.threads), torch.random.fork_rng(devices=[]):
        costs = Costs(program, network, batch, wanted.repeats)
        network.load_state_dict(state)
        yield Plan(program, costs, info, wanted, batch)
        network.load_state_dict(state)


def network_of(
    target: str,
    info: DataInfo,
    *,
    args: Mapping[str, Any],
    takes: Sequence[str] = (),
    returns: str | None = None,
) -> tuple[NetworkSpec, nn.Module]:
    """Build a network for some data.

    Raises:
        SpecError: It cannot be built.
        UsageError: ``takes`` names more inputs than the data has.
    """
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
    return spec, build_network(spec).train()


def chain_name(target: str) -> str:
    """Return a chain's name for an import path."""
    name = re.sub(r"[^a-z0-9]+", "-", target.partition(":")[2].lower()).strip("-")
    return name[:40].strip("-") or "network"


def _batch(one: TensorSpec, samples: int) -> Tensor:
    """Return a batch to measure with: noise, or ones where numbers are indices or masks."""
    dtype = getattr(torch, one.dtype)
    if dtype.is_floating_point:
        return torch.randn(samples, *one.shape).to(dtype)
    return torch.ones(samples, *one.shape, dtype=dtype)


@contextlib.contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)

"""A user's network taken apart: where to cut it, what the modules are, and the chain file of it."""

from __future__ import annotations

import contextlib
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from dni_runtime.core.source import (
    NetworkSpec,
    Wrapped,
    build_network,
    first_line,
    guilty_line,
)
from dni_runtime.core.tracing import trace
from dni_runtime.errors import SpecError, UsageError
from dni_runtime.spec import DataInfo, TensorSpec
from dni_runtime.split.costs import Costs
from dni_runtime.split.part import Part
from dni_runtime.split.plan import Plan, Request
from dni_runtime.split.verify import unchanged
from dni_runtime.worker.memory import keep_freed_memory


def take_apart(
    spec: NetworkSpec,
    network: nn.Module,
    info: DataInfo,
    wanted: Request,
    batch: Sequence[Tensor] = (),  # of the data's inputs; empty: noise
) -> list[Part]:
    """Choose the cuts of a network, and describe its parts."""
    with planning(spec, network, info, wanted, batch) as plan:
        return plan.checked(plan.named(wanted.at) if wanted.at else plan.best(), network)


@dataclass(frozen=True)
class Recut:
    """A network's modules, and better ones."""

    parts: list[Part]  # as they are
    better: list[Part]  # as many, of which the slowest is as fast as can be
    slowness: list[float]  # of each module: its time where it runs, divided by that on this machine

    @property
    def seconds(self) -> list[float]:
        """Time of a batch of each module that there is."""
        return self._times(self.parts)

    @property
    def better_seconds(self) -> list[float]:
        """Expected time of a batch of each better one."""
        return self._times(self.better)

    def _times(self, parts: Sequence[Part]) -> list[float]:
        return [slowness * part.busy_s for slowness, part in zip(self.slowness, parts, strict=True)]


def cut_again(
    spec: NetworkSpec,
    network: nn.Module,
    info: DataInfo,
    wanted: Request,
    measured: Sequence[float | None] = (),  # seconds of each module's batch; None: not known
    batch: Sequence[Tensor] = (),  # of the data's inputs; empty: noise
) -> Recut:
    """Find better cuts of a network that has been taken apart, which ``wanted.at`` gives.

    Each module of the new cuts is expected to be as much slower than on this machine as the present
    module at its place is.
    """
    wanted = replace(wanted, modules=len(wanted.at) + 1)
    with planning(spec, network, info, wanted, batch) as plan:
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
    spec: NetworkSpec,
    network: nn.Module,
    info: DataInfo,
    wanted: Request,
    batch: Sequence[Tensor] = (),  # of the data's inputs; empty: noise
) -> Iterator[Plan]:
    """Measure a network, for the time of this context; its weights stay what they are."""
    keep_freed_memory()  # as workers do
    program = trace(spec)
    batch = batch or [_batch(one, wanted.batch_size) for one in spec.example]
    with _threads(wanted.threads), torch.random.fork_rng(devices=[]):
        with unchanged(network):
            _try(spec, network, batch)
            costs = Costs(program, network, batch, wanted.repeats)
        yield Plan(program, costs, info, wanted, batch)


def network_of(
    target: str,
    info: DataInfo,
    *,
    args: Mapping[str, Any],
    takes: Sequence[str] = (),
    returns: str | int | None = None,
) -> tuple[NetworkSpec, nn.Module]:
    """Build a network for some data."""
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


def _try(spec: NetworkSpec, network: nn.Module, batch: Sequence[Tensor]) -> None:
    """Refuse a network that fails on a batch, or returns NaN."""
    try:
        y = Wrapped(network, spec)(*(one.clone() for one in batch))
    except Exception as error:
        at, line = guilty_line(error)
        raise SpecError(
            f"{spec.target} fails on a batch{at}: {type(error).__name__}: {first_line(error)}",
            hint=line or None,
        ) from error
    if y.isnan().any():
        raise SpecError(f"{spec.target} returns NaN for a batch, so its parts cannot be checked")


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

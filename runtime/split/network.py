"""A user's network taken apart: where to cut it, what the modules are, and the chain file of it."""

from __future__ import annotations

import contextlib
import copy
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from dni_runtime.core.interfaces import Boundary, default_interface
from dni_runtime.core.losses import ChainLoss
from dni_runtime.core.piece import Operations, Section
from dni_runtime.core.program import NetworkSpec, Program, Wrapped, build_network, trace
from dni_runtime.core.resolve import DEFAULT_OPTIMIZER
from dni_runtime.errors import DataError, SpecError, UsageError
from dni_runtime.packing import row_of
from dni_runtime.spec import Choice, DataInfo, TensorSpec
from dni_runtime.spec.load import suggestion
from dni_runtime.split.balance import Balance, best_cuts
from dni_runtime.split.costs import Costs, interface_seconds

LINKS = {"fast": 1e9, "slow": 12.5e6}
"""Bytes per second of links: within a host or over InfiniBand; over 100 Mbit/s."""


@dataclass(frozen=True)
class Part:
    """One module of a network that has been taken apart.

    Attributes:
        name: Its name.
        after: The module of the network after which it begins; None for the first.
        until: The module of the network after which it ends; None for the last.
        inputs: What it takes, as in ``chain.yaml``; None: what the part before gives.
        outputs: One sample of each of its outputs.
        numbers: How many numbers its parameters are.
        lends: Tied parameters that later parts use, too.
        borrows: Tied parameters that an earlier part has, and which input brings each.
        seconds: Measured time of a training batch, without the interface's.
        interface_s: That of its gradient interface.
        memory: Bytes of weights, gradients, Adam's averages and one batch.
        sends: Bytes of a batch of its outputs.
        interface: Its gradient interface; None for the last.
        attends: Whether it has attention.
        samples: Samples of the batch that it was measured with.
    """

    name: str
    after: str | None
    until: str | None
    inputs: tuple[str, ...] | None
    outputs: tuple[TensorSpec, ...]
    numbers: int
    lends: tuple[str, ...]
    borrows: dict[str, int]
    seconds: float
    interface_s: float
    memory: float
    sends: int
    interface: Choice | None
    attends: bool
    samples: int


DEFAULT_LOSS = Choice(name="CrossEntropyLoss")


@dataclass(frozen=True)
class Request:
    """How a network is to be taken apart.

    Attributes:
        modules: Number of modules.
        at: Instead, the modules of the network after which to cut.
        balance: What is to be equal among the modules.
        links: Speed of the links, a key of ``LINKS``.
        batch_size: Samples in a training batch.
        loss: The chain's loss.
        interface: The gradient interface of all modules; None: chosen for each.
        threads: Compute threads of a worker.
        repeats: Measurements of each time, of which the median counts.
    """

    modules: int = 2
    at: tuple[str, ...] = ()
    balance: Balance = "time"
    links: str = "fast"
    batch_size: int = 128
    loss: Choice = DEFAULT_LOSS
    interface: Choice | None = None
    threads: int = 1
    repeats: int = 5


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
    program = trace(spec)
    batch = [_batch(one, wanted.batch_size) for one in spec.example]
    state = copy.deepcopy(network.state_dict())  # with its versions
    with _threads(wanted.threads), torch.random.fork_rng(devices=[]):
        costs = Costs(program, network, batch, wanted.repeats)
        network.load_state_dict(state)
        plan = _Plan(program, costs, info, wanted)
        ends = plan.named(wanted.at) if wanted.at else plan.best()
        parts = plan.parts(ends)
        _check(program, network, batch, parts)
        network.load_state_dict(state)
    return parts


class _Plan:
    """The costs of modules, with their gradient interfaces."""

    def __init__(self, program: Program, costs: Costs, info: DataInfo, wanted: Request) -> None:
        self._program, self._costs, self._wanted = program, costs, wanted
        (output,) = (node for node in program.train.graph.nodes if node.op == "output")
        (last,) = output.all_input_nodes
        prediction = program.train.sample(last)
        if isinstance(prediction, str):
            raise SpecError(f"{program.spec.target}: the output {prediction}")
        scores = ChainLoss(wanted.loss, prediction, info.label, ("loss",)).scores
        classes = scores if info.classes is None else info.classes
        self._boundary = Boundary(
            prediction, info.label, prediction, classes, wanted.loss, DEFAULT_OPTIMIZER
        )
        self._interfaces: dict[tuple[str, TensorSpec], float] = {}

    def named(self, at: Sequence[str]) -> list[int]:
        """Return the cuts of some names, as numbers of segments before them.

        Raises:
            SpecError: There is no such cut, or they are not in order.
        """
        positions = [self._program.cut(name).position for name in at]
        if positions != sorted(set(positions)):
            raise SpecError(f"'--at {','.join(at)}' is not the order in which the network runs")
        ends = [one.end.position if one.end else -1 for one in self._costs.segments]
        return [1 + ends.index(position) for position in positions]

    def best(self) -> list[int]:
        """Return the best cuts, as numbers of segments before them.

        Raises:
            SpecError: The network has fewer segments than modules are wanted.
        """
        count = len(self._costs.segments)
        if self._wanted.modules > count:
            raise SpecError(
                f"{self._program.spec.target} can be cut in {count - 1} places, so that it has at "
                f"most {count} modules, not {self._wanted.modules}"
            )
        byte_s = LINKS[self._wanted.links]
        links = [bytes / byte_s / self._seconds(0, count) for bytes in self._costs.traffic]
        if self._wanted.balance == "memory":
            links = [0.0] * count
        return best_cuts(
            count, self._wanted.modules, self._cost, self._costs.traffic, lambda j: links[j - 1]
        )

    def _cost(self, i: int, j: int) -> float:
        """Share of the whole network's time or memory."""
        count, balance = len(self._costs.segments), self._wanted.balance
        seconds = self._seconds(i, j) / self._seconds(0, count)
        memory = self._costs.memory(i, j) / self._costs.memory(0, count)
        return {"time": seconds, "memory": memory, "both": max(seconds, memory)}[balance]

    def _seconds(self, i: int, j: int) -> float:
        return self._costs.seconds(i, j) + self._interface_seconds(i, j)

    def _interface(self, i: int, j: int) -> Choice | None:
        last = j == len(self._costs.segments)
        return None if last else self._chosen(self._costs.attends(i, j))

    def _chosen(self, attends: bool) -> Choice:
        return self._wanted.interface or default_interface(attends)

    def _interface_seconds(self, i: int, j: int) -> float:
        choice = self._interface(i, j)
        if choice is None:
            return 0.0
        row = row_of(self._costs.outputs(i, j))
        key = choice.model_dump_json(), row
        if key not in self._interfaces:
            boundary = replace(self._boundary, activation=row)
            self._interfaces[key] = interface_seconds(choice, boundary, self._costs.samples)
        return self._interfaces[key]

    def parts(self, ends: Sequence[int]) -> list[Part]:
        """Describe the modules between some cuts."""
        costs, trace_ = self._costs, self._program.train
        cuts = [costs.segments[end - 1].end for end in ends]
        names = [None, *(cut.name for cut in cuts if cut is not None), None]
        sections = [Section.of(trace_, after, until) for after, until in pairwise(names)]
        spans = list(pairwise([0, *ends, len(costs.segments)]))
        sizes: list[dict[str, int]] = []
        for i, j in spans:
            sizes.append({})
            for segment in costs.segments[i:j]:
                sizes[-1] |= segment.parameters
        owner: dict[str, int] = {}
        for number, own in enumerate(sizes):
            for name in own:
                owner.setdefault(name, number)
        tied = sorted(
            {name for number, own in enumerate(sizes) for name in own if owner[name] != number}
        )
        # Where a value is: the part that gives it, and as which of its outputs.
        given: dict[Any, tuple[int, int]] = {}
        counts = []
        for number, section in enumerate(sections):
            lent = [name for name in tied if owner[name] == number]
            for which, one in enumerate([*section.gives, *lent]):
                given[one] = number, which
            counts.append(len(section.gives) + len(lent))
        parts: list[Part] = []
        for number, ((i, j), section) in enumerate(zip(spans, sections, strict=True)):
            lends = tuple(name for name in tied if owner[name] == number)
            borrowed = [name for name in tied if name in sizes[number] and name not in lends]
            taken = sorted([*section.takes, *borrowed], key=lambda one: given[one])
            places = [given[one] for one in taken]
            inputs = [
                f"part-{source + 1}" + (f".{which}" if counts[source] > 1 else "")
                for source, which in places
            ]
            inputs += [f"data.{one}" for one in section.data]
            before = [(number - 1, which) for which in range(counts[number - 1])]
            whole = section.data == list(range(len(self._program.spec.example)))
            plain = whole if not number else places == before and not section.data
            outputs = costs.outputs(i, j) or (self._boundary.prediction,)
            outputs += tuple(
                TensorSpec(shape=(-(-sizes[number][name] // 4 // costs.samples),), dtype="float32")
                for name in lends
            )
            attends = costs.attends(i, j)
            last = j == len(costs.segments)
            parts.append(
                Part(
                    name=f"part-{number + 1}",
                    after=names[number],
                    until=names[number + 1],
                    inputs=None if plain else tuple(inputs),
                    outputs=outputs,
                    numbers=sum(size for name, size in sizes[number].items()
                                if name not in borrowed) // 4,
                    lends=lends,
                    borrows={name: taken.index(name) for name in borrowed},
                    seconds=costs.seconds(i, j),
                    interface_s=self._interface_seconds(i, j),
                    memory=costs.memory(i, j),
                    sends=0 if last else _bytes(outputs, costs.samples),
                    # A tied parameter learns by true gradients alone.
                    interface=None if last else self._chosen(attends or bool(lends)),
                    attends=attends,
                    samples=costs.samples,
                )
            )  # fmt: skip
        return parts


def _check(
    program: Program, network: nn.Module, batch: Sequence[Tensor], parts: Sequence[Part]
) -> None:
    """Run the network whole and in parts, from one seed, and compare.

    Raises:
        SpecError: The parts compute something else.
    """
    state = copy.deepcopy(network.state_dict())  # with its versions
    for one in program.traces:
        training = one is program.train
        network.train(training)
        whole = _result(network, Wrapped(network, program.spec), batch)
        network.load_state_dict(state)
        values: dict[Any, Tensor] = {}

        def in_parts(*xs: Tensor, one: Any = one, values: dict[Any, Tensor] = values) -> Tensor:
            outputs: tuple[Tensor, ...] = ()
            for part in parts:
                section = Section.of(one, part.after, part.until)
                run = Operations(one, section, network, nn.Module())
                given = [values[node] for node in section.takes]
                outputs = run(*given, *(xs[number] for number in section.data))
                values |= zip(section.gives, outputs, strict=True)
            return outputs[0]

        found = _result(network, in_parts, batch)
        network.load_state_dict(state)
        for name, value in whole.items():
            if not torch.allclose(found[name], value, rtol=1e-4, atol=1e-6, equal_nan=True):
                raise SpecError(
                    f"the parts of {program.spec.target} do not compute what it computes: {name} "
                    f"differs by {float((found[name] - value).abs().max()):.1e}",
                    hint="an operation that changes a tensor in place may be split from a reader "
                    "of that tensor: cut elsewhere with --at",
                )
    network.train()


def _result(network: nn.Module, run: Any, batch: Sequence[Tensor]) -> dict[str, Tensor]:
    """Return the output and all gradients of a batch."""
    torch.manual_seed(0)
    network.zero_grad(set_to_none=True)
    y = run(*batch)
    y.float().square().mean().backward()
    found = {
        f"the gradient of {name!r}": one.grad
        for name, one in network.named_parameters()
        if one.grad is not None
    }
    network.zero_grad(set_to_none=True)
    return {"the output": y.detach(), **found}


def load_weights(network: nn.Module, file: Path) -> None:
    """Load a state dict, by the network's own names.

    Args:
        network: The network.
        file: safetensors, or a file of ``torch.save`` that holds tensors only.

    Raises:
        DataError: It cannot be read, or lacks tensors, has others, or has other shapes.
    """
    state = read_state_dict(file)
    own = network.state_dict()
    missing = [name for name in own if name not in state]
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
    """Read tensors by name from safetensors, or from what ``torch.save`` wrote.

    Raises:
        DataError: It is neither, or holds other things than tensors.
    """
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


def _bytes(outputs: Sequence[TensorSpec], samples: int) -> int:
    row = row_of(outputs)
    size: int = getattr(torch, row.dtype).itemsize
    return samples * size * torch.Size(row.shape).numel()

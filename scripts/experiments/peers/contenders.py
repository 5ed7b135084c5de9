"""Who is compared, and what each computes; no torch is imported here."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Kind = Literal[
    "single", "ddp", "pipeline", "local-sgd", "diloco", "torchft-local-sgd", "torchft-diloco",
    "2bw", "async-1f1b", "chain",
]  # fmt: skip

# name -> threads
SINGLE = {"single-1": 1, "single-2": 2}

# name -> class in torch.distributed.pipelining, stages per process, micro-batches
SCHEDULES: dict[str, tuple[str, int, int]] = {
    f"{name}-{count}": (cls, stages, count)
    for name, cls, stages, counts in (
        ("gpipe", "ScheduleGPipe", 1, (1, 2, 4)),
        ("1f1b", "Schedule1F1B", 1, (2, 4)),
        ("bfs", "ScheduleLoopedBFS", 2, (2, 4)),
        ("interleaved", "ScheduleInterleaved1F1B", 2, (2, 4)),
        ("izb", "ScheduleInterleavedZeroBubble", 2, (2, 4)),
        ("zbv", "ScheduleZBVZeroBubble", 2, (2, 4)),
        ("dualpipev", "ScheduleDualPipeV", 2, (4,)),
    )
    for count in counts
}
V_SHAPED = {"ScheduleZBVZeroBubble", "ScheduleDualPipeV"}

SYNCHRONOUS = ("ddp", *SCHEDULES)

# Those that are listed; any other number may be named.
AVERAGING = ("local-sgd-8", "local-sgd-64", "diloco-64")
ASYNCHRONOUS = ("2bw-4", "2bw-8", "async-1f1b", "async-1f1b-8")
_NUMBERED = re.compile(
    r"(?P<kind>(torchft-)?(local-sgd|diloco)|2bw|async-1f1b)-(?P<number>[1-9]\d{0,4})"
)

# name -> interface (INTERFACES), type on the wire
CHAINS: Mapping[str, tuple[str, str]] = {
    "chain": ("synthetic", "float32"),
    "chain-bf16": ("synthetic", "bfloat16"),
    "chain-int8": ("synthetic", "int8"),
    "mixed": ("mixed", "float32"),
    "true-lessons": ("true-lessons", "float32"),
    "local": ("local", "float32"),
    "delayed": ("delayed", "float32"),
    "delayed-bf16": ("delayed", "bfloat16"),
    "late-1": ("late-1", "float32"),
    "late-1-4": ("late-1-4", "float32"),
    "late-6": ("late-6", "float32"),
    "exact-4": ("exact-4", "float32"),
    "exact-8": ("exact-8", "float32"),
}

WHOLE = "whole"
"""A chain of one module, which is the whole network; only with replicas."""

_REPLICATED = re.compile(
    r"(?P<chain>[a-z0-9-]+)\+(?P<strategy>local-sgd|diloco|parameter-server)-(?P<every>[1-9]\d{0,4})"
)

INTERFACES: Mapping[str, str] = {
    "synthetic": "synthetic gradients",
    "mixed": "mixed gradients",
    "true-lessons": "mixed gradients",
    "local": "local losses",
    "delayed": "late gradients",
    "late-1": "late gradients",
    "late-1-4": "late gradients",
    "late-6": "late gradients",
    "exact-4": "backprop",
    "exact-8": "backprop",
}
"""What a chain's step computes."""

CONTENDERS = (*SINGLE, *SYNCHRONOUS, *AVERAGING, *ASYNCHRONOUS, *CHAINS)

COMPUTES: Mapping[Kind, str] = {
    "single": "backprop",
    "ddp": "backprop",
    "pipeline": "backprop",
    "local-sgd": "averages",
    "diloco": "averages",
    "torchft-local-sgd": "averages",
    "torchft-diloco": "averages",
    "2bw": "old weights",
    "async-1f1b": "old weights",
}
"""What a step of a peer computes: plain backpropagation's update, or another one."""


@dataclass(frozen=True)
class Contender:
    """Who is measured."""

    name: str  # one of CONTENDERS, or one like it with another number
    cut: int | None = None  # layers in the first of two parts; None: the network's usual cut
    processes: int | None = None  # None: see count()

    def __str__(self) -> str:
        cut = "" if self.cut is None else f" @{self.cut}"
        return self.name + cut + ("" if self.processes is None else f" x{self.processes}")

    def count(self, modules: int) -> int:
        """How many processes it has beside chains of so many modules."""
        if self.processes is not None:
            return self.processes
        kind, _ = kind_of(self.name)
        if kind == "single":
            return 1
        two = kind.endswith(("local-sgd", "diloco")) or stages_per_process(self.name) > 1
        return 2 if two else modules


def kind_of(name: str) -> tuple[Kind, int]:
    """What sort of contender a name stands for, and the number in it (0: none); ``ValueError``."""
    if name in SINGLE:
        return "single", SINGLE[name]
    if name in SCHEDULES:
        return "pipeline", SCHEDULES[name][2]
    if name in CHAINS:
        return "chain", 0
    if (found := _REPLICATED.fullmatch(name)) and found["chain"] in (WHOLE, *CHAINS):
        if found["chain"].startswith(("exact", "late")):
            raise ValueError(f"{name!r}: modules that wait for gradients have no replicas")
        return "chain", int(found["every"])
    if name == "ddp" or name == "async-1f1b":
        return ("ddp" if name == "ddp" else "async-1f1b"), 0
    found = _NUMBERED.fullmatch(name)
    if found is None:
        raise ValueError(f"no contender {name!r}; there are {', '.join(CONTENDERS)}")
    kind: Kind = found["kind"]  # type: ignore[assignment]  # one of the pattern's words
    return kind, int(found["number"])


def chain_of(name: str) -> tuple[str, str]:
    """A chain's interface (INTERFACES) and type on the wire."""
    base = name.partition("+")[0]
    return ("mixed", "float32") if base == WHOLE else CHAINS[base]


def strategy_of(name: str) -> dict[str, str | int] | None:
    """How the replicas of a chain share, as a chain file has it; None: it has no replicas."""
    found = _REPLICATED.fullmatch(name)
    return found and {"strategy": found["strategy"], "every": int(found["every"])}


def computes(name: str) -> str:
    """What a contender's step computes, in a word or two."""
    kind, _ = kind_of(name)
    if kind != "chain":
        return COMPUTES[kind]
    found = "backprop" if name.startswith(WHOLE) else INTERFACES[chain_of(name)[0]]
    return found if strategy_of(name) is None else f"{found}, averages"


def stages_per_process(name: str) -> int:
    """How many parts of the network each process of a pipelining schedule has; else 1."""
    return SCHEDULES[name][1] if name in SCHEDULES else 1


def in_flight(name: str, stage: int, stages: int) -> int:
    """Micro-batches under way between a stage of an asynchronous pipeline and the last one.

    1F1B has ``stages - stage`` (Narayanan et al. 2019, sec. 3.2). With a slow line in the middle
    that leaves the stages before it waiting, so that these have more: at the first stage 2BW has as
    many as its two versions of the weights allow, one more than micro-batches, and async-1f1b-K has
    K; each stage has one fewer than the one before it, so that none waits for that one's next.
    """
    kind, number = kind_of(name)
    wanted = stages - stage
    if 2 * stage < stages:
        wanted = max(wanted, number + (kind == "2bw") - stage)
    return max(1, min(wanted, number + 1 - stage)) if kind == "2bw" else wanted

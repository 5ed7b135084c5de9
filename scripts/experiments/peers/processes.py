"""The peers' processes: started at their ends of the line, and what they print."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dni_runtime.schedulers.processes import CHILD
from peers.contenders import SINGLE, Contender
from peers.networks import NETWORKS, data_spec
from peers.slow_link import INTERFACE, Link

_START_AND_END_S = 300  # longest, of a contender
_PROGRAM = Path(__file__).with_name("process.py")
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


@dataclass(frozen=True)
class Timing:
    """How long everybody trains."""

    warmup_s: float  # before timing starts
    seconds: float  # that are timed

    @property
    def limit_s(self) -> float:
        """Seconds after which a contender has failed."""
        return self.warmup_s + self.seconds + _START_AND_END_S


@dataclass(frozen=True)
class Measured:
    """What one run of one contender gave."""

    rate: float  # samples/s
    cpu_s: float  # of all its processes for one sample
    cores: tuple[float, ...]  # that each of its processes kept busy
    details: dict[str, Any]


@dataclass(frozen=True)
class Started:
    """A peer's processes."""

    processes: list[subprocess.Popen[bytes]]  # by rank
    scratch: Path  # of their output

    def running(self) -> bool:
        """Whether one of them still runs; raises ``RuntimeError`` if one has failed."""
        codes = [process.poll() for process in self.processes]
        if any(codes):
            time.sleep(1)  # another one's message may be the better one
            errors = [last_error((self.scratch / f"{r}.err").read_text()) for r in self._ranks()]
            told = "; ".join(f"rank {r}: {m}" for r, m in enumerate(errors) if m)
            raise RuntimeError(told or f"its processes ended with {codes}")
        return None in codes

    def lines(self) -> list[list[dict[str, Any]]]:
        """What each has printed so far, in whole lines."""
        found = []
        for rank in self._ranks():
            text = (self.scratch / f"{rank}.out").read_text()
            found.append([json.loads(line) for line in text.split("\n")[:-1]])
        return found

    def _ranks(self) -> range:
        return range(len(self.processes))


@contextmanager
def started(
    contender: Contender, modules: int, job: dict[str, Any], folder: Path, link: Link | None
) -> Iterator[Started]:
    """Start a peer's processes, the first half at one end of the line; at the end they are gone.

    ``modules`` is how many the chains beside it have, ``job`` what its processes do; without a link
    they use loopback.
    """
    count = contender.count(modules)
    environment = {
        **os.environ,
        **dict.fromkeys(_THREAD_VARIABLES, str(SINGLE.get(contender.name, 1))),
        "GLOO_SOCKET_IFNAME": "lo" if link is None else INTERFACE,
        "PYTHONUNBUFFERED": "1",
    }
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        common = {
            "name": contender.name,
            "cut": contender.cut,
            "processes": count,
            "folder": str(folder),
            "rendezvous": f"{scratch}/meet",
            **job,
        }
        processes: list[subprocess.Popen[bytes]] = []
        tied = (*CHILD, "tied", str(os.getpid()))
        try:
            for rank in range(count):
                argument = json.dumps({**common, "rank": rank})
                at = link.enter(2 * rank // count) if link is not None and count > 1 else []
                with (
                    open(f"{scratch}/{rank}.out", "wb") as out,
                    open(f"{scratch}/{rank}.err", "wb") as err,
                ):
                    processes.append(
                        subprocess.Popen(
                            [*at, *tied, sys.executable, str(_PROGRAM), argument],
                            stdout=out,
                            stderr=err,
                            env=environment,
                        )
                    )
            yield Started(processes, Path(scratch))
        finally:
            for process in processes:
                process.kill()
                process.wait()


def measure_peer(
    contender: Contender,
    network: str,  # its name
    modules: int,  # of the chains beside it
    folder: Path,  # of the data
    timing: Timing,
    link: Link | None,  # between two halves of its processes; None: loopback
) -> Measured:
    """A peer's speed; raises ``RuntimeError`` if a process failed."""
    job = {
        "network": network,
        "data": data_spec(NETWORKS[network], folder),
        "seed": 0,
        "every": None,
        "warmup_s": timing.warmup_s,
        "seconds": timing.seconds,
    }
    deadline = time.monotonic() + timing.limit_s
    with started(contender, modules, job, folder, link) as peer:
        while peer.running():
            if time.monotonic() > deadline:
                raise RuntimeError(f"did not end within {timing.limit_s:.0f} s")
            time.sleep(0.05)
        answers = [lines[-1] for lines in peer.lines()]
    seconds = max(answer["seconds"] for answer in answers)
    samples = answers[0]["steps"] * NETWORKS[network].batch
    return Measured(
        rate=samples / seconds,
        cpu_s=sum(answer["cpu_s"] for answer in answers) / samples,
        cores=tuple(answer["cpu_s"] / answer["seconds"] for answer in answers),
        details={},
    )


def step_seconds(network: str, folder: Path) -> float:
    """About how long each of two hosts of one core computes for a batch.

    That is half of what one process takes in CPU time, which other programs do not change.
    """
    cpu_s = min(
        measure_peer(Contender("single-1"), network, 1, folder, short, None).cpu_s
        for short in 2 * [Timing(0.5, 1.0)]
    )
    return NETWORKS[network].batch * cpu_s / 2


def train_peer(
    contender: Contender,
    modules: int,  # of the chains beside it
    job: dict[str, Any],  # what its processes do
    folder: Path,  # of the data
    link: Link | None,  # between two halves of its processes; None: loopback
    enough: Callable[[list[dict[str, Any]]], bool],  # gets all evaluations so far, now and then
) -> None:
    """Train with a peer until enough is known; raises ``RuntimeError`` if a process failed."""
    with started(contender, modules, job, folder, link) as peer:
        while peer.running() and not enough(max(peer.lines(), key=len)):
            time.sleep(0.1)


def last_error(text: str) -> str:
    """The line of a traceback that names the error, or its last line; empty if there is no text."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    named = [line for line in lines if line.split(":")[0].endswith(("Error", "Exception"))]
    return (named or lines or [""])[-1][:300]

"""Chains with real workers for a bounded time, and the pace of each worker.

Figures are differences between two reports of a worker: start, warm-up and end do not count.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from dni_runtime.api.planning import plan_run
from dni_runtime.plan.plan import RestartPlan
from dni_runtime.plan.prepare import CheckedChain
from dni_runtime.plan.settings import StartSettings
from dni_runtime.run.documents.metrics import TrainLine, read_metrics
from dni_runtime.run.documents.state import RunState
from dni_runtime.run.rundir import RunDir
from dni_runtime.schedulers.processes import LocalStarter
from dni_runtime.schedulers.runtimes import worker_argv
from dni_runtime.spec import LinksSpec
from dni_runtime.spec.replicas import tails_of
from dni_runtime.supervise.journal import failure
from dni_runtime.supervise.start import Launch
from dni_runtime.supervise.supervisor import Supervisor
from peers.processes import Timing

ENDLESS = {"epochs": 1_000_000, "eval_every": 0, "checkpoint": {"every_epochs": 0}}
"""Settings of a chain that only trains, until it is stopped."""


@dataclass(frozen=True)
class Pace:
    """What a worker did between two of its reports."""

    module: str
    samples_per_s: float
    cpu_s: float  # for one batch, of all its threads
    cores: float  # that it kept busy
    waiting: dict[str, float]  # shares of the time, by reason
    lag: float | None  # batches by which true gradients came late, at the end


def run_until(
    root: Path,  # the run directory to make
    prepared: CheckedChain,
    prefixes: Mapping[str, Sequence[str]],  # by worker, a command that executes its command
    enough: Callable[[RunDir], bool],  # asked a few times a second
) -> RunDir:
    """Train a chain until enough is known; raises ``DniError`` if it fails."""
    # Workers at the ends of a line have an interface that is checked there: it is not here.
    written = prepared.written.model_copy(update={"links": LinksSpec()})
    planned = plan_run(replace(prepared, written=written), StartSettings(root, "process"))
    run = planned.create()
    # restarts would be measured
    launch = Launch.of(run, replace(planned.plan, restart=RestartPlan()))
    starter = LocalStarter(render=lambda one: [*prefixes.get(one.module, ()), *worker_argv(one)])
    supervisor = Supervisor(run, launch.plan, starter, lease=launch.lease)

    stopping = False

    def look(state: RunState) -> None:
        nonlocal stopping
        if state.active and not stopping and enough(run):
            stopping = True  # a second signal would kill them
            supervisor.interrupt(signal.SIGTERM)

    error = failure(run, supervisor.run(look))
    if error is not None:
        raise error
    return run


def measure_pace(
    root: Path, prepared: CheckedChain, timing: Timing, prefixes: Mapping[str, Sequence[str]]
) -> tuple[list[Pace], float]:
    """The pace of each worker of a chain without end, and samples per second at its tails."""
    tails = tails_of(prepared.names)
    fill = 2 * prepared.chain.links.window
    deadline = time.monotonic() + timing.limit_s

    def between(run: RunDir) -> tuple[TrainLine, TrainLine] | None:
        return reports(list(read_metrics(run.metrics(tails[0]), TrainLine)), timing, fill)

    def enough(run: RunDir) -> bool:
        if time.monotonic() > deadline:
            raise RuntimeError(f"its pace was not known within {timing.limit_s:.0f} s")
        return between(run) is not None

    run = run_until(root, prepared, prefixes, enough)
    found = between(run)
    if found is None:
        raise RuntimeError("it was stopped before its pace was known")
    since, until = found[0].time, found[1].time
    paces = [
        pace_of(name, list(read_metrics(run.metrics(name), TrainLine)), since, until)
        for name in prepared.names
    ]
    return paces, sum(pace.samples_per_s for pace in paces if pace.module in tails)


def reports(
    lines: Sequence[TrainLine], timing: Timing, fill: int
) -> tuple[TrainLine, TrainLine] | None:
    """The reports of a tail between which a chain is measured; None until there are both.

    ``fill`` batches, after which links' windows are full, belong to the warm-up.
    """
    warm = [
        line
        for line in lines
        if line.time - lines[0].time >= timing.warmup_s and line.step - lines[0].step >= fill
    ]
    late = [line for line in warm if line.time - warm[0].time >= timing.seconds]
    return (warm[0], late[0]) if late else None


def pace_of(module: str, lines: Sequence[TrainLine], since: float, until: float) -> Pace:
    """A worker's pace between its reports that are the nearest ones to two moments."""
    # Each worker reports about once a second, but not at the same time as the others.
    first, last = (
        min(lines, key=lambda line: abs(line.time - moment), default=None)
        for moment in (since, until)
    )
    if first is None or last is None or last.step <= first.step:
        raise RuntimeError(f"{module} has reported too rarely: measure for longer")
    seconds, cpu_s = last.time - first.time, last.cpu_s - first.cpu_s
    return Pace(
        module=module,
        samples_per_s=(last.samples - first.samples) / seconds,
        cpu_s=cpu_s / (last.step - first.step),
        cores=cpu_s / seconds,
        waiting={
            reason: (waited - first.waiting_s.get(reason, 0.0)) / seconds
            for reason, waited in last.waiting_s.items()
        },
        lag=last.lag,
    )

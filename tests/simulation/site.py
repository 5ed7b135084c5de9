"""A chain of real workers on a simulated cluster, what goes wrong there, and what must hold."""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import random
import secrets
import shutil
import signal
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
import zmq
from torch.nn.utils import parameters_to_vector

from dni_runtime.core.chain import LocalChain
from dni_runtime.core.step import ModuleStep
from dni_runtime.errors import DniError
from dni_runtime.files import peek_json, write_atomic
from dni_runtime.link import receiver, sender, sockets
from dni_runtime.packing import no_labels
from dni_runtime.plan.plan import WorkerPlan
from dni_runtime.resolve.resolve import worker_specs
from dni_runtime.run.cuts import complete_cuts, is_over, parts_of
from dni_runtime.run.documents.metrics import EvaluationLine, read_metrics
from dni_runtime.run.documents.records import RunRecord
from dni_runtime.run.documents.reports import Report
from dni_runtime.run.rundir import RunDir
from dni_runtime.spec import Graph, LinksSpec, WorkerSpec, parse_chain
from dni_runtime.spec.named import module_of, number_of
from dni_runtime.spec.replicas import tails_of, workers_of
from dni_runtime.spec.worker import ADJACENT_FAILURES, DataInfo, TensorSpec
from dni_runtime.supervise import pool, supervisor
from dni_runtime.supervise.scaling import ask_for, wanted_replicas
from dni_runtime.supervise.supervisor import Supervisor
from dni_runtime.wire import Rows
from dni_runtime.worker import (
    checkpoint,
    main,
    metrics,
    report,
    resume,
    saver,
    signals,
)
from dni_runtime.worker.ledger import Counts
from dni_runtime.worker.signals import StopRequest
from dni_runtime.worker.start import WorkerStart
from tests.lines import read_lines
from tests.simulation.disk import Disk
from tests.simulation.network import Context, Network, Poller
from tests.simulation.supervision import Supervision, Worker
from tests.simulation.world import Killed, Process, World

NAMES = ("a", "b", "c", "d", "e", "f", "g", "h")
BATCHES, SAMPLES = 5, 4
INFO = DataInfo(
    sample=TensorSpec(shape=(4,), dtype="float32"),
    label=TensorSpec(shape=(), dtype="int64"),
    classes=2,
    train_samples=BATCHES * SAMPLES,
    eval_samples=4,
)
Sources = tuple[tuple[int, ...], ...]
PATIENCE_S = 600.0
"""Longest simulated time that a run may take once faults have ended."""

NOTICED_S = 6.0
"""Longest simulated time in which all run before a change of the numbers of replicas begins."""

INTERFACES = (
    "exact", "{exact: {micro_batches: 2}}", "delayed", "{delayed: {max_late: 1}}", "synthetic",
    "local",
)  # fmt: skip
WAITING = {"exact", "{exact: {micro_batches: 2}}", "{delayed: {max_late: 1}}"}
"""An update waits for a gradient: such a chain begins again as a whole."""


REPLICATIONS = (
    "local-sgd", "all-reduce", "{federated: {share: 0.5}}", "{dynamic: {threshold: 0.01}}",
    "diloco, compression: int8", "admm", "parameter-server",
    "all-reduce, compression: {top-k: {share: 0.2}}",
)  # fmt: skip


class Violated(AssertionError):
    """Something that must hold does not."""


@dataclass
class Schedule:
    """What a seed stands for: a chain, its surroundings, and what goes wrong.

    Times are in simulated seconds.
    """

    seed: int
    modules: int = 2
    sources: Sources | None = None  # of the inputs of each module; None: the one before
    replicas: tuple[int, ...] = ()  # workers of each module; none: one of each
    replication: str = "local-sgd"  # how they share
    labels: str = "head"  # where they are: "tail", or "head", which sends them
    starts: tuple[int | None, ...] = ()  # how many there are at first, if the file says so
    scales: list[tuple[float, int, int]] = field(default_factory=list)  # how many are wanted then
    interface: str = "delayed"
    window: int = 2
    on_loss: str = "wait"
    epochs: int = 2
    checkpoint_steps: int = 0
    latency_s: float = 0.001
    step_s: float = 0.02
    late_s: float = 0.0
    spare: int = 0  # hosts that nothing runs on at first
    faults: list[tuple[float, str, int, float]] = field(default_factory=list)

    @classmethod
    def of(cls, seed: int, *, graph: bool = False, replicas: bool = False) -> Schedule:
        """Draw one.

        ``graph``: modules have several inputs, and several modules take one output.
        """
        world = World(seed)
        draw = world.random
        made = cls(
            seed,
            modules=draw.choice((2, 2, 3, 4)),
            interface=draw.choice(INTERFACES),
            window=draw.choice((1, 2, 4)),
            on_loss=draw.choice(("wait", "wait", "wait", "continue")),
            epochs=draw.choice((1, 1, 2)),
            checkpoint_steps=draw.choice((0, 2)),
            latency_s=draw.choice((0.0001, 0.01, 0.01, 0.2, 0.2, 2.0)),
            step_s=draw.choice((0.001, 0.02, 0.02, 0.5)),
            late_s=draw.choice((0.0, 0.0, 3.0)),
        )
        if graph:
            made._draw_graph()
        if replicas:
            made._draw_replicas()
        apart = random.Random(f"labels {seed}")  # as below
        if made.interface != "local" and apart.random() < 0.3:
            made.labels = "tail"
            if made.interface == "synthetic":
                made.interface = "{synthetic: {conditioned: false}}"
        if made.interface in WAITING or made.interface == "delayed":
            made.on_loss = "wait"
        batches = made.epochs * BATCHES
        length_s = 2 + 2 * batches * (made.step_s + made.latency_s)
        kinds = (
            "cut", "cut", "half-open", "away", "stall", "kill", "kill", "stop", "full", "drop",
            "orphan",
        )  # fmt: skip
        for _ in range(draw.choice((0, 1, 2, 2, 3, 5))):
            lasts_s = draw.choice((0.1, 1.0, 1.0, 5.0, 5.0, 20.0)) * draw.uniform(0.5, 1.5)
            at_s = draw.uniform(0, length_s)
            kind, workers = draw.choice(kinds), sum(made.replicas) or made.modules
            made.faults.append((at_s, kind, draw.randrange(workers), lasts_s))
        more = random.Random(f"launch {seed}")  # drawn apart: what older seeds draw stays as it is
        if more.random() < 0.1:
            at_s, index = more.uniform(0, length_s), more.randrange(made.modules)
            made.faults.append((at_s, more.choice(("unlaunched", "unnoticed")), index, 0.0))
        slow = random.Random(f"slow {seed}")
        if slow.random() < 0.1:
            at_s, worker = (
                slow.uniform(0, length_s),
                slow.randrange(sum(made.replicas) or made.modules),
            )
            made.faults.append((at_s, "slow", worker, slow.choice((30.0, 90.0, 300.0))))
        made.faults.sort()
        if replicas:
            made._draw_scales(length_s)
            made._draw_loss(length_s)
            made._draw_lost_hosts(length_s)
        return made

    def _draw_graph(self) -> None:
        """Draw joins and skips, and the smallest window that suffices if the drawn one does not."""
        draw = random.Random(f"graph {self.seed}")
        self.modules = draw.choice((3, 4, 4, 5, 6, 8))
        own: list[set[int]] = [set()]
        for index in range(1, self.modules):
            some = draw.choice((1, 1, 2, 3))
            own.append(set(draw.sample(range(index), min(some, index))))
        for index in range(self.modules - 1):
            if not any(index in one for one in own[index + 1 :]):
                own[draw.randrange(index + 1, self.modules)].add(index)
        self.sources = tuple(tuple(draw.sample(sorted(one), len(one))) for one in own)
        graph = Graph(self.sources, ((),) * self.modules)
        self.window = max(self.window, *(graph.beside(*ends) for ends in graph.numbers))

    def _draw_replicas(self) -> None:
        """Draw replicas of modules, which wait for no gradient."""
        draw = random.Random(f"replicas {self.seed}")
        self.modules = max(self.modules, 3)
        between = [draw.choice((1, 2, 2, 3)) for _ in range(self.modules - 2)]
        between[draw.randrange(len(between))] = draw.choice((2, 3))
        apart = random.Random(f"heads {self.seed}")
        heads = apart.choice((2, 2, 3)) if apart.random() < 0.4 else 1
        apart = random.Random(f"tails {self.seed}")
        tails = apart.choice((2, 2, 3)) if apart.random() < 0.4 else 1
        self.replicas = (heads, *between, tails)
        self.on_loss = self.on_loss if heads == 1 else "wait"
        if self.interface in WAITING:
            self.interface = draw.choice(("delayed", "synthetic", "local"))
        self.replication = draw.choice(REPLICATIONS)

    def _draw_scales(self, length_s: float) -> None:
        """Draw modules whose number of replicas changes, and when it does."""
        draw = random.Random(f"scales {self.seed}")
        if draw.random() < 0.3:
            return
        heads, *others, tails = self.replicas
        most = [heads, *(n + draw.choice((0, 0, 1)) if n > 1 else 1 for n in others), tails]
        elastic = [False, *(n > 1 and draw.random() < 0.8 for n in most[1:-1]), False]
        self.replicas = tuple(most)
        self.starts = tuple(
            draw.randint(1, count) if able else None
            for count, able in zip(most, elastic, strict=True)
        )
        able = [index for index, one in enumerate(elastic) if one]
        for _ in range(draw.choice((1, 1, 2, 3, 4)) if able else 0):
            index = draw.choice(able)
            at_s = draw.uniform(0, 3 + 1.5 * length_s)
            self.scales.append((at_s, index, draw.randint(1, most[index])))
        self._draw_ends(length_s)
        self.scales.sort()
        apart = random.Random(f"lost heads {self.seed}")
        if self.starts[0] is not None and apart.random() < 0.2:
            at_s, worker = apart.uniform(0, length_s), apart.randint(1, heads - 1)
            self.faults.append((at_s, "hopeless", worker, 0.0))
        if able and draw.random() < 0.15:
            index = draw.choice(able)  # one of its replicas, not the first
            at_s, worker = draw.uniform(0, length_s), draw.randint(1, most[index] - 1)
            self.faults.append((at_s, "hopeless", sum(most[:index]) + worker, 0.0))
        self._draw_returns()
        self.faults.sort()

    def _draw_loss(self, length_s: float) -> None:
        """Draw a lost replica of a module whose number the file fixes, maybe the first one."""
        draw = random.Random(f"loss {self.seed}")
        starts = self.starts or (None,) * self.modules
        able = [
            index
            for index, (count, start) in enumerate(zip(self.replicas, starts, strict=True))
            if count > 1 and start is None
        ]
        if able and draw.random() < 0.15:
            index, at_s = draw.choice(able), draw.uniform(0, length_s)
            worker = sum(self.replicas[:index]) + draw.randrange(self.replicas[index])
            self.faults.append((at_s, "hopeless", worker, 0.0))
            self.faults.sort()

    def _draw_lost_hosts(self, length_s: float) -> None:
        """Draw hosts that die; what starts workers knows it a while later."""
        draw = random.Random(f"hosts {self.seed}")
        if draw.random() < 0.2:
            self.spare = draw.choice((0, 0, 1))
            for _ in range(draw.choice((1, 1, 2))):
                at_s, worker = draw.uniform(0, 3 + length_s), draw.randrange(sum(self.replicas))
                self.faults.append((at_s, "gone", worker, draw.choice((0.0, 0.0, 3.0, 20.0))))
            self.faults.sort()

    def _draw_returns(self) -> None:
        """Draw lost replicas that can restart a while after they are given up."""
        draw = random.Random(f"returns {self.seed}")
        for place, (at_s, kind, worker, _) in enumerate(self.faults):
            if kind == "hopeless" and draw.random() < 0.5:
                self.faults[place] = at_s, kind, worker, draw.choice((0.5, 3.0, 10.0))

    def _draw_ends(self, length_s: float) -> None:
        """Draw changes of the number of tails, and of heads."""
        starts = list(self.starts)
        for name, index in (("ends", len(starts) - 1), ("beginnings", 0)):
            draw, most = random.Random(f"{name} {self.seed}"), self.replicas[index]
            if most > 1 and draw.random() < 0.6:
                starts[index] = draw.randint(1, most)
                for _ in range(draw.choice((1, 2, 3))):
                    at_s = draw.uniform(0, 3 + 1.5 * length_s)
                    self.scales.append((at_s, index, draw.randint(1, most)))
        self.starts = tuple(starts)

    @property
    def evaluated(self) -> int:
        """Batches of an evaluation: several, if the tail has replicas."""
        return 3 if self.replicas and self.replicas[-1] > 1 else 1

    @property
    def loses(self) -> bool:
        """Whether the host of a replica is lost, for good or for a while."""
        return any(kind in ("hopeless", "gone") for _, kind, _, _ in self.faults)

    @property
    def specs(self) -> tuple[WorkerSpec, ...]:
        """The workers' specs."""
        return workers_of(
            _specs(
                self.modules, self.interface, self.window, self.on_loss, self.epochs,
                self.checkpoint_steps, self.sources, self.replicas, self.replication, self.labels,
                self.starts,
            )
        )  # fmt: skip


@cache
def _specs(
    modules: int,
    interface: str,
    window: int,
    on_loss: str,
    epochs: int,
    steps: int,
    sources: Sources | None = None,
    replicas: tuple[int, ...] = (),
    replication: str = "local-sgd",
    labels: str = "head",
    starts: tuple[int | None, ...] = (),
) -> tuple[WorkerSpec, ...]:
    counts = [str(count) for count in replicas or (1,) * modules]
    for index, start in enumerate(starts):
        if start is not None:
            counts[index] = f"{{start: {start}, most: {counts[index]}}}"
    layers = "\n".join(_module(index, modules, sources, counts) for index in range(modules))
    chain = parse_chain(
        f"name: simulated\nseed: 1\nepochs: {epochs}\nstop_grace_s: 20\n"
        f"data: {{dataset: digits, batch_size: {SAMPLES}, labels: {labels}}}\n"
        f"checkpoint: {{every_epochs: 1, every_steps: {steps or 'null'}, keep: 2}}\n"
        f"restart: {{snapshot_s: 0.2}}\nlinks: {{window: {window}, on_loss: {on_loss}}}\n"
        f"defaults: {{interface: {interface}, optimizer: {{SGD: {{lr: 0.1}}}}}}\n"
        f"replication: {{every: 2, strategy: {replication}}}\n"
        f"modules:\n{layers}\n"
    )
    return worker_specs(chain, INFO)


def _module(index: int, modules: int, sources: Sources | None, replicas: Sequence[str]) -> str:
    size = f"in_features: {3 if index else 4}, out_features: {3 if index < modules - 1 else 2}"
    layer, inputs = f"{{Linear: {{{size}}}}}", ""
    if sources is not None and index:
        inputs = f"inputs: [{', '.join(NAMES[one] for one in sources[index])}], "
        layer = f"Add, {layer}"
    count = f"replicas: {replicas[index]}, "
    return f"  - {{name: {NAMES[index]}, {count}{inputs}layers: [{layer}]}}"


class Data:
    """The samples: the same for every process, and another batch each time; maybe only a half."""

    train_batch_count = BATCHES
    has_test = False
    info = INFO

    def __init__(self, half: str | None = None, evaluated: int = 1) -> None:
        self._half, self._evaluated = half, evaluated

    def train_batches(self, epoch: int, start: int = 0) -> Iterator[tuple[Any, Any]]:
        draw = torch.Generator().manual_seed(epoch)
        x = torch.randn(BATCHES, SAMPLES, 4, generator=draw)
        y = torch.randint(0, 2, (BATCHES, SAMPLES), generator=draw)
        yield from map(self._own, x[start:], y[start:])

    def batches(self, split: str, epoch: int, start: int) -> Iterator[tuple[Any, Any]]:
        if split == "train":
            yield from self.train_batches(epoch, start)
        else:
            for _ in range(start, self._evaluated):
                yield self._own(torch.ones(4, 4), torch.zeros(4, dtype=torch.int64))

    def some_batches(
        self, split: str, epoch: int, start: int, takes: Callable[[], bool]
    ) -> Iterator[tuple[Any, Any] | None]:
        for batch in self.batches(split, epoch, start):
            yield batch if takes() else None

    def _own(self, x: Any, y: Any) -> tuple[Any, Any]:
        nothing = no_labels(SAMPLES)
        return nothing if self._half == "labels" else x, nothing if self._half == "samples" else y

    def rows(self, split: str, epoch: int, number: int) -> Rows:
        return Rows(split, number, zlib.crc32(f"{split} {epoch}".encode()), BATCHES * SAMPLES, 4, 0)


class Stop(StopRequest):
    """What a simulated worker is told."""

    wakeup = -1

    def __init__(self, world: World, process: Process) -> None:
        self._at_s = None
        self.alone = False
        self.worker = Worker(world, process)
        self._world, self._process = world, process

    def drain(self) -> None:
        self._process.signalled = False

    def wake(self) -> None:
        self._process.signalled = True
        self._world.wake(self._process)


class Thread:
    """``threading.Thread`` as a task of the process that makes it."""

    world: World

    def __init__(self, target: Callable[[], None], name: str, daemon: bool) -> None:
        self._target = target

    def start(self) -> None:
        task = self.world.current
        assert task is not None
        self._task = self.world.spawn(task.process, self._target)

    def join(self) -> None:
        self.world.wait(None, lambda: self._task.greenlet.dead)


class Event:
    """``threading.Event`` between tasks of one process."""

    world: World

    def __init__(self) -> None:
        self._set = False

    def set(self) -> None:
        self._set = True
        task = self.world.current
        if task is not None:
            self.world.wake(task.process)

    def wait(self, timeout_s: float) -> bool:
        self.world.wait(timeout_s, lambda: self._set)
        return self._set


class Queue:
    """``queue.Queue`` between tasks of one process."""

    world: World

    def __init__(self, maxsize: int) -> None:
        self._limit = maxsize
        self._items: list[Any] = []
        self.unfinished_tasks = 0

    def put(self, item: Any) -> None:
        self._wait(lambda: len(self._items) < self._limit)
        self._items.append(item)
        self.unfinished_tasks += 1
        self._wake()

    def get(self) -> Any:
        self._wait(lambda: bool(self._items))
        item = self._items.pop(0)
        self._wake()
        return item

    def task_done(self) -> None:
        self.unfinished_tasks -= 1
        self._wake()

    def join(self) -> None:
        self._wait(lambda: not self.unfinished_tasks)

    def _wait(self, ready: Callable[[], bool]) -> None:
        while not ready():
            self.world.wait(None, ready)

    def _wake(self) -> None:
        task = self.world.current
        if task is not None:
            self.world.wake(task.process)


class Site:
    """The cluster of one schedule: starts the workers, lets things go wrong, and looks.

    The folder ``root`` of the run is removed afterwards.
    """

    def __init__(self, schedule: Schedule, root: Path) -> None:
        self.schedule, self.root = schedule, root
        self.world = World(schedule.seed + 1)
        self.network = Network(self.world)
        self.disk = Disk(self.world, root, schedule.late_s)
        self.specs = schedule.specs
        self.names = [spec.module for spec in self.specs]
        self.run_dir = RunDir(root)
        self.workers: dict[str, Worker] = {}
        self.attempts: Counter[str] = Counter()
        self.steps: dict[str, ModuleStep] = {}
        self.sent: dict[int, float] = {}
        self.supervision = Supervision(
            self.world, self.run_dir, self.specs, self._start, schedule.spare
        )
        self.unlaunched: set[str] = set()
        self.present: dict[str, int] = {}  # replicas of elastic modules in the newest start of all
        self.at: dict[str, str] = {}  # the host that each worker was started on last
        self.hopeless = self.supervision.hosts.hopeless
        self.returns_s: dict[str, tuple[str, float]] = {}
        self.differs_since_s: float | None = None
        self.troubles: list[str] = []
        self.largest_queue = 0
        self.largest_window = 0

    def run(self) -> None:
        """Let the schedule happen; raises ``Violated`` if something that must hold does not."""
        schedule, world = self.schedule, self.world
        with self._installed():
            self.run_dir.create()
            RunRecord(
                run="simulated", chain="c", modules=tuple(self.names), backend="process", epochs=1,
                created=0.0, chain_file=Path("c.yaml"),
            ).write(self.run_dir.record)  # fmt: skip
            for spec in self.specs:
                write_atomic(self.run_dir.spec(spec.module), spec.to_json())
                for address in self._addresses(spec):
                    self.network.line(address).latency_s = schedule.latency_s
            self.supervision.begin()
            self._measure()
            for at_s, kind, index, lasts_s in schedule.faults:
                world.at(at_s, lambda k=kind, i=index, s=lasts_s: self._fault(k, i, s))  # type: ignore[misc]
            for at_s, index, count in schedule.scales:
                world.at(at_s, lambda it={NAMES[index]: count}: ask_for(self.run_dir, it))  # type: ignore[misc]
            batches = schedule.epochs * BATCHES * schedule.modules
            work_s = 3 * batches * (schedule.step_s + 4 * schedule.latency_s)
            ends_s = max((at_s + lasts_s for at_s, _, _, lasts_s in schedule.faults), default=0.0)
            over = world.run(self._over, ends_s + work_s + PATIENCE_S)
            if self.troubles:
                raise Violated("; ".join(self.troubles))
            if not over:
                said = "; ".join(self._stalls()) or "nothing"
                where = f"not over after {world.now_s:.0f} s: {self._where()}"
                raise Violated(f"{where}; the watchdog has said {said}")
        self._check()

    def _check(self) -> None:
        """What must hold at the end."""
        schedule = self.schedule
        every = schedule.epochs * BATCHES
        for reason in self._stalls():
            if not schedule.loses:  # it is tried to start it, for minutes
                raise Violated(f"stalled: {reason}")
        counted, samples = Counter[str](), Counter[str]()
        trained = set[tuple[str, int]]()
        for name in self.names:
            counts, module = Counts.read(self.run_dir.ledger(name)), module_of(name)
            if counts is not None and self._is_present(name):
                counted[module] += counts.step
                samples[module] += counts.samples
            if name not in self.steps:
                if self.specs[0].elastic:  # markers have taken the ids of its few batches
                    continue
                if schedule.on_loss == "wait" or not schedule.replicas:
                    raise Violated(f"{name} has never trained")
                continue  # all of its few batches were left out
            seen = Counter(self.steps[name].trained)  # type: ignore[attr-defined]
            twice = {id: count for id, count in seen.items() if count > 1}
            if twice:
                raise Violated(f"{name} was trained twice on {twice}")
            if both := trained & {(module, id) for id in seen}:
                raise Violated(f"two replicas were trained on {both}")
            trained |= {(module, id) for id in seen}
            if self.specs[0].exact and len(seen) != every * self._parts():
                raise Violated(f"{name} holds {len(seen)} updates of {every}")
        for module, steps in counted.items():
            if steps > every or (schedule.on_loss == "wait" and steps != every):
                raise Violated(f"{module} has counted {steps} of {every} batches")
            if samples[module] != SAMPLES * steps:
                raise Violated(f"{module} has counted {samples[module]} samples in {steps} batches")
        if schedule.replicas and schedule.on_loss == "wait":
            sent = sorted(self.sent[id] for module, id in trained if module == NAMES[0])
            epochs = range(1, schedule.epochs + 1)
            if sent != sorted(float(x.sum()) for e in epochs for x, _ in Data().train_batches(e)):
                raise Violated("not every batch was sent once")
        for module in {module_of(name) for name in self.names}:
            alike = [
                step
                for name, step in self.steps.items()
                if module_of(name) == module and self._is_present(name)
            ]
            weights = [parameters_to_vector(one.layers.parameters()) for one in alike]
            if any(not torch.equal(one, weights[0]) for one in weights):
                raise Violated(f"the replicas of {module} have not agreed")
        self._check_evaluations()
        cuts = complete_cuts(self.run_dir, self.names)
        if not cuts:
            raise Violated("there is no complete checkpoint")
        if not is_over(self.run_dir, self.names):
            raise Violated("the last checkpoint is not complete")
        for name in parts_of(self.run_dir, cuts[-1], self.names):
            checkpoint.read(self.run_dir.checkpoint(cuts[-1], name))
        if schedule.interface.startswith(("exact", "{exact")):
            self._check_exact()
        marks = sum(2 * (schedule.epochs + 2) for _ in self.names)
        limit = schedule.window * (1 + ADJACENT_FAILURES) + marks
        if self.largest_window > limit:
            raise Violated(f"a window holds {self.largest_window} messages of {limit}")

    def _check_evaluations(self) -> None:
        """Each epoch's evaluation is reported, of all samples, by one of the tail's replicas."""
        first, *others = tails_of(self.names)
        lines = list(read_metrics(self.run_dir.metrics(first), EvaluationLine))
        for name in others:
            if any(True for _ in read_metrics(self.run_dir.metrics(name), EvaluationLine)):
                raise Violated(f"{name} has reported an evaluation")
        if self.schedule.on_loss != "wait":
            return
        if any(line.samples != 4 * self.schedule.evaluated for line in lines):
            raise Violated(f"evaluations of {[line.samples for line in lines]} samples")
        epochs = {line.epoch for line in lines}
        # a disk that is full, and a worker that is killed, lose lines
        if not self.schedule.faults and epochs != {*range(1, self.schedule.epochs + 1)}:
            raise Violated(f"evaluations of epochs {epochs}")

    def _is_present(self, name: str) -> bool:
        """Whether a worker took part in the newest start of all."""
        number = number_of(name)
        return number <= self.present.get(module_of(name), number)

    def _parts(self) -> int:
        return 2 if "micro_batches" in self.schedule.interface else 1

    def _check_exact(self) -> None:
        chosen = self.schedule
        reference = _reference(chosen.modules, chosen.interface, chosen.epochs, chosen.sources)
        for name, wanted in reference.items():
            for key, value in self.steps[name].layers.state_dict().items():
                if not torch.equal(value, wanted[key]):
                    raise Violated(f"{name}.{key} is not backpropagation's: {value}, {wanted[key]}")

    def _over(self) -> bool:
        if self.supervision.problem is not None:
            self.troubles.append(self.supervision.problem)
        return bool(self.troubles) or self.supervision.phase == "finished"

    def _stalls(self) -> list[str]:
        events = read_lines(self.run_dir.events)
        return [event["reason"] for event in events if event["event"] == "run_stalled"]

    def _where(self) -> str:
        found = []
        for name in self.names:
            report = peek_json(self.run_dir.worker(name))
            counts = Counts.read(self.run_dir.ledger(name))
            id = counts.id if counts else None
            state = report.get("state")
            found.append(f"{name} {state}, attempt {self.attempts[name]}, at {id}")
        return "; ".join(found)

    def _addresses(self, spec: WorkerSpec) -> list[str]:
        """Where a module listens, for each of its inputs."""
        links = [*spec.links_in, *(one for one in spec.peers if one.target == spec.module)]
        sockets = [spec.module, *(f"{spec.module}.{link.number}" for link in links[1:])]
        sockets = sockets if links else []
        return [f"ipc://{self.root}/{socket}.sock" for socket in sockets]

    def _start(self, worker: WorkerPlan) -> Worker:
        name, attempt = worker.module, worker.attempt
        self.attempts[name] = attempt
        assert worker.node is not None
        self.present, self.at[name] = worker.replicas, worker.node
        if not self._is_present(name):
            self.troubles.append(f"{name} is started, but there are {self.present}")
        process = Process(name)
        stop = Stop(self.world, process)
        started = self.workers[name] = stop.worker
        if worker.resume.isdecimal() and attempt == worker.first:
            for one in self.names:
                if one == name or not self._is_present(one):
                    self._begin_at(one, int(worker.resume))
        start = WorkerStart(
            run=str(self.root),
            module=name,
            ipc=str(self.root),
            attempt=attempt,
            first=worker.first,
            resume=worker.resume,
            replicas=worker.replicas,
        )

        def body() -> None:
            try:
                main.serve(start, stop, began=time.time())
                code = 0
            except Killed:
                raise
            except DniError as error:
                code = error.exit_code
            except OSError:
                code = DniError.exit_code
            except Exception as error:
                code = DniError.exit_code
                self.troubles.append(f"{name}: {type(error).__name__}: {error}")
            started.end(code)

        def fail() -> None:
            """End, but not before the first report: then others would fail alike."""
            Report(attempt=attempt, state="starting").write(self.run_dir.worker(name))
            started.end(DniError.exit_code)

        if self._is_dead(worker.node):
            self.world.at(0.5, fail)
            return started
        if name in self.unlaunched:  # as srun does when its step cannot be launched
            self.unlaunched.discard(name)
            self.world.at(1.0, lambda: started.end(0))
            return started
        self.world.at(
            self.world.random.uniform(0, 2.0),
            lambda: self.world.spawn(process, body) and None if process.alive else None,
        )
        return started

    def _begin_at(self, name: str, cut: int) -> None:
        """Forget what a worker has learnt after a cut, because its module resumes there."""
        if (step := self.steps.get(name)) is not None:
            step.trained = [id for id in step.trained if id <= cut]  # type: ignore[attr-defined]
        if not cut:  # it may never be trained again
            self.steps.pop(name, None)

    def _return(self, host: str, module: str) -> None:
        """Let a lost host come back: its module is to have all of its replicas."""
        self.hopeless.discard(host)
        every = sum(module_of(one) == module for one in self.names)
        ask_for(self.run_dir, {module: every})

    def _measure(self) -> None:
        for connection in self.network.connections:
            self.largest_queue = max(self.largest_queue, len(connection.down), len(connection.up))
        self._compare_numbers()
        self.world.at(2.0, self._measure)

    def _compare_numbers(self) -> None:
        """Note trouble if all run for a while, but not as many as are wanted and have room."""
        states = self.supervision.states
        wanted = wanted_replicas(self.run_dir, self.specs[0].elastic)
        more = {one for one, count in wanted.items() if self.present.get(one, count) < count}
        less = {one for one, count in wanted.items() if self.present.get(one, count) > count}
        right = not less and not (more and self.supervision.hosts.free(self._placed()))
        if states - {"running", "inactive"} or not states or right:
            self.differs_since_s = None
        elif self.differs_since_s is None:
            self.differs_since_s = self.world.now_s
        elif self.world.now_s - self.differs_since_s > NOTICED_S:
            self.troubles.append(f"{wanted} are wanted, but there are {self.present}")

    def _is_lost(self, name: str) -> bool:
        """Whether a worker cannot be restarted: its host is lost, or its disk full as it began."""
        if name not in self.at or not self._is_present(name):
            return False
        full_until_s = self.workers[name].process.full_until_s
        return self._is_dead(self.at[name]) or self.world.now_s < full_until_s + NOTICED_S

    def _is_dead(self, host: str) -> bool:
        return host in self.hopeless or host in self.supervision.hosts.gone

    def _placed(self) -> list[str]:
        """Return the hosts of the workers that take part."""
        return [host for name, host in self.at.items() if self._is_present(name)]

    def _fault(self, kind: str, index: int, lasts_s: float) -> None:
        name = self.names[index]
        addresses = next(filter(None, map(self._addresses, self.specs[index:])))
        worker, now_s = self.workers.get(name), self.world.now_s
        line = addresses[int(1000 * lasts_s) % len(addresses)]
        if kind == "cut":
            self.network.cut(line, half_open=False)
        elif kind == "half-open":
            self.network.cut(line, half_open=True, away_s=lasts_s)
        elif kind == "away":
            self.network.cut(line, half_open=False, away_s=lasts_s)
        elif kind == "drop":
            self.network.muted.add(f"{line} down")
        elif kind == "stop":
            self.supervision.stop()
        elif kind == "orphan":
            self.supervision.kill()
        elif worker is None:
            pass
        elif kind == "hopeless":
            host = self.at[name]
            self.hopeless.add(host)
            if lasts_s:
                self.returns_s[host] = module_of(name), lasts_s
            worker.end(-signal.SIGKILL)
        elif kind == "gone":
            self.supervision.hosts.lose(self.at[name], lasts_s)
            for one in [one for one, host in self.at.items() if host == self.at[name]]:
                self.workers[one].end(-signal.SIGKILL)
        elif kind == "stall":
            worker.process.thaws_s = now_s + lasts_s
        elif kind == "slow":
            worker.process.slow_until_s = now_s + lasts_s
        elif kind == "full":
            for one in (worker.process, self.supervision.process):
                one.full_until_s = now_s + lasts_s
        elif kind == "unnoticed":
            worker.vanish()
        elif kind in ("kill", "unlaunched"):
            if kind == "unlaunched":
                self.unlaunched.add(name)
            worker.end(-signal.SIGKILL)

    @contextlib.contextmanager
    def _installed(self) -> Iterator[None]:
        """Give the product this world's time, threads, chance, sockets and files."""
        world, network = self.world, self.network
        Poller.world = Thread.world = Event.world = Queue.world = world
        random = world.random

        def context() -> Any:
            assert world.current is not None
            return Context(network, world.current.process)

        def forward(step: ModuleStep, id: int, x: Any, part: Any = None) -> Any:
            world.wait(random.expovariate(1 / self.schedule.step_s))
            step.trained = [*getattr(step, "trained", ()), id]  # type: ignore[attr-defined]
            self.steps[step.spec.module] = step
            if step.spec.head is not None:
                self.sent[id] = float(x[0].sum())
            return real_forward(step, id, x, part)

        def copy_state(step: ModuleStep) -> Any:
            tensors, document = real_copy_state(step)
            return tensors, document | {"trained": getattr(step, "trained", [])}

        def restore(step: ModuleStep, tensors: Any, document: Any) -> None:
            real_restore(step, tensors, document)
            step.trained = document["trained"]  # type: ignore[attr-defined]
            self.steps[step.spec.module] = step

        def as_own(spec: WorkerSpec, tensors: Any, document: Any) -> Any:
            tensors, document = real_as_own(spec, tensors, document)
            self._begin_at(spec.module, document["cut"])
            before = getattr(self.steps.get(spec.module), "trained", [])
            return tensors, document | {"trained": before}

        def shrink(one: Any, counts: Any, reason: str) -> None:
            before, lost = one._pool.replicas, [*filter(self._is_lost, self.names)]
            if sum(before.values()) - sum(counts.values()) > len(lost):
                self.troubles.append(f"{before} became {counts}, but only {lost} are lost")
            real_shrink(one, counts, reason)
            for host, (module, after_s) in list(self.returns_s.items()):
                if counts[module] < before[module]:
                    del self.returns_s[host]
                    world.at(after_s, lambda h=host, m=module: self._return(h, m))

        def add(window: Any, *args: Any, **kwargs: Any) -> None:
            real_add(window, *args, **kwargs)
            self.largest_window = max(self.largest_window, len(window._kept))

        window_class = sender.SendWindow
        real_forward, real_copy_state = ModuleStep.forward, saver.copy_state
        real_restore, real_add = checkpoint.restore, window_class.add
        real_as_own, real_shrink = resume._as_own, Supervisor._shrink
        stand_ins: list[tuple[Any, str, Any]] = [
            (time, "monotonic", lambda: 1000.0 + world.now_s),
            (time, "time", lambda: 1.7e9 + world.now_s),
            (time, "sleep", lambda s: world.wait(s)),
            (secrets, "token_hex", lambda n=8: f"{random.getrandbits(8 * n):0{2 * n}x}"),
            (threading, "Thread", Thread),
            (threading, "Event", Event),
            (queue, "Queue", Queue),
            (zmq, "Poller", Poller),
            (sockets, "open_context", context),
            (ModuleStep, "forward", forward),
            (saver, "copy_state", copy_state),
            (checkpoint, "restore", restore),
            (resume, "_as_own", as_own),
            (Supervisor, "_shrink", shrink),
            (window_class, "add", add),
            (
                main,
                "open_data",
                lambda *args, half=None, **kwargs: Data(half, self.schedule.evaluated),
            ),
            (metrics, "INTERVAL_S", 10.0),  # else a schedule writes most of its time
            (report, "REPORT_S", 10.0),
            (signals, "LOOK_S", 2.0),
            (signals, "HEAD_LOOK_S", 2.0),
            (receiver, "JUMP_LIMIT", 2),  # of ids that are left out, a few are many here
            (supervisor, "TICK_S", 1.0),
            (supervisor, "STOP_TICK_S", 1.0),
            (pool, "TICK_S", 1.0),
            (supervisor, "catching_signals", lambda note: contextlib.nullcontext()),
        ]
        before = [(owner, name, getattr(owner, name)) for owner, name, _ in stand_ins]
        level = logging.root.manager.disable
        logging.disable(logging.CRITICAL)
        try:
            for owner, name, stand_in in stand_ins:
                setattr(owner, name, stand_in)
            with self.disk.installed():
                yield
        finally:
            for process in (
                self.supervision.process, *(one.process for one in self.workers.values())
            ):  # fmt: skip
                world.kill(process)
            world.run(lambda: False, world.now_s)
            for owner, name, real in before:
                setattr(owner, name, real)
            logging.disable(level)


@cache
def _reference(
    modules: int, interface: str, epochs: int, sources: Sources | None
) -> dict[str, dict[str, Any]]:
    """Weights of backpropagation in one process."""
    window = LinksSpec.model_fields["window"].default
    local = LocalChain(_specs(modules, interface, window, "wait", epochs, 0, sources))
    for epoch in range(1, epochs + 1):
        for x, y in Data().train_batches(epoch):
            local.train_batch(x, y)
    return {step.spec.module: step.layers.state_dict() for step in local.steps}


def simulate(schedule: Schedule, folder: Path) -> Site:
    """Run a schedule in a folder of its own; raises ``Violated``."""
    root = folder / f"{os.getpid()}-{schedule.seed}"
    root.mkdir(parents=True)
    site = Site(schedule, root)
    try:
        site.run()
    finally:
        shutil.rmtree(root, ignore_errors=True)
    return site

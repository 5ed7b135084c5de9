"""Replicas that form a process group of torch.distributed: processes, beside one process."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dni_runtime.core.replication import Sync
from dni_runtime.core.step import ModuleStep
from dni_runtime.errors import WorkerError
from dni_runtime.run.rundir import RunDir
from dni_runtime.spec import LinksSpec
from dni_runtime.worker.group import Group
from tests.conftest import DEVICES
from tests.replicas import learn, replicas, share, shared

REPLICAS, POINTS = 3, 12
STRATEGIES = (
    "local-sgd", "all-reduce", "diloco", "admm",
    "{federated: {share: 0.7}}", "{dynamic: {threshold: 0.05}}",
)  # fmt: skip
HOOKS = ("bfloat16", "{powersgd: {rank: 1}}")

BACKENDS = {"cpu": "gloo", "cuda": "nccl"}

Weights = list[list[Tensor]]
"""Of each replica, the layers' weights after each point."""
Found = dict[str, tuple[Weights, list[int]]]


def training(given: str, device: str) -> tuple[list[ModuleStep], Callable[[int, int], None]]:
    """Replicas, and how one learns in the batches before a point: some get more than others."""
    steps = [ModuleStep(spec, device) for spec in replicas(given, REPLICAS)]
    truth = torch.randn(8, 6, generator=torch.Generator().manual_seed(1))

    def learns(place: int, point: int) -> None:
        for batch in range((place + point) % 3):
            draw = torch.Generator().manual_seed(100 * point + 10 * place + batch)
            x = torch.randn(8, 8, generator=draw)
            learn(steps[place], 10 * point + batch, x.to(device), (x @ truth).to(device))

    return steps, learns


def weights(step: ModuleStep) -> Tensor:
    return torch.cat([p.detach().flatten() for p in step.layers.parameters()]).cpu()


def together(given: str, device: str) -> Weights:
    """In one process, over messages."""
    steps, learns = training(given, device)
    found: Weights = [[] for _ in steps]
    for point in range(1, POINTS + 1):
        for place in range(REPLICAS):
            learns(place, point)
        share(steps, 10 * point, full=point % 4 == 0)
        for own, step in zip(found, steps, strict=True):
            own.append(weights(step))
    return found


def group_of(step: ModuleStep, folder: Path) -> Group:
    run, links = RunDir(folder), LinksSpec()
    return Group(shared(step), step.spec, run, begun=1, device=step.device, links=links)


def one_of_them(
    place: int, folder: Path, ways: list[str], device: str
) -> list[tuple[list[Any], int]]:
    """In a process of its own, as a worker does it, one way to share after the other.

    They share one process group: gloo may abort if one is destroyed.
    """
    os.environ["NCCL_HOSTID"] = str(place)  # else NCCL refuses replicas that share a GPU
    found = []
    for number, given in enumerate(ways):
        steps, learns = training(f"{given}, backend: {BACKENDS[device]}", device)
        step, own = steps[place], []
        group = group_of(step, folder)
        if number == 0:
            group.form()
        for point in range(1, POINTS + 1):
            learns(place, point)
            offer = shared(step).offer(Sync(10 * point, point % 4 == 0))
            shared(step).settle(group.mean(offer))
            own.append(weights(step).numpy())
        found.append((own, group.sent))
    group.part(10)
    return found


def is_lost(place: int, folder: Path) -> str:
    """One ends before the second point: what the others are told."""
    step = ModuleStep(replicas("all-reduce, backend: gloo", REPLICAS)[place])
    group = group_of(step, folder)
    group.form()
    for id in (1, 2):
        if id == 2 and place == REPLICAS - 1:
            os._exit(1)
        learn(step, id, torch.ones(2, 8), torch.ones(2, 6))
        try:
            group.mean(shared(step).offer(Sync(id, False)))
        except WorkerError as error:
            return str(error)
    return "not broken"


def answer(to: Connection, work: Callable[..., Any], *given: Any) -> None:
    torch.set_num_threads(1)
    to.send(work(*given))


def in_processes(work: Callable[..., Any], *given: Any) -> list[Any]:
    """What each replica returns, in a process of its own; None if it ends without."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])  # torch is imported once
    answers, started = [], []
    for place in range(REPLICAS):
        here, there = context.Pipe(duplex=False)
        started.append(context.Process(target=answer, args=(there, work, place, *given)))
        started[-1].start()
        there.close()
        answers.append(here)
    try:
        found = []
        for here in answers:
            assert here.poll(90)
            try:
                found.append(here.recv())
            except EOFError:
                found.append(None)
        return found
    finally:
        for process in started:
            process.kill()
            process.join()


@pytest.fixture(scope="module", params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    """Where rows lie: with gloo on the CPU, with NCCL on a GPU."""
    return str(request.param)


@pytest.fixture(scope="module")
def found(device: str, tmp_path_factory: pytest.TempPathFactory) -> Found:
    """The weights and the bytes that were sent, of each way to share."""
    ways = [*STRATEGIES, *(f"all-reduce, compression: {one}" for one in HOOKS)]
    results = in_processes(one_of_them, tmp_path_factory.mktemp("run"), ways, device)
    return {
        way: (
            [[torch.from_numpy(one) for one in own[number][0]] for own in results],
            [own[number][1] for own in results],
        )
        for number, way in enumerate(ways)
    }


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_group_learns_as_replicas_do_over_links(strategy: str, device: str, found: Found) -> None:
    wanted = together(strategy, device)
    for place, (own, theirs) in enumerate(zip(found[strategy][0], wanted, strict=True)):
        assert not torch.equal(own[0], own[-1])
        for point, (one, other) in enumerate(zip(own, theirs, strict=True), 1):
            assert torch.allclose(one, other, atol=1e-6), (place, point)


@pytest.mark.parametrize(
    ("hook", "share_sent", "apart"), [(HOOKS[0], 0.6, 0.01), (HOOKS[1], 0.8, 0.5)]
)
def test_hooks_compress_gradients(hook: str, share_sent: float, apart: float, found: Found) -> None:
    """Fewer bytes; all have the same weights in every bit, and not far from those without."""
    (first, *others), sent = found[f"all-reduce, compression: {hook}"]
    (plain, *_), sent_plain = found["all-reduce"]
    assert all(one < share_sent * whole for one, whole in zip(sent, sent_plain, strict=True))
    for own in others:
        assert all(map(torch.equal, own, first))
    assert 0 < (first[-1] - plain[-1]).norm() < apart * (plain[-1] - plain[0]).norm()


def test_a_group_that_has_lost_a_replica_is_broken(tmp_path: Path) -> None:
    """All others are told so at once."""
    *told, lost = in_processes(is_lost, tmp_path)
    assert lost is None
    for said in told:
        assert said.startswith("the process group of 'b' is broken: "), said
        assert "another replica has ended" in said

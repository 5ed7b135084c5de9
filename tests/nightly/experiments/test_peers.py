"""The peers' numerics: several processes beside a simulation in one."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from peers.build import build_parts, cross_entropy
from peers.contenders import in_flight
from torch import Tensor, nn
from torch.func import functional_call

from tests.nightly.experiments.peer_steps import BATCH, LEARNING_RATE, NETWORKS, batches, sgd

STEPS = 6
# by network and number of processes
BACKPROP = {
    ("lm", 2): ["ddp", "gpipe-1", "1f1b-4", "interleaved-2", "zbv-2", "local-sgd-1"],
    ("lm", 4): ["ddp", "gpipe-4", "1f1b-4"],
    ("batch-norm", 2): ["gpipe-1"],
}
OTHERS = {
    ("lm", 2): ["local-sgd-3", "diloco-3", "2bw-2", "2bw-4", "async-1f1b", "async-1f1b-4"],
    ("lm", 4): ["2bw-4", "async-1f1b", "async-1f1b-6"],
    ("batch-norm", 2): ["async-1f1b"],
}
CASES = [(name, *where) for where in BACKPROP for name in BACKPROP[where] + OTHERS[where]]

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def predictions(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str, int], Tensor]:
    """What each contender's network predicts after some steps."""
    folder = tmp_path_factory.mktemp("peers")
    job = {"cases": CASES, "folder": str(folder), "steps": STEPS}
    program = Path(__file__).with_name("peer_steps.py")
    started = [
        subprocess.Popen(
            [sys.executable, str(program), json.dumps({**job, "rank": rank})],
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"},
        )
        for rank in range(max(count for _, _, count in CASES))
    ]
    try:
        errors = [process.communicate(timeout=240)[1] for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()
    assert [process.returncode for process in started] == [0] * len(started), "\n".join(errors)
    return {case: torch.load(folder / f"{'-'.join(map(str, case))}.pt") for case in CASES}


def predict(parts: Sequence[nn.Module]) -> Tensor:
    h_BX = batches(1)[0][0]
    with torch.no_grad():
        for part in parts:
            h_BX = part.eval()(h_BX)
    return h_BX


def backprop(network: str) -> Tensor:
    (model,) = build_parts(NETWORKS[network], 1, [0], seed=1).values()
    optimizer = sgd(model)
    for x_BT, y_BT in batches(STEPS):
        optimizer.zero_grad()
        cross_entropy(model(x_BT), y_BT).backward()
        optimizer.step()
    return predict([model])


def with_late_weights(network: str, stages: int, lag: Callable[[int], int]) -> Tensor:
    """Each stage's gradient is taken at its own weights, so many updates old."""
    parts = list(build_parts(NETWORKS[network], stages, range(stages), seed=1).values())
    history = [[dict(part.named_parameters())] for part in parts]
    for number, (x_BT, y_BT) in enumerate(batches(STEPS)):
        used = [history[s][max(0, number - lag(s))] for s in range(stages)]
        h_BX = x_BT
        for part, weights in zip(parts, used, strict=True):
            h_BX = functional_call(part, weights, (h_BX,))
        loss = cross_entropy(h_BX, y_BT)
        for s, weights in enumerate(used):
            gradients = torch.autograd.grad(loss, list(weights.values()), retain_graph=True)
            newest = history[s][-1]
            pairs = zip(newest.items(), gradients, strict=True)
            stepped = {name: w.detach() - LEARNING_RATE * g for (name, w), g in pairs}
            history[s].append({name: w.requires_grad_() for name, w in stepped.items()})
    for part, versions in zip(parts, history, strict=True):
        part.load_state_dict(versions[-1], strict=False)
    return predict(parts)


def with_replicas(network: str, every: int, *, diloco: bool) -> Tensor:
    """Two replicas in one process; DiLoCo's outer step as its algorithm 1 has it."""
    (model,) = build_parts(NETWORKS[network], 1, [0], seed=1).values()
    replicas = [model, copy.deepcopy(model)]
    optimizers = [
        torch.optim.AdamW(one.parameters(), lr=1e-3) if diloco else sgd(one) for one in replicas
    ]
    outer = [p.detach().clone() for p in model.parameters()]
    momentum = [torch.zeros_like(p) for p in outer]
    for number, (x_BT, y_BT) in enumerate(batches(STEPS), 1):
        for k, (one, optimizer) in enumerate(zip(replicas, optimizers, strict=True)):
            half = slice(k * BATCH // 2, (k + 1) * BATCH // 2)
            optimizer.zero_grad()
            cross_entropy(one(x_BT[half]), y_BT[half]).backward()
            optimizer.step()
        if number % every:
            continue
        with torch.no_grad():
            for i, pair in enumerate(zip(*(one.parameters() for one in replicas), strict=True)):
                mean = (pair[0] + pair[1]) / 2
                if diloco:
                    change = outer[i] - mean
                    momentum[i] = 0.9 * momentum[i] + change
                    mean = outer[i] = outer[i] - 0.7 * (change + 0.9 * momentum[i])
                for p in pair:
                    p.copy_(mean)
    return predict(replicas[:1])


def expected(name: str, network: str, count: int) -> Tensor:
    kind, _, number = name.rpartition("-")
    if name in BACKPROP[network, count]:
        return backprop(network)
    if kind in ("local-sgd", "diloco"):
        return with_replicas(network, int(number), diloco=kind == "diloco")
    if kind == "2bw":
        return with_late_weights(network, count, lambda stage: 1)
    return with_late_weights(network, count, lambda stage: in_flight(name, stage, count) - 1)


@pytest.mark.parametrize(("name", "network", "count"), CASES)
def test_what_a_peer_computes(
    name: str, network: str, count: int, predictions: dict[tuple[str, str, int], Tensor]
) -> None:
    found, wanted = predictions[name, network, count], expected(name, network, count)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    same = torch.allclose(found, backprop(network), rtol=1e-3, atol=1e-3)
    assert same == (name in BACKPROP[network, count]), "these compute what backpropagation does"

"""The baseline of comparisons against plain torch: it trains and evaluates what the chain does."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from dni_runtime.core.chain import Backprop, LocalChain
from dni_runtime.data import open_data
from dni_runtime.measure.reference import train_reference
from dni_runtime.plan.create import create_run
from dni_runtime.plan.prepare import prepare
from dni_runtime.run.record import Record
from dni_runtime.spec import WorkerSpec
from tests.specs import specs_of
from tests.unit.core.conftest import CHAIN, INFO
from tests.unit.core.test_numerics import batches

RATE = 0.5


class Lora(nn.Module):
    """A linear layer that its class keeps as it is, and an update of low rank."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width).requires_grad_(False)
        self.down, self.up = nn.Linear(width, 2, bias=False), nn.Linear(2, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(x) + self.up(self.down(x))
        return y


def specs(settings: str = "accumulate: 1") -> tuple[WorkerSpec, ...]:
    text = CHAIN % (f"exact, {settings}", f"{{SGD: {{lr: {RATE}}}}}")
    lora = f"layers: [{{import: '{__name__}:Lora', args: {{width: 8}}}}, "
    text = text.replace("layers: [{Linear: {in_features: 8", lora + "{Linear: {in_features: 8")
    return specs_of(text + "on_nan: skip\n", INFO)


def test_replicas_are_none_of_its_settings() -> None:
    """It trains on all batches: by the chain's own rates, and a schedule of that length."""
    text = """\
name: net
data: {batch_size: 4}
defaults: {interface: mixed, optimizer: {SGD: {lr: 0.1}}, schedule_every: batch,
           schedule: {CosineAnnealingLR: {T_max: auto}}}
replication: {strategy: all-reduce, scale_lr: linear}
modules:
- {name: a, replicas: 4, layers: [{Linear: {in_features: 12, out_features: 8}}]}
- {name: b, layers: [{Linear: {in_features: 8, out_features: 4}}]}
"""
    info = INFO.model_copy(update={"train_samples": 160})
    backprop, model = Backprop(specs_of(text, info)), nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=40)
    for x, y in batches(40):
        backprop.train_batch(x, y)
        optimizer.step()
        schedule.step()
        for step in backprop.steps:
            (group,) = step.optimization.optimizers["module"].param_groups
            assert group["lr"] == pytest.approx(optimizer.param_groups[0]["lr"], abs=1e-9)


def train(
    network: nn.Module,
    data: Iterable[tuple[Tensor, Tensor]],
    *,
    each: Callable[[], None] = lambda: None,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Train by hand: SGD of all that the classes have not frozen."""
    for x, y in data:
        with torch.autocast("cpu", dtype=dtype, enabled=dtype is not torch.float32):
            p = network(x)
        cross_entropy(p.float(), y).backward()
        with torch.no_grad():
            for one in network.parameters():
                if one.requires_grad:
                    one -= RATE * one.grad
                    one.grad = None
        each()


def layers(trained: Backprop | LocalChain) -> list[nn.Module]:
    return (
        list(trained.model)
        if isinstance(trained, Backprop)
        else [one.layers for one in trained.steps]
    )


def state(trained: Backprop | LocalChain) -> list[Tensor]:
    return [tensor for one in layers(trained) for tensor in one.state_dict().values()]


def plain(trained: Backprop | LocalChain) -> nn.Sequential:
    """The network as plain torch, with what its classes freeze."""
    network = nn.Sequential(*(copy.deepcopy(one) for one in layers(trained)))
    for name, p in network.named_parameters():
        p.requires_grad_(".inner." not in name)
    return network


def difference(ours: Iterable[Tensor], theirs: Iterable[Tensor]) -> float:
    pairs = list(zip(ours, theirs, strict=True))
    return max(float((a.detach() - b.detach()).abs().max()) for a, b in pairs)


@pytest.mark.parametrize("kind", [Backprop, LocalChain])
def test_what_a_class_has_frozen_stays_as_it_is(kind: type[Backprop] | type[LocalChain]) -> None:
    trained = kind(specs())
    network = plain(trained)
    start = copy.deepcopy(network.state_dict())
    data = batches(8)
    train(network, data)
    for x, y in data:
        trained.train_batch(x, y)
    assert difference(state(trained), network.state_dict().values()) < 1e-5
    assert difference(network.state_dict().values(), start.values()) > 0.1


@pytest.mark.parametrize("kind", [Backprop, LocalChain])
def test_the_average_is_evaluated(kind: type[Backprop] | type[LocalChain]) -> None:
    trained = kind(specs("ema: 0.8"))
    network, averages = plain(trained), dict[str, Tensor]()

    def follow() -> None:
        for name, p in network.named_parameters():
            now = p.detach().clone()
            averages[name] = 0.8 * averages[name] + 0.2 * now if name in averages else now

    data = batches(8)
    train(network, data, each=follow)
    for x, y in data:
        trained.train_batch(x, y)
    x = data[0][0]
    raw = network.eval()(x)
    network.load_state_dict(averages, strict=False)
    expected = network(x)
    assert difference([trained.predict(x)], [expected]) < 1e-4
    assert difference([raw], [expected]) > 0.1


@pytest.mark.parametrize("kind", [Backprop, LocalChain])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_it_computes_in_the_modules_precision(
    kind: type[Backprop] | type[LocalChain], dtype: torch.dtype
) -> None:
    trained = kind(specs(f"precision: {str(dtype).removeprefix('torch.')}"))
    network, data = plain(trained), batches(4)
    full = copy.deepcopy(network)
    train(full, data)
    train(network, data, dtype=dtype)
    for x, y in data:
        trained.train_batch(x, y)
    x = data[0][0]
    near = difference(state(trained), network.state_dict().values())
    # Gradients are rounded in float16 where they are, and by hand without a loss scale.
    limit = 0.2 * difference(state(trained), full.state_dict().values())
    assert near < (limit if dtype is torch.bfloat16 else 1e-3)
    with torch.autocast("cpu", dtype=dtype):
        expected = network.eval()(x).float()
    assert difference([trained.predict(x)], [expected]) < 2e-3
    assert difference([network(x)], [expected]) > 0


RECURRENT = """\
name: x
data: {dataset: digits, flatten: true, batch_size: 32, validation: 0.2}
steps: 8
metrics: []
defaults: {interface: exact, optimizer: {SGD: {lr: 0.5}}, ema: 0.5}
modules:
  - name: a
    layers:
      - {Unflatten: {dim: 1, unflattened_size: [8, 8]}}
      - {Recurrent: {cell: GRU, input_size: 8, hidden_size: 8}}
  - name: b
    layers: [Flatten, {Linear: {in_features: 64, out_features: 10}}]
"""


def test_a_run_of_it_is_evaluated_as_the_chain_is(tmp_path: Path) -> None:
    """With averages; a state that is carried from batch to batch ends with each evaluation."""
    (tmp_path / "chain.yaml").write_text(RECURRENT)
    prepared = prepare(tmp_path / "chain.yaml")
    record = Record.read(create_run(tmp_path / "run", prepared, backend="backprop").root)
    train_reference(record, 1)
    lines = [json.loads(line) for line in record.run.metrics("backprop").read_text().splitlines()]
    written = {line["kind"]: line["loss"] for line in lines if line["kind"] != "start"}

    source = open_data(prepared.chain.data, tmp_path, seed=0)
    cell, last = (step.layers[1] for step in LocalChain(prepared.workers).steps)
    cell = cell.cell
    carried, averages = None, list[Tensor]()
    parameters: list[Any] = [*cell.parameters(), *last.parameters()]
    for _, (x, y) in zip(range(8), source.train_batches(1), strict=False):
        h, carried = cell(x.unflatten(1, (8, 8)), carried)
        carried = carried.detach()
        cross_entropy(last(h.flatten(1)), y).backward()
        with torch.no_grad():
            for p in parameters:
                p -= RATE * p.grad
                p.grad = None
        now = [p.detach().clone() for p in parameters]
        averages = [(a + b) / 2 for a, b in zip(averages or now, now, strict=True)]
    with torch.no_grad():
        for p, average in zip(parameters, averages, strict=True):
            p.copy_(average)
        for kind, part in (("eval", source.eval_batches()), ("test", source.test_batches())):
            carried, total, count = None, 0.0, 0
            for x, y in part:
                fits = carried if carried is not None and carried.shape[1] == len(x) else None
                h, carried = cell(x.unflatten(1, (8, 8)), fits)
                total += float(cross_entropy(last(h.flatten(1)), y, reduction="sum"))
                count += len(y)
            assert written[kind] == pytest.approx(total / count, rel=1e-5)

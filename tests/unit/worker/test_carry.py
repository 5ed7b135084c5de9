"""A chain's state for the same layers cut elsewhere."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest
import torch

from dni_runtime.core.chain import LocalChain
from dni_runtime.core.step import ModuleStep
from dni_runtime.plan.carrying import Names, carry
from dni_runtime.spec import DataInfo, WorkerSpec
from dni_runtime.worker.checkpoint import State, copy_state, restore
from tests.specs import float32, int64, specs_of

LAYERS = [
    "{Recurrent: {cell: GRU, input_size: 4, hidden_size: 4, synthetic: true}}",
    "Flatten",
    "{Linear: {in_features: 20, out_features: 6}}",
    "{BatchNorm1d: {num_features: 6}}",
    "{Linear: {in_features: 6, out_features: 5}}",
    "{Linear: {in_features: 5, out_features: 3}}",
]
SETTINGS = (
    "optimizer: {SGD: {lr: 0.1, momentum: 0.9}}, ema: 0.9, accumulate: 2, "
    "schedule: {StepLR: {step_size: 3}}, schedule_every: batch"
)
STREAM = {"cut": 8, "epoch": 1, "epochs_ended": 0, "step": 7, "samples": 56, "over": False}
OF_A_CUT = ("interface.", "optimizer.synthesizer.", "optimizer.head.", "random.")


def cut(*ends: int, interface: str = "mixed", settings: str = SETTINGS) -> tuple[WorkerSpec, ...]:
    """Specs of modules that end after so many layers."""
    modules = "".join(
        f"  - {{name: m{end}, layers: [{', '.join(LAYERS[begin:end])}]}}\n"
        for begin, end in zip([0, *ends], [*ends, len(LAYERS)], strict=True)
    )
    text = f"name: x\ndefaults: {{interface: {interface}, {settings}}}\nmodules:\n{modules}"
    info = DataInfo(sample=float32(5, 4), label=int64(), classes=3)
    return specs_of(text, info)


def trained(workers: Sequence[WorkerSpec]) -> list[State]:
    """Parts of a checkpoint after seven batches: in the midst of an accumulated gradient."""
    chain = LocalChain(workers)
    draw = torch.Generator().manual_seed(1)
    for _ in range(7):
        x = torch.randn(8, 5, 4, generator=draw)
        chain.train_batch(x, x[:, 0, :3].argmax(1))
    states = []
    for number, (step, worker) in enumerate(zip(chain.steps, workers, strict=True)):
        torch.manual_seed(number)
        step.spec = worker  # without the delays of a chain in one process
        tensors, document = copy_state(step)
        document |= STREAM | {"counted": {"epoch": 1, "batches": 7}}
        if number == 0:
            document["position"] = {"epoch": 1, "batch": 7}
        states.append((tensors, json.loads(json.dumps(document))))
    return states


def same(ours: State, theirs: State) -> None:
    assert ours[0].keys() == theirs[0].keys()
    for name, value in ours[0].items():
        torch.testing.assert_close(value, theirs[0][name], rtol=0, atol=0)
    assert json.loads(json.dumps(ours[1])) == theirs[1]


@pytest.mark.parametrize("interface", ["mixed", "{delayed: {max_late: 1, predict: true}}"])
def test_the_same_cuts_are_the_same_state(interface: str) -> None:
    workers = cut(2, 4, interface=interface)
    states = trained(workers)
    before = torch.get_rng_state()
    for ours, theirs in zip(carry(workers, states, workers), states, strict=True):
        same(ours, theirs)
    assert torch.equal(torch.get_rng_state(), before)


def test_there_and_back() -> None:
    """Fewer and more modules; only interfaces of cuts that were not there begin anew."""
    workers, other = cut(2, 4), cut(4, 5)
    states = trained(workers)
    (first, second, third) = carried = list(carry(workers, states, other))
    assert torch.equal(first[0]["layers.2.weight"], states[1][0]["layers.0.weight"])
    assert torch.equal(third[0]["layers.0.weight"], states[2][0]["layers.1.weight"])
    momentum = "optimizer.module.0.momentum_buffer"
    assert momentum in second[0]
    assert second[1]["optimizers"]["module"]["groups"][0]["lr"] == pytest.approx(0.001)
    assert [one[1]["gathered"] for one in carried] == [1, 1, 1]
    assert ["position" in one[1] for one in carried] == [True, False, False]

    begun = copy_state(ModuleStep(other[1]))[0]
    for name, value in states[1][0].items():  # the cut after the fourth layer
        if name.startswith("interface."):
            assert torch.equal(first[0][name], value)
    for name, value in begun.items():
        if name.startswith("interface."):
            assert torch.equal(second[0][name], value)

    carried = [(tensors, json.loads(json.dumps(own))) for tensors, own in carried]
    for ours, theirs in zip(carry(other, carried, workers), states, strict=True):
        for name, value in theirs[0].items():
            if not name.startswith(
                ("interface.", "optimizer.synthesizer", "optimizer.head", "random.")
            ):
                torch.testing.assert_close(ours[0][name], value, rtol=0, atol=0)


def test_what_the_new_chain_sets_counts() -> None:
    workers = cut(2)
    states = trained(workers)
    other = cut(3, settings="optimizer: {Adam: {lr: 0.5}}")
    for worker, (tensors, document) in zip(other, carry(workers, states, other), strict=True):
        step = ModuleStep(worker)
        restore(step, tensors, document)
        (optimizer,) = step.optimization.optimizers.values()
        assert not optimizer.state, "momentum is not Adam's"
        assert optimizer.param_groups[0]["lr"] == 0.5
        assert step.batches == 7


def test_names_count_layers_from_the_head() -> None:
    names = Names(cut(2, 4))
    assert names.ends == [(2, None), (4, None), (6, None)]
    assert [names.of(1, "0.weight"), names.of(2, "1.bias")] == ["2.weight", "5.bias"]

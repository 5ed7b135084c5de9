"""An optimizer that validates also runs: it is tried with the module's own parameters."""

from __future__ import annotations

import pytest
import torch

from dni_runtime.core.chain import Backprop, LocalChain
from dni_runtime.core.step import ModuleStep
from dni_runtime.core.training import OPTIMIZERS, build_optimizer
from dni_runtime.errors import SpecError
from dni_runtime.spec import Choice, DataInfo
from dni_runtime.worker.checkpoint import copy_state, restore
from tests.specs import int64, refused, specs_of

INFO = DataInfo(sample=int64(4), label=int64(), classes=3)
CHAIN = """\
name: net
modules:
  - name: words
    layers: [{Embedding: {num_embeddings: 5, embedding_dim: 6, sparse: %s}}, Flatten]
    interface: %s
    optimizer: %s
  - name: matrix
    layers: [{Linear: {in_features: 24, out_features: 6, bias: false}}, Tanh]
    interface: delayed
    optimizer: %s
  - name: top
    layers: [{Linear: {in_features: 6, out_features: 3}}]
    optimizer: %s
"""


def chain(
    words: str = "Adam",
    matrix: str = "Adam",
    top: str = "Adam",
    sparse: bool = False,
    interface: str = "exact",
) -> str:
    return CHAIN % (str(sparse).lower(), interface, words, matrix, top)


def train(text: str) -> None:
    workers = specs_of(text, INFO)
    for net in (LocalChain(workers), Backprop(workers)):
        before = [p.detach().clone() for p in _parameters(net)]
        for _ in range(2):
            net.train_batch(torch.randint(0, 5, (8, 4)), torch.randint(0, 3, (8,)))
        moved = [not torch.equal(*pair) for pair in zip(before, _parameters(net), strict=True)]
        assert all(moved)


def _parameters(net: LocalChain | Backprop) -> list[torch.Tensor]:
    layers = [step.layers for step in net.steps] if isinstance(net, LocalChain) else [net.model]
    return [p for one in layers for p in one.parameters()]


@pytest.mark.parametrize("name", sorted({*OPTIMIZERS} - {"LBFGS", "SparseAdam", "Muon"}))
def test_optimizers_train(name: str) -> None:
    train(chain(*[f"{{{name}: {{lr: 0.1}}}}"] * 3))


def test_a_gradient_may_come_later_than_others() -> None:
    """torch's fused SGD with momentum fails there; its own loop does not."""
    choice = Choice(name="SGD", args={"lr": 0.1, "momentum": 0.9, "nesterov": True})
    p, q = (torch.nn.Parameter(torch.ones(3)) for _ in range(2))
    own, plain = build_optimizer(choice, [p, q]), [p.detach().clone(), q.detach().clone()]
    loop = torch.optim.SGD(plain, lr=0.1, momentum=0.9, nesterov=True)
    for step in range(4):
        p.grad = plain[0].grad = torch.full((3,), step + 1.0)
        if step > 1:
            q.grad = plain[1].grad = torch.full((3,), -step / 2)
        own.step()
        loop.step()
        assert torch.allclose(p, plain[0])
        assert torch.allclose(q, plain[1])


def test_steps_in_bfloat16_are_those_of_a_loop() -> None:
    """torch 2.13's fused SGD is wrong there."""
    p = torch.nn.Parameter(
        torch.randn(16, 16, generator=torch.Generator().manual_seed(0)).bfloat16()
    )
    wanted, g = p.detach().float(), torch.ones(16, 16)
    optimizer = build_optimizer(Choice(name="SGD", args={"lr": 0.25}), [p])
    for _ in range(3):
        p.grad = g.bfloat16()
        optimizer.step()
        wanted -= 0.25 * g
    assert torch.allclose(p.float(), wanted, atol=0.05)


@pytest.mark.parametrize("where", ["words", "matrix", "top"])
def test_a_closure_is_refused(where: str) -> None:
    error = refused(chain(**{where: "LBFGS"}), INFO, "LBFGS needs a closure")
    index = ["words", "matrix", "top"].index(where)
    assert error.location == ("modules", index, "optimizer", "LBFGS")
    assert error.hint is not None


def test_a_whole_number_beside_a_fraction() -> None:
    train(chain(top="{Adam: {betas: [0, 0.999]}}"))


def test_muon_updates_matrices_only() -> None:
    train(chain(words="Muon", matrix="{Muon: {lr: 0.02}}"))
    refused(chain(top="Muon"), INFO, r"of module 'top' it refuses 0\.bias \(3\)")


def test_an_early_head_may_need_an_optimizer_of_its_own() -> None:
    with pytest.raises(SpecError) as caught:
        specs_of(chain(words="Muon", interface="mixed"), INFO)
    assert caught.value.path == "modules[0].interface.mixed.local.optimizer.Muon"
    assert "'optimizer' names one" in str(caught.value)
    own = "{mixed: {local: {optimizer: Adam}}}"
    specs_of(chain(words="Muon", interface=own), INFO)
    specs_of(chain(words="LBFGS", interface="none"), INFO)  # it is not used


def test_dense_and_sparse_gradients() -> None:
    refused(chain(words="SparseAdam"), INFO, "SparseAdam does not support dense gradients")
    refused(chain(sparse=True), INFO, "Adam does not support sparse gradients")
    refused(chain(words="LAMB", sparse=True), INFO, "LAMB does not support sparse gradients")


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize("name", ["SparseAdam", "SGD", "Adagrad"])
def test_sparse_gradients_train(name: str) -> None:
    text = chain(words=f"{{{name}: {{lr: 0.1}}}}", sparse=True)
    train(text)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize("words", ["SparseAdam: {}", "SGD: {lr: 0.1, momentum: 0.9}"])
def test_sparse_gradients_are_part_of_checkpoints(words: str) -> None:
    spec = specs_of(chain(words=f"{{{words}}}", sparse=True), INFO)[0]
    spec = spec.model_copy(update={"accumulate": 2})

    def batch(step: ModuleStep, id: int) -> None:
        x = torch.randint(
            0, 5, (8, *INFO.sample.shape), generator=torch.Generator().manual_seed(id)
        )
        step.forward(id, x)
        step.update(torch.zeros(8, dtype=torch.int64))
        step.late_gradient(id, torch.ones(8, *spec.output.shape))

    step, copy = ModuleStep(spec), ModuleStep(spec)
    for id in (1, 2, 3):
        batch(step, id)
    restore(copy, *copy_state(step))
    for one in (step, copy):
        batch(one, 4)
    for ours, theirs in zip(step.layers.parameters(), copy.layers.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("part", ["local", "synthetic"])
def test_optimizers_of_interfaces_are_tried_too(part: str) -> None:
    interface = f"{{{part}: {{optimizer: LBFGS}}}}"
    refused(
        chain(interface=interface),
        INFO,
        "LBFGS needs a closure",
        f"modules[0].interface.{part}.optimizer.LBFGS",
    )


def test_a_module_without_parameters_has_its_optimizer_checked() -> None:
    text = chain().replace("Tanh]", "Tanh]\n    schedule: {StepLR: {step_size: 2}}")
    empty = text.replace("{Linear: {in_features: 24, out_features: 6, bias: false}}, Tanh", "Tanh")
    empty = empty.replace("in_features: 6, out_features: 3", "in_features: 24, out_features: 3")
    specs_of(empty, INFO)
    refused(empty.replace("optimizer: Adam", "optimizer: Adm"), INFO, "did you mean 'Adam'")

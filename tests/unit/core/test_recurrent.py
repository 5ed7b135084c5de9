"""Recurrent layers: truncated backpropagation in time, and gradients predicted beyond the cut."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from dni_runtime.core.chain import Backprop, LocalChain
from dni_runtime.core.export import assemble, export_model, load_model
from dni_runtime.core.layers import build_layers, exported
from dni_runtime.core.recurrent import CELLS, Recurrent
from dni_runtime.core.step import ModuleStep
from dni_runtime.core.synthesizers import Synthesizer
from dni_runtime.errors import SpecError
from dni_runtime.resolve.cost import estimated_costs
from dni_runtime.resolve.resolve import parameter_counts
from dni_runtime.spec import DataInfo, WorkerSpec
from dni_runtime.spec.named import Frozen
from dni_runtime.worker.checkpoint import copy_state, restore
from tests.specs import float32, int64, refused, specs_of

C, H, B, T = 3, 4, 5, 6
INFO = DataInfo(sample=float32(T, C), label=int64(), classes=3)
CHAIN = """\
name: recurrent
data: {batch_size: 5}
defaults: {interface: %s, optimizer: {SGD: {lr: 0.1}}}
modules:
  - name: a
    layers: [{Linear: {in_features: 3, out_features: 4}}, Tanh]
  - name: b
    layers: [{Recurrent: {cell: LSTM, input_size: 4, hidden_size: 4, synthetic: %s}}]
  - name: c
    layers: [{Flatten: {}}, {Linear: {in_features: 24, out_features: 3}}]
"""


def layer(cell: str = "LSTM", **keywords: Any) -> Recurrent:
    torch.manual_seed(0)
    return Recurrent(cell=cell, input_size=C, hidden_size=H, **keywords)


def chunks(count: int, size: int = B) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return list(torch.randn(count, size, T, C, generator=generator))


def loss_of(h_BTH: Tensor) -> Tensor:
    """A mean over samples, in which no two outputs count the same."""
    weights = torch.linspace(-1, 2, h_BTH[0].numel()).view(h_BTH.shape[1:])
    return (h_BTH.sin() * weights).flatten(1).sum(1).mean()


def gradients(recurrent: Recurrent) -> list[Tensor]:
    return [p.grad for p in recurrent.cell.parameters() if p.grad is not None]


def workers(interface: str = "exact", synthetic: str = "true") -> tuple[WorkerSpec, ...]:
    return specs_of(CHAIN % (interface, synthetic), INFO)


def seen(state_BS: Tensor, cell: str = "LSTM") -> Tensor:
    """What a synthesizer sees: the second half of an LSTM's state are its cell values."""
    half = state_BS.shape[1] // 2 if cell == "LSTM" else state_BS.shape[1]
    return torch.cat((state_BS[:, :half], state_BS[:, half:].tanh()), 1)


class Oracle(Synthesizer):
    """Predicts what it is told, and keeps what it is taught."""

    def __init__(self, size: int) -> None:
        super().__init__(float32(1, size), None, None, Frozen())
        self.map = nn.Linear(1, 1)
        self.answers: list[Tensor] = []
        self.taught: list[tuple[Tensor, Tensor]] = []

    def forward(self, s_B1S: Tensor, y_BY: Tensor | None) -> Tensor:
        return self.answers.pop(0)[:, None] if self.answers else torch.zeros_like(s_B1S)

    def lesson(self, s_B1S: Tensor, y_BY: Tensor, g_B1S: Tensor) -> Any:
        self.taught.append((s_B1S[:, 0].clone(), g_B1S[:, 0].clone()))
        return super().lesson(s_B1S, y_BY, g_B1S)._replace(loss=self.map.weight.sum() * 0)


def with_oracle(cell: str = "LSTM", **keywords: Any) -> tuple[Recurrent, Oracle]:
    made = layer(cell, synthetic={"scale": 1.0}, **keywords)
    oracle = Oracle(made.state.shape[1])
    made.synthesizer = oracle
    return made, oracle


cells = pytest.mark.parametrize(
    ("cell", "layers"), [(cell, count) for cell in CELLS for count in (1, 2)]
)


@cells
def test_batches_go_on_where_the_last_one_ended(cell: str, layers: int) -> None:
    recurrent = layer(cell, num_layers=layers)
    whole = recurrent.cell(torch.cat(chunks(3), 1))[0]
    parts = [recurrent(x) for x in chunks(3)]
    torch.testing.assert_close(torch.cat(parts, 1), whole)


@cells
def test_without_a_synthesizer_it_is_truncated_backpropagation(cell: str, layers: int) -> None:
    recurrent = layer(cell, num_layers=layers)
    reference = CELLS[cell](C, H, layers, batch_first=True)
    reference.load_state_dict(recurrent.cell.state_dict())
    optimizers = [torch.optim.SGD(m.parameters(), 0.1) for m in (recurrent, reference)]
    state: Any = None
    for x in chunks(5):
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss_of(recurrent(x)).backward()
        h, state = reference(x, state)
        loss_of(h).backward()
        state = tuple(one.detach() for one in state) if cell == "LSTM" else state.detach()
        for optimizer in optimizers:
            optimizer.step()
    for ours, theirs in zip(recurrent.parameters(), reference.parameters(), strict=True):
        assert torch.equal(ours, theirs)


@cells
def test_with_the_true_gradient_it_is_full_backpropagation(cell: str, layers: int) -> None:
    """The gradients of two batches add up to those of one sequence that is as long as both."""
    first, second = chunks(2)
    whole = layer(cell, num_layers=layers)
    h = whole.cell(torch.cat((first, second), 1))[0]
    (loss_of(h[:, :T]) + loss_of(h[:, T:])).backward()

    blind, taught = with_oracle(cell, num_layers=layers)
    for x in (first, second):
        loss_of(blind(x)).backward()
    blind.learn()
    ((state, future),) = taught.taught
    assert torch.equal(state, seen(blind_state(cell, layers, first), cell))

    recurrent, oracle = with_oracle(cell, num_layers=layers)
    oracle.answers = [future, torch.zeros_like(future)]
    for x in (first, second):
        loss_of(recurrent(x)).backward()
    for ours, theirs, truncated in zip(
        gradients(recurrent), gradients(whole), gradients(blind), strict=True
    ):
        torch.testing.assert_close(ours, theirs)
        assert not torch.allclose(truncated, theirs, rtol=1e-2)


def blind_state(cell: str, layers: int, x: Tensor) -> Tensor:
    recurrent = layer(cell, num_layers=layers)
    recurrent(x)
    return recurrent.state


def test_the_target_contains_the_next_batchs_own_prediction_scaled() -> None:
    """Per sample, by autograd: d(losses of the batch + scale * prediction . last state)/d state."""
    recurrent, oracle = with_oracle()
    recurrent.scale = 0.5
    one, two = chunks(2)
    recurrent(one)
    start = recurrent.state.clone().requires_grad_()
    told = torch.randn(B, 2 * H)
    oracle.answers = [told]
    loss_of(recurrent(two)).backward()
    recurrent.learn()
    h, (hidden, values) = recurrent.cell(two, (start[None, :, :H], start[None, :, H:]))
    after = torch.cat((hidden[0], values[0]), 1)
    (B * loss_of(h) + 0.5 * (told * after).sum()).backward()
    assert start.grad is not None
    ((state, target),) = oracle.taught
    assert torch.equal(state, seen(start))
    torch.testing.assert_close(target, start.grad)


def test_late_backward_passes_teach_in_any_order() -> None:
    recurrent, oracle = with_oracle()
    losses = []
    states = []
    for x in chunks(4):
        losses.append(loss_of(recurrent(x)))
        states.append(seen(recurrent.state))
    for number in (3, 1, 2, 0):
        losses[number].backward()
    recurrent.learn()
    assert [s.tolist() for s, _ in oracle.taught] == [states[n].tolist() for n in (2, 0, 1)]
    in_order, reference = with_oracle()
    for x in chunks(4):
        loss_of(in_order(x)).backward()
    in_order.learn()
    targets = [g for _, g in reference.taught]
    for (_, ours), theirs in zip(oracle.taught, [targets[n] for n in (2, 0, 1)], strict=True):
        torch.testing.assert_close(ours, theirs)


def test_the_newest_of_two_backward_passes_counts() -> None:
    recurrent, oracle = with_oracle()
    first, second = chunks(2)
    recurrent(first)
    loss = loss_of(recurrent(second))
    (10 * loss).backward(retain_graph=True)
    loss.backward(retain_graph=True)
    recurrent.learn()
    loss.backward()
    recurrent.learn()
    (_, once), (_, again) = oracle.taught
    assert torch.equal(once, again)
    assert recurrent.cell.weight_hh_l0.grad is not None


def test_what_is_not_backpropagated_teaches_nothing() -> None:
    recurrent, oracle = with_oracle()
    for x in chunks(3):
        recurrent(x)
    assert oracle.taught == []
    loss_of(recurrent(chunks(4)[3])).backward()
    recurrent.learn()
    assert len(oracle.taught) == 1


@pytest.mark.parametrize("name", ["linear", "mlp", "low-rank"])
def test_the_synthesizer_begins_as_truncation_and_learns(name: str) -> None:
    """The cell stays as it is; what the next batch sends back becomes predictable."""
    options = {"synthesizer": name, "optimizer": {"Adam": {"lr": 0.01}}}
    recurrent = layer(synthetic=options)
    assert recurrent.synthesizer is not None
    x = chunks(1)[0]
    loss_of(recurrent(x)).backward()
    plain = layer()
    loss_of(plain(x)).backward()
    for ours, theirs in zip(gradients(recurrent), gradients(plain), strict=True):
        assert torch.equal(ours, theirs)

    errors = []
    for inputs in itertools.islice(itertools.cycle(chunks(7)), 350):
        loss_of(recurrent(inputs)).backward()
        ((state, target),) = recurrent._lessons.values()
        predicted = recurrent._predict(state)
        errors.append(float((predicted - target).square().sum() / target.square().sum()))
    assert sum(errors[-7:]) < 0.35 * sum(errors[:7])


def test_evaluation_has_a_state_of_its_own() -> None:
    recurrent = layer(synthetic=True)
    one, two, three = chunks(3)
    recurrent(one)
    before = recurrent.state
    recurrent.eval()
    for _ in range(2):
        with torch.no_grad():
            parts = torch.cat((recurrent(two), recurrent(three)), 1)
        torch.testing.assert_close(parts, recurrent.cell(torch.cat((two, three), 1))[0])
        assert recurrent.state is before
        recurrent.train()
        recurrent(one)  # the next evaluation begins anew
        recurrent.state = before
        recurrent.eval()


def test_each_evaluation_begins_with_zeros() -> None:
    """That of the test set follows one of held-out samples, without a batch between."""
    chain = LocalChain(workers("local"))
    (x,) = chunks(1)

    def evaluated() -> list[Tensor]:
        first, second = chain.steps[:2]
        h = first.evaluate(x)
        head, g = first.predict(h), second.evaluate(h)
        assert head is not None
        return [head, g]

    once = evaluated()
    assert not torch.equal(evaluated()[1], once[1]), "batches of one evaluation follow each other"
    for step in chain.steps:
        step.end_evaluation()
    for ours, before in zip(evaluated(), once, strict=True):
        assert torch.equal(ours, before)


def test_the_average_of_the_weights_goes_on_from_batch_to_batch_too() -> None:
    chain, plain = (
        LocalChain([one.model_copy(update={"ema": ema}) for one in workers("exact")])
        for ema in (1e-9, None)  # so fast a mean is the newest weights
    )
    for number, x in enumerate(chunks(4)):
        y = x[:, 0].argmax(1)
        assert chain.train_batch(x, y) == plain.train_batch(x, y)
        for _ in range(number):
            torch.testing.assert_close(chain.predict(x), plain.predict(x))
    (small,) = chunks(1, size=2)
    chain.train_batch(small, small[:, 0].argmax(1))
    step = chain.steps[1]
    copy = ModuleStep(step.spec)
    restore(copy, *copy_state(step))
    torch.testing.assert_close(
        copy.evaluate(small @ torch.eye(C, H)), step.evaluate(small @ torch.eye(C, H))
    )


def test_a_pass_without_gradients_leaves_the_training_state() -> None:
    recurrent = layer(synthetic=True)
    recurrent(chunks(1)[0])
    before = recurrent.state
    with torch.no_grad():
        recurrent(chunks(1)[0])
    assert recurrent.state is before


def test_another_batch_size_begins_with_zeros() -> None:
    recurrent, oracle = with_oracle()
    recurrent(chunks(1)[0])
    small = chunks(2, size=2)
    h = recurrent(small[0])
    torch.testing.assert_close(h, recurrent.cell(small[0])[0])
    loss_of(h).backward()
    recurrent.learn()
    assert oracle.taught == []
    assert recurrent.state.shape == (2, 2 * H)
    recurrent.eval()
    with torch.no_grad():
        for x in (chunks(1)[0], small[0]):
            torch.testing.assert_close(recurrent(x), recurrent.cell(x)[0])


def test_after_a_reset_there_is_no_future() -> None:
    recurrent, oracle = with_oracle()
    one, two = chunks(2)
    recurrent(one)
    last = recurrent.state
    recurrent.reset()
    h = recurrent(two)
    torch.testing.assert_close(h, recurrent.cell(two)[0])
    loss_of(h).backward()
    recurrent.learn()
    ((state, target),) = oracle.taught
    assert torch.equal(state, seen(last))
    assert not target.any()
    plain = layer(carry=False)
    plain.reset()


def test_a_frozen_layer_predicts_nothing() -> None:
    recurrent, oracle = with_oracle()
    oracle.answers = [torch.ones(B, 2 * H)] * 2
    recurrent.requires_grad_(False)
    one, two = (x.requires_grad_() for x in chunks(2))
    recurrent(one)
    h = recurrent(two)
    torch.testing.assert_close(h, recurrent.cell(torch.cat((one, two), 1))[0][:, T:])
    loss_of(h).backward()
    assert two.grad is not None
    assert one.grad is None
    assert len(oracle.answers) == 2


def test_outputs_may_be_changed_in_place() -> None:
    recurrent = layer(synthetic=True)
    nn.functional.relu(recurrent(chunks(1)[0]), inplace=True).sum().backward()


def test_the_modules_optimizer_has_the_cell_alone() -> None:
    step = ModuleStep(workers()[1])
    (group,) = step.optimization.optimizers["module"].param_groups
    assert len(group["params"]) == 4
    counts = parameter_counts(workers())
    assert counts["b"] == sum(p.numel() for p in layer().cell.parameters()) + 4 * H * (H - C)


def test_costs_are_counted_without_computing() -> None:
    costs = estimated_costs(workers())
    assert costs["b"] > 3 * 2 * T * 4 * (2 * H * H)


def test_two_backward_passes_would_count_the_future_twice() -> None:
    refused(CHAIN % ("corrected", "true"), INFO, "'corrected' passes backward twice")
    workers("corrected", "false")


@pytest.mark.parametrize("synthetic", ["false", "true", "{synthesizer: mlp, scale: 0.5}"])
def test_a_chain_with_a_recurrent_module_is_backpropagation(synthetic: str) -> None:
    chain, reference = (
        LocalChain(workers("exact", synthetic)),
        Backprop(workers("exact", synthetic)),
    )
    states = [one.state for one in reference.model.modules() if isinstance(one, Recurrent)]
    assert len(states) == 1
    for number, x in enumerate(chunks(8, size=4)):  # a power of two: batch means round alike
        y = x[:, 0].argmax(1)
        theirs = float(reference.train_batch(x, y))
        assert chain.train_batch(x, y) == pytest.approx(theirs, rel=1e-5)
        if number == 4:
            torch.testing.assert_close(chain.predict(x), reference.predict(x))
    ours = {k: v for step in chain.steps for k, v in step.layers.state_dict().items()}
    assert {"0.state"} < set(ours)
    other = reference.model.state_dict()
    for index, step in enumerate(chain.steps):
        for name, tensor in step.layers.state_dict().items():
            torch.testing.assert_close(tensor, other[f"{index}.{name}"], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("interface", ["mixed", "synthetic", "local", "delayed", "none"])
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_it_runs_behind_every_interface(interface: str, precision: str) -> None:
    specs = [w.model_copy(update={"precision": precision}) for w in workers(interface)]
    chain = LocalChain(specs, delay=3)
    for x in chunks(12):
        loss = chain.train_batch(x, x[:, 0].argmax(1))
    assert loss == loss
    recurrent = next(m for m in chain.steps[1].layers if isinstance(m, Recurrent))
    assert recurrent.state.shape == (B, 2 * H)
    assert recurrent.synthesizer is not None
    taught = bool(recurrent.synthesizer.state_dict()["out.weight"].any())
    assert taught == (interface != "none")


@pytest.mark.parametrize("ending", ["safetensors", "pt2"])
def test_what_is_exported_is_a_plain_function(ending: str, tmp_path: Path) -> None:
    specs = workers("synthetic")
    chain = LocalChain(specs)
    for x in chunks(4):
        chain.train_batch(x, x[:, 0].argmax(1))
    files = {}
    for step in chain.steps:
        files[step.spec.module] = tmp_path / f"{step.spec.module}.safetensors"
        tensors = {f"layers.{k}": v.contiguous() for k, v in step.layers.state_dict().items()}
        save_file(tensors, files[step.spec.module])
    model = assemble(specs, files)
    assert not any("state" in name or "synthesizer" in name for name in model.state_dict())
    expected = chain.predict(chunks(1)[0])  # the first after training: from zeros
    output = tmp_path / f"model.{ending}"
    export_model(specs, files, output)
    loaded = load_model(output, trust=True)
    for _ in range(2):
        torch.testing.assert_close(loaded(chunks(1)[0]), expected)
    torch.testing.assert_close(loaded(chunks(1)[0][:2]), expected[:2])


def test_blocks_are_exported_too() -> None:
    text = CHAIN % ("mixed", "true")
    text = text.replace("[{Recurrent:", "[{Residual: [{Recurrent:").replace("true}}]", "true}}]}]")
    specs = specs_of(text, INFO)
    plain = build_layers([exported(one) for one in specs[1].layers])
    plain.load_state_dict(build_layers(specs[1].layers).state_dict())
    assert not any(isinstance(m, Synthesizer) for m in plain.modules())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("cell: LSTM", "cell: LSTN"), ["'LSTN' is not allowed here", "'LSTM', 'GRU' or 'RNN'"]),
        (("hidden_size: 4,", "hidden: 4,"), ["no keyword 'hidden'", "did you mean 'hidden_size'"]),
        (("cell: LSTM, ", ""), ["needs 'cell'"]),
        (("hidden_size: 4", "hidden_size: 0"), ["hidden_size must be greater than zero"]),
        (("hidden_size: 4", "hidden_size: 4, num_layers: 0"), ["num_layers: 0"]),
        (("hidden_size: 4", "hidden_size: 4, dropout: 0.5"), ["needs 'num_layers' above 1"]),
        (("hidden_size: 4", "hidden_size: 4, carry: false"), ["'synthetic' needs 'carry: true'"]),
        (("synthetic: true", "synthetic: 3"), ["synthetic: 3 is not true, false or a mapping"]),
        (
            ("synthetic: true", "synthetic: {synthesiser: mlp}"),
            ["synthetic.synthesiser", "did you mean 'synthesizer'"],
        ),
        (
            ("synthetic: true", "synthetic: {synthesizer: linaer}"),
            ["synthetic.synthesizer", "'linaer'", "did you mean 'linear'"],
        ),
        (("synthetic: true", "synthetic: {synthesizer: critic}"), ["needs class labels"]),
        (
            ("synthetic: true", "synthetic: {optimizer: {Adam: {rate: 1}}}"),
            ["synthetic.optimizer.Adam.rate", "no keyword 'rate'"],
        ),
        (("input_size: 4", "input_size: 5"), ["does not fit", "float32[B x 6 x 4]"]),
        (("[{Recurrent", "[Flatten, {Recurrent"), ["a sequence of vectors (B, T, C)"]),
    ],
)
def test_mistakes_are_told_before_anything_starts(
    change: tuple[str, str], words: list[str]
) -> None:
    text = (CHAIN % ("mixed", "true")).replace(*change)
    with pytest.raises(SpecError) as caught:
        specs_of(text, INFO)
    for word in words:
        assert word in str(caught.value)
    assert caught.value.location[:3] == ("modules", 1, "layers")


def test_torchs_own_cell_is_pointed_to_the_layer() -> None:
    old = "Recurrent: {cell: LSTM, input_size: 4, hidden_size: 4, synthetic: true}"
    text = (CHAIN % ("mixed", "true")).replace(old, "LSTM: {input_size: 4, hidden_size: 4}")
    error = refused(text, INFO, "returns tuple instead of one tensor")
    assert "'Recurrent'" in str(error)

"""Graphs of modules beside plain backpropagation of the same network."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from dni_runtime import load
from dni_runtime.core.chain import Backprop, LocalChain
from dni_runtime.core.export import connect, export_model
from dni_runtime.core.layers import Add
from dni_runtime.core.sums import KEPT, GradientSum
from dni_runtime.errors import SpecError
from dni_runtime.spec import DataInfo, WorkerSpec
from tests.specs import float32, int64, specs_of
from tests.unit.core.test_export import saved

A = "{name: a, layers: [{Linear: {in_features: 12, out_features: 8}}, Tanh]}"
DIAMOND = [
    A,
    "{name: b, layers: [{Linear: {in_features: 8, out_features: 8}}, Tanh]}",
    "{name: c, inputs: a, layers: [{Linear: {in_features: 8, out_features: 8}}, Tanh]}",
    "{name: d, inputs: [b, c, a], layers: [Concat, {Linear: {in_features: 24, out_features: 3}}]}",
]
U_SHAPE = [
    A,
    "{name: b, layers: [{Linear: {in_features: 8, out_features: 4}}, Tanh]}",
    "{name: c, layers: [{Linear: {in_features: 4, out_features: 4}}, Tanh]}",
    "{name: d, inputs: [c, b], layers: [Add, {Linear: {in_features: 4, out_features: 8}}, Tanh]}",
    "{name: e, inputs: [d, a], layers: [Add, {Linear: {in_features: 8, out_features: 3}}]}",
]
TWO_INPUTS = [
    "{name: a, inputs: [data.0], layers: [{Linear: {in_features: 12, out_features: 8}}, Tanh]}",
    "{name: b, inputs: [data.1], layers: [{Embedding: {num_embeddings: 5, embedding_dim: 8}}]}",
    "{name: c, inputs: [a, b], layers: [{Bilinear: {in1_features: 8, in2_features: 8,"
    " out_features: 8}}, Tanh]}",
    "{name: d, inputs: [c, data.0], layers: [Concat, {Linear: {in_features: 20,"
    " out_features: 3}}]}",
]
OWN = "import: 'tests.unit.core.outputs:%s'"
TWO_OUTPUTS = [
    f"{{name: a, layers: [{{{OWN % 'Fork'}}}]}}",
    "{name: b, inputs: a.0, layers: [{Linear: {in_features: 8, out_features: 8}}, Tanh]}",
    "{name: c, inputs: a.1, layers: [Flatten, {Linear: {in_features: 6, out_features: 8}}, Tanh,"
    f" {{{OWN % 'Ends'}}}]}}",
    f"{{name: d, inputs: [b, c, a], layers: [{{{OWN % 'Flat'}}},"
    " {Linear: {in_features: 31, out_features: 3}}]}",
]
RESIDUAL = [
    A,
    "{name: b, layers: [{Linear: {in_features: 8, out_features: 8}}, Tanh]}",
    f"{{name: c, inputs: [a, b], layers: [{{{OWN % 'Columns'}}},"
    " {Linear: {in_features: 8, out_features: 3}}]}",
]
NETWORKS = {
    "diamond": DIAMOND, "u-shape": U_SHAPE, "two inputs": TWO_INPUTS, "two outputs": TWO_OUTPUTS,
    "residual": RESIDUAL,
}  # fmt: skip
LABEL = int64()
ONE = DataInfo(sample=float32(12), label=LABEL, classes=3)
TWO = ONE.model_copy(update={"further": (int64(),)})


def workers(
    modules: list[str], interface: str = "exact", rest: str = "", optimizer: str = "SGD: {lr: 0.1}"
) -> tuple[WorkerSpec, ...]:
    text = f"name: net\ndata: {{batch_size: 16}}\n{rest}\ndefaults:\n  interface: {interface}\n"
    text += f"  optimizer: {{{optimizer}}}\nmodules:\n" + "\n".join(f"- {one}" for one in modules)
    return specs_of(text, TWO if modules is TWO_INPUTS else ONE)


def batches(count: int, two: bool = False) -> list[tuple[Tensor | tuple[Tensor, ...], Tensor]]:
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(count, 16, 12, generator=draw)
    z = torch.randint(0, 5, (count, 16), generator=draw)
    ys = x[:, :, :3].argmax(2)
    return [((a, b) if two else a, y) for a, b, y in zip(x, z, ys, strict=True)]


@pytest.mark.parametrize("interface", ["exact", "{exact: {micro_batches: 4}}", "delayed"])
@pytest.mark.parametrize("name", NETWORKS)
def test_true_gradients_are_backpropagation_bit_for_bit(name: str, interface: str) -> None:
    specs = workers(NETWORKS[name], interface)
    graph, reference = LocalChain(specs), Backprop(specs)
    for x, y in batches(16, name == "two inputs"):
        graph.train_batch(x, y)
        reference.train_batch(x, y)
    for step, module in zip(graph.steps, reference.model, strict=True):
        for ours, theirs in zip(step.layers.parameters(), module.parameters(), strict=True):
            assert torch.equal(ours, theirs)
    x, _ = batches(1, name == "two inputs")[0]
    assert torch.equal(graph.predict(x), reference.predict(x))


@pytest.mark.parametrize(
    "interface",
    [
        "mixed", "local", "corrected", "synthetic", "{synthetic: {bootstrapped: true}}",
        "{synthetic: {learn_every: 3}}", "{delayed: {max_late: 2}}",
    ],
)  # fmt: skip
@pytest.mark.parametrize("name", NETWORKS)
def test_every_interface_learns_at_every_output(name: str, interface: str) -> None:
    graph = LocalChain(workers(NETWORKS[name], interface, optimizer="Adam: {lr: 0.03}"), delay=2)
    losses = [graph.train_batch(x, y) for x, y in batches(50, name == "two inputs")]
    assert sum(losses[-20:]) < 0.6 * sum(losses[:5]) * 4
    for step in graph.steps[:-1]:
        assert step.counters.unpaired == 0
        assert (step.counters.gradients > 0) == (step.spec.gradients_in > 0)


def test_what_is_sent_up_at_a_join() -> None:
    """Bootstrapped gradients come from all that take the output, or true ones do."""
    tail = workers(DIAMOND, "{synthetic: {bootstrapped: true}}")
    assert [edge.bootstrapped for edge in tail[3].sources] == [False, False, False]
    assert [edge.bootstrapped for edge in tail[1].sources] == [False], "the tail has no signal"
    skip = workers(U_SHAPE, "{synthetic: {bootstrapped: true}}")
    assert not any(edge.bootstrapped for one in skip for edge in one.sources), "'a' has the tail's"
    own = [A.replace("name: a", "name: a, interface: local"), *U_SHAPE[1:]]
    skip = workers(own, "{synthetic: {bootstrapped: true}}")
    by_link = {(e.source, e.target): e.bootstrapped for one in skip for e in one.sources}
    assert by_link == {
        ("a", "b"): False, ("b", "c"): True, ("b", "d"): True, ("c", "d"): True,
        ("d", "e"): False, ("a", "e"): False,
    }  # fmt: skip
    exact = workers(U_SHAPE)
    assert all(edge.awaited and edge.resend == 1 for one in exact for edge in one.sources)
    window = 8
    late = workers(U_SHAPE, rest=f"links: {{window: {window}}}")
    assert [one.late for one in late] == [4 * window, 3 * window, 2 * window, window, 0]


def test_what_a_link_carries_of_several_outputs() -> None:
    specs = workers(TWO_OUTPUTS)
    carried = {(e.source, e.target): (str(e.tensor), e.takes) for one in specs for e in one.targets}
    assert carried == {
        ("a", "b"): ("float32[B x 8]", (0,)),
        ("a", "c"): ("float32[B x 2 x 3]", (1,)),
        ("a", "d"): ("float32[B x 14]", ()),
        ("b", "d"): ("float32[B x 8]", ()),
        ("c", "d"): ("float32[B x 9]", ()),
    }
    assert [one.shape for one in specs[3].arguments] == [(8,), (8,), (), (8,), (2, 3)]
    assert WorkerSpec.from_json(specs[0].to_json()) == specs[0]


@pytest.mark.parametrize(
    ("index", "module", "message", "hint"),
    [
        (0, f"{{name: a, layers: [{{{OWN % 'Fork'}}}, Tanh]}}", "returns several tensors", "last"),
        (0, f"{{name: a, layers: [{{Sequential: [{{{OWN % 'Fork'}}}, Tanh]}}]}}", "several", "blo"),
        (0, f"{{name: a, layers: [{{{OWN % 'Types'}}}]}}", r"several types.*int64\[B\]", "data.0"),
        (1, "{name: b, inputs: a.2, layers: [Tanh]}", "'b' takes 'a.2', .* 2 outputs", "'a.1'"),
        (2, "{name: c, inputs: b.0, layers: [Tanh]}", "'c' takes 'b.0', .* one output", "'b'"),
        (3, f"{{name: d, inputs: [b, c.0, a], layers: [{{{OWN % 'Flat'}}},"
         " {Linear: {in_features: 30, out_features: 3}}]}", "'c.1', an output .* nowhere", "name"),
        (3, f"{{name: d, inputs: [b, c, a], layers: [{{{OWN % 'Flat'}}}, {{{OWN % 'Ends'}}}]}}",
         "returns several", "losses"),
    ],
)  # fmt: skip
def test_outputs_that_do_not_fit(index: int, module: str, message: str, hint: str) -> None:
    wrong = TWO_OUTPUTS.copy()
    wrong[index] = module
    with pytest.raises(SpecError, match=message) as caught:
        workers(wrong)
    assert caught.value.location[:2] == ("modules", 2 if "nowhere" in message else index)
    assert hint in str(caught.value.hint)


@pytest.mark.parametrize(
    ("modules", "interface", "rest", "at", "message"),
    [
        ([*DIAMOND[:3], "{name: d, inputs: [b, c], layers: [Flatten]}"], "exact", "",
         "modules[3]", r"(?s)it gets float32\[B x 8\] and float32\[B x 8\].*Concat"),
        ([*DIAMOND[:2], "{name: c, inputs: [b, data.1], layers: [Concat]}"], "exact", "",
         "modules[2].inputs", r"'c' takes 'data\.1', but the data has one input"),
        ([*DIAMOND[:3], "{name: d, inputs: [b, c], layers: [{Concat: {dim: 0}}]}"], "exact", "",
         "", "dim 0 is the batch"),
        (DIAMOND, "mixed", "links: {synthetic_inputs: gone}",
         "links.synthetic_inputs", "module 'd' has 3 inputs"),
    ],
)  # fmt: skip
def test_joins_that_cannot_be(
    modules: list[str], interface: str, rest: str, at: str, message: str
) -> None:
    with pytest.raises(SpecError, match=message) as caught:
        workers(modules, interface, rest)
    assert caught.value.path.startswith(at)


def test_a_join_may_train_on_what_it_has_had() -> None:
    assert workers(DIAMOND, "mixed", "links: {replay: 4}")


@pytest.mark.parametrize("suffix", [".safetensors", ".pt2"])
@pytest.mark.parametrize("name", NETWORKS)
def test_export(name: str, suffix: str, tmp_path: Path) -> None:
    two = name == "two inputs"
    graph = LocalChain(workers(NETWORKS[name]))
    for x, y in batches(5, two):
        graph.train_batch(x, y)
    file = tmp_path / f"model{suffix}"
    export_model([step.spec for step in graph.steps], saved(graph, tmp_path), file)
    (x, _) = batches(1, two)[0]
    model = load(file, trust=True)
    found = model(*x) if isinstance(x, tuple) else model(x)
    assert torch.equal(found, graph.predict(x))


def test_a_chain_is_a_plain_sequence() -> None:
    modules = {"a": nn.Sequential(nn.ReLU()), "b": nn.Sequential(nn.Tanh())}
    assert type(connect(modules, [[], [(0, None)]], [[0], []])) is nn.Sequential
    assert type(connect(modules, [[], [(0, None)]], [[1], []])) is not nn.Sequential


def test_gradients_are_added_last_module_first() -> None:
    """As autograd does: the order in which they come makes no difference."""
    parts = [torch.tensor([1e8]), torch.tensor([1.0]), torch.tensor([-1e8])]
    wanted = (parts[2] + parts[1]) + parts[0]
    for order in ((0, 1, 2), (2, 0, 1), (1, 2, 0)):
        total = GradientSum(3)
        found = [total.add(7, place, parts[place]) for place in order]
        assert found[:2] == [None, None]
        assert found[2] is not None
        assert torch.equal(found[2], wanted)


def test_a_gradient_that_comes_again_counts_once() -> None:
    total, g = GradientSum(2), torch.ones(1)
    assert total.add(1, 0, g) is None
    assert total.add(1, 0, 2 * g) is None
    found = total.add(1, 1, g)
    assert found is not None
    assert float(found) == 3


def test_batches_that_one_module_sends_no_gradient_of() -> None:
    total, g = GradientSum(2), torch.ones(1)
    for id in (1, 2, 3):
        total.add(id, 0, g)
    assert total.lacks(0, 3) is None
    assert total.lacks(1, 2) == 2
    assert total.add(2, 1, g) is None, "it was forgotten"
    assert total.add(3, 1, g) is not None


def test_incomplete_sums_are_bounded() -> None:
    total, g = GradientSum(2), torch.ones(1)
    for id in range(1, KEPT + 3):
        total.add(id, 0, g)
    assert total.add(1, 1, g) is None
    assert total.add(KEPT + 2, 1, g) is not None


def test_a_layer_that_changes_its_input_changes_nobody_elses() -> None:
    modules = {
        "a": nn.Sequential(nn.Linear(2, 2)),
        "b": nn.Sequential(nn.ReLU(inplace=True)),
        "c": nn.Sequential(Add()),
    }
    network = connect(modules, [[], [(0, None)], [(1, None), (0, None)]], [[0], [], []])
    x = torch.randn(4, 2)
    h = modules["a"](x)
    assert torch.equal(network(x), h.relu() + h)

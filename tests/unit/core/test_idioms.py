"""What layers do in plain torch, they do in every module: in-place changes, buffers, cut gradients.

The reference is a loop of plain torch over the same layers.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from dni_runtime.core.chain import LocalChain
from dni_runtime.core.step import ModuleStep
from dni_runtime.errors import SpecError
from tests.specs import refused, specs_of
from tests.unit.core.conftest import INFO
from tests.unit.core.test_numerics import batches

CHAIN = """\
name: idioms
data: {{batch_size: 16}}
defaults: {{interface: {interface}, optimizer: {{SGD: {{lr: 0.1, momentum: 0.9}}}}}}
modules:
- {{name: a, layers: [{head}{{Linear: {{in_features: 12, out_features: 8}}}}]{more}}}
- {{name: b, layers: [{middle}{{Linear: {{in_features: 8, out_features: 8}}}}]}}
- {{name: c, layers: [{tail}{{Linear: {{in_features: 8, out_features: 3}}}}]}}
"""
EXACT = ["exact", "{exact: {micro_batches: 2}}", "delayed", "{delayed: {keep: input}}"]
"""Interfaces that are plain backpropagation, without a delay."""
OTHERS = ["mixed", "local", "synthetic", "corrected"]


def own(name: str, args: str = "") -> str:
    return f"{{import: 'tests.unit.core.idioms:{name}', args: {{{args}}}}}, "


def chain_of(
    interface: str, head: str = "", middle: str = "", tail: str = "", more: str = "", delay: int = 0
) -> LocalChain:
    text = CHAIN.format(interface=interface, head=head, middle=middle, tail=tail, more=more)
    return LocalChain(specs_of(text, INFO), delay=delay)


def plain(
    network: nn.Module, data: list[tuple[Tensor, Tensor]], parts: int = 1
) -> dict[str, Tensor]:
    """Train with plain torch, each batch in equal parts; return the state."""
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
    for x, y in data:
        for some, labels in zip(x.chunk(parts), y.chunk(parts), strict=True):
            (cross_entropy(network(some.clone()), labels) / parts).backward()
        optimizer.step()
        optimizer.zero_grad()
    return network.state_dict()


def train_both(chain: LocalChain, parts: int = 1, count: int = 4) -> None:
    """Train the chain and plain torch; compare weights and buffers."""
    network = nn.Sequential(*(copy.deepcopy(step.layers) for step in chain.steps))
    expected = plain(network, batches(count), parts)
    for x, y in batches(count):
        chain.train_batch(x, y)
    for number, step in enumerate(chain.steps):
        for name, value in step.layers.state_dict().items():
            torch.testing.assert_close(value, expected[f"{number}.{name}"])


def test_an_output_is_not_written_into_by_the_next_batch() -> None:
    """It may not be sent yet: a neighbour would get another batch's numbers."""
    text = CHAIN.format(interface="none", head="", middle="", tail="", more="")
    text = text.replace("}]", "}, {import: 'tests.unit.core.idioms:InOneMemory'}]", 1)
    chain = LocalChain(specs_of(text, INFO))
    ((x, y),) = batches(1)
    chain.train_batch(x, y)
    with pytest.raises(SpecError, match=r"(?s)'a' writes into its output of the batch.*clone"):
        chain.train_batch(x, y)


@pytest.mark.parametrize("interface", EXACT)
def test_layers_may_change_their_input_in_place(interface: str) -> None:
    shifts = own("Shifts")
    train_both(
        chain_of(interface, own("Shifts", "features: 12"), shifts, shifts),
        parts=2 if "micro" in interface else 1,
    )


@pytest.mark.parametrize("interface", [*EXACT, *OTHERS])
def test_data_are_left_as_they_are(interface: str) -> None:
    """They may be used again, and other modules may have the same tensor."""
    shifts = own("Shifts")
    chain = chain_of(interface, own("Shifts", "features: 12"), shifts, shifts)
    seen: list[tuple[Tensor, Tensor]] = []

    def watched(step: ModuleStep, forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def run(x: Tensor) -> Tensor:
            h = forward(x)
            seen.append((h, h.clone()))
            return h

        return run

    for step in chain.steps[:2]:
        step.evaluate = watched(step, step.evaluate)  # type: ignore[method-assign]  # watched
    for x, y in batches(3):
        before = x.clone()
        chain.train_batch(x, y)
        chain.predict(x)
        for step, (h, _) in zip(chain.steps, seen[-2:], strict=False):
            step.predict(h)
        assert torch.equal(x, before)
    assert all(torch.equal(h, before) for h, before in seen)


@pytest.mark.parametrize("interface", [*EXACT, *OTHERS])
@pytest.mark.parametrize("module", ["head", "middle", "tail"])
@pytest.mark.parametrize("what", ["", ", weight: true"])
def test_what_torch_reports_is_reported(interface: str, module: str, what: str) -> None:
    """By ``validate`` if zeros show it, else at the first batch; with the module's name."""
    name = {"head": "a", "middle": "b", "tail": "c"}[module]
    args = f"features: {12 if module == 'head' else 8}{what}"
    with pytest.raises(SpecError, match=f"{name!r} changes a tensor in place") as caught:
        chain_of(interface, **{module: own("Spoils", args)})
    assert caught.value.location[:1] == ("modules",)
    chain = chain_of(interface, **{module: own("Spoils", f"{args}, late: true")})
    ((x, y),) = batches(1)
    network = nn.Sequential(*(copy.deepcopy(step.layers) for step in chain.steps))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        cross_entropy(network(x), y).backward()
    with pytest.raises(SpecError, match=f"'{name}' changes a tensor in place") as caught:
        chain.train_batch(x, y)
    assert "y * 2" in str(caught.value.hint)


@pytest.mark.parametrize("interface", ["exact", "{delayed: {max_late: 1}}", "corrected", "delayed"])
@pytest.mark.parametrize("how", ["detach", "no_grad", "argmax"])
def test_a_gradient_that_is_awaited_must_be_there(interface: str, how: str) -> None:
    with pytest.raises(SpecError, match="'b' has no gradient for module 'a'") as caught:
        chain_of(interface, middle=own("Cuts", f"how: {how}"))
    assert caught.value.location == ("modules", 1, "layers")
    with pytest.raises(SpecError, match="'c' has no gradient for module 'b'"):
        chain_of(interface, tail=own("Cuts", f"how: {how}"))


def test_the_tails_output_has_a_gradient() -> None:
    text = CHAIN.format(interface="local", head="", middle="", tail="", more="")
    last = "{Linear: {in_features: 8, out_features: 3}}"
    assert last in text
    text = text.replace(last, f"{last}, {own('Cuts', 'features: 3, how: no_grad')}")
    refused(text, INFO, "the output of module 'c' has no gradient")


@pytest.mark.parametrize("interface", ["exact", "{exact: {micro_batches: 2}}"])
def test_a_frozen_extractor_may_be_without_a_gradient(interface: str) -> None:
    """Nothing that is trained is upstream of it."""
    cuts = own("Cuts", "features: 12, how: no_grad")
    train_both(chain_of(interface, head=cuts), parts=2 if "micro" in interface else 1)
    chain = chain_of(interface, middle=own("Cuts", "how: no_grad"), more=", freeze: true")
    assert chain.train_batch(*batches(1)[0]) > 0


def test_batches_are_cut_for_frozen_modules_too() -> None:
    """Though no gradient goes there, and it alone says so: its buffers follow each part."""
    more = ", freeze: true, interface: {exact: {micro_batches: 2}}"
    train_both(chain_of("delayed", own("Centred", "features: 12"), more=more), parts=2)


@pytest.mark.parametrize("interface", ["exact", "{delayed: {max_late: 1}}", "mixed"])
def test_a_gradient_that_is_missing_for_a_batch_is_zero(interface: str) -> None:
    """The chain goes on; ``validate`` could not see it."""
    chain = chain_of(interface, middle=own("Cuts", "how: late"))
    if interface == "exact":
        train_both(chain)
    else:
        for x, y in batches(4):
            chain.train_batch(x, y)
    assert not any(step.blocked for step in chain.steps)


@pytest.mark.parametrize("kind", ["Centred", "Scaled"])
@pytest.mark.parametrize("interface", EXACT[:3])
def test_buffers_that_a_batch_changes(interface: str, kind: str) -> None:
    """Once for each batch, and a gradient uses those of its own forward pass."""
    first = "{Linear: {in_features: 12, out_features: 12}}, "
    delay = int("exact" in interface)  # the second part comes before the first one's gradient
    chain = chain_of(
        interface, first + own(kind, "features: 12"), own(kind), own(kind), delay=delay
    )
    train_both(chain, parts=2 if "micro" in interface else 1)


@pytest.mark.parametrize("kind", ["Centred", "Scaled"])
def test_a_pass_that_is_computed_again_counts_once(kind: str) -> None:
    step = chain_of("{delayed: {keep: input}}", own(kind, "features: 12")).steps[0]
    layer = copy.deepcopy(step.layers)
    for id, (x, y) in enumerate(batches(3), start=1):
        layer(x)
        h = step.forward(id, x)
        step.update(y)
        step.late_gradient(id, torch.zeros_like(h))
    for ours, theirs in zip(step.layers.buffers(), layer.buffers(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("kind", ["Centred", "Scaled"])
def test_a_pass_without_a_trace(kind: str) -> None:
    step = chain_of("exact", own(kind, "features: 12")).steps[0]
    x = batches(1)[0][0]
    step.forward(1, x)
    before = {k: v.clone() for k, v in step.layers.state_dict().items()}
    buffer = next(step.layers.buffers())
    step.forward_again(x)
    assert next(step.layers.buffers()) is buffer
    for name, value in step.layers.state_dict().items():
        assert torch.equal(value, before[name])

"""Chains whose labels stay at the tail: what needs them upstream, and what does not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from dni_runtime.core.interfaces import GradientInterface
from dni_runtime.core.step import ModuleStep
from dni_runtime.data import describe
from dni_runtime.errors import SpecError
from dni_runtime.link.contract import LinkContract
from dni_runtime.packing import no_labels
from dni_runtime.resolve.resolve import worker_specs
from dni_runtime.spec import Choice, DataInfo, WorkerSpec, parse_chain
from tests.specs import float32, int64, linear, refused, specs_of


class Own(GradientInterface):
    """A user's interface."""


INFO = DataInfo(sample=float32(12), label=int64(), classes=3)
CHAIN = """\
name: small
data: {batch_size: 16, labels: tail}
%(more)s
""" + linear(12, 8, 8, 3, between="ReLU")
ALONE = "{synthetic: {conditioned: false}}"


def specs(more: str = "") -> tuple[WorkerSpec, ...]:
    return specs_of(CHAIN % {"more": more}, INFO)


def test_only_the_tail_has_labels() -> None:
    a, b, c = specs()
    assert [one.labelled for one in (a, b, c)] == [False, False, True]
    assert c.tail is not None
    assert c.tail.labels is not None
    assert a.head is not None
    assert a.head.data.labels is not None
    for end, edge in ((a, a.targets[0]), (b, b.sources[0]), (b, b.targets[0]), (c, c.sources[0])):
        contract = LinkContract.of(end, edge)
        assert contract.label.shape == (0,)
        assert contract.label.buffer_bytes == 0
    labelled = specs_of(CHAIN.replace(", labels: tail", "") % {"more": ""}, INFO)
    assert labelled[0].link_hash(*labelled[0].targets) != a.link_hash(*a.targets)


def test_the_default_interface_needs_none() -> None:
    wanted = Choice(name="delayed", args={"max_late": 1, "predict": True})
    for one in specs()[:-1]:
        assert one.interface is not None
        assert one.interface.name == "delayed"
        assert one.interface.args.items() >= wanted.args.items()


@pytest.mark.parametrize(
    "interface",
    [
        "mixed", "local", "corrected", "synthetic", "{synthetic: {synthesizer: critic}}",
        "{mixed: {synthetic: {conditioned: false}}}",
    ],
)  # fmt: skip
def test_interfaces_that_need_labels_are_refused(interface: str) -> None:
    for more, name, at in (
        (f"defaults: {{interface: {interface}}}", "a", ("defaults", "interface")),
        ("defaults: {interface: exact}", "b", ("modules", 1, "interface")),
    ):
        text = CHAIN % {"more": more}
        if name == "b":
            text = text.replace("name: b", f"name: b, interface: {interface}")
        error = refused(text, INFO, "needs labels, and they stay at the tail", at)
        assert f"of module {name!r}" in error.message
        assert error.hint == "use 'exact', 'delayed' or 'synthetic: {conditioned: false}'"


def test_synthesizers_that_need_labels_are_refused() -> None:
    wrong = "{synthetic: {conditioned: false, synthesizer: critic}}"
    with pytest.raises(SpecError, match="'critic' needs class labels"):
        specs(f"defaults: {{interface: {wrong}}}")


def test_a_users_interface_must_say_that_it_needs_none() -> None:
    """The tests' own class says nothing."""
    own = f"{{import: '{__name__}:Own'}}"
    with pytest.raises(SpecError, match="needs labels"):
        specs(f"defaults: {{interface: {own}}}")


def test_synthetic_inputs_are_refused() -> None:
    more = f"defaults: {{interface: {ALONE}}}\nlinks: {{synthetic_inputs: gone}}"
    with pytest.raises(SpecError, match="inputs are predicted from labels") as caught:
        specs(more)
    assert caught.value.location == ("links", "synthetic_inputs")


def test_a_single_module_is_refused() -> None:
    text = "name: one\ndata: {labels: tail}\nmodules: [{name: a, layers: [{Linear: {in_features: 12, out_features: 3}}]}]"  # noqa: E501
    refused(text, INFO, "the chain's only module reads samples and labels")


@pytest.mark.parametrize("interface", ["exact", "delayed", ALONE, "none"])
def test_modules_learn_the_same_without_labels(interface: str) -> None:
    """With an ignored class, too: with labels a synthesizer leaves those samples out."""
    loss = "loss: {CrossEntropyLoss: {ignore_index: 0}}"
    (a, *_) = specs(f"{loss}\ndefaults: {{interface: {interface}}}")
    draw = torch.Generator().manual_seed(1)

    def trained(labels: Callable[[int], torch.Tensor]) -> list[torch.Tensor]:
        draw.manual_seed(1)
        step = ModuleStep(a)
        for id in range(1, 6):
            h_BH = step.forward(id, torch.randn(16, 12, generator=draw))
            step.update(labels(16))
            step.late_gradient(id, torch.randn(h_BH.shape, generator=draw))
        state = [*step.layers.state_dict().values()]
        return [*state, *step.interface.state_dict().values()] if step.interface else state

    nothing, zeros = trained(no_labels), trained(lambda count: torch.zeros(count).long())
    assert all(torch.equal(one, two) for one, two in zip(nothing, zeros, strict=True))
    first = ModuleStep(a).layers.state_dict().values()
    moved = any(not torch.equal(one, two) for one, two in zip(nothing, first, strict=False))
    assert moved == (interface != "none")


def test_a_stand_in_of_the_other_owners_data_changes_no_spec(tmp_path: Path) -> None:
    """Of zeros, with the highest class once: what each side checks its chain with."""
    draw = np.random.default_rng(1)
    x, y = draw.normal(size=(40, 12)).astype(np.float32), draw.integers(0, 3, 40)
    zeros, highest = np.zeros_like(x), np.eye(1, 40, dtype=int)[0] * 2
    hashes = []
    for name, xs, ys in (("both", x, y), ("hospital", x, highest), ("insurer", zeros, y)):
        folder = tmp_path / name
        folder.mkdir()
        np.savez(folder / "x.npz", x_train=xs[:30], x_eval=xs[30:])
        np.savez(folder / "y.npz", y_train=ys[:30], y_eval=ys[30:])
        data = f"dataset: npz, path: {folder}/x.npz, labels: {{path: {folder}/y.npz}}"
        chain = parse_chain((CHAIN % {"more": ""}).replace("labels: tail", data))
        hashes.append([one.hash for one in worker_specs(chain, describe(chain.data, folder))])
    assert hashes[0] == hashes[1] == hashes[2]

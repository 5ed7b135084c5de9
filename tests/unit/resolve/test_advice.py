"""Advice on valid chains."""

from __future__ import annotations

import pytest

from dni_runtime.resolve.advice import RECIPE, advice
from dni_runtime.spec import DataInfo
from tests.replicas import replicas
from tests.specs import float32, int64, specs_of

INFO = DataInfo(sample=float32(16), label=int64(), classes=4)
CHAIN = """\
name: net
defaults: {interface: %s}
modules:
  - {name: a, layers: [{Linear: {in_features: 16, out_features: 16}}, %s]}
  - {name: b, layers: [{Linear: {in_features: 16, out_features: 16}}, ReLU]}
  - {name: c, layers: [{Linear: {in_features: 16, out_features: 4}}]}
"""
NORM = "{Residual: [{BatchNorm1d: {num_features: 16}}]}"
TRANSFORMER = "{TransformerEncoderLayer: {d_model: 16, nhead: 2}}"


@pytest.mark.parametrize(
    ("interface", "layer", "named"),
    [
        ("mixed", "ReLU", "modules 'a', 'b' have"),
        ("synthetic", NORM, "module 'b' has"),
        ("local", "ReLU", None),
        ("delayed", "ReLU", None),
    ],
)
def test_predicted_gradients_want_normalisation(
    interface: str, layer: str, named: str | None
) -> None:
    found = advice(specs_of(CHAIN % (interface, layer), INFO))
    assert len(found) == (named is not None)
    assert named is None or found[0].startswith(named)


@pytest.mark.parametrize(("interface", "warned"), [("local", True), ("exact", False)])
def test_attention_wants_true_gradients(interface: str, warned: bool) -> None:
    found = advice(specs_of(CHAIN % (interface, TRANSFORMER), INFO))
    assert len(found) == warned
    assert not warned or found[0].startswith("module 'a' has attention")


def test_late_gradients_of_attention_want_muon() -> None:
    """The settings that the warning names are accepted, and there is none with them."""
    late = "delayed, optimizer: %s, groups: %s"
    (found,) = advice(specs_of(CHAIN % (late % ("AdamW", "[]"), TRANSFORMER), INFO))
    assert found.startswith("module 'a' has late gradients of attention")
    assert found.endswith(f"in 'defaults': {RECIPE}")
    groups = RECIPE.removeprefix("groups: ")
    assert advice(specs_of(CHAIN % (late % ("AdamW", groups), TRANSFORMER), INFO)) == []
    assert advice(specs_of(CHAIN % (late % ("SGD", "[]"), TRANSFORMER), INFO)) == []
    assert advice(specs_of(CHAIN % (late % ("AdamW", "[]"), "ReLU"), INFO)) == []


def test_what_is_wrong_at_several_cuts() -> None:
    normalisation, attention = advice(specs_of(CHAIN % ("mixed", TRANSFORMER), INFO))
    assert normalisation.startswith("module 'b' has no normalisation")
    assert attention.startswith("module 'a' has attention")


@pytest.mark.parametrize(
    ("strategy", "compression", "warns"),
    [
        ("diloco", "top-k", True),
        ("{diloco: {lr: 0.5}}", "{top-k: {share: 0.04}}", True),
        ("diloco", "{top-k: {share: 0.05}}", False),
        ("diloco", "int8", False),
        ("local-sgd", "top-k", False),
    ],
)
def test_an_outer_momentum_needs_more_than_the_largest_numbers(
    strategy: str, compression: str, warns: bool
) -> None:
    found = advice(replicas(f"{strategy}, compression: {compression}"))
    assert any("'top-k' below a share of 0.05" in one for one in found) is warns


def test_a_schedule_that_ends_before_the_training() -> None:
    text = CHAIN % ("exact, schedule: {CosineAnnealingLR: {T_max: %s}}", "ReLU")
    (found,) = advice(specs_of("epochs: 9\n" + text % 4, INFO))
    assert "ends after 4 of 9 epochs: 'T_max: auto' is the whole training" in found
    assert advice(specs_of("epochs: 9\n" + text % "auto", INFO)) == []

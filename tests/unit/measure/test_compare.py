"""What ``dnictl compare`` trains, and how it reads what came out."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from dni_runtime.errors import SpecError, UsageError
from dni_runtime.measure.compare import (
    ComparedMetric,
    Method,
    Point,
    Trial,
    default_target,
    panels,
    read_interfaces,
    read_strategies,
    seconds_to,
    summarize,
    variant,
)
from dni_runtime.plan.prepare import CheckedChain, prepare
from dni_runtime.spec import Choice

CHAIN = """\
name: small
seed: 5
data: {dataset: digits, batch_size: 64, flatten: true}
defaults: {interface: {synthetic: {learn_every: 4}}}
modules:
  - {name: a, layers: [{Linear: {in_features: 64, out_features: 16}}]}
  - {name: b, layers: [{Linear: {in_features: 16, out_features: 16}}], interface: {local: {hidden: 7}}}
  - {name: c, layers: [{Linear: {in_features: 16, out_features: 10}}]}
"""  # noqa: E501


@pytest.fixture
def small(tmp_path: Path) -> CheckedChain:
    (tmp_path / "chain.yaml").write_text(CHAIN)
    return prepare(tmp_path / "chain.yaml")


def options(prepared: CheckedChain) -> list[tuple[str, object]]:
    found = []
    for module in prepared.chain.modules[:-1]:
        assert module.interface is not None
        arguments = module.interface.args
        synthetic = arguments.get("synthetic", arguments)
        local = arguments.get("local", arguments)
        found.append((module.interface.name, (synthetic.get("learn_every"), local.get("hidden"))))
    return found


def test_a_variant_keeps_the_options_that_it_can(small: CheckedChain) -> None:
    assert options(variant(small, Method("synthetic"), 5)) == [
        ("synthetic", (4, None)), ("synthetic", (1, None)),
    ]  # fmt: skip
    mixed = variant(small, Method("mixed"), 6)
    assert options(mixed) == [("mixed", (4, None)), ("mixed", (1, 7))]
    assert options(variant(mixed, Method("local"), 6)) == [
        ("local", (None, None)),
        ("local", (None, 7)),
    ]
    assert {worker.seed for worker in mixed.workers} == {6}
    assert mixed.workers[-1].interface is None
    assert variant(small, Method("none"), 5).workers[0].gradients_in == 0


def test_an_interface_that_does_not_fit(small: CheckedChain) -> None:
    with pytest.raises(SpecError, match="nowhere"):
        variant(small, Method("nowhere:Missing"), 5)


@pytest.mark.parametrize(
    ("names", "labelled", "message"),
    [
        ([], ["a b=mixed", "a_b=mixed"], "duplicate method 'a_b'"),
        (["exact", "sinthetic"], [], "did you mean 'synthetic'"),
        (["exact", "exact"], [], "duplicate method 'exact'"),
        (["exact"], ["exact={synthetic: {}}"], "duplicate method 'exact'"),
        ([], ["backprop=exact"], "duplicate method 'backprop'"),
        ([], ["a={mixd: {}}"], "did you mean 'mixed'"),
        ([], ["a={synthetic"], "not a valid gradient interface"),
        ([], ["a=[synthetic]"], "not a valid gradient interface"),
    ],
)
def test_methods_that_cannot_be(names: list[str], labelled: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        read_interfaces(names, labelled)


def test_methods(small: CheckedChain) -> None:
    methods = read_interfaces(
        ["exact", "mine:Interface"],
        ["DNI={synthetic: {conditioned: false, optimizer: {Adam: {lr: 1e-4}}}}"],
    )
    assert list(methods) == ["exact", "mine:Interface", "DNI"]
    chain = variant(small, methods["DNI"], 5).chain
    for module in chain.modules[:-1]:
        assert module.interface is not None
        assert module.interface.args["conditioned"] is False
        assert module.interface.args["learn_every"] == 1
        assert module.interface.args["optimizer"] == {"Adam": {"lr": 1e-4}}


def test_strategies(small: CheckedChain) -> None:
    written = ["slow={diloco: {lr: 0.5}}", "int8=diloco, every: 5, compression: int8"]
    methods = read_strategies(["local-sgd"], written, 3)
    assert list(methods) == ["no-replicas", "local-sgd", "slow", "int8"]
    found = {label: variant(small, method, 5) for label, method in methods.items()}
    assert {label: [one.replicas for one in prepared.chain.modules]
            for label, prepared in found.items()} == {
        "no-replicas": [1, 1, 1], "local-sgd": [1, 3, 1], "slow": [1, 3, 1], "int8": [1, 3, 1],
    }  # fmt: skip
    replication = found["int8"].chain.replication
    assert (replication.every, replication.compression) == (5, Choice(name="int8"))
    assert found["slow"].chain.replication.every == 32
    assert found["slow"].workers[1].strategy == Choice(name="diloco", args={"lr": 0.5})
    assert found["slow"].workers[0].interface == small.workers[0].interface
    with pytest.raises(UsageError, match="unknown strategy 'local-sdg'"):
        read_strategies(["local-sdg"], [], 2)
    with pytest.raises(UsageError, match="'diloco, evry: 5' is not a valid strategy"):
        read_strategies([], ["x=diloco, evry: 5"], 2)
    with pytest.raises(UsageError, match="duplicate method 'no-replicas'"):
        read_strategies([], ["no-replicas=diloco"], 2)


def test_only_modules_that_have_replicas_get_more(tmp_path: Path) -> None:
    more = "  - {name: d, layers: [{Linear: {in_features: 10, out_features: 10}}]}\n"
    text = CHAIN.replace("{name: b,", "{name: b, replicas: 2,") + more
    (tmp_path / "chain.yaml").write_text(text)
    found = variant(prepare(tmp_path / "chain.yaml"), Method(replicas=4), 5)
    assert [one.replicas for one in found.chain.modules] == [1, 4, 1, 1]


def test_of_two_modules_both_get_replicas(tmp_path: Path) -> None:
    lines = [line for line in CHAIN.splitlines() if "name: b" not in line]
    (tmp_path / "chain.yaml").write_text("\n".join(lines))
    found = variant(prepare(tmp_path / "chain.yaml"), Method(replicas=2), 5)
    assert [one.replicas for one in found.chain.modules] == [2, 2]


ACCURACY, LOSS = ComparedMetric("accuracy", True), ComparedMetric("loss", False)


def trial(method: str, seed: int, *values: float) -> Trial:
    points = tuple(Point(n, 2.0 * n, value) for n, value in enumerate(values, start=1))
    return Trial(method, seed, points, 100.0 + seed, "")


TRIALS = [
    trial("backprop", 0, 0.5, 0.90), trial("backprop", 1, 0.5, 0.92),
    trial("mixed", 0, 0.7, 0.95), trial("mixed", 1, 0.90, 0.85),
    trial("none", 0, 0.1, 0.2), trial("none", 1, 0.1, 0.905),
]  # fmt: skip


def test_rows() -> None:
    target = default_target(TRIALS, ACCURACY)
    assert target == pytest.approx(0.90)
    backprop, mixed, none = summarize(TRIALS, ACCURACY, target)
    assert (mixed.mean, mixed.low, mixed.high) == (pytest.approx(0.90), 0.85, 0.95)
    assert (mixed.reached, mixed.trials, mixed.target_s) == (2, 2, 3.0)  # 4 s and 2 s
    assert (none.reached, none.target_s) == (1, None)
    assert backprop.samples_per_s == 100.5


@pytest.mark.parametrize("values", [(0.9, math.nan, 0.8), (math.nan, 0.8, 0.9)])
def test_what_is_not_finite_is_not_hidden_by_its_place(values: tuple[float, ...]) -> None:
    trials = [trial("backprop", seed, value) for seed, value in enumerate(values)]
    (row,) = summarize(trials, ACCURACY, None)
    assert all(map(math.isnan, (row.mean, row.low, row.high)))
    assert default_target(trials, ACCURACY) is None


def test_the_test_set_has_a_figure_of_its_own() -> None:
    tested = [replace(one, test=test) for one, test in zip(TRIALS[:2], (0.8, 0.7), strict=True)]
    (row,) = summarize(tested, "accuracy", None)
    assert (row.mean, row.test) == (pytest.approx(0.91), pytest.approx(0.75))
    assert summarize(TRIALS, "accuracy", None)[0].test is None


def test_a_loss_falls_to_its_target() -> None:
    falling = trial("mixed", 0, 3.0, 2.0, 1.0)
    assert seconds_to(falling, LOSS, 2.0) == 4.0
    assert seconds_to(falling, LOSS, 0.5) is None
    assert default_target([trial("backprop", 0, 1.0)], LOSS) is None
    assert summarize([falling], LOSS, None)[0].target_s is None


def test_curves_are_means_over_seeds() -> None:
    epochs, seconds = panels(TRIALS, "accuracy")
    assert [panel.x for panel in (epochs, seconds)] == ["epoch", "seconds of training"]
    assert list(epochs.curves) == list(seconds.curves) == ["backprop", "mixed", "none"]
    assert epochs.curves["mixed"] == [(1, pytest.approx(0.8)), (2, pytest.approx(0.9))]
    assert seconds.curves["backprop"] == [(2, 0.5), (4, pytest.approx(0.91))]

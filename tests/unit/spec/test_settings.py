"""Settings of a chain by their paths: names, values, other versions, differences."""

from __future__ import annotations

from typing import Any

import pytest

from dni_runtime.errors import UsageError
from dni_runtime.spec import Choice
from dni_runtime.spec.load import parse_chain
from dni_runtime.spec.settings import differing, read_setting, read_value, with_settings, words_of

CHAIN = parse_chain("""\
name: small
data: {dataset: digits, batch_size: 64}
defaults: {optimizer: {Adam: {lr: 0.002}}, interface: mixed}
modules:
  - name: bottom
    layers: [{Linear: {in_features: 64, out_features: 32}}, ReLU]
  - name: top
    clip: {norm: 1}
    layers: [{Linear: {in_features: 32, out_features: 10}}]
""")


@pytest.mark.parametrize(
    ("text", "path", "values"),
    [
        ("lr=1e-3,3e-3", "defaults.optimizer.Adam.lr", [1e-3, 3e-3]),
        ("optimizer.lr=1", "defaults.optimizer.Adam.lr", [1]),
        ("optimizer=SGD,{Adam: {lr: 1}}", "defaults.optimizer", ["SGD", {"Adam": {"lr": 1}}]),
        ("seed=0..2", "seed", [0, 1, 2]),
        ("batch_size=32", "data.batch_size", [32]),
        ("window=4", "links.window", [4]),  # not in the file
        ("interface=mixed,local", "defaults.interface", ["mixed", "local"]),  # what the file has
        ("links.interface=ib0", "links.interface", ["ib0"]),
        ("init.file=runs/a", "defaults.init.file", ["runs/a"]),  # below what is not set
        ("norm=1,2", "modules.top.clip.norm", [1, 2]),
        ("bottom.out_features=8", "modules.bottom.layers.0.Linear.out_features", [8]),
        ("defaults.optimizer.Adam.eps=1e-6", "defaults.optimizer.Adam.eps", [1e-6]),
        ("defaults.interface.a=1", "defaults.interface.mixed.a", [1]),  # which is a word there
        ("defaults.interface.mixed.a=1", "defaults.interface.mixed.a", [1]),
    ],
)
def test_a_name_means_one_setting(text: str, path: str, values: list[Any]) -> None:
    found, given = read_setting(text, CHAIN)
    assert (found, list(given)) == (path, values)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("sed=1", "did you mean 'seed'?"),
        ("learning_rate=1", "an optimizer's is 'lr'"),
        ("weight_decay=1", "the chain has no setting 'weight_decay'"),
        ("out_features=1", "modules.bottom.layers.0.Linear.out_features, modules.top"),
        ("seed=", "'seed=' has no values"),
        ("seed=3..1", "has no values"),
        ("seed=[1", "not valid YAML"),
    ],
)
def test_a_name_or_values_that_mean_nothing(text: str, words: str) -> None:
    with pytest.raises(UsageError) as caught:
        read_setting(text, CHAIN)
    assert words in str(caught.value)


def test_the_rate_of_no_optimizer() -> None:
    """The default one differs between modules; what the hint says can be given."""
    chain = parse_chain("name: small\nmodules: [{name: top, layers: [ReLU]}]")
    with pytest.raises(UsageError, match=r"'lr'\n.*'optimizer=\{Adam: \{lr: 0.01\}\}'") as caught:
        read_value("lr=0.01", chain)
    given = str(caught.value).split("'")[-2]
    assert read_value(given, chain) == ("defaults.optimizer", {"Adam": {"lr": 0.01}})


def test_one_value() -> None:
    assert read_value("lr=1e-3", CHAIN) == ("defaults.optimizer.Adam.lr", 1e-3)
    with pytest.raises(UsageError, match=r"'seed=1,2' has 2 values"):
        read_value("seed=1,2", CHAIN)


def test_other_values() -> None:
    settings = {"seed": 7, "modules.top.layers.0.Linear.bias": False, "links.window": 2}
    changed = with_settings(CHAIN, settings)
    assert (changed.seed, changed.links.window) == (7, 2)
    assert changed.modules[1].layers[0].args["bias"] is False
    assert changed.model_fields_set == CHAIN.model_fields_set | {"seed", "links"}
    assert words_of(settings) == "seed=7 bias=False window=2"
    with pytest.raises(UsageError, match=r"seed=x: seed: 'x' is not a whole number"):
        with_settings(CHAIN, {"seed": "x"})


def test_keywords_of_what_is_written_as_a_word() -> None:
    names = ("defaults.interface.local_weight", "defaults.interface.mixed.similarity")
    settings = dict(read_value(f"{name}=0.3", CHAIN) for name in names)
    interface = with_settings(CHAIN, settings).defaults.interface
    assert interface == Choice(name="mixed", args={"local_weight": 0.3, "similarity": 0.3})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("data.batch_size.x=1", "x=1: 'data.batch_size' has no 'x'"),
        ("modules.top.layers.1=Tanh", "1=Tanh: 'modules.top.layers' has no '1'"),
        ("modules.bottom.layers.1.x=1", "x=1: 'modules.bottom.layers.1.ReLU' has no 'x'"),
        ("name.x=1", "x=1: name: "),
        ("data.dataset.x=1", "x=1: data.dataset: "),
    ],
)
def test_settings_of_what_has_none(text: str, message: str) -> None:
    path, value = read_value(text, CHAIN)
    with pytest.raises(UsageError, match=message):
        with_settings(CHAIN, {path: value})


def test_differences_are_named_once() -> None:
    def document(lr: float, seed: int, **more: object) -> dict[str, Any]:
        modules = [{"name": name, "optimizer": {"Adam": {"lr": lr}}} for name in ("a", "b")]
        return {"name": "x", "seed": seed, "modules": modules, **more}

    assert differing([document(1, 0), document(2, 0, epochs=3), document(2, 1)]) == [
        {"seed": 0, "modules.a.optimizer.Adam.lr": 1, "epochs": None},
        {"seed": 0, "modules.a.optimizer.Adam.lr": 2, "epochs": 3},
        {"seed": 1, "modules.a.optimizer.Adam.lr": 2, "epochs": None},
    ]
    assert differing([document(1, 0)]) == [{}]
    assert differing([]) == []

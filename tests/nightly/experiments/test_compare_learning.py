"""scripts/experiments/compare_learning.py on the digits of the package."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import compare_learning
import pytest
import remember

from dni_runtime.data import describe
from dni_runtime.spec import Choice
from dni_runtime.spec.model import ModuleDefaults

CHAIN = Path(__file__).resolve().parents[3] / "definitions" / "chains" / "cnn.yaml"
SMALL = "{epochs: 2, data: {validation: 200, train_limit: 600}}"


def table(
    results: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *given: str
) -> list[list[str]]:
    words = ["x", str(CHAIN), "--with", SMALL, "--results", str(results), *given]
    monkeypatch.setattr(sys, "argv", words)
    compare_learning.main()
    lines = capsys.readouterr().out.splitlines()
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]


def trainings(results: Path) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in results.read_text().splitlines()]
    return [one for one in found if "test" in one]


def refuse(*given: Any) -> dict[str, float]:
    raise AssertionError(given)


def test_each_method_has_the_rate_that_is_best_on_the_validation_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    results = tmp_path / "learning.jsonl"
    words = ["--sweep", "1e-5,4e-3", "--seeds", "2", "--delay", "0,0/2"]
    methods = ["local", "sgd={interface: delayed, optimizer: {SGD: {momentum: 0.9}}}"]
    header, _, *rows = table(results, monkeypatch, capsys, *words, *methods)
    assert header == [
        "method", "delay", "learning rate", "validation", "test", "gap closed", "time"
    ]  # fmt: skip
    assert [row[:2] for row in rows] == [
        ["backprop", ""], ["none", ""],
        ["local", "0"], ["local", "0/2"], ["sgd", "0"], ["sgd", "0/2"],
    ]  # fmt: skip
    assert {row[2] for row in rows} == {"0.004"}
    validation, test = ([float(row[at].split(" ± ")[0]) for row in rows] for at in (3, 4))
    assert validation[0] > validation[1] + 1
    assert test[0] > test[1] + 1
    for row, value in zip(rows[2:], test[2:], strict=True):
        share = (value - test[1]) / (test[0] - test[1])
        assert float(row[5].rstrip("%")) == pytest.approx(100 * share, abs=1)
    assert all(float(row[6]) > 0 for row in rows)
    found = trainings(results)
    assert len(found) == 6 * (2 + 1)
    assert {one["seed"] for one in found if one["lr"] == 1e-5} == {0}

    monkeypatch.setattr(compare_learning, "train", refuse)  # nothing is trained again
    monkeypatch.setattr(compare_learning, "time_over_backprop", refuse)
    assert table(results, monkeypatch, capsys, *words, *methods)[2:] == rows


def test_of_a_metric_that_falls_the_lowest_is_best(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chain = compare_learning.read_chain(
        CHAIN, "{metrics: [perplexity], data: {validation: 200, train_limit: 900}, epochs: 1}"
    )
    figures = {1e-3: 2.0, 1e-2: 1.5, 1e-1: 4.0}
    monkeypatch.setattr(
        compare_learning,
        "train",
        lambda chains, base, one: {"validation": figures[one["lr"]], "test": 1.0 + one["seed"]},
    )
    monkeypatch.setattr(compare_learning, "time_over_backprop", lambda *_: {"time": 1.0})
    rows = compare_learning.compare(
        chain,
        CHAIN.parent,
        compare_learning.read_methods([]),
        rates=list(figures),
        seeds=2,
        delays=[0],
        results=tmp_path / "results.jsonl",
    )
    assert [row[2:5] for row in rows] == [["0.01", "1.500 ± 0.000", "1.500 ± 0.707"]] * 2


def test_methods() -> None:
    methods = compare_learning.read_methods(
        ["mixed", "wide={local: {pool: 4}}", "slow={interface: exact, accumulate: 2}", "none"]
    )
    assert methods == {
        "backprop": {},
        "none": {"interface": "none"},
        "mixed": {"interface": "mixed"},
        "wide": {"interface": {"local": {"pool": 4}}},
        "slow": {"interface": "exact", "accumulate": 2},
    }
    chain = compare_learning.read_chain(CHAIN, "{}")
    slow = compare_learning.by_method(chain, methods["slow"])
    assert [slow.setting(index, "accumulate") for index in range(3)] == [2, 2, 2]
    assert slow.setting(0, "optimizer") == chain.setting(0, "optimizer")
    info = describe(chain.data, CHAIN.parent)
    late = chain.model_copy(update={"defaults": ModuleDefaults(interface=Choice(name="delayed"))})
    for one, others in ((slow, {}), (late, {"betas": [0.0, 0.999]})):
        changed = compare_learning.by_rate(one, info, 0.5)
        assert changed.setting(1, "optimizer") == Choice(name="Adam", args={"lr": 0.5} | others)


def test_optimizers_of_groups_keep_their_ratio() -> None:
    groups = (
        "[{parameters: matrices, optimizer: {Muon: {lr: 3e-3}}}, {parameters: x, options: {lr: 1}}]"
    )
    method = f"muon={{optimizer: {{AdamW: {{lr: 1e-3}}}}, groups: {groups}}}"
    chain = compare_learning.read_chain(CHAIN, "{}")
    chain = compare_learning.by_method(chain, compare_learning.read_methods([method])["muon"])
    changed = compare_learning.by_rate(chain, describe(chain.data, CHAIN.parent), 0.5)
    matrices, others = changed.setting(1, "groups")
    assert changed.setting(1, "optimizer").args == {"lr": 0.5}
    assert matrices.optimizer.args == {"lr": pytest.approx(1.5)}
    assert others.options == {"lr": 1}


def test_changes_are_merged() -> None:
    chain = compare_learning.read_chain(CHAIN, "{epochs: 7, data: {batch_size: 32}}")
    assert (chain.epochs, chain.data.batch_size, chain.data.dataset) == (7, 32, "digits")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["local"], "validation part"),
        (["--with", "{epochs: [}", "local"], "not valid YAML"),
        (["--with", "7", "local"], "not a mapping"),
        (["--with", "{epoch: 2}", "local"], "epoch"),
        (["--with", SMALL, "a=local", "a=mixed"], "two methods have the label 'a'"),
        (["--with", SMALL, "a={lokal: {}}"], "lokal"),
        (["--with", SMALL, "--delay", "1/2/3", "local"], "3 links"),
    ],
)
def test_wrong_input(
    words: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = ["--results", str(tmp_path / "results.jsonl"), "--seeds", "1"]
    monkeypatch.setattr(sys, "argv", ["x", str(CHAIN), *words, *results])
    with pytest.raises(SystemExit, match=message):
        compare_learning.main()


def double(one: dict[str, Any]) -> dict[str, Any]:
    return {"value": 2 * one["seed"]}


def test_trainings_in_processes_are_remembered_in_order(tmp_path: Path) -> None:
    results = tmp_path / "results.jsonl"
    wanted = [{"seed": seed} for seed in range(5)]
    remember.measured(results, wanted[1:2], double)
    found = remember.measured(results, wanted, double, jobs=2)
    assert found == [{"seed": seed, "value": 2 * seed} for seed in range(5)]
    assert len(results.read_text().splitlines()) == 5

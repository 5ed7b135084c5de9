"""What a module's step is made of."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest

from dni_runtime.errors import UsageError
from dni_runtime.measure.module import ModuleCost, Spread, measure_modules
from dni_runtime.plan.prepare import CheckedChain, prepare

CHAIN = """\
name: small
data: {dataset: digits, batch_size: 32, flatten: true}
links: {dtype: bfloat16}
modules:
  - {name: a, layers: [{Linear: {in_features: 64, out_features: 16}}], interface: FIRST}
  - {name: b, layers: [{Linear: {in_features: 16, out_features: 8}}], interface: exact}
  - {name: c, layers: [{Linear: {in_features: 8, out_features: 10}}]}
"""


def prepared(tmp_path: Path, first: str) -> CheckedChain:
    (tmp_path / "chain.yaml").write_text(CHAIN.replace("FIRST", first))
    return prepare(tmp_path / "chain.yaml")


def costs(tmp_path: Path, first: str) -> list[ModuleCost]:
    return measure_modules(prepared(tmp_path, first), repetitions=7, seconds=0.02)


def test_spread() -> None:
    assert Spread.of([3, 1, 8, 4]) == Spread(3.5, 1, 8)


def test_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # of this thread alone: on a busy machine the time that others take falls on some of the parts
    monkeypatch.setattr("dni_runtime.measure.module._clock", lambda device: time.thread_time)
    a, b, c = costs(tmp_path, "{synthetic: {synthesizer: linear, learn_every: 4}}")
    assert (a.module, a.batch, a.threads, a.device) == ("a", 32, 1, "cpu")
    assert min(a.forward_us.low, a.signal_us.low, a.learn_us.low, a.backward_us.median) > 0
    parts_us = a.forward_us.median + a.backward_us.median + a.signal_us.median
    assert a.step_us.median == pytest.approx(parts_us + a.learn_us.median / 4, rel=0.5)
    assert a.learn_every == 4
    assert 0 < a.interface_share < 1
    assert a.samples_per_s == pytest.approx(32 / a.step_us.median * 1e6)
    assert (a.parameters, a.interface_parameters) == (64 * 16 + 16, (16 + 10) * 16 + 16)
    assert (a.down_bytes, a.up_bytes) == (32 * 16 * 2, 0)
    assert (b.signal_us.high, b.learn_us.high, b.interface_share) == (0, 0, 0)
    assert b.backward_us.low > 0, "made when the true gradient comes"
    assert (b.down_bytes, b.up_bytes) == (32 * 8 * 2, 32 * 16 * 2 / 4)
    assert (c.interface_parameters, c.learn_every, c.down_bytes) == (0, 0, 0)


def test_heads_that_have_data_of_their_own(tmp_path: Path) -> None:
    x, y = np.zeros((64, 64), np.float32), np.arange(64) % 10
    for number in (1, 2):
        np.savez(tmp_path / f"{number}.npz", x_train=x, y_train=y, x_eval=x, y_eval=y)
    text = CHAIN.replace("dataset: digits", "dataset: npz, path: '{replica}.npz', drop_last: true")
    text = text.replace("name: a,", "name: a, replicas: 2,").replace("exact", "mixed")
    (tmp_path / "chain.yaml").write_text(text.replace("FIRST", "mixed"))
    found = measure_modules(prepare(tmp_path / "chain.yaml"), repetitions=3, seconds=0.01)
    assert [cost.module for cost in found] == ["a", "b", "c"]


@pytest.mark.parametrize("interface", ["mixed", "local", "delayed", "none"])
def test_every_interface(interface: str, tmp_path: Path) -> None:
    a = costs(tmp_path, interface)[0]
    assert a.step_us.low > 0
    assert (a.learn_us.low > 0) == (interface == "mixed")
    assert (a.signal_us.low > 0) == (interface in ("mixed", "local"))


def test_schedules_do_not_end(tmp_path: Path) -> None:
    schedule = "schedule: {OneCycleLR: {max_lr: 0.1, total_steps: 2}}, schedule_every: batch"
    (a, *_) = costs(tmp_path, f"mixed, {schedule}")
    assert a.step_us.low > 0


def test_only_one(tmp_path: Path) -> None:
    chain = prepared(tmp_path, "mixed")
    found = measure_modules(chain, ["b"], repetitions=1, seconds=0.01)
    assert [cost.module for cost in found] == ["b"]
    with pytest.raises(UsageError, match="no module 'd'"):
        measure_modules(chain, ["d"], repetitions=1, seconds=0.01)

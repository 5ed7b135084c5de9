"""What a worker does about numbers that are not finite."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from dni_runtime.core.step import ModuleStep
from dni_runtime.errors import DataError, DivergedError
from dni_runtime.files import read_json
from dni_runtime.run.documents.reports import DivergedValue
from dni_runtime.run.rundir import RunDir
from dni_runtime.worker.device import Copies, HostCopy
from dni_runtime.worker.divergence import Divergence
from dni_runtime.worker.metrics import MetricsWriter
from tests.unit.worker.test_metrics import workers

GOOD, BAD = torch.ones(4, 5), torch.full((4, 5), math.nan)
Make = Callable[..., tuple[Divergence, ModuleStep, MetricsWriter]]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    def make(on_nan: str, interface: str = "mixed") -> tuple[Divergence, ModuleStep, MetricsWriter]:
        run = RunDir(tmp_path)
        run.create()
        spec = workers(interface)[0].model_copy(update={"on_nan": on_nan})
        step, metrics = ModuleStep(spec), MetricsWriter(run, spec, 1)
        return Divergence(step, metrics, Copies(step.device)), step, metrics

    return make


@pytest.mark.parametrize(("on_nan", "used"), [("skip", False), ("warn", True)])
def test_an_activation(make: Make, tmp_path: Path, on_nan: str, used: bool) -> None:
    divergence, _, metrics = make(on_nan)
    assert divergence.may_use(6, "the activation", GOOD)
    assert metrics.diverged is None
    assert divergence.may_use(7, "the activation", BAD) is used
    metrics.report.write()
    report = read_json(RunDir(tmp_path).worker("a"))
    assert report is not None
    assert report["diverged"] == {"batch": 7, "what": "the activation", "times": 1}


def test_an_activation_ends_the_run_where_nothing_else_is_said(make: Make) -> None:
    divergence, _, metrics = make("stop")
    with pytest.raises(DataError, match=r"the data is not finite .* at batch 7"):
        divergence.may_use(7, "the data", BAD)
    assert metrics.diverged is not None


@pytest.mark.parametrize("what", ["the data", "the activation from 'a'"])
def test_masks_are_no_divergence(make: Make, what: str) -> None:
    """They consist of minus infinity; other values that are not finite count beside them."""
    divergence, _, metrics = make("stop")
    mask = GOOD.masked_fill(GOOD.cumsum(1) > 3, -math.inf)
    assert divergence.may_use(3, what, mask)
    assert metrics.diverged is None
    for value in (math.inf, math.nan):
        with pytest.raises((DataError, DivergedError), match=f"{what} is not finite.* at batch 4"):
            divergence.may_use(4, what, mask.index_fill(1, torch.tensor(0), value))


@pytest.mark.parametrize("on_nan", ["stop", "skip", "warn"])
def test_a_gradient_that_only_teaches_is_left_out(make: Make, on_nan: str) -> None:
    divergence, _, metrics = make(on_nan)
    assert divergence.may_learn(3, GOOD)
    assert not divergence.may_learn(4, BAD)
    assert metrics.diverged == DivergedValue(batch=4, what="the gradient from 'b'", times=1)


def test_a_gradient_that_updates_the_module_stops_it(make: Make) -> None:
    divergence, *_ = make("stop", "exact")
    with pytest.raises(DivergedError, match="the gradient from 'b' is not finite at batch 4"):
        divergence.may_learn(4, BAD)
    divergence, *_ = make("skip", "exact")
    assert not divergence.may_learn(4, BAD)


def test_a_loss_is_looked_at_when_the_next_one_is_there(make: Make) -> None:
    divergence, *_ = make("stop")
    divergence.note_loss(1, torch.tensor(1.0))
    divergence.note_loss(2, torch.tensor(math.inf))
    with pytest.raises(DivergedError, match="the loss is not finite at batch 2"):
        divergence.note_loss(3, torch.tensor(1.0))


def test_the_last_loss_before_a_checkpoint(make: Make) -> None:
    divergence, *_ = make("stop")
    divergence.note_loss(2, torch.tensor(math.inf))
    with pytest.raises(DivergedError, match="the loss is not finite at batch 2"):
        divergence.weights_finite(3)


@pytest.mark.parametrize("on_nan", ["stop", "skip"])
def test_weights_that_are_not_finite_cannot_be_skipped(make: Make, on_nan: str) -> None:
    divergence, step, _ = make(on_nan)
    assert divergence.weights_finite(1)
    next(step.layers.parameters()).data[0, 0] = math.nan
    with pytest.raises(DivergedError, match="a weight or statistic is not finite at batch 9"):
        divergence.look(9)


def test_weights_where_the_run_goes_on_whatever_happens(make: Make) -> None:
    divergence, step, metrics = make("warn")
    next(step.layers.parameters()).data[0, 0] = math.nan
    assert not divergence.weights_finite(9)
    assert metrics.diverged is not None


def test_what_happens_again_and_again_is_told_ever_less_often(make: Make) -> None:
    divergence, _, metrics = make("skip")
    told = set()
    for id in range(1, 1001):
        divergence.may_use(id, "the activation", BAD)
        assert metrics.diverged is not None
        told.add(metrics.diverged.times)
    assert told == {1 << n for n in range(10)}


def test_a_loss_is_read_where_the_host_does_not_wait(make: Make) -> None:
    """A device computes it later, and the copy that is under way is read with the next batch."""
    divergence, _, _ = make("stop")
    divergence._copies = SimpleNamespace(to_host=lambda loss: HostCopy(loss.clone()))  # type: ignore[assignment]
    loss = torch.tensor(math.nan)
    divergence.note_loss(1, loss)
    loss.zero_()  # the device has gone on
    with pytest.raises(DivergedError, match="the loss is not finite at batch 1"):
        divergence.note_loss(2, loss)

"""Who leaves at an early exit, beside sums written out by hand."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from dni_runtime.core.exits import (
    Answers,
    assess,
    choose,
    early_head,
    head_of,
    leaves,
    may_leave,
    points_lost,
    share_right,
)
from dni_runtime.core.step import ModuleStep
from dni_runtime.errors import DataError
from dni_runtime.spec import Choice
from dni_runtime.spec.predicting import predicting
from tests.unit.core.conftest import Chain
from tests.unit.core.test_graph import DIAMOND, TWO_INPUTS, U_SHAPE, workers


def easy_and_hard(samples: int, seed: int = 0) -> Answers:
    """An early exit that is right as often as it is sure, and an output that is right at 0.9."""
    random = np.random.default_rng(seed)
    sure = random.uniform(0.1, 1.0, samples)
    luck = random.uniform(size=samples)
    right = np.stack([luck < sure, luck < np.maximum(sure, 0.9)])
    confidence = np.stack([sure, np.full(samples, 0.9)]).astype("float32")
    return Answers(torch.from_numpy(confidence), torch.from_numpy(right))


def test_sure_samples_leave() -> None:
    p_BC = torch.tensor([[2.0, 0.0, 0.0], [9.0, 0.0, 0.0], [0.0, 0.0, 0.0]])
    sure = np.exp(2) / (np.exp(2) + 2)
    assert leaves(p_BC, float(sure) - 1e-6).tolist() == [True, True, False]
    assert leaves(p_BC, float(sure) + 1e-6).tolist() == [False, True, False]
    assert leaves(p_BC.bfloat16(), 0.5).tolist() == [True, True, False]
    assert not leaves(p_BC, None).any()


def test_samples_leave_at_the_first_exit_that_is_sure() -> None:
    answers = Answers(
        torch.tensor([[0.9, 0.5, 0.5, 0.9], [0.1, 0.8, 0.1, 0.1], [0.2, 0.2, 0.2, 0.2]]),
        torch.tensor([[1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 1]]).bool(),
    )
    rule = assess(answers, [0.9, 0.8], 30.0)
    assert rule.leave == (0.5, 0.25, 0.25)
    assert answers.early([0.9, 0.8])[1].tolist() == [True, True, True, False]
    assert rule.accuracy == 0.75
    assert rule.lost[1] == -25.0  # the output alone is right twice
    assert assess(answers, [None, 0.8]).leave == (0.0, 0.25, 0.75)
    assert assess(answers, [None, None]).lost[1] == 0.0


def test_the_share_of_right_answers_of_like_confidence() -> None:
    """Of 200 samples each, and never less for more confidence: the least from there on."""
    answers = easy_and_hard(2000)
    bounds, right = share_right(answers.confidence_EN[0], answers.right_EN[0])
    order = np.argsort(answers.confidence_EN[0].numpy(), kind="stable")
    sure, correct = answers.confidence_EN[0].numpy()[order], answers.right_EN[0].numpy()[order]
    starts = range(0, 1801, 25)
    plain = [correct[start : start + 200].mean() for start in starts]
    np.testing.assert_allclose(bounds, [sure[start] for start in starts])
    np.testing.assert_allclose(right, [min(plain[n:]) for n in range(len(plain))])
    assert abs(right - (bounds + 0.045)).max() < 0.12  # it is right as often as it is sure


def test_few_samples_and_equal_confidences() -> None:
    bounds, right = share_right(torch.ones(500), torch.arange(500) < 400)
    assert (bounds.tolist(), len(right)) == ([1.0], 1)
    bounds, right = share_right(torch.tensor([0.3, 0.9]), torch.tensor([False, True]))
    assert (bounds.tolist(), right.tolist()) == ([pytest.approx(0.3)], [0.5])


def test_the_interval_of_what_is_lost() -> None:
    """Bonett and Price 2012, equation of the adjusted interval, written out."""
    whole = torch.tensor([True] * 90 + [False] * 10)
    early = torch.tensor([True] * 84 + [False] * 6 + [True] * 2 + [False] * 8)
    worse, better = 7 / 102, 3 / 102
    spread = 1.96 * np.sqrt((worse + better - (worse - better) ** 2) / 102)
    expected = (100 * (worse - better - spread), 4.0, 100 * (worse - better + spread))
    assert points_lost(whole, early) == pytest.approx(expected)
    low, lost, high = points_lost(whole, whole)
    assert lost == 0
    assert high == -low > 0  # none is lost, but that may be chance


@pytest.mark.parametrize("points", [0.5, 2.0])
def test_the_promise_is_kept_on_other_samples(points: float) -> None:
    """Of twenty draws at most a few break it, by chance; and a good share leaves."""
    broken, leave = 0, []
    for seed in range(20):
        thresholds = choose(easy_and_hard(4000, seed), points)
        rule = assess(easy_and_hard(100_000, 1000 + seed), thresholds, points)
        broken += rule.lost[1] > points
        leave.append(rule.leave[0])
    assert broken <= 3  # 1 is expected
    assert 0.05 < np.mean(leave) < 0.6


def test_too_few_samples_show_nothing() -> None:
    assert choose(easy_and_hard(200), 0.5) == [None]
    rule = assess(easy_and_hard(200), [0.95], 0.5)
    assert rule.verdict == "not shown"


@pytest.mark.parametrize(
    ("modules", "allowed"), [(DIAMOND, ["a"]), (U_SHAPE, ["a"]), (TWO_INPUTS, [])]
)
def test_where_samples_can_leave(modules: list[str], allowed: list[str]) -> None:
    """Where nothing passes by the module that they leave at."""
    specs = workers(modules)
    early = range(len(specs) - 1)
    assert [specs[index].module for index in early if may_leave(specs, index)] == allowed


@pytest.mark.parametrize("interface", ["mixed", "local: {head: mlp-sr}"])
def test_a_head_comes_with_its_statistics(small: Chain, tmp_path: Path, interface: str) -> None:
    spec = small(f"{{{interface}}}" if ":" in interface else interface)[0]
    step = ModuleStep(spec)
    x_BX, y_B = torch.randn(16, 12), torch.arange(16) % 3
    for id in range(5):
        step.forward(id, 3 * x_BX)
        step.update(y_B)
    assert step.interface is not None
    assert spec.interface is not None
    file = tmp_path / "a.safetensors"
    save_file({f"interface.{k}": v for k, v in step.interface.state_dict().items()}, file)
    served = predicting(small(f"{{{interface}}}" if ":" in interface else interface))[1]
    choice, prefix = head_of(spec.interface)
    head = early_head(served, choice, file, prefix=prefix)
    h_BH = step.evaluate(x_BX)
    assert head is not None
    torch.testing.assert_close(head.predict(h_BH), step.predict(h_BH), rtol=0, atol=0)
    fresh = early_head(served, choice)
    assert fresh is not None
    assert not torch.equal(fresh.predict(h_BH), head.predict(h_BH))  # type: ignore[arg-type]
    assert early_head(spec, Choice(name="synthetic")) is None
    with pytest.raises(DataError, match="does not fit the early head of module 'a'"):
        early_head(served, choice, file)

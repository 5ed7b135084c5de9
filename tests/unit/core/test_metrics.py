"""Loss and metrics of an evaluation: means over valid labels, however the batches are cut."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dni_runtime.core.evaluation import EvaluationSums
from dni_runtime.core.losses import ChainLoss, sum_of
from dni_runtime.core.metrics import METRICS, TorchMetric, check_metrics, rises
from dni_runtime.errors import SpecError
from dni_runtime.resolve.resolve import resolved_chain, worker_specs
from dni_runtime.spec import Choice, DataInfo, LossSpec, TensorSpec, parse_chain
from dni_runtime.spec.model import PLAIN_METRICS
from tests.specs import float32, int64, refused, specs_of

F1 = {"task": "multiclass", "num_classes": 4, "average": "macro"}


def loss_of(p: tuple[int, ...], y: tuple[int, ...], name: str = "", **args: Any) -> ChainLoss:
    specs = [float32(*p), int64(*y)]
    return ChainLoss(Choice(name=name or "CrossEntropyLoss", args=args), *specs)


def choices(*metrics: Any) -> list[Choice]:
    return [Choice.model_validate(metric) for metric in metrics]


def run(loss: ChainLoss, p: Tensor, y: Tensor, *metrics: Any, size: int = 5) -> dict[str, float]:
    """An evaluation that is interrupted after each batch, and goes on in another process."""
    state: str | None = None
    for p_BP, y_BY in zip(p.split(size), y.split(size), strict=True):
        evaluation = EvaluationSums(loss, choices(*metrics))
        if state is not None:
            evaluation.merge(json.loads(state))
        evaluation.add(p_BP, y_BY)
        state = json.dumps(evaluation.to_dict())
    assert evaluation.samples == len(p)
    return evaluation.result()


def tokens(layout: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Predictions and labels of 12 samples of 6 tokens; and the valid ones in a row."""
    torch.manual_seed(0)
    p, y = torch.randn(12, 6, 4), torch.randint(0, 4, (12, 6))
    y[torch.rand(12, 6) < 0.6] = -100
    y[5:10] = -100  # a whole batch
    valid = y != -100
    return (p if layout == "last" else p.movedim(-1, 1)), y, p[valid], y[valid]


@pytest.mark.parametrize("layout", ["last", "torch"])
def test_means_are_over_valid_labels(layout: str) -> None:
    p, y, p_NC, y_N = tokens(layout)
    loss = loss_of(tuple(p.shape[1:]), (6,))
    found = run(loss, p, y, "accuracy", "top5", "perplexity", "bits_per_character")
    nats = float(F.cross_entropy(p_NC, y_N))
    assert found == pytest.approx(
        {
            "loss": nats,
            "accuracy": float((p_NC.argmax(1) == y_N).float().mean()),
            "top5": 1.0,
            "perplexity": math.exp(nats),
            "bits_per_character": nats / math.log(2),
        }
    )


def test_a_tagger_that_is_always_right_scores_one() -> None:
    _, y, _, _ = tokens("last")
    p = F.one_hot(y.clamp_min(0), 4).float()
    assert run(loss_of((6, 4), (6,)), p, y, "accuracy")["accuracy"] == 1


def test_weights_weigh_batches_and_smoothing_is_no_perplexity() -> None:
    p, y, p_NC, y_N = tokens("last")
    weight = [1.0, 5.0, 0.5, 2.0]
    loss = loss_of((6, 4), (6,), weight=weight, label_smoothing=0.1)
    found = run(loss, p, y, "perplexity", "accuracy")
    expected = F.cross_entropy(p_NC, y_N, torch.tensor(weight), label_smoothing=0.1)
    assert found["loss"] == pytest.approx(float(expected))
    assert found["perplexity"] == pytest.approx(math.exp(float(F.cross_entropy(p_NC, y_N))))


def test_without_a_valid_label_nothing_is_known() -> None:
    y = torch.full((4, 6), -100)
    found = run(loss_of((6, 4), (6,)), torch.randn(4, 6, 4), y, "accuracy", {"F1Score": F1})
    assert all(math.isnan(value) for value in found.values())
    assert EvaluationSums(loss_of((4,), ()), []).result() == {}


def test_numbers_are_means_over_elements() -> None:
    p, y = torch.randn(7, 3), torch.randn(7, 3)
    spec = float32(3)
    found = run(ChainLoss(Choice(name="MSELoss"), spec, spec), p, y, "mse", "mae")
    assert found["loss"] == pytest.approx(float(F.mse_loss(p, y)))
    assert (found["mse"], found["mae"]) == pytest.approx((found["loss"], float(F.l1_loss(p, y))))


@pytest.mark.parametrize("layout", ["last", "torch"])
def test_torchmetrics_see_valid_labels_only(layout: str) -> None:
    classification = pytest.importorskip("torchmetrics.classification")
    text = pytest.importorskip("torchmetrics.text")
    p, y, p_NC, y_N = tokens(layout)
    loss = loss_of(tuple(p.shape[1:]), (6,))
    auroc = {"num_classes": 4, "thresholds": 20}
    metrics = ({"F1Score": F1}, {"MulticlassAUROC": auroc}, "Perplexity")
    check_metrics(choices(*metrics), loss, *_specs(p, y))
    found = run(loss, p, y, *metrics)
    expected = classification.F1Score(**F1)(p_NC, y_N), text.Perplexity()(p_NC[None], y_N[None])
    assert (found["F1Score"], found["Perplexity"]) == pytest.approx(tuple(map(float, expected)))
    assert found["MulticlassAUROC"] == pytest.approx(
        float(classification.MulticlassAUROC(**auroc)(p_NC, y_N))
    )


def test_torchmetrics_without_class_labels() -> None:
    classification = pytest.importorskip("torchmetrics.classification")
    p, y = torch.randn(12, 1), (torch.rand(12, 1) < 0.5).float()
    loss = ChainLoss(Choice(name="BCEWithLogitsLoss"), *_specs(p, y))
    check_metrics(choices("BinaryF1Score", "PearsonCorrCoef"), loss, *_specs(p, y))
    found = run(loss, p, y, "BinaryF1Score", "MeanSquaredError")
    flat = ChainLoss(Choice(name="BCEWithLogitsLoss"), *_specs(p, y[:, 0]))
    assert run(flat, p, y[:, 0], "BinaryF1Score", "MeanSquaredError") == found
    assert found["BinaryF1Score"] == pytest.approx(
        float(classification.BinaryF1Score()(p.sigmoid(), y.long()))
    )
    assert found["MeanSquaredError"] == pytest.approx(float(F.mse_loss(p, y)))


class Own(torch.nn.Module):
    """A loss of raw scores, as torchmetrics cannot know."""

    def forward(self, p: Tensor, y: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(p, y)


class Told(Own):
    def probabilities(self, p: Tensor) -> Tensor:
        return p.sigmoid()


def test_whether_scores_are_probabilities_is_not_guessed_from_a_batch() -> None:
    pytest.importorskip("torchmetrics.classification")
    torch.manual_seed(0)
    p = 0.4 * torch.randn(24, 1) + 0.3
    y = (p > 0).float()
    terms = [Choice(name="MSELoss"), Choice(name=f"{__name__}:Told")]
    both = sum_of([LossSpec(loss=one) for one in terms], *([one] for one in _specs(p, y)))
    for choice in (both, terms[1]):
        loss = ChainLoss(choice, *_specs(p, y))
        check_metrics(choices("BinaryAccuracy"), loss, *_specs(p, y))
        assert run(loss, p, y, "BinaryAccuracy", size=2)["BinaryAccuracy"] == 1
    loss = ChainLoss(Choice(name=f"{__name__}:Own"), *_specs(p, y))
    check_metrics(choices("PearsonCorrCoef"), loss, *_specs(p, y))
    with pytest.raises(SpecError, match=r"test_metrics:Own does not say(.|\n)*p.sigmoid\(\)"):
        check_metrics(choices("BinaryAccuracy"), loss, *_specs(p, y))


def _specs(p: Tensor, y: Tensor) -> tuple[TensorSpec, TensorSpec]:
    p_spec, y_spec = (
        TensorSpec(shape=tuple(one.shape[1:]), dtype=str(one.dtype)[6:]) for one in (p, y)
    )
    return p_spec, y_spec


def test_trying_a_metric_draws_nothing() -> None:
    pytest.importorskip("torchmetrics")
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    loss = loss_of((4,), ())
    check_metrics(choices({"F1Score": F1}), loss, *_specs(torch.zeros(1, 4), torch.zeros(1).long()))
    assert torch.equal(torch.rand(2), expected)


@pytest.mark.parametrize(
    ("metric", "rising"),
    [
        ("accuracy", True),
        ("mse", False),
        ("perplexity", False),
        ({"F1Score": F1}, True),
        ("MeanSquaredError", False),
        ("PearsonCorrCoef", True),  # these say nothing of it
        ("TweedieDevianceScore", None),
    ],
)
def test_which_metrics_rise(metric: Any, rising: bool | None) -> None:
    if metric not in METRICS:
        pytest.importorskip("torchmetrics")
    assert rises(Choice.model_validate(metric)) is rising


CHAIN = """\
name: net
loss: %s
modules:
  - {name: a, layers: [{Linear: {in_features: 4, out_features: 4}}], interface: local}
  - {name: b, layers: [{Linear: {in_features: 4, out_features: 4}}]}
metrics: %s
"""
INFO = DataInfo(sample=float32(4), label=int64(), classes=4)
NUMBERS = INFO.model_copy(update={"label": float32(4), "classes": None})


@pytest.mark.parametrize(
    ("metrics", "path", "words"),
    [
        ("[acuracy]", "metrics[0]", "did you mean 'accuracy'"),
        ("[loss, accuracy]", "metrics[0]", "leave it out"),
        ("[mse]", "metrics[0]", "compares numbers"),
        ("[accuracy, F1Scor]", "metrics[1]", "did you mean 'F1Score'"),
        ("[accuracy, accuracy]", "metrics[1]", "duplicate"),
        ("[{accuracy: {top_k: 2}}]", "metrics[0].accuracy", "no keywords"),
        ("[F1Score]", "metrics[0].F1Score", "task"),
        ("[{MulticlassF1Score: {num_classes: 3}}]", "metrics[0]", "does not take the chain's"),
        ("[{MulticlassF1Score: {num_classes: 4, average: none}}]", "metrics[0]", "not one number"),
        ("[{MulticlassAUROC: {num_classes: 4}}]", "metrics[0]", "'thresholds: 100'"),
        ("[BLEUScore]", "metrics[0]", "does not take the chain's output"),
        ("[{import: 'json:JSONDecoder'}]", "metrics[0]", "not a Metric"),
    ],
)  # fmt: skip
def test_metrics_that_cannot_be(metrics: str, path: str, words: str) -> None:
    pytest.importorskip("torchmetrics")
    with pytest.raises(SpecError) as caught:
        specs_of(CHAIN % ("CrossEntropyLoss", metrics), INFO)
    assert caught.value.path == path
    assert words in str(caught.value)


@pytest.mark.parametrize("metric", ["accuracy", "perplexity"])
def test_metrics_that_need_class_labels(metric: str) -> None:
    refused(CHAIN % ("MSELoss", f"[{metric}]"), NUMBERS, r"class labels|cross-entropy")


def test_without_torchmetrics_the_message_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("dni_runtime.core.metrics._torchmetrics", dict)
    refused(CHAIN % ("CrossEntropyLoss", "[F1Score]"), INFO, r"dni-runtime\[metrics\]")


def test_the_default_is_accuracy_where_there_are_classes() -> None:
    text = (CHAIN % ("CrossEntropyLoss", "X")).replace("metrics: X\n", "")
    assert [one.name for one in resolved_chain(parse_chain(text), INFO).metrics] == ["accuracy"]
    chain = parse_chain(text.replace("CrossEntropyLoss", "MSELoss"))
    full = resolved_chain(chain, NUMBERS)
    assert full.metrics == ()
    assert resolved_chain(full, NUMBERS) == full
    tail = worker_specs(chain, NUMBERS)[-1].tail
    assert tail is not None
    assert tail.metrics == ()


def test_metrics_are_dumped_as_they_are_written() -> None:
    metrics = ["accuracy", {"F1Score": {"task": "multiclass", "num_classes": 4}}]
    chain = parse_chain(CHAIN % ("CrossEntropyLoss", json.dumps(metrics)))
    assert chain.model_dump(mode="json")["metrics"] == metrics


@pytest.mark.parametrize(
    ("metrics", "given", "expected"),
    [
        ("[accuracy, mse]", [], []),
        ("[F1Score]", ["einops"], ["einops", "torchmetrics>=1.4"]),
        ("[F1Score]", ["TorchMetrics[text]==1.5"], ["TorchMetrics[text]==1.5"]),
        ("[{import: 'own:Metric'}]", ["torchmetrics-extra"],
         ["torchmetrics-extra", "torchmetrics>=1.4"]),
    ],
)  # fmt: skip
def test_images_get_what_metrics_need(metrics: str, given: list[str], expected: list[str]) -> None:
    text = CHAIN % ("CrossEntropyLoss", metrics) + f"image: {{requirements: {json.dumps(given)}}}\n"
    assert list(parse_chain(text).image_to_build.requirements) == expected


def test_the_spec_knows_the_plain_metrics() -> None:
    assert set(METRICS) == PLAIN_METRICS


def test_metrics_that_replicas_cannot_count_together() -> None:
    pytest.importorskip("torchmetrics")
    loss = loss_of((3,), ())
    (wrong, fine) = choices("PearsonCorrCoef", "MeanSquaredError")
    TorchMetric(fine, loss).check_merges("MeanSquaredError", ())
    with pytest.raises(SpecError, match="put together from the parts") as caught:
        TorchMetric(wrong, loss).check_merges("PearsonCorrCoef", ("metrics", 0))
    assert caught.value.location == ("metrics", 0)

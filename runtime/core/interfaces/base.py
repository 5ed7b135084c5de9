"""The protocol of gradient interfaces: what gives a module its error signal.

A gradient interface sits at the output of a module that is not the tail. It answers with an error
signal for a batch at once (:meth:`GradientInterface.signal`), or defers the update until the true
gradient arrives (``pending``). True gradients that arrive late only teach it
(:meth:`GradientInterface.learn`). All gradients are per sample, dL_b/dh_b, not divided by the batch
size: with the mean the targets shrink with the batch and synthesizers stop learning.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, Self

from torch import Tensor, nn

from dni_runtime.spec import Choice, TensorSpec, WorkerSpec
from dni_runtime.spec.named import Frozen

MARGIN = 8
"""Batches kept beyond those that are late: acknowledgements travel, gradients wait in buffers."""


@dataclass(frozen=True)
class Boundary:
    """What stands at a module's output, where the interface is.

    Attributes:
        activation: One sample of the activation h.
        label: One sample's label y.
        prediction: One sample at the chain's output.
        classes: Number of classes, when labels are class indices.
        loss: The chain's loss.
        optimizer: The module's optimizer, for parts that train like the module.
        late: Batches by which true gradients may come late.
    """

    activation: TensorSpec
    label: TensorSpec
    prediction: TensorSpec
    classes: int | None
    loss: Choice
    optimizer: Choice
    late: int = 8

    @classmethod
    def of(cls, worker: WorkerSpec) -> Self:
        """The boundary at a module's output."""
        return cls(
            activation=worker.output,
            label=worker.label,
            prediction=worker.prediction,
            classes=worker.classes,
            loss=worker.loss,
            optimizer=worker.optimizer,
            late=worker.late,
        )


class Signal(NamedTuple):
    """An error signal at a module's output.

    Attributes:
        g_BH: Per-sample gradient dL_b/dh_b, in the activation's shape.
        loss: A local loss (mean over the batch), where the interface has one.
        p_BP: The early head's predictions that the loss is of, detached.
    """

    g_BH: Tensor
    loss: Tensor | None = None
    p_BP: Tensor | None = None


class LateSignal(NamedTuple):
    """What a late gradient taught, when it was measured.

    Attributes:
        error: Squared error of the prediction over the gradient's squared norm; 1 is a prediction
            of zero.
        cosine: Cosine between prediction and gradient, each of the whole batch as one vector:
            samples weigh by their gradients, as in an update. (The mean of the samples' own cosines
            falls while training succeeds: the gradients of samples that are solved are noise.)
    """

    error: Tensor
    cosine: Tensor


@dataclass
class Pending:
    """A batch that still waits for its true gradient.

    Attributes:
        h_BH: The activation; with its graph where the update is deferred, else detached.
        y_BY: The labels.
        x_BX: The input, where the update is deferred.
    """

    h_BH: Tensor
    y_BY: Tensor
    x_BX: Tensor | None = field(default=None)


class GradientInterface(nn.Module):
    """Base class of gradient interfaces; see the module's docstring.

    Attributes:
        Options: The model of its options in the spec.
        trains: Whether the module is trained at all.
        defers: Whether the gradient for upstream waits for the module's own true gradient.
        pending: How many batches may wait for the true gradient that updates the module: 0 when the
            signal comes at once.
        blocks: Whether the module takes no new batch while ``pending`` are waiting; otherwise the
            oldest is given up.
        store: How many batches are kept for late gradients.
    """

    Options: ClassVar[type[Frozen]] = Frozen

    trains: bool = True
    defers: ClassVar[bool] = False
    pending: int = 0
    blocks: bool = False
    store: int = 0

    def __init__(self, boundary: Boundary, options: Any) -> None:
        super().__init__()

    @classmethod
    def gradient_every(cls, options: Any) -> int:
        """Of which batches the true gradient is wanted: every so-many-th by id; 0: of none.

        The module downstream neither computes nor sends the others.
        """
        return 1

    def signal(self, h_BH: Tensor, y_BY: Tensor) -> Signal:
        """The error signal for an activation, at once.

        Args:
            h_BH: The activation, detached.
            y_BY: The labels.
        """
        raise NotImplementedError

    def learn(
        self, h_BH: Tensor, y_BY: Tensor, g_BH: Tensor, *, measure: bool
    ) -> LateSignal | None:
        """Learn from a true gradient.

        Args:
            h_BH: The activation that it belongs to, detached.
            y_BY: The labels of that batch.
            g_BH: The per-sample gradient at h.
            measure: Whether to report the prediction's error, which costs two passes over it.
        """
        return None

    def predict(self, h_BH: Tensor) -> Tensor | None:
        """The early exit's predictions, in the shape of the chain's; None where there is none.

        Changes nothing: neither statistics of BatchNorm nor random numbers.

        Args:
            h_BH: The activation in eval mode.
        """
        return None

    def optimizers(self) -> dict[str, Any]:
        """The interface's own optimizers by name, for checkpoints."""
        return {}

"""The protocol of gradient interfaces, which supply a module's error signal.

A gradient interface sits at the output of a module that is not the tail. It returns an error
signal for a batch at once (:meth:`GradientInterface.signal`), lets the true gradient update the
module when that comes, or both (:class:`Timing`). True gradients may also teach it
(:meth:`GradientInterface.learn`). All gradients are per sample, dL_b/dh_b, not divided by the batch
size: with the mean the targets shrink with the batch and synthesizers stop learning.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any, ClassVar, Literal, NamedTuple, Self, TypeVar

from torch import Tensor, nn

from dni_runtime.errors import SpecError
from dni_runtime.spec import Choice, TensorSpec, WorkerSpec
from dni_runtime.spec.named import Frozen


@dataclass(frozen=True)
class Boundary:
    """A module's output, where the interface is.

    Attributes:
        activation: One sample of the activation h.
        label: One sample's label y.
        prediction: One sample at the chain's output.
        classes: Number of classes, when labels are class indices.
        loss: The chain's loss.
        optimizer: The module's optimizer, for parts that train like the module.
        labelled: Whether the module has its batches' labels; else they are ``[B, 0]``.
    """

    activation: TensorSpec
    label: TensorSpec
    prediction: TensorSpec
    classes: int | None
    loss: Choice
    optimizer: Choice
    labelled: bool = True

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
            labelled=worker.labelled,
        )


class Signal(NamedTuple):
    """An error signal at a module's output.

    Attributes:
        g_BH: Per-sample gradient dL_b/dh_b, in the activation's shape.
        loss: A local loss (mean over the batch), if the interface has one.
        p_BP: The early head's predictions for that loss, detached.
    """

    g_BH: Tensor
    loss: Tensor | None = None
    p_BP: Tensor | None = None


class LateSignal(NamedTuple):
    """Quality of a prediction, measured by a late gradient.

    Attributes:
        error: Squared error of the prediction over the gradient's squared norm; 1 is a prediction
            of zero.
        cosine: Cosine between prediction and gradient, each of the whole batch as one vector:
            samples weigh by their gradients, as in an update. (The mean of the samples' own cosines
            falls while training succeeds: the gradients of samples that are solved are noise.)
    """

    error: Tensor
    cosine: Tensor


class Timing(Enum):
    """When an interface updates its module.

    Attributes:
        signals: Whether an error signal comes at once.
        applies: Whether true gradients update the module.
        trains: Whether the module is trained at all.
    """

    NEVER = False, False
    AT_ONCE = True, False
    """By its own error signal; true gradients may teach the interface."""
    CORRECTED = True, True
    """By its own error signal, and by the difference of the true gradient when that comes."""
    DEFERRED = False, True
    """When the true gradient comes; ``Needs.max_late`` says whether to wait for it."""

    def __init__(self, signals: bool, applies: bool) -> None:
        self.signals = signals
        self.applies = applies
        self.trains = signals or applies


Keep = Literal["graph", "input", "weights"]
"""What is kept of a forward pass until its true gradient comes; see ``dni_runtime.core.passes``."""


class Needs(NamedTuple):
    """What an interface needs: gradients from downstream, and labels.

    Attributes:
        every: n, for the gradient of every n-th batch (by id); 0: none.
        bootstrapped: Whether gradients are those that the module downstream computes at once from
            its own error signal; else they are true.
        micro_batches: Number of parts that each training batch is cut into.
        max_late: Updates that may be missing from the weights of a forward pass, if true gradients
            update the module: it waits before it exceeds that. None: any number.
        labels: Whether it needs its batches' labels.
    """

    every: int
    bootstrapped: bool = False
    micro_batches: int = 1
    max_late: int | None = None
    labels: bool = True


class GradientInterface(nn.Module):
    """Base class of gradient interfaces; see the module's docstring.

    Attributes:
        Options: The model of its options in the spec.
        timing: When it updates the module.
        predicts: Whether forward passes use the weights expected at the time when their gradient
            comes.
        keep: What is kept of forward passes.
        store: Number of batches kept for true gradients; None: as many as they may be late.
        checks: Whether its own parts skip a loss that is not finite. On a GPU that waits for each
            loss.
    """

    Options: ClassVar[type[Frozen]] = Frozen

    timing: ClassVar[Timing] = Timing.AT_ONCE
    predicts: bool = False
    keep: Keep = "graph"
    store: int | None = None
    checks: bool = True

    def __init__(self, boundary: Boundary, options: Any) -> None:
        super().__init__()

    @classmethod
    def needs(cls, options: Any) -> Needs:
        """Return what it needs; the module downstream computes and sends no other gradients."""
        return Needs(1)

    def signal(self, h_BH: Tensor, y_BY: Tensor) -> Signal:
        """Return the error signal for an activation, at once.

        Args:
            h_BH: The activation, detached.
            y_BY: The labels.
        """
        raise NotImplementedError

    def learn(
        self, h_BH: Tensor, y_BY: Tensor, g_BH: Tensor, *, measure: bool
    ) -> LateSignal | None:
        """Learn from a gradient that the module downstream has sent.

        Args:
            h_BH: The activation that it belongs to, detached.
            y_BY: The labels of that batch.
            g_BH: The per-sample gradient at h.
            measure: Whether to report the prediction's error, which costs two passes over it.
        """
        return None

    def predict(self, h_BH: Tensor) -> Tensor | None:
        """Return the early head's predictions, in the shape of the chain's; None without a head.

        Changes nothing: neither statistics of BatchNorm nor random numbers.

        Args:
            h_BH: The activation in eval mode.
        """
        return None

    def optimizers(self) -> dict[str, Any]:
        """Return the interface's own optimizers by name, for checkpoints."""
        return {}


def as_in(part: nn.Module, tensor: Tensor) -> Tensor:
    """Return a tensor of the module in the type that a part of the interface computes in."""
    return next((tensor.to(own.dtype) for own in part.parameters()), tensor)


Interface = TypeVar("Interface", bound=GradientInterface)


def build_part(
    cls: type[Interface], boundary: Boundary, options: Frozen, *location: str | int
) -> Interface:
    """Make an interface, or a part of another one: ``location`` is where its options are.

    Raises:
        SpecError: It cannot be made; the error's location starts with this one.
    """
    try:
        return cls(boundary, options)
    except SpecError as error:
        at = (*location, *error.location)
        raise SpecError(error.message, location=at, hint=error.hint) from None

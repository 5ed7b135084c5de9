"""Synthesizers: small networks that predict a module's gradient from its activation (and label).

Jaderberg et al. 2016, section 2.1 (synthetic gradients) and appendix A (conditioning on the label:
cDNI). All but the critic start at zero, so that training starts without a wrong signal; only the
last map and the label's part are zero, which still lets the first gradient through.
"""

from __future__ import annotations

from dni_runtime.core.labels import labels_each_token
from dni_runtime.core.losses import ChainLoss
from dni_runtime.core.synthesizers.base import Lesson, Synthesizer
from dni_runtime.core.synthesizers.networks import MLP, Classifier, Conv, Critic, Linear, LowRank
from dni_runtime.errors import SpecError
from dni_runtime.spec import Choice, TensorSpec
from dni_runtime.spec.choices import Location, find_class, parse_options

__all__ = [
    "MLP",
    "SYNTHESIZERS",
    "Classifier",
    "Conv",
    "Critic",
    "Lesson",
    "Linear",
    "LowRank",
    "Synthesizer",
    "auto_synthesizer",
    "build_synthesizer",
]

LINEAR_UP_TO = 256
"""Features up to which ``auto`` takes a full linear map; above, its cost rivals the module's."""

SYNTHESIZERS: dict[str, type[Synthesizer]] = {
    "linear": Linear,
    "low-rank": LowRank,
    "classifier": Classifier,
    "critic": Critic,
    "mlp": MLP,
    "conv": Conv,
}


def auto_synthesizer(
    activation: TensorSpec, label: TensorSpec | None, classes: int | None
) -> Choice:
    """Return the default, by shapes; docs/results.md has the measurements behind it.

    Vectors get a narrow hidden layer. Feature maps and tokens get a critic if each sample, or
    each token, has a class label. Otherwise maps get a narrow hidden layer, and tokens a linear
    map, of low rank if it is wide.
    """
    one_each = label is not None and (not label.shape or labels_each_token(activation, label))
    if len(activation.shape) in (2, 3) and classes is not None and one_each:
        return Choice(name="critic")
    if len(activation.shape) != 2:
        return Choice(name="mlp")
    return Choice(name="linear" if activation.shape[-1] <= LINEAR_UP_TO else "low-rank")


def build_synthesizer(
    choice: Choice,
    activation: TensorSpec,
    label: TensorSpec | None,  # None: not conditioned
    classes: int | None,  # None: labels are not class indices
    location: Location = (),
    *,
    loss: ChainLoss | None = None,
) -> Synthesizer:
    """Make a synthesizer by name or import path; ``auto`` chooses by the activation's shape."""
    if choice.name == "auto":
        choice = auto_synthesizer(activation, label, classes)
    cls = find_class(choice.name, "synthesizer", SYNTHESIZERS, Synthesizer, location)
    options = parse_options(cls.Options, choice, location)
    try:
        synthesizer: Synthesizer = cls(activation, label, classes, options)
    except (ValueError, RuntimeError) as error:
        raise SpecError(
            f"synthesizer {choice.name!r} {error}", location=(*location, choice.name)
        ) from None
    if loss is not None:
        synthesizer.set_loss(loss)
    return synthesizer

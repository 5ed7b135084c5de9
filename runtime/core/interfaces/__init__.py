"""Gradient interfaces by name. A new one is a class and a line here, or a user's import path."""

from __future__ import annotations

from typing import NamedTuple

from dni_runtime.core.interfaces.base import (
    Boundary,
    GradientInterface,
    Keep,
    LateSignal,
    Needs,
    Signal,
    Timing,
    build_part,
)
from dni_runtime.core.interfaces.delayed import Delayed, Exact, Untrained
from dni_runtime.core.interfaces.local import Local
from dni_runtime.core.interfaces.mixed import Corrected, Mixed
from dni_runtime.core.interfaces.synthetic import Synthetic
from dni_runtime.spec import Choice
from dni_runtime.spec.choices import Location, find_class, parse_options

INTERFACES: dict[str, type[GradientInterface]] = {
    "mixed": Mixed,
    "synthetic": Synthetic,
    "local": Local,
    "delayed": Delayed,
    "corrected": Corrected,
    "exact": Exact,
    "none": Untrained,
}

__all__ = [
    "INTERFACES",
    "Boundary",
    "GradientInterface",
    "Keep",
    "LateSignal",
    "Needs",
    "ResolvedInterface",
    "Signal",
    "Timing",
    "build_interface",
    "default_interface",
    "resolve_interface",
]


def default_interface(attends: bool, *, labelled: bool = True) -> Choice:
    """Return the gradient interface of a module that names none (measured: docs/results.md)."""
    if labelled and not attends:
        return Choice(name="mixed")
    return Choice(name="delayed", args={"max_late": 1, "predict": True})


class ResolvedInterface(NamedTuple):
    """A gradient interface's choice, checked."""

    choice: Choice  # with all options
    needs: Needs
    timing: Timing


def resolve_interface(choice: Choice, location: Location = ()) -> ResolvedInterface:
    """Fill in an interface's options."""
    cls = find_class(choice.name, "gradient interface", INTERFACES, GradientInterface, location)
    options = parse_options(cls.Options, choice, location)
    full = Choice(name=choice.name, args=options.model_dump(mode="json"))
    return ResolvedInterface(full, cls.needs(options), cls.timing)


def build_interface(
    choice: Choice, boundary: Boundary, location: Location = ()
) -> GradientInterface:
    cls = find_class(choice.name, "gradient interface", INTERFACES, GradientInterface, location)
    options = parse_options(cls.Options, choice, location)
    interface: GradientInterface = build_part(cls, boundary, options, *location, choice.name)
    return interface

"""Apptainer definition files, rendered fully literal from the templates in ``definitions/``.

Since 1.2 Apptainer has its own template language (``{{ name }}``, an error when unused), and it
finds sections by the first word of a line, indented or not. So each rendered value must be one line
without double braces, and no template line begins with a value.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from importlib import resources

import jinja2

from dni_runtime.errors import SpecError
from dni_runtime.spec import ImageSpec

LABEL_PREFIX = "io.dni-runtime."
"""Prefix of our labels: a base image's label of the same name would win (apptainer-build(1))."""

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_PACKAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9+._:=~-]*")


def _literal(value: object) -> object:
    """Refuse values that could end their line or use Apptainer's templates."""
    text = str(value)
    if any(not c.isprintable() for c in text) or "{{" in text or "}}" in text:
        raise SpecError(
            f"{text!r} is not allowed in an image definition",
            location=("image",),
            hint="use one line of printable characters without '{{' and '}}'",
        )
    return value


def _render(template: str, **values: object) -> str:
    environment = jinja2.Environment(
        undefined=jinja2.StrictUndefined,
        finalize=_literal,
        autoescape=False,  # a definition is not HTML; _literal and ``shell`` are its escaping
        keep_trailing_newline=True,
    )
    # one shell word, for %post and %environment
    environment.filters["shell"] = lambda value: shlex.quote(str(_literal(value)))
    text = (resources.files("dni_runtime.definitions") / template).read_text(encoding="utf-8")
    return environment.from_string(text).render(**values)


def render_base(
    image: ImageSpec,
    *,
    source: str,  # image or suite to start from; for localimage its name in that folder
    mirror: str | None,  # for debootstrap
    requirements: Sequence[str],  # to install from the wheelhouse
    torch: str,  # version, for the label
) -> str:
    """Return the base image's definition, to be built in a folder that holds ``wheelhouse/``."""
    for index, package in enumerate(image.packages):
        if _PACKAGE.fullmatch(package) is None:
            raise SpecError(
                f"{package!r} is not the name of a distribution package",
                location=("image", "packages", index),
            )
    for name in image.environment:
        if _VARIABLE.fullmatch(name) is None:
            raise SpecError(
                f"{name!r} is not the name of an environment variable",
                location=("image", "environment"),
            )
    return _render(
        "base.def.j2",
        bootstrap=image.base.bootstrap,
        source=source,
        mirror=mirror,
        packages=list(image.packages),
        python=image.base.python,
        keep_torch=image.torch == "base",
        requirements=list(requirements),
        environment=sorted(image.environment.items()),
        torch=torch,
    )


def render_module(labels: Mapping[str, str], help_text: str) -> str:
    """Return a module image's definition, to be built beside ``base.sif`` and ``layer/``.

    Names in ``labels`` have no prefix; ``help_text`` is what ``apptainer run-help`` prints.
    """
    return _render(
        "module.def.j2",
        labels=sorted(labels.items()),
        label_prefix=LABEL_PREFIX,
        help=help_text.splitlines(),
    )

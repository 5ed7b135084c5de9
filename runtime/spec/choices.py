"""Looking up classes by the names in a spec, and checking their keywords before they are called."""

from __future__ import annotations

import difflib
import importlib
import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from operator import attrgetter
from traceback import extract_tb
from types import ModuleType
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from dni_runtime.errors import DniError, SpecError, UsageError, with_causes
from dni_runtime.spec import Choice
from dni_runtime.spec.load import explain_details, suggestion

Location = tuple[str | int, ...]
Options = TypeVar("Options", bound=BaseModel)

_TRUST = ContextVar("_TRUST", default=True)


@contextmanager
def trusting(trust: bool) -> Iterator[None]:
    """Within it, import paths of specs are imported only if the specs are trusted."""
    token = _TRUST.set(trust)
    try:
        yield
    finally:
        _TRUST.reset(token)


def find_class(
    name: str, kind: str, known: Mapping[str, type[Any]], base: type[Any], location: Location
) -> type[Any]:
    """Return the class that a spec names: a key of ``known``, or ``package.module:Class``.

    It must derive from ``base``; ``kind`` (``"layer"``, ``"optimizer"`` …) is for messages.
    """
    if ":" not in name:
        if name in known:
            return known[name]
        raise SpecError(
            f"unknown {kind} {name!r}",
            location=location,
            hint=suggestion(name.partition("(")[0].rpartition(".")[2], list(known))
            or "user classes: 'import: package.module:Class'",
        )
    candidate = find_attribute(name, kind, location)
    if not (isinstance(candidate, type) and issubclass(candidate, base)):
        raise SpecError(f"{kind} {name!r} is not a {base.__qualname__}", location=location)
    return candidate


def find_attribute(name: str, kind: str, location: Location) -> Any:
    """Import what an import path ``package.module:name`` means; see :func:`find_class`.

    Nothing else in ``core`` imports what a spec names. If the spec is not trusted
    (:func:`trusting`), this raises ``UsageError``.
    """
    if not _TRUST.get():
        raise UsageError(f"{kind} {name!r} would be imported, which runs code")
    return attribute_of(import_module(name, kind, location), name, kind, location)


def import_module(name: str, kind: str, location: Location, looked: str = "") -> ModuleType:
    """Import the module of an import path; ``looked`` is told if there is none."""
    module_name = name.partition(":")[0]
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        problem = _missing_module(module_name, error)
        raise SpecError(
            f"{kind} {name!r}: {problem}{looked if problem.startswith('there is') else ''}",
            location=location,
            hint="imports start at the folder of chain.yaml, or name an installed package; images "
            "have those of 'image.requirements'",
        ) from None
    except (Exception, SystemExit) as error:
        raise SpecError(
            f"{kind} {name!r}: importing {module_name!r} failed: {with_causes(error)}",
            location=location,
            hint="this torchvision was built for another torch: install both from the same index"
            if "operator torchvision::" in str(error)
            else None,
        ) from error


def attribute_of(module: ModuleType, name: str, kind: str, location: Location) -> Any:
    """Return what an import path means in its module."""
    attribute = name.partition(":")[2]
    try:
        return attrgetter(attribute)(module)
    except AttributeError:
        close = difflib.get_close_matches(attribute, vars(module), n=1)
        raise SpecError(
            f"{kind} {name!r}: {getattr(module, '__file__', module.__name__)} has no class or "
            f"function {attribute!r}",
            location=location,
            hint=f"did you mean {close[0]!r}?" if close else None,
        ) from None


def _missing_module(wanted: str, error: ModuleNotFoundError) -> str:
    """Return which module is missing, and where another one than ``wanted`` is imported."""
    if error.name is None:
        return f"importing {wanted!r} failed: {with_causes(error)}"
    if f"{wanted}.".startswith(f"{error.name}."):
        return f"there is no module {error.name!r}"
    frames = [one for one in extract_tb(error.__traceback__) if not one.filename.startswith("<")]
    at = f" ({frames[-1].filename}:{frames[-1].lineno})"
    return f"{wanted!r} imports {error.name!r}, which is missing{at}"


_REFUSALS = TypeError, ValueError, RuntimeError, AssertionError, ImportError
"""Errors by which a class refuses its arguments; others are named by their class."""


def call(
    cls: type[Any],
    args: Mapping[str, Any],
    *,
    name: str,  # the class's, in the spec
    location: Location,  # of the keywords
    positional: Sequence[Any] = (),  # positional arguments
) -> Any:
    """Make an instance, with the keywords checked against the class's signature first."""
    check_keywords(cls, args, name=name, location=location, positional=len(positional))
    try:
        return cls(*positional, **args)
    except DniError:
        raise
    except (Exception, SystemExit) as error:
        check_numbers(cls, args, name=name, location=location)
        text = str(error) if isinstance(error, _REFUSALS) else f"{type(error).__name__}: {error}"
        raise SpecError(f"{name} refuses {dict(args)}: {text}", location=location) from error


def check_numbers(
    cls: type[Any], args: Mapping[str, Any], *, name: str, location: Location
) -> None:
    """Refuse what is no number, or no list of them, where the class's signature says so.

    It is asked when a class has failed: one that takes more than it says does not.
    """
    for keyword, p in inspect.signature(cls).parameters.items():
        if keyword not in args:
            continue
        value, default = args[keyword], p.default
        if isinstance(default, tuple) and default and all(map(_is_number, default)):
            count = len(default)
            if (
                not isinstance(value, list)
                or len(value) != count
                or not all(map(_is_number, value))
            ):
                raise SpecError(
                    f"{name} needs {count} numbers as {keyword!r}, as {[*default]}, not {value!r}",
                    location=(*location, keyword),
                )
        elif _takes_a_number(p) and not _is_number(value):
            raise SpecError(
                f"{name} needs a number as {keyword!r}, not {value!r}",
                location=(*location, keyword),
            )


def _takes_a_number(parameter: inspect.Parameter) -> bool:
    """Whether a keyword's default or annotation is a number, and it takes nothing else."""
    if any(other in str(parameter.annotation) for other in ("uple", "ist", "str")):
        return False  # such as Conv2d's 'padding'
    return _is_number(parameter.default) or parameter.annotation in (int, float, "int", "float")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def check_keywords(
    cls: type[Any], args: Mapping[str, Any], *, name: str, location: Location, positional: int = 0
) -> None:
    """Check keywords against a class's signature; see :func:`call`."""
    parameters = list(inspect.signature(cls).parameters.values())[positional:]
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return
    allowed = {p.name: p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    for keyword in args:
        if keyword not in allowed:
            raise SpecError(
                f"{name} has no keyword {keyword!r}",
                location=(*location, keyword),
                hint=suggestion(keyword, list(allowed)) or "it takes no keywords",
            )
    missing = [k for k, p in allowed.items() if p.default is p.empty and k not in args]
    if missing:
        raise SpecError(
            f"{name} needs {', '.join(repr(k) for k in missing)}",
            location=location,
            hint=f"write {name}: {{{', '.join(f'{k}: …' for k in missing)}}}",
        )


def parse_options(model: type[Options], choice: Choice, location: Location) -> Options:
    """Check a choice's keywords against the pydantic model of its options."""
    return validated(model, choice.args, (*location, choice.name))


def validated(
    model: type[Options], values: Mapping[str, Any], location: Location, what: str = ""
) -> Options:
    """Check values against a pydantic model; ``what`` they are of is told in a ``SpecError``."""
    try:
        return model.model_validate(values)
    except ValidationError as error:
        inner, message, hint = explain_details(error, model)
        raise SpecError(what + message, location=(*location, *inner), hint=hint) from None


def given(model: type[Options], values: Mapping[str, Any]) -> Options:
    """Check what a user gives to a command or a call; raises ``UsageError``."""
    try:
        return validated(model, values, ())
    except SpecError as error:
        raise UsageError(f"{error.path}: {error.message}", hint=error.hint) from None

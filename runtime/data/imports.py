"""Importing a user's class or function from beside ``chain.yaml`` or from an installed package."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any

from dni_runtime.errors import SpecError, with_causes
from dni_runtime.spec.choices import meant_in, missing_module, other_build
from dni_runtime.spec.named import IMPORT_KEY


def import_target(name: str, base: Path, *, what: str, location: Sequence[str | int]) -> Any:
    """Import ``package.module:Class``; this and all later imports search ``base`` first."""
    module_name, _, attribute = name.partition(":")
    root = base.resolve()
    # Like a script's folder, and kept: the class may import neighbouring files later.
    if str(root) not in sys.path:
        sys.path.insert(0, str(root))
    importlib.invalidate_caches()
    looked = f"looked in {root} (the folder of chain.yaml) and in the installed packages"
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        own = error.name is not None and f"{module_name}.".startswith(f"{error.name}.")
        raise SpecError(
            f"{what} {name!r}: {missing_module(module_name, error)}{f'; {looked}' if own else ''}",
            location=location,
            hint=None if own else "install it, and list it under image.requirements",
        ) from None
    except (Exception, SystemExit) as error:
        raise SpecError(
            f"{what} {name!r}: importing {module_name!r} failed: {with_causes(error)}",
            location=location,
            hint=other_build(error),
        ) from error
    inner = root.joinpath(*module_name.split("."))
    files = (inner / "__init__.py", inner.with_suffix(".py"))
    own_file = next((file for file in files if file.is_file()), None)
    used = getattr(module, "__file__", None)
    if own_file is not None and used is not None and not _same(Path(used), own_file):
        raise SpecError(
            f"{what} {name!r}: {own_file} is hidden by {used}, a module of the same name",
            location=location,
            hint="give your file another name; in a program that has imported another version of "
            "it, use a new process",
        )
    try:
        return attrgetter(attribute)(module)
    except AttributeError:
        file = getattr(module, "__file__", module_name)
        raise SpecError(
            f"{what} {name!r}: {file} has no class or function {attribute!r}",
            location=location,
            hint=meant_in(module, attribute),
        ) from None


def make(value: Any, base: Path, location: Sequence[str | int]) -> Any:
    """Return an argument of a data set, in which ``{import: …, args: {…}}`` becomes an object.

    A class is called with its ``args``, and a function if there are any; else it is the value.
    """
    if isinstance(value, list):
        return [make(item, base, (*location, number)) for number, item in enumerate(value)]
    if not isinstance(value, dict):
        return value
    items = {key: make(item, base, (*location, key)) for key, item in value.items()}
    name = items.get(IMPORT_KEY)
    if not isinstance(name, str) or ":" not in name or set(items) - {IMPORT_KEY, "args"}:
        return items
    target = import_target(name, base, what="argument", location=location)
    if "args" not in items and not isinstance(target, type):
        return target
    args = items.get("args") or {}
    try:
        return target(**args)
    except (Exception, SystemExit) as error:
        shown = ", ".join(f"{key}={value!r}" for key, value in args.items())
        raise SpecError(
            f"{name}({shown}) raises {type(error).__name__}: {error}", location=location
        ) from error


def _same(used: Path, own: Path) -> bool:
    """Whether two files are one, or copies: a run keeps one of each file that it imports."""
    return used.resolve() == own.resolve() or (
        used.is_file() and used.read_bytes() == own.read_bytes()
    )

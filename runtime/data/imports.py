"""Importing a user's class or function from beside ``chain.yaml`` or from an installed package."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import FunctionType
from typing import Any

from dni_runtime.errors import SpecError
from dni_runtime.spec.choices import Location, attribute_of, import_module
from dni_runtime.spec.named import IMPORT_KEY


def import_target(name: str, base: Path, *, what: str, location: Location) -> Any:
    """Import ``package.module:Class``; this and all later imports search ``base`` first."""
    root = base.resolve()
    # Like a script's folder, and kept: the class may import neighbouring files later.
    if str(root) not in sys.path:
        sys.path.insert(0, str(root))
    importlib.invalidate_caches()
    looked = f"; looked in {root} (the folder of chain.yaml) and in the installed packages"
    module = import_module(name, what, location, looked)
    inner = root.joinpath(*name.partition(":")[0].split("."))
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
    return attribute_of(module, name, what, location)


def make(value: Any, base: Path, location: Location) -> Any:
    """Return an argument of a data set, in which ``{import: …, args: {…}}`` becomes an object.

    A class is called with its ``args``, and a function if there are any; else it is the value. A
    function of rows and of its ``args`` gets both.
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
    if location[-1] == "collate" and _takes_rows(target, args):
        return partial(target, **args)
    try:
        return target(**args)
    except (Exception, SystemExit) as error:
        shown = ", ".join(f"{key}={value!r}" for key, value in args.items())
        raise SpecError(
            f"{name}({shown}) raises {type(error).__name__}: {error}", location=location
        ) from error


def _takes_rows(target: Any, args: Mapping[str, Any]) -> bool:
    """Whether a function needs the rows beside these arguments."""
    if not isinstance(target, FunctionType):
        return False
    parameters = inspect.signature(target).parameters.values()
    needed = {p.name for p in parameters if p.default is p.empty and p.kind < p.VAR_POSITIONAL}
    return len(needed - set(args)) == 1


def _same(used: Path, own: Path) -> bool:
    """Whether two files are one, or copies: a run keeps one of each file that it imports."""
    return used.resolve() == own.resolve() or (
        used.is_file() and used.read_bytes() == own.read_bytes()
    )

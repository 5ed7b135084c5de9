"""Classes and functions of a script or a notebook, written to a file that workers can import.

The file has their source, and that of all they use there. Its name has a digest of it: after a
change there is another file, so that a process, and a run, never mistakes one for the other.
"""

from __future__ import annotations
import __future__

import ast
import builtins
import hashlib
import importlib
import inspect
import linecache
import symtable
import sys
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

import torch

from dni_runtime.errors import SpecError
from dni_runtime.files import write_atomic

MAIN = "__main__"

_HEADER = f"""\
# Written by dni_runtime: what a script or a notebook defines, for workers.
__origin__ = "{MAIN}"
"""


def home(cls: Any) -> str:
    """Return the module in which a class or function was defined."""
    module = sys.modules.get(cls.__module__)
    return str(getattr(module, "__origin__", cls.__module__))


def written_out(target: Callable[..., Any], folder: Path) -> str:
    """Write a class or function of ``__main__`` to a file in ``folder``; return its import path."""
    parts = _Parts(target.__qualname__, folder)
    parts.add(target.__qualname__, target)
    text = "\n".join([*sorted(parts.imports), "", *parts.definitions])
    future = vars(sys.modules[MAIN]).get("annotations") is __future__.annotations
    text = ("from __future__ import annotations\n" if future else "") + _HEADER + text
    digest = hashlib.sha256(text.encode()).hexdigest()[:8]
    name = f"{target.__qualname__.lower()}_{digest}"
    write_atomic(folder / f"{name}.py", text, mode=0o644)
    sys.path.insert(0, str(folder))
    try:
        importlib.invalidate_caches()
        importlib.import_module(name)
    finally:
        sys.path.remove(str(folder))
    return f"{name}:{target.__qualname__}"


class _Parts:
    """What a class or function of ``__main__`` needs, in the order of its definition."""

    def __init__(self, target: str, folder: Path) -> None:
        self.imports: set[str] = set()
        self.definitions: list[str] = []
        self._target, self._folder = target, folder
        self._seen: set[str] = set()

    def add(self, name: str, value: Any) -> None:
        """Add what has this name in ``__main__``, after what it uses."""
        if name in self._seen:
            return
        self._seen.add(name)
        if isinstance(value, ModuleType):
            self._check_place(name, value)
            self.imports.add(f"import {value.__name__} as {name}")
        elif isinstance(value, type | FunctionType) and value.__module__ == MAIN:
            source = self._source(value)
            known = vars(sys.modules[MAIN])
            for used in sorted(_globals(symtable.symtable(source, name, "exec"))):
                if used in known:
                    self.add(used, known[used])
                elif not hasattr(builtins, used) and used != value.__name__:
                    raise self._refused(f"uses {used!r}, which is not defined")
            self.definitions.append(source)
            if value.__name__ != name:
                self.definitions.append(f"{name} = {value.__name__}\n")
        elif (origin := _importable(value)) is not None:
            self._check_place(name, sys.modules[origin[0]])
            self.imports.add(f"from {origin[0]} import {origin[1]} as {name}")
        elif _is_plain(value):
            self.definitions.append(f"{name} = {value!r}\n")
        elif is_dataclass(value) and _is_plain(given := _given(value)):
            self.add(type(value).__name__, type(value))
            self.definitions.append(f"{name} = {type(value).__name__}(**{given!r})\n")
        elif isinstance(value, torch.device | torch.dtype):
            self.imports.add("import torch")
            self.definitions.append(f"{name} = torch.{repr(value).removeprefix('torch.')}\n")
        else:
            raise self._refused(f"uses {name!r}, a {type(value).__name__} that is defined there")

    def _check_place(self, name: str, module: ModuleType) -> None:
        """Refuse what lies beside the script, if that is where workers do not look."""
        file = Path(getattr(module, "__file__", None) or "/")
        main = Path(getattr(sys.modules[MAIN], "__file__", None) or Path.cwd() / "notebook")
        installed = {"site-packages", "dist-packages"} & set(file.parts)
        beside = file.is_relative_to(main.absolute().parent) and not installed
        if beside and not file.is_relative_to(self._folder):
            raise self._refused(f"uses {name!r} of {str(file)!r}")

    def _source(self, value: type | FunctionType) -> str:
        places = [(code.co_filename, code.co_firstlineno) for code in _codes(value)]
        if isinstance(value, type):  # which may have no code of its own
            files = reversed([name for name in linecache.cache if "ipykernel" in name])
            main = getattr(sys.modules[MAIN], "__file__", None)
            places += [(file, 0) for file in (files if main is None else [main])]
        for file, line in places:
            lines = linecache.getlines(file)
            try:
                body = ast.parse("".join(lines)).body
            except SyntaxError:  # of a notebook's magic commands
                continue
            for node in body:
                if not isinstance(node, ast.ClassDef | ast.FunctionDef):
                    continue
                first = min([node.lineno, *(one.lineno for one in node.decorator_list)])
                last = node.end_lineno or first
                if node.name == value.__name__ and (first <= line <= last or not line):
                    return "".join(lines[first - 1 : last]).rstrip() + "\n\n"
        raise self._refused(f"needs {value.__qualname__!r}, whose source is not known")

    def _refused(self, reason: str) -> SpecError:
        return SpecError(
            f"workers cannot import {self._target!r}: it {reason}",
            hint=f"move it to a file in {str(self._folder)!r} and import it from there; or define "
            "in it, or give it as an argument, what it uses",
        )


def _codes(value: type | FunctionType) -> Iterator[Any]:
    """Yield code objects of a class's methods, or of a function."""
    for one in vars(value).values() if isinstance(value, type) else (value,):
        function = inspect.unwrap(getattr(one, "__func__", getattr(one, "fget", one)) or one)
        if isinstance(function, FunctionType):
            yield function.__code__


def _globals(table: symtable.SymbolTable) -> set[str]:
    """Return the names that a source uses and does not define."""
    outer = table.get_type() == "module"
    names = {
        one.get_name()
        for one in table.get_symbols()
        if one.is_referenced() and (one.is_global() or outer) and not (outer and one.is_assigned())
    }
    return names.union(*map(_globals, table.get_children()))


def _importable(value: Any) -> tuple[str, str] | None:
    """Return the module and the name by which a value can be imported."""
    module = getattr(value, "__module__", None)
    if isinstance(value, BuiltinFunctionType) and module is None:
        module = getattr(value.__self__, "__name__", None)
    for name in (getattr(value, "__qualname__", None), getattr(value, "_name", None)):
        known = sys.modules.get(module) if isinstance(module, str) and module != MAIN else None
        if isinstance(name, str) and known is not None and getattr(known, name, None) is value:
            return str(module), name
    return None


def _given(value: Any) -> dict[str, Any]:
    """Return the fields by which a dataclass's object is made again."""
    return {one.name: getattr(value, one.name) for one in fields(value) if one.init}


def _is_plain(value: Any) -> bool:
    """Whether a value can be written as it is."""
    try:
        return bool(ast.literal_eval(repr(value)) == value)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return False

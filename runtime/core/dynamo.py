"""Doing without ``torch._dynamo``, the front end of ``torch.compile``, if nothing compiles.

torch imports it at an optimizer's first step, and when shapes are inferred, only to keep
``torch.compile`` away from some functions (``torch/_compile.py``, ``torch/optim``).
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.abc
import os
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

QUICK_START = "DNI_QUICK_START"
"""The environment variable that asks for this."""

_NAME = "torch._dynamo"


def postpone_dynamo() -> None:
    """Have ``import torch._dynamo`` give a stand-in, which becomes the real one when it is used.

    That saves a process 0.5 s of CPU and 75 MiB, but a function that has been called with the
    stand-in is not kept away from ``torch.compile`` later. So this is off unless
    ``DNI_QUICK_START`` is set, by who knows that nothing compiles. Programs that have imported the
    real one already are left alone.
    """
    if not os.environ.get(QUICK_START) or _NAME in sys.modules:
        return
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _StandIn(ModuleType):
    """What eager code calls of ``torch._dynamo``; anything else imports the real one."""

    made = False  # whether the import system has done with it

    @staticmethod
    def graph_break(*args: object, **kwargs: object) -> None:
        """There is no graph."""

    @staticmethod
    def disable(fn: Callable[..., Any], *args: object, **kwargs: object) -> Callable[..., Any]:
        """Nothing traces this function."""
        return fn

    def __getattr__(self, name: str) -> Any:
        # Who imports a part of it asks for its path, but so does who makes this module; for other
        # such names all modules are asked (inspect).
        if name.startswith("__") and not (name == "__path__" and self.made):
            raise AttributeError(name)
        if sys.modules.get(_NAME) is self:
            del sys.modules[_NAME]
        return getattr(importlib.import_module(_NAME), name)


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the stand-in, once; and what the real one has brought with it."""

    def __init__(self) -> None:
        self._found = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname == _NAME and not self._found:
            self._found = True
            return ModuleSpec(_NAME, self)
        if fullname.startswith(f"{_NAME}.") and fullname in sys.modules:
            return ModuleSpec(fullname, _LoadedPart(sys.modules[fullname]))
        return None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        module.made = True  # type: ignore[attr-defined]  # it is a stand-in


class _LoadedPart(importlib.abc.Loader):
    """A part that the real one loaded while the stand-in was found: it is not loaded again."""

    def __init__(self, module: ModuleType) -> None:
        self._module, self._spec = module, module.__spec__

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        with contextlib.suppress(AttributeError):  # as the import system does
            module.__spec__ = self._spec

"""Decoupled Neural Interfaces as a chain of containers (Jaderberg et al. 2016, arXiv:1608.05343).

``Chain`` trains a chain with real workers, ``Run`` is what comes of it, a ``Callback`` is told what
happens in it, and ``load`` gives back a trained network that ``dnictl export`` wrote, as a plain
``torch.nn.Module``.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import os

    from torch import nn

    from dni_runtime.api.chain import Chain
    from dni_runtime.api.run import Run
    from dni_runtime.plan.callbacks import Callback

__version__ = "0.1.0"

__all__ = ["Callback", "Chain", "Run", "__version__", "load"]


_LATE = {"Chain": "api.chain", "Run": "api.run", "Callback": "plan.callbacks"}


def __getattr__(name: str) -> object:
    """Workers import this package too, and need none of these."""
    if name not in _LATE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"dni_runtime.{_LATE[name]}"), name)


def load(path: str | os.PathLike[str], *, trust: bool = False) -> nn.Module:
    """Load an exported model.

    Args:
        path: A ``.safetensors`` or ``.pt2`` file written by ``dnictl export``.
        trust: Whether the file may run code: import the classes and functions that it names, as of
            a network that was split, or unpickle, as ``.pt2`` does. Without it the layers of
            ``torch.nn`` and of this package are built, and nothing is imported.

    Returns:
        The whole network as one module in eval mode: ``nn.Sequential`` for ``.safetensors``, the
        exported program's module for ``.pt2``.

    Raises:
        DataError: The file is missing, damaged, or was not written by ``dnictl export``.
        UsageError: It needs ``trust=True``.
    """
    from dni_runtime.core.export import load_model  # torch is slow to import: only on use

    return load_model(path, trust=trust)

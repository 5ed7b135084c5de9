"""How the replicas of a module learn together: strategies, what they share, and its compression.

A new strategy is one file and one line in ``registry.py``, or a user's import path.
"""

from __future__ import annotations

from dni_runtime.core.replication.base import Strategy, Sync, mean_of
from dni_runtime.core.replication.compression import Compression
from dni_runtime.core.replication.message import Message
from dni_runtime.core.replication.registry import (
    COMPRESSIONS,
    STRATEGIES,
    build_compression,
    build_strategy,
    check_replication,
    find_strategy,
    lr_scale,
    resolve_replication,
)
from dni_runtime.core.replication.shared import Shared

__all__ = [
    "COMPRESSIONS",
    "STRATEGIES",
    "Compression",
    "Message",
    "Shared",
    "Strategy",
    "Sync",
    "build_compression",
    "build_strategy",
    "check_replication",
    "find_strategy",
    "lr_scale",
    "mean_of",
    "resolve_replication",
]

"""How the replicas of a module learn together: strategies, what they share, and its compression.

A new strategy is one class and one line in ``strategies.py``, or a user's import path.
"""

from __future__ import annotations

from dni_runtime.core.replication.base import Strategy, Sync, mean_of
from dni_runtime.core.replication.compression import (
    COMPRESSIONS,
    Compression,
    build_compression,
)
from dni_runtime.core.replication.shared import ReplicaMessage, SharedWeights
from dni_runtime.core.replication.strategies import STRATEGIES, build_strategy, find_strategy

__all__ = [
    "COMPRESSIONS",
    "STRATEGIES",
    "Compression",
    "ReplicaMessage",
    "SharedWeights",
    "Strategy",
    "Sync",
    "build_compression",
    "build_strategy",
    "find_strategy",
    "mean_of",
]

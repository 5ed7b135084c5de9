"""Local SGD: all go on with the mean."""

from __future__ import annotations

from dni_runtime.core.replication.base import Strategy


class LocalSgd(Strategy):
    """All go on with the mean, weighted by samples (Stich 2018, arXiv:1805.09767, algorithm 1)."""

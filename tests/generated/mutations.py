"""The runtime without one of its mends: drawn cases have to find what they were made for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

MUTATIONS: dict[str, Callable[[], Any]] = {}

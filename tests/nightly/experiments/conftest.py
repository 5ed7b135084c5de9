"""Scripts find their parts in their own folder."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.unit.core.conftest import small

__all__ = ["small"]

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "scripts" / "experiments"))

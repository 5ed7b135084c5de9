"""Running dnictl in this process, as in tests/unit."""

from __future__ import annotations

from tests.unit.cli.conftest import dnictl, folder, record, write_chain

__all__ = ["dnictl", "folder", "record", "write_chain"]

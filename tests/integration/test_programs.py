"""What tests start ends with them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.conftest import run

SLOW = """
import pathlib, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(pathlib.Path(sys.argv[1]).write_text("ended")))
time.sleep(60)
"""


def test_who_takes_too_long_may_end_what_it_has_started(tmp_path: Path) -> None:
    with pytest.raises(subprocess.TimeoutExpired):
        run([sys.executable, "-c", SLOW, tmp_path / "said"], timeout_s=3)
    assert (tmp_path / "said").read_text() == "ended"

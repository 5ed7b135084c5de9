"""Being told to stop, once and twice."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

PROGRAM = """\
import os, signal, sys
from dni_runtime.worker.signals import StopRequest
stop = StopRequest(patient=sys.argv[1] == "patient")
stop.install()
os.kill(os.getpid(), signal.SIGTERM)
assert stop()
os.kill(os.getpid(), signal.SIGTERM)
sys.exit(75)
"""


@pytest.mark.parametrize(("kind", "code"), [("plain", 128 + signal.SIGTERM), ("patient", 75)])
def test_the_second_signal(kind: str, code: int) -> None:
    """Slurm and Apptainer's starter each send one: a step of Slurm must not end at the second."""
    done = subprocess.run([sys.executable, "-c", PROGRAM, kind], env=dict(os.environ), timeout=60)
    assert done.returncode == code

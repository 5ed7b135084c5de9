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
os.kill(os.getpid(), getattr(signal, sys.argv[2]))
sys.exit(75)
"""


@pytest.mark.parametrize(
    ("kind", "second", "code"),
    [
        ("plain", "SIGTERM", 128 + signal.SIGTERM),
        ("patient", "SIGTERM", 75),
        ("patient", "SIGUSR2", 128 + signal.SIGUSR2),
    ],
)
def test_the_second_signal(kind: str, second: str, code: int) -> None:
    """Slurm and Apptainer's starter each send one: a step of Slurm must not end at the second."""
    command = [sys.executable, "-c", PROGRAM, kind, second]
    done = subprocess.run(command, env=dict(os.environ), timeout=60)
    assert done.returncode == code

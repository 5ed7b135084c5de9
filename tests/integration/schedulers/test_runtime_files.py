"""What a supervisor imports."""

from __future__ import annotations

import subprocess
import sys


def test_a_supervisor_makes_keys_without_torch() -> None:
    """It would take 200 MiB of the node that all its workers' memory is counted on."""
    program = (
        "import sys, dni_runtime.supervise.start, dni_runtime.api.run\n"
        "from dni_runtime.run import keys\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0

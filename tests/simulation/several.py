"""Several simulations, each in a child of one process that has imported everything."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
_PROGRAM = """\
import json, sys
sys.path.insert(0, sys.argv[1])
from simulate import main
for options in json.loads(sys.argv[2]):
    code = main(["--json", *options])
    print(json.dumps(code), flush=True)
"""

Options = tuple[str, ...]
Found = tuple[int, dict[str, Any]]  # the exit code, and what was found


def simulated(wanted: Sequence[Options], timeout_s: float) -> dict[Options, list[Found]]:
    """Run ``scripts/simulate.py`` with each of these options; those that come twice, twice."""
    done = subprocess.run(
        [sys.executable, "-u", "-c", _PROGRAM, str(SCRIPTS), json.dumps(wanted)],
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    results: dict[Options, list[Found]] = {}
    for options, figures, code in zip(wanted, lines[::2], lines[1::2], strict=True):
        results.setdefault(options, []).append((code, figures))
    return results

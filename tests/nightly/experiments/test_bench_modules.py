"""What a module of a chain costs in the file system does not depend on how long the chain is."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[3] / "scripts" / "experiments" / "bench_modules.py"


def test_operations_per_module_are_flat(tmp_path: Path) -> None:
    """Real workers, links and checkpoints from the start to the end; counted, not timed."""
    figures = tmp_path / "figures.json"
    subprocess.run(
        [sys.executable, str(SCRIPT), "--modules=8,24", "--batches=20", f"--json={figures}"],
        check=True,
        timeout=120,
    )
    few, many = json.loads(figures.read_text())
    assert (few["modules"], many["modules"]) == (8, 24)
    assert few["checkpoints"] == many["checkpoints"] == 2
    assert few["operations"]["checkpoints"] >= 5 * 6  # all five cuts were counted
    for part, count in many["operations"].items():
        allowed = 1.5 * few["operations"][part] + (10 if part == "endpoints" else 1)
        assert count <= allowed, part
    assert many["entries"] <= 1.5 * few["entries"] + 10

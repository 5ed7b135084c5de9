"""Full disks: what is said, how commands end, and what goes on when there is room again."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.e2e.conftest import missing

DNICTL = """\
fill() { head -c $(($(df -k --output=avail "$1" | tail -1) * 1024 - $2 * 1024)) \\
    /dev/zero >"$1"/filling; }
dnictl() { "$PYTHON" -P -m dnictl "$@" >>"$1.out" 2>>"$1.err"; echo $?; }
"""


def on_a_small_disk(folder: Path, script: str, size: str = "40m") -> list[str]:
    """Run a shell script with a folder ``small`` of its own; return the words that it prints."""
    if subprocess.run(["unshare", "-rm", "true"], capture_output=True).returncode != 0:
        missing("this user has no namespaces of mounts")
    (folder / "small").mkdir()
    mount = f"mount -t tmpfs -o size={size} tmpfs small\n"
    done = subprocess.run(
        ["unshare", "-rm", "sh", "-c", mount + DNICTL + script],
        cwd=folder,
        env={**os.environ, "PYTHON": sys.executable, "DNICTL_RUNS": "small/runs"},
        capture_output=True,
        text=True,
    )
    return (done.stdout + done.stderr).split()


def test_a_build_that_failed_names_a_folder_with_little_room(tmp_path: Path) -> None:
    """Programs inside a build, such as debootstrap, seldom say that the disk is full."""
    code = """
from dni_runtime.image import apptainer
fill = "head -c 4m /dev/zero >$TMPDIR/x; rm $TMPDIR/x; echo E: cannot extract; exit 1"
apptainer.stream(["sh", "-c", fill], what="building")
"""
    (tmp_path / "build.py").write_text(code)
    script = 'TMPDIR="$PWD"/small exec "$PYTHON" -P build.py'
    said = " ".join(on_a_small_disk(tmp_path, script, "2m"))
    assert "| E: cannot extract" in said
    assert f"{tmp_path}/small (TMPDIR) has 2 MB free: make room there, or set TMPDIR to" in said

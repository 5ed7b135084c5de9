"""Full disks: what is said, how commands end, and what goes on when there is room again."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.e2e.conftest import Site, missing

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

DNICTL = """\
fill() { head -c $(($(df -k --output=avail "$1" | tail -1) * 1024 - $2 * 1024)) \\
    /dev/zero >"$1"/filling; }
keep_full() { while :; do cat /dev/zero >>"$1"/filling; sleep 0.1; done >/dev/null 2>&1; }
dnictl() { "$PYTHON" -P -m dnictl "$@" >"$1.out" 2>"$1.err"; echo $?; }
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


def test_a_run_fails_on_a_full_disk_and_goes_on_when_there_is_room(site: Site) -> None:
    """Its end is what has happened, though no file has room for it."""
    site.write(4)
    script = """\
fill small 400
dnictl up chain.yaml --backend process
rm small/filling
dnictl resume
dnictl export -o model.safetensors
"""
    codes = on_a_small_disk(site.folder, script)
    said = (site.folder / "up.err").read_text()
    assert codes == ["74", "0", "0"], said
    assert "No space left on device: " in said
    assert "→ dnictl resume " in said
    assert "Logging error" not in said
    assert ": failed after" in (site.folder / "up.out").read_text()
    assert load_file(site.folder / "model.safetensors")


def test_a_run_is_not_started_without_room_for_its_files(site: Site) -> None:
    site.write(4)
    script = """\
fill small 60
dnictl up chain.yaml -d --backend process
dnictl ps
"""
    assert on_a_small_disk(site.folder, script) == ["74", "0"]
    assert (
        "/small/runs': No space left on device\n  → make room"
        in (site.folder / "up.err").read_text()
    )
    assert (site.folder / "up.out").read_text() == (site.folder / "ps.out").read_text() == ""


def test_the_end_of_a_run_in_the_background_on_a_full_disk(site: Site) -> None:
    """Who waits for it, and who looks later, reads how it has ended, and of the disk."""
    site.write(400, "restart: {policy: never}", slow=True)
    script = """\
dnictl up chain.yaml -d --backend process
until ls small/runs/*/checkpoints/*/middle.json; do sleep 0.1; done >/dev/null 2>&1
keep_full small &  # a part of a checkpoint that finds no room gives back what it had
full() { until [ "$(df --output=avail small | tail -1)" -eq 0 ]; do sleep 0.1; done; }
pid() { sed -n 's/^ "pid": \\([0-9]*\\).*/\\1/p' "$1"; }
full
supervisor=$(pid small/runs/*/state.json)
kill -STOP "$supervisor"  # or it finds the room that a worker gives back when it dies
kill -9 $(pid small/runs/*/workers/middle.json)
sleep 1
full
kill -CONT "$supervisor"
dnictl wait --timeout 60
dnictl status
dnictl resume -d
kill $!
"""
    codes = on_a_small_disk(site.folder, script)
    said = (site.folder / "wait.err").read_text()
    assert codes == ["0", "74", "0", "74"], said
    assert "module 'middle' (attempt 1) was killed by SIGKILL; the run directory cannot" in said
    assert (site.folder / "wait.out").read_text().partition(": ")[2].startswith("failed after")
    assert "No space left on device" in (site.folder / "status.out").read_text()


def test_a_worker_without_room_for_its_files(site: Site) -> None:
    site.write(4)
    script = """\
dnictl mpi chain.yaml --backend process --run-dir small/run
fill small 0
dnictl run middle --backend process --run-dir small/run
"""
    assert on_a_small_disk(site.folder, script) == ["0", "73"]
    assert "No space left on device" in (site.folder / "run.err").read_text()

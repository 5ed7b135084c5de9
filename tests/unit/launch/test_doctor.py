"""Looking at a machine; what is there differs, that each thing is looked at does not."""

from __future__ import annotations

from pathlib import Path

import pytest

from dni_runtime.launch.doctor import examine, mount_of

MOUNTS = """\
22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
30 22 0:27 / /tmp rw,nosuid,noexec shared:9 - tmpfs tmpfs rw,size=8g
41 22 0:40 / /home/a\\040b rw shared:2 - nfs4 server:/home rw,vers=4.2
42 41 0:41 / /home/a\\040b/fast rw - lustre 10.0.0.1@o2ib:/fs rw
"""


@pytest.mark.parametrize(
    ("path", "kind", "noexec"),
    [
        ("/srv/x", "ext4", False),
        ("/tmp", "tmpfs", True),
        ("/tmp/x/y", "tmpfs", True),
        ("/tmpx", "ext4", False),
        ("/home/a b/c", "nfs4", False),
        ("/home/a b/fast/c", "lustre", False),
    ],
)
def test_file_system_of_a_folder(path: str, kind: str, noexec: bool) -> None:
    found, options = mount_of(Path(path), MOUNTS)
    assert (found, "noexec" in options) == (kind, noexec)


def test_everything_is_looked_at() -> None:
    checks = {check.name: check for check in examine()}
    assert set(checks) >= {
        "python", "cpu", "apptainer", "user namespaces", "fuse", "overlay", "temporary folder",
        "build folder", "runs folder", "socket folder", "mksquashfs", "infiniband", "slurm",
        "torch", "zeromq", "gpu",
    }  # fmt: skip
    assert checks["torch"].status == "ok"
    assert all(check.detail for check in checks.values())
    assert all(
        check.hint for check in checks.values()
        if check.status == "missing" and check.need != "optional"
    )  # fmt: skip


def test_a_machine_without_anything(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("dni_runtime.image.apptainer.SETUP_PREFIXES", ())
    monkeypatch.setattr("dni_runtime.image.apptainer.SYSTEM_FOLDERS", ())
    monkeypatch.delenv("DNI_APPTAINER", raising=False)
    monkeypatch.setenv("DNICTL_RUNS", str(tmp_path / "gone"))
    checks = {check.name: check for check in examine()}
    assert checks["apptainer"].status == "missing"
    assert checks["mksquashfs"].status == "missing"
    assert checks["slurm"].status == "missing"
    assert checks["runs folder"].status == "warning"


def test_a_slurm_that_does_not_answer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    sinfo = tmp_path / "sinfo"
    sinfo.write_text("#!/bin/sh\nexit 1\n")
    sinfo.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    checks = {check.name: check for check in examine()}
    assert checks["slurm"].status == "warning"
    assert str(sinfo) in checks["slurm"].detail


def test_root_cannot_use_containers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As ``up`` has it, which refuses to run Apptainer as root."""
    apptainer = tmp_path / "apptainer"
    apptainer.write_text("#!/bin/sh\necho 1.4.5\n")
    apptainer.chmod(0o755)
    monkeypatch.setenv("DNI_APPTAINER", str(apptainer))
    for user, status in ((0, "missing"), (1000, "ok")):
        monkeypatch.setattr("os.geteuid", lambda user=user: user)
        (check,) = [check for check in examine() if check.name == "apptainer"]
        assert (check.status, check.need) == (status, "containers")

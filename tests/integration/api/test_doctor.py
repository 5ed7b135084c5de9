"""Looking at a machine; what is there differs, that each thing is looked at does not."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from dni_runtime.api.doctor import Check, examine, examine_hosts
from dni_runtime.spec.profile import ProfileSpec


@pytest.mark.parametrize(
    ("kind", "status"), [("ext4", "ok"), ("nfs4", "warning"), ("fuse.sshfs", "warning")]
)
def test_temporary_files_belong_on_a_disk_of_this_host(
    kind: str, status: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    df = tmp_path / "df"
    df.write_text(f"#!/bin/sh\necho Type\necho {kind}\n")
    df.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    checks = {check.name: check for check in examine()}
    assert checks["temporary folder"].status == status
    assert f": {kind}, " in checks["temporary folder"].detail
    assert checks["runs folder"].status == "ok"


@pytest.mark.parametrize(
    ("blocks", "flags", "hint"),
    [(1 << 30, 0, "None"), (1 << 30, os.ST_NOEXEC, "mounted noexec"), (9, 0, "about 4 GiB")],
)
def test_a_build_needs_room_and_programs(
    blocks: int, flags: int, hint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = os.statvfs_result((4096, 4096, blocks, blocks, blocks, 0, 0, 0, flags, 255))
    monkeypatch.setattr(os, "statvfs", lambda path: found)
    (check,) = [check for check in examine() if check.name == "build folder"]
    assert hint in str(check.hint)


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


@pytest.mark.skipif(shutil.which("su") is None, reason="there is no setuid program of root's")
@pytest.mark.parametrize("program", ["su", "env"])
def test_a_setuid_apptainer_needs_no_user_namespaces(
    program: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """They may be missing then, as FUSE: both are needed to build only."""
    starter = tmp_path / "libexec" / "apptainer" / "bin" / "starter-suid"
    starter.parent.mkdir(parents=True)
    starter.symlink_to(str(shutil.which(program)))
    version = f"[ $1 = buildcfg ] && echo {tmp_path}/libexec || echo 1.4.5"
    for name, script in {"apptainer": version, "unshare": "exit 1"}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setenv("DNI_APPTAINER", str(tmp_path / "apptainer"))
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    may = os.access
    monkeypatch.setattr("os.access", lambda path, mode: path != "/dev/fuse" and may(path, mode))
    checks = {check.name: check for check in examine()}
    for name in ("user namespaces", "fuse"):
        assert checks[name].status == ("warning" if program == "su" else "missing")


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


def test_a_user_without_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container that is started with a number of a user alone."""
    for name in ("LOGNAME", "USER", "LNAME", "USERNAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("os.getuid", lambda: 54321)
    (check,) = [check for check in examine() if check.name == "subordinate ids"]
    assert check.detail == "/etc/subuid does not have user 54321"


def test_a_host_may_greet(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    programs = {
        "ssh": 'echo "Welcome {to"\necho "{a}"\nexec sh -c "${@: -1}"',
        "python": """echo '{"checks": [{"name": "cpu", "status": "ok", "detail": "2"}]}'""",
    }
    for name, text in programs.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    profile = ProfileSpec(python=str(tmp_path / "python"), prologue=("echo modules loaded",))
    assert examine_hosts(["a"], profile, steps=False) == {"a": [Check("cpu", "ok", "2")]}

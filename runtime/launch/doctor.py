"""Checks of this machine for everything that a chain may need: ``dnictl doctor``."""

from __future__ import annotations

import getpass
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from dni_runtime.errors import UnavailableError
from dni_runtime.image.apptainer import find_apptainer, host_environment
from dni_runtime.launch.slurm.commands import own_job
from dni_runtime.rundir import socket_path

Status = Literal["ok", "warning", "missing"]
Need = Literal["always", "containers", "builds", "optional"]

_GIB = 1 << 30
_TEMP_WANTED_BYTES = 4 * _GIB
# Builds and ipc sockets fail on these (field reports; apptainer-build, "APPTAINER_TMPDIR").
_REMOTE = re.compile(r"nfs|lustre|gpfs|beegfs|ceph|smb|cifs|panfs|afs|9p|fuse\.sshfs")


@dataclass(frozen=True)
class Check:
    """Result of one check."""

    name: str
    status: Status  # ``warning``: works with limits
    detail: str  # the finding
    need: Need = "optional"  # ``optional``: by some chains only
    hint: str | None = None  # advice


def examine() -> Iterator[Check]:
    """Check this machine; yield each result as soon as it is known (torch takes seconds)."""
    steps: tuple[Callable[[], Iterator[Check]], ...] = (
        _python,
        _apptainer,
        _namespaces,
        _file_systems,
        _folders,
        _build_tools,
        _infiniband,
        _slurm,
        _torch,
    )
    for step in steps:
        yield from step()


def _python() -> Iterator[Check]:
    version = platform.python_version()
    status: Status = "ok" if sys.version_info >= (3, 11) else "missing"
    cores = len(os.sched_getaffinity(0))
    hint = None if status == "ok" else "install 3.11 or newer"
    yield Check("python", status, f"{version}, {sys.executable}", "always", hint)
    yield Check("cpu", "ok", f"{cores} cores usable, {platform.machine()}, {platform.release()}")


def _apptainer() -> Iterator[Check]:
    try:
        tool = find_apptainer()
    except UnavailableError as error:
        yield Check("apptainer", "missing", error.message, "containers", error.hint)
        return
    if os.geteuid() == 0:
        yield Check(
            "apptainer", "missing", f"{tool}, {tool.path}, but not as root", "containers",
            "run containers as an ordinary user",
        )  # fmt: skip
    else:
        yield Check("apptainer", "ok", f"{tool}, {tool.path}", "containers")


def _namespaces() -> Iterator[Check]:
    """Try user namespaces: four settings and the security module decide whether they work."""
    name: str = "user namespaces"
    unshare = shutil.which("unshare")
    if unshare is None:
        yield Check(name, "warning", "cannot be checked: no unshare program", "containers")
        return
    done = _ask([unshare, "--user", "--map-root-user", "true"])
    if done is not None:
        yield Check(name, "ok", "available to this user", "containers")
        return
    causes = [
        f"{setting} = {value}"
        for setting, bad in (
            ("user.max_user_namespaces", "0"),
            ("kernel.unprivileged_userns_clone", "0"),
            ("kernel.apparmor_restrict_unprivileged_userns", "1"),
        )
        if (value := _sysctl(setting)) == bad
    ]
    yield Check(
        name,
        "missing",
        ", ".join(causes) or "the kernel refuses them",
        "containers",
        "ask the administrator to allow them, or to install Apptainer with its setuid part",
    )


def _file_systems() -> Iterator[Check]:
    fuse = Path("/dev/fuse")
    if not fuse.exists():
        yield Check("fuse", "missing", "no /dev/fuse", "containers", "modprobe fuse")
    elif not os.access(fuse, os.R_OK | os.W_OK):
        yield Check(
            "fuse", "missing", "/dev/fuse cannot be opened", "containers", "chmod 666 /dev/fuse"
        )
    else:
        helpers = [
            name for name in ("squashfuse_ll", "squashfuse", "fuse-overlayfs") if _tool(name)
        ]
        yield Check("fuse", "ok", f"/dev/fuse; {', '.join(helpers) or 'no helpers'}")
    # Module images are a base image with an overlay layer; overlayfs(5): unprivileged since 5.11.
    kernel = tuple(int(part) for part in re.findall(r"\d+", platform.release())[:2])
    if kernel >= (5, 11):
        yield Check("overlay", "ok", f"kernel {platform.release()}", "containers")
    elif _tool("fuse-overlayfs"):
        yield Check("overlay", "ok", "fuse-overlayfs", "containers")
    else:
        yield Check(
            "overlay", "missing", f"kernel {platform.release()} is older than 5.11", "containers",
            "install fuse-overlayfs, or build with 'dnictl build --full'",
        )  # fmt: skip


def _folders() -> Iterator[Check]:
    for name, folder in (
        ("temporary folder", Path(tempfile.gettempdir())),
        ("build folder", Path(os.environ.get("APPTAINER_TMPDIR") or tempfile.gettempdir())),
        ("runs folder", Path(os.environ.get("DNICTL_RUNS") or ".")),
    ):
        if not folder.is_dir():
            yield Check(name, "warning", f"{folder} does not exist", hint="create it")
            continue
        kind, options = mount_of(folder)
        free = shutil.disk_usage(folder).free
        detail = f"{folder.absolute()}: {kind}, {free / _GIB:.1f} GiB free"
        hint = None
        if _REMOTE.search(kind) and name != "runs folder":
            hint = "a shared file system: set TMPDIR and APPTAINER_TMPDIR to a local folder"
        elif free < _TEMP_WANTED_BYTES and name == "build folder":
            hint = "a build needs about 4 GiB: set APPTAINER_TMPDIR to a larger folder"
        elif "noexec" in options and name == "build folder":
            hint = "mounted noexec: set APPTAINER_TMPDIR to another folder"
        yield Check(name, "warning" if hint else "ok", detail, hint=hint)
    sockets = socket_path(Path("x")).parent
    length = len(str(sockets)) + len("/dni-0123456789ab/") + 40 + len(".sock")
    yield Check(
        "socket folder",
        "ok" if length <= 107 else "warning",
        f"{sockets}: {mount_of(sockets)[0]}",
        hint="too long for unix(7): unset XDG_RUNTIME_DIR" if length > 107 else None,
    )


def mount_of(path: Path, mounts: str | None = None) -> tuple[str, frozenset[str]]:
    """Return type and mount options of the file system of ``path``.

    ``mounts`` is the text of a mountinfo file (proc(5); default: this process's).
    """
    if mounts is None:
        mounts = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="replace")
    target = path.resolve()
    best, found = -1, ("unknown", frozenset[str]())
    for line in mounts.splitlines():
        left, _, right = line.partition(" - ")
        fields, kind = left.split(" "), right.split(" ")[0]
        point = Path(re.sub(r"\\([0-7]{3})", lambda m: chr(int(m[1], 8)), fields[4]))
        if target.is_relative_to(point) and len(point.parts) >= best:
            best, found = len(point.parts), (kind, frozenset(fields[5].split(",")))
    return found


def _build_tools() -> Iterator[Check]:
    for name, why in (
        ("mksquashfs", "packs the modules' layers; package squashfs-tools"),
        ("unsquashfs", "reads the spec of an image without a lock; package squashfs-tools"),
        ("debootstrap", "builds Debian base images; package debootstrap"),
        ("newuidmap", "fakeroot builds; package uidmap"),
    ):
        path = _tool(name)
        status: Status = "ok" if path else "missing"
        yield Check(name, status, path or "not installed", "builds", None if path else why)
    user = getpass.getuser()
    try:
        known = Path("/etc/subuid").read_text(encoding="utf-8").splitlines()
    except OSError:
        known = []
    if any(line.split(":")[0] in (user, str(os.getuid())) for line in known):
        yield Check("subordinate ids", "ok", f"/etc/subuid has {user}", "builds")
    else:
        yield Check(
            "subordinate ids", "warning", f"/etc/subuid does not have {user}", "builds",
            "usermod --add-subuids 100000-165535 --add-subgids 100000-165535 " + user,
        )  # fmt: skip


def _infiniband() -> Iterator[Check]:
    folder = Path("/sys/class/infiniband")
    ports = []
    for port in sorted(folder.glob("*/ports/*")) if folder.is_dir() else ():
        try:
            state = (port / "state").read_text().split(":")[-1].strip()
        except OSError:
            state = "unknown"
        ports.append(f"{port.parts[-3]}/{port.name} {state}")
    devices = Path("/dev/infiniband").is_dir()
    if ports or devices:
        detail = ", ".join(ports) or "no ports"
        yield Check("infiniband", "ok" if devices else "warning", detail)
    else:
        yield Check("infiniband", "missing", "no device")


def _slurm() -> Iterator[Check]:
    path = _tool("sinfo")
    if path is None:
        yield Check("slurm", "missing", "no sinfo program")
        return
    version = (_ask([path, "--version"]) or "").strip()
    if not version:
        yield Check("slurm", "warning", f"{path} fails", hint="see 'sinfo --version'")
        return
    job = own_job()
    yield Check("slurm", "ok", f"{version}{f', inside job {job}' if job else ''}")


def _torch() -> Iterator[Check]:
    nvidia = sorted(path.name for path in Path("/dev").glob("nvidia*") if path.name[6:].isdigit())
    amd = Path("/dev/kfd").exists()
    try:
        import torch
    except Exception as error:  # a broken torch fails in many ways
        yield Check(
            "torch", "missing", f"{type(error).__name__}: {error}", "always", "pip install torch"
        )
        return
    build = torch.version.cuda or torch.version.hip
    kind = f"CUDA {build}" if torch.version.cuda else f"ROCm {build}" if build else "CPU only"
    yield Check("torch", "ok", f"{torch.__version__} ({kind})", "always")
    import zmq

    curve = "with" if zmq.has("curve") else "without"
    yield Check("zeromq", "ok", f"libzmq {zmq.zmq_version()}, {curve} CURVE", "always")
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    if names and torch.cuda.is_available():
        yield Check("gpu", "ok", ", ".join(names))
    elif nvidia or amd:
        yield Check(
            "gpu", "warning", f"{', '.join(nvidia) or '/dev/kfd'} exists, but torch cannot use it",
            hint="install a torch build for it, or check the driver (nvidia-smi, rocminfo)",
        )  # fmt: skip
    else:
        yield Check("gpu", "missing", "none")


def _tool(name: str) -> str | None:
    return shutil.which(name, path=host_environment(os.environ)["PATH"])


def _ask(argv: list[str]) -> str | None:
    """Return the output of a short program; None if it fails."""
    try:
        done = subprocess.run(
            argv, capture_output=True, text=True, timeout=10, stdin=subprocess.DEVNULL, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout


def _sysctl(name: str) -> str | None:
    try:
        return Path("/proc/sys", *name.split(".")).read_text().strip()
    except OSError:
        return None

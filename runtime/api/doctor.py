"""What this machine has: the checks of ``dnictl doctor``.

``plan/host.py`` asks those of them that decide whether a chain can start here.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shlex
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from dni_runtime.errors import UnavailableError
from dni_runtime.image.apptainer import Apptainer, host_environment, usable_apptainer
from dni_runtime.plan.host import gpu_devices
from dni_runtime.run.record import user_name
from dni_runtime.run.rundir import socket_path
from dni_runtime.schedulers.slurm.allocation import beside
from dni_runtime.schedulers.slurm.commands import own_job
from dni_runtime.schedulers.slurm.steps import step_environment
from dni_runtime.schedulers.ssh import on_each, ssh
from dni_runtime.spec.profile import ProfileSpec

Status = Literal["ok", "warning", "missing"]
Need = Literal["always", "containers", "builds", "optional"]

_GIB = 1 << 30
_NODE_TIMEOUT_S = 180.0  # importing torch from a cold file system takes a while
_TEMP_WANTED_BYTES = 4 * _GIB
# Builds and ipc sockets fail on these (field reports; apptainer-build, "APPTAINER_TMPDIR").
_REMOTE = re.compile(r"nfs|lustre|gpfs|beegfs|ceph|smb|cifs|panfs|afs|9p|fuse\.sshfs")
_PROGRAMS = {
    "mksquashfs": "packs the modules' layers; package squashfs-tools",
    "unsquashfs": "reads the spec of an image without a lock; package squashfs-tools",
    "debootstrap": "builds Debian base images; package debootstrap",
    "newuidmap": "fakeroot builds; package uidmap",
}


@dataclass(frozen=True)
class Check:
    name: str
    status: Status  # ``warning``: works with limits
    detail: str  # the finding
    need: Need = "optional"  # ``optional``: by some chains only
    hint: str | None = None  # advice


def examine() -> Iterator[Check]:
    """Check this machine; yield each result as soon as it is known (torch takes seconds)."""
    yield Check("python", "ok", f"{platform.python_version()}, {sys.executable}", "always")
    cores = len(os.sched_getaffinity(0))
    yield Check("cpu", "ok", f"{cores} cores usable, {platform.machine()}, {platform.release()}")
    yield from _containers()
    yield from _folders()
    yield from _builds()
    yield _infiniband()
    yield _slurm()
    yield from _libraries()


def examine_hosts(
    hosts: Sequence[str], profile: ProfileSpec, *, steps: bool
) -> dict[str, list[Check]]:
    """Let other hosts check themselves, all at once: as ``steps`` of this job, or by ssh.

    The site profile's prologue comes first, and its Python runs.
    """
    lines = "\n".join([*profile.prologue, 'exec "$@"'])
    doctor = [profile.python or sys.executable, "-m", "dnictl", "doctor", "--json"]
    argv = ["bash", "-c", lines, "dnictl", *doctor]
    commands = {host: [*beside([host]), *argv] if steps else ssh(host, argv) for host in hosts}
    environ = step_environment(os.environ) if steps else None
    found: dict[str, list[Check]] = {}
    for host, done in on_each(commands, _NODE_TIMEOUT_S, environ).items():
        try:
            # A host's shell may greet before.
            answer = "{" + f"\n{done.stdout}".rpartition("\n{")[2]
            found[host] = [Check(**check) for check in json.loads(answer)["checks"]]
        except (ValueError, TypeError, KeyError):
            told = [line for line in done.stderr.splitlines() if not line.startswith("srun: ")]
            said = told[-1:] or [f"exit status {done.returncode}"]
            hint = f"this must work there: {shlex.join(doctor)}"
            found[host] = [Check("node", "missing", said[0], "always", hint)]
    return found


def _containers() -> Iterator[Check]:
    setuid = False
    try:
        tool = usable_apptainer()
        setuid = _has_setuid(tool)
        yield Check("apptainer", "ok", f"{tool}, {tool.path}", "containers")
    except UnavailableError as error:
        yield Check("apptainer", "missing", error.message, "containers", error.hint)
    for check in (_namespaces(), _fuse()):
        if setuid and check.status == "missing":
            hint = "not needed to run containers: Apptainer has its setuid part; build elsewhere"
            check = replace(check, status="warning", hint=hint)
        yield check
    # Module images are a base image with an overlay layer; overlayfs(5): unprivileged since 5.11.
    kernel = platform.release()
    if tuple(map(int, re.findall(r"\d+", kernel)[:2])) >= (5, 11):
        yield Check("overlay", "ok", f"kernel {kernel}", "containers")
    elif _tool("fuse-overlayfs"):
        yield Check("overlay", "ok", "fuse-overlayfs", "containers")
    else:
        hint = "install fuse-overlayfs, or build with 'dnictl build --full'"
        yield Check("overlay", "missing", f"kernel {kernel} is older than 5.11", "containers", hint)


def _has_setuid(tool: Apptainer) -> bool:
    """Whether the administrator has installed the part that needs no user namespaces."""
    folder = (_ask(str(tool.path), "buildcfg", "LIBEXECDIR") or "").strip()
    try:
        starter = Path("/", folder, tool.name, "bin", "starter-suid").stat()
    except OSError:
        return False
    return starter.st_uid == 0 and bool(starter.st_mode & stat.S_ISUID)


def _fuse() -> Check:
    if os.access("/dev/fuse", os.R_OK | os.W_OK):
        helpers = filter(_tool, ("squashfuse_ll", "squashfuse", "fuse-overlayfs"))
        detail = f"/dev/fuse; {', '.join(helpers) or 'no helpers'}"
        return Check("fuse", "ok", detail, "containers")
    there = os.path.exists("/dev/fuse")
    problem = "/dev/fuse cannot be opened" if there else "no /dev/fuse"
    hint = "chmod 666 /dev/fuse" if there else "modprobe fuse"
    return Check("fuse", "missing", problem, "containers", hint)


def _namespaces() -> Check:
    """Try user namespaces: four settings and the security module decide whether they work."""
    name = "user namespaces"
    if (unshare := _tool("unshare")) is None:
        return Check(name, "warning", "cannot be checked: no unshare program", "containers")
    if _ask(unshare, "--user", "--map-root-user", "true") is not None:
        return Check(name, "ok", "available to this user", "containers")
    causes = {
        "user.max_user_namespaces": "0",
        "kernel.unprivileged_userns_clone": "0",
        "kernel.apparmor_restrict_unprivileged_userns": "1",
    }.items()
    settings = [f"{it} = {bad}" for it, bad in causes if _read("/proc/sys", *it.split(".")) == bad]
    why = ", ".join(settings) or "the kernel refuses them"
    hint = "ask the administrator to allow them, or to install Apptainer with its setuid part"
    return Check(name, "missing", why, "containers", hint)


def _folders() -> Iterator[Check]:
    temporary = tempfile.gettempdir()
    for name, folder in (
        ("temporary folder", temporary),
        ("build folder", os.environ.get("APPTAINER_TMPDIR") or temporary),
        ("runs folder", os.environ.get("DNICTL_RUNS") or "."),
    ):
        if not os.path.isdir(folder):
            yield Check(name, "warning", f"{folder} does not exist", hint="create it")
            continue
        kind, free, hint = _file_system(folder), shutil.disk_usage(folder).free, None
        if _REMOTE.search(kind) and name != "runs folder":
            hint = "a shared file system: set TMPDIR and APPTAINER_TMPDIR to a local folder"
        elif free < _TEMP_WANTED_BYTES and name == "build folder":
            hint = "a build needs about 4 GiB: set APPTAINER_TMPDIR to a larger folder"
        elif os.statvfs(folder).f_flag & os.ST_NOEXEC and name == "build folder":
            hint = "mounted noexec: set APPTAINER_TMPDIR to another folder"
        detail = f"{os.path.abspath(folder)}: {kind}, {free / _GIB:.1f} GiB free"
        yield Check(name, "warning" if hint else "ok", detail, hint=hint)
    sockets, hint = str(socket_path(Path("x")).parent), None
    if len(f"{sockets}/dni-0123456789ab/") + 40 + len(".sock") > 107:
        hint = "too long for unix(7): unset XDG_RUNTIME_DIR"
    detail = f"{sockets}: {_file_system(sockets)}"
    yield Check("socket folder", "warning" if hint else "ok", detail, hint=hint)


def _builds() -> Iterator[Check]:
    for name, why in _PROGRAMS.items():
        if path := _tool(name):
            yield Check(name, "ok", path, "builds")
        else:
            yield Check(name, "missing", "not installed", "builds", why)
    user, lines = user_name(os.getuid()), (_read("/etc/subuid") or "").splitlines()
    if any(line.split(":")[0] in (user, str(os.getuid())) for line in lines):
        yield Check("subordinate ids", "ok", f"/etc/subuid has {user}", "builds")
    else:
        hint = f"usermod --add-subuids 100000-165535 --add-subgids 100000-165535 {user}"
        detail = f"/etc/subuid does not have {user}"
        yield Check("subordinate ids", "warning", detail, "builds", hint)


def _infiniband() -> Check:
    files = sorted(Path("/sys/class/infiniband").glob("*/ports/*/state"))
    ports = [f"{it.parts[-4]}/{it.parts[-2]} {(_read(it) or '?').split()[-1]}" for it in files]
    devices = Path("/dev/infiniband").is_dir()
    if not (ports or devices):
        return Check("infiniband", "missing", "no device")
    return Check("infiniband", "ok" if devices else "warning", ", ".join(ports) or "no ports")


def _slurm() -> Check:
    path = _tool("sinfo")
    if path is None:
        return Check("slurm", "missing", "no sinfo program")
    version, job = (_ask(path, "--version") or "").strip(), own_job()
    if not version:
        return Check("slurm", "warning", f"{path} fails", hint="see 'sinfo --version'")
    return Check("slurm", "ok", f"{version}{f', inside job {job}' if job else ''}")


def _libraries() -> Iterator[Check]:
    try:
        import torch
    except Exception as error:  # a broken torch fails in many ways
        problem = f"{type(error).__name__}: {error}"
        lacks = isinstance(error, ModuleNotFoundError) and error.name == "torch"
        hint = "pip install torch" if lacks else "install a build of torch that fits this machine"
        yield Check("torch", "missing", problem, "always", hint)
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
    elif devices := gpu_devices():
        problem = f"{', '.join(devices)} in /dev, but torch cannot use it"
        hint = "install a torch build for it, or check the driver (nvidia-smi, rocminfo)"
        yield Check("gpu", "warning", problem, hint=hint)
    else:
        yield Check("gpu", "missing", "none")


def _tool(name: str) -> str | None:
    return shutil.which(name, path=host_environment(os.environ)["PATH"])


def _ask(*argv: str) -> str | None:
    """Return the output of a short program; None if it fails."""
    try:
        done = subprocess.run(
            argv, capture_output=True, text=True, timeout=10, stdin=subprocess.DEVNULL, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout


def _file_system(folder: str) -> str:
    return (_ask("df", "--output=fstype", folder) or "unknown").split()[-1]


def _read(*path: str | Path) -> str | None:
    try:
        return Path(*path).read_text(encoding="utf-8").strip()
    except OSError:
        return None

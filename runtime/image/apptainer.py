"""Interface to the ``apptainer`` (or ``singularity``) program; no other module depends on it.

Functions named ``…_argv`` are pure: they return a command as a list. :func:`stream` and
:func:`capture` run one. Flags are those of apptainer(1) 1.1 and newer.
"""

from __future__ import annotations

import csv
import io
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from dni_runtime.errors import BuildError, UnavailableError, UsageError
from dni_runtime.files import expanded

SETUP_PREFIXES = (
    Path("/opt/dni-apptainer"),
    Path("~/.local/share/dni-runtime/apptainer"),
)
"""Where ``scripts/setup-apptainer`` unpacks Apptainer, for root and for an ordinary user."""

SYSTEM_FOLDERS = ("/usr/local/sbin", "/usr/sbin", "/sbin")
"""Folders of debootstrap and mke2fs, which are often not in the PATH of ordinary users."""

LEAKING = re.compile(
    r"PYTHON(?!UNBUFFERED$).*|(APPTAINER|SINGULARITY)ENV_.*"
    r"|(APPTAINER|SINGULARITY)_(?!(CACHEDIR|LOCALCACHEDIR|TMPDIR|CONFIGDIR|KEYSDIR|SYPGPDIR"
    r"|AUTHFILE|DOCKER_\w+|ENCRYPTION_\w+)$).*"
    r"|VIRTUAL_ENV.*|CONDA_.*|LD_(PRELOAD|AUDIT)|BASH_ENV|ENV|BASH_FUNC_.*"
)
"""Host variables that would change the image's Python or the container; others are passed on.

Of Apptainer's own settings those stay that say where it works, and what it fetches, decrypts and
signs with.
"""

_HINTS: tuple[tuple[re.Pattern[str], str], ...] = (
    (
        re.compile(r"requesting capability set|while unpacking.*/dev/|mknod.*not permitted", re.I),
        "run Apptainer as an ordinary user, not as root",
    ),
    (
        re.compile(r"/etc/sub[ug]id|newuidmap|newgidmap|could not use fakeroot", re.I),
        "ask the administrator for a range of subordinate ids for you "
        "(usermod --add-subuids --add-subgids) and the package uidmap",
    ),
    (
        re.compile(r"user namespace|failed to create.*namespace", re.I),
        "this machine denies user namespaces to ordinary users: see 'dnictl doctor'",
    ),
    (
        re.compile(r"debootstrap.*(not found|not in)|find debootstrap", re.I),
        "install debootstrap, or use another image.base.bootstrap (docker, oras, localimage)",
    ),
    (
        re.compile(r"no such host|dial tcp|i/o timeout|could not resolve|connection refused", re.I),
        "the source of the base image cannot be reached from here: check the network and proxy "
        "settings, or use image.base.bootstrap: localimage",
    ),
)


_FULL = re.compile(r"no space left on device|disk quota exceeded", re.I)
_WORK_FOLDERS = {
    "APPTAINER_TMPDIR": "",
    "SINGULARITY_TMPDIR": "",
    "TMPDIR": "/tmp",
    "XDG_CACHE_HOME": "~/.cache",
    "APPTAINER_CACHEDIR": "~/.apptainer",
}
"""Variables that say where builds write, each with the folder without it; empty: none."""

_SCANT_BYTES = 4 << 30  # an image with torch is unpacked in a folder, then packed


@dataclass(frozen=True, slots=True)
class Apptainer:
    path: Path
    name: Literal["apptainer", "singularity"]
    version: tuple[int, int, int]  # major, minor, patch

    def __str__(self) -> str:
        return f"{self.name} {'.'.join(map(str, self.version))}"


@dataclass(frozen=True, slots=True)
class Mount:
    """A host folder or file inside a container, each as an absolute path."""

    source: str
    target: str
    read_only: bool = True

    def __str__(self) -> str:
        """Return the value of ``--mount``: CSV, so that paths may hold ``:``, ``,`` and quotes."""
        for path in (self.source, self.target):
            if not path.startswith("/") or any(c in path for c in "\n\r\0"):
                raise UsageError(f"{path!r} cannot be mounted: not an absolute path of one line")
        fields = ["type=bind", f"source={self.source}", f"destination={self.target}"]
        text = io.StringIO()
        csv.writer(text, lineterminator="").writerow([*fields, "ro"] if self.read_only else fields)
        return text.getvalue()


def parse_version(text: str) -> tuple[int, int, int] | None:
    """Return the version in the output of ``apptainer version`` or ``--version``."""
    match = re.search(r"(\d+)\.(\d+)(?:\.(\d+))?", text)
    return None if match is None else (int(match[1]), int(match[2]), int(match[3] or 0))


def candidates() -> list[Path]:
    """Return the container programs that may exist, best first."""
    if chosen := os.environ.get("DNI_APPTAINER"):
        return [Path(chosen)]
    path = os.environ.get("PATH", os.defpath)
    programs = [shutil.which("apptainer", path=path)]
    prefixes = [Path(p) for p in (os.environ.get("DNI_APPTAINER_PREFIX"),) if p]
    programs += [str(expanded(p) / "usr/bin/apptainer") for p in (*prefixes, *SETUP_PREFIXES)]
    programs.append(shutil.which("singularity", path=path))
    return [Path(f) for f in programs if f is not None and os.access(f, os.X_OK)]


def find_apptainer() -> Apptainer:
    """Find the container program: ``$DNI_APPTAINER``, the PATH, or the setup script's prefixes.

    Raises ``UnavailableError`` if there is none, or it does not run or is too old.
    """
    hint = "install Apptainer 1.1 or newer, or set DNI_APPTAINER to its program"
    problem = "Apptainer is not installed: no 'apptainer' or 'singularity' was found"
    for path in candidates():
        try:
            answer = capture([str(path), "version"], what=f"{path} version", timeout_s=30)
        except (BuildError, UnavailableError) as error:
            problem = f"{path} does not run: {error}"
            continue
        version = parse_version(answer) or (0, 0, 0)
        # Apptainer 1.x also installs a 'singularity', with Apptainer's version numbers.
        ce = path.name == "singularity" and version >= (2, 0, 0)
        if version < ((3, 8, 0) if ce else (1, 1, 0)):
            problem = f"{path} is too old: {answer.strip() or 'it prints no version'}"
            continue
        return Apptainer(path, "singularity" if ce else "apptainer", version)
    raise UnavailableError(problem, hint=hint)


def build_argv(tool: Apptainer, image: str, definition: str, *, test: bool = True) -> list[str]:
    """Return the command that builds ``image`` from a definition file (apptainer-build(1)).

    A build by an ordinary user implies ``--fakeroot``. zstd packs a torch image 6 times faster than
    the default gzip, for 2 % more bytes. Paths are relative to the current folder.
    """
    argv = [str(tool.path), "build", "--force"]
    if tool.name == "apptainer" and tool.version >= (1, 4, 0):
        argv += ["--mksquashfs-args", "-comp zstd -Xcompression-level 3"]
    if not test:
        argv.append("--notest")
    return [*argv, image, definition]


def run_argv(
    tool: Apptainer,
    image: str | Path,
    args: Sequence[str],  # the worker's
    *,
    mounts: Sequence[Mount] = (),  # beside /dev, /proc, /sys and /tmp
    nv: bool = False,
    rocm: bool = False,
    extra: Sequence[str] = (),  # options of "run", from a site profile
) -> list[str]:
    """Return the command that runs an image's runscript; it execs the worker, which gets signals.

    Never ``--compat`` or ``--no-init``: as PID 1 the worker would ignore signals without a handler.
    Run it with :func:`host_environment`. If ``nv`` (NVIDIA) or ``rocm`` (AMD) finds no devices and
    driver on the host, Apptainer only warns: the worker itself must refuse to start.
    """
    argv = [str(tool.path), "--quiet", "run"]
    if tool.name == "apptainer" or tool.version >= (3, 10, 0):  # SingularityCE
        argv.append("--no-eval")  # values with $, ` or quotes stay unchanged
    # Keep ~/.local and the current folder out of the image; a cwd below $HOME would be mounted in
    # spite of --no-home.
    argv += ["--no-home", "--no-mount", "cwd", "--pwd", "/"]
    if nv:
        argv.append("--nv")
    if rocm:
        argv.append("--rocm")
    for mount in mounts:
        argv += ["--mount", str(mount)]  # --bind cannot carry ':' and ','
    return [*argv, *extra, str(image), *args]


def sign_argv(tool: Apptainer, image: str | Path, *, key: Path | None = None) -> list[str]:
    """Return the command that signs an image with the user's PGP key or a private PEM key."""
    return [str(tool.path), "sign", *(["--key", str(key)] if key else []), str(image)]


def verify_argv(tool: Apptainer, image: str | Path, *, key: Path | None = None) -> list[str]:
    """Return the command that verifies an image with the local PGP keyring or a public PEM key.

    ``--local`` keeps verification off the network: key servers do not establish trust.
    """
    return [str(tool.path), "verify", *(["--key", str(key)] if key else ["--local"]), str(image)]


def sif_argv(tool: Apptainer, action: str, *args: str) -> list[str]:
    """Return a command for the objects in a SIF file (apptainer-sif(1))."""
    return [str(tool.path), "sif", action, *args]


def host_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the host's environment without variables that would break the image's Python.

    Apptainer passes the host's variables to the container (``--cleanenv`` would drop SLURM_* and
    CUDA_VISIBLE_DEVICES too). The system folders are added to PATH for the builder's helpers.
    """
    kept = {k: v for k, v in environ.items() if LEAKING.fullmatch(k) is None}
    folders = kept.get("PATH", os.defpath).split(os.pathsep)
    folders += [folder for folder in SYSTEM_FOLDERS if folder not in folders]
    return kept | {"PATH": os.pathsep.join(folders)}


def hint_for(lines: Sequence[str]) -> str | None:
    """Return a hint for a failure, from the program's last lines."""
    text = "\n".join(lines)
    if _FULL.search(text):
        return room_hint()
    return next((hint for pattern, hint in _HINTS if pattern.search(text)), None)


def room_hint(*others: Path, below_bytes: float = math.inf) -> str | None:
    """Name the fullest of the folders that a build writes to, and what sets it.

    ``others`` are folders that no variable sets. None if all have ``below_bytes`` free.
    """
    named = {name: os.environ.get(name) or folder for name, folder in _WORK_FOLDERS.items()}
    folders = [(expanded(path), name) for name, path in named.items() if path]
    free_mb = {it: _free_bytes(it[0]) // 10**6 for it in (*folders, *((one, "") for one in others))}
    folder, name = fullest = min(free_mb, key=free_mb.__getitem__)
    if free_mb[fullest] >= below_bytes / 1e6:
        return None
    room = f"{free_mb[fullest]} MB free: make room there"
    if not name:
        return f"{folder} has {room}"
    return f"{folder} ({name}) has {room}, or set {name} to a larger folder of a local disk"


def _free_bytes(folder: Path) -> int:
    try:
        status = os.statvfs(next(path for path in (folder, *folder.parents) if path.exists()))
        return status.f_bavail * status.f_frsize
    except OSError:
        return sys.maxsize


def stream(
    argv: Sequence[str],
    *,
    what: str,  # its purpose, for the error: "building the base image"
    on_line: Callable[[str], None] | None = None,  # of its output and its errors
    cwd: Path | None = None,
    log: Path | None = None,  # for the whole output
    environ: Mapping[str, str] | None = None,  # default: this process's; it is cleaned
) -> None:
    """Run a program to its end, passing on each line that it prints."""
    tail: deque[str] = deque(maxlen=20)
    try:
        process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            cwd=cwd,
            env=host_environment(os.environ if environ is None else environ),
            umask=0o022,  # users other than the builder read the image
            text=True,
            errors="replace",
        )
    except OSError as error:
        raise UnavailableError(f"{argv[0]} cannot be started: {error.strerror}") from error
    with process, open(log or os.devnull, "w", encoding="utf-8") as file:
        assert process.stdout is not None
        try:
            for raw in process.stdout:
                line = raw.rstrip()
                file.write(line + "\n")
                if line:
                    tail.append(line)
                    if on_line is not None:
                        on_line(line)
        except BaseException:
            process.terminate()
            raise
    if (code := process.returncode) != 0:
        ended = f"with exit status {code}" if code > 0 else f"by signal {-code}"
        unknown = ["see the lines above", f"all of them: {log}" if log else None]
        unknown.append(room_hint(below_bytes=_SCANT_BYTES))
        hint = hint_for(tail) or "; ".join(filter(None, unknown))
        raise BuildError(f"{what} failed {ended}", tail=tail, hint=hint)


def capture(argv: Sequence[str], *, what: str, timeout_s: float = 120) -> str:
    """Run a short program and return what it prints; see :func:`capture_bytes`."""
    return capture_bytes(argv, what=what, timeout_s=timeout_s).decode(errors="replace")


def capture_bytes(
    argv: Sequence[str], *, what: str, timeout_s: float = 120, most_bytes: int = 16 << 20
) -> bytes:
    """Run a short program and return its output, which an untrusted file may determine.

    Raises ``BuildError`` if it fails, takes too long or prints more than ``most_bytes``.
    """
    with tempfile.TemporaryFile() as errors:
        try:
            process = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=host_environment(os.environ),
            )
        except OSError as error:
            raise UnavailableError(f"{argv[0]} cannot be started: {error.strerror}") from error
        until_s = time.monotonic() + timeout_s
        timer = threading.Timer(timeout_s, process.kill)
        timer.start()
        try:
            assert process.stdout is not None
            with process.stdout as pipe:
                printed = pipe.read(most_bytes + 1)
            if len(printed) > most_bytes:
                process.kill()
            process.wait()
        except BaseException:
            process.kill()
            raise
        finally:
            timer.cancel()
        if time.monotonic() >= until_s and process.returncode != 0:
            raise BuildError(f"{what} took longer than {timeout_s:g} s")
        if len(printed) > most_bytes:
            raise BuildError(f"{what} printed more than {most_bytes} bytes")
        if process.returncode != 0:
            errors.seek(0)
            text = (printed + b"\n" + errors.read(most_bytes)).decode(errors="replace")
            tail = [line for line in text.splitlines() if line][-20:]
            raise BuildError(
                f"{what} failed with exit status {process.returncode}",
                tail=tail,
                hint=hint_for(tail),
            )
    return printed


def usable_apptainer() -> Apptainer:
    """Find the container program; raises ``UnavailableError`` if there is none, and for root."""
    tool = find_apptainer()
    if os.geteuid() == 0:
        raise UnavailableError(
            f"{tool}, {tool.path}, is not run as root: its containers would run as root",
            hint="run this as an ordinary user",
        )
    return tool

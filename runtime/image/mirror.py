"""Where debootstrap finds packages: the build host's own mirror, or debootstrap's default."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from dni_runtime.errors import SpecError, UnavailableError
from dni_runtime.image.apptainer import host_environment
from dni_runtime.spec import BaseSpec


def parse_os_release(text: str) -> dict[str, str]:
    """The variables of an os-release(5) file."""
    pairs = (line.split("=", 1) for line in text.splitlines() if re.match(r"[A-Z_]+=", line))
    return {name: value.strip().strip("\"'") for name, value in pairs}


def pick_target(targets: str, codename: str) -> str | None:
    """The main archive's address in the output of ``apt-get indextargets``."""
    for line in targets.splitlines():
        release, component, address = line.split(maxsplit=2)
        if release == codename and component == "main":
            return address.rstrip("/")
    return None


def pick_default(program: str) -> str | None:
    """``DEF_MIRROR`` of the debootstrap program, which is a shell script."""
    match = re.search(r"^DEF_MIRROR=[\"']?([^\"'\s]+)", program, re.M)
    return None if match is None else match[1]


def _apt_mirror(codename: str) -> str | None:
    argv = ["apt-get", "indextargets", "--format", "$(RELEASE) $(COMPONENT) $(REPO_URI)"]
    try:
        done = subprocess.run(
            [*argv, "Created-By: Packages"],
            capture_output=True,
            text=True,
            timeout=30,
            check=True,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return pick_target(done.stdout, codename)


def debian_mirror(
    base: BaseSpec,
    *,
    environ: Mapping[str, str] | None = None,
    os_release: Path = Path("/etc/os-release"),
) -> str:
    """The mirror for a debootstrap base.

    In this order: ``image.base.mirror``, the host's own when it is a Debian, and what its
    debootstrap program takes by default.

    Raises:
        UnavailableError: debootstrap is not installed.
        SpecError: No mirror is known.
    """
    if base.mirror is not None:
        return base.mirror
    path = host_environment(os.environ if environ is None else environ)["PATH"]
    program = shutil.which("debootstrap", path=path)
    if program is None:
        raise UnavailableError(
            "debootstrap is not installed, and image.base.bootstrap asks for it",
            hint="install it (scripts/setup-apptainer does), or start from another base: "
            "image.base.bootstrap docker, oras, library or localimage",
        )
    found: str | None = None
    try:
        release = parse_os_release(os_release.read_text(encoding="utf-8"))
    except OSError:
        release = {}
    if release.get("ID") == "debian" and "VERSION_CODENAME" in release:
        found = _apt_mirror(release["VERSION_CODENAME"])
    found = found or pick_default(Path(program).read_text(encoding="utf-8", errors="replace"))
    if found is None:
        raise SpecError(
            "no package mirror is known for debootstrap",
            location=("image", "base", "mirror"),
            hint="write the address of a Debian mirror there",
        )
    return found

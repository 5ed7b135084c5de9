"""Where debootstrap finds packages: the build host's own mirror, or debootstrap's default."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping, Sequence
from email.parser import HeaderParser
from pathlib import Path

from dni_runtime.errors import SpecError, UnavailableError
from dni_runtime.image.apptainer import host_environment
from dni_runtime.spec import BaseSpec

_ROLLING = ("stable", "testing", "unstable", "sid")


def parse_os_release(text: str) -> dict[str, str]:
    """The variables of an os-release(5) file."""
    pairs = (line.split("=", 1) for line in text.splitlines() if re.match(r"[A-Z_]+=", line))
    return {name: value.strip().strip("\"'") for name, value in pairs}


def main_archives(text: str, *, deb822: bool) -> list[tuple[str, str]]:
    """Suites and addresses of the main archives that an apt source file names (sources.list(5)).

    ``deb822``: it is a ``.sources`` file; else it has one source a line.
    """
    found = []
    if deb822:
        for stanza in re.split(r"\n\s*\n", re.sub(r"(?m)^#.*\n?", "", text)):
            fields = HeaderParser().parsestr(stanza.lstrip())
            enabled = fields.get("Enabled", "yes").strip().lower() not in ("no", "false", "0")
            binary = "deb" in fields.get("Types", "").split()
            if enabled and binary and "main" in fields.get("Components", "").split():
                addresses, suites = fields.get("URIs", "").split(), fields.get("Suites", "").split()
                found += [(suite, address) for suite in suites for address in addresses]
        return found
    for line in text.splitlines():
        words = re.sub(r"\[[^]]*\]", " ", line.split("#")[0]).split()
        if len(words) > 3 and words[0] == "deb" and "main" in words[3:]:
            found.append((words[2], words[1]))
    return found


def pick_archive(archives: Sequence[tuple[str, str]], codename: str) -> str | None:
    """The address of the distribution's own archive (not its updates'), usable by debootstrap."""
    for suite, address in archives:
        if suite in (codename, *_ROLLING) and re.match(r"(https?|ftp|file):", address):
            return address.rstrip("/")
    return None


def pick_default(program: str) -> str | None:
    """``DEF_MIRROR`` of the debootstrap program, which is a shell script."""
    match = re.search(r"^DEF_MIRROR=[\"']?([^\"'\s]+)", program, re.M)
    return None if match is None else match[1]


def _host_mirror(codename: str, apt: Path) -> str | None:
    # The files are read here because `apt-get indextargets` says nothing before `apt-get update`.
    archives: list[tuple[str, str]] = []
    parts = apt / "sources.list.d"
    for path in (apt / "sources.list", *sorted(parts.glob("*.list")), *parts.glob("*.sources")):
        try:
            text = path.read_text(encoding="utf-8", errors="replace")
        except OSError:
            continue
        archives += main_archives(text, deb822=path.suffix == ".sources")
    return pick_archive(archives, codename)


def debian_mirror(
    base: BaseSpec,
    *,
    environ: Mapping[str, str] | None = None,
    etc: Path = Path("/etc"),
) -> str:
    """The mirror for a debootstrap base.

    In this order: ``image.base.mirror``, the host's own if it is a Debian, and the default of its
    debootstrap program.
    """
    if base.mirror is not None:
        return base.mirror
    path = host_environment(os.environ if environ is None else environ)["PATH"]
    program = shutil.which("debootstrap", path=path)
    if program is None:
        raise UnavailableError(
            "debootstrap is not installed, and image.base.bootstrap asks for it",
            hint="install it with the package manager, or start from another base: "
            "image.base.bootstrap docker, oras, library or localimage",
        )
    found: str | None = None
    try:
        release = parse_os_release((etc / "os-release").read_text(encoding="utf-8"))
    except OSError:
        release = {}
    if release.get("ID") == "debian" and "VERSION_CODENAME" in release:
        found = _host_mirror(release["VERSION_CODENAME"], etc / "apt")
    found = found or pick_default(Path(program).read_text(encoding="utf-8", errors="replace"))
    if found is None:
        raise SpecError(
            "no package mirror is known for debootstrap",
            location=("image", "base", "mirror"),
            hint="write the address of a Debian mirror there",
        )
    return found

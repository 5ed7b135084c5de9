"""Where debootstrap finds packages, by the real apt-get on sources of our own."""

from __future__ import annotations

import platform
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from dni_runtime.errors import SpecError
from dni_runtime.image.base import debian_mirror

SOURCES = """\
Types: deb
# deb snapshot
URIs: http://m/security
Suites: bookworm-security
Components: main

Types: deb deb-src
URIs: http://m/off
Suites: bookworm
Components: main
Enabled: no

Types: deb
URIs: mirror+file:/etc/apt/mirrors
Suites: bookworm
Components: main

Types: deb
URIs: http://m/vendor
Suites: bookworm
Components: stable

Types: deb
URIs: http://m/debian/
Suites: bookworm bookworm-updates
Components: main contrib
"""
ONE_LINE = """\
# deb http://m/commented bookworm main
deb-src http://m/source bookworm main
deb [arch=amd64 signed-by=/k.gpg] http://m/other bookworm contrib
deb [ trusted=yes ] http://m/debian bookworm contrib main # mine
"""
DEBIAN = {"ID": "debian", "VERSION_CODENAME": "bookworm"}


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Make this host one of this release, with these sources and debootstrap's own mirror."""

    def make(release: dict[str, str], *, default: str = "mirror:/default", **sources: str) -> None:
        (tmp_path / "sources.list.d").mkdir(exist_ok=True)
        for name, text in sources.items():
            (tmp_path / "sources.list.d" / f"debian.{name}").write_text(text)
        config = tmp_path / "apt.conf"
        config.write_text(f'Dir::Etc "{tmp_path}"; Dir::State::lists "{tmp_path}";\n')
        program = tmp_path / "debootstrap"
        program.write_text(f"#!/bin/sh\nset -e\n{default and f'DEF_MIRROR={default!r}'}\n")
        program.chmod(0o755)
        monkeypatch.setenv("APT_CONFIG", str(config))
        monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
        monkeypatch.setattr(platform, "freedesktop_os_release", lambda: release)

    return make


@pytest.mark.skipif(shutil.which("apt-get") is None, reason="apt-get is not installed")
@pytest.mark.parametrize("kind", ["list", "sources"])
def test_mirror_is_the_hosts_own(host: Callable[..., None], kind: str) -> None:
    host(DEBIAN, **{kind: {"list": ONE_LINE, "sources": SOURCES}[kind]})
    assert debian_mirror() == "http://m/debian"


@pytest.mark.skipif(shutil.which("apt-get") is None, reason="apt-get is not installed")
def test_mirror_of_updates_is_not_the_archives(host: Callable[..., None]) -> None:
    host(DEBIAN, list="deb http://m/u bookworm-updates main\n")
    assert debian_mirror() == "mirror:/default"


def test_mirror_without_a_debian_host(host: Callable[..., None]) -> None:
    host({"ID": "fedora", "VERSION_CODENAME": ""}, list=ONE_LINE)
    assert debian_mirror() == "mirror:/default"
    host({"ID": "fedora"}, default="")
    with pytest.raises(SpecError) as caught:
        debian_mirror()
    assert caught.value.path == "image.base.mirror"

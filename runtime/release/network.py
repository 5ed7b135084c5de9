"""Proxies and authorities, as pip and Apptainer find them.

Source: pip.pypa.io, "Configuration", "HTTPS Certificates", "Using a proxy server"; pkg.go.dev,
crypto/x509, by which Apptainer checks certificates.
"""

from __future__ import annotations

import configparser
import os
import ssl
import sys
from pathlib import Path

from dni_runtime.errors import UsageError


def pip_settings() -> dict[str, str]:
    """Return the settings of all of pip's commands by its files, of which later ones count."""
    home, shared = Path.home(), os.environ.get("XDG_CONFIG_DIRS") or "/etc/xdg"
    folders = [Path(one, "pip") for one in reversed(shared.split(":"))]
    own = Path(os.environ.get("XDG_CONFIG_HOME") or home / ".config", "pip")
    folders += [Path("/etc"), home / ".pip", own, Path(sys.prefix)]
    chosen = os.environ.get("PIP_CONFIG_FILE", "")
    files = [*(str(folder / "pip.conf") for folder in folders), chosen]
    parser = configparser.RawConfigParser()
    try:
        parser.read(files if chosen != os.devnull else [], encoding="utf-8")
    except (configparser.Error, ValueError) as error:
        raise UsageError(f"pip's settings cannot be read: {error}") from None
    return dict(parser["global"]) if parser.has_section("global") else {}


def authorities(named: str | None) -> str | bool:
    """Return whom to trust: those who are named, else the system's, else those of requests.

    ``named``: in pip's files.
    """
    names = ("PIP_CERT", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "SSL_CERT_FILE")
    places = {name: os.environ.get(name) for name in names}
    for name, path in {**places, "pip.conf: cert": named}.items():
        if path and not Path(path).exists():
            raise UsageError(f"{name}={path!r} is not there", hint=f"unset {name}")
        if path:
            return path
    system = ssl.get_default_verify_paths()  # its folder may be SSL_CERT_DIR
    folder = system.capath if system.capath and any(Path(system.capath).iterdir()) else None
    first = folder if os.environ.get("SSL_CERT_DIR") else system.cafile
    return first or system.cafile or folder or True

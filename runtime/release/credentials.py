"""Passwords of registries, as Docker, Apptainer and Podman keep them.

Source: docker-login(1); ``apptainer registry login``; containers-auth.json(5).
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dni_runtime.errors import UsageError
from dni_runtime.release.names import HUB_NAMES

_HUB_KEY = "https://index.docker.io/v1/"
"""Docker's name for Docker Hub in these files; Podman's is docker.io."""
TOKEN = "<token>"
"""What helpers call the user if they know no password, but a token to get others with."""


def credentials(
    host: str, environ: Mapping[str, str] | None = None, *, repository: str = ""
) -> str | None:
    """Return ``user:password`` for a repository in base64, or ``TOKEN`` and the token itself."""
    environ = os.environ if environ is None else environ
    home = Path(environ.get("HOME", "/"))
    apptainer = Path(environ.get("APPTAINER_CONFIGDIR") or home / ".apptainer")
    files = [
        Path(environ.get("DOCKER_CONFIG") or home / ".docker") / "config.json",
        apptainer / "config.json",  # by Apptainer 1.4
        apptainer / "docker-config.json",
    ]
    if chosen := environ.get("REGISTRY_AUTH_FILE"):
        files.insert(0, Path(chosen))
    if runtime := environ.get("XDG_RUNTIME_DIR"):
        files.append(Path(runtime, "containers/auth.json"))
    name, first = (_HUB_KEY, "docker.io") if host in HUB_NAMES else (host, host)
    parts = [first, *repository.split("/")]
    keys = ["/".join(parts[:count]) for count in range(len(parts), 0, -1)]  # the nearest one counts
    for file in files:
        try:
            config: dict[str, Any] = json.loads(file.read_bytes())
        except FileNotFoundError:
            continue
        except (OSError, ValueError) as error:
            raise UsageError(f"{file} cannot be read: {error}") from None
        auths = config.get("auths") or {}
        for entry in (auths.get(key) or {} for key in (*keys, name)):
            if entry.get("identitytoken"):
                return f"{TOKEN}{entry['identitytoken']}"
            if entry.get("auth"):
                return str(entry["auth"])
        helper = (config.get("credHelpers") or {}).get(name) or config.get("credsStore")
        program = helper and shutil.which(f"docker-credential-{helper}", path=environ.get("PATH"))
        if program:
            done = subprocess.run([program, "get"], input=name.encode(), capture_output=True)
            if done.returncode == 0:
                said = json.loads(done.stdout)
                user, secret = said["Username"], said["Secret"]
                plain = base64.b64encode(f"{user}:{secret}".encode()).decode()
                return f"{TOKEN}{secret}" if user == TOKEN else plain
    return None

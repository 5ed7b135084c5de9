"""Real programs: what they need, and small helpers to run them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import pytest

from dni_runtime.errors import UnavailableError
from dni_runtime.image.apptainer import Apptainer, find_apptainer


def missing(reason: str) -> NoReturn:
    """A tool that is not there: a skip on a user's machine, a failure in CI."""
    if os.environ.get("CI", "").lower() not in ("", "0", "false"):
        pytest.fail(f"CI must run this test, but: {reason}")
    pytest.skip(reason)


def need(program: str) -> str:
    """The path of a program that a test cannot do without."""
    path = shutil.which(program)
    return path if path is not None else missing(f"{program} is not installed")


@pytest.fixture(scope="session")
def tool() -> Apptainer:
    """The container program, as an ordinary user."""
    try:
        found = find_apptainer()
    except UnavailableError as error:
        missing(str(error))
    if os.geteuid() == 0:
        missing("Apptainer is not run as root: use scripts/as-user")
    return found


@pytest.fixture(scope="session")
def slurm() -> str:
    """A Slurm of three hosts; the network that they share."""
    need("sbatch")
    shown = run(["sinfo", "--noheader", "--Node", "--format=%N %T"], timeout_s=60)
    up = {line.split()[0] for line in shown.stdout.splitlines() if line.endswith(" idle")}
    if not {"n1", "n2", "n3"} <= up:
        missing(
            "no testbed of three idle hosts n1, n2, n3: 'scripts/slurm-testbed up' as root, and "
            f'eval "$(scripts/slurm-testbed env)"; sinfo says: {shown.stdout or shown.stderr}'
        )
    return "10.77.0.0/24"


@pytest.fixture(scope="session")
def fashion_mnist() -> Path:
    """The folder of the real data, got as ``make demo`` gets it."""
    root = Path(__file__).resolve().parents[2]
    done = run([root / "scripts" / "fetch-fashion-mnist", root / "build" / "fashion-mnist"])
    if done.returncode == 69:
        missing(done.stderr)
    assert done.returncode == 0, done.stderr
    return Path(done.stdout.splitlines()[-1])


@dataclass(frozen=True)
class Dnictl:
    """Runs ``dnictl`` in a folder.

    Attributes:
        folder: The working directory.
        environ: Variables on top of this process's.
    """

    folder: Path
    environ: Mapping[str, str] = field(default_factory=dict)

    def run(
        self, *arguments: str | Path, expect: int = 0, timeout_s: float = 900
    ) -> subprocess.CompletedProcess[str]:
        """Run it to its end; the exit status must be the expected one."""
        done = subprocess.run(
            [sys.executable, "-m", "dnictl", *map(str, arguments)],
            cwd=self.folder,
            env={**os.environ, **self.environ},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        assert done.returncode == expect, (
            f"dnictl {' '.join(map(str, arguments))}: exit status {done.returncode}\n"
            f"{done.stdout}\n{done.stderr}"
        )
        return done

    def json(self, *arguments: str | Path, expect: int = 0) -> Any:
        """Run it with ``--json`` and return the document."""
        return json.loads(self.run(*arguments, "--json", expect=expect).stdout)


def run(
    argv: Sequence[str | Path],
    *,
    environ: Mapping[str, str] | None = None,
    timeout_s: float = 300,
) -> subprocess.CompletedProcess[str]:
    """Run another program, in this process's environment or in the one given."""
    return subprocess.run(
        [str(word) for word in argv],
        env=environ,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )

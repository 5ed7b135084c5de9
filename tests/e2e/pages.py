"""Pages of docs: the files that they show, and their commands, as printed."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

from tests.e2e.conftest import Dnictl
from tests.e2e.test_readme import run as in_bash

DOCS = Path(__file__).resolve().parents[2] / "docs"


def section(page: str, heading: str) -> str:
    return (DOCS / page).read_text().split(f"\n## {heading}\n")[1].split("\n## ")[0]


def commands(page: str, heading: str) -> str:
    """The commands below a heading."""
    return "".join(re.findall(r"```sh\n(.*?)```", section(page, heading), re.DOTALL))


def write_files(text: str, folder: Path) -> None:
    """Write the files whose names are in the first lines of their blocks."""
    for name, content in re.findall(r"```\w+\n# (\w+\.\w+)\n(.*?)```", text, re.DOTALL):
        (folder / name).write_text(content)


def shell(commands: str, folder: Path) -> str:
    """Run commands one after the other; ``dnictl`` is a fork of this process."""
    shown = []
    for line in commands.splitlines():
        words = shlex.split(in_bash(f"printf '%q ' {line}", folder), comments=True)
        if words[0] == "dnictl":
            shown.append(Dnictl(folder).run(*words[1:]).stdout)
        else:
            shown.append(in_bash(line, folder))
    return "\n\n".join(shown)


def python(name: str, folder: Path) -> str:
    done = subprocess.run(
        [sys.executable, name], cwd=folder, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout

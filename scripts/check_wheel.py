"""Build sdist and wheel from a clean tree, compare the wheel with the source, and try it."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import tomllib
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def expected() -> set[str]:
    """Every source and data file of the packages, by its name in the wheel."""
    mapping = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    names = set()
    for package, folder in mapping["package-dir"].items():
        for file in (ROOT / folder).rglob("*"):
            inside = file.relative_to(ROOT / folder)
            if file.is_file() and "__pycache__" not in file.parts:
                names.add(f"{package.replace('.', '/')}/{inside.as_posix()}")
    return names


def main() -> None:
    """Build, compare, install, run."""
    with tempfile.TemporaryDirectory() as scratch:
        out, tree = Path(scratch, "dist"), Path(scratch, "tree")
        ignore = shutil.ignore_patterns("build", ".*", "*.egg-info", "__pycache__", "*.sif")
        shutil.copytree(ROOT, tree, ignore=ignore)
        subprocess.run([sys.executable, "-m", "build", "-o", str(out), str(tree)], check=True)
        (wheel,) = out.glob("*.whl")
        (_sdist,) = out.glob("*.tar.gz")
        packed = {n for n in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in n}
        if packed != expected():
            sys.exit(
                f"missing from the wheel: {sorted(expected() - packed)}\n"
                f"only in the wheel: {sorted(packed - expected())}"
            )
        # The dependencies are this environment's: only the wheel itself is on trial.
        home = Path(scratch, "venv")
        venv.create(home, with_pip=False, system_site_packages=False)
        site = next(home.glob("lib/python*/site-packages"))
        subprocess.run(
            [
                sys.executable,
                "-m",
                "pip",
                "install",
                "-q",
                "--no-deps",
                "--target",
                str(site),
                str(wheel),
            ],
            check=True,
        )
        dependencies = [p for p in map(Path, sys.path) if p.name == "site-packages"]
        (site / "dependencies.pth").write_text("\n".join(map(str, dependencies)) + "\n")
        python = home / "bin" / "python"
        for arguments in (["-m", "dnictl", "version"], ["-m", "dni_runtime.worker", "--help"]):
            subprocess.run(
                [python, "-P", *arguments], check=True, cwd=scratch, stdout=subprocess.DEVNULL
            )
        where = subprocess.run(
            [python, "-P", "-c", "import dni_runtime; print(dni_runtime.__file__)"],
            check=True, cwd=scratch, capture_output=True, text=True,
        ).stdout  # fmt: skip
        if not where.startswith(str(home)):
            sys.exit(f"the installed wheel was not used, but {where}")
    print(f"{wheel.name}: {len(packed)} files, nothing missing; installs and runs")


if __name__ == "__main__":
    main()

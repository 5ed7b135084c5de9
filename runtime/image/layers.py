"""A module's layer: its spec, the user's sources and the runtime, as a reproducible squashfs.

The layer's root is the image's root. The runtime is here and not in the base image, so that a new
version of it never rebuilds the base.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path, PurePosixPath

from dni_runtime import __version__
from dni_runtime.errors import SpecError, UnavailableError
from dni_runtime.image import apptainer
from dni_runtime.image.definition import LABEL_PREFIX
from dni_runtime.spec import WorkerSpec
from dni_runtime.wire import PROTOCOL_VERSION

ROOT = "opt/dni"
MODULE_JSON = f"{ROOT}/module.json"
_SOURCES = f"{ROOT}/src/"

ENTRY_POINTS = (
    "dni_runtime.worker.__main__",
    "dni_runtime.serving.__main__",
    "dni_runtime.core.export",
)
"""What runs in an image: a worker, the front of a service on Kubernetes, and ``dni_runtime.load``,
which a user's class may call.

These and what they import are in it, and a change elsewhere rebuilds no image.
"""


@dataclass(frozen=True)
class ModuleBuild:
    worker: WorkerSpec
    sources: Mapping[str, Path]  # path below /opt/dni/src -> file

    @property
    def name(self) -> str:
        """The image is NAME.sif."""
        return self.worker.module

    @functools.cached_property
    def hash(self) -> str:
        """It changes if and only if the image must."""
        return self.worker.hash

    @property
    def labels(self) -> dict[str, str]:
        """The image's labels, without prefix."""
        return {
            "chain": self.worker.chain,
            "module": self.name,
            "module-hash": self.hash,
            "runtime-version": __version__,
            "wire-protocol": str(PROTOCOL_VERSION),
        }

    @property
    def help(self) -> str:
        """The text that ``apptainer run-help`` prints: how to use the image by hand."""
        image = f"{self.name}.sif"
        return f"""\
Module {self.name!r} of the DNI chain {self.worker.chain!r}, served by dni-runtime {__version__}.

apptainer run {image} --help       the worker's arguments
apptainer test {image}             build the module, one forward and one backward pass
apptainer inspect {image}          labels (prefix {LABEL_PREFIX})

The module's spec is /opt/dni/module.json, the user's sources are in /opt/dni/src, the runtime is in
/opt/dni/runtime. A run's folder is mounted at /dni/run, the data at /dni/data.
"""


@functools.cache
def runtime_files(package: Path | None = None) -> Mapping[str, Path]:
    """Return the worker's part of the runtime: path below ``/opt/dni/runtime`` -> file."""
    root = package or Path(str(resources.files("dni_runtime")))
    # The package's own file imports what is above the worker, too, but only on use.
    files, queue = {root / "__init__.py"}, list(ENTRY_POINTS)
    while queue:
        top, *inner = queue.pop().split(".")
        module = root.joinpath(*inner)
        for path in (module.with_suffix(".py"), module / "__init__.py"):
            if top == "dni_runtime" and path.is_file() and path not in files:
                files.add(path)
                queue += _imports(path.read_text(encoding="utf-8"))
                queue.append(".".join((top, *inner[:-1])))  # the package that it is in
    for folder in {path.parent for path in files}:  # with the files that its modules read
        files |= {path for path in folder.iterdir() if path.is_file() and path.suffix != ".py"}
    return {f"dni_runtime/{path.relative_to(root).as_posix()}": path for path in sorted(files)}


def _imports(source: str) -> Iterator[str]:
    """Yield the names of what a module imports, on use too, but not for type checkers only."""
    queue: list[ast.AST] = [ast.parse(source)]
    while queue:
        match queue.pop():
            case ast.If(test=ast.Name(id="TYPE_CHECKING")):
                pass
            case ast.Import(names=aliases):
                yield from (alias.name for alias in aliases)
            case ast.ImportFrom(module=str(module), names=aliases):
                yield module
                yield from (f"{module}.{alias.name}" for alias in aliases)
            case node:
                queue += ast.iter_child_nodes(node)


def layer_files(module: ModuleBuild, runtime: Mapping[str, Path]) -> dict[str, bytes]:
    """Return all files of a module's layer, by path without the leading slash."""
    files = {MODULE_JSON: module.worker.to_json().encode()}
    for inner, source in module.sources.items():
        path = PurePosixPath(inner)
        if path.is_absolute() or ".." in path.parts:
            raise SpecError(f"{inner!r} leaves the folder of the sources", location=("sources",))
        files[f"{_SOURCES}{path}"] = _read(source)
    for inner, source in runtime.items():
        files[f"{ROOT}/runtime/{inner}"] = _read(source)
    return files


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise SpecError(
            f"{path} cannot be read: {error.strerror}", location=("sources",)
        ) from error


def layer_digest(files: Mapping[str, bytes], module_hash: str) -> str:
    """Return the SHA-256 of a layer's content, with ``module_hash`` in place of ``module.json``."""
    digest = hashlib.sha256()
    for path in sorted(files):
        content = module_hash.encode() if path == MODULE_JSON else files[path]
        for part in (path.encode(), content):
            digest.update(len(part).to_bytes(8, "big") + part)
    return digest.hexdigest()


def source_digests(files: Mapping[str, bytes]) -> dict[str, str]:
    """Return the SHA-256 of the user's files in a layer, by path as in a module's sources."""
    return {
        path.removeprefix(_SOURCES): hashlib.sha256(content).hexdigest()
        for path, content in files.items()
        if path.startswith(_SOURCES)
    }


def write_layer(files: Mapping[str, bytes], root: Path) -> None:
    """Write a layer's files below ``root``, readable by all users."""
    root.mkdir(mode=0o755)
    for inner, content in files.items():
        path = root / inner
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    for path in (root, *root.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)


def squashfs_argv(program: str, root: Path, target: Path) -> list[str]:
    """Return the command that packs a folder reproducibly (mksquashfs(1))."""
    argv = [program, str(root), str(target), "-noappend", "-all-root", "-no-xattrs"]
    return [*argv, "-no-progress", "-quiet", "-mkfs-time", "0", "-all-time", "0"]


def pack_layer(root: Path, target: Path) -> None:
    """Make a squashfs file of a layer."""
    environ = apptainer.host_environment(os.environ)
    environ.pop("SOURCE_DATE_EPOCH", None)  # mksquashfs refuses it beside -mkfs-time
    program = shutil.which("mksquashfs", path=environ["PATH"])
    if program is None:
        raise UnavailableError(
            "mksquashfs is not installed", hint="install the package squashfs-tools"
        )
    argv = squashfs_argv(program, root, target)
    apptainer.stream(argv, what="packing a module's layer", environ=environ)

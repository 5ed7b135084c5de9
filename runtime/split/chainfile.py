"""Writing the chain file of a network that has been taken apart, and its weights."""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import yaml
from safetensors.torch import save
from torch import Tensor, nn

from dni_runtime.core.export import CHAIN, chain_of, separate
from dni_runtime.errors import SpecError, UsageError
from dni_runtime.files import write_atomic
from dni_runtime.network.source import NetworkSpec
from dni_runtime.spec.load import imported_names
from dni_runtime.split.part import NetworkPart

HEADER = "# Written by 'dnictl split', which may replace it."

_OWN = frozenset({"torch", "numpy", "safetensors", "dni-runtime", "pyyaml", "pydantic", "rich"})
"""What images have anyway."""

OF_A_PART = frozenset({"name", "inputs", "interface", "layers"})
"""What a module of a chain file has from its part."""

OF_NETWORK = {"0.network": ""}
"""Where the weights are in a part, whose file has the network's own names."""


def weights_beside(path: Path) -> Path:
    """Return the file of the initial weights of a chain file."""
    return path.with_suffix(".safetensors")


def check_place(path: Path, header: str, *, force: bool = False) -> None:
    """Refuse a chain file that cannot be written, or that would replace what others have written.

    Its first line is ``header``; ``force`` replaces another chain file.
    """
    weights, other = weights_beside(path), "name another file: -o mine.yaml, path='mine.yaml'"
    if not path.parent.is_dir():
        raise UsageError(f"there is no folder {str(path.parent)!r}", hint="create it, or " + other)
    if path == weights:
        raise UsageError(f"{str(path)!r} would be the chain file and its weights", hint=other)
    if path.is_dir() or (
        path.exists() and not force and not path.read_bytes().startswith(header.encode())
    ):
        by = header.removeprefix("# Written by ").partition(";")[0].partition(", which")[0]
        raise UsageError(
            f"{str(path)!r} exists, and {by} did not write it",
            hint=other + (", or replace it with --force" if header == HEADER else ""),
        )
    if weights.exists() and chain_of(weights) != path.name:
        raise UsageError(
            f"{str(weights)!r} exists, and is not the weights of {str(path)!r}",
            hint=f"{other}: its weights are written beside it",
        )


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[None]:
    """Write a chain file and its weights, and check them, in this context.

    If that fails the files that were there before come back, or none stay.
    """
    files = {file: file.with_name(f".{file.name}.before") for file in (path, weights_beside(path))}
    for file, before in files.items():
        if file.exists():
            file.replace(before)
    try:
        yield
    except BaseException as error:
        for file, before in files.items():
            file.unlink(missing_ok=True)
            if before.exists():
                before.replace(file)
        if isinstance(error, SpecError) and error.file == str(path):
            error.file = error.line = None  # of what has been removed
        raise
    for before in files.values():
        before.unlink(missing_ok=True)


def write_weights(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write the initial weights of a chain file; the file says so."""
    write_atomic(weights_beside(path), save(separate(tensors), metadata={CHAIN: path.name}))


def write_chain(
    path: Path,
    name: str,
    spec: NetworkSpec,
    network: nn.Module,
    parts: Sequence[NetworkPart],
    settings: Mapping[str, Any],  # the chain's other keys
    modules: Sequence[Mapping[str, Any]] = (),  # each part has the other settings of its module
) -> Path:
    """Write a chain file, and the network's weights beside it; return the file of the weights."""
    weights = weights_beside(path)
    rest = {key: value for key, value in settings.items() if key not in ("name", "modules")}
    image, defaults = (dict(rest.pop(key, {})) for key in ("image", "defaults"))
    targets = [spec.target, *import_paths(settings.get("data"))]
    needed = requirements(targets, path.parent)
    if needed:
        image["requirements"] = list(dict.fromkeys([*image.get("requirements", []), *needed]))
    defaults["init"] = {"file": weights.name, "names": OF_NETWORK}
    head = {"name": name, **rest, **({"image": image} if image else {}), "defaults": defaults}
    write_weights(path, network.state_dict())
    write_atomic(path, chain_text(head, spec, parts, modules).encode(), mode=0o644)
    return weights


def chain_text(
    head: Mapping[str, Any],  # its keys, but the network and the modules
    spec: NetworkSpec,
    parts: Sequence[NetworkPart],
    modules: Sequence[Mapping[str, Any]] = (),  # each part keeps the other settings of its module
) -> str:
    """Return the text of a chain file."""
    head = dict(head)
    if any(part.lends for part in parts):
        head["data"] = {**head["data"], "drop_last": True}  # see network.piece.BorrowedParameter
    blocks = [f"{HEADER}\n{_yaml(head)}", _yaml({"network": spec.to_yaml()})]
    lines = ["modules:"]
    total = sum(part.busy_s for part in parts)
    for number, part in enumerate(parts):
        share = part.busy_s / total
        frozen = ", frozen" if part.because == "frozen" else ""
        lines.append(f"  # {share:.0%} of the time, {part.numbers:,} parameters{frozen}")
        piece: dict[str, Any] = {"after": part.after, "until": part.until}
        piece |= {"lends": list(part.lends), "borrows": part.borrows}
        if part.lends or part.borrows:
            piece["rows"] = part.rows
        piece = {key: value for key, value in piece.items() if value}
        lines.append(f"  - name: {part.name}")
        if part.inputs is not None:
            lines.append(f"    inputs: [{', '.join(part.inputs)}]")
        if part.interface is not None:
            lines.append(f"    interface: {_flow(part.interface.model_dump())}")
        for key, value in modules[number].items() if modules else ():
            if key not in OF_A_PART:
                lines.append(f"    {key}: {_flow(value)}")
        lines.append(f"    layers: {_flow([{'Piece': piece} if piece else 'Piece'])}")
    return "\n".join([*blocks, "\n".join(lines)]) + "\n"


def _yaml(document: Any) -> str:
    text: str = yaml.safe_dump(document, sort_keys=False, allow_unicode=True)
    return text.rstrip("\n")


def _flow(document: Any) -> str:
    text: str = yaml.safe_dump(document, default_flow_style=True, sort_keys=False, width=1000)
    return text.removesuffix("...\n").strip()


def import_paths(value: Any) -> Iterator[str]:
    """Yield the import paths in a chain's ``data``."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            yield from import_paths(item)
    elif isinstance(value, str) and re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*", value):
        yield value


def requirements(targets: Sequence[str], folder: Path) -> list[str]:
    """Return the installed packages that the source of a network and its data needs in an image.

    Files in ``folder``, that of the chain file, are packed as sources.
    """
    packages = metadata.packages_distributions()
    versions: dict[str, None] = {}
    queue, seen = [target.partition(":")[0] for target in targets], set[str]()
    while queue:
        name = queue.pop()
        top = name.partition(".")[0]
        if name in seen or top in sys.stdlib_module_names:
            continue
        seen.add(name)
        if not any(local.exists() for local in (folder / f"{top}.py", folder / top)):
            for package in packages.get(top, []):
                if package.lower() not in _OWN:
                    version = metadata.version(package).partition("+")[0]
                    versions[f"{package}=={version}"] = None
            continue
        parts = name.split(".")
        queue += [".".join(parts[:number]) for number in range(1, len(parts))]
        path = folder.joinpath(*parts)
        for file in (path.with_suffix(".py"), path / "__init__.py"):
            if file.is_file():
                queue += imported_names(file, file.parent.relative_to(folder).parts)
    return sorted(versions)

"""Initial weights from a file or another run, by the original model's parameter names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from dni_runtime.core.layers import tensors_of
from dni_runtime.errors import DataError, SpecError
from dni_runtime.files import pinned, write_atomic
from dni_runtime.run.cuts import complete_cuts, tensors_file
from dni_runtime.run.documents.records import RunRecord
from dni_runtime.run.rundir import RunDir
from dni_runtime.spec import ChainSpec, InitSpec, WorkerSpec
from dni_runtime.spec.load import suggestion
from dni_runtime.spec.replicas import replicas_of

_LAYERS = "layers."
"""Prefix of a module's own tensors in its checkpoint."""


@dataclass(frozen=True)
class Stored:
    """A tensor in a safetensors file."""

    file: Path
    key: str  # its name there
    shape: tuple[int, ...]


Found = dict[str, dict[str, Stored]]
"""Locations of given initial weights, by module and tensor name."""


def find_initial(chain: ChainSpec, workers: tuple[WorkerSpec, ...], base: Path) -> Found:
    """Find the initial weights that a chain, as written, requests; reads headers only.

    ``base`` is the folder of ``chain.yaml``, where relative paths start.
    """
    found: Found = {}
    stored: dict[str, dict[str, Stored]] = {}
    for worker in workers:
        init: InitSpec | None = chain.setting(worker.index, "init")
        if init is None:
            continue
        own = chain.modules[worker.index].init is not None
        at = ("modules", worker.index, "init") if own else ("defaults", "init")
        if init.file not in stored:
            stored[init.file] = dict(_stored(base / Path(init.file).expanduser(), (*at, "file")))
        found[worker.module] = _matched(worker, init, stored[init.file], at)
    return found


def write_initial(run: RunDir, found: Found) -> None:
    """Copy the initial weights into a run directory, one file per module."""
    for module, tensors in found.items():
        loaded = {}
        for name, one in tensors.items():
            try:
                with pinned(one.file) as file, safe_open(file, framework="pt") as reader:
                    loaded[name] = reader.get_tensor(one.key).clone()
            except (OSError, SafetensorError) as error:
                raise DataError(
                    f"initial weights {str(one.file)!r} cannot be read any more: {error}",
                    hint="try again; if its run is active, export the weights to a file first",
                ) from None
        write_atomic(run.initial(module), save(loaded))


def _stored(path: Path, at: tuple[str | int, ...]) -> Iterator[tuple[str, Stored]]:
    """Yield the tensors of a file, or of a run's newest checkpoint, with their names."""
    if path.is_dir():
        run = RunDir(path)
        record = RunRecord.load(run.record)
        cuts = [] if record is None else complete_cuts(run, record.modules)
        if record is None or not cuts:
            what = "is not a run directory" if record is None else "has no complete checkpoint"
            raise SpecError(f"{str(path)!r} {what}", location=at)
        for module, workers in replicas_of(record.modules).items():
            file = tensors_file(run.checkpoint(cuts[-1], workers[0]))
            for key, shape in _header(file, at):
                if key.startswith(_LAYERS):
                    name = f"{module}.{key.removeprefix(_LAYERS)}"
                    yield name, Stored(file, key, shape)
        return
    file = path.resolve()  # the user's own links are followed
    for key, shape in _header(file, at):
        yield key, Stored(file, key, shape)


def _header(file: Path, at: tuple[str | int, ...]) -> list[tuple[str, tuple[int, ...]]]:
    try:
        with pinned(file) as name, safe_open(name, framework="pt") as reader:
            return [(key, tuple(reader.get_slice(key).get_shape())) for key in reader.keys()]  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise SpecError(
            f"{str(file)!r} cannot be read: {error}",
            location=at,
            hint="use a .safetensors file or a run directory",
        ) from None


def _matched(
    worker: WorkerSpec, init: InitSpec, stored: Mapping[str, Stored], at: tuple[str | int, ...]
) -> dict[str, Stored]:
    """Return the location of each of a module's tensors."""
    names = init.names or {"": worker.module}
    found: dict[str, Stored] = {}
    needed = tensors_of(worker)
    for prefix in init.names if at[0] == "modules" else ():  # defaults map names of all modules
        if not any(_under(name, prefix) for name in needed):
            raise SpecError(
                f"module {worker.module!r} has no parameters {prefix!r}",
                location=(*at, "names", prefix),
                hint=suggestion(prefix, sorted(needed)),
            )
    for own, shape in needed.items():
        theirs = name_in_file(own, names)
        if theirs is None:
            continue
        one = stored.get(theirs)
        if one is None and not init.strict:
            continue
        if one is None:
            raise SpecError(
                f"{init.file!r} has no {theirs!r}, for {own!r} of module {worker.module!r}",
                location=at,
                hint=suggestion(theirs, sorted(stored))
                or f"it has {', '.join(sorted(stored)[:6])}, …; map prefixes with 'names'",
            )
        if one.shape != shape:
            raise SpecError(
                f"{theirs!r} in {init.file!r} has shape {list(one.shape)}, but {own!r} of "
                f"module {worker.module!r} has {list(shape)}",
                location=at,
            )
        found[own] = one
    if not found and (needed or at[0] == "modules"):  # defaults are for all modules
        raise SpecError(
            f"{init.file!r} has nothing for module {worker.module!r}", location=(*at, "names")
        )
    return found


def name_in_file(name: str, names: Mapping[str, str]) -> str | None:
    """Return a module's parameter's name in a file of initial weights; None if no prefix matches.

    ``names`` is ``InitSpec.names``; the longest prefix counts.
    """
    for prefix in sorted(names, key=len, reverse=True):
        if _under(name, prefix):
            rest = name.removeprefix(prefix).removeprefix(".")
            return ".".join(part for part in (names[prefix], rest) if part)
    return None


def _under(name: str, prefix: str) -> bool:
    return not prefix or name == prefix or name.startswith(f"{prefix}.")

"""Initial weights from a file or another run, by the original model's parameter names.

Weights of a network that was split have its own names, too: in runs and exports by ``Piece``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from dni_runtime.core.export import AVERAGE_PREFIX, LAYERS_PREFIX, METADATA, ExportHeader
from dni_runtime.core.layers import exported, tensors_of
from dni_runtime.errors import CheckpointError, DataError, SpecError, unreadable
from dni_runtime.files import expanded, pinned, write_atomic
from dni_runtime.run.cuts import choose_cut, tensors_file
from dni_runtime.run.record import Record
from dni_runtime.run.releases import parse_name, unpacked
from dni_runtime.run.rundir import RunDir
from dni_runtime.spec import ChainSpec, InitSpec, LayerSpec, WorkerSpec
from dni_runtime.spec.choices import Location
from dni_runtime.spec.load import suggestion
from dni_runtime.spec.replicas import replicas_of
from dni_runtime.split.network import read_state_dict


@dataclass(frozen=True)
class StoredTensor:
    file: Path
    key: str  # its name there
    shape: tuple[int, ...]


Weights = dict[str, dict[str, StoredTensor]]
"""Locations of given initial weights, by module and tensor name."""


def find_initial(chain: ChainSpec, workers: tuple[WorkerSpec, ...], base: Path) -> Weights:
    """Find the initial weights that a chain, as written, requests; reads headers only."""
    weights: Weights = {}
    stored: dict[str, dict[str, StoredTensor]] = {}
    for worker in workers:
        init: InitSpec | None = chain.setting(worker.index, "init")
        if init is None:
            continue
        explicit = chain.modules[worker.index].init is not None
        at = ("modules", worker.index, "init") if explicit else ("defaults", "init")
        if init.file not in stored:
            released, path = parse_name(init.file), base / expanded(init.file)
            if released is not None and not path.exists():
                path = unpacked(*released)
            stored[init.file] = dict(_stored(path, (*at, "file")))
        weights[worker.module] = _matched(worker, init, stored[init.file], at)
    return weights


def trained_weights(worker: WorkerSpec, file: Path, at: Location = ()) -> dict[str, StoredTensor]:
    """Return where the weights of a module's layers, or their average, are in its part of a cut."""
    averages = {} if worker.ema is None else stored_tensors(file, AVERAGE_PREFIX, at)
    return averages or stored_tensors(file, LAYERS_PREFIX, at)


def stored_tensors(file: Path, prefix: str = "", at: Location = ()) -> dict[str, StoredTensor]:
    """Return where tensors of a file are, by their names without the prefix that they share."""
    return {
        key.removeprefix(prefix): StoredTensor(file, key, shape)
        for key, shape in _header(file, at)[0]
        if key.startswith(prefix)
    }


def write_initial(run: RunDir, weights: Weights) -> None:
    """Copy the initial weights into a run directory, one file per module."""
    for module, loaded in read_initial(weights):
        write_atomic(run.initial(module), save(loaded))


def read_initial(weights: Weights) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """Yield modules with their initial weights; NaN among them is refused."""
    pickled: dict[Path, dict[str, Tensor]] = {}  # they can only be read whole
    for module, tensors in weights.items():
        loaded = dict[str, Tensor]()
        for name, entry in tensors.items():
            try:
                if entry.file.suffix != ".safetensors":
                    if entry.file not in pickled:
                        pickled[entry.file] = read_state_dict(entry.file)
                    loaded[name] = pickled[entry.file][entry.key].clone()
                else:
                    with pinned(entry.file) as file, safe_open(file, framework="pt") as reader:
                        loaded[name] = reader.get_tensor(entry.key).clone()
            except (OSError, SafetensorError) as error:
                raise DataError(
                    f"initial weights {str(entry.file)!r} cannot be read any more: {error}",
                    hint="try again; if its run is active, export the weights to a file first",
                ) from None
            if loaded[name].isnan().any():
                raise SpecError(
                    f"{entry.key!r} in {str(entry.file)!r}, for module {module!r}, has NaN",
                    hint="take weights of before the training diverged",
                )
        yield module, loaded


def _stored(path: Path, at: Location) -> Iterator[tuple[str, StoredTensor]]:
    """Yield the tensors of a file, or of a run's newest checkpoint, with their names."""
    if path.is_dir():
        if not RunDir(path).record.exists():
            raise SpecError(f"{str(path)!r} is not a run directory", location=at)
        record = Record.read(path)
        try:
            cut = choose_cut(record.run, record.modules, "newest")
        except CheckpointError as error:
            hint = "name a file that 'dnictl export --from' has written of another checkpoint"
            raise SpecError(error.message, location=at, hint=hint) from None
        chain, workers = record.specs()
        replicas = replicas_of(record.modules)
        for worker, module in zip(workers, chain.modules, strict=True):
            file = tensors_file(record.run.checkpoint(cut, replicas[worker.module][0]))
            names = network_names(worker.module, worker.layers, module.init)
            for own, entry in trained_weights(worker, file, at).items():
                yield f"{worker.module}.{own}", entry
                if (name := name_in_file(own, names)) is not None:
                    yield name, entry
        return
    file = path.resolve()  # the user's own links are followed
    if file.suffix != ".safetensors" and file.is_file():
        try:
            state = read_state_dict(file)
        except DataError as error:
            raise SpecError(error.message, location=at, hint=error.hint) from None
        yield from (
            (key, StoredTensor(file, key, tuple(value.shape))) for key, value in state.items()
        )
        return
    tensors, description = _header(file, at)
    parts: dict[str, Sequence[LayerSpec]] = {}
    if description is not None:
        parts = {one.name: one.layers for one in description.modules}
    for key, shape in tensors:
        yield key, StoredTensor(file, key, shape)
        of, _, own = key.partition(".")
        if (name := name_in_file(own, network_names(of, parts.get(of, ())))) is not None:
            yield name, StoredTensor(file, key, shape)


def _header(
    file: Path, at: Location
) -> tuple[list[tuple[str, tuple[int, ...]]], ExportHeader | None]:
    """Return names and shapes of a file's tensors, and the network if 'dnictl export' wrote it."""
    try:
        with pinned(file) as name, safe_open(name, framework="pt") as reader:
            text = (reader.metadata() or {}).get(METADATA)
            shapes = [(key, tuple(reader.get_slice(key).get_shape())) for key in reader.keys()]  # noqa: SIM118
            return shapes, None if text is None else ExportHeader.model_validate_json(text)
    except (OSError, SafetensorError, ValidationError) as error:
        raise SpecError(
            unreadable(file, error),
            location=at,
            hint="use a run directory, an exported file, or a state dict (.safetensors, .pt)",
        ) from None


def network_names(
    module: str, layers: Sequence[LayerSpec], init: InitSpec | None = None
) -> dict[str, str]:
    """Return prefixes of a module's parameters, with those of the network that they are from.

    What is neither a network's own nor named by ``init`` goes by the module's name.
    """
    names = {"": module} if init is None or not init.names else dict(init.names)
    pieces = (number for number, layer in enumerate(layers) if layer.type == "Piece")
    return {f"{number}.network": "" for number in pieces} | names


def _matched(
    worker: WorkerSpec,
    init: InitSpec,
    stored: Mapping[str, StoredTensor],
    at: Location,
) -> dict[str, StoredTensor]:
    """Return the location of each of a module's tensors."""
    names = init.names or network_names(worker.module, worker.layers)
    tensors: dict[str, StoredTensor] = {}
    layers = tuple(map(exported, worker.layers))  # a state that is carried on is no weight
    needed = tensors_of(worker.model_copy(update={"layers": layers}))
    for prefix in init.names if at[0] == "modules" else ():  # defaults map names of all modules
        if not any(_under(name, prefix) for name in needed):
            raise SpecError(
                f"module {worker.module!r} has no parameters {prefix!r}",
                location=(*at, "names", prefix),
                hint=suggestion(prefix, sorted(needed)),
            )
    for name, shape in needed.items():
        theirs = name_in_file(name, names)
        if theirs is None:
            continue
        entry = stored.get(theirs)
        if entry is None and not init.strict:
            continue
        if entry is None:
            raise SpecError(
                f"{init.file!r} has no {theirs!r}, for {name!r} of module {worker.module!r}",
                location=at,
                hint=suggestion(theirs, sorted(stored))
                or f"it has {', '.join(sorted(stored)[:6])}, …; map prefixes with 'names'",
            )
        if entry.shape != shape:
            raise SpecError(
                f"{theirs!r} in {init.file!r} has shape {list(entry.shape)}, but {name!r} of "
                f"module {worker.module!r} has {list(shape)}",
                location=at,
            )
        tensors[name] = entry
    if not tensors and (needed or at[0] == "modules"):  # defaults are for all modules
        raise SpecError(
            f"{init.file!r} has nothing for module {worker.module!r}", location=(*at, "names")
        )
    return tensors


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

"""Reading and checking a chain file before anything starts."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dni_runtime.errors import NEEDED, DataError, SpecError, UsageError, hides
from dni_runtime.files import expanded
from dni_runtime.run.record import Record
from dni_runtime.spec import ChainSpec, DataInfo, WorkerSpec, load_chain, source_files
from dni_runtime.spec.load import line_of, naming_file
from dni_runtime.spec.replicas import workers_of
from dni_runtime.spec.settings import with_settings, words_of

if TYPE_CHECKING:  # they import torch
    from dni_runtime.plan.initial import Weights
    from dni_runtime.plan.trial import Coverage


UNCHECKED = (
    "checked: the file's keys and values; not checked: layers and shapes, which need the data"
)
"""What is said of a chain whose data are not there."""


@dataclass(frozen=True)
class Origin:
    """The checkpoint that a new run goes on from."""

    record: Record  # of its run
    cut: int  # its stream position


@dataclass(frozen=True)
class CheckedChain:
    """A chain that has been checked as a whole."""

    path: Path  # its file
    written: ChainSpec
    chain: ChainSpec  # with all defaults filled in
    info: DataInfo
    data: Path | None  # folder or file; None: the package or the user's class provides it
    workers: tuple[WorkerSpec, ...]  # of the modules, head first
    sources: dict[str, Path]  # the user's source files, by their path relative to an import root
    initial: Weights
    carried: Origin | None = None  # what to go on from
    # of a chain that only predicts: the process that serves it, and what it was trained as
    front: WorkerSpec | None = None
    trained: Origin | None = None
    looked: Coverage | None = None

    @property
    def base(self) -> Path:
        """Folder of the chain file, the base of its relative paths."""
        return self.path.parent

    @property
    def modules(self) -> list[str]:
        """Names of the modules, head first."""
        return [worker.module for worker in self.workers]

    @property
    def replicas(self) -> tuple[WorkerSpec, ...]:
        """The spec of each worker that a run has, head first: several for some modules."""
        front = () if self.front is None else (self.front.of_module(),)
        return workers_of((*front, *self.workers))[len(front) :]

    @property
    def names(self) -> list[str]:
        """Names of these workers."""
        return [worker.module for worker in self.replicas]

    @property
    def batches_per_epoch(self) -> int | None:
        """Training batches in one epoch; None if the length of the data is unknown."""
        samples = self.info.train_samples
        return None if samples is None else self.chain.data.train_batches(samples)

    @property
    def total_steps(self) -> int | None:
        """Training batches in the whole run, if known."""
        return self.chain.total_batches(self.batches_per_epoch)

    def locate(self, *location: str | int) -> str:
        """Return ``file:line: path`` of a setting in the chain file, for messages."""
        return location_in(self.path, *location)


def location_in(path: Path, *location: str | int) -> str:
    """Return ``file:line: path`` of a setting in a chain file, for messages."""
    try:
        line = line_of(path.read_text(encoding="utf-8"), location)
    except (OSError, UnicodeDecodeError, SpecError):
        line = None
    return SpecError("", file=str(path), line=line, location=location).where


def prepare(path: Path, *, data: Path | None = None, tries: bool = True) -> CheckedChain:
    """Read a chain file and check all that can be checked without starting anything.

    Shapes, names and keywords are checked with torch's meta device, the data by its files' headers;
    then, if ``tries``, a few samples of it are trained on and evaluated (``trial.py``). Imports
    torch.

    ``data`` is a folder or file to use instead of the chain's ``data.path``.
    """
    base = path.parent.absolute()
    written = _beside(base, load_chain(path))
    with naming_file(path), importing_from(base):
        from dni_runtime.core.dynamo import postpone_dynamo
        from dni_runtime.data import with_defaults
        from dni_runtime.plan.callbacks import callback_class
        from dni_runtime.resolve.shapes import by_name

        postpone_dynamo()
        spec = with_defaults(written.data, base)
        spec = spec if data is None else spec.at(data.absolute())
        written = written.model_copy(update={"data": spec})
        sources = source_files(written, path.parent)
        for index, choice in enumerate(written.callbacks):
            callback_class(choice, index)
        with _naming_data(path, UNCHECKED):
            info, location = _find_data(written, base)
        written, info = by_name(written, info)
        checked = _resolved(path, written, info, location)
        if tries:
            from dni_runtime.plan.trial import try_chain

            with _naming_data(path):
                looked = try_chain(checked.chain, checked.workers, base, location, checked.initial)
            checked = replace(checked, looked=looked)
        return replace(checked, sources=sources | _imported(base))


def _resolved(path: Path, written: ChainSpec, info: DataInfo, data: Path | None) -> CheckedChain:
    """Return a chain with its workers' specs and the initial weights that it names."""
    from dni_runtime.plan.initial import find_initial
    from dni_runtime.resolve.resolve import resolved_chain, worker_specs

    workers = worker_specs(written, info)
    chain = resolved_chain(written, info)
    initial = find_initial(written, workers, path.parent.absolute())
    return CheckedChain(path, written, chain, info, data, workers, {}, initial)


@contextmanager
def _naming_data(path: Path, *more: str) -> Iterator[None]:
    """Name the chain file's ``data`` in errors about it; ``more`` goes to the hint."""
    try:
        yield
    except DataError as error:
        hint = "\n  ".join(filter(None, (error.hint, *more))) or None
        raise DataError(f"{location_in(path, 'data')}: {error.message}", hint=hint) from None


def _imported(base: Path) -> dict[str, Path]:
    """Return the files of modules that were imported from a folder, also by computed names."""
    files: dict[str, Path] = {}
    for root in {base, base.resolve()}:
        for name, module in list(sys.modules.items()):
            file = Path(getattr(module, "__file__", None) or "/")
            if file.is_relative_to(root):
                *folders, last = file.relative_to(root).parts
                parts = [*folders, last.partition(".")[0]]
                if parts in (name.split("."), [*name.split("."), "__init__"]):
                    files["/".join((*folders, last))] = file
    return files


def prepare_again(prepared: CheckedChain, written: ChainSpec) -> CheckedChain:
    """Check another version of a chain; nothing is tried."""
    from dni_runtime.data import with_defaults

    base, info, location = prepared.base.absolute(), prepared.info, prepared.data
    looked, other = prepared.looked, (prepared.written.data, written.data)
    made = [(one.dataset, one.path, one.args, one.normalize) for one in other]
    if looked is not None and made[0] != made[1]:
        looked = looked._replace(preprocessing=None)
    with naming_file(prepared.path), importing_from(base):
        if written.data != prepared.written.data:
            data = with_defaults(written.data, base)
            written = written.model_copy(update={"data": data})
        sources = prepared.sources | source_files(written, base)
        if written.data != prepared.written.data:
            with _naming_data(prepared.path):
                info, location = _find_data(written, base)
        checked = _resolved(prepared.path, written, info, location)
        return replace(checked, sources=sources, looked=looked, carried=prepared.carried)


def prepare_with(prepared: CheckedChain, settings: Mapping[str, Any]) -> CheckedChain:
    """Check a chain with other values of some settings, by their paths."""
    try:
        return prepare_again(prepared, with_settings(prepared.written, settings))
    except SpecError as error:
        raise UsageError(
            f"{words_of(settings)}: {error.path}: {error.message}", hint=error.hint
        ) from None


def _find_data(chain: ChainSpec, base: Path) -> tuple[DataInfo, Path | None]:
    """Describe a chain's data, and find its folder or file; the path may contain ``{replica}``."""
    from dni_runtime.data import describe, locate
    from dni_runtime.data.source import resolve

    if chain.data.path is None or not chain.data.per_replica:
        return describe(chain.data, base), locate(chain.data, base)
    parts = [chain.data.of_replica(number + 1) for number in range(chain.modules[0].most)]
    first, *others = [describe(part, base) for part in parts]
    for data, info in zip(parts[1:], others, strict=True):
        if info != first:
            raise DataError(
                f"{data.path!r} has {info.train_samples} training and {info.eval_samples} "
                f"evaluation samples of {info.sample}, {info.label}, but {parts[0].path!r} has "
                f"{first.train_samples} and {first.eval_samples} of {first.sample}, {first.label}",
                hint="all replicas of the head need as many samples of the same kind: set "
                "'data.train_limit' and 'data.eval_limit'",
            )
    return first, resolve(chain.data.path, base)


def _beside(folder: Path, chain: ChainSpec) -> ChainSpec:
    """Return the chain with absolute paths for its runs; relative ones start at its folder.

    ``data.path`` stays as it is: the run's record has the place that was found for it.
    """
    mounts = tuple(
        mount.model_copy(update={"source": str(folder / expanded(mount.source))})
        for mount in chain.mounts
    )
    image, key = chain.image, chain.image.require_signed
    if isinstance(key, str):
        image = image.model_copy(update={"require_signed": str(folder / expanded(key))})
    data = chain.data
    if data.labels is not None and data.labels.path is not None:
        path = str(folder / expanded(data.labels.path))
        data = data.model_copy(update={"labels": data.labels.model_copy(update={"path": path})})
    return chain.model_copy(update={"mounts": mounts, "image": image, "data": data})


_loaded: dict[str, tuple[Path, int]] = {}
"""By module: the folder of :func:`importing_from` that it came from, and its file's time."""


@contextmanager
def importing_from(folder: Path) -> Iterator[None]:
    """Make a folder the base of the user's import paths.

    What was imported from another folder, a run's say, or has been edited since, is imported anew.
    """
    folder = folder.absolute()
    if any(_is_another(name, folder) for name in _loaded):
        for name in _loaded:  # all: one may hold what it took from another
            sys.modules.pop(name, None)
        _loaded.clear()
    before = set(sys.modules)
    for name in NEEDED if str(folder) not in sys.path else ():
        for file in (folder / f"{name}.py", folder / name / "__init__.py"):
            if file.exists():
                raise hides(str(file), name)
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        if str(folder) in sys.path:
            sys.path.remove(str(folder))
        for name in sys.modules.keys() - before:
            file = Path(getattr(sys.modules[name], "__file__", None) or "")
            if file.is_relative_to(folder) and file.is_file():
                _loaded[name] = folder, file.stat().st_mtime_ns


def _is_another(name: str, folder: Path) -> bool:
    """Whether a folder has another content for a module that was imported."""
    former, written_ns = _loaded[name]
    file = Path(getattr(sys.modules.get(name), "__file__", None) or "")
    if not file.is_relative_to(former):  # the user has imported another one since
        return False
    here = folder / file.relative_to(former)
    try:
        if here.samefile(file):
            return file.stat().st_mtime_ns != written_ns
        return here.read_bytes() != file.read_bytes()
    except OSError:  # the folder has none
        return False

"""The releases that were made or pulled here: an OCI layout, and each unpacked as a run."""

from __future__ import annotations

import io
import shutil
import tarfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path, PurePosixPath

from pydantic import ValidationError

from dni_runtime.errors import ImageError, UsageError
from dni_runtime.files import locked, write_atomic
from dni_runtime.image.oci import Descriptor, Layout, Manifest
from dni_runtime.image.scratch import scratch_folder
from dni_runtime.image.sif import copy_image
from dni_runtime.release.names import (
    MODULE,
    RECORD,
    REPORT,
    RUN,
    TITLE,
    VERSION,
    WEIGHTS,
    parse_local,
)
from dni_runtime.release.report import Report
from dni_runtime.release.signature import signature_name
from dni_runtime.run.cuts import cut_folders, tensors_file, verify
from dni_runtime.run.record import Record
from dni_runtime.run.releases import store_folder
from dni_runtime.run.rundir import RunDir, hash_name
from dni_runtime.schedulers.schedulers import read_state

MOST_RUN_BYTES = 256 << 20
"""Maximum size of a release's run without its weights: sources and figures."""

IMAGES = "images"
"""The folder of a release's images, in its run directory."""

_FILES = frozenset({"run.json", "chain.yaml", "chain.json"})
_FOLDERS = frozenset({"specs", "src", "checkpoints", "exits", "metrics"})


class Store:
    def __init__(self, root: Path | None = None) -> None:
        self.root = store_folder() if root is None else root
        self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.layout = Layout(self.root / "oci").create()

    @classmethod
    def of(cls, run: Path) -> Store | None:
        """Return the store that a release's run directory is in; None if it is another run's."""
        return cls() if run.parent.parent == store_folder() else None

    @contextmanager
    def changing(self, report: Callable[[str], None]) -> Iterator[None]:
        """Let nobody else add or remove releases meanwhile, and wait until nobody does.

        File systems without locks are worked on, too.
        """
        with ExitStack() as stack:
            with suppress(OSError):
                note = f"waiting for another command that changes {str(self.root)!r}"
                stack.enter_context(locked(self.root, lambda: report(note)))
            yield

    def name_of(self, run: Path) -> str:
        return f"{run.parent.name}:{run.name}"

    def releases(self) -> dict[str, Descriptor]:
        """Return the index of each release, by ``NAME:VERSION``."""
        return {name: blob for name, blob in self.layout.names().items() if ":" in name}

    def find(self, text: str) -> Descriptor:
        """Return the index of a release; raises ``UsageError``."""
        parse_local(text)
        blob = self.releases().get(text)
        if blob is None:
            there = ", ".join(self.releases())
            raise UsageError(
                f"there is no release {text!r} here",
                hint=f"there are {there}" if there else "'dnictl release' makes one",
            )
        return blob

    def folder(self, text: str) -> Path:
        """Return the run directory of a release."""
        name, version = parse_local(text)
        return self.root / name / version

    def scratch(self) -> AbstractContextManager[Path]:
        """Give a folder on the disk of the releases."""
        return scratch_folder(self.root, ".new-")

    def report(self, index: Descriptor) -> Report:
        """Return what a release says of itself."""
        _, record = self.parts(index)
        try:
            return Report.model_validate_json(self.layout.read(_layer(record, REPORT)))
        except ValidationError as error:
            what = error.errors()[0]["msg"]
            raise ImageError(f"the report of {index.digest} is malformed: {what}") from None

    def parts(self, index: Descriptor) -> tuple[dict[str, Manifest], Manifest]:
        """Return what a release consists of: the manifest of each module, and that of the run."""
        modules, record = dict[str, Manifest](), None
        for manifest in self.layout.manifests(index)[1]:
            if manifest.artifact_type == MODULE:
                modules[manifest.note(TITLE) or ""] = manifest
            elif manifest.artifact_type == RECORD:
                record = manifest
        if record is None:
            raise ImageError("this is no release: it has no run", hint="'dnictl release' makes one")
        return modules, record

    def check_new(self, index: Descriptor) -> tuple[str, bool]:
        """Return the name that a release has, and whether it is not yet there."""
        said, _ = self.layout.manifests(index)
        text = f"{said.note(TITLE)}:{said.note(VERSION)}"
        parse_local(text)
        there = self.releases().get(text)
        if there is not None and there.digest != index.digest:
            raise self.taken(text, there)
        return text, there is None

    def check_report(self, text: str, report: Report) -> None:
        """Refuse to make another release of the same name, by what it would say of itself."""
        there = self.releases().get(text)
        if there is not None and self.report(there) != report:
            raise self.taken(text, there)

    def taken(self, text: str, there: Descriptor) -> UsageError:
        """The error of another release of the same name."""
        return UsageError(
            f"there is another release {text} already ({there.digest[:19]}…)",
            hint="a release does not change: use another --version, or remove the old one "
            f"with 'dnictl models --remove {text}'",
        )

    def add(self, index: Descriptor) -> str:
        """Check all of a release, unpack it, and give it the name that it says; return that."""
        modules, record = self.parts(index)
        text, new = self.check_new(index)
        name, _ = parse_local(text)
        for blob in self.layout.blobs(index):
            self.layout.checked(blob)
        report = self.report(index)
        if f"{report.name}:{report.version}" != text:
            raise ImageError(f"the report of {text} is of {report.name}:{report.version}")
        target = self.folder(text)
        if not new and target.is_dir():
            return text
        with self.scratch() as scratch:
            root = scratch / "run"
            self._unpack(modules, record, root)
            (self.root / name).mkdir(exist_ok=True)
            shutil.rmtree(target, ignore_errors=True)
            root.rename(target)
        self.layout.name({text: index.model_copy(update={"annotations": None})})
        return text

    def note_user(self, folder: Path, run: Path) -> None:
        """Note that a run uses a release, whose run directory is ``folder``."""
        users = self._users(self.name_of(folder))
        users.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_atomic(users / hash_name(str(run)), str(run))

    def _users(self, text: str) -> Path:
        return self.root / ".users" / text

    def remove(self, text: str) -> int:
        """Forget a release; return the bytes that nothing else needed."""
        index, users = self.find(text), self._users(text)
        for note in users.iterdir() if users.is_dir() else ():
            run = RunDir(Path(note.read_text()))
            if read_state(run).active:
                raise UsageError(
                    f"{text} is in use by {str(run.root)!r}",
                    hint="stop it: dnictl stop, or dnictl serve --stop",
                )
        shutil.rmtree(users, ignore_errors=True)
        shutil.rmtree(self.folder(text), ignore_errors=True)
        self.layout.name({text: None, signature_name(index): None})
        return self.layout.collect()

    def _unpack(self, modules: dict[str, Manifest], written: Manifest, root: Path) -> None:
        run = RunDir(root)
        run.create()
        blob = _layer(written, RUN)
        if blob.size > MOST_RUN_BYTES:
            raise ImageError(f"the run of the release has {blob.size} bytes")
        _extract(b"".join(self.layout.chunks(blob)), root)
        record = Record.read(root)
        cuts = list(cut_folders(run))
        if len(cuts) != 1 or set(modules) != set(record.modules):
            raise ImageError("the release and its run have different modules")
        for module, manifest in modules.items():
            weights = self.layout.path(_layer(manifest, WEIGHTS).digest)
            copy_image(weights, tensors_file(run.checkpoint(cuts[0], module)))
        verify(run, cuts[0], record.modules)


def _layer(manifest: Manifest, media_type: str) -> Descriptor:
    for layer in manifest.layers:
        if layer.media_type == media_type:
            return layer
    raise ImageError(f"the release lacks {media_type}")


def _extract(archive: bytes, root: Path) -> None:
    """Write the plain files of a tar file that a run may have; anything else is refused."""
    try:
        with tarfile.open(fileobj=io.BytesIO(archive), mode="r:") as files:
            for entry in files:
                inner = PurePosixPath(entry.name)
                first, *others = inner.parts or ("",)
                allowed = first in _FOLDERS if others else first in _FILES
                plain = entry.isreg() and not entry.issparse()  # sparse ones have any size
                if not (plain and allowed) or ".." in inner.parts:
                    raise ImageError(f"a run of a release may not have {entry.name!r}")
                target = root / inner
                target.parent.mkdir(parents=True, exist_ok=True)
                content = files.extractfile(entry)
                assert content is not None
                with target.open("xb") as file:
                    shutil.copyfileobj(content, file)
    except (tarfile.TarError, FileExistsError, NotADirectoryError) as error:
        raise ImageError(f"the run of the release is damaged: {error}") from error

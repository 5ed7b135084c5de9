"""From a run to a release: a small run of its own, and for each module what its image consists of.

The same run always makes the same release: no host, path or user is in it, and no time but that at
which the run was made.
"""

from __future__ import annotations

import contextlib
import io
import json
import shutil
import tarfile
from collections.abc import Mapping
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from dni_runtime.core.export import LAYERS_PREFIX, trained_tensors
from dni_runtime.errors import ImageError, UsageError
from dni_runtime.files import opened, write_atomic, write_json
from dni_runtime.image import sif
from dni_runtime.image.apptainer import Apptainer
from dni_runtime.image.check import lock_entry, verify_hash, verify_sources
from dni_runtime.image.lock import LOCK_NAME, ImageLock, read_lock
from dni_runtime.image.oci import INDEX, MANIFEST, Descriptor, Index, Layout, Manifest
from dni_runtime.plan.serving import serving_chain
from dni_runtime.release.names import (
    BASE,
    CHAIN,
    CREATED,
    FILE_PATH,
    LAYER,
    LICENSES,
    MODEL,
    MODEL_CONFIG,
    MODULE,
    RECORD,
    REPORT,
    RUN,
    TITLE,
    VERSION,
    WEIGHTS,
    parse_local,
)
from dni_runtime.release.report import Report, report_of
from dni_runtime.release.store import Store
from dni_runtime.run.cuts import read_document, tensors_file
from dni_runtime.run.documents.exits import Exits
from dni_runtime.run.documents.metrics import parse_evaluation
from dni_runtime.run.record import Record
from dni_runtime.run.rundir import RunDir
from dni_runtime.spec.replicas import replicas_of, tails_of
from dni_runtime.worker.checkpoint import write_part

_KEPT = ("format", "module", "hash", "version", "cut", "epoch", "epochs_ended", "finite", "over")


def release_run(
    store: Store,
    record: Record,
    cut: int,
    text: str,  # NAME:VERSION
    *,
    tool: Apptainer,
    images: Path,  # their folder
    licence: str | None = None,
) -> Descriptor:
    """Make a release of a checkpoint of a run, and return its index; it has no name yet."""
    name, version = parse_local(text)
    lock = _checked(record, images)
    report = report_of(record, cut, lock, name=name, version=version, licence=licence)
    store.check_report(text, report)  # before the work
    with store.scratch() as scratch:
        _stage(record, cut, scratch / "run", text)
        staged = Record.read(scratch / "run")
        return _index(store.layout, staged, cut, tool=tool, images=images, lock=lock, report=report)


def _stage(record: Record, cut: int, root: Path, release: str) -> None:
    """Write the run that a release is: what was trained, and the weights, for a worker each.

    Optimizers, synthesizers and logs stay behind, and where and by whom it was trained.
    """
    run, target = record.run, RunDir(root)
    chain, workers = record.specs()
    root.mkdir()
    for folder in ("specs", "src", "metrics"):
        (root / folder).mkdir(parents=True)
    replicas = replicas_of(record.modules)
    states = {
        module: tensors_file(run.checkpoint(cut, names[0])) for module, names in replicas.items()
    }
    tails = tails_of(record.modules)
    parts = [read_document(run.checkpoint(cut, worker)) for worker in tails]
    step = sum(part.get("step", 0) for part in parts)
    for worker in workers:
        module = worker.module
        alone = worker.model_copy(update={"replicas": 1, "elastic": {}, "peers": ()})
        write_atomic(target.spec(module), alone.to_json())
        tensors = trained_tensors(worker, states).items()
        state = {LAYERS_PREFIX + key: tensor.contiguous() for key, tensor in tensors}
        part = read_document(run.checkpoint(cut, replicas[module][0]))
        document = {key: part[key] for key in _KEPT if key in part} | {"step": step}
        write_part(target, module, (state, document))
    if run.sources.is_dir():
        compiled = shutil.ignore_patterns("__pycache__")  # it names paths
        shutil.copytree(run.sources, target.sources, dirs_exist_ok=True, ignore=compiled)
    with contextlib.suppress(FileNotFoundError), opened(run.metrics(tails[0])) as file:
        # What came after this checkpoint is of other weights.
        curve = [one for line in file if (one := parse_evaluation(line)) and one.step <= step]
        kept = (
            one.model_dump_json(exclude={"time", "attempt"}, exclude_unset=True) for one in curve
        )
        write_atomic(target.metrics(workers[-1].module), "".join(f"{line}\n" for line in kept))
    exits = Exits.load(run.exits)
    if exits is not None and exits.checkpoint == cut:
        shutil.copytree(run.exits.parent, target.exits.parent)
    write_atomic(target.chain_file, run.chain_file.read_bytes())
    modules = tuple(one.model_copy(update={"replicas": 1}) for one in chain.modules)
    write_json(target.chain, chain.model_copy(update={"modules": modules}).model_dump(mode="json"))
    changed: dict[str, Any] = {
        "name": release.replace(":", "-"),
        "release": release,
        "modules": tuple(worker.module for worker in workers),
        "backend": "process",
        "scheduler": "local",
        "hosts": (),
        "chain_file": Path("chain.yaml"),
        "data": None,
        "carried": None,
        "images": {},
        "user": "",
        "host": "",
    }
    record.model_copy(update=changed).write(target.record)


def _index(
    layout: Layout,
    record: Record,  # as staged
    cut: int,
    *,
    tool: Apptainer,
    images: Path,
    lock: ImageLock,
    report: Report,
) -> Descriptor:
    """Store all that a release consists of, and return its index."""
    served = serving_chain(record, cut)
    front = served.front
    assert front is not None
    manifests, files = [], []
    for worker in served.workers:
        module = worker.module
        image = images / lock.modules[module].image
        base, layer, *others = sif.partitions(tool, image)
        if others or lock.modules[module].method != "layer":
            raise ImageError(
                f"{image} is not a base image and a module's layer",
                hint="build the images without --full, then release again",
            )
        labels = sif.metadata(tool, image)
        config = {
            "metadata": None if labels is None else json.loads(labels),
            "serving": json.loads(worker.to_json()),
        }
        tensors = tensors_file(record.run.checkpoint(cut, module)).read_bytes()
        manifest = Manifest(
            artifact_type=MODULE,
            config=layout.add(_json(config), MODULE),
            layers=(
                layout.add_chunks(partial(sif.content, image, base), BASE),
                layout.add_chunks(partial(sif.content, image, layer), LAYER),
                layout.add(tensors, WEIGHTS, {TITLE: "weights.safetensors"}),
            ),
            annotations={TITLE: module},
        )
        manifests.append(_listed(layout, manifest))
        name = f"{module}.safetensors"
        files.append(layout.add(tensors, WEIGHTS, {TITLE: name, FILE_PATH: name}))
    created = datetime.fromtimestamp(int(record.created), UTC).isoformat()
    model = _model(layout, report, created, tuple(files))
    documents = Manifest(
        artifact_type=RECORD,
        config=layout.add(_json({"front": json.loads(front.to_json())}), RECORD),
        layers=(
            layout.add(_packed(record.run.root), RUN),
            layout.add(lock.model_dump_json(exclude_none=True).encode(), "application/json",
                       {TITLE: LOCK_NAME}),
            layout.add(report.encode(), REPORT, {TITLE: "report.json"}),
        ),
        annotations={TITLE: "run"},
    )  # fmt: skip
    index = Index(
        artifact_type=CHAIN,
        manifests=(*manifests, _listed(layout, model), _listed(layout, documents)),
        annotations={
            TITLE: report.name,
            VERSION: report.version,
            CREATED: created,
            **({LICENSES: report.licence} if report.licence else {}),
        },
    )
    return layout.add(index.encode(), INDEX)


def _model(layout: Layout, report: Report, created: str, files: tuple[Descriptor, ...]) -> Manifest:
    """Return the weights as tools know them that know models, and not us (ModelPack)."""
    described = {"name": report.name, "version": report.version, "createdAt": created}
    config = {
        "descriptor": described | ({"licenses": [report.licence]} if report.licence else {}),
        "config": {"format": "safetensors"},
        "modelfs": {"type": "layers", "diffIds": [file.digest for file in files]},
    }
    return Manifest(
        artifact_type=MODEL,
        config=layout.add(_json(config), MODEL_CONFIG),
        layers=files,
        annotations={TITLE: "model"},
    )


def _checked(record: Record, images: Path) -> ImageLock:
    """Return the lock of the images that the run's modules have, whose hashes are the lock's."""
    lock = read_lock(images)
    _, workers = record.specs()
    if lock is None:
        raise UsageError(
            f"there are no images in {str(images)!r}",
            hint="a release consists of images: build them with 'dnictl build', or name their "
            "folder with --images",
        )
    for worker in workers:
        image = images / f"{worker.module}.sif"
        entry = lock_entry(image)
        if entry.module_hash != worker.hash:
            raise ImageError(
                f"{image} is of another version of module {worker.module!r}",
                hint="build the images of the chain that was trained: dnictl build",
            )
        verify_sources(image, entry, record.run.source_files)
        verify_hash(image, entry)
    entries = {
        name: one.model_copy(update={"mtime_ns": None}) for name, one in lock.modules.items()
    }
    return lock.model_copy(update={"modules": entries})


def _listed(layout: Layout, manifest: Manifest) -> Descriptor:
    return layout.add(manifest.encode(), MANIFEST).model_copy(
        update={"artifact_type": manifest.artifact_type, "annotations": manifest.annotations}
    )


def _json(document: Mapping[str, Any]) -> bytes:
    return json.dumps(document, sort_keys=True).encode()


def _packed(root: Path) -> bytes:
    """Return a run without its weights as a tar file that has no times, users or modes of files."""
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for path in sorted(path for path in root.rglob("*") if path.is_file()):
            inner = path.relative_to(root)
            if inner.parts[0] == "checkpoints" and path.suffix == ".safetensors":
                continue
            entry = tarfile.TarInfo(inner.as_posix())
            entry.size, entry.mode = path.stat().st_size, 0o644
            with path.open("rb") as file:
                archive.addfile(entry, file)
    return content.getvalue()

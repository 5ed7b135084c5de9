"""Checks that this host has what a run needs: data, devices, Apptainer, images.

What a host has in general, whatever the chain, is examined in ``api/doctor.py``.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from dni_runtime.errors import DataError, ImageError, SpecError, UnavailableError
from dni_runtime.files import expanded
from dni_runtime.image.apptainer import Apptainer, Mount, usable_apptainer
from dni_runtime.image.check import (
    inspect_image,
    verify_hash,
    verify_signature,
    verify_sources,
)
from dni_runtime.image.layers import MODULE_JSON
from dni_runtime.image.lock import LOCK_NAME, read_lock
from dni_runtime.plan.plan import Backend
from dni_runtime.plan.settings import Site, StartSettings
from dni_runtime.run.rundir import socket_path
from dni_runtime.spec import ChainSpec, WorkerSpec
from dni_runtime.spec.data import own_path

Locator = Callable[..., str]
"""Returns ``file:line: path`` of a location in the chain file."""

# In front of the container's own libraries, where --nv puts the host's (apptainer, "GPU support").
_LIBRARY_TARGET = "/.singularity.d/libs"
_VERBS_LIBRARIES = (
    "libibverbs.so.1", "librdmacm.so.1", "libmlx5.so.1", "libmlx4.so.1", "libefa.so.1",
    "libnl-3.so.200", "libnl-route-3.so.200",
)  # fmt: skip
_CPUINFO = Path("/proc/cpuinfo")
_MOST_HASHED = 8  # images at once, to spare a shared file system
_LIBRARY_FOLDERS = ("usr/lib64", "lib64", "usr/lib/x86_64-linux-gnu", "usr/lib/aarch64-linux-gnu")


def check_host(
    chain: ChainSpec,
    workers: Sequence[WorkerSpec],
    sources: Mapping[str, Path],  # the user's files that the workers import
    settings: StartSettings,
    data: Path | None,  # folder or file
    locate: Locator,
) -> Site:
    """Check whether a run can start on this host, and choose its backend.

    If the workers run elsewhere, their devices and addresses are not checked; all files are on a
    shared file system.
    """
    heads = range(1, workers[0].replicas + 1)
    paths = [] if data is None else list(dict.fromkeys(own_path(data, number) for number in heads))
    for path in paths:
        if not path.exists():
            raise DataError(
                f"{locate('data')}: {str(path)!r} does not exist",
                hint="set data.path, or use --data",
            )
    labels = chain.data.labels_path
    if labels is not None and not labels.exists():
        raise DataError(
            f"{locate('data', 'labels')}: {str(labels)!r} does not exist",
            hint="set data.labels.path",
        )
    site = _choose(workers, sources, settings, chain.image.require_signed)
    job = settings.job
    shared = not settings.elsewhere and all(worker.device == "cpu" for worker in workers)
    warnings = filter(
        None,
        [
            exposure(chain, None if job is None else job.settings.interface),
            None if settings.elsewhere else slow_bfloat16(workers),
            None if shared else waiting(workers),
        ],
    )
    site = replace(
        site,
        data=data,
        files=tuple(path for path in (*paths, labels) if path is not None and path.is_file()),
        notices=(*(f"warning: {warning}" for warning in warnings), *site.notices),
        sockets=socket_path(settings.run),
        python=sys.executable,
        python_path=os.environ.get("PYTHONPATH", ""),
    )
    if not settings.elsewhere:
        check_devices(chain, workers, site.backend, locate)
        if chain.links.transport == "tcp":
            _check_addresses(workers, locate)
    if site.backend == "process":
        return site
    devices = () if settings.elsewhere else infiniband_mounts(chain.infiniband)
    return replace(site, mounts=(*_chain_mounts(chain, locate), *devices))


def exposure(chain: ChainSpec, interface: str | None = None) -> str | None:
    """Return the warning for links that are not encrypted; None if nothing is exposed.

    ``interface`` is that of links between hosts if the chain names none.
    """
    links, backend = chain.links, chain.replication.backend
    interface = links.interface or interface
    if links.transport == "ipc" or interface is None:
        return None
    if links.security == "none":
        cause, what = "'links.security: none'", "this chain's activations and labels"
    elif backend is not None:
        cause, what = f"'replication.backend: {backend}'", "the weights that replicas share"
    else:
        return None
    return (
        f"{cause}: anyone who can reach {interface!r} can read {what}, and take part in its "
        "training"
    )


def waiting(workers: Sequence[WorkerSpec]) -> str | None:
    """Return the warning for modules that wait while devices of their own have nothing to do.

    Measured: docs/results.md, "Modules on devices of their own".
    """
    waits = [worker.max_late for worker in workers if worker.max_late is not None]
    head = workers[0].head
    if not waits or head is None:
        return None
    count, modules = (min(waits) + 1) * head.micro_batches, len({w.module for w in workers})
    if count >= modules:
        return None
    busy = "one" if count == 1 else f"at most {count}"
    return (
        f"modules wait for true gradients, so {busy} of {modules} computes at a time; with "
        f"'micro_batches: {modules}' in 'interface' all of them do"
    )


def slow_bfloat16(workers: Sequence[WorkerSpec]) -> str | None:
    """Return the warning for bfloat16 on a processor that does not compute with it."""
    modules = [w.module for w in workers if w.device == "cpu" and w.precision == "bfloat16"]
    if not modules or not _CPUINFO.is_file() or "bf16" in _CPUINFO.read_text():
        return None
    return (
        f"'precision: bfloat16' of {', '.join(map(repr, modules))}: this processor has no "
        "avx512_bf16 or amx_bf16, and convolutions take 25 times as long as in float32"
    )


def _check_addresses(workers: Sequence[WorkerSpec], locate: Locator) -> None:
    from dni_runtime.link.address import check_address  # zmq: only if links matter

    for worker in workers:
        for edge in worker.sources:
            try:
                check_address(worker.links, edge.number, Path(), worker.module)
            except (UnavailableError, SpecError) as error:
                where = locate(*error.location)
                raise type(error)(f"{where}: {error.message}", hint=error.hint) from None


def _chain_mounts(chain: ChainSpec, locate: Locator) -> Iterator[Mount]:
    for index, mount in enumerate(chain.mounts):
        source = expanded(mount.source).absolute()
        if not source.exists():
            raise UnavailableError(
                f"{locate('mounts', index)}: {str(source)!r} does not exist and cannot be mounted",
                hint="name a file or folder of this host",
            )
        yield Mount(str(source), mount.target or str(source), mount.read_only)


def _choose(
    workers: Sequence[WorkerSpec],
    sources: Mapping[str, Path],
    settings: StartSettings,
    require_signed: bool | str,
) -> Site:
    backend, images = settings.backend, settings.images
    if backend == "process":
        return Site("process")
    try:
        tool = usable_apptainer()
        if backend == "auto" and not any(_image(images, worker).exists() for worker in workers):
            problem = f"no images in {str(images)!r} (build them with 'dnictl build')"
            raise UnavailableError(problem)
    except UnavailableError as error:
        if backend == "auto":
            return Site("process", notices=(f"{error.message}: using the process backend",))
        hint = f"{error.hint}; or use --backend process"
        raise UnavailableError(error.message, hint=hint) from None
    return Site("apptainer", tool, check_images(tool, workers, images, sources, require_signed))


def _image(folder: Path, worker: WorkerSpec) -> Path:
    return folder / f"{worker.module}.sif"


def check_images(
    tool: Apptainer,
    workers: Sequence[WorkerSpec],
    folder: Path,  # of the images and their lock
    sources: Mapping[str, Path],
    require_signed: bool | str = False,
) -> dict[str, Path]:
    """Return the image of each module after checking spec, sources, hash and signature; run none.

    ``require_signed``: each image needs a valid signature; a text names the public key for it.
    """
    lock = read_lock(folder)
    key = expanded(require_signed) if isinstance(require_signed, str) else None

    def check(worker: WorkerSpec) -> Path:
        image = _image(folder, worker)
        if not image.is_file():
            raise UnavailableError(
                f"module {worker.module!r} has no image: {str(image)!r} does not exist",
                hint="build the images with 'dnictl build', or use --backend process",
            )
        entry = None if lock is None else lock.modules.get(worker.module)
        if require_signed:
            if entry is None:
                raise ImageError(
                    f"{str(image)!r} is not in {str(folder / LOCK_NAME)!r}, which the chain's "
                    "'image.require_signed' needs",
                    hint=f"copy {LOCK_NAME} together with the signed images, or build them with "
                    "'dnictl build --sign'",
                )
            verify_signature(tool, image, key=key)
        # Without an entry in the lock, look into the image itself.
        its_hash = entry.module_hash if entry is not None else _hash_inside(tool, image)
        wanted = worker.trained or worker.hash
        if its_hash != wanted:
            raise ImageError(
                f"{str(image)!r} was built from another spec of module {worker.module!r} "
                f"(image {its_hash[:12]}, chain {wanted[:12]})",
                hint="rebuild the images with 'dnictl build'",
            )
        if entry is not None:
            verify_sources(image, entry, sources)
            verify_hash(image, entry)
        return image.absolute()

    # hashing takes most of the time and releases the GIL
    with ThreadPoolExecutor(min(_MOST_HASHED, len(os.sched_getaffinity(0)))) as pool:
        return {w.module: path for w, path in zip(workers, pool.map(check, workers), strict=True)}


def _hash_inside(tool: Apptainer, image: Path) -> str:
    try:
        return WorkerSpec.model_validate(inspect_image(tool, image).module).hash
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the document"
        raise ImageError(
            f"/{MODULE_JSON} in {str(image)!r} is not a valid module spec: {where}: {first['msg']}",
            hint="it was built by another version: rebuild the images with 'dnictl build'",
        ) from None


def check_devices(
    chain: ChainSpec, workers: Sequence[WorkerSpec], backend: Backend, locate: Locator
) -> None:
    """Refuse a chain that requests a missing GPU, instead of silently using the CPU."""
    for worker in workers:
        kind, _, number = worker.device.partition(":")
        if kind not in ("cuda", "rocm"):
            continue
        look = _devices_for_containers if backend == "apptainer" else _devices_for_torch
        if (problem := look(kind, int(number or 0))) is not None:
            explicit = chain.modules[worker.index].device is not None
            where = ("modules", worker.index) if explicit else ("defaults",)
            raise UnavailableError(
                f"{locate(*where, 'device')}: module {worker.module!r} requests "
                f"device {worker.device!r}, but {problem}",
                hint="run it on a host with that GPU, or set 'device: cpu' (or 'auto': a GPU if "
                "there is one)",
            )


def _devices_for_torch(kind: str, index: int) -> str | None:
    """Return why this Python's torch cannot use a GPU, or None."""
    import torch

    if (torch.version.hip if kind == "rocm" else torch.version.cuda) is None:
        return f"torch {torch.__version__} is not built for {kind}"
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} finds no GPU on this host"
    count = torch.cuda.device_count()
    return None if index < count else f"this host shows {count} GPUs, numbered from 0"


def _devices_for_containers(kind: str, index: int, dev: Path = Path("/dev")) -> str | None:
    """Return what is missing for a GPU in a container, or None; the image has its own torch."""
    devices = gpu_devices(dev)
    if kind == "rocm":
        return None if "kfd" in devices else "this host has no AMD GPU (no /dev/kfd)"
    if (dev / "dxg").exists():  # Windows Subsystem for Linux
        return None
    count = len(devices) - ("kfd" in devices)
    if count == 0:
        return "this host has no NVIDIA GPU (no /dev/nvidia0)"
    return None if index < count else f"this host has {count} NVIDIA GPUs, numbered from 0"


def infiniband_mounts(
    setting: Literal["auto", "required", "off"], root: Path = Path("/")
) -> tuple[Mount, ...]:
    """Return mounts of the host's InfiniBand devices, providers and libraries.

    ``auto`` mounts what exists; ``root`` is the host's root folder.
    """
    if setting == "off":
        return ()
    devices = root / "dev/infiniband"
    if not devices.is_dir():
        if setting == "required":
            raise UnavailableError(
                "the chain sets 'infiniband: required', but this host has no /dev/infiniband",
                hint="run it on a host with InfiniBand, or set 'infiniband: auto'",
            )
        return ()
    mounts = [Mount("/dev/infiniband", "/dev/infiniband", read_only=False)]
    # libibverbs loads its drivers from a folder whose path is compiled in.
    drivers = [f"{folder}/libibverbs" for folder in _LIBRARY_FOLDERS]
    there = [folder for folder in ("etc/libibverbs.d", *drivers) if (root / folder).is_dir()]
    mounts += [Mount(f"/{folder}", f"/{folder}") for folder in there]
    for name in _VERBS_LIBRARIES:
        path = next((f"/{f}/{name}" for f in _LIBRARY_FOLDERS if (root / f / name).exists()), None)
        if path is not None:
            mounts.append(Mount(path, f"{_LIBRARY_TARGET}/{name}"))
    return tuple(mounts)


def gpu_devices(dev: Path = Path("/dev")) -> list[str]:
    """Return the devices of NVIDIA's GPUs, and ``kfd``, which all of AMD's share."""
    nvidia = [path.name for path in dev.glob("nvidia*") if path.name[6:].isdigit()]
    return [*sorted(nvidia), *(path.name for path in dev.glob("kfd"))]

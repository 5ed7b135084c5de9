"""What a host must have: devices, images, Apptainer, InfiniBand; looked for in made-up ones."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from dni_runtime.errors import DataError, ImageError, UnavailableError
from dni_runtime.image.apptainer import Apptainer, Mount
from dni_runtime.image.check import Inspection
from dni_runtime.image.lock import (
    LOCK_NAME,
    ImageLock,
    LockedBase,
    LockedImage,
    read_lock,
    write_lock,
)
from dni_runtime.plan import host
from dni_runtime.plan.host import (
    check_devices,
    check_host,
    check_images,
    exposure,
    infiniband_mounts,
)
from dni_runtime.plan.settings import Site, StartSettings
from dni_runtime.spec import ChainSpec, LinksSpec, WorkerSpec
from dni_runtime.spec.running import ReplicationSpec

MakeWorker = Callable[..., WorkerSpec]

TOOL = Apptainer(Path("/nowhere/apptainer"), "apptainer", (1, 4, 5))


def place(*location: str | int) -> str:
    return f"chain.yaml:7: {location}"


def check(
    chain: ChainSpec, workers: tuple[WorkerSpec, ...], data: Path | None = None, **settings: object
) -> Site:
    given = {"backend": "process"} | settings
    settings = StartSettings(Path("/run"), **given)  # type: ignore[arg-type]
    return check_host(chain, workers, {}, settings, data, place)


def test_processes_need_nothing(chain: ChainSpec, workers: tuple[WorkerSpec, ...]) -> None:
    site = check(chain, workers)
    assert (site.backend, site.mounts, site.notices) == ("process", (), ())


@pytest.mark.parametrize(
    ("flags", "settings", "warned"),
    [
        ("avx512f", {}, True),
        ("avx512f avx512_bf16", {}, False),
        ("avx512f", {"scheduler": "ssh"}, False),
    ],
)
def test_bfloat16_is_slow_on_some_processors(
    chain: ChainSpec, workers: tuple[WorkerSpec, ...], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, flags: str, settings: dict[str, Any], *, warned: bool,
) -> None:  # fmt: skip
    (tmp_path / "cpuinfo").write_text(f"processor: 0\nflags: fpu {flags}\n")
    monkeypatch.setattr(host, "_CPUINFO", tmp_path / "cpuinfo")
    first, *others = workers
    workers = (first.model_copy(update={"precision": "bfloat16"}), *others)
    notices = check(chain, workers, **settings).notices
    assert [first.module in one and "avx512_bf16" in one for one in notices] == [True] * warned


def test_data_that_is_gone(chain: ChainSpec, workers: tuple[WorkerSpec, ...]) -> None:
    with pytest.raises(DataError, match=r"chain.yaml:7: .*'/gone' does not exist"):
        check(chain, workers, data=Path("/gone"))


@pytest.fixture
def no_apptainer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dni_runtime.image.apptainer.SETUP_PREFIXES", ())
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("DNI_APPTAINER", raising=False)


@pytest.mark.usefixtures("no_apptainer")
def test_without_apptainer(chain: ChainSpec, workers: tuple[WorkerSpec, ...]) -> None:
    site = check(chain, workers, backend="auto")
    assert site.backend == "process"
    assert "using the process backend" in site.notices[0]
    with pytest.raises(UnavailableError) as caught:
        check(chain, workers, backend="apptainer")
    assert "not installed" in str(caught.value)
    assert "--backend process" in str(caught.value)


@pytest.fixture
def apptainer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dni_runtime.image.apptainer.find_apptainer", lambda: TOOL)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)


def write_images(
    folder: Path,
    workers: tuple[WorkerSpec, ...],
    locked: tuple[WorkerSpec, ...] | None = None,
    sources: Mapping[str, Path] | None = None,
) -> None:
    """Files that pass for images, and the lock of all of them or of some."""
    digests = {
        name: hashlib.sha256(path.read_bytes()).hexdigest()
        for name, path in (sources or {}).items()
    }
    folder.mkdir()
    modules = {}
    for worker in workers:
        (folder / f"{worker.module}.sif").write_bytes(b"sif")
        if worker not in (locked or workers):
            continue
        modules[worker.module] = LockedImage(
            image=f"{worker.module}.sif",
            sha256=hashlib.sha256(b"sif").hexdigest(),
            size_bytes=3,
            content="1" * 64,
            module_hash=worker.hash,
            sources=digests,
            method="layer",
        )
    base = LockedBase(
        content="2" * 64, sha256="3" * 64, definition_sha256="4" * 64, torch="2.13.0", wheels=[]
    )
    write_lock(
        folder,
        ImageLock(
            chain="small", builder="apptainer 1.4.5", runtime_version="0.1.0", base=base,
            modules=modules,
        ),
    )  # fmt: skip


@pytest.mark.usefixtures("apptainer")
def test_with_images(tmp_path: Path, chain: ChainSpec, workers: tuple[WorkerSpec, ...]) -> None:
    write_images(tmp_path / "images", workers)
    site = check(chain, workers, backend="auto", images=tmp_path / "images")
    assert (site.backend, site.tool, site.notices) == ("apptainer", TOOL, ())
    assert site.images == {w.module: tmp_path / "images" / f"{w.module}.sif" for w in workers}


@pytest.mark.usefixtures("apptainer")
def test_without_images(tmp_path: Path, chain: ChainSpec, workers: tuple[WorkerSpec, ...]) -> None:
    site = check(chain, workers, backend="auto", images=tmp_path)
    assert site.backend == "process"
    assert "dnictl build" in site.notices[0]
    with pytest.raises(UnavailableError, match="module 'bottom' has no image"):
        check(chain, workers, backend="apptainer", images=tmp_path)


@pytest.mark.usefixtures("apptainer")
@pytest.mark.parametrize("wanted", ["auto", "apptainer"])
def test_an_image_of_another_spec(
    tmp_path: Path, chain: ChainSpec, workers: tuple[WorkerSpec, ...], wanted: str
) -> None:
    write_images(tmp_path / "images", workers)
    changed = (*workers[:2], workers[2].model_copy(update={"seed": 1}))
    with pytest.raises(ImageError) as caught:
        check(chain, changed, backend=wanted, images=tmp_path / "images")
    text = str(caught.value)
    assert "top.sif" in text
    assert "from another spec of module 'top'" in text
    assert "dnictl build" in text


def test_an_image_that_the_lock_does_not_know_is_asked(
    tmp_path: Path,
    workers: tuple[WorkerSpec, ...],
    make_worker: MakeWorker,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = tmp_path / "images"
    write_images(folder, workers, locked=(workers[0], workers[2]))
    asked: list[Path] = []

    class Answer:
        module = make_worker(1).model_dump(mode="json")

    def inspect(tool: Apptainer, image: Path) -> Answer:
        asked.append(image)
        return Answer()

    monkeypatch.setattr(host, "inspect_image", inspect)
    check_images(TOOL, workers, folder, {})
    assert asked == [folder / "middle.sif"]


def test_an_image_that_was_altered(tmp_path: Path, workers: tuple[WorkerSpec, ...]) -> None:
    folder = tmp_path / "images"
    write_images(folder, workers)
    (folder / "middle.sif").write_bytes(b"siF")  # of the same size
    with pytest.raises(ImageError, match=r"middle\.sif is not the image that was built"):
        check_images(TOOL, workers, folder, {})


def test_an_image_of_other_code(tmp_path: Path, workers: tuple[WorkerSpec, ...]) -> None:
    """A file that only the image or only the run has is no difference, nor is another path."""
    folder, here, there = (tmp_path / name for name in ("images", "here", "there"))
    for code in (here, there):
        code.mkdir()
        (code / "nets.py").write_text("RATE = 1\n")
    built = {"nets.py": here / "nets.py", "old.py": here / "nets.py"}
    write_images(folder, workers, sources=built)
    sources = {"nets.py": there / "nets.py", "notebook.py": here / "nets.py"}
    check_images(TOOL, workers, folder, sources)
    (there / "nets.py").write_text("RATE = 2\n")
    with pytest.raises(ImageError, match=r"bottom\.sif.* another 'nets\.py' .*\n.*dnictl build"):
        check_images(TOOL, workers[:1], folder, sources)
    lock = folder / LOCK_NAME
    document = json.loads(lock.read_text())
    del document["modules"]["bottom"]["sources"]
    lock.write_text(json.dumps(document))
    with pytest.raises(ImageError, match=r"which code .*bottom\.sif was built from is not known"):
        check_images(TOOL, workers[:1], folder, sources)


def test_a_signature_that_is_required_comes_before_all_else(
    tmp_path: Path, workers: tuple[WorkerSpec, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a lock nobody vouches for the spec; with one, nothing is looked at before."""
    folder = tmp_path / "images"
    write_images(folder, workers)
    asked = []
    for name in ("inspect_image", "verify_hash", "verify_signature"):
        monkeypatch.setattr(host, name, lambda *args, n=name, **_: asked.append((n, args[1])))
    image = folder / "bottom.sif"
    check_images(TOOL, workers[:1], folder, {}, require_signed=True)
    assert [name for name, _ in asked] == ["verify_signature", "verify_hash"]
    asked.clear()
    for unknown in ("not in the lock", "no lock"):
        if unknown == "no lock":
            (folder / "dni.lock").unlink()
        else:
            write_lock(folder, read_lock(folder).model_copy(update={"modules": {}}))
        with pytest.raises(ImageError, match=r"is not in .*dni\.lock.*require_signed.*\n.*copy"):
            check_images(TOOL, workers[:1], folder, {}, require_signed=True)
    assert asked == []
    assert image.is_file()


def test_an_image_with_another_document_than_a_spec(
    tmp_path: Path, workers: tuple[WorkerSpec, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "images"
    write_images(folder, workers, locked=workers[1:])
    answer = Inspection({}, {"module": 3})
    monkeypatch.setattr(host, "inspect_image", lambda *_: answer)
    with pytest.raises(ImageError, match=r"module\.json in .*bottom\.sif.* is not a valid module"):
        check_images(TOOL, workers, folder, {})


@pytest.mark.usefixtures("apptainer")
def test_root_runs_no_containers(
    tmp_path: Path,
    chain: ChainSpec,
    workers: tuple[WorkerSpec, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    write_images(tmp_path / "images", workers)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert check(chain, workers, backend="auto", images=tmp_path / "images").backend == "process"
    with pytest.raises(UnavailableError, match="as root"):
        check(chain, workers, backend="apptainer", images=tmp_path / "images")


def test_what_is_exposed_where_the_site_names_the_interface(chain: ChainSpec) -> None:
    def exposed(links: LinksSpec, interface: str | None = None, **given: Any) -> str:
        replication = ReplicationSpec(**given)
        changed = chain.model_copy(update={"links": links, "replication": replication})
        return str(exposure(changed, interface))

    open_links = LinksSpec(security="none")
    assert exposed(open_links) == "None"
    assert "'ib0'" in exposed(open_links, "ib0")
    assert "'eth1'" in exposed(LinksSpec(security="none", interface="eth1"), "ib0")
    assert exposed(LinksSpec(), "ib0") == exposed(LinksSpec(), backend="gloo") == "None"
    found = exposed(LinksSpec(), "ib0", backend="gloo")
    assert found.startswith("'replication.backend: gloo': anyone who can reach 'ib0' can read the")


@pytest.mark.parametrize(
    ("late", "parts", "warned"),
    [
        (0, 1, "one of 3 computes"),
        (1, 1, "at most 2 of 3 computes"),
        (0, 2, "at most 2 of 3 computes"),
        (1, 2, None),
        (None, 1, None),
    ],
)
def test_modules_that_wait_for_each_other_are_counted(
    workers: tuple[WorkerSpec, ...], chain: ChainSpec, late: int | None, parts: int,
    warned: str | None,
) -> None:  # fmt: skip
    """No more of them compute than parts of batches may be under way; on one host that is right."""
    assert workers[0].head is not None
    given = tuple(worker.model_copy(update={"max_late": late}) for worker in workers)
    head = workers[0].head.model_copy(update={"micro_batches": parts})
    given = (given[0].model_copy(update={"head": head}), *given[1:])
    assert check(chain, given).notices == ()
    notices = check(chain, given, scheduler="ssh").notices
    assert [warned is not None and warned in text for text in notices] == [True] * bool(warned)


@pytest.mark.usefixtures("apptainer")
def test_mounts(tmp_path: Path, chain: ChainSpec, workers: tuple[WorkerSpec, ...]) -> None:
    write_images(tmp_path / "images", workers)
    scratch = tmp_path / "scratch"

    def mounted() -> Site:
        mounts = [{"source": str(scratch), "target": "/scratch", "read_only": False}]
        document = chain.model_dump(mode="json") | {"mounts": mounts, "infiniband": "off"}
        other = ChainSpec.model_validate(document)
        return check(other, workers, backend="auto", images=tmp_path / "images")

    with pytest.raises(UnavailableError, match="does not exist and cannot be mounted"):
        mounted()
    scratch.mkdir()
    assert mounted().mounts == (Mount(str(scratch), "/scratch", read_only=False),)


def test_cuda_without_a_gpu(
    chain: ChainSpec, make_worker: MakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UnavailableError) as caught:
        check_devices(chain, (make_worker(1, device="cuda"),), "process", place)
    text = str(caught.value)
    assert "('defaults', 'device')" in text
    assert "module 'middle' requests device 'cuda'" in text
    assert "finds no GPU" in text
    assert "device: cpu" in text


def test_a_gpu_that_is_one_too_many(
    chain: ChainSpec, make_worker: MakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    check_devices(chain, (make_worker(0, device="cuda:1"),), "process", place)
    with pytest.raises(UnavailableError, match="shows 2 GPUs"):
        check_devices(chain, (make_worker(0, device="cuda:2"),), "process", place)


def test_a_torch_for_something_else(
    chain: ChainSpec, make_worker: MakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    monkeypatch.setattr(torch.version, "hip", None)
    with pytest.raises(UnavailableError, match="not built for rocm"):
        check_devices(chain, (make_worker(0, device="rocm"),), "process", place)


def test_devices_for_containers(tmp_path: Path) -> None:
    look = host._devices_for_containers
    assert "no NVIDIA GPU" in str(look("cuda", 0, tmp_path))
    assert "no AMD GPU" in str(look("rocm", 0, tmp_path))
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm", "kfd"):
        (tmp_path / name).touch()
    assert look("cuda", 1, tmp_path) is None
    assert "2 NVIDIA GPUs" in str(look("cuda", 2, tmp_path))
    assert look("rocm", 0, tmp_path) is None


def test_auto_and_cpu_are_always_there(chain: ChainSpec, make_worker: MakeWorker) -> None:
    workers = (make_worker(0, device="auto"), make_worker(1, device="cpu"))
    check_devices(chain, workers, "process", place)
    check_devices(chain, workers, "apptainer", place)


def test_a_host_without_infiniband(tmp_path: Path) -> None:
    assert infiniband_mounts("auto", tmp_path) == ()
    with pytest.raises(UnavailableError, match="no /dev/infiniband"):
        infiniband_mounts("required", tmp_path)


def test_a_host_with_infiniband(tmp_path: Path) -> None:
    for folder in ("dev/infiniband", "etc/libibverbs.d", "usr/lib64/libibverbs"):
        (tmp_path / folder).mkdir(parents=True)
    for name in ("libibverbs.so.1", "libmlx5.so.1"):
        (tmp_path / "usr/lib64" / name).touch()
    expected = (
        Mount("/dev/infiniband", "/dev/infiniband", read_only=False),
        Mount("/etc/libibverbs.d", "/etc/libibverbs.d"),
        Mount("/usr/lib64/libibverbs", "/usr/lib64/libibverbs"),
        Mount("/usr/lib64/libibverbs.so.1", "/.singularity.d/libs/libibverbs.so.1"),
        Mount("/usr/lib64/libmlx5.so.1", "/.singularity.d/libs/libmlx5.so.1"),
    )
    assert infiniband_mounts("auto", tmp_path) == expected
    assert infiniband_mounts("required", tmp_path) == expected
    assert infiniband_mounts("off", tmp_path) == ()

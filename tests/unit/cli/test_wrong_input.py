"""Each kind of wrong input is one paragraph and an exit code, before anything starts."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
import torch

from dni_runtime.image.apptainer import Apptainer
from dni_runtime.image.lock import ImageLock, LockedBase, LockedImage, write_lock
from dni_runtime.launch import doctor
from tests.unit.cli.conftest import Dnictl, Result, WriteChain

# What to change in the chain, the exit code, and what the message must say.
WRONG: dict[str, tuple[tuple[str, str], int, list[str]]] = {
    "unknown layer": (
        ("- BatchNorm1d: {num_features: 32}", "- BatchNorm9d: {num_features: 32}"),
        78,
        ["chain.yaml:11: modules[0].layers[1]", "unknown layer 'BatchNorm9d'", "did you mean"],
    ),
    "misspelt keyword of a layer": (
        ("out_features: 10", "out_feature: 10"),
        78,
        ["chain.yaml:15: modules[1].layers[0].Linear", "'out_feature'", "out_features"],
    ),
    "misspelt key": (
        ("epochs: 2", "epoch: 2"),
        78,
        ["chain.yaml:4: epoch", "unknown key 'epoch'", "did you mean 'epochs'?"],
    ),
    "misspelt optimizer": (
        ("Adam: {lr", "Adm: {lr"),
        78,
        ["chain.yaml:6: defaults.optimizer", "'Adm'", "Adam"],
    ),
    "misspelt keyword of an optimizer": (
        ("lr: 0.002", "learning_rate: 0.002"),
        78,
        ["chain.yaml:6: defaults.optimizer", "learning_rate", "lr"],
    ),
    "shapes that do not fit": (
        ("in_features: 32", "in_features: 48"),
        78,
        ["chain.yaml:15: modules[1].layers[0]", "32", "48"],
    ),
    "shapes that do not fit the loss": (
        ("{in_features: 32, out_features: 10}", "{in_features: 32, out_features: 3}"),
        78,
        ["chain.yaml", "10", "3"],
    ),
    "unknown data set": (
        ("dataset: digits", "dataset: digit"),
        78,
        ["chain.yaml:3: data.dataset", "'digit'", "did you mean 'digits'?"],
    ),
    "missing data folder": (
        ("dataset: digits", "dataset: mnist, path: /no/such/folder"),
        66,
        ["chain.yaml:3: data", "/no/such/folder"],
    ),
    "unknown interface": (
        ("epochs: 2", "epochs: 2\nlinks: {transport: tcp, interface: ib7}"),
        69,
        ["chain.yaml:5: links.interface", "'ib7'", "there is:"],
    ),
    "no YAML": (("name: small", "name: [small"), 78, ["chain.yaml", "not valid YAML"]),
    "two modules of one name": (
        ("name: top", "name: bottom"),
        78,
        ["chain.yaml", "modules 0 and 1 are both named 'bottom'"],
    ),
}


def check(result: Result, code: int, parts: list[str]) -> None:
    assert result.code == code, result.err
    assert result.out == ""
    assert result.err.startswith("dnictl: error: ")
    assert "Traceback" not in result.err
    assert len(result.err.splitlines()) <= 4, result.err
    for part in parts:
        assert part in result.err


@pytest.mark.parametrize("name", WRONG)
def test_wrong_chain(name: str, dnictl: Dnictl, write_chain: WriteChain, folder: Path) -> None:
    change, code, parts = WRONG[name]
    path = write_chain(change)
    check(dnictl("up", path, "--backend", "process"), code, parts)
    assert not (folder / "runs").exists()


def test_validate_finds_the_same(dnictl: Dnictl, write_chain: WriteChain) -> None:
    change, code, parts = WRONG["shapes that do not fit"]
    check(dnictl("validate", write_chain(change)), code, parts)
    check(dnictl("check", write_chain(change)), code, parts)


def test_no_file(dnictl: Dnictl) -> None:
    check(dnictl("up", "nothing.yaml"), 78, ["there is no file 'nothing.yaml'", "dnictl init"])


def test_doctor_measures_a_chain_only_when_asked(dnictl: Dnictl, write_chain: WriteChain) -> None:
    path = write_chain()
    check(dnictl("doctor", path), 64, ["doctor --network", "dnictl validate"])
    for option in ("--interface", "--data"):
        check(dnictl("doctor", option, "ib0"), 64, ["doctor --network"])
    wrong = dnictl("doctor", "--network", path, "--interface", "ib0")
    check(wrong, 64, ["--interface", "links.interface"])


def test_a_port_that_is_taken(dnictl: Dnictl, write_chain: WriteChain, folder: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        path = write_chain(("epochs: 2", f"epochs: 2\nlinks: {{transport: tcp, port: {port - 1}}}"))
        result = dnictl("up", path, "--backend", "process")
    check(result, 69, ["chain.yaml:5: links.port", str(port)])
    assert not (folder / "runs").exists()


def test_links_without_encryption_are_warned_about(dnictl: Dnictl, write_chain: WriteChain) -> None:
    links = "links: {transport: tcp, interface: 127.0.0.1, security: none}"
    path = write_chain(("epochs: 2", f"epochs: 2\n{links}"))
    for command in (["validate", path], ["up", path, "--backend", "process", "--dry-run"]):
        result = dnictl(*command)
        assert result.code == 0
        assert "warning: 'links.security: none': anyone who can reach '127.0.0.1'" in result.err
    path = write_chain(("epochs: 2", f"epochs: 2\n{links.replace('none', 'curve')}"))
    assert "security" not in dnictl("validate", path).err


def test_cuda_without_a_gpu(
    dnictl: Dnictl, write_chain: WriteChain, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    path = write_chain(("  - name: top", "  - name: top\n    device: cuda"))
    result = dnictl("up", path, "--backend", "process")
    check(
        result,
        69,
        ["chain.yaml:14: modules[1].device", "module 'top' requests device 'cuda'", "device: cpu"],
    )
    assert not (folder / "runs").exists()


def test_apptainer_that_is_missing(
    dnictl: Dnictl, write_chain: WriteChain, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dni_runtime.image.apptainer.SETUP_PREFIXES", ())
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("DNI_APPTAINER", raising=False)
    check(
        dnictl("up", write_chain(), "--backend", "apptainer"),
        69,
        ["Apptainer is not installed", "--backend process"],
    )


def test_an_image_of_another_spec(
    dnictl: Dnictl, write_chain: WriteChain, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = Apptainer(Path("/nowhere/apptainer"), "apptainer", (1, 4, 5))
    monkeypatch.setattr(doctor, "find_apptainer", lambda: tool)
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    images = folder / "images"
    images.mkdir()
    locked = {}
    for name in ("bottom", "top"):
        (images / f"{name}.sif").write_bytes(b"sif")
        locked[name] = LockedImage(
            image=f"{name}.sif", sha256="0" * 64, size_bytes=3, content="1" * 64,
            module_hash="2" * 64, method="layer",
        )  # fmt: skip
    base = LockedBase(
        content="2" * 64, sha256="3" * 64, definition_sha256="4" * 64, torch="2.13.0", wheels=[]
    )
    lock = ImageLock(
        chain="small", builder="apptainer 1.4.5", runtime_version="0.1.0", base=base, modules=locked
    )
    write_lock(images, lock)
    check(
        dnictl("up", write_chain(), "--backend", "apptainer"),
        65,
        ["bottom.sif", "from another spec of module 'bottom'", "222222222222", "dnictl build"],
    )


def test_compare_names_unknown_interfaces(
    dnictl: Dnictl, write_chain: WriteChain, folder: Path
) -> None:
    result = dnictl("compare", write_chain(), "--interfaces", "exact,sinthetic", "--out", "c")
    check(result, 64, ["unknown gradient interface 'sinthetic'", "did you mean 'synthetic'?"])
    assert not (folder / "c").exists()


def test_compare_needs_evaluations(dnictl: Dnictl, write_chain: WriteChain, folder: Path) -> None:
    path = write_chain(("epochs: 2", "epochs: 2\neval_every: 0"))
    check(dnictl("compare", path, "--out", "c"), 64, ["chain.yaml:5: eval_every", "set it to 1"])
    assert not (folder / "c").exists()


def test_bench(dnictl: Dnictl, write_chain: WriteChain) -> None:
    write_chain()
    said = ["no module 'botom'", "did you mean 'bottom'?"]
    check(dnictl("bench", "module", "--module", "botom"), 64, said)


def test_bench_checks_the_chain(dnictl: Dnictl, write_chain: WriteChain) -> None:
    path = write_chain(("in_features: 32", "in_features: 48"))
    check(dnictl("bench", "module", path), 78, ["chain.yaml:15: modules[1].layers[0]", "48"])


def test_an_unknown_command_and_option(dnictl: Dnictl) -> None:
    assert dnictl("upp").code == 64
    assert "No such command 'upp'" in dnictl("upp").err
    assert dnictl("up", "--backend", "docker").code == 64
    assert dnictl("status", "nothing").code == 64

"""Each kind of wrong input is one paragraph and an exit code, before anything starts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from dni_runtime.image.apptainer import Apptainer
from dni_runtime.image.lock import ImageLock, LockedBase, LockedImage, write_lock
from dni_runtime.plan.prepare import prepare
from dni_runtime.run.record import Record
from tests.unit.cli.conftest import Dnictl, Result, WriteChain, ended
from tests.unit.plan.test_host import write_images

UP = ("up", "chain.yaml", "--backend", "process")
Change = tuple[str, str]

# What to change in the chain, the command, its exit code, and what the message must say.
WRONG: dict[str, tuple[Change | None, tuple[str, ...], int, list[str]]] = {
    "unknown layer": (
        ("- BatchNorm1d: {num_features: 32}", "- BatchNorm9d: {num_features: 32}"), UP, 78,
        ["chain.yaml:11: modules[0].layers[1]", "unknown layer 'BatchNorm9d'", "did you mean"],
    ),
    "a layer as in Python": (
        ("- ReLU", "- nn.ReLU()"), ("validate",), 78, ["chain.yaml:12", "did you mean 'ReLU'?"],
    ),
    "a layer in other letters": (
        ("- ReLU", "- Relu"), ("validate",), 78, ["chain.yaml:12", "did you mean 'ReLU'?"],
    ),
    "a word for a number": (
        ("epochs: 2", "epochs: two"), UP, 78, ["chain.yaml:4: epochs: 'two' is not a whole number"],
    ),
    "an empty list": (
        ("epochs: 2", "epochs: 2\nlosses: []"), UP, 78,
        ["chain.yaml:5: losses: [] is not a list of at least 1"],
    ),
    "too small": (("epochs: 2", "epochs: 0"), UP, 78, ["chain.yaml:4: epochs: 0 is not at least"]),
    "an endless time": (
        ("epochs: 2", "epochs: 2\nstop_grace_s: 1e999"), UP, 78,
        ["chain.yaml:5: stop_grace_s: inf is not a number"],
    ),
    "a service's name of other letters": (
        None, ("serve", "chain.yaml", "--name", "My_Service"), 64,
        ["name: 'My_Service' is not a name of at most 40 lower-case letters"],
    ),
    "a name of other letters": (
        ("name: small", "name: Small_1"), UP, 78,
        ["'Small_1' is not a name of at most 40 lower-case letters, digits and inner dashes"],
    ),
    "a word for an optimizer's number": (
        ("lr: 0.002", "lr: fast"), UP, 78,
        ["chain.yaml:6: defaults.optimizer.Adam.lr", "Adam needs a number as 'lr', not 'fast'"],
    ),
    "one number for two": (
        ("lr: 0.002", "betas: 0.9"), UP, 78,
        ["Adam.betas: Adam needs 2 numbers as 'betas', as [0.9, 0.999], not 0.9"],
    ),
    "nothing for an optimizer's number": (
        ("lr: 0.002", "lr: null"), UP, 78, ["Adam needs a number as 'lr', not None"],
    ),
    "a word for a schedule's number": (
        ("{Adam: {lr: 0.002}}", "Adam\n  schedule: {CosineAnnealingLR: {T_max: autoo}}"), UP, 78,
        ["CosineAnnealingLR.T_max: CosineAnnealingLR needs a number as 'T_max', not 'autoo'"],
    ),
    "a word among milestones": (
        ("{Adam: {lr: 0.002}}", "Adam\n  schedule: {MultiStepLR: {milestones: [5, x]}}"), UP, 78,
        ["MultiStepLR.milestones", "needs whole numbers as 'milestones', as [5, 8], not [5, 'x']"],
    ),
    "a layer that refuses its size, beside a pair": (
        ("- ReLU", "- Conv2d: {in_channels: 0, out_channels: -1, kernel_size: 1, padding: [1, 1]}"),
        UP, 78, ["Conv2d refuses", "padding"],
    ),
    "a word for a layer's number": (
        ("in_features: 64", "in_features: many"), UP, 78,
        ["chain.yaml:10", "Linear needs a number as 'in_features', not 'many'"],
    ),
    "rows from pictures": (
        ("flatten: true", "flatten: false"), ("validate",), 78,
        ["chain.yaml:10", "it gets float32[B x 1 x 8 x 8]", "'flatten: true' in 'data'"],
    ),
    "misspelt keyword of a layer": (
        ("out_features: 10", "out_feature: 10"), UP, 78,
        ["chain.yaml:15: modules[1].layers[0].Linear", "'out_feature'", "out_features"],
    ),
    "misspelt key": (
        ("epochs: 2", "epoch: 2"), UP, 78,
        ["chain.yaml:4: epoch", "unknown key 'epoch'", "did you mean 'epochs'?"],
    ),
    "a module's key of the whole chain": (
        ("epochs: 2", "epochs: 2\noptimizer: SGD"), UP, 78,
        ["chain.yaml:5: optimizer: unknown key 'optimizer'", "below 'defaults', or in a module"],
    ),
    "misspelt optimizer": (
        ("Adam: {lr", "Adm: {lr"), UP, 78, ["chain.yaml:6: defaults.optimizer", "'Adm'", "Adam"],
    ),
    "misspelt keyword of an optimizer": (
        ("lr: 0.002", "learning_rate: 0.002"), UP, 78,
        ["chain.yaml:6: defaults.optimizer", "learning_rate", "lr"],
    ),
    "shapes that do not fit": (
        ("in_features: 32", "in_features: 48"), UP, 78,
        ["chain.yaml:15: modules[1].layers[0]", "32", "48"],
    ),
    "the same, by validate": (
        ("in_features: 32", "in_features: 48"), ("validate",), 78,
        ["chain.yaml:15: modules[1].layers[0]", "32", "48"],
    ),
    "the same, by an alias": (
        ("in_features: 32", "in_features: 48"), ("check",), 78,
        ["chain.yaml:15: modules[1].layers[0]", "32", "48"],
    ),
    "the same, by bench": (
        ("in_features: 32", "in_features: 48"), ("bench", "module"), 78,
        ["chain.yaml:15: modules[1].layers[0]", "48"],
    ),
    "shapes that do not fit the loss": (
        ("{in_features: 32, out_features: 10}", "{in_features: 32, out_features: 3}"), UP, 78,
        ["chain.yaml", "10", "3"],
    ),
    "unknown data set": (
        ("dataset: digits", "dataset: digit"), UP, 78,
        ["chain.yaml:3: data.dataset", "'digit'", "did you mean 'digits'?"],
    ),
    "missing data folder": (
        ("dataset: digits", "dataset: mnist, path: /no/such/folder"), UP, 66,
        ["chain.yaml:3: data", "/no/such/folder"],
    ),
    "missing data, by validate": (
        ("dataset: digits", "dataset: mnist, path: /no/such/folder"), ("validate",), 66,
        ["/no/such/folder", "checked: the file's keys", "not checked: layers and shapes"],
    ),
    "unknown interface": (
        ("epochs: 2", "epochs: 2\nlinks: {transport: tcp, interface: ib7}"), UP, 69,
        ["chain.yaml:5: links.interface", "'ib7'", "there is:"],
    ),
    "no YAML": (("name: small", "name: [small"), UP, 78, ["chain.yaml", "not valid YAML"]),
    "two modules of one name": (
        ("name: top", "name: bottom"), UP, 78,
        ["chain.yaml", "modules 0 and 1 are both named 'bottom'"],
    ),
    "no file": (
        None, ("up", "nothing.yaml"), 78, ["there is no file 'nothing.yaml'", "dnictl init"],
    ),
    "a folder for a chain file": (
        None, ("validate", "."), 78, ["'.' cannot be read: Is a directory\n  → give the path of"],
    ),
    "a host twice": (None, (*UP, "--hosts", "a,a"), 64, ["'a'"]),
    "a sweep here with options of jobs": (
        None, ("sweep", "seed=1..2", "--qos", "low"), 64, ["--qos is for jobs, which --submit"],
    ),
    "a sweep here that waits": (
        None, ("sweep", "seed=1..2", "--wait"), 64, ["--wait is for jobs"],
    ),
    "a sweep of jobs with options of runs here": (
        None, ("sweep", "seed=1..2", "--submit", "--jobs", "2"), 64, ["--jobs is for runs on this"],
    ),
    "an image for a file that is served": (
        None, ("serve", "chain.yaml", "--images", "i"), 64, ["--images is for modules"],
    ),
    "a backend for a file that is served": (
        None, ("serve", "chain.yaml", "--backend", "process"), 64, ["--backend is for modules"],
    ),
    "a wait for exits that are not served": (
        None, ("serve", "chain.yaml", "--exit-wait", "1"), 64, ["--exit-wait is for modules"],
    ),
    "a removal from a registry": (
        None, ("models", "oci://host/digits", "--remove", "digits:1"), 64, ["on this machine"],
    ),
    "a sweep of nothing": (None, ("sweep", "chain.yaml"), 64, ["no setting is named", "lr=1e-3"]),
    "a sweep of two chains": (None, ("sweep", "chain.yaml", "b.yaml"), 64, ["'b.yaml' is not"]),
    "a sweep of an unknown setting": (
        None, ("sweep", "chain.yaml", "sed=1"), 64, ["no setting 'sed'", "did you mean 'seed'?"],
    ),
    "a sweep with a value that cannot be": (
        None, ("sweep", "lr=1e-3,fast"), 64, ["lr=fast: defaults.optimizer.Adam.lr", "not 'fast'"],
    ),
    "a sweep over a setting twice": (
        None, ("sweep", "lr=1", "Adam.lr=2"), 64, ["defaults.optimizer.Adam.lr", "twice"],
    ),
    "a sweep that is too large": (
        None, ("sweep", "seed=0..999999999999"), 64, ["1000000000000 runs", "at most 1000"],
    ),
    "a name and a directory": (
        None, ("up", "--name", "a", "--run-dir", "b"), 64, ["exclude each other"],
    ),
    "a name that is a path": (None, ("up", "--name", "../a"), 64, ["'../a' is not a run's name"]),
    "a folder that cannot be made": (
        ("epochs: 2", "epoch: 2"), ("up", "--runs", "chain.yaml/runs"), 64,
        ["'chain.yaml/runs' cannot be created", "chain.yaml' is not writable"],
    ),
    "an export to no folder": (
        None, ("export", "-o", "none/m.onnx"), 64, ["cannot be written: 'none' is no"],
    ),
    "predictions to no folder": (
        None, ("predict", "-o", "none/p.npz"), 64, ["cannot be written: 'none' is no"],
    ),
    "a figure in no folder": (
        None, ("predict", "--confusion", "none/c.png"), 64, ["'none' is no folder"],
    ),
    "a chain file in no folder": (
        None, ("split", "nets:build", "-o", "none/c.yaml"), 64, ["'none' is no folder"],
    ),
    "no such module": (
        None, ("run", "tip", "--run-dir", "r"), 64, ["no module 'tip'", "modules: bottom, top"],
    ),
    "no checkpoint": (
        None, ("run", "top", "--run-dir", "r", "--backend", "process", "--resume", "newest"), 64,
        ["--resume 'newest'", "auto, own, none"],
    ),
    "doctor of a chain": (
        None, ("doctor", "chain.yaml"), 64, ["doctor --network", "dnictl validate"],
    ),
    "doctor of an interface": (
        None, ("doctor", "--interface", "ib0"), 64, ["doctor --network"],
    ),
    "doctor of no allocation": (None, ("doctor", "--nodes"), 64, ["salloc --nodes 2"]),
    "doctor of nodes and hosts": (None, ("doctor", "--nodes", "--hosts", "a"), 64, ["exclude"]),
    "doctor of data": (None, ("doctor", "--data", "ib0"), 64, ["doctor --network"]),
    "a chain and an interface": (
        None, ("doctor", "--network", "chain.yaml", "--interface", "ib0"), 64,
        ["--interface", "links.interface"],
    ),
    "comparison of unknown interfaces": (
        None, ("compare", "--interfaces", "exact,sinthetic", "--out", "c"), 64,
        ["unknown gradient interface 'sinthetic'", "did you mean 'synthetic'?"],
    ),
    "comparison without evaluations": (
        ("epochs: 2", "epochs: 2\neval_every: 0"), ("compare", "--out", "c"), 64,
        ["chain.yaml:5: eval_every", "set it to 1"],
    ),
    "measurement of no module": (
        None, ("bench", "module", "--module", "botom"), 64,
        ["no module 'botom'", "did you mean 'bottom'?"],
    ),
    "better cuts for two files": (
        None, ("balance", "chain.yaml", "--apply", "-o", "x"), 64, ["exclude each other"],
    ),
    "a network without data": (None, ("split", "nets:build"), 64, ["no data", "--data mnist"]),
}  # fmt: skip


def check(result: Result, code: int, parts: Sequence[str]) -> None:
    assert result.code == code, result.err
    assert result.out == ""
    assert result.err.startswith("dnictl: error: ")
    assert "Traceback" not in result.err
    assert len(result.err.splitlines()) <= 4, result.err
    for part in parts:
        assert part in result.err


@pytest.mark.parametrize("name", WRONG)
def test_wrong_chain_or_command(
    name: str, dnictl: Dnictl, write_chain: WriteChain, folder: Path
) -> None:
    change, command, code, parts = WRONG[name]
    write_chain(*([change] if change else []))
    check(dnictl(*command), code, parts)
    assert [path.name for path in folder.iterdir()] == ["chain.yaml"]


def test_a_comparison_of_data_of_several_owners(
    dnictl: Dnictl, write_chain: WriteChain, folder: Path
) -> None:
    x, y = np.zeros((128, 64), np.float32), np.zeros(128, np.int64)
    for owner in (1, 2):
        np.savez(folder / f"own-{owner}.npz", x_train=x, y_train=y, x_eval=x, y_eval=y)
    write_chain(
        ("dataset: digits", "dataset: npz, path: 'own-{replica}.npz'"),
        ("epochs: 2", "epochs: 2\neval_every: 0"),
        ("name: bottom", "name: bottom\n    replicas: 2"),
    )
    told = dnictl("compare", "--out", "c")
    assert told.code == 64
    assert told.err.startswith("warning: what trains without replicas")


# How the run is, the command, its exit code, and what the message must say.
WRONG_OF_A_RUN: list[tuple[str, tuple[str, ...], int, list[str]]] = [
    ("new", ("wait",), 64, ["its workers are started by hand"]),
    ("new", ("export", "-o", "m.pt2"), 74, ["no complete checkpoint"]),
    ("new", ("export", "-o", "m.pt"), 64, ["'m.pt'", ".safetensors, .pt2", "--state-dict is for"]),
    ("new", ("export", "-o", "m.onnx", "--state-dict"), 64, ["'m.onnx'", ".safetensors, .pt"]),
    ("new", ("export", "-o", "chain.yaml"), 64, ["already exists", "--force"]),
    ("new", ("status", "nothing"), 64, ["'nothing'"]),
    ("new", ("release", "--version", "1", "--key", "chain.yaml", "--unsigned"), 64, ["exclude"]),
    ("finished", ("restart", "top"), 64, ["'small-1' is finished", "dnictl status small-1"]),
    ("stopped", ("restart", "top"), 64, ["'small-1' is stopped", "dnictl resume small-1"]),
    ("running", ("restart", "top"), 64, ["module 'top' has finished"]),
    ("running", ("restart", "tip"), 64, ["no module 'tip'"]),
    ("finished", ("resume",), 64, ["its checkpoints are gone: start a new run"]),
    ("running", ("resume",), 64, ["dnictl stop"]),
    ("stopped", ("resume", "--from", "12"), 64, ["no complete checkpoint '12'"]),
    ("stopped", ("resume", "--from", "\N{SUPERSCRIPT TWO}"), 64, ["no complete checkpoint"]),
    ("finished", ("logs", "small-1", "tip"), 64, ["no module 'tip'"]),
    ("new", ("scale", "top=2"), 64, ["the number of replicas of module 'top' is fixed"]),
    ("new", ("scale", "other=2"), 64, ["no module 'other'"]),
    ("new", ("scale", "top=two"), 64, ["'top=two' is not MODULE=N"]),
    ("new", ("scale", "=2"), 64, ["'=2' is not MODULE=N"]),
    ("new", ("scale", "small-1"), 64, ["'small-1': give MODULE=N or 'auto', and at most one run"]),
    ("new", ("scale", "top=2", "small-1", "s"), 64, ["'top=2 small-1 s': give MODULE=N"]),
    ("new", ("scale", "auto", "top=2"), 64, ["'auto top=2': give MODULE=N or 'auto'"]),
    ("new", ("scale", "auto"), 64, ["has no module whose number of replicas can change"]),
]


@pytest.mark.parametrize(("phase", "command", "code", "parts"), WRONG_OF_A_RUN)
def test_wrong_command_of_a_run(
    phase: str,
    command: tuple[str, ...],
    code: int,
    parts: list[str],
    dnictl: Dnictl,
    record: Record,
) -> None:
    if phase != "new":
        state = ended(record, phase, {"finished": 0, "running": 0, "stopped": 75}[phase])
        state.modules["top"].state = "finished"
        state.save(record.run)
    before = written(record)
    check(dnictl(*command), code, parts)
    assert written(record) == before


def written(record: Record) -> dict[Path, int]:
    """Return when each file of a run was written."""
    return {path: path.stat().st_mtime_ns for path in record.run.root.rglob("*")}


@pytest.mark.parametrize("command", [
    ("status",), ("logs",), ("stop",), ("wait",), ("resume",), ("restart", "top"), ("events",),
    ("export", "-o", "x.pt2"), ("tensorboard",), ("scale", "auto"), ("balance",),
])  # fmt: skip
def test_there_are_no_runs(command: tuple[str, ...], dnictl: Dnictl) -> None:
    check(dnictl(*command), 64, ["there are no runs in 'runs'"])


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


def a_container_program(monkeypatch: pytest.MonkeyPatch) -> None:
    tool = Apptainer(Path("/nowhere/apptainer"), "apptainer", (1, 4, 5))
    monkeypatch.setattr("dni_runtime.image.apptainer.find_apptainer", lambda: tool)
    monkeypatch.setattr("os.geteuid", lambda: 1000)


def test_an_image_of_another_spec(
    dnictl: Dnictl, write_chain: WriteChain, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    a_container_program(monkeypatch)
    images = folder / "images"
    images.mkdir()
    locked = {}
    for name in ("bottom", "top"):
        (images / f"{name}.sif").write_bytes(b"sif")
        locked[name] = LockedImage(
            image=f"{name}.sif", sha256="0" * 64, size_bytes=3, content="1" * 64,
            module_hash="2" * 64, sources={}, method="layer",
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


def test_images_of_code_that_was_edited_since(
    dnictl: Dnictl, write_chain: WriteChain, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trial would try the new code, and the workers would train the old."""
    a_container_program(monkeypatch)
    code = folder / "nets.py"
    code.write_text("import torch\n\nclass Net(torch.nn.ReLU):\n    pass\n")
    chain = write_chain(("- ReLU", '- import: "nets:Net"'))
    checked = prepare(chain)
    write_images(folder / "images", checked.workers, sources=checked.sources)
    command = ("up", chain, "--backend", "apptainer", "--dry-run")
    assert dnictl(*command).code == 0
    code.write_text(code.read_text().replace("ReLU", "Tanh"))
    check(dnictl(*command), 65, ["bottom.sif was built from another 'nets.py'", "dnictl build"])


def test_an_unknown_command_and_option(dnictl: Dnictl) -> None:
    assert dnictl("frobnicate").code == 64
    assert "No such command 'frobnicate'.\n" in dnictl("frobnicate").err
    assert dnictl("up", "--backend", "docker").code == 64

"""Releases: made from a run and its images, sent to a real registry, pulled, and served."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pytest
import tritonclient.http as triton
import yaml

import dni_runtime
from dni_runtime.errors import DniError, ImageError, UnavailableError, UsageError
from dni_runtime.image.apptainer import Apptainer
from dni_runtime.image.oci import MANIFEST, Descriptor, Layout
from dni_runtime.release import make, move, registry
from dni_runtime.release.make import release_run
from dni_runtime.release.names import BASE, REPORT, WEIGHTS, Address
from dni_runtime.release.registry import Repository
from dni_runtime.release.signature import sign_release
from dni_runtime.release.store import Store
from dni_runtime.run.record import Record
from tests.e2e.conftest import Dnictl, eventually, need, run

pytestmark = [pytest.mark.apptainer, pytest.mark.e2e, pytest.mark.timeout(900)]

MODULES = ["bottom", "middle", "top"]
CHAIN = f"""\
name: digits
data: {{dataset: digits, batch_size: 64, flatten: true}}
epochs: 10
checkpoint: {{keep: 10}}
defaults: {{optimizer: {{Adam: {{lr: 0.002}}}}}}
image: {{torch: "torch=={version("torch").split("+")[0]}"}}
modules:
  - name: bottom
    layers: [{{import: "mine:Block", args: {{inputs: 64, outputs: 64}}}}]
  - name: middle
    layers: [{{import: "mine:Block", args: {{inputs: 64, outputs: 64}}}}]
  - name: top
    layers: [{{Linear: {{in_features: 64, out_features: 10}}}}]
"""
BLOCK = """\
from torch import nn

class Block(nn.Sequential):
    def __init__(self, inputs, outputs):
        super().__init__(nn.Linear(inputs, outputs), nn.BatchNorm1d(outputs), nn.ReLU())
"""


class Site(Dnictl):
    """A folder with a trained run, its images and a pair of keys; a home for releases."""

    def at(self, name: str) -> Site:
        """The same as another user, with a store of their own."""
        data = self.folder / name
        data.mkdir(exist_ok=True)
        return Site(self.folder, {"XDG_DATA_HOME": str(data)})

    @property
    def store(self) -> Store:
        return Store(Path(self.environ["XDG_DATA_HOME"]) / "dnictl" / "releases")

    def release(self, version: str, *options: str) -> Descriptor:
        """Make a release of the run, unless it is there."""
        name = f"digits:{version}"
        if name not in self.store.releases():
            key = [] if "--unsigned" in options else ["--key", "private.pem"]
            self.run("release", "trained", "--version", version, *key, *options)
        return self.store.find(name)


@pytest.fixture(scope="module")
def trained(tool: Apptainer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("release")
    (folder / "chain.yaml").write_text(CHAIN)
    (folder / "mine.py").write_text(BLOCK)
    site = Site(folder).at("author")
    site.run("up", "--backend", "process", "--name", "trained")
    site.run("build")
    for argv in (
        ["openssl", "genpkey", "-algorithm", "ed25519", "-out", "private.pem"],
        ["openssl", "pkey", "-in", "private.pem", "-pubout", "-out", "public.pem"],
    ):
        subprocess.run(argv, cwd=folder, check=True, capture_output=True)
    yield site
    shutil.rmtree(folder)


class Registry:
    """A registry of Debian's on this host."""

    def __init__(self, root: Path, **http: object) -> None:
        self.root = root
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.host = f"127.0.0.1:{free.getsockname()[1]}"
        self.settings = {
            "version": 0.1,
            "storage": {"filesystem": {"rootdirectory": str(root / "data")}},
            "http": {"addr": self.host, **http},
            "log": {"level": "error"},
        }

    @contextmanager
    def serving(self, **further: object) -> Iterator[Registry]:
        """Run it."""
        self.root.mkdir(exist_ok=True)
        config = self.root / "config.yml"
        config.write_text(yaml.safe_dump(self.settings | further))
        with (self.root / "log").open("w") as log:
            process = subprocess.Popen(
                [need("docker-registry"), "serve", config], stdout=log, stderr=log
            )
        try:
            eventually("the registry listens", self._listens)
            yield self
        finally:
            process.terminate()
            process.wait()

    def _listens(self) -> bool:
        host, port = self.host.split(":")
        with socket.socket() as tried:
            return tried.connect_ex((host, int(port))) == 0

    def address(self, tag: str | None = "1.0", digest: str | None = None) -> Address:
        return Address(self.host, "models/digits", tag, digest)

    def blob(self, blob: Descriptor) -> Path:
        sha256 = blob.digest.removeprefix("sha256:")
        return self.root / "data/docker/registry/v2/blobs/sha256" / sha256[:2] / sha256 / "data"

    def bytes(self) -> int:
        return sum(path.stat().st_size for path in self.root.rglob("data") if path.is_file())


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Registry]:
    with Registry(tmp_path_factory.mktemp("registry")).serving() as served:
        yield served


def silent(blob: Descriptor, count: int) -> None:
    pass


def test_another_user_pulls_a_release_and_serves_it_in_containers(
    trained: Site, hub: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = trained.release("1.0", "--licence", "BSD-3-Clause")
    address = f"oci://{hub.host}/models/digits"
    sent = trained.json("push", "digits:1.0", address)
    assert sent["address"] == f"{address}:1.0@{index.digest}"
    assert trained.json("push", "digits:1.0", address)["sent_bytes"] == 0
    blobs = trained.store.layout.blobs(index)
    assert sum(blob.size for blob in blobs) - 50_000 < sent["sent_bytes"] < hub.bytes()
    user = trained.at("user")
    assert user.json("models", address) == {"versions": ["1.0"]}
    pulled = user.json("pull", f"{address}:1.0", "--key", "public.pem")
    assert pulled["digest"] == index.digest
    assert pulled["licence"] == "BSD-3-Clause"
    assert 0.5 < pulled["figures"]["accuracy"] < 1
    predicted = trained.json("predict", "trained")
    assert 0.5 < predicted["evaluation"]["accuracy"] <= 1
    same = user.json("predict", "digits:1.0")
    assert same == predicted | {"run": "digits-1.0"}

    trained.run("export", "trained", "-o", "model.safetensors")
    monkeypatch.syspath_prepend(str(trained.folder))
    model = dni_runtime.load(trained.folder / "model.safetensors", trust=True)
    x = np.random.default_rng(0).random((5, 64), dtype=np.float32)
    import torch

    with torch.no_grad():
        expected = model(torch.from_numpy(x)).numpy()
    served = ["serve", "--name", "answers"]
    try:
        state = user.json(*served, "digits:1.0", "--backend", "apptainer", "-d", "--port", "0")
        plan = json.loads((trained.folder / "runs/answers/1/plan.json").read_text())
        images = user.store.folder("digits:1.0") / "images"
        assert {Path(worker["image"]).parent for worker in plan["workers"]} == {images}
        client = triton.InferenceServerClient(state["url"].removeprefix("http://"))
        for binary in (True, False):
            rows = triton.InferInput("input", [*x.shape], "FP32")
            rows.set_data_from_numpy(x, binary_data=binary)
            answer = client.infer("answers", [rows]).as_numpy("output")
            np.testing.assert_allclose(answer, expected, atol=1e-5)
        refused = user.run("models", "--remove", "digits:1.0", expect=64)
        assert "digits:1.0 is in use by" in refused.stderr
        assert "answers/1" in refused.stderr
    finally:
        user.run(*served, "--stop")

    # Each image holds the module, and as which it answers, with its weights.
    shown = run(["apptainer", "exec", images / "top.sif", "cat", "/opt/dni/serving/module.json"])
    assert json.loads(shown.stdout)["module"] == "top"
    assert shown.returncode == 0
    file = "/opt/dni/serving/weights.safetensors"
    seen = run(["apptainer", "exec", images / "top.sif", "sha256sum", file])
    weights = [
        layer.digest
        for manifest in user.store.layout.manifests(index)[1]
        for layer in manifest.layers
        if layer.media_type == WEIGHTS
    ]
    assert f"sha256:{seen.stdout.split()[0]}" in weights
    # Another chain trains in these images.
    assert (
        user.json("up", "--images", "digits:1.0", "--name", "again", "--backend", "apptainer")[
            "state"
        ]
        == "finished"
    )


def test_the_same_run_makes_the_same_release(trained: Site, tmp_path: Path) -> None:
    """By another user, at another time, under other paths."""
    index = trained.release("2.0", "--unsigned")
    copy = tmp_path / "elsewhere"
    shutil.copytree(trained.folder / "runs/trained", copy / "runs/trained")
    shutil.copytree(trained.folder / "images", copy / "images")
    for path in copy.rglob("*"):
        os.utime(path, (1, 1))
    other = Site(copy).at("other")
    assert other.release("2.0", "--unsigned").digest == index.digest
    text = b"".join(
        other.store.layout.read(blob)
        for blob in other.store.layout.blobs(index)
        if blob.media_type not in (BASE, WEIGHTS)
    )
    for private in (str(trained.folder), str(Path.home())):
        assert private.encode() not in text, f"the release tells {private!r}"


def test_versions_share_layers(trained: Site, hub: Registry, tool: Apptainer) -> None:
    """Later versions bring what is their own; ten of them: ``test_versions.py``."""
    store = trained.store
    trained.release("1.0")
    trained.run("push", "digits:1.0", f"oci://{hub.host}/models/digits")
    cuts = sorted(
        int(path.name) for path in (trained.folder / "runs/trained/checkpoints").iterdir()
    )
    grown = []
    for number, cut in enumerate(cuts[-3:-1]):
        before = hub.bytes()
        name, record = f"digits:3.{number}", Record.read(trained.folder / "runs/trained")
        images = trained.folder / "images"
        index = release_run(store, record, cut, name, tool=tool, images=images)
        store.add(index)
        repository = Repository(hub.address())
        move.push(store, name, hub.address(None), repository, silent)
        grown.append(hub.bytes() - before)
    base, *_ = (blob for blob in store.layout.blobs(index) if blob.media_type == BASE)
    weights = sum(blob.size for blob in store.layout.blobs(index) if blob.media_type == WEIGHTS)
    assert len(grown) == 2
    assert all(weights < growth < weights + 100_000 < base.size / 100 for growth in grown)

    changed = {row["what"] for row in trained.json("diff", "digits:3.0", "digits:3.1")}
    assert {"checkpoint", "figures.loss", "image of top: weight"} <= changed
    assert not {what for what in changed if what.endswith((": base", ": layer"))}
    freed = store.remove("digits:3.0")
    assert weights < freed < weights + 100_000
    trained.run("predict", "digits:3.1")


def test_a_release_does_not_change(
    trained: Site, hub: Registry, tool: Apptainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained.release("1.0")
    trained.run("push", "digits:1.0", f"oci://{hub.host}/models/digits")
    first, *_ = sorted((trained.folder / "runs/trained/checkpoints").iterdir())
    other = ["release", "trained", "--version", "1.0", "--from", str(int(first.name)), "--unsigned"]
    failed = trained.run(*other, expect=64)
    assert "there is another release digits:1.0" in failed.stderr
    user = trained.at("second author")
    user.run(*other)
    failed = user.run("push", "digits:1.0", f"oci://{hub.host}/models/digits", expect=64)
    assert f"{hub.host} has another models/digits:1.0" in failed.stderr
    # That is known before anything is made, or fetched.
    with monkeypatch.context() as patched:
        patched.setattr(make, "_stage", None)
        record, images = Record.read(trained.folder / "runs/trained"), trained.folder / "images"
        cut, name = int(first.name), "digits:1.0"
        with pytest.raises(UsageError, match=r"another release digits:1\.0"):
            release_run(trained.store, record, cut, name, tool=tool, images=images)
        patched.setattr(Repository, "fetch", None)
        repository = Repository(hub.address())
        with pytest.raises(UsageError, match=r"another release digits:1\.0"):
            move.pull(user.store, hub.address(), repository, move.Trust(), silent)


def test_a_damaged_base_is_put_into_no_image(trained: Site) -> None:
    index = trained.release("8.0", "--unsigned")
    layout = trained.store.layout
    base = next(blob for blob in layout.blobs(index) if blob.media_type == BASE)
    copied = layout.path(base.digest).with_name(".copy")
    layout.path(base.digest).rename(copied)
    try:
        layout.path(base.digest).write_bytes(b"-" + copied.read_bytes()[1:])
        push = ["push", "digits:8.0", "oci://127.0.0.1:9/a", "--sif"]
        failed = trained.run(*push, expect=65)
        assert "is damaged: its SHA-256 is another" in failed.stderr
    finally:
        layout.path(base.digest).unlink()
        copied.rename(layout.path(base.digest))


@pytest.fixture
def pushed(trained: Site, hub: Registry) -> tuple[Registry, Descriptor]:
    index = trained.release("1.0")
    trained.run("push", "digits:1.0", f"oci://{hub.host}/models/digits")
    return hub, index


@pytest.mark.parametrize(
    "what", ["base", "weights", "report", "manifest", "index", "signature", "no signature"]
)
def test_what_was_changed_in_the_registry_is_refused(
    trained: Site, pushed: tuple[Registry, Descriptor], what: str, tool: Apptainer, tmp_path: Path
) -> None:
    """Before anything of it is unpacked."""
    hub, index = pushed
    layout = trained.store.layout
    blobs = {blob.media_type: blob for blob in layout.blobs(index)}
    signature = layout.names()[f"{index.digest.replace(':', '-')}.sig"]
    chosen = {
        "base": blobs[BASE],
        "weights": blobs[WEIGHTS],
        "report": blobs[REPORT],
        "manifest": blobs[MANIFEST],
        "index": index,
        "signature": layout.blobs(signature)[0],
        "no signature": signature,
    }[what]  # fmt: skip
    file = hub.blob(chosen)
    content = bytearray(file.read_bytes())
    place = content.find(b"e", len(content) // 2)
    content[place] ^= 1
    file.chmod(0o644)
    user = Store(tmp_path / "store")
    trust = move.Trust(tool, trained.folder / "public.pem")
    before = file.read_bytes()
    try:
        if what == "no signature":
            file.unlink()
        else:
            file.write_bytes(content)
        with pytest.raises(DniError) as caught:
            move.pull(user, hub.address(), Repository(hub.address()), trust, silent)
    finally:
        file.write_bytes(before)
    assert isinstance(caught.value, ImageError | UnavailableError | UsageError)
    assert not user.releases()
    assert not (user.root / "digits").exists()


def test_only_signers_that_one_knows_are_believed(
    trained: Site, pushed: tuple[Registry, Descriptor], tool: Apptainer, tmp_path: Path
) -> None:
    hub, index = pushed
    other = trained.folder / "other.pem"
    made = run(["openssl", "genpkey", "-algorithm", "ed25519", "-out", tmp_path / "k.pem"])
    assert made.returncode == 0
    assert (
        run(["openssl", "pkey", "-in", tmp_path / "k.pem", "-pubout", "-out", other]).returncode
        == 0
    )
    user = Store(tmp_path / "store")
    with pytest.raises(ImageError, match="cannot be confirmed"):
        move.pull(user, hub.address(), Repository(hub.address()), move.Trust(tool, other), silent)
    # The signature of one release is not that of another one.
    second = trained.release("5.0", "--unsigned")
    names = trained.store.layout.names()
    theirs = names[f"{index.digest.replace(':', '-')}.sig"]
    trained.store.layout.name({f"{second.digest.replace(':', '-')}.sig": theirs})
    trained.run("push", "digits:5.0", f"oci://{hub.host}/models/digits")
    trust = move.Trust(tool, trained.folder / "public.pem")
    with pytest.raises(ImageError, match="is of something else"):
        move.pull(user, hub.address("5.0"), Repository(hub.address()), trust, silent)
    assert not user.releases()
    # Who names a digest has said what it must be.
    pinned = hub.address(None, second.digest)
    assert move.pull(user, pinned, Repository(pinned), move.Trust(), silent) == "digits:5.0"
    third = trained.at("third")
    refused = third.run("pull", str(pinned), "--key", str(other), expect=ImageError.exit_code)
    assert "is of something else" in refused.stderr
    # A version's tag leads to that version, whoever has signed another one.
    trained.run("push", "digits:5.0", f"oci://{hub.host}/models/digits:9.9")
    with pytest.raises(ImageError, match=r"is digits:5\.0, another version"):
        move.pull(user, hub.address("9.9"), Repository(hub.address()), move.Trust(), silent)


def test_a_signature_in_a_registry_stays(
    trained: Site, pushed: tuple[Registry, Descriptor], tool: Apptainer, tmp_path: Path
) -> None:
    hub, index = pushed
    made = run(["openssl", "genpkey", "-algorithm", "ed25519", "-out", tmp_path / "k.pem"])
    assert made.returncode == 0
    name = f"{index.digest.replace(':', '-')}.sig"
    first = Repository(hub.address()).fetch_document(Layout(tmp_path / "oci").create(), name)
    store = trained.store
    ours = store.layout.names()[name]
    sign_release(tool, store.layout, index, tmp_path / "k.pem")
    try:
        text = next(text for text, blob in store.releases().items() if blob.digest == index.digest)
        sent = trained.run("push", text, f"oci://{hub.host}/models/digits")
    finally:
        store.layout.name({name: ours})
    assert "has a signature" in sent.stderr
    again = Repository(hub.address()).fetch_document(Layout(tmp_path / "oci").create(), name)
    assert first == again


def test_what_was_cut_off_goes_on(
    trained: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A push and a pull that end after some chunks of the base: the next ones move the rest."""
    trained.release("6.0")
    monkeypatch.setattr(registry, "_CHUNK_BYTES", 1 << 22)
    base = next(
        blob
        for blob in trained.store.layout.blobs(trained.store.find("digits:6.0"))
        if blob.media_type == BASE
    )

    class Moved:
        def __init__(self, most: float = float("inf")) -> None:
            self.base, self.most = 0, most

        def __call__(self, blob: Descriptor, count: int) -> None:
            if blob.digest == base.digest:
                self.base += count
                if self.base > self.most:
                    raise KeyboardInterrupt

    hub = Registry(tmp_path / "registry")
    user, trust = Store(tmp_path / "store"), move.Trust()
    with hub.serving():
        for moving in ("push", "pull"):
            first, second = Moved(base.size / 2), Moved()
            for moved in (first, second):
                repository = Repository(hub.address())
                try:
                    if moving == "push":
                        store = trained.store
                        move.push(store, "digits:6.0", hub.address("6.0"), repository, moved)
                    else:
                        move.pull(user, hub.address("6.0"), repository, trust, moved)
                except KeyboardInterrupt:
                    assert moved is first
            assert base.size / 2 < first.base < base.size
            done = first.base if moving == "pull" else 0  # a push tells also of what is there
            assert base.size <= second.base + done < base.size + (1 << 22)
    assert user.releases().keys() == {"digits:6.0"}
    assert not [*user.layout.root.glob("*.part"), *trained.store.layout.root.glob("*.upload")]


def test_a_registry_with_passwords_and_a_private_authority(
    trained: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Credentials are read from Apptainer's own file; the authority is the one of SSL_CERT_FILE."""
    trained.release("1.0")
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    made = run([
        "openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes",
        "-days", "2", "-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1",
        "-keyout", key, "-out", certificate,
    ])  # fmt: skip
    assert made.returncode == 0, made.stderr
    # htpasswd -nbBC 4 dni secret
    passwords = tmp_path / "htpasswd"
    passwords.write_text("dni:$2y$04$97waE.5fkB65YqdluK8wruG6TSOHh34gEQxIk1jQVB661Eytpyqr2\n")
    hub = Registry(tmp_path / "registry", tls={"certificate": str(certificate), "key": str(key)})
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("PIP_CERT", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"):
        monkeypatch.delenv(name, raising=False)
    with hub.serving(auth={"htpasswd": {"realm": "models", "path": str(passwords)}}):
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        with pytest.raises(UsageError, match="does not let you read") as caught:
            Repository(hub.address()).tags()
        assert caught.value.hint is not None
        assert f"apptainer registry login docker://{hub.host}" in caught.value.hint
        login = run(
            ["apptainer", "registry", "login", "-u", "dni", "-p", "secret", f"docker://{hub.host}"]
        )
        assert login.returncode == 0, login.stderr
        address = move.push(
            trained.store, "digits:1.0", hub.address(), Repository(hub.address()), silent
        )
        assert "1.0" in Repository(address).tags()
        monkeypatch.delenv("SSL_CERT_FILE")
        with pytest.raises(UnavailableError, match=r"certificate .* is not trusted"):
            Repository(hub.address()).tags()


def test_it_goes_to_those_who_have_other_tools(trained: Site, hub: Registry) -> None:
    """An image as one file for Apptainer, a folder as Hugging Face's Hub has it."""
    trained.release("1.0")
    address = f"oci://{hub.host}/files"
    images = trained.run("push", "digits:1.0", address, "--sif", "--plain-http").stdout.split()
    assert images == [f"oras://{hub.host}/files/{module}:1.0" for module in MODULES]
    file = trained.folder / "pulled.sif"
    pulled = run(["apptainer", "pull", "--no-https", "--disable-cache", file, images[-1]])
    assert pulled.returncode == 0, pulled.stderr
    assert file.read_bytes() == (trained.store.folder("digits:1.0") / "images/top.sif").read_bytes()

    plain = trained.run("push", "digits:1.0", address, "--oci", "--plain-http").stdout.split()
    names = [option.removeprefix("--image=").partition("=") for option in plain]
    assert [module for module, *_ in names] == MODULES
    skopeo = [need("skopeo"), "--insecure-policy", "copy", "--src-tls-verify=false"]
    copied = trained.folder / "copied"
    assert run([*skopeo, f"docker://{names[-1][2]}", f"dir:{copied}"]).returncode == 0
    config = json.loads((copied / "manifest.json").read_text())["config"]["digest"].split(":")[1]
    assert len(json.loads((copied / config).read_text())["rootfs"]["diff_ids"]) == 3

    folder = trained.folder / "hub"
    trained.run("export", "digits:1.0", "--folder", "-o", folder)
    assert {path.name for path in folder.iterdir()} == {
        "model.safetensors", "config.json", "README.md",
    }  # fmt: skip
    assert (folder / "README.md").read_text().startswith("---\nlibrary_name: dni-runtime\n")
    config = json.loads((folder / "config.json").read_text())
    assert [module["name"] for module in config["modules"]] == MODULES
    again = trained.run("export", "digits:1.0", "--folder", "-o", folder, expect=64)
    assert "exists already" in again.stderr


def test_a_release_is_a_run_that_does_not_train(trained: Site) -> None:
    trained.release("1.0")
    for command in (
        ("resume", "digits:1.0"),
        ("rm", "digits:1.0", "--yes"),
        ("up", "--carry", "digits:1.0", "--set", "epochs=20"),
    ):
        failed = trained.run(*command, expect=64)
        assert "digits:1.0 is a release: it does not change" in failed.stderr
    # Another run begins with its weights, and names it when it is released.
    text = (trained.folder / "chain.yaml").read_text()
    (trained.folder / "next.yaml").write_text(
        text.replace("defaults: {", "defaults: {init: {file: 'digits:1.0'}, ")
    )
    trained.run("up", "next.yaml", "--backend", "process", "--name", "next", "--set", "epochs=1")
    trained.run("build", "next.yaml", "--out", "next")
    trained.run("release", "next", "--version", "7.0", "--unsigned", "--images", "next")
    assert trained.store.report(trained.store.find("digits:7.0")).parent == "digits:1.0"


def test_mistakes_are_named(trained: Site, hub: Registry) -> None:
    def failure(*words: str) -> str:
        return trained.run(*words, expect=64).stderr

    assert "'Digits:1' is not the name of a release" in failure("push", "Digits:1", "oci://a/b")
    assert "'http://a/b' is not the address of a release" in failure("pull", "http://a/b")
    assert "there is no release 'digits:9'" in failure("push", "digits:9", "oci://a/b")
    assert "there is no release 'digits:9' here" in failure("predict", "digits:9")
    assert f"{hub.host} has no models/none:1" in failure("pull", f"oci://{hub.host}/models/none:1")
    missing = failure("release", "trained", "--version", "1", "--images", "nowhere")
    assert "there are no images in" in missing
    with pytest.raises(urllib.error.HTTPError):
        urllib.request.urlopen(f"http://{hub.host}/v2/models/none/tags/list")

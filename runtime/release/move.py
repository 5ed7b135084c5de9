"""Releases between the store and a registry."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from pathlib import Path

from dni_runtime.errors import ImageError, UsageError
from dni_runtime.image.apptainer import Apptainer
from dni_runtime.image.lock import read_lock
from dni_runtime.image.oci import (
    INDEX,
    MANIFEST,
    MOST_DOCUMENT_BYTES,
    Descriptor,
    Index,
    Layout,
    Manifest,
)
from dni_runtime.image.tarform import write_oci
from dni_runtime.release.images import assembled
from dni_runtime.release.names import TITLE, Address, parse_local
from dni_runtime.release.registry import Progress, Repository
from dni_runtime.release.signature import signature_name, verify_release
from dni_runtime.release.store import Store
from dni_runtime.run.record import Record

_log = logging.getLogger(__name__)

_SIF = "application/vnd.sylabs.sif.layer.v1.sif"  # what `apptainer push` writes
_SIF_CONFIG = "application/vnd.sylabs.sif.config.v1+json"


@dataclass(frozen=True)
class Trust:
    """Whom to believe that a release is what it says."""

    tool: Apptainer | None = None  # None: nobody is asked, unsigned releases are taken
    key: Path | None = None  # a public one in PEM form; None: the user's PGP keyring


def push(
    store: Store, text: str, address: Address, repository: Repository, progress: Progress
) -> Address:
    """Send a release, with its signature if it has one; return its address, with the digest."""
    layout, index, tag = store.layout, store.find(text), _tag(text, address)
    signature = layout.names().get(signature_name(index))
    _check_tag(layout, repository, tag, index)
    if signature is not None:  # before the release can be found
        there = repository.fetch_document(layout, signature_name(index))
        if there is None:
            _send(layout, repository, signature_name(index), signature, progress)
        elif there.digest != signature.digest:  # others may know its signer only
            _log.warning("%s has a signature of %s already, which stays", address.host, text)
    _send(layout, repository, tag, index, progress)
    return replace(address, tag=tag, digest=index.digest)


def _tag(text: str, address: Address) -> str:
    """Return the tag under which a release or its images are sent."""
    version = parse_local(text)[1]
    if address.digest is not None:
        raise UsageError("a push has no digest", hint=f"oci://HOST/NAME:{version}")
    return address.tag or version


def _send(
    layout: Layout, repository: Repository, tag: str, root: Descriptor, progress: Progress
) -> None:
    """Send an index or a manifest with all that it needs, and name it."""
    for blob in layout.blobs(root):
        if blob.media_type == MANIFEST:
            repository.send_document(layout, blob, blob.digest)
        else:
            repository.send(layout, blob, progress)
    repository.send_document(layout, root, tag)


def _check_tag(layout: Layout, repository: Repository, tag: str, ours: Descriptor) -> None:
    """Refuse to replace what a registry has under the same name."""
    there, address = repository.fetch_document(layout, tag), repository.address
    if there is not None and there.digest != ours.digest:
        raise UsageError(
            f"{address.host} has another {address.repository}:{tag} ({there.digest[:19]}…)",
            hint="a release does not change: push it as another version",
        )


def push_files(
    tool: Apptainer, store: Store, text: str, address: Address, plain_http: bool, progress: Progress
) -> dict[str, Address]:
    """Send each module's image as one file, as ``apptainer push`` does; return their addresses."""
    tag = _tag(text, address)
    layout, images, sent = store.layout, assembled(tool, store, text), {}
    lock = read_lock(images)
    assert lock is not None
    for module, entry in lock.modules.items():
        blob = Descriptor(
            media_type=_SIF, digest=f"sha256:{entry.sha256}", size=entry.size_bytes,
            annotations={TITLE: entry.image},
        )  # fmt: skip
        config = layout.add(b"{}", _SIF_CONFIG)
        manifest = layout.add(Manifest(config=config, layers=(blob,)).encode(), MANIFEST)
        target = replace(address.beside(module), tag=tag)
        repository = Repository(target, plain_http=plain_http)
        _check_tag(layout, repository, tag, manifest)
        repository.send(layout, blob, progress, file=images / entry.image)
        repository.send(layout, config)
        repository.send_document(layout, manifest, tag)
        sent[module] = target
    return sent


def push_oci(
    tool: Apptainer, store: Store, text: str, address: Address, plain_http: bool, progress: Progress
) -> dict[str, Address]:
    """Send the modules' images as plain OCI images; return their addresses, with digests.

    All are in one repository, to which the base is sent once.
    """
    version = _tag(text, address)
    images, sent = assembled(tool, store, text), {}
    modules = {path.stem: path for path in sorted(images.glob("*.sif"))}
    chain, _ = Record.read(store.folder(text)).specs()
    target = replace(address.beside("images"), tag=None)
    repository = Repository(target, plain_http=plain_http)
    with store.scratch() as scratch:
        layout, environment = Layout(scratch), chain.image_to_build.environment
        for module, manifest in write_oci(tool, modules, layout, environment).items():
            tag = f"{version}-{module}"
            _check_tag(layout, repository, tag, manifest)
            _send(layout, repository, tag, manifest, progress)
            sent[module] = replace(target, digest=manifest.digest)
    return sent


def pull(
    store: Store, address: Address, repository: Repository, trust: Trust, progress: Progress
) -> str:
    """Fetch a release, check it, and unpack it; return its name here.

    What it may do is decided before it is fetched: its digest is the one that the address names, or
    its signature is good. Everything else is checked by digests from there.
    """
    if address.reference is None:
        raise UsageError(f"{address} names no version", hint=f"see 'dnictl models {address}'")
    layout = store.layout
    index = fetch_index(store, address, repository)
    name, _ = store.check_new(index)  # before all that takes time
    version = parse_local(name)[1]
    if address.digest is None and (address.tag or "")[:1].isdigit() and address.tag != version:
        raise ImageError(
            f"{address} is {name}, another version",
            hint=f"if it is the one that you want: oci://{address.host}/{address.repository}:"
            f"{version}",
        )
    if trust.tool is not None:
        signature = repository.fetch_document(layout, signature_name(index))
        for blob in () if signature is None else layout.blobs(signature):
            if blob.size > MOST_DOCUMENT_BYTES:
                raise ImageError(f"the signature of {address} has {blob.size} bytes")
            repository.fetch(layout, blob)
        verify_release(trust.tool, layout, index, signature, trust.key)
        layout.name({signature_name(index): signature})
    for blob in layout.blobs(index):
        repository.fetch(layout, blob, progress)
    return store.add(index)


def fetch_index(store: Store, address: Address, repository: Repository) -> Descriptor:
    """Fetch an index and its manifests, which say what there is to fetch."""
    assert address.reference is not None
    layout = store.layout
    index = repository.fetch_document(layout, address.reference)
    if index is None:
        raise UsageError(
            f"{address.host} has no {address.repository}:{address.reference}",
            hint=f"see 'dnictl models oci://{address.host}/{address.repository}'",
        )
    if index.media_type != INDEX:
        raise ImageError(f"{address} is no release", hint="an image is pulled with: apptainer pull")
    for one in Index.parse(layout.read(index), str(address)).manifests:
        if repository.fetch_document(layout, one.digest) is None:
            raise ImageError(f"{address.host} lacks {one.digest}, a part of {address}")
    return index

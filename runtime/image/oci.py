"""OCI image layouts: blobs by digest, manifests, and an index with the names of what is in it.

Source: github.com/opencontainers/image-spec, ``image-layout.md``, ``manifest.md``,
``image-index.md``. Documents may come from a registry: what they name is checked before it is used.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import re
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.alias_generators import to_camel

from dni_runtime.errors import ImageError
from dni_runtime.files import write_atomic

INDEX: Final = "application/vnd.oci.image.index.v1+json"
MANIFEST: Final = "application/vnd.oci.image.manifest.v1+json"
REF_NAME = "org.opencontainers.image.ref.name"
MOST_DOCUMENT_BYTES = 4 << 20  # as registries limit manifests

_CHUNK_BYTES = 1 << 20
_OLD_S = 3600.0
_GIVEN_UP_S = 7 * 86400.0
"""After which nobody goes on with a blob that was cut off."""
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")

Digest = Annotated[str, Field(pattern=rf"^{_DIGEST.pattern}$")]


class _Document(BaseModel):
    """A JSON document of the specification; what we do not know of it is kept out."""

    model_config = ConfigDict(
        frozen=True, alias_generator=to_camel, populate_by_name=True, extra="ignore"
    )
    artifact_type: str | None = None
    annotations: dict[str, str] | None = None

    def note(self, name: str) -> str | None:
        return (self.annotations or {}).get(name)

    @classmethod
    def parse(cls, data: bytes, what: str) -> Self:
        """Read a document; raises ``ImageError`` if it is malformed."""
        try:
            return cls.model_validate_json(data)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"]))
            raise ImageError(f"{what} is malformed: {where}: {first['msg']}") from None

    def encode(self) -> bytes:
        """Return the document in the one form that its digest is of."""
        document = self.model_dump(mode="json", by_alias=True, exclude_none=True)
        return json.dumps(document, sort_keys=True, separators=(",", ":")).encode()


class Descriptor(_Document):
    media_type: str
    digest: Digest
    size: int = Field(ge=0)


class Manifest(_Document):
    schema_version: Literal[2] = 2
    media_type: Literal["application/vnd.oci.image.manifest.v1+json"] = MANIFEST
    config: Descriptor
    layers: tuple[Descriptor, ...]


class Index(_Document):
    schema_version: Literal[2] = 2
    media_type: Literal["application/vnd.oci.image.index.v1+json"] = INDEX
    manifests: tuple[Descriptor, ...]


class Layout:
    """A folder that holds blobs, and names of some of them."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def create(self) -> Layout:
        self._blobs.mkdir(parents=True, exist_ok=True)
        marker = self.root / "oci-layout"
        if not marker.exists():
            write_atomic(marker, '{"imageLayoutVersion":"1.0.0"}', mode=0o644)
        return self

    @property
    def _blobs(self) -> Path:
        return self.root / "blobs" / "sha256"

    @property
    def _index(self) -> Path:
        return self.root / "index.json"

    def path(self, digest: str) -> Path:
        """Return the file of a blob, whether it is there or not."""
        if not _DIGEST.fullmatch(digest):
            raise ImageError(f"{digest!r} is not a SHA-256 digest")
        return self._blobs / digest.removeprefix("sha256:")

    def has(self, blob: Descriptor) -> bool:
        """Whether a blob is there, as far as its size shows it."""
        with contextlib.suppress(FileNotFoundError):
            return self.path(blob.digest).stat().st_size == blob.size
        return False

    def add(self, content: bytes, media_type: str, notes: Mapping[str, str] = {}) -> Descriptor:
        return self.add_chunks(lambda: (content,), media_type, notes)

    def add_chunks(
        self,
        content: Callable[[], Iterable[bytes]],  # called twice, unless the blob is there
        media_type: str,
        notes: Mapping[str, str] = {},
    ) -> Descriptor:
        sha256, size = hashlib.sha256(), 0
        for chunk in content():
            sha256.update(chunk)
            size += len(chunk)
        blob = Descriptor(
            media_type=media_type,
            digest=f"sha256:{sha256.hexdigest()}",
            size=size,
            annotations=dict(notes) or None,
        )
        if not self.has(blob):
            temporary = self._blobs / f".{secrets.token_hex(8)}"
            try:
                with temporary.open("xb") as file:
                    file.writelines(content())
                self.take(temporary, blob)
            finally:
                temporary.unlink(missing_ok=True)
        return blob

    def take(self, file: Path, blob: Descriptor) -> None:
        """Make a file on this disk, whose digest is known, the blob."""
        file.chmod(0o444)
        os.replace(file, self.path(blob.digest))

    def read(self, blob: Descriptor) -> bytes:
        """Return a document; raises ``ImageError`` if it is not what its digest says."""
        if blob.size > MOST_DOCUMENT_BYTES:
            raise ImageError(f"{blob.digest} has {blob.size} bytes: too large for a document")
        return b"".join(self.chunks(blob))

    def chunks(self, blob: Descriptor) -> Iterator[bytes]:
        """Yield a blob's content; raises ``ImageError`` at its end if the digest is another."""
        sha256, left = hashlib.sha256(), blob.size
        path = self.path(blob.digest)
        try:
            with path.open("rb") as file:
                while chunk := file.read(_CHUNK_BYTES):
                    sha256.update(chunk)
                    left -= len(chunk)
                    yield chunk
        except OSError as error:
            raise ImageError(f"{path} cannot be read: {error.strerror}") from error
        if left or f"sha256:{sha256.hexdigest()}" != blob.digest:
            raise ImageError(
                f"{path} is damaged: its SHA-256 is another", hint="remove it, and pull it again"
            )

    def checked(self, blob: Descriptor) -> Path:
        """Return the file of a blob whose digest is right; raises ``ImageError``."""
        for _ in self.chunks(blob):
            pass
        return self.path(blob.digest)

    def names(self) -> dict[str, Descriptor]:
        """Return what has a name here, by name."""
        try:
            index = Index.parse(self._index.read_bytes(), str(self._index))
        except FileNotFoundError:
            return {}
        return {name: one for one in index.manifests if (name := one.note(REF_NAME)) is not None}

    def name(self, names: Mapping[str, Descriptor | None]) -> None:
        """Give names to manifests, or take them away (None)."""
        kept: dict[str, Any] = {**self.names(), **names}
        manifests = tuple(
            one.model_copy(update={"annotations": (one.annotations or {}) | {REF_NAME: name}})
            for name, one in sorted(kept.items())
            if one is not None
        )
        write_atomic(self._index, Index(manifests=manifests).encode(), mode=0o644)

    def manifests(self, index: Descriptor) -> tuple[Index, tuple[Manifest, ...]]:
        document = Index.parse(self.read(index), f"index {index.digest}")
        return document, tuple(
            Manifest.parse(self.read(one), f"manifest {one.digest}") for one in document.manifests
        )

    def blobs(self, root: Descriptor) -> list[Descriptor]:
        """Return all that an index or a manifest needs, what is named by others before those."""
        if root.media_type != INDEX:
            manifest = Manifest.parse(self.read(root), f"manifest {root.digest}")
            return [*manifest.layers, manifest.config]
        document, manifests = self.manifests(root)
        needed = {blob.digest: blob for one in manifests for blob in (*one.layers, one.config)} | {
            one.digest: one for one in document.manifests
        }
        return list(needed.values())

    def collect(self) -> int:
        """Remove the blobs that no name leads to, and old parts of some; return their bytes."""
        roots = self.names().values()
        kept = {blob.digest for root in roots for blob in (root, *self.blobs(root))}
        freed, now = 0, time.time()

        def remove(path: Path, *, older_s: float) -> None:
            nonlocal freed
            with contextlib.suppress(FileNotFoundError):  # another process has just taken it
                status = path.stat()
                if now - status.st_mtime > older_s:
                    path.unlink()
                    freed += status.st_size

        for path in self._blobs.iterdir():
            if path.name.startswith("."):  # being written, or left by a process that was killed
                remove(path, older_s=_OLD_S)
            elif f"sha256:{path.name}" not in kept:
                remove(path, older_s=-math.inf)
        for path in self.root.iterdir():
            if path.suffix in (".part", ".upload"):
                remove(path, older_s=_GIVEN_UP_S)
        return freed

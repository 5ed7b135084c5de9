"""OCI image layouts: what is stored, named, read and collected."""

from __future__ import annotations

import hashlib
import json
import os
import time
from pathlib import Path

import pytest

from dni_runtime.errors import ImageError
from dni_runtime.image.oci import INDEX, MANIFEST, Descriptor, Index, Layout, Manifest


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    return Layout(tmp_path / "oci").create()


def chain(layout: Layout, *layers: bytes) -> Descriptor:
    config = layout.add(b"{}", "application/x-config")
    manifest = Manifest(
        config=config, layers=tuple(layout.add(layer, "application/x-layer") for layer in layers)
    )
    listed = layout.add(manifest.encode(), MANIFEST)
    return layout.add(Index(manifests=(listed,)).encode(), INDEX)


def test_a_blob_lies_under_the_digest_of_its_content(layout: Layout) -> None:
    blob = layout.add_chunks(lambda: [b"ab", b"c"], "text/plain", {"a": "b"})
    assert blob.digest == "sha256:" + hashlib.sha256(b"abc").hexdigest()
    assert (blob.size, blob.note("a"), blob.note("b")) == (3, "b", None)
    assert layout.path(blob.digest).read_bytes() == b"abc"
    assert layout.read(blob) == b"abc"
    assert layout.has(blob)
    assert not layout.has(blob.model_copy(update={"size": 4}))


def test_documents_are_written_in_one_form(layout: Layout) -> None:
    index = chain(layout, b"one", b"two")
    document = json.loads(layout.read(index))
    assert document["mediaType"] == INDEX
    assert document["manifests"][0]["mediaType"] == MANIFEST
    assert set(document["manifests"][0]) == {"mediaType", "digest", "size"}
    assert chain(layout, b"one", b"two") == index


def test_all_that_an_index_needs_comes_before_what_names_it(layout: Layout) -> None:
    index = chain(layout, b"one", b"two")
    blobs = layout.blobs(index)
    assert [layout.read(blob) for blob in blobs[:3]] == [b"one", b"two", b"{}"]
    assert blobs[3].media_type == MANIFEST
    assert len(blobs) == 4


def test_what_no_name_leads_to_is_collected(layout: Layout) -> None:
    kept, gone = chain(layout, b"one", b"two"), chain(layout, b"one", b"three")
    layout.name({"digits:1": kept, "digits:2": gone})
    assert layout.names().keys() == {"digits:1", "digits:2"}
    assert layout.collect() == 0
    layout.name({"digits:2": None})
    only = [blob for blob in layout.blobs(gone) if blob not in layout.blobs(kept)]
    assert layout.collect() == gone.size + sum(blob.size for blob in only)
    assert layout.names()["digits:1"].digest == kept.digest
    assert b"two" in map(layout.read, layout.blobs(kept))


def test_what_was_cut_off_is_kept_for_a_week(layout: Layout) -> None:
    for name, age_s in (("new.part", 6 * 86400), ("old.part", 8 * 86400), ("old.upload", 8e5)):
        path = layout.root / name
        path.write_bytes(b"12345")
        os.utime(path, (0, time.time() - age_s))
    layout.name({})
    assert layout.collect() == 10
    assert {path.name for path in layout.root.iterdir() if path.is_file()} == {
        "index.json", "new.part", "oci-layout"
    }  # fmt: skip


@pytest.mark.parametrize("content", [b"abd", b"ab", b"abcd", None])
def test_a_blob_that_is_not_its_digest_is_refused(layout: Layout, content: bytes | None) -> None:
    blob = layout.add(b"abc", "text/plain")
    path = layout.path(blob.digest)
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ImageError, match=r"damaged|cannot be read"):
        layout.read(blob)


@pytest.mark.parametrize(
    "digest",
    ["sha256:../../etc/passwd", "md5:00", "sha256:" + "0" * 63, "sha256:" + "0" * 64 + "\n"],
)
def test_a_digest_is_no_path(layout: Layout, digest: str) -> None:
    with pytest.raises(ImageError, match="not a SHA-256"):
        layout.path(digest)
    text = {"mediaType": INDEX, "manifests": [{"mediaType": "a", "digest": digest, "size": 1}]}
    with pytest.raises(ImageError, match=r"index is malformed: manifests\.0\.digest"):
        Index.parse(json.dumps(text).encode(), "index")

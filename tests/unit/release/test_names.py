"""Names and addresses of releases."""

from __future__ import annotations

from pathlib import Path

import pytest

from dni_runtime.errors import UsageError
from dni_runtime.release.names import Address, parse_local
from dni_runtime.run.releases import parse_name, store_folder


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("oci://host/digits", Address("host", "digits")),
        ("oci://host:5000/a/b-c:1.2.0", Address("host:5000", "a/b-c", "1.2.0")),
        ("oci://[::1]:5000/a", Address("[::1]:5000", "a")),
        (f"oci://h/a@sha256:{'0' * 64}", Address("h", "a", None, f"sha256:{'0' * 64}")),
        (f"oci://h/a:1@sha256:{'0' * 64}", Address("h", "a", "1", f"sha256:{'0' * 64}")),
    ],
)
def test_an_address_is_read_and_written(text: str, address: Address) -> None:
    assert Address.parse(text) == address
    assert str(address) == text
    assert address.reference == (address.digest or address.tag)


@pytest.mark.parametrize(
    ("host", "images"),
    [("host:5000", "me/digits/images"), ("docker.io", "me/digits-images")],
)
def test_docker_hub_takes_the_repository_of_images(host: str, images: str) -> None:
    """Its names have two levels; elsewhere, as in GitLab, a project's begin with its own."""
    assert Address(host, "me/digits", "1").beside("images") == Address(host, images, "1")


@pytest.mark.parametrize(
    "text",
    ["host/a", "oci://host", "oci://host/A", "oci://host/a:", "oci://host/../a", "oci://host/a@sha256:1",
     "oci://user@host/a", "oci://host/a:1/b", "oci://host/a:1\n", "docker://host/a"],
)  # fmt: skip
def test_anything_else_is_no_address(text: str) -> None:
    with pytest.raises(UsageError, match="not the address of a release"):
        Address.parse(text)


@pytest.mark.parametrize(
    "text", ["digits", "digits:", ":1", "Digits:1", "a/b:1", "../a:1", "a:..", "a:-1"]
)
def test_a_name_is_no_path(text: str) -> None:
    assert parse_name(text) is None
    with pytest.raises(UsageError, match="not the name of a release"):
        parse_local(text)


def test_releases_lie_in_the_users_data(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", "/data")
    assert store_folder() == Path("/data/dnictl/releases")
    monkeypatch.setenv("XDG_DATA_HOME", "data")
    assert store_folder() == Path.home() / ".local/share/dnictl/releases"

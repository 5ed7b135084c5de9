"""What is checked before anything is sent."""

from __future__ import annotations

from pathlib import Path

import pytest

from dni_runtime.errors import UsageError
from dni_runtime.image.apptainer import Apptainer
from dni_runtime.release.move import push_files, push_oci
from dni_runtime.release.names import Address
from dni_runtime.release.store import Store

TOOL = Apptainer(Path("/nowhere/apptainer"), "apptainer", (1, 4, 5))


@pytest.mark.parametrize("send", [push_files, push_oci])
def test_a_push_of_images_has_no_digest(tmp_path: Path, send: object) -> None:
    """Theirs is known when they are made; the printed addresses would have an untrue one."""
    address = Address("host", "digits", tag="1", digest=f"sha256:{'0' * 64}")
    assert callable(send)
    with pytest.raises(UsageError, match="a push has no digest"):
        send(TOOL, Store(tmp_path), "digits:1", address, False, lambda blob, count: None)

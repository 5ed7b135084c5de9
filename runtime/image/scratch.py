"""Folders in which images are built: removed at the end, also that of a build that was killed."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from dni_runtime.files import locked

_NEW_S = 60.0  # a younger one may not be locked yet


@contextlib.contextmanager
def scratch_folder(parent: Path, prefix: str) -> Iterator[Path]:
    """Make a folder for a build in ``parent``; remove those that killed builds have left there.

    A folder in use is locked. Where the file system has no locks, nothing of others is removed.
    """
    for path in parent.glob(f"{prefix}*"):
        with contextlib.suppress(OSError):  # another build's, or no folder
            if time.time() - path.stat().st_mtime > _NEW_S:
                with locked(path):
                    shutil.rmtree(path, ignore_errors=True)
    with (
        tempfile.TemporaryDirectory(dir=parent, prefix=prefix) as name,
        contextlib.ExitStack() as stack,
    ):
        with contextlib.suppress(OSError):
            stack.enter_context(locked(Path(name)))
        yield Path(name)

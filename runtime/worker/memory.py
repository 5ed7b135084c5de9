"""Memory that a worker keeps for its next batch."""

from __future__ import annotations

import ctypes
import os

KEPT_BYTES = 256 << 20
"""So much free memory is kept at the top of the heap."""

LARGEST_BYTES = 32 << 20
"""Blocks up to this size are kept: the most that glibc allows on 64 bits."""

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h


def keep_freed_memory() -> None:
    """Have the C library keep freed memory, instead of giving it back to the kernel.

    Every batch takes and frees the same tensors. As glibc does it by default, the large ones come
    from the kernel each time, a page fault and 4 KiB of zeros at a time: a tenth of the time of a
    convolution's step. Nothing is changed where the environment tunes malloc itself, or where the C
    library is another one. (mallopt(3).)
    """
    if "GLIBC_TUNABLES" in os.environ or any(name.startswith("MALLOC_") for name in os.environ):
        return
    libc = ctypes.CDLL(None)
    if hasattr(libc, "gnu_get_libc_version"):
        libc.mallopt(_M_MMAP_THRESHOLD, LARGEST_BYTES)
        libc.mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES)

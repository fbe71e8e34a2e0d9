"""How the C library's allocator treats large blocks: for processes whose memory must stay flat for days."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

_M_TRIM_THRESHOLD = -1  # from malloc.h
_M_MMAP_THRESHOLD = -3


def give_back(block_bytes: int, top_bytes: int = 128 * 1024) -> None:
    """Give blocks of this size and above back to the system as soon as they are freed, and a large free top.

    By default glibc learns to keep them, and what lives longer lies between them: the process grows
    although it holds no more. Concerns the whole process; does nothing with another C library.

    Args:
        block_bytes: Size from which blocks get mappings of their own.
        top_bytes: How much free memory at the heap's end is kept.
    """
    mallopt: Callable[[int, int], int] | None = getattr(ctypes.CDLL(None), "mallopt", None)  # glibc
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, block_bytes)
        mallopt(_M_TRIM_THRESHOLD, top_bytes)

"""How the broker's process frees memory: Python's collector, and the C library's allocator."""

from __future__ import annotations

import gc
import threading
from typing import Final

_COLLECTIONS: Final = (10_000, 50, 10)
"""Thresholds of Python's garbage collector. Objects of a request end with it, without the
collector. With its defaults, thousands of requests that wait made it visit all objects again and
again: half of the CPU time of a rebalance of 1,000 groups, in pauses of up to 0.5 s."""

_LARGE_BYTES: Final = 4 * 1024 * 1024
"""The GNU C library gives back what is free at the end of its heap, from twice the size of the
largest block on that was freed so far, and such blocks are not of the heap before. With pieces of
512 KiB for consumers, a broker gave back and took new pages for each of them: 0.7 CPU-s for each GB
that it sent in place of 0.25. After a block of this size, up to 8 MiB stay. Fixed limits
(`mallopt`) would end this adaptation: reads from a bucket, of 8 MiB each, had half of the rate."""


def keep_memory() -> None:
    """Set the limits of the process, if it is the broker's own. Else nothing is changed."""
    if threading.current_thread() is not threading.main_thread():
        return
    gc.freeze()  # what the start has made is left out
    gc.set_threshold(*_COLLECTIONS)
    bytearray(_LARGE_BYTES)  # freed at once

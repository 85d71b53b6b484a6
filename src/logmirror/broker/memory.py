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
"""The GNU C library keeps free memory up to twice the size of the largest block that was freed so
far (mallopt(3), `M_MMAP_THRESHOLD`). Pieces for consumers have 512 KiB. With 1 MiB to keep, a
broker gave back and took new pages for each of them: 0.7 CPU-s for each GB that it sent, not 0.25.
After a block of this size it keeps 8 MiB, and more after a larger one. Fixed limits (`mallopt`) end
this adaptation: reads from a bucket, of 8 MiB each, had half of the rate with 2 and 16 MiB."""


def keep_memory() -> None:
    """Prepare collector and allocator, if the process is the broker's own; else do nothing."""
    if threading.current_thread() is not threading.main_thread():
        return
    gc.freeze()  # what the start has made is left out
    gc.set_threshold(*_COLLECTIONS)
    bytearray(_LARGE_BYTES)  # freed at once, for the allocator to see

"""How the benchmarks read with kcat, and files that are new on the machine."""

from __future__ import annotations

from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    from pathlib import Path

TO_THE_END = ("-q", "-e", "-X", "fetch.wait.max.ms=5")
"""Options of kcat. It sees the end of a partition by an empty response, which takes 500 ms unless
something else is said: as long as reading a gigabyte."""

_SPARE_BYTES = 1 << 30
_PIECE_BYTES = 4 << 20


def fill_page_cache(folder: Path) -> None:
    """Read a sparse file as large as the free memory, and leave it: the page cache is full.

    So it is on every machine that has run for some time: new files take the place of old ones. On a
    virtual machine that has just started, or whose hypervisor has taken its free memory back, the
    first write to a page takes about ten times as long (64 MiB in 0.15 s, then in 0.013 s).
    """
    path = folder / "page-cache"
    with path.open("wb") as file:
        file.truncate(max(0, psutil.virtual_memory().free - _SPARE_BYTES))
    piece = bytearray(_PIECE_BYTES)
    with path.open("rb", buffering=0) as file:
        while file.readinto(piece):
            pass

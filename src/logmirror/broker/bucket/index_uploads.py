"""Creates the indexes of large segments behind their objects (P1 in `parts`).

An index is only a copy. So what fails is tried again, but nothing else of the partition waits for
it. A crash, or many failures, may leave segments without one. A read of such a segment fetches the
whole segment, and then its index is created from that.
"""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING, Final

from logmirror.broker.bucket.parts import INDEXES, create_index
from logmirror.errors import CorruptionError

if TYPE_CHECKING:
    from collections.abc import Container, Mapping
    from pathlib import Path

    from logmirror.broker.bucket.chain import Key
    from logmirror.broker.bucket.uploads import Uploads
    from logmirror.broker.log.disk import OpenFile
    from logmirror.broker.log.partition_log import PartitionLog
    from logmirror.broker.log.segment import Segment, SparseIndex
    from logmirror.stores.base import BlobStore

_WAITING_ENTRIES: Final = 500_000
"""Entries of the indexes that wait to be created, 24 bytes each. What is more is not created."""


class IndexUploads:
    """Submits them to the thread of the uploads.

    Args:
        store: The log dir.
        uploads: The thread.
        keys: Those of the logs, which may change.
        here: The keys alone; those of a partition that leaves go before its objects do.
    """

    def __init__(
        self,
        store: BlobStore,
        uploads: Uploads,
        keys: Mapping[PartitionLog, Key],
        here: Container[Key],
    ) -> None:
        self._store, self._uploads, self._keys, self._here = store, uploads, keys, here
        self._lock = threading.Lock()
        self._waiting = 0

    def submit(self, key: Key, name: str, segment: Segment, index: SparseIndex) -> None:
        """Create the index of an object that exists. Never blocks.

        If as many wait as may (`_WAITING_ENTRIES`), the index is not created now.
        """
        entries = len(index.offsets)

        def run() -> None:
            # Else its removal may have listed the indexes already: nothing would remove this one.
            if not segment.is_deleted and key in self._here:
                create_index(self._store, name, index)

        def forget() -> None:
            with self._lock:
                self._waiting -= entries

        with self._lock:
            if self._waiting and self._waiting + entries > _WAITING_ENTRIES:
                return
            self._waiting += entries
        done = self._uploads.submit((INDEXES, *key), run, fails_alone=True)
        done.add_done_callback(lambda _: forget())

    def again(self, folder: Path, name: str, file: OpenFile) -> None:
        """Create an index that was missing when a segment was read. In any thread.

        Args:
            folder: The folder of the partition.
            name: The object.
            file: Its bytes.
        """
        logs = ((log, key) for log, key in tuple(self._keys.items()) if log.folder == folder)
        for log, key in logs:
            for segment in log.segments:
                if segment.path.name == name.rpartition("/")[2]:
                    with contextlib.suppress(CorruptionError):  # the segment's check reports it
                        self.submit(key, name, segment, segment.indexed(file))

"""Puts compacted segments in the place of those they were made of. See `log/cleaner` for the rest.

    file of the compacted segment -> its object created -> a row in the broker's database, so in the
        chain -> the log switched over -> the objects of the old segments deleted

- R1 A compacted object has a version in its name, 16 random hexadecimal digits. So no two have the
  same name, and none has that of a segment (K6 in `chain`).
- R2 The database has a row for each that counts. So a former owner can make none count. A start
  deletes those without a row, and all others whose offsets overlap those of a row. After its
  listings it checks that no other owner has taken over, whose rows it would not know.
- R3 The next one is created when the row of the one before is in the chain. So a null value is not
  removed before the older values of its key.
- R4 Segments are merged (`tiling`) only behind the last one with a version, and not during a pass:
  no merged object that counts has offsets of both sides of the end of a row.
- R5 Segments are compacted when their objects exist: so their producer states exist too.
- R6 What the bucket does not accept in `LIMIT_S` is given up. The pass begins again later,
  and other partitions are compacted meanwhile. The object may be created late, and has no row.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final

from logmirror import failpoints
from logmirror.broker.place_rows import Compacted
from logmirror.clock import new_nonce
from logmirror.errors import UnavailableError

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Executor

    from logmirror.broker.bucket.commits import BucketCommit
    from logmirror.broker.log.cleaner import Cleaned
    from logmirror.broker.log.partition_log import PartitionLog
    from logmirror.broker.metadata import MetadataStore


LIMIT_S: Final = 60.0
"""Time for one object, and for a merge in progress to end."""


class InBucket:
    """See `compaction.Replacing`.

    Args:
        commits: The logs.
        store: The broker's database.
        executor: For blocking work.
    """

    def __init__(self, commits: BucketCommit, store: MetadataStore, executor: Executor) -> None:
        self._bucket, self._merger = commits.bucket, commits.merger
        self._store, self._executor = store, executor
        self._uncertain: set[PartitionLog] = set()

    async def begin(self, log: PartitionLog) -> None:
        """See `Replacing.begin` (R4)."""
        if not await self._merger.leave(log, self, LIMIT_S):
            raise UnavailableError("segments of the partition are being merged")

    def end(self, log: PartitionLog) -> None:
        """See `Replacing.end`."""
        if log not in self._uncertain:
            self._merger.take_up(log, self)

    async def replace(self, log: PartitionLog, cleaned: Cleaned) -> bool:
        """See `Replacing.replace`."""
        new, key = cleaned.segment, self._bucket.topic_key_of(log)
        new.version = new_nonce()
        row = Compacted(new.first, new.next_offset, new.version)
        await self._create(
            log, lambda: self._bucket.create_replacement(log, *row[:2], cleaned.path, row[2])
        )
        failpoints.reach("bucket.compacted")
        self._uncertain.add(log)  # until the log's segments are those that a start would find
        await self._in_thread(lambda: self._store.add_compacted(*key, row, log.log_start))
        failpoints.reach("bucket.counted")
        is_replaced = False
        try:
            is_replaced = log.replace(cleaned.old, new, cleaned.path)
        finally:
            if not is_replaced:  # one of them was deleted, or the file could not be renamed
                await self._undo(log, cleaned)
        self._uncertain.discard(log)
        if not is_replaced:
            return False
        self._bucket.disk.keep(new.path, new.size_bytes)
        self._bucket.delete_replaced(log, cleaned.old)
        return True

    async def _create(self, log: PartitionLog, create: Callable[[], None]) -> None:
        """Create an object in the thread of the uploads (R6)."""
        is_wanted = True

        def run() -> None:
            if is_wanted:
                create()

        done = asyncio.wrap_future(self._bucket.submit_replacement(log, run))
        await asyncio.wait([done], timeout=LIMIT_S)
        if not done.done():
            is_wanted = False
            raise UnavailableError(
                "a compacted segment could not be uploaded in time", timeout_s=LIMIT_S
            )
        done.result()

    async def _undo(self, log: PartitionLog, cleaned: Cleaned) -> None:
        """Let the rows be those of the log's segments again."""
        key = self._bucket.topic_key_of(log)
        rows = [
            Compacted(one.first, one.next_offset, one.version)
            for one in log.segments
            if one.version
        ]
        await self._in_thread(lambda: self._store.set_compacted_objects(*key, rows))
        cleaned.path.unlink(missing_ok=True)
        self._bucket.delete_replaced(log, [cleaned.segment])

    async def _in_thread(self, call: Callable[[], Any]) -> None:
        await asyncio.get_running_loop().run_in_executor(self._executor, call)

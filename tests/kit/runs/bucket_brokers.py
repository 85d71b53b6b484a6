"""A broker on a bucket, in one thread: nearly all of the product, in steps that a test decides.

Chain, journal, uploads, merges, topics, logs and the database are the product's own. What runs in
threads of a broker runs here in the owner's thread, one after the other: so a run with the same
plan is the same run. The owner's thread stops before each request to the store.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

from kit.runs.bucket_calls import Calls, Crashed
from kit.runs.bucket_inline import Inline
from kit.runs.bucket_reads import batches, committed, everything
from logmirror.broker.bucket.logs import BucketLogs
from logmirror.broker.bucket.replacing import InBucket
from logmirror.broker.log.batch_check import check_batch
from logmirror.broker.log.cleaner import Cleaned
from logmirror.broker.log.file_names import cleaned_path
from logmirror.broker.log.flush_rule import FlushRule
from logmirror.broker.log.reading import ColdSegmentError
from logmirror.broker.log.segment import Segment
from logmirror.broker.log.segment_cache import SegmentCache
from logmirror.broker.metadata import MetadataStore
from logmirror.broker.options import BrokerOptions
from logmirror.broker.server import _commits
from logmirror.broker.topic_configs import NEVER
from logmirror.broker.topics import Topics
from logmirror.errors import (
    CorruptionError,
    FencedError,
    LogmirrorError,
    OutcomeUnknownError,
    UnavailableError,
)
from logmirror.wire.records import Record, encode_reference

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence
    from pathlib import Path

    from kit.runs.bucket_clients import Clients
    from kit.runs.bucket_reads import Batch
    from logmirror.broker.log.partition_log import PartitionLog

PARTITIONS: Final = 2
_PASSES: Final = 8
_MOST_STARTS: Final = 6
_CACHE_BYTES: Final = (100_000, 1)
"""Owners have it in turn: so that readers find local copies, and objects of the bucket."""

_SEGMENT_BYTES: Final = 100_000
_VALUE_BYTES: Final = 8
_MAX_BATCH_BYTES: Final = 10_000
_READ_BYTES: Final = 1 << 20
_ROUNDS: Final = 3
"""So often producers that finish send: batches, the end of a transaction, and what that needs."""


class Report(NamedTuple):
    """What an owner says of a partition, and what a Fetch of all of it returns."""

    log_start: int
    watermark: int
    durable: int
    records: dict[int, bytes] | None
    """None: nothing could be read now."""

    failure: Exception | None
    stable: int
    """The last stable offset."""

    committed: dict[int, bytes] | None
    """What a consumer with read_committed got; None: nothing could be read now."""


class Sink(Protocol):
    """What an owner reports to, as it happens."""

    clients: Clients

    def new_value(self) -> bytes:
        """Return a value of `_VALUE_BYTES` bytes."""
        ...

    def appended(self, number: int, offset: int, value: bytes) -> None:
        """A record was appended; it may become durable."""

    def acked(self, owner: Owner, number: int, offset: int, value: bytes) -> None:
        """A producer got a response."""

    def durable(self, owner: Owner, number: int, offset: int, value: bytes) -> None:
        """A record is durable, as the owner says."""

    def deleting(self, number: int, start: int) -> None:
        """A log start was requested."""

    def deleted(self, number: int, start: int) -> None:
        """The request was successful."""


class Owner:
    """A broker, from its start to its end, in a thread of its own.

    Args:
        sink: What was acknowledged.
        number: The owner's number.
        folder: A new folder for its working folders.
        steps: What it does after its start: names of methods with their arguments.
        calls: Returns the store as this owner reaches it.
        is_flushed: By partition, whether records are flushed before they are acknowledged.

    Attributes:
        cache_bytes: Limit for local copies of segments.
        is_dead: Whether it crashed.
        end: Why it ended: a crash, or another owner.
        failure: An error that was not expected.
        turn: Lets it run.
    """

    def __init__(  # noqa: PLR0913, PLR0917  # what a life depends on
        self,
        sink: Sink,
        number: int,
        folder: Path,
        steps: Sequence[tuple[Any, ...]],
        calls: Callable[[Owner], Calls],
        is_flushed: tuple[bool, ...] = (True,) * PARTITIONS,
    ) -> None:
        self.sink, self.number, self.is_flushed = sink, number, is_flushed
        self._folder, self._steps = folder, steps
        self.cache_bytes = _CACHE_BYTES[number % len(_CACHE_BYTES)]
        self.turn, self.paused = threading.Semaphore(0), threading.Semaphore(0)
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.store: Any = calls(self)
        self.is_dead = self.is_over = self.is_open = False
        self.was_short = self.is_checking = False
        self.end: BaseException | None = None
        self.failure: BaseException | None = None
        self.starts = self.merged = self.compacted = 0
        self.bucket: BucketLogs | None = None
        self.rows: MetadataStore | None = None

    # Turns

    def proceed(self) -> None:
        """Run up to the next request, or to the end."""
        if not self.thread.is_alive() and not self.is_over:
            self.thread.start()
        self.turn.release()
        self.paused.acquire()

    def pause(self) -> None:
        """Wait before a request."""
        if self.is_dead:
            raise Crashed
        self.paused.release()
        self.turn.acquire()

    def crash(self) -> None:
        """End the process: nothing of it reaches the store any more."""
        self.is_dead, self.is_open = True, False
        raise Crashed

    @property
    def is_own(self) -> bool:
        """Whether a request is the owner's; not a reader's."""
        return threading.current_thread() is self.thread and not self.is_checking

    def _run(self) -> None:
        self.turn.acquire()
        try:
            asyncio.run(self._live())
        except (Crashed, FencedError) as end:
            self.end = end
        except BaseException as error:  # noqa: BLE001  # reported by the judge
            self.failure = error
        finally:
            if self.is_dead:
                self.end, self.failure = Crashed(), None
            self.is_over, self.is_open = True, False
            self._close()
            self.paused.release()

    def _close(self) -> None:
        if self.rows is not None:
            self.rows.close()
        self.bucket = self.rows = None

    async def _live(self) -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _loop, _context: None)
        while not await self._start():
            self._close()
            if self.starts == _MOST_STARTS:
                return
        self.is_open = True
        for name, *arguments in self._steps:
            await getattr(self, name)(*arguments)
            if self.commits.fenced.done():
                raise self.commits.fenced.result()

    # Start

    async def _start(self) -> bool:
        """Start as a broker does; returns whether it has, or must be started again."""
        self.starts += 1
        folder = self._folder / str(self.starts)
        try:
            self._take_over(folder)
            await self.until(self.topics.create_missing())
        except (UnavailableError, OutcomeUnknownError):
            return False
        except CorruptionError:
            if not self.was_short:
                raise
            return False
        self.logs: list[PartitionLog] = list(self.topics.by_name["t"].logs)
        for log in self.logs:
            if isinstance(log.failure, UnavailableError) or (log.failure and self.was_short):
                return False
            if log.failure is not None:
                raise log.failure
        for log, is_flushed in zip(self.logs, self.is_flushed, strict=True):
            log.segment_bytes = _SEGMENT_BYTES
            log.flush_rule = FlushRule(messages=1 if is_flushed else NEVER)
        await self.rest()
        return True

    def _take_over(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        self.bucket = bucket = BucketLogs(
            self.store, folder, interval_ms=0, cache_bytes=self.cache_bytes
        )
        path = folder / ".logmirror" / "broker.sqlite"
        self.rows = MetadataStore(path, bucket.restored(path))
        bucket.snapshots.add(path.stem, self.rows.snapshot)
        options = BrokerOptions(
            log_dir=folder, bucket="s3://b/p", topics=(("t", PARTITIONS),), commit_interval_ms=1
        )
        inline = Inline()
        self.cache = SegmentCache(bucket.disk, parts=bucket.disk.part, max_loaded=1)
        self.commits: Any = _commits(
            options, SimpleNamespace(of=lambda _: inline), bucket.disk, bucket
        )
        self.commits._ticker.cancel()  # noqa: SLF001  # steps do what it would
        self.commits._interval_ms = 0  # noqa: SLF001  # nothing depends on the machine's clock
        self.topics = Topics(
            options, self.rows, inline, bucket.disk, self.cache, self.commits, bucket
        )
        self.topics.load()
        self.commits.opened()
        self.replacing = InBucket(self.commits, self.rows, inline)

    async def rest(self) -> None:
        """Do everything that is due: what the loop has to do before what waits for the bucket."""
        bucket: Any = self.bucket
        is_busy = True
        while is_busy:
            for _ in range(_PASSES):
                await asyncio.sleep(0)
            if self.is_dead:
                raise Crashed
            works = bucket.journal, bucket.snapshots, bucket._uploads  # noqa: SLF001  # in its thread
            is_busy = any([one.drain() for one in works])  # noqa: C419  # each has its turn

    async def until(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Do everything that is due until some work has ended."""
        task = asyncio.ensure_future(work)
        while not task.done():
            await self.rest()
        return task.result()

    # Steps

    async def append(self, number: int, count: int = 2) -> None:
        """Append a batch to a partition; `rest` commits it with others."""
        log, sink = self.logs[number], self.sink
        if log.failure is not None:
            return
        values = [sink.new_value() for _ in range(count)]
        records = [Record(n, 1_000, 0, None, one, ()) for n, one in enumerate(values)]
        batch = memoryview(bytearray(encode_reference(records)))
        first = log.append(batch, check_batch(batch, max_bytes=_MAX_BATCH_BYTES))
        for offset, value in enumerate(values, first):
            sink.appended(number, offset, value)

        def report(listener: Callable[..., None], failure: object) -> None:
            if failure is None and not self.is_dead:
                for offset, value in enumerate(values, first):
                    listener(self, number, offset, value)

        log.when_acknowledged(log.log_end, lambda failure: report(sink.acked, failure))
        log.when_durable(log.log_end, lambda failure: report(sink.durable, failure))
        self.commits.schedule(log)

    async def send(self, which: int, count: int, is_lost: bool) -> None:
        """Let an idempotent producer send a batch; `rest` commits it with others."""
        self.sink.clients.all[which].send(self, count, is_lost=is_lost)

    async def end_transaction(self, which: int, is_commit: bool, is_lost: bool) -> None:
        """Let a transactional producer end its transaction."""
        self.sink.clients.all[which].end(self, is_commit=is_commit, is_lost=is_lost)

    async def late(self, number: int) -> None:
        """Let all producers wait too long, as `BucketCommit` does during an outage."""
        self.logs[number].fail_waiters(OutcomeUnknownError("the bucket cannot be written"))

    async def finish(self) -> None:
        """Let all idempotent producers finish."""
        for _ in range(_ROUNDS):
            for one in self.sink.clients.all:
                one.finish(self)
            await self.rest()

    async def seal(self, number: int) -> None:
        """Complete the open segment of a partition; `rest` uploads it."""
        log = self.logs[number]
        if log.failure is None:
            log.roll()
            self.commits.schedule(log)

    async def merge(self) -> None:
        """Merge what can be merged."""
        self.commits.merger.tick()
        await self.rest()
        self.merged = self.commits.merger.into

    async def delete(self, number: int, count: int) -> None:
        """Delete the oldest segments of a partition."""
        log = self.logs[number]
        ends = [one.next_offset for one in log.segments if one.is_sealed][:count]
        if ends and log.failure is None and ends[-1] <= log.high_watermark:
            self.sink.deleting(number, ends[-1])
            with contextlib.suppress(LogmirrorError):
                await self.until(
                    self.topics.delete_records(self.topics.by_name["t"], {number: ends[-1]})
                )
                self.sink.deleted(number, ends[-1])

    async def snapshot(self) -> None:
        """Write the database once more, so that commits can be removed."""
        assert self.bucket is not None
        self.bucket.snapshots.due("broker")
        await self.rest()

    async def compact(self, number: int, count: int) -> None:
        """Replace the oldest segments of a partition by one with a version and the same records."""
        log, disk = self.logs[number], self.cache._disk  # noqa: SLF001  # the bucket's
        old = [one for one in log.segments if one.is_sealed][:count]
        if not old or log.failure is not None:
            return
        path = cleaned_path(log.folder, old[0].first)
        try:
            parts = [_whole(disk.open_for_reading(one.path), one.size_bytes) for one in old]
        except OSError:
            return  # the next pass tries again
        path.write_bytes(b"".join(parts))
        new = Segment(log.folder, old[0].first, old[-1].next_offset, path.stat().st_size)
        with contextlib.suppress(LogmirrorError):
            await self.until(self._replace(log, Cleaned(path=path, segment=new, old=tuple(old))))
            self.compacted += 1
        await self.rest()

    async def _replace(self, log: PartitionLog, cleaned: Cleaned) -> None:
        await self.replacing.begin(log)
        try:
            await self.replacing.replace(log, cleaned)
        finally:
            self.replacing.end(log)

    # Readers

    def state(self, number: int) -> tuple[object, ...]:
        """Everything that a read of a partition depends on, except for the bucket."""
        log = self.logs[number]
        segments = tuple((one.first, one.next_offset, one.version) for one in log.segments)
        files = frozenset(log.folder.iterdir()) if log.folder.exists() else None
        ends = log.log_start, log.high_watermark, log.durable, log.last_stable_offset
        return (*ends, log.failure, segments, files)

    def report(self, number: int) -> Report:
        """Read everything up to the high watermark, as Fetch requests would."""
        log = self.logs[number]
        facts = log.log_start, log.high_watermark, log.durable
        stable = log.last_stable_offset
        try:
            found = self._records(log, log.log_start)
            decided = self._records(log, log.log_start, is_committed=True)
            return Report(*facts, found, None, stable, decided)
        except (LogmirrorError, OSError) as error:
            return Report(*facts, None, error, stable, None)

    def read(self, number: int, offset: int) -> bytes | None:
        """Read one record; its requests to the store never fail."""
        self.is_checking = True
        try:
            found = self._records(self.logs[number], offset)
        except (LogmirrorError, OSError):
            return None
        finally:
            self.is_checking = False
        return None if found is None else found.get(offset)

    def _records(
        self, log: PartitionLog, offset: int, *, is_committed: bool = False
    ) -> dict[int, bytes] | None:
        found: dict[int, bytes] = {}
        end = log.last_stable_offset if is_committed else log.high_watermark
        while offset < end:
            fetched = self._fetched(log, offset, is_committed=is_committed)
            if fetched is None:
                return None
            if not fetched[0]:
                break
            found |= committed(*fetched) if is_committed else everything(fetched[0])
            offset = fetched[0][-1].end
        return {at: value for at, value in found.items() if at >= log.log_start}

    def _fetched(
        self, log: PartitionLog, offset: int, *, is_committed: bool
    ) -> tuple[list[Batch], list[tuple[int, int]]] | None:
        """Return batches and aborted transactions; None: their segment is fetched just now."""
        read: Callable[..., Any] = log.read_committed if is_committed else log.read
        while True:
            try:
                found = read(offset, _READ_BYTES, at_least_one=True)
            except ColdSegmentError as cold:
                if self._is_coming(cold.segment):
                    return None
                self.cache.loaded(cold.segment)
                continue
            ranges, aborted = found if is_committed else (found, [])
            data = [os.pread(one.file.fd, one.size_bytes, one.position) for one in ranges]
            listed = [(one.producer_id, one.first_offset) for one in aborted]
            return [batch for one in data for batch in batches(one)], listed

    def _is_coming(self, segment: Segment) -> bool:
        """Whether the owner fetches a segment just now, for which a reader would wait."""
        disk: Any = self.cache._disk  # noqa: SLF001  # the bucket's
        return segment in self.cache._loading or segment.path in disk._fetching  # noqa: SLF001  # what is in progress


def _whole(file: Any, size_bytes: int) -> bytes:
    return os.pread(file.fd, size_bytes, 0)

"""Fetch (key 1, versions 4-17): serves whole, durable record batches.

A response holds as many whole batches as fit. The first partition with data gets at least one batch
even if it exceeds all limits, so that a consumer always makes progress (KIP-74). Records are served
up to the high watermark (L1 in `partition_log`). A request for damaged ones gets CORRUPT_MESSAGE
(L7).
Offsets from the high watermark to the log end are in range, as in Kafka, and return no records yet.
With read_committed, records end at the last stable offset, and aborted transactions are listed.
With less than `min_bytes` available, the request waits until there are enough bytes, an error
occurs, or `max_wait_ms` has passed.

The work of a request is bounded:

- Each partition is read once, and again only when its log has moved. A segment that is not in
  memory is loaded for the partition that needs it, and stays open for the response.
- A response that has `min_bytes` waits for segments for 2 ms at most. The partitions that need them
  get no records. One segment is loaded meanwhile, and one of each archive. The next Fetch of the
  connection begins with the first of these partitions. Once `max_wait_ms` has passed or too many
  files are open, a response with any records does not wait either.
- A response without records waits for a segment for 20 s at most, which is less than clients wait
  for a response. The next Fetch waits for the same load.
- A partition that a request names twice is served once, as in Kafka: the last entry counts.

Deviations from Kafka: there are no fetch sessions (every response has session ID 0, so clients send
full requests); a batch is never truncated.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from typing import TYPE_CHECKING, Final

from logmirror.broker.apis import Api
from logmirror.broker.error_codes import ErrorCode
from logmirror.broker.handlers.offsets import epoch_error
from logmirror.broker.handlers.turns import ENTRIES_PER_TURN, Turns
from logmirror.broker.log.reading import ColdSegmentError
from logmirror.broker.log.segment import FileRange, Segment, SparseIndex
from logmirror.broker.ownership import confirm_refusals
from logmirror.broker.security.acls import ResourceType
from logmirror.errors import CorruptionError, LogmirrorError
from logmirror.wire.serve_fetch import (
    TOPIC_ID_FROM,
    Fetched,
    FetchPartition,
    FetchRequest,
    pack_fetch_response,
)

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterable, Iterator, Mapping, Sequence

    from logmirror.broker.broker import Broker, Caller
    from logmirror.broker.log.disk import OpenFile
    from logmirror.broker.log.partition_log import PartitionLog
    from logmirror.broker.segment_loads import Load
    from logmirror.wire.frames import RequestHeader

    Pinned = Mapping[Segment, tuple[OpenFile, SparseIndex]]

_LOG: Final = logging.getLogger(__name__)
_SHORT_WAIT_S: Final = 0.002
"""How long a response that has records of other partitions waits for segments: for small ones."""

_LONGEST_WAIT_S: Final = 20.0
"""How long any response waits for segments. Clients wait for 30 s or longer, by default."""

_FULL_FETCH_EPOCHS: Final = (-1, 0)
_NOT_THERE: Final = (ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, ErrorCode.UNKNOWN_TOPIC_ID)
"""Their list of aborted transactions is empty and not null, as in Apache Kafka."""

_NO_OFFSETS: Final = -1, -1, 0, -1
_NOT_READ: Final = Fetched(-1, 0, *_NO_OFFSETS)

Part = bytes | bytearray | FileRange
"""A part of a response: bytes, or a range of a file."""


def fetch(
    broker: Broker, header: RequestHeader, request: FetchRequest, caller: Caller
) -> list[Part] | Coroutine[None, None, list[Part]]:
    """Handle Fetch: returns the response, or a coroutine that loads segments or waits."""
    if request.session_epoch not in _FULL_FETCH_EPOCHS:
        code = ErrorCode.FETCH_SESSION_ID_NOT_FOUND
        return list(pack_fetch_response(header.version, header.correlation_id, [], error=code))
    reading = _Reading(broker, header, request, caller)
    places = reading.order(caller.fetch_from)
    read = 0
    if len(places) <= ENTRIES_PER_TURN:
        while read < len(places) and reading.read(places[read]):
            read += 1
    if read < len(places) or reading.must_wait() or reading.beyond:
        return _finish(reading, places, read)
    return reading.ended(places)


async def _finish(reading: _Reading, places: list[int], read: int) -> list[Part]:
    """Read the remaining partitions, and wait for `min_bytes` if there is room to wait."""
    moved, turns = _Moved(), Turns()
    loop = asyncio.get_running_loop()
    timer, began_s = loop.call_later(reading.wait_s, moved.end), loop.time()
    try:
        for place in places[read:]:
            await turns.took()
            while not reading.read(place) and await reading.loaded(place, began_s + _SHORT_WAIT_S):
                pass
        await reading.load(places, moved, began_s + _LONGEST_WAIT_S)
        if reading.must_wait() and not moved.is_over:
            with reading.watching(moved) as may_wait:
                while may_wait and reading.must_wait() and not moved.is_over:
                    for place in await moved.next():
                        await turns.took()
                        reading.read(place)
                    await reading.load(places, moved, began_s + _LONGEST_WAIT_S)
        await reading.confirm(began_s + _LONGEST_WAIT_S - loop.time())
    finally:
        timer.cancel()
    return reading.ended(places)


class _Moved:
    """The partitions that have moved since they were read, and whether `max_wait_ms` is over."""

    def __init__(self) -> None:
        self.is_over = False
        self._places: set[int] = set()
        self._event = asyncio.Event()

    def add(self, place: int) -> None:
        self._places.add(place)
        self._event.set()

    def end(self) -> None:
        self.is_over = True
        self._event.set()

    async def next(self) -> Iterable[int]:
        """Wait until a partition moves or the time is over; returns those that moved."""
        await self._event.wait()
        self._event.clear()
        places, self._places = self._places, set()
        return places


class _Reading:
    """The partitions of one request, and what was read of each.

    A partition has a place: its number in the request, where it has each partition once.
    """

    def __init__(
        self, broker: Broker, header: RequestHeader, request: FetchRequest, caller: Caller
    ) -> None:
        self._broker = broker
        self._caller = caller
        self._header = header
        self._by_id = header.version >= TOPIC_ID_FROM
        self._read_committed = request.read_committed
        self._max_bytes = max(0, min(request.max_bytes, broker.options.max_fetch_bytes))
        self._min_bytes = request.min_bytes
        if caller.fetch_limit is not None:  # waiting for more would have no end
            self._max_bytes = min(self._max_bytes, caller.fetch_limit)
            self._min_bytes = min(self._min_bytes, self._max_bytes)
        self.wait_s = max(0, min(request.max_wait_ms, broker.options.max_fetch_wait_ms)) / 1000
        named: dict[str | bytes, dict[int, FetchPartition]] = {}
        for name, partitions in request.topics:
            wanted = named.setdefault(name, {})
            wanted.update((partition.partition, partition) for partition in partitions)
        self._topics = [(name, len(wanted)) for name, wanted in named.items()]
        self._wanted = [(name, one) for name, wanted in named.items() for one in wanted.values()]
        self._fetched = [_NOT_READ] * len(self._wanted)
        self._ranges: dict[int, list[FileRange]] = {}
        self._records_bytes = 0
        self._error_count = 0
        self._left_out: set[int] = set()
        self.beyond: set[int] = set()
        """The places whose offset is behind the log end."""

        self._cold: dict[int, Segment] = {}
        """The segments that are not here yet, by place."""

    def order(self, first: tuple[str | bytes, int] | None) -> list[int]:
        """Return the places in the order in which to read them, from partition `first` on."""
        places = list(range(len(self._wanted)))
        if first is not None:
            for place, (name, wanted) in enumerate(self._wanted):
                if (name, wanted.partition) == first:
                    return places[place:] + places[:place]
        return places

    def _first_left_out(self, places: list[int]) -> tuple[str | bytes, int] | None:
        """Return the first partition with records that got none."""
        for place in places if self._left_out else ():
            if place in self._left_out:
                name, wanted = self._wanted[place]
                return name, wanted.partition
        return None

    def must_wait(self) -> bool:
        """Whether there are fewer than `min_bytes`, and no error."""
        return not self._error_count and self._records_bytes < self._min_bytes

    def _log(self, place: int) -> PartitionLog | None:
        name, wanted = self._wanted[place]
        topics = self._broker.topics
        topic = topics.by_id.get(name) if isinstance(name, bytes) else topics.by_name.get(name)
        if topic is None or not 0 <= wanted.partition < len(topic.logs):
            return None
        return topic.logs[wanted.partition]

    def read(self, place: int) -> bool:
        """Read one partition; False: its segment is not here, and is loaded meanwhile."""
        pinned: dict[Segment, tuple[OpenFile, SparseIndex]] = {}
        self._cold.pop(place, None)
        while True:
            try:
                self._read(place, pinned)
            except ColdSegmentError as cold:
                load = self._load(place, cold.segment)
                if load is None or not load.done():
                    self._cold[place] = cold.segment
                    self._leave_out(place)
                    return False
                if self._took(place, cold.segment, pinned):
                    continue
            return True

    def _read(self, place: int, pinned: Pinned) -> None:
        """Read one partition, from memory and open files.

        Raises:
            ColdSegmentError: A segment is neither pinned nor loaded.
        """
        others_bytes = self._records_bytes - self._fetched[place].records_bytes
        left = max(0, self._max_bytes - others_bytes)
        log, (_, wanted) = self._log(place), self._wanted[place]
        if code := self._refusal(place):
            self.refuse(place, code)
            return
        if log is None:
            is_unknown_id = self._by_id and self._topic_is_unknown(place)
            code = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
            self.refuse(place, ErrorCode.UNKNOWN_TOPIC_ID if is_unknown_id else code)
            return
        if code := epoch_error(wanted.leader_epoch):
            self.refuse(place, code)
            return
        watermark, start = log.high_watermark, log.log_start
        if log.failure is None and not start <= wanted.offset <= log.log_end:
            if wanted.offset > log.log_end:
                self.beyond.add(place)
            self.refuse(place, ErrorCode.OFFSET_OUT_OF_RANGE)
            return
        ranges: list[FileRange] = []
        aborted: Sequence[tuple[int, int]] | None = () if self._read_committed else None
        limit, at_least_one = min(left, max(0, wanted.max_bytes)), others_bytes == 0
        if log.failure is not None or (limit or at_least_one):
            try:
                limits = wanted.offset, limit, at_least_one
                ranges, aborted = self._find(log, *limits, pinned)
            except LogmirrorError as error:
                _LOG.warning("%s: %s", log.folder, error)
                log.disk_failed(error)
                is_damaged = isinstance(error, CorruptionError)
                code = ErrorCode.CORRUPT_MESSAGE if is_damaged else ErrorCode.KAFKA_STORAGE_ERROR
                self.refuse(place, code)
                return
        size_bytes = sum(found.size_bytes for found in ranges)
        stable = log.last_stable_offset
        offsets = watermark, start, size_bytes, stable
        self._keep(place, Fetched(wanted.partition, 0, *offsets, aborted), ranges)
        if not ranges and wanted.offset < (stable if self._read_committed else watermark):
            self._left_out.add(place)

    def _find(
        self, log: PartitionLog, offset: int, limit: int, at_least_one: bool, pinned: Pinned
    ) -> tuple[list[FileRange], Sequence[tuple[int, int]] | None]:
        """Return the records and, for read_committed, the aborted transactions."""
        if not self._read_committed:
            return log.read(offset, limit, at_least_one=at_least_one, pinned=pinned), None
        found, aborted = log.read_committed(offset, limit, at_least_one=at_least_one, pinned=pinned)
        return found, [(one.producer_id, one.first_offset) for one in aborted]

    def _refusal(self, place: int) -> ErrorCode:
        """Return the error code for a topic that the client may not read. Its ID may be unknown."""
        name = self._wanted[place][0]
        if isinstance(name, bytes):
            topic = self._broker.topics.by_id.get(name)
            if topic is None:
                return ErrorCode.NONE
            name = topic.name
        return self._broker.authorizer.refusal(self._caller, Api.FETCH, ResourceType.TOPIC, name)

    def _topic_is_unknown(self, place: int) -> bool:
        return self._wanted[place][0] not in self._broker.topics.by_id

    def refuse(self, place: int, code: ErrorCode) -> None:
        """Respond with an error for one partition."""
        number, aborted = self._wanted[place][1].partition, () if code in _NOT_THERE else None
        self._keep(place, Fetched(number, code, -1, -1, 0, -1, aborted), [])

    def _keep(self, place: int, fetched: Fetched, ranges: list[FileRange]) -> None:
        before = self._fetched[place]
        self._fetched[place] = fetched
        self._records_bytes += fetched.records_bytes - before.records_bytes
        self._error_count += (fetched.error != 0) - (before.error != 0)
        self._left_out.discard(place)
        self._ranges.pop(place, None)
        if ranges:
            self._ranges[place] = ranges

    async def confirm(self, timeout_s: float) -> None:
        """Refuse offsets behind the log end only as the owner: the next one may have them."""
        commits = self._broker.commits
        refused = [
            place
            for place in self.beyond
            if self._fetched[place].error == ErrorCode.OFFSET_OUT_OF_RANGE
            and (log := self._log(place)) is not None
            and commits.may_be_replaced(log)
        ]
        await confirm_refusals(commits, refused, self.refuse, timeout_s)

    async def loaded(self, place: int, until_s: float) -> bool:
        """Wait for the segment of a partition, or one before it; whether that came in time."""
        load = self._load(place, self._cold[place], or_one_before=True)
        left_s = until_s - asyncio.get_running_loop().time()
        if load is not None and left_s > 0:
            await asyncio.wait((load,), timeout=left_s)
        return load is not None and load.done()

    async def load(self, places: Iterable[int], moved: _Moved, until_s: float) -> None:
        """Wait for segments, until there are enough records."""
        for place in places if self._cold else ():
            while place in self._cold and (self.must_wait() or not self._records_bytes):
                if self._records_bytes and (moved.is_over or self._broker.cache.is_full):
                    return
                segment = self._cold[place]
                if not await self.loaded(place, until_s):
                    _LOG.warning("%s: a Fetch ends before it could be loaded", segment.path)
                    return
                self.read(place)

    def _load(self, place: int, segment: Segment, *, or_one_before: bool = False) -> Load | None:
        """Return the load of a segment; begins it, unless another one must end before."""
        cache, loads, wanted = self._broker.cache, self._caller.loads, self._wanted[place][1]
        source = segment.source
        executor = self._broker.executor if source is None else source.executor
        found, before = loads.get(segment, wanted.offset), loads.running(executor)
        if found is None and before is None and not (self._records_bytes and cache.is_full):
            size_bytes = min(wanted.max_bytes, self._max_bytes)
            found = loads.begin(cache, executor, segment, wanted.offset, size_bytes)
        return found or (before if or_one_before else None)

    def _took(
        self, place: int, segment: Segment, pinned: dict[Segment, tuple[OpenFile, SparseIndex]]
    ) -> bool:
        """Take what was loaded; returns whether to read the partition again."""
        try:
            offset = self._wanted[place][1].offset
            pinned[segment] = self._caller.loads.take(segment, offset)
        except (LogmirrorError, OSError) as error:
            if segment.is_deleted:
                return True  # deleted meanwhile; the next read returns OFFSET_OUT_OF_RANGE
            if segment.source is not None and isinstance(error, LogmirrorError):
                _LOG.warning("%s: %s", segment.path, error)
                self.refuse(place, ErrorCode.KAFKA_STORAGE_ERROR)
                return False
            _LOG.exception("%s: segment could not be read", segment.path)
            if (log := self._log(place)) is not None:
                log.disk_failed(error)
            self.refuse(place, ErrorCode.KAFKA_STORAGE_ERROR)
            return False
        return True

    def _leave_out(self, place: int) -> None:
        """Respond with no records of a partition, although there are some."""
        log, offsets = self._log(place), _NO_OFFSETS
        if log is not None:
            offsets = log.high_watermark, log.log_start, 0, log.last_stable_offset
        self._keep(place, Fetched(self._wanted[place][1].partition, 0, *offsets), [])
        self._left_out.add(place)

    @contextlib.contextmanager
    def watching(self, moved: _Moved) -> Iterator[bool]:
        """Report to `moved` which partitions move; yields False if too many requests wait."""
        load, count = self._broker.load, len(self._wanted)
        if load.waiting_partitions + count > self._broker.options.max_waiting_partitions:
            yield False
            return
        watched = []
        load.waiting_partitions += count
        try:
            for place, fetched in enumerate(self._fetched):
                log = self._log(place)
                if log is None:
                    moved.add(place)  # deleted since it was read
                    continue
                notify = functools.partial(moved.add, place)
                log.watch(notify)
                watched.append((log, notify))
                if (log.high_watermark, log.log_start) != (
                    fetched.high_watermark,
                    fetched.log_start,
                ):
                    moved.add(place)
            yield True
        finally:
            load.waiting_partitions -= count
            for log, notify in watched:
                log.unwatch(notify)

    def _count(self) -> None:
        """Count the response for the metrics."""
        for place in self._ranges:
            if (log := self._log(place)) is not None:
                log.fetched_bytes += self._fetched[place].records_bytes
        if self._error_count:
            for fetched in self._fetched:
                if fetched.error:
                    self._broker.traffic.errors[Api.FETCH, int(fetched.error)] += 1

    def ended(self, places: list[int]) -> list[Part]:
        """Encode the response; the next request begins with what was left out of it."""
        self._caller.fetch_from = self._first_left_out(places)
        wanted = {(one, self._wanted[place][1].offset) for place, one in self._cold.items()}
        self._caller.loads.keep(wanted)
        self._count()
        at = 0
        topics = []
        for name, count in self._topics:
            topics.append((name, self._fetched[at : at + count]))
            at += count
        pieces = pack_fetch_response(self._header.version, self._header.correlation_id, topics)
        parts: list[Part] = [pieces[0]]
        for piece, place in zip(pieces[1:], sorted(self._ranges), strict=True):
            parts += self._ranges[place]
            parts.append(piece)
        return parts

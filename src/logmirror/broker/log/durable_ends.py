"""The durable end of each partition, in one file of fixed slots, `LOG_DIR/.logmirror/durable-ends`.

A partition's end is written after each group commit, before its responses are sent: one pwrite, no
fsync. So it is exact after `kill -9`, which the page cache survives. `BackgroundFlush` flushes the
file every `FLUSH_S` while it changes. After a power loss an end is that much behind the log.

    file    header slot, slot, slot, ...; `_SLOT` bytes each
    slot    three copies of 64 bytes: topic ID (16), partition (uint32), generation (uint64),
            end offset (int64), written_from (int64), CRC-32 of these (uint32), zeros; big-endian

- E1 The valid copy with the greatest generation counts. A copy that a power loss tore is not valid.
- E2 An epoch begins with each flush. A slot's first write in an epoch takes another copy: not the
  newest one, which may be in the flush, and not the newest durable one. So there are three.
- E3 A slot belongs to a topic ID and a partition. Slots of deleted topics are used again, and no
  topic ever gets the ends of another one.
- E4 At a start the file is written again and flushed, because after a failed flush the page cache
  may show bytes that are not on the disk. So it is before the next flush after a failed one.

A partition without records has no slot. Methods run on one thread; only `flush` may run in another.
"""

from __future__ import annotations

import asyncio
import logging
import zlib
from concurrent.futures import ThreadPoolExecutor
from struct import Struct
from typing import TYPE_CHECKING, Final, NamedTuple

from logmirror.errors import CorruptionError, UnavailableError

if TYPE_CHECKING:
    import uuid
    from collections.abc import Callable, Collection, Iterable, Iterator
    from pathlib import Path

    from logmirror.broker.log.disk import Disk

_LOG: Final = logging.getLogger(__name__)
FLUSH_S: Final = 0.02
"""Time between two flushes while records arrive."""

_RETRY_S: Final = 1.0
_SURVIVES_S: Final = 5.0
_COPY: Final = 64
_COPIES: Final = 3
_SLOT: Final = _COPY * _COPIES
_MAGIC: Final = b"LMENDS01"
_GROWTH_SLOTS: Final = 64
_FIELDS: Final = Struct(">16sIQqq")
_CRC: Final = Struct(">I")


class DurableEnd(NamedTuple):
    """What is known to be on disk of a partition."""

    offset: int
    """Records before this offset were durable when it was recorded."""

    written_from: int
    """Segments from this offset on were written by this broker, so they hold every offset. Older
    ones may come from an archive."""


class EndSlot:
    """The slot of one partition.

    Attributes:
        end: What was recorded last; None: nothing yet.
    """

    __slots__ = ("_copy", "_ends", "_epochs", "_generation", "_number", "end", "partition", "topic")

    def __init__(self, ends: DurableEnds, topic: bytes, partition: int) -> None:
        self._ends = ends
        self.topic, self.partition = topic, partition
        self.end: DurableEnd | None = None
        self._number = 0
        """0, the header's: not reserved yet."""
        self._copy = self._generation = 0
        self._epochs = [-1] * _COPIES
        """When each copy was written."""

    def found(self, number: int, copy: int, generation: int, end: DurableEnd) -> None:
        """Take over what the file holds."""
        self._number, self._copy, self._generation, self.end = number, copy, generation, end
        self._epochs[copy] = 0

    @property
    def number(self) -> int:
        """The slot's place in the file; 0 without one."""
        return self._number

    def reserve(self) -> None:
        """Reserve space in the file, so that a full disk is noticed before a record is written.

        Raises:
            OSError: The file cannot grow.
        """
        if not self._number:
            self._number, self._generation = self._ends.take_place()

    def record(self, end: DurableEnd) -> None:
        """Write a durable end.

        Raises:
            OSError: The file cannot be written.
        """
        self.reserve()
        if self._epochs[self._copy] != self._ends.epoch:
            self._copy = self._next_copy()
            self._epochs[self._copy] = self._ends.epoch
        self._generation += 1
        self.end = end
        self.write()
        self._ends.on_change()

    async def survives(self) -> None:
        """Wait until what was recorded last survives a power loss; at most `_SURVIVES_S`.

        If flushes fail for longer, a warning is logged, and it may be lost.
        """
        try:
            async with asyncio.timeout(_SURVIVES_S):
                while self._epochs[self._copy] > self._ends.durable_epoch:  # noqa: ASYNC110  # once a move
                    await asyncio.sleep(FLUSH_S / 2)
        except TimeoutError:
            _LOG.warning("%s: not flushed in %d s", self._ends.path, _SURVIVES_S)

    def _next_copy(self) -> int:
        """Return the copy to write in a new epoch (E2)."""
        written = self._epochs.__getitem__
        durable = (copy for copy in range(_COPIES) if written(copy) <= self._ends.durable_epoch)
        kept = (self._copy, max(durable, key=written))
        return min((copy for copy in range(_COPIES) if copy not in kept), key=written)

    def write(self) -> None:
        """Write the current copy."""
        if self.end is None:
            return
        fields = _FIELDS.pack(self.topic, self.partition, self._generation, *self.end)
        data = fields + _CRC.pack(zlib.crc32(fields))
        self._ends.write(self._number * _SLOT + self._copy * _COPY, data)

    @property
    def generation(self) -> int:
        """The number of the last write to this place of the file."""
        return self._generation


class DurableEnds:
    """The file. Created if it does not exist.

    Attributes:
        epoch: Number of flushes that have begun, and 1.
        durable_epoch: What was written up to this epoch is durable.
        on_change: Called when an end was recorded.
        when_failed: Called with an error and the path when the file cannot be written, also in the
            thread of `flush`.

    Raises:
        CorruptionError: The file is not one of durable ends.
        UnavailableError: It cannot be read or written.
    """

    def __init__(self, path: Path, disk: Disk) -> None:
        self.epoch = 1
        self.durable_epoch = 0
        self.on_change: Callable[[], None] = lambda: None
        self.when_failed: Callable[[Exception, Path], None] = lambda _error, _path: None
        self.path, self._disk = path, disk
        self._has_failed = False
        self._slots: dict[tuple[bytes, int], EndSlot] = {}
        self._free: list[tuple[int, int]] = []
        try:
            if not path.exists():
                _create(path, disk)
            data = path.read_bytes()
            disk.rewrite(path, 0, len(data))
            self._file = disk.open_for_update(path)
        except OSError as error:
            raise _unavailable(error, path) from error
        if data[: len(_MAGIC)] != _MAGIC:
            raise CorruptionError(
                "the file of durable ends is damaged",
                hint="restore it from a backup. Without it the broker cannot recognize damage at "
                "the end of a log as such: if you accept that, remove the file",
                path=str(path),
            )
        self._end = -(-len(data) // _SLOT)
        self._read(data.ljust(self._end * _SLOT, b"\0"))  # a power loss may cut the file anywhere

    def _read(self, data: bytes) -> None:
        for number in range(1, self._end):
            slot = data[number * _SLOT : (number + 1) * _SLOT]
            copies = sorted(_valid_copies(slot), reverse=True)
            if not copies:
                if any(slot):
                    _LOG.warning("durable ends: slot %d is not readable, and not used", number)
                self._free.append((number, 0))
                continue
            generation, copy, topic, partition, end = copies[0]
            known = self.slot(topic, partition)
            if known.end is not None and known.end >= end:
                self._free.append((number, generation))
                continue
            if known.number:
                self._free.append((known.number, known.generation))
            known.found(number, copy, generation, end)

    def slot(self, topic: bytes, partition: int) -> EndSlot:
        """Return the slot of a partition. A new one takes no space in the file yet.

        Args:
            topic: The topic ID, 16 bytes.
            partition: The partition.
        """
        key = (topic, partition)
        if key not in self._slots:
            self._slots[key] = EndSlot(self, topic, partition)
        return self._slots[key]

    def keep_only(self, topics: Collection[uuid.UUID]) -> None:
        """Free the slots of all other topics."""
        kept = {topic_id.bytes for topic_id in topics}
        for topic, partition in [key for key in self._slots if key[0] not in kept]:
            self.forget_partition(topic, partition)

    def forget(self, topic: bytes, partition_count: int) -> None:
        """Free the slots of a deleted topic."""
        for partition in range(partition_count):
            self.forget_partition(topic, partition)

    def forget_partition(self, topic: bytes, partition: int) -> None:
        """Free the slot of a partition that is not on a disk any more."""
        slot = self._slots.pop((topic, partition), None)
        if slot is not None and slot.number:
            self._free.append((slot.number, slot.generation))

    def take_place(self) -> tuple[int, int]:
        """Return the number of a free slot and the generation of its last write.

        Raises:
            OSError: The file cannot grow.
        """
        if not self._free:
            self.write(self._end * _SLOT, bytes(_GROWTH_SLOTS * _SLOT))
            numbers = range(self._end, self._end + _GROWTH_SLOTS)
            self._end = numbers.stop
            self._free = [(number, 0) for number in reversed(numbers)]
        return self._free.pop()

    def write(self, position: int, data: bytes) -> None:
        """Write to the file, for its slots."""
        try:
            self._disk.write_at(self._file, position, data)
        except OSError as error:
            self.when_failed(error, self.path)
            raise

    def record_all(self, ends: Iterable[tuple[EndSlot, DurableEnd]]) -> None:
        """Record several ends, durably. Blocks; no other flush may be running.

        Raises:
            UnavailableError: The file cannot be written.
        """
        try:
            for slot, end in ends:
                slot.record(end)
            self.begin_flush()
            self.flush()
            self.finish_flush(failed=False)
        except OSError as error:
            raise _unavailable(error, self.path) from error

    def begin_flush(self) -> None:
        """Begin an epoch. The caller runs `flush`, and then `finish_flush`, before the next one."""
        if self._has_failed:
            for slot in self._slots.values():  # E4
                slot.write()
        self.epoch += 1

    def flush(self) -> None:
        """Make the file durable. Blocks.

        Raises:
            OSError: The flush failed.
        """
        try:
            self._disk.sync(self._file)
        except OSError as error:
            self.when_failed(error, self.path)
            raise

    def finish_flush(self, *, failed: bool) -> None:
        """Record the outcome of a flush."""
        self._has_failed = failed
        if not failed:
            self.durable_epoch = self.epoch - 1


def _create(path: Path, disk: Disk) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f"{path.name}.new")
    disk.write_synced(new, [_MAGIC.ljust(_SLOT, b"\0")])
    disk.rename(new, path)
    disk.sync_folder(path.parent)


def _unavailable(error: OSError, path: Path) -> UnavailableError:
    return UnavailableError(
        "the file of durable ends is not usable", path=str(path), cause=str(error)
    )


def _valid_copies(slot: bytes) -> Iterator[tuple[int, int, bytes, int, DurableEnd]]:
    """Yield generation, number of the copy, topic ID, partition and end of each valid copy."""
    for copy in range(_COPIES):
        fields = slot[copy * _COPY : copy * _COPY + _FIELDS.size]
        [crc] = _CRC.unpack_from(slot, copy * _COPY + _FIELDS.size)
        if zlib.crc32(fields) == crc:
            topic, partition, generation, *end = _FIELDS.unpack(fields)
            yield generation, copy, topic, partition, DurableEnd(*end)


class BackgroundFlush:
    """Flushes the file `FLUSH_S` after a change, one flush at a time. Idle without changes."""

    def __init__(self, ends: DurableEnds) -> None:
        self._ends = ends
        self._loop = asyncio.get_running_loop()
        self._executor = ThreadPoolExecutor(1, "logmirror-ends")
        self._timer: asyncio.TimerHandle | None = None
        self._running: asyncio.Future[None] | None = None
        self._is_changed = False
        ends.on_change = self._changed

    def _changed(self) -> None:
        self._is_changed = True
        if self._timer is None and self._running is None:
            self._timer = self._loop.call_later(FLUSH_S, self._begin)

    def _begin(self) -> None:
        self._timer, self._is_changed = None, False
        try:
            self._ends.begin_flush()
        except OSError as error:
            self._finished(error)
            return
        self._running = self._loop.run_in_executor(self._executor, self._ends.flush)
        self._running.add_done_callback(lambda done: self._finished(done.exception()))

    def _finished(self, error: BaseException | None) -> None:
        self._running = None
        self._ends.finish_flush(failed=error is not None)
        if error is not None:
            _LOG.warning("durable ends could not be flushed: %s", error)
        if self._is_changed or error is not None:
            wait_s = FLUSH_S if error is None else _RETRY_S
            self._timer = self._loop.call_later(wait_s, self._begin)

    async def close(self) -> None:
        """Flush what was written, and end the thread. A failure is logged."""
        if self._running is not None:
            await asyncio.wait([self._running])
        if self._timer is not None:
            self._timer.cancel()
            self._begin()
        if self._running is not None:
            await asyncio.wait([self._running])
        if self._timer is not None:
            self._timer.cancel()
        self._executor.shutdown()

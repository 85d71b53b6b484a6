"""List, check and classify the batches of a fetch response, a produce request or a segment.

Every batch is checked (structure, CRC-32C, ascending offsets) and classified; records are not
decoded. `logmirror.wire.records` defines what is legal.

Classification follows Kafka's consumer with read_committed. The broker lists every aborted
transaction that overlaps the records: producer ID and first offset. A transaction becomes active
with the first batch that ends at or after its first offset. While it is active, the transactional
batches of its producer are aborted; the producer's ABORT marker ends it. A list is valid only for
the response that contains it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from logmirror.errors import CorruptionError, InternalError, UsageError
from logmirror.wire.kernels_columns import FULL, OLD_MAGIC, WHY
from logmirror.wire.kernels_scan import (
    COLUMNS,
    KIND_ABORTED,
    KIND_CONTROL,
    KIND_DATA,
    STATE_WORDS,
    scan_batches,
)

if TYPE_CHECKING:
    from collections.abc import Sequence
    from mmap import mmap
    from typing import TypeAlias

    import numpy.typing as npt

    Buffer: TypeAlias = bytes | bytearray | memoryview | mmap | npt.NDArray[np.uint8]
    Words: TypeAlias = npt.NDArray[np.int64]

__all__ = [
    "KIND_ABORTED",
    "KIND_CONTROL",
    "KIND_DATA",
    "BatchScanner",
    "Batches",
    "address_of",
    "as_bytes_array",
]

_FIRST_CAPACITY: Final = 256
_HEADER_SIZE: Final = 61


def as_bytes_array(buffer: Buffer) -> npt.NDArray[np.uint8]:
    """Return a numpy view of a buffer. The view keeps the buffer alive and prevents resizing."""
    return np.frombuffer(buffer, np.uint8) if len(buffer) else _NOTHING  # numpy refuses empty ones


_NOTHING: Final = np.zeros(1, np.uint8)[:0]


def address_of(array: npt.NDArray[np.generic]) -> int:
    """Return the address of an array's memory, valid while the array lives."""
    address: int = array.__array_interface__["data"][0]  # four times as fast as `.ctypes.data`
    return address


class Batches:
    """The batches of one buffer, as columns; valid until the scanner scans again.

    Attributes:
        count: Number of whole batches.
        consumed_bytes: Where the last whole batch ends. A truncated batch is not consumed.
        needed_bytes: Size of the truncated batch; 0 if there is none or its size is unknown.
    """

    __slots__ = ("consumed_bytes", "count", "needed_bytes", "table")

    def __init__(self, table: Words, count: int, consumed_bytes: int, needed_bytes: int) -> None:
        self.table = table
        self.count = count
        self.consumed_bytes = consumed_bytes
        self.needed_bytes = needed_bytes

    def __len__(self) -> int:
        return self.count

    def _column(self, index: int) -> Words:
        return self.table[index, : self.count]

    @property
    def positions(self) -> Words:
        """Where each batch begins in the buffer."""
        return self._column(0)

    @property
    def sizes(self) -> Words:
        """Bytes of each whole batch."""
        return self._column(1)

    @property
    def base_offsets(self) -> Words:
        """First offset that each batch covers; ascending."""
        return self._column(2)

    @property
    def last_offsets(self) -> Words:
        """Last offset that each batch covers."""
        return self._column(3)

    @property
    def record_counts(self) -> Words:
        """Records in each batch as its header says; fewer than offsets after compaction."""
        return self._column(4)

    @property
    def attributes(self) -> Words:
        """The 16 attribute bits, as a signed number."""
        return self._column(5)

    @property
    def max_timestamps_ms(self) -> Words:
        """As the header says."""
        return self._column(6)

    @property
    def producer_ids(self) -> Words:
        """Producer id, -1: none."""
        return self._column(7)

    @property
    def producer_epochs(self) -> Words:
        """Producer epoch, -1: none."""
        return self._column(8)

    @property
    def base_sequences(self) -> Words:
        """Sequence of the first record, -1: none."""
        return self._column(9)

    @property
    def leader_epochs(self) -> Words:
        """Partition leader epoch, -1: none."""
        return self._column(10)

    def leader_epoch_at(self, offset: int) -> int:
        """Return the leader epoch of the batch that covers an offset; -1: no batch does."""
        at = int(np.searchsorted(self.last_offsets, offset))
        if at == self.count or int(self.base_offsets[at]) > offset:
            return -1
        return int(self.leader_epochs[at])

    @property
    def kinds(self) -> Words:
        """KIND_DATA, KIND_CONTROL or KIND_ABORTED."""
        return self._column(11)


class BatchScanner:
    """Scans one buffer after the other with a table that is used again. Not thread-safe."""

    def __init__(self) -> None:
        self._table: Words = np.empty((len(COLUMNS), _FIRST_CAPACITY), np.int64)
        self._state: Words = np.zeros(STATE_WORDS, np.int64)

    def scan(
        self,
        buffer: Buffer,
        size: int,
        *,
        aborted: Sequence[tuple[int, int]] = (),
        check_crc: bool = True,
    ) -> Batches:
        """List the batches in the first `size` bytes of `buffer`.

        Args:
            buffer: Contiguous bytes, writable or not.
            size: Bytes to look at.
            aborted: Producer id and first offset of each aborted transaction, in any order.
            check_crc: Whether checksums are verified.

        Returns:
            The whole batches. The table is the scanner's: valid until the next call.

        Raises:
            CorruptionError: A batch is wrong (facts `position`, `offset`, `why`, which is magic,
                length, crc, base-offset, last-offset-delta, count, codec, marker or record).
            UsageError: A batch has format v0 or v1 (facts `magic`, `offset`, `position`).
        """
        array = as_bytes_array(buffer)
        if not 0 <= size <= array.size:
            raise InternalError("scan beyond the buffer", size=size, buffer_bytes=array.size)
        state, ended = self._state, _NO_ABORTED if not aborted else _aborted_words(aborted)
        state[:] = 0
        state[2] = -1
        words = (address_of(array), size, int(check_crc))
        while True:
            capacity = self._table.shape[1]
            where = (address_of(self._table), capacity, address_of(state), address_of(ended))
            status = scan_batches(*words, *where)
            if status != FULL:
                break
            self._grow(min(2 * capacity, size // _HEADER_SIZE + 1))
        position, count, _, _, needed, offset, magic = state.tolist()
        if status < 0:
            raise _error(status, position, offset, magic)
        return Batches(self._table, count, position, needed)

    def _grow(self, capacity: int) -> None:
        # A full table is smaller than the largest possible one, so this always makes room.
        table = np.empty((len(COLUMNS), capacity), np.int64)
        table[:, : self._table.shape[1]] = self._table
        self._table = table


def _aborted_words(aborted: Sequence[tuple[int, int]]) -> Words:
    """The kernel's array; see `kernels_scan`."""
    entries = np.array(aborted, np.int64).reshape(-1, 2)
    entries = entries[np.argsort(entries[:, 1], kind="stable")]
    producers, slots = np.unique(entries[:, 0], return_inverse=True)
    sizes = np.array([len(entries), len(producers)], np.int64)
    flags = np.zeros(len(producers), np.int64)
    return np.concatenate([sizes, entries[:, 1], slots, producers, flags]).astype(np.int64)


_NO_ABORTED: Final = np.zeros(2, np.int64)


def _error(status: int, position: int, offset: int, magic: int) -> CorruptionError | UsageError:
    if status == OLD_MAGIC:
        return UsageError(
            "records are in a format older than Kafka 0.11",
            hint="Kafka rewrites them when it is upgraded or when they are produced again: use a "
            "source of Kafka 4.0 or later, or copy the topic into a new one first.",
            magic=magic,
            offset=offset,
            position=position,
        )
    return CorruptionError(
        "record batch breaks its format",
        hint="The source served damaged bytes; check its disks and compare its replicas.",
        position=position,
        offset=offset,
        why=WHY[status],
    )

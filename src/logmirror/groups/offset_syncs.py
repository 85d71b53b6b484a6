"""All offset syncs of one replica, and what they say about an offset.

A sync is a pair: the source's record at `upstream` is the replica's record at `downstream`. What
lies between two pairs is unknown, because offset gaps differ on both sides. So the translation of
an offset is the last pair at or before it: its `downstream` for the offset itself, one more for a
later offset. That is MirrorMaker's rule (KAFKA-12468), applied to all pairs instead of 64.

Invariants:
1. No unread record is skipped: the result is never behind the record that the group reads next.
2. A later pair with a lower offset on either side ends what was known above it: the replica was
   continued from an earlier offset, or one of the topics was recreated.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from logmirror.errors import CorruptionError
from logmirror.wire.columns import boolean_column
from logmirror.wire.mirrormaker import SYNC_BYTES, decode_sync_key

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from logmirror.model import TopicPartition

_INT64: Final = np.dtype(">i8")


class Sync(NamedTuple):
    """One pair of offsets of the same record."""

    upstream: int
    downstream: int


class SyncIndex:
    """The pairs of one partition, ascending in both offsets.

    Args:
        pairs: Shape (n, 2), in the order of the topic: upstream and downstream.
    """

    def __init__(self, pairs: NDArray[np.int64]) -> None:
        lowest = np.minimum.accumulate(pairs[::-1], axis=0)[::-1]
        is_kept = np.ones(len(pairs), dtype=bool)
        is_kept[:-1] = (pairs[:-1] < lowest[1:]).all(axis=1)
        self._upstream = np.ascontiguousarray(pairs[is_kept, 0])
        self._downstream = np.ascontiguousarray(pairs[is_kept, 1])

    def __len__(self) -> int:
        return len(self._upstream)

    @property
    def last(self) -> Sync:
        """The last pair of the topic. There is one."""
        return Sync(int(self._upstream[-1]), int(self._downstream[-1]))

    @property
    def pairs(self) -> NDArray[np.int64]:
        """Shape (n, 2): upstream and downstream."""
        return np.column_stack((self._upstream, self._downstream))

    def at_or_before(self, offset: int) -> Sync | None:
        """Return the last pair at or before a source offset; None if all are later."""
        place = int(self._upstream.searchsorted(offset, "right")) - 1
        if place < 0:
            return None
        return Sync(int(self._upstream[place]), int(self._downstream[place]))


class OffsetSyncs:
    """Collects the records of a topic of offset syncs. What is not a sync is counted and skipped.

    Attributes:
        skipped: Records without key or value, or too short.
    """

    def __init__(self) -> None:
        self._parts: dict[TopicPartition, list[NDArray[np.int64]]] = defaultdict(list)
        self._known: dict[bytes, TopicPartition] = {}
        self._indexes: dict[TopicPartition, SyncIndex] = {}
        self.skipped = 0

    def add(self, records: pa.Table) -> None:
        """Add records in the order of the topic; columns `key` and `value`, of bytes."""
        keyed = records.filter(pc.is_valid(records["key"])).combine_chunks()
        is_long = _lengths(keyed["value"].combine_chunks()) >= SYNC_BYTES
        syncs = keyed.filter(boolean_column(is_long)).combine_chunks()
        self.skipped += records.num_rows - syncs.num_rows
        if not syncs.num_rows:
            return
        pairs = _pairs(syncs["value"].combine_chunks())
        keys = syncs["key"].combine_chunks().dictionary_encode()
        numbers = np.frombuffer(keys.indices.buffers()[1], np.int32, count=len(keys))
        order = np.argsort(numbers, kind="stable")
        bounds = np.searchsorted(numbers[order], np.arange(len(keys.dictionary) + 1))
        for number, key in enumerate(keys.dictionary.to_pylist()):
            mine = pairs[order[bounds[number] : bounds[number + 1]]]
            partition = self._partition(key)
            if partition is None:
                self.skipped += len(mine)
            else:
                self._parts[partition].append(mine)

    def _partition(self, key: bytes) -> TopicPartition | None:
        if key not in self._known:
            try:
                self._known[key] = decode_sync_key(key)
            except CorruptionError:
                return None
        return self._known[key]

    def indexes(self) -> dict[TopicPartition, SyncIndex]:
        """Return the pairs by partition of the source."""
        for partition, parts in self._parts.items():
            known = self._indexes.get(partition)
            before = [] if known is None else [known.pairs]
            self._indexes[partition] = SyncIndex(np.concatenate([*before, *parts]))
        self._parts.clear()
        return self._indexes


def _lengths(values: pa.Array) -> NDArray[np.int32]:
    """Return the size of each value; of null 0, as decoded columns have it."""
    edges = np.frombuffer(values.buffers()[1], np.int32)
    return np.diff(edges[values.offset : values.offset + len(values) + 1])


def _pairs(values: pa.Array) -> NDArray[np.int64]:
    """Return the first two numbers of each value, which has at least `SYNC_BYTES`."""
    heads = pc.binary_slice(values, 0, SYNC_BYTES)
    heads = pa.concat_arrays([heads])  # without an offset of its own
    data = np.frombuffer(heads.buffers()[2], dtype=_INT64, count=2 * len(heads))
    return data.reshape(-1, 2).astype(np.int64)

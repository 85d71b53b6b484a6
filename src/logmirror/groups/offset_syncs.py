"""All offset syncs of one replica, and what they say about an offset.

A sync is a pair: the source's record at `upstream` is the replica's record at `downstream`. What
lies between two pairs is unknown, because offset gaps differ on both sides. So the translation of
an offset is the last pair at or before it: its `downstream` for the offset itself, one more for a
later offset. That is MirrorMaker's rule (KAFKA-12468), applied to all pairs instead of 64.

Invariants:
1. No unread record is skipped: the result is never behind the record that the group reads next.
2. A later pair with a lower offset on either side ends what was known above it: the replica was
   continued from an earlier offset, or one of the topics was recreated.
3. A pair with another topic ID ends all that was known: the replica's topic was recreated. Pairs of
   MirrorMaker have no ID.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from logmirror.errors import CorruptionError
from logmirror.wire.columns import boolean_column, fixed_column
from logmirror.wire.mirrormaker import SYNC_BYTES, TOPIC_ID, decode_sync_key

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from logmirror.model import TopicPartition

_INT64: Final = np.dtype(">i8")
_HEADER: Final = ["row", "name", "value"]
_UNKNOWN: Final = -1
"""The number of a topic ID that is not known."""


class _Part(NamedTuple):
    """Syncs of one partition, in the order of the topic."""

    pairs: NDArray[np.int64]
    ids: NDArray[np.int32]
    """Numbers of topic IDs."""


class Sync(NamedTuple):
    """One pair of offsets of the same record."""

    upstream: int
    downstream: int


class SyncIndex:
    """The pairs of one partition, ascending in both offsets.

    Args:
        pairs: Shape (n, 2), in the order of the topic: upstream and downstream.
        topic_id: The ID of the replica's topic that they are about; None: not known.
    """

    def __init__(self, pairs: NDArray[np.int64], topic_id: bytes | None = None) -> None:
        self.topic_id = topic_id
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
        self._parts: dict[TopicPartition, list[_Part]] = defaultdict(list)
        self._ids: dict[bytes, int] = {}
        """The topic IDs that syncs have, numbered."""

        self._known: dict[bytes, TopicPartition] = {}
        self._indexes: dict[TopicPartition, SyncIndex] = {}
        self.skipped = 0

    def add(self, records: pa.Table) -> None:
        """Add records in the order of the topic.

        Args:
            records: Columns `key` and `value`, of bytes, and perhaps `headers`.
        """
        keyed = records.filter(pc.is_valid(records["key"])).combine_chunks()
        is_long = _lengths(keyed["value"].combine_chunks()) >= SYNC_BYTES
        syncs = keyed.filter(boolean_column(is_long)).combine_chunks()
        self.skipped += records.num_rows - syncs.num_rows
        if not syncs.num_rows:
            return
        pairs, ids = _pairs(syncs["value"].combine_chunks()), self._numbers(syncs)
        keys = syncs["key"].combine_chunks().dictionary_encode()
        numbers = _indices(keys)
        order = np.argsort(numbers, kind="stable")
        bounds = np.searchsorted(numbers[order], np.arange(len(keys.dictionary) + 1))
        for number, key in enumerate(keys.dictionary.to_pylist()):
            mine = order[bounds[number] : bounds[number + 1]]
            partition = self._partition(key)
            if partition is None:
                self.skipped += len(mine)
            else:
                self._parts[partition].append(_Part(pairs[mine], ids[mine]))

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
            self._indexes[partition] = self._index(known, parts)
        self._parts.clear()
        return self._indexes

    def _index(self, known: SyncIndex | None, parts: list[_Part]) -> SyncIndex:
        if known is not None:
            number = _UNKNOWN if known.topic_id is None else self._ids[known.topic_id]
            parts = [_Part(known.pairs, np.full(len(known), number, np.int32)), *parts]
        pairs, ids = (np.concatenate(column) for column in zip(*parts, strict=True))
        numbers = ids[ids != _UNKNOWN]
        if not len(numbers):
            return SyncIndex(pairs)
        others = np.flatnonzero((ids != _UNKNOWN) & (ids != numbers[-1]))
        first = int(others[-1]) + 1 if len(others) else 0
        return SyncIndex(pairs[first:], list(self._ids)[numbers[-1]])

    def _numbers(self, syncs: pa.Table) -> NDArray[np.int32]:
        """Return the number of each sync's topic ID."""
        found = np.full(syncs.num_rows, _UNKNOWN, np.int32)
        if "headers" not in syncs.column_names:
            return found
        lists = syncs["headers"].combine_chunks()
        if not len(lists.values):
            return found
        edges = np.frombuffer(lists.buffers()[1], np.int32)[lists.offset :][: len(lists) + 1]
        rows = np.repeat(np.arange(len(lists)), np.diff(edges))
        columns = [lists.values.field(at).slice(edges[0], len(rows)) for at in (0, 1)]
        headers = pa.Table.from_arrays([fixed_column(pa.int64(), rows), *columns], _HEADER)
        headers = headers.filter(pc.is_valid(headers["value"])).combine_chunks()
        if not headers.num_rows:
            return found
        names, values = (headers[name].combine_chunks().dictionary_encode() for name in _HEADER[1:])
        is_id = np.array([name == TOPIC_ID for name in names.dictionary.to_pylist()])
        chosen = is_id[_indices(names)]
        rows = np.frombuffer(headers["row"].combine_chunks().buffers()[1], np.int64)
        ids = np.full(len(values.dictionary), _UNKNOWN, np.int32)
        for number in np.unique(_indices(values)[chosen]):
            ids[number] = self._ids.setdefault(values.dictionary[number].as_py(), len(self._ids))
        found[rows[: len(chosen)][chosen]] = ids[_indices(values)[chosen]]
        return found


def _indices(encoded: pa.DictionaryArray) -> NDArray[np.int32]:
    """`to_numpy` would load pandas."""
    return np.frombuffer(encoded.indices.buffers()[1], np.int32, count=len(encoded))


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

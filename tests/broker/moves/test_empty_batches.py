"""Goal: batches without records, which compaction leaves, are moved as they are.

Method: the broker's own cleaner leaves them: one that keeps the last sequence of a producer, and
one in the place of batches that are gone. Each codec has a producer. Batches are compared as bytes.
"""

from __future__ import annotations

import itertools
import time
from struct import unpack_from
from typing import TYPE_CHECKING, NamedTuple

import pytest

from broker.moves.test_moves import batches, contents, end_of
from kit.judges.clients import rows_by_librdkafka
from kit.judges.partition_client import LATEST, Appended
from kit.runs.cleaning import set_config
from kit.runs.commands import wait_until
from logmirror.wire.compression import Codec
from logmirror.wire.records import Record, encode_reference

if TYPE_CHECKING:
    from kit.judges.partition_client import PartitionClient

COUNT = 5
"""Records of a batch."""

FIRST_ID = 1_000
"""Of the producers, one for each codec."""


class Header(NamedTuple):
    """Some fields of a batch."""

    base_offset: int
    last_delta: int
    producer_id: int
    base_sequence: int
    record_count: int


def headers(data: bytes) -> list[Header]:
    found, position = list[Header](), 0
    while position < len(data):
        base_offset, length = unpack_from(">qi", data, position)
        [last_delta] = unpack_from(">i", data, position + 23)
        producer_id, _, sequence, count = unpack_from(">qhii", data, position + 43)
        found.append(Header(base_offset, last_delta, producer_id, sequence, count))
        position += 12 + length
    return found


def keyed(codec: Codec, key: bytes, *, producer: int = -1, sequence: int = -1) -> bytes:
    """A batch whose records have the keys `key` 0 to 4."""
    records = [
        Record(n, 1_700_000_000_000 + n, 0, key + b"%d" % n, b"%d" % sequence, ())
        for n in range(COUNT)
    ]
    epoch = 0 if producer != -1 else -1
    fields = {"producer_id": producer, "producer_epoch": epoch, "base_sequence": sequence}
    return encode_reference(records, codec=codec, **fields)


def second_of(codec: Codec) -> bytes:
    """The second batch of a codec's producer."""
    return keyed(codec, b"k", producer=FIRST_ID + codec, sequence=COUNT)


def write(partition: PartitionClient) -> None:
    """Each producer writes two batches, whose keys another one writes again."""
    for codec in Codec:
        first = keyed(codec, b"k", producer=FIRST_ID + codec, sequence=0)
        assert partition.produce(first).error == 0
        assert partition.produce(second_of(codec)).error == 0
        assert partition.produce(keyed(codec, b"kept %d " % codec)).error == 0
    assert partition.produce(keyed(Codec.NONE, b"k")).error == 0


def keeps_sequences(partition: PartitionClient) -> bool:
    """Whether all that is left of these producers is a batch without records each."""
    left = [one for one in headers(batches(partition)) if one.producer_id != -1]
    wanted = [(COUNT - 1, FIRST_ID + codec, COUNT, 0) for codec in Codec]
    return [one[1:] for one in left] == wanted


@pytest.mark.move("E38", "E40", "E52")
def test_e40_batches_without_records_are_copied(dirs):
    settings = {"min_cleanable_dirty_ratio": "0", "segment_ms": "300"}
    dirs.create("t", cleanup_policy="compact", **settings)
    numbers = itertools.count()
    with dirs.partition("t") as partition:
        write(partition)

        def is_compacted() -> bool:
            time.sleep(0.3)  # then the next record begins a segment
            last = keyed(Codec.NONE, b"last %d " % next(numbers))
            assert partition.produce(last).error == 0
            return keeps_sequences(partition)

        wait_until(is_compacted, what=lambda: f"compaction: {headers(batches(partition))}")
        set_config(dirs.bootstrap, "t", "min.cleanable.dirty.ratio", "1")
        before, rows = batches(partition), list(rows_by_librdkafka(dirs.bootstrap, "t"))
        empty = [one for one in headers(before) if one.record_count == 0]
        assert {one.producer_id == -1 for one in empty} == {True, False}
        for target in (dirs.b, dirs.a, dirs.b):
            dirs.move("t", target)
            assert batches(partition) == before
            assert contents(partition)
            assert end_of(before) == partition.list_offset(LATEST)[2]
            assert list(rows_by_librdkafka(dirs.bootstrap, "t")) == rows
        for codec in Codec:
            assert partition.produce(second_of(codec)).error == 0, "a duplicate"
        assert partition.log_end == end_of(before)
    dirs.broker.kill()
    dirs.broker.start()
    with dirs.partition("t") as partition:
        assert batches(partition) == before
        for codec in Codec:
            third = keyed(codec, b"k", producer=FIRST_ID + codec, sequence=2 * COUNT)
            assert partition.produce(third) == Appended(0, end_of(before) + COUNT * codec)

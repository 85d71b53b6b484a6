"""Goal: an offset sync never leads a group past a record that it has not read.

Method: a replica is made up record by record, with restarts, gaps and recreated topics, and each
offset of the source is translated; vectors of MirrorMaker's own classes.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from logmirror.groups.offset_syncs import OffsetSyncs, Sync, SyncIndex
from logmirror.groups.replica_logs import Replica, translation
from logmirror.groups.translation import Log, Translated, preserved, translated
from logmirror.mirror.ports import KafkaSpec
from logmirror.model import TopicPartition
from logmirror.wire.columns import HEADERS_TYPE
from logmirror.wire.mirrormaker import TOPIC_ID, encode_sync, encode_sync_key

ORDERS = TopicPartition("orders", 3)


def index(*pairs: tuple[int, int]) -> SyncIndex:
    return SyncIndex(np.array(pairs, dtype=np.int64).reshape(-1, 2))


def with_ids(*records: tuple[int, int, bytes | None]) -> OffsetSyncs:
    """Syncs of a partition, each with the ID of its replica's topic."""
    rows = [(encode_sync_key(ORDERS), encode_sync(up, down)) for up, down, _ in records]
    headers = [[("other", b"x"), (TOPIC_ID, one)] if one else [] for _, _, one in records]
    syncs = OffsetSyncs()
    for part in (slice(0, 2), slice(2, None)):  # as two fetches
        if rows[part]:
            column = pa.array(headers[part], HEADERS_TYPE)
            syncs.add(table(*rows[part]).append_column("headers", column))
    return syncs


def test_a_sync_with_another_topic_id_ends_what_was_known():
    old, new = b"o" * 16, b"n" * 16
    found = with_ids((1, 1, None), (5, 5, old), (8, 50, new), (9, 51, None)).indexes()[ORDERS]

    assert (found.topic_id, len(found)) == (new, 2)
    assert found.at_or_before(7) is None
    assert with_ids((1, 1, None), (5, 5, old)).indexes()[ORDERS].pairs.tolist() == [[1, 1], [5, 5]]
    assert with_ids((1, 1, None)).indexes()[ORDERS].topic_id is None


@pytest.mark.parametrize(
    "headers", [[(TOPIC_ID, None)], [("other", None)], [("other", b"n" * 16)], []]
)
def test_a_header_that_is_no_id_says_nothing(headers):
    syncs = with_ids((1, 1, b"o" * 16))
    row = table((encode_sync_key(ORDERS), encode_sync(5, 5)))
    syncs.add(row.append_column("headers", pa.array([headers], HEADERS_TYPE)))

    found = syncs.indexes()[ORDERS]

    assert (found.topic_id, found.pairs.tolist()) == (b"o" * 16, [[1, 1], [5, 5]])


@pytest.mark.parametrize(
    ("topic_id", "expected"), [(b"n" * 16, 100), (b"o" * 16, 151), (None, 151)]
)
def test_syncs_of_a_replica_that_was_recreated_translate_nothing(topic_id, expected):
    written = KafkaSpec(
        cluster=None, name="standby", topic="orders", mirror="m", offsets="translate"
    )
    replica = Replica.of("m", ORDERS, written)
    syncs = with_ids((50, 150, b"o" * 16)).indexes()

    found = translation(replica, 51, LOG, syncs, topic_id)

    assert (found.offset, found.cause == "recreated") == (expected, expected == 100)


def table(*records: tuple[bytes | None, bytes | None]) -> pa.Table:
    keys, values = zip(*records, strict=True)
    return pa.table({"key": pa.array(keys, pa.binary()), "value": pa.array(values, pa.binary())})


def test_the_last_pair_at_or_before_an_offset():
    found = index((10, 5), (20, 15), (30, 21))

    assert found.at_or_before(9) is None
    assert [found.at_or_before(at) for at in (10, 19, 20, 99)] == [
        Sync(10, 5),
        Sync(10, 5),
        Sync(20, 15),
        Sync(30, 21),
    ]


def test_a_copy_continued_from_an_earlier_offset_ends_what_was_known_above():
    found = index((10, 10), (20, 20), (30, 30), (15, 31), (25, 41))

    assert [found.at_or_before(at) for at in (14, 15, 29, 40)] == [
        Sync(10, 10),
        Sync(15, 31),
        Sync(25, 41),
        Sync(25, 41),
    ]


def test_a_recreated_copy_ends_what_was_known_of_the_former():
    """MirrorMaker translates 199 to 252 here, beyond the end of the new topic."""
    found = index((100, 200), (150, 251), (200, 10))

    assert found.at_or_before(199) is None
    assert found.at_or_before(200) == Sync(200, 10)


def test_records_of_the_topic_in_any_order_of_partitions():
    other = TopicPartition("a-topic", 0)
    syncs = OffsetSyncs()
    syncs.add(
        table(
            (encode_sync_key(ORDERS), encode_sync(1, 1)),
            (encode_sync_key(other), encode_sync(7, 2)),
            (encode_sync_key(ORDERS), encode_sync(5, 4) + b"more"),
        )
    )
    syncs.add(table((encode_sync_key(ORDERS), encode_sync(9, 8))))

    found = syncs.indexes()

    assert {partition: len(one) for partition, one in found.items()} == {ORDERS: 3, other: 1}
    assert [found[ORDERS].at_or_before(at) for at in (1, 8, 9)] == [
        Sync(1, 1),
        Sync(5, 4),
        Sync(9, 8),
    ]
    assert syncs.skipped == 0


@pytest.mark.parametrize(
    ("key", "value"),
    [
        (None, encode_sync(1, 1)),
        (encode_sync_key(ORDERS), None),
        (encode_sync_key(ORDERS), b"short"),
        (b"\0\5t\0\0\0\0", encode_sync(1, 1)),
        (b"", encode_sync(1, 1)),
    ],
)
def test_what_is_not_a_sync_is_counted_and_hides_no_other(key, value):
    syncs = OffsetSyncs()
    syncs.add(table((encode_sync_key(ORDERS), encode_sync(1, 1)), (key, value)))
    syncs.add(table((key, value)))

    assert syncs.skipped == 2
    assert len(syncs.indexes()[ORDERS]) == 1


LOG = Log(start=100, end=200)


@pytest.mark.parametrize(
    ("offset", "expected"),
    [
        (100, Translated(100, 100)),
        (200, Translated(200, 200)),
        (230, Translated(200, 200, "the replica ends 30 offsets before the group", "beyond-end")),
        (99, Translated(100, 99, "the replica begins after the group's offset", "before-start")),
    ],
)
def test_an_offset_in_a_copy_that_keeps_offsets(offset, expected):
    assert preserved(offset, LOG) == expected


@pytest.mark.parametrize(
    ("offset", "expected"),
    [
        (50, Translated(150, 50)),
        (51, Translated(151, 51)),
        (60, Translated(151, 51, cause="between-syncs")),
        (
            49,
            Translated(
                100, 0, "the group's offset is before the oldest offset sync", "before-syncs"
            ),
        ),
    ],
)
def test_an_offset_in_a_copy_with_new_offsets(offset, expected):
    assert translated(offset, LOG, index((50, 150))) == expected


def test_an_offset_that_is_not_known():
    assert translated(5, LOG, None).offset is None
    found = translated(60, Log(0, 10), index((50, 150)))
    assert (found.offset, found.reason) == (
        0,
        "the offset syncs are about another log: its topic was recreated or truncated",
    )
    assert translated(60, Log(180, 200), index((50, 150))).offset == 180


@st.composite
def copies(draw: st.DrawFn) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """A replica: its records (source offset, own offset), and the syncs that were written of it."""
    exist = sorted(draw(st.sets(st.integers(0, 40), min_size=1)))
    records: list[tuple[int, int]] = []
    syncs: list[tuple[int, int]] = []
    at = down = 0
    for _ in range(draw(st.integers(1, 5))):
        if records and draw(st.booleans()):
            at = draw(st.integers(0, at))  # continued from an earlier record: copied twice
        if records and draw(st.integers(0, 5)) == 0:
            records, down = [], 0  # the destination's topic was recreated
        for up in exist[at : at + draw(st.integers(1, 8))] or exist[-1:]:
            down += draw(st.sampled_from([1, 1, 2, 3]))
            records.append((up, down))
            if len(records) == 1 or draw(st.booleans()):
                syncs.append((up, down))
        at = exist.index(records[-1][0]) + 1
    return records, syncs


@given(copies())
def test_no_unread_record_is_skipped(copy):
    records, syncs = copy
    found = index(*syncs)
    log = Log(0, records[-1][1] + 1)
    for offset in range(records[-1][0] + 3):
        to = translated(offset, log, found).offset
        assert to is not None
        # Each record that the group has not read is still to come: behind that offset, or when
        # the replica, which was continued from an earlier offset, has reached it again.
        unread = {up for up, _ in records if offset <= up <= records[-1][0]}
        assert unread <= {up for up, down in records if down >= to}


@given(copies())
def test_translation_never_falls_as_the_group_moves_on(copy):
    records, syncs = copy
    found = index(*syncs)
    log = Log(0, records[-1][1] + 1)
    offsets = [translated(at, log, found).offset for at in range(records[-1][0] + 3)]
    assert offsets == sorted(offsets)

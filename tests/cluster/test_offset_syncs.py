"""Offset syncs are those of MirrorMaker 2: the same bytes, written by the same rule.

Method: byte vectors that its own classes produced; its rule, implemented record by record from its
description, compared with logmirror's, which works on runs; a topic read back by confluent-kafka.
"""

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kit.fakes.scripted import SteppingClock
from kit.judges.clients import rows_by_librdkafka
from logmirror.clock import SYSTEM_CLOCK
from logmirror.cluster.client import ClusterClient
from logmirror.cluster.offset_syncs import (
    RETRY_MS,
    OffsetSyncWriter,
    Run,
    SyncRule,
    create_sync_topic,
    thinned,
)
from logmirror.cluster.properties import connection_settings
from logmirror.errors import CorruptionError
from logmirror.model import TopicPartition
from logmirror.wire.mirrormaker import (
    OffsetSync,
    decode_sync,
    encode_sync,
    encode_sync_key,
    syncs_topic,
)

VECTORS = [
    (
        OffsetSync("topic1", 2, 3, 4),
        "0006746f7069633100000002",
        "00000000000000030000000000000004",
    ),
    (
        OffsetSync("orders", 11, 1_000_000, 900_000),
        "00066f72646572730000000b",
        "00000000000f424000000000000dbba0",
    ),
]


@pytest.mark.parametrize(("sync", "key", "value"), VECTORS)
def test_bytes_are_those_of_mirrormaker(sync, key, value):
    assert encode_sync_key(TopicPartition(sync.topic, sync.partition)).hex() == key
    assert encode_sync(sync.upstream, sync.downstream).hex() == value
    assert decode_sync(bytes.fromhex(key), bytes.fromhex(value)) == sync
    assert decode_sync(bytes.fromhex(key) + b"more", bytes.fromhex(value) + b"more") == sync


@pytest.mark.parametrize(
    ("key", "value"),
    [
        (None, b"\0" * 16),
        (b"\0\1t\0\0\0\0", None),
        (b"", b""),
        (b"\0\2t\0\0\0", b"\0" * 16),
        (b"\0\1t\0\0\0\0", b"\0" * 15),
        (b"\xff\xfft\0\0\0\0", b"\0" * 16),
        (b"\0\1\xff\0\0\0\0", b"\0" * 16),
    ],
)
def test_what_is_no_sync_is_refused(key, value):
    with pytest.raises(CorruptionError):
        decode_sync(key, value)


def test_the_topic_is_named_after_the_destination():
    assert syncs_topic("standby") == "mm2-offset-syncs.standby.internal"
    assert syncs_topic("a copy") is None
    assert syncs_topic("x" * 250) is None


def by_record(pairs, lag_max):
    """MirrorMaker's rule as it is described: for each record, with its own words."""
    previous_up = previous_down = last_sync_down = -1
    syncs = []
    for up, down in pairs:
        no_sync_yet = last_sync_down == -1
        too_far = down - (last_sync_down + 1) >= lag_max
        skipped = up - previous_up != 1
        cut = down < previous_down
        if no_sync_yet or too_far or skipped or cut:
            syncs.append((up, down))
            last_sync_down = down
        previous_up, previous_down = up, down
    return syncs


@pytest.mark.parametrize(
    ("lag_max", "syncs"),
    [
        (100, [0, 101, 202, 303]),
        (10, list(range(0, 400, 11))),
        (1, list(range(0, 400, 2))),
        (0, list(range(400))),
    ],
)
def test_contiguous_records_are_synced_at_even_distances(lag_max, syncs):
    rule = SyncRule(lag_max)
    assert rule.due([Run(0, 0, 150), Run(150, 150, 250)]) == [(at, at) for at in syncs]
    last = [] if syncs[-1] == 399 else [(399, 399)]
    assert rule.flush() == last
    assert rule.flush() == []


def test_mm_22_mirrormakers_own_example_gives_the_same_syncs():
    pairs = [(0, 100), (2, 102), (3, 152), (4, 153), (5, 154), (6, 203), (7, 204), (2, 206)]
    pairs += [(3, 207), (4, 3), (5, 4), (7, 6)]
    rule = SyncRule(50)
    syncs = [bool(rule.due([Run(up, down, 1)])) for up, down in pairs]
    assert syncs == [letter == "T" for letter in "TTFTFFTTFTFT"]


@given(
    st.lists(st.tuples(st.integers(0, 40), st.integers(-20, 40), st.integers(0, 60)), max_size=12),
    st.integers(0, 30),
)
def test_runs_are_synced_as_their_records_would_be(steps, lag_max):
    runs, up, down = [], 0, 0
    for skip_up, skip_down, count in steps:
        up, down = up + skip_up, max(down + skip_down, 0)
        runs.append(Run(up, down, count))
        up, down = up + count, down + count
    pairs = [(run.upstream + i, run.downstream + i) for run in runs for i in range(run.count)]
    rule = SyncRule(lag_max)
    syncs = [pair for run in runs for pair in rule.due([run])]
    assert syncs == by_record(pairs, lag_max)
    assert rule.flush() == ([pairs[-1]] if pairs and pairs[-1] != syncs[-1] else [])


@given(st.integers(0, 500))
def test_few_of_many_syncs_include_the_first_and_the_last(count):
    pairs = [(at, 2 * at) for at in range(count)]
    kept = thinned(pairs)
    assert len(kept) == min(count, 10)
    assert kept == sorted(set(kept))
    assert set(kept) <= set(pairs)
    assert not pairs or (kept[0], kept[-1]) == (pairs[0], pairs[-1])


def test_syncs_stand_in_a_compacted_topic_with_one_partition(apache_kafka, topic_name):
    """Also MM-51."""
    with ClusterClient(connection_settings(apache_kafka.bootstrap, {})) as client:
        create_sync_topic(client, topic_name, SYSTEM_CLOCK, mirror="m")
        create_sync_topic(client, topic_name, SYSTEM_CLOCK, mirror="m")  # it is there
        described = client.topic(syncs_topic(topic_name))
        assert sorted(described.partitions) == [0]
        assert client.describe_topic_configs(described.name)["cleanup.policy"] == "compact"
        with client.pipeline() as pipeline:
            sync_writer = OffsetSyncWriter(pipeline, topic_name, SYSTEM_CLOCK, mirror="m")
            sync_writer.write(
                TopicPartition("orders", 11), [(1_000_000, 900_000), (1_000_101, 900_101)]
            )
            sync_writer.write(TopicPartition("topic1", 2), [(3, 4)], bytes(range(16)))
            sync_writer.write(TopicPartition("topic1", 2), [])
            sync_writer.finish()
        found = list(rows_by_librdkafka(apache_kafka.bootstrap, described.name))
    assert [(row.key.hex(), row.value.hex()) for row in found] == [
        ("00066f72646572730000000b", "00000000000f424000000000000dbba0"),
        ("00066f72646572730000000b", struct.pack(">qq", 1_000_101, 900_101).hex()),
        ("0006746f7069633100000002", "00000000000000030000000000000004"),
    ]
    assert [row.headers for row in found] == [(), (), ((b"logmirror.topic-id", bytes(range(16))),)]


@pytest.mark.parametrize("creates", ["the writer", "another client"])
def test_syncs_resume_after_the_topic_was_missing(apache_kafka, topic_name, creates, caplog):
    caplog.set_level("INFO", logger="logmirror.mirror")
    clock, orders = SteppingClock(), TopicPartition("orders", 0)
    with (
        ClusterClient(connection_settings(apache_kafka.bootstrap, {})) as client,
        client.pipeline() as pipeline,
    ):

        def create():
            create_sync_topic(client, topic_name, SYSTEM_CLOCK, mirror="m")

        own = {"create": create} if creates == "the writer" else {}
        sync_writer = OffsetSyncWriter(pipeline, topic_name, clock, mirror="m", **own)

        def write(offset):
            sync_writer.write(orders, [(offset, offset)])
            sync_writer.finish()

        write(0)
        if creates == "another client":
            clock.ms += RETRY_MS[0]
            write(1)  # refused again: the next pause is twice as long
            create()
            clock.ms += RETRY_MS[0]
        write(2)
        clock.ms += RETRY_MS[0]
        write(3)
        write(4)
        found = list(rows_by_librdkafka(apache_kafka.bootstrap, syncs_topic(topic_name)))
    assert [decode_sync(row.key, row.value).upstream for row in found] == [3, 4]
    events = [one.message.partition(":")[0] for one in caplog.records]
    assert events == ["offset syncs paused", "offset syncs resumed"]


def test_a_missing_topic_pauses_syncs_and_nothing_else(apache_kafka, topic_name):
    with (
        ClusterClient(connection_settings(apache_kafka.bootstrap, {})) as client,
        client.pipeline() as pipeline,
    ):
        sync_writer = OffsetSyncWriter(pipeline, topic_name, SYSTEM_CLOCK, mirror="m")
        for offset in range(3):
            sync_writer.write(TopicPartition("orders", 0), [(offset, offset)])
            sync_writer.finish()
        assert pipeline.in_flight() == 0
        assert syncs_topic(topic_name) not in client.topics()

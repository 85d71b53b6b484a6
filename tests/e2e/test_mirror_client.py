"""MirrorMaker 2's Java client reads logmirror's checkpoints and heartbeats, and agrees on names.

Method: records are written with logmirror's codec to topics with the names of logmirror's policy;
Apache Kafka's `RemoteClusterUtils` and `MirrorClient` read them, as an application that fails over.
The broker is shared, so aliases are those of one test.
"""

from __future__ import annotations

import itertools
import re
from typing import TYPE_CHECKING

import pytest

from kit.judges.clients import Message, produce
from kit.judges.java_program import JavaError
from kit.judges.mirror_client import (
    DEFAULT_POLICY,
    IDENTITY_POLICY,
    MirrorClient,
    Position,
)
from kit.tiers import all_but
from logmirror.wire.mirrormaker import (
    Checkpoint,
    Heartbeat,
    encode_checkpoint,
    encode_heartbeat,
)
from logmirror.wire.replication_policy import HEARTBEATS, ReplicationPolicy

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kit.servers.kafka import ApacheKafka

pytestmark = pytest.mark.xdist_group("e2e-groups")

COMPACTED = {"cleanup.policy": "compact"}
CLASS = "replication.policy.class"
SEPARATOR = "replication.policy.separator"
INTERNAL = "replication.policy.internal.topic.separator.enabled"
POLICIES = {
    "default": ({CLASS: DEFAULT_POLICY}, ReplicationPolicy()),
    "identity": (
        {CLASS: IDENTITY_POLICY, "source.cluster.alias": "A"},
        ReplicationPolicy(identity=True, source_alias="A"),
    ),
    "separator": ({SEPARATOR: "__"}, ReplicationPolicy(separator="__")),
    "separator-of-replicas": (
        {SEPARATOR: "__", INTERNAL: "false"},
        ReplicationPolicy(separator="__", separates_internal_topics=False),
    ),
}
each_policy = pytest.mark.parametrize(
    "name", all_but(POLICIES, "default", "identity", reason="names alone differ: compared below")
)


def write(broker: ApacheKafka, topic: str, records: Iterable[tuple[bytes | None, bytes | None]]):
    broker.create_topic(topic, config=COMPACTED)
    produce(broker.bootstrap, topic, [Message(key, value) for key, value in records])


# -- offsets ---------------------------------------------------------------------------------------


@each_policy
def test_java_translates_a_group_with_the_last_checkpoint_of_each_partition(
    kafka_431, topic_name, name
):
    properties, policy = POLICIES[name]
    alias, group = topic_name, "Gr\u00fc\u00dfe"
    here = policy.checkpoint_topic(alias, "B", "orders")
    written = [
        Checkpoint(group, here, 0, 10, 11, "first"),
        Checkpoint(group, here, 1, 20, 21, ""),
        Checkpoint("other", here, 0, 999, 998, ""),
        Checkpoint(group, here, 2, 2**40, 2**63 - 1, "\u03b1\U0001f600"),
        Checkpoint("other", here, 5, 999, 998, ""),
        Checkpoint(group, "another", 0, 0, 0, "{}"),
        Checkpoint(group, here, 0, 30, 31, "last"),
        Checkpoint(group, here, 1, 5, 6, "rewound"),
    ]
    topic = policy.checkpoints_topic(alias)
    write(kafka_431, topic, map(encode_checkpoint, written))

    with MirrorClient(kafka_431.bootstrap, properties) as client:
        expected = {
            (here, 0): Position(31, "last"),
            (here, 1): Position(6, "rewound"),
            (here, 2): Position(2**63 - 1, "\u03b1\U0001f600"),
            ("another", 0): Position(0, "{}"),
        }
        assert client.translate_offsets(alias, group) == expected
        assert client.remote_consumer_offsets(alias, group) == expected
        assert client.remote_consumer_offsets(alias, "other") == {
            (here, 0): Position(998, ""),
            (here, 5): Position(998, ""),
        }
        assert client.translate_offsets(alias, "unknown") == {}
        assert client.checkpoints(topic) == written


def test_java_reads_the_longest_strings(kafka_431, topic_name):
    longest = Checkpoint("g" * 32_767, "t" * 32_767, 0, 1, 2, "m" * 32_767)
    topic = ReplicationPolicy().checkpoints_topic(topic_name)
    write(kafka_431, topic, [encode_checkpoint(longest)])

    with MirrorClient(kafka_431.bootstrap) as client:
        assert client.checkpoints(topic) == [longest]


def test_java_skips_damaged_checkpoints_and_ignores_later_fields(kafka_431, topic_name):
    key, value = encode_checkpoint(Checkpoint("g", "t", 0, 1, 2, "old"))
    key_1, value_1 = encode_checkpoint(Checkpoint("g", "t", 1, 3, 4, "version 7"))
    _, newer = encode_checkpoint(Checkpoint("g", "t", 0, 5, 6, "more"))
    records = [
        (key, value),
        (b"", b""),
        (key, value[:-1]),
        (key[:-1], value),
        (key, value[:18] + b"\xff\xff"),
        (key, newer + b"later"),
        (key_1, b"\0\7" + value_1[2:]),
    ]
    write(kafka_431, ReplicationPolicy().checkpoints_topic(topic_name), records)

    with MirrorClient(kafka_431.bootstrap) as client:
        assert client.translate_offsets(topic_name, "g") == {
            ("t", 0): Position(6, "more"),
            ("t", 1): Position(4, "version 7"),
        }


@pytest.mark.parametrize("missing", ["key", "value"])
def test_java_fails_on_a_null(kafka_431, topic_name, missing):
    """So a checkpoint is never deleted by a tombstone."""
    key, value = encode_checkpoint(Checkpoint("g", "t", 0, 1, 2, ""))
    record = (None, value) if missing == "key" else (key, None)
    topic = ReplicationPolicy().checkpoints_topic(topic_name)
    kafka_431.create_topic(topic)  # with compaction, a broker refuses a null key
    produce(kafka_431.bootstrap, topic, [Message(key, value), Message(*record)])

    with (
        MirrorClient(kafka_431.bootstrap) as client,
        pytest.raises(JavaError, match="NullPointerException"),
    ):
        client.translate_offsets(topic_name, "g")


# -- heartbeats ------------------------------------------------------------------------------------


@each_policy
def test_java_follows_the_chain_of_clusters(kafka_431, topic_name, name):
    properties, policy = POLICIES[name]
    near, far, unrelated = (f"{topic_name}-{number}" for number in range(3))
    of_near = policy.remote_topic(near, HEARTBEATS)
    of_far = policy.remote_topic(near, policy.remote_topic(far, HEARTBEATS))
    checkpoints = policy.checkpoints_topic(near)
    replica = policy.remote_topic(near, f"{topic_name}-orders")
    beats = {
        of_near: [Heartbeat(far, near, 0), Heartbeat(far, near, 2**62)],
        of_far: [Heartbeat("\u00e4", far, 1_700_000_000_000)],
    }
    for topic, written in beats.items():
        write(kafka_431, topic, map(encode_heartbeat, written))
    for topic in (checkpoints, replica, f"{topic_name}{HEARTBEATS}"):
        kafka_431.create_topic(topic)

    with MirrorClient(kafka_431.bootstrap, properties) as client:
        for topic, written in beats.items():
            assert client.heartbeats(topic) == written
        found = {name for name in client.upstream_clusters() if name.startswith(topic_name)}
        assert found == {near, far} == policy.upstream_clusters(beats)
        assert client.replication_hops(near) == 1 == policy.replication_hops(beats, near)
        assert client.replication_hops(far) == 2 == policy.replication_hops(beats, far)
        assert client.replication_hops(unrelated) == -1
        assert policy.replication_hops(beats, unrelated) is None
        assert {t for t in client.heartbeat_topics() if topic_name in t} == set(beats)
        assert {t for t in client.checkpoint_topics() if topic_name in t} == {checkpoints}
        assert replica in client.remote_topics()
        assert checkpoints not in client.remote_topics()


# -- names -----------------------------------------------------------------------------------------

PARTS = [".", "_", "-", "a", "source", "heartbeats", "beats", "mm2", "checkpoints", "internal"]
REPEATED = [
    f"{chain}.{end}" for chain in ("a.a.source", "a.b.a.source") for end in ("t", HEARTBEATS)
]
TOPICS = [
    *REPEATED,
    *("".join(parts) for count in range(5) for parts in itertools.product(PARTS, repeat=count)),
]


@pytest.mark.parametrize(
    ("properties", "policy"),
    [
        *POLICIES.values(),
        ({CLASS: IDENTITY_POLICY}, ReplicationPolicy(identity=True)),
        (
            {CLASS: IDENTITY_POLICY, SEPARATOR: "eat"},  # splits `heartbeats` itself
            ReplicationPolicy(identity=True, separator="eat"),
        ),
    ],
    ids=[*POLICIES, "no-alias", "separator-in-heartbeats"],
)
def test_java_decides_the_same_by_each_name(properties, policy):
    with MirrorClient("localhost:1", properties) as client:
        responses = client.names("source", TOPICS)

    assert len(responses) == len(TOPICS) > 10_000
    for topic, java in zip(TOPICS, responses, strict=True):
        assert {
            "remote_topic": policy.remote_topic("source", topic),
            "topic_source": policy.topic_source(topic),
            "upstream_topic": policy.upstream_topic(topic),
            "original_topic": policy.original_topic(topic),
            "offset_syncs_topic": policy.offset_syncs_topic("source"),
            "checkpoints_topic": policy.checkpoints_topic("source"),
            "is_heartbeats": policy.is_heartbeats(topic),
            "is_checkpoints": policy.is_checkpoints(topic),
            "is_internal": policy.is_internal(topic),
            "hops": policy.hops(topic, "source") or -1,
        } == {
            **{name: value for name, value in java.items() if name != "sources"},
            "remote_topic": legal(java["remote_topic"]),
        }, topic
        if java["is_heartbeats"]:
            assert policy.upstream_clusters([topic]) == {*java["sources"]} - {""}, topic


def legal(name: str) -> str | None:
    is_legal = re.fullmatch(r"[A-Za-z0-9._-]{1,249}", name) and name not in {".", ".."}
    return name if is_legal else None

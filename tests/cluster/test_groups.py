"""Goal: group offsets are read and changed as an administrator may, partition by partition.

Method: the same steps on Apache Kafka 3.9.2 and 4.3.1, and on the embedded broker; librdkafka is
the member of a group.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from confluent_kafka import Consumer

from kit.servers.apache import VERSIONS
from kit.servers.embedded import EmbeddedBroker
from kit.servers.kafka import create_topic
from logmirror.clock import SYSTEM_CLOCK
from logmirror.cluster.client import ClusterClient
from logmirror.cluster.groups import GroupListing, GroupOffset
from logmirror.cluster.properties import connection_settings
from logmirror.errors import UsageError
from logmirror.model import TopicPartition

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.jvm


@pytest.fixture(scope="module")
def own_broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedBroker]:
    folder: Path = tmp_path_factory.mktemp("groups")
    with EmbeddedBroker(folder / "broker") as broker:
        yield broker


_RELEASES = [
    pytest.param(version, marks=pytest.mark.xdist_group("kafka_" + version.replace(".", "")))
    for version in VERSIONS
]


@pytest.fixture(params=[*_RELEASES, "embedded"])
def bootstrap(request: pytest.FixtureRequest) -> str:
    names = {"3.9.2": "kafka_392", "4.3.1": "kafka_431", "embedded": "own_broker"}
    address: str = request.getfixturevalue(names[request.param]).bootstrap
    return address


@pytest.fixture
def client(bootstrap: str) -> Iterator[ClusterClient]:
    with ClusterClient(connection_settings(bootstrap), clock=SYSTEM_CLOCK) as client:
        yield client


def test_offsets_are_committed_listed_and_deleted(client, bootstrap, topic_name):
    create_topic(bootstrap, topic_name, 2, {})
    first, second = (TopicPartition(topic_name, number) for number in range(2))
    offsets = {first: GroupOffset(7, -1, "of the client"), second: GroupOffset(0, -1, "")}

    assert client.groups.commit(topic_name, offsets) == {first: None, second: None}

    assert client.groups.all_offsets(topic_name) == offsets
    assert GroupListing(topic_name, "", "Empty") in client.groups.listed()
    assert client.groups.delete_offsets(topic_name, [first]) == {first: None}
    assert client.groups.offsets(topic_name, [first, second]) == {
        first: None,
        second: offsets[second],
    }
    assert client.groups.all_offsets(f"{topic_name}-unknown") == {}


def test_an_error_of_one_partition_does_not_affect_the_others(client, bootstrap, topic_name):
    create_topic(bootstrap, topic_name, 1, {})
    known, unknown = TopicPartition(topic_name, 0), TopicPartition(f"{topic_name}-unknown", 0)

    found = client.groups.commit(
        topic_name, {unknown: GroupOffset(1, -1, ""), known: GroupOffset(1, -1, "")}
    )

    assert found[known] is None
    refused = found[unknown]
    assert isinstance(refused, UsageError)
    assert refused.facts["error"] == "UNKNOWN_TOPIC_OR_PARTITION"
    assert client.groups.all_offsets(topic_name) == {known: GroupOffset(1, -1, "")}


def test_a_group_with_members_is_not_changed(client, bootstrap, topic_name):
    create_topic(bootstrap, topic_name, 1, {})
    partition = TopicPartition(topic_name, 0)
    member = Consumer({"bootstrap.servers": bootstrap, "group.id": topic_name, "log_level": 0})
    member.subscribe([topic_name])
    deadline_ms = SYSTEM_CLOCK.monotonic_ms() + 60_000
    while not member.assignment():
        assert SYSTEM_CLOCK.monotonic_ms() < deadline_ms
        member.poll(0.1)

    found = client.groups.commit(topic_name, {partition: GroupOffset(1, -1, "")})

    assert found[partition] is not None
    assert found[partition].facts["error"] == "UNKNOWN_MEMBER_ID"
    [listing] = [one for one in client.groups.listed() if one.group == topic_name]
    assert (listing.protocol_type, listing.state) == ("consumer", "Stable")
    assert len(client.groups.members(topic_name)) == 1
    member.close()
    assert client.groups.members(topic_name) == []
    assert client.groups.members(f"{topic_name}-unknown") == []
    assert client.groups.all_offsets(topic_name) == {}

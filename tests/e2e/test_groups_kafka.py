"""Goal: what only Apache Kafka has does not disturb the translation of groups.

Method: a broker of Apache Kafka 4.3.1 with settings of its own is source and target. Stock clients
and Kafka's tools make the groups; a link of this process translates.
"""

from __future__ import annotations

from datetime import timedelta

import pytest
from confluent_kafka import TopicPartition

from kit.judges.raw_client import RawClient, build, nested
from kit.runs.commands import wait_until
from kit.runs.group_links import (
    SYNCS,
    commit_offsets,
    committed_offset,
    link_world,
    linked,
    member_of,
)
from kit.servers.kafka import ApacheKafka
from logmirror.cluster.client import ClusterClient

pytestmark = [pytest.mark.xdist_group("e2e-groups-kafka"), pytest.mark.jvm]

OFFSET_COMMIT = 8
NONE = -1001


@pytest.fixture(scope="module")
def kafka(tmp_path_factory):
    config = {
        "offsets.retention.check.interval.ms": 500,
        "group.share.enable": "true",
    }
    broker = ApacheKafka("4.3.1", tmp_path_factory.mktemp("kafka"), config=config)
    try:
        broker.start().create_topic(SYNCS)
        yield broker
    finally:
        broker.remove()


@pytest.fixture
def world(kafka, topic_name):
    made = link_world(kafka.bootstrap, kafka.bootstrap, topic_name, **{"sync-group-offsets": True})
    made.sync(*((offset, offset) for offset in range(0, 101, 10)))
    return made


def at_target(world, name):
    return committed_offset(world.target, world.group(name), world.replica)


def positions(world, name):
    found = world.checkpoints()
    return [(one.upstream, one.downstream) for one in found if one.group == world.group(name)]


def protocol_types(world):
    with ClusterClient(world.spec.source) as client:
        return {one.group: one.protocol_type for one in client.groups.listed()}


def test_a_group_of_the_consumer_protocol_is_read_and_committed_when_it_is_empty(world):
    """It is one group at source and target, so its members are at both."""
    group, protocol = world.group("new"), {"group.protocol": "consumer"}
    with (
        member_of(world.source, group, world.topic, **protocol) as member,
        linked(world) as link,
    ):
        member.commit(offsets=[TopicPartition(world.topic, 0, 40)], asynchronous=False)
        assert link.round().at_target.active == [group]
        assert positions(world, "new") == [(40, 40)]
        assert at_target(world, "new") == NONE
    wait_until(lambda: _is_empty(world, group), what=lambda: "an empty group", timeout_s=60)

    world.service.run_once()

    assert at_target(world, "new") == 40
    assert committed_offset(world.source, group, world.topic) == 40


def _is_empty(world, group):
    with ClusterClient(world.spec.source) as client:
        return {one.group: one.state for one in client.groups.listed()}[group] == "Empty"


def test_a_share_group_is_left_out(kafka, world):
    commit_offsets(world.source, world.group("plain"), world.topic, {0: 50})
    share = ("--topic", world.topic, "--group", world.group("share"), "--timeout-ms", "2000")
    kafka.tool("kafka-console-share-consumer", "--bootstrap-server", world.source, *share)
    assert protocol_types(world)[world.group("share")] == "share"

    with linked(world) as link:
        done = link.round()

    assert (done.groups, done.failed) == (1, {})
    assert at_target(world, "plain") == 50


def test_a_group_whose_offsets_expire_at_the_source_keeps_what_it_has_at_the_target(world):
    group = world.group("idle")
    _commit_for_a_moment(world, group, 40)
    commit_offsets(world.source, world.group("kept"), world.topic, {0: 20})
    with linked(world) as link:
        assert link.round().groups == 2
        wait_until(
            lambda: committed_offset(world.source, group, world.topic) == NONE,
            what=lambda: "the offset's expiry",
            timeout_s=60,
        )

        assert link.round().groups == 1

    assert positions(world, "idle") == [(40, 40)]
    assert at_target(world, "idle") == 40


def _commit_for_a_moment(world, group, offset):
    """Version 4 has a retention time for each commit, from its own moment."""
    part = build(
        nested(OFFSET_COMMIT, 4, "request", "OffsetCommitRequestPartition"),
        partition_index=0,
        committed_offset=offset,
        committed_metadata="",
    )
    topic = build(
        nested(OFFSET_COMMIT, 4, "request", "OffsetCommitRequestTopic"),
        name=world.topic,
        partitions=(part,),
    )
    with RawClient(int(world.source.rpartition(":")[2])) as client:
        response = client.ask(
            OFFSET_COMMIT,
            4,
            group_id=group,
            generation_id_or_member_epoch=-1,
            member_id="",
            retention_time=timedelta(seconds=15),
            retention_time_ms=timedelta(seconds=15),
            topics=(topic,),
        )
    assert not any(part.error_code for one in response.topics for part in one.partitions)

"""Goal: an odd group has a clear outcome, and keeps no other group from being translated.

Method: librdkafka, and requests by hand, make the groups at an embedded broker; a link translates
for another one. Whatever happens, no offset at the target goes back.
"""

from __future__ import annotations

import contextlib
import logging
from dataclasses import replace
from datetime import timedelta

import pytest
from confluent_kafka import KafkaException
from confluent_kafka import TopicPartition as Position

from kit.judges.clients import Message, produce
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
from kit.servers.embedded import EmbeddedBroker
from kit.servers.kafka import create_topic, delete_topic
from logmirror.app.group_service import _open_link
from logmirror.clock import SYSTEM_CLOCK
from logmirror.cluster.client import ClusterClient
from logmirror.cluster.connection import Connection
from logmirror.cluster.groups import GroupOffset
from logmirror.groups import checkpoint_topics
from logmirror.groups.service import GroupService
from logmirror.model import TopicPartition
from logmirror.monitoring import metrics
from logmirror.monitoring.metrics import Recorder
from logmirror.wire import mirrormaker

NONE = -1001


@pytest.fixture
def world(servers, topic_name):
    """Every offset has a sync."""
    made = link_world(*servers, topic_name, partitions=2, **{"sync-group-offsets": True})
    for partition in range(2):
        made.sync(*((offset, offset) for offset in range(101)), partition=partition)
    return made


def at_target(world, name):
    return committed_offset(world.target, world.group(name), world.replica)


def commit(world, name, offset):
    commit_offsets(world.source, world.group(name), world.topic, {0: offset})


def positions(world, name):
    """Upstream and downstream of a group's checkpoints, in the order of the topic."""
    found = world.checkpoints()
    return [(one.upstream, one.downstream) for one in found if one.group == world.group(name)]


def commit_number(server, group, partition, offset):
    """Commit any number, as clients do that do not check it (Sarama resets with -1)."""
    with ClusterClient(server) as client:
        errors = client.groups.commit(group, {partition: GroupOffset(offset, -1, "")})
    assert set(errors.values()) == {None}


def test_the_syncs_topic_may_be_deleted_and_created_again(servers, topic_name):
    world = link_world(*servers, topic_name)
    world.sync((0, 0), (50, 50))
    commit(world, "g", 50)
    with linked(world) as link:
        link.round()
        delete_topic(world.source, SYNCS)
        commit(world, "g", 60)
        assert link.round().causes == {"between-syncs": 1}  # what was read stays valid
        create_topic(world.source, SYNCS, 1, {})
        world.sync((70, 70))
        commit(world, "g", 70)

        assert link.round().causes == {}

    assert positions(world, "g") == [(50, 50), (60, 51), (70, 70)]


def test_syncs_of_a_replica_that_was_recreated_are_not_about_the_new_one(servers, topic_name):
    """Its first sync was not read before the topic of syncs was deleted."""
    world = link_world(*servers, topic_name)
    world.sync((0, 0), (50, 50), topic_id=world.replica_id())
    commit(world, "g", 50)
    with linked(world) as link:
        link.round()
        delete_topic(world.target, world.replica)
        create_topic(world.target, world.replica, 1, {})
        link.round()
        produce(world.target, world.replica, [Message(b"k", b"v") for _ in range(100)])
        delete_topic(world.source, SYNCS)
        commit(world, "g", 60)

        assert link.round().causes == {"recreated": 1}

        create_topic(world.source, SYNCS, 1, {})
        world.sync((58, 40), topic_id=world.replica_id())
        link.round()
    assert positions(world, "g") == [(50, 50), (50, 0), (60, 41)]


def test_a_deleted_group_keeps_its_checkpoint_and_a_new_one_of_its_name_is_a_rewind(world):
    commit(world, "g", 60)
    with linked(world) as link:
        link.round()
        with ClusterClient(world.spec.source) as client:
            client.groups.delete_offsets(world.group("g"), [TopicPartition(world.topic, 0)])
        commit(world, "renamed", 60)
        assert link.round().groups == 1
        assert positions(world, "g") == [(60, 60)]  # also no tombstone: it could not be decoded
        assert positions(world, "renamed") == [(60, 60)]
        commit(world, "g", 20)
        link.round()

    assert positions(world, "g") == [(60, 60), (20, 20)]
    assert at_target(world, "g") == 60
    assert at_target(world, "renamed") == 60


def test_groups_that_appear_while_it_runs_are_translated(world):
    with linked(world) as link:
        assert link.round().groups == 0
        commit(world, "new", 30)
        assert link.round().groups == 1

    assert at_target(world, "new") == 30


def test_offsets_of_what_is_not_mirrored_are_left_out(world):
    other = f"{world.topic}-other"
    create_topic(world.source, other, 1, {})
    commit_offsets(world.source, world.group("elsewhere"), other, {0: 0})
    commit_offsets(world.source, world.group("both"), world.topic, {0: 10, 1: 20})
    [replica] = world.spec.replicas
    spec = replace(world.spec, replicas=(replica._replace(partitions=(0,)),))
    with linked(world._replace(spec=spec)) as link:
        done = link.round()

    assert (done.groups, done.inexact, done.checkpoints) == (1, 0, 1)
    assert [(one.group, one.partition) for one in world.checkpoints()] == [(world.group("both"), 0)]
    assert committed_offset(world.target, world.group("both"), world.replica, 1) == NONE


def test_an_offset_of_minus_1_is_none_at_the_source_and_is_replaced_at_the_target(world):
    commit_number(world.spec.source, world.group("reset"), TopicPartition(world.topic, 0), -1)
    commit(world, "g", 40)
    commit_number(world.spec.target, world.group("g"), TopicPartition(world.replica, 0), -1)

    with linked(world) as link:
        done = link.round()

    assert (done.groups, done.inexact) == (1, 0)
    assert positions(world, "reset") == []
    assert at_target(world, "g") == 40


@pytest.mark.parametrize("protocol", ["classic", "consumer"])
def test_a_group_with_members_is_read_at_the_source_and_untouched_at_the_target(world, protocol):
    with (
        member_of(
            world.source, world.group("g"), world.topic, **{"group.protocol": protocol}
        ) as reader,
        member_of(world.target, world.group("g"), world.replica, **{"group.protocol": protocol}),
        linked(world) as link,
    ):
        reader.commit(offsets=[_position(world.topic, 40)], asynchronous=False)
        done = link.round()
        assert done.at_target.active == [world.group("g")]
        assert positions(world, "g") == [(40, 40)]
        assert at_target(world, "g") == NONE
    world.service.run_once()

    assert at_target(world, "g") == 40


def test_a_static_member_that_has_left_without_leaving_its_group_is_a_member(world):
    commit(world, "g", 40)
    static = {"group.instance.id": "pod-0", "session.timeout.ms": "45000"}
    with member_of(world.target, world.group("g"), world.replica, **static):
        pass

    world.service.run_once()

    assert world.reasons() == {"active-at-target": 1}
    assert at_target(world, "g") == NONE


def test_a_group_of_connect_is_left_out(world, brokers):
    commit(world, "g", 40)
    with RawClient(brokers[0].port) as client:
        protocol = build(
            nested(11, 3, "request", "JoinGroupRequestProtocol"), name="default", metadata=b""
        )
        joined = client.ask(
            11,
            3,
            group_id=world.group("connect"),
            protocol_type="connect",
            protocols=(protocol,),
            member_id="",
            session_timeout=timedelta(seconds=30),
            rebalance_timeout=timedelta(seconds=30),
        )
        assert joined.error_code == 0
        with ClusterClient(world.spec.source) as cluster:
            types = {one.group: one.protocol_type for one in cluster.groups.listed()}
        assert types[world.group("connect")] == "connect"
        with linked(world) as link:
            assert link.round().groups == 1


def test_metadata_that_is_not_utf_8_leaves_one_group_out(world, monkeypatch, caplog):
    """As a broker may send it that stores any bytes; Apache Kafka replaces them."""
    commit_offsets(world.source, world.group("odd"), world.topic, {0: 10}, "ODD-BYTES")
    commit(world, "plain", 20)
    receive = Connection._send_and_receive  # noqa: SLF001  # where bytes come from the network

    def damaged(*arguments):
        return receive(*arguments).replace(b"ODD-BYTES", b"\xff" * 9)

    monkeypatch.setattr(Connection, "_send_and_receive", damaged)
    with caplog.at_level(logging.WARNING, "logmirror.groups"):
        world.service.run_once()

    assert world.reasons() == {"unreadable": 1}
    assert at_target(world, "plain") == 20
    [event] = [one for one in caplog.records if one.message.startswith("groups not read")]
    assert list(event.facts["reasons"]) == [world.group("odd")]


def test_metadata_that_does_not_fit_leaves_one_group_out(world, monkeypatch, caplog):
    """The limit is that of Kafka's own records of offsets; others' may be larger."""
    monkeypatch.setattr(mirrormaker, "_STRING_MAX", 1000)
    monkeypatch.setattr(checkpoint_topics, "_SURELY_FITS", 250)
    # librdkafka commits a NUL behind the text.
    for name, offset, size in (("long", 10, 1000), ("longest", 20, 999), ("plain", 30, 0)):
        commit_offsets(world.source, world.group(name), world.topic, {0: offset}, "m" * size)

    with caplog.at_level(logging.WARNING, "logmirror.groups"):
        world.service.run_once()

    assert world.reasons() == {"too-long": 1}
    [event] = [one for one in caplog.records if "too long for a checkpoint" in one.message]
    assert list(event.facts["reasons"]) == [world.group("long")]
    assert [positions(world, name) for name in ("long", "longest", "plain")] == [
        [],
        [(20, 20)],
        [(30, 30)],
    ]


def test_a_source_that_hangs_delays_only_its_own_link(servers, topic_name, tmp_path):
    with EmbeddedBroker(tmp_path / "hanging") as hanging:
        create_topic(hanging.bootstrap, SYNCS, 1, {})
        stuck = link_world(hanging.bootstrap, servers[1], f"{topic_name}-a", **{"interval-ms": 100})
        world = link_world(*servers, topic_name, **{"interval-ms": 100})
        world.sync((10, 10), (20, 20))
        recorder = Recorder()
        service = GroupService([stuck.spec, world.spec], _open_link, SYSTEM_CLOCK, recorder)
        hanging.pause()
        with service.running():  # this thread is that of the mirrors
            for offset in (10, 20):
                commit(world, "g", offset)
                wait_until(
                    lambda offset=offset: (offset, offset) in _found(world),
                    what=lambda: "a checkpoint of the other link",
                    timeout_s=60,
                )
            assert {labels[0] for labels, _ in recorder.numbers(metrics.GROUPS)} == {topic_name}
            hanging.resume()
            wait_until(
                lambda: len(recorder.numbers(metrics.GROUPS)) == 2,
                what=lambda: "a round of the link that hung",
                timeout_s=60,
            )


def _found(world):
    with contextlib.suppress(KafkaException):  # the topic does not exist yet
        return positions(world, "g")
    return []


def _position(topic, offset):
    return Position(topic, 0, offset)

"""Goal: MirrorMaker's readers have offset syncs of replicas that keep offsets: few, and ascending.

Method: replicas in the embedded broker grow, are cut, recreated and read by a second process;
librdkafka reads the syncs.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import pytest
from confluent_kafka import TopicPartition as Committed
from confluent_kafka.admin import AdminClient, AlterConfigOpType, ConfigEntry, ConfigResource

from kit.fakes.late_topics import LateTopics
from kit.fakes.scripted import SteppingClock
from kit.judges.clients import Message, produce, rows_by_librdkafka
from kit.judges.gaps import trim
from kit.runs.inline_run import config_text, mirror_to_cluster
from kit.runs.replica_groups import consumer_of
from kit.servers.embedded import EmbeddedBroker
from kit.servers.kafka import create_topic, delete_topic
from logmirror.app.specs import link_specs
from logmirror.clock import SYSTEM_CLOCK
from logmirror.cluster import offset_syncs
from logmirror.cluster.client import EARLIEST, LATEST, ClusterClient
from logmirror.cluster.offset_syncs import OffsetSyncWriter, create_sync_topic
from logmirror.cluster.properties import connection_settings
from logmirror.config.settings import load_text
from logmirror.errors import UnavailableError
from logmirror.groups import preserved_syncs
from logmirror.groups.checkpoint_topics import CheckpointTopics
from logmirror.groups.link import Link
from logmirror.groups.preserved_syncs import PreservedSyncs
from logmirror.groups.translation import Log
from logmirror.model import TopicPartition
from logmirror.wire.decode import RecordDecoder
from logmirror.wire.mirrormaker import Checkpoint, decode_checkpoint, decode_sync, syncs_topic

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedBroker]:
    with EmbeddedBroker(tmp_path_factory.mktemp("syncs") / "broker") as started:
        yield started


class World:
    """One cluster is source and destination; the name of the destination is that of the test."""

    def __init__(self, server: str, client: ClusterClient, alias: str) -> None:
        self.server, self.client, self.alias = server, client, alias
        self.orders = TopicPartition(f"{alias}-orders", 0)
        create_topic(server, self.orders.topic, 1, {})
        self.processes: list[PreservedSyncs] = []
        self.syncs = self.process()

    def process(
        self,
        target: Any = None,
        alias: str | None = None,
        source: Any = None,
        clock: Any = SYSTEM_CLOCK,
    ) -> PreservedSyncs:
        made = PreservedSyncs(
            source or self.client,
            target or self.client,
            alias=alias or self.alias,
            mirror="m",
            decoder=RecordDecoder(),
            clock=clock,
        )
        self.processes.append(made)
        return made

    def grow(self, count: int) -> None:
        produce(self.server, self.orders.topic, [Message(b"k", b"v")] * count)

    def recreate(self) -> None:
        delete_topic(self.server, self.orders.topic)
        create_topic(self.server, self.orders.topic, 1, {})

    def logs(self) -> dict[TopicPartition, Log]:
        start, end = (self.client.list_offsets([self.orders], at) for at in (EARLIEST, LATEST))
        return {self.orders: Log(start[self.orders], end[self.orders])}

    def write(self, syncs: PreservedSyncs | None = None) -> list[int]:
        """One round; return the offsets of all syncs so far."""
        (syncs or self.syncs).write({self.orders: self.orders}, self.logs())
        return self.read()

    def read(self) -> list[int]:
        topic = syncs_topic(self.alias)
        if topic not in self.client.topics():
            return []
        found = [decode_sync(row.key, row.value) for row in rows_by_librdkafka(self.server, topic)]
        assert all(one.upstream == one.downstream for one in found)
        assert {one.topic for one in found} <= {self.orders.topic}
        return [one.upstream for one in found]


@pytest.fixture
def world(broker: EmbeddedBroker, topic_name: str) -> Iterator[World]:
    with ClusterClient(connection_settings(broker.bootstrap, {})) as client:
        made = World(broker.bootstrap, client, topic_name)
        yield made
        for process in made.processes:
            process.close()


def test_the_pairs_are_those_of_mirrormakers_rule(world):
    assert world.write() == []  # an empty replica has none, and its topic is not created
    assert syncs_topic(world.alias) not in world.client.topics()
    world.grow(250)
    first = [0, 101, 202, 249]
    assert world.write() == first
    assert world.write() == first
    world.grow(1)
    assert world.write() == [*first, 250]
    world.grow(200)
    assert world.write() == [*first, 250, 303, 404, 450]


def test_a_long_replica_has_few_pairs_from_its_start_to_its_end(world):
    world.grow(5000)
    trim(world.server, world.orders.topic, 0, 1000)

    found = world.write()

    assert (found[0], found[-1], len(found)) == (1000, 4999, 11)
    assert found == sorted(found)


def test_a_restart_continues_above_what_the_topic_has(world):
    world.grow(250)
    before = world.write()
    assert world.write(world.process()) == before
    world.grow(100)

    assert world.write(world.process()) == [*before, 349]


def test_what_retention_has_removed_is_not_synced(world):
    world.grow(250)
    before = world.write()
    world.grow(500)
    trim(world.server, world.orders.topic, 0, 600)

    assert world.write(world.process()) == [*before, 600, 701, 749]


@pytest.mark.parametrize("is_restarted", [False, True])
def test_a_replica_that_ends_before_its_last_pair_begins_again(world, is_restarted):
    world.grow(250)
    before = world.write()
    world.recreate()
    process = world.process() if is_restarted else world.syncs
    assert world.write(process) == before  # nothing to write yet
    world.grow(120)

    assert world.write(process) == [*before, 0, 101, 119]


def test_a_recreated_replica_that_is_longer_begins_again(world):
    world.grow(120)
    before = world.write()
    world.recreate()
    world.grow(130)
    world.syncs.forget(world.orders)

    assert world.write() == [*before, 0, 101, 129]


def test_pairs_of_a_former_replica_with_new_offsets_are_ended(world):
    create_sync_topic(world.client, world.alias, SYSTEM_CLOCK, mirror="m")
    with world.client.pipeline() as pipeline:
        writer = OffsetSyncWriter(pipeline, world.alias, SYSTEM_CLOCK, mirror="m")
        writer.write_and_wait({world.orders: [(5, 900)]})
    world.grow(20)
    world.syncs.write({world.orders: world.orders}, world.logs())

    rows = rows_by_librdkafka(world.server, syncs_topic(world.alias))
    found = [decode_sync(row.key, row.value) for row in rows]
    assert [(one.upstream, one.downstream) for one in found] == [(5, 900), (0, 0), (19, 19)]


class Lagging:
    """A destination whose followers have not replicated all that the leader has."""

    def __init__(self, high_watermark: int) -> None:
        self.high_watermark = high_watermark

    def list_offsets(self, partitions, at, *, read_committed):
        assert (at, read_committed) == (LATEST, False)
        return dict.fromkeys(partitions, self.high_watermark)


def test_no_pair_is_above_the_high_watermark(world):
    world.grow(150)
    target = Lagging(0)
    process = world.process(target)
    assert world.write(process) == []
    target.high_watermark = 120
    assert world.write(process) == [0, 101, 119]
    target.high_watermark = 110  # of a new leader; what was written is still there
    assert world.write(process) == [0, 101, 119]
    target.high_watermark = 150
    assert world.write(process) == [0, 101, 119, 149]


def test_only_so_many_partitions_in_one_round_and_all_in_turn(world, monkeypatch):
    monkeypatch.setattr(preserved_syncs, "PARTITIONS_MAX", 2)
    topic = f"{world.alias}-wide"
    create_topic(world.server, topic, 5, {})
    wide = {one: one for one in (TopicPartition(topic, number) for number in range(5))}
    for number in range(5):
        produce(world.server, topic, [Message(b"k", b"v")] * 5, partition=number)
    logs = dict.fromkeys(wide, Log(0, 5))
    for expected in (2, 4, 5, 5):
        world.syncs.write(wide, logs)
        rows = rows_by_librdkafka(world.server, syncs_topic(world.alias))
        found = [decode_sync(row.key, row.value) for row in rows]
        assert len({one.partition for one in found}) == expected
        assert len(found) == 2 * expected  # none was written again


def test_a_name_that_no_topic_can_have_disables_syncs_once(world, caplog):
    world.grow(5)
    process = world.process(alias="no topic is called so")
    for _ in range(2):
        process.write({world.orders: world.orders}, world.logs())
    (event,) = [one for one in caplog.records if "offset syncs disabled" in one.message]
    assert "not valid in a topic name" in event.message


def test_syncs_that_were_refused_for_a_time_are_written_then(world, caplog):
    create_sync_topic(world.client, world.alias, SYSTEM_CLOCK, mirror="m")
    admin = AdminClient({"bootstrap.servers": world.server})
    clock = SteppingClock()
    process = world.process(clock=clock)
    world.grow(250)

    def limit(max_bytes: int) -> None:
        resource = ConfigResource(ConfigResource.Type.TOPIC, syncs_topic(world.alias))
        resource.add_incremental_config(
            ConfigEntry(
                "max.message.bytes",
                str(max_bytes),
                incremental_operation=AlterConfigOpType.SET,
            )
        )
        admin.incremental_alter_configs([resource])[resource].result(20)

    limit(1)
    assert world.write(process) == []
    clock.ms += offset_syncs.RETRY_MS[0]
    assert world.write(process) == []
    limit(1_000_000)
    clock.ms += offset_syncs.RETRY_MS[0]
    assert world.write(process) == []  # the second pause is longer
    clock.ms += offset_syncs.RETRY_MS[0]

    assert world.write(process) == [0, 101, 202, 249]
    assert caplog.text.count("offset syncs paused") == 1


def test_syncs_that_were_not_acknowledged_are_written_after_a_look_at_the_topic(
    world, monkeypatch, caplog
):
    caplog.set_level("INFO", logger="logmirror.groups")
    world.grow(250)
    write = OffsetSyncWriter.write_and_wait

    def unacknowledged(self, syncs):
        write(self, syncs)
        raise UnavailableError("no response")

    monkeypatch.setattr(OffsetSyncWriter, "write_and_wait", unacknowledged)
    assert world.write() == [0, 101, 202, 249]
    assert "offset syncs not written; retried" in caplog.text
    monkeypatch.undo()
    world.grow(60)

    assert world.write() == [0, 101, 202, 249, 309]


def test_a_topic_that_the_brokers_do_not_know_yet_is_waited_for(world, caplog):
    world.grow(250)
    late = LateTopics(world.client, polls=3)

    assert world.write(world.process(source=late, clock=late)) == [0, 101, 202, 249]
    assert "offset syncs" not in caplog.text


def test_a_topic_that_the_brokers_know_much_later_is_written_then(world, caplog, monkeypatch):
    monkeypatch.setattr(offset_syncs, "_READY_MS", -1)
    world.grow(250)
    late = LateTopics(world.client, polls=1)
    process = world.process(source=late, clock=late)
    assert world.write(process) == []
    late.sleep_ms(1)

    assert world.write(process) == [0, 101, 202, 249]
    assert "disabled" not in caplog.text


def test_checkpoints_are_readable_although_the_brokers_know_their_topic_late(world):
    late = LateTopics(world.client, polls=2)
    topics = CheckpointTopics(
        late,
        source_alias=world.alias,
        target_alias="target",
        transactional_id=world.alias,
        topics={world.orders.topic},
        decoder=RecordDecoder(),
        clock=late,
    )
    with contextlib.closing(topics):
        topics.begin()
        assert topics.unreadable is None
        topics.write([Checkpoint("group", world.orders.topic, 0, 7, 7, "")], {})
    (row,) = rows_by_librdkafka(world.server, f"{world.alias}.checkpoints.internal")
    assert decode_checkpoint(row.key, row.value).downstream == 7


def test_a_link_syncs_what_groups_have_committed_and_begins_again_in_a_recreated_replica(world):
    """In one process; `test_a_replica_that_ends_before_its_last_pair_begins_again` has two."""
    source, alias = f"{world.alias}-source", world.alias
    create_topic(world.server, source, 2, {})
    mirror = mirror_to_cluster(source, world.server, world.server, name=alias)
    mirror["destinations"][0]["topic"] = world.orders.topic
    mirror["groups"] = {"source-alias": f"a-{alias}", "include": [alias]}
    (spec,) = link_specs(load_text(config_text(mirror)))
    consumer = consumer_of(world.server, alias)
    offsets = [Committed(source, 0, 5)]
    consumer.commit(offsets=offsets, asynchronous=False)
    consumer.close()
    world.grow(20)
    with contextlib.closing(Link(spec, world.client, world.client, SYSTEM_CLOCK)) as link:
        link.round()
        assert synced(world) == [(0, 0), (0, 19)]
        world.recreate()
        world.grow(30)
        link.round()
        assert synced(world) == [(0, 0), (0, 19), (0, 0), (0, 29)]


def synced(world: World) -> list[tuple[int, int]]:
    """Partition and offset of all syncs."""
    rows = rows_by_librdkafka(world.server, syncs_topic(world.alias))
    found = [decode_sync(row.key, row.value) for row in rows]
    return [(one.partition, one.upstream) for one in found]

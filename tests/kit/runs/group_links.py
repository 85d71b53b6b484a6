"""A link of groups between two clusters in this process: committed offsets, syncs, rounds."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, NamedTuple

from confluent_kafka import Consumer, TopicPartition

import logmirror
from kit.judges.clients import Message, produce, rows_by_librdkafka
from kit.runs.commands import wait_until
from kit.servers.kafka import create_topic
from logmirror.app.components import Clients
from logmirror.app.group_service import _open_link
from logmirror.app.specs import link_specs
from logmirror.clock import SYSTEM_CLOCK
from logmirror.cluster.client import ClusterClient
from logmirror.groups.link import Link
from logmirror.groups.service import GroupService
from logmirror.model import TopicPartition as Partition
from logmirror.monitoring.metrics import GROUPS_BY_REASON, Recorder
from logmirror.wire.mirrormaker import (
    decode_checkpoint,
    encode_sync,
    encode_sync_key,
    topic_id_header,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from logmirror.clock import Clock
    from logmirror.config.settings import Settings
    from logmirror.groups.link_spec import LinkSpec
    from logmirror.monitoring.metrics import Metric
    from logmirror.wire.mirrormaker import Checkpoint

DESTINATION = "standby"
SYNCS = f"mm2-offset-syncs.{DESTINATION}.internal"
"""The topic of offset syncs, which the tests of a source share."""


class LinkWorld(NamedTuple):
    """A topic, its replica with new offsets under another name, and a link for its groups."""

    source: str
    target: str
    topic: str
    recorder: Recorder
    spec: LinkSpec
    settings: Settings | None = None
    """The configuration that the link is of."""

    @property
    def replica(self) -> str:
        """The replica's name: one broker may be source and target of different tests."""
        return f"{self.topic}-copy"

    @property
    def service(self) -> GroupService:
        """The service that `run` starts, for this link."""
        return GroupService([self.spec], _open_link, SYSTEM_CLOCK, self.recorder)

    def group(self, name: str) -> str:
        """A name that only this test includes."""
        return f"{self.topic}-{name}"

    def reasons(self) -> dict[str, int]:
        """The groups by reason, without those that have none."""
        found = self.recorder.numbers(GROUPS_BY_REASON)
        return {labels[2]: int(count) for labels, count in found if count}

    def number(self, metric: Metric) -> float:
        """The value of a metric of the link."""
        [(_, value)] = self.recorder.numbers(metric)
        return value

    def checkpoints(self) -> list[Checkpoint]:
        """All checkpoints at the target."""
        name = f"{self.topic}.checkpoints.internal"
        config = {"isolation.level": "read_uncommitted"}
        rows = rows_by_librdkafka(self.target, name, config=config)
        return [decode_checkpoint(row.key, row.value) for row in rows]

    def sync(
        self, *pairs: tuple[int, int], partition: int = 0, topic_id: bytes | None = None
    ) -> None:
        """Write offset syncs, as a mirror does; without an ID as MirrorMaker does."""
        key = encode_sync_key(Partition(self.topic, partition))
        headers = topic_id_header(topic_id)
        messages = [Message(key, encode_sync(*pair), headers) for pair in pairs]
        produce(self.source, SYNCS, messages)

    def replica_id(self) -> bytes | None:
        """The ID of the replica's topic."""
        with ClusterClient(self.spec.target) as client:
            return client.topic(self.replica).topic_id


def link_world(  # noqa: PLR0913  # two clusters, what is in them, and settings
    source: str,
    target: str,
    topic: str,
    *,
    records: int = 100,
    partitions: int = 1,
    offsets: str = "translate",
    properties: Mapping[str, str] | None = None,
    **groups: Any,
) -> LinkWorld:
    """Create the topics with records, and return the link.

    Args:
        source: The source.
        target: The target.
        topic: The topic's name, which is also the alias of the source.
        records: Records of each partition, of both topics.
        partitions: Partitions of both topics.
        offsets: As in the configuration.
        properties: Connection properties for both clusters.
        groups: More settings of `groups`.
    """
    cluster = {"properties": dict(properties or {})}
    destination = {"type": "kafka", "name": DESTINATION, "bootstrap-servers": target, **cluster}
    mirror = {
        "name": topic,
        "source": {"bootstrap-servers": source, **cluster},
        "topic": topic,
        "partitions": "all",
        "destinations": [{**destination, "topic": f"{topic}-copy", "offsets": offsets}],
        "groups": {"source-alias": topic, "include": [f"{topic}-.*"], **groups},
    }
    settings = logmirror.load(values={"mirrors": [mirror]})
    [spec] = link_specs(settings)
    world = LinkWorld(source, target, topic, Recorder(), spec, settings)
    for server, name in ((source, topic), (target, world.replica)):
        create_topic(server, name, partitions, {})
        messages = [Message(b"k", b"%d" % number) for number in range(records)]
        for partition in range(partitions):
            produce(server, name, messages, partition=partition)
    return world


def commit_offsets(
    server: str, group: str, topic: str, offsets: Mapping[int, int], metadata: str = ""
) -> None:
    """Commit without joining the group."""
    consumer = Consumer({"bootstrap.servers": server, "group.id": group, "log_level": 0})
    wanted = [TopicPartition(topic, *pair, metadata) for pair in offsets.items()]
    consumer.commit(offsets=wanted, asynchronous=False)
    consumer.close()


def committed_offset(server: str, group: str, topic: str, partition: int = 0) -> int:
    """The committed offset; -1001: none."""
    consumer = Consumer({"bootstrap.servers": server, "group.id": group, "log_level": 0})
    [found] = consumer.committed([TopicPartition(topic, partition)], timeout=30)
    consumer.close()
    return found.offset


@contextlib.contextmanager
def linked(world: LinkWorld, clock: Clock = SYSTEM_CLOCK) -> Iterator[Link]:
    """The link of a world, with clients of its own."""
    clients = Clients(10_000)
    source, target = clients(world.spec.source), clients(world.spec.target)
    with contextlib.closing(Link(world.spec, source, target, clock)) as link:
        yield link
    clients.close()


@contextlib.contextmanager
def member_of(server: str, group: str, topic: str, **config: str) -> Iterator[Consumer]:
    """A member of a group, with an assignment."""
    settings = {"bootstrap.servers": server, "group.id": group, "enable.auto.commit": False}
    consumer = Consumer({**settings, "log_level": 0, **config})
    consumer.subscribe([topic])
    wait_until(
        lambda: consumer.poll(0.1) is None and bool(consumer.assignment()),
        what=lambda: "an assignment",
        timeout_s=60,
    )
    yield consumer
    consumer.close()

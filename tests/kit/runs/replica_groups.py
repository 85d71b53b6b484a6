"""A topic with consumer groups, its replica in another cluster, and what groups have committed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from confluent_kafka import Consumer, TopicPartition

from kit.judges.clients import Row, odd_messages, produce, rows_by_librdkafka
from kit.judges.gaps import write_transactions
from kit.runs.commands import logmirror
from kit.runs.inline_run import config_text, mirror_to_cluster
from kit.servers.kafka import create_topic

if TYPE_CHECKING:
    from pathlib import Path

PARTITIONS = 2


class World(NamedTuple):
    """A topic with a group at the source, and its replica."""

    source: str
    destination: str
    topic: str
    config: Path
    plan: Path
    mirror: dict[str, Any]

    def run(self, *arguments: str) -> Any:
        """Run `logmirror groups ...`."""
        return logmirror("groups", *arguments, "-c", self.config)

    def rows(self, server: str, partition: int) -> list[Row]:
        """Return the committed records of a partition."""
        return list(rows_by_librdkafka(server, self.topic, partition=partition))


def world_of(folder: Path, topic_name: str, offsets: str, *servers: str, **more: Any) -> World:
    """Preserved offsets from the first server to the second, new ones the other way."""
    source, destination = servers if offsets == "preserve" else reversed(servers)
    create_topic(source, topic_name, PARTITIONS, {})
    for partition in range(PARTITIONS):
        write_transactions(source, topic_name, partition)
        produce(source, topic_name, odd_messages(400, seed=partition), partition=partition)
    mirror = mirror_to_cluster(topic_name, source, destination, name="standby", offsets=offsets)
    mirror |= more
    config, plan = folder / "logmirror.yaml", folder / "plan.json"
    config.write_text(config_text(mirror))
    return World(source, destination, topic_name, config, plan, mirror)


def consumer_of(server: str, group: str) -> Consumer:
    """A consumer that commits only on request."""
    return Consumer(
        {
            "bootstrap.servers": server,
            "group.id": group,
            "enable.auto.commit": False,
            "auto.offset.reset": "error",
            "log_level": 0,
        }
    )


def commit(world: World, server: str, group: str, *offsets: int) -> None:
    """Commit an offset of each partition, without joining the group."""
    consumer = consumer_of(server, group)
    wanted = [TopicPartition(world.topic, *pair) for pair in enumerate(offsets)]
    consumer.commit(offsets=wanted, asynchronous=False)
    consumer.close()


def committed(world: World, server: str, group: str) -> list[int]:
    """Return the committed offset of each partition; -1001: none."""
    consumer = consumer_of(server, group)
    wanted = [TopicPartition(world.topic, number) for number in range(PARTITIONS)]
    found = [one.offset for one in consumer.committed(wanted, timeout=20)]
    consumer.close()
    return found


def rest(world: World, group: str, partition: int) -> list[Row]:
    """Return what the group still reads of a partition at the destination."""
    [start] = [committed(world, world.destination, group)[partition]]
    return [row for row in world.rows(world.destination, partition) if row.offset >= start]

"""A service whose group fails over: killed at the source while it reads, started at the replica."""

from __future__ import annotations

import contextlib
import struct
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from confluent_kafka import KafkaException

from kit.judges.clients import Row, produce, rows_by_librdkafka
from kit.judges.gaps import plain_messages, write_transactions
from kit.runs.commands import wait_until
from kit.runs.inline_run import InlineRun, config_text, mirror_to_cluster
from kit.runs.replica_groups import PARTITIONS, World, committed
from kit.servers.kafka import create_topic

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from kit.judges.services import Service
    from kit.servers.embedded import EmbeddedBroker
    from kit.servers.kafka import ApacheKafka

NONE: Final = -1001
"""Of librdkafka: no committed offset."""

_READ_BEFORE_KILL: Final = 60
"""Records of each partition."""


class Lives(NamedTuple):
    """What a service did at the source and at the replica, by partition."""

    committed: list[int]
    """Its offsets at the source."""

    starts: list[int]
    """Where it continues in the replica, by the documented rule."""

    source: list[list[Row]]
    replica: list[list[Row]]
    first: list[list[bytes]]
    """The values that it processed at the source."""

    second: list[list[bytes]]
    """The values that it processed at the replica."""


def world_of(
    folder: Path,
    topic: str,
    offsets: str,
    *servers: str,
    config: Mapping[str, str] | None = None,
    **groups: Any,
) -> World:
    """A new topic with this configuration, and a mirror that translates its groups, not running."""
    source, destination = servers
    create_topic(source, topic, PARTITIONS, {key: str(v) for key, v in (config or {}).items()})
    mirror = mirror_to_cluster(topic, source, destination, name=f"{topic}-b", offsets=offsets)
    mirror["groups"] = {
        "source-alias": topic,
        "include": [f"{topic}.*"],
        "interval-ms": 300,
        "sync-group-offsets": True,
        **groups,
    }
    path = folder / "logmirror.yaml"
    path.write_text(config_text(mirror))
    return World(source, destination, topic, path, folder / "plan.json", mirror)


def write(server: str, topic: str, seed: int) -> None:
    """Write records with unique values to all partitions: plain ones, committed and aborted."""
    for partition in range(PARTITIONS):
        own = 10 * seed + partition
        write_transactions(server, topic, partition, seed=own)
        produce(server, topic, plain_messages(150, seed=own + 5), partition=partition)


def live_twice(
    world: World,
    source: ApacheKafka | EmbeddedBroker,
    service: Callable[..., Service],
    folder: Path,
    *,
    more: bool = True,
) -> Lives:
    """Let a service read at the source, kill it, stop the source, and let it read the replica.

    Args:
        world: A topic with records.
        source: Its cluster.
        service: The service.
        folder: An empty directory.
        more: Whether records are written after the kill.
    """
    group = f"{world.topic}-service"
    first, second = (folder / name for name in ("first", "second"))
    first.mkdir()
    second.mkdir()
    with InlineRun(world.config, folder=folder) as mirror:
        with service(world.source, world.topic, group, first) as life:
            _wait_for_values(life, _partitions_of(world, world.source), _READ_BEFORE_KILL)
        if more:
            write(world.source, world.topic, seed=7)
        expected = _partitions_of(world, world.source)
        _wait_until_translated(world, group, mirror)
        offsets, starts = committed(world, world.source, group), _starts(world, group)
        rows = [world.rows(world.source, number) for number in range(PARTITIONS)]
        done = life.processed()
        with stopped(source):
            mirror.kill()
            copied = [world.rows(world.destination, number) for number in range(PARTITIONS)]
            with service(world.destination, world.topic, group, second, world.topic) as life:
                lasts = [row[-1].value for row in rows]
                wait_until(
                    lambda: set(lasts) <= set(life.processed()), what=life.tail, timeout_s=60
                )
            again = life.processed()
    return Lives(offsets, starts, rows, copied, _divided(done, expected), _divided(again, expected))


@contextlib.contextmanager
def stopped(broker: ApacheKafka | EmbeddedBroker) -> Iterator[None]:
    """Stop a broker during the block."""
    broker.stop()
    try:
        yield
    finally:
        broker.start()


def unread(rows: list[Row], offset: int) -> list[bytes | None]:
    """Return the values from an offset on."""
    return [row.value for row in rows if row.offset >= offset]


def _partitions_of(world: World, server: str) -> dict[bytes, int]:
    """Return the partition of each value."""
    return {
        row.value: number
        for number in range(PARTITIONS)
        for row in world.rows(server, number)
        if row.value is not None
    }


def _divided(values: list[bytes], partitions: Mapping[bytes, int]) -> list[list[bytes]]:
    found: list[list[bytes]] = [[] for _ in range(PARTITIONS)]
    for value in values:
        found[partitions[value]].append(value)
    return found


def _wait_for_values(life: Service, partitions: Mapping[bytes, int], count: int) -> None:
    def is_read() -> bool:
        return all(len(one) >= count for one in _divided(life.processed(), partitions))

    wait_until(is_read, what=life.tail, timeout_s=60)


def _wait_until_translated(world: World, group: str, mirror: InlineRun) -> None:
    """Wait until the replica has all records, and the group's offsets at the destination.

    Two offsets are the same if no record is between them.
    """
    by_checkpoints = not world.mirror["groups"]["sync-group-offsets"]

    def is_translated() -> bool:
        assert mirror.alive, mirror.text
        with contextlib.suppress(KafkaException):  # a topic that does not exist yet
            copied = [world.rows(world.destination, number) for number in range(PARTITIONS)]
            for number, rows in enumerate(copied):
                if [row[1:] for row in rows] != [
                    row[1:] for row in world.rows(world.source, number)
                ]:
                    return False
            found = (
                checkpoints(world, group)
                if by_checkpoints
                else committed(world, world.destination, group)
            )
            wanted = _starts(world, group)
            return NONE not in found and [
                unread(rows, offset) for rows, offset in zip(copied, found, strict=True)
            ] == [unread(rows, offset) for rows, offset in zip(copied, wanted, strict=True)]
        return False

    wait_until(is_translated, what=lambda: mirror.text, timeout_s=90)


def _starts(world: World, group: str) -> list[int]:
    """Return where the group continues in the replica, by docs/fail-over.md."""
    offsets = committed(world, world.source, group)
    if world.mirror["destinations"][0]["offsets"] == "preserve":
        return offsets
    topic = f"mm2-offset-syncs.{world.mirror['name']}.internal"
    pairs: list[list[tuple[int, int]]] = [[] for _ in range(PARTITIONS)]
    for row in rows_by_librdkafka(world.source, topic):
        assert row.key is not None
        assert row.value is not None
        (size,) = struct.unpack_from(">h", row.key)
        if row.key[2 : 2 + size].decode() == world.topic:
            (partition,) = struct.unpack_from(">i", row.key, 2 + size)
            upstream, downstream = struct.unpack(">qq", row.value)
            pairs[partition].append((upstream, downstream))
    found = []
    for offset, known in zip(offsets, pairs, strict=True):
        before = [pair for pair in known if pair[0] <= offset]
        upstream, downstream = max(before, default=(offset, 0))
        found.append(downstream + (upstream < offset))
    return found


def checkpoints(world: World, group: str) -> list[int]:
    """Return the offset of each partition's last checkpoint of a group."""
    found: dict[int, int] = {}
    for row in rows_by_librdkafka(world.destination, f"{world.topic}.checkpoints.internal"):
        assert row.key is not None
        assert row.value is not None
        (size,) = struct.unpack_from(">h", row.key)
        if row.key[2 : 2 + size].decode() == group:
            (partition,) = struct.unpack(">i", row.key[-4:])
            (_, _, offset) = struct.unpack_from(">hqq", row.value)
            found[partition] = offset
    return [found.get(number, NONE) for number in range(PARTITIONS)]

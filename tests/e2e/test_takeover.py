"""Goal: a copy of MirrorMaker 2 is continued at the next record, exactly once from there on.

Method: MirrorMaker copies in dedicated mode, from Maven's jars, and is killed while it copies.
logmirror continues. librdkafka reads both topics before and after, with the groups' checkpoints.
"""

from __future__ import annotations

import contextlib
import signal
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
from confluent_kafka import Consumer, KafkaException, TopicPartition

from kit.judges.clients import Message, odd_messages, produce, rows_by_librdkafka
from kit.judges.gaps import log_bounds, write_transactions
from kit.judges.mirror_client import IDENTITY_POLICY
from kit.judges.mirrormaker import MirrorMakerTools
from kit.runs.commands import logmirror, wait_until
from kit.runs.inline_run import config_text, mirror_to_cluster, run_now
from kit.servers.apache import VERSIONS
from kit.servers.embedded import EmbeddedBroker
from kit.servers.kafka import create_topic
from logmirror.wire.mirrormaker import decode_checkpoint

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from kit.judges.clients import Row
    from kit.servers.kafka import ApacheKafka
    from kit.servers.machine import Process

pytestmark = pytest.mark.xdist_group("e2e-groups")

PARTITIONS = 2
BURST = 20_000
UNCOPIED = 1_000
"""Records of each partition that MirrorMaker, when it is killed, has not read."""


class World(NamedTuple):
    """A topic, MirrorMaker's copy of it, and the mirror that takes it over."""

    source: str
    target: str
    topic: str
    copied_topic: str
    properties: dict[str, object]
    folder: Path
    config: Path

    @property
    def alias(self) -> str:
        return f"{self.topic}-a"

    @property
    def group(self) -> str:
        return f"{self.topic}-billing"

    def here(self, partition: int) -> list[Row]:
        """The committed records of the source."""
        return list(rows_by_librdkafka(self.source, self.topic, partition=partition))

    def there(self, partition: int) -> list[Row]:
        return list(rows_by_librdkafka(self.target, self.copied_topic, partition=partition))

    def checkpoints(self) -> dict[int, list[tuple[int, int]]]:
        """Upstream and downstream of the group's checkpoints, for each partition."""
        found: dict[int, list[tuple[int, int]]] = {number: [] for number in range(PARTITIONS)}
        with contextlib.suppress(KafkaException):  # no topic yet
            for row in rows_by_librdkafka(self.target, f"{self.alias}.checkpoints.internal"):
                one = decode_checkpoint(row.key, row.value)
                if (one.group, one.topic) == (self.group, self.copied_topic):
                    found[one.partition].append((one.upstream, one.downstream))
        return found


def world_of(  # noqa: PLR0913  # two clusters, and how MirrorMaker copies
    source: ApacheKafka,
    target: str,
    topic: str,
    folder: Path,
    *,
    identity: bool = False,
    properties: Mapping[str, object] | None = None,
) -> World:
    create_topic(source.bootstrap, topic, PARTITIONS, {})
    for number in range(PARTITIONS):
        write_transactions(source.bootstrap, topic, number)
        produce(source.bootstrap, topic, odd_messages(300, seed=number), partition=number)
    keys: dict[str, Any] = {"name": f"{topic}-b", "offsets": "translate", "takeover": "mm2"}
    if identity:
        keys["topic"] = topic
    mirror = mirror_to_cluster(topic, source.bootstrap, target, **keys)
    mirror["groups"] = {"source-alias": f"{topic}-a", "include": [f"{topic}.*"]}
    config = folder / "logmirror.yaml"
    config.write_text(config_text(mirror))
    return World(
        source=source.bootstrap,
        target=target,
        topic=topic,
        copied_topic=topic if identity else f"{topic}-a.{topic}",
        properties={
            **({"replication.policy.class": IDENTITY_POLICY} if identity else {}),
            **(properties or {}),
        },
        folder=folder,
        config=config,
    )


@pytest.fixture(scope="session")
def mirrormaker() -> MirrorMakerTools:
    return MirrorMakerTools(VERSIONS[-1])


def commit(world: World, offsets: Sequence[int]) -> None:
    consumer = Consumer({"bootstrap.servers": world.source, "group.id": world.group})
    wanted = [TopicPartition(world.topic, *pair) for pair in enumerate(offsets)]
    consumer.commit(offsets=wanted, asynchronous=False)
    consumer.close()


def end_there(world: World) -> int:
    """The records and markers of the target, all partitions together."""
    with contextlib.suppress(KafkaException):
        return sum(log_bounds(world.target, world.copied_topic, n)[1] for n in range(PARTITIONS))
    return 0


@contextlib.contextmanager
def copying(tools: MirrorMakerTools, world: World, life: int) -> Iterator[Process]:
    clusters = {world.alias: world.source, f"{world.topic}-b": world.target}
    folder = world.folder / f"mirrormaker-{life}"
    process = tools.start_dedicated(clusters, world.topic, folder, world.properties)
    try:
        yield process
    finally:
        process.end(kill=True)


def burst(world: World, first: int, count: int) -> None:
    for number in range(PARTITIONS):
        records = (
            Message(b"%d" % n, b"burst %d" % n, (), 1_750_000_000_000 + n)
            for n in range(first, first + count)
        )
        produce(world.source, world.topic, records, partition=number)


def killed_while_copying(process: Process, world: World, life: int) -> None:
    """Kill MirrorMaker when it has copied a part of what is at the source."""
    before = end_there(world)
    burst(world, life * 100_000, BURST)
    wait_until(lambda: end_there(world) > before, what=lambda: "records of the burst")
    process.signal(signal.SIGSTOP)
    burst(world, life * 100_000 + BURST, UNCOPIED)
    process.signal(signal.SIGKILL)
    process.popen.wait(60)


def taken_over(world: World) -> str:
    """Run until MirrorMaker's group has no members; return the output."""
    first = run_now(world.config)
    if first.returncode:
        assert first.returncode == 75, first.stderr
        assert "MirrorMaker still runs" in first.stderr or "transaction is open" in first.stderr
    done = [first]

    def is_done() -> bool:
        if done[-1].returncode == 75:
            done.append(run_now(world.config))
        return done[-1].returncode != 75

    wait_until(is_done, what=lambda: done[-1].stderr[-2000:], timeout_s=120)
    assert done[-1].returncode == 0, done[-1].stderr
    return done[-1].stderr


def fields(rows: Sequence[Row]) -> list[Any]:
    """What must not change: all but the offset and the timestamp's type."""
    return [(row.timestamp_ms, row.key, row.value, row.headers) for row in rows]


def is_in_order(wanted: Sequence[Any], found: Sequence[Any]) -> bool:
    rest = iter(found)
    return all(one in rest for one in wanted)


def check_adopted(world: World, before: Sequence[list[Row]]) -> None:
    """Each missing record was added once, in order, behind what MirrorMaker had written."""
    for number in range(PARTITIONS):
        here, there = fields(world.here(number)), world.there(number)
        old = before[number]
        assert there[: len(old)] == old
        added = fields(there[len(old) :])
        assert added == here[len(here) - len(added) :]
        copied, committed = here[: len(here) - len(added)], set(here)
        # MirrorMaker copies records of aborted transactions too, and may have ended with one.
        assert copied[-1] == [one for one in fields(old) if one in committed][-1]
        assert is_in_order(copied, fields(old))
        assert is_in_order(here, fields(there))


def check_group(world: World) -> None:
    """No unread record is skipped, and no checkpoint went back."""
    for number, found in world.checkpoints().items():
        assert found
        assert [one[1] for one in found] == sorted(one[1] for one in found)
        upstream, downstream = found[-1]
        unread = [row for row in world.here(number) if row.offset >= upstream]
        rest = [row for row in world.there(number) if row.offset >= downstream]
        assert is_in_order(fields(unread), fields(rest))


def one_life(world: World, tools: MirrorMakerTools, life: int = 1) -> None:
    with copying(tools, world, life) as process:
        wait_until(
            lambda: all(world.checkpoints().values()),
            what=lambda: f"checkpoints\n{process.log.read_text()[-3000:]}",
        )
        killed_while_copying(process, world, life)


def check_taken_over(world: World) -> None:
    before = [world.there(number) for number in range(PARTITIONS)]
    checkpoints = world.checkpoints()

    text = taken_over(world)

    assert "taken over from MirrorMaker" in text
    check_adopted(world, before)
    assert {n: one[: len(checkpoints[n])] for n, one in world.checkpoints().items()} == checkpoints
    check_group(world)
    after = [world.there(number) for number in range(PARTITIONS)]
    assert all(len(rows) >= len(before[n]) + UNCOPIED for n, rows in enumerate(after))
    last = [world.here(number)[-1].offset + 1 for number in range(PARTITIONS)]
    commit(world, last)
    again = run_now(world.config)
    assert again.returncode == 0, again.stderr
    assert "taken over" not in again.stderr
    assert [world.there(number) for number in range(PARTITIONS)] == after
    check_group(world)
    assert [one[-1] for one in world.checkpoints().values()] == [
        (up, rows[-1].offset + 1) for up, rows in zip(last, after, strict=True)
    ]


def test_a_copy_of_mirrormaker_is_continued(kafka_431, topic_name, tmp_path, mirrormaker):
    with EmbeddedBroker(tmp_path / "broker") as target:
        world = world_of(kafka_431, target.bootstrap, topic_name, tmp_path)
        commit(world, [world.here(number)[100].offset for number in range(PARTITIONS)])
        one_life(world, mirrormaker)
        check_taken_over(world)


@pytest.mark.gate("two more starts of MirrorMaker; the first promise is in `make test`")
def test_a_repetition_that_was_killed_is_continued(
    kafka_431, kafka_392, topic_name, tmp_path, mirrormaker
):
    """The second MirrorMaker begins again, because the first one had stored no offset."""
    world = world_of(kafka_431, kafka_392.bootstrap, topic_name, tmp_path, identity=True)
    commit(world, [world.here(number)[100].offset for number in range(PARTITIONS)])
    one_life(world, mirrormaker)
    once = [world.there(number) for number in range(PARTITIONS)]
    wait_until(
        lambda: "MirrorMaker still runs" not in logmirror("status", "-c", world.config).stdout,
        what=lambda: "the end of MirrorMaker's session",
    )
    one_life(world, mirrormaker, life=2)
    repeated = [fields(world.there(n)[len(once[n]) :]) for n in range(PARTITIONS)]
    assert any(rows and rows[0] == fields(once[n])[0] for n, rows in enumerate(repeated))

    check_taken_over(world)


@pytest.mark.gate("one more start of MirrorMaker")
def test_a_copy_with_transactions_is_continued(
    kafka_431, kafka_392, topic_name, tmp_path, mirrormaker
):
    properties = {
        f"{topic_name}-b.exactly.once.source.support": "enabled",
        f"{topic_name}-a.consumer.isolation.level": "read_committed",
        "dedicated.mode.enable.internal.rest": "true",
        "transaction.timeout.ms": 10_000,
    }
    world = world_of(kafka_431, kafka_392.bootstrap, topic_name, tmp_path, properties=properties)
    commit(world, [world.here(number)[100].offset for number in range(PARTITIONS)])
    one_life(world, mirrormaker)

    check_taken_over(world)

    for number in range(PARTITIONS):
        assert fields(world.here(number)) == fields(world.there(number))

"""Groups translated from one Apache Kafka to another, beside MirrorMaker 2; JSON on stdout.

    python bench/checkpoints.py [--groups N] [--partitions N] [--syncs N] [--history N]

The replica has new offsets, so each translation is a search in the offset syncs. Both programs read
the same topics, one after the other: `logmirror run --only groups`, and MirrorMaker's checkpoint
connector in a Connect worker, each with one round every 5 seconds.

    start       from the start of the process until all checkpoints are written
    idle        CPU time while nothing changes
    age         all groups have committed: until the last of their checkpoints is written
    written     checkpoints at the start, if not all of them were written within 3 minutes;
                then idle and age are not measured
    distance    records that a group reads again, for groups evenly spread over a topic

Rounds of the same code in this process are measured too: `first` reads and writes everything,
nothing has changed before `idle`, every group has moved before `moved`, and `restart` is a new
process that writes nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests")]

from kit.judges.clients import rows_by_librdkafka  # noqa: E402  # after the path is set
from kit.judges.mirrormaker import CHECKPOINTS, MirrorMakerTools  # noqa: E402  # as above
from kit.servers.kafka import ApacheKafka  # noqa: E402  # as above
from kit.servers.machine import Process  # noqa: E402  # as above
from logmirror.clock import SYSTEM_CLOCK  # noqa: E402  # as above
from logmirror.cluster.client import LATEST, ClusterClient  # noqa: E402  # as above
from logmirror.cluster.groups import GroupOffset  # noqa: E402  # as above
from logmirror.cluster.offset_syncs import Run, SyncRule  # noqa: E402  # as above
from logmirror.cluster.properties import connection_settings  # noqa: E402  # as above
from logmirror.groups.link import Link  # noqa: E402  # as above
from logmirror.groups.link_spec import LinkSpec, ReplicaSpec  # noqa: E402  # as above
from logmirror.mirror.ports import KafkaSpec  # noqa: E402  # as above
from logmirror.model import TimestampType, TopicPartition  # noqa: E402  # as above
from logmirror.wire.mirrormaker import (  # noqa: E402  # as above
    decode_checkpoint,
    encode_sync,
    encode_sync_key,
    syncs_topic,
)
from logmirror.wire.records import Record, encode_reference  # noqa: E402  # as above

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

VERSION = "4.3.1"
ALIAS, OURS = "standby", "primary.checkpoints.internal"
TOPIC, HISTORY = "orders", "history"
SYNCS = syncs_topic(ALIAS) or ""
INTERVAL_S = 5
IDLE_S = 30
IDLE_ROUNDS = 5
FAR_GROUPS = 1_000
MIB = 1 << 20
_BATCH = 1_000
DEADLINE_S = 180


@dataclass(frozen=True)
class Cluster:
    """A broker, and a client of it."""

    broker: ApacheKafka
    client: ClusterClient

    @property
    def bootstrap(self) -> str:
        """Its address."""
        return self.broker.bootstrap

    def end(self, topic: str) -> int:
        """The log end offset of partition 0; 0 if there is none."""
        with contextlib.suppress(Exception):  # it is created while this waits
            where = TopicPartition(topic, 0)
            return self.client.list_offsets([where], LATEST, read_committed=False)[where]
        return 0


@dataclass(frozen=True)
class World:
    """The two clusters, and what is measured on them."""

    source: Cluster
    target: Cluster
    tools: MirrorMakerTools
    folder: Path
    options: argparse.Namespace

    @property
    def partitions(self) -> list[TopicPartition]:
        """The partitions of the topic with many groups."""
        return [TopicPartition(TOPIC, number) for number in range(self.options.partitions)]

    @property
    def records(self) -> int:
        """Records of each partition; each has an offset sync."""
        return self.options.syncs // self.options.partitions


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--groups", type=int, default=1_000)
    parser.add_argument("--partitions", type=int, default=100)
    parser.add_argument("--syncs", type=int, default=1_000_000)
    parser.add_argument("--history", type=int, default=100_000)
    options = parser.parse_args()
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        clusters = [stack.enter_context(_cluster(folder / name)) for name in ("source", "target")]
        world = World(*clusters, MirrorMakerTools(VERSION), folder, options)
        _fill(world)
        print(
            json.dumps(
                {
                    **{name: getattr(options, name) for name in ("groups", "partitions", "syncs")},
                    "history": options.history,
                    "rounds": _rounds(world),
                    "programs": _programs(world),
                    "distance": _distances(world),
                }
            )
        )


@contextlib.contextmanager
def _cluster(folder: Path) -> Iterator[Cluster]:
    broker = ApacheKafka(VERSION, folder)
    broker.start()
    try:
        with ClusterClient(connection_settings(broker.bootstrap, {})) as client:
            yield Cluster(broker, client)
    finally:
        broker.remove()


# -- what is there ---------------------------------------------------------------------------------


def _fill(world: World) -> None:
    """Records at both clusters, syncs at the source, and groups in the middle of each partition."""
    options, count = world.options, world.records
    for cluster in (world.source, world.target):
        cluster.broker.create_topic(TOPIC, options.partitions)
        cluster.broker.create_topic(HISTORY)
        _append(cluster, {**dict.fromkeys(world.partitions, count), _history(): options.history})
    world.source.broker.create_topic(SYNCS, config={"cleanup.policy": "compact"})
    every = [(one, at) for at in range(count) for one in world.partitions]
    rule = SyncRule()
    pairs = rule.due([Run(0, 0, options.history)]) + rule.flush()
    _write_syncs(world.source, every + [(_history(), up) for up, _ in pairs])
    _commit(world, count // 2)
    step = options.history // FAR_GROUPS
    for number in range(FAR_GROUPS):
        _commit_of(world.source, f"far-{number:04}", {_history(): number * step})


def _history() -> TopicPartition:
    return TopicPartition(HISTORY, 0)


def _append(cluster: Cluster, counts: dict[TopicPartition, int]) -> None:
    now_ms = SYSTEM_CLOCK.now_ms()
    records = [
        Record(at, now_ms, TimestampType.CREATE_TIME, None, b"x", ()) for at in range(_BATCH)
    ]
    batch = encode_reference(records, leader_epoch=-1)
    with cluster.client.pipeline() as pipeline:
        for partition, count in counts.items():
            for _ in range(0, count, _BATCH):
                pipeline.send([(partition, memoryview(bytearray(batch)))])
                _collect(pipeline)


def _collect(pipeline) -> None:
    for response in pipeline.collect(block=True):
        if response.error is not None:
            raise response.error


def _write_syncs(cluster: Cluster, pairs: list[tuple[TopicPartition, int]]) -> None:
    now_ms = SYSTEM_CLOCK.now_ms()
    with cluster.client.pipeline() as pipeline:
        for first in range(0, len(pairs), 5 * _BATCH):
            records = [
                Record(
                    at,
                    now_ms,
                    TimestampType.CREATE_TIME,
                    encode_sync_key(partition),
                    encode_sync(offset, offset),
                    (),
                )
                for at, (partition, offset) in enumerate(pairs[first : first + 5 * _BATCH])
            ]
            batch = memoryview(bytearray(encode_reference(records, leader_epoch=-1)))
            pipeline.send([(TopicPartition(SYNCS, 0), batch)])
            _collect(pipeline)


def _commit(world: World, offset: int) -> None:
    for number in range(world.options.groups):
        _commit_of(world.source, f"group-{number:04}", dict.fromkeys(world.partitions, offset))


def _commit_of(cluster: Cluster, group: str, offsets: dict[TopicPartition, int]) -> None:
    wanted = {one: GroupOffset(offset, -1, "") for one, offset in offsets.items()}
    errors = cluster.client.groups.commit(group, wanted)
    if any(errors.values()):
        message = f"could not commit for {group}: {errors}"
        raise RuntimeError(message)


# -- rounds in this process ------------------------------------------------------------------------


def _rounds(world: World) -> dict[str, object]:
    """Rounds of the link, whose checkpoints have an alias of their own."""
    spec = _spec(world, "rounds", TOPIC, "group-.*")
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    clients = world.source.client, world.target.client, SYSTEM_CLOCK
    with contextlib.closing(Link(spec, *clients)) as link:
        found: dict[str, object] = {"first": _round(link)}
        idle = [_round(link) for _ in range(IDLE_ROUNDS)]
        found["idle"] = {key: statistics.median(one[key] for one in idle) for key in idle[0]}
        _commit(world, world.records // 2 + 1)
        found["moved"] = _round(link)
    with contextlib.closing(Link(spec, *clients)) as link:
        found["restart"] = _round(link)
    after_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return found | {"peak_mib_more": round((after_kib - before_kib) / 1024, 1)}


def _spec(world: World, alias: str, topic: str, groups: str) -> LinkSpec:
    settings = [connection_settings(one.bootstrap, {}) for one in (world.source, world.target)]
    written = KafkaSpec(cluster=settings[1], topic=topic, name=ALIAS, offsets="translate")
    return LinkSpec(
        source=settings[0],
        source_alias=alias,
        target=settings[1],
        destination=ALIAS,
        replicas=(ReplicaSpec(topic, topic, None, written),),
        include=(groups,),
        exclude=(),
        interval_ms=INTERVAL_S * 1_000,
        commits=False,
    )


def _round(link: Link) -> dict[str, float]:
    began, cpu = time.perf_counter(), time.process_time()
    done = link.round()
    return {
        "seconds": round(time.perf_counter() - began, 3),
        "cpu_seconds": round(time.process_time() - cpu, 3),
        "groups": done.groups,
        "checkpoints": done.checkpoints,
    }


# -- the programs, one after the other -------------------------------------------------------------


def _programs(world: World) -> dict[str, object]:
    pairs, end = world.options.groups * world.options.partitions, world.records
    return {
        "logmirror": _program(world, lambda: _start_ours(world), OURS, pairs, end - 1),
        "MirrorMaker": _program(
            world,
            lambda: world.tools.start_checkpoints(
                world.source.bootstrap,
                world.target.bootstrap,
                alias=ALIAS,
                topic=TOPIC,
                groups="group-.*",
                folder=world.folder / "connect",
                interval_s=INTERVAL_S,
            ),
            CHECKPOINTS,
            pairs,
            end,
        ),
    }


def _start_ours(world: World) -> Process:
    mirror = {
        "name": "orders",
        "source": {"bootstrap-servers": world.source.bootstrap},
        "topic": TOPIC,
        "partitions": "all",
        "destinations": [
            {
                "name": ALIAS,
                "type": "kafka",
                "bootstrap-servers": world.target.bootstrap,
                "offsets": "translate",
            }
        ],
        "groups": {
            "source-alias": "primary",
            "include": ["group-.*"],
            "interval-ms": INTERVAL_S * 1_000,
        },
    }
    config = world.folder / "mirror.yaml"
    config.write_text(json.dumps({"mirrors": [mirror]}))
    return Process(
        [sys.executable, "-m", "logmirror", "run", "--only", "groups", "-c", str(config)],
        log=world.folder / "ours.log",
        environment={**os.environ, "PYTHONPATH": str(ROOT / "src")},
    )


def _program(
    world: World, start: Callable[[], Process], topic: str, pairs: int, later: int
) -> dict[str, float]:
    """Measure one program: its start, its idle time, and how old its checkpoints become."""
    began = time.perf_counter()
    process = start()
    try:
        running = psutil.Process(process.pid)
        written = _wait(world.target, topic, pairs, process)
        if written < pairs:
            return {"written": written, "rss_mib": round(running.memory_info().rss / MIB, 3)}
        found = {"start_s": time.perf_counter() - began}
        time.sleep(2 * INTERVAL_S)
        before = sum(running.cpu_times()[:2])
        time.sleep(IDLE_S)
        found["idle_cores"] = (sum(running.cpu_times()[:2]) - before) / IDLE_S
        end = world.target.end(topic)
        commits = time.perf_counter()
        _commit(world, later)
        committed = time.perf_counter()
        if _wait(world.target, topic, end + pairs, process) >= end + pairs:
            found["age_s"] = time.perf_counter() - committed
        found["commits_s"] = committed - commits
        found["rss_mib"] = running.memory_info().rss / MIB
    finally:
        process.end(kill=True)
    return {name: round(value, 3) for name, value in found.items()}


def _wait(cluster: Cluster, topic: str, wanted: int, process: Process) -> int:
    """Wait until a topic has so many records, or the deadline; returns how many it has."""
    until = time.perf_counter() + DEADLINE_S
    while (end := cluster.end(topic)) < wanted and time.perf_counter() < until:
        if not process.alive:
            message = f"{topic} ends at {end}, not {wanted}: {process.log.read_text()}"
            raise RuntimeError(message)
        time.sleep(0.05)
    return end


# -- distances -------------------------------------------------------------------------------------


def _distances(world: World) -> dict[str, object]:
    """What each of the groups that are spread over a topic reads again."""
    spec = _spec(world, "far", HISTORY, "far-.*")
    clients = world.source.client, world.target.client, SYSTEM_CLOCK
    with contextlib.closing(Link(spec, *clients)) as link:
        link.round()
    seen = world.target.end(CHECKPOINTS)
    worker = world.tools.start_checkpoints(
        world.source.bootstrap,
        world.target.bootstrap,
        alias=ALIAS,
        topic=HISTORY,
        groups="far-.*",
        folder=world.folder / "far",
    )
    try:
        _wait(world.target, CHECKPOINTS, seen + FAR_GROUPS, worker)  # `_of_history` counts them
    finally:
        worker.end(kill=True)
    return {
        "logmirror": _spread(_of_history(world, "far.checkpoints.internal")),
        "MirrorMaker": _spread(_of_history(world, CHECKPOINTS)),
    }


def _of_history(world: World, topic: str) -> list[int]:
    """The distances of the last checkpoint of each group."""
    found: dict[str, int] = {}
    for row in rows_by_librdkafka(world.target.bootstrap, topic):
        one = decode_checkpoint(row.key, row.value)
        if one.topic == HISTORY:
            found[one.group] = one.upstream - one.downstream
    if len(found) != FAR_GROUPS or min(found.values()) < 0:
        message = f"{topic}: {len(found)} groups, the least distance is {min(found.values())}"
        raise RuntimeError(message)
    return list(found.values())


def _spread(distances: Iterable[int]) -> dict[str, float]:
    ordered = sorted(distances)
    return {
        "median": statistics.median(ordered),
        "p99": ordered[len(ordered) * 99 // 100],
        "highest": ordered[-1],
    }


if __name__ == "__main__":
    main()

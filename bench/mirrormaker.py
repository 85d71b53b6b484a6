"""The peer: MirrorMaker 2 in dedicated mode, from Maven's jars, as its own script starts it.

It runs with its defaults plus the settings that a cluster of one broker needs, or tuned for
throughput. MirrorMaker does not end by itself, so the destination is polled: the flow begins with
the first record there, when its start is over, and ends when all records are there.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

import measured  # after the path is set
from clusters import VERSION, Cluster, Shape  # after the path is set

from kit.servers.apache import ApacheTools  # after the path is set
from kit.servers.machine import Process, java  # after the path is set
from kit.servers.maven import maven_jars  # after the path is set

if TYPE_CHECKING:
    from collections.abc import Mapping

JARS = (
    ("org.apache.kafka", "connect-mirror", VERSION),
    ("org.apache.logging.log4j", "log4j-slf4j-impl", "2.25.1"),
    ("org.apache.logging.log4j", "log4j-core", "2.25.1"),
)
JVM = (
    *("-Xms256M", "-Xmx2G", "-server", "-XX:+UseG1GC", "-XX:MaxGCPauseMillis=20"),
    *("-XX:InitiatingHeapOccupancyPercent=35", "-XX:+ExplicitGCInvokesConcurrent"),
    *("-XX:MaxInlineLevel=15", "-Djava.awt.headless=true"),
)
"""The JVM options of `connect-mirror-maker.sh`."""

TUNED = {
    "{source}.consumer.max.poll.records": 5000,
    "{source}.consumer.fetch.max.bytes": 50 << 20,
    "{source}.consumer.max.partition.fetch.bytes": 8 << 20,
    "{source}.consumer.receive.buffer.bytes": -1,
    "{target}.producer.batch.size": 512 << 10,
    "{target}.producer.linger.ms": 20,
    "{target}.producer.buffer.memory": 128 << 20,
    "{target}.producer.max.request.size": 8 << 20,
    "{target}.producer.send.buffer.bytes": -1,
    "{target}.offset.flush.interval.ms": 60_000,
}
_BASE = {
    "clusters": "{source},{target}",
    "{source}->{target}.enabled": "true",
    "{source}->{target}.topics": "{topic}",
    "{target}->{source}.enabled": "false",
    "{target}->{source}.emit.heartbeats.enabled": "false",
    # Copy, and nothing beside it.
    "emit.heartbeats.enabled": "false",
    "emit.checkpoints.enabled": "false",
    "sync.topic.acls.enabled": "false",
    "replication.policy.class": "org.apache.kafka.connect.mirror.IdentityReplicationPolicy",
    "{source}.consumer.auto.offset.reset": "earliest",
    # A cluster of one broker.
    "replication.factor": 1,
    "checkpoints.topic.replication.factor": 1,
    "heartbeats.topic.replication.factor": 1,
    "offset-syncs.topic.replication.factor": 1,
    "offset.storage.replication.factor": 1,
    "status.storage.replication.factor": 1,
    "config.storage.replication.factor": 1,
}
_TIMEOUT_S = 300


def mirrormaker(  # noqa: PLR0913  # a contestant's parameters, and two of its own
    source: Cluster,
    target: Cluster,
    shape: Shape,
    folder: Path,
    *,
    tuned: bool,
    more: Mapping[str, object] | None = None,
) -> dict[str, float]:
    """Copy a topic, with more settings if given; see `rounds.Contestant` for the figures."""
    target.create_topic(shape.topic, shape.partitions)
    # Positions are stored at the target by the alias of the source: a new alias starts at 0.
    names = {"source": f"source{time.time_ns()}", "target": "target", "topic": shape.topic}
    settings: dict[str, object] = {
        **_BASE,
        "{source}.bootstrap.servers": source.bootstrap,
        "{target}.bootstrap.servers": target.bootstrap,
        **({**TUNED, "tasks.max": shape.partitions} if tuned else {}),
        **(more or {}),
    }
    properties = folder / "mirrormaker.properties"
    properties.write_text(_text(settings, names))
    tree, of_source, of_target = measured.Tree(), measured.Tree(), measured.Tree()
    process = Process(_command(properties), log=folder / "mirrormaker.log")
    began = time.time()
    try:
        roots = {process.pid: tree, source.pid: of_source, target.pid: of_target}
        with measured.Watch(roots):
            first = 0.0
            for now, count in target.watch_ends(
                shape.topic, shape.partitions, timeout_s=_TIMEOUT_S
            ):
                first = first or (now if count else 0.0)
                if count >= shape.records:
                    break
                if not process.alive:
                    raise RuntimeError(process.tail())
    finally:
        process.end(kill=True)
    return {
        "flow_s": now - first,
        "start_s": first - began,
        "cpu_s": tree.cpu_at(now),
        "flow_cpu_s": tree.cpu_between(first, now),
        "source_cpu_s": of_source.cpu_between(first, now),
        "target_cpu_s": of_target.cpu_between(first, now),
        "peak_mib": tree.peak_bytes / 2**20,
    }


def _text(settings: Mapping[str, object], names: Mapping[str, str]) -> str:
    lines = (f"{key}={value}\n" for key, value in settings.items())
    return "".join(line.format(**names) for line in lines)


def _command(properties: Path) -> list[str]:
    jars = maven_jars(f"connect-mirror-{VERSION}", JARS)
    log = f"-Dlog4j2.configurationFile={ApacheTools(VERSION).jars.parent}/log4j2-WARN.properties"
    main = "org.apache.kafka.connect.mirror.MirrorMaker"
    return [java(), *JVM, log, "-cp", f"{jars}/*", main, str(properties)]

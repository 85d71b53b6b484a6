"""Groups of consumers translated from one Apache Kafka to another; JSON on stdout.

    python bench/checkpoints.py [--groups N] [--partitions N] [--syncs N]

The replica has new offsets, so each translation is a search in the offset syncs. All groups commit
an offset of each partition. Measured in this process, with the rounds of `run --only groups`:

    first     everything is read and written: the syncs, the groups, and all checkpoints
    idle      nothing has changed
    moved     every group has committed a later offset of each partition
    restart   a new process: the checkpoints are read back, and nothing is written
"""

from __future__ import annotations

import argparse
import contextlib
import json
import resource
import statistics
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests")]

from kit.servers.kafka import ApacheKafka  # noqa: E402  # after the path is set
from logmirror.clock import SYSTEM_CLOCK  # noqa: E402  # as above
from logmirror.cluster.client import ClusterClient  # noqa: E402  # as above
from logmirror.cluster.groups import GroupOffset  # noqa: E402  # as above
from logmirror.cluster.properties import connection_settings  # noqa: E402  # as above
from logmirror.groups.link import Link  # noqa: E402  # as above
from logmirror.groups.link_spec import LinkSpec, ReplicaSpec  # noqa: E402  # as above
from logmirror.mirror.ports import KafkaSpec  # noqa: E402  # as above
from logmirror.model import TimestampType, TopicPartition  # noqa: E402  # as above
from logmirror.wire.mirrormaker import encode_sync, encode_sync_key, syncs_topic  # noqa: E402  # as above
from logmirror.wire.records import Record, encode_reference  # noqa: E402  # as above

VERSION = "4.3.1"
TOPIC = "orders"
SYNCS = syncs_topic("standby") or ""
RECORDS = 1_000
"""Records of each partition at both clusters; there is a sync for each range of equal size."""
IDLE_ROUNDS = 5
_BATCH = 5_000
_INTERVAL_S = 5


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--groups", type=int, default=1_000)
    parser.add_argument("--partitions", type=int, default=100)
    parser.add_argument("--syncs", type=int, default=1_000_000)
    options = parser.parse_args()
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        clients = []
        for name in ("source", "target"):
            broker = stack.enter_context(contextlib.closing(_Broker(folder / name)))
            broker.create(options.partitions)
            settings = connection_settings(broker.bootstrap, {})
            clients.append((stack.enter_context(ClusterClient(settings)), settings))
        print(json.dumps(_measured(*clients, options)))


class _Broker:
    """A broker that ends with the block."""

    def __init__(self, folder: Path) -> None:
        self._kafka = ApacheKafka(VERSION, folder)
        self._kafka.start()
        self.bootstrap = self._kafka.bootstrap

    def create(self, partitions: int) -> None:
        """Create the topics, and wait for their leaders."""
        self._kafka.create_topic(TOPIC, partitions)
        self._kafka.create_topic(SYNCS, config={"cleanup.policy": "compact"})

    def close(self) -> None:
        self._kafka.remove()


def _measured(source_pair, target_pair, options: argparse.Namespace) -> dict[str, object]:
    (source, source_settings), (target, target_settings) = source_pair, target_pair
    partitions = [TopicPartition(TOPIC, number) for number in range(options.partitions)]
    for client in (source, target):
        _append(client, {one: [b"x"] * RECORDS for one in partitions})
    _write_syncs(source, partitions, options.syncs)
    names = [f"group-{number:04}" for number in range(options.groups)]
    _commit(source, names, partitions, RECORDS // 2)
    written = KafkaSpec(cluster=target_settings, topic=TOPIC, name="standby", offsets="translate")
    spec = LinkSpec(
        source=source_settings,
        source_alias="primary",
        target=target_settings,
        destination="standby",
        replicas=(ReplicaSpec("orders", TOPIC, None, written),),
        include=(".*",),
        exclude=(),
        interval_ms=5_000,
        commits=False,
    )
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with contextlib.closing(Link(spec, source, target, SYSTEM_CLOCK)) as link:
        found = {"first": _round(link)}
        idle = [_round(link) for _ in range(IDLE_ROUNDS)]
        found["idle"] = {key: statistics.median(one[key] for one in idle) for key in idle[0]}
        _commit(source, names, partitions, RECORDS)
        found["moved"] = _round(link)
    with contextlib.closing(Link(spec, source, target, SYSTEM_CLOCK)) as link:
        found["restart"] = _round(link)
    after_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {
        "groups": options.groups,
        "partitions": options.partitions,
        "syncs": options.syncs,
        "rounds": found,
        "peak_mib_more": round((after_kib - before_kib) / 1024, 1),
    }


def section(found: dict) -> str:
    """The section of the page."""
    rounds, groups = found["rounds"], found["groups"]
    pairs = groups * found["partitions"]
    lines = [
        "## Consumer groups of the source, translated",
        "",
        (
            f"{groups:,} groups with {found['partitions']} partitions each, new offsets, "
            f"{found['syncs']:,} offset syncs. Source and target are Apache Kafka {VERSION} "
            "on the same machine. One run; `idle` is the median of 5 rounds."
        ),
        "",
        "| round | seconds | CPU seconds | checkpoints |",
        "|---|--:|--:|--:|",
    ]
    for name, one in rounds.items():
        figures = f"{one['seconds']:.2f} | {one['cpu_seconds']:.2f} | {one['checkpoints']:,.0f}"
        lines.append(f"| {name} | {figures} |")
    start, idle = rounds["first"]["seconds"], rounds["idle"]["cpu_seconds"] / _INTERVAL_S
    lines += [
        "",
        "| figure | measured | goal | met |",
        "|---|--:|--:|---|",
        (
            f"| start with {found['syncs']:,} syncs, to the last checkpoint | {start:.1f} s | "
            f"at most 5 s | {_met(start <= 5)} |"
        ),
        (
            f"| CPU of an idle service, one round each {_INTERVAL_S} s | {idle:.1%} of a core | "
            f"at most 10% | {_met(idle <= 0.1)} |"
        ),
        (
            f"| translated per second, all groups moved | "
            f"{pairs / rounds['moved']['seconds']:,.0f} offsets | - | - |"
        ),
        f"| memory more than before | {found['peak_mib_more']:,.0f} MiB | - | - |",
    ]
    return "\n".join(lines)


def _met(is_met: bool) -> str:
    return "yes" if is_met else "**no**"


def _round(link: Link) -> dict[str, float]:
    began, cpu = time.perf_counter(), time.process_time()
    done = link.round()
    return {
        "seconds": round(time.perf_counter() - began, 3),
        "cpu_seconds": round(time.process_time() - cpu, 3),
        "groups": done.groups,
        "checkpoints": done.checkpoints,
    }


def _append(client: ClusterClient, values: dict[TopicPartition, list[bytes]]) -> None:
    now_ms = SYSTEM_CLOCK.now_ms()
    with client.pipeline() as pipeline:
        for partition, texts in values.items():
            records = [
                Record(at, now_ms, TimestampType.CREATE_TIME, None, text, ())
                for at, text in enumerate(texts)
            ]
            _send(pipeline, partition, records)


def _send(pipeline, partition: TopicPartition, records: list[Record]) -> None:
    batch = memoryview(bytearray(encode_reference(records, leader_epoch=-1)))
    pipeline.send([(partition, batch)])
    for response in pipeline.collect(block=True):
        if response.error is not None:
            raise response.error


def _write_syncs(client: ClusterClient, partitions: list[TopicPartition], count: int) -> None:
    keys, now_ms = [encode_sync_key(one) for one in partitions], SYSTEM_CLOCK.now_ms()
    with client.pipeline() as pipeline:
        for first in range(0, count, _BATCH):
            records = []
            for at in range(first, min(first + _BATCH, count)):
                offset = at // len(keys) * RECORDS // max(count // len(keys), 1)
                value = encode_sync(offset, offset)
                key = keys[at % len(keys)]
                records.append(
                    Record(at - first, now_ms, TimestampType.CREATE_TIME, key, value, ())
                )
            _send(pipeline, TopicPartition(SYNCS, 0), records)


def _commit(
    client: ClusterClient, groups: list[str], partitions: list[TopicPartition], offset: int
) -> None:
    wanted = dict.fromkeys(partitions, GroupOffset(offset, -1, ""))
    for group in groups:
        errors = client.groups.commit(group, wanted)
        if any(errors.values()):
            message = f"could not commit for {group}: {errors}"
            raise RuntimeError(message)


if __name__ == "__main__":
    main()

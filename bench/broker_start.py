"""Start and size of the embedded broker, beside Apache Kafka 4.3.1; JSON on stdout.

    python bench/broker_start.py [--rounds N] [--partitions N] [--segments N] [--without-kafka]

A start lasts from the command to the first response to a client. `listening` is the line that
`logmirror broker` prints before. The contestants take turns in each round, and page cache and
compiled files are warm. Logs of many sealed segments are opened after a clean stop and after
`kill -9`; their oldest and their newest record are read.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests")]

from kit.servers.kafka import ApacheKafka  # noqa: E402  # after the path is set

if TYPE_CHECKING:
    from collections.abc import Iterator

VERSION = "4.3.1"
TIMEOUT_S = 60
IDLE_S = 2
MIB = 2**20
RECORDS = 200_000
RECORD_BYTES = 1024
SEGMENT_RECORD_BYTES = 12 * 1024
"""A record that fills a segment."""

SPREAD = 1000
"""Partitions among which the same number of segments is spread."""

TOPIC = "many"
QUIET = {"log_level": 0}
SEGMENTED = ("segments", "spread segments")
FILL_S = 300


def responded(bootstrap: str) -> None:
    backoff = {"reconnect.backoff.ms": 20, "reconnect.backoff.max.ms": 50}
    AdminClient({"bootstrap.servers": bootstrap, **backoff}).list_topics(timeout=TIMEOUT_S)


@contextmanager
def started(folder: Path, *, is_killed: bool = False) -> Iterator[tuple[psutil.Process, str]]:
    """Start the embedded broker; yields process and bootstrap. Stops it, or kills it."""
    command = [sys.executable, "-m", "logmirror", "broker", "--listen", "127.0.0.1:0"]
    command += ["--log-dir", str(folder), "--log-level", "error"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as broker:
        try:
            yield psutil.Process(broker.pid), broker.stdout.readline().split()[-1]
        finally:
            (broker.kill if is_killed else broker.terminate)()


def logmirror(folder: Path, *, load: bool = False) -> dict[str, float]:
    """One run of the embedded broker."""
    began_s = time.perf_counter()
    with started(folder) as (process, bootstrap):
        listening_s = time.perf_counter() - began_s
        cpu_s = sum(process.cpu_times()[:2])
        responded(bootstrap)
        start_s = time.perf_counter() - began_s
        found = {"listening_s": listening_s, "cpu_s": cpu_s, "start_s": start_s}
        return found | sizes([process], bootstrap, load=load)


def reopened(folder: Path, *, is_killed: bool) -> dict[str, float]:
    """One run on a log of many segments; a record is appended before the broker ends."""
    began_s = time.perf_counter()
    with started(folder, is_killed=is_killed) as (process, bootstrap):
        found = {"listening_s": time.perf_counter() - began_s}
        found["cpu_s"] = sum(process.cpu_times()[:2])
        found["oldest_s"] = record_read_s(bootstrap, is_newest=False) - began_s
        found["newest_s"] = record_read_s(bootstrap, is_newest=True) - began_s
        found |= sizes([process], bootstrap, load=False)
        fill(bootstrap, 1, 1)
        return found


def record_read_s(bootstrap: str, *, is_newest: bool) -> float:
    """Read the oldest or the newest record of partition 0; returns when it had arrived."""
    consumer = Consumer({"bootstrap.servers": bootstrap, "group.id": "bench", **QUIET})
    try:
        low, high = consumer.get_watermark_offsets(TopicPartition(TOPIC, 0), TIMEOUT_S)
        offset = high - 1 if is_newest else low
        consumer.assign([TopicPartition(TOPIC, 0, offset)])
        message = consumer.poll(TIMEOUT_S)
        if message is None or message.error():
            text = f"no record at offset {offset}: {message and message.error()}"
            raise RuntimeError(text)
        return time.perf_counter()
    finally:
        consumer.close()


def kafka(folder: Path, *, load: bool = False) -> dict[str, float]:
    """One run of Apache Kafka with the heap of its own start script; its folder is formatted."""
    broker = ApacheKafka(VERSION, folder, jvm=(), heap="1g")
    broker.start()
    broker.stop()
    began_s = time.perf_counter()
    with broker:
        responded(broker.bootstrap)
        found = {"start_s": time.perf_counter() - began_s}
        return found | sizes([psutil.Process(broker.pid)], broker.bootstrap, load=load)


def sizes(processes: list[psutil.Process], bootstrap: str, *, load: bool) -> dict[str, float]:
    def rss_mib() -> float:
        return sum(process.memory_info().rss for process in processes) / MIB

    time.sleep(IDLE_S)
    found = {"idle_mib": rss_mib()}
    if load:
        produce(bootstrap)
        found["loaded_mib"] = rss_mib()
    return found


def produce(bootstrap: str) -> None:
    admin = AdminClient({"bootstrap.servers": bootstrap})
    admin.create_topics([NewTopic("bench", 1)])["bench"].result(TIMEOUT_S)
    producer = Producer({"bootstrap.servers": bootstrap, "linger.ms": 5, "acks": "all"})
    value = b"x" * RECORD_BYTES
    for number in range(RECORDS):
        producer.produce("bench", value)
        if number % 10_000 == 0:
            producer.flush(TIMEOUT_S)
    if producer.flush(TIMEOUT_S):
        message = "records were not acknowledged"
        raise RuntimeError(message)


def with_partitions(folder: Path, count: int, segments: int = 0) -> None:
    """Make a log directory of as many partitions, each with so many sealed segments and an open
    one of one record."""
    with started(folder) as (_, bootstrap):
        admin = AdminClient({"bootstrap.servers": bootstrap})
        config = {"segment.bytes": str(SEGMENT_RECORD_BYTES + 1024)} if segments else {}
        admin.create_topics([NewTopic(TOPIC, count, config=config)])[TOPIC].result(TIMEOUT_S)
        fill(bootstrap, count, segments + 1)
    found = sum(1 for _ in folder.glob(f"{TOPIC}/*/*.batches"))
    if found != count * segments:
        message = f"{found} sealed segments instead of {count * segments}"
        raise RuntimeError(message)


def fill(bootstrap: str, partitions: int, records: int) -> None:
    """Append as many records to each partition, in batches of one."""
    producer = Producer({"bootstrap.servers": bootstrap, "batch.num.messages": 1, **QUIET})
    value = os.urandom(SEGMENT_RECORD_BYTES)
    for _ in range(records):
        for partition in range(partitions):
            producer.produce(TOPIC, value, partition=partition)
            producer.poll(0)
    if producer.flush(FILL_S):
        message = "records were not acknowledged"
        raise RuntimeError(message)


def runs(folder: Path, rounds: int, *, has_kafka: bool) -> Iterator[tuple[str, dict[str, float]]]:
    for number in range(rounds):
        load = number == 0
        yield "empty", logmirror(folder / f"empty-{number}", load=load)
        yield "partitions", logmirror(folder / "many")
        for name in SEGMENTED:
            yield name, reopened(folder / name, is_killed=True)
            yield f"{name}, killed", reopened(folder / name, is_killed=False)
        if has_kafka:
            yield "kafka", kafka(folder / f"kafka-{number}", load=load)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--partitions", type=int, default=1000)
    parser.add_argument("--segments", type=int, default=10_000, help="sealed ones, of one log")
    parser.add_argument("--without-kafka", action="store_true")
    options = parser.parse_args()
    found: dict[str, dict[str, list[float]]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with_partitions(folder / "many", options.partitions)
        with_partitions(folder / SEGMENTED[0], 1, options.segments)
        with_partitions(folder / SEGMENTED[1], SPREAD, options.segments // SPREAD)
        logmirror(folder / "warm")
        for title, figures in runs(folder, options.rounds, has_kafka=not options.without_kafka):
            for key, value in figures.items():
                found.setdefault(title, {}).setdefault(key, []).append(value)
    medians = {
        title: {key: statistics.median(values) for key, values in figures.items()}
        for title, figures in found.items()
    }
    counts = {"partitions": options.partitions, "segments": options.segments, "spread": SPREAD}
    print(json.dumps({"medians": medians, "rounds": found, **counts}))


if __name__ == "__main__":
    main()

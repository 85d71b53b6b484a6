"""End-to-end latency of the running service under little load.

A producer writes its clock into each record; consumers at both clusters compare it with the same
clock when they receive the record. The latency at the source is that of Kafka and of the clients.
"""

from __future__ import annotations

import statistics
import struct
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from confluent_kafka import OFFSET_BEGINNING, Consumer, Producer, TopicPartition

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

import measured  # after the path is set
from clusters import Cluster  # after the path is set
from ours import command, write_config  # after the path is set

from kit.servers.machine import Process  # after the path is set

if TYPE_CHECKING:
    from collections.abc import Iterable

RECORDS_S = 100
RECORD_BYTES = 100
WARM_UP_S = 20  # follow windows grow to their full length in that time
_STAMP = struct.Struct("<q")
_START_TIMEOUT_S = 120


class Reader(threading.Thread):
    """Measures the latency of every record of a topic."""

    def __init__(self, bootstrap: str, topic: str, partitions: int) -> None:
        super().__init__(daemon=True)
        self.found: list[tuple[int, float]] = []
        """(creation time in ns, latency in ms)"""

        self._consumer = Consumer(
            {"bootstrap.servers": bootstrap, "group.id": "delay", "log_level": 0}
        )
        self._consumer.assign(
            [TopicPartition(topic, number, OFFSET_BEGINNING) for number in range(partitions)]
        )
        self._ended = threading.Event()
        self.start()

    def run(self) -> None:
        while not self._ended.is_set():
            message = self._consumer.poll(0.1)
            if message is not None and not message.error():
                (made_ns,) = _STAMP.unpack_from(message.value())
                self.found.append((made_ns, (time.monotonic_ns() - made_ns) / 1e6))

    def end(self) -> None:
        self._ended.set()
        self.join()
        self._consumer.close()


def measure(base: Path, partitions: Iterable[int], *, seconds: int) -> list[dict[str, float]]:
    """Return the latencies for each number of partitions."""
    source, target = Cluster(base / "source"), Cluster(base / "target")
    try:
        source.start()
        target.start()
        return [_delays(source, target, base, count, seconds) for count in partitions]
    finally:
        source.remove()
        target.remove()


def _delays(
    source: Cluster, target: Cluster, base: Path, partitions: int, seconds: int
) -> dict[str, float]:
    topic = source.create_topic(f"delay-{partitions}", partitions)
    config = write_config(base, source.bootstrap, target.bootstrap, topic)
    service = Process(command(config), log=base / f"{topic}.log")
    readers: list[Reader] = []
    try:
        wait_until_it_copies(service)
        readers = [Reader(c.bootstrap, topic, partitions) for c in (source, target)]
        produce(source, topic, partitions, WARM_UP_S)
        cost = measured.Tree()
        began_ns = time.monotonic_ns()
        with measured.Watch({service.pid: cost}):
            began = time.time()
            made = produce(source, topic, partitions, seconds)
            ended = time.time()
        until = time.monotonic() + 10
        while len(since(readers[1], began_ns)) < made and time.monotonic() < until:
            time.sleep(0.05)
    finally:
        for reader in readers:
            reader.end()
        service.end()
    at_source, at_target = (sorted(since(reader, began_ns)) for reader in readers)
    if len(at_target) != made:
        message = f"{len(at_target)} of {made} records arrived"
        raise RuntimeError(message)
    return {
        "partitions": partitions,
        "seconds": seconds,
        "records": made,
        "p50_ms": statistics.median(at_target),
        "p99_ms": p99(at_target),
        "max_ms": at_target[-1],
        "source_p50_ms": statistics.median(at_source),
        "source_p99_ms": p99(at_source),
        "source_max_ms": at_source[-1],
        "cpu_s_per_s": cost.cpu_between(began, ended) / (ended - began),
    }


def wait_until_it_copies(service: Process) -> None:
    until = time.monotonic() + _START_TIMEOUT_S
    while b"mirror starts" not in service.log.read_bytes():
        if time.monotonic() > until or not service.alive:
            raise RuntimeError(service.tail())
        time.sleep(0.1)


def produce(source: Cluster, topic: str, partitions: int, seconds: int) -> int:
    """Produce a record every 10 ms without waiting for earlier ones; returns the count."""
    producer = Producer({"bootstrap.servers": source.bootstrap, "linger.ms": 0, "log_level": 0})
    began, count = time.monotonic(), seconds * RECORDS_S
    for index in range(count):
        time.sleep(max(began + index / RECORDS_S - time.monotonic(), 0))
        value = _STAMP.pack(time.monotonic_ns()).ljust(RECORD_BYTES, b".")
        producer.produce(topic, value, partition=index % partitions)
        producer.poll(0)
    producer.flush(30)
    return count


def since(reader: Reader, began_ns: int) -> list[float]:
    return [delay_ms for made_ns, delay_ms in list(reader.found) if made_ns >= began_ns]


def p99(ordered: list[float]) -> float:
    return ordered[min(len(ordered) * 99 // 100, len(ordered) - 1)]

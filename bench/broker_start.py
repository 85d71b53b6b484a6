"""Start and size of the embedded broker, beside Apache Kafka 4.3.1; JSON on stdout.

    python bench/broker_start.py [--rounds N] [--partitions N] [--without-kafka]

A start lasts from the command to the first response to a client. `listening` is the line that
`logmirror broker` prints before. The contestants take turns in each round, and page cache and
compiled files are warm.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
from confluent_kafka import Producer
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


def responded(bootstrap: str) -> None:
    backoff = {"reconnect.backoff.ms": 20, "reconnect.backoff.max.ms": 50}
    AdminClient({"bootstrap.servers": bootstrap, **backoff}).list_topics(timeout=TIMEOUT_S)


def logmirror(folder: Path, *, load: bool = False) -> dict[str, float]:
    """One run of the embedded broker."""
    began_s = time.perf_counter()
    command = [sys.executable, "-m", "logmirror", "broker", "--listen", "127.0.0.1:0"]
    command += ["--log-dir", str(folder), "--log-level", "error"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as broker:
        try:
            bootstrap = broker.stdout.readline().split()[-1]
            listening_s = time.perf_counter() - began_s
            process = psutil.Process(broker.pid)
            cpu_s = sum(process.cpu_times()[:2])
            responded(bootstrap)
            found = {
                "listening_s": listening_s,
                "cpu_s": cpu_s,
                "start_s": time.perf_counter() - began_s,
            }
            return found | sizes([process], bootstrap, load=load)
        finally:
            broker.terminate()


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


def with_partitions(folder: Path, count: int) -> None:
    """Make a log directory of as many partitions, each with a record."""
    command = [sys.executable, "-m", "logmirror", "broker", "--listen", "127.0.0.1:0"]
    command += ["--log-dir", str(folder), "--log-level", "error"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as broker:
        try:
            bootstrap = broker.stdout.readline().split()[-1]
            admin = AdminClient({"bootstrap.servers": bootstrap})
            admin.create_topics([NewTopic("many", count)])["many"].result(TIMEOUT_S)
            producer = Producer({"bootstrap.servers": bootstrap})
            for partition in range(count):
                producer.produce("many", b"x", partition=partition)
            if producer.flush(TIMEOUT_S):
                message = "records were not acknowledged"
                raise RuntimeError(message)
        finally:
            broker.terminate()


def runs(folder: Path, rounds: int, *, has_kafka: bool) -> Iterator[tuple[str, dict[str, float]]]:
    for number in range(rounds):
        load = number == 0
        yield "empty", logmirror(folder / f"empty-{number}", load=load)
        yield "partitions", logmirror(folder / "many")
        if has_kafka:
            yield "kafka", kafka(folder / f"kafka-{number}", load=load)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--partitions", type=int, default=1000)
    parser.add_argument("--without-kafka", action="store_true")
    options = parser.parse_args()
    found: dict[str, dict[str, list[float]]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with_partitions(folder / "many", options.partitions)
        logmirror(folder / "warm")
        for title, figures in runs(folder, options.rounds, has_kafka=not options.without_kafka):
            for key, value in figures.items():
                found.setdefault(title, {}).setdefault(key, []).append(value)
    medians = {
        title: {key: statistics.median(values) for key, values in figures.items()}
        for title, figures in found.items()
    }
    print(json.dumps({"medians": medians, "rounds": found, "partitions": options.partitions}))


if __name__ == "__main__":
    main()

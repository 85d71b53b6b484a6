"""Throughput and delay of the embedded broker, beside Apache Kafka 4.3.1; JSON on stdout.

    python bench/broker_load.py [--rounds N] [--records N] [--only SHAPE]

Apache Kafka's own perf producer and perf consumer, with the JVM's default compilers, load one
broker at a time; the other one runs idle. Durability is a topic setting and equal on both sides:
`flushed` before each response, or in the `background`. The contestants take turns in each round.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import psutil
from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests")]

from kit.servers.apache import ApacheTools  # noqa: E402  # after the path is set
from kit.servers.kafka import ApacheKafka  # noqa: E402  # as above

if TYPE_CHECKING:
    from collections.abc import Iterator

VERSION = "4.3.1"
TIMEOUT_S = 60
MIB = 2**20
NEVER = str(2**63 - 1)
DELAY_RECORDS = 10_000
PER_S = 1000
_SENT = re.compile(r"^\d+ records sent, ([\d.]+) records/sec")


class Shape(NamedTuple):
    """One row: what perf producers write."""

    record_bytes: int
    acks: str
    producers: int

    def __str__(self) -> str:
        size = "1 KiB" if self.record_bytes == 1024 else f"{self.record_bytes} B"
        plural = "s" if self.producers > 1 else ""
        return f"{size}, acks={self.acks}, {self.producers} producer{plural}"


SHAPES = (
    Shape(1024, "all", 1),
    Shape(1024, "all", 4),
    Shape(1024, "1", 1),
    Shape(100, "all", 1),
    Shape(100, "all", 4),
)


@dataclass(frozen=True)
class Contestant:
    """A broker with topics of one durability."""

    name: str
    bootstrap: str
    process: psutil.Process
    config: dict[str, str]

    def cpu_s(self) -> float:
        return sum(self.process.cpu_times()[:2])


@contextmanager
def logmirror(folder: Path) -> Iterator[tuple[str, psutil.Process]]:
    command = [sys.executable, "-m", "logmirror", "broker", "--listen", "127.0.0.1:0"]
    command += ["--log-dir", str(folder), "--log-level", "error"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as broker:
        try:
            yield broker.stdout.readline().split()[-1], psutil.Process(broker.pid)
        finally:
            broker.terminate()


def contestants(stack: ExitStack, folder: Path) -> list[Contestant]:
    ours = stack.enter_context(logmirror(folder / "logmirror"))
    broker = ApacheKafka(VERSION, folder / "kafka", jvm=(), heap="1g")
    stack.enter_context(broker)
    kafka = (broker.bootstrap, psutil.Process(broker.pid))
    return [
        Contestant("logmirror, flushed", *ours, {}),
        Contestant("Kafka, flushed", *kafka, {"flush.messages": "1"}),
        Contestant("logmirror, background", *ours, {"flush.messages": NEVER}),
        Contestant("Kafka, background", *kafka, {}),
    ]


@contextmanager
def topic(one: Contestant) -> Iterator[str]:
    admin = AdminClient({"bootstrap.servers": one.bootstrap})
    name = f"bench-{time.monotonic_ns()}"
    admin.create_topics([NewTopic(name, 1, config=one.config)])[name].result(TIMEOUT_S)
    try:
        yield name
    finally:
        admin.delete_topics([name])[name].result(TIMEOUT_S)
        time.sleep(1)


def perf(name: str, *arguments: str) -> list[str]:
    tools = ApacheTools(VERSION)
    main_class = tools.main_class(name)
    return tools.java_command(main_class, *arguments, heap="512m", jvm=(), log_level="WARN")


def produced(one: Contestant, name: str, shape: Shape, records: int) -> float:
    """Records per second of all perf producers together."""
    properties = [f"bootstrap.servers={one.bootstrap}", f"acks={shape.acks}"]
    properties += ["batch.size=65536", "linger.ms=5", "buffer.memory=67108864"]
    count = str(records // shape.producers)
    options = ["--topic", name, "--num-records", count, "--record-size", str(shape.record_bytes)]
    options += ["--throughput", "-1", "--producer-props", *properties]
    command = perf("kafka-producer-perf-test", *options)
    running = [
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(shape.producers)
    ]
    outputs = [process.communicate(timeout=300)[0] for process in running]
    rates = [_SENT.findall(output.splitlines()[-1]) for output in outputs]
    return sum(float(rate) for (rate,) in rates)


def consumed(one: Contestant, name: str, records: int) -> float:
    """Records per second of the perf consumer, without the time to join its group."""
    at = ("--bootstrap-server", one.bootstrap, "--topic", name, "--messages", str(records))
    command = perf("kafka-consumer-perf-test", *at)
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=300, check=True)
    row = [line for line in done.stdout.splitlines() if line][-1]
    return float(row.split(",")[9])


def throughput(one: Contestant, shape: Shape, records: int) -> dict[str, float]:
    with topic(one) as name:
        before_s = one.cpu_s()
        rate = produced(one, name, shape, records)
        wrote_s = one.cpu_s()
        read = consumed(one, name, records // shape.producers * shape.producers)
        read_s = one.cpu_s()
        gigabytes = records * shape.record_bytes / 1e9
        return {
            "produced_s": rate,
            "produce_cpu_s_per_gb": (wrote_s - before_s) / gigabytes,
            "consumed_s": read,
            "consume_cpu_s_per_gb": (read_s - wrote_s) / gigabytes,
            "rss_mib": one.process.memory_info().rss / MIB,
        }


def delays(one: Contestant) -> dict[str, float]:
    """Milliseconds from a record's send to its arrival, at 1,000 records of 1 KiB a second."""
    with topic(one) as name:
        found: list[float] = []
        consumer = Consumer(
            {"bootstrap.servers": one.bootstrap, "group.id": name, "enable.auto.commit": False}
        )
        consumer.assign([TopicPartition(name, 0, 0)])

        def read() -> None:
            while len(found) < DELAY_RECORDS:
                message = consumer.poll(TIMEOUT_S)
                found.append((time.perf_counter_ns() - int(message.value()[:20])) / 1e6)

        reader = threading.Thread(target=read, daemon=True)
        reader.start()
        producer = Producer({"bootstrap.servers": one.bootstrap, "linger.ms": 0, "acks": "all"})
        begun = time.perf_counter()
        for number in range(DELAY_RECORDS):
            time.sleep(max(0.0, begun + number / PER_S - time.perf_counter()))
            producer.produce(name, b"%020d" % time.perf_counter_ns() + b"x" * 1004)
            producer.poll(0)
        producer.flush(TIMEOUT_S)
        reader.join(TIMEOUT_S)
        consumer.close()
        if len(found) != DELAY_RECORDS:
            message = f"{len(found)} of {DELAY_RECORDS} records arrived"
            raise RuntimeError(message)
        found.sort()
        return {
            "p50_ms": found[len(found) // 2],
            "p99_ms": found[len(found) * 99 // 100],
            "highest_ms": found[-1],
        }


def medians(rounds: list[dict[str, float]]) -> dict[str, float]:
    return {key: statistics.median(one[key] for one in rounds) for key in rounds[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--records", type=int, default=200_000, help="of 1 KiB; 100 B: three times")
    parser.add_argument("--only", default="", help="rows whose title contains this; `delay`")
    options = parser.parse_args()
    found: dict[str, dict[str, list[dict[str, float]]]] = {}
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        brokers = contestants(stack, Path(name))
        for number in range(options.rounds):
            turn = number % len(brokers)
            order = brokers[turn:] + brokers[:turn]
            for shape in SHAPES:
                if options.only not in str(shape):
                    continue
                records = options.records * (1 if shape.record_bytes == 1024 else 3)
                for one in order:
                    figures = throughput(one, shape, records)
                    found.setdefault(str(shape), {}).setdefault(one.name, []).append(figures)
                    print(shape, "-", one.name, json.dumps(figures), file=sys.stderr, flush=True)
            for one in order:
                if options.only in "delay":
                    figures = delays(one)
                    found.setdefault("delay", {}).setdefault(one.name, []).append(figures)
                    print("delay -", one.name, json.dumps(figures), file=sys.stderr, flush=True)
    result = {
        shape: {name: medians(rounds) for name, rounds in by_name.items()}
        for shape, by_name in found.items()
    }
    print(json.dumps({"medians": result, "rounds": found}))


if __name__ == "__main__":
    main()

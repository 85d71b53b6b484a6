"""Producing to and reading from a log dir in a bucket; JSON on stdout.

    python bench/bucket_load.py [--seconds N] [--megabytes N] [--rounds N]

Versity's S3 gateway and the broker run on this machine, with the broker's defaults: a response to
`acks=all` waits for the commit object. Each of 1, 8 and 32 producers keeps a number of records of
1 KiB in flight, in topics of 1, 100 and 1,000 partitions.

    acks_s          acknowledged records for each second
    p50_ms, p99_ms  from the send to the acknowledgement
    requests_s      requests to the bucket for each second, of all kinds
    requests, commits    the same requests, and commit objects, for 10,000 acknowledged records

Apache Kafka on disk is measured in the same way, for scale, after each case. `catch_up` reads a
topic with kcat, in rounds: `cold` from a broker on a new machine, `again` from its copies, and
`client` gets the same objects one after the other with the S3 client alone, in MB/s.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple, Self

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests")]

from confluent_kafka import Producer  # noqa: E402  # after the path is set
from confluent_kafka.admin import AdminClient, NewTopic  # noqa: E402  # as above
from prometheus_client.parser import text_string_to_metric_families  # noqa: E402  # as above
from reading import TO_THE_END, fill_page_cache  # noqa: E402  # as above

from kit.judges.clients import kcat  # noqa: E402  # as above
from kit.judges.scrape import ask  # noqa: E402  # as above
from kit.servers.bucket_broker import BucketBroker  # noqa: E402  # as above
from kit.servers.kafka import ApacheKafka  # noqa: E402  # as above
from kit.servers.machine import free_ports  # noqa: E402  # as above
from kit.servers.s3 import LOG_DIR, S3Server  # noqa: E402  # as above
from logmirror.stores.s3 import S3Store  # noqa: E402  # as above

VALUE = bytes(range(256)) * 4
PRODUCERS, PARTITIONS, IN_FLIGHT = (1, 8, 32), (1, 100, 1000), (1, 100)
TIMEOUT_S = 300
WARM_S = 2


class Case(NamedTuple):
    """A load."""

    producers: int
    partitions: int
    in_flight: int
    """Records of each producer that are not acknowledged yet."""

    @property
    def topic(self) -> str:
        return f"t-{self.producers}-{self.partitions}-{self.in_flight}"


class Load:
    """Producers in threads, and how long each acknowledgement took."""

    def __init__(self, bootstrap: str, case: Case) -> None:
        self._case, self._done = case, threading.Event()
        self.took_s: list[tuple[float, float]] = []
        """(when it was acknowledged, seconds since the send)"""

        self._threads = [
            threading.Thread(target=self._run, args=(bootstrap, number))
            for number in range(case.producers)
        ]

    def _run(self, bootstrap: str, number: int) -> None:
        producer = Producer({"bootstrap.servers": bootstrap, "linger.ms": 0, "acks": "all"})
        sent = number
        while not self._done.is_set():
            if len(producer) >= self._case.in_flight:
                producer.poll(0.01)
                continue
            sent_s = time.perf_counter()
            producer.produce(
                self._case.topic,
                VALUE,
                partition=sent % self._case.partitions,
                on_delivery=lambda e, _, at=sent_s: self._acked(e, at),
            )
            sent += self._case.producers
        if producer.flush(TIMEOUT_S):
            message = "records were not acknowledged"
            raise RuntimeError(message)

    def _acked(self, error: object, sent_s: float) -> None:
        if error is not None:
            raise RuntimeError(str(error))
        now_s = time.perf_counter()
        self.took_s.append((now_s, now_s - sent_s))

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        for thread in self._threads:
            thread.join()


def counted(port: int) -> dict[str, float]:
    """Requests to the bucket, and commit objects."""
    found = {"requests": 0.0, "commits": 0.0}
    for family in text_string_to_metric_families(ask(port, "/metrics").text):
        for sample in family.samples:
            name = sample.name.removeprefix("logmirror_broker_")
            if name == "bucket_requests_total":
                found["requests"] += sample.value
            if name == "commit_objects_total":
                found["commits"] += sample.value
    return found


def produced(bootstrap: str, case: Case, seconds: float, port: int = 0) -> dict[str, float]:
    """One case; with the port of a broker's metrics also its requests."""
    admin = AdminClient({"bootstrap.servers": bootstrap})
    made = admin.create_topics([NewTopic(case.topic, case.partitions, 1)])
    made[case.topic].result(TIMEOUT_S)
    with Load(bootstrap, case) as load:
        time.sleep(WARM_S)
        before = counted(port) if port else {}
        began_s = time.perf_counter()
        time.sleep(seconds)
        after = counted(port) if port else {}
        elapsed_s = time.perf_counter() - began_s
        took_s = [took for at, took in tuple(load.took_s) if began_s <= at < began_s + elapsed_s]
    cuts = statistics.quantiles(took_s, n=100)
    found = {
        "acks_s": len(took_s) / elapsed_s,
        "p50_ms": 1000 * cuts[49],
        "p99_ms": 1000 * cuts[98],
    }
    for name, value in after.items():
        found[name] = 10_000 * (value - before[name]) / len(took_s)
        if name == "requests":
            found["requests_s"] = (value - before[name]) / elapsed_s
    return found


def fill(bootstrap: str, topic: str, megabytes: int) -> int:
    """Produce to one partition; returns the number of records."""
    admin = AdminClient({"bootstrap.servers": bootstrap})
    admin.create_topics([NewTopic(topic, 1, 1)])[topic].result(TIMEOUT_S)
    records = megabytes * 1_000_000 // len(VALUE)
    producer = Producer({"bootstrap.servers": bootstrap, "linger.ms": 20, "batch.size": 1 << 19})
    for _ in range(records):
        while len(producer) > 50_000:
            producer.poll(0.1)
        producer.produce(topic, VALUE, partition=0)
    if producer.flush(TIMEOUT_S):
        message = "records were not acknowledged"
        raise RuntimeError(message)
    return records


def read_mb_s(bootstrap: str, topic: str, records: int) -> float:
    began_s = time.perf_counter()
    at = ("-C", "-b", bootstrap, "-t", topic, "-o", "beginning", "-f", "%p\\n")
    found = kcat(*at, *TO_THE_END, timeout_s=TIMEOUT_S).count(b"\n")
    if found != records:
        message = f"{found} records instead of {records}"
        raise RuntimeError(message)
    return records * len(VALUE) / (time.perf_counter() - began_s) / 1e6


def client_mb_s(server: S3Server, bucket: str, topic: str) -> float:
    """Get the topic's objects with the S3 client alone."""
    store = S3Store(server.location(bucket))
    root = server.files(bucket)
    found = sorted((root / LOG_DIR).glob(f"{topic}*/**/*"))
    names = [str(path.relative_to(root)) for path in found if path.is_file()]
    began_s = time.perf_counter()
    size = sum(len(store.read(name)) for name in names)
    return size / (time.perf_counter() - began_s) / 1e6


def catch_up(folder: Path, server: S3Server, megabytes: int, rounds: int) -> list[dict[str, float]]:
    """Read what another machine has written, on a new one in each round; the page cache is full."""
    bucket, topic, found = server.new_bucket(), "catch-up", []
    with BucketBroker(folder / "first", server, bucket) as first:
        records = fill(first.bootstrap, topic, megabytes)
    fill_page_cache(folder)
    for number in range(rounds):
        work = folder / f"machine-{number}"
        with BucketBroker(work, server, bucket) as broker:
            cold = read_mb_s(broker.bootstrap, topic, records)
            again = read_mb_s(broker.bootstrap, topic, records)
        shutil.rmtree(work)
        alone = client_mb_s(server, bucket, topic)
        found.append({"cold_mb_s": cold, "again_mb_s": again, "client_mb_s": alone})
        print("catch-up", json.dumps(found[-1]), file=sys.stderr, flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=6)
    parser.add_argument("--megabytes", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    cases = [Case(p, n, w) for w in IN_FLIGHT for n in PARTITIONS for p in PRODUCERS]
    found: dict[str, dict[str, float]] = {}
    kafka: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as name, ExitStack() as running:
        folder = Path(name)
        server = running.enter_context(S3Server(folder / "s3"))
        disk = running.enter_context(ApacheKafka("4.3.1", folder / "kafka", jvm=(), heap="1g"))
        port = free_ports(1)[0]
        for case in cases:
            key = f"{case.producers} x {case.in_flight}, {case.partitions}"
            bucket = server.new_bucket()
            with BucketBroker(
                folder / key, server, bucket, "--monitoring-port", str(port)
            ) as broker:
                found[key] = produced(broker.bootstrap, case, options.seconds, port)
            print(key, json.dumps(found[key]), file=sys.stderr, flush=True)
            kafka[key] = produced(disk.bootstrap, case, options.seconds)
            print("Kafka", key, json.dumps(kafka[key]), file=sys.stderr, flush=True)
        reading = catch_up(folder, server, options.megabytes, options.rounds)
    result = {"bucket": found, "kafka": kafka, "catch_up": reading}
    print(json.dumps({**result, "megabytes": options.megabytes}))


if __name__ == "__main__":
    main()

"""What a broker in a bucket costs is visible: its metrics are what a proxy of the store counts."""

from __future__ import annotations

import dataclasses
import threading
import time
import urllib.request
from collections import Counter
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewTopic
from prometheus_client.parser import text_string_to_metric_families

from kit.fakes.s3_proxy import S3Proxy
from kit.judges.clients import Message, produce, rows_by_librdkafka
from kit.servers.bucket_broker import BucketBroker
from kit.servers.machine import HOST, free_ports
from logmirror.archive.chain import ArchiveObject
from logmirror.broker.bucket import costs
from logmirror.broker.bucket.chain import COMMITS
from logmirror.broker.bucket.costs import explain
from logmirror.broker.bucket.tiling import groups
from logmirror.broker.bucket_monitoring import BucketValues
from logmirror.broker.options import Archive, BrokerOptions
from logmirror.monitoring import broker_metrics as catalogue
from logmirror.stores import s3, s3_reader
from logmirror.stores.request_counts import RequestCounts
from logmirror.testing.memory_store import MemoryStore

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from kit.servers.s3 import S3Server

TIMEOUT_S = 30
KIND = {
    "PutObject": "put",
    "GetObject": "get",
    "HeadObject": "get",
    "ListObjectsV2": "list",
    "DeleteObject": "delete",
}
RECORDS = 64


def scraped(port: int) -> dict[tuple[str, ...], float]:
    with urllib.request.urlopen(f"http://{HOST}:{port}/metrics", timeout=TIMEOUT_S) as response:
        text = response.read().decode()
    return {
        (sample.name.removeprefix("logmirror_broker_"), *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def until(is_true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.05)


class Counted:
    """A broker whose requests pass a proxy that counts them."""

    def __init__(self, broker: BucketBroker, proxy: S3Proxy, port: int) -> None:
        self.broker, self._proxy, self._port = broker, proxy, port
        self._before = proxy.asked.copy()

    def arrived(self) -> Counter[str]:
        """Requests by kind that arrived since this broker was made."""
        found = Counter[str]()
        for operation, count in (self._proxy.asked - self._before).items():
            found[KIND[operation]] += count
        return found

    def agreed(self) -> dict[tuple[str, ...], float]:
        """The metrics at a moment without a request in flight."""
        deadline = time.monotonic() + TIMEOUT_S
        while True:
            before, found = self.arrived(), scraped(self._port)
            counted = {kind: found["bucket_requests_total", kind, "log"] for kind in before}
            if counted == before == self.arrived():
                return found
            assert time.monotonic() < deadline, (counted, before)


def test_the_metrics_are_what_arrives_at_the_store(
    tmp_path: Path, s3_server: S3Server, bucket: str
) -> None:
    with S3Proxy(s3_server.endpoint, lambda _: None) as proxy:
        port = free_ports(1)[0]
        options = (
            *("--monitoring-port", str(port), "--super-user", "User:ANONYMOUS"),
            *("--override", "log.segment.bytes=20000"),
        )
        broker = BucketBroker(tmp_path, s3_server, bucket, *options, endpoint=proxy.endpoint)
        with broker:
            counted = Counted(broker, proxy, port)
            counted._before.clear()  # noqa: SLF001  # since its start
            admin = AdminClient({"bootstrap.servers": broker.bootstrap})
            admin.create_topics([NewTopic("t", 1, 1)])["t"].result(TIMEOUT_S)
            producer = Producer({"bootstrap.servers": broker.bootstrap})
            for number in range(RECORDS):
                producer.produce("t", b"%d" % number + b"x" * 3_000)
                assert producer.flush(TIMEOUT_S) == 0
                if number % 16 == 0:
                    counted.agreed()
            until(lambda: scraped(port)["sealed_objects_total",] >= 7)
            found = counted.agreed()

            files = [path for path in s3_server.files(bucket).rglob("*") if path.is_file()]
            sealed = [path.stat().st_size for path in files if path.suffix == ".batches"]
            assert found["sealed_objects_total",] == len(sealed)
            assert found["sealed_bytes_total",] == sum(sealed)
            commits = [path for path in files if path.parent.name == "commits"]
            assert len(commits) - found["commits_held",] in {0, 1}  # a fence stays, needed or not
            assert found["commit_objects_total",] >= RECORDS
            sent = sum(
                int(head.get("x-amz-decoded-content-length") or head["content-length"])
                for operation, head in proxy.heads
                if operation == "PutObject"
            )
            assert found["bucket_bytes_total", "put", "log"] <= sent
            assert found["commit_bytes_total",] < found["bucket_bytes_total", "put", "log"]
            assert found["oldest_unflushed_seconds",] == 0
            assert found["commits_since_snapshot", "broker"] >= RECORDS
            assert found["local_copies_bytes", "log"] == found["sealed_bytes_total",]

            broker.kill()
            again = Counted(broker, proxy, port)
            broker.start()
            assert again.agreed()["local_copies_misses_total", "log"] == 0
            assert len(list(rows_by_librdkafka(broker.bootstrap, "t", partition=0))) == RECORDS
            found = again.agreed()
            assert found["local_copies_misses_total", "log"] == len(sealed)
            assert found["local_copies_bytes", "log"] == sum(sealed)
            assert found["bucket_bytes_total", "get", "log"] > sum(sealed)


@pytest.mark.slow
def test_each_read_of_what_is_here_raises_the_hit_ratio(
    tmp_path: Path, s3_server: S3Server, bucket: str
) -> None:
    port = free_ports(1)[0]
    options = ("--monitoring-port", str(port), "--override", "log.segment.bytes=20000")
    with BucketBroker(tmp_path, s3_server, bucket, *options) as broker:
        admin = AdminClient({"bootstrap.servers": broker.bootstrap})
        admin.create_topics([NewTopic("t", 1, 1)])["t"].result(TIMEOUT_S)
        producer = Producer({"bootstrap.servers": broker.bootstrap})
        for number in range(RECORDS):
            producer.produce("t", b"%d" % number + b"x" * 3_000)
            assert producer.flush(TIMEOUT_S) == 0
        until(lambda: scraped(port)["sealed_objects_total",] >= 7)
        broker.kill()
        broker.start()
        assert len(list(rows_by_librdkafka(broker.bootstrap, "t", partition=0))) == RECORDS
        until(lambda: copies(port)[1] >= 7)
        for _ in range(2):
            before = copies(port)
            assert len(list(rows_by_librdkafka(broker.bootstrap, "t", partition=0))) == RECORDS
            until(lambda before=before: copies(port)[0] >= before[0] + 7)
            assert copies(port)[1] == before[1]


def copies(port: int) -> tuple[float, float]:
    """Hits and misses of the local copies."""
    found = scraped(port)
    return found["local_copies_hits_total", "log"], found["local_copies_misses_total", "log"]


def test_archives_and_their_copies_have_numbers_of_their_own() -> None:
    class Store(MemoryStore):
        requests = RequestCounts()

    store = Store()
    store.requests.sent("head_object")
    store.requests.received(7)
    archives = [Archive(root=root, store=store) for root in ("one", "the same")]
    copies: Any = SimpleNamespace(held_bytes=5, hits=3, misses=2)
    commits: Any = None
    values = BucketValues(commits, archives, copies)
    assert (("archives", "get"), 1) in values.numbers(catalogue.BUCKET_REQUESTS)
    assert (("archives", "get"), 7) in values.numbers(catalogue.BUCKET_BYTES)
    assert values.numbers(catalogue.COPIES_BYTES) == [(("archives",), 5)]
    assert values.numbers(catalogue.COPIES_HITS) == [(("archives",), 3)]
    assert values.numbers(catalogue.COPIES_MISSES) == [(("archives",), 2)]


def test_the_age_of_what_is_not_in_the_bucket_grows_in_an_outage(
    tmp_path: Path, s3_server: S3Server, bucket: str
) -> None:
    port = free_ports(1)[0]
    with BucketBroker(
        tmp_path, s3_server, bucket, "--monitoring-port", str(port), "--no-flush-on-ack"
    ) as broker:
        produce(broker.bootstrap, "t", [Message(value=b"a")], partition=0)
        until(lambda: scraped(port)["oldest_unflushed_seconds",] == 0)
        s3_server.kill()
        try:
            produce(broker.bootstrap, "t", [Message(value=b"b")], partition=0)
            until(lambda: scraped(port)["oldest_unflushed_seconds",] > 2)
        finally:
            s3_server.start()
        until(lambda: scraped(port)["oldest_unflushed_seconds",] == 0)


def test_the_sizes_of_requests_are_those_of_the_store() -> None:
    """`costs` does no I/O, so it cannot import them."""
    assert (costs.PUT_BYTES, costs.PART_BYTES) == (s3.MEMORY_BYTES, s3.PART_BYTES)
    assert costs.READ_BYTES == s3_reader.AHEAD_BYTES


RATIO = 1.25
"""How far requests that are counted may be from those that are predicted, either way."""

MERGES_RATIO = 1.5
"""The same for merges, which are few: from 8 to 16 segments become one, by their offsets."""


@pytest.mark.parametrize("offsets", [3, 37, 50, 61])
def test_predicted_merges_are_those_that_are_made(tmp_path: Path, offsets: int) -> None:
    count, target_bytes = 4_000, 1_000
    live: list[ArchiveObject] = []
    sizes: list[int] = []
    puts = deletes = 0
    for number in range(count):
        live.append(ArchiveObject("", number * offsets, (number + 1) * offsets - 1))
        sizes.append(1)
        while found := groups(live, sizes, target_bytes):
            low = live.index(found[0][0])
            high = low + len(found[0])
            live[low:high] = [ArchiveObject("", found[0][0].first, found[0][-1].last)]
            sizes[low:high] = [sum(sizes[low:high])]
            puts, deletes = puts + 1, deletes + len(found[0])
    options = BrokerOptions(
        log_dir=tmp_path, overrides={"log.segment.bytes": str(target_bytes * 1_024)}
    )
    # a segment is sealed by the number of commits, when it has a thousandth of its limit
    predicted = explain(
        dataclasses.replace(options, commit_interval_ms=1),
        write_bytes_s=1_024 / (options.max_commits / 1_000),
        read_bytes_s=0,
        partitions=1,
        seconds=count * options.max_commits / 1_000,
    )
    assert predicted.segment_s == options.max_commits / 1_000
    [merged] = [one for one in predicted.causes if one.cause == "merged segments"]
    assert merged.put / MERGES_RATIO < puts < merged.put * MERGES_RATIO
    deleted = merged.delete / 2  # with the index of each
    assert deleted / RATIO < deletes < deleted * RATIO


def test_predicted_requests_are_those_that_are_counted(
    tmp_path: Path, s3_server: S3Server, bucket: str
) -> None:
    """Steady producers write to 8 partitions; a segment of each is full every few seconds."""
    partitions, interval_ms, segment_bytes, value = 8, 400, 100_000, b"x" * 1_000
    port = free_ports(1)[0]
    options = (
        *("--monitoring-port", str(port), "--commit-interval-ms", str(interval_ms)),
        *("--override", f"log.segment.bytes={segment_bytes}", "--topic", f"t:{partitions}"),
    )
    root = s3_server.files(bucket) / "kafka"
    with BucketBroker(tmp_path, s3_server, bucket, *options) as broker:
        producer = Producer(
            {"bootstrap.servers": broker.bootstrap, "linger.ms": 50, "log_level": 0}
        )
        running = threading.Event()

        def send() -> None:
            while not running.wait(0.05):
                for partition in range(partitions):
                    for _ in range(2):
                        producer.produce("t", value, partition=partition)
                producer.poll(0)

        sender = threading.Thread(target=send)
        sender.start()
        try:
            until(lambda: scraped(port).get(("sealed_objects_total",), 0) >= partitions)
            began_s, before = time.monotonic(), scraped(port)
            until(lambda: time.monotonic() - began_s > 20)
            took_s, after = time.monotonic() - began_s, scraped(port)
        finally:
            running.set()
            sender.join()
        producer.flush(TIMEOUT_S)
        created = scraped(port)["commit_objects_total",]
        broker.kill()
        broker.start()
        until(lambda: len(list((root / COMMITS).iterdir())) < created / 2)
        gets = -scraped(port)["bucket_requests_total", "get", "log"]
        for partition in range(partitions):
            list(rows_by_librdkafka(broker.bootstrap, "t", partition=partition))
        found = scraped(port)
        gets += found["bucket_requests_total", "get", "log"]

    written = after["bytes_in_total", "t"] - before["bytes_in_total", "t"]
    settings = BrokerOptions(
        log_dir=tmp_path,
        bucket=f"s3://{bucket}",
        commit_interval_ms=interval_ms,
        overrides={"log.segment.bytes": str(segment_bytes)},
    )
    predicted = explain(
        settings,
        write_bytes_s=written / took_s,
        read_bytes_s=0,
        partitions=partitions,
        seconds=took_s,
    ).requests
    for kind in ("put", "list"):
        name = ("bucket_requests_total", kind, "log")
        counted = after[name] - before[name]
        assert predicted[kind] / RATIO < counted < predicted[kind] * RATIO, (kind, predicted)
    sealed = sum(path.stat().st_size for path in root.rglob("*.batches"))
    read = explain(
        settings, write_bytes_s=0, read_bytes_s=sealed, partitions=partitions, seconds=1
    ).requests
    assert read["get"] / RATIO < gets < read["get"] * RATIO

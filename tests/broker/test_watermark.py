"""Goal: one high watermark for every API; it never moves back, and never below an acknowledgement.

Method: sixteen producers write while watchers ask a real broker by three APIs, and the broker is
killed. The log end of OffsetForLeaderEpoch may be ahead of the watermark, by what is being flushed.
Readers then count the requests that they need for ten thousand batches of one record.
"""

from __future__ import annotations

import itertools
import threading
import time
from typing import TYPE_CHECKING

import pytest
from confluent_kafka import Producer

from kit.judges.clients import rows_by_librdkafka
from kit.judges.partition_client import LATEST, PartitionClient, data_batch
from kit.servers.embedded import EmbeddedBroker
from kit.servers.kafka import create_topic
from kit.servers.s3 import LogBucket
from logmirror.wire.records import decode_reference

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

PRODUCERS = 16
BATCHES = 40
ACKS = 10_000
NOW_MS = 1_700_000_000_000
ERRORS_OF_A_KILL = (OSError, EOFError, AssertionError)


@pytest.fixture(
    params=[
        ("directory", True),
        ("directory", False),
        pytest.param(("bucket", True), marks=pytest.mark.slow),
    ],
    ids=["flush on ack", "background flush", "flush on ack, in a bucket"],
)
def broker(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[EmbeddedBroker]:
    """In a bucket, what was acknowledged before its flush is lost with the machine."""
    kind, flushes = request.param
    place = None
    if kind == "bucket":
        server = request.getfixturevalue("s3_server")
        place = LogBucket(server, server.new_bucket())
    with EmbeddedBroker(
        tmp_path / "broker", bucket=place, segment_bytes=40_000, flush_on_ack=flushes
    ) as broker:
        yield broker


def _in_threads(work: Callable[[], None], count: int) -> list[threading.Thread]:
    threads = [threading.Thread(target=work) for _ in range(count)]
    for thread in threads:
        thread.start()
    return threads


class Watch:
    """Asks for the end of a log by Fetch, ListOffsets and OffsetForLeaderEpoch in turn.

    What is behind the watermark may be lost with a machine, so the log end may move back to it.

    Args:
        broker: The broker.
        topic: The topic, of which it watches the first partition.
        keeps_log_end: Whether the log end may not move back either.
    """

    def __init__(self, broker: EmbeddedBroker, topic: str, *, keeps_log_end: bool) -> None:
        self._keeps_log_end = keeps_log_end
        self._bootstrap, self._topic = broker.bootstrap, topic
        self.seen = {"watermark": 0, "log end": 0}
        self.steps_back: list[str] = []
        self.interruptions = 0
        """Connections that ended."""

        self.done = threading.Event()

    def run(self) -> None:
        while not self.done.is_set():
            try:
                with PartitionClient(self._bootstrap, self._topic) as partition:
                    while not self.done.is_set():
                        self._ask(partition)
            except ERRORS_OF_A_KILL:
                self.interruptions += 1
                time.sleep(0.02)

    def _ask(self, partition: PartitionClient) -> None:
        for name, kind, ask in (
            ("Fetch", "watermark", lambda: partition.fetch(self.seen["watermark"]).high_watermark),
            ("ListOffsets", "watermark", lambda: partition.list_offset(LATEST)[2]),
            ("OffsetForLeaderEpoch", "log end", lambda: partition.end_of_epoch()[2]),
        ):
            before = max(self.seen["watermark"], self.seen[kind])  # before the request is sent
            end = ask()
            if end < before:
                self.steps_back.append(f"{name}: {end} < {before}")
            if kind == "watermark" or self._keeps_log_end:
                self.seen[kind] = max(self.seen[kind], end)


@pytest.mark.statement("T4", "C4")
def test_c04_the_watermark_never_moves_back_while_sixteen_producers_write(broker, topic_name):
    create_topic(broker.bootstrap, topic_name, 1, {})
    acked: dict[int, int] = {}
    numbers = itertools.count()

    def write() -> None:
        wrote, tries = 0, 0
        while wrote < BATCHES:
            tries += 1
            assert tries < 1000
            try:
                with PartitionClient(broker.bootstrap, topic_name) as partition:
                    while wrote < BATCHES:
                        timestamp_ms = NOW_MS + next(numbers)  # each record has its own
                        found = partition.produce(data_batch(1, timestamp_ms=timestamp_ms))
                        assert found.error == 0, found
                        acked[found.base_offset] = timestamp_ms
                        wrote += 1
            except ERRORS_OF_A_KILL:
                time.sleep(0.05)

    watch = Watch(broker, topic_name, keeps_log_end=broker.bucket is None)
    watchers = _in_threads(watch.run, 3)
    writers = _in_threads(write, PRODUCERS)
    time.sleep(0.3)
    broker.kill()
    broker.start()
    for writer in writers:
        writer.join(120)
        assert not writer.is_alive()
    time.sleep(0.1)
    watch.done.set()
    for watcher in watchers:
        watcher.join(30)
        assert not watcher.is_alive()

    assert watch.steps_back == []
    assert len(acked) >= PRODUCERS * BATCHES
    rows = list(rows_by_librdkafka(broker.bootstrap, topic_name))
    assert [row.offset for row in rows] == list(range(len(rows)))
    assert {offset: rows[offset].timestamp_ms for offset in acked} == acked
    assert max(watch.seen.values()) <= len(rows)


@pytest.mark.statement("C13")
def test_c13_ten_thousand_acknowledgements_of_one_record_are_read_in_a_few_requests(
    tmp_path, topic_name
):
    with EmbeddedBroker(tmp_path / "broker") as broker:
        create_topic(broker.bootstrap, topic_name, 1, {})
        failures: list[object] = []

        def delivered(error: object, _message: object) -> None:
            if error is not None:
                failures.append(error)

        one_each = {"batch.num.messages": 1, "linger.ms": 0, "log_level": 0}
        producer = Producer({"bootstrap.servers": broker.bootstrap, **one_each})
        for number in range(ACKS):
            producer.produce(topic_name, value=b"%d" % number, on_delivery=delivered)
            producer.poll(0)
        assert producer.flush(120) == 0
        assert failures == []
        assert broker.stop() == 0
        broker.start()

        found: list[bytes | None] = []
        requests = 0
        with PartitionClient(broker.bootstrap, topic_name) as partition:
            while len(found) < ACKS:
                response = partition.fetch(len(found))
                found += [record.value for record in decode_reference(response.records)]
                requests += 1
        assert found == [b"%d" % number for number in range(ACKS)]
        assert requests <= 2

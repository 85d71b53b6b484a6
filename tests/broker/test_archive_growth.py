"""Goal: a consumer of a mounted archive gets what a mirror writes on.

Method: a mirror that runs copies a topic into a directory or a bucket, which a broker serves. A
librdkafka consumer has read all of it and waits; then the source gets more records.
"""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, Any

import pytest
from confluent_kafka import Consumer, TopicPartition

from kit.judges.clients import odd_messages, produce, rows_by_librdkafka
from kit.runs.commands import mirror, wait_until, write_config
from kit.runs.inline_run import InlineRun
from kit.servers.embedded import EmbeddedBroker
from kit.servers.kafka import create_topic
from kit.servers.mounted import MountingBroker, kept_in

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.jvm

TOPIC = "growing"
PARTITIONS = range(2)
SOON = {"fetch.wait.max.ms": 20}
TIMEOUT_S = 120


@pytest.fixture
def source(tmp_path: Path) -> Iterator[str]:
    with EmbeddedBroker(tmp_path / "source") as source:
        create_topic(source.bootstrap, TOPIC, len(PARTITIONS), {})
        yield source.bootstrap


def write(bootstrap: str, seed: int) -> None:
    for number in PARTITIONS:
        produce(bootstrap, TOPIC, odd_messages(30, seed=seed + number), partition=number)


def wanted(bootstrap: str) -> list[tuple[Any, ...]]:
    """The records of the source: partition, offset and content."""
    return [
        (number, row.offset, row.key, row.value)
        for number in PARTITIONS
        for row in rows_by_librdkafka(bootstrap, TOPIC, partition=number, config=SOON)
    ]


def place_of(record: tuple[Any, ...]) -> tuple[Any, ...]:
    return record[:2]


def read(consumer: Consumer, count: int) -> list[tuple[Any, ...]]:
    """Read as many records, wait for those that are not there yet; sorted by partition."""
    deadline_s, found = time.monotonic() + TIMEOUT_S, []
    while len(found) < count:
        assert time.monotonic() < deadline_s, f"{len(found)} of {count} records"
        for one in consumer.consume(count - len(found), 1):
            assert one.error() is None
            found.append((one.partition(), one.offset(), one.key(), one.value()))
    return sorted(found, key=place_of)


def test_a_waiting_consumer_gets_what_a_running_mirror_writes(source, log_bucket, tmp_path):
    copied = mirror(TOPIC, source, tmp_path / "kept", form="native", max_time_ms=100)
    place, objects, environment = kept_in(tmp_path, log_bucket, copied)
    config = write_config(tmp_path / "mirror.json", copied | {"name": TOPIC})
    write(source, 1)
    with InlineRun(config, folder=tmp_path) as run:
        wait_until(
            lambda: all(
                list((objects / TOPIC).glob(f"{number}/*.batches")) for number in PARTITIONS
            ),
            what=lambda: f"the first objects of:\n{run.text}",
        )
        with (
            MountingBroker(tmp_path / "log", place, **environment) as served,
            contextlib.closing(Consumer({"bootstrap.servers": served, "group.id": "unused"})) as at,
        ):
            at.assign([TopicPartition(TOPIC, number, 0) for number in PARTITIONS])
            first = wanted(source)
            assert read(at, len(first)) == first
            assert at.consume(1, 0.5) == []
            write(source, 11)
            both = wanted(source)
            assert len(both) == 2 * len(first)
            assert read(at, len(first)) == sorted(set(both) - set(first), key=place_of)

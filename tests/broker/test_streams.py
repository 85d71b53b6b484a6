"""Goal: a Kafka Streams application with exactly-once counts each record once on the broker.

Method: it counts words, with a repartition topic and a changelog on the broker. Application and
broker are killed in the middle. The counts that it wrote, read committed, are 1, 2, 3 ... per word.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest
from confluent_kafka.admin import AdminClient

from kit.judges.clients import Message, produce, rows_by_librdkafka
from kit.judges.streams import StreamsTools
from kit.runs.commands import wait_until
from kit.servers.apache import VERSIONS
from kit.servers.embedded import EmbeddedBroker
from kit.servers.kafka import create_topic

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from kit.servers.s3 import LogBucket

pytestmark = [pytest.mark.timeout(600), pytest.mark.in_bucket]

WORDS = 7
ROUNDS = 120


@pytest.fixture
def broker(tmp_path: Path, log_bucket: LogBucket | None) -> Iterator[EmbeddedBroker]:
    with EmbeddedBroker(tmp_path / "broker", bucket=log_bucket) as broker:
        for topic in ("in", "out"):
            create_topic(broker.bootstrap, topic, 2, {})
        yield broker


def _write(broker: EmbeddedBroker, rounds: int) -> None:
    words = [Message(value=b"word-%d" % word) for word in range(WORDS)] * rounds
    for partition in range(2):
        produce(broker.bootstrap, "in", words, partition=partition)


def _counts(broker: EmbeddedBroker) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for partition in range(2):
        for row in rows_by_librdkafka(broker.bootstrap, "out", partition=partition):
            assert row.key is not None
            assert row.value is not None
            found.setdefault(row.key.decode(), []).append(int(row.value))
    return found


@pytest.mark.gate("a Streams application")
def test_streams_counts_exactly_once_over_kills_of_both(broker, tmp_path):
    tools = StreamsTools(VERSIONS[-1])
    _write(broker, ROUNDS)
    application = tools.start_count(broker.bootstrap, tmp_path / "app")

    def reached(count: int) -> None:
        wait_until(
            lambda: (
                len(_counts(broker)) == WORDS
                and min(max(counts) for counts in _counts(broker).values()) >= count
            ),
            what=lambda: f"{count} of each word, not {_counts(broker)}\n{application.tail()}",
        )

    try:
        reached(2 * ROUNDS)
        _write(broker, ROUNDS)
        time.sleep(0.15)
        application.end(kill=True)
        application = tools.start_count(broker.bootstrap, tmp_path / "app")
        reached(2 * 2 * ROUNDS)
        _write(broker, ROUNDS)
        time.sleep(0.15)
        broker.kill()
        broker.start()
        reached(3 * 2 * ROUNDS)
    finally:
        application.end()

    for word, counts in _counts(broker).items():
        assert counts == sorted(set(counts)), word  # no count twice, and none falls back
        assert counts[-1] == 3 * 2 * ROUNDS, word
    topics = AdminClient({"bootstrap.servers": broker.bootstrap}).list_topics(timeout=10).topics
    assert {"count-words-counts-changelog", "count-words-counts-repartition"} <= set(topics)

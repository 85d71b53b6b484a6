"""docs/restore.md: its commands, as they are on the page, restore a topic into Apache Kafka."""

from __future__ import annotations

from datetime import datetime
from itertools import takewhile
from pathlib import Path
from typing import Final

import pytest
from confluent_kafka.admin import AdminClient

from kit.judges.clients import odd_messages, produce, produce_transactions, rows_by_librdkafka
from kit.runs.commands import mirror, write_config
from kit.runs.inline_run import run_now
from kit.runs.page import Reader, blocks, commands
from kit.servers.embedded import EmbeddedBroker
from kit.servers.kafka import create_topic
from kit.tiers import IS_THIN

PAGE: Final = (Path(__file__).resolve().parents[2] / "docs" / "restore.md").read_text()
SOON: Final = {"fetch.wait.max.ms": 20}
TIME_MS: Final = round(datetime.fromisoformat("2026-11-25T12:00:00Z").timestamp() * 1000)
"""The time in the page; some records are older, others newer."""


@pytest.fixture
def archive(tmp_path):
    """`archive`, as the page has it, and the rows of its source."""
    with EmbeddedBroker(tmp_path / "source") as source:
        create_topic(source.bootstrap, "orders", 1, {})
        produce(source.bootstrap, "orders", odd_messages(50, seed=1, start_ms=TIME_MS - 250))
        aborted = [
            (odd_messages(5, seed=2, start_ms=TIME_MS), False),
            (odd_messages(5, seed=3, start_ms=TIME_MS), True),
        ]
        produce_transactions(source.bootstrap, "orders", aborted, transactional_id="id")
        written = mirror("orders", source.bootstrap, tmp_path / "archive")
        written["name"] = "orders"
        copied = run_now(write_config(tmp_path / "archive.json", written))
        assert copied.returncode == 0, copied.stderr
        return list(rows_by_librdkafka(source.bootstrap, "orders", config=SOON))


@pytest.mark.thinned
def test_the_commands_of_the_page_restore_the_topic(archive, kafka_431, tmp_path):
    """In `make test` without Spark."""
    bootstrap = kafka_431.bootstrap
    reader = Reader(
        tmp_path, "127.0.0.1:9092", servers={"127.0.0.1:9192": bootstrap}, with_spark=not IS_THIN
    )
    serve, restore, restore_until = commands(PAGE)
    for name, text in zip(("restore", "restore-until"), blocks(PAGE, "yaml"), strict=True):
        reader.write(f"{name}.yaml", text)
    try:
        reader.leave_running(serve, until=lambda text: "listening on" in text)
        reader.type(restore)
        assert list(rows_by_librdkafka(bootstrap, "orders", config=SOON)) == archive
        reader.type(restore_until)
        before = list(takewhile(lambda row: row.timestamp_ms < TIME_MS, archive))
        assert 10 < len(before) < 50
        found = list(rows_by_librdkafka(bootstrap, "orders-until-noon", config=SOON))
        assert found == before
    finally:
        reader.end()
        topics = AdminClient({"bootstrap.servers": bootstrap}).list_topics().topics
        for topic in topics.keys() & {"orders", "orders-until-noon"}:
            kafka_431.delete_topic(topic)  # other pages have a topic of this name

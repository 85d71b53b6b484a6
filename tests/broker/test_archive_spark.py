"""Goal: Spark's Kafka connector reads a mounted archive in batches, whole and between offsets.

Method: a source with aborted transactions and their markers, archived in each format; one broker
mounts all. What Spark reads is compared with what librdkafka reads from the source.
"""

from __future__ import annotations

import pytest

from kit.judges.clients import odd_messages, produce, produce_transactions, rows_by_librdkafka
from kit.judges.spark_connector import SparkConnector
from kit.runs.commands import FORMATS, mirror, write_config
from kit.runs.inline_run import run_now
from kit.servers.embedded import EmbeddedBroker
from kit.servers.kafka import create_topic
from kit.servers.mounted import MountingBroker

pytestmark = [pytest.mark.jvm, pytest.mark.xdist_group("spark_connector")]

TOPIC = "kept"
PARTITIONS = range(2)
SOON = {"fetch.wait.max.ms": 20}


def test_spark_reads_an_archive_whole_and_between_offsets(tmp_path):
    with EmbeddedBroker(tmp_path / "source") as source:
        server = source.bootstrap
        create_topic(server, TOPIC, 2, {})
        for number in PARTITIONS:
            produce(server, TOPIC, odd_messages(200, seed=number), partition=number)
            pieces = [(odd_messages(9, seed=n), n % 2 == 0) for n in range(6)]
            at = {"partition": number, "transactional_id": f"id-{number}"}
            produce_transactions(server, TOPIC, pieces, **at)
        archives = [
            mirror(TOPIC, server, tmp_path / "kept", form=form, max_offsets=25)
            | {"name": f"kept-{form}"}
            for form in FORMATS
        ]
        copied = run_now(write_config(tmp_path / "archives.json", *archives))
        assert copied.returncode == 0, copied.stderr
        wanted = {
            number: list(rows_by_librdkafka(server, TOPIC, partition=number, config=SOON))
            for number in PARTITIONS
        }
    start, end = {0: 17, 1: 203}, {0: 199, 1: 221}
    between = {
        number: [row for row in rows if start[number] <= row.offset < end[number]]
        for number, rows in wanted.items()
    }
    assert len(between[0]) == 199 - 17
    assert between[1]
    with (
        MountingBroker(tmp_path / "log", tmp_path / "kept") as served,
        SparkConnector(served, tmp_path / "spark") as spark,
    ):
        for form in FORMATS:
            assert spark.read(f"kept-{form}") == wanted
            assert spark.read(f"kept-{form}", start=start, end=end) == between

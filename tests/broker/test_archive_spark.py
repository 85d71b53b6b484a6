"""Goal: Spark's Kafka connector reads a mounted archive in batches and as a stream.

Method: a source with aborted transactions and their markers, archived in each format; one broker
mounts all. What Spark reads is compared with what librdkafka reads from the source. The archive of
a stream, in a directory or a bucket, grows by a mirror that runs.
"""

from __future__ import annotations

import pytest

from kit.judges.clients import odd_messages, produce, produce_transactions, rows_by_librdkafka
from kit.judges.spark_connector import SparkConnector
from kit.judges.spark_stream import SparkStream
from kit.runs.commands import FORMATS, mirror, wait_until, write_config
from kit.runs.inline_run import InlineRun, run_now
from kit.servers.embedded import EmbeddedBroker
from kit.servers.kafka import create_topic
from kit.servers.mounted import MountingBroker, kept_in

pytestmark = [pytest.mark.jvm, pytest.mark.xdist_group("spark_connector")]

TOPIC = "kept"
PARTITIONS = range(2)
SOON = {"fetch.wait.max.ms": 20}


def fill(server, *, seed=0):
    for number in PARTITIONS:
        produce(server, TOPIC, odd_messages(200, seed=seed + number), partition=number)
        pieces = [(odd_messages(9, seed=seed + n), n % 2 == 0) for n in range(6)]
        at = {"partition": number, "transactional_id": f"id-{number}"}
        produce_transactions(server, TOPIC, pieces, **at)


def rows(server):
    return {
        number: list(rows_by_librdkafka(server, TOPIC, partition=number, config=SOON))
        for number in PARTITIONS
    }


def test_spark_reads_an_archive_whole_and_between_offsets(tmp_path):
    with EmbeddedBroker(tmp_path / "source") as source:
        server = source.bootstrap
        create_topic(server, TOPIC, 2, {})
        fill(server)
        archives = [
            mirror(TOPIC, server, tmp_path / "kept", form=form, max_offsets=25)
            | {"name": f"kept-{form}"}
            for form in FORMATS
        ]
        copied = run_now(write_config(tmp_path / "archives.json", *archives))
        assert copied.returncode == 0, copied.stderr
        wanted = rows(server)
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


@pytest.mark.in_bucket
@pytest.mark.gate("Spark once more")
def test_a_stream_gets_each_record_once_while_a_mirror_extends_the_archive(log_bucket, tmp_path):
    copied = mirror(TOPIC, "", tmp_path / "kept", form="native", max_time_ms=100, max_offsets=50)
    place, objects, environment = kept_in(tmp_path, log_bucket, copied)
    broker = MountingBroker(tmp_path / "log", place, **environment)
    with EmbeddedBroker(tmp_path / "source") as source:
        create_topic(source.bootstrap, TOPIC, 2, {})
        fill(source.bootstrap)
        first = rows(source.bootstrap)
        copied |= {"name": TOPIC, "source": {"bootstrap-servers": source.bootstrap}}
        config = write_config(tmp_path / "mirror.json", copied)
        with InlineRun(config, folder=tmp_path) as run:
            wait_until(
                lambda: len(list((objects / TOPIC).glob("*/*.batches"))) > 4, what=lambda: run.text
            )
            with broker as served, SparkStream(served, tmp_path / "spark") as stream:
                stream.begin(TOPIC)
                stream.wait_for(count_of(first))
                assert joined(stream.batches) == first
                fill(source.bootstrap, seed=50)
                wanted = rows(source.bootstrap)
                assert count_of(wanted) == 2 * count_of(first)
                stream.wait_for(count_of(wanted))
                assert joined(stream.batches) == wanted


def count_of(found):
    return sum(map(len, found.values()))


def joined(batches):
    """The records of each partition as they came."""
    return {
        number: [row for one in batches for row in one.get(number, ())] for number in PARTITIONS
    }

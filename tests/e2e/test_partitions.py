"""Partitions that are added while a service runs, and a backlog that several slots share.

Against Apache Kafka, whose own tool adds the partitions.
"""

import hashlib
import signal

import duckdb
import pytest

from kit.judges.clients import Message, odd_messages, produce, rows_by_librdkafka
from kit.judges.truth import Source, object_names
from kit.runs.commands import Run, mirror, wait_until, write_config
from kit.runs.inline_run import InlineRun
from logmirror.testing import Row, check_tiles, compare

pytestmark = [pytest.mark.xdist_group("e2e-kafka"), pytest.mark.timeout(900)]

RECORD_BYTES = 100_000
BACKLOG = 9_000
"""Records of the backlog: as much payload as three slices of 256 MiB, but well compressible."""


def test_partitions_that_are_added_while_a_service_runs_are_copied_from_their_start(
    own_kafka, tmp_path
):
    topic = own_kafka.create_topic("growing")
    produce(own_kafka.bootstrap, topic, odd_messages(30, seed=1))
    config = write_config(
        tmp_path / "config.json",
        *(
            mirror(topic, own_kafka.bootstrap, tmp_path, form=f, max_time_ms=200)
            for f in ("native", "parquet")
        ),
    )

    with InlineRun(config, folder=tmp_path) as run:
        run.wait_for(" flushed .*partition=0")
        arguments = ("--alter", "--topic", topic, "--partitions", "3")
        own_kafka.tool("kafka-topics", "--bootstrap-server", own_kafka.bootstrap, *arguments)
        for partition in range(3):
            messages = odd_messages(40, seed=10 + partition)
            produce(own_kafka.bootstrap, topic, messages, partition=partition)
        for form in ("native", "parquet"):
            run.wait_for(f" flushed mirror={form} .*partition=2 .*from=0 ")
        run.signal(signal.SIGTERM)
        assert run.wait() == 0, run.text

    source = Source(own_kafka.bootstrap, topic, partitions=range(3))
    for form in ("native", "parquet"):
        assert source.anomalies(tmp_path, form) == []


def test_a_long_backlog_of_one_partition_is_copied_in_parallel_and_published_in_order(
    own_kafka, tmp_path
):
    topic = own_kafka.create_topic("backlog")
    produce(own_kafka.bootstrap, topic, big_messages(0, 20))
    config = write_config(
        tmp_path / "config.json",
        mirror(topic, own_kafka.bootstrap, tmp_path, max_time_ms=500, max_bytes=32 << 20),
    )

    with Run(config, folder=tmp_path) as run:
        run.wait_for(" flushed ")  # now it knows how large records are
        run.signal(signal.SIGSTOP)
        batching = {"compression.type": "zstd", "linger.ms": 20, "batch.size": 1_000_000}
        produce(own_kafka.bootstrap, topic, big_messages(20, BACKLOG), config=batching)
        run.signal(signal.SIGCONT)
        published_early = watch_staged_objects(run, tmp_path, BACKLOG)
        run.signal(signal.SIGTERM)
        assert run.wait() == 0, run.text

    assert published_early == []
    assert " from=20 " in run.text
    names = object_names(tmp_path / "parquet" / "0")
    assert check_tiles(names, 0, BACKLOG) == []
    rows = rows_by_librdkafka(own_kafka.bootstrap, topic)
    assert compare(map(digested, rows), map(digested, rows_of(tmp_path, names))) == []


def big_messages(first, stop):
    """Messages that differ at both ends and compress well."""
    for number in range(first, stop):
        mark = b"%08d" % number
        body = mark + b"." * (RECORD_BYTES - 16) + mark
        yield Message(mark, body, ((b"n", mark),), 1_700_000_000_000 + number)


def watch_staged_objects(run, root, end):
    """Wait for the copy's end; returns the problems seen meanwhile.

    Staged objects that lie behind the chain's end while another slice still writes before them are
    the sign of slices side by side.
    """
    problems, most_staged = [], 0

    def is_done():
        nonlocal most_staged
        staged = list((root / ".logmirror" / "staged").rglob("backlog-*"))
        most_staged = max(most_staged, len(staged))
        names = object_names(root / "parquet" / "0")  # once: more are published meanwhile
        reached = int(names[-1][21:41]) + 1
        problems.extend(check_tiles(names, 0, reached))
        return reached == end

    wait_until(is_done, what=lambda: f"offset {end}:\n{run.text}")
    assert most_staged > 2, "the slices ran one after the other"
    return problems


def rows_of(root, names):
    connection = duckdb.connect()
    for name in names:
        found = connection.execute(
            'SELECT "offset", epoch_ms("timestamp"), timestampType, key, value, headers '
            "FROM read_parquet($file)",
            {"file": str(root / "parquet" / "0" / name)},
        )
        while rows := found.fetchmany(100):
            for *fields, headers in rows:
                yield Row(*fields, tuple((h["key"].encode(), h["value"]) for h in headers))


def digested(row):
    """The row with a digest for its value, so that many fit in memory."""
    return Row(*row)._replace(value=hashlib.sha256(row.value).digest())

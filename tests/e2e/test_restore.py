"""Goal: an archive is restored into Apache Kafka at the original offsets, and read by its tools.

Method: a source with transactions, copied to an archive of each format; a broker that mounts the
archive; `logmirror run` with that broker as the source and Apache Kafka as the destination; Apache
Kafka's console consumer on the mounted topic, and librdkafka on both clusters.
"""

from __future__ import annotations

from itertools import takewhile

import pytest
from confluent_kafka.admin import AdminClient

from kit.judges.clients import (
    Message,
    odd_messages,
    produce,
    produce_transactions,
    rows_by_librdkafka,
)
from kit.runs.commands import mirror, wait_until, write_config
from kit.runs.inline_run import InlineRun, mirror_to_cluster, run_now
from kit.servers.embedded import EmbeddedBroker
from kit.servers.kafka import create_topic
from kit.servers.mounted import MountingBroker
from logmirror.clock import SYSTEM_CLOCK
from logmirror.cluster.client import ClusterClient
from logmirror.cluster.properties import connection_settings
from logmirror.mirror.ports import FlowId, KafkaSpec, SourceView, Start
from logmirror.to_kafka.idempotence import quiesce_ms
from logmirror.to_kafka.preserve_destination import LaneClusters, PreserveDestination

FORMATS = ("native", "parquet", "ndjson")
SOON = {"fetch.wait.max.ms": 20}
COMPRESSED = {"compression.type": "zstd", "message.max.bytes": 20_000_000}


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    with EmbeddedBroker(tmp_path_factory.mktemp("source")) as source:
        yield source.bootstrap


def rows(bootstrap, topic, partition=0):
    return list(rows_by_librdkafka(bootstrap, topic, partition=partition, config=SOON))


@pytest.mark.parametrize("form", FORMATS)
def test_a_restored_topic_equals_the_original(source, kafka_431, apache_tools, tmp_path, form):
    topic = f"restored-{form}"
    create_topic(source, topic, 1, {})
    produce(source, topic, odd_messages(100, seed=1))
    transactions = [(odd_messages(7, seed=n), n % 3 != 0) for n in range(6)]
    produce_transactions(source, topic, transactions, transactional_id=topic)
    archived = mirror(topic, source, tmp_path / "kept", form=form, max_offsets=25)
    archived["name"] = topic
    wanted = rows(source, topic)
    assert len(wanted) == 100 + 4 * 7

    copied = run_now(write_config(tmp_path / "archive.json", archived))
    assert copied.returncode == 0, copied.stderr
    with MountingBroker(tmp_path / "log", tmp_path / "kept") as mounted:
        restore = mirror_to_cluster(topic, mounted, kafka_431.bootstrap)
        result = run_now(write_config(tmp_path / "restore.json", restore))
        assert result.returncode == 0, result.stderr
        time_ms = wanted[60].timestamp_ms + 1
        earlier = restore | {"until": {"time": time_ms}}
        earlier["destinations"][0]["topic"] = f"{topic}-earlier"
        result = run_now(write_config(tmp_path / "earlier.json", earlier))
        assert result.returncode == 0, result.stderr
        at = ("--bootstrap-server", mounted, "--topic", topic, "--isolation-level")
        limits = ("read_committed", "--max-messages", str(len(wanted)), "--from-beginning")
        shown = ("--property", "print.offset=true", "--property", "print.value=false")
        found = apache_tools.run("kafka-console-consumer", *at, *limits, *shown).stdout
    assert [int(line.partition(":")[2]) for line in found.split() if ":" in line] == [
        row.offset for row in wanted
    ]
    assert rows(kafka_431.bootstrap, topic) == wanted
    before = list(takewhile(lambda row: row.timestamp_ms < time_ms, wanted))
    assert 10 < len(before) < len(wanted)
    assert rows(kafka_431.bootstrap, f"{topic}-earlier") == before


def test_a_restore_up_to_an_offset_has_exactly_the_records_below_it(source, kafka_431, tmp_path):
    topic = "restored-below"
    create_topic(source, topic, 2, {})
    for number in range(2):
        produce(source, topic, odd_messages(60, seed=number), partition=number)
        transactions = [(odd_messages(8, seed=n), n % 2 == 0) for n in range(6)]
        produce_transactions(
            source, topic, transactions, partition=number, transactional_id=f"{topic}-{number}"
        )
    end = 60 + 2 * 9 + 4  # within the third transaction, which is committed; one is aborted
    archived = mirror(topic, source, tmp_path / "kept", form="native", max_offsets=25)
    archived["name"] = topic
    copied = run_now(write_config(tmp_path / "archive.json", archived))
    assert copied.returncode == 0, copied.stderr

    with MountingBroker(tmp_path / "log", tmp_path / "kept") as mounted:
        restore = mirror_to_cluster(topic, mounted, kafka_431.bootstrap)
        restore["until"] = {"offset": end}
        result = run_now(write_config(tmp_path / "restore.json", restore))
        assert result.returncode == 0, result.stderr
    for number in range(2):
        wanted = rows(source, topic, number)
        below = [row for row in wanted if row.offset < end]
        assert [row.offset for row in below] == [*range(68), *range(78, end)]
        assert len(below) < len(wanted)
        assert rows(kafka_431.bootstrap, topic, number) == below


def test_a_restore_waits_at_a_damaged_object_until_that_is_repaired(source, kafka_431, tmp_path):
    topic = "restored-damaged"
    create_topic(source, topic, 1, {})
    produce(source, topic, odd_messages(200, seed=1), config={"batch.num.messages": 10})
    archived = mirror(topic, source, tmp_path / "kept", form="native", max_offsets=25)
    archived["name"] = topic
    copied = run_now(write_config(tmp_path / "archive.json", archived))
    assert copied.returncode == 0, copied.stderr
    objects = sorted((tmp_path / "kept" / topic / "0").glob("*.batches"))
    damaged = objects[len(objects) // 2]
    first, sound = int(damaged.name.split("-")[0]), damaged.read_bytes()
    damaged.write_bytes(sound[:-1] + bytes([sound[-1] ^ 1]))

    wanted, broker = rows(source, topic), MountingBroker(tmp_path / "log", tmp_path / "kept")
    with broker as mounted:
        restore = mirror_to_cluster(topic, mounted, kafka_431.bootstrap)
        run = InlineRun(write_config(tmp_path / "restore.json", restore), folder=tmp_path)
        try:
            wait_until(
                lambda: damaged.name in broker.log.read_text(), what=lambda: f"refused:\n{run.text}"
            )
            kept = [row for row in wanted if row.offset < first]
            wait_until(
                lambda: rows(kafka_431.bootstrap, topic) == kept, what=lambda: f"rows:\n{run.text}"
            )
            assert run.alive
            damaged.write_bytes(sound)
            wait_until(
                lambda: rows(kafka_431.bootstrap, topic) == wanted, what=lambda: f"all:\n{run.text}"
            )
        finally:
            run.kill()
    assert 0 < len(kept) < len(wanted)


def wait_of_a_restart(source, destination, topic):
    """How long a mirror that continues into a replica waits first, in milliseconds."""
    with (
        ClusterClient(connection_settings(source, {})) as reader,
        ClusterClient(connection_settings(destination, {})) as client,
    ):
        spec = KafkaSpec(cluster=client, topic=topic)
        replica = PreserveDestination(spec, LaneClusters(lambda _: client, SYSTEM_CLOCK))
        found = reader.topic(topic)
        replica.prepare(reader, found, None)
        flow = FlowId(mirror=topic, destination="copy", topic=topic, partition=0)
        position = replica.positions([flow], None)[flow]
        assert position
        view = SourceView(topic_id=found.topic_id, log_start=0, last_stable_offset=position)
        start = Start(position=position, leader_epoch=-1, tail_checked=False, view=view)
        return replica.begin(flow, start).wait_ms


def test_empty_partitions_at_the_end_are_not_created_and_can_be_added(source, kafka_431, tmp_path):
    """Also: a restore of new records continues without a wait."""
    topic = "restored-part"
    create_topic(source, topic, 12, {})
    for number in (0, 2):
        messages = odd_messages(10, seed=number, start_ms=SYSTEM_CLOCK.now_ms())
        produce(source, topic, messages, partition=number)
    archived = mirror(topic, source, tmp_path / "kept") | {"name": topic, "partitions": "all"}
    archived.pop("partition", None)
    copied = run_now(write_config(tmp_path / "archive.json", archived))
    assert copied.returncode == 0, copied.stderr
    assert {path.name for path in (tmp_path / "kept" / topic).iterdir()} >= {"0", "2"}

    with MountingBroker(tmp_path / "log", tmp_path / "kept") as mounted:
        restore = mirror_to_cluster(topic, mounted, kafka_431.bootstrap)
        config = write_config(tmp_path / "restore.json", restore)
        result = run_now(config)
        assert result.returncode == 0, result.stderr
        admin = AdminClient({"bootstrap.servers": kafka_431.bootstrap})
        assert sorted(admin.list_topics(topic).topics[topic].partitions) == [0, 1, 2]
        at = ("--bootstrap-server", kafka_431.bootstrap, "--topic", topic)
        kafka_431.tools.run("kafka-topics", *at, "--alter", "--partitions", "12")
        result = run_now(config)
        assert result.returncode == 0, result.stderr
        assert len(admin.list_topics(topic).topics[topic].partitions) == 12
        assert wait_of_a_restart(mounted, kafka_431.bootstrap, topic) == 0
    for number in range(3):
        assert rows(kafka_431.bootstrap, topic, number) == rows(source, topic, number)


@pytest.mark.parametrize(("more", "code"), [((), 2), (("message.max.bytes=20000000",), 0)])
def test_a_record_that_was_small_compressed_is_restored_with_a_larger_limit(
    source, tmp_path, more, code
):
    """Rows are not compressed. The created topic gets the limit of the broker that serves them."""
    topic = f"large-{code}"
    create_topic(source, topic, 1, {})
    large = Message(b"key", b'{"a": "hello world"}' * 150_000, (), 1_700_000_000_000)
    produce(source, topic, [*odd_messages(3, seed=1), large], config=COMPRESSED)
    archived = mirror(topic, source, tmp_path / "kept") | {"name": topic}
    copied = run_now(write_config(tmp_path / "archive.json", archived))
    assert copied.returncode == 0, copied.stderr
    options = [part for one in more for part in ("--override", one)]
    with (
        MountingBroker(tmp_path / "log", tmp_path / "kept", options=options) as mounted,
        EmbeddedBroker(tmp_path / "destination") as destination,
    ):
        restore = mirror_to_cluster(topic, mounted, destination.bootstrap)
        result = run_now(write_config(tmp_path / "restore.json", restore))
        assert result.returncode == code, result.stderr
        assert ("MESSAGE_TOO_LARGE" in result.stderr) == bool(code)
        found = rows(destination.bootstrap, topic)
        assert found == rows(source, topic)[: 3 if code else 4]
        # The records are old: a restart waits, one second more for each megabyte of the limit.
        limit = 1_048_588 if code else 20_000_000
        assert wait_of_a_restart(mounted, destination.bootstrap, topic) == quiesce_ms(limit)
        assert quiesce_ms(limit) // 1000 - quiesce_ms(0) // 1000 == limit // 1_000_000

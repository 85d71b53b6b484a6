"""Goal: an archive that a mirror wrote is served as read-only topics, at the original offsets.

Method: the embedded broker is the source; `logmirror` copies it to each format; a second broker,
started by its command line, mounts the archive. librdkafka reads both with both isolation levels.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from dataclasses import replace
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import pytest
import xxhash
from confluent_kafka import Consumer, KafkaException, Producer, TopicCollection, TopicPartition
from confluent_kafka.admin import AdminClient, NewPartitions, NewTopic, OffsetSpec

from kit.judges.clients import (
    Message,
    odd_messages,
    produce,
    produce_transactions,
    rows_by_kcat,
    rows_by_librdkafka,
)
from kit.judges.java_clients import JavaReading
from kit.judges.log_dirs_client import LogDirsClient
from kit.judges.partition_client import PartitionClient
from kit.judges.scrape import ask
from kit.runs.commands import mirror, wait_until, write_config
from kit.runs.inline_run import run_now
from kit.servers.embedded import EmbeddedBroker
from kit.servers.kafka import create_topic
from kit.servers.machine import free_ports
from kit.servers.mounted import MountingBroker
from kit.servers.s3 import S3Server
from logmirror.archive.claims import Claim, claim_name
from logmirror.model import OffsetRange

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = pytest.mark.jvm

FORMATS = ("native", "parquet", "ndjson")
TOPIC = "odd"
LINES = "lines"
SOON = {"fetch.wait.max.ms": 20, "reconnect.backoff.max.ms": 200}
RAW = {**SOON, "isolation.level": "read_uncommitted"}
POLICY_VIOLATION = 44
TIMEOUT_S = 60
MADE = 'logmirror_broker_local_copies_misses_total{of="archives"}'


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Iterator[Any]:
    """A source with transactions, markers, odd records and a trimmed start; its archives."""
    folder = tmp_path_factory.mktemp("archives")
    with EmbeddedBroker(folder / "source") as source:
        create_topic(source.bootstrap, TOPIC, 2, {})
        fill(source.bootstrap)
        for form in FORMATS:
            copy(source.bootstrap, folder, form)
        yield source.bootstrap, folder


def fill(bootstrap):
    for number in range(2):
        produce(bootstrap, TOPIC, odd_messages(200, seed=number), partition=number)
        committed = [(odd_messages(7, seed=n), n % 3 != 0) for n in range(12)]
        produce_transactions(
            bootstrap, TOPIC, committed, partition=number, transactional_id=f"id-{number}"
        )
    produce(bootstrap, TOPIC, odd_messages(20, seed=9), config={"compression.type": "lz4"})


def copy(bootstrap, folder, form, **more):
    one = mirror(TOPIC, bootstrap, folder / form, form=form, max_offsets=25, **more)
    one["name"] = TOPIC
    config = write_config(folder / f"{form}.json", one)
    result = run_now(config)
    assert result.returncode == 0, result.stderr


def rows(bootstrap, number, config=SOON):
    return list(rows_by_librdkafka(bootstrap, TOPIC, partition=number, config=config))


@pytest.mark.parametrize("form", FORMATS)
def test_an_archive_in_a_directory_equals_its_source(world, tmp_path, form):
    source, folder = world
    with MountingBroker(tmp_path / "log", folder / form) as served:
        for number in range(2):
            wanted = rows(source, number)
            assert len(wanted) > 200
            assert rows(served, number) == wanted
            found = rows_by_kcat(served, TOPIC, partition=number)
            assert found == [row._replace(headers=()) for row in wanted]
        if form == "native":  # the aborted records are in the objects, as they were in the log
            assert rows(served, 0, RAW) == rows(source, 0, RAW) != rows(source, 0)


@pytest.mark.parametrize(("form", "count"), [("parquet", 3), ("ndjson", 1)])
def test_the_next_two_objects_are_loaded_ahead_unless_they_are_ndjson(world, tmp_path, form, count):
    _, folder = world
    [port] = free_ports(1)
    options = "--monitoring-port", str(port)
    with (
        MountingBroker(tmp_path / "log", folder / form, options=options) as served,
        PartitionClient(served, TOPIC) as partition,
    ):

        def made() -> int:
            lines = ask(port, "/metrics").text.splitlines()
            return next(int(float(one.split()[1])) for one in lines if one.startswith(MADE))

        before = made()
        assert partition.fetch(partition.list_offset(-2)[2], max_bytes=1).error_code == 0
        wait_until(lambda: made() - before >= count, what=lambda: f"{made() - before} copies")
        time.sleep(0.3)  # another one would have been made
        assert made() - before == count


@pytest.mark.parametrize("encoding", ["", "utf8"])
def test_ndjson_is_served_with_its_encoding_and_not_without(world, tmp_path, encoding):
    source, _ = world
    topic = f"text-{encoding}"
    create_topic(source, topic, 1, {})
    produce(source, topic, [Message(b"", b"dGV4dA=="), Message(None, b"text")])
    one = mirror(topic, source, tmp_path / "kept", form="ndjson")
    one |= {"name": topic, "encoding": "utf8"}
    copied = run_now(write_config(tmp_path / "text.json", one))
    assert copied.returncode == 0, copied.stderr

    broker = MountingBroker(tmp_path / "log", tmp_path / "kept", encoding=encoding)
    with broker as served:
        if encoding:
            wanted = list(rows_by_librdkafka(source, topic, config=SOON))
            assert list(rows_by_librdkafka(served, topic, config=SOON)) == wanted
        else:
            assert "--archive-encoding base64 or utf8" in broker.log.read_text()
            with pytest.raises(KafkaException, match="No leaders found"):
                end_of(served, topic)


def end_of(bootstrap, topic):
    """The end of partition 0 by one request, of which the error is not retried."""
    admin = AdminClient({"bootstrap.servers": bootstrap})
    wanted = {TopicPartition(topic, 0): OffsetSpec.latest()}
    (found,) = admin.list_offsets(wanted, request_timeout=5).values()
    return found.result().offset


@pytest.fixture(scope="module")
def s3(tmp_path_factory) -> Iterator[S3Server]:
    with S3Server(tmp_path_factory.mktemp("s3")) as server:
        yield server


def access(server):
    """The variables of the AWS SDK for a server."""
    location = server.location("any")
    return {
        "AWS_ENDPOINT_URL": server.endpoint,
        "AWS_ACCESS_KEY_ID": location.write.access_key_id,
        "AWS_SECRET_ACCESS_KEY": location.write.secret_access_key,
        "AWS_REGION": location.region or "us-east-1",
    }


@pytest.mark.parametrize("form", FORMATS)
def test_an_archive_in_a_bucket_equals_its_source(world, s3, tmp_path, form):
    source, folder = world
    bucket = s3.new_bucket()
    client = s3.client()
    for path in (folder / form).rglob("*"):
        if path.is_file() and ".logmirror/staged" not in str(path):
            client.put_object(
                Bucket=bucket,
                Key=f"kept/{path.relative_to(folder / form)}",
                Body=path.read_bytes(),
            )
    with MountingBroker(tmp_path / "log", f"s3://{bucket}/kept", **access(s3)) as served:
        for number in range(2):
            assert rows(served, number) == rows(source, number)


def test_new_objects_appear_and_a_group_resumes(world, tmp_path):
    source, folder = world
    objects = sorted((folder / "native" / TOPIC / "0").glob("*.batches"))
    partition = tmp_path / "archive" / TOPIC / "0"
    partition.mkdir(parents=True)
    shutil.copy(objects[0], partition)
    wanted = rows(source, 0, RAW)
    with MountingBroker(tmp_path / "log", tmp_path / "archive") as served:
        begun = rows(served, 0, RAW)
        assert begun == wanted[: len(begun)]
        assert begun
        commit(served, begun[-1].offset + 1)
        for one in objects[1:]:
            shutil.copy(one, partition / f".{one.name}")
            (partition / f".{one.name}").rename(partition / one.name)
        wait_until(
            lambda: rows(served, 0, RAW) == wanted, what=lambda: "new objects", timeout_s=TIMEOUT_S
        )
        topic_id = id_of(served)
    with MountingBroker(tmp_path / "log", tmp_path / "archive") as served:
        assert id_of(served) == topic_id
        assert resumed_at(served) == begun[-1].offset + 1


@pytest.fixture(scope="module")
def lines(world, s3) -> Iterator[Any]:
    """A topic of printable records; its archives in a folder and in a bucket."""
    source, folder = world
    create_topic(source, LINES, 2, {})
    for number in range(2):
        pieces = [(printable(15, seed=10 * number + n), n % 3 != 0) for n in range(9)]
        produce_transactions(
            source, LINES, pieces, partition=number, transactional_id=f"{LINES}-{number}"
        )
    bucket = s3.new_bucket()
    copied = mirror(LINES, source, folder / LINES, form="native", max_offsets=15, name=LINES)
    in_bucket = {"destinations": [s3.destination(bucket, prefix="kept")]}
    for one in (copied, copied | in_bucket):
        result = run_now(write_config(folder / f"{LINES}.json", one))
        assert result.returncode == 0, result.stderr
    wanted = [list(rows_by_librdkafka(source, LINES, partition=n, config=SOON)) for n in range(2)]
    assert [len(found) for found in wanted] == [6 * 15] * 2
    return wanted, folder / LINES, f"s3://{bucket}/kept"


def printable(count, *, seed):
    return [
        Message(
            one.key and one.key.hex().encode(),  # null and empty ones stay
            one.value and one.value.hex().encode(),
            tuple((b"h%d" % n, b"%d" % seed) for n in range(seed % 3)),
            one.timestamp_ms,
        )
        for one in odd_messages(count, seed=seed)
    ]


def line_of(number, row):
    """How Apache Kafka's console consumer prints a record."""
    headers = ",".join(f"{name.decode()}:{value.decode()}" for name, value in row.headers)
    fields = [f"CreateTime:{row.timestamp_ms}", f"Partition:{number}", f"Offset:{row.offset}"]
    texts = ["null" if text is None else text.decode() for text in (row.key, row.value)]
    return "\t".join([*fields, headers or "NO_HEADERS", *texts])


@pytest.mark.gate("the same records, to another client")
def test_the_console_consumer_prints_a_bucket_and_resumes_its_group(
    lines, s3, apache_tools, tmp_path
):
    wanted, _, place = lines
    shown = ("timestamp", "partition", "offset", "headers", "key", "value")
    printed = [part for one in shown for part in ("--property", f"print.{one}=true")]
    group = ("--group", "printing", "--from-beginning", "--isolation-level", "read_committed")
    found = [[], []]
    with MountingBroker(tmp_path / "log", place, **access(s3)) as served:
        for count in (100, 80):
            at = ("--bootstrap-server", served, "--topic", LINES, "--max-messages", str(count))
            output = apache_tools.run("kafka-console-consumer", *at, *group, *printed).stdout
            new = [line for line in output.split("\n") if line.startswith("CreateTime:")]
            assert len(new) == count
            for line in new:
                found["\tPartition:1\t" in line].append(line)
    assert found == [[line_of(n, row) for row in wanted[n]] for n in range(2)]


@pytest.mark.gate("a group of two consumers, which are slow to start")
def test_two_members_of_a_group_share_an_archive_that_grows(lines, tmp_path):
    """One reads both partitions, then each reads one, then the first one reads both again."""
    wanted, folder, _ = lines

    def show(part: slice) -> None:
        for number in range(2):
            partition = tmp_path / "archive" / LINES / str(number)
            partition.mkdir(parents=True, exist_ok=True)
            for one in sorted((folder / LINES / str(number)).glob("*.batches"))[part]:
                shutil.copy(one, partition / f".{one.name}")
                (partition / f".{one.name}").rename(partition / one.name)

    show(slice(4))
    with MountingBroker(tmp_path / "log", tmp_path / "archive") as served:
        first, second = (JavaReading(served, LINES, tmp_path, group="pair") for _ in range(2))

        def wait(is_true: Callable[[], bool]) -> None:
            wait_until(is_true, what=lambda: first.text[-4000:])

        with first:
            wait(lambda: {row[0] for row in first.rows} == {0, 1})
            with second:
                wait(lambda: len(first.assigned) == len(second.assigned) == 1)
                before = len(first.rows)
                show(slice(4, 7))
                wait(lambda: len(first.rows) > before and len(second.rows) > 0)
                second.stop()
            wait(lambda: first.assigned == {0, 1})
            show(slice(7, None))
            wait(lambda: len(first.rows + second.rows) >= sum(map(len, wanted)))
        assert len({row[0] for row in second.rows}) == 1
        assert sorted(first.rows + second.rows, key=itemgetter(0, 1)) == [
            (number, row.offset, row.value) for number in range(2) for row in wanted[number]
        ]


def commit(bootstrap, offset):
    consumer = Consumer({"bootstrap.servers": bootstrap, "group.id": "readers"})
    consumer.commit(offsets=[TopicPartition(TOPIC, 0, offset)], asynchronous=False)
    consumer.close()


def resumed_at(bootstrap):
    consumer = Consumer(
        {
            "bootstrap.servers": bootstrap,
            "group.id": "readers",
            "auto.offset.reset": "error",
            "isolation.level": "read_uncommitted",
        }
    )
    consumer.subscribe([TOPIC])
    found = consumer.poll(TIMEOUT_S)
    consumer.close()
    assert found.error() is None
    return found.offset()


def id_of(bootstrap):
    admin = AdminClient({"bootstrap.servers": bootstrap})
    found = admin.describe_topics(TopicCollection([TOPIC]))[TOPIC].result(TIMEOUT_S)
    return str(found.topic_id)


def test_writes_are_refused_and_a_log_dir_beside_it_works(world, tmp_path):
    _, folder = world
    with MountingBroker(tmp_path / "log", folder / "native") as served:
        admin = AdminClient({"bootstrap.servers": served})
        with pytest.raises(KafkaException, match="POLICY_VIOLATION"):
            admin.create_partitions([NewPartitions(TOPIC, 5)])[TOPIC].result(TIMEOUT_S)
        with pytest.raises(KafkaException, match="exists"):
            admin.create_topics([NewTopic(TOPIC, 1)])[TOPIC].result(TIMEOUT_S)
        with pytest.raises(KafkaException, match="POLICY_VIOLATION"):
            admin.delete_topics([TOPIC])[TOPIC].result(TIMEOUT_S)
        with pytest.raises(KafkaException, match="POLICY_VIOLATION"):
            next(iter(admin.delete_records([TopicPartition(TOPIC, 0, 5)]).values())).result(
                TIMEOUT_S
            )
        failures = []
        producer = Producer({"bootstrap.servers": served})
        producer.produce(TOPIC, b"value", on_delivery=lambda error, _: failures.append(error))
        assert producer.flush(TIMEOUT_S) == 0
        assert [error.name() for error in failures] == ["POLICY_VIOLATION"]
        create_topic(served, "own", 1, {})
        produce(served, "own", odd_messages(3, seed=1))
        with LogDirsClient(served) as client:
            assert client.where(TOPIC) == {}
            assert client.where("own").keys() == {str(tmp_path / "log")}
            assert client.move_one(TOPIC, tmp_path / "log") == POLICY_VIOLATION


def test_a_topic_of_the_same_name_is_refused_at_the_start(world, tmp_path):
    _, folder = world
    with EmbeddedBroker(tmp_path / "log") as broker:
        create_topic(broker.bootstrap, TOPIC, 1, {})
    command = [sys.executable, "-m", "logmirror", "broker", "--log-dir", str(broker.log_dir)]
    command += ["--listen", "127.0.0.1:0", "--archive", str(folder / "native")]
    result = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert result.returncode == 2
    assert "an archive has the name of another topic" in result.stderr


def test_an_archive_without_topics_is_a_warning(world, tmp_path):
    _, folder = world
    with MountingBroker(tmp_path / "log", folder / "native" / TOPIC):  # one folder too deep
        pass
    assert "odd: no topic yet: a topic is a folder with" in (tmp_path / "log.log").read_text()


def test_a_gap_takes_one_partition_offline(world, tmp_path):
    source, folder = world
    shutil.copytree(folder / "native" / TOPIC, tmp_path / "archive" / TOPIC)
    sorted((tmp_path / "archive" / TOPIC / "0").glob("*.batches"))[2].unlink()
    with MountingBroker(tmp_path / "log", tmp_path / "archive") as served:
        assert rows(served, 1) == rows(source, 1)
    assert "odd-0: offline: gap in the chain" in (tmp_path / "log.log").read_text()


def test_a_partition_without_a_folder_is_empty(world, tmp_path):
    source, folder = world
    shutil.copytree(folder / "native" / TOPIC / "1", tmp_path / "archive" / TOPIC / "1")
    with MountingBroker(tmp_path / "log", tmp_path / "archive") as served:
        assert rows(served, 0) == []
        assert rows(served, 1) == rows(source, 1)


def test_an_outage_of_the_store_is_no_lost_offset_and_ends(world, tmp_path):
    source, folder = world
    with S3Server(tmp_path / "s3") as server:
        bucket = server.new_bucket()
        client = server.client()
        for path in (folder / "parquet" / TOPIC).rglob("*.parquet"):
            key = str(path.relative_to(folder / "parquet"))
            client.put_object(Bucket=bucket, Key=key, Body=path.read_bytes())
        broker = MountingBroker(tmp_path / "log", f"s3://{bucket}", **access(server))
        with broker as served:
            server.kill()
            admin = AdminClient({"bootstrap.servers": served})
            create_topic(served, "own", 1, {})
            produce(served, "own", odd_messages(3, seed=1))
            assert TOPIC in admin.list_topics(timeout=TIMEOUT_S).topics
            consumer = Consumer(
                {
                    "bootstrap.servers": served,
                    "group.id": "unused",
                    "auto.offset.reset": "error",
                    "reconnect.backoff.max.ms": 200,
                }
            )
            consumer.assign([TopicPartition(TOPIC, 0, 0)])
            assert consumer.poll(3) is None  # an offset out of range would be an error here
            server.start()
            record = consumer.poll(TIMEOUT_S)
            consumer.close()
            assert record is not None
            assert record.error() is None
            assert rows(served, 1) == rows(source, 1)


def test_a_timestamp_is_found_as_at_the_source(world, tmp_path):
    source, folder = world
    times = sorted({row.timestamp_ms for row in rows(source, 0)})[::40]
    for form in FORMATS:
        with MountingBroker(tmp_path / form, folder / form) as served:
            for time_ms in times:
                assert found_at(served, time_ms) == found_at(source, time_ms)


def found_at(bootstrap, time_ms):
    consumer = Consumer({"bootstrap.servers": bootstrap, "group.id": "unused", **RAW})
    found = consumer.offsets_for_times([TopicPartition(TOPIC, 0, time_ms)], timeout=TIMEOUT_S)
    consumer.close()
    return found[0].offset


def claimed(archive, original, first, last, content):
    """Write the claim that the writer of this object would have made."""
    name = claim_name(TOPIC, 0, first)
    claim = Claim.from_bytes((original / name).read_bytes(), name=name)
    changed = replace(
        claim,
        covered=OffsetRange(first=first, last=last),
        digest=f"xxh3:{xxhash.xxh3_128(content).hexdigest()}",
    )
    (archive / name).parent.mkdir(parents=True, exist_ok=True)
    (archive / name).write_bytes(changed.to_bytes())


def test_leader_epochs_and_a_gap_at_the_end_do_not_stop_a_consumer(world, tmp_path):
    source, folder = world
    partition = tmp_path / "archive" / TOPIC / "0"
    shutil.copytree(folder / "native" / TOPIC / "0", partition)
    *_, newest = sorted(partition.glob("*.batches"))
    content = bytearray(newest.read_bytes())
    content[12:16] = (7).to_bytes(4, "big")
    first, last = (int(part) for part in newest.stem.split("-"))
    newest.unlink()
    (partition / f"{first:020d}-{last + 10:020d}.batches").write_bytes(content)
    claimed(tmp_path / "archive", folder / "native", first, last + 10, bytes(content))
    with MountingBroker(tmp_path / "log", tmp_path / "archive") as served:
        assert rows(served, 0) == rows(source, 0)
        consumer = Consumer(
            {"bootstrap.servers": served, "group.id": "unused", "enable.partition.eof": True}
        )
        consumer.assign([TopicPartition(TOPIC, 0, last)])
        while (found := consumer.poll(TIMEOUT_S)) is not None and found.error() is None:
            assert found.leader_epoch() in {0, None}
        consumer.close()
        assert found is not None
        assert found.offset() == last + 11

"""Goal: archives of many objects in a bucket are opened, and searched by time, with few requests.

Method: records whose times are a little out of order, each in an object of its own; a proxy in
front of the S3 server counts what a mounting broker reads. The results are those of the source. The
archive's access is in the broker's configuration file, as a user writes it.
"""

from __future__ import annotations

import json
import random
import shutil
from typing import TYPE_CHECKING

import pyarrow.parquet as pq
import pytest
from confluent_kafka import Consumer, IsolationLevel, TopicPartition
from confluent_kafka.admin import AdminClient, OffsetSpec

from kit.fakes.s3_proxy import S3Proxy
from kit.judges.clients import Message, produce, rows_by_librdkafka
from kit.runs.commands import mirror, write_config
from kit.runs.inline_run import mirror_to_cluster, run_now
from kit.servers.embedded import EmbeddedBroker
from kit.servers.kafka import create_topic
from kit.servers.mounted import MountingBroker
from kit.servers.s3 import S3Server
from logmirror.broker.log.mounted_times import NEAR

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.jvm

TOPIC = "times"
FORMATS = ("native", "parquet")
OBJECTS = 150
START_MS = 1_700_000_000_000
EACH_MS = 1000
STEPS = OBJECTS.bit_length()
TIMEOUT_S = 60


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Iterator[tuple[str, list[int], S3Server, dict[str, str]]]:
    """The source, its records' times, an S3 server, and a bucket for each format."""
    folder = tmp_path_factory.mktemp("lookups")
    chooser = random.Random(1)
    times = [START_MS + (n + chooser.randrange(5)) * EACH_MS for n in range(OBJECTS)]
    with EmbeddedBroker(folder / "source") as source, S3Server(folder / "s3") as server:
        create_topic(source.bootstrap, TOPIC, 1, {})
        messages = [Message(None, b"%d" % n, (), time_ms) for n, time_ms in enumerate(times)]
        produce(source.bootstrap, TOPIC, messages, config={"batch.num.messages": 1})
        mirrors = [
            mirror(TOPIC, source.bootstrap, folder / form, form=form, max_offsets=1)
            | {"name": f"{TOPIC}-{form}"}
            for form in FORMATS
        ]
        copied = run_now(write_config(folder / "config.json", *mirrors))
        assert copied.returncode == 0, copied.stderr
        buckets = {form: server.new_bucket() for form in FORMATS}
        for form, bucket in buckets.items():
            assert len(list((folder / form / f"{TOPIC}-{form}" / "0").iterdir())) == OBJECTS
            shutil.copytree(folder / form, server.files(bucket), dirs_exist_ok=True)
        yield source.bootstrap, times, server, buckets


def found_at(bootstrap, topic, time_ms):
    consumer = Consumer({"bootstrap.servers": bootstrap, "group.id": "unused"})
    (found,) = consumer.offsets_for_times([TopicPartition(topic, 0, time_ms)], timeout=TIMEOUT_S)
    consumer.close()
    return found.offset


def largest_at(bootstrap, topic):
    admin = AdminClient({"bootstrap.servers": bootstrap})
    (found,) = admin.list_offsets({TopicPartition(topic, 0): OffsetSpec.max_timestamp()}).values()
    return found.result(TIMEOUT_S).offset


def configured(folder, server, proxy, bucket):
    """A file with the broker's section, which has the archive and its access."""
    identity = server.location(bucket).read
    keys = {"access-key-id": identity.access_key_id}
    keys["secret-access-key"] = identity.secret_access_key
    archive = {"bucket": bucket, "endpoint": proxy.endpoint, "credentials": keys}
    archive["region"] = server.location(bucket).region
    path = folder / "broker.yaml"
    path.write_text(json.dumps({"broker": {"log-dir": str(folder / "log"), "archive": [archive]}}))
    return path


@pytest.mark.parametrize("form", FORMATS)
def test_a_lookup_reads_few_of_many_objects(world, tmp_path, form):
    source, times, server, buckets = world
    topic = f"{TOPIC}-{form}"
    wanted = times[OBJECTS // 3]
    with S3Proxy(server.endpoint, lambda _path: None) as proxy:
        config = configured(tmp_path, server, proxy, buckets[form])
        with MountingBroker(tmp_path / "log", options=("-c", str(config))) as served:
            proxy.asked.clear()
            assert found_at(served, topic, wanted) == found_at(source, TOPIC, wanted)
            # An object or its footer, and the claim or, for footers, the object that is found.
            assert NEAR < proxy.asked["GetObject"] <= 2 * (STEPS + NEAR + 2)
            for time_ms in (times[0], times[7] + 1, times[-20], max(times), max(times) + 1):
                assert found_at(served, topic, time_ms) == found_at(source, TOPIC, time_ms)
            assert largest_at(served, topic) == times.index(max(times))
            assert proxy.asked["GetObject"] < OBJECTS


def test_many_partitions_are_listed_with_few_requests(world, tmp_path):
    """Their names are read, and no object. One folder holds a folder, which is an error there."""
    _, _, server, _ = world
    bucket, many = server.new_bucket(), 60
    for number in range(many):
        folder = server.files(bucket) / "many" / str(number)
        folder.mkdir(parents=True)
        for first in range(0, 10 + number, 10):
            (folder / f"{first:020d}-{first + 9:020d}.batches").write_bytes(b"x")
    inner = server.files(bucket) / "many" / "7" / "inner"
    inner.mkdir()
    (inner / "other").write_bytes(b"x")
    with S3Proxy(server.endpoint, lambda _path: None) as proxy:
        config = configured(tmp_path, server, proxy, bucket)
        broker = MountingBroker(tmp_path / "log", options=("-c", str(config)))
        with broker as served:
            assert proxy.asked["ListObjectsV2"] < many / 2
            assert proxy.asked["GetObject"] == 0
            admin = AdminClient({"bootstrap.servers": served})
            wanted = {
                TopicPartition("many", number): OffsetSpec.latest()
                for number in range(many)
                if number != 7
            }
            level = IsolationLevel.READ_UNCOMMITTED
            found = admin.list_offsets(wanted, isolation_level=level)
            for place, end in found.items():
                objects = len(range(0, 10 + place.partition, 10))
                assert end.result(TIMEOUT_S).offset == 10 * objects
    assert "many-7: offline" in broker.log.read_text()


def test_a_restore_ends_before_a_time_that_the_lookup_finds_too_late(tmp_path):
    """The lookup reads too few objects for the record that the source finds; the copy reads all."""
    early, count = 3, 3 * NEAR
    wanted = START_MS + (count - 5) * EACH_MS
    with EmbeddedBroker(tmp_path / "source") as source:
        create_topic(source.bootstrap, TOPIC, 1, {})
        times = [START_MS + n * EACH_MS for n in range(count)]
        times[early] = wanted + EACH_MS
        messages = [Message(None, b"%d" % n, (), time_ms) for n, time_ms in enumerate(times)]
        produce(source.bootstrap, TOPIC, messages, config={"batch.num.messages": 1})
        archive = mirror(TOPIC, source.bootstrap, tmp_path / "a", form="native", max_offsets=1)
        assert run_now(write_config(tmp_path / "archive.json", archive)).returncode == 0
        assert found_at(source.bootstrap, TOPIC, wanted) == early

        options = ("--archive", str(tmp_path / "a"))
        with MountingBroker(tmp_path / "log", options=options) as served:
            assert found_at(served, "native", wanted) > early
            until = {"until": {"time": wanted}}
            copies = [
                mirror_to_cluster(
                    "native", served, source.bootstrap, name=kind, topic=kind, offsets=kind
                )
                for kind in ("preserve", "translate")
            ]
            rows = mirror("native", served, tmp_path / "b")
            config = write_config(tmp_path / "restore.json", *(c | until for c in (*copies, rows)))
            for _ in range(2):
                restored = run_now(config)
                assert restored.returncode == 0, restored.stderr
            expected = [b"%d" % n for n in range(early)]
            for kind in ("preserve", "translate"):
                found = [row.value for row in rows_by_librdkafka(source.bootstrap, kind)]
                assert found == expected
            (written,) = (tmp_path / "b" / "parquet" / "0").iterdir()
            assert pq.read_table(written)["offset"].to_pylist() == list(range(early))

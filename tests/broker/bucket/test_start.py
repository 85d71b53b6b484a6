"""Goal: a start reads thousands of commits within seconds, refuses a store that replaces objects,
and opens no partition whose records are missing.
"""

from __future__ import annotations

import asyncio
import re
import time
from typing import TYPE_CHECKING

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient

from broker.bucket.test_logs import FOLDER, Machine, row
from kit.fakes.s3_proxy import Fault, S3Proxy
from kit.judges.clients import Message, produce, rows_by_librdkafka
from kit.judges.commits import commit_files, committed
from kit.judges.partition_client import PartitionClient
from kit.runs.commands import wait_until
from kit.servers.bucket_broker import BucketBroker
from logmirror.broker.bucket.bundles import BUNDLES, Bundler
from logmirror.broker.bucket.chain import COMMITS, commit_name
from logmirror.broker.bucket.commit_format import Commit, Entry, Kind, encode
from logmirror.broker.bucket.recovery import take_over
from logmirror.errors import UnavailableError
from logmirror.stores.s3 import S3Store
from logmirror.testing.memory_store import MemoryStore

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from broker.bucket.conftest import Proxied
    from kit.servers.s3 import S3Server

COUNT = 5_000
USAGE = 2
PARTITIONS, RECORDS = 4, 5
GONE = (0, 1, RECORDS - 2)
"""Of each of the first partitions, the offset whose object is removed."""

STORAGE = 56
READ_CPU_S = 8.0
"""Read one by one, they take 18 s of one core, most of them for the requests."""


def test_five_thousand_commits_are_read_in_seconds(
    tmp_path: Path, s3_server: S3Server, bucket: str
) -> None:
    root, bundler = s3_server.files(bucket), Bundler()
    for folder in (COMMITS, BUNDLES):
        (root / folder).mkdir(parents=True)
    for number in range(COUNT):
        entry = Entry(Kind.DATA, b"t" * 16, 0, number, number + 1, b"x" * 1_000)
        packed = encode(Commit(number, 1, b"writer-1", (entry,), 0))
        (root / commit_name(number)).write_bytes(packed)
        due = bundler.add(number, packed)
        if due is not None:
            (root / due[0].name).write_bytes(due[1])
    store = S3Store(s3_server.location(bucket))
    (tmp_path / "spool").mkdir()

    began_s = time.process_time()
    owner, found = take_over(store, b"writer-2", tmp_path / "spool")
    assert time.process_time() - began_s < READ_CPU_S

    assert owner.next_sequence == COUNT + 1
    [tail] = found.tails.values()
    assert [piece.first for piece in tail.pieces] == list(range(COUNT))
    counts = store.requests.requests
    assert counts["put"] == 1
    assert counts["get"] + counts["list"] < 200


def test_a_partition_is_not_left_out_because_the_bucket_does_not_respond(tmp_path):
    """The broker would serve the others, and this one not when the bucket is back."""

    class Away(MemoryStore):
        def sizes(self, folder: str) -> dict[str, int]:
            if folder == FOLDER:
                raise UnavailableError("no response")
            return super().sizes(folder)

    async def open_all() -> None:
        Machine(Away(), tmp_path / "one", row())

    with pytest.raises(UnavailableError, match="no response"):
        asyncio.run(open_all())


@pytest.mark.slow
def test_a_start_ends_if_the_bucket_does_not_respond_and_leaves_no_partition_offline(
    tmp_path: Path, s3_server: S3Server, bucket: str
) -> None:
    BucketBroker(tmp_path / "one", s3_server, bucket, "--topic", "t:1").start().kill()
    with S3Proxy(s3_server.endpoint, lambda _: None) as proxy:
        broker = BucketBroker(tmp_path / "two", s3_server, bucket, endpoint=proxy.endpoint)
        proxy.spoil(Fault("503", "ListObjectsV2", times=1_000, part="t%40"))
        broker.start(waits=False)
        assert broker.wait() == UnavailableError.exit_code
        assert proxy.spoiled


@pytest.mark.slow
@pytest.mark.parametrize("how", ["replaces", "refuses"])
def test_a_store_without_create_only_writes_is_refused(
    tmp_path: Path, s3_server: S3Server, bucket: str, how: str
) -> None:
    """It replaces objects as if the condition was not there, or does not know the condition."""

    def delete(path: str) -> None:
        place, _, key = path.partition("/")
        s3_server.client().delete_object(Bucket=place, Key=key)

    with S3Proxy(s3_server.endpoint, delete) as proxy:
        proxy.forget_condition, proxy.refuse_condition = how == "replaces", how == "refuses"
        broker = BucketBroker(tmp_path, s3_server, bucket, endpoint=proxy.endpoint)
        broker.start(waits=False)
        try:
            assert broker.wait() == USAGE
        finally:
            broker.__exit__()
    log = broker.log.read_text()
    assert "the store replaces existing objects despite `If-None-Match: *`" in log
    assert "listening on" not in log
    assert "Traceback" not in log
    names = [path.name for path in s3_server.files(bucket).rglob("*") if path.is_file()]
    assert all(name.endswith(("-in-turn", "-at-once", "create-only")) for name in names), names


def value(partition: int, number: int) -> bytes:
    return b"%d-%d " % (partition, number) + b"x" * 900


def rows(of: Proxied, partition: int) -> list[tuple[int, bytes | None]]:
    found = rows_by_librdkafka(of.broker.bootstrap, "t", partition=partition)
    return [(row.offset, row.value) for row in found]


def wanted(partition: int, count: int = RECORDS) -> list[tuple[int, bytes | None]]:
    return [(number, value(partition, number)) for number in range(count)]


def write(of: Proxied) -> dict[int, list[Path]]:
    """Write to each partition; returns its objects, which have all records but the last one."""
    of.create_topic("t", {"segment.bytes": "1024"}, partitions=PARTITIONS)
    of.create_topic("other", {})
    producer = Producer({"bootstrap.servers": of.broker.bootstrap, "linger.ms": 0})

    def send(number: int) -> None:
        for partition in range(PARTITIONS):
            producer.produce("t", value(partition, number), partition=partition)
        assert producer.flush(60) == 0

    def in_commits() -> list[int]:
        return [one.first for path in commit_files(of.files) for one in committed(path)]

    for number in range(RECORDS - 1):
        send(number)
    wait_until(lambda: not in_commits(), what=lambda: f"offsets {in_commits()} are in commits")
    found = {number: of.matching(f"t@*/{number}/*.batches") for number in range(PARTITIONS)}
    assert {len(paths) for paths in found.values()} == {RECORDS - 1}
    send(RECORDS - 1)
    produce(of.broker.bootstrap, "other", [Message(value=b"other")])
    return found


@pytest.mark.slow
def test_a_partition_with_missing_records_is_not_opened_and_all_others_are_served(
    proxied: Callable[..., Proxied], s3_server: S3Server
) -> None:
    """The first object of one, one in between, and the last one. They may be restored."""
    found, client = proxied(commit_age_ms=2_000), s3_server.client()
    objects = write(found)
    assert found.broker.stop() == 0
    removed = {}
    for partition, number in enumerate(GONE):
        path = objects[partition][number]
        bucket, _, key = path.relative_to(s3_server.files("")).as_posix().partition("/")
        removed[bucket, key] = path.read_bytes()
        client.delete_object(Bucket=bucket, Key=key)
    found.broker.start()

    admin = AdminClient({"bootstrap.servers": found.broker.bootstrap})
    partitions = admin.list_topics(timeout=30).topics["t"].partitions
    served = PARTITIONS - 1
    leaders = {number: one.leader for number, one in partitions.items()}
    assert leaders == dict.fromkeys(range(served), -1) | {served: 1}
    log = found.broker.log.read_text()
    gaps = re.findall(r"(?s)t-(\d): offline.*?CorruptionError: [^\n]*expected=(\d)", log)
    assert [(int(partition), int(gap)) for partition, gap in gaps] == list(enumerate(GONE))
    assert rows(found, served) == wanted(served)
    more = Message(value=value(served, RECORDS))
    assert produce(found.broker.bootstrap, "t", [more], partition=served) == [RECORDS]
    assert rows(found, served) == wanted(served, RECORDS + 1)
    [other] = rows_by_librdkafka(found.broker.bootstrap, "other")
    assert other.value == b"other"
    with PartitionClient(found.broker.bootstrap, "t") as first:
        response = first.fetch(0)
        assert (response.error_code, response.records or b"") == (STORAGE, b"")

    assert found.broker.stop() == 0
    for (bucket, key), data in removed.items():
        client.put_object(Bucket=bucket, Key=key, Body=data)
    found.broker.start()
    for number in range(served):
        assert rows(found, number) == wanted(number)

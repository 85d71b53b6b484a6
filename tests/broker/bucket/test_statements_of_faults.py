"""Goal: a bucket that fails loses nothing, and is an error for those only who wait for it.

Method: the statements N, T and C of docs/broker-statements.md that are about writes, with a real
broker. A proxy in front of its bucket refuses, stores and hides, holds back or delays requests. The
objects are read by a parser of their own. Records are compared by partition, offset and digest.
"""

from __future__ import annotations

import random
import threading
import time
from typing import TYPE_CHECKING

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition

from broker.bucket.test_broker import PARTITIONS, Load, stored
from broker.bucket.test_statements_of_reads import (
    BATCHES,
    IN_BACKGROUND,
    NEVER,
    append,
    batch,
    contents,
    digest,
    expected,
    objects,
    read_all,
    seal,
)
from kit.fakes.s3_proxy import Fault
from kit.judges.commits import commit_files, values_in_bucket
from kit.judges.partition_client import EARLIEST, LATEST, Appended, PartitionClient
from kit.runs.commands import wait_until
from kit.tiers import all_but, sized
from logmirror.wire.records import Record, decode_reference, encode_reference

if TYPE_CHECKING:
    from collections.abc import Iterator

    from broker.bucket.conftest import Proxied

pytestmark = pytest.mark.slow
CORRUPT_MESSAGE = 2
STORAGE, LATE = 56, 7
ALWAYS = 10**9
REFUSED_PUTS = Fault("503", "PutObject", times=ALWAYS)
OUTAGE = Fault("503", "", times=ALWAYS)
ACKS = sized(1_000, 10_000, 10_000)
INTERVAL_MS = 100


def in_bucket(of: Proxied, topic: str) -> list[tuple[int, str]]:
    """The offsets and digests of a topic's records in the bucket."""
    found = values_in_bucket(of.files, topic.encode() + b" ")
    return sorted((offset, digest(value)) for offset, value in found.items())


def wait_until_in_bucket(of: Proxied, topic: str, batches: range) -> None:
    """Also newer records may be there."""
    wanted = expected(topic, batches)
    wait_until(
        lambda: in_bucket(of, topic)[: len(wanted)] == wanted,
        what=lambda: f"{wanted} in the bucket, where there is {in_bucket(of, topic)}",
        timeout_s=60,
    )


def of_producer(topic: str, producer_id: int) -> bytes:
    record = Record(0, 1, 0, None, b"%s by %d" % (topic.encode(), producer_id), ())
    return encode_reference([record], producer_id=producer_id, producer_epoch=0, base_sequence=0)


@pytest.mark.statement("S9", "N1", "T5", "C5")
@pytest.mark.parametrize("outcome", ["succeeds", "is refused", "is stored and its response lost"])
def test_s09_what_is_being_flushed_stays_readable(shared, topic_name, outcome):
    shared.create_topic(
        topic_name,
        {**IN_BACKGROUND, "flush.messages": str(2 * BATCHES)},
    )
    with PartitionClient(shared.broker.bootstrap, topic_name) as partition:

        def read_each(count: int) -> None:
            for number in range(2 * count):
                found = contents(partition.fetch(number, max_bytes=1).records)
                assert found == expected(topic_name, range(number // 2, number // 2 + 1))
            assert read_all(partition) == expected(topic_name, range(count))

        held, spoiled = shared.proxy.held, shared.proxy.spoiled
        with shared.proxy.holding(topic_name.encode() + b" "):
            append(partition, range(BATCHES))
            wait_until(lambda: shared.proxy.held > held, what=lambda: "a flush")
            append(partition, range(BATCHES, BATCHES + 2))
            read_each(BATCHES + 2)
            if outcome != "succeeds":
                kind = "503" if outcome == "is refused" else "lose-response"
                shared.proxy.spoil(Fault(kind, "PutObject", times=3))
        if outcome != "succeeds":
            wait_until(lambda: shared.proxy.spoiled > spoiled, what=lambda: "a fault")
        read_each(BATCHES + 2)
        wait_until_in_bucket(shared, topic_name, range(BATCHES))
        read_each(BATCHES + 2)
        shared.proxy.spoil()


@pytest.mark.statement("N2", "T6", "C6")
def test_n02_a_failed_background_flush_keeps_the_bytes_and_they_are_flushed_later(
    shared, topic_name
):
    settings = {**IN_BACKGROUND, "flush.messages": str(2 * BATCHES)}
    shared.create_topic(topic_name, settings)
    with PartitionClient(shared.broker.bootstrap, topic_name) as partition:
        spoiled = shared.proxy.spoiled
        shared.proxy.spoil(REFUSED_PUTS)
        append(partition, range(BATCHES))
        wait_until(lambda: shared.proxy.spoiled > spoiled + 2, what=lambda: "failed uploads")
        append(partition, range(BATCHES, 2 * BATCHES))
        assert read_all(partition) == expected(topic_name, range(2 * BATCHES))
        assert in_bucket(shared, topic_name) == []
        shared.proxy.spoil()
        wait_until_in_bucket(shared, topic_name, range(2 * BATCHES))
        assert read_all(partition) == expected(topic_name, range(2 * BATCHES))


@pytest.mark.statement("T7")
def test_t07_a_quiet_partition_is_flushed_without_a_further_append(shared, topic_name):
    settings = {"flush.messages": NEVER, "flush.ms": "300"}
    shared.create_topic(topic_name, settings)
    with PartitionClient(shared.broker.bootstrap, topic_name) as partition:
        append(partition, range(1))
    wait_until_in_bucket(shared, topic_name, range(1))


@pytest.mark.statement("T1", "C1", "T15", "N2", "T6", "C6")
def test_c01_producers_that_share_a_failed_upload_get_its_error_and_no_others(proxied, topic_name):
    """All bytes are kept: a repetition gets the offset that they have, and what no request waits
    for is flushed later, without a further append.
    """
    found = proxied(commit_timeout_ms=5_000)
    bootstrap, quiet, fast = found.broker.bootstrap, f"{topic_name}-q", f"{topic_name}-f"
    found.create_topic(topic_name, {})
    found.create_topic(quiet, {})
    found.create_topic(fast, {**IN_BACKGROUND, "flush.messages": "4"})
    outcomes: dict[int, Appended] = {}

    def write(producer_id: int) -> None:
        with PartitionClient(bootstrap, topic_name) as writer:
            outcomes[producer_id] = writer.produce(of_producer(topic_name, producer_id))

    def write_both() -> None:
        writers = [threading.Thread(target=write, args=(one,)) for one in (7_001, 7_002)]
        for writer in writers:
            writer.start()
        for writer in writers:
            writer.join(60)
            assert not writer.is_alive()

    with (
        PartitionClient(bootstrap, topic_name) as partition,
        PartitionClient(bootstrap, quiet) as other,
        PartitionClient(bootstrap, fast) as unflushed,
    ):
        append(other, range(3))
        found.proxy.spoil(REFUSED_PUTS)
        append(unflushed, range(3))
        write_both()
        assert {one.error for one in outcomes.values()} == {LATE}
        assert partition.fetch(0).high_watermark == partition.list_offset(LATEST)[2] == 0
        assert in_bucket(found, topic_name) == []
        assert read_all(unflushed) == expected(fast, range(3))
        assert in_bucket(found, fast) == []
        assert read_all(other) == expected(quiet, range(3))
        found.proxy.spoil()

        deadline = time.monotonic() + 60
        while {one.error for one in outcomes.values()} != {0}:  # as clients do
            assert time.monotonic() < deadline
            write_both()
        assert sorted(outcomes.values()) == [Appended(0, 0), Appended(0, 1)]
        values = {
            o.base_offset: b"%s by %d" % (topic_name.encode(), p) for p, o in outcomes.items()
        }
        wanted = [(offset, digest(value)) for offset, value in sorted(values.items())]
        assert read_all(partition) == wanted == in_bucket(found, topic_name)
        append(other, range(3, 5))
        assert read_all(other) == expected(quiet, range(5))
        wait_until_in_bucket(found, fast, range(3))
        assert read_all(unflushed) == expected(fast, range(3))


@pytest.mark.statement("T2", "C2")
@pytest.mark.parametrize(
    "part",
    all_but(["/producers/", ".batches", "/commits/"], "/producers/", reason="other objects"),
)
def test_c02_a_partition_opens_whichever_write_has_failed(proxied, part):
    """What is beside a segment is rebuilt: its producers are, when their object is not there."""
    found, topic = proxied(), "t"
    settings = {"segment.bytes": str(3 * len(batch(topic, 0)))}
    found.create_topic(topic, settings)
    with PartitionClient(found.broker.bootstrap, topic) as partition:
        append(partition, range(4))
        first = of_producer(topic, 7_001)
        assert partition.produce(first) == Appended(0, 8)
        wait_until(lambda: len(objects(found, topic)) == 1, what=lambda: "the first object")
        if part == "/commits/":
            held = found.proxy.held
            with found.proxy.holding(batch(topic, 99)[-100:]):
                writer = threading.Thread(target=_ended, args=(found, topic))
                writer.start()
                wait_until(lambda: found.proxy.held > held, what=lambda: "a commit")
                found.broker.kill()
                writer.join(60)
                found.proxy.spoil(Fault("reset", "PutObject", times=1, part=part))
            wait_until(lambda: found.proxy.spoiled > 0, what=lambda: "a lost commit")
            acked = 0
        else:
            found.proxy.spoil(Fault("503", "PutObject", times=ALWAYS, part=part))
            for number in range(6):
                record = Record(0, 1, 0, None, b"t later %d" % number + b"." * 300, ())
                assert partition.produce(encode_reference([record])) == Appended(0, 9 + number)
            wait_until(lambda: found.proxy.spoiled > 0, what=lambda: "a failed write")
            found.broker.kill()
            acked = 6
    assert len(objects(found, topic)) == 1
    found.broker.start()

    with PartitionClient(found.broker.bootstrap, topic) as partition:
        assert partition.produce(first) == Appended(0, 8), "its producer is known"
        rows = read_all(partition)
        assert rows[:8] == expected(topic, range(4))
        later = [(9 + n, digest(b"t later %d" % n + b"." * 300)) for n in range(acked)]
        assert rows[9:] == later
        found.proxy.spoil()
        assert partition.produce(batch(topic, 0)) == Appended(0, 9 + acked)


def _ended(of: Proxied, topic: str) -> None:
    """Produce to a broker that is killed before it responds."""
    with (
        PartitionClient(of.broker.bootstrap, topic) as partition,
        pytest.raises((OSError, EOFError, AssertionError)),
    ):
        partition.produce(batch(topic, 99))


@pytest.mark.statement("T2", "C2")
@pytest.mark.parametrize(
    "how", all_but(["missing", "damaged"], "damaged", reason="the same rebuilding")
)
def test_c02_a_partition_opens_without_the_producers_beside_its_segments(proxied, how):
    found, topic = proxied(), "t"
    settings = {"segment.bytes": str(3 * len(batch(topic, 0)))}
    found.create_topic(topic, settings)
    with PartitionClient(found.broker.bootstrap, topic) as partition:
        first = of_producer(topic, 7_001)
        assert partition.produce(first) == Appended(0, 0)
        values = [b"t %d" % n + b"." * 300 for n in range(9)]
        for number, one in enumerate(values):
            record = encode_reference([Record(0, 1, 0, None, one, ())])
            assert partition.produce(record) == Appended(0, 1 + number)
        before = read_all(partition)
    wait_until(lambda: len(objects(found, topic)) >= 2, what=lambda: "objects")
    found.broker.kill()
    beside = [p for p in (found.files / ".logmirror/broker/producers").rglob("*") if p.is_file()]
    assert beside
    for path in beside:
        if how == "missing":
            path.unlink()
        else:
            path.write_bytes(path.read_bytes()[:-3] + b"???")
    found.broker.start()

    with PartitionClient(found.broker.bootstrap, topic) as partition:
        assert read_all(partition) == before
        assert partition.produce(first) == Appended(0, 0), "its producer is known"
        assert partition.log_end == 10


@pytest.mark.statement("T11", "C9")
@pytest.mark.parametrize(
    "kind",
    all_but(
        ["lose-response", "cut-response", "late"], "lose-response", reason="more ways to lose it"
    ),
)
def test_c09_a_write_whose_response_is_lost_counts_once_and_appears_at_no_other_offset(
    proxied, kind
):
    found, topic = proxied(), "t"
    found.create_topic(topic, {})
    with PartitionClient(found.broker.bootstrap, topic) as partition:
        for number in range(6):
            found.proxy.spoil(Fault(kind, "PutObject") if number % 2 else None)
            append(partition, range(number, number + 1))
            assert read_all(partition) == expected(topic, range(number + 1))
        assert found.proxy.spoiled >= 3
    for _ in range(2):
        found.broker.kill()
        found.broker.start()
        with PartitionClient(found.broker.bootstrap, topic) as partition:
            assert read_all(partition) == expected(topic, range(6))
    assert in_bucket(found, topic) == expected(topic, range(6))


@pytest.mark.statement("T14", "C14")
def test_t14_an_outage_is_never_an_offset_out_of_range(proxied):
    """Not for records that are only in the bucket, and a consumer continues where it was."""
    found, topic = proxied(cache_bytes=1), "t"
    settings = {"segment.bytes": str(3 * len(batch(topic, 0)))}
    found.create_topic(topic, settings)
    with PartitionClient(found.broker.bootstrap, topic) as partition:
        append(partition, range(BATCHES))
    wait_until(lambda: len(objects(found, topic)) == 3, what=lambda: "objects")
    found.broker.kill()
    found.broker.start()
    config = {"group.id": "none", "auto.offset.reset": "earliest", "enable.auto.commit": False}
    consumer = Consumer({"bootstrap.servers": found.broker.bootstrap, **config})
    errors: list[object] = []
    with PartitionClient(found.broker.bootstrap, topic) as partition:
        found.proxy.spoil(OUTAGE)
        consumer.assign([TopicPartition(topic, 0, 7)])
        codes = {}
        for offset in (0, 1, 7, 12, 17, 18, 19, 20):
            response = partition.fetch(offset, max_wait_ms=10)
            codes[offset] = response.error_code
        assert set(codes.values()) == {0, STORAGE}, codes
        assert codes[0] == codes[7] == codes[17] == STORAGE
        assert codes[18] == codes[19] == codes[20] == 0
        assert partition.list_offset(LATEST)[::2] == (0, 2 * BATCHES)
        assert partition.list_offset(EARLIEST)[::2] == (0, 0)
        assert partition.log_end == 2 * BATCHES
        message = consumer.poll(2)
        if message is not None:
            errors.append(message.error())
        assert errors == [], "librdkafka retries"
        found.proxy.spoil()
    rows: list[tuple[int, str]] = []
    deadline = time.monotonic() + 60
    while len(rows) < 13:
        assert time.monotonic() < deadline
        message = consumer.poll(1)
        if message is not None:
            assert message.error() is None
            rows.append((message.offset(), digest(message.value())))
    consumer.close()
    assert rows == expected(topic, range(BATCHES))[7:]


@pytest.mark.thinned
@pytest.mark.statement("C14")
def test_c14_clients_see_no_error_of_a_bucket_that_fails_often(proxied):
    found = proxied(commit_timeout_ms=20_000, segment_bytes=100_000)
    found.create_topic("t", {}, partitions=PARTITIONS)
    found.proxy.spoil_some(faults(random.Random(14)))
    with Load(found.broker.bootstrap, "t", **{"enable.idempotence": True}) as load:
        load.wait_for(sized(2_000, 5_000, 10_000), timeout_s=240)
    assert load.flush() == 0
    assert load.failures == []
    found.proxy.spoil_some(iter(()))
    assert found.proxy.spoiled > 10
    rows = stored(found.broker, "t")
    assert rows == load.placed(rows)
    assert len(rows) == load.sent
    found.broker.kill()
    found.broker.start()
    assert stored(found.broker, "t") == rows


def faults(chance: random.Random) -> Iterator[Fault | None]:
    """Half of the requests fail, in all ways but those that only take time."""
    kinds = ("503", "500", "429", "reset", "lose-response", "cut-response", "cut-body")
    while True:
        yield Fault(chance.choice(kinds), "") if chance.random() < 0.5 else None


@pytest.mark.statement("T12", "C10")
@pytest.mark.parametrize(
    "where",
    all_but(
        ["on the disk of the server", "before it was stored"],
        "before it was stored",
        reason="it waits for 10 s",
    ),
)
def test_c10_a_changed_bit_is_never_served_and_its_object_is_named(proxied, where):
    """A store's checksum covers the whole object, the checksums of Kafka its batches."""
    found, topic = proxied(), "t"
    size = len(batch(topic, 0))
    seal(found, topic)
    found.broker.kill()
    path = objects(found, topic)[1]  # batches 3 to 5
    data = bytearray(path.read_bytes())
    data[size + 100] ^= 4
    if where == "before it was stored":
        key = str(path.relative_to(found.files.parent))
        server, place = found.broker.bucket.server, found.broker.bucket.bucket
        server.client().put_object(Bucket=place, Key=key, Body=bytes(data))
    else:
        path.write_bytes(data)
    found.broker.start()

    with PartitionClient(found.broker.bootstrap, topic) as partition:
        assert partition.fetch(8).error_code in {CORRUPT_MESSAGE, STORAGE}
        for number in (0, 1, 2, 6, 7, 8, 9):
            records = partition.fetch(2 * number, max_bytes=1).records
            assert contents(records) == expected(topic, range(number, number + 1))
        if where == "before it was stored":
            for number in (3, 5):
                records = partition.fetch(2 * number, max_bytes=1).records
                assert contents(records) == expected(topic, range(number, number + 1))
    assert path.name in found.broker.log.read_text()


@pytest.mark.thinned
@pytest.mark.statement("C13")
def test_c13_many_acknowledgements_of_one_record_are_read_in_a_few_requests(proxied):
    """Those of the client are two. Those to the bucket are as many as its objects, not records."""
    found, topic = proxied(commit_interval_ms=INTERVAL_MS), "t"
    found.create_topic(topic, {})
    one_each = {"batch.num.messages": 1, "linger.ms": 0, "log_level": 0}
    producer = Producer({"bootstrap.servers": found.broker.bootstrap, **one_each})
    failures: list[object] = []
    began, before = time.monotonic(), len(commit_files(found.files))
    for number in range(ACKS):
        producer.produce(
            topic,
            value=b"%d" % number,
            on_delivery=lambda error, _: failures.append(error) if error is not None else None,
        )
        producer.poll(0)
    assert producer.flush(120) == 0
    took_ms = 1_000 * (time.monotonic() - began)
    assert failures == []
    commits = len(commit_files(found.files))
    assert commits - before <= took_ms / INTERVAL_MS + 3
    found.broker.kill()
    asked = found.proxy.asked.copy()
    found.broker.start()

    rows: list[tuple[int, str]] = []
    requests = 0
    with PartitionClient(found.broker.bootstrap, topic) as partition:
        while len(rows) < ACKS:
            records = decode_reference(partition.fetch(len(rows)).records)
            rows += [(record.offset, digest(record.value)) for record in records]
            requests += 1
    assert rows == [(number, digest(b"%d" % number)) for number in range(ACKS)]
    assert requests <= 2
    assert found.proxy.asked["GetObject"] - asked["GetObject"] <= commits + 10
    assert found.proxy.asked["ListObjectsV2"] - asked["ListObjectsV2"] <= 20

"""Goal: compacted topics behave as a user of Kafka expects, and stay so through kills and restarts.

Method: the broker's own parts with a clock that the test moves, for when a partition is compacted;
then a real broker with stock clients, which is killed while it compacts.
"""

from __future__ import annotations

import asyncio
import random
import time
from typing import TYPE_CHECKING

import pytest
from confluent_kafka import KafkaException

from broker.test_housekeeping import HOUR_MS, START_MS, parts_of
from kit.judges.clients import Message, produce, rows_by_aiokafka, rows_by_librdkafka
from kit.judges.partition_client import EARLIEST, Appended, PartitionClient, data_batch
from kit.servers.embedded import EmbeddedBroker
from kit.servers.kafka import create_topic, delete_topic
from logmirror.broker.log.batch_check import check_batch
from logmirror.broker.log.cleaner import Cleaning
from logmirror.broker.log.file_names import sealed_path
from logmirror.broker.log.partition_transactions import Marker
from logmirror.wire.key_check import find_without_key, find_without_key_slowly
from logmirror.wire.records import Record, encode_reference

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from broker.test_housekeeping import Parts
    from kit.servers.s3 import LogBucket
    from logmirror.broker.log.partition_log import PartitionLog

INVALID_RECORD = 87
POLICY_VIOLATION = 44
COMPACT = {"cleanup_policy": "compact", "segment_ms": "1"}


def _firsts(log: PartitionLog) -> list[int]:
    return [segment.first for segment in log.segments if segment.size_bytes]


def _upto(parts: Parts) -> int:
    return max(parts.store.compacted().values(), default=0)


def test_a_log_is_compacted_when_enough_of_it_is_dirty(tmp_path):
    async def act() -> None:
        async with parts_of(tmp_path) as parts:
            [log] = (await parts.create(**COMPACT)).logs
            found = []
            for number in range(8):
                await parts.append(log, START_MS, key=b"%d" % number)
                await parts.tick(10)
                found.append(_upto(parts))
            # All of one segment; 1 of 2 is not more than half, but 2 of 3 are; so are 4 of 7.
            assert found == [1, 1, 3, 3, 3, 3, 7, 7]
            assert _firsts(log) == [0, 7]
        async with parts_of(tmp_path) as parts:
            [log] = parts.topics.by_name["t"].logs
            await parts.tick(10)
            assert (_upto(parts), _firsts(log), log.log_end) == (7, [0, 7], 8)

    asyncio.run(act())


def test_young_records_wait_and_old_ones_do_not(tmp_path):
    async def act() -> None:
        async with parts_of(tmp_path) as parts:
            rules = {"min_compaction_lag_ms": str(HOUR_MS), "min_cleanable_dirty_ratio": "0"}
            topic = await parts.create(**rules, **COMPACT)
            [log] = topic.logs
            for number in range(3):
                await parts.append(log, START_MS + number * 1000, key=b"k")
                await parts.tick(10)
            assert _upto(parts) == 0
        async with parts_of(tmp_path) as parts:
            [log] = parts.topics.by_name["t"].logs
            parts.clock.ms = START_MS + HOUR_MS + 1000
            await parts.tick()
            assert _upto(parts) == 2
            await parts.tick(1000)
            assert _upto(parts) == 3

    asyncio.run(act())


def test_old_records_are_compacted_although_little_is_dirty(tmp_path):
    async def act() -> None:
        async with parts_of(tmp_path) as parts:
            topic = await parts.create(
                cleanup_policy="compact",
                min_cleanable_dirty_ratio="1",
                max_compaction_lag_ms=str(HOUR_MS),
            )
            [log] = topic.logs
            await parts.append(log, START_MS, key=b"k")
            await parts.append(log, START_MS, key=b"k")
            await parts.tick(HOUR_MS - 1)
            assert (_upto(parts), log.tail is None) == (0, False)
            await parts.tick(1)
            await parts.tick()
            assert (_upto(parts), log.tail) == (2, None)

    asyncio.run(act())


def test_compact_and_delete_do_both_and_compact_alone_deletes_nothing_old(tmp_path):
    async def act() -> None:
        async with parts_of(tmp_path) as parts:
            topic = await parts.create(retention_ms=str(HOUR_MS), **COMPACT)
            [log] = topic.logs
            for number in range(4):
                await parts.append(log, START_MS, key=b"%d" % (number % 2))
                await parts.tick(10)
            await parts.tick(2 * HOUR_MS)
            assert log.log_start == 0
            await parts.change(topic, cleanup_policy="compact,delete")
            await parts.tick()
            assert log.log_start == 4

    asyncio.run(act())


@pytest.mark.parametrize(
    ("changed", "upto"),
    [
        ({}, 1),
        ({"min_compaction_lag_ms": str(HOUR_MS)}, 0),
        ({"cleanup_policy": "delete"}, 0),
        ({"segment_bytes": "2000"}, 1),
    ],
)
@pytest.mark.parametrize("when", ["queued", "considered"])
def test_a_pass_does_not_begin_with_settings_that_were_replaced(tmp_path, when, changed, upto):
    """It begins with the later ones, if they demand it."""

    async def act() -> None:
        async with parts_of(tmp_path) as parts:
            topic = await parts.create(cleanup_policy="compact")
            [log] = topic.logs
            await parts.append(log, START_MS, key=b"k")
            log.roll()
            parts.commits.schedule(log)
            await asyncio.sleep(0)
            await parts.commits.drain()
            if when == "queued":
                await parts.housekeeping.tick()
            if changed:
                await parts.change(topic, **changed)
            if when == "queued":
                await parts.housekeeping.tick()  # it sees the change, and leaves it to the queue
            else:
                await parts.compactor.consider(log, topic, 0, START_MS)
            await parts.compactor.run_once()
            assert _upto(parts) == (0 if changed and when == "queued" else upto)
            await parts.tick()
            assert _upto(parts) == upto

    asyncio.run(act())


def _in_transaction(epoch: int = 0, value: bytes = b"v") -> bytearray:
    writer = {"producer_id": 7, "producer_epoch": epoch, "base_sequence": 0}
    records = [Record(0, START_MS, 0, b"t", value, ())]
    return bytearray(encode_reference(records, transactional=True, **writer))


def _count_passes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list to which each pass adds where it begins."""
    found: list[int] = []
    prepare = Cleaning.prepare

    def counted(cleaning: Cleaning) -> bool:
        found.append(cleaning.upto)
        return prepare(cleaning)

    monkeypatch.setattr(Cleaning, "prepare", counted)
    return found


def test_an_ongoing_transaction_is_not_read_again_and_again(tmp_path, monkeypatch):
    passes = _count_passes(monkeypatch)

    async def act() -> None:
        async with parts_of(tmp_path) as parts:
            [log] = (await parts.create(**COMPACT)).logs
            await parts.append(log, START_MS, key=b"k")
            await parts.tick(10)
            batch = memoryview(_in_transaction())
            log.append(batch, check_batch(batch, max_bytes=10**6))
            for _ in range(5):
                await parts.append(log, START_MS, key=b"k")
                await parts.tick(10)
            assert (_upto(parts), passes) == (1, [0])
            log.append_marker(Marker(7, 0, is_commit=True, coordinator_epoch=0), START_MS)
            parts.commits.schedule(log)
            await asyncio.sleep(0)
            await parts.commits.drain()
            await parts.tick(10)
            assert (_upto(parts), passes[:2]) == (7, [0, 1])
            assert len(passes) <= 3

    asyncio.run(act())


def test_a_log_is_compacted_when_a_transaction_ends_and_no_segment_is_sealed(tmp_path):
    async def act() -> None:
        async with parts_of(tmp_path) as parts:
            [log] = (await parts.create(cleanup_policy="compact", segment_ms="600000")).logs
            batch = memoryview(_in_transaction())
            log.append(batch, check_batch(batch, max_bytes=10**6))
            await parts.append(log, START_MS, key=b"k")
            await parts.tick(600_000)
            log.append_marker(Marker(7, 0, is_commit=True, coordinator_epoch=0), START_MS)
            await parts.append(log, START_MS, key=b"k")
            await parts.tick(15_000)
            assert (_upto(parts), log.last_stable_offset) == (2, 4)

    asyncio.run(act())


def test_an_archive_that_ends_inside_a_transaction_is_compacted(tmp_path, monkeypatch):
    passes = _count_passes(monkeypatch)

    async def act() -> None:
        async with parts_of(tmp_path) as parts:
            await parts.create(min_cleanable_dirty_ratio="0", **COMPACT)
        folder = tmp_path / "t" / "0"
        folder.mkdir(parents=True, exist_ok=True)
        sealed_path(folder, 0, 1).write_bytes(_in_transaction())
        async with parts_of(tmp_path) as parts:
            [log] = parts.topics.by_name["t"].logs
            for _ in range(3):
                await parts.append(log, START_MS, key=b"t")
                await parts.tick(10)
            await parts.tick(10)
            assert _upto(parts) == log.log_end == log.last_stable_offset
            assert len(passes) <= 5

    asyncio.run(act())


def test_a_later_transaction_of_the_same_producer_id_aborts_nothing_in_an_archive(tmp_path):
    async def act() -> None:
        async with parts_of(tmp_path) as parts:
            await parts.create(min_cleanable_dirty_ratio="0", **COMPACT)
        folder = tmp_path / "t" / "0"
        folder.mkdir(parents=True, exist_ok=True)
        sealed_path(folder, 0, 1).write_bytes(_in_transaction(value=b"archived"))
        async with parts_of(tmp_path) as parts:
            [log] = parts.topics.by_name["t"].logs
            batch = memoryview(_in_transaction(1, b"aborted"))
            log.append(batch, check_batch(batch, max_bytes=10**6))
            log.append_marker(Marker(7, 1, is_commit=False, coordinator_epoch=0), START_MS)
            await parts.append(log, START_MS, key=b"k")
            await parts.tick(10)
            stored = b"".join(one.path.read_bytes() for one in log.segments if one.is_sealed)
            assert _upto(parts) == log.log_end == 4
            assert (b"archived" in stored, b"aborted" in stored) == (True, False)

    asyncio.run(act())


def test_a_topic_can_be_deleted_during_a_pass(tmp_path):
    async def act() -> None:
        async with parts_of(tmp_path) as parts:
            topic = await parts.create(cleanup_policy="compact")
            [log] = topic.logs
            for _ in range(20):
                await parts.append(log, START_MS, key=b"k")
            log.roll()
            parts.commits.schedule(log)
            await asyncio.sleep(0)
            await parts.commits.drain()
            await parts.housekeeping.tick()
            compacting = asyncio.ensure_future(parts.compactor.run_once())
            await asyncio.sleep(0)
            await asyncio.gather(compacting, parts.topics.delete(topic))
            assert not log.folder.exists()
            assert parts.store.compacted() == {}

    asyncio.run(act())


def test_a_damaged_segment_stops_compaction_of_its_partition_only(tmp_path, caplog):
    async def act() -> None:
        async with parts_of(tmp_path) as parts:
            topic = await parts.create(2, cleanup_policy="compact")
            for log in topic.logs:
                await parts.append(log, START_MS, key=b"k")
                log.roll()
                parts.commits.schedule(log)
                await asyncio.sleep(0)
                await parts.commits.drain()
            [path] = topic.logs[0].folder.glob("*.batches")
            path.write_bytes(path.read_bytes()[:-1] + b"?")
            await parts.tick()
            assert [number for _, number in parts.store.compacted()] == [1]
            assert "could not be compacted" in caplog.text
            assert path.read_bytes()[-1:] == b"?"

    asyncio.run(act())


@pytest.mark.parametrize("count", [1, 7, 1001])
def test_a_record_without_a_key_is_found_whichever_way(count):
    for missing in {0, count // 2, count - 1, -1}:
        records = [
            Record(n, 1000 + n * 10**9, 0, None if n == missing else b"k" * (n % 200), b"v", ())
            for n in range(count)
        ]
        data = encode_reference(records)
        assert find_without_key(data, 61, count) == missing
        assert find_without_key_slowly(data, 61, count) == missing


@pytest.fixture
def broker(tmp_path: Path, log_bucket: LogBucket | None) -> Iterator[EmbeddedBroker]:
    with EmbeddedBroker(tmp_path / "broker", bucket=log_bucket, segment_bytes=4000) as broker:
        yield broker


def _wait_compacted(broker: EmbeddedBroker, topic: str, most: int) -> None:
    """Wait until a client sees at most so many records."""
    deadline = time.monotonic() + 30
    while len(list(rows_by_librdkafka(broker.bootstrap, topic))) > most:
        assert time.monotonic() < deadline, "not compacted"
        time.sleep(0.2)


def test_stock_clients_see_the_newest_of_each_key(broker, topic_name):
    create_topic(
        broker.bootstrap,
        topic_name,
        1,
        {"cleanup.policy": "compact", "min.cleanable.dirty.ratio": "0", "segment.ms": "500"},
    )
    sent = [
        Message(
            b"key-%d" % (n % 17), None if n % 17 == 3 else b"%d" % n, ((b"n", b"%d" % n),), n + 1
        )
        for n in range(1000)
    ]
    produce(broker.bootstrap, topic_name, sent)
    with pytest.raises((KafkaException, RuntimeError)):
        produce(broker.bootstrap, topic_name, [Message(b"", b"x"), Message(None, b"no key")])
    newest = {message.key: offset for offset, message in enumerate(sent)}
    wanted = [(offset, sent[offset]) for offset in sorted(newest.values())]

    for is_restarted in (False, True):
        if is_restarted:
            broker.kill()
            broker.start()
        _wait_compacted(broker, topic_name, 18)
        for rows in (
            list(rows_by_librdkafka(broker.bootstrap, topic_name)),
            rows_by_aiokafka(broker.bootstrap, topic_name),
        ):
            found = [row for row in rows if row.offset < 1000]
            assert [(r.offset, r.key, r.value, r.timestamp_ms) for r in found] == [
                (offset, m.key, m.value, m.timestamp_ms) for offset, m in wanted
            ]
    with PartitionClient(broker.bootstrap, topic_name) as partition:
        assert partition.produce(data_batch(1)).error == INVALID_RECORD
        assert partition.list_offset(EARLIEST)[2] == 0
        assert partition.list_offset(990)[2] == min(o for o in newest.values() if o >= 989)
        assert partition.delete_records(5)[0] == POLICY_VIOLATION
    delete_topic(broker.bootstrap, topic_name)


def test_killed_while_it_compacts_it_keeps_every_newest_record(broker, topic_name):
    create_topic(
        broker.bootstrap,
        topic_name,
        1,
        {"cleanup.policy": "compact", "min.cleanable.dirty.ratio": "0", "segment.ms": "300"},
    )
    chance = random.Random(5)
    newest: dict[bytes | None, bytes | None] = {}
    sequence = 0
    for round_number in range(6):
        for _ in range(20):
            batch = [
                Message(b"%d" % chance.randrange(50), b"%d" % chance.randrange(10**6))
                for _ in range(20)
            ]
            produce(broker.bootstrap, topic_name, batch)
            newest.update((message.key, message.value) for message in batch)
        with PartitionClient(broker.bootstrap, topic_name) as partition:
            records = [Record(n, 1, 0, b"own", b"%d" % round_number, ()) for n in range(3)]
            batch = encode_reference(
                records, producer_id=77_777, producer_epoch=0, base_sequence=sequence
            )
            end = partition.log_end
            assert partition.produce(batch) == Appended(0, end)
            newest[b"own"] = b"%d" % round_number
            sequence += 3
        time.sleep(chance.random() * 1.2)
        broker.kill()
        broker.start()
        with PartitionClient(broker.bootstrap, topic_name) as partition:
            assert partition.produce(batch) == Appended(0, end)
        rows = list(rows_by_librdkafka(broker.bootstrap, topic_name))
        assert {row.key: row.value for row in rows} == newest
        assert [row.offset for row in rows] == sorted({row.offset for row in rows})
    _wait_compacted(broker, topic_name, 51)


def test_apache_kafka_reads_a_compacted_topic_and_its_segments(
    broker, apache_tools, topic_name, tmp_path
):
    at = ("--bootstrap-server", broker.bootstrap)
    config = ("cleanup.policy=compact", "min.cleanable.dirty.ratio=0", "segment.ms=300")
    options = [part for setting in config for part in ("--config", setting)]
    create = ("--create", "--topic", topic_name, "--partitions", "1", *options)
    apache_tools.run("kafka-topics", *at, *create)
    for codec in ("none", "zstd"):
        lines = [f"{n % 5}:{codec} {n}" for n in range(200)]
        keyed = ("--property", "parse.key=true", "--property", "key.separator=:")
        apache_tools.run(
            "kafka-console-producer",
            *(*at, "--topic", topic_name, *keyed, "--compression-codec", codec),
            stdin="\n".join(lines) + "\n",
        )
    _wait_compacted(broker, topic_name, 5)

    where = ("--topic", topic_name, "--partition", "0", "--offset", "earliest")
    shown = ("--property", "print.offset=true", "--timeout-ms", "5000")
    found = apache_tools.run("kafka-console-consumer", *at, *where, *shown).stdout
    lines = [line for line in found.splitlines() if line.startswith("Offset:")]
    assert lines == [f"Offset:{n}\tzstd {n - 200}" for n in range(395, 400)]
    [path] = (broker.log_dir / topic_name / "0").glob("*.batches")
    log = tmp_path / f"{0:020d}.log"
    log.write_bytes(path.read_bytes())
    dumped = apache_tools.run(
        "kafka-dump-log", "--files", str(log), "--print-data-log", "--deep-iteration"
    ).stdout
    assert "isvalid: false" not in dumped
    assert dumped.count("payload: zstd") == 5

"""Goal: a partition changes its log directory while it is written and read, and nothing is lost.

Method: a real broker with two directories; a raw client and librdkafka write and read. The names of
tests are those of the statements of moves.
"""

from __future__ import annotations

import contextlib
import random
import time
from pathlib import Path
from struct import unpack_from
from typing import TYPE_CHECKING

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewPartitions

from broker.moves.test_requests import BATCH, NONE, fill
from kit.judges.clients import rows_by_librdkafka
from kit.judges.partition_client import EARLIEST, LATEST, Appended, data_batch
from kit.runs.bucket_load import PARTITIONS, Load, Reading, stored
from kit.runs.cleaning import set_config
from kit.runs.commands import wait_until
from kit.runs.group_load import Member, Transactions, committed
from kit.servers.kafka import create_topic
from kit.tiers import KILLS, sized
from logmirror.wire.compression import Codec
from logmirror.wire.records import Record, decode_reference, encode_reference

if TYPE_CHECKING:
    from broker.moves.conftest import TwoDirs
    from kit.judges.partition_client import PartitionClient


def end_of(batches: bytes) -> int:
    """The offset behind the last batch, which compaction may have left without a record."""
    end = position = 0
    while position < len(batches):
        base_offset, length = unpack_from(">qi", batches, position)
        [delta] = unpack_from(">i", batches, position + 23)
        end, position = base_offset + delta + 1, position + 12 + length
    return end


def batches(partition: PartitionClient) -> bytes:
    """Everything, as it is sent."""
    found, offset = b"", partition.list_offset(EARLIEST)[2]
    while offset < partition.list_offset(LATEST)[2]:
        response = partition.fetch(offset)
        assert response.error_code == 0
        found += response.records
        offset = end_of(response.records)
    return found


def contents(partition: PartitionClient) -> list[tuple[int, bytes | None]]:
    found: list[tuple[int, bytes | None]] = []
    offset = partition.list_offset(EARLIEST)[2]
    while offset < partition.list_offset(LATEST)[2]:
        response = partition.fetch(offset)
        assert response.error_code == 0
        records = decode_reference(response.records)
        found += [(one.offset, one.value) for one in records if one.offset >= offset]
        end = end_of(response.records)
        assert end > offset
        offset = end
    return found


def lookups(partition: PartitionClient) -> list[object]:
    """What lookups by time and by epoch return (E56, E57)."""
    times = [1_700_000_000_000 + n for n in (0, 3, 99, 500)]
    found = [partition.list_offset(at) for at in (EARLIEST, LATEST, -3, *times)]
    return [*found, partition.end_of_epoch(), partition.fetch(0).high_watermark]


@pytest.mark.move("E23", "E31", "E43", "E56", "E57", "E61")
def test_e31_a_partition_moves_and_comes_back(dirs):
    dirs.create("t")
    dirs.create("empty")
    fill(dirs, "t", 40)
    with dirs.partition("t") as partition:
        before, asked = contents(partition), lookups(partition)
        files = {path.name: path.read_bytes() for path in (dirs.a / "t/0").glob("[0-9]*")}
        for number, target in enumerate([dirs.b, dirs.a, dirs.b], 40):
            dirs.move("t", target)
            dirs.move("empty", target)
            assert contents(partition) == before
            assert lookups(partition) == asked
            assert partition.produce(BATCH) == Appended(0, 100 * number)
            before, asked = contents(partition), lookups(partition)
        found = {path.name: path.read_bytes() for path in (dirs.b / "t/0").glob("[0-9]*")}
        assert {name: found[name] for name in files} == files
        dirs.broker.kill()
        dirs.broker.start()
    with dirs.partition("t") as partition, dirs.partition("empty") as empty:
        assert contents(partition) == before
        assert empty.produce(BATCH) == Appended(0, 0)
    dirs.wait_in("t", dirs.b)
    dirs.wait_in("empty", dirs.b)
    dirs.wait_clean("t", "b/0")
    dirs.wait_clean("empty", "b/0")


@pytest.mark.slow
@pytest.mark.move("E40", "E51", "E52", "E53", "E54")
@pytest.mark.parametrize("retries", [0, 2**31 - 1])
def test_e51_producers_and_consumers_notice_nothing(dirs, retries):
    options = {"enable.idempotence": retries > 0, "retries": retries, "acks": "all"}
    for topic in ("t", "x"):
        dirs.create(topic, PARTITIONS, segment_bytes="300000")
    with (
        Reading(dirs.bootstrap, "t") as reading,
        Member(dirs.bootstrap, "g", "t", "x") as member,
        Load(dirs.bootstrap, "t", **options) as load,
        Transactions(dirs.bootstrap, "x") as transactions,
    ):
        load.wait_for(500)
        for number in range(sized(4, 8, 40)):
            move_all(dirs, (dirs.b, dirs.a)[number % 2], "t", "x")
            load.wait_for(100)
            transactions.wait_for(2)
            if number == 1:
                member.restart()  # it continues at its committed offsets
        load.stop()
        transactions.stop()
        assert load.flush() == 0
        assert load.failures == transactions.failures == []
        reading.wait_for(load.sent)
        member.wait_for(load.sent + len(transactions.committed))
    assert reading.errors == member.errors == []
    assert reading.found() == member.found("t") == load.acked
    assert member.found("x") == transactions.committed
    assert len(load.acked) == load.sent
    assert not transactions.aborted.keys() & transactions.committed.keys()
    offsets = committed(dirs.bootstrap, "g", "t", "x")
    assert [offsets["t", n] for n in range(PARTITIONS)] == [
        sum(partition == n for partition, _ in load.acked) for n in range(PARTITIONS)
    ]
    move_all(dirs, dirs.b, "t", "x")
    for is_restarted in (False, True):
        if is_restarted:
            dirs.broker.kill()
            dirs.broker.start()
        assert committed(dirs.bootstrap, "g", "t", "x") == offsets
        assert stored(dirs.broker, "t") == load.acked
        assert stored(dirs.broker, "x") == transactions.committed


def move_all(dirs: TwoDirs, target: Path, *topics: str) -> None:
    """Move topics with `PARTITIONS` partitions, and wait until they are there."""
    numbers = tuple(range(PARTITIONS))
    with dirs.client() as client:
        codes = client.move({target: dict.fromkeys(topics, numbers)})
        assert set(codes.values()) == {NONE}
    for topic in topics:
        for number in numbers:
            dirs.wait_in(topic, target, number)


@pytest.mark.move("E52", "E53")
def test_e53_a_transaction_and_sequences_survive_the_swap(dirs):
    dirs.create("t")
    fill(dirs, "t", 30)
    producers = [
        Producer({"bootstrap.servers": dirs.bootstrap, "transactional.id": name})
        for name in ("committed", "aborted")
    ]
    for producer in producers:
        producer.init_transactions(20)
        producer.begin_transaction()
        producer.produce("t", b"before")
        producer.flush(20)
    with dirs.partition("t") as partition:
        first = data_batch(2, producer_id=77, epoch=0, sequence=0)
        assert partition.produce(first) == Appended(0, 3_002)
        stable = partition.list_offset(LATEST, isolation=1)
        assert stable[2] == 3_000
        dirs.move("t", dirs.b)
        assert partition.list_offset(LATEST, isolation=1) == stable
        assert partition.produce(first) == Appended(0, 3_002), "a duplicate"
        second = data_batch(1, producer_id=77, epoch=0, sequence=2)
        assert partition.produce(second) == Appended(0, 3_004)
    for producer in producers:
        producer.produce("t", b"after")
    producers[0].commit_transaction(20)
    producers[1].abort_transaction(20)
    rows = list(rows_by_librdkafka(dirs.bootstrap, "t"))
    assert [row.value for row in rows[3_000:]].count(b"before") == 1
    assert [row.value for row in rows[3_000:]].count(b"after") == 1
    dirs.broker.kill()
    dirs.broker.start()
    assert list(rows_by_librdkafka(dirs.bootstrap, "t")) == rows


@pytest.mark.move("E40")
def test_e40_every_codec_and_batches_of_any_size_are_copied(dirs):
    dirs.create("t", max_message_bytes="9000000")
    with dirs.partition("t") as partition:
        large = [Record(0, 1, 0, None, random.Random(40).randbytes(5_000_000), ())]
        counts = [1, 10_000, 3]
        for codec in Codec:
            for count in counts:
                assert partition.produce(data_batch(count, codec=codec)).error == 0
            assert partition.produce(encode_reference(large, codec=codec)).error == 0
        before = batches(partition)
        assert end_of(before) == len(Codec) * (sum(counts) + 1)
        for target in (dirs.b, dirs.a):
            dirs.move("t", target)
            assert batches(partition) == before


@pytest.mark.move("E65")
def test_e65_partitions_that_are_added_during_a_move_do_not_disturb_it(dirs):
    dirs.create("t")
    fill(dirs, "t")
    dirs.limit(1)
    with dirs.client() as client, dirs.partition("t") as partition:
        assert client.move_one("t", dirs.b) == NONE
        admin = AdminClient({"bootstrap.servers": dirs.bootstrap})
        admin.create_partitions([NewPartitions("t", 3)])["t"].result(20)
        assert client.where("t")[str(dirs.b)].is_future
        dirs.limit(None)
        dirs.wait_in("t", dirs.b)
        assert len([*client.where("t", 1), *client.where("t", 2)]) == 2
        assert len(contents(partition)) == 6_000


@pytest.mark.move("E32", "E33", "E34", "E35", "E36", "E37")
@pytest.mark.parametrize("resets", [(150,), (2_450,), (6_000,), (2_450, 4_050)])
def test_e35_records_that_are_deleted_during_a_move_stay_deleted(dirs, resets):
    dirs.create("t")
    fill(dirs, "t")
    dirs.limit(1)
    with dirs.client() as client, dirs.partition("t") as partition:
        assert client.move_one("t", dirs.b) == NONE
        lag = 6_000
        for limit, to in enumerate(resets, 2):
            wait_until(
                lambda lag=lag: client.where("t")[str(dirs.b)].lag < lag,  # type: ignore[misc]  # a default
                what=lambda: f"another batch: {client.where('t')}",
            )
            assert partition.delete_records(to) == (0, to)
            shown = client.where("t")[str(dirs.b)]
            assert shown.is_future, "it does not wait for the copy"
            lag = shown.lag
            dirs.limit(limit)  # one batch more, from the new start
        dirs.limit(None)
        dirs.wait_in("t", dirs.b)
        assert partition.list_offset(EARLIEST)[2] == to
        assert partition.log_end == 6_000
        assert [offset for offset, _ in contents(partition)] == [*range(to, 6_000)]
        assert partition.fetch(to - 1).error_code == 1
        dirs.move("t", dirs.a)  # a log start above 0
        assert partition.list_offset(EARLIEST)[2] == to
        assert partition.produce(BATCH) == Appended(0, 6_000)
    dirs.broker.kill()
    dirs.broker.start()
    with dirs.partition("t") as partition:
        assert partition.list_offset(EARLIEST)[2] == to
        assert [offset for offset, _ in contents(partition)] == [*range(to, 6_100)]


@pytest.mark.move("E34", "E62", "E66")
def test_e66_retention_and_settings_apply_during_a_move(dirs):
    dirs.create("t")
    fill(dirs, "t")
    dirs.limit(0)
    with dirs.client() as client, dirs.partition("t") as partition:
        assert client.move_one("t", dirs.b) == NONE
        set_config(dirs.bootstrap, "t", "retention.bytes", str(20 * len(BATCH)))
        wait_until(
            lambda: partition.list_offset(EARLIEST)[2] > 2_000,
            what=lambda: f"retention: {partition.list_offset(EARLIEST)}",
            timeout_s=60,
        )
        assert client.where("t")[str(dirs.b)].is_future
        dirs.limit(None)
        dirs.wait_in("t", dirs.b)
        dirs.wait_clean("t", "b/0")
        start = partition.list_offset(EARLIEST)[2]
        assert [offset for offset, _ in contents(partition)] == [*range(start, 6_000)]
        set_config(dirs.bootstrap, "t", "retention.bytes", str(5 * len(BATCH)))
        wait_until(lambda: partition.list_offset(EARLIEST)[2] > start, what=lambda: "retention")
        start = partition.list_offset(EARLIEST)[2]
    dirs.broker.kill()
    dirs.broker.start()
    with dirs.partition("t") as partition:
        assert partition.list_offset(EARLIEST)[2] >= start
        assert contents(partition)[-1][0] == 5_999


@pytest.mark.move("E38", "E88")
def test_e88_compaction_continues_during_a_move(dirs):
    settings = {"min_cleanable_dirty_ratio": "0", "segment_ms": "300"}
    dirs.create("t", cleanup_policy="compact", **settings)
    dirs.limit(0)
    with dirs.client() as client, dirs.partition("t") as partition:
        producer = Producer({"bootstrap.servers": dirs.bootstrap})
        for number in range(200):
            producer.produce("t", key=b"%d" % (number % 7), value=bytes(1_000))
            assert producer.flush(30) == 0
        assert client.move_one("t", dirs.b) == NONE
        for number in range(3_000):
            producer.produce("t", key=b"%d" % (number % 7), value=b"%d" % number)
        assert producer.flush(30) == 0
        wait_until(
            lambda: len(contents(partition)) < 1_000,
            what=lambda: f"compaction: {len(contents(partition))}",
            timeout_s=60,
        )
        assert client.where("t")[str(dirs.b)].is_future
        dirs.limit(None)
        dirs.wait_in("t", dirs.b)
        found = contents(partition)
        assert {value for _, value in found} >= {b"%d" % n for n in range(2_993, 3_000)}
        assert len(found) < 1_000
        for number in range(2_000):
            producer.produce("t", key=b"%d" % (number % 7), value=b"later %d" % number)
        assert producer.flush(30) == 0
        wait_until(
            lambda: len(contents(partition)) < 1_000,
            what=lambda: f"compaction behind the move: {len(contents(partition))}",
            timeout_s=60,
        )
        values = {value for _, value in contents(partition)}
    assert values >= {b"later %d" % n for n in range(1_993, 2_000)}


@pytest.mark.move("E38")
def test_e38_a_compacted_partition_keeps_its_gaps(dirs):
    settings = {"min_cleanable_dirty_ratio": "0", "segment_ms": "300"}
    dirs.create("t", cleanup_policy="compact", **settings)
    producer = Producer({"bootstrap.servers": dirs.bootstrap})
    for number in range(3_000):
        producer.produce("t", key=b"%d" % (number % 7), value=b"%d" % number)
    assert producer.flush(30) == 0
    with dirs.partition("t") as partition:
        wait_until(
            lambda: len(contents(partition)) < 1_000,
            what=lambda: f"compaction: {len(contents(partition))}",
            timeout_s=60,
        )
        dirs.move("t", dirs.b)
        found = contents(partition)
        assert {value for _, value in found[-7:]} == {b"%d" % n for n in range(2_993, 3_000)}
        assert partition.log_end >= 3_000


@pytest.mark.slow
@pytest.mark.move("E43", "E85")
def test_e43_a_partition_without_records_that_a_start_places_in_the_target_is_there(dirs):
    """It has no folder when the broker is killed, and the target is the emptiest directory."""
    dirs.broker.kill()
    dirs.broker.crash_at = "move.prepared"
    dirs.broker.start()
    with dirs.client() as client:
        client.move({dirs.b: {"t": (0,)}})
        create_topic(dirs.bootstrap, "t", 1, {})
        with contextlib.suppress(EOFError):  # killed before the response
            assert client.move_one("t", dirs.a) == NONE
    wait_until(lambda: not dirs.broker.alive, what=lambda: "a kill")
    dirs.broker.kill()
    assert [name for name in dirs.names("t") if "-" not in name] == []
    dirs.broker.crash_at = "move.prepared"  # a second move would end there, too
    dirs.broker.start()
    dirs.wait_in("t", dirs.a)
    with dirs.partition("t") as partition:
        assert partition.produce(BATCH) == Appended(0, 0)
    dirs.wait_clean("t", f"{dirs.a.name}/0")
    dirs.broker.kill()
    dirs.broker.start()
    with dirs.partition("t") as partition:
        assert len(contents(partition)) == 100
    dirs.wait_in("t", dirs.a)


@pytest.mark.slow
@pytest.mark.thinned
@pytest.mark.move("E85", "E59")
def test_e85_kills_at_random_moments_lose_nothing(dirs):
    dirs.create("t", PARTITIONS, segment_bytes="300000")
    chance = random.Random(85)
    with Load(dirs.bootstrap, "t", per_s=2_000, **{"enable.idempotence": True}) as load:
        load.wait_for(500)
        for number in range(max(KILLS, sized(2, 20, 200))):
            target = (dirs.b, dirs.a)[number % 2]
            with dirs.client() as client:
                codes = client.move({target: {"t": tuple(range(PARTITIONS))}})
                assert set(codes.values()) == {NONE}
            time.sleep(chance.random() * chance.choice([0.02, 0.2]))
            dirs.broker.kill()
            dirs.broker.start()
            for partition in range(PARTITIONS):
                dirs.wait_in("t", target, partition)
            load.wait_for(100)
    assert load.flush() == 0
    assert load.failures == []
    assert stored(dirs.broker, "t") == load.acked
    assert [name for name in dirs.names("t") if "-" in name] == []


@pytest.mark.move("E49", "E100")
def test_e100_a_request_for_many_partitions_copies_nothing(dirs):
    count = sized(300, 300, 5_000)
    dirs.create("t", count)
    producer = Producer({"bootstrap.servers": dirs.bootstrap})
    for number in range(count):
        producer.produce("t", b"%d" % number, partition=number)
    assert producer.flush(60) == 0
    dirs.limit(0)
    files = Path(f"/proc/{dirs.broker.pid}/fd")
    before = len(list(files.iterdir()))
    with dirs.client() as client:
        codes = client.move({dirs.b: {"t": tuple(range(count))}})  # while nothing may be copied
        assert set(codes.values()) == {NONE}
        assert len(list(files.iterdir())) < before + 40
        dirs.limit(None)
        for number in range(count):
            dirs.wait_in("t", dirs.b, number)


@pytest.mark.slow
@pytest.mark.move("E90", "E91")
def test_e90_the_limit_holds_and_a_change_applies_at_once(dirs):
    dirs.create("t", segment_bytes="100000")
    producer = Producer({"bootstrap.servers": dirs.bootstrap, "batch.size": 10_000})
    for number in range(6_000):
        producer.produce("t", random.Random(number).randbytes(1_000))
        producer.poll(0)
    assert producer.flush(60) == 0
    rate = 400_000
    dirs.limit(rate)
    with dirs.client() as client:
        assert client.move_one("t", dirs.b) == NONE
        wait_until(lambda: client.where("t")[str(dirs.b)].size_bytes > 0, what=lambda: "bytes")

        def size() -> tuple[float, int]:
            return time.monotonic(), client.where("t")[str(dirs.b)].size_bytes

        (began, first), _, (ended, last) = size(), time.sleep(5), size()
        assert first < last
        assert (last - first) / (ended - began) < 1.2 * rate
        dirs.limit(0)
        sizes: list[int] = []

        def has_stopped() -> bool:
            time.sleep(0.5)
            sizes.append(size()[1])
            return sizes[-2:-1] == sizes[-1:]

        wait_until(has_stopped, what=lambda: f"no more bytes: {sizes}")
        assert size()[1] == sizes[-1]
        dirs.limit(None)
    dirs.wait_in("t", dirs.b)

"""Goal: while uploads fail or wait, no log ends earlier than before, and no buffer grows on.

Method: a real broker behind a proxy that refuses or holds back what it uploads, without a kill
until the end. Records are compared by partition, offset and value.
"""

from __future__ import annotations

import contextlib
import random
import threading
import time
from typing import TYPE_CHECKING

import pytest

from broker.bucket.test_statements_of_faults import (
    ALWAYS,
    LATE,
    OUTAGE,
    REFUSED_PUTS,
    STORAGE,
    faults,
)
from broker.bucket.test_statements_of_reads import (
    ALL,
    BATCHES,
    OUT_OF_RANGE,
    append,
    batch,
    contents,
    digest,
    expected,
    objects,
    read_all,
    seal,
)
from broker.test_watermark import Watch
from kit.fakes.s3_proxy import Fault
from kit.judges.commits import values_in_bucket
from kit.judges.partition_client import EARLIEST, LATEST, Appended, PartitionClient
from kit.runs.bucket_load import PARTITIONS, Load, stored
from kit.runs.commands import wait_until
from kit.tiers import all_but, sized
from logmirror.broker.bucket.parts import INDEXES
from logmirror.broker.bucket.tiling import INDEXED_BYTES
from logmirror.wire.records import Record, encode_reference

if TYPE_CHECKING:
    from collections.abc import Callable

    from broker.bucket.conftest import Proxied

pytestmark = pytest.mark.slow
IDEMPOTENT = {"enable.idempotence": True}
COMMIT_TIMEOUT_MS = 2_000
LIMIT_BYTES = 1_000_000
BIG_BYTES = 900_000
BIG_BATCHES = 8
HASTY = 40
"""Requests: more than what the buffers of a connection hold."""


@pytest.mark.thinned
@pytest.mark.statement("T4", "C4")
@pytest.mark.parametrize(
    "flush_on_ack", all_but([True, False], True, reason="the same without waiting producers")
)
def test_c04_the_watermark_never_moves_back_while_uploads_fail(proxied, flush_on_ack):
    """Neither does the log end: nothing is lost without a kill."""
    found = proxied(
        commit_timeout_ms=COMMIT_TIMEOUT_MS, segment_bytes=100_000, flush_on_ack=flush_on_ack
    )
    found.create_topic("t", {}, partitions=PARTITIONS)
    found.create_topic("other", {"flush.messages": "1"})
    watch = Watch(found.broker, "t", keeps_log_end=True)
    watchers = [threading.Thread(target=watch.run) for _ in range(2)]
    with Load(found.broker.bootstrap, "t", per_s=2_000, **IDEMPOTENT) as load:
        load.wait_for(300)
        for watcher in watchers:
            watcher.start()
        try:
            found.proxy.spoil_some(faults(random.Random(4)))
            load.wait_for(sized(1_000, 3_000, 10_000), timeout_s=240)
            found.proxy.spoil(REFUSED_PUTS)
            with PartitionClient(found.broker.bootstrap, "other") as other:
                assert other.produce(batch("other", 0)).error == LATE  # as others get
            time.sleep(1)
            found.proxy.spoil()
            load.wait_for(300, timeout_s=120)
        finally:
            watch.done.set()
            for watcher in watchers:
                watcher.join(60)
    assert not any(watcher.is_alive() for watcher in watchers)
    assert (watch.steps_back, watch.interruptions) == ([], 0)
    assert 0 < watch.seen["watermark"] <= watch.seen["log end"]
    assert load.flush() == 0
    found.proxy.spoil_some(iter(()))
    assert load.failures == []
    assert found.proxy.spoiled > 5
    rows = stored(found.broker, "t")
    assert rows == load.placed(rows)
    assert len(set(rows.values())) == load.sent
    assert max(watch.seen.values()) <= sum(partition == 0 for partition, _ in rows)


def big(number: int) -> bytes:
    """The value of one record of a large segment."""
    return random.Random(number).randbytes(BIG_BYTES)


def big_batch(number: int) -> bytes:
    """A batch of one record."""
    return encode_reference([Record(0, 1, 0, None, big(number), ())])


def append_big(partition: PartitionClient, numbers: range) -> None:
    for number in numbers:
        assert partition.produce(big_batch(number)) == Appended(0, number)


def expected_big(count: int) -> list[tuple[int, str]]:
    return [(number, digest(big(number))) for number in range(count)]


def indexes(of: Proxied) -> list[str]:
    return [path.name for path in (of.files / INDEXES).rglob("*") if path.is_file()]


def large_objects(of: Proxied, topic: str) -> list[str]:
    """The names of the objects that have an index, once it is created."""
    return sorted(p.name for p in objects(of, topic) if p.stat().st_size >= INDEXED_BYTES)


def first_batch(partition: PartitionClient, offset: int) -> list[tuple[int, str]]:
    """Read one batch, as a consumer does: again, if the bucket was too slow."""
    found = list[tuple[int, str]]()

    def read() -> bool:
        response = partition.fetch(offset, max_bytes=1)
        assert response.error_code in {0, STORAGE}
        found.extend(contents(response.records))
        return bool(found)

    wait_until(read, what=lambda: f"the batch of offset {offset}", timeout_s=60)
    return found


@pytest.mark.statement("T2", "C2")
def test_c02_a_partition_opens_without_the_index_of_a_large_segment(proxied):
    """Its upload fails before and after a kill; the segments behind it are uploaded meanwhile, and
    who reads a segment without an index has it created.
    """
    found, topic = proxied(cache_bytes=1), "t"
    found.create_topic(topic, {"segment.bytes": str(INDEXED_BYTES + BIG_BYTES)})
    found.proxy.spoil(Fault("503", "PutObject", times=ALWAYS, part="/indexes/"))
    with PartitionClient(found.broker.bootstrap, topic) as partition:
        append_big(partition, range(BIG_BATCHES))
        wait_until(lambda: found.proxy.spoiled > 0, what=lambda: "a failed index")
        [sealed] = objects(found, topic)
        assert sealed.stat().st_size >= INDEXED_BYTES
        assert read_all(partition) == expected_big(BIG_BATCHES)
    found.broker.kill()
    found.broker.start()

    with PartitionClient(found.broker.bootstrap, topic) as partition:
        assert read_all(partition) == expected_big(BIG_BATCHES)
        for number in range(BIG_BATCHES):  # from each offset, the first batch alone
            assert first_batch(partition, number) == [(number, digest(big(number)))]
        assert indexes(found) == []
        append_big(partition, range(BIG_BATCHES, 4 * BIG_BATCHES))
        wait_until(lambda: len(objects(found, topic)) > 3, what=lambda: "the next objects")
        assert read_all(partition) == expected_big(4 * BIG_BATCHES)
        assert indexes(found) == []
        found.proxy.spoil()
        wait_until(lambda: indexes(found) != [], what=lambda: "the next index", timeout_s=60)
    found.broker.kill()
    found.broker.start()
    with PartitionClient(found.broker.bootstrap, topic) as partition:
        for name in reversed(large_objects(found, topic)):  # so that none is loaded ahead
            first = int(name[:20])
            assert first_batch(partition, first) == [(first, digest(big(first)))]
        wait_until(  # also of those that are uploaded only now
            lambda: sorted(indexes(found)) == large_objects(found, topic),
            what=lambda: f"the indexes of {large_objects(found, topic)}, not {indexes(found)}",
        )


def sealed_in_bucket(proxied: Callable[..., Proxied], topic: str) -> Proxied:
    """A broker none of whose sealed segments are on its machine."""
    found = proxied(cache_bytes=1)
    seal(found, topic)
    found.broker.kill()
    found.broker.start()
    return found


@pytest.mark.statement("C12")
def test_c12_a_time_is_found_in_segments_that_are_only_in_the_bucket(proxied):
    """While the bucket is away, the search for it is an error."""
    topic = "t"
    found = sealed_in_bucket(proxied, topic)
    with PartitionClient(found.broker.bootstrap, topic) as partition:
        found.proxy.spoil(OUTAGE)
        for number in (0, 4, 8):
            assert partition.list_offset(1_000 + number) == (STORAGE, -1, -1)
        found.proxy.spoil()
        wait_until(  # clients repeat the request
            lambda: partition.list_offset(1_000)[0] != STORAGE, what=lambda: "the bucket"
        )
        for number in reversed(range(BATCHES)):
            assert partition.list_offset(1_000 + number) == (0, 1_000 + number, 2 * number)
        assert partition.list_offset(0) == (0, 1_000, 0)
        assert partition.list_offset(1_000 + BATCHES) == (0, -1, -1)


@pytest.mark.statement("T17")
def test_t17_an_object_that_is_gone_is_an_error_for_its_records_until_they_are_deleted(proxied):
    """Who removes an object by hand loses its records, and no others."""
    topic = "t"
    found = sealed_in_bucket(proxied, topic)
    gone = objects(found, topic)[1]
    gone.unlink()  # batches 3 to 5
    with PartitionClient(found.broker.bootstrap, topic) as partition:
        for offset in range(ALL):
            response = partition.fetch(offset, max_bytes=1)
            number = offset // 2
            is_gone = number in {3, 4, 5}
            assert response.error_code == (STORAGE if is_gone else 0), offset
            wanted = [] if is_gone else expected(topic, range(number, number + 1))
            assert contents(response.records) == wanted
        assert partition.list_offset(EARLIEST)[::2] == (0, 0)
        assert partition.list_offset(LATEST)[::2] == (0, ALL)
        assert gone.name in found.broker.log.read_text()
        append(partition, range(BATCHES, BATCHES + 1))
        assert partition.delete_records(12) == (0, 12)
        assert partition.fetch(11).error_code == OUT_OF_RANGE
    found.broker.kill()
    found.broker.start()
    with PartitionClient(found.broker.bootstrap, topic) as partition:
        assert partition.list_offset(EARLIEST)[::2] == (0, 12)
        for number in range(6, BATCHES + 1):
            assert first_batch(partition, 2 * number) == expected(topic, range(number, number + 1))


def unchanged(value: Callable[[], int]) -> int:
    """Wait until a value has not changed for two seconds; returns it."""
    last, since_s = value(), time.monotonic()
    deadline = since_s + 60
    while time.monotonic() < since_s + 2:
        assert time.monotonic() < deadline, "it grows without end"
        time.sleep(0.05)
        if (now := value()) != last:
            last, since_s = now, time.monotonic()
    return last


def test_without_flush_on_ack_producers_wait_at_the_limit_while_the_bucket_is_away(proxied):
    found = proxied(flush_on_ack=False, max_unflushed_bytes=LIMIT_BYTES)
    found.create_topic("t", {}, partitions=PARTITIONS)
    with (
        PartitionClient(found.broker.bootstrap, "t") as partition,
        Load(found.broker.bootstrap, "t", per_s=5_000, **IDEMPOTENT) as load,
    ):
        load.wait_for(100)
        held, before = found.proxy.held, len(load.acked)
        with found.proxy.holding():
            wait_until(lambda: found.proxy.held > held, what=lambda: "a flush")
            acked = unchanged(lambda: len(load.acked))
            end = partition.log_end
            assert len(load.acked) == acked > before
            since = sorted(load.acked.items(), key=lambda one: int(one[1].split(b"-")[0]))[before:]
            size = sum(len(value) for _, value in since)
            assert size < 2 * LIMIT_BYTES
            assert load.sent > acked, "the producer does not wait"
            assert partition.fetch(end - 1).error_code == 0
        load.wait_for(acked, timeout_s=60)
    assert load.flush() == 0
    assert load.failures == []
    assert stored(found.broker, "t") == load.acked
    assert found.broker.stop() == 0
    found.broker.start()
    assert stored(found.broker, "t") == load.acked
    assert len(set(load.acked.values())) == load.sent


class Hasty(PartitionClient):
    """Sends requests without an end, and waits for no response."""

    sent = 0

    def receive_frame(self) -> bytes:
        self.sent += 1
        raise EOFError

    def run(self) -> None:
        self.socket.settimeout(120)
        for number in range(HASTY):
            with contextlib.suppress(EOFError):
                self.produce(big_batch(number))


@pytest.mark.gate("it writes 40 MB, and waits until nothing changes")
def test_with_flush_on_ack_producers_wait_at_the_limit_before_their_records_are_written(proxied):
    """Of one that does not wait for responses, no more than a few requests are read."""
    found = proxied(max_unflushed_bytes=LIMIT_BYTES, commit_timeout_ms=120_000)
    found.create_topic("t", {})
    outcomes: dict[int, Appended] = {}

    def write(number: int) -> None:
        with PartitionClient(found.broker.bootstrap, "t") as writer:
            writer.socket.settimeout(120)
            outcomes[number] = writer.produce(big_batch(number))

    numbers = range(HASTY, HASTY + 5)
    with (
        PartitionClient(found.broker.bootstrap, "t") as partition,
        Hasty(found.broker.bootstrap, "t") as hasty,
    ):
        writers = [threading.Thread(target=write, args=(number,)) for number in numbers]
        writers.append(threading.Thread(target=hasty.run))
        with found.proxy.holding():
            for writer in writers:
                writer.start()
            wait_until(lambda: partition.log_end > 1, what=lambda: "the limit")
            sent, written = unchanged(lambda: hasty.sent), unchanged(lambda: partition.log_end)
            assert BIG_BYTES * (written - 1) < LIMIT_BYTES
            assert sent < HASTY / 2, "its requests are read without an end"
            assert outcomes == values_in_bucket(found.files, b"") == {}
        for writer in writers:
            writer.join(120)
        assert [outcomes[number].error for number in numbers] == [0] * len(numbers)
        wait_until(lambda: partition.fetch(0).high_watermark == HASTY + 5, what=lambda: "the rest")
        rows = dict(read_all(partition))
    wanted = {outcomes[number].base_offset: digest(big(number)) for number in numbers}
    assert wanted.items() <= rows.items()
    assert sorted(rows.values()) == sorted(digest(big(number)) for number in range(HASTY + 5))
    assert {at: digest(value) for at, value in values_in_bucket(found.files, b"").items()} == rows

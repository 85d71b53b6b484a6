"""Goal: while uploads fail or wait, no log ends earlier than before, and no buffer grows on.

Method: a real broker behind a proxy that refuses or holds back what it uploads, without a kill
until the end. Records are compared by partition, offset and value.
"""

from __future__ import annotations

import random
import threading
import time
from typing import TYPE_CHECKING

import pytest

from broker.bucket.test_statements_of_faults import ALWAYS, LATE, REFUSED_PUTS, STORAGE, faults
from broker.bucket.test_statements_of_reads import batch, contents, digest, objects, read_all
from broker.test_watermark import Watch
from kit.fakes.s3_proxy import Fault
from kit.judges.partition_client import Appended, PartitionClient
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


def append_big(partition: PartitionClient, numbers: range) -> None:
    """Append batches of one record."""
    for number in numbers:
        batch = encode_reference([Record(0, 1, 0, None, big(number), ())])
        assert partition.produce(batch) == Appended(0, number)


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

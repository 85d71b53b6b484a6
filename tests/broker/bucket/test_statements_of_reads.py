"""Goal: what is appended to a log in a bucket is readable at once, whole, and stays so.

Method: the statements S, B and N of docs/broker-statements.md that are about reads, with a real
broker. A proxy holds its writes back, so that nothing is flushed while a test looks; or the
segments are in the bucket and no longer on the machine. A raw client reads with each limit at each
offset. Records are compared by offset and digest.
"""

from __future__ import annotations

import hashlib
import threading
from typing import TYPE_CHECKING, NamedTuple

import pytest

from kit.judges.commits import values_in_bucket
from kit.judges.partition_client import EARLIEST, LATEST, Appended, PartitionClient
from kit.runs.commands import wait_until
from logmirror.wire.records import Record, decode_reference, encode_reference

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from broker.bucket.conftest import Proxied

pytestmark = pytest.mark.slow
OUT_OF_RANGE = 1
NEVER = str(2**63 - 1)
HOUR_MS = "3600000"
IN_BACKGROUND = {"flush.messages": NEVER, "flush.ms": HOUR_MS}
BATCHES = 10
ALL = 2 * BATCHES
BIG = 10**6


def value(topic: str, number: int, place: int) -> bytes:
    return b"%s %03d-%d %s" % (topic.encode(), number, place, b"." * 150)


def batch(topic: str, number: int) -> bytes:
    """A batch of two records, all of one size."""
    return encode_reference(
        [Record(n, 1000 + number, 0, None, value(topic, number, n), ()) for n in range(2)]
    )


def digest(data: bytes | None) -> str:
    return hashlib.sha256(data or b"").hexdigest()


def contents(data: bytes | None) -> list[tuple[int, str]]:
    """Offsets and digests; batches that are not whole are an error."""
    return [(record.offset, digest(record.value)) for record in decode_reference(data or b"")]


def expected(topic: str, batches: range) -> list[tuple[int, str]]:
    return [(2 * n + place, digest(value(topic, n, place))) for n in batches for place in range(2)]


def append(partition: PartitionClient, numbers: range) -> None:
    for number in numbers:
        assert partition.produce(batch(partition.topic, number)) == Appended(0, 2 * number)


def read_all(partition: PartitionClient, max_bytes: int = BIG) -> list[tuple[int, str]]:
    """Read from the log start to the high watermark, as a consumer does."""
    offset, found = 0, list[tuple[int, str]]()
    while True:
        response = partition.fetch(offset, max_bytes=max_bytes)
        assert response.error_code == 0
        if offset >= response.high_watermark:
            return found
        read = [one for one in contents(response.records) if one[0] >= offset]
        assert read, "no progress"
        found += read
        offset = found[-1][0] + 1


def objects(of: Proxied, topic: str) -> list[Path]:
    """The objects of a topic's sealed segments."""
    return of.matching(f"{topic}@*/0/*.batches")


def seal(of: Proxied, topic: str) -> None:
    """Make a topic of ten batches: three objects of three batches, and one that is not sealed."""
    size = len(batch(topic, 0))
    of.create_topic(topic, {"segment.bytes": str(3 * size)})
    with PartitionClient(of.broker.bootstrap, topic) as partition:
        append(partition, range(BATCHES))
    wait_until(lambda: len(objects(of, topic)) == 3, what=lambda: "its objects")


class Log(NamedTuple):
    """A topic with ten batches of two records."""

    partition: PartitionClient
    batch_bytes: int

    def bases(self, offset: int, max_bytes: int) -> list[int]:
        """The base offsets of what a Fetch returns, whose batches are whole and right."""
        response = self.partition.fetch(offset, max_bytes=max_bytes)
        assert (response.error_code, response.high_watermark) == (0, ALL)
        assert len(response.records) % self.batch_bytes == 0
        found = contents(response.records)
        if found:
            batches = range(found[0][0] // 2, found[-1][0] // 2 + 1)
            assert found == expected(self.partition.topic, batches)
        return [offset for offset, _ in found[::2]]


@pytest.fixture(params=["not flushed", "sealed"])
def log(request: pytest.FixtureRequest, shared: Proxied, topic_name: str) -> Iterator[Log]:
    size = len(batch(topic_name, 0))
    is_sealed = request.param == "sealed"
    settings = {"segment.bytes": str(3 * size)} if is_sealed else IN_BACKGROUND
    shared.create_topic(topic_name, settings)
    with PartitionClient(shared.broker.bootstrap, topic_name) as partition:
        if not is_sealed:
            with shared.proxy.holding():
                append(partition, range(BATCHES))
                yield Log(partition, size)
            return
        append(partition, range(BATCHES))
        folder = shared.broker.log_dir / topic_name / "0"
        wait_until(lambda: len(objects(shared, topic_name)) == 3, what=lambda: "its objects")
        wait_until(lambda: len(list(folder.glob("*.batches"))) <= 1, what=lambda: "removed copies")
        yield Log(partition, size)


def test_s01_every_offset_is_readable_after_its_append_and_before_any_flush(shared, topic_name):
    shared.create_topic(topic_name, IN_BACKGROUND)
    with (
        PartitionClient(shared.broker.bootstrap, topic_name) as partition,
        shared.proxy.holding(),
    ):
        for number in range(12):
            append(partition, range(number, number + 1))
            for offset in range(2 * number + 2):
                first = offset // 2
                found = contents(partition.fetch(offset).records)
                assert found == expected(topic_name, range(first, number + 1))
        assert values_in_bucket(shared.files, topic_name.encode()) == {}


def test_s02_reading_changes_nothing(log):
    first = [log.partition.fetch(offset, max_bytes=500).records for offset in range(ALL)]
    again = [log.partition.fetch(offset, max_bytes=500).records for offset in range(ALL)]
    assert first == again
    assert read_all(log.partition) == expected(log.partition.topic, range(BATCHES))
    assert log.partition.log_end == ALL


@pytest.mark.statement("N6", "N7", "S3", "S4", "S5", "S7", "T8", "T9", "C8")
@pytest.mark.parametrize("is_sealed", [False, True])
def test_s03_a_read_has_the_first_batch_whole_and_those_behind_it_that_fit(proxied, is_sealed):
    """Also over the ends of segments. A limit of 0 or below it gives one batch."""
    found, topic = proxied(), "t"  # all segments stay on the machine: a cold one ends a response
    size = len(batch(topic, 0))
    if is_sealed:
        seal(found, topic)
    with PartitionClient(found.broker.bootstrap, topic) as partition:
        if not is_sealed:
            found.create_topic(topic, IN_BACKGROUND)
            append(partition, range(BATCHES))
        log = Log(partition, size)
        for limit in (-1, 0, 1, size - 1, size, 2 * size, 2 * size + 5, 5 * size, BIG):
            for offset in range(ALL):
                first = offset // 2
                count = max(1, min(limit // size, BATCHES - first))
                bases = [2 * n for n in range(first, first + count)]
                assert log.bases(offset, limit) == bases, limit


@pytest.mark.statement("C8", "T8")
def test_a_consumer_with_any_limit_reads_segments_that_are_only_in_the_bucket(proxied):
    limits = {"zero": 0, "below-it": -1, "one": 1, "some": 1_000}
    found = proxied(cache_bytes=1)
    for topic in limits:
        seal(found, topic)
    found.broker.kill()
    found.broker.start()
    for topic, limit in limits.items():
        asked = found.proxy.asked["GetObject"]
        with PartitionClient(found.broker.bootstrap, topic) as partition:
            assert read_all(partition, limit) == expected(topic, range(BATCHES))
        # Each once. The last batch is in an object since the start; its copy may be removed.
        assert found.proxy.asked["GetObject"] - asked in {3, 4}


def test_s06_a_read_at_the_end_is_empty(log):
    assert log.bases(ALL, BIG) == []
    assert log.partition.fetch(ALL + 1).error_code == OUT_OF_RANGE


def test_s11_all_offsets_are_readable_after_many_segments(shared, topic_name):
    settings = {"segment.bytes": str(4 * len(batch(topic_name, 0)))}
    shared.create_topic(topic_name, settings)
    with PartitionClient(shared.broker.bootstrap, topic_name) as partition:
        for number in range(30):
            append(partition, range(number, number + 1))
            assert read_all(partition) == expected(topic_name, range(number + 1))


def test_s14_the_high_watermark_is_the_next_offset_flushed_or_not(shared, topic_name):
    shared.create_topic(topic_name, IN_BACKGROUND)
    with PartitionClient(shared.broker.bootstrap, topic_name) as partition:

        def ends() -> tuple[int, int, int]:
            watermark = partition.fetch(0).high_watermark
            return watermark, partition.list_offset(LATEST)[2], partition.log_end

        append(partition, range(5))
        assert ends() == (10, 10, 10)
        assert values_in_bucket(shared.files, topic_name.encode()) == {}
        assert partition.delete_records(1) == (0, 1)  # flushes what is before it, and behind it
        assert len(values_in_bucket(shared.files, topic_name.encode())) == 10
        assert partition.fetch(1).high_watermark == 10
        with shared.proxy.holding():
            append(partition, range(5, 6))
            assert partition.fetch(1).high_watermark == partition.log_end == 12


@pytest.mark.statement("T15", "C14")
def test_b03_a_topic_that_flushes_on_ack_shows_and_acknowledges_nothing_that_is_not_in_the_bucket(
    shared, topic_name
):
    shared.create_topic(topic_name, {})
    bootstrap = shared.broker.bootstrap
    acknowledged: list[Appended] = []

    def write() -> None:
        with PartitionClient(bootstrap, topic_name) as writer:
            acknowledged.append(writer.produce(batch(topic_name, 0)))

    thread = threading.Thread(target=write)
    held = shared.proxy.held
    with PartitionClient(bootstrap, topic_name) as partition:
        with shared.proxy.holding():
            thread.start()
            wait_until(lambda: shared.proxy.held > held, what=lambda: "a commit")
            assert partition.log_end == 2
            for offset in range(3):  # no reader is sent away
                found = partition.fetch(offset, max_wait_ms=10)
                assert (found.error_code, found.records, found.high_watermark) == (0, b"", 0)
            assert partition.list_offset(LATEST)[2] == partition.list_offset(EARLIEST)[2] == 0
            assert acknowledged == []
        thread.join(60)
        assert acknowledged == [Appended(0, 0)]
        assert read_all(partition) == expected(topic_name, range(1))
    assert len(values_in_bucket(shared.files, topic_name.encode())) == 2

"""Goal: small segments become large ones in the background, and no crash loses or repeats a record.

Method: a broker with small segments writes them, and one with large segments merges them.
"""

from __future__ import annotations

import itertools
import time
from typing import TYPE_CHECKING, Any

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewTopic
from hypothesis import given
from hypothesis import strategies as st

from kit.fakes.s3_proxy import S3Proxy
from kit.judges.clients import rows_by_librdkafka
from kit.servers.bucket_broker import BucketBroker
from logmirror.archive.chain import ArchiveObject
from logmirror.broker.bucket.tiling import SPAN_MS, groups, tiled
from logmirror.failpoints import MERGE_POINTS

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from kit.servers.s3 import S3Server

TIMEOUT_S = 60
NOW_MS = 1_750_000_000_000
SMALL = ("--override", "log.segment.bytes=20000")
RECORDS = 600
"""More than 512, so that a cell is complete and few segments are behind it."""


def objects(*bounds: tuple[int, int]) -> list[ArchiveObject]:
    return [ArchiveObject(f"{first}-{last}", first, last) for first, last in bounds]


def test_merged_objects_replace_their_sources_and_what_is_missing_is_noticed():
    small = [(0, 4), (5, 9), (10, 14), (15, 19)]
    assert tiled(objects(*small), 0) == objects(*small)
    assert tiled(objects(*small, (0, 9)), 0) == objects((0, 9), (10, 14), (15, 19))
    assert tiled(objects(*small, (0, 14)), 12) == objects((0, 14), (15, 19))
    assert tiled(objects((0, 9), (10, 14), (12, 19)), 0) is None
    assert tiled(objects((5, 9)), 0) is None
    assert tiled(objects((0, 3)), 4) == []
    # what an owner that was paused has created late, before records were deleted
    assert tiled(objects((0, 12), (10, 14), (15, 19)), 10) == objects((10, 14), (15, 19))


@given(st.lists(st.integers(1, 9), min_size=1, max_size=60), st.randoms(use_true_random=False))
def test_whatever_was_merged_and_deleted_the_rest_is_the_log(lengths, chance: random.Random):
    live, offset = [], 0
    for length in lengths:
        live.append(ArchiveObject("", offset, offset + length - 1))
        offset += length
    stored = set(live)
    for _ in range(3):
        for group in groups(
            live, [one.last - one.first + 1 for one in live], chance.randint(1, 99)
        ):
            merged = ArchiveObject("", group[0].first, group[-1].last)
            stored |= {merged}
            stored -= set(group[: chance.randint(0, len(group))])
            live = sorted([*(one for one in live if one not in group), merged])
        found = tiled(stored, 0)
        assert found is not None
        assert found[0].first == 0
        assert found[-1].last == offset - 1
        assert all(one.last + 1 == two.first for one, two in itertools.pairwise(found))
        assert found == live


@pytest.fixture
def brokers(
    tmp_path: Path, s3_server: S3Server, bucket: str
) -> Iterator[Callable[..., BucketBroker]]:
    """Make brokers on one bucket, each with a machine of its own."""
    made: list[BucketBroker] = []

    def make(*options: str, **more: Any) -> BucketBroker:
        folder = tmp_path / f"machine-{len(made)}"
        made.append(BucketBroker(folder, s3_server, bucket, *options, **more))
        return made[-1]

    yield make
    for broker in made:
        broker.__exit__()


def read(broker: BucketBroker) -> dict[int, bytes | None]:
    rows = list(rows_by_librdkafka(broker.bootstrap, "t", partition=0))
    found = {row.offset: row.value for row in rows}
    assert len(found) == len(rows)
    return found


def written(
    broker: BucketBroker, root: Path, time_ms: Callable[[int], int]
) -> dict[int, bytes | None]:
    """Write small segments, and kill the broker when their objects exist."""
    broker.start()
    admin = AdminClient({"bootstrap.servers": broker.bootstrap})
    admin.create_topics([NewTopic("t", 1, 1)])["t"].result(TIMEOUT_S)
    settings = {"bootstrap.servers": broker.bootstrap, "batch.num.messages": 5, "log_level": 0}
    producer = Producer(settings)
    acked: dict[int, bytes | None] = {}
    for number in range(RECORDS):
        producer.produce(
            "t",
            b"%d-" % number + b"x" * 1_000,
            timestamp=time_ms(number),
            on_delivery=lambda _, m: acked.update({m.offset(): m.value()}),
        )
    assert producer.flush(TIMEOUT_S) == 0
    until(lambda: len(list(root.rglob("*.batches"))) >= RECORDS // 25)
    broker.kill()
    return acked


def test_records_of_a_merged_segment_are_at_most_a_day_apart(brokers, s3_server, bucket):
    root, change = s3_server.files(bucket), 300
    acked = written(
        brokers(*SMALL),
        root,
        lambda number: NOW_MS - (SPAN_MS + 1_000) * (number < change),
    )
    broker = brokers().start()

    def merged() -> list[tuple[int, int]]:
        parts = [path.stem.split("-") for path in root.rglob("*.batches")]
        found = [(int(first), int(last)) for first, last in parts]
        return [(first, last) for first, last in found if last - first > 100]

    until(lambda: bool(merged()))  # the largest cells, that of all records, are tried first
    [(first, last)] = merged()
    assert first == 0
    assert last < change + 25
    assert read(broker) == acked


@pytest.mark.slow
def test_a_cold_read_of_merged_segments_takes_few_requests(brokers, s3_server, bucket):
    root = s3_server.files(bucket)

    def gets_of_a_cold_read() -> int:
        """From a machine without files, by a broker that merges nothing."""
        with S3Proxy(s3_server.endpoint, lambda _: None) as proxy:
            broker = brokers(*SMALL, endpoint=proxy.endpoint).start()
            before = proxy.asked["GetObject"]
            assert read(broker) == acked
            found = proxy.asked["GetObject"] - before
            assert broker.stop() == 0
        return found

    acked = written(brokers(*SMALL), root, lambda _: NOW_MS)
    count = len(list(root.rglob("*.batches")))
    assert gets_of_a_cold_read() >= count
    merging = brokers().start()
    until(lambda: len(list(root.rglob("*.batches"))) <= count // 3)
    assert merging.stop() == 0
    assert gets_of_a_cold_read() <= len(list(root.rglob("*.batches")))


@pytest.mark.parametrize("point", ["", *MERGE_POINTS, "bucket.deleted"])
def test_small_segments_become_large_ones(brokers, s3_server, bucket, point):
    root = s3_server.files(bucket)
    acked = written(brokers(*SMALL), root, lambda _: NOW_MS)

    if point:
        crashing = brokers(crash_at=f"{point}#1").start(waits=False)
        assert crashing.wait(TIMEOUT_S) == -9
    broker = brokers().start()
    until(lambda: len(list(root.rglob("*.batches"))) <= 8)
    assert read(broker) == acked
    again = brokers().start()
    assert read(again) == acked
    assert again.stop() == 0


@pytest.mark.parametrize(
    ("operation", "part"),
    [
        ("PutObject", b"100-xxxx"),
        pytest.param("DeleteObject", b".batches", marks=pytest.mark.gate("the other moment")),
    ],
    ids=["before its commit", "behind its commit"],
)
def test_a_paused_owner_deletes_nothing_that_the_next_one_serves(
    brokers, s3_server, bucket, operation, part
):
    """It is paused while it merges, and its request to the bucket arrives late, too.

    Before its commit, the next owner serves the small segments; behind it, the large one.
    """
    root = s3_server.files(bucket)
    acked = written(brokers(*SMALL), root, lambda _: NOW_MS)
    with S3Proxy(s3_server.endpoint, lambda _: None) as proxy:
        first, second = brokers(endpoint=proxy.endpoint), brokers(*SMALL)
        with proxy.holding(part, {operation}):
            first.start(waits=False)
            until(lambda: proxy.held > 0)
            first.pause()
            second.start()
            small = set(root.rglob("*.batches"))
        first.resume()
        assert first.wait(TIMEOUT_S) == 69
        assert read(second) == acked
        if operation == "PutObject":
            assert small <= set(root.rglob("*.batches"))
    second.kill()
    second.start()
    assert read(second) == acked
    assert second.stop() == 0


def until(is_true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.1)

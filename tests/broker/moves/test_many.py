"""Goal: moves of many partitions are accepted at once, and take turns.

Method: a broker with 10,000 partitions; one with a large partition and 20 small ones; one on a
bucket that holds its commits back; and the real logs and moves of as many on a model of disks, a
step at a time (`moving_log`).
"""

from __future__ import annotations

import asyncio
import functools
import random
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest
from confluent_kafka import Producer

from broker.moves.test_bucket_moves import DiskAndBucket
from broker.moves.test_moves import contents
from broker.moves.test_requests import BATCH, NONE, fill
from broker.moves.test_tools import Plan
from kit.fakes.s3_proxy import S3Proxy
from kit.judges.log_dirs_client import DESCRIBE
from kit.runs.commands import wait_until
from kit.runs.moving_log import KEY, Life, Rows, append, prepare, run, until
from kit.servers.embedded import EmbeddedBroker
from kit.servers.s3 import LogBucket
from logmirror.broker.database import Database, GroupedChanges
from logmirror.broker.log.recovery import recover
from logmirror.broker.log.segment_cache import SegmentCache
from logmirror.broker.moves import copier, mover
from logmirror.broker.moves.copying import SegmentCopy
from logmirror.errors import UnavailableError

if TYPE_CHECKING:
    from pathlib import Path

    from logmirror.broker.log.partition_log import PartitionLog

PARTITIONS = 10_000
TIMEOUT_S = 10
"""How long `kafka-reassign-partitions` waits for a response by default."""

ACTIVE, SMALL = 8, 20
LARGE, EACH, LIMIT = 2_000, 30, 400_000
"""Batches of the large partition in a broker, and of a small one; the limit there."""

SEGMENTS, FEW = 150, 10
"""Of the large partition, and of a small one. A step copies one at most."""

TOGETHER, COMMITS = 60, 30
"""Partitions that move into a bucket, and the limit for the commits that these moves need."""


@pytest.mark.slow
@pytest.mark.move("E100")
def test_e100_ten_thousand_moves_are_accepted_within_the_timeout_of_kafkas_tool(dirs):
    dirs.create("t", PARTITIONS)
    with dirs.client() as client:
        began_s = time.monotonic()
        codes = client.move({dirs.b: {"t": tuple(range(PARTITIONS))}})
        assert time.monotonic() - began_s < TIMEOUT_S
        assert len(codes) == PARTITIONS
        assert set(codes.values()) == {0}
        for number in (0, PARTITIONS - 1):
            assert str(dirs.b) in client.where("t", number), "moved, or being moved"


@pytest.mark.gate("10,000 partitions")
@pytest.mark.move("E100")
def test_e100_kafkas_tool_moves_ten_thousand_partitions_with_one_plan(apache_tools, dirs, tmp_path):
    """Its requests have the tool's own timeouts: one that copied would not end within them."""
    dirs.create("t", PARTITIONS)
    fill(dirs, "t")
    dirs.limit(1)
    plan = Plan(apache_tools, dirs, tmp_path / "plan.json", dirs.b, PARTITIONS)
    started = "Successfully started moving log directory to "
    found = [line for line in plan.run("--execute") if line.startswith(started)]
    assert len(set(found)) == PARTITIONS
    assert "Reassignment of replica t-0-1 is still in progress." in plan.run("--verify")
    dirs.limit(None)
    expected = {
        f"Reassignment of replica t-{n}-1 completed successfully." for n in range(PARTITIONS)
    }
    wait_until(lambda: expected <= {*plan.run("--verify")}, what=lambda: "all moves")


@pytest.mark.move("E49")
def test_e49_a_large_partition_holds_up_no_small_ones(tmp_path, monkeypatch):
    """It is requested first, and ends last. Few copies are in progress at any time."""
    monkeypatch.setattr(mover, "_RETRY_S", 0)
    monkeypatch.setattr(copier, "_FIRST_S", 60)  # the model decides when a flush ends
    life = Life(prepare(tmp_path / "dirs"), Rows(), random.Random(49))
    logs: list[PartitionLog] = []
    moved, most = list[str](), [0]
    begin = SegmentCopy.__init__

    def noted(copy: SegmentCopy, *parts: object) -> None:
        begin(copy, *parts)  # type: ignore[arg-type]  # its own
        folders = (tmp_path / "dirs" / "b" / "t").glob("*-future")
        most[0] = max(most[0], len(list(folders)))

    monkeypatch.setattr(SegmentCopy, "__init__", noted)

    async def work() -> None:
        await life.start()
        life.moves.when_moved = lambda _, new: moved.append(new.name)
        logs.append(life.log)
        logs.extend(opened(life, number) for number in range(1, 1 + SMALL))
        for log in logs:
            while len(log.segments) < (SEGMENTS if log is life.log else FEW):
                append(log, log.log_end // 2)
            life.commits.schedule(log)
            await life.commits.flushed(log, log.log_end)
        target = tmp_path / "dirs" / "b"
        await life.moves.change([((KEY[0], n), log, target) for n, log in enumerate(logs)])
        await until(lambda: not life.moves.all)
        await life.moves.close()

    assert not run(life, work)
    assert len(moved) == len(logs)
    assert moved[-1] == "0"
    assert most == [ACTIVE]


@pytest.mark.slow
@pytest.mark.move("E49")
def test_e49_small_partitions_are_moved_while_a_large_one_has_its_turns(dirs):
    """In a broker, behind a limit: in a turn, a tenth of a second's bytes are copied."""
    dirs.create("large", segment_bytes="1000000")
    fill(dirs, "large", LARGE)
    topics = [f"small-{number}" for number in range(SMALL)]
    for topic in topics:
        dirs.create(topic)
        fill(dirs, topic, EACH)
    dirs.limit(LIMIT)
    with dirs.client() as client:
        codes = client.move({dirs.b: dict.fromkeys(["large", *topics], (0,))})
        assert set(codes.values()) == {0}
        most = 0
        while any([*client.where(topic)] != [str(dirs.b)] for topic in topics):
            copies = list(dirs.b.glob("*/*-future"))
            most = max(most, len(copies))
        large = client.where("large")[str(dirs.b)]
        assert large.is_future
        assert 0 < large.size_bytes < LARGE * len(BATCH) / 2
        assert 1 < most <= ACTIVE
        dirs.limit(None)
    for topic, count in (("large", LARGE), *((topic, EACH) for topic in topics)):
        dirs.wait_in(topic, dirs.b)
        with dirs.partition(topic) as partition:
            assert [offset for offset, _ in contents(partition)] == [*range(100 * count)]


@pytest.mark.slow
@pytest.mark.move("E49", "E51")
def test_e49_moves_into_a_bucket_share_their_commits(s3_server, tmp_path):
    """All swap while a commit is held back: so producers of all wait for the rows of all."""
    numbers = range(TOGETHER)
    with S3Proxy(s3_server.endpoint, lambda _: None) as proxy:
        place = LogBucket(s3_server, s3_server.new_bucket(), proxy.endpoint)
        disk = tmp_path / "a"
        with EmbeddedBroker(tmp_path / "broker", bucket=place, more_log_dirs=[str(disk)]) as broker:
            found = DiskAndBucket(broker, disk, place.url)  # type: ignore[arg-type]  # a name
            found.create("t", TOGETHER)
            producer = Producer(
                {"bootstrap.servers": found.bootstrap, "retries": 0, "log_level": 0}
            )
            outcomes: list[object] = []

            def send() -> None:
                for number in numbers:
                    noted = lambda error, _: outcomes.append(error)  # noqa: E731  # short
                    producer.produce("t", b"x", partition=number, on_delivery=noted)

            send()
            assert producer.flush(30) == 0
            with found.client() as client:
                codes = client.move({found.b: {"t": tuple(numbers)}})
                assert set(codes.values()) == {NONE}
                with proxy.holding(b"/.logmirror/broker/commits/"):
                    send()
                    wait_until(
                        lambda: len(swapped(found)) == TOGETHER, what=lambda: f"{swapped(found)}"
                    )
                    send()
                    before = commits(proxy)
                assert producer.flush(30) == 0
                found.wait_clean("t")
            assert commits(proxy) - before < COMMITS
            assert outcomes == [None] * 3 * TOGETHER


def swapped(found: DiskAndBucket) -> list[int]:
    """Return the partitions that are in the bucket, as the broker describes them."""
    with found.client() as client:
        places = client.ask(DESCRIBE, 4, topics=None).results
    return [
        one.partition_index
        for place in places
        if place.log_dir == str(found.b)
        for topic in place.topics
        if topic.name == "t"
        for one in topic.partitions
        if not one.is_future_key
    ]


def commits(proxy: S3Proxy) -> int:
    return sum("/.logmirror/broker/commits/" in path for path in proxy.created)


def test_a_change_of_rows_that_fails_is_the_only_one_of_its_transaction_that_does(tmp_path):
    database = Database(tmp_path / "x", "CREATE TABLE IF NOT EXISTS t (x UNIQUE)")
    made = list[int]()

    def insert(value: int) -> None:
        made.append(value)
        with database.transaction() as connection:
            connection.execute("INSERT INTO t VALUES (?)", (value,))

    async def work(*values: int) -> list[object]:
        with ThreadPoolExecutor(1) as executor:
            changes = GroupedChanges(executor)
            calls = [changes.make(functools.partial(insert, value)) for value in values]
            return [*await asyncio.gather(*calls, return_exceptions=True)]

    first, second, again, third = asyncio.run(work(1, 2, 2, 3))
    assert (first, second, third) == (None, None, None)
    assert isinstance(again, UnavailableError)
    assert made == [1, 2, 2, 2, 2, 3]
    with database.reading() as connection:
        assert connection.execute("SELECT x FROM t ORDER BY x").fetchall() == [(1,), (2,), (3,)]
    database.close()


def opened(life: Life, number: int) -> PartitionLog:
    folder: Path = life.log.folder.with_name(str(number))
    return recover(
        folder, disk=life.disk, cache=SegmentCache(life.disk), segment_bytes=700, durable=None
    )

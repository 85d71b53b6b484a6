"""Goal: the limit of moves holds, a change of it applies at once, and the lag shows what is left.

Method: the limit on a clock of its own, and a real broker. Bounds are counts of bytes, which hold
on a slow machine, too. The names of tests are those of the statements of moves.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

import pytest

from broker.moves.test_moves import contents
from broker.moves.test_requests import BATCH, NONE, fill
from kit.fakes.scripted import SteppingClock
from kit.judges.partition_client import Appended
from kit.runs.commands import wait_until
from logmirror.broker.moves.throttle import Throttle

if TYPE_CHECKING:
    from collections.abc import Callable

STEP_BYTES = 1_000_000
BATCH_BYTES = 1_000
"""What a step copies at least."""


@pytest.mark.move("E90", "E91")
@pytest.mark.parametrize(
    ("before", "after", "least", "most"),
    [
        (1_000_000, 10_000, 9_000, 13_000),
        (1_000_000, 0, 0, BATCH_BYTES),
        (None, 100_000, 90_000, 120_000),
        (10_000, 1_000_000, 900_000, 1_100_000),
        (1, 1_000_000, 800_000, 1_100_000),
        (0, 1_000_000, 800_000, 1_100_000),
    ],
)
def test_e91_a_change_of_the_limit_applies_within_a_second(monkeypatch, before, after, least, most):
    """What is copied in the second after it; a step in progress ends."""
    clock, copied = SteppingClock(), list[tuple[int, int]]()
    throttle = Throttle(clock)
    throttle.rate = before

    async def sleep(duration_s: float) -> None:
        clock.sleep_ms(max(1, 1000 * duration_s))

    async def copy(until_ms: int) -> None:
        while clock.ms < until_ms:
            if await throttle.wait():
                size = max(BATCH_BYTES, throttle.limit(STEP_BYTES))
                clock.ms += 1
                throttle.count(size)
                copied.append((clock.ms, size))

    monkeypatch.setattr(asyncio, "sleep", sleep)
    asyncio.run(copy(3_000))
    changed_ms = clock.ms
    throttle.rate = after
    asyncio.run(copy(changed_ms + 1_000))

    assert least <= sum(size for at, size in copied if at > changed_ms) <= most


@pytest.mark.move("E91")
def test_e91_a_lower_limit_lets_one_step_end(dirs):
    """Whatever the time: the next batch would be due in half an hour."""
    dirs.create("t")
    fill(dirs, "t", 300)
    before = 50_000
    dirs.limit(before)
    with dirs.client() as client:

        def size() -> int:
            return client.where("t")[str(dirs.b)].size_bytes

        assert client.move_one("t", dirs.b) == NONE
        wait_until(lambda: size() > 0, what=lambda: "bytes")
        dirs.limit(1)
        first = size()
        time.sleep(1.5)
        assert size() <= first + before // 10 + 2 * len(BATCH)
        assert client.where("t")[str(dirs.b)].is_future
        dirs.limit(100_000_000)
    dirs.wait_in("t", dirs.b)


@pytest.mark.move("E50")
def test_e50_the_lag_grows_while_producers_are_faster_than_the_limit(dirs):
    dirs.create("t")
    fill(dirs, "t")
    dirs.limit(1_000)
    with dirs.client() as client, dirs.partition("t") as partition:
        produced = 60

        def produce_until(is_true: Callable[[], bool]) -> None:
            nonlocal produced
            while not is_true():
                assert partition.produce(BATCH) == Appended(0, 100 * produced)
                produced += 1

        assert client.move_one("t", dirs.b) == NONE
        wait_until(lambda: client.where("t")[str(dirs.b)].size_bytes > 0, what=lambda: "bytes")
        lags, sizes = list[int](), list[int]()
        for end in (110, 160, 210, 260):
            produce_until(lambda end=end: produced == end)
            shown = client.where("t")[str(dirs.b)]
            assert shown.is_future
            assert shown.lag == 100 * (end - shown.size_bytes // len(BATCH))
            lags.append(shown.lag)
            sizes.append(shown.size_bytes)
        assert lags == sorted(set(lags))
        assert lags[-1] > lags[0] + 10_000
        wait_until(
            lambda: client.where("t")[str(dirs.b)].size_bytes > sizes[-1],
            what=lambda: f"more bytes than {sizes}",
        )
        dirs.limit(100_000_000)
        produce_until(lambda: [*client.where("t")] == [str(dirs.b)])
        assert produced > 260
        assert [offset for offset, _ in contents(partition)] == [*range(100 * produced)]
    dirs.broker.kill()
    dirs.broker.start()
    with dirs.partition("t") as partition:
        assert partition.log_end == 100 * produced
    dirs.wait_clean("t", "b/0")

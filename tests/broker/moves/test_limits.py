"""Goal: the limit of moves holds, a change of it applies at once, and the lag shows what is left.

Method: the limit on a clock of its own, also with several moves; and a real broker. Bounds are
counts of bytes, which hold on a slow machine, too. The names of tests are those of the statements
of moves.
"""

from __future__ import annotations

import asyncio
import heapq
import random
import time
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

import pytest

from broker.moves.test_moves import contents
from broker.moves.test_requests import BATCH, NONE, fill
from kit.fakes.scripted import SteppingClock
from kit.judges.partition_client import Appended, data_batch
from kit.runs.commands import wait_until
from logmirror.broker.moves.throttle import Throttle

if TYPE_CHECKING:
    from collections.abc import Coroutine, Generator

    from kit.judges.log_dirs_client import LogDirsClient

CONCURRENT = 2
"""Moves that are copied at a time."""

STEP_BYTES = 1_000_000
DISK_BYTES_PER_S = 200_000_000
AT_ONCE = 2
BATCH_BYTES = 1_000
"""What a step copies at least."""

LARGE = 5_000
"""Records of a batch that is a segment of its own."""


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
                rate = throttle.rate
                size = max(BATCH_BYTES, throttle.limit(STEP_BYTES))
                clock.ms += 1
                throttle.count(size, rate)
                copied.append((clock.ms, size))

    monkeypatch.setattr(asyncio, "sleep", sleep)
    asyncio.run(copy(3_000))
    changed_ms = clock.ms
    throttle.rate = after
    asyncio.run(copy(changed_ms + 1_000))

    assert least <= sum(size for at, size in copied if at > changed_ms) <= most


class _Pause(NamedTuple):
    """Seconds that a move sleeps, for `Turns`."""

    duration_s: float

    def __await__(self) -> Generator[float]:
        yield self.duration_s


class Turns:
    """Moves behind one limit, on a simulated clock. Steps take time, and each is of random size.

    Args:
        seed: Determines the sizes.
        moves: How many there are. They take turns for steps, of which two run at once.
    """

    def __init__(self, seed: int, moves: int) -> None:
        self.clock, self.chance = SteppingClock(), random.Random(seed)
        self.throttle = Throttle(self.clock)
        self.copied: list[tuple[float, int]] = []
        self.by_move = [0] * moves
        self._turns = deque(range(moves))
        works = [self._copy() for _ in range(min(moves, AT_ONCE))]
        self._asleep: list[tuple[float, int, Coroutine[float, None, None]]] = [
            (0.0, n, work) for n, work in enumerate(works)
        ]

    async def _copy(self) -> None:
        while True:
            move = self._turns.popleft()
            if await self.throttle.wait():
                rate, size = self.throttle.rate, 0
                most = max(BATCH_BYTES, (4 * STEP_BYTES if rate is None else rate) // 50)
                end = self.throttle.limit(4 * STEP_BYTES)
                if self.chance.random() < 0.1:  # that of the segment
                    end = self.chance.randint(1, end)
                while size < end:  # whole batches
                    size += self.chance.randint(1, most)
                await _Pause(0.01 * self.chance.random() + size / DISK_BYTES_PER_S)
                self.throttle.count(size, rate)
                self.copied.append((self.clock.ms, size))
                self.by_move[move] += size
            self._turns.append(move)

    def run(self, duration_s: float) -> None:
        """Let the moves copy for some simulated time."""
        end_ms = self.clock.ms + 1000 * duration_s
        while self._asleep[0][0] <= end_ms:
            self.clock.ms, number, work = heapq.heappop(self._asleep)
            wakes_ms = self.clock.ms + 1000 * work.send(None)
            heapq.heappush(self._asleep, (wakes_ms, number, work))
        self.clock.ms = end_ms

    def between(self, begin_ms: float, end_ms: float) -> int:
        """Bytes that were copied in some time."""
        return sum(size for at, size in self.copied if begin_ms < at <= end_ms)


@pytest.mark.move("E90", "E91")
@pytest.mark.parametrize("moves", [1, 2, 8])
def test_e90_the_limit_holds_within_a_tenth_over_thirty_seconds(monkeypatch, moves):
    """After each change: in the next second but one, and in any 30 s from then on."""
    monkeypatch.setattr(asyncio, "sleep", _Pause)
    for seed in range(20):
        turns = Turns(seed, moves)
        for _ in range(4):
            turns.throttle.rate = turns.chance.choice([None, 0, 1, 30_000_000])
            turns.run(turns.chance.random())
            rate = round(10 ** turns.chance.uniform(4.5, 7.5))
            changed_ms = turns.clock.ms
            turns.throttle.rate = rate
            turns.run(60)
            second = turns.between(changed_ms + 1_000, changed_ms + 2_000)
            assert abs(second - rate) < 0.3 * rate, (seed, rate)
            for begins_s in range(1, 30):
                begin_ms = changed_ms + 1_000 * begins_s
                copied = turns.between(begin_ms, begin_ms + 30_000)
                assert abs(copied - 30 * rate) < 0.1 * 30 * rate, (seed, rate)
        assert min(turns.by_move) > 0.5 * max(turns.by_move)


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


@pytest.mark.move("E89", "E90")
def test_e90_small_partitions_are_limited_together(dirs):
    """Whatever the time: after one of them, the next would be due in an hour."""
    topics = [f"t{number}" for number in range(8)]
    for topic in topics:
        dirs.create(topic)
        fill(dirs, topic, 4)
    dirs.limit(1)

    def moved(client: LogDirsClient) -> int:
        return sum([*client.where(topic)] == [str(dirs.b)] for topic in topics)

    with dirs.client() as client:
        assert {*client.move({dirs.b: dict.fromkeys(topics, (0,))}).values()} == {NONE}
        wait_until(lambda: moved(client) > 0, what=lambda: "a partition to move")
        time.sleep(1.5)
        assert moved(client) <= CONCURRENT
        dirs.limit(None)
    for topic in topics:
        dirs.wait_in(topic, dirs.b)


@pytest.mark.move("E50")
def test_e50_the_lag_grows_while_producers_are_faster_than_the_limit(dirs):
    """Also one that is lowered meanwhile. When they are slower than it, the move ends."""
    large = data_batch(LARGE)
    dirs.create("t")
    dirs.limit(2 * len(large))
    with dirs.client() as client, dirs.partition("t") as partition:

        def lag() -> int:
            """Offsets that the copy is behind; -1: the move has ended."""
            found = client.where("t")[str(dirs.b)]
            return found.lag if found.is_future else -1

        for number in range(4):
            assert partition.produce(large) == Appended(0, LARGE * number)
        produced = 4
        assert client.move_one("t", dirs.b) == NONE
        size = behind = 0
        while not size or behind < 5 * LARGE:
            assert partition.produce(large) == Appended(0, LARGE * produced)
            produced += 1
            size, behind, is_future = client.where("t")[str(dirs.b)]
            assert is_future
            assert behind == LARGE * (produced - size // len(large))

        dirs.limit(1)  # two more batches at most, whatever the time: the next is due in a day
        before = lag()
        for _ in range(5):
            assert partition.produce(large) == Appended(0, LARGE * produced)
            produced += 1
        size, behind, is_future = client.where("t")[str(dirs.b)]
        assert is_future
        assert behind == LARGE * (produced - size // len(large)) >= before + 3 * LARGE
        dirs.limit(8 * len(large))

        end = LARGE * produced
        while behind >= 0:
            assert partition.produce(BATCH) == Appended(0, end)
            end += 100
            wait_until(lambda least=behind: lag() < least, what=lambda: "a lower lag")
            behind = lag()
        assert [*client.where("t")] == [str(dirs.b)]
        assert [offset for offset, _ in contents(partition)] == [*range(end)]
    dirs.broker.kill()
    dirs.broker.start()
    with dirs.partition("t") as partition:
        assert partition.log_end == end
    dirs.wait_clean("t", "b/0")

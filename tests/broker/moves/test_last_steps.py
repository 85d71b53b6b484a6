"""Goal: the last steps of a move: a finished copy is verified, and no append keeps it from its end.

Method: the real log and moves on a model of disks (`moving_log`), in which something happens just
before one of these steps; and a broker, at random moments. The names of tests are those of the
statements of moves.
"""

from __future__ import annotations

import asyncio
import errno
import random
import shutil
import time
from functools import partial
from itertools import pairwise
from struct import unpack_from
from typing import TYPE_CHECKING

import pytest

from broker.moves.conftest import TwoDirs
from broker.moves.test_moves import contents
from broker.moves.test_requests import BATCH, NONE, fill
from kit.fakes.disk import loading
from kit.fakes.places import FailingStore, Power, make_disks
from kit.fakes.scripted import SteppingClock
from kit.judges.log_dirs_client import DESCRIBE, Replica
from kit.judges.partition_client import Appended
from kit.runs import placed_logs
from kit.runs.commands import wait_until
from kit.runs.moving_log import Life, Rows, Stepped, check, prepare, run, until
from kit.runs.moving_log import append as append_batch
from kit.runs.placed_known import PLAIN, KnownTopic
from kit.servers.embedded import EmbeddedBroker
from kit.tiers import sized
from logmirror.broker.log.partition_log import PartitionLog
from logmirror.broker.log.shadow import Shadow
from logmirror.broker.metadata import MetadataStore
from logmirror.broker.moves import copier, mover
from logmirror.broker.moves.copying import PART, SegmentCopy
from logmirror.broker.moves.move import MoveState

if TYPE_CHECKING:
    from pathlib import Path

WAITING = '''
"""Loaded by every Python process at its start: no file is removed from an old folder, while a file
exists."""

import os
import pathlib
import time

_waits = pathlib.Path({waits!r})
_unlink = os.unlink


def unlink(path, **how):
    while "-delete/" in os.fspath(path) and _waits.exists():
        time.sleep(0.01)
    _unlink(path, **how)


os.unlink = unlink
'''


@pytest.fixture(autouse=True)
def _paused_by_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copier, "_FIRST_S", 60)  # the model decides when a flush ends, not the time


@pytest.mark.move("E46")
def test_e46_a_copy_that_is_not_what_was_written_fails_the_move(tmp_path, monkeypatch):
    """The disk returns another byte; the checksums of the source are right."""
    life = Life(prepare(tmp_path / "dirs"), Rows(), random.Random(3))
    finish, flipped = SegmentCopy.finish, list[str]()

    def spoiled(copy: SegmentCopy) -> None:
        data = bytearray(copy.path.read_bytes())
        data[-1] ^= 1
        copy.path.write_bytes(data)
        flipped.append(str(copy.path))
        finish(copy)

    async def work() -> None:
        await life.start()
        await life.write(9)
        with monkeypatch.context() as patch:
            patch.setattr(SegmentCopy, "finish", spoiled)
            await life.move("b")
            [move] = life.moves.all
            await until(lambda: not move.is_active)
        assert move.state is MoveState.FAILED
        assert flipped[0].endswith(PART)
        assert flipped[0] in str(move.failure)
        assert life.place == "a"
        await life.write(9)
        await life.commits.flushed(life.log, life.log.log_end)
        found, _ = life.log.read_committed(0, 1_000, at_least_one=True)
        assert found
        await life.move("b")  # again
        await life.quiet()
        assert life.place == "b"
        await life.moves.close()

    assert not run(life, work)
    check(life)
    assert life.acked == 2 * life.appended


@pytest.mark.move("E30")
@pytest.mark.parametrize("followed", [0, 1, 3])
def test_e30_a_move_that_fails_while_it_follows_has_the_size_and_the_lag_of_its_copy(
    tmp_path, monkeypatch, followed
):
    """Its disk fails after some batches. What is appended later is not in the copy."""
    life = Life(prepare(tmp_path / "dirs"), Rows(), random.Random(3))
    append, followed_by = Shadow.append, list[int]()

    def failing(shadow: Shadow, batch: memoryview) -> None:
        if len(followed_by) == followed:
            shadow.failure = OSError(errno.EIO, "not written")
        else:
            followed_by.append(len(batch))
            append(shadow, batch)

    async def work() -> None:
        await life.start()
        await life.write(9)
        monkeypatch.setattr(Shadow, "append", failing)
        await life.move("b")
        [move] = life.moves.all
        while move.is_active:
            await asyncio.sleep(0)
            if move.state is MoveState.FOLLOWING:
                append_batch(life.log, life.appended)
                life.appended += 1
        size, end = move.copied_bytes, life.log.log_end - move.lag
        assert size == size_below(life.log, end)
        assert size <= sum(path.stat().st_size for path in move.future.glob("*0*"))
        for _ in range(2):
            await life.write(1)
            assert (move.copied_bytes, move.lag) == (size, life.log.log_end - end)
        await life.moves.close()

    assert not run(life, work)
    assert len(followed_by) == followed


def size_below(log: PartitionLog, end: int) -> int:
    """The size of the batches in the files of a log, up to an offset."""
    data = b"".join(
        (one.path if one.is_sealed else one.folder / f".{one.first:020d}.open").read_bytes()
        for one in log.segments
    )
    position = 0
    while position < len(data):
        base_offset, length = unpack_from(">qi", data, position)
        if base_offset >= end:
            break
        position += 12 + length
    return position


@pytest.mark.move("E58")
def test_e58_the_high_watermark_never_goes_back(tmp_path, monkeypatch):
    """It is read in every turn of the event loop, so whatever a client could see is seen."""
    step = Stepped.step
    for seed in range(5):
        life = Life(prepare(tmp_path / str(seed)), Rows(), random.Random(seed))
        seen: list[tuple[str, int]] = []

        def stepped(calls: Stepped, life: Life = life, seen: list[tuple[str, int]] = seen) -> None:
            if hasattr(life, "log"):
                seen.append((life.place, life.log.high_watermark))
            step(calls)

        monkeypatch.setattr(Stepped, "step", stepped)
        assert not run(life, partial(write_and_move, life))
        check(life)
        marks = [mark for _, mark in seen]
        assert marks == sorted(marks), seed
        assert marks[-1] == life.log.log_end == 2 * life.appended
        rises = {place for (place, mark), (_, later) in pairwise(seen) if mark < later}
        assert rises == {"a", "b", "c"}, seed


async def write_and_move(life: Life) -> None:
    """Move to each directory while records are written, and write some more there."""
    await life.start()
    for target in "bca":
        writing = asyncio.ensure_future(life.write(9))
        await life.move(target)
        await life.quiet()
        assert life.place == target
        await writing
        await life.write(1)
        await life.commits.flushed(life.log, life.log.log_end)
    await life.moves.close()


@pytest.mark.move("E59")
@pytest.mark.parametrize("by", ["the flush", "a retry"])
def test_e59_an_append_before_the_swap_and_then_silence_complete_the_move(
    tmp_path, monkeypatch, by
):
    """The end of the flush completes the move; so does the next retry, if it did not.

    On a simulated clock, on which a call of the disk takes a millisecond at least.
    """
    clock, step = SteppingClock(), Stepped.step

    def stepped(calls: Stepped) -> None:
        clock.ms += 1
        step(calls)

    monkeypatch.setattr(Stepped, "step", stepped)
    monkeypatch.setattr(asyncio.BaseEventLoop, "time", lambda _: clock.ms / 1000)
    if by == "the flush":
        monkeypatch.setattr(mover, "_RETRY_S", 10_000)
    else:
        unset = property(lambda _: lambda: None, lambda *_: None)
        monkeypatch.setattr(PartitionLog, "when_synced", unset, raising=False)
    waited = [append_and_be_silent(tmp_path / str(turns), turns, clock) for turns in range(30)]
    assert waited.count(True) > 5, "appended while the move follows"


def append_and_be_silent(folder: Path, turns: int, clock: SteppingClock) -> bool:
    """Append once, some turns of the event loop after all is copied; whether the swap was later."""
    life = Life(prepare(folder), Rows(), random.Random(turns))
    is_before = [False]

    async def work() -> None:
        await life.start()
        await life.write(1)
        await life.commits.flushed(life.log, life.log.log_end)
        await life.move("b")
        [move] = life.moves.all
        await until(lambda: move.state is not MoveState.COPYING)
        for _ in range(turns):
            await asyncio.sleep(0)
        is_before[0] = move.state is MoveState.FOLLOWING
        appended_ms = clock.ms
        await life.write(1)
        await until(lambda: not life.moves.all)
        assert life.place == "b"
        assert clock.ms - appended_ms < 1_000
        await life.commits.flushed(life.log, life.log.log_end)

    assert not run(life, work)
    check(life)
    assert life.acked == life.log.log_end == 4
    shutil.rmtree(folder)
    return is_before[0]


@pytest.mark.move("E23")
def test_e23_a_partition_is_described_once_while_its_old_folder_is_removed(tmp_path):
    waits, b, size = tmp_path / "waits", tmp_path / "b", 60 * len(BATCH)
    environment = loading(tmp_path, WAITING.format(waits=str(waits)))
    with EmbeddedBroker(
        tmp_path / "broker",
        environment=environment,
        more_log_dirs=[str(b)],
        segment_bytes=20_000,
    ) as broker:
        dirs = TwoDirs(broker, broker.log_dir, b)
        dirs.create("t")
        fill(dirs, "t")
        waits.touch()
        try:
            for old, new in ((dirs.a, b), (b, dirs.a)):
                dirs.move("t", new)
                wait_until(partial(has_old_folder, old), what=lambda: str(dirs.names("t")))
                assert described(dirs) == {str(old): [], str(new): [(0, Replica(size, 0, False))]}
                with dirs.partition("t") as partition:
                    assert partition.produce(BATCH).error == NONE
                size += len(BATCH)
                assert described(dirs) == {str(old): [], str(new): [(0, Replica(size, 0, False))]}
                assert has_old_folder(old)
        finally:
            waits.unlink()
        dirs.wait_clean("t", "data/0")
        assert described(dirs) == {str(dirs.a): [(0, Replica(size, 0, False))], str(b): []}


def has_old_folder(log_dir: Path) -> bool:
    """Whether an old folder with its last name is there, and has its files."""
    return bool([*log_dir.glob("t/0.*-delete/[0-9]*.batches")]) and not (log_dir / "t/0").exists()


def described(dirs: TwoDirs) -> dict[str, list[tuple[int, Replica]]]:
    """What a description of all topics shows, by log directory: each partition and its replica."""
    with dirs.client() as client:
        return {
            one.log_dir: [
                (
                    part.partition_index,
                    Replica(part.partition_size, part.offset_lag, part.is_future_key),
                )
                for topic in one.topics
                for part in topic.partitions
            ]
            for one in client.ask(DESCRIBE, 4, topics=None).results
        }


@pytest.mark.slow
@pytest.mark.move("E59")
def test_e59_an_append_at_any_moment_and_then_silence_complete_a_move_of_a_broker(dirs):
    dirs.create("t")
    fill(dirs, "t", 20)
    chance, within, number = random.Random(59), 0, 20
    least = sized(3, 6, 60)
    with dirs.partition("t") as partition, dirs.client() as client:
        while within < least or number < 20 + 10 * least:  # how often it is within, is chance
            assert number < 20 + 200 * least
            target = (dirs.b, dirs.a)[number % 2]
            assert client.move_one("t", target) == NONE
            time.sleep(chance.random() * chance.choice([0.005, 0.05]))
            assert partition.produce(BATCH) == Appended(0, 100 * number)
            within += [*client.where("t")] != [str(target)]
            dirs.wait_in("t", target)
            number += 1
        assert [offset for offset, _ in contents(partition)] == [*range(100 * number)]


@pytest.mark.move("E93")
def test_a_partition_whose_place_is_not_known_is_not_moved_again_before_the_next_start(
    tmp_path, monkeypatch
):
    """The row of its move says what the objects in the bucket belong to (H1)."""
    chance, store, known = random.Random(1), FailingStore(random.Random(2)), KnownTopic()
    root, left = make_disks(tmp_path / "before"), tmp_path / "after"
    life = placed_logs.Life(root, store, known, chance, Power(0))

    def lost(*_: object) -> None:
        raise OSError(errno.EIO, "not written")

    async def work() -> None:
        await life.start()
        for _ in range(9):
            life.writer(0).append(PLAIN)
        await life.flushed()
        monkeypatch.setattr(MetadataStore, "enter_bucket", lost)
        await life.move(0, "w")
        await life.quiet()
        assert life.topic.logs[0].failure is not None
        assert life.rows is not None
        rows = life.rows.moves()
        assert len(rows) == 1
        for place in ("b", "w", "a"):
            await life.move(0, place)
        assert life.rows.moves() == rows
        monkeypatch.undo()
        await life.stop()

    asyncio.run(work())
    life.disk.after_power_loss(left, keep=lambda n: n, some=lambda: True)
    after = placed_logs.Life(left, store, known, chance, Power(0))
    asyncio.run(after.end())
    assert after.problems == []
    assert placed_logs.place_of(after.topic.logs[0]) == "w"

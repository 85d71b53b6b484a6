"""Goal: what fails during a move leaves the partition where it is, whole, and served.

Method: the real log and moves on a model of disks (`moving_log`), whose target fails.
"""

from __future__ import annotations

import asyncio
import os
import random
from typing import TYPE_CHECKING

import pytest

from kit.runs.moving_log import KEY, ROW, Life, Rows, check, compact, prepare, run, until
from logmirror.broker.log.disk import Disk
from logmirror.broker.log.group_commit import GroupCommit
from logmirror.broker.log.segment import Segment
from logmirror.broker.log.shadow import Shadow
from logmirror.broker.log.sync_job import SyncJob
from logmirror.broker.log_dirs.placement import LogDirs, absolute
from logmirror.broker.moves import copier, mover
from logmirror.broker.moves.copying import SegmentCopy
from logmirror.broker.moves.leftovers import Leftovers
from logmirror.broker.moves.move import MoveState, remove_folder
from logmirror.broker.moves.routes import Route
from logmirror.broker.place_rows import MoveRow
from logmirror.errors import CorruptionError, UnavailableError

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mover, "_RETRY_S", 0)
    monkeypatch.setattr(copier, "_FIRST_S", 60)  # the model decides when a flush ends, not the time


STEPS = 8


async def until_failed(life: Life) -> None:
    await until(lambda: [move.state for move in life.moves.all] == [MoveState.FAILED])


@pytest.mark.parametrize("how", ["alone", "written", "stalled"])
def test_a_step_is_durable_before_the_next_one_while_producers_are_flushed(
    tmp_path, monkeypatch, how
):
    """Also while a flush takes so long that no other one begins."""
    life = Life(prepare(tmp_path / "dirs"), Rows(), random.Random(4))
    append, sync, open_steps = SegmentCopy.append, SegmentCopy.sync, set[SegmentCopy]()
    flush, beside = SyncJob.run, list[bool]()

    def noted(copy: SegmentCopy, *limits: int) -> int:
        beside.append(bool(open_steps))
        open_steps.add(copy)
        return append(copy, *limits)

    def synced(copy: SegmentCopy) -> None:
        for _ in range(20):  # slowly
            sync(copy)
        open_steps.discard(copy)

    def stalled(job: SyncJob) -> None:
        while len(beside) < STEPS:
            life.disk.sync_folder(life.log.folder)  # a step of the executor, see `Stepped`
        flush(job)

    monkeypatch.setattr(copier, "_ALONE_AFTER", 2)
    monkeypatch.setattr(SegmentCopy, "append", noted)
    monkeypatch.setattr(SegmentCopy, "sync", synced)

    async def work() -> None:
        await life.start()
        await life.write(60)
        await life.commits.flushed(life.log, life.log.log_end)
        if how == "stalled":
            monkeypatch.setattr(copier, "_FIRST_S", 0)
            monkeypatch.setattr(SyncJob, "run", stalled)
            await life.write(1)
        await life.move("b")
        [move] = life.moves.all
        while move.is_active:
            life.commits.flushes += how == "written"  # as a producer's flush does
            await asyncio.sleep(0)
        await life.quiet()
        await life.moves.close()

    assert not run(life, work)
    assert len(beside) > STEPS
    assert any(beside[:STEPS]) is (how == "alone")
    check(life)


def test_a_step_begins_behind_the_flush_of_records_that_is_in_progress(tmp_path, monkeypatch):
    life = Life(prepare(tmp_path / "dirs"), Rows(), random.Random(4))
    append, flush, in_flushes = SegmentCopy.append, SyncJob.run, list[bool]()
    is_flushing = [False]

    def slow(job: SyncJob) -> None:
        is_flushing[0] = True
        for _ in range(30):
            life.disk.sync_folder(life.log.folder)  # a step of the executor, see `Stepped`
        is_flushing[0] = False
        flush(job)

    def noted(copy: SegmentCopy, *limits: int) -> int:
        in_flushes.append(is_flushing[0])
        return append(copy, *limits)

    async def work() -> None:
        await life.start()
        await life.write(60)
        await life.commits.flushed(life.log, life.log.log_end)
        monkeypatch.setattr(copier, "_FIRST_S", 60)
        monkeypatch.setattr(SyncJob, "run", slow)
        monkeypatch.setattr(SegmentCopy, "append", noted)
        await life.write(1)
        await life.move("b")
        await until(lambda: len(in_flushes) >= STEPS)
        assert not any(in_flushes)
        await life.quiet()
        await life.moves.close()

    assert not run(life, work)
    check(life)


def test_a_move_that_follows_does_not_wait_for_its_bucket_for_ever(tmp_path, monkeypatch):
    """It would keep others from their turns."""
    life = Life(prepare(tmp_path / "dirs"), Rows(), random.Random(4))
    monkeypatch.setattr(mover, "_AWAY_MS", 0)
    monkeypatch.setattr(Route, "may_swap", lambda *_: False)
    monkeypatch.setattr(Route, "is_passing", lambda *_: True)

    async def work() -> None:
        await life.start()
        await life.write(20)
        await life.move("b")
        await asyncio.wait_for(until_failed(life), 10)
        [move] = life.moves.all
        assert "the bucket cannot be written" in str(move.failure)
        monkeypatch.undo()
        await life.move("b")
        await life.quiet()
        await life.moves.close()

    assert not run(life, work)
    check(life)


def test_a_folder_is_removed_while_others_remove_files_from_it(tmp_path, monkeypatch):
    folder = tmp_path / "folder"
    folder.mkdir()
    for number in range(10):
        (folder / str(number)).touch()
    unlink, gone = os.unlink, list[str]()

    def late(path: str, **where: int) -> None:
        unlink(path, **where)
        gone.append(path)
        if len(gone) % 2:
            raise FileNotFoundError(path)

    monkeypatch.setattr(os, "unlink", late)
    remove_folder(folder)
    assert not folder.exists()
    assert len(gone) == 10


@pytest.mark.parametrize("is_damaged", [False, True])
def test_a_segment_becomes_durable_beside_the_next_and_a_cancelled_move_waits_for_it(
    tmp_path, monkeypatch, is_damaged
):
    life = Life(prepare(tmp_path / "dirs"), Rows(), random.Random(4))
    is_held, finish, append = [True], SegmentCopy.finish, SegmentCopy.append

    def late(copy: SegmentCopy) -> None:
        for _ in range(3_000):  # steps of an executor, see `Stepped`
            if is_held[0]:
                life.disk.sync(copy.file)
        finish(copy)

    def damaged(copy: SegmentCopy, *limits: int) -> int:
        if is_damaged and copy.segment is not life.log.segments[0]:
            raise CorruptionError("damaged")
        return append(copy, *limits)

    monkeypatch.setattr(copier, "_ALONE_AFTER", 0)
    monkeypatch.setattr(SegmentCopy, "finish", late)
    monkeypatch.setattr(SegmentCopy, "append", damaged)

    async def work() -> None:
        await life.start()
        await life.write(30)
        await life.move("b")
        [move] = life.moves.all
        first, second = life.log.segments[:2]
        if is_damaged:
            await until_failed(life)
        else:
            await until(lambda: move.copied_bytes == first.size_bytes + second.size_bytes)
        assert move.finishing is first
        await life.move("a")
        for _ in range(500):
            await asyncio.sleep(0)
        assert move.future.exists()
        is_held[0] = False
        await until(lambda: not move.future.exists())
        await life.moves.close()

    assert not run(life, work)
    check(life)


@pytest.mark.move("E46")
def test_e46_a_damaged_batch_is_reported_with_file_position_and_offset(tmp_path, caplog):
    """It is the second batch of the second segment."""
    life = Life(prepare(tmp_path / "dirs"), Rows(), random.Random(4))

    async def work() -> None:
        await life.start()
        await life.write(30)
        await life.commits.flushed(life.log, life.log.log_end)
        second = life.log.segments[1]
        content = bytearray(second.path.read_bytes())
        position = 12 + int.from_bytes(content[8:12])
        content[position + 70] ^= 1
        second.path.write_bytes(content)
        await life.move("b")
        await until_failed(life)
        [move] = life.moves.all
        place = f"path='{second.path}' position={position} offset={second.first + 2}]"
        assert "record batch is damaged" in str(move.failure)
        assert place in str(move.failure)
        assert place in caplog.text
        await life.moves.close()

    assert not run(life, work)


def test_a_segment_that_is_deleted_while_its_copy_is_finished_ends_no_move(tmp_path, monkeypatch):
    life = Life(prepare(tmp_path / "dirs"), Rows(), random.Random(4))
    finish, gone = SegmentCopy.finish, list[Segment]()

    def deleted(copy: SegmentCopy) -> None:
        if not gone:
            gone.append(copy.segment)
            life.log.advance_start(copy.segment.next_offset)
            assert life.log.take_deleted()
            raise CorruptionError("the file is gone")
        finish(copy)

    monkeypatch.setattr(SegmentCopy, "finish", deleted)

    async def work() -> None:
        await life.start()
        await life.write(30)
        await life.move("b")
        await life.quiet()
        assert life.place == "b"
        await life.moves.close()

    assert not run(life, work)
    assert gone


class Counted(set[Segment]):
    """A set that counts how often it is asked for one."""

    count = 0

    def __contains__(self, segment: object) -> bool:
        self.count += 1
        return super().__contains__(segment)


def test_a_step_does_not_look_at_all_segments(tmp_path):
    life = Life(prepare(tmp_path / "dirs"), Rows(), random.Random(4))

    async def work() -> None:
        await life.start()
        await life.write(200)
        await life.commits.flushed(life.log, life.log.log_end)
        await life.move("b")
        [move] = life.moves.all
        move.copied = copied = Counted()
        await life.quiet()
        assert life.place == "b"
        assert len(copied) > 40
        assert copied.count < 6 * len(copied)
        await life.moves.close()

    assert not run(life, work)


def survivors(life: Life, target: Path) -> None:
    """Write what is certainly durable."""
    life.disk.after_power_loss(target, keep=lambda _: 0, some=lambda: False)


def test_a_flush_makes_the_shadow_durable_before_it_is_reported(tmp_path):
    life = Life(prepare(tmp_path / "dirs"), Rows(), random.Random(5))
    path = tmp_path / "dirs" / "b" / "shadow"

    async def work() -> None:
        await life.start()
        await life.write(1)
        await life.commits.flushed(life.log, life.log.log_end)
        life.log.shadow = Shadow(life.disk, life.disk.create(path))
        life.disk.sync_folder(path.parent)
        await life.write(2)
        await life.commits.flushed(life.log, life.log.log_end)
        survivors(life, tmp_path / "left")
        [tail] = (tmp_path / "left" / "a" / "t" / "0").glob(".*.open")
        left = (tmp_path / "left" / "b" / "shadow").read_bytes()
        assert left == path.read_bytes() != b""
        assert tail.read_bytes().endswith(left)

    assert not run(life, work)


def test_the_first_flush_after_a_swap_makes_the_new_name_durable(tmp_path, monkeypatch):
    life = Life(prepare(tmp_path / "dirs"), Rows(), random.Random(6))

    async def never(*_: object) -> None:
        """Instead of what makes it durable in the background."""

    async def work() -> None:
        await life.start()
        await life.write(3)
        monkeypatch.setattr(mover.Moves, "_clean", never)
        await life.move("b")
        await until(lambda: life.place == "b")
        await life.write(1)
        await life.commits.flushed(life.log, life.log.log_end)
        survivors(life, tmp_path / "left")
        found = [path.name for path in (tmp_path / "left" / "b" / "t").iterdir()]
        assert found == ["0"]

    assert not run(life, work)


def test_a_disk_that_hangs_behind_a_swap_refuses_the_next_move_and_holds_up_no_request(
    tmp_path, monkeypatch
):
    life = Life(prepare(tmp_path / "dirs"), Rows(), random.Random(8))
    monkeypatch.setattr(mover, "_CLEAN_S", 0.05)

    async def hang(*_: object) -> None:
        await asyncio.sleep(60)

    async def work() -> None:
        await life.start()
        await life.write(3)
        monkeypatch.setattr(mover.Moves, "_clean", hang)
        await life.move("b")
        await until(lambda: life.place == "b")
        target = tmp_path / "dirs" / "c"
        assert await life.moves.change([(KEY, life.log, target)]) == {life.log}
        assert life.place == "b"

    assert not run(life, work)


@pytest.mark.parametrize("how", ["compacted", "rolled", "not durable", "deleted", "begun"])
def test_only_an_exact_copy_is_swapped(tmp_path, monkeypatch, how):
    """Something keeps the swap from happening at once, and the log changes meanwhile."""
    life = Life(prepare(tmp_path / "dirs"), Rows(), random.Random(7))
    busy = [True]
    monkeypatch.setattr(GroupCommit, "is_busy", lambda *_: busy[0])

    async def work() -> None:
        await life.start()
        await life.write(0 if how == "begun" else 10)
        await life.move("b")
        [move] = life.moves.all
        await until(lambda: move.is_durable)
        if how == "compacted":
            compact(life)
        elif how == "rolled":
            life.log.roll()
            await life.write(1)
            await life.commits.flushed(life.log, life.log.log_end)
        elif how == "begun":
            await life.write(1)
            await life.commits.flushed(life.log, life.log.log_end)
        elif how == "deleted":
            life.log.advance_start(life.log.segments[1].first)
            assert life.log.take_deleted()
        else:
            move.is_durable = False
        busy[0] = False
        await asyncio.sleep(0)
        if move.shadow is not None:
            life.log.when_synced()
        assert life.place == "a"
        if how == "not durable":
            move.is_durable = True
        await life.quiet()
        assert life.place == "b"
        names = {segment.path.name for segment in life.log.segments if segment.is_sealed}
        assert {path.name for path in life.log.folder.glob("[0-9]*")} == names
        await life.write(1)
        await life.commits.flushed(life.log, life.log.log_end)
        check(life)
        await life.moves.close()

    assert not run(life, work)


@pytest.mark.move("E94")
def test_e94_a_source_that_fails_is_offline_and_its_copy_is_not_served(tmp_path):
    life = Life(prepare(tmp_path / "dirs"), Rows(), random.Random(4))

    async def work() -> None:
        await life.start()
        await life.write(9)
        await life.move("b")
        life.log.take_offline(OSError("gone"))  # type: ignore[arg-type]  # any failure
        await until_failed(life)
        assert life.place == "a"
        await life.moves.close()

    assert not run(life, work)
    assert not (tmp_path / "dirs/b/t/0").exists()


@pytest.mark.move("E93")
@pytest.mark.parametrize("when", ["before", "meanwhile", "following"])
def test_e93_a_move_to_a_directory_that_has_failed_fails(tmp_path, monkeypatch, when):
    life = Life(prepare(tmp_path / "dirs"), Rows(), random.Random(9))
    failure = UnavailableError("log directory failed", log_dir="b")

    async def work() -> None:
        await life.start()
        await life.write(9)
        if when == "before":
            life.moves.lose(tmp_path / "dirs" / "b", failure)
        if when == "following":
            monkeypatch.setattr(GroupCommit, "is_busy", lambda *_: True)
        await life.move("b")
        if when == "following":
            await until(lambda: life.moves.all[0].state is MoveState.FOLLOWING)
        if when != "before":
            life.moves.lose(tmp_path / "dirs" / "b", failure)
        [move] = life.moves.all
        assert move.state is MoveState.FAILED
        assert str(move.failure) == str(failure)
        await life.write(9)
        await life.commits.flushed(life.log, life.log.log_end)
        await life.move("a")
        await until(lambda: not life.moves.all)
        assert life.place == "a"
        assert life.log.shadow is None
        await life.moves.close()

    assert not run(life, work)
    check(life)


@pytest.mark.move("E82")
@pytest.mark.parametrize("places", [["a"], ["a", "c"]])
def test_e82_a_move_to_a_directory_that_is_not_given_any_more_is_forgotten(tmp_path, places):
    for name in places:
        (tmp_path / name / "t" / "0").mkdir(parents=True)
    dirs = LogDirs([tmp_path / "a", tmp_path / "c"])
    rows = {KEY: MoveRow(*KEY, absolute(tmp_path / "b"), "0" * 32)}

    found = Leftovers(dirs, Disk(), rows)
    found.finish(ROW, 0)

    assert found.unfinished == []
    assert found.ended == ([KEY] if len(places) == 1 else [])


def test_what_a_crash_left_of_other_moves_is_listed(tmp_path):
    names = [f"0.{'0' * 32}-future", f"0.{'1' * 32}-future", f"0.{'2' * 32}-delete", "0.x-future"]
    for name in names:
        (tmp_path / "a" / "t" / name).mkdir(parents=True)
    rows = {KEY: MoveRow(*KEY, absolute(tmp_path / "a"), "1" * 32)}

    found = Leftovers(LogDirs([tmp_path / "a"]), Disk(), rows)
    found.finish(ROW, 0)
    found.list_others("t")

    assert [row for row, _ in found.unfinished] == [rows[KEY]]
    assert sorted(path.name for path in found.folders) == [names[0], names[2]]

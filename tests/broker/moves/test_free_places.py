"""Goal: what makes way for a partition in its target is never the folder of a partition.

Method: the real log and moves on a model of disks (`moving_log`); the look at the target hangs,
while something else happens to the partition.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from typing import TYPE_CHECKING, Any

import pytest

from kit.runs.moving_log import KEY, Life, Rows, check, prepare, run, until
from logmirror.broker.log.file_names import open_path
from logmirror.broker.log.group_commit import GroupCommit
from logmirror.broker.moves.copier import Copier
from logmirror.broker.topic import TopicDeletedError

if TYPE_CHECKING:
    from logmirror.broker.log.partition_log import PartitionLog


class Looks:
    """The look at the targets of a request hangs, until it is released."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, is_done: bool = False) -> None:
        self.is_reached, self.released = False, asyncio.Event()
        in_thread = Copier.in_thread

        async def hanging(copier: Copier, call: Any, *args: Any) -> object:
            is_look = bool(args) and isinstance(args[0], dict)
            if is_look and is_done:
                found = await in_thread(copier, call, *args)
            if is_look:
                self.is_reached = True
                await self.released.wait()
            return found if is_look and is_done else await in_thread(copier, call, *args)

        monkeypatch.setattr(Copier, "in_thread", hanging)

    async def change(self, life: Life, meanwhile: Any) -> set[PartitionLog]:
        """Request a move to `b`, and do something while the look hangs."""
        asked = asyncio.ensure_future(life.moves.change([(KEY, life.log, life.dirs.on_disk[1])]))
        await until(lambda: self.is_reached)
        await meanwhile()
        self.released.set()
        return await asked


@pytest.mark.move("E6", "E80")
@pytest.mark.parametrize("is_done", [False, True], ids=["before the look", "behind it"])
def test_e06_a_repeated_request_leaves_the_folder_that_a_swap_has_just_named(
    tmp_path, monkeypatch, is_done
):
    root, rows = prepare(tmp_path / "dirs"), Rows()
    life, is_busy = Life(root, rows, random.Random(4)), [True]
    monkeypatch.setattr(GroupCommit, "is_busy", lambda *_: is_busy[0])

    async def swapped() -> None:
        is_busy[0] = False
        await until(lambda: life.place == "b")
        await life.quiet()

    async def work() -> None:
        await life.start()
        life.log.begin_segment()
        await life.move("b")
        [move] = life.moves.all
        await until(lambda: move.is_durable)
        refused = await Looks(monkeypatch, is_done=is_done).change(life, swapped)
        assert refused == set()
        assert [*life.log.folder.iterdir()], "its open segment"
        await life.write(5)
        await life.commits.flushed(life.log, life.log.log_end)
        await life.moves.close()

    assert not run(life, work)
    check(life)
    assert life.acked == 10
    again = Life(root, rows, random.Random(4), appended=5, acked=10)

    async def restart() -> None:
        await again.start()
        await again.moves.close()

    assert not run(again, restart)
    check(again)
    assert (again.place, again.log.log_end) == ("b", 10)


@pytest.mark.move("E80")
def test_a_folder_of_a_deleted_topic_may_be_that_of_the_next_one(tmp_path, monkeypatch):
    """It has the same name: the folder without records may be one of its partitions."""
    root = prepare(tmp_path / "dirs")
    place = root / "b" / "t" / "0"
    life = Life(root, Rows(), random.Random(4))

    async def deleted() -> None:
        life.log.take_offline(TopicDeletedError("topic was deleted", topic="t"))
        life.disk.make_folder(place)

    async def work() -> None:
        await life.start()
        refused = await Looks(monkeypatch).change(life, deleted)
        assert refused == {life.log}
        assert place.is_dir()
        await life.moves.close()

    assert not run(life, work)


@pytest.mark.move("E80")
def test_a_folder_without_records_gets_a_name_that_a_start_removes(tmp_path):
    root, rows = prepare(tmp_path / "dirs"), Rows()
    place = root / "b" / "t" / "0"
    life = Life(root, rows, random.Random(4))

    async def work() -> None:
        await life.start()
        await life.write(5)
        life.disk.make_folder(place)
        life.disk.create(open_path(place, 0))
        await life.move("b")
        assert not place.exists(), "at once"
        await life.quiet()
        await life.moves.close()

    assert not run(life, work)
    check(life)
    assert life.place == "b"
    assert [path.name for path in place.parent.iterdir()] == ["0"]


@pytest.mark.move("E64")
def test_while_a_deletion_begins_no_folder_gets_or_loses_its_name(tmp_path, monkeypatch):
    root = prepare(tmp_path / "dirs")
    place = root / "b" / "t" / "0"
    life = Life(root, Rows(), random.Random(4))
    looks, holding = Looks(monkeypatch), contextlib.AsyncExitStack()

    async def hold() -> None:
        await holding.enter_async_context(life.moves.held({life.log}))

    async def work() -> None:
        await life.start()
        await life.write(5)
        life.disk.make_folder(place)
        assert await looks.change(life, hold) == {life.log}
        assert place.is_dir()
        await holding.aclose()
        is_busy = [True]
        monkeypatch.setattr(GroupCommit, "is_busy", lambda *_: is_busy[0])
        await life.move("b")
        [move] = life.moves.all
        await until(lambda: move.is_durable)
        async with life.moves.held({life.log}):
            is_busy[0] = False
            await life.write(5)
            await life.commits.flushed(life.log, life.log.log_end)
            assert life.place == "a"
        await life.write(5)
        await life.quiet()
        assert life.place == "b"
        await life.moves.close()

    assert not run(life, work)
    check(life)

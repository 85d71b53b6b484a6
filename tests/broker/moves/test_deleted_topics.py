"""Goal: a topic that is deleted while its partitions move leaves nothing, and nothing comes back.

Method: all of a broker but its network on models of disks and a store in memory (`placed_logs`), in
which something happens at the worst moment.
"""

from __future__ import annotations

import asyncio
import random
import shutil
import threading
from typing import TYPE_CHECKING, Any

import pytest

from kit.fakes.disk_faults import DiskFault, Kind
from kit.fakes.places import FailingStore, Power, make_disks
from kit.runs import placed_logs
from kit.runs.moving_log import until
from kit.runs.placed_known import PLAIN, KnownTopic
from kit.runs.placed_logs import Life, place_of
from logmirror.broker.moves import mover
from logmirror.broker.moves.bucket_routes import IntoBucket
from logmirror.broker.moves.upload import SegmentUpload
from logmirror.broker.topic_removal import TopicRemoval
from logmirror.errors import UnavailableError

if TYPE_CHECKING:
    import uuid
    from pathlib import Path

    from logmirror.broker.moves.move import Move


@pytest.mark.move("E64")
def test_a_topic_of_a_deleted_name_outlives_a_crash_before_the_bucket_is_cleaned(tmp_path):
    """The deletion is known until the objects are removed; its name is used again before that."""
    chance = random.Random(1)
    store, known = FailingStore(chance), KnownTopic()
    root, left = make_disks(tmp_path / "before"), tmp_path / "after"

    async def recreate(life: Life) -> None:
        await life.start()
        await life.move(0, "w")
        await life.quiet()
        await life.write(0, 5)
        await life.flushed()
        store.refused = "names"  # so that no objects are removed
        await life.recreate()
        await asyncio.gather(*life.writing)
        life.writer(0).append(PLAIN)
        await life.flushed()
        assert life.rows is not None
        assert life.rows.deleting()
        await life.stop()

    life = Life(root, store, known, chance, Power(0))
    asyncio.run(recreate(life))
    life.disk.after_power_loss(left, keep=lambda n: n, some=lambda: True)
    store.refused = ""
    after = Life(left, store, known, chance, Power(0))
    asyncio.run(after.end())
    assert after.problems == []
    assert known.generation == 2


@pytest.mark.move("E64")
def test_a_topic_is_deleted_while_a_move_removes_what_it_has_left_of_it(tmp_path, monkeypatch):
    """Both remove a folder; the second to come to a file finds that it is gone."""
    chance, known, met = random.Random(1), KnownTopic(), []
    life = Life(make_disks(tmp_path), FailingStore(chance), known, chance, Power(0))

    def remove(path: Path, **how: Any) -> None:
        if not met and path.name == "t":
            met.append(path)
            raise FileNotFoundError(path)
        life.disk.remove_tree(path, **how)

    async def recreate() -> None:
        await life.start()
        await life.write(0, 5)
        await life.flushed()
        monkeypatch.setattr(shutil, "rmtree", remove)
        await life.recreate()
        await asyncio.gather(*life.writing)
        await life.stop()

    asyncio.run(recreate())
    assert met
    assert known.generation == 2


@pytest.mark.move("E64", "E93")
def test_a_deleted_topic_whose_old_folder_is_on_a_dead_disk_is_not_created_again(tmp_path):
    """Else the next start would find that folder, and take it for the new topic's."""
    chance, store, known = random.Random(1), FailingStore(random.Random(2)), KnownTopic()
    root, left = make_disks(tmp_path / "before"), tmp_path / "after"
    life = Life(root, store, known, chance, Power(0))

    async def delete() -> None:
        await life.start()
        await life.write(1, 5)
        await life.flushed()
        assert life.topics.moves is not None
        assert place_of(life.topic.logs[1]) == "b"

        def fail(*_: Path) -> None:
            life.disk.fault = DiskFault("b", Kind.DEAD, 1, 0)

        life.topics.moves.when_moved = fail
        await life.move(1, "w")
        await until(lambda: bool(life.topics.dirs.offline))
        await life.quiet()
        with pytest.raises(UnavailableError, match="no topic can be created"):
            await life.recreate()
        await life.stop()

    asyncio.run(delete())
    assert (root / "b/t/1").exists()
    life.disk.after_power_loss(left, keep=lambda n: n, some=lambda: True)
    after = Life(left, store, known, chance, Power(0))
    asyncio.run(after.end())
    assert after.problems == []


@pytest.mark.move("E64")
@pytest.mark.parametrize("deleted", ["t", "another"])
def test_a_topic_is_deleted_while_a_cancelled_move_completes_an_object(
    tmp_path, monkeypatch, deleted
):
    """The object is removed, too; until then the database knows that there may be one."""
    chance, known, may_finish = random.Random(1), KnownTopic(), threading.Event()
    life = Life(make_disks(tmp_path), FailingStore(chance), known, chance, Power(0))
    finish, finishing, finished = SegmentUpload.finish, [], []

    def late(upload: SegmentUpload) -> None:
        finishing.append(upload)
        assert may_finish.wait(60)
        finish(upload)
        finished.append(upload)

    monkeypatch.setattr(placed_logs, "_CLEAN_S", 2.0)
    monkeypatch.setattr(SegmentUpload, "finish", late)

    async def work() -> None:
        await life.start()
        for _ in range(12):
            life.writer(0).append(PLAIN)
        await life.flushed()
        await life.move(0, "w")
        await until(lambda: bool(finishing))
        await life.move(0, "a")
        if deleted == "t":
            deleting = asyncio.ensure_future(life.recreate())
        else:
            another = await life.topics.create(deleted, 1, {})
            assert another is not None
            deleting = asyncio.ensure_future(life.topics.delete(another))
        await asyncio.sleep(0.3)  # what is in the bucket would have been removed
        assert life.rows is not None
        assert [one.topic for one in life.rows.left_partitions()] == ["t"]
        may_finish.set()
        await deleting
        await until(lambda: finished == finishing)
        await asyncio.gather(*life.writing)
        await life._cleaned()  # noqa: SLF001  # the judge
        await life.stop()

    asyncio.run(work())
    assert life.problems == []


@pytest.mark.move("E64")
@pytest.mark.parametrize("has_begun", [True, False])
def test_a_deletion_lists_no_folder_that_a_move_removes(tmp_path, monkeypatch, has_begun):
    """After a crash, no start would find it. One that has not begun is left to the deletion."""
    chance, known, may_clean = random.Random(1), KnownTopic(), threading.Event()
    life = Life(make_disks(tmp_path), FailingStore(chance), known, chance, Power(0))
    finish, placed = IntoBucket.finish, IntoBucket.placed
    begin, remove = TopicRemoval.begin, TopicRemoval.remove
    cleaning, listed, there = [], [], []

    def late_finish(route: IntoBucket, *folders: Any) -> Path:
        cleaning.append(folders)
        assert not has_begun or may_clean.wait(60)
        return finish(route, *folders)

    async def late_placed(route: IntoBucket, move: Move) -> bool:
        cleaning.append(move)
        await until(may_clean.is_set)
        return await placed(route, move)

    def noted(removal: TopicRemoval, name: str, topic_id: uuid.UUID, *more: Any) -> None:
        begin(removal, name, topic_id, *more)
        assert life.rows is not None
        listed.append(life.rows.deleted_partitions(topic_id.bytes))

    def found(removal: TopicRemoval, row: Any, *more: Any) -> None:
        there.append({int(path.name) for path in life.root.glob("[ab]/t/[0-9]")})
        remove(removal, row, *more)

    monkeypatch.setattr(mover, "_CLEAN_S", 60 if has_begun else 0)
    monkeypatch.setattr(IntoBucket, "finish", late_finish)
    if not has_begun:
        monkeypatch.setattr(IntoBucket, "placed", late_placed)
    monkeypatch.setattr(TopicRemoval, "begin", noted)
    monkeypatch.setattr(TopicRemoval, "remove", found)

    async def work() -> None:
        await life.start()
        assert life.rows is not None
        life.rows.note_several_dirs()
        await life.write(0, 5)
        await life.flushed()
        await life.move(0, "w")
        await until(lambda: bool(cleaning))
        deleting = asyncio.ensure_future(life.recreate())
        if has_begun:
            await asyncio.sleep(0.1)
            assert listed == []
        else:
            await until(lambda: bool(listed))
        may_clean.set()
        await deleting
        await asyncio.gather(*life.writing)
        await life.stop()

    asyncio.run(work())
    assert listed == there == [set() if has_begun else {0}]
    assert life.problems == []


@pytest.mark.move("E64")
def test_a_topic_is_deleted_while_its_folder_is_removed_or_cannot_be_flushed(tmp_path, monkeypatch):
    chance, known, failed = random.Random(1), KnownTopic(), []
    life = Life(make_disks(tmp_path), FailingStore(chance), known, chance, Power(0))
    sync_name = TopicRemoval._sync_name  # noqa: SLF001  # a failure is planted in it

    def failing(removal: TopicRemoval, folder: Path) -> None:
        with monkeypatch.context() as patched:

            def sync_folder(path: Path) -> None:
                failed.append(path)
                raise FileNotFoundError(path)

            patched.setattr(life.disk, "sync_folder", sync_folder)
            sync_name(removal, folder)

    monkeypatch.setattr(TopicRemoval, "_sync_name", failing)

    async def recreate() -> None:
        await life.start()
        assert life.rows is not None
        life.rows.note_several_dirs()
        await life.write(0, 5)
        await life.flushed()
        await life.recreate()
        await asyncio.gather(*life.writing)
        await life.stop()

    asyncio.run(recreate())
    assert failed
    assert known.generation == 2

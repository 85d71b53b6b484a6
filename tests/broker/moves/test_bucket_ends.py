"""Goal: what a partition leaves at a move into or out of a bucket is removed, and nothing else.

Method: the end of a move on a store in memory, with something else at the worst moment.
"""

from __future__ import annotations

import asyncio
import random
import threading
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from kit.fakes.places import FailingStore, Power, make_disks
from kit.runs.placed_known import PLAIN, KnownTopic
from kit.runs.placed_logs import Life, place_of
from kit.runs.small_logs import append, flush, open_log
from logmirror.broker.log.disk import Disk
from logmirror.broker.log.segment import Segment
from logmirror.broker.moves import mover
from logmirror.broker.moves.bucket_routes import IntoBucket
from logmirror.broker.moves.move import Move, Whole
from logmirror.testing.memory_store import MemoryStore

if TYPE_CHECKING:
    from pathlib import Path

WAIT_S = 60


@pytest.mark.move("E88")
def test_e88_the_object_of_a_segment_that_was_compacted_after_its_upload_is_removed(tmp_path):
    """Both have the same offsets, and only the version in the name differs."""
    root, store = make_disks(tmp_path), MemoryStore()
    log = open_log(root / "a" / "t" / "0")
    (root / "w").mkdir()
    append(log, 0)
    log.roll()
    flush(log)
    old = log.segments[0]
    new = Segment(log.folder, old.first, old.next_offset, old.size_bytes)
    move = Move((b"t" * 16, 0), log, root / "w", "0" * 32)
    route: Any = IntoBucket.__new__(IntoBucket)
    route._disk, route._bucket = Disk(), SimpleNamespace(store=store)  # noqa: SLF001  # all that it needs here
    route.prepare(move)
    for segment in (old, new):
        upload = route.copy_of(move, segment)
        upload.append(segment.size_bytes, segment.size_bytes)
        upload.finish()
    assert len(store.objects) == 2
    route.make_durable(move, Whole([new], None, None), None)
    assert [*store.objects] == [upload.name]
    assert move.versions[new] in upload.name


@pytest.mark.move("E64")
def test_a_topic_of_the_same_name_keeps_its_working_folder(tmp_path, monkeypatch):
    """A partition has left the bucket; its old folder is removed when another has its place."""
    chance, known = random.Random(1), KnownTopic()
    life = Life(make_disks(tmp_path), FailingStore(chance), known, chance, Power(0))
    remove_folder, removing, goes_on = mover.remove_folder, threading.Event(), threading.Event()

    def late(path: Path) -> None:
        if path.is_relative_to(life.root / "w"):
            removing.set()
            assert goes_on.wait(WAIT_S)
        remove_folder(path)

    async def work() -> None:
        await life.start()
        await life.move(0, "w")
        await life.quiet()
        life.writer(0).append(PLAIN)
        await life.flushed()
        monkeypatch.setattr(mover, "remove_folder", late)
        await life.move(0, "a")
        await life.quiet()
        await asyncio.to_thread(removing.wait, WAIT_S)
        assert removing.is_set()
        await life.topics.delete(life.topic)
        life.known.deleted()
        life.topics.dirs.prefer("t", 0, "s3://b/p")
        await life.create()
        log = life.topic.logs[0]
        assert place_of(log) == "w"
        life.writer(0).append(PLAIN)
        await life.flushed()
        before = sorted(log.folder.iterdir())
        goes_on.set()
        assert life.topics.moves is not None
        await asyncio.wait(life.topics.moves._background)  # noqa: SLF001  # what removes
        assert before
        assert sorted(log.folder.iterdir()) == before
        await life.stop()

    asyncio.run(work())
    assert life.problems == []

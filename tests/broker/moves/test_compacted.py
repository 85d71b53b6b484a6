"""Goal: compaction that replaces a segment while it is copied does not end the move.

Method: the real log and moves on models of disks, in which the segment is replaced just then.
"""

from __future__ import annotations

import asyncio
import random
import threading
from typing import Any

from kit.fakes.places import FailingStore, Power, make_disks
from kit.runs import placed_logs
from kit.runs.moving_log import Job, Life, Rows, check, compact, prepare, run
from kit.runs.placed_known import PLAIN, KnownTopic
from kit.runs.placed_logs import place_of
from logmirror.broker.moves.copier import Copier
from logmirror.broker.moves.copying import SegmentCopy
from logmirror.broker.moves.upload import SegmentUpload

_STOPS = 200


def test_a_segment_that_is_compacted_while_its_copy_is_completed_is_copied_again(
    tmp_path, monkeypatch
):
    """Both copies have one name, so that the second begins behind the first."""
    life = Life(prepare(tmp_path / "dirs"), Rows(), random.Random(5))
    begin, finish, begun, finished = SegmentCopy.__init__, SegmentCopy.finish, [], []
    begin_durable = Copier._begin_durable  # noqa: SLF001  # between two steps

    def count(copy: SegmentCopy, *args: Any) -> None:
        begin(copy, *args)
        begun.append(copy.path)

    def compacted(copier: Copier, move: Any, copy: Any, *, is_whole: bool) -> None:
        begin_durable(copier, move, copy, is_whole=is_whole)
        if is_whole and len(begun) == 1:
            compact(life)

    def slow(copy: SegmentCopy) -> None:
        job = threading.current_thread()
        assert isinstance(job, Job)
        for _ in range(_STOPS):
            job.stop_here()
        finish(copy)
        finished.append(copy.path)

    async def work() -> None:
        await life.start()
        await life.write(5)  # one segment is full
        monkeypatch.setattr(SegmentCopy, "__init__", count)
        monkeypatch.setattr(SegmentCopy, "finish", slow)
        monkeypatch.setattr(Copier, "_begin_durable", compacted)
        await life.move("b")
        await life.quiet()
        assert life.place == "b"
        await life.moves.close()

    assert not run(life, work)
    assert begun.count(begun[0]) == finished.count(begun[0]) == 2
    check(life)


def test_a_segment_that_is_compacted_before_it_is_opened_for_an_upload_is_uploaded(
    tmp_path, monkeypatch
):
    """It is not known whether it holds every offset: its end was lost with the power."""
    chance, known = random.Random(1), KnownTopic()
    life = placed_logs.Life(make_disks(tmp_path), FailingStore(chance), known, chance, Power(0))
    begin, uploaded, is_replaced = SegmentUpload.__init__, list[Any](), threading.Event()

    def late(upload: SegmentUpload, store: Any, disk: Any, segment: Any, *more: Any) -> None:
        uploaded.append(segment)
        assert is_replaced.wait(60)
        begin(upload, store, disk, segment, *more)

    async def work() -> None:
        await life.start()
        log = life.topic.logs[0]
        for _ in range(20):
            life.writer(0).append(PLAIN)
        await life.flushed()
        [first, *_] = log.segments
        first.is_exact = False
        monkeypatch.setattr(SegmentUpload, "__init__", late)
        await life.move(0, "w")
        await life.compact(0)
        assert life.cleaning is not None
        await life.cleaning
        assert first not in log.segments
        is_replaced.set()
        await life.quiet()
        assert uploaded[0] is first
        assert place_of(log) == "w"
        await life.stop()

    asyncio.run(work())
    assert life.problems == []

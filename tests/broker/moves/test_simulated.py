"""Goal: no order of moves, failed requests, starts and power losses loses, repeats or revives a
record, between disks and a bucket.

Method: `placed_logs`. Planted faults show that it finds what it is for.
"""

from __future__ import annotations

import asyncio
import gc
import random
import threading
from typing import TYPE_CHECKING, Any

import pytest

from kit.fakes.places import FailingStore, Power
from kit.runs.moving_log import until
from kit.runs.placed_logs import PARTITIONS, Known, Life, World, place_of
from kit.tiers import sized
from logmirror.broker.bucket.commits import BucketCommit
from logmirror.broker.log.group_commit import GroupCommit
from logmirror.broker.log.shadow import Shadow
from logmirror.broker.moves import copier
from logmirror.broker.moves.bucket_routes import IntoBucket, OutOfBucket
from logmirror.broker.moves.move import MoveState
from logmirror.broker.moves.routes import Route
from logmirror.broker.place_rows import Residence

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = [
    pytest.mark.slow,
    # What runs when the power is lost is abandoned.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
SEEDS = sized(40, 400, 10_000)
_BUG_SEEDS = 500


@pytest.fixture(autouse=True)
def _collected() -> Iterator[None]:
    """Collect what was abandoned in this test, not in a later one."""
    yield
    gc.collect()


@pytest.mark.thinned
@pytest.mark.move("E20", "E34", "E35", "E36", "E67", "E68", "E69", "E70", "E71", "E72")
@pytest.mark.move("E73", "E74", "E75", "E76", "E98")
@pytest.mark.timeout(sized(600, 1_200, 7_200))
def test_e98_no_seed_loses_anything(tmp_path, monkeypatch):
    monkeypatch.setattr(copier, "_ALONE_AFTER", 1)  # so that both kinds of steps occur
    moved = lost = 0
    ways = set()
    for seed in range(SEEDS):
        world = World(seed, tmp_path / str(seed))
        assert world.run() == [], f"seed {seed}"
        moved += world.moved
        lost += sum(one.startswith("lost") for one in world.ended)
        ways |= world.ways
    assert ways == {(a, b) for a in "abw" for b in "abw" if a != b}
    assert moved > SEEDS
    assert lost > SEEDS / 2


def found_by(tmp_path: Path) -> list[str]:
    """What is wrong with the first seed that shows a planted fault."""
    for seed in range(_BUG_SEEDS):
        if problems := World(seed, tmp_path / str(seed)).run():
            return problems
    return []


def test_acknowledgements_before_the_row_are_found(tmp_path, monkeypatch):
    async def confirmed(self: Any, log: Any, job: Any, work: Any, arrival: Any) -> None:
        await work
        del self._arrivals[log]

        async def later() -> None:
            await asyncio.sleep(0.01)
            await arrival.confirm(job.end_offset)
            arrival.ended.set_result(None)

        self.later = asyncio.ensure_future(later())

    monkeypatch.setattr(GroupCommit, "_confirmed", confirmed)
    assert found_by(tmp_path)


def test_a_row_before_the_open_segment_is_in_the_chain_is_found(tmp_path, monkeypatch):
    monkeypatch.setattr(IntoBucket, "enter", _confirm_first(IntoBucket.enter))
    assert found_by(tmp_path)


def test_a_row_that_is_removed_before_the_flush_is_found(tmp_path, monkeypatch):
    monkeypatch.setattr(OutOfBucket, "enter", _confirm_first(OutOfBucket.enter))
    assert found_by(tmp_path)


def _confirm_first(enter: Any) -> Any:
    """Return a faulty `enter`, which changes the row before anything is durable."""

    def first(self: Any, move: Any) -> None:
        arrive = self._commits.arrive

        def begun(log: Any, confirm: Any) -> None:
            early = asyncio.ensure_future(confirm(log.log_end))

            async def confirmed(_: int) -> None:
                await early

            asyncio.get_running_loop().call_later(0.01, arrive, log, confirmed)

        self._commits.arrive = begun
        try:
            enter(self, move)
        finally:
            del self._commits.arrive

    return first


def test_a_residence_that_is_used_again_is_found(tmp_path, monkeypatch):
    def residence(_: Any, move: Any) -> Residence:
        return Residence(move.key[0], move.log.folder.parent.name, move.key[1])

    monkeypatch.setattr(IntoBucket, "_residence", residence)
    assert found_by(tmp_path)


def test_a_copy_that_is_not_followed_is_found(tmp_path, monkeypatch):
    monkeypatch.setattr(Shadow, "append", lambda *_: None)
    assert found_by(tmp_path)


def test_a_copy_that_is_not_durable_is_found(tmp_path, monkeypatch):
    monkeypatch.setattr(Route, "make_durable", lambda *_: None)
    monkeypatch.setattr("logmirror.broker.moves.copying.SegmentCopy.sync", lambda _: None)
    assert found_by(tmp_path)


def test_a_bucket_that_keeps_what_has_left_is_found(tmp_path, monkeypatch):
    monkeypatch.setattr("kit.runs.placed_logs._CLEAN_S", 2.0)
    monkeypatch.setattr("logmirror.broker.topics.Topics.remove_residence", lambda *_: None)
    assert found_by(tmp_path)


def test_a_partition_that_begins_with_its_place_in_the_chain_of_before_is_found(
    tmp_path, monkeypatch
):
    arrive = BucketCommit.arrive

    def kept(self: Any, log: Any, confirm: Any) -> None:
        place = self._places.get(log)
        arrive(self, log, confirm)
        if place is not None:
            self._places[log] = place

    monkeypatch.setattr(BucketCommit, "arrive", kept)
    assert found_by(tmp_path)


@pytest.mark.move("E53")
def test_producers_go_out_of_a_bucket_before_their_state_is_stored_there(tmp_path):
    """The last sealed segment is not uploaded yet, and its records are deleted."""
    chance, may_upload = random.Random(1), threading.Event()
    store, known = FailingStore(chance), [Known() for _ in range(PARTITIONS)]
    root, left = tmp_path / "before", tmp_path / "after"
    for name in ("a", "b"):
        (root / name / ".logmirror").mkdir(parents=True)

    async def leave(life: Life) -> None:
        await life.start()
        await life.move(0, "w")
        await life.quiet()
        log, bucket, moves = life.topic.logs[0], life.bucket, life.topics.moves
        assert bucket is not None
        assert moves is not None
        bucket._uploads.submit(bucket._keys[log], may_upload.wait)  # noqa: SLF001  # its thread
        await life.write(0, 1)
        log.roll()
        await life.flushed()
        known[0].deleting = log.log_end
        deleting = asyncio.ensure_future(life.topics.delete_records(life.topic, {0: log.log_end}))
        await until(lambda: log.log_start == log.log_end)
        await life.move(0, "a")
        [move] = moves.all
        await until(lambda: move.state is MoveState.FOLLOWING)
        await asyncio.sleep(0.2)  # a swap would have been made
        assert place_of(log) == "w"
        may_upload.set()
        await deleting
        await life.quiet()
        assert (log.log_start, log.log_end, place_of(log)) == (2, 2, "a")
        await life.stop()

    life = Life(root, store, known, chance, Power(0))
    asyncio.run(leave(life))
    life.disk.after_power_loss(left, keep=lambda n: n, some=lambda: True)
    after = Life(left, store, known, chance, Power(0))

    async def start() -> None:
        await after.start()
        await after.stop()

    asyncio.run(start())
    assert after.problems == []
    assert known[0].sequence == 2

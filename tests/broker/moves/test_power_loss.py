"""Goal: no power loss, cancellation or new target at any moment of a move loses, repeats or revives
a record.

Method: the real log, its flushes, the moves and a start run on a model of disks that knows what is
durable (`moving_log`). Before a call of the disk, the power fails, or a request comes. For that,
every call of a small move and every order of the two is enumerated (`enumerated_requests`). Of what
was not flushed, anything may survive. The next start must find every acknowledged record once, in
order, in one place, and complete the move.
"""

from __future__ import annotations

import asyncio
import random
import shutil
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest

from kit.runs.enumerated_requests import HOW, requested
from kit.runs.moving_log import (
    Life,
    Rows,
    check,
    contents,
    prepare,
    run,
    scenario,
    until,
    value,
)
from kit.tiers import sized
from logmirror import failpoints
from logmirror.broker.log.file_names import cleaned_path
from logmirror.broker.log.segment import Segment
from logmirror.broker.log_dirs.placement import absolute
from logmirror.broker.moves import copier, mover
from logmirror.broker.moves.mover import Moves
from logmirror.broker.moves.routes import Route
from logmirror.errors import InternalError

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from pathlib import Path

    from logmirror.broker.moves.move import Copy, Move

CALLS = sized(20, 60, 10_000)
"""Before how many calls of the disk of each run."""

COPIED = 3
"""Segments in a copy, before it begins again."""


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mover, "_RETRY_S", 0)
    monkeypatch.setattr(copier, "_FIRST_S", 60)  # the model decides when a flush ends, not the time


def calls(folder: Path, seed: int) -> list[int]:
    """Numbers of calls of the disk, of all that an undisturbed run makes."""
    whole = Life(prepare(folder), Rows(), random.Random(seed))
    assert not run(whole, lambda: scenario(whole))
    check(whole)
    assert not whole.rows.rows
    assert whole.disk.count > 150
    found = list(range(1, whole.disk.count + 1))
    return random.Random(seed).sample(found, min(CALLS, len(found)))


@pytest.mark.thinned
@pytest.mark.move("E67", "E68", "E69", "E71", "E72", "E73", "E74", "E75", "E76", "E81")
@pytest.mark.parametrize("seed", range(sized(4, 12, 30)))
def test_e67_a_power_loss_before_any_call_loses_nothing(tmp_path, seed):
    for call in calls(tmp_path / "all", seed):
        lose_power(tmp_path / str(call), seed, call)


def lose_power(
    folder: Path,
    seed: int,
    call: int,
    work: Callable[[Life], Coroutine[None, None, None]] = scenario,
) -> None:
    root, later = prepare(folder / "before"), folder / "after"
    rows, chance = Rows(), random.Random(f"{seed} {call}")
    life = Life(root, rows, random.Random(seed))
    life.crash_at = call
    assert run(life, lambda: work(life))
    start = life.log.log_start
    wanted = [row.target.replace(str(root), str(later)) for row in rows.rows.values()]
    mood = chance.choice([0.0, 0.5, 1.0])
    life.disk.after_power_loss(
        later,
        keep=lambda n: chance.randint(0, n) if mood == 0.5 else round(mood * n),
        some=lambda: chance.random() < mood,
    )
    rows.rows = {
        key: row._replace(target=row.target.replace(str(root), str(later)))
        for key, row in rows.rows.items()
    }
    known = {"appended": life.appended, "acked": life.acked, "log_start": start}
    after = Life(later, rows, chance, **known)
    restart(after)
    assert after.log.log_start == start
    assert all(one.next_offset > start for one in after.log.segments if one.is_sealed)
    names = [path.name for path in later.glob("*/t/*")]
    assert names in ([], ["0"]), names
    if wanted:
        assert absolute(after.log.folder.parent.parent) == wanted[0]
    shutil.rmtree(folder)


def restart(after: Life) -> None:
    """Start after what happened: everything is there, and the move is completed."""

    async def again() -> None:
        await after.start()
        check(after)
        await after.quiet()
        check(after)
        await after.moves.close()

    assert not run(after, again)
    assert not after.rows.rows


@pytest.mark.move("E42")
def test_e42_what_the_source_has_lost_does_not_come_back_from_the_copy(tmp_path):
    """The copy of flushed segments survived, the source did not: it is shorter, and written on."""
    root, rows = prepare(tmp_path / "disks"), Rows()
    life = Life(root, rows, random.Random(2))

    async def half() -> None:
        await life.start()
        await life.write(60)
        await life.commits.flushed(life.log, life.log.log_end)
        await life.move("b")
        [move] = life.moves.all
        await until(lambda: len(move.copied) >= 10)
        await life.moves.close()

    assert not run(life, half)
    segments = [one for one in life.log.segments if one.is_sealed]
    end = segments[4].next_offset
    wanted = [one for one in contents(life.log) if one[0] < end]
    for path in life.log.folder.iterdir():
        if path.name.endswith(".open") or path in {one.path for one in segments[5:]}:
            path.unlink()
    after = Life(root, rows, random.Random(2), appended=70, acked=end)

    async def again() -> None:
        await after.start()
        assert after.log.log_end == end
        assert after.place == "a"
        await after.write(20)
        await after.commits.flushed(after.log, after.log.log_end)
        await after.quiet()
        await after.moves.close()

    assert not run(after, again)
    assert after.place == "b"
    other = [value(70 + number, place) for number in range(20) for place in (0, 1)]
    assert contents(after.log) == [*wanted, *enumerate(other, end)]
    files = {one.path.name for one in after.log.segments if one.is_sealed}
    assert {path.name for path in after.log.folder.glob("[0-9]*")} == files


@pytest.mark.thinned
@pytest.mark.move("E20", "E87")
@pytest.mark.parametrize("how", ["cancelled", "redirected", "redirected and cancelled"])
@pytest.mark.parametrize("seed", range(sized(2, 4, 10)))
def test_e20_a_request_while_a_partition_moves_three_times_is_carried_out(tmp_path, seed, how):
    for call in calls(tmp_path / "all", seed):
        interrupt(tmp_path / str(call), seed, call, how)


def interrupt(folder: Path, seed: int, call: int, how: str) -> None:
    life = Life(prepare(folder), Rows(), random.Random(seed))
    requests: list[asyncio.Task[None]] = []
    wanted = [""]

    async def request() -> None:
        async with life.moves.turn:
            if "redirected" in how:
                wanted[0] = next(name for name in "abc" if name != life.place)
                await life.move(wanted[0])
            if "cancelled" in how:
                wanted[0] = life.place
                await life.move(wanted[0])

    async def work() -> None:
        await life.start()
        await life.write(5)
        writing = asyncio.ensure_future(life.write(30))
        for target in ("b", "c", "a"):
            async with life.moves.turn:
                if requests:
                    break
                await life.move(target)
            await life.quiet()
        await writing
        await asyncio.wait(requests)
        requests[0].result()
        await life.quiet()
        await life.commits.flushed(life.log, life.log.log_end)
        await life.moves.close()

    life.act_at = call
    life.act = lambda: requests.append(asyncio.ensure_future(request()))
    assert not run(life, work)
    check(life)
    assert life.acked == life.log.log_end == 2 * life.appended
    assert life.place == wanted[0]
    assert [path.name for path in folder.glob("*/t/*")] == ["0"]
    assert not life.rows.rows
    shutil.rmtree(folder)


@pytest.mark.thinned
@pytest.mark.move("E20", "E87")
@pytest.mark.timeout(sized(300, 600, 7_200))
@pytest.mark.parametrize("how", sized(HOW[:2], HOW, HOW))
@pytest.mark.parametrize("seed", range(sized(1, 1, 10)))
def test_e20_a_request_before_any_call_leaves_one_whole_partition(tmp_path, seed, how):
    """Every call of a move, and every order of the two, is enumerated; no call is left out."""
    found = Counter(requested(tmp_path, seed, how))
    for step in ("prepared", "copied", "durable", "swapped", "named", "freed", "done"):
        assert found[f"move.{step}"], step
    assert found["rename"] == found["move.copied"] + 2  # copies, the swap, and the old folder
    assert found["rows"] == 2  # the move is stored, and forgotten
    assert found["remove_folder"]


@pytest.mark.move("E35", "E87")
@pytest.mark.parametrize("wanted", ["a", "c"])
def test_e87_a_request_while_a_copy_begins_again_leaves_one_whole_partition(tmp_path, wanted):
    """Before each call of the disk from the deletion of records to the end of the move."""
    for call in calls_of_a_reset(tmp_path / "all"):
        request_while_it_begins_again(tmp_path / str(call), call, wanted)


@pytest.mark.thinned
@pytest.mark.move("E35", "E70")
@pytest.mark.parametrize("seed", range(sized(1, 4, 30)))
def test_e70_a_power_loss_while_a_copy_begins_again_loses_and_revives_nothing(tmp_path, seed):
    for call in calls_of_a_reset(tmp_path / "all", seed):
        lose_power(tmp_path / str(call), seed, call, begin_again)


async def begin_again(life: Life, calls: list[int] | None = None) -> None:
    """Delete records up to behind the end of a copy; notes the calls of what follows."""
    await life.start()
    await life.write(24)
    await life.commits.flushed(life.log, life.log.log_end)
    await life.move("b")
    [move] = life.moves.all
    await until(lambda: len(move.copied) >= COPIED)
    start = next(one for one in life.log.segments if one.first > move.next_offset)
    begin = life.disk.count + 1
    life.log.advance_start(start.first)
    life.commits.remove_deleted(life.log)
    await life.write(5)
    await life.quiet()
    if calls is not None:
        calls.extend(range(begin, life.disk.count + 1))
    assert life.log.segments[0].first == start.first


def calls_of_a_reset(folder: Path, seed: int = 87) -> list[int]:
    """Numbers of all calls of the disk in which a copy begins again, and is completed."""
    life = Life(prepare(folder), Rows(), random.Random(seed))
    found, dropped = list[int](), list[str]()

    async def work() -> None:
        await begin_again(life, found)
        await life.moves.close()

    with failpoints.listening(lambda name: dropped.extend([name] * (name == "move.dropped"))):
        assert not run(life, work)
    assert len(dropped) >= COPIED, "all that was copied before is removed from the copy"
    check(life)
    assert life.place == "b"
    files = {one.path.name for one in life.log.segments if one.is_sealed}
    assert {path.name for path in life.log.folder.glob("[0-9]*")} == files
    return found


def request_while_it_begins_again(folder: Path, call: int, wanted: str) -> None:
    life = Life(prepare(folder), Rows(), random.Random(87))
    requests: list[asyncio.Task[None]] = []

    async def work() -> None:
        await begin_again(life)
        await until(lambda: bool(requests))
        await requests[0]
        await life.quiet()
        await life.commits.flushed(life.log, life.log.log_end)
        await life.moves.close()

    async def request() -> None:
        async with life.moves.turn:
            await life.move(wanted)

    life.act_at = call
    life.act = lambda: requests.append(asyncio.ensure_future(request()))
    assert not run(life, work)
    check(life)
    assert life.acked == life.log.log_end == 2 * life.appended
    assert life.place == wanted
    assert [path.name for path in folder.glob("*/t/*")] == ["0"]
    assert not life.rows.rows
    shutil.rmtree(folder)


@pytest.mark.slow
def test_a_request_that_is_acknowledged_before_it_is_stored_is_found(tmp_path, monkeypatch):
    stored = Moves._stored  # noqa: SLF001  # the planted fault

    async def later(self: Moves, *what: Any, **how: Any) -> None:
        self._run(stored(self, *what, **how))

    monkeypatch.setattr(Moves, "_stored", later)
    with pytest.raises(AssertionError):
        requested(tmp_path, 0, "redirected, power lost", waits=1)


@pytest.mark.slow
def test_a_request_that_meets_a_swap_halfway_is_found(tmp_path, monkeypatch):
    monkeypatch.setattr(Moves, "_cleaned", lambda *_: set())
    with pytest.raises((AssertionError, InternalError)):
        requested(tmp_path, 0, "cancelled", waits=1)


@pytest.mark.thinned
@pytest.mark.move("E85")
@pytest.mark.parametrize("seed", range(sized(2, 4, 10)))
def test_e85_a_stop_before_any_call_loses_nothing(tmp_path, seed):
    for call in calls(tmp_path / "all", seed):
        stop(tmp_path / str(call), seed, call)


def stop(folder: Path, seed: int, call: int) -> None:
    rows = Rows()
    life = Life(prepare(folder), rows, random.Random(seed))
    stops: list[asyncio.Task[None]] = []

    async def work() -> None:
        await life.start()
        await life.write(5)
        writing = asyncio.ensure_future(life.write(30))
        for target in ("b", "c", "a"):
            if not stops:
                await life.move(target)
            for _ in range(20_000):
                if stops or not life.moves.all:
                    break
                await asyncio.sleep(0)
        await writing
        await asyncio.wait(stops)
        await life.commits.flushed(life.log, life.log.log_end)

    life.act_at = call
    life.act = lambda: stops.append(asyncio.ensure_future(life.moves.close()))
    assert not run(life, work)
    check(life)
    assert life.acked == 2 * life.appended
    after = Life(folder, rows, random.Random(seed), appended=life.appended, acked=life.acked)
    restart(after)
    shutil.rmtree(folder)


@pytest.mark.move("E66")
def test_e66_an_open_segment_that_is_sealed_before_it_is_opened_is_copied(tmp_path, monkeypatch):
    life = Life(prepare(tmp_path / "disks"), Rows(), random.Random(1))
    copy_of, found = Route.copy_of, []

    def late(self: Route, move: Move, segment: Segment) -> Copy:
        if not segment.is_sealed and not found:
            found.append(segment)
            life.log.roll()
            life.loop.call_soon_threadsafe(life.commits.schedule, life.log)
            raise FileNotFoundError(segment.path)
        return copy_of(self, move, segment)

    monkeypatch.setattr(Route, "copy_of", late)

    async def work() -> None:
        await life.start()
        await life.write(5)
        await life.move("b")
        await life.quiet()
        await life.moves.close()

    assert not run(life, work)
    check(life)
    assert found
    assert life.place == "b"


@pytest.mark.move("E66")
def test_a_segment_that_replaces_others_after_all_are_copied_is_copied(tmp_path, monkeypatch):
    """As a pass of the cleaner does, between the last look at the segments and the swap."""
    life = Life(prepare(tmp_path / "disks"), Rows(), random.Random(1))
    quiet, merged = Route.quiet, []

    async def late(self: Route, move: Move) -> bool:
        if not merged:
            old = [one for one in life.log.segments if one.is_sealed][:2]
            size = sum(one.size_bytes for one in old)
            new = Segment(life.log.folder, old[0].first, old[1].next_offset, size)
            merged.append(new)
            path = cleaned_path(life.log.folder, new.first)
            life.disk.write_synced(path, [one.path.read_bytes() for one in old])
            assert life.log.replace(old, new, path)
        return await quiet(self, move)

    monkeypatch.setattr(Route, "quiet", late)

    async def work() -> None:
        await life.start()
        await life.write(12)
        await life.commits.flushed(life.log, life.log.log_end)
        await life.move("b")
        await life.quiet()
        await life.moves.close()

    assert not run(life, work)
    assert life.place == "b"
    assert merged[0] in life.log.segments
    check(life)
    assert life.log.log_end == 2 * life.appended

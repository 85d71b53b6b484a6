"""Goal: a move holds up producers and consumers for a rename only, however large the partition is.

Method: the real log and moves on a model of disks (`moving_log`): what a step does, and which calls
of the disk the event loop makes while appends wait. How long these take, `bench/moves.py` measures.
"""

from __future__ import annotations

import gc
import io
import os
import random
import threading
from types import BuiltinFunctionType
from typing import TYPE_CHECKING

import pytest

from kit.runs.moving_log import Life, Rows, check, prepare, run, until
from logmirror.broker.moves import copier, mover
from logmirror.broker.moves.copying import SegmentCopy
from logmirror.broker.moves.move import MoveState

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from logmirror.broker.moves.move import Move

STEP_BYTES = 200
"""Less than two batches."""

LAST_BYTES = 400
"""Less than three."""

UNNOTED = {os.fspath}
"""It is no call of the system."""


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mover, "_RETRY_S", 0)
    monkeypatch.setattr(copier, "_FIRST_S", 60)  # the model decides when a flush ends, not the time


@pytest.mark.move("E45")
def test_e45_records_are_produced_and_read_while_a_step_of_the_copy_hangs(tmp_path, monkeypatch):
    life = Life(prepare(tmp_path / "dirs"), Rows(), random.Random(3))
    append, before, is_held, steps = SegmentCopy.append, life.disk.before, [True], [0]
    in_threads, on_loop, calls = list[int](), list[int](), set[str]()

    def noted(count: int, call: str) -> None:
        if threading.current_thread() is threading.main_thread():
            calls.add(call)
        before(count, call)

    def hanging(copy: SegmentCopy, end: int, limit_bytes: int) -> int:
        steps[0] += 1
        while is_held[0]:
            life.disk.sync(copy.file)  # a step of the executor, see `Stepped`
        count = append(copy, end, limit_bytes)
        is_on_loop = threading.current_thread() is threading.main_thread()
        (on_loop if is_on_loop else in_threads).append(count)
        return count

    monkeypatch.setattr(SegmentCopy, "append", hanging)
    monkeypatch.setattr(copier, "_STEP_BYTES", STEP_BYTES)
    monkeypatch.setattr(copier, "_SHORT_STEP_BYTES", STEP_BYTES)
    monkeypatch.setattr(copier, "_LAST_BYTES", LAST_BYTES)

    async def work() -> None:
        await life.start()
        await life.write(30)
        life.disk.before = noted
        await life.move("b")
        await until(lambda: steps[0] > 0)
        await life.write(10)
        await life.commits.flushed(life.log, life.log.log_end)
        assert life.acked == 80
        found, _ = life.log.read_committed(78, 1000, at_least_one=True)
        assert found
        assert (steps, in_threads, on_loop, life.place) == ([1], [], [], "a")
        is_held[0] = False
        await life.quiet()
        await life.moves.close()

    assert not run(life, work)
    check(life)
    assert life.place == "b"
    batch_bytes = life.log.size_bytes / life.appended
    assert len(in_threads) > life.appended / 3
    assert max(in_threads) < STEP_BYTES + 1.1 * batch_bytes
    assert 0 < max(on_loop) <= LAST_BYTES
    assert calls == {"append", "create", "rename"}, "no flush on the event loop"


def calls_in_a_hold(folder: Path, monkeypatch: pytest.MonkeyPatch, batches: int) -> list[str]:
    """Every call of the system while appends wait, in the attempt to swap that succeeds."""
    life = Life(prepare(folder), Rows(), random.Random(3))
    try_swap = mover.Moves._try_swap  # noqa: SLF001  # the hold
    calls, found, is_held = list[str](), list[list[str]](), [False]

    def watched(moves: mover.Moves, move: Move) -> None:
        calls.clear()
        is_held[0] = move.state is MoveState.FOLLOWING
        gc.disable()  # it closes files, and reports what other tests left
        try:
            try_swap(moves, move)
        finally:
            gc.enable()
        if is_held[0] and move.state is MoveState.MOVED:
            found.append(calls.copy())
        is_held[0] = False

    def noting(name: str, call: Callable[..., object]) -> Callable[..., object]:
        def noted(*args: object, **named: object) -> object:
            if is_held[0] and threading.current_thread() is threading.main_thread():
                calls.append(name)
            return call(*args, **named)

        return noted

    async def work() -> None:
        await life.start()
        await life.write(batches)
        await life.move("b")
        await life.quiet()
        await life.moves.close()

    with monkeypatch.context() as patch:
        patch.setattr(mover.Moves, "_try_swap", watched)
        patch.setattr(io, "open", noting("open", io.open))  # that of `pathlib`
        for name, call in vars(os).copy().items():
            if isinstance(call, BuiltinFunctionType) and call not in UNNOTED:
                patch.setattr(os, name, noting(name, call))
        assert not run(life, work)
    check(life)
    assert life.place == "b"
    assert len(found) == 1
    return found[0]


@pytest.mark.move("E45", "E60")
def test_e60_appends_wait_for_one_rename_however_large_the_log_is(tmp_path, monkeypatch):
    """While they wait, nothing is read, written, flushed, opened, listed or removed."""
    for batches in (3, 300):
        calls = calls_in_a_hold(tmp_path / str(batches), monkeypatch, batches)
        assert calls == ["rename"], batches

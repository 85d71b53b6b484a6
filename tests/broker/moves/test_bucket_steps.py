"""Goal: no request at any moment of a move into or out of a bucket loses, repeats or revives a
record, or leaves anything where no partition is.

Method: all of a broker runs in steps, on a model of disks and a store in memory
(`stepped_bucket`). Before and after each call of either, a request comes: it cancels the move, or
names another directory, or deletes records or the topic. In some runs the power is lost when it is
acknowledged. In the end, and after a start, the partition is where the last request wants it, once,
with every acknowledged record at its offset; it takes appends; and no folder, object or row is left
of anything else.
"""

from __future__ import annotations

import gc
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest

from kit.runs.bucket_steps import ALL, DELETING, WAYS, requested
from kit.runs.enumerated_requests import HOW
from kit.tiers import PLANTED, sized
from logmirror.broker.moves.bucket_routes import IntoBucket
from logmirror.broker.moves.move import MoveState
from logmirror.broker.moves.mover import Moves
from logmirror.broker.topic_removal import TopicRemoval
from logmirror.errors import InternalError

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [
    pytest.mark.slow,
    # What runs when the power is lost is abandoned.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
_STEPS = {
    "into": {
        *("move.prepared", "move.copied", "move.durable", "move.swapped", "move.arrived"),
        *("move.placed", "move.named", "move.freed", "move.done", "move.removed"),
        *("make_folder", "create", "append", "sync", "open_for_reading", "rename", "sync_folder"),
        *("unlink", "remove_folder", "store.stage", "store.write", "store.finish"),
        *("store.publish", "store.create", "store.names"),
    },
    "out": {
        *("move.prepared", "move.copied", "move.durable", "move.swapped", "move.arrived"),
        *("move.placed", "move.named", "move.freed", "move.done", "move.removed"),
        *("make_folder", "create", "append", "sync", "open_for_reading", "rename", "sync_folder"),
        *("unlink", "write_synced", "write_at", "store.create", "store.read", "store.names"),
        "store.delete",
    },
}
"""What a move consists of. A request comes before and after each."""


@pytest.fixture(autouse=True)
def _collected() -> Iterator[None]:
    """Collect what was abandoned in this test, not in a later one."""
    yield
    gc.collect()


@pytest.mark.thinned
@pytest.mark.move("E20", "E87", "E98")
@pytest.mark.timeout(sized(300, 600, 14_400))
@pytest.mark.parametrize("how", sized(HOW[:2], HOW, HOW))
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("seed", range(sized(1, 1, 3)))
def test_e20_a_request_before_any_call_of_disk_or_bucket_is_carried_out(tmp_path, seed, way, how):
    """In the nights in all orders: others make 0, 1, 2 ... steps before the request is stored."""
    orders = sized((0,), (0, ALL), None)
    found = Counter(requested(tmp_path, seed, way, how, every=sized(2, 1, 1), orders=orders))
    assert not _STEPS[way] - found.keys()
    assert found["move.copied"] > 2
    assert found["move.swapped"] == found["move.done"] == 1


@pytest.mark.gate("a run for every second call of a move")
@pytest.mark.move("E35", "E98")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("how", DELETING)
@pytest.mark.parametrize("way", WAYS)
def test_e98_a_deletion_before_any_call_of_disk_or_bucket_is_not_undone(tmp_path, way, how):
    requested(tmp_path, 0, way, how, every=sized(2, 2, 1), orders=(0,))


@PLANTED
def test_what_a_cancelled_move_has_uploaded_and_is_not_removed_is_found(tmp_path, monkeypatch):
    monkeypatch.setattr(IntoBucket, "left", lambda *_: [])
    with pytest.raises(AssertionError, match="left is"):
        requested(tmp_path, 0, "into", "cancelled", orders=(0,))


@PLANTED
def test_objects_of_a_partition_that_has_left_are_found(tmp_path, monkeypatch):
    monkeypatch.setattr(TopicRemoval, "remove_residence", lambda *_: None)
    with pytest.raises(AssertionError, match="left is"):
        requested(tmp_path, 0, "out", "redirected", every=20, orders=(0,))


@PLANTED
@pytest.mark.parametrize("way", WAYS)
def test_a_cancellation_that_does_not_stop_a_move_that_follows_is_found(tmp_path, monkeypatch, way):
    detach = Moves._detach  # noqa: SLF001  # the planted fault

    def ignored(self: Moves, move: Any, state: MoveState, *more: Any) -> None:
        if state is not MoveState.CANCELLED or move.state is not MoveState.FOLLOWING:
            detach(self, move, state, *more)

    async def kept(self: Moves, move: Any) -> None:
        if move.state is MoveState.CANCELLED:
            await remove(self, move)

    remove = Moves._remove  # noqa: SLF001  # the same
    monkeypatch.setattr(Moves, "_detach", ignored)
    monkeypatch.setattr(Moves, "_remove", kept)
    with pytest.raises(AssertionError):
        requested(tmp_path, 0, way, "cancelled", orders=(0,))


@PLANTED
@pytest.mark.parametrize("way", WAYS)
def test_a_request_that_is_acknowledged_before_it_is_stored_is_found(tmp_path, monkeypatch, way):
    stored = Moves._stored  # noqa: SLF001  # the planted fault

    async def later(self: Moves, *what: Any, **how: Any) -> None:
        self._run(stored(self, *what, **how))

    monkeypatch.setattr(Moves, "_stored", later)
    with pytest.raises(AssertionError):
        requested(tmp_path, 0, way, "redirected, power lost", orders=(0,))


@PLANTED
@pytest.mark.parametrize("way", WAYS)
def test_a_request_that_does_not_wait_for_the_swap_in_progress_is_found(tmp_path, monkeypatch, way):
    monkeypatch.setattr(Moves, "_cleaned", lambda *_: set())
    with pytest.raises((AssertionError, InternalError)):
        requested(tmp_path, 0, way, "redirected", orders=(0,))

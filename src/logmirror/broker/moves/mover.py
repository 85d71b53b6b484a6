"""Moves of partitions to other log directories (KIP-113), while they are written and read.

    begun -> copying <-> following -> moved
      any of them -> cancelled, also by a move to yet another directory
      copying, following -> failed -> copying, when it is requested again

- M1 A move is begun when its row is durable (`metadata`). It ends with the row. After a crash the
  row alone decides what a folder is, never the order of the directories.
- M2 The copy is `TOPIC/PARTITION.NONCE-future` in the target. Sealed segments are copied first,
  each verified and durable; then the open one, up to the last few bytes.
- M3 Following: the rest is appended to the copy at once, and from then on the log writes each batch
  to both files (`Shadow`). When everything from before is durable, too, whatever was acknowledged
  is durable in both places.
- M4 The swap is one rename, `PARTITION.NONCE-future` to `PARTITION`, between two flushes, on the
  event loop: no append, read, cancellation or deletion can meet it halfway. A flush after it makes
  the name durable before it reports a record. Nothing waits for the swap.
- M5 The old folder becomes `PARTITION.NONCE-delete` when the new name is durable, the row is
  removed, and then the files. If both folders exist after a crash, the row says that the target is
  right.
- M6 A failed move leaves the partition where it is, and its row, so that a restart tries again.

All methods run on the event loop; files are copied in threads, a step at a time, the moves in turn.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections import deque
from typing import TYPE_CHECKING, Any, Final, TypeVar

from logmirror import failpoints
from logmirror.broker.log.shadow import Shadow
from logmirror.broker.log_dirs.placement import absolute
from logmirror.broker.metadata import MoveRow
from logmirror.broker.moves.copying import SegmentCopy, is_copied
from logmirror.broker.moves.counts import MoveCounts
from logmirror.broker.moves.move import (
    Move,
    MoveRequest,
    MoveState,
    Whole,
    finish_swap,
    make_durable,
    mark_of,
    prepare,
    remove_folder,
)
from logmirror.clock import new_nonce
from logmirror.errors import CorruptionError, InternalError, LogmirrorError, UnavailableError

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterable
    from concurrent.futures import Executor
    from pathlib import Path

    from logmirror.broker.log.disk import Disk
    from logmirror.broker.log.group_commit import GroupCommit
    from logmirror.broker.log.partition_log import PartitionLog
    from logmirror.broker.log.segment import Segment
    from logmirror.broker.metadata import MetadataStore
    from logmirror.broker.moves.throttle import Throttle

_Result = TypeVar("_Result")
_LOG: Final = logging.getLogger(__name__)
_STEP_BYTES: Final = 4 * 1024 * 1024
"""What one step copies, before other moves have their turn."""

_ACTIVE: Final = 8
"""Moves in turn, so that few files are open; the others have not begun."""

_STEPS: Final = 2
"""Steps that run at once."""

_RETRY_S: Final = 0.02
_CLEAN_S: Final = 5.0
_LAST_BYTES: Final = 128 * 1024
"""What is copied on the event loop, at most: well below a millisecond."""


class Moves:
    """The moves of a broker.

    Args:
        store: The broker's database.
        commits: What flushes and removes files.
        disk: The system calls.
        threads: For copying.
        executor: For the database.
        throttle: The limit of all moves together.
    """

    def __init__(  # noqa: PLR0913, PLR0917  # the broker's parts
        self,
        store: MetadataStore,
        commits: GroupCommit,
        disk: Disk,
        threads: Executor,
        executor: Executor,
        throttle: Throttle,
    ) -> None:
        self._store, self._commits, self._disk = store, commits, disk
        self._threads, self._executor = threads, executor
        self.throttle, self.counts = throttle, MoveCounts()
        self._moves: dict[PartitionLog, Move] = {}
        self._backlog: deque[Move] = deque()
        self._active: set[Move] = set()
        self._waiting: deque[Move] = deque()
        self._steps: dict[Move, asyncio.Task[None]] = {}
        self._background: set[asyncio.Task[None]] = set()
        self.is_stopping = False
        self.turn = asyncio.Lock()
        """Of `change`."""

        self.when_moved: Callable[[Path, Path], None] = lambda _old, _new: None
        """Called after each swap, with the old and the new folder."""

    def of(self, log: PartitionLog) -> Move | None:
        """Return the move of a partition that is in progress, or failed."""
        return self._moves.get(log)

    @property
    def all(self) -> list[Move]:
        """All moves that are in progress, or failed."""
        return list(self._moves.values())

    # Requests

    async def change(self, wanted: Iterable[MoveRequest]) -> set[PartitionLog]:
        """Begin moves, redirect and cancel them, durably. The caller makes one call at a time.

        Args:
            wanted: The requests.

        Returns:
            The logs that cannot be moved: the directory has a folder of the partition already,
            which is not this partition.

        Raises:
            LogmirrorError: The database could not be written; the moves of these partitions failed.
        """
        wanted = list(wanted)
        refused = await self._occupied(wanted)
        begun, dropped = list[Move](), list[Move]()
        for key, log, target in wanted:
            old = self._moves.get(log)
            is_same = old is not None and old.is_active and old.target == target
            if log in refused or is_same:
                continue
            if old is not None:
                self._detach(old, MoveState.CANCELLED)
                dropped.append(old)
            if target != _log_dir(log):
                begun.append(Move(key, log, target, new_nonce() + new_nonce()))
        rows = [MoveRow(*move.key, absolute(move.target), move.nonce) for move in begun]
        ended = [move.key for move in dropped]
        try:
            await self._stored(rows, ended)
        except LogmirrorError as error:
            for move in dropped:
                self._fail(move, error)
            raise
        for move in dropped:
            self._moves.pop(move.log, None)
            self._run(self._remove(move))
        self._begin(move for move in begun if move.log.failure is None)
        return refused

    async def _occupied(self, wanted: list[MoveRequest]) -> set[PartitionLog]:
        """Return the logs whose target has a folder of the partition already.

        So are those whose last move has not removed its old folder within `_CLEAN_S`. Afterwards,
        and until the next turn of the event loop, no swap of the others is being completed.
        """
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + _CLEAN_S
        while True:
            for log in self._cleaned(wanted):
                cleaning = self._moves[log].cleaning if log in self._moves else None
                if cleaning is not None:
                    await asyncio.wait([cleaning], timeout=max(0, deadline_s - loop.time()))
            places = {
                log: target / log.folder.parent.name / log.folder.name
                for _, log, target in wanted
                if target != _log_dir(log)
            }
            found = await self._in_thread(_existing, places)
            late = self._cleaned(wanted)
            if not late or loop.time() >= deadline_s:
                return found | late

    def _cleaned(self, wanted: list[MoveRequest]) -> set[PartitionLog]:
        """Return the logs whose last move is removing its old folder."""
        moves = (self._moves.get(log) for _, log, _ in wanted)
        return {move.log for move in moves if move is not None and move.cleaning is not None}

    def open(self, unfinished: Iterable[Move], gone: list[Path]) -> None:
        """Continue the moves of an earlier start, and remove what is left of others."""
        self._begin(unfinished)
        if gone:
            self._run(self._remove_all(gone))

    def _begin(self, moves: Iterable[Move]) -> None:
        for move in moves:
            self._moves[move.log] = move
            self._backlog.append(move)
        self._pump()

    async def forget(self, logs: Iterable[PartitionLog]) -> None:
        """End the moves of a deleted topic, whose folders are removed by the caller."""
        for log in logs:
            move = self._moves.pop(log, None)
            if move is not None:
                self._detach(move, MoveState.CANCELLED)
                await self._idle(move)

    async def close(self) -> None:
        """End the work in progress; the next start continues."""
        self.is_stopping = True
        self._waiting.clear()
        for move in self._moves.values():
            self._detach(move, move.state)
        while left := {*self._steps.values(), *self._background}:
            await asyncio.wait(left)

    # Copying

    def _pump(self) -> None:
        while len(self._steps) < _STEPS and not self.is_stopping:
            while self._backlog and len(self._active) < _ACTIVE:
                move = self._backlog.popleft()
                self._active.add(move)
                self._waiting.append(move)
            if not self._waiting:
                return
            move = self._waiting.popleft()
            if not move.is_active:
                self._active.discard(move)
            else:
                self._steps[move] = step = asyncio.ensure_future(self._step(move))
                step.add_done_callback(functools.partial(self._stepped, move))

    def _stepped(self, move: Move, _: asyncio.Task[None]) -> None:
        del self._steps[move]
        self._waiting.append(move)
        self._pump()

    async def _step(self, move: Move) -> None:
        try:
            move.log.check_online()
            if move.state is MoveState.FOLLOWING:
                self._try_swap(move)
                if move.state is MoveState.FOLLOWING:
                    await asyncio.sleep(_RETRY_S)
            elif await self.throttle.wait():
                await self._copy(move)
        except (LogmirrorError, OSError) as error:
            if move.is_active:
                self._fail(move, error)
        except Exception as error:  # noqa: BLE001  # a defect must not end other moves
            if move.is_active:
                self._fail(move, InternalError("move failed", cause=repr(error)))

    async def _copy(self, move: Move) -> None:
        log = move.log
        if not move.is_prepared:
            await self._in_thread(prepare, self._disk, move)
            move.is_prepared = True
        for segment in log.segments:
            if segment.is_sealed and segment not in move.copied:
                await self._copy_sealed(move, segment)
                return
        tail = log.open_segment
        for segment in log.segments:
            if segment is not tail and not segment.is_sealed:
                await self._commits.flushed(log, segment.next_offset)
                return
        if tail is not None:
            copy = await self._copy_of(move, tail)
            end = tail.size_bytes
            if end - copy.position > _LAST_BYTES:
                await self._advance(move, copy, end)
                return
        if move.state is MoveState.COPYING and log.open_segment is tail:
            await self._follow(move, tail)

    async def _copy_sealed(self, move: Move, segment: Segment) -> None:
        try:
            if move.copy is None and segment.path.name in move.names:  # from before a restart
                if await self._in_thread(is_copied, self._disk, segment, move.future):
                    self._is_copied(move, segment)
                    return
                move.names.discard(segment.path.name)
            copy = await self._copy_of(move, segment)
            await self._advance(move, copy, segment.size_bytes)
            if copy.position == segment.size_bytes:
                await self._in_thread(copy.finish)
                self._is_copied(move, segment)
        except (OSError, CorruptionError):
            if segment in move.log.segments:
                raise
            move.copy = None  # it was deleted, or compacted, meanwhile

    def _is_copied(self, move: Move, segment: Segment) -> None:
        failpoints.reach("move.copied")
        move.copy = None
        move.copied.add(segment)
        move.next_offset = max(move.next_offset, segment.next_offset)

    async def _copy_of(self, move: Move, segment: Segment) -> SegmentCopy:
        if move.copy is None or move.copy.segment is not segment:
            move.copy = None
            move.copy = await self._in_thread(SegmentCopy, self._disk, segment, move.future)
        return move.copy

    async def _advance(self, move: Move, copy: SegmentCopy, end: int) -> None:
        count = await self._in_thread(copy.step, end, self.throttle.limit(_STEP_BYTES))
        self.throttle.count(count)
        self.counts.copied_bytes += count
        move.next_offset = max(move.next_offset, copy.next_offset)

    # Following, and the swap

    async def _follow(self, move: Move, tail: Segment | None) -> None:
        log = move.log
        if tail is not None and move.copy is not None:
            self.counts.copied_bytes += move.copy.step(tail.size_bytes, tail.size_bytes)
            log.shadow = move.shadow = Shadow(self._disk, move.copy.file)
        move.next_offset, whole = log.log_end, Whole.of(log)
        move.state, move.whole = MoveState.FOLLOWING, whole
        try:
            await self._in_thread(make_durable, self._disk, move, whole, move.copy)
        except FileNotFoundError:
            if log.snapshot == whole.snapshot:
                raise
        if move.state is MoveState.FOLLOWING:
            move.is_durable = True
            log.when_synced = functools.partial(self._try_swap, move)
            self._try_swap(move)

    def _try_swap(self, move: Move) -> None:
        """Swap, if nothing works on the partition's files; copy again if the copy is not whole."""
        log = move.log
        if move.state is not MoveState.FOLLOWING or not move.is_durable or log.failure is not None:
            return
        if not log.is_at_rest or self._commits.is_busy(log):
            return
        if move.shadow is not None and move.shadow.failure is not None:
            self._fail(move, move.shadow.failure)
            return
        if Whole.of(log) != move.whole or log.shadow is not move.shadow:
            self._detach(move, MoveState.COPYING)
            return
        old = log.folder
        new = move.target / old.parent.name / old.name
        began_s = self.counts.now_s()
        try:
            self._disk.rename(move.future, new)  # nothing has this name, see `_prepare`
        except OSError as error:
            self._fail(move, error)
            return
        failpoints.reach("move.swapped")
        log.relocate(new)
        self._detach(move, MoveState.MOVED)
        self._commits.touch(log)
        self.when_moved(old, new)
        self.counts.swapped(began_s)
        _LOG.info("%s moved to %s", old, new)
        move.cleaning = self._run(self._clean(move, old, new))

    async def _clean(self, move: Move, old: Path, new: Path) -> None:
        try:
            gone = await self._in_thread(finish_swap, self._disk, old, new, move.nonce)
            await self._stored([], [move.key])
        except (LogmirrorError, OSError) as error:
            _LOG.error("%s: the next start removes it: %s", old, error)  # no defect
            return
        finally:
            if self._moves.get(move.log) is move:
                del self._moves[move.log]
        failpoints.reach("move.done")
        await self._in_thread(self._disk.unlink, mark_of(new, move.nonce))
        await self._remove_all([gone])

    # The end of a move

    def _detach(self, move: Move, state: MoveState) -> None:
        """Stop to follow, and set the state."""
        log = move.log
        if move.shadow is not None and log.shadow is move.shadow:
            log.shadow = None
        log.when_synced = _nothing
        move.copy = move.shadow = None
        move.is_durable, move.state = False, state

    def _fail(self, move: Move, error: LogmirrorError | OSError) -> None:
        if not isinstance(error, LogmirrorError):
            path = error.filename or (move.copy.path if move.copy is not None else move.future)
            reason = "a file could not be copied"
            error = UnavailableError(reason, cause=str(error), path=str(path))
        self._detach(move, MoveState.FAILED)
        move.failure = error
        _LOG.error("%s: the move to %s failed: %s", move.log.folder, move.target, error)

    async def _remove(self, move: Move) -> None:
        """Remove the copy of a move that was cancelled."""
        await self._idle(move)
        await self._remove_all([move.future])

    async def _remove_all(self, folders: list[Path]) -> None:
        for folder in folders:
            try:
                await self._in_thread(remove_folder, folder)
            except OSError as error:
                _LOG.warning("%s: the next start removes it: %s", folder, error)

    async def _idle(self, move: Move) -> None:
        """Wait until nothing works on a move."""
        while (step := self._steps.get(move)) is not None:
            await asyncio.wait([step])
        if move.cleaning is not None:
            await asyncio.wait([move.cleaning])

    def _run(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.ensure_future(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task

    async def _in_thread(self, call: Callable[..., _Result], *args: Any) -> _Result:  # noqa: ANN401  # those of the call
        return await asyncio.get_running_loop().run_in_executor(self._threads, call, *args)

    async def _stored(self, begun: list[MoveRow], ended: list[tuple[bytes, int]]) -> None:
        if begun or ended:
            loop = asyncio.get_running_loop()
            await loop.run_in_executor(self._executor, self._store.change_moves, begun, ended)


def _existing(places: dict[PartitionLog, Path]) -> set[PartitionLog]:
    return {log for log, path in places.items() if path.exists()}


def _nothing() -> None:
    pass


def _log_dir(log: PartitionLog) -> Path:
    return log.folder.parent.parent

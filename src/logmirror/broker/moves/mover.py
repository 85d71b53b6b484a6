"""Moves of partitions to other log directories (KIP-113), while they are written and read.

    begun -> copying <-> following -> moved
      copying, following, failed -> cancelled, also by a move to yet another directory
      copying, following -> failed; requested again, it is cancelled and another one begins

`Move.enter` allows these changes, and no others.

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
  right. So a partition is not moved again before its old folder has no name of a partition.
- M6 A failed move leaves the partition where it is, and its row, so that a restart tries again.

All methods run on the event loop; files are copied in threads, a step at a time, the moves in
`turns`.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from typing import TYPE_CHECKING, Any, Final

from logmirror import failpoints
from logmirror.broker.database import GroupedChanges
from logmirror.broker.log.shadow import Shadow
from logmirror.broker.log_dirs.failures import FULL
from logmirror.broker.moves.copier import Copier, last_copy
from logmirror.broker.moves.counts import MoveCounts
from logmirror.broker.moves.folders import free_place, log_dir_of, taken
from logmirror.broker.moves.move import Move, MoveRequest, MoveState, Whole, mark_of, remove_folder
from logmirror.broker.moves.routes import Routes
from logmirror.broker.moves.turns import Turns
from logmirror.broker.place_rows import MoveRow
from logmirror.clock import SYSTEM_CLOCK, new_nonce
from logmirror.errors import InternalError, LogmirrorError, UnavailableError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Iterable
    from concurrent.futures import Executor
    from pathlib import Path

    from logmirror.broker.log.disk import Disk
    from logmirror.broker.log.group_commit import GroupCommit
    from logmirror.broker.log.partition_log import PartitionLog
    from logmirror.broker.metadata import MetadataStore
    from logmirror.broker.moves.throttle import Throttle

_LOG: Final = logging.getLogger(__name__)
_RETRY_S: Final = 0.02
_PAUSE_S: Final = 2.0
_AWAY_MS: Final = 600_000.0
"""How long a move to or from a bucket waits for it, before it fails."""

_CLEAN_S: Final = 5.0


class Moves:
    """The moves of a broker.

    Args:
        store: The broker's database.
        commits: What flushes and removes files.
        disk: The system calls.
        threads: For copying.
        executor: For the database.
        throttle: The limit of all moves together.
        routes: What differs between the ways of a move; None: all directories are on disks.
    """

    def __init__(  # noqa: PLR0913, PLR0917  # the broker's parts
        self,
        store: MetadataStore,
        commits: GroupCommit,
        disk: Disk,
        threads: Executor,
        executor: Executor,
        throttle: Throttle,
        routes: Routes | None = None,
    ) -> None:
        self._store, self._commits, self._disk = store, commits, disk
        self._routes = routes or Routes(disk)
        self._changes = GroupedChanges(executor)
        self.throttle, self.counts = throttle, MoveCounts()
        self._copier = Copier(self._routes, commits, threads, throttle, self.counts)
        self._moves: dict[PartitionLog, Move] = {}
        self._turns = Turns(self._step)
        self._background: set[asyncio.Task[None]] = set()
        self._stopping = asyncio.Event()
        self.turn = asyncio.Lock()  # of `change`

        self.when_moved: Callable[[Path, Path], None] = lambda _old, _new: None
        """Called after each swap, with the old and the new folder."""

        self.when_failed: Callable[..., None] = lambda _error, *_paths: None
        """Called after an error, with paths in the log directories that it may be of."""

        self._lost: dict[Path, LogmirrorError] = {}
        self._dropped: set[Move] = set()
        """Cancelled moves, as long as something works on them."""

        self._held: set[PartitionLog] = set()
        self._unclean: dict[PartitionLog, tuple[Move, Path]] = {}
        """Logs whose last move could not remove its old folder: the move, and that folder."""

    def of(self, log: PartitionLog) -> Move | None:
        """Return the move of a partition that is in progress, or failed."""
        return self._moves.get(log)

    @property
    def all(self) -> list[Move]:
        """All moves that are in progress, or failed."""
        return list(self._moves.values())

    def name_of(self, log_dir: Path) -> str:
        """Return the name of a log directory for clients."""
        return self._routes.name_of(log_dir)

    # Requests

    async def change(self, wanted: Iterable[MoveRequest]) -> set[PartitionLog]:
        """Begin moves, redirect and cancel them, durably. The caller makes one call at a time.

        Args:
            wanted: The requests.

        Returns:
            The logs that cannot be moved. They are offline: a start may need the row of their last
            move (H1 in `bucket.residences`). Or the directory has a folder of the partition
            already, which is not this partition.

        Raises:
            LogmirrorError: The database could not be written; the moves of these partitions failed.
        """
        wanted = list(wanted)
        refused = await self._occupied(wanted)
        refused |= {log for _, log, _ in wanted if log.failure is not None}
        begun, dropped = list[Move](), list[Move]()
        for key, log, target in wanted:
            old = self._moves.get(log)
            if log in refused or self._is_moving_to(log, target):
                continue
            if old is not None:
                self._detach(old, MoveState.CANCELLED)
                dropped.append(old)
            if target != log_dir_of(log):
                begun.append(Move(key, log, target, new_nonce() + new_nonce()))
        name_of = self._routes.name_of
        rows = [MoveRow(*move.key, name_of(move.target), move.nonce) for move in begun]
        try:
            await self._stored(rows, dropped)
        except LogmirrorError as error:
            for move in dropped:
                self._fail(move, error)
            raise
        for move in dropped:
            self._moves.pop(move.log, None)
            self._dropped.add(move)
            self._run(self._remove(move))
        self._begin(move for move in begun if move.log.failure is None)
        return refused

    async def _occupied(self, wanted: list[MoveRequest]) -> set[PartitionLog]:
        """Return the logs whose target has a folder of the partition already.

        So are those whose last move has not removed its old folder within `_CLEAN_S`; one that
        could not is tried again (M5). Afterwards, and until the next turn of the event loop, no
        swap of the others is being completed.
        """
        loop = asyncio.get_running_loop()
        leaving = {log for _, log, target in wanted if target != log_dir_of(log)}
        for log in leaving & self._unclean.keys():
            self._clean_again(log)
        deadline_s = loop.time() + _CLEAN_S
        while True:
            for log in self._cleaned(wanted):
                cleaning = self._moves[log].cleaning if log in self._moves else None
                if cleaning is not None:
                    await asyncio.wait([cleaning], timeout=max(0, deadline_s - loop.time()))
            places = {
                log: target / log.folder.parent.name / log.folder.name
                for _, log, target in wanted
                if target != log_dir_of(log)
                and not self._is_moving_to(log, target)  # its swap may be made meanwhile
                and not self._routes.is_in_bucket(target)
            }
            found = await self._copier.in_thread(taken, places)
            late = self._cleaned(wanted)
            if not late or loop.time() >= deadline_s:
                break
        for log in [log for log, is_empty in found.items() if is_empty and log not in self._held]:
            with contextlib.suppress(OSError):
                self._run(self._remove_all([free_place(self._disk, log, places[log])]))
                del found[log]
        return found.keys() | late | leaving & self._unclean.keys()

    def _is_moving_to(self, log: PartitionLog, target: Path) -> bool:
        return (move := self.of(log)) is not None and move.is_active and move.target == target

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
            move.way = self._routes.way_of(move.log.folder, move.target)
            self._moves[move.log] = move
            self._turns.add(move)
            if move.target in self._lost:
                self._fail(move, self._lost[move.target].copy())
        self._turns.go_on()

    def lose(self, log_dir: Path, failure: LogmirrorError) -> None:
        """Fail the moves from and to a log directory that failed, also those that begin later."""
        self._lost[log_dir] = failure
        for move in self.all:
            if move.is_active and log_dir in {move.target, log_dir_of(move.log)}:
                self._fail(move, failure.copy())

    @contextlib.asynccontextmanager
    async def held(self, logs: Collection[PartitionLog]) -> AsyncIterator[None]:
        """Within it, no folder of these partitions gets or loses its name.

        A removal of an old folder that takes longer than `_CLEAN_S` is not waited for.
        """
        self._held.update(logs)
        try:
            if cleaning := [m.cleaning for m in self.all if m.log in logs and m.cleaning]:
                await asyncio.wait(cleaning, timeout=_CLEAN_S)
            yield
        finally:
            self._held.difference_update(logs)
            for log in self._unclean.keys() & {*logs}:
                self._clean_again(log)

    async def forget(self, logs: Iterable[PartitionLog]) -> list[Path]:
        """End the moves of a deleted topic; return the old folders that they could not remove."""
        logs = set(logs)
        ended = [self._moves.pop(log) for log in logs & self._moves.keys()]
        for move in ended:
            if move.is_shown:  # before its next step, which would fail
                self._detach(move, MoveState.CANCELLED)
        for move in ended:
            await self._idle(move)
        left = [self._unclean.pop(log)[1] for log in logs & self._unclean.keys()]
        for move in [one for one in self._dropped if one.log in logs]:
            await self._idle(move)  # what it uploads is removed with the topic
        return left

    def stop(self) -> None:
        """Begin no more work."""
        self._stopping.set()
        self._turns.stop()

    async def close(self) -> None:
        """End the work in progress; the next start continues."""
        self.stop()
        for move in self._moves.values():  # a step in progress must not swap: nothing follows
            if move.is_active:
                self._detach(move, MoveState.COPYING)
        while left := {*self._turns.steps, *self._background, *self._behind()}:
            await asyncio.wait(left)

    def _behind(self) -> list[asyncio.Future[None]]:
        """What makes copies durable."""
        found = (move.behind for move in self._moves.values())
        return [behind for behind in found if behind is not None and not behind.done()]

    # Copying

    async def _step(self, move: Move) -> None:
        try:
            move.log.check_online()
            if move.state is MoveState.FOLLOWING:
                self._try_swap(move)
                if move.state is MoveState.FOLLOWING:
                    self._check_bucket(move)
                    await asyncio.sleep(_RETRY_S)
            elif await self.throttle.wait() and await self._copier.step(move):
                await self._follow(move)
        except (LogmirrorError, OSError) as error:
            if not move.is_active:
                pass
            elif self._may_pass(move, error):
                _LOG.info("%s: the move waits: %s", move.log.folder, error)
                await self._pause()
            else:
                self._fail(move, error)
        except Exception as error:  # noqa: BLE001  # a defect must not end other moves
            if move.is_active:
                self._fail(move, InternalError("move failed", cause=repr(error)))

    def _may_pass(self, move: Move, error: Exception) -> bool:
        """Whether to try again after an error; what was copied of the segment is dropped."""
        if move.log.failure is not None or not self._routes.of(move).is_passing(error):
            return False
        may_wait = move.may_wait(SYSTEM_CLOCK.monotonic_ms(), _AWAY_MS)
        self._detach(move, MoveState.COPYING)
        return may_wait

    def _check_bucket(self, move: Move) -> None:
        """Fail a move that could be completed if its bucket were not away for too long."""
        is_away = not self._routes.of(move).may_swap(move)
        if is_away and not move.may_wait(SYSTEM_CLOCK.monotonic_ms(), _AWAY_MS):
            self._fail(move, UnavailableError("the bucket cannot be written"))

    async def _pause(self) -> None:
        """Wait before a repetition; a stop ends it."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._stopping.wait(), _PAUSE_S)

    # Following, and the swap

    async def _follow(self, move: Move) -> None:
        if not move.is_active or self._stopping.is_set():
            return
        log, copy = move.log, last_copy(move)
        tail = log.open_segment
        if tail is not None and copy is not None:
            count = copy.append(tail.size_bytes, tail.size_bytes)
            self.throttle.count(count, self.throttle.rate)
            self.counts.copied_bytes += count
            log.shadow = move.shadow = Shadow(self._disk, copy.file)
        move.next_offset, move.followed_bytes = log.log_end, log.size_bytes
        move.enter(MoveState.FOLLOWING)
        move.whole = whole = Whole.of(log)
        try:
            await self._copier.in_thread(self._routes.of(move).make_durable, move, whole, copy)
        except FileNotFoundError:
            if log.snapshot == whole.snapshot:
                raise
        if move.state is MoveState.FOLLOWING:
            move.is_durable = True
            log.when_synced = functools.partial(self._try_swap, move)
            self._try_swap(move)

    def _try_swap(self, move: Move) -> None:
        """Swap, if nothing works on the partition's files; copy again if the copy is not whole."""
        log, tail = move.log, move.log.open_segment
        if move.state is not MoveState.FOLLOWING or not move.is_durable or log.failure is not None:
            return
        if (
            log in self._held
            or not log.is_at_rest
            or self._commits.is_busy(log)
            or not self._routes.of(move).may_swap(move)
        ):
            return
        if move.shadow is not None and move.shadow.failure is not None:
            self._fail(move, move.shadow.failure)
            return
        is_followed = log.shadow is move.shadow and (log.shadow is None) == (tail is None)
        if Whole.of(log) != move.whole or not is_followed:
            self._detach(move, MoveState.COPYING)
            return
        old = log.folder
        new = move.target / old.parent.name / old.name
        began_s = self.counts.now_s()
        try:
            self._disk.rename(move.future, new)  # nothing has this name, see `_occupied`
        except OSError as error:
            self._fail(move, error)
            return
        failpoints.reach("move.swapped")
        self._routes.of(move).leave(move)
        log.relocate(new, move.versions)
        self._detach(move, MoveState.MOVED)
        self._routes.of(move).enter(move)
        self._commits.touch(log)
        self.when_moved(old, new)
        self.counts.swapped(began_s)
        _LOG.info("%s moved to %s", *map(self._routes.shown, (old, new)))
        move.cleaning = self._run(self._clean(move, old, new))

    def _clean_again(self, log: PartitionLog) -> None:
        move, old = self._unclean[log]
        if (
            not self._stopping.is_set()
            and log not in self._held
            and not {log_dir_of(log), old.parent.parent} & self._lost.keys()
        ):
            del self._unclean[log]
            self._moves[log] = move
            move.cleaning = self._run(self._clean(move, old, log.folder))

    async def _clean(self, move: Move, old: Path, new: Path) -> None:
        try:
            if not await self._routes.of(move).placed(move):
                _LOG.error("%s: the next start decides where it is", new)
                return
            if move.log in self._held:  # a deletion has listed the folder, and removes it
                self._unclean[move.log] = move, old
                return
            gone = await self._copier.in_thread(self._routes.of(move).finish, old, new, move.nonce)
            await self._copier.in_thread(self._disk.unlink, mark_of(new, move.nonce))
            await self._stored([], [move], is_done=True)  # no start removes the mark afterwards
        except (LogmirrorError, OSError) as error:
            _LOG.error("%s: the next move or start removes it: %s", old, error)  # no defect
            self.when_failed(error, old, new)
            self._unclean[move.log] = move, old
            return
        finally:
            if self._moves.get(move.log) is move:
                del self._moves[move.log]
        failpoints.reach("move.done")
        if move.residence is not None:
            await self._copier.in_thread(self._routes.remove, move.residence)
        await self._remove_all([gone])

    # The end of a move

    def _detach(self, move: Move, state: MoveState, failure: LogmirrorError | None = None) -> None:
        """Enter a state in which the copy does not follow the log."""
        move.enter(state, failure)
        log = move.log
        if move.shadow is not None and log.shadow is move.shadow:
            log.shadow = None
        log.when_synced = lambda: None
        move.copy = move.shadow = None
        move.is_durable = False
        self._routes.of(move).end(move)

    def _fail(self, move: Move, error: LogmirrorError | OSError) -> None:
        self.when_failed(error, move.log.folder, move.target)
        if isinstance(error, OSError) and error.errno in FULL:
            self._run(self._make_room(move))
        if not isinstance(error, LogmirrorError):
            path = error.filename or (move.copy.path if move.copy is not None else move.future)
            error = UnavailableError("a file could not be copied", cause=str(error), path=str(path))
        self._detach(move, MoveState.FAILED, error)
        target = self.name_of(move.target)
        _LOG.error("%s: the move to %s failed: %s", move.log.folder, target, error)

    async def _make_room(self, move: Move) -> None:
        """Remove the copy of a move that has failed on a full disk: others write there."""
        await self._idle(move)
        await self._remove_all([move.future])
        move.failed_bytes = 0

    async def _remove(self, move: Move) -> None:
        """Remove the copy of a move that was cancelled."""
        await self._idle(move)
        self._dropped.discard(move)
        await self._remove_all([move.future])
        for residence in self._routes.of(move).left(move):
            await self._copier.in_thread(self._routes.remove, residence)

    async def _remove_all(self, folders: list[Path]) -> None:
        for folder in folders:
            if any(folder.is_relative_to(log_dir) for log_dir in self._lost):
                continue  # the next start removes it
            try:
                await self._copier.in_thread(remove_folder, folder)
            except OSError as error:
                _LOG.warning("%s: the next start removes it: %s", folder, error)

    async def _idle(self, move: Move) -> None:
        """Wait until nothing works on a move."""
        while (step := self._turns.step_of(move)) is not None:
            await asyncio.wait([step])
        if move.behind is not None:
            await asyncio.wait([move.behind])
        if move.cleaning is not None:
            await asyncio.wait([move.cleaning])

    def _run(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.ensure_future(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task

    async def _stored(
        self, begun: list[MoveRow], ended: list[Move], *, is_done: bool = False
    ) -> None:
        if begun or ended:
            left = [
                one for move in ended if not is_done for one in self._routes.of(move).left(move)
            ]
            keys = [move.key for move in ended]
            change = functools.partial(self._store.change_moves, begun, keys, left)
            await self._changes.make(change)

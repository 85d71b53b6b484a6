"""Copies a partition a step at a time, until only its last bytes are left.

What a step has copied of a sealed segment becomes durable beside the next step. Producers go first:
while their records are flushed, steps are short, each is durable before the next one begins, and it
begins behind a flush.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from itertools import chain
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final, TypeVar

from logmirror import failpoints
from logmirror.broker.log.file_names import sealed_name
from logmirror.broker.moves.copying import SegmentCopy
from logmirror.errors import CorruptionError, LogmirrorError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from concurrent.futures import Executor

    from logmirror.broker.log.group_commit import GroupCommit
    from logmirror.broker.log.segment import Segment
    from logmirror.broker.moves.counts import MoveCounts
    from logmirror.broker.moves.move import Copy, Move
    from logmirror.broker.moves.routes import Routes
    from logmirror.broker.moves.throttle import Throttle

_Result = TypeVar("_Result")
_STEP_BYTES: Final = 4 * 1024 * 1024
"""What one step copies, before other moves have their turn."""

_SHORT_STEP_BYTES: Final = 256 * 1024
"""The same while records of producers are flushed, which wait for what a step writes.

A larger batch is copied as a whole.
"""

_FIRST_S: Final = 0.01
"""How long such a step waits, at most, for the flushes that are in progress."""

_ALONE_AFTER: Final = 64
"""Short steps since the last of these flushes, after which none is expected: at least 16 MiB."""

_LAST_BYTES: Final = 128 * 1024
"""What is copied on the event loop, at most: well below a millisecond."""

_ROLLS: Final = 3
"""A partition that fills its open segment faster than segments are uploaded is moved anyway."""


class Copier:
    """Runs the steps of moves. Its methods run on the event loop.

    Args:
        routes: What differs between the ways.
        commits: What flushes.
        threads: For what blocks.
        throttle: The limit of all moves together.
        counts: Of the broker.
    """

    def __init__(
        self,
        routes: Routes,
        commits: GroupCommit,
        threads: Executor,
        throttle: Throttle,
        counts: MoveCounts,
    ) -> None:
        self._routes, self._counts = routes, counts
        self._commits, self._threads, self._throttle = commits, threads, throttle
        self._flushes, self._steps_since = 0, 0

    async def step(self, move: Move) -> bool:
        """Copy some of a partition; returns whether only the last bytes are left.

        Then `Move.copy` is that of the open segment, if there is one.

        Raises:
            LogmirrorError, OSError: It cannot be copied.
        """
        log, route = move.log, self._routes.of(move)
        if not move.is_prepared:
            await self.in_thread(route.prepare, move)
            move.is_prepared = True
        if await self._copied_segment(move) or await self._durable(move):
            return False
        tail = log.open_segment
        if self._is_tail_due(move, tail):
            log.begin_segment() if tail is None else log.roll()
            move.rolls += tail is not None
            return False
        if tail is not None:
            try:
                copy, end = await self._copy_of(move, tail), tail.size_bytes
            except FileNotFoundError:
                if log.open_segment is tail:
                    raise
                return False  # it was sealed meanwhile, and has another name
            if end - copy.position > _LAST_BYTES:
                if not await self._advance(move, copy, end):
                    await self.in_thread(copy.sync)
                return False
        # Meanwhile others may have sealed a segment, or replaced one by a compacted one.
        is_quiet = await route.quiet(move)
        return is_quiet and log.open_segment is tail and _next_sealed(move) is None

    async def _copied_segment(self, move: Move) -> bool:
        """Copy some of a segment that is full; False: all are copied."""
        log = move.log
        segment = _next_sealed(move)
        if segment is not None:
            await self._copy_sealed(move, segment)
            return True
        for segment in log.segments:
            if segment is not log.open_segment and not segment.is_sealed:
                await self._commits.flushed(log, segment.next_offset)
                return True
        return False

    def _is_tail_due(self, move: Move, tail: Segment | None) -> bool:
        """Whether an open segment is to be begun: there is none, or much would be left of it."""
        route = self._routes.of(move)
        if tail is None:
            return route.needs_tail
        longest = route.longest_tail
        return longest is not None and tail.size_bytes > longest and move.rolls < _ROLLS

    async def _copy_sealed(self, move: Move, segment: Segment) -> None:
        try:
            name = sealed_name(segment.first, segment.next_offset)
            if move.copy is None and name in move.names:  # from before a restart
                if await self.in_thread(self._routes.of(move).is_copied, move, segment):
                    self._copied(move, segment)
                    return
                move.names.discard(name)
            copy = await self._copy_of(move, segment)
            is_durable = await self._advance(move, copy, segment.size_bytes)
        except (OSError, LogmirrorError):
            if segment in move.log.segments:
                raise
            move.copy = None  # it was deleted, or compacted, meanwhile
            return
        await self._durable(move)
        is_whole = copy.position == segment.size_bytes
        if move.copy is copy and (is_whole or not is_durable):
            self._begin_durable(move, copy, is_whole=is_whole)

    def _begin_durable(self, move: Move, copy: Copy, *, is_whole: bool) -> None:
        """Make what is copied of a sealed segment durable, beside the next step."""
        if is_whole:
            move.copy, move.finishing = None, copy.segment
            work = self._finish(move, copy)
        else:
            work = self.in_thread(copy.sync)
        move.behind = asyncio.ensure_future(_named(work, copy))
        move.behind.add_done_callback(_noted)

    async def _finish(self, move: Move, copy: Copy) -> None:
        try:
            await self.in_thread(copy.finish)
            self._copied(move, copy.segment)
        except (OSError, CorruptionError):
            if copy.segment in move.log.segments:
                raise  # else it was deleted, or compacted, meanwhile
        finally:
            move.finishing = None

    @staticmethod
    async def _durable(move: Move) -> bool:
        """Wait until what was copied is durable; whether it was not yet.

        Raises:
            LogmirrorError, OSError: It cannot be made durable.
        """
        behind, move.behind = move.behind, None
        if behind is not None:
            await behind
        return behind is not None

    @staticmethod
    def _copied(move: Move, segment: Segment) -> None:
        failpoints.reach("move.copied")
        move.copied.add(segment)
        move.next_offset = max(move.next_offset, segment.next_offset)

    async def _copy_of(self, move: Move, segment: Segment) -> Copy:
        if move.copy is None or not self._routes.of(move).fits(move.copy, segment):
            move.copy, move.position = None, 0
            if move.finishing is not None and move.finishing.path == segment.path:
                await self._durable(move)  # a copy from before compaction: it has the same name
            move.copy = await self.in_thread(self._routes.of(move).copy_of, move, segment)
        return move.copy

    async def _advance(self, move: Move, copy: Copy, end: int) -> bool:
        """Copy some of a segment; returns whether that is durable already."""
        is_alone = self._is_alone()
        if not is_alone:
            await self._commits.pause(_FIRST_S)
        rate = self._throttle.rate
        limit = self._throttle.limit(_STEP_BYTES if is_alone else _SHORT_STEP_BYTES)
        count = await self.in_thread(copy.append if is_alone else _step_of(copy), end, limit)
        self._throttle.count(count, rate)
        self._counts.copied_bytes += count
        move.position = copy.position
        move.next_offset = max(move.next_offset, copy.next_offset)
        return not is_alone

    def _is_alone(self) -> bool:
        """Whether no records were flushed for a while. Called for each step."""
        if self._commits.is_flushing or self._commits.flushes != self._flushes:
            self._flushes, self._steps_since = self._commits.flushes, 0
        self._steps_since += 1
        return self._steps_since > _ALONE_AFTER

    async def in_thread(self, call: Callable[..., _Result], *args: Any) -> _Result:  # noqa: ANN401  # those of the call
        """Call something that blocks."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, call, *args)


def _next_sealed(move: Move) -> Segment | None:
    """Return a sealed segment that is not copied: behind what is, or one that was compacted."""
    segments = move.log.segments
    begin = bisect_right(segments, move.next_offset, key=attrgetter("first")) - 1
    for number in chain(range(max(0, begin), len(segments)), range(begin)):
        segment = segments[number]
        is_left = segment not in move.copied and segment is not move.finishing
        if segment.is_sealed and is_left:
            return segment
    return None


def last_copy(move: Move) -> SegmentCopy | None:
    """Return the copy of the open segment, when only the last bytes are left."""
    return move.copy if isinstance(move.copy, SegmentCopy) else None


def _step_of(copy: Copy) -> Callable[[int, int], int]:
    """Return what appends, and makes that durable."""

    def step(end: int, limit_bytes: int) -> int:
        count = copy.append(end, limit_bytes)
        copy.sync()
        return count

    return step


async def _named(work: Awaitable[None], copy: Copy) -> None:
    """Do some work, and name the file in its errors."""
    try:
        await work
    except OSError as error:
        error.filename = error.filename or str(copy.path)
        raise


def _noted(work: asyncio.Future[None]) -> None:
    """Mark an error as seen, which no step waits for if the move has ended."""
    if not work.cancelled():
        work.exception()

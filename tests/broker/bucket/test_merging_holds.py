"""While a pass of compaction or a move demands it, nothing of a log is merged (R4, `replacing`).

A pass and a move out of the bucket may run at once, and one may end before the other.
"""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from broker.bucket.test_compacting import written
from logmirror.broker.moves.bucket_routes import OutOfBucket


class _Move(SimpleNamespace):
    """What the route sees of a move."""

    is_active = True
    __hash__ = object.__hash__


def _route(parts: Any) -> OutOfBucket:
    route: Any = OutOfBucket.__new__(OutOfBucket)
    route._commits, route._bucket = parts.machine.commits, parts.machine.bucket  # noqa: SLF001  # all that it asks here
    return route


@pytest.mark.parametrize("is_quiet", [False, True])
def test_a_move_that_ends_within_a_pass_begins_no_merge(tmp_path, is_quiet):
    """It was cancelled or failed, before it was nearly complete or afterwards."""

    async def act() -> None:
        parts = await written(tmp_path / "one")
        merger, move = parts.machine.commits.merger, _Move(log=parts.log)
        await parts.replacing.begin(parts.log)
        if is_quiet:
            assert await _route(parts).quiet(move)
        _route(parts).end(move)
        assert not await _merges(merger)
        parts.replacing.end(parts.log)
        assert await _merges(merger)
        parts.close()

    asyncio.run(act())


def test_a_pass_that_ends_before_a_swap_begins_no_merge(tmp_path):
    async def act() -> None:
        parts = await written(tmp_path / "one")
        merger, move = parts.machine.commits.merger, _Move(log=parts.log)
        assert await _route(parts).quiet(move)
        await parts.replacing.begin(parts.log)
        parts.replacing.end(parts.log)
        assert not await _merges(merger)
        _route(parts).end(move)
        assert await _merges(merger)
        parts.close()

    asyncio.run(act())


def test_a_move_that_is_cancelled_within_a_step_demands_nothing_afterwards(tmp_path):
    """The step continues; nothing would end what it demands then."""

    async def act() -> None:
        parts = await written(tmp_path / "one")
        merger, move = parts.machine.commits.merger, _Move(log=parts.log, is_active=False)
        _route(parts).end(move)
        assert not await _route(parts).quiet(move)
        assert await _merges(merger)
        parts.close()

    asyncio.run(act())


async def _merges(merger: Any) -> bool:
    """Whether a merge begins now; it is awaited."""
    before = merger.into
    merger.tick()
    if merger._running is not None:  # noqa: SLF001  # what has begun
        await merger._running  # noqa: SLF001  # the same
    return bool(merger.into > before)

"""How long requests wait for changes, and what becomes of late ones."""

from __future__ import annotations

import asyncio
import gc
import warnings
from concurrent.futures import ThreadPoolExecutor
from threading import Event

import pytest

from logmirror.broker.changes import Changes, LateChangeError, code_of, pooled
from logmirror.broker.error_codes import ErrorCode
from logmirror.errors import UnavailableError

TIMEOUT_S = 0.05


def test_a_late_change_runs_to_its_end_and_those_behind_it_that_did_not_begin_are_dropped():
    async def run() -> list[int]:
        changes, bucket = Changes(TIMEOUT_S), asyncio.Event()
        made: list[int] = []

        async def change(number: int) -> int:
            await bucket.wait()
            made.append(number)
            return number

        first, second = (asyncio.ensure_future(changes.run(change(n))) for n in (1, 2))
        for late in (first, second):
            with pytest.raises(LateChangeError):
                await late
        assert made == []
        bucket.set()
        assert await changes.run(change(3)) == 3
        return made

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert asyncio.run(run()) == [1, 3]
        gc.collect()  # a change that was never awaited would warn


def test_those_behind_a_late_change_wait_for_a_second_at_most():
    async def run() -> float:
        changes, bucket = Changes(TIMEOUT_S), asyncio.Event()
        with pytest.raises(LateChangeError):
            await changes.run(bucket.wait())
        changes.timeout_s = 60
        began_s = asyncio.get_running_loop().time()
        for _ in range(3):
            with pytest.raises(LateChangeError):
                await changes.run(bucket.wait())
        took_s = asyncio.get_running_loop().time() - began_s
        bucket.set()
        assert await changes.run(bucket.wait())
        return took_s

    assert asyncio.run(run()) < 20


def test_a_change_continues_when_its_client_disconnects():
    async def run() -> list[str]:
        changes, bucket = Changes(), asyncio.Event()
        made: list[str] = []

        async def change() -> None:
            await bucket.wait()
            made.append("made")

        request = asyncio.ensure_future(changes.run(change()))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        request.cancel()
        bucket.set()
        await changes.run(asyncio.sleep(0))
        return made

    assert asyncio.run(run()) == ["made"]


def test_work_of_a_pool_that_has_not_begun_is_dropped():
    async def run() -> list[int]:
        bucket = Event()
        made: list[int] = []
        with ThreadPoolExecutor(1) as pool:

            def change(number: int) -> None:
                bucket.wait()
                made.append(number)

            loop = asyncio.get_running_loop()
            for number in (1, 2):
                with pytest.raises(LateChangeError):
                    await pooled(loop.run_in_executor(pool, change, number), TIMEOUT_S)
            await asyncio.sleep(TIMEOUT_S)  # the loop hands the cancellation on
            bucket.set()
        return made

    assert asyncio.run(run()) == [1]


def test_late_changes_have_the_code_of_a_request_that_timed_out():
    assert code_of(LateChangeError("late")) is ErrorCode.REQUEST_TIMED_OUT
    assert code_of(UnavailableError("away")) is ErrorCode.KAFKA_STORAGE_ERROR

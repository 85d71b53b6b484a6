"""What a connection has loaded waits for its next Fetch, not for ever, and keeps no file open."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from logmirror.broker import segment_loads
from logmirror.broker.log.segment import Segment
from logmirror.broker.segment_loads import SegmentLoads


class File:
    """Stands for an open file."""


class Cache:
    """Loads files, or raises an error."""

    def __init__(self) -> None:
        self.may_load, self.error = threading.Event(), False
        self.files: list[weakref.ref[File]] = []

    def loaded_at(self, *_: object) -> tuple[File, None]:
        assert self.may_load.wait(30)
        if self.error:
            raise OSError("away")
        file = File()
        self.files.append(weakref.ref(file))
        return file, None

    @property
    def open(self) -> int:
        gc.collect()
        return sum(file() is not None for file in self.files)


def segments(count: int) -> list[Segment]:
    return [Segment(Path("t/0"), number, number + 1, 1) for number in range(count)]


def begin(loads: SegmentLoads, cache: Any, executor: ThreadPoolExecutor, segment: Segment) -> Any:
    return loads.begin(cache, executor, segment, 0, 1)


async def ended(load: Any) -> None:
    await asyncio.wait((load,), timeout=30)
    await asyncio.sleep(0)


def test_a_result_is_there_for_the_next_request_and_gone_after_it_or_after_a_time(monkeypatch):
    monkeypatch.setattr(segment_loads, "_KEPT_S", 0.05)
    loads, cache, [first, second, third] = SegmentLoads(), Cache(), segments(3)
    cache.may_load.set()

    async def run() -> None:
        with ThreadPoolExecutor(1) as executor:
            for one in (first, second, third):
                await ended(begin(loads, cache, executor, one))
            assert cache.open == 3
            loads.keep({(second, 0), (third, 0)})
            assert cache.open == 2
            loads.take(second, 0)
            assert cache.open == 1
            await asyncio.sleep(0.2)  # more than that time
            assert loads.get(third, 0) is None
            assert cache.open == 0

    asyncio.run(run())


def test_one_load_is_in_progress_in_each_executor_and_no_request_lets_go_of_it():
    loads, cache, [segment] = SegmentLoads(), Cache(), segments(1)

    async def run() -> None:
        with ThreadPoolExecutor(1) as executor, ThreadPoolExecutor(1) as other:
            load = begin(loads, cache, executor, segment)
            loads.keep(set())
            assert loads.running(executor) is load is loads.get(segment, 0)
            assert loads.running(other) is None
            cache.error = True
            cache.may_load.set()
            await ended(load)
            assert loads.running(executor) is None
            with pytest.raises(OSError, match="away"):
                loads.take(segment, 0)

    asyncio.run(run())

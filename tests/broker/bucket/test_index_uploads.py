"""Indexes of large segments that wait to be created: none is dropped, up to a limit of memory.

What runs beside the removal of a partition's objects is in `test_parts`.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest

from logmirror.broker.bucket import index_uploads
from logmirror.broker.bucket.index_uploads import IndexUploads
from logmirror.broker.bucket.parts import INDEXES, decode
from logmirror.broker.bucket.uploads import Uploads
from logmirror.broker.log.segment import Segment, SparseIndex
from logmirror.testing.memory_store import MemoryStore

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

WAIT_S = 20
KEY = (b"t" * 16, 0)
ENTRIES = 10


class Held:
    """Uploads whose thread does nothing until it is released."""

    def __init__(self, folder: Path) -> None:
        self.store, self.uploads = MemoryStore(), Uploads()
        self.indexes = IndexUploads(self.store, self.uploads, {}, {KEY})
        self._folder, self._released = folder, threading.Event()
        started = threading.Event()

        def hold() -> None:
            started.set()
            self._released.wait(WAIT_S)

        self.uploads.submit("held", hold)
        assert started.wait(WAIT_S)

    def submit(self, number: int) -> str:
        """Submit the index of a segment; returns the name of its object."""
        segment, index = Segment(self._folder, number, number + 1, 0), SparseIndex()
        for column in (index.offsets, index.positions, index.timestamps_ms):
            column.extend(range(number, number + ENTRIES))
        self.indexes.submit(KEY, segment.path.name, segment, index)
        return f"{INDEXES}/{segment.path.name}"

    def release(self) -> None:
        self._released.set()
        self.uploads.submit("last", lambda: None).result(WAIT_S)


@pytest.fixture
def held(tmp_path: Path) -> Iterator[Held]:
    found = Held(tmp_path)
    yield found
    found.release()
    found.uploads.close(WAIT_S)


def test_all_indexes_that_wait_are_created(held: Held) -> None:
    names = [held.submit(number) for number in range(9)]
    held.release()
    assert sorted(held.store.objects) == names
    for number, name in enumerate(names):
        assert decode(held.store.objects[name]).offsets[0] == number


def test_no_more_wait_than_memory_is_meant_for(held: Held, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_uploads, "_WAITING_ENTRIES", 3 * ENTRIES)
    names = [held.submit(number) for number in range(9)]
    held.release()
    assert sorted(held.store.objects) == names[:3]

    later = held.submit(9)
    held.uploads.submit("last", lambda: None).result(WAIT_S)
    assert sorted(held.store.objects) == [*names[:3], later]


def test_one_that_is_larger_than_the_limit_is_created(
    held: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index_uploads, "_WAITING_ENTRIES", 1)
    name = held.submit(0)
    held.release()
    assert sorted(held.store.objects) == [name]


def test_indexes_of_a_deleted_topic_are_forgotten(held: Held) -> None:
    for number in range(3):
        held.submit(number)
    held.uploads.drop(lambda key: isinstance(key, tuple) and key[-len(KEY) :] == KEY)
    held.release()
    assert held.store.objects == {}

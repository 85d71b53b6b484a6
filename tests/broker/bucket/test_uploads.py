"""Uploads: order within a partition, and none that fails holds up other partitions."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest

from logmirror.broker.bucket import uploads
from logmirror.broker.bucket.uploads import Uploads
from logmirror.errors import CorruptionError, UnavailableError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

WAIT_S = 20


@pytest.fixture
def thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[Uploads]:
    monkeypatch.setattr(uploads, "_FIRST_PAUSE_MS", 1.0)
    monkeypatch.setattr(uploads, "_LONGEST_PAUSE_MS", 4.0)
    found = Uploads()
    yield found
    found.close(WAIT_S)


class Bucket:
    """Works that fail while they are refused, and the order in which they were done."""

    def __init__(self) -> None:
        self.refused: dict[str, Exception] = {}
        self.done: list[str] = []
        self.tries = 0

    def work(self, name: str) -> Callable[[], None]:
        def run() -> None:
            if name in self.refused:
                self.tries += 1
                raise self.refused[name]
            self.done.append(name)

        return run


def test_one_that_the_store_refuses_holds_up_its_partition_only(thread):
    bucket = Bucket()
    bucket.refused["a1"] = UsageError("refused")
    first = thread.submit("a", bucket.work("a1"))
    second = thread.submit("a", bucket.work("a2"))
    for number in range(50):
        thread.submit("b", bucket.work(f"b{number}")).result(WAIT_S)
    assert bucket.done == [f"b{number}" for number in range(50)]
    assert not first.done()
    assert not second.done()
    del bucket.refused["a1"]
    second.result(WAIT_S)
    assert bucket.done[50:] == ["a1", "a2"]
    assert bucket.tries > 0


@pytest.mark.parametrize("error", [CorruptionError("other content"), OSError("no file")])
def test_nothing_of_a_partition_is_done_behind_one_that_cannot_be(thread, error):
    """Commits before an object that exists are removed. So none may exist behind a missing one."""
    bucket, hold = Bucket(), threading.Event()
    bucket.refused["a1"] = error
    thread.submit("b", lambda: hold.wait(WAIT_S) or None)
    works = [thread.submit("a", bucket.work(name)) for name in ("a1", "a2")]
    hold.set()
    for work in works:
        with pytest.raises(type(error)):
            work.result(WAIT_S)
    with pytest.raises(type(error)):
        thread.submit("a", bucket.work("a3")).result(WAIT_S)
    thread.submit("b", bucket.work("b1")).result(WAIT_S)
    assert bucket.done == ["b1"]


@pytest.mark.parametrize("error", [CorruptionError("other content"), OSError("not fetched")])
def test_one_that_fails_alone_ends_nothing_behind_it(thread, error):
    bucket, hold = Bucket(), threading.Event()
    bucket.refused["a1"] = error
    thread.submit("b", lambda: hold.wait(WAIT_S) or None)
    first = thread.submit("a", bucket.work("a1"), fails_alone=True)
    second = thread.submit("a", bucket.work("a2"), fails_alone=True)
    hold.set()
    with pytest.raises(type(error)):
        first.result(WAIT_S)
    second.result(WAIT_S)
    thread.submit("a", bucket.work("a3"), fails_alone=True).result(WAIT_S)
    assert bucket.done == ["a2", "a3"]


def test_one_that_covers_earlier_ones_replaces_them(thread):
    bucket, hold = Bucket(), threading.Event()
    thread.submit("a", lambda: hold.wait(WAIT_S) or None)
    works = [
        thread.submit("a", bucket.work(f"a{number}"), covers_earlier=True) for number in range(9)
    ]
    hold.set()
    for work in works:
        work.result(WAIT_S)
    assert bucket.done == ["a8"]


def test_what_is_dropped_counts_as_done(thread):
    bucket, hold = Bucket(), threading.Event()
    thread.submit("b", lambda: hold.wait(WAIT_S) or None)
    dropped = thread.submit("a", bucket.work("a1"))
    thread.drop(lambda key: key == "a")
    dropped.result(WAIT_S)
    hold.set()
    thread.submit("a", bucket.work("a2")).result(WAIT_S)
    assert bucket.done == ["a2"]


def test_the_end_fails_what_was_not_done(thread):
    bucket = Bucket()
    bucket.refused["a1"] = UnavailableError("away")
    waiting = thread.submit("a", bucket.work("a1"))
    thread.close(WAIT_S)
    for work in (waiting, thread.submit("a", bucket.work("a2"))):
        with pytest.raises(UnavailableError, match="stopping"):
            work.result(WAIT_S)

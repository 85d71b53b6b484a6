"""The coordinators' state is durable when a write ends, in order, and all or nothing."""

import asyncio
import os
import signal
import subprocess
import sys

import pytest

from kit.runs.bucket_databases import Nowhere
from logmirror.broker.dir_failures import DirFailures, StopLimit
from logmirror.broker.log.disk import Disk
from logmirror.broker.log_dirs.placement import LogDirs
from logmirror.broker.state_store import Change, StateStore
from logmirror.errors import FencedError, UnavailableError


@pytest.fixture
def path(tmp_path):
    return tmp_path / "state.sqlite"


def stored(path, kind="group"):
    store = StateStore(path)
    try:
        return dict(store.load(kind))
    finally:
        store.close()


def test_values_are_read_back_by_kind(path):
    async def run():
        store = StateStore(path)
        first = store.write([Change("group", b"a", b"1"), Change("offset", b"a", b"other")])
        second = store.write([Change("group", b"b", b"2"), Change("group", b"a", None)])
        await first
        await second
        store.close()

    asyncio.run(run())
    assert stored(path) == {b"b": b"2"}
    assert stored(path, "offset") == {b"a": b"other"}


def test_writes_share_commits_and_end_in_order(path):
    ended = []

    async def run():
        store = StateStore(path)
        commits = []
        commit = store._commit  # noqa: SLF001  # counted
        store._commit = lambda batch: commits.append(len(batch)) or commit(batch)  # noqa: SLF001  # the same
        writes = [store.write([Change("group", b"k", b"%d" % n)]) for n in range(500)]
        for number, write in enumerate(writes):
            write.add_done_callback(lambda _, number=number: ended.append(number))
        await asyncio.gather(*writes)
        store.close()
        return commits

    commits = asyncio.run(run())
    assert ended == list(range(500))
    assert sum(commits) == 500
    assert len(commits) < 250
    assert stored(path) == {b"k": b"499"}


@pytest.mark.parametrize("shipping", [None, Nowhere()], ids=["on a disk", "in a bucket"])
def test_after_a_failed_commit_nothing_more_is_written(path, shipping):
    """In a bucket, the failure is reported once, and ends the broker."""
    reported = []

    async def run():
        store = StateStore(path, shipping)
        store.watch(lambda error, _: reported.append(error))
        await store.write([Change("group", b"a", b"1")])
        store._database._connection.execute("PRAGMA query_only=ON")  # noqa: SLF001  # as a disk that fails
        writes = [store.write([Change("group", b"a", b"2")]) for _ in range(3)]
        found = await asyncio.gather(*writes, return_exceptions=True)
        store._database._connection.execute("PRAGMA query_only=OFF")  # noqa: SLF001  # the same
        found.append((await asyncio.gather(store.write([]), return_exceptions=True))[0])
        store.close()
        return found, store.failure

    found, failure = asyncio.run(run())
    assert [type(error) for error in found] == [UnavailableError] * 4
    assert isinstance(failure, UnavailableError)
    ends = [error for error in reported if isinstance(error, UnavailableError)]
    assert ends == ([] if shipping is None else [failure])
    assert stored(path) == {b"a": b"1"}


class Refusing(Nowhere):
    """A bucket that does not take changes while there is an error."""

    error: Exception | None = None

    def ship(self, statements):
        if self.error is not None:
            raise self.error


@pytest.mark.parametrize(
    ("error", "is_stopping", "ends"),
    [
        (UnavailableError("away"), False, True),
        (UnavailableError("away"), True, False),
        (FencedError("another owner"), False, False),
    ],
)
def test_a_failure_in_a_bucket_ends_a_broker_that_does_not_end_anyway(
    path, error, is_stopping, ends
):
    """A stop without the bucket, and that of an owner that was replaced, have their own reasons."""

    async def run():
        shipping = Refusing()
        store = StateStore(path, shipping)
        dirs = LogDirs([path.parent])
        failures = DirFailures(dirs, Disk(), [], lambda *_: None, StopLimit())
        store.watch(failures.database_failed)
        if is_stopping:
            failures.begin_stop()
        shipping.error = error
        with pytest.raises(type(error)):
            await store.write([Change("group", b"a", b"1")])
        store.close()
        return failures.fatal.done() and failures.fatal.result().exit_code

    assert asyncio.run(run()) == (75 if ends else False)


WRITER = """
import asyncio, pathlib, sys
from logmirror.broker.state_store import Change, StateStore

async def run():
    store = StateStore(pathlib.Path(sys.argv[1]))
    for number in range(100_000):
        pair = [Change("group", b"x", b"%d" % number), Change("group", b"y", b"%d" % number)]
        await store.write(pair)
        print(number, flush=True)

asyncio.run(run())
"""


def test_what_was_reported_survives_kill_9(path):
    writer = subprocess.Popen([sys.executable, "-c", WRITER, path], stdout=subprocess.PIPE)
    lines = [writer.stdout.readline() for _ in range(20)]
    os.kill(writer.pid, signal.SIGKILL)
    lines += writer.stdout.readlines()
    writer.wait(30)
    writer.stdout.close()
    last = int([line for line in lines if line.endswith(b"\n")][-1])
    values = {key: int(value) for key, value in stored(path).items()}
    assert values[b"x"] == values[b"y"] >= last

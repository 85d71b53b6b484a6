"""Goal: a log directory that hangs, without an error, keeps no thread of others, and no stop.

Method: real brokers whose system calls on files of one directory do not end while it hangs. The
deadlines of a stop are shorter.
"""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import TYPE_CHECKING, Final, NamedTuple

import pytest

from broker.moves.conftest import TwoDirs
from broker.moves.test_failed_directories import hanging as hanging_parts
from broker.moves.test_requests import BATCH, fill
from kit.fakes.disk import loading
from kit.runs.commands import wait_until
from kit.servers.embedded import EmbeddedBroker
from kit.servers.kafka import create_topic
from logmirror.broker import topic_removal
from logmirror.broker.apis import Api
from logmirror.broker.handlers import log_dirs

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from kit.judges.log_dirs_client import LogDirsClient

NONE, STORAGE = 0, 56
_HANGING: Final = '''
"""Loaded by every Python process at its start: calls for a folder wait while it hangs."""

import os
import pathlib
import time

_folder, _hangs = pathlib.Path({folder!r}), pathlib.Path({hangs!r})


def hanging(call, path_of):
    def wait(place, *rest):
        if pathlib.Path(path_of(place)).is_relative_to(_folder):
            while _hangs.exists():
                time.sleep(0.05)
        return call(place, *rest)

    return wait


def path_of(descriptor):
    return os.readlink(f"/proc/self/fd/{{descriptor}}")


os.fsync = hanging(os.fsync, path_of)
os.fdatasync = hanging(os.fdatasync, path_of)
os.statvfs = hanging(os.statvfs, lambda path: path)

from logmirror.broker import dir_failures

dir_failures.STOP_LOOK_S, dir_failures.DEADLINE_S, dir_failures.STOP_S = 0.5, 1, 5
'''


class Hanging(NamedTuple):
    """The broker; its directory `b` hangs while the file exists. The topics are named as these."""

    dirs: TwoDirs
    hangs: Path

    @property
    def size_bytes(self) -> int:
        """The bytes of the partition in `b`."""
        return sum(path.stat().st_size for path in (self.dirs.b / "b" / "0").iterdir())

    @property
    def log(self) -> str:
        """The broker's log."""
        return self.dirs.broker.log.read_text()


@pytest.fixture
def hanging(tmp_path: Path) -> Iterator[Hanging]:
    b, hangs = tmp_path / "b", tmp_path / "hangs"
    environment = loading(tmp_path, _HANGING.format(folder=str(b), hangs=str(hangs)))
    broker = EmbeddedBroker(tmp_path / "a", environment=environment, more_log_dirs=[str(b)])
    try:
        found = Hanging(TwoDirs(broker.start(), broker.log_dir, b), hangs)
        for topic, place in (("a", found.dirs.a), ("b", b)):
            with found.dirs.client() as client:
                client.move({place: {topic: (0,)}})
            create_topic(broker.bootstrap, topic, 1, {})
            fill(found.dirs, topic, 9)
        hangs.touch()
        yield found
    finally:
        hangs.unlink(missing_ok=True)
        broker.kill()


def described(client: LogDirsClient) -> dict[str, int]:
    """Return the error code of each directory."""
    found = client.ask(Api.DESCRIBE_LOG_DIRS, 4, topics=None).results
    return {one.log_dir.rpartition("/")[2]: int(one.error_code) for one in found}


def test_requests_for_a_directory_that_hangs_keep_no_thread_from_others(hanging):
    """DescribeLogDirs reads the size of each. Lookups of timestamps need the broker's threads."""
    dirs = hanging.dirs

    def describe() -> dict[str, int]:
        with dirs.client() as client:
            return described(client)

    with ThreadPoolExecutor(8) as clients:
        for found in clients.map(lambda _: describe(), range(8)):
            assert found == {dirs.a.name: NONE, "b": STORAGE}
    with dirs.partition("a") as partition:
        assert partition.list_offset(0)[0] == NONE
        assert partition.produce(BATCH).error == NONE
        assert partition.fetch(0).error_code == NONE
    hanging.hangs.unlink()
    assert describe() == {dirs.a.name: NONE, "b": NONE}


def test_a_directory_that_hangs_is_asked_once_for_its_size(tmp_path, monkeypatch):
    ends, asked = threading.Event(), []

    def hang(path: Path) -> tuple[int, int, int]:
        asked.append(path)
        ends.wait(60)
        return NONE, 1, 1

    async def ask_twice() -> None:
        broker = SimpleNamespace(volumes={})
        first, second = (log_dirs._asked_volume(broker, tmp_path) for _ in range(2))  # noqa: SLF001  # a part of the handler
        ends.set()
        assert await first == await second == (NONE, 1, 1)
        await asyncio.sleep(0)
        assert broker.volumes == {}, "the next request asks again"

    monkeypatch.setattr(log_dirs, "_volume", hang)
    asyncio.run(ask_twice())
    assert asked == [tmp_path]


def test_a_stop_waits_for_a_bounded_time_for_a_directory_that_hangs(hanging):
    dirs, before = hanging.dirs, hanging.size_bytes
    with dirs.partition("b") as partition, ThreadPoolExecutor(1) as client:
        produced = client.submit(partition.produce, BATCH)
        wait_until(lambda: hanging.size_bytes > before, what=lambda: hanging.log)
        assert dirs.broker.stop() == 75
        assert produced.result(20).error == STORAGE
    assert "the stop takes longer than 0.5 s" in hanging.log
    assert "holds up the stop" in hanging.log
    hanging.hangs.unlink()
    dirs.broker.start()
    with dirs.partition("b") as partition:
        assert partition.log_end >= 900


def test_a_deletion_waits_a_bounded_time_until_names_of_folders_are_durable(tmp_path, monkeypatch):
    monkeypatch.setattr(topic_removal, "_SYNC_S", 0)

    async def act() -> None:
        async with hanging_parts(tmp_path) as found:
            deleting = await found.delete()
            assert found.parts.topics.by_name == {}, "it waits for the flush of the records now"
            found.disk.ends.set()
            await deleting

    asyncio.run(act())

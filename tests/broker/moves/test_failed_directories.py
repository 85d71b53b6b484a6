"""Goal: a log directory that fails at run time takes its partitions offline, and no others.

Method: a broker process with a directory on a real disk that fails (`failing_disk`). What needs an
exact error of one call runs the real logs, or the real probe, in this process.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import sys
import threading
from typing import TYPE_CHECKING, NamedTuple

import pytest
from prometheus_client.parser import text_string_to_metric_families

from broker.moves.conftest import TwoDirs
from broker.moves.test_moves import contents
from broker.moves.test_requests import BATCH, fill
from broker.test_housekeeping import START_MS, parts_of
from kit.fakes.disk import small_disk
from kit.fakes.failing_disk import FailingDisk, failing_disk
from kit.judges.partition_client import Appended, PartitionClient
from kit.judges.scrape import ask
from kit.runs.commands import wait_until
from kit.servers.embedded import EmbeddedBroker
from kit.servers.kafka import create_topic, delete_topic
from kit.servers.machine import HOST, Process, free_ports
from logmirror.broker.apis import Api
from logmirror.broker.log.disk import Disk
from logmirror.errors import UnavailableError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from pathlib import Path

    from broker.test_housekeeping import Parts
    from logmirror.broker.log.partition_log import PartitionLog
    from logmirror.broker.topic import Topic

NONE, STORAGE, INVALID_TOPIC = 0, 56, 17
OFFLINE = "log directory failed; its partitions are offline"
pytestmark = pytest.mark.timeout(600)


class Failing(NamedTuple):
    """A broker with a log directory on a disk that can fail."""

    dirs: TwoDirs
    disk: FailingDisk
    monitoring_port: int

    def create(self, topic: str, place: Path, partitions: int = 1) -> None:
        """Create a topic whose partitions are all in one directory."""
        with self.dirs.client() as client:
            client.move({place: {topic: tuple(range(partitions))}})
        create_topic(self.dirs.bootstrap, topic, partitions, {})
        fill(self.dirs, topic, 9)

    def codes(self, topic: str, offset: int = 0) -> tuple[int, int]:
        """Return the error codes of a Produce and of a Fetch."""
        with self.dirs.partition(topic) as partition:
            return partition.produce(BATCH).error, int(partition.fetch(offset).error_code)

    def wait_offline(self, topic: str) -> None:
        """Wait until a partition is offline. Nothing is written to it."""
        with self.dirs.partition(topic) as partition:
            wait_until(lambda: partition.list_offset(-1)[0] == STORAGE, what=lambda: self.log)

    def write_until_refused(self, topic: str) -> None:
        """Write until a write gets KAFKA_STORAGE_ERROR."""
        with self.dirs.partition(topic) as partition:
            wait_until(lambda: partition.produce(BATCH).error == STORAGE, what=lambda: self.log)

    def described(self) -> dict[str, tuple[int, int, int, list[str]]]:
        """Return error, total and usable bytes, and topics of each directory."""
        with self.dirs.client() as client:
            return {
                one.log_dir: (
                    *(int(one.error_code), one.total_bytes, one.usable_bytes),
                    sorted(topic.name for topic in one.topics),
                )
                for one in client.ask(Api.DESCRIBE_LOG_DIRS, 4, topics=None).results
            }

    def status(self) -> dict[str, object]:
        """Return `/status.json`."""
        found: dict[str, object] = json.loads(ask(self.monitoring_port, "/status.json").text)
        return found

    def offline(self) -> dict[str, object]:
        """Return the directories that are offline in `/status.json`, with the reasons."""
        found = self.status()["offline_log_dirs"]
        assert isinstance(found, dict)
        return found

    @property
    def log(self) -> str:
        """The broker's log."""
        return self.dirs.broker.log.read_text()


@pytest.fixture
def failing(tmp_path: Path) -> Iterator[Failing]:
    [port] = free_ports(1)
    with failing_disk(tmp_path, "b") as disk:
        options = {"segment_bytes": 20_000, "monitoring_port": port, "default_partitions": 1}
        broker = EmbeddedBroker(
            tmp_path / "broker",
            environment=disk.environment,
            more_log_dirs=[str(disk.folder)],
            **options,
        )
        try:
            yield Failing(TwoDirs(broker.start(), broker.log_dir, disk.folder), disk, port)
        finally:
            broker.kill()


@pytest.mark.move("E15", "E24")
def test_e24_a_directory_that_fails_takes_its_partitions_offline_and_no_others(failing):
    """LogDirFailureTest: a produce error. All partitions of the directory are offline."""
    dirs, b = failing.dirs, failing.dirs.b
    for topic, place in (("in-a", dirs.a), ("written", b), ("unwritten", b)):
        failing.create(topic, place)
    failing.disk.fail()

    failing.write_until_refused("written")
    failing.wait_offline("unwritten")

    assert failing.codes("written") == failing.codes("unwritten") == (STORAGE, STORAGE)
    assert failing.codes("in-a") == (NONE, NONE)
    found = failing.described()
    assert found[str(b)] == (STORAGE, -1, -1, [])
    code, total, usable, topics = found[str(dirs.a)]
    assert (code, topics) == (NONE, ["in-a"])
    assert min(total, usable) > 0
    with dirs.client() as client:
        assert client.move_one("in-a", b) == STORAGE
        assert client.move_one("in-a", dirs.a) == NONE
    create_topic(dirs.bootstrap, "later", 4, {})
    assert failing.described()[str(dirs.a)][3] == ["in-a", "later"]
    [line] = [
        line for line in failing.log.splitlines() if line.startswith("ERROR") and OFFLINE in line
    ]
    assert str(b) in line
    assert "cause=" in line
    assert "restart the broker" in line
    assert list(failing.offline()) == [str(b)]
    metrics = text_string_to_metric_families(ask(failing.monitoring_port, "/metrics").text)
    values = {one.name: one.samples[0].value for one in metrics if one.samples}
    assert values["logmirror_broker_offline_log_dirs"] == 1
    assert values["logmirror_broker_offline_partitions"] == 2
    assert dirs.broker.stop() == 0


def test_a_directory_is_offline_until_the_next_start(failing):
    """LogDirFailureTest: recovery. Here it is the repaired disk that serves the partition again."""
    failing.create("t", failing.dirs.b)
    failing.disk.fail()
    failing.write_until_refused("t")
    failing.wait_offline("t")
    failing.dirs.broker.kill()
    failing.disk.repair()
    failing.dirs.broker.start()

    with failing.dirs.partition("t") as partition:
        assert partition.log_end >= 900
        assert partition.produce(BATCH).error == NONE
    assert failing.described()[str(failing.dirs.b)][0] == NONE
    assert failing.offline() == {}


def test_a_read_that_fails_takes_the_directory_offline(failing):
    """LogDirFailureTest: a fetch error."""
    failing.create("read", failing.dirs.b)
    failing.create("unread", failing.dirs.b)
    failing.dirs.broker.stop()
    failing.dirs.broker.start()
    tails = failing.dirs.b.glob
    wait_until(  # the records are old: each open segment is sealed once, and flushed
        lambda: not any(path.stat().st_size for path in tails("*/0/.*.open")),
        what=lambda: failing.log,
    )
    failing.dirs.broker.stop()
    failing.dirs.broker.start()  # no segment is loaded
    failing.disk.fail()

    with failing.dirs.partition("read") as partition:
        assert partition.fetch(0).error_code == STORAGE

    failing.wait_offline("unread")


def test_a_read_that_fails_in_an_open_file_takes_the_directory_offline(failing):
    failing.create("read", failing.dirs.b)
    failing.create("unread", failing.dirs.b)
    failing.disk.fail()

    with failing.dirs.partition("read") as partition:
        assert partition.fetch(800).error_code == STORAGE

    failing.wait_offline("unread")


@pytest.mark.move("E7", "E93")
@pytest.mark.parametrize("noticed_by", ["another partition", "the move"])
def test_e93_a_target_that_fails_ends_the_move_and_the_partition_is_served(failing, noticed_by):
    """When the disk is repaired, the same move is requested again, and is completed."""
    dirs, b = failing.dirs, failing.dirs.b
    failing.create("moves", dirs.a)
    fill_more(failing, "moves")
    dirs.limit(20_000)
    with dirs.client() as client:
        if noticed_by == "another partition":
            failing.create("in-b", b)
        assert client.move_one("moves", b) == NONE
        wait_until(lambda: client.where("moves")[str(b)].size_bytes > 0, what=lambda: failing.log)
        failing.disk.fail()
        if noticed_by == "the move":
            dirs.limit(None)
        else:
            failing.write_until_refused("in-b")
            failing.wait_offline("in-b")
        wait_until(lambda: str(b) in failing.offline(), what=lambda: failing.log)
        assert [*client.where("moves")] == [str(dirs.a)]
        assert client.move_one("moves", b) == STORAGE
    [move] = failing.status()["moves"]
    assert move["state"] == "failed"
    assert str(b) in move["failure"]
    if noticed_by == "the move":  # nothing else is in this directory
        [named] = re.findall(r" path='([^']+)'", move["failure"])
        assert re.fullmatch(rf"{re.escape(str(b))}/moves/0\.[0-9a-f]+-future/\.[0-9].*", named)
        [line] = [one for one in failing.log.splitlines() if f"the move to {b} failed" in one]
        assert named in line
    assert failing.codes("moves") == (NONE, NONE)
    dirs.broker.kill()
    failing.disk.repair()
    dirs.broker.start()
    dirs.limit(None)
    with dirs.partition("moves") as partition:
        before = contents(partition)
        assert len(before) == 7_000
        dirs.move("moves", b)
        assert contents(partition) == before
    dirs.wait_clean("moves", "b/0")


def fill_more(failing: Failing, topic: str) -> None:
    with failing.dirs.partition(topic) as partition:
        for _ in range(60):
            assert partition.produce(BATCH).error == NONE


@pytest.mark.move("E94")
def test_e94_a_source_that_fails_ends_the_move_and_its_copy_is_not_served(failing):
    dirs, b = failing.dirs, failing.dirs.b
    failing.create("moves", b)
    failing.create("in-b", b)
    fill_more(failing, "moves")
    dirs.limit(1)
    with dirs.client() as client:
        assert client.move_one("moves", dirs.a) == NONE
        wait_until(lambda: len(client.where("moves")) == 2, what=lambda: failing.log)
        failing.disk.fail()
        failing.write_until_refused("in-b")
        failing.wait_offline("moves")
        assert client.where("moves") == {}
        dirs.limit(None)
        assert client.move_one("moves", dirs.a) == STORAGE
    [move] = failing.status()["moves"]
    assert move["state"] == "failed"
    assert failing.codes("moves") == (STORAGE, STORAGE)
    assert not (dirs.a / "moves" / "0").exists()
    dirs.broker.kill()
    failing.disk.repair()
    dirs.broker.start()
    dirs.wait_in("moves", dirs.a)
    with dirs.partition("moves") as partition:
        assert partition.log_end >= 6_900


def test_a_topic_with_files_in_a_failed_directory_is_deleted_by_the_next_start_with_it(failing):
    """Until then no topic of its name is created, also not by a broker without the directory."""
    dirs, left = failing.dirs, "the next start with all log directories removes them"
    failing.create("t", dirs.b, 2)  # one has no records, and no folder
    failing.create("t2", dirs.a)
    failing.disk.fail()
    failing.write_until_refused("t")
    failing.wait_offline("t")

    delete_topic(dirs.bootstrap, "t")
    delete_topic(dirs.bootstrap, "t2")
    create_topic(dirs.bootstrap, "t2", 1, {})
    with pytest.raises(Exception, match=left):
        create_topic(dirs.bootstrap, "t", 1, {})

    dirs.broker.kill()
    for _ in range(2):
        with EmbeddedBroker(dirs.broker.folder) as alone, pytest.raises(Exception, match=left):
            create_topic(alone.bootstrap, "t", 1, {})
    failing.disk.repair()
    assert dirs.names("t") == ["b/0"]
    dirs.broker.start()
    assert dirs.names("t") == []
    create_topic(dirs.bootstrap, "t", 1, {})
    with dirs.partition("t") as partition:
        assert partition.log_end == 0


class HangingDisk(Disk):
    """The first flush of a partition in a folder does not end before `ends`."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder, self.ends = folder, threading.Event()

    def sync_folder(self, path: Path) -> None:
        if path.is_relative_to(self.folder):
            self.ends.wait(60)
        super().sync_folder(path)


class Hanging(NamedTuple):
    """A topic of which one partition, in `b`, has records whose flush hangs."""

    parts: Parts
    topic: Topic
    log: PartitionLog
    disk: HangingDisk

    def fail(self) -> None:
        """Take `b` offline."""
        topics = self.parts.topics
        failure = topics.dirs.offline[self.disk.folder] = UnavailableError("directory failed")
        topics.lose(self.disk.folder, failure)

    async def delete(self) -> asyncio.Future[None]:
        """Begin to delete the topic, which waits for longer than one look (0.2 s)."""
        deleting = asyncio.ensure_future(self.parts.topics.delete(self.topic))
        done, _ = await asyncio.wait([deleting], timeout=0.5)
        assert not done
        assert list(self.log.folder.iterdir())
        return deleting


@contextlib.asynccontextmanager
async def hanging(tmp_path: Path) -> AsyncIterator[Hanging]:
    disk = HangingDisk(tmp_path / "b")
    async with parts_of(tmp_path / "a", disk.folder, disk=disk) as parts:
        topic = await parts.create(2)
        [log] = [log for log in topic.logs if log.folder.is_relative_to(disk.folder)]
        parts.write(log, START_MS)
        try:
            yield Hanging(parts, topic, log, disk)
        finally:
            disk.ends.set()


@pytest.mark.parametrize("first", ["the directory fails", "the flush ends"])
def test_a_deletion_waits_for_a_flush_that_hangs_until_its_directory_fails(tmp_path, first):
    async def act() -> None:
        async with hanging(tmp_path) as found:
            topics, deleting = found.parts.topics, await found.delete()
            if first == "the flush ends":
                found.disk.ends.set()
                await deleting
                assert not found.log.folder.exists()
                return
            found.fail()
            await asyncio.wait_for(deleting, 20)
            assert await topics.create("other", 1, {}) is not None
            listed = found.parts.store.deleted_partitions(found.topic.topic_id.bytes)
            assert listed == {int(found.log.folder.name)}, "also a start without `b` knows it"
            found.disk.ends.set()
            await found.parts.commits.drain()
            assert topics.removal.left_behind == {"t"}
            assert list(found.log.folder.iterdir()), "the next start removes them"

    asyncio.run(act())


def test_a_deletion_waits_for_a_log_that_arrives_also_if_its_directory_has_failed(tmp_path):
    """Else its durable end is written in a slot that another partition may have by then."""

    async def act() -> None:
        async with hanging(tmp_path) as found:
            ends = list[int]()

            async def confirm(end: int) -> None:
                ends.append(end)

            found.parts.commits.arrive(found.log, confirm)
            found.fail()
            deleting = await found.delete()
            found.disk.ends.set()
            await deleting
            assert ends == [1]

    asyncio.run(act())


def test_a_partition_whose_own_files_fail_does_not_take_its_directory_offline(failing):
    dirs = failing.dirs
    failing.create("t", dirs.b)
    failing.create("u", dirs.b)
    (dirs.b / "t" / "0").rename(dirs.b / "t" / "away")
    (dirs.b / "t" / "0").touch()

    failing.write_until_refused("t")

    wait_until(lambda: "can be written after an error" in failing.log, what=lambda: failing.log)
    assert failing.codes("u") == (NONE, NONE)
    assert failing.described()[str(dirs.b)][0] == NONE
    assert not (dirs.b / ".logmirror" / "probe").exists()


@pytest.mark.move("E47")
def test_e47_a_full_disk_does_not_take_its_directory_offline(tmp_path):
    with small_disk(tmp_path, 200_000) as disk:
        b = disk.folder / "b"
        [port] = free_ports(1)
        options = {"segment_bytes": 20_000, "monitoring_port": port, "more_log_dirs": [str(b)]}
        with EmbeddedBroker(tmp_path / "broker", environment=disk.environment, **options) as broker:
            failing = Failing(TwoDirs(broker, broker.log_dir, b), None, port)
            failing.create("t", b)
            failing.write_until_refused("t")
            assert failing.described()[str(b)][0] == NONE
            disk.grow(20_000_000)
            assert failing.codes("t") == (NONE, NONE)
            assert "can be written after an error" not in failing.log
            assert failing.offline() == {}


@pytest.mark.move("E7", "E47")
def test_e47_a_full_target_fails_the_move_which_is_completed_when_there_is_room(tmp_path):
    with small_disk(tmp_path, 200_000) as disk:
        b = disk.folder / "b"
        options = {"segment_bytes": 20_000, "more_log_dirs": [str(b)]}
        with EmbeddedBroker(tmp_path / "broker", environment=disk.environment, **options) as broker:
            dirs = TwoDirs(broker, broker.log_dir, b)
            failing = Failing(dirs, None, 0)
            dirs.create("t")
            failing.create("other", b)
            fill(dirs, "t", 300_000 // len(BATCH))
            with dirs.client() as client, dirs.partition("t") as partition:
                before, end = contents(partition), partition.log_end
                assert client.move_one("t", b) == NONE
                wait_until(lambda: "No space left" in failing.log, what=lambda: failing.log)
                assert [*client.where("t")] == [str(dirs.a), str(b)]
                wait_until(lambda: not list(b.glob("t/*")), what=lambda: dirs.names("t"))
                assert failing.codes("other") == (NONE, NONE), "its copy does not fill the disk"
                assert failing.described()[str(b)][0] == NONE
                assert partition.produce(BATCH) == Appended(0, end)
                disk.grow(20_000_000)
                assert client.move_one("t", b) == NONE
            dirs.wait_in("t", b)
            dirs.wait_clean("t", "b/0")
            with dirs.partition("t") as partition:
                assert contents(partition)[: len(before)] == before
                assert len(contents(partition)) == end + 100


def test_the_broker_stops_if_the_directory_of_its_database_fails(tmp_path):
    """LogDirFailureTest: the broker halts. In `test_dir_failures` the database notices it."""
    [port] = free_ports(1)
    bootstrap, log = f"{HOST}:{port}", tmp_path / "broker.log"
    with failing_disk(tmp_path, "a") as disk, contextlib.ExitStack() as running:
        command = [sys.executable, "-m", "logmirror", "broker", "--listen", bootstrap]
        broker = Process([*command, "--log-dir", str(disk.folder)], log=log)
        running.callback(broker.end, kill=True)
        wait_until(lambda: "listening" in log.read_text(), what=log.read_text, timeout_s=60)
        create_topic(bootstrap, "t", 1, {})
        disk.fail()
        with PartitionClient(bootstrap, "t") as partition:
            assert partition.produce(BATCH).error == STORAGE

        wait_until(lambda: not broker.alive, what=log.read_text, timeout_s=60)

        shown = log.read_text()
        assert broker.popen.returncode == 75, shown
        assert "see docs/errors.md#logdirerror" in shown
        assert str(disk.folder) in shown
        assert "a log directory with its database or durable ends failed" in shown

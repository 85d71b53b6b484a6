"""Goal: a start removes what a crash left of moves, and nothing else; every partition is served.

Method: a real broker, and folders that are made while it is stopped. The names of tests are those
of the statements of moves.
"""

from __future__ import annotations

import shutil
import uuid
from typing import TYPE_CHECKING

import pytest

from broker.moves.conftest import TwoDirs
from broker.moves.test_moves import contents
from broker.moves.test_requests import BATCH, NONE, UNKNOWN, fill
from kit.judges.partition_client import Appended
from kit.runs.commands import wait_until
from kit.servers.embedded import EmbeddedBroker
from kit.servers.kafka import create_topic, delete_topic
from logmirror.broker.apis import Api
from logmirror.broker.log.disk import Disk
from logmirror.broker.log_dirs.placement import LogDirs, absolute
from logmirror.broker.metadata import MetadataStore, TopicRow
from logmirror.broker.moves.leftovers import Leftovers
from logmirror.broker.moves.move import mark_of
from logmirror.broker.place_rows import MoveRow

if TYPE_CHECKING:
    from pathlib import Path

COPY = f"0.{'0' * 32}-future"
OLD = f"0.{'a' * 32}-delete"
NONCE = "0" * 32
ROW = TopicRow(name="t", topic_id=uuid.uuid4(), partition_count=1, configs={})
KEY = ROW.topic_id.bytes, 0


def served(dirs: TwoDirs, topic: str) -> list[int]:
    """The offsets of all records."""
    with dirs.partition(topic) as partition:
        return [offset for offset, _ in contents(partition)]


def topics_in(dirs: TwoDirs, place: Path) -> list[str]:
    """The topics that DescribeLogDirs shows in a directory."""
    with dirs.client() as client:
        found = client.ask(Api.DESCRIBE_LOG_DIRS, 4, topics=None).results
    return [topic.name for one in found if one.log_dir == str(place) for topic in one.topics]


@pytest.mark.move("E83")
def test_e83_folders_of_no_move_are_removed_and_others_left_alone_with_a_warning(dirs):
    dirs.create("t")
    fill(dirs, "t", 3)
    dirs.broker.kill()
    for name in (COPY, OLD, "0.x-future"):
        (dirs.b / "t" / name).mkdir(parents=True)
    dirs.broker.start()
    dirs.wait_clean("t", "b/0.x-future", "data/0")
    warnings = [line for line in dirs.broker.log.read_text().splitlines() if "is ignored" in line]
    assert len(warnings) == 1
    assert str(dirs.b / "t" / "0.x-future") in warnings[0]
    assert served(dirs, "t") == [*range(300)]
    dirs.move("t", dirs.b)
    dirs.wait_clean("t", "b/0", "b/0.x-future")


@pytest.mark.move("E78")
def test_e78_a_copy_in_the_directory_of_the_partition_is_removed(dirs):
    dirs.create("t")
    fill(dirs, "t", 3)
    dirs.broker.kill()
    for name in (COPY, OLD):
        (dirs.a / "t" / name).mkdir()
        (dirs.a / "t" / name / f".{0:020d}.open").write_bytes(BATCH)
    dirs.broker.start()
    with dirs.client() as client:
        assert client.where("t") == {str(dirs.a): (3 * len(BATCH), 0, False)}
    dirs.wait_clean("t", "data/0")
    assert served(dirs, "t") == [*range(300)]
    dirs.move("t", dirs.b)


@pytest.mark.move("E77")
def test_e77_a_copy_of_an_unknown_topic_is_neither_served_nor_removed(dirs):
    dirs.create("t")
    fill(dirs, "t", 3)
    dirs.broker.kill()
    file = dirs.b / "ghost" / COPY / f".{0:020d}.open"
    file.parent.mkdir(parents=True)
    file.write_bytes(BATCH)

    dirs.broker.start()

    assert topics_in(dirs, dirs.b) == []
    with dirs.client() as client, dirs.partition("ghost") as ghost:
        assert client.where("ghost") == {}
        assert client.move_one("ghost", dirs.a) == UNKNOWN
        assert ghost.fetch(0).error_code == ghost.list_offset(-1)[0] == UNKNOWN
    with pytest.raises(Exception, match="a folder of this name that belongs to no topic"):
        create_topic(dirs.bootstrap, "ghost", 1, {})
    assert file.read_bytes() == BATCH
    assert served(dirs, "t") == [*range(300)]

    (dirs.b / "ghost").rename(dirs.b.parent / "away")
    create_topic(dirs.bootstrap, "ghost", 1, {})
    with dirs.partition("ghost") as ghost:
        assert ghost.produce(BATCH) == Appended(0, 0)


@pytest.mark.move("E82")
def test_e82_without_the_target_of_a_move_the_partition_is_served_and_not_moved(dirs, tmp_path):
    dirs.create("t")
    fill(dirs, "t")
    dirs.limit(1)
    with dirs.client() as client:
        assert client.move_one("t", dirs.b) == NONE
        wait_until(lambda: client.where("t")[str(dirs.b)].size_bytes > 0, what=lambda: "bytes")
    [copy] = (dirs.b / "t").iterdir()
    dirs.broker.kill()

    with EmbeddedBroker(tmp_path / "broker", segment_bytes=20_000) as broker:
        alone = TwoDirs(broker, dirs.a, dirs.b)
        with alone.client() as client, alone.partition("t") as partition:
            assert client.where("t") == {str(dirs.a): (60 * len(BATCH), 0, False)}
            assert partition.produce(BATCH) == Appended(0, 6_000)
        assert copy.exists()

    dirs.broker.start()
    dirs.limit(None)
    dirs.wait_clean("t", "data/0")
    with dirs.client() as client:
        assert client.where("t") == {str(dirs.a): (61 * len(BATCH), 0, False)}
    assert served(dirs, "t") == [*range(6_100)]


def at_a_start(tmp_path: Path, *names: str) -> Leftovers:
    """What a start with these directories finds, after a swap into `a`."""
    dirs = LogDirs([tmp_path / name for name in names], bucket="s3://x", work_dir=tmp_path / "work")
    target = absolute(tmp_path / "a")
    found = Leftovers(dirs, Disk(), {KEY: MoveRow(*KEY, target, NONCE)}, lambda *_: False)
    found.finish(ROW, 0)
    return found


@pytest.mark.move("E73", "E82")
@pytest.mark.parametrize("place", ["b", "d"])
def test_a_move_is_not_complete_before_a_start_has_its_old_directory(tmp_path, place):
    """Also if that has another name by then."""
    new, old = tmp_path / "a/t/0", tmp_path / place / "t/0"
    new.mkdir(parents=True)
    mark_of(new, NONCE).write_text(absolute(tmp_path / "b"))

    found = at_a_start(tmp_path, "a", "c")
    assert (found.ended, found.unfinished) == ([], [])
    assert found.away == {KEY}
    assert mark_of(new, NONCE).exists()

    old.mkdir(parents=True)
    found = at_a_start(tmp_path, "a", "c", place)
    assert (found.ended, found.away) == ([KEY], set())
    assert old.with_name(f"0.{NONCE}-delete").is_dir()
    assert not mark_of(new, NONCE).exists()


@pytest.mark.move("E73")
@pytest.mark.parametrize("source", ["b", ""])
def test_a_move_without_an_old_folder_is_complete_in_its_directory(tmp_path, source):
    """A partition without records has none. An earlier version did not note the directory."""
    new = tmp_path / "a/t/0"
    new.mkdir(parents=True)
    mark_of(new, NONCE).write_text(source and absolute(tmp_path / source))
    found = at_a_start(tmp_path, "a", "b")
    assert (found.ended, found.away) == ([KEY], set())


@pytest.mark.move("E64", "E73")
def test_a_topic_is_deleted_that_has_an_old_folder_in_a_directory_that_is_away(dirs, tmp_path):
    """Its name is refused until that folder is removed."""
    dirs.create("t")
    dirs.move("t", dirs.b)
    fill(dirs, "t", 3)
    dirs.broker.kill()
    shutil.copytree(dirs.b / "t", dirs.a / "t")
    mark_of(dirs.a / "t/0", NONCE).write_text(str(dirs.b))
    store = MetadataStore(dirs.a / ".logmirror" / "broker.sqlite")
    [row] = store.topics()
    store.change_moves([MoveRow(row.topic_id.bytes, 0, str(dirs.a), NONCE)], [])
    store.close()
    dirs.b.rename(tmp_path / "away")
    with EmbeddedBroker(dirs.broker.folder) as alone:
        assert served(TwoDirs(alone, dirs.a, dirs.b), "t") == [*range(300)]
        delete_topic(alone.bootstrap, "t")
        with pytest.raises(Exception, match="files of a deleted topic of this name are left"):
            create_topic(alone.bootstrap, "t", 1, {})
    (tmp_path / "away").rename(dirs.b)
    assert dirs.names("t") == ["b/0"]
    dirs.broker.start()
    assert dirs.names("t") == []
    create_topic(dirs.bootstrap, "t", 1, {})
    assert served(dirs, "t") == []

"""Goal: a start removes what a crash left of moves, and nothing else; every partition is served.

Method: a real broker, and folders that are made while it is stopped. The names of tests are those
of the statements of moves.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from broker.moves.conftest import TwoDirs
from broker.moves.test_moves import contents
from broker.moves.test_requests import BATCH, NONE, UNKNOWN, fill
from kit.judges.partition_client import Appended
from kit.runs.commands import wait_until
from kit.servers.embedded import EmbeddedBroker
from kit.servers.kafka import create_topic
from logmirror.broker.apis import Api

if TYPE_CHECKING:
    from pathlib import Path

COPY = f"0.{'0' * 32}-future"
OLD = f"0.{'a' * 32}-delete"


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

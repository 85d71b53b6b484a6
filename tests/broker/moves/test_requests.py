"""Goal: AlterReplicaLogDirs and DescribeLogDirs respond as KIP-113 says and as Apache Kafka does.

Method: a raw client, in each version. The names of tests are those of the statements of moves.
"""

from __future__ import annotations

import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from confluent_kafka import Producer

from broker.moves.conftest import TwoDirs
from kit.judges.log_dirs_client import ALTER
from kit.judges.partition_client import Appended, data_batch
from kit.judges.raw_client import build, message_class, nested, read_response, request_frame
from kit.runs.commands import wait_until
from kit.servers.embedded import EmbeddedBroker
from kit.servers.kafka import create_topic, delete_topic
from logmirror.broker.apis import VERSIONS
from logmirror.broker.log.file_names import open_path

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kit.judges.log_dirs_client import LogDirsClient

NONE, UNKNOWN, INVALID_TOPIC, STORAGE, NO_DIR = 0, 3, 17, 56, 57
BATCH = data_batch(100)


def fill(dirs: TwoDirs, topic: str, count: int = 60) -> None:
    with dirs.partition(topic) as partition:
        for number in range(count):
            assert partition.produce(BATCH) == Appended(0, 100 * number)


@pytest.fixture
def held(dirs: TwoDirs) -> TwoDirs:
    """With a topic `t`, whose move stays in progress until the limit is deleted."""
    dirs.create("t")
    fill(dirs, "t")
    dirs.limit(1)
    return dirs


@pytest.fixture
def three(tmp_path: Path) -> Iterator[tuple[TwoDirs, Path]]:
    """A broker with three directories, and the third one."""
    b, c = tmp_path / "b", tmp_path / "c"
    with EmbeddedBroker(
        tmp_path / "broker", more_log_dirs=[str(b), str(c)], segment_bytes=20_000
    ) as broker:
        yield TwoDirs(broker, broker.log_dir, b), c


@pytest.mark.move("E1", "E2", "E26")
def test_e02_only_the_names_of_directories_are_accepted(dirs, tmp_path, monkeypatch):
    dirs.create("t")
    (tmp_path / "link").symlink_to(dirs.b)
    monkeypatch.chdir(tmp_path)
    with dirs.client() as client:
        for path in (f"{dirs.b}/", f"{tmp_path}/./b", tmp_path / "link", "b", tmp_path / "c", ""):
            assert client.move_one("t", path) == NO_DIR, path
        assert client.where("t") == {str(dirs.a): (0, 0, False)}
        assert client.move_one("t", str(dirs.b)) == NONE
    assert not (tmp_path / "c").exists()


@pytest.mark.move("E3", "E4")
def test_e03_a_partition_is_created_where_it_was_requested(dirs):
    with dirs.client() as client:
        assert client.move({dirs.b: {"new": (0, 2)}, dirs.a: {"new": (1,)}}) == {
            ("new", 0): UNKNOWN,
            ("new", 2): UNKNOWN,
            ("new", 1): UNKNOWN,
        }
        dirs.create("other")
        assert client.move({dirs.b: {"other": (7, 0, -1)}}) == {
            ("other", 7): UNKNOWN,
            ("other", 0): NONE,
            ("other", -1): UNKNOWN,
        }
        create_topic(dirs.bootstrap, "new", 3, {})
        places = [[*client.where("new", number)] for number in range(3)]
        assert places == [[str(dirs.b)], [str(dirs.a)], [str(dirs.b)]]


@pytest.mark.move("E3")
def test_e03_a_restart_forgets_where_a_partition_was_requested(dirs):
    """It is created in the directory with the fewest partitions, which is the other one."""
    for topic, requested, other in (("killed", dirs.b, dirs.a), ("stopped", dirs.a, dirs.b)):
        with dirs.client() as client:
            assert client.move_one(topic, requested) == UNKNOWN
        if topic == "killed":
            dirs.broker.kill()
        else:
            assert dirs.broker.stop() == 0
        dirs.broker.start()
        create_topic(dirs.bootstrap, topic, 1, {})
        with dirs.client() as client:
            assert [*client.where(topic)] == [str(other)]


@pytest.mark.move("E5", "E19")
def test_e05_a_partition_that_is_there_is_not_moved(dirs):
    dirs.create("t")
    with dirs.client() as client:
        assert client.move_one("t", dirs.a) == NONE
        assert client.move({}) == {}
        assert client.where("t") == {str(dirs.a): (0, 0, False)}
    assert dirs.names("t") in ([], ["data/0"])


@pytest.mark.move("E6", "E10", "E22", "E89")
def test_e06_the_same_target_twice_is_one_move(held):
    with held.client() as client:
        assert client.move_one("t", held.b) == NONE
        wait_until(lambda: len(held.names("t")) == 2, what=lambda: "the copy")
        names = held.names("t")
        assert client.move_one("t", held.b) == NONE
        assert client.move_one("t", held.b.parent / "none") == NO_DIR
        wait_until(lambda: client.where("t")[str(held.b)].size_bytes > 0, what=lambda: "bytes")
        found = client.where("t")
        assert found[str(held.a)] == (60 * len(BATCH), 0, False)
        size, lag, is_future = found[str(held.b)]
        assert is_future
        assert 0 < size < 60 * len(BATCH)
        assert lag == 6_000 - 100 * (size // len(BATCH))
        assert held.names("t") == names
    held.limit(None)
    held.wait_in("t", held.b)
    held.wait_clean("t", "b/0")


@pytest.mark.move("E9", "E86")
def test_e09_the_current_directory_cancels_a_move(held):
    with held.client() as client:
        assert client.move_one("t", held.b) == NONE
        wait_until(lambda: len(held.names("t")) == 2, what=lambda: "the copy")
        assert client.move_one("t", held.a) == NONE
        assert client.where("t") == {str(held.a): (60 * len(BATCH), 0, False)}
        held.wait_clean("t", "data/0")
        assert client.move_one("t", held.a) == NONE
    held.broker.kill()
    held.broker.start()
    held.wait_in("t", held.a)
    held.limit(None)
    held.move("t", held.b)


@pytest.mark.move("E11", "E17", "E18")
def test_e11_the_last_of_several_targets_counts(dirs):
    dirs.create("t", 3)
    with dirs.client() as client:
        found = client.move(
            {dirs.b: {"t": (0, 1)}, "/none": {"t": (2,)}, dirs.a: {"t": (0,)}}, version=1
        )
        assert found == {("t", 0): NONE, ("t", 1): NONE, ("t", 2): NO_DIR}
        dirs.wait_in("t", dirs.b, 1)
        assert [*client.where("t", 0)] == [str(dirs.a)]


@pytest.mark.move("E18")
def test_e18_other_versions_end_the_connection_and_move_nothing(dirs):
    dirs.create("t")
    assert VERSIONS[ALTER] == (1, 2)
    for version in (0, 3):
        with dirs.client() as client:
            send_in_version(client, "t", dirs.b, version)
            assert client.is_closed(), version
    with dirs.client() as client:
        assert client.where("t") == {str(dirs.a): (0, 0, False)}
        for version, target in ((1, dirs.b), (2, dirs.a)):
            send_in_version(client, "t", target, version)
            _, response = read_response(ALTER, version, client.receive_frame())
            [topic] = response.results
            assert (topic.topic_name, topic.partitions[0].error_code) == ("t", NONE)
            dirs.wait_in("t", target)


def send_in_version(client: LogDirsClient, topic: str, target: Path, version: int) -> None:
    """Request a move; version 0 is as version 1, and versions above 2 as version 2."""
    known = max(1, min(version, 2))
    partitions = build(
        nested(ALTER, known, "request", "AlterReplicaLogDirTopic"), name=topic, partitions=(0,)
    )
    wanted = build(
        nested(ALTER, known, "request", "AlterReplicaLogDir"),
        path=str(target),
        topics=(partitions,),
    )
    request = build(message_class(ALTER, known, "request"), dirs=(wanted,))
    frame = request_frame(ALTER, known, request)
    client.send_frame(frame[:2] + version.to_bytes(2) + frame[4:])


def ask_at_once(dirs: TwoDirs, *targets: Path, meanwhile: Callable[[], object]) -> None:
    """Request each target of `t` 20 times, each from a client of its own."""
    together = threading.Barrier(len(targets))

    def ask(target: Path) -> list[int]:
        with dirs.client() as own:
            together.wait(60)
            return [own.move_one("t", target) for _ in range(20)]

    with ThreadPoolExecutor(len(targets)) as pool:
        asked = [pool.submit(ask, target) for target in targets]
        while not all(one.done() for one in asked):
            meanwhile()
        assert [one.result() for one in asked] == [[NONE] * 20] * len(targets)


@pytest.mark.move("E12")
def test_e12_the_same_target_from_several_clients_is_one_move(held):
    seen = set[str]()
    ask_at_once(held, *[held.b] * 4, meanwhile=lambda: seen.update(held.names("t")))
    wait_until(lambda: len(held.names("t")) == 2, what=lambda: "the copy")
    assert seen <= {*held.names("t")}, "one copy, from the first request on"
    held.limit(None)
    held.wait_in("t", held.b)
    held.wait_clean("t", "b/0")
    with held.partition("t") as partition:
        assert partition.produce(BATCH) == Appended(0, 6_000)


@pytest.mark.move("E8", "E13")
def test_e13_different_targets_from_several_clients_are_one_move_at_a_time(three):
    """Of a partition with records: behind a limit, and while moves end."""
    dirs, c = three
    dirs.create("t")
    fill(dirs, "t")

    def folders() -> list[Path]:
        return [folder for place in (dirs.a, dirs.b, c) for folder in place.glob("t/*")]

    with dirs.client() as client:
        copies = list[int]()

        def look() -> None:
            copies.append(sum(one.is_future for one in client.where("t").values()))

        dirs.limit(1)
        ask_at_once(dirs, dirs.b, c, dirs.b, c, meanwhile=look)
        shown = client.where("t")
        assert not shown.pop(str(dirs.a)).is_future
        [(target, replica)] = shown.items()
        assert replica.is_future
        place, other = (dirs.b, c) if target == str(dirs.b) else (c, dirs.b)
        wait_until(
            lambda: len(folders()) <= 2 and not [*other.glob("t/*")],
            what=lambda: f"one copy at most: {folders()}",
        )
        dirs.limit(None)
        dirs.wait_in("t", place)
        wait_until(lambda: folders() == [place / "t" / "0"], what=lambda: f"no copy: {folders()}")

        ask_at_once(dirs, dirs.a, c, dirs.b, c, meanwhile=look)
        wait_until(lambda: len(client.where("t")) == 1, what=lambda: f"{client.where('t')}")
        [last] = client.where("t")
        wait_until(lambda: len(folders()) == 1, what=lambda: f"no copy: {folders()}")
        assert folders()[0].is_relative_to(last)
        assert set(copies) <= {0, 1}
    from broker.moves.test_moves import contents  # noqa: PLC0415  # it imports this module

    with dirs.partition("t") as partition:
        assert [offset for offset, _ in contents(partition)] == [*range(6_000)]
        assert partition.produce(BATCH) == Appended(0, 6_000)


@pytest.mark.move("E14")
def test_e14_a_name_that_is_too_long_for_a_copy_is_refused(dirs):
    with dirs.client() as client:
        assert client.move_one("n" * 213, dirs.b) == UNKNOWN
        assert client.move_one("n" * 214, dirs.b) == INVALID_TOPIC


@pytest.mark.move("E15", "E95")
def test_e15_nothing_moves_while_a_directory_is_offline(three, tmp_path):
    """Not to it, and not to another one. What is in progress continues, and can be cancelled."""
    dirs, c = three
    for topic in ("t", "moves"):
        dirs.create(topic)
    fill(dirs, "moves")
    dirs.limit(1)
    with dirs.client() as client:
        assert client.move_one("moves", dirs.b) == NONE
        wait_until(lambda: len(dirs.names("moves")) == 2, what=lambda: "the copy")
        c.rename(tmp_path / "away")
        assert client.move_one("t", c) == STORAGE
        assert client.move_one("t", dirs.b) == STORAGE
        assert client.move_one("t", dirs.a) == NONE
        assert [*client.where("t")] == [str(dirs.a)]
        assert client.move_one("moves", c) == STORAGE
        assert client.where("moves")[str(dirs.b)].is_future
        assert client.move_one("moves", dirs.a) == NONE
        assert [*client.where("moves")] == [str(dirs.a)]
        (tmp_path / "away").rename(c)
    dirs.limit(None)
    dirs.move("t", c)
    dirs.move("moves", dirs.b)


@pytest.mark.move("E6")
def test_e06_the_same_target_is_accepted_while_another_directory_is_offline(three, tmp_path):
    """No move begins, so that it is no matter of the other directory."""
    dirs, c = three
    dirs.create("t")
    fill(dirs, "t")
    dirs.limit(1)
    with dirs.client() as client:
        assert client.move_one("t", dirs.b) == NONE
        wait_until(lambda: len(dirs.names("t")) == 2, what=lambda: "the copy")
        names = dirs.names("t")
        c.rename(tmp_path / "away")
        assert client.move_one("t", dirs.b) == NONE
        assert dirs.names("t") == names
        (tmp_path / "away").rename(c)


@pytest.mark.move("E7", "E30", "E46")
@pytest.mark.parametrize("how", ["requested", "restarted"])
def test_e46_damage_in_the_source_fails_the_move_which_begins_again(dirs, how):
    dirs.create("t")
    fill(dirs, "t")
    [path, *_] = sorted((dirs.a / "t" / "0").glob("[0-9]*.batches"))
    sound = path.read_bytes()
    damaged = bytearray(sound)
    damaged[len(BATCH) + 200] ^= 1
    path.write_bytes(damaged)
    with dirs.client() as client, dirs.partition("t") as partition:
        assert client.move_one("t", dirs.b) == NONE
        log = dirs.broker.log
        wait_until(lambda: "failed" in log.read_text(), what=lambda: "a failed move")
        assert path.name in log.read_text()
        assert f"position={len(BATCH)}" in log.read_text()
        size, lag, is_future = client.where("t")[str(dirs.b)]
        assert (size, lag, is_future) == (len(BATCH), 5_900, True)
        for number in (60, 61):
            assert partition.produce(BATCH) == Appended(0, 100 * number)
            assert client.where("t") == {
                str(dirs.a): ((number + 1) * len(BATCH), 0, False),
                str(dirs.b): (size, 100 * number, True),  # what it lacks
            }
        path.write_bytes(sound)
        if how == "requested":
            assert client.move_one("t", dirs.b) == NONE
    if how == "restarted":
        dirs.broker.kill()
        dirs.broker.start()
    dirs.wait_in("t", dirs.b)
    dirs.wait_clean("t", "b/0")


@pytest.mark.move("E64")
def test_e64_a_topic_that_moves_is_deleted_with_its_copies(held):
    with held.client() as client:
        assert client.move_one("t", held.b) == NONE
        wait_until(lambda: len(held.names("t")) == 2, what=lambda: "the copy")
    delete_topic(held.bootstrap, "t")
    assert held.names("t") == []
    held.create("t")
    fill(held, "t", 3)
    held.broker.kill()
    held.broker.start()
    held.wait_in("t", held.a)


@pytest.mark.move("E64")
def test_e64_a_topic_is_deleted_without_an_error_of_its_moves(dirs):
    dirs.create("t", 8)
    producer = Producer({"bootstrap.servers": dirs.bootstrap})
    for number in range(80):
        producer.produce("t", b"x" * 5_000, partition=number % 8)
    assert producer.flush(20) == 0
    dirs.limit(1)
    with dirs.client() as client:
        assert {*client.move({dirs.b: {"t": tuple(range(8))}}).values()} == {NONE}
        wait_until(lambda: len(dirs.names("t")) > 8, what=lambda: "copies")
    delete_topic(dirs.bootstrap, "t")
    assert dirs.names("t") == []
    assert "failed" not in dirs.broker.log.read_text()


@pytest.mark.move("E80")
def test_e80_two_folders_without_a_move_take_only_that_partition_offline(dirs):
    dirs.create("t")
    dirs.create("u")
    fill(dirs, "t", 3)
    fill(dirs, "u", 3)
    dirs.broker.kill()
    shutil.copytree(dirs.a / "t", dirs.b / "t")
    dirs.broker.start()
    with dirs.client() as client, dirs.partition("t") as bad, dirs.partition("u") as good:
        assert bad.produce(BATCH).error == STORAGE
        assert client.where("t") == {}
        assert client.move_one("t", dirs.b) == STORAGE
        assert good.produce(BATCH) == Appended(0, 300)
    log = dirs.broker.log.read_text()
    assert str(dirs.a / "t" / "0") in log
    assert str(dirs.b / "t" / "0") in log


@pytest.mark.move("E80")
def test_e80_a_folder_that_is_there_already_is_never_taken_for_the_partition(held, tmp_path):
    """Not when the move is requested, and not after a crash."""
    with held.client() as client, held.partition("t") as partition:
        shutil.copytree(held.a / "t", held.b / "t")
        assert client.move_one("t", held.b) == STORAGE
        assert [*client.where("t")] == [str(held.a)]
        shutil.rmtree(held.b / "t")
        assert client.move_one("t", held.b) == NONE
        wait_until(lambda: "0" not in held.names("t") and len(held.names("t")) == 2, what=str)
        shutil.copytree(held.a / "t" / "0", held.b / "t" / "0")
        assert partition.produce(BATCH) == Appended(0, 6_000)
    held.broker.kill()
    held.broker.start()
    with held.client() as client:
        assert client.where("t") == {}, "offline"
    held.broker.kill()
    shutil.move(held.b / "t" / "0", tmp_path / "away")
    held.broker.start()
    held.limit(None)
    held.wait_in("t", held.b)
    with held.partition("t") as partition:
        assert partition.log_end == 6_100


@pytest.mark.move("E80")
@pytest.mark.parametrize("names", [[], [open_path(Path(), 0).name]])
def test_e80_a_folder_without_records_is_no_obstacle_to_a_move(dirs, names):
    """An empty partition was there, and its directory was away for a start."""
    dirs.create("t")
    fill(dirs, "t", 3)
    (dirs.b / "t" / "0").mkdir(parents=True)
    for name in names:
        (dirs.b / "t" / "0" / name).touch()
    dirs.move("t", dirs.b)
    with dirs.partition("t") as partition:
        assert partition.log_end == 300


@pytest.mark.move("E79")
def test_e79_of_two_copies_that_of_the_move_is_continued(held):
    with held.client() as client:
        assert client.move_one("t", held.b) == NONE
        wait_until(lambda: len(held.names("t")) == 2, what=lambda: "the copy")
    held.broker.kill()
    stray = held.b / "t" / f"0.{'1' * 32}-future"
    shutil.copytree(held.a / "t" / "0", stray)
    held.broker.start()
    wait_until(lambda: not stray.exists(), what=lambda: "the removal of the other copy")
    held.limit(None)
    held.wait_in("t", held.b)
    held.wait_clean("t", "b/0")
    with held.partition("t") as partition:
        assert partition.produce(BATCH) == Appended(0, 6_000)

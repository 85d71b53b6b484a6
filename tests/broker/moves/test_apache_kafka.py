"""Goal: requests for log directories have the results that they have in Apache Kafka.

Method: the same driver runs with the embedded broker and with Apache Kafka 3.9.2 and 4.3.1, and
what it sees must be equal (`both_brokers`). `DIFFERENCES` has what is not, each with its row in
docs/moves.md; one that no longer occurs must be removed. The names of tests are those of the
statements of moves.
"""

from __future__ import annotations

import re
import struct
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest
from confluent_kafka.admin import AdminClient, AlterConfigOpType, ConfigEntry, ConfigResource

from broker.moves.both_brokers import DIFFERENCES, Side, on_both, on_newest
from broker.moves.test_cordoned import cordon
from broker.moves.test_moves import contents
from broker.moves.test_requests import BATCH, STORAGE, fill, send_in_version
from kit.judges.log_dirs_client import ALTER, DESCRIBE
from kit.judges.raw_client import build, nested
from kit.runs.commands import wait_until
from kit.servers.kafka import create_topic
from logmirror.broker.apis import Api

if TYPE_CHECKING:
    from broker.moves.both_brokers import Seen

pytestmark = [
    pytest.mark.gate("brokers of Apache Kafka with several log directories"),
    pytest.mark.jvm,
    pytest.mark.xdist_group("log-dirs-of-apache-kafka"),
]

PAGE: Final = (Path(__file__).resolve().parents[3] / "docs" / "moves.md").read_text()


# ---- Requests ------------------------------------------------------------------------------------


@pytest.mark.move("E1", "E2")
@on_both
def test_e02_only_the_names_of_directories_are_accepted(dirs: Side, topic: str) -> Seen:
    dirs.create(topic)
    parent = dirs.b.parent
    link = parent / "link"
    link.symlink_to(dirs.b)
    asked = {
        "a slash at the end": f"{dirs.b}/",
        "a dot": f"{parent}/./b",
        "two dots": f"{parent}/c/../b",
        "a link": link,
        "relative": "b",
        "unknown": parent / "none",
        "empty": "",
        "its parent": parent,
        "exact": dirs.b,
    }
    with dirs.client() as client:
        for label, path in asked.items():
            yield label, client.move_one(topic, path)
    link.unlink()
    dirs.wait_in(topic, dirs.b)
    yield "a directory was created", (parent / "none").exists()


@pytest.mark.move("E3", "E4")
@on_both
def test_e03_a_partition_is_created_where_it_was_requested(dirs: Side, topic: str) -> Seen:
    with dirs.client() as client:
        wanted = {dirs.b: {topic: (0, 2)}, dirs.c: {topic: (1,)}}
        yield "unknown topic", client.move(wanted)
        yield "the last request counts", client.move_one(topic, dirs.c, 2)
        yield "no directory", client.move_one(topic, dirs.b.parent / "none", 2)
        create_topic(dirs.bootstrap, topic, 3, {})
        yield "created", [dirs.shown(topic, number) for number in range(3)]
        wanted = {dirs.a: {topic: (7, 0, -1)}}
        yield "index too high", client.move(wanted)
        dirs.wait_in(topic, dirs.a)


@pytest.mark.move("E5", "E19")
@on_both
def test_e05_a_partition_that_is_there_is_not_moved(dirs: Side, topic: str) -> Seen:
    dirs.create(topic)
    fill(dirs, topic, 3)
    with dirs.client() as client:
        yield "its directory", client.move_one(topic, dirs.a)
        yield "no directories", client.move({})
        yield "no topics", client.move({dirs.b: {}})
        yield "no partitions", client.move({dirs.b: {topic: ()}})
    yield "described", dirs.shown(topic)
    yield "folders", dirs.folders(topic)


@pytest.mark.move("E6", "E10", "E22", "E89")
@on_both
def test_e06_the_same_target_twice_is_one_move(dirs: Side, topic: str) -> Seen:
    with dirs.held(topic) as client:
        paths = dirs.paths(topic)
        yield "the same target", client.move_one(topic, dirs.b)
        yield "an unknown target", client.move_one(topic, dirs.b.parent / "none")

        def is_consistent() -> bool:
            size, lag, _ = client.where(topic)[str(dirs.b)]
            return size % len(BATCH) == 0 and lag == 6_000 - 100 * (size // len(BATCH)) > 0

        wait_until(is_consistent, what=lambda: f"lag and size: {client.where(topic)}")
        yield "described", dirs.shown(topic)
        yield "the partition", client.where(topic)[str(dirs.a)]
        yield "the copy is the same", dirs.paths(topic) == paths
    dirs.wait_in(topic, dirs.b)
    with dirs.client() as client:
        yield "described after the move", client.where(topic)[str(dirs.b)]
    dirs.wait_folders(topic, "b")


@pytest.mark.move("E84")
@on_both
def test_e84_the_name_of_the_folder_of_a_copy(dirs: Side, topic: str) -> Seen:
    with dirs.held(topic):
        [copy] = dirs.b.rglob("*-future")
        name = str(copy.relative_to(dirs.b)).replace(topic, "TOPIC")
        yield "folder", re.sub("[0-9a-f]{32}", "ID", name)
    dirs.wait_in(topic, dirs.b)


@pytest.mark.move("E9", "E86")
@on_both
def test_e09_the_current_directory_cancels_a_move(dirs: Side, topic: str) -> Seen:
    with dirs.held(topic) as client:
        yield "its directory", client.move_one(topic, dirs.a)
        yield "described", client.where(topic)[str(dirs.a)]
        yield "and nowhere else", dirs.shown(topic)
        dirs.wait_folders(topic, "a")
        yield "again", client.move_one(topic, dirs.a)
    dirs.move(topic, dirs.b)
    with dirs.partition(topic) as partition:
        yield "records", len(contents(partition))


@pytest.mark.move("E8")
@on_both
def test_e08_another_directory_redirects_a_move(dirs: Side, topic: str) -> Seen:
    with dirs.held(topic) as client:
        yield "another target", client.move_one(topic, dirs.c)
        yield "described", dirs.shown(topic)
        wait_until(lambda: not dirs.copies(topic, "b"), what=lambda: f"{dirs.folders(topic)}")
    dirs.wait_in(topic, dirs.c)
    dirs.wait_folders(topic, "c")
    with dirs.partition(topic) as partition:
        yield "records", len(contents(partition))


@pytest.mark.move("E11", "E17", "E18")
@on_both
def test_e11_the_last_of_several_targets_counts(dirs: Side, topic: str) -> Seen:
    dirs.create(topic, 4)
    with dirs.client() as client:
        wanted = {
            dirs.b: {topic: (0, 1, 3)},
            "/none": {topic: (2, 3)},
            dirs.c: {topic: (0, 9), "n" * 214: (0,)},
        }
        yield "version 1", client.move(wanted, version=1)
    dirs.wait_in(topic, dirs.c, 0)
    dirs.wait_in(topic, dirs.b, 1)
    yield "described", [dirs.shown(topic, number) for number in range(4)]


@pytest.mark.move("E18")
@on_newest
def test_e18_other_versions_end_the_connection_and_move_nothing(dirs: Side, topic: str) -> Seen:
    """Apache Kafka 3.9 has version 0, too."""
    dirs.create(topic)
    with dirs.client() as client:
        keys = client.ask(Api.API_VERSIONS, 0).api_keys
        [offered] = [(key.min_version, key.max_version) for key in keys if key.api_key == ALTER]
        yield "offered", offered
    for version in (0, 3):
        with dirs.client() as client:
            send_in_version(client, topic, dirs.b, version)
            yield f"version {version} ends it", client.is_closed()
    yield "described", dirs.shown(topic)


@pytest.mark.move("E12")
@on_both
def test_e12_the_same_target_from_several_clients_is_one_move(dirs: Side, topic: str) -> Seen:
    with dirs.held(topic):
        paths = dirs.paths(topic)
        yield "the same target", from_several_clients(dirs, topic, [dirs.b] * 4)
        yield "described", dirs.shown(topic)
        yield "the copy is the same", dirs.paths(topic) == paths
    dirs.wait_in(topic, dirs.b)
    dirs.wait_folders(topic, "b")
    with dirs.partition(topic) as partition:
        yield "records", [offset for offset, _ in contents(partition)]


@pytest.mark.move("E13")
@on_both
def test_e13_different_targets_from_several_clients_are_one_move(dirs: Side, topic: str) -> Seen:
    with dirs.held(topic) as client:
        yield "different targets", from_several_clients(dirs, topic, [dirs.b, dirs.c] * 2)
        # Behind the limit, a copy that was redirected may have no folder yet.
        wait_until(lambda: len(dirs.folders(topic)) <= 2, what=lambda: str(dirs.folders(topic)))
        yield "copies", sorted(dirs.shown(topic).values())
        yield "the last request", client.move_one(topic, dirs.c)
    dirs.wait_in(topic, dirs.c)
    dirs.wait_folders(topic, "c")
    with dirs.partition(topic) as partition:
        yield "records", [offset for offset, _ in contents(partition)]


def from_several_clients(dirs: Side, topic: str, targets: list[Path]) -> list[int]:
    """Request each target from a client of its own, at the same time; returns their codes."""

    def request(target: Path) -> int:
        with dirs.client() as client:
            return int(client.move_one(topic, target))

    with ThreadPoolExecutor(len(targets)) as pool:
        return list(pool.map(request, targets))


@pytest.mark.move("E14")
@on_both
def test_e14_a_name_that_is_too_long_for_a_copy_is_refused(dirs: Side, topic: str) -> Seen:
    name = topic + "n" * 213
    with dirs.client() as client:
        for size in (213, 214):
            for path in (dirs.b, dirs.b.parent / "none"):
                yield f"{size}, {path.name}", client.move_one(name[:size], path)
        yield "a longer index", client.move_one(name[:213], dirs.b, 10)


@pytest.mark.move("E16")
@on_both
def test_e16_without_permission_each_partition_is_refused(dirs: Side, topic: str) -> Seen:
    dirs.create(topic, 2)
    part = nested(ALTER, 2, "request", "AlterReplicaLogDirTopic")
    wanted = build(
        nested(ALTER, 2, "request", "AlterReplicaLogDir"),
        path=str(dirs.b),
        topics=(build(part, name=topic, partitions=(0, 1, 9)),),
    )
    with dirs.without_permissions() as client:
        [found] = client.ask(ALTER, 2, dirs=(wanted,)).results
        codes = {one.partition_index: int(one.error_code) for one in found.partitions}
        yield "moves", codes
        for version in (1, 3, 4):
            response = client.ask(DESCRIBE, version, topics=None)
            code = int(getattr(response, "error_code", -2))
            yield f"description, version {version}", (code, response.results)
    yield "described", [dirs.shown(topic, number) for number in (0, 1)]


# ---- DescribeLogDirs -----------------------------------------------------------------------------


@pytest.mark.move("E21", "E23", "E25", "E26", "E27", "E28", "E29")
@on_both
def test_e21_the_directories_are_described(dirs: Side, topic: str) -> Seen:
    dirs.create(topic, 3)
    fill(dirs, topic, 30)
    dirs.move(topic, dirs.b)
    asked: dict[str, dict[str, tuple[int, ...]]] = {
        "listed": {topic: (2, 0, 2, 9, -1)},
        "no partitions": {topic: ()},
        "unknown": {"not-there": (0,)},
        "no topics": {},
    }
    with dirs.client() as client:
        for version in (1, 2, 3, 4):
            kind = nested(DESCRIBE, version, "request", "DescribableLogDirTopic")
            for label, wanted in asked.items():
                topics = tuple(build(kind, topic=t, partitions=p) for t, p in wanted.items())
                response = client.ask(DESCRIBE, version, topics=topics)
                yield f"{label}, version {version}", described(dirs, response, topic)
            response = client.ask(DESCRIBE, version, topics=None)
            yield f"all, version {version}", described(dirs, response, topic)
    folder = dirs.folder(topic, dirs.b)
    files = [*folder.glob("*.log"), *folder.glob("[0-9]*.batches"), *folder.glob(".*.open")]
    yield "bytes in files", sum(path.stat().st_size for path in files)


def described(dirs: Side, response: Any, topic: str) -> dict[str, object]:
    """What a response shows of a topic, by log directory."""
    found: dict[str, object] = {"error": int(getattr(response, "error_code", 0))}
    for one in response.results:
        has_totals = one.total_bytes > one.usable_bytes > 0 if hasattr(one, "total_bytes") else None
        partitions = {
            part.partition_index: (part.partition_size, part.offset_lag, part.is_future_key)
            for shown in one.topics
            if shown.name == topic
            for part in shown.partitions
        }
        found[dirs.name(one.log_dir)] = int(one.error_code), has_totals, partitions
    return found


# ---- Directories, limits and formats -------------------------------------------------------------


@pytest.mark.move("E15", "E24", "E95")
@on_both
def test_e15_nothing_moves_while_a_directory_is_offline(dirs: Side, topic: str) -> Seen:
    dirs.create(topic)
    fill(dirs, topic, 3)
    away = dirs.c.with_name("away")
    with dirs.client() as client:

        def found() -> dict[str, tuple[int, bool, list[str]]]:
            return {
                dirs.name(one.log_dir): (
                    int(one.error_code),
                    one.total_bytes > 0,
                    [shown.name for shown in one.topics if shown.name == topic],
                )
                for one in client.ask(DESCRIBE, 4, topics=None).results
            }

        dirs.c.rename(away)
        dirs.c.symlink_to(away.with_name("none"))  # so that it is not created again
        try:
            yield "the offline directory", client.move_one(topic, dirs.c)
            wait_until(lambda: found()["c"][0] == STORAGE, what=lambda: f"{found()}")
            yield "described", found()
            yield "again", client.move_one(topic, dirs.c)
            yield "another directory", client.move_one(topic, dirs.b)
            yield "its directory", client.move_one(topic, dirs.a)
            yield "an unknown directory", client.move_one(topic, dirs.b.parent / "none")
            with dirs.partition(topic) as partition:
                yield "produced", partition.produce(BATCH)
        finally:
            dirs.c.unlink()
            away.rename(dirs.c)
        yield "back without a restart", found()["c"][0] == 0
    if not dirs.is_ours:
        dirs.broker.restart()
    dirs.move(topic, dirs.c)
    yield "moved", dirs.shown(topic)


@pytest.mark.move("E1", "E26")
@on_newest
def test_nothing_moves_to_a_cordoned_directory(dirs: Side, topic: str) -> Seen:
    with dirs.held(topic) as client:

        def flags() -> dict[str, bool]:
            found = client.ask(DESCRIBE, 5, topics=None).results
            return {dirs.name(one.log_dir): bool(one.is_cordoned) for one in found}

        yield "before", flags()
        cordon(dirs, dirs.a, dirs.c)
        try:
            wait_until(lambda: flags()["a"], what=lambda: f"{flags()}")
            yield "described", flags()
            yield "another target", client.move_one(topic, dirs.c)
            yield "still moves", dirs.shown(topic)
            yield "cancelled", client.move_one(topic, dirs.a)
            yield "after the cancellation", dirs.shown(topic)
            yield "its directory", client.move_one(topic, dirs.a)
            yield "a later topic", client.move_one(f"{topic}-later", dirs.c)
            yield "a later topic elsewhere", client.move_one(f"{topic}-later", dirs.b)
            yield "unknown", client.move_one(topic, dirs.b.parent / "none")
        finally:
            cordon(dirs)
        wait_until(lambda: not flags()["a"], what=lambda: f"{flags()}")


@pytest.mark.move("E92")
@on_both
def test_e92_limits_that_are_not_set_can_be_deleted(dirs: Side, topic: str) -> Seen:
    dirs.create(topic)
    admin = AdminClient({"bootstrap.servers": dirs.bootstrap})
    broker, of_topic = ConfigResource.Type.BROKER, ConfigResource.Type.TOPIC
    keys = [
        (broker, "1", "replica.alter.log.dirs.io.max.bytes.per.second"),
        (broker, "1", "leader.replication.throttled.rate"),
        (broker, "1", "follower.replication.throttled.rate"),
        (of_topic, topic, "leader.replication.throttled.replicas"),
        (of_topic, topic, "follower.replication.throttled.replicas"),
    ]
    for kind, name, key in keys:
        entry = ConfigEntry(key, None, incremental_operation=AlterConfigOpType.DELETE)
        resource = ConfigResource(kind, name, incremental_configs=[entry])
        yield key, admin.incremental_alter_configs([resource])[resource].result(30)


@pytest.mark.move("E41")
@on_both
def test_e41_batches_of_older_formats_are_refused(dirs: Side, topic: str) -> Seen:
    """So a log has none that a move would have to copy."""
    dirs.create(topic)
    with dirs.partition(topic) as partition:
        for magic in (0, 1):
            for version in (3, 9):
                code = partition.produce(message_set(magic), version=version).error
                yield f"magic {magic}, Produce {version}", code
        yield "log end", partition.log_end


def message_set(magic: int) -> bytes:
    """One record in the format of Apache Kafka 0.9 or 0.10."""
    timestamp = struct.pack(">q", 1_700_000_000_000) if magic else b""
    body = struct.pack(">bb", magic, 0) + timestamp + struct.pack(">ii", -1, 5) + b"value"
    message = struct.pack(">I", zlib.crc32(body)) + body
    return struct.pack(">qi", 0, len(message)) + message


# ---- The page ------------------------------------------------------------------------------------


def test_each_difference_has_its_row_in_the_page():
    section = PAGE.partition("## Differences from Apache Kafka")[2]
    rows = re.findall(r"^\| ([A-Z][^|]+?) \| [^|]+ \| [^|]+ \|$", section, re.MULTILINE)
    assert rows == list(dict.fromkeys(DIFFERENCES.values()))

"""Goal: groups continue in a replica at their first unread record, although the source is lost.

Method: librdkafka commits at the source, `logmirror run` copies records into a second cluster and
an archive, with the committed offsets beside it. Then the source is stopped, or its address leads
nowhere. `logmirror groups --offsets-from` plans from the archive alone, and librdkafka continues.
"""

from __future__ import annotations

import json
import signal
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from kit.judges.clients import odd_messages, produce
from kit.judges.copies import copy, end_of
from kit.judges.truth import object_names
from kit.runs.commands import logmirror, wait_until
from kit.runs.inline_run import InlineRun, config_text, run_now
from kit.runs.replica_groups import PARTITIONS, World, commit, committed, rest, world_of
from kit.servers.apache import VERSIONS
from kit.servers.embedded import EmbeddedBroker
from kit.servers.kafka import ApacheKafka
from kit.servers.machine import HOST, free_ports
from kit.servers.s3 import S3Server
from kit.tiers import all_but
from logmirror.archive.group_offsets import CommittedOffset, GroupEntry, Header, encoded_group
from logmirror.archive.group_snapshots import Snapshots
from logmirror.failpoints import SNAPSHOT_POINTS, VARIABLE
from logmirror.stores.filesystem import FilesystemStore
from logmirror.testing import check_tiles

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = pytest.mark.xdist_group("e2e-groups")

FLUSH = {"max-time-ms": 60_000, "max-bytes": 1 << 20, "max-offsets": 100}
INTERVAL_MS = 200


def with_archive(world: World, archive: dict[str, Any], **groups: Any) -> World:
    """The same with an archive named `files`, and `groups`."""
    replica = world.mirror["destinations"][0]
    world.mirror["destinations"] = [replica, archive | {"name": "files"}]
    world.mirror["flush"] = FLUSH
    world.mirror["groups"] = {
        "source-alias": "primary",
        "include": [f"{world.topic}.*"],
        "archive-interval-ms": INTERVAL_MS,
        **groups,
    }
    world.config.write_text(config_text(world.mirror))
    return world


@pytest.fixture
def target(tmp_path) -> Iterator[EmbeddedBroker]:
    with EmbeddedBroker(tmp_path / "broker") as broker:
        yield broker


@pytest.fixture
def world(kafka_431, target, topic_name, tmp_path) -> World:
    """From Apache Kafka to the embedded broker, with the same offsets, and to a directory."""
    made = world_of(tmp_path, topic_name, "preserve", kafka_431.bootstrap, target.bootstrap)
    return with_archive(made, {"type": "filesystem", "root": str(tmp_path / "archive")})


def without_source(world: World) -> World:
    """The same after the source is lost: its address leads nowhere."""
    nowhere = {"source": {"bootstrap-servers": f"{HOST}:{free_ports(1)[0]}"}}
    lost = world._replace(mirror=world.mirror | nowhere)
    lost.config.write_text(config_text(lost.mirror))
    return lost


def archive_now(world: World) -> None:
    done = logmirror("run", "--only", "groups", "--until-now", "-c", world.config)
    assert done.returncode == 0, done.stderr


def snapshots(world: World) -> list[Path]:
    root = Path(world.mirror["destinations"][1]["root"])
    return sorted((root / ".logmirror/groups/files" / world.mirror["name"]).iterdir())


def content(path: Path) -> dict[str, list[list[Any]]]:
    """The offsets of a snapshot by group, as `json` reads them."""
    return {one["group"]: one["offsets"] for one in json.loads(path.read_bytes())["groups"]}


def planned(world: World, *more: str) -> dict[int, dict[str, Any]]:
    """What `groups plan` writes for the one group, by partition."""
    world.plan.unlink(missing_ok=True)
    made = world.run("plan", "--output", str(world.plan), "--offsets-from", "files", *more)
    assert made.returncode == 0, made.stderr
    [plan] = json.loads(world.plan.read_text())["groups"]
    return {step["partition"]: step for step in plan["steps"]}


def offsets_at(world: World, count: int) -> list[int]:
    """The offset of each partition behind this many records of the source."""
    return [world.rows(world.source, n)[count - 1].offset + 1 for n in range(PARTITIONS)]


def fields(rows: list[Any]) -> list[Any]:
    return [row[1:] for row in rows]


@pytest.mark.timeout(600)
def test_after_the_source_is_lost_a_group_reads_its_first_unread_record(
    target, topic_name, tmp_path
):
    source = ApacheKafka(VERSIONS[-1], tmp_path / "kafka")
    with S3Server(tmp_path / "s3") as s3, source:
        made = world_of(tmp_path, topic_name, "preserve", source.bootstrap, target.bootstrap)
        world = with_archive(made, s3.destination(s3.new_bucket()))
        group, offsets = f"{topic_name}-billing", offsets_at(world, 150)
        commit(world, world.source, group, *offsets)
        copied = run_now(world.config)
        assert copied.returncode == 0, copied.stderr
        unread = [fields(world.rows(world.source, n)[150:]) for n in range(PARTITIONS)]
        source.stop()

        listed = json.loads(world.run("list", "--offsets-from", "files", "--format", "json").stdout)
        assert [(one["group"], one["source_state"], one["read_again"]) for one in listed] == [
            (group, "", 0)
        ]
        steps = planned(world)
        assert [steps[n]["source_offset"] for n in range(PARTITIONS)] == offsets
        assert [steps[n]["read_again"] for n in range(PARTITIONS)] == [0, 0]
        assert committed(world, world.destination, group) == [-1001, -1001]
        applied = world.run("apply", str(world.plan))
        assert applied.returncode == 0, applied.stderr

        assert committed(world, world.destination, group) == offsets
        assert [fields(rest(world, group, n)) for n in range(PARTITIONS)] == unread
        verified = logmirror("verify", "-c", world.config, "--format", "json")
        assert verified.returncode == 0, verified.stdout
        [found] = [one for one in json.loads(verified.stdout) if one["group_snapshots"]]
        assert (found["destination"], found["partition"], found["group_snapshots"]) == (
            *("files", 0),
            1,
        )
        rolled_back = world.run("rollback", str(world.plan))
        assert rolled_back.returncode == 0, rolled_back.stdout


def test_a_plan_of_a_time_has_the_offsets_of_that_time(world):
    group = f"{world.topic}-moving"
    copy(world.mirror)
    commit(world, world.source, group, 10, 20)
    archive_now(world)
    archive_now(world)  # nothing has changed
    [first] = snapshots(world)
    commit(world, world.source, group, 30, 10**6)  # beyond the end
    archive_now(world)
    lost = without_source(world)

    newest, before = planned(lost), json.loads(first.read_bytes())["time_ms"]
    time = rfc_3339(before)
    earlier = planned(lost, "--at", time)

    assert [newest[n]["source_offset"] for n in range(PARTITIONS)] == [30, 10**6]
    assert [newest[n]["read_again"] for n in range(PARTITIONS)] == [0, None]
    end = lost.rows(lost.destination, 1)[-1].offset + 1
    assert newest[1]["target_offset"] == end
    assert newest[1]["reason"].startswith("the replica ends ")
    assert [earlier[n]["source_offset"] for n in range(PARTITIONS)] == [10, 20]
    assert [earlier[n]["target_offset"] for n in range(PARTITIONS)] == [10, 20]
    shown = lost.run("describe", group, "--offsets-from", "files", "--at", time)
    assert f"offsets of {time}, from an archive" in shown.stdout
    too_early = lost.run("list", "--offsets-from", "files", "--at", "2001-01-01T00:00:00+02:00")
    assert too_early.returncode == 2
    assert time in too_early.stderr  # the oldest one


def test_an_offset_of_an_earlier_read_is_marked_and_a_snapshot_of_another_topic_refused(world):
    copy(world.mirror)
    store = FilesystemStore(Path(world.mirror["destinations"][1]["root"]), writer_id="h.1.a")
    held = Snapshots(store, "files", world.mirror["name"])
    names = {"mirror": world.mirror["name"], "destination": "files", "source_alias": "primary"}
    header = Header(
        **names,
        sequence=1,
        time_ms=1000,
        writer="h.1.a",
        cluster_id="c",
        topic=world.topic,
        topic_id="",
        positions={0: 0, 1: 0},
    )
    entry = GroupEntry("billing", (CommittedOffset(0, 5),), is_stale=True)
    held.create(header, [encoded_group(entry)])
    lost = without_source(world)

    assert planned(lost)[0]["reason"] == "the group's offset was read before the snapshot"
    held.create(replace(header, sequence=2, topic="other"), [encoded_group(entry)])
    refused = lost.run("list", "--offsets-from", "files")
    assert refused.returncode == 2
    assert "of another topic" in refused.stderr


def rfc_3339(time_ms: int) -> str:
    """A time as RFC 3339 has it."""
    seconds = datetime.fromtimestamp(time_ms // 1000, UTC).strftime("%Y-%m-%dT%H:%M:%S")
    return f"{seconds}.{time_ms % 1000:03}Z"


def test_a_damaged_snapshot_is_named_and_an_earlier_one_used_on_request(world):
    group = f"{world.topic}-billing"
    copy(world.mirror)
    commit(world, world.source, group, 10, 20)
    archive_now(world)
    commit(world, world.source, group, 30, 40)
    archive_now(world)
    first, second = snapshots(world)
    second.write_bytes(second.read_bytes().replace(b"[0,30]", b"[0,31]"))
    lost = without_source(world)
    time = rfc_3339(json.loads(first.read_bytes())["time_ms"])

    refused = lost.run("list", "--offsets-from", "files")
    assert refused.returncode == 65
    assert all(text in refused.stderr for text in (second.name, first.name, f"--at {time}"))
    verified = logmirror("verify", "-c", lost.config)
    assert verified.returncode == 65
    assert second.name in verified.stdout
    assert "1 snapshot of group offsets" in verified.stdout
    steps = planned(lost, "--at", time)
    assert [steps[n]["source_offset"] for n in range(PARTITIONS)] == [10, 20]


def test_what_cannot_be_planned_without_the_source_is_said(world):
    group = f"{world.topic}-early"
    commit(world, world.source, group, 5, 5)
    for unknown in ("standby", "nowhere"):
        refused = world.run("list", "--offsets-from", unknown)
        assert refused.returncode == 2
        assert "the mirror has no archive of this name" in refused.stderr
    none = world.run("list", "--offsets-from", "files")
    assert none.returncode == 2
    assert "the archive has no snapshot of group offsets" in none.stderr
    assert world.run("list", "--at", "2026-01-01T00:00:00Z").returncode == 2
    wrong = world.run("list", "--offsets-from", "files", "--at", "yesterday")
    assert wrong.returncode == 2
    assert "not a time with a time zone" in wrong.stderr

    archive_now(world)
    world.mirror["destinations"][0]["offsets"] = "translate"
    described = without_source(world).run("describe", group, "--offsets-from", "files")
    assert described.returncode == 1
    assert described.stdout.count("the offset syncs are in the source's cluster") == PARTITIONS


@pytest.mark.parametrize(
    "point", all_but(SNAPSHOT_POINTS, "snapshot.created", reason="the same steps")
)
def test_a_kill_at_any_moment_leaves_whole_snapshots(world, tmp_path, point):
    group = f"{world.topic}-killed"
    world.mirror["groups"]["keep-archived"] = 1
    world.config.write_text(config_text(world.mirror))
    copy(world.mirror)
    commit(world, world.source, group, 10, 10)
    archive_now(world)
    commit(world, world.source, group, 30, 30)
    with InlineRun(
        world.config, "--only", "groups", folder=tmp_path, environment={VARIABLE: point}
    ) as run:
        assert run.wait() == -signal.SIGKILL
    held = [content(path) for path in snapshots(world)]
    assert {"snapshot.ready": 1, "snapshot.created": 2, "snapshot.pruned": 1}[point] == len(held)
    newest = 10 if point == "snapshot.ready" else 30
    assert held[-1] == {group: [[0, newest], [1, newest]]}

    commit(world, world.source, group, 50, 50)
    archive_now(world)
    [last] = snapshots(world)
    assert content(last) == {group: [[0, 50], [1, 50]]}
    assert logmirror("verify", "-c", world.config).returncode == 0


def test_groups_that_wait_for_a_halted_target_hold_up_neither_records_nor_snapshots(
    target, topic_name, tmp_path
):
    with EmbeddedBroker(tmp_path / "source") as source:
        made = world_of(tmp_path, topic_name, "preserve", source.bootstrap, target.bootstrap)
        archive = {"type": "filesystem", "root": str(tmp_path / "archive")}
        world = with_archive(made, archive, **{"sync-group-offsets": True, "interval-ms": 100})
        world.mirror["flush"] = FLUSH | {"max-time-ms": 100}
        world.config.write_text(config_text(world.mirror))
        group, folder = f"{topic_name}-billing", tmp_path / "archive/files/0"
        commit(world, world.source, group, 10, 10)
        with InlineRun(world.config, folder=tmp_path) as run:

            def wait_for(is_true: Callable[[], bool]) -> None:
                wait_until(lambda: run.alive and is_true(), what=lambda: run.text, timeout_s=60)

            wait_for(lambda: committed(world, world.destination, group) == [10, 10])
            target.pause()
            try:
                commit(world, world.source, group, 20, 20)
                wait_for(lambda: content(snapshots(world)[-1]) == {group: [[0, 20], [1, 20]]})
                for seed in range(2):
                    produce(source.bootstrap, topic_name, odd_messages(50, seed=seed))
                    end = end_of(source.bootstrap, topic_name, 0)
                    wait_for(lambda end=end: check_tiles(object_names(folder), 0, end) == [])
                assert "groups not translated" not in run.text  # they wait
            finally:
                target.resume()
            wait_for(lambda: committed(world, world.destination, group) == [20, 20])


def test_an_archive_alone_has_snapshots_while_its_mirror_runs_and_a_stop_ends_it(world, tmp_path):
    """Pruning included; and what else reads the archive does not see them."""
    group = f"{world.topic}-running"
    del world.mirror["destinations"][0]
    world.mirror["groups"]["keep-archived"] = 2
    world.config.write_text(config_text(world.mirror))
    both = {"destinations": [{}, *world.mirror["destinations"]]}
    only = world._replace(mirror=world.mirror | both)
    copy(world.mirror)
    offset = 0
    with InlineRun(world.config, folder=tmp_path) as run:
        for offset in (10, 20, 30, 40):
            commit(world, world.source, group, offset, offset)

            def is_there(offset: int = offset) -> bool:
                assert run.alive, run.text
                try:
                    return content(snapshots(only)[-1]).get(group) == [[0, offset], [1, offset]]
                except (FileNotFoundError, IndexError):
                    return False

            wait_until(is_there, what=lambda: run.text, timeout_s=60)
        run.signal(signal.SIGTERM)
        assert run.wait() == 0, run.text
    assert len(snapshots(only)) == 2
    position = json.loads(snapshots(only)[-1].read_bytes())["positions"]
    assert position == [[n, world.rows(world.source, n)[-1].offset + 1] for n in range(PARTITIONS)]
    for command in (("compact", "--min-objects", "2"), ("verify", "--deep"), ("status",)):
        done = logmirror(*command, "-c", world.config)
        assert done.returncode == 0, done.stdout + done.stderr
    root = Path(world.mirror["destinations"][0]["root"])
    [folder] = {path.parent for path in root.rglob("0/*-*.parquet")}
    sorted(folder.glob("*-*.parquet"))[1].unlink()  # a gap in the chain of partition 0
    commit(world, world.source, group, offset + 10, offset + 10)
    archive_now(world)
    damaged = json.loads(snapshots(only)[-1].read_bytes())["positions"]
    assert damaged == [[0, None], position[1]]

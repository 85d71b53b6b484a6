"""Goal: a copy of MirrorMaker 2 is adopted once, durably, and only if the records say it is one.

Method: the tests write what MirrorMaker would have left (records, offset syncs, stored offsets) on
the embedded broker; `logmirror run` continues, is killed at each step of the take-over, and is
started twice. tests/e2e/test_takeover.py has MirrorMaker itself.
"""

from __future__ import annotations

import json
import signal
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
from confluent_kafka import Consumer, KafkaException, Producer

from kit.judges.clients import Message, odd_messages, produce, rows_by_librdkafka
from kit.judges.gaps import log_bounds
from kit.runs.commands import logmirror, wait_until
from kit.runs.inline_run import InlineRun, config_text, copy_now, mirror_to_cluster, run_now
from kit.servers.embedded import EmbeddedBroker
from kit.servers.kafka import create_topic
from logmirror import failpoints
from logmirror.app.specs import mirror_specs
from logmirror.clock import SYSTEM_CLOCK
from logmirror.cluster.client import ClusterClient
from logmirror.config.settings import load
from logmirror.errors import PositionError, UnavailableError
from logmirror.failpoints import TAKEOVER_POINTS, VARIABLE
from logmirror.mirror.source_views import flows_of
from logmirror.model import TopicPartition
from logmirror.to_kafka import takeover
from logmirror.wire.mirrormaker import encode_sync, encode_sync_key

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from kit.judges.clients import Row

PROGRESS = "__logmirror-progress"


class World(NamedTuple):
    """A source topic and its copy, on one broker."""

    server: str
    topic: str
    config: Path
    folder: Path
    messages: list[Message]

    @property
    def alias(self) -> str:
        return f"a-{self.topic}"

    @property
    def copied_topic(self) -> str:
        return f"{self.alias}.{self.topic}"

    def copied(self, *ranges: tuple[int, int], syncs: Sequence[tuple[int, int]] = ()) -> None:
        """Write what MirrorMaker has copied, run by run, and its offset syncs."""
        create_topic(self.server, self.copied_topic, 1, {})
        records = [one for low, high in ranges for one in self.messages[low:high]]
        produce(self.server, self.copied_topic, records)
        key = encode_sync_key(TopicPartition(self.topic, 0))
        produce(
            self.server,
            f"mm2-offset-syncs.b-{self.topic}.internal",
            [Message(key, encode_sync(*pair)) for pair in syncs],
        )

    def stored(self, offset: int) -> None:
        """Write MirrorMaker's stored offset, as its Connect worker does."""
        about = {"cluster": self.alias, "partition": 0, "topic": self.topic}
        key = json.dumps(["MirrorSourceConnector", about], separators=(",", ":")).encode()
        values = [b'{"offset":%d}' % one for one in (offset // 2, offset)]
        name = f"mm2-offsets.{self.alias}.internal"
        produce(self.server, name, [Message(key, value) for value in values])

    def rows(self, topic: str) -> list[Row]:
        start = log_bounds(self.server, topic, 0)[0]
        return list(rows_by_librdkafka(self.server, topic, start=start))

    def added(self, count: int) -> list[Any]:
        """What the copy has behind its first `count` records, without offsets."""
        return fields(self.rows(self.copied_topic)[count:])

    def here(self, first: int = 0) -> list[Any]:
        return fields(self.rows(self.topic)[first:])

    def progress(self) -> list[int]:
        """The committed positions in the progress topic, oldest first."""
        try:
            rows = self.rows(PROGRESS)
        except KafkaException:
            return []
        found = [json.loads(row.value or b"{}") for row in rows if self.topic.encode() in row.key]
        return [one["next"] for one in found if "next" in one]


def fields(rows: Sequence[Row]) -> list[Any]:
    return [(row.timestamp_ms, row.key, row.value, row.headers) for row in rows]


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedBroker]:
    with EmbeddedBroker(tmp_path_factory.mktemp("takeover") / "broker") as one:
        yield one


@pytest.fixture
def world(broker: EmbeddedBroker, topic_name: str, tmp_path: Path) -> World:
    of_mirrormaker = (
        f"mm2-offset-syncs.b-{topic_name}.internal",
        f"mm2-offsets.a-{topic_name}.internal",
    )
    for name in (topic_name, *of_mirrormaker):
        create_topic(broker.bootstrap, name, 1, {})
    messages = odd_messages(300, seed=1)
    produce(broker.bootstrap, topic_name, messages)
    mirror = mirror_to_cluster(
        topic_name,
        broker.bootstrap,
        broker.bootstrap,
        name=f"b-{topic_name}",
        offsets="translate",
        takeover="mm2",
    )
    mirror["groups"] = {"source-alias": f"a-{topic_name}", "include": [f"{topic_name}.*"]}
    config = tmp_path / "logmirror.yaml"
    config.write_text(config_text(mirror))
    return World(broker.bootstrap, topic_name, config, tmp_path, messages)


def succeeded(world: World) -> str:
    done = run_now(world.config)
    assert done.returncode == 0, done.stderr
    return done.stderr


def refused(world: World, code: int) -> str:
    before = world.rows(world.copied_topic)
    done = run_now(world.config)
    assert done.returncode == code, done.stderr
    assert world.rows(world.copied_topic) == before
    assert world.progress() == []
    return done.stderr


def test_the_copy_is_continued_and_a_restart_looks_at_its_own_progress(world):
    world.copied((0, 120), syncs=[(0, 0), (101, 101)])
    world.stored(60)

    text = succeeded(world)

    assert world.added(120) == world.here(120)
    assert world.progress() == [120, 300]
    assert "taken over from MirrorMaker" in text
    assert "stored_by_mirrormaker=60" in text
    produce(world.server, world.copied_topic, [Message(b"foreign")])
    produce(world.server, world.topic, world.messages[:1])
    assert "taken over" not in succeeded(world)
    assert world.added(301) == world.here(300)


def test_a_renamed_mirror_does_not_take_over_what_it_has_copied_under_its_old_name(world):
    world.copied((0, 120), syncs=[(0, 0), (101, 101)])
    succeeded(world)
    config = json.loads(world.config.read_text())
    config["mirrors"][0]["name"] = f"renamed-{world.topic}"
    world.config.write_text(json.dumps(config))
    produce(world.server, world.topic, world.messages[:1])

    done = run_now(world.config)

    assert done.returncode != 0
    assert "reason=MirrorRenamed" in done.stderr
    assert world.added(120) == world.here(120)[:-1]


def test_what_mirrormaker_has_repeated_is_counted_and_its_last_run_is_continued(world):
    world.copied((0, 200), (50, 120), syncs=[(0, 0), (150, 150), (50, 200), (118, 268)])
    world.stored(49)

    text = succeeded(world)

    assert world.added(270) == world.here(120)
    assert "repeated=70" in text
    assert "repeated_again=80" in text


def test_without_offset_syncs_the_whole_copy_is_compared(world):
    world.copied((0, 130), (100, 150))
    succeeded(world)
    assert world.added(180) == world.here(150)


def test_a_pair_of_another_topic_is_not_used(world):
    world.copied((0, 100), syncs=[(0, 0), (290, 90)])
    succeeded(world)
    assert world.added(100) == world.here(100)


@pytest.mark.parametrize("point", TAKEOVER_POINTS)
def test_a_kill_during_the_take_over_adds_each_record_once(world, point):
    world.copied((0, 120), syncs=[(0, 0), (101, 101)])
    with InlineRun(
        world.config, "--until-now", folder=world.folder, environment={VARIABLE: point}
    ) as run:
        assert run.wait() == -signal.SIGKILL
    adopted = point == "takeover.adopted"
    assert world.progress() == ([120] if adopted else [])

    text = succeeded(world)

    assert ("taken over from MirrorMaker" in text) != adopted
    assert world.added(120) == world.here(120)
    assert world.progress()[0] == 120


def test_of_two_instances_one_adopts(world):
    world.copied((0, 120), syncs=[(0, 0), (101, 101)])
    folders = [world.folder / name for name in ("one", "two")]
    for folder in folders:
        folder.mkdir()
    runs = [InlineRun(world.config, folder=folder) for folder in folders]
    try:
        wait_until(
            lambda: len(world.rows(world.copied_topic)) >= 300,
            what=lambda: "\n".join(run.text for run in runs),
            timeout_s=90,
        )
        produce(world.server, world.topic, world.messages[:10])
        wait_until(
            lambda: len(world.rows(world.copied_topic)) >= 310,
            what=lambda: "\n".join(run.text for run in runs),
            timeout_s=90,
        )
    finally:
        for run in runs:
            run.kill()
    succeeded(world)
    assert world.added(120) == world.here(120)
    assert world.progress().count(120) == 1


def test_mirrormaker_that_runs_is_not_taken_over(world):
    world.copied((0, 120), syncs=[(101, 101)])
    member = Consumer({"bootstrap.servers": world.server, "group.id": f"{world.alias}-mm2"})
    member.subscribe([world.topic])
    wait_until(
        lambda: member.poll(0.1) is None and bool(member.assignment()), what=lambda: "assignment"
    )

    assert "MirrorMaker still runs" in refused(world, 75)
    status = logmirror("status", "-c", world.config)
    assert status.returncode == 1
    assert "MirrorMaker still runs" in status.stdout + status.stderr

    member.close()
    succeeded(world)
    assert world.added(120) == world.here(120)


def test_an_open_transaction_in_the_copy_is_waited_for(world):
    world.copied((0, 120), syncs=[(101, 101)])
    producer = Producer({"bootstrap.servers": world.server, "transactional.id": world.topic})
    producer.init_transactions(30)
    producer.begin_transaction()
    one = world.messages[120]
    producer.produce(world.copied_topic, one.value, one.key, timestamp=one.timestamp_ms)
    producer.flush(30)

    assert "a transaction is open in the target of the take-over" in refused(world, 75)

    producer.abort_transaction(30)
    succeeded(world)
    assert world.added(120) == world.here(120)


def test_a_record_of_another_client_stops_the_mirror(world):
    world.copied((0, 120), syncs=[(101, 101)])
    produce(world.server, world.copied_topic, [Message(b"foreign", b"x", (), 1_700_000_000_000)])

    text = refused(world, 69)

    assert "reason: TakeoverDiffers" in text
    assert "target_offset: 120" in text
    assert "source_offset: 120" in text


def test_a_gap_in_the_copy_stops_the_mirror(world):
    world.copied((0, 110), (111, 120), syncs=[(101, 101)])
    text = refused(world, 69)
    assert "reason: TakeoverDiffers" in text
    assert "source_offset: 110" in text


@pytest.mark.parametrize("change", ["record", "worker"])
def test_a_mirrormaker_that_starts_meanwhile_is_noticed_before_the_copy_is_adopted(world, change):
    world.copied((0, 120), syncs=[(101, 101)])
    member = Consumer({"bootstrap.servers": world.server, "group.id": f"{world.alias}-mm2"})

    def start(point: str) -> None:
        if point == "takeover.fenced" and change == "record":
            produce(world.server, world.copied_topic, world.messages[120:121])
        elif point == "takeover.fenced":
            member.subscribe([world.topic])
            wait_until(
                lambda: member.poll(0.1) is None and bool(member.assignment()),
                what=lambda: "assignment",
            )

    with failpoints.listening(start), pytest.raises(UnavailableError) as caught:
        copy_now(load(world.config))

    message = {"record": "the target has changed", "worker": "MirrorMaker still runs"}
    assert message[change] in caught.value.message
    assert world.progress() == []
    member.close()
    copied = len(world.rows(world.copied_topic))
    succeeded(world)
    assert world.added(copied) == world.here(copied)


def test_an_empty_topic_is_not_what_mirrormaker_has_written(world):
    create_topic(world.server, world.copied_topic, 1, {})
    world.stored(60)
    assert "reason: TakeoverDiffers" in refused(world, 69)


def test_a_topic_that_mirrormaker_has_not_begun_is_copied_from_its_start(world):
    text = succeeded(world)
    assert "MirrorMaker has copied nothing: a new replica" in text
    assert world.added(0) == world.here()
    assert world.progress() == [0, 300]


def trim(world: World, topic: str, first: int) -> None:
    with client_of(world) as client:
        client.admin.delete_records({TopicPartition(topic, 0): first})


def test_what_the_source_has_deleted_since_need_not_be_compared(world):
    world.copied((0, 120), syncs=[(101, 101)])
    trim(world, world.topic, 110)
    succeeded(world)
    assert world.added(120) == fields(world.rows(world.topic))[10:]
    assert world.progress() == [120, 300]


def test_a_source_that_lost_the_next_record_stops_the_mirror(world):
    world.copied((0, 120), syncs=[(101, 101)])
    trim(world, world.topic, 130)
    assert "reason: TakeoverDiffers" in refused(world, 69)
    world.stored(119)
    text = refused(world, 69)
    assert "reason: SourceTrimmed" in text
    assert "position: 120" in text


@pytest.mark.parametrize("emptied", [False, True])
def test_an_idle_topic_is_continued_at_its_end(world, emptied):
    world.copied((0, 300), syncs=[(0, 0), (202, 202)])
    world.stored(299)
    trim(world, world.topic, 300)
    if emptied:
        trim(world, world.copied_topic, 300)
    succeeded(world)
    assert world.progress() == [300]
    produce(world.server, world.topic, world.messages[:5])
    succeeded(world)
    assert fields(world.rows(world.copied_topic))[-5:] == fields(world.rows(world.topic))


def test_a_target_that_was_emptied_is_not_copied_again(world):
    world.copied((0, 120), syncs=[(101, 101)])
    world.stored(119)
    trim(world, world.copied_topic, 120)
    assert "reason: TakeoverDiffers" in refused(world, 69)


def test_a_target_that_was_trimmed_is_continued(world):
    world.copied((0, 120), syncs=[(0, 0)])
    trim(world, world.copied_topic, 50)
    succeeded(world)
    assert world.added(70) == world.here(120)


def test_status_and_validate_report_the_position_and_write_nothing(world):
    world.copied((0, 120), syncs=[(101, 101)])
    before = world.progress()

    status = logmirror("status", "--format", "json", "-c", world.config)
    checked = logmirror("validate", "--check", "-c", world.config)

    assert status.returncode == 0, status.stdout
    row = json.loads(status.stdout)[0]
    assert (row["position"], row["lag"]) == (120, 180)
    assert checked.returncode == 0, checked.stdout
    assert world.progress() == before == []
    assert len(world.rows(world.copied_topic)) == 120


def test_more_records_than_the_limit_are_not_compared(world, monkeypatch):
    world.copied((0, 120), syncs=[(19, 19)])
    with client_of(world) as client:
        [spec] = mirror_specs(load(world.config))
        [(flow, written)] = flows_of(spec, [0])

        def found() -> Any:
            search = takeover.TakeoverSearch(written, client, client, SYSTEM_CLOCK)
            return search.found([flow])[flow]

        monkeypatch.setattr(takeover, "RECORDS_MAX", 101)
        assert found().next_offset == 120
        monkeypatch.setattr(takeover, "RECORDS_MAX", 100)
        error = found()
        assert isinstance(error, PositionError)
        assert error.facts["reason"] == "TakeoverTooFar"


def client_of(world: World) -> ClusterClient:
    [spec] = mirror_specs(load(world.config))
    return ClusterClient(spec.source)

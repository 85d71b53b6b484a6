"""A source that loses copied records and receives others at their offsets stops its mirrors.

Method: three brokers of Apache Kafka with `unclean.leader.election.enable=true`. Ten records are
copied while only the leader has the last four. The leader is killed, and a follower without them is
elected; it receives eight other records, so that its log is longer than the position. Then the
mirrors continue: those that were stopped before, and those whose process was only paused.

The embedded broker has no leader epochs. Its disk is replaced by an older copy of it.
"""

from __future__ import annotations

import contextlib
import re
import shutil
import signal
from typing import TYPE_CHECKING, Final

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewTopic

from kit.judges.clients import rows_by_librdkafka
from kit.runs.commands import BrokerCommand, logmirror, wait_until, write_config
from kit.runs.commands import mirror as archive_of
from kit.runs.inline_run import InlineRun, mirror_to_cluster, run_now
from kit.servers.apache import VERSIONS
from kit.servers.cluster import KafkaCluster
from kit.tiers import all_but

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from kit.servers.kafka import ApacheKafka

FORMATS: Final = ("parquet", "ndjson", "native")
OFFSETS: Final = ("preserve", "translate")
KINDS: Final = (*FORMATS, *OFFSETS)
STRADDLING: Final = {"ndjson", "native", "translate"}
"""Mirrors whose source writes its second history in one batch, which crosses their position."""

WAYS: Final = ("stopped", "paused")
LEADER, FOLLOWER, OTHER = 1, 2, 3


@pytest.fixture(params=all_but(VERSIONS, VERSIONS[-1], reason="a cluster of three brokers"))
def cluster(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[KafkaCluster]:
    config = {
        "unclean.leader.election.enable": "true",
        "min.insync.replicas": 1,
        "unclean.leader.election.interval.ms": 1000,
    }
    with KafkaCluster(request.param, tmp_path / "cluster", config=config) as cluster:
        yield cluster


@pytest.fixture
def target(kafka_431: ApacheKafka) -> Iterator[str]:
    """The destination's address. Its replicas are of one cluster each, so they are deleted."""
    yield kafka_431.bootstrap
    for kind, way in CASES:
        if kind in OFFSETS:
            kafka_431.delete_topic(topic_of(kind, way))


def topic_of(kind: str, way: str) -> str:
    return f"{kind}-{way}"


CASES: Final = [(kind, way) for kind in KINDS for way in WAYS]
TOPICS: Final = [topic_of(*case) for case in CASES]


def produce(bootstrap: str, topic: str, values: list[str], *, batch: int) -> None:
    """Write records in batches of this size; returns when they are acknowledged."""
    producer = Producer({"bootstrap.servers": bootstrap, "linger.ms": 500, "acks": "all"})
    for at in range(0, len(values), batch):
        for value in values[at : at + batch]:
            producer.produce(topic, value.encode(), partition=0)
        assert producer.flush(60) == 0


def mirror_of(kind: str, way: str, source: str, target: str, root: Path) -> dict[str, object]:
    topic = topic_of(kind, way)
    if kind in OFFSETS:
        return mirror_to_cluster(topic, source, target, name=topic, offsets=kind)
    return archive_of(topic, source, root, form=kind, name=topic, max_time_ms=200)


def copied(kind: str, way: str, target: str, root: Path) -> list[bytes]:
    """Return the copied values; for an archive as many empty ones as its objects cover offsets."""
    topic = topic_of(kind, way)
    if kind in OFFSETS:
        return [row.value for row in rows_by_librdkafka(target, topic)]
    names = [path.stem.split("-") for path in (root / topic / "0").glob("*-*")]
    return [b""] * sum(int(last) - int(first) + 1 for first, last in names)


def wait_for_leader(cluster: KafkaCluster, node: int) -> None:
    wait_until(
        lambda: all(cluster.leader(topic) == node for topic in TOPICS),
        what=lambda: f"{node} to lead: {[cluster.leader(topic) for topic in TOPICS]}",
    )


def lose_the_last_records(cluster: KafkaCluster) -> None:
    """Let a follower without records 6 to 9 become leader, and receive eight others."""
    cluster.kill_node(LEADER)
    cluster.start_node(FOLLOWER)
    wait_for_leader(cluster, FOLLOWER)
    for topic in TOPICS:
        values = [f"B{n}" for n in range(6, 14)]
        straddles = topic.partition("-")[0] in STRADDLING
        produce(cluster.address(FOLLOWER), topic, values, batch=8 if straddles else 4)


def fill(cluster: KafkaCluster) -> None:
    """Write ten records to each topic; the last four are on the leader alone."""
    admin = AdminClient({"bootstrap.servers": cluster.bootstrap})
    on_all = [[LEADER, FOLLOWER, OTHER]]
    created = admin.create_topics([NewTopic(t, 1, replica_assignment=on_all) for t in TOPICS])
    for future in created.values():
        future.result(60)
    for topic in TOPICS:
        cluster.wait_until_in_sync(topic)
        produce(cluster.bootstrap, topic, [f"A{n}" for n in range(6)], batch=2)
    cluster.kill_node(OTHER)
    cluster.kill_node(FOLLOWER)
    for topic in TOPICS:
        produce(cluster.address(LEADER), topic, [f"A{n}" for n in range(6, 10)], batch=4)


def assert_stopped(code: int, text: str, kind: str, way: str) -> None:
    is_compared = (kind, way) == ("preserve", "stopped")  # its last batch; epochs are not stored
    assert code == 69, text
    assert ("ContentDiffers" if is_compared else "SourceWentBackwards") in text, text
    assert is_compared or re.search(r"diverges_at[=:] ?6\b", text), text


@pytest.mark.timeout(600)
def test_a_regrown_source_stops_its_mirrors(
    cluster: KafkaCluster, target: str, tmp_path: Path
) -> None:
    root = tmp_path / "archive"
    fill(cluster)
    configs = {}
    for kind, way in CASES:
        mirror = mirror_of(kind, way, cluster.bootstrap, target, root)
        path = tmp_path / f"{topic_of(kind, way)}.yaml"
        configs[kind, way] = write_config(path, mirror)

    def rows() -> dict[tuple[str, str], list[bytes]]:
        return {case: copied(*case, target, root) for case in CASES}

    with contextlib.ExitStack() as stack:
        runs = {
            kind: stack.enter_context(InlineRun(configs[kind, "paused"], folder=tmp_path))
            for kind in KINDS
        }
        for kind in KINDS:
            result = run_now(configs[kind, "stopped"])
            assert result.returncode == 0, result.stderr
        wait_until(
            lambda: all(len(values) == 10 for values in rows().values()),
            what=lambda: f"ten records: {rows()}",
        )
        for run in runs.values():
            run.signal(signal.SIGSTOP)
        before = rows()
        lose_the_last_records(cluster)
        for run in runs.values():
            run.signal(signal.SIGCONT)
        for kind, run in runs.items():
            assert_stopped(run.wait(), run.text, kind, "paused")
    for kind in KINDS:
        result = run_now(configs[kind, "stopped"])
        assert_stopped(result.returncode, result.stderr, kind, "stopped")
        if kind != "preserve":  # `status` reads no records
            shown = logmirror("status", "-c", configs[kind, "stopped"])
            assert shown.returncode == 1
            assert "SourceWentBackwards" in shown.stdout
            assert re.search(r"diverges_at: 6\b", shown.stdout), shown.stdout
    assert rows() == before


@pytest.mark.parametrize(
    "kind", all_but((*FORMATS, "preserve"), "parquet", "preserve", reason="starts a broker thrice")
)
def test_an_older_disk_stops_the_next_run(
    kind: str, kafka_431: ApacheKafka, tmp_path: Path, topic_name: str
) -> None:
    broker, root = BrokerCommand(tmp_path / "broker"), tmp_path / "archive"
    data, older = tmp_path / "broker" / "data", tmp_path / "older"
    target = kafka_431.bootstrap
    try:
        broker.start().create_topic(topic_name)
        produce(broker.bootstrap, topic_name, [f"A{n}" for n in range(6)], batch=3)
        broker.kill()
        shutil.copytree(data, older)
        broker.start()
        produce(broker.bootstrap, topic_name, [f"A{n}" for n in range(6, 10)], batch=4)
        if kind == "preserve":
            mirror = mirror_to_cluster(topic_name, broker.bootstrap, target)
        else:
            mirror = archive_of(topic_name, broker.bootstrap, root, form=kind, name=topic_name)
        config = write_config(tmp_path / "mirror.yaml", mirror)
        result = run_now(config)
        assert result.returncode == 0, result.stderr
        broker.kill()
        shutil.rmtree(data)
        older.rename(data)
        broker.start()
        produce(broker.bootstrap, topic_name, [f"B{n}" for n in range(6, 14)], batch=8)

        result = run_now(config)
    finally:
        broker.remove()

    assert result.returncode == 69, result.stderr
    reason = "ContentDiffers" if kind == "preserve" else "SourceWentBackwards"
    assert reason in result.stderr, result.stderr
    if kind == "preserve":
        values = [row.value for row in rows_by_librdkafka(target, topic_name)]
        assert values == [b"A%d" % n for n in range(10)]
    else:
        (name,) = [path.stem for path in (root / topic_name / "0").glob("*-*")]
        assert name == f"{0:020}-{9:020}"


def test_records_where_the_last_objects_have_none_stop_the_next_run(
    tmp_path: Path, topic_name: str
) -> None:
    """The archive ends in four objects of gaps; the source is put back, and written again."""
    broker, root = BrokerCommand(tmp_path / "broker"), tmp_path / "archive"
    data, older = tmp_path / "broker" / "data", tmp_path / "older"
    mirror = archive_of(topic_name, broker.bootstrap, root, form="parquet", name=topic_name)
    config = write_config(tmp_path / "mirror.yaml", mirror)
    try:
        broker.start().create_topic(topic_name)
        produce(broker.bootstrap, topic_name, [f"A{n}" for n in range(6)], batch=3)
        broker.kill()
        shutil.copytree(data, older)
        broker.start()
        producer = Producer({"bootstrap.servers": broker.bootstrap, "transactional.id": "t"})
        producer.init_transactions(60)
        for _ in range(4):
            producer.begin_transaction()
            producer.produce(topic_name, b"aborted", partition=0)
            producer.flush(60)
            producer.abort_transaction(60)
            result = run_now(config)
            assert result.returncode == 0, result.stderr
        broker.kill()
        shutil.rmtree(data)
        older.rename(data)
        broker.start()
        produce(broker.bootstrap, topic_name, [f"B{n}" for n in range(6, 20)], batch=7)

        result = run_now(config)
    finally:
        broker.remove()

    assert result.returncode == 69, result.stderr
    assert "SourceWentBackwards" in result.stderr
    assert "found: None" in result.stderr

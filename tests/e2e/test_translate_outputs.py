"""Outputs of replicas with new offsets: offset syncs for MirrorMaker 2, and the report of `verify`.

Method: MirrorMaker itself reads the syncs, by its formatter and by its checkpoint connector, which
translates group offsets with them. Replicas are damaged by hand, and `verify` must find it.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from confluent_kafka import Consumer, TopicPartition
from confluent_kafka.admin import AdminClient

from kit.judges.clients import Message, produce, produce_transactions, rows_by_librdkafka
from kit.judges.copies import copy
from kit.judges.gaps import log_bounds, plain_messages, trim, write_transactions
from kit.judges.mirrormaker import CHECKPOINTS, Checkpoint, MirrorMakerTools, checkpoints
from kit.judges.translated import mirror_of, visible
from kit.runs.commands import logmirror, wait_until
from kit.runs.inline_run import config_text, mirror_to_cluster
from logmirror.cluster.client import ClusterClient
from logmirror.cluster.properties import connection_settings
from logmirror.to_kafka.translate_progress import PROGRESS_TOPIC
from logmirror.wire.mirrormaker import decode_sync, syncs_topic

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from kit.servers.kafka import ApacheKafka

# -- offset syncs --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def mirrormaker() -> MirrorMakerTools:
    return MirrorMakerTools("4.3.1")


def test_mirrormaker_formats_the_syncs_and_each_maps_one_record(
    apache_kafka, topic_name, mirrormaker
):
    broker, there = apache_kafka, f"{topic_name}-copy"
    alias = f"to-{topic_name}"
    broker.create_topic(topic_name)
    broker.create_topic(there)
    produce(broker.bootstrap, there, plain_messages(17, seed=100))
    for seed in range(3):
        write_transactions(broker.bootstrap, topic_name, seed=seed)
        mirror = mirror_of(broker, topic_name)
        mirror["destinations"][0]["name"] = alias
        copy(mirror)
    topic = syncs_topic(alias)
    rows = list(rows_by_librdkafka(broker.bootstrap, topic))
    syncs = [decode_sync(row.key, row.value) for row in rows]
    here = {r.offset: r[1:] for r in rows_by_librdkafka(broker.bootstrap, topic_name)}
    copied = {r.offset: r[1:] for r in rows_by_librdkafka(broker.bootstrap, there)}
    assert len(syncs) >= 6
    with ClusterClient(connection_settings(broker.bootstrap, {})) as client:
        replica_id = client.topic(there).topic_id
    assert {row.headers for row in rows} == {((b"logmirror.topic-id", replica_id),)}
    assert [sync.upstream for sync in syncs] == sorted(sync.upstream for sync in syncs)
    for sync in syncs:
        assert (sync.topic, sync.partition) == (topic_name, 0)
        assert copied[sync.downstream] == here[sync.upstream]
    assert syncs[-1].upstream == max(here)
    assert mirrormaker.printed_syncs(broker.bootstrap, topic, len(syncs)) == [
        f"OffsetSync{{topicPartition={topic_name}-0, upstreamOffset={sync.upstream}, "
        f"downstreamOffset={sync.downstream}}}"
        for sync in syncs
    ]


def commit_offset(broker: ApacheKafka, group: str, topic: str, offset: int) -> None:
    consumer = Consumer({"bootstrap.servers": broker.bootstrap, "group.id": group})
    consumer.commit(offsets=[TopicPartition(topic, 0, offset)], asynchronous=False)
    consumer.close()


class Translation:
    """A copy in another cluster, with syncs, and MirrorMaker's checkpoint connector over it."""

    def __init__(self, source: ApacheKafka, target: ApacheKafka, topic: str) -> None:
        self.source, self.target, self.topic = source, target, topic

    def of(self, group: str) -> Checkpoint:
        """The newest checkpoint of a group, waited for."""
        found: list[Checkpoint] = []

        def is_there() -> bool:
            if (
                CHECKPOINTS
                in AdminClient({"bootstrap.servers": self.target.bootstrap})
                .list_topics(timeout=10)
                .topics
            ):
                found[:] = [c for c in checkpoints(self.target.bootstrap) if c.group == group]
            return bool(found)

        wait_until(is_there, what=lambda: f"a checkpoint of {group}", timeout_s=90)
        return found[-1]


@pytest.fixture
def translated(
    kafka_431: ApacheKafka,
    kafka_392: ApacheKafka,
    topic_name: str,
    tmp_path: Path,
    mirrormaker: MirrorMakerTools,
) -> Iterator[Translation]:
    alias = f"to-{topic_name}"
    kafka_431.create_topic(topic_name)
    kafka_392.create_topic(topic_name)
    produce(kafka_392.bootstrap, topic_name, plain_messages(33, seed=50))
    servers = (kafka_431.bootstrap, kafka_392.bootstrap)
    for seed in range(2):
        write_transactions(kafka_431.bootstrap, topic_name, seed=seed)
        copy(mirror_to_cluster(topic_name, *servers, name=alias, offsets="translate"))
    end = log_bounds(kafka_431.bootstrap, topic_name, 0)[1]
    for group, offset in ((f"{topic_name}-middle", end // 2), (f"{topic_name}-end", end)):
        commit_offset(kafka_431, group, topic_name, offset)
    worker = mirrormaker.start_checkpoints(
        *servers,
        alias=alias,
        topic=topic_name,
        groups=f"{topic_name}.*",
        folder=tmp_path / "connect",
    )
    try:
        yield Translation(kafka_431, kafka_392, topic_name)
    finally:
        worker.end(kill=True)


@pytest.mark.gate("MirrorMaker's whole start; its formatter judges in `make test`")
def test_mirrormaker_translates_group_offsets_with_the_syncs(translated):
    here = list(rows_by_librdkafka(translated.source.bootstrap, translated.topic))
    copied = list(rows_by_librdkafka(translated.target.bootstrap, translated.topic))[33:]
    assert [row[1:] for row in copied] == [row[1:] for row in here]
    end = log_bounds(translated.source.bootstrap, translated.topic, 0)[1]
    middle = translated.of(f"{translated.topic}-middle")
    assert (middle.topic, middle.partition, middle.upstream) == (translated.topic, 0, end // 2)
    unread = next(copy for row, copy in zip(here, copied, strict=True) if row.offset >= end // 2)
    assert copied[0].offset < middle.downstream <= unread.offset  # nothing unread is skipped
    last = translated.of(f"{translated.topic}-end")
    assert (last.upstream, last.downstream) == (end, copied[-1].offset + 1)


def test_a_topic_is_copied_without_syncs_if_their_topic_cannot_exist(kafka_431, topic_name):
    kafka_431.create_topic(topic_name)
    produce(kafka_431.bootstrap, topic_name, plain_messages(10, seed=1))
    mirror = mirror_of(kafka_431, topic_name)
    mirror["destinations"][0]["name"] = "no topic is called so"
    copy(mirror)
    assert visible(kafka_431, f"{topic_name}-copy") == visible(kafka_431, topic_name)


def test_the_progress_topic_is_compacted_and_of_one_partition(apache_kafka, topic_name):
    apache_kafka.create_topic(topic_name)
    copy(mirror_of(apache_kafka, topic_name))
    described = apache_kafka.tool(
        *("kafka-topics", "--bootstrap-server", apache_kafka.bootstrap),
        *("--describe", "--topic", PROGRESS_TOPIC),
    ).stdout
    assert "PartitionCount: 1" in described
    assert "cleanup.policy=compact" in described


# -- verify --------------------------------------------------------------------------------------


def verified(config: Path) -> tuple[int, dict[str, object]]:
    """Exit code and the one row of `verify --against-source`."""
    result = logmirror("verify", "-c", config, "--against-source", "--format", "json")
    (row,) = json.loads(result.stdout)
    return result.returncode, row


@pytest.fixture
def copied(kafka_431, topic_name, tmp_path) -> Path:
    """The configuration of a copy that is there, beside records that others wrote."""
    path = tmp_path / "verify.yaml"
    path.write_text(config_text(mirror_of(kafka_431, topic_name)))
    kafka_431.create_topic(topic_name)
    for seed in range(2):
        write_transactions(kafka_431.bootstrap, topic_name, seed=seed)
        copy(mirror_of(kafka_431, topic_name))
        produce(kafka_431.bootstrap, f"{topic_name}-copy", plain_messages(9, seed=seed))
    return path


def test_verify_accepts_the_sequence_between_foreign_records(kafka_431, topic_name, copied):
    code, row = verified(copied)
    count = len(visible(kafka_431, topic_name))
    assert (code, row["problems"]) == (0, [])
    assert (row["records"], row["compared_with_source"], row["gone_at_source"]) == (count, count, 0)
    trim(kafka_431.bootstrap, topic_name, 0, 200)
    left = len(visible(kafka_431, topic_name))
    code, row = verified(copied)
    assert (code, row["problems"]) == (0, [])
    assert (row["compared_with_source"], row["gone_at_source"]) == (left, count - left)
    trim(kafka_431.bootstrap, f"{topic_name}-copy", 0, 400)
    code, row = verified(copied)
    assert (code, row["problems"]) == (0, [])
    assert 0 < int(str(row["compared_with_source"])) < left


@pytest.mark.parametrize("how", ["doubled", "changed"])
def test_verify_finds_a_foreign_record(kafka_431, topic_name, copied, how):
    there = f"{topic_name}-copy"
    more = plain_messages(1, seed=500)
    wrong = more if how == "doubled" else [more[0]._replace(value=b"another")]
    if how == "changed":
        produce(kafka_431.bootstrap, topic_name, more)
        # Its place in the sequence is taken by another record, and progress says that it is there.
        produce_transactions(kafka_431.bootstrap, there, [(wrong, True)], transactional_id=there)
        move_progress(kafka_431, topic_name)
    else:
        produce_transactions(kafka_431.bootstrap, there, [(wrong, True)], transactional_id=there)
    code, row = verified(copied)
    assert code == 65
    (problem,) = row["problems"]
    assert problem["kind"] == "corruption"
    expected = (
        "not have as many records"
        if how == "doubled"
        else "not have the source's records in the same order"
    )
    assert expected in problem["message"]


def test_verify_finds_a_replica_whose_progress_is_lost(kafka_431, topic_name, tmp_path):
    there, path = f"{topic_name}-copy", tmp_path / "verify.yaml"
    path.write_text(config_text(mirror_of(kafka_431, topic_name)))
    for topic in (topic_name, there):
        kafka_431.create_topic(topic)
        produce(kafka_431.bootstrap, topic, plain_messages(3, seed=1))
    aborted = [(plain_messages(5, seed=2), False)]
    produce_transactions(kafka_431.bootstrap, there, aborted, transactional_id=there)
    code, row = verified(path)
    assert (code, row["problems"]) == (0, [])  # nothing was copied beside what others wrote
    copy(mirror_of(kafka_431, topic_name))
    produce(kafka_431.bootstrap, PROGRESS_TOPIC, [Message(progress_key(topic_name), None)])
    code, row = verified(path)
    assert code == 65
    (problem,) = row["problems"]
    assert (problem["kind"], "no progress" in problem["message"]) == ("corruption", True)


def progress_key(topic: str) -> bytes:
    return json.dumps(["next", "copy", topic, 0, f"{topic}-copy"], separators=(",", ":")).encode()


def move_progress(broker: ApacheKafka, topic: str) -> None:
    """Say that one record more was copied than was."""
    key = progress_key(topic)
    rows = rows_by_librdkafka(broker.bootstrap, PROGRESS_TOPIC)
    value = json.loads([row.value for row in rows if row.key == key][-1])
    value["next"] += 1
    produce(broker.bootstrap, PROGRESS_TOPIC, [Message(key, json.dumps(value).encode())])

"""Goal: a native archive is served up to its end, whatever transactions its end divides.

A mirror copies up to the last stable offset, where the oldest open transaction begins. The markers
of the decided ones before may be behind it, so they are in no object.
"""

from __future__ import annotations

import shutil

import pytest
from confluent_kafka import IsolationLevel, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, OffsetSpec

from kit.judges.clients import rows_by_librdkafka
from kit.runs.commands import logmirror, mirror, write_config
from kit.runs.inline_run import run_now
from kit.servers.embedded import EmbeddedBroker
from kit.servers.kafka import create_topic
from kit.servers.mounted import MountingBroker

pytestmark = pytest.mark.jvm

TOPIC = "divided"
SOON = {"fetch.wait.max.ms": 20}
BEFORE, COUNT = 5, 30
TIMEOUT_S = 60


def fill(bootstrap):
    """Records of a transaction that commits and of one that aborts, then of one that stays open.

    The two producers have ended a transaction before, each in the other way.
    """
    names = ("commits", "aborts", "stays")
    settings = {"bootstrap.servers": bootstrap, "linger.ms": 0}
    commits, aborts, stays = (Producer({**settings, "transactional.id": one}) for one in names)
    for producer in (commits, aborts, stays):
        producer.init_transactions(TIMEOUT_S)
    write(commits, aborts, count=BEFORE)
    commits.abort_transaction(TIMEOUT_S)
    aborts.commit_transaction(TIMEOUT_S)
    stays.begin_transaction()
    write(commits, aborts, count=COUNT)
    stays.produce(TOPIC, b"open", partition=0)
    stays.flush(TIMEOUT_S)
    commits.commit_transaction(TIMEOUT_S)
    aborts.abort_transaction(TIMEOUT_S)


def write(*producers, count):
    for producer in producers:
        producer.begin_transaction()
    for number in range(count):
        for producer in producers:
            producer.produce(TOPIC, b"%d" % number, partition=0)
            producer.flush(TIMEOUT_S)


def served(tmp_path, archive):
    """Return the records that a mounted archive has for readers of committed records."""
    with MountingBroker(tmp_path / "log", archive) as broker:
        at = {TopicPartition(TOPIC, 0): OffsetSpec.latest()}
        level = IsolationLevel.READ_COMMITTED
        admin = AdminClient({"bootstrap.servers": broker})
        (end,) = admin.list_offsets(at, isolation_level=level).values()
        assert end.result(TIMEOUT_S).offset == 2 * (BEFORE + COUNT + 1)
        return list(rows_by_librdkafka(broker, TOPIC, config=SOON))


@pytest.mark.parametrize("max_offsets", [1000, 7])
def test_transactions_without_their_markers_end_as_at_the_source(tmp_path, max_offsets):
    archive = tmp_path / "archive"
    with EmbeddedBroker(tmp_path / "source") as source:
        create_topic(source.bootstrap, TOPIC, 1, {})
        fill(source.bootstrap)
        wanted = list(rows_by_librdkafka(source.bootstrap, TOPIC, config=SOON))
        written = mirror(TOPIC, source.bootstrap, archive, form="native", max_offsets=max_offsets)
        config = write_config(tmp_path / "config.json", written | {"name": TOPIC})
        copied = run_now(config)
        assert copied.returncode == 0, copied.stderr
    numbers = [*range(BEFORE), *range(COUNT)]
    assert [row.value for row in wanted] == [b"%d" % number for number in numbers]
    assert served(tmp_path, archive) == wanted
    merged = logmirror("compact", "-c", str(config), "--min-objects", "2")
    assert merged.returncode == 0, merged.stderr
    assert len(list((archive / TOPIC / "0").iterdir())) < 6 or max_offsets > COUNT
    assert served(tmp_path, archive) == wanted


def test_without_claims_nothing_shows_the_outcomes(tmp_path):
    archive = tmp_path / "archive"
    with EmbeddedBroker(tmp_path / "source") as source:
        create_topic(source.bootstrap, TOPIC, 1, {})
        fill(source.bootstrap)
        written = mirror(TOPIC, source.bootstrap, archive, form="native")
        copied = run_now(write_config(tmp_path / "config.json", written | {"name": TOPIC}))
        assert copied.returncode == 0, copied.stderr
    shutil.rmtree(archive / ".logmirror")
    with MountingBroker(tmp_path / "log", archive) as broker:
        found = rows_by_librdkafka(broker, TOPIC, config=SOON)
        assert [row.value for row in found] == [b"%d" % number for number in range(BEFORE)]

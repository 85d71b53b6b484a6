"""Goal: what clients have of a mounted topic stays while its archive is away, or partly unreadable.

Method: a broker for which file permissions are enforced serves an archive, and starts again without
it. Groups, metadata and a mirror are asked meanwhile; then the archive is back.
"""

from __future__ import annotations

import contextlib
import sys
import time
from typing import TYPE_CHECKING, Any

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient

from kit.judges.clients import odd_messages, produce, rows_by_librdkafka
from kit.runs.commands import mirror, wait_until, write_config
from kit.runs.inline_run import InlineRun, mirror_to_cluster, run_now
from kit.servers.embedded import EmbeddedBroker
from kit.servers.kafka import create_topic
from kit.servers.mounted import MountingBroker
from kit.servers.s3 import LogBucket, S3Server
from logmirror.broker.log.disk import Disk
from logmirror.broker.log.mounted_log import MountedLog
from logmirror.broker.log.mounted_transactions import TransactionEvents
from logmirror.broker.log.reading import ColdSegmentError
from logmirror.broker.log.segment import Segment
from logmirror.broker.log.segment_cache import SegmentCache

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.jvm

TOPIC = "kept"
SOON = {"fetch.wait.max.ms": 20, "reconnect.backoff.max.ms": 200}
LEADER_NOT_AVAILABLE = 5
NONE = -1001
TIMEOUT_S = 60


_PLAIN = """
import ctypes, os, sys
PR_CAPBSET_DROP, CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH = 24, 1, 2
for one in (CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH):
    ctypes.CDLL(None).prctl(PR_CAPBSET_DROP, one, 0, 0, 0)
os.execv(sys.argv[1], sys.argv[1:])
"""


class PlainUser(MountingBroker):
    """A broker that may not read without permission, also when root runs the tests."""

    def __init__(self, folder: Path, *archives: object) -> None:
        super().__init__(folder, *archives)
        self._command = [sys.executable, "-c", _PLAIN, *self._command]


@pytest.fixture
def wanted(tmp_path: Path) -> Iterator[list[Any]]:
    """The rows of a topic, of which `archive` has five objects."""
    with EmbeddedBroker(tmp_path / "source") as source:
        create_topic(source.bootstrap, TOPIC, 1, {})
        one_each = {"batch.num.messages": 1}
        produce(source.bootstrap, TOPIC, odd_messages(100, seed=1), config=one_each)
        written = mirror(TOPIC, source.bootstrap, tmp_path / "archive", max_offsets=20)
        written |= {"name": TOPIC, "format": "native"}
        copied = run_now(write_config(tmp_path / "archive.json", written))
        assert copied.returncode == 0, copied.stderr
        yield rows(source.bootstrap)


def rows(bootstrap):
    return list(rows_by_librdkafka(bootstrap, TOPIC, config=SOON))


def consumer_of(bootstrap, **more):
    fixed = {"bootstrap.servers": bootstrap, "group.id": "readers", "enable.auto.commit": False}
    return Consumer({**fixed, **SOON, "auto.offset.reset": "error", **more})


def commit(bootstrap, offset):
    with contextlib.closing(consumer_of(bootstrap)) as consumer:
        consumer.commit(offsets=[TopicPartition(TOPIC, 0, offset)], asynchronous=False)


def committed(bootstrap):
    with contextlib.closing(consumer_of(bootstrap)) as consumer:
        (found,) = consumer.committed([TopicPartition(TOPIC, 0)], TIMEOUT_S)
        return found.offset


def asked(bootstrap, topic=TOPIC):
    """The error of a topic in Metadata that permits its creation, as Java clients send it."""
    found = Producer({"bootstrap.servers": bootstrap}).list_topics(topic, TIMEOUT_S).topics[topic]
    return None if found.error is None else found.error.code()


def topics(bootstrap):
    return AdminClient({"bootstrap.servers": bootstrap}).list_topics(timeout=TIMEOUT_S).topics


def next_offset(consumer):
    """The offset of the next record; that its topic is not there yet is no record."""
    deadline_s = time.monotonic() + TIMEOUT_S
    while (found := consumer.poll(1)) is None or found.error() is not None:
        assert time.monotonic() < deadline_s
    return found.offset()


@pytest.mark.gate("waits for the second listing of a bucket, which is 10 s after the first")
def test_a_bucket_that_is_away_at_the_start_keeps_its_names_and_their_offsets(wanted, tmp_path):
    with S3Server(tmp_path / "s3") as server:
        place = LogBucket(server, server.new_bucket())
        for path in (tmp_path / "archive").rglob("*"):
            if path.is_file():
                key = f"kept/{path.relative_to(tmp_path / 'archive')}"
                server.client().put_object(Bucket=place.bucket, Key=key, Body=path.read_bytes())
        once = {**place.environment, "AWS_MAX_ATTEMPTS": "1"}
        broker = MountingBroker(tmp_path / "log", f"s3://{place.bucket}/kept", **once)
        with broker as served:
            commit(served, 60)
        server.kill()
        with broker as served, EmbeddedBroker(tmp_path / "destination") as destination:
            assert committed(served) == 60
            assert asked(served) == LEADER_NOT_AVAILABLE
            assert topics(served).keys() == set()
            waiting = consumer_of(served, **{"topic.metadata.refresh.interval.ms": 500})
            config = tmp_path / "restore.json"
            write_config(config, mirror_to_cluster(TOPIC, served, destination.bootstrap))
            with (
                contextlib.closing(waiting),
                InlineRun(config, "--until-now", folder=tmp_path) as restore,
            ):
                waiting.subscribe([TOPIC])
                wait_until(lambda: "LEADER_NOT_AVAILABLE" in restore.text, what=lambda: "a refusal")
                server.start()
                assert next_offset(waiting) == 60
                assert restore.wait() == 0, restore.text
            assert rows(served) == rows(destination.bootstrap) == wanted
            assert committed(served) == 60
            asked(served, "other")
            wait_until(lambda: "other" in topics(served), what=lambda: "a topic on first use")


@pytest.mark.usefixtures("wanted")
def test_offsets_outlive_a_start_without_archives_and_not_a_new_topic_of_the_name(tmp_path):
    log = tmp_path / "log"
    with MountingBroker(log, tmp_path / "archive") as served:
        commit(served, 60)
    with MountingBroker(log, encoding="") as served:
        assert committed(served) == 60
    with MountingBroker(log, tmp_path / "archive") as served:
        assert committed(served) == 60
    broker = MountingBroker(log, encoding="")
    with broker as served:
        assert committed(served) == 60
        create_topic(served, TOPIC, 1, {})
        assert committed(served) == NONE
    with broker as served:
        assert committed(served) == NONE


def test_a_topic_of_the_name_hides_a_new_archive_until_it_is_deleted(wanted, tmp_path):
    """A client may ask for the topic before the mirror has written its first object."""
    (tmp_path / "place").mkdir()
    broker = MountingBroker(tmp_path / "log", tmp_path / "place")
    with broker as served:
        asked(served)
        wait_until(lambda: TOPIC in topics(served), what=lambda: "a topic on first use")
        for part in sorted((tmp_path / "archive").iterdir()):
            part.rename(tmp_path / "place" / part.name)
        refused = f"{TOPIC}: not mounted: there is a topic of this name"
        wait_until(lambda: refused in broker.log.read_text(), what=broker.log.read_text)
        assert rows(served) == []
        admin = AdminClient({"bootstrap.servers": served})
        admin.delete_topics([TOPIC])[TOPIC].result(TIMEOUT_S)
        wait_until(lambda: TOPIC in topics(served), what=broker.log.read_text)
        assert rows(served) == wanted
    text = broker.log.read_text()
    assert text.count(refused) == 1
    assert text.count(f"{TOPIC}: mounted now") == 1


def test_an_object_that_cannot_be_read_is_tried_again_with_pauses(wanted, tmp_path):
    third = sorted((tmp_path / "archive" / TOPIC / "0").glob("*.batches"))[2]
    broker = PlainUser(tmp_path / "log", tmp_path / "archive")
    with broker as served, contextlib.closing(consumer_of(served)) as consumer:
        consumer.assign([TopicPartition(TOPIC, 0, 0)])
        third.chmod(0)
        assert [next_offset(consumer) for _ in range(40)] == list(range(40))
        paused = f"{third.name}: could not be read a moment ago"
        wait_until(lambda: consumer.poll(0.1) or paused in broker.log.read_text(), what=str)
        third.chmod(0o644)
        assert [next_offset(consumer) for _ in range(60)] == list(range(40, 100))
        assert rows(served) == wanted
    text = broker.log.read_text()
    assert "object cannot be read [" in text
    assert "Traceback" not in text


def test_a_last_stable_offset_of_zero_is_kept_when_later_objects_are_read(tmp_path):
    log = MountedLog(tmp_path / "t" / "0", disk=Disk(), cache=SegmentCache(Disk()), executor=None)
    log.has_transactions = True
    segments = []
    for first in range(0, 40, 10):
        segment = Segment(log.folder, first, first + 10, 0, is_exact=False)
        segment.events = TransactionEvents()
        segment.events.wrote(7, first)
        segments.append(segment)
    log.mount(segments)
    for offset in range(0, 40, 10):
        with contextlib.suppress(ColdSegmentError):  # its records, which this test does not need
            log.read_committed(offset, 1000, at_least_one=True)
        assert log.last_stable_offset == 0

"""A bucket that is away: what clients get meanwhile, and what is there afterwards."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest
from confluent_kafka import Consumer, KafkaError, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import (
    AclBinding,
    AclOperation,
    AclPermissionType,
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    NewPartitions,
    NewTopic,
    ResourcePatternType,
    ResourceType,
)

from kit.judges.clients import Message, produce
from kit.judges.partition_client import PartitionClient
from kit.runs.bucket_load import PARTITIONS, Load, Reading, create, stored
from kit.runs.commands import wait_until, write_config
from kit.runs.inline_run import InlineRun, mirror_to_cluster
from kit.servers.embedded import EmbeddedBroker

if TYPE_CHECKING:
    from collections.abc import Callable


pytestmark = pytest.mark.slow
LATE_S = 20
"""After which changes and producers get an error."""


def code_of(request: Callable[[], object]) -> int:
    """Return the error code of a request of an admin client."""
    with pytest.raises(KafkaException) as raised:
        request()
    return int(raised.value.args[0].code())


@pytest.mark.gate("it waits for an outage of 30 s")
def test_changes_get_an_error_that_clients_retry_and_may_be_made_later(machines, s3_server):
    broker = machines("--super-user", "User:ANONYMOUS").start()
    create(broker, "t")
    produce(broker.bootstrap, "t", [Message(value=b"x")] * 10, partition=2)
    broker.stop()
    broker.start()  # with no producer IDs in reserve
    common = {"bootstrap.servers": broker.bootstrap, "log_level": 0}
    admin, other = AdminClient(common), AdminClient(common)  # requests of one are in order
    entry = ConfigEntry("retention.ms", "77", incremental_operation=AlterConfigOpType.SET)
    setting = ConfigResource("topic", "t", incremental_configs=[entry])
    acl = AclBinding(
        ResourceType.TOPIC,
        "t",
        ResourcePatternType.LITERAL,
        "User:me",
        "*",
        AclOperation.READ,
        AclPermissionType.ALLOW,
    )
    group = Consumer({**common, "group.id": "readers", "enable.auto.commit": False})
    idempotent = Producer({**common, "enable.idempotence": True})
    once = Producer({**common, "retries": 0})
    outcomes: list[int | None] = []
    s3_server.kill()
    try:
        began_s = time.monotonic()
        timeout = {"request_timeout": 50}
        changes = [
            admin.create_topics([NewTopic("new", 2, 1)], **timeout)["new"],
            admin.create_topics([NewTopic("newer", 2, 1)], **timeout)["newer"],
            admin.incremental_alter_configs([setting], **timeout)[setting],
            admin.create_partitions([NewPartitions("t", 6)], **timeout)["t"],
            other.create_acls([acl], **timeout)[acl],
        ]
        idempotent.produce("t", b"later", partition=0)
        idempotent.poll(0)
        once.produce(
            "t",
            b"once",
            partition=1,
            on_delivery=lambda error, _: outcomes.append(error and error.code()),
        )
        group.commit(offsets=[TopicPartition("t", 2, 7)])
        codes = [code_of(change.result) for change in changes]
        assert once.flush(30) == 0
        assert LATE_S - 5 < time.monotonic() - began_s < LATE_S + 15
    finally:
        s3_server.start()
    assert codes == [KafkaError.REQUEST_TIMED_OUT] * len(changes)
    assert outcomes == [KafkaError.REQUEST_TIMED_OUT]  # it may be stored, and is later
    assert idempotent.flush(60) == 0
    # What had begun was made, and what is repeated is made.
    topics = admin.list_topics(timeout=20).topics
    assert len(topics["new"].partitions) == 2
    admin.create_topics([NewTopic("newer", 2, 1)])["newer"].result(30)
    group.commit(offsets=[TopicPartition("t", 2, 8)], asynchronous=False)
    group.close()
    broker.kill()
    broker.start()
    again = Consumer({**common, "group.id": "readers"})
    assert again.committed([TopicPartition("t", 2)], 20)[0].offset == 8
    again.close()
    assert {"new", "newer"} <= admin.list_topics(timeout=20).topics.keys()
    values = list(stored(broker, "t").values())
    assert (values.count(b"later"), values.count(b"once")) == (1, 1)


@pytest.mark.gate("it waits for an outage of a minute")
def test_a_bucket_that_is_away_for_a_minute_loses_and_duplicates_nothing(machines, s3_server):
    broker = machines().start()
    create(broker, "t")
    idempotent = {"enable.idempotence": True, "message.timeout.ms": 300_000}
    with (
        Reading(broker.bootstrap, "t") as reading,
        Load(broker.bootstrap, "t", **idempotent) as load,
    ):
        load.wait_for(500)
        s3_server.kill()
        try:
            time.sleep(60)
            acked = len(load.acked)
            assert broker.alive
        finally:
            s3_server.start()
        load.wait_for(500)
        load.__exit__()
        assert load.flush() == 0
        reading.wait_for(load.sent)
    assert load.failures == reading.errors == []
    assert len(load.acked) > acked
    found = stored(broker, "t")
    # The bucket may be back between the error for a batch and the response to the next one.
    assert found == load.placed(found) == reading.found()
    assert len(set(found.values())) == load.sent == len(load.acked) + len(load.unplaced)
    broker.kill()
    broker.start()
    assert stored(broker, "t") == found
    assert len({partition for partition, _ in load.acked}) == PARTITIONS


@pytest.mark.parametrize("bucket_is", ["away", "silent"])
def test_a_stop_without_the_bucket_ends_within_ten_seconds(machines, s3_server, bucket_is):
    broker = machines().start()
    create(broker, "t")
    admin = AdminClient({"bootstrap.servers": broker.bootstrap, "log_level": 0})
    with Load(broker.bootstrap, "t", **{"message.timeout.ms": 5_000}) as load:
        load.wait_for(100)
        (s3_server.kill if bucket_is == "away" else s3_server.pause)()
        try:
            creation = admin.create_topics([NewTopic("new", 1, 1)], request_timeout=30)["new"]
            sent = load.sent
            load.wait_for_sent(sent + 100)
            began_s = time.monotonic()
            code = broker.stop()
            took_s = time.monotonic() - began_s
        finally:
            (s3_server.start if bucket_is == "away" else s3_server.resume)()
    load.flush()
    assert code == 75
    assert took_s < 10 + 3  # and what it takes to stop and to start programs on a busy machine
    shown = " ".join(broker.log.read_text().split())  # the program wraps lines
    assert "its bucket cannot be written" in shown
    assert "those that were not may be missing" in shown
    assert not (broker.work_dir / "logmirror-work").exists()
    with pytest.raises(KafkaException):
        creation.result()
    broker.start()
    found = stored(broker, "t")
    assert {at: found.get(at) for at in load.acked} == load.acked


@pytest.mark.gate("it waits for an outage of 40 s")
@pytest.mark.parametrize("offsets", ["preserve", "translate"])
def test_a_mirror_into_a_bucket_that_is_away_copies_each_record_once(
    machines, s3_server, tmp_path, offsets
):
    """The mirror learns that its batches may be stored, and reads where the log ends."""
    broker = machines().start()
    with EmbeddedBroker(tmp_path / "source") as source:
        create(source, "t")
        copy = mirror_to_cluster("t", source.bootstrap, broker.bootstrap, offsets=offsets)
        config = write_config(tmp_path / "mirror.json", copy)
        run = InlineRun(config, folder=tmp_path)
        try:
            with Load(source.bootstrap, "t", per_s=500) as load:
                load.wait_for(200)
                with PartitionClient(broker.bootstrap, "t") as partition:
                    # The mirror creates the topic: until then there is an error.
                    wait_until(lambda: partition.end_of_epoch()[2] > 0, what=lambda: run.text)
                s3_server.kill()
                try:
                    time.sleep(40)
                finally:
                    s3_server.start()
                load.wait_for(200)
            assert load.flush() == 0
            wanted = by_partition(stored(source, "t"))
            wait_until(
                lambda: by_partition(stored(broker, "t")) == wanted, what=lambda: run.text[-4000:]
            )
            assert run.alive
        finally:
            run.kill()
        if offsets == "preserve":
            assert stored(broker, "t") == stored(source, "t")
    broker.kill()
    broker.start()
    assert by_partition(stored(broker, "t")) == wanted


def by_partition(found: dict[tuple[int, int], bytes | None]) -> dict[int, list[bytes | None]]:
    """The values of each partition, in the order of offsets."""
    return {
        partition: [found[at] for at in sorted(found) if at[0] == partition]
        for partition in range(PARTITIONS)
    }

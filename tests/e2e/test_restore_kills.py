"""Goal: a restore from a bucket that is killed again and again ends as an exact copy.

Method: an archive in an S3 server of ten partitions with transactions, offset gaps of a compaction
and log starts above 0; a broker that mounts it, `logmirror run` into Apache Kafka. The run, the
broker or both end by SIGKILL at random moments. A clean run finishes, and librdkafka reads the same
records at the same offsets from the cluster as from the source of the archive.
`LOGMIRROR_TEST_KILLS` is the number of kills, in the gate at least 20.
Of the first 20, nine in ten must hit before the last record is copied.
`LOGMIRROR_TEST_SEED` repeats a run's choices.
"""

from __future__ import annotations

import os
import random
from concurrent.futures import ThreadPoolExecutor

import pytest
from confluent_kafka import Consumer, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient

from kit.judges.clients import odd_messages, produce, produce_transactions, rows_by_librdkafka
from kit.runs.cleaning import set_config
from kit.runs.commands import FORMATS, mirror, wait_until, write_config
from kit.runs.inline_run import InlineRun, mirror_to_cluster, run_now
from kit.servers.embedded import EmbeddedBroker
from kit.servers.kafka import create_topic
from kit.servers.mounted import MountingBroker
from kit.servers.s3 import S3Server
from kit.tiers import KILLS, sized

pytestmark = pytest.mark.timeout(3600)

PARTITIONS = range(10)
RECORDS = 1000
STARTS = [37 * number for number in PARTITIONS]
PER_OBJECT = 40
LEAST_KILLS = sized(0, 20, 0)
SURE_KILLS = 20
"""More may come after the last record: a run copies a part of the records before it is killed."""

TARGETS = ("run", "broker", "both")
SOON = {"fetch.wait.max.ms": 20}


def rows(bootstrap, topic, starts=STARTS):
    return [
        list(rows_by_librdkafka(bootstrap, topic, partition=n, start=start, config=SOON))
        for n, start in enumerate(starts)
    ]


def end_of(consumer, topic):
    """The sum of the high watermarks; 0 while the topic does not exist."""
    try:
        places = [TopicPartition(topic, n) for n in PARTITIONS]
        return sum(consumer.get_watermark_offsets(place, 20)[1] for place in places)
    except KafkaException:
        return 0


def leave_gaps(bootstrap, topic):
    """Compact the topic once, and delete the first records of its partitions."""
    compacted = {"retention.ms": -1, "segment.ms": 300, "min.cleanable.dirty.ratio": 0}
    compacted["cleanup.policy"] = "compact,delete"
    for name, value in compacted.items():
        set_config(bootstrap, topic, name, str(value))
    whole = [0 for _ in PARTITIONS]
    wait_until(
        lambda: all(len(found) < RECORDS * 0.6 for found in rows(bootstrap, topic, whole)),
        what=lambda: f"compaction: {[len(one) for one in rows(bootstrap, topic, whole)]} records",
    )
    set_config(bootstrap, topic, "min.cleanable.dirty.ratio", "1")
    before = [TopicPartition(topic, n, start) for n, start in zip(PARTITIONS, STARTS, strict=True)]
    admin = AdminClient({"bootstrap.servers": bootstrap})
    deleted = admin.delete_records(before)
    assert [one.result(60).low_watermark for one in deleted.values()] == STARTS


def archived(folder, server, topic, form):
    """Archive a topic in a new bucket; returns its records, and the bucket."""
    bucket = server.new_bucket()
    with EmbeddedBroker(folder / "source", segment_bytes=30_000) as source:
        create_topic(source.bootstrap, topic, len(PARTITIONS), {})
        for number in PARTITIONS:
            messages = odd_messages(RECORDS, seed=number)
            at = {"partition": number}
            small = {"batch.num.messages": 20}
            produce(source.bootstrap, topic, messages, config=small, **at)
            pieces = [(odd_messages(7, seed=n), n % 2 == 0) for n in range(4)]
            produce_transactions(
                source.bootstrap, topic, pieces, transactional_id=f"{number}", **at
            )
        leave_gaps(source.bootstrap, topic)
        places = [server.destination(bucket, prefix="kept", name=topic)]
        one = mirror(
            topic, source.bootstrap, "", form=form, max_offsets=PER_OBJECT, destinations=places
        )
        one["chain-start"] = "earliest"
        copied = run_now(write_config(folder / "archive.json", one))
        assert copied.returncode == 0, copied.stderr
        return rows(source.bootstrap, topic), bucket


@pytest.mark.thinned
def test_a_killed_restore_from_a_bucket_ends_exact(kafka_431, tmp_path):
    """All formats at once: after a kill, a run waits for what the earlier one may still write."""
    seed = int(os.environ.get("LOGMIRROR_TEST_SEED", random.SystemRandom().randrange(2**32)))
    print(f"LOGMIRROR_TEST_SEED={seed}")  # noqa: T201  # pytest shows it when the test fails
    with ThreadPoolExecutor() as pool:
        restores = [
            pool.submit(check_killed_restore, kafka_431.bootstrap, tmp_path / form, form, seed)
            for form in sized(("parquet",), FORMATS, FORMATS)
        ]
    for restore in restores:
        restore.result()


def check_killed_restore(cluster, folder, form, seed):
    """Archive a topic, restore it while it is killed, and compare."""
    folder.mkdir()
    chooser = random.Random(seed)
    topic = f"killed-restore-{form}"
    with S3Server(folder / "s3") as server:
        wanted, bucket = archived(folder, server, topic, form)
        location = server.location(bucket)
        access = {
            "AWS_ENDPOINT_URL": server.endpoint,
            "AWS_ACCESS_KEY_ID": location.write.access_key_id,
            "AWS_SECRET_ACCESS_KEY": location.write.secret_access_key,
            "AWS_REGION": location.region,
        }
        broker = MountingBroker(folder / "log", f"s3://{bucket}/kept", **access)
        with broker as mounted:
            assert rows(mounted, topic) == wanted
            restore = mirror_to_cluster(topic, mounted, cluster, name=topic, max_batch_bytes=0)
            config = write_config(folder / "restore.json", restore)
            total, hits = sum(found[-1].offset for found in wanted), 0
            kills = max(KILLS, LEAST_KILLS)
            looking = Consumer({"bootstrap.servers": cluster, "group.id": "unused", "log_level": 0})
            run = InlineRun(config, folder=folder)
            for number in range(kills):
                # by offsets, so that as many kills come before the end on any machine
                more = chooser.randrange(total // (2 * kills)) if number else 0
                until = min(end_of(looking, topic) + more, total)
                wait_until(
                    lambda until=until: end_of(looking, topic) > until,
                    what=lambda run=run: f"progress:\n{run.text}",
                )
                target = TARGETS[(seed + number) % len(TARGETS)]
                assert run.alive, run.text
                if target != "run":
                    broker.kill()
                if target != "broker":
                    run.kill()
                end = end_of(looking, topic)
                hits += end < total
                print(f"{form}: killed {target} at {end} of {total}")  # noqa: T201  # the same
                if target != "run":
                    broker.start()
                if target != "broker":
                    run = InlineRun(config, folder=folder)
            run.kill()
            result = run_now(config)
            assert result.returncode == 0, result.stderr
            lows = [
                looking.get_watermark_offsets(TopicPartition(topic, n), 20)[0] for n in PARTITIONS
            ]
            looking.close()
    assert lows == STARTS
    assert hits >= 0.9 * min(kills, SURE_KILLS)
    assert rows(cluster, topic) == wanted

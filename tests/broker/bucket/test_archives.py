"""Goal: a broker on a bucket serves several archives beside its own topics, each as it is.

Method: a mirror copies a topic into a directory and another one into a bucket; `logmirror broker`
mounts both, and its log dir is in a third place. librdkafka reads all and writes to the own topic.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kit.judges.clients import (
    odd_messages,
    produce,
    produce_transactions,
    rows_by_librdkafka,
)
from kit.runs.commands import mirror, write_config
from kit.runs.inline_run import run_now
from kit.servers.embedded import EmbeddedBroker
from kit.servers.kafka import create_topic

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from kit.servers.bucket_broker import BucketBroker
    from kit.servers.s3 import S3Server

pytestmark = pytest.mark.jvm

SOON = {"fetch.wait.max.ms": 20}
FORMS = {"on-disk": "parquet", "in-bucket": "native"}


def rows(bootstrap, topic, config=SOON):
    return [list(rows_by_librdkafka(bootstrap, topic, partition=n, config=config)) for n in (0, 1)]


def archive(
    bootstrap: str, folder: Path, destination: dict[str, object] | None, topic: str
) -> None:
    """Create a topic, and copy it into a folder, or to a destination."""
    create_topic(bootstrap, topic, 2, {})
    for number in (0, 1):
        produce(bootstrap, topic, odd_messages(80, seed=len(topic) + number), partition=number)
        transactions = [(odd_messages(5, seed=n), n % 2 == 0) for n in range(4)]
        produce_transactions(
            bootstrap, topic, transactions, partition=number, transactional_id=f"{topic}-{number}"
        )
    copied = mirror(topic, bootstrap, folder / topic, form=FORMS[topic], max_offsets=25)
    if destination is not None:
        copied["destinations"] = [destination]
    done = run_now(write_config(folder / f"{topic}.json", copied | {"name": topic}))
    assert done.returncode == 0, done.stderr


def test_two_archives_are_served_beside_a_log_dir_in_a_bucket(
    machines: Callable[..., BucketBroker], s3_server: S3Server, bucket: str, tmp_path: Path
) -> None:
    with EmbeddedBroker(tmp_path / "source") as source:
        archive(source.bootstrap, tmp_path, None, "on-disk")
        kept = s3_server.destination(bucket, prefix="kept")
        archive(source.bootstrap, tmp_path, kept, "in-bucket")
        wanted = {topic: rows(source.bootstrap, topic) for topic in FORMS}
        assert all(len(found) == 80 + 2 * 5 for found in wanted["on-disk"] + wanted["in-bucket"])

    mounted = ("--archive", str(tmp_path / "on-disk"), "--archive", f"s3://{bucket}/kept")
    with machines(*mounted) as broker:
        create_topic(broker.bootstrap, "own", 2, {})
        messages = odd_messages(50, seed=7)
        assert produce(broker.bootstrap, "own", messages) == list(range(50))
        assert {topic: rows(broker.bootstrap, topic) for topic in FORMS} == wanted
        [own, _] = rows(broker.bootstrap, "own")
        assert [(row.key, row.value) for row in own] == [(one.key, one.value) for one in messages]
        assert broker.stop() == 0
    with machines(*mounted) as other:  # the own topic is in the bucket
        assert rows(other.bootstrap, "own") == [own, []]
        assert {topic: rows(other.bootstrap, topic) for topic in FORMS} == wanted

"""Goal: the sealed segments of a log dir in a bucket are native objects of an archive.

Method: a real broker seals segments with odd records and transactions. The partition's folder is
copied under a plain name. `logmirror verify --deep` and a broker that mounts it read the copy; the
records are compared with those that the broker served. Segments are also sealed by their age, and
uploaded in parts.
"""

from __future__ import annotations

import math
import shutil
import time
from typing import TYPE_CHECKING

import pytest

from broker.bucket.test_statements_of_outages import BIG_BYTES, big, expected_big
from broker.bucket.test_statements_of_reads import (
    BATCHES,
    append,
    contents,
    digest,
    expected,
    objects,
    read_all,
)
from kit.judges.clients import (
    Message,
    odd_messages,
    produce,
    produce_transactions,
    rows_by_librdkafka,
)
from kit.judges.commits import commit_files, committed
from kit.judges.partition_client import PartitionClient
from kit.runs.commands import logmirror_json, mirror, wait_until, write_config
from kit.servers.mounted import MountingBroker
from logmirror.stores.s3 import MEMORY_BYTES, PART_BYTES

if TYPE_CHECKING:
    from pathlib import Path

    from broker.bucket.conftest import Proxied

pytestmark = pytest.mark.slow
TOPIC = "odd"
LEVELS = ("read_committed", "read_uncommitted")


def committed_offsets(of: Proxied) -> list[int]:
    """The first offsets of the records that are in commits."""
    return [one.first for path in commit_files(of.files) for one in committed(path)]


def fill(of: Proxied) -> None:
    of.create_topic(TOPIC, {"segment.bytes": "10000"})
    bootstrap = of.broker.bootstrap
    several: dict[str, object] = {"batch.num.messages": 20}
    produce(bootstrap, TOPIC, odd_messages(200, seed=1), config=several)
    transactions = [(odd_messages(7, seed=n), n % 2 == 0) for n in range(4)]
    produce_transactions(bootstrap, TOPIC, transactions, transactional_id="some")
    produce(
        bootstrap, TOPIC, odd_messages(100, seed=2), config={**several, "compression.type": "zstd"}
    )


def copied(of: Proxied, folder: Path) -> int:
    """Copy the objects of the partition; returns the offset behind them."""
    paths = objects(of, TOPIC)
    (folder / TOPIC / "0").mkdir(parents=True)
    for path in paths:
        shutil.copy(path, folder / TOPIC / "0")
    return int(paths[-1].name[21:41]) + 1


def test_sealed_segments_are_read_as_an_archive(proxied, tmp_path):
    found, archive = proxied(), tmp_path / "archive"
    fill(found)
    wait_until(lambda: len(objects(found, TOPIC)) > 3, what=lambda: "sealed segments")
    bootstrap = found.broker.bootstrap
    wanted = {
        level: list(rows_by_librdkafka(bootstrap, TOPIC, config={"isolation.level": level}))
        for level in LEVELS
    }
    assert found.broker.stop() == 0
    end = copied(found, archive)

    one = mirror(TOPIC, "127.0.0.1:1", archive, form="native", name=TOPIC, partitions=[0])
    [report] = logmirror_json("verify", "--deep", "-c", write_config(tmp_path / "c.json", one))
    assert (report["problems"], report["first"], report["next_offset"]) == ([], 0, end)
    assert report["records"] == sum(row.offset < end for row in wanted["read_uncommitted"])
    with MountingBroker(tmp_path / "log", archive) as served:
        for level in LEVELS:
            rows = list(rows_by_librdkafka(served, TOPIC, config={"isolation.level": level}))
            assert rows == [row for row in wanted[level] if row.offset < end]
    assert len(rows) > 200
    assert wanted["read_committed"] != wanted["read_uncommitted"]


def test_a_segment_is_sealed_when_its_oldest_commit_has_the_age(proxied):
    age_ms = 3_000
    found, topic = proxied(commit_age_ms=age_ms), "t"
    found.create_topic(topic, {})
    with PartitionClient(found.broker.bootstrap, topic) as partition:
        began_s = time.monotonic()
        append(partition, range(BATCHES))
        wait_until(lambda: objects(found, topic) != [], what=lambda: "an object")
        assert time.monotonic() - began_s >= age_ms / 1_000
        [sealed] = objects(found, topic)
        assert contents(sealed.read_bytes()) == expected(topic, range(BATCHES))
        wait_until(lambda: not committed_offsets(found), what=lambda: "the commits' deletion")
        append(partition, range(BATCHES, BATCHES + 1))
    found.broker.kill()
    found.broker.start()
    with PartitionClient(found.broker.bootstrap, topic) as partition:
        assert read_all(partition) == expected(topic, range(BATCHES + 1))


@pytest.mark.gate("it writes and reads 100 MB")
def test_a_large_segment_is_uploaded_in_parts_and_read_whole(proxied):
    found, topic = proxied(), "t"
    count = MEMORY_BYTES // BIG_BYTES + 2
    found.create_topic(topic, {"segment.bytes": str(count * (BIG_BYTES + 200))})
    bootstrap = found.broker.bootstrap
    produce(bootstrap, topic, [Message(value=big(number)) for number in range(count + 1)])
    wait_until(lambda: objects(found, topic) != [], what=lambda: "the object")
    [sealed] = objects(found, topic)
    size = sealed.stat().st_size
    assert size > MEMORY_BYTES
    asked = found.proxy.asked
    assert asked["CreateMultipartUpload"] == asked["CompleteMultipartUpload"] == 1
    assert asked["UploadPart"] == math.ceil(size / PART_BYTES)
    found.broker.kill()
    found.broker.start()
    rows = rows_by_librdkafka(bootstrap, topic)
    assert [(row.offset, digest(row.value)) for row in rows] == expected_big(count + 1)

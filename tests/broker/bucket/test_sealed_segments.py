"""Goal: the sealed segments of a log dir in a bucket are native objects of an archive.

Method: a real broker seals segments with odd records and transactions. The partition's folder is
copied under a plain name. `logmirror verify --deep` and a broker that mounts it read the copy; the
records are compared with those that the broker served.
"""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import pytest

from broker.bucket.test_statements_of_reads import objects
from kit.judges.clients import odd_messages, produce, produce_transactions, rows_by_librdkafka
from kit.runs.commands import logmirror_json, mirror, wait_until, write_config
from kit.servers.mounted import MountingBroker

if TYPE_CHECKING:
    from pathlib import Path

    from broker.bucket.conftest import Proxied

pytestmark = pytest.mark.slow
TOPIC = "odd"
LEVELS = ("read_committed", "read_uncommitted")


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

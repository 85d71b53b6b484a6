"""Apache Kafka's own tools show the log directories, wherever they are.

Method: the broker runs as its user starts it; the tools of each release describe its directories.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from broker.test_log_dirs import start, write

if TYPE_CHECKING:
    from kit.servers.apache import ApacheTools

pytestmark = pytest.mark.slow


def described(tools: ApacheTools, bootstrap: str, *arguments: str) -> dict[str, dict[str, Any]]:
    """What `kafka-log-dirs --describe` prints, by log directory."""
    at = ("--bootstrap-server", bootstrap, "--describe", *arguments)
    lines = tools.run("kafka-log-dirs", *at).stdout.splitlines()
    [found] = [json.loads(line) for line in lines if line.startswith("{")]
    [broker] = found["brokers"]
    return {one["logDir"]: one for one in broker["logDirs"]}


def sizes(found: dict[str, Any]) -> dict[str, int]:
    assert {(one["offsetLag"], one["isFuture"]) for one in found["partitions"]} <= {(0, False)}
    return {one["partition"]: one["size"] for one in found["partitions"]}


@pytest.mark.statement("E21", "E24", "E26", "E97")
def test_e21_every_log_directory_is_shown_under_the_name_that_was_given(apache_tools, tmp_path):
    places = [tmp_path / name for name in ("a", "b c", "ü")]
    linked = tmp_path / "link"
    linked.symlink_to(tmp_path)
    gone = tmp_path / "gone"
    with start(*places, linked / "d", gone, topics={"orders": 4}) as kafka:
        write(kafka, "orders", 4)
        found = described(apache_tools, kafka.bootstrap_servers)
        assert list(found) == [*map(str, places), str(linked / "d"), str(gone)]
        assert {one["error"] for one in found.values()} == {None}
        held = [sizes(one) for one in found.values()]
        assert [list(one) for one in held] == [*([f"orders-{n}"] for n in range(4)), []]
        for path, one in zip([*places, linked / "d"], held, strict=False):
            [(name, size)] = one.items()
            folder = path / "orders" / name.rpartition("-")[2]
            assert size == sum(file.stat().st_size for file in folder.glob("*.batches*")) > 0

        gone.rename(tmp_path / "away")
        found = described(apache_tools, kafka.bootstrap_servers, "--topic-list", "orders,none")
        assert "KafkaStorageException" in found.pop(str(gone))["error"]
        assert [list(sizes(one)) for one in found.values()] == [[f"orders-{n}"] for n in range(4)]


@pytest.mark.statement("E26", "E97")
def test_e97_a_log_directory_in_a_bucket_is_shown(apache_tools, embedded_in_bucket, topic_name):
    found = described(apache_tools, embedded_in_bucket.bootstrap)
    assert list(found) == [embedded_in_bucket.bucket.url]


def test_no_reassignment_is_in_progress(apache_tools, embedded):
    at = ("--bootstrap-server", embedded.bootstrap)
    found = apache_tools.run("kafka-reassign-partitions", *at, "--list").stdout
    assert found.strip() == "No partition reassignments found."

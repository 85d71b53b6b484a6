"""The commands that only look: `validate --check`, and what `run` looks at before Spark starts.

Method: two embedded brokers, one configuration, changed until each row of the table has been seen
good and bad; after every look both clusters and the disk are as they were.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from kit.clients import Message, produce
from kit.commands import BrokerCommand, logmirror, logmirror_json, write_config
from logmirror.cluster.client import ClusterClient
from logmirror.cluster.properties import connection_settings

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.xdist_group("e2e-check")

LIMITS = {"max-time-ms": 60_000, "max-bytes": 1 << 20, "max-offsets": 1000}


@pytest.fixture(scope="module")
def brokers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[BrokerCommand]]:
    folder = tmp_path_factory.mktemp("check")
    started = [BrokerCommand(folder / name) for name in "ab"]
    try:
        yield [broker.start() for broker in started]
    finally:
        for broker in started:
            broker.remove()


def config(path: Path, brokers: list[BrokerCommand], topic: str, **more: Any) -> Path:
    first, second = brokers
    standby = {"name": "standby", "type": "kafka", "bootstrap-servers": second.bootstrap}
    lake = {"name": "lake", "type": "filesystem", "root": str(path / "archive")}
    mirror = {
        "name": "m",
        "source": {"bootstrap-servers": first.bootstrap},
        "topic": topic,
        "partitions": "all",
        "flush": LIMITS,
        "destinations": [{**standby, **more}, lake],
    }
    return write_config(path / "config.json", mirror)


def topics(broker: BrokerCommand) -> list[str]:
    with ClusterClient(connection_settings(broker.bootstrap, {})) as client:
        return client.topics()


def seen(rows: list[dict[str, str]]) -> set[tuple[str, str, str]]:
    return {(row["destination"], row["what"], row["severity"]) for row in rows}


def test_a_new_copy_is_announced_and_nothing_is_made(brokers, tmp_path):
    brokers[0].create_topic("new", partitions=2)
    before = topics(brokers[1])

    rows = logmirror_json("validate", "--check", "-c", config(tmp_path, brokers, "new"))

    assert {("", "source", "ok"), ("standby", "position", "ok"), ("lake", "folder", "ok")} <= seen(
        rows
    )
    assert topics(brokers[1]) == before
    assert not (tmp_path / "archive").exists()


def test_a_topic_that_is_not_there_is_told_before_spark_starts(brokers, tmp_path):
    path = config(tmp_path, brokers, "misspelt")

    checked = logmirror("validate", "--check", "-c", path, "--format", "json")
    ran = logmirror("run", "--until-now", "-c", path)

    assert checked.returncode == ran.returncode == 2
    rows = seen(json.loads(checked.stdout))
    assert [row for row in rows if row[2] != "ok"] == [("", "source", "error")]
    assert ("lake", "folder", "ok") in rows  # what else there is to say is said all the same
    assert "topic does not exist" in ran.stderr
    assert "mirror starts" not in ran.stderr


def test_a_destination_that_would_break_the_copy_is_an_error_with_what_to_do(brokers, tmp_path):
    brokers[0].create_topic("unfit", partitions=1)
    brokers[1].create_topic("unfit", partitions=1, config={"max.message.bytes": "1000"})

    result = logmirror(
        "validate", "--check", "-c", config(tmp_path, brokers, "unfit"), "--format", "json"
    )

    assert result.returncode == 2
    (row,) = [r for r in json.loads(result.stdout) if r["severity"] == "error"]
    assert (row["destination"], row["what"]) == ("standby", "max.message.bytes")
    assert row["advice"]


def test_a_destination_that_is_ahead_of_its_source_is_an_error(brokers, tmp_path):
    brokers[0].create_topic("ahead", partitions=1)
    brokers[1].create_topic("ahead", partitions=1)
    produce(brokers[1].bootstrap, "ahead", [Message(value=b"someone else's")])

    result = logmirror(
        "validate", "--check", "-c", config(tmp_path, brokers, "ahead"), "--format", "json"
    )

    assert result.returncode == 2
    (row,) = [r for r in json.loads(result.stdout) if r["severity"] == "error"]
    assert "ends beyond the source's" in row["found"]


def test_only_the_mirror_that_was_asked_for_is_looked_at(brokers, tmp_path):
    brokers[0].create_topic("some", partitions=1)
    path = config(tmp_path, brokers, "some")
    text = json.loads(path.read_text())
    other = {**text["mirrors"][0], "name": "other", "topic": "absent"}
    other["destinations"] = [
        {"name": "elsewhere", "type": "filesystem", "root": str(tmp_path / "other")}
    ]
    path.write_text(json.dumps({**text, "mirrors": [*text["mirrors"], other]}))

    one = logmirror("verify", "--mirror", "other", "-c", path)
    unknown = logmirror("status", "--mirror", "nobody", "-c", path)

    assert "elsewhere" not in one.stdout  # nothing is there yet
    assert one.returncode == 0
    assert unknown.returncode == 2
    assert "nobody" in unknown.stderr

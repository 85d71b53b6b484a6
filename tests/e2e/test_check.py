"""Checks that change nothing: `validate --check`, and those of `run` before Spark starts.

Method: two embedded brokers, a real bucket and one configuration, varied until each row of the
table was seen with and without an error. After every check, clusters, bucket and disk are
unchanged. Permissions of brokers are tested in app/test_acls.py.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from kit.fakes.s3_proxy import S3Proxy
from kit.judges.clients import Message, produce
from kit.judges.gaps import take_head
from kit.runs.commands import BrokerCommand, logmirror, logmirror_json, write_config
from kit.servers.machine import HOST, free_ports
from kit.servers.s3 import S3Server
from logmirror.app import preflight
from logmirror.app.preflight import check
from logmirror.cluster.client import ClusterClient
from logmirror.cluster.properties import connection_settings
from logmirror.config.settings import load_text
from logmirror.stores.s3_policy import policies

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


def test_a_new_destination_is_announced_and_nothing_is_created(brokers, tmp_path):
    brokers[0].create_topic("new", partitions=2)
    before = topics(brokers[1])

    rows = logmirror_json("validate", "--check", "-c", config(tmp_path, brokers, "new"))

    assert {("", "source", "ok"), ("standby", "position", "ok"), ("lake", "folder", "ok")} <= seen(
        rows
    )
    assert topics(brokers[1]) == before
    assert not (tmp_path / "archive").exists()


def test_a_missing_topic_is_reported_before_spark_starts(brokers, tmp_path):
    path = config(tmp_path, brokers, "misspelt")

    checked = logmirror("validate", "--check", "-c", path, "--format", "json")
    ran = logmirror("run", "--until-now", "-c", path)

    assert checked.returncode == ran.returncode == 2
    rows = seen(json.loads(checked.stdout))
    assert [row for row in rows if row[2] != "ok"] == [("", "source", "error")]
    assert ("lake", "folder", "ok") in rows  # what else there is to say is said all the same
    assert "topic does not exist" in ran.stderr
    assert "mirror starts" not in ran.stderr


def test_incompatible_destination_settings_are_an_error_with_a_hint(brokers, tmp_path):
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
    produce(brokers[1].bootstrap, "ahead", [Message(value=b"of another client")])

    result = logmirror(
        "validate", "--check", "-c", config(tmp_path, brokers, "ahead"), "--format", "json"
    )

    assert result.returncode == 2
    (row,) = [r for r in json.loads(result.stdout) if r["severity"] == "error"]
    assert "ends beyond the source's" in row["found"]


@pytest.mark.parametrize("exists", [False, True])
def test_a_long_head_is_announced_with_its_cost(brokers, tmp_path, monkeypatch, exists):
    monkeypatch.setattr(preflight, "_HEAD_OFFSETS", 1_000_000)
    topic = f"head-{exists}"
    brokers[0].create_topic(topic, partitions=2)
    take_head(brokers[0].bootstrap, topic, 1_200_000)
    if exists:
        brokers[1].create_topic(topic, partitions=2)

    rows = check(load_text(config(tmp_path, brokers, topic).read_text(), environ={}))

    (row,) = [row for row in rows if row.what == "head"]
    assert (row.destination, row.severity) == ("standby", "note")
    assert row.found == "partition 0: 1200000 offsets below the source's log start offset"
    assert "0.0 GB" in row.advice
    assert "1 min or more" in row.advice


@pytest.mark.parametrize("more", [{"holes": "fail"}, {"offsets": "translate"}])
def test_a_head_that_no_padding_fills_is_not_announced(brokers, tmp_path, monkeypatch, more):
    monkeypatch.setattr(preflight, "_HEAD_OFFSETS", 1)
    topic = f"no-head-{next(iter(more))}"
    brokers[0].create_topic(topic, partitions=1)
    take_head(brokers[0].bootstrap, topic, 10)

    rows = check(load_text(config(tmp_path, brokers, topic, **more).read_text(), environ={}))

    assert [row for row in rows if row.what == "head"] == []


def test_only_the_selected_mirror_is_checked(brokers, tmp_path):
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


# -- folders and buckets ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with S3Server(tmp_path_factory.mktemp("s3-check")) as running:
        yield running


def rows(broker: BrokerCommand, topic: str, *destinations: Any, **more: Any) -> list[Any]:
    """What is said of a mirror into these destinations, but for its source."""
    source = {"bootstrap-servers": broker.bootstrap}
    mirror = {"name": "m", "source": source, "topic": topic, "partitions": "all", "flush": LIMITS}
    text = json.dumps({"mirrors": [{**mirror, "destinations": destinations, **more}]})
    return [row for row in check(load_text(text, environ={})) if row.destination]


def folder(root: Path) -> dict[str, str]:
    return {"name": "lake", "type": "filesystem", "root": str(root)}


def everything_in(path: Path) -> list[str]:
    return sorted(str(each) for each in path.rglob("*"))


def test_a_directory_is_probed_and_left_unchanged(brokers, tmp_path):
    brokers[0].create_topic("tried")
    (tmp_path / "there" / "lake").mkdir(parents=True)
    (tmp_path / "file").write_text("x")
    before = everything_in(tmp_path)
    for root, says in (("there", "exists"), ("new/er", f"will be created in {tmp_path}")):
        (row,) = [
            r for r in rows(brokers[0], "tried", folder(tmp_path / root)) if r.what == "folder"
        ]
        assert (row.severity, says in row.found, "GiB free" in row.found) == ("ok", True, True)
    (row,) = [r for r in rows(brokers[0], "tried", folder(tmp_path / "file")) if r.what == "folder"]
    assert row.severity == "error"
    assert everything_in(tmp_path) == before


def test_a_read_only_directory_is_an_error(brokers, tmp_path):
    topic = brokers[0].create_topic("denied")
    for path in (tmp_path, *tmp_path.parents):
        if path.stat().st_uid == 0 and path != path.parent and "pytest" in str(path):
            path.chmod(0o755)
    (tmp_path / "archive").mkdir(mode=0o555)
    config(tmp_path, brokers, topic)
    result = logmirror(
        *("validate", "--check", "-c", tmp_path / "config.json", "--format", "json"),
        as_plain_user=True,
    )
    assert result.returncode == 2, result.stderr
    (row,) = [r for r in json.loads(result.stdout) if r["severity"] == "error"]
    assert (row["destination"], row["what"]) == ("lake", "folder")
    assert "permission denied" in row["found"].lower()


def test_a_bucket_is_probed_and_left_unchanged(brokers, server):
    topic = brokers[0].create_topic("to-bucket")
    bucket = server.new_bucket()
    good = server.destination(bucket, name="lake", prefix="p")
    found = {row.what: row for row in rows(brokers[0], topic, good)}
    assert {what: row.severity for what, row in found.items()} == {"bucket": "ok", "position": "ok"}
    assert not [each for each in server.files(bucket).rglob("*") if each.is_file()]

    missing = server.destination("no-such-bucket", name="lake")
    wrong = dict(good, credentials={"access-key-id": "k", "secret-access-key": "s" * 20})
    for bad in (missing, wrong):
        (row,) = [row for row in rows(brokers[0], topic, bad) if row.what == "bucket"]
        assert row.severity == "error"
        assert row.advice


def test_missing_write_and_delete_permissions_of_a_bucket_are_reported(brokers, server):
    topic = brokers[0].create_topic("to-users")
    bucket = server.new_bucket()
    writer, reader = server.new_user(), server.new_user()
    statements = policies([(server.location(bucket, "p"), "lake")])["archiver"]["Statement"]
    without_put = [statement for statement in statements if "Put" not in str(statement)]
    server.allow(bucket, (writer, statements), (reader, without_put))

    def as_user(user):
        keys = {
            "access-key-id": user.access_key_id,
            "secret-access-key": user.secret_access_key,
        }
        destination = server.destination(bucket, name="lake", prefix="p", credentials=keys)
        (row,) = [r for r in rows(brokers[0], topic, destination) if r.what == "bucket"]
        return row

    row = as_user(reader)
    assert (row.severity, "s3:PutObject" in row.found) == ("error", True)
    row = as_user(writer)
    assert row.severity == "note"
    (left,) = [each for each in server.files(bucket).rglob("*") if each.is_file()]
    assert left.name in row.advice


def test_a_bucket_without_conditional_writes_is_an_error_unless_accepted(brokers, server):
    topic = brokers[0].create_topic("to-replacing")
    bucket = server.new_bucket()

    def delete(path: str) -> None:
        name, _, key = path.partition("/")
        server.client().delete_object(Bucket=name, Key=key)

    with S3Proxy(server.endpoint, delete) as proxy:
        proxy.forget_condition = True
        lake = server.destination(bucket, name="lake", endpoint=proxy.endpoint)
        (row,) = [row for row in rows(brokers[0], topic, lake) if row.what == "bucket"]
        assert (row.severity, "overwrites existing objects" in row.found) == ("error", True)
        assert "require-atomic-create" in row.advice
        accepted = lake | {"require-atomic-create": False}
        (row,) = [row for row in rows(brokers[0], topic, accepted) if row.what == "bucket"]
        assert row.severity == "ok"
    assert not [each for each in server.files(bucket).rglob("*") if each.is_file()]


# -- clusters --------------------------------------------------------------------------------------


def test_an_unreachable_destination_hides_no_other_check(brokers, tmp_path):
    topic = brokers[0].create_topic("far")
    far = {"name": "far", "type": "kafka", "bootstrap-servers": f"{HOST}:{free_ports(1)[0]}"}
    found = rows(brokers[0], topic, far, folder(tmp_path / "archive"))
    assert {(row.destination, row.what, row.severity) for row in found} == {
        ("far", "cluster", "error"),
        ("lake", "folder", "ok"),
        ("lake", "position", "ok"),
    }

"""An archive and a configuration of mirror-v3 are taken over by following the page, and stay exact.

Method: records are produced to Kafka. The first of them, as standard clients read them there,
become an archive in mirror-v3's format, which `kit.runs.mirror_v3_archive` writes from its
description. Then the commands of the page run as written, with the configurations of the page. At
the end DuckDB and json read every object, mirror-v3's and logmirror's, and must find what standard
clients read from the source.
"""

from __future__ import annotations

import base64
import json
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

import duckdb
import pytest

from kit.judges.clients import CREATE_TIME, LOG_APPEND_TIME, Message, Row, odd_messages, produce
from kit.judges.clients import produce_transactions as transactions
from kit.judges.truth import Source, archive_rows, object_names
from kit.runs.commands import logmirror, logmirror_json
from kit.runs.inline_run import run_now
from kit.runs.mirror_v3_archive import HEAD, MirrorV3Object, cut, write_chain
from kit.servers.s3 import S3Server
from logmirror.testing import check_tiles, compare

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.xdist_group("e2e-s3"), pytest.mark.timeout(600)]

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "upgrade-from-mirror-v3.md").read_text()
COMMANDS = re.findall(r"^logmirror (\S+) -c mirror\.yaml(.*)$", PAGE, re.MULTILINE)
PER_MIRROR, FOR_ALL = re.findall(r"^```yaml\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
BEFORE = 150
"""Records that mirror-v3 has copied."""

_TYPES = {"create_time": CREATE_TIME, "log_append_time": LOG_APPEND_TIME, "not_available": 0}


def test_the_page_says_what_to_run():
    assert [name for name, _ in COMMANDS] == ["validate", "status", "run", "verify"]
    assert dict(COMMANDS)["verify"].split() == ["--deep", "--against-source"]


def fill(broker, topic, *, gaps=False):
    """Records of all kinds, with transactions if offsets are to be missing; returns the source."""
    broker.create_topic(topic)
    produce(broker.bootstrap, topic, odd_messages(100, seed=1))
    if gaps:
        parts = [(odd_messages(20, seed=n), n % 2 == 0) for n in range(6)]
        transactions(broker.bootstrap, topic, parts, transactional_id=f"{topic}-writer")
    produce(broker.bootstrap, topic, odd_messages(100, seed=2))
    return Source(broker.bootstrap, topic)


def mirror_v3_chain(source, folder, **options):
    """What mirror-v3 would have left of the first records; returns names and position."""
    rows = source.rows(0)[:BEFORE]
    names = write_chain(folder, source.topic, 0, cut(rows, 40), **options)
    (folder / f"{names[-1]}.tmp.5f0c2a9e-0000-4000-8000-000000000000").touch()
    return names, rows[-1].offset + 1


def follow_page(text, folder, source, position):
    """Run the page's commands over a configuration; each must succeed."""
    config = folder / "mirror.yaml"
    text = text.replace("127.0.0.1:9092", source.bootstrap)
    text = text.replace("topic: orders", f"topic: {source.topic}")
    config.write_text(text.replace("root: archive", f"root: {folder / 'archive'}"))
    end = source.bounds(0)[1]
    for name, options in COMMANDS:
        if name == "status":
            (row,) = logmirror_json("status", "-c", config)
            assert (row["position"], row["source_end"]) == (position, end)
        if name == "run":
            assert options.split() == ["--until-now"]
            done = run_now(config)
        else:
            done = logmirror(name, "-c", config, *options.split())
        assert done.returncode == 0, f"{name}: {done.stdout}\n{done.stderr}"
    assert " not-recorded" not in done.stdout, "the source has every cause"
    (report,) = logmirror_json("verify", "-c", config, "--deep")
    assert (report["problems"], report["next_offset"]) == ([], end)
    assert report["holes"].get("not-recorded", 0) == position - BEFORE
    return report


def rows_in(folder, form, topic, theirs):
    """All records of a folder in which objects of both programs lie, by independent readers."""
    for name in object_names(folder):
        if ".tmp." in name:
            continue
        path = folder / name
        if form == "ndjson":
            yield from _lines(path, topic)
        elif name in theirs:
            yield from _columns(path, topic)
        else:
            yield from _ours(path, topic)


def _ours(path, topic):
    alone = path.parent.parent / "alone"
    alone.mkdir(exist_ok=True)
    (alone / path.name).hardlink_to(path)
    try:
        yield from archive_rows(alone, "parquet", topic=topic, partition=0)
    finally:
        (alone / path.name).unlink()
        alone.rmdir()


def _columns(path, topic):
    connection = duckdb.connect()
    for where, partition, offset, stamp, kind, headers, *payload in connection.execute(
        """SELECT topic, "partition", "offset", timestamp_ms, timestamp_type, headers, key, value
        FROM read_parquet($file)""",
        {"file": str(path)},
    ).fetchall():
        assert (where, partition) == (topic, 0)
        named = tuple((header["key"].encode(), header["value"]) for header in headers)
        key, value = (_bytes(found) if isinstance(found, str) else found for found in payload)
        yield Row(offset, -1 if stamp is None else stamp, _TYPES[kind], key, value, named)


def _lines(path, topic):
    for line in path.read_bytes().splitlines():
        found = json.loads(line)
        assert (found["topic"], found["partition"]) == (topic, 0)
        headers = tuple(
            (header["key"].encode(), _bytes(header.get("value")))
            for header in found.get("headers", ())
        )
        stamp, kind = found.get("timestamp_ms", -1), _TYPES[found["timestamp_type"]]
        key, value = _bytes(found.get("key")), _bytes(found.get("value"))
        yield Row(found["offset"], stamp, kind, key, value, headers)


def _bytes(text):
    return None if text is None else base64.b64decode(text, validate=True)


def check_exact(source, folder, form, theirs):
    ours = [name for name in object_names(folder) if ".tmp." not in name]
    assert set(theirs) < set(ours)
    start, end = source.bounds(0)
    assert check_tiles(ours, start, end) == []
    assert compare(source.rows(0), rows_in(folder, form, source.topic, theirs)) == []


def test_parquet_with_destinations_in_each_mirror(own_kafka, tmp_path, topic_name):
    """E2E-02, E2E-09: the newer shape, in a folder; transactions, so offsets are missing."""
    source = fill(own_kafka, topic_name, gaps=True)
    folder = tmp_path / "archive" / "lake" / "0"
    theirs, position = mirror_v3_chain(source, folder, keys="bytes", values="bytes")
    before = {name: (folder / name).read_bytes() for name in theirs}

    assert position > BEFORE
    report = follow_page(PER_MIRROR, tmp_path, source, position)

    assert report["unwitnessed"] == len(theirs)
    check_exact(source, folder, "parquet", theirs)
    assert {name: (folder / name).read_bytes() for name in theirs} == before


def test_ndjson_with_one_destination_for_all_mirrors(cli_broker, tmp_path, topic_name):
    """The older shape: the folder is the topic."""
    source = fill(cli_broker, topic_name)
    folder = tmp_path / "archive" / topic_name / "0"
    theirs, position = mirror_v3_chain(source, folder, form="ndjson")

    report = follow_page(FOR_ALL, tmp_path, source, position)

    assert report["unwitnessed"] == len(theirs)
    check_exact(source, folder, "ndjson", theirs)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with S3Server(tmp_path_factory.mktemp("s3-upgrade")) as running:
        yield running


@pytest.mark.mirror_v3("S3-03")
def test_a_bucket_with_keys_from_the_environment(
    cli_broker, server, tmp_path, topic_name, monkeypatch
):
    """E2E-03: objects of the first releases, two identities, keys that draw folders."""
    source = fill(cli_broker, topic_name)
    bucket = server.new_bucket()
    local = tmp_path / "local"
    theirs, position = mirror_v3_chain(source, local, keys=HEAD, values=HEAD)
    client = server.client()
    for key in ("kafka/", "kafka/lake/", "kafka/lake/0/"):
        client.put_object(Bucket=bucket, Key=key)
    for name in object_names(local):
        if ".tmp." not in name:  # it writes none in a bucket
            body = (local / name).read_bytes()
            client.put_object(Bucket=bucket, Key=f"kafka/lake/0/{name}", Body=body)
    monkeypatch.setenv("PEER_KEY", server.access_key)
    monkeypatch.setenv("PEER_SECRET", server.secret_key)
    keys = "{access-key-id-env: PEER_KEY, secret-access-key-env: PEER_SECRET}"
    s3 = f"""- type: s3
        name: lake
        endpoint: {server.endpoint}
        region: us-east-1
        bucket: {bucket}
        prefix: kafka
        credentials: {{write: {keys}, read: {keys}}}
        encryption: none
"""
    text = re.sub(
        r"- type: filesystem\n        name: lake\n        root: archive\n", s3, PER_MIRROR
    )
    assert text != PER_MIRROR
    assert os.environ["PEER_KEY"]

    follow_page(text, tmp_path, source, position)

    check_exact(source, server.files(bucket) / "kafka" / "lake" / "0", "parquet", theirs)


def test_a_chain_spoilt_by_two_mirror_v3_writers_is_refused(cli_broker, tmp_path, topic_name):
    """E2E-07, E2E-08: an overlap and a foreign file stop every command that would continue."""
    cli_broker.create_topic(topic_name)
    produce(cli_broker.bootstrap, topic_name, [Message(value=b"%d" % n) for n in range(20)])
    source = Source(cli_broker.bootstrap, topic_name)
    folder = tmp_path / "archive" / topic_name / "0"
    rows = source.rows(0)
    write_chain(folder, topic_name, 0, cut(rows[:10], 5), form="ndjson")
    config = tmp_path / "mirror.yaml"
    text = FOR_ALL.replace("127.0.0.1:9092", source.bootstrap).replace(
        "topic: orders", f"topic: {topic_name}"
    )
    config.write_text(text.replace("root: archive", f"root: {tmp_path / 'archive'}"))
    for spoil in ([MirrorV3Object(5, 11, rows[5:12])], []):
        for found in spoil:
            write_chain(folder, topic_name, 0, [found], form="ndjson")
        if not spoil:
            (folder / "README.txt").write_text("notes")
        before = object_names(folder)
        for command in (run_now(config), logmirror("verify", "-c", config)):
            assert command.returncode == 65, command.stdout + command.stderr
        assert object_names(folder) == before
        for name in before[2:]:
            (folder / name).unlink()

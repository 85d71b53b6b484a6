"""One topic to several destinations: directories, buckets and a cluster, from one process.

Against the embedded broker and a real S3 server, mostly without Spark. Every destination is checked
by itself.
"""

from __future__ import annotations

import random
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kit.judges.clients import Message, odd_messages, produce, rows_by_librdkafka
from kit.judges.truth import Source, object_names
from kit.runs.commands import BrokerCommand, logmirror, mirror, write_config
from kit.runs.inline_run import InlineRun, run_now
from kit.servers.s3 import S3Server

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.xdist_group("e2e-s3"), pytest.mark.timeout(900)]

ROOT = Path(__file__).resolve().parents[2]
MIB = 1 << 20


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with S3Server(tmp_path_factory.mktemp("s3-several")) as running:
        yield running


def folder(root, name):
    return {"name": name, "type": "filesystem", "root": str(root)}


@pytest.mark.mirror_v3("E2E-20")
def test_the_several_destinations_page_works_as_written(cli_broker, server, tmp_path, monkeypatch):
    page = (ROOT / "docs" / "several-destinations.md").read_text()
    (text,) = re.findall(r"^```yaml\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    commands = re.findall(r"^logmirror (\S+) -c several.yaml(.*)$", page, re.MULTILINE)
    cli_broker.create_topic("orders-page", partitions=3)
    for partition in range(3):
        messages = odd_messages(100, seed=partition)
        produce(cli_broker.bootstrap, "orders-page", messages, partition=partition)
    server.client().create_bucket(Bucket="archive")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", server.access_key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", server.secret_key)
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", server.endpoint)
    monkeypatch.chdir(tmp_path)
    standby = BrokerCommand(tmp_path / "standby")
    try:
        standby.start()
        for address, there in (("9092", cli_broker.bootstrap), ("9093", standby.bootstrap)):
            text = text.replace(f"127.0.0.1:{address}", there)
        text = text.replace("topic: orders", "topic: orders-page")
        text = text.replace("root: archive", f"root: {tmp_path / 'archive'}")
        config = tmp_path / "several.yaml"
        config.write_text(text)
        for name, options in commands:
            if name == "run":
                result = run_now(config)
            else:
                result = logmirror(name, "-c", config, *options.split())
            assert result.returncode == 0, f"{name}: {result.stdout}\n{result.stderr}"

        assert [name for name, _ in commands] == ["validate", "run", "status", "verify"]
        source = Source(cli_broker.bootstrap, "orders-page", partitions=range(3))
        bucket = server.files("archive") / "kafka"
        assert source.anomalies(bucket, "parquet", name="orders-lake") == []
        assert source.anomalies(tmp_path / "archive", "parquet", name="orders-files") == []
        assert source.anomalies(tmp_path / "archive", "native", name="orders-raw") == []
        for partition in range(3):
            copied, original = (
                list(rows_by_librdkafka(where, "orders-page", partition=partition))
                for where in (standby.bootstrap, cli_broker.bootstrap)
            )
            assert len(copied) == 100
            assert copied == original
    finally:
        standby.remove()


@pytest.mark.mirror_v3("E2E-21")
def test_an_added_destination_catches_up_and_the_first_continues(cli_broker, tmp_path):
    topic = cli_broker.create_topic("several-added")
    produce(cli_broker.bootstrap, topic, odd_messages(300, seed=1))
    first, second = folder(tmp_path, "first"), folder(tmp_path, "second")
    limits = {"max_bytes": 20_000, "max_offsets": 70}
    one = mirror(topic, cli_broker.bootstrap, tmp_path, destinations=[first], **limits)
    both = mirror(topic, cli_broker.bootstrap, tmp_path, destinations=[first, second], **limits)
    before = run_now(write_config(tmp_path / "one.json", one))
    objects = object_names(tmp_path / "first" / "0")
    produce(cli_broker.bootstrap, topic, odd_messages(300, seed=2))

    after = run_now(write_config(tmp_path / "both.json", both))

    assert (before.returncode, after.returncode) == (0, 0), before.stderr + after.stderr
    assert object_names(tmp_path / "first" / "0")[: len(objects)] == objects
    source = Source(cli_broker.bootstrap, topic)
    for name in ("first", "second"):
        assert source.anomalies(tmp_path, "parquet", name=name) == [], name


@pytest.mark.parametrize(("on_fatal", "copied"), [("exit", 0), ("isolate", 200)])
def test_a_fatal_error_ends_the_process_or_stops_its_mirror_only(
    cli_broker, tmp_path, on_fatal, copied
):
    topic = cli_broker.create_topic(f"several-{on_fatal}")
    produce(cli_broker.bootstrap, topic, odd_messages(200, seed=1))
    (tmp_path / "spoilt" / "0").mkdir(parents=True)
    (tmp_path / "spoilt" / "0" / "notes.txt").write_text("mine")
    mirrors = [
        mirror(topic, cli_broker.bootstrap, tmp_path, name="spoilt"),
        mirror(topic, cli_broker.bootstrap, tmp_path, name="sound"),
    ]
    config = write_config(tmp_path / "config.json", *mirrors, on_fatal=on_fatal)

    result = run_now(config)

    assert result.returncode == 65, result.stderr
    assert "error (corruption): unknown object in the chain" in result.stderr
    stopped = re.findall(r" ERROR mirror stopped: .*", result.stderr)
    assert len(stopped) == 1
    assert "mirror=spoilt" in stopped[0]
    assert "kind=corruption" in stopped[0]
    assert [entry.name for entry in (tmp_path / "spoilt" / "0").iterdir()] == ["notes.txt"]
    if copied:
        assert (
            Source(cli_broker.bootstrap, topic).anomalies(tmp_path, "parquet", name="sound") == []
        )
    else:
        assert not (tmp_path / "sound").exists()


ALLOWED_MIB = 32
"""What allocators keep back, and what TLS, sockets and S3 responses need."""


@pytest.mark.gate("much memory")
def test_a_memory_budget_bounds_a_process(cli_broker, server, tmp_path):
    """The peak of its resident memory over that of a process which copies next to nothing."""
    chooser = random.Random(1)
    large = cli_broker.create_topic("several-large")
    small = cli_broker.create_topic("several-small")
    messages = [Message(None, chooser.randbytes(900_000), (), 1_700_000_000_000) for _ in range(56)]
    produce(cli_broker.bootstrap, large, messages)
    produce(cli_broker.bootstrap, small, messages[:1])

    def copied(topic, **more):
        bucket = server.new_bucket()
        root = tmp_path / bucket
        root.mkdir()
        destinations = [server.destination(bucket, name=name) for name in ("one", "two")]
        mirrors = [
            mirror(
                topic,
                cli_broker.bootstrap,
                root,
                form=form,
                destinations=[{**d, "name": f"{form}-{d['name']}"} for d in destinations],
                max_bytes=44 * MIB,
            )
            for form in ("native", "parquet")
        ]
        peak_bytes = peak_of(write_config(root / "config.json", *mirrors, **more), root)
        source = Source(cli_broker.bootstrap, topic)
        assert source.anomalies(server.files(bucket), "native", name="native-two") == []
        return peak_bytes / MIB

    base = copied(small)
    bounded = copied(large, memory_budget="32MiB") - base
    free = copied(large) - base

    assert bounded < 32 + ALLOWED_MIB
    assert free > 32 + ALLOWED_MIB, "there was nothing to bound"


def peak_of(config: Path, folder: Path) -> int:
    """The most memory that was resident at once while a run copied what is there."""
    peak_bytes = 0
    with InlineRun(config, "--until-now", folder=folder) as run:
        while run.alive:
            try:
                status = Path(f"/proc/{run.pid}/status").read_text()
            except (FileNotFoundError, ProcessLookupError):
                break
            for line in status.splitlines():
                if line.startswith("VmHWM:"):
                    peak_bytes = max(peak_bytes, int(line.split()[1]) << 10)
            time.sleep(0.005)
        assert run.wait() == 0, run.text
    return peak_bytes

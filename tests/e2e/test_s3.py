"""Kafka to S3: an archive in a bucket is the same as an archive in files.

The server's own files, which are the objects, are read by the readers that check archives in
directories: DuckDB, json, and a parser of batches that shares no code with logmirror.
"""

from __future__ import annotations

import random
import re
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kit.judges.clients import odd_messages, produce
from kit.judges.truth import Source
from kit.runs.commands import FORMATS, Run, logmirror, mirror, wait_until, write_config
from kit.runs.inline_run import InlineRun, run_now
from kit.runs.writer import writing
from kit.servers.embedded import EmbeddedBroker
from kit.servers.kafka import create_topic
from kit.servers.s3 import S3Server
from kit.servers.s3_java import JavaS3Server
from kit.tiers import KILLS
from logmirror.failpoints import POINTS as ALL_POINTS
from logmirror.failpoints import VARIABLE

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.xdist_group("e2e-s3"), pytest.mark.timeout(900)]

POINTS = [
    p
    for p in ALL_POINTS
    if p.split(".")[0] not in {"head", "hole", "produce", "translate", "compact", "transaction"}
]
ROOT = Path(__file__).resolve().parents[2]
"""Each hits a run that writes all formats."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with S3Server(tmp_path_factory.mktemp("s3")) as running:
        yield running


def to_bucket(where, topic, bootstrap, form, **more):
    """A mirror of a topic into a bucket, below a prefix if `where` has a third part."""
    server, bucket, *prefix = where
    destination = server.destination(bucket, name=form, **({"prefix": prefix[0]} if prefix else {}))
    return mirror(topic, bootstrap, "", form=form, destinations=[destination], **more)


@pytest.mark.gate("a second S3 server")
def test_an_archive_on_a_second_server_is_the_same_after_a_kill(tmp_path):
    topic = "to-second-s3"
    with (
        JavaS3Server(tmp_path / "s3") as second,
        EmbeddedBroker(tmp_path / "source") as source,
    ):
        create_topic(source.bootstrap, topic, 1, {})
        produce(source.bootstrap, topic, odd_messages(3000, seed=4))
        bucket = second.new_bucket()
        mirrors = [
            to_bucket((second, bucket), topic, source.bootstrap, form, max_bytes=50_000)
            for form in FORMATS
        ]
        config = write_config(tmp_path / "config.json", *mirrors)
        killed = InlineRun(config, folder=tmp_path)
        wait_until(
            lambda: len(list(second.files(bucket).rglob("0*.*"))) > 5, what=lambda: killed.text
        )
        killed.kill()
        result = run_now(config)
        assert result.returncode == 0, result.stderr
        truth = Source(source.bootstrap, topic, partitions=range(1))
        for form in FORMATS:
            assert truth.anomalies(second.files(bucket), form) == [], form


@pytest.mark.mirror_v3("S3-01", "S3-02", "E2E-03")
def test_spark_fills_a_bucket_in_all_formats_and_verify_accepts_it(own_kafka, server, tmp_path):
    source, topic = own_kafka, own_kafka.create_topic("to-s3", partitions=2)
    for partition in range(2):
        produce(source.bootstrap, topic, odd_messages(2000, seed=partition), partition=partition)
    bucket = server.new_bucket()
    mirrors = [
        to_bucket((server, bucket), topic, source.bootstrap, form, max_bytes=50_000)
        for form in FORMATS
    ]
    config = write_config(tmp_path / "config.json", *mirrors, memory_budget="32MiB")

    result = logmirror("run", "--until-now", "-c", config)

    assert result.returncode == 0, result.stderr
    assert server.secret_key not in result.stderr
    truth = Source(source.bootstrap, topic, partitions=range(2))
    for form in FORMATS:
        assert truth.anomalies(server.files(bucket), form) == [], form
    proof = logmirror("verify", "--deep", "--against-source", "-c", config)
    assert proof.returncode == 0, proof.stdout + proof.stderr
    status = logmirror("status", "-c", config)
    assert status.returncode == 0, status.stdout + status.stderr


@pytest.mark.gate("a process per failpoint; the simulation has them all")
def test_after_a_crash_at_every_failpoint_the_next_run_finishes(cli_broker, server, tmp_path):
    cli_broker.create_topic("s3-points", partitions=2)
    for partition in range(2):
        config = {"batch.num.messages": 20, "linger.ms": 5}
        messages = odd_messages(400, seed=partition)
        produce(cli_broker.bootstrap, "s3-points", messages, partition=partition, config=config)
    bucket, mirrors = server.new_bucket(), []
    for point in POINTS:
        of_point = [
            to_bucket(
                (server, bucket, point),
                "s3-points",
                cli_broker.bootstrap,
                form,
                name=f"{form}-of-{point}",
                max_bytes=20_000,
            )
            for form in FORMATS
        ]
        mirrors += of_point
        config = write_config(tmp_path / f"{point}.json", *of_point)
        environment = {VARIABLE: f"{point}#{3 if 'publish' in point else 1}"}
        with InlineRun(config, "--until-now", folder=tmp_path, environment=environment) as run:
            assert run.wait() == -signal.SIGKILL, run.text

    result = run_now(write_config(tmp_path / "all.json", *mirrors))

    assert result.returncode == 0, result.stderr
    source = Source(cli_broker.bootstrap, "s3-points", partitions=range(2))
    for point in POINTS:
        for form in FORMATS:
            assert source.anomalies(server.files(bucket) / point, form) == [], (point, form)


@pytest.mark.thinned
def test_kills_at_random_moments_leave_exact_archives(cli_broker, server, tmp_path):
    cli_broker.create_topic("s3-kills", partitions=2)
    bucket, chooser = server.new_bucket(), random.Random(7)
    limits = {"max_time_ms": 200, "max_bytes": 15_000}
    mirrors = [
        to_bucket((server, bucket), "s3-kills", cli_broker.bootstrap, form, **limits)
        for form in FORMATS
    ]
    config = write_config(tmp_path / "config.json", *mirrors)
    with writing(cli_broker.bootstrap, "s3-kills", partitions=2, seed=3):
        for _ in range(KILLS):
            with InlineRun(config, folder=tmp_path) as run:
                run.wait_for(" flushed ")
                time.sleep(chooser.uniform(0, 1))
                assert run.alive, run.text
                run.kill()

    result = run_now(config)

    assert result.returncode == 0, result.stderr
    source = Source(cli_broker.bootstrap, "s3-kills", partitions=range(2))
    for form in FORMATS:
        assert source.anomalies(server.files(bucket), form) == [], form


def test_a_running_and_a_paused_instance_write_one_archive(cli_broker, server, tmp_path):
    cli_broker.create_topic("s3-writers", partitions=2)
    bucket = server.new_bucket()
    mirrors = [
        to_bucket(
            (server, bucket),
            "s3-writers",
            cli_broker.bootstrap,
            form,
            max_time_ms=100,
            max_bytes=15_000,
        )
        for form in FORMATS
    ]
    config = write_config(tmp_path / "config.json", *mirrors)

    with (
        writing(cli_broker.bootstrap, "s3-writers", partitions=2, seed=1),
        InlineRun(config, folder=tmp_path) as one,
        InlineRun(config, folder=tmp_path) as two,
    ):
        for run in (one, two):
            wait_for_more(run)
        for sleeper, other in ((one, two), (two, one)):
            sleeper.signal_all(signal.SIGSTOP)
            wait_for_more(other, 12)
            sleeper.signal_all(signal.SIGCONT)
            wait_for_more(sleeper)
        for run in (one, two):
            run.signal(signal.SIGTERM)
        assert [run.wait() for run in (one, two)] == [0, 0], one.text + two.text
    result = run_now(config)

    assert result.returncode == 0, result.stderr
    source = Source(cli_broker.bootstrap, "s3-writers", partitions=range(2))
    for form in FORMATS:
        assert source.anomalies(server.files(bucket), form) == [], form


@pytest.mark.mirror_v3("E2E-06")
def test_an_unavailable_store_delays_no_other_and_catches_up(
    cli_broker, tmp_path, tmp_path_factory
):
    cli_broker.create_topic("s3-down", partitions=2)
    limits = {"max_time_ms": 100, "max_bytes": 15_000}
    with S3Server(tmp_path_factory.mktemp("s3-down")) as mortal:
        bucket = mortal.new_bucket()
        folder = {"type": "filesystem", "root": str(tmp_path / "files"), "name": "files"}
        both = [folder, mortal.destination(bucket, name="bucket")]
        one = mirror("s3-down", cli_broker.bootstrap, "", destinations=both, **limits)
        config = write_config(tmp_path / "config.json", one)
        with (
            writing(cli_broker.bootstrap, "s3-down", partitions=2, seed=1),
            InlineRun(config, folder=tmp_path) as run,
        ):
            wait_for_more(run, of="bucket")
            wait_for_more(run, of="files")
            mortal.kill()
            wait_for_more(run, 20, of="files")
            mortal.start()
            wait_for_more(run, of="bucket")
            run.signal(signal.SIGTERM)
            assert run.wait() == 0, run.text
        result = run_now(config)

    assert result.returncode == 0, result.stderr
    source = Source(cli_broker.bootstrap, "s3-down", partitions=range(2))
    assert source.anomalies(tmp_path / "files", "parquet", name="files") == []
    assert source.anomalies(mortal.files(bucket), "parquet", name="bucket") == []


def test_the_s3_page_works_as_written(cli_broker, server, tmp_path, monkeypatch):
    """With the AWS tools' own variables for who we are and where the store is."""
    page = (ROOT / "docs" / "archive-to-s3.md").read_text()
    (text,) = re.findall(r"^```yaml\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    commands = re.findall(r"^logmirror (\S+) -c s3.yaml(.*)$", page, re.MULTILINE)
    config = tmp_path / "s3.yaml"
    config.write_text(text.replace("127.0.0.1:9092", cli_broker.bootstrap))
    cli_broker.create_topic("orders", partitions=3)
    for partition in range(3):
        produce(cli_broker.bootstrap, "orders", odd_messages(100, seed=1), partition=partition)
    server.client().create_bucket(Bucket="archive")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", server.access_key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", server.secret_key)
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", server.endpoint)

    for name, options in commands:
        if name == "run":
            result = run_now(config)
        else:
            result = logmirror(name, "-c", config, *options.split())
        assert result.returncode == 0, f"{name}: {result.stdout}\n{result.stderr}"

    assert [name for name, _ in commands] == ["validate", "run", "status", "verify"]
    source = Source(cli_broker.bootstrap, "orders", partitions=range(3))
    assert source.anomalies(server.files("archive") / "kafka", "parquet", name="lake") == []


def wait_for_more(run: Run, count: int = 6, *, of: str = "") -> None:
    """Wait until a run has reported some more objects, of one destination where it is named."""

    def flushed() -> int:
        return len(re.findall(rf" flushed .*destination={of}", run.text))

    wanted = flushed() + count
    wait_until(
        lambda: flushed() >= wanted or not run.alive,
        what=lambda: f"{wanted} objects:\n{run.text}",
    )
    assert run.alive, run.text

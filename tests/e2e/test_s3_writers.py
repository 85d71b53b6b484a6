"""Two instances with one bucket and different object sizes: one successor per position.

Both write through a proxy that records every request that made an object visible. They run at the
same time; then one is paused (SIGSTOP) while the other takes over, and resumes with its old state;
then the same with roles changed. Each name became visible once, and the loser logs who was first. A
store that ignores `If-None-Match` is reported, and holds its documented promise in normal
operation.
"""

from __future__ import annotations

import json
import re
import signal
from typing import TYPE_CHECKING

import pytest

from kit.fakes.s3_proxy import Fault, S3Proxy
from kit.judges.clients import odd_messages, produce
from kit.judges.truth import Source
from kit.runs.commands import logmirror, mirror, wait_until, write_config
from kit.runs.inline_run import InlineRun, run_now
from kit.runs.writer import writing
from kit.servers.s3 import S3Server

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.xdist_group("e2e-s3"), pytest.mark.timeout(900)]

SIZES = (8_000, 20_000)
"""What ends the objects of each instance."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with S3Server(tmp_path_factory.mktemp("s3")) as running:
        yield running


@pytest.fixture
def proxy(server: S3Server) -> Iterator[S3Proxy]:
    def delete(path: str) -> None:
        bucket, _, key = path.partition("/")
        server.client().delete_object(Bucket=bucket, Key=key)

    with S3Proxy(server.endpoint, delete) as running:
        yield running


def flushed(run):
    return run.text.count(" flushed ")


def wait_for_more(run, count=6):
    wanted = flushed(run) + count
    wait_until(lambda: flushed(run) >= wanted or not run.alive, what=lambda: run.text)
    assert run.alive, run.text


@pytest.fixture
def configured(server, proxy, cli_broker, tmp_path):
    """Writes the configuration of a mirror of a topic into a bucket, through the proxy."""

    def write(topic, bucket, *, max_bytes=8_000, **more):
        destination = server.destination(bucket, name="native", endpoint=proxy.endpoint, **more)
        limits = {"max_time_ms": 150, "max_bytes": max_bytes, "destinations": [destination]}
        one = mirror(topic, cli_broker.bootstrap, "", form="native", **limits)
        return write_config(tmp_path / f"{max_bytes}.json", one)

    return write


@pytest.mark.mirror_v3("E2E-08")
def test_two_instances_with_different_object_sizes_leave_one_successor_per_position(
    cli_broker, server, proxy, configured, tmp_path
):
    topic, bucket = cli_broker.create_topic("s3-two-sizes", partitions=2), server.new_bucket()
    small, large = (configured(topic, bucket, max_bytes=size) for size in SIZES)
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()

    with (
        writing(cli_broker.bootstrap, topic, partitions=2, seed=1),
        InlineRun(small, folder=tmp_path / "one") as one,
        InlineRun(large, folder=tmp_path / "two") as two,
    ):
        for run in (one, two):
            wait_for_more(run)
        for sleeper, other in ((one, two), (two, one)):
            sleeper.signal_all(signal.SIGSTOP)
            wait_for_more(other, 10)
            sleeper.signal_all(signal.SIGCONT)
            wait_for_more(sleeper)
        for run in (one, two):
            run.signal(signal.SIGTERM)
        assert [run.wait() for run in (one, two)] == [0, 0], one.text + two.text
    result = run_now(small)

    assert result.returncode == 0, result.stderr
    source = Source(cli_broker.bootstrap, topic, partitions=range(2))
    assert source.anomalies(server.files(bucket), "native") == []
    assert len(proxy.created) == len(set(proxy.created)), "a name became visible twice"
    objects = {p.name for p in (server.files(bucket) / "native").rglob("*.batches")}
    assert {path.rpartition("/")[2] for path in proxy.created} >= objects
    lost = [loss for run in (one, two) for loss in losses(run.text)]
    assert lost, "no claim was contested, so the test shows nothing"
    assert all(winner != loser for winner, loser in lost)


def losses(text):
    """The winner and the loser of each claim, by the log."""
    return re.findall(r" another writer was first .*claimed_by=(\S+).* writer=(\S+)", text)


@pytest.mark.gate("every fault in turn; the simulation has them")
def test_a_mirror_survives_every_s3_fault_in_turn(cli_broker, server, proxy, configured, tmp_path):
    """F7 end to end: every third request or so meets one, whatever it is."""
    topic, bucket = cli_broker.create_topic("s3-faults", partitions=2), server.new_bucket()
    config = configured(topic, bucket, drift_check_ms=500)
    of_all = ("409", "429", "500", "503", "lose-response", "cut-response", "reset")
    cells = [
        Fault(kind, method=operation)
        for kind in of_all
        for operation in ("PutObject", "ListObjectsV2", "GetObject")
    ] + [Fault(kind, method="PutObject") for kind in ("cut-body", "wrong-body", "wrong-etag")]

    def faults():
        while True:
            for cell in cells:
                yield None
                yield None
                yield cell

    with (
        writing(cli_broker.bootstrap, topic, partitions=2, seed=2),
        InlineRun(config, folder=tmp_path) as run,
    ):
        wait_for_more(run, 1)
        proxy.spoil_some(faults())
        wait_until(lambda: proxy.spoiled >= len(cells) or not run.alive, what=lambda: run.text)
        proxy.spoil_some(iter(()))
        proxy.spoil()
        wait_for_more(run, 2)
        run.signal(signal.SIGTERM)
        assert run.wait() == 0, run.text
    result = run_now(config)

    assert result.returncode == 0, result.stderr
    source = Source(cli_broker.bootstrap, topic, partitions=range(2))
    assert source.anomalies(server.files(bucket), "native") == []
    assert len(proxy.created) == len(set(proxy.created))


def test_a_store_without_conditional_writes_is_refused_or_reported(
    cli_broker, server, proxy, configured
):
    topic, bucket = cli_broker.create_topic("s3-replaces"), server.new_bucket()
    produce(cli_broker.bootstrap, topic, odd_messages(100, seed=1))
    proxy.forget_condition = True

    refused = run_now(configured(topic, bucket, max_bytes=30_000))
    assert refused.returncode == 2, refused.stderr
    assert "require-atomic-create: false" in refused.stderr

    accepted = configured(topic, bucket, max_bytes=30_000, require_atomic_create=False)
    result = run_now(accepted)

    assert result.returncode == 0, result.stderr
    assert "degraded fencing" in result.stderr
    table = logmirror("status", "-c", accepted)
    rows = json.loads(logmirror("status", "--format", "json", "-c", accepted).stdout)
    assert "degraded fencing" in " ".join(table.stdout.split())
    assert [row["fencing"] for row in rows] == ["degraded"]
    assert Source(cli_broker.bootstrap, topic).anomalies(server.files(bucket), "native") == []


@pytest.mark.mirror_v3("S3-15")
def test_a_deleted_object_is_detected_while_the_mirror_runs(
    cli_broker, server, configured, tmp_path
):
    topic, bucket = cli_broker.create_topic("s3-drift"), server.new_bucket()
    produce(cli_broker.bootstrap, topic, odd_messages(100, seed=1))

    with InlineRun(configured(topic, bucket, drift_check_ms=300), folder=tmp_path) as run:
        wait_until(lambda: " to=99 " in run.text or not run.alive, what=lambda: run.text)
        newest = max((server.files(bucket) / "native").rglob("*.batches"))
        server.client().delete_object(Bucket=bucket, Key=f"native/0/{newest.name}")
        code = run.wait()

    assert code == 69, run.text
    assert "DestinationDrift" in run.text
    assert newest.name in run.text

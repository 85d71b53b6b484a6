"""`status`: its requests, that it changes nothing, and that it reports what `run` refuses.

Method: the command's own code against the embedded broker in another process, over archives that
consist of names only, because names are the position. Requests are counted where they are sent.
Listings that wait for each other show that listings run concurrently. What `run` refuses begins
with a replica that `run` has written; `status` and `run` are processes then, and name one error.
Progress topics need Apache Kafka: of `offsets: translate` see tests/e2e/test_translate.py.
"""

import json
import threading
from collections import Counter

import pytest
from confluent_kafka import Producer
from typer.testing import CliRunner

from kit.judges.clients import produce
from kit.judges.copies import forget_connections
from kit.judges.gaps import plain_messages, trim
from kit.runs.commands import logmirror, logmirror_json, mirror, write_config
from kit.runs.inline_run import mirror_to_cluster, run_now
from kit.servers.embedded import EmbeddedBroker
from logmirror.app import status
from logmirror.archive.naming import PARQUET, format_name
from logmirror.cli import commands
from logmirror.cluster.client import ClusterClient
from logmirror.cluster.connection import Connection
from logmirror.cluster.properties import connection_settings
from logmirror.config.settings import load
from logmirror.errors import UnavailableError
from logmirror.model import OffsetRange
from logmirror.stores.filesystem import FilesystemStore

pytestmark = [pytest.mark.xdist_group("e2e-writers"), pytest.mark.timeout(600)]

PARTITIONS = 1000
MIRRORS = 300


@pytest.fixture(scope="module", autouse=True)
def _nothing_stays_open():
    yield
    forget_connections()


@pytest.fixture(scope="module")
def large_topic(cli_broker):
    """A topic of ten offsets in each partition."""
    topic = cli_broker.create_topic("status-large", PARTITIONS)
    producer = Producer({"bootstrap.servers": cli_broker.bootstrap, "linger.ms": 200})
    for partition in range(PARTITIONS):
        for _ in range(10):
            producer.produce(topic, b"v", partition=partition)
    assert producer.flush(60) == 0
    return topic


@pytest.fixture(scope="module")
def archive(tmp_path_factory):
    """Ten offsets of each partition, of which only names are there."""
    root = tmp_path_factory.mktemp("status")
    name = format_name(OffsetRange(first=0, last=9), PARQUET)
    for partition in range(PARTITIONS):
        folder = root / "parquet" / str(partition)
        folder.mkdir(parents=True)
        (folder / name).touch()
    return root


@pytest.fixture
def asked(monkeypatch):
    """Requests to brokers, by kind."""
    counts, call = Counter(), Connection.call

    def count(self, request, *arguments, **more):
        counts[type(request).__name__.partition("Request")[0]] += 1
        return call(self, request, *arguments, **more)

    monkeypatch.setattr(Connection, "call", count)
    return counts


def test_a_thousand_partitions_cost_the_source_as_many_requests_as_one(
    cli_broker, large_topic, archive, tmp_path, asked
):
    totals = []
    for partitions in ({"partition": 0}, {}):
        asked.clear()
        one = mirror(large_topic, cli_broker.bootstrap, archive, **partitions)
        rows = status.status(load(write_config(tmp_path / "config.json", one)))
        assert {(row.position, row.source_end, row.lag, row.error) for row in rows} == {
            (10, 10, 0, None)
        }
        totals.append((len(rows), asked["ListOffsets"]))
    assert totals == [(1, 2), (PARTITIONS, 2)]
    assert sum(asked.values()) <= 10, asked


def test_hundreds_of_mirrors_cost_their_source_as_many_requests_as_one(
    cli_broker, large_topic, archive, tmp_path, asked
):
    """As users of mirror-v3 have them: a mirror for each partition."""
    place = [{"type": "filesystem", "root": str(archive), "name": "parquet"}]
    many = [
        mirror(
            large_topic,
            cli_broker.bootstrap,
            archive,
            name=f"m{partition}",
            partition=partition,
            destinations=place,
        )
        for partition in range(MIRRORS)
    ]
    rows = status.status(load(write_config(tmp_path / "config.json", *many)))
    assert [row.mirror for row in rows] == [f"m{n}" for n in range(MIRRORS)]
    assert {row.position for row in rows} == {10}
    assert asked["ListOffsets"] == 2
    assert sum(asked.values()) <= 10, asked


def test_listings_run_concurrently(cli_broker, large_topic, archive, tmp_path, monkeypatch):
    together, tail, mine = threading.Barrier(status.WIDTH, timeout=60), FilesystemStore.tail, {}

    def wait_for_the_others(self, *arguments):
        thread = threading.get_ident()
        if thread not in mine:  # the first of each
            mine[thread] = True
            together.wait()
        return tail(self, *arguments)

    monkeypatch.setattr(FilesystemStore, "tail", wait_for_the_others)
    one = mirror(large_topic, cli_broker.bootstrap, archive)
    rows = status.status(load(write_config(tmp_path / "config.json", one)))
    assert len(mine) == status.WIDTH
    assert all(row.error is None for row in rows)


def test_each_chain_is_listed_twice_independently_of_others(
    cli_broker, large_topic, archive, tmp_path, monkeypatch
):
    """Its objects and its claims."""
    looks, tail = Counter(), FilesystemStore.tail

    def count(self, folder, *arguments):
        looks[folder] += 1
        return tail(self, folder, *arguments)

    monkeypatch.setattr(FilesystemStore, "tail", count)
    one = mirror(large_topic, cli_broker.bootstrap, archive)
    status.status(load(write_config(tmp_path / "config.json", one)))
    assert len(looks) == 2 * PARTITIONS
    assert set(looks.values()) == {1}


@pytest.fixture
def short_retry_budget(monkeypatch):
    monkeypatch.setattr(status, "COMMAND_BUDGET_MS", 500)


@pytest.mark.usefixtures("short_retry_budget")
def test_an_error_of_one_mirror_is_one_row_and_leaves_the_others(
    cli_broker, large_topic, archive, tmp_path
):
    here = cli_broker.bootstrap
    mirrors = [
        mirror(large_topic, here, archive, name="good", partition=3),
        mirror("status-none", here, archive, name="no-topic"),
        mirror(large_topic, here, archive, name="no-partition", partition=PARTITIONS),
        mirror(large_topic, "127.0.0.1:1", archive, name="no-source"),
        mirror_to_cluster(large_topic, here, "127.0.0.1:1", name="no-target", topic="x"),
        mirror(large_topic, here, archive, name="fine", partition=4),
    ]
    rows = status.status(load(write_config(tmp_path / "config.json", *mirrors)))
    kinds = {row.mirror: row.error and row.error.kind for row in rows}
    assert kinds == {
        "good": None,
        "no-topic": "usage",
        "no-partition": "usage",
        "no-source": "unavailable",
        "no-target": "unavailable",
        "fine": None,
    }
    assert [row.mirror for row in rows if row.mirror != "no-target"] == [
        "good", "no-topic", "no-partition", "no-source", "fine"
    ]  # fmt: skip


def test_a_source_that_fails_between_two_requests_is_an_error_of_each_row(
    cli_broker, large_topic, archive, tmp_path, monkeypatch
):
    def fail(*_, **__):
        raise UnavailableError("no response")

    monkeypatch.setattr(ClusterClient, "list_offsets", fail)
    mirrors = [
        mirror(large_topic, cli_broker.bootstrap, archive, name=name, partition=3)
        for name in ("a", "b")
    ]
    rows = status.status(load(write_config(tmp_path / "config.json", *mirrors)))
    assert [(row.mirror, row.error.kind) for row in rows] == [
        ("a", "unavailable"), ("b", "unavailable")
    ]  # fmt: skip


def everything(folder):
    """What lies in a folder, with the time of its last change."""
    return sorted((str(path), path.stat().st_mtime_ns) for path in [folder, *folder.rglob("*")])


@pytest.mark.usefixtures("short_retry_budget")
def test_nothing_is_ever_created(tmp_path):
    """Not on a broker that makes every topic it is asked about, nor where there are no folders."""
    root = tmp_path / "archives"
    root.mkdir()
    with EmbeddedBroker(tmp_path / "broker", auto_create_topics=True) as broker:
        here = broker.bootstrap
        produce(here, "there", plain_messages(10, seed=1))
        config = write_config(
            tmp_path / "config.json",
            mirror("there", here, root, name="files"),
            mirror("there", here, root / "none" / "yet", name="no-folder"),
            mirror("missing", here, root, name="no-topic"),
            mirror_to_cluster("there", here, here, name="copy", topic="copy-of-there"),
            mirror_to_cluster(
                "there", here, here, name="new", topic="new-of-there", offsets="translate"
            ),
        )
        client = ClusterClient(connection_settings(here, {}))
        with client:
            before = (client.topics(), everything(root))
            rows = status.status(load(config))
            after = (client.topics(), everything(root))
        assert [row.mirror for row in rows if row.error is None] == ["files", "no-folder"]
        assert after == before
        assert before[0] == ["there"]


@pytest.mark.usefixtures("short_retry_budget")
def test_an_unreachable_source_is_a_row_with_an_error_and_an_exit_code(archive, tmp_path):
    """CLI-03."""
    config = write_config(tmp_path / "config.json", mirror("t", "127.0.0.1:1", archive))
    result = CliRunner().invoke(commands.build(), ["status", "-c", str(config)])
    assert result.exit_code == 1
    _, row, *rest = result.stdout.splitlines()
    assert row.startswith("parquet  parquet      t      all")
    assert "could not describe" in "".join(rest)


def test_json_has_the_lag_of_each_flow(cli_broker, tmp_path):
    """CLI-04."""
    topic = cli_broker.create_topic("status-json")
    produce(cli_broker.bootstrap, topic, plain_messages(10, seed=1))
    one = mirror(topic, cli_broker.bootstrap, tmp_path)
    (row,) = logmirror_json("status", "-c", write_config(tmp_path / "config.json", one))
    assert row == {
        "mirror": "parquet",
        "destination": "parquet",
        "topic": topic,
        "partition": 0,
        "source_end": 10,
        "position": 0,
        "lag": 10,
    }


@pytest.fixture
def topic(cli_broker, topic_name):
    cli_broker.create_topic(topic_name)
    produce(cli_broker.bootstrap, topic_name, plain_messages(10, seed=1))
    return topic_name


@pytest.fixture
def config_of(cli_broker, topic, tmp_path):
    """Writes the configuration of a mirror into a directory, or into another topic."""

    def write(kind):
        here = cli_broker.bootstrap
        if kind == "archive":
            one = mirror(topic, here, tmp_path / "archive", form="native")
        else:
            one = mirror_to_cluster(topic, here, here, topic=f"copy-of-{topic}")
        return write_config(tmp_path / "config.json", one)

    return write


def refused(config):
    """The row of the one partition, which both `status` and `run` refuse for the same reason."""
    shown, ran = logmirror("status", "-c", config, "--format", "json"), run_now(config)
    (row,) = json.loads(shown.stdout)
    assert shown.returncode == 1, shown.stderr
    assert f"docs/errors.md#{row['error']['name'].lower()}" in ran.stderr
    assert ran.returncode == {"position": 69, "corruption": 65}[row["error"]["kind"]]
    return row


@pytest.mark.parametrize("kind", ["archive", "preserve"])
def test_a_source_trimmed_past_the_position(cli_broker, config_of, topic, kind):
    config = config_of(kind)
    assert run_now(config).returncode == 0
    produce(cli_broker.bootstrap, topic, plain_messages(10, seed=2))
    trim(cli_broker.bootstrap, topic, 0, 15)

    row = refused(config)

    assert row["error"]["name"] == "SourceTrimmed"
    assert (row["source_end"], row["position"], row["lag"]) == (20, 10, 10)


def test_an_archive_ahead_of_its_source(config_of, tmp_path):
    config = config_of("archive")
    assert run_now(config).returncode == 0
    chain = next((tmp_path / "archive").rglob("*.batches")).parent
    (chain / format_name(OffsetRange(first=10, last=14), "batches")).touch()

    row = refused(config)

    assert row["error"]["name"] == "SourceWentBackwards"
    assert (row["source_end"], row["position"], row["lag"]) == (10, 15, 0)


def test_a_replica_longer_than_its_source(cli_broker, config_of, topic):
    config = config_of("preserve")
    assert run_now(config).returncode == 0
    produce(cli_broker.bootstrap, f"copy-of-{topic}", plain_messages(5, seed=2))

    row = refused(config)

    assert row["error"]["name"] == "SourceWentBackwards"
    assert (row["source_end"], row["position"], row["lag"]) == (10, 15, 0)


RECREATED = {"archive": (20, "SourceRecreated"), "preserve": (5, "SourceWentBackwards")}


@pytest.mark.parametrize("kind", RECREATED)
def test_a_recreated_topic(cli_broker, config_of, topic, kind):
    config, (count, name) = config_of(kind), RECREATED[kind]
    assert run_now(config).returncode == 0
    cli_broker.delete_topic(topic)
    cli_broker.create_topic(topic)
    produce(cli_broker.bootstrap, topic, plain_messages(count, seed=2))

    row = refused(config)

    assert row["error"]["name"] == name
    assert (row["source_end"], row["position"]) == (count, 10)


def test_a_broken_chain(cli_broker, config_of, topic, tmp_path):
    """Of long buckets see tests/e2e/test_long_buckets.py."""
    config = config_of("archive")
    assert run_now(config).returncode == 0
    produce(cli_broker.bootstrap, topic, plain_messages(10, seed=2))
    assert run_now(config).returncode == 0
    first, _ = sorted((tmp_path / "archive").rglob("*.batches"))
    first.unlink()

    row = refused(config)

    assert (row["error"]["name"], row["source_end"], row["position"]) == ("corruption", 20, None)


def test_a_replica_of_padding_alone_is_not_refused(cli_broker, config_of, topic):
    """Its head is filled, and the run may have ended there."""
    config = config_of("preserve")
    trim(cli_broker.bootstrap, topic, 0, 10)
    assert run_now(config).returncode == 0
    produce(cli_broker.bootstrap, topic, plain_messages(10, seed=2))
    trim(cli_broker.bootstrap, topic, 0, 15)

    (row,) = logmirror_json("status", "-c", config)

    assert (row["source_end"], row["position"], row["lag"]) == (20, 10, 10)
    assert run_now(config).returncode == 0

"""Topics that Kafka's log cleaner compacts, mirrored as snapshots and with all remaining records.

R13: the cleaner ran before, between and during the reads, with and without tombstones; runs end by
SIGKILL at failpoints and at random times. Snapshots are read by DuckDB and compared with the
records that librdkafka reads from the source, reduced to the latest of each key. Archives of all
records hold at least the records that the source still has, and none that was never produced.
"""

import random
import signal
import time

import duckdb
import pytest

from kit.judges.clients import Message, Row, produce, rows_by_librdkafka
from kit.judges.gaps import Writer, log_bounds
from kit.judges.truth import archive_rows, object_names
from kit.runs.cleaning import clean, delete_records, stop_cleaning
from kit.runs.commands import logmirror, logmirror_json, mirror, write_config
from kit.runs.inline_run import InlineRun, run_now
from kit.servers.s3 import S3Server
from logmirror.failpoints import VARIABLE
from logmirror.testing import check_tiles

pytestmark = [pytest.mark.xdist_group("e2e-kafka"), pytest.mark.timeout(900)]

COMPACTED = {"cleanup.policy": "compact", "segment.ms": 100, "min.cleanable.dirty.ratio": 0}
START_MS = 1_700_000_000_000
KEYS = 50
APPEND = ("native", "parquet", "ndjson")


def messages(first, count, *, tombstones=0.0, seed=0):
    """Records over a few keys, whose values number them."""
    chooser = random.Random(seed)
    for number in range(first, first + count):
        value = None if chooser.random() < tombstones else b"value-%d" % number
        headers = ((b"n", b"%d" % number),) if number % 3 else ()
        yield Message(b"key-%d" % chooser.randrange(KEYS), value, headers, START_MS + number)


def mirrors(topic, broker, root, *others, snapshots="keep-all", max_offsets=100):
    """A mirror that writes snapshots, also to other places, and one that keeps all per format."""
    limits = {"max_offsets": max_offsets, "max_time_ms": 200}
    more = {"name": "snapshots", "compaction": "log", "snapshots": snapshots}
    places = [{"type": "filesystem", "root": str(root), "name": "snapshots"}, *others]
    return [
        mirror(topic, broker.bootstrap, root, destinations=places, **limits, **more),
        *(mirror(topic, broker.bootstrap, root, form=form, **limits) for form in APPEND),
    ]


def view_of_source(bootstrap, topic):
    """Key to (offset, value, timestamp), as a consumer that reads the whole topic would have it."""
    view = {}
    for row in rows_by_librdkafka(bootstrap, topic):
        view[row.key] = (row.offset, row.value, row.timestamp_ms)
    return {key: found for key, found in view.items() if found[1] is not None}


def newest_snapshot(destination):
    """The same, of the newest snapshot of partition 0 alone, which DuckDB reads."""
    path = destination / "0" / object_names(destination / "0")[-1]
    rows = duckdb.execute(
        'SELECT key, "offset", value, epoch_ms("timestamp") FROM read_parquet($file)',
        {"file": str(path)},
    ).fetchall()
    keys = [row[0] for row in rows]
    assert keys == sorted(set(keys)), "one row for each key, sorted"
    return {key: tuple(rest) for key, *rest in rows}


def check_append(root, broker, topic, produced):
    """All remaining records of the source are there, none was invented, names cover all offsets."""
    shown = {Row(*row) for row in rows_by_librdkafka(broker.bootstrap, topic)}
    end = log_bounds(broker.bootstrap, topic, 0)[1]
    for form in APPEND:
        rows = archive_rows(root / form / "0", form, topic=topic, partition=0)
        assert shown <= {Row(*row) for row in rows}
        assert {(r.key, r.value) for r in rows if not r.key.startswith(b"last-")} <= produced
        assert check_tiles(object_names(root / form / "0"), 0, end) == []


def die_at(point, config, folder, nth=1):
    with InlineRun(
        config, "--until-now", folder=folder, environment={VARIABLE: f"{point}#{nth}"}
    ) as run:
        assert run.wait() == -9, run.text


def test_r13_a_topic_that_the_cleaner_has_compacted(own_kafka, tmp_path):
    topic = own_kafka.create_topic("r13", config=COMPACTED)
    produce(own_kafka.bootstrap, topic, messages(0, 999), config={"batch.num.messages": 20})
    clean(own_kafka, topic, 1)  # writes one more
    stop_cleaning(own_kafka, topic)
    assert log_bounds(own_kafka.bootstrap, topic, 0) == (0, 1000)
    shown = list(rows_by_librdkafka(own_kafka.bootstrap, topic))
    assert shown[0].offset > 0
    assert len(shown) < 999

    config = write_config(tmp_path / "c.json", *mirrors(topic, own_kafka, tmp_path))
    for point in ("fetch.answered", "stage.written", "claim.created", "publish.linked"):
        die_at(point, config, tmp_path)
    done = logmirror("run", "--until-now", "-c", config)  # the same on Spark
    assert done.returncode == 0, done.stderr
    assert {row["lag"] for row in logmirror_json("status", "-c", config)} == {0}

    assert newest_snapshot(tmp_path / "snapshots") == view_of_source(own_kafka.bootstrap, topic)
    assert object_names(tmp_path / "snapshots" / "0")[0].startswith("00000000000000000000-")
    check_append(tmp_path, own_kafka, topic, {(row.key, row.value) for row in shown})
    proven = logmirror("verify", "--deep", "-c", config)
    assert proven.returncode == 0, proven.stdout


def test_r13_claimed_records_are_compacted_before_they_are_written(own_kafka, tmp_path):
    topic = own_kafka.create_topic("r13-claimed", config=COMPACTED)
    first = list(messages(0, 200, tombstones=0.2, seed=1))
    more = list(messages(200, 200, tombstones=0.2, seed=2))
    produce(own_kafka.bootstrap, topic, first, config={"batch.num.messages": 7})
    all_of_them = mirrors(topic, own_kafka, tmp_path)
    for one in all_of_them:
        config = write_config(tmp_path / f"{one['name']}.json", one)
        die_at("claim.created", config, tmp_path)
        assert object_names(tmp_path / one["name"] / "0") == []
    produce(own_kafka.bootstrap, topic, more, config={"batch.num.messages": 7})
    clean(own_kafka, topic, 1)
    stop_cleaning(own_kafka, topic)

    config = write_config(tmp_path / "all.json", *all_of_them)
    done = run_now(config)
    assert done.returncode == 0, done.stderr
    assert newest_snapshot(tmp_path / "snapshots") == view_of_source(own_kafka.bootstrap, topic)
    check_append(tmp_path, own_kafka, topic, {(m.key, m.value) for m in (*first, *more)})


@pytest.mark.mirror_v3("E2E-12")
def test_r8_snapshots_of_a_trimmed_topic_begin_at_its_start(own_kafka, tmp_path):
    """12 records of 4 keys, of which DeleteRecords removes the first 8."""
    topic = own_kafka.create_topic("r8-trimmed")
    sent = [Message(b"k%d" % (n % 4), b"v%d" % n, (), START_MS + n) for n in range(12)]
    produce(own_kafka.bootstrap, topic, sent)
    delete_records(own_kafka, topic, 8)
    more = {"name": "snapshots", "compaction": "log"}
    config = write_config(tmp_path / "c.json", mirror(topic, own_kafka.bootstrap, tmp_path, **more))

    done = run_now(config)

    assert done.returncode == 0, done.stderr
    assert log_bounds(own_kafka.bootstrap, topic, 0) == (8, 12)
    assert object_names(tmp_path / "snapshots" / "0") == [f"{8:020d}-{11:020d}.parquet"]
    assert newest_snapshot(tmp_path / "snapshots") == {
        b"k%d" % (n % 4): (n, b"v%d" % n, START_MS + n) for n in range(8, 12)
    }
    (flow,) = logmirror_json("status", "-c", config)
    assert (flow["position"], flow["lag"]) == (12, 0)


def test_a_gap_of_compaction_is_one_object_whatever_max_offsets_is(own_kafka, tmp_path):
    """600 records of one key, of which the cleaner leaves the last: `max-offsets: 10`."""
    topic = own_kafka.create_topic("one-far-record", config=COMPACTED)
    sent = [Message(b"only", b"v%d" % n, (), START_MS + n) for n in range(600)]
    produce(own_kafka.bootstrap, topic, sent, config={"batch.num.messages": 20})
    clean(own_kafka, topic, 1)  # writes one more
    stop_cleaning(own_kafka, topic)
    shown = [row.offset for row in rows_by_librdkafka(own_kafka.bootstrap, topic)]
    assert shown == [599, 600]
    _, *append = mirrors(topic, own_kafka, tmp_path, max_offsets=10)
    config = write_config(tmp_path / "c.json", *append)

    done = run_now(config)

    assert done.returncode == 0, done.stderr
    for form in APPEND:
        ends = [tuple(map(int, n[:41].split("-"))) for n in object_names(tmp_path / form / "0")]
        native = [(0, 599), (600, 600)]  # with the batch behind the gap
        assert ends == (native if form == "native" else [(0, 598), (599, 600)])
    check_append(tmp_path, own_kafka, topic, {(b"only", b"v599")})
    proven = logmirror("verify", "--deep", "--against-source", "-c", config)
    assert proven.returncode == 0, proven.stdout


def test_records_deleted_between_two_snapshots_are_accepted_at_the_next_start(own_kafka, tmp_path):
    """DeleteRecords passes the position of the newest snapshot: the next one is rebuilt."""
    policy = {"cleanup.policy": "compact,delete"}
    topic = own_kafka.create_topic("deleted-between", config=policy)
    sent = [Message(b"k%d" % (n % 6), b"v%d" % n, (), START_MS + n) for n in range(40)]
    more = {"name": "snapshots", "compaction": "log"}
    config = write_config(tmp_path / "c.json", mirror(topic, own_kafka.bootstrap, tmp_path, **more))
    produce(own_kafka.bootstrap, topic, sent[:20])
    first = run_now(config)
    produce(own_kafka.bootstrap, topic, sent[20:])
    delete_records(own_kafka, topic, 37)

    second = run_now(config)

    assert (first.returncode, second.returncode) == (0, 0), second.stderr
    assert "the log start offset is above the newest snapshot" in second.stderr
    assert object_names(tmp_path / "snapshots" / "0") == [
        f"{0:020d}-{19:020d}.parquet",
        f"{20:020d}-{39:020d}.parquet",
    ]
    assert log_bounds(own_kafka.bootstrap, topic, 0) == (37, 40)
    assert newest_snapshot(tmp_path / "snapshots") == {
        m.key: (n, m.value, m.timestamp_ms) for n, m in enumerate(sent) if n >= 37
    }
    proven = logmirror("verify", "--deep", "-c", config)
    assert proven.returncode == 0, proven.stdout


@pytest.fixture
def server(tmp_path):
    (tmp_path / "s3").mkdir()
    with S3Server(tmp_path / "s3") as running:
        yield running


@pytest.mark.gate("repeated kills")
@pytest.mark.mirror_v3("S3-07", "S3-08")
def test_r13_a_cleaner_and_kills_while_we_read(own_kafka, server, tmp_path):
    topic = own_kafka.create_topic("r13-live", config=COMPACTED)
    bucket = server.new_bucket()
    in_s3 = server.destination(bucket, name="in-s3")
    config = write_config(
        tmp_path / "c.json",
        *mirrors(topic, own_kafka, tmp_path, in_s3, snapshots="keep 2", max_offsets=37),
    )
    chooser, number = random.Random(13), 0
    produced = set()
    for _ in range(5):
        with InlineRun(config, folder=tmp_path) as run:
            for _ in range(2):
                batch = list(messages(number, 150, tombstones=0.2, seed=number))
                produced |= {(m.key, m.value) for m in batch}
                number += len(batch)
                writer = Writer(
                    own_kafka.bootstrap, topic, config={"batch.num.messages": 7, "linger.ms": 5}
                )
                writer.send(batch)
                clean(own_kafka, topic, 1)
            time.sleep(chooser.random() * 0.5)
            run.signal(signal.SIGKILL)
            assert run.wait() == -9, run.text
    stop_cleaning(own_kafka, topic)
    done = run_now(config)
    assert done.returncode == 0, done.stderr

    for folder in (tmp_path / "snapshots", server.files(bucket) / "in-s3"):
        assert newest_snapshot(folder) == view_of_source(own_kafka.bootstrap, topic)
        # Every process but the last may have died before its first snapshot.
        assert 1 <= len(object_names(folder / "0")) <= 2
    check_append(tmp_path, own_kafka, topic, produced)

"""Goal: an archive in any state is served as it is, or refused; never is anything else served.

Method: a source with a trimmed, a compacted and a transactional topic, copied in each format. The
copies are trimmed, merged and damaged, others are written as mirror-v3 writes them, and a broker
mounts them. Partition, offset and content of every record are compared with the source.
"""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any, NamedTuple

import pyarrow.parquet as pq
import pytest
from confluent_kafka import Consumer, IsolationLevel, KafkaException, TopicPartition
from confluent_kafka.admin import (
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    OffsetSpec,
)

from kit.judges.clients import (
    Message,
    odd_messages,
    produce,
    produce_transactions,
    rows_by_librdkafka,
)
from kit.runs.commands import EXTENSIONS, FORMATS, logmirror, mirror, wait_until, write_config
from kit.runs.inline_run import run_now
from kit.runs.mirror_v3_archive import cut, odd_rows, write_chain
from kit.servers.embedded import EmbeddedBroker
from kit.servers.kafka import create_topic
from kit.servers.mounted import MountingBroker
from logmirror.broker.archives.rows import checked_batches
from logmirror.stores.filesystem import FilesystemStore

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = [pytest.mark.jvm, pytest.mark.xdist_group("archive-states")]

PARTITIONS = range(2)
SOON = {"fetch.wait.max.ms": 20, "reconnect.backoff.max.ms": 200}
TIMEOUT_S = 60
COMPACTED = {
    "cleanup.policy": "compact",
    "segment.ms": "1",
    "min.cleanable.dirty.ratio": "0",
}
TOPICS = ("trimmed", "compacted", "whole")


class World(NamedTuple):
    """A source's records by topic, and the folders of their archives by format."""

    rows: dict[str, list[list[Any]]]
    roots: dict[str, Path]
    configs: dict[str, Path]
    server: str


def rows(bootstrap, topic, start=0):
    return [
        list(rows_by_librdkafka(bootstrap, topic, partition=n, start=start, config=SOON))
        for n in PARTITIONS
    ]


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("states")
    with EmbeddedBroker(folder / "source") as source:
        server = source.bootstrap
        for topic in TOPICS:
            create_topic(server, topic, 2, COMPACTED if topic == "compacted" else {})
        fill(server)
        source.stop()  # so that no compaction is under way
        source.start()
        starts = {"trimmed": 63}
        wanted = {topic: rows(server, topic, starts.get(topic, 0)) for topic in TOPICS}
        assert len(wanted["trimmed"][0]) == 200 - 63
        assert 0 < len(wanted["compacted"][0]) < 200
        roots, configs = {}, {}
        for form in FORMATS:
            roots[form], configs[form] = folder / form, folder / f"{form}.json"
            more = {"form": form, "max_offsets": 25, "chain_start": "earliest"}
            archived = [
                mirror(topic, server, folder / form, **more) | {"name": topic} for topic in TOPICS
            ]
            copied = run_now(write_config(configs[form], *archived))
            assert copied.returncode == 0, copied.stderr
        yield World(wanted, roots, configs, server)


def fill(server):
    for number in PARTITIONS:
        at = {"partition": number}
        produce(server, "trimmed", odd_messages(200, seed=number), **at)
        produce(server, "whole", odd_messages(150, seed=10 + number), **at)
        pieces = [(odd_messages(9, seed=n), n % 3 != 0) for n in range(6)]
        produce_transactions(server, "whole", pieces, transactional_id=f"id-{number}", **at)
        for turn in range(4):
            keyed = [Message(b"%d" % (n % 40 + turn), b"%d-%d" % (turn, n)) for n in range(50)]
            produce(server, "compacted", keyed, **at)
    trimmed = [TopicPartition("trimmed", number, 63) for number in PARTITIONS]
    admin = AdminClient({"bootstrap.servers": server})
    for done in admin.delete_records(trimmed).values():
        done.result(TIMEOUT_S)
    wait_until(
        lambda: all(len(found) < 150 for found in rows(server, "compacted")),
        what=lambda: "compaction",
        timeout_s=TIMEOUT_S,
    )
    never = {"value": "1000000000000", "incremental_operation": AlterConfigOpType.SET}
    keep = ConfigEntry("min.compaction.lag.ms", **never)
    changed = ConfigResource(ConfigResource.Type.TOPIC, "compacted", incremental_configs=[keep])
    for done in admin.incremental_alter_configs([changed]).values():
        done.result(TIMEOUT_S)


@pytest.mark.parametrize("form", FORMATS)
def test_trimmed_compacted_and_merged_archives_equal_their_source(world, form, tmp_path):
    archive = tmp_path / "archive"
    shutil.copytree(world.roots[form], archive)
    config = tmp_path / "merged.json"
    config.write_text(world.configs[form].read_text().replace(str(world.roots[form]), str(archive)))
    before = set(archive.rglob(f"*.{EXTENSIONS[form]}"))
    merged = logmirror("compact", "-c", str(config), "--min-objects", "2")
    assert merged.returncode == 0, merged.stderr
    made = set(archive.rglob(f"*.{EXTENSIONS[form]}")) - before
    assert len(made) > len(TOPICS)
    # The parts that a crash of the merge left behind, beside the merged objects.
    shutil.copytree(world.roots[form] / "whole", archive / "whole", dirs_exist_ok=True)
    # An archive whose first objects a person deleted.
    for part in (archive / ".logmirror" / "claims", archive):
        shutil.copytree(world.roots[form] / part.relative_to(archive) / "whole", part / "younger")
    deleted = sorted((archive / "younger" / "0").iterdir())[:2]
    for one in deleted:
        one.unlink()
    start = 1 + int(deleted[-1].name.partition(".")[0].rpartition("-")[2])

    with MountingBroker(tmp_path / "log", world.roots[form]) as served:
        for topic in TOPICS:
            assert rows(served, topic, world.rows[topic][0][0].offset) == world.rows[topic]
    with MountingBroker(tmp_path / "log-2", archive) as served:
        for topic in TOPICS:
            assert rows(served, topic, world.rows[topic][0][0].offset) == world.rows[topic]
        found = list(rows_by_librdkafka(served, "younger", start=start, config=SOON))
        assert found == [row for row in world.rows["whole"][0] if row.offset >= start]
        assert ends(served, "younger")[0] == start
        assert ends(served, "trimmed")[0] == 63


def ends(server, topic):
    """First and next offset of partition 0."""
    consumer = Consumer({"bootstrap.servers": server, "group.id": "unused"})
    found = consumer.get_watermark_offsets(TopicPartition(topic, 0), TIMEOUT_S)
    consumer.close()
    return found


MIRROR_V3 = (
    ("ndjson", {}),
    ("parquet", {"keys": "utf8", "values": "utf8", "compression": "snappy"}),
    ("parquet", {"keys": "bytes", "values": "bytes"}),
    ("parquet", {"keys": "head", "values": "head", "compression": "lz4"}),
)


def test_archives_of_mirror_v3_are_served_record_by_record(log_bucket, tmp_path):
    place, environment, wanted = tmp_path / "archive", {}, {}
    for number, (form, options) in enumerate(MIRROR_V3):
        topic, text = f"topic-{number}", options.get("keys") == "utf8"
        wanted[topic] = [odd_rows(200, first=40 * n, text=text) for n in PARTITIONS]
        for n in PARTITIONS:
            objects = cut(wanted[topic][n], 7, first=40 * n)
            folder = tmp_path / "archive" / topic / str(n)
            write_chain(folder, topic, n, objects, form=form, **options)
    if log_bucket is not None:
        place, environment = f"s3://{log_bucket.bucket}/kept", log_bucket.environment
        client = log_bucket.server.client()
        for path in (tmp_path / "archive").rglob("*-*.*"):
            key = f"kept/{path.relative_to(tmp_path / 'archive')}"
            client.put_object(Bucket=log_bucket.bucket, Key=key, Body=path.read_bytes())
        shutil.rmtree(tmp_path / "archive")
    with MountingBroker(tmp_path / "log", place, **environment) as served:
        for topic, expected in wanted.items():
            found = [
                list(rows_by_librdkafka(served, topic, partition=n, start=40 * n, config=SOON))
                for n in PARTITIONS
            ]
            assert found == expected


TEXTS = (
    *(None, b"[]", b'""', b' {"a": [1, null]}\n', b'{"a": 1, "a": 1e999}', b'"\\ud800"'),
    'größe 😀\0"\\\u2028'.encode(),
)
"""The last one is no JSON, which only `json-parseable` refuses."""

COLUMNS = {
    "text": {("String", "String", "SNAPPY")},
    "json": {("String", "String", "LZ4")},
    "parseable": {("None", "String", "ZSTD")},
    "plain": {("None", "None", "UNCOMPRESSED")},
}
"""The types of the columns of keys and values, and their compression."""

PARSEABLE = {"type": "json-parseable"}
WRITTEN = {
    "text": {"keys": {"type": "utf8"}, "values": {"type": "utf8"}, "compression": "snappy"},
    "json": {"keys": {"type": "json"}, "values": {"type": "json"}, "compression": "lz4"},
    "parseable": {"values": PARSEABLE, "compression": "zstd-3"},
    "plain": {"compression": "uncompressed"},
    "checked": {"form": "native", "values": PARSEABLE},
}
CHANGED = ("plain", "text", "json", "parseable")
"""How one archive is written in turn; the merged object of all has bytes."""


@pytest.mark.in_bucket
@pytest.mark.gate("a mirror for each type")
def test_every_type_and_compression_is_served_record_by_record(log_bucket, tmp_path):
    """Also by one chain whose configuration changed, before and after it is merged."""
    place, objects, environment, more = str(tmp_path / "kept"), tmp_path / "kept", {}, {}
    if log_bucket is not None:
        server, bucket = log_bucket.server, log_bucket.bucket
        place, objects = f"s3://{bucket}/kept", server.files(bucket) / "kept"
        environment = log_bucket.environment
        more["destinations"] = [server.destination(bucket, prefix="kept")]
    with EmbeddedBroker(tmp_path / "source") as source:
        server = source.bootstrap

        def archive(topic: str, kind: str, seed: int = 0) -> Path:
            is_parsed = WRITTEN[kind].get("values") == PARSEABLE or topic == "changed"
            write_texts(server, topic, TEXTS[:-1] if is_parsed else TEXTS, seed)
            options = {"name": topic, "max_offsets": 25, **WRITTEN[kind], **more}
            one = mirror(topic, server, tmp_path / "kept", **options)
            config = write_config(tmp_path / f"{topic}.json", one)
            copied = run_now(config)
            assert copied.returncode == 0, copied.stderr
            return config

        for topic in (*WRITTEN, "changed"):
            create_topic(server, topic, 2, {})
            for seed, kind in enumerate(CHANGED if topic == "changed" else (topic,)):
                config = archive(topic, kind, seed)
        wanted = {topic: rows(server, topic) for topic in (*WRITTEN, "changed")}
    assert {len(found[0]) for found in wanted.values()} == {90, 4 * 90}
    assert {topic: columns(objects / topic) for topic in COLUMNS} == COLUMNS
    assert columns(objects / "changed") == set().union(*COLUMNS.values())
    with MountingBroker(tmp_path / "log", place, **environment) as served:
        assert {topic: rows(served, topic) for topic in wanted} == wanted
    parts = set((objects / "changed").rglob("*.parquet"))
    merged = logmirror("compact", "-c", str(config), "--min-objects", "2")
    assert merged.returncode == 0, merged.stderr
    assert set((objects / "changed").rglob("*.parquet")) - parts
    with MountingBroker(tmp_path / "log-2", place, **environment) as served:
        assert rows(served, "changed") == wanted["changed"]


def columns(folder):
    """What `COLUMNS` says, of the objects of a topic."""
    found = set()
    for path in folder.rglob("*.parquet"):
        metadata = pq.read_metadata(path)
        types = (str(metadata.schema.column(n).logical_type) for n in range(2))
        found.add((*types, metadata.row_group(0).column(0).compression))
    return found


def write_texts(server, topic, texts, seed=0):
    """Write records with texts of every kind as keys and values, in two partitions."""
    for number in PARTITIONS:
        odd = odd_messages(90, seed=seed + number)
        messages = [
            one._replace(key=texts[n % len(texts)], value=texts[n // 3 % len(texts)])
            for n, one in enumerate(odd)
        ]
        produce(server, topic, messages, partition=number)


def offsets_until(is_refused, consumer):
    """What arrives until the broker has refused the next record, and a second longer."""
    found, polls = [], 0
    while polls < 10:
        record = consumer.poll(0.1)
        if record is not None:
            assert record.error() is None
            found.append(record.offset())
        else:
            polls += is_refused()
    return found


DAMAGE = {
    "truncated": lambda data, _, __: data[: len(data) // 2],
    "short": lambda data, form, _: without_end(data, form),
    "flipped": lambda data, _, __: data[:-90] + bytes([data[-90] ^ 1]) + data[-89:],
    "swapped": lambda _, __, other: other,
    "empty": lambda _, __, ___: b"",
}


def without_end(data, form):
    """Cut at a border, where the rest is well-formed: records are missing, and nothing else."""
    if form == "ndjson":
        return b"".join(data.splitlines(keepends=True)[:-3])
    if form == "parquet":
        return data[:-8]
    at, starts = 0, []
    while at < len(data):
        starts.append(at)
        at += 12 + int.from_bytes(data[at + 8 : at + 12], "big")
    return data[: starts[-1]]


def copied(world, form, topic, archive, name):
    """Copy the archive of a topic, with its claims, as another one; returns partition 0."""
    for part in (archive / ".logmirror" / "claims", archive):
        shutil.copytree(world.roots[form] / part.relative_to(archive) / topic, part / name)
    return archive / name / "0"


def reader_of(server, topic):
    settings = {"bootstrap.servers": server, "group.id": "unused", "auto.offset.reset": "error"}
    consumer = Consumer({**settings, **SOON})
    consumer.assign([TopicPartition(topic, 0, 0)])
    return consumer


WITHOUT_CLAIMS = "native, without claims"


@pytest.mark.parametrize("form", [*FORMATS, WITHOUT_CLAIMS])
def test_a_damaged_object_is_refused_and_a_repaired_one_is_served(world, form, tmp_path):
    """One topic for each kind of damage, in the second object of its partition 0."""
    archive = tmp_path / "archive"
    originals, kinds = {}, dict(DAMAGE)
    if form == WITHOUT_CLAIMS:
        del kinds["swapped"]  # nothing shows that
    for kind, spoil in kinds.items():
        folder = copied(world, form.partition(",")[0], "whole", archive, kind)
        _, second, *_ = sorted(folder.iterdir())
        (other,) = (archive / kind / "1").glob(second.name)
        originals[second] = second.read_bytes()
        second.write_bytes(spoil(originals[second], form, other.read_bytes()))
        assert second.read_bytes() != originals[second]
    if form == WITHOUT_CLAIMS:
        shutil.rmtree(archive / ".logmirror")
    first = int(second.name.partition("-")[0])
    wanted = world.rows["whole"]
    broker = MountingBroker(tmp_path / "log", archive)
    with broker as served:
        readers = {}
        for kind in kinds:
            readers[kind] = reader_of(served, kind)
            line = f"/{kind}/0/{second.name}: "
            found = offsets_until(lambda line=line: line in broker.log.read_text(), readers[kind])
            assert found == [row.offset for row in wanted[0] if row.offset < first]
            assert list(rows_by_librdkafka(served, kind, partition=1, config=SOON)) == wanted[1]
        for path, content in originals.items():
            repaired = path.with_name(f".{path.name}")
            repaired.write_bytes(content)
            repaired.rename(path)
        for kind, reader in readers.items():
            record = reader.poll(TIMEOUT_S)
            assert record is not None
            assert record.error() is None
            assert record.offset() == next(r.offset for r in wanted[0] if r.offset >= first)
            reader.close()
            assert list(rows_by_librdkafka(served, kind, config=SOON)) == wanted[0]


def test_a_damaged_newest_object_hides_none_before_it(world, tmp_path):
    """A reader of committed records may need later objects, but only for open transactions."""
    *older, newest = sorted(
        copied(world, "native", "compacted", tmp_path / "archive", "kept").iterdir()
    )
    assert older
    newest.write_bytes(newest.read_bytes()[:-1])
    first = int(newest.name.partition("-")[0])
    broker = MountingBroker(tmp_path / "log", tmp_path / "archive")
    with broker as served:
        reader = reader_of(served, "kept")
        found = offsets_until(lambda: f"{newest.name}: " in broker.log.read_text(), reader)
        reader.close()
        admin = AdminClient({"bootstrap.servers": served})
        wanted = {TopicPartition("kept", 0): OffsetSpec.latest()}
        level = IsolationLevel.READ_COMMITTED
        (end,) = admin.list_offsets(wanted, isolation_level=level, request_timeout=5).values()
        with pytest.raises(KafkaException):
            end.result()
    assert found == [row.offset for row in world.rows["compacted"][0] if row.offset < first]


def test_snapshots_are_refused(world, tmp_path):
    """They hold the latest record of each key, not the log."""
    written = mirror("compacted", world.server, tmp_path / "archive", compaction="log")
    archived = run_now(write_config(tmp_path / "config.json", written | {"name": "latest"}))
    assert archived.returncode == 0, archived.stderr
    broker = MountingBroker(tmp_path / "log", tmp_path / "archive")
    with broker as served:
        reader = reader_of(served, "latest")
        assert (
            offsets_until(lambda: "snapshots are not served" in broker.log.read_text(), reader)
            == []
        )
        reader.close()


@pytest.mark.parametrize("form", ["parquet", "ndjson"])
def test_a_merge_moves_no_end_of_a_batch(tmp_path, form):
    """A mirror that restores while `compact` runs takes other ends for a log that was truncated."""
    with EmbeddedBroker(tmp_path / "source") as source:
        create_topic(source.bootstrap, "large", 1, {})
        messages = [Message(b"%d" % n, b"x" * 5000, (), n) for n in range(400)]
        produce(source.bootstrap, "large", messages)
        written = mirror("large", source.bootstrap, tmp_path / "archive", form=form, max_offsets=70)
        config = write_config(tmp_path / "config.json", written | {"name": "large"})
        archived = run_now(config)
    assert archived.returncode == 0, archived.stderr
    parts = ends_of_batches(tmp_path / "archive")
    assert {69, 139, 209, 279, 349} < parts < set(range(400))
    merged = logmirror("compact", "-c", str(config), "--min-objects", "2")
    assert merged.returncode == 0, merged.stderr
    assert len(list((tmp_path / "archive" / "large" / "0").iterdir())) < 4
    assert ends_of_batches(tmp_path / "archive") == parts


def ends_of_batches(root):
    """The last offsets of the batches that a broker makes of the objects."""
    store = FilesystemStore(root, writer_id="reader")
    return {
        int.from_bytes(batch[:8]) + int.from_bytes(batch[23:27])
        for name in store.names("large/0")
        for batch in checked_batches(store, "large/0", name, utf8=False)
    }


@pytest.mark.parametrize("content", [b"", b'{"version":99}\n'])
def test_a_claim_that_cannot_be_read_hides_its_own_topic_only(world, content, tmp_path):
    archive = tmp_path / "archive"
    copied(world, "native", "whole", archive, "intact")
    copied(world, "native", "whole", archive, "spoiled")
    newest = max((archive / ".logmirror" / "claims" / "spoiled" / "0").iterdir())
    whole = newest.read_bytes()
    newest.write_bytes(content)
    broker = MountingBroker(tmp_path / "log", archive)
    with broker as served:
        assert rows(served, "intact") == world.rows["whole"]
        assert "spoiled: not mounted: " in broker.log.read_text()
        newest.write_bytes(whole)
        mounted = "spoiled: mounted now"
        wait_until(lambda: mounted in broker.log.read_text(), what=broker.log.read_text)
        assert rows(served, "spoiled") == world.rows["whole"]


def test_a_folder_of_a_day_is_no_partition(world, tmp_path):
    """Each number below the highest one would be an empty partition."""
    archive = tmp_path / "archive"
    copied(world, "native", "whole", archive, "whole")
    (archive / "events" / "20261129").mkdir(parents=True)
    broker = MountingBroker(tmp_path / "log", archive)
    with broker as served:
        assert rows(served, "whole") == world.rows["whole"]
        (archive / "whole" / "20261130").mkdir()
        (archive / "later" / "20261130").mkdir(parents=True)
        wait_until(lambda: "later: not" in broker.log.read_text(), what=broker.log.read_text)
        assert rows(served, "whole") == world.rows["whole"]
    assert "events: not mounted: 20261129 is not a partition: 0 to 9999" in broker.log.read_text()


@pytest.mark.parametrize("form", ["native", "parquet"])
def test_the_log_start_moves_with_the_first_object_before_it_is_read(world, form, tmp_path):
    oldest = sorted(copied(world, form, "whole", tmp_path / "archive", "kept").iterdir())[:2]
    with MountingBroker(tmp_path / "log", tmp_path / "archive") as served:
        assert ends(served, "kept")[0] == 0
        for one in oldest:
            one.unlink()
        start = 1 + int(oldest[-1].name.partition(".")[0].rpartition("-")[2])
        wait_until(lambda: ends(served, "kept")[0] == start, what=lambda: "a later log start")

"""Records, and whole archive objects made of them, small enough for damage at every bit."""

import io
import json
import random

import pyarrow.parquet as pq
import xxhash

from logmirror.archive.claims import Claim, claim_name
from logmirror.archive.compact import Limits, compact
from logmirror.archive.envelope import NativeEncoder, NdjsonEncoder, ParquetEncoder
from logmirror.archive.merge import Archive
from logmirror.archive.metadata import ObjectMetadata
from logmirror.archive.naming import format_name
from logmirror.clock import SYSTEM_CLOCK
from logmirror.model import GapCause, OffsetRange, TimestampType, Trigger
from logmirror.testing import MemoryStore
from logmirror.wire.columns import ContentDigest
from logmirror.wire.compression import Codec
from logmirror.wire.decode import RecordDecoder
from logmirror.wire.records import Record, decode_reference, encode_reference
from logmirror.wire.scan import BatchScanner

FOLDER = "orders/3"
TOPIC = "flights größe"


def odd_records(count, *, first=0, seed=1, text=False):
    """Return records of every shape; offset 0 and every seventh offset are missing."""
    chooser = random.Random(seed)

    def blob():
        size = chooser.choice([0, 1, 5, 40, 300])
        return (
            "".join(chooser.choice('aé"\\\n\0\u2028😀') for _ in range(size)).encode()
            if text
            else chooser.randbytes(size)
        )

    return [
        Record(
            offset,
            chooser.choice([-1, 0, 1_700_000_000_000 + offset, 1]),
            TimestampType.CREATE_TIME,
            chooser.choice([None, blob()]),
            chooser.choice([None, blob()]),
            tuple(
                (chooser.choice(["", "k", "größe"]).encode(), chooser.choice([None, blob()]))
                for _ in range(chooser.choice([0, 0, 1, 3]))
            ),
        )
        for offset in range(first, first + count)
        if offset % 7
    ]


def batches_of(records, *, size=5, codec=Codec.NONE):
    return b"".join(
        encode_reference(
            records[at : at + size],
            codec=codec,
            timestamp_type=TimestampType(at // size % 2),
        )
        for at in range(0, len(records), size)
    )


def as_read(records, *, size=5):
    """Return the rows of `batches_of(records)`: every other batch has LogAppendTime."""
    seen = []
    for at in range(0, len(records), size):
        piece = records[at : at + size]
        kind = TimestampType(at // size % 2)
        largest = max(record.timestamp_ms for record in piece)
        for record in piece:
            stamp = largest if kind else record.timestamp_ms
            seen.append(record._replace(timestamp_ms=stamp, timestamp_type=kind))
    return seen


def decode(data, *, max_chunk_bytes=1 << 20):
    """Yield columns, each valid until the next."""
    buffer = bytearray(data)
    batches = BatchScanner().scan(buffer, len(buffer))
    yield from RecordDecoder(max_chunk_bytes).decode(buffer, batches, first=0, end=2**62)


def offsets_of(store):
    """{(from, to): offsets} of everything published in a `MemoryStore`, by independent readers."""
    found = {}
    for name, data in store.objects.items():
        if name.startswith("."):
            continue
        stem, _, extension = name.rpartition("/")[2].partition(".")
        first, last = map(int, stem.split("-"))
        if extension == "batches":
            offsets = [r.offset for r in decode_reference(data)]
        elif extension == "parquet":
            offsets = pq.read_table(io.BytesIO(data)).column("offset").to_pylist()
        else:
            offsets = [json.loads(line)["offset"] for line in data.splitlines()]
        found[first, last] = offsets
    return found


class Target:
    """Collects bytes; copies them at once, as the contract requires."""

    def __init__(self):
        self.data = bytearray()
        self.writes = 0

    def write(self, data):
        self.data += data
        self.writes += 1
        return memoryview(data).nbytes


def metadata_of(covered, record_count, digest):
    return ObjectMetadata(
        topic=TOPIC,
        topic_id="ab" * 16,
        partition=3,
        covered=covered,
        record_count=record_count,
        digest=digest,
        gap_counts={GapCause.COMPACTED: covered.offset_count - record_count},
    )


def make_object(extension, records, *, covered=None, **options):
    """Return name, bytes and content digest of an object that holds `records`."""
    data = batches_of(records)
    covered = covered or OffsetRange(first=records[0].offset, last=records[-1].offset)
    name, target, digest = format_name(covered, extension), Target(), ContentDigest()
    if extension == "batches":
        encoder = NativeEncoder(target)
        encoder.append(memoryview(data))
        encoder.finish({})
        return name, bytes(target.data), f"xxh3:{xxhash.xxh3_128(data).hexdigest()}"
    kind = ParquetEncoder if extension == "parquet" else NdjsonEncoder
    encoder = kind(target, topic=TOPIC, partition=3, **options)
    for columns in decode(data):
        encoder.append(columns)
        digest.update(columns, 0, columns.rows)
    encoder.finish(metadata_of(covered, len(records), digest.hexdigest()).to_key_values())
    return name, bytes(target.data), digest.hexdigest()


def unsealed(data):
    """Return a Parquet object without the file checksum."""
    return data.replace(b"logmirror.file-check", b"logmirror.file-other")


OBJECTS = 9
PER_OBJECT = 7


def new_chain(extension, *, objects=OBJECTS, claims=True, topic_ids=("",)):
    """A store with a chain of small objects, and the objects as name to bytes."""
    store, made = MemoryStore(), {}
    for number in range(objects):
        covered = OffsetRange(first=number * PER_OBJECT, last=number * PER_OBJECT + PER_OBJECT - 1)
        records = records_for(covered, seed=number)
        name, data, digest = make_object(extension, records, covered=covered)
        made[f"{FOLDER}/{name}"] = data
        store.create(f"{FOLDER}/{name}", data)
        if claims:
            claim = Claim(
                covered=covered,
                digest=digest,
                writer="mirror",
                topic=TOPIC,
                topic_id=topic_ids[number % len(topic_ids)],
                partition=3,
                created_ms=0,
                record_count=len(records),
                trigger=Trigger.MAX_BYTES,
            )
            store.create(claim_name("orders", 3, covered.first), claim.to_bytes())
    return store, made


def records_for(covered, *, seed):
    """Return records with a gap at the beginning."""
    return odd_records(covered.offset_count, first=covered.first, seed=seed)


def merge_all(store):
    """Merge all Parquet objects of the chain, as `logmirror compact` does."""
    archive = Archive(
        store=store,
        folder=FOLDER,
        topic=TOPIC,
        extension="parquet",
        compression="zstd-1",
        utf8=False,
    )
    limits = Limits(target_bytes=1 << 20, min_objects=2)
    compact(archive, limits, start=0, writer_id="w", clock=SYSTEM_CLOCK)

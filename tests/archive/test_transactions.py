"""The committed records of a native chain are those that a read_committed consumer returns.

Method: random interleavings of the transactions of several producers, cut into objects anywhere and
scanned in runs of any size; the judge is the reference decoder of `wire.records` with the known
aborts. Transactions of real brokers are in `tests/e2e/test_dataframes.py`.
"""

import random

import pytest
import xxhash

from kit.runs.archive_history import cleaned
from logmirror.archive.checked_rows import ObjectRows
from logmirror.archive.claims import Claim, claim_name
from logmirror.archive.naming import format_name
from logmirror.archive.piece_rows import LastStableOffset, PieceRows, outcomes
from logmirror.archive.pieces import cut, list_partition
from logmirror.archive.transactions import OpenTransactions
from logmirror.errors import CorruptionError
from logmirror.model import OFFSET_MAX, Decided, OffsetRange, TimestampType, Trigger
from logmirror.testing import MemoryStore
from logmirror.wire.batch_header import MarkerType, parse_header
from logmirror.wire.records import Record, encode_marker, encode_reference, marker_type
from logmirror.wire.scan import BatchScanner

FOLDER = "orders/0"


def log(seed, *, size=120, producers=4, last_open=True):
    """Batches of a log, each with its first offset; what is committed; what is open at the end."""
    chooser = random.Random(seed)
    batches, committed, offset = [], [], 0
    running = {}
    for _ in range(size):
        producer = chooser.randrange(producers + 1)
        if producer == producers:  # not in a transaction
            batches.append((offset, batch(offset, 1, -1)))
            committed.append(offset)
            offset += 1
        elif producer in running and chooser.random() < 0.4:
            kind = chooser.choice(list(MarkerType))
            batches.append((offset, encode_marker(kind, offset=offset, producer_id=producer)))
            if kind is MarkerType.COMMIT:
                committed += running[producer]
            del running[producer]
            offset += 1
        else:
            count = chooser.choice([1, 1, 3])
            batches.append((offset, batch(offset, count, producer)))
            running.setdefault(producer, []).extend(range(offset, offset + count))
            offset += count
    if not last_open:
        for producer in sorted(running):
            marker = encode_marker(MarkerType.ABORT, offset=offset, producer_id=producer)
            batches.append((offset, marker))
            offset += 1
        running = {}
    return batches, sorted(committed), {p: offsets[0] for p, offsets in running.items()}


def aborted_in(batches):
    """The aborted transactions: producer, first offset, offset of the marker."""
    begun, found = {}, []
    for offset, data in batches:
        header = parse_header(data, 0)
        producer = header.producer_id
        if producer < 0:
            continue
        if not header.is_control:
            begun.setdefault(producer, offset)
        elif (first := begun.pop(producer, None)) is not None and (
            marker_type(data, header) is MarkerType.ABORT
        ):
            found.append((producer, first, offset))
    return found


def batch(offset, count, producer):
    records = [
        Record(offset + n, 0, TimestampType.CREATE_TIME, None, b"%d" % (offset + n), ())
        for n in range(count)
    ]
    return encode_reference(records, producer_id=producer, transactional=producer >= 0)


def archive_of(batches, chooser, *, per_object):
    """A store with the batches in objects of about so many, and the objects' first offsets."""
    store, at = MemoryStore(), 0
    ends = [offset for offset, _ in batches[1:]] + [None]
    while at < len(batches):
        count = chooser.randint(1, per_object)
        piece, last = batches[at : at + count], ends[min(at + count, len(batches)) - 1]
        if last is None:
            last = piece[-1][0] + length_of(piece[-1][1])
        covered = OffsetRange(first=piece[0][0], last=last - 1)
        name = f"{FOLDER}/{format_name(covered, 'batches')}"
        store.create(name, b"".join(data for _, data in piece))
        at += count
    return store


def length_of(data):
    return int.from_bytes(data[23:27], "big") + 1


def shown(store, *, piece_bytes, committed=True, first=0, end=None):
    held = list_partition(store, "orders", 0)
    offsets = []
    for piece in cut(held, topic="t", piece_bytes=piece_bytes, first=first, end=end):
        rows = PieceRows(store, piece, utf8=False, verify=True, committed=committed)
        for rows_of_piece in rows.read():
            offsets += rows_of_piece.column("offset").to_pylist()
    return offsets


@pytest.mark.parametrize("seed", range(12))
def test_records_of_aborted_and_of_open_transactions_are_left_out(seed):
    chooser = random.Random(1000 + seed)
    batches, committed, _ = log(seed)
    for per_object, piece_bytes in [(3, 1), (3, 500), (40, 1), (500, 1)]:
        store = archive_of(batches, chooser, per_object=per_object)
        assert shown(store, piece_bytes=piece_bytes) == committed
        low, high = sorted(chooser.sample(range(batches[-1][0]), 2))
        part = [offset for offset in committed if low <= offset < high]
        assert shown(store, piece_bytes=piece_bytes, first=low, end=high) == part


def test_who_asks_for_uncommitted_records_gets_all_of_them():
    batches, committed, _ = log(5)
    store = archive_of(batches, random.Random(1), per_object=7)
    everything = shown(store, piece_bytes=300, committed=False)
    assert len(everything) > len(committed)
    data = [(offset, length_of(d)) for offset, d in batches if not d[22] & 0x20]
    assert everything == [offset + n for offset, count in data for n in range(count)]


def test_a_marker_behind_the_end_that_was_planned_is_not_believed():
    store = MemoryStore()
    parts = [batch(0, 2, 7), encode_marker(MarkerType.COMMIT, offset=2, producer_id=7)]
    store.create(f"{FOLDER}/{format_name(OffsetRange(first=0, last=1), 'batches')}", parts[0])
    (piece,) = cut(list_partition(store, "orders", 0), topic="t", piece_bytes=1)
    store.create(f"{FOLDER}/{format_name(OffsetRange(first=2, last=2), 'batches')}", parts[1])

    planned = PieceRows(store, piece, utf8=False, verify=True, committed=True)

    assert list(planned.read()) == []
    assert shown(store, piece_bytes=1) == [0, 1]


@pytest.mark.parametrize("seed", range(6))
def test_a_stream_may_read_up_to_the_first_open_transaction(seed):
    chooser = random.Random(seed)
    batches, _, still_open = log(seed)
    store = archive_of(batches, chooser, per_object=5)
    objects = list_partition(store, "orders", 0).objects
    stable = LastStableOffset(store, FOLDER, 0)

    ends = [stable.advance(objects[: count + 1]) for count in range(len(objects))]

    assert ends == sorted(ends)
    for count, end in enumerate(ends):
        rows = ObjectRows(store, FOLDER, topic="t", utf8=False, verify=False)
        found = outcomes(rows, objects[: count + 1], end=OFFSET_MAX, chain_end=OFFSET_MAX)
        assert end == min([objects[count].last + 1, *found.open.values()])
    assert ends[-1] == min([objects[-1].last + 1, *still_open.values()])


def archived(history):
    """The store of a history."""
    store = MemoryStore()
    for name, data in history.changes:
        if data is None:
            del store.objects[name]
        else:
            store.objects[name] = data
    return store


@pytest.mark.parametrize("seed", range(12))
def test_claims_hold_the_ends_of_transactions_whose_markers_are_not_in_the_archive(seed):
    history, removed = cleaned(seed)
    assert removed
    store = archived(history)
    for number, source in enumerate(history.source):
        extent = history.extents[-1][number]
        wanted = [row.offset for row in source.shown(*extent, with_aborted=False)]
        held = list_partition(store, "d", number)
        offsets = []
        for piece in cut(held, topic="t", piece_bytes=400):
            rows = PieceRows(store, piece, utf8=False, verify=True, committed=True)
            offsets += [at for part in rows.read() for at in part.column("offset").to_pylist()]
        assert offsets == wanted
        stable = LastStableOffset(store, f"d/{number}", extent.start)
        assert stable.advance(held.objects) == extent.end


def test_a_damaged_claim_says_nothing_of_transactions():
    store, covered = MemoryStore(), OffsetRange(first=0, last=3)
    data = batch(0, 2, 7) + batch(2, 2, 8)
    store.create(f"{FOLDER}/{format_name(covered, 'batches')}", data)
    claim = Claim(
        covered=covered,
        digest=f"xxh3:{xxhash.xxh3_128(data).hexdigest()}",
        writer="w",
        topic="t",
        topic_id="",
        partition=0,
        created_ms=0,
        record_count=4,
        trigger=Trigger.DAILY,
        decided=(Decided(3, (8,), (7,)),),
    )
    name = claim_name("orders", 0, 0)
    store.create(name, claim.to_bytes())
    objects = list_partition(store, "orders", 0).objects
    assert LastStableOffset(store, FOLDER, 0).advance(objects) == 4
    assert shown(store, piece_bytes=1) == [0, 1]
    store.objects[name] = b"{}"
    assert LastStableOffset(store, FOLDER, 0).advance(objects) == 0
    with pytest.raises(CorruptionError, match="claim"):
        shown(store, piece_bytes=1)


@pytest.mark.parametrize("seed", range(12))
def test_the_transactions_of_an_object_whose_markers_are_behind_it(seed):
    chooser = random.Random(seed)
    batches, _, _ = log(seed, last_open=False)
    aborted = aborted_in(batches)
    values = set()
    for _ in range(20):
        start, stop = sorted(chooser.sample(range(len(batches) + 1), 2))
        first = batches[start][0]
        wanted, ended = {}, set()
        for at, data in reversed(batches[start:stop]):
            header = parse_header(data, 0)
            if header.is_control:
                ended.add(header.producer_id)
            elif header.is_transactional and header.producer_id not in ended | wanted.keys():
                own = [span for one, *span in aborted if one == header.producer_id]
                wanted[header.producer_id] = any(begin <= at < marker for begin, marker in own)
        found, data = OpenTransactions(), bytearray(b"".join(data for _, data in batches))
        overlapping = [(p, begin) for p, begin, marker in aborted if marker >= first]
        scanned = BatchScanner().scan(memoryview(data), len(data), aborted=overlapping)
        between = chooser.randint(start, stop)
        found.add(memoryview(data), scanned, start, between)
        found.add(memoryview(data), scanned, between, stop)
        assert found.is_aborted == wanted
        values |= {*wanted.values()}
    assert values == {False, True}

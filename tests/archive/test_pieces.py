"""An archive divided into pieces shows each record once, in order, while the archive changes.

Method: chains of small objects in memory, divided with every piece size and range of offsets, are
read back and compared with their records. Compactions run between plan and read, and between any
two batches of a read. Damage of every kind must end a read with an error.
"""

import io

import pytest

from kit.runs.objects import (
    FOLDER,
    OBJECTS,
    PER_OBJECT,
    TOPIC,
    as_read,
    make_object,
    new_chain,
    records_for,
)
from logmirror.archive import checked_rows, native
from logmirror.archive.compact import Limits, compact
from logmirror.archive.merge import Archive
from logmirror.archive.metadata import FILE_CHECK_KEY
from logmirror.archive.naming import format_name
from logmirror.archive.piece_rows import PieceRows
from logmirror.archive.pieces import (
    cut,
    find_destination,
    find_partitions,
    find_topic,
    list_partition,
)
from logmirror.clock import SYSTEM_CLOCK
from logmirror.errors import CorruptionError, UnavailableError, UsageError
from logmirror.model import OffsetRange
from logmirror.testing import MemoryStore

FORMATS = ["batches", "parquet", "ndjson"]
END = OBJECTS * PER_OBJECT


def truth():
    """Offset, key and value of every record of `new_chain`."""
    rows = []
    for number in range(OBJECTS):
        covered = OffsetRange(first=number * PER_OBJECT, last=number * PER_OBJECT + PER_OBJECT - 1)
        rows += [(r.offset, r.key, r.value) for r in as_read(records_for(covered, seed=number))]
    return rows


def pieces_of(store, *, piece_bytes=1, **limits):
    return list(
        cut(list_partition(store, "orders", 3), topic=TOPIC, piece_bytes=piece_bytes, **limits)
    )


def read(store, piece, *, verify=True):
    return PieceRows(store, piece, utf8=False, verify=verify, committed=True).read()


def rows_of(batches):
    names = ("offset", "key", "value")
    return [
        row
        for batch in batches
        for row in zip(*(batch.column(name).to_pylist() for name in names), strict=True)
    ]


def merge_all(store, extension):
    archive = Archive(
        store=store,
        folder=FOLDER,
        topic=TOPIC,
        extension=extension,
        compression="zstd-1",
        utf8=False,
    )
    limits = Limits(target_bytes=1 << 20, min_objects=2)
    compact(archive, limits, start=0, writer_id="compact", clock=SYSTEM_CLOCK)


@pytest.mark.parametrize("extension", FORMATS)
@pytest.mark.parametrize("piece_bytes", [1, 1500, 1 << 30])
def test_every_record_is_in_one_piece(extension, piece_bytes):
    store, _ = new_chain(extension)
    pieces = pieces_of(store, piece_bytes=piece_bytes)
    assert rows_of(batch for piece in pieces for batch in read(store, piece)) == truth()
    assert [piece.first for piece in pieces[1:]] == [piece.end for piece in pieces[:-1]]
    assert len(pieces) == {1: OBJECTS, 1 << 30: 1}.get(piece_bytes, len(pieces))


@pytest.mark.parametrize("extension", FORMATS)
@pytest.mark.parametrize(("first", "end"), [(0, 1), (3, 40), (10, 11), (END - 1, END), (20, None)])
def test_a_range_of_offsets_reads_only_what_it_touches(extension, first, end):
    store, _ = new_chain(extension)
    pieces = pieces_of(store, first=first, end=end)
    opened = []
    store.before = lambda operation, name: opened.append(name) if operation == "open" else None
    last = END if end is None else end
    found = rows_of(batch for piece in pieces for batch in read(store, piece))
    assert found == [row for row in truth() if first <= row[0] < last]
    objects = {name for name in opened if name.startswith(FOLDER)}
    assert len(objects) == (last - 1) // PER_OBJECT - first // PER_OBJECT + 1


@pytest.mark.parametrize("extension", FORMATS)
@pytest.mark.parametrize("piece_bytes", [1, 1 << 30])
def test_a_compact_between_plan_and_reading_changes_nothing(extension, piece_bytes):
    store, _ = new_chain(extension)
    pieces = pieces_of(store, piece_bytes=piece_bytes, first=5, end=50)
    merge_all(store, extension)
    assert len([name for name in store.objects if name.startswith(FOLDER)]) < OBJECTS
    found = rows_of(batch for piece in pieces for batch in read(store, piece))
    assert found == [row for row in truth() if 5 <= row[0] < 50]


@pytest.mark.parametrize("extension", FORMATS)
def test_a_compact_at_any_moment_of_a_reading_changes_nothing(extension):
    for moment in range(OBJECTS):
        store, _ = new_chain(extension)
        found = []
        for number, batch in enumerate(read(store, pieces_of(store, piece_bytes=1 << 30)[0])):
            found += rows_of([batch])
            if number == moment:
                merge_all(store, extension)
        assert found == truth(), moment


class Vanishing(io.BytesIO):
    """An object in a bucket that is deleted while it is read."""

    def __init__(self, data, left_bytes, on_loss):
        super().__init__(data)
        self._left_bytes, self._on_loss = left_bytes, on_loss

    def readinto(self, buffer, /):
        if self._left_bytes <= 0:
            self._on_loss()
            raise KeyError("gone")
        found = super().readinto(buffer)
        self._left_bytes -= found
        return found


def test_an_object_that_is_merged_away_while_it_is_read_is_gone_on_with(monkeypatch):
    """Rows that came before it was lost do not come again, and stay what they were."""
    monkeypatch.setattr(native, "_READ_BYTES", 300)
    monkeypatch.setattr(checked_rows, "_CHUNK_BYTES", 100)
    lost = 0
    for left_bytes in range(1, 1200, 150):
        store, made = new_chain("batches")
        pieces = pieces_of(store, piece_bytes=1 << 30)
        name, plain = sorted(made)[4], store.open

        def merge(store=store, plain=plain):
            nonlocal lost
            lost += 1
            store.open = plain
            merge_all(store, "batches")

        def opened(wanted, name=name, plain=plain, merge=merge, left_bytes=left_bytes):
            if wanted != name:
                return plain(wanted)
            return Vanishing(plain(wanted).read(), left_bytes, merge)

        store.open = opened
        batches = list(read(store, pieces[0]))
        assert len(batches) > OBJECTS
        assert rows_of(batches) == truth()
    assert lost > 3


@pytest.mark.parametrize("extension", FORMATS)
def test_what_is_added_after_the_plan_is_not_read(extension):
    store, _ = new_chain(extension)
    pieces = pieces_of(store, piece_bytes=1 << 30)
    covered = OffsetRange(first=END, last=END + 6)
    name, data, _ = make_object(extension, records_for(covered, seed=99), covered=covered)
    store.create(f"{FOLDER}/{name}", data)
    assert rows_of(batch for piece in pieces for batch in read(store, piece)) == truth()


@pytest.mark.parametrize("extension", FORMATS)
def test_an_object_that_was_changed_is_an_error(extension):
    """Bits everywhere in the middle object; its rows may come, but never without the error.

    But for a bit in the name of the file's own checksum: then its rows are what they were.
    """
    store, made = new_chain(extension, objects=3)
    name = sorted(made)[1]
    (piece,) = pieces_of(store, piece_bytes=1 << 30)
    whole, harmless = rows_of(read(store, piece)), made[name].find(FILE_CHECK_KEY.encode())
    for at in range(0, len(made[name]), 7):
        changed = bytearray(made[name])
        changed[at] ^= 1 << at % 8
        store.objects[name] = bytes(changed)
        if harmless <= at < harmless + len(FILE_CHECK_KEY) and harmless >= 0:
            assert rows_of(read(store, piece)) == whole
            continue
        with pytest.raises(CorruptionError) as caught:
            list(read(store, piece))
        assert name.endswith(str(caught.value.facts["name"])), at


@pytest.mark.parametrize("extension", FORMATS)
def test_an_object_of_other_records_is_an_error(extension):
    """The object is valid by itself: only the claim, or the footer's range, shows the damage."""
    store, made = new_chain(extension)
    names = sorted(made)
    (piece,) = pieces_of(store, piece_bytes=1 << 30)
    covered = OffsetRange(first=PER_OBJECT, last=2 * PER_OBJECT - 1)
    other = make_object(extension, records_for(covered, seed=77), covered=covered)[1]
    store.objects[names[1]] = made[names[2]]
    with pytest.raises(CorruptionError):
        list(read(store, piece))
    if extension != "parquet":  # whose footer is believed: another writer's is as good
        store.objects[names[1]] = other
        with pytest.raises(CorruptionError, match="digest"):
            list(read(store, piece))
        assert len(list(read(store, piece, verify=False))) == OBJECTS


@pytest.mark.parametrize("extension", FORMATS)
def test_a_gap_a_foreign_name_and_a_lost_object_are_errors(extension):
    store, made = new_chain(extension)
    names = sorted(made)
    pieces = pieces_of(store)
    del store.objects[names[4]]
    with pytest.raises(CorruptionError, match="gap"):
        list_partition(store, "orders", 3)
    with pytest.raises(CorruptionError):
        list(read(store, pieces[4]))
    store.objects[names[4]] = made[names[4]]
    for foreign in ("notes.txt", format_name(OffsetRange(first=END, last=END), "csv")):
        store.objects[f"{FOLDER}/{foreign}"] = b""
        with pytest.raises(CorruptionError):
            list_partition(store, "orders", 3)
        del store.objects[f"{FOLDER}/{foreign}"]
    assert list_partition(store, "orders", 3).next_offset == END


def test_an_object_inside_another_that_was_not_made_of_it_is_an_error():
    store, _ = new_chain("ndjson")
    covered = OffsetRange(first=0, last=2 * PER_OBJECT - 1)
    name, data, _ = make_object("ndjson", records_for(covered, seed=1), covered=covered)
    store.create(f"{FOLDER}/{name}", data)
    with pytest.raises(CorruptionError, match="not made"):
        list_partition(store, "orders", 3)


def test_a_folder_that_disappears_while_it_is_planned_is_an_empty_one():
    assert pieces_of(MemoryStore()) == []
    assert list_partition(MemoryStore(), "orders", 3).next_offset == 0


def test_the_destination_and_its_partitions_are_found():
    store, _ = new_chain("parquet")
    assert find_destination(store, "") == "orders"
    assert find_destination(store, "orders") == "orders"
    assert find_partitions(store, "orders", None) == (3,)
    assert find_partitions(store, "orders", (3,)) == (3,)
    assert find_topic(store, "orders", (3,)) == TOPIC
    assert find_topic(new_chain("parquet", claims=False)[0], "orders", (3,)) == ""
    with pytest.raises(UsageError):
        find_partitions(store, "orders", (3, 4))
    with pytest.raises(UsageError):
        find_destination(store, "order")
    store.create("more/0/x", b"")
    with pytest.raises(UsageError) as caught:
        find_destination(store, "")
    assert caught.value.facts["found"] == "more, orders"


def test_an_object_that_cannot_be_read_is_no_damage():
    store, _ = new_chain("ndjson")
    (piece,) = pieces_of(store, piece_bytes=1 << 30)

    def fail(operation, _name):
        if operation == "open":
            raise UnavailableError("down")

    store.before = fail
    with pytest.raises(UnavailableError):
        list(read(store, piece))

"""Positions and verification of chains during a compaction, and of chains merged while read.

Method: chains in memory; a compaction runs to its end, or to any operation, before a read
continues.
"""

import pytest

from kit.runs.objects import FOLDER, TOPIC, make_object, merge_all, odd_records
from logmirror.errors import CorruptionError
from logmirror.locations import FolderLocation
from logmirror.mirror.ports import ArchiveSpec, FlowId
from logmirror.model import OffsetRange
from logmirror.stores.base import Tail
from logmirror.testing import MemoryStore
from logmirror.to_archive.positions import read_chain
from logmirror.verification.archive import verify_content, verify_names

FLOW = FlowId(mirror="m", destination="orders", topic=TOPIC, partition=3)
SPEC = ArchiveSpec(
    location=FolderLocation("/nowhere"),
    format="parquet",
    extension="parquet",
    compression="zstd-1",
    encoding="base64",
    max_bytes=1,
    max_offsets=1,
    max_time_ms=1,
)
OBJECTS, PER_OBJECT = 11, 7
END = OBJECTS * PER_OBJECT
RECORDS = sum(1 for offset in range(END) if offset % 7)


class Stopped(BaseException):
    """As `kill -9`."""


@pytest.fixture
def store():
    found = MemoryStore()
    for first in range(0, END, PER_OBJECT):
        name, data, _ = make_object(
            "parquet",
            odd_records(PER_OBJECT, first=first, seed=first),
            covered=OffsetRange(first=first, last=first + PER_OBJECT - 1),
        )
        found.create(f"{FOLDER}/{name}", data)
    return found


def prove(store, *, before=lambda: None):
    report, objects = verify_names(store, FLOW, "parquet", chain_start=None)
    before()
    list(verify_content(report, objects, store, SPEC))
    return report


def test_a_position_is_the_same_at_every_moment(store):
    looking = False

    def look(operation, _name):
        nonlocal looking
        if not looking and operation != "discard":
            looking = True
            assert read_chain(store, FLOW, SPEC).next_offset == END
            looking = False

    store.before = look
    merge_all(store)
    assert read_chain(store, FLOW, SPEC).next_offset == END


def test_the_end_of_a_listing_needs_no_beginning(store, monkeypatch):
    """As a bucket with very many objects shows it, cut anywhere, at any moment."""
    looking, whole = False, store.tail

    def look(_operation, _name):
        nonlocal looking
        if looking:
            return
        looking = True
        names = whole(FOLDER).names
        for first in {name[:20] for name in names}:
            rest = [name for name in names if name >= first]
            monkeypatch.setattr(store, "tail", lambda *_, rest=rest: Tail(rest, is_whole=False))
            assert read_chain(store, FLOW, SPEC).next_offset == END
        looking = False

    store.before = look
    merge_all(store)


def test_a_listing_that_misses_what_changed_is_made_again(store, monkeypatch):
    before = list(store.names(FOLDER))
    merge_all(store)
    after = list(store.names(FOLDER))
    torn = sorted({*before[3:], *after} - {after[0]})
    tails = iter([torn, after])
    monkeypatch.setattr(store, "tail", lambda *_: Tail(next(tails), is_whole=True))

    assert read_chain(store, FLOW, SPEC).next_offset == END

    monkeypatch.setattr(store, "tail", lambda *_: Tail(torn, is_whole=True))
    with pytest.raises(CorruptionError):
        read_chain(store, FLOW, SPEC)


def test_a_verification_continues_with_merged_objects(store):
    plain = prove(store)
    assert (plain.record_count, plain.gap_offsets) == (RECORDS, END - RECORDS)

    merged = prove(store, before=lambda: merge_all(store))

    assert not merged.problems
    assert (merged.record_count, merged.gap_offsets) == (RECORDS, END - RECORDS)
    assert merged.object_bytes == sum(store.sizes(FOLDER).values())


def test_a_compact_in_the_middle_of_a_proof_counts_nothing_twice(store):
    left = iter(range(12))

    def step(operation, _name):
        if operation == "open" and next(left, None) == 5:
            store.before = lambda *_: None
            merge_all(store)

    store.before = step
    report = prove(store)

    assert not report.problems
    assert (report.record_count, report.gap_offsets) == (RECORDS, END - RECORDS)


def test_an_object_that_vanishes_and_is_not_replaced_is_a_problem(store):
    victim = sorted(store.objects)[4]

    report = prove(store, before=lambda: store.delete(victim))

    (problem,) = report.problems
    assert problem["kind"] == "corruption"


def test_leftovers_of_an_interrupted_compact_are_reported_and_no_problem(store):
    def stop(operation, _name):
        if operation == "delete":
            raise Stopped

    store.before = stop
    with pytest.raises(Stopped):
        merge_all(store)
    store.before = lambda *_: None

    report = prove(store)

    assert not report.problems
    assert [covered.first for covered in report.unfinished] == [0]
    assert (report.record_count, report.next_offset) == (RECORDS, END)
    merge_all(store)
    assert prove(store).unfinished == ()

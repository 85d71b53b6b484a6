"""A snapshot is verified against the source: missing, stale, deleted or changed records.

Method: a snapshot is written from one scripted log and verified against another, which is the first
one after a cleaner, or one that differs in a way that no cleaner causes.
"""

import pytest

from kit.fakes.scripted import TOPIC_ID, Log, ScriptedClient, archive_spec, run_slice
from logmirror.mirror.ports import FlowId, Slice, SourceView
from logmirror.model import TimestampType, TopicPartition, Trigger
from logmirror.source.partition import FetchBuffer, KafkaSource
from logmirror.testing import MemoryStore
from logmirror.verification.archive import verify_content, verify_names
from logmirror.verification.snapshot import compare_snapshot
from logmirror.verification.source import SourceSide
from logmirror.wire.decode import RecordDecoder
from logmirror.wire.records import Record, encode_reference

FLOW = FlowId(mirror="m", destination="d", topic="t", partition=0)
SPEC = archive_spec(compaction="log")
WRITTEN = {0: ("a", "1"), 1: ("b", "1"), 2: ("c", "1"), 3: ("a", "2"), 4: ("b", None)}
"""Offset to key and value; the snapshot has `a` of 3 and `c` of 2."""

LATER = {2: ("c", "1"), 3: ("a", "2")}
"""The same without what the cleaner takes."""


def log_of(records, **fields):
    encoded = [
        encode_reference(
            [Record(at, 1_700_000_000_000 + at, TimestampType.CREATE_TIME, key, value, headers)]
        )
        for at, (key, value, headers) in sorted(
            (n, (k.encode(), v and v.encode(), tuple(more))) for n, (k, v, *more) in records.items()
        )
    ]
    return Log(encoded, **fields)


def proof(written, shown, *, compacted=True, log_start=0, end=None):
    """The report on a snapshot of `written`, beside a source that shows `shown`."""
    store, log = MemoryStore(), log_of(written)
    slice_ = Slice(
        flow=FLOW,
        topic_id=TOPIC_ID,
        compacted=True,
        first=0,
        end=log.end,
        tail=Trigger.EXPLICIT,
        rebuild=True,
    )
    assert run_slice(ScriptedClient([log]), store, slice_, SPEC).error is None
    report, objects = verify_names(store, FLOW, "parquet", chain_start=None, snapshots=True)
    (checked,) = verify_content(report, objects, store, SPEC, ask_source=True)
    source = log_of(shown, log_start=log_start, last_stable_offset=end or log.end + 10)
    client = ScriptedClient([source])
    side = SourceSide(
        archive=SPEC,
        store=store,
        folder=FLOW.folder,
        source=KafkaSource(
            client, TopicPartition("t", 0), topic_id=TOPIC_ID, buffer=FetchBuffer(64)
        ),
        decoder=RecordDecoder(),
        view=SourceView(topic_id=TOPIC_ID, log_start=log_start, last_stable_offset=source.end),
        compacted=compacted,
    )
    compare_snapshot(report, checked, side)
    return report


def test_a_snapshot_of_what_the_source_shows_is_proven():
    report = proof(WRITTEN, WRITTEN | {14: ("a", "3")})
    assert (report.problems, report.compared, report.compacted_since) == ([], 1, 0)


@pytest.mark.parametrize(
    ("shown", "since"),
    [
        ({2: ("c", "1"), 3: ("a", "2"), 4: ("b", None)}, 0),
        ({2: ("c", "1"), 3: ("a", "2")}, 0),  # and then the tombstone
        ({3: ("a", "2"), 4: ("b", None), 9: ("c", "2"), 14: ("d", "1")}, 1),
        ({4: ("b", None), 9: ("c", "2"), 14: ("a", None)}, 2),
        ({0: ("a", "1"), 2: ("c", "1"), 4: ("b", None), 14: ("a", "9")}, 1),  # read while cleaning
    ],
)
def test_what_the_cleaner_took_since_is_counted_and_no_problem(shown, since):
    report = proof(WRITTEN, shown | {14: ("z", "1")})
    assert (report.problems, report.compared, report.compacted_since) == ([], 1, since)


@pytest.mark.parametrize(
    ("shown", "problem", "offset"),
    [
        (WRITTEN | {3: ("x", "2")}, "the snapshot lacks a key of the source", "3"),
        (LATER | {4: ("c", None)}, "the snapshot has a key that was deleted before", "4"),
        (LATER | {4: ("c", "2")}, "the snapshot has an older record of a key", "4"),
        (WRITTEN | {3: ("a", "3")}, "the value of a record differs from the source's", "3"),
        (
            WRITTEN | {3: ("a", "2", (b"h", b""))},
            "the headers of a record differs from the source's",
            "3",
        ),
    ],
)
def test_what_no_cleaner_does_is_a_finding(shown, problem, offset):
    (found,) = proof(WRITTEN, shown).problems
    assert (found["kind"], found["message"], found["facts"]["offset"]) == (
        "corruption",
        problem,
        offset,
    )
    assert found["facts"]["name"].endswith("-00000000000000000004.parquet")


def test_a_topic_that_does_not_compact_must_still_show_what_it_did_not_trim():
    kept = {2: ("c", "1"), 4: ("b", None), 14: ("z", "1")}
    (found,) = proof(WRITTEN, kept, compacted=False).problems
    assert found["message"] == "the snapshot has a record that the source lacks"
    assert found["facts"]["offset"] == "3"
    report = proof(WRITTEN, {4: ("b", None), 14: ("z", "1")}, compacted=False, log_start=4)
    assert (report.problems, report.compacted_since) == ([], 2)


def test_a_snapshot_beyond_the_sources_end_is_a_finding():
    (found,) = proof(WRITTEN, {0: ("a", "1")}, end=3).problems
    assert found["message"] == "the object ends beyond the source"

"""`compaction: log`: snapshots of the latest record of each key, over any forward gap.

Method: the real planner, executor and committer over a scripted source, which may hold what no
producer can write (a log that begins at 461), and a store in memory. Snapshots are read back by
pyarrow and compared with a dictionary that follows the log record by record.
"""

import io
import logging
import subprocess
import sys

import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kit.fakes.scripted import (
    TOPIC_ID,
    Log,
    ScriptedClient,
    SteppingClock,
    archive_spec,
    record,
    service,
)
from logmirror.archive.claims import latest_claim, read_claim
from logmirror.archive.object_check import check_object
from logmirror.clock import SYSTEM_CLOCK
from logmirror.errors import CorruptionError, PositionError, UnavailableError, UsageError
from logmirror.mirror.flow_state import MARGIN_MS
from logmirror.mirror.ports import FlowId, Slice
from logmirror.mirror.ports import Work as WorkOf
from logmirror.model import TimestampType, Trigger
from logmirror.testing import MemoryStore
from logmirror.to_archive.snapshot_transfer import SnapshotTransfer
from logmirror.wire.records import Record, encode_reference

DAY_MS = 86_400_000
COMPACTED = {"cleanup.policy": "compact", "delete.retention.ms": str(DAY_MS)}
SPEC = archive_spec(compaction="log")


def log_of(*records, **fields):
    """A log with one batch for each record, given as (offset, key, value)."""
    return Log([one(*found) for found in records], **fields)


def one(offset, key, value):
    return encode_reference(
        [Record(offset, 1_700_000_000_000 + offset, TimestampType.CREATE_TIME, key, value, ())]
    )


def until_now(log, store, *, spec=SPEC, clock=None, **options):
    client = ScriptedClient([log], configs=COMPACTED, response_batches=2, **options)
    with service(client, store, spec=spec, clock=clock or SteppingClock()) as (made, runner):
        made.run(until_now=True)
        return runner


def snapshots(store):
    """{(from, to): [(key, offset, value)]} in the order of the rows, checked as `verify` does."""
    found = {}
    for path, data in sorted(store.objects.items()):
        if path.startswith("."):
            continue
        folder, _, name = path.rpartition("/")
        assert check_object(store, folder, name, deep=True, compacted=True)
        table = pq.read_table(io.BytesIO(data))
        rows = zip(*(table.column(c).to_pylist() for c in ("key", "offset", "value")), strict=True)
        first, last = name.split(".")[0].split("-")
        found[int(first), int(last)] = list(rows)
    return found


@pytest.mark.mirror_v3("RUN-05")
def test_r3_a_log_whose_first_record_is_461_is_started():
    store = MemoryStore()
    until_now(log_of((461, b"k", b"v")), store)
    assert snapshots(store) == {(0, 461): [(b"k", 461, b"v")]}


@pytest.mark.mirror_v3("RUN-06", "FS-15")
def test_r4_r5_r6_forward_gaps_are_accepted_and_covered_by_the_name():
    store = MemoryStore()
    log = log_of((461, b"a", b"1"), (466, b"b", b"2"), (470, b"a", b"3"))
    until_now(log, store)
    assert snapshots(store) == {(0, 470): [(b"a", 470, b"3"), (b"b", 466, b"2")]}
    log.batches.append(one(480, b"b", None))
    runner = until_now(log, store)
    assert [s.first for tick in runner.ticks for s in tick] == [471]
    assert snapshots(store)[471, 480] == [(b"a", 470, b"3")]
    claim = latest_claim(store, "d", 0)
    assert [(h.first, h.last, h.cause.value) for h in claim.gaps] == [(471, 479, "compacted")]


def test_r7_a_source_that_lost_records_is_accepted_at_the_start(caplog):
    store, log = MemoryStore(), log_of(*((n, b"k%d" % n, b"v") for n in range(6)))
    until_now(log, store)
    log.batches = [one(n, b"k%d" % n, b"w") for n in range(8, 10)]
    log.log_start = 8
    with caplog.at_level(logging.WARNING):
        until_now(log, store)
    assert [r for r in caplog.records if r.facts.get("log_start") == 8]
    assert snapshots(store)[6, 9] == [(b"k8", 8, b"w"), (b"k9", 9, b"w")], "as a reader sees it"


def test_r7_a_source_that_loses_records_which_wait_is_an_error():
    store, log, clock = MemoryStore(), log_of((0, b"k", b"v")), SteppingClock()
    client = ScriptedClient([log], configs=COMPACTED)
    with service(client, store, spec=SPEC, clock=clock) as (made, _):

        def on_sleep():
            if clock.ms > 2000 and len(log.batches) == 1:
                log.batches += [one(1, b"k", b"v"), one(2, b"k", b"v")]
                log.batches, log.log_start = log.batches[2:], 2

        clock.on_sleep = on_sleep
        with pytest.raises(PositionError) as caught:
            made.run()
    assert caught.value.facts["log_start_offset"] == 2
    assert list(snapshots(store)) == [(0, 0)]


def test_r8_a_trimmed_log_is_started_at_its_low_watermark():
    records = [(n, b"k%d" % (n % 4), b"v%d" % n) for n in range(8, 12)]
    store = MemoryStore()
    until_now(log_of(*records, log_start=8), store)
    assert snapshots(store) == {(8, 11): [(k, n, v) for n, k, v in sorted(records)]}
    store = MemoryStore()
    with pytest.raises(PositionError) as caught:
        until_now(log_of(*records, log_start=8), store, spec=archive_spec())
    assert caught.value.facts["reason"] == "SourceTrimmed"
    assert store.objects == {}


def test_r1_a_source_that_ends_below_the_snapshot_is_refused():
    store, log = MemoryStore(), log_of((0, b"k", b"v"), (1, b"k", b"w"))
    until_now(log, store)
    before = dict(store.objects)
    log.batches.pop()
    with pytest.raises(PositionError) as caught:
        until_now(log, store)
    assert caught.value.facts["reason"] == "SourceWentBackwards"
    assert store.objects == before


KEYS = st.binary(min_size=0, max_size=2)
STEPS = st.lists(
    st.lists(st.tuples(KEYS, st.one_of(st.none(), st.binary(max_size=4))), max_size=12),
    min_size=1,
    max_size=5,
)


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None, max_examples=60)
@given(steps=STEPS)
@pytest.mark.mirror_v3("FS-12", "FS-13")
def test_every_snapshot_is_the_latest_value_of_each_key(steps):
    store, log, view, offset, expected = MemoryStore(), Log(), {}, 0, {}
    for step in steps:
        begin = offset
        for key, value in step:
            log.batches.append(one(offset, key, value))
            view[key] = (offset, value)
            offset += 1
        until_now(log, store)
        if step:
            rows = [(k, n, v) for k, (n, v) in sorted(view.items()) if v is not None]
            expected[begin, offset - 1] = rows
        assert snapshots(store) == expected


def test_headers_timestamps_and_empty_values_survive_snapshot_after_snapshot():
    headers = ((b"h", b"x"), (b"h", None), (b"", b""))
    odd = Record(0, 1_700_000_000_123, TimestampType.LOG_APPEND_TIME, b"", b"", headers)
    stamped = encode_reference([odd], timestamp_type=TimestampType.LOG_APPEND_TIME)
    log, store = Log([stamped]), MemoryStore()
    for offset in range(1, 4):
        until_now(log, store)
        log.batches.append(one(offset, b"other", b"%d" % offset))
    table = pq.read_table(io.BytesIO(store.objects[max(n for n in store.objects if n[0] == "d")]))
    row = table.to_pylist()[0]
    assert (row["key"], row["value"], row["offset"], row["timestampType"]) == (b"", b"", 0, 1)
    assert row["timestamp"].timestamp() == 1_700_000_000.123
    assert [(h["key"].encode(), h["value"]) for h in row["headers"]] == list(headers)


def test_old_snapshots_are_pruned_as_many_as_configured():
    for keep, left in ((None, 4), (2, 2), (1, 1)):
        store, log = MemoryStore(), Log()
        for offset in range(4):
            log.batches.append(one(offset, b"k%d" % offset, b"v"))
            until_now(log, store, spec=archive_spec(compaction="log", keep_snapshots=keep))
        found = snapshots(store)
        assert list(found) == [(n, n) for n in range(4 - left, 4)]
        assert len(found[3, 3]) == 4


def test_what_a_dead_predecessor_did_not_prune_goes_at_the_next_start():
    store, log = MemoryStore(), Log()
    for offset in range(4):
        log.batches.append(one(offset, b"k%d" % offset, b"v"))
        until_now(log, store)

    until_now(log, store, spec=archive_spec(compaction="log", keep_snapshots=2))

    assert list(snapshots(store)) == [(2, 2), (3, 3)]


def test_a_store_that_fails_while_old_snapshots_are_pruned_is_asked_again():
    refused = []

    def fail_twice(operation, name):
        if operation == "delete" and name.startswith("d/") and len(refused) < 2:
            refused.append(name)
            raise UnavailableError("no response")

    store, log = MemoryStore(before=fail_twice), Log()
    spec = archive_spec(compaction="log", keep_snapshots=1)
    for offset in range(4):
        log.batches.append(one(offset, b"k%d" % offset, b"v"))
        until_now(log, store, spec=spec)
    assert len(refused) == 2
    assert list(snapshots(store)) == [(3, 3)]


def test_pruned_and_lost_old_snapshots_do_not_disturb_the_next_one():
    store, log = MemoryStore(), Log()
    for offset in range(4):
        log.batches.append(one(offset, b"k%d" % offset, b"v"))
        until_now(log, store)
    for name in [n for n in store.objects if n.startswith("d/")][1:3]:
        store.delete(name)
    log.batches.append(one(4, b"k4", b"v"))
    until_now(log, store)
    assert list(snapshots(store)) == [(0, 0), (3, 3), (4, 4)]


@pytest.mark.mirror_v3("FS-17")
def test_keys_of_any_bytes_are_kept_and_sorted_as_bytes():
    keys = [b"\xff\xfe", b"", b"\x00", "ü".encode(), b"\x80", b"ascii"]
    store = MemoryStore()
    until_now(log_of(*((n, key, b"v") for n, key in enumerate(keys))), store)
    assert snapshots(store) == {(0, 5): [(key, keys.index(key), b"v") for key in sorted(keys)]}


@pytest.mark.mirror_v3("FS-16", "S3-09")
def test_a_record_without_a_key_is_refused():
    store = MemoryStore()
    with pytest.raises(UsageError) as caught:
        until_now(log_of((0, b"k", b"v"), (1, None, b"v")), store)
    assert caught.value.facts["offset"] == 1
    assert caught.value.facts["mirror"] == "m"
    assert store.objects == {}


def test_a_snapshot_that_rots_is_not_continued():
    log, store = log_of(*((n, b"k%d" % n, b"value") for n in range(50))), MemoryStore()
    until_now(log, store)
    [name] = [n for n in store.objects if n.startswith("d/")]
    log.batches.append(one(50, b"new", b"v"))
    whole = store.objects[name]
    at = whole.index(b"value") if b"value" in whole else 200
    store.objects[name] = whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :]
    with pytest.raises(CorruptionError) as caught:
        until_now(log, store)
    assert caught.value.facts["name"] in name
    assert [n for n in store.objects if n.startswith("d/")] == [name]


@pytest.mark.parametrize(("opening", "at_read"), [(1, 1), (2, 2), (3, 2)])
def test_a_snapshot_that_another_writer_prunes_while_it_is_read_is_looked_for_again(
    opening, at_read
):
    class Pruned(io.BytesIO):
        def read(self, size=-1):
            reads.append(size)
            if len(reads) == at_read:
                raise KeyError("gone")  # as a bucket's object between two ranges
            return super().read(size)

    def opened(name):
        openings.append(name)
        return (Pruned if len(openings) == opening else io.BytesIO)(whole(name).read())

    store, log, reads, openings = MemoryStore(), log_of((0, b"a", b"1")), [], []
    until_now(log, store)
    log.batches.append(one(1, b"b", b"1"))
    whole, store.open = store.open, opened
    until_now(log, store)
    store.open = whole
    assert (len(reads), len(openings) > opening) == (at_read, True)
    assert snapshots(store)[1, 1] == [(b"a", 0, b"1"), (b"b", 1, b"1")]


def archive_of_all_records(log, records):
    """A store with an object for each record, which it also adds to the log."""
    store = MemoryStore()
    for found in records:
        log.batches.append(one(*found))
        until_now(log, store, spec=archive_spec())
    return store


@pytest.mark.parametrize("keep", [None, 1])
@pytest.mark.parametrize("later_ms", [0, DAY_MS], ids=["merged", "rebuilt"])
def test_an_archive_of_all_records_is_not_continued_with_snapshots(keep, later_ms):
    log, clock = Log(), SteppingClock(SYSTEM_CLOCK.now_ms() + later_ms)
    store = archive_of_all_records(log, [(n, b"k", b"%d" % n) for n in range(3)])
    before = dict(store.objects)
    log.batches.append(one(3, b"k", b"x"))
    spec = archive_spec(compaction="log", keep_snapshots=keep)
    with pytest.raises(CorruptionError, match="not a snapshot") as caught:
        until_now(log, store, spec=spec, clock=clock)
    assert "cannot continue an archive of all records" in caught.value.hint
    assert store.objects == before


@pytest.mark.parametrize("found", ["all records", "damaged"])
def test_what_is_not_known_to_be_a_snapshot_is_not_pruned(caplog, found):
    store, log = MemoryStore(), Log()
    records = [(n, b"k%d" % n, b"v") for n in range(4)]
    for each in records:
        log.batches.append(one(*each))
        until_now(log, store)
    names = sorted(name for name in store.objects if name.startswith("d/"))
    other = archive_of_all_records(Log(), records).objects[names[1]]
    store.objects[names[1]] = other if found == "all records" else other[:-1]
    log.batches.append(one(4, b"k4", b"v"))

    until_now(log, store, spec=archive_spec(compaction="log", keep_snapshots=1))

    left = [name for name in sorted(store.objects) if name.startswith("d/")]
    assert [left[:-1], int(left[-1][-28:-8])] == [names[:2], 4]
    (warning,) = [r for r in caplog.records if r.levelno >= logging.WARNING]
    assert f"d/0/{warning.facts['name']}" == names[1]


def test_footers_are_checked_without_the_kernels(tmp_path):
    store, path = MemoryStore(), tmp_path / "object"
    until_now(log_of((0, b"k", b"v")), store)
    path.write_bytes(store.objects[next(n for n in store.objects if n.startswith("d/"))])
    program = """
import pathlib, sys, types
from logmirror.to_archive.snapshots import check_is_snapshot
store = types.SimpleNamespace(open=lambda _: pathlib.Path(sys.argv[1]).open("rb"))
check_is_snapshot(store, types.SimpleNamespace(folder="d/0"), "object")
sys.exit("numba" in sys.modules)
"""
    subprocess.run([sys.executable, "-c", program, path], check=True, timeout=60)


@pytest.mark.parametrize("later_ms", [DAY_MS, -3_600_000], ids=["old", "from a clock ahead"])
def test_a_snapshot_older_than_delete_retention_is_rebuilt(caplog, later_ms):
    store, clock = MemoryStore(), SteppingClock()
    log = log_of((0, b"gone", b"v"), (1, b"kept", b"v"))
    until_now(log, store, clock=clock)
    clock.wall_ms += later_ms
    # Meanwhile: a tombstone for `gone` at 2, the cleaner took the record, then the tombstone.
    log.batches = [one(1, b"kept", b"v"), one(3, b"new", b"v")]
    until_now(log, store, clock=clock)
    assert snapshots(store)[2, 3] == [(b"kept", 1, b"v"), (b"new", 3, b"v")]
    assert [r for r in caplog.records if r.levelno >= logging.WARNING] == []


def test_a_service_that_has_nothing_to_do_does_not_age():
    store, clock, log = MemoryStore(), SteppingClock(), log_of((0, b"a", b"v"))
    client = ScriptedClient([log], configs=COMPACTED)
    slices = []
    with service(client, store, spec=SPEC, clock=clock) as (made, runner):

        def on_sleep():
            if len(log.batches) == 1 and clock.ms > 5_000:
                if clock.wall_ms < 1_700_000_000_000 + 2 * DAY_MS:
                    clock.wall_ms += DAY_MS - MARGIN_MS - 10_000
                else:
                    log.batches.append(one(1, b"b", b"v"))
            if clock.ms > 20_000:
                made.stop()

        clock.on_sleep = on_sleep
        made.run()
        slices = [s for tick in runner.ticks for s in tick]
    assert [(s.first, s.rebuild) for s in slices] == [(0, True), (1, False)]
    assert list(snapshots(store)) == [(0, 0), (1, 1)]


@pytest.mark.parametrize(
    ("limits", "trigger"),
    [
        ({"max_offsets": 3}, Trigger.MAX_OFFSETS),
        ({"max_bytes": 3000}, Trigger.MAX_BYTES),
        ({"max_time_ms": 700}, Trigger.MAX_TIME),
        ({"daily_at_utc_s": 80_000}, Trigger.DAILY),
    ],
)
def test_a_snapshot_says_why_it_was_written(limits, trigger):
    log, store = log_of((0, b"a", b"v"), (1, b"b", b"v"), (2, b"c", b"v")), MemoryStore()
    # 2023-11-14T22:13:20Z, a little before 80,000 s past midnight.
    clock = SteppingClock(1_700_000_000_000 - 1_700_000_000_000 % DAY_MS + 79_998_000)
    spec = archive_spec(compaction="log", **{"max_time_ms": 10**9, "max_bytes": 10**9} | limits)
    with service(ScriptedClient([log], configs=COMPACTED), store, spec=spec, clock=clock) as (
        made,
        _,
    ):
        clock.on_sleep = lambda: made.stop() if clock.ms > 4_000 else None
        made.run()
    claim = read_claim(store, "d", 0, 0)
    assert (claim.trigger, claim.covered.last) == (trigger, 2)


def work(end, **fields):
    flow = FlowId(mirror="m", destination="d", topic="t", partition=0)
    slice_ = Slice(
        flow=flow,
        topic_id=TOPIC_ID,
        compacted=True,
        first=0,
        end=end,
        tail=Trigger.EXPLICIT,
        rebuild=True,
        seen_ms=1_700_000_000_000,
    )
    return WorkOf(slice=slice_, source=None, destination=SPEC, writer_id="w", estimated_bytes=1)


class Died(BaseException):
    """A writer that ends between claim and object."""


def die_before_publishing(log, end):
    """A store in which a writer claimed 0..end-1 and died."""

    def before(operation, _name):
        if operation == "publish":
            raise Died

    store = MemoryStore(before=before)
    client = ScriptedClient([log], configs=COMPACTED)
    with service(client, store, spec=SPEC) as (_, runner), pytest.raises(Died):
        runner.run([work(end)])
    living = MemoryStore()
    living.objects = dict(store.objects)
    assert [n for n in living.objects if not n.startswith(".")] == []
    return living


def test_a_claimed_range_is_written_as_it_was_claimed():
    log = log_of((0, b"a", b"1"), (1, b"b", b"1"), (2, b"a", b"2"))
    store = die_before_publishing(log, 2)
    until_now(log, store)
    assert snapshots(store) == {
        (0, 1): [(b"a", 0, b"1"), (b"b", 1, b"1")],
        (2, 2): [(b"a", 2, b"2"), (b"b", 1, b"1")],
    }


def test_a_claim_whose_records_were_compacted_since_is_kept_with_what_is_left():
    log = log_of((0, b"a", b"1"), (1, b"b", b"1"), (2, b"a", b"2"))
    store = die_before_publishing(log, 2)
    del log.batches[0]
    until_now(log, store)
    assert snapshots(store) == {
        (0, 1): [(b"b", 1, b"1")],
        (2, 2): [(b"a", 2, b"2"), (b"b", 1, b"1")],
    }


def test_records_are_put_aside_and_merged_when_they_do_not_fit(monkeypatch):
    monkeypatch.setattr("logmirror.archive.snapshots.RUNS_MAX", 4)
    monkeypatch.setattr("logmirror.archive.snapshots.CHUNK_BYTES", 64)
    monkeypatch.setattr(
        "logmirror.to_archive.snapshot_transfer.SnapshotTransfer.__init__.__kwdefaults__",
        SnapshotTransfer.__init__.__kwdefaults__ | {"run_bytes": 2000},
    )
    records = [(n, b"key-%03d" % (n * 7919 % 211), b"v%d" % n) for n in range(1500)]
    records += [(1500 + n, b"key-%03d" % n, None) for n in range(0, 211, 3)]
    store, log = (
        MemoryStore(),
        Log(
            [
                encode_reference(
                    [
                        record(n, key=k, value=v)
                        if v
                        else Record(n, 1, TimestampType.CREATE_TIME, k, None, ())
                        for n, k, v in records[at : at + 50]
                    ]
                )
                for at in range(0, len(records), 50)
            ]
        ),
    )
    until_now(log, store)
    view = {key: (n, value) for n, key, value in records}
    [rows] = snapshots(store).values()
    assert rows == [(k, n, v) for k, (n, v) in sorted(view.items()) if v is not None]

"""mirror-v3's matrix of archive destinations, case by case, in a directory and in an S3 bucket.

Each case has a mode (all records, or `compaction: log`), what is durable, what the source delivers
next, and the outcome: the objects and their offsets, or the error. mirror-v3 buffers records in the
destination; here they stay at the source until their slice is written, so "buffered" means
delivered by the same slice.

Method: the real planner, executor and committer over a scripted source, with the adapters for
directories and for S3, the latter on moto's server. Objects are read back by pyarrow, json and the
reference decoder, never by the code under test.
"""

import io
import json
from typing import NamedTuple

import pyarrow.parquet as pq
import pytest

from kit.fakes.scripted import (
    FixedResponses,
    Log,
    ScriptedClient,
    SteppingClock,
    archive_spec,
    batches,
    record,
    service,
)
from kit.judges.scrape import samples
from logmirror.archive.claims import latest_claim
from logmirror.clock import SYSTEM_CLOCK
from logmirror.errors import CorruptionError, PositionError, UsageError
from logmirror.mirror.observer import Observer
from logmirror.model import Trigger
from logmirror.monitoring.metrics import Recorder
from logmirror.stores.filesystem import FilesystemStore
from logmirror.stores.s3 import S3Store
from logmirror.stores.s3_calls import Calls
from logmirror.wire.records import decode_reference, encode_reference

COMPACT = {"cleanup.policy": "compact", "delete.retention.ms": "86400000"}
FAR = {"max_offsets": 10**6, "max_bytes": 1 << 30, "max_time_ms": 10**12}


@pytest.fixture(scope="module")
def fake_s3():
    from kit.fakes.fake_s3 import FakeS3  # noqa: PLC0415  # takes a second to load

    with FakeS3() as server:
        yield server


@pytest.fixture(params=["directory", "s3"])
def store(request, tmp_path):
    if request.param == "directory":
        return FilesystemStore(tmp_path / "archive", writer_id="w")
    fake = request.getfixturevalue("fake_s3")
    return S3Store(fake.location(fake.new_bucket()))


class Requests(Calls):
    """The requests of an S3 store, which are sent and counted."""

    def __init__(self, location):
        super().__init__(location, SYSTEM_CLOCK)
        self.sent = []

    def read(self, operation, **arguments):
        response = super().read(operation, **arguments)
        self.sent.append((operation, len(response.get("Contents", ()))))
        return response

    def write(self, operation, **arguments):
        self.sent.append((operation, arguments["Key"]))
        return super().write(operation, **arguments)

    def body(self, key, first=0, last=None):
        self.sent.append(("get_object", key))
        return super().body(key, first, last)


@pytest.fixture
def bucket(fake_s3):
    """A store in a new bucket, and the list of the requests that it sent."""
    location = fake_s3.location(fake_s3.new_bucket())
    requests = Requests(location)
    return S3Store(location, calls=requests), requests.sent


def spec_of(store, **changes):
    """The settings of an archive in this store."""
    where = {"location": store.location} if isinstance(store, S3Store) else {}
    return archive_spec(**where | changes)


def single(*offsets):
    """A batch for each offset."""
    return [encode_reference([record(offset, key=b"k%d" % offset)]) for offset in offsets]


def objects(store):
    """{(first, last): [(offset, value)]} of all objects of partition 0."""
    found = {}
    for name in store.names("d/0"):
        stem, _, extension = name.partition(".")
        data = store.read(f"d/0/{name}")
        if extension == "batches":
            rows = [(r.offset, r.value) for r in decode_reference(data)]
        elif extension == "parquet":
            table = pq.read_table(io.BytesIO(data)).select(["offset", "value"])
            rows = [(row["offset"], row["value"]) for row in table.to_pylist()]
        else:
            lines = [json.loads(line) for line in data.splitlines()]
            rows = [(line["offset"], line["value"].encode()) for line in lines]
        first, last = map(int, stem.split("-"))
        found[first, last] = rows
    return found


def offsets(store):
    return {covered: [offset for offset, _ in rows] for covered, rows in objects(store).items()}


def copy(client, store, spec, **options):
    """Run until now; returns the first offset of each slice."""
    clock = options.pop("clock", SteppingClock())
    with service(client, store, spec=spec, clock=clock, **options) as (made, runner):
        made.run(until_now=True)
    return [slice_.first for tick in runner.ticks for slice_ in tick]


# -- the matrix ------------------------------------------------------------------------------------


class Case(NamedTuple):
    """What is durable, what is delivered, and the outcome.

    `outcome` is the objects' ranges and offsets, or the error's reason, expected and got offset.
    """

    mode: str | None
    delivered: list[int]
    outcome: dict[tuple[int, int], list[int]] | tuple[str, int, int]
    durable: int = 0
    policy: str = "delete"


BACK, GAP = "SourceWentBackwards", "SourceGapAboveExpected"
LOG = "log"
MATRIX = {
    "FSM-01": Case(None, [0], {(0, 0): [0]}),
    "FSM-02": Case(None, [5], (GAP, 0, 5)),
    "FSM-02 compacted": Case(None, [5], {(0, 5): [5]}, policy="compact"),
    "FSM-03": Case(None, [3], (BACK, 5, 3), durable=5),
    "FSM-04": Case(None, [0, 1, 2, 3], {(0, 3): [0, 1, 2, 3]}),
    "FSM-05": Case(None, [0, 1, 2, 7], (GAP, 3, 7)),
    "FSM-05 compacted": Case(None, [0, 1, 2, 7], {(0, 7): [0, 1, 2, 7]}, policy="compact"),
    "FSM-06": Case(None, [0, 1, 2, 1], (BACK, 3, 1)),
    "FSM-07": Case(LOG, [0], {(0, 0): [0]}),
    "FSM-07 above": Case(LOG, [461], {(0, 461): [461]}),
    "FSM-08": Case(LOG, [3], (BACK, 5, 3), durable=5),
    "FSM-09": Case(LOG, [0, 1, 2, 3], {(0, 3): [0, 1, 2, 3]}),
    "FSM-09 above": Case(LOG, [0, 1, 2, 7], {(0, 7): [0, 1, 2, 7]}),
    "FSM-10": Case(LOG, [0, 1, 2, 1], (BACK, 3, 1)),
    "FSM-14": Case(None, [0, 1, 2, 3, 4], {(0, 4): [0, 1, 2, 3, 4]}),
    "FSM-15": Case(None, [0, 1, 5], {(0, 5): [0, 1, 5]}, policy="compact"),
    "FSM-16": Case(LOG, [0, 461, 466], {(0, 466): [0, 461, 466]}),
}


@pytest.mark.mirror_v3("S3-21", "RUN-04", "FSL-03", "S3-04", "TEE-14")
@pytest.mark.parametrize("case", MATRIX.values(), ids=MATRIX)
def test_each_case_of_the_matrix_has_its_outcome(store, case):
    configs = COMPACT if case.mode or case.policy == "compact" else {}
    spec, durable = spec_of(store, compaction=case.mode), list(range(case.durable))
    if case.durable:
        copy(ScriptedClient([Log(single(*durable))], configs=configs), store, spec)
    before = objects(store)
    assert list(before) == ([(0, case.durable - 1)] if case.durable else [])
    delivered = [single(offset) for offset in case.delivered]
    # After a refused record there is more to read, as there was when the slice was planned.
    end = max(*case.delivered, case.durable, 0) + (1 if isinstance(case.outcome, dict) else 5)
    client = FixedResponses(*delivered, end=end, configs=configs)

    if isinstance(case.outcome, dict):
        assert copy(client, store, spec) == [0]
        assert offsets(store) == case.outcome
        return

    with pytest.raises(PositionError) as caught:
        copy(client, store, spec)
    facts = caught.value.facts
    assert (facts["reason"], facts["expected"], facts["got"]) == case.outcome
    assert (facts["mirror"], facts["destination"], facts["partition"]) == ("m", "d", 0)
    assert objects(store) == before


@pytest.mark.mirror_v3("FSM-11", "RUN-11", "S3-21")
@pytest.mark.parametrize("start", [8, 461])
def test_snapshots_of_a_trimmed_log_begin_at_its_start(store, start):
    log = Log(single(start, start + 1), log_start=start)
    assert copy(ScriptedClient([log], configs=COMPACT), store, spec_of(store, compaction=LOG)) == [
        start
    ]
    assert offsets(store) == {(start, start + 1): [start, start + 1]}


@pytest.mark.mirror_v3("FSM-12", "S3-21")
def test_a_log_start_that_passes_records_which_wait_stops_the_mirror(store):
    """mirror-v3 refuses to align a buffer with records. Here the records are lost at the source."""
    log, clock, spec = Log(single(0)), SteppingClock(), spec_of(store, compaction=LOG)
    client = ScriptedClient([log], configs=COMPACT)

    def lose_1():
        if clock.ms > 2000 and len(log.batches) == 1:
            log.batches, log.log_start = single(2), 2

    with service(client, store, spec=spec, clock=clock) as (made, runner):
        clock.on_sleep = lose_1
        with pytest.raises(PositionError) as caught:
            made.run()

    assert runner.ticks[-1][0].first == 1, "the slice that needs the lost record was tried"
    facts = caught.value.facts
    assert (facts["mirror"], facts["destination"], facts["partition"]) == ("m", "d", 0)
    assert (facts["offset"], facts["log_start_offset"]) == (1, 2)
    assert offsets(store) == {(0, 0): [0]}


@pytest.mark.mirror_v3("FSM-13", "RUN-12", "S3-21")
def test_without_snapshots_a_trimmed_log_is_refused_before_anything_is_read(store):
    client = ScriptedClient([Log(single(461), log_start=461)])
    with pytest.raises(PositionError) as caught:
        copy(client, store, spec_of(store))
    facts = caught.value.facts
    assert (facts["reason"], facts["position"], facts["log_start"]) == ("SourceTrimmed", 0, 461)
    assert client.fetches == 0
    assert objects(store) == {}


@pytest.mark.mirror_v3("FSM-17", "FSM-18", "S3-21", "FS-04", "S3-03")
@pytest.mark.parametrize(
    ("mode", "held", "position"), [(None, [0, 1, 2], 3), (LOG, [0, 461, 466], 467)]
)
def test_the_position_is_behind_the_last_offset_of_the_name(store, mode, held, position):
    log, spec = Log(single(*held)), spec_of(store, compaction=mode)
    copy(ScriptedClient([log], configs=COMPACT), store, spec)
    log.batches += single(position)
    assert copy(ScriptedClient([log], configs=COMPACT), store, spec) == [position]


@pytest.mark.mirror_v3("FS-06", "S3-06")
def test_two_objects_that_overlap_are_refused_at_the_start(store):
    log = Log(single(0, 1, 2))
    copy(ScriptedClient([log]), store, spec_of(store))
    whole = store.read(f"d/0/{0:020d}-{2:020d}.parquet")
    store.create(f"d/0/{0:020d}-{5:020d}.parquet", whole)
    before = list(store.names("d/0"))
    log.batches += single(3)

    with pytest.raises(CorruptionError, match="overlap in the chain"):
        copy(ScriptedClient([log]), store, spec_of(store))

    assert list(store.names("d/0")) == before


@pytest.mark.mirror_v3("FS-16", "S3-09")
def test_snapshots_refuse_a_record_without_a_key(store):
    log = Log([*single(0), encode_reference([record(1, key=None)])])
    with pytest.raises(UsageError) as caught:
        copy(ScriptedClient([log], configs=COMPACT), store, spec_of(store, compaction=LOG))
    assert (caught.value.facts["destination"], caught.value.facts["offset"]) == ("d", 1)
    assert objects(store) == {}


# -- the loop --------------------------------------------------------------------------------------


@pytest.mark.mirror_v3("RUN-02", "RUN-13")
@pytest.mark.parametrize("form", ["native", "parquet", "ndjson"])
def test_records_are_written_in_order_from_the_position(store, form):
    """The chain holds 0 to 9; the source delivers 10, 11 and 12."""
    log, spec = Log(batches(0, 10)), spec_of(store, format=form, encoding="utf8")
    copy(ScriptedClient([log]), store, spec)
    log.batches = single(10, 11, 12)
    log.log_start = 10

    assert copy(ScriptedClient([log], response_batches=1), store, spec) == [10]

    rows = objects(store)
    assert list(rows) == [(0, 9), (10, 12)]
    written = [row for covered in sorted(rows) for row in rows[covered]]
    assert written == [(offset, b"value-%d" % offset) for offset in range(13)]


@pytest.mark.mirror_v3("RUN-10", "FS-01", "S3-01")
def test_an_empty_destination_begins_at_0(store):
    assert copy(ScriptedClient([Log(single(0))]), store, spec_of(store)) == [0]
    assert objects(store) == {(0, 0): [(0, b"value-0")]}


@pytest.mark.mirror_v3("OBS-05", "FS-22")
@pytest.mark.parametrize("observed", [False, True])
def test_the_copy_is_the_same_without_an_observer(store, observed):
    clock = SteppingClock()
    observer = Observer(["m"], Recorder(), clock, heartbeat_ms=0) if observed else None
    log = Log(single(*range(25)))
    more = {"observer": observer} if observed else {}
    copy(ScriptedClient([log]), store, spec_of(store, max_offsets=10), clock=clock, **more)
    assert offsets(store) == {
        (0, 9): list(range(10)),
        (10, 19): list(range(10, 20)),
        (20, 24): list(range(20, 25)),
    }


@pytest.mark.mirror_v3("FS-02", "S3-02")
def test_nothing_is_written_before_a_limit_and_max_offsets_cuts_exactly(store):
    log, clock = Log(single(0, 1)), SteppingClock()
    client, spec, early = ScriptedClient([log]), spec_of(store, **FAR | {"max_offsets": 3}), []
    with service(client, store, spec=spec, clock=clock) as (made, _):

        def grow():
            if len(log.batches) == 2 and clock.ms > 5000:
                early.append(objects(store))
                log.batches += single(2, 3, 4, 5)
            if clock.ms > 10_000:
                early.append(offsets(store))
                made.stop()

        clock.on_sleep = grow
        made.run()
    assert early[0] == {}
    assert early[1] == offsets(store) == {(0, 2): [0, 1, 2], (3, 5): [3, 4, 5]}


@pytest.mark.mirror_v3("FS-18", "FS-21", "RUN-14")
@pytest.mark.parametrize("held", [0, 2])
def test_a_stop_flushes_once_and_writes_nothing_when_nothing_waits(store, held):
    client, clock, recorder = (
        ScriptedClient([Log(single(*range(held)))]),
        SteppingClock(),
        Recorder(),
    )
    observer = Observer(["m"], recorder, clock, heartbeat_ms=0)
    more = {"spec": spec_of(store, **FAR), "clock": clock, "observer": observer}
    with service(client, store, **more) as (made, _):
        clock.on_sleep = lambda: made.stop() if clock.ms > 3000 else None
        made.run()
    assert offsets(store) == ({(0, 1): [0, 1]} if held else {})
    counted = {key: n for key, n in samples(recorder).items() if "flushes_total" in key[0]}
    flush = ("destination_flushes_total", ("m", "d", "t", "0", "explicit"))
    assert counted == ({flush: 1} if held else {})


# -- snapshots, over gaps --------------------------------------------------------------------------


@pytest.mark.mirror_v3("FSL-04", "FSL-05", "RUN-05", "RUN-06", "S3-07", "S3-08", "FS-14")
def test_snapshots_over_gaps_are_objects_that_cover_them(store):
    """Two keys at 461, 466 and 470: one object 0 to 470 with two rows. Then one more record."""
    spec = spec_of(store, compaction=LOG)
    held = ((461, b"a"), (466, b"b"), (470, b"a"))
    log = Log([encode_reference([record(offset, key=key)]) for offset, key in held])
    copy(ScriptedClient([log], configs=COMPACT), store, spec)
    assert offsets(store) == {(0, 470): [470, 466]}

    log.batches.append(encode_reference([record(480, key=b"b")]))
    assert copy(ScriptedClient([log], configs=COMPACT), store, spec) == [471]
    assert offsets(store) == {(0, 470): [470, 466], (471, 480): [470, 480]}


# -- the requests of a bucket ----------------------------------------------------------------------


@pytest.mark.mirror_v3("S3-12", "S3-13")
@pytest.mark.parametrize("mode", [None, LOG])
def test_an_idle_mirror_lists_one_object_in_each_drift_check_and_sends_nothing_else(bucket, mode):
    store, sent = bucket
    clock, log = SteppingClock(), Log(single(*range(20)))
    spec = spec_of(store, max_offsets=5, drift_check_ms=10_000, compaction=mode)
    client = ScriptedClient([log], configs=COMPACT)
    with service(client, store, spec=spec, clock=clock) as (made, _):

        def on_sleep():
            if clock.ms <= 30_000:
                sent.clear()
            elif clock.ms >= 90_000:
                made.stop()

        clock.on_sleep = on_sleep
        made.run()
    assert set(sent) == {("list_objects_v2", 1)}
    assert 5 <= len(sent) <= 7, "60 s, and a check every 10 s"


@pytest.mark.mirror_v3("S3-11")
def test_a_start_reads_one_claim_and_no_object(bucket):
    store, sent = bucket
    log = Log(single(*range(20)))
    copy(ScriptedClient([log]), store, spec_of(store, max_offsets=5))
    assert len(objects(store)) == 4
    sent.clear()

    assert copy(ScriptedClient([log]), store, spec_of(store, max_offsets=5)) == []

    read = [key for operation, key in sent if operation != "list_objects_v2"]
    assert read == [f".logmirror/claims/d/0/{15:020d}"]


@pytest.mark.mirror_v3("S3-10")
def test_max_time_flushes_while_no_record_arrives(bucket):
    store, sent = bucket
    clock, log, found = SteppingClock(), Log(single(0, 1)), {}
    spec = spec_of(store, **FAR | {"max_time_ms": 4000})
    with service(ScriptedClient([log]), store, spec=spec, clock=clock) as (made, _):

        def on_sleep():
            writes = [name for operation, name in sent if operation == "put_object"]
            found.setdefault(bool(writes), clock.ms)
            if clock.ms > 10_000:
                found["objects"] = offsets(store)
                made.stop()

        clock.on_sleep = on_sleep
        made.run()
    assert found["objects"] == {(0, 1): [0, 1]}
    assert 4000 <= found[True] <= 5000
    assert latest_claim(store, "d", 0).trigger is Trigger.MAX_TIME


@pytest.mark.mirror_v3("S3-14")
def test_a_foreign_object_in_a_bucket_is_found_by_the_next_drift_check(bucket):
    store, _ = bucket
    clock, log = SteppingClock(), Log(single(*range(5)))
    spec = spec_of(store, drift_check_ms=10_000)
    with service(ScriptedClient([log]), store, spec=spec, clock=clock) as (made, _):

        def on_sleep():
            if clock.ms >= 5000 and len(objects(store)) == 1:
                name = f"{7:020d}-{9:020d}.parquet"
                store.create(f"d/0/{name}", store.read(f"d/0/{0:020d}-{4:020d}.parquet"))
            assert clock.ms < 30_000, "it was not found"

        clock.on_sleep = on_sleep
        with pytest.raises(Exception, match="gap in the chain"):
            made.run()

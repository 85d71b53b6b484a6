"""Where objects end in a log with offset gaps: a name spans a gap.

Method: a slow rule, record by record, says which objects a log makes. The transfer must make the
same ones from a scripted source, for any size of fetch responses and any division into slices. The
objects are read back by independent readers.
"""

from dataclasses import dataclass, field
from itertools import pairwise

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kit.fakes.scripted import (
    TOPIC_ID,
    Log,
    ScriptedClient,
    archive_spec,
    batches,
    record,
    run_slice,
    service,
)
from kit.runs.objects import offsets_of
from logmirror.archive.claims import Claim, claim_name
from logmirror.mirror.ports import FlowId, Slice
from logmirror.model import OffsetRange, Trigger
from logmirror.testing import MemoryStore
from logmirror.wire.batch_header import MarkerType
from logmirror.wire.compression import Codec
from logmirror.wire.records import encode_marker, encode_reference

FLOW = FlowId(mirror="m", destination="d", topic="t", partition=0)
ROWS = ["parquet", "ndjson"]
FORMATS = [*ROWS, "native"]
FAR = 1_000_000


def slice_of(first, end, *, tail=Trigger.EXPLICIT, compacted=True, **fields):
    return Slice(
        flow=FLOW,
        topic_id=TOPIC_ID,
        compacted=compacted,
        first=first,
        end=end,
        tail=tail,
        **fields,
    )


def copy(log, slice_, *, store=None, response_batches=3, **spec):
    store = MemoryStore() if store is None else store
    client = ScriptedClient([log], response_batches=response_batches)
    return store, run_slice(client, store, slice_, archive_spec(**spec))


def covered(result):
    assert result.error is None
    return [(r.covered.first, r.covered.last, r.trigger.value) for r in result.receipts]


def far_log(*, codec=Codec.NONE):
    """One record, at offset 1,000,000 of a compacted topic."""
    return Log([encode_reference([record(FAR)], codec=codec)])


@pytest.mark.parametrize("kind", ROWS)
@pytest.mark.parametrize("codec", [Codec.NONE, Codec.ZSTD])
def test_a_gap_of_a_million_offsets_is_one_object_whatever_max_offsets_is(kind, codec):
    store, result = copy(far_log(codec=codec), slice_of(0, FAR + 1), format=kind, max_offsets=1000)
    assert covered(result) == [(0, FAR - 1, "max-offsets"), (FAR, FAR, "explicit")]
    assert offsets_of(store) == {(0, FAR - 1): [], (FAR, FAR): [FAR]}
    assert [r.gaps.compacted for r in result.receipts] == [FAR, 0]


def test_a_native_object_ends_with_the_batch_behind_the_gap():
    store, result = copy(far_log(), slice_of(0, FAR + 1), format="native", max_offsets=1000)
    assert covered(result) == [(0, FAR, "max-offsets")]
    assert offsets_of(store) == {(0, FAR): [FAR]}


@pytest.mark.parametrize("kind", ROWS)
def test_a_record_at_the_last_offset_ends_the_object_before_the_gap(kind):
    log = Log([*batches(0, 10), *batches(500, 502)])
    store, result = copy(log, slice_of(0, 502), format=kind, max_offsets=10)
    assert covered(result) == [
        (0, 9, "max-offsets"),
        (10, 499, "max-offsets"),
        (500, 501, "explicit"),
    ]
    assert offsets_of(store)[10, 499] == []


@pytest.mark.parametrize("kind", ROWS)
def test_a_gap_inside_a_batch_is_spanned_too(kind):
    batch = encode_reference([record(o) for o in (0, 3, 90, 91)], last_offset=95)
    store, result = copy(Log([batch]), slice_of(0, 96), format=kind, max_offsets=10)
    assert covered(result) == [(0, 89, "max-offsets"), (90, 95, "explicit")]
    assert offsets_of(store) == {(0, 89): [0, 3], (90, 95): [90, 91]}
    assert [r.gaps.compacted for r in result.receipts] == [88, 4]


@pytest.mark.parametrize("kind", ROWS)
@pytest.mark.parametrize("responses", [1, 10])
def test_markers_and_aborted_records_are_spanned_too(kind, responses):
    """No policy of the topic is needed for these gaps: their causes are in the log."""
    fields = {"producer_id": 7, "producer_epoch": 0, "transactional": True}
    log = Log(
        [
            *batches(0, 5),
            *batches(5, 40, base_sequence=0, **fields),
            encode_marker(MarkerType.ABORT, offset=40, producer_id=7),
            *batches(41, 45),
        ],
        aborted=((7, 5, 40),),
    )
    slice_ = slice_of(0, 45, compacted=False)
    store, result = copy(log, slice_, response_batches=responses, format=kind, max_offsets=8)
    assert covered(result) == [(0, 40, "max-offsets"), (41, 44, "explicit")]
    assert offsets_of(store) == {(0, 40): [0, 1, 2, 3, 4], (41, 44): [41, 42, 43, 44]}
    assert [r.gaps.offset_count for r in result.receipts] == [36, 0]


@pytest.mark.parametrize("kind", FORMATS)
def test_a_gap_whose_end_is_not_known_is_written_by_the_tail_only(kind):
    """0-4, then markers up to the last stable offset: where the gap ends is not in the log yet."""
    markers = [encode_marker(MarkerType.COMMIT, offset=o, producer_id=7) for o in range(5, 30)]
    log = Log([*batches(0, 5), *markers])
    kind_spec = {"format": kind, "max_offsets": 50 if kind == "native" else 10}
    store, result = copy(log, slice_of(0, 30, tail=None), **kind_spec)
    assert (covered(result), result.next_offset, store.objects) == ([], 30, {})
    store, result = copy(log, slice_of(0, 30, tail=Trigger.MAX_TIME), **kind_spec)
    assert covered(result) == [(0, 29, "max-time")]


@pytest.mark.parametrize("kind", FORMATS)
def test_a_slice_that_ends_inside_a_gap_leaves_the_rest_to_the_next_one(kind):
    """As the driver divides a long backlog: the second slice is staged."""
    log = Log([*batches(0, 5), *batches(900, 905)])
    store, result = copy(log, slice_of(0, 400), format=kind, max_offsets=10)
    assert covered(result) == [(0, 399, "explicit")]
    _, result = copy(log, slice_of(400, 905, staged=True), store=store, format=kind, max_offsets=10)
    ends = [(400, 904)] if kind == "native" else [(400, 899), (900, 904)]
    assert [(first, last) for first, last, _ in covered(result)] == ends


@pytest.mark.parametrize("kind", ROWS)
def test_a_claim_that_ends_inside_a_gap_is_carried_out(kind):
    """Older versions cut there; and the log cleaner may remove records between two attempts."""
    store, log = MemoryStore(), Log([*batches(0, 5), *batches(900, 905)])
    claim = Claim(
        covered=OffsetRange(first=0, last=9),
        digest="xxh3:" + "0" * 32,
        writer="gone",
        topic="t",
        topic_id=TOPIC_ID.hex(),
        partition=0,
        created_ms=1,
        record_count=5,
        trigger=Trigger.MAX_OFFSETS,
        rewritable=True,
    )
    store.create(claim_name("d", 0, 0), claim.to_bytes())
    _, result = copy(log, slice_of(0, 905), store=store, format=kind, max_offsets=10)
    assert covered(result) == [
        (0, 9, "max-offsets"),
        (10, 899, "max-offsets"),
        (900, 904, "explicit"),
    ]


def test_a_whole_run_over_a_far_record_makes_two_objects_and_two_claims():
    """The driver's loop, with the limit that made a thousand empty objects."""
    store, client = MemoryStore(), ScriptedClient([far_log()])
    client.configs = {"cleanup.policy": "compact"}
    with service(client, store, spec=archive_spec(max_offsets=1000), slots=4) as (made, runner):
        made.run(until_now=True)
    objects = [name for name in store.objects if not name.startswith(".")]
    claims = [name for name in store.objects if name.startswith(".logmirror/claims/")]
    assert (len(objects), len(claims)) == (2, 2)
    assert len(runner.ticks) <= 2


# Any log, any responses, any slices


@dataclass
class Drawn:
    """A log, and what a slow reader knows of it."""

    log: Log = field(default_factory=Log)
    records: list[tuple[int, int]] = field(default_factory=list)
    """(offset, payload bytes) of the visible records."""

    spans: list[tuple[int, int, int]] = field(default_factory=list)
    """(first offset, last offset, bytes) of the batches."""

    def add(self, batch, first, last, records=()):
        self.log.batches.append(batch)
        self.spans.append((first, last, len(batch)))
        self.records += [(r.offset, len(r.key) + len(r.value)) for r in records]


TRANSACTION = {"producer_id": 7, "producer_epoch": 0, "transactional": True, "base_sequence": 0}
GAPS = st.one_of(st.just(0), st.integers(0, 3), st.integers(0, 60))


@st.composite
def logs(draw):
    drawn, at = Drawn(), 0
    for _ in range(draw(st.integers(1, 10))):
        at += draw(GAPS)
        kind = draw(st.sampled_from(["data", "data", "data", "marker", "aborted"]))
        if kind == "marker":
            drawn.add(encode_marker(MarkerType.COMMIT, offset=at, producer_id=9), at, at)
            at += 1
            continue
        steps = draw(st.lists(st.one_of(st.just(1), st.integers(1, 20)), min_size=1, max_size=8))
        offsets = [at + sum(steps[:n]) - steps[0] for n in range(1, len(steps) + 1)]
        last = offsets[-1] + draw(GAPS)
        rows = [record(offset) for offset in offsets]
        fields = TRANSACTION if kind == "aborted" else {}
        batch = encode_reference(rows, last_offset=last, **fields)
        drawn.add(batch, at, last, () if kind == "aborted" else rows)
        at = last + 1
        if kind == "aborted":
            drawn.add(encode_marker(MarkerType.ABORT, offset=at, producer_id=7), at, at)
            drawn.log.aborted += ((7, offsets[0], at),)
            at += 1
    return drawn


def expected_ends(units, end, *, max_offsets, max_bytes, whole):
    """The rule, unit by unit: records, or batches if `whole`."""
    ends, first, filled = [], 0, 0
    for start, last, size in units:
        if not whole and start >= first + max_offsets:
            ends.append((first, start - 1))
            first, filled = start, 0
        filled += size
        if last >= first + max_offsets - 1 or filled >= max_bytes:
            ends.append((first, last))
            first, filled = last + 1, 0
    return ends if first >= end else [*ends, (first, end - 1)]


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None, max_examples=120)
@given(
    drawn=logs(),
    kind=st.sampled_from(FORMATS),
    limits=st.fixed_dictionaries(
        {"max_bytes": st.integers(1, 400), "max_offsets": st.integers(1, 40)}
    ),
    responses=st.integers(1, 5),
    splits=st.lists(st.integers(1, 200), max_size=4),
)
def test_objects_are_the_same_for_any_fetch_sizes_and_slices(
    drawn, kind, limits, responses, splits
):
    log, end = drawn.log, drawn.log.end
    is_native = kind == "native"
    units = drawn.spans if is_native else [(offset, offset, n) for offset, n in drawn.records]
    expected = expected_ends(units, end, whole=is_native, **limits)

    store, position = MemoryStore(), 0
    for until in [*sorted(split for split in splits if split < end), end]:
        if position >= until:
            continue
        tail = Trigger.EXPLICIT if until == end else None
        _, result = copy(
            log,
            slice_of(position, until, tail=tail),
            store=store,
            response_batches=responses,
            format=kind,
            **limits,
        )
        assert result.error is None
        position = max((r.covered.next_offset for r in result.receipts), default=position)

    found = sorted(offsets_of(store).items())
    assert [ends for ends, _ in found] == expected
    assert all(one[1] + 1 == next_[0] for (one, _), (next_, _) in pairwise(found))
    if not is_native:
        visible = [offset for offset, _ in drawn.records]
        assert [offset for _, offsets in found for offset in offsets] == visible
        assert all(one or next_ for (_, one), (_, next_) in pairwise(found))

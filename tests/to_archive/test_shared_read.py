"""Slices at one position share one read, and each stays independent.

Method: the scripted log of test_transfer.py, read by groups of slices with different formats,
limits, ends and stores. The result of each is compared, byte for byte, with its result when it runs
alone; fetches and decodings are counted.
"""

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kit.fakes.scripted import TOPIC_ID, Log, ScriptedClient, archive_spec, batches, record
from kit.runs.record_batches import with_right_checksums
from logmirror.archive.claims import claim_name
from logmirror.engine.spark import pack
from logmirror.errors import CorruptionError, PositionError, UnavailableError
from logmirror.locations import FolderLocation
from logmirror.mirror.ports import FlowId, KafkaSpec, Slice, Work
from logmirror.mirror.units import units
from logmirror.model import Trigger
from logmirror.source.partition import FetchBuffer, KafkaSource
from logmirror.testing import MemoryStore
from logmirror.to_archive.shared_read import carry_out
from logmirror.to_archive.transfer import Transfer
from logmirror.wire.batch_header import MarkerType
from logmirror.wire.compression import Codec
from logmirror.wire.decode import RecordDecoder
from logmirror.wire.records import encode_marker, encode_reference

FORMATS = ["native", "parquet", "ndjson"]


class CountingDecoder(RecordDecoder):
    """Counts how often rows are decoded."""

    def __init__(self):
        super().__init__()
        self.decodings = 0

    def decode(self, buffer, batches, *, first, end):
        self.decodings += 1
        return super().decode(buffer, batches, first=first, end=end)


class FixedClock:
    """Claims say when they were made; here always at the same time."""

    def monotonic_ms(self):
        return 0

    def now_ms(self):
        return 1


def work_of(name, *, first=0, end=20, tail=Trigger.EXPLICIT, compacted=False, **spec):
    budget_bytes = spec.pop("budget_bytes", 1 << 30)
    return Work(
        slice=Slice(
            flow=FlowId(mirror="m", destination=name, topic="t", partition=0),
            topic_id=TOPIC_ID,
            compacted=compacted,
            first=first,
            end=end,
            tail=tail,
            staged=spec.pop("staged", False),
            budget_bytes=budget_bytes,
        ),
        source=None,
        destination=archive_spec(location=FolderLocation(f"/{name}"), **spec),
        writer_id="w",
        estimated_bytes=1,
    )


class Copied:
    """What a group of works left: results and stores by destination, and what it cost."""

    def __init__(self, log, works, *, stores=None, response_batches=3):
        names = [work.slice.flow.destination for work in works]
        self.stores = {name: MemoryStore() for name in names} | (stores or {})
        client = ScriptedClient([log], response_batches=response_batches)
        decoder = CountingDecoder()
        source = KafkaSource(
            client, works[0].slice.flow.source, topic_id=TOPIC_ID, buffer=FetchBuffer(64)
        )
        transfers = [
            Transfer(work, self.stores[name], decoder, clock=FixedClock())
            for name, work in zip(names, works, strict=True)
        ]
        results = carry_out(transfers, source, decoder)
        self.results = dict(zip(names, results, strict=True))
        self.fetches, self.decodings = client.fetches, decoder.decodings

    def left(self, name):
        """Everything of one destination that can be seen: objects, receipts, how far it read."""
        store, result = self.stores[name], self.results[name]
        receipts = [
            replace(receipt, token=receipt.token and store.staged[receipt.token])
            for receipt in result.receipts
        ]
        error = (type(result.error), str(result.error)) if result.error else None
        rest_bytes = 0 if error else result.rest_bytes  # a guess for plans, of no use after errors
        return store.objects, receipts, rest_bytes, result.next_offset, error

    def ranges(self, name):
        return [(r.covered.first, r.covered.last) for r in self.results[name].receipts]


def assert_as_alone(log, works, **options):
    """Run works together and each by itself; returns the first after comparing."""
    together = Copied(log, works, **options)
    for work in works:
        name = work.slice.flow.destination
        assert together.left(name) == Copied(log, [work], **options).left(name)
        assert not together.results[name].error or "destination" in str(
            together.results[name].error
        )
    return together


def three(**changes):
    return [work_of(kind, format=kind, **changes) for kind in FORMATS]


def test_three_formats_cost_the_fetches_and_decodings_of_one():
    log = Log(batches(0, 60, codec=Codec.ZSTD))
    alone = Copied(log, [work_of("parquet", end=60, max_offsets=25)])
    together = assert_as_alone(log, three(end=60, max_offsets=25))
    assert together.fetches == alone.fetches
    assert together.decodings == alone.decodings > 1
    assert together.ranges("ndjson") == [(0, 24), (25, 49), (50, 59)]
    assert together.ranges("native") == [(0, 24), (25, 49), (50, 59)]


def test_nothing_is_decoded_where_all_are_native():
    works = [work_of(name, format="native", end=60) for name in "abc"]
    together = assert_as_alone(Log(batches(0, 60)), works)
    assert (together.fetches, together.decodings) == (
        Copied(Log(batches(0, 60)), works[:1]).fetches,
        0,
    )


def drawn_log(sizes, codec):
    """Data, aborted transactions and their markers, in turns."""
    log, first, aborted = Log(), 0, []
    for number, size in enumerate(sizes):
        if number % 4 == 3:
            fields = {"producer_id": number, "producer_epoch": 0, "transactional": True}
            log.batches += batches(first, first + size, size, base_sequence=0, **fields)
            marker = encode_marker(MarkerType.ABORT, offset=first + size, producer_id=number)
            log.batches.append(marker)
            aborted.append((number, first, first + size))
            first += 1
        else:
            log.batches += batches(first, first + size, size, codec=codec)
        first += size
    log.aborted = tuple(aborted)
    return log


@st.composite
def groups(draw):
    """A log, and slices that begin together with limits and ends of their own."""
    sizes = draw(st.lists(st.integers(1, 9), min_size=1, max_size=12))
    log = drawn_log(sizes, draw(st.sampled_from([Codec.NONE, Codec.LZ4])))
    works = [
        work_of(
            f"{number}-{kind}",
            format=kind,
            end=draw(st.integers(1, log.end)),
            tail=draw(st.sampled_from([None, Trigger.MAX_TIME])),
            max_bytes=draw(st.integers(1, 400)),
            max_offsets=draw(st.integers(1, 40)),
            budget_bytes=draw(st.sampled_from([1, 300, 1 << 30])),
        )
        for number, kind in enumerate(
            draw(st.lists(st.sampled_from(FORMATS), min_size=2, max_size=5))
        )
    ]
    return log, works, draw(st.integers(1, 5))


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None, max_examples=40)
@given(drawn=groups())
@pytest.mark.mirror_v3("TEE-01")
def test_whatever_is_read_together_each_leaves_what_it_leaves_alone(drawn):
    log, works, response_batches = drawn
    assert_as_alone(log, works, response_batches=response_batches)


@pytest.mark.parametrize("ends", [(7, 20, 60), (60, 20, 7)])
def test_other_ends_are_kept_and_nothing_is_fetched_twice_for_them(ends):
    log = Log(batches(0, 60))
    works = [work_of(f"{end}", end=end) for end in ends]
    together = assert_as_alone(log, works)
    assert [together.ranges(f"{end}") for end in ends] == [[(0, end - 1)] for end in ends]
    assert together.fetches == Copied(log, [work_of("60", end=60)]).fetches


def test_what_is_wrong_behind_an_end_is_not_that_slices_business():
    log = Log([*batches(0, 10), encode_reference([record(10, value=b"x" * 40)])])
    broken = bytearray(log.batches[-1])
    broken[61] = 0x7F  # the first record's length, which no longer fits
    log.batches[-1] = with_right_checksums(bytes(broken))
    works = [work_of("short", end=10), work_of("long", end=11)]
    works.append(work_of("native", end=11, format="native"))
    together = assert_as_alone(log, works, response_batches=9)
    assert together.ranges("short") == [(0, 9)]
    assert together.ranges("native") == [(0, 10)]
    assert isinstance(together.results["long"].error, CorruptionError)
    assert together.results["long"].error.facts["destination"] == "long"
    assert together.results["short"].error is None
    assert all(store.staged == {} for store in together.stores.values())


@pytest.mark.mirror_v3("TEE-03")
@pytest.mark.parametrize("operation", ["stage", "create", "publish"])
@pytest.mark.parametrize("kind", FORMATS)
def test_a_store_that_is_down_ends_its_slice_and_no_other(operation, kind):
    def before(asked, _name):
        if asked == operation:
            raise UnavailableError("no space left")

    log, works = Log(batches(0, 60)), three(end=60, max_offsets=25)
    down = MemoryStore(before=before)
    together = Copied(log, works, stores={kind: down})
    assert isinstance(together.results[kind].error, UnavailableError)
    assert together.results[kind].error.facts["destination"] == kind
    assert down.staged == {}
    assert not any(name.startswith(kind) for name in down.objects)
    alone = Copied(log, works)
    for other in set(FORMATS) - {kind}:
        assert together.left(other) == alone.left(other)
    assert together.fetches == alone.fetches


def test_a_source_that_fails_ends_all_each_with_its_own_facts():
    log = Log(batches(0, 20))
    log.batches[2] = log.batches[2][:-3] + b"\xff" + log.batches[2][-2:]
    together = assert_as_alone(log, three(max_offsets=5), response_batches=1)
    assert [type(r.error) for r in together.results.values()] == [CorruptionError] * 3
    assert [r.error.facts["destination"] for r in together.results.values()] == FORMATS
    assert together.ranges("native") == together.ranges("parquet") == [(0, 4), (5, 9)]


@pytest.mark.mirror_v3("TEE-06")
def test_a_gap_fails_those_whose_topic_does_not_compact():
    log = Log([*batches(0, 5), *batches(30, 35)])
    works = [work_of("append", end=35), work_of("compacted", end=35, compacted=True)]
    together = assert_as_alone(log, works)
    assert isinstance(together.results["append"].error, PositionError)
    assert together.ranges("compacted") == [(0, 34)]


def claim_over(first, last, kind, log):
    """The claim that a writer which wanted exactly this range has left."""
    dead = Copied(log, [work_of("d", format=kind, first=first, end=last + 1)])
    return dead.stores["d"].objects[claim_name("d", 0, first)]


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("last", [9, 19, 59])
def test_a_standing_claim_is_carried_out_beside_others_that_meet_none(kind, last):
    """I2 holds for each destination by itself."""
    log, works = Log(batches(0, 60)), three(end=20)
    store = MemoryStore()
    store.create(claim_name(kind, 0, 0), claim_over(0, last, kind, log))
    together = Copied(log, works, stores={kind: store})
    ranges = [(0, last)] if last >= 19 else [(0, last), (last + 1, 19)]
    assert together.ranges(kind) == ranges
    assert [together.ranges(other) for other in FORMATS if other != kind] == [[(0, 19)]] * 2
    assert all(result.error is None for result in together.results.values())


def test_a_claim_found_while_reading_restarts_only_its_slice():
    log, works = Log(batches(0, 60)), three(end=60, max_offsets=20)
    claim = claim_over(20, 29, "parquet", log)
    name = claim_name("parquet", 0, 20)

    def before(operation, asked):
        if operation == "create" and asked == name:
            store.before = lambda *_: None
            store.objects[name] = claim

    store = MemoryStore(before=before)
    together = Copied(log, works, stores={"parquet": store})
    assert together.ranges("parquet") == [(0, 19), (20, 29), (30, 49), (50, 59)]
    assert together.ranges("native") == [(0, 19), (20, 39), (40, 59)]
    assert together.ranges("ndjson") == [(0, 19), (20, 39), (40, 59)]
    assert store.staged == {}
    alone = Copied(log, works)
    for other in ("native", "ndjson"):
        assert together.left(other) == alone.left(other)
    assert together.fetches > alone.fetches, "a restarted slice reads again"


def test_a_bug_in_one_slice_leaves_nothing_of_any():
    def before(operation, _name):
        if operation == "publish":
            raise ZeroDivisionError

    stores = {kind: MemoryStore() for kind in FORMATS} | {"ndjson": MemoryStore(before=before)}
    with pytest.raises(ZeroDivisionError):
        Copied(Log(batches(0, 60)), three(end=60, max_offsets=7), stores=stores)
    assert all(store.staged == {} for store in stores.values())


@pytest.mark.parametrize("kind", FORMATS)
def test_staged_slices_share_their_reading_too(kind):
    log = Log(batches(0, 60))
    works = [work_of(name, first=20, end=60, staged=True, format=kind) for name in "abc"]
    together = assert_as_alone(log, works)
    assert together.fetches == Copied(log, works[:1]).fetches
    assert all(len(store.staged) == 1 for store in together.stores.values())


def test_works_that_read_the_same_are_one_unit_and_go_to_one_slot():
    kafka = KafkaSpec(cluster="c", topic="t")
    same = [work_of(name) for name in "abc"]
    later = [work_of("d", first=5)]
    others = [replace(work_of("e"), source="another cluster")]
    clusters = [replace(work_of(name), destination=kafka) for name in "fg"]
    works = [*same, *later, *others, *clusters]
    assert units(works) == [same, later, others, clusters[:1], clusters[1:]]
    for slots in (1, 2, 5, 9):
        bins = pack(works, slots)
        assert len(bins) == min(slots, 5)
        assert sorted(id(work) for found in bins for work in found) == sorted(map(id, works))
        assert any(all(work in found for work in same) for found in bins)
    assert pack([*later, *same, *others], 2) == [same, [*later, *others]]

"""A batch's base offset is outside its checksum: it is compared with what the response may hold.

Method: a scripted source whose last batch has a changed bit in its base offset, on a compacted
topic, where every gap has a cause; one whose response reports an older high watermark than the
batches that follow it, as a broker does that appends meanwhile; and one that refuses the offset.
"""

import pytest

from kit.fakes.scripted import (
    TOPIC_ID,
    Log,
    ScriptedClient,
    archive_spec,
    batches,
    record,
    run_slice,
)
from logmirror.errors import CorruptionError, PositionError
from logmirror.mirror.ports import FlowId, Slice
from logmirror.model import TopicPartition, Trigger
from logmirror.source.partition import FetchBuffer, KafkaSource
from logmirror.testing import MemoryStore
from logmirror.wire.records import encode_reference

FLOW = FlowId(mirror="m", destination="d", topic="t", partition=0)
PARTITION = TopicPartition("t", 0)


def with_base_offset(batch, base):
    """The same batch at another offset; its checksum stays valid."""
    return base.to_bytes(8, "big") + batch[8:]


def slice_of(end):
    return Slice(
        flow=FLOW, topic_id=TOPIC_ID, compacted=True, first=0, end=end, tail=Trigger.EXPLICIT
    )


def log_with_a_changed_offset(flip):
    good, bad = batches(0, 5), encode_reference([record(5)])
    return Log([*good, with_base_offset(bad, 5 ^ flip), *batches(6, 10)], last_stable_offset=10)


class Flipped(ScriptedClient):
    """Serves the batches in the order of the log, whatever their offsets claim."""

    def fetch(self, partition, offset, view, **options):
        log = self.logs[partition]
        self.logs = {partition: Log(log.batches[:2], last_stable_offset=2**63 - 1)}
        found = super().fetch(partition, offset, view, **options)
        self.logs = {partition: log}
        return found._replace(high_watermark=log.end, last_stable_offset=log.end)


@pytest.mark.parametrize("form", ["native", "parquet", "ndjson"])
@pytest.mark.parametrize("bit", [20, 40, 62])
def test_a_changed_base_offset_beyond_the_high_watermark_is_corruption(form, bit):
    """Not "compacted": nothing is written past the record before it."""
    client = Flipped([log_with_a_changed_offset(1 << bit)], response_batches=2)
    store = MemoryStore()
    result = run_slice(client, store, slice_of(10), archive_spec(format=form))
    assert isinstance(result.error, CorruptionError)
    facts = result.error.facts
    assert (facts["offset"], facts["high_watermark"]) == (5 ^ (1 << bit), 10)
    assert (facts["topic"], facts["partition"]) == ("t", 0)
    assert [name for name in store.objects if not name.startswith(".")] == []


@pytest.mark.parametrize("method", ["read", "poll"])
def test_a_response_may_hold_batches_above_the_high_watermark_that_it_reports(method):
    """A broker reads the high watermark first, and records may be appended before it reads these.

    Only the present high watermark decides; one more request finds it.
    """

    class Lagging(ScriptedClient):
        requests = 0

        def fetch(self, partition, offset, view, **options):
            found = super().fetch(partition, offset, view, **options)
            return found._replace(high_watermark=5)

        def list_offsets(self, partitions, at, *, read_committed=True):
            assert not read_committed
            self.requests += 1
            return super().list_offsets(partitions, at)

    client = Lagging([Log(batches(0, 10))])
    source = KafkaSource(client, PARTITION, topic_id=TOPIC_ID, buffer=FetchBuffer(4096))
    if method == "read":
        (fetched,) = source.read(0, 10)
    else:
        fetched = source.poll(0, max_wait_ms=0).fetched
    assert int(fetched.batches.last_offsets[-1]) == 9
    assert client.requests == 1


def test_batches_below_the_high_watermark_need_no_further_request():
    client = ScriptedClient([Log(batches(0, 10))])
    client.list_offsets = None
    source = KafkaSource(client, PARTITION, topic_id=TOPIC_ID, buffer=FetchBuffer(4096))
    assert len(list(source.read(0, 10))) == 1


@pytest.mark.parametrize("method", ["read", "poll"])
@pytest.mark.parametrize(
    ("start", "end", "expected"),
    [
        (0, 5, {"reason": "SourceWentBackwards", "expected": 9, "got": 5}),
        (12, 20, {"reason": "SourceTrimmed", "position": 9, "log_start": 12}),
    ],
)
def test_an_offset_that_left_the_log_during_a_slice_is_reported_by_its_reason(
    method, start, end, expected
):
    """The same reason as at a start, whichever request notices it first."""

    class Outside(ScriptedClient):
        def fetch(self, *_, **__):
            raise PositionError(
                "the offset is outside the partition's log",
                log_start_offset=start,
                log_end_offset=end,
            )

    client = Outside([Log(batches(0, 10))])
    source = KafkaSource(client, PARTITION, topic_id=TOPIC_ID, buffer=FetchBuffer(4096))
    with pytest.raises(PositionError) as caught:
        next(source.read(9, 20)) if method == "read" else source.poll(9, max_wait_ms=0)
    bounds = {"log_start_offset": start, "log_end_offset": end}
    assert caught.value.facts == {**bounds, **expected}

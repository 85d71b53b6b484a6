"""A scripted destination cluster, and a transfer to it without a network.

The destination keeps logs and responds like a broker, or as the test specifies. tests/cluster and
tests/e2e show that the real client and real brokers behave alike.
"""

from __future__ import annotations

import functools
from collections import defaultdict, deque
from dataclasses import dataclass, field

from kit.fakes.scripted import TOPIC_ID, Log, ScriptedClient, SteppingClock, batches, record
from logmirror.cluster.offsets import LogEnd, ProducerState
from logmirror.cluster.produce_responses import NO_RESPONSE, ProduceResponse
from logmirror.errors import OutcomeUnknownError, PositionError, UnavailableError
from logmirror.mirror.follow import FollowWindow
from logmirror.mirror.ports import FlowId, KafkaSpec, Slice, Work
from logmirror.model import ColumnTypes, TopicPartition
from logmirror.source.column_types import Gate
from logmirror.source.partition import FetchBuffer, KafkaSource
from logmirror.to_kafka.gap_writer import Filled
from logmirror.to_kafka.idempotence import producer_id
from logmirror.to_kafka.preserve_transfer import PreserveTransfer
from logmirror.wire.batch_header import MarkerType
from logmirror.wire.decode import RecordDecoder
from logmirror.wire.rebatch import Rebatcher
from logmirror.wire.records import decode_reference, encode_marker, encode_reference

NOW_MS = 1_700_000_000_000
"""The time of the records of `kit.fakes.scripted`, and of the clock: producer state is kept."""

LARGE = b"x" * 70_000
"""Makes batches that wait for no others."""


@dataclass
class Destination:
    """A destination cluster: logs, producer state, and responses that the test may replace."""

    clock: SteppingClock
    logs: dict[int, list[tuple[int, bytes]]] = field(default_factory=lambda: defaultdict(list))
    ends: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    states: dict[int, ProducerState | None] = field(default_factory=dict)
    requests: list[dict[int, int]] = field(default_factory=list)
    """Partition to bytes, of each request."""

    instead: dict[int, deque] = field(default_factory=lambda: defaultdict(deque))
    """Fault of the next batches by partition: None, or a function of the response."""

    on_look: list = field(default_factory=list)
    on_send: list = field(default_factory=list)
    looks: int = 0
    most_in_flight: int = 0
    responses: deque = field(default_factory=deque)

    def producer_states(self, producers):
        assert all(p == producer_id(w.topic, w.partition, TOPIC_ID) for w, p in producers.items())
        return {where: self.states.get(where.partition) for where in producers}

    def log_ends(self, partitions):
        self.looks += 1
        for act in self.on_look:
            act()
        return {where: LogEnd(self.ends[where.partition], 0) for where in partitions}

    def send(self, sent, *, not_after_ms):
        for act in self.on_send:
            act()
        if self.clock.monotonic_ms() >= not_after_ms:
            raise UnavailableError("too late")
        self.requests.append({where.partition: len(view) for where, view in sent})
        for where, view in sent:
            number = where.partition
            act = self.instead[number].popleft() if self.instead[number] else None
            self.responses.append((act or self.append)(where, bytes(view)))
        self.most_in_flight = max(self.most_in_flight, len(self.responses))

    def append(self, where, batch):
        number, rows = where.partition, list(decode_reference(batch))
        base = self.ends[number]
        self.logs[number].append((base, batch))
        self.ends[number] += len(rows)
        return ProduceResponse(where, 0, base, -1, 0, None)

    def collect(self, *, block):
        """Responses arrive when the caller waits for them, those of one request at a time."""
        if not block or not self.responses:
            return []
        return [self.responses.popleft()]

    def values(self, partition=0):
        """Return offset and value of all appended records."""
        return [
            (base + row.offset, row.value)
            for base, batch in self.logs[partition]
            for row in decode_reference(batch)
        ]


def refuse(code, kind=UnavailableError):
    """Return an error response."""

    def response(where, _batch):
        return ProduceResponse(where, code, -1, -1, -1, kind("could not write", code=code))

    return response


def lose(written_by=None):
    """Drop the response; the batch is written if `written_by` is given."""

    def response(where, batch):
        if written_by is not None:
            written_by.append(where, batch)
        error = OutcomeUnknownError("no response to a write")
        return ProduceResponse(where, NO_RESPONSE, -1, -1, -1, error)

    return response


def elsewhere(base):
    """Return a response with another base offset."""
    return lambda where, _batch: ProduceResponse(where, 0, base, -1, 0, None)


@dataclass
class GapWriter:
    """Takes offsets at the destination, as `HoleWriter` does."""

    destination: Destination
    filled: list[tuple[int, int, int]] = field(default_factory=list)
    step: int = 1 << 62
    step_ms: int = 0
    on_step: list = field(default_factory=list)

    def fill(self, partition, first, end, *, new_epoch=None, until_ms, **_others):
        """Fill in steps; each takes `step_ms`."""
        assert not self.destination.responses, "nothing may be in flight"
        assert self.destination.ends[partition.partition] == first
        begun = first
        while first < end and (first == begun or self.destination.clock.monotonic_ms() < until_ms):
            first = min(end, first + self.step)
            self.destination.clock.sleep_ms(self.step_ms)
            for act in self.on_step:
                act()
        self.filled.append((partition.partition, begun, first))
        self.destination.ends[partition.partition] = first
        return Filled(first, new_epoch is not None)

    def release(self):
        assert not self.destination.responses, "nothing may be in flight"


@dataclass
class TailCheck:
    """Returns the result that the test sets."""

    asked: list[tuple[int, int]] = field(default_factory=list)
    error: PositionError | None = None
    head: int | None = None
    step: int = 1 << 62
    destination: Destination | None = None

    def check(self, item, *, source_start, until_ms):
        number = item.writer.partition.partition
        self.asked.append((number, source_start))
        if self.error is not None and number == 0:
            raise self.error
        if self.head is not None:
            end = min(self.head, item.writer.verified + self.step)
            self.destination.clock.ms = max(until_ms, self.destination.clock.ms)
            self.destination.ends[number] = end
            return end
        return item.writer.verified


class World:
    """One source, one destination, and the transfer between them."""

    def __init__(self, *logs, sequence_checked=True, response_batches=3):
        self.clock = SteppingClock(NOW_MS)
        self.source = ScriptedClient(logs, response_batches=response_batches)
        self.destination = Destination(self.clock)
        self.gap_writer, self.tail_check = GapWriter(self.destination), TailCheck()
        if sequence_checked:
            for number in range(len(logs)):
                self.destination.states[number] = ProducerState(0, -1, NOW_MS)

    def run(self, *firsts, merge=False, gaps="markers", **fields):
        """Execute one slice for each partition, from these offsets."""
        firsts = firsts or (0,) * len(self.source.logs)
        works = [self._work(n, first, gaps, dict(fields)) for n, first in enumerate(firsts)]
        buffer = FetchBuffer(64)
        self.window = FollowWindow(max(work.window_ms for work in works), self.clock)
        self.transfer = PreserveTransfer(
            works,
            source_client=self.source,
            source={
                w.slice.flow.source: KafkaSource(
                    self.source, w.slice.flow.source, topic_id=TOPIC_ID, buffer=buffer
                )
                for w in works
            },
            client=self.destination,
            pipeline=self.destination,
            rebatcher=Rebatcher() if merge else Rebatcher(merge_below_bytes=0),
            gate=Gate(RecordDecoder()),
            gap_writer=self.gap_writer,
            tail_check=self.tail_check,
            window=self.window,
            clock=self.clock,
        )
        results = self.transfer.run()
        assert not self.destination.responses, "every response is collected"
        return results

    def _work(self, number, first, gaps, fields):
        window_ms, tail_checked = fields.pop("window_ms", 0), fields.pop("tail_checked", True)
        end, in_flight_max = fields.pop("end", None), fields.pop("in_flight_max", 1)
        types = fields.pop("types", ColumnTypes())
        topic_id = fields.pop("topic_id", None)
        slice_ = Slice(
            flow=FlowId(mirror="m", destination="d", topic="t", partition=number),
            topic_id=TOPIC_ID,
            compacted=fields.pop("compacted", False),
            first=first,
            end=self.source.logs[TopicPartition("t", number)].end if end is None else end,
            tail=None,
            **fields,
        )
        return Work(
            slice=slice_,
            source=None,
            destination=KafkaSpec(
                cluster=None, topic="copy", gaps=gaps, types=types, topic_id=topic_id
            ),
            writer_id="w",
            estimated_bytes=1,
            tail_checked=tail_checked,
            window_ms=window_ms,
            in_flight_max=in_flight_max,
        )


def value(offset):
    return b"value-%d" % offset


@functools.cache
def _large_batch(offset, timestamp_ms):
    return encode_reference(
        [record(offset, value=value(offset) + LARGE, timestamp_ms=timestamp_ms)]
    )


def large_batches(first, stop, *, timestamp_ms=NOW_MS):
    """Batches of one record each that are sent at once."""
    return [_large_batch(n, timestamp_ms) for n in range(first, stop)]


def old_batches(first, stop):
    """The same, with records so old that a broker drops their producer state."""
    return large_batches(first, stop, timestamp_ms=NOW_MS - 86_400_000)


def slow_fetch(world, duration_ms):
    """The first fetch takes this long."""
    fetch, slow = world.source.fetch, [True]

    def fetched(*arguments, **options):
        if slow.pop() if slow else False:
            world.clock.ms += duration_ms
        return fetch(*arguments, **options)

    return fetched


def arrive_while_waiting(world, arrivals):
    """Append records to the source at given times; a long poll advances the clock."""
    pending = dict(sorted(arrivals.items()))

    def arrive():
        for at_ms in [at_ms for at_ms in pending if at_ms <= world.clock.ms]:
            log, first, end = pending.pop(at_ms)
            log.batches += batches(first, end)

    world.clock.on_sleep = arrive
    fetch = world.source.fetch

    def fetched(partition, offset, view, *, topic_id, max_wait_ms=500, **more):
        if max_wait_ms and offset >= world.source.logs[partition].end:
            wait_ms = min([max_wait_ms, *(at - world.clock.ms for at in pending)])
            world.clock.sleep_ms(max(wait_ms, 1))
        return fetch(partition, offset, view, topic_id=topic_id, max_wait_ms=max_wait_ms)

    world.source.fetch = fetched


def transactional_log():
    """0-4 data, 5-9 aborted, 10 abort marker, 11-12 committed, 13 commit marker, 14-15 data."""
    fields = {"producer_id": 7, "producer_epoch": 0, "transactional": True}
    parts = [
        *batches(0, 5),
        *batches(5, 10, base_sequence=0, **fields),
        encode_marker(MarkerType.ABORT, offset=10, producer_id=7),
        *batches(11, 13, base_sequence=5, **fields),
        encode_marker(MarkerType.COMMIT, offset=13, producer_id=7),
        *batches(14, 16),
    ]
    return Log(parts, aborted=((7, 5, 10),))

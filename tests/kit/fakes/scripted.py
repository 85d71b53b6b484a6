"""A scripted source: batches in memory behind the methods of `ClusterClient`.

It replaces a cluster where a test must control the content of the log (gaps, unusual batches) or
the time of its changes. tests/cluster shows that the real client behaves alike.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field

from logmirror.clock import SYSTEM_CLOCK, Clock
from logmirror.cluster.client import EARLIEST, NO_OFFSET, FetchResult
from logmirror.errors import LogmirrorError, PositionError
from logmirror.locations import FolderLocation
from logmirror.mirror.ports import ArchiveSpec, Slice, SliceResult, Work
from logmirror.mirror.service import LanePorts, Service
from logmirror.mirror.source_views import MirrorSpec
from logmirror.mirror.units import units
from logmirror.model import EpochEnd, TimestampType, TopicPartition
from logmirror.source.partition import FetchBuffer, KafkaSource
from logmirror.to_archive.commit import Committer
from logmirror.to_archive.destination import ArchiveDestination
from logmirror.to_archive.shared_read import carry_out
from logmirror.to_archive.snapshot_transfer import SnapshotTransfer
from logmirror.to_archive.transfer import Transfer
from logmirror.wire.batch_header import parse_header
from logmirror.wire.decode import RecordDecoder
from logmirror.wire.records import Record, encode_reference

TOPIC_ID = bytes(range(16))


def record(offset, *, key=b"k", value=None, headers=(), timestamp_ms=1_700_000_000_000):
    """Return one record; its value contains its offset."""
    body = b"value-%d" % offset if value is None else value
    return Record(offset, timestamp_ms, TimestampType.CREATE_TIME, key, body, tuple(headers))


def batches(first, stop, size=5, **fields):
    """Return contiguous batches of `size` records over first..stop."""
    return [
        encode_reference([record(i) for i in range(at, min(at + size, stop))], **fields)
        for at in range(first, stop, size)
    ]


@dataclass
class Log:
    """One partition. `batches` are encoded batches in offset order."""

    batches: list[bytes] = field(default_factory=list)
    log_start: int = 0
    aborted: tuple[tuple[int, int, int], ...] = ()
    """(producer id, first offset, offset of the ABORT marker)"""

    last_stable_offset: int | None = None
    leader_epoch: int = 0
    """The current one. The batches hold those of their leaders."""

    def epoch_end(self, epoch):
        """Respond as a broker does to OffsetForLeaderEpoch; None: it does not know the epoch."""
        if epoch > self.leader_epoch:
            return None
        headers = [parse_header(batch, 0) for batch in self.batches]
        later = [one.base_offset for one in headers if one.leader_epoch > epoch]
        known = [one.leader_epoch for one in headers if one.leader_epoch <= epoch]
        return EpochEnd(max(known, default=epoch), min(later, default=self.end))

    def first_since(self, timestamp_ms):
        """Respond as a broker does to a lookup by time; -1: there is no such record.

        Batches count as a whole: give each record one of its own.
        """
        headers = [parse_header(batch, 0) for batch in self.batches]
        found = [h.base_offset for h in headers if h.max_timestamp_ms >= timestamp_ms]
        return min(found, default=NO_OFFSET)

    @property
    def end(self):
        if self.last_stable_offset is not None:
            return self.last_stable_offset
        return parse_header(self.batches[-1], 0).last_offset + 1 if self.batches else self.log_start


@dataclass(frozen=True)
class PartitionInfo:
    leader: int = 0
    leader_epoch: int = 0
    error: int = 0


@dataclass(frozen=True)
class TopicInfo:
    name: str
    topic_id: bytes | None
    partitions: dict[int, PartitionInfo]


class ScriptedClient:
    """The requests of a mirror to a cluster, served from `logs`."""

    def __init__(self, logs, *, topic="t", configs=None, topic_id=TOPIC_ID, response_batches=3):
        self.logs = {TopicPartition(topic, n): log for n, log in enumerate(logs)}
        self.name, self.topic_id, self.configs = topic, topic_id, configs or {}
        self.response_batches = response_batches
        self.fetches = 0

    def topic(self, name):
        assert name == self.name
        numbers = {
            tp.partition: PartitionInfo(leader_epoch=log.leader_epoch)
            for tp, log in self.logs.items()
        }
        return TopicInfo(name, self.topic_id, numbers)

    def describe_topics(self, names):
        return {name: self.topic(name) for name in names}

    def list_offsets(self, partitions, at, *, read_committed=True):
        del read_committed  # high watermark and last stable offset are the same here
        if at >= 0:
            return {tp: self.logs[tp].first_since(at) for tp in partitions}
        return {
            tp: self.logs[tp].log_start if at == EARLIEST else self.logs[tp].end
            for tp in partitions
        }

    def try_list_offsets(self, partitions, at):
        found = {}
        for partition in partitions:
            try:
                found |= self.list_offsets([partition], at)
            except LogmirrorError as error:
                found[partition] = error
        return found

    def epoch_ends(self, epochs):
        return {tp: self.logs[tp].epoch_end(epoch) for tp, epoch in epochs.items()}

    def describe_topic_configs(self, _name):
        return self.configs

    def describe_configs_of_topics(self, names, keys):
        return {name: {key: self.configs.get(key) for key in keys} for name in names}

    def fetch_ahead(self, *_, **__):
        """Does nothing: no fetch is sent ahead."""

    def fetch(  # noqa: PLR0913  # the signature of the client
        self, partition, offset, view, *, topic_id, max_wait_ms=500, last_epoch=-1
    ):
        self.fetches += 1
        log = self.logs[partition]
        if topic_id not in {None, self.topic_id}:
            raise PositionError("the topic was deleted and created again")
        if not log.log_start <= offset <= log.end:
            raise PositionError(
                "offset out of range", offset=offset, log_start_offset=log.log_start
            )
        epoch = log.epoch_end(last_epoch) if last_epoch >= 0 else None
        if epoch and (epoch.leader_epoch < last_epoch or epoch.end_offset < offset):
            return FetchResult(0, log.end, log.end, log.log_start, (), 0, epoch)
        wanted = [b for b in log.batches if parse_header(b, 0).last_offset >= offset]
        wanted = [b for b in wanted if parse_header(b, 0).base_offset < log.end]
        data = b"".join(wanted[: self.response_batches])
        if len(data) > len(view):
            return FetchResult(0, log.end, log.end, log.log_start, (), len(data))
        view[: len(data)] = data
        return FetchResult(
            size=len(data),
            high_watermark=log.end,
            last_stable_offset=log.end,
            log_start_offset=log.log_start,
            # As a broker does: the transactions that overlap what is sent, and no others.
            aborted=tuple((pid, at) for pid, at, end in log.aborted if end >= offset),
            needed_bytes=0,
        )

    def close(self):
        pass


class FixedResponses(ScriptedClient):
    """Serves the given responses in order, whatever offset is requested. The last one repeats.

    Args:
        responses: Lists of encoded batches.
        end: Log end offset, high watermark and last stable offset of the partition.
        more: As for `ScriptedClient`.
    """

    def __init__(self, *responses, end, **more):
        super().__init__([Log([], last_stable_offset=end)], **more)
        self.responses = list(responses)

    def fetch(self, partition, offset, view, **options):
        log = self.logs[partition]
        served = ScriptedClient(
            [Log(self.responses[0], last_stable_offset=log.end)], response_batches=100
        )
        found = served.fetch(partition, 0, view, **options)
        if len(self.responses) > 1 and not found.needed_bytes:
            del self.responses[0]
        return found


def archive_spec(**changes):
    fields = {
        "location": FolderLocation("/root"),
        "format": "parquet",
        "extension": "parquet",
        "compression": "zstd-1",
        "encoding": "base64",
        "max_bytes": 1 << 20,
        "max_offsets": 1_000_000,
        "max_time_ms": 1000,
        **changes,
    }
    if fields["format"] == "native":
        fields["extension"] = "batches"
    elif fields["format"] == "ndjson":
        fields["extension"] = "ndjson"
    return ArchiveSpec(**fields)


def run_slice(client, store, slice_: Slice, spec: ArchiveSpec, *, writer_id="w") -> SliceResult:
    """Execute one slice in this process."""
    work = Work(slice=slice_, source=None, destination=spec, writer_id=writer_id, estimated_bytes=1)
    return InlineRunner(client, store).run([work])[0]


class InlineRunner:
    """A Runner in this process: the same executor code without Spark.

    Client and store are objects, or functions of a source's settings and of a location.
    """

    def __init__(self, client, store, *, slots=2):
        self._client, self._store, self._slots = client, store, slots
        self.ticks = []
        self.windows_ended = False

    @property
    def slots(self):
        return self._slots

    def run(self, works, _slots=1, _job=None):
        self.ticks.append([work.slice for work in works])
        return [result for unit in units(works) for result in self._run(unit)]

    def end_follow_windows(self):
        self.windows_ended = True

    def _run(self, unit):
        slice_, decoder = unit[0].slice, RecordDecoder()
        source = KafkaSource(
            self._client(unit[0].source) if callable(self._client) else self._client,
            slice_.flow.source,
            topic_id=slice_.topic_id,
            buffer=FetchBuffer(64),
            position=slice_.first,
            leader_epoch=slice_.leader_epoch,
            compacted=slice_.compacted,
        )
        if unit[0].archive.compaction:
            return [SnapshotTransfer(w, source, self._open(w), decoder).run() for w in unit]
        transfers = [Transfer(work, self._open(work), decoder) for work in unit]
        return carry_out(transfers, source, decoder)

    def _open(self, work):
        return self._store(work.archive.location) if callable(self._store) else self._store


class SteppingClock(Clock):
    """A clock that advances only when the code under test sleeps."""

    def __init__(self, wall_ms=1_700_000_000_000):
        self.ms, self.wall_ms = 0, wall_ms
        self.on_sleep = lambda: None

    def monotonic_ms(self):
        return self.ms

    def now_ms(self):
        return self.wall_ms + self.ms

    def sleep_ms(self, duration_ms):
        self.ms += int(duration_ms)
        self.on_sleep()


@contextlib.contextmanager
def service(  # noqa: PLR0913  # each test says only what it cares about
    client,
    store,
    *,
    spec=None,
    clock=None,
    slots=2,
    names=("d",),
    chain_start=None,
    until=None,
    **more,
):
    """Yield (service, runner) of a whole driver loop over a scripted source.

    The mirror has a destination for each of `names`, all with the same settings and in one store.
    """
    spec = spec or archive_spec()
    runner = InlineRunner(client, store, slots=slots)
    mirror = MirrorSpec(
        name="m",
        source="source",
        topic=client.name,
        partitions=None,
        destinations=tuple((name, spec) for name in names),
        chain_start=chain_start,
        until=until,
    )
    clock = clock or SYSTEM_CLOCK

    def open_store(_root):
        return store

    committer = Committer(open_store, clock=clock, observer=more.get("observer"))
    brief_client = more.pop("brief_client", lambda _settings: client)
    made = Service(
        [mirror],
        ports=lambda: LanePorts(
            client=lambda _settings: client,
            brief_client=brief_client,
            destination=lambda spec: ArchiveDestination(spec, open_store, committer, clock),
        ),
        runner=runner,
        writer_id="w",
        clock=clock,
        in_turns=True,
        **more,
    )
    yield made, runner

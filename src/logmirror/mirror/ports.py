"""What the stages of the data path say to each other: values, and the two ports they need.

    plan --Work--> Runner --> transfer --SliceResult--> commit

Every value here is frozen and picklable: it crosses between the driver and Spark's Python workers.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Literal, Protocol

from logmirror.errors import InternalError, PositionError, UnavailableError
from logmirror.model import ColumnTypes, Gap, OffsetRange, TopicPartition, Trigger

if TYPE_CHECKING:
    from collections.abc import Sequence

    from logmirror.cluster.properties import ConnectionSettings
    from logmirror.errors import LogmirrorError
    from logmirror.stores.locations import StoreLocation


SLOT_BYTES: Final = 320 << 20
"""A slot's memory where none is configured: all pieces have their full size, and three
destinations, one of them a bucket, are written side by side. With what a worker loads it stays
below 512 MiB."""

ChainStart = Literal["earliest"] | int | None
"""Where a new chain begins: None is offset 0, `earliest` the source's log start."""


@dataclass(frozen=True, slots=True, order=True, kw_only=True)
class FlowId:
    """One mirror's copy of one partition at one destination: the unit of position."""

    mirror: str
    destination: str
    """The destination's effective name, which is also its folder."""

    topic: str
    partition: int

    @property
    def source(self) -> TopicPartition:
        """The partition at the source."""
        return TopicPartition(self.topic, self.partition)

    @property
    def folder(self) -> str:
        """The chain's folder below the store's root: `<destination name>/<partition>`."""
        return f"{self.destination}/{self.partition}"

    def __str__(self) -> str:
        return f"{self.mirror}/{self.destination}/{self.topic}-{self.partition}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ArchiveSpec:
    """How a flow's objects are written; fixed for the life of a chain, but for the two limits."""

    location: StoreLocation

    format: str
    """`native`, `parquet` or `ndjson`."""

    extension: str
    compression: str
    encoding: str
    """NDJSON's keys and values: `base64` or `utf8`."""

    max_bytes: int
    """An object ends with the record (native: the batch) that brings it to this many bytes.

    Bytes of keys, values and headers before compression; native: bytes of batches.
    """

    max_offsets: int
    """An object covers at most this many offsets (native: ends with the batch that reaches it)."""

    max_time_ms: int
    """No record waits longer than this for more before it is written."""

    daily_at_utc_s: int | None = None
    """Seconds past midnight UTC at which everything that waits is written; None: never."""

    compaction: Literal["log"] | None = None
    """`log`: each object is a snapshot, the latest record of each key. None: all records."""

    keep_snapshots: int | None = None
    """How many of the newest snapshots are kept; None: all."""

    drift_check_ms: int = 60_000
    """How long at most before it is seen that somebody else has added or removed objects."""

    types: ColumnTypes = field(default_factory=ColumnTypes)
    """What keys and values must be, and how Parquet holds them; may differ between objects."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KafkaSpec:
    """A cluster that receives a topic."""

    cluster: ConnectionSettings
    topic: str
    """Its name at the destination."""

    name: str = ""
    """The destination's effective name."""

    mirror: str = ""
    """Whose destination it is."""

    offsets: Literal["preserve", "translate"] = "preserve"
    """The source's offsets, or new ones for the visible records alone."""

    gaps: Literal["markers", "fail"] = "markers"
    """What an offset without a record becomes: an invisible control record, or an error."""

    topic_sync: Literal["create", "validate", "off"] = "create"
    replication_factor: int = -1
    """Of a topic that is created; -1: the cluster's default."""

    keeps_timestamps: bool = True
    """False: the destination stamps records itself when it appends them."""

    max_batch_bytes: int = 1_000_000
    """Small batches are merged up to this size; 0 never merges."""

    producer_state_age_ms: int = 12 * 3_600_000
    """How old records may be for the destination's brokers to remember who wrote them."""

    max_message_bytes: int = 1_048_588
    """The largest batch that the destination's topic takes."""

    source_id: bytes | None = None
    """Topic id of the source when the destination was prepared."""

    types: ColumnTypes = field(default_factory=ColumnTypes)
    """What keys and values must be to be copied."""


DestinationSpec = ArchiveSpec | KafkaSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """One offset range of one flow, fixed by the driver: the unit of work and of retry."""

    flow: FlowId
    topic_id: bytes | None
    """The 16 bytes that the source names this incarnation of the topic by; None: it has no ids."""

    compacted: bool
    """Whether the source's cleanup.policy may leave holes between records."""

    first: int
    end: int
    """One past the last offset to copy: at most the last stable offset that the driver saw."""

    tail: Trigger | None
    """Why what fills no object is written once `end` is reached; None leaves it for later."""

    staged: bool = False
    """Leave the objects unpublished: an earlier slice of the flow runs beside this one."""

    budget_bytes: int = 256 << 20
    """Stop at the first object boundary after this many source bytes."""

    rebuild: bool = False
    """Of a snapshot: read the source from its start, and take nothing over from the one before."""

    seen_ms: int = 0
    """Wall-clock time at which the driver saw `end`; of snapshots only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """A slice and all that an executor must know to carry it out."""

    slice: Slice
    source: ConnectionSettings
    destination: DestinationSpec
    writer_id: str
    estimated_bytes: int
    """For packing slots evenly; a guess."""

    proven: bool = True
    """False: before anything is written, what the destination holds must be compared with the
    source. Archives need no such look, their claims say where they come from."""

    fenced: bool = False
    """Whether batches that were on their way when the position was read are known to be refused,
    also behind a hole; clusters only."""

    window_ms: int = 0
    """Go on with what arrives at the source for so long after `slice.end` is reached."""

    memory_bytes: int = SLOT_BYTES
    """What the slot may hold of records on their way into archives; see `memory`."""

    @property
    def archive(self) -> ArchiveSpec:
        """The destination of a flow into an archive."""
        if not isinstance(self.destination, ArchiveSpec):
            raise InternalError("not a flow into an archive", flow=str(self.slice.flow))
        return self.destination

    @property
    def kafka(self) -> KafkaSpec:
        """The destination of a flow into a cluster."""
        if not isinstance(self.destination, KafkaSpec):
            raise InternalError("not a flow into a cluster", flow=str(self.slice.flow))
        return self.destination


@dataclass(frozen=True, slots=True, kw_only=True)
class GapSummary:
    """The offsets of an object that carry no record (I3)."""

    runs: tuple[Gap, ...] = ()
    """The first runs, in order; at most `gaps.MAX_RUNS` are kept."""

    control: int = 0
    aborted: int = 0
    compacted: int = 0

    @property
    def offset_count(self) -> int:
        """How many offsets carry no record."""
        return self.control + self.aborted + self.compacted


@dataclass(frozen=True, slots=True, kw_only=True)
class Receipt:
    """One finished object: published, or staged with the token that publishes it."""

    covered: OffsetRange
    record_count: int
    payload_bytes: int
    """What `max-bytes` counts."""

    object_bytes: int
    digest: str
    trigger: Trigger
    gaps: GapSummary
    elapsed_ms: int
    token: str | None = None
    """Present while the object is staged only."""

    peer: bool = False
    """Another writer had claimed or published this object before us; the content is the same."""

    claimed_by: str = ""
    """The writer id of whoever claimed it before us."""

    batch_count: int = 0
    """Batches that another cluster acknowledged; of archives 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SliceResult:
    """What came of one slice. Receipts that precede an error are good all the same."""

    slice: Slice
    receipts: tuple[Receipt, ...]
    rest_bytes: int = 0
    """Payload between the last receipt and `next_offset`: seen, but filling no object yet."""

    next_offset: int = 0
    """How far the slice has read."""

    source_bytes: int = 0
    """Bytes of batches received."""

    elapsed_ms: int = 0
    proven: bool = False
    """What the destination held was compared with the source, and continues it."""

    fenced: bool = False
    """Older batches are refused from now on, see `Work.fenced`."""

    peak_bytes: int = 0
    """The most memory that the process which ran the slice has ever had resident; 0: not known."""

    error: LogmirrorError | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceView:
    """What the source says of one partition at one moment."""

    topic_id: bytes | None
    log_start: int
    """The first offset the source still has."""

    last_stable_offset: int
    """The last stable offset: one past the last offset that may be copied."""


class PositionMovedError(PositionError):
    """The destination does not stand where the driver thought. Nothing was written: look again."""


class EngineLostError(UnavailableError):
    """The engine is gone for good, and with it what this process could do; start it anew."""


class Runner(Protocol):
    """Carries work out somewhere: on Spark, or in this process for a test."""

    @property
    def slots(self) -> int:
        """How many pieces of work run side by side.

        Raises:
            EngineLostError: The engine is gone.
        """
        ...

    def run(self, works: Sequence[Work]) -> list[SliceResult]:
        """Carry out every piece; results in any order, one for each.

        Raises:
            UnavailableError: The engine failed; any part of the work may have been done (look).
            EngineLostError: The same, and it will not come back.
        """
        ...

    def end_follow_windows(self) -> None:
        """Let slices end soon that wait for what arrives, now and from now on: it is a stop.

        Signal handlers may call it.
        """
        ...

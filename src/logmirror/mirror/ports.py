"""The values that the stages of the data path exchange, and the port that runs slices.

    plan --Work--> Runner --> transfer --SliceResult--> commit

Every value is frozen and picklable: it crosses between the driver and Spark's Python workers.
Offsets are offsets of the source, 0..`OFFSET_MAX`, unless a name says otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Final, Literal, Protocol

from logmirror.errors import InternalError, LogmirrorError, UnavailableError
from logmirror.model import ColumnTypes, EpochEnd, Gap, Limits, OffsetRange, TopicPartition, Trigger

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from logmirror.cluster.properties import ConnectionSettings
    from logmirror.locations import StoreLocation
    from logmirror.mirror.takeover_spec import Takeover
    from logmirror.model import Decided

SLOT_BYTES: Final = 320 << 20
"""Memory of a slot, in bytes, if none is configured. A worker process stays below 512 MiB."""

ChainStart = Literal["earliest"] | int | None
"""First offset of a new chain. None: offset 0. `earliest`: the source's log start offset."""


@dataclass(frozen=True, slots=True, order=True, kw_only=True)
class FlowId:
    """One mirror's replication of one partition to one destination: the unit of position."""

    mirror: str
    destination: str
    """The destination's effective name, which is also the name of its directory."""

    topic: str
    """The topic's name at the source."""

    partition: int

    @property
    def source(self) -> TopicPartition:
        """The partition of the source."""
        return TopicPartition(self.topic, self.partition)

    @property
    def folder(self) -> str:
        """The chain's directory below the store's root: `<destination name>/<partition>`."""
        return f"{self.destination}/{self.partition}"

    def __str__(self) -> str:
        return f"{self.mirror}/{self.destination}/{self.topic}-{self.partition}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ArchiveSpec:
    """How the objects of an archive are written. Fixed for a chain, except for the limits."""

    follows: ClassVar = False
    """Whether a slice follows its source for a window after it has reached the end."""

    location: StoreLocation
    """The directory or bucket prefix that contains the chains."""

    format: str
    """`native`, `parquet` or `ndjson`."""

    extension: str
    """File name extension, without the dot."""

    compression: str
    """Codec and level as configured, such as `zstd-1`."""

    encoding: str
    """Of keys and values in NDJSON: `base64` or `utf8`."""

    max_bytes: int
    """An object ends with the record (native: the batch) that brings it to this many bytes.

    Counts bytes of keys, values and headers before compression; native: bytes of batches.
    """

    max_offsets: int
    """An object covers at most this many offsets (native: ends with the batch that reaches it)."""

    max_time_ms: int
    """Longest time that a record waits before it is written, in milliseconds."""

    daily_at_utc_s: int | None = None
    """Time of the daily flush in seconds past midnight UTC, 0..86399. None: no daily flush."""

    compaction: Literal["log"] | None = None
    """`log`: each object is a snapshot with the latest record of each key. None: all records."""

    keep_snapshots: int | None = None
    """How many of the newest snapshots are kept, at least 1. None: all."""

    drift_check_ms: int = 60_000
    """Interval of the check for objects that other processes added or removed, in milliseconds."""

    types: ColumnTypes = field(default_factory=ColumnTypes)
    """Types of keys and values, and of their Parquet columns. May differ between objects."""

    limits: Limits = field(default_factory=Limits)
    """The largest record and batch that are unpacked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KafkaSpec:
    """How a topic is replicated to a cluster."""

    follows: ClassVar = True
    compaction: ClassVar = None
    max_time_ms: ClassVar = 0
    daily_at_utc_s: ClassVar = None
    drift_check_ms: ClassVar = None  # the brokers check each write

    cluster: ConnectionSettings
    """The destination's cluster."""

    topic: str
    """The topic's name at the destination."""

    name: str = ""
    """The destination's effective name."""

    mirror: str = ""
    """The name of the mirror."""

    offsets: Literal["preserve", "translate"] = "preserve"
    """`preserve`: the offsets of the source. `translate`: new offsets for the visible records."""

    gaps: Literal["markers", "fail"] = "markers"
    """What fills an offset gap. `markers`: control records. `fail`: nothing, it is an error."""

    topic_sync: Literal["create", "validate", "off"] = "create"
    """`create`: create and compare the topic. `validate`: compare it. `off`: neither."""

    replication_factor: int = -1
    """Replication factor of a topic that is created. -1: the cluster's default."""

    keeps_timestamps: bool = True
    """False: the destination's topic uses `LogAppendTime`."""

    max_batch_bytes: int = 1_000_000
    """Small batches are merged up to this size in bytes. 0: never merged."""

    producer_state_age_ms: int = 12 * 3_600_000
    """How long the destination's brokers keep an idle producer's state, in milliseconds."""

    max_message_bytes: int = 1_048_588
    """`max.message.bytes` of the destination's topic."""

    source_id: bytes | None = None
    """The source's topic ID, 16 bytes, when the destination was prepared. None: it has no ID."""

    takeover: Takeover | None = None
    """The copy to continue if nothing was copied yet. None: a new replica is begun."""

    topic_id: bytes | None = None
    """The topic ID of the destination's topic. None: it has no ID."""

    types: ColumnTypes = field(default_factory=ColumnTypes)
    """Types that keys and values must have."""

    limits: Limits = field(default_factory=Limits)
    """The largest record and batch that are unpacked to check them."""


DestinationSpec = ArchiveSpec | KafkaSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """One offset range of one flow, fixed by the driver: the unit of work and of retry."""

    flow: FlowId
    topic_id: bytes | None
    """The topic ID at the source, 16 bytes. None: the source has no topic IDs."""

    compacted: bool
    """Whether the source's `cleanup.policy` contains `compact`, which explains offset gaps."""

    first: int
    """The first offset to copy."""

    end: int
    """One past the last offset to copy. Not above the last stable offset that the driver read."""

    tail: Trigger | None
    """Trigger with which a last, incomplete object is written. None: it is not written yet."""

    staged: bool = False
    """Stage the objects without publishing them: an earlier slice of the flow runs in parallel."""

    budget_bytes: int = 256 << 20
    """Stop at the first object boundary after this many bytes of source batches."""

    rebuild: bool = False
    """Snapshots only: read the source from its start instead of merging the previous snapshot."""

    seen_ms: int = 0
    """Snapshots only: time at which the driver read `end`, in milliseconds since 1970."""

    leader_epoch: int = -1
    """The source's leader epoch of the batch that holds offset `first` - 1. -1: unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hold:
    """Clusters only: an earlier process may still write markers into an offset gap.

    The flow waits, reads its position again, and continues with this if it has not moved.
    """

    wait_ms: int
    """How long to wait, in milliseconds."""

    owner: tuple[int, int, bool] | None
    """Who has the lease on the gap: `cluster.lease.Owner`. None: there are no leases."""

    is_own: bool
    """Whether that is this flow, which took the lease from the earlier process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """A slice with everything that an executor needs to run it."""

    slice: Slice
    source: ConnectionSettings
    destination: DestinationSpec
    writer_id: str
    """The ID of the driver's process as a writer."""

    estimated_bytes: int
    """Expected payload in bytes, for packing slots evenly."""

    tail_checked: bool = True
    """False: the replica's tail must be compared with the source before anything is written. True
    where nothing was copied yet, or leader epochs prove that the source holds what was copied."""

    fenced: bool = False
    """Clusters only: whether batches that were in flight when the position was read are certain to
    be rejected, also behind an offset gap."""

    in_flight_max: int = 1
    """Clusters only: how many batches may be in flight before the first response."""

    hold: Hold | None = None
    """Clusters only: the hold with which the previous slice ended at `slice.first`."""

    window_ms: int = 0
    """Follow window in milliseconds: how long to keep polling after `slice.end` is reached."""

    until_ms: int | None = None
    """Records of this time or a later one are not copied, in milliseconds since 1970. None: all."""

    memory_bytes: int = SLOT_BYTES
    """Bytes of the slot's memory for records that are being archived; see `to_archive.memory`."""

    @property
    def archive(self) -> ArchiveSpec:
        """The destination of a flow into an archive.

        Raises:
            InternalError: It is a cluster.
        """
        if not isinstance(self.destination, ArchiveSpec):
            raise InternalError("not a flow into an archive", flow=str(self.slice.flow))
        return self.destination

    @property
    def kafka(self) -> KafkaSpec:
        """The destination of a flow into a cluster.

        Raises:
            InternalError: It is an archive.
        """
        if not isinstance(self.destination, KafkaSpec):
            raise InternalError("not a flow into a cluster", flow=str(self.slice.flow))
        return self.destination


@dataclass(frozen=True, slots=True, kw_only=True)
class GapSummary:
    """The offset gaps of an object: offsets without a record (I3), by cause."""

    runs: tuple[Gap, ...] = ()
    """The first runs in ascending order, at most `source.gaps.MAX_RUNS`."""

    control: int = 0
    """Number of offsets that transaction markers take."""

    aborted: int = 0
    """Number of offsets of aborted records."""

    compacted: int = 0
    """Number of offsets that the source's log no longer has."""

    @property
    def offset_count(self) -> int:
        """Number of offsets without a record."""
        return self.control + self.aborted + self.compacted


@dataclass(frozen=True, slots=True, kw_only=True)
class Receipt:
    """One finished object: published, or staged with the token that publishes it."""

    covered: OffsetRange
    """The offsets that the object covers."""

    record_count: int
    payload_bytes: int
    """Bytes as `max-bytes` counts them."""

    object_bytes: int
    """Size of the object. Clusters: bytes of the batches."""

    digest: str
    """The digest of the copied content, as the claim holds it. Clusters: empty."""

    trigger: Trigger
    gaps: GapSummary
    elapsed_ms: int
    """Time from the object's first byte until it was durable."""

    token: str | None = None
    """The token that publishes the object, while it is only staged."""

    existed: bool = False
    """Another writer claimed or published this object first, with the same content."""

    claimed_by: str = ""
    """The ID of the writer that claimed it first. Empty: this one."""

    batch_count: int = 0
    """Number of batches that the destination cluster acknowledged. Archives: 0."""

    leader_epoch: int = -1
    """The source's leader epoch of the batch that holds the last offset. -1: unknown."""

    decided: tuple[Decided, ...] = ()
    """See `Claim.decided`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SliceResult:
    """The result of one slice. Receipts are valid even if an error follows them."""

    slice: Slice
    receipts: tuple[Receipt, ...]
    """The finished objects in offset order, without gaps between them."""

    rest_bytes: int = 0
    """Payload bytes between the last receipt and `next_offset`: read, but not yet written."""

    next_offset: int = 0
    """One past the last offset that was read."""

    source_bytes: int = 0
    """Bytes of the batches that were received."""

    elapsed_ms: int = 0
    tail_checked: bool = False
    """The replica's tail was compared with the source, and matches."""

    fenced: bool = False
    """Batches in flight from before are rejected from now on; see `Work.fenced`."""

    in_flight_max: int = 1
    """For the slice that continues this one; see `Work.in_flight_max`."""

    hold: Hold | None = None
    """What the flow must wait for, with an `error` that describes it. None: nothing."""

    peak_bytes: int = 0
    """Peak resident memory of the process that ran the slice, in bytes. 0: unknown."""

    error: LogmirrorError | None = None
    """What ended the slice early."""

    @property
    def leader_epoch(self) -> int:
        """The source's leader epoch of the batch before `next_offset`. -1: unknown."""
        if self.next_offset == self.slice.first:
            return self.slice.leader_epoch
        last = self.receipts[-1] if self.receipts else None
        return last.leader_epoch if last and last.covered.next_offset == self.next_offset else -1


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceView:
    """State of one partition of the source at one moment."""

    topic_id: bytes | None
    log_start: int
    """The log start offset: the first offset that the source still has."""

    last_stable_offset: int
    """The last stable offset: one past the last offset that may be copied."""

    leader_epoch: int = -1
    """The current leader epoch. -1: the source has none."""

    epoch_end: EpochEnd | None = None
    """What the source reports about the leader epoch of the last copied batch. None: nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Where a flow starts after its position was read and compared with the source."""

    position: int
    """The next offset to copy."""

    leader_epoch: int
    """The source's leader epoch of the batch before `position`. -1: unknown."""

    tail_checked: bool
    """See `Work.tail_checked`."""

    view: SourceView
    """What it was compared with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Begun:
    """What a destination did, and knows, before the first write after a start."""

    wait_ms: int = 0
    """The flow waits for this long, and then reads its position again. 0: it begins."""

    newest: str = ""
    """File name of the chain's last known object. Empty: none."""

    snapshot_ms: int = 0
    """`compaction: log`: when the newest snapshot was written, in milliseconds since 1970."""

    rebuild: bool = False
    """`compaction: log`: the next snapshot is built from the source's whole log."""


@dataclass(eq=False, kw_only=True)  # without slots: the stop channel refers to it weakly
class Job:
    """The slices of one tick of one lane, as the engine knows them."""

    on_progress: Callable[[], None] = lambda: None
    """Called, from any thread, when a slice has moved data. Must not block."""

    after: Job | None = None
    """The job of the same flows that still runs. Its slots hand their positions over when all of
    them have ended without an error; this job does nothing before, and nothing at all otherwise."""

    is_over: bool = False
    """Its follow windows end."""


class EngineLostError(UnavailableError):
    """The engine has ended. This process cannot continue; restart it."""


class Runner(Protocol):
    """Runs slices: on Spark, or in this process for a test. Safe from any thread."""

    @property
    def slots(self) -> int:
        """How many works run in parallel, at least 1.

        Raises:
            EngineLostError: The engine is gone.
        """
        ...

    def run(self, works: Sequence[Work], slots: int, job: Job) -> list[SliceResult]:
        """Run all works; return one result for each, in any order.

        Args:
            works: The works of one tick of one lane.
            slots: How many of them may run in parallel, at least 1.
            job: Their job. If its predecessor fails, there are no results.

        Raises:
            UnavailableError: The engine failed. Any part of the works may have been done: read the
                positions again.
            EngineLostError: The same, and the engine has ended.
        """
        ...

    def end_follow_windows(self, job: Job | None = None) -> None:
        """End the follow windows of a job; None: of all jobs, also later ones, for a shutdown.

        Safe from a signal handler.
        """
        ...

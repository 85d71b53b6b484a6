"""What the commands report: frozen values, one per partition, problem or event.

Offsets are offsets of the source, 0 to 2^63-1. A position is the next offset: every offset below it
is in the replica, or is an offset gap.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Mapping

    from logmirror.errors import LogmirrorError
    from logmirror.model import Gap, GapCause, OffsetRange

Severity = Literal["ok", "note", "warning", "error"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionStatus:
    """The replication state of one partition at one destination, from `status`."""

    mirror: str
    """The mirror's name in the configuration."""

    destination: str
    """The destination's name in the configuration."""

    topic: str
    """The source topic."""

    partition: int
    """The partition, 0 or above; -1 if the topic, and so its partitions, could not be read."""

    source_end: int | None = None
    """The last stable offset of the source. None if the source could not be read."""

    position: int | None = None
    """The next offset to replicate, read from the destination. None if it could not be read."""

    error: LogmirrorError | None = None
    """Why `source_end` or `position` could not be read, or why `run` would refuse to continue. In
    the second case, `position` is what the destination holds."""

    is_fencing_degraded: bool = False
    """Whether the object store may overwrite objects (`require-atomic-create: false`): two writers
    are then not kept apart by the store."""

    @property
    def lag(self) -> int | None:
        """Offsets not replicated yet, 0 or more. None if `source_end` or `position` is None."""
        if self.source_end is None or self.position is None:
            return None
        return max(self.source_end - self.position, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One finding of `verify`."""

    kind: str
    """The kind of error, as in `LogmirrorError.kind`: `corruption`, `position`, ..."""

    message: str
    """What was expected and what was found. For people; not stable."""

    hint: str
    """What to do next. May be empty."""

    facts: Mapping[str, str]
    """Offsets, names and values of the finding, as text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyReport:
    """The verification result of one partition at one destination, from `verify`."""

    mirror: str
    """The mirror's name in the configuration."""

    destination: str
    """The destination's name in the configuration."""

    topic: str
    """The source topic."""

    partition: int
    """The partition, 0 or above."""

    objects: int = 0
    """Objects in the archive's chain. 0 for a replica in Kafka."""

    first: int | None = None
    """The first offset that the replica covers. None if it is empty or could not be read."""

    next_offset: int | None = None
    """The position: the offset after the last one that the replica covers."""

    records: int | None = None
    """Records read. None unless `deep` or `against_source` was requested."""

    gap_offsets: int | None = None
    """Offsets without a record, of any cause. None unless the records were read."""

    gaps_by_cause: Mapping[GapCause, int] = field(default_factory=dict)
    """Offsets without a record, by cause."""

    gaps: tuple[Gap, ...] = ()
    """Runs of offsets without a record, ascending; at most 100,000. The counts are complete."""

    bytes: int = 0
    """Size of the objects read, in bytes."""

    without_digest: int = 0
    """Objects with neither a claim nor a logmirror footer, such as those of mirror-v3. Their digest
    is not recorded, so only `against_source` finds a changed byte that still parses."""

    compared: int = 0
    """Objects, or ranges of a replica in Kafka, that equal what the source serves now."""

    gone_at_source: int = 0
    """Objects, or ranges, that could not be compared: the source has deleted their records."""

    compacted_since: int = 0
    """Records in the replica that the source has compacted away since."""

    claimed: OffsetRange | None = None
    """A range behind the end that is claimed but has no object. A writer is at work, or died; the
    next run writes it. If no writer ran, the newest object was lost."""

    unfinished_compactions: tuple[OffsetRange, ...] = ()
    """Merged objects whose parts were not all deleted. The next `compact` deletes them."""

    group_snapshots: int | None = None
    """Intact snapshots of the mirror's group offsets, in the report of its first partition at the
    archive. None: there are none."""

    groups_as_of_ms: int | None = None
    """When the offsets of the newest of them were read, ms since 1970."""

    problems: tuple[Problem, ...] = ()
    """Every finding. Empty: the replica is verified as far as was requested."""

    @property
    def ok(self) -> bool:
        """Whether no problem was found."""
        return not self.problems


@dataclass(frozen=True, slots=True, kw_only=True)
class CompactReport:
    """What `compact` did, or would do, to one partition of an archive."""

    mirror: str
    """The mirror's name in the configuration."""

    destination: str
    """The destination's name in the configuration."""

    topic: str
    """The source topic."""

    partition: int
    """The partition, 0 or above."""

    objects_before: int = 0
    """Objects in the chain before."""

    objects_after: int = 0
    """Objects in the chain after."""

    bytes_before: int = 0
    """Size of the chain before, in bytes."""

    bytes_after: int = 0
    """Size of the chain after, in bytes. With `dry_run` the size before: it is not predicted."""

    merged: int = 0
    """Small objects that became part of larger ones."""

    into: int = 0
    """Larger objects written."""

    finished: int = 0
    """Objects deleted that an interrupted `compact` had left behind."""

    error: LogmirrorError | None = None
    """Why the partition could not be compacted. Nothing unverified was deleted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckReport:
    """One row of `check`: something that a mirror needs, and whether it has it."""

    mirror: str
    """The mirror's name in the configuration."""

    destination: str
    """The destination's name in the configuration. Empty: the source."""

    severity: Severity
    """`error`: `run` would fail."""

    what: str
    """What was checked: `source`, `settings`, `permissions`, `topic`, `position`, ..."""

    found: str
    """What was found. For people; not stable."""

    advice: str = ""
    """What to do about it. Empty if there is nothing to do."""


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Acl:
    """One operation on one Kafka resource that a principal needs."""

    resource: Literal["cluster", "group", "topic", "transactional-id"]
    """Kafka's resource type."""

    name: str
    """The resource's name, or the prefix of names."""

    is_prefix: bool = False
    """Whether the resource pattern type is `prefixed`, else `literal`."""

    operation: str
    """The operation, spelled as `kafka-acls.sh` spells it: `DescribeConfigs`."""

    is_optional: bool = False
    """Whether replication works without it; `purpose` says what is lost."""

    purpose: str
    """What it is needed for: lower case, no full stop."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterAcls:
    """What one principal needs at one cluster, from `kafka_acls`."""

    bootstrap_servers: str
    """Addresses of the cluster, comma-separated."""

    principal: str
    """The principal, such as `User:mirror`."""

    acls: tuple[Acl, ...]
    """Sorted by resource and operation, without duplicates."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MirrorProgress:
    """How far one mirror is, over all its partitions and destinations."""

    mirror: str
    """The mirror's name."""

    records: int
    """Records written since the start of the run."""

    written_bytes: int
    """Bytes written since the start of the run: of objects, or of batches."""

    remaining: int
    """Offsets that are not copied yet, as last polled. A run until now: up to its end."""

    waiting: int
    """Flows that back off after a failure."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunProgress:
    """How far a run is."""

    elapsed_s: float
    """Seconds since replication started."""

    mirrors: tuple[MirrorProgress, ...]
    """The mirrors, in the order of the configuration."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One log event of a running mirror, as described in docs/metrics.md."""

    at_ms: int
    """When, in milliseconds since the Unix epoch."""

    level: Literal["DEBUG", "INFO", "WARNING", "ERROR"]
    """Severity of the event."""

    name: str
    """What happened, such as `flushed`, `mirror starts` or `flow waits: ...`."""

    facts: Mapping[str, object]
    """Fields of the event: `mirror`, `topic`, `partition`, `destination`, offsets, sizes, times."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NextRecord:
    """The record at which a consumer group would continue in a replica."""

    offset: int | None
    """Its offset in the replica. None: the group has read the replica to its end."""

    timestamp_ms: int | None = None
    """Its timestamp, in milliseconds since the Unix epoch. None at the end."""

    key: str | None = None
    """The first 40 characters of its key as printable text, with `...` after them if the key is
    longer. None: the record has no key, or there is no record."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupStep:
    """One partition of a consumer group, and where the group continues in a replica."""

    mirror: str
    """The mirror's name in the configuration."""

    topic: str
    """The source topic."""

    partition: int

    target_topic: str
    """The topic at the destination."""

    source_offset: int
    """The group's committed offset at the source: the next one to read."""

    target_offset: int | None
    """The offset of the destination to commit. None if it is not known; `reason` says why."""

    current_offset: int | None
    """The group's committed offset at the destination. None: it has none."""

    metadata: str = ""
    """The metadata of the commit at the source."""

    current_metadata: str = ""
    """The metadata of the commit at the destination."""

    reason: str = ""
    """Why the translation is not exact, or why nothing is committed. Empty: it is exact."""

    read_again: int | None = 0
    """Records that the group has read at the source and reads again. None: not counted."""

    next_record: NextRecord | None = None
    """Where the group would continue in the replica: the first visible record at or after
    `target_offset`, or at or after `current_offset` if that is higher. None: not read."""

    @property
    def is_committed(self) -> bool:
        """Whether `apply_groups` commits it: never an offset before the one that is there."""
        if self.target_offset is None:
            return False
        return self.current_offset is None or self.current_offset < self.target_offset


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPlan:
    """What a consumer group needs to continue at one destination, from `plan_groups`."""

    group: str
    destination: str
    """The destination's name in the configuration."""

    cluster_id: str
    """Of the destination's cluster."""

    source_state: str
    """As Kafka names it: `Empty`, `Stable`, ..."""

    target_state: str
    """The state at the destination. Empty if the group does not exist there."""

    as_of_ms: int | None = None
    """When the committed offsets were read, ms since 1970, if they are from a snapshot beside an
    archive. `source_state` is empty then."""

    steps: tuple[GroupStep, ...]
    """By source topic and partition."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupOutcome:
    """What `apply_groups` or `rollback_groups` did with one partition of a group."""

    group: str
    destination: str
    target_topic: str
    partition: int
    offset: int | None
    """The committed offset that was read back. None: there is none."""

    is_done: bool
    """Whether the destination has what the plan says."""

    reason: str = ""
    """Why not; or `unchanged`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupLinkStatus:
    """The consumer groups of one source for one destination, from `group_status`."""

    source: str
    """The alias of the source."""

    destination: str
    """The destination's name in the configuration."""

    groups: int = 0
    """Groups with committed offsets of mirrored partitions, as far as they could be read."""

    exact: int = 0
    """Those of which every offset can be translated exactly now."""

    inexact: int = 0
    """Those that can be translated, but may read records again."""

    not_translated: int = 0
    """Those with an offset that cannot be translated, or whose offsets could not be read."""

    reason: str = ""
    """The most frequent reason why groups are inexact or not translated, as in the metric
    `logmirror_groups_by_reason`. Empty: all are exact."""

    heartbeat_age_s: int | None = None
    """Seconds since the last heartbeat at the destination: a running mirror writes one in each
    interval of `groups`. None: there is none, or it could not be read."""

    error: LogmirrorError | None = None
    """Why the groups could not be read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CostCause:
    """Requests to a bucket that have one cause."""

    cause: str
    """What they are for."""

    put: float = 0
    """Writes, those of parts of an object included."""

    get: float = 0
    """Reads, and requests for the size of an object."""

    list: float = 0
    """Listings."""

    delete: float = 0
    """Deletions."""

    put_bytes: float = 0
    """Bytes that are written."""

    get_bytes: float = 0
    """Bytes that are read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CostReport:
    """What a broker in a bucket costs, as far as it is known from its settings and load."""

    seconds: float
    """The time that it is for."""

    causes: tuple[CostCause, ...]
    """The requests, by cause."""

    segment_bytes: float
    """Size of a sealed segment. 0: nothing is written."""

    segment_s: float
    """How long a segment is open, in seconds."""

    prices: Mapping[str, float]
    """Price of 1,000 requests, by kind, as far as it was given."""

    @property
    def requests(self) -> dict[str, float]:
        """The requests of all causes, by kind."""
        return {
            "put": sum(one.put for one in self.causes),
            "get": sum(one.get for one in self.causes),
            "list": sum(one.list for one in self.causes),
            "delete": sum(one.delete for one in self.causes),
        }

    @property
    def cost(self) -> dict[str, float]:
        """The price of the requests of each kind that has one."""
        return {kind: self.requests[kind] * price / 1000 for kind, price in self.prices.items()}

"""Verify an archive: its object names, its content, and what the source still has.

There are three depths, each including the previous one. `names`: the chain is complete, and no
claim is beyond its end. `deep`: every object is read completely (`archive.reader`), and each offset
gap has a cause. `against_source`: see `verification.source`.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple

from logmirror.archive.chain import chain
from logmirror.archive.claims import claims_folder, first_claimed, latest_claim
from logmirror.archive.compactions import objects_from, read_cover
from logmirror.archive.gap_facts import GapFacts
from logmirror.archive.object_check import check_object
from logmirror.errors import CorruptionError, LogmirrorError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from logmirror.archive.chain import ArchiveObject, Chain
    from logmirror.archive.cover import Cover
    from logmirror.archive.group_snapshots import Snapshots
    from logmirror.archive.object_check import ObjectReport
    from logmirror.mirror.ports import ArchiveSpec, ChainStart, FlowId
    from logmirror.model import Gap, GapCause, OffsetRange
    from logmirror.stores.base import BlobStore

RUNS_REPORTED: Final = 100_000
"""The most gaps listed per flow; the counts include all."""

_SHOWN: Final = 5


@dataclass(slots=True, kw_only=True)
class FlowReport:
    """The findings for one flow."""

    flow: FlowId
    objects: int = 0
    first: int | None = None
    next_offset: int | None = None
    record_count: int | None = None
    """Records read; None if the objects were not read."""

    gap_offsets: int | None = None
    """Offsets without a record, of any cause."""

    gap_counts: dict[GapCause, int] = field(default_factory=dict)
    """Offsets without a record by cause, in archives."""

    gap_runs: list[Gap] = field(default_factory=list)
    """The gaps, ascending; at most `RUNS_REPORTED`."""

    object_bytes: int = 0
    compared: int = 0
    """Objects that agree with the source."""

    gone: int = 0
    """Objects that cannot be compared, because the source has deleted some of their records."""

    compacted_since: int = 0
    """Records of the archive that the source has compacted away since."""

    unwitnessed: int = 0
    """Objects without a claim and without logmirror's footer. They have no expected digest, so a
    changed byte that leaves the object valid is found only by comparison with the source."""

    claimed: OffsetRange | None = None
    """A claimed range behind the end of the chain, without an object: a writer is active or died,
    or the newest object is lost. The next run writes it."""

    unfinished: tuple[OffsetRange, ...] = ()
    """Merged objects whose replaced objects still exist; `compact` deletes those."""

    group_snapshots: int | None = None
    """Intact snapshots of group offsets. None: there are none, or another report has them."""

    groups_as_of_ms: int | None = None
    """The time of the newest one, ms since 1970."""

    problems: list[dict[str, object]] = field(default_factory=list)
    """Kind, message, hint and facts of each problem; empty if verified at the requested depth."""

    def add_problem(self, error: LogmirrorError) -> None:
        """Record an error; verification continues with the next object."""
        self.problems.append(
            {
                "kind": error.kind,
                "message": error.message,
                "hint": error.hint,
                "facts": {name: str(value) for name, value in error.facts.items()},
            }
        )

    def add_gaps(self, gaps: GapFacts) -> None:
        """Add the gaps of the next object."""
        self.gap_offsets = (self.gap_offsets or 0) + gaps.offset_count
        for cause, count in gaps.counts.items():
            self.gap_counts[cause] = self.gap_counts.get(cause, 0) + count
        self.gap_runs += gaps.runs[: RUNS_REPORTED - len(self.gap_runs)]


class _Totals(NamedTuple):
    """The totals of a report before an object was added."""

    record_count: int | None
    gap_offsets: int | None
    gap_counts: dict[GapCause, int]
    run_count: int
    object_bytes: int
    compared: int
    gone: int
    compacted_since: int
    unwitnessed: int

    @classmethod
    def of(cls, report: FlowReport) -> _Totals:
        return cls(
            report.record_count,
            report.gap_offsets,
            dict(report.gap_counts),
            len(report.gap_runs),
            report.object_bytes,
            report.compared,
            report.gone,
            report.compacted_since,
            report.unwitnessed,
        )

    def restore(self, report: FlowReport) -> None:
        for name, value in self._asdict().items():
            if name == "run_count":
                del report.gap_runs[value:]
            else:
                setattr(report, name, value)


class Checked(NamedTuple):
    """One valid object."""

    obj: ArchiveObject
    found: ObjectReport
    gaps: GapFacts


def verify_names(
    store: BlobStore,
    flow: FlowId,
    extension: str,
    *,
    chain_start: ChainStart,
    snapshots: bool = False,
) -> tuple[FlowReport, tuple[ArchiveObject, ...]]:
    """Check the chain of names; the links are empty if there is no valid chain."""
    report = FlowReport(flow=flow)
    start = None if chain_start == "earliest" or snapshots else chain_start or 0
    try:
        # In this order: a writer claims a range only after everything below it is published.
        newest = latest_claim(store, flow.destination, flow.partition)
        found: Chain | Cover
        if snapshots:
            names = store.names(flow.folder)
            found = chain(names, extension=extension, start=None, snapshots=True)
        else:
            found = read_cover(store, flow.folder, extension=extension, start=start)
            report.unfinished = tuple(around.covered for around in found.replaced)
    except LogmirrorError as error:
        report.add_problem(error)
        return report, ()
    report.objects = len(found.objects)
    report.first = found.objects[0].first if found.objects else None
    report.next_offset = found.next_offset
    if newest is None:
        return report, found.objects
    end = found.next_offset
    if end is None:  # an empty chain begins where the first claim does
        end = int(next(iter(store.names(claims_folder(flow.destination, flow.partition)))))
    if newest.covered.first > end:
        report.add_problem(
            CorruptionError(
                "objects are missing at the end of the chain",
                hint="a later range was claimed, which happens only after everything below it is "
                "published. The next run copies them again if the source still has them.",
                folder=flow.folder,
                expected=newest.covered.first,
                found=end,
            )
        )
    elif newest.covered.first == end:
        report.claimed = newest.covered
    return report, found.objects


def verify_content(  # noqa: PLR0913  # what to read, and in which format
    report: FlowReport,
    objects: tuple[ArchiveObject, ...],
    store: BlobStore,
    archive: ArchiveSpec,
    on_object: Callable[[], None] = lambda: None,
    *,
    ask_source: bool = False,
    compacted: bool = False,
) -> Iterator[Checked]:
    """Read every object; yield each valid one.

    Args:
        report: Receives the findings.
        objects: The objects of the chain.
        store: The store with the objects.
        archive: Their format.
        on_object: Called after each object.
        ask_source: Whether the source can explain gaps without a cause, so that they are not
            reported here.
        compacted: Whether native objects may end before the last offset in their name, because
            their last offsets were compacted away at the source.
    """
    report.record_count, report.gap_offsets = 0, 0
    flow, mirror_v3_before = report.flow, 0
    if objects and archive.format == "ndjson":
        mirror_v3_before = first_claimed(store, flow.destination, flow.partition)
    topic_id = ""
    before: list[tuple[ArchiveObject, _Totals]] = []
    waiting = deque(objects)
    while waiting:
        obj = waiting.popleft()
        try:
            found = check_object(
                store,
                flow.folder,
                obj.name,
                deep=True,
                utf8=archive.encoding == "utf8",
                topic=flow.topic,
                compacted=compacted,
                snapshots=archive.compaction is not None,
                mirror_v3_before=mirror_v3_before,
                limits=archive.limits,
            )
            topic_id = _same_topic(topic_id, found)
            gaps = found.gaps or GapFacts()
            if gaps.unexplained_count and not ask_source:
                raise unexplained(obj, gaps)
        except KeyError:
            # A compaction has replaced it, and possibly others that were read before it.
            try:
                waiting = deque(objects_from(store, flow.folder, obj, archive.extension))
            except CorruptionError as error:
                report.add_problem(error)
            while before and waiting and before[-1][0].last >= waiting[0].first:
                before.pop()[1].restore(report)
            continue
        except LogmirrorError as error:
            report.add_problem(error)
        else:
            before.append((obj, _Totals.of(report)))
            report.record_count += found.record_count or 0
            report.object_bytes += found.size_bytes
            report.unwitnessed += not found.is_witnessed
            report.add_gaps(gaps)
            yield Checked(obj, found, gaps)
        on_object()


def verify_group_offsets(report: FlowReport, snapshots: Snapshots, *, deep: bool) -> None:
    """Check the snapshots of group offsets of a mirror: names, digests, numbers.

    Args:
        report: Receives the findings: that of one partition of the mirror.
        snapshots: The snapshots.
        deep: Read all, not only those of the last page of a listing.
    """
    found = snapshots.check(deep=deep)
    for problem in found.problems:
        report.add_problem(problem)
    if found.intact or found.problems:
        report.group_snapshots = found.intact
    if found.newest is not None:
        report.groups_as_of_ms = found.newest.header.time_ms


def unexplained(obj: ArchiveObject, gaps: GapFacts) -> CorruptionError:
    """The finding for an offset gap without a cause."""
    return CorruptionError(
        "offsets are missing without a recorded cause",
        hint="the claim with the cause is lost, or records were removed. `logmirror verify "
        "--against-source` reads the cause from the source, if it still has those offsets.",
        name=obj.name,
        missing=gaps.unexplained_count,
        offsets=shown_runs(gaps.unexplained),
    )


def shown_runs(runs: tuple[OffsetRange, ...]) -> str:
    """The first few ranges, as text."""
    more = ["..."] if len(runs) > _SHOWN else []
    return ", ".join([f"{run.first}-{run.last}" for run in runs[:_SHOWN]] + more)


def _same_topic(topic_id: str, found: ObjectReport) -> str:
    if topic_id and found.topic_id and topic_id != found.topic_id:
        raise CorruptionError(
            "the object has another topic ID than those before it",
            hint="the topic was deleted and recreated, or the object is from another archive",
            name=found.name,
            expected_topic_id=topic_id,
            found_topic_id=found.topic_id,
        )
    return topic_id or found.topic_id

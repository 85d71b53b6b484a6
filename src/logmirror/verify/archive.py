"""Prove a copy in an archive: its names, its content, and what the source still shows.

Three depths, each including the one before. `names`: the chain, and that no claim lies behind its
end. `deep`: every object is read whole (`archive.reader`), and each offset without a record has a
cause. `against_source`: see `verify_source`.
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
    from logmirror.archive.object_check import ObjectReport
    from logmirror.mirror.ports import ArchiveSpec, ChainStart, FlowId
    from logmirror.model import Gap, GapCause, OffsetRange
    from logmirror.stores.base import BlobStore

RUNS_REPORTED: Final = 100_000
"""Holes remembered of one flow; the counts are complete beyond them."""

_SHOWN: Final = 5


@dataclass(slots=True, kw_only=True)
class FlowReport:
    """What was found of one flow."""

    flow: FlowId
    objects: int = 0
    first: int | None = None
    next_offset: int | None = None
    record_count: int | None = None
    """Records read; None unless the objects were read."""

    gap_offsets: int | None = None
    """Offsets without a record, whatever the cause."""

    gap_counts: dict[GapCause, int] = field(default_factory=dict)
    """The same by cause, in archives."""

    gap_runs: list[Gap] = field(default_factory=list)
    """Where they are, ascending; of very many the first."""

    object_bytes: int = 0
    compared: int = 0
    """Objects that hold what the source serves now."""

    gone: int = 0
    """Objects that cannot be compared: the source no longer has all of their records."""

    compacted_since: int = 0
    """Records that the copy has and the source has compacted away since."""

    unwitnessed: int = 0
    """Objects without a claim or a footer of ours: nothing says what digest they must have, so a
    changed byte that still makes sense is seen only beside the source."""

    claimed: OffsetRange | None = None
    """A range behind the end that is claimed and not published: a writer is at it or has died, or
    else the newest object is lost. The next run writes it."""

    unfinished: tuple[OffsetRange, ...] = ()
    """Merged objects beside which some that they replace still lie; `compact` deletes those."""

    problems: list[dict[str, object]] = field(default_factory=list)
    """Kind, message, hint and facts of each; empty means proven as far as was asked."""

    def add_problem(self, error: LogmirrorError) -> None:
        """Note an error and go on with the next object."""
        self.problems.append(
            {
                "kind": error.kind,
                "message": error.message,
                "hint": error.hint,
                "facts": {name: str(value) for name, value in error.facts.items()},
            }
        )

    def add_gaps(self, gaps: GapFacts) -> None:
        """Add those of the next object."""
        self.gap_offsets = (self.gap_offsets or 0) + gaps.offset_count
        for cause, count in gaps.counts.items():
            self.gap_counts[cause] = self.gap_counts.get(cause, 0) + count
        self.gap_runs += gaps.runs[: RUNS_REPORTED - len(self.gap_runs)]


class _Totals(NamedTuple):
    """What a report said of records before an object was added to it."""

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
    """One sound object."""

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
        # In this order: whoever claims a range has seen everything before it published.
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
                hint="a later range was claimed, which nobody does before everything below it is "
                "published. The next run copies them again if the source still has them.",
                folder=flow.folder,
                expected=newest.covered.first,
                found=end,
            )
        )
    elif newest.covered.first == end:
        report.claimed = newest.covered
    return report, found.objects


def verify_content(  # noqa: PLR0913  # what to read, and how it was written
    report: FlowReport,
    objects: tuple[ArchiveObject, ...],
    store: BlobStore,
    archive: ArchiveSpec,
    on_object: Callable[[], None] = lambda: None,
    *,
    ask_source: bool = False,
    compacted: bool = False,
) -> Iterator[Checked]:
    """Read every object; yields each sound one.

    Args:
        report: What is found is added to it.
        objects: The objects of the chain.
        store: Where they lie.
        archive: How they were written.
        on_object: Called after each.
        ask_source: Offsets that are missing without a cause are no finding yet.
        compacted: Native objects may end before their names say, as one does whose last offsets
            were compacted away at the source.
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
            )
            topic_id = _same_topic(topic_id, found)
            gaps = found.gaps or GapFacts()
            if gaps.unexplained_count and not ask_source:
                raise unexplained(obj, gaps)
        except KeyError:
            # A compaction has replaced it, and perhaps others that were read before it.
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


def unexplained(obj: ArchiveObject, gaps: GapFacts) -> CorruptionError:
    """The finding that offsets are missing and nothing says why."""
    return CorruptionError(
        "offsets are missing and nothing tells why",
        hint="the claim that told it is gone, or records were taken out. `logmirror verify "
        "--against-source` asks the source, as long as it has them.",
        name=obj.name,
        missing=gaps.unexplained_count,
        offsets=shown_runs(gaps.unexplained),
    )


def shown_runs(runs: tuple[OffsetRange, ...]) -> str:
    """The first runs of many, as text."""
    more = ["..."] if len(runs) > _SHOWN else []
    return ", ".join([f"{run.first}-{run.last}" for run in runs[:_SHOWN]] + more)


def _same_topic(topic_id: str, found: ObjectReport) -> str:
    if topic_id and found.topic_id and topic_id != found.topic_id:
        raise CorruptionError(
            "the object is of another topic than those before it",
            hint="the topic was deleted and created again, or the object comes from elsewhere",
            name=found.name,
            expected_topic_id=topic_id,
            found_topic_id=found.topic_id,
        )
    return topic_id or found.topic_id

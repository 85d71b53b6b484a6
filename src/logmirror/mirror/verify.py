"""Prove a copy: its names, its content, and what the source still shows.

Three depths, each including the one before. `names`: the chain. `deep`: every object is read whole
(`archive.reader`). `against_source`: the digest of each object's content is computed anew from what
the source serves now, by the same code that wrote it, over the same range.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import xxhash

from logmirror.archive.compactions import links_from, read_cover
from logmirror.archive.reader import check_object
from logmirror.errors import CorruptionError, LogmirrorError
from logmirror.wire.columns import ContentDigest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from logmirror.archive.chain import Link
    from logmirror.mirror.kafka_source import KafkaSource
    from logmirror.mirror.ports import ArchiveSpec, ChainStart, FlowId, SourceView
    from logmirror.model import OffsetRange
    from logmirror.stores.base import BlobStore
    from logmirror.wire.decode import RecordDecoder


@dataclass(slots=True, kw_only=True)
class FlowReport:
    """What was found of one flow."""

    flow: FlowId
    objects: int = 0
    first: int | None = None
    next_offset: int | None = None
    record_count: int | None = None
    """Records read; None unless the objects were read."""

    hole_offsets: int | None = None
    object_bytes: int = 0
    compared: int = 0
    """Objects whose content equals what the source serves now."""

    gone: int = 0
    """Objects that cannot be compared: the source no longer has all of their records."""

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


def verify_names(
    store: BlobStore, flow: FlowId, extension: str, *, chain_start: ChainStart
) -> tuple[FlowReport, tuple[Link, ...]]:
    """Check the chain of names; the links are empty if there is no valid chain."""
    report = FlowReport(flow=flow)
    start = None if chain_start == "earliest" else chain_start or 0
    try:
        found = read_cover(store, flow.folder, extension=extension, start=start)
    except CorruptionError as error:
        report.add_problem(error)
        return report, ()
    report.objects = len(found.links)
    report.first = found.links[0].first if found.links else None
    report.next_offset = found.next_offset
    report.unfinished = tuple(around.covered for around in found.replaced)
    return report, found.links


def verify_content(  # noqa: PLR0913  # what to read, and how it was written
    report: FlowReport,
    links: tuple[Link, ...],
    store: BlobStore,
    archive: ArchiveSpec,
    on_object: Callable[[], None] = lambda: None,
    *,
    compacted: bool = False,
) -> Iterator[tuple[Link, str]]:
    """Read every object; yields each sound one with the digest of its content.

    `compacted` lets a native object end before its name says, as one does whose last offsets were
    compacted away at the source.
    """
    counts: dict[Link, tuple[int, int]] = {}
    waiting = deque(links)
    while waiting:
        link = waiting.popleft()
        try:
            found = check_object(
                store,
                report.flow.folder,
                link.name,
                deep=True,
                utf8=archive.encoding == "utf8",
                compacted=compacted,
            )
        except KeyError:
            # A compaction has replaced it, and perhaps others that were read before it.
            try:
                now = links_from(store, report.flow.folder, link, archive.extension)
            except CorruptionError as error:
                report.add_problem(error)
            else:
                waiting = deque(now)
                counts = {done: n for done, n in counts.items() if done.last < now[0].first}
            continue
        except LogmirrorError as error:
            report.add_problem(error)
        else:
            counts[link] = found.record_count or 0, found.size_bytes
            yield link, found.digest or ""
        on_object()
    report.record_count = sum(count for count, _ in counts.values())
    report.hole_offsets = sum(link.covered.offset_count for link in counts) - report.record_count
    report.object_bytes = sum(size_bytes for _, size_bytes in counts.values())


def compare_with_source(  # noqa: PLR0913  # what to compare, and the two sides of it
    report: FlowReport,
    link: Link,
    digest: str,
    *,
    archive: ArchiveSpec,
    view: SourceView,
    source: KafkaSource,
    decoder: RecordDecoder,
) -> None:
    """Compare one object with what the source serves for the same offsets."""
    if link.first < view.log_start:
        report.gone += 1
        return
    try:
        if link.last >= view.stable_end:
            raise CorruptionError(
                "the object reaches beyond the end of the source",
                hint="the source was cut or created again, or this is another cluster",
                name=link.name,
                stable_end=view.stable_end,
            )
        found = source_digest(source, decoder, archive, link.covered)
        if found != digest:
            raise CorruptionError(
                "the object differs from what the source serves for its offsets",
                hint="on a compacted topic the source may have dropped records since; elsewhere "
                "read both and compare: `kcat -C -o <from> -c <count>` shows the source",
                name=link.name,
                expected=found,
                found=digest,
            )
    except LogmirrorError as error:
        report.add_problem(error)
    else:
        report.compared += 1


def source_digest(
    source: KafkaSource, decoder: RecordDecoder, archive: ArchiveSpec, covered: OffsetRange
) -> str:
    """The content digest that an object over these offsets must have, from the source alone."""
    end = covered.next_offset
    if archive.format == "native":
        raw = xxhash.xxh3_128()
        for fetched in source.read(covered.first, end):
            batches = fetched.batches
            stop = int(batches.base_offsets.searchsorted(end))
            if stop > fetched.start:
                begin = int(batches.positions[fetched.start])
                last = int(batches.positions[stop - 1] + batches.sizes[stop - 1])
                raw.update(fetched.buffer[begin:last])
        return f"xxh3:{raw.hexdigest()}"
    rows = ContentDigest()
    for fetched in source.read(covered.first, end):
        for columns in decoder.decode(
            fetched.buffer, fetched.batches, first=covered.first, end=end
        ):
            rows.update(columns, 0, columns.rows)
    return str(rows.hexdigest())

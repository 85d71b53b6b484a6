"""Prove a copy in a cluster: its end, every batch of it, and what the source still shows.

The depths are those of `verify.archive`: without more the log end is looked up; `deep` reads every
batch with its checksum and decodes every record; `against_source` compares them, record by record,
over all offsets that both still have.

A copy at new offsets is proven as a sequence: what its transactions hold must be what the source
shows below the position, record by record, aligned at the end. That proves that nothing is doubled,
lost or out of order, if nobody else writes in transactions to the destination's topic; records that
others wrote without are passed over.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from logmirror.errors import CorruptionError, LogmirrorError
from logmirror.source.compare import chunks, difference, rows, sequence_difference

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pyarrow as pa

    from logmirror.mirror.ports import KafkaSpec, SourceView
    from logmirror.source.partition import KafkaSource
    from logmirror.verify.archive import FlowReport
    from logmirror.wire.decode import RecordDecoder


def verify_deep(
    report: FlowReport, log: KafkaSource, decoder: RecordDecoder, first: int, end: int
) -> None:
    """Read the whole copy: checksums, structure, order, and that it is there up to its end."""
    count, reached = 0, first
    try:
        for table, position in chunks(log, decoder, first, end):
            count, reached = count + table.num_rows, position
        if reached < end:
            raise CorruptionError("the copy ends below its log end", expected=end, found=reached)
    except LogmirrorError as error:
        report.add_problem(error)
    report.record_count, report.gap_offsets = count, end - first - count


def verify_against_source(  # noqa: PLR0913  # two sides and the range that both have
    report: FlowReport,
    *,
    spec: KafkaSpec,
    log: KafkaSource,
    first: int,
    source: KafkaSource,
    view: SourceView,
    decoder: RecordDecoder,
    compacted: bool,
) -> None:
    """Compare every record that both sides have; stops at the first that differs."""
    end, position = report.next_offset or 0, max(first, view.log_start)
    try:
        if end > view.last_stable_offset:
            raise CorruptionError(
                "the copy reaches beyond the end of the source",
                hint="the source was cut or created again, this is another cluster, or someone "
                "else wrote to the destination's topic",
                end=end,
                last_stable_offset=view.last_stable_offset,
            )
        for expected, reached in chunks(source, decoder, position, end):
            found = rows(log, decoder, position, reached)
            differs = difference(
                found, expected, timestamps=spec.keeps_timestamps, compacted=compacted
            )
            if differs is not None:
                raise CorruptionError(
                    "the copy differs from what the source serves at the same offset",
                    hint="read both and compare: `kcat -C -p <partition> -o <offset> -c 1`",
                    **differs,
                )
            position = reached
        report.compared = max(position - max(first, view.log_start), 0)
        report.gone = max(view.log_start - first, 0)
    except LogmirrorError as error:
        report.add_problem(error)


def verify_translated(  # noqa: PLR0913  # two sides and what is known of both
    report: FlowReport,
    *,
    spec: KafkaSpec,
    log: KafkaSource,
    bounds: tuple[int, int],
    source: KafkaSource,
    view: SourceView,
    decoder: RecordDecoder,
    compacted: bool,
) -> None:
    """Compare the sequence of a copy at new offsets with the source; see the module.

    Args:
        report: Its `next_offset` is the position, in offsets of the source.
        spec: The destination.
        log: The copy.
        bounds: Where the copy's log begins, and its last stable offset, at that position.
        source: The source.
        view: What it has.
        decoder: For both.
        compacted: Whether the source may have dropped records; then nothing can be compared.
    """
    position = report.next_offset or 0

    def copied() -> Iterator[pa.Table]:
        found = chunks(log, decoder, *bounds, only_transactions=True)
        return (table for table, _ in found)

    def expected() -> Iterator[pa.Table]:
        return (table for table, _ in chunks(source, decoder, view.log_start, position))

    try:
        ours, theirs = (sum(table.num_rows for table in side()) for side in (copied, expected))
        report.record_count = ours
        if compacted:
            report.gone = ours
            return
        if (ours > theirs and not view.log_start) or (ours < theirs and not bounds[0]):
            raise CorruptionError(
                "the copy has another number of records than the source shows",
                hint=_ALONE,
                expected=theirs,
                found=ours,
            )
        report.gone = max(ours - theirs, 0)
        report.compared, differs = sequence_difference(
            _without_first(copied(), ours - theirs),
            _without_first(expected(), theirs - ours),
            timestamps=spec.keeps_timestamps,
        )
        if differs is not None:
            raise CorruptionError(
                "the copy is not the sequence of records that the source shows",
                hint=_ALONE,
                **differs,
            )
    except LogmirrorError as error:
        report.add_problem(error)


_ALONE: Final = (
    "this holds only where nobody else writes in transactions to the destination's topic; then "
    "records were doubled, lost or changed"
)


def _without_first(tables: Iterator[pa.Table], count: int) -> Iterator[pa.Table]:
    """Leave out the first records; none where `count` is not positive."""
    left = max(count, 0)
    for table in tables:
        yield table.slice(min(left, table.num_rows))
        left = max(left - table.num_rows, 0)

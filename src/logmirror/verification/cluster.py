"""Verify a replica in a cluster: its log end, every batch, and what the source still has.

The depths are those of `verification.archive`. By default the log end is read. `deep` reads every
batch with its checksum and decodes every record. `against_source` compares record by record, over
all offsets that both sides still have.

A replica with new offsets is verified as a sequence: the records of its transactions must be those
that the source has below the position, in the same order, aligned at the end. That proves that no
record is duplicated, lost or out of order, if no other client writes to the destination topic in
transactions. Records that other clients wrote without transactions are skipped.
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
    from logmirror.verification.archive import FlowReport
    from logmirror.wire.decode import RecordDecoder


def verify_deep(
    report: FlowReport, log: KafkaSource, decoder: RecordDecoder, first: int, end: int
) -> None:
    """Read the whole replica: checksums, structure, order, and completeness up to its log end."""
    count, reached = 0, first
    try:
        for table, position in chunks(log, decoder, first, end):
            count, reached = count + table.num_rows, position
        if reached < end:
            raise CorruptionError("the replica ends below its log end", expected=end, found=reached)
    except LogmirrorError as error:
        report.add_problem(error)
    report.record_count, report.gap_offsets = count, end - first - count


def verify_against_source(  # noqa: PLR0913  # two sides and their common range
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
    """Compare every record that both sides have, up to the first difference."""
    end, position = report.next_offset or 0, max(first, view.log_start)
    try:
        if end > view.last_stable_offset:
            raise CorruptionError(
                "the replica ends beyond the source",
                hint="the source was truncated or recreated, this is another cluster, or another "
                "client wrote to the destination topic",
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
                    "the replica differs from the source at the same offset",
                    hint="read both and compare: `kcat -C -p <partition> -o <offset> -c 1`",
                    **differs,
                )
            position = reached
        report.compared = max(position - max(first, view.log_start), 0)
        report.gone = max(view.log_start - first, 0)
    except LogmirrorError as error:
        report.add_problem(error)


def verify_translated(  # noqa: PLR0913  # two sides and their metadata
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
    """Compare the sequence of a replica with new offsets with the source; see the module.

    Args:
        report: Its `next_offset` is the position, a source offset.
        spec: The destination.
        log: The replica.
        bounds: The replica's log start offset and last stable offset, at that position.
        source: The source.
        view: The offsets of the source.
        decoder: For both.
        compacted: Whether the source may have compacted records away; then nothing is compared.
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
                "the replica does not have as many records as the source",
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
                "the replica does not have the source's records in the same order",
                hint=_ALONE,
                **differs,
            )
    except LogmirrorError as error:
        report.add_problem(error)


_ALONE: Final = (
    "records were duplicated, lost or changed, unless another client writes to the destination "
    "topic in transactions"
)


def _without_first(tables: Iterator[pa.Table], count: int) -> Iterator[pa.Table]:
    """Skip the first `count` records; none if it is not positive."""
    left = max(count, 0)
    for table in tables:
        yield table.slice(min(left, table.num_rows))
        left = max(left - table.num_rows, 0)

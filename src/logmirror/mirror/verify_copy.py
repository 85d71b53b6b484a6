"""Prove a copy in a cluster: its end, every batch of it, and what the source still shows.

The depths are those of `mirror.verify`: without more the log end is looked up; `deep` reads every
batch with its checksum and decodes every record; `against_source` compares them, record by record,
over all offsets that both still have.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from logmirror.errors import CorruptionError, LogmirrorError
from logmirror.mirror.kafka_compare import chunks, difference, rows

if TYPE_CHECKING:
    from logmirror.mirror.kafka_source import KafkaSource
    from logmirror.mirror.ports import KafkaSpec, SourceView
    from logmirror.mirror.verify import FlowReport
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
    report.record_count, report.hole_offsets = count, end - first - count


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
        if end > view.stable_end:
            raise CorruptionError(
                "the copy reaches beyond the end of the source",
                hint="the source was cut or created again, this is another cluster, or someone "
                "else wrote to the destination's topic",
                end=end,
                stable_end=view.stable_end,
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

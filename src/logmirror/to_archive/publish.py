"""Executor and driver: the claim of a finished object, and its publication.

A separate module because the driver publishes objects that executors staged and needs nothing else
of a slice.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from logmirror.archive.claims import Claim, publish_object
from logmirror.model import GapCause

if TYPE_CHECKING:
    from logmirror.archive.claims import Published
    from logmirror.mirror.ports import GapSummary, Work
    from logmirror.model import Decided, OffsetRange, Trigger
    from logmirror.stores.base import BlobStore


def make_claim(  # noqa: PLR0913  # one argument per fact of the caller
    work: Work,
    covered: OffsetRange,
    trigger: Trigger,
    gaps: GapSummary,
    *,
    record_count: int,
    digest: str,
    created_ms: int,
    leader_epoch: int,
    decided: tuple[Decided, ...] = (),
) -> Claim:
    """Return the claim for one object of this slice."""
    topic_id = work.slice.topic_id
    # Offsets that neither records nor batches explain were compacted away: on a topic that is not
    # compacted, the slice stops before them.
    compacted = covered.offset_count - record_count - gaps.control - gaps.aborted
    if work.archive.compaction:  # records of a snapshot are keys
        compacted = gaps.compacted
    return Claim(
        covered=covered,
        digest=digest,
        writer=work.writer_id,
        topic=work.slice.flow.topic,
        topic_id=topic_id.hex() if topic_id else "",
        partition=work.slice.flow.partition,
        created_ms=created_ms,
        record_count=record_count,
        trigger=trigger,
        leader_epoch=leader_epoch if leader_epoch >= 0 else None,
        gaps=gaps.runs,
        gap_counts={
            GapCause.CONTROL: gaps.control,
            GapCause.ABORTED: gaps.aborted,
            GapCause.COMPACTED: compacted,
        },
        decided=decided,
        rewritable=work.slice.compacted or work.archive.compaction == "log",
    )


def publish(work: Work, store: BlobStore, token: str, claim: Claim) -> Published:
    """Claim and publish one staged object of this slice."""
    return publish_object(
        store,
        token=token,
        folder=work.slice.flow.folder,
        extension=work.archive.extension,
        claim=claim,
    )

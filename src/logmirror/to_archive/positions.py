"""Driver: where a flow stands, read from what is durable at the destination (I1).

The names of the objects are the position. The newest claim remembers which incarnation of the topic
they came from. Nothing else is consulted: no local file, no Spark checkpoint, no group offset.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from logmirror.archive.chain import chain
from logmirror.archive.claims import latest_claim
from logmirror.archive.compactions import confirmed, resolve
from logmirror.archive.naming import split_name
from logmirror.errors import PositionError

if TYPE_CHECKING:
    from logmirror.archive.chain import Chain
    from logmirror.archive.cover import Cover
    from logmirror.mirror.ports import ArchiveSpec, ChainStart, FlowId, SourceView
    from logmirror.stores.base import BlobStore, Tail


def read_chain(
    store: BlobStore,
    flow: FlowId,
    archive: ArchiveSpec,
    *,
    chain_start: ChainStart = None,
    since: str = "",
) -> Chain | Cover:
    """The end of a flow's chain; its `next_offset` is where the destination must be continued.

    Args:
        store: The destination's store.
        flow: Whose chain it is.
        archive: How its objects are written. Snapshots begin wherever the source begins.
        chain_start: Where it must begin.
        since: Name of an object: only those from there on.

    Raises:
        CorruptionError: The names are not one unbroken chain, as far as the store shows them: where
            there are very many, the last of them.
    """
    extension = archive.extension

    def look() -> Tail:
        return store.tail(flow.folder, since.partition("-")[0])

    def judge(tail: Tail) -> Cover:
        start = chain_start or 0 if tail.is_whole and chain_start != "earliest" else None
        return resolve(store, flow.folder, tail.names, extension=extension, start=start)

    if archive.compaction:
        return chain(look().names, extension=extension, start=None, snapshots=True)
    return confirmed(look, judge)


def check_drift(flow: FlowId, *, known: str, newest: str) -> None:
    """Raise PositionError if a chain ends before an object that this process has seen in it.

    Args:
        flow: Whose chain it is.
        known: Name of the last object that was committed or found.
        newest: Name of the last object now; empty: there is none.
    """
    before, now = split_name(known), split_name(newest)
    if before is not None and (now is None or now[1] < before[1]):
        raise PositionError(
            "objects that were there are gone",
            hint="put them back, if somebody moved them. Started again, the mirror continues at "
            "what is there now and writes the missing objects once more, as far as the source "
            "still has their records.",
            reason="DestinationDrift",
            topic=flow.topic,
            partition=flow.partition,
            expected=known,
            found=newest or "nothing",
        )


def checked_position(
    store: BlobStore, archive: ArchiveSpec, flow: FlowId, found: int | None, source: SourceView
) -> int:
    """The position of a flow, checked against the source.

    Args:
        store: The destination's store.
        archive: How its objects are written. Snapshots may go on where the source has lost
            records: what they need is read anew from its start (R7, R8).
        flow: Whose position it is.
        found: What `read_chain` found before `source` was asked. In this order, because both
            move on while another writer is at work: an older answer of the source may end below
            what has been copied since.
        source: What the source says now.

    Raises:
        PositionError: The source no longer has what comes next, ends below the position, or is
            another incarnation of the topic. Facts: `reason`, `position` and what was found.
    """
    position = source.log_start if found is None else found
    check_incarnation(store, flow, source.topic_id, position)
    if not (archive.compaction and position < source.log_start):
        check_source(flow, source, position)
    return position


def check_incarnation(
    store: BlobStore, flow: FlowId, topic_id: bytes | None, position: int
) -> None:
    """Raise PositionError if the chain came from another topic of the same name."""
    claim = latest_claim(store, flow.destination, flow.partition)
    if claim is None or topic_id is None or not claim.topic_id:
        return
    if claim.topic_id != topic_id.hex():
        raise PositionError(
            "the topic was deleted and created again since the last object was written",
            hint="records of two topics must not share a chain. Keep this archive as it is and "
            "give the destination another name for the new topic.",
            reason="SourceRecreated",
            position=position,
            expected_topic_id=claim.topic_id,
            found_topic_id=topic_id.hex(),
        )


def check_source(flow: FlowId, source: SourceView, position: int) -> None:
    """Raise PositionError if the source cannot be read on from `position`."""
    if position < source.log_start:
        raise PositionError(
            "the source no longer has the next record: retention or DeleteRecords passed it",
            hint="the records between position and log_start are gone at the source. To archive "
            "what is left, start a new chain: another destination name with `chain-start: "
            "earliest`.",
            reason="SourceTrimmed",
            topic=flow.topic,
            partition=flow.partition,
            position=position,
            log_start=source.log_start,
        )
    if position > source.last_stable_offset:
        raise PositionError(
            "the source ends below the position of the copy",
            hint="the source's log was cut (unclean leader election, or a restored disk), or this "
            "is another cluster. What is copied is kept; compare it with the source.",
            reason="SourceWentBackwards",
            topic=flow.topic,
            partition=flow.partition,
            position=position,
            last_stable_offset=source.last_stable_offset,
            expected=position,
            got=source.last_stable_offset,
        )

"""Driver: the position of a flow, read from the durable objects at the destination (I1).

The names of the objects are the position. The newest claim holds the topic ID of their source.
Nothing else is used: no local file, no Spark checkpoint, no group offset.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from logmirror.archive.chain import chain
from logmirror.archive.compactions import confirmed, resolve
from logmirror.archive.naming import split_name
from logmirror.errors import PositionError
from logmirror.to_archive.whole_chain import WholeChain

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from logmirror.archive.chain import Chain
    from logmirror.archive.claims import Claim
    from logmirror.archive.cover import Cover
    from logmirror.mirror.ports import ArchiveSpec, ChainStart, FlowId, SourceView
    from logmirror.stores.base import BlobStore, Tail


class ChainEnd(NamedTuple):
    """What one listing shows of a chain."""

    chain: Chain | Cover
    is_whole: bool
    """Whether it shows all names."""


def read_chain(
    store: BlobStore,
    flow: FlowId,
    archive: ArchiveSpec,
    *,
    chain_start: ChainStart = None,
    since: str = "",
) -> Chain | Cover:
    """Return `ChainEnd.chain`; see `read_end`."""
    return read_end(store, flow, archive, chain_start=chain_start, since=since).chain


def read_end(
    store: BlobStore,
    flow: FlowId,
    archive: ArchiveSpec,
    *,
    chain_start: ChainStart = None,
    since: str = "",
) -> ChainEnd:
    """Return a flow's chain, or the end of it; its `next_offset` is the position.

    A bucket with more than 1,000 objects returns only the last page of the listing (see
    `BlobStore.tail`). Gaps and overlaps before it are found by `whole_chain`.

    Args:
        store: The destination's store.
        flow: The flow.
        archive: The format and layout of its objects. Snapshots begin where the source begins.
        chain_start: The declared first offset of the chain.
        since: Name of an object: read only the names after it.

    Raises:
        CorruptionError: The names that were read are not one unbroken chain.
    """
    check = _check_of(store, flow, archive)

    def read_tail() -> Tail:
        return store.tail(flow.folder, since.partition("-")[0])

    def check_tail(tail: Tail) -> ChainEnd:
        start = _declared(archive, chain_start) if tail.is_whole else None
        return ChainEnd(check(tail.names, start), tail.is_whole)

    if archive.compaction:
        return check_tail(read_tail())
    return confirmed(read_tail, check_tail)


def whole_chain(
    store: BlobStore, flow: FlowId, archive: ArchiveSpec, chain_start: ChainStart
) -> WholeChain:
    """Return a pass over all names of a flow's chain; the arguments are those of `read_chain`."""
    start = _declared(archive, chain_start)
    return WholeChain(store, flow.folder, _check_of(store, flow, archive), start)


def _declared(archive: ArchiveSpec, chain_start: ChainStart) -> int | None:
    """Return the offset at which the first object must begin; None: it may begin anywhere."""
    return None if archive.compaction or chain_start == "earliest" else chain_start or 0


def _check_of(
    store: BlobStore, flow: FlowId, archive: ArchiveSpec
) -> Callable[[Iterable[str], int | None], Chain | Cover]:
    """Return what verifies names of a flow's chain from a first offset on."""
    extension = archive.extension
    if archive.compaction:
        return lambda names, start: chain(names, extension=extension, start=start, snapshots=True)
    return lambda names, start: resolve(store, flow.folder, names, extension=extension, start=start)


def check_drift(flow: FlowId, *, known: str, newest: str) -> None:
    """Raise PositionError if a chain ends before an object that this process has seen in it.

    Args:
        flow: The flow.
        known: Name of the last object that was committed or found earlier.
        newest: Name of the current last object; empty: there is none.
    """
    before, now = split_name(known), split_name(newest)
    if before is not None and (now is None or now[1] < before[1]):
        raise PositionError(
            "objects at the destination are gone",
            hint="restore them if they were moved. After a restart, the mirror continues at the "
            "current end and writes the missing objects again, as far as the source still has "
            "their records.",
            reason="DestinationDrift",
            topic=flow.topic,
            partition=flow.partition,
            expected=known,
            found=newest or "nothing",
        )


def checked_position(
    newest: Claim | None,
    archive: ArchiveSpec,
    flow: FlowId,
    found: int | None,
    source: SourceView,
) -> int:
    """Return the position of a flow, checked against the source.

    Args:
        newest: The newest claim of the chain, which may be of an unfinished object.
        archive: The format and layout of its objects. Snapshots may continue if the source has
            trimmed records: they are rebuilt from the log start offset (R7, R8).
        flow: The flow.
        found: The result of `read_chain`, read before `source`. The order matters because both
            advance while another writer is active: an older view of the source may end below the
            position.
        source: The current offsets and topic ID of the source.

    Raises:
        PositionError: The source no longer has the next record, ends below the position, or is a
            recreated topic. Facts: `reason`, `position` and what was found.
    """
    position = source.log_start if found is None else found
    check_topic(newest, source.topic_id, position)
    if not (archive.compaction and position < source.log_start):
        check_source(flow, source, position)
    return position


def check_topic(claim: Claim | None, topic_id: bytes | None, position: int) -> None:
    """Raise PositionError if a chain's newest claim is of another topic with the same name."""
    if claim is None or topic_id is None or not claim.topic_id:
        return
    if claim.topic_id != topic_id.hex():
        raise PositionError(
            "the topic was deleted and created again since the last object was written",
            hint="records of two topics must not share a chain. Keep this archive, and configure "
            "another destination name for the new topic.",
            reason="SourceRecreated",
            position=position,
            expected_topic_id=claim.topic_id,
            found_topic_id=topic_id.hex(),
        )


def check_source(flow: FlowId, source: SourceView, position: int) -> None:
    """Raise PositionError if the source cannot be read from `position` on."""
    if position < source.log_start:
        raise PositionError(
            "the source no longer has the next record: retention or DeleteRecords removed it",
            hint="the records between position and log_start are gone at the source. To archive "
            "the remaining ones, start a new chain: another destination name with `chain-start: "
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
            hint="the source's log was truncated (unclean leader election, or a restored disk), or "
            "this is another cluster. The copy is kept; compare it with the source.",
            reason="SourceWentBackwards",
            topic=flow.topic,
            partition=flow.partition,
            position=position,
            last_stable_offset=source.last_stable_offset,
            expected=position,
            got=source.last_stable_offset,
        )

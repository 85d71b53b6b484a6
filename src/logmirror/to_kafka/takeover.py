"""Driver: where a flow continues the copy that MirrorMaker 2 has written (`takeover: mm2`).

    offset syncs -> a pair of the same record -> both logs from there on -> the next offset

The records decide (I1): MirrorMaker stores how far it was every 60 s at most, after the records. A
pair is used only if both logs have the same record there. From it to the target's end each record
is compared, and everything must be explained as a copy of the source (`takeover_walk`).

Invariants:
1. Nothing is written here, and nothing is read while MirrorMaker may still write: its workers'
   group has no members, and no transaction is open in the target.
2. At most `RECORDS_MAX` records of each log are read, and only their digests are kept.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from logmirror.cluster.retry import NotFoundError
from logmirror.errors import (
    InternalError,
    LogmirrorError,
    PositionError,
    UnavailableError,
    UsageError,
)
from logmirror.mirror.cleanup_policy import is_compacted
from logmirror.source.partition import FetchBuffer
from logmirror.to_kafka.idempotence import target
from logmirror.to_kafka.mirrormaker_traces import stored_offsets, sync_pairs
from logmirror.to_kafka.takeover_logs import PartitionLog, joined
from logmirror.to_kafka.takeover_walk import Continued, continued, is_in
from logmirror.wire.decode import RecordDecoder
from logmirror.wire.mirrormaker import syncs_topic, workers_group

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from logmirror.clock import Clock
    from logmirror.cluster.client import ClusterClient
    from logmirror.mirror.ports import FlowId, KafkaSpec
    from logmirror.mirror.takeover_spec import Takeover
    from logmirror.model import TopicPartition
    from logmirror.to_kafka.takeover_walk import Tail, Unexplained

RECORDS_MAX: Final = 2_000_000
"""The most records of one log that are compared: some 200 MB of digests for both."""

_ANCHORS_MAX: Final = 8
"""How many pairs are looked up until one is of the same record."""


class Found(NamedTuple):
    """What MirrorMaker has copied of one flow."""

    next_offset: int | None
    """The first source offset to copy; None: MirrorMaker has copied nothing."""

    target_end: int
    """The target's log end offset when it was read."""

    repeated: int = 0
    """Records that the target has more than once."""

    behind: int = 0
    """Records that it gets once more, because MirrorMaker had begun to repeat them."""

    compared: int = 0
    """Records of the target that were compared."""

    stored: int | None = None
    """The last offset that MirrorMaker has stored as consumed."""


class TakeoverSearch:
    """Finds where flows continue. Reads only. Not thread-safe.

    Args:
        spec: The destination.
        source: The source cluster.
        client: The destination cluster.
        clock: Time.
    """

    def __init__(
        self, spec: KafkaSpec, source: ClusterClient, client: ClusterClient, clock: Clock
    ) -> None:
        if spec.takeover is None:
            raise InternalError("a destination without `takeover`", destination=spec.name)
        self._spec, self._takeover = spec, spec.takeover
        self._source, self._client, self._clock = source, client, clock
        self._decoder, self._buffer = RecordDecoder(), FetchBuffer()

    def found(self, flows: Sequence[FlowId]) -> dict[FlowId, Found | LogmirrorError]:
        """Find where each flow continues.

        Raises:
            UnavailableError: MirrorMaker still runs, or a cluster did not respond in time.
            UsageError: No permission to read what MirrorMaker has left.
        """
        check_stopped(self._client, self._takeover)
        partitions = [flow.source for flow in flows]
        shared = partitions, self._decoder, self._buffer
        pairs = sync_pairs(self._source, syncs_topic(self._spec.name), *shared)
        stored = stored_offsets(self._client, self._takeover.source_alias, *shared)
        compacted = self._is_compacted(flows[0].topic)
        found: dict[FlowId, Found | LogmirrorError] = {}
        for flow in flows:
            try:
                found[flow] = self._of_flow(
                    flow, pairs[flow.source], stored.get(flow.source), compacted=compacted
                )
            except LogmirrorError as error:
                found[flow] = error.add_facts(
                    topic=flow.topic, partition=flow.partition, target_topic=self._spec.topic
                )
        return found

    def _is_compacted(self, topic: str) -> bool:
        if is_compacted(self._source.describe_topic_configs(topic)):
            return True
        with contextlib.suppress(UsageError):  # no permission, or there is no such topic
            return is_compacted(self._client.describe_topic_configs(self._spec.topic))
        return False

    def _of_flow(
        self,
        flow: FlowId,
        pairs: npt.NDArray[np.int64],
        stored: int | None,
        *,
        compacted: bool,
    ) -> Found:
        try:
            theirs = self._log(self._client, target(self._spec, flow), with_aborted=False)
        except NotFoundError:
            theirs = None
        if theirs is not None and theirs.last_stable < theirs.end:
            raise UnavailableError(
                "a transaction is open in the target of the take-over",
                hint="MirrorMaker's transaction is aborted after its timeout, 60 s by default",
                last_stable_offset=theirs.last_stable,
                log_end=theirs.end,
            )
        if theirs is None or theirs.end == 0:
            if stored is not None or len(pairs):
                raise _nothing_there(stored)
            return Found(None, 0)
        # MirrorMaker reads uncommitted records, unless it is configured otherwise.
        ours = self._log(self._source, flow.source, with_aborted=True)
        return _Comparison(ours, theirs, pairs, stored, compacted=compacted).result()

    def _log(
        self, client: ClusterClient, where: TopicPartition, *, with_aborted: bool
    ) -> PartitionLog:
        shared = self._decoder, self._buffer, self._clock
        return PartitionLog(client, where, *shared, with_aborted=with_aborted)


class _Comparison:
    """The comparison of one partition with its source."""

    def __init__(
        self,
        ours: PartitionLog,
        theirs: PartitionLog,
        pairs: npt.NDArray[np.int64],
        stored: int | None,
        *,
        compacted: bool,
    ) -> None:
        self._ours, self._theirs, self._stored = ours, theirs, stored
        self._pairs, self._compacted = pairs, compacted

    def result(self) -> Found:
        """Read both logs and compare them.

        Raises:
            PositionError: The target is not a copy, or too much would have to be read.
            UnavailableError: The source has a transaction open, of which there may be records.
        """
        ours, theirs = self._ours, self._theirs
        anchor = self._anchor()
        up, down = anchor or (ours.start, theirs.start)
        records = self._read(theirs, down, theirs.end)
        if not records.size and self._stored is None and not len(self._pairs):
            return Found(None, theirs.end)  # transaction markers only
        if anchor is None and theirs.start > 0 and records.size:
            up = self._trimmed_to(records)
        if self._compacted:
            source = self._read(ours, up, ours.last_stable)
        else:
            source = ours.read(up, ours.last_stable, wanted=records.size + 1)
        if anchor is None and (ours.start > 0 or not records.size):
            known = np.flatnonzero(is_in(records, source))
            if not len(known):
                return self._all_trimmed(source)
            # What was deleted at the source was copied before: MirrorMaker copies in order.
            records = records.kept(np.arange(records.size) >= known[0])
        found = self._compared(source, records, up)
        if not isinstance(found, Continued) and up > ours.start:
            before = max(ours.start, min(up, ours.offset_at(found.first_ms)))
            if before < up:
                source = joined(self._read(ours, before, up), source)
                found = self._compared(source, records, up)
        if not isinstance(found, Continued):
            raise self._differs(found)
        return Found(
            found.next_offset,
            theirs.end,
            found.repeated,
            found.behind,
            records.size,
            self._stored,
        )

    def _trimmed_to(self, records: Tail) -> int:
        """Return the source's offset of the first record, if the target was trimmed."""
        ours = self._ours
        first = ours.offset_at(int(records.timestamps_ms[0]))
        source = ours.read(first, ours.last_stable, wanted=records.size + 1)
        equal = np.flatnonzero((source.records == records.records[0]).all(axis=1))
        return int(source.offsets[equal[0]]) if len(equal) else ours.start

    def _all_trimmed(self, source: Tail) -> Found:
        """Continue by the stored offset, if nothing that it covers can be compared any more.

        The source has deleted all that was copied, or the target has.
        """
        stored = self._stored
        if stored is None or (source.offsets[~source.is_aborted] <= stored).any():
            raise _nothing_there(stored)
        return Found(stored + 1, self._theirs.end, stored=stored)

    def _compared(self, source: Tail, records: Tail, up: int) -> Continued | Unexplained:
        return continued(source, records, up, compacted=self._compacted)

    def _anchor(self) -> tuple[int, int] | None:
        """Return the pair with the highest upstream offset that is of one record."""
        ours, theirs = self._ours, self._theirs
        tried = 0
        for up, down in self._pairs.tolist():
            if not (ours.start <= up < ours.last_stable and theirs.start <= down < theirs.end):
                continue
            left = ours.read(up, up + 1, wanted=1)
            right = theirs.read(down, down + 1, wanted=1)
            if left.size and right.size and (left.records == right.records).all():
                return up, down
            tried += 1
            if tried == _ANCHORS_MAX:
                break
        return None

    def _read(self, log: PartitionLog, first: int, end: int) -> Tail:
        if end - first > RECORDS_MAX:
            raise PositionError(
                "too many records would have to be compared to take over from MirrorMaker",
                hint=f"at most {RECORDS_MAX} offsets from the newest offset sync to the end. Let "
                "MirrorMaker run until it has written offset syncs, stop it, and start again.",
                reason="TakeoverTooFar",
                log=log.where.topic,
                first=first,
                end=end,
            )
        return log.read(first, end, wanted=end - first)

    def _differs(self, found: Unexplained) -> LogmirrorError:
        ours = self._ours
        facts = {"target_offset": found.offset, "source_offset": found.missing_from}
        if ours.last_stable < ours.end:
            return UnavailableError(
                "the source has an open transaction, of which MirrorMaker may have copied records",
                hint="it is compared again when the transaction has ended",
                last_stable_offset=ours.last_stable,
                **facts,
            )
        return PositionError(
            "the target's records are not MirrorMaker's copy of the source",
            hint="another client wrote to the target, or the source was recreated, or "
            "`source-alias` or `topic` is that of another copy. Nothing was written.",
            reason="TakeoverDiffers",
            **facts,
        )


def check_stopped(client: ClusterClient, takeover: Takeover) -> None:
    """Check that MirrorMaker does not run.

    Raises:
        UnavailableError: Its workers' group has members.
        UsageError: No permission to describe the group.
    """
    group = workers_group(takeover.source_alias)
    members = client.groups.members(group)
    if members:
        raise UnavailableError(
            "MirrorMaker still runs: the group of its workers has members",
            hint="stop it. After `kill -9` its group has members until the session timeout.",
            group=group,
            members=len(members),
        )


def _nothing_there(stored: int | None) -> PositionError:
    return PositionError(
        "the target has none of the records that MirrorMaker has copied",
        hint="set `topic` to the name that MirrorMaker's replication policy gave it. If it was "
        "emptied or recreated, copy it again without `takeover`.",
        reason="TakeoverDiffers",
        stored_by_mirrormaker=stored,
    )

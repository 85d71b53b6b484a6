"""Driver: flows that continue the copies of MirrorMaker 2 (`takeover: mm2`).

A flow without progress begins where the records of the target end (`takeover`). Its first progress
ends the take-over (`adoption`); from then on it is a flow like others.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from logmirror import failpoints
from logmirror.errors import FencedError, InternalError, LogmirrorError, UnavailableError
from logmirror.to_kafka.adoption import adopt
from logmirror.to_kafka.idempotence import target
from logmirror.to_kafka.takeover import Found, TakeoverSearch, check_stopped
from logmirror.to_kafka.translate_destination import TranslateDestination
from logmirror.to_kafka.translate_progress import Progress, taken_over

if TYPE_CHECKING:
    from collections.abc import Sequence

    from logmirror.mirror.observer import Observer
    from logmirror.mirror.ports import Begun, ChainStart, FlowId, KafkaSpec, Start
    from logmirror.mirror.takeover_spec import Takeover
    from logmirror.to_kafka.preserve_destination import LaneClusters

_LOG = logging.getLogger("logmirror.mirror")


class TakeoverDestination(TranslateDestination):
    """A `Destination` whose replicas MirrorMaker 2 has begun.

    Args:
        spec: The destination, with `takeover`.
        clusters: What the destinations of the lane share.
        writer_id: The ID of this run.
        observer: Receives events; None for no events.

    Raises:
        InternalError: The destination is without `takeover`.
    """

    def __init__(
        self,
        spec: KafkaSpec,
        clusters: LaneClusters,
        writer_id: str,
        observer: Observer | None = None,
    ) -> None:
        super().__init__(spec, clusters, writer_id, observer)
        if spec.takeover is None:
            raise InternalError("a destination without a takeover", mirror=spec.mirror)
        self._takeover: Takeover = spec.takeover
        self._found: dict[FlowId, Found] = {}
        """What MirrorMaker has copied, as it was compared last."""

    def positions(
        self, flows: Sequence[FlowId], chain_start: ChainStart
    ) -> dict[FlowId, int | LogmirrorError | None]:
        """See `Destination.positions`; flows without progress continue MirrorMaker's copy."""
        found = super().positions(flows, chain_start)
        new = [one for one in flows if found[one] is None and self._may_take_over(one)]
        return found | self._searched(new)

    def begin(self, flow: FlowId, start: Start) -> Begun:
        """See `Destination.begin`; a flow that takes over also writes its first progress."""
        begun = super().begin(flow, start)
        if self._may_take_over(flow):
            self._adopt(flow, start)
        return begun

    def _may_take_over(self, flow: FlowId) -> bool:
        """Whether a flow continues MirrorMaker's copy: not if it ever had progress of its own."""
        return self._reader.progress(self._key(flow)) is None

    def _searched(self, flows: Sequence[FlowId]) -> dict[FlowId, int | LogmirrorError | None]:
        """Find where MirrorMaker's copies continue; reads only."""
        if not flows:
            return {}
        source = self._clusters.client(self._takeover.source)
        search = TakeoverSearch(self.spec, source, self._client, self._clock)
        found = search.found(flows)
        self._found |= {one: each for one, each in found.items() if isinstance(each, Found)}
        failpoints.reach("takeover.found")
        return {
            flow: each.next_offset if isinstance(each, Found) else each
            for flow, each in found.items()
        }

    def _adopt(self, flow: FlowId, start: Start) -> None:
        """Write a flow's first progress, which ends the take-over.

        Raises:
            UnavailableError: MirrorMaker runs again, or something was written since the comparison,
                or an older run has fenced this one.
            FencedError: Another run has taken over the flow.
            LogmirrorError: The progress may have been written; the next position shows it.
        """
        found = self._found.get(flow)
        if found is None:
            raise InternalError("a flow is taken over without a comparison", flow=str(flow))
        progress = Progress(
            next_offset=start.position,
            source_topic_id=start.view.topic_id,
            target_topic_id=self._target_id,
            writer=self._writer_id,
        )
        try:
            is_written = adopt(
                self._client,
                self._reader,
                self._key(flow),
                progress,
                lambda: self._check_unchanged(flow, found),
                self._clock,
            )
        except FencedError as error:
            owner = self._reader.refresh().owner(self._key(flow))
            if owner != self._writer_id:
                raise taken_over(flow, owner) from error
            raise UnavailableError(error.message, hint=error.hint, **error.facts) from error
        if not is_written:
            return  # another instance was faster; the first slice reads its position
        facts = {
            "mirror": flow.mirror,
            "topic": flow.topic,
            "partition": flow.partition,
            "target_topic": self.spec.topic,
            "position": start.position,
            "compared": found.compared,
            "repeated": found.repeated,
            "repeated_again": found.behind,
            "stored_by_mirrormaker": found.stored,
        }
        if found.next_offset is None:
            _LOG.info("MirrorMaker has copied nothing: a new replica", extra={"facts": facts})
        else:
            _LOG.info("taken over from MirrorMaker", extra={"facts": facts})

    def _check_unchanged(self, flow: FlowId, found: Found) -> None:
        """Check that MirrorMaker has not been started and has not written since the comparison."""
        check_stopped(self._client, self._takeover)
        where = target(self.spec, flow)
        end = self._client.log_ends([where])[where].end_offset
        if end != found.target_end:
            raise UnavailableError(
                "the target has changed since it was compared with the source",
                hint="MirrorMaker or another client still writes to it",
                topic=where.topic,
                partition=where.partition,
                expected=found.target_end,
                found=end,
            )

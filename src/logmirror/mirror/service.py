"""Driver: the loop that replicates. It polls the source, plans, runs and commits, then repeats.

A flow that fails with a retriable error (its source or its store does not respond) backs off and
resumes from its position, which it reads again; the others continue. Any other error (corruption,
contradicting positions, wrong usage) stops the flow's mirror at the next commit boundary, the end
of the tick. `stopped` defines when that ends the process.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

from logmirror.mirror.discovery import Discovery
from logmirror.mirror.flow_table import FlowTable, LoopContext
from logmirror.mirror.observer import Observer
from logmirror.mirror.record_lag import RecordLag
from logmirror.mirror.source_poll import SourcePoll
from logmirror.mirror.tick import Tick
from logmirror.monitoring.metrics import Recorder

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from logmirror.clock import Clock
    from logmirror.cluster.client import ClusterClient
    from logmirror.cluster.properties import ConnectionSettings
    from logmirror.mirror.destination import Destination
    from logmirror.mirror.health import MirrorHealth
    from logmirror.mirror.ports import DestinationSpec, Runner
    from logmirror.mirror.source_views import MirrorSpec
    from logmirror.mirror.stopped import OnFatal

_LOG = logging.getLogger("logmirror.mirror")

POLL_MS: Final = 250
"""Pause between two polls of an idle loop. Each poll costs one request per broker, whatever the
number of partitions."""


class Service:
    """The mirrors of one process.

    Args:
        mirrors: What to copy, and where to.
        client: Opens, or returns the open, client of a source. Driver only.
        destination: Returns the driver's side of a kind of destination.
        runner: Where slices run.
        writer_id: The ID of this process as a writer; unique among all processes.
        clock: Time.
        on_fatal: Whether a stopped mirror ends the process (`exit`) or not (`isolate`).
        memory_bytes: The memory of all slots together, in bytes; None: `SLOT_BYTES` each.
        observer: Receives all events; None: a new one without readers.
        brief_client: Like `client`, for requests that the loop can do without: a request ends
            within seconds. None: `client`.
    """

    def __init__(  # noqa: PLR0913  # the composition root passes each port once
        self,
        mirrors: Sequence[MirrorSpec],
        *,
        client: Callable[[ConnectionSettings], ClusterClient],
        destination: Callable[[DestinationSpec], Destination],
        runner: Runner,
        writer_id: str,
        clock: Clock,
        on_fatal: OnFatal = "exit",
        memory_bytes: int | None = None,
        observer: Observer | None = None,
        brief_client: Callable[[ConnectionSettings], ClusterClient] | None = None,
    ) -> None:
        self._mirrors, self._runner, self._clock = mirrors, runner, clock
        self._observer = observer or Observer([m.name for m in mirrors], Recorder(), clock)
        context = LoopContext(
            client=client, destination=destination, observer=self._observer, clock=clock
        )
        self._table = FlowTable(mirrors, context, on_fatal)
        self._discovery = Discovery(mirrors, self._table, context)
        self._source_poll = SourcePoll(self._table, context)
        self._tick = Tick(
            self._table, context, runner=runner, writer_id=writer_id, memory_bytes=memory_bytes
        )
        self._record_lag = RecordLag(brief_client or client, clock, self._observer)
        self._stopping = False

    def health(self) -> list[MirrorHealth]:
        """Return the health of each mirror. Safe from any thread."""
        return self._observer.board.mirrors()

    def stop(self) -> None:
        """Make `run` flush what was polled, and return. Safe from a signal handler."""
        self._stopping = True
        self._runner.end_follow_windows()

    def run(self, *, until_now: bool = False) -> None:
        """Replicate until `stop` is called.

        Args:
            until_now: Replicate up to the ends that the sources had at the start, then return.

        Raises:
            LogmirrorError: A mirror stopped. The kind of the first error is the process's exit
                code.
        """
        self._replicate(until_now=until_now)
        self._table.stopped.raise_first()

    def _replicate(self, *, until_now: bool) -> None:
        table, has_targets = self._table, False
        while True:
            self._discovery.run(until_now=until_now)
            self._source_poll.check_drift()
            stopping = self._stopping
            self._source_poll.poll()
            table.drop_stopped()
            if has_targets or ((until_now or stopping) and table.all_polled):
                table.set_targets()
                has_targets = True
            ran_slices = self._tick.run(explicit=has_targets)
            self._record_lag.update(table.states, table.mirror_of)
            self._observer.loop_completed(table.states.values())
            if ran_slices:
                table.drop_stopped()
                continue
            is_done = has_targets and table.all_reached
            if is_done and not table.unopened:
                return
            if is_done or (stopping and table.all_back_off):
                self._log_unflushed()
                return
            self._clock.sleep_ms(POLL_MS)

    def _log_unflushed(self) -> None:
        for mirror in self._mirrors:
            states = [s for s in self._table.states.values() if s.flow.mirror == mirror.name]
            pending = [state for state in states if state.pending]
            if pending or any(name == mirror.name for name, _ in self._table.unopened):
                facts = {"mirror": mirror.name, "topic": mirror.topic, "flows": len(pending)}
                _LOG.warning(
                    "shutdown: flows were not flushed; their records remain at the source",
                    extra={"facts": facts},
                )

"""Driver: a lane: the loop for the flows between one source and one place of destinations.

A place is what can stall as a whole: a cluster, an S3 endpoint, a mounted file system. Lanes share
nothing that waits: each has its own thread, clients, retries and slots. Whatever a lane waits for,
the others continue.

In a lane, a flow that fails with a retriable error backs off and resumes from its position, which
it reads again; the others continue. Any other error stops the flow's mirror, in all lanes, at the
next commit boundary.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

from logmirror.locations import S3Location
from logmirror.mirror.discovery import Discovery
from logmirror.mirror.flow_table import FlowTable
from logmirror.mirror.ports import KafkaSpec
from logmirror.mirror.record_lag import RecordLag
from logmirror.mirror.source_poll import SourcePoll
from logmirror.mirror.tick import Tick

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from logmirror.cluster.properties import ConnectionSettings
    from logmirror.mirror.flow_state import FlowState
    from logmirror.mirror.flow_table import LoopContext
    from logmirror.mirror.health import LaneProgress
    from logmirror.mirror.ports import DestinationSpec
    from logmirror.mirror.source_views import MirrorSpec
    from logmirror.mirror.stopped import StoppedMirrors
    from logmirror.mirror.tick import Engine

_LOG = logging.getLogger("logmirror.mirror")

LANES_MAX: Final = 32
"""Limit for the lanes of a process that end, and for those that do not: each needs a thread and a
slot. Further pairs share lanes of their kind."""

FLUSH_MS: Final = 10_000
"""After a stop, no slice starts later than this. A slice that runs then may finish."""

Turn = Literal["ran", "idle", "done"]


class LaneKey(NamedTuple):
    """What the flows of a lane have in common."""

    source: ConnectionSettings
    place: object
    ends: bool
    """Whether the mirrors have `until`: the lane copies up to it, and ends."""


def place_of(spec: DestinationSpec) -> object:
    """Return what stalls together with a destination: its cluster, endpoint or file system."""
    if isinstance(spec, KafkaSpec):
        return spec.cluster
    if isinstance(spec.location, S3Location):
        return (spec.location.endpoint, spec.location.region)
    return spec.location.mount or spec.location.root


def lanes_of(
    mirrors: Sequence[MirrorSpec], *, shares_reads: bool
) -> dict[LaneKey, list[MirrorSpec]]:
    """Group mirrors into lanes; each gets the mirrors with those destinations that it serves.

    Args:
        mirrors: All mirrors of the process.
        shares_reads: Put all archives of one source into one lane, so that they share reads. A run
            that ends does so: it ends when the slowest destination has ended.
    """
    found: dict[LaneKey, list[MirrorSpec]] = defaultdict(list)
    for mirror in mirrors:
        parts: dict[LaneKey, list[tuple[str, DestinationSpec]]] = defaultdict(list)
        for name, spec in mirror.destinations:
            is_shared = shares_reads and not spec.follows
            place = "archives" if is_shared else place_of(spec)
            key = LaneKey(mirror.source, place, ends=mirror.until is not None)
            parts[key].append((name, spec))
        for key, destinations in parts.items():
            found[key].append(replace(mirror, destinations=tuple(destinations)))
    kept: dict[LaneKey, list[MirrorSpec]] = {}
    for ends in (False, True):
        of_kind = [(key, group) for key, group in found.items() if key.ends == ends]
        kept |= dict(of_kind[:LANES_MAX])
        for number, (_, further) in enumerate(of_kind[LANES_MAX:]):
            of_kind[number % LANES_MAX][1].extend(further)
    return kept


def addresses(mirrors: Sequence[MirrorSpec]) -> dict[str, str]:
    """Return the addresses of the source and the first destination of a lane, for log lines."""
    to = mirrors[0].destinations[0][1]
    place = _servers(to.cluster) if isinstance(to, KafkaSpec) else str(to.location)
    return {"source": _servers(mirrors[0].source), "to": place}


def _servers(cluster: ConnectionSettings) -> str:
    return ",".join(f"{host}:{port}" for host, port in cluster.bootstrap_servers)


def seat_count(lanes: Mapping[LaneKey, Sequence[MirrorSpec]]) -> int:
    """Return how many seats the lanes have; see `slots`."""
    return sum(1 + _has_cluster(mirrors) for mirrors in lanes.values())


def _has_cluster(mirrors: Sequence[MirrorSpec]) -> bool:
    return any(spec.follows for m in mirrors for _, spec in m.destinations)


class Lane:
    """One lane. All methods but `progress` belong to the lane's thread.

    Args:
        mirrors: The mirrors, each with the destinations that this lane serves.
        context: Clients, destinations, observer and clock of this lane alone.
        stopped: The stopped mirrors of the process.
        engine: Where slices run.
        progress: Receives the lane's progress.
    """

    def __init__(
        self,
        mirrors: Sequence[MirrorSpec],
        context: LoopContext,
        stopped: StoppedMirrors,
        engine: Engine,
        progress: LaneProgress,
    ) -> None:
        self.mirrors, self.progress = mirrors, progress
        self._context, self._clock = context, context.clock
        self.table = FlowTable(mirrors, context, stopped)
        self._discovery = Discovery(mirrors, self.table, context)
        self._source_poll = SourcePoll(self.table, context)
        self._tick = Tick(self.table, context, engine, progress)
        self._record_lag = RecordLag(context.brief_client, context.clock, context.observer)
        self._ends = all(mirror.until for mirror in mirrors)

    @property
    def has_begun(self) -> bool:
        """Whether the first discovery is over. Safe from any thread."""
        return self._discovery.has_run

    @property
    def has_opened(self) -> bool:
        """Whether a flow was opened, or there is none to open. Safe from any thread."""
        return bool(self.table.states) or not self.table.unopened

    def states(self) -> list[FlowState]:
        """Return the open flows. Safe from any thread."""
        return list(self.table.states.values())

    def turn(self, *, until_now: bool, stopping_since_ms: int | None) -> Turn:
        """Do what is due: discover, poll, run slices, commit.

        Args:
            until_now: Replicate up to the ends that the sources have at the first poll.
            stopping_since_ms: Monotonic time of the request to stop. None: there was none.

        Returns:
            `ran`: slices ran, and more may be due. `idle`: nothing was due. `done`: the lane has
            replicated what it had to, or was stopped.

        Raises:
            LogmirrorError: The process must end.
        """
        table, stopping = self.table, stopping_since_ms is not None
        until_now |= self._ends
        table.ends = until_now
        has_targets = until_now or stopping
        with self.progress.doing("open"):
            self._discovery.run(until_now=until_now)
        with self.progress.doing("poll"):
            self._source_poll.check_drift()
            self._source_poll.poll()
        table.drop_stopped()
        if has_targets:
            table.set_targets()
        if self._is_late(stopping_since_ms):
            self._log_unflushed()
            return "done"
        ran_slices = self._tick.run(explicit=has_targets, follows=not until_now)
        self._record_lag.update(table.states, table.mirror_of)
        self.progress.made()
        if ran_slices:
            table.drop_stopped()
            return "ran"
        is_done = has_targets and table.all_reached
        if is_done and not table.unopened:
            return "done"
        if is_done or (stopping and table.all_back_off):
            self._log_unflushed()
            return "done"
        return "idle"

    def _is_late(self, stopping_since_ms: int | None) -> bool:
        if stopping_since_ms is None or self.table.all_reached:
            return False
        return self._clock.monotonic_ms() - stopping_since_ms >= FLUSH_MS

    def _log_unflushed(self) -> None:
        for mirror in self.mirrors:
            states = [s for s in self.states() if s.flow.mirror == mirror.name]
            pending = [state for state in states if state.pending]
            if pending or any(name == mirror.name for name, _ in self.table.unopened):
                facts = {"mirror": mirror.name, "topic": mirror.topic, "flows": len(pending)}
                _LOG.warning(
                    "shutdown: flows were not flushed; their records remain at the source",
                    extra={"facts": facts},
                )

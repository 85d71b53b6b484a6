"""The product in a simulation: driver loop, executor and stores in simulated processes."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Final, cast

from logmirror.cluster.offset_syncs import OffsetSyncWriter
from logmirror.cluster.properties import ConnectionSettings
from logmirror.errors import LogmirrorError, UnavailableError
from logmirror.mirror.follow import FollowWindow
from logmirror.mirror.observer import Observer
from logmirror.mirror.ports import ArchiveSpec, KafkaSpec
from logmirror.mirror.service import LanePorts, Service
from logmirror.mirror.source_views import MirrorSpec
from logmirror.mirror.units import units
from logmirror.monitoring.metrics import Recorder
from logmirror.simulation.cluster import SourceView
from logmirror.simulation.schedule import KilledError
from logmirror.simulation.source import TOPIC
from logmirror.simulation.world import Process
from logmirror.source.column_types import Gate
from logmirror.source.partition import FetchBuffer, KafkaSource
from logmirror.to_archive.commit import Committer
from logmirror.to_archive.destination import ArchiveDestination
from logmirror.to_archive.shared_read import carry_out
from logmirror.to_archive.snapshot_transfer import SnapshotTransfer
from logmirror.to_archive.transfer import Transfer
from logmirror.to_kafka.gap_writer import GapWriter
from logmirror.to_kafka.preserve_destination import LaneClusters, PreserveDestination
from logmirror.to_kafka.preserve_transfer import PreserveTransfer
from logmirror.to_kafka.producer_sessions import ProducerSessions
from logmirror.to_kafka.tail_check import TailCheck
from logmirror.to_kafka.translate_destination import TranslateDestination
from logmirror.to_kafka.translate_progress import ProgressReader
from logmirror.to_kafka.translate_transfer import TranslateTransfer
from logmirror.wire.decode import RecordDecoder
from logmirror.wire.rebatch import Rebatcher
from logmirror.wire.scan import BatchScanner

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from logmirror.clock import Chooser
    from logmirror.cluster.client import ClusterClient
    from logmirror.cluster.produce import ProducePipeline
    from logmirror.mirror.destination import Destination
    from logmirror.mirror.flow_state import FlowState
    from logmirror.mirror.ports import DestinationSpec, Job, SliceResult, Work
    from logmirror.simulation.cluster import TargetView
    from logmirror.simulation.world import World
    from logmirror.stores.base import BlobStore

SOURCE: Final = ConnectionSettings(bootstrap_servers=(("source", 1),))
TARGET: Final = ConnectionSettings(bootstrap_servers=(("target", 1),))

_DECODED_BYTES: Final = 1 << 16
_FETCHED_BYTES: Final = 1 << 14
_RESTART_MS: Final = (200, 1500)
_WAIT_MS: Final = 500

_Tools = tuple[FetchBuffer, BatchScanner, RecordDecoder, Rebatcher]
_spare: Final[list[_Tools]] = []


class SimulatedDestination:
    """The destination, as simulated processes reach it.

    Args:
        spec: The destination of the flow.
        open_store: Opens the store for a process; None for a cluster.
        begin_writing: See `stores.opening.begin_writing`; None for a cluster.
        view: Returns the cluster as a process sees it; None for a store.
    """

    def __init__(
        self,
        spec: DestinationSpec,
        *,
        open_store: Callable[[Process], BlobStore] | None = None,
        begin_writing: Callable[[BlobStore, contextlib.ExitStack], None] | None = None,
        view: Callable[[Process], TargetView] | None = None,
    ) -> None:
        self.spec = spec
        self._open_store, self._begin_writing, self._view = open_store, begin_writing, view

    def store(self, process: Process) -> BlobStore:
        """Open the store for a process."""
        if self._open_store is None:
            raise TypeError("the destination is not a store")
        return self._open_store(process)

    def view(self, process: Process) -> ClusterClient:
        """Return the cluster as a process sees it."""
        if self._view is None:
            raise TypeError("the destination is not a cluster")
        return cast("ClusterClient", self._view(process))

    def begin_writing(self, store: BlobStore, stack: contextlib.ExitStack) -> None:
        """See `stores.opening.begin_writing`."""
        if self._begin_writing is not None:
            self._begin_writing(store, stack)


class _PositionObserver(Observer):
    """Records each reported position in the history."""

    def __init__(self, process: Process) -> None:
        super().__init__(["orders"], Recorder(), process.world.schedule)
        self._process = process

    def position_changed(self, state: FlowState) -> None:
        super().position_changed(state)
        self._process.world.report_position(self._process, state.position)


class SimulatedRunner:
    """A `Runner` with one executor process, which can die without its driver."""

    slots: Final = 1

    def __init__(self, process: Process, destination: SimulatedDestination) -> None:
        self._process, self._world = process, process.world
        self._destination = destination
        self._is_stopping = False

    def run(self, works: Sequence[Work], slots: int, job: Job) -> list[SliceResult]:
        """See `Runner.run`."""
        del slots, job
        executor = Process(self._world, f"{self._process.name}/executor", self._process)
        tools = _spare.pop() if _spare else _new_tools()
        self._world.enter(executor)
        try:
            return [r for unit in units(works) for r in self._run_unit(unit, executor, tools)]
        except KilledError:
            if self._process.is_dead:
                raise
            raise UnavailableError("the executor of a slice was lost") from None
        finally:
            self._world.leave()
            _spare.append(tools)

    def end_follow_windows(self, job: Job | None = None) -> None:
        """See `Runner.end_follow_windows`."""
        del job
        self._is_stopping = True

    def _run_unit(self, unit: list[Work], executor: Process, tools: _Tools) -> list[SliceResult]:
        if isinstance(unit[0].destination, KafkaSpec):
            return self._transfer_to_kafka(unit, executor, tools)
        clock, decoder = self._world.schedule, tools[2]
        store = self._destination.store(executor)
        if unit[0].archive.compaction:
            return [
                SnapshotTransfer(
                    work, _source(work, executor, tools), store, decoder, clock=clock
                ).run()
                for work in unit
            ]
        transfers = [Transfer(work, store, decoder, clock=clock) for work in unit]
        return carry_out(transfers, _source(unit[0], executor, tools), decoder)

    def _transfer_to_kafka(
        self, works: list[Work], executor: Process, tools: _Tools
    ) -> list[SliceResult]:
        clock, client = self._world.schedule, self._destination.view(executor)
        window_ms = 0 if self._is_stopping else max(work.window_ms for work in works)
        source_client = cast("ClusterClient", SourceView(executor))
        source = {w.slice.flow.source: _source(w, executor, tools) for w in works}
        if works[0].kafka.offsets == "translate":
            syncs, mirror = _pipeline(source_client), works[0].kafka.mirror
            return TranslateTransfer(
                works,
                source_client=source_client,
                source=source,
                client=client,
                sessions=ProducerSessions(client),
                progress=ProgressReader(client, clock=clock),
                rebatcher=tools[3],
                gate=Gate(tools[2]),
                sync_writer=OffsetSyncWriter(syncs, works[0].kafka.name, clock, mirror=mirror),
                window=FollowWindow(window_ms, clock),
                clock=clock,
            ).run()
        return PreserveTransfer(
            works,
            source_client=source_client,
            source=source,
            client=client,
            pipeline=_pipeline(client),
            rebatcher=tools[3],
            gap_writer=GapWriter(client, clock),
            tail_check=TailCheck(client, _pipeline(client), tools[2], clock),
            gate=Gate(tools[2]),
            window=FollowWindow(window_ms, clock),
            clock=clock,
        ).run()


def _pipeline(client: ClusterClient) -> ProducePipeline:
    return client.pipeline()


def _new_tools() -> _Tools:
    return FetchBuffer(_FETCHED_BYTES), BatchScanner(), RecordDecoder(_DECODED_BYTES), Rebatcher()


def _source(work: Work, executor: Process, tools: _Tools) -> KafkaSource:
    buffer, scanner, *_ = tools
    return KafkaSource(
        cast("ClusterClient", SourceView(executor)),
        work.slice.flow.source,
        topic_id=work.slice.topic_id,
        buffer=buffer,
        scanner=scanner,
        position=work.slice.first,
        leader_epoch=work.slice.leader_epoch,
        compacted=work.slice.compacted,
    )


class Node:
    """A host that runs the mirror, and restarts it when it has exited.

    Args:
        world: The simulation.
        name: Name of the host.
        destination: The destination of the mirror.
        chooser: Draws the delay of a restart.
    """

    def __init__(
        self, world: World, name: str, destination: SimulatedDestination, chooser: Chooser
    ) -> None:
        self._world, self._name, self._destination = world, name, destination
        self._chooser = chooser
        self._starts = 0
        self.errors: list[LogmirrorError] = []
        """Errors that ended a run."""

    def run_until_healed(self) -> None:
        """Run and restart the mirror until the faults are over."""
        while not self._world.is_healed:
            self.run_once(until_now=False)
            self._world.schedule.sleep_ms(self._chooser.randint(*_RESTART_MS))

    def run_as_second(self) -> None:
        """Do the same, from the time at which a fault requires a second mirror."""
        while not (self._world.second_wanted or self._world.is_healed):
            self._world.schedule.sleep_ms(_WAIT_MS)
        self.run_until_healed()

    def run_once(self, *, until_now: bool) -> bool:
        """Run the mirror once; returns whether it exited without an error."""
        self._starts += 1
        process = Process(self._world, f"{self._name}.{self._starts}.w")
        self._world.enter(process)
        try:
            with contextlib.ExitStack() as stack:
                service = self._service(process, stack)
                process.stop = service.stop
                if self._world.is_healed and not until_now:
                    service.stop()
                service.run(until_now=until_now)
        except KilledError:
            return False
        except LogmirrorError as error:
            self._world.schedule.note(f"ended with {error.kind}: {error.message}")
            self.errors.append(error)
            return False
        else:
            return True
        finally:
            self._world.leave()

    def _service(self, process: Process, stack: contextlib.ExitStack) -> Service:
        clock, observer = self._world.schedule, _PositionObserver(process)
        source = cast("ClusterClient", SourceView(process))
        return Service(
            [
                MirrorSpec(
                    name="orders",
                    source=SOURCE,
                    topic=TOPIC,
                    partitions=None,
                    destinations=(("copy", self._destination.spec),),
                    chain_start=None,
                )
            ],
            ports=lambda: LanePorts(
                client=lambda _settings: source,
                brief_client=lambda _settings: source,
                destination=self._destinations(process, observer, stack),
            ),
            runner=SimulatedRunner(process, self._destination),
            writer_id=process.name,
            clock=clock,
            observer=observer,
            in_turns=True,
        )

    def _destinations(
        self, process: Process, observer: Observer, stack: contextlib.ExitStack
    ) -> Callable[[DestinationSpec], Destination]:
        clock, spec = self._world.schedule, self._destination.spec
        destination: Destination
        if isinstance(spec, ArchiveSpec):
            store = self._destination.store(process)
            self._destination.begin_writing(store, stack)
            committer = Committer(lambda _location: store, clock=clock, observer=observer)
            destination = ArchiveDestination(spec, lambda _location: store, committer, clock)
        else:
            views = {
                SOURCE: cast("ClusterClient", SourceView(process)),
                TARGET: self._destination.view(process),
            }
            clusters = LaneClusters(views.__getitem__, clock)
            if spec.offsets == "translate":
                destination = TranslateDestination(spec, clusters, process.name, observer)
            else:
                destination = PreserveDestination(spec, clusters, observer)
        return lambda _spec: destination

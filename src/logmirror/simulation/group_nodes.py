"""Processes that translate consumer groups in a simulation, each with one `Link`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, cast

from logmirror.cluster.transactions import ProducerIdentity, TransactionalProducer
from logmirror.errors import FencedError, LogmirrorError
from logmirror.groups.link import Link
from logmirror.simulation.cluster import SourceView, TargetView
from logmirror.simulation.pipelines import TargetPipeline
from logmirror.simulation.schedule import KilledError
from logmirror.simulation.world import Process

if TYPE_CHECKING:
    from logmirror.clock import Chooser
    from logmirror.cluster.client import ClusterClient, FetchResult
    from logmirror.groups.link_spec import LinkSpec
    from logmirror.model import TopicPartition
    from logmirror.simulation.group_judge import GroupJudge
    from logmirror.simulation.log import Appended
    from logmirror.simulation.topics import Topics
    from logmirror.simulation.world import World

SOURCE_ALIAS: Final = "east"
CHECKPOINTS: Final = f"{SOURCE_ALIAS}.checkpoints.internal"

_RESTART_MS: Final = (200, 1_500)
_RESTARTED: Final = 0.3
"""Probability that a fenced process is started again."""

_ROUNDS_MAX: Final = 12
"""Rounds without faults within which enough must succeed."""


class _WatchedTopics:
    """The topics of the target; the judge learns which process appends checkpoints."""

    def __init__(self, topics: Topics, process: str, judge: GroupJudge) -> None:
        self._topics, self._process, self._judge = topics, process, judge

    def append(self, topic: str, data: bytes) -> Appended:
        """See `Topics.append`."""
        log = self._topics.logs[topic]
        end = log.end
        found = self._topics.append(topic, data)
        if topic == CHECKPOINTS and log.end > end:
            self._judge.appended(self._process, data)
        return found


class _WatchedProducer(TransactionalProducer):
    """Notes for the judge which process has fenced the others."""

    def watch(self, process: str, judge: GroupJudge) -> TransactionalProducer:
        self._process, self._judge = process, judge
        return self

    def init(self) -> ProducerIdentity:
        found = super().init()
        self._judge.took(self._process)
        return found


class _LinkTarget(TargetView):
    """The target, as a link sees it."""

    def __init__(self, process: Process, topics: Topics, judge: GroupJudge) -> None:
        super().__init__(process, topics, grants=False)
        self._judge = judge

    def pipeline(self, *, transactional_id: str | None = None) -> TargetPipeline:
        """See `ClusterClient.pipeline`."""
        del transactional_id
        watched = _WatchedTopics(self._topics, self._process.name, self._judge)
        return TargetPipeline(self._process, cast("Topics", watched))

    def transactional_producer(
        self, transactional_id: str, *, timeout_ms: int = 60_000
    ) -> TransactionalProducer:
        """See `ClusterClient.transactional_producer`."""
        producer = _WatchedProducer(self._router, transactional_id, timeout_ms=timeout_ms)
        return producer.watch(self._process.name, self._judge)

    def fetch(self, partition: TopicPartition, *position: object, **more: object) -> FetchResult:
        """See `ClusterClient.fetch`."""
        if partition.topic in self._topics.unreadable:
            self._judge.refused(self._process.name)
        return super().fetch(partition, *position, **more)  # type: ignore[arg-type]  # the same


class LinkNode:
    """A host that runs a link, and restarts it when it has ended.

    Args:
        world: The simulation.
        name: Name of the host.
        spec: What the link translates.
        target: The topics of the target.
        judge: Receives what the processes do.
    """

    def __init__(
        self, world: World, name: str, spec: LinkSpec, target: Topics, judge: GroupJudge
    ) -> None:
        self._world, self._name, self._spec = world, name, spec
        self._target, self._judge = target, judge
        self._chooser: Chooser = world.chooser
        self._starts = 0
        self._open: tuple[Process, Link] | None = None

    def run_until_healed(self) -> None:
        """Run and restart the link until the faults are over; the last process stays."""
        while not self._world.is_healed:
            if not self._run():
                return
            self._world.schedule.sleep_ms(self._chooser.randint(*_RESTART_MS))

    def run_as_second(self) -> None:
        """Do the same, from the time at which a fault requires a second process."""
        while not (self._world.second_wanted or self._world.is_healed):
            self._world.schedule.sleep_ms(500)
        self.run_until_healed()

    @property
    def process(self) -> str:
        """The name of the process that runs; empty if none does."""
        return self._open[0].name if self._open else ""

    def _started(self) -> tuple[Process, Link]:
        self._starts += 1
        process = Process(self._world, f"{self._name}.{self._starts}")
        source = cast("ClusterClient", SourceView(process))
        target = cast("ClusterClient", _LinkTarget(process, self._target, self._judge))
        return process, Link(self._spec, source, target, self._world.schedule)

    def _round(self) -> None:
        process, link = self._open or self._started()
        self._open = process, link
        self._judge.round_began(process.name)
        link.round()

    def _run(self) -> bool:
        """Run one process until it ends; returns whether it is started again."""
        self._open = process, _ = self._started()
        self._world.enter(process)
        schedule, failures = self._world.schedule, 0
        while not self._world.is_healed:
            try:
                self._round()
                failures = 0
            except KilledError:
                self._end()
                return True
            except FencedError:
                schedule.note("fenced")
                self._end()
                return self._chooser.random() < _RESTARTED
            except LogmirrorError as error:
                schedule.note(f"round failed with {error.kind}: {error.message}")
                failures += 1
            schedule.sleep_ms(min(1000 << failures, 4_000) if failures else self._spec.interval_ms)
        return False

    def _end(self) -> None:
        self._world.leave()
        self._open = None

    def restart(self) -> None:
        """Let the next round be the first one of a new process."""
        self._open = None

    def run_rounds(self, count: int) -> None:
        """Run rounds without faults until some have succeeded."""
        if self._open is None or self._open[0].is_dead:
            self._open = self._started()
        self._world.enter(self._open[0])
        done, problem = 0, ""
        for _ in range(_ROUNDS_MAX):
            try:
                self._round()
                done += 1
            except LogmirrorError as error:
                problem = f"{error.kind}: {error.message} {error.facts}"
            if done == count:
                return
            self._world.schedule.sleep_ms(self._spec.interval_ms)
        self._judge.add("A22", problem)

"""One simulated run: a source, mirrors, faults, and the checker's verdict on the replica.

    result = simulate(Plan(seed=7, destination="S3", form="parquet", directive=...))

The plan and its seed determine every step, so a run can be repeated. `Result.trace` is a digest of
all steps.
"""

from __future__ import annotations

import contextlib
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from logmirror import failpoints
from logmirror.clock import Chooser, driven
from logmirror.simulation.compactor import Compactor
from logmirror.simulation.coordinator import MARKER_MS
from logmirror.simulation.node import Node
from logmirror.simulation.replicas import opened_replica
from logmirror.simulation.schedule import Schedule
from logmirror.simulation.source import Application
from logmirror.simulation.world import World

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from logmirror.simulation.faults import Destination, Directive, Format
    from logmirror.simulation.replicas import Replica
    from logmirror.testing.checker import Anomaly, Row

_WRITES: Final = 18
_WRITE_EVERY_MS: Final = (50, 700)
_HEALED_MS: Final = 9_000
"""Virtual time at which all faults end, unless a constant below applies."""

_PAUSED_MS: Final = 26_000
"""The same with a paused process: it must have resumed before."""

_KAFKA_EXTRA_MS: Final = 12_000
"""Added for Kafka: a mirror waits before it writes as a producer that the broker does not know."""

_LIMIT_MS: Final = 400_000
_DRAIN_MS: Final = 300_000
"""Virtual time that a run without faults may take to copy the rest."""

_STEPS: Final = 60_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The parameters of a run. The same plan always takes the same steps."""

    seed: int
    destination: Destination
    form: Format
    """Format of the objects; for Kafka `-` (same offsets) or `translate` (new offsets)."""

    directive: Directive | None = None
    """The fault that happens at a failpoint."""

    drawn: tuple[str, ...] = ()
    """Names of faults that happen at random moments."""

    @property
    def faults(self) -> set[str]:
        """Names of all faults of the plan."""
        return {*self.drawn, self.directive.fault if self.directive else ""}

    def __str__(self) -> str:
        form = "" if self.form == "-" else f" {self.form}"
        directed = f" {self.directive.fault}@{self.directive.point}" if self.directive else ""
        nth = f"#{self.directive.nth}" if self.directive else ""
        return f"seed {self.seed}: {self.destination}{form}{directed}{nth} {'+'.join(self.drawn)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The result of a run."""

    plan: Plan
    anomalies: tuple[Anomaly, ...]
    records: int
    """Committed records at the source."""

    fired: int
    """Number of times that the directed fault happened."""

    happened: tuple[str, ...]
    """Names of all faults that happened, in order."""

    points: frozenset[str]
    """Failpoints that were reached."""

    trace: str
    """Digest of all steps."""

    last_steps: tuple[str, ...]
    """The last steps in words, to analyse a run."""


def simulate(plan: Plan) -> Result:
    """Run one plan.

    Raises:
        BaseException: The product raised something other than a `LogmirrorError`: a bug.
    """
    chooser = Chooser(f"{plan}")
    schedule = Schedule(chooser, limit_ms=_LIMIT_MS, steps_max=_STEPS)
    to_kafka = plan.destination == "Kafka"
    grants = _grants_markers(plan, chooser)
    # Without ClusterAction, an offset gap is filled by empty transactions, which do not start the
    # producer epoch that would fence a late batch. If the cleaner removes records while such a
    # batch is in flight, the batch is appended behind the gap: see "Known limits" in torture.md.
    is_shared = "two-writers" in plan.faults or chooser.random() < 0.3  # noqa: PLR2004  # share of runs with two mirrors
    may_compact = (
        grants or plan.form == "translate" or not (is_shared or plan.faults & {"late", "pause"})
    )
    has_tables = plan.form == "snapshots"
    # Compaction may remove the last copied record, and with it what shows that the source lost it.
    may_compact = may_compact and "regrown" not in plan.faults
    application = Application(
        schedule,
        chooser,
        compacts=has_tables or (may_compact and chooser.random() < 0.3),  # noqa: PLR2004  # share of compacted topics
        stamps=not to_kafka,
        numbers=plan.form == "translate",
        keyed=has_tables,
    )
    world = World(schedule, chooser, application, plan.directive)
    if plan.directive and plan.directive.point.startswith("head."):
        _trim(application)
    with (
        _quiet(),
        driven(schedule, chooser),
        failpoints.listening(world.reached),
        opened_replica(plan.destination, plan.form, world, chooser, grants=grants) as replica,
    ):
        world.second_wanted = is_shared
        world.has_epochs = _has_epochs(plan, application, chooser)
        nodes = _run_faults(plan, world, chooser, replica)
        _drain(world, nodes[0], replica)
        anomalies = _judge(world, replica)
    return Result(
        plan=plan,
        anomalies=tuple(anomalies),
        records=len(application.truth().rows),
        fired=world.fired,
        happened=tuple(world.happened),
        points=frozenset(world.points),
        trace=schedule.trace,
        last_steps=tuple(schedule.last_steps),
    )


def _has_epochs(plan: Plan, application: Application, chooser: Chooser) -> bool:
    """Whether the source has leader epochs; without them, the last copied record must show it."""
    if "regrown" not in plan.faults or plan.form == "translate" or application.compacts:
        return True
    return chooser.random() < 0.7  # noqa: PLR2004  # share of sources


def _grants_markers(plan: Plan, chooser: Chooser) -> bool:
    """Whether the destination cluster grants ClusterAction, so that mirrors can write markers."""
    if plan.directive and plan.directive.point == "hole.joined":
        return False
    return plan.destination != "Kafka" or chooser.random() < 0.7  # noqa: PLR2004  # share of clusters that do


def _trim(application: Application) -> None:
    """Delete the first records of the source before the first run."""
    for _ in range(3):
        application.act()
    application.delete_before(application.log.last_stable_offset)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Discard the logs of simulated processes."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)


def _run_faults(plan: Plan, world: World, chooser: Chooser, replica: Replica) -> list[Node]:
    """Run application, mirrors, `compact` and observer until all faults are over."""
    schedule = world.schedule
    faults, to_kafka = plan.faults, plan.destination == "Kafka"
    healed_ms = _PAUSED_MS if "pause" in faults else _HEALED_MS
    if to_kafka:
        healed_ms += _KAFKA_EXTRA_MS
    nodes = [Node(world, name, replica.target, chooser) for name in ("a", "b")]
    schedule.add("application", _writing(world, chooser))
    schedule.add("a", nodes[0].run_until_healed)
    schedule.add("b", nodes[1].run_as_second)
    if not to_kafka and plan.form != "snapshots" and _merges(plan, chooser):
        schedule.add("c", Compactor(world, replica.target, chooser).run_until_healed)
    schedule.add("judge", _observing(world, replica, healed_ms))
    for fault in plan.drawn:
        at_ms = chooser.randrange(300, _HEALED_MS - 1000)
        schedule.after(at_ms, lambda fault=fault: world.inject(fault))  # type: ignore[misc]  # bound in the loop
    schedule.run()
    return nodes


def _merges(plan: Plan, chooser: Chooser) -> bool:
    """Whether `compact` runs beside the mirrors."""
    if plan.directive and plan.directive.point.startswith("compact."):
        return True
    return chooser.random() < 0.2  # noqa: PLR2004  # share of runs


def _writing(world: World, chooser: Chooser) -> Callable[[], None]:
    def write() -> None:
        for _ in range(_WRITES):
            world.schedule.sleep_ms(chooser.randint(*_WRITE_EVERY_MS))
            world.application.act()
            if chooser.random() < 0.1:  # noqa: PLR2004  # probability
                world.application.clean()

    return write


def _observing(world: World, replica: Replica, healed_ms: int) -> Callable[[], None]:
    """Observe the replica at intervals, and end all faults at `healed_ms`."""

    def observe() -> None:
        while world.schedule.monotonic_ms() < healed_ms:
            world.schedule.sleep_ms(healed_ms // 4)
            names = replica.names()
            if names is not None:
                world.history.listed(names)
            world.history.read(_rows(world, replica))
        world.heal()

    return observe


def _drain(world: World, node: Node, replica: Replica) -> None:
    """Run the mirror once without faults: it must copy everything."""
    schedule = world.schedule
    if schedule.ran_out:
        world.history.stuck(f"{schedule.last_steps[-1]}: a process did not stop after SIGTERM")
        return
    world.application.finish()
    schedule.extend(_DRAIN_MS)
    ended: list[bool] = []
    node.errors.clear()

    def drain() -> None:
        ended.append(node.run_once(until_now=True))
        schedule.sleep_ms(
            max(MARKER_MS)
        )  # until the markers of all committed transactions are written

    schedule.add("drain", drain)
    schedule.run()
    if world.application.has_two_histories:
        if ended == [True] and world.application.is_of_lost_history(_rows(world, replica)):
            world.history.stuck("the mirror did not stop at the second history")
        return
    if schedule.ran_out or ended != [True]:
        why = node.errors[0] if node.errors else schedule.last_steps[-1]
        world.history.stuck(f"after all faults: {why}")


def _judge(world: World, replica: Replica) -> list[Anomaly]:
    rows = _rows(world, replica)
    for pair in replica.wrong_pairs():
        world.history.mistranslated(pair)
    truth = replica.expected(world.application.truth(rows))
    return world.history.judge(truth, rows, names=replica.names())


def _rows(world: World, replica: Replica) -> list[Row]:
    """Return the records of the replica; none, and an anomaly, if it cannot be read."""
    try:
        return replica.rows()
    except Exception as error:  # noqa: BLE001  # corrupt bytes can raise anything
        world.history.unreadable(f"the replica cannot be read: {error!r}")
        return []

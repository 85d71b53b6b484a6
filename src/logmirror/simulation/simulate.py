"""One seed: a mirror, a source, faults; and what the checker says of what became of the copy.

    result = simulate(Plan(seed=7, destination="S3", form="parquet", directive=...))

Everything is drawn from the seed and the plan, so a result can be had again: `Result.trace` is the
digest of every step that was taken.
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
from logmirror.simulation.copies import made
from logmirror.simulation.node import Node
from logmirror.simulation.schedule import Schedule
from logmirror.simulation.source import Application
from logmirror.simulation.world import World

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from logmirror.simulation.copies import Copy
    from logmirror.simulation.faults import Destination, Directive, Format
    from logmirror.testing.checker import Anomaly, Row

_WRITES: Final = 18
_WRITE_EVERY_MS: Final = (50, 700)
_HEALED_MS: Final = 9_000
"""Faults happen until then, if nothing takes longer."""

_PAUSED_MS: Final = 26_000
"""The same, where somebody is paused: until he has woken up."""

_SETTLED_MS: Final = 12_000
"""Longer, where a process that the broker does not know waits before it writes."""

_LIMIT_MS: Final = 400_000
_DRAIN_MS: Final = 300_000
"""How long a healthy process may take to copy what is there, by the clock of the simulation."""

_STEPS: Final = 60_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is simulated; the same plan always takes the same steps."""

    seed: int
    destination: Destination
    form: Format
    """`-` for a cluster at the source's offsets."""

    directive: Directive | None = None
    """The fault that is tied to a crash point."""

    drawn: tuple[str, ...] = ()
    """Names of further faults, which happen at drawn moments."""

    @property
    def faults(self) -> set[str]:
        """Names of all faults that may happen."""
        return {*self.drawn, self.directive.fault if self.directive else ""}

    def __str__(self) -> str:
        form = "" if self.form == "-" else f" {self.form}"
        directed = f" {self.directive.fault}@{self.directive.point}" if self.directive else ""
        nth = f"#{self.directive.nth}" if self.directive else ""
        return f"seed {self.seed}: {self.destination}{form}{directed}{nth} {'+'.join(self.drawn)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What became of it."""

    plan: Plan
    anomalies: tuple[Anomaly, ...]
    records: int
    """Committed at the source."""

    fired: int
    """How often the directed fault happened."""

    happened: tuple[str, ...]
    """All faults that happened, in order."""

    points: frozenset[str]
    """Crash points that were reached."""

    trace: str
    words: tuple[str, ...]
    """The last steps, for a person."""


def simulate(plan: Plan) -> Result:
    """Run one plan to its end.

    Raises:
        BaseException: Whatever the product raised that is no error of its own: a bug.
    """
    chooser = Chooser(f"{plan}")
    schedule = Schedule(chooser, limit_ms=_LIMIT_MS, steps_max=_STEPS)
    to_kafka = plan.destination == "Kafka"
    grants = _grants_markers(plan, chooser)
    # What is cleaned away while a batch is late, or in another process's hand, makes a hole. Empty
    # transactions do not begin the epoch that would refuse the batch behind it: see the page.
    is_shared = "two-writers" in plan.faults or chooser.random() < 0.3  # noqa: PLR2004  # how many
    may_compact = (
        grants or plan.form == "translate" or not (is_shared or plan.faults & {"late", "pause"})
    )
    has_tables = plan.form == "snapshots"
    application = Application(
        schedule,
        chooser,
        compacts=has_tables or (may_compact and chooser.random() < 0.3),  # noqa: PLR2004  # how many topics are
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
        made(plan.destination, plan.form, world, chooser, grants=grants) as copy,
    ):
        world.second_wanted = is_shared
        nodes = _play(plan, world, chooser, copy)
        _drain(world, nodes[0])
        anomalies = _judge(world, copy)
    return Result(
        plan=plan,
        anomalies=tuple(anomalies),
        records=len(application.truth().rows),
        fired=world.fired,
        happened=tuple(world.happened),
        points=frozenset(world.points),
        trace=schedule.trace,
        words=tuple(schedule.words),
    )


def _grants_markers(plan: Plan, chooser: Chooser) -> bool:
    """Whether the destination lets us write markers ourselves."""
    if plan.directive and plan.directive.point == "hole.joined":
        return False
    return plan.destination != "Kafka" or chooser.random() < 0.7  # noqa: PLR2004  # how many do


def _trim(application: Application) -> None:
    """Let the source have lost its first records before anybody has copied them."""
    for _ in range(3):
        application.act()
    application.delete_before(application.log.last_stable_offset)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """What made-up processes log is of no interest to anybody."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)


def _play(plan: Plan, world: World, chooser: Chooser, copy: Copy) -> list[Node]:
    """Let everybody act until all faults are over."""
    schedule = world.schedule
    faults, to_kafka = plan.faults, plan.destination == "Kafka"
    healed_ms = _PAUSED_MS if "pause" in faults else _HEALED_MS
    if to_kafka:
        healed_ms += _SETTLED_MS
    nodes = [Node(world, name, copy.target, chooser) for name in ("a", "b")]
    schedule.add("application", _writing(world, chooser))
    schedule.add("a", nodes[0].live)
    schedule.add("b", nodes[1].live_as_second)
    if not to_kafka and plan.form != "snapshots" and _merges(plan, chooser):
        schedule.add("c", Compactor(world, copy.target, chooser).live)
    schedule.add("judge", _watching(world, copy, healed_ms))
    for fault in plan.drawn:
        at_ms = chooser.randrange(300, _HEALED_MS - 1000)
        schedule.after(at_ms, lambda fault=fault: world.happen(fault))  # type: ignore[misc]  # bound at once
    schedule.run()
    return nodes


def _merges(plan: Plan, chooser: Chooser) -> bool:
    """Whether small objects are merged meanwhile."""
    if plan.directive and plan.directive.point.startswith("compact."):
        return True
    return chooser.random() < 0.2  # noqa: PLR2004  # how often


def _writing(world: World, chooser: Chooser) -> Callable[[], None]:
    def write() -> None:
        for _ in range(_WRITES):
            world.schedule.sleep_ms(chooser.randint(*_WRITE_EVERY_MS))
            world.application.act()
            if chooser.random() < 0.1:  # noqa: PLR2004  # how often
                world.application.clean()

    return write


def _watching(world: World, copy: Copy, healed_ms: int) -> Callable[[], None]:
    """Look at the copy now and then, and let the faults be over at the end."""

    def watch() -> None:
        while world.schedule.monotonic_ms() < healed_ms:
            world.schedule.sleep_ms(healed_ms // 4)
            names = copy.names()
            if names is not None:
                world.history.listed(names)
            world.history.read(_rows(world, copy))
        world.heal()

    return watch


def _drain(world: World, node: Node) -> None:
    """Without faults a new process must copy all that is there."""
    schedule = world.schedule
    if schedule.ran_out:
        world.history.stuck(f"{schedule.words[-1]}: some process did not stop when it was asked to")
        return
    world.application.rest()
    schedule.extend(_DRAIN_MS)
    ended: list[bool] = []
    node.errors.clear()

    def drain() -> None:
        ended.append(node.run_once(until_now=True))
        schedule.sleep_ms(max(MARKER_MS))  # until readers are shown what was committed

    schedule.add("drain", drain)
    schedule.run()
    if world.application.is_recreated:
        return  # it must refuse to go on
    if schedule.ran_out or ended != [True]:
        why = node.errors[0] if node.errors else schedule.words[-1]
        world.history.stuck(f"after all faults: {why}")


def _judge(world: World, copy: Copy) -> list[Anomaly]:
    rows = _rows(world, copy)
    for pair in copy.wrong_pairs():
        world.history.mistranslated(pair)
    truth = copy.expected(world.application.truth(rows[0] if rows else None))
    return world.history.judge(truth, rows, names=copy.names())


def _rows(world: World, copy: Copy) -> list[Row]:
    """What a reader is shown of the copy, if it can be read at all."""
    try:
        return copy.rows()
    except Exception as error:  # noqa: BLE001  # what is broken may break a reader in any way
        world.history.unreadable(f"the copy cannot be read: {error!r}")
        return []

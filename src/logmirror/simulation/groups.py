"""One simulated run of translated consumer groups: mirrors, groups, links, faults, and a verdict.

    result = simulate_groups(7)

A link is the product's code, `groups.link.Link`, with the product's client code down to the
requests to coordinators. The seed determines every step, so a run can be repeated. `Result.trace`
is a digest of all steps.

Not simulated: a replica with new offsets that is truncated and not recreated. Offset syncs do not
show which of two histories of a log they are about. Nor, for the same reason, a topic of syncs that
is deleted, if they have no topic IDs, as those of MirrorMaker.
"""

from __future__ import annotations

import contextlib
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, cast

from logmirror import failpoints
from logmirror.clock import Chooser, driven
from logmirror.cluster.properties import ConnectionSettings
from logmirror.failpoints import GROUP_POINTS
from logmirror.groups.link_spec import LinkSpec, ReplicaSpec
from logmirror.mirror.ports import KafkaSpec
from logmirror.simulation.cluster import SourceView
from logmirror.simulation.faults import Directive
from logmirror.simulation.group_coordinator import Committed
from logmirror.simulation.group_judge import GroupJudge
from logmirror.simulation.group_mirror import ALIAS, SYNCS, MirroredPartition, mirror
from logmirror.simulation.group_nodes import CHECKPOINTS, SOURCE_ALIAS, LinkNode
from logmirror.simulation.log_cleaner import clean
from logmirror.simulation.schedule import Schedule
from logmirror.simulation.topics import Topics
from logmirror.simulation.world import Process, World

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from logmirror.cluster.produce import ProducePipeline
    from logmirror.simulation.source import Application
    from logmirror.testing.checker import Anomaly

FAULTS: Final = (
    *("kill", "pause", "refused", "lost-answer", "late", "down", "source-down"),
    *("syncs compacted", "syncs deleted", "checkpoints compacted", "checkpoints unreadable"),
    *("checkpoints recreated", "replica truncated", "replica trimmed", "replica recreated"),
    *("source compacted",),
)
"""What happens at random moments. `syncs deleted` lasts until the mirror creates the topic."""

_AT_POINTS: Final = ("kill", "kill-twice", "pause", "refused", "lost-answer", "late", "down")

_SERVER: Final = ConnectionSettings(bootstrap_servers=(("simulated", 1),))
_GROUPS: Final = ("billing", "search", "audit")
_TOPICS: Final = (("orders", True), ("clicks", False))
_HEALED_MS: Final = 12_000
_PAUSED_MS: Final = 30_000
"""The same if a process was paused: it must have resumed before."""
_LIMIT_MS: Final = 400_000
_STEPS: Final = 60_000
_ROUNDS: Final = 2
"""Rounds without faults after which all must be translated."""
_UNREADABLE_MS: Final = 4_000
_MISSING_MS: Final = (0, 500, 3_000)
"""How long a deleted topic is missing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupResult:
    """The result of a run."""

    seed: int
    anomalies: tuple[Anomaly, ...]
    happened: tuple[str, ...]
    """Names of all faults that happened, in order."""

    points: frozenset[str]
    """Failpoints that were reached."""

    checkpoints: int
    """Checkpoints that became visible."""

    rewinds: int
    """Those of them that went back, for a reason."""

    commits: int
    """Offsets that were committed at the target."""

    trace: str
    """Digest of all steps."""

    last_steps: tuple[str, ...]
    """The last steps in words, to analyse a run."""


def simulate_groups(
    seed: int,
    *,
    faults: Sequence[str] = FAULTS,
    steps: Callable[[str], None] | None = None,
) -> GroupResult:
    """Run one seed.

    Args:
        seed: Determines the run, together with `faults`.
        faults: What happens at random moments is drawn from these.
        steps: Is called with each step in words.

    Raises:
        BaseException: The product raised something other than a `LogmirrorError`: a bug.
    """
    chooser = Chooser(f"groups {seed}")
    schedule = Schedule(chooser, limit_ms=_LIMIT_MS, steps_max=_STEPS)
    if steps is not None:
        schedule.heard = steps
    run = _Run(schedule, chooser, faults)
    with _quiet(), driven(schedule, chooser), failpoints.listening(run.world.reached):
        run.with_faults()
        run.without_faults()
    return GroupResult(
        seed=seed,
        anomalies=run.judge.anomalies,
        happened=tuple(run.world.happened),
        points=frozenset(run.world.points),
        checkpoints=run.judge.checkpoints,
        rewinds=run.judge.rewinds,
        commits=run.judge.commits,
        trace=schedule.trace,
        last_steps=tuple(schedule.last_steps),
    )


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Discard the logs of simulated processes."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)


class _Run:
    """The state of a run."""

    def __init__(self, schedule: Schedule, chooser: Chooser, faults: Sequence[str]) -> None:
        self._schedule, self._chooser = schedule, chooser
        self.topics = source = Topics(schedule, chooser, 1)
        self._target = target = Topics(schedule, chooser, 2)
        shows_id = chooser.random() < 0.5  # noqa: PLR2004  # share of runs
        if not shows_id:
            faults = [one for one in faults if one != "syncs deleted"] or faults
        self._pairs = [
            MirroredPartition(
                schedule,
                chooser,
                topic,
                keeps=keeps,
                source=source,
                target=target,
                shows_id=shows_id,
            )
            for topic, keeps in _TOPICS
        ]
        source.create(SYNCS)
        target.create(CHECKPOINTS)
        self._commits = chooser.random() < 0.6  # noqa: PLR2004  # share of runs
        directive = None
        if chooser.random() < 0.8:  # noqa: PLR2004  # the same
            point, fault = chooser.choice(GROUP_POINTS), chooser.choice(_AT_POINTS)
            directive = Directive(point, fault, chooser.randint(1, 8))
        self._drawn = [chooser.choice(faults) for _ in range(chooser.randint(2, 7))]
        if not shows_id and "replica recreated" in self._drawn:
            # The first pair of the new replica may be gone before it is read: docs/fail-over.md.
            self._drawn = [one for one in self._drawn if one != "syncs compacted"]
        # `SourceView` needs the topics of an application, and nothing else here does.
        self.world = World(schedule, chooser, cast("Application", self), directive)
        self.world.second_wanted = chooser.random() < 0.3  # noqa: PLR2004  # share of runs
        self.judge = GroupJudge(schedule, self._pairs, target.groups.offsets)
        target.groups.changed = self.judge.target_committed
        spec = link_spec(commits=self._commits, interval_ms=chooser.choice((700, 2_000, 4_000)))
        self._nodes = [LinkNode(self.world, n, spec, target, self.judge) for n in ("a", "b")]

    # -- actors ----------------------------------------------------------------------------------

    def with_faults(self) -> None:
        """Run everything until the faults are over."""
        schedule = self._schedule
        is_paused = "pause" in self._drawn or self.world.plans("pause")
        healed_ms = _PAUSED_MS if is_paused else _HEALED_MS
        schedule.add("mirror", self._mirror)
        schedule.add("consumers", self._consume)
        schedule.add("a", self._nodes[0].run_until_healed)
        schedule.add("b", self._nodes[1].run_as_second)
        for fault in self._drawn:
            at_ms = self._chooser.randrange(300, _HEALED_MS - 2_000)
            schedule.after(at_ms, lambda fault=fault: self._inject(fault))  # type: ignore[misc]  # bound in the loop
        schedule.add("end", lambda: self._heal(healed_ms))
        schedule.run()

    def without_faults(self) -> None:
        """Copy the rest, run two rounds, clean the checkpoints topic, and judge."""
        schedule = self._schedule
        if schedule.ran_out:
            self.judge.add("A22", schedule.last_steps[-1])
            return
        owners = [node for node in self._nodes if self.judge.is_owner(node.process)]
        node = owners[0] if owners else self._nodes[0]
        is_restarted = "checkpoints unreadable" in self.world.happened
        is_restarted |= self._chooser.random() < 0.5  # noqa: PLR2004  # share of runs
        if is_restarted:
            node.restart()
        for name, act in (
            ("settle", lambda: node.run_rounds(1)),
            ("mirror", self._copy_all),  # what was translated already becomes more exact
            ("finish", lambda: node.run_rounds(_ROUNDS)),
        ):
            schedule.extend(_LIMIT_MS)
            schedule.add(name, act)
            schedule.run()
        if schedule.ran_out:
            self.judge.add("A22", schedule.last_steps[-1])
            return
        self._clean_checkpoints(0)
        syncs = self.topics.logs.get(SYNCS)
        batches = [entry.data for entry in syncs.entries] if syncs else []
        self.judge.finish(self.topics.groups.offsets, batches)

    def _heal(self, healed_ms: int) -> None:
        self._schedule.sleep_ms(healed_ms)
        self.world.heal()
        self._target.unreadable.clear()
        for pair in self._pairs:
            if not pair.exists:
                pair.create()

    def _copy_all(self) -> None:
        self.topics.create(SYNCS)
        pipeline = self._pipeline("mirror.2")
        for _ in range(2):
            for pair in self._pairs:
                pair.write()
        while any(pair.is_behind for pair in self._pairs):
            mirror(self._pairs, pipeline, self._schedule, self._chooser)

    def _pipeline(self, process: str) -> ProducePipeline:
        return cast("ProducePipeline", SourceView(Process(self.world, process)).pipeline())

    def _mirror(self) -> None:
        pipeline = self._pipeline("mirror.1")
        while not self.world.is_healed:
            self._schedule.sleep_ms(self._chooser.randint(50, 900))
            for pair in self._pairs:
                if self._chooser.random() < 0.7 and pair.end < 150:  # noqa: PLR2004  # probability, size
                    pair.write()
            if self._chooser.random() < 0.3:  # noqa: PLR2004  # the mirror was restarted
                self.topics.create(SYNCS)
            mirror(self._pairs, pipeline, self._schedule, self._chooser)

    # -- groups ----------------------------------------------------------------------------------

    def _consume(self) -> None:
        chooser = self._chooser
        while not self.world.is_healed:
            self._schedule.sleep_ms(chooser.randint(50, 700))
            group, draw = chooser.choice(_GROUPS), chooser.random()
            if draw < 0.75:  # noqa: PLR2004  # probability
                self._commit(group)
            elif draw < 0.8:  # noqa: PLR2004  # the same
                self.topics.groups.offsets.pop(group, None)
            elif self._commits:
                self._consume_at_target(group)

    def _commit(self, group: str) -> None:
        """Commit offsets of some partitions at the source: forward, at the end, or back."""
        chooser = self._chooser
        offsets = self.topics.groups.offsets.setdefault(group, {})
        for pair in chooser.sample(self._pairs, chooser.randint(1, len(self._pairs))):
            current = offsets[pair.partition].offset if pair.partition in offsets else 0
            wanted = min(current + chooser.randrange(8), pair.end)
            draw = chooser.random()
            if draw < 0.3:  # noqa: PLR2004  # probability
                wanted = pair.end
            elif draw < 0.45:  # noqa: PLR2004  # the same
                wanted = chooser.randint(0, current)
            offsets[pair.partition] = Committed(wanted, chooser.choice(("", "m")))
            self.judge.committed(group, pair, wanted)
            self._schedule.note(f"{group} commits {wanted} of {pair.partition.topic}")

    def _consume_at_target(self, group: str) -> None:
        """Join or leave a group at the target, commit there as a member, or reset its offsets."""
        groups, chooser = self._target.groups, self._chooser
        groups.versions[group] += 1
        if group not in groups.active:
            if chooser.random() < 0.5:  # noqa: PLR2004  # probability
                groups.active.add(group)
            elif chooser.random() < 0.5:  # noqa: PLR2004  # the same
                groups.offsets.pop(group, None)
            return
        offsets = groups.offsets.setdefault(group, {})
        for pair in self._pairs:
            if pair.exists:
                offsets[pair.copy] = Committed(chooser.randint(0, len(pair.replica)), "")
        if chooser.random() < 0.6:  # noqa: PLR2004  # probability
            groups.active.discard(group)

    # -- faults ----------------------------------------------------------------------------------

    def _inject(self, fault: str) -> None:
        act = {
            "syncs compacted": self._clean_syncs,
            "syncs deleted": lambda: self.topics.logs.pop(SYNCS, None),
            "checkpoints compacted": lambda: self._clean_checkpoints(self._chooser.randrange(6)),
            "checkpoints unreadable": self._refuse_read,
            "checkpoints recreated": self._recreate_checkpoints,
            "replica truncated": self._pairs[0].truncate,
            "replica trimmed": self._chooser.choice(self._pairs).trim,
            "replica recreated": lambda: self._recreate(self._chooser.choice(self._pairs)),
            "source compacted": self._chooser.choice(self._pairs).compact,
        }.get(fault)
        self.world.inject(fault)
        if act is not None:
            act()

    def _clean_syncs(self) -> None:
        log = self.topics.logs.get(SYNCS)
        if log is not None:
            clean(log, log.end - self._chooser.randrange(6))

    def _clean_checkpoints(self, dirty: int) -> None:
        log = self._target.logs[CHECKPOINTS]
        clean(log, log.end - dirty)
        self.judge.cleaned(log)

    def _refuse_read(self) -> None:
        self._target.unreadable.add(CHECKPOINTS)
        self._schedule.after(_UNREADABLE_MS, self._target.unreadable.clear)

    def _recreate_checkpoints(self) -> None:
        self._target.replace(CHECKPOINTS)
        self.judge.cleaned(self._target.logs[CHECKPOINTS])

    def _recreate(self, pair: MirroredPartition) -> None:
        pair.delete()
        missing_ms = self._chooser.choice(_MISSING_MS)
        if missing_ms:
            self._schedule.after(missing_ms, pair.create)
        else:
            pair.create()


def link_spec(*, commits: bool, interval_ms: int) -> LinkSpec:
    """Return what the links translate: a replica that keeps offsets, and one with new offsets."""
    replicas = tuple(
        ReplicaSpec(
            "orders",
            topic,
            None,
            KafkaSpec(
                cluster=_SERVER,
                topic=topic if keeps else f"copy.{topic}",
                name=ALIAS,
                offsets="preserve" if keeps else "translate",
            ),
        )
        for topic, keeps in _TOPICS
    )
    return LinkSpec(
        source=_SERVER,
        source_alias=SOURCE_ALIAS,
        target=_SERVER,
        destination=ALIAS,
        replicas=replicas,
        include=(".*",),
        exclude=(),
        interval_ms=interval_ms,
        commits=commits,
    )

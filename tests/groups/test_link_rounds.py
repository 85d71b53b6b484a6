"""Goal: rounds of a link translate what has become better, and notice what was created again.

Method: the simulated clusters, in which a test sets the logs and looks at each record.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest

from logmirror.clock import Chooser, driven
from logmirror.errors import PositionError
from logmirror.groups.link import Link
from logmirror.simulation.cluster import SourceView, TargetView
from logmirror.simulation.group_coordinator import Committed
from logmirror.simulation.group_mirror import SYNCS, MirroredPartition
from logmirror.simulation.group_nodes import CHECKPOINTS
from logmirror.simulation.groups import link_spec
from logmirror.simulation.schedule import Schedule
from logmirror.simulation.topics import Topics
from logmirror.simulation.world import Process, World
from logmirror.wire.batch_header import parse_header
from logmirror.wire.mirrormaker import decode_checkpoint
from logmirror.wire.records import decode_reference, encode_reference

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from logmirror.wire.records import Record


class Clusters:
    """A source with a group, a target, and a partition with new offsets."""

    def __init__(self) -> None:
        chooser = Chooser(1)
        self.schedule = schedule = Schedule(chooser, limit_ms=10**6, steps_max=10**5)
        self.source, self.target = Topics(schedule, chooser, 1), Topics(schedule, chooser, 2)
        sides = {"source": self.source, "target": self.target}
        self.pair = MirroredPartition(
            schedule, chooser, "clicks", keeps=False, shows_id=True, **sides
        )
        self.source.create(SYNCS)
        application = cast("Any", SimpleNamespace(topics=self.source))
        self._world = World(schedule, chooser, application, None)

    def commit(self, offset: int) -> None:
        """Commit an offset of the group at the source."""
        self.source.groups.offsets["g"] = {self.pair.partition: Committed(offset, "")}

    def link(self) -> Link:
        """Open a link in a process of its own."""
        process = Process(self._world, "p")
        source = cast("Any", SourceView(process))
        target = cast("Any", TargetView(process, self.target, grants=False))
        return Link(link_spec(commits=False, interval_ms=1), source, target, self.schedule)

    def records(self) -> list[Record]:
        """Return the records of the checkpoints topic."""
        batches = [entry.data for entry in self.target.logs[CHECKPOINTS].entries]
        data = b"".join(one for one in batches if not parse_header(one, 0).is_control)
        return decode_reference(data)

    def checkpoints(self) -> list[tuple[int, int]]:
        """Return the offsets of all checkpoints, at the source and at the target."""
        found = [decode_checkpoint(one.key, one.value) for one in self.records()]
        return [(one.upstream, one.downstream) for one in found]

    def sync(self, *pairs: tuple[int, int]) -> None:
        """Write offset syncs."""
        for pair in pairs:
            self.pair.write_sync(pair)

    def replicate(self, *records: int) -> None:
        """Set the replica's records by their offsets at the source; -1 is an offset gap."""
        self.pair.replica = list(records)
        self.target.logs[self.pair.copy.topic].end = len(records)


@pytest.fixture
def run() -> Iterator[Callable[[Callable[[Clusters], None]], None]]:
    """Run a function as an actor of a simulation."""

    def in_simulation(act: Callable[[Clusters], None]) -> None:
        clusters = Clusters()
        with driven(clusters.schedule, Chooser(1)):
            clusters.schedule.add("test", lambda: act(clusters))
            clusters.schedule.run()

    return in_simulation


def test_a_group_that_stands_still_becomes_exact_when_its_sync_comes(run):
    def act(clusters: Clusters) -> None:
        clusters.replicate(*range(10))
        clusters.sync((0, 0))
        clusters.commit(9)
        link = clusters.link()
        assert link.round().inexact == 1
        clusters.sync((8, 8))
        assert link.round().inexact == 0
        assert clusters.checkpoints() == [(9, 1), (9, 9)]
        link.round()
        assert clusters.checkpoints() == [(9, 1), (9, 9)]

    run(act)


def test_a_sync_that_came_with_a_failed_round_is_not_lost(run, monkeypatch):
    def act(clusters: Clusters) -> None:
        clusters.replicate(*range(10))
        clusters.sync((0, 0))
        clusters.commit(9)
        link = clusters.link()
        for _ in range(2):  # it reads what it has written
            link.round()
        clusters.sync((8, 8))
        with monkeypatch.context() as broken:
            broken.setattr(TargetView, "log_ends", lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                link.round()
        link.round()
        assert clusters.checkpoints()[-1] == (9, 9)

    run(act)


def test_a_checkpoints_topic_that_was_created_again_is_filled_again(run):
    """Also if it is shorter than before, and if it has grown beyond that."""

    def act(clusters: Clusters) -> None:
        clusters.replicate(*range(10))
        clusters.sync((9, 9))
        clusters.commit(9)
        link = clusters.link()
        for _ in range(3):
            link.round()
            clusters.target.replace(CHECKPOINTS)
            with pytest.raises(PositionError, match="deleted"):
                link.round()
            link.round()
            assert clusters.checkpoints() == [(9, 9)]
        [record] = clusters.records()
        clusters.target.replace(CHECKPOINTS)
        for _ in range(30):
            clusters.target.append(CHECKPOINTS, encode_reference([record], leader_epoch=-1))
        with pytest.raises(PositionError, match="recreated"):
            link.round()
        link.round()

    run(act)


def test_a_checkpoint_names_the_topic_that_it_is_about_and_a_restart_knows_it(run):
    def act(clusters: Clusters) -> None:
        clusters.replicate(-1, -1, -1, *range(10))
        clusters.sync((0, 3), (8, 11))
        clusters.commit(8)
        clusters.link().round()
        [record] = clusters.records()
        topic_id = clusters.target.ids[clusters.pair.copy.topic]
        assert record.headers == ((b"logmirror.topic-id", topic_id),)

        clusters.pair.create()
        clusters.replicate(*range(20))  # it reaches the old checkpoint, which skips three records
        clusters.sync((0, 0), (8, 8))
        clusters.link().round()
        assert clusters.checkpoints() == [(8, 11), (8, 8)]

    run(act)


def test_syncs_of_a_replica_that_was_created_again_are_not_used(run):
    """Its first sync was removed with its topic, so that nothing ends the old ones."""

    def act(clusters: Clusters) -> None:
        clusters.replicate(-1, -1, -1, *range(10))
        clusters.sync((0, 3), (8, 11))
        link = clusters.link()
        clusters.commit(8)
        link.round()

        clusters.pair.create()
        clusters.replicate(*range(20))
        clusters.source.replace(SYNCS)
        clusters.sync((15, 15))
        link.round()
        assert clusters.checkpoints() == [(8, 11), (8, 0)]

    run(act)


def test_syncs_that_were_read_before_a_replica_was_created_are_not_about_it(run):
    """Not even if the process had no group of its topic, and so no need of its log."""

    def act(clusters: Clusters) -> None:
        clusters.replicate(-1, -1, -1, *range(10))
        clusters.sync((0, 3), (8, 11))
        link = clusters.link()
        link.round()

        clusters.pair.create()
        clusters.replicate(*range(20))
        clusters.source.replace(SYNCS)
        clusters.sync((15, 15))
        clusters.commit(8)
        link.round()
        assert clusters.checkpoints() == [(8, 0)]

    run(act)


def test_without_syncs_not_even_a_rewind_is_translated(run):
    def act(clusters: Clusters) -> None:
        clusters.replicate(*range(20))
        clusters.sync((0, 0), (8, 8))
        clusters.commit(8)
        clusters.link().round()

        clusters.source.replace(SYNCS)
        clusters.commit(3)
        link = clusters.link()
        link.round()
        assert clusters.checkpoints() == [(8, 8)]
        clusters.sync((15, 15))
        link.round()
        assert clusters.checkpoints() == [(8, 8), (3, 0)]

    run(act)

"""Goal: no consumer group skips a record of a replica, and no checkpoint goes back, under faults.

Method: simulated runs with random faults, judged by a judge that knows which record is which. Then
one rule of the product is removed at a time, and a few seeds must show an anomaly. A failure names
its seed: `simulate_groups(SEED, steps=print)` repeats the run and prints each step.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest

from kit.tiers import PLANTED, sized
from logmirror.failpoints import GROUP_POINTS
from logmirror.groups import link, replica_logs, target_sync
from logmirror.groups.checkpoint_topics import CheckpointTopics
from logmirror.groups.emission import LastCheckpoints
from logmirror.groups.link import Link
from logmirror.groups.link_spec import LinkSpec
from logmirror.groups.offset_syncs import SyncIndex
from logmirror.groups.translation import Translated
from logmirror.simulation.groups import FAULTS, simulate_groups

FEW = 20
_LIBC = ctypes.CDLL(None)
PAGE = Path(__file__).parents[2] / "docs" / "torture.md"
SEEDS = sized(40, 1_000, 10_000)
FOUND_WITHIN = 150
"""The most seeds in which a removed rule must show an anomaly."""


def test_the_same_seed_takes_the_same_steps():
    steps: list[str] = []
    first, second, third = (
        simulate_groups(3, steps=steps.append),
        simulate_groups(3),
        simulate_groups(4),
    )
    assert first == second
    assert first.trace != third.trace
    assert steps[-len(first.last_steps) :] == list(first.last_steps)


def judged(seeds):
    found = [simulate_groups(seed) for seed in seeds]
    assert [(f"simulate_groups({r.seed})", r.anomalies) for r in found if r.anomalies] == []
    return found


def test_a_few_seeds_show_no_anomaly_and_do_something():
    found = judged(range(FEW))
    assert sum(result.checkpoints for result in found) > 10 * FEW
    assert sum(result.commits for result in found) > FEW
    assert sum(result.rewinds for result in found) > FEW
    assert {point for r in found for point in r.points} >= set(GROUP_POINTS)


@pytest.mark.thinned
@pytest.mark.timeout(7200)  # at night
def test_no_seed_shows_an_anomaly():
    happened: set[str] = set()
    for start in range(FEW, FEW + SEEDS, FEW):  # the results of all seeds take gigabytes
        for result in judged(range(start, start + FEW)):
            happened |= set(result.happened)
        _LIBC.malloc_trim(0)  # glibc keeps 2 MB of each seed otherwise
    assert happened >= set(FAULTS)


def test_the_page_names_all_faults():
    text = PAGE.read_text()
    assert [fault for fault in FAULTS if f"`{fault}`" not in text] == []


# -- removed rules ---------------------------------------------------------------------------------


def _one_offset_too_far(monkeypatch):
    """At the offset of a sync, its record was not read yet."""

    def translated(offset, copy, syncs):
        return real(offset + 1, copy, syncs)

    real = replica_logs.translated
    monkeypatch.setattr(replica_logs, "translated", translated)


def _offsets_between_syncs_are_counted(monkeypatch):
    """As if there were no offset gaps."""

    def translated(offset, copy, syncs):
        found = real(offset, copy, syncs)
        if found.reason or found.read_again_from >= offset:
            return found
        ahead = offset - found.read_again_from
        return found._replace(offset=min(found.offset + ahead, copy.end))

    real = replica_logs.translated
    monkeypatch.setattr(replica_logs, "translated", translated)


def _nothing_is_read_at_the_start(monkeypatch):
    def skip(self):
        self._next = self._offset_at(-1)
        self._topic_id = self._client.topic(self._where.topic).topic_id

    monkeypatch.setattr(CheckpointTopics, "_read_all", skip)


def _remembered_before_it_is_written(monkeypatch):
    """As MirrorMaker does; and a failed write does not end what is remembered."""

    def write(self, checkpoints, topic_ids):
        self.last.remember(checkpoints, topic_ids)
        real(self, checkpoints, topic_ids)

    def read_all(self):
        self.last = before.setdefault(self._clock, self.last)
        read(self)
        before[self._clock] = self.last

    real, read, before = CheckpointTopics.write, CheckpointTopics._read_all, {}  # noqa: SLF001  # the rule that is broken
    monkeypatch.setattr(CheckpointTopics, "write", write)
    monkeypatch.setattr(CheckpointTopics, "_read_all", read_all)


def _syncs_are_read_after_the_logs(monkeypatch):
    """And a pair beyond the log is not noticed."""

    def read_logs(self, changed):
        found = real(self, changed)
        return self._syncs.refresh() | found

    def translated(offset, copy, syncs):
        return translate(offset, copy._replace(end=1 << 60), syncs)

    real, translate = Link._read_logs, replica_logs.translated  # noqa: SLF001  # the same
    monkeypatch.setattr(Link, "_read_logs", read_logs)
    monkeypatch.setattr(replica_logs, "translated", translated)


def _commits_without_a_comparison(monkeypatch):
    def due(wanted, _current):
        return dict(wanted)

    monkeypatch.setattr(target_sync, "commits_due", due)


def _no_process_is_fenced(monkeypatch):
    """Each process has a transactional ID of its own."""
    numbers = iter(range(1_000_000))
    monkeypatch.setattr(LinkSpec, "transactional_id", property(lambda _: f"own-{next(numbers)}"))


def _rewinds_are_not_followed(monkeypatch):
    def is_due(position, last):
        return last is None or position.downstream > last.downstream

    monkeypatch.setattr("logmirror.groups.emission._is_due", is_due)


def _the_last_checkpoint_counts_beyond_the_log(monkeypatch):
    def best(self, group, partition, position):
        last = self._last.get(group, {}).get(partition)
        return max(position.downstream, last.downstream if last else 0)

    monkeypatch.setattr(LastCheckpoints, "best", best)


def _every_translation_is_written(monkeypatch):
    monkeypatch.setattr("logmirror.groups.emission._is_due", lambda *_: True)


def _the_replica_end_is_ignored(monkeypatch):
    monkeypatch.setattr(replica_logs, "preserved", lambda offset, _copy: Translated(offset, offset))


def _aborted_checkpoints_are_not_repeated(monkeypatch):
    def remember(self, checkpoints, topic_ids, *, are_aborted=False):
        real(self, checkpoints, topic_ids)

    real = LastCheckpoints.remember
    monkeypatch.setattr(LastCheckpoints, "remember", remember)


def _what_was_read_again_stays_inexact(monkeypatch):
    """Only a translation with a reason is made again when there are new syncs."""

    def translate(replica, offset, *more):
        found = real(replica, offset, *more)
        return found if found.reason else Translated(found.offset, offset)

    real = link.translation
    monkeypatch.setattr(link, "translation", translate)


def _checkpoints_of_a_lost_replica_count(monkeypatch):
    def last(self, group, partition, _position):
        return self._last.get(group, {}).get(partition)

    monkeypatch.setattr(LastCheckpoints, "forget", lambda *_: None)
    monkeypatch.setattr(LastCheckpoints, "_of", last)


def _committed_offsets_are_no_lower_bound(monkeypatch):
    monkeypatch.setattr(LastCheckpoints, "restore", lambda *_: None)


def _later_pairs_end_nothing(monkeypatch):
    def all_pairs(self, pairs, topic_id=None):
        self.topic_id = topic_id
        order = pairs[:, 0].argsort(kind="stable")
        self._upstream, self._downstream = pairs[order, 0], pairs[order, 1]

    monkeypatch.setattr(SyncIndex, "__init__", all_pairs)


def _a_deleted_topic_is_not_read_again(monkeypatch):
    def follow(self):
        if self.unreadable is not None:
            return False
        first = self._next
        return self._read_to(self._offset_at(-1)) and self._next > first

    monkeypatch.setattr(CheckpointTopics, "follow", follow)


BROKEN = {
    "one offset too far": (_one_offset_too_far, FAULTS),
    "offsets between syncs are counted": (
        _offsets_between_syncs_are_counted,
        ("source compacted", "source-down"),
    ),
    "nothing is read at the start": (_nothing_is_read_at_the_start, ("kill", "syncs compacted")),
    "remembered before it is written": (_remembered_before_it_is_written, FAULTS),
    "syncs are read after the logs": (_syncs_are_read_after_the_logs, ("replica recreated",)),
    "commits without a comparison": (_commits_without_a_comparison, FAULTS),
    "no process is fenced": (_no_process_is_fenced, ("pause",)),
    "rewinds are not followed": (_rewinds_are_not_followed, FAULTS),
    "the last checkpoint counts beyond the log": (
        _the_last_checkpoint_counts_beyond_the_log,
        ("replica truncated",),
    ),
    "every translation is written": (_every_translation_is_written, ("kill", "syncs compacted")),
    "the replica's end is ignored": (_the_replica_end_is_ignored, FAULTS),
    "aborted checkpoints are not repeated": (
        _aborted_checkpoints_are_not_repeated,
        ("kill", "lost-answer", "checkpoints compacted"),
    ),
    "what was read again stays inexact": (_what_was_read_again_stays_inexact, ("source-down",)),
    "checkpoints of a lost replica count": (
        _checkpoints_of_a_lost_replica_count,
        ("replica recreated", "source compacted", "down", "kill"),
    ),
    "committed offsets are no lower bound": (
        _committed_offsets_are_no_lower_bound,
        ("checkpoints unreadable", "kill", "syncs deleted", "syncs compacted"),
    ),
    "later pairs end nothing": (_later_pairs_end_nothing, ("replica recreated",)),
    "a deleted topic is not read again": (
        _a_deleted_topic_is_not_read_again,
        ("checkpoints recreated",),
    ),
}


@PLANTED
@pytest.mark.timeout(1200)  # 150 seeds on a busy machine
@pytest.mark.parametrize("rule", BROKEN)
def test_a_removed_rule_causes_an_anomaly(rule, monkeypatch):
    broken, faults = BROKEN[rule]
    broken(monkeypatch)
    for seed in range(FOUND_WITHIN):
        if simulate_groups(seed, faults=faults).anomalies:
            return
    pytest.fail("no run had an anomaly")

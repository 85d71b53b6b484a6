"""Progress of plans for groups: every step is counted, and their number is known at the first."""

from __future__ import annotations

import pytest

import logmirror
from kit.runs.group_links import commit_offsets, link_world
from kit.servers.embedded import EmbeddedBroker


@pytest.fixture
def world(tmp_path, topic_name):
    with EmbeddedBroker(tmp_path / "source") as source, EmbeddedBroker(tmp_path / "target") as to:
        yield link_world(source.bootstrap, to.bootstrap, topic_name, offsets="preserve")


def test_each_group_is_a_step_at_the_source_and_one_for_each_destination(world):
    for name in ("a", "b", "c"):
        commit_offsets(world.source, world.group(name), world.topic, {0: 10})
    planned, applied, rolled_back = [], [], []

    plans = logmirror.plan_groups(world.settings, on_progress=lambda *at: planned.append(at))
    logmirror.apply_groups(world.settings, plans, on_progress=lambda *at: applied.append(at))
    logmirror.rollback_groups(world.settings, plans, on_progress=lambda *at: rolled_back.append(at))

    assert planned == [(done, 6) for done in range(1, 7)]
    assert applied == rolled_back == [(1, 3), (2, 3), (3, 3)]

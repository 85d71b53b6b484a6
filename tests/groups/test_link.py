"""Goal: what a link reports of its groups is what happened to them.

Method: librdkafka commits at an embedded broker, offset syncs are written by hand, and a link
translates for another embedded broker.
"""

from __future__ import annotations

import contextlib
import re
from dataclasses import replace
from pathlib import Path

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition

from kit.fakes.scripted import SteppingClock
from kit.runs.commands import wait_until
from kit.runs.group_links import SYNCS, commit_offsets, committed_offset, link_world, linked
from kit.servers.machine import free_ports
from logmirror.app.components import Clients
from logmirror.clock import SYSTEM_CLOCK
from logmirror.errors import UnavailableError
from logmirror.groups.checkpoint_topics import CheckpointTopics
from logmirror.groups.link import PENDING_MS, Link
from logmirror.groups.service import GroupService
from logmirror.groups.translation import CAUSES
from logmirror.monitoring import metrics
from logmirror.monitoring.metrics import Recorder


@pytest.fixture
def world(servers, topic_name):
    return link_world(*servers, topic_name, **{"sync-group-offsets": True})


def test_a_group_that_is_ahead_of_the_syncs_becomes_exact_when_they_come(world):
    commit_offsets(world.source, world.group("idle"), world.topic, {0: 100})
    world.sync((0, 0), (40, 40))
    with linked(world) as link:
        done = link.round()
        assert (done.inexact, done.inexact_offsets, dict(done.causes)) == (
            1,
            1,
            {"between-syncs": 1},
        )
        world.sync((99, 99), (100, 100))  # the mirror has copied on; the group did not move

        done = link.round()

    assert (done.inexact, done.inexact_offsets, dict(done.causes)) == (0, 0, {})
    assert [one.downstream for one in world.checkpoints()] == [41, 100]
    assert committed_offset(world.target, world.group("idle"), world.replica) == 100


def test_groups_are_counted_by_reason(world):
    world.sync((10, 10), (50, 50))
    for name, offset in (("exact", 50), ("early", 5), ("between", 30), ("ahead", 10)):
        commit_offsets(world.source, world.group(name), world.topic, {0: offset})
    commit_offsets(world.target, world.group("ahead"), world.replica, {0: 20})

    world.service.run_once()

    assert world.reasons() == {"before-syncs": 1, "between-syncs": 1, "ahead-at-target": 1}
    assert world.number(metrics.GROUPS) == 4
    assert world.number(metrics.GROUPS_INEXACT) == 2
    assert world.number(metrics.OFFSETS_INEXACT) == 2
    assert committed_offset(world.target, world.group("ahead"), world.replica) == 20
    [(_, delays)] = world.recorder.distributions(metrics.CHECKPOINT_DELAY)
    [(_, rounds)] = world.recorder.distributions(metrics.ROUND_DURATION)
    assert sum(delays.counts) == sum(rounds.counts) == 1
    assert 0 < delays.total <= rounds.total
    labels = {labels[2] for labels, _ in world.recorder.numbers(metrics.GROUPS_BY_REASON)}
    assert labels >= {*CAUSES, "unreadable", "refused", "active-at-target"}  # also those of 0
    page = (Path(__file__).parents[2] / "docs" / "monitoring.md").read_text()
    assert labels <= set(re.findall(r"^\| `([a-z-]+)` \|", page, re.MULTILINE))


def test_the_delay_of_a_checkpoint_begins_when_its_commit_is_seen(world, monkeypatch):
    commit_offsets(world.source, world.group("late"), world.topic, {0: 10})
    world.sync((10, 10))
    clock = SteppingClock()
    with linked(world, clock) as link:
        with monkeypatch.context() as failing:
            failing.setattr(CheckpointTopics, "write", _refuse)
            for _ in range(2):
                with pytest.raises(UnavailableError):
                    link.round()
                clock.sleep_ms(5_000)

        assert link.round().delay_ms == 10_000
        assert link.round().delay_ms is None
        clock.sleep_ms(5_000)
        commit_offsets(world.source, world.group("late"), world.topic, {0: 20})
        assert link.round().delay_ms == 0


def test_without_any_success_the_age_of_the_checkpoints_grows(servers, topic_name):
    [port] = free_ports(1)
    made = link_world(*servers, topic_name)
    nowhere = replace(made.spec.target, bootstrap_servers=(("127.0.0.1", port),))
    recorder, clock = Recorder(), SteppingClock()
    service = GroupService([replace(made.spec, target=nowhere)], _open_link, clock, recorder)

    with service.running():
        wait_until(
            lambda: recorder.distributions(metrics.CHECKPOINT_DELAY),
            what=lambda: "a link",
            timeout_s=60,
        )

    [(_, age)] = recorder.numbers(metrics.ROUND_SECONDS, clock.now_ms() / 1000 + 400)
    assert age >= 400
    assert not recorder.numbers(metrics.GROUPS)
    [(_, delays)] = recorder.distributions(metrics.CHECKPOINT_DELAY)
    assert sum(delays.counts) == 0


def test_a_group_is_unreadable_if_a_transaction_with_its_offsets_stays_open(world, caplog):
    group, clock = world.group("open"), SteppingClock()
    world.sync((10, 10))
    commit_offsets(world.source, group, world.topic, {0: 10})
    with linked(world, clock) as link:
        assert link.round().failed == {}
        with _open_transaction(world, group):
            assert link.round().failed == {}, "usual"
            clock.sleep_ms(PENDING_MS)
            assert list(link.round().failed) == [group]
        assert link.round().failed == {}
        with _open_transaction(world, group):
            assert link.round().failed == {}, "another one"
            world.service.run_once()  # its only round
    assert world.reasons() == {"unreadable": 1}
    (line,) = [one.facts for one in caplog.records if "groups not read" in one.message]
    assert list(line["reasons"]) == [group]


def test_open_transactions_of_other_topics_do_not_count(world):
    with _open_transaction(world, world.group("open"), SYNCS), linked(world) as link:
        assert link.round().failed == {}


@contextlib.contextmanager
def _open_transaction(world, group, topic=None):
    consumer = Consumer({"bootstrap.servers": world.source, "group.id": group, "log_level": 0})
    producer = Producer({"bootstrap.servers": world.source, "transactional.id": group})
    producer.init_transactions(60)
    producer.begin_transaction()
    offsets = [TopicPartition(topic or world.topic, 0, 70)]
    producer.send_offsets_to_transaction(offsets, consumer.consumer_group_metadata(), 60)
    yield
    producer.abort_transaction(60)
    consumer.close()


@contextlib.contextmanager
def _open_link(spec):
    clients = Clients(100)
    yield Link(spec, clients(spec.source), clients(spec.target), SYSTEM_CLOCK)
    clients.close()


def _refuse(*_):
    raise UnavailableError("the target does not respond")

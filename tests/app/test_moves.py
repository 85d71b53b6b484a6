"""Moves as the commands see them: rates, ends, deadlines, plans of several brokers.

Method: log directories that a test sets, and a clock that moves only when something sleeps.
"""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import typer

from logmirror.app.moves import Moves
from logmirror.cli import moves as command
from logmirror.clock import Clock
from logmirror.cluster.log_dirs import LogDir, Replica
from logmirror.errors import UnavailableError, UsageError
from logmirror.model import TopicPartition
from logmirror.move_reports import MovedReplica

GIB = 1 << 30
A0, A1, A2 = (TopicPartition("a", number) for number in range(3))


class Stopped(Clock):
    def __init__(self):
        self.passed_ms = 0

    def now_ms(self):
        return 1_796_000_000_000 + self.passed_ms

    def monotonic_ms(self):
        return self.passed_ms

    def sleep_ms(self, duration_ms):
        self.passed_ms += duration_ms


class Dirs:
    """As `cluster.log_dirs.LogDirs`: it shows `states` one after the other, then the last one."""

    def __init__(self, *states, assigned=None):
        self.states, self.assigned = list(states), assigned or {}
        self.requests = []

    def describe(self, nodes=(), partitions=None):
        found = self.states.pop(0) if len(self.states) > 1 else self.states[0]
        return [one for one in found if not nodes or one.node in nodes]

    def nodes(self):
        return sorted({one.node for one in self.states[0]})

    def assignments(self, topics):
        return {key: nodes for key, nodes in self.assigned.items() if key.topic in topics}

    def move(self, node, targets):
        self.requests.append((node, dict(targets)))
        return {key: "KAFKA_STORAGE_ERROR" if key == A2 else "" for key in targets}


def of(*states, **more):
    dirs = Dirs(*states, **more)
    client = SimpleNamespace(log_dirs=dirs, close=lambda: None)
    return Moves(client, Stopped()), dirs


def log_dir(path, node=1, *, error="", free=None, cordoned=False, **replicas):
    """Replicas by name: a0=(size,), or a0=(size, lag) for a copy."""
    found = {
        TopicPartition(name[0], int(name[1:])): Replica(
            given[0], given[1] if len(given) > 1 else 0, len(given) > 1
        )
        for name, given in replicas.items()
    }
    return LogDir(node, path, error, found, free, cordoned)


def state(copied, lag=7):
    return [log_dir("/x", a0=(1000,), a1=(5,)), log_dir("/y", a0=(copied, lag))]


DONE = [log_dir("/x", a1=(5,)), log_dir("/y", a0=(1000,))]


@pytest.mark.move("E99")
def test_a_rate_is_that_of_two_samples():
    moves, _ = of(state(100), state(300))
    [one] = moves.sampled()
    assert (one.source, one.target, one.replica) == ("/x", "/y", MovedReplica("a", 0, 1))
    assert (one.copied_bytes, one.total_bytes, one.offset_lag) == (300, 1000, 7)
    assert (one.bytes_per_second, one.eta_s, one.fraction) == (200, 3.5, 0.3)

    moves, _ = of(state(100))
    [one] = moves.sampled()
    assert (one.bytes_per_second, one.eta_s) == (0, None)
    assert of(DONE)[0].sampled() == []


def test_a_move_is_watched_to_its_end():
    moves, _ = of(state(100), state(900), DONE)
    found = list(moves.watch(timeout_s=60))
    assert [[one.copied_bytes for one in sample.moves] for sample in found] == [[100], [900], []]
    assert found[-1].ended == ((MovedReplica("a", 0, 1), "/y"),)


def test_what_ended_before_the_first_sample_is_reported_too():
    moves, _ = of(DONE)
    wanted = [MovedReplica("a", 0, 1), MovedReplica("gone", 0, 1)]
    [sample] = moves.watch(wanted, timeout_s=60)
    assert sample.ended == ((wanted[0], "/y"), (wanted[1], ""))


def test_every_wait_ends():
    moves, _ = of(*(state(number) for number in range(100)))
    with pytest.raises(UnavailableError, match="not complete in time") as late:
        list(moves.watch(timeout_s=20))
    assert late.value.facts == {"timeout_s": 20, "moves": "a-0"}

    moves, _ = of(*(state(number) for number in range(100)))
    with pytest.raises(UnavailableError, match="no move has made progress"):
        list(moves.watch(timeout_s=86_400))
    assert moves._clock.passed_ms == 399_000  # noqa: SLF001  # the time until then


def test_a_plan_is_prepared_with_what_there_is():
    dirs = [
        log_dir("/x", 1, a0=(9,), a2=(1,)),
        log_dir("/y", 1, a0=(3, 2), a1=(4,)),
        log_dir("/z", 2, a1=(4,)),
    ]
    assigned = {A0: (1,), A1: (2, 1), A2: (1,)}
    moves, _ = of(dirs, assigned=assigned)

    def plan(*entries):
        names = ("topic", "partition", "replicas", "log_dirs")
        return json.dumps({"partitions": [dict(zip(names, one, strict=True)) for one in entries]})

    found = moves.prepare(
        plan(
            ("a", 0, [1], ["/x"]),
            ("a", 1, [1, 2], ["/x", "any"]),
            ("a", 2, [1], ["/x"]),
            ("b", 0, [1], ["/x"]),
        )
    )
    # a-0 is cancelled, a-2 is there, b-0 does not exist.
    assert found.targets == {MovedReplica("a", 0, 1): "/x", MovedReplica("a", 1, 1): "/x"}
    assert [(str(one.replica), one.error) for one in found.refused] == [
        ("b-0", "REPLICA_NOT_AVAILABLE")
    ]
    assert json.loads(found.rollback)["partitions"] == [
        {"topic": "a", "partition": 0, "replicas": [1], "log_dirs": ["/x"]},
        {"topic": "a", "partition": 1, "replicas": [2, 1], "log_dirs": ["any", "/y"]},
    ]

    with pytest.raises(UsageError, match="other replicas than the cluster"):
        moves.prepare(plan(("a", 1, [1], ["/x"])))
    with pytest.raises(UsageError, match="no such log directory") as unknown:
        moves.prepare(plan(("a", 0, [1], ["/z"])))
    assert unknown.value.facts["log_dirs"] == ["/x", "/y"]
    with pytest.raises(UnavailableError, match="not in the cluster"):
        moves.prepare(plan(("b", 0, [7], ["/x"])))
    hidden, _ = of(dirs)
    found = hidden.prepare(plan(("a", 0, [1], ["/y"])))
    assert (found.targets, len(found.refused)) == ({}, 1)  # a rollback could not have it
    nothing = moves.prepare(plan(("a", 0, [1], ["any"])))
    assert (nothing.targets, nothing.refused) == ({}, [])


def test_requests_are_made_in_groups_and_by_broker():
    moves, dirs = of([log_dir("/x", 1), log_dir("/x", 2)])
    targets = {MovedReplica("a", number, 1): "/y" for number in range(450)}
    targets[MovedReplica("a", 0, 2)] = "/y"

    outcomes = moves.request(targets)

    assert [(node, len(some)) for node, some in dirs.requests] == [
        (1, 200),
        (1, 200),
        (1, 50),
        (2, 1),
    ]
    [refused] = [one for one in outcomes if one.error]
    assert (refused.replica, refused.error) == (MovedReplica("a", 2, 1), "KAFKA_STORAGE_ERROR")
    assert "is offline" in refused.hint


def test_moves_are_found_by_topic_and_by_partition():
    moves, _ = of(
        [log_dir("/x", a0=(9,), a1=(9,), b0=(9,)), log_dir("/y", a0=(1, 2), a1=(1, 2), b0=(1, 2))]
    )

    def named(*names):
        found, still = moves.in_progress(names)
        return [str(one.replica) for one in found], still

    assert named() == (["a-0", "a-1", "b-0"], [])
    assert named("a") == (["a-0", "a-1"], [])
    assert named("a:1", "b", "c", "a:2") == (["a-1", "b-0"], ["c", "a:2"])
    for name in ("a:", ":1", "a:x", "a:-1"):
        with pytest.raises(UsageError, match="not a topic or a partition"):
            moves.in_progress([name])


def test_a_plan_balances_each_broker_and_leaves_out_what_cannot_be_moved():
    moves, _ = of(
        [
            log_dir("/x", 1, a0=(4 * GIB,), a1=(4 * GIB,), a2=(2 * GIB,)),
            log_dir("/y", 1, a2=(GIB, 5)),
            log_dir("/off", 1, error="KAFKA_STORAGE_ERROR"),
            log_dir("s3://bucket/x", 1, b0=(9 * GIB,)),
            log_dir("/x", 2, a0=(4 * GIB,)),
        ],
        assigned={A0: (1, 2), A1: (2, 1), A2: (1,)},
    )
    plan = moves.plan()

    [one] = plan.moves
    assert (str(one.replica), one.replica.broker) == ("a-0", 1)
    assert (one.source, one.target) == ("/x", "/y")
    # The move of a-2 counts as complete.
    assert [(row.log_dir, row.before_bytes, row.after_bytes) for row in plan.log_dirs] == [
        ("/x", 8 * GIB, 4 * GIB),
        ("/y", 2 * GIB, 6 * GIB),
    ]
    assert json.loads(plan.text)["partitions"] == [
        {"topic": "a", "partition": 0, "replicas": [1, 2], "log_dirs": ["/y", "any"]}
    ]


def test_a_plan_moves_nothing_to_a_cordoned_directory():
    full = log_dir("/x", a0=(4 * GIB,), a1=(4 * GIB,), a2=(4 * GIB,))
    moves, _ = of([full, log_dir("/y", cordoned=True)], assigned={A0: (1,)})
    assert moves.plan().moves == ()
    moves, _ = of([full, log_dir("/y", cordoned=True), log_dir("/z")], assigned={A0: (1,)})
    assert [(one.source, one.target) for one in moves.plan().moves] == [("/x", "/z")]
    emptied = full._replace(is_cordoned=True)
    moves, _ = of([emptied, log_dir("/y")], assigned={A0: (1,)})
    assert [(one.source, one.target) for one in moves.plan().moves] == [("/x", "/y")]


def test_a_plan_leaves_space_for_the_moves_in_progress():
    full = log_dir("/x", a0=(2 * GIB,), a1=(6 * GIB,), a2=(4 * GIB,))
    for free, expected in ((5 * GIB, []), (6 * GIB, ["a-0"])):
        moves, _ = of([full, log_dir("/y", free=free, a2=(0, 9))], assigned={A0: (1,)})
        assert [str(one.replica) for one in moves.plan().moves] == expected


def test_a_broker_with_one_log_directory_has_nothing_to_balance():
    moves, _ = of([log_dir("s3://bucket/x", 1, a0=(9,)), log_dir("/y", 1)])
    with pytest.raises(UsageError, match="two log directories"):
        moves.plan()


def test_a_plan_is_not_written_without_a_topic_that_is_hidden():
    moves, _ = of([log_dir("/x", a0=(9,), a1=(9,)), log_dir("/y")])
    with pytest.raises(UsageError, match="cannot be read") as refused:
        moves.plan()
    assert refused.value.facts == {"topics": ["a"]}


def test_balanced_directories_have_no_plan():
    plan = of([log_dir("/x", a0=(9,)), log_dir("/y", a1=(9,))])[0].plan()
    assert (plan.moves, plan.text) == ((), "")


def test_a_rollback_gets_a_name_that_is_free(tmp_path):
    moves, _ = of(DONE)
    files = [
        moves.write_rollback(text, path=None, beside=tmp_path / "plan.json") for text in ("1", "2")
    ]
    assert [file.read_text() for file in files] == ["1", "2"]
    assert [file.name for file in files] == [
        "rollback-20261130T005320Z.json",
        "rollback-20261130T005320Z-2.json",
    ]
    with pytest.raises(UsageError, match="exists"):
        moves.write_rollback("3", path=files[0], beside=tmp_path)
    assert files[0].read_text() == "1"


def test_a_plan_of_which_no_move_begins_leaves_no_rollback(tmp_path, monkeypatch, capsys):
    plan = tmp_path / "plan.json"
    entry = {"topic": "a", "partition": 2, "replicas": [1], "log_dirs": ["/y"]}
    plan.write_text(json.dumps({"version": 1, "partitions": [entry]}))
    moves, dirs = of([log_dir("/x", a2=(9,)), log_dir("/y")], assigned={A2: (1,)})
    monkeypatch.setattr(command, "open_moves", lambda *_: moves)
    with pytest.raises(typer.Exit):
        command.moves_start(plan, bootstrap="b:1")
    assert dirs.requests == [(1, {A2: "/y"})]
    assert list(tmp_path.iterdir()) == [plan]
    assert "no move was begun: the rollback plan is removed" in capsys.readouterr().out

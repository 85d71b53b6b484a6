"""`logmirror moves`: lists, begins, undoes, cancels and plans moves, also on Apache Kafka.

Method: the command line as users run it. A limit of one byte per second holds a move; where the
partitions are is read by a client that shares no code with the product.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import (
    AclBinding,
    AclOperation,
    AclPermissionType,
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    NewTopic,
    ResourcePatternType,
    ResourceType,
)

from broker.moves.test_requests import fill
from kit.judges.log_dirs_client import LogDirsClient
from kit.runs.commands import logmirror, wait_until
from kit.servers.embedded import EmbeddedBroker
from kit.servers.kafka import ApacheKafka, create_topic
from logmirror.broker.dynamic_configs import MOVE_RATE
from logmirror.broker.security.users import put_user

if TYPE_CHECKING:
    from pathlib import Path

    from broker.moves.conftest import TwoDirs

RECORD = b"x" * 10_000


def moves(dirs, *arguments, code=0):
    """Run a command; returns stdout and stderr."""
    done = logmirror("moves", *arguments, "--bootstrap", dirs.bootstrap)
    assert done.returncode == code, f"{done.stdout}\n{done.stderr}"
    return done.stdout, done.stderr


def listed(dirs):
    return json.loads(moves(dirs, "list", "--format", "json")[0])


def write_plan(path: Path, *wanted: tuple[str, int, object]) -> Path:
    partitions = [
        {"topic": topic, "partition": number, "replicas": [1], "log_dirs": [str(target)]}
        for topic, number, target in wanted
    ]
    path.write_text(json.dumps({"version": 1, "partitions": partitions}))
    return path


def places(dirs: TwoDirs, topic: str, count: int) -> list[list[str]]:
    with dirs.client() as client:
        return [[*client.where(topic, number)] for number in range(count)]


def test_moves_are_begun_listed_and_cancelled(dirs, tmp_path):
    dirs.create("t", 2)
    fill(dirs, "t")
    assert moves(dirs, "list") == ("no partition moves\n", "")
    assert listed(dirs) == []
    plan = write_plan(tmp_path / "plan.json", ("t", 0, dirs.b))

    dirs.limit(1)
    out, _ = moves(dirs, "start", plan)
    [rollback] = tmp_path.glob("rollback-*.json")
    assert out.splitlines() == [f"rollback plan: {rollback}", "1 of 1 moves begun"]
    assert json.loads(rollback.read_text()) == {
        "version": 1,
        "partitions": [{"topic": "t", "partition": 0, "replicas": [1], "log_dirs": [str(dirs.a)]}],
    }

    [one] = listed(dirs)
    expected = {"topic": "t", "partition": 0, "broker": 1, "from": str(dirs.a), "to": str(dirs.b)}
    assert one.items() >= expected.items()
    assert one["copied_bytes"] < one["total_bytes"]
    assert one["offset_lag"] > 0
    table = moves(dirs, "list")[0].splitlines()
    assert table[0].split()[:3] == ["PARTITION", "FROM", "TO"]
    assert table[1].split()[:3] == ["t-0", str(dirs.a), str(dirs.b)]

    out, said = moves(dirs, "cancel", code=2)
    assert "t-0" in out
    assert "add --all" in said
    assert moves(dirs, "cancel", "t:1")[0] == "t:1 does not move\n"
    assert len(listed(dirs)) == 1
    kept = f"t-0: the move is cancelled; it stays in {dirs.a}\n"
    assert moves(dirs, "cancel", plan)[0] == kept
    assert listed(dirs) == []
    assert moves(dirs, "cancel", "--all")[0] == "no partition moves\n"
    dirs.wait_clean("t", "data/0")


def test_a_plan_is_carried_out_and_undone(dirs, tmp_path):
    dirs.create("t", 3)
    fill(dirs, "t")
    before = places(dirs, "t", 3)
    plan = write_plan(tmp_path / "plan.json", ("t", 0, dirs.b), ("t", 1, dirs.b), ("t", 2, "any"))
    undo = tmp_path / "undo.json"

    out, _ = moves(dirs, "start", plan, "--rollback", undo, "--wait")
    assert f"t-0: moves no longer; it is in {dirs.b}" in out
    assert places(dirs, "t", 3) == [[str(dirs.b)], [str(dirs.b)], [str(dirs.a)]]

    before_again = undo.read_text()
    _, said = moves(dirs, "start", plan, "--rollback", undo)
    assert said == ""  # nothing is to be moved, so nothing is written
    back = write_plan(tmp_path / "back.json", ("t", 0, dirs.a))
    _, said = moves(dirs, "start", back, "--rollback", undo, code=2)
    assert "the file of the plan exists" in said
    assert undo.read_text() == before_again

    found = json.loads(moves(dirs, "start", undo, "--wait", "--format", "json")[0])
    assert [one["is_there"] for one in found["partitions"]] == [True, True]
    assert found["rollback"].startswith(str(tmp_path / "rollback-"))
    assert places(dirs, "t", 3) == before


def test_refused_partitions_are_named_with_what_to_do(dirs, tmp_path):
    dirs.create("t", 2)
    fill(dirs, "t")
    (dirs.b / "t" / "0").mkdir(parents=True)
    (dirs.b / "t" / "0" / "notes").write_text("put there by hand")
    plan = write_plan(
        tmp_path / "plan.json", ("t", 0, dirs.b), ("t", 1, dirs.b), ("none", 0, dirs.b)
    )
    out, said = moves(dirs, "start", plan, "--wait", code=1)
    assert "1 of 3 moves begun" in out
    first, second = said.splitlines()
    assert first.startswith(f"error: none-0 on broker 1 to {dirs.b}: REPLICA_NOT_AVAILABLE; check ")
    assert second.startswith(f"error: t-0 on broker 1 to {dirs.b}: KAFKA_STORAGE_ERROR; ")
    assert places(dirs, "t", 2) == [[str(dirs.a)], [str(dirs.b)]]

    write_plan(plan, ("t", 1, dirs.a), ("t", 0, tmp_path / "none"))
    _, said = moves(dirs, "start", plan, code=2)
    assert "the broker has no such log directory" in said
    assert str(dirs.b) in said
    assert places(dirs, "t", 2) == [[str(dirs.a)], [str(dirs.b)]]  # nothing is requested
    write_plan(plan)
    _, said = moves(dirs, "start", plan, code=2)
    assert "this is no plan of moves" in said


def test_moves_are_watched_until_none_is_left(dirs, tmp_path):
    dirs.create("t")
    fill(dirs, "t")
    dirs.limit(1)
    moves(dirs, "start", write_plan(tmp_path / "plan.json", ("t", 0, dirs.b)))
    command = (sys.executable, "-m", "logmirror", "moves", "list", "--watch")
    watching = subprocess.Popen(
        [*command, "--bootstrap", dirs.bootstrap], stdout=subprocess.PIPE, text=True
    )
    try:
        line = watching.stdout.readline()
        assert line.startswith(f"t-0: {dirs.a} -> {dirs.b}: ")
        _, said = moves(dirs, "list", "--watch", "--timeout", "1", code=75)
        assert "the moves are not complete in time" in said
        dirs.limit(None)
        out, _ = watching.communicate(timeout=60)
    finally:
        watching.kill()
        watching.wait()
    assert watching.returncode == 0
    assert out.splitlines()[-2:] == [
        f"t-0: moves no longer; it is in {dirs.b}",
        "no partition moves",
    ]


def fill_unevenly(bootstrap: str, topic: str, *counts: int) -> None:
    producer = Producer({"bootstrap.servers": bootstrap})
    for number, count in enumerate(counts):
        for _ in range(count):
            producer.produce(topic, RECORD, partition=number)
    assert producer.flush(60) == 0


def test_a_proposed_plan_balances_the_directories(dirs, tmp_path):
    dirs.create("t", 4)
    fill_unevenly(dirs.bootstrap, "t", 40, 25, 10, 5)
    file = tmp_path / "plan.json"

    found = json.loads(moves(dirs, "plan", "--format", "json")[0])
    assert [(one["partition"], one["to"]) for one in found["moves"]] == [(0, str(dirs.b))]
    first, second = (one["after_bytes"] for one in found["log_dirs"])
    assert abs(first - second) < 0.1 * (first + second) / 2
    out, _ = moves(dirs, "plan", "--output", file)
    assert f"plan written to {file}" in out
    assert "exists" in moves(dirs, "plan", "--output", file, code=2)[1]

    moves(dirs, "start", file, "--wait")
    assert places(dirs, "t", 4) == [[str(dirs.b)], *[[str(dirs.a)]] * 3]
    out, _ = moves(dirs, "plan", "--output", tmp_path / "next.json")
    assert "no move is proposed" in out
    assert not (tmp_path / "next.json").exists()


@pytest.mark.slow
def test_kafkas_tool_takes_a_proposed_plan_and_a_rollback_plan(apache_tools, dirs, tmp_path):
    dirs.create("t", 2)
    fill_unevenly(dirs.bootstrap, "t", 20, 20)
    plan, undo = tmp_path / "plan.json", tmp_path / "undo.json"
    moves(dirs, "plan", "--output", plan)

    def tool(file: Path, action: str) -> list[str]:
        at = ("--bootstrap-server", dirs.bootstrap, "--reassignment-json-file", str(file))
        return apache_tools.run("kafka-reassign-partitions", *at, action).stdout.splitlines()

    assert "Successfully started partition reassignment for t-0" in tool(plan, "--execute")
    dirs.wait_in("t", dirs.b, 0)
    assert "Reassignment of replica t-0-1 completed successfully." in tool(plan, "--verify")

    back = write_plan(tmp_path / "back.json", ("t", 0, dirs.a))
    moves(dirs, "start", back, "--rollback", undo, "--wait")
    assert places(dirs, "t", 2) == [[str(dirs.a)], [str(dirs.a)]]
    tool(undo, "--execute")
    dirs.wait_in("t", dirs.b, 0)


@pytest.mark.move("E16")
def test_what_a_user_may_do(tmp_path):
    """The file of properties has the password; ACLs decide about the rest."""
    broker = EmbeddedBroker(
        tmp_path / "broker",
        protocols=("SASL_PLAINTEXT",),
        super_users=["User:admin"],
        more_log_dirs=[str(tmp_path / "b")],
    )
    with broker:
        for name in ("alice", "admin"):
            put_user(broker.log_dir, name, "secret")
        login = {
            "security.protocol": "SASL_PLAINTEXT",
            "sasl.mechanism": "SCRAM-SHA-256",
            "sasl.username": "alice",
            "sasl.password": "secret",
        }
        file = tmp_path / "client.conf"
        file.write_text("".join(f"{name}={value}\n" for name, value in login.items()))
        as_alice = ("--client-config", file)
        admin = AdminClient(
            {**login, "bootstrap.servers": broker.bootstrap, "sasl.username": "admin"}
        )
        admin.create_topics([NewTopic("t", 1)])["t"].result(20)

        assert "CLUSTER_AUTHORIZATION_FAILED" in moves(broker, "list", *as_alice, code=2)[1]
        allow(admin, ResourceType.BROKER, "kafka-cluster", AclOperation.DESCRIBE)
        assert moves(broker, "list", *as_alice)[0] == "no partition moves\n"
        plan = write_plan(tmp_path / "plan.json", ("t", 0, tmp_path / "b"))
        refused = moves(broker, "start", plan, *as_alice, code=1)[1]
        assert "REPLICA_NOT_AVAILABLE; check topic" in refused
        allow(admin, ResourceType.TOPIC, "t", AclOperation.DESCRIBE)
        refused = moves(broker, "start", plan, *as_alice, code=1)[1]
        assert "CLUSTER_AUTHORIZATION_FAILED; grant Alter on the cluster" in refused
        allow(admin, ResourceType.BROKER, "kafka-cluster", AclOperation.ALTER)
        moves(broker, "start", plan, *as_alice, "--wait")


def allow(admin: AdminClient, kind: ResourceType, name: str, operation: AclOperation) -> None:
    binding = AclBinding(
        kind,
        name,
        ResourcePatternType.LITERAL,
        "User:alice",
        "*",
        operation,
        AclPermissionType.ALLOW,
    )
    admin.create_acls([binding])[binding].result(20)


@pytest.mark.slow
@pytest.mark.jvm
def test_apache_kafka_is_listed_and_driven_in_the_same_way(tmp_path):
    a, b = tmp_path / "a", tmp_path / "b"
    config = {"log.dirs": f"{a},{b}"}
    with ApacheKafka("4.3.1", tmp_path / "kafka", config=config) as kafka:
        limit(kafka.bootstrap, 1)
        create_topic(kafka.bootstrap, "t", 1, {})
        fill_unevenly(kafka.bootstrap, "t", 300)
        with LogDirsClient(kafka.bootstrap) as client:
            [here] = client.where("t")
            target = str(b) if here == str(a) else str(a)
            plan = write_plan(tmp_path / "plan.json", ("t", 0, target))

            out, _ = moves(kafka, "start", plan)
            assert "1 of 1 moves begun" in out
            [one] = listed(kafka)
            expected = {"topic": "t", "partition": 0, "broker": 1, "from": here, "to": target}
            assert one.items() >= expected.items()
            assert one["copied_bytes"] < one["total_bytes"]
            assert one["offset_lag"] > 0
            moves(kafka, "cancel", "--all")
            wait_until(lambda: [*client.where("t")] == [here], what=lambda: "the cancellation")

            limit(kafka.bootstrap, 1 << 40)
            moves(kafka, "start", plan, "--wait")
            assert [*client.where("t")] == [target]
            [undo] = [
                path
                for path in tmp_path.glob("rollback-*.json")
                if json.loads(path.read_text())["partitions"][0]["log_dirs"] == [here]
            ][:1]
            moves(kafka, "start", undo, "--wait")
            assert [*client.where("t")] == [here]
            plan = json.loads(moves(kafka, "plan", "--format", "json")[0])
            assert {one["log_dir"] for one in plan["log_dirs"]} == {str(a), str(b)}


def limit(bootstrap: str, rate: int) -> None:
    entry = ConfigEntry(MOVE_RATE, str(rate), incremental_operation=AlterConfigOpType.SET)
    resource = ConfigResource(ConfigResource.Type.BROKER, "1", incremental_configs=[entry])
    admin = AdminClient({"bootstrap.servers": bootstrap})
    admin.incremental_alter_configs([resource])[resource].result(20)

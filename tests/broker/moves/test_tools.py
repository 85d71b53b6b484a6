"""Apache Kafka's own tools show the log directories, and move partitions between them.

Method: the broker runs as its user starts it; the tools of each release run as their users run
them, and their texts are compared. The names of tests are those of the statements of moves.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from confluent_kafka.admin import (
    AclOperation,
    AdminClient,
    ConfigResource,
    ConfigSource,
    ResourceType,
)

from broker.moves.conftest import TwoDirs
from broker.moves.test_commands import allow
from broker.moves.test_cordoned import cordon
from broker.moves.test_requests import fill
from broker.test_log_dirs import start, write
from kit.runs.commands import wait_until
from kit.servers.embedded import EmbeddedBroker
from kit.servers.machine import HOST
from logmirror.broker.dynamic_configs import MOVE_RATE
from logmirror.broker.security.users import put_user

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from kit.servers.apache import ApacheTools

pytestmark = pytest.mark.slow

RATES = ("leader.replication.throttled.rate", "follower.replication.throttled.rate")
REPLICAS = ("leader.replication.throttled.replicas", "follower.replication.throttled.replicas")
LOGIN = """\
security.protocol=SASL_PLAINTEXT
sasl.mechanism=SCRAM-SHA-256
sasl.jaas.config=org.apache.kafka.common.security.scram.ScramLoginModule required \
username="alice" password="secret";
"""


def described(tools: ApacheTools, bootstrap: str, *arguments: str) -> dict[str, dict[str, Any]]:
    """What `kafka-log-dirs --describe` prints, by log directory."""
    at = ("--bootstrap-server", bootstrap, "--describe", *arguments)
    lines = tools.run("kafka-log-dirs", *at).stdout.splitlines()
    [found] = [json.loads(line) for line in lines if line.startswith("{")]
    [broker] = found["brokers"]
    return {one["logDir"]: one for one in broker["logDirs"]}


def sizes(found: dict[str, Any]) -> dict[str, int]:
    assert {(one["offsetLag"], one["isFuture"]) for one in found["partitions"]} <= {(0, False)}
    return {one["partition"]: one["size"] for one in found["partitions"]}


@pytest.mark.move("E21", "E24", "E26", "E97")
def test_e21_every_log_directory_is_shown_under_the_name_that_was_given(apache_tools, tmp_path):
    places = [tmp_path / name for name in ("a", "b c", "ü")]
    linked = tmp_path / "link"
    linked.symlink_to(tmp_path)
    gone = tmp_path / "gone"
    with start(*places, linked / "d", gone, topics={"orders": 4}) as kafka:
        write(kafka, "orders", 4)
        found = described(apache_tools, kafka.bootstrap_servers)
        places.append(linked / "d")
        assert found.keys() == {*map(str, places), str(gone)}
        assert {one["error"] for one in found.values()} == {None}
        assert sizes(found[str(gone)]) == {}
        names = []
        for path in places:
            [(name, size)] = sizes(found[str(path)]).items()
            names.append(name)
            folder = path / "orders" / name.rpartition("-")[2]
            assert size == sum(file.stat().st_size for file in folder.glob(".*.open")) > 0
        assert sorted(names) == [f"orders-{number}" for number in range(4)]

        gone.rename(tmp_path / "away")
        found = described(apache_tools, kafka.bootstrap_servers, "--topic-list", "orders,none")
        assert "KafkaStorageException" in found.pop(str(gone))["error"]
        assert sorted(name for one in found.values() for name in sizes(one)) == sorted(names)


@pytest.mark.move("E26", "E97")
def test_e97_a_log_directory_in_a_bucket_is_shown(apache_tools, embedded_in_bucket, topic_name):
    found = described(apache_tools, embedded_in_bucket.bootstrap)
    assert list(found) == [embedded_in_bucket.bucket.url]


def test_no_reassignment_is_in_progress(apache_tools, embedded):
    at = ("--bootstrap-server", embedded.bootstrap)
    found = apache_tools.run("kafka-reassign-partitions", *at, "--list").stdout
    assert found.strip() == "No partition reassignments found."


class Plan:
    """A plan of moves, and the tool that carries it out.

    Attributes:
        options: Of the tool, for each action.
    """

    def __init__(
        self, tools: ApacheTools, dirs: TwoDirs, path: Path, target: Path, count: int = 2
    ) -> None:
        self._tools, self.path = tools, path
        self.options: tuple[str, ...] = ("--bootstrap-server", dirs.bootstrap)
        partitions = [
            {"topic": "t", "partition": number, "replicas": [1], "log_dirs": [str(target)]}
            for number in range(count)
        ]
        path.write_text(json.dumps({"version": 1, "partitions": partitions}))

    def run(self, *action: str) -> list[str]:
        """Run an action; returns what it prints."""
        plan = ("--reassignment-json-file", str(self.path))
        found = self._tools.run("kafka-reassign-partitions", *self.options, *plan, *action)
        return found.stdout.splitlines()

    def refused(self) -> list[str]:
        """Execute a plan that is refused; returns what the tool prints."""
        plan = ("--reassignment-json-file", str(self.path), "--execute")
        found = self._tools.run("kafka-reassign-partitions", *self.options, *plan, check=False)
        assert found.returncode == 1
        return [*found.stdout.splitlines(), *found.stderr.splitlines()]


@pytest.fixture
def dirs(tmp_path: Path) -> Iterator[TwoDirs]:
    """The second directory has a space in its name."""
    b = tmp_path / "b c"
    with EmbeddedBroker(
        tmp_path / "broker", more_log_dirs=[str(b)], segment_bytes=20_000
    ) as broker:
        yield TwoDirs(broker, broker.log_dir, b)


@pytest.mark.move("E86", "E89", "E92", "E96", "E97")
def test_e96_the_tool_moves_limits_cancels_and_verifies(apache_tools, dirs, tmp_path):
    dirs.create("t", 2, max_message_bytes="9000000")
    fill(dirs, "t")
    plan = Plan(apache_tools, dirs, tmp_path / "plan.json", dirs.b)

    begun = plan.run("--execute", "--replica-alter-log-dirs-throttle", "1")
    assert "Successfully started partition reassignments for t-0,t-1" in begun
    for number in (0, 1):
        assert f"Successfully started moving log directory to {dirs.b} for replica t-{number}" in (
            line.rpartition(" with broker 1")[0] for line in begun
        )
    assert "The replica-alter-dir throttle limit was set to 1 B/s" in begun
    dirs.wait_in("t", dirs.b, 1)  # it is empty
    found = plan.run("--verify")
    assert "Reassignment of replica t-0-1 is still in progress." in found
    assert "Reassignment of replica t-1-1 completed successfully." in found
    assert not [line for line in found if "throttle" in line.lower()]
    with dirs.client() as client:
        assert client.where("t")[str(dirs.b)].is_future

    cancelled = plan.run("--cancel")
    assert "None of the specified partition reassignments are active." in cancelled
    back = f"Successfully started moving log directory to {dirs.a} for replica t-0 with broker 1 "
    assert back in cancelled
    assert "Clearing broker-level throttles on broker 1" in cancelled
    found = plan.run("--verify")
    expected = f"Partition t-0 on broker 1 is not being moved from log dir {dirs.a} to {dirs.b}."
    assert expected in found
    again = plan.run("--cancel")
    assert not [line for line in again if "Successfully started" in line]

    plan.run("--execute", "--replica-alter-log-dirs-throttle", "1")
    with dirs.client() as client:
        assert client.where("t")[str(dirs.b)].is_future
    added = plan.run("--execute", "--additional", "--replica-alter-log-dirs-throttle", "100000000")
    assert "The replica-alter-dir throttle limit was set to 100000000 B/s" in added
    assert "Successfully started partition reassignments for t-0,t-1" in added
    dirs.wait_in("t", dirs.b)
    dirs.wait_clean("t", "b c/0", "b c/1")

    dirs.limit(1)
    assert "The inter-broker throttle limit was set to 5 B/s" in plan.run(
        "--execute", "--throttle", "5"
    )
    of_topic = {"max.message.bytes": "9000000"}
    rates = {MOVE_RATE: "1", **dict.fromkeys(RATES, "5")}
    assert own_settings(dirs) == rates | {REPLICAS[0]: "0:1,1:1", REPLICAS[1]: ""} | of_topic
    found = plan.run("--verify")
    assert "Reassignment of replica t-0-1 completed successfully." in found
    assert "Clearing broker-level throttles on broker 1" in found
    assert "Clearing topic-level throttles on topic t" in found
    assert own_settings(dirs) == of_topic
    dirs.move("t", dirs.a)  # at 1 B/s it would take an hour and more
    dirs.broker.kill()
    dirs.broker.start()
    assert own_settings(dirs) == of_topic


def own_settings(dirs: TwoDirs) -> dict[str, str]:
    """What is set of the broker and of the topic `t`, where no default applies."""
    of_broker, of_topic = ConfigResource.Type.BROKER, ConfigResource.Type.TOPIC
    resources = [ConfigResource(of_broker, "1"), ConfigResource(of_topic, "t")]
    set_by = {ConfigSource.DYNAMIC_BROKER_CONFIG.value, ConfigSource.DYNAMIC_TOPIC_CONFIG.value}
    admin = AdminClient({"bootstrap.servers": dirs.bootstrap})
    return {
        name: one.value
        for found in admin.describe_configs(resources).values()
        for name, one in found.result(20).items()
        if one.source in set_by
    }


@pytest.mark.move("E1")
def test_the_tool_names_a_directory_that_does_not_exist(apache_tools, dirs, tmp_path):
    dirs.create("t", 2)
    plan = Plan(apache_tools, dirs, tmp_path / "plan.json", tmp_path / "none")
    assert_refused(plan, "LogDirNotFoundException")


@pytest.mark.move("E15", "E95")
def test_the_tool_names_the_error_of_a_directory_that_is_offline(apache_tools, dirs, tmp_path):
    dirs.create("t", 2)
    plan = Plan(apache_tools, dirs, tmp_path / "plan.json", dirs.b)
    away = dirs.b.rename(tmp_path / "away")
    assert_refused(plan, "KafkaStorageException")
    away.rename(dirs.b)
    assert_unmoved(dirs)


def test_the_tool_names_the_error_of_a_directory_that_is_cordoned(apache_tools, dirs, tmp_path):
    dirs.create("t", 2)
    fill(dirs, "t", 3)
    plan = Plan(apache_tools, dirs, tmp_path / "plan.json", dirs.b)
    cordon(dirs, dirs.b)
    assert_refused(plan, "InvalidReplicaAssignmentException")
    assert_unmoved(dirs)
    cordon(dirs)
    plan.run("--execute")
    dirs.wait_in("t", dirs.b)


@pytest.mark.move("E16")
def test_the_tool_names_a_missing_permission(apache_tools, tmp_path):
    """The tool needs Alter on the cluster for another request first; it has the same code, 31."""
    with EmbeddedBroker(
        tmp_path / "broker",
        protocols=("PLAINTEXT", "SASL_PLAINTEXT"),
        more_log_dirs=[str(tmp_path / "b")],
        super_users=["User:ANONYMOUS"],
    ) as broker:
        dirs = TwoDirs(broker, broker.log_dir, tmp_path / "b")
        dirs.create("t", 2)
        fill(dirs, "t", 3)
        put_user(broker.log_dir, "alice", "secret")
        admin = AdminClient({"bootstrap.servers": dirs.bootstrap})
        allow(admin, ResourceType.TOPIC, "t", AclOperation.DESCRIBE)
        allow(admin, ResourceType.BROKER, "kafka-cluster", AclOperation.DESCRIBE)
        plan = Plan(apache_tools, dirs, tmp_path / "plan.json", dirs.b)
        login = tmp_path / "client.properties"
        login.write_text(LOGIN)
        address = f"{HOST}:{broker.port_of('SASL_PLAINTEXT')}"
        as_admin = plan.options
        plan.options = ("--bootstrap-server", address, "--command-config", str(login))
        found = plan.refused()
        assert_unmoved(dirs)
        for number in (0, 1):
            assert f"t-{number}: CLUSTER_AUTHORIZATION_FAILED" in found
        plan.options = as_admin
        plan.run("--execute")
        dirs.wait_in("t", dirs.b)


def assert_unmoved(dirs: TwoDirs) -> None:
    """Check that both partitions are where they were, and no copy is made or was."""
    with dirs.client() as client:
        assert [*client.where("t")] == [*client.where("t", 1)] == [str(dirs.a)]
    assert not [*dirs.b.glob("t/*")]


def assert_refused(plan: Plan, error: str) -> None:
    """Check that the tool ends with the broker's error for a partition."""
    found = plan.refused()
    assert [line for line in found if line.startswith("Error: Failed to alter dir for t-")]
    assert [line for line in found if line.startswith("Caused by: ") and error in line]
    assert not [line for line in found if "Successfully started moving" in line]


@pytest.mark.parametrize("topic", ["t", "none"])
def test_the_tool_names_a_partition_that_does_not_exist(apache_tools, dirs, tmp_path, topic):
    """It finds that in the description of the topic, and requests no move of any partition."""
    dirs.create("t", 2)
    plan = Plan(apache_tools, dirs, tmp_path / "plan.json", dirs.b, 3)
    plan.path.write_text(plan.path.read_text().replace('"t"', f'"{topic}"'))
    text = "Unable to find partition: t-2" if topic == "t" else "Topic none not found."
    [first, *_] = [line for line in plan.refused() if line.startswith("Error: ")]
    assert "UnknownTopicOrPartitionException" in first
    assert text in first
    with dirs.client() as client:
        assert [*client.where("t")] == [*client.where("t", 1)] == [str(dirs.a)]


@pytest.mark.move("E8", "E96")
def test_e96_the_tool_redirects_a_move_and_names_what_is_offline(apache_tools, tmp_path):
    b, c = tmp_path / "b", tmp_path / "c"
    with EmbeddedBroker(
        tmp_path / "broker", more_log_dirs=[str(b), str(c)], segment_bytes=20_000
    ) as broker:
        dirs = TwoDirs(broker, broker.log_dir, b)
        dirs.create("t", 2)
        fill(dirs, "t")
        to_b = Plan(apache_tools, dirs, tmp_path / "b.json", b)
        to_c = Plan(apache_tools, dirs, tmp_path / "c.json", c)
        to_b.run("--execute", "--replica-alter-log-dirs-throttle", "1")
        more = ("--additional", "--replica-alter-log-dirs-throttle", "2")
        assert "The replica-alter-dir throttle limit was set to 2 B/s" in to_c.run(
            "--execute", *more
        )
        with dirs.client() as client:
            assert client.where("t").keys() == {str(dirs.a), str(c)}
        found = to_b.run("--verify")
        assert f"Partition t-0 on broker 1 is being moved to log dir {c} instead of {b}." in found
        assert "Reassignment of replica t-0-1 is still in progress." in to_c.run("--verify")
        dirs.limit(None)
        for number in (0, 1):
            dirs.wait_in("t", c, number)
        wait_until(lambda: not [*c.glob("t/*/.*.move")], what=lambda: "the ends of the moves")

        away = c.rename(tmp_path / "away")
        found = to_c.run("--verify")
        away.rename(c)
        for number in (0, 1):
            text = f"Partition t-{number} is not found in any live log dir on broker 1."
            assert f"{text} There is likely an offline log directory on the broker." in found
        assert "Reassignment of replica t-0-1 completed successfully." in to_c.run("--verify")


@pytest.mark.parametrize("brokers", [None, "1", "1,1"])
def test_the_tool_describes_all_brokers_or_those_of_a_list(apache_tools, dirs, brokers):
    dirs.create("t")
    listed = () if brokers is None else ("--broker-list", brokers)
    at = ("--bootstrap-server", dirs.bootstrap, "--describe")
    found = apache_tools.run("kafka-log-dirs", *at, *listed)
    first, second, third = found.stdout.splitlines()
    assert first == "Querying brokers for log directories information"
    assert second == "Received log directory information from brokers 1"
    [broker] = json.loads(third)["brokers"]
    assert broker["broker"] == 1
    shown = {one["logDir"]: one["partitions"] for one in broker["logDirs"]}
    partition = {"partition": "t-0", "size": 0, "offsetLag": 0, "isFuture": False}
    assert shown == {str(dirs.a): [partition], str(dirs.b): []}


@pytest.mark.parametrize(("brokers", "unknown"), [("7", "7"), ("1,7", "7"), ("8,7,8", "7,8")])
def test_the_tool_names_brokers_that_do_not_exist(apache_tools, embedded, brokers, unknown):
    at = ("--bootstrap-server", embedded.bootstrap, "--describe", "--broker-list", brokers)
    found = apache_tools.run("kafka-log-dirs", *at, check=False)
    text = f"The given brokers do not exist from --broker-list: {unknown}."
    assert f"ERROR: {text} Current existent brokers: 1" in found.stderr.splitlines()
    assert (found.returncode, found.stdout) == (1, "")


@pytest.mark.move("E92")
def test_the_tool_for_settings_sets_and_deletes_those_of_the_broker(apache_tools, dirs):
    """Release 3.9 replaces all of them with AlterConfigs; 4.3 changes each."""
    at = ("--bootstrap-server", dirs.bootstrap, "--entity-type", "brokers", "--entity-name", "1")

    def alter(*change: str, check: bool = True) -> str:
        return apache_tools.run("kafka-configs", *at, "--alter", *change, check=check).stdout

    dirs.create("t", 1)
    alter("--add-config", f"{MOVE_RATE}=7")
    alter("--add-config", f"{RATES[0]}=5")
    assert own_settings(dirs) == {MOVE_RATE: "7", RATES[0]: "5"}
    refused = alter("--add-config", "num.io.threads=4", check=False)
    assert own_settings(dirs) == {MOVE_RATE: "7", RATES[0]: "5"}, refused
    alter("--delete-config", MOVE_RATE)
    assert own_settings(dirs) == {RATES[0]: "5"}
    described = apache_tools.run("kafka-configs", *at, "--describe", "--all").stdout
    assert f"log.dirs={dirs.a},{dirs.b} " in described

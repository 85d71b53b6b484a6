"""Cordoned log directories (KIP-1066): no new partition, and no move there."""

from __future__ import annotations

import pytest
from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient, AlterConfigOpType, ConfigEntry, ConfigResource

from broker.moves.test_requests import NONE, UNKNOWN, fill
from kit.servers.kafka import create_topic
from logmirror.broker.dynamic_configs import CORDONED, DynamicConfigs
from logmirror.broker.topic_configs import MalformedConfigError

NOT_ELIGIBLE = 39


def cordon(dirs, *paths) -> None:
    kind = AlterConfigOpType.SET if paths else AlterConfigOpType.DELETE
    value = ",".join(map(str, paths))
    entry = ConfigEntry(CORDONED, value, incremental_operation=kind)
    resource = ConfigResource(ConfigResource.Type.BROKER, "1", incremental_configs=[entry])
    admin = AdminClient({"bootstrap.servers": dirs.bootstrap})
    admin.incremental_alter_configs([resource])[resource].result(20)


def shown(dirs, version: int = 5) -> dict[str, bool]:
    """The flag of each directory, as DescribeLogDirs shows it."""
    with dirs.client() as client:
        results = client.ask(35, version, topics=None).results
    return {one.log_dir: bool(getattr(one, "is_cordoned", False)) for one in results}


@pytest.mark.move("E3", "E26")
def test_a_cordoned_directory_gets_no_partition_and_keeps_what_it_has(dirs):
    dirs.create("t")
    fill(dirs, "t", 3)
    cordon(dirs, dirs.a)
    assert shown(dirs) == {str(dirs.a): True, str(dirs.b): False}
    assert not any(shown(dirs, 4).values())
    create_topic(dirs.bootstrap, "new", 4, {})
    with dirs.client() as client:
        assert [[*client.where("new", n)] for n in range(4)] == [[str(dirs.b)]] * 4
        assert client.move_one("new", dirs.a) == NOT_ELIGIBLE
        assert client.move_one("later", dirs.a) == NOT_ELIGIBLE
        assert client.move_one("later", dirs.b) == UNKNOWN
        assert client.move_one("t", dirs.a) == NONE, "it is there"
    with dirs.partition("t") as partition:
        assert partition.log_end == 300
    dirs.move("t", dirs.b)
    cordon(dirs)
    dirs.move("t", dirs.a)


def test_it_holds_after_a_restart_and_all_may_be_cordoned(dirs):
    cordon(dirs, "*")
    dirs.broker.kill()
    dirs.broker.start()
    assert shown(dirs) == {str(dirs.a): True, str(dirs.b): True}
    with pytest.raises(KafkaException, match="cordoned"):
        create_topic(dirs.bootstrap, "t", 1, {})
    cordon(dirs)
    create_topic(dirs.bootstrap, "t", 1, {})


def test_only_a_directory_of_the_broker_can_be_cordoned(dirs, tmp_path):
    with pytest.raises(KafkaException, match="no log directory of this broker"):
        cordon(dirs, dirs.a, tmp_path / "c")
    assert not any(shown(dirs).values())


def test_it_is_set_for_one_broker_only_as_in_apache_kafka():
    configs = DynamicConfigs(1, {}, ["/a"])
    with pytest.raises(MalformedConfigError, match=f"{CORDONED}: set it for one broker"):
        configs.checked("", {CORDONED: "*"})
    assert configs.checked("", {CORDONED: None}) == {("", CORDONED): None}
    configs.apply(configs.checked("1", {CORDONED: "*"}))
    assert configs.cordoned() == {"/a"}


def test_an_empty_value_of_the_broker_counts_before_one_for_all_brokers():
    """An earlier release stored one for all."""
    configs = DynamicConfigs(1, {("", CORDONED): "*"}, ["/a"])
    assert configs.cordoned() == {"/a"}
    configs.apply(configs.checked("1", {CORDONED: ""}))
    assert configs.cordoned() == set()
    [entry] = [entry for entry in configs.entries("1") if entry.name == CORDONED]
    assert (entry.value, entry.source.name) == ("", "DYNAMIC_BROKER")

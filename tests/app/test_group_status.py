"""Goal: `status` shows how far groups can continue, and whether a mirror translates them.

Method: two embedded brokers, librdkafka's commits, and a link of this process.
"""

from __future__ import annotations

import json

import pytest
from confluent_kafka.admin import AdminClient
from typer import Exit

import logmirror
from kit.runs.group_links import DESTINATION, SYNCS, commit_offsets, link_world
from kit.servers.embedded import EmbeddedBroker
from kit.servers.kafka import create_topic, delete_topic
from kit.servers.machine import free_ports
from logmirror.app import group_status as module
from logmirror.cli.status import status


@pytest.fixture(scope="module")
def servers(tmp_path_factory):
    with (
        EmbeddedBroker(tmp_path_factory.mktemp("source")) as source,
        EmbeddedBroker(tmp_path_factory.mktemp("target")) as target,
    ):
        create_topic(source.bootstrap, SYNCS, 1, {})
        yield source.bootstrap, target.bootstrap


def topics(*bootstraps):
    return [
        set(AdminClient({"bootstrap.servers": one}).list_topics(timeout=30).topics)
        for one in bootstraps
    ]


@pytest.mark.parametrize("offsets", ["preserve", "translate"])
def test_groups_are_counted_as_they_can_be_translated_now(servers, topic_name, offsets):
    world = link_world(*servers, topic_name, offsets=offsets)
    world.sync((40, 40), (60, 60))
    for name, offset in (("a", 60), ("b", 60), ("between", 50), ("early", 10)):
        commit_offsets(world.source, world.group(name), world.topic, {0: offset})
    commit_offsets(world.source, f"other-{topic_name}", world.topic, {0: 10})  # not included
    before = topics(*servers)

    [row] = logmirror.group_status(world.settings)

    found = (row.groups, row.exact, row.inexact, row.not_translated)
    assert found == ((4, 4, 0, 0) if offsets == "preserve" else (4, 2, 2, 0))
    assert row.reason in ({""} if offsets == "preserve" else {"between-syncs", "before-syncs"})
    assert row.heartbeat_age_s is None
    assert topics(*servers) == before  # nothing was created
    world.service.run_once()

    [row] = logmirror.group_status(world.settings)

    assert row.heartbeat_age_s is not None
    assert 0 <= row.heartbeat_age_s < 300


def test_a_group_of_a_missing_replica_is_not_translated(servers, topic_name):
    world = link_world(*servers, topic_name, offsets="preserve", partitions=2)
    commit_offsets(world.source, world.group("g"), world.topic, {0: 10, 1: 10})
    delete_topic(world.target, world.replica)

    [row] = logmirror.group_status(world.settings)

    assert (row.groups, row.exact, row.inexact, row.not_translated) == (1, 0, 0, 1)
    assert row.reason == "not-replicated"


def test_heartbeats_of_another_link_are_not_those_of_this_one(servers, topic_name):
    one = link_world(*servers, topic_name, **{"source-alias": f"{topic_name}-a"})
    one.service.run_once()
    other = link_world(*servers, f"{topic_name}-2", **{"source-alias": f"{topic_name}-b"})

    assert [row.heartbeat_age_s is None for row in logmirror.group_status(one.settings)] == [False]
    assert [row.heartbeat_age_s for row in logmirror.group_status(other.settings)] == [None]


def test_a_cluster_that_is_away_is_a_row_and_a_failure(
    servers, topic_name, tmp_path, monkeypatch, capsys
):
    world = link_world(*servers, topic_name, offsets="preserve")
    [port] = free_ports(1)
    monkeypatch.setattr(module, "COMMAND_BUDGET_MS", 300)
    monkeypatch.setattr("logmirror.app.status.COMMAND_BUDGET_MS", 300)
    mirror = {
        "name": topic_name,
        "source": {"bootstrap-servers": world.source},
        "topic": topic_name,
        "partitions": "all",
        "destinations": [
            {"type": "kafka", "name": DESTINATION, "bootstrap-servers": f"127.0.0.1:{port}"}
        ],
        "groups": {"source-alias": topic_name},
    }
    config = tmp_path / "mirror.yaml"
    config.write_text(json.dumps({"mirrors": [mirror]}))

    with pytest.raises(Exit) as ended:
        status(config)
    shown = capsys.readouterr().out
    with pytest.raises(Exit):
        status(config, output="json")
    found = capsys.readouterr().out

    assert ended.value.exit_code == 1
    assert f"affects the groups of {topic_name} for {DESTINATION}" in shown
    partition, link = json.loads(found)
    assert partition["partition"] == 0
    assert "partition" not in link
    assert (link["groups"], link["error"]["kind"]) == (0, "unavailable")


def test_without_groups_there_are_no_rows_and_no_cluster_is_contacted():
    source, target = free_ports(2)
    mirror = {
        "name": "orders",
        "source": {"bootstrap-servers": f"127.0.0.1:{source}"},
        "topic": "orders",
        "partitions": "all",
        "destinations": [
            {"type": "kafka", "name": "standby", "bootstrap-servers": f"127.0.0.1:{target}"}
        ],
    }

    assert logmirror.group_status(logmirror.load(values={"mirrors": [mirror]})) == []

"""Groups with the printed permissions, and without one after the other; see `test_acls`."""

from __future__ import annotations

import json

import pytest
from confluent_kafka import Consumer, TopicPartition

import e2e.test_acls as acls
from kit.judges.clients import Message, produce, rows_by_librdkafka
from kit.runs.commands import logmirror
from logmirror.wire.mirrormaker import decode_checkpoint

pytestmark = [pytest.mark.xdist_group("e2e-acls"), pytest.mark.timeout(600)]

SYNCS = "mm2-offset-syncs.standby.internal"


broker = acls.broker


class Groups(acls.World):
    """A replica with new offsets, and a group that has read a part of the source."""

    def mirrored(self, **more):
        """Copy the records with all permissions; return the mirror."""
        self.fill()
        mirror = self.to_cluster(offsets="translate")
        mirror["groups"] = {"source-alias": self.name, "include": [f"g-{self.name}"], **more}
        self.forget_progress()
        self.grant(self.all_of(mirror))
        acls.copied(mirror)
        self.commit(7)
        return mirror

    def all_of(self, mirror):
        return acls.printed(mirror) + acls.printed(mirror, optional=True)

    def commit(self, offset):
        config = {"bootstrap.servers": self.broker.bootstrap, "group.id": f"g-{self.name}"}
        consumer = Consumer(config)
        consumer.commit(offsets=[TopicPartition(self.name, 0, offset)], asynchronous=False)
        consumer.close()

    def once(self, mirror, folder):
        config = folder / "config.json"
        config.write_text(json.dumps({"mirrors": [mirror]}))
        return logmirror("run", "--only", "groups", "--until-now", "-c", config)

    def checkpoints(self):
        rows = rows_by_librdkafka(self.broker.bootstrap, f"{self.name}.checkpoints.internal")
        return [decode_checkpoint(row.key, row.value).upstream for row in rows]


@pytest.fixture
def world(broker):
    return Groups(broker)


def test_the_printed_permissions_suffice_for_groups(world, tmp_path):
    mirror = world.mirrored(**{"sync-group-offsets": True})
    world.grant(acls.printed(mirror))

    done = world.once(mirror, tmp_path)

    assert done.returncode == 0, done.stderr
    assert "heartbeats disabled" in done.stderr
    assert "not committed" not in done.stderr
    assert world.checkpoints() == [7]
    assert "checkpoints topic cannot be read" in world.once(mirror, tmp_path).stderr
    world.grant(world.all_of(mirror))
    done = world.once(mirror, tmp_path)
    assert done.returncode == 0, done.stderr
    assert "disabled" not in done.stderr
    assert world.checkpoints() == [7]


def test_a6_unreadable_checkpoints_do_not_move_a_group_back(world, tmp_path):
    mirror = world.mirrored(**{"sync-group-offsets": True})
    assert world.once(mirror, tmp_path).returncode == 0
    world.grant(acls.printed(mirror))
    for _ in range(2):
        done = world.once(mirror, tmp_path)
        assert done.returncode == 0, done.stderr
        assert "the offsets that groups have committed at the target are the lower" in done.stderr
    assert world.checkpoints() == [7]
    world.commit(21)
    assert world.once(mirror, tmp_path).returncode == 0
    assert world.checkpoints() == [7, 21]


@pytest.mark.parametrize(
    ("kind", "name", "operation"),
    [
        ("topic", "{}.checkpoints.internal", "Create"),
        ("topic", "{}.checkpoints.internal", "Write"),
        ("transactional-id", "logmirror-groups-{}-", "Write"),
        ("topic", SYNCS, "Read"),
        ("group", "*", "Describe"),
    ],
)
def test_no_printed_permission_can_be_omitted_for_groups(world, tmp_path, kind, name, operation):
    mirror = world.mirrored()
    needed = acls.printed(mirror)
    pattern = "prefixed" if kind == "transactional-id" else "literal"
    without = (kind, name.format(world.name), pattern, operation)
    assert without in needed
    world.grant([acl for acl in needed if acl != without])

    done = world.once(mirror, tmp_path)

    if kind == "group":  # Kafka lists no group that is not visible
        assert "a group is only visible with Describe on it" in done.stderr
    else:
        assert done.returncode == 2, done.stderr
        assert "AUTHORIZATION_FAILED" in done.stderr


def test_the_printed_permissions_suffice_for_a_take_over(world):
    world.fill()
    world.forget_progress()
    mirror = world.to_cluster(offsets="translate", takeover="mm2")
    mirror["groups"] = {"source-alias": world.name, "include": ["none"]}
    there, stored = f"copy-of-{world.name}", f"mm2-offsets.{world.name}.internal"
    world.broker.create_topic(there, partitions=2)
    world.broker.create_topic(stored)
    here = list(rows_by_librdkafka(world.broker.bootstrap, world.name, start=3))
    produce(
        world.broker.bootstrap,
        there,
        [Message(row.key, row.value, row.headers, row.timestamp_ms) for row in here[:9]],
    )
    needed = acls.printed(mirror)
    world.grant([acl for acl in needed if acl[1] != stored])
    acls.refusal(mirror)
    world.grant(needed)

    acls.copied(mirror)

    rows = list(rows_by_librdkafka(world.broker.bootstrap, there))
    assert [row[1:] for row in rows] == [row[1:] for row in here]

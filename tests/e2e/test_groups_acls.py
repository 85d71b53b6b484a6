"""Groups with the printed permissions, and without one after the other; see `test_acls`."""

from __future__ import annotations

import contextlib
import json

import pytest
from confluent_kafka import Consumer, KafkaException, TopicPartition

import e2e.test_acls as acls
from kit.judges.clients import Message, produce, rows_by_librdkafka
from kit.judges.gaps import log_bounds
from kit.judges.mirror_translation import MirrorTranslation
from kit.runs.commands import logmirror, wait_until
from kit.runs.group_links import LinkWorld, linked
from logmirror import load
from logmirror.app.group_service import _open_link
from logmirror.app.specs import link_specs
from logmirror.clock import SYSTEM_CLOCK
from logmirror.cluster.client import ClusterClient
from logmirror.errors import UsageError
from logmirror.groups import checkpoint_topics
from logmirror.groups.service import GroupService
from logmirror.model import TopicPartition as Partition
from logmirror.monitoring.metrics import Recorder
from logmirror.wire.mirrormaker import decode_checkpoint, decode_sync

pytestmark = [pytest.mark.xdist_group("e2e-acls"), pytest.mark.timeout(600)]

SYNCS = "mm2-offset-syncs.standby.internal"


broker = acls.broker


class Groups(acls.World):
    """A replica with new offsets, and a group that has read a part of the source."""

    def mirrored(self, offsets="translate", **more):
        """Copy the records with all permissions; return the mirror."""
        self.fill()
        mirror = self.to_cluster(offsets=offsets)
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

    def once_without_syncs(self, mirror, folder):
        """Translate the groups without a permission for syncs; return those there are."""
        done = self.once(mirror, folder)
        assert done.returncode == 0, done.stderr
        assert done.stderr.count("offset syncs paused") == 1, done.stderr
        assert set(self.checkpoints()) == {7}
        topics = self.admin.list_topics(timeout=30).topics
        return self.syncs() if SYNCS in topics else []

    def syncs(self):
        """Upstream offsets of the syncs of the source, oldest first."""
        return [one.upstream for one in decoded_syncs(self)]

    def task(self):
        """The configuration of MirrorMaker's checkpoint task, as the same user."""
        login = 'org.apache.kafka.common.security.plain.PlainLoginModule required username="{}" '
        login = (login + 'password="{}";').format(
            acls.SECURED["sasl.username"], acls.SECURED["sasl.password"]
        )
        connection = {
            "bootstrap.servers": self.address,
            "security.protocol": acls.SECURED["security.protocol"],
            "sasl.mechanism": acls.SECURED["sasl.mechanism"],
            "sasl.jaas.config": login,
        }
        return {
            "name": "checkpoints",
            "connector.class": "org.apache.kafka.connect.mirror.MirrorCheckpointConnector",
            "source.cluster.alias": self.name,
            "target.cluster.alias": "standby",
            "task.assigned.groups": f"g-{self.name}",
            **{
                f"{at}.cluster.{key}": v
                for at in ("source", "target")
                for key, v in connection.items()
            },
        }

    @property
    def reading_checkpoints(self):
        return ("topic", f"{self.name}.checkpoints.internal", "literal", "Read")

    def spec(self, mirror):
        """The mirror's link."""
        [spec] = link_specs(load(values={"mirrors": [mirror]}))
        return LinkWorld(self.address, self.address, self.name, Recorder(), spec)

    def may_read(self, made):
        """Whether the mirror's user may read the checkpoints: permissions take effect later."""
        where = Partition(f"{self.name}.checkpoints.internal", 0)
        with ClusterClient(made.spec.target) as client:
            try:
                client.fetch(where, 0, memoryview(bytearray(1 << 16)), topic_id=None, max_wait_ms=0)
            except UsageError:
                return False
        return True

    def seen(self):
        """The checkpoints; none while there is no topic of them."""
        with contextlib.suppress(KafkaException):
            return self.checkpoints()
        return []

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
    """Also MM-20. MirrorMaker with the same permissions forgets what it knew."""
    mirror = world.mirrored(**{"sync-group-offsets": True})
    assert world.once(mirror, tmp_path).returncode == 0
    world.grant(acls.printed(mirror))
    for _ in range(2):
        done = world.once(mirror, tmp_path)
        assert done.returncode == 0, done.stderr
        assert "the offsets that groups have committed at the target are the lower" in done.stderr
    assert world.checkpoints() == [7]
    last = decoded_syncs(world)[-1]
    where = TopicPartition(world.name, 0)
    with MirrorTranslation() as java:
        assert not java.read_topics(world.task())
        assert java.translated(where, [7, last.upstream]) == [-1, last.downstream]
    world.commit(21)
    assert world.once(mirror, tmp_path).returncode == 0
    assert world.checkpoints() == [7, 21]


def test_syncs_of_a_replica_that_keeps_offsets_are_optional(world, tmp_path):
    """Also MM-51."""
    mirror = world.mirrored(offsets="preserve")
    needed = acls.printed(mirror)
    syncs = [("topic", SYNCS, "literal", right) for right in ("Create", "Read", "Write")]
    assert not set(syncs) & set(needed)
    assert set(syncs) <= set(acls.printed(mirror, optional=True))
    if SYNCS in world.admin.list_topics(timeout=30).topics:
        world.broker.delete_topic(SYNCS)
    world.grant([*needed, *syncs[1:]])
    assert world.once_without_syncs(mirror, tmp_path) == []
    world.broker.create_topic(SYNCS)
    world.grant([*needed, *syncs[:2]])
    assert world.once_without_syncs(mirror, tmp_path) == []

    world.grant([*needed, *syncs])
    done = world.once(mirror, tmp_path)

    assert done.returncode == 0, done.stderr
    assert "offset syncs paused" not in done.stderr
    found = world.syncs()
    assert (found[0], found[-1]) == log_range(world)
    world.grant([*needed, syncs[0], syncs[2]])
    assert world.once_without_syncs(mirror, tmp_path) == found


def decoded_syncs(world):
    rows = rows_by_librdkafka(world.broker.bootstrap, SYNCS)
    found = [decode_sync(row.key, row.value) for row in rows]
    return [one for one in found if one.topic == world.name]


def log_range(world):
    """The first and the last offset of the replica."""
    start, end = log_bounds(world.broker.bootstrap, f"copy-of-{world.name}", 0)
    return start, end - 1


def test_unreadable_checkpoints_are_read_when_they_may_be(world, monkeypatch, caplog):
    mirror = world.mirrored(**{"sync-group-offsets": True})
    monkeypatch.setattr(checkpoint_topics, "_READ_AGAIN_MS", 0)
    made = world.spec(mirror)
    made.service.run_once()
    needed = [acl for acl in world.all_of(mirror) if acl != world.reading_checkpoints]
    world.grant(needed)
    wait_until(lambda: not world.may_read(made), what=lambda: "the refusal", timeout_s=60)
    with linked(made) as link, caplog.at_level("INFO", "logmirror.groups"):
        link.round()
        assert "the checkpoints topic cannot be read" in caplog.text
        link.round()
        assert world.checkpoints() == [7]  # the offset at the target is the lower bound
        assert "can be read again" not in caplog.text
        world.grant([*needed, world.reading_checkpoints])
        wait_until(
            lambda: link.round() and "can be read again" in caplog.text,
            what=lambda: "the permission",
            timeout_s=60,
        )
        world.commit(21)
        link.round()

    assert world.checkpoints() == [7, 21]


def test_without_write_on_the_checkpoints_the_error_names_it_and_is_retried(world, caplog):
    mirror = world.mirrored(**{"interval-ms": 100})
    writing = ("topic", f"{world.name}.checkpoints.internal", "literal", "Write")
    needed = world.all_of(mirror)
    assert writing in needed
    world.grant([acl for acl in needed if acl != writing])
    spec, recorder = world.spec(mirror).spec, Recorder()
    service = GroupService([spec], _open_link, SYSTEM_CLOCK, recorder)

    def reported():
        """What the log says about the topic, not about permissions that take effect later."""
        facts = [getattr(one, "facts", {}) for one in caplog.records]
        return [one for one in facts if one.get("topic") == f"{world.name}.checkpoints.internal"]

    with caplog.at_level("WARNING", "logmirror.groups"), service.running():
        wait_until(reported, what=lambda: "the error", timeout_s=60)
        acls.copied(mirror)  # the mirror needs nothing of the groups
        world.allow([writing])
        wait_until(lambda: world.seen() == [7], what=lambda: "the checkpoint", timeout_s=60)

    assert "groups not translated; retried" in caplog.text
    [event] = reported()
    assert "permit Write on the topic" in event["hint"]
    assert "heartbeats disabled" not in caplog.text


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


class Archived(Groups):
    """An archive alone, with the offsets of a group beside it."""

    def with_groups(self, root):
        """Copy the records; return the mirror."""
        self.fill()
        self.commit(7)
        mirror = self.to_files(root)
        mirror["groups"] = {"source-alias": self.name, "include": [f"g-{self.name}"]}
        self.grant(acls.printed(mirror))
        acls.copied(mirror)
        return mirror

    def archived(self, root):
        """The offsets of the newest snapshot; none if there is no snapshot."""
        found = sorted(one for one in (root / ".logmirror/groups").rglob("*") if one.is_file())
        return json.loads(found[-1].read_bytes())["groups"] if found else []


def test_the_printed_permissions_suffice_for_the_groups_of_an_archive(broker, tmp_path):
    world, root = Archived(broker), tmp_path / "archive"
    mirror = world.with_groups(root)
    assert ("group", "*", "literal", "Describe") in acls.printed(mirror)
    assert not acls.printed(mirror, optional=True)

    done = world.once(mirror, tmp_path)

    assert done.returncode == 0, done.stderr
    [group] = world.archived(root)
    assert (group["group"], group["offsets"]) == (f"g-{world.name}", [[0, 7]])


def test_without_describe_on_groups_a_snapshot_has_none_and_says_so(broker, tmp_path):
    world, root = Archived(broker), tmp_path / "archive"
    mirror = world.with_groups(root)
    world.grant([acl for acl in acls.printed(mirror) if acl[0] != "group"])

    done = world.once(mirror, tmp_path)

    assert "a group is only visible with Describe on it" in done.stderr
    assert world.archived(root) == []

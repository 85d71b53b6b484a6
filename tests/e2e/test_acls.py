"""`logmirror acls print`: the printed permissions suffice, and none of them can be omitted.

Method: a broker with an authorizer. The mirror's user gets the permissions of the printed commands,
which are parsed as a shell parses them, and the mirror runs. Then one permission after the other is
omitted; each run must end with an error that names it. Every run has new topics.
"""

from __future__ import annotations

import itertools
import json
import re
import shlex
from dataclasses import dataclass, field

import pytest
from confluent_kafka.admin import (
    AclBinding,
    AclBindingFilter,
    AclOperation,
    AclPermissionType,
    AdminClient,
    ResourcePatternType,
    ResourceType,
)

from kit.judges.copies import anomalies, copy, end_of, forget_connections
from kit.judges.gaps import CREDENTIALS, Writer, plain_messages, secured_kafka, trim
from kit.runs.commands import logmirror, wait_until
from kit.servers.apache import RELEASES
from kit.servers.security import USER
from logmirror.app.acls import needed_acls
from logmirror.app.preflight import check
from logmirror.cli.acls import acls_text
from logmirror.config.settings import load_text
from logmirror.errors import UsageError
from logmirror.to_kafka.translate_progress import PROGRESS_TOPIC

pytestmark = [pytest.mark.xdist_group("e2e-acls"), pytest.mark.timeout(600)]

SECURED = dict(CREDENTIALS)
FLUSH = {"max-time-ms": 60_000, "max-bytes": 1 << 20, "max-offsets": 1000}
_NUMBERS = itertools.count()


@pytest.fixture(scope="module", params=RELEASES)
def broker(request, tmp_path_factory):
    made = secured_kafka(request.param, tmp_path_factory.mktemp("acls"))
    try:
        yield made.start()
        forget_connections()
    finally:
        made.remove()


@dataclass
class World:
    """A broker, two new topics on it, and what the mirror's user may do."""

    broker: object
    name: str = field(default_factory=lambda: f"t{next(_NUMBERS)}")

    def __post_init__(self):
        self.admin = AdminClient({"bootstrap.servers": self.broker.bootstrap})
        self.address = self.broker.address("SASL")

    def fill(self):
        """A head that is gone, records, and a transaction's marker."""
        self.broker.create_topic(self.name, partitions=2)
        plain = Writer(self.broker.bootstrap, self.name)
        plain.send(plain_messages(10, seed=1))
        trim(self.broker.bootstrap, self.name, 0, 3)
        writer = Writer(self.broker.bootstrap, self.name, transactional_id=f"of-{self.name}")
        writer.transaction(plain_messages(5, seed=2), commit=True)
        plain.send(plain_messages(5, seed=3))

    def mirror(self, *destinations, **more):
        source = {"bootstrap-servers": self.address, "properties": SECURED}
        base = {"name": f"m-{self.name}", "source": source, "topic": self.name, "partitions": "all"}
        return base | {"destinations": list(destinations), **more}

    def to_cluster(self, **more):
        standby = {"name": "standby", "type": "kafka", "topic": f"copy-of-{self.name}"}
        standby |= {"bootstrap-servers": self.address, "properties": SECURED}
        return self.mirror(standby | {key.replace("_", "-"): v for key, v in more.items()})

    def to_files(self, root):
        lake = {"name": "lake", "type": "filesystem", "root": str(root)}
        return self.mirror(lake, flush=FLUSH, **{"chain-start": "earliest"})

    def grant(self, acls):
        """Allow these and nothing else. What stays allowed is allowed all the time."""
        wanted, allowed = {binding(acl) for acl in acls}, self.allowed()
        self.create(wanted - allowed)
        self.delete(allowed - wanted)
        # The broker shows the set by which it decides, and a permission may take effect later.
        wait_until(lambda: self.allowed() == wanted, what=lambda: f"{wanted}", timeout_s=60)

    def allow(self, acls):
        """Allow these beside what is allowed."""
        self.create({binding(acl) for acl in acls})

    def allowed(self):
        """All that is allowed now."""
        return set(self.admin.describe_acls(AclBindingFilter(*_EVERYTHING)).result(30))

    def create(self, bindings):
        for made in self.admin.create_acls(list(bindings)).values() if bindings else ():
            made.result(30)

    def delete(self, bindings):
        filters = [AclBindingFilter(*fields(one)) for one in bindings]
        for taken in self.admin.delete_acls(filters).values() if filters else ():
            taken.result(30)

    def forget_progress(self):
        """Each world begins without the topic that worlds would share."""
        forget_connections()
        if PROGRESS_TOPIC in self.admin.list_topics(timeout=30).topics:
            self.broker.delete_topic(PROGRESS_TOPIC)


_EVERYTHING = (ResourceType.ANY, None, ResourcePatternType.ANY, None, None)
_EVERYTHING += (AclOperation.ANY, AclPermissionType.ANY)


def fields(binding):
    """In the order in which a binding and a filter take them."""
    resource = (binding.restype, binding.name, binding.resource_pattern_type)
    return (*resource, binding.principal, binding.host, binding.operation, binding.permission_type)


def binding(acl):
    """As Kafka's administrators have it."""
    kind, name, pattern, operation = acl
    return AclBinding(
        ResourceType["BROKER" if kind == "cluster" else kind.upper().replace("-", "_")],
        name,
        ResourcePatternType[pattern.upper()],
        f"User:{USER}",
        "*",
        AclOperation[_CONSTANTS.get(operation, operation.upper())],
        AclPermissionType.ALLOW,
    )


_CONSTANTS = {"DescribeConfigs": "DESCRIBE_CONFIGS", "ClusterAction": "CLUSTER_ACTION"}


def settings_of(*mirrors):
    return load_text(json.dumps({"mirrors": mirrors}), environ={})


def printed(mirror, *, optional=False):
    """What the printed commands allow; with `optional`, what those say that are comments."""
    text = acls_text(needed_acls(settings_of(mirror))).replace("\\\n", " ")
    lines = [line for line in text.splitlines() if "kafka-acls.sh" in line]
    found = []
    for line in lines:
        words = shlex.split(line.removeprefix("# "))
        if line.startswith("#") is not optional:
            continue
        assert words[:2] == ["kafka-acls.sh", "--bootstrap-server"]
        assert words[3:6] == ["--add", "--allow-principal", f"User:{USER}"]
        pattern = "prefixed" if "prefixed" in words else "literal"
        kind = next(
            word
            for word in words
            if word in ("--topic", "--transactional-id", "--cluster", "--group")
        )
        name = "kafka-cluster" if kind == "--cluster" else words[words.index(kind) + 1]
        operations = [words[at + 1] for at, word in enumerate(words) if word == "--operation"]
        found += [(kind[2:], name, pattern, operation) for operation in operations]
    return found


def refusal(mirror):
    """The error of a copy that is not allowed."""
    forget_connections()
    with pytest.raises(UsageError) as caught:
        copy(mirror)
    assert str(caught.value.facts.get("error")).endswith("AUTHORIZATION_FAILED")
    assert caught.value.hint
    return caught.value


def copied(mirror):
    forget_connections()
    copy(mirror)


PRESERVE = [
    ("topic", "", "Read"),
    ("topic", "", "DescribeConfigs"),
    ("topic", "copy-of-", "Read"),
    ("topic", "copy-of-", "Write"),
    ("topic", "copy-of-", "DescribeConfigs"),
    ("topic", "copy-of-", "Create"),
    ("topic", "copy-of-", "Alter"),
    ("topic", "copy-of-", "Delete"),
    ("transactional-id", "logmirror-copy-of-", "Write"),
]
TRANSLATE = [
    *PRESERVE[:2],
    *PRESERVE[3:7],
    ("transactional-id", "logmirror-m-", "Write"),
    ("topic", PROGRESS_TOPIC, "Create"),
    ("topic", PROGRESS_TOPIC, "Read"),
    ("topic", PROGRESS_TOPIC, "Write"),
]


def of(world, short):
    """A short ACL of the lists above, whole."""
    kind, name, operation = short
    if name == PROGRESS_TOPIC:
        return (kind, name, "literal", operation)
    if name == "logmirror-m-":
        return (kind, f"logmirror-m-{world.name}-copy-of-{world.name}-", "prefixed", operation)
    end, pattern = ("-", "prefixed") if kind == "transactional-id" else ("", "literal")
    return (kind, f"{name}{world.name}{end}", pattern, operation)


def test_the_printed_permissions_suffice_for_an_exact_copy(broker):
    world = World(broker)
    world.fill()
    mirror = world.to_cluster()
    assert sorted(printed(mirror)) == sorted(of(world, short) for short in PRESERVE)
    world.grant(printed(mirror))
    copied(mirror)
    target = f"copy-of-{world.name}"
    assert (
        anomalies(broker.bootstrap, world.name, broker.bootstrap, target, partitions=(0, 1)) == []
    )


@pytest.mark.parametrize("without", PRESERVE, ids=lambda short: f"{short[1]}{short[2]}")
def test_no_printed_permission_can_be_omitted_for_an_exact_copy(broker, without):
    world = World(broker)
    world.fill()
    mirror = world.to_cluster()
    if without[2] == "Alter":  # partitions are only added to what is there
        broker.create_topic(f"copy-of-{world.name}")
    left = [acl for acl in printed(mirror) if acl != of(world, without)]
    world.grant(left)
    assert without[2] in refusal(mirror).hint


def test_the_printed_permissions_suffice_for_new_offsets(broker, caplog):
    world = World(broker)
    world.fill()
    mirror = world.to_cluster(offsets="translate")
    assert sorted(printed(mirror)) == sorted(of(world, short) for short in TRANSLATE)
    world.forget_progress()
    world.grant(printed(mirror))
    copied(mirror)
    assert "offset syncs paused" in caplog.text

    caplog.clear()
    another = World(broker)
    another.fill()
    mirror = another.to_cluster(offsets="translate")
    another.grant(printed(mirror) + printed(mirror, optional=True))
    copied(mirror)
    assert not re.search("offset syncs (paused|disabled)", caplog.text)


@pytest.mark.parametrize(
    "without",
    [short for short in TRANSLATE if short not in PRESERVE],
    ids=lambda short: f"{short[1]}{short[2]}",
)
def test_no_printed_permission_can_be_omitted_for_new_offsets(broker, without):
    world = World(broker)
    world.fill()
    mirror = world.to_cluster(offsets="translate")
    world.forget_progress()
    world.grant([acl for acl in printed(mirror) if acl != of(world, without)])
    refusal(mirror)


def test_an_archive_needs_two_rights_at_the_source_given_by_kafkas_own_tool(broker, tmp_path):
    world = World(broker)
    world.fill()
    mirror = world.to_files(tmp_path / "archive")
    wanted = printed(mirror)
    assert [acl[3] for acl in wanted] == ["DescribeConfigs", "Read"]
    assert printed(mirror, optional=True) == []
    for acl in wanted:
        world.grant([other for other in wanted if other != acl])
        assert acl[3] in refusal(mirror).hint
    world.grant([])
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"mirrors": [mirror]}))
    shown = logmirror("acls", "print", "-c", config)
    assert shown.returncode == 0, shown.stderr
    text = shown.stdout.replace("\\\n", " ").replace(world.address, broker.bootstrap)
    (command,) = [line for line in text.splitlines() if line.startswith("kafka-acls.sh")]
    broker.tool("kafka-acls", *shlex.split(command)[1:])
    copied(mirror)
    assert sorted(path.name[:20] for path in (tmp_path / "archive/lake/0").glob("0*"))


def test_optional_permissions_are_marked(broker):
    world = World(broker)
    world.fill()
    mirror = world.to_cluster()
    optional = printed(mirror, optional=True)
    assert {acl[3] for acl in optional} == {"ClusterAction", "Describe", "DescribeConfigs"}
    world.grant(printed(mirror) + optional)
    copied(mirror)
    target = f"copy-of-{world.name}"
    assert (
        anomalies(broker.bootstrap, world.name, broker.bootstrap, target, partitions=(0, 1)) == []
    )


def checked(mirror):
    """Rows of `validate --check` on what is allowed."""
    rows = [row for row in check(settings_of(mirror)) if row.what == "permissions"]
    return {(row.destination, row.severity, row.found.partition(" on the ")[0]) for row in rows}


def test_a_check_reports_missing_permissions_and_writes_nothing(broker):
    world = World(broker)
    world.fill()
    broker.create_topic(f"copy-of-{world.name}", partitions=2)
    mirror = world.to_cluster()
    needed = printed(mirror)
    missing = {"Write", "Delete", "DescribeConfigs"}
    copy_of = f"copy-of-{world.name}"
    world.grant([acl for acl in needed if not (acl[1] == copy_of and acl[3] in missing)])
    notes = {("standby", "note", operation) for operation in ("DescribeConfigs", "ClusterAction")}
    allowed = "required operations are allowed, as far as the brokers report"
    assert checked(mirror) == notes | {
        ("", "ok", allowed),
        ("standby", "error", "Write"),
        ("standby", "error", "DescribeConfigs"),
        ("standby", "warning", "Delete"),
        ("standby", "note", "Describe"),
    }
    world.grant(needed + printed(mirror, optional=True))
    assert checked(mirror) == {("", "ok", allowed), ("standby", "ok", allowed)}
    assert end_of(broker.bootstrap, copy_of) == 0


@pytest.mark.parametrize(
    ("configs", "more", "expected_rows"),
    [
        ({"cleanup.policy": "compact"}, {}, [("note", "cleanup.policy")]),
        ({}, {"compaction": "log"}, [("note", "cleanup.policy")]),
        ({"retention.ms": "30000"}, {}, [("warning", "retention.ms")]),
        ({"cleanup.policy": "compact"}, {"compaction": "log"}, []),
        ({"retention.ms": "3600000"}, {}, []),
    ],
)
def test_a_check_reports_source_settings_that_affect_an_archive(
    broker, tmp_path, configs, more, expected_rows
):
    world = World(broker)
    broker.create_topic(world.name, config=configs)
    mirror = {
        "name": "m",
        "source": {"bootstrap-servers": broker.bootstrap},
        "topic": world.name,
        "partition": 0,
        "destinations": [{"type": "filesystem", "root": str(tmp_path / "archive")}],
        "flush": FLUSH,
    }
    rows = check(settings_of(mirror | more))
    expected = {"source", "permissions", "folder", "position"}
    assert [(row.severity, row.what) for row in rows if row.what not in expected] == expected_rows

"""The ACLs of a configuration as a table: who, where, what, and how it is written.

Method: whole answers are compared. That they are enough and not too many is shown against a broker
in tests/e2e/test_acls.py.
"""

import json
from pathlib import Path

import pytest

from kit.runs.configs import ABSENT, folder, mirror, settings_of
from logmirror import cluster as cluster_package
from logmirror.app.acls import needed_acls
from logmirror.cli.acls import acls_json, acls_text
from logmirror.errors import UsageError
from logmirror.wire import messages

SASL = {"security.protocol": "SASL_SSL", "sasl.mechanism": "PLAIN", "sasl.username": "bob"}
SASL |= {"sasl.password": "x"}


def cluster(servers="b:9092", **more):
    return {"type": "kafka", "bootstrap-servers": servers, "name": "k"} | {
        key.replace("_", "-"): value for key, value in more.items()
    }


def short(found):
    """(resource, name, operation) of what is needed, and of what can be left out."""
    needed = [(a.resource, a.name, a.operation) for a in found.acls if not a.is_optional]
    return needed, [(a.resource, a.name, a.operation) for a in found.acls if a.is_optional]


def test_a_mirror_into_files_reads_and_looks_at_the_topic():
    (found,) = needed_acls(settings_of(mirror()))
    assert (found.bootstrap_servers, found.principal) == ("localhost:9092", "User:ANONYMOUS")
    assert short(found) == (
        [("topic", "orders", "DescribeConfigs"), ("topic", "orders", "Read")],
        [],
    )


@pytest.mark.parametrize(
    ("changes", "needed", "optional"),
    [
        (
            {"topic_sync": "validate", "holes": "fail"},
            {"DescribeConfigs", "Read", "Write"},
            {"cluster DescribeConfigs"},
        ),
        (
            {"topic_sync": "off", "holes": "fail"},
            {"Read", "Write"},
            {"DescribeConfigs", "cluster DescribeConfigs"},
        ),
        (
            {"topic_sync": "off", "offsets": "translate"},
            {"Write", "transactional-id Write"},
            {"DescribeConfigs", "Read", "cluster DescribeConfigs"},
        ),
    ],
)
def test_less_is_needed_where_less_is_done(changes, needed, optional):
    settings = settings_of(mirror(destinations=[cluster(**changes)], flush=ABSENT))
    (there,) = [one for one in needed_acls(settings) if one.bootstrap_servers == "b:9092"]

    def told(acls):
        return {
            operation if resource == "topic" else f"{resource} {operation}"
            for resource, name, operation in acls
            if not name.startswith("__logmirror")
        }

    assert tuple(map(told, short(there))) == (needed, optional)


def test_one_cluster_and_principal_is_told_of_once_and_what_one_needs_is_needed():
    source = {"bootstrap-servers": "b:9092"}
    settings = settings_of(
        mirror("a", destinations=[cluster(offsets="translate", topic_sync="off")], flush=ABSENT),
        mirror("b", topic="other", source=source),
        mirror("c", source=source, topic="orders", destinations=[folder(root="/elsewhere")]),
        mirror("d", source=source, topic="third", enabled=False),
    )
    here, there = needed_acls(settings)
    assert (here.bootstrap_servers, there.bootstrap_servers) == ("localhost:9092", "b:9092")
    needed, _ = short(there)
    assert ("topic", "orders", "Read") in needed  # optional for a, needed by c
    assert len(there.acls) == len({(a.resource, a.name, a.operation) for a in there.acls})
    assert "third" not in acls_text([here, there])


def test_the_principal_is_the_user_of_the_file_or_whom_the_command_names():
    secured = mirror(source={"bootstrap-servers": "a:1", "properties": SASL})
    assert [one.principal for one in needed_acls(settings_of(secured))] == ["User:bob"]
    assert [one.principal for one in needed_acls(settings_of(secured), "User:x")] == ["User:x"]
    by_token = {"security.protocol": "SASL_SSL", "sasl.mechanism": "OAUTHBEARER"}
    by_token |= {"enable.sasl.oauthbearer.unsecure.jwt": "true"}
    unknown = mirror(source={"bootstrap-servers": "a:1", "properties": by_token})
    with pytest.raises(UsageError) as caught:
        needed_acls(settings_of(unknown))
    assert "--principal" in caught.value.hint
    assert needed_acls(settings_of(unknown), "User:x")


def test_commands_and_json_say_the_same():
    settings = settings_of(mirror(topic="o.1", destinations=[cluster()], flush=ABSENT))
    found = needed_acls(settings, "User:CN=mirror bot,O=x")
    text = acls_text(found)
    assert "kafka-acls.sh --bootstrap-server b:9092 --add --allow-principal" in text
    assert "'User:CN=mirror bot,O=x' \\\n" in text
    assert "\n  --transactional-id logmirror-o.1- --resource-pattern-type prefixed " in text
    assert "\n#   --cluster --operation ClusterAction" in text
    told = json.loads(json.dumps(acls_json(found)))
    assert [one["bootstrap_servers"] for one in told] == ["localhost:9092", "b:9092"]
    for one, cluster_told in zip(found, told, strict=True):
        assert [a["operation"] for a in cluster_told["acls"]] == [a.operation for a in one.acls]
        for acl in cluster_told["acls"]:
            assert acl["purpose"] in text


CLIENT = "\n".join(path.read_text() for path in Path(cluster_package.__path__[0]).glob("*.py"))
"""The code that asks brokers, where it says what it does."""


@pytest.mark.parametrize("action", sorted(messages.GRANTS))
def test_a_refusal_says_what_to_grant(action):
    assert any(f'"{action}"' in CLIENT.replace("{whose}", whose) for whose in ("topic", "broker"))
    error = messages.api_error(29, action=action)
    assert messages.GRANTS[action] in error.hint
    assert messages.api_error(3, action=action).hint != error.hint

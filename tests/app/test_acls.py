"""The ACLs of a configuration: principal, cluster, resource, operation, and their text.

Method: whole results are compared. tests/e2e/test_acls.py shows against a broker that they are
enough, and not too many.
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


def test_an_archive_needs_read_and_describe_configs():
    (found,) = needed_acls(settings_of(mirror()))
    assert (found.bootstrap_servers, found.principal) == ("localhost:9092", "User:ANONYMOUS")
    assert short(found) == (
        [("topic", "orders", "DescribeConfigs"), ("topic", "orders", "Read")],
        [],
    )


def test_an_archive_of_groups_needs_describe_on_them_too():
    (found,) = needed_acls(settings_of(mirror(groups={"source-alias": "a"})))
    assert short(found) == (
        [
            ("group", "*", "Describe"),
            ("topic", "orders", "DescribeConfigs"),
            ("topic", "orders", "Read"),
        ],
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
def test_fewer_features_need_fewer_acls(changes, needed, optional):
    settings = settings_of(mirror(destinations=[cluster(**changes)], flush=ABSENT))
    (there,) = [one for one in needed_acls(settings) if one.bootstrap_servers == "b:9092"]

    def operations(acls):
        return {
            operation if resource == "topic" else f"{resource} {operation}"
            for resource, name, operation in acls
            if not name.startswith("__logmirror")
        }

    assert tuple(map(operations, short(there))) == (needed, optional)


def test_a_cluster_and_principal_is_listed_once_and_required_beats_optional():
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


def test_a_take_over_needs_what_mirrormaker_has_left():
    def found(**more):
        groups = {"source-alias": "a"}
        written = cluster(offsets="translate", topic="orders", **more)
        mirrored = mirror("a", topic="orders", destinations=[written], flush=ABSENT, groups=groups)
        _, there = needed_acls(settings_of(mirrored))
        return set(short(there)[0])

    assert found(takeover="mm2") - found() == {
        ("topic", "orders", "Read"),
        ("topic", "mm2-offsets.a.internal", "Read"),
        ("group", "a-mm2", "Describe"),
    }


def test_the_principal_comes_from_the_configuration_or_the_command():
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


def test_text_and_json_have_the_same_acls():
    settings = settings_of(mirror(topic="o.1", destinations=[cluster()], flush=ABSENT))
    found = needed_acls(settings, "User:CN=mirror bot,O=x")
    text = acls_text(found)
    assert "kafka-acls.sh --bootstrap-server b:9092 --add --allow-principal" in text
    assert "'User:CN=mirror bot,O=x' \\\n" in text
    assert "\n  --transactional-id logmirror-o.1- --resource-pattern-type prefixed " in text
    assert "\n#   --cluster --operation ClusterAction" in text
    parsed = json.loads(json.dumps(acls_json(found)))
    assert [one["bootstrap_servers"] for one in parsed] == ["localhost:9092", "b:9092"]
    for one, of_cluster in zip(found, parsed, strict=True):
        assert [a["operation"] for a in of_cluster["acls"]] == [a.operation for a in one.acls]
        for acl in of_cluster["acls"]:
            assert acl["purpose"] in text


CLIENT = "\n".join(path.read_text() for path in Path(cluster_package.__path__[0]).glob("*.py"))
"""The client's code, which names the action of each request."""


@pytest.mark.parametrize("action", sorted(messages.GRANTS))
def test_a_refused_request_names_the_missing_acl(action):
    assert any(f'"{action}"' in CLIENT.replace("{whose}", whose) for whose in ("topic", "broker"))
    error = messages.api_error(29, action=action)
    assert messages.GRANTS[action] in error.hint
    assert messages.api_error(3, action=action).hint != error.hint

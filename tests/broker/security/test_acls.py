"""Goal: ACLs mean what they mean in Apache Kafka.

Method: an index of ACLs is compared with a plain reading of Kafka's rules over drawn sets of ACLs;
the rules that are easy to get wrong have an example each.
"""

from __future__ import annotations

from typing import Final

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from logmirror.broker.security.acls import (
    OPERATIONS,
    Acl,
    AclFilter,
    Acls,
    Operation,
    PatternType,
    Permission,
    ResourceType,
)
from logmirror.broker.security.authorization import Authorizer

TOPIC: Final = ResourceType.TOPIC
LITERAL, PREFIXED = PatternType.LITERAL, PatternType.PREFIXED
ALLOW, DENY = Permission.ALLOW, Permission.DENY
ALICE, BOB = "User:alice", "User:bob"
HERE, THERE = "10.0.0.1", "10.0.0.2"

names = st.sampled_from(["a", "ab", "abc", "b", "*"])
acls = st.builds(
    Acl,
    st.sampled_from([TOPIC, ResourceType.GROUP]),
    st.sampled_from([LITERAL, PREFIXED]),
    names,
    st.sampled_from([ALICE, BOB, "User:*"]),
    st.sampled_from([HERE, THERE, "*"]),
    st.sampled_from(list(Operation)),
    st.sampled_from([ALLOW, ALLOW, DENY]),
)


def _allows_by_the_book(  # noqa: PLR0913, PLR0917  # as in the index
    known: list[Acl], who: str, host: str, operation: int, resource_type: int, name: str
) -> bool:
    """Kafka's rules, one after the other."""
    implied = {
        Operation.DESCRIBE: (Operation.READ, Operation.WRITE, Operation.DELETE, Operation.ALTER),
        Operation.DESCRIBE_CONFIGS: (Operation.ALTER_CONFIGS,),
    }
    matching = []
    for acl in known:
        is_prefix = acl.pattern_type == PREFIXED and name.startswith(acl.resource_name)
        is_name = acl.pattern_type == LITERAL and acl.resource_name in (name, "*")
        if acl.resource_type == resource_type and (is_prefix or is_name):
            matching.append(acl)
    mine = [a for a in matching if a.principal in (who, "User:*") and a.host in (host, "*")]
    denied = any(a.permission == DENY and a.operation in (operation, Operation.ALL) for a in mine)
    enough = (operation, Operation.ALL, *implied.get(Operation(operation), ()))
    allowed = any(a.permission == ALLOW and a.operation in enough for a in mine)
    return allowed and not denied


@settings(max_examples=300, deadline=None)
@given(
    st.lists(acls, max_size=12),
    st.integers(0, 11),
    st.sampled_from([ALICE, BOB]),
    st.sampled_from([HERE, THERE]),
)
def test_the_index_agrees_with_the_rules(known, removed, who, host):
    index = Acls(known)
    left = list(dict.fromkeys(known))
    if removed < len(left):
        index.remove(left.pop(removed))
    for name in ("a", "ab", "abc", "abcd", "b", "c"):
        for operation in Operation:
            expected = _allows_by_the_book(left, who, host, operation, TOPIC, name)
            assert index.allow(who, host, operation, TOPIC, name) == expected, (name, operation)


@settings(max_examples=300, deadline=None)
@given(st.lists(acls, max_size=6), st.sampled_from([Operation.WRITE, Operation.READ]))
def test_any_resource_agrees_with_the_rules(known, operation):
    """A name that no ACL spells out shows what prefixes and wildcards leave over."""
    candidates = ["a", "ab", "abc", "b", "*x", "a~", "ab~", "abc~", "b~", "~"]
    found = Acls(known).allow_any(ALICE, HERE, operation, TOPIC)

    some = any(_allows_by_the_book(known, ALICE, HERE, operation, TOPIC, n) for n in candidates)
    # A denied name below an allowed wildcard or prefix does not take the others away.
    assert found == some


def _acl(  # noqa: PLR0913  # one for each part, most with a default
    operation, permission=ALLOW, *, name="orders", pattern=LITERAL, who=ALICE, host="*"
):
    return Acl(TOPIC, pattern, name, who, host, operation, permission)


def _operations(*known: Acl) -> set[int]:
    class Client:
        principal, client_host = ALICE, HERE

    return Authorizer(["User:root"], known).operations(Client(), TOPIC, "orders")


@pytest.mark.parametrize(
    ("known", "allowed"),
    [
        ([], set()),
        ([_acl(Operation.READ)], {Operation.READ, Operation.DESCRIBE}),
        ([_acl(Operation.CREATE)], {Operation.CREATE}),
        (
            [_acl(Operation.ALTER_CONFIGS)],
            {Operation.ALTER_CONFIGS, Operation.DESCRIBE_CONFIGS},
        ),
        ([_acl(Operation.ALL)], set(OPERATIONS[TOPIC])),
        (
            [_acl(Operation.ALL), _acl(Operation.WRITE, DENY)],
            set(OPERATIONS[TOPIC]) - {Operation.WRITE},
        ),
        ([_acl(Operation.ALL), _acl(Operation.ALL, DENY, who="User:*")], set()),
        ([_acl(Operation.READ), _acl(Operation.READ, DENY)], {Operation.DESCRIBE}),
        ([_acl(Operation.READ, host=THERE)], set()),
        ([_acl(Operation.WRITE, name="ord", pattern=PREFIXED)], {4, 8}),
        ([_acl(Operation.WRITE, name="*")], {4, 8}),
        ([_acl(Operation.WRITE, name="*", pattern=PREFIXED)], set()),
    ],
    ids=range(12),
)
def test_what_is_allowed(known, allowed):
    assert _operations(*known) == allowed


def test_super_users_may_do_everything_and_without_one_everybody():
    class Client:
        principal, client_host = ALICE, HERE

    denial = _acl(Operation.ALL, DENY)
    assert Authorizer([ALICE], [denial]).allows(Client(), Operation.READ, TOPIC, "orders")
    assert Authorizer([], [denial]).allows(Client(), Operation.READ, TOPIC, "orders")
    assert not Authorizer([BOB], []).allows(Client(), Operation.READ, TOPIC, "orders")


def test_a_change_applies_to_what_was_decided_before():
    class Client:
        principal, client_host = ALICE, HERE

    authorizer = Authorizer([BOB], [])
    assert not authorizer.allows(Client(), Operation.READ, TOPIC, "orders")
    authorizer.changed([_acl(Operation.READ)], [])
    assert authorizer.allows(Client(), Operation.READ, TOPIC, "orders")
    authorizer.changed([], [_acl(Operation.READ)])
    assert not authorizer.allows(Client(), Operation.READ, TOPIC, "orders")


@pytest.mark.parametrize(
    ("pattern", "name", "found"),
    [
        (PatternType.ANY, None, {"orders", "ord", "*"}),
        (PatternType.ANY, "ord", {"ord"}),
        (PatternType.MATCH, "orders", {"orders", "ord", "*"}),
        (PatternType.MATCH, "or", {"*"}),
        (PatternType.LITERAL, "orders", {"orders"}),
        (PatternType.LITERAL, None, {"orders", "*"}),
        (PatternType.PREFIXED, "ord", {"ord"}),
        (PatternType.PREFIXED, "orders", set()),
    ],
)
def test_filters(pattern, name, found):
    known = [
        _acl(Operation.READ),
        _acl(Operation.READ, name="ord", pattern=PREFIXED),
        _acl(Operation.READ, name="*"),
    ]
    wanted = AclFilter(TOPIC, pattern, name, None, None, 1, 1)

    assert {acl.resource_name for acl in known if wanted.matches(acl)} == found

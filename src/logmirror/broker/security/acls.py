"""Kafka's access control lists: what matches, and what is allowed. No I/O.

An operation on a resource is allowed if an ACL with `ALLOW` matches and none with `DENY` does.

- An ACL matches a resource by its name (`LITERAL`), by a prefix of its name (`PREFIXED`), or as
  literal `*`; a principal by name or `User:*`; a host by its IP address or `*`.
- `ALL` stands for every operation. To allow `READ`, `WRITE`, `DELETE` or `ALTER` also allows
  `DESCRIBE`; to allow `ALTER_CONFIGS` also allows `DESCRIBE_CONFIGS`. A denial implies nothing.
- Super users may do everything. Without an ACL that matches, everybody else may do nothing: Kafka's
  `allow.everyone.if.no.acl.found=false`.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

WILDCARD: Final = "*"
EVERY_USER: Final = "User:*"
CLUSTER_NAME: Final = "kafka-cluster"
_ANY: Final = 1


class ResourceType(enum.IntEnum):
    """What an ACL is about, by Kafka's numbers."""

    TOPIC = 2
    GROUP = 3
    CLUSTER = 4
    TRANSACTIONAL_ID = 5
    DELEGATION_TOKEN = 6
    USER = 7


class PatternType(enum.IntEnum):
    """How the name of an ACL is compared. Only filters have `ANY` and `MATCH`."""

    ANY = 1
    MATCH = 2
    LITERAL = 3
    PREFIXED = 4


class Operation(enum.IntEnum):
    """What is done, by Kafka's numbers."""

    ALL = 2
    READ = 3
    WRITE = 4
    CREATE = 5
    DELETE = 6
    ALTER = 7
    DESCRIBE = 8
    CLUSTER_ACTION = 9
    DESCRIBE_CONFIGS = 10
    ALTER_CONFIGS = 11
    IDEMPOTENT_WRITE = 12
    CREATE_TOKENS = 13
    DESCRIBE_TOKENS = 14
    TWO_PHASE_COMMIT = 15


class Permission(enum.IntEnum):
    """Whether an ACL denies or allows."""

    DENY = 2
    ALLOW = 3


_CONFIGS: Final = frozenset({Operation.DESCRIBE_CONFIGS, Operation.ALTER_CONFIGS})
OPERATIONS: Final = {
    ResourceType.TOPIC: _CONFIGS
    | {
        Operation.READ,
        Operation.WRITE,
        Operation.CREATE,
        Operation.DELETE,
        Operation.ALTER,
        Operation.DESCRIBE,
    },
    ResourceType.GROUP: _CONFIGS | {Operation.READ, Operation.DELETE, Operation.DESCRIBE},
    ResourceType.CLUSTER: _CONFIGS
    | {
        Operation.CREATE,
        Operation.ALTER,
        Operation.DESCRIBE,
        Operation.CLUSTER_ACTION,
        Operation.IDEMPOTENT_WRITE,
    },
    ResourceType.TRANSACTIONAL_ID: frozenset({Operation.WRITE, Operation.DESCRIBE}),
}
"""The operations that exist for a resource; responses list those that are allowed (KIP-430)."""

_ALLOWED_BY: Final = {
    Operation.DESCRIBE: frozenset(
        {Operation.READ, Operation.WRITE, Operation.DELETE, Operation.ALTER}
    ),
    Operation.DESCRIBE_CONFIGS: frozenset({Operation.ALTER_CONFIGS}),
}
"""The operations whose permission implies this one."""


class Acl(NamedTuple):
    """One access control entry, in the order of Kafka's filters."""

    resource_type: int
    pattern_type: int
    resource_name: str
    principal: str
    host: str
    operation: int
    permission: int

    def concerns(self, principal: str, host: str) -> bool:
        """Whether it is about this principal at this address."""
        return self.principal in (principal, EVERY_USER) and self.host in (host, WILDCARD)


class AclFilter(NamedTuple):
    """Which ACLs to list or delete. None, and 1 for numbers, stand for any value."""

    resource_type: int
    pattern_type: int
    resource_name: str | None
    principal: str | None
    host: str | None
    operation: int
    permission: int

    def matches(self, acl: Acl) -> bool:
        """Whether an ACL passes the filter."""
        return (
            self.resource_type in (_ANY, acl.resource_type)
            and self.principal in (None, acl.principal)
            and self.host in (None, acl.host)
            and self.operation in (_ANY, acl.operation)
            and self.permission in (_ANY, acl.permission)
            and self._matches_name(acl)
        )

    def _matches_name(self, acl: Acl) -> bool:
        if self.pattern_type not in (PatternType.ANY, PatternType.MATCH, acl.pattern_type):
            return False
        if self.resource_name is None or self.pattern_type != PatternType.MATCH:
            return self.resource_name in (None, acl.resource_name)
        if acl.pattern_type == PatternType.PREFIXED:
            return self.resource_name.startswith(acl.resource_name)
        return acl.resource_name in (self.resource_name, WILDCARD)


class Acls:
    """A set of ACLs, indexed by the resources that they match."""

    def __init__(self, acls: Iterable[Acl] = ()) -> None:
        self._by_pattern: dict[tuple[int, int, str], set[Acl]] = {}
        self._prefix_lengths: dict[int, set[int]] = {}
        self._all: set[Acl] = set()
        for acl in acls:
            self.add(acl)

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[Acl]:
        return iter(self._all)

    def __contains__(self, acl: object) -> bool:
        return acl in self._all

    def add(self, acl: Acl) -> None:
        """Add an ACL."""
        self._all.add(acl)
        self._by_pattern.setdefault(acl[:3], set()).add(acl)
        if acl.pattern_type == PatternType.PREFIXED:
            lengths = self._prefix_lengths.setdefault(acl.resource_type, set())
            lengths.add(len(acl.resource_name))

    def remove(self, acl: Acl) -> None:
        """Remove an ACL."""
        self._all.remove(acl)
        found = self._by_pattern[acl[:3]]
        found.remove(acl)
        if not found:
            del self._by_pattern[acl[:3]]

    def _matching(self, resource_type: int, name: str) -> Iterator[Acl]:
        literals = (PatternType.LITERAL, name), (PatternType.LITERAL, WILDCARD)
        lengths = self._prefix_lengths.get(resource_type, ())
        prefixes = [(PatternType.PREFIXED, name[:n]) for n in lengths if n <= len(name)]
        for pattern_type, pattern in dict.fromkeys((*literals, *prefixes)):
            yield from self._by_pattern.get((resource_type, int(pattern_type), pattern), ())

    def allow(
        self, principal: str, host: str, operation: Operation, resource_type: int, name: str
    ) -> bool:
        """Whether an ACL allows an operation and none denies it."""
        allowing = {operation, Operation.ALL, *_ALLOWED_BY.get(operation, ())}
        is_allowed = False
        for acl in self._matching(resource_type, name):
            if not acl.concerns(principal, host):
                continue
            if acl.permission == Permission.DENY:
                if acl.operation in (operation, Operation.ALL):
                    return False
            elif acl.operation in allowing:
                is_allowed = True
        return is_allowed

    def allow_any(
        self, principal: str, host: str, operation: Operation, resource_type: int
    ) -> bool:
        """Whether there can be a resource of this type on which the operation is allowed."""
        mine = [
            acl
            for acl in self._all
            if acl.resource_type == resource_type
            and acl.concerns(principal, host)
            and acl.operation in (operation, Operation.ALL)
        ]
        denied = {acl[1:3] for acl in mine if acl.permission == Permission.DENY}
        if (PatternType.LITERAL, WILDCARD) in denied:
            return False
        prefixes = tuple(name for kind, name in denied if kind == PatternType.PREFIXED)
        return any(
            acl.permission == Permission.ALLOW
            and acl[1:3] not in denied
            and (acl.resource_name == WILDCARD or not acl.resource_name.startswith(prefixes))
            for acl in mine
        )

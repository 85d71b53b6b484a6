"""Which operation each request needs on which resource, and whether its client may do it.

A new API needs a row in `REQUIRED`, and its handler a call of `Authorizer.refusal` for each
resource that it reads or changes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Protocol

from logmirror.broker.apis import Api
from logmirror.broker.error_codes import ErrorCode
from logmirror.broker.security.acls import (
    CLUSTER_NAME,
    OPERATIONS,
    WILDCARD,
    Acls,
    Operation,
    ResourceType,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from logmirror.broker.security.acls import Acl

ANONYMOUS: Final = "User:ANONYMOUS"
MAX_ACLS: Final = 10_000
_KEPT_DECISIONS: Final = 50_000

_TOPIC, _GROUP = ResourceType.TOPIC, ResourceType.GROUP
_CLUSTER, _TRANSACTIONAL_ID = ResourceType.CLUSTER, ResourceType.TRANSACTIONAL_ID

REQUIRED: Final[Mapping[int, Mapping[ResourceType, Operation]]] = {
    Api.PRODUCE: {_TOPIC: Operation.WRITE, _TRANSACTIONAL_ID: Operation.WRITE},
    Api.FETCH: {_TOPIC: Operation.READ},
    Api.LIST_OFFSETS: {_TOPIC: Operation.DESCRIBE},
    Api.METADATA: {_TOPIC: Operation.DESCRIBE},
    Api.OFFSET_COMMIT: {_GROUP: Operation.READ, _TOPIC: Operation.READ},
    Api.OFFSET_FETCH: {_GROUP: Operation.DESCRIBE, _TOPIC: Operation.DESCRIBE},
    Api.FIND_COORDINATOR: {_GROUP: Operation.DESCRIBE, _TRANSACTIONAL_ID: Operation.DESCRIBE},
    Api.JOIN_GROUP: {_GROUP: Operation.READ},
    Api.HEARTBEAT: {_GROUP: Operation.READ},
    Api.LEAVE_GROUP: {_GROUP: Operation.READ},
    Api.SYNC_GROUP: {_GROUP: Operation.READ},
    Api.DESCRIBE_GROUPS: {_GROUP: Operation.DESCRIBE},
    Api.LIST_GROUPS: {_CLUSTER: Operation.DESCRIBE, _GROUP: Operation.DESCRIBE},
    Api.SASL_HANDSHAKE: {},
    Api.API_VERSIONS: {},
    Api.CREATE_TOPICS: {_CLUSTER: Operation.CREATE, _TOPIC: Operation.CREATE},
    Api.DELETE_TOPICS: {_TOPIC: Operation.DELETE},
    Api.DELETE_RECORDS: {_TOPIC: Operation.DELETE},
    Api.INIT_PRODUCER_ID: {
        _TRANSACTIONAL_ID: Operation.WRITE,
        _CLUSTER: Operation.IDEMPOTENT_WRITE,
    },
    Api.OFFSET_FOR_LEADER_EPOCH: {_TOPIC: Operation.DESCRIBE},
    Api.ADD_PARTITIONS_TO_TXN: {
        _TRANSACTIONAL_ID: Operation.WRITE,
        _TOPIC: Operation.WRITE,
        _CLUSTER: Operation.CLUSTER_ACTION,  # from version 4 on: for brokers
    },
    Api.ADD_OFFSETS_TO_TXN: {_TRANSACTIONAL_ID: Operation.WRITE, _GROUP: Operation.READ},
    Api.END_TXN: {_TRANSACTIONAL_ID: Operation.WRITE},
    Api.WRITE_TXN_MARKERS: {_CLUSTER: Operation.CLUSTER_ACTION},
    Api.TXN_OFFSET_COMMIT: {
        _TRANSACTIONAL_ID: Operation.WRITE,
        _GROUP: Operation.READ,
        _TOPIC: Operation.READ,
    },
    Api.DESCRIBE_ACLS: {_CLUSTER: Operation.DESCRIBE},
    Api.CREATE_ACLS: {_CLUSTER: Operation.ALTER},
    Api.DELETE_ACLS: {_CLUSTER: Operation.ALTER},
    Api.DESCRIBE_CONFIGS: {
        _TOPIC: Operation.DESCRIBE_CONFIGS,
        _CLUSTER: Operation.DESCRIBE_CONFIGS,
    },
    Api.ALTER_CONFIGS: {_TOPIC: Operation.ALTER_CONFIGS, _CLUSTER: Operation.ALTER_CONFIGS},
    Api.ALTER_REPLICA_LOG_DIRS: {_CLUSTER: Operation.ALTER},
    Api.DESCRIBE_LOG_DIRS: {_CLUSTER: Operation.DESCRIBE},
    Api.SASL_AUTHENTICATE: {},
    Api.CREATE_PARTITIONS: {_TOPIC: Operation.ALTER},
    Api.DELETE_GROUPS: {_GROUP: Operation.DELETE},
    Api.INCREMENTAL_ALTER_CONFIGS: {
        _TOPIC: Operation.ALTER_CONFIGS,
        _CLUSTER: Operation.ALTER_CONFIGS,
    },
    Api.ALTER_PARTITION_REASSIGNMENTS: {_CLUSTER: Operation.ALTER},
    Api.LIST_PARTITION_REASSIGNMENTS: {_CLUSTER: Operation.DESCRIBE},
    Api.OFFSET_DELETE: {_GROUP: Operation.DELETE, _TOPIC: Operation.READ},
    Api.DESCRIBE_CLIENT_QUOTAS: {_CLUSTER: Operation.DESCRIBE_CONFIGS},
    Api.ALTER_CLIENT_QUOTAS: {_CLUSTER: Operation.ALTER_CONFIGS},
    Api.DESCRIBE_USER_SCRAM_CREDENTIALS: {_CLUSTER: Operation.DESCRIBE},
    Api.ALTER_USER_SCRAM_CREDENTIALS: {_CLUSTER: Operation.ALTER},
    Api.DESCRIBE_CLUSTER: {},
    Api.DESCRIBE_PRODUCERS: {_TOPIC: Operation.READ},
    Api.DESCRIBE_TRANSACTIONS: {
        _TRANSACTIONAL_ID: Operation.DESCRIBE,
        _TOPIC: Operation.DESCRIBE,
    },
    Api.LIST_TRANSACTIONS: {_TRANSACTIONAL_ID: Operation.DESCRIBE},
    Api.CONSUMER_GROUP_HEARTBEAT: {_GROUP: Operation.READ, _TOPIC: Operation.DESCRIBE},
    Api.CONSUMER_GROUP_DESCRIBE: {_GROUP: Operation.DESCRIBE},
}
"""The operation that a request needs, by API and type of resource, as in Apache Kafka. A request
with several types needs the one of the resources that it names; CreateTopics either of them."""

_REFUSED: Final = {
    _TOPIC: ErrorCode.TOPIC_AUTHORIZATION_FAILED,
    _GROUP: ErrorCode.GROUP_AUTHORIZATION_FAILED,
    _CLUSTER: ErrorCode.CLUSTER_AUTHORIZATION_FAILED,
    _TRANSACTIONAL_ID: ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
}


class Client(Protocol):
    """Who sent a request."""

    principal: str
    """`User:name`; `User:ANONYMOUS` without authentication."""

    client_host: str
    """Its IP address."""


class Authorizer:
    """Decides from ACLs and super users. All methods run on the event loop.

    Without super users, ACLs are not enforced: every client may do everything.

    Args:
        super_users: Principals that may do everything.
        acls: The stored ACLs.
    """

    def __init__(self, super_users: Collection[str] = (), acls: Collection[Acl] = ()) -> None:
        self._super_users = frozenset(super_users)
        self.acls = Acls(acls)
        self._decisions: dict[tuple[str, str, int, int, str], bool] = {}
        self._names_hosts = self._has_hosts()

    @property
    def is_enabled(self) -> bool:
        """Whether ACLs are enforced."""
        return bool(self._super_users)

    def allows(
        self, client: Client, operation: Operation, resource_type: ResourceType, name: str
    ) -> bool:
        """Whether the client may do this to the resource."""
        if not self._super_users or client.principal in self._super_users:
            return True
        key = client.principal, client.client_host, operation, resource_type, name
        known = self._decisions.get(key)
        if known is None:
            known = self.acls.allow(*key[:2], operation, resource_type, name)
            if len(self._decisions) >= _KEPT_DECISIONS:
                self._decisions.clear()
            self._decisions[key] = known
        return known

    def allows_any(self, client: Client, operation: Operation, resource_type: ResourceType) -> bool:
        """Whether the client may do this to any resource of the type."""
        if not self._super_users or client.principal in self._super_users:
            return True
        return self.acls.allow_any(client.principal, client.client_host, operation, resource_type)

    def viewer(self, client: Client) -> str:
        """Return on what it depends which resources the client may use; empty: it may use all."""
        if not self._super_users or client.principal in self._super_users:
            return ""
        return f"{client.principal} {client.client_host if self._names_hosts else WILDCARD}"

    def _has_hosts(self) -> bool:
        return any(acl.host != WILDCARD for acl in self.acls)

    def refusal(
        self,
        client: Client,
        api: Api,
        resource_type: ResourceType = ResourceType.CLUSTER,
        name: str = CLUSTER_NAME,
    ) -> ErrorCode:
        """Return the error code for a request on this resource; NONE if the client may send it."""
        if self.allows(client, REQUIRED[api][resource_type], resource_type, name):
            return ErrorCode.NONE
        return _REFUSED[resource_type]

    def operations(
        self, client: Client, resource_type: ResourceType, name: str = CLUSTER_NAME
    ) -> set[int]:
        """Return the operations that the client may do, as responses list them (KIP-430)."""
        return {
            int(operation)
            for operation in OPERATIONS[resource_type]
            if self.allows(client, operation, resource_type, name)
        }

    def changed(self, added: Collection[Acl], removed: Collection[Acl]) -> None:
        """Apply a change that is stored."""
        for acl in added:
            self.acls.add(acl)
        for acl in removed:
            if acl in self.acls:
                self.acls.remove(acl)
        self._decisions.clear()
        self._names_hosts = self._has_hosts()

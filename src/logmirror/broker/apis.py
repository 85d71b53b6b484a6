"""The APIs and versions that the broker implements.

ApiVersions advertises them; a client uses the highest version that both sides support.

Deviations from what a row suggests:

- Produce is advertised from version 0, but only versions 3 and later are implemented. librdkafka
  before 2.16 reads "from 3" as a broker without compression and silently sends gzip, lz4 and snappy
  batches as codec 0 (KAFKA-18659).
- The feature `transaction.version` is finalized at 2, so clients of Apache Kafka 4 use transaction
  version 2 (KIP-890, part 2): Produce 12, EndTxn 5 and TxnOffsetCommit 5. Others use version 1.
- AddPartitionsToTxn from version 4 on is for brokers; clients use 3 at most, as with Apache Kafka.
- OffsetForLeaderEpoch below 2 and WriteTxnMarkers below 1 are not implemented, as in Apache Kafka
4.
- An ApiVersions request above the last version gets UNSUPPORTED_VERSION (35) in the layout of
  version 0, which every client can read.
"""

from __future__ import annotations

import enum
from typing import Final

from logmirror.wire import serve_consumer_groups, serve_fetch, serve_produce


class Api(enum.IntEnum):
    """Kafka's API keys."""

    PRODUCE = serve_produce.API_KEY
    FETCH = serve_fetch.API_KEY
    LIST_OFFSETS = 2
    METADATA = 3
    OFFSET_COMMIT = 8
    OFFSET_FETCH = 9
    FIND_COORDINATOR = 10
    JOIN_GROUP = 11
    HEARTBEAT = 12
    LEAVE_GROUP = 13
    SYNC_GROUP = 14
    DESCRIBE_GROUPS = 15
    LIST_GROUPS = 16
    SASL_HANDSHAKE = 17
    API_VERSIONS = 18
    CREATE_TOPICS = 19
    DELETE_TOPICS = 20
    DELETE_RECORDS = 21
    INIT_PRODUCER_ID = 22
    OFFSET_FOR_LEADER_EPOCH = 23
    ADD_PARTITIONS_TO_TXN = 24
    ADD_OFFSETS_TO_TXN = 25
    END_TXN = 26
    WRITE_TXN_MARKERS = 27
    TXN_OFFSET_COMMIT = 28
    DESCRIBE_ACLS = 29
    CREATE_ACLS = 30
    DELETE_ACLS = 31
    DESCRIBE_CONFIGS = 32
    ALTER_CONFIGS = 33
    ALTER_REPLICA_LOG_DIRS = 34
    DESCRIBE_LOG_DIRS = 35
    SASL_AUTHENTICATE = 36
    CREATE_PARTITIONS = 37
    DELETE_GROUPS = 42
    INCREMENTAL_ALTER_CONFIGS = 44
    ALTER_PARTITION_REASSIGNMENTS = 45
    LIST_PARTITION_REASSIGNMENTS = 46
    OFFSET_DELETE = 47
    DESCRIBE_CLIENT_QUOTAS = 48
    ALTER_CLIENT_QUOTAS = 49
    DESCRIBE_USER_SCRAM_CREDENTIALS = 50
    ALTER_USER_SCRAM_CREDENTIALS = 51
    DESCRIBE_CLUSTER = 60
    DESCRIBE_PRODUCERS = 61
    DESCRIBE_TRANSACTIONS = 65
    LIST_TRANSACTIONS = 66
    CONSUMER_GROUP_HEARTBEAT = serve_consumer_groups.HEARTBEAT_KEY
    CONSUMER_GROUP_DESCRIBE = serve_consumer_groups.DESCRIBE_KEY


VERSIONS: Final[dict[int, tuple[int, int]]] = {
    Api.PRODUCE: (serve_produce.FIRST_VERSION, serve_produce.LAST_VERSION),
    Api.FETCH: (serve_fetch.FIRST_VERSION, serve_fetch.LAST_VERSION),
    Api.LIST_OFFSETS: (1, 10),
    Api.METADATA: (0, 12),
    Api.OFFSET_COMMIT: (2, 9),
    Api.OFFSET_FETCH: (1, 9),
    Api.FIND_COORDINATOR: (0, 6),
    Api.JOIN_GROUP: (0, 9),
    Api.HEARTBEAT: (0, 4),
    Api.LEAVE_GROUP: (0, 5),
    Api.SYNC_GROUP: (0, 5),
    Api.DESCRIBE_GROUPS: (0, 6),
    Api.LIST_GROUPS: (0, 5),
    Api.SASL_HANDSHAKE: (0, 1),
    Api.API_VERSIONS: (0, 4),
    Api.CREATE_TOPICS: (2, 7),
    Api.DELETE_TOPICS: (1, 6),
    Api.DELETE_RECORDS: (0, 2),
    Api.INIT_PRODUCER_ID: (0, 5),
    Api.OFFSET_FOR_LEADER_EPOCH: (2, 4),
    Api.ADD_PARTITIONS_TO_TXN: (0, 5),
    Api.ADD_OFFSETS_TO_TXN: (0, 4),
    Api.END_TXN: (0, 5),
    Api.WRITE_TXN_MARKERS: (1, 1),
    Api.TXN_OFFSET_COMMIT: (0, 5),
    Api.DESCRIBE_ACLS: (1, 3),
    Api.CREATE_ACLS: (1, 3),
    Api.DELETE_ACLS: (1, 3),
    Api.DESCRIBE_CONFIGS: (1, 4),
    Api.ALTER_CONFIGS: (0, 2),
    Api.ALTER_REPLICA_LOG_DIRS: (1, 2),
    Api.DESCRIBE_LOG_DIRS: (1, 5),
    Api.SASL_AUTHENTICATE: (0, 2),
    Api.CREATE_PARTITIONS: (0, 3),
    Api.DELETE_GROUPS: (0, 2),
    Api.INCREMENTAL_ALTER_CONFIGS: (0, 1),
    Api.ALTER_PARTITION_REASSIGNMENTS: (0, 1),
    Api.LIST_PARTITION_REASSIGNMENTS: (0, 0),
    Api.OFFSET_DELETE: (0, 0),
    Api.DESCRIBE_CLIENT_QUOTAS: (0, 1),
    Api.ALTER_CLIENT_QUOTAS: (0, 1),
    Api.DESCRIBE_USER_SCRAM_CREDENTIALS: (0, 0),
    Api.ALTER_USER_SCRAM_CREDENTIALS: (0, 0),
    Api.DESCRIBE_CLUSTER: (0, 1),
    Api.DESCRIBE_PRODUCERS: (0, 0),
    Api.DESCRIBE_TRANSACTIONS: (0, 0),
    Api.LIST_TRANSACTIONS: (0, 1),
    Api.CONSUMER_GROUP_HEARTBEAT: (
        serve_consumer_groups.FIRST_VERSION,
        serve_consumer_groups.LAST_VERSION,
    ),
    Api.CONSUMER_GROUP_DESCRIBE: (
        serve_consumer_groups.FIRST_VERSION,
        serve_consumer_groups.LAST_VERSION,
    ),
}
"""First and last implemented version, by API key."""

ADVERTISED_FROM: Final[dict[int, int]] = {Api.PRODUCE: 0}
"""First advertised version, where it differs from the first implemented one."""


TRANSACTION_VERSION: Final = 2
"""The finalized level of the feature `transaction.version`."""


def has_response(api_key: int, version: int) -> bool:
    """Whether the broker implements this version of the API."""
    first, last = VERSIONS.get(api_key, (0, -1))
    return first <= version <= last

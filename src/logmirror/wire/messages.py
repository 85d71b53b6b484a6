"""Kafka's API keys and error codes, and the exception class for each code.

Invariants:
1. `ERRORS` has every code of Apache Kafka 4.3 (-1 to 133); code, name, `retriable` and
   `stale_metadata` are Kafka's own (`org.apache.kafka.common.protocol.Errors`: a subclass of
   RetriableException, of InvalidMetadataException).
2. `kind` states what the user must do once retries have ended, see `logmirror.errors`. A code that
   leaves open whether the request took effect is an `OutcomeUnknownError`.
3. An unknown code, from a newer broker, is `UnavailableError` and not retriable: it allows no
   conclusion about the data.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from logmirror.errors import (
    CorruptionError,
    FencedError,
    LogmirrorError,
    OutcomeUnknownError,
    PositionError,
    UnavailableError,
    UsageError,
)

PRODUCE: Final = 0
FETCH: Final = 1
LIST_OFFSETS: Final = 2
METADATA: Final = 3
FIND_COORDINATOR: Final = 10
API_VERSIONS: Final = 18
CREATE_TOPICS: Final = 19
DELETE_TOPICS: Final = 20
DELETE_RECORDS: Final = 21
INIT_PRODUCER_ID: Final = 22
OFFSET_FOR_LEADER_EPOCH: Final = 23
WRITE_TXN_MARKERS: Final = 27
DESCRIBE_CONFIGS: Final = 32
DESCRIBE_CLUSTER: Final = 60
DESCRIBE_PRODUCERS: Final = 61
DESCRIBE_TRANSACTIONS: Final = 65

NONE: Final = 0
OFFSET_OUT_OF_RANGE: Final = 1
CORRUPT_MESSAGE: Final = 2
UNKNOWN_TOPIC_OR_PARTITION: Final = 3
LEADER_NOT_AVAILABLE: Final = 5
NOT_LEADER_OR_FOLLOWER: Final = 6
COORDINATOR_NOT_AVAILABLE: Final = 15
NOT_COORDINATOR: Final = 16
TOPIC_AUTHORIZATION_FAILED: Final = 29
CLUSTER_AUTHORIZATION_FAILED: Final = 31
UNSUPPORTED_SASL_MECHANISM: Final = 33
UNSUPPORTED_VERSION: Final = 35
INVALID_TXN_STATE: Final = 48
CONCURRENT_TRANSACTIONS: Final = 51
OPERATION_NOT_ATTEMPTED: Final = 55
SASL_AUTHENTICATION_FAILED: Final = 58
UNKNOWN_TOPIC_ID: Final = 100
INCONSISTENT_TOPIC_ID: Final = 103
TRANSACTIONAL_ID_NOT_FOUND: Final = 105


class ApiError(NamedTuple):
    """The meaning of one error code."""

    code: int
    name: str
    kind: type[LogmirrorError]
    text: str
    """Message in lower case, without a full stop: fits after "could not fetch: "."""
    retriable: bool
    """Whether the same request may succeed later."""
    stale_metadata: bool
    """Whether to refresh the topic's metadata before the next attempt."""


_FINAL: Final = (False, False)
_RETRY: Final = (True, False)
_REFRESH: Final = (True, True)

_Row = tuple[int, str, type[LogmirrorError], str, tuple[bool, bool]]
_TABLE: Final[tuple[_Row, ...]] = (
    (-1, "UNKNOWN_SERVER_ERROR", UnavailableError, "the broker met an unexpected error", _FINAL),
    (1, "OFFSET_OUT_OF_RANGE", PositionError, "the offset is outside the log", _FINAL),
    (2, "CORRUPT_MESSAGE", CorruptionError, "a batch failed its checksum or rules", _RETRY),
    (3, "UNKNOWN_TOPIC_OR_PARTITION", UsageError, "no such topic or partition there", _REFRESH),
    (4, "INVALID_FETCH_SIZE", UsageError, "the fetch size is not valid", _FINAL),
    (5, "LEADER_NOT_AVAILABLE", UnavailableError, "the partition has no leader now", _REFRESH),
    (6, "NOT_LEADER_OR_FOLLOWER", UnavailableError, "that broker is not the leader", _REFRESH),
    (7, "REQUEST_TIMED_OUT", OutcomeUnknownError, "the broker ran out of time", _RETRY),
    (8, "BROKER_NOT_AVAILABLE", UnavailableError, "the broker is not available", _FINAL),
    (9, "REPLICA_NOT_AVAILABLE", UnavailableError, "the replica is not available", _REFRESH),
    (10, "MESSAGE_TOO_LARGE", UsageError, "a batch exceeds max.message.bytes", _FINAL),
    (11, "STALE_CONTROLLER_EPOCH", UnavailableError, "the controller has moved", _FINAL),
    (12, "OFFSET_METADATA_TOO_LARGE", UsageError, "the offset's metadata is too long", _FINAL),
    (13, "NETWORK_EXCEPTION", OutcomeUnknownError, "the broker lost a connection", _REFRESH),
    (14, "COORDINATOR_LOAD_IN_PROGRESS", UnavailableError, "the coordinator is loading", _RETRY),
    (15, "COORDINATOR_NOT_AVAILABLE", UnavailableError, "no coordinator is available", _RETRY),
    (16, "NOT_COORDINATOR", UnavailableError, "that broker is not the coordinator", _RETRY),
    (17, "INVALID_TOPIC_EXCEPTION", UsageError, "the topic's name is not allowed", _FINAL),
    (18, "RECORD_LIST_TOO_LARGE", UsageError, "a batch exceeds segment.bytes", _FINAL),
    (19, "NOT_ENOUGH_REPLICAS", UnavailableError, "too few replicas are in sync", _RETRY),
    (
        20,
        "NOT_ENOUGH_REPLICAS_AFTER_APPEND",
        OutcomeUnknownError,
        "written, but on fewer replicas than required",
        _RETRY,
    ),
    (21, "INVALID_REQUIRED_ACKS", UsageError, "acks is none of 0, 1, all", _FINAL),
    (22, "ILLEGAL_GENERATION", FencedError, "the group has moved to another generation", _FINAL),
    (23, "INCONSISTENT_GROUP_PROTOCOL", UsageError, "the group speaks another protocol", _FINAL),
    (24, "INVALID_GROUP_ID", UsageError, "the group id is not allowed", _FINAL),
    (25, "UNKNOWN_MEMBER_ID", FencedError, "the group no longer knows this member", _FINAL),
    (26, "INVALID_SESSION_TIMEOUT", UsageError, "the broker forbids this session timeout", _FINAL),
    (27, "REBALANCE_IN_PROGRESS", UnavailableError, "the group is rebalancing", _FINAL),
    (28, "INVALID_COMMIT_OFFSET_SIZE", UsageError, "the offset commit is too large", _FINAL),
    (29, "TOPIC_AUTHORIZATION_FAILED", UsageError, "not allowed on this topic", _FINAL),
    (30, "GROUP_AUTHORIZATION_FAILED", UsageError, "not allowed on this group", _FINAL),
    (31, "CLUSTER_AUTHORIZATION_FAILED", UsageError, "not allowed on this cluster", _FINAL),
    (32, "INVALID_TIMESTAMP", UsageError, "a timestamp is outside the allowed range", _FINAL),
    (33, "UNSUPPORTED_SASL_MECHANISM", UsageError, "SASL mechanism not enabled there", _FINAL),
    (34, "ILLEGAL_SASL_STATE", UsageError, "not expected at this point of SASL", _FINAL),
    (35, "UNSUPPORTED_VERSION", UsageError, "the broker does not speak this version", _FINAL),
    (36, "TOPIC_ALREADY_EXISTS", UsageError, "the topic exists already", _FINAL),
    (37, "INVALID_PARTITIONS", UsageError, "the partition count is not valid", _FINAL),
    (38, "INVALID_REPLICATION_FACTOR", UsageError, "the replication factor does not fit", _FINAL),
    (39, "INVALID_REPLICA_ASSIGNMENT", UsageError, "the replica assignment is not valid", _FINAL),
    (40, "INVALID_CONFIG", UsageError, "a configuration value is not valid", _FINAL),
    (41, "NOT_CONTROLLER", UnavailableError, "that broker is not the controller", _RETRY),
    (42, "INVALID_REQUEST", UsageError, "the broker rejects the request as malformed", _FINAL),
    (43, "UNSUPPORTED_FOR_MESSAGE_FORMAT", UsageError, "its message format is too old", _FINAL),
    (44, "POLICY_VIOLATION", UsageError, "a policy of the broker forbids it", _FINAL),
    (45, "OUT_OF_ORDER_SEQUENCE_NUMBER", PositionError, "the sequence has a gap", _FINAL),
    (46, "DUPLICATE_SEQUENCE_NUMBER", PositionError, "the sequence was written before", _FINAL),
    (47, "INVALID_PRODUCER_EPOCH", FencedError, "a newer producer epoch exists", _FINAL),
    (48, "INVALID_TXN_STATE", UsageError, "not allowed in the transaction's state", _FINAL),
    (49, "INVALID_PRODUCER_ID_MAPPING", FencedError, "the producer id is another's now", _FINAL),
    (50, "INVALID_TRANSACTION_TIMEOUT", UsageError, "transaction timeout too long", _FINAL),
    (51, "CONCURRENT_TRANSACTIONS", UnavailableError, "the last transaction is ending", _RETRY),
    (52, "TRANSACTION_COORDINATOR_FENCED", FencedError, "a newer coordinator exists", _FINAL),
    (53, "TRANSACTIONAL_ID_AUTHORIZATION_FAILED", UsageError, "not allowed on this id", _FINAL),
    (54, "SECURITY_DISABLED", UsageError, "the broker has no authorizer", _FINAL),
    (55, "OPERATION_NOT_ATTEMPTED", UnavailableError, "not tried, others failed first", _FINAL),
    (56, "KAFKA_STORAGE_ERROR", UnavailableError, "the broker's disk failed", _REFRESH),
    (57, "LOG_DIR_NOT_FOUND", UsageError, "the broker has no such log dir", _FINAL),
    (58, "SASL_AUTHENTICATION_FAILED", UsageError, "the credentials were refused", _FINAL),
    (59, "UNKNOWN_PRODUCER_ID", PositionError, "the broker forgot the producer", _FINAL),
    (60, "REASSIGNMENT_IN_PROGRESS", UnavailableError, "replicas are being moved", _FINAL),
    (61, "DELEGATION_TOKEN_AUTH_DISABLED", UsageError, "delegation tokens are off", _FINAL),
    (62, "DELEGATION_TOKEN_NOT_FOUND", UsageError, "no such delegation token", _FINAL),
    (63, "DELEGATION_TOKEN_OWNER_MISMATCH", UsageError, "the token is another's", _FINAL),
    (64, "DELEGATION_TOKEN_REQUEST_NOT_ALLOWED", UsageError, "no tokens on this channel", _FINAL),
    (65, "DELEGATION_TOKEN_AUTHORIZATION_FAILED", UsageError, "token not allowed", _FINAL),
    (66, "DELEGATION_TOKEN_EXPIRED", UsageError, "the delegation token has expired", _FINAL),
    (67, "INVALID_PRINCIPAL_TYPE", UsageError, "the principal's type is not supported", _FINAL),
    (68, "NON_EMPTY_GROUP", UsageError, "the group still has members", _FINAL),
    (69, "GROUP_ID_NOT_FOUND", UsageError, "no such group", _FINAL),
    (70, "FETCH_SESSION_ID_NOT_FOUND", UnavailableError, "the fetch session is gone", _RETRY),
    (71, "INVALID_FETCH_SESSION_EPOCH", UnavailableError, "the fetch session moved on", _RETRY),
    (72, "LISTENER_NOT_FOUND", UnavailableError, "the leader lacks this listener", _REFRESH),
    (73, "TOPIC_DELETION_DISABLED", UsageError, "the broker forbids deleting topics", _FINAL),
    (74, "FENCED_LEADER_EPOCH", UnavailableError, "our leader epoch is too old", _REFRESH),
    (75, "UNKNOWN_LEADER_EPOCH", UnavailableError, "the broker is behind our epoch", _RETRY),
    (76, "UNSUPPORTED_COMPRESSION_TYPE", UsageError, "the codec needs a newer version", _FINAL),
    (77, "STALE_BROKER_EPOCH", UnavailableError, "the broker's epoch has changed", _FINAL),
    (78, "OFFSET_NOT_AVAILABLE", UnavailableError, "a new leader is catching up", _RETRY),
    (79, "MEMBER_ID_REQUIRED", UsageError, "the group wants a member id first", _FINAL),
    (80, "PREFERRED_LEADER_NOT_AVAILABLE", UnavailableError, "preferred leader is off", _REFRESH),
    (81, "GROUP_MAX_SIZE_REACHED", UsageError, "the group is full", _FINAL),
    (82, "FENCED_INSTANCE_ID", FencedError, "another member took the instance id", _FINAL),
    (83, "ELIGIBLE_LEADERS_NOT_AVAILABLE", UnavailableError, "no eligible leader", _REFRESH),
    (84, "ELECTION_NOT_NEEDED", UsageError, "the leader is the right one already", _REFRESH),
    (85, "NO_REASSIGNMENT_IN_PROGRESS", UsageError, "no replicas are being moved", _FINAL),
    (86, "GROUP_SUBSCRIBED_TO_TOPIC", UsageError, "the group still reads the topic", _FINAL),
    (87, "INVALID_RECORD", CorruptionError, "the broker found a record invalid", _FINAL),
    (88, "UNSTABLE_OFFSET_COMMIT", UnavailableError, "offset commits are pending", _RETRY),
    (89, "THROTTLING_QUOTA_EXCEEDED", UnavailableError, "a quota is used up", _RETRY),
    (90, "PRODUCER_FENCED", FencedError, "a newer producer took the id", _FINAL),
    (91, "RESOURCE_NOT_FOUND", UsageError, "no such resource", _FINAL),
    (92, "DUPLICATE_RESOURCE", UsageError, "the request names a resource twice", _FINAL),
    (93, "UNACCEPTABLE_CREDENTIAL", UsageError, "the credential is not acceptable", _FINAL),
    (94, "INCONSISTENT_VOTER_SET", UnavailableError, "voters disagree", _FINAL),
    (95, "INVALID_UPDATE_VERSION", UsageError, "the update version is not valid", _FINAL),
    (96, "FEATURE_UPDATE_FAILED", UnavailableError, "features could not be updated", _FINAL),
    (97, "PRINCIPAL_DESERIALIZATION_FAILURE", UnavailableError, "bad principal", _FINAL),
    (98, "SNAPSHOT_NOT_FOUND", UnavailableError, "no such snapshot", _FINAL),
    (99, "POSITION_OUT_OF_RANGE", UsageError, "outside the snapshot", _FINAL),
    (100, "UNKNOWN_TOPIC_ID", PositionError, "no topic with this id there", _REFRESH),
    (101, "DUPLICATE_BROKER_REGISTRATION", UnavailableError, "broker id in use", _FINAL),
    (102, "BROKER_ID_NOT_REGISTERED", UnavailableError, "broker id not registered", _FINAL),
    (103, "INCONSISTENT_TOPIC_ID", PositionError, "the log has another topic id", _REFRESH),
    (104, "INCONSISTENT_CLUSTER_ID", PositionError, "this is another cluster", _FINAL),
    (105, "TRANSACTIONAL_ID_NOT_FOUND", UsageError, "no such transactional id", _FINAL),
    (106, "FETCH_SESSION_TOPIC_ID_ERROR", UnavailableError, "mixed topic ids", _RETRY),
    (107, "INELIGIBLE_REPLICA", UnavailableError, "a replica may not be in sync", _FINAL),
    (108, "NEW_LEADER_ELECTED", UnavailableError, "the leader has changed", _FINAL),
    (109, "OFFSET_MOVED_TO_TIERED_STORAGE", PositionError, "moved to remote storage", _FINAL),
    (110, "FENCED_MEMBER_EPOCH", FencedError, "the member's epoch is fenced", _FINAL),
    (111, "UNRELEASED_INSTANCE_ID", UnavailableError, "the instance id is in use", _FINAL),
    (112, "UNSUPPORTED_ASSIGNOR", UsageError, "the group does not know the assignor", _FINAL),
    (113, "STALE_MEMBER_EPOCH", UnavailableError, "the member's epoch is old", _FINAL),
    (114, "MISMATCHED_ENDPOINT_TYPE", UsageError, "broker and controller confused", _FINAL),
    (115, "UNSUPPORTED_ENDPOINT_TYPE", UsageError, "endpoint type not supported", _FINAL),
    (116, "UNKNOWN_CONTROLLER_ID", UnavailableError, "no such controller", _FINAL),
    (117, "UNKNOWN_SUBSCRIPTION_ID", UnavailableError, "telemetry has moved on", _FINAL),
    (118, "TELEMETRY_TOO_LARGE", UsageError, "too much telemetry", _FINAL),
    (119, "INVALID_REGISTRATION", UsageError, "the registration is not valid", _FINAL),
    (120, "TRANSACTION_ABORTABLE", UnavailableError, "abort the transaction", _FINAL),
    (121, "INVALID_RECORD_STATE", UsageError, "the record's state forbids it", _FINAL),
    (122, "SHARE_SESSION_NOT_FOUND", UnavailableError, "the share session is gone", _RETRY),
    (123, "INVALID_SHARE_SESSION_EPOCH", UnavailableError, "share session moved on", _RETRY),
    (124, "FENCED_STATE_EPOCH", FencedError, "the share group's epoch is fenced", _FINAL),
    (125, "INVALID_VOTER_KEY", UsageError, "the voter's key does not match", _FINAL),
    (126, "DUPLICATE_VOTER", UsageError, "already a voter", _FINAL),
    (127, "VOTER_NOT_FOUND", UsageError, "no such voter", _FINAL),
    (128, "INVALID_REGULAR_EXPRESSION", UsageError, "bad regular expression", _FINAL),
    (129, "REBOOTSTRAP_REQUIRED", UnavailableError, "start again at the bootstrap list", _FINAL),
    (130, "STREAMS_INVALID_TOPOLOGY", UsageError, "the topology is not valid", _FINAL),
    (131, "STREAMS_INVALID_TOPOLOGY_EPOCH", UsageError, "bad topology epoch", _FINAL),
    (132, "STREAMS_TOPOLOGY_FENCED", FencedError, "the topology is outdated", _FINAL),
    (133, "SHARE_SESSION_LIMIT_REACHED", UnavailableError, "too many share sessions", _RETRY),
)

ERRORS: Final[dict[int, ApiError]] = {
    code: ApiError(code, name, kind, text, *flags) for code, name, kind, text, flags in _TABLE
}
"""Every error code but 0, which is success."""

GRANTS: Final = {
    "could not fetch": "Read on the topic",
    "could not read the topic's metadata": "Read on the topic, or Write where it is a destination",
    "could not look up a producer state": "Read on the topic",
    "could not write": "Write on the topic",
    "could not read the topic's configuration": "DescribeConfigs on the topic",
    "could not read the broker's configuration": "DescribeConfigs on the cluster",
    "could not create the topic": "Create on the topic or on the cluster",
    "could not add partitions": "Alter on the topic",
    "could not delete records": "Delete on the topic",
    "could not find the coordinator": "Write on the transactional id",
    "could not acquire the transactional ID": "Write on the transactional ID",
    "could not add partitions to the transaction": "Write on the topic and on the transactional id",
    "could not write control records": "ClusterAction on the cluster",
}
"""The ACL that an action needs, by action."""

_NOT_ALLOWED: Final = (29, 31, 53)

_HINTS: Final = {
    29: "grant the operation on the topic",
    31: "grant the operation on the cluster",
    33: "check sasl.mechanism against the listener",
    58: "check sasl.username, sasl.password or the token, and sasl.mechanism",
}


def error_of(code: int) -> ApiError:
    """Return the meaning of an error code other than 0; see invariant 3 for unknown codes."""
    known = ERRORS.get(code)
    if known is not None:
        return known
    text = "the broker returned an unknown error code"
    return ApiError(code, f"ERROR_{code}", UnavailableError, text, *_FINAL)


def api_error(code: int, *, action: str, **facts: object) -> LogmirrorError:
    """Return the exception for an error code.

    Args:
        code: Kafka's error code, not 0.
        action: The failed action, to stand before a colon: "could not fetch".
        facts: For example `topic` and `partition`. `code` and `error` are added.

    Returns:
        An exception of the class in `ERRORS`, to be raised by the caller.
    """
    known = error_of(code)
    facts = {**facts, "code": code, "error": known.name}
    hint = _HINTS.get(code, "")
    if code in _NOT_ALLOWED and action in GRANTS:
        hint = f"grant {GRANTS[action]}; `logmirror acls print` prints all that a file needs"
    return known.kind(f"{action}: {known.text}", hint=hint, **facts)

"""The APIs and versions that the broker implements.

ApiVersions advertises them; a client uses the highest version that both sides support.

Deviations from what a row suggests:

- Produce is advertised from version 0, but only versions 3 and later are implemented. librdkafka
  before 2.16 reads "from 3" as a broker without compression and silently sends gzip, lz4 and snappy
  batches as codec 0 (KAFKA-18659).
- FindCoordinator is implemented although there are no groups. librdkafka takes a broker without it
  for one without lz4 and silently does not compress. The response is COORDINATOR_NOT_AVAILABLE,
  which librdkafka does not report; any other error reaches consumers that do not use a group.
- OffsetForLeaderEpoch below 2 and WriteTxnMarkers below 1 are not implemented, as in Apache Kafka
4.
- An ApiVersions request above the last version gets UNSUPPORTED_VERSION (35) in the layout of
  version 0, which every client can read.
"""

from __future__ import annotations

import enum
from typing import Final

from logmirror.wire import serve_fetch, serve_produce


class Api(enum.IntEnum):
    """Kafka's API keys."""

    PRODUCE = serve_produce.API_KEY
    FETCH = serve_fetch.API_KEY
    LIST_OFFSETS = 2
    METADATA = 3
    FIND_COORDINATOR = 10
    API_VERSIONS = 18
    CREATE_TOPICS = 19
    DELETE_TOPICS = 20
    DELETE_RECORDS = 21
    INIT_PRODUCER_ID = 22
    OFFSET_FOR_LEADER_EPOCH = 23
    WRITE_TXN_MARKERS = 27
    DESCRIBE_CONFIGS = 32
    ALTER_CONFIGS = 33
    CREATE_PARTITIONS = 37
    INCREMENTAL_ALTER_CONFIGS = 44
    DESCRIBE_CLUSTER = 60
    DESCRIBE_PRODUCERS = 61


VERSIONS: Final[dict[int, tuple[int, int]]] = {
    Api.PRODUCE: (serve_produce.FIRST_VERSION, serve_produce.LAST_VERSION),
    Api.FETCH: (serve_fetch.FIRST_VERSION, serve_fetch.LAST_VERSION),
    Api.LIST_OFFSETS: (1, 10),
    Api.METADATA: (0, 12),
    Api.FIND_COORDINATOR: (0, 6),
    Api.API_VERSIONS: (0, 4),
    Api.CREATE_TOPICS: (2, 7),
    Api.DELETE_TOPICS: (1, 6),
    Api.DELETE_RECORDS: (0, 2),
    Api.INIT_PRODUCER_ID: (0, 5),
    Api.OFFSET_FOR_LEADER_EPOCH: (2, 4),
    Api.WRITE_TXN_MARKERS: (1, 1),
    Api.DESCRIBE_CONFIGS: (1, 4),
    Api.ALTER_CONFIGS: (0, 2),
    Api.CREATE_PARTITIONS: (0, 3),
    Api.INCREMENTAL_ALTER_CONFIGS: (0, 1),
    Api.DESCRIBE_CLUSTER: (0, 1),
    Api.DESCRIBE_PRODUCERS: (0, 0),
}
"""First and last implemented version, by API key."""

ADVERTISED_FROM: Final[dict[int, int]] = {Api.PRODUCE: 0}
"""First advertised version, where it differs from the first implemented one."""


def has_response(api_key: int, version: int) -> bool:
    """Whether the broker implements this version of the API."""
    first, last = VERSIONS.get(api_key, (0, -1))
    return first <= version <= last

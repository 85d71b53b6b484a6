"""Goal: log directories are described as KIP-113 and KIP-827 say, in every version.

Method: as in `test_versions_admin`; the names of tests are those of the statements of log dirs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from kio.schema.errors import ErrorCode

from kit.judges.partition_client import PartitionClient, data_batch
from kit.judges.raw_client import build, nested
from kit.servers.kafka import create_topic
from logmirror.broker.apis import VERSIONS, Api

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kit.servers.embedded import EmbeddedBroker

LAST = VERSIONS[Api.DESCRIBE_LOG_DIRS][1]


@pytest.fixture
def partition(embedded: EmbeddedBroker, topic_name: str) -> Iterator[PartitionClient]:
    create_topic(embedded.bootstrap, topic_name, 3, {})
    with PartitionClient(embedded.bootstrap, topic_name) as client:
        yield client


def describe(
    partition: PartitionClient, asked: dict[str, tuple[int, ...]] | None, version: int = LAST
) -> Any:
    kind = nested(Api.DESCRIBE_LOG_DIRS, version, "request", "DescribableLogDirTopic")
    topics = asked and tuple(build(kind, topic=t, partitions=p) for t, p in asked.items())
    return partition.ask(Api.DESCRIBE_LOG_DIRS, version, topics=topics)


def shown(response: Any) -> dict[str, list[int]]:
    [found] = response.results
    return {t.name: [one.partition_index for one in t.partitions] for t in found.topics}


@pytest.mark.move("E27", "E28")
@pytest.mark.parametrize(
    "version", range(VERSIONS[Api.DESCRIBE_LOG_DIRS][0], VERSIONS[Api.DESCRIBE_LOG_DIRS][1] + 1)
)
def test_e27_each_version_has_its_fields(partition, version):
    response = describe(partition, {partition.topic: (0,)}, version)

    [found] = response.results
    assert found.error_code == ErrorCode.none
    assert shown(response) == {partition.topic: [0]}
    if version >= 3:
        assert response.error_code == ErrorCode.none
    if version >= 4:
        assert found.total_bytes > found.usable_bytes > 0
    if version >= 5:
        assert not found.is_cordoned


@pytest.mark.move("E21", "E25")
def test_e25_all_topics_those_that_are_named_and_none(partition):
    topic = partition.topic

    assert shown(describe(partition, None))[topic] == [0, 1, 2]
    assert shown(describe(partition, {topic: (2, 0, 2, 9, -1)})) == {topic: [0, 2]}
    assert shown(describe(partition, {topic: ()})) == {}
    assert shown(describe(partition, {"not-there": (0,), topic: (1,)})) == {topic: [1]}
    assert shown(describe(partition, {})) == {}


@pytest.mark.move("E29")
def test_e29_a_size_is_that_of_the_batches(partition):
    def size() -> tuple[int, int, bool]:
        [found] = describe(partition, {partition.topic: (0,)}).results[0].topics[0].partitions
        return found.partition_size, found.offset_lag, found.is_future_key

    assert size() == (0, 0, False)
    batch = data_batch(5)
    for _ in range(3):
        partition.produce(batch)
    assert size() == (3 * len(batch), 0, False)

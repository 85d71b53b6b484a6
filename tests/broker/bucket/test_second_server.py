"""Goal: a log dir is as safe on a second real S3 server, whose code shares nothing with the first.

Method: tests of other modules of this folder once more, with S3Proxy in the place of VersityGW.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from broker.bucket import test_broker, test_compacting, test_merging
from broker.bucket.test_merging import brokers  # noqa: F401  # a fixture
from kit.servers.s3_java import JavaS3Server

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kit.servers.bucket_broker import BucketBroker
    from kit.servers.s3 import S3Server

pytestmark = [
    pytest.mark.gate("a second S3 server"),
    pytest.mark.xdist_group("second-s3"),
    pytest.mark.timeout(600),
]


@pytest.fixture(scope="module")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with JavaS3Server(tmp_path_factory.mktemp("s3-java")) as server:
        yield server


def test_machines_that_burn_down_lose_nothing_acknowledged(
    machines: Callable[..., BucketBroker],
) -> None:
    test_broker.test_machines_that_burn_down_lose_nothing_acknowledged(machines)


def test_a_paused_owner_acknowledges_nothing_after_it_wakes(
    machines: Callable[..., BucketBroker],
) -> None:
    test_broker.test_a_paused_owner_acknowledges_nothing_after_it_wakes(machines)


def test_small_segments_become_large_ones(
    brokers: Callable[..., BucketBroker],  # noqa: F811  # the fixture
    s3_server: S3Server,
    bucket: str,
) -> None:
    test_merging.test_small_segments_become_large_ones(brokers, s3_server, bucket, "bucket.merged")


def test_a_crash_during_compaction_loses_nothing_and_revives_nothing(
    machines: Callable[..., BucketBroker], s3_server: S3Server, bucket: str, topic_name: str
) -> None:
    test_compacting.test_a_crash_at_each_step_loses_nothing_and_revives_nothing(
        machines, s3_server, bucket, topic_name, "bucket.counted"
    )

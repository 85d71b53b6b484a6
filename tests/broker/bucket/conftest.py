"""A broker whose log dir is in a bucket behind a proxy, which tests of statements share."""

from __future__ import annotations

import contextlib
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

from kit.fakes.s3_proxy import S3Proxy
from kit.servers.bucket_broker import BucketBroker
from kit.servers.embedded import EmbeddedBroker
from kit.servers.kafka import create_topic
from kit.servers.s3 import LogBucket

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from kit.servers.s3 import S3Server

SMALL = ("--override", "log.segment.bytes=100000")


class Proxied(NamedTuple):
    """A broker, and the proxy between it and its bucket."""

    broker: EmbeddedBroker
    proxy: S3Proxy

    @property
    def files(self) -> Path:
        """The objects of the log dir as files."""
        assert self.broker.bucket is not None
        return self.broker.bucket.files

    def matching(self, pattern: str) -> list[Path]:
        """See `LogBucket.matching`."""
        assert self.broker.bucket is not None
        return self.broker.bucket.matching(pattern)

    def create_topic(self, name: str, config: Mapping[str, str], partitions: int = 1) -> None:
        """Create a topic."""
        create_topic(self.broker.bootstrap, name, partitions, config)


def _proxied(server: S3Server, folder: Path, **options: object) -> Iterator[Proxied]:
    def delete(path: str) -> None:
        bucket, _, key = path.partition("/")
        server.client().delete_object(Bucket=bucket, Key=key)

    with S3Proxy(server.endpoint, delete) as proxy:
        place = LogBucket(server, server.new_bucket(), proxy.endpoint)
        with EmbeddedBroker(folder, bucket=place, **options) as broker:
            yield Proxied(broker, proxy)
            proxy.spoil()


_MEMORY = "/dev/shm"  # a new folder is created there


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder in memory, where Linux has it: simulated owners make thousands of small files."""
    place = _MEMORY if Path(_MEMORY).is_dir() else None
    with tempfile.TemporaryDirectory(dir=place) as found:
        yield Path(found)


@pytest.fixture
def machines(
    tmp_path: Path, s3_server: S3Server, bucket: str
) -> Iterator[Callable[..., BucketBroker]]:
    """Make brokers with small segments on one bucket, each with a machine of its own."""
    with contextlib.ExitStack() as made:

        def make(*options: str, **more: Any) -> BucketBroker:
            folder = tmp_path / f"machine-{len(list(tmp_path.iterdir()))}"
            broker = BucketBroker(folder, s3_server, bucket, *SMALL, *options, **more)
            made.callback(broker.__exit__)
            return broker

        yield make


@pytest.fixture(scope="package")
def shared(s3_server: S3Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxied]:
    """A broker that flushes on ack, and keeps few files on its machine. It must never die."""
    yield from _proxied(s3_server, tmp_path_factory.mktemp("shared"), cache_bytes=1)


@pytest.fixture
def proxied(s3_server: S3Server, tmp_path: Path) -> Iterator[Callable[..., Proxied]]:
    """Start a broker of the test's own, which may be killed."""
    running: list[Iterator[Proxied]] = []

    def start(**options: object) -> Proxied:
        running.append(_proxied(s3_server, tmp_path / str(len(running)), **options))
        return next(running[-1])

    yield start
    for one in running:
        next(one, None)

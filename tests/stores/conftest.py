"""Servers for the tests of stores: a real S3 server, a proxy that spoils its responses, a fake."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kit.fakes.s3_proxy import S3Proxy
from kit.servers.s3 import S3Server
from kit.servers.s3_java import JavaS3Server
from logmirror.stores.s3 import S3Store

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kit.fakes.fake_s3 import FakeS3


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """A running server; tests make buckets of their own."""
    with S3Server(tmp_path_factory.mktemp("s3")) as server:
        yield server


@pytest.fixture(scope="session")
def second_s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """A running server of another code base."""
    with JavaS3Server(tmp_path_factory.mktemp("s3-java")) as server:
        yield server


@pytest.fixture
def proxy(s3_server: S3Server) -> Iterator[S3Proxy]:
    """The proxy in front of the server, which spoils requests on demand."""

    def delete(path: str) -> None:
        bucket, _, key = path.partition("/")
        s3_server.client().delete_object(Bucket=bucket, Key=key)

    with S3Proxy(s3_server.endpoint, delete) as proxy:
        yield proxy


@pytest.fixture
def bucket(s3_server: S3Server) -> str:
    """A new bucket on the server."""
    return s3_server.new_bucket()


@pytest.fixture
def store(s3_server: S3Server, bucket: str, proxy: S3Proxy) -> S3Store:
    """A store in that bucket, behind the proxy."""
    return S3Store(s3_server.location(bucket, "p", endpoint=proxy.endpoint))


@pytest.fixture(scope="session")
def fake_s3() -> Iterator[FakeS3]:
    """A running fake; tests make buckets of their own."""
    from kit.fakes.fake_s3 import FakeS3  # noqa: PLC0415  # takes a second to load

    with FakeS3() as server:
        yield server

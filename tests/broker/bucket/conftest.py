"""One S3 server for the tests of brokers on buckets."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kit.servers.s3 import S3Server

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="package")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """A running server."""
    with S3Server(tmp_path_factory.mktemp("s3")) as server:
        yield server


@pytest.fixture
def bucket(s3_server: S3Server) -> str:
    """A new bucket."""
    return s3_server.new_bucket()

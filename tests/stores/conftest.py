"""A real S3 server for the tests of stores."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kit.s3 import S3Server

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """A running server; tests make buckets of their own."""
    with S3Server(tmp_path_factory.mktemp("s3")) as server:
        yield server

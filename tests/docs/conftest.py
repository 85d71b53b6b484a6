"""A bucket for the commands of pages, in whose environment they find it as their reader does."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kit.servers.s3 import LogBucket, S3Server

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LogBucket]:
    with S3Server(tmp_path / "s3") as server:
        found = LogBucket(server, server.new_bucket())
        for name, value in {**found.environment, "BUCKET": found.bucket}.items():
            monkeypatch.setenv(name, value)
        yield found

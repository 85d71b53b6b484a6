"""What the tests of groups share."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kit.judges.raw_client import RawClient
from kit.servers.kafka import create_topic

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kit.servers.embedded import EmbeddedBroker


@pytest.fixture
def group_client(embedded: EmbeddedBroker, topic_name: str) -> Iterator[RawClient]:
    """A client; there is a topic of two partitions with the name of the test's group."""
    create_topic(embedded.bootstrap, topic_name, 2, {})
    with RawClient(embedded.port) as client:
        yield client

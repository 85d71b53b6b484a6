"""One embedded broker for all tests that only talk to it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kit.servers.embedded import EmbeddedBroker

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="package")
def embedded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedBroker]:
    """A running embedded broker with default options but small segments; it must never die."""
    broker = EmbeddedBroker(tmp_path_factory.mktemp("embedded"), segment_bytes=200_000)
    with broker:
        yield broker
    assert broker.stop() == 0

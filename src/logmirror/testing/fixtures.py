"""Fixtures for pytest. In `conftest.py`: `pytest_plugins = ["logmirror.testing.fixtures"]`."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest

from logmirror.clock import new_nonce
from logmirror.testing.local_broker import LocalBroker, broker

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["kafka_broker", "kafka_topic"]


@pytest.fixture(scope="session")
def _kafka_broker() -> Iterator[LocalBroker]:
    with broker() as running:
        yield running


@pytest.fixture
def kafka_broker(_kafka_broker: LocalBroker) -> Iterator[LocalBroker]:
    """A broker that all tests of the session share. A test that killed it may leave it so.

    Its log is printed after each test, and pytest shows it for tests that fail.
    """
    if _kafka_broker.pid is None:
        _kafka_broker.start()
    yield _kafka_broker
    print(_kafka_broker.log(), file=sys.stderr)  # noqa: T201  # pytest captures it


@pytest.fixture
def kafka_topic() -> str:
    """The name of a topic that no other test uses. The broker creates it on first use."""
    return f"test-{new_nonce()}"

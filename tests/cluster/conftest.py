"""Scripted brokers for the tests of the client; each test module scripts its own `world`."""

import pytest

from kit.fakes.scripted_writes import WritableBroker


@pytest.fixture
def brokers(world):
    """Two running brokers of a world, by node ID."""
    brokers = {node: WritableBroker(world, node) for node in (1, 2)}
    yield brokers
    for broker in brokers.values():
        broker.close()

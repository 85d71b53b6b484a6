"""How long the driver's clients retry and wait.

Method: the settings with which each client would be opened. That clients keep to them is shown in
tests/cluster.
"""

import pytest

from logmirror.app import components
from logmirror.app.components import COMMAND_BUDGET_MS, Clients
from logmirror.app.run import BRIEF_MS
from logmirror.cluster.properties import connection_settings

SETTINGS = connection_settings("localhost:9092", {"socket.timeout.ms": "1000"})


@pytest.fixture(autouse=True)
def _nothing_is_opened(monkeypatch):
    monkeypatch.setattr(components, "ClusterClient", lambda settings: settings)


def waits(clients):
    opened = clients(SETTINGS)
    return (opened.retry_budget_ms, opened.connect_timeout_ms, opened.socket_timeout_ms)


def test_clients_of_the_loop_wait_as_long_as_the_settings_say():
    assert waits(Clients()) == (60_000, 10_000, 1000)


def test_clients_of_a_command_retry_for_its_budget():
    assert waits(Clients(COMMAND_BUDGET_MS)) == (COMMAND_BUDGET_MS, 10_000, 1000)


def test_limited_attempts_bound_connections_and_responses_too():
    assert waits(Clients(BRIEF_MS, limits_attempts=True)) == (BRIEF_MS, BRIEF_MS, 1000)

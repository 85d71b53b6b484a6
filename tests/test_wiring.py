"""How long the driver's clients wait for whom.

Method: what each would be opened with is looked at; that clients keep to it is shown in
tests/cluster.
"""

import pytest

from logmirror import wiring
from logmirror.cluster.properties import connection_settings
from logmirror.wiring import HASTE_MS, PATIENCE_MS, Clients

SETTINGS = connection_settings("localhost:9092", {"socket.timeout.ms": "1000"})


@pytest.fixture(autouse=True)
def _nothing_is_opened(monkeypatch):
    monkeypatch.setattr(wiring, "ClusterClient", lambda settings: settings)


def waits(clients):
    opened = clients(SETTINGS)
    return (opened.retry_budget_ms, opened.connect_timeout_ms, opened.socket_timeout_ms)


def test_the_loop_s_own_clients_wait_as_long_as_the_settings_say():
    assert waits(Clients()) == (60_000, 10_000, 1000)


def test_those_that_somebody_waits_for_do_not_try_for_long():
    assert waits(Clients(PATIENCE_MS)) == (PATIENCE_MS, 10_000, 1000)


def test_hasty_ones_wait_for_no_answer_and_no_connection_longer_either():
    assert waits(Clients(HASTE_MS, is_hasty=True)) == (HASTE_MS, HASTE_MS, 1000)

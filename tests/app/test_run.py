"""How long the driver's clients retry and wait.

Method: the settings with which each client would be opened. That clients keep to them is shown in
tests/cluster.
"""

import pytest

from logmirror.app import components
from logmirror.app.components import COMMAND_BUDGET_MS, Clients
from logmirror.app.run import BRIEF_MS, with_shared_budget
from logmirror.app.specs import mirror_specs
from logmirror.cluster.properties import connection_settings
from logmirror.config.settings import load_text

SETTINGS = connection_settings("localhost:9092", {"socket.timeout.ms": "1000"})
FOLDER = "{type: filesystem, root: /archive}"
CLUSTER = "{type: kafka, bootstrap-servers: 'b:9092'}"
LIMITS = "flush: {max-time-ms: 1, max-bytes: 1, max-offsets: 1}"


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


def mirrors(*pairs):
    """Specs of mirrors, each from a server to a destination."""
    text = "mirrors:\n"
    for number, (server, destination) in enumerate(pairs):
        text += f"""
- name: m{number}
  topic: t{number}
  partition: 0
  source: {{bootstrap-servers: "{server}"}}
  destinations: [{destination}]
  {LIMITS if destination is FOLDER else ""}
"""
    return mirror_specs(load_text(text, environ={}))


def budgets(specs):
    found = {spec.source.retry_budget_ms for spec in specs}
    return found | {
        to.cluster.retry_budget_ms
        for spec in specs
        for _, to in spec.destinations
        if hasattr(to, "cluster")
    }


def test_a_single_cluster_keeps_its_own_retry_budget():
    specs = mirrors(("a:9092", FOLDER), ("a:9092", FOLDER))

    assert with_shared_budget(specs) == specs
    assert min(budgets(specs)) > COMMAND_BUDGET_MS


def test_of_several_clusters_each_has_a_limited_retry_budget():
    for pairs in ([("a:9092", FOLDER), ("b:9092", FOLDER)], [("a:9092", CLUSTER)]):
        specs = mirrors(*pairs)

        assert budgets(with_shared_budget(specs)) == {COMMAND_BUDGET_MS}
        assert [spec.name for spec in with_shared_budget(specs)] == [spec.name for spec in specs]

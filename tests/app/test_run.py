"""How the driver is put together: how long its clients wait for whom.

Method: what each would be opened with is looked at; that clients keep to it is shown in
tests/cluster.
"""

import pytest

from logmirror.app import run
from logmirror.app.run import HASTE_MS, PATIENCE_MS, Clients, considerate, mirror_specs
from logmirror.cluster.properties import connection_settings
from logmirror.config.settings import load_text

SETTINGS = connection_settings("localhost:9092", {"socket.timeout.ms": "1000"})
FOLDER = "{type: filesystem, root: /archive}"
CLUSTER = "{type: kafka, bootstrap-servers: 'b:9092'}"
LIMITS = "flush: {max-time-ms: 1, max-bytes: 1, max-offsets: 1}"


@pytest.fixture(autouse=True)
def _nothing_is_opened(monkeypatch):
    monkeypatch.setattr(run, "ClusterClient", lambda settings: settings)


def waits(clients):
    opened = clients(SETTINGS)
    return (opened.retry_budget_ms, opened.connect_timeout_ms, opened.socket_timeout_ms)


def test_the_loop_s_own_clients_wait_as_long_as_the_settings_say():
    assert waits(Clients()) == (60_000, 10_000, 1000)


def test_those_that_somebody_waits_for_do_not_try_for_long():
    assert waits(Clients(PATIENCE_MS)) == (PATIENCE_MS, 10_000, 1000)


def test_hasty_ones_wait_for_no_response_and_no_connection_longer_either():
    assert waits(Clients(HASTE_MS, is_hasty=True)) == (HASTE_MS, HASTE_MS, 1000)


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


def test_a_single_cluster_has_all_the_patience_there_is():
    specs = mirrors(("a:9092", FOLDER), ("a:9092", FOLDER))

    assert considerate(specs) == specs
    assert min(budgets(specs)) > PATIENCE_MS


def test_of_several_clusters_none_holds_up_the_others_for_long():
    for pairs in ([("a:9092", FOLDER), ("b:9092", FOLDER)], [("a:9092", CLUSTER)]):
        specs = mirrors(*pairs)

        assert budgets(considerate(specs)) == {PATIENCE_MS}
        assert [spec.name for spec in considerate(specs)] == [spec.name for spec in specs]

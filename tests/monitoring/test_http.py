"""The metrics endpoint: responses, deadlines, limits, a port in use.

Method: real connections to the real server on loopback, over the real health of scripted flows.
"""

import logging
import socket
from dataclasses import replace

import pytest

from kit.judges.scrape import ask
from kit.runs.commands import wait_until
from kit.servers.machine import HOST, free_ports
from logmirror.clock import SYSTEM_CLOCK
from logmirror.errors import UnavailableError
from logmirror.mirror.health import StatusBoard
from logmirror.mirror.ports import FlowId
from logmirror.monitoring import http, metrics
from logmirror.monitoring.http import Shown, serve
from logmirror.monitoring.metrics import Recorder

FLOW = FlowId(mirror="orders", destination="d", topic="t", partition=3)


@pytest.fixture
def health():
    return StatusBoard(["orders", "bills"], SYSTEM_CLOCK)


@pytest.fixture
def recorder():
    return Recorder()


@pytest.fixture
def port(recorder, health):
    with serve(free_ports(1)[0], recorder, health) as port:
        yield port


def test_metrics_are_prometheus_text(port, recorder):
    recorder.set(metrics.LAG, ("orders", "d", "t", "3"), 5)
    status, kind, text = ask(port, "/metrics")
    assert (status, kind.split(";")[0]) == (200, "text/plain")
    wanted = 'logmirror_source_lag_offsets{destination="d",mirror="orders",partition="3",topic="t"}'
    assert f"{wanted} 5.0" in text


def test_it_is_ready_when_each_mirror_is_opened_and_none_waits_or_has_stopped(port, health):
    assert ask(port, "/readyz")[0] == 503
    health.mirror_opened("orders")
    assert ask(port, "/readyz")[::2] == (503, "mirror=bills state=starting\n")
    health.mirror_opened("bills")
    assert ask(port, "/readyz")[::2] == (200, "ok\n")
    health.flow_waits(FLOW, UnavailableError("no response"))
    reason = "mirror=orders state=waiting kind=unavailable: no response\n"
    assert ask(port, "/readyz")[::2] == (503, reason)
    health.flow_resumed(FLOW)
    assert ask(port, "/readyz")[0] == 200
    health.mirror_stopped(FLOW.mirror, UnavailableError("no response"))
    assert "mirror=orders state=stopped" in ask(port, "/readyz")[2]


@pytest.mark.mirror_v3("CFG-06")
def test_silent_destinations_are_omitted_from_readiness_only():
    # `affects-readiness: false`; all of what bills has says so
    health = StatusBoard(
        ["orders", "bills"], SYSTEM_CLOCK, {("orders", "d"), ("bills", "d"), ("bills", "")}
    )
    why = UnavailableError("no response")
    assert health.not_ready() == ["mirror=orders state=starting"]
    health.opening_failed("orders", "d", why)
    health.mirror_opened("orders", {"d"})
    assert health.not_ready() == []
    assert [one.state for one in health.mirrors()] == ["waiting", "starting"]
    health.flow_waits(FLOW, why)
    assert health.not_ready() == []

    other = replace(FLOW, destination="e")
    red = ["mirror=orders state=waiting kind=unavailable: no response"]
    health.flow_waits(other, why)
    assert health.not_ready() == red
    health.flow_resumed(other)
    health.opening_failed("orders", "", why)
    assert health.not_ready() == red
    health.mirror_opened("orders")
    assert health.not_ready() == []

    health.mirror_stopped("bills", why)
    assert health.not_ready() == []
    health.mirror_stopped("orders", why, FLOW)  # with all its destinations
    assert health.not_ready() == ["mirror=orders state=stopped kind=unavailable: no response"]


def test_an_unknown_path_lists_the_known_ones(port):
    status, _, text = ask(port, "/")
    assert status == 404
    assert text.split() == ["/metrics", "/livez", "/readyz", "/status.json"]


def test_a_query_is_ignored_and_head_has_no_body(port):
    assert ask(port, "/livez?verbose")[0] == 200
    assert ask(port, "/livez", method="HEAD")[::2] == (200, "")
    assert ask(port, "/livez", method="POST")[0] == 501


def test_port_0_disables_the_endpoint(recorder, health):
    with serve(0, recorder, health) as port:
        assert port is None


def test_a_port_in_use_is_a_warning(recorder, health, caplog):
    with socket.create_server(("0.0.0.0", 0)) as other:
        taken = other.getsockname()[1]
        with serve(taken, recorder, health) as port:
            assert port is None
    (record,) = caplog.records
    assert (record.levelno, record.facts["port"]) == (logging.WARNING, taken)


def test_the_port_is_free_again_at_the_end(recorder, health):
    port = free_ports(1)[0]
    for _ in range(2):
        with serve(port, recorder, health):
            assert ask(port, "/livez")[0] == 200


def is_cut(connection):
    try:
        connection.sendall(b"G")
        return connection.recv(1) == b""
    except TimeoutError:
        return False
    except OSError:
        return True


def test_an_unfinished_request_is_closed_at_its_deadline(port, monkeypatch):
    monkeypatch.setattr(http, "DEADLINE_MS", 300)
    with socket.create_connection((HOST, port)) as slow:
        slow.settimeout(0.02)  # a byte at a time, so that no single wait is long
        wait_until(lambda: is_cut(slow), what=lambda: "the end of the connection", timeout_s=30)
    assert ask(port, "/livez")[0] == 200


def test_connections_over_the_limit_are_closed_until_there_is_room(port):
    held = [socket.create_connection((HOST, port)) for _ in range(http.CONNECTIONS_MAX)]
    try:
        with socket.create_connection((HOST, port), timeout=5) as one_more:
            assert one_more.recv(1) == b""
    finally:
        for connection in held:
            connection.close()

    def has_response():
        try:
            return ask(port, "/livez")[0] == 200
        except OSError:
            return False

    wait_until(has_response, what=lambda: "room for a question", timeout_s=30)


def test_a_metric_reports_readiness(port, health):
    assert "logmirror_ready 0.0" in ask(port, "/metrics").text
    health.mirror_opened("orders")
    health.mirror_opened("bills")
    assert "logmirror_ready 1.0" in ask(port, "/metrics").text


def test_partition_series_can_be_omitted_and_mirror_v3_names_added(recorder, health):
    recorder.set(metrics.LAG, ("orders", "d", "t", "3"), 5)
    for shown, present in (
        (Shown(partitions=False), {"logmirror_mirror_lag_offsets"}),
        (Shown(), {"logmirror_mirror_lag_offsets", "logmirror_source_lag_offsets"}),
        (
            Shown(mirror_v3_names=True),
            {
                "logmirror_mirror_lag_offsets",
                "logmirror_source_lag_offsets",
                "mirror_v3_source_lag_offsets",
            },
        ),
    ):
        with serve(free_ports(1)[0], recorder, health, shown) as port:
            lines = ask(port, "/metrics").text.splitlines()
        names = {line.partition("{")[0] for line in lines if "lag_offsets{" in line}
        assert names == present

"""The metrics endpoint: responses, deadlines, limits, a port in use.

Method: real connections to the real server on loopback, over the real health of scripted flows.
Connections that stay silent are renewed as fast as the machine can, and the probes must respond.
"""

import contextlib
import json
import logging
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from kit.judges.scrape import ask
from kit.runs.commands import wait_until
from kit.servers.machine import HOST, free_ports
from logmirror.clock import SYSTEM_CLOCK
from logmirror.errors import UnavailableError, UsageError
from logmirror.mirror.health import StatusBoard
from logmirror.mirror.ports import FlowId
from logmirror.monitoring import http, metrics
from logmirror.monitoring.exposition import Shown
from logmirror.monitoring.http import serve
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
    assert f"{wanted} 5\n" in text


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


def test_the_default_port_in_use_is_a_warning(recorder, health, caplog):
    with socket.create_server((HOST, 0)) as other:
        taken = other.getsockname()[1]
        with serve(taken, recorder, health, is_required=False) as port:
            assert port is None
    (record,) = caplog.records
    assert (record.levelno, record.facts["port"]) == (logging.WARNING, taken)


@pytest.mark.parametrize("address", [HOST, "0.0.0.0"])
def test_a_configured_port_in_use_is_an_error(recorder, health, address):
    with socket.create_server((address, 0)) as other:
        taken = other.getsockname()[1]
        opening = serve(taken, recorder, health, is_required=True)
        with pytest.raises(UnavailableError) as caught:
            opening.__enter__()
    assert caught.value.facts["port"] == taken
    assert "LOGMIRROR_METRICS_PORT" in caught.value.hint


def test_an_address_of_another_machine_is_a_usage_error(recorder, health):
    opening = serve(free_ports(1)[0], recorder, health, host="192.0.2.1")
    with pytest.raises(UsageError) as caught:
        opening.__enter__()
    assert caught.value.facts["host"] == "192.0.2.1"


def accepts(host, port):
    with contextlib.suppress(OSError), socket.create_connection((host, port), timeout=5):
        return True
    return False


@pytest.mark.parametrize(
    ("host", "reached"),
    [
        ("127.0.0.1", ["127.0.0.1"]),
        ("0.0.0.0", ["127.0.0.1", "127.0.0.2"]),
        ("::1", ["::1"]),
        ("::", ["127.0.0.1", "127.0.0.2", "::1"]),
    ],
)
def test_it_listens_on_the_given_address_only(recorder, health, host, reached):
    port = free_ports(1)[0]
    if ":" in host and not socket.has_dualstack_ipv6():
        with pytest.raises(UsageError), serve(port, recorder, health, host=host, is_required=True):
            pass
        return
    with serve(port, recorder, health, host=host):
        tried = ["127.0.0.1", "127.0.0.2", "::1"]
        assert [one for one in tried if accepts(one, port)] == reached


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


def test_an_unfinished_request_is_closed_at_its_deadline(port):
    begun = time.monotonic()
    with socket.create_connection((HOST, port)) as slow:
        slow.settimeout(0.02)  # a byte at a time, so that no single wait is long
        wait_until(lambda: is_cut(slow), what=lambda: "the end of the connection", timeout_s=30)
    assert time.monotonic() - begun < 9  # DEADLINE_MS is 10 s
    assert ask(port, "/livez")[0] == 200


@pytest.mark.parametrize(
    "sent",
    [
        b"GET /livez HTTP/1.1\r\nX: " + b"y" * 100_000,
        b"GET /livez HTTP/1.1\r\n" + b"X: y\r\n" * 100_000,
        b"\x16\x03\x01\x02\x00\r\n\r\n",
        b"\r\n\r\n",
    ],
    ids=["a long line", "many lines", "TLS", "nothing"],
)
def test_what_is_no_bounded_request_is_closed(port, sent):
    with socket.create_connection((HOST, port), timeout=10) as odd:
        with contextlib.suppress(OSError):
            odd.sendall(sent)
        with contextlib.suppress(ConnectionResetError):
            assert odd.recv(1) == b""
    assert ask(port, "/livez")[0] == 200


def test_a_reader_that_stops_reading_is_closed_at_its_deadline(recorder, monkeypatch):
    monkeypatch.setattr(http, "DEADLINE_MS", 3000)
    views = CountedViews()
    views.text = "x" * 50_000_000  # more than socket buffers hold
    with (
        serve(free_ports(1)[0], recorder, views) as port,
        socket.create_connection((HOST, port), timeout=30) as slow,
    ):
        slow.sendall(b"GET /status.json HTTP/1.1\r\n\r\n")
        received = len(slow.recv(1000))
        time.sleep(4)
        with contextlib.suppress(ConnectionResetError):
            while more := slow.recv(1 << 20):
                received += len(more)
    assert 0 < received < 50_000_000


def test_silent_connections_that_are_renewed_for_ever_do_not_take_the_probes_away(port):
    """A client holds more connections than the limit, and replaces each that is closed."""
    ended, opened = threading.Event(), [0]

    def hold():
        held = []
        while not ended.is_set():
            with contextlib.suppress(OSError):
                held.append(socket.create_connection((HOST, port), timeout=5))
                opened[0] += 1
            if len(held) > 2 * http.CONNECTIONS_MAX:
                held.pop(0).close()
        for connection in held:
            connection.close()

    threads = [threading.Thread(target=hold) for _ in "ab"]
    for thread in threads:
        thread.start()
    try:
        wait_until(lambda: opened[0] > 200, what=lambda: f"{opened} connections")
        for path in ("/livez", "/readyz", "/metrics") * 4:
            begun = time.monotonic()
            with socket.create_connection((HOST, port), timeout=5) as probe:
                probe.settimeout(5)
                probe.sendall(f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
                assert probe.recv(12) in {b"HTTP/1.1 200", b"HTTP/1.1 503"}
            assert time.monotonic() - begun < 5
    finally:
        ended.set()
        for thread in threads:
            thread.join()


def test_connections_over_the_limit_close_the_oldest_silent_one(port, monkeypatch):
    monkeypatch.setattr(http, "REQUEST_MS", 60_000)
    monkeypatch.setattr(http, "DEADLINE_MS", 60_000)
    held = [socket.create_connection((HOST, port)) for _ in range(http.CONNECTIONS_MAX + 1)]
    held[0].settimeout(30)
    try:
        with contextlib.suppress(ConnectionResetError):
            assert held[0].recv(1) == b""
        held[1].settimeout(30)
        held[1].sendall(b"GET /livez HTTP/1.1\r\n\r\n")
        assert held[1].recv(12) == b"HTTP/1.1 200"
    finally:
        for connection in held:
            connection.close()


class CountedViews:
    """Views that count how often the status is made, slowly."""

    def __init__(self):
        self.made, self.fails, self.delay_s, self.text = 0, False, 0.0, ""

    def not_live(self):
        return []

    def not_ready(self):
        return []

    def status(self):
        self.made += 1
        time.sleep(self.delay_s)
        if self.fails:
            raise ValueError(self.made)
        return {"made": self.made, "text": self.text}


def test_concurrent_clients_share_one_page_and_the_next_second_has_a_new_one(recorder, monkeypatch):
    monkeypatch.setattr(http, "REQUEST_MS", 60_000)  # the clients' threads are of this process
    views = CountedViews()
    views.delay_s = 0.5
    with serve(free_ports(1)[0], recorder, views) as port:

        def made(_=None):
            return json.loads(ask(port, "/status.json").text)["made"]

        with ThreadPoolExecutor(20) as pool:
            asked = pool.map(made, range(20))
            time.sleep(0.1)
            assert ask(port, "/livez")[0] == 200  # while the page is made
            assert views.made == 1
            assert set(asked) == {1}
        assert made() == 1
        time.sleep(http.SHARED_MS / 1000)
        assert made() == 2


def test_concurrent_scrapes_share_one_page(recorder, health, monkeypatch):
    made, render = [], http._metrics  # noqa: SLF001  # counts its calls

    def counted(exposition):
        made.append(1)
        return render(exposition)

    monkeypatch.setattr(http, "_metrics", counted)
    monkeypatch.setattr(http, "REQUEST_MS", 60_000)  # the clients' threads are of this process
    for number in range(20_000):
        recorder.set(metrics.LAG, ("orders", "d", "t", str(number)), 5)
    with serve(free_ports(1)[0], recorder, health) as port, ThreadPoolExecutor(8) as pool:
        texts = set(pool.map(lambda _: ask(port, "/metrics").text, range(8)))
    assert len(texts) == len(made) == 1


def test_a_page_that_cannot_be_made_is_an_error_and_the_others_stay(recorder, caplog):
    views = CountedViews()
    views.fails = True
    with serve(free_ports(1)[0], recorder, views) as port:
        assert ask(port, "/status.json").status == 500
        assert ask(port, "/livez").status == 200
        assert ask(port, "/metrics").status == 200
    assert "could not be made" in caplog.text


def test_the_endpoint_ends_while_a_page_is_made(recorder):
    views = CountedViews()
    views.delay_s = 0.5
    with serve(free_ports(1)[0], recorder, views) as port:
        asking = socket.create_connection((HOST, port), timeout=10)
        asking.sendall(b"GET /status.json HTTP/1.1\r\n\r\n")
        wait_until(lambda: views.made == 1, what=lambda: "a page that is being made")
    with asking, contextlib.suppress(ConnectionResetError):
        assert asking.recv(1) == b""


def test_the_endpoint_ends_while_connections_are_open(recorder, health):
    with serve(free_ports(1)[0], recorder, health) as port:
        silent = socket.create_connection((HOST, port), timeout=10)
        begun = time.monotonic()
    assert time.monotonic() - begun < 9  # DEADLINE_MS is 10 s
    with silent, contextlib.suppress(ConnectionResetError):
        assert silent.recv(1) == b""


def test_a_metric_reports_readiness(recorder, health):
    for ready in (0, 1):
        with serve(free_ports(1)[0], recorder, health) as port:
            assert f"\nlogmirror_ready {ready}\n" in ask(port, "/metrics").text
        health.mirror_opened("orders")
        health.mirror_opened("bills")


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

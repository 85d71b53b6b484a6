"""A standby takes a log dir in a real bucket over when its owner is gone, and not before."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import threading
import time
import urllib.request
from collections import Counter
from typing import TYPE_CHECKING
from urllib.error import HTTPError

import pytest
from confluent_kafka.admin import AdminClient

from broker.test_watermark import Watch
from kit.fakes.s3_proxy import S3Proxy
from kit.judges.services import JavaConsumer
from kit.runs.bucket_load import Load, Reading, create, stored
from kit.servers.machine import HOST, free_ports
from kit.servers.toxiproxy import Toxiproxy
from kit.tiers import sized
from logmirror.cli import commands
from logmirror.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

    from kit.servers.bucket_broker import BucketBroker


pytestmark = pytest.mark.slow
TIMEOUT_S = 9
TAKEOVERS = sized(1, 2, 6)


def wait_until(is_true: Callable[[], object], timeout_s: float = 20) -> None:
    deadline = time.monotonic() + timeout_s
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def waits(standby: BucketBroker) -> BucketBroker:
    standby.start(waits=False)
    wait_until(lambda: b"standby: waiting" in standby.log.read_bytes())
    return standby


def listens(broker: BucketBroker) -> bool:
    return b"\nlistening on " in b"\n" + broker.log.read_bytes()


@contextlib.contextmanager
def watching(broker, seen):
    """Watch the watermark of an owner, also for steps back from what others had before it."""
    watch = Watch(broker, "t", keeps_log_end=False)
    watch.seen = seen
    watcher = threading.Thread(target=watch.run)
    watcher.start()
    try:
        yield
    finally:
        watch.done.set()
        watcher.join(60)
    assert (watch.steps_back, watch.interruptions, watcher.is_alive()) == ([], 0, False)


@pytest.mark.thinned
@pytest.mark.statement("T3", "C3")
@pytest.mark.parametrize("end", ["kill", "pause"])
def test_clients_of_an_owner_that_is_gone_continue_at_the_standby(machines, end):
    """And back at the first one, which continues behind what the other one wrote."""
    owner, standby = machines("--standby").start(), machines("--standby")
    create(owner, "t")
    waits(standby)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((HOST, standby.port), 1)
    addresses = f"{owner.bootstrap},{standby.bootstrap}"
    seen = {"watermark": 0, "log end": 0}
    soon = {"socket.timeout.ms": 5_000}  # a paused owner does not close its connections
    with (
        Reading(addresses, "t", **soon) as reading,
        Load(addresses, "t", **soon, **{"enable.idempotence": True}) as load,
    ):
        for _ in range(TAKEOVERS):
            with watching(owner, seen):
                load.wait_for(500)
            (owner.kill if end == "kill" else owner.pause)()
            wait_until(lambda broker=standby: listens(broker), 40)
            load.wait_for(100)
            if end == "pause":
                owner.resume()
                assert owner.wait() == 69
            owner, standby = standby, owner
            standby.log.unlink()
            waits(standby)
        with watching(owner, seen):
            load.wait_for(100)
            load.__exit__()
            assert load.flush() == 0
        reading.wait_for(load.sent)
    assert load.failures == reading.errors == []
    found = stored(owner, "t")
    assert found == load.acked == reading.found()
    assert len(set(found.values())) == len(found) == load.sent
    assert 0 < seen["watermark"] <= sum(partition == 0 for partition, _ in found)
    assert standby.stop() == 0
    assert owner.alive


@pytest.mark.jvm
@pytest.mark.gate("it waits for a takeover; the way of the others, through one more server")
def test_clients_reach_the_next_owner_at_the_one_address_that_both_advertise(machines, tmp_path):
    """A load balancer's: it is all that clients know, and it leads to the owner.

    They are librdkafka's, and a group of Apache Kafka's consumer in Java.
    """
    [port] = free_ports(1)
    address = f"{HOST}:{port}"
    owner = machines("--standby", advertised=address).start()
    standby = waits(machines("--standby", advertised=address))
    with Toxiproxy(tmp_path) as balancer:
        balancer.link("clients", listen=port, upstream=owner.bootstrap)
        create(owner, "t")

        def advertised() -> list[str]:
            admin = AdminClient({"bootstrap.servers": address})
            found = admin.list_topics(timeout=20).brokers.values()
            return [f"{one.host}:{one.port}" for one in found]

        assert advertised() == [address]
        with (
            JavaConsumer(address, "t", "java", tmp_path) as java,
            Reading(address, "t") as reading,
            Load(address, "t", per_s=50, **{"enable.idempotence": True}) as load,
        ):
            wait_until(lambda: len(java.processed()) > 200, 120)  # it is slow to start
            owner.kill()
            wait_until(lambda: listens(standby), 40)
            balancer.ask("POST", "/proxies/clients", {"upstream": standby.bootstrap})
            load.wait_for(200)
            assert advertised() == [address]
            load.__exit__()
            assert load.flush() == 0
            reading.wait_for(load.sent)
            wait_until(lambda: len(set(java.processed())) == load.sent, 120)
        assert load.failures == reading.errors == []
        found = stored(standby, "t")
        assert found == load.acked == reading.found()
        assert set(java.processed()) == set(found.values())
        assert len(set(found.values())) == len(found) == load.sent


def test_an_owner_that_stops_hands_over_at_once(machines):
    owner, standby = machines().start(), waits(machines("--standby"))
    wait_until(lambda: b"the owner has epoch 1" in standby.log.read_bytes())
    assert owner.stop() == 0
    began_s = time.monotonic()
    wait_until(lambda: listens(standby), 40)
    assert time.monotonic() - began_s < TIMEOUT_S / 2
    assert b"the owner of epoch 1 has stopped" in standby.log.read_bytes()


def test_one_of_two_standbys_takes_over_and_the_other_one_waits_for_it(machines):
    owner = machines().start()
    standbys = [waits(machines("--standby")) for _ in range(2)]
    owner.kill()
    wait_until(lambda: any(map(listens, standbys)), 40)
    [second] = [one for one in standbys if not listens(one)]
    [first] = [one for one in standbys if one is not second]
    wait_until(lambda: b"the owner has epoch 2" in second.log.read_bytes())
    create(first, "t")
    assert first.stop() == 0
    wait_until(lambda: listens(second), 40)
    assert b"the owner of epoch 2 has stopped" in second.log.read_bytes()


@pytest.mark.gate("it waits for an outage")
def test_an_owner_is_not_suspected_while_the_bucket_is_away(machines, s3_server):
    owner, standby = machines().start(), machines("--standby", "--standby-timeout-ms", "5000")
    waits(standby)
    s3_server.kill()
    try:
        wait_until(lambda: b"the owner is not suspected" in standby.log.read_bytes(), 60)
    finally:
        s3_server.start()
    wait_until(lambda: b"the bucket responds again" in standby.log.read_bytes(), 60)
    create(owner, "t")
    time.sleep(6)  # longer than its timeout
    assert owner.alive
    assert not listens(standby)
    assert b"taking over" not in standby.log.read_bytes()


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGINT])
def test_a_standby_that_is_stopped_leaves_the_owner_alone(machines, end):
    owner, standby = machines().start(), waits(machines("--standby"))
    standby.signal(end)
    assert standby.wait() == 0
    create(owner, "t")


def test_the_monitoring_port_of_a_standby_says_what_it_waits_for(machines):
    port = free_ports(1)[0]
    owner = machines().start()
    standby = waits(machines("--standby", "--monitoring-port", str(port)))

    def get(path: str) -> tuple[int, str]:
        try:
            with urllib.request.urlopen(f"http://{HOST}:{port}{path}", timeout=20) as response:
                return response.status, response.read().decode()
        except HTTPError as error:
            return error.code, error.read().decode()

    assert get("/livez")[0] == 200
    assert get("/readyz")[0] == 503
    assert "standby" in get("/readyz")[1]
    wait_until(lambda: json.loads(get("/status.json")[1])["owner_epoch"] == 1)
    assert get("/metrics")[0] == 200
    owner.stop()
    wait_until(lambda: listens(standby), 40)
    assert get("/readyz")[0] == 200


@pytest.mark.gate("it counts for 20 s")
def test_a_standby_costs_one_request_and_an_owner_two_in_two_seconds(machines, s3_server, tmp_path):
    """And the owner lists the chain every 5 s, as it does without a standby."""
    with (
        S3Proxy(s3_server.endpoint, lambda _: None) as of_owner,
        S3Proxy(s3_server.endpoint, lambda _: None) as of_standby,
    ):
        machines(endpoint=of_owner.endpoint).start()
        waits(machines("--standby", endpoint=of_standby.endpoint))
        time.sleep(10)  # what a start has to do is done
        before = Counter(of_owner.asked), Counter(of_standby.asked)
        time.sleep(20)
        owner, standby = of_owner.asked - before[0], of_standby.asked - before[1]
    assert owner.keys() <= {"PutObject", "DeleteObject", "ListObjectsV2"}
    assert 5 <= owner["PutObject"] <= 11
    assert owner["DeleteObject"] <= 11
    assert owner["ListObjectsV2"] <= 5
    assert standby.keys() == {"ListObjectsV2"}
    assert 5 <= standby["ListObjectsV2"] <= 15


def test_a_standby_is_for_a_bucket(tmp_path):
    with pytest.raises(UsageError, match="--standby is for a log directory in a bucket"):
        commands.run_plain(["broker", "--log-dir", str(tmp_path), "--standby"])

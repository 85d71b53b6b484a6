"""Replication over a faulty network stays exact, and resumes when the fault is over.

One mirror reads its source through Toxiproxy, another writes its destination through it. Both links
get one fault after the other while producers write. One topic has records of today, so that the
destination's idempotent-producer check applies; the other has records of years ago, so that it does
not.
"""

import contextlib
import signal
import time

import pytest

from kit.judges.clients import Message, produce
from kit.judges.copies import anomalies, copy, forget_connections, wait_for_end
from kit.judges.truth import Source
from kit.runs.commands import wait_until, write_config
from kit.runs.inline_run import InlineRun, mirror_to_cluster
from kit.runs.writer import writing
from kit.servers.apache import VERSIONS
from kit.servers.kafka import ApacheKafka, Listener
from kit.servers.machine import HOST, free_ports
from kit.servers.toxiproxy import Toxiproxy
from logmirror.to_kafka.idempotence import SEND_DEADLINE_MS

pytestmark = [pytest.mark.xdist_group("e2e-copy-kills"), pytest.mark.timeout(900)]

LONG_AGO_MS = 1_500_000_000_000
IMPATIENT = {
    "socket.timeout.ms": "1500",
    "request.timeout.ms": "1000",
    "socket.connection.setup.timeout.ms": "1500",
}
"""So that a connection without responses times out within the test."""

FAULT_S = 2.5
FAULTS = {
    "down": {},
    "latency": {"latency": {"latency": 300, "jitter": 200}},
    "bandwidth": {"bandwidth": {"rate": 30}},  # kB/s
    "pieces": {"slicer": {"average_size": 200, "size_variation": 100, "delay": 1000}},
    "reset": {"reset_peer": {"timeout": 0}},
    "slow close": {"limit_data": {"bytes": 3000}, "slow_close": {"delay": 1000}},
    "no packets": {"timeout": {"timeout": 0}},
}
"""The toxics that make each fault, with their attributes."""


@pytest.fixture(scope="module")
def faulty(tmp_path_factory):
    """A broker that is source and destination, and two ways to it that can be spoiled."""
    folder = tmp_path_factory.mktemp("faulty")
    ports = dict(zip(("SOURCE", "COPY"), free_ports(2), strict=True))
    listeners = [
        Listener(name=name, protocol="PLAINTEXT", advertised=f"{HOST}:{port}")
        for name, port in ports.items()
    ]
    config = {"producer.id.expiration.check.interval.ms": 1000}
    broker = ApacheKafka(VERSIONS[-1], folder, listeners=listeners, config=config)
    try:
        broker.start()
        with Toxiproxy(folder) as toxiproxy:
            links = {
                name: toxiproxy.link(name, listen=port, upstream=broker.address(name))
                for name, port in ports.items()
            }
            yield broker, links
            forget_connections()
    finally:
        broker.remove()


def mirror_through(link, name, topic, direct):
    """A mirror of which one end, the one that the link is named for, is behind it."""
    ends = [link.address if name == end else direct for end in ("SOURCE", "COPY")]
    copied = f"{topic}-{name}"
    mirror = mirror_to_cluster(topic, *ends, name=copied, topic=copied, properties=IMPATIENT)
    mirror["source"]["properties"] = IMPATIENT
    return mirror


@pytest.mark.mirror_v3("E2E-06")
def test_replication_through_every_network_fault_resumes_and_is_exact(faulty, tmp_path):
    broker, links = faulty
    topics = {"fresh": 0, "old": LONG_AGO_MS}
    for topic in topics:
        broker.create_topic(topic)
    mirrors = {
        name: [mirror_through(link, name, topic, broker.bootstrap) for topic in topics]
        for name, link in links.items()
    }

    def ends():
        return [Source(broker.bootstrap, f"fresh-{name}").bounds(0)[1] for name in links]

    with contextlib.ExitStack() as stack:
        for number, (topic, stamp_ms) in enumerate(topics.items()):
            writer = writing(
                broker.bootstrap, topic, partitions=1, seed=number, timestamp_ms=stamp_ms
            )
            stack.enter_context(writer)
        runs = [
            stack.enter_context(InlineRun(write_config(tmp_path / name, *of), folder=tmp_path))
            for name, of in mirrors.items()
        ]
        for name in links:
            wait_for_end(broker.bootstrap, f"fresh-{name}", 20)
        for fault in FAULTS:
            with spoiled(links.values(), fault):
                time.sleep(FAULT_S)
            wait_for_progress(ends, runs, f"after {fault}")
        for run in runs:
            run.signal(signal.SIGTERM)
        assert [run.wait() for run in runs] == [0, 0]
    copy(*(mirror for of in mirrors.values() for mirror in of))

    for topic in topics:
        for name in links:
            found = anomalies(broker.bootstrap, topic, broker.bootstrap, f"{topic}-{name}")
            assert found == [], (topic, name)
        assert Source(broker.bootstrap, topic).bounds(0)[1] > 500


@contextlib.contextmanager
def spoiled(links, fault):
    with contextlib.ExitStack() as stack:
        for link in links:
            if fault == "down":
                stack.enter_context(link.down())
            else:
                for toxic, attributes in FAULTS[fault].items():
                    stack.enter_context(link.spoiled(toxic, **attributes))
        yield


def wait_for_progress(ends, runs, when):
    before = ends()
    wait_until(
        lambda: (
            all(now > then for now, then in zip(ends(), before, strict=True))
            or not all(run.alive for run in runs)
        ),
        what=lambda: f"{ends()} to pass {before} {when}:\n" + "\n".join(r.text for r in runs),
    )
    assert all(run.alive for run in runs), when + "\n".join(run.text for run in runs)


@pytest.mark.gate("a minute of waiting")
def test_a_batch_that_takes_longer_than_the_deadline_gets_through(faulty, topic_name):
    """20 MB over a link of 4 MB/s: producer state replaces the deadline."""
    broker, links = faulty
    largest, copied = 32 << 20, f"copy-of-{topic_name}"
    broker.create_topic(topic_name, config={"max.message.bytes": largest})
    messages = [Message(b"k", bytes([n]) * (20 << 20)) for n in range(2)]
    produce(broker.bootstrap, topic_name, messages, config={"message.max.bytes": largest})
    mirror = mirror_to_cluster(topic_name, broker.bootstrap, links["COPY"].address, topic=copied)
    started = time.monotonic()

    with links["COPY"].spoiled("bandwidth", stream="upstream", rate=4000):
        copy(mirror)

    assert time.monotonic() - started > 2 * SEND_DEADLINE_MS / 1000
    assert anomalies(broker.bootstrap, topic_name, broker.bootstrap, copied) == []

"""A broker behind a proxy that spoils its requests to a real S3 server.

Each fault by itself, then all of them in an order that a seed draws, with kills of the broker. The
clients are librdkafka's and Apache Kafka's. Content is compared by partition, offset and value.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import re
import time
from collections import Counter
from typing import TYPE_CHECKING, Any, Final

import pytest

from kit.fakes.s3_proxy import Fault, S3Proxy
from kit.judges.java_clients import JavaLoad, JavaReading
from kit.runs.bucket_load import Load, Reading, create, stored
from kit.runs.commands import wait_until
from kit.servers.bucket_broker import BucketBroker
from kit.tiers import all_but, sized

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from kit.servers.s3 import S3Server

pytestmark = pytest.mark.slow
SMALL = ("--override", "log.segment.bytes=100000")
TINY = ("--override", "log.segment.bytes=10000")
IDEMPOTENT = {"enable.idempotence": True}
ROUNDS = sized(2, 3, 10)

BEFORE: Final = ("reset", "cut-body", "wrong-body", "503", "500", "429", "409", "200-error")
"""The server gets nothing, or what it gets is refused."""

AFTER: Final = ("lose-response", "late", "cut-response")
"""The server executes the request, and the broker does not get the response."""

READS: Final = ("cut-response", "wrong-response", "reset", "503")
MAKES_VISIBLE: Final = ("PutObject", "CompleteMultipartUpload")
OF_RECORDS: Final = re.compile(r"/commits/|\.batches$")
"""Paths of the objects that hold records, without copies of them."""

REQUESTS: Final = ("PutObject", "GetObject", "ListObjectsV2", "DeleteObject")
FAULTS: Final = [
    *(Fault(kind, "PutObject") for kind in (*BEFORE, *AFTER)),
    *(Fault(kind, "GetObject") for kind in READS),
    *(Fault(kind, "ListObjectsV2") for kind in ("reset", "503", "late")),
    *(Fault(kind, "DeleteObject") for kind in ("reset", "503", "lose-response")),
    *(Fault("delay", method) for method in (*REQUESTS, "")),
]


@pytest.fixture
def proxy(s3_server: S3Server) -> Iterator[S3Proxy]:
    with S3Proxy(s3_server.endpoint, lambda _: None) as found:
        yield found


@pytest.fixture
def brokers(
    tmp_path: Path, s3_server: S3Server, bucket: str, proxy: S3Proxy
) -> Iterator[Callable[..., BucketBroker]]:
    """Make brokers on one bucket behind the proxy, each with a machine of its own."""
    with contextlib.ExitStack() as made:

        def make(*options: str, **more: Any) -> BucketBroker:
            folder = tmp_path / f"machine-{len(list(tmp_path.iterdir()))}"
            broker = BucketBroker(
                folder, s3_server, bucket, *SMALL, *options, endpoint=proxy.endpoint, **more
            )
            made.callback(broker.__exit__)
            return broker

        yield make


def drawn(faults: list[Fault], seed: int) -> Iterator[Fault | None]:
    """Spoil every fifth request or so."""
    chance = random.Random(seed)
    while True:
        yield from itertools.repeat(None, chance.randint(0, 8))
        yield chance.choice(faults)


def check(broker: BucketBroker, load: Load | JavaLoad, reading: Reading | JavaReading) -> None:
    """Check that each record is there once, and was read once, in order."""
    assert load.flush() == 0
    reading.wait_for(load.sent)
    assert load.failures == reading.errors == []
    assert stored(broker, "t") == load.acked == reading.found()
    assert len(set(load.acked.values())) == len(load.acked) == load.sent


def check_created(proxy: S3Proxy) -> None:
    """Check that no write could replace, and that no name of records was used twice."""
    conditions = [head.get("if-none-match") for name, head in proxy.heads if name in MAKES_VISIBLE]
    assert set(conditions) == {"*"}
    names = Counter(path for path in proxy.created if OF_RECORDS.search(path))
    assert [name for name, count in names.items() if count > 1] == []
    assert any("/commits/" in name for name in names)
    assert any(name.endswith(".batches") for name in names)


@pytest.mark.parametrize(
    "fault",
    all_but(
        FAULTS,
        Fault("lose-response", "PutObject"),
        Fault("503", "PutObject"),
        Fault("cut-response", "GetObject"),
        Fault("delay", ""),
        reason="the others",
    ),
    ids=lambda fault: f"{fault.kind}-{fault.method or 'any'}",
)
def test_no_fault_of_a_request_loses_or_duplicates_a_record(brokers, proxy, fault):
    broker = brokers().start()
    create(broker, "t")
    with Reading(broker.bootstrap, "t") as reading:
        with Load(broker.bootstrap, "t", **IDEMPOTENT) as load:
            load.wait_for(300)
            proxy.spoil_some(drawn([fault], 1))
            load.wait_for(1_500)
            broker.kill()  # so that it reads what it has written
            broker.start()
            load.wait_for(500)
        check(broker, load, reading)
    check_created(proxy)
    assert proxy.spoiled


@pytest.mark.thinned
@pytest.mark.parametrize("seed", range(sized(1, 3, 20)))
def test_faults_in_any_order_and_kills_lose_or_duplicate_no_record(brokers, proxy, seed):
    chance = random.Random(seed)
    broker = brokers().start()
    create(broker, "t")
    with Reading(broker.bootstrap, "t") as reading:
        with Load(broker.bootstrap, "t", **IDEMPOTENT) as load:
            proxy.spoil_some(drawn(FAULTS, seed))
            for _ in range(ROUNDS):
                load.wait_for(chance.randint(100, 2_000))
                broker.kill()
                broker.start()
            load.wait_for(500)
        check(broker, load, reading)
    check_created(proxy)
    assert proxy.spoiled > 5


JAVA: Final = (
    Fault("reset", "PutObject"),
    Fault("503", "PutObject"),
    Fault("lose-response", "PutObject"),
    Fault("delay", ""),
    Fault("late", "PutObject"),
)


@pytest.mark.jvm
@pytest.mark.gate("the same faults, with other clients")
def test_clients_in_java_lose_and_duplicate_no_record_at_any_fault(brokers, proxy, tmp_path):
    """One consumer reads meanwhile, another one all of it from the bucket, whose reads fail too."""
    broker = brokers(*TINY).start()
    create(broker, "t")
    at = (broker.bootstrap, "t", tmp_path)
    with JavaLoad(*at) as load:
        with JavaReading(*at) as reading:
            load.wait_for(200)
            for fault in JAVA:
                until = proxy.spoiled + 5
                proxy.spoil_some(drawn([fault], 1))
                wait_until(lambda until=until: proxy.spoiled >= until, what=lambda: load.text)
                load.wait_for(200)
            reading.wait_for(len(load.acked))
        broker.kill()
        broker.start()
        load.wait_for(200)
        assert load.flush() == 0
    before = proxy.spoiled
    proxy.spoil_some(drawn([Fault(kind, "GetObject") for kind in READS], 1))
    with JavaReading(*at, group="later") as later:
        check(broker, load, later)
    check_created(proxy)
    assert proxy.spoiled > before
    assert reading.errors == []
    assert reading.found().items() <= load.acked.items()


@pytest.mark.jvm
@pytest.mark.gate("it waits for an outage of 26 s")
@pytest.mark.parametrize("fault", ["reset", "lose-response"])
def test_a_producer_in_java_repeats_a_batch_that_may_be_stored(brokers, proxy, tmp_path, fault):
    """REQUEST_TIMED_OUT: the batch is stored when the bucket is back, or it is there already."""
    broker = brokers(*TINY).start()
    create(broker, "t")
    at = (broker.bootstrap, "t", tmp_path)
    with JavaReading(*at) as reading, JavaLoad(*at) as load:
        load.wait_for(200)
        proxy.spoil(Fault(fault, "", times=1_000_000))
        began_s, created = time.monotonic(), len(proxy.created)
        wait_until(lambda: "REQUEST_TIMED_OUT" in load.text, what=lambda: load.text)
        time.sleep(max(0, began_s + 26 - time.monotonic()))
        meanwhile = [path for path in proxy.created[created:] if "/commits/" in path]
        proxy.spoil()
        load.wait_for(500)
        check(broker, load, reading)
    check_created(proxy)
    assert bool(meanwhile) == (fault == "lose-response")
    broker.kill()
    broker.start()
    assert stored(broker, "t") == load.acked

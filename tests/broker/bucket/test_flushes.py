"""Goal: without a flush before each response, records come into the bucket by size and by age, and
what the metrics call durable is there.

Method: a real broker behind a proxy that holds its uploads back, or none. The objects are read by a
parser of their own. Records are compared by offset and digest.
"""

from __future__ import annotations

import itertools
import re
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

from broker.bucket.test_statements_of_faults import in_bucket, wait_until_in_bucket
from broker.bucket.test_statements_of_reads import (
    HOUR_MS,
    IN_BACKGROUND,
    NEVER,
    append,
    batch,
    expected,
    read_all,
)
from kit.judges.commits import end_in_bucket
from kit.judges.partition_client import PartitionClient
from kit.judges.scrape import ask
from kit.runs.commands import wait_until
from kit.servers.machine import free_ports

if TYPE_CHECKING:
    from broker.bucket.conftest import Proxied

pytestmark = pytest.mark.slow


def flush_another_topic(of: Proxied) -> None:
    """Cause a commit, which has what else is due; it is in the bucket at the return."""
    with PartitionClient(of.broker.bootstrap, "other") as other:
        assert other.produce(batch("other", 0)).error == 0


@pytest.mark.parametrize("whose", ["topic", "broker"])
def test_a_partition_is_flushed_when_it_has_so_many_bytes(proxied, whose):
    """Its age and its number of records are never reached, by settings of one or the other."""
    size = len(batch("t", 0))
    by_broker = {"flush_on_ack": False, "flush_ms": int(HOUR_MS)} if whose == "broker" else {}
    found = proxied(flush_bytes=4 * size, **by_broker)
    found.create_topic("t", {} if by_broker else IN_BACKGROUND)
    found.create_topic("other", {"flush.messages": "1"})
    with PartitionClient(found.broker.bootstrap, "t") as partition:
        for number in range(3):
            append(partition, range(number, number + 1))
            flush_another_topic(found)
            assert in_bucket(found, "t") == []
        append(partition, range(3, 4))
        wait_until_in_bucket(found, "t", range(4))
        append(partition, range(4, 8))
        wait_until_in_bucket(found, "t", range(8))


def test_a_partition_is_flushed_by_the_age_of_its_oldest_record_while_others_are_appended(proxied):
    found = proxied()
    found.create_topic("t", {"flush.messages": NEVER, "flush.ms": "1000"})
    numbers = itertools.count()
    with PartitionClient(found.broker.bootstrap, "t") as partition:

        def is_first_in_bucket() -> bool:
            number = next(numbers)
            append(partition, range(number, number + 1))
            return in_bucket(found, "t")[:2] == expected("t", range(1))

        wait_until(is_first_in_bucket, what=lambda: "the oldest record", timeout_s=60)
        count = next(numbers)
        wait_until_in_bucket(found, "t", range(count))  # and the last of them without an append
        assert read_all(partition) == expected("t", range(count)) == in_bucket(found, "t")


def shown(port: int, name: str) -> int:
    """The metric of the topic's only partition."""
    page = ask(port, "/metrics").text
    [value] = re.findall(rf'^logmirror_broker_{name}{{.*topic="t".*}} (\S+)$', page, re.MULTILINE)
    return int(float(value))


def test_the_durable_offset_of_the_metrics_is_that_of_the_bucket(proxied):
    [port] = free_ports(1)
    found = proxied(flush_on_ack=False, flush_ms=100, monitoring_port=port)
    found.create_topic("t", {})

    def catches_up(end: int) -> bool:
        durable = shown(port, "durable_offset")
        assert durable <= end_in_bucket(found.files)
        return durable == end

    with PartitionClient(found.broker.bootstrap, "t") as partition:
        append(partition, range(3))
        wait_until(lambda: catches_up(6), what=lambda: "the first records")
        held = found.proxy.held
        with found.proxy.holding():
            append(partition, range(3, 5))
            wait_until(lambda: found.proxy.held > held, what=lambda: "an upload")
            append(partition, range(5, 10))
            assert read_all(partition) == expected("t", range(10))
            for name in ("log_end_offset", "high_watermark"):  # a page may be of a moment ago
                wait_until(lambda name=name: shown(port, name) == 20, what=lambda: "the new end")
            assert shown(port, "durable_offset") == end_in_bucket(found.files) == 6
        wait_until(lambda: catches_up(20), what=lambda: "the others")
    assert in_bucket(found, "t") == expected("t", range(10))


def test_with_flush_on_ack_the_durable_offset_lies_behind_the_log_end_while_a_producer_waits(
    proxied,
):
    [port] = free_ports(1)
    found = proxied(monitoring_port=port)
    found.create_topic("t", {})
    with (
        PartitionClient(found.broker.bootstrap, "t") as partition,
        ThreadPoolExecutor(1) as pool,
    ):
        append(partition, range(3))
        wait_until(lambda: shown(port, "durable_offset") == 6, what=lambda: "the first records")
        with found.proxy.holding():
            waiting = pool.submit(append, partition, range(3, 4))
            wait_until(lambda: shown(port, "log_end_offset") == 8, what=lambda: "the new end")
            assert shown(port, "durable_offset") == end_in_bucket(found.files) == 6
            assert shown(port, "high_watermark") == 6
            assert not waiting.done()
        waiting.result(60)
        for name in ("durable_offset", "high_watermark"):
            wait_until(lambda name=name: shown(port, name) == 8, what=lambda: "the flushed end")
    assert in_bucket(found, "t") == expected("t", range(4))

"""Goal: a service in JavaScript runs on the embedded broker unchanged.

Method: KafkaJS writes, shares a group and copies in transactions; librdkafka reads what it wrote.
"""

from __future__ import annotations

import pytest

from kit.judges.clients import rows_by_librdkafka
from kit.judges.kafkajs import run_service

pytestmark = pytest.mark.in_bucket

COUNT = 500


def test_kafkajs_writes_shares_a_group_and_copies_in_transactions(embedded, topic_name):
    found = run_service(embedded.bootstrap, topic_name, COUNT)

    assert found == {
        "protocol": "consumer",
        "committed": [COUNT // 2] * 2,
        "ends": [COUNT // 2] * 2,
        "seen": COUNT,
    }
    for partition in range(2):
        numbers = range(partition, COUNT, 2)
        for topic in (topic_name, f"{topic_name}-out"):
            rows = list(rows_by_librdkafka(embedded.bootstrap, topic, partition=partition))
            assert [row.key for row in rows] == [b"k%d" % number for number in numbers]
            assert [row.value for row in rows] == [b"v%d" % number for number in numbers]
            assert [row.headers for row in rows] == [
                ((b"n", b"%d" % number),) for number in numbers
            ]

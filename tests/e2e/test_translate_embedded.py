"""Goal: a replica with new offsets in the embedded broker is exact, as in Apache Kafka.

Method: as in test_translate.py, with the embedded broker as source and destination. Mirrors are
processes without Spark that end by SIGKILL at failpoints.
"""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

import pytest

from kit.judges.clients import odd_messages, produce, produce_transactions
from kit.judges.copies import copy
from kit.judges.gaps import plain_messages, write_idempotently, write_transactions
from kit.judges.translated import mirror_of, visible
from kit.runs.inline_run import InlineRun, config_text
from kit.servers.embedded import EmbeddedBroker
from kit.servers.kafka import create_topic
from kit.tiers import all_but
from logmirror.failpoints import POINTS, VARIABLE

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PASSED = [point for point in POINTS if point.startswith("translate.")]


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[EmbeddedBroker]:
    """An embedded broker of its own."""
    broker = EmbeddedBroker(tmp_path / "broker", segment_bytes=200_000)
    with broker:
        yield broker


def test_committed_records_of_all_kinds_are_copied_once_and_in_order(broker, topic_name):
    create_topic(broker.bootstrap, topic_name, 3, {})
    write_transactions(broker.bootstrap, topic_name, 0)
    write_idempotently(broker.bootstrap, topic_name, 1)
    produce(broker.bootstrap, topic_name, odd_messages(300, seed=7), partition=1)
    aborted = [(plain_messages(5, seed=1), False)]
    produce_transactions(
        broker.bootstrap, topic_name, aborted, partition=2, transactional_id=topic_name
    )
    for seed in (1, 2):
        copy(mirror_of(broker, topic_name))
        for partition in range(3):
            expected = visible(broker, topic_name, partition)
            assert visible(broker, f"{topic_name}-copy", partition) == expected
        write_transactions(broker.bootstrap, topic_name, 0, seed=seed)
    assert visible(broker, topic_name, 2) == []


@pytest.mark.parametrize(
    "point", all_but(PASSED, "translate.sent", reason="a process per failpoint")
)
def test_a_crash_at_a_failpoint_loses_and_duplicates_nothing(broker, topic_name, tmp_path, point):
    create_topic(broker.bootstrap, topic_name, 1, {})
    config = tmp_path / "logmirror.yaml"
    config.write_text(config_text(mirror_of(broker, topic_name)))
    for seed in range(2):
        write_transactions(broker.bootstrap, topic_name, seed=seed)
        with InlineRun(
            config, "--until-now", folder=tmp_path, environment={VARIABLE: point}
        ) as run:
            assert run.wait() == -signal.SIGKILL, run.text
    with InlineRun(config, "--until-now", folder=tmp_path) as run:
        assert run.wait() == 0, run.text
    assert visible(broker, f"{topic_name}-copy") == visible(broker, topic_name)
    assert visible(broker, topic_name)

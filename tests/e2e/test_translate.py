"""Replicas with new offsets: a reader of committed records sees all of them, once, in order.

Method: librdkafka reads both topics (read_committed) and must see the same sequence of keys,
values, headers and timestamps. Mirrors are processes without Spark that end by SIGKILL or are
paused by SIGSTOP at failpoints and at random times. Source and destination are topics of one
broker.
"""

from __future__ import annotations

import random
import signal
import sys
import threading
import time
from typing import TYPE_CHECKING

import psutil
import pytest
from confluent_kafka import IsolationLevel, TopicPartition
from confluent_kafka.admin import AdminClient, OffsetSpec

from kit.judges.clients import Message, odd_messages, produce, produce_transactions
from kit.judges.copies import copy, copying
from kit.judges.gaps import (
    COMPACTED,
    log_bounds,
    plain_messages,
    trim,
    write_duplicated_keys,
    write_idempotently,
    write_transactions,
)
from kit.judges.translated import mirror_of, visible
from kit.runs.cleaning import clean
from kit.runs.commands import Run, logmirror_json, wait_until, write_config
from kit.runs.inline_run import InlineRun, config_text
from kit.servers.apache import RELEASES
from kit.tiers import all_but
from logmirror.app.status import status
from logmirror.config.settings import load_text
from logmirror.errors import PositionError, UsageError
from logmirror.failpoints import POINTS, VARIABLE

if TYPE_CHECKING:
    from pathlib import Path


FENCED = 69
OURS = [point for point in POINTS if point.startswith("translate.")]
PASSED = ["plan.positions", "plan.dispatch", "fetch.answered", *OURS, "commit.received"]

# `kit.runs.inline_run` in a process that stops itself at a named point, as if its machine had
# slept.
SLEEPER = """
import os, runpy, signal, sys, threading
from logmirror import failpoints

def reach(point):
    if point == os.environ["SLEEP_AT"] and not asleep:
        asleep.append(point)
        signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)

asleep = []
failpoints.reach = reach
sys.argv[0] = "logmirror"
runpy.run_module("kit.runs.inline_run", run_name="__main__", alter_sys=True)
"""


class SleepingRun(InlineRun):
    """A copier that falls asleep at the point in `SLEEP_AT`, once."""

    program = (sys.executable, "-c", SLEEPER)


@pytest.fixture
def config(apache_kafka, topic_name, tmp_path) -> Path:
    path = tmp_path / "logmirror.yaml"
    path.write_text(config_text(mirror_of(apache_kafka, topic_name)))
    return path


def copy_to_the_end(config: Path, folder: Path) -> None:
    with InlineRun(config, "--until-now", folder=folder) as run:
        assert run.wait() == 0, run.text


def is_subsequence(few: list[tuple[object, ...]], many: list[tuple[object, ...]]) -> bool:
    rest = iter(many)
    return all(one in rest for one in few)


# -- what is copied ------------------------------------------------------------------------------


def test_committed_records_of_all_kinds_are_copied_once_and_in_order(apache_kafka, topic_name):
    broker = apache_kafka
    broker.create_topic(topic_name, partitions=3)
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
    ends = [log_bounds(broker.bootstrap, f"{topic_name}-copy", n)[1] for n in range(3)]
    assert ends[2] == 0  # of nothing but aborted records there is no trace


def test_the_remaining_records_of_a_compacted_and_trimmed_topic_are_copied(
    apache_kafka, topic_name
):
    broker = apache_kafka
    broker.create_topic(topic_name, config=COMPACTED)
    write_duplicated_keys(broker.bootstrap, topic_name)
    write_transactions(broker.bootstrap, topic_name, keys=30)
    clean(broker, topic_name, 1)
    trim(broker.bootstrap, topic_name, 0, 100)
    before = visible(broker, topic_name)
    copy(mirror_of(broker, topic_name))
    copied = visible(broker, f"{topic_name}-copy")
    assert is_subsequence(copied, before)
    assert is_subsequence(visible(broker, topic_name), copied)  # tombstones go, some day
    assert len(copied) > 20


def test_foreign_records_stay_unchanged(apache_kafka, topic_name):
    broker, there = apache_kafka, f"{topic_name}-copy"
    broker.create_topic(topic_name)
    broker.create_topic(there)
    others = [Message(b"other", b"%d" % n, (), 1_700_000_000_000) for n in range(40)]
    produce(broker.bootstrap, there, others[:20])
    for round_ in range(4):
        write_transactions(broker.bootstrap, topic_name, seed=round_)
        copy(mirror_of(broker, topic_name))
        produce(broker.bootstrap, there, others[20 + 5 * round_ : 25 + 5 * round_])
    found = visible(broker, there)
    assert [row for row in found if row[1] != b"other"] == visible(broker, topic_name)
    assert [row[2] for row in found if row[1] == b"other"] == [o.value for o in others]


def test_status_reports_the_position_as_a_source_offset(apache_kafka, topic_name, config):
    apache_kafka.create_topic(topic_name)
    write_transactions(apache_kafka.bootstrap, topic_name)
    end = log_bounds(apache_kafka.bootstrap, topic_name, 0)[1]
    copy(mirror_of(apache_kafka, topic_name))
    (row,) = logmirror_json("status", "-c", config)
    assert (row["position"], row["source_end"], row["lag"]) == (end, end, 0)
    produce(apache_kafka.bootstrap, topic_name, plain_messages(3, seed=1))
    (row,) = logmirror_json("status", "-c", config)
    assert (row["position"], row["lag"]) == (end, 3)


# -- death and sleep -----------------------------------------------------------------------------


@pytest.mark.parametrize("apache_kafka", ["4.3.1"], indirect=True)
@pytest.mark.parametrize(
    "point", all_but(PASSED, "translate.sent", reason="a process per failpoint")
)
def test_a_crash_at_a_failpoint_loses_and_duplicates_nothing(
    apache_kafka, topic_name, config, tmp_path, point
):
    apache_kafka.create_topic(topic_name)
    for seed in range(2):
        write_transactions(apache_kafka.bootstrap, topic_name, seed=seed)
        with InlineRun(
            config, "--until-now", folder=tmp_path, environment={VARIABLE: point}
        ) as run:
            assert run.wait() == -signal.SIGKILL, run.text
    copy_to_the_end(config, tmp_path)
    assert visible(apache_kafka, f"{topic_name}-copy") == visible(apache_kafka, topic_name)


@pytest.mark.parametrize("apache_kafka", RELEASES, indirect=True)
def test_a_crash_at_any_time_loses_and_duplicates_nothing(
    apache_kafka, topic_name, config, tmp_path
):
    apache_kafka.create_topic(topic_name)
    chooser = random.Random(5)
    over = threading.Event()

    def write() -> None:
        for number in range(10_000):
            if over.is_set():
                return
            messages = plain_messages(300, seed=number)
            one = [(messages[:200], True), (messages[200:220], False), (messages[220:], True)]
            produce_transactions(
                apache_kafka.bootstrap, topic_name, one, transactional_id=topic_name
            )

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for _ in range(8):
            with InlineRun(config, folder=tmp_path) as run:
                run.wait_for("copied")
                time.sleep(chooser.uniform(0, 1.5))
                run.kill()
    finally:
        over.set()
        writer.join()
    copy_to_the_end(config, tmp_path)
    expected = visible(apache_kafka, topic_name)
    assert len(expected) > 1000
    assert visible(apache_kafka, f"{topic_name}-copy") == expected


@pytest.mark.gate("repeated kills")
@pytest.mark.parametrize("apache_kafka", RELEASES, indirect=True)
def test_a_crash_between_large_transactions_loses_and_duplicates_nothing(
    apache_kafka, topic_name, config, tmp_path
):
    apache_kafka.create_topic(topic_name)
    value = random.Random(1).randbytes(100_000)
    messages = [Message(b"%d" % n, value, (), 1_700_000_000_000 + n) for n in range(600)]
    produce(apache_kafka.bootstrap, topic_name, messages)
    for nth in (2, 1):
        death = {VARIABLE: f"translate.committed#{nth}"}
        with InlineRun(config, "--until-now", folder=tmp_path, environment=death) as run:
            assert run.wait() == -signal.SIGKILL, run.text
    copy_to_the_end(config, tmp_path)
    keys = [row[1] for row in visible(apache_kafka, f"{topic_name}-copy")]
    assert keys == [b"%d" % n for n in range(600)]


@pytest.mark.parametrize("apache_kafka", ["3.9.2"], indirect=True)
@pytest.mark.parametrize("point", all_but(OURS, "translate.sent", reason="a process per failpoint"))
def test_a_paused_instance_changes_nothing_after_another_took_over(
    apache_kafka, topic_name, config, tmp_path, point
):
    apache_kafka.create_topic(topic_name)
    write_transactions(apache_kafka.bootstrap, topic_name)
    with SleepingRun(config, folder=tmp_path, environment={"SLEEP_AT": point}) as sleeper:
        process = psutil.Process(sleeper.pid)
        wait_until(
            lambda: process.status() in (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE),
            what=lambda: f"sleep at {point}:\n{sleeper.text}",
        )
        assert process.status() == psutil.STATUS_STOPPED, sleeper.text
        copy_to_the_end(config, tmp_path)
        expected = visible(apache_kafka, topic_name)
        assert visible(apache_kafka, f"{topic_name}-copy") == expected
        sleeper.signal(signal.SIGCONT)
        write_transactions(apache_kafka.bootstrap, topic_name, seed=1)
        assert sleeper.wait() == FENCED, sleeper.text
        assert "another run of this mirror has taken over the flow" in sleeper.text
    copy_to_the_end(config, tmp_path)
    assert visible(apache_kafka, f"{topic_name}-copy") == visible(apache_kafka, topic_name)


@pytest.mark.parametrize("apache_kafka", RELEASES, indirect=True)
def test_the_newer_of_two_instances_continues(apache_kafka, topic_name, config, tmp_path):
    apache_kafka.create_topic(topic_name)
    write_transactions(apache_kafka.bootstrap, topic_name)
    with InlineRun(config, folder=tmp_path) as older:
        older.wait_for("copied")
        with InlineRun(config, folder=tmp_path) as newer:
            newer.wait_for("mirror starts")
            for seed in range(1, 6):
                write_transactions(apache_kafka.bootstrap, topic_name, seed=seed)
            assert older.wait() == FENCED, older.text
            end = log_bounds(apache_kafka.bootstrap, topic_name, 0)[1]
            newer.wait_for(f"to={end - 1}\\b")
            newer.signal(signal.SIGTERM)
            assert newer.wait() == 0, newer.text
    assert visible(apache_kafka, f"{topic_name}-copy") == visible(apache_kafka, topic_name)


# -- what stops it -------------------------------------------------------------------------------


def test_a_refused_batch_leaves_no_transaction_open(kafka_431, topic_name):
    there = f"{topic_name}-copy"
    kafka_431.create_topic(topic_name)
    kafka_431.create_topic(there, config={"max.message.bytes": 2000})
    produce(kafka_431.bootstrap, topic_name, [Message(b"k", b"v" * n) for n in (10, 10_000)])
    with pytest.raises(UsageError) as refused:
        copy(mirror_of(kafka_431, topic_name, topic_sync="off", max_batch_bytes=0))
    assert refused.value.facts["error"] == "MESSAGE_TOO_LARGE"
    admin = AdminClient({"bootstrap.servers": kafka_431.bootstrap})
    where = TopicPartition(there, 0)

    def end(level: IsolationLevel) -> int:
        found = admin.list_offsets({where: OffsetSpec.latest()}, isolation_level=level)
        return int(found[where].result(20).offset)

    committed = IsolationLevel.READ_COMMITTED
    wait_until(  # long before the transaction's own timeout of a minute
        lambda: end(committed) == end(IsolationLevel.READ_UNCOMMITTED),
        what=lambda: "the end of the transaction",
        timeout_s=10,
    )
    assert visible(kafka_431, there) == []


def reason_in_status(broker, topic):
    """Why `status` reports that `run` would refuse the mirror."""
    (row,) = status(load_text(config_text(mirror_of(broker, topic)), environ={}))
    return row.error.facts["reason"]


def test_a_recreated_source_is_refused(kafka_431, topic_name):
    kafka_431.create_topic(topic_name)
    produce(kafka_431.bootstrap, topic_name, plain_messages(10, seed=1))
    copy(mirror_of(kafka_431, topic_name))
    kafka_431.delete_topic(topic_name)
    kafka_431.create_topic(topic_name)
    produce(kafka_431.bootstrap, topic_name, plain_messages(20, seed=2))
    with pytest.raises(PositionError) as refused:
        copy(mirror_of(kafka_431, topic_name))
    assert refused.value.facts["reason"] == "SourceRecreated"
    assert reason_in_status(kafka_431, topic_name) == "SourceRecreated"
    assert len(visible(kafka_431, f"{topic_name}-copy")) == 10


def test_a_source_trimmed_past_the_position_is_refused(kafka_431, topic_name):
    kafka_431.create_topic(topic_name)
    produce(kafka_431.bootstrap, topic_name, plain_messages(10, seed=1))
    copy(mirror_of(kafka_431, topic_name))
    produce(kafka_431.bootstrap, topic_name, plain_messages(10, seed=2))
    trim(kafka_431.bootstrap, topic_name, 0, 15)
    with pytest.raises(PositionError) as refused:
        copy(mirror_of(kafka_431, topic_name))
    facts = refused.value.facts
    assert (facts["reason"], facts["position"], facts["log_start"]) == ("SourceTrimmed", 10, 15)
    assert reason_in_status(kafka_431, topic_name) == "SourceTrimmed"


def test_a_mirror_under_a_new_name_does_not_copy_everything_again(kafka_431, topic_name):
    kafka_431.create_topic(topic_name)
    produce(kafka_431.bootstrap, topic_name, plain_messages(10, seed=1))
    copy(mirror_of(kafka_431, topic_name))
    with pytest.raises(PositionError) as refused:
        copy(mirror_of(kafka_431, topic_name, name="renamed"))
    facts = refused.value.facts
    assert (facts["reason"], facts["copied_by"]) == ("MirrorRenamed", "copy")
    assert len(visible(kafka_431, f"{topic_name}-copy")) == 10


def test_a_recreated_destination_is_filled_again(kafka_431, topic_name):
    there = f"{topic_name}-copy"
    kafka_431.create_topic(topic_name)
    produce(kafka_431.bootstrap, topic_name, plain_messages(10, seed=1))
    copy(mirror_of(kafka_431, topic_name))
    kafka_431.delete_topic(there)
    produce(kafka_431.bootstrap, topic_name, plain_messages(10, seed=2))
    copy(mirror_of(kafka_431, topic_name))
    assert visible(kafka_431, there) == visible(kafka_431, topic_name)


def test_a_destination_recreated_during_a_run_is_filled_again(kafka_431, topic_name):
    there = f"{topic_name}-copy"
    kafka_431.create_topic(topic_name)
    produce(kafka_431.bootstrap, topic_name, plain_messages(10, seed=1))
    copy(mirror_of(kafka_431, topic_name))
    with copying(mirror_of(kafka_431, topic_name)):
        time.sleep(3)  # slices are empty now, so the flow has no open transaction
        kafka_431.delete_topic(there)
        kafka_431.create_topic(there)
        produce(kafka_431.bootstrap, topic_name, plain_messages(10, seed=2))
        wait_until(lambda: len(visible(kafka_431, there)) >= 20, what=lambda: "the copy")
    assert visible(kafka_431, there) == visible(kafka_431, topic_name)


def test_partitions_are_copied_by_spark_in_several_processes(kafka_431, topic_name, tmp_path):
    kafka_431.create_topic(topic_name, partitions=5)
    config = write_config(tmp_path / "logmirror.yaml", mirror_of(kafka_431, topic_name))
    with Run(config, folder=tmp_path) as run:
        for seed in range(3):
            for partition in range(5):
                write_transactions(kafka_431.bootstrap, topic_name, partition, seed=seed)
            run.wait_for("copied")
        run.signal(signal.SIGTERM)
        assert run.wait() == 0, run.text
    for partition in range(5):
        expected = visible(kafka_431, topic_name, partition)
        assert visible(kafka_431, f"{topic_name}-copy", partition) == expected

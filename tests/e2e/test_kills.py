"""`kill -9` at random times while a producer writes: nothing is lost or duplicated.

One mirror service after the other copies a growing topic in all formats, with limits so small that
objects appear several times a second. Each is killed, and the next starts at once, so that it finds
the unfinished work of the last. At the end a clean run finishes and an independent checker
compares. Half of the kills have Apache Kafka as the source, half the embedded broker.
`LOGMIRROR_TEST_KILLS` is the number of kills (`make nightly`: 50, all of them on Spark),
`LOGMIRROR_TEST_SEED` repeats a run's choices.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import time
from typing import TYPE_CHECKING

import psutil
import pytest

from kit.judges.clients import odd_messages, produce
from kit.judges.truth import Source
from kit.runs.commands import FORMATS, Run, mirror, wait_until, write_config
from kit.runs.inline_run import InlineRun, run_now
from kit.runs.writer import writing
from kit.tiers import KILLS as ALL_KILLS

if TYPE_CHECKING:
    from pathlib import Path

KILLS = max(ALL_KILLS // 2, 1)
"""Against each of the two sources."""

ON_SPARK = 1 if KILLS <= 5 else KILLS
"""The first of them; each start of Spark costs as much as many other tests."""

PARTITIONS = 2

pytestmark = pytest.mark.timeout(1200)


def kill_at_a_random_moment(run: Run, chooser: random.Random, *, is_starting: bool) -> str:
    """Kill the driver, or all at once as an out-of-memory or a container's end does."""
    if is_starting:
        moment, delay_s = "while starting", chooser.uniform(0, 4)
    else:
        moment, delay_s = "while copying", chooser.uniform(0, 1)
        run.wait_for(" flushed ")
    time.sleep(delay_s)
    assert run.alive, run.text
    if chooser.random() < 0.2:
        run.signal_all(signal.SIGKILL)
        moment += ", with all its processes"
    run.kill()
    return f"{moment}, {delay_s:.2f} s later"


def published(log: str) -> list[str]:
    """The objects that a log line has reported as verified."""
    return re.findall(r" flushed .*?path=(\S+)", log)


def kill_again_and_again(bootstrap: str, topic: str, folder: Path) -> None:
    seed = int(os.environ.get("LOGMIRROR_TEST_SEED", random.SystemRandom().randrange(2**32)))
    print(f"LOGMIRROR_TEST_SEED={seed}")  # noqa: T201  # pytest shows it when the test fails
    chooser = random.Random(seed)
    archive = folder / "archive"
    limits = {"max_time_ms": 200, "max_bytes": 15_000}
    mirrors = [mirror(topic, bootstrap, archive, form=form, **limits) for form in FORMATS]
    config = write_config(folder / "config.json", *mirrors)
    runs: list[Run] = []
    productive = 0
    with (
        writing(bootstrap, topic, partitions=PARTITIONS, seed=seed),
        contextlib.ExitStack() as stack,
    ):
        for number in range(KILLS):
            kind = Run if number < ON_SPARK else InlineRun
            run = stack.enter_context(kind(config, folder=folder))
            moment = kill_at_a_random_moment(run, chooser, is_starting=number % 5 == 3)
            reported = published(run.text)
            productive += bool(reported)
            print(f"killed {moment}, after {len(reported)} objects")  # noqa: T201  # the same
            # What was reported is there (I5).
            assert all((archive / path).is_file() for path in reported)
            for earlier in runs[-1:]:
                earlier.wait_until_nothing_is_left()
            runs.append(run)
        for run in runs:
            run.wait_until_nothing_is_left()

    result = run_now(config)

    assert result.returncode == 0, result.stderr
    assert productive > KILLS / 2
    source = Source(bootstrap, topic, partitions=range(PARTITIONS))
    for form in FORMATS:
        assert source.anomalies(archive, form) == [], form
    assert not [p for p in (archive / ".logmirror" / "staged").rglob("*") if p.is_file()]
    assert len(source.rows(0)) > 100


@pytest.mark.thinned
@pytest.mark.xdist_group("e2e-kafka")
@pytest.mark.mirror_v3("E2E-05")
def test_kills_while_copying_from_apache_kafka_leave_an_exact_copy(own_kafka, tmp_path):
    own_kafka.create_topic("kills", partitions=PARTITIONS)
    kill_again_and_again(own_kafka.bootstrap, "kills", tmp_path)


@pytest.mark.thinned
@pytest.mark.xdist_group("e2e-embedded")
def test_kills_while_copying_from_the_embedded_broker_leave_an_exact_copy(cli_broker, tmp_path):
    """Also MM-25."""
    cli_broker.create_topic("kills", partitions=PARTITIONS)
    kill_again_and_again(cli_broker.bootstrap, "kills", tmp_path)


@pytest.mark.gate("repeated kills on Spark")
@pytest.mark.xdist_group("e2e-embedded")
def test_killed_workers_are_replaced_and_the_run_finishes(cli_broker, tmp_path):
    cli_broker.create_topic("workers", partitions=PARTITIONS)
    for partition in range(PARTITIONS):
        messages = odd_messages(8000, seed=partition)
        produce(cli_broker.bootstrap, "workers", messages, partition=partition)
    archive = tmp_path / "archive"
    mirrors = [
        mirror("workers", cli_broker.bootstrap, archive, form=form, max_bytes=15_000)
        for form in FORMATS
    ]
    config = write_config(tmp_path / "config.json", *mirrors)

    with Run(config, "--until-now", folder=tmp_path) as run:
        wait_until(lambda: any(archive.glob("*/*/*")), what=lambda: f"objects:\n{run.text}")

        def died_at_work():
            # A worker that dies between two ticks is replaced without a word.
            kill_workers(run)
            return "Python worker exited unexpectedly" in run.spark_text

        wait_until(died_at_work, what=lambda: f"a death:\n{run.spark_text}")
        exit_code = run.wait()

    assert exit_code == 0, run.text
    source = Source(cli_broker.bootstrap, "workers", partitions=range(PARTITIONS))
    for form in FORMATS:
        assert source.anomalies(archive, form) == [], form


def kill_workers(run: Run) -> list[int]:
    """Kill the processes that carry slices out: the children of Spark's Python daemon."""
    killed = []
    for process in run.processes():
        with contextlib.suppress(psutil.Error):
            parent = process.parent()
            if parent and "logmirror.engine.executor" in parent.cmdline():
                process.kill()
                killed.append(process.pid)
    return killed

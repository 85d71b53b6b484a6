"""The end of a run that has just started: in order, with exit code 0, and nothing is left.

The program runs as a process, with Spark. It is signalled while it loads, while the JVM starts,
while the session and the Python workers start, and shortly after that; it is also killed. Left
would be: the JVM, a Python worker, a file in the directory for temporary files. A cluster that runs
no task is reported, and is an error in the end.
"""

from __future__ import annotations

import signal
import socket
import tempfile
import threading
from pathlib import Path

import psutil
import pytest

from kit.judges.clients import odd_messages, produce
from kit.runs.commands import Run, mirror, takes_stop_signals, wait_until, write_config
from kit.runs.inline_run import InlineRun
from kit.servers.machine import HOST, temporary_folder
from kit.servers.spark_cluster import spark_home
from kit.tiers import all_but
from logmirror.engine import spark
from logmirror.errors import UnavailableError

pytestmark = [pytest.mark.xdist_group("e2e-writers"), pytest.mark.timeout(600)]

MOMENTS = (0.8, 1.5, 2.5, 4, 6, 8, 12)
"""Seconds after the start. Two of them are before Spark is up also on a fast machine."""

CPU_S = 0.5


@pytest.fixture
def scratch():
    """The program's own directory for temporary files; its path is short, for sockets."""
    return Path(tempfile.mkdtemp(prefix="s", dir=temporary_folder()))


@pytest.fixture
def start(cli_broker, tmp_path, scratch):
    """Starts a run, and waits until it no longer ends by a signal's default."""
    topic = cli_broker.create_topic(f"start-{scratch.name}")
    produce(cli_broker.bootstrap, topic, odd_messages(20, seed=1))
    config = write_config(
        tmp_path / "config.json", mirror(topic, cli_broker.bootstrap, tmp_path / "archive")
    )

    def begin():
        return Run(config, folder=tmp_path, environment={"TMPDIR": str(scratch)})

    return begin


def wait_until_it_takes_signals(run):
    """Wait until the process blocks or handles SIGTERM: before that, only Python has started.

    It must do so before it has used half a second of CPU time, on a busy machine much later.
    """

    wait_until(
        lambda: takes_stop_signals(run.pid) or psutil.Process(run.pid).cpu_times().user > CPU_S,
        what=lambda: f"a handler in:\n{run.text}",
    )


def assert_nothing_is_left(run, scratch):
    run.wait_until_nothing_is_left()
    assert list(scratch.iterdir()) == [], run.text


@pytest.mark.parametrize("after_s", all_but(MOMENTS, 1.5, 4, reason="each starts Spark"))
@pytest.mark.parametrize(
    "number",
    all_but((signal.SIGTERM, signal.SIGINT), signal.SIGTERM, reason="handled as SIGTERM is"),
)
def test_a_signal_during_the_start_ends_it_in_order(start, scratch, number, after_s):
    with start() as run:
        threading.Event().wait(after_s)
        wait_until_it_takes_signals(run)
        run.signal(number)
        exit_code = run.wait(timeout_s=60)
        assert_nothing_is_left(run, scratch)

    assert exit_code == 0, run.text
    assert "Traceback" not in run.text


@pytest.mark.parametrize("after_s", all_but(MOMENTS[:5], 2.5, reason="each starts Spark"))
def test_a_second_signal_during_the_start_leaves_no_process(start, after_s):
    with start() as run:
        threading.Event().wait(after_s)
        wait_until_it_takes_signals(run)
        for number in (signal.SIGSTOP, signal.SIGTERM, signal.SIGINT, signal.SIGCONT):
            run.signal(number)  # both arrive together
        exit_code = run.wait(timeout_s=60)
        run.wait_until_nothing_is_left()

    assert exit_code in {128 + signal.SIGTERM, 128 + signal.SIGINT}, run.text


@pytest.mark.gate("each starts Spark")
@pytest.mark.parametrize("after_s", MOMENTS[:5])
def test_a_kill_during_the_start_leaves_no_process(start, after_s):
    with start() as run:
        threading.Event().wait(after_s)
        run.kill()
        run.wait_until_nothing_is_left()


def test_a_signal_ends_the_wait_for_a_source_that_does_not_respond(tmp_path):
    with socket.create_server((HOST, 0)) as silent:
        config = write_config(
            tmp_path / "config.json",
            mirror("orders", f"{HOST}:{silent.getsockname()[1]}", tmp_path / "archive"),
        )
        with InlineRun(config, folder=tmp_path) as run:
            silent.settimeout(60)
            connection, _ = silent.accept()
            run.signal(signal.SIGTERM)
            exit_code = run.wait(timeout_s=5)  # the wait itself takes 10 s
            connection.close()

    assert exit_code == 0, run.text
    assert "stopped before replication began" in run.text


WITHOUT_A_FREE_CORE = "local-cluster[1,1,1024]", {"spark.executor.cores": "2"}
"""A master and properties: its worker has one core, and executors want two."""


def test_a_cluster_that_runs_no_task_is_reported_until_the_stop(cli_broker, tmp_path, scratch):
    master, properties = WITHOUT_A_FREE_CORE
    topic = cli_broker.create_topic(f"start-{scratch.name}")
    config = write_config(
        tmp_path / "config.json",
        mirror(topic, cli_broker.bootstrap, tmp_path / "archive"),
        properties=properties,
    )
    environment = {"TMPDIR": str(scratch), "SPARK_HOME": str(spark_home(tmp_path))}
    arguments = ("--master", master)
    with Run(config, *arguments, folder=tmp_path, environment=environment) as run:
        line = run.wait_for("waiting: Spark has not finished the first tasks yet")
        assert f"master={master}" in line
        assert "free cores" in line
        run.signal(signal.SIGTERM)
        assert run.wait() == 0, run.text
        run.wait_until_nothing_is_left()


def test_a_cluster_that_runs_no_task_in_time_is_an_error(tmp_path, monkeypatch):
    master, properties = WITHOUT_A_FREE_CORE
    monkeypatch.setattr(spark, "START_MAX_S", 8.0)
    monkeypatch.setenv("SPARK_HOME", str(spark_home(tmp_path)))
    with pytest.raises(UnavailableError, match="has not finished the first tasks in time") as error:
        spark.SparkRunner(
            master=master,
            properties=properties,
            execute="logmirror.engine.executor:execute",
            warm_up="logmirror.engine.executor:warm_up",
        )
    assert error.value.facts["master"] == master
    assert "executors" in error.value.hint

"""Under `spark-submit` a run takes master and properties from it, and copies as usual.

Spark's event log shows master and properties. Executors with a packed environment are in
`test_packed_executors.py`, at night.
"""

from __future__ import annotations

import contextlib
import json
import threading

import psutil
import pytest

from kit.judges.clients import odd_messages, produce
from kit.judges.truth import Source
from kit.runs.commands import mirror, takes_stop_signals, wait_until
from kit.runs.inline_run import config_text
from kit.servers.spark_cluster import SubmittedRun

pytestmark = [pytest.mark.xdist_group("e2e-writers"), pytest.mark.timeout(600)]


@pytest.mark.gate("a second start of Spark")
def test_spark_submit_settings_apply_where_the_file_has_none(cli_broker, tmp_path):
    topic = cli_broker.create_topic("submitted")
    produce(cli_broker.bootstrap, topic, odd_messages(300, seed=1))
    one = mirror(topic, cli_broker.bootstrap, tmp_path / "archive")
    ours = {"spark.locality.wait": "7s"}
    config = tmp_path / "config.json"
    config.write_text(json.dumps({**json.loads(config_text(one)), "spark": {"properties": ours}}))
    events = tmp_path / "events"
    events.mkdir()
    given = {
        "spark.app.name": "copies",
        "spark.locality.wait": "5s",
        "spark.speculation": "true",
        "spark.eventLog.enabled": "true",
        "spark.eventLog.compress": "false",
        "spark.eventLog.rolling.enabled": "false",
        "spark.eventLog.dir": events.as_uri(),
    }

    with SubmittedRun(config, "--master", "local[1]", properties=given, folder=tmp_path) as run:
        assert run.wait() == 0, run.text
        run.wait_until_nothing_is_left()

    assert Source(cli_broker.bootstrap, topic).anomalies(tmp_path / "archive", "parquet") == []
    (log,) = events.iterdir()
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    (seen,) = [line["Spark Properties"] for line in lines if "Spark Properties" in line]
    wanted = {
        **given,
        **ours,
        "spark.master": "local[1,4]",
        "spark.authenticate": "true",
        "spark.python.daemon.module": "logmirror.engine.executor",
        "spark.python.unix.domain.socket.enabled": "true",
    }
    assert {name: seen.get(name) for name in wanted} == wanted


@pytest.mark.gate("each starts Spark")
@pytest.mark.parametrize("after_s", [0.5, 2, 4])
def test_a_signal_during_the_start_ends_the_jvm_of_spark_submit_too(cli_broker, tmp_path, after_s):
    topic = cli_broker.create_topic(f"submitted-stop-{after_s}")
    config = tmp_path / "config.json"
    config.write_text(config_text(mirror(topic, cli_broker.bootstrap, tmp_path / "archive")))
    with SubmittedRun(config, "--master", "local[1]", properties={}, folder=tmp_path) as run:
        wait_until(lambda: programs(run), what=lambda: f"the program in:\n{run.text}")
        (program,) = programs(run)
        wait_until(lambda: takes_stop_signals(program.pid), what=lambda: run.text)
        threading.Event().wait(after_s)
        program.terminate()
        assert run.wait() == 0, run.text
        run.wait_until_nothing_is_left()


def programs(run):
    """The Python process that `spark-submit` has started."""
    found = []
    for process in run.processes():
        with contextlib.suppress(psutil.Error):  # it has just ended
            if process.cmdline()[1:2] == [run.program[-1]]:
                found.append(process)
    return found


def test_an_error_of_the_run_is_the_exit_code_of_spark_submit(cli_broker, tmp_path):
    config = tmp_path / "config.json"
    config.write_text(config_text(mirror("nowhere", cli_broker.bootstrap, tmp_path / "archive")))
    with SubmittedRun(config, "--master", "local[1]", properties={}, folder=tmp_path) as run:
        assert run.wait() == 2, run.text
    assert "nowhere" in run.text

"""Shutdown: the first signal flushes pending records, the second ends the process at once.

Neither loses anything, and neither leaves a process behind.
"""

import os
import signal

import pytest

from kit.judges.clients import odd_messages, produce
from kit.judges.truth import Source
from kit.runs.commands import FORMATS, Run, mirror, wait_until, write_config
from kit.runs.inline_run import run_now

pytestmark = [pytest.mark.xdist_group("e2e-writers"), pytest.mark.timeout(900)]


@pytest.fixture
def make_config(cli_broker, tmp_path):
    """Writes a configuration of a topic in all formats."""

    def make(topic, **limits):
        mirrors = (mirror(topic, cli_broker.bootstrap, tmp_path, form=f, **limits) for f in FORMATS)
        return write_config(tmp_path / "config.json", *mirrors)

    return make


def anomalies(broker, topic, root):
    source = Source(broker.bootstrap, topic)
    return [anomaly for form in FORMATS for anomaly in source.anomalies(root, form)]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.mirror_v3("SUP-01", "E2E-04")
def test_a_signal_flushes_the_pending_records(cli_broker, make_config, tmp_path, number):
    topic = cli_broker.create_topic(f"stop-{number.name}")
    produce(cli_broker.bootstrap, topic, odd_messages(50, seed=1))
    config = make_config(topic, max_time_ms=600_000, max_bytes=1 << 30)

    with Run(config, folder=tmp_path) as run:
        for form in FORMATS:
            run.wait_for(f"mirror starts mirror={form}")
        produce(cli_broker.bootstrap, topic, odd_messages(50, seed=2))
        assert " flushed " not in run.text
        # As Ctrl-C does: everything that runs in the terminal's foreground is signalled.
        os.killpg(run.pid, number)
        exit_code = run.wait()
        run.wait_until_nothing_is_left()

    assert exit_code == 0, run.text
    flushes = [line for line in run.text.splitlines() if " flushed " in line]
    assert len(flushes) == len(FORMATS)
    assert all("from=0 to=99 " in line and "trigger=explicit" in line for line in flushes)
    assert anomalies(cli_broker, topic, tmp_path) == []


def test_a_second_signal_ends_at_once_and_loses_nothing(cli_broker, make_config, tmp_path):
    topic = cli_broker.create_topic("stop-twice")
    produce(cli_broker.bootstrap, topic, odd_messages(1500, seed=3))
    config = make_config(topic, max_bytes=2_000)

    with Run(config, folder=tmp_path) as run:
        # A tick of hundreds of objects is running.
        wait_until(lambda: any(tmp_path.glob("*/0/*")), what=lambda: f"objects:\n{run.text}")
        for process in run.processes():
            if process.pid != run.pid:
                process.suspend()  # so that it cannot end before the second signal
        run.signal(signal.SIGTERM)
        run.signal(signal.SIGINT)  # a second one of the same kind may be merged with the first
        exit_code = run.wait(timeout_s=60)
        run.signal_all(signal.SIGCONT)
        run.wait_until_nothing_is_left()
    result = run_now(config)

    # Python handles signals that came together in the order of their numbers.
    assert exit_code in {128 + signal.SIGINT, 128 + signal.SIGTERM}
    assert " flushed " not in run.text
    assert result.returncode == 0, result.stderr
    assert anomalies(cli_broker, topic, tmp_path) == []

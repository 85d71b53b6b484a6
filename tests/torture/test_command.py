"""`logmirror torture` reports anomalies, the number of runs, and the command to reproduce them.

Method: the simulation runs in this process, with the product unchanged and with one rule removed.
The trials with real processes run once on loopback, judged by the exit code and the JSON report.
"""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from typer.testing import CliRunner

from kit.runs.commands import mirror, wait_until, write_config
from kit.runs.inline_run import mirror_to_cluster
from kit.servers.machine import HOST
from kit.tiers import NIGHTLY
from logmirror.archive import claims
from logmirror.cli import commands
from logmirror.errors import UsageError
from logmirror.simulation.faults import FAULTS
from logmirror.torture.command import _flows
from logmirror.torture.feeder import read_topic
from logmirror.torture.processes import Broker
from logmirror.torture.real import SIMULATED_ONLY, run_trials
from logmirror.torture.testbed import Flow
from logmirror.torture.trials import TRIALS

COUNT, FAULTS_TRIED = (20, "all") if NIGHTLY else (1, "kill")


def torture(*arguments, code=0):
    result = CliRunner().invoke(commands.build(), ["torture", *arguments], catch_exceptions=False)
    assert result.exit_code == code, result.output
    return result


def test_a_clean_simulation_is_bounded_by_the_rule_of_three():
    found = torture("--seeds", "6", "--kills", "0", "--seed", "41").stdout
    assert "6 seeds" in found
    assert "0 anomalies in 6 seeds: rate below 50.00%" in found
    assert "seed 41" in found
    assert found.endswith("no record was lost, duplicated or changed\n")


def test_an_anomaly_is_reported_with_a_command_that_reproduces_it(monkeypatch):
    monkeypatch.setattr(claims, "_claim", lambda *_: None)
    arguments = ("--faults", "pause,two-writers", "--kills", "0")
    found = torture(*arguments, "--seeds", "40", "--seed", "1", code=1).stdout
    assert "ANOMALIES FOUND" in found
    reproduce = next(line for line in found.splitlines() if line.startswith("reproduce: "))
    words = reproduce.split()[2:]
    assert words[:3] == ["torture", "--faults", "pause,two-writers"]
    first = next(line for line in found.splitlines() if line.startswith("first: "))
    assert first in torture(*words[1:], code=1).stdout


def test_an_unknown_fault_lists_the_known_ones():
    with pytest.raises(UsageError) as caught:
        torture("--faults", "kill,meteor")
    assert caught.value.facts["faults"] == ["meteor"]
    for name in (*TRIALS, *(fault.name for fault in FAULTS)):
        assert f"{name}: " in caught.value.hint


def test_the_page_lists_every_fault_of_the_real_processes():
    page = (Path(__file__).parents[2] / "docs/torture.md").read_text()
    section = page.partition("## The real processes")[2]
    table = section.partition("| fault | what happens |")[2].partition("\n\n")[0]
    assert set(re.findall(r"^\| `([a-z-]+)` \|", table, re.MULTILINE)) == set(TRIALS)


@pytest.mark.jvm
def test_a_configuration_selects_the_flows_and_its_destinations_are_not_touched(tmp_path):
    config = write_config(
        tmp_path / "config.json",
        mirror("t", "nowhere:1", tmp_path / "never", form="ndjson", max_bytes=777),
    )
    limits = (("max-time-ms", 500), ("max-bytes", 777), ("max-offsets", 1_000_000))
    assert list(_flows(config)) == [Flow("files", "ndjson", limits)]
    found = torture("-c", str(config), "--seeds", "3", "--kills", "0", "--format", "json").stdout
    assert json.loads(found)["clean"] is True
    assert not (tmp_path / "never").exists()


@pytest.mark.jvm
def test_flows_that_are_simulated_only_are_reported(tmp_path):
    config = write_config(
        tmp_path / "config.json",
        mirror("t", "nowhere:1", tmp_path / "never", compaction="log"),
    )
    arguments = ("-c", str(config), "--faults", "kill", "--kills", "1", "--seeds")
    reported = torture(*arguments, "1").stderr
    assert all(why in reported for why in SIMULATED_ONLY.values())
    assert "trial" not in reported
    with pytest.raises(UsageError, match="nothing to run"):
        torture(*arguments, "0")


def test_an_invalid_configuration_is_refused_before_the_first_trial(tmp_path):
    reported = []
    with pytest.raises(UsageError, match="the configuration has"):
        run_trials(
            tmp_path,
            flows=[Flow("files", "snapshots")],
            faults=["kill"],
            trials=1,
            seed=8,
            report=reported.append,
        )
    assert reported == []


def test_a_topic_that_does_not_exist_yet_has_no_records(tmp_path):
    with Broker(tmp_path / "target", HOST) as target:
        assert read_topic(f"{HOST}:{target.port}", "orders", 0) == []


@pytest.mark.jvm
@pytest.mark.timeout(600)
def test_real_processes_lose_nothing():
    """Runs the flows of a command without `-c`."""
    found = torture(
        *("--seeds", "0", "--kills", str(COUNT), "--seed", "3"),
        *("--faults", FAULTS_TRIED, "--format", "json"),
    )
    verdict = json.loads(found.stdout)
    assert verdict["clean"] is True
    assert verdict["real"]["trials"] == COUNT
    assert verdict["real"]["kills"] >= 1
    assert verdict["real"]["records"] > 50


@pytest.mark.jvm
@pytest.mark.timeout(600)
def test_a_flow_with_new_offsets_takes_part_in_the_trials(tmp_path):
    config = write_config(
        tmp_path / "config.json",
        mirror_to_cluster("u", "nowhere:1", "nowhere:2", name="copy", offsets="translate"),
    )
    found = torture(
        *("-c", str(config), "--faults", "kill", "--seeds", "0", "--kills", "2", "--seed", "5"),
        *("--format", "json"),
    )
    verdict = json.loads(found.stdout)
    assert verdict["clean"] is True
    assert verdict["real"]["kills"] == 2
    assert verdict["real"]["missed"] == 0


@pytest.mark.jvm
@pytest.mark.parametrize(
    ("moment", "numbers"),
    [
        ("real processes: brokers", [signal.SIGTERM]),
        ("trial 2 of 2", [signal.SIGINT, signal.SIGTERM]),
        ("final run without faults", [signal.SIGTERM, signal.SIGTERM]),
    ],
)
def test_an_interrupted_torture_stops_its_processes_and_deletes_its_files(
    tmp_path, moment, numbers
):
    """At the start, at work, and at the end; a second signal changes nothing."""
    config = write_config(tmp_path / "config.json", mirror("t", f"{HOST}:1", tmp_path / "root"))
    folder = tmp_path / "tmp"
    folder.mkdir()
    options = ("--seeds", "0", "--kills", "2", "--faults", "kill", "-c", str(config))
    command = [sys.executable, "-m", "logmirror", "torture", *options]
    environment = {**os.environ, "TMPDIR": str(folder)}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as program:
        assert program.stderr
        for line in program.stderr:
            if moment in line:
                break
        children = psutil.Process(program.pid)
        wait_until(lambda: children.children(recursive=True), what=lambda: "a process")
        left = children.children(recursive=True)

        for number in numbers:
            program.send_signal(number)

        assert program.wait(30) == 130
        assert "interrupted; all processes of the torture were stopped" in program.stderr.read()
    assert not any(process.is_running() for process in left)
    running = [one.info["cmdline"] or [] for one in psutil.process_iter(["cmdline"])]
    assert [words for words in running if any(str(folder) in word for word in words)] == []
    assert list(folder.iterdir()) == []

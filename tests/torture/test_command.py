"""`logmirror torture` tells what it found, how often it looked, and how to look again.

Method: the command in this process for the simulation, with the product as it is and broken; once
with real processes on loopback, judged by the exit code and the verdict in JSON.
"""

import json
import os
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from kit.runs.commands import mirror, write_config
from kit.runs.inline_run import mirror_to_cluster
from kit.servers.machine import HOST
from logmirror.archive import claims
from logmirror.archive.naming import format_name
from logmirror.cli.main import app
from logmirror.errors import UsageError
from logmirror.model import OffsetRange
from logmirror.simulation.faults import FAULTS
from logmirror.testing.checker import Row
from logmirror.torture import real
from logmirror.torture.command import _flows
from logmirror.torture.feeder import read_topic
from logmirror.torture.processes import Broker
from logmirror.torture.real import REAL_FAULTS, SIMULATED_ONLY, Flow

NIGHTLY = bool(os.environ.get("LOGMIRROR_TEST_NIGHTLY"))
TRIALS, FAULTS_TRIED = (20, "all") if NIGHTLY else (1, "kill")


def torture(*arguments, code=0):
    result = CliRunner().invoke(app, ["torture", *arguments], catch_exceptions=False)
    assert result.exit_code == code, result.output
    return result


def test_a_clean_simulation_is_bounded_by_the_rule_of_three():
    found = torture("--seeds", "6", "--kills", "0", "--seed", "41").stdout
    assert "6 seeds" in found
    assert "fewer than 50.00% of such seeds" in found
    assert "seed 41" in found
    assert found.endswith("nothing was lost, doubled or changed\n")


def test_an_anomaly_is_shown_with_the_command_that_shows_it_again(monkeypatch):
    monkeypatch.setattr(claims, "_claim", lambda *_: None)
    arguments = ("--faults", "pause,two-writers", "--kills", "0")
    found = torture(*arguments, "--seeds", "40", "--seed", "1", code=1).stdout
    assert "ANOMALIES" in found
    again = next(line for line in found.splitlines() if line.startswith("again: "))
    words = again.split()[2:]
    assert words[:3] == ["torture", "--faults", "pause,two-writers"]
    first = next(line for line in found.splitlines() if line.startswith("first: "))
    assert first in torture(*words[1:], code=1).stdout


def test_an_unknown_fault_lists_the_known_ones():
    with pytest.raises(UsageError) as caught:
        torture("--faults", "kill,meteor")
    assert caught.value.facts["faults"] == ["meteor"]
    for name in (*REAL_FAULTS, *(fault.name for fault in FAULTS)):
        assert f"{name}: " in caught.value.hint


def test_a_configuration_says_what_is_copied_and_is_left_alone(tmp_path):
    config = write_config(
        tmp_path / "config.json",
        mirror("t", "nowhere:1", tmp_path / "never", form="ndjson", max_bytes=777),
    )
    limits = (("max-time-ms", 500), ("max-bytes", 777), ("max-offsets", 1_000_000))
    assert list(_flows(config)) == [Flow("files", "ndjson", limits)]
    found = torture("-c", str(config), "--seeds", "3", "--kills", "0", "--format", "json").stdout
    assert json.loads(found)["clean"] is True
    assert not (tmp_path / "never").exists()


def test_what_real_processes_do_not_copy_is_said(tmp_path):
    config = write_config(
        tmp_path / "config.json",
        mirror("t", "nowhere:1", tmp_path / "never", compaction="log"),
        mirror_to_cluster("u", "nowhere:1", "nowhere:2", name="copy", offsets="translate"),
    )
    arguments = ("-c", str(config), "--faults", "kill", "--kills", "1", "--seeds")
    said = torture(*arguments, "1").stderr
    assert all(why in said for why in SIMULATED_ONLY.values())
    assert "trial" not in said
    with pytest.raises(UsageError, match="nothing was tried"):
        torture(*arguments, "0")


def test_what_every_copier_would_refuse_is_refused_before_the_first_trial(tmp_path):
    said = []
    with pytest.raises(UsageError, match="the configuration has"):
        real.RealTorture(
            tmp_path,
            flows=[Flow("files", "snapshots")],
            faults=["kill"],
            trials=1,
            seed=8,
            say=said.append,
        ).run()
    assert said == []


def test_a_copy_in_a_cluster_that_nobody_has_begun_is_empty(tmp_path):
    with Broker(tmp_path / "target", HOST) as target:
        assert read_topic(f"{HOST}:{target.port}", "orders", 0) == []


@pytest.mark.timeout(600)
def test_real_processes_lose_nothing():
    """What is copied is what it is for somebody who names no configuration."""
    found = torture(
        *("--seeds", "0", "--kills", str(TRIALS), "--seed", "3"),
        *("--faults", FAULTS_TRIED, "--format", "json"),
    )
    verdict = json.loads(found.stdout)
    assert verdict["clean"] is True
    assert verdict["real"]["trials"] == TRIALS
    assert verdict["real"]["kills"] >= 1
    assert verdict["real"]["records"] > 50


def test_what_real_processes_have_lost_is_found(tmp_path, monkeypatch):
    written = [Row(n, 1_000 + n, 0, None, b"%d" % n) for n in range(10)]
    monkeypatch.setattr(real, "read_topic", lambda _bootstrap, _topic, _partition: written[:-1])
    stage = SimpleNamespace(
        direct="nowhere",
        rows=lambda _flow, partition: written[partition:-1],
        names=lambda _flow, partition: [
            format_name(OffsetRange(first=partition, last=8), "ndjson")
        ],
    )
    feeder = SimpleNamespace(
        count=20, acknowledged={n: {row.offset: row for row in written} for n in range(2)}
    )
    torn = real.RealTorture(
        tmp_path, flows=[Flow("S3", "ndjson")], faults=["kill"], trials=1, seed=8, say=print
    )
    torn.judge(stage, feeder)
    found = {(where, anomaly.code) for where, anomaly in torn.result.anomalies}
    assert found == {("source", "A2"), ("s3-ndjson/1", "A1"), ("s3-ndjson/1", "A15")}

"""`logmirror torture` reports anomalies, the number of runs, and the command to reproduce them.

Method: the simulation runs in this process, with the product unchanged and with one rule removed.
The trials with real processes run once on loopback, judged by the exit code and the JSON report.
"""

import json
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from kit.runs.commands import mirror, write_config
from kit.runs.inline_run import mirror_to_cluster
from kit.servers.machine import HOST
from kit.tiers import NIGHTLY
from logmirror.archive import claims
from logmirror.archive.naming import format_name
from logmirror.cli import commands
from logmirror.errors import UsageError
from logmirror.model import OffsetRange
from logmirror.simulation.faults import FAULTS
from logmirror.testing.checker import Row
from logmirror.torture import real
from logmirror.torture.command import _flows
from logmirror.torture.feeder import read_topic
from logmirror.torture.processes import Broker
from logmirror.torture.real import REAL_FAULTS, SIMULATED_ONLY
from logmirror.torture.testbed import Flow

TRIALS, FAULTS_TRIED = (20, "all") if NIGHTLY else (1, "kill")


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
    for name in (*REAL_FAULTS, *(fault.name for fault in FAULTS)):
        assert f"{name}: " in caught.value.hint


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
        mirror_to_cluster("u", "nowhere:1", "nowhere:2", name="copy", offsets="translate"),
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
        real.RealTorture(
            tmp_path,
            flows=[Flow("files", "snapshots")],
            faults=["kill"],
            trials=1,
            seed=8,
            report=reported.append,
        ).run()
    assert reported == []


def test_a_topic_that_does_not_exist_yet_has_no_records(tmp_path):
    with Broker(tmp_path / "target", HOST) as target:
        assert read_topic(f"{HOST}:{target.port}", "orders", 0) == []


@pytest.mark.jvm
@pytest.mark.timeout(600)
def test_real_processes_lose_nothing():
    """Runs the flows of a command without `-c`."""
    found = torture(
        *("--seeds", "0", "--kills", str(TRIALS), "--seed", "3"),
        *("--faults", FAULTS_TRIED, "--format", "json"),
    )
    verdict = json.loads(found.stdout)
    assert verdict["clean"] is True
    assert verdict["real"]["trials"] == TRIALS
    assert verdict["real"]["kills"] >= 1
    assert verdict["real"]["records"] > 50


def test_a_record_lost_by_a_real_process_is_found(tmp_path, monkeypatch):
    written = [Row(n, 1_000 + n, 0, None, b"%d" % n) for n in range(10)]
    monkeypatch.setattr(real, "read_topic", lambda _bootstrap, _topic, _partition: written[:-1])
    testbed = SimpleNamespace(
        direct="nowhere",
        rows=lambda _flow, partition: written[partition:-1],
        names=lambda _flow, partition: [
            format_name(OffsetRange(first=partition, last=8), "ndjson")
        ],
    )
    feeder = SimpleNamespace(
        count=20, acknowledged={n: {row.offset: row for row in written} for n in range(2)}
    )
    tortured = real.RealTorture(
        tmp_path, flows=[Flow("S3", "ndjson")], faults=["kill"], trials=1, seed=8, report=print
    )
    tortured.judge(testbed, feeder)
    found = {(where, anomaly.code) for where, anomaly in tortured.result.anomalies}
    assert found == {("source", "A2"), ("s3-ndjson/1", "A1"), ("s3-ndjson/1", "A15")}

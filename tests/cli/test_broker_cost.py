"""`logmirror broker --explain-cost`: its table, its JSON, and what it refuses."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from logmirror.cli import commands
from logmirror.errors import UsageError

MONTH_S = 30 * 24 * 3600
PAGE = Path(__file__).parents[2] / "docs" / "broker-on-s3.md"


def explained(*words: str) -> str:
    line = ["broker", "--log-dir=s3://b/p", "--explain-cost", *words]
    found = CliRunner().invoke(commands.build(), line, catch_exceptions=False)
    assert found.exit_code == 0
    return found.stdout


def test_a_month_as_json():
    words = ("--commit-interval-ms=500", "--write-rate-mb=1", "--topic=t:10", "--format=json")
    found = json.loads(explained(*words, "--read-rate-mb=0.5", "--price=put=0.005"))
    causes = {one["cause"]: one for one in found["causes"]}
    assert causes["commits"]["put"] == causes["commits"]["delete"] == 2 * MONTH_S
    # 64 MiB of each of 10 partitions take longer than 512 MiB of commits
    seals = causes["sealed segments"]
    assert found["segment_seconds"] == pytest.approx(512 * 1024**2 / 1_000_000, abs=1)
    assert seals["list"] == pytest.approx(10 * MONTH_S / found["segment_seconds"], rel=0.01)
    assert seals["put"] == pytest.approx(3 * seals["list"], abs=2)  # producers, segment, index
    assert found["requests"]["put"] == pytest.approx(sum(o["put"] for o in causes.values()), abs=3)
    assert found["cost"]["put"] == found["cost"]["total"]
    assert found["cost"]["put"] == pytest.approx(found["requests"]["put"] * 0.005 / 1000, rel=1e-6)
    reads = MONTH_S * 500_000 / found["segment_bytes"]
    assert found["requests"]["get"] == pytest.approx(reads * 8, rel=0.01)  # a size, 7 of 8 MiB


def test_small_commits_are_bundled_and_retention_deletes():
    words = ("--write-rate-mb=0.01", "--format=json")
    kept = json.loads(explained(*words))
    deleted = json.loads(explained(*words, "--override=log.retention.ms=1000"))
    causes = {one["cause"]: one for one in kept["causes"]}
    assert causes["bundles of commits"]["put"] == pytest.approx(10 * MONTH_S / 256, abs=1)
    more = deleted["requests"]["delete"] - kept["requests"]["delete"]
    # each with its index
    assert more == pytest.approx(2 * causes["sealed segments"]["list"], abs=2)


def row_of(page, name):
    [cells] = re.findall(rf"^\| {re.escape(name)} \|(.*)\|$", page, re.MULTILINE)
    return [float(cell.replace(",", "")) for cell in cells.split("|")]


def test_the_page_has_the_requests_by_partitions_which_have_a_limit():
    page = PAGE.read_text(encoding="utf-8")
    created, commits, megabytes = [], [], []
    for count in row_of(page, "partitions that are written to, 1 MB/s in all"):
        words = ("--write-rate-mb=1", f"--topic=t:{count:.0f}", "--format=json")
        found = json.loads(explained(*words))
        created.append(round(found["requests"]["put"] / MONTH_S, 1))
        commits.append(round(found["segment_seconds"] * 10))
        megabytes.append(round(found["segment_seconds"]))
    assert row_of(page, "objects created per second") == created
    assert row_of(page, "commits that a start reads, at most") == commits
    assert row_of(page, "MB of them") == megabytes
    assert created[-1] <= created[-2]
    words = ("--write-rate-mb=1", "--topic=t:10000", "--max-seals-per-second=5", "--format=json")
    fewer = json.loads(explained(*words))
    assert fewer["segment_seconds"] == 10_000 / 5


def test_an_idle_broker_lists_and_writes_heartbeats():
    found = json.loads(explained("--write-rate-mb=0", "--format=json"))
    assert found["requests"] == {
        **dict.fromkeys(("put", "delete"), MONTH_S / 2),
        "get": 0,
        "list": MONTH_S / 5,
    }
    assert "cost" not in found


def test_a_table():
    lines = explained("--price=list=1").splitlines()
    assert lines[0].split() == ["REQUESTS", "IN", "30", "DAYS", "PUT", "GET", "LIST", "DELETE"]
    assert lines[1].split() == ["commits", "25,920,000", "0", "0", "25,920,000"]
    assert lines[-1].split()[:3] == ["price", "-", "-"]


@pytest.mark.parametrize("price", ["put", "put=-1", "put=x", "copy=1", "put=inf", "put=1e308"])
def test_what_is_no_price_is_refused(price):
    with pytest.raises(UsageError, match="KIND=PRICE"):
        explained(f"--price={price}")


@pytest.mark.parametrize("rate", ["-1", "nan", "inf", "1e300"])
@pytest.mark.parametrize("option", ["--write-rate-mb", "--read-rate-mb"])
def test_what_is_no_rate_is_refused(option, rate):
    line = ["broker", "--log-dir=s3://b/p", "--explain-cost", f"{option}={rate}"]
    found = CliRunner().invoke(commands.build(), line, catch_exceptions=False)
    assert found.exit_code == 2
    assert f"Invalid value for '{option}'" in found.output


@pytest.mark.parametrize("setting", ["log.segment.bytes=x", "log.segment.byte=1048576"])
def test_a_setting_that_the_broker_refuses_is_refused(setting):
    with pytest.raises(UsageError, match="broker setting") as refused:
        explained(f"--override={setting}")
    assert refused.value.facts["name"] == setting.partition("=")[0]


def test_more_partitions_than_a_broker_has_are_refused():
    with pytest.raises(UsageError, match="at most 20000 partitions") as refused:
        explained("--topic=a:20000", "--topic=b:20000")
    assert refused.value.facts["found"] == 40_000


def test_a_log_directory_on_disk_has_no_requests():
    line = ["broker", "--log-dir=d", "--explain-cost"]
    with pytest.raises(UsageError, match="in a bucket"):
        CliRunner().invoke(commands.build(), line, catch_exceptions=False)

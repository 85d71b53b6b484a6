"""Two instances with one destination: every position has one successor.

Two services copy the same growing topic to the same directories. First they run at the same time;
then one is paused as a whole (SIGSTOP to driver, JVM and workers) while the other takes over, and
resumes with its old state; then the same with roles changed.
"""

import signal

import pytest

from kit.judges.truth import Source
from kit.runs.commands import FORMATS, Run, mirror, wait_until, write_config
from kit.runs.inline_run import InlineRun, run_now
from kit.runs.writer import writing

pytestmark = [pytest.mark.xdist_group("e2e-writers"), pytest.mark.timeout(900)]

PARTITIONS = 2


def flushed(run: Run) -> int:
    """How many objects a run has reported."""
    return run.text.count(" flushed ")


def wait_for_more(run: Run, count: int = 6) -> None:
    """Wait until a run has reported some more objects."""
    wanted = flushed(run) + count
    wait_until(
        lambda: flushed(run) >= wanted or not run.alive,
        what=lambda: f"{wanted} objects:\n{run.text}",
    )
    assert run.alive, run.text


def test_an_instance_resumed_after_a_pause_changes_nothing(cli_broker, tmp_path):
    cli_broker.create_topic("writers", partitions=PARTITIONS)
    archive = tmp_path / "archive"
    limits = {"max_time_ms": 100, "max_bytes": 15_000}
    config = write_config(
        tmp_path / "config.json",
        *(mirror("writers", cli_broker.bootstrap, archive, form=f, **limits) for f in FORMATS),
    )

    with (
        writing(cli_broker.bootstrap, "writers", partitions=PARTITIONS, seed=1),
        InlineRun(config, folder=tmp_path) as one,
        InlineRun(config, folder=tmp_path) as two,
    ):
        wait_for_more(one)
        wait_for_more(two)
        for sleeper, other in ((one, two), (two, one), (one, two)):
            sleeper.signal_all(signal.SIGSTOP)
            wait_for_more(other, 12)
            sleeper.signal_all(signal.SIGCONT)
            wait_for_more(sleeper)
            wait_for_more(other)
        exit_codes = []
        for run in (one, two):
            run.signal(signal.SIGTERM)
        exit_codes = [run.wait() for run in (one, two)]
    result = run_now(config)

    assert exit_codes == [0, 0], one.text + two.text
    assert result.returncode == 0, result.stderr
    source = Source(cli_broker.bootstrap, "writers", partitions=range(PARTITIONS))
    for form in FORMATS:
        assert source.anomalies(archive, form) == [], form
    assert leftovers(archive) == []


def leftovers(archive):
    return [path for path in (archive / ".logmirror" / "staged").rglob("*") if path.is_file()]


def test_a_run_paused_between_claim_and_object_finds_it_published(cli_broker, tmp_path):
    """The narrowest gap: a worker dies with its claim made; the driver sleeps through the rest."""
    cli_broker.create_topic("gap")
    archive = tmp_path / "archive"
    config = write_config(
        tmp_path / "config.json",
        mirror("gap", cli_broker.bootstrap, archive, form="ndjson", max_time_ms=100),
        master="local[1]",
    )
    with (
        writing(cli_broker.bootstrap, "gap", partitions=1, seed=2),
        Run(config, folder=tmp_path, environment={"LOGMIRROR_CRASH_AT": "claim.created#3"}) as one,
    ):
        wait_until(lambda: "exited unexpectedly" in one.spark_text, what=lambda: one.text)
        one.signal_all(signal.SIGSTOP)
        claims = [p for p in (archive / ".logmirror" / "claims").rglob("*") if p.is_file()]
        assert len(claims) == 3 > len(list((archive / "ndjson" / "0").iterdir()))
        with Run(config, folder=tmp_path) as two:
            wait_for_more(two)
            one.signal_all(signal.SIGCONT)
            wait_for_more(two)
            two.signal(signal.SIGTERM)
            assert two.wait() == 0, two.text
        one.signal_all(signal.SIGKILL)

    assert run_now(config).returncode == 0
    assert Source(cli_broker.bootstrap, "gap").anomalies(archive, "ndjson") == []
    assert leftovers(archive) == []

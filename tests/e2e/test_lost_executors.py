"""Executors and drivers of a real cluster fail, and tasks finish twice: the archives stay exact.

Spark's `local-cluster` runs a master and executors in separate processes. One executor is killed
while it writes an object. Another is stopped, so that Spark runs its task elsewhere, and continued,
so that it finishes too. Then the driver is killed, and another run starts at once beside the
executors that it left. `make nightly` does the first two ten times.
"""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING

import psutil
import pytest

from kit.judges.truth import Source, object_names
from kit.runs.commands import FORMATS, Run, mirror, wait_until, write_config
from kit.runs.inline_run import run_now
from kit.runs.writer import writing
from kit.servers.spark_cluster import spark_home
from kit.tiers import NIGHTLY

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.xdist_group("e2e-writers"), pytest.mark.timeout(2400)]  # at night

ROUNDS = 10 if NIGHTLY else 1
PARTITIONS = 2
SPARK = {
    "spark.executor.memory": "512m",
    "spark.executorEnv.PYTHONPATH": os.environ.get("PYTHONPATH", ""),
    # An executor without a heartbeat for so long is lost: its task runs again, and it may resume.
    "spark.executor.heartbeatInterval": "1s",
    "spark.network.timeout": "8s",
    "spark.network.timeoutInterval": "1s",
}


def executors(run: Run) -> list[psutil.Process]:
    """The JVMs that carry tasks out."""
    return [p for p in run.processes() if "CoarseGrainedExecutorBackend" in " ".join(command(p))]


def command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def busy_executor(run: Run, archive: Path) -> psutil.Process:
    """An executor whose worker has an object open under `.logmirror/staged`."""
    found: list[psutil.Process] = []
    staged = str(archive / ".logmirror" / "staged")

    def is_busy() -> bool:
        for executor in executors(run):
            try:
                for child in executor.children(recursive=True):
                    if any(file.path.startswith(staged) for file in child.open_files()):
                        found.append(executor)
                        return True
            except psutil.Error:
                continue
        return False

    wait_until(lambda: is_busy() or not run.alive, what=lambda: f"a busy one in:\n{run.text}")
    assert run.alive, run.text
    return found[0]


def wait_for_more(run: Run, archive: Path, count: int = 12) -> None:
    """Wait until there are some more objects of each mirror."""

    def counts() -> list[int]:
        folders = [archive / form / str(n) for form in FORMATS for n in range(PARTITIONS)]
        return [len(object_names(path)) if path.exists() else 0 for path in folders]

    wanted = [number + count // 4 for number in counts()]
    wait_until(
        lambda: all(a >= b for a, b in zip(counts(), wanted, strict=True)) or not run.alive,
        what=lambda: f"{wanted}:\n{run.text}\n{run.spark_text[-4000:]}",
    )
    assert run.alive, run.text


def kill_one(run: Run, archive: Path) -> None:
    """Its Python workers may continue for a moment, beside the retry."""
    busy_executor(run, archive).kill()
    wait_for_more(run, archive)
    wait_until(lambda: len(executors(run)) == 2, what=lambda: f"a new executor:\n{run.text}")


def let_one_sleep(run: Run, archive: Path) -> None:
    """Stop an executor and its worker inside a task; wake them when others have done the task."""
    sleeper = busy_executor(run, archive)
    family = [sleeper, *sleeper.children(recursive=True)]
    for process in family:
        process.suspend()
    try:
        wait_for_more(run, archive)
    finally:
        for process in reversed(family):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.resume()
    wait_for_more(run, archive)


def test_lost_executors_lost_drivers_and_duplicate_tasks_change_nothing(cli_broker, tmp_path):
    cli_broker.create_topic("lost", partitions=PARTITIONS)
    archive = tmp_path / "archive"
    limits = {"max_time_ms": 100, "max_bytes": 15_000}
    config = write_config(
        tmp_path / "config.json",
        *(mirror("lost", cli_broker.bootstrap, archive, form=f, **limits) for f in FORMATS),
        master="local-cluster[2,1,512]",
        properties=SPARK,
    )
    home = {"SPARK_HOME": str(spark_home(tmp_path))}

    with (
        writing(cli_broker.bootstrap, "lost", partitions=PARTITIONS, seed=1),
        Run(config, folder=tmp_path, environment=home) as run,
    ):
        wait_for_more(run, archive)
        for _ in range(ROUNDS):
            kill_one(run, archive)
            let_one_sleep(run, archive)
        busy_executor(run, archive)
        run.kill()
        assert executors(run), "the driver's executors live on for a while"
        beside = run_now(config)
    after = run_now(config)

    assert beside.returncode == 0, beside.stderr
    assert after.returncode == 0, after.stderr
    source = Source(cli_broker.bootstrap, "lost", partitions=range(PARTITIONS))
    for form in FORMATS:
        assert source.anomalies(archive, form) == [], form
    left = [path for path in (archive / ".logmirror" / "staged").rglob("*") if path.is_file()]
    assert left == []

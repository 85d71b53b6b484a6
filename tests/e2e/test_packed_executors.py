"""Executors that have only a packed environment copy exactly, however the driver starts.

A cluster of Spark's own master and worker, in which no PYTHONPATH names the product, gets the
environment that `docs/deploy/spark-submit.md` describes: by `spark-submit --archives`, and by
`spark.archives` in a configuration with `local-cluster`. The Python processes are inspected while
they run: program and libraries come from the packed environment. Their processes authenticate each
other; a cluster that does not is refused, unless the configuration consents.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest

from kit.judges.clients import odd_messages, produce
from kit.judges.truth import Source
from kit.runs.commands import FORMATS, Run, mirror, wait_until, write_config
from kit.runs.inline_run import config_text
from kit.servers.spark_cluster import (
    StandaloneCluster,
    SubmittedRun,
    packed_environment,
    spark_home,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

pytestmark = [pytest.mark.xdist_group("e2e-writers"), pytest.mark.timeout(900)]

JAVA = "-XX:+UseSerialGC -XX:TieredStopAtLevel=1"
SECRET = "_SPARK_AUTH_SECRET"
"""Environment variable with which Spark gives an executor the secret of its cluster."""

PACKED = {
    "spark.pyspark.python": "./env/bin/python",
    "spark.executor.memory": "512m",
    "spark.executor.extraJavaOptions": JAVA,
}


@pytest.fixture(scope="module")
def pack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    packed = packed_environment(tmp_path_factory.mktemp("pack"))
    yield packed
    packed.unlink()


def filled(broker, topic):
    broker.create_topic(topic, partitions=2)
    for partition in range(2):
        produce(broker.bootstrap, topic, odd_messages(300, seed=partition), partition=partition)
    return Source(broker.bootstrap, topic, partitions=range(2))


class Watch:
    """Looks for Python workers of executors, and what they have loaded."""

    def __init__(self, processes: Callable[[], Iterable[psutil.Process]]) -> None:
        self._processes = processes
        self.programs: set[Path] = set()
        self.libraries: set[Path] = set()

    def look(self) -> bool:
        """Note what runs now; whether the kernels' compiler has been seen."""
        for process in self._processes():
            try:
                if "logmirror.engine.executor" not in process.cmdline():
                    continue
                loaded = {Path(one.path) for one in process.memory_maps()}
            except psutil.Error:
                continue
            self.programs.add(Path(process.exe()))
            self.libraries |= {path for path in loaded if "site-packages" in path.parts}
        return any("llvmlite" in path.parts for path in self.libraries)

    def assert_all_below(self, folder: Path) -> None:
        assert self.programs
        for path in self.programs | self.libraries:
            assert path.is_relative_to(folder.resolve()), path
            assert "env" in path.parts, path


def executors(processes: Iterable[psutil.Process]) -> list[psutil.Process]:
    return [one for one in processes if "CoarseGrainedExecutorBackend" in " ".join(one.cmdline())]


def wait_for_packed(run: Run, watch: Watch, executors_at: Path) -> None:
    """Wait until the environment is used; `executors_at` is the directory of Spark's worker.

    Spark copies the archive of 190 MB and unpacks it to 500 MB before, at the driver and at the
    executor. On a disk that others use, this may take minutes.
    """

    def found() -> str:
        logs = sorted(executors_at.glob("*/*/std*"))
        texts = [f"{log}:\n{log.read_text(errors='replace')[-2000:]}" for log in logs]
        running = [" ".join(one.cmdline())[:200] for one in run.processes()]
        return "\n".join(["a worker:", run.text, run.spark_text[-4000:], *texts, *running])

    wait_until(lambda: watch.look() or not run.alive, what=found, timeout_s=600)


@pytest.mark.gate("a Spark cluster and a packed environment")
def test_spark_submit_runs_a_mirror_on_a_cluster_that_has_only_the_pack(cli_broker, pack, tmp_path):
    source = filled(cli_broker, "submitted-pack")
    archive = tmp_path / "archive"
    config = tmp_path / "config.json"
    mirrors = [
        mirror("submitted-pack", cli_broker.bootstrap, archive, form=form) for form in FORMATS
    ]
    config.write_text(config_text(*mirrors))
    with StandaloneCluster(tmp_path) as cluster:
        options = ["--master", cluster.master, "--archives", f"{pack}#env"]
        options += ["--properties-file", str(cluster.properties_file)]
        with SubmittedRun(config, *options, properties=PACKED, folder=tmp_path) as run:
            watch = Watch(cluster.processes)
            wait_for_packed(run, watch, cluster.work)
            assert run.wait() == 0, run.text
            run.wait_until_nothing_is_left()
        wait_until(
            lambda: len(list(cluster.processes())) <= 2,  # master and worker
            what=lambda: f"the executor's end: {[p.cmdline() for p in cluster.processes()]}",
        )
    assert list(cluster.processes()) == []
    watch.assert_all_below(cluster.work)
    for form in FORMATS:
        assert source.anomalies(archive, form) == [], form


@pytest.mark.gate("a Spark cluster and a packed environment")
def test_spark_archives_ships_the_packed_environment(cli_broker, pack, tmp_path):
    source = filled(cli_broker, "packed-along")
    archive = tmp_path / "archive"
    home = spark_home(tmp_path)
    config = write_config(
        tmp_path / "config.json",
        *(mirror("packed-along", cli_broker.bootstrap, archive, form=form) for form in FORMATS),
        properties=PACKED
        | {"spark.archives": f"{pack}#env", "spark.executorEnv.PYTHONPATH": str(tmp_path / "no")},
    )
    arguments = ("--until-now", "--master", "local-cluster[1,1,1024]")
    environment = {"SPARK_HOME": str(home)}
    with Run(config, *arguments, folder=tmp_path, environment=environment) as run:
        watch = Watch(run.processes)
        wait_for_packed(run, watch, home / "work")
        secrets = {process.environ().get(SECRET) for process in executors(run.processes())}
        assert run.wait() == 0, run.text
        run.wait_until_nothing_is_left()
    (secret,) = secrets
    assert len(secret) == 64, "made for this run"
    watch.assert_all_below(home / "work")
    for form in FORMATS:
        assert source.anomalies(archive, form) == [], form


@pytest.mark.gate("a Spark cluster and a packed environment")
def test_a_cluster_without_protection_needs_consent(cli_broker, pack, tmp_path):
    source = filled(cli_broker, "unprotected")
    archive = tmp_path / "archive"
    one = mirror("unprotected", cli_broker.bootstrap, archive)
    with StandaloneCluster(tmp_path, is_protected=False) as cluster:
        spark = {
            "master": cluster.master,
            "properties": PACKED
            | {"spark.archives": f"{pack}#env", "spark.driver.host": "127.0.0.1"},
        }
        config = tmp_path / "config.json"
        runs = {}
        for consent in ({}, {"allow-plain": True}):
            config.write_text(json.dumps({"spark": spark | consent, "mirrors": [one]}))
            with Run(config, "--until-now", folder=tmp_path) as run:
                runs[bool(consent)] = run.wait(), run.text
                run.wait_until_nothing_is_left()

    code, text = runs[False]
    assert code == 2, text
    for name in ("spark.authenticate", "spark.network.crypto.enabled", "allow-plain"):
        assert name in text
    code, text = runs[True]
    assert code == 0, text
    assert source.anomalies(archive, "parquet") == []

"""Spark's standalone cluster on loopback, and an environment packed for its executors.

with StandaloneCluster(folder) as cluster:
    cluster.master              spark://127.0.0.1:port
    cluster.properties          those that a driver needs; `properties_file` holds them
    cluster.processes()         all its processes
packed_environment(folder)      an archive for `--archives ...#env`
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import re
import secrets
import subprocess
import sys
import tarfile
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self

import psutil
import pyspark
from packaging.requirements import Requirement

import logmirror
from kit.runs.commands import Run, wait_until
from kit.servers.machine import HOST, Process, free_ports, temporary_folder

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_PROJECT: Final = Path(__file__).resolve().parents[3] / "pyproject.toml"
_MARK: Final = "LOGMIRROR_TEST_CLUSTER_MARK"
_JAVA_OPTIONS: Final = "-XX:+UseSerialGC -XX:TieredStopAtLevel=1"
_PAGE: Final = _PROJECT.parent / "docs" / "deploy" / "spark-submit.md"
_OF_SPARK: Final = frozenset({"pyspark", "py4j"})
"""Executors take these from Spark's own installation."""


def spark_home(folder: Path) -> Path:
    """Return a copy of Spark's home with another log directory of its workers."""
    home = folder / "spark-home"
    home.mkdir()
    for entry in Path(pyspark.__file__).parent.iterdir():
        if entry.name != "work":
            (home / entry.name).symlink_to(entry)
    return home


def packed_environment(folder: Path) -> Path:
    """Pack logmirror and its dependencies, without Spark, as in `docs/deploy/spark-submit.md`.

    The page installs from a registry; here the installed files are linked.
    """
    env = folder / "env"
    venv = [sys.executable, "-m", "venv", "--copies", "--without-pip", str(env)]
    subprocess.run(venv, check=True, timeout=120)
    packages = next((env / "lib").glob("python3*")) / "site-packages"
    for name in sorted(_needed()):
        for file in importlib.metadata.files(name) or ():
            source = Path(str(file.locate()))
            is_needed = not {"..", "tests", "include"} & set(file.parts)
            if is_needed and source.is_file():
                _link(source, packages / file)
    product = Path(logmirror.__file__).parent
    for source in product.rglob("*"):
        if source.is_file():
            _link(source, packages / "logmirror" / source.relative_to(product))
    packed = folder / "env.tar.gz"  # as `.tar`, Spark unpacks it without permissions
    with tarfile.open(packed, "w:gz", compresslevel=1) as archive:
        archive.add(env, ".")
    return packed


def _link(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        try:
            target.hardlink_to(source)
        except OSError as error:
            if isinstance(error, FileExistsError):
                raise
            target.write_bytes(source.read_bytes())
            os.utime(target, ns=(source.stat().st_atime_ns, source.stat().st_mtime_ns))


def _needed() -> set[str]:
    """The distributions that the product needs on an executor, by name."""
    project = tomllib.loads(_PROJECT.read_text())["project"]
    waiting, found = list(project["dependencies"]), set()
    while waiting:
        wanted = Requirement(waiting.pop())
        name = re.sub(r"[-_.]+", "-", wanted.name).lower()
        applies = wanted.marker is None or wanted.marker.evaluate({"extra": ""})
        if applies and name not in found | _OF_SPARK:
            found.add(name)
            waiting += importlib.metadata.requires(name) or ()
    return found


class StandaloneCluster:
    """A master and one worker of one core; use it in a `with`.

    Args:
        folder: Directory of logs and of executors' files.
        is_protected: Whether its processes authenticate each other and encrypt what they exchange.
    """

    def __init__(self, folder: Path, *, is_protected: bool = True) -> None:
        self._folder = folder
        protection = {
            "spark.authenticate": "true",
            "spark.authenticate.secret": secrets.token_hex(32),
            "spark.network.crypto.enabled": "true",
        }
        self.properties = protection if is_protected else {}
        self.properties_file = folder / "cluster.conf"
        self._mark = secrets.token_hex(8)
        self._ports = free_ports(4)
        self._started: list[Process] = []

    @property
    def master(self) -> str:
        """URL of the master."""
        return f"spark://{HOST}:{self._ports[0]}"

    @property
    def work(self) -> Path:
        """Directory of the executors."""
        return self._folder / "work"

    def _start(self, name: str, *arguments: str) -> Path:
        log = self._folder / f"{name}.log"
        environment = {
            key: value
            for key, value in os.environ.items()
            if key not in {"PYTHONPATH", "PYSPARK_PYTHON", "PYSPARK_DRIVER_PYTHON", "SPARK_HOME"}
        }
        environment |= {
            _MARK: self._mark,
            "SPARK_DAEMON_MEMORY": "256m",
            "SPARK_DAEMON_JAVA_OPTS": f"{_JAVA_OPTIONS} -Djava.io.tmpdir={temporary_folder()}",
            "SPARK_LOCAL_DIRS": str(temporary_folder()),
            "TMPDIR": str(temporary_folder()),
        }
        program = str(Path(pyspark.__file__).parent / "bin" / "spark-class")
        main_class = f"org.apache.spark.deploy.{name}.{name.title()}"
        options = ["--host", HOST, "--properties-file", str(self.properties_file)]
        command = [program, main_class, *options, *arguments]
        process = Process(command, log=log, environment=environment, folder=self._folder)
        self._started.append(process)
        return log

    def __enter__(self) -> Self:
        port, master_page, worker_port, worker_page = map(str, self._ports)
        self.work.mkdir()
        lines = [f"{name} {value}\n" for name, value in self.properties.items()]
        self.properties_file.write_text("".join(lines))
        log = self._start("master", "--port", port, "--webui-port", master_page)
        self._wait_for(log, "I have been elected leader")
        limits = ["--cores", "1", "--memory", "1g", "--work-dir", str(self.work)]
        where = ["--port", worker_port, "--webui-port", worker_page]
        log = self._start("worker", self.master, *limits, *where)
        self._wait_for(log, "Successfully registered with master")
        return self

    def _wait_for(self, log: Path, line: str) -> None:
        process = self._started[-1]
        wait_until(
            lambda: line in log.read_text(errors="replace") or not process.alive,
            what=lambda: f"{line!r} in:\n{process.tail()}",
        )
        assert process.alive, process.tail()

    def processes(self) -> Iterator[psutil.Process]:
        """Master, worker, executors, and the Python workers of these."""
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                is_ours = process.environ().get(_MARK) == self._mark
                if is_ours and process.status() != psutil.STATUS_ZOMBIE:
                    yield process

    def __exit__(self, *_: object) -> None:
        for process in reversed(self._started):
            process.end()
        for left in self.processes():
            with contextlib.suppress(psutil.Error):
                left.kill()


class SubmittedRun(Run):
    """`logmirror run --until-now` as `spark-submit` starts it, with the program of the page.

    Args:
        config: The configuration file.
        options: Options of `spark-submit`.
        properties: Spark properties.
        folder: Directory of logs and other files.
    """

    def __init__(
        self, config: Path, *options: str, properties: Mapping[str, str], folder: Path
    ) -> None:
        script = folder / "mirror.py"
        text = _PAGE.read_text().partition("```python\n")[2].partition("```")[0]
        assert "logmirror.cli.main" in text
        script.write_text(text)
        submit = str(spark_home(folder) / "bin" / "spark-submit")
        base = {
            "spark.pyspark.driver.python": sys.executable,
            "spark.driver.extraJavaOptions": _JAVA_OPTIONS,
            "spark.driver.host": HOST,
            "spark.ui.enabled": "false",
        }
        given = [f"--conf={name}={value}" for name, value in (base | dict(properties)).items()]
        self.program = (submit, *options, *given, str(script))  # type: ignore[misc]  # of this run
        super().__init__(config, "--until-now", folder=folder)

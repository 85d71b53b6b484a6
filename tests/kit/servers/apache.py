"""Released Apache Kafka as a set of jars from Maven, and its console tools.

Jars are kept outside the repository, in `$LOGMIRROR_TEST_CACHE` or the user's cache directory, so
that later runs and other clones download nothing.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import shutil
import subprocess
import tempfile
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Final

import pytest

from kit.servers.class_archives import archive_of
from kit.servers.machine import Process, cache_folder, java, program, temporary_folder
from kit.servers.maven import copy_jars

if TYPE_CHECKING:
    from collections.abc import Iterable

VERSIONS: Final = ("3.9.2", "4.3.1")
RELEASES: Final = tuple(
    pytest.param(version, marks=pytest.mark.gate("the other release"))
    if version != VERSIONS[-1]
    else version
    for version in VERSIONS
)
"""Parameters: `make test` runs these tests with the newest release, the gate with the others."""

# 3.x logs through reload4j, 4.x through log4j 2; both speak the slf4j 1.7 interface.
_LOGGING_JARS: Final = {
    3: (("org.slf4j", "slf4j-reload4j", "1.7.36"),),
    4: (
        ("org.apache.logging.log4j", "log4j-slf4j-impl", "2.25.1"),
        ("org.apache.logging.log4j", "log4j-core", "2.25.1"),
    ),
}

# Main classes moved between releases; the first one that the jars hold is it.
_MAIN_CLASSES: Final = {
    "kafka-storage": ("kafka.tools.StorageTool",),
    "kafka-topics": ("org.apache.kafka.tools.TopicCommand",),
    "kafka-acls": ("kafka.admin.AclCommand", "org.apache.kafka.tools.AclCommand"),
    "kafka-configs": ("kafka.admin.ConfigCommand", "org.apache.kafka.tools.ConfigCommand"),
    "kafka-console-producer": (
        "org.apache.kafka.tools.ConsoleProducer",
        "kafka.tools.ConsoleProducer",
    ),
    "kafka-console-consumer": (
        "org.apache.kafka.tools.consumer.ConsoleConsumer",
        "kafka.tools.ConsoleConsumer",
    ),
    "kafka-console-share-consumer": ("org.apache.kafka.tools.consumer.ConsoleShareConsumer",),
    "kafka-consumer-groups": ("org.apache.kafka.tools.consumer.group.ConsumerGroupCommand",),
    "kafka-delete-records": ("org.apache.kafka.tools.DeleteRecordsCommand",),
    "kafka-dump-log": ("org.apache.kafka.tools.DumpLogSegments", "kafka.tools.DumpLogSegments"),
    "kafka-get-offsets": ("org.apache.kafka.tools.GetOffsetShell",),
    "kafka-log-dirs": ("org.apache.kafka.tools.LogDirsCommand",),
    "kafka-reassign-partitions": ("org.apache.kafka.tools.reassign.ReassignPartitionsCommand",),
    "kafka-transactions": ("org.apache.kafka.tools.TransactionsCommand",),
    "kafka-producer-perf-test": ("org.apache.kafka.tools.ProducerPerformance",),
    "kafka-consumer-perf-test": ("org.apache.kafka.tools.ConsumerPerformance",),
    "kafka-verifiable-producer": ("org.apache.kafka.tools.VerifiableProducer",),
    "kafka-verifiable-consumer": ("org.apache.kafka.tools.VerifiableConsumer",),
}

_LOG4J2: Final = """\
status=WARN
rootLogger.level={level}
rootLogger.appenderRef.err.ref=err
appender.err.type=Console
appender.err.name=err
appender.err.target=SYSTEM_ERR
appender.err.layout.type=PatternLayout
appender.err.layout.pattern=%d %p %m (%c)%n
"""
_LOG4J1: Final = """\
log4j.rootLogger={level},err
log4j.appender.err=org.apache.log4j.ConsoleAppender
log4j.appender.err.target=System.err
log4j.appender.err.layout=org.apache.log4j.PatternLayout
log4j.appender.err.layout.ConversionPattern=%d %p %m (%c)%n
"""


class ApacheTools:
    """The programs of one Apache Kafka release.

    Args:
        version: An exact release; a range would mix jars of different releases.
    """

    name: ClassVar[str] = "kafka"
    """Of the folder that keeps the jars."""
    artifacts: ClassVar[tuple[str, ...]] = ("kafka_2.13", "kafka-tools")

    def __init__(self, version: str) -> None:
        self.version = version
        self.major = int(version.partition(".")[0])

    @functools.cached_property
    def jars(self) -> Path:
        """The folder with the jars; the first use on a machine downloads them."""
        home = cache_folder() / f"{self.name}-{self.version}"
        if not home.exists():
            home.parent.mkdir(parents=True, exist_ok=True)
            with (home.parent / "lock").open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)  # two test runs may begin at once
                if not home.exists():
                    _fetch(self.version, self.major, self.artifacts, home)
        return home / "jars"

    @functools.cached_property
    def class_archive(self) -> Path:
        """The class data archive of this release, for brokers and tools."""
        return archive_of(f"{self.name}-{self.version}", str(self.jars))

    @functools.cached_property
    def _classes(self) -> frozenset[str]:
        found: set[str] = set()
        for jar in self.jars.glob("kafka*.jar"):
            with zipfile.ZipFile(jar) as archive:
                found.update(archive.namelist())
        return frozenset(found)

    def main_class(self, name: str) -> str:
        """Return the main class of a console tool of this release."""
        for candidate in _MAIN_CLASSES[name]:
            if candidate.replace(".", "/") + ".class" in self._classes:
                return candidate
        message = f"Apache Kafka {self.version} has no {name}: none of {_MAIN_CLASSES[name]}"
        raise RuntimeError(message)

    def java_command(
        self, main_class: str, *arguments: str, heap: str, jvm: tuple[str, ...], log_level: str
    ) -> list[str]:
        """Return the command line of a Java program of this release."""
        if self.major >= 4:
            log_option = (
                f"-Dlog4j2.configurationFile={self.jars.parent}/log4j2-{log_level}.properties"
            )
        else:
            log_option = (
                f"-Dlog4j.configuration=file:{self.jars.parent}/log4j-{log_level}.properties"
            )
        if self.class_archive.exists():
            jvm = (f"-XX:SharedArchiveFile={self.class_archive}", *jvm)
        options = [f"-Xmx{heap}", "-XX:+UseSerialGC", "-Djava.awt.headless=true", *jvm, log_option]
        options.append(f"-Djava.io.tmpdir={temporary_folder()}")  # native libraries are put there
        return [java(), *options, "-cp", f"{self.jars}/*", main_class, *arguments]

    def application(self, source: Path, main_class: str, *arguments: str) -> list[str]:
        """Return the command line of the tests' own Java program; the first use compiles it."""
        digest = hashlib.sha256(source.read_bytes() + self.version.encode()).hexdigest()[:16]
        home = cache_folder() / f"{self.name}-application-{digest}"
        home.mkdir(parents=True, exist_ok=True)
        with (home / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # two test runs may begin at once
            if not (home / "done").exists():
                options = ["--release", "17", "-cp", f"{self.jars}/*", "-d", str(home)]
                javac = program("javac", home_variable="JAVA_HOME")
                subprocess.run([javac, *options, str(source)], check=True, timeout=120)
                (home / "done").touch()
        jvm = ("-XX:TieredStopAtLevel=1",)
        command = self.java_command(main_class, *arguments, heap="256m", jvm=jvm, log_level="WARN")
        command[command.index("-cp") + 1] += f":{home}"
        return command

    def command(self, name: str, *arguments: str) -> list[str]:
        """Return the command line of a console tool; its options suit a short run."""
        jvm = ("-XX:TieredStopAtLevel=1",)
        main_class = self.main_class(name)
        return self.java_command(main_class, *arguments, heap="256m", jvm=jvm, log_level="WARN")

    def run(
        self, name: str, *arguments: str, stdin: str = "", timeout_s: float = 60, check: bool = True
    ) -> subprocess.CompletedProcess[str]:
        """Run a console tool to its end.

        Args:
            name: The name of its script, without `.sh`: `kafka-topics`.
            arguments: Its arguments.
            stdin: Its standard input, for example of the console producer.
            timeout_s: Seconds until it is killed and the test fails.
            check: Fail with its output if its exit code is not 0.
        """
        result = subprocess.run(
            self.command(name, *arguments),
            input=stdin,
            text=True,
            capture_output=True,
            timeout=timeout_s,
            check=False,
        )
        if check and result.returncode:
            message = f"{name} exited with {result.returncode}:\n{result.stdout}\n{result.stderr}"
            raise RuntimeError(message)
        return result

    def start(self, name: str, *arguments: str, log: Path) -> Process:
        """Start a console tool and return at once."""
        return Process(self.command(name, *arguments), log=log)


def _fetch(version: str, major: int, artifacts: Iterable[str], home: Path) -> None:
    """Download the runtime jars with Maven; the folder appears complete or not at all."""
    wanted = [("org.apache.kafka", name, version) for name in artifacts]
    folder = Path(tempfile.mkdtemp(dir=home.parent, prefix=f"{home.name}-"))
    try:
        for level in ("INFO", "WARN"):
            (folder / f"log4j2-{level}.properties").write_text(_LOG4J2.format(level=level))
            (folder / f"log4j-{level}.properties").write_text(_LOG4J1.format(level=level))
        copy_jars((*wanted, *_LOGGING_JARS[major]), project=folder, target=folder / "jars")
        folder.rename(home)
    finally:
        shutil.rmtree(folder, ignore_errors=True)

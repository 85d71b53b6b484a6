"""A Kafka Streams application with exactly-once: `CountWords.java`, compiled once per machine."""

from __future__ import annotations

import fcntl
import hashlib
import subprocess
from pathlib import Path
from typing import ClassVar, Final

from kit.servers.apache import ApacheTools
from kit.servers.machine import Process, cache_folder, program

_SOURCE: Final = Path(__file__).with_name("CountWords.java")


class StreamsTools(ApacheTools):
    """Kafka Streams of one release."""

    name: ClassVar[str] = "streams"
    artifacts: ClassVar[tuple[str, ...]] = ("kafka-streams",)

    def start_count(self, bootstrap: str, folder: Path) -> Process:
        """Start the application.

        Args:
            bootstrap: Bootstrap servers of its cluster.
            folder: Directory of its state and its log, which each start shares.
        """
        folder.mkdir(parents=True, exist_ok=True)
        command = self.java_command(
            "CountWords",
            bootstrap,
            str(folder / "state"),
            heap="256m",
            jvm=("-XX:TieredStopAtLevel=1",),
            log_level="WARN",
        )
        jars = command.index("-cp") + 1
        command[jars] += f":{self._compiled()}"
        return Process(command, log=folder / "streams.log")

    def _compiled(self) -> Path:
        """Return the folder of the compiled application; the first use compiles it."""
        source = _SOURCE.read_bytes()
        digest = hashlib.sha256(source + self.version.encode()).hexdigest()[:16]
        home = cache_folder() / f"streams-application-{digest}"
        home.mkdir(parents=True, exist_ok=True)
        with (home / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # two test runs may begin at once
            if not (home / "CountWords.class").exists():
                options = ["--release", "17", "-cp", f"{self.jars}/*", "-d", str(home)]
                subprocess.run([program("javac"), *options, str(_SOURCE)], check=True, timeout=120)
        return home

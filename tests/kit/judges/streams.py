"""A Kafka Streams application with exactly-once: `CountWords.java`, compiled once per machine."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Final

from kit.servers.apache import ApacheTools
from kit.servers.machine import Process

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
        command = self.application(_SOURCE, "CountWords", bootstrap, str(folder / "state"))
        return Process(command, log=folder / "streams.log")

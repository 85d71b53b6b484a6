"""Services that read a topic in a group, as processes that a test kills: what each has processed.

    Librdkafka      confluent-kafka, with committed offsets
    JavaConsumer    Apache Kafka's client, with committed offsets
    JavaByClient    the same; it starts where `RemoteClusterUtils.translateOffsets` says
    Streams         Kafka Streams with exactly-once: its output and its offsets in one transaction

Values of records must be unique and without line ends.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Final, Protocol, Self

from kit.judges.clients import rows_by_librdkafka
from kit.judges.mirror_client import MirrorClientTools
from kit.judges.streams import StreamsTools
from kit.servers.apache import VERSIONS
from kit.servers.kafka import create_topic
from kit.servers.machine import Process

_HERE: Final = Path(__file__).parent
MARK: Final = b"> "
"""Before each value, in the output of a service that prints."""

PAUSE_MS: Final = 2
"""After each record, so that a test can kill a service while it reads."""


class Service(Protocol):
    """One life of a service at one cluster; a context manager, at whose end it is killed."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...

    def kill(self) -> None:
        """End it like `kill -9`."""

    def processed(self) -> list[bytes]:
        """Return the values that it has processed so far, in their order."""

    def tail(self) -> str:
        """Return the end of its log."""


class _Printing(ABC):
    """A service that prints a line for each record, in one write.

    Args:
        bootstrap: Bootstrap servers.
        topic: The topic that it reads.
        group: Its group.
        folder: An existing directory of its files.
        alias: Of the source, if it fails over by MirrorMaker's client.
    """

    def __init__(
        self, bootstrap: str, topic: str, group: str, folder: Path, alias: str = ""
    ) -> None:
        self._arguments = [bootstrap, topic, group, str(PAUSE_MS)]
        self._alias = [alias] if alias else []
        self._log = folder / "processed"

    @abstractmethod
    def command(self) -> list[str]:
        """Return the program and its arguments."""

    def __enter__(self) -> Self:
        self._process = Process(self.command(), log=self._log)
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def kill(self) -> None:
        self._process.end(kill=True)

    def processed(self) -> list[bytes]:
        lines = self._log.read_bytes().split(b"\n")[:-1]
        return [line[len(MARK) :] for line in lines if line.startswith(MARK)]

    def tail(self) -> str:
        return self._process.tail()


class Librdkafka(_Printing):
    """confluent-kafka."""

    def command(self) -> list[str]:
        return [sys.executable, "-P", str(_HERE / "group_service.py"), *self._arguments]


class JavaConsumer(_Printing):
    """Apache Kafka's client."""

    def command(self) -> list[str]:
        source = _HERE / "GroupService.java"
        tools = MirrorClientTools(VERSIONS[-1])
        return tools.application(source, "GroupService", *self._arguments)


class JavaByClient(_Printing):
    """Apache Kafka's client, which is given its start by MirrorMaker's."""

    def command(self) -> list[str]:
        source = _HERE / "GroupService.java"
        tools = MirrorClientTools(VERSIONS[-1])
        return tools.application(source, "GroupService", *self._arguments, *self._alias)


class Streams:
    """Kafka Streams; see `_Printing` for the arguments."""

    def __init__(
        self, bootstrap: str, topic: str, group: str, folder: Path, alias: str = ""
    ) -> None:
        del alias
        self._bootstrap, self._output, self._log = bootstrap, f"{topic}-out", folder / "streams.log"
        arguments = [bootstrap, topic, group, str(PAUSE_MS), str(folder / "state"), self._output]
        source = _HERE / "PassOn.java"
        self._command = StreamsTools(VERSIONS[-1]).application(source, "PassOn", *arguments)

    def __enter__(self) -> Self:
        create_topic(self._bootstrap, self._output, 1, {})
        self._process = Process(self._command, log=self._log)
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def kill(self) -> None:
        self._process.end(kill=True)

    def processed(self) -> list[bytes]:
        rows = rows_by_librdkafka(self._bootstrap, self._output)
        return [row.value for row in rows if row.value is not None]

    def tail(self) -> str:
        return self._process.tail()

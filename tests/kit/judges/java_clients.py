"""Apache Kafka's own producer and consumer, run by its tools that report each record as JSON.

    with JavaReading(bootstrap, "t", folder) as reading, JavaLoad(bootstrap, "t", folder) as load:
        load.wait_for(500)

They have the methods of `kit.runs.bucket_load` that tests of faults use.
"""

from __future__ import annotations

import json
import secrets
import time
from typing import TYPE_CHECKING, Any, Final, Self

from kit.servers.apache import VERSIONS, ApacheTools

if TYPE_CHECKING:
    from pathlib import Path

    from kit.servers.machine import Process

_TIMEOUT_S: Final = 120
_KEYS: Final = 40
"""So many keys in turn, so that each partition gets records."""

_PRODUCER: Final = "enable.idempotence=true\nretries=2147483647\nreconnect.backoff.max.ms=200\n"
"""The tool would not retry; the values are the client's own defaults, but for the back-off."""

_CLOSED: Final = ("IllegalStateException", "Producer closed while send in progress")
"""A record that the tool hands to a producer that it has closed, or is closing: it is not sent."""

_CONSUMER: Final = "isolation.level=read_committed\nreconnect.backoff.max.ms=200\n"


class _Reporting:
    """A tool that runs, and the events that it has printed; a context manager.

    Args:
        name: Of the tool.
        arguments: Of the tool.
        config: Properties of its client.
        folder: An existing directory of its files.
    """

    def __init__(self, name: str, *arguments: str, config: str, folder: Path) -> None:
        path = folder / f"{name}-{secrets.token_hex(4)}"
        path.with_suffix(".properties").write_text(config)
        self._name, self._log = name, path.with_suffix(".log")
        self._arguments = (*arguments, "--command-config", str(path.with_suffix(".properties")))
        self._size = 0
        self._events: list[dict[str, Any]] = []
        self._process: Process

    def __enter__(self) -> Self:
        tools = ApacheTools(VERSIONS[-1])
        self._process = tools.start(self._name, *self._arguments, log=self._log)
        return self

    def __exit__(self, *_: object) -> None:
        self._process.end(kill=True)

    @property
    def text(self) -> str:
        """Everything that it has printed, warnings of its client among it."""
        return self._log.read_text(errors="replace")

    def stop(self) -> None:
        """End it in order."""
        self._process.end(timeout_s=_TIMEOUT_S)

    def events(self) -> list[dict[str, Any]]:
        """Return all events so far."""
        with self._log.open("rb") as log:
            log.seek(self._size)
            found = log.read()
        found = found[: found.rfind(b"\n") + 1]
        self._size += len(found)
        self._events += [json.loads(line) for line in found.splitlines() if line[:1] == b"{"]
        return self._events

    def _named(self, name: str) -> list[dict[str, Any]]:
        return [event for event in self.events() if event["name"] == name]

    def _wait_for(self, name: str, count: int, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while len(self._named(name)) < count:
            assert time.monotonic() < deadline, f"{self._name} makes no progress: {self.text}"
            time.sleep(0.05)


class JavaLoad(_Reporting):
    """An idempotent producer with `acks=all`, and what was acknowledged to it.

    Args:
        bootstrap: Bootstrap servers.
        topic: An existing topic.
        folder: An existing directory of its files.
        per_s: Records per second at most.
    """

    def __init__(self, bootstrap: str, topic: str, folder: Path, *, per_s: int = 200) -> None:
        at = ("--bootstrap-server", bootstrap, "--topic", topic, "--throughput", str(per_s))
        keys = ("--repeating-keys", str(_KEYS))
        super().__init__("kafka-verifiable-producer", *at, *keys, config=_PRODUCER, folder=folder)

    @property
    def acked(self) -> dict[tuple[int, int], bytes]:
        """The values by partition and offset."""
        acked = self._named("producer_send_success")
        return {(one["partition"], one["offset"]): one["value"].encode() for one in acked}

    @property
    def failures(self) -> list[str]:
        """Errors of records, but for those that the tool hands to a producer that it has closed."""
        failed = [json.dumps(one) for one in self._named("producer_send_error")]
        return [one for one in failed if not any(text in one for text in _CLOSED)]

    @property
    def sent(self) -> int:
        """How many records the client took, when it has ended."""
        [total] = self._named("tool_data")
        refused = len(self._named("producer_send_error")) - len(self.failures)
        return int(total["sent"]) - refused

    def flush(self) -> int:
        """Send no more, and wait for what was sent; returns how much was not delivered."""
        self.stop()
        return self.sent - len(self._named("producer_send_success"))

    def wait_for(self, count: int, timeout_s: float = _TIMEOUT_S) -> None:
        """Wait until so many more records are acknowledged."""
        before = len(self._named("producer_send_success"))
        self._wait_for("producer_send_success", before + count, timeout_s)


class JavaReading(_Reporting):
    """A consumer of committed records in a group, which commits after each poll.

    Args:
        bootstrap: Bootstrap servers.
        topic: An existing topic.
        folder: An existing directory of its files.
        group: Its group.
    """

    def __init__(self, bootstrap: str, topic: str, folder: Path, *, group: str = "java") -> None:
        at = ("--bootstrap-server", bootstrap, "--topic", topic, "--group-id", group)
        super().__init__(
            "kafka-verifiable-consumer", *at, "--verbose", config=_CONSUMER, folder=folder
        )

    @property
    def rows(self) -> list[tuple[int, int, bytes | None]]:
        """Partition, offset and value, as they came."""
        return [
            (row["partition"], row["offset"], _bytes(row["value"]))
            for row in self._named("record_data")
        ]

    @property
    def errors(self) -> list[str]:
        """Records that its client could not read."""
        return [line for line in self.text.splitlines() if "Exception" in line]

    @property
    def assigned(self) -> set[int]:
        """The partitions that it has now."""
        found: set[int] = set()
        for event in self.events():
            if event["name"] in {"partitions_assigned", "partitions_revoked"}:
                changed = {one["partition"] for one in event["partitions"]}
                found = found | changed if "assigned" in event["name"] else found - changed
        return found

    def wait_for(self, count: int, timeout_s: float = _TIMEOUT_S) -> None:
        """Wait until so many records were read in all."""
        self._wait_for("record_data", count, timeout_s)

    def found(self) -> dict[tuple[int, int], bytes | None]:
        """Return what was read; checks that each record came once, in order."""
        nexts: dict[int, int] = {}
        for partition, offset, _ in self.rows:
            assert offset == nexts.get(partition, 0)
            nexts[partition] = offset + 1
        return {(partition, offset): value for partition, offset, value in self.rows}


def _bytes(text: str | None) -> bytes | None:
    return None if text is None else text.encode()

"""The JSON file with the moves of a plan, as Kafka's `kafka-reassign-partitions` reads it.

    {"version": 1, "partitions": [
      {"topic": "orders", "partition": 0, "replicas": [1], "log_dirs": ["/disk-2"]}]}

`replicas` are brokers; `log_dirs` has a directory for each of them, or "any": it is not moved.
"""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from logmirror.errors import UsageError
from logmirror.model import TopicPartition

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

ANY: Final = "any"
_VERSION: Final = 1
_NUMBERS: Final = 2**31


class Entry(NamedTuple):
    """A partition of a plan."""

    partition: TopicPartition
    replicas: tuple[int, ...]
    log_dirs: tuple[str, ...]
    """As many as replicas."""


def read_plan(text: str) -> list[Entry]:
    """Read a plan.

    Raises:
        UsageError: It is not one, or has a partition twice.
    """
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _invalid("it is not JSON", cause=str(error)) from error
    if not isinstance(content, dict) or content.get("version", _VERSION) != _VERSION:
        raise _invalid(f"it has no version {_VERSION}")
    listed = content.get("partitions")
    if not isinstance(listed, list) or not listed:
        raise _invalid("it has no partitions")
    entries: dict[TopicPartition, Entry] = {}
    for one in listed:
        entry = _entry(one)
        if entry.partition in entries:
            raise _invalid("it has a partition twice", partition=str(entry.partition))
        entries[entry.partition] = entry
    return list(entries.values())


def plan_text(entries: Iterable[Entry]) -> str:
    """Return a plan as text, with a line for each partition."""
    lines = [
        json.dumps(
            {
                "topic": entry.partition.topic,
                "partition": entry.partition.partition,
                "replicas": entry.replicas,
                "log_dirs": entry.log_dirs,
            }
        )
        for entry in entries
    ]
    inner = ",\n".join(lines)
    return f'{{"version": {_VERSION}, "partitions": [\n{inner}\n]}}\n'


def write_new(path: Path, text: str) -> None:
    """Write a new file, durably.

    Raises:
        FileExistsError: The file exists.
        UsageError: It cannot be written.
    """
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except FileExistsError:
        raise
    except OSError as error:
        raise UsageError("cannot write the plan", path=str(path), cause=str(error)) from error


def _entry(value: Any) -> Entry:  # noqa: ANN401  # of JSON
    if not isinstance(value, dict):
        raise _invalid("a partition is not an object", found=repr(value))
    topic, number = value.get("topic"), _number(value.get("partition"))
    listed = value.get("replicas")
    if not isinstance(topic, str) or not topic or number is None:
        raise _invalid("a partition has no topic or no number", found=json.dumps(value))
    replicas = [_number(one) for one in listed] if isinstance(listed, list) else []
    nodes = tuple(one for one in replicas if one is not None)
    if not nodes or len(nodes) != len(replicas):
        raise _invalid("a partition has no replicas", found=json.dumps(value))
    log_dirs = value.get("log_dirs", [ANY] * len(nodes))
    if not isinstance(log_dirs, list) or not all(isinstance(one, str) for one in log_dirs):
        raise _invalid("log_dirs is not a list of texts", found=json.dumps(value))
    if len(log_dirs) != len(nodes) or len(set(nodes)) != len(nodes):
        raise _invalid("log_dirs and replicas do not match", found=json.dumps(value))
    return Entry(TopicPartition(topic, number), nodes, tuple(log_dirs))


def _number(value: object) -> int | None:
    """Return a number of a partition or a broker; None: it is not one."""
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _NUMBERS:
        return value
    return None


def _invalid(problem: str, **facts: object) -> UsageError:
    return UsageError(
        f"this is no plan of moves: {problem}",
        hint="it is the JSON file of kafka-reassign-partitions; `logmirror moves plan` writes one",
        **facts,
    )

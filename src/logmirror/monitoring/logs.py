"""The formats of log events on stderr: one line of text or of JSON per event.

Events have their fields in `extra={"facts": {...}}`. Events of a mirror have the field `mirror`,
and `topic` and `partition` where they apply.
"""

from __future__ import annotations

import contextlib
import json
import logging
import sys
from datetime import UTC, datetime
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, cast

from logmirror.reports import Event

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

Format = Literal["text", "json"]


class TextLine(logging.Formatter):
    """`2026-01-31T12:00:00.123Z INFO flushed mirror=orders path=... from=0 to=99`."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        pairs = "".join(f" {name}={_value(value)}" for name, value in _facts(record).items())
        line = f"{_at(record)} {record.levelname} {record.getMessage()}{pairs}"
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return line


class JsonLine(logging.Formatter):
    """`{"at": "2026-01-31T12:00:00.123Z", "level": "INFO", "event": "flushed", "mirror": ...}`."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        named = {"at": _at(record), "level": record.levelname, "event": record.getMessage()}
        if record.exc_info:
            named["exception"] = self.formatException(record.exc_info)
        facts = {name: value for name, value in _facts(record).items() if name not in named}
        return json.dumps({**named, **facts}, default=str)


def log_to_stderr(level: str, form: Format = "text") -> None:
    """Write the events of this process with at least this level to stderr."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLine() if form == "json" else TextLine())
    logging.getLogger("logmirror").addHandler(handler)
    logging.getLogger("logmirror").setLevel(level.upper())


def _facts(record: logging.LogRecord) -> Mapping[str, object]:
    facts: Mapping[str, object] = getattr(record, "facts", {})
    return facts


def _at(record: logging.LogRecord) -> str:
    at = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
    return at.replace("+00:00", "Z")


def _value(value: object) -> str:
    text = str(value)
    return text if text and text.isprintable() and " " not in text else json.dumps(text)


class _Reporter(logging.Handler):
    """Converts each log record to an `Event` for the callback."""

    def __init__(self, on_event: Callable[[Event], None]) -> None:
        super().__init__()
        self._on_event = on_event

    def emit(self, record: logging.LogRecord) -> None:
        event = Event(
            at_ms=int(record.created * 1000),
            level=cast("Any", record.levelname),
            name=record.getMessage(),
            facts=MappingProxyType(dict(_facts(record))),
        )
        try:
            self._on_event(event)
        except Exception:  # noqa: BLE001  # replication does not depend on what a callback does
            self.handleError(record)


@contextlib.contextmanager
def reporting(on_event: Callable[[Event], None]) -> Iterator[None]:
    """Pass the events of level INFO and above to a callback until the block ends."""
    logger, reporter = logging.getLogger("logmirror"), _Reporter(on_event)
    level = logger.level
    logger.addHandler(reporter)
    if not logger.isEnabledFor(logging.INFO):
        logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(reporter)
        logger.setLevel(level)

"""`until` of a mirror: where its copy ends."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any, Final

from pydantic import Field, PlainValidator, WithJsonSchema, model_validator

from logmirror.config.base_model import Model

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_OFFSET_MAX: Final = 2**63 - 1


def parse_time(value: object) -> int:
    """Return the milliseconds since 1970 of a time.

    Raises:
        ValueError: It is neither a number of milliseconds nor ISO 8601 with a time zone.
    """
    message = "must be a time with its zone, such as 2026-11-25T12:00:00Z, or milliseconds"
    if type(value) is int and 0 <= value <= _OFFSET_MAX:
        return value
    try:
        found = datetime.fromisoformat(value) if isinstance(value, str) else None
    except ValueError:
        found = None
    if found is None or found.tzinfo is None or found < _EPOCH:
        raise ValueError(message)
    return -((_EPOCH - found) // timedelta(milliseconds=1))


def _check_time(value: object) -> object:
    parse_time(value)
    return value


_Time = Annotated[
    Any,
    PlainValidator(_check_time),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "integer", "minimum": 0}]}),
]
_Offset = Annotated[int, Field(ge=0, le=_OFFSET_MAX)]


class UntilModel(Model):
    """Where the copy of each partition ends: before a time or an offset; one of the two.

    The mirror is copied once, up to there or to the end that the source has now, and its run ends.
    A destination that already has records beyond `until` is an error. With `time`, this needs a
    source whose lookup by time is exact, as Apache Kafka's is. `LAG` of `logmirror status` counts
    up to the source's end, so it need not become 0.
    """

    time: _Time | None = None
    """A time with its zone, such as `2026-11-25T12:00:00Z`, or milliseconds since 1970. A partition
    ends before its first committed record with this timestamp or a later one. Records after that
    one are not copied, whatever their timestamps are."""

    offset: _Offset | None = None
    """An offset. Each partition ends before it."""

    @model_validator(mode="after")
    def _check_one(self) -> UntilModel:
        if (self.time is None) == (self.offset is None):
            message = "needs either time or offset"
            raise ValueError(message)
        return self


@dataclass(frozen=True, slots=True, kw_only=True)
class UntilSettings:
    """Where a copy ends; one of the two is not None."""

    time_ms: int | None
    """Milliseconds since 1970."""

    offset: int | None


def until_settings(model: UntilModel) -> UntilSettings:
    """Return the settings of a valid model."""
    time_ms = None if model.time is None else parse_time(model.time)
    return UntilSettings(time_ms=time_ms, offset=model.offset)

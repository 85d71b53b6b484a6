"""`groups` of a mirror: consumer groups of the source, made usable at its replicas and archives."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Final

from pydantic import AfterValidator, Field

from logmirror.config.base_model import Model

_ALIAS: Final = re.compile(r"[A-Za-z0-9_-]{1,100}")
INTERVAL_MS_MIN: Final = 100
INTERVAL_MS_MAX: Final = 3_600_000
KEEP_MAX: Final = 10_000


def _check_alias(text: str) -> str:
    if not _ALIAS.fullmatch(text):
        message = "must be 1 to 100 letters, digits, dashes or underscores: it begins topic names"
        raise ValueError(message)
    return text


def _check_pattern(text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        message = f"is not a regular expression: {error}"
        raise ValueError(message) from error
    return text


_Pattern = Annotated[str, AfterValidator(_check_pattern)]
_Alias = Annotated[
    str,
    AfterValidator(_check_alias),
    Field(json_schema_extra={"pattern": f"^{_ALIAS.pattern}$"}),
]
_Interval = Annotated[int, Field(ge=INTERVAL_MS_MIN, le=INTERVAL_MS_MAX)]


class GroupsModel(Model):
    """The consumer groups of the source, for all destinations of the mirror.

    At destinations of type `kafka` their committed offsets are translated and written as
    checkpoints, as MirrorMaker 2 does, to `<source-alias>.checkpoints.internal`. At archives they
    are stored as snapshots; see [Fail over](fail-over.md).
    """

    source_alias: _Alias
    """The name of the source cluster in the names of topics at the destination. The same for all
    mirrors of one source cluster."""

    include: Annotated[list[_Pattern], Field(min_length=1)] = Field(default_factory=lambda: [".*"])
    """The groups, as regular expressions. A group's whole name matches one of them. By
    default all."""

    exclude: list[_Pattern] = Field(default_factory=lambda: ["console-consumer-.*", "__.*"])
    """Groups that are left out, in the same form. By default `console-consumer-.*` and `__.*`."""

    interval_ms: _Interval = 5_000
    """Time from one translation of all groups to the next, in milliseconds."""

    sync_group_offsets: bool = False
    """Whether translated offsets are also committed at the destination. They only move forward
    there, and groups with members there are not touched."""

    archive_interval_ms: _Interval = 60_000
    """For archives: shortest time from one snapshot of the committed offsets to the next, in
    milliseconds. None is written while nothing changes."""

    keep_archived: Annotated[int, Field(ge=1, le=KEEP_MAX)] = 100
    """For archives: how many of the newest snapshots are kept. Of the older ones every 60th is
    kept, as many again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupsSettings:
    """The groups of a mirror."""

    source_alias: str
    include: tuple[str, ...]
    exclude: tuple[str, ...]
    interval_ms: int
    sync_group_offsets: bool
    archive_interval_ms: int = 60_000
    keep_archived: int = 100


def groups_settings(model: GroupsModel) -> GroupsSettings:
    """Return the settings of a valid model."""
    return GroupsSettings(
        source_alias=model.source_alias,
        include=tuple(model.include),
        exclude=tuple(model.exclude),
        interval_ms=model.interval_ms,
        sync_group_offsets=model.sync_group_offsets,
        archive_interval_ms=model.archive_interval_ms,
        keep_archived=model.keep_archived,
    )

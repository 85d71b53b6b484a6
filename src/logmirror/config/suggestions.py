"""Suggestions for problems: the nearest key, its right place, a number without its unit."""

from __future__ import annotations

import difflib
import re
from typing import TYPE_CHECKING, Final

from logmirror.config.broker_model import ARCHIVE_TAGS, BrokerModel
from logmirror.config.destination_model import (
    DESTINATION_TYPES,
    ArchiveBucketModel,
    CredentialsModel,
    FilesystemModel,
    IdentityModel,
    KafkaModel,
    S3Model,
    SharedFilesystemModel,
    SharedKafkaModel,
    SharedS3Model,
)
from logmirror.config.groups_model import GroupsModel
from logmirror.config.layout_model import DailyModel, FlushModel
from logmirror.config.model import (
    ColumnModel,
    ConfigModel,
    LimitsModel,
    MirrorModel,
    SourceModel,
    SparkModel,
)
from logmirror.config.until_model import UntilModel

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pydantic import BaseModel

_MODELS: Final[dict[str, type[BaseModel]]] = {
    "": ConfigModel,
    "mirrors": MirrorModel,
    "mirrors.source": SourceModel,
    "mirrors.destinations.filesystem": FilesystemModel,
    "mirrors.destinations.kafka": KafkaModel,
    "mirrors.destinations.s3": S3Model,
    "mirrors.destinations.s3.credentials": CredentialsModel,
    "mirrors.destinations.s3.credentials.write": IdentityModel,
    "mirrors.destinations.s3.credentials.read": IdentityModel,
    "mirrors.keys": ColumnModel,
    "mirrors.values": ColumnModel,
    "mirrors.flush": FlushModel,
    "mirrors.flush.daily": DailyModel,
    "mirrors.groups": GroupsModel,
    "mirrors.until": UntilModel,
    "destination.filesystem": SharedFilesystemModel,
    "destination.kafka": SharedKafkaModel,
    "destination.s3": SharedS3Model,
    "destination.s3.credentials": CredentialsModel,
    "destination.s3.credentials.write": IdentityModel,
    "destination.s3.credentials.read": IdentityModel,
    "destination.filesystem.flush": FlushModel,
    "destination.filesystem.flush.daily": DailyModel,
    "destination.s3.flush": FlushModel,
    "destination.s3.flush.daily": DailyModel,
    "limits": LimitsModel,
    "spark": SparkModel,
    "broker": BrokerModel,
    "broker.archive.bucket": ArchiveBucketModel,
    "broker.archive.bucket.credentials": IdentityModel,
}
"""The model of each mapping of the file, by its path without list indexes. A destination's keys
depend on its type, which pydantic adds to the path."""

_UNITS_MS: Final = {"ms": 1, "s": 1000, "m": 60_000, "min": 60_000, "h": 3_600_000, "d": 86_400_000}
_UNITS_BYTES: Final = {
    "b": 1,
    "k": 1000,
    "kb": 1000,
    "kib": 1024,
    "m": 1000**2,
    "mb": 1000**2,
    "mib": 1024**2,
    "g": 1000**3,
    "gb": 1000**3,
    "gib": 1024**3,
}
_WITH_UNIT = re.compile(r"([0-9]{1,12})\s*([A-Za-z]{1,3})")
_BOOLEANS: Final = {
    **dict.fromkeys(("yes", "y", "on"), "write true"),
    **dict.fromkeys(("no", "n", "off"), "write false"),
}
_SWITCHES: Final = frozenset({"enabled", "affects-readiness", "auto-create"})
_NUMBERS: Final = frozenset(
    {
        "partition",
        "max-time-ms",
        "max-bytes",
        "max-offsets",
        "max-batch-bytes",
        "replication-factor",
    }
)
_TEXTS: Final = frozenset(
    {"name", "topic", "group-id", "root", "destination-name-override", "at-utc"}
)


def did_you_mean(found: object, allowed: Iterable[str]) -> str:
    """Return a question with the allowed word nearest to `found`; empty if none is near."""
    word = found.lower().replace("_", "-") if isinstance(found, str) else ""
    close = difflib.get_close_matches(word, list(allowed), n=1, cutoff=0.6)
    return f"did you mean {close[0]}?" if close else ""


def suggest_key(loc: tuple[str | int, ...]) -> str:
    """Return a suggestion for an unknown key: a similar key, or the place where the key belongs.

    Args:
        loc: Keys and list indexes from the top of the file to the unknown key, with the type of a
            destination after its key or index, as in pydantic's errors.
    """
    key = str(loc[-1])
    place = ".".join(part for part in loc[:-1] if isinstance(part, str))
    if place in _MODELS and (close := did_you_mean(key, _keys(_MODELS[place]))):
        return close
    for other, model in _MODELS.items():
        if key in _keys(model):
            place = ".".join(part for part in other.split(".") if part not in DESTINATION_TYPES)
            return f"it belongs below {place}" if place else "it belongs at the top level"
    return ""


def without_type(loc: tuple[str | int, ...]) -> tuple[str | int, ...]:
    """Return `loc` without the type of a destination or an archive, which pydantic adds."""
    if loc[:2] == ("broker", "archive"):
        return loc[:3] + loc[4:] if loc[3:4] and loc[3] in ARCHIVE_TAGS else loc
    if loc[:1] == ("destination",):
        return loc[:1] + loc[2:] if loc[1:2] and loc[1] in DESTINATION_TYPES else loc
    depth = 4  # mirrors, index, destinations, index
    in_list = loc[:1] == ("mirrors",) and loc[2:3] == ("destinations",) and len(loc) > depth
    return loc[:depth] + loc[depth + 1 :] if in_list and loc[depth] in DESTINATION_TYPES else loc


def _keys(model: type[BaseModel]) -> list[str]:
    return [field.alias or name for name, field in model.model_fields.items()]


def suggest_value(loc: tuple[str | int, ...], found: object) -> str:
    """Return a suggestion for a value of the wrong type; empty if there is none.

    Args:
        loc: Keys and list indexes from the top of the file to the value.
        found: The value. The suggestion shows it only if it is a number, or a number with a unit.
    """
    key = str(loc[-1])
    if key == "partition" and found == "all":
        return "write partitions: all"
    if key == "partitions" and type(found) is int and loc[0] == "mirrors":
        return f"write partition: {found} or partitions: [{found}]"
    if key in _SWITCHES and isinstance(found, str):
        return _BOOLEANS.get(found.lower(), "")
    if key in _NUMBERS and isinstance(found, str):
        return _suggest_number(key, found)
    if key in _TEXTS and isinstance(found, bool | int | float) and "properties" not in loc:
        return "put it in quotes"
    return ""


def _suggest_number(key: str, found: str) -> str:
    units = _UNITS_MS if key.endswith("-ms") else _UNITS_BYTES if key.endswith("-bytes") else {}
    match = _WITH_UNIT.fullmatch(found)
    if match and match[2].lower() in units:
        return f"write {int(match[1]) * units[match[2].lower()]}"
    return "remove the quotes" if found.isascii() and found.isdecimal() else ""

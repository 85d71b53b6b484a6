"""Snapshots of consumer groups beside an archive: name, content, and which of them are kept.

    .logmirror/groups/<destination>/<mirror>/<sequence, 20 digits>

1. A snapshot is created, never replaced: a number has one content, whichever process wrote it.
2. Every offset in it was committed at or before its time. So a group that continues from it skips
   nothing that it had not read by then.
3. A snapshot is complete: it has all groups and all mirrored partitions that had a committed
   offset. An offset that could not be read is that of an earlier read, and its group is `stale`.

The content is one JSON object in UTF-8, described in `docs/formats/group-offsets.md`.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from logmirror.archive import json_codec
from logmirror.archive.json_codec import integer, text
from logmirror.errors import CorruptionError, UsageError
from logmirror.model import OFFSET_MAX

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from logmirror.archive.json_codec import Fields

GROUPS_FOLDER: Final = ".logmirror/groups"
"""The folder of all snapshots, relative to the store's root."""

VERSION: Final = 1
"""Version of the content. A reader rejects a higher one."""

FIRST: Final = 1
"""The sequence number of the first snapshot."""

SPACING: Final = 60
"""Of the snapshots that are older than the newest ones, those whose number is a multiple of this
are kept."""

MAX_BYTES: Final = 64 << 20
"""The largest snapshot. 10,000 groups with an offset in each of 100 partitions take 16 MiB."""

_DIGITS: Final = 20
_DIGEST: Final = b',"sha256":"'
_FILE: Final = json_codec.FileKind(
    version=VERSION,
    unreadable="unreadable snapshot of group offsets",
    hint="an earlier snapshot may be intact: `logmirror groups list --offsets-from DESTINATION "
    "--at TIME`",
    too_new="a newer version of logmirror wrote this snapshot of group offsets",
    too_new_hint="upgrade logmirror here",
)


class CommittedOffset(NamedTuple):
    """The committed offset of one partition."""

    partition: int
    offset: int
    """The next offset to read."""
    metadata: str = ""
    """What the client committed with it; empty also if that was null."""


class GroupEntry(NamedTuple):
    """One group in a snapshot."""

    group: str
    offsets: tuple[CommittedOffset, ...]
    """By partition; at least one."""
    is_stale: bool = False
    """Whether an offset could not be read, so that the one of an earlier read is here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """A snapshot without its groups."""

    sequence: int
    """Its number: one more than that of the newest one before it."""

    time_ms: int
    """By the writer's clock, ms since 1970, after all offsets were read."""

    writer: str
    """The writer ID of the process."""

    source_alias: str
    cluster_id: str
    """Of the source's cluster."""

    mirror: str
    destination: str
    topic: str
    topic_id: str
    """32 hexadecimal digits; empty if the source has no topic IDs."""

    positions: Mapping[int, int | None]
    """The archive's position in each partition, read after the offsets. None: not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The committed offsets of all groups for one topic, at one time."""

    header: Header
    groups: tuple[GroupEntry, ...]
    """By name."""


def snapshots_folder(destination: str, mirror: str) -> str:
    """Return the folder of the snapshots of a mirror at an archive.

    Mirrors of different partitions may write one destination, also in several processes. Each has
    its own snapshots, so that every snapshot is complete.
    """
    return f"{GROUPS_FOLDER}/{destination}/{mirror}"


def snapshot_name(folder: str, sequence: int) -> str:
    """Return the name of a snapshot."""
    return f"{folder}/{sequence:0{_DIGITS}d}"


def sequence_of(name: str) -> int | None:
    """Return the number of a name without its folder; None if it is not that of a snapshot."""
    if len(name) != _DIGITS or not (name.isascii() and name.isdigit()) or int(name) > OFFSET_MAX:
        return None
    return int(name)


def encoded_group(entry: GroupEntry) -> bytes:
    """Return a group as a snapshot holds it."""
    content: dict[str, object] = {
        "group": entry.group,
        "offsets": [list(one) if one.metadata else list(one[:2]) for one in entry.offsets],
    }
    if entry.is_stale:
        content["stale"] = True
    return json_codec.encode(content)


def decoded_group(data: bytes) -> GroupEntry:
    """Return the group that `encoded_group` returned."""
    return _group(_FILE.load(data, ""))


def encode(header: Header, groups: Iterable[bytes]) -> bytes:
    """Return the content of a snapshot.

    Args:
        header: All but the groups.
        groups: The groups by name, from `encoded_group`.

    Raises:
        UsageError: It would be larger than `MAX_BYTES`.
    """
    content = {
        "version": VERSION,
        "sequence": header.sequence,
        "time_ms": header.time_ms,
        "writer": header.writer,
        "source_alias": header.source_alias,
        "cluster_id": header.cluster_id,
        "mirror": header.mirror,
        "destination": header.destination,
        "topic": header.topic,
        "topic_id": header.topic_id,
        "positions": [list(one) for one in sorted(header.positions.items())],
    }
    body = b"".join(
        [json_codec.encode(content)[:-1], b',"groups":[', b",".join(groups), b"]"],
    )
    if len(body) > MAX_BYTES:
        raise UsageError(
            "the committed offsets of the groups are too many for one snapshot",
            hint="leave groups out with `include` and `exclude` of `groups`",
            mirror=header.mirror,
            destination=header.destination,
            size_bytes=len(body),
            limit_bytes=MAX_BYTES,
        )
    return body + _DIGEST + _digest(body) + b'"}\n'


def decode(data: bytes, *, name: str) -> Snapshot:
    """Read a snapshot.

    Args:
        data: Its content.
        name: Its name in the store, which the content must match.

    Raises:
        CorruptionError: It is not a snapshot, is damaged, or has another name.
        UsageError: A newer version of logmirror wrote it.
    """
    content = _FILE.load(data, name)
    body, _, _ = data.rpartition(_DIGEST)
    if data != body + _DIGEST + _digest(body) + b'"}\n':
        raise _FILE.error(name, "the digest does not match")
    _FILE.check_version(content, name)
    try:
        found = _snapshot(content)
    except (KeyError, TypeError, ValueError, CorruptionError) as error:
        raise _FILE.error(name, repr(error)[:200]) from error
    header = found.header
    folder = snapshots_folder(header.destination, header.mirror)
    if name != snapshot_name(folder, header.sequence):
        raise _FILE.error(name, "the content belongs to another name")
    return found


def to_delete(sequences: Collection[int], keep: int) -> list[int]:
    """Return the numbers of the snapshots to delete, the oldest first; never the newest.

    Args:
        sequences: The numbers that there are.
        keep: How many of the newest ones are kept; and as many of the older ones whose number is
            a multiple of `SPACING`. At least 1.
    """
    older = sorted(sequences)[:-keep]
    spaced = [number for number in older if number % SPACING == 0][-keep:]
    return sorted({*older} - {*spaced})


def _digest(body: bytes) -> bytes:
    return hashlib.sha256(body).hexdigest().encode()


def _snapshot(content: Fields) -> Snapshot:
    if content["version"] != VERSION:
        raise ValueError(content["version"])
    header = Header(
        sequence=_offset(content["sequence"]),
        time_ms=integer(content["time_ms"]),
        writer=text(content["writer"]),
        source_alias=text(content["source_alias"]),
        cluster_id=text(content["cluster_id"]),
        mirror=text(content["mirror"]),
        destination=text(content["destination"]),
        topic=text(content["topic"]),
        topic_id=text(content["topic_id"]),
        positions={
            _offset(partition): None if position is None else _offset(position)
            for partition, position in content["positions"]
        },
    )
    groups = tuple(map(_group, content["groups"]))
    _check_ascending([entry.group for entry in groups])
    return Snapshot(header=header, groups=groups)


def _group(content: Fields) -> GroupEntry:
    offsets = tuple(
        CommittedOffset(_offset(partition), _offset(offset), *map(text, metadata))
        for partition, offset, *metadata in content["offsets"]
    )
    if not offsets:
        raise ValueError("a group without offsets")
    _check_ascending([one.partition for one in offsets])
    return GroupEntry(text(content["group"]), offsets, content.get("stale", False) is True)


def _check_ascending(values: list[Any]) -> None:
    if any(not one < other for one, other in pairwise(values)):
        raise ValueError("not in ascending order")


def _offset(value: object) -> int:
    found = integer(value)
    if not 0 <= found <= OFFSET_MAX:
        raise ValueError(found)
    return found

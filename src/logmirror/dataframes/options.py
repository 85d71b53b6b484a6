"""Options of a query as values: the archive, the part to read, and how to read it."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from logmirror.errors import UsageError
from logmirror.locations import FolderLocation, S3Identity, S3Location

if TYPE_CHECKING:
    from collections.abc import Mapping

    from logmirror.locations import StoreLocation

PIECE_BYTES: Final = 128 << 20
"""Approximate size of the objects that one task reads, the same as Spark's for files."""

_OPTIONS: Final = (
    *("root", "destination", "partitions", "startingOffset", "endingOffset", "topic"),
    *("encoding", "isolationLevel", "verify", "maxPartitionBytes", "maxBytesPerTrigger"),
    *("region", "endpoint", "pathStyle", "caFile", "checksums", "accessKeyId"),
    *("secretAccessKey", "sessionToken", "profile", "roleArn", "stsEndpoint"),
)
_OTHER_NAMES: Final = {"path": "root", "name": "destination"}
_OF_S3: Final = frozenset(_OPTIONS[_OPTIONS.index("region") :])
_SCHEMES: Final = ("s3://", "s3a://")


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """The parsed options of a query."""

    location: StoreLocation
    destination: str = ""
    """Empty: the only one."""

    partitions: tuple[int, ...] | None = None
    """None: all."""

    first: int = 0
    """First offset to read."""

    end: int | None = None
    """First offset not to read; None: the end."""

    topic: str = ""
    """Topic of native objects; empty: from the claims."""

    utf8: bool = False
    committed: bool = True
    verify: bool = True
    piece_bytes: int = PIECE_BYTES
    trigger_bytes: int | None = None
    """Approximate size of the objects in one batch of a stream; None: no limit."""

    @classmethod
    def of(cls, options: Mapping[str, str]) -> Request:
        """Parse the options of `spark.read`; case, dashes and underscores are ignored.

        Raises:
            UsageError: An option is unknown, missing or invalid.
        """
        given = _given(options)
        location = _location(given)
        end = _number(given, "endingOffset", None)
        return cls(
            location=location,
            destination=given.get("destination", ""),
            partitions=_partitions(given.get("partitions", "all")),
            first=_number(given, "startingOffset", 0) or 0,
            end=end,
            topic=given.get("topic", ""),
            utf8=_choice(given, "encoding", "base64", "utf8") == "utf8",
            committed=_choice(given, "isolationLevel", "read_committed", "read_uncommitted")
            == "read_committed",
            verify=_choice(given, "verify", "true", "false") == "true",
            piece_bytes=_number(given, "maxPartitionBytes", PIECE_BYTES) or 1,
            trigger_bytes=_number(given, "maxBytesPerTrigger", None),
        )


def _given(options: Mapping[str, str]) -> dict[str, str]:
    """Return the options by their canonical names."""
    known = {name.lower(): name for name in _OPTIONS} | _OTHER_NAMES
    given: dict[str, str] = {}
    for key, value in options.items():
        plain = key.lower().replace("-", "").replace("_", "")
        if plain not in known:
            near = difflib.get_close_matches(plain, known, n=1)
            raise UsageError(
                f"there is no option {key!r}",
                hint=f"did you mean `{known[near[0]]}`?" if near else "",
                known=", ".join(_OPTIONS),
            )
        name = known[plain]
        if given.get(name, value) != value:
            raise UsageError(f"`{name}` is set more than once", option=key)
        given[name] = value
    return given


def _location(given: Mapping[str, str]) -> StoreLocation:
    root = given.get("root", "")
    scheme = next((scheme for scheme in _SCHEMES if root.startswith(scheme)), "")
    if not scheme:
        root = root.removeprefix("file://")
        if not Path(root).is_absolute():
            raise UsageError(
                "`root` must be the location of the archive",
                hint="an absolute path that exists on all executors, or s3://bucket/prefix",
                root=root,
            )
        if wrong := sorted(_OF_S3 & given.keys()):
            raise UsageError("S3 options for an archive in a folder", options=", ".join(wrong))
        return FolderLocation(root)
    bucket, _, prefix = root.removeprefix(scheme).partition("/")
    if not bucket:
        raise UsageError("`root` has no bucket name", hint="s3://bucket/prefix", root=root)
    endpoint = given.get("endpoint", "")
    path_style = _choice(given, "pathStyle", "true" if endpoint else "false", "true", "false")
    checksums = _choice(given, "checksums", "when-supported", "when-required")
    identity = S3Identity(
        access_key_id=given.get("accessKeyId", ""),
        secret_access_key=given.get("secretAccessKey", ""),
        session_token=given.get("sessionToken", ""),
        profile=given.get("profile", ""),
        role_arn=given.get("roleArn", ""),
        sts_endpoint=given.get("stsEndpoint", ""),
    )
    return S3Location(
        bucket=bucket,
        prefix=prefix.strip("/"),
        region=given.get("region", ""),
        endpoint=endpoint,
        path_style=path_style == "true",
        ca_file=given.get("caFile", ""),
        checksums=checksums.replace("-", "_"),
        write=identity,
        read=identity,
    )


def _partitions(text: str) -> tuple[int, ...] | None:
    """Parse `all`, or numbers and ranges: `0,4-7`."""
    if text.strip().lower() == "all":
        return None
    found: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise UsageError(
                "`partitions` must be `all`, or numbers and ranges", hint="0,4-7", found=text
            )
        found.update(range(int(first), int(last or first) + 1))
    return tuple(sorted(found))


def _number(given: Mapping[str, str], name: str, default: int | None) -> int | None:
    text = given.get(name)
    if text is None:
        return default
    if not text.strip().isdecimal():
        raise UsageError(f"`{name}` must be a whole number, 0 or greater", found=text)
    return int(text)


def _choice(given: Mapping[str, str], name: str, default: str, *others: str) -> str:
    found = given.get(name, default).lower()
    known = dict.fromkeys((default, *others))
    if found not in known:
        raise UsageError(f"`{name}` must be one of: {', '.join(known)}", found=found)
    return found

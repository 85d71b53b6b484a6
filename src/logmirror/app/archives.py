"""The archives that a broker mounts: from their locations to open stores."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

from logmirror.broker.options import Archive
from logmirror.errors import UsageError
from logmirror.locations import FolderLocation, S3Location
from logmirror.stores.opening import open_store

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from logmirror.locations import StoreLocation

_S3: Final = "s3://"
_READER: Final = "broker"


def open_archives(
    texts: Iterable[str], environ: Mapping[str, str], *, utf8: bool | None = None
) -> tuple[Archive, ...]:
    """Return archives to mount.

    Args:
        texts: Directories, and `s3://bucket/prefix`.
        environ: Has `AWS_ENDPOINT_URL`, if the buckets are not in AWS. Credentials and region are
            the defaults of the AWS SDK.
        utf8: See `Archive`.

    Raises:
        UsageError: A directory does not exist, or a bucket has no name.
    """
    return tuple(_opened(_location(text, environ), utf8) for text in texts)


def _location(text: str, environ: Mapping[str, str]) -> StoreLocation:
    if text.startswith(_S3):
        bucket, _, prefix = text.removeprefix(_S3).partition("/")
        if not bucket:
            raise UsageError("--archive has no bucket", hint="s3://bucket/prefix", found=text)
        endpoint = environ.get("AWS_ENDPOINT_URL_S3") or environ.get("AWS_ENDPOINT_URL", "")
        return S3Location(
            bucket=bucket,
            prefix=prefix.strip("/"),
            region=environ.get("AWS_REGION") or environ.get("AWS_DEFAULT_REGION", ""),
            endpoint=endpoint,
            path_style=bool(endpoint),
        )
    if not Path(text).is_dir():
        raise UsageError("--archive is not a directory", found=text)
    return FolderLocation(str(Path(text).absolute()))


def _opened(location: StoreLocation, utf8: bool | None) -> Archive:
    store = open_store(location, _READER)
    if isinstance(location, FolderLocation):
        root = Path(location.root)
        return Archive(root=location.root, store=store, local=root.joinpath, utf8=utf8)
    return Archive(root=str(location), store=store, utf8=utf8)

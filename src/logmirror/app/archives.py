"""The archives that a broker mounts: from their locations to open stores."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

from logmirror.app.bucket_location import SCHEME, bucket_location
from logmirror.app.store_location import store_location
from logmirror.broker.options import Archive
from logmirror.errors import UsageError
from logmirror.locations import FolderLocation
from logmirror.stores.opening import open_store

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from logmirror.config.destinations import S3Destination
    from logmirror.locations import StoreLocation

_READER: Final = "broker"


def open_archives(
    places: Iterable[str | S3Destination],
    environ: Mapping[str, str],
    *,
    utf8: bool | None = None,
) -> tuple[Archive, ...]:
    """Return archives to mount.

    Args:
        places: Directories, `s3://bucket/prefix`, and buckets with their own settings.
        environ: See `bucket_location`.
        utf8: See `Archive`.

    Raises:
        UsageError: A directory does not exist, or a bucket has no name.
    """
    return tuple(_opened(_location(place, environ), utf8) for place in places)


def _location(text: str | S3Destination, environ: Mapping[str, str]) -> StoreLocation:
    if not isinstance(text, str):
        return store_location(text)
    if text.startswith(SCHEME):
        return bucket_location("--archive", text, environ)
    if not text or not Path(text).is_dir():  # an empty text would be the working directory
        raise UsageError("--archive is not a directory", found=text)
    return FolderLocation(str(Path(text).absolute()))


def _opened(location: StoreLocation, utf8: bool | None) -> Archive:
    store = open_store(location, _READER)
    if isinstance(location, FolderLocation):
        root = Path(location.root)
        return Archive(root=location.root, store=store, local=root.joinpath, utf8=utf8)
    return Archive(root=str(location), store=store, utf8=utf8)

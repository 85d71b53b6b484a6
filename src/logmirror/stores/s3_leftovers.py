"""Which incomplete multipart uploads an earlier run has left in a bucket.

A bucket and a prefix may be shared with other programs, and a destination with another mirror. An
upload does not show who began it: a listing has its key and its time only. So it is a leftover if

1. its key is that of an object of one of the caller's own destinations, and
2. it began more than `LEFTOVER_AGE_MS` ago, by the store's clock: no live mirror needs that long.

A mirror that loses an upload all the same stages the object again.
"""

from __future__ import annotations

from datetime import datetime
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from logmirror.clock import Clock
    from logmirror.stores.s3_calls import Calls

LEFTOVER_AGE_MS: Final = 3_600_000
"""Age of an upload that no live mirror still needs. In an hour, an object of 225 MiB is uploaded at
the lowest accepted rate (`s3_transport`)."""


_PAGES_MAX: Final = 100
"""Limit for the listings of one folder. A later start finds what is beyond."""


class Upload(NamedTuple):
    """An incomplete upload."""

    key: str
    upload_id: str


def leftovers(
    calls: Calls, folder: str, is_object: Callable[[str], bool], clock: Clock
) -> Iterator[Upload]:
    """Yield the leftovers below a folder, at most those of the first `_PAGES_MAX` listings.

    Args:
        calls: Requests to the bucket.
        folder: Start of the keys that are listed, with its slash.
        is_object: Whether a key is that of an object that the caller may write.
        clock: Its wall time replaces the store's, if responses have none.
    """
    behind: dict[str, str] = {}
    for _ in range(_PAGES_MAX):
        response = calls.read("list_multipart_uploads", Prefix=folder, **behind)
        now_ms = _now_ms(response, clock)
        for upload in response.get("Uploads", ()):
            key = str(upload["Key"])
            if is_object(key) and _age_ms(upload, now_ms) > LEFTOVER_AGE_MS:
                yield Upload(key, str(upload["UploadId"]))
        if not response.get("IsTruncated", False):
            return
        behind = {
            "KeyMarker": str(response["NextKeyMarker"]),
            "UploadIdMarker": str(response["NextUploadIdMarker"]),
        }


def _age_ms(upload: Mapping[str, Any], now_ms: int) -> int:
    """Return the age of an upload; 0 if the store does not report when it began."""
    began = upload.get("Initiated")
    return now_ms - int(began.timestamp() * 1000) if isinstance(began, datetime) else 0


def _now_ms(response: Mapping[str, Any], clock: Clock) -> int:
    """Return the store's time, in ms since 1970."""
    headers = response.get("ResponseMetadata", {}).get("HTTPHeaders", {})
    try:
        return int(parsedate_to_datetime(headers["date"]).timestamp() * 1000)
    except (KeyError, ValueError):
        return clock.now_ms()

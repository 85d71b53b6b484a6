"""What has been uploaded to S3 before its name is chosen: tokens, and the tags of its objects."""

from __future__ import annotations

import hashlib
import json
from typing import Final, NamedTuple

HELD: Final = "held:"
"""Begins the token of data that is held in memory until its name is chosen."""


class Upload(NamedTuple):
    """A finished multipart upload; as JSON it is the token."""

    key: str
    upload_id: str
    etags: list[str]
    size: int

    @property
    def token(self) -> str:
        """What a claim holds of it."""
        return json.dumps(self)

    @classmethod
    def of(cls, token: str) -> Upload | None:
        """Return the upload of a token; None: its data was held in memory."""
        return None if token.startswith(HELD) else cls(*json.loads(token))

    @property
    def etag(self) -> str:
        """The tag of the complete object: a digest of the parts' digests."""
        digests = b"".join(bytes.fromhex(etag.strip('"')) for etag in self.etags)
        return f'"{hashlib.md5(digests, usedforsecurity=False).hexdigest()}-{len(self.etags)}"'


def etag_of(data: bytes) -> str:
    """Return the tag of an object with these bytes that was uploaded with one PUT."""
    return f'"{hashlib.md5(data, usedforsecurity=False).hexdigest()}"'

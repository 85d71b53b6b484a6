"""A bucket whose store ignores `If-None-Match`: create by writing and reading back.

Used with `require-atomic-create: false` only. A writer that creates a name

1. checks whether it exists, and has lost if it does;
2. writes it, still with `If-None-Match: *`, for stores that honour it some of the time;
3. waits, then reads it back, and has lost if it finds another writer's bytes.

Of the writers that complete step 2 soon after step 1, at most one finds its own bytes in step 3. A
slower writer does not count itself a winner, but it may have replaced the winner's bytes: this is
degraded fencing. The procedure decides claims. Objects of one claim have the same content, so for
them a check that the name is free is enough.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from logmirror.errors import OutcomeUnknownError, UsageError
from logmirror.stores.base import AlreadyExistsError
from logmirror.stores.s3 import S3Store
from logmirror.stores.s3_calls import is_unknown_to_store

if TYPE_CHECKING:
    from collections.abc import Mapping

    from logmirror.clock import Clock
    from logmirror.locations import S3Location

QUIESCE_MS: Final = 1_000
"""Pause between writing and reading back. Every object waits once, for its claim."""

PROMPT_MS: Final = QUIESCE_MS // 2
"""Maximum time from the check to the end of the write. A slower write may have replaced bytes that
another writer has already read back."""


class ReadBackStore(S3Store):
    """An `S3Store` that reads small objects back to detect another writer.

    Args:
        location: Bucket, prefix, endpoint and credentials.
        clock: Measures deadlines and waits.
    """

    def __init__(self, location: S3Location, *, clock: Clock) -> None:
        super().__init__(location, clock=clock)
        self._is_conditional = True

    def create(self, name: str, data: bytes) -> None:
        """See `BlobStore.create`; takes `QUIESCE_MS`."""
        began_ms = self._clock.monotonic_ms()
        self._check_absent(name)
        super().create(name, data)
        if self._clock.monotonic_ms() - began_ms > PROMPT_MS:
            raise OutcomeUnknownError(
                "the write took so long that another writer may have been first",
                hint="the position is read again",
                name=name,
            )
        self._clock.sleep_ms(QUIESCE_MS)
        try:
            found = self.read(name)
        except KeyError:
            found = b""
        if found != data:
            raise AlreadyExistsError("object exists", name=name)

    def publish(self, token: str, name: str) -> None:
        """See `BlobStore.publish`."""
        self._check_absent(name)
        super().publish(token, name)

    def _check_absent(self, name: str) -> None:
        if self._is_there(name):
            raise AlreadyExistsError("object exists", name=name)

    def _write_new(self, operation: str, **arguments: object) -> Mapping[str, Any]:
        if self._is_conditional:
            try:
                return super()._write_new(operation, **arguments)
            except UsageError as error:
                if not is_unknown_to_store(error):
                    raise
                self._is_conditional = False
        return self._calls.write(operation, **arguments)

"""A bucket whose store replaces what is there: the best that can be done without its help.

Used under `require-atomic-create: false` only. Whoever creates a name

1. looks whether it is there, and has lost if it is;
2. writes it, still with `If-None-Match: *`, for stores that mean it some of the time;
3. waits, then reads it back, and has lost to whoever is there.

Of writers that pass from 1 to 2 within the wait, at most one finds its own bytes at 3. One that
takes longer does not count itself a winner, but it may have replaced what the winner wrote: this
is degraded fencing. It decides claims; objects of one claim have the same content, so for them a
look is enough.
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
"""From writing to reading back. Every object waits for it once, with its claim."""

PROMPT_MS: Final = QUIESCE_MS // 2
"""A write that ends later after its look may have replaced what another writer has read back."""


class ReadBackStore(S3Store):
    """An `S3Store` that finds out itself who was first, as well as it goes.

    Args:
        location: Bucket, prefix, endpoint and credentials.
        clock: Measures deadlines and waits.
    """

    def __init__(self, location: S3Location, *, clock: Clock) -> None:
        super().__init__(location, clock=clock)
        self._clock = clock
        self._knows_condition = True

    def create(self, name: str, data: bytes) -> None:
        """See `BlobStore.create`; takes `QUIESCE_MS`."""
        began_ms = self._clock.monotonic_ms()
        self._look(name)
        super().create(name, data)
        if self._clock.monotonic_ms() - began_ms > PROMPT_MS:
            raise OutcomeUnknownError(
                "writing took so long that another writer may have been first",
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
        self._look(name)
        super().publish(token, name)

    def _look(self, name: str) -> None:
        if self._is_there(name):
            raise AlreadyExistsError("object exists", name=name)

    def _write_new(self, operation: str, **arguments: object) -> Mapping[str, Any]:
        if self._knows_condition:
            try:
                return super()._write_new(operation, **arguments)
            except UsageError as error:
                if not is_unknown_to_store(error):
                    raise
                self._knows_condition = False
        return self._calls.write(operation, **arguments)

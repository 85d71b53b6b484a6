"""The end of the chain in a store: taking it over, and creating the next object (`chain`)."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Final

from logmirror.broker.bucket.chain import COMMITS, commit_name, needed, sequence_of
from logmirror.broker.bucket.commit_format import (
    FENCE_BYTES,
    Commit,
    Entry,
    Kind,
    decode,
    encode,
)
from logmirror.errors import CorruptionError, FencedError, UnavailableError
from logmirror.stores.base import AlreadyExistsError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from logmirror.stores.base import BlobStore

_TAKEOVERS_MAX: Final = 20
_STEPS_MAX: Final = 50
"""Numbers that a takeover tries behind one listing."""


class ChainWriter:
    """The owner of a chain.

    Args:
        store: The log dir.
        writer: 8 random bytes.

    Attributes:
        epoch: The owner's epoch.
        next_sequence: The number of the next object.
        oldest: No older object was needed when the log dir was taken over.
        left_over: Older objects that a former owner was about to remove; after `commits`.
    """

    def __init__(self, store: BlobStore, writer: bytes) -> None:
        self._store, self._writer = store, writer
        self.epoch = self.next_sequence = self.oldest = 0
        self.left_over: list[int] = []

    def take_over(self, behind: int | None = None) -> None:
        """Become the owner (K3).

        Args:
            behind: Only if the chain ends with this number, -1 if it is empty; None: in any case.

        Raises:
            FencedError: The chain ends with another number.
            UnavailableError: The store cannot be reached, or others write faster all the time.
            CorruptionError: The newest object is damaged.
        """
        for _ in range(_TAKEOVERS_MAX):
            found = [
                s for n in self._store.tail(COMMITS).names if (s := sequence_of(n)) is not None
            ]
            end, epoch = found[-1] if found else -1, 0
            if behind not in {None, end}:
                raise FencedError("another broker took over this log dir", behind=behind)
            if found:
                try:
                    newest = decode(self._store.read(commit_name(end)))
                except KeyError:
                    continue  # its owner has created newer ones, and removed it
                epoch, self.oldest = newest.epoch, newest.oldest
            self.epoch, self.next_sequence = epoch + 1, end + 1
            try:
                if behind is None:
                    self._create_fence()
                else:
                    self.create(self._fence())
                self.check()  # K4
            except FencedError:
                if behind is not None:
                    raise
                continue
            return
        raise UnavailableError(
            "this log dir could not be taken over: others write to it faster",
            hint="stop the broker that owns it, then start this one again",
        )

    def _create_fence(self) -> None:
        """Create the fence at the first number that is free (K3).

        One request for each number: an owner that writes all the time would be ahead again after
        each listing. A fence whose response was lost is passed like the object of another owner.

        Raises:
            FencedError: So many numbers were taken that a new listing is better.
        """
        for _ in range(_STEPS_MAX):
            try:
                self._store.create(commit_name(self.next_sequence), self._fence())
            except AlreadyExistsError:
                self._pass()
            else:
                self.next_sequence += 1
                return
        raise FencedError("the end of the chain was not reached", epoch=self.epoch)

    def _pass(self) -> None:
        """Leave a number that is taken. Its object is not read, so its epoch is not known."""
        self.next_sequence += 1
        self.epoch = self.next_sequence + 1  # K3

    def _fence(self) -> bytes:
        return self.packed([Entry(Kind.FENCE, bytes(16))], self.oldest)

    def packed(self, entries: Iterable[Entry], oldest: int) -> bytes:
        """Return the bytes of the next object."""
        next_one = Commit(self.next_sequence, self.epoch, self._writer, tuple(entries), oldest)
        return encode(next_one)

    def create(self, data: bytes) -> int:
        """Create the next object; returns its sequence number.

        After an error other than `FencedError` it is not known whether it exists: only the same
        bytes may be tried again.

        Raises:
            FencedError: Another owner took the log dir over.
            UnavailableError: The store cannot be reached.
            OutcomeUnknownError: The response was lost.
            UsageError: The store refused the request.
        """
        name = commit_name(self.next_sequence)
        try:
            self._store.create(name, data)
        except AlreadyExistsError as error:
            if not self._is_ours(name, data):
                raise FencedError(
                    "another broker took over this log dir",
                    hint="this one has stopped, and has written nothing since; clients that wait "
                    "for it must be sent to the other one",
                    name=name,
                    epoch=self.epoch,
                ) from error
        self.next_sequence += 1
        return self.next_sequence - 1

    def _is_ours(self, name: str, data: bytes) -> bool:
        try:
            return self._store.read(name) == data
        except KeyError:
            return False  # only a later owner removes the object at our end

    def check(self) -> None:
        """Check that no other owner has taken over, without writing. Safe from any thread.

        Raises:
            FencedError: One has.
        """
        name = commit_name(self.next_sequence - 1).rpartition("/")[2]
        for later in self._store.tail(COMMITS, after=name).names:
            sequence = sequence_of(later)
            if sequence is not None and not self._has_created(sequence):
                raise FencedError(
                    "another broker took over this log dir", name=later, epoch=self.epoch
                )

    def _has_created(self, sequence: int) -> bool:
        """Whether an object is of this owner; its response may not have come yet."""
        if sequence < self.next_sequence:
            return True
        try:
            return decode(self._store.read(commit_name(sequence))).writer == self._writer
        except KeyError:
            return sequence < self.next_sequence  # else a later owner has removed it

    @contextlib.contextmanager
    def opening(self) -> Iterator[None]:
        """Distinguish damage from what a later owner removed while this one opens the log dir.

        Raises:
            FencedError: Something was missing, and another owner has taken over meanwhile.
        """
        try:
            yield
        except CorruptionError:
            self.check()
            raise

    def commits(self) -> Sequence[int]:
        """Return the sequence numbers of all objects that may be needed.

        Raises:
            CorruptionError: Some are missing.
        """
        sizes = self._store.sizes(COMMITS)
        found = {s: sizes[name] for name in sizes if (s := sequence_of(name)) is not None}
        # An object of a fence's size may be one (K3): it stays, unread.
        self.left_over = sorted(s for s in found if s < self.oldest and found[s] != FENCE_BYTES)
        bounds = range(self.oldest, self.next_sequence)
        return needed(sorted(s for s in found if s in bounds), self._is_fence)

    def _is_fence(self, sequence: int) -> bool:
        try:
            return decode(self._store.read(commit_name(sequence))).is_fence
        except KeyError:
            return True  # its owner has removed it since the listing

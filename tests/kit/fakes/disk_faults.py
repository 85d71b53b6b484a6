"""What fails of one place in `places`, and from which of its calls on."""

from __future__ import annotations

import enum
import errno
import os
from typing import TYPE_CHECKING, Final, Self

if TYPE_CHECKING:
    import random

_IN_NEED: Final = frozenset({"make_folder", "create", "append", "write_synced", "write_at"})
"""The calls that need space."""

_OFTEN: Final = ("sync", "sync_folder", "append", "write_synced", "create", "rename", "unlink")
_SELDOM: Final = ("link", "write_at", "truncate", "read", "make_folder", "remove_folder")


class Kind(enum.Enum):
    """How a disk fails."""

    DEAD = "every call gets EIO, from one on"
    PASSING = "one call, or a few, get EIO"
    FULL = "there is no space for a while"


class DiskFault:
    """A fault of a place, which begins at one of its calls.

    Args:
        place: The place.
        kind: What happens.
        first: The number of the first call that may fail.
        count: How many fail, or, if the disk is full, for how many there is no space.
        name: Only calls of this name count, and fail; empty: all.

    Attributes:
        failed: The names of the calls that have failed.
    """

    def __init__(self, place: str, kind: Kind, first: int, count: int, name: str = "") -> None:
        self.place, self.kind, self.name = place, kind, name
        self._before, self._left = first - 1, count
        self.failed: list[str] = []

    @classmethod
    def drawn(cls, chance: random.Random) -> Self:
        """Draw one."""
        place, kind = chance.choice("aabbbw"), chance.choice([*Kind, Kind.PASSING, Kind.PASSING])
        if kind is not Kind.PASSING:
            return cls(place, kind, chance.randint(1, 40), chance.randint(3, 60))
        name = chance.choice(["", *_OFTEN, *_OFTEN, *_SELDOM])
        first = chance.randint(1, 6 if name else 40)
        return cls(place, kind, first, chance.choice([1, 1, 2, 5]), name)

    def error(self, place: str, name: str, *, grows: bool = True) -> OSError | None:
        """Count a call; returns the error that it gets.

        Args:
            place: Where.
            name: Of the call.
            grows: Whether it needs space, if it is a kind of call that does.
        """
        if place != self.place or self.name not in {"", name}:
            return None
        if self._before:
            self._before -= 1
            return None
        if self.kind is not Kind.DEAD:
            if not self._left:
                return None
            self._left -= 1
        if self.kind is Kind.FULL and not (name in _IN_NEED and grows):
            return None
        self.failed.append(name)
        code = errno.ENOSPC if self.kind is Kind.FULL else errno.EIO
        return OSError(code, os.strerror(code))

    def heal(self) -> None:
        """Let a disk that is not dead work."""
        self._left = 0

    def __repr__(self) -> str:
        return f"{self.place} {self.kind.name} {self.name} {self.failed}"

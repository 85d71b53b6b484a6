"""Bundles: small commit objects of one owner once more, many in one object.

A start reads commits one by one, or a bundle with hundreds of them in one request. A bundle is a
copy and decides nothing: which commits count is known from the names of the commits alone, and a
commit that is in no bundle is read by itself. So nothing depends on when a bundle is created or
deleted, also by a former owner that was paused:

- B1 A bundle holds commits that are known to be in the chain, byte for byte. A number is given to
  one writer only (K2), so a commit in a bundle is the commit of that number.
- B2 Bundles are deleted after their commits. One that is left over is deleted by a later owner.

    header   magic (8), version (u16), count (u32), first number (u64)
    lengths  u64 each
    CRC-32C of header and lengths (u32)
    commits  in the order of their numbers
"""

from __future__ import annotations

import contextlib
from collections import deque
from struct import Struct
from struct import error as struct_error
from typing import TYPE_CHECKING, Final, NamedTuple

from logmirror.errors import CorruptionError
from logmirror.stores.base import AlreadyExistsError
from logmirror.wire.checksum import crc32c

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from logmirror.stores.base import BlobStore

BUNDLES: Final = ".logmirror/broker/bundles"
MOST_COMMITS: Final = 256
MOST_BYTES: Final = 8 * 1024 * 1024
"""Limit for a bundle. So a commit of more than `MOST_BYTES / LEAST_COMMITS` is hardly ever in one:
it would double the bytes that are written, and save few requests."""

LEAST_COMMITS: Final = 32
_MAGIC: Final = b"LMBUNDLE"
_VERSION: Final = 1
_HEADER: Final = Struct(">8sHIQ")
_LENGTH: Final = Struct(">Q")
_CRC: Final = Struct(">I")
_DIGITS: Final = 20


class Bundle(NamedTuple):
    """The numbers of the commits in a bundle."""

    first: int
    last: int

    @property
    def name(self) -> str:
        """The name of its object."""
        return f"{BUNDLES}/{self.first:0{_DIGITS}d}-{self.last:0{_DIGITS}d}"


class Bundler:
    """Collects the commits of an owner, and knows the bundles that exist. Not thread-safe.

    Args:
        least: Fewer commits are not bundled.
        most: More are not in one bundle.
    """

    def __init__(self, *, least: int = LEAST_COMMITS, most: int = MOST_COMMITS) -> None:
        self._least, self._most = least, most
        self._commits: list[bytes] = []
        self._first = self._size = 0
        self._known: deque[Bundle] = deque()

    def add(self, sequence: int, data: bytes) -> tuple[Bundle, bytes] | None:
        """Add the next commit, which is in the chain (B1); returns what is to be created."""
        found = None
        is_next = sequence == self._first + len(self._commits)
        if not is_next or self._size + len(data) > MOST_BYTES or len(self._commits) == self._most:
            found = self._taken()
            self._first = sequence
        self._commits.append(data)
        self._size += len(data)
        return found

    def _taken(self) -> tuple[Bundle, bytes] | None:
        commits, self._commits, self._size = self._commits, [], 0
        if len(commits) < self._least:
            return None
        bundle = Bundle(self._first, self._first + len(commits) - 1)
        return bundle, encode(self._first, commits)

    def exists(self, bundle: Bundle) -> None:
        """Note a bundle."""
        self._known.append(bundle)

    def take_deletable(self, oldest: int) -> list[Bundle]:
        """Return the bundles of commits before the oldest one only, and forget them (B2)."""
        gone = [one for one in self._known if one.last < oldest]
        self._known = deque(one for one in self._known if one.last >= oldest)
        return gone


def create(store: BlobStore, bundle: Bundle, data: bytes) -> None:
    """Create the object of a bundle."""
    with contextlib.suppress(AlreadyExistsError):  # of an earlier attempt: the same bytes
        store.create(bundle.name, data)


def listed(store: BlobStore) -> list[Bundle]:
    """Return the bundles that exist."""
    found = []
    for name in store.names(BUNDLES):
        first, _, last = name.partition("-")
        if len(first) == len(last) == _DIGITS and first.isdecimal() and last.isdecimal():
            found.append(Bundle(int(first), int(last)))
    return found


def chosen(bundles: Iterable[Bundle], sequences: Sequence[int]) -> list[Bundle | int]:
    """Return what to read for some commits: bundles, and the numbers of those in none, in order."""
    wanted = iter(sorted(bundles))
    found: list[Bundle | int] = []
    bundle = next(wanted, None)
    for sequence in sequences:
        while bundle is not None and bundle.last < sequence:
            bundle = next(wanted, None)
        if bundle is None or sequence < bundle.first:
            found.append(sequence)
        elif not found or found[-1] != bundle:
            found.append(bundle)
    return found


def encode(first: int, commits: Sequence[bytes]) -> bytes:
    """Return the bytes of a bundle."""
    head = _HEADER.pack(_MAGIC, _VERSION, len(commits), first)
    table = b"".join((head, *(_LENGTH.pack(len(one)) for one in commits)))
    return b"".join((table, _CRC.pack(crc32c(table)), *commits))


def decode(data: bytes) -> dict[int, bytes]:
    """Return the commits in a bundle by their numbers; their bytes are not checked.

    Raises:
        CorruptionError: It is not a bundle, or is too short.
    """
    try:
        magic, version, count, first = _HEADER.unpack_from(data)
        at = _HEADER.size + count * _LENGTH.size
        [crc] = _CRC.unpack_from(data, at)
    except struct_error as error:
        raise CorruptionError("bundle of commits is damaged", reason="too short") from error
    if magic != _MAGIC or version != _VERSION or crc32c(data[:at]) != crc:
        raise CorruptionError("bundle of commits is damaged", reason="its header is not valid")
    lengths = [length for (length,) in _LENGTH.iter_unpack(data[_HEADER.size : at])]
    at += _CRC.size
    found = {}
    for sequence, length in enumerate(lengths, first):
        found[sequence] = data[at : at + length]
        at += length
    return found

"""The batches of an archive's objects, as files that the broker serves.

A native object in a directory is served from its own file, if each of its batches has leader epoch
0 and the last one ends at the end of the object. All others are copied (`copies`): native objects
with leader epoch 0, which lies outside the checksum, and with batches without records for trailing
offset gaps; rows of Parquet and NDJSON as `wire.serve_columns` encodes them.

Before it is served, an object is compared with the digest of its claim (`witness`). Each checksum
of a native object without a claim is verified. One that is damaged, or whose file cannot be read,
is refused as a whole, and read again after a pause.

After a failure of the store, further objects fail at once until a pause is over, which grows with
each failure. So a store that cannot be reached does not occupy all threads of its archive.
"""

from __future__ import annotations

import contextlib
import os
import threading
from struct import Struct
from typing import TYPE_CHECKING, BinaryIO, Final

from logmirror.archive.claims import agreed_outcomes
from logmirror.archive.naming import NATIVE, NDJSON, PARQUET, format_name, partition_of
from logmirror.broker.archives.survey import Survey, survey
from logmirror.broker.archives.witness import check_digest, check_end, read_witness
from logmirror.broker.log.disk import OpenFile
from logmirror.broker.log.segment import Segment, walk
from logmirror.broker.log.segment_check import is_sound
from logmirror.clock import SYSTEM_CLOCK
from logmirror.errors import CorruptionError, LogmirrorError, UnavailableError
from logmirror.model import OffsetRange
from logmirror.wire.empty_batch import empty_batches

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from concurrent.futures import Executor
    from pathlib import Path

    from logmirror.archive.claims import Claim
    from logmirror.broker.archives.copies import LocalCopies
    from logmirror.stores.base import BlobStore

_COPY_BYTES: Final = 1024 * 1024
_EPOCH: Final = Struct(">i")
_EPOCH_AT: Final = 12
_PAUSE_MS: Final = 500
_PAUSE_MAX_MS: Final = 10_000


class _UnreadableError(Exception):
    """The file of one object cannot be read. Others of its archive may be readable."""


class BackOff:
    """Pauses after failures of one store. Safe to call from several threads."""

    def __init__(self, now_ms: Callable[[], int] = SYSTEM_CLOCK.now_ms) -> None:
        self._now_ms = now_ms
        self._lock = threading.Lock()
        self._until_ms = self._pause_ms = 0
        self._failure: LogmirrorError | None = None

    def check(self) -> None:
        """Raise the error of the last failure, while its pause lasts."""
        with self._lock:
            if self._failure is not None and self._now_ms() < self._until_ms:
                raise UnavailableError("could not be read a moment ago", cause=str(self._failure))

    def failed(self, failure: LogmirrorError) -> None:
        """Begin a pause."""
        with self._lock:
            self._pause_ms = min(_PAUSE_MAX_MS, max(_PAUSE_MS, 2 * self._pause_ms))
            self._until_ms = self._now_ms() + self._pause_ms
            self._failure = failure

    def succeeded(self) -> None:
        """End the pauses."""
        with self._lock:
            self._failure, self._pause_ms = None, 0


class Objects:
    """The objects of one partition; a `SegmentSource`.

    Args:
        store: The archive's store.
        root: Where it is, for messages.
        folder: `<destination>/<partition>`.
        extension: The format of the objects.
        local: Maps a name to its path, if the store is a directory.
        copies: The broker's local copies.
        back_off: Of the store.
        executor: For reading the objects.
        utf8: NDJSON keys and values are text.
    """

    def __init__(  # noqa: PLR0913  # what the objects of a partition share
        self,
        store: BlobStore,
        *,
        root: Path,
        folder: str,
        extension: str,
        local: Callable[[str], Path] | None,
        copies: LocalCopies,
        back_off: BackOff,
        executor: Executor,
        utf8: bool | None,
    ) -> None:
        self._store = store
        self.root = root
        self._folder = folder
        self.extension = extension
        self._local = local
        self._copies = copies
        self._back_off = back_off
        self.executor = executor
        self._utf8 = utf8
        self.is_loaded_ahead = extension != NDJSON  # to parse JSON holds Python's lock: no gain
        self._damaged: dict[Segment, BackOff] = {}
        self._vanished = self._listed = 0

    @property
    def vanished(self) -> int:
        """How often an object was gone when it was opened."""
        return self._vanished

    @property
    def is_outdated(self) -> bool:
        """Whether one was gone after the last listing began, so that all is listed again."""
        return self._vanished != self._listed

    def listed(self, vanished: int) -> None:
        """All was listed. Takes what `vanished` was before the listing began."""
        self._listed = vanished

    def check_there(self, segment: Segment) -> None:
        """Have all listed again if an object is gone.

        Raises:
            UnavailableError: The store cannot be reached.
        """
        name = f"{self._folder}/{self.name(segment)}"
        try:
            if self._local is None:
                self._store.read_range(name, 0, 1)
            elif not self._local(name).exists():
                self._vanished += 1
        except KeyError:
            self._vanished += 1

    def name(self, segment: Segment) -> str:
        """Return the name of an object, without its folder."""
        return format_name(_covered(segment), self.extension)

    def path(self, segment: Segment) -> Path:
        """See `SegmentSource`."""
        return self.root / self._folder / self.name(segment)

    def open(self, segment: Segment) -> OpenFile:
        """See `SegmentSource`."""
        with self._reading(segment):
            return self._opened(segment)

    def newest_ms(self, segment: Segment) -> int | None:
        """See `SegmentSource`."""
        if self.extension != PARQUET:
            return None
        from logmirror.broker.archives.rows import newest_ms  # noqa: PLC0415  # only Parquet

        with self._reading(segment):
            return newest_ms(self._store, self._folder, self.name(segment))

    @contextlib.contextmanager
    def _reading(self, segment: Segment) -> Iterator[None]:
        """Translate errors, and fail at once where a read failed a moment ago."""
        self._back_off.check()
        damaged = self._damaged.get(segment)
        if damaged is not None:
            damaged.check()
        try:
            yield
        except KeyError as error:
            self._vanished += 1
            raise UnavailableError(
                "object is not in the archive any more; its folder is listed again",
                path=str(self.path(segment)),
            ) from error
        except CorruptionError as error:
            self._damaged.setdefault(segment, BackOff()).failed(error)
            raise
        except _UnreadableError as found:
            path, reason = str(self.path(segment)), str(found)
            failure = UnavailableError("object cannot be read", path=path, reason=reason)
            self._damaged.setdefault(segment, BackOff()).failed(failure)
            raise failure from found
        except UnavailableError as error:
            self._back_off.failed(error)
            raise
        self._damaged.pop(segment, None)
        self._back_off.succeeded()

    def reused(self, segment: Segment) -> None:
        """See `SegmentSource`."""
        self._copies.reused(segment)

    def _opened(self, segment: Segment) -> OpenFile:
        if self._local is not None and self.extension == NATIVE:
            try:
                file = self._own_file(segment, self._local)
            except OSError as error:
                raise _UnreadableError(error.strerror) from error
            if file is not None:
                return file
        try:
            return self._copies.open(segment, lambda out: self._write(segment, out))
        except OSError as error:  # for example no space for the copy
            raise _UnreadableError(f"local copy: {error.strerror or error}") from error

    def _own_file(self, segment: Segment, local: Callable[[str], Path]) -> OpenFile | None:
        """Return the file of a native object in a directory; None: a copy must be made."""
        try:
            path = local(f"{self._folder}/{self.name(segment)}")
            file = OpenFile(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
        except FileNotFoundError:
            raise KeyError(self.name(segment)) from None
        size_bytes = os.fstat(file.fd).st_size
        if segment.is_checked:
            is_served = _is_served_as_it_is(file, size_bytes, segment)
        elif os.pread(file.fd, _EPOCH.size, _EPOCH_AT) != bytes(_EPOCH.size):
            return None
        else:
            witness = self._witness(segment)
            seen = survey(segment, file, agreed_outcomes(witness.values()))
            self._check(seen, witness, segment, file)
            is_complete = seen.end == segment.next_offset or not seen.is_whole
            is_served = is_complete and not seen.epochs_at
        if is_served:
            segment.size_bytes = size_bytes
        return file if is_served else None

    def _witness(self, segment: Segment) -> Mapping[str, Claim]:
        name = self.name(segment)
        return read_witness(self._store, self._folder, _covered(segment), name=name)

    def _check(
        self, seen: Survey, witness: Mapping[str, Claim], segment: Segment, file: OpenFile
    ) -> None:
        """Compare a native object with its claim; without one, verify its checksums and its end.

        The segment is checked then, and its index known.

        Raises:
            CorruptionError: It differs.
        """
        name, covered = self.name(segment), _covered(segment)
        if witness:
            check_digest(f"xxh3:{seen.digest.hexdigest()}", witness, name=name)
        elif seen.is_whole and is_sound(segment, file, seen.size_bytes):
            check_end(seen.end, covered, name=name)
        else:
            raise CorruptionError(
                "the object is damaged; it is not served",
                hint="restore the object from a backup, or copy its offsets again from the source",
                name=name,
            )
        if seen.is_whole:
            seen.keep(segment)

    def _write(self, segment: Segment, out: BinaryIO) -> None:
        """Write the batches of an object."""
        if self.extension == NATIVE:
            self._write_native(segment, out)
            return
        # pyarrow and numba, which only these formats need
        from logmirror.broker.archives.rows import checked_batches  # noqa: PLC0415  # see above

        name = self.name(segment)
        try:
            batches = checked_batches(self._store, self._folder, name, utf8=bool(self._utf8))
            out.writelines(batches)
        except LogmirrorError as error:
            raise error.add_facts(name=name, partition=partition_of(self._folder)) from error

    def _write_native(self, segment: Segment, out: BinaryIO) -> None:
        witness = self._witness(segment)
        seen = Survey(segment, agreed_outcomes(witness.values()))
        with self._store.open(f"{self._folder}/{self.name(segment)}") as source:
            while data := source.read(_COPY_BYTES):
                seen.add(memoryview(data))
                out.write(data)
        end = seen.end if seen.is_whole else segment.next_offset  # nothing is added behind damage
        out.flush()
        self._check(seen, witness, segment, OpenFile(os.dup(out.fileno())))
        for batch in empty_batches(end, segment.next_offset - 1):
            seen.add(memoryview(batch))
            out.write(batch)
        out.flush()
        for position in seen.epochs_at:
            os.pwrite(out.fileno(), bytes(_EPOCH.size), position + _EPOCH_AT)


def _covered(segment: Segment) -> OffsetRange:
    return OffsetRange(first=segment.first, last=segment.next_offset - 1)


def _is_served_as_it_is(file: OpenFile, size_bytes: int, segment: Segment) -> bool:
    end = segment.first
    try:
        for batch in walk(file, 0, size_bytes):
            if os.pread(file.fd, _EPOCH.size, batch.position + _EPOCH_AT) != bytes(_EPOCH.size):
                return False
            end = batch.last_offset + 1
    except CorruptionError:
        return True  # the check that follows finds and reports the damage
    return end == segment.next_offset

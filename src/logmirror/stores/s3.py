"""BlobStore on a bucket of any S3 API.

    <prefix>/<name>             objects, immutable
    uncompleted uploads         objects under construction that another process is to publish

1. Every write is create-only (`If-None-Match: *`), so it may be repeated: if a response was lost,
   the repetition fails at worst with "already exists", and the existing object is compared (I7).
   The same bytes under the name are a success, whichever process wrote them.
2. A listing shows complete objects only, no incomplete uploads and no truncated bodies. botocore
   sends a checksum with every body; without it, some servers keep the part of a body that a dying
   client has sent.
3. An object that this process publishes is one PUT. An object that another process publishes, and
   every large one, is a multipart upload to its name; publishing completes it, create-only. Bytes
   are kept in memory up to a limit, by default `MEMORY_BYTES`, then in a temporary file.
4. Of two racing creators exactly one wins; either may.
"""

from __future__ import annotations

import contextlib
import io
import tempfile
from typing import TYPE_CHECKING, Any, BinaryIO, Final, cast

from logmirror import failpoints
from logmirror.clock import SYSTEM_CLOCK, Clock, new_nonce
from logmirror.errors import CorruptionError, InternalError, LogmirrorError, UnavailableError
from logmirror.stores.base import AlreadyExistsError, Tail
from logmirror.stores.s3_calls import Calls, ConflictError, MissingError
from logmirror.stores.s3_leftovers import leftovers
from logmirror.stores.s3_probe import prove_create_only
from logmirror.stores.s3_reader import ObjectReader
from logmirror.stores.s3_upload import HELD, Upload, etag_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from logmirror.locations import S3Location
    from logmirror.stores.base import BlobStore, Buffer, StagedObject
    from logmirror.stores.request_counts import RequestCounts

    def _is_a_blob_store(store: S3Store) -> BlobStore:
        return store

    def _is_a_staged_object(staged: StagedUpload) -> StagedObject:
        return staged


MEMORY_BYTES: Final = 96 << 20
"""Memory of one object under construction. A larger one is kept in a temporary file and uploaded in
parts."""

PART_BYTES: Final = 16 << 20
_PART_BYTES_MIN: Final = 5 << 20
"""S3's own limit."""

_PARTS_MAX: Final = 10_000
"""S3's own limit."""


_DIGITS: Final = 20
"""Digits of the offset at the start of the names of objects and claims."""

_PAGE: Final = 1000
"""Names in one page of a listing, S3's own limit."""

_FOLDER_PAGES_MAX: Final = 1000
"""Limit for listings of folders: more than all partitions that one cluster can have."""


class S3Store:
    """A prefix of a bucket as a BlobStore.

    Args:
        location: Bucket, prefix, endpoint and credentials.
        calls: For tests.
        clock: Measures deadlines and waits.
        held_bytes: Memory of one object under construction; a larger one is kept in a temporary
            file. None: `MEMORY_BYTES`.
    """

    def __init__(
        self,
        location: S3Location,
        *,
        calls: Calls | None = None,
        clock: Clock = SYSTEM_CLOCK,
        held_bytes: int | None = None,
    ) -> None:
        self.location = location
        self._calls, self._clock = calls or Calls(location, clock), clock
        self.held_bytes = held_bytes or MEMORY_BYTES
        self._part_bytes = max(min(PART_BYTES, self.held_bytes), _PART_BYTES_MIN)
        self._held: dict[str, bytes] = {}
        """Staged objects that this process will publish, by token."""

    @property
    def requests(self) -> RequestCounts:
        """The requests of this store."""
        return self._calls.counts

    def create(self, name: str, data: bytes) -> None:
        """See `BlobStore.create`."""
        try:
            self._write_new("put_object", Key=self._key(name), Body=data)
        except ConflictError as error:
            if not (error.is_unsure and self._holds(name, etag_of(data), len(data))):
                raise AlreadyExistsError("object exists", name=name) from error

    def stage(self, label: str) -> StagedUpload:
        """See `BlobStore.stage`; nothing is sent before `finish`."""
        del label
        return StagedUpload(self)

    def publish(self, token: str, name: str) -> None:
        """See `BlobStore.publish`."""
        if token in self._held:
            self._put(token, name)
        else:
            self._complete(token, name)
        failpoints.reach("publish.linked")
        self._held.pop(token, None)
        failpoints.reach("publish.done")

    def _complete(self, token: str, name: str) -> None:
        upload = Upload.of(token)
        if upload is None or upload.key != self._key(name):
            raise UnavailableError(
                "the staged object is gone, or was staged under another name",
                hint="no action is needed: it is staged again",
                token=token,
                name=name,
            )
        parts = [{"ETag": etag, "PartNumber": n} for n, etag in enumerate(upload.etags, 1)]
        try:
            self._write_new(
                "complete_multipart_upload",
                Key=upload.key,
                UploadId=upload.upload_id,
                MultipartUpload={"Parts": parts},
            )
        except MissingError as error:
            if not self._holds(name, upload.etag, upload.size):
                raise UnavailableError(
                    "the staged object is gone",
                    hint="the upload was aborted, for example by a lifecycle rule; stage again",
                    token=token,
                ) from error
        except ConflictError as error:
            if not (error.is_unsure and self._holds(name, upload.etag, upload.size)):
                raise AlreadyExistsError("object exists", name=name) from error
            self._abort(upload.key, upload.upload_id)

    def _put(self, token: str, name: str) -> None:
        data = self._held[token]
        try:
            self._write_new("put_object", Key=self._key(name), Body=data)
        except ConflictError as error:
            if not (error.is_unsure and self._holds(name, etag_of(data), len(data))):
                raise AlreadyExistsError("object exists", name=name) from error

    def _write_new(self, operation: str, **arguments: object) -> Mapping[str, Any]:
        """Send a create-only write."""
        return self._calls.write(operation, IfNoneMatch="*", **arguments)

    def discard(self, token: str) -> None:
        """See `BlobStore.discard`."""
        self._held.pop(token, None)
        upload = Upload.of(token)
        if upload is not None:
            self._abort(upload.key, upload.upload_id)

    def _abort(self, key: str, upload_id: str) -> None:
        # Errors are ignored: a leftover upload does no harm, and a later start aborts it.
        with contextlib.suppress(LogmirrorError):
            self._calls.write("abort_multipart_upload", Key=key, UploadId=upload_id)

    def names(self, folder: str, after: str = "") -> Iterator[str]:
        """See `BlobStore.names`."""
        for page in self._pages(folder, after):
            yield from page

    def sizes(self, folder: str) -> dict[str, int]:
        """See `BlobStore.sizes`."""
        found: dict[str, int] = {}
        for page in self._pages(folder):
            found |= page
        return found

    def _pages(self, folder: str, after: str = "") -> Iterator[dict[str, int]]:
        """Yield names with their sizes in bytes, one request at a time."""
        while True:
            found, behind = self._page(folder, after)
            yield found
            if not behind:
                return
            after = behind

    def below(self, folder: str) -> Iterator[tuple[str, int]]:
        """See `BlobStore.below`: one request for each 1,000 names."""
        start, after = self._key(f"{folder}/"), ""
        while True:
            response = self._calls.read(
                "list_objects_v2",
                Prefix=start,
                MaxKeys=_PAGE,
                **({"StartAfter": start + after} if after else {}),
            )
            entries = response.get("Contents", ())
            found = [(str(one["Key"]).removeprefix(start), int(one["Size"])) for one in entries]
            yield from found
            if not response.get("IsTruncated", False):
                return
            if not found or found[-1][0] <= after:
                raise _endless(folder)
            after = found[-1][0]

    def folders(self, folder: str) -> Iterator[str]:
        """See `BlobStore.folders`."""
        start, token = self._key(f"{folder}/" if folder else ""), ""
        for _ in range(_FOLDER_PAGES_MAX):
            response = self._calls.read(
                "list_objects_v2",
                Prefix=start,
                Delimiter="/",
                **({"ContinuationToken": token} if token else {}),
            )
            for inner in response.get("CommonPrefixes", ()):
                name = str(inner["Prefix"]).removeprefix(start).rstrip("/")
                if not name.startswith("."):
                    yield name
            token = str(response.get("NextContinuationToken", ""))
            if not token:
                return
        raise _endless(folder)

    def tail(self, folder: str, after: str = "") -> Tail:
        """See `BlobStore.tail`: finds the last page of the listing by exponential search.

        Up to 1,000 names are returned whole, with one request. Of more names only the last page is
        returned whose names begin with a number, and other names behind it.
        """
        page, behind = self._page(folder, after)
        last, others = list(page), list[str]()
        if after or not (behind and last):
            return Tail(last, is_whole=not after)
        numbers = _numbers(last) or [0]
        low, step = numbers[-1], max(numbers[-1] - numbers[0], 1)
        high = None
        while high is None or high - low > 1:
            probe = low + step if high is None else (low + high) // 2
            page, behind = self._page(folder, f"{probe - 1:0{_DIGITS}d}~")  # `probe` and later
            found = list(page)
            if not (numbers := _numbers(found)):
                high, others = probe, found
                continue
            last, low = found, numbers[-1]
            if not behind:
                break
            step *= 2
        return Tail(sorted({*last, *others}), is_whole=False)

    def _page(self, folder: str, after: str) -> tuple[dict[str, int], str]:
        """Return up to 1,000 names after one, with their sizes in bytes, and where the rest begins.

        The second value is empty if there are no more names.
        """
        start = self._key(f"{folder}/")
        response = self._calls.read(
            "list_objects_v2",
            Prefix=start,
            Delimiter="/",
            MaxKeys=_PAGE,
            **({"StartAfter": start + after} if after else {}),
        )
        inside = [str(inner["Prefix"]) for inner in response.get("CommonPrefixes", ())]
        for key in inside:
            name = key.removeprefix(start)
            if not name.startswith(".") and not self._is_placeholder(key):
                raise CorruptionError(
                    "the destination's folder holds something other than objects",
                    hint="move it out of the folder; only objects may be there",
                    name=f"{folder}/{name}",
                )
        found = {
            str(entry["Key"]).removeprefix(start): int(entry["Size"])
            for entry in response.get("Contents", ())
        }
        behind = ""
        if response.get("IsTruncated", False):
            behind = max([*found, *(key.removeprefix(start) for key in inside)], default="")
            if behind <= after:
                raise _endless(folder)
        return {n: size for n, size in found.items() if n and not n.startswith(".")}, behind

    def _is_placeholder(self, key: str) -> bool:
        """Return whether a key is an empty object that a console created to display a folder."""
        response = self._calls.read("list_objects_v2", Prefix=key, MaxKeys=2)
        return [entry["Key"] for entry in response.get("Contents", ())] == [key]

    def read(self, name: str) -> bytes:
        """See `BlobStore.read`."""
        try:
            return self._calls.body(self._key(name))
        except MissingError:
            raise KeyError(name) from None

    def read_range(self, name: str, start: int, size_bytes: int) -> bytes:
        """See `BlobStore.read_range`."""
        try:
            return self._calls.body(self._key(name), start, start + size_bytes - 1)
        except MissingError:
            raise KeyError(name) from None

    def open(self, name: str) -> BinaryIO:
        """See `BlobStore.open`."""
        try:
            return ObjectReader.open(self._calls, self._key(name))
        except MissingError:
            raise KeyError(name) from None

    def delete(self, name: str) -> None:
        """See `BlobStore.delete`."""
        self._calls.write("delete_object", Key=self._key(name))

    def prove_create_only(self) -> None:
        """Raise ReplacesError for a store that replaces existing objects; see `s3_probe`."""

        def put(name: str, body: BinaryIO) -> None:
            calls = Calls(self.location, SYSTEM_CLOCK, self.requests)
            try:
                calls.write("put_object", Key=self._key(name), Body=body, IfNoneMatch="*")
            except ConflictError as error:
                if error.is_unsure:
                    raise UnavailableError(
                        "a response was lost while the store was tested", hint="start again"
                    ) from error
                raise AlreadyExistsError("object exists", name=name) from error

        prove_create_only(self.location, S3Store(self.location, calls=self._calls), put)

    def sweep(self, folders: Iterable[str], is_object: Callable[[str], bool]) -> int:
        """Abort the incomplete uploads that earlier runs left; returns how many.

        Args:
            folders: The caller's destinations. Uploads elsewhere are not even listed.
            is_object: Whether a name is that of an object that the caller may write.
        """
        root = self._key("")

        def is_own(key: str) -> bool:
            return is_object(key.removeprefix(root))

        found = [
            upload
            for folder in folders
            for upload in leftovers(self._calls, self._key(f"{folder}/"), is_own, self._clock)
        ]
        for upload in found:
            self._abort(upload.key, upload.upload_id)
        return len(found)

    # -- for staged objects ----------------------------------------------------------------------

    def _hold(self, data: bytes) -> str:
        token = f"{HELD}{new_nonce()}"
        self._held[token] = data
        return token

    def _upload(self, name: str, body: io.BytesIO | BinaryIO, size: int) -> str:
        key = self._key(name)
        upload_id = str(self._calls.write("create_multipart_upload", Key=key)["UploadId"])
        part_bytes = max(self._part_bytes, -(-size // _PARTS_MAX))
        etags: list[str] = []
        body.seek(0)
        try:
            while part := body.read(part_bytes):
                response = self._calls.write(
                    "upload_part",
                    Key=key,
                    UploadId=upload_id,
                    PartNumber=len(etags) + 1,
                    Body=part,
                )
                etags.append(str(response["ETag"]))
        except BaseException:
            self._abort(key, upload_id)
            raise
        return Upload(key, upload_id, etags, size).token

    def _holds(self, name: str, etag: str, size: int) -> bool:
        """Return whether an object with these bytes exists, from a listing.

        False if the server's tags are not digests of the bytes, for example with SSE-KMS. The
        caller then compares contents.
        """
        entry = self._entry(name)
        return bool(entry) and (entry["ETag"], entry["Size"]) == (etag, size)

    def _is_there(self, name: str) -> bool:
        return bool(self._entry(name))

    def _entry(self, name: str) -> Mapping[str, Any]:
        """Return an object's entry in a listing; empty if it does not exist."""
        key = self._key(name)
        response = self._calls.read("list_objects_v2", Prefix=key, MaxKeys=1)
        return next((e for e in response.get("Contents", ()) if e["Key"] == key), {})

    def _key(self, name: str) -> str:
        return f"{self.location.prefix}/{name}" if self.location.prefix else name


class StagedUpload:
    """An object under construction; see `StagedObject`."""

    def __init__(self, store: S3Store) -> None:
        self._store = store
        self._body: io.BytesIO | BinaryIO | None = io.BytesIO()
        self._size = 0
        failpoints.reach("stage.opened")

    def write(self, data: Buffer) -> int:
        """See `StagedObject.write`."""
        body = self._open_body()
        with memoryview(data) as view, view.cast("B") as rest:
            size = len(rest)
            try:
                if isinstance(body, io.BytesIO) and self._size + size > self._store.held_bytes:
                    body = self._body = _moved_to_file(body)
                body.write(rest)
            except OSError as error:
                raise UnavailableError(
                    "could not write an object to a temporary file before its upload",
                    hint="check the disk of the temporary folder and its free space",
                    reason=error.strerror,
                ) from error
        self._size += size
        failpoints.reach("stage.written")
        return size

    def finish(self, name: str, *, travels: bool) -> str:
        """See `StagedObject.finish`."""
        body = self._open_body()
        self._body = None
        with body:
            if isinstance(body, io.BytesIO) and not travels:
                token = self._store._hold(body.getvalue())  # noqa: SLF001  # the two are one
            else:
                token = self._store._upload(name, body, self._size)  # noqa: SLF001  # the same
        failpoints.reach("stage.finished")
        return token

    def abort(self) -> None:
        """See `StagedObject.abort`."""
        if self._body is not None:
            self._body.close()
            self._body = None

    def _open_body(self) -> io.BytesIO | BinaryIO:
        if self._body is None:
            raise InternalError("the staged object is finished or aborted")
        return self._body


def _moved_to_file(body: io.BytesIO) -> BinaryIO:
    file = cast("BinaryIO", tempfile.TemporaryFile())  # noqa: SIM115  # closed by `finish` or `abort`
    file.write(body.getbuffer())
    return file


def _endless(folder: str) -> UnavailableError:
    return UnavailableError("the store's listing does not end", folder=folder)


def _numbers(names: Iterable[str]) -> list[int]:
    """Return the offsets at the start of names, without other names, which the chain rejects."""
    heads = (name[:_DIGITS] for name in names)
    return [int(h) for h in heads if len(h) == _DIGITS and h.isascii() and h.isdigit()]

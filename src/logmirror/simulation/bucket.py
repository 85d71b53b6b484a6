"""A simulated bucket under `S3Store`, and a client of it that can lose responses.

The client replaces boto3's. The store adapter, with its requests, retries and errors, is the
product's. The bucket is strongly consistent, as Amazon S3 is.
"""

from __future__ import annotations

import hashlib
import io
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

from botocore.exceptions import (  # type: ignore[import-untyped]  # ships no py.typed
    ClientError,
    EndpointConnectionError,
    ReadTimeoutError,
)

from logmirror.locations import S3Location
from logmirror.simulation.world import LATE_MS
from logmirror.stores.s3_calls import Calls

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from logmirror.locations import S3Identity
    from logmirror.simulation.world import Process

LOCATION: Final = S3Location(bucket="bucket", prefix="prefix")

_ENDPOINT: Final = "https://simulated"
_REFUSALS: Final = (
    ("SlowDown", 503),
    ("ConditionalRequestConflict", 409),
    ("InternalError", 500),
    ("RequestTimeout", 400),
)

_LONG_AGO: Final = datetime.fromtimestamp(0, UTC)

Response = dict[str, Any]


class Bucket:
    """The objects and uploads of one bucket.

    Args:
        page: Maximum number of names in the response to a listing.
    """

    def __init__(self, page: int) -> None:
        self.objects: dict[str, bytes] = {}
        self._uploads: dict[str, tuple[str, dict[int, bytes]]] = {}
        self._etags: dict[str, str] = {}
        self._upload_count = 0
        self._page = page

    def names(self, folder: str) -> list[str]:
        """Return the names in a folder below the prefix."""
        start = f"{LOCATION.prefix}/{folder}/"
        found = (key.removeprefix(start) for key in self.objects if key.startswith(start))
        return sorted(name for name in found if "/" not in name)

    # -- requests: each returns its response ------------------------------------------------------

    def put_object(self, *, Key: str, Body: object, IfNoneMatch: str = "") -> Response:  # noqa: N803  # boto3's names
        """Store an object."""
        data = Body if isinstance(Body, bytes) else Body.read()  # type: ignore[attr-defined]  # a file
        etag = f'"{hashlib.md5(data, usedforsecurity=False).hexdigest()}"'
        return self._keep(Key, data, etag, IfNoneMatch)

    def _keep(self, key: str, data: bytes, etag: str, condition: str) -> Response:
        if condition and key in self.objects:
            raise _error("PreconditionFailed", 412)
        self.objects[key], self._etags[key] = data, etag
        return {"ETag": etag}

    def create_multipart_upload(self, *, Key: str) -> Response:  # noqa: N803  # the same
        """Begin a multipart upload."""
        self._upload_count += 1
        name = f"upload-{self._upload_count}"
        self._uploads[name] = (Key, {})
        return {"UploadId": name}

    def upload_part(self, *, Key: str, UploadId: str, PartNumber: int, Body: bytes) -> Response:  # noqa: N803  # the same
        """Store one part of an upload."""
        del Key
        if UploadId not in self._uploads:
            raise _error("NoSuchUpload", 404)
        self._uploads[UploadId][1][PartNumber] = Body
        return {"ETag": f'"{hashlib.md5(Body, usedforsecurity=False).hexdigest()}"'}

    def complete_multipart_upload(
        self,
        *,
        Key: str,  # noqa: N803  # the same
        UploadId: str,  # noqa: N803  # the same
        MultipartUpload: Mapping[str, Any],  # noqa: N803  # the same
        IfNoneMatch: str = "",  # noqa: N803  # the same
    ) -> Response:
        """Combine the parts of an upload into an object."""
        del MultipartUpload
        if UploadId not in self._uploads:
            raise _error("NoSuchUpload", 404)
        parts = [data for _, data in sorted(self._uploads[UploadId][1].items())]
        digests = b"".join(hashlib.md5(part, usedforsecurity=False).digest() for part in parts)
        etag = f'"{hashlib.md5(digests, usedforsecurity=False).hexdigest()}-{len(parts)}"'
        response = self._keep(Key, b"".join(parts), etag, IfNoneMatch)
        del self._uploads[UploadId]
        return response

    def abort_multipart_upload(self, *, Key: str, UploadId: str) -> Response:  # noqa: N803  # the same
        """Delete an upload."""
        del Key
        self._uploads.pop(UploadId, None)
        return {}

    def list_multipart_uploads(self, *, Prefix: str) -> Response:  # noqa: N803  # the same
        """List the incomplete uploads.

        All are old, so that a start aborts those of live writers too, as a lifecycle rule may.
        """
        found = [
            {"Key": key, "UploadId": name, "Initiated": _LONG_AGO}
            for name, (key, _) in self._uploads.items()
            if key.startswith(Prefix)
        ]
        return {"Uploads": found, "IsTruncated": False}

    def list_objects_v2(
        self,
        *,
        Prefix: str,  # noqa: N803  # the same
        Delimiter: str = "",  # noqa: N803  # the same
        MaxKeys: int = 1000,  # noqa: N803  # the same
        StartAfter: str = "",  # noqa: N803  # the same
        ContinuationToken: str = "",  # noqa: N803  # the same
    ) -> Response:
        """List objects in the order of their names."""
        after = max(StartAfter, ContinuationToken)
        count = min(MaxKeys, self._page)
        contents: list[Response] = []
        folders: list[str] = []
        last = ""
        for key in sorted(key for key in self.objects if key.startswith(Prefix) and key > after):
            folder, found, _ = key.removeprefix(Prefix).partition(Delimiter or "\0")
            if found and (common := f"{Prefix}{folder}{found}") in folders:
                continue
            if len(contents) + len(folders) == count:
                break
            if found:
                folders.append(common)
            else:
                contents.append(
                    {"Key": key, "Size": len(self.objects[key]), "ETag": self._etags[key]}
                )
            last = key
        else:
            last = ""
        return {
            "Contents": contents,
            "CommonPrefixes": [{"Prefix": folder} for folder in folders],
            "IsTruncated": bool(last),
            **({"NextContinuationToken": last} if last else {}),
        }

    def get_object(self, *, Key: str, Range: str = "") -> Response:  # noqa: N803  # the same
        """Return an object or a range of it."""
        if Key not in self.objects:
            raise _error("NoSuchKey", 404)
        data = self.objects[Key]
        if Range:
            first, last = Range.removeprefix("bytes=").split("-")
            data = data[int(first) : int(last) + 1]
        return {"Body": io.BytesIO(data)}

    def head_object(self, *, Key: str) -> Response:  # noqa: N803  # the same
        """Return the size of an object."""
        if Key not in self.objects:
            raise _error("404", 404)
        return {"ContentLength": len(self.objects[Key])}

    def delete_object(self, *, Key: str) -> Response:  # noqa: N803  # the same
        """Delete an object."""
        self.objects.pop(Key, None)
        return {}


_WRITES: Final = frozenset({"put_object", "upload_part", "complete_multipart_upload"})


class BucketClient:
    """The client of one process, with injected faults for requests and responses."""

    def __init__(self, process: Process, bucket: Bucket) -> None:
        self._process, self._world, self._bucket = process, process.world, bucket

    def __getattr__(self, operation: str) -> Callable[..., Response]:
        """Return an operation of boto3's client."""

        def send(*, Bucket: str, **arguments: Any) -> Response:  # noqa: ANN401, N803  # boto3's names
            del Bucket
            return self._send(operation, arguments)

        return send

    def _send(self, operation: str, arguments: Mapping[str, Any]) -> Response:
        self._process.touch(f"{operation} {arguments.get('Key') or arguments.get('Prefix')}")
        world = self._world
        serve = getattr(self._bucket, operation)
        if world.is_down:
            raise EndpointConnectionError(endpoint_url=_ENDPOINT)
        if operation in _WRITES:
            if world.take("refusals"):
                raise _error(*world.chooser.choice(_REFUSALS))
            if world.take("lates"):
                late_ms = world.chooser.choice(LATE_MS)
                world.schedule.after(late_ms, lambda: _serve_late(serve, arguments))
                raise ReadTimeoutError(endpoint_url=_ENDPOINT)
        response: Response = serve(**arguments)
        # The request is served. A process that dies here has not read the response.
        self._process.touch("response")
        if operation in _WRITES and world.take("losses"):
            raise ReadTimeoutError(endpoint_url=_ENDPOINT)
        return response


class BucketCalls(Calls):
    """The requests of one process."""

    def __init__(self, process: Process, bucket: Bucket) -> None:
        super().__init__(LOCATION, process.world.schedule)
        self._bucket_client = BucketClient(process, bucket)

    def _client(self, identity: S3Identity) -> BucketClient:
        del identity
        return self._bucket_client


def _serve_late(serve: Callable[..., Response], arguments: Mapping[str, Any]) -> None:
    """Serve a request after its sender has timed out."""
    try:
        serve(**arguments)
    except ClientError:
        return


def _error(code: str, status: int) -> ClientError:
    return ClientError(
        {"Error": {"Code": code, "Message": code}, "ResponseMetadata": {"HTTPStatusCode": status}},
        "Simulated",
    )

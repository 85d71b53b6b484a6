"""An S3 server on loopback with fault injection: HTTP in front of the simulation's `Bucket`.

It supports the requests that `S3Store` sends, path style, and does not check signatures.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections import deque
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any, Final, Self
from urllib.parse import parse_qsl, unquote, urlsplit
from xml.sax.saxutils import escape

from botocore.exceptions import ClientError  # type: ignore[import-untyped]  # ships no py.typed

from logmirror.clock import SYSTEM_CLOCK
from logmirror.simulation.bucket import Bucket

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

HOST: Final = "127.0.0.1"
BUCKET: Final = "bucket"

_LATE_MS: Final = 2_000
_XML: Final = '<?xml version="1.0" encoding="UTF-8"?>\n'


class S3Server:
    """The server; a context manager."""

    def __init__(self) -> None:
        self.bucket = Bucket(page=1000)
        self.lock = threading.Lock()
        self.faults: deque[str] = deque()
        """`refused`, `lost-answer` or `late`: the faults of the next writes."""

        owner = self

        class Handler(_Handler):
            s3 = owner

        self._server = _Server((HOST, 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    @property
    def port(self) -> int:
        """The port that it listens on."""
        return int(self._server.server_address[1])

    def names(self, folder: str) -> list[str]:
        """Return the names of the objects directly in a folder."""
        with self.lock:
            found = [k for k in self.bucket.objects if k.rpartition("/")[0] == folder]
        return sorted(key.rpartition("/")[2] for key in found)

    def read(self, key: str) -> bytes:
        """Return the content of one object."""
        with self.lock:
            return self.bucket.objects[key]

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Server(ThreadingHTTPServer):
    """Logs no errors of clients that were killed during a request."""

    daemon_threads = True
    request_queue_size = 128
    """Connections that wait to be accepted. With 5, some of a burst wait for seconds."""

    def handle_error(self, request: object, client_address: object) -> None:
        """See `socketserver.BaseServer`."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)  # type: ignore[arg-type]  # a socket


class _Handler(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    s3: S3Server

    def log_message(self, format: str, *_: object) -> None:  # noqa: A002  # http.server's name
        """Log nothing."""

    def do_GET(self) -> None:  # http.server's name
        """ListObjectsV2, ListMultipartUploads or GetObject."""
        key, query = self._target()
        if "uploads" in query:
            prefix = query.get("prefix", "")
            self._serve(lambda b: b.list_multipart_uploads(Prefix=prefix), _uploads)
        elif "list-type" in query:
            self._serve(
                lambda b: b.list_objects_v2(
                    Prefix=query.get("prefix", ""),
                    Delimiter=query.get("delimiter", ""),
                    MaxKeys=int(query.get("max-keys", "1000")),
                    StartAfter=query.get("start-after", ""),
                    ContinuationToken=query.get("continuation-token", ""),
                ),
                _listing,
            )
        else:
            extent = self.headers.get("Range") or ""
            self._serve(
                lambda b: b.get_object(Key=key, Range=extent), status=206 if extent else 200
            )

    def do_HEAD(self) -> None:  # the same
        """HeadObject."""
        key, _ = self._target()
        self._serve(lambda b: b.head_object(Key=key))

    def do_PUT(self) -> None:  # the same
        """PutObject or UploadPart."""
        key, query = self._target()
        data = self._body()
        if "partNumber" in query:
            upload, number = query["uploadId"], int(query["partNumber"])
            self._serve(
                lambda b: b.upload_part(Key=key, UploadId=upload, PartNumber=number, Body=data),
                writes=True,
            )
            return
        condition = self.headers.get("If-None-Match") or ""
        self._serve(lambda b: b.put_object(Key=key, Body=data, IfNoneMatch=condition), writes=True)

    def do_POST(self) -> None:  # the same
        """CreateMultipartUpload or CompleteMultipartUpload."""
        key, query = self._target()
        self._body()
        if "uploads" in query:
            self._serve(lambda b: b.create_multipart_upload(Key=key), _created)
            return
        condition = self.headers.get("If-None-Match") or ""
        self._serve(
            lambda b: b.complete_multipart_upload(
                Key=key, UploadId=query["uploadId"], MultipartUpload={}, IfNoneMatch=condition
            ),
            _completed,
            writes=True,
        )

    def do_DELETE(self) -> None:  # the same
        """DeleteObject or AbortMultipartUpload."""
        key, query = self._target()
        if "uploadId" in query:
            upload = query["uploadId"]
            self._serve(lambda b: b.abort_multipart_upload(Key=key, UploadId=upload), status=204)
        else:
            self._serve(lambda b: b.delete_object(Key=key), status=204)

    # -- requests and responses -------------------------------------------------------------------

    def _target(self) -> tuple[str, dict[str, str]]:
        parts = urlsplit(self.path)
        _, _, key = unquote(parts.path).lstrip("/").partition("/")
        return key, dict(parse_qsl(parts.query, keep_blank_values=True))

    def _body(self) -> bytes:
        size = int(self.headers.get("Content-Length") or 0)
        data = self.rfile.read(size)
        if len(data) < size:
            raise ConnectionAbortedError("the connection ended within a request body")
        return data

    def _serve(
        self,
        serve: Callable[[Bucket], Mapping[str, Any]],
        body: Callable[[Mapping[str, Any]], str] | None = None,
        *,
        status: int = 200,
        writes: bool = False,
    ) -> None:
        server = self.s3
        fault = server.faults.popleft() if writes and server.faults else ""
        if fault == "refused":
            self._refuse("SlowDown", 503)
            return
        if fault == "late":
            self.close_connection = True
            threading.Thread(target=_serve_late, args=(server, serve), daemon=True).start()
            return
        try:
            with server.lock:
                response = serve(server.bucket)
        except ClientError as error:
            found = error.response
            self._refuse(found["Error"]["Code"], found["ResponseMetadata"]["HTTPStatusCode"])
            return
        if fault == "lost-answer":
            self.close_connection = True
            return
        self._respond(status, response, body(response).encode() if body else None)

    def _respond(self, status: int, response: Mapping[str, Any], text: bytes | None) -> None:
        data = text if text is not None else b""
        if "Body" in response:
            data = response["Body"].read()
        self.send_response(status)
        if "ETag" in response:
            self.send_header("ETag", response["ETag"])
        self.send_header("Content-Length", str(response.get("ContentLength", len(data))))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def _refuse(self, code: str, status: int) -> None:
        data = f"{_XML}<Error><Code>{code}</Code><Message>{code}</Message></Error>".encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)


def _serve_late(server: S3Server, serve: Callable[[Bucket], Mapping[str, Any]]) -> None:
    SYSTEM_CLOCK.sleep_ms(_LATE_MS)
    with server.lock, contextlib.suppress(ClientError):
        serve(server.bucket)


def _listing(response: Mapping[str, Any]) -> str:
    contents = "".join(
        f"<Contents><Key>{escape(entry['Key'])}</Key><Size>{entry['Size']}</Size>"
        f"<ETag>{escape(entry['ETag'])}</ETag></Contents>"
        for entry in response["Contents"]
    )
    folders = "".join(
        f"<CommonPrefixes><Prefix>{escape(entry['Prefix'])}</Prefix></CommonPrefixes>"
        for entry in response["CommonPrefixes"]
    )
    token = response.get("NextContinuationToken", "")
    more = f"<NextContinuationToken>{escape(token)}</NextContinuationToken>" if token else ""
    truncated = str(response["IsTruncated"]).lower()
    return (
        f"{_XML}<ListBucketResult><IsTruncated>{truncated}</IsTruncated>{more}"
        f"{contents}{folders}</ListBucketResult>"
    )


def _uploads(response: Mapping[str, Any]) -> str:
    found = "".join(
        f"<Upload><Key>{escape(entry['Key'])}</Key><UploadId>{entry['UploadId']}</UploadId>"
        f"<Initiated>{entry['Initiated'].isoformat()}</Initiated></Upload>"
        for entry in response["Uploads"]
    )
    head = "<ListMultipartUploadsResult><IsTruncated>false</IsTruncated>"
    return f"{_XML}{head}{found}</ListMultipartUploadsResult>"


def _created(response: Mapping[str, Any]) -> str:
    name = response["UploadId"]
    return (
        f"{_XML}<InitiateMultipartUploadResult><UploadId>{name}</UploadId>"
        "</InitiateMultipartUploadResult>"
    )


def _completed(response: Mapping[str, Any]) -> str:
    etag = escape(response["ETag"])
    return (
        f"{_XML}<CompleteMultipartUploadResult><ETag>{etag}</ETag></CompleteMultipartUploadResult>"
    )

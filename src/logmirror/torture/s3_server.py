"""An S3 server in this process, whose answers can be spoiled: what it keeps is the simulation's.

As much of the API as `S3Store` speaks, path style, without a look at signatures. It listens on
loopback, for as long as a torture lasts.
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
    """The server; use it in a `with`."""

    def __init__(self) -> None:
        self.bucket = Bucket(page=1000)
        self.lock = threading.Lock()
        self.faults: deque[str] = deque()
        """`refused`, `lost-answer` or `late`: what happens to the next writes."""

        made = self

        class Handler(_Handler):
            server_of = made

        self._server = _Server((HOST, 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(self._server.server_address[1])

    def names(self, folder: str) -> list[str]:
        """The names of the objects directly in a folder."""
        with self.lock:
            found = [k for k in self.bucket.objects if k.rpartition("/")[0] == folder]
        return sorted(key.rpartition("/")[2] for key in found)

    def read(self, key: str) -> bytes:
        """One object."""
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
    """Says nothing of clients that are killed while they are answered."""

    daemon_threads = True

    def handle_error(self, request: object, client_address: object) -> None:
        """See `socketserver.BaseServer`."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)  # type: ignore[arg-type]  # a socket


class _Handler(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    server_of: S3Server

    def log_message(self, format: str, *_: object) -> None:  # noqa: A002  # http.server's name
        """Say nothing."""

    def do_GET(self) -> None:  # http.server's name
        """List, or hand an object out."""
        key, query = self._asked()
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
        """Say how large an object is."""
        key, _ = self._asked()
        self._serve(lambda b: b.head_object(Key=key))

    def do_PUT(self) -> None:  # the same
        """Keep an object or a part of one."""
        key, query = self._asked()
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
        """Begin or complete an upload."""
        key, query = self._asked()
        self._body()
        if "uploads" in query:
            self._serve(lambda b: b.create_multipart_upload(Key=key), _begun)
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
        """Remove an object, or forget an upload."""
        key, query = self._asked()
        if "uploadId" in query:
            upload = query["uploadId"]
            self._serve(lambda b: b.abort_multipart_upload(Key=key, UploadId=upload), status=204)
        else:
            self._serve(lambda b: b.delete_object(Key=key), status=204)

    # -- requests and answers --------------------------------------------------------------------

    def _asked(self) -> tuple[str, dict[str, str]]:
        parts = urlsplit(self.path)
        _, _, key = unquote(parts.path).lstrip("/").partition("/")
        return key, dict(parse_qsl(parts.query, keep_blank_values=True))

    def _body(self) -> bytes:
        size = int(self.headers.get("Content-Length") or 0)
        data = self.rfile.read(size)
        if len(data) < size:
            raise ConnectionAbortedError("a body that is cut off is nobody's object")
        return data

    def _serve(
        self,
        serve: Callable[[Bucket], Mapping[str, Any]],
        body: Callable[[Mapping[str, Any]], str] | None = None,
        *,
        status: int = 200,
        writes: bool = False,
    ) -> None:
        made = self.server_of
        fault = made.faults.popleft() if writes and made.faults else ""
        if fault == "refused":
            self._refuse("SlowDown", 503)
            return
        if fault == "late":
            self.close_connection = True
            threading.Thread(target=_serve_late, args=(made, serve), daemon=True).start()
            return
        try:
            with made.lock:
                answer = serve(made.bucket)
        except ClientError as error:
            told = error.response
            self._refuse(told["Error"]["Code"], told["ResponseMetadata"]["HTTPStatusCode"])
            return
        if fault == "lost-answer":
            self.close_connection = True
            return
        self._response(status, answer, body(answer).encode() if body else None)

    def _response(self, status: int, answer: Mapping[str, Any], text: bytes | None) -> None:
        data = text if text is not None else b""
        if "Body" in answer:
            data = answer["Body"].read()
        self.send_response(status)
        if "ETag" in answer:
            self.send_header("ETag", answer["ETag"])
        self.send_header("Content-Length", str(answer.get("ContentLength", len(data))))
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


def _serve_late(made: S3Server, serve: Callable[[Bucket], Mapping[str, Any]]) -> None:
    SYSTEM_CLOCK.sleep_ms(_LATE_MS)
    with made.lock, contextlib.suppress(ClientError):
        serve(made.bucket)


def _listing(answer: Mapping[str, Any]) -> str:
    contents = "".join(
        f"<Contents><Key>{escape(entry['Key'])}</Key><Size>{entry['Size']}</Size>"
        f"<ETag>{escape(entry['ETag'])}</ETag></Contents>"
        for entry in answer["Contents"]
    )
    folders = "".join(
        f"<CommonPrefixes><Prefix>{escape(entry['Prefix'])}</Prefix></CommonPrefixes>"
        for entry in answer["CommonPrefixes"]
    )
    token = answer.get("NextContinuationToken", "")
    more = f"<NextContinuationToken>{escape(token)}</NextContinuationToken>" if token else ""
    truncated = str(answer["IsTruncated"]).lower()
    return (
        f"{_XML}<ListBucketResult><IsTruncated>{truncated}</IsTruncated>{more}"
        f"{contents}{folders}</ListBucketResult>"
    )


def _uploads(answer: Mapping[str, Any]) -> str:
    found = "".join(
        f"<Upload><Key>{escape(entry['Key'])}</Key><UploadId>{entry['UploadId']}</UploadId></Upload>"
        for entry in answer["Uploads"]
    )
    head = "<ListMultipartUploadsResult><IsTruncated>false</IsTruncated>"
    return f"{_XML}{head}{found}</ListMultipartUploadsResult>"


def _begun(answer: Mapping[str, Any]) -> str:
    name = answer["UploadId"]
    return (
        f"{_XML}<InitiateMultipartUploadResult><UploadId>{name}</UploadId>"
        "</InitiateMultipartUploadResult>"
    )


def _completed(answer: Mapping[str, Any]) -> str:
    etag = escape(answer["ETag"])
    return (
        f"{_XML}<CompleteMultipartUploadResult><ETag>{etag}</ETag></CompleteMultipartUploadResult>"
    )

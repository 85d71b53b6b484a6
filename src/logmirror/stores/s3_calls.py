"""Requests to an S3 API: classification of errors, retries, deadlines.

Every request may be repeated: reads, and writes that are create-only, complete one upload or remove
something. A request is retried after every transient failure, with increasing back-off, until its
deadline. Each attempt has a grace time and a floor rate (`s3_transport`), so a request ends within

    DEADLINE_MS + GRACE_MS + connecting + bytes / FLOOR_BYTES_S

If a create-only write is refused after a lost response, the caller compares the existing object
(`ConflictError.is_unsure`).
"""

from __future__ import annotations

import contextlib
import functools
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final, TypeVar

import boto3  # type: ignore[import-untyped]  # ships no py.typed
import botocore.session  # type: ignore[import-untyped]  # ships no py.typed
from botocore.config import Config  # type: ignore[import-untyped]  # the same
from botocore.credentials import (  # type: ignore[import-untyped]  # the same
    AssumeRoleCredentialFetcher,
    DeferredRefreshableCredentials,
)
from botocore.exceptions import (  # type: ignore[import-untyped]  # the same
    BotoCoreError,
    ClientError,
    ConnectTimeoutError,
    EndpointConnectionError,
    FlexibleChecksumError,
    HTTPClientError,
    IncompleteReadError,
    NoCredentialsError,
    ProxyConnectionError,
    SSLError,
)
from botocore.parsers import ResponseParserError  # type: ignore[import-untyped]  # the same
from urllib3.exceptions import HTTPError

from logmirror.clock import Clock, jittered_ms
from logmirror.errors import (
    CorruptionError,
    LogmirrorError,
    OutcomeUnknownError,
    UnavailableError,
    UsageError,
)
from logmirror.stores.request_counts import RequestCounts
from logmirror.stores.s3_transport import Limit, limited, use_limits

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from logmirror.locations import S3Identity, S3Location

_T = TypeVar("_T")

DEADLINE_MS: Final = 10_000
"""Deadline of one request with all its retries; an attempt in progress may finish after it. A
waiting request delays others, and the flow as a whole is retried later."""

DOWN_MS: Final = 1_000
"""After a request has exceeded its deadline, no request is sent for this long; then single attempts
without retries, until one has a response. So an unavailable store delays its first flow by ten
seconds and other flows hardly at all. A request that fails while others have responses concerns
nothing but itself."""

GRACE_MS: Final = 10_000
"""Time of one attempt, besides that for its bytes."""

_COMPLETION_GRACE_MS: Final = 120_000
"""The same for completing an upload: Amazon sends spaces while it combines many parts."""

_READ_BYTES_MAX: Final = 256 << 20
"""Limit for a response. Objects are read in ranges; files read at once are far smaller."""

_OVERHEAD_BYTES: Final = 1 << 20
"""Limit for the header of a response, whose body has a known size."""

_CONNECT_TIMEOUT_S: Final = 3
_READ_TIMEOUT_S: Final = 10
_DEADLINES: Final = Config(
    connect_timeout=_CONNECT_TIMEOUT_S,
    read_timeout=_READ_TIMEOUT_S,
    retries={"total_max_attempts": 1},
)
"""Timeouts of requests that assume roles; `Calls` retries."""

_FIRST_PAUSE_MS: Final = 50
_LONGEST_PAUSE_MS: Final = 2_000

_CONFLICT: Final = frozenset({"PreconditionFailed", "412"})
_MISSING: Final = frozenset(
    {
        "InvalidPart",  # of an upload: it was lost, or its tag differs from the reported one
        "NoSuchKey",
        "NoSuchUpload",
        "404",
        "NotFound",
    }
)
_PERMISSIONS: Final = {
    "AssumeRole": "sts:AssumeRole",
    "AbortMultipartUpload": "s3:AbortMultipartUpload",
    "CompleteMultipartUpload": "s3:PutObject",
    "CreateMultipartUpload": "s3:PutObject",
    "DeleteObject": "s3:DeleteObject",
    "GetObject": "s3:GetObject",
    "HeadObject": "s3:GetObject",
    "ListMultipartUploads": "s3:ListBucketMultipartUploads",
    "ListObjectsV2": "s3:ListBucket",
    "PutObject": "s3:PutObject",
    "UploadPart": "s3:PutObject",
}
"""The permission that each request needs, by the names of Amazon's policies."""

_FORBIDDEN: Final = frozenset({"AccessDenied", "AllAccessDisabled", "403"})
_DENIED: Final = (
    "the store denied access",
    "check the credentials and their permissions; `logmirror policy print` lists those needed",
)
_SKEWED: Final = (
    "the clocks of the store and of this machine differ too much",
    "synchronise this machine's clock",
)
_UNKNOWN: Final = "NotImplemented"
_PERMANENT: Final = {
    _UNKNOWN: (
        "the store does not support a required S3 request",
        "use another store, or a newer version of this one",
    ),
    "NoSuchBucket": (
        "there is no such bucket",
        "create it, or correct `bucket` and `endpoint`",
    ),
    "RequestTimeTooSkewed": _SKEWED,
    "RequestExpired": _SKEWED,
    **dict.fromkeys(
        (
            "AccessDenied",
            "AllAccessDisabled",
            "ExpiredToken",
            "InvalidAccessKeyId",
            "InvalidToken",
            "SignatureDoesNotMatch",
            "XAdminUserNotFound",
            "401",
            "403",
        ),
        _DENIED,
    ),
}
"""Error codes that need an action of the operator: message and hint."""

_TRANSIENT: Final = frozenset(
    {
        "409",  # a response without a body, to HEAD
        "BadDigest",  # the body was changed in transit
        "ConditionalRequestConflict",  # another writer writes the same name
        "ExistingObjectIsDirectory",  # VersityGW could not put the file in place, for any reason
        "OperationAborted",
        "RequestTimeout",
        "ServiceUnavailable",
        "SlowDown",
        "Throttling",
        "ThrottlingException",
        "TooManyRequests",
        "XAmzContentChecksumMismatch",
        "XAmzContentSHA256Mismatch",
    }
)
_SERVER_ERROR: Final = 500
_TOO_MANY: Final = 429
_LOST: Final = (
    HTTPClientError,
    HTTPError,  # botocore does not convert those of an error's body
    FlexibleChecksumError,
    IncompleteReadError,
    ResponseParserError,
    OSError,
)
_NEVER_SENT: Final = (ConnectTimeoutError, EndpointConnectionError, ProxyConnectionError)


class ConflictError(LogmirrorError):
    """A create-only write found its name taken."""

    is_unsure = False
    """A response was lost before: an earlier attempt of this request may have taken the name."""


class MissingError(LogmirrorError):
    """No such object or upload."""

    is_unsure = False
    """A response was lost before; see `ConflictError`."""


def is_unknown_to_store(error: LogmirrorError) -> bool:
    """Return whether the store refused a request because it does not support it."""
    return error.facts.get("code") == _UNKNOWN


class Calls:
    """Requests to one bucket; each process creates its own.

    Threads may share it. What one of them learns, that the store responds or not, the others use.

    Args:
        location: Bucket, endpoint, credentials.
        clock: Measures deadlines and waits.
        counts: Counts the requests; None: counters of its own.
    """

    def __init__(
        self, location: S3Location, clock: Clock, counts: RequestCounts | None = None
    ) -> None:
        self._location, self._clock = location, clock
        self.counts = counts or RequestCounts()
        self._clients: dict[S3Identity, Any] = {}
        self._is_down = False
        self._retry_at_ms = 0
        self._responded_ms = -DEADLINE_MS

    def read(self, operation: str, **arguments: object) -> Mapping[str, Any]:
        """Send a request under the reading identity.

        Args:
            operation: The name of boto3's method.
            arguments: Its arguments, without the bucket.

        Raises:
            MissingError: The object or upload does not exist.
            UsageError: Refused: permission, credentials, bucket.
            UnavailableError: There was no response before the deadline.
            CorruptionError: Each response until then had another content than its checksum.
        """
        return self._run(lambda: self._send(self._location.read, operation, arguments), operation)

    def write(self, operation: str, **arguments: object) -> Mapping[str, Any]:
        """Send a request under the writing identity; see `read`.

        Raises:
            ConflictError: The request was create-only, and the name is taken.
            OutcomeUnknownError: The deadline has passed, and a response was lost.
        """
        body = arguments.get("Body")

        def send() -> Mapping[str, Any]:
            if body is not None and not isinstance(body, bytes | bytearray):
                body.seek(0)  # type: ignore[attr-defined]  # a binary file
            return self._send(self._location.write, operation, arguments)

        return self._run(send, operation, writes=True)

    def body(self, key: str, first: int = 0, last: int | None = None) -> bytes:
        """Return bytes first..last of an object; a truncated body is requested again.

        Args:
            key: The object.
            first: The first byte.
            last: The last byte; None: to the end.

        Raises:
            MissingError: The object does not exist.
        """
        extent = {} if last is None else {"Range": f"bytes={first}-{last}"}
        bytes_max = _READ_BYTES_MAX if last is None else last - first + 1 + _OVERHEAD_BYTES

        def fetch() -> bytes:
            response = self._send(self._location.read, "get_object", {"Key": key, **extent})
            with contextlib.closing(response["Body"]) as stream:
                data: bytes = stream.read()
            self.counts.received(len(data))
            return data

        return self._run(fetch, "get_object", bytes_max=bytes_max)

    def _send(
        self, identity: S3Identity, operation: str, arguments: Mapping[str, object]
    ) -> Mapping[str, Any]:
        call = getattr(self._client(identity), operation)
        extra = self._location.encryption if operation in _ENCRYPTED else {}
        body = arguments.get("Body")
        self.counts.sent(operation, len(body) if isinstance(body, bytes | bytearray) else 0)
        response: Mapping[str, Any] = call(Bucket=self._location.bucket, **extra, **arguments)
        return response

    def _client(self, identity: S3Identity) -> Any:  # noqa: ANN401  # boto3 makes its classes at run time
        if identity not in self._clients:
            try:
                with self._translated("connect"):
                    self._clients[identity] = _new_client(self._location, identity, self._clock)
            except ValueError as error:  # botocore's, for an endpoint that is no URL
                raise UsageError(
                    "the address of the store is not valid", hint=_URL, reason=str(error)
                ) from error
        return self._clients[identity]

    def _run(
        self,
        attempt: Callable[[], _T],
        operation: str,
        *,
        writes: bool = False,
        bytes_max: int = _READ_BYTES_MAX,
    ) -> _T:
        now_ms = self._clock.monotonic_ms()
        if self._is_down and now_ms < self._retry_at_ms:
            raise UnavailableError(
                "the store did not respond to the previous request", bucket=self._location.bucket
            )
        began_ms, until_ms = now_ms, now_ms + (0 if self._is_down else DEADLINE_MS)
        pause_ms, is_unsure = float(_FIRST_PAUSE_MS), False
        while True:
            try:
                limit = _limit(operation, bytes_max)
                with self._translated(operation, limit), limited(limit):
                    found = attempt()
            except (ConflictError, MissingError) as error:
                self._responds()
                error.is_unsure = is_unsure
                raise
            except UnavailableError as error:
                is_unsure |= bool(error.facts.pop("is_unsure", False))
                if self._clock.monotonic_ms() + pause_ms >= until_ms:
                    if isinstance(error.__cause__, FlexibleChecksumError):  # it does respond
                        raise CorruptionError(
                            "an object differs from its checksum",
                            hint="restore it from a copy or an earlier version",
                            **error.facts,
                        ) from error
                    if self._responded_ms <= began_ms:
                        self._is_down = True
                        self._retry_at_ms = self._clock.monotonic_ms() + DOWN_MS
                    if writes and is_unsure:
                        raise OutcomeUnknownError(
                            "the store did not report the outcome of the request",
                            hint="the outcome is checked before anything else is done",
                            **error.facts,
                        ) from error
                    raise
            else:
                self._responds()
                return found
            self._clock.sleep_ms(jittered_ms(pause_ms))
            pause_ms = min(2 * pause_ms, _LONGEST_PAUSE_MS)

    def _responds(self) -> None:
        self._is_down, self._responded_ms = False, self._clock.monotonic_ms()

    @contextlib.contextmanager
    def _translated(self, operation: str, limit: Limit | None = None) -> Iterator[None]:
        """Convert botocore's errors to logmirror's."""
        facts: dict[str, Any] = {"bucket": self._location.bucket, "operation": operation}
        try:
            yield
        except ClientError as error:
            raise _refusal(error, facts) from error
        except NoCredentialsError as error:
            raise UsageError(
                "there are no credentials for the bucket",
                hint="set access-key-id and secret-access-key, or configure the credentials of the "
                "AWS tools",
                **facts,
            ) from error
        except SSLError as error:
            message, hint = _PLAIN if "WRONG_VERSION_NUMBER" in str(error) else _UNTRUSTED
            raise UsageError(message, hint=hint, reason=str(error), **facts) from error
        except _NEVER_SENT as error:
            raise UnavailableError(
                "could not reach the store", hint=_ADDRESS, reason=str(error), **facts
            ) from error
        except _LOST as error:
            reason = limit.reason if limit and limit.reason else str(error)
            raise UnavailableError(
                "the store's response was lost", reason=reason, is_unsure=True, **facts
            ) from error
        except BotoCoreError as error:
            raise UsageError(
                "the request to the store failed", reason=str(error), **facts
            ) from error


def _limit(operation: str, bytes_max: int) -> Limit:
    completes = operation == "complete_multipart_upload"
    return Limit(
        grace_ms=_COMPLETION_GRACE_MS if completes else GRACE_MS,
        idle_ms=round(_READ_TIMEOUT_S * 1000),
        bytes_max=bytes_max,
    )


_URL: Final = "write the endpoint, or AWS_ENDPOINT_URL, as https://HOST:PORT; http:// without TLS"
_PLAIN: Final = ("the store responds without TLS", _URL)
_UNTRUSTED: Final = (
    "the store's certificate is not trusted",
    "set ca-file, or AWS_CA_BUNDLE, to the certificate of the authority",
)
_ADDRESS: Final = "check the endpoint, or AWS_ENDPOINT_URL, the region and the network"
_ENCRYPTED: Final = frozenset({"put_object", "create_multipart_upload"})


def _refusal(error: ClientError, facts: dict[str, Any]) -> LogmirrorError:
    details = error.response.get("Error", {})
    code = str(details.get("Code", ""))
    status = int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
    facts = {**facts, "code": code, "status": status, "reason": str(details.get("Message", ""))}
    if code in _CONFLICT:
        return ConflictError("the name is taken", **facts)
    if code in _MISSING:
        return MissingError("there is no such object", **facts)
    if code in _TRANSIENT or status == _TOO_MANY:
        return UnavailableError("the store is temporarily unable to process the request", **facts)
    if status >= _SERVER_ERROR and code != _UNKNOWN:
        return UnavailableError("internal error of the store", is_unsure=True, **facts)
    message, hint = _PERMANENT.get(code, ("the store refused the request", ""))
    if code in _FORBIDDEN:
        permission = _PERMISSIONS[str(error.operation_name)]
        facts["permission"] = permission
        message, hint = f"the store denied access: missing permission {permission}", _DENIED[1]
    elif (message, hint) == _SKEWED:
        headers = error.response.get("ResponseMetadata", {}).get("HTTPHeaders", {})
        facts["store_says"] = headers.get("date", "")
    return UsageError(message, hint=hint, **facts)


@functools.cache
def _service_models() -> Any:  # noqa: ANN401  # botocore has no types
    """Return the loader of AWS's service models: parsing them takes 0.1 s, once in a process."""
    return botocore.session.get_session().get_component("data_loader")


def _new_session() -> Any:  # noqa: ANN401  # botocore has no types
    session = botocore.session.get_session()
    session.register_component("data_loader", _service_models())
    return session


def _assumed(
    session: boto3.session.Session, location: S3Location, identity: S3Identity, clock: Clock
) -> boto3.session.Session:
    """Return a session in a role, assumed at the first request and renewed before it expires."""
    create = functools.partial(
        session._session.create_client,  # noqa: SLF001  # there is no other way
        endpoint_url=identity.sts_endpoint or None,
        verify=location.ca_file or None if identity.sts_endpoint else None,
    )

    def create_with_deadline(service: str, config: Config | None = None, **more: object) -> Any:  # noqa: ANN401  # boto3 makes its classes at run time
        merged = _DEADLINES.merge(config) if config else _DEADLINES
        return use_limits(create(service, config=merged, **more))

    fetcher = AssumeRoleCredentialFetcher(
        client_creator=create_with_deadline,
        source_credentials=session.get_credentials(),
        role_arn=identity.role_arn,
        extra_args={"RoleSessionName": "logmirror"},
    )
    inner = _new_session()
    inner._credentials = DeferredRefreshableCredentials(  # noqa: SLF001  # the same
        refresh_using=fetcher.fetch_credentials,
        method="assume-role",
        time_fetcher=lambda: datetime.fromtimestamp(clock.now_ms() / 1000, UTC),
    )
    return boto3.session.Session(botocore_session=inner, region_name=session.region_name)


def _new_client(location: S3Location, identity: S3Identity, clock: Clock) -> Any:  # noqa: ANN401  # see `_client`
    session = boto3.session.Session(
        botocore_session=_new_session(),
        aws_access_key_id=identity.access_key_id or None,
        aws_secret_access_key=identity.secret_access_key or None,
        aws_session_token=identity.session_token or None,
        profile_name=identity.profile or None,
        region_name=location.region or None,
    )
    if identity.role_arn:
        session = _assumed(session, location, identity, clock)
    # Without a checksum, only a signature detects a truncated body.
    signing = {"payload_signing_enabled": True} if location.checksums == "when_required" else {}
    config = Config(
        connect_timeout=_CONNECT_TIMEOUT_S,
        read_timeout=_READ_TIMEOUT_S,
        retries={"total_max_attempts": 1},
        s3={"addressing_style": "path" if location.path_style else "auto", **signing},
        request_checksum_calculation=location.checksums,
        response_checksum_validation=location.checksums,
        tcp_keepalive=True,
    )
    client = session.client(
        "s3",
        endpoint_url=location.endpoint or None,
        verify=location.ca_file or None,
        config=config,
    )
    return use_limits(client)

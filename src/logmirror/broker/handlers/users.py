"""Users: SASL requests of clients that need none, and SCRAM credentials.

    API                            key  versions  behaviour
    SaslHandshake                   17  0-1       ILLEGAL_SASL_STATE; see `protocol.admission`
    SaslAuthenticate                36  0-2       ILLEGAL_SASL_STATE
    DescribeUserScramCredentials    50  0         iterations by user and mechanism
    AlterUserScramCredentials       51  0         durable before the response; all or none of it

A client computes the salted password itself; the broker never receives the password. A removed
user's connections are closed within two seconds, unlike in Apache Kafka.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from typing import TYPE_CHECKING, Any, Final

from logmirror.broker.apis import Api
from logmirror.broker.changes import code_of, pooled
from logmirror.broker.error_codes import ErrorCode
from logmirror.broker.handlers.turns import Turns
from logmirror.broker.security.scram import (
    MAX_ITERATIONS,
    MAX_USER_BYTES,
    MIN_ITERATIONS,
    Credential,
    Mechanism,
    from_salted,
)
from logmirror.errors import LogmirrorError
from logmirror.wire.serve_messages import Message, response_kind

if TYPE_CHECKING:
    from collections.abc import Mapping

    from logmirror.broker.broker import Broker, Caller
    from logmirror.wire.frames import RequestHeader

_LOG: Final = logging.getLogger(__name__)
MAX_USERS: Final = 10_000
_MAX_SALT_BYTES: Final = 1024


def sasl_handshake(
    broker: Broker,  # noqa: ARG001  # as all handlers
    header: RequestHeader,
    request: Message,  # noqa: ARG001  # as all handlers
    caller: Caller,  # noqa: ARG001  # as all handlers
) -> bytes:
    """Handle SaslHandshake on a connection that does not log in, or has."""
    kind = response_kind(Api.SASL_HANDSHAKE, header.version)
    code = ErrorCode.ILLEGAL_SASL_STATE
    return kind.frame(header.correlation_id, error_code=code, mechanisms=())


def sasl_authenticate(
    broker: Broker,  # noqa: ARG001  # as all handlers
    header: RequestHeader,
    request: Message,  # noqa: ARG001  # as all handlers
    caller: Caller,  # noqa: ARG001  # as all handlers
) -> bytes:
    """Handle SaslAuthenticate on a connection that does not log in, or has."""
    return response_kind(Api.SASL_AUTHENTICATE, header.version).frame(
        header.correlation_id,
        error_code=ErrorCode.ILLEGAL_SASL_STATE,
        error_message="no authentication is in progress",
        auth_bytes=b"",
    )


async def describe_user_scram_credentials(
    broker: Broker, header: RequestHeader, request: Message, caller: Caller
) -> bytes:
    """Handle DescribeUserScramCredentials."""
    kind = response_kind(Api.DESCRIBE_USER_SCRAM_CREDENTIALS, header.version)
    turns = Turns()
    results = []
    code = broker.authorizer.refusal(caller, Api.DESCRIBE_USER_SCRAM_CREDENTIALS)
    if not code:
        loop = asyncio.get_running_loop()
        try:
            users = await loop.run_in_executor(broker.executor, broker.security.users)
        except LogmirrorError:
            _LOG.exception("users could not be read")
            code, users = ErrorCode.KAFKA_STORAGE_ERROR, {}
        asked = Counter(user.name for user in request.users or ())
        for name in () if code else asked or users:
            await turns.took()
            known = users.get(name, []) if asked[name] <= 1 else []
            refused = ErrorCode.NONE if known else ErrorCode.RESOURCE_NOT_FOUND
            if asked[name] > 1:
                refused = ErrorCode.DUPLICATE_RESOURCE
            infos = tuple(
                kind.entity("CredentialInfo", mechanism=int(mechanism), iterations=iterations)
                for mechanism, iterations in known
            )
            results.append(
                kind.entity(
                    "DescribeUserScramCredentialsResult",
                    user=name,
                    error_code=refused,
                    error_message=refused.name if refused else None,
                    credential_infos=infos,
                )
            )
    return await turns.encoded(
        broker, kind, header, error_code=code, error_message=None, results=tuple(results)
    )


async def alter_user_scram_credentials(
    broker: Broker, header: RequestHeader, request: Message, caller: Caller
) -> bytes:
    """Handle AlterUserScramCredentials."""
    kind = response_kind(Api.ALTER_USER_SCRAM_CREDENTIALS, header.version)
    changes = [*request.deletions, *request.upsertions]
    codes = dict.fromkeys((change.name for change in changes), ErrorCode.NONE)
    refused = broker.authorizer.refusal(caller, Api.ALTER_USER_SCRAM_CREDENTIALS)
    if refused:
        codes = dict.fromkeys(codes, refused)
    else:
        loop = asyncio.get_running_loop()
        try:
            work = loop.run_in_executor(broker.changers, _alter, broker, request, codes)
            await pooled(work, broker.options.change_timeout_s)
        except LogmirrorError as error:
            _LOG.exception("users could not be changed")
            codes = dict.fromkeys(codes, code_of(error))
    turns = Turns()
    await turns.took(len(codes))
    results = tuple(
        kind.entity(
            "AlterUserScramCredentialsResult",
            user=name,
            error_code=code,
            error_message=code.name if code else None,
        )
        for name, code in codes.items()
    )
    return await turns.encoded(broker, kind, header, results=results)


def _alter(broker: Broker, request: Message, codes: dict[str, ErrorCode]) -> None:
    """Store the changes of the users without an error; adds the errors to `codes`."""
    known = broker.security.users()
    changes = [*request.deletions, *request.upsertions]
    named = Counter((change.name, change.mechanism) for change in changes)
    for change in changes:
        is_twice = named[change.name, change.mechanism] > 1
        code = ErrorCode.DUPLICATE_RESOURCE if is_twice else _check(change, known)
        codes[change.name] = codes[change.name] or code
    new = {change.name for change in request.upsertions if not codes[change.name]} - known.keys()
    if len(known) + len(new) > MAX_USERS:
        codes.update(dict.fromkeys(new, ErrorCode.POLICY_VIOLATION))
    stored = [
        (change.name, _credential(change))
        for change in request.upsertions
        if not codes[change.name]
    ]
    removed = [
        (change.name, Mechanism(change.mechanism))
        for change in request.deletions
        if not codes[change.name]
    ]
    broker.security.change_users(stored, removed)
    for user, credential in stored:
        _LOG.info("user %r: %s stored", user, credential.mechanism.sasl_name)
    for user, mechanism in removed:
        _LOG.info("user %r: %s removed", user, mechanism.sasl_name)


def _check(change: Any, known: Mapping[str, list[tuple[Mechanism, int]]]) -> ErrorCode:  # noqa: ANN401  # an entry of the request
    if change.mechanism not in list(Mechanism):
        return ErrorCode.UNSUPPORTED_SASL_MECHANISM
    if not change.name or len(change.name.encode()) > MAX_USER_BYTES or "\0" in change.name:
        return ErrorCode.UNACCEPTABLE_CREDENTIAL
    if not hasattr(change, "salted_password"):
        has = any(mechanism == change.mechanism for mechanism, _ in known.get(change.name, ()))
        return ErrorCode.NONE if has else ErrorCode.RESOURCE_NOT_FOUND
    is_possible = (
        MIN_ITERATIONS <= change.iterations <= MAX_ITERATIONS
        and 0 < len(change.salt) <= _MAX_SALT_BYTES
        and len(change.salted_password) == Mechanism(change.mechanism).key_bytes
    )
    return ErrorCode.NONE if is_possible else ErrorCode.UNACCEPTABLE_CREDENTIAL


def _credential(change: Any) -> Credential:  # noqa: ANN401  # an entry of the request
    mechanism = Mechanism(change.mechanism)
    salt, iterations = change.salt, change.iterations
    return from_salted(mechanism, change.salted_password, salt=salt, iterations=iterations)

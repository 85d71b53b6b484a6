"""Tokens from an OpenID Connect endpoint, with the client's credentials (RFC 6749 4.4).

Invariants:
1. All connections of a process that have the same credentials share one token until 80 % of its
   lifetime has passed. However many threads need a new one, one request is made.
2. The endpoint is not asked again before the time in its `Retry-After`.
3. The client secret and the token are in no message, fact or repr, and are sent to the configured
   endpoint only.
"""

from __future__ import annotations

import base64
import email.utils
import functools
import json
import re
import ssl
import threading
import urllib.parse
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

from logmirror.cluster.http_post import HttpResponse, post
from logmirror.cluster.tls import load_authorities
from logmirror.cluster.token_url import parse_token_url
from logmirror.errors import LogmirrorError, UnavailableError, UsageError

if TYPE_CHECKING:
    from logmirror.clock import Clock
    from logmirror.cluster.properties import ConnectionSettings

RETRY_AFTER_MS_MAX: Final = 300_000
"""Longest `Retry-After` that is honoured."""

_FRESH: Final = 0.8
"""Fraction of a token's lifetime after which a new one is requested."""
_LIFETIME_S_MAX: Final = 86_400
_CREDENTIALS_MAX: Final = 256
"""Limit for remembered credentials. A process has as many as its configuration has clusters."""

_OK: Final = range(200, 300)
_REDIRECT: Final = range(300, 400)
_RETRIABLE: Final = frozenset({408, 425, 429, *range(500, 600)})
_TOKEN: Final = re.compile(r"[A-Za-z0-9\-._~+/]+=*")
"""RFC 6750 2.1. Anything else could end the token's field in the SASL message."""


@dataclass(frozen=True, slots=True)
class Token:
    """A bearer token."""

    text: str = field(repr=False)
    is_cached: bool
    """Whether it was requested before this call, so that the broker may know better."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Credentials:
    """What identifies a token. Equal settings of several clusters share it."""

    url: str = field(repr=False)
    client_id: str
    secret: str = field(repr=False)
    scope: str
    ca_location: str
    ca_pem: str = field(repr=False)


@dataclass(slots=True)
class _Known:
    """What is known of one client's credentials."""

    token: Token | None = None
    fresh_until_ms: float = 0
    refusal: LogmirrorError | None = None
    refused_until_ms: float = 0
    request: Future[Token] | None = None
    """The request in progress."""


class Tokens:
    """The tokens of this process. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[_Credentials, _Known] = {}

    def get(self, settings: ConnectionSettings, clock: Clock, *, deadline_ms: int) -> Token:
        """Return a token, which may be a cached one.

        Args:
            settings: With `oauth_method` `oidc`.
            clock: For lifetimes and the deadline.
            deadline_ms: Monotonic deadline.

        Raises:
            UsageError: The endpoint refused the credentials, redirects, or returned no token.
            UnavailableError: No response before the deadline, or a status that asks to wait.
        """
        credentials = _credentials(settings)
        with self._lock:
            if len(self._known) >= _CREDENTIALS_MAX:
                self._known.clear()
            known = self._known.setdefault(credentials, _Known())
            now_ms = clock.monotonic_ms()
            if known.token is not None and now_ms < known.fresh_until_ms:
                return replace(known.token, is_cached=True)
            if known.refusal is not None and now_ms < known.refused_until_ms:
                raise known.refusal.copy()
            request = known.request
            if request is None:
                mine = known.request = Future()
        if request is None:
            return self._request(credentials, known, mine, clock, deadline_ms)
        try:
            return request.result(max(deadline_ms - clock.monotonic_ms(), 0) / 1000)
        except TimeoutError:
            raise UnavailableError("the token endpoint did not respond in time") from None
        except LogmirrorError as error:  # of another thread, which adds facts to its own
            raise error.copy() from None

    def forget(self, settings: ConnectionSettings, token: Token) -> None:
        """Drop a token that a broker has refused, unless a newer one is there."""
        with self._lock:
            known = self._known.get(_credentials(settings))
            if known is not None and known.token is not None and known.token.text == token.text:
                known.token = None

    def _request(
        self,
        credentials: _Credentials,
        known: _Known,
        mine: Future[Token],
        clock: Clock,
        deadline_ms: int,
    ) -> Token:
        begun_ms = clock.monotonic_ms()
        try:
            response = _post(credentials, clock, deadline_ms)
            token, lifetime_s = _read(credentials, response, clock)
        except BaseException as error:
            with self._lock:
                known.request = None
                if isinstance(error, UnavailableError) and "retry_after_ms" in error.facts:
                    known.refusal = error.copy()
                    wait_ms = int(str(error.facts["retry_after_ms"]))
                    known.refused_until_ms = clock.monotonic_ms() + wait_ms
            interrupted = UnavailableError("the request for a token was interrupted")
            mine.set_exception(error if isinstance(error, LogmirrorError) else interrupted)
            raise
        with self._lock:
            known.request, known.refusal = None, None
            known.token, known.fresh_until_ms = token, begun_ms + lifetime_s * 1000 * _FRESH
        mine.set_result(token)
        return token


TOKENS: Final = Tokens()
"""The tokens that all connections of this process share."""


def _credentials(settings: ConnectionSettings) -> _Credentials:
    return _Credentials(
        url=settings.oauth_token_endpoint,
        client_id=settings.oauth_client_id,
        secret=settings.oauth_client_secret,
        scope=settings.oauth_scope,
        ca_location=settings.https_ca_location,
        ca_pem=settings.https_ca_pem,
    )


@functools.lru_cache(maxsize=16)
def _tls(ca_location: str, ca_pem: str) -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.SERVER_AUTH)
    load_authorities(context, ca_location, ca_pem, prefix="https")
    return context


def _post(credentials: _Credentials, clock: Clock, deadline_ms: int) -> HttpResponse:
    try:
        url = parse_token_url(credentials.url)
    except ValueError as error:
        raise UsageError(f"sasl.oauthbearer.token.endpoint.url {error}") from None
    form = {"grant_type": "client_credentials"}
    if credentials.scope:
        form["scope"] = credentials.scope
    identity = f"{credentials.client_id}:{credentials.secret}".encode()
    headers = {
        "Authorization": f"Basic {base64.b64encode(identity).decode()}",
        "Content-Type": "application/x-www-form-urlencoded",
        "Accept": "application/json",
        "User-Agent": "logmirror",
    }
    body = urllib.parse.urlencode(form).encode()
    tls = _tls(credentials.ca_location, credentials.ca_pem) if url.is_tls else None
    try:
        return post(url, headers, body, tls=tls, clock=clock, deadline_ms=deadline_ms)
    except LogmirrorError as error:
        raise type(error)(
            f"the token endpoint: {error.message}", hint=error.hint, **error.facts
        ) from error


def _read(credentials: _Credentials, response: HttpResponse, clock: Clock) -> tuple[Token, float]:
    """Return the token and its lifetime in seconds. 0: the response does not say it."""
    facts: dict[str, Any] = {"url": parse_token_url(credentials.url).origin}
    status = response.status
    if status in _REDIRECT:
        raise UsageError(
            "the token endpoint redirects, which is not followed: the client secret would be sent "
            "to another address",
            hint="set sasl.oauthbearer.token.endpoint.url to the final address",
            status=status,
            **facts,
        )
    if status in _RETRIABLE:
        wait_ms = _retry_after_ms(response.headers.get("retry-after", ""), clock)
        if wait_ms:
            facts["retry_after_ms"] = wait_ms
        raise UnavailableError("the token endpoint cannot respond now", status=status, **facts)
    if status not in _OK:
        raise UsageError(
            "the token endpoint refused the request",
            hint="check sasl.oauthbearer.client.id, sasl.oauthbearer.client.secret and "
            "sasl.oauthbearer.scope",
            status=status,
            **facts,
        )
    try:
        content = json.loads(response.body)
        token = content["access_token"]
    except (ValueError, KeyError, TypeError, RecursionError):  # its text may quote the response
        token = None
    if not isinstance(token, str) or not _TOKEN.fullmatch(token):
        raise UsageError("the token endpoint's response has no access_token", **facts)
    return Token(token, is_cached=False), _lifetime_s(content.get("expires_in"))


def _lifetime_s(value: object) -> float:
    text = str(value)  # a number; some endpoints send a string
    return min(int(text), _LIFETIME_S_MAX) if re.fullmatch(r"[0-9]{1,9}", text) else 0


def _retry_after_ms(text: str, clock: Clock) -> int:
    """The header of RFC 9110 10.2.3: seconds, or a date. 0: none, or it has passed."""
    if re.fullmatch(r"[0-9]{1,9}", text):
        wait_ms = int(text) * 1000
    else:
        try:
            at = email.utils.parsedate_to_datetime(text)
            wait_ms = int(at.timestamp() * 1000) - clock.now_ms()
        except (ValueError, TypeError, IndexError, OverflowError):
            wait_ms = 0
    return max(0, min(wait_ms, RETRY_AFTER_MS_MAX))

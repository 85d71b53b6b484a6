"""One HTTP POST: a total deadline, no redirects, bounded bytes, through the environment's proxy.

Invariants:
1. Everything ends at one deadline, however slowly bytes arrive: the host name lookup, TCP, the
   proxy, the TLS handshake, the request, and the head and the body of the response.
2. The request goes to one host. A redirect is returned as what it is, and never followed.
3. At most `RESPONSE_BYTES_MAX` bytes of a response are read, head included.
"""

from __future__ import annotations

import base64
import contextlib
import http.client
import io
import ssl
import urllib.parse
import urllib.request
from typing import TYPE_CHECKING, Final, NamedTuple

from logmirror.cluster.dialing import dial, remaining_s
from logmirror.cluster.token_url import TokenUrl, is_loopback
from logmirror.errors import UnavailableError, UsageError

if TYPE_CHECKING:
    import socket
    from collections.abc import Iterator, Mapping

    from logmirror.clock import Clock

RESPONSE_BYTES_MAX: Final = 1 << 20
_OK: Final = 200
_PROXY_PORT: Final = 3128


class HttpResponse(NamedTuple):
    """A response with any status."""

    status: int
    headers: Mapping[str, str]
    """By lower-case name."""

    body: bytes


def post(  # noqa: PLR0913  # the parts of a request
    url: TokenUrl,
    headers: Mapping[str, str],
    body: bytes,
    *,
    tls: ssl.SSLContext | None,
    clock: Clock,
    deadline_ms: int,
) -> HttpResponse:
    """Send a request and return its response, whatever its status.

    Args:
        url: The endpoint.
        headers: Without Host, Content-Length and Connection.
        body: The content.
        tls: Verifies the server's certificate; None for http.
        clock: For the deadline.
        deadline_ms: Monotonic deadline for everything.

    Raises:
        UnavailableError: No whole response before the deadline.
        UsageError: The certificate is not trusted, the proxy refused the request, or the bytes are
            not an HTTP response of a bounded size.
    """
    try:
        with _opened(url, tls, clock, deadline_ms) as connection:
            named = {"Host": url.origin.partition("://")[2], **headers}
            named |= {"Content-Length": str(len(body)), "Connection": "close"}
            head = [f"POST {url.target} HTTP/1.1", *(f"{k}: {v}" for k, v in named.items())]
            data = "\r\n".join([*head, "", ""]).encode("ascii") + body
            return _exchange(connection, "POST", data, clock, deadline_ms)
    except TimeoutError:
        raise UnavailableError("no response in time", url=url.origin) from None
    except ssl.SSLCertVerificationError as error:
        raise UsageError(
            f"the certificate is not trusted: {error.verify_message}",
            hint="set https.ca.location to the CA that signed it",
            url=url.origin,
        ) from error
    except OSError as error:
        raise UnavailableError("no connection", url=url.origin, reason=str(error)) from error
    except http.client.IncompleteRead:
        raise UnavailableError("the response ended early", url=url.origin) from None
    except (http.client.HTTPException, ValueError):  # its text may quote the response
        raise UsageError("the response is not valid HTTP", url=url.origin) from None


class _TooLongError(http.client.HTTPException):
    """The response exceeds `RESPONSE_BYTES_MAX`."""


class _Received(io.RawIOBase):
    """The bytes that a socket receives before the deadline, as a file for `http.client`."""

    def __init__(self, connection: socket.socket, clock: Clock, deadline_ms: int) -> None:
        self._connection, self._clock, self._deadline_ms = connection, clock, deadline_ms
        self._left = RESPONSE_BYTES_MAX
        self.is_in_head = True

    def makefile(self, mode: str) -> io.BufferedReader:
        """Return itself, buffered; `http.client` calls this of a socket."""
        del mode
        return io.BufferedReader(self)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]  # narrower, as called
        if not self._left:
            raise _TooLongError
        self._connection.settimeout(remaining_s(self._clock, self._deadline_ms))
        count = self._connection.recv_into(buffer, min(len(buffer), self._left))
        if not count and self.is_in_head:  # http.client takes the end for the end of the head
            raise ConnectionError("the response ended early")
        self._left -= count
        return count


def _exchange(
    connection: socket.socket, method: str, data: bytes, clock: Clock, deadline_ms: int
) -> HttpResponse:
    left = memoryview(data)
    while left:
        connection.settimeout(remaining_s(clock, deadline_ms))
        left = left[connection.send(left) :]
    received = _Received(connection, clock, deadline_ms)
    response = http.client.HTTPResponse(received, method=method)  # type: ignore[arg-type]  # see makefile
    response.begin()
    received.is_in_head = False
    # Never more than the limit at once, whatever length the response announces.
    body = b"" if method == "CONNECT" else response.read(RESPONSE_BYTES_MAX)
    if method != "CONNECT" and response.length:
        raise ConnectionError("the response ended early")
    headers = {name.lower(): value for name, value in response.getheaders()}
    return HttpResponse(response.status, headers, body)


# -- the way to the endpoint -----------------------------------------------------------------------


@contextlib.contextmanager
def _opened(
    url: TokenUrl, tls: ssl.SSLContext | None, clock: Clock, deadline_ms: int
) -> Iterator[socket.socket]:
    proxy = _proxy(url)
    host, port = (proxy.hostname or "", proxy.port or _PROXY_PORT) if proxy else url[1:3]
    connection = dial(host, port, clock=clock, deadline_ms=deadline_ms)
    try:
        if proxy:
            _tunnel(connection, url, proxy, clock, deadline_ms)
        if tls is not None:
            connection.settimeout(remaining_s(clock, deadline_ms))
            connection = tls.wrap_socket(connection, server_hostname=url.host)
        yield connection
    finally:
        connection.close()


def _proxy(url: TokenUrl) -> urllib.parse.SplitResult | None:
    """The proxy that `https_proxy` and `no_proxy` select, as for curl and librdkafka."""
    if not url.is_tls or is_loopback(url.host):
        return None
    proxies = urllib.request.getproxies_environment()
    address = proxies.get("https") or proxies.get("all")
    if not address or urllib.request.proxy_bypass(url.host):
        return None
    parts = urllib.parse.urlsplit(address if "://" in address else f"http://{address}")
    if parts.scheme != "http" or not parts.hostname:
        raise UsageError("https_proxy is not an http address of a proxy", url=url.origin)
    return parts


def _tunnel(
    connection: socket.socket,
    url: TokenUrl,
    proxy: urllib.parse.SplitResult,
    clock: Clock,
    deadline_ms: int,
) -> None:
    """Let the proxy connect to the endpoint (RFC 9110 9.3.6). It sees the host, not the request."""
    target = url.origin.partition("://")[2]
    lines = [f"CONNECT {target} HTTP/1.1", f"Host: {target}"]
    if proxy.username is not None:
        identity = urllib.parse.unquote(f"{proxy.username}:{proxy.password or ''}").encode()
        lines.append(f"Proxy-Authorization: Basic {base64.b64encode(identity).decode()}")
    data = "\r\n".join([*lines, "", ""]).encode("ascii")
    status = _exchange(connection, "CONNECT", data, clock, deadline_ms).status
    if status != _OK:
        kind = UnavailableError if status >= 500 else UsageError  # noqa: PLR2004  # the proxy's fault
        raise kind("the proxy of https_proxy refused the connection", url=url.origin, status=status)

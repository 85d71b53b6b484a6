"""The address of a token endpoint: https, or http on this machine."""

from __future__ import annotations

import ipaddress
import urllib.parse
from typing import Final, NamedTuple

_PORTS: Final = {"http": 80, "https": 443}


class TokenUrl(NamedTuple):
    """Where to request a token."""

    is_tls: bool
    host: str
    port: int
    target: str
    """Path and query, for the request line."""

    @property
    def origin(self) -> str:
        """Scheme, host and port: what errors may show. A query may hold a secret."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'https' if self.is_tls else 'http'}://{host}:{self.port}"


def parse_token_url(text: str) -> TokenUrl:
    """Parse the property `sasl.oauthbearer.token.endpoint.url`.

    Raises:
        ValueError: It is not an address to send a secret to. The text is in no message.
    """
    if not text.isascii() or not text.isprintable() or " " in text:
        message = "has characters that an address cannot have"
        raise ValueError(message)
    try:
        parts = urllib.parse.urlsplit(text)
        host, port = parts.hostname or "", parts.port
    except ValueError:
        host, port = "", None
    if not host or parts.scheme not in _PORTS or port == 0:
        message = "is not an https address"
        raise ValueError(message)
    if parts.username is not None or parts.password is not None:
        message = "must not contain a user name or a password"
        raise ValueError(message)
    if parts.scheme == "http" and not is_loopback(host):
        message = "must be https: the client secret and the token would be sent unencrypted"
        raise ValueError(message)
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    return TokenUrl(parts.scheme == "https", host, port or _PORTS[parts.scheme], target)


def is_loopback(host: str) -> bool:
    """Whether a host is this machine, by its name or address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False

"""Tokens for SASL OAUTHBEARER: unsigned ones for development, OpenID Connect for production.

Both are librdkafka's: `sasl.oauthbearer.method=default` builds an unsecured JWS (RFC 7515 A.5) from
`sasl.oauthbearer.config`; `oidc` requests a token from the endpoint with the client's credentials
(RFC 6749 4.4). Each authentication gets a new token; a session lasts as long as its token.
"""

from __future__ import annotations

import base64
import json
import urllib.error
import urllib.parse
import urllib.request
from typing import TYPE_CHECKING, Final

from logmirror.errors import UnavailableError, UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from logmirror.clock import Clock
    from logmirror.cluster.properties import ConnectionSettings

_RESPONSE_BYTES_MAX: Final = 1 << 20
_CONFIG_KEYS: Final = ("principal", "principalClaimName", "scopeClaimName", "scope", "lifeSeconds")


def oauth_token(settings: ConnectionSettings, clock: Clock, *, timeout_ms: float) -> str:
    """Return a token.

    Raises:
        UsageError: The settings are not sufficient, or the endpoint refused the credentials.
        UnavailableError: The endpoint was unreachable, or had a server error.
    """
    if settings.oauth_method == "oidc":
        return _request_token(settings, timeout_ms=timeout_ms)
    return _unsecured(settings.oauth_config, now_s=clock.now_ms() // 1000)


def oauth_extensions(settings: ConnectionSettings) -> dict[str, str]:
    """SASL extensions: key to value."""
    if settings.oauth_method == "oidc":
        return dict(_pairs(settings.oauth_extensions, ",", "sasl.oauthbearer.extensions"))
    pairs = _pairs(settings.oauth_config, None, "sasl.oauthbearer.config")
    return {
        name.removeprefix("extension_"): value
        for name, value in pairs
        if name.startswith("extension_")
    }


def _pairs(text: str, separator: str | None, name: str) -> list[tuple[str, str]]:
    pairs = []
    for entry in text.split(separator) if text.strip() else ():
        key, equals, value = entry.strip().partition("=")
        if not equals or not key:
            raise UsageError(f"{name} expects key=value entries", entry_key=key)
        pairs.append((key, value))
    return pairs


def _unsecured(config: str, *, now_s: int) -> str:
    values = dict(_pairs(config, None, "sasl.oauthbearer.config"))
    for key in values:
        if key not in _CONFIG_KEYS and not key.startswith("extension_"):
            raise UsageError(
                f"unknown key {key!r} in sasl.oauthbearer.config",
                hint=f"keys: {', '.join(_CONFIG_KEYS)} and extension_NAME",
            )
    if not values.get("principal"):
        raise UsageError("sasl.oauthbearer.config has no principal=NAME")
    life = values.get("lifeSeconds", "3600")
    if not life.isdigit() or int(life) == 0:
        raise UsageError("lifeSeconds of sasl.oauthbearer.config is not a positive whole number")
    claims: dict[str, object] = {
        values.get("principalClaimName", "sub"): values["principal"],
        "iat": now_s,
        "exp": now_s + int(life),
    }
    if values.get("scope"):
        claims[values.get("scopeClaimName", "scope")] = values["scope"].split(",")
    return f"{_encode({'alg': 'none'})}.{_encode(claims)}."


def _encode(value: Mapping[str, object]) -> str:
    text = json.dumps(value, separators=(",", ":"))
    return base64.urlsafe_b64encode(text.encode()).rstrip(b"=").decode()


def _request_token(settings: ConnectionSettings, *, timeout_ms: float) -> str:
    url = settings.oauth_token_endpoint
    if urllib.parse.urlsplit(url).scheme not in ("http", "https"):
        raise UsageError("sasl.oauthbearer.token.endpoint.url is not an http or https address")
    form = {"grant_type": "client_credentials"}
    if settings.oauth_scope:
        form["scope"] = settings.oauth_scope
    identity = f"{settings.oauth_client_id}:{settings.oauth_client_secret}".encode()
    request = urllib.request.Request(  # noqa: S310  # the scheme is checked above
        url,
        data=urllib.parse.urlencode(form).encode(),
        headers={
            "Authorization": f"Basic {base64.b64encode(identity).decode()}",
            "Content-Type": "application/x-www-form-urlencoded",
            "Accept": "application/json",
        },
    )
    try:
        with urllib.request.urlopen(request, timeout=timeout_ms / 1000) as response:  # noqa: S310  # as above
            body = response.read(_RESPONSE_BYTES_MAX)
        token = json.loads(body)["access_token"]
    except urllib.error.HTTPError as error:
        error.close()
        kind = UnavailableError if error.code >= 500 else UsageError  # noqa: PLR2004  # the server's fault
        raise kind("the token endpoint refused the request", url=url, status=error.code) from error
    except OSError as error:
        raise UnavailableError(
            "the token endpoint could not be reached", url=url, reason=str(error)
        ) from error
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError("the token endpoint's response has no access_token", url=url) from error
    if not isinstance(token, str) or not token:
        raise UsageError("the token endpoint's response has no access_token", url=url)
    return token

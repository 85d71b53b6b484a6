"""Tokens for SASL OAUTHBEARER: unsigned ones for development, OpenID Connect for production.

Both are librdkafka's: `sasl.oauthbearer.method=default` builds an unsecured JWS (RFC 7515 A.5) from
`sasl.oauthbearer.config`; `oidc` requests a token from an endpoint (`token_endpoint`).
"""

from __future__ import annotations

import base64
import json
from typing import TYPE_CHECKING, Final

from logmirror.cluster.token_endpoint import TOKENS, Token
from logmirror.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from logmirror.clock import Clock
    from logmirror.cluster.properties import ConnectionSettings

_CONFIG_KEYS: Final = ("principal", "principalClaimName", "scopeClaimName", "scope", "lifeSeconds")


def oauth_token(settings: ConnectionSettings, clock: Clock, *, deadline_ms: int) -> Token:
    """Return a token.

    Raises:
        UsageError: The settings are not sufficient, or the endpoint refused the credentials.
        UnavailableError: The endpoint did not respond before the deadline, or asks to wait.
    """
    if settings.oauth_method == "oidc":
        return TOKENS.get(settings, clock, deadline_ms=deadline_ms)
    text = _unsecured(settings.oauth_config, now_s=clock.now_ms() // 1000)
    return Token(text, is_cached=False)


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
    for number, entry in enumerate(text.split(separator) if text.strip() else (), 1):
        key, equals, value = entry.strip().partition("=")
        if not equals or not key:  # no text of it: it may be the rest of a secret with a space
            raise UsageError(f"{name} expects key=value entries", entry=number)
        pairs.append((key, value))
    return pairs


def _unsecured(config: str, *, now_s: int) -> str:
    values = dict(_pairs(config, None, "sasl.oauthbearer.config"))
    for number, key in enumerate(values, 1):
        if key not in _CONFIG_KEYS and not key.startswith("extension_"):
            raise UsageError(
                "unknown key in sasl.oauthbearer.config",
                hint=f"keys: {', '.join(_CONFIG_KEYS)} and extension_NAME",
                entry=number,
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

"""One SASL exchange over any transport, with kafka-python's mechanisms and logmirror's errors.

The mechanisms use no sockets: `authenticate` gets a function that sends bytes and returns the
broker's response.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from kafka.errors import KafkaError  # type: ignore[import-untyped]  # ships no py.typed
from kafka.net.sasl import get_sasl_mechanism  # type: ignore[import-untyped]  # ships no py.typed
from kafka.net.sasl.oauth import (  # type: ignore[import-untyped]  # ships no py.typed
    AbstractTokenProvider,
)

from logmirror.cluster.oauth import oauth_extensions, oauth_token
from logmirror.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

    from logmirror.clock import Clock
    from logmirror.cluster.properties import ConnectionSettings

_STEPS_MAX: Final = 4
"""SCRAM needs two responses, the others one; a broker that requires more breaks the mechanism."""


class _Tokens(AbstractTokenProvider):  # type: ignore[misc]  # its base is untyped
    """The token provider for kafka-python's OAUTHBEARER."""

    def __init__(self, token: str, extensions: dict[str, str]) -> None:
        super().__init__()
        self._token = token
        self._extensions = extensions

    def token(self) -> str:
        return self._token

    def extensions(self) -> dict[str, str]:
        return self._extensions


def authenticate(
    settings: ConnectionSettings,
    clock: Clock,
    exchange: Callable[[bytes], bytes],
    *,
    timeout_ms: float,
) -> None:
    """Run the mechanism to its end.

    Args:
        settings: Mechanism and credentials.
        clock: For the dates in an unsigned token.
        exchange: Sends one message of the mechanism and returns the response. Raises if the broker
            responds with an error code.
        timeout_ms: For the request to a token endpoint.

    Raises:
        UsageError: The broker's side of the exchange is wrong: it may not know the password, or it
            does not follow the mechanism.
        UnavailableError: A token endpoint could not be reached.
    """
    mechanism = _mechanism(settings, clock, timeout_ms)
    try:
        for _ in range(_STEPS_MAX):
            mechanism.receive(exchange(mechanism.auth_bytes()))
            if mechanism.is_done():
                break
        finished = mechanism.is_done() and mechanism.is_authenticated()
    except (KafkaError, ValueError, KeyError) as error:
        # Only the type: the text may quote what was exchanged.
        raise UsageError(
            "the broker's SASL message is not valid",
            hint="check sasl.mechanism, and that this is the intended broker",
            mechanism=settings.sasl_mechanism,
            reason=type(error).__name__,
        ) from error
    if not finished:
        raise UsageError(
            "the broker did not complete the authentication", mechanism=settings.sasl_mechanism
        )


def _mechanism(settings: ConnectionSettings, clock: Clock, timeout_ms: float) -> Any:  # noqa: ANN401  # untyped library
    name = settings.sasl_mechanism
    config: dict[str, object] = {"sasl_mechanism": name, "security_protocol": ""}
    if name == "OAUTHBEARER":
        token = oauth_token(settings, clock, timeout_ms=timeout_ms)
        config["sasl_oauth_token_provider"] = _Tokens(token, oauth_extensions(settings))
    else:
        username = settings.sasl_username
        if name.startswith("SCRAM-"):
            # RFC 5802 5.1: these two characters have a meaning in the message.
            username = username.replace("=", "=3D").replace(",", "=2C")
        config["sasl_plain_username"] = username
        config["sasl_plain_password"] = settings.sasl_password
    return get_sasl_mechanism(name)(**config)

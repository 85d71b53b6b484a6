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
from logmirror.cluster.token_endpoint import TOKENS, Token
from logmirror.errors import UnavailableError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

    from logmirror.clock import Clock
    from logmirror.cluster.properties import ConnectionSettings

_STEPS_MAX: Final = 4
"""SCRAM needs two responses, the others one; a broker that requires more breaks the mechanism."""

SCRAM_ITERATIONS_MIN: Final = 4096
"""As in Java's client (RFC 7677 4). Fewer make a password cheaper to guess from an exchange."""


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
    deadline_ms: int,
) -> None:
    """Run the mechanism to its end.

    Args:
        settings: Mechanism and credentials.
        clock: For the deadline, and the dates in an unsigned token.
        exchange: Sends one message of the mechanism and returns the response. Raises if the broker
            responds with an error code.
        deadline_ms: Monotonic deadline for the request to a token endpoint.

    Raises:
        UsageError: The broker's side of the exchange is wrong: it may not know the password, or it
            does not follow the mechanism.
        UnavailableError: A token endpoint did not respond, or the broker refused a cached token:
            the next attempt requests a new one.
    """
    if settings.sasl_mechanism != "OAUTHBEARER":
        _run(settings, _mechanism_by_password(settings), exchange)
        return
    token = oauth_token(settings, clock, deadline_ms=deadline_ms)
    mechanism = _mechanism_by_token(settings, token)
    try:
        _run(settings, mechanism, exchange)
    except UsageError as error:
        TOKENS.forget(settings, token)
        if not token.is_cached:
            raise
        raise UnavailableError(
            "the broker refused a cached token", mechanism=settings.sasl_mechanism
        ) from error


def _run(settings: ConnectionSettings, mechanism: Any, exchange: Callable[[bytes], bytes]) -> None:  # noqa: ANN401  # untyped library
    is_scram = settings.sasl_mechanism.startswith("SCRAM-")
    try:
        for step in range(_STEPS_MAX):
            response = exchange(mechanism.auth_bytes())
            if is_scram and step == 0:
                _check_iterations(response)
            mechanism.receive(response)
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


def _check_iterations(server_first: bytes) -> None:
    """Refuse too few iterations before anything is sent that depends on the password."""
    for attribute in server_first.split(b","):
        if attribute.startswith(b"i="):
            iterations = int(attribute[2:])
            if iterations < SCRAM_ITERATIONS_MIN:
                raise UsageError(
                    "the broker's SCRAM iterations are below the minimum",
                    hint="set the password again at the broker, with at least "
                    f"{SCRAM_ITERATIONS_MIN} iterations, and check that this is the intended "
                    "broker",
                    iterations=iterations,
                    minimum=SCRAM_ITERATIONS_MIN,
                )


def _mechanism_by_token(settings: ConnectionSettings, token: Token) -> Any:  # noqa: ANN401  # untyped library
    provider = _Tokens(token.text, oauth_extensions(settings))
    return _mechanism(settings, sasl_oauth_token_provider=provider)


def _mechanism_by_password(settings: ConnectionSettings) -> Any:  # noqa: ANN401  # untyped library
    username = settings.sasl_username
    if settings.sasl_mechanism.startswith("SCRAM-"):
        # RFC 5802 5.1: these two characters have a meaning in the message.
        username = username.replace("=", "=3D").replace(",", "=2C")
    return _mechanism(
        settings, sasl_plain_username=username, sasl_plain_password=settings.sasl_password
    )


def _mechanism(settings: ConnectionSettings, **config: object) -> Any:  # noqa: ANN401  # untyped library
    name = settings.sasl_mechanism
    return get_sasl_mechanism(name)(sasl_mechanism=name, security_protocol="", **config)

"""The server's side of SASL: PLAIN (RFC 4616) and SCRAM, for one connection.

A password that arrives by PLAIN is compared with what is stored for SCRAM. A user that does not
exist takes the same steps and about the same time as one with another password.
"""

from __future__ import annotations

import hmac
from typing import TYPE_CHECKING, Final, NamedTuple

from logmirror.broker.security.scram import (
    MAX_USER_BYTES,
    ClientFirst,
    Credential,
    Exchange,
    Mechanism,
    RefusedLoginError,
    credential,
    read_first,
)

if TYPE_CHECKING:
    from logmirror.broker.security.store import SecurityStore

PLAIN: Final = "PLAIN"
MECHANISMS: Final = (PLAIN, *(mechanism.sasl_name for mechanism in Mechanism))
_SCRAM: Final = {mechanism.sasl_name: mechanism for mechanism in Mechanism}
_PLAIN_PARTS: Final = 3


class Step(NamedTuple):
    """The server's next message."""

    token: bytes
    user: str | None
    """The user's name, once the client has proven it."""


class Login:
    """One login by one mechanism. Its methods block: they read the database and compute hashes."""

    def __init__(self, mechanism: str, store: SecurityStore) -> None:
        self._store = store
        self._scram = _SCRAM.get(mechanism)
        self._first: ClientFirst | None = None
        self._exchange: Exchange | None = None
        self._is_real = False

    def step(self, token: bytes) -> Step:
        """Take the client's next message.

        Raises:
            RefusedLoginError: The login has failed.
        """
        if self._scram is None:
            return Step(b"", self._plain(token))
        if self._exchange is None or self._first is None:
            self._first = read_first(token)
            _check_user(self._first.user)
            known, self._is_real = self._store.credential(self._first.user, [self._scram])
            self._exchange = Exchange(self._first, known)
            return Step(self._exchange.challenge, None)
        signature = self._exchange.finish(token)
        if not self._is_real:
            raise RefusedLoginError("no such user")
        self._check_still_there(self._first.user, self._exchange.known)
        return Step(signature, self._first.user)

    def _check_still_there(self, user: str, known: Credential) -> None:
        """Refuse a credential that was removed or replaced during the login."""
        if self._store.credential(user, [known.mechanism]) != (known, True):
            raise RefusedLoginError("user was changed")

    def _plain(self, token: bytes) -> str:
        try:
            parts = token.decode().split("\0")
        except UnicodeDecodeError:
            raise RefusedLoginError("message is not UTF-8") from None
        if len(parts) != _PLAIN_PARTS:
            raise RefusedLoginError("malformed message")
        authzid, user, password = parts
        _check_user(user)
        if not password:
            raise RefusedLoginError("empty password")
        if authzid not in ("", user):
            raise RefusedLoginError("authorization ID differs from the user name")
        known, is_real = self._store.credential(user, list(Mechanism))
        salt, iterations = known.salt, known.iterations
        given = credential(known.mechanism, password.encode(), salt=salt, iterations=iterations)
        if not hmac.compare_digest(given.stored_key, known.stored_key) or not is_real:
            raise RefusedLoginError("wrong user name or password")
        self._check_still_there(user, known)
        return user


def _check_user(user: str) -> None:
    if not user or len(user.encode()) > MAX_USER_BYTES:
        raise RefusedLoginError("malformed user name")

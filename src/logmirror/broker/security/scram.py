"""SCRAM (RFC 5802, RFC 7677): credentials, and the server's side of the exchange. No I/O.

    client-first   n,,n=USER,r=NONCE                       after a GS2 header: n or y, authzid
    server-first   r=NONCE+OURS,s=SALT,i=ITERATIONS
    client-final   c=GS2 HEADER,r=NONCE+OURS,p=PROOF       c, p, s: base64
    server-final   v=SIGNATURE

Channel binding is not offered. User names and passwords are compared as UTF-8 bytes without
SASLprep, as in Apache Kafka. The exchange takes the same steps for a user that does not exist.
"""

from __future__ import annotations

import base64
import binascii
import enum
import hashlib
import hmac
import re
import secrets
from typing import Final, NamedTuple

MIN_ITERATIONS: Final = 4096
MAX_ITERATIONS: Final = 16_384
"""Kafka's limits; a client computes as many."""

MAX_USER_BYTES: Final = 255
_SALT_BITS: Final = 130
_NONCE_BYTES: Final = 24
_DIGITS: Final = "0123456789abcdefghijklmnopqrstuvwxyz"
_FIRST: Final = re.compile(
    r"(?P<gs2>[ny],(?:a=(?P<authzid>[^,\0]+))?,)"
    r"(?P<bare>n=(?P<user>[^,\0]+),r=(?P<nonce>[\x21-\x2b\x2d-\x7e]+)(?:,[A-Za-z]=[^,\0]+)*)"
)
_FINAL: Final = re.compile(
    r"(?P<start>c=(?P<binding>[A-Za-z0-9+/=]+),r=(?P<nonce>[\x21-\x2b\x2d-\x7e]+)"
    r"(?:,[A-Za-z]=[^,\0]+)*),p=(?P<proof>[A-Za-z0-9+/=]+)"
)
_TOKEN_EXTENSION: Final = re.compile(r",tokenauth=", re.IGNORECASE)


class Mechanism(enum.IntEnum):
    """The variants, with the numbers that Kafka's requests give them."""

    SHA_256 = 1
    SHA_512 = 2

    @property
    def sasl_name(self) -> str:
        """`SCRAM-SHA-256` or `SCRAM-SHA-512`."""
        return f"SCRAM-{self.name.replace('_', '-')}"

    @property
    def hash_name(self) -> str:
        """The name of the hash in `hashlib`."""
        return self.name.replace("_", "").lower()

    @property
    def key_bytes(self) -> int:
        """The size of its keys."""
        return 32 if self == Mechanism.SHA_256 else 64


class Credential(NamedTuple):
    """What the broker stores of a password. The password cannot be computed from it."""

    mechanism: Mechanism
    iterations: int
    salt: bytes
    stored_key: bytes
    server_key: bytes

    def __repr__(self) -> str:
        return f"Credential({self.mechanism.sasl_name}, {self.iterations} iterations)"


class RefusedLoginError(Exception):
    """The client's message is malformed or proves nothing. The reason is for the broker's log."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


def new_salt() -> bytes:
    """Return a random salt of the form that Apache Kafka's tools make: 26 digits of base 36."""
    number = secrets.randbits(_SALT_BITS)
    return "".join(_DIGITS[number // 36**place % 36] for place in range(26)).encode()


def credential(
    mechanism: Mechanism, password: bytes, *, salt: bytes, iterations: int = MIN_ITERATIONS
) -> Credential:
    """Derive what is stored of a password. Takes a few milliseconds."""
    salted = hashlib.pbkdf2_hmac(mechanism.hash_name, password, salt, iterations)
    return from_salted(mechanism, salted, salt=salt, iterations=iterations)


def from_salted(
    mechanism: Mechanism, salted_password: bytes, *, salt: bytes, iterations: int
) -> Credential:
    """Derive what is stored from a password that the client has salted."""
    name = mechanism.hash_name
    client_key = hmac.digest(salted_password, b"Client Key", name)
    return Credential(
        mechanism,
        iterations,
        salt,
        hashlib.new(name, client_key).digest(),
        hmac.digest(salted_password, b"Server Key", name),
    )


class ClientFirst(NamedTuple):
    """The parts of a client's first message."""

    gs2_header: str
    bare: str
    user: str
    nonce: str


def read_first(token: bytes) -> ClientFirst:
    """Read a client's first message.

    Raises:
        RefusedLoginError: It is malformed, or asks for what is not offered.
    """
    text = _text(token)
    found = _FIRST.fullmatch(text)
    if found is None:
        if text.startswith("p="):
            raise RefusedLoginError("channel binding is not offered")
        if _TOKEN_EXTENSION.search(text):
            raise RefusedLoginError("delegation tokens are not offered")
        raise RefusedLoginError("malformed first message")
    user = _user_name(found["user"])
    if found["authzid"] is not None and _user_name(found["authzid"]) != user:
        raise RefusedLoginError("authorization ID differs from the user name")
    return ClientFirst(found["gs2"], found["bare"], user, found["nonce"])


class Exchange:
    """One login after its first message.

    Args:
        first: The client's first message.
        known: The user's credential, or a decoy that no password fits.
        nonce: Our part of the nonce; random by default.

    Attributes:
        challenge: The server's first message.
        known: The credential.
    """

    def __init__(self, first: ClientFirst, known: Credential, nonce: str = "") -> None:
        self._first = first
        self.known = known
        self._nonce = first.nonce + (nonce or secrets.token_urlsafe(_NONCE_BYTES))
        salt = base64.b64encode(known.salt).decode()
        self._challenge = f"r={self._nonce},s={salt},i={known.iterations}"
        self.challenge = self._challenge.encode()

    def finish(self, token: bytes) -> bytes:
        """Check the client's final message; returns the server's, with which it proves itself.

        Raises:
            RefusedLoginError: It is malformed, or the password is wrong.
        """
        found = _FINAL.fullmatch(_text(token))
        if found is None:
            raise RefusedLoginError("malformed final message")
        if not hmac.compare_digest(found["nonce"].encode(), self._nonce.encode()):
            raise RefusedLoginError("nonce differs")
        if _decoded(found["binding"]) != self._first.gs2_header.encode():
            raise RefusedLoginError("channel binding differs from the first message")
        known, name = self.known, self.known.mechanism.hash_name
        signed = f"{self._first.bare},{self._challenge},{found['start']}".encode()
        signature = hmac.digest(known.stored_key, signed, name)
        proof = _decoded(found["proof"])
        client_key = bytes(
            a ^ b for a, b in zip(proof.ljust(len(signature)), signature, strict=False)
        )
        stored_key = hashlib.new(name, client_key).digest()
        is_right = hmac.compare_digest(stored_key, known.stored_key)
        if not is_right or len(proof) != len(signature):
            raise RefusedLoginError("wrong password")
        return b"v=" + base64.b64encode(hmac.digest(known.server_key, signed, name))


def _text(token: bytes) -> str:
    try:
        return token.decode()
    except UnicodeDecodeError:
        raise RefusedLoginError("message is not UTF-8") from None


def _decoded(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except binascii.Error:
        raise RefusedLoginError("malformed base64") from None


def _user_name(text: str) -> str:
    """Decode a user name: `=2C` is a comma, `=3D` an equals sign; no other escape exists."""
    if re.search(r"=(?!2C|3D)", text):
        raise RefusedLoginError("malformed user name")
    return text.replace("=2C", ",").replace("=3D", "=")

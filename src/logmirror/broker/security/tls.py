"""TLS: the broker's context, and the principal that a client's certificate gives.

The principal is `User:` and the certificate's subject as a distinguished name in the form of RFC
2253, as by Kafka's default `ssl.principal.mapping.rules`.
"""

from __future__ import annotations

import ssl
from typing import TYPE_CHECKING, Final

from logmirror.broker.options import BrokerOptions, ClientAuth
from logmirror.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator

_KEYWORDS: Final = {
    "2.5.4.3": "CN",
    "2.5.4.7": "L",
    "2.5.4.8": "ST",
    "2.5.4.10": "O",
    "2.5.4.11": "OU",
    "2.5.4.6": "C",
    "2.5.4.9": "STREET",
    "0.9.2342.19200300.100.1.25": "DC",
    "0.9.2342.19200300.100.1.1": "UID",
}
"""The attributes that RFC 2253 names. Others are written as OID and hexadecimal value."""

_TEXTS: Final = {
    0x0C: "utf-8",
    0x12: "ascii",  # NumericString
    0x13: "ascii",  # PrintableString
    0x14: "latin-1",  # TeletexString
    0x16: "ascii",  # IA5String
    0x1C: "utf-32-be",
    0x1E: "utf-16-be",
}
_SPECIAL: Final = frozenset(',=+"\\<>;#\n')
_SEQUENCE: Final = 0x30
_VERSION: Final = 0xA0
_SUBJECT_AT: Final = 5
_LONG_LENGTH: Final = 0x80
_CLIENT_AUTH: Final = {
    ClientAuth.NONE: ssl.CERT_NONE,
    ClientAuth.REQUESTED: ssl.CERT_OPTIONAL,
    ClientAuth.REQUIRED: ssl.CERT_REQUIRED,
}


def server_context(options: BrokerOptions, client_auth: ClientAuth) -> ssl.SSLContext:
    """Return the context of a listener: TLS 1.2 or later.

    Raises:
        UsageError: A file is missing or is not what it should be.
    """
    if options.tls_certificate is None:
        raise UsageError(
            "a listener with TLS needs a certificate",
            hint="give --tls-certificate, and --tls-key if the key is in another file",
        )
    if client_auth != ClientAuth.NONE and options.tls_client_ca is None:
        raise UsageError(
            "clients' certificates cannot be checked",
            hint="give the authority that signs them with --tls-client-ca",
            client_auth=str(client_auth),
        )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.verify_mode = _CLIENT_AUTH[client_auth]
    try:
        if client_auth != ClientAuth.NONE:
            context.load_verify_locations(options.tls_client_ca)
        # The password stops OpenSSL from asking at the terminal.
        context.load_cert_chain(options.tls_certificate, options.tls_key, password="")
    except (OSError, ValueError) as error:
        raise UsageError(
            "certificate or key cannot be used",
            hint="give files in PEM; the key must belong to the certificate, without a passphrase",
            certificate=str(options.tls_certificate),
            key=str(options.tls_key or options.tls_certificate),
            client_ca=str(options.tls_client_ca or ""),
            cause=str(error),
        ) from error
    return context


def subject_name(certificate: bytes) -> str:
    """Return the subject of a certificate in DER, in the form of RFC 2253.

    The certificate must be verified: its encoding is valid.

    Raises:
        ValueError: The subject cannot be read.
    """
    outer, _ = _value(certificate, 0, _SEQUENCE)
    fields = [*_elements(_value(outer, 0, _SEQUENCE)[0])]
    # version (optional), serial number, algorithm, issuer, validity, subject
    if fields[:1] and fields[0][0] == _VERSION:
        del fields[0]
    *_, subject = fields[:_SUBJECT_AT]
    parts = []
    for _, relative in _elements(subject[1]):
        attributes = (_attribute(pair) for _, pair in _elements(relative))
        parts.append("+".join(attributes))
    return ",".join(reversed(parts))


def _attribute(pair: bytes) -> str:
    (_, oid), (tag, value) = _elements(pair)
    dotted = _dotted(oid)
    keyword = _KEYWORDS.get(dotted)
    if keyword is None or tag not in _TEXTS:
        encoded = bytes([tag]) + _length(len(value)) + value
        return f"{keyword or dotted}=#{encoded.hex()}"
    return f"{keyword}={_escaped(value.decode(_TEXTS[tag]))}"


def _escaped(text: str) -> str:
    """Escape as Java does: special characters, leading and trailing spaces."""
    body = text.strip(" ")
    before = len(text) - len(text.lstrip(" "))
    after = len(text) - len(body) - before
    out = "".join("\\00" if c == "\0" else f"\\{c}" if c in _SPECIAL else c for c in body)
    return "\\ " * before + out + "\\ " * after


def _elements(data: bytes) -> Iterator[tuple[int, bytes]]:
    position = 0
    while position < len(data):
        value, after = _value(data, position)
        yield data[position], value
        position = after


def _value(data: bytes, position: int, tag: int | None = None) -> tuple[bytes, int]:
    """Return the value at a position, and the position after it."""
    if position + 2 > len(data) or (tag is not None and data[position] != tag):
        raise ValueError("not a certificate")
    size, start = data[position + 1], position + 2
    if size & _LONG_LENGTH:
        count = size & ~_LONG_LENGTH
        size, start = int.from_bytes(data[start : start + count]), start + count
    if start + size > len(data):
        raise ValueError("not a certificate")
    return data[start : start + size], start + size


def _length(size: int) -> bytes:
    if size < _LONG_LENGTH:
        return bytes([size])
    encoded = size.to_bytes((size.bit_length() + 7) // 8)
    return bytes([_LONG_LENGTH | len(encoded)]) + encoded


def _dotted(oid: bytes) -> str:
    numbers: list[int] = []
    number = 0
    for byte in oid:
        number = number << 7 | byte & 0x7F
        if not byte & 0x80:
            numbers.append(number)
            number = 0
    first = min(numbers[0] // 40, 2)
    return ".".join(map(str, [first, numbers[0] - 40 * first, *numbers[1:]]))

"""Certificates, users and listeners of a broker with TLS and SASL.

`secure_listeners` returns these listeners of one broker:

    TLS        SSL             the client shows a certificate, or the handshake fails
    SASLTLS    SASL_SSL        PLAIN, SCRAM-SHA-256, SCRAM-SHA-512, OAUTHBEARER
    SASL       SASL_PLAINTEXT  the same mechanisms without TLS
    SHORT      SASL_PLAINTEXT  the same; a session ends after `SHORT_SESSION_MS` (KIP-368)
"""

from __future__ import annotations

import base64
import json
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import trustme

from kit.servers.kafka import Listener
from kit.servers.machine import HOST

if TYPE_CHECKING:
    from pathlib import Path

USER: Final = "alice"
PASSWORD: Final = "correct horse; battery staple"  # with what breaks naive parsers
SHORT_SESSION_MS: Final = 3000
MECHANISMS: Final = ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512", "OAUTHBEARER")

_MODULES: Final = "org.apache.kafka.common.security"


@dataclass(frozen=True, kw_only=True)
class Certificates:
    """Paths of PEM files.

    Attributes:
        authority: Certificate of the authority that signed the broker's and the client's.
        broker: Private key and certificate of the broker, for 127.0.0.1 and localhost only.
        client: Private key and certificate of a client, in one file.
        client_key: The private key alone.
        client_certificate: The certificate alone.
        other_authority: Certificate of a CA that signed nothing here.
    """

    authority: Path
    broker: Path
    client: Path
    client_key: Path
    client_certificate: Path
    other_authority: Path


def make_certificates(folder: Path) -> Certificates:
    """Write fresh certificates into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    authority, other_authority = trustme.CA(), trustme.CA()
    broker = authority.issue_cert(HOST, "localhost")
    client = authority.issue_cert("client@logmirror.test")
    made = Certificates(
        authority=folder / "authority.pem",
        broker=folder / "broker.pem",
        client=folder / "client.pem",
        client_key=folder / "client-key.pem",
        client_certificate=folder / "client-certificate.pem",
        other_authority=folder / "other_authority.pem",
    )
    authority.cert_pem.write_to_path(str(made.authority))
    other_authority.cert_pem.write_to_path(str(made.other_authority))
    # Java reads keys in PKCS 8 only.
    made.broker.write_bytes(_pkcs8(broker) + broker.cert_chain_pems[0].bytes())
    made.client_key.write_bytes(_pkcs8(client))
    made.client_certificate.write_bytes(client.cert_chain_pems[0].bytes())
    made.client.write_bytes(_pkcs8(client) + client.cert_chain_pems[0].bytes())
    return made


def _pkcs8(certificate: trustme.LeafCert) -> bytes:
    from cryptography.hazmat.primitives import serialization  # noqa: PLC0415  # slow to load

    key = serialization.load_pem_private_key(certificate.private_key_pem.bytes(), None)
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )


def secure_listeners(certificates: Certificates) -> list[Listener]:
    """Return the listeners described at the top, for `ApacheKafka(listeners=...)`."""
    tls: dict[str, object] = {
        "ssl.keystore.type": "PEM",
        "ssl.keystore.location": certificates.broker,
        "ssl.truststore.type": "PEM",
        "ssl.truststore.location": certificates.authority,
    }
    sasl: dict[str, object] = {
        "sasl.enabled.mechanisms": ",".join(MECHANISMS),
        "plain.sasl.jaas.config": (
            f'{_MODULES}.plain.PlainLoginModule required user_{USER}="{PASSWORD}";'
        ),
        "scram-sha-256.sasl.jaas.config": f"{_MODULES}.scram.ScramLoginModule required;",
        "scram-sha-512.sasl.jaas.config": f"{_MODULES}.scram.ScramLoginModule required;",
        "oauthbearer.sasl.jaas.config": (
            f"{_MODULES}.oauthbearer.OAuthBearerLoginModule required;"
        ),
    }
    short = {
        f"{mechanism.lower()}.connections.max.reauth.ms": SHORT_SESSION_MS
        for mechanism in MECHANISMS
    }
    return [
        Listener(name="TLS", protocol="SSL", config={**tls, "ssl.client.auth": "required"}),
        Listener(name="SASLTLS", protocol="SASL_SSL", config={**tls, **sasl}),
        Listener(name="SASL", protocol="SASL_PLAINTEXT", config=sasl),
        Listener(name="SHORT", protocol="SASL_PLAINTEXT", config={**sasl, **short}),
    ]


def unsecured_token(subject: str = USER, *, lifetime_s: int = 600) -> str:
    """Return a JSON Web Token without a signature, which brokers accept for tests only."""

    def part(content: dict[str, object]) -> str:
        return base64.urlsafe_b64encode(json.dumps(content).encode()).decode().rstrip("=")

    now_s = int(time.time())
    claims = {"sub": subject, "iat": now_s, "exp": now_s + lifetime_s}
    return f"{part({'alg': 'none'})}.{part(claims)}."

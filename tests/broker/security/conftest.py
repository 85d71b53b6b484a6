"""One embedded broker with a listener of each protocol, users, and ACLs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import pytest

from kit.servers.embedded import EmbeddedBroker
from kit.servers.machine import HOST
from kit.servers.security import Certificates, make_certificates
from logmirror.broker.security.users import put_user

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PROTOCOLS: Final = ("PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL")
ADMIN: Final = "admin"
PASSWORD: Final = "correct horse, battery = staple; \N{SNOWMAN}"


@pytest.fixture(scope="package")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return make_certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="package")
def secured(
    tmp_path_factory: pytest.TempPathFactory, certificates: Certificates
) -> Iterator[EmbeddedBroker]:
    """A broker with ACLs; its only super user is `admin`. It must never die."""
    broker = EmbeddedBroker(
        tmp_path_factory.mktemp("secured"),
        protocols=PROTOCOLS,
        tls_certificate=str(certificates.broker),
        tls_client_ca=str(certificates.authority),
        tls_client_auth="required",
        super_users=[f"User:{ADMIN}"],
        max_failed_authentication_delay_ms=200,
    )
    put_user(broker.log_dir, ADMIN, PASSWORD)
    with broker:
        yield broker
        text = broker.log.read_text()
        assert broker.stop() == 0
    assert "internal error" not in text
    assert PASSWORD not in text


@pytest.fixture(scope="package")
def settings(secured: EmbeddedBroker, certificates: Certificates) -> Callable[..., dict[str, Any]]:
    """Settings of librdkafka for a protocol, a mechanism and a user."""

    def build(
        protocol: str = "SASL_PLAINTEXT",
        mechanism: str = "SCRAM-SHA-256",
        user: str = ADMIN,
        password: str = PASSWORD,
    ) -> dict[str, Any]:
        found: dict[str, Any] = {
            "bootstrap.servers": f"{HOST}:{secured.port_of(protocol)}",
            "security.protocol": protocol,
            "log_level": 0,
        }
        if protocol.endswith("SSL"):
            found["ssl.ca.location"] = str(certificates.authority)
        if protocol == "SSL":
            found["ssl.certificate.location"] = str(certificates.client_certificate)
            found["ssl.key.location"] = str(certificates.client_key)
        if protocol.startswith("SASL"):
            found["sasl.mechanism"] = mechanism
            found["sasl.username"] = user
            found["sasl.password"] = password
        return found

    return build

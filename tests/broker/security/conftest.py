"""An embedded broker with a listener of each protocol, users, and ACLs; one more in a bucket."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import pytest
from confluent_kafka.admin import (
    AdminClient,
    ScramCredentialInfo,
    ScramMechanism,
    UserScramCredentialUpsertion,
)

from kit.servers.embedded import EmbeddedBroker
from kit.servers.machine import HOST
from kit.servers.s3 import LogBucket
from kit.servers.security import Certificates, make_certificates
from logmirror.broker.security.users import put_user

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from kit.servers.s3 import S3Server

PROTOCOLS: Final = ("PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL")
ADMIN: Final = "admin"
PASSWORD: Final = "correct horse, battery = staple; \N{SNOWMAN}"


@pytest.fixture(scope="package")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return make_certificates(tmp_path_factory.mktemp("certificates"))


def _secured(
    folder: Path, certificates: Certificates, bucket: LogBucket | None = None, **more: object
) -> EmbeddedBroker:
    """A broker with ACLs; its only super user is `admin`."""
    return EmbeddedBroker(
        folder,
        protocols=PROTOCOLS,
        bucket=bucket,
        tls_certificate=str(certificates.broker),
        tls_client_ca=str(certificates.authority),
        tls_client_auth="required",
        max_failed_authentication_delay_ms=200,
        **{"super_users": [f"User:{ADMIN}"], **more},
    )


def _running(broker: EmbeddedBroker) -> Iterator[EmbeddedBroker]:
    with broker:
        yield broker
        text = broker.log.read_text()
        assert broker.stop() == 0
    assert "internal error" not in text
    assert PASSWORD not in text


@pytest.fixture(scope="package")
def secured_on_disk(
    tmp_path_factory: pytest.TempPathFactory, certificates: Certificates
) -> Iterator[EmbeddedBroker]:
    """See `secured`."""
    broker = _secured(tmp_path_factory.mktemp("secured"), certificates)
    put_user(broker.log_dir, ADMIN, PASSWORD)
    yield from _running(broker)


@pytest.fixture(scope="package")
def secured_in_bucket(
    tmp_path_factory: pytest.TempPathFactory, certificates: Certificates, s3_server: S3Server
) -> Iterator[EmbeddedBroker]:
    """See `secured`. Its super user is created through another broker on the bucket."""
    place = LogBucket(s3_server, s3_server.new_bucket())
    first = tmp_path_factory.mktemp("first")
    with _secured(first, certificates, place, super_users=["User:ANONYMOUS"]) as broker:
        admin = AdminClient({"bootstrap.servers": f"{HOST}:{broker.port_of('PLAINTEXT')}"})
        for mechanism in (ScramMechanism.SCRAM_SHA_256, ScramMechanism.SCRAM_SHA_512):
            scram = ScramCredentialInfo(mechanism, 4096)
            change = UserScramCredentialUpsertion(ADMIN, scram, PASSWORD.encode())
            admin.alter_user_scram_credentials([change])[ADMIN].result(20)
    yield from _running(_secured(tmp_path_factory.mktemp("secured"), certificates, place))


@pytest.fixture(scope="package")
def secured(request: pytest.FixtureRequest) -> EmbeddedBroker:
    """A broker with ACLs; its only super user is `admin`. It must never die."""
    kind = getattr(request, "param", "directory")
    name = "secured_in_bucket" if kind == "bucket" else "secured_on_disk"
    broker: EmbeddedBroker = request.getfixturevalue(name)
    return broker


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

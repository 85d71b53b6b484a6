"""The settings of `logmirror broker`, as values."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from logmirror.config.destination_model import ArchiveBucketModel
from logmirror.config.destinations import archive_bucket

if TYPE_CHECKING:
    from logmirror.config.broker_model import BrokerModel
    from logmirror.config.destinations import S3Destination


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerSettings:
    """The settings of the embedded broker; see `BrokerModel`."""

    log_dir: tuple[str, ...]
    work_dir: str | None
    commit_interval_ms: int
    max_seals_per_second: int
    standby: bool
    standby_timeout_ms: int
    archive: tuple[str | S3Destination, ...]
    archive_cache_bytes: int
    archive_encoding: str | None
    listen: str
    auto_create: bool
    partitions: int
    flush_on_ack: bool
    topic: tuple[str, ...]
    override: tuple[str, ...]
    monitoring_port: int
    monitoring_host: str
    listener: tuple[str, ...]
    advertise: tuple[str, ...]
    allow_anonymous: bool
    tls_certificate: str | None
    tls_key: str | None
    tls_client_ca: str | None
    tls_client_auth: str
    sasl_mechanism: tuple[str, ...]
    super_user: tuple[str, ...]
    max_connections: int
    max_connections_per_address: int
    max_session_ms: int


def broker_settings(model: BrokerModel) -> BrokerSettings:
    """Return the settings of a valid section."""
    values: dict[str, Any] = {}
    for field in fields(BrokerSettings):
        value = getattr(model, field.name)
        values[field.name] = tuple(value) if isinstance(value, list) else value
    values["archive"] = tuple(
        archive_bucket(one) if isinstance(one, ArchiveBucketModel) else one
        for one in values["archive"]
    )
    return BrokerSettings(**values)

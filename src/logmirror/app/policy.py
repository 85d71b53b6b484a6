"""`logmirror policy print`: the least IAM policies for the buckets of a configuration."""

from __future__ import annotations

from typing import TYPE_CHECKING

from logmirror.app.specs import mirror_specs
from logmirror.locations import S3Location
from logmirror.mirror.ports import ArchiveSpec
from logmirror.stores.s3_policy import policies

if TYPE_CHECKING:
    from logmirror.config.settings import Settings


def bucket_policies(settings: Settings, *, compacts: bool = False) -> dict[str, dict[str, object]]:
    """Return the least IAM policies of a configuration, by identity; see `stores.s3_policy`."""
    written = [
        (archive.location, name, archive.keep_snapshots is not None)
        for spec in mirror_specs(settings)
        for name, archive in spec.destinations
        if isinstance(archive, ArchiveSpec) and isinstance(archive.location, S3Location)
    ]
    pruned = [(location, name) for location, name, prunes in written if prunes]
    locations = [location for location, _, _ in written]
    return policies(locations, pruned, compacts=compacts)

"""`logmirror policy print`: the least IAM policies for the buckets of a configuration."""

from __future__ import annotations

from typing import TYPE_CHECKING

from logmirror.app.specs import archive_link_specs, mirror_specs
from logmirror.archive.group_offsets import GROUPS_FOLDER
from logmirror.locations import S3Location
from logmirror.mirror.ports import ArchiveSpec
from logmirror.stores.s3_policy import create_only_policies, policies

if TYPE_CHECKING:
    from collections.abc import Iterator

    from logmirror.config.settings import Settings


def bucket_policies(settings: Settings, *, compacts: bool = False) -> dict[str, dict[str, object]]:
    """Return the least IAM policies of a configuration, by identity; see `stores.s3_policy`."""
    written = list(_written(settings))
    pruned = [(to, name) for to, name, archive in written if archive.keep_snapshots is not None]
    pruned += [
        (link.location, f"{GROUPS_FOLDER}/{link.destination}")
        for link in archive_link_specs(settings)
        if isinstance(link.location, S3Location)
    ]
    return policies([(to, name) for to, name, _ in written], pruned, compacts=compacts)


def conditional_write_policies(settings: Settings) -> dict[str, dict[str, object]]:
    """Return the policies that make buckets refuse to replace; see `stores.s3_policy`."""
    return create_only_policies(
        (to, name) for to, name, _ in _written(settings) if to.require_atomic_create
    )


def _written(settings: Settings) -> Iterator[tuple[S3Location, str, ArchiveSpec]]:
    """Yield location, destination and settings of each archive in a bucket."""
    for spec in mirror_specs(settings):
        for name, archive in spec.destinations:
            if isinstance(archive, ArchiveSpec) and isinstance(archive.location, S3Location):
                yield archive.location, name, archive

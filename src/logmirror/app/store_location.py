"""Where a destination of the configuration is: a location that `stores.opening` opens."""

from __future__ import annotations

from typing import TYPE_CHECKING

from logmirror.config.destinations import FilesystemDestination
from logmirror.locations import FolderLocation, S3Identity, S3Location
from logmirror.stores.mounts import mount_point

if TYPE_CHECKING:
    from logmirror.config.destinations import S3Credentials, S3Destination
    from logmirror.locations import StoreLocation


def store_location(destination: FilesystemDestination | S3Destination) -> StoreLocation:
    """Return the location of a directory or a bucket."""
    if isinstance(destination, FilesystemDestination):
        root = str(destination.root)
        return FolderLocation(root, mount=mount_point(root))
    return S3Location(
        bucket=destination.bucket,
        prefix=destination.prefix,
        region=destination.region,
        endpoint=destination.endpoint,
        path_style=destination.path_style,
        ca_file=destination.ca_file,
        checksums=destination.checksums.replace("-", "_"),
        sse=destination.sse,
        kms_key_id=destination.kms_key_id,
        require_atomic_create=destination.require_atomic_create,
        write=_identity(destination.write),
        read=_identity(destination.read),
    )


def _identity(credentials: S3Credentials) -> S3Identity:
    return S3Identity(
        access_key_id=credentials.access_key_id,
        secret_access_key=credentials.secret_access_key,
        session_token=credentials.session_token,
        profile=credentials.profile,
        role_arn=credentials.role_arn,
        sts_endpoint=credentials.sts_endpoint,
    )

"""Where a store is: values that travel from the configuration to whoever opens it."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class S3Identity:
    """Who we are for a store; empty fields are what the AWS tools would find."""

    access_key_id: str = ""
    secret_access_key: str = field(default="", repr=False)
    session_token: str = field(default="", repr=False)
    profile: str = ""
    """Of the AWS configuration files."""

    role_arn: str = ""
    """Assumed with what the other fields say."""

    sts_endpoint: str = ""
    """URL of the service that roles are asked of; empty: what the AWS tools would find."""


@dataclass(frozen=True, slots=True, kw_only=True)
class S3Location:
    """A prefix of a bucket."""

    bucket: str
    prefix: str = ""
    """Without slashes at its ends; empty: the whole bucket."""

    region: str = ""
    endpoint: str = ""
    """URL of a store that is not Amazon's."""

    path_style: bool = False
    """The bucket stands in the path, not in the host's name."""

    ca_file: str = ""
    checksums: str = "when_supported"
    """`when_required` for stores that know no checksums."""

    sse: str = ""
    """`AES256` or `aws:kms`; empty: as the bucket says."""

    kms_key_id: str = ""
    require_atomic_create: bool = True
    """False: the store may replace what is there; see `s3_read_back`."""

    write: S3Identity = field(default_factory=S3Identity)
    read: S3Identity = field(default_factory=S3Identity)

    def __str__(self) -> str:
        return f"s3://{self.bucket}/{self.prefix}".rstrip("/")

    @property
    def is_fencing_degraded(self) -> bool:
        """Whether two writers are kept apart only as well as a store that replaces allows."""
        return not self.require_atomic_create

    @property
    def encryption(self) -> dict[str, str]:
        """What is said of encryption when an object is made."""
        said = {"ServerSideEncryption": self.sse, "SSEKMSKeyId": self.kms_key_id}
        return {name: value for name, value in said.items() if value}


@dataclass(frozen=True, slots=True)
class FolderLocation:
    """A folder."""

    root: str
    """Absolute."""

    is_fencing_degraded = False
    """Folders create and never replace."""

    def __str__(self) -> str:
        return self.root


StoreLocation = FolderLocation | S3Location

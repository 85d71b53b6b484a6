"""Locations of stores: values that the configuration defines and `stores.opening` opens."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class S3Identity:
    """Credentials for a bucket. Empty fields: the defaults of the AWS SDK."""

    access_key_id: str = ""
    secret_access_key: str = field(default="", repr=False)
    session_token: str = field(default="", repr=False)
    profile: str = ""
    """Profile in the AWS configuration files."""

    role_arn: str = ""
    """ARN of a role that is assumed with the other credentials."""

    sts_endpoint: str = ""
    """URL of the Security Token Service. Empty: the default of the AWS SDK."""


@dataclass(frozen=True, slots=True, kw_only=True)
class S3Location:
    """A prefix of an S3 bucket, and how to access it."""

    bucket: str
    prefix: str = ""
    """Key prefix without leading or trailing slash. Empty: the whole bucket."""

    region: str = ""
    endpoint: str = ""
    """URL of a store other than AWS. Empty: AWS."""

    path_style: bool = False
    """Whether the bucket is part of the URL's path instead of the host name."""

    ca_file: str = ""
    checksums: str = "when_supported"
    """`when_supported`, or `when_required` for stores without checksums."""

    sse: str = ""
    """Server-side encryption, `AES256` or `aws:kms`. Empty: the bucket's default."""

    kms_key_id: str = ""
    require_atomic_create: bool = True
    """False: the store may replace existing objects; see `s3_read_back`."""

    write: S3Identity = field(default_factory=S3Identity)
    read: S3Identity = field(default_factory=S3Identity)

    def __str__(self) -> str:
        return f"s3://{self.bucket}/{self.prefix}".rstrip("/")

    @property
    def is_fencing_degraded(self) -> bool:
        """Whether fencing of two writers is weaker, because the store may replace objects."""
        return not self.require_atomic_create

    @property
    def encryption(self) -> dict[str, str]:
        """Return the encryption parameters of a PutObject request."""
        parameters = {"ServerSideEncryption": self.sse, "SSEKMSKeyId": self.kms_key_id}
        return {name: value for name, value in parameters.items() if value}


@dataclass(frozen=True, slots=True)
class FolderLocation:
    """A local directory."""

    root: str
    """Absolute path."""

    mount: str = field(default="", compare=False)
    """The mount point that contains it. Empty: not known."""

    is_fencing_degraded = False
    """Always False: files are created and never replaced."""

    def __str__(self) -> str:
        return self.root


StoreLocation = FolderLocation | S3Location

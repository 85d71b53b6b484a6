"""`s3://BUCKET/PREFIX` of a command line: the rest is as in the AWS tools."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from logmirror.errors import UsageError
from logmirror.locations import S3Location

if TYPE_CHECKING:
    from collections.abc import Mapping

SCHEME: Final = "s3://"


def bucket_location(option: str, text: str, environ: Mapping[str, str]) -> S3Location:
    """Return the location that a text means.

    Args:
        option: The option that has it, for the error.
        text: `s3://BUCKET` or `s3://BUCKET/PREFIX`.
        environ: Has region and endpoint, under the names of the AWS tools. Credentials are the
            defaults of the AWS SDK.

    Raises:
        UsageError: It has no bucket, or a prefix with an empty part.
    """
    bucket, _, prefix = text.removeprefix(SCHEME).partition("/")
    prefix = prefix.rstrip("/")
    if not bucket or (prefix and not all(prefix.split("/"))):
        raise UsageError(f"{option} must be s3://BUCKET/PREFIX", found=text)
    endpoint = environ.get("AWS_ENDPOINT_URL_S3") or environ.get("AWS_ENDPOINT_URL", "")
    return S3Location(
        bucket=bucket,
        prefix=prefix,
        region=environ.get("AWS_REGION") or environ.get("AWS_DEFAULT_REGION", ""),
        endpoint=endpoint,
        path_style=bool(endpoint),
    )

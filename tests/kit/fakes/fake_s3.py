"""A fake of Amazon's S3 and STS on loopback: moto's server, in a thread of the tests.

It does not judge: it keeps everything in memory, accepts every signature and every checksum, and
lets several completions of uploads to one name succeed. It supports two features that the real
server of `kit.servers.s3` lacks: roles to assume, and the headers of encryption, which it stores
with the object.

    with FakeS3() as server:
        server.client("sts")                        any service's boto3 client
        S3Store(server.location(server.new_bucket()))
"""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Any, Final, Self

import boto3
from moto.server import ThreadedMotoServer

from kit.servers.machine import HOST
from logmirror.locations import S3Identity, S3Location

if TYPE_CHECKING:
    from types import TracebackType

REGION: Final = "us-east-1"


class FakeS3:
    """The server; use it in a `with`."""

    def __init__(self) -> None:
        self._server = ThreadedMotoServer(ip_address=HOST, port=0, verbose=False)

    def __enter__(self) -> Self:
        self._server.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._server.stop()

    @property
    def endpoint(self) -> str:
        """URL of the server."""
        _, port = self._server.get_host_and_port()
        return f"http://{HOST}:{port}"

    def client(self, service: str = "s3", identity: S3Identity | None = None) -> Any:
        """Return a boto3 client of a service."""
        found = identity or S3Identity(access_key_id="tester", secret_access_key="secret")
        return boto3.client(
            service,
            endpoint_url=self.endpoint,
            region_name=REGION,
            aws_access_key_id=found.access_key_id,
            aws_secret_access_key=found.secret_access_key,
        )

    def new_bucket(self) -> str:
        """Create a bucket and return its name."""
        name = f"bucket-{secrets.token_hex(4)}"
        self.client().create_bucket(Bucket=name)
        return name

    def location(self, bucket: str, **more: Any) -> S3Location:
        """Return the location of a store in this bucket."""
        identity = S3Identity(access_key_id="tester", secret_access_key="secret")
        base = {"read": identity, "write": identity, "region": REGION, "path_style": True}
        return S3Location(bucket=bucket, endpoint=self.endpoint, **(base | more))

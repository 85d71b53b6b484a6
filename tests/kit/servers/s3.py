"""A real S3 server on loopback: VersityGW, which stores objects as plain files in a directory.

It is built once with Go's tools and kept outside the repository. It verifies signatures and
checksums, and its conditional writes are atomic.

    with S3Server(folder) as server:
        bucket = server.new_bucket()
        server.location(bucket)         for `S3Store`
        server.destination(bucket)      for a configuration
        server.files(bucket)            its objects as files, without the API
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import socket
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

import boto3

from kit.servers.go import go_program
from kit.servers.machine import HOST, Process, free_ports
from logmirror.locations import S3Identity, S3Location

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_START_TIMEOUT_S: Final = 180
LOG_DIR: Final = "kafka"
"""The prefix of a broker's log dir."""

REGION: Final = "us-east-1"


def _program() -> Path:
    return go_program("versitygw")


@dataclass(frozen=True)
class LogBucket:
    """A broker's log dir in a bucket of a server; through a proxy, if there is an endpoint."""

    server: S3Server
    bucket: str
    endpoint: str = ""

    @property
    def url(self) -> str:
        """The value of `--log-dir`."""
        return f"s3://{self.bucket}/{LOG_DIR}"

    @property
    def environment(self) -> dict[str, str]:
        """What a process needs to reach it."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint or self.server.endpoint,
            "AWS_ACCESS_KEY_ID": self.server.access_key,
            "AWS_SECRET_ACCESS_KEY": self.server.secret_key,
            "AWS_REGION": REGION,
        }

    @property
    def files(self) -> Path:
        """Its objects as files."""
        return self.server.files(self.bucket) / LOG_DIR

    def matching(self, pattern: str) -> list[Path]:
        """The objects whose names match, sorted.

        `Path.glob` fails if the server removes a folder meanwhile.
        """
        root, depth = self.files, len(Path(pattern).parts)
        paths = (Path(folder, name) for folder, _, names in os.walk(root) for name in names)
        found = (path for path in paths if len(path.relative_to(root).parts) == depth)
        return sorted(path for path in found if path.match(pattern))


class S3Server:
    """The server; use it in a `with`.

    Args:
        folder: Its directory; objects are in its `objects`.
        certificate: Private key and certificate in one PEM file; it then accepts TLS only.
    """

    def __init__(self, folder: Path, certificate: Path | None = None) -> None:
        self._folder, self._certificate = folder, certificate
        self._port = free_ports(1)[0]
        self._process: Process | None = None
        self.access_key, self.secret_key = "logmirror-tests", secrets.token_hex(16)

    @property
    def endpoint(self) -> str:
        """URL of the server."""
        return f"{'https' if self._certificate else 'http'}://{HOST}:{self._port}"

    def start(self) -> Self:
        """Start it and wait until it accepts connections; a restart keeps port and objects."""
        objects = self._folder / "objects"
        objects.mkdir(parents=True, exist_ok=True)
        self._process = Process(
            self._command(objects),
            log=self._folder / "server.log",
            environment={
                "ROOT_ACCESS_KEY_ID": self.access_key,
                "ROOT_SECRET_ACCESS_KEY": self.secret_key,
                "HOME": str(self._folder),
            },
        )
        deadline = time.monotonic() + _START_TIMEOUT_S
        while True:
            try:
                socket.create_connection((HOST, self._port), 1).close()
            except OSError:
                log = (self._folder / "server.log").read_text(errors="replace")
                assert self._process.alive, log
                assert time.monotonic() < deadline, log
                time.sleep(0.05)
            else:
                return self

    def _command(self, objects: Path) -> list[str]:
        """Return the command that serves a folder."""
        users = self._folder / "users"
        users.mkdir(exist_ok=True)
        options = ["--port", f"{HOST}:{self._port}", "--quiet", "--iam-dir", str(users)]
        if self._certificate:
            options += ["--cert", str(self._certificate), "--key", str(self._certificate)]
        return [str(_program()), *options, "posix", str(objects)]

    def kill(self) -> None:
        """End it like `kill -9`."""
        assert self._process is not None
        self._process.end(kill=True)

    def pause(self) -> None:
        """Pause it: connections are accepted, and no request gets a response."""
        assert self._process is not None
        self._process.signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Resume it after `pause`."""
        assert self._process is not None
        self._process.signal(signal.SIGCONT)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.end(kill=True)

    def client(self) -> Any:
        """Return a boto3 client with all permissions."""
        return boto3.client(
            "s3",
            endpoint_url=self.endpoint,
            region_name=REGION,
            aws_access_key_id=self.access_key,
            aws_secret_access_key=self.secret_key,
        )

    def new_bucket(self) -> str:
        """Create a bucket and return its name."""
        name = f"bucket-{secrets.token_hex(4)}"
        self.client().create_bucket(Bucket=name)
        return name

    def new_user(self) -> S3Identity:
        """Create a user without permissions; `allow` grants them."""
        found = S3Identity(
            access_key_id=f"user-{secrets.token_hex(4)}", secret_access_key=secrets.token_hex(16)
        )
        keys = ["--access", self.access_key, "--secret", self.secret_key]
        new = ["--access", found.access_key_id, "--secret", found.secret_access_key]
        command = [_program(), "admin", *keys, "--endpoint-url", self.endpoint]
        subprocess.run(
            [*command, "create-user", *new, "--role", "user"], check=True, capture_output=True
        )
        return found

    def allow(self, bucket: str, *allowed: tuple[S3Identity, Sequence[Mapping[str, Any]]]) -> None:
        """Set the policy statements of users; they replace all earlier ones."""
        statements = [
            {**statement, "Principal": {"AWS": [user.access_key_id]}}
            for user, statements in allowed
            for statement in statements
        ]
        policy = {"Version": "2012-10-17", "Statement": statements}
        self.client().put_bucket_policy(Bucket=bucket, Policy=json.dumps(policy))

    def location(self, bucket: str, prefix: str = "", *, endpoint: str = "") -> S3Location:
        """Return the location of a store in this bucket, with another address if given."""
        identity = S3Identity(access_key_id=self.access_key, secret_access_key=self.secret_key)
        return S3Location(
            bucket=bucket,
            prefix=prefix,
            region=REGION,
            endpoint=endpoint or self.endpoint,
            path_style=True,
            write=identity,
            read=identity,
        )

    def destination(self, bucket: str, **more: object) -> dict[str, object]:
        """Return a destination for a configuration."""
        keys = {"access-key-id": self.access_key, "secret-access-key": self.secret_key}
        base: dict[str, object] = {
            "type": "s3",
            "bucket": bucket,
            "region": REGION,
            "endpoint": self.endpoint,
            "credentials": keys,
        }
        return base | {key.replace("_", "-"): value for key, value in more.items()}

    def files(self, bucket: str) -> Path:
        """Return the directory with a bucket's objects as files."""
        return self._folder / "objects" / bucket

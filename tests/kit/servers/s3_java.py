"""A second real S3 server, as another opinion: S3Proxy, from Maven, on a directory.

Another code base than VersityGW, in another language. Its conditional writes are atomic, too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kit.servers.machine import HOST, java
from kit.servers.maven import maven_jars
from kit.servers.s3 import REGION, S3Server

if TYPE_CHECKING:
    from pathlib import Path

_VERSION: Final = "4.1.0"
_ARTIFACTS: Final = (
    ("org.gaul", "s3proxy", _VERSION),
    ("com.fasterxml.jackson.core", "jackson-annotations", "2.21"),  # it fails with the one it names
)
_LOGGING: Final = """<configuration>
<appender name="out" class="ch.qos.logback.core.ConsoleAppender">
<encoder><pattern>%d %level %logger %msg%n</pattern></encoder></appender>
<root level="WARN"><appender-ref ref="out"/></root></configuration>
"""


class JavaS3Server(S3Server):
    """The server; see `S3Server`. It has no users and no TLS."""

    def _command(self, objects: Path) -> list[str]:
        settings = {
            "s3proxy.authorization": "aws-v2-or-v4",
            "s3proxy.identity": self.access_key,
            "s3proxy.credential": self.secret_key,
            "s3proxy.endpoint": f"http://{HOST}:{self._port}",
            "s3proxy.region": REGION,
            "jclouds.provider": "filesystem-nio2",
            "jclouds.filesystem.basedir": str(objects),
            "jclouds.identity": "unused",
            "jclouds.credential": "unused",
        }
        written = self._folder / "s3proxy.properties"
        written.write_text("".join(f"{name}={value}\n" for name, value in settings.items()))
        logging = self._folder / "logback.xml"
        logging.write_text(_LOGGING)
        jars = maven_jars(f"s3proxy-{_VERSION}", _ARTIFACTS)
        options = ["-Xmx512m", f"-Dlogback.configurationFile={logging}", "-cp", f"{jars}/*"]
        return [java(), *options, "org.gaul.s3proxy.Main", "--properties", str(written)]

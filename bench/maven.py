"""Jars of the peers, from Maven, kept in the cache of the tests."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from kit.servers.machine import cache_folder, program  # after the path is set

_PLUGIN = "org.apache.maven.plugins:maven-dependency-plugin:3.8.1:copy-dependencies"
_ALONE = (
    "<exclusions><exclusion><groupId>*</groupId><artifactId>*</artifactId></exclusion></exclusions>"
)


def maven_jars(
    name: str, artifacts: tuple[tuple[str, str, str], ...], *, alone: bool = False
) -> Path:
    """Return the folder with these artifacts and their dependencies.

    Args:
        name: Of the folder.
        artifacts: Group, artifact, version of each.
        alone: Without what they need.
    """
    home = cache_folder() / name
    if (home / "done").exists():
        return home
    home.mkdir(parents=True, exist_ok=True)
    dependencies = "".join(
        f"<dependency><groupId>{group}</groupId><artifactId>{artifact}</artifactId>"
        f"<version>{version}</version>{_ALONE if alone else ''}</dependency>"
        for group, artifact, version in artifacts
    )
    (home / "pom.xml").write_text(
        '<project xmlns="http://maven.apache.org/POM/4.0.0"><modelVersion>4.0.0</modelVersion>'
        "<groupId>bench</groupId><artifactId>bench</artifactId><version>1</version>"
        f"<dependencies>{dependencies}</dependencies></project>"
    )
    options = ["-q", "-B", "--strict-checksums", "-f", str(home / "pom.xml"), _PLUGIN]
    arguments = ["-DincludeScope=runtime", f"-DoutputDirectory={home}"]
    # Its warnings are no part of the figures that a script writes to its output.
    subprocess.run([program("mvn"), *options, *arguments], check=True, stdout=sys.stderr)
    (home / "done").touch()
    return home

"""Jars from Maven, kept with the other downloads of the tests and the benchmarks."""

from __future__ import annotations

import fcntl
import subprocess
from typing import TYPE_CHECKING, Final

from kit.servers.machine import cache_folder, program

if TYPE_CHECKING:
    from collections.abc import Collection
    from pathlib import Path

_COPY: Final = "org.apache.maven.plugins:maven-dependency-plugin:3.8.1:copy-dependencies"
_ALONE: Final = (
    "<exclusions><exclusion><groupId>*</groupId><artifactId>*</artifactId></exclusion></exclusions>"
)


def maven_jars(
    name: str, artifacts: Collection[tuple[str, str, str]], *, alone: bool = False
) -> Path:
    """Return a cached folder with these artifacts; the first use on a machine downloads them.

    Args:
        name: Of the folder.
        artifacts: Group, artifact and version of each.
        alone: Without their dependencies.
    """
    home = cache_folder() / name
    home.mkdir(parents=True, exist_ok=True)
    with (home / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two test runs may begin at once
        if not (home / "done").exists():
            copy_jars(artifacts, project=home, target=home, alone=alone)
            (home / "done").touch()
    return home


def copy_jars(
    artifacts: Collection[tuple[str, str, str]], *, project: Path, target: Path, alone: bool = False
) -> None:
    """Copy artifacts, and their dependencies at runtime, into a folder.

    Args:
        artifacts: Group, artifact and version of each.
        project: Directory of Maven's project file, which is written.
        target: Directory of the jars.
        alone: Without their dependencies.

    Raises:
        RuntimeError: Maven could not fetch them; with its output.
    """
    dependencies = "".join(
        f"<dependency><groupId>{group}</groupId><artifactId>{artifact}</artifactId>"
        f"<version>{version}</version>{_ALONE if alone else ''}</dependency>"
        for group, artifact, version in artifacts
    )
    (project / "pom.xml").write_text(
        '<project xmlns="http://maven.apache.org/POM/4.0.0"><modelVersion>4.0.0</modelVersion>'
        "<groupId>logmirror</groupId><artifactId>jars</artifactId><version>1</version>"
        f"<dependencies>{dependencies}</dependencies></project>"
    )
    maven = program("mvn", home_variable="MAVEN_HOME")
    options = ["-q", "-B", "--strict-checksums", "-f", str(project / "pom.xml")]
    result = subprocess.run(
        [maven, *options, _COPY, "-DincludeScope=runtime", f"-DoutputDirectory={target}"],
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        check=False,
    )
    if result.returncode:
        wanted = ", ".join(map(":".join, artifacts))
        message = f"Maven could not fetch {wanted}:\n{result.stdout[-3000:]}"
        raise RuntimeError(message)

"""Rules for destinations in S3: incomplete credentials, and the directory of the objects."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from logmirror.config.values import mapping, text
from logmirror.references import Reference

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from logmirror.config.source import Source

_PAIRS: Final = (
    ("access-key-id", "secret-access-key"),
    ("access-key-id-env", "secret-access-key-env"),
)
_IDENTITY_KEYS: Final = ("access-key-id", "access-key-id-env", "profile")


def check_destination(
    source: Source,
    path: str,
    destination: dict[str, Any],
    environ: Mapping[str, str],
    *,
    needs_variables: bool,
) -> None:
    """Report settings of one S3 destination that contradict each other.

    Replaces names of environment variables (`access-key-id-env`) by the values of the variables.
    """
    if text(destination, "type") != "s3":
        return
    if destination.get("kms-key-id") is not None and destination.get("sse") != "aws:kms":
        source.add_problem(f"{path}.kms-key-id", "is only for sse: aws:kms", "write sse: aws:kms")
    for where, identity in identities(destination, path):
        _check_identity(source, where, identity)
        _resolve_variables(source, where, identity, environ, is_needed=needs_variables)


def check_archive(
    source: Source, path: str, archive: dict[str, Any], environ: Mapping[str, str]
) -> None:
    """Do the same for an archive of the embedded broker, which needs its variables to start."""
    for where, identity in identities(archive, path):
        _check_identity(source, where, identity)
        _resolve_variables(source, where, identity, environ, is_needed=True)


def _check_identity(source: Source, where: str, identity: dict[str, Any]) -> None:
    for key, secret in _PAIRS:
        given = [name for name in (key, secret) if identity.get(name) is not None]
        if len(given) == 1:
            missing = secret if given == [key] else key
            source.add_problem(f"{where}.{missing}", f"is required with {given[0]}")
    given = [name for name in _IDENTITY_KEYS if identity.get(name) is not None]
    for other in given[1:]:
        source.add_problem(f"{where}.{other}", f"{given[0]} is set too", "keep one of them")
    if identity.get("session-token") is not None and not given:
        message = "requires an access-key-id"
        source.add_problem(f"{where}.session-token", message, "remove it")
    if identity.get("sts-endpoint") is not None and identity.get("role-arn") is None:
        source.add_problem(f"{where}.sts-endpoint", "requires a role-arn", "remove it")


def _resolve_variables(
    source: Source,
    where: str,
    identity: dict[str, Any],
    environ: Mapping[str, str],
    *,
    is_needed: bool,
) -> None:
    for key, variable in zip(*_PAIRS, strict=True):
        if (name := text(identity, variable)) is not None:
            if name not in environ and is_needed:
                message = f"the environment variable {name} is not set"
                source.add_problem(f"{where}.{variable}", message)
            elif name not in environ:
                source.unset.append(name)
            source.references[f"{where}.{key}"] = Reference(name)
            identity.setdefault(key, environ.get(name, ""))
            del identity[variable]


def identities(destination: dict[str, Any], path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the credentials of a destination at `path`, each with its own path."""
    credentials = mapping(destination, "credentials")
    if credentials is None:
        return
    yield f"{path}.credentials", credentials
    for name in ("write", "read"):
        if (identity := mapping(credentials, name)) is not None:
            yield f"{path}.credentials.{name}", identity


def directory(destination: dict[str, Any], child: str) -> str | None:
    """Return a path that identifies where the objects are written; None if that is unknown."""
    bucket = text(destination, "bucket")
    if bucket is None:
        return None
    host = _host(text(destination, "endpoint") or "")
    prefix = (text(destination, "prefix") or "").strip("/")
    parts = (part for part in (host, bucket, prefix, child) if part)
    return f"/s3/{'/'.join(parts)}"


_PORTS: Final = {"http": 80, "https": 443}


def _host(endpoint: str) -> str:
    """Return host and port of an endpoint in a normal form."""
    scheme, _, host = endpoint.lower().rstrip("/").partition("://")
    has_port = ":" in host.rpartition("]")[2]
    return f"{host}:{_PORTS.get(scheme)}" if host and not has_port else host

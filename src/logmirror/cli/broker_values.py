"""The options of `logmirror broker`: given, from a file, or defaults."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

from logmirror.config.addresses import (
    parse_address,
    parse_advertised,
    parse_listener,
    parse_log_dir,
    parse_override,
    parse_topics,
)
from logmirror.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from logmirror.broker.options import Archive, BrokerOptions, Listener
    from logmirror.config.destinations import S3Destination

DEFAULTS: Final = {
    "work_dir": None,
    "commit_interval_ms": 100,
    "max_seals_per_second": 20,
    "standby": False,
    "standby_timeout_ms": 9000,
    "archive": (),
    "archive_encoding": None,
    "archive_cache_bytes": 1024**3,
    "listen": "127.0.0.1:9092",
    "auto_create": True,
    "partitions": 1,
    "flush_on_ack": True,
    "topic": (),
    "override": (),
    "monitoring_port": 0,
    "monitoring_host": "127.0.0.1",
    "listener": (),
    "advertise": (),
    "allow_anonymous": False,
    "tls_certificate": None,
    "tls_key": None,
    "tls_client_ca": None,
    "tls_client_auth": "none",
    "sasl_mechanism": (),
    "super_user": (),
    "max_connections": 1000,
    "max_connections_per_address": 0,
    "max_session_ms": 0,
}
"""Those of `config.broker_model`, which takes long to load. A test compares the two."""


def broker_options(value: Callable[[str], Any], **fixed: Any) -> BrokerOptions:  # noqa: ANN401  # fields
    """Return the options: those that a file may have, and the others."""
    from logmirror.broker.options import (  # noqa: PLC0415  # only this command needs them
        BrokerOptions,
        ClientAuth,
    )

    def file(name: str) -> Path | None:
        path = value(name)
        return None if path is None else Path(path)

    host, port = _parsed("--listen", parse_address, value("listen"))
    parse = functools.partial(parse_topics, partitions=value("partitions"))
    bucket = _bucket(value)
    log_dirs = [Path(path) for path in value("log_dir") if str(path) != bucket]
    if bucket:
        log_dirs.insert(0, Path())  # replaced by its working folder
    return BrokerOptions(
        log_dir=log_dirs[0],
        more_log_dirs=tuple(log_dirs[1:]),
        bucket=bucket,
        commit_interval_ms=value("commit_interval_ms"),
        max_seals_per_s=value("max_seals_per_second"),
        standby=value("standby"),
        standby_timeout_ms=value("standby_timeout_ms"),
        archives=_archives(value("archive"), value("archive_encoding")),
        archive_cache_bytes=value("archive_cache_bytes"),
        host=host,
        port=port,
        auto_create_topics=value("auto_create"),
        default_partitions=value("partitions"),
        flush_on_ack=value("flush_on_ack"),
        topics=tuple(_parsed("--topic", parse, value("topic")).items()),
        overrides=dict(_parsed("--override", parse_override, text) for text in value("override")),
        monitoring_port=value("monitoring_port"),
        monitoring_host=value("monitoring_host"),
        listeners=_listeners(value("listener"), value("advertise")),
        allow_anonymous=value("allow_anonymous"),
        tls_certificate=file("tls_certificate"),
        tls_key=file("tls_key"),
        tls_client_ca=file("tls_client_ca"),
        tls_client_auth=ClientAuth(value("tls_client_auth")),
        sasl_mechanisms=tuple(value("sasl_mechanism")),
        super_users=tuple(value("super_user")),
        max_connections=value("max_connections"),
        max_connections_per_address=value("max_connections_per_address"),
        max_session_ms=value("max_session_ms"),
        **fixed,
    )


def _bucket(value: Callable[[str], Any]) -> str:
    """Return the log dir if it is in a bucket, else an empty text.

    Raises:
        UsageError: It is given beside others, or an option does not apply.
    """
    names = [_parsed("--log-dir", parse_log_dir, name) for name in value("log_dir")]
    found = [name for name in names if name.startswith("s3://")]
    if len(found) > 1:
        raise UsageError("only one log directory may be in a bucket", found=names)
    if found and len(names) > 1 and value("standby"):
        raise UsageError("a standby has no log directory on a disk", found=names)
    if not found and value("work_dir") is not None:
        raise UsageError("--work-dir is for a log directory in a bucket", found=names)
    if not found and value("standby"):
        raise UsageError("--standby is for a log directory in a bucket", found=names)
    return found[0] if found else ""


def _archives(texts: Iterable[str | S3Destination], encoding: str | None) -> tuple[Archive, ...]:
    if not texts:
        return ()
    from logmirror.api import open_archives  # noqa: PLC0415  # only archives need it

    utf8 = None if encoding is None else encoding == "utf8"
    return open_archives(texts, os.environ, utf8=utf8)


def values(config: Path | None, **given: object) -> Callable[[str], Any]:
    """Return a function for the value of an option: given, in the file, or the default.

    Raises:
        UsageError: The file has no section `broker`, or nothing has the log directory.
        ConfigError: The file is not valid.
    """
    section = None
    if config is not None:
        import logmirror  # noqa: PLC0415  # loads the configuration's models

        section = logmirror.load(config, needs_variables=False).broker
        if section is None:
            raise UsageError("the configuration has no section broker", file=str(config))
    elif not given["log_dir"]:
        raise UsageError("no log directory", hint="give --log-dir, or a file with -c")

    def value(name: str) -> object:
        if given[name] not in (None, []):
            return given[name]
        return DEFAULTS[name] if section is None else getattr(section, name)

    return value


_Given = TypeVar("_Given")
_Parsed = TypeVar("_Parsed")


def _parsed(option: str, parse: Callable[[_Given], _Parsed], given: _Given) -> _Parsed:
    try:
        return parse(given)
    except ValueError as error:
        raise UsageError(f"{option} {error}", found=given) from error


def _listeners(texts: Iterable[str], advertised: Iterable[str]) -> tuple[Listener, ...]:
    """Parse the listeners and their advertised addresses."""
    from logmirror.broker.options import Listener, SecurityProtocol  # noqa: PLC0415  # see above

    addresses = dict(_parsed("--advertise", parse_advertised, text) for text in advertised)
    found = []
    for text in texts:
        name, protocol, host, port = _parsed("--listener", parse_listener, text)
        advertised_host, advertised_port = addresses.pop(name, ("", 0))
        found.append(
            Listener(
                name=name,
                host=host,
                port=port,
                protocol=SecurityProtocol(protocol),
                advertised_host=advertised_host,
                advertised_port=advertised_port,
            )
        )
    if addresses:
        raise UsageError(
            "an advertised address without a listener",
            hint="give --listener NAME=PROTOCOL://HOST:PORT with the same name",
            names=sorted(addresses),
        )
    return tuple(found)

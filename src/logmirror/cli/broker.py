"""`logmirror broker`: the embedded Kafka-compatible broker."""

from __future__ import annotations

import contextlib
import functools
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, TypeVar

import typer

from logmirror.cli.broker_cost import (
    ExplainCostOption,
    PriceOption,
    ReadRateOption,
    WriteRateOption,
    explain,
)
from logmirror.cli.options import FormatOption, LogLevelOption, yaml_files
from logmirror.config.addresses import (
    parse_address,
    parse_advertised,
    parse_listener,
    parse_override,
    parse_topic,
)
from logmirror.demo import fill
from logmirror.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from logmirror.broker.options import Archive, BrokerOptions, Listener
    from logmirror.config.destinations import S3Destination

_DEFAULTS: Final = {
    "work_dir": None,
    "commit_interval_ms": 100,
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


_ConfigOption = Annotated[
    Path | None,
    typer.Option(
        "-c",
        "--config",
        help="A YAML file with a section `broker`; the options override it.",
        show_default=False,
        autocompletion=yaml_files,
    ),
]
_LogDirOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="DIR",
        help="Directory of the topics; created if missing. Repeatable: a new partition goes to "
        "the directory with the fewest. Or s3://BUCKET/PREFIX.",
        show_default=False,
    ),
]
_WorkDirOption = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        help="Directory for copies of what is in the bucket, with --log-dir s3://...",
        show_default="a temporary one",
    ),
]
_CommitIntervalOption = Annotated[
    int | None,
    typer.Option(
        min=1,
        max=60_000,
        help="Least time between two objects of acknowledged records, with --log-dir s3://...",
        show_default="100",
    ),
]
_StandbyOption = Annotated[
    bool | None,
    typer.Option(
        "--standby/--no-standby",
        help="With --log-dir s3://...: wait until its owner is gone, then take over.",
        show_default="no-standby",
    ),
]
_StandbyTimeoutOption = Annotated[
    int | None,
    typer.Option(
        min=5_000,
        max=3_600_000,
        help="How long its owner must show no sign of life, with --standby.",
        show_default="9000",
    ),
]
_ArchiveOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="DIR|s3://BUCKET/PREFIX",
        help="Serve an archive of a mirror as read-only topics. Repeatable.",
        show_default=False,
    ),
]
_ArchiveEncodingOption = Annotated[
    Literal["base64", "utf8"] | None,
    typer.Option(
        help="The `encoding` with which NDJSON was archived, which is not served without.",
        show_default=False,
    ),
]
_ArchiveCacheOption = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Limit for the local copies of objects of archives.",
        show_default="1073741824",
    ),
]
_ListenOption = Annotated[
    str | None,
    typer.Option(help="HOST:PORT; port 0: any free port.", show_default="127.0.0.1:9092"),
]
_AutoCreateOption = Annotated[
    bool | None,
    typer.Option(
        "--auto-create/--no-auto-create",
        help="Create a topic when a client asks for its metadata.",
        show_default="auto-create",
    ),
]
_PartitionsOption = Annotated[
    int | None,
    typer.Option(min=1, help="Default number of partitions of a new topic.", show_default="1"),
]
_FlushOnAckOption = Annotated[
    bool | None,
    typer.Option(
        "--flush-on-ack/--no-flush-on-ack",
        help="Flush a record before its response. Without, a power loss can take away the records "
        "of the last second.",
        show_default="flush-on-ack",
    ),
]
_TopicOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME[:PARTITIONS]",
        help="Create this topic if it does not exist. Repeatable.",
        show_default=False,
    ),
]
_OverrideOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME=VALUE",
        help="Default of a topic setting, by Kafka's name of the broker setting: "
        "log.retention.ms=604800000. Repeatable.",
        show_default=False,
    ),
]
_AcceptDataLossOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="TOPIC-PARTITION",
        help="Open this partition although acknowledged records are damaged. Repeatable.",
        show_default=False,
    ),
]
_MonitoringPortOption = Annotated[
    int | None,
    typer.Option(
        min=0,
        max=65535,
        help="Port of /metrics, /livez, /readyz and /status.json; 0: none.",
        show_default="0",
    ),
]
_MonitoringHostOption = Annotated[
    str | None,
    typer.Option(help="IP address of that port.", show_default="127.0.0.1"),
]
_DemoDataOption = Annotated[
    Literal["flights"] | None,
    typer.Option(
        help="Fill the topic of this name with real records; needs logmirror[demo].",
        show_default=False,
    ),
]

_StopWithStdinOption = Annotated[
    bool,
    typer.Option(
        "--stop-with-stdin",
        help="Stop when stdin ends, for a process that starts a broker for itself.",
    ),
]


_ListenerOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="[NAME=]PROTOCOL://HOST:PORT",
        help="Instead of --listen: a listener with a security protocol. Repeatable.",
        show_default=False,
    ),
]
_AdvertiseOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME=HOST:PORT",
        help="The address at which clients of a listener reach it. Repeatable.",
        show_default=False,
    ),
]
_AllowAnonymousOption = Annotated[
    bool | None,
    typer.Option(
        "--allow-anonymous/--no-allow-anonymous",
        help="Let other hosts connect to a listener that does not authenticate clients.",
        show_default="no-allow-anonymous",
    ),
]
_CertificateOption = Annotated[
    Path | None, typer.Option(help="Certificate of the broker, PEM.", show_default=False)
]
_KeyOption = Annotated[
    Path | None, typer.Option(help="Its key, PEM, if in another file.", show_default=False)
]
_ClientCaOption = Annotated[
    Path | None, typer.Option(help="Authorities of clients' certificates, PEM.", show_default=False)
]
_ClientAuthOption = Annotated[
    Literal["none", "requested", "required"] | None,
    typer.Option(help="Whether clients of SSL listeners show a certificate.", show_default="none"),
]
_MechanismOption = Annotated[
    list[str] | None,
    typer.Option(
        help="PLAIN, SCRAM-SHA-256 or SCRAM-SHA-512. Repeatable. Default: all, but PLAIN only "
        "with TLS or on loopback.",
        show_default=False,
    ),
]
_SuperUserOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="User:NAME",
        help="May do everything; all others need ACLs. Repeatable. Default: no ACLs.",
        show_default=False,
    ),
]
_ConnectionsOption = Annotated[
    int | None,
    typer.Option(
        min=1, help="Connections; half the limit of open files is the most.", show_default="1000"
    ),
]
_PerAddressOption = Annotated[
    int | None,
    typer.Option(min=0, help="Connections of one client address; 0: no limit.", show_default="0"),
]
_SessionOption = Annotated[
    int | None,
    typer.Option(
        min=0,
        help="How long a login by SASL lasts; then the client repeats it, or is disconnected. "
        "0: without an end.",
        show_default="0",
    ),
]


def broker(  # noqa: PLR0913  # one parameter for each option
    *,
    config: _ConfigOption = None,
    log_dir: _LogDirOption = None,
    work_dir: _WorkDirOption = None,
    commit_interval_ms: _CommitIntervalOption = None,
    standby: _StandbyOption = None,
    standby_timeout_ms: _StandbyTimeoutOption = None,
    archive: _ArchiveOption = None,
    archive_encoding: _ArchiveEncodingOption = None,
    archive_cache_bytes: _ArchiveCacheOption = None,
    listen: _ListenOption = None,
    auto_create: _AutoCreateOption = None,
    partitions: _PartitionsOption = None,
    flush_on_ack: _FlushOnAckOption = None,
    topic: _TopicOption = None,
    override: _OverrideOption = None,
    accept_data_loss: _AcceptDataLossOption = None,
    monitoring_port: _MonitoringPortOption = None,
    monitoring_host: _MonitoringHostOption = None,
    demo_data: _DemoDataOption = None,
    listener: _ListenerOption = None,
    advertise: _AdvertiseOption = None,
    allow_anonymous: _AllowAnonymousOption = None,
    tls_certificate: _CertificateOption = None,
    tls_key: _KeyOption = None,
    tls_client_ca: _ClientCaOption = None,
    tls_client_auth: _ClientAuthOption = None,
    sasl_mechanism: _MechanismOption = None,
    super_user: _SuperUserOption = None,
    max_connections: _ConnectionsOption = None,
    max_connections_per_address: _PerAddressOption = None,
    max_session_ms: _SessionOption = None,
    stop_with_stdin: _StopWithStdinOption = False,
    explain_cost: ExplainCostOption = False,
    write_rate_mb: WriteRateOption = 1.0,
    read_rate_mb: ReadRateOption = 0.0,
    price: PriceOption = None,
    output: FormatOption = "table",
    log_level: LogLevelOption = "info",
) -> None:
    """Run the embedded Kafka-compatible broker until SIGTERM or Ctrl-C.

    Acknowledged records are on disk, unless --no-flush-on-ack. Prints its address when it listens.
    """
    given = locals()
    from logmirror.monitoring.logs import log_to_stderr  # noqa: PLC0415  # only this command needs it

    value = _values(config, **{name: given[name] for name in ("log_dir", *_DEFAULTS)})
    log_to_stderr(log_level)
    loss = tuple(accept_data_loss or ())
    options = _options(value, stop_with_stdin=stop_with_stdin, accept_data_loss=loss)
    if explain_cost:
        explain(options, (write_rate_mb, read_rate_mb), price or (), as_json=output == "json")
        return
    directory = value("work_dir")
    _serve(options, None if directory is None else Path(directory), demo_data)


def _serve(options: BrokerOptions, work_dir: Path | None, demo_data: str | None) -> None:
    from logmirror.broker.server import serve  # noqa: PLC0415  # only this command needs it

    with contextlib.ExitStack() as running:
        if demo_data is not None:
            fill.check_installed()

        def on_ready(host: str, port: int) -> None:
            typer.echo(f"listening on {host}:{port}")
            if demo_data is not None:
                address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
                running.enter_context(fill.filling(address, demo_data))

        if options.bucket:
            from logmirror.api import serve_bucket  # noqa: PLC0415  # loads the client of S3

            def on_standby() -> None:
                typer.echo(f"standby: waiting until the owner of {options.bucket} is gone")

            serve_bucket(options, work_dir, on_ready, on_standby)
        else:
            serve(options, on_ready=on_ready)


def _options(value: Callable[[str], Any], **fixed: Any) -> BrokerOptions:  # noqa: ANN401  # fields
    """Return the options: those that a file may have, and the others."""
    from logmirror.broker.options import (  # noqa: PLC0415  # only this command needs them
        BrokerOptions,
        ClientAuth,
    )

    def file(name: str) -> Path | None:
        path = value(name)
        return None if path is None else Path(path)

    host, port = _parsed("--listen", parse_address, value("listen"))
    parse = functools.partial(parse_topic, partitions=value("partitions"))
    log_dirs = [Path(path) for path in value("log_dir")]
    bucket = _bucket(value)
    return BrokerOptions(
        log_dir=log_dirs[0],
        more_log_dirs=tuple(log_dirs[1:]),
        bucket=bucket,
        commit_interval_ms=value("commit_interval_ms"),
        standby=value("standby"),
        standby_timeout_ms=value("standby_timeout_ms"),
        archives=_archives(value("archive"), value("archive_encoding")),
        archive_cache_bytes=value("archive_cache_bytes"),
        host=host,
        port=port,
        auto_create_topics=value("auto_create"),
        default_partitions=value("partitions"),
        flush_on_ack=value("flush_on_ack"),
        topics=tuple(_parsed("--topic", parse, text) for text in value("topic")),
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
    names = [str(name) for name in value("log_dir")]
    found = [name for name in names if name.startswith("s3://")]
    if found and len(names) > 1:
        raise UsageError("a log directory in a bucket must be the only one", found=names)
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


def _values(config: Path | None, **given: object) -> Callable[[str], Any]:
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
        return _DEFAULTS[name] if section is None else getattr(section, name)

    return value


_Parsed = TypeVar("_Parsed")


def _parsed(option: str, parse: Callable[[str], _Parsed], text: str) -> _Parsed:
    try:
        return parse(text)
    except ValueError as error:
        raise UsageError(f"{option} {error}", found=text) from error


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

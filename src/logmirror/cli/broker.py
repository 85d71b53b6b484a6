"""`logmirror broker`: the embedded Kafka-compatible broker."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from logmirror.cli.broker_cost import (
    ExplainCostOption,
    PriceOption,
    ReadRateOption,
    WriteRateOption,
    explain,
)
from logmirror.cli.broker_values import DEFAULTS, broker_options, values
from logmirror.cli.options import FormatOption, LogLevelOption, yaml_files
from logmirror.demo import fill

if TYPE_CHECKING:
    from logmirror.broker.options import BrokerOptions

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
_SealsOption = Annotated[
    int | None,
    typer.Option(
        min=1,
        max=100_000,
        help="Limit for segments that are sealed before they are full, with --log-dir s3://...",
        show_default="20",
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
    max_seals_per_second: _SealsOption = None,
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

    value = values(config, **{name: given[name] for name in ("log_dir", *DEFAULTS)})
    log_to_stderr(log_level)
    loss = tuple(accept_data_loss or ())
    options = broker_options(value, stop_with_stdin=stop_with_stdin, accept_data_loss=loss)
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

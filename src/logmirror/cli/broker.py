"""`logmirror broker`: the embedded Kafka-compatible broker."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from logmirror.cli.options import LogLevelOption
from logmirror.errors import UsageError


def broker(  # noqa: PLR0913  # one parameter for each option
    *,
    log_dir: Annotated[
        Path, typer.Option(help="Directory of the topics; created if missing.", show_default=False)
    ],
    listen: Annotated[
        str, typer.Option(help="HOST:PORT; port 0: any free port.")
    ] = "127.0.0.1:9092",
    auto_create: Annotated[
        bool, typer.Option(help="Create a topic when a client asks for its metadata.")
    ] = True,
    partitions: Annotated[
        int, typer.Option(min=1, help="Default number of partitions of a new topic.")
    ] = 1,
    accept_data_loss: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TOPIC-PARTITION",
            help="Open this partition although acknowledged records are damaged. Repeatable.",
            show_default=False,
        ),
    ] = None,
    log_level: LogLevelOption = "info",
) -> None:
    """Run the embedded Kafka-compatible broker until SIGTERM or Ctrl-C.

    Acknowledged records are on disk. Prints its address when it listens.
    """
    from logmirror.broker.options import BrokerOptions  # noqa: PLC0415  # only this command needs it
    from logmirror.broker.server import serve  # noqa: PLC0415  # only this command needs it
    from logmirror.monitoring.logs import log_to_stderr  # noqa: PLC0415  # with them

    log_to_stderr(log_level)
    host, port = _host_and_port(listen)
    options = BrokerOptions(
        log_dir=log_dir,
        host=host,
        port=port,
        auto_create_topics=auto_create,
        default_partitions=partitions,
        accept_data_loss=tuple(accept_data_loss or ()),
    )
    serve(options, on_ready=lambda host, port: typer.echo(f"listening on {host}:{port}"))


def _host_and_port(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:  # noqa: PLR2004  # TCP's range
        raise UsageError("not an address to listen on", hint="write HOST:PORT", listen=text)
    return host.strip("[]"), int(port)

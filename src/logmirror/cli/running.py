"""Commands that go on until they are told to end: `run`, `broker`, `demo`."""

from __future__ import annotations

import os
from pathlib import Path  # noqa: TC003  # typer reads the annotations as it starts
from typing import Annotated

import typer

from logmirror.cli.options import ConfigOption, LogFormatOption, LogLevelOption, settings_of
from logmirror.config.environment import log_ignored_variables, read_environment
from logmirror.errors import UsageError
from logmirror.monitoring.logs import log_to_stderr


def run(  # noqa: PLR0913  # one parameter for each option
    config: ConfigOption,
    *,
    until_now: Annotated[
        bool, typer.Option("--until-now", help="Copy what is there now, then end.")
    ] = False,
    master: Annotated[
        str | None,
        typer.Option(help="Spark master instead of the configured one, such as local[2]."),
    ] = None,
    spark_log: Annotated[
        Path | None, typer.Option(help="Keep the output of Spark's JVM in this file.")
    ] = None,
    log_level: LogLevelOption = "info",
    log_format: LogFormatOption = "text",
) -> None:
    """Keep the copies up to date until SIGTERM or Ctrl-C.

    The first signal flushes what was seen and ends with 0; a second one ends at once and loses
    nothing.

    LOGMIRROR_METRICS_PORT (9090; 0: none) answers /metrics, /livez, /readyz and /status.json.
    LOGMIRROR_METRICS_PARTITIONS=off leaves out metrics of single partitions.
    LOGMIRROR_HEARTBEAT_SECS (30; 0: none) is between two heartbeats, which the level debug shows.
    """
    from logmirror.app import run  # noqa: PLC0415  # loads Spark, which `validate` can do without

    log_to_stderr(log_level, log_format)
    environment = read_environment(os.environ)
    log_ignored_variables(os.environ)
    settings = settings_of(config)
    run.run(
        settings, until_now=until_now, master=master, spark_log=spark_log, environment=environment
    )


def broker(  # one parameter for each option
    *,
    log_dir: Annotated[
        Path, typer.Option(help="Where topics live; made if it is not there.", show_default=False)
    ],
    listen: Annotated[
        str, typer.Option(help="HOST:PORT; port 0 lets the system choose.")
    ] = "127.0.0.1:9092",
    auto_create: Annotated[
        bool, typer.Option(help="Whether a question about an unknown topic creates it.")
    ] = True,
    partitions: Annotated[
        int, typer.Option(min=1, help="Of topics whose creator does not say how many.")
    ] = 1,
    log_level: LogLevelOption = "info",
) -> None:
    """Run the embedded Kafka-compatible broker until SIGTERM or Ctrl-C.

    An acknowledged record is on disk. Prints the address once it listens.
    """
    from logmirror.broker.options import BrokerOptions  # noqa: PLC0415  # only this command needs it
    from logmirror.broker.server import serve  # noqa: PLC0415  # only this command needs it

    log_to_stderr(log_level)
    host, port = _host_and_port(listen)
    options = BrokerOptions(
        log_dir=log_dir,
        host=host,
        port=port,
        auto_create_topics=auto_create,
        default_partitions=partitions,
    )
    serve(options, on_ready=lambda host, port: typer.echo(f"listening on {host}:{port}"))


def demo(
    *,
    keep: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Where to leave everything, instead of a new temporary folder."
        ),
    ] = None,
) -> None:
    """Watch the main job here in about a minute: real records, kill -9, a verdict.

    A broker, a producer and Spark run on this machine until the demo ends. Exit code 0 only if each
    copy is exact.
    """
    from logmirror.demo.story import run_demo  # noqa: PLC0415  # its packages are optional

    try:
        run_demo(keep)
    except KeyboardInterrupt:
        typer.echo("interrupted; all that the demo started has been stopped", err=True)
        raise typer.Exit(130) from None


def _host_and_port(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:  # noqa: PLR2004  # TCP's range
        raise UsageError("not an address to listen on", hint="write HOST:PORT", listen=text)
    return host.strip("[]"), int(port)

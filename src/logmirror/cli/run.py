"""`logmirror run`: keeps the replicas up to date."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Literal

import typer

import logmirror
from logmirror.cli.options import ConfigOption, LogFormatOption, LogLevelOption
from logmirror.cli.run_progress import showing_progress
from logmirror.config.environment import log_ignored_variables, read_environment
from logmirror.monitoring.logs import log_to_stderr


def run(  # noqa: PLR0913  # one parameter for each option
    config: ConfigOption,
    *,
    until_now: Annotated[
        bool, typer.Option("--until-now", help="Replicate what is at the sources now, then exit.")
    ] = False,
    master: Annotated[
        str | None,
        typer.Option(help="Spark master instead of the configured one, such as local[2]."),
    ] = None,
    spark_log: Annotated[
        Path | None, typer.Option(help="Write the output of Spark's JVM to this file.")
    ] = None,
    only: Annotated[
        Literal["groups"] | None,
        typer.Option(help="Translate consumer groups, and replicate nothing. Without Spark."),
    ] = None,
    log_level: LogLevelOption = "info",
    log_format: LogFormatOption = "text",
) -> None:
    """Keep the replicas up to date until SIGTERM or Ctrl-C.

    The first signal flushes what was read and exits with 0. A second one exits at once; nothing is
    lost.

    LOGMIRROR_METRICS_PORT: port of /metrics, /livez, /readyz and /status.json (9090; 0: none).
    LOGMIRROR_METRICS_HOST: IP address of that port (127.0.0.1; 0.0.0.0: all).
    LOGMIRROR_METRICS_PARTITIONS=off: no metrics of single partitions.
    LOGMIRROR_HEARTBEAT_SECS: interval of heartbeats in the log, level debug (30; 0: none).
    """
    environment = read_environment(os.environ)
    settings = logmirror.load(config)
    with showing_progress(
        until_now=until_now, heartbeat_ms=environment.heartbeat_ms
    ) as on_progress:
        log_to_stderr(log_level, log_format)
        log_ignored_variables(os.environ)
        logmirror.run(
            settings,
            until_now=until_now,
            only=only,
            on_progress=on_progress,
            master=master,
            spark_log=spark_log,
            metrics_port=environment.metrics_port,
            metrics_port_required=environment.metrics_port_is_set,
            metrics_host=environment.metrics_host,
            metrics_partitions=environment.metrics_partitions,
            heartbeat_ms=environment.heartbeat_ms,
            handles_signals=True,
        )

"""`logmirror policy print`: IAM policies for the buckets of a configuration."""

from __future__ import annotations

import json
from typing import Annotated

import typer

import logmirror
from logmirror.cli.options import ConfigOption
from logmirror.errors import UsageError


def policy_print(
    config: ConfigOption,
    *,
    compact: Annotated[
        bool, typer.Option("--compact", help="For `logmirror compact`, which deletes objects.")
    ] = False,
    bucket: Annotated[
        bool,
        typer.Option(
            "--bucket", help="Policies of the buckets: deny writes that could replace an object."
        ),
    ] = False,
) -> None:
    """Print the least IAM policies for the buckets of a configuration."""
    settings = logmirror.load(config)
    if bucket and compact:
        raise UsageError("--bucket and --compact exclude each other")
    found = (
        logmirror.conditional_write_policies(settings)
        if bucket
        else logmirror.bucket_policies(settings, compacts=compact)
    )
    if not found:
        raise UsageError("the configuration has no destination of type s3")
    typer.echo(json.dumps(found, indent=2))

"""The commands, with the examples that `--help` shows; each has a module of its name."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Annotated, Final

import typer

from logmirror.cli import acls as acls_command
from logmirror.cli import broker, compact, completion, demo, run, status, validate, verify
from logmirror.cli import policy as policy_command
from logmirror.torture import command as torturing

if TYPE_CHECKING:
    from collections.abc import Callable

VERSION: Final = "0.1.0"
"""The version, equal to that in `pyproject.toml` (tested)."""

_SETTINGS: Final = {"help_option_names": ["-h", "--help"]}

app = typer.Typer(
    name="logmirror",
    help="Replicate Kafka partitions exactly, to Kafka, files or S3, and verify the replicas.",
    no_args_is_help=True,
    add_completion=False,  # `logmirror completion` does it for any shell, not only the one around
    rich_markup_mode=None,  # frames and colours leave little room in 80 columns
    pretty_exceptions_enable=False,
    context_settings=_SETTINGS,
)
policy = typer.Typer(no_args_is_help=True, help="IAM policies that a configuration needs.")
acls = typer.Typer(no_args_is_help=True, help="Kafka ACLs that a configuration needs.")


def _print_version(is_given: bool) -> None:
    if is_given:
        typer.echo(f"logmirror {VERSION}")
        raise typer.Exit


@app.callback()
def _before(
    *,
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    del version  # its callback has printed it


def _add(
    command: Callable[..., None], *examples: str, to: typer.Typer = app, name: str | None = None
) -> None:
    """Make a function a command.

    Args:
        command: The function; its name, docstring and annotations make the help text.
        examples: Command lines for `--help`; a test parses each of them.
        to: The command group.
        name: The command's name, if it is not the function's.
    """
    first_line = (inspect.getdoc(command) or "").partition("\n")[0]
    lines = "\n".join(["\b", "Examples:", *(f"  {example}" for example in examples)])
    to.command(name, short_help=first_line, epilog=lines)(command)


_add(
    validate.validate,
    "logmirror validate -c mirror.yaml",
    "logmirror validate -c mirror.yaml --check",
    "logmirror validate -c mirror.yaml --check --format json",
)
_add(
    run.run,
    "logmirror run -c mirror.yaml",
    "logmirror run -c mirror.yaml --until-now",
    "logmirror run -c mirror.yaml --log-format json --spark-log spark.log",
)
_add(
    status.status,
    "logmirror status -c mirror.yaml",
    "logmirror status -c mirror.yaml --mirror orders --format json",
)
_add(
    verify.verify,
    "logmirror verify -c mirror.yaml",
    "logmirror verify -c mirror.yaml --deep --against-source",
    "logmirror verify -c mirror.yaml --deep --mirror orders --format json",
)
_add(
    compact.compact,
    "logmirror compact -c mirror.yaml --dry-run",
    "logmirror compact -c mirror.yaml --target-bytes 1GiB --min-objects 16",
)
_add(
    broker.broker,
    "logmirror broker --log-dir broker-data",
    "logmirror broker --log-dir broker-data --listen 127.0.0.1:0 --partitions 3",
)
_add(demo.demo, "logmirror demo", "logmirror demo --keep demo-files")
_add(
    torturing.torture,
    "logmirror torture",
    "logmirror torture -c mirror.yaml --faults kill,power --kills 50",
    "logmirror torture --seed 7 --seeds 1 --kills 0 --format json",
)
_add(
    validate.schema,
    "logmirror schema",
    "logmirror schema > logmirror.config.schema.json",
)
_add(
    completion.completion,
    "source <(logmirror completion bash)",
    "logmirror completion zsh > ~/.zfunc/_logmirror",
    "logmirror completion fish > ~/.config/fish/completions/logmirror.fish",
)
app.add_typer(policy, name="policy")
_add(
    policy_command.policy_print,
    "logmirror policy print -c mirror.yaml",
    "logmirror policy print -c mirror.yaml --compact",
    "logmirror policy print -c mirror.yaml --bucket",
    to=policy,
    name="print",
)
app.add_typer(acls, name="acls")
_add(
    acls_command.acls_print,
    "logmirror acls print -c mirror.yaml",
    "logmirror acls print -c mirror.yaml --principal User:mirror",
    to=acls,
    name="print",
)

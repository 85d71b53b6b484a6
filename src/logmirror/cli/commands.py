"""The commands, with the examples that `--help` shows; each has a module of its name.

Only the module of the requested command is loaded: `logmirror broker` starts in a fraction of the
time that all of them take.
"""

from __future__ import annotations

import importlib
import inspect
import typing
from typing import TYPE_CHECKING, Annotated, Final, NamedTuple

import typer

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

VERSION: Final = "0.1.0"
"""The version, equal to that in `pyproject.toml` (tested)."""

_SETTINGS: Final = {"help_option_names": ["-h", "--help"]}


class _Command(NamedTuple):
    """A command: the module and the function that make its help text, and its examples."""

    module: str
    function: str
    examples: tuple[str, ...]
    """Command lines for `--help`; a test parses each of them."""


_GROUPS: Final = {
    "policy": "IAM policies that a configuration needs.",
    "acls": "Kafka ACLs that a configuration needs.",
    "groups": "Consumer groups, and where they continue in a replica.",
    "moves": "Moves of partitions between log directories of a broker.",
    "broker users": "Who may log in to an embedded broker.",
}
_COMMANDS: Final[dict[str, _Command]] = {
    "validate": _Command(
        "logmirror.cli.validate",
        "validate",
        (
            "logmirror validate -c mirror.yaml",
            "logmirror validate -c mirror.yaml --check",
            "logmirror validate -c mirror.yaml --check --format json",
        ),
    ),
    "run": _Command(
        "logmirror.cli.run",
        "run",
        (
            "logmirror run -c mirror.yaml",
            "logmirror run -c mirror.yaml --until-now",
            "logmirror run -c mirror.yaml --log-format json --spark-log spark.log",
        ),
    ),
    "status": _Command(
        "logmirror.cli.status",
        "status",
        (
            "logmirror status -c mirror.yaml",
            "logmirror status -c mirror.yaml --mirror orders --format json",
        ),
    ),
    "verify": _Command(
        "logmirror.cli.verify",
        "verify",
        (
            "logmirror verify -c mirror.yaml",
            "logmirror verify -c mirror.yaml --deep --against-source",
            "logmirror verify -c mirror.yaml --deep --mirror orders --format json",
        ),
    ),
    "compact": _Command(
        "logmirror.cli.compact",
        "compact",
        (
            "logmirror compact -c mirror.yaml --dry-run",
            "logmirror compact -c mirror.yaml --target-bytes 1GiB --min-objects 16",
        ),
    ),
    "groups list": _Command(
        "logmirror.cli.groups",
        "groups_list",
        (
            "logmirror groups list -c mirror.yaml",
            "logmirror groups list -c mirror.yaml --group billing --format json",
        ),
    ),
    "groups describe": _Command(
        "logmirror.cli.groups",
        "groups_describe",
        (
            "logmirror groups describe billing -c mirror.yaml",
            "logmirror groups describe billing -c mirror.yaml --format json",
        ),
    ),
    "groups plan": _Command(
        "logmirror.cli.groups",
        "groups_plan",
        (
            "logmirror groups plan -c mirror.yaml --output plan.json",
            "logmirror groups plan -c mirror.yaml --group billing --output plan.json",
        ),
    ),
    "groups apply": _Command(
        "logmirror.cli.groups",
        "groups_apply",
        (
            "logmirror groups apply plan.json -c mirror.yaml",
            "logmirror groups apply plan.json -c mirror.yaml --format json",
        ),
    ),
    "groups rollback": _Command(
        "logmirror.cli.groups",
        "groups_rollback",
        (
            "logmirror groups rollback plan.json -c mirror.yaml",
            "logmirror groups rollback plan.json -c mirror.yaml --format json",
        ),
    ),
    "broker": _Command(
        "logmirror.cli.broker",
        "broker",
        (
            "logmirror broker --log-dir broker-data",
            "logmirror broker --log-dir broker-data --listen 127.0.0.1:0 --partitions 3",
            "logmirror broker -c broker.yaml --monitoring-port 9091",
            "logmirror broker --log-dir broker-data --demo-data flights",
            "logmirror broker --log-dir d --listener SASL_PLAINTEXT://127.0.0.1:9092",
        ),
    ),
    "broker users add": _Command(
        "logmirror.cli.broker_users",
        "users_add",
        (
            "logmirror broker users add alice --log-dir broker-data",
            "logmirror broker users add alice --log-dir d --password-file alice.password",
        ),
    ),
    "broker users list": _Command(
        "logmirror.cli.broker_users",
        "users_list",
        (
            "logmirror broker users list --log-dir broker-data",
            "logmirror broker users list --log-dir /var/lib/broker",
        ),
    ),
    "broker users remove": _Command(
        "logmirror.cli.broker_users",
        "users_remove",
        (
            "logmirror broker users remove alice --log-dir broker-data",
            "logmirror broker users remove bob --log-dir /var/lib/broker",
        ),
    ),
    "moves list": _Command(
        "logmirror.cli.moves",
        "moves_list",
        (
            "logmirror moves list --bootstrap 127.0.0.1:9092",
            "logmirror moves list --bootstrap 127.0.0.1:9092 --watch",
            "logmirror moves list --bootstrap kafka:9092 --client-config client.conf",
        ),
    ),
    "moves plan": _Command(
        "logmirror.cli.moves",
        "moves_plan",
        (
            "logmirror moves plan --bootstrap 127.0.0.1:9092",
            "logmirror moves plan --bootstrap 127.0.0.1:9092 --output plan.json",
        ),
    ),
    "moves start": _Command(
        "logmirror.cli.moves",
        "moves_start",
        (
            "logmirror moves start plan.json --bootstrap 127.0.0.1:9092 --wait",
            "logmirror moves start plan.json --bootstrap kafka:9092 --rollback undo.json",
        ),
    ),
    "moves cancel": _Command(
        "logmirror.cli.moves",
        "moves_cancel",
        (
            "logmirror moves cancel plan.json --bootstrap 127.0.0.1:9092",
            "logmirror moves cancel orders:3 payments --bootstrap 127.0.0.1:9092",
            "logmirror moves cancel --all --bootstrap 127.0.0.1:9092",
        ),
    ),
    "demo": _Command(
        "logmirror.cli.demo",
        "demo",
        (
            "logmirror demo",
            "logmirror demo --keep demo-files",
        ),
    ),
    "torture": _Command(
        "logmirror.torture.command",
        "torture",
        (
            "logmirror torture",
            "logmirror torture -c mirror.yaml --faults kill,power --kills 50",
            "logmirror torture --seed 7 --seeds 1 --kills 0 --format json",
        ),
    ),
    "schema": _Command(
        "logmirror.cli.validate",
        "schema",
        (
            "logmirror schema",
            "logmirror schema > logmirror.config.schema.json",
        ),
    ),
    "completion": _Command(
        "logmirror.cli.completion",
        "completion",
        (
            "logmirror completion zsh > ~/.zfunc/_logmirror",
            "logmirror completion fish > ~/.config/fish/completions/logmirror.fish",
        ),
    ),
    "policy print": _Command(
        "logmirror.cli.policy",
        "policy_print",
        (
            "logmirror policy print -c mirror.yaml",
            "logmirror policy print -c mirror.yaml --compact",
            "logmirror policy print -c mirror.yaml --bucket",
        ),
    ),
    "acls print": _Command(
        "logmirror.cli.acls",
        "acls_print",
        (
            "logmirror acls print -c mirror.yaml",
            "logmirror acls print -c mirror.yaml --principal User:mirror",
        ),
    ),
}
"""By the words that lead to them."""

_WITH_COMMANDS: Final = ("broker",)
"""Commands that have commands of their own."""

_STARTS_AT_ONCE: Final = ("broker",)
"""Commands that do not wait for typer's parser to load."""


def _print_version(is_given: bool) -> None:
    if is_given:
        typer.echo(f"logmirror {VERSION}")
        raise typer.Exit


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


def build(first_word: str = "") -> typer.Typer:
    """Return the program, as far as a command line needs it.

    Args:
        first_word: The first word of the command line. If no command or group has that name, the
            program has all of them.
    """
    wanted = {words for words in _COMMANDS if words.split()[0] == first_word} or _COMMANDS
    app = typer.Typer(
        name="logmirror",
        help="Replicate Kafka partitions exactly, to Kafka, files or S3, and verify the replicas.",
        no_args_is_help=True,
        add_completion=False,  # `logmirror completion` does it for any shell, not only this one
        rich_markup_mode=None,  # frames and colours leave little room in 80 columns
        pretty_exceptions_enable=False,
        context_settings=_SETTINGS,
    )
    app.callback()(_before)
    groups = {"": app}
    for words, command in _COMMANDS.items():
        if words in wanted:
            group, _, name = words.rpartition(" ")
            if words not in _WITH_COMMANDS:
                _add(_group(group, groups), name, command)
            else:
                groups[words] = _with_commands(command)
                short = _first_line(_function(command))
                _group(group, groups).add_typer(groups[words], name=name, short_help=short)
    return app


def _group(words: str, groups: dict[str, typer.Typer]) -> typer.Typer:
    """Return the group of these words, which is made on its first use."""
    if words not in groups:
        outer, _, name = words.rpartition(" ")
        groups[words] = typer.Typer(no_args_is_help=True, help=_GROUPS[words])
        _group(outer, groups).add_typer(groups[words], name=name)
    return groups[words]


def _with_commands(command: _Command) -> typer.Typer:
    """Return a group that runs a command if none of its own commands is named."""
    function = _function(command)

    def run(context: typer.Context, **options: object) -> None:
        if context.invoked_subcommand is None:
            function(**options)

    signature = inspect.signature(function)
    first = inspect.Parameter("context", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    hints = typing.get_type_hints(function, include_extras=True)
    run.__doc__, run.__name__ = function.__doc__, function.__name__
    run.__annotations__ = {"context": typer.Context, **hints}
    parameters = [
        one.replace(annotation=run.__annotations__[one.name])
        for one in (first, *signature.parameters.values())
    ]
    vars(run)["__signature__"] = signature.replace(parameters=parameters, return_annotation=None)
    group = typer.Typer()
    group.callback(invoke_without_command=True, epilog=_epilog(command))(run)
    return group


def run_plain(words: Sequence[str]) -> bool:
    """Run a command that has to start at once, if its command line is plain.

    Args:
        words: The command line.

    Returns:
        Whether it ran. If not, the program of `build` decides.
    """
    if not words or words[0] not in _STARTS_AT_ONCE:
        return False
    from logmirror.cli import plain_line  # noqa: PLC0415  # only these commands need it

    function = _function(_COMMANDS[words[0]])
    arguments = plain_line.arguments_of(function, words[1:])
    if arguments is None:
        return False
    function(**arguments)
    return True


def _function(command: _Command) -> Callable[..., None]:
    found: Callable[..., None] = getattr(importlib.import_module(command.module), command.function)
    return found


def _add(to: typer.Typer, name: str, command: _Command) -> None:
    function = _function(command)
    to.command(name, short_help=_first_line(function), epilog=_epilog(command))(function)


def _first_line(function: Callable[..., None]) -> str:
    return (inspect.getdoc(function) or "").partition("\n")[0]


def _epilog(command: _Command) -> str:
    return "\n".join(["\b", "Examples:", *(f"  {example}" for example in command.examples)])

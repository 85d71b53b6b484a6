"""`logmirror broker users`: who may log in to an embedded broker."""

from __future__ import annotations

import getpass
import sys
from pathlib import Path
from typing import Annotated

import typer

from logmirror.cli.output import printable
from logmirror.errors import UsageError

_NameArgument = Annotated[str, typer.Argument(help="The user's name.", show_default=False)]


def _directory(text: str) -> Path:
    if text.startswith("s3://"):
        raise UsageError(
            "users in a bucket are changed by their broker",
            hint="use kafka-configs.sh --entity-type users --entity-name NAME",
            found=text,
        )
    return Path(text)


_LogDirOption = Annotated[
    Path,
    typer.Option(
        help="Directory of the broker's topics.",
        show_default=False,
        parser=_directory,
        metavar="PATH",
    ),
]


def users_add(
    name: _NameArgument,
    *,
    log_dir: _LogDirOption,
    password_file: Annotated[
        Path | None,
        typer.Option(help="File with the password in its first line.", show_default=False),
    ] = None,
) -> None:
    """Add a user, or replace the user's password.

    The password is read from the terminal, from a pipe, or from a file. It is stored salted, for
    SCRAM-SHA-256, SCRAM-SHA-512 and PLAIN. The broker may run or not.
    """
    from logmirror.broker.security.users import put_user  # noqa: PLC0415  # only this command

    is_new = put_user(log_dir, name, _password(name, password_file))
    typer.echo(f"user {name} added" if is_new else f"password of user {name} replaced")


def users_list(*, log_dir: _LogDirOption) -> None:
    """List the users and their SCRAM mechanisms."""
    from logmirror.broker.security.users import list_users  # noqa: PLC0415  # only this command

    for name, mechanisms in list_users(log_dir).items():
        typer.echo(f"{printable(name)}  {', '.join(mechanisms)}")


def users_remove(name: _NameArgument, *, log_dir: _LogDirOption) -> None:
    """Remove a user. A running broker closes the user's connections."""
    from logmirror.broker.security.users import remove_user  # noqa: PLC0415  # only this command

    remove_user(log_dir, name)
    typer.echo(f"user {name} removed")


def _password(name: str, file: Path | None) -> str:
    if file is not None:
        try:
            lines = file.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(
                "password file cannot be read", path=str(file), cause=type(error).__name__
            ) from error
        return lines[0] if lines else ""
    if not sys.stdin.isatty():
        return sys.stdin.readline().rstrip("\r\n")
    password = getpass.getpass(f"Password of {name}: ")
    if getpass.getpass("Again: ") != password:
        raise UsageError("the two passwords differ")
    return password

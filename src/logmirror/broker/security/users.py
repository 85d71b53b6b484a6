"""The users of a log directory, for `logmirror broker users`. A broker may run meanwhile.

A running broker reads the database at each login, so a change applies at once. It closes the
connections of a removed user within two seconds.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Final

from logmirror.broker.log.disk import Disk
from logmirror.broker.security.scram import MAX_USER_BYTES, Mechanism, credential, new_salt
from logmirror.broker.security.store import FILE_NAME, SecurityStore
from logmirror.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_PRIVATE: Final = ".logmirror"


def put_user(log_dir: Path, name: str, password: str) -> bool:
    """Store a user's password for SCRAM-SHA-256, SCRAM-SHA-512 and PLAIN; durable at return.

    Creates the log directory if it does not exist.

    Returns:
        Whether the user is new. The password of a known user is replaced.

    Raises:
        UsageError: The name or the password is not allowed, or the directory is not writable.
        UnavailableError: The database is not usable.
    """
    if not name.isprintable() or not 0 < len(name.encode()) <= MAX_USER_BYTES:
        raise UsageError(
            "not a user name", hint=f"1 to {MAX_USER_BYTES} bytes of printable text", name=name
        )
    if not password or "\0" in password:
        raise UsageError("the password is empty, or contains a zero byte")
    try:
        (log_dir / _PRIVATE).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(
            "log directory is not writable", path=str(log_dir), cause=str(error)
        ) from error
    with _opened(log_dir) as store:
        is_new = name not in store.users()
        stored = [
            (name, credential(mechanism, password.encode(), salt=new_salt()))
            for mechanism in Mechanism
        ]
        store.change_users(stored)
        for folder in (log_dir / _PRIVATE, log_dir, log_dir.parent):
            with contextlib.suppress(PermissionError):  # a parent that belongs to the system
                Disk().sync_folder(folder)
    return is_new


def list_users(log_dir: Path) -> dict[str, list[str]]:
    """Return the SASL names of each user's SCRAM mechanisms, by user.

    Raises:
        UsageError: No broker has used the directory.
        UnavailableError: The database is not usable.
    """
    _check_used(log_dir)
    with _opened(log_dir) as store:
        return {
            user: [mechanism.sasl_name for mechanism, _ in known]
            for user, known in store.users().items()
        }


def remove_user(log_dir: Path, name: str) -> None:
    """Remove a user; durable at return.

    Raises:
        UsageError: There is no such user.
        UnavailableError: The database is not usable.
    """
    _check_used(log_dir)
    with _opened(log_dir) as store:
        if name not in store.users():
            raise UsageError("no such user", name=name, path=str(log_dir))
        store.change_users([], [(name, mechanism) for mechanism in Mechanism])


@contextlib.contextmanager
def _opened(log_dir: Path) -> Iterator[SecurityStore]:
    with contextlib.closing(SecurityStore(log_dir / _PRIVATE / FILE_NAME)) as store:
        yield store


def _check_used(log_dir: Path) -> None:
    if not (log_dir / _PRIVATE).is_dir():
        raise UsageError(
            "not the log directory of a broker",
            hint="give the directory that the broker got with --log-dir",
            path=str(log_dir),
        )

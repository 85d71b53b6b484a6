"""The broker's users and ACLs: `.logmirror/security.sqlite` in the log directory, mode 0600.

A change is durable when the call returns. Schema 1:

    settings(name, value)        schema; decoy_key: 32 random bytes
    credentials(user, mechanism, iterations, salt, stored_key, server_key)
    acls(resource_type, pattern_type, resource_name, principal, host, operation, permission)

It is a file of its own because it holds what passwords can be guessed from. A password itself is
never stored. `logmirror broker users` changes it while a broker runs: SQLite orders the two.
"""

from __future__ import annotations

import hmac
import os
import secrets
from typing import TYPE_CHECKING, Final

from logmirror.broker.database import Database
from logmirror.broker.security.acls import Acl
from logmirror.broker.security.scram import MIN_ITERATIONS, Credential, Mechanism
from logmirror.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection
    from pathlib import Path

    from logmirror.broker.database import Shipping

FILE_NAME: Final = "security.sqlite"
_SCHEMA_VERSION: Final = b"1"
_SCHEMA: Final = """
CREATE TABLE IF NOT EXISTS settings (name TEXT PRIMARY KEY, value BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS credentials (
    user TEXT NOT NULL, mechanism INTEGER NOT NULL, iterations INTEGER NOT NULL,
    salt BLOB NOT NULL, stored_key BLOB NOT NULL, server_key BLOB NOT NULL,
    PRIMARY KEY (user, mechanism)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS acls (
    resource_type INTEGER NOT NULL, pattern_type INTEGER NOT NULL, resource_name TEXT NOT NULL,
    principal TEXT NOT NULL, host TEXT NOT NULL, operation INTEGER NOT NULL,
    permission INTEGER NOT NULL,
    PRIMARY KEY (
        resource_type, pattern_type, resource_name, principal, host, operation, permission
    )
) WITHOUT ROWID;
"""


class SecurityStore:
    """The database. Safe to call from several threads and processes; each call is a transaction."""

    def __init__(self, path: Path, shipping: Shipping | None = None) -> None:
        self._seen: int | None = None
        try:
            os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        except OSError as error:
            raise UsageError(
                "the broker's database of users is not writable", path=str(path), cause=str(error)
            ) from error
        self._database = Database(path, _SCHEMA, "secure_delete=ON", shipping=shipping)
        version = self._database.setting("schema", _SCHEMA_VERSION)
        self._decoy_key = self._database.setting("decoy_key", secrets.token_bytes(32))
        if version != _SCHEMA_VERSION:
            raise UsageError(
                "the users were written by another version of logmirror",
                hint="use that version, or another directory",
                path=str(path),
                expected=_SCHEMA_VERSION.decode(),
                found=version.decode(errors="replace"),
            )

    def snapshot(self) -> None:
        """Ship the whole database."""
        self._database.snapshot()

    def watch(self, when_failed: Callable[[Exception, Path], None]) -> None:
        """Report errors of the disk to a function; see `Database.when_failed`."""
        self._database.when_failed = when_failed

    def close(self) -> None:
        """Close the database."""
        self._database.close()

    # Users

    def users(self) -> dict[str, list[tuple[Mechanism, int]]]:
        """Return mechanisms and iterations of each user, by name."""
        found: dict[str, list[tuple[Mechanism, int]]] = {}
        select = "SELECT user, mechanism, iterations FROM credentials ORDER BY user, mechanism"
        with self._database.reading() as database:
            for user, mechanism, iterations in database.execute(select):
                found.setdefault(user, []).append((Mechanism(mechanism), iterations))
        return found

    def users_if_changed(self) -> frozenset[str] | None:
        """Return the names of all users; None if no user has changed since the last call."""
        with self._database.reading() as database:
            # It changes with every commit of another connection or process.
            version = database.execute("PRAGMA data_version").fetchone()[0]
            if self._seen == version:
                return None
            self._seen = version
            rows = database.execute("SELECT DISTINCT user FROM credentials").fetchall()
        return frozenset(user for (user,) in rows)

    def change_users(
        self,
        stored: Collection[tuple[str, Credential]],
        removed: Collection[tuple[str, Mechanism]] = (),
    ) -> None:
        """Store and remove credentials, all or none of them."""
        rows = [(user, int(one.mechanism), *one[1:]) for user, one in stored]
        with self._database.transaction() as database:
            database.executemany(
                "DELETE FROM credentials WHERE user = ? AND mechanism = ?",
                [(user, int(mechanism)) for user, mechanism in removed],
            )
            insert = "INSERT OR REPLACE INTO credentials VALUES (?, ?, ?, ?, ?, ?)"
            database.executemany(insert, rows)

    def credential(self, user: str, mechanisms: Collection[Mechanism]) -> tuple[Credential, bool]:
        """Return a user's credential for the first of the mechanisms that it has.

        A user without one gets a decoy, always the same, which no password fits.

        Returns:
            The credential, and whether it is real.
        """
        select = "SELECT * FROM credentials WHERE user = ?"
        usual = (
            "SELECT mechanism, iterations FROM credentials GROUP BY mechanism, iterations "
            "ORDER BY count(*) DESC, mechanism"
        )
        with self._database.reading() as database:
            rows = database.execute(select, (user,)).fetchall()
            others = database.execute(usual).fetchall()
        has = {row[1]: Credential(Mechanism(row[1]), *row[2:]) for row in rows}
        decoys = [self._decoy(user, mechanism, others) for mechanism in mechanisms]
        for mechanism in mechanisms:
            if mechanism in has:
                return has[mechanism], True
        return decoys[0], False

    def _decoy(self, user: str, mechanism: Mechanism, others: list[tuple[int, int]]) -> Credential:
        seed = hmac.digest(self._decoy_key, f"{int(mechanism)} {user}".encode(), "sha512")
        number = int.from_bytes(seed[:17])
        digits = "0123456789abcdefghijklmnopqrstuvwxyz"
        salt = "".join(digits[number // 36**place % 36] for place in range(26)).encode()
        iterations = next((n for kind, n in others if kind == mechanism), MIN_ITERATIONS)
        keys = hmac.digest(self._decoy_key, seed, "sha512")[: mechanism.key_bytes]
        return Credential(mechanism, iterations, salt, keys, keys)

    # ACLs

    def acls(self) -> list[Acl]:
        """Return all ACLs."""
        with self._database.reading() as database:
            return [Acl(*row) for row in database.execute("SELECT * FROM acls")]

    def change_acls(self, added: Collection[Acl], removed: Collection[Acl]) -> None:
        """Store and remove ACLs, all or none of them."""
        with self._database.transaction() as database:
            database.executemany(
                "DELETE FROM acls WHERE resource_type = ? AND pattern_type = ? "
                "AND resource_name = ? AND principal = ? AND host = ? AND operation = ? "
                "AND permission = ?",
                removed,
            )
            insert = "INSERT OR IGNORE INTO acls VALUES (?, ?, ?, ?, ?, ?, ?)"
            database.executemany(insert, added)

"""Secrets that each process reads from its own environment or files.

Where `spark.secrets` is `executors`, the driver has a `Secret`: the value and its `Reference`. It
is pickled as the reference alone, so no task contains the value. An executor reads it (`resolved`).
"""

from __future__ import annotations

import functools
import os
import socket
import stat
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self, TypeVar

from logmirror.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

MAX_SECRET_BYTES: Final = 64 * 1024
"""Largest file that `${file:PATH}` reads, in bytes. Certificates in PEM are far smaller."""

_Value = TypeVar("_Value")


class UnreadableError(Exception):
    """A file or a variable cannot be used; the message is the reason."""


@dataclass(frozen=True, slots=True)
class Reference:
    """Where a process reads a value: an environment variable or a file."""

    variable: str = ""
    file: str = ""
    """Path. Relative paths belong to the working directory of the process."""

    def __str__(self) -> str:
        return f"${{file:{self.file}}}" if self.file else f"${{{self.variable}}}"

    def read(self, environ: Mapping[str, str]) -> str:
        """Return the value in this process, which may be empty.

        Raises:
            UnreadableError: The variable is not set, or the file has no text to use.
        """
        if self.file:
            return read_text(Path(self.file))
        if self.variable not in environ:
            message = "the environment variable is not set"
            raise UnreadableError(message)
        return environ[self.variable]


class Secret(str):
    """A value together with its reference. Pickled, it is the reference alone."""

    __slots__ = ("reference",)

    reference: Reference

    def __new__(cls, value: str, reference: Reference) -> Self:
        """Return the value of a reference in this process."""
        secret = super().__new__(cls, value)
        secret.reference = reference
        return secret

    def __reduce__(self) -> tuple[Callable[..., Reference], tuple[str, str]]:
        """Leave the value out."""
        return Reference, (self.reference.variable, self.reference.file)


@functools.cache
def resolved(value: _Value) -> _Value:
    """Return settings with a `Secret` in place of each reference, read once in each process.

    Args:
        value: A frozen dataclass, which may hold others.

    Raises:
        UsageError: A secret is missing or empty. Facts: `reference`, `host`, `reason`.
    """
    found: _Value = _resolved(value)
    return found


def _resolved(value: Any) -> Any:  # noqa: ANN401  # the fields of any dataclass
    if isinstance(value, Reference):
        return _secret(value)
    if not is_dataclass(value) or isinstance(value, type):
        return value
    before = {field.name: getattr(value, field.name) for field in fields(value)}
    after = {name: _resolved(item) for name, item in before.items()}
    changes = {name: item for name, item in after.items() if item is not before[name]}
    return replace(value, **changes) if changes else value


def _secret(reference: Reference) -> Secret:
    try:
        text = reference.read(os.environ)
        reason = "" if text else "it is empty"
    except UnreadableError as error:
        text, reason = "", str(error)
    if reason:
        raise UsageError(
            "a secret is missing on a Spark executor",
            hint="with `spark: {secrets: executors}` each executor needs the variable or the file: "
            "docs/deploy/spark-submit.md#secrets-on-the-executors",
            reference=str(reference),
            host=socket.gethostname(),
            reason=reason,
        )
    return Secret(text, reference)


def read_text(path: Path) -> str:
    """Return the text of a secret's file, without its last line end.

    Raises:
        UnreadableError: See `read_regular_file`; or it is not UTF-8.
    """
    try:
        text = read_regular_file(path, MAX_SECRET_BYTES).decode("utf-8-sig")
    except UnicodeDecodeError:
        message = "it is not UTF-8 text"
        raise UnreadableError(message) from None
    return text.removesuffix("\n").removesuffix("\r")


def read_regular_file(path: Path, max_bytes: int) -> bytes:
    """Return all bytes of a file.

    Pipes and devices are refused: reading one could block forever.

    Raises:
        UnreadableError: It cannot be opened, is not a regular file, or is larger than `max_bytes`.
    """
    try:
        with open(path, "rb", opener=_open_nonblocking) as file:  # needs an opener
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                message = "it is not a regular file"
                raise UnreadableError(message)
            data: bytes = file.read(max_bytes + 1)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else "bad name"
        message = f"the file cannot be read: {reason.lower()}"
        raise UnreadableError(message) from None
    if len(data) > max_bytes:
        message = f"the file is larger than {max_bytes} bytes"
        raise UnreadableError(message)
    return data


def _open_nonblocking(name: str, flags: int) -> int:
    return os.open(name, flags | os.O_NONBLOCK | os.O_CLOEXEC)

"""Texts that the broker's options and its section of the file share. Loads no models."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable

PROTOCOLS: Final = ("PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL")
"""Kafka's security protocols."""

_PORT_MAX: Final = 65_535
_SCHEME: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://|s3:", re.IGNORECASE)
"""How an address of a store begins, also with one slash too few."""


def parse_address(text: str) -> tuple[str, int]:
    """Parse `HOST:PORT`, with an IPv6 address in brackets.

    Raises:
        ValueError: It is no such address.
    """
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or int(port) > _PORT_MAX:
        message = "must be HOST:PORT"
        raise ValueError(message)
    return host.strip("[]"), int(port)


def parse_log_dir(text: str) -> str:
    """Check a directory, or `s3://BUCKET/PREFIX`.

    Raises:
        ValueError: It is empty, or the address of another kind of store. That would be the name of
            a directory: records that are meant for a bucket would stay on this machine.
    """
    if not text or (_SCHEME.match(text) and not text.startswith("s3://")):
        message = "must be a directory, or s3://BUCKET/PREFIX"
        raise ValueError(message)
    return text


def parse_topic(text: str, partitions: int) -> tuple[str, int]:
    """Parse `NAME` or `NAME:PARTITIONS`.

    Raises:
        ValueError: The number of partitions is not one.
    """
    name, colon, count = text.partition(":")
    if not name or (colon and not (count.isdecimal() and int(count))):
        message = "must be NAME or NAME:PARTITIONS, such as orders:3"
        raise ValueError(message)
    return name, int(count) if colon else partitions


def parse_topics(texts: Iterable[str], partitions: int) -> dict[str, int]:
    """Parse topics, each with `parse_topic`.

    Raises:
        ValueError: One is not valid, or a topic has two numbers of partitions.
    """
    found: dict[str, int] = {}
    for text in texts:
        name, count = parse_topic(text, partitions)
        if found.setdefault(name, count) != count:
            message = f"has {name} with {found[name]} partitions and with {count}"
            raise ValueError(message)
    return found


def parse_override(text: str) -> tuple[str, str]:
    """Parse `NAME=VALUE`.

    Raises:
        ValueError: It is no such setting.
    """
    name, found, value = text.partition("=")
    if not name or not found:
        message = "must be NAME=VALUE"
        raise ValueError(message)
    return name, value


def parse_listener(text: str) -> tuple[str, str, str, int]:
    """Parse `[NAME=]PROTOCOL://HOST:PORT`; returns name, protocol, host and port.

    Raises:
        ValueError: It is no such listener.
    """
    head, _, address = text.partition("://")
    name, _, protocol = head.rpartition("=")
    if protocol not in PROTOCOLS:
        message = f"must be [NAME=]PROTOCOL://HOST:PORT, with {', '.join(PROTOCOLS)}"
        raise ValueError(message)
    return name or protocol, protocol, *parse_address(address)


def parse_advertised(text: str) -> tuple[str, tuple[str, int]]:
    """Parse `NAME=HOST:PORT`; returns name and address.

    Raises:
        ValueError: It is no such pair.
    """
    name, found, address = text.partition("=")
    if not name or not found:
        message = "must be NAME=HOST:PORT"
        raise ValueError(message)
    return name, parse_address(address)

"""TCP connections by host name: one deadline for the lookup and for all addresses together.

The system's resolver cannot be interrupted, so a lookup runs in a thread of its own. A lookup that
hangs keeps one thread for each name, however often the name is looked up meanwhile.
"""

from __future__ import annotations

import socket
import threading
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable

    from logmirror.clock import Clock

_Addresses = list[tuple[Any, ...]]
"""What `socket.getaddrinfo` returns."""

_lock: Final = threading.Lock()
_lookups: Final[dict[tuple[str, int, int], Future[_Addresses]]] = {}
"""The lookups in progress, by host, port and address family."""


class LookupFailedError(OSError):
    """The host name could not be resolved."""


def remaining_s(clock: Clock, deadline_ms: int) -> float:
    """Return the seconds until a monotonic deadline.

    Raises:
        TimeoutError: It has passed.
    """
    remaining_ms = deadline_ms - clock.monotonic_ms()
    if remaining_ms <= 0:
        raise TimeoutError
    return remaining_ms / 1000


def dial(  # noqa: PLR0913  # an address, its family, and how to open the socket
    host: str,
    port: int,
    *,
    clock: Clock,
    deadline_ms: int,
    family: int = socket.AF_UNSPEC,
    prepare: Callable[[socket.socket], None] = lambda _: None,
) -> socket.socket:
    """Connect to the first address of a host that responds.

    Args:
        host: Host name or address.
        port: TCP port.
        clock: For the deadline.
        deadline_ms: Monotonic deadline for the lookup and all addresses.
        family: `AF_INET`, `AF_INET6`, or `AF_UNSPEC` for both.
        prepare: Sets options of a socket before it connects.

    Raises:
        LookupFailedError: The host name could not be resolved.
        TimeoutError: The deadline has passed.
        OSError: No address accepted the connection.
    """
    addresses = _addresses(host, port, family, clock, deadline_ms)
    last: OSError = OSError("the host name has no address")
    for tried, (address_family, kind, protocol, _, address) in enumerate(addresses):
        opened = socket.socket(address_family, kind, protocol)
        try:
            # An unreachable address must leave time for the others.
            opened.settimeout(remaining_s(clock, deadline_ms) / (len(addresses) - tried))
            prepare(opened)
            opened.connect(address)
        except OSError as error:
            opened.close()
            last = error
            continue
        return opened
    raise last


def _addresses(host: str, port: int, family: int, clock: Clock, deadline_ms: int) -> _Addresses:
    try:  # an address needs no lookup, and never waits
        numeric = socket.AI_NUMERICHOST
        return socket.getaddrinfo(host, port, family, socket.SOCK_STREAM, 0, numeric)
    except (OSError, UnicodeError):
        pass
    key = (host, port, family)
    with _lock:
        found = _lookups.get(key)
        if found is None:
            found = _lookups[key] = Future()
            name = f"lookup-{host[:40]}"
            threading.Thread(target=_look_up, args=(key, found), name=name, daemon=True).start()
    try:
        return found.result(remaining_s(clock, deadline_ms))
    except TimeoutError as error:
        raise LookupFailedError("no response in time") from error
    except (OSError, UnicodeError) as error:
        raise LookupFailedError(str(error)) from error


def _look_up(key: tuple[str, int, int], found: Future[_Addresses]) -> None:
    host, port, family = key
    try:
        addresses = socket.getaddrinfo(host, port, family, socket.SOCK_STREAM)
    except BaseException as error:  # noqa: BLE001  # whatever it is, the waiting threads get it
        outcome: _Addresses | BaseException = error
    else:
        outcome = addresses
    with _lock:
        del _lookups[key]
    if isinstance(outcome, BaseException):
        found.set_exception(outcome)
    else:
        found.set_result(outcome)

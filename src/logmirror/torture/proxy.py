"""A TCP proxy on loopback that can reset, block or delay connections."""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
from typing import Final, Self

from logmirror.clock import SYSTEM_CLOCK

_CHUNK_BYTES: Final = 1 << 16
_DRIP_MS: Final = 200
_POLL_S: Final = 0.05


class Proxy:
    """Forwards connections from one address to another. A context manager.

    Args:
        listen: Host and port; with port 0 the system chooses one.
        target: Host and port.

    Attributes:
        delay_ms: Delay of each chunk that is forwarded.
        drips: Forward one byte at a time, one each 0.2 s over all connections.
        is_silent: Forward nothing, and keep connections open: packets are lost.
    """

    def __init__(self, listen: tuple[str, int], target: tuple[str, int]) -> None:
        self._target = target
        self._listener = socket.create_server(listen)
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        self.delay_ms = 0
        self.drips = False
        self.is_silent = False
        self._is_closing = False
        self._is_cut = False
        self._peers: dict[socket.socket, socket.socket] = {}
        self._thread = threading.Thread(target=self._serve, daemon=True)

    def cut(self) -> None:
        """Close all connections."""
        self._is_cut = True

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_closing = True
        self._thread.join()

    def _serve(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ)
            while not self._is_closing:
                ready = selector.select(_POLL_S)
                if self._is_cut:
                    self._is_cut = False
                    self._drop_all(selector)
                    continue
                if self.is_silent:
                    SYSTEM_CLOCK.sleep_ms(1000 * _POLL_S)
                    continue
                for key, _ in ready:
                    if key.fileobj is self._listener:
                        self._accept(selector)
                    elif isinstance(key.fileobj, socket.socket):
                        self._forward(selector, key.fileobj)
            self._drop_all(selector)
        self._listener.close()

    def _accept(self, selector: selectors.BaseSelector) -> None:
        try:
            near, _ = self._listener.accept()
        except OSError:
            return
        try:
            far = socket.create_connection(self._target, timeout=1)
        except OSError:
            near.close()
            return
        for one, other in ((near, far), (far, near)):
            one.settimeout(1)
            self._peers[one] = other
            selector.register(one, selectors.EVENT_READ)

    def _forward(self, selector: selectors.BaseSelector, near: socket.socket) -> None:
        if near not in self._peers:
            return  # its other end was closed in this round
        try:
            data = near.recv(1 if self.drips else _CHUNK_BYTES)
            if data:
                SYSTEM_CLOCK.sleep_ms(_DRIP_MS if self.drips else self.delay_ms)
                self._peers[near].sendall(data)
                return
        except OSError:
            pass
        self._drop(selector, near)

    def _drop_all(self, selector: selectors.BaseSelector) -> None:
        for near in list(self._peers):
            self._drop(selector, near)

    def _drop(self, selector: selectors.BaseSelector, near: socket.socket) -> None:
        far = self._peers.pop(near, None)
        if far is None:
            return
        del self._peers[far]
        for end in (near, far):
            with contextlib.suppress(KeyError, ValueError):
                selector.unregister(end)
            end.close()
